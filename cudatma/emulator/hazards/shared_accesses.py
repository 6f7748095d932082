"""Observer that passes accesses to shared memory to the race checks and the shadow."""

from __future__ import annotations

from collections.abc import Iterable

from cudatma.emulator.async_copy.groups import Group
from cudatma.emulator.async_copy.mbarrier import MBarrier
from cudatma.emulator.hazards.agents import Agents, used_granules
from cudatma.emulator.hazards.clocks import Clock, releases, strength_of
from cudatma.emulator.hazards.lane_races import LaneRaces
from cudatma.emulator.hazards.memory_order import MemoryOrder
from cudatma.emulator.hazards.shared_memory import REDUCED, Flight, Shadow, SharedMemory, uses_proxy
from cudatma.emulator.hazards.shared_races import SharedRaces
from cudatma.emulator.machine.events import Copy, Observer, Same
from cudatma.emulator.machine.state import Block, Warp
from cudatma.emulator.ptx.types import Array


class SharedAccesses(Observer):
    """Observer that passes each access to the race checks and then records it in the shadow."""

    def __init__(
        self, agents: Agents, memory: SharedMemory, order: MemoryOrder, races: SharedRaces, lanes: LaneRaces
    ) -> None:
        self._agents, self._memory, self._order, self._races, self._lanes = agents, memory, order, races, lanes
        self._shadows = memory.shadows

    # ---- loads, stores and atomic operations

    def shared_read(
        self, w: Warp, at: int, block: Block, offsets: Array, size: int, order: str, together: bool
    ) -> None:
        shadow = self._shadows[block.rank]
        indices = used_granules(w, at, shadow.granules(offsets, size), len(offsets), size)
        if order:
            self._acquire(w, shadow, set(indices.tolist()), order)
        strong = strength_of(order)
        for clock, known in self._agents.knowers(w, indices):
            self._races.check_read(w, at, shadow, known, clock, False, strong)
        if not (together or order):
            self._lanes.check_read(w, at, shadow, indices)
        for agent, now, part in self._agents.stamps(w, indices, len(offsets), together):
            shadow.record_read(indices[part], agent, now, at, bool(order))

    def shared_write(
        self, w: Warp, at: int, block: Block, offsets: Array, size: int, order: str, together: bool, same: Same
    ) -> None:
        agents, shadow = self._agents, self._shadows[block.rank]
        indices = shadow.granules(offsets, size)
        if block is not w.block:
            self._memory.has_remote_stores = True
        if order:
            self._strong_write(w, at, shadow, indices, len(offsets), order, same)
            return
        for clock, known in agents.knowers(w, indices):
            self._races.check_write(w, at, shadow, known, clock, same=same)
        self._lanes.check_write(w, at, shadow, indices, together, same)
        for agent, now, part in agents.stamps(w, indices, len(offsets), together):
            shadow.record_write(indices[part], agent, now, at, False)

    def _strong_write(
        self, w: Warp, at: int, shadow: Shadow, indices: Array, lanes: int, order: str, same: Same
    ) -> None:
        """Check a volatile, relaxed or releasing store, and publish the warp's clock."""
        agents, strong = self._agents, strength_of(order)
        self._races.check_write(w, at, shadow, indices, agents.known(w), same=same, strong=strong)
        stamps = agents.stamps(w, indices, lanes)
        places = set(indices.tolist())
        self._publish(w, shadow, places, agents.without_unmet(w, agents.known(w).copy(), False))
        for agent, now, part in stamps:
            shadow.record_write(indices[part], agent, now, at, False)
        shadow.strength[indices] = strong
        if self._memory.has_peers:
            for place in places:
                self._order.publish(w, shadow, place, order, lanes, is_update=False)
        if releases(order):
            agents.advance(w)

    def shared_atomic(self, w: Warp, at: int, block: Block, offsets: Array, size: int, order: str) -> None:
        shadow = self._shadows[block.rank]
        indices = shadow.granules(offsets, size)
        if block is not w.block:
            self._memory.has_remote_stores = True
        self._races.check_atomic(w, at, shadow, indices, order)
        places = indices.tolist()
        self._acquire(w, shadow, places, order)
        self._publish(w, shadow, places, self._agents.known(w))
        shadow.record_write(indices, *self._agents.stamp(w, 1), at, False)
        shadow.strength[indices] = strength_of(order)
        if self._memory.has_peers:
            for place in places:
                self._order.publish(w, shadow, place, order, 1, is_update=True)

    def _acquire(self, w: Warp, shadow: Shadow, places: Iterable[int], order: str) -> None:
        """Acquire the clocks that strong writes have published.

        Writes by the same CTA are always acquired. Writes by other CTAs depend on fences and scopes.
        """
        for place in places:
            published = shadow.sync_clocks.get((place, w.block.rank))
            if published is not None:
                for clock in self._agents.learners(w):
                    clock.join(published)
                self._agents.count_acquire(w)
            if self._memory.has_peers:
                self._order.observe(w, shadow, place, order)

    def _publish(self, w: Warp, shadow: Shadow, places: Iterable[int], clock: Clock) -> None:
        for place in places:
            shadow.sync_clocks.setdefault((place, w.block.rank), Clock(self._agents.size)).join(clock)

    # ---- asynchronous operations

    def copy_issued(self, copy: Copy) -> None:
        """Mark bytes as in flight, or as written if the copy is a reduction.

        Several reductions of the same bytes may be in flight.
        """
        shadow = self._shadows[copy.block.rank]
        indices = shadow.granules(copy.offsets, copy.size)
        self._races.check_copy(copy, shadow, indices)
        self._lanes.check_copy(copy, shadow, indices)
        flight = self._memory.flights[copy.number] = Flight(copy, indices, self._agents.stamp(copy.w, 1))
        if copy.scope:
            until = self._agents.load_until(copy.barrier)
            shadow.record_write(indices, *until, copy.at, uses_proxy(copy))
            shadow.strength[indices] = REDUCED
            shadow.record_issue(until, flight)
        else:
            shadow.begin_copy(indices, copy.number)

    def copy_landed(self, copy: Copy) -> None:
        """Mark bytes as written. A thread that waits for the mbarrier's phase or for the group may read them."""
        shadow = self._shadows[copy.block.rank]
        flight = self._memory.flights.pop(copy.number)
        if copy.barrier is not None:
            until = self._agents.load_until(copy.barrier)
            shadow.record_issue(until, flight)
        else:
            until = self._agents.copies_until(copy.w, copy.group)
        if not copy.scope:
            shadow.end_copy(flight.indices, copy.number, *until, copy.at, uses_proxy(copy))

    def shared_source(self, w: Warp, at: int, block: Block, offsets: Array, end: Group | MBarrier) -> None:
        agents, shadow = self._agents, self._shadows[block.rank]
        indices = shadow.granules(offsets, 16)
        self._races.check_read(w, at, shadow, indices, agents.known(w), True)
        self._lanes.check_source(w, at, shadow, indices)
        until = agents.load_until(end) if isinstance(end, MBarrier) else agents.read_until(w, end)
        shadow.record_read(indices, *until, at)

    def wgmma_operand(
        self, w: Warp, at: int, position: int, bits: int, offsets: Array, shape: tuple[int, int, bool], group: int
    ) -> None:
        shadow = self._shadows[w.block.rank]
        indices = shadow.granules(offsets, 16)
        self._races.check_read(w, at, shadow, indices, self._agents.known(w), True)
        shadow.record_read(indices, self._agents.wgmma_agent(w), group + 1, at)
