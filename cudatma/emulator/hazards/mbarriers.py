"""Checks of the mbarrier protocol: init and fence before use, arrivals, bytes, and pending copies at the end.

Source: PTX ISA, "mbarrier", "fence.mbarrier_init", "Async proxy".
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cudatma.emulator.async_copy.mbarrier import MBarrier
from cudatma.emulator.hazards.agents import Agents, lanes_now
from cudatma.emulator.hazards.clocks import INITS
from cudatma.emulator.hazards.findings import Reporter
from cudatma.emulator.hazards.shared_memory import SharedMemory, uses_proxy
from cudatma.emulator.hazards.shared_races import SharedRaces, phase_name
from cudatma.emulator.machine.events import Copy, Observer
from cudatma.emulator.machine.program import Program
from cudatma.emulator.machine.state import Block, Cluster, Warp


@dataclass(slots=True)
class BarrierRecord:
    """State of an mbarrier for the checks: its init, copies and waits.

    Attributes
    ----------
    w, at, lanes, epoch
        Warp and instruction of the init, the lanes (as bits) that executed it, and the warp's epoch.
    agent, clock
        Agent and clock of the init. A thread whose clock includes them is ordered after the init.
    own_agent, own_clock
        Agent and clock of inits by only these lanes. A fence covers the init if ``Clock.proxy`` includes them.
    is_fenced
        Whether a fence by the same warp covers the init.
    expected, expected_before
        The (warp, instruction) that last expected bytes in the current phase, and in an earlier phase.
    copy
        Last copy that was issued on this mbarrier.
    landed, awaited
        Phase of the last completed copy, and last phase whose end a wait has observed. Phases are counted from 1.
    """

    w: Warp
    at: int
    lanes: int
    epoch: int
    agent: int
    clock: int
    own_agent: int
    own_clock: int
    is_fenced: bool = False
    expected: tuple[Warp, int] | None = None
    expected_before: tuple[Warp, int] | None = None
    copy: Copy | None = None
    landed: int = 0
    awaited: int = 0


class BarrierRecords:
    """Records of the mbarriers in a cluster, and the inits that no fence covers yet."""

    def __init__(self, agents: Agents) -> None:
        self._agents = agents
        self._records: dict[MBarrier, BarrierRecord] = {}
        #: Maps each warp to its inits that no fence covers yet.
        self._unfenced: dict[int, list[BarrierRecord]] = {}

    def of(self, barrier: MBarrier) -> BarrierRecord:
        return self._records[barrier]

    def begin(self, w: Warp, at: int, barrier: MBarrier, lanes: int, stamp: tuple[int, int]) -> None:
        """Record an init by ``lanes`` (bits) with the agent and clock in ``stamp``."""
        own = self._agents.agent(("init", w.agent, lanes), "init")
        clocks = self._agents.every_clock(w)
        now = int(clocks[0].order[own]) + 1
        for known in clocks:
            known.order[own] = now
        record = self._records[barrier] = BarrierRecord(w, at, lanes, self._agents.epoch(w), *stamp, own, now)
        self._unfenced.setdefault(w.agent, []).append(record)

    def fence(self, w: Warp, epoch: int = -1) -> list[int]:
        """Mark the inits by the threads that execute the fence, and those by the warp before ``epoch``, as fenced.

        Return the agents of the warp's inits that the fence does not cover.
        """
        lanes = lanes_now(w)
        left = []
        for record in self._unfenced.pop(w.agent, []):
            record.is_fenced = bool(record.lanes & lanes) or record.epoch < epoch
            if not record.is_fenced:
                left.append(record)
        if left:
            self._unfenced[w.agent] = left
        return [record.own_agent for record in left]


class MBarriers(Observer):
    """Hazard check for all uses of the mbarriers in a cluster."""

    def __init__(
        self,
        cluster: Cluster,
        agents: Agents,
        memory: SharedMemory,
        records: BarrierRecords,
        races: SharedRaces,
        reporter: Reporter,
    ) -> None:
        self._cluster, self._agents, self._memory = cluster, agents, memory
        self._records, self._races, self._reporter = records, races, reporter

    # ---- init and inval

    def mbarrier_init(self, w: Warp, at: int, barrier: MBarrier, old: MBarrier | None, lanes: int) -> None:
        if old is not None:
            message = f"mbarrier.init is executed on a live mbarrier: {old.describe()}"
            self._reporter.report("barrier_reinitialized", w, at, message, places=[old.place])
        shadow = self._memory.shadows[barrier.block.rank]
        indices = shadow.granules(np.array([barrier.offset]), 8)
        shadow.is_barrier[indices] = False
        self._races.check_write(w, at, shadow, indices, self._agents.known(w))
        shadow.is_barrier[indices] = True
        stamp = self._agents.stamp(w, 1)
        shadow.record_write(indices, *stamp, at, False)
        self._records.begin(w, at, barrier, lanes, stamp)

    def mbarrier_inval(self, w: Warp, at: int, barrier: MBarrier) -> None:
        """Check that the mbarrier's copies have completed, and treat its bytes as ordinary memory afterward."""
        self._check_loads(barrier, f"{barrier.name} is invalidated", w, at)
        shadow = self._memory.shadows[barrier.block.rank]
        indices = shadow.granules(np.array([barrier.offset]), 8)
        shadow.is_barrier[indices] = False
        shadow.record_write(indices, *self._agents.stamp(w, 1), at, False)

    def mbarrier_used(self, w: Warp, at: int, barrier: MBarrier, what: str) -> None:
        """Check that a use is ordered after the init."""
        record, known = self._records.of(barrier), self._agents.known(w)
        if record.clock <= known.order[record.agent]:
            return
        inits = known.far.fenced.get(INITS) if known.far is not None else None
        if inits is None or record.clock > inits.order[record.agent]:
            who = self._agents.who(record.agent)
            message = f"{what} on {barrier.name} is not ordered after mbarrier.init by {who}"
            self._reporter.report("missing_init_sync", w, at, message, places=[barrier.place])

    # ---- arrivals, waits and copies

    def arrivals_over(self, w: Warp, program: Program, at: int, barrier: MBarrier, number: int, expects: bool) -> None:
        """Report an instruction with more arrivals than are pending.

        The overflow is the root cause if the instruction exceeds the mbarrier's count or if no other hazard precedes
        it.
        """
        reporter = self._reporter
        is_derived = number <= barrier.count and (expects or reporter.bytes_follow or self._races.is_astray)
        reporter.out_of_step(by_bytes=self._races.lacks_bytes(barrier))
        message = f"an instruction arrives {number} times, which exceeds the pending arrivals of {barrier.describe()}"
        places = [barrier.place]
        reporter.findings.add("arrival_overflow", message, program, at, w, places=places, is_derived=is_derived)

    def mbarrier_acquired(self, w: Warp, at: int, barrier: MBarrier, order: str) -> None:
        self._records.of(barrier).awaited = barrier.phase

    def copy_issued(self, copy: Copy) -> None:
        """Check that a fence covers the init if the copy uses the async proxy."""
        barrier: MBarrier | None = copy.barrier
        if barrier is None:
            return
        record = self._records.of(barrier)
        record.copy = copy
        if record.is_fenced or not uses_proxy(copy):
            return
        if record.own_clock > self._agents.known(copy.w).proxy_in(barrier.block.rank)[record.own_agent]:
            unfenced = "but mbarrier.init of this mbarrier was not fenced for the async proxy"
            message = f"a copy completes on {barrier.name}, {unfenced}"
            program, places = self._reporter.launch.program, [barrier.place]
            self._reporter.findings.add("missing_init_fence", message, program, record.at, copy.w, places=places)

    def copy_landed(self, copy: Copy) -> None:
        barrier: MBarrier | None = copy.barrier
        if barrier is not None:
            self._records.of(barrier).landed = barrier.phase + 1
            if barrier.phase > copy.phase:
                self._reporter.out_of_step(by_bytes=True)

    # ---- bytes

    def bytes_expected(self, w: Warp, at: int, barrier: MBarrier) -> None:
        self._records.of(barrier).expected = w, at

    def phase_ended(self, barrier: MBarrier) -> None:
        record = self._records.of(barrier)
        record.expected, record.expected_before = None, record.expected or record.expected_before

    def bytes_over(self, barrier: MBarrier) -> None:
        """Report a phase with more or fewer bytes than expected."""
        record, reporter = self._records.of(barrier), self._reporter
        owner, at = record.expected or record.expected_before or (record.w, record.at)
        message = f"{barrier.missing_bytes()} at {barrier.describe()}"
        program, places, is_derived = reporter.launch.program, [barrier.place], reporter.bytes_follow
        reporter.findings.add("byte_count", message, program, at, owner, places=places, is_derived=is_derived)

    def trapped(self) -> None:
        self._check_bytes()

    def cluster_ended(self) -> None:
        self._check_bytes()

    def _check_bytes(self) -> None:
        """Report phases that wait for bytes that no copy in flight will transfer."""
        for block in self._cluster.blocks:
            for barrier in block.mbarriers.values():
                if barrier.pending == 0 and barrier.tx > 0 and not self._memory.is_filling(barrier):
                    self.bytes_over(barrier)

    def block_ended(self, block: Block) -> None:
        for barrier in block.mbarriers.values():
            if barrier.tx < 0:
                self.bytes_over(barrier)
            else:
                self._check_loads(barrier, f"block {block.index} ends")

    def _check_loads(self, barrier: MBarrier, what: str, w: Warp | None = None, at: int = -1) -> None:
        """Report an mbarrier that is invalidated, or whose CTA exits, while a copy may be in flight.

        The copy may be in flight because no warp has waited for it.

        If a missing or early wait on this mbarrier has been reported, this hazard is a consequence and is omitted.
        ``w`` and ``at`` are the warp and instruction that invalidate the mbarrier, if any.
        """
        record, is_filling = self._records.of(barrier), self._memory.is_filling(barrier)
        if record.copy is None or (not is_filling and record.landed <= record.awaited):
            return
        findings, copy = self._reporter.findings, record.copy
        if findings.has(barrier.place, "read_before_load", "wrong_parity", "byte_count"):
            return
        phase = phase_name(barrier.block, barrier.offset, barrier.phase if is_filling else record.landed - 1)
        line = copy.program.instruction(copy.at).line
        message = f"{what} while the copy issued at PTX line {line} may be in flight; no thread has waited for {phase}"
        if w is not None:
            self._reporter.report("exit_with_pending_load", w, at, message)
        else:
            findings.add("exit_with_pending_load", message, copy.program, copy.at, copy.w)
