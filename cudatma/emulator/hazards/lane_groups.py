"""Parts of a warp that meet without its other lanes: of whose accesses each lane knows, and may publish.

The accesses of a group of lanes count as one agent's. A group is what every meeting so far took as a whole; it is
known from the first meeting of a part of a warp on, to all warps and all later schedules of a launch.
Source: PTX ISA, "bar.warp.sync", "Memory Consistency Model": causality order.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cudatma.emulator.ptx.model import MEMBERS, Imm, Instruction
from cudatma.emulator.ptx.types import LANES, Array

_LANES = np.arange(LANES)


def names_parts(instruction: Instruction) -> bool:
    """Whether parts of a warp may meet at an instruction: its member mask is not the constant of all lanes."""
    parts = instruction.parts
    if parts[:2] != ("bar", "warp") and not (parts[0] in MEMBERS and "sync" in parts):
        return False
    mask = instruction.operands[-1] if instruction.operands else None
    return not (isinstance(mask, Imm) and mask.bits & 0xFFFFFFFF == 0xFFFFFFFF)


def refine(extra: dict[str, Any], meeting: set[int]) -> None:
    """Divide the groups of a launch where a meeting, of each of these sets of lanes, divides one.

    extra: the launch's; "groups" holds of each lane the lowest one of its group.
    """
    first = extra.get("groups")
    divided = np.zeros(LANES, np.int64) if first is None else first
    for bits in meeting:
        _, lowest, place = np.unique(2 * divided + (bits >> _LANES & 1), return_index=True, return_inverse=True)
        divided = lowest[place]
    if first is None or (divided != first).any():
        extra["groups"] = divided


class LaneGroups:
    """One warp's groups. first: of each lane the lowest one of its group.

    now: of each lane its group's clock; known: of each lane (row) how much of each other's clock it has met. epoch: as
    of LaneRaces.
    """

    __slots__ = ("epoch", "first", "known", "now")

    def __init__(self, first: Array, epoch: int) -> None:
        self.first, self.epoch = first, epoch
        self.now: Array = np.ones(LANES, np.int64)
        self.known: Array = np.zeros((LANES, LANES), np.int64)

    def catch_up(self, first: Array, epoch: int) -> bool:
        """True where the warp has met, or is divided anew, since the last call: its lanes know all so far."""
        if self.epoch == epoch and self.first is first:
            return False
        self.first, self.epoch = first, epoch
        self.known[:] = self.now
        self.now += 1
        return True

    def meet(self, meeting: set[int]) -> None:
        """The lanes of each set, as bits, have met: each of them knows what any of them knew."""
        for bits in meeting:
            lanes = np.flatnonzero(bits >> _LANES & 1)
            self.known[lanes] = self.known[lanes].max(axis=0)
            self.known[np.ix_(lanes, lanes)] = self.now[lanes]
            self.now[lanes] += 1

    def divide(self, lanes: Array) -> list[tuple[int, Array]]:
        """(the lowest lane, positions among these lanes) of each group that has some of them."""
        of = self.first[lanes]
        return [(lowest, of == lowest) for lowest in np.unique(of).tolist()]

    def publishable(self, lanes: Array, alone: bool) -> Array:
        """Of each lane's group, how much of its clock these lanes know. alone: one lane publishes what it has met."""
        found: Array = self.known[lanes].max(axis=0)
        if not alone:
            found = np.where(np.isin(self.first, self.first[lanes]), self.now, found)
        return found
