"""Values of a warp's special registers. Source: PTX ISA, "Special Registers"."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from cudatma.emulator.machine.memory import SHARED_START
from cudatma.emulator.machine.protocols import Launch
from cudatma.emulator.machine.state import Block
from cudatma.emulator.ptx.types import LANES, Array

_SM_COUNT = 132
_LANE = np.arange(LANES, dtype=np.uint64)
_BIT = np.uint64(1) << _LANE


def _threads(number: int) -> Array:
    """Return the thread numbers of a warp's lanes within the CTA."""
    threads: Array = _LANE + np.uint64(LANES * number)
    return threads


#: Maps each register whose lane values are the same in every CTA to a function of (launch, warp) that returns a vector.
_OF_LANES: dict[str, Callable[[Launch, int], Array]] = {
    "laneid": lambda launch, number: _LANE,
    "tid.x": lambda launch, number: _threads(number) % launch.block[0],
    "tid.y": lambda launch, number: _threads(number) // launch.block[0] % launch.block[1],
    "tid.z": lambda launch, number: _threads(number) // (launch.block[0] * launch.block[1]),
    "lanemask_eq": lambda launch, number: _BIT,
    "lanemask_lt": lambda launch, number: _BIT - np.uint64(1),
    "lanemask_le": lambda launch, number: 2 * _BIT - np.uint64(1),
    "lanemask_ge": lambda launch, number: ~(_BIT - np.uint64(1)),
    "lanemask_gt": lambda launch, number: ~(2 * _BIT - np.uint64(1)),
}
#: Maps each register whose value is the same for all threads of a CTA to a function of the CTA.
_OF_BLOCK: dict[str, Callable[[Block], int]] = {
    "nwarpid": lambda block: block.warp_count,
    "smid": lambda block: block.index[0] % _SM_COUNT,
    "nsmid": lambda block: _SM_COUNT,
    "gridid": lambda block: 1,
    "cluster_ctarank": lambda block: block.rank,
    "cluster_nctarank": lambda block: len(block.cluster.blocks),
    "dynamic_smem_size": lambda block: block.launch.dynamic_bytes,
    "total_smem_size": lambda block: block.launch.shared_bytes,
    "aggr_smem_size": lambda block: block.launch.shared_bytes + SHARED_START,
    # Cooperative groups read the two halves of the grid barrier's address from envreg1 and envreg2.
    "envreg1": lambda block: block.launch.workspace_base >> 32,
    "reserved_smem_offset_1": lambda block: block.shared_base + block.launch.reserved_start,
    "envreg2": lambda block: block.launch.workspace_base & 0xFFFFFFFF,
}
#: Maps each register with an axis suffix whose value is the same for all threads of a CTA to a function of (CTA, axis).
_OF_AXIS: dict[str, Callable[[Block, int], int]] = {
    "ntid": lambda block, axis: block.launch.block[axis],
    "ctaid": lambda block, axis: block.index[axis],
    "nctaid": lambda block, axis: block.launch.grid[axis],
    "clusterid": lambda block, axis: block.index[axis] // block.launch.cluster[axis],
    "nclusterid": lambda block, axis: block.launch.grid[axis] // block.launch.cluster[axis],
    "cluster_ctaid": lambda block, axis: block.place[axis],
    "cluster_nctaid": lambda block, axis: block.launch.cluster[axis],
}
_WIDE = {"gridid"}


class SpecialValues(dict[str, Array]):
    """Mapping from the name of a special register to the (32,) vector of a warp.

    Vectors are created on first use and are read-only. Values that several warps share are stored in the CTA or the
    launch.
    """

    __slots__ = ("block", "number")

    def __init__(self, block: Block, number: int) -> None:
        self.block, self.number = block, number

    def __missing__(self, name: str) -> Array:
        vector = self[name] = self._find(name)
        return vector

    def _find(self, name: str) -> Array:
        block, number = self.block, self.number
        if name in _OF_LANES:
            cache = block.launch.lane_values
            if (name, number) not in cache:
                cache[name, number] = _OF_LANES[name](block.launch, number).astype(np.uint32)
            return cache[name, number]
        if name == "warpid":
            return np.full(LANES, number, np.uint32)
        if name not in block.common_values:
            block.common_values[name] = _common(block, name)
        return block.common_values[name]


def _common(block: Block, name: str) -> Array:
    if name == "is_explicit_cluster":
        return np.full(LANES, block.launch.cluster != (1, 1, 1))
    if name in _OF_BLOCK:
        value = _OF_BLOCK[name](block)
    else:
        register, _, axis = name.partition(".")
        value = _OF_AXIS[register](block, "xyz".index(axis))
    return np.full(LANES, value, np.uint64 if name in _WIDE else np.uint32)
