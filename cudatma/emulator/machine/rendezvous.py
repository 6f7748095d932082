"""Lanes that parted find each other again at an instruction that they execute together.

A compiler may send diverged lanes to one bar.sync, shuffle or mma by paths that join before the immediate
post-dominator of their branch. As on hardware the lanes that come first wait there for the others.

Source: PTX ISA, "shfl.sync", "bar.warp.sync" ("wait until all non-exited threads corresponding to membermask have
executed" it), "bar", "mma" (.aligned).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cudatma.emulator.machine.machine import SWITCH, Join, Split, Warp
from cudatma.emulator.ptx.types import Array
from cudatma.emulator.ptx.writer import runtime


@dataclass(slots=True)
class Wait:
    """A split that waits for other lanes of its warp. members: (32,) bool, the lanes that the instruction names."""

    split: Split
    at: int
    members: Array
    may_time_out: bool = True
    is_joint: bool = True

    @property
    def missing(self) -> Array:
        """Live lanes that have not come."""
        lanes: Array = self.members & self.split.warp.alive & ~self.split.mask
        return lanes

    def describe(self) -> str:
        lanes = int(np.packbits(self.missing, bitorder="little").view(np.uint32)[0])
        return f"lanes {lanes:#x} of its warp"


@runtime
def meet(w: Warp, at: int, members: Array | None) -> int:
    """Bring the lanes of a joint instruction together before it is executed.

    0: go on (all have come, or the others cannot come: the instruction reports it); BLOCK: wait; SWITCH: the running
    split has grown and begins the segment again.
    """
    split = w.split
    if split.token is not None:  # woken by the barrier that it had joined
        return 0
    w.waiting[:] = [wait for wait in w.waiting if wait.split is not split]
    lanes = w.alive if members is None else _bits(int(members[split.mask.argmax()]))
    wait = Wait(split, at, lanes)
    if not wait.missing.any():
        return 0
    grown = False
    for other in list(w.waiting):
        if other.split.pc == split.pc and other.split.frame is split.frame and (other.split.mask & wait.missing).any():
            _absorb(w, split, other.split)
            grown = True
    if split.timed_out or not _may_come(w, wait):
        split.timed_out = False
        return SWITCH if grown else 0
    if wait.missing.any():
        w.waiting.append(wait)
        return w.launch.scheduler.block(split, wait)
    return SWITCH


def lanes_moved(w: Warp) -> None:
    """Lanes have left the kernel or wait at a join: let go whom they will not meet any more."""
    for wait in list(w.waiting):
        if not _may_come(w, wait):
            w.waiting.remove(wait)
            w.launch.scheduler.wake([wait.split])


def _may_come(w: Warp, wait: Wait) -> bool:
    """Whether all that is missing is still on its way: not parked at a join, nor waiting for these lanes elsewhere."""
    missing = wait.missing
    coming = np.zeros_like(missing)
    for other in w.splits:
        if other is not wait.split:
            there = other.waits_for
            stuck = isinstance(there, Wait) and other.pc != wait.split.pc and (there.missing & wait.split.mask).any()
            if not stuck:
                coming |= other.mask
    return bool(missing.any()) and not (missing & ~coming).any()


def _bits(members: int) -> Array:
    lanes: Array = np.unpackbits(np.array([members], "<u4").view(np.uint8), bitorder="little").view(bool)
    return lanes


def _absorb(w: Warp, split: Split, other: Split) -> None:
    """Make two splits at one place into one; it goes on to the innermost join that both would have come to."""
    w.waiting[:] = [wait for wait in w.waiting if wait.split is not other]
    w.remove(other)
    split.widen(other.mask)
    above = _ancestors(split.join)
    common = next((join for join in _ancestors(other.join) if any(join is known for known in above)), None)
    left = [join for join in (split.join, other.join) if join is not None and join is not common]
    if common is not None:
        common.missing += len(left) - 1
    split.join = common
    for join in left:
        w.one_less(join)


def _ancestors(join: Join | None) -> list[Join]:
    found: list[Join] = []
    while join is not None:
        found.append(join)
        join = join.parent
    return found
