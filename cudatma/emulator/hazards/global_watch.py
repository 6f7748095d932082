"""Races in global memory: generic and asynchronous accesses of all warps of the grid, and of the grid before it.

Source: PTX ISA, "Memory Consistency Model" (morally strong operations, data races, proxies), "griddepcontrol",
"cp.async.bulk.wait_group".
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from cudatma.emulator.hazards.agents import Stamp, used
from cudatma.emulator.hazards.checks import Checks
from cudatma.emulator.hazards.global_checks import LANE_READ, NC, GlobalChecks
from cudatma.emulator.hazards.memory_order import MemoryOrder, strength_of
from cudatma.emulator.hazards.shadow import CLOCK, PLACE, WHO, GlobalShadow, narrowest_global
from cudatma.emulator.machine.memory import Region
from cudatma.emulator.machine.protocols import Launch
from cudatma.emulator.machine.state import Warp
from cudatma.emulator.ptx.types import Array


def prepare(launch: Launch) -> None:
    """Before a schedule: forget the last one's shadows; buffers that the kernel is known to write get new ones."""
    extra = launch.setup.extra
    produced: set[int] = extra.get("produced", set())
    written: set[int] = extra.setdefault("written", set())
    for region in launch.memory.regions():
        region.shadow = None
        is_tracked = extra.get("track_all", False) and region.is_writable and region.base != launch.param_base
        if is_tracked or region.base in produced or region.base in written:
            region.shadow = GlobalShadow(region, _granule(launch))
            region.shadow.is_produced = region.base in produced


def _granule(launch: Launch) -> int:
    extra, image = launch.setup.extra, launch.image
    found: int | None = extra.get("global_granule")
    if found is None:
        names = image.reachable(launch.program.function.name)
        defined = [image.program(name) for name in names if image.module.functions[name].is_defined]
        found = extra["global_granule"] = narrowest_global(defined)
    return found


