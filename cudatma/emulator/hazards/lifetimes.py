"""Check that CTAs do not exit, and that mbarriers are not invalidated, while they are still in use.

The shared memory of a CTA ceases to exist when its last thread exits. Accesses by another CTA must happen before at
least one thread of the owning CTA exits. The check uses the clocks of the threads at their exit, so the result does not
depend on the schedule. The CTA's bulk stores must also have read their source.

Source: PTX ISA, "Memory Consistency Model" (causality order), "cp.async.bulk", "mbarrier.inval"; CUDA C++ Programming
Guide, "Distributed Shared Memory".
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from cudatma.emulator.async_copy.groups import Group, Queue
from cudatma.emulator.async_copy.mbarrier import MBarrier
from cudatma.emulator.hazards.agents import Agents, Stamp, used_granules
from cudatma.emulator.hazards.findings import Reporter
from cudatma.emulator.hazards.hazard import Place
from cudatma.emulator.hazards.mbarriers import BarrierRecords
from cudatma.emulator.hazards.shared_memory import SharedMemory
from cudatma.emulator.machine.events import Observer, Same
from cudatma.emulator.machine.program import Program
from cudatma.emulator.machine.state import Block, Warp
from cudatma.emulator.ptx.types import Array

_SYNC = (
    "after the access (or the wait on the mbarrier of a copy), barrier.cluster.arrive and .wait by all threads of the "
    "cluster (cluster.sync()), or an arrival on an mbarrier for which block {block} waits before it exits"
)


@dataclass(slots=True)
class Use:
    """An access to shared memory, or to an mbarrier in shared memory, at ``place``.

    The access happens before the current instruction of any thread whose clock for ``agent`` is at least ``clock``. An
    arrival or a copy is also complete after ``phase`` of ``barrier`` has ended.
    """

    agent: int
    clock: int
    warp: Warp
    program: Program
    at: int
    what: str
    place: Place
    barrier: MBarrier | None = None
    phase: int = 0

    @property
    def is_copy(self) -> bool:
        return self.barrier is not None and not self.what.startswith("mbarrier.")

    def is_known(self, performed: Array, records: BarrierRecords) -> bool:
        """Return whether the use is complete for a thread with this clock, or for the mbarrier's CTA."""
        if self.clock <= performed[self.agent]:
            return True
        return self.barrier is not None and records.of(self.barrier).awaited > self.phase


class PeerUses(Observer):
    """Hazard check for uses of a CTA's shared memory and mbarriers by other CTAs.

    The check stores the latest use by each agent.
    """

    def __init__(self, agents: Agents, memory: SharedMemory, records: BarrierRecords, reporter: Reporter) -> None:
        self._agents, self._memory, self._records, self._reporter = agents, memory, records, reporter
        self._accesses: dict[tuple[int, int], Use] = {}
        self._barriers: dict[int, dict[tuple[int, str], Use]] = {}

    def shared_read(
        self, w: Warp, at: int, block: Block, offsets: Array, size: int, order: str, together: bool
    ) -> None:
        if block is not w.block:
            shadow = self._memory.shadows[block.rank]
            indices = used_granules(w, at, shadow.granules(offsets, size), len(offsets), size)
            stamps = self._agents.stamps(w, indices, len(offsets), together)
            self._used(w, at, block, shadow.bytes_of(indices), stamps, "this read")

    def shared_write(
        self, w: Warp, at: int, block: Block, offsets: Array, size: int, order: str, together: bool, same: Same
    ) -> None:
        if block is not w.block:
            shadow = self._memory.shadows[block.rank]
            indices = shadow.granules(offsets, size)
            stamps = self._agents.stamps(w, indices, len(offsets), together)
            self._used(w, at, block, shadow.bytes_of(indices), stamps, "this write")

    def shared_atomic(self, w: Warp, at: int, block: Block, offsets: Array, size: int, order: str) -> None:
        if block is not w.block:
            shadow = self._memory.shadows[block.rank]
            place = shadow.bytes_of(shadow.granules(offsets, size))
            self._used(w, at, block, place, [(*self._agents.stamp(w, 1), slice(None))], "this atomic operation")

    def shared_source(self, w: Warp, at: int, block: Block, offsets: Array, end: Any) -> None:
        """Record that a copy to another CTA reads this CTA's memory until the copy completes on its mbarrier."""
        if isinstance(end, MBarrier) and block is not end.block:
            stamps = [(*self._agents.load_until(end), slice(None))]
            self._used(w, at, block, end.place, stamps, "the completion of this copy")

    def _used(self, w: Warp, at: int, block: Block, place: Place, stamps: Iterable[Stamp], what: str) -> None:
        for agent, clock, _ in stamps:
            use = Use(agent, clock, w, w.split.frame.program, at, what, place)
            if block.is_done:
                self._report(use, block)
            self._accesses[block.rank, agent] = use

    def mbarrier_used(self, w: Warp, at: int, barrier: MBarrier, what: str) -> None:
        if barrier.block is not w.block:
            key, use = _use_of(self._agents, w, at, barrier, what)
            if barrier.block.is_done:
                self._report(use, barrier.block)
            self._barriers.setdefault(id(barrier), {})[key] = use

    def block_ended(self, block: Block) -> None:
        """Report uses by other CTAs that do not happen before the exit of any thread of this CTA.

        mbarriers.MBarriers checks copies into the CTA.
        """
        clocks = [clock for warp in block.warps for clock in self._agents.every_clock(warp)]
        known = np.maximum.reduce([clock.performed() for clock in clocks])
        uses = [use for (rank, _), use in self._accesses.items() if rank == block.rank]
        for barrier in block.mbarriers.values():
            uses += self._barriers.get(id(barrier), {}).values()
        for use in uses:
            if not use.is_copy and not use.is_known(known, self._records):
                self._report(use, block)

    def _report(self, use: Use, block: Block) -> None:
        message = f"block {block.index} may exit before {use.what}, which uses its shared memory, has completed"
        advice = _SYNC.format(block=block.index)
        self._reporter.findings.add(
            "block_gone", message, use.program, use.at, use.warp, places=[use.place], advice=advice
        )


