"""What breaks happens-before: the checks that every access to shared memory goes through.

Source: PTX ISA, "Memory Consistency Model": causality order, proxies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from cudatma.emulator.agents import Agents
from cudatma.emulator.clocks import Clock
from cudatma.emulator.findings import Findings
from cudatma.emulator.lane_races import LaneRaces
from cudatma.emulator.machine import Warp
from cudatma.emulator.memory import SHARED_START
from cudatma.emulator.shadow import AsyncWrite, Shadow, narrowest
from cudatma.emulator.types import Array

if TYPE_CHECKING:
    from cudatma.emulator.cluster import Block, Cluster
    from cudatma.emulator.launch import Launch


def phase_name(block: Block, offset: int, phase: int) -> str:
    """A barrier's phase, for messages."""
    address = offset + SHARED_START
    return f"phase {phase} (parity {phase & 1}) of the mbarrier at {address:#x} of block {block.index}"


class Checks(Agents):
    """The shadows of one cluster's shared memories, and the rules for reads and writes."""

    def __init__(self, launch: Launch, cluster: Cluster, findings: Findings) -> None:
        super().__init__(launch, cluster)
        self.findings = findings
        self.lanes = LaneRaces(self, cluster.number)
        granule = launch.setup.extra.get("granule")
        if granule is None:
            names = launch.image.reachable(launch.program.function.name)
            granule = narrowest([launch.image.program(n) for n in names if launch.image.module.functions[n].is_defined])
            launch.setup.extra["granule"] = granule
        self.shadows = [Shadow(block.shared.size, granule) for block in cluster.blocks]
        if launch.reserved_bytes:
            for shadow in self.shadows:
                shadow.writer[launch.reserved_start // granule :] = 0  # the system's part is initialised
        self._operations: dict[int, AsyncWrite] = {}
        self._count = 0
        self._passes: dict[tuple[int, int], tuple[int, bool]] = {}

    def report(self, kind: str, w: Warp, at: int, message: str, **_: Any) -> bool:
        """Record a hazard at an instruction of the running function."""
        self.findings.add(kind, message, self.launch, w.split.frame.program, at, w)
        return True

    def written_at(self, origin: int) -> str:
        """Where an instruction of the kernel stands, for messages; nothing for one of a called function."""
        body = self.launch.program.function.body
        if not 0 <= origin < len(body):
            return ""
        source = self.launch.program.module.source_of(body[origin])
        return f"; last written at PTX line {body[origin].line}" + (f" ({source})" if source else "")

    def tell(self, kind: str, w: Warp, at: int, text: str, shadow: Shadow, place: int) -> None:
        """Record a hazard that concerns shared bytes, with who wrote them where."""
        address = place * shadow.granule + SHARED_START
        origin = int(shadow.writer_at[place])
        self.report(kind, w, at, f"{text} (shared address {address:#x}{self.written_at(origin)})")

    def _check_read(
        self, w: Warp, at: int, shadow: Shadow, indices: Array, clock: Clock, proxy: bool, strong: bool = False
    ) -> None:
        """strong: a volatile, relaxed or acquiring read: it does not race with other threads, but with copies."""
        flying = shadow.in_flight[indices]
        if np.count_nonzero(flying):
            place = int(indices[int((flying != 0).argmax())])
            operation = self._operations.get(int(shadow.in_flight[place]))
            self._early(w, at, shadow, place, "is still under way", operation.awaited if operation is not None else "")
            return
        writers = shadow.writer[indices]
        if np.count_nonzero(writers < 0):
            place = int(indices[int((writers < 0).argmax())])
            if not shadow.is_barrier[place]:
                self.tell("uninitialised_shared", w, at, "bytes are read that nobody has written", shadow, place)
        if strong:
            indices = indices[self.is_copy(writers)]
        late = shadow.unordered_writer(indices, clock, proxy)
        if late is None:
            return
        agent, place, is_proxy = late
        kind = self.kind_of(agent)
        if is_proxy:
            self.tell(
                "missing_proxy_fence",
                w,
                at,
                f"the asynchronous proxy reads what {self.who(agent)} stored with no proxy fence since",
                shadow,
                place,
            )
        elif kind in ("barrier", "cp"):
            self._early(
                w, at, shadow, place, "was not waited for", self._awaited(agent, int(shadow.writer_clock[place]))
            )
        else:
            self.tell(
                "data_race",
                w,
                at,
                f"{self.who(agent)} wrote these bytes and nothing orders this read after it",
                shadow,
                place,
            )

    def _awaited(self, agent: int, clock: int) -> str:
        """What a read of a landed copy had to wait for."""
        key = next((key for key, number in self._agents.items() if number == agent), None)
        if key is None or key[0] != "barrier":
            return f"cp.async group {clock - 1}"
        return phase_name(self.cluster.blocks[key[1]], key[2], clock - 1)

    def _early(self, w: Warp, at: int, shadow: Shadow, place: int, state: str, awaited: str) -> None:
        """A read of bytes whose copy has not been waited for: which of the two usual mistakes it was."""
        repeated = any(flag for (agent, _), (_, flag) in self._passes.items() if agent == w.agent)
        kind = "wrong_parity" if repeated else "read_before_load"
        ends = f": it ends {awaited}" if awaited else ""
        self.tell(kind, w, at, f"bytes are read whose copy {state}{ends}", shadow, place)

    def _check_write(
        self,
        w: Warp,
        at: int,
        shadow: Shadow,
        indices: Array,
        clock: Clock,
        proxy: bool,
        same: Callable[[], bool] | None = None,
        is_copy: bool = False,
        strong: bool = False,
    ) -> None:
        """same: whether the bytes are what they are to become; plain writers of one value do not race.

        proxy: through the asynchronous proxy. is_copy: a copy that is not, as cp.async and st.async are. strong: a
        volatile, relaxed or releasing store: it does not race with other threads, but with copies.
        """
        if np.count_nonzero(shadow.is_barrier[indices]):
            place = int(indices[int(shadow.is_barrier[indices].argmax())])
            self.tell("barrier_overwritten", w, at, "a live mbarrier is overwritten", shadow, place)
        flying = shadow.in_flight[indices]
        if np.count_nonzero(flying):
            place = int(indices[int((flying != 0).argmax())])
            self.tell("write_race", w, at, "bytes are written while a copy into them is under way", shadow, place)
            return
        seen = indices[self.is_copy(shadow.writer[indices])] if strong else indices
        late = shadow.unordered_writer(seen, clock, proxy)
        if late is not None and self.kind_of(late[0]) == "warp" and same is not None and same():
            late = None
        if late is not None:
            agent, place, is_proxy = late
            if is_proxy:
                self.tell(
                    "missing_proxy_fence",
                    w,
                    at,
                    f"the asynchronous proxy overwrites what {self.who(agent)} stored with no proxy fence since",
                    shadow,
                    place,
                )
            else:
                writer = self.kind_of(agent)
                kind = "data_race" if writer == "warp" and not (proxy or is_copy) else "write_race"
                text = f"{self.who(agent)} wrote these bytes and nothing orders this write after it"
                if writer == "barrier" and proxy:
                    kind, text = (
                        "overwritten_while_read",
                        f"{text}: the slot is refilled though nobody is known to have read it",
                    )
                self.tell(kind, w, at, text, shadow, place)
            return
        reader = shadow.unordered_reader(indices, clock, proxy or is_copy)
        if reader is not None and not (strong and self.kind_of(reader[0]) == "warp"):
            agent, place = reader
            reader_kind = self.kind_of(agent)
            kind = (
                "store_source_reused"
                if reader_kind == "bulk"
                else ("data_race" if reader_kind == "warp" and not (proxy or is_copy) else "overwritten_while_read")
            )
            self.tell(
                kind,
                w,
                at,
                f"{self.who(agent)} reads these bytes and nothing orders this write after it",
                shadow,
                place,
            )