class GlobalWatch(GlobalChecks):
    """One cluster's accesses to global memory against everybody's."""

    def __init__(self, observer: Checks, number: int) -> None:
        super().__init__(observer, number)
        self.order = MemoryOrder(observer, number)

    # ---- the grid before this one

    def grid_waited(self, w: Warp) -> None:
        """griddepcontrol.wait: the writes of the previous grid are visible, and it reads no more."""
        if self._grid >= 0:
            for clock in self._observer.learners(w):
                clock.order[self._grid] = 1

    # ---- generic accesses

    def read(self, w: Warp, at: int, region: Region, offsets: Array, size: int, order: str) -> None:
        """ld of a tracked buffer. order: "" weak, "nc", or order.scope."""
        shadow = self._shadow(region)
        observer = self._observer
        indices = used(w, at, shadow.granules(offsets, size), len(offsets), size)
        strength = strength_of(order)
        if strength and shadow.published:
            for place in set(indices[:: max(1, len(indices) // len(offsets))].tolist()):
                self.order.read(w, shadow, place, order)
        clock = observer.known(w)
        if shadow.is_produced:
            self._check_grid(w, at, region, clock, "read")
        stamps = observer.lanes.stamps(w, len(indices))
        rows = shadow.writers[indices]
        if np.count_nonzero(rows[:, WHO]):
            self._check_read(w, at, shadow, indices, rows, clock, strength)
            if order == "nc":
                self._tell(w, at, "global_race", shadow, int(indices[int((rows[:, WHO] > 0).argmax())]), NC)
            elif not strength:
                self._check_lanes(w, at, shadow, indices, rows, stamps, LANE_READ)
        for agent, now, part in observer.stamps(w, indices, len(offsets)):
            shadow.read(indices[part], self._base + agent, now, strength, at, stamps[part], self._seen(clock))

    def write(
        self,
        w: Warp,
        at: int,
        region: Region,
        offsets: Array,
        size: int,
        order: str,
        same: Callable[[], bool],
        together: bool = False,
    ) -> None:
        """st, before it happens. same: whether the bytes are what they are to become: such writers do not race."""
        shadow = self._shadow(region, tracks=True)
        observer = self._observer
        indices = shadow.granules(offsets, size)
        strength = strength_of(order)
        clock = observer.known(w)
        self._check_grid(w, at, region, clock, "written")
        stamps = observer.lanes.stamps(w, len(indices), together)
        # A lane may write where it alone has acquired what was written before, as flags that lanes poll one by one.
        parts = observer.knowers(w, indices)
        ordered = [self._check_write(w, at, shadow, part, known, strength, same) for known, part in parts]
        if all(ordered) and not strength and not together:
            self._check_lane_writes(w, at, shadow, indices, stamps, same)
        if strength:
            made: list[Stamp] = [(*self.order.stamp(w), slice(None))]
            for place in set(indices[:: max(1, len(indices) // len(offsets))].tolist()):
                self.order.wrote(w, shadow, place, order, len(offsets), is_update=False)
        else:
            made = observer.stamps(w, indices, len(offsets), together)
        for agent, now, part in made:
            lanes = stamps if len(stamps) == 1 else stamps[part]
            shadow.written(indices[part], self._base + agent, now, strength, 2 * at, lanes)
        for place in set(indices.tolist()) if shadow.published and not strength else ():
            shadow.published.pop(place, None)

    def atomic(self, w: Warp, at: int, region: Region, offsets: Array, size: int, order: str, returns: bool) -> None:
        """atom and red: they do not race with strong accesses; what they see is acquired where they return it."""
        shadow = self._shadow(region, tracks=True)
        observer = self._observer
        indices = shadow.granules(offsets, size)
        strength = strength_of(order)
        places = set(indices[:: max(1, len(indices) // len(offsets))].tolist())
        if returns and shadow.published:
            for place in places:
                self.order.read(w, shadow, place, order)
        clock = observer.known(w)
        self._check_grid(w, at, region, clock, "written")
        self._check_write(w, at, shadow, indices, clock, strength, lambda: False)
        agent, now = self.order.stamp(w)
        stamps = observer.lanes.stamps(w, len(indices))
        shadow.written(indices, self._base + agent, now, strength, 2 * at, stamps)
        for place in places:
            self.order.wrote(w, shadow, place, order, len(offsets), is_update=True)

    # ---- asynchronous accesses

    def async_read(
        self, w: Warp, at: int, region: Region, offsets: Array, size: int, until: tuple[int, int], proxy: bool = True
    ) -> None:
        """A copy that reads a tracked buffer is issued. until: (agent, clock) that a thread acquires by waiting for it.

        proxy: through the asynchronous proxy; cp.async reads as a plain load does.
        """
        shadow = self._shadow(region)
        clock = self._observer.known(w)
        if shadow.is_produced:
            self._check_grid(w, at, region, clock, "read")
        indices = shadow.granules(offsets, size)
        rows = shadow.writers[indices]
        if np.count_nonzero(rows[:, WHO]) and self._check_read(w, at, shadow, indices, rows, clock, 0, proxy) and proxy:
            self._check_lane_alone(w, at, shadow, indices, rows)
        shadow.read(indices, self._base + until[0], until[1], 0, at, 0, self._seen(clock))

    def async_write(
        self, w: Warp, at: int, region: Region, offsets: Array, size: int, until: tuple[int, int], is_reduction: bool
    ) -> None:
        """A bulk store or reduction is issued; a thread that waits for its group, not only for its reads, may read the
        result."""
        shadow = self._shadow(region, tracks=True)
        clock = self._observer.known(w)
        self._check_grid(w, at, region, clock, "written")
        indices = shadow.granules(offsets, size)
        strength = strength_of("relaxed.gpu") if is_reduction else 0
        self._check_write(w, at, shadow, indices, clock, strength, lambda: False, proxy=True)
        shadow.written(indices, self._base + until[0], until[1], strength, 2 * at + 1, 0)
        agent, now = self._observer.stamp(w, 1)
        shadow.issued[self._base + until[0], until[1]] = self._base + agent, now

    # ---- tensor maps in global memory

    def fence_map(self, w: Warp, addresses: set[int], scope: int) -> None:
        """fence.proxy.tensormap::generic.acquire: the maps at these addresses may be used as they are now."""
        for clock in self._observer.learners(w):
            known = clock.bare()
            clock.beyond().maps.update({(address, scope): known for address in addresses})

    def map_read(self, w: Warp, at: int, region: Region, offset: int) -> None:
        """The 128 bytes of a tensor map are used."""
        shadow: GlobalShadow | None = region.shadow
        if shadow is None:
            return
        indices = shadow.granules(np.arange(offset, offset + 128, 16), 16)
        rows = shadow.writers[indices]
        edited = (rows[:, WHO] > 0) & (rows[:, PLACE] & 1 == 0)
        if not edited.any():
            return
        known = self._observer.known(w)
        distances = np.array([self._distance(w, int(who)) if who else 0 for who in rows[:, WHO]])
        for (address, scope), fenced in known.far.maps.items() if known.far is not None else ():
            if address == region.base + offset:
                edited &= ~(self._seen(fenced)(rows[:, WHO], rows[:, CLOCK]) & (distances <= scope))
        if edited.any():
            text = (
                "a tensor map was edited here and no fence.proxy.tensormap::generic.acquire of its address follows, "
                "with a scope that includes the thread that edited it"
            )
            self._tell(w, at, "tensor_map_fence", shadow, int(indices[int(edited.argmax())]), text)

    def map_in_use(self, w: Warp, region: Region, offset: int, *until: tuple[int, int]) -> None:
        """A copy through a tensor map is issued; a thread that has waited for it in one of these ways may edit the
        map."""
        shadow: GlobalShadow | None = region.shadow
        if shadow is not None:
            indices = shadow.granules(np.arange(offset, offset + 128, 16), 16)
            seen = self._seen(self._observer.known(w))
            shadow.read(indices, self._base + until[0][0], until[0][1], 0, -1, 0, seen)
            uses = shadow.map_uses.setdefault(offset, set())
            uses.add(tuple((self._base + agent, clock) for agent, clock in until))

    def map_edited(self, w: Warp, at: int, region: Region, offset: int, together: bool) -> None:
        """tensormap.replace or tensormap.cp_fenceproxy writes a map. together: by several lanes in one instruction."""
        shadow = self._shadow(region, tracks=True)
        chunks = np.arange(offset, offset + 128, 16)
        indices = shadow.granules(chunks, 16)
        seen = self._seen(self._observer.known(w), performed=True)
        uses = shadow.map_uses.pop(offset, ())
        if not all(any(seen(*map(np.array, use)) for use in ways) for ways in uses):
            text = "a copy through this tensor map may be in flight: nothing orders this edit after it"
            self._tell(w, at, "tensor_map_in_use", shadow, int(indices[0]), text)
        if uses:
            shadow.forget_readers(indices)
        self.write(w, at, region, chunks, 16, "", lambda: False, together)

    def _shadow(self, region: Region, tracks: bool = False) -> GlobalShadow:
        """The shadow of a region, made at its first write."""
        shadow: GlobalShadow | None = region.shadow
        if shadow is None:
            shadow = region.shadow = GlobalShadow(region, _granule(self._observer.launch))
        if tracks:
            self._observer.launch.setup.extra["written"].add(region.base)
        return shadow
