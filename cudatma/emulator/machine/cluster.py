"""A cluster begins: its CTAs, their shared memory and their warps."""

from __future__ import annotations

import numpy as np

from cudatma.emulator.machine.protocols import Dim, Launch
from cudatma.emulator.machine.special_values import SpecialValues
from cudatma.emulator.machine.state import Block, Cluster, Warp
from cudatma.emulator.ptx.types import Array


def new_cluster(launch: Launch, first: Dim, number: int) -> Cluster:
    """A cluster whose first CTA is ``first``, without warps yet. number: how many have started before it."""
    cluster = Cluster(launch, number)
    shape = launch.cluster
    for z in range(shape[2]):
        for y in range(shape[1]):
            for x in range(shape[0]):
                where = (first[0] + x, first[1] + y, first[2] + z)
                rank = len(cluster.blocks)
                cluster.blocks.append(Block(launch, cluster, where, (x, y, z), rank, _shared_memory(launch)))
    return cluster


def start(cluster: Cluster) -> None:
    """Create the warps of all CTAs and hand them to the scheduler."""
    for block in cluster.blocks:
        for number in range(block.warp_count):
            warp = Warp(block, number, block.launch.program, SpecialValues(block, number))
            block.warps.append(warp)
            block.live_warps += 1
            block.live_threads += int(np.count_nonzero(warp.alive))
            block.launch.scheduler.add(warp.split)
            if block.launch.trace is not None:
                block.launch.trace.warp_begins(warp)


def _shared_memory(launch: Launch) -> Array:
    """A CTA's shared memory: what the kernel asked for, and the system's part, which is zero, where it is used."""
    if not launch.reserved_bytes:
        return _poisoned(launch.shared_bytes)
    data = _poisoned(launch.reserved_start + launch.reserved_bytes)
    data[launch.reserved_start :] = 0
    return data


def _poisoned(size: int) -> Array:
    """Shared memory as a kernel finds it: with something in it that is not zero."""
    rounded = -(-size // 16) * 16
    return np.full(rounded, 0xA5, np.uint8)[:size]
