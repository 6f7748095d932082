"""The shadow of shared memory: the last writer of every few bytes, readers since then, and copies under way.

Happens-before is kept with vector clocks. Agents are the warps of a cluster, one more a warp for its wgmmas and one for
its cp.asyncs, one a thread that issues bulk stores, and one an mbarrier (its clock is its phase).
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from cudatma.emulator.async_copy.groups import Group
from cudatma.emulator.async_copy.mbarrier import MBarrier
from cudatma.emulator.hazards.agents import Agents, used
from cudatma.emulator.hazards.clocks import Clock, releases, strength_of
from cudatma.emulator.hazards.memory_order import MemoryOrder
from cudatma.emulator.hazards.report import Place
from cudatma.emulator.machine.events import Copy, Observer, Same
from cudatma.emulator.machine.memory import in_units
from cudatma.emulator.machine.protocols import Launch
from cudatma.emulator.machine.state import Block, Cluster, Warp
from cudatma.emulator.ptx.types import Array

#: Shadow.strength of bytes that an asynchronous reduction wrote last.
REDUCED = -1
#: Bits of Shadow.reads that hold the instruction.
_AT_BITS = 24


class Shadow:
    """Per granule: writer agent (-1: none), its clock, flags; a row of read clocks for each agent that has read.

    granule: bytes of one entry; the narrowest access that the kernel makes to shared memory, at most 4.
    """

    def __init__(self, rank: int, size: int, granule: int) -> None:
        """rank: of the CTA in its cluster."""
        self.rank, self.granule = rank, granule
        self._shift = granule.bit_length() - 1
        self.count = count = -(-size // granule) + 16
        self.writer: Array = np.full(count, -1, np.int32)
        self.writer_clock: Array = np.zeros(count, np.int32)
        self.writer_at: Array = np.full(count, -1, np.int32)
        self.is_async: Array = np.zeros(count, bool)
        #: 0 where a weak store or a copy wrote last, REDUCED where an asynchronous reduction did, else 1 + the scope of
        #: the strong store or atomic operation.
        self.strength: Array = np.zeros(count, np.int8)
        self.is_barrier: Array = np.zeros(count, bool)
        #: Number of the copy under way (a key of SharedMemory.flights), 0 for none.
        self.in_flight: Array = np.zeros(count, np.int64)
        self.row_agents: list[int] = []
        #: Whether the reads of each row are strong ones: plain writes do not race with them, copies do.
        self.row_strong: list[bool] = []
        self._rows: dict[tuple[int, bool], int] = {}
        #: The clock and the instruction, packed, of each reader's last read of each granule.
        self.reads: Array = np.zeros((0, count), np.int64)
        #: Clocks by (granule, CTA rank) that strong writes pass on to strong reads by the same CTA.
        self.sync_clocks: dict[tuple[int, int], Clock] = {}
        #: Clocks by granule that strong writes have published to other CTAs, see MemoryOrder.
        self.published: dict[int, Any] = {}
        #: (agent, clock) of copies that have landed -> (first granule, last one, agent, clock) of the issue of each.
        self.issuers: dict[tuple[int, int], list[tuple[int, int, int, int]]] = {}
        self._steps: dict[int, Array] = {}
        self._last: tuple[Array | None, int, Array] = None, 0, self.writer

    def granules(self, offsets: Array, size: int) -> Array:
        """Return the granules of accesses of ``size`` bytes at byte offsets: flat, perhaps with repetitions.

        The observers of one event ask for the same ones.
        """
        last, last_size, found = self._last
        if last is offsets and last_size == size:
            return found
        first = in_units(offsets, self._shift).reshape(-1)
        count = max(1, size // self.granule)
        if count > 1:
            steps = self._steps.get(count)
            if steps is None:
                steps = self._steps[count] = np.arange(count, dtype=np.int64)
            first = (first[:, None] + steps).reshape(-1)
        self._last = offsets, size, first
        return first

    def bytes_of(self, indices: Array) -> Place:
        """Return the bytes of some granules, as a hazard's place."""
        return "bytes", self.rank, int(indices.min()), int(indices.max())

    def read(self, indices: Array, agent: int, clock: int, at: int, strong: bool = False) -> None:
        """Record a read. strong: a volatile, relaxed or acquiring one."""
        self._row(agent, strong)[indices] = clock << _AT_BITS | at

    def _row(self, agent: int, strong: bool) -> Array:
        """Return what is known of an agent's reads."""
        number = self._rows.get((agent, strong))
        if number is None:
            number = self._rows[agent, strong] = len(self.row_agents)
            self.row_agents.append(agent)
            self.row_strong.append(strong)
            if number >= len(self.reads):
                grown = np.zeros((max(32, 2 * number), self.reads.shape[1]), np.int64)
                grown[:number] = self.reads
                self.reads = grown
        found: Array = self.reads[number]
        return found

    def unordered_reader(self, indices: Array, clock: Clock, by_copy: bool) -> tuple[int, int, int] | None:
        """Return (agent, granule, instruction) of a read that was not performed before now, or None.

        by_copy: strong reads count too.
        """
        count = len(self.row_agents)
        if not count:
            return None
        seen = clock.performed()[self.row_agents].astype(np.int64)
        late = self.reads[:count, indices] >= (seen + 1 << _AT_BITS)[:, None]
        if not by_copy and True in self.row_strong:
            late[self.row_strong] = False
        if not np.count_nonzero(late):
            return None
        row, place = (int(x[0]) for x in np.nonzero(late))
        granule = int(indices[place])
        return self.row_agents[row], granule, int(self.reads[row, granule]) & (1 << _AT_BITS) - 1

    def last_read(self, granule: int, agents: Container[int]) -> int:
        """Return the instruction of the last read of a granule by one of some agents, -1 for none."""
        found = [int(self.reads[row, granule]) for row, agent in enumerate(self.row_agents) if agent in agents]
        return max(found) & (1 << _AT_BITS) - 1 if max(found, default=0) else -1

    def written(self, indices: Array, agent: int, clock: int, at: int, is_async: bool) -> None:
        """Record a write."""
        self.writer[indices] = agent
        self.writer_clock[indices] = clock
        self.writer_at[indices] = at
        self.is_async[indices] = is_async
        self.strength[indices] = 0

    def issued(self, until: tuple[int, int], flight: Flight) -> None:
        """Note who issued a copy. until: the agent and clock that are the writer of its bytes."""
        ends = int(flight.indices.min()), int(flight.indices.max())
        self.issuers.setdefault(until, []).append((*ends, *flight.issuer))

    def unordered_writer(self, indices: Array, order: Array, fenced: Array | None) -> tuple[int, int, bool] | None:
        """Return (agent, granule, whether only the proxy fence is missing) of a write that is not ordered, or None.

        order: what is ordered before now. fenced: what is visible to the asynchronous proxy, for an access through it.
        """
        writers = self.writer[indices]
        # Unwritten bytes have clock 0, which every agent has seen.
        late = self.writer_clock[indices] > order[writers]
        if np.count_nonzero(late):
            place = int(late.argmax())
            return int(writers[place]), int(indices[place]), False
        if fenced is not None:
            unfenced = (self.writer_clock[indices] > fenced[writers]) & ~self.is_async[indices]
            if np.count_nonzero(unfenced):
                place = int(unfenced.argmax())
                return int(writers[place]), int(indices[place]), True
        return None


