"""The hazard layer: told of every access, fence and barrier of a cluster, it keeps happens-before and reports what
breaks it.

Source: PTX ISA, "Memory Consistency Model" (causality order, proxies), "mbarrier", "Async proxy", "wgmma.fence".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from cudatma.emulator.barrier_events import BarrierEvents
from cudatma.emulator.findings import Findings, report_deadlock
from cudatma.emulator.groups import Group, Queue
from cudatma.emulator.machine import Warp
from cudatma.emulator.mbarrier import MBarrier
from cudatma.emulator.register_watch import RegisterWatch
from cudatma.emulator.shadow import AsyncWrite, Clock
from cudatma.emulator.types import Array
from cudatma.layout import Swizzle, required_alignment

if TYPE_CHECKING:
    from cudatma.emulator.cluster import Block, Cluster
    from cudatma.emulator.launch import Launch

#: Flag in Shadow.mode: the swizzled box does not begin where its pattern does.
_CROOKED = 32
__all__ = ["Findings", "Observer", "report_deadlock"]


class Observer(BarrierEvents):
    """One cluster's hazard layer: told of every access, fence and barrier."""

    def __init__(self, launch: Launch, cluster: Cluster, findings: Findings) -> None:
        super().__init__(launch, cluster, findings)
        self.registers = RegisterWatch(self)

    # ---- generic accesses

    def generic_read(
        self, w: Warp, at: int, block: Block, offsets: Array, size: int, order: str, together: bool = False
    ) -> None:
        """ld, ldmatrix and the like, before the read."""
        shadow = self.shadows[block.rank]
        indices = shadow.granules(offsets, size)
        clock = self.clocks[w.agent]
        if order:
            for place in set(indices.tolist()):
                known = shadow.sync_clocks.get(place)
                if known is not None:
                    clock.join(known)
            return
        self._check_read(w, at, shadow, indices, clock, False)
        if (shadow.mode[offsets // 16] >= _CROOKED).any():
            self.report(
                "swizzle_alignment", w, at, "plain code reads a swizzled tile that does not begin on its pattern"
            )
        agent, now = self.stamp(w, len(offsets), together)
        shadow.row(agent)[indices] = now

    def generic_write(
        self, w: Warp, at: int, block: Block, offsets: Array, size: int, order: str, together: bool = False
    ) -> None:
        """st, stmatrix and the like, before the write."""
        shadow = self.shadows[block.rank]
        indices = shadow.granules(offsets, size)
        clock = self.clocks[w.agent]
        if order:
            clock_copy = clock.copy()
            for place in set(indices.tolist()):
                shadow.sync_clocks.setdefault(place, Clock(self.size)).join(clock_copy)
        else:
            self._check_write(w, at, shadow, indices, clock, False)
        agent, now = self.stamp(w, len(offsets), together)
        shadow.written(indices, agent, now, at, False)
        shadow.mode[offsets // 16] = 0
        shadow.box_column[offsets // 16] = -1
        if order in ("release", "acq_rel"):
            self.advance(w)

    def atomic(self, w: Warp, at: int, block: Block, offsets: Array, size: int, order: str) -> None:
        """One lane's atomic operation: atomics do not race with each other."""
        shadow = self.shadows[block.rank]
        indices = shadow.granules(offsets, size)
        clock = self.clocks[w.agent]
        if not shadow.is_atomic[indices].all():
            self._check_read(w, at, shadow, indices, clock, False)
            self._check_write(w, at, shadow, indices, clock, False)
        for place in indices.tolist():
            known = shadow.sync_clocks.setdefault(place, Clock(self.size))
            clock.join(known)
            known.join(clock)
        agent, now = self.stamp(w, 1)
        shadow.written(indices, agent, now, at, False)
        shadow.is_atomic[indices] = True

    def atomic_order(self, w: Warp, at: int, order: str) -> None:
        """An atomic's own order: what it publishes ends here."""
        if order in ("release", "acq_rel"):
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
    ) -> AsyncWrite:
        """A copy into shared memory is issued; its bytes are nobody's until it has landed and was waited for."""
        shadow = self.shadows[block.rank]
        indices = shadow.granules(np.asarray(offsets), size)
        clock = self.clocks[w.agent]
        is_proxy = not generic and what != "cp.async"
        self._check_write(w, at, shadow, indices, clock, is_proxy)
        if barrier is not None and is_proxy:
            self._check_init_fence(w, at, barrier, clock)
        self._count += 1
        operation = AsyncWrite(self._count, w, at, shadow, indices, what)
        self._operations[self._count] = operation
        shadow.in_flight[indices] = self._count
        shadow.mode[np.asarray(offsets) // 16] = 0
        shadow.box_column[np.asarray(offsets) // 16] = -1
        return operation

    def async_written(self, operation: AsyncWrite, barrier: MBarrier | None, group: Any) -> None:
        """The copy has landed: whoever waits for the barrier's phase, or the group, may look."""
        shadow, indices = operation.shadow, operation.indices
        self._operations.pop(operation.number, None)
        mine = indices[shadow.in_flight[indices] == operation.number]
        shadow.in_flight[mine] = 0
        is_proxy = operation.what not in ("cp.async", "st.async")
        if barrier is not None:
            agent, clock = self.barrier_agent(barrier), barrier.phase + 1
        elif group is not None:
            agent, clock = self.cp_agent(group[1]), group[2].number + 1
        else:
            return
        shadow.written(mine, agent, clock, operation.at, is_proxy)

    def async_read(self, w: Warp, at: int, block: Block, offsets: Array, owner: tuple[int, Group] | None) -> None:
        """A bulk store (or copy to another block) is issued: its source must be complete and fenced."""
        shadow = self.shadows[block.rank]
        indices = shadow.granules(offsets, 16)
        self._check_read(w, at, shadow, indices, self.clocks[w.agent], True)
        if owner is not None:
            lane, group = owner
            agent = self.agent(("bulk", w.agent, lane), "bulk")
            shadow.row(agent)[indices] = group.number + 1

    def matrices_read(self, w: Warp, at: int, block: Block, offsets: Array) -> None:
        """ldmatrix: the eight rows of a matrix that lie in eight rows of a box are pieces of one column of it.

        Where they are not, the code that made the addresses thinks of another swizzle than the tensor map's.
        """
        shadow = self.shadows[block.rank]
        chunks = (offsets // 16).reshape(-1, 8)
        rows, columns = shadow.box_row[chunks], shadow.box_column[chunks]
        mixed = (columns != columns[:, :1]).any(axis=1) & (columns >= 0).all(axis=1)
        if mixed.any() and any(len(set(found.tolist())) == 8 for found in rows[mixed]):
            mode = Swizzle(int(shadow.mode[chunks[mixed][0, 0]] & (_CROOKED - 1)) - 1)
            message = f"rows of one matrix come from several columns of a box laid down with swizzle {mode.label}"
            self.report("swizzle_mismatch", w, at, message)

    def swizzled(self, block: Block, offsets: Array, mode: Swizzle, address: int) -> None:
        """Remember how (rows, columns) of 16-byte chunks were laid down, and whether the box began on the pattern.

        The hardware swizzles absolute addresses: wgmma does the same and is content anywhere, plain code that swizzles
        offsets into the tile reads other bytes unless the tile is aligned.
        """
        repeat = required_alignment(mode)
        crooked = int(mode) and offsets.size * 16 >= repeat and address % repeat
        shadow, chunks = self.shadows[block.rank], offsets // 16
        shadow.mode[chunks] = int(mode) + 1 + (_CROOKED if crooked else 0)
        shadow.box_row[chunks] = np.arange(chunks.shape[0])[:, None]
        shadow.box_column[chunks] = np.arange(chunks.shape[1])[None, :]

    # ---- groups

    def groups_waited(self, w: Warp, at: int, kind: str, lane: int, last: Group, reads_only: bool) -> None:
        clock = self.clocks[w.agent]
        agent = self.agent(("bulk", w.agent, lane), "bulk") if kind == "bulk" else self.cp_agent(w)
        clock.order[agent] = max(int(clock.order[agent]), last.number + 1)

    def cp_snapshot(self, w: Warp) -> Clock:
        """What a cp.async.mbarrier.arrive of this warp will publish."""
        clock = self.clocks[w.agent].copy()
        queues: dict[Any, Queue] = w.async_state.get("cp", {})
        found = queues.get(0)
        clock.order[self.cp_agent(w)] = (found.count if found else 0) + 1
        return clock

    def cp_arrived(self, w: Warp, barrier: MBarrier, snapshot: Clock) -> None:
        self._pending(barrier)[0].join(snapshot)

    # ---- wgmma

    def wgmma_read(self, w: Warp, at: int, offsets: Array, descriptor: Any) -> None:
        """A wgmma reads 16-byte chunks of its block's shared memory through the asynchronous proxy."""
        shadow = self.shadows[w.block.rank]
        indices = shadow.granules(offsets, 16)
        self._check_read(w, at, shadow, indices, self.clocks[w.agent], True)
        shadow.row(self.wgmma_agent(w))[indices] = self.registers.group_of(w) + 1
        laid = shadow.mode[offsets // 16]
        laid = laid & (_CROOKED - 1)
        wrong = (laid != 0) & (laid != int(descriptor.mode) + 1)
        if wrong.any():
            found = Swizzle(int(laid[wrong][0]) - 1)
            self.report(
                "swizzle_mismatch",
                w,
                at,
                f"a wgmma descriptor says {descriptor.mode.label}, the tensor map that "
                f"filled these bytes {found.label}",
            )

    def wgmma_issued(self, w: Warp, at: int) -> None:
        self.registers.issued(w, at)

    def wgmma_fence(self, w: Warp, at: int) -> None:
        self.registers.fenced(w)

    def wgmma_commit(self, w: Warp, at: int) -> None:
        self.registers.committed(w)

    def wgmma_wait(self, w: Warp, at: int, newest: int, group: list[Warp]) -> None:
        """Groups of the warpgroup are complete: their reads of shared memory, by all four warps, are over."""
        done = self.registers.waited(w, at, newest)
        clock = self.clocks[w.agent]
        for other in group:
            agent = self.wgmma_agent(other)
            clock.order[agent] = max(int(clock.order[agent]), done)

    # ---- ends

    def warp_ended(self, w: Warp) -> None:
        """Bulk stores that nobody has waited for, or committed, when the warp leaves."""
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
