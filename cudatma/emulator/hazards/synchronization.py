"""Propagate clocks at barriers, mbarriers, waits for copies, and fences.

This observer reports no hazards. The other checks compare accesses with the clocks that these events change. The
observer therefore comes last, so that the other checks use the clocks from before the event.

Source: PTX ISA, "Memory Consistency Model" (causality order), "mbarrier", "membar, fence", "barrier.cluster".
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cudatma.emulator.async_copy.groups import Group, copy_queues
from cudatma.emulator.async_copy.mbarrier import MBarrier
from cudatma.emulator.hazards.agents import Agents, lanes_now
from cudatma.emulator.hazards.clocks import INITS, Clock, acquires, joined, releases, scope_of
from cudatma.emulator.hazards.mbarriers import BarrierRecords
from cudatma.emulator.hazards.memory_order import MemoryOrder
from cudatma.emulator.hazards.shared_memory import SharedMemory
from cudatma.emulator.machine.events import Observer
from cudatma.emulator.machine.state import NamedBarrier, Warp
from cudatma.emulator.ptx.types import SCOPES

_CTA, _CLUSTER = SCOPES["cta"], SCOPES["cluster"]


class _Released:
    """Clocks that arrivals on an mbarrier have released in all phases so far.

    ``near`` is the clock of arrivals by threads of the mbarrier's CTA. ``remote`` is the clock of arrivals by threads
    of other CTAs, or None before the first arrival. Waits acquire ``near_ended`` and ``remote_ended``, which are copies
    of these clocks from the end of the last phase.
    """

    __slots__ = ("near", "near_ended", "remote", "remote_ended")

    def __init__(self, size: int) -> None:
        self.near, self.near_ended = Clock(size), Clock(size)
        self.remote: Clock | None = None
        self.remote_ended: Clock | None = None


def _perform(clock: Clock, known: Clock) -> None:
    """Record that the accesses in another clock have been performed."""
    clock.beyond().performed = np.maximum(clock.performed(), known.performed())


class Synchronization(Observer):
    """Observer that propagates clocks among the warps of a cluster."""

    def __init__(
        self, agents: Agents, memory: SharedMemory, records: BarrierRecords, order: MemoryOrder, number: int
    ) -> None:
        """Create the observer of cluster ``number``."""
        self._agents, self._memory, self._records, self._order = agents, memory, records, order
        self._number = number
        self._named: dict[int, Clock] = {}
        self._cluster_pending, self._cluster_done = Clock(agents.size), Clock(agents.size)
        self._barriers: dict[int, _Released] = {}
        #: Maps each cp.async.mbarrier.arrive to the clock that it will publish.
        self._arrivals: dict[Any, Clock] = {}

    # ---- barriers of a CTA and a cluster

    def barrier_arrived(self, w: Warp, barrier: NamedBarrier) -> None:
        known = self._named.get(id(barrier))
        if known is None:
            known = self._named[id(barrier)] = Clock(self._agents.size)
        known.join(self._agents.published(w, False))

    def barrier_completed(self, barrier: NamedBarrier, warps: list[Warp]) -> None:
        known = self._named.pop(id(barrier), None)
        if known is not None:
            for warp in warps:
                self._agents.clocks[warp.agent].join(known)

    def cluster_arrived(self, w: Warp, is_release: bool) -> None:
        """Publish the warp's clock. A relaxed arrival publishes only accesses before a fence of cluster scope."""
        if is_release:
            self._cluster_pending.join(self._agents.published(w, False))
            return
        far = self._agents.known_by_any(w).far
        for scope, clock in far.fenced.items() if far is not None else ():
            if scope >= _CLUSTER:
                self._cluster_pending.join(clock)
            elif scope == INITS:
                fenced = self._cluster_pending.beyond().fenced
                fenced[INITS] = joined(fenced[INITS], clock) if INITS in fenced else clock

    def cluster_completed(self) -> None:
        self._cluster_done = self._cluster_pending.copy()

    def cluster_waited(self, w: Warp) -> None:
        for clock in self._agents.learners(w):
            clock.join(self._cluster_done)
        self._agents.count_acquire(w)

    # ---- mbarriers

    def _released(self, barrier: MBarrier) -> _Released:
        known = self._barriers.get(id(barrier))
        if known is None:
            known = self._barriers[id(barrier)] = _Released(self._agents.size)
        return known

    def mbarrier_arrived(self, w: Warp, barrier: MBarrier, order: str, is_alone: bool) -> None:
        """Record the clock that an arrival releases.

        A release synchronizes with threads in its scope. A preceding fence can release instead, at the scope of the
        fence. If a release of CTA scope arrives on another CTA's mbarrier, waiters obtain only the information that the
        accesses have been performed.
        """
        agents, released = self._agents, self._released(barrier)
        is_near = barrier.block is w.block
        if is_near:
            target = released.near
        else:
            if released.remote is None:
                released.remote = Clock(agents.size)
            target = released.remote
        if releases(order) and (is_near or scope_of(order) >= _CLUSTER):
            known = agents.published(w, is_alone)
            if not is_near and known.far is not None:
                known.far.seen = {}
            target.join(known)
            return
        far = agents.known_by_any(w).far
        for scope, fenced in far.fenced.items() if far is not None else ():
            if scope >= (_CTA if is_near else _CLUSTER):
                target.join(fenced)
        if releases(order):
            _perform(target, agents.published(w, is_alone))

    def phase_ended(self, barrier: MBarrier) -> None:
        released = self._released(barrier)
        released.near.order[self._agents.barrier_agent(barrier)] = barrier.phase
        released.near_ended = released.near.copy()
        if released.remote is not None:
            released.remote_ended = released.remote.copy()

    def mbarrier_acquired(self, w: Warp, at: int, barrier: MBarrier, order: str) -> None:
        """Acquire the clocks that the arrivals of completed phases released.

        Bytes of completed copies are visible at any scope. To acquire accesses by threads of other CTAs, a wait must
        have cluster scope or be followed by a fence of cluster scope.
        """
        released, number = self._released(barrier), self._number
        remote = released.remote_ended
        for clock in self._agents.learners(w):
            if acquires(order):
                clock.join(released.near_ended)
            else:
                clock.note(_CTA, number, released.near_ended, number)
            if remote is None:
                continue
            if acquires(order) and scope_of(order) >= _CLUSTER:
                clock.join(remote)
            else:
                clock.note(_CLUSTER, number, remote, number)
                if acquires(order):
                    _perform(clock, remote)
        if acquires(order):
            self._agents.count_acquire(w)

    # ---- waits for copies

    def groups_waited(self, w: Warp, at: int, kind: str, waited: list[Group], reads_only: bool) -> None:
        agents = self._agents
        if kind == "bulk":
            until = [agents.read_until(w, waited[-1])]
            if not reads_only:
                until.append(agents.store_until(w, waited[-1]))
        else:
            until = [agents.copies_until(w, group) for group in {g.owner: g for g in waited}.values()]
        for clock in agents.learners(w):
            for agent, number in until:
                clock.order[agent] = max(int(clock.order[agent]), number)

    def cp_arrival_issued(self, w: Warp, arrival: Any) -> None:
        """Store the clock that the arrival will publish: the clock of the executing threads, and their copies."""
        agents = self._agents
        clock = agents.known_by_any(w).copy()
        for queue in copy_queues(w, lanes_now(w)):
            agent, number = agents.copies_until(w, queue.open)
            clock.order[agent] = number
            if queue.owner:
                clock.order[agents.cp_agent(w)] = max([0, *(g.number + 1 for g in queue.closed if not g.owner)])
        self._arrivals[arrival] = clock

    def cp_arrived(self, arrival: Any, barrier: MBarrier) -> None:
        self._released(barrier).near.join(self._arrivals.pop(arrival))

    def wgmma_waited(self, w: Warp, at: int, done: int, warps: list[Warp]) -> None:
        """Record that the wgmma's reads of shared memory are complete in all four warps."""
        for clock in self._agents.learners(w):
            for other in warps:
                agent = self._agents.wgmma_agent(other)
                clock.order[agent] = max(int(clock.order[agent]), done)

    # ---- fences

    def fence(self, w: Warp, at: int, kind: str) -> None:
        if kind.startswith("proxy.async"):
            self._fence_proxy(w, kind)
        elif kind.startswith("mbarrier_init"):
            self._records.fence(w)
            for clock in self._agents.learners(w):
                clock.beyond().fenced[INITS] = clock.bare()
            self._agents.advance(w)
        elif not kind.startswith("proxy"):
            self._order.fence(w, kind)

    def _fence_proxy(self, w: Warp, kind: str) -> None:
        """Execute fence.proxy.async for all memory, global memory, or the shared memory of the CTA or the cluster."""
        is_shared = not kind.endswith("global")
        is_own = "shared::cta" in kind and self._memory.has_remote_stores
        uncovered = self._records.fence(w, self._agents.epoch(w)) if is_shared else []
        for clock in self._agents.learners(w):
            if is_shared:
                order = clock.order.copy()
                order[uncovered] = clock.proxy[uncovered]
                if is_own:
                    clock.beyond().fence_proxy_of(w.block.rank, order)
                else:
                    np.maximum(clock.proxy, order, out=clock.proxy)
            if "shared" not in kind:
                clock.fence_proxy_global()
        self._agents.advance(w)

    def map_fence(self, w: Warp, addresses: set[int], scope: int) -> None:
        """Make edits of the tensor maps at these addresses visible to copies by this warp."""
        for clock in self._agents.learners(w):
            known = clock.bare()
            clock.beyond().maps.update({(address, scope): known for address in addresses})
