"""What calls of the operations leave behind: launches without arrays, by what decides them, those used last."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Any

from cudatma import context
from cudatma.arrays import ArrayInfo, overlaps
from cudatma.kernels.data_movement.launches import Launch

#: Calls that are remembered, some 6 KB each.
MOST_CALLS = 1024


@dataclass(frozen=True, slots=True)
class Known:
    """What a call leaves behind.

    launches: in order. read: the part of the source that is read, without memory, placed relative to the source. reach:
    first byte and end of what is read, relative to the source, and of what is written, relative to the result; None
    where nothing is written. makes: shape of a result that the call made, and its address modulo 16; None where it was
    given.
    """

    launches: tuple[Launch, ...]
    read: ArrayInfo
    reach: tuple[int, int, int, int] | None
    makes: tuple[tuple[int, ...], int] | None

    def are_apart(self, src: ArrayInfo, out: ArrayInfo) -> bool:
        """Whether nothing of ``out`` is read."""
        if self.reach is None:
            return True
        low, end, first, last = self.reach
        # Most arrays lie one behind the other; overlaps() also knows windows of one buffer that lie side by side.
        if src.pointer + end <= out.pointer + first or out.pointer + last <= src.pointer + low:
            return True
        return not overlaps(replace(self.read, pointer=src.pointer + self.read.pointer), out)


class Calls:
    """What is known of the calls that were used last, at most so many. Safe from many threads; empty after a fork."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._renew()
        context.after_fork(self, Calls._renew)

    def _renew(self) -> None:
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[Any, ...], Known] = OrderedDict()

    def clear(self) -> None:
        """Forget all of them."""
        with self._lock:
            self._known.clear()

    def __len__(self) -> int:
        return len(self._known)

    def get(self, key: tuple[Any, ...]) -> Known | None:
        with self._lock:
            known = self._known.get(key)
            if known is not None:
                self._known.move_to_end(key)
            return known

    def put(self, key: tuple[Any, ...], known: Known) -> None:
        with self._lock:
            self._known[key] = known
            self._known.move_to_end(key)
            while len(self._known) > self.most:
                self._known.popitem(last=False)


CALLS = Calls(MOST_CALLS)
