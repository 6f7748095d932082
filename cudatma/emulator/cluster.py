"""Blocks and clusters of a running launch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from cudatma.emulator.machine import Split, Warp
from cudatma.emulator.memory import RANK_SHIFT, SHARED_START, Region
from cudatma.emulator.types import LANES, Array

if TYPE_CHECKING:
    from cudatma.emulator.launch import Launch

Dim = tuple[int, int, int]


class NamedBarrier:
    """One of a block's 16 barriers (bar.sync id). arrived: threads so far; expected: None until somebody says."""

    __slots__ = ("arrived", "expected", "number", "reductions", "waiters", "warps")

    def __init__(self, number: int) -> None:
        self.number = number
        self.arrived = 0
        self.expected: int | None = None
        self.waiters: list[Split] = []
        self.warps: list[Warp] = []
        self.reductions: list[tuple[Split, Array, Array]] = []


class ClusterBarrier:
    """barrier.cluster: every live thread arrives once a phase."""

    def __init__(self) -> None:
        self.arrived: dict[int, int] = {}
        self.waiters: list[Split] = []
        self.phase = 0


class Cluster:
    """Blocks that may reach each other's shared memory. observer: the hazard layer, or None."""

    def __init__(self, launch: Launch, first: Dim, number: int) -> None:
        self.launch, self.number = launch, number
        self.barrier = ClusterBarrier()
        shape = launch.cluster
        self.blocks: list[Block] = []
        for z in range(shape[2]):
            for y in range(shape[1]):
                for x in range(shape[0]):
                    where = (first[0] + x, first[1] + y, first[2] + z)
                    self.blocks.append(Block(launch, self, where, (x, y, z), len(self.blocks)))
        self.observer: Any = launch.new_observer(self)
        for block in self.blocks:
            block.start()

    @property
    def is_done(self) -> bool:
        return all(block.is_done for block in self.blocks)


class Block:
    """One block: its shared memory, barriers and warps. index: blockIdx; rank: in its cluster."""

    def __init__(self, launch: Launch, cluster: Cluster, index: Dim, place: Dim, rank: int) -> None:
        self.launch, self.cluster, self.index, self.place, self.rank = launch, cluster, index, place, rank
        self.threads = launch.threads
        self.warp_count = -(-self.threads // LANES)
        self.shared_base = (rank << RANK_SHIFT) | SHARED_START
        self.shared = Region(
            self.shared_base, _poisoned(launch.shared_bytes), f"shared memory of block {index}", is_writable=True
        )
        self.barriers = [NamedBarrier(k) for k in range(16)]
        self.mbarriers: dict[int, Any] = {}
        self.warps: list[Warp] = []
        self.live_warps = 0

    def start(self) -> None:
        """Create the warps and hand them to the scheduler."""
        for number in range(self.warp_count):
            warp = Warp(self, number, self.launch.program)
            self.warps.append(warp)
            self.live_warps += 1
            self.launch.scheduler.add(warp.split)

    @property
    def is_done(self) -> bool:
        return self.live_warps == 0

    @property
    def live_threads(self) -> int:
        return sum(int(warp.alive.sum()) for warp in self.warps)

    def special_registers(self, number: int) -> dict[str, Array]:
        """Values of the special registers for one warp."""
        launch = self.launch
        linear = np.arange(LANES, dtype=np.uint32) + np.uint32(LANES * number)
        nx, ny, _ = launch.block
        lane = np.arange(LANES, dtype=np.uint32)
        one = np.uint64(1)
        bit = one << lane.astype(np.uint64)
        masks = {"eq": bit, "lt": bit - one, "le": 2 * bit - one}
        masks["ge"], masks["gt"] = ~masks["lt"], ~masks["le"]
        values: dict[str, Any] = {
            "tid.x": linear % nx,
            "tid.y": linear // nx % ny,
            "tid.z": linear // (nx * ny),
            "laneid": lane,
            "warpid": number,
            "nwarpid": self.warp_count,
            "smid": self.index[0] % 132,
            "nsmid": 132,
            "cluster_ctarank": self.rank,
            "cluster_nctarank": launch.cluster[0] * launch.cluster[1] * launch.cluster[2],
            "dynamic_smem_size": launch.dynamic_bytes,
            "total_smem_size": launch.shared_bytes,
            "aggr_smem_size": launch.shared_bytes + SHARED_START,
            "envreg0": 0,
            **{f"lanemask_{name}": value.astype(np.uint32) for name, value in masks.items()},
        }
        for axis, name in enumerate("xyz"):
            values |= {
                f"ntid.{name}": launch.block[axis],
                f"ctaid.{name}": self.index[axis],
                f"nctaid.{name}": launch.grid[axis],
                f"clusterid.{name}": self.index[axis] // launch.cluster[axis],
                f"nclusterid.{name}": launch.grid[axis] // launch.cluster[axis],
                f"cluster_ctaid.{name}": self.place[axis],
                f"cluster_nctaid.{name}": launch.cluster[axis],
            }
        result: dict[str, Array] = {}
        for name, value in values.items():
            vector = np.full(LANES, value, np.uint32) if np.ndim(value) == 0 else np.asarray(value, np.uint32)
            result[name] = vector
        result["gridid"] = np.full(LANES, 1, np.uint64)
        result["is_explicit_cluster"] = np.full(LANES, launch.cluster != (1, 1, 1))
        return result

    def warp_ended(self, warp: Warp) -> None:
        """All lanes of a warp have left the kernel."""
        self.live_warps -= 1
        observer = self.cluster.observer
        if observer is not None:
            observer.warp_ended(warp)
        self.lanes_ended()
        if self.live_warps == 0:
            self.launch.block_ended(self)

    def lanes_ended(self) -> None:
        """Fewer threads are left: barriers that waited for all of them may be complete now."""
        from cudatma.emulator import sync

        for barrier in self.barriers:
            if barrier.waiters:
                sync.complete_named(self, barrier)
        sync.complete_cluster(self.cluster)


def _poisoned(size: int) -> Array:
    """Shared memory as a kernel finds it: with something in it that is not zero."""
    rounded = -(-size // 16) * 16
    return np.full(rounded, 0xA5, np.uint8)[:size]
