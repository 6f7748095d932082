"""Lanes that wait for other lanes of their warp, and whether these may still arrive.

Source: PTX ISA, "shfl.sync", "bar.warp.sync" ("wait until all non-exited threads corresponding to membermask have
executed" it), "bar", "mma" (.aligned).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cudatma.emulator.machine.state import Split, Warp
from cudatma.emulator.ptx.types import Array


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


def lanes_moved(w: Warp) -> None:
    """Lanes have left the kernel or wait at a join: let go whom they will not meet any more."""
    for wait in list(w.waiting):
        if not may_come(w, wait):
            w.waiting.remove(wait)
            w.launch.scheduler.wake([wait.split])


def may_come(w: Warp, wait: Wait) -> bool:
    """Whether all that is missing may still arrive: not parked at a join, nor waiting for these lanes elsewhere."""
    missing = wait.missing
    coming = np.zeros_like(missing)
    for other in w.splits:
        if other is not wait.split:
            there = other.waits_for
            stuck = isinstance(there, Wait) and other.pc != wait.split.pc and (there.missing & wait.split.mask).any()
            if not stuck:
                coming |= other.mask
    return bool(missing.any()) and not (missing & ~coming).any()
