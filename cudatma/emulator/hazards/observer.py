"""The hazard layer: notified of every access, fence and barrier of a cluster, it keeps happens-before and reports what
breaks it.

Source: PTX ISA, "Memory Consistency Model" (causality order, proxies), "mbarrier", "Async proxy", "wgmma.fence".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from cudatma.emulator.async_copy.groups import Group, Queue, copy_queues
from cudatma.emulator.async_copy.mbarrier import MBarrier
from cudatma.emulator.hazards.agents import lanes_now, used
from cudatma.emulator.hazards.checks import COPY_WAIT, phase_of
from cudatma.emulator.hazards.clocks import Clock
from cudatma.emulator.hazards.findings import Findings, report_deadlock
from cudatma.emulator.hazards.global_watch import GlobalWatch
from cudatma.emulator.hazards.memory_order import releases, strength_of
from cudatma.emulator.hazards.register_watch import RegisterWatch, watch
from cudatma.emulator.hazards.shadow import REDUCED, AsyncWrite, Awaited, Shadow
from cudatma.emulator.hazards.swizzle_checks import CROOKED, SwizzleChecks
from cudatma.emulator.hazards.warpgroups import Warpgroups
from cudatma.emulator.machine.protocols import Launch
from cudatma.emulator.machine.state import Block, Cluster, Warp
from cudatma.emulator.ptx.types import Array

__all__ = ["Findings", "Observer", "report_deadlock"]


class Observer(SwizzleChecks):
    """One cluster's hazard layer, notified of every access, fence and barrier."""

    def __init__(self, launch: Launch, cluster: Cluster, findings: Findings) -> None:
        super().__init__(launch, cluster, findings)
        if launch.program.unwritten:
            launch.watch = watch
        self.registers = RegisterWatch(self)
        self.globals = GlobalWatch(self, cluster.number)
        self.warpgroups = Warpgroups(self)

    def some_met(self, w: Warp, groups: set[int]) -> None:
        """Some lanes of a warp have met, and not all: the lanes of each group, as bits, among themselves."""
        self.some_know(w, groups)
        self.lanes.some_met(w, groups)

    # ---- generic accesses

    def generic_read(
        self, w: Warp, at: int, block: Block, offsets: Array, size: int, order: str, together: bool = False
    ) -> None:
        """ld, ldmatrix and the like, before the read."""
        shadow = self.shadows[block.rank]
        indices = used(w, at, shadow.granules(offsets, size), len(offsets), size)
        if order:
            self._strong_read(w, shadow, set(indices.tolist()), order)
        for clock, known in self.knowers(w, indices):
            self._check_read(w, at, shadow, known, clock, False, strength_of(order))
        if not (together or order):
            self.lanes.read(w, at, shadow, indices)
        if shadow.has_crooked and (shadow.mode[offsets // 16] >= CROOKED).any():
            self.report(
                "swizzle_alignment", w, at, "plain code reads a swizzled tile that does not begin on its pattern"
            )
        elif shadow.has_swizzled and not together:
            self.plain_read(w, at, shadow, offsets)
        stamps = self.stamps(w, indices, len(offsets), together)
        for agent, now, part in stamps:
            shadow.read(indices[part], agent, now, at, bool(order))
        if block is not w.block:
            self.lifetimes.accessed(w, at, block, self._bytes(shadow, indices), stamps, "this read")

    def generic_write(
        self,
        w: Warp,
        at: int,
        block: Block,
        offsets: Array,
        size: int,
        order: str,
        together: bool = False,
        same: Callable[[], bool] | None = None,
    ) -> None:
        """st, stmatrix and the like, before the write."""
        shadow = self.shadows[block.rank]
        indices = shadow.granules(offsets, size)
        stamps = self.stamps(w, indices, len(offsets), together)
        if block is not w.block:
            self.has_remote_stores = True
        if order:
            published = self.without_unmet(w, self.known(w).copy(), False)
            for place in set(indices.tolist()):
                shadow.sync_clocks.setdefault((place, w.block.rank), Clock(self.size)).join(published)
            self._check_write(w, at, shadow, indices, self.known(w), False, same, strong=strength_of(order))
        else:
            for clock, known in self.knowers(w, indices):
                self._check_write(w, at, shadow, known, clock, False, same)
            self.lanes.write(w, at, shadow, indices, together, same)
        for agent, now, part in stamps:
            shadow.written(indices[part], agent, now, at, False)
        if block is not w.block:
            self.lifetimes.accessed(w, at, block, self._bytes(shadow, indices), stamps, "this write")
        if order:
            shadow.strength[indices] = strength_of(order)
            if self.has_peers:
                for place in set(indices.tolist()):
                    self.globals.order.wrote(w, shadow, place, order, len(offsets), is_update=False)
        if shadow.has_boxes:
            if self._linear:
                self.plain_write(w, offsets)
            shadow.mode[offsets // 16] = 0
            shadow.box_column[offsets // 16] = -1
        if releases(order):
            self.advance(w)

    def atomic(self, w: Warp, at: int, block: Block, offsets: Array, size: int, order: str) -> None:
        """One lane's atomic operation: it does not race with atomics and strong stores in its scope."""
        shadow = self.shadows[block.rank]
        indices = shadow.granules(offsets, size)
        if block is not w.block:
            self.has_remote_stores = True
        clock = self.known(w)
        strength = strength_of(order)
        is_relaxed = (shadow.strength[indices] > 0) | (self.reduced(shadow, indices, False) & (strength > 1))
        if not is_relaxed.all() or self.narrow_writers(w, shadow, indices, strength).any():
            self._check_read(w, at, shadow, indices, clock, False)
            self._check_write(w, at, shadow, indices, clock, False)
        places = indices.tolist()
        self._strong_read(w, shadow, places, order)
        for place in places:
            shadow.sync_clocks.setdefault((place, w.block.rank), Clock(self.size)).join(self.known(w))
        agent, now = self.stamp(w, 1)
        shadow.written(indices, agent, now, at, False)
        shadow.strength[indices] = strength
        if block is not w.block:
            stamps = [(agent, now, slice(None))]
            self.lifetimes.accessed(w, at, block, self._bytes(shadow, indices), stamps, "this atomic operation")
        if self.has_peers:
            for place in places:
                self.globals.order.wrote(w, shadow, place, order, 1, is_update=True)

    def _strong_read(self, w: Warp, shadow: Shadow, places: Iterable[int], order: str) -> None:
        """Acquire what strong writes have published: always within the CTA, by fences and scopes from other CTAs."""
        for place in places:
            published = shadow.sync_clocks.get((place, w.block.rank))
            if published is not None:
                for clock in self.learners(w):
                    clock.join(published)
                self.acquired(w)
            if self.has_peers:
                self.globals.order.read(w, shadow, place, order)

    def atomic_order(self, w: Warp, at: int, order: str) -> None:
        """An atomic's own order: what it publishes ends here."""
        if releases(order):
            self.advance(w)

    # ---- asynchronous copies

    def async_write(
        self,
        w: Warp,
        at: int,
        block: Block,
        offsets: Array,
        size: int,
        what: str,
        barrier: MBarrier | None = None,
        generic: bool = False,
        lanes: Array | None = None,
        scope: str = "",
    ) -> AsyncWrite:
        """A copy into shared memory is issued; its bytes may not be read until it has landed and was waited for.

        scope: of a reduction; several may be under way to the same bytes.
        """
        shadow = self.shadows[block.rank]
        indices = shadow.granules(np.asarray(offsets), size)
        clock = self.known(w)
        if barrier is not None:
            awaited = phase_of(barrier.block, barrier.offset, barrier.phase)
        else:
            awaited = Awaited("a cp.async group", COPY_WAIT)
        is_proxy = not generic and what != "cp.async"
        if what == "cp.async":
            for clock, part in self.knowers(w, indices):
                self._check_write(w, at, shadow, part, clock, False, is_copy=True, awaited=awaited)
        else:
            strong = strength_of(scope)
            self._check_write(w, at, shadow, indices, clock, is_proxy, is_copy=True, strong=strong, awaited=awaited)
            self.lanes.copy(w, at, shadow, indices, True)
        if barrier is not None and is_proxy:
            self._check_init_fence(w, at, barrier, clock)
        self._count += 1
        if barrier is not None:
            barrier.loads += 1
            barrier.load_from = (w, w.split.frame.program, at)
        operation = AsyncWrite(self._count, at, shadow, indices, what, awaited, barrier, self.stamp(w, 1))
        self._operations[self._count] = operation
        if scope and barrier is not None:
            shadow.written(indices, *self.load_until(barrier), at, is_proxy)
            shadow.strength[indices] = REDUCED
            shadow.issued(self.load_until(barrier), operation)
        else:
            shadow.in_flight[indices] = self._count
        shadow.lane_writes[indices] = 0 if lanes is None else lanes.repeat(len(indices) // len(lanes))
        shadow.mode[np.asarray(offsets) // 16] = 0
        shadow.box_column[np.asarray(offsets) // 16] = -1
        return operation

    def async_written(self, operation: AsyncWrite, barrier: MBarrier | None, group: Any) -> None:
        """The copy has landed: a thread that waits for the barrier's phase, or the group, may read the bytes."""
        shadow, indices = operation.shadow, operation.indices
        self._operations.pop(operation.number, None)
        mine = indices[shadow.in_flight[indices] == operation.number]
        shadow.in_flight[mine] = 0
        is_proxy = operation.what not in ("cp.async", "st.async")
        if barrier is not None:
            agent, clock = self.barrier_agent(barrier), barrier.phase + 1
            barrier.loads, barrier.loaded = barrier.loads - 1, clock
            if barrier.phase > operation.phase:
                self.out_of_step(by_bytes=True)
            shadow.issued((agent, clock), operation)
        elif group is not None:
            agent, clock = self.copies_until(group[1], group[2])
        else:
            return
        shadow.written(mine, agent, clock, operation.at, is_proxy)

    def async_read(self, w: Warp, at: int, block: Block, offsets: Array, until: tuple[int, int]) -> None:
        """Check that the source of a bulk copy that is issued is complete and fenced.

        until: (agent, clock) that a thread acquires by waiting for the copy to have read it.
        """
        shadow = self.shadows[block.rank]
        indices = shadow.granules(offsets, 16)
        self._check_read(w, at, shadow, indices, self.known(w), True)
        self.lanes.copy(w, at, shadow, indices, False)
        agent, number = until
        shadow.read(indices, agent, number, at)

    def copy_read(self, w: Warp, at: int, block: Block, offsets: Array, barrier: MBarrier) -> None:
        """Check the source of a copy between shared memories; it is in use until the copy completes on the mbarrier."""
        until = self.load_until(barrier)
        self.async_read(w, at, block, offsets, until)
        if block is not barrier.block:
            stamps = [(*until, slice(None))]
            self.lifetimes.accessed(w, at, block, barrier.place, stamps, "the completion of this copy")

    # ---- groups

    def groups_waited(self, w: Warp, at: int, kind: str, lane: int, waited: list[Group], reads_only: bool) -> None:
        """Groups are complete, for bulk stores perhaps their reads only."""
        last = waited[-1]
        if kind == "bulk":
            until = [self.read_until(w, lane, last)]
            if not reads_only:
                until.append(self.store_until(w, lane, last))
        else:
            until = [self.copies_until(w, group) for group in {g.owner: g for g in waited}.values()]
            self.lanes.copies_waited(w, int(self.clocks[w.agent].order[self.cp_agent(w)]), self.cp_agent(w))
        for clock in self.learners(w):
            for agent, number in until:
                clock.order[agent] = max(int(clock.order[agent]), number)

    def cp_snapshot(self, w: Warp) -> Clock:
        """What a cp.async.mbarrier.arrive of this warp will publish."""
        clock = self.told(w).copy()
        for found in copy_queues(w, lanes_now(w)):
            agent, number = self.copies_until(w, found.open)
            clock.order[agent] = number
            if found.owner:
                clock.order[self.cp_agent(w)] = max([0, *(g.number + 1 for g in found.closed if not g.owner)])
        return clock

    def cp_arrived(self, barrier: MBarrier, snapshot: Clock) -> None:
        """Copies of threads of the barrier's CTA have landed and arrived."""
        self._released(barrier).near.join(snapshot)

    # ---- wgmma

    def wgmma_read(self, w: Warp, at: int, offsets: Array) -> None:
        """A wgmma reads 16-byte chunks of its CTA's shared memory through the asynchronous proxy."""
        shadow = self.shadows[w.block.rank]
        indices = shadow.granules(offsets, 16)
        self._check_read(w, at, shadow, indices, self.known(w), True)
        shadow.read(indices, self.wgmma_agent(w), self.registers.group_of(w) + 1, at)

    def wgmma_issued(self, w: Warp, at: int, shared: tuple[Array, ...]) -> None:
        """shared: scale-d and the matrix descriptors, which are the same in all threads of a warpgroup."""
        self.registers.issued(w, at)
        self.warpgroups.wgmma_issued(w, at, shared)

    def wgmma_fence(self, w: Warp, at: int) -> None:
        self.registers.fenced(w)

    def wgmma_commit(self, w: Warp, at: int) -> None:
        self.registers.committed(w)
        self.warpgroups.wgmma_committed(w)

    def wgmma_wait(self, w: Warp, at: int, newest: int, group: list[Warp]) -> None:
        """Groups of the warpgroup are complete: their reads of shared memory, by all four warps, are over."""
        done = self.registers.waited(w, at, newest)
        for clock in self.learners(w):
            for other in group:
                agent = self.wgmma_agent(other)
                clock.order[agent] = max(int(clock.order[agent]), done)

    def registers_set(self, w: Warp, at: int, count: int, is_inc: bool) -> None:
        self.warpgroups.registers_set(w, at, count, is_inc)

    # ---- ends

    def stuck(self) -> None:
        """No warp of the grid can run any more."""
        self.warpgroups.stuck([w for block in self.cluster.blocks for w in block.warps])

    def warp_ended(self, w: Warp) -> None:
        """When a warp leaves: bulk stores not waited for, or not committed; with the CTA's last one, loads that
        no thread has waited for, and surplus bytes."""
        if self.cluster.is_done:
            self.check_bytes()
            self.warn_of_linear_reads()
        if w.block.is_done:
            self.warpgroups.block_ended(w.block)
        for barrier in w.block.mbarriers.values() if w.block.is_done else ():
            if barrier.tx < 0:
                self.bytes_over(barrier)
            else:
                self.check_loads(barrier, f"block {w.block.index} ends")
        if w.block.is_done and len(self.cluster.blocks) > 1:
            self.lifetimes.ended(w.block)
        queues: dict[int, Queue] = w.async_state.get("bulk", {})
        for found in queues.values():
            if found.open.issued_at >= 0:
                self._late_store("uncommitted_group", "bulk stores were never committed to a group", w, found.open)
            for group in found.closed:
                if group.waited == 0 and group.issued_at >= 0:
                    self._late_store(
                        "exit_with_pending_store",
                        "the warp leaves without having waited for its bulk stores to read their source",
                        w,
                        group,
                    )
                    break

    def _late_store(self, kind: str, message: str, w: Warp, group: Group) -> None:
        self.findings.add(kind, message, self.launch, self.launch.program, group.issued_at, w)
