"""Waits that are tried again: which loops retry for ever, which give up after a count, whether anything still changes.

mbarrier.try_wait may return false at any time: it is "potentially blocking", up to a time limit that depends on the
system. Source: PTX ISA, "mbarrier.test_wait, mbarrier.try_wait".
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

from cudatma.emulator.machine.state import Frame, Split, Warp

#: How often the try_waits of one place time out in a schedule before they only wait.
MOST_TIME_OUTS = 10_000
#: Steps in which nobody does anything but count, after which they are taken to go round in circles all the same.
_MOST_FRUITLESS = 1_000_000
#: States that a stall remembers; a cycle shorter than that is found.
_MOST_STATES = 100_000


def state_of(split: Split) -> int:
    """A hash of all that decides what a split does next, for as long as shared and global memory do not change."""
    warp, mask = split.warp, split.mask
    parts: list[Any] = [split.pc, mask.tobytes()]
    frame: Frame | None = split.frame
    pc = split.pc
    while frame is not None:
        if pc >= 0:
            for index in frame.program.live_registers(pc):
                value = frame.registers[index]
                parts.append(value.tobytes() if split.is_full else value[..., mask].tobytes())
        pc, frame = frame.return_to, frame.caller
        parts.append(pc)
    if warp.local_bytes:
        parts.append(warp.local.data.tobytes())
    return hash(tuple(parts))


class Retries:
    """Which try_waits time out. A loop that comes back with nothing changed retries for ever: from then on its waits
    are suspended until their phase ends. All other waits time out again and again, so that they give up."""

    def __init__(self, chance: float, draw: random.Random) -> None:
        """chance: of timing out, for a wait that is not known to be retried for ever."""
        self._chance, self._draw = chance, draw
        self._endless: set[tuple[Any, int, int]] = set()
        self._tried: dict[tuple[Any, int, int], set[tuple[Warp, int]]] = {}

    def times_out(self, split: Split, at: int) -> bool:
        """Whether a try_wait whose phase has not ended returns false now instead of waiting."""
        place = split.frame.program, at, split.frame.return_to
        if not self._chance or place in self._endless:
            return False
        tried = self._tried.setdefault(place, set())
        state = split.warp, state_of(split)
        if state in tried:
            self._endless.add(place)
            return False
        if len(tried) >= MOST_TIME_OUTS or self._draw.random() >= self._chance:
            return False
        tried.add(state)
        return True


class Stall:
    """Notices that all who are left go round in circles: nothing changes but, perhaps, counters of their own."""

    def __init__(self) -> None:
        self.progress = -1
        self._began = 0
        self._seen: set[tuple[Warp, int]] = set()

    def repeats(self, progress: int, steps: int, splits: Iterable[Split]) -> bool:
        """Whether each split has been where it is, with the same registers, since anybody last did something.

        A wait that is bounded by a count never repeats: it ends by itself. progress: what anybody has done, counted;
        steps: of all.
        """
        if progress != self.progress:
            self.progress, self._began = progress, steps
            self._seen.clear()
        elif len(self._seen) > _MOST_STATES:
            self._seen.clear()
        now = {(split.warp, state_of(split)) for split in splits}
        is_old = now <= self._seen
        self._seen |= now
        return is_old or steps - self._began > _MOST_FRUITLESS
