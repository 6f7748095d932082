"""Instances of the kernels that give a row of the result the same bits whatever M is.

A sum in floating point depends on its order. Here every instance of a kernel adds up K in the same order: one warp or
warpgroup computes its columns of W alone, 16 of K at a time from the first to the last, with weights that are scaled
already. No tile is divided among CTAs (``divide`` of schedule()), no K among warps, and the target alone decides which
kernel serves. Where tiles are few this is slower.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from cudatma.kernels.gpu import Gpu
from cudatma.kernels.marlin.mma_sync import MmaSyncSpec
from cudatma.kernels.marlin.problem import LinearShape, Problem, weight_policy
from cudatma.kernels.marlin.specs import AnyMarlinSpec
from cudatma.kernels.marlin.wgmma import WgmmaSpec
from cudatma.kernels.schedule import ceil_div
from cudatma.target import Target, get_target

#: Values of block_m: the least that holds all of M, else several tiles of the last.
_WGMMA_SIZES, _MMA_SYNC_SIZES = (8, 16, 32, 64, 128, 256), (8, 16, 32, 64)
_MAX_STAGES = 12
Spec = TypeVar("Spec", MmaSyncSpec, WgmmaSpec)


def choose_invariant(problem: Problem, gpu: Gpu) -> AnyMarlinSpec:
    """The spec for a problem, for a schedule that divides no tile. Deterministic; looks at no device."""
    target, layer, m = get_target(gpu.target), problem.layer, problem.m
    spec: AnyMarlinSpec
    if target.has_wgmma and target.has_setmaxnreg:
        spec = _wgmma(layer, m, target, gpu.sm_count)
    else:
        spec = _mma_sync(layer, m, target, gpu.sm_count)
    spec.check_target(target)
    return spec


def _wgmma(layer: LinearShape, m: int, target: Target, sm_count: int) -> WgmmaSpec:
    block_m = next((size for size in _WGMMA_SIZES if size >= m), _WGMMA_SIZES[-1])
    block_k = 256 if block_m <= 64 else 128 if block_m == 128 else 64
    warpgroups = 2 if _fills(m, block_m, layer.n, 128, sm_count) else 1
    spec = WgmmaSpec(
        dtype=layer.dtype,
        group_size=layer.group_size,
        has_zeros=layer.has_zeros,
        block_m=block_m,
        block_k=block_k,
        warpgroups=warpgroups,
        stack=1,
        stages=2,
        mmas_per_commit=1,
        commits_in_flight=3,
        consumer_registers=232 if warpgroups * block_m == 512 else 0,
        weight_policy=weight_policy(m, block_m),
    )
    return _deepest(spec, target.smem_per_block_bytes)


def _mma_sync(layer: LinearShape, m: int, target: Target, sm_count: int) -> MmaSyncSpec:
    block_m = next((size for size in _MMA_SYNC_SIZES if size >= m), _MMA_SYNC_SIZES[-1])
    wide = _fills(m, block_m, layer.n, 128, sm_count)
    spec = MmaSyncSpec(
        dtype=layer.dtype,
        group_size=layer.group_size,
        has_zeros=layer.has_zeros,
        block_m=block_m,
        block_n=128 if wide else 64,
        block_k=256 if block_m <= 16 else 128,
        warps_n=4,
        slice_k=1,
        stages=2,
        scale_on="epilogue" if layer.group_size == -1 else "weight",
        weight_policy=weight_policy(m, block_m),
    )
    return _deepest(spec, target.smem_per_block_bytes)


def _fills(m: int, block_m: int, n: int, block_n: int, sm_count: int) -> bool:
    """Whether there is a tile for every SM."""
    return ceil_div(m, block_m) * ceil_div(n, block_n) >= sm_count


def _deepest(spec: Spec, smem_bytes: int) -> Spec:
    """The spec with as many stages as shared memory holds."""
    deeper = (replace(spec, stages=stages) for stages in range(_MAX_STAGES, spec.stages, -1))
    return next((one for one in deeper if one.smem_bytes <= smem_bytes), spec)
