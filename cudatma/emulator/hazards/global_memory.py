"""Shadow of global memory: the last writer of each granule and its readers since that write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cudatma.emulator.hazards.granules import granule_of
from cudatma.emulator.machine.memory import Region, in_units
from cudatma.emulator.machine.protocols import Launch
from cudatma.emulator.ptx.types import Array

#: Columns of ``writers``. STRENGTH is 0 for a weak access and 1 + scope for a strong access. PLACE is 2 * instruction,
#: plus 1 for an asynchronous access.
WHO, CLOCK, STRENGTH, PLACE, LANE = range(5)
#: Function that maps agents and clocks to a mask of the accesses that are ordered before the current instruction.
Seen = Callable[[Array, Array], Array]


class GlobalShadow:
    """Shadow of a region of global memory: the last writer of each granule and two readers since that write.

    In the first schedule, the emulator creates the shadow of a buffer at the kernel's first write to the buffer. In
    later schedules, it creates the shadow at the start. Buffers that are only read have no shadow. Agents are numbered
    over the whole grid as cluster number * agents per cluster + agent + 1, where 0 means no agent. ``granule`` is a
    power of two of at most 16 bytes.
    """

    def __init__(self, region: Region, granule: int) -> None:
        self.region, self.granule = region, granule
        self._shift = granule.bit_length() - 1
        self.skew = region.base % 16
        self.count = -(-(region.size + self.skew) // granule) + 1
        #: Last writers, shape (granules, 5), with the columns defined above.
        self.writers: Array = np.zeros((self.count, 5), np.int64)
        self._readers: Array | None = None
        #: Whether the previous grid may still be writing the array before griddepcontrol.wait.
        self.is_produced = False
        #: Maps a granule to the clocks that strong writes have published (see MemoryOrder).
        self.published: dict[int, Any] = {}
        #: Maps the offset of a tensor map to the (agent, clock) pairs of each copy through the map. A thread that has
        #: acquired one pair of each copy may edit the map.
        self.map_uses: dict[int, set[Any]] = {}
        #: Maps the agent and clock of a bulk store to the agent and clock of the thread that issued it.
        self.issued: dict[tuple[int, int], tuple[int, int]] = {}

    def granules(self, offsets: Array, size: int) -> Array:
        """Return the granules of accesses of ``size`` bytes at byte offsets, in lane order."""
        first = in_units(offsets + self.skew if self.skew else offsets, self._shift)
        count = max(1, size // self.granule)
        if count == 1:
            return np.asarray(first)
        return (first[:, None] + np.arange(count, dtype=np.int64)).reshape(-1)

    def byte(self, granule: int) -> int:
        """Return the offset of the granule's first byte in the region."""
        return max(0, granule * self.granule - self.skew)

    def record_write(self, indices: Array, who: int, clock: int, strength: int, place: int, lanes: Array | int) -> None:
        rows = self.writers
        rows[indices, WHO] = who
        rows[indices, CLOCK] = clock
        rows[indices, STRENGTH] = strength
        rows[indices, PLACE] = place
        rows[indices, LANE] = lanes

    # ---- readers, two slots per granule with (who, clock, strength, instruction, lanes) each

    def forget_readers(self, indices: Array) -> None:
        """Delete reported readers, so that each access is reported only once."""
        if self._readers is not None:
            self._readers[indices] = 0

    def readers(self, indices: Array) -> Array | None:
        """Return the readers, shape (granules, 2, 5), or None before the first read."""
        return None if self._readers is None else self._readers[indices]

    def record_read(
        self, indices: Array, who: int, clock: int, strength: int, at: int, lanes: Array | int, seen: Seen
    ) -> None:
        """Record a read.

        The read replaces the reader in the first slot if that reader is the same agent or is ordered before the read.
        Otherwise, it replaces the reader in the second slot.
        """
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
    """Replace the last schedule's shadows with empty shadows of the buffers that the kernel is known to write."""
    extra = launch.setup.extra
    produced: set[int] = extra.get("produced", set())
    written: set[int] = extra.setdefault("written", set())
    for region in launch.memory.regions():
        region.shadow = None
        is_tracked = extra.get("track_all", False) and region.is_writable and region.base != launch.param_base
        if is_tracked or region.base in produced or region.base in written:
            region.shadow = GlobalShadow(region, granule_of(launch, "global"))
            region.shadow.is_produced = region.base in produced
