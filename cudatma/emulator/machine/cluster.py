"""Blocks and clusters of a running launch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from cudatma.emulator.machine.machine import Split, Warp
from cudatma.emulator.machine.memory import RANK_SHIFT, SHARED_START, Region
from cudatma.emulator.ptx.types import LANES, Array

if TYPE_CHECKING:
    from cudatma.emulator.machine.launch import Launch

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

    launch: Launch
    cluster: Cluster
    index: Dim
    place: Dim
    rank: int
    warp_count: int
    shared_base: int

    def __init__(self, launch: Launch, cluster: Cluster, index: Dim, place: Dim, rank: int) -> None:
        self.launch, self.cluster, self.index, self.place, self.rank = launch, cluster, index, place, rank
        self.threads = launch.threads
        self.warp_count = -(-self.threads // LANES)
        self.shared_base = (rank << RANK_SHIFT) | SHARED_START
        self.shared = Region(
            self.shared_base, _shared_memory(launch), f"shared memory of block {index}", is_writable=True
        )
        self.barriers = [NamedBarrier(k) for k in range(16)]
        self.mbarriers: dict[int, Any] = {}
        #: What setmaxnreg gives and takes, once a warp has executed it (register_pool.RegisterPool).
        self.register_pool: Any = None
        self.warps: list[Warp] = []
        self.live_warps, self.live_threads = 0, 0
        #: Special registers and addresses that all warps of the block have in common.
        self.common_values: dict[str, Array] = {}
        self.addresses: dict[tuple[str, int], Array] = {}

    def start(self) -> None:
        """Create the warps and hand them to the scheduler."""
        for number in range(self.warp_count):
            warp = Warp(self, number, self.launch.program)
            self.warps.append(warp)
            self.live_warps += 1
            self.live_threads += int(np.count_nonzero(warp.alive))
            self.launch.scheduler.add(warp.split)
            if self.launch.trace is not None:
                self.launch.trace.warp_begins(warp)

    @property
    def is_done(self) -> bool:
        return self.live_warps == 0

    def warp_ended(self, warp: Warp) -> None:
        """All lanes of a warp have left the kernel."""
        self.live_warps -= 1
        if self.launch.trace is not None:
            self.launch.trace.warp_ends(warp)
        observer = self.cluster.observer
        if observer is not None:
            observer.warp_ended(warp)
        self.lanes_ended()
        if self.live_warps == 0:
            self.launch.block_ended(self)

    def lanes_ended(self) -> None:
        """Fewer threads are left: barriers that waited for all of them may be complete now."""
        from cudatma.emulator.machine import sync

        for barrier in self.barriers:
            if barrier.waiters:
                sync.complete_named(self, barrier)
        sync.complete_cluster(self.cluster)


def _shared_memory(launch: Launch) -> Array:
    """A block's shared memory: what the kernel asked for, and the system's part, which is zero, where it is used."""
    if not launch.reserved_bytes:
        return _poisoned(launch.shared_bytes)
    data = _poisoned(launch.reserved_start + launch.reserved_bytes)
    data[launch.reserved_start :] = 0
    return data


def _poisoned(size: int) -> Array:
    """Shared memory as a kernel finds it: with something in it that is not zero."""
    rounded = -(-size // 16) * 16
    return np.full(rounded, 0xA5, np.uint8)[:size]