class Lifetimes(Observer):
    """Hazard check for invalidated mbarriers that are still in use, and for bulk stores of exiting warps.

    The check stores the latest use of each mbarrier by each agent.
    """

    def __init__(self, agents: Agents, records: BarrierRecords, reporter: Reporter) -> None:
        self._agents, self._records, self._reporter = agents, records, reporter
        self._uses: dict[int, dict[tuple[int, str], Use]] = {}

    def mbarrier_used(self, w: Warp, at: int, barrier: MBarrier, what: str) -> None:
        key, use = _use_of(self._agents, w, at, barrier, what)
        self._uses.setdefault(id(barrier), {})[key] = use

    def mbarrier_inval(self, w: Warp, at: int, barrier: MBarrier) -> None:
        """Report uses that do not happen before the invalidation."""
        performed = self._agents.known(w).performed()
        for use in self._uses.pop(id(barrier), {}).values():
            if not use.is_known(performed, self._records):
                who = self._agents.who(use.agent)
                message = f"mbarrier.inval of {barrier.name} is not ordered after the use of the mbarrier by {who}"
                self._reporter.report("barrier_uninitialized", w, at, message, places=[barrier.place])

    def warp_ended(self, w: Warp) -> None:
        """Report bulk stores that are not committed, and the first bulk group without a wait."""
        queues: dict[int, Queue] = w.async_state.get("bulk", {})
        for queue in queues.values():
            if queue.open.issued_at >= 0:
                self._report_store("uncommitted_group", "bulk stores were not committed to a group", w, queue.open)
            pending = (group for group in queue.closed if group.waited == 0 and group.issued_at >= 0)
            if (group := next(pending, None)) is not None:
                message = "the warp exits without waiting until its bulk stores have read their source"
                self._report_store("exit_with_pending_store", message, w, group)

    def _report_store(self, kind: str, message: str, w: Warp, group: Group) -> None:
        self._reporter.findings.add(kind, message, self._reporter.launch.program, group.issued_at, w)


def _use_of(agents: Agents, w: Warp, at: int, barrier: MBarrier, what: str) -> tuple[tuple[int, str], Use]:
    """Return a warp's use of an mbarrier, preceded by the key under which it is stored."""
    agent, is_wait = agents.leader_agent(w), what == "a wait"
    now = int(agents.known(w).order[agent])
    awaited = None if is_wait else barrier
    use = Use(agent, now, w, w.split.frame.program, at, what, barrier.place, awaited, barrier.phase)
    return (agent, "" if is_wait else what), use
