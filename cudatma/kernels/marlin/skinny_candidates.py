"""Configurations of the skinny GEMM that are worth ranking: one for each division of N and K among CTAs.

docs/performance/marlin_skinny.md holds the measurements that the limits come from.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cudatma.kernels.cost import LEAST_STAGES, cheapest_first
from cudatma.kernels.family import Times
from cudatma.kernels.gpu import CLUSTER_K, H200, Gpu, clusters_at_once, imagined_gpu
from cudatma.kernels.marlin.cost import SKINNY_TERMS, columns_of, skinny_cost
from cudatma.kernels.marlin.problem import LinearShape, Problem
from cudatma.kernels.marlin.skinny import MAX_N_TILES, MMA_COLUMNS, N_TILE, SkinnySpec, least_block_m
from cudatma.kernels.schedule import ceil_div
from cudatma.target import KIB, Target, get_target

#: The largest M of each number of rows that a box may have. Above the last one mma.sync bounds the time, not the loads
#: of the weight.
_SIZES = (1, 2, 4, 8, 16, 32)
_MAX_STAGES = 12
#: Bytes of outstanding weight loads of a CTA. More delay the first stage and gain nothing.
_RING_WEIGHT_BYTES = 64 * KIB
_BLOCK_KS = (1024, 512, 256, 128)
#: Most bytes of weights (for a block_k of more than _SHORT_K), and of activations, in one stage: when the last loads
#: have arrived, the warps still have one stage to compute.
_STAGE_WEIGHT_BYTES, _STAGE_ACTIVATION_BYTES, _SHORT_K = 28 * KIB, 32 * KIB, 256
#: A CTA of a cluster takes at least two stages of its part of K, unless block_k is at most this.
_SHORT_PART_K = 512
#: Most consumer warps of a CTA; with slice_k 8.
_MOST_WARPS, _MOST_SLICED_WARPS = 12, 8
#: From this block_m and group_size on, the sums of a group in addition to those of all K leave too few registers for
#: two CTAs on an SM with slice_k > 1: ptxas spills 250 to 440 bytes of a thread, and (3584, 37888) took 76 us instead
#: of 28. [H200]
_UNSLICED_M, _UNSLICED_GROUP = 32, 64
_SMEM_FOR_TWO_BYTES = 192 * KIB


def skinny_times(problem: Problem, ms: NDArray[np.int64], gpu: Gpu) -> Times[SkinnySpec]:
    """Return ``Family.times`` of this kernel.

    For each number of CTAs that may divide K, and each size, there is the best division of a stage.
    """
    target, layer = get_target(gpu.target), problem.layer
    if ms.min() > _SIZES[-1] or not target.has("mma_sync") or not target.has("tma"):
        return []
    found: dict[SkinnySpec, NDArray[np.bool_]] = {}
    for division in _divisions(layer.n, target, gpu.sm_count):
        slices = list(_slices(layer, division))
        for size in _SIZES:
            if (spec := _fitting(division, slices, layer, size, target)) is not None:
                found.setdefault(spec, ms <= spec.block_m)
    us: Any = skinny_cost(columns_of(list(found), SKINNY_TERMS), ms, layer.n, layer.k, gpu).us
    return [(spec, np.where(serves, one, np.inf)) for (spec, serves), one in zip(found.items(), us, strict=True)]


def ring_stages(k: int, n_tiles: int, block_k: int) -> int:
    """Return the number of stages that a ring can use for a K of ``k``; shared memory may hold fewer."""
    wanted = max(LEAST_STAGES, ceil_div(_RING_WEIGHT_BYTES, N_TILE * n_tiles * block_k // 2))
    # Loading all of K at once would delay the first stage, too.
    iterations = ceil_div(k, block_k)
    return min(wanted, _MAX_STAGES, max(iterations - 1, min(iterations, LEAST_STAGES), 2))


def has_deep_box(layer: LinearShape, block_m: int, n_tiles: int) -> bool:
    """Return whether one box should load a stage's activations.

    A block_m below 8 needs it. With a block_m of 8 and several N tiles, a box for each 64 of K is up to 2 % faster.
    """
    return layer.k % 64 == 0 and (n_tiles == 1 or block_m != MMA_COLUMNS)


def tile_rows(layer: LinearShape, m: int, block_k: int) -> int:
    """Return block_m: the fewest rows that a box may have, which saves shared memory and its bandwidth."""
    if m > MMA_COLUMNS // 2 or layer.k % 64:
        return 8 if m <= 8 else 16 if m <= 16 else 32
    return max(least_block_m(block_k), 1 << (m - 1).bit_length())


@dataclass(frozen=True, slots=True)
class _Division:
    """A division of N and K: the N tiles of a CTA, the CTAs that divide K, and the CTAs that share an SM."""

    n_tiles: int
    cluster_k: int = 1
    ctas_per_sm: int = 1


def _divisions(n: int, target: Target, sm_count: int) -> Iterator[_Division]:
    """Yield a division for each number of CTAs that may divide K, with the fewest N tiles that need no more waves."""
    n_tiles = ceil_div(n, N_TILE)
    waves = ceil_div(n_tiles, sm_count * MAX_N_TILES)
    # A second CTA on the SM works during the change of waves, where shared memory holds its ring.
    ctas_per_sm = 2 if waves > 1 and target.smem_per_sm_bytes >= _SMEM_FOR_TWO_BYTES else 1
    yield _Division(ceil_div(n_tiles, sm_count * waves), ctas_per_sm=ctas_per_sm)
    for cluster_k in CLUSTER_K[1:] if target.has("cluster") else ():
        # All clusters run at once: a second wave takes twice as long.
        at_once = clusters_at_once(cluster_k, sm_count)
        if at_once and (each := ceil_div(n_tiles, at_once)) <= MAX_N_TILES:
            yield _Division(each, cluster_k)


def _slices(layer: LinearShape, division: _Division) -> Iterator[tuple[int, int]]:
    """Yield (block_k, slice_k), the best first: enough warps to hide latencies, and the longest stages.

    A CTA of a cluster has fewer warps, because CTAs add up their sums as well.
    """
    n_tiles, cluster_k = division.n_tiles, division.cluster_k
    own_k = ceil_div(layer.k, cluster_k)
    max_k = 2 * max(_BLOCK_KS[-1], own_k) - 1
    if cluster_k > 1:
        max_k = min(max_k, max(_SHORT_PART_K, own_k // 2))
    for slice_k in (8, 4, 2, 1) if cluster_k == 1 else (4, 2, 1):
        if n_tiles * slice_k > (_MOST_SLICED_WARPS if slice_k == 8 else _MOST_WARPS):
            continue
        for block_k in _BLOCK_KS:
            has_stage = block_k <= max_k and block_k * (cluster_k - 1) < layer.k  # each CTA of a cluster has one
            fits = N_TILE * n_tiles * block_k // 2 <= _STAGE_WEIGHT_BYTES or block_k <= _SHORT_K
            if has_stage and fits and block_k >= max(64 * slice_k, layer.group_size):
                yield block_k, slice_k


def _fitting(
    division: _Division, slices: list[tuple[int, int]], layer: LinearShape, m: int, target: Target
) -> SkinnySpec | None:
    """Return the spec of the first slices whose ring has enough stages, or None if shared memory holds none."""
    budget, own_k = target.smem_share_bytes(division.ctas_per_sm), ceil_div(layer.k, division.cluster_k)
    rows = tile_rows(layer, m, _BLOCK_KS[0])
    unsliced = division.ctas_per_sm > 1 and rows >= _UNSLICED_M and layer.group_size >= _UNSLICED_GROUP
    for block_k, slice_k in slices:
        if rows * block_k * 2 > _STAGE_ACTIVATION_BYTES or (unsliced and slice_k > 1):
            continue
        block_m, wanted = tile_rows(layer, m, block_k), ring_stages(own_k, division.n_tiles, block_k)
        spec = SkinnySpec(
            layer.dtype, layer.group_size, layer.has_zeros, block_m, division.n_tiles, block_k, slice_k, wanted,
            division.ctas_per_sm, has_deep_box(layer, block_m, division.n_tiles), division.cluster_k,
        )  # fmt: skip
        stages = min(wanted, spec.max_stages(budget))
        if stages >= max(2, min(LEAST_STAGES, ceil_div(own_k, block_k))):
            return spec if stages == wanted else replace(spec, stages=stages)
    return None


def dump_specs(target: Target) -> list[SkinnySpec]:
    """Return the instances that dumps and compile checks cover: each number of N tiles, and each feature once."""
    large, small = LinearShape(8192, 28672, 128, False, "float16"), LinearShape(4096, 4096, 128, False, "float16")
    middle, square = replace(small, n=12288), replace(large, n=8192)
    cases = [(layer, 1) for layer in (small, square, middle, large)] + [(small, 16), (small, 32), (large, 16)]
    cases += [
        (replace(large, n=57344), 1),
        (replace(square, dtype="bfloat16", has_zeros=True), 16),
        (replace(middle, group_size=32, has_zeros=True), 16),
        (replace(middle, group_size=64, dtype="bfloat16"), 32),
        (replace(large, group_size=-1, has_zeros=True), 8),
        (replace(small, n=1024), 1),
        (replace(small, k=13824, n=5120, dtype="bfloat16"), 16),
        (replace(small, k=8192, n=1280, has_zeros=True), 32),
    ]
    gpu = imagined_gpu(target, H200.sm_count)
    found = (cheapest_first(skinny_times, Problem(layer, m), gpu)[:1] for layer, m in cases)
    return list(dict.fromkeys(spec for first in found for spec, _ in first))
