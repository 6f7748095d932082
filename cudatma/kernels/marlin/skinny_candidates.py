"""Configurations of the skinny GEMM that are worth ranking: one for each way to divide N and K among CTAs.

docs/performance/marlin_skinny.md holds the measurements that the limits come from.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from cudatma.kernels.candidates import LEAST_STAGES, Candidate, cheapest
from cudatma.kernels.gpu import H200, Gpu, imagined_gpu
from cudatma.kernels.marlin.clusters import CLUSTER_K, clusters_at_once
from cudatma.kernels.marlin.problem import LinearShape, Problem, weight_policy
from cudatma.kernels.marlin.skinny import MAX_N_TILES, MMA_COLUMNS, N_TILE, SkinnySpec, least_block_m
from cudatma.kernels.schedule import ceil_div
from cudatma.target import KIB, Target, get_target

#: More tokens than that are bound by mma.sync, not by the weight's bytes.
_MOST_TOKENS = 32
_MAX_STAGES = 12
#: Bytes of weights that a block's ring has under way. More delay the first stage, and win nothing.
_RING_WEIGHT_BYTES = 64 * KIB
_DEPTHS = (1024, 512, 256, 128)
#: Most bytes of weights (for depths of more than _SHORT_DEPTH), and of activations, in one stage: a stage is what the
#: last warps work on when all has arrived.
_STAGE_WEIGHT_BYTES, _STAGE_ACTIVATION_BYTES, _SHORT_DEPTH = 28 * KIB, 32 * KIB, 256
#: A cluster's block takes at least two stages of its part of the depth, unless they are as short as that.
_SHORT_PART = 512
#: Consumer warps of a block; where each takes an eighth of a stage's depth.
_MOST_WARPS, _MOST_DEEP_WARPS = 12, 8
#: With so many tokens and depths of a group, a group's sums beside those of the whole depth leave no registers for two
#: blocks whose warps divide the depth: ptxas spills 250 to 440 bytes of a thread. One that did took 76 us at (3584,
#: 37888), where 28 would do. [H200]
_WHOLE_DEPTH_TOKENS, _WHOLE_DEPTH_GROUP = 32, 64
_SMEM_FOR_TWO_BYTES = 192 * KIB


def skinny_candidates(problem: Problem, gpu: Gpu) -> Iterator[Candidate[SkinnySpec]]:
    """For each number of CTAs that may divide K the best division of a stage; none for many rows of x."""
    target, layer, m = get_target(gpu.target), problem.layer, problem.m
    if m > _MOST_TOKENS or not target.has("mma_sync") or not target.has("tma"):
        return
    for way in _ways(layer.n, target, gpu.sm_count):
        if (spec := _fitting(way, layer, m, target)) is not None:
            yield Candidate(spec.cost(problem, gpu), _Always(spec))


@dataclass(frozen=True, slots=True)
class _Always:
    """A spec that is there already: its ring is as deep as it has to be."""

    spec: SkinnySpec

    def __call__(self, least_stages: int) -> SkinnySpec:
        return self.spec


def ring_stages(k: int, n_tiles: int, block_k: int) -> int:
    """Stages of a ring that is as deep as is of use for ``k`` depths; shared memory may hold fewer."""
    wanted = max(LEAST_STAGES, ceil_div(_RING_WEIGHT_BYTES, N_TILE * n_tiles * block_k // 2))
    # Not all of the depth at once either, for the same reason.
    iterations = ceil_div(k, block_k)
    return min(wanted, _MAX_STAGES, max(iterations - 1, min(iterations, LEAST_STAGES), 2))


def has_deep_box(layer: LinearShape, block_m: int, n_tiles: int) -> bool:
    """Whether one box should bring a stage's activations. Of eight tokens, for several N tiles, a box for each 64
    depths is up to 2 % ahead; fewer come by no other way."""
    return layer.k % 64 == 0 and (n_tiles == 1 or block_m != MMA_COLUMNS)


def tile_tokens(layer: LinearShape, m: int, block_k: int) -> int:
    """Tokens of a tile: as few as a box may bring, which spares shared memory and its banks."""
    if m > MMA_COLUMNS // 2 or layer.k % 64:
        return next((size for size in (8, 16) if m <= size), 32)
    return max(least_block_m(block_k), 1 << (m - 1).bit_length())


@dataclass(frozen=True, slots=True)
class _Way:
    """N tiles of a block, blocks that divide the depth, and waves of blocks, one behind the other."""

    n_tiles: int
    cluster_k: int
    waves: int


def _ways(n: int, target: Target, sm_count: int) -> Iterator[_Way]:
    """As few N tiles a block as its limit allows: for the whole depth, and for each number of blocks that divide it."""
    n_tiles = ceil_div(n, N_TILE)
    waves = ceil_div(n_tiles, sm_count * MAX_N_TILES)
    yield _Way(ceil_div(n_tiles, sm_count * waves), 1, waves)
    for cluster_k in CLUSTER_K[1:] if target.has("cluster") else ():
        # Clusters that have to wait for others take twice as long.
        at_once = clusters_at_once(cluster_k, sm_count)
        if at_once and (each := ceil_div(n_tiles, at_once)) <= MAX_N_TILES:
            yield _Way(each, cluster_k, 1)


def _fitting(way: _Way, layer: LinearShape, m: int, target: Target) -> SkinnySpec | None:
    """The best division of a stage whose ring is as deep as is of use, if one fits."""
    # A second block fills the pause between two waves, where shared memory has room for its ring.
    blocks = 2 if way.waves > 1 and target.smem_per_sm_bytes >= _SMEM_FOR_TWO_BYTES else 1
    budget, depth = target.smem_share_bytes(blocks), ceil_div(layer.k, way.cluster_k)

    def with_ring(block_k: int, slice_k: int) -> SkinnySpec | None:
        """None where no ring fits."""
        block_m, wanted = tile_tokens(layer, m, block_k), ring_stages(depth, way.n_tiles, block_k)
        spec = SkinnySpec(
            layer.dtype, layer.group_size, layer.has_zeros, block_m, way.n_tiles, block_k, slice_k, wanted,
            weight_policy(m, block_m), blocks, has_deep_box(layer, block_m, way.n_tiles), way.cluster_k,
        )  # fmt: skip
        rings = (replace(spec, stages=n) for n in range(wanted, 1, -1))
        return next((one for one in rings if one.smem_bytes <= budget), None)

    for block_k, slice_k in _divisions(layer, way, m, blocks):
        enough = min(LEAST_STAGES, ceil_div(depth, block_k))
        chosen = with_ring(block_k, slice_k)
        if chosen is not None and chosen.stages >= max(2, enough):
            return chosen
    return None


def _divisions(layer: LinearShape, way: _Way, m: int, blocks: int) -> list[tuple[int, int]]:
    """(block_k, slice_k), best first: warps enough to hide latencies, each with as much depth of a stage as fits.
    Fewer where blocks meet as well."""
    found = []
    tokens = tile_tokens(layer, m, _DEPTHS[0])
    whole_depth = blocks > 1 and tokens >= _WHOLE_DEPTH_TOKENS and layer.group_size >= _WHOLE_DEPTH_GROUP
    for slice_k in (1,) if whole_depth else (8, 4, 2, 1) if way.cluster_k == 1 else (4, 2, 1):
        if way.n_tiles * slice_k > (_MOST_DEEP_WARPS if slice_k == 8 else _MOST_WARPS):
            continue
        for block_k in _DEPTHS:
            depth = ceil_div(layer.k, way.cluster_k)
            if ceil_div(layer.k, block_k) < way.cluster_k:
                continue  # a block without a stage
            if block_k >= 2 * max(_DEPTHS[-1], depth) or (way.cluster_k > 1 and block_k > max(_SHORT_PART, depth // 2)):
                continue
            if block_k < max(64 * slice_k, layer.group_size) or tokens * block_k * 2 > _STAGE_ACTIVATION_BYTES:
                continue
            if N_TILE * way.n_tiles * block_k // 2 <= _STAGE_WEIGHT_BYTES or block_k <= _SHORT_DEPTH:
                found.append((block_k, slice_k))
    return found


def dump_specs(target: Target) -> list[SkinnySpec]:
    """The instances that stand for all in dumps and compile checks: each number of N tiles, and each feature once."""
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
    specs = (cheapest(skinny_candidates(Problem(layer, m), gpu)) for layer, m in cases)
    return list(dict.fromkeys(spec for spec in specs if spec is not None))
