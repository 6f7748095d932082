"""The shadow of global memory: the last writer of every few bytes, and readers since then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cudatma.emulator.hazards.granules import granule_of
from cudatma.emulator.machine.memory import Region, in_units
from cudatma.emulator.machine.protocols import Launch
from cudatma.emulator.ptx.types import Array

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
        """Forget readers that have been reported, so that one access is one finding."""
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


def prepare(launch: Launch) -> None:
    """Forget the last schedule's shadows; give new ones to buffers that the kernel is known to write."""
    extra = launch.setup.extra
    produced: set[int] = extra.get("produced", set())
    written: set[int] = extra.setdefault("written", set())
    for region in launch.memory.regions():
        region.shadow = None
        is_tracked = extra.get("track_all", False) and region.is_writable and region.base != launch.param_base
        if is_tracked or region.base in produced or region.base in written:
            region.shadow = GlobalShadow(region, granule_of(launch, "global"))
            region.shadow.is_produced = region.base in produced