@dataclass(slots=True, eq=False)
class Flight:
    """A copy under way. issuer: the agent and clock of its issue."""

    copy: Copy
    indices: Array
    issuer: tuple[int, int]


def uses_proxy(copy: Copy) -> bool:
    """Return whether a copy writes shared memory through the asynchronous proxy."""
    return copy.what not in ("cp.async", "st.async")


class SharedMemory(Observer):
    """The shadows of one cluster's shared memories.

    It is the last of the observers that look at an access: checks see what was known before it.
    """

    def __init__(self, launch: Launch, cluster: Cluster, agents: Agents, order: MemoryOrder) -> None:
        self._agents, self._order = agents, order
        granule = launch.setup.extra.get("granule")
        if granule is None:
            names = launch.image.reachable(launch.program.function.name)
            granule = _narrowest(
                [launch.image.program(n) for n in names if launch.image.module.functions[n].is_defined]
            )
            launch.setup.extra["granule"] = granule
        self.shadows = [Shadow(block.rank, block.shared.size, granule) for block in cluster.blocks]
        if launch.reserved_bytes:
            for shadow in self.shadows:
                shadow.writer[launch.reserved_start // granule :] = 0  # the system's part is initialised
        self.has_peers = len(cluster.blocks) > 1
        #: Whether a thread has stored into another CTA's shared memory: fences of shared::cta do not cover that.
        self.has_remote_stores = False
        #: Copies under way, by number.
        self.flights: dict[int, Flight] = {}
        #: The offsets and the result of granules_read: the observers of one event ask for the same ones.
        self._last_read: tuple[Array | None, tuple[Shadow, Array]] = None, (self.shadows[0], self.shadows[0].writer)

    def granules_read(self, w: Warp, at: int, block: Block, offsets: Array, size: int) -> tuple[Shadow, Array]:
        """Return a CTA's shadow and the granules of a load whose bytes the kernel uses."""
        last, found = self._last_read
        if last is not offsets:
            shadow = self.shadows[block.rank]
            found = shadow, used(w, at, shadow.granules(offsets, size), len(offsets), size)
            self._last_read = offsets, found
        return found

    def acquire(self, w: Warp, shadow: Shadow, places: Iterable[int], order: str) -> None:
        """Acquire what strong writes have published: always within the CTA, by fences and scopes from other CTAs."""
        for place in places:
            published = shadow.sync_clocks.get((place, w.block.rank))
            if published is not None:
                for clock in self._agents.learners(w):
                    clock.join(published)
                self._agents.acquired(w)
            if self.has_peers:
                self._order.read(w, shadow, place, order)

    def _publish(self, w: Warp, shadow: Shadow, places: Iterable[int], clock: Clock) -> None:
        for place in places:
            shadow.sync_clocks.setdefault((place, w.block.rank), Clock(self._agents.size)).join(clock)

    # ---- plain accesses

    def shared_read(
        self, w: Warp, at: int, block: Block, offsets: Array, size: int, order: str, together: bool
    ) -> None:
        shadow, indices = self.granules_read(w, at, block, offsets, size)
        for agent, now, part in self._agents.stamps(w, indices, len(offsets), together):
            shadow.read(indices[part], agent, now, at, bool(order))

    def shared_write(
        self, w: Warp, at: int, block: Block, offsets: Array, size: int, order: str, together: bool, same: Same
    ) -> None:
        agents, shadow = self._agents, self.shadows[block.rank]
        indices = shadow.granules(offsets, size)
        stamps = agents.stamps(w, indices, len(offsets), together)
        if block is not w.block:
            self.has_remote_stores = True
        places = set(indices.tolist()) if order else ()
        if order:
            self._publish(w, shadow, places, agents.without_unmet(w, agents.known(w).copy(), False))
        for agent, now, part in stamps:
            shadow.written(indices[part], agent, now, at, False)
        if order:
            shadow.strength[indices] = strength_of(order)
        if self.has_peers:
            for place in places:
                self._order.wrote(w, shadow, place, order, len(offsets), is_update=False)
        if releases(order):
            agents.advance(w)

    def shared_atomic(self, w: Warp, at: int, block: Block, offsets: Array, size: int, order: str) -> None:
        shadow = self.shadows[block.rank]
        indices = shadow.granules(offsets, size)
        if block is not w.block:
            self.has_remote_stores = True
        places = indices.tolist()
        self.acquire(w, shadow, places, order)
        self._publish(w, shadow, places, self._agents.known(w))
        shadow.written(indices, *self._agents.stamp(w, 1), at, False)
        shadow.strength[indices] = strength_of(order)
        if self.has_peers:
            for place in places:
                self._order.wrote(w, shadow, place, order, 1, is_update=True)

    # ---- asynchronous operations

    def copy_issued(self, copy: Copy) -> None:
        """Mark bytes as in flight, or as written by a reduction: several may be under way to the same bytes."""
        shadow = self.shadows[copy.block.rank]
        indices = shadow.granules(copy.offsets, copy.size)
        flight = self.flights[copy.number] = Flight(copy, indices, self._agents.stamp(copy.w, 1))
        if copy.scope and copy.barrier is not None:
            until = self._agents.load_until(copy.barrier)
            shadow.written(indices, *until, copy.at, uses_proxy(copy))
            shadow.strength[indices] = REDUCED
            shadow.issued(until, flight)
        else:
            shadow.in_flight[indices] = copy.number

    def copy_landed(self, copy: Copy) -> None:
        """Mark bytes as written: a thread that waits for the barrier's phase, or the group, may read them."""
        shadow = self.shadows[copy.block.rank]
        flight = self.flights.pop(copy.number)
        landed = flight.indices[shadow.in_flight[flight.indices] == copy.number]
        shadow.in_flight[landed] = 0
        if copy.barrier is not None:
            until = self._agents.load_until(copy.barrier)
            shadow.issued(until, flight)
        else:
            until = self._agents.copies_until(copy.w, copy.group)
        shadow.written(landed, *until, copy.at, uses_proxy(copy))

    def shared_source(self, w: Warp, at: int, block: Block, offsets: Array, end: Group | MBarrier) -> None:
        agents, shadow = self._agents, self.shadows[block.rank]
        until = agents.load_until(end) if isinstance(end, MBarrier) else agents.read_until(w, end)
        shadow.read(shadow.granules(offsets, 16), *until, at)

    def wgmma_operand(
        self, w: Warp, at: int, position: int, bits: int, offsets: Array, shape: tuple[int, int, bool], group: int
    ) -> None:
        shadow = self.shadows[w.block.rank]
        shadow.read(shadow.granules(offsets, 16), self._agents.wgmma_agent(w), group + 1, at)


def _narrowest(programs: Any) -> int:
    """Return the least width in bytes of a shared or generic access in these functions: 1, 2 or 4."""
    least = 4
    for program in programs:
        for instruction in program.function.body:
            parts = instruction.parts
            if parts[0] in ("ld", "st", "atom", "red") and not {"global", "local", "param", "const"} & set(parts):
                kind = parts[-1]
                if kind[-1:] == "8" and kind[-2:] != "28":
                    least = 1
                elif kind[-2:] == "16" and least > 2 and not any(p in ("v2", "v4", "v8") for p in parts):
                    least = 2
    return least
