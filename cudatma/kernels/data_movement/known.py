"""Launches that calls of the operations keep for later calls, without their arrays, by what determines them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cudatma import context
from cudatma.arrays import ArrayInfo, overlaps
from cudatma.kernels.replay import EmulatedReplay, PlanCache, Replay

#: Calls that are remembered, some 6 KB each.
MOST_CALLS = 1024


@dataclass(frozen=True, slots=True)
class Known:
    """A launch that a call keeps for later calls.

    launches: in order. read: the part of the source that is read, without memory, placed relative to the source. reach:
    first byte and end of what is read, relative to the source, and of what is written, relative to the result; None
    where nothing is written. makes: shape of a result that the call made, and its address modulo 16; None where it was
    given.
    """

    launches: tuple[Replay | EmulatedReplay, ...]
    read: ArrayInfo
    reach: tuple[int, int, int, int] | None
    makes: tuple[tuple[int, ...], int] | None

    def are_apart(self, src: ArrayInfo, out: ArrayInfo) -> bool:
        """Whether nothing of ``out`` is read."""
        if self.reach is None:
            return True
        low, end, first, last = self.reach
        # Most arrays lie one after the other; overlaps() also knows windows of one buffer that lie side by side.
        if src.pointer + end <= out.pointer + first or out.pointer + last <= src.pointer + low:
            return True
        return not overlaps(replace(self.read, pointer=src.pointer + self.read.pointer), out)


#: Empty after a fork: a launch may have been running in another thread.
CALLS: PlanCache[Known] = PlanCache(MOST_CALLS)
context.after_fork(CALLS, PlanCache.clear)
