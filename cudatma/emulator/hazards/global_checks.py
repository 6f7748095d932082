"""What breaks happens-before in global memory: the checks that every watched access goes through.

Source: PTX ISA, "Memory Consistency Model" (morally strong operations, data races, proxies).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from cudatma.emulator.hazards.checks import Checks
from cudatma.emulator.hazards.clocks import Clock
from cudatma.emulator.hazards.shadow import CLOCK, LANE, PLACE, STRENGTH, WHO, GlobalShadow
from cudatma.emulator.machine.memory import Region
from cudatma.emulator.machine.state import Warp
from cudatma.emulator.ptx.types import SCOPES, Array

NC = "ld.global.nc reads bytes that this kernel writes: the read-only path may deliver old ones"
LANE_READ = "{} of the same warp wrote these bytes, and the lanes have not met since"
_LANE_WRITE = "{} of the same warp wrote these bytes, and the lanes have not met since this other write"
_LANE_REUSE = "{} of the same warp reads these bytes, and the lanes have not met before this write"


class GlobalChecks:
    """The rules for one cluster. number: of the cluster, which distinguishes its agents from those of other
    clusters."""

    def __init__(self, observer: Checks, number: int) -> None:
        self._observer, self._number = observer, number
        self._base = number * observer.size + 1
        self._grid = observer.agent("grid", "grid") if observer.launch.setup.extra.get("programmatic") else -1

    def _check_grid(self, w: Warp, at: int, region: Region, clock: Clock, what: str) -> None:
        if self._grid >= 0 and not clock.order[self._grid]:
            message = f"{region.name} is {what} and nothing orders this after griddepcontrol.wait"
            self._observer.report("grid_dependency", w, at, message)

    def _seen(
        self, clock: Clock, through_proxy: bool = False, performed: bool = False
    ) -> Callable[[Array, Array], Array]:
        """Return a function that decides which accesses a clock has seen. through_proxy, performed: as in Clock.of."""
        size, number = self._observer.size, self._number

        def seen(who: Array, when: Array) -> Array:
            known = clock.of(np.maximum(who - 1, 0), size, number, through_proxy, performed)
            result: Array = (who == 0) | (when <= known)
            return result

        return seen

    def _both_strong(self, w: Warp, strength: int, who: int, other: int) -> bool:
        """Whether two accesses are morally strong: their scopes include each other's thread."""
        least = min(strength, other)
        return least > 0 and least - 1 >= self._distance(w, who)

    def _distance(self, w: Warp, who: int) -> int:
        """Return the narrowest scope that includes both a warp and another agent."""
        observer = self._observer
        number, agent = divmod(who - 1, observer.size)
        if number != self._number:
            return SCOPES["gpu"]
        if not observer.is_own(agent):
            return SCOPES["cluster"]
        return SCOPES["cta" if agent % observer.warps // w.block.warp_count == w.block.rank else "cluster"]

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
        """True where the read is ordered after the writes that it sees."""
        late = ~self._seen(clock)(rows[:, WHO], rows[:, CLOCK])
        for position in np.flatnonzero(late).tolist():
            row = rows[position]
            if self._both_strong(w, strength, int(row[WHO]), int(row[STRENGTH])):
                continue
            if strength and self._observed(clock, row):
                continue
            place = int(indices[position])
            if row[PLACE] & 1 and self._follows_issue(shadow, clock, row):
                text = f"bytes are read that {self._who(int(row[WHO]))} writes, and its completion was not waited for"
                self._tell(w, at, "read_before_store", shadow, place, text)
            else:
                text = f"{self._who(int(row[WHO]))} wrote these bytes and nothing orders this read after it"
                self._tell(w, at, "global_race", shadow, place, text)
            return False
        return not proxy or self._check_proxy(w, at, shadow, indices, rows, clock, "reads")

    def _follows_issue(self, shadow: GlobalShadow, clock: Clock, row: Array) -> bool:
        """Whether a read is ordered after the issue of a bulk store, though not after its completion."""
        who, now = shadow.issued[int(row[WHO]), int(row[CLOCK])]
        return bool(self._seen(clock)(np.array([who]), np.array([now]))[0])

    def _observed(self, clock: Clock, row: Array) -> bool:
        """A volatile or relaxed read goes to memory: a flag that was seen is enough for it, though no fence follows."""
        found = clock.far.seen.values() if clock.far is not None else ()
        return any(bool(self._seen(known)(row[WHO : WHO + 1], row[CLOCK : CLOCK + 1])[0]) for known in found)

    def _check_proxy(
        self, w: Warp, at: int, shadow: GlobalShadow, indices: Array, rows: Array, clock: Clock, verb: str
    ) -> bool:
        unfenced = (rows[:, PLACE] & 1 == 0) & ~self._seen(clock, through_proxy=True)(rows[:, WHO], rows[:, CLOCK])
        if not unfenced.any():
            return True
        position = int(unfenced.argmax())
        text = (
            f"the asynchronous proxy {verb} what {self._who(int(rows[position, WHO]))} stored with no proxy fence since"
        )
        self._tell(w, at, "missing_proxy_fence", shadow, int(indices[position]), text)
        return False

    def _check_write(
        self,
        w: Warp,
        at: int,
        shadow: GlobalShadow,
        indices: Array,
        clock: Clock,
        strength: int,
        same: Callable[[], bool],
        proxy: bool = False,
    ) -> bool:
        """True where the write is ordered after the writes and reads before it."""
        seen = self._seen(clock)
        rows = shadow.writers[indices]
        if np.count_nonzero(rows[:, WHO]):
            for position in np.flatnonzero(~seen(rows[:, WHO], rows[:, CLOCK])).tolist():
                row = rows[position]
                if self._both_strong(w, strength, int(row[WHO]), int(row[STRENGTH])) or same():
                    continue
                kind = "write_race" if row[PLACE] & 1 or proxy else "global_race"
                text = f"{self._who(int(row[WHO]))} wrote these bytes and nothing orders this write after it"
                self._tell(w, at, kind, shadow, int(indices[position]), text)
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
            text = f"{self._who(reader[WHO])} reads these bytes and nothing orders this write after it"
            self._tell(w, at, "global_race", shadow, int(indices[position]), text, reader[PLACE] // 2)
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
        """rows: of each granule, what is known of its writer or of a reader."""
        lanes = self._observer.lanes
        position = lanes.conflict(w, np.where(rows[:, STRENGTH] > 0, 0, rows[:, LANE]), stamps)
        if position >= 0:
            message = text.format(lanes.lane(int(rows[position, LANE])))
            read_at = int(rows[position, PLACE]) // 2 if is_read else -1
            self._tell(w, at, "lane_race", shadow, int(indices[position]), message, read_at)

    def _check_lane_writes(
        self, w: Warp, at: int, shadow: GlobalShadow, indices: Array, stamps: Array, same: Callable[[], bool]
    ) -> None:
        rows = shadow.writers[indices]
        lanes = self._observer.lanes
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
        """One lane hands to a copy what other lanes of its warp stored, strongly or not: they have to meet before."""
        lanes = self._observer.lanes
        if lanes.single(w) >= 0:
            weak = rows.copy()
            weak[:, STRENGTH] = 0
            self._check_lanes(w, at, shadow, indices, weak, lanes.stamps(w, len(indices)), LANE_READ)

    # ---- messages

    def _who(self, who: int) -> str:
        observer = self._observer
        number, agent = divmod(who - 1, observer.size)
        if number == self._number:
            return observer.who(agent)
        launch = observer.launch
        rank, warp = divmod(agent % observer.warps, observer.warps // len(observer.cluster.blocks))
        x, y, z = launch.started[number]
        if not observer.is_own(agent):
            return f"a copy of {'block' if len(observer.cluster.blocks) == 1 else 'the cluster of block'} {(x, y, z)}"
        wide, high, _ = launch.cluster
        return f"warp {warp} of block {(x + rank % wide, y + rank // wide % high, z + rank // wide // high)}"

    def _tell(
        self, w: Warp, at: int, kind: str, shadow: GlobalShadow, place: int, text: str, read_at: int = -1
    ) -> None:
        """Record a hazard that concerns bytes of a buffer, with their last writer, and a read that comes before it."""
        offset = shadow.byte(place)
        others = self._observer.read_at(read_at)
        if shadow.writers[place, WHO]:
            others += self._observer.written_at(int(shadow.writers[place, PLACE]) // 2)
        region = shadow.region
        self._observer.report(
            kind, w, at, f"{text} (bytes from {offset} of {region.name}, address {region.base + offset:#x}{others})"
        )
