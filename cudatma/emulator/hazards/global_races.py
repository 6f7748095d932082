"""Detect races in global memory between the warps of the grid, their copies, and the previous grid.

Source: PTX ISA, "Memory Consistency Model" (morally strong operations, data races, proxies), "griddepcontrol",
"cp.async.bulk.wait_group".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from typing import Any

import numpy as np

from cudatma.descriptor.spec import TiledSpec
from cudatma.emulator.async_copy.groups import Group
from cudatma.emulator.async_copy.mbarrier import MBarrier
from cudatma.emulator.async_copy.tensor_box import Box
from cudatma.emulator.hazards.agents import Agents, Stamp, lanes_now, only_lane, used_granules
from cudatma.emulator.hazards.clocks import Clock, strength_of
from cudatma.emulator.hazards.findings import Reporter
from cudatma.emulator.hazards.global_memory import CLOCK, LANE, PLACE, STRENGTH, WHO, GlobalShadow
from cudatma.emulator.hazards.granules import granule_of
from cudatma.emulator.hazards.lane_races import LaneRaces, cause_of_write
from cudatma.emulator.hazards.memory_order import MemoryOrder
from cudatma.emulator.hazards.unused_loads import UnusedLoads, guarded_stores, stores_of
from cudatma.emulator.machine import access
from cudatma.emulator.machine.events import Copy, Observer, Same, never
from cudatma.emulator.machine.memory import Region
from cudatma.emulator.machine.state import Warp
from cudatma.emulator.ptx.types import LANES, SCOPES, Array

_CHUNK = 16
_LANE, _ALL_LANES = 63, (1 << LANES) - 1
_NC = "ld.global.nc reads bytes that this kernel writes, so the read-only path may return stale data"
_LANE_READ = "{} of the same warp wrote these bytes, but the lanes have not synchronized since"
_LANE_WRITE = "{} of the same warp wrote these bytes, but the lanes have not synchronized between the two writes"
_LANE_REUSE = "{} of the same warp reads these bytes, but the lanes have not synchronized before this write"


class GlobalRaces(Observer):
    """Hazard check that compares the accesses of a cluster to global memory with the accesses of all clusters."""

    def __init__(self, agents: Agents, lanes: LaneRaces, order: MemoryOrder, reporter: Reporter, number: int) -> None:
        """Create the check for cluster ``number``. Agents are numbered separately in each cluster."""
        self._agents, self._lanes, self._order, self._reporter = agents, lanes, order, reporter
        self._launch, self._number = reporter.launch, number
        self._base = number * agents.size + 1
        self._unused = UnusedLoads()
        self._grid = agents.agent("grid", "grid") if self._launch.setup.extra.get("programmatic") else -1

    # ---- the previous grid

    def grid_waited(self, w: Warp) -> None:
        """Record that the previous grid has completed and that its writes are visible."""
        if self._grid >= 0:
            for clock in self._agents.learners(w):
                clock.order[self._grid] = 1

    # ---- ordinary accesses

    def global_read(self, w: Warp, at: int, region: Region, offsets: Array, size: int, order: str) -> None:
        shadow: GlobalShadow | None = region.shadow
        if shadow is None:
            return
        agents = self._agents
        indices = used_granules(w, at, shadow.granules(offsets, size), len(offsets), size)
        strength = strength_of(order)
        if strength and shadow.published:
            for place in _places(indices, offsets):
                self._order.observe(w, shadow, place, order)
        clock = agents.known(w)
        if shadow.is_produced:
            self._check_grid(w, at, region, clock, "read")
        stamps = self._lanes.stamps(w, len(indices))
        rows = shadow.writers[indices]
        if np.count_nonzero(rows[:, WHO]):
            self._check_read(w, at, shadow, indices, rows, clock, strength)
            if order == "nc":
                place = int(indices[int((rows[:, WHO] > 0).argmax())])
                self._report(w, at, "global_race", shadow, place, _NC)
            elif not strength:
                self._check_lanes(w, at, shadow, indices, rows, stamps, _LANE_READ)
        for agent, now, part in agents.stamps(w, indices, len(offsets)):
            shadow.record_read(indices[part], self._base + agent, now, strength, at, stamps[part], self._seen(clock))

    def global_write(self, w: Warp, at: int, region: Region, offsets: Array, size: int, order: str, same: Same) -> None:
        self._write(w, at, region, offsets, size, order, same, False)

    def _write(
        self, w: Warp, at: int, region: Region, offsets: Array, size: int, order: str, same: Same, together: bool
    ) -> None:
        """Check and record a store. A store of values that memory already contains does not race."""
        if at in guarded_stores(w.split.frame.program):
            self._unused.stored(w.agent, at, lanes_now(w))
        shadow = self._tracked(region)
        agents = self._agents
        indices = shadow.granules(offsets, size)
        strength = strength_of(order)
        clock = agents.known(w)
        self._check_grid(w, at, region, clock, "written")
        stamps = self._lanes.stamps(w, len(indices), together)
        # A lane may be the only one that has acquired the previous write, for example a write to a flag that it polls.
        parts = agents.knowers(w, indices)
        ordered = [self._check_write(w, at, shadow, part, known, strength, same) for known, part in parts]
        if all(ordered) and not strength and not together:
            self._check_lane_writes(w, at, shadow, indices, stamps, same)
        if strength:
            written: list[Stamp] = [(*self._order.stamp(w), slice(None))]
            for place in _places(indices, offsets):
                self._order.publish(w, shadow, place, order, len(offsets), is_update=False)
        else:
            written = agents.stamps(w, indices, len(offsets), together)
        for agent, now, part in written:
            lanes = stamps if len(stamps) == 1 else stamps[part]
            shadow.record_write(indices[part], self._base + agent, now, strength, 2 * at, lanes)
        for place in set(indices.tolist()) if shadow.published and not strength else ():
            shadow.published.pop(place, None)

    def atomic(self, w: Warp, at: int, addresses: Array, space: str, size: int, order: str, returns: bool) -> None:
        """Check and record the lanes whose operands are in global memory, region by region."""
        inside = addresses[addresses >> np.uint64(60) == 0]
        if space == "shared" or not inside.size:
            return
        for region, lanes in _regions(w, at, inside, size):
            offsets = (inside[lanes] - np.uint64(region.base)).view(np.int64)
            self._atomic(w, at, region, offsets, size, order, returns)

    def _atomic(self, w: Warp, at: int, region: Region, offsets: Array, size: int, order: str, returns: bool) -> None:
        """Check and record an atomic operation, which does not race with strong accesses.

        An atomic operation that returns a value acquires the write that it observes.
        """
        shadow = self._tracked(region)
        indices = shadow.granules(offsets, size)
        strength, places = strength_of(order), _places(indices, offsets)
        if returns and shadow.published:
            for place in places:
                self._order.observe(w, shadow, place, order)
        clock = self._agents.known(w)
        self._check_grid(w, at, region, clock, "written")
        self._check_write(w, at, shadow, indices, clock, strength, never)
        agent, now = self._order.stamp(w)
        stamps = self._lanes.stamps(w, len(indices))
        shadow.record_write(indices, self._base + agent, now, strength, 2 * at, stamps)
        for place in places:
            self._order.publish(w, shadow, place, order, len(offsets), is_update=True)

    # ---- sources of copies

    def global_source(self, w: Warp, at: int, region: Region, offsets: Array, barrier: MBarrier) -> None:
        self._copy_reads(w, at, region, offsets, _CHUNK, self._agents.load_until(barrier), True)

    def tensor_source(self, copy: Copy, region: Region | None, group: Group) -> None:
        # cp.async.bulk.wait_group.read covers reads of the tensor map, and CUTLASS edits maps after this instruction.
        until, read = self._agents.load_until(copy.barrier), self._agents.read_until(copy.w, group)
        self._map_in_use(copy.w, copy.map_address, until, read)
        if region is None or region.shadow is None:
            return
        box: Box = copy.box
        places = box.gmem + (box.spec.address - region.base)
        for length in np.unique(box.valid).tolist():
            if length:
                self._copy_reads(copy.w, copy.at, region, places[box.valid == length], length, until, True)

    def cp_async_source(self, w: Warp, at: int, addresses: Array, counts: Array, group: Group) -> None:
        """Check only the bytes that each lane reads."""
        until = self._agents.copies_until(w, group)
        least, most = int(counts.min()), int(counts.max())
        for size in (most,) if least == most else np.unique(counts).tolist():
            if not size:
                continue
            sources = addresses[counts == size]
            for region, lanes in _regions(w, at, sources, 1):
                offsets = (sources[lanes] - np.uint64(region.base)).view(np.int64)
                self._copy_reads(w, at, region, offsets, size, until, False)

    def _copy_reads(
        self, w: Warp, at: int, region: Region, offsets: Array, size: int, until: tuple[int, int], proxy: bool
    ) -> None:
        """Check and record the reads of a copy.

        A thread that waits for the copy acquires ``until``, an (agent, clock) pair. ``proxy`` is true if the reads use
        the async proxy. cp.async reads through the generic proxy, like an ordinary load.
        """
        shadow: GlobalShadow | None = region.shadow
        if shadow is None:
            return
        clock = self._agents.known(w)
        if shadow.is_produced:
            self._check_grid(w, at, region, clock, "read")
        indices = shadow.granules(offsets, size)
        rows = shadow.writers[indices]
        if np.count_nonzero(rows[:, WHO]) and self._check_read(w, at, shadow, indices, rows, clock, 0, proxy) and proxy:
            self._check_lane_alone(w, at, shadow, indices, rows)
        shadow.record_read(indices, self._base + until[0], until[1], 0, at, 0, self._seen(clock))

    # ---- targets of stores

    def bulk_target(self, w: Warp, at: int, region: Region, offsets: Array, group: Group, is_reduction: bool) -> None:
        """Check and record a bulk store or reduction.

        A thread may read the result only after it has waited for the completion of the group, not only for its reads.
        """
        shadow = self._tracked(region)
        clock, until = self._agents.known(w), self._agents.store_until(w, group)
        self._check_grid(w, at, region, clock, "written")
        indices = shadow.granules(offsets, _CHUNK)
        strength = strength_of("relaxed.gpu") if is_reduction else 0
        self._check_write(w, at, shadow, indices, clock, strength, never, proxy=True)
        shadow.record_write(indices, self._base + until[0], until[1], strength, 2 * at + 1, 0)
        agent, now = self._agents.stamp(w, 1)
        shadow.issued[self._base + until[0], until[1]] = self._base + agent, now

    def tensor_target(
        self, w: Warp, at: int, box: Box, written: Array, operation: str, group: Group, is_repeat: bool
    ) -> None:
        self._check_distinct(w, at, box, written, operation)
        region = self._launch.memory.find(box.spec.address)
        if is_repeat or region is None or not written.any():
            return
        offsets = box.gmem[written] + (box.spec.address - region.base)
        inside = offsets[(offsets >= 0) & (offsets + _CHUNK <= region.size)]
        if inside.size:
            self.bulk_target(w, at, region, inside, group, bool(operation))

    def _check_distinct(self, w: Warp, at: int, box: Box, written: Array, operation: str) -> None:
        """Report a store whose elements overlap, because TMA writes elements in an undefined order.

        For a reduction, this is only a warning. Reductions are atomic for each element, so a sum into one row may be
        intended.
        """
        spec = box.spec
        if not isinstance(spec, TiledSpec) or not _may_overlap(spec):
            return
        places = box.gmem[written]
        if np.unique(places).size == places.size:
            return
        strides = f"strides {', '.join(map(str, spec.strides_bytes))} bytes"
        what = f"reduction .{operation}" if operation else "store"
        message = (
            f"several elements of a tensor {what} are written to the same bytes, because the tensor map has {strides}"
        )
        advice = "a tensor map for the store in which each element has separate bytes; use strides of 0 only for loads"
        self._reporter.report("write_race", w, at, message, advice=advice, is_warning=bool(operation))

    # ---- tensor maps

    def map_read(self, w: Warp, at: int, region: Region, offset: int) -> None:
        """Check that a fence follows every edit of the tensor map's 128 bytes."""
        shadow: GlobalShadow | None = region.shadow
        if shadow is None:
            return
        indices = shadow.granules(_map_chunks(offset), _CHUNK)
        rows = shadow.writers[indices]
        edited = (rows[:, WHO] > 0) & (rows[:, PLACE] & 1 == 0)
        if not edited.any():
            return
        known = self._agents.known(w)
        distances = np.array([self._distance(w, int(who)) if who else 0 for who in rows[:, WHO]])
        for (address, scope), fenced in known.far.maps.items() if known.far is not None else ():
            if address == region.base + offset:
                edited &= ~(self._seen(fenced)(rows[:, WHO], rows[:, CLOCK]) & (distances <= scope))
        if edited.any():
            text = (
                "the tensor map was edited, and the edit is not followed by a fence.proxy.tensormap::generic.acquire "
                "of the map's address with a scope that includes the editing thread"
            )
            self._report(w, at, "tensor_map_fence", shadow, int(indices[int(edited.argmax())]), text)

    def box_stored(
        self, w: Warp, at: int, block: Any, offsets: Array, box: Box, map_address: int, group: Group
    ) -> None:
        self._map_in_use(w, map_address, self._agents.read_until(w, group))

    def _map_in_use(self, w: Warp, address: int, *until: tuple[int, int]) -> None:
        """Record a copy through a tensor map.

        A thread that has acquired one of the (agent, clock) pairs in ``until`` may edit the map.
        """
        region = self._launch.memory.find(address)
        shadow: GlobalShadow | None = None if region is None else region.shadow
        if region is None or shadow is None:
            return
        offset = address - region.base
        indices = shadow.granules(_map_chunks(offset), _CHUNK)
        seen = self._seen(self._agents.known(w))
        shadow.record_read(indices, self._base + until[0][0], until[0][1], 0, -1, 0, seen)
        uses = shadow.map_uses.setdefault(offset, set())
        uses.add(tuple((self._base + agent, clock) for agent, clock in until))

    def map_edited(self, w: Warp, at: int, region: Region, offset: int, together: bool) -> None:
        """Check that copies through the map have completed, and check the edit like a store."""
        shadow, chunks = self._tracked(region), _map_chunks(offset)
        indices = shadow.granules(chunks, _CHUNK)
        seen = self._seen(self._agents.known(w), performed=True)
        uses = shadow.map_uses.pop(offset, ())
        if not all(any(seen(*map(np.array, use)) for use in ways) for ways in uses):
            text = "a copy through this tensor map may be in flight, because this edit does not wait for the copy"
            self._report(w, at, "tensor_map_in_use", shadow, int(indices[0]), text)
        if uses:
            shadow.forget_readers(indices)
        self._write(w, at, region, chunks, _CHUNK, "", never, together)

    def _tracked(self, region: Region) -> GlobalShadow:
        """Return the shadow of a region that the kernel writes. The first write creates the shadow."""
        shadow: GlobalShadow | None = region.shadow
        if shadow is None:
            shadow = region.shadow = GlobalShadow(region, granule_of(self._launch, "global"))
        self._launch.setup.extra["written"].add(region.base)
        return shadow

    # ---- rules

    def _check_grid(self, w: Warp, at: int, region: Region, clock: Clock, what: str) -> None:
        if self._grid >= 0 and not clock.order[self._grid]:
            message = f"{region.name} is {what}, but this access is not ordered after griddepcontrol.wait"
            self._reporter.report("grid_dependency", w, at, message)

    def _seen(
        self, clock: Clock, through_proxy: bool = False, performed: bool = False
    ) -> Callable[[Array, Array], Array]:
        """Return a function that decides which accesses a clock includes, with the same flags as Clock.of()."""
        size, number = self._agents.size, self._number

        def seen(who: Array, when: Array) -> Array:
            known = clock.of(np.maximum(who - 1, 0), size, number, through_proxy, performed)
            result: Array = (who == 0) | (when <= known)
            return result

        return seen

    def _both_strong(self, w: Warp, strength: int, who: int, other: int) -> bool:
        """Return whether two accesses are morally strong, that is, strong with scopes that include both threads."""
        weaker = min(strength, other)
        return weaker > 0 and weaker - 1 >= self._distance(w, who)

    def _distance(self, w: Warp, who: int) -> int:
        """Return the narrowest scope that includes both a warp and another agent."""
        agents = self._agents
        number, agent = divmod(who - 1, agents.size)
        if number != self._number:
            return SCOPES["gpu"]
        if not agents.is_own(agent):
            return SCOPES["cluster"]
        return SCOPES["cta" if agent % agents.warps // w.block.warp_count == w.block.rank else "cluster"]

    def _check_read(
        self,
        w: Warp,
        at: int,
        shadow: GlobalShadow,
        indices: Array,
        rows: Array,
        clock: Clock,
        strength: int,
        proxy: bool = False,
    ) -> bool:
        """Report a read that is not ordered after the writes of its bytes. Return whether the read is ordered."""
        late = ~self._seen(clock)(rows[:, WHO], rows[:, CLOCK])
        for position in np.flatnonzero(late).tolist():
            row = rows[position]
            if self._both_strong(w, strength, int(row[WHO]), int(row[STRENGTH])):
                continue
            if strength and self._observed(clock, row):
                continue
            place = int(indices[position])
            if row[PLACE] & 1 and self._follows_issue(shadow, clock, row):
                text = f"these bytes are read without a wait for the completion of {self._who(int(row[WHO]))}"
                self._report(w, at, "read_before_store", shadow, place, text)
            else:
                text = f"{self._who(int(row[WHO]))} wrote these bytes, but this read does not wait for the write"
                report = partial(self._report, w, at, "global_race", shadow, place, text)
                if self._distance(w, int(row[WHO])) == SCOPES["cta"] and self._defer(
                    w, w.agent, lanes_now(w), at, report
                ):
                    continue
                report()
            return False
        return not proxy or self._check_proxy(w, at, shadow, indices, rows, clock, "reads")

    def _follows_issue(self, shadow: GlobalShadow, clock: Clock, row: Array) -> bool:
        """Return whether a read is ordered after the issue of a bulk store but not after its completion."""
        who, now = shadow.issued[int(row[WHO]), int(row[CLOCK])]
        return bool(self._seen(clock)(np.array([who]), np.array([now]))[0])

    def _observed(self, clock: Clock, row: Array) -> bool:
        """Return whether an observed flag covers a write. A strong read accesses memory directly and needs no fence."""
        flags = clock.far.seen.values() if clock.far is not None else ()
        return any(bool(self._seen(known)(row[WHO : WHO + 1], row[CLOCK : CLOCK + 1])[0]) for known in flags)

    def _check_proxy(
        self, w: Warp, at: int, shadow: GlobalShadow, indices: Array, rows: Array, clock: Clock, verb: str
    ) -> bool:
        unfenced = (rows[:, PLACE] & 1 == 0) & ~self._seen(clock, through_proxy=True)(rows[:, WHO], rows[:, CLOCK])
        if not unfenced.any():
            return True
        position = int(unfenced.argmax())
        who = self._who(int(rows[position, WHO]))
        text = f"the async proxy {verb} bytes that {who} stored, without a proxy fence in between"
        self._report(w, at, "missing_proxy_fence", shadow, int(indices[position]), text)
        return False

    def _check_write(
        self,
        w: Warp,
        at: int,
        shadow: GlobalShadow,
        indices: Array,
        clock: Clock,
        strength: int,
        same: Same,
        proxy: bool = False,
    ) -> bool:
        """Report a write that is not ordered after earlier writes and reads. Return whether the write is ordered."""
        seen = self._seen(clock)
        rows = shadow.writers[indices]
        if np.count_nonzero(rows[:, WHO]):
            for position in np.flatnonzero(~seen(rows[:, WHO], rows[:, CLOCK])).tolist():
                row = rows[position]
                if self._both_strong(w, strength, int(row[WHO]), int(row[STRENGTH])) or same():
                    continue
                kind = "write_race" if row[PLACE] & 1 or proxy else "global_race"
                who = self._who(int(row[WHO]))
                text = f"{who} wrote these bytes, and this write overwrites them without waiting for the earlier write"
                self._report(w, at, kind, shadow, int(indices[position]), text)
                return False
            if proxy and not self._check_proxy(w, at, shadow, indices, rows, clock, "overwrites"):
                return False
        readers = shadow.readers(indices)
        if readers is None:
            return True
        late = ~self._seen(clock, performed=True)(readers[:, :, WHO], readers[:, :, CLOCK])
        for position, slot in np.argwhere(late).tolist():
            reader = readers[position, slot].tolist()
            if self._both_strong(w, strength, reader[WHO], reader[STRENGTH]) or same():
                continue
            text = f"{self._who(reader[WHO])} reads these bytes, and this write does not wait for the read"
            load = reader[PLACE] // 2
            report = partial(self._report, w, at, "global_race", shadow, int(indices[position]), text, load)
            agent = (reader[WHO] - 1) % self._agents.size
            if self._distance(w, reader[WHO]) == SCOPES["cta"] and self._defer(w, agent, _ALL_LANES, load, report):
                continue
            report()
            return False
        return True

    def _check_lanes(
        self,
        w: Warp,
        at: int,
        shadow: GlobalShadow,
        indices: Array,
        rows: Array,
        stamps: Array,
        text: str,
        is_read: bool = False,
    ) -> None:
        """Report an access that conflicts with an access by another lane.

        ``rows`` contains the last writers of the granules, or their readers if ``is_read`` is true.
        """
        lanes = self._lanes
        position = lanes.conflict(w, np.where(rows[:, STRENGTH] > 0, 0, rows[:, LANE]), stamps)
        if position >= 0:
            message = text.format(lanes.lane(int(rows[position, LANE])))
            read_at = int(rows[position, PLACE]) // 2 if is_read else -1
            place = int(indices[position])
            cause = "" if text is _LANE_READ else cause_of_write(indices, place, is_read)
            report = partial(self._report, w, at, "lane_race", shadow, place, message, read_at, cause)
            lane = int(rows[position, LANE]) & _LANE if is_read else int(stamps[position]) & _LANE
            load = read_at if is_read else at if text is _LANE_READ else -1
            if load < 0 or lane >= LANES or not self._defer(w, w.agent, 1 << lane, load, report):
                report()

    def _defer(self, w: Warp, agent: int, lanes: int, load: int, report: Callable[[], None]) -> bool:
        """Defer a race to UnusedLoads if only guarded stores use the loaded value. Return whether it was deferred."""
        program = w.split.frame.program
        stores = stores_of(program, load) if 0 <= load < len(program.function.body) else None
        if stores is not None:
            self._unused.defer(agent, lanes, stores, report)
        return stores is not None

    def _check_lane_writes(
        self, w: Warp, at: int, shadow: GlobalShadow, indices: Array, stamps: Array, same: Same
    ) -> None:
        rows = shadow.writers[indices]
        lanes = self._lanes
        if lanes.conflict(w, rows[:, LANE], stamps) >= 0 and not same():
            self._check_lanes(w, at, shadow, indices, rows, stamps, _LANE_WRITE)
        readers = shadow.readers(indices)
        if readers is None:
            return
        for slot in (0, 1):
            row = readers[:, slot]
            if lanes.conflict(w, row[:, LANE], stamps) >= 0 and not same():
                self._check_lanes(w, at, shadow, indices, row, stamps, _LANE_REUSE, is_read=True)

    def _check_lane_alone(self, w: Warp, at: int, shadow: GlobalShadow, indices: Array, rows: Array) -> None:
        """Check that lanes have synchronized before one of them issues a copy of bytes that the others stored."""
        lanes = self._lanes
        if only_lane(w) >= 0:
            weak = rows.copy()
            weak[:, STRENGTH] = 0
            self._check_lanes(w, at, shadow, indices, weak, lanes.stamps(w, len(indices)), _LANE_READ)

    # ---- messages

    def _who(self, who: int) -> str:
        agents, launch = self._agents, self._launch
        number, agent = divmod(who - 1, agents.size)
        if number == self._number:
            return agents.who(agent)
        blocks = len(agents.cluster.blocks)
        rank, warp = divmod(agent % agents.warps, agents.warps // blocks)
        x, y, z = launch.started[number]
        if not agents.is_own(agent):
            return f"a copy of {'block' if blocks == 1 else 'the cluster of block'} {(x, y, z)}"
        wide, high, _ = launch.cluster
        return f"warp {warp} of block {(x + rank % wide, y + rank // wide % high, z + rank // wide // high)}"

    def _report(
        self,
        w: Warp,
        at: int,
        kind: str,
        shadow: GlobalShadow,
        place: int,
        text: str,
        read_at: int = -1,
        cause: str = "",
    ) -> None:
        """Record a hazard in a buffer, with the last writer and the preceding read."""
        offset = shadow.byte(place)
        written_at = int(shadow.writers[place, PLACE]) // 2 if shadow.writers[place, WHO] else -1
        others = self._reporter.earlier(read_at, written_at)
        region = shadow.region
        where, address = region.element(offset), region.base + offset
        shown = "; ".join([f"address {address:#x}, {where}", *map(str, others)])
        self._reporter.report(
            kind, w, at, f"{text} ({shown})", cause=cause, others=others, where=where, address=address
        )


def _places(indices: Array, offsets: Array) -> set[int]:
    """Return the first granule of each lane's access."""
    return set(indices[:: max(1, len(indices) // len(offsets))].tolist())


def _map_chunks(offset: int) -> Array:
    """Return the offsets of a tensor map's chunks."""
    return np.arange(offset, offset + 128, _CHUNK)


def _regions(w: Warp, at: int, addresses: Array, size: int) -> Iterable[tuple[Region, Array]]:
    """Yield each region of global memory with the indices of the lanes that access it. Trap on other addresses."""
    whole = access.global_region(w, at, addresses, size)
    return access.regions_of(w, at, addresses, size) if whole is None else [(whole, np.arange(addresses.size))]


@lru_cache(maxsize=1024)
def _may_overlap(spec: TiledSpec) -> bool:
    """Return whether a row of a box can begin before the previous row ends."""
    extents = [min(extent, size) for extent, size in zip(spec.box, spec.dims, strict=True)]
    span = extents[0] * spec.dtype.element_bits // 8
    for stride, extent in zip(spec.strides_bytes, extents[1:], strict=True):
        if extent > 1 and stride < span:
            return True
        span = max(span, stride * (extent - 1) + span)
    return False
