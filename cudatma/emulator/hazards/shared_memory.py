"""Shadow of shared memory: the last writer of each granule, the readers since that write, and copies in flight.

Vector clocks track the happens-before order. Agents are the warps of a cluster, the wgmmas and the cp.asyncs of each
warp, the threads that issue bulk stores, and the mbarriers. The clock of an mbarrier is its phase.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Any

import numpy as np

from cudatma.emulator.async_copy.mbarrier import MBarrier
from cudatma.emulator.hazards.clocks import Clock
from cudatma.emulator.hazards.granules import granule_of
from cudatma.emulator.hazards.hazard import Place
from cudatma.emulator.machine.events import Copy
from cudatma.emulator.machine.memory import in_units
from cudatma.emulator.machine.protocols import Launch
from cudatma.emulator.machine.state import Cluster
from cudatma.emulator.ptx.types import Array

#: Value of Shadow.strength for bytes that an asynchronous reduction wrote last.
REDUCED = -1
#: Value of Shadow.writer_clock for bytes that are unwritten or that a copy in flight will write. No thread's clock
#: reaches this value.
_NEVER = np.iinfo(np.int32).max
#: Number of bits of Shadow.reads that contain the instruction.
_AT_BITS = 24


class Shadow:
    """Last writer (or -1) of each granule of a CTA's shared memory, its clock, and the readers since that write.

    A granule has the size of the kernel's narrowest access to shared memory, at most 16 bytes.
    """

    def __init__(self, rank: int, size: int, granule: int) -> None:
        """Create an empty shadow. ``rank`` is the CTA's rank in its cluster."""
        self.rank, self.granule = rank, granule
        self._shift = granule.bit_length() - 1
        self.count = count = -(-size // granule) + 16
        self.writer: Array = np.full(count, -1, np.int32)
        self.writer_clock: Array = np.full(count, _NEVER, np.int32)
        self.writer_at: Array = np.full(count, -1, np.int32)
        self.is_async: Array = np.zeros(count, bool)
        #: Strength of the last write: 0 for a weak store or a copy, REDUCED for an asynchronous reduction, and 1 + the
        #: scope for a strong store or an atomic operation.
        self.strength: Array = np.zeros(count, np.int8)
        self.is_barrier: Array = np.zeros(count, bool)
        #: Number of the copy in flight (a key of SharedMemory.flights), or 0 if there is none.
        self.in_flight: Array = np.zeros(count, np.int64)
        self._copies = 0
        self.row_agents: list[int] = []
        #: Whether the reads of each row are strong. Copies race with strong reads, but ordinary writes do not.
        self.row_strong: list[bool] = []
        self._rows: dict[tuple[int, bool], int] = {}
        #: Clock and instruction (packed) of each reader's last read of each granule.
        self.reads: Array = np.zeros((0, count), np.int64)
        #: Maps (granule, CTA rank) to the clock that strong writes pass to strong reads by the same CTA.
        self.sync_clocks: dict[tuple[int, int], Clock] = {}
        #: Maps a granule to the clocks that strong writes have published to other CTAs (see MemoryOrder).
        self.published: dict[int, Any] = {}
        #: Maps the agent and clock of completed copies to (first granule, last granule, agent, clock) of each issue.
        self.issuers: dict[tuple[int, int], list[tuple[int, int, int, int]]] = {}
        self._steps: dict[int, Array] = {}

    def granules(self, offsets: Array, size: int) -> Array:
        """Return the granules of accesses of ``size`` bytes at byte offsets, flat and possibly with repetitions."""
        first = in_units(offsets, self._shift).reshape(-1)
        count = max(1, size // self.granule)
        if count == 1:
            return first
        steps = self._steps.get(count)
        if steps is None:
            steps = self._steps[count] = np.arange(count, dtype=np.int64)
        return (first[:, None] + steps).reshape(-1)

    def bytes_of(self, indices: Array) -> Place:
        """Return the byte range of granules as the place of a hazard."""
        return "bytes", self.rank, int(indices.min()), int(indices.max())

    def record_read(self, indices: Array, agent: int, clock: int, at: int, strong: bool = False) -> None:
        """Record a read. ``strong`` is true if the read is volatile, relaxed or acquiring."""
        self._row(agent, strong)[indices] = clock << _AT_BITS | at

    def _row(self, agent: int, strong: bool) -> Array:
        """Return the row that contains an agent's reads."""
        number = self._rows.get((agent, strong))
        if number is None:
            number = self._rows[agent, strong] = len(self.row_agents)
            self.row_agents.append(agent)
            self.row_strong.append(strong)
            if number >= len(self.reads):
                grown = np.zeros((max(32, 2 * number), self.reads.shape[1]), np.int64)
                grown[:number] = self.reads
                self.reads = grown
        row: Array = self.reads[number]
        return row

    def unordered_reader(self, indices: Array, clock: Clock, by_copy: bool) -> tuple[int, int, int] | None:
        """Return the agent, granule and instruction of a read that is not ordered before ``clock``, or None.

        Strong reads count only for a copy (``by_copy``).
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
        """Return the instruction of the last read of a granule by these agents, or -1 if they have not read it."""
        reads = [int(self.reads[row, granule]) for row, agent in enumerate(self.row_agents) if agent in agents]
        return max(reads) & (1 << _AT_BITS) - 1 if max(reads, default=0) else -1

    def record_write(self, indices: Array, agent: int, clock: int, at: int, is_async: bool) -> None:
        self._record(indices, agent, clock, at, is_async)
        if self._copies:
            self.writer_clock[indices[self.in_flight[indices] != 0]] = _NEVER

    def _record(self, indices: Array, agent: int, clock: int, at: int, is_async: bool) -> None:
        self.writer[indices] = agent
        self.writer_clock[indices] = clock
        self.writer_at[indices] = at
        self.is_async[indices] = is_async
        self.strength[indices] = 0

    def begin_copy(self, indices: Array, number: int) -> None:
        """Mark bytes as the target of copy ``number``, which is in flight."""
        self._copies += 1
        self.in_flight[indices] = number
        self.writer_clock[indices] = _NEVER

    def end_copy(self, indices: Array, number: int, agent: int, clock: int, at: int, is_async: bool) -> None:
        """Record that a copy has written its bytes, except those that a later copy will overwrite."""
        self._copies -= 1
        landed = indices[self.in_flight[indices] == number]
        self.in_flight[landed] = 0
        self._record(landed, agent, clock, at, is_async)

    def record_issue(self, until: tuple[int, int], flight: Flight) -> None:
        """Record the issuer of a copy.

        ``until`` is the agent and clock recorded as the writer of the copied bytes.
        """
        ends = int(flight.indices.min()), int(flight.indices.max())
        self.issuers.setdefault(until, []).append((*ends, *flight.issuer))

    def unordered_writer(self, indices: Array, order: Array, fenced: Array | None) -> tuple[int, int, bool] | None:
        """Return the agent and granule of an unordered write, and whether only a proxy fence is missing, or None.

        ``order`` contains the ordered accesses. For an access through the async proxy, ``fenced`` contains the accesses
        that are visible to this proxy. The granule may also be unwritten, or the target of a copy in flight.
        """
        writers = self.writer[indices]
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
    """A copy in flight. ``issuer`` is the agent and clock of the issue."""

    copy: Copy
    indices: Array
    issuer: tuple[int, int]


def uses_proxy(copy: Copy) -> bool:
    """Return whether a copy writes shared memory through the async proxy."""
    return copy.what not in ("cp.async", "st.async")


class SharedMemory:
    """Shadows of a cluster's shared memories, and the copies in flight to them."""

    def __init__(self, launch: Launch, cluster: Cluster) -> None:
        granule = granule_of(launch, "shared")
        self.shadows = [Shadow(block.rank, block.shared.size, granule) for block in cluster.blocks]
        if launch.reserved_bytes:
            reserved = slice(launch.reserved_start // granule, None)  # The system initializes this part.
            for shadow in self.shadows:
                shadow.writer[reserved] = shadow.writer_clock[reserved] = 0
        self.has_peers = len(cluster.blocks) > 1
        #: Whether a thread has stored to another CTA's shared memory. Fences of shared::cta do not cover such stores.
        self.has_remote_stores = False
        #: Maps the number of each copy in flight to the copy.
        self.flights: dict[int, Flight] = {}

    def is_filling(self, barrier: MBarrier) -> bool:
        """Return whether a copy in flight completes on an mbarrier."""
        return any(flight.copy.barrier is barrier for flight in self.flights.values())
