"""Detect races between lanes of a warp: accesses by different lanes without a synchronization in between.

Since Volta, the lanes of a warp run independently, so lockstep execution does not order their accesses. An instruction
that the whole warp executes together synchronizes the lanes (bar.warp.sync, bar.sync, shfl, vote, match, elect, mma,
ldmatrix, wgmma.fence). An instruction with a member mask synchronizes only the lanes in the mask. The check also treats
an acquire (a wait for an mbarrier, an acquiring load, a fence) as a synchronization, because the other lanes may have
released their accesses.

Source: PTX ISA, "Memory Consistency Model", "bar.warp.sync".
"""

from __future__ import annotations

import numpy as np

from cudatma.emulator.async_copy.groups import Group
from cudatma.emulator.hazards.agents import Agents, only_lane
from cudatma.emulator.hazards.findings import Reporter
from cudatma.emulator.hazards.shared_memory import Shadow, SharedMemory
from cudatma.emulator.machine.events import Copy, Observer, Same
from cudatma.emulator.machine.state import Warp
from cudatma.emulator.ptx.types import LANES, Array

#: Fields of a stamp from the highest bits to the lowest: the warp, the number of the warp's synchronizations, the
#: number of the lane's partial synchronizations since then, and the lane (32 means all lanes together).
_LANE_BITS, _COUNT_BITS, _EPOCH_BITS = 6, 12, 22
_LANE, _COUNT = (1 << _LANE_BITS) - 1, (1 << _COUNT_BITS) - 1
_TOGETHER = np.array([LANES], np.int64)
_LANES = np.arange(LANES, dtype=np.int64)
_NO_MEETINGS = np.zeros(LANES + 1, np.int64)
#: Cause of a race in which several lanes write the same bytes with one instruction.
_CONTENDED = (
    "several lanes write the same bytes with one instruction, which __syncwarp cannot order; use atomicAdd or another "
    "atomic operation, or let only one lane write"
)


#: Cause of a race at bytes that another instruction has read earlier.
_UPDATED = (
    "several lanes read and then write the same bytes; use atomicAdd or another atomic operation to update a value, or "
    "__syncwarp between the read and the write"
)


def cause_of_write(indices: Array, place: int, after_read: bool) -> str:
    """Return the cause of a race at a granule of a write, or "" for the usual cause."""
    if np.count_nonzero(indices == place) < 2:
        return ""
    return _UPDATED if after_read else _CONTENDED


