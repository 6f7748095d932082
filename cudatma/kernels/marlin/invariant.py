"""Instances of the kernels that give a row the same bits whatever the number of tokens beside it.

A sum in floating point depends on its order. Here the order over the depth is one and the same for every instance of a
kernel: a warp or warpgroup adds up its channels alone, 16 depths at a time from the first to the last, on weights that
carry their scales already. No tile is divided among blocks (``divide`` of schedule()) and no depth among warps, and
which of the kernels serves depends on the target alone. That costs speed where tiles are few.
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

#: Tokens of a tile, the fewest that hold all; more of them take several tiles of the last.
_WGMMA_TOKENS, _MMA_SYNC_TOKENS = (8, 16, 32, 64, 128, 256), (8, 16, 32, 64)
_MAX_STAGES = 12
Spec = TypeVar("Spec", MmaSyncSpec, WgmmaSpec)


def choose_invariant(problem: Problem, gpu: Gpu) -> AnyMarlinSpec:
    """The spec for a problem, to be scheduled without division. Deterministic; looks at no device."""
    target, layer, m = get_target(gpu.target), problem.layer, problem.m
    spec: AnyMarlinSpec
    if target.has_wgmma and target.has_setmaxnreg:
        spec = _wgmma(layer, m, target, gpu.sm_count)
    else:
        spec = _mma_sync(layer, m, target, gpu.sm_count)
    spec.check_target(target)
    return spec


def _wgmma(layer: LinearShape, m: int, target: Target, sm_count: int) -> WgmmaSpec:
    block_m = next((size for size in _WGMMA_TOKENS if size >= m), _WGMMA_TOKENS[-1])
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
    block_m = next((size for size in _MMA_SYNC_TOKENS if size >= m), _MMA_SYNC_TOKENS[-1])
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
    """Whether tiles of so many channels give every multiprocessor one."""
    return ceil_div(m, block_m) * ceil_div(n, block_n) >= sm_count


def _deepest(spec: Spec, smem_bytes: int) -> Spec:
    """The spec with as many stages as shared memory holds."""
    deeper = (replace(spec, stages=stages) for stages in range(_MAX_STAGES, spec.stages, -1))
    return next((one for one in deeper if one.smem_bytes <= smem_bytes), spec)
