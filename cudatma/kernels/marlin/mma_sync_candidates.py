"""Configurations of the mma.sync kernel that are worth ranking: a list of tiles, one CTA on an SM.

docs/performance/marlin_mma_sync.md holds the measurements that the list comes from.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache, partial

import numpy as np
from numpy.typing import NDArray

from cudatma.errors import ArgumentError
from cudatma.kernels.cost import LEAST_STAGES, cheapest_first
from cudatma.kernels.family import Times
from cudatma.kernels.gpu import H200, Gpu, imagined_gpu
from cudatma.kernels.marlin.cost import MMA_SYNC_TERMS, columns_of, mma_sync_cost
from cudatma.kernels.marlin.mma_sync import LoadPaths, MmaSyncSpec
from cudatma.kernels.marlin.problem import LinearShape, Problem
from cudatma.target import KIB, Target, get_target

#: Shared memory of a CTA that every target has (SM120: 99 KiB).
_SMEM_BYTES = 99 * KIB
_MAX_STAGES = 12
_BY_TMA = LoadPaths()
#: Up to this block_m the sums are scaled, once a group; above it the weights.
_SCALED_SUMS_M = 32


@dataclass(frozen=True, slots=True)
class _Tile:
    """block_m, block_n, block_k; warps_n, slice_k; consumer_registers."""

    m: int
    n: int
    k: int
    warps_n: int
    slice_k: int
    registers: int = 0


#: Of 17 tiles at 110 problems (13 layers, M = 1 to 2048, one CTA an SM, at most 99 KiB) each of these is the fastest at
#: three or more, and in the menu of some layer. [H200, compiled for sm_90a; benchmarks/results/marlin_readings.json]
_TILES = (
    _Tile(8, 64, 256, 2, 4),
    _Tile(16, 64, 256, 2, 4),
    _Tile(32, 64, 256, 2, 4),
    _Tile(32, 256, 128, 8, 1),
    _Tile(64, 64, 128, 4, 2),
    _Tile(64, 256, 64, 8, 1),
    _Tile(128, 256, 64, 8, 1, 232),
)


def mma_sync_times(
    problem: Problem, ms: NDArray[np.int64], gpu: Gpu, load_paths: LoadPaths = _BY_TMA
) -> Times[MmaSyncSpec]:
    """Return ``Family.times`` of this kernel: each tile where it is no taller than the fewest tiles for M need."""
    target = get_target(gpu.target)
    if not target.has("mma_sync") or not target.has("tma"):
        return []
    heights = sorted({tile.m for tile in _TILES})
    tallest = np.asarray(heights)[np.minimum(np.searchsorted(heights, ms), len(heights) - 1)]
    specs = _specs(replace(problem.layer, k=1, n=1), target, load_paths, LEAST_STAGES)
    columns = columns_of(specs, MMA_SYNC_TERMS)
    us = np.where(columns.block_m <= tallest, mma_sync_cost(columns, ms, problem.n, problem.k, gpu).us, np.inf)
    return list(zip(specs, us, strict=True))


def choose_mma_sync(problem: Problem, gpu: Gpu, load_paths: LoadPaths = _BY_TMA) -> MmaSyncSpec:
    """Return the cheapest configuration of this kernel alone, on any target.

    The comparison of load paths runs it.
    """
    found = cheapest_first(partial(mma_sync_times, load_paths=load_paths), problem, gpu)
    if not found:
        raise ArgumentError("target", gpu.target, "a target with TMA, mma.sync, and shared memory for a ring")
    return found[0][0]


@lru_cache(maxsize=64)
def _specs(layer: LinearShape, target: Target, load_paths: LoadPaths, least_stages: int) -> list[MmaSyncSpec]:
    """Return each tile's spec with the most stages that shared memory holds, if these are ``least_stages`` or more."""
    specs, smem_bytes = [], min(_SMEM_BYTES, target.smem_per_block_bytes)
    for tile in _TILES:
        if tile.registers and not target.has_setmaxnreg:
            continue
        scale_on = "accumulator" if tile.m <= _SCALED_SUMS_M else "weight"
        spec = MmaSyncSpec(
            dtype=layer.dtype,
            group_size=layer.group_size,
            has_zeros=layer.has_zeros,
            block_m=tile.m,
            block_n=tile.n,
            block_k=tile.k,
            warps_n=tile.warps_n,
            slice_k=tile.slice_k,
            stages=2,
            weight_load_path=load_paths.weight,
            scale_load_path=load_paths.scale,
            activation_load_path=load_paths.activation,
            scale_on="epilogue" if layer.group_size == -1 else scale_on,
            consumer_registers=tile.registers,
        )
        if (stages := min(_MAX_STAGES, spec.max_stages(smem_bytes))) >= least_stages:
            specs.append(replace(spec, stages=stages))
    return specs


def dump_specs(target: Target) -> list[MmaSyncSpec]:
    """Return the instances that dumps and compile checks cover: each tile, and each feature once."""
    large, small = LinearShape(8192, 28672, 128, False, "float16"), LinearShape(4096, 4096, 128, False, "float16")
    if not target.has("mma_sync") or not target.has("tma"):
        return []
    gpu = imagined_gpu(target, H200.sm_count)
    cases = [
        (replace(large, dtype="bfloat16", has_zeros=True), 16, LoadPaths()),
        (replace(large, group_size=32, has_zeros=True), 64, LoadPaths()),
        (replace(large, group_size=-1), 1024, LoadPaths()),
        (large, 16, LoadPaths("cp_async", "cp_async", "cp_async")),
        (large, 1024, LoadPaths("cp_async", "cp_async", "cp_async")),
        (small, 16, LoadPaths(scale="cp_async")),
    ]
    chosen = [choose_mma_sync(Problem(layer, m), gpu, load_paths) for layer, m, load_paths in cases]
    return list(dict.fromkeys(_specs(large, target, LoadPaths(), 2) + chosen))