class LaneRaces(Observer):
    """Hazard check that compares the stamps of accesses.

    A stamp consists of the warp, its last synchronization, and the lane. Two accesses race if their stamps differ only
    in the lane. This class handles events of shared memory. global_races.GlobalRaces uses its stamps for global memory.
    """

    def __init__(self, agents: Agents, memory: SharedMemory, reporter: Reporter, number: int) -> None:
        """Create the check for cluster ``number``."""
        self._agents, self._memory, self._reporter = agents, memory, reporter
        #: Stamps of the last ordinary write and the last ordinary read of each granule, per CTA. Only the lane is
        #: stored for a cp.async.
        self._writes: list[Array] = [np.zeros(shadow.count, np.int64) for shadow in memory.shadows]
        self._reads: list[Array] = [np.zeros(shadow.count, np.int64) for shadow in memory.shadows]
        self._first = number * agents.warps + 1
        self._wrote: dict[int, int] = {}
        self._read: dict[int, int] = {}
        self._bases: dict[int, tuple[int, Array, Array]] = {}
        #: Maps each warp to its epoch and a matrix. Entry (row, column) is the latest partial synchronization of the
        #: column's lane that is ordered before the row's lane.
        self._partly: dict[int, tuple[int, Array]] = {}
        #: Maps each warp to the epoch of its last wait for cp.async groups, the first group that is new in this epoch,
        #: and the number of each lane's partial synchronizations before the wait.
        self._copies: dict[int, tuple[int, int, Array]] = {}

    def stamps(self, w: Warp, count: int, together: bool = False) -> Array:
        """Return the stamps of ``count`` granules, which are split evenly among the lanes in lane order."""
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
            return np.zeros(count, np.int64)  # Not checked, because the lanes access several buffers or CTAs.
        return active if each == 1 else active.repeat(each)

    def lanes_met(self, w: Warp, groups: set[int]) -> None:
        """Synchronize each group. Its lanes acquire all accesses that any lane of the group has acquired."""
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
        if met.max() == _COUNT:
            self._agents.count_acquire(w)  # The counter has reached its maximum.

    def _part_meetings(self, w: Warp) -> Array | None:
        known = self._partly.get(w.agent)
        return known[1] if known is not None and known[0] == self._agents.epoch(w) else None

    def conflict(self, w: Warp, known: Array, stamps: Array) -> int:
        """Return the position of an unsynchronized access by another lane, or -1."""
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
        """Return the lane of a stamp as text for messages."""
        number = stamp & _LANE
        return f"lane {number}" if number < LANES else "the whole warp"

    # ---- accesses to shared memory, before they are recorded

    def check_read(self, w: Warp, at: int, shadow: Shadow, indices: Array) -> None:
        """Check an ordinary read against writes and cp.async copies by other lanes since the last synchronization."""
        stamps, epoch = self.stamps(w, len(indices)), self._agents.epoch(w)
        if self._wrote.get(w.agent) == epoch:
            self._report(w, at, shadow, indices, self._writes[shadow.rank], stamps, "wrote")
        if w.agent in self._copies:
            self._check_own_copies(w, at, shadow, indices, stamps)
        self._read[w.agent] = epoch
        self._reads[shadow.rank][indices] = stamps

    def _check_own_copies(self, w: Warp, at: int, shadow: Shadow, indices: Array, stamps: Array) -> None:
        """Report a read of bytes that another lane's cp.async copied if the wait covered only this lane's copies."""
        epoch, first, meetings = self._copies[w.agent]
        if epoch != self._agents.epoch(w):
            return
        theirs = (shadow.writer[indices] == self._agents.cp_agent(w)) & (shadow.writer_clock[indices] > first)
        before, now = self._writes[shadow.rank][indices] & _LANE, stamps & _LANE
        theirs &= before != now
        met = self._part_meetings(w)
        if met is not None:
            theirs &= met[now, before] <= meetings[before]
        if theirs.any():
            text = "another lane's cp.async wrote these bytes, but this lane has waited only for its own copies"
            place = int(indices[int(theirs.argmax())])
            self._reporter.report_bytes("lane_race", w, at, text, shadow, place, indices)

    def check_write(self, w: Warp, at: int, shadow: Shadow, indices: Array, together: bool, same: Same) -> None:
        """Check an ordinary write against writes and reads by other lanes since the last synchronization."""
        stamps, epoch = self.stamps(w, len(indices), together), self._agents.epoch(w)
        writes, reads = self._writes[shadow.rank], self._reads[shadow.rank]
        if not together:
            for last, known, verb in ((self._wrote, writes, "wrote"), (self._read, reads, "reads")):
                is_recent = last.get(w.agent) == epoch
                if is_recent and self.conflict(w, known[indices], stamps) >= 0 and not same():
                    self._report(w, at, shadow, indices, known, stamps, verb, is_write=True)
        self._wrote[w.agent] = epoch
        writes[indices] = stamps

    def check_copy(self, copy: Copy, shadow: Shadow, indices: Array) -> None:
        """Check a copy by a single lane against accesses by other lanes, and record the copying lanes."""
        lanes, writes = copy.lanes, self._writes[shadow.rank]
        if copy.what != "cp.async" and only_lane(copy.w) >= 0:
            stamps = self.stamps(copy.w, len(indices))
            self._report(copy.w, copy.at, shadow, indices, writes, stamps, "wrote")
            self._report(copy.w, copy.at, shadow, indices, self._reads[shadow.rank], stamps, "reads")
        writes[indices] = 0 if lanes is None else lanes.repeat(len(indices) // len(lanes))

    def check_source(self, w: Warp, at: int, shadow: Shadow, indices: Array) -> None:
        """Check a copy from shared memory by a single lane against writes by other lanes."""
        if only_lane(w) >= 0:
            self._report(w, at, shadow, indices, self._writes[shadow.rank], self.stamps(w, len(indices)), "wrote")

    # ---- waits for cp.async groups

    def groups_waited(self, w: Warp, at: int, kind: str, waited: list[Group], reads_only: bool) -> None:
        """Record the first cp.async group that is new to the warp. Each lane has waited only for its own copies."""
        if kind == "bulk":
            return
        epoch, met = self._agents.epoch(w), self._part_meetings(w)
        first = int(self._agents.clocks[w.agent].order[self._agents.cp_agent(w)])
        known = self._copies.get(w.agent)
        if known is not None and known[0] == epoch:
            first = min(first, known[1])
        self._copies[w.agent] = epoch, first, _NO_MEETINGS if met is None else met.diagonal().copy()

    def _report(
        self,
        w: Warp,
        at: int,
        shadow: Shadow,
        indices: Array,
        known: Array,
        stamps: Array,
        verb: str,
        is_write: bool = False,
    ) -> None:
        """Report a conflict with the accesses in ``known``, if there is one."""
        position = self.conflict(w, known[indices], stamps)
        if position >= 0:
            place = int(indices[position])
            lane = self.lane(int(known[place]))
            text = f"{lane} of the same warp {verb} these bytes, but the lanes have not synchronized since"
            read_at = shadow.last_read(place, self._agents.of_warp(w)) if verb == "reads" else -1
            cause = cause_of_write(indices, place, verb == "reads") if is_write else ""
            self._reporter.report_bytes("lane_race", w, at, text, shadow, place, indices, read_at, cause=cause)
