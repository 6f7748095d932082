"""Barriers and fences as the hazard layer sees them: who publishes what to whom.

Source: PTX ISA, "Memory Consistency Model" (causality order), "mbarrier", "membar, fence", "barrier.cluster".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from cudatma.emulator.findings import Findings
from cudatma.emulator.hazard_checks import Checks
from cudatma.emulator.machine import Warp
from cudatma.emulator.mbarrier import MBarrier
from cudatma.emulator.shadow import Clock

if TYPE_CHECKING:
    from cudatma.emulator.cluster import Cluster, NamedBarrier
    from cudatma.emulator.launch import Launch


class BarrierEvents(Checks):
    """Clocks that travel through bar, barrier.cluster and mbarrier, and what fences add to them."""

    def __init__(self, launch: Launch, cluster: Cluster, findings: Findings) -> None:
        super().__init__(launch, cluster, findings)
        self._named: dict[int, Clock] = {}
        self._cluster_pending, self._cluster_done = Clock(self.size), Clock(self.size)
        self._barriers: dict[int, tuple[Clock, Clock]] = {}
        self._inits: dict[int, list[Any]] = {}
        self._edited_maps: set[int] = set()
        self._init_fenced: dict[int, int] = {}

    # ---- barriers of a block and cluster

    def barrier_arrive(self, w: Warp, barrier: NamedBarrier) -> None:
        known = self._named.get(id(barrier))
        if known is None:
            known = self._named[id(barrier)] = Clock(self.size)
        known.join(self.published(w, False))

    def barrier_complete(self, barrier: NamedBarrier, warps: list[Warp]) -> None:
        known = self._named.pop(id(barrier), None)
        if known is not None:
            for warp in warps:
                self.clocks[warp.agent].join(known)

    def cluster_arrive(self, w: Warp, release: bool) -> None:
        if release:
            self._cluster_pending.join(self.published(w, False))

    def cluster_complete(self) -> None:
        self._cluster_done = self._cluster_pending.copy()

    def cluster_acquire(self, w: Warp) -> None:
        self.clocks[w.agent].join(self._cluster_done)

    # ---- mbarriers

    def _pending(self, barrier: MBarrier) -> tuple[Clock, Clock]:
        known = self._barriers.get(id(barrier))
        if known is None:
            known = self._barriers[id(barrier)] = (Clock(self.size), Clock(self.size))
        return known

    def barrier_init(self, w: Warp, at: int, barrier: MBarrier, old: MBarrier | None) -> None:
        if old is not None:
            self.report("barrier_reinitialised", w, at, f"mbarrier.init of a live barrier: {old.describe()}")
        shadow = self.shadows[barrier.block.rank]
        indices = shadow.granules(np.array([barrier.offset]), 8)
        shadow.is_barrier[indices] = False
        self._check_write(w, at, shadow, indices, self.clocks[w.agent], False)
        shadow.is_barrier[indices] = True
        agent, clock = self.stamp(w, 1)
        shadow.written(indices, agent, clock, at, False)
        self._inits[id(barrier)] = [agent, clock, barrier, at]

    def barrier_inval(self, w: Warp, at: int, barrier: MBarrier) -> None:
        shadow = self.shadows[barrier.block.rank]
        indices = shadow.granules(np.array([barrier.offset]), 8)
        shadow.is_barrier[indices] = False
        shadow.written(indices, *self.stamp(w, 1), at, False)

    def barrier_used(self, w: Warp, at: int, barrier: MBarrier, what: str) -> None:
        """Whoever uses a barrier must be ordered after its init."""
        made = self._inits.get(id(barrier))
        if made is not None and made[1] > self.clocks[w.agent].order[made[0]]:
            self.report(
                "missing_init_sync",
                w,
                at,
                f"{what} on {barrier.name}, and nothing orders it after mbarrier.init by {self._who(made[0])}",
            )

    def _check_init_fence(self, w: Warp, at: int, barrier: MBarrier, clock: Clock) -> None:
        made = self._inits.get(id(barrier))
        if made is None or made[1] <= clock.proxy[made[0]] or self._init_fenced.get(made[0], 0) >= made[1]:
            return
        self.findings.add(
            "missing_init_fence",
            f"a copy completes on {barrier.name}, whose mbarrier.init here was not fenced for the asynchronous proxy",
            self.launch,
            self.launch.program,
            made[3],
            w,
        )

    def barrier_release(self, w: Warp, at: int, barrier: MBarrier, release: bool, alone: bool) -> None:
        if release:
            self._pending(barrier)[0].join(self.published(w, alone))

    def phase_ended(self, barrier: MBarrier) -> None:
        pending, _ = self._pending(barrier)
        pending.order[self.barrier_agent(barrier)] = barrier.phase
        self._barriers[id(barrier)] = (pending, pending.copy())

    def bytes_over(self, barrier: MBarrier) -> None:
        """More bytes came in a phase than anybody expects, and nobody is left to expect more."""
        owner, at = barrier.expected_by or (barrier.initialised_by, -1)
        if owner is not None:
            self.findings.add(
                "byte_count",
                f"{-barrier.tx} bytes too many came at {barrier.describe()}",
                self.launch,
                self.launch.program,
                at,
                owner,
            )

    def barrier_acquire(self, w: Warp, at: int, barrier: MBarrier, acquire: bool) -> None:
        agent = self.barrier_agent(barrier)
        clock = self.clocks[w.agent]
        last = self._passes.get((w.agent, agent))
        repeated = barrier.phase == 0 or (last is not None and last[0] == barrier.phase)
        self._passes[w.agent, agent] = (barrier.phase, repeated)
        if acquire:
            clock.join(self._pending(barrier)[1])
            clock.order[agent] = max(int(clock.order[agent]), barrier.phase)

    # ---- fences

    def fence(self, w: Warp, at: int, kind: str) -> None:
        clock = self.clocks[w.agent]
        if kind.startswith("proxy.async"):
            np.maximum(clock.proxy, clock.order, out=clock.proxy)
            self._init_fenced[self.leader_agent(w)] = int(clock.order[self.leader_agent(w)])
            self.advance(w)
        elif kind.startswith("mbarrier_init"):
            self._init_fenced[self.leader_agent(w)] = int(clock.order[self.leader_agent(w)])
            self.advance(w)
        elif kind.startswith("proxy.tensormap"):
            self._edited_maps.clear()

    def tensor_map_written(self, w: Warp, at: int, address: int) -> None:
        self._edited_maps.add(address)

    def tensor_map_released(self, w: Warp, at: int, address: int) -> None:
        self._edited_maps.add(address)

    def tensor_map_read(self, w: Warp, at: int, address: int) -> None:
        if address in self._edited_maps:
            self.report(
                "tensor_map_fence",
                w,
                at,
                f"the tensor map at {address:#x} was edited and no fence.proxy.tensormap::generic.acquire follows",
            )
