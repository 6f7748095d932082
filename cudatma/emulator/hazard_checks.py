"""What breaks happens-before: the checks that every access to shared memory goes through.

Source: PTX ISA, "Memory Consistency Model": causality order, proxies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cudatma.emulator.findings import Findings
from cudatma.emulator.machine import Warp
from cudatma.emulator.mbarrier import MBarrier
from cudatma.emulator.memory import SHARED_START
from cudatma.emulator.shadow import AsyncWrite, Clock, Shadow, narrowest
from cudatma.emulator.types import Array

if TYPE_CHECKING:
    from cudatma.emulator.cluster import Cluster
    from cudatma.emulator.launch import Launch

_SPARE_AGENTS = 512


class Checks:
    """Agents, clocks and shadows of one cluster, and the rules for reads and writes. clocks: of its warps, by agent."""

    def __init__(self, launch: Launch, cluster: Cluster, findings: Findings) -> None:
        self.launch, self.cluster, self.findings = launch, cluster, findings
        blocks = len(cluster.blocks)
        self.warps = blocks * (-(-launch.threads // 32))
        self.size = 4 * self.warps + launch.threads * blocks + _SPARE_AGENTS
        self.clocks = [Clock(self.size) for _ in range(self.warps)]
        for agent, clock in enumerate(self.clocks):
            clock.order[[agent, 3 * self.warps + agent]] = 1
        granule = launch.setup.extra.get("granule")
        if granule is None:
            names = launch.image.reachable(launch.program.function.name)
            granule = narrowest([launch.image.program(n) for n in names if launch.image.module.functions[n].is_defined])
            launch.setup.extra["granule"] = granule
        self.shadows = [Shadow(block.shared.size, granule) for block in cluster.blocks]
        self._agents: dict[Any, int] = {}
        self._agent_names: dict[int, str] = {}
        self._operations: dict[int, AsyncWrite] = {}
        self._met: dict[int, int] = {}
        self._unmet_from: dict[int, int] = {}
        self._count = 0
        self._passes: dict[tuple[int, int], tuple[int, bool]] = {}

    # ---- agents

    def agent(self, key: Any, name: str) -> int:
        """The number of an agent that is no warp; made when it is first asked for."""
        found = self._agents.get(key)
        if found is None:
            found = 4 * self.warps + len(self._agents) % (self.size - 4 * self.warps)
            self._agents[key] = found
            self._agent_names[found] = name
        return found

    def barrier_agent(self, barrier: MBarrier) -> int:
        return self.agent(("barrier", barrier.block.rank, barrier.offset), "barrier")

    def wgmma_agent(self, w: Warp) -> int:
        return self.warps + w.agent

    def cp_agent(self, w: Warp) -> int:
        return 2 * self.warps + w.agent

    def leader_agent(self, w: Warp) -> int:
        """What single lanes of a warp do, and what its lanes do together in one instruction."""
        return 3 * self.warps + w.agent

    def advance(self, w: Warp) -> None:
        """What the warp does from here on is not covered by what it has published."""
        self.clocks[w.agent].order[[w.agent, self.leader_agent(w)]] += 1

    def stamp(self, w: Warp, lanes: int, together: bool = False) -> tuple[int, int]:
        """(agent, clock) of an access by so many lanes.

        What several lanes do on their own is published by one of them only after the lanes have met; what one lane
        does, or all do in one warp-wide instruction (together), at once.
        """
        clock = self.clocks[w.agent]
        if lanes == 1 or together:
            agent = self.leader_agent(w)
            return agent, int(clock.order[agent])
        if self._met.get(w.agent) != w.meetings:
            self._met[w.agent] = w.meetings
            self.advance(w)
            self._unmet_from[w.agent] = int(clock.order[w.agent])
        return w.agent, int(clock.order[w.agent])

    def published(self, w: Warp, alone: bool) -> Clock:
        """What a release by the warp, or by one lane alone, makes known; afterwards the warp's clock moves on."""
        clock = self.clocks[w.agent]
        known = clock.copy()
        if alone and self._met.get(w.agent) == w.meetings:
            least = self._unmet_from[w.agent] - 1
            known.order[w.agent] = least
            known.proxy[w.agent] = min(int(known.proxy[w.agent]), least)
        self.advance(w)
        return known

    def kind_of(self, agent: int) -> str:
        """ "warp", "wgmma", "cp", "barrier" or "bulk"."""
        if agent < 4 * self.warps:
            return ("warp", "wgmma", "cp", "warp")[agent // self.warps]
        return self._agent_names[agent]

    def _who(self, agent: int) -> str:
        kind = self.kind_of(agent)
        if kind == "barrier":
            return "an asynchronous copy"
        if kind == "bulk":
            return "a bulk store"
        per = self.warps // len(self.cluster.blocks)
        number = agent % self.warps
        text = f"warp {number % per}" + (f" of block rank {number // per}" if len(self.cluster.blocks) > 1 else "")
        return {"warp": text, "wgmma": f"a wgmma of {text}", "cp": f"a cp.async of {text}"}[kind]

    def report(self, kind: str, w: Warp, at: int, message: str, **_: Any) -> bool:
        """Record a hazard at an instruction of the running function."""
        self.findings.add(kind, message, self.launch, w.split.frame.program, at, w)
        return True

    def _tell(self, kind: str, w: Warp, at: int, text: str, shadow: Shadow, place: int) -> None:
        """Record a hazard that concerns shared bytes, with who wrote them where."""
        address = place * shadow.granule + SHARED_START
        origin = int(shadow.writer_at[place])
        body = self.launch.program.function.body
        written = ""
        if 0 <= origin < len(body):
            source = self.launch.program.module.source_of(body[origin])
            written = f"; last written at PTX line {body[origin].line}" + (f" ({source})" if source else "")
        self.report(kind, w, at, f"{text} (shared address {address:#x}{written})")

    def _check_read(self, w: Warp, at: int, shadow: Shadow, indices: Array, clock: Clock, proxy: bool) -> None:
        flying = shadow.in_flight[indices]
        if flying.any():
            place = int(indices[int((flying != 0).argmax())])
            self._early(w, at, shadow, place, self._operations.get(int(shadow.in_flight[place])))
            return
        writers = shadow.writer[indices]
        if int(writers.min()) < 0:
            place = int(indices[int((writers < 0).argmax())])
            if not shadow.is_barrier[place]:
                self._tell("uninitialised_shared", w, at, "bytes are read that nobody has written", shadow, place)
        late = shadow.unordered_writer(indices, clock, proxy)
        if late is None:
            return
        agent, place, is_proxy = late
        kind = self.kind_of(agent)
        if is_proxy:
            self._tell(
                "missing_proxy_fence",
                w,
                at,
                f"the asynchronous proxy reads what {self._who(agent)} stored with no proxy fence since",
                shadow,
                place,
            )
        elif kind in ("barrier", "cp"):
            self._early(w, at, shadow, place, None)
        else:
            self._tell(
                "data_race",
                w,
                at,
                f"{self._who(agent)} wrote these bytes and nothing orders this read after it",
                shadow,
                place,
            )

    def _early(self, w: Warp, at: int, shadow: Shadow, place: int, operation: AsyncWrite | None) -> None:
        """A read of bytes whose copy has not been waited for: which of the two usual mistakes it was."""
        repeated = any(flag for (agent, _), (_, flag) in self._passes.items() if agent == w.agent)
        kind = "wrong_parity" if repeated else "read_before_load"
        state = "is still under way" if operation is not None else "was not waited for"
        self._tell(kind, w, at, f"bytes are read whose copy {state}", shadow, place)

    def _check_write(self, w: Warp, at: int, shadow: Shadow, indices: Array, clock: Clock, proxy: bool) -> None:
        if shadow.is_barrier[indices].any():
            place = int(indices[int(shadow.is_barrier[indices].argmax())])
            self._tell("barrier_overwritten", w, at, "a live mbarrier is overwritten", shadow, place)
        flying = shadow.in_flight[indices]
        if flying.any():
            place = int(indices[int((flying != 0).argmax())])
            self._tell("write_race", w, at, "bytes are written while a copy into them is under way", shadow, place)
            return
        late = shadow.unordered_writer(indices, clock, proxy)
        if late is not None:
            agent, place, is_proxy = late
            if is_proxy:
                self._tell(
                    "missing_proxy_fence",
                    w,
                    at,
                    f"the asynchronous proxy overwrites what {self._who(agent)} stored with no proxy fence since",
                    shadow,
                    place,
                )
            else:
                writer = self.kind_of(agent)
                kind = "data_race" if writer == "warp" and not proxy else "write_race"
                text = f"{self._who(agent)} wrote these bytes and nothing orders this write after it"
                if writer == "barrier" and proxy:
                    kind, text = (
                        "overwritten_while_read",
                        f"{text}: the slot is refilled though nobody is known to have read it",
                    )
                self._tell(kind, w, at, text, shadow, place)
            return
        reader = shadow.unordered_reader(indices, clock)
        if reader is not None:
            agent, place = reader
            reader_kind = self.kind_of(agent)
            kind = (
                "store_source_reused"
                if reader_kind == "bulk"
                else ("data_race" if reader_kind == "warp" and not proxy else "overwritten_while_read")
            )
            self._tell(
                kind,
                w,
                at,
                f"{self._who(agent)} reads these bytes and nothing orders this write after it",
                shadow,
                place,
            )
