"""What is known of every few bytes of shared and of global memory: their last writer, and readers since then.

Happens-before is kept with vector clocks. Agents are the warps of a cluster, one more a warp for its wgmmas and one for
its cp.asyncs, one a thread that issues bulk stores, and one an mbarrier (its clock is its phase).
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any

import numpy as np

from cudatma.emulator.hazards.clocks import Clock
from cudatma.emulator.hazards.report import Place
from cudatma.emulator.machine.memory import Region, in_units
from cudatma.emulator.ptx.types import Array

#: Bits of Shadow.box_plane that distinguish the planes of one tensor map.
PLANE_BITS = 20
#: Shadow.strength of bytes that an asynchronous reduction wrote last.
REDUCED = -1
#: Bits of Shadow.reads that hold the instruction.
_AT_BITS = 24


class Shadow:
    """Per granule: writer agent (-1: none), its clock, flags; a row of read clocks for each agent that has read.

    granule: bytes of one entry; the narrowest access that the kernel makes to shared memory, at most 4.
    """

    def __init__(self, size: int, granule: int) -> None:
        self.granule = granule
        self._shift = granule.bit_length() - 1
        count = -(-size // granule) + 16
        self.writer: Array = np.full(count, -1, np.int32)
        self.writer_clock: Array = np.zeros(count, np.int32)
        self.writer_at: Array = np.full(count, -1, np.int32)
        self.is_async: Array = np.zeros(count, bool)
        #: 0 where a weak store or a copy wrote last, REDUCED where an asynchronous reduction did, else 1 + the scope of
        #: the strong store or atomic operation.
        self.strength: Array = np.zeros(count, np.int8)
        self.is_barrier: Array = np.zeros(count, bool)
        self.in_flight: Array = np.zeros(count, np.int32)
        #: Whether tensor boxes have been laid down here, swizzled ones, and ones that begin off their pattern.
        self.has_boxes = self.has_swizzled = self.has_crooked = False
        self.mode: Array = np.zeros(-(-size // 16) + 16, np.int8)
        #: Row and column of each 16-byte chunk in the tensor box that laid it down, -1 where plain code wrote.
        self.box_row: Array = np.full(len(self.mode), -1, np.int32)
        self.box_column: Array = np.full(len(self.mode), -1, np.int32)
        #: The two-dimensional plane of a box that each chunk belongs to: a number, and from bit PLANE_BITS on the
        #: tensor map. 0 if the rows of the box need not be rows of a matrix.
        self.box_plane: Array = np.zeros(len(self.mode), np.int32)
        self.row_agents: list[int] = []
        #: Of each row, whether its reads are strong ones: plain writes do not race with them, copies do.
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
        #: (warp + 1, how often its lanes have met, lane) of the last plain write and read, packed by LaneRaces.
        self.lane_writes: Array = np.zeros(count, np.int64)
        self.lane_reads: Array = np.zeros(count, np.int64)

    def granules(self, offsets: Array, size: int) -> Array:
        """Indices of the granules of accesses of ``size`` bytes at byte offsets: flat, perhaps with repetitions."""
        first = in_units(offsets, self._shift)
        count = max(1, size // self.granule)
        if count == 1:
            return np.asarray(first)
        steps = self._steps.get(count)
        if steps is None:
            steps = self._steps[count] = np.arange(count, dtype=np.int64)
        return (first[:, None] + steps).reshape(-1)

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
        """The instruction of the last read of a granule by one of some agents, -1 for none."""
        found = [int(self.reads[row, granule]) for row, agent in enumerate(self.row_agents) if agent in agents]
        return max(found) & (1 << _AT_BITS) - 1 if max(found, default=0) else -1

    def written(self, indices: Array, agent: int, clock: int, at: int, is_async: bool) -> None:
        """Record a write."""
        self.writer[indices] = agent
        self.writer_clock[indices] = clock
        self.writer_at[indices] = at
        self.is_async[indices] = is_async
        self.strength[indices] = 0

    def issued(self, until: tuple[int, int], operation: AsyncWrite) -> None:
        """Note who issued a copy. until: the agent and clock that are the writer of its bytes."""
        ends = int(operation.indices.min()), int(operation.indices.max())
        self.issuers.setdefault(until, []).append((*ends, *operation.issuer))

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


@dataclass(frozen=True, slots=True)
class Awaited:
    """What a copy ends, and what has to be waited for before its bytes are read. advice: the call that does so."""

    name: str = ""
    advice: str = ""
    places: tuple[Place, ...] = ()


class AsyncWrite:
    """A copy into shared memory that is under way. number: its value in Shadow.in_flight; awaited: what it ends;
    barrier: the mbarrier that its bytes complete on, None for a cp.async; phase: the barrier's phase at the issue;
    issuer: the agent and clock of its issue."""

    __slots__ = ("at", "awaited", "barrier", "indices", "issuer", "number", "phase", "shadow", "what")

    def __init__(
        self,
        number: int,
        at: int,
        shadow: Shadow,
        indices: Array,
        what: str,
        awaited: Awaited,
        barrier: Any,
        issuer: tuple[int, int],
    ) -> None:
        self.number, self.at, self.shadow, self.indices, self.what = number, at, shadow, indices, what
        self.awaited, self.barrier, self.issuer = awaited, barrier, issuer
        self.phase = 0 if barrier is None else barrier.phase


def narrowest(programs: Any) -> int:
    """The least width in bytes of a shared or generic access in these functions, 1, 2 or 4."""
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


#: Columns of ``writers``. STRENGTH: 0 for a weak access, 1 + scope for a strong one. PLACE: instruction * 2 + async.
WHO, CLOCK, STRENGTH, PLACE, LANE = range(5)
#: Decides, from positions among the accessed granules and their contents, which of them are ordered before now.
Seen = Callable[[Array, Array], Array]


class GlobalShadow:
    """The table of one region of global memory: the last writer, and two of the readers since then.

    A buffer gets its shadow when a kernel first writes to it, and from the next schedule on before it begins; buffers
    that are only read cost nothing. Agents are numbered over the whole grid, cluster number * agents of a cluster +
    agent + 1; 0 is no agent. granule: bytes of one entry, a power of two of at most 16.
    """

    def __init__(self, region: Region, granule: int) -> None:
        self.region, self.granule = region, granule
        self._shift = granule.bit_length() - 1
        self.skew = region.base % 16
        self.count = -(-(region.size + self.skew) // granule) + 1
        #: (granules, 5): the columns above.
        self.writers: Array = np.zeros((self.count, 5), np.int64)
        self._readers: Array | None = None
        #: The array belongs to the grid before this one until griddepcontrol.wait.
        self.is_produced = False
        #: By granule: what strong writes have published there, see MemoryOrder.
        self.published: dict[int, Any] = {}
        #: By offset of a tensor map: what a thread has to know of each copy through it, one of several.
        self.map_uses: dict[int, set[Any]] = {}
        #: (who, clock) of bulk stores -> the same of the thread that issued them.
        self.issued: dict[tuple[int, int], tuple[int, int]] = {}

    def granules(self, offsets: Array, size: int) -> Array:
        """Indices of the granules of accesses of ``size`` bytes at byte offsets, lane after lane."""
        first = in_units(offsets + self.skew if self.skew else offsets, self._shift)
        count = max(1, size // self.granule)
        if count == 1:
            return np.asarray(first)
        return (first[:, None] + np.arange(count, dtype=np.int64)).reshape(-1)

    def byte(self, granule: int) -> int:
        """The offset in the region of a granule's first byte."""
        return max(0, granule * self.granule - self.skew)

    def written(self, indices: Array, who: int, clock: int, strength: int, place: int, lanes: Array | int) -> None:
        """Record a write."""
        rows = self.writers
        rows[indices, WHO] = who
        rows[indices, CLOCK] = clock
        rows[indices, STRENGTH] = strength
        rows[indices, PLACE] = place
        rows[indices, LANE] = lanes

    # ---- readers: two slots each of (who, clock, strength, instruction, lanes)

    def forget_readers(self, indices: Array) -> None:
        """Those that have been reported, so that one access is one finding."""
        if self._readers is not None:
            self._readers[indices] = 0

    def readers(self, indices: Array) -> Array | None:
        """(granules, 2, 5): the readers, or None before the first read."""
        return None if self._readers is None else self._readers[indices]

    def read(
        self, indices: Array, who: int, clock: int, strength: int, at: int, lanes: Array | int, seen: Seen
    ) -> None:
        """Record a read: over the first slot where its reader is the same or ordered before, else over the second."""
        if self._readers is None:
            self._readers = np.zeros((self.count, 2, 5), np.int64)
        first = self._readers[indices, 0]
        free = (first[:, WHO] == 0) | (first[:, WHO] == who)
        if not free.all():
            free |= seen(first[:, WHO], first[:, CLOCK])
        slot = np.where(free, 0, 1)
        rows = self._readers
        rows[indices, slot, WHO] = who
        rows[indices, slot, CLOCK] = clock
        rows[indices, slot, STRENGTH] = strength
        rows[indices, slot, PLACE] = 2 * at
        rows[indices, slot, LANE] = lanes


_WIDTHS = {"8": 1, "16": 2, "32": 4, "64": 8, "128": 16}


def narrowest_global(programs: Any) -> int:
    """The least width in bytes of a global or generic access in these functions, a power of two of at most 16."""
    least = 16
    for program in programs:
        for instruction in program.function.body:
            parts = instruction.parts
            if parts[0] == "cp" and "bulk" not in parts and len(instruction.operands) > 2:
                least = min(least, int(getattr(instruction.operands[2], "bits", 4)) or 4)
            if parts[0] not in ("ld", "st", "atom", "red", "ldu") or {"shared", "local", "param", "const"} & set(parts):
                continue
            kind = parts[-1]
            packed = kind.endswith("x2")
            digits = "".join(c for c in kind.split("x")[0] if c.isdigit())
            width = _WIDTHS.get(digits, 1) * (2 if packed else 1)
            count = next((int(p[1:]) for p in parts if p in ("v2", "v4", "v8")), 1)
            least = min(least, width * count)
    return least
