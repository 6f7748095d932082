"""Races between lanes of one warp: accesses by different lanes with nothing in between where the lanes meet.

Since Volta lanes of a warp run independently: that they happened to run together orders nothing. A meeting is any
instruction that the whole warp executes together (bar.warp.sync, bar.sync, shfl, vote, match, elect, mma, ldmatrix,
wgmma.fence); where its mask names some lanes, only those have met. Whatever acquires (a wait for an mbarrier,
an acquiring load, a fence) counts as one, too, since what a lane has released is then known to the other lanes. Source:
PTX ISA, "Memory Consistency Model", "bar.warp.sync".
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from cudatma.emulator.hazards.agents import Agents
from cudatma.emulator.hazards.clocks import lane_bits
from cudatma.emulator.hazards.shadow import Shadow
from cudatma.emulator.machine.state import Warp
from cudatma.emulator.ptx.types import LANES, Array

#: A stamp holds, from the highest bit: the warp, how often it has met, of each lane how often it has met some others
#: since, and the lane; 32 means all lanes together.
_LANE_BITS, _COUNT_BITS, _EPOCH_BITS = 6, 12, 22
_LANE, _COUNT = (1 << _LANE_BITS) - 1, (1 << _COUNT_BITS) - 1
_TOGETHER = np.array([LANES], np.int64)
_LANES = np.arange(LANES, dtype=np.int64)


class LaneRaces:
    """Packs (warp, meeting, lane) of accesses into integers, and finds two that differ in the lane alone."""

    def __init__(self, agents: Agents, number: int, tell: Callable[..., None]) -> None:
        """number: of the cluster. tell: Checks.tell."""
        self._agents, self._report = agents, tell
        self._first = number * agents.warps + 1
        self._wrote: dict[int, int] = {}
        self._read: dict[int, int] = {}
        self._bases: dict[int, tuple[int, Array, Array]] = {}
        # By agent: the epoch, and how many part meetings of each lane (column) each lane (row) knows of in it.
        self._partly: dict[int, tuple[int, Array]] = {}
        self._copies: dict[int, tuple[int, int]] = {}

    def stamps(self, w: Warp, count: int, together: bool = False) -> Array:
        """Who accesses each of ``count`` granules: as many a lane, lane after lane."""
        epoch = self._agents.epoch(w)
        known = self._bases.get(w.agent)
        if known is None or known[0] != epoch:
            base = ((self._first + w.agent) << _EPOCH_BITS | epoch & (1 << _EPOCH_BITS) - 1) << _COUNT_BITS + _LANE_BITS
            lanes = _LANES + base
            met = self._part_meetings(w)
            if met is not None:
                lanes += met.diagonal()[:LANES] << _LANE_BITS
            known = self._bases[w.agent] = (epoch, lanes, _TOGETHER + base)
        every = known[1]
        if together:
            return known[2]
        if w.split.is_full and w.guard is None:
            active = every
        else:
            active = every[w.split.mask if w.guard is None else w.split.mask & w.guard]
        each, rest = divmod(count, len(active))
        if rest:
            return np.zeros(count, np.int64)  # lanes whose addresses lie in several memories are not followed
        return active if each == 1 else active.repeat(each)

    def some_met(self, w: Warp, groups: set[int]) -> None:
        """The lanes of each group, as bits, have met: each knows what any of them knew of others."""
        epoch = self._agents.epoch(w)
        met = self._part_meetings(w)
        if met is None:
            met = np.zeros((LANES + 1, LANES + 1), np.int64)
            self._partly[w.agent] = epoch, met
        for bits in groups:
            lanes = np.flatnonzero(bits >> _LANES & 1)
            met[lanes, lanes] += 1
            met[lanes, LANES] = 1
            met[lanes] = met[lanes].max(axis=0, initial=0)
        self._bases.pop(w.agent, None)
        self._copies.pop(w.agent, None)
        if met.max() == _COUNT:
            self._agents.acquired(w)  # the counter is full

    def _part_meetings(self, w: Warp) -> Array | None:
        known = self._partly.get(w.agent)
        return known[1] if known is not None and known[0] == self._agents.epoch(w) else None

    def conflict(self, w: Warp, known: Array, stamps: Array) -> int:
        """The position of an access by another lane of the warp that has not met this one since, -1 for none."""
        difference = known ^ stamps
        late = (difference > 0) & (difference < 1 << _COUNT_BITS + _LANE_BITS)
        if not np.count_nonzero(late):
            return -1
        met = self._part_meetings(w)
        if met is not None:
            before, now = known & _LANE, stamps & _LANE
            late &= (before != now) & (met[now, before % (LANES + 1)] <= (known >> _LANE_BITS & _COUNT))
        return int(late.argmax()) if np.count_nonzero(late) else -1

    @staticmethod
    def lane(stamp: int) -> str:
        """The lane of a stamp, for messages."""
        number = stamp & _LANE
        return f"lane {number}" if number < LANES else "the whole warp"

    # ---- which warps need to be looked at

    def reads(self, w: Warp) -> bool:
        """Note that the warp reads; whether it has written since its lanes met."""
        epoch = self._agents.epoch(w)
        self._read[w.agent] = epoch
        return self._wrote.get(w.agent) == epoch

    def writes(self, w: Warp) -> tuple[bool, bool]:
        """Note that the warp writes; whether it has written, and read, since its lanes met."""
        epoch = self._agents.epoch(w)
        wrote, read = self._wrote.get(w.agent) == epoch, self._read.get(w.agent) == epoch
        self._wrote[w.agent] = epoch
        return wrote, read

    # ---- waits that one lane made for itself

    def copies_waited(self, w: Warp, first: int, agent: int) -> None:
        """cp.async groups from number ``first`` on were waited for: a lane's own copies are complete for it alone."""
        epoch = self._agents.epoch(w)
        known = self._copies.get(agent)
        self._copies[agent] = (epoch, first if known is None or known[0] != epoch else min(first, known[1]))

    def own_copies_from(self, w: Warp, agent: int) -> int:
        """The first cp.async group that each lane has waited for by itself since the lanes met; -1 for none."""
        known = self._copies.get(agent)
        return known[1] if known is not None and known[0] == self._agents.epoch(w) else -1

    def single(self, w: Warp) -> int:
        """The lane that executes the instruction alone, -1 where several do."""
        bits = lane_bits(w.split.mask if w.guard is None else w.split.mask & w.guard)
        return bits.bit_length() - 1 if bits & (bits - 1) == 0 else -1

    # ---- shared memory

    def read(self, w: Warp, at: int, shadow: Shadow, indices: Array) -> None:
        """Plain reads against what other lanes of the warp wrote, or copied with cp.async, since the lanes met."""
        stamps = self.stamps(w, len(indices))
        if self.reads(w):
            self._tell(w, at, shadow, indices, shadow.lane_writes, stamps, "wrote")
        first = self.own_copies_from(w, self._agents.cp_agent(w))
        if first >= 0:
            theirs = (shadow.writer[indices] == self._agents.cp_agent(w)) & (shadow.writer_clock[indices] > first)
            theirs &= (shadow.lane_writes[indices] ^ stamps) & _LANE != 0
            if theirs.any():
                text = "another lane's cp.async filled these bytes: the wait for it was this lane's own only"
                self._report("lane_race", w, at, text, shadow, int(indices[int(theirs.argmax())]), indices)
        shadow.lane_reads[indices] = stamps

    def write(
        self, w: Warp, at: int, shadow: Shadow, indices: Array, together: bool, same: Callable[[], bool] | None
    ) -> None:
        stamps = self.stamps(w, len(indices), together)
        wrote, read = self.writes(w)
        for known, verb in ((shadow.lane_writes, "wrote"),) * wrote + ((shadow.lane_reads, "reads"),) * read:
            if not together and self.conflict(w, known[indices], stamps) >= 0 and not (same is not None and same()):
                self._tell(w, at, shadow, indices, known, stamps, verb)
        shadow.lane_writes[indices] = stamps

    def _tell(self, w: Warp, at: int, shadow: Shadow, indices: Array, known: Array, stamps: Array, verb: str) -> None:
        position = self.conflict(w, known[indices], stamps)
        if position >= 0:
            place = int(indices[position])
            text = f"{self.lane(int(known[place]))} of the same warp {verb} these bytes, and the lanes did not meet"
            read_at = shadow.last_read(place, self._agents.of_warp(w)) if verb == "reads" else -1
            self._report("lane_race", w, at, text, shadow, place, indices, read_at)

    def copy(self, w: Warp, at: int, shadow: Shadow, indices: Array, writes: bool) -> None:
        """A copy that one lane issues, against what other lanes of its warp wrote, or read, since the lanes met."""
        lane = self.single(w)
        if lane < 0:
            return
        stamps = self.stamps(w, len(indices))
        self._tell(w, at, shadow, indices, shadow.lane_writes, stamps, "wrote")
        if writes:
            self._tell(w, at, shadow, indices, shadow.lane_reads, stamps, "reads")
