"""The configurations of marlin_gemm's kernels that are worth ranking, with their predicted times.

Tiles and limits come from the measurements in docs/lab/marlin.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cudatma.errors import ArgumentError, TargetError
from cudatma.kernels.cost import MIN_STAGES, cheapest_first
from cudatma.kernels.family import Times
from cudatma.kernels.gpu import CLUSTER_K, H200, Gpu, clusters_at_once, imagined_gpu
from cudatma.kernels.marlin.config import MMA_COLUMNS, N_TILE, MarlinConfig, min_tile_m
from cudatma.kernels.marlin.cost import (
    MMA_SYNC_TERMS,
    SKINNY_TERMS,
    WGMMA_TERMS,
    columns_of,
    mma_sync_cost,
    rows_of,
    skinny_cost,
    wgmma_cost,
)
from cudatma.kernels.marlin.problem import PROBLEM_FIELDS, LinearShape, Problem
from cudatma.kernels.schedule import ceil_div
from cudatma.target import KIB, Target, get_target

#: Maximum number of useful stages.
MAX_STAGES = 12

# ---- Skinny: one configuration for each split of N and K among CTAs --------------------------------------------------

#: The largest M for each number of rows per box. For larger M, the time is bound by mma.sync instead of the
#: loads of the weight.
SKINNY_SIZES = (1, 2, 4, 8, 16, 32)
_MAX_N_TILES = 8
#: Maximum number of bytes of outstanding weight loads per CTA. More loads would delay the first stage without any gain.
_RING_WEIGHT_BYTES = 64 * KIB
_TILE_KS = (1024, 512, 256, 128)
#: Maximum bytes of weights (for a tile_k above _SHORT_K) and maximum bytes of activations per stage. They are limited
#: because the warps must still compute a whole stage after the last loads have arrived.
_STAGE_WEIGHT_BYTES, _STAGE_ACTIVATION_BYTES, _SHORT_K = 28 * KIB, 32 * KIB, 256
#: A CTA of a cluster computes at least two stages of its part of K, unless tile_k is at most this number.
_SHORT_PART_K = 512
#: Maximum number of consumer warps per CTA, and the maximum with slice_k = 8.
_MAX_WARPS, _MAX_SLICED_WARPS = 12, 8
#: For at least this tile_m and group_size, two CTAs per SM with slice_k > 1 have too few registers, because they keep
#: the sums of a group and the sums of all K. ptxas spills 250 to 440 bytes per thread, and (3584, 37888) took 76 us
#: instead of 28 us. [H200]
_UNSLICED_M, _UNSLICED_GROUP = 32, 64
_SMEM_FOR_TWO_BYTES = 192 * KIB


def skinny_times(problem: Problem, ms: NDArray[np.int64], gpu: Gpu) -> Times[MarlinConfig]:
    """Return this kernel's configurations with their predicted times.

    For each number of CTAs that may split K, the result contains the best split of a stage for each size.
    """
    target, layer = get_target(gpu.target), problem.layer
    if ms.min() > SKINNY_SIZES[-1] or not target.has("mma_sync") or not target.has("tma"):
        return []
    configs: dict[MarlinConfig, NDArray[np.bool_]] = {}
    for division in _divisions(layer.n, target, gpu.sm_count):
        slices = list(_slices(layer, division))
        for size in SKINNY_SIZES:
            if (config := _skinny_config(division, slices, layer, size, target)) is not None:
                configs.setdefault(config, ms <= config.tile_m)
    us: Any = skinny_cost(columns_of(list(configs), SKINNY_TERMS), ms, layer.n, layer.k, gpu).us
    return [(config, np.where(serves, row, np.inf)) for (config, serves), row in zip(configs.items(), us, strict=True)]


def ring_stages(k: int, n_tiles: int, tile_k: int, bits: int) -> int:
    """Return the number of stages that a ring can use if K is ``k``. Fewer stages may fit in shared memory."""
    stages = max(MIN_STAGES, ceil_div(_RING_WEIGHT_BYTES, N_TILE * n_tiles * tile_k * bits // 8))
    # Loading all of K at once would also delay the first stage.
    iterations = ceil_div(k, tile_k)
    return min(stages, MAX_STAGES, max(iterations - 1, min(iterations, MIN_STAGES), 2))


def has_deep_box(layer: LinearShape, tile_m: int, n_tiles: int) -> bool:
    """Return whether one box should load a stage's activations.

    A tile_m below 8 requires it. With a tile_m of 8 and several N tiles, one box per 64 elements of K is up to 2%
    faster.
    """
    return layer.k % 64 == 0 and (n_tiles == 1 or tile_m != MMA_COLUMNS)


def tile_rows(layer: LinearShape, m: int, tile_k: int) -> int:
    """Return tile_m, the minimum number of rows per box."""
    if m > MMA_COLUMNS // 2 or layer.k % 64:
        return 8 if m <= 8 else 16 if m <= 16 else 32
    return max(min_tile_m(tile_k), 1 << (m - 1).bit_length())


class _Division(NamedTuple):
    """Split of N and K: number of N tiles per CTA, number of CTAs that split K, and number of CTAs per SM."""

    n_tiles: int
    cluster_k: int = 1
    ctas_per_sm: int = 1


def _divisions(n: int, target: Target, sm_count: int) -> Iterator[_Division]:
    """Yield, for each number of CTAs that may split K, the split with the fewest N tiles that adds no wave."""
    n_tiles = ceil_div(n, N_TILE)
    waves = ceil_div(n_tiles, sm_count * _MAX_N_TILES)
    # A second CTA on the SM, if its ring fits in shared memory, works while one wave follows another.
    ctas_per_sm = 2 if waves > 1 and target.smem_per_sm_bytes >= _SMEM_FOR_TWO_BYTES else 1
    yield _Division(ceil_div(n_tiles, sm_count * waves), ctas_per_sm=ctas_per_sm)
    for cluster_k in CLUSTER_K[1:] if target.has("cluster") else ():
        # All clusters must run at the same time, because a second wave would double the time.
        at_once = clusters_at_once(cluster_k, sm_count)
        if at_once and (each := ceil_div(n_tiles, at_once)) <= _MAX_N_TILES:
            yield _Division(each, cluster_k)


def _slices(layer: LinearShape, division: _Division) -> Iterator[tuple[int, int]]:
    """Yield (tile_k, slice_k), best first. The best pairs have enough warps to hide latencies, and the longest stages.

    A CTA of a cluster has fewer warps, because the CTAs also exchange and add their sums.
    """
    n_tiles, cluster_k = division.n_tiles, division.cluster_k
    own_k = ceil_div(layer.k, cluster_k)
    max_k = 2 * max(_TILE_KS[-1], own_k) - 1
    if cluster_k > 1:
        max_k = min(max_k, max(_SHORT_PART_K, own_k // 2))
    for slice_k in (8, 4, 2, 1) if cluster_k == 1 else (4, 2, 1):
        if n_tiles * slice_k > (_MAX_SLICED_WARPS if slice_k == 8 else _MAX_WARPS):
            continue
        for tile_k in _TILE_KS:
            has_stage = tile_k <= max_k and tile_k * (cluster_k - 1) < layer.k  # Each CTA of a cluster has a stage.
            fits = N_TILE * n_tiles * tile_k * layer.weight.bits // 8 <= _STAGE_WEIGHT_BYTES or tile_k <= _SHORT_K
            if has_stage and fits and tile_k >= max(64 * slice_k, layer.group_size):
                yield tile_k, slice_k


def _skinny_config(
    division: _Division, slices: list[tuple[int, int]], layer: LinearShape, m: int, target: Target
) -> MarlinConfig | None:
    """Return the config for the first slices whose ring has enough stages, or None if no such ring fits."""
    smem_bytes, own_k = target.smem_share_bytes(division.ctas_per_sm), ceil_div(layer.k, division.cluster_k)
    rows = tile_rows(layer, m, _TILE_KS[0])
    unsliced = division.ctas_per_sm > 1 and rows >= _UNSLICED_M and layer.group_size >= _UNSLICED_GROUP
    for tile_k, slice_k in slices:
        if rows * tile_k * 2 > _STAGE_ACTIVATION_BYTES or (unsliced and slice_k > 1):
            continue
        tile_m = tile_rows(layer, m, tile_k)
        stages = ring_stages(own_k, division.n_tiles, tile_k, layer.weight.bits)
        config = _layer_config(
            layer,
            version="skinny",
            tile_m=tile_m,
            tile_n=N_TILE * division.n_tiles,
            tile_k=tile_k,
            stages=stages,
            slice_k=slice_k,
            cluster_k=division.cluster_k,
            ctas_per_sm=division.ctas_per_sm,
            deep_box=has_deep_box(layer, tile_m, division.n_tiles),
        ).with_longest_ring(smem_bytes, stages)
        if config is not None and config.stages >= min(MIN_STAGES, ceil_div(own_k, tile_k)):
            return config
    return None


def _layer_config(layer: LinearShape, **fields: Any) -> MarlinConfig:
    """Return a config for the weights of a layer."""
    common = {name: getattr(layer, name) for name in PROBLEM_FIELDS}
    return MarlinConfig(**common, **fields)


# ---- wgmma: tiles fitted to M, whole or divided by clusters ----------------------------------------------------------

#: Minimum M. Below it, the skinny GEMM is faster: at M = 8 in 18 of 19 layers, by 1 to 10%. [H200]
MIN_WGMMA_M = 9
#: Values of tile_m. The steps are small for small M, so that few rows of the last tile are empty.
_WGMMA_SIZES = (*range(16, 65, 8), *range(80, 257, 16))
#: Tiles with fewer rows are used only for problems that a single tile covers.
_MIN_OF_SEVERAL = 48
#: Largest tile_m with the pipeline for small M.
_SMALL_M = 64
#: Value of tile_m in dumps, in addition to the largest one. With this value, the last 8 rows are stored separately.
_DUMPED_M = 40
#: Minimum accumulator counts per thread at which ptxas spills registers unless setmaxnreg provides more. The first
#: count is for 64 columns per warpgroup, the second for 128 columns, whose weights need more registers.
_PLAIN_ACCUMULATORS, _STACKED_ACCUMULATORS, _REGISTERS = 96, 88, 232


@dataclass(frozen=True, slots=True, kw_only=True)
class WgmmaTile:
    """Fields of a config for any tile_m from ``min_m`` to ``max_m``.

    Attributes
    ----------
    n, k : int
        Values of tile_n and tile_k.
    stages : int
        Maximum number of stages. Fewer stages are used if they do not fit in shared memory.
    small_m, large_m
        Pairs (mmas_per_commit, commits_in_flight) for up to _SMALL_M rows and for more rows. If small_m is None,
        large_m is used for both.
    shared, shared_divided : tuple[int, ...]
        Values of tile_m that menus prefer (``Family.is_shared``), with cluster_k 1 and 2.
    """

    n: int
    k: int
    warpgroups: int
    stages: int
    min_m: int
    max_m: int
    slice_k: int = 1
    cluster_n: int = 1
    pingpong: bool = False
    small_m: tuple[int, int] | None = None
    large_m: tuple[int, int] = (1, 3)
    shared: tuple[int, ...] = ()
    shared_divided: tuple[int, ...] = ()

    @property
    def sizes(self) -> list[int]:
        """Values of tile_m."""
        return [size for size in _WGMMA_SIZES if self.min_m <= size <= self.max_m and size % (8 * self.cluster_n) == 0]

    def limits(self, tile_m: int) -> tuple[int, float]:
        """Return the first and the last M at which the tile is worth ranking."""
        index = _WGMMA_SIZES.index(self.min_m)
        first = max(MIN_WGMMA_M, _WGMMA_SIZES[index - 1] + 1 if index else 1, tile_m + 1 if self.pingpong else 1)
        return first, tile_m if tile_m < _MIN_OF_SEVERAL else np.inf

    def config(self, layer: LinearShape, tile_m: int, cluster_k: int = 1) -> MarlinConfig:
        """Return the tile's config with its maximum number of stages."""
        pipeline = self.small_m if self.small_m and tile_m <= _SMALL_M else self.large_m
        is_wide = self.n == 128 * self.warpgroups
        several = self.warpgroups > 1 or self.pingpong  # A single warpgroup has enough registers without setmaxnreg.
        spills = (tile_m if is_wide else tile_m // 2) > (_STACKED_ACCUMULATORS if is_wide else _PLAIN_ACCUMULATORS)
        return _layer_config(
            layer,
            version="wgmma",
            tile_m=tile_m,
            tile_n=self.n,
            tile_k=self.k,
            stages=self.stages,
            slice_k=self.slice_k,
            cluster_n=self.cluster_n,
            cluster_k=cluster_k,
            consumer_registers=_REGISTERS if several and spills else 0,
            warpgroups=self.warpgroups,
            mmas_per_commit=pipeline[0],
            commits_in_flight=pipeline[1],
            pingpong=self.pingpong,
        )


_DIVIDED_64 = (16, 24, 32, 40, 48, 56, 64)
#: Tiles of the wgmma kernel. The warpgroups of the first tile split K. A single warpgroup with 64 columns pays off with
#: a large tile_m, because each weight is dequantized only once. 192 columns are for layers that 128 or 256 columns
#: divide into slightly more than one wave; with 192 columns and a tile_m above 128, ptxas spills. For small M, MMAs are
#: short, and fewer commit groups are 1 to 4% faster. The last tile is for values of M that need several tiles. One
#: warpgroup stores its tile while the other multiplies. [H200]
WGMMA_TILES = (
    WgmmaTile(
        n=64, k=256, warpgroups=1, slice_k=2, stages=8, min_m=16, max_m=64, small_m=(4, 1), shared_divided=_DIVIDED_64
    ),
    WgmmaTile(n=64, k=256, warpgroups=1, stages=8, min_m=80, max_m=128, shared_divided=(80, 96, 112)),
    WgmmaTile(
        n=128, k=256, warpgroups=2, stages=6, min_m=16, max_m=96, small_m=(2, 1), shared_divided=(32, 48, 64, 80)
    ),
    WgmmaTile(n=192, k=256, warpgroups=3, stages=4, min_m=16, max_m=80, small_m=(2, 1), shared_divided=(48, 64)),
    WgmmaTile(n=256, k=256, warpgroups=2, stages=4, min_m=16, max_m=64, small_m=(2, 1), shared=(16, 32, 48, 64)),
    WgmmaTile(n=64, k=128, warpgroups=1, stages=8, min_m=80, max_m=256, shared_divided=(128, 144, 176)),
    WgmmaTile(n=128, k=128, warpgroups=2, stages=6, min_m=48, max_m=192, shared_divided=(96, 112, 128)),
    WgmmaTile(n=128, k=128, warpgroups=2, stages=6, min_m=128, max_m=192, cluster_n=2, shared=(144, 160, 176)),
    WgmmaTile(
        n=192, k=128, warpgroups=3, stages=5, min_m=48, max_m=128, shared=(80, 96, 112, 128),
        shared_divided=(80, 96, 112, 128),
    ),
    WgmmaTile(n=256, k=128, warpgroups=2, stages=5, min_m=64, max_m=128, shared=(128,)),
    WgmmaTile(n=128, k=128, warpgroups=2, stages=3, min_m=256, max_m=256),
    WgmmaTile(
        n=128, k=64, warpgroups=2, stages=6, min_m=128, max_m=256, cluster_n=2, large_m=(2, 1), shared=(208, 256)
    ),
    WgmmaTile(n=128, k=128, warpgroups=1, stages=4, min_m=128, max_m=128, cluster_n=2, pingpong=True, shared=(128,)),
)  # fmt: skip


def _tile_of(config: MarlinConfig) -> tuple[Any, ...]:
    """Return the fields that a WgmmaTile and its configs share."""
    tile = config.tile_n, config.tile_k, config.warpgroups, config.slice_k, config.cluster_n, config.pingpong
    return (config.tile_m, config.cluster_k, *tile)


_SHARED = frozenset(
    (tile_m, cluster_k, tile.n, tile.k, tile.warpgroups, tile.slice_k, tile.cluster_n, tile.pingpong)
    for tile in WGMMA_TILES
    for cluster_k, sizes in ((1, tile.shared), (2, tile.shared_divided))
    for tile_m in sizes
)


def is_shared(config: MarlinConfig) -> bool:
    """Return whether a kernel is in the smallest common menu of the shapes of Llama-3-8B (``Family.is_shared``)."""
    return _tile_of(config) in _SHARED


def wgmma_times(problem: Problem, ms: NDArray[np.int64], gpu: Gpu) -> Times[MarlinConfig]:
    """Return this kernel's configurations with their predicted times.

    Each tile is combined with each number of CTAs that may split K.
    """
    if not get_target(gpu.target).has_wgmma:
        return []
    configs, tiles = _wgmma_candidates(replace(problem.layer, k=1, n=1), gpu)
    stages = ceil_div(problem.k, tiles.tile_k)
    # The scales of small groups and the sums of a cluster leave less shared memory for the ring. With only two stages,
    # 128 x 64 x 256 is a third slower. [H200]
    has_ring = (stages >= tiles.cluster_k) & (tiles.stages >= np.minimum(MIN_STAGES, ceil_div(stages, tiles.cluster_k)))
    # All clusters must run at the same time, because a second wave would double the time.
    last = np.minimum(tiles.last_m, tiles.tile_m * np.floor(tiles.at_once / ceil_div(problem.n, tiles.tile_n)))
    able = np.flatnonzero(has_ring & (tiles.first_m <= last))
    tiles = rows_of(tiles, able)
    serves = (tiles.first_m <= ms) & (ms <= last[able])
    us = np.full(serves.shape, np.inf)
    for group in (tiles.cluster_k == 1, tiles.cluster_k > 1):  # The second group applies to few values of M.
        part = np.ix_(group[:, 0], (serves & group).any(axis=0))
        cost = wgmma_cost(rows_of(tiles, group[:, 0]), ms[part[1]], problem.n, problem.k, gpu)
        us[part] = np.where(serves[part], cost.us, np.inf)
    return [(configs[able[row]], us[row]) for row in np.flatnonzero(serves.any(axis=1))]


@lru_cache(maxsize=64)
def _wgmma_candidates(layer: LinearShape, gpu: Gpu) -> tuple[list[MarlinConfig], Any]:
    """Return the configs that a GPU can run for weights of one format, and their columns.

    The columns contain the terms of the cost model, the first and the last M at which the tile is worth ranking, and
    the number of clusters that run at the same time if the CTAs of a cluster split K, otherwise inf.
    """
    target, configs, limits = get_target(gpu.target), [], []
    for tile in WGMMA_TILES:
        for tile_m in tile.sizes:
            for cluster_k in CLUSTER_K if tile.cluster_n == 1 else (1,):
                with suppress(ArgumentError, TargetError):
                    configs.append(fitted(tile.config(layer, tile_m, cluster_k), target))
                    at_once = clusters_at_once(cluster_k, gpu.sm_count) if cluster_k > 1 else np.inf
                    limits.append((*tile.limits(tile_m), at_once))
    columns = columns_of(configs, ("stages", *WGMMA_TERMS))
    columns.first_m, columns.last_m, columns.at_once = np.array(limits).T[..., None]
    return configs, columns


def fitted(config: MarlinConfig, target: Target, max_stages: int = 0) -> MarlinConfig:
    """Return the config with the most stages that fit in shared memory, at most ``max_stages``.

    By default, ``max_stages`` is the config's number of stages. Raises ArgumentError if two stages do not fit, and
    TargetError if the target lacks a feature.
    """
    config = config.with_longest_ring(target.smem_per_block_bytes, max_stages or config.stages) or config
    config.check_target(target)
    return config


# ---- mma.sync: a list of tiles, one CTA per SM ---------------------------------------------------------------------

#: Shared memory per CTA that every target provides (SM120: 99 KiB).
_SMEM_BYTES = 99 * KIB
#: Largest tile_m for which the sums are scaled once per group. With a larger tile_m, the weights are scaled.
_SCALED_SUMS_M = 32


class MmaSyncTile(NamedTuple):
    """Fields of a config for the mma.sync kernel."""

    m: int
    n: int
    k: int
    warps_n: int
    slice_k: int = 1
    registers: int = 0


#: Tiles of the mma.sync kernel. Each is the fastest of 17 tiles for at least three of 110 problems (13 layers, M = 1 to
#: 2048, one CTA per SM, at most 99 KiB), and is in the menu of at least one layer. [H200, compiled for sm_90a;
#: benchmarks/results/marlin_readings.json]
MMA_SYNC_TILES = (
    MmaSyncTile(m=8, n=64, k=256, warps_n=2, slice_k=4),
    MmaSyncTile(m=16, n=64, k=256, warps_n=2, slice_k=4),
    MmaSyncTile(m=32, n=64, k=256, warps_n=2, slice_k=4),
    MmaSyncTile(m=32, n=256, k=128, warps_n=8),
    MmaSyncTile(m=64, n=64, k=128, warps_n=4, slice_k=2),
    MmaSyncTile(m=64, n=256, k=64, warps_n=8),
    MmaSyncTile(m=128, n=256, k=64, warps_n=8, registers=232),
)


def mma_sync_times(problem: Problem, ms: NDArray[np.int64], gpu: Gpu) -> Times[MarlinConfig]:
    """Return this kernel's configurations with their predicted times.

    Tiles are omitted if a smaller tile_m gives the same number of tiles.
    """
    target = get_target(gpu.target)
    if not target.has("mma_sync") or not target.has("tma"):
        return []
    heights = sorted({tile.m for tile in MMA_SYNC_TILES})
    tallest = np.asarray(heights)[np.minimum(np.searchsorted(heights, ms), len(heights) - 1)]
    fitting = _mma_sync_configs(replace(problem.layer, k=1, n=1), target)
    configs = [config for config in fitting if config.stages >= MIN_STAGES]
    columns = columns_of(configs, MMA_SYNC_TERMS)
    us = np.where(columns.tile_m <= tallest, mma_sync_cost(columns, ms, problem.n, problem.k, gpu).us, np.inf)
    return list(zip(configs, us, strict=True))


def choose_mma_sync(problem: Problem, gpu: Gpu, **changes: str) -> MarlinConfig:
    """Return this kernel's cheapest configuration on any target with the load paths in ``changes``, for comparisons."""
    ranked = cheapest_first(mma_sync_times, problem, gpu)
    if not ranked:
        raise ArgumentError("target", gpu.target, "a target with TMA, mma.sync and enough shared memory for a ring")
    return replace(ranked[0][0], **changes)  # type: ignore[arg-type]


@lru_cache(maxsize=64)
def _mma_sync_configs(layer: LinearShape, target: Target) -> list[MarlinConfig]:
    """Return each tile's config with the most stages that fit in shared memory."""
    smem_bytes = min(_SMEM_BYTES, target.smem_per_block_bytes)
    configs = (
        _layer_config(
            layer,
            version="mma_sync",
            tile_m=tile.m,
            tile_n=tile.n,
            tile_k=tile.k,
            stages=2,
            slice_k=tile.slice_k,
            consumer_registers=tile.registers,
            warps_n=tile.warps_n,
            scale_on=_scale_on(layer, tile.m),
        ).with_longest_ring(smem_bytes, MAX_STAGES)
        for tile in MMA_SYNC_TILES
        if target.has_setmaxnreg or not tile.registers
    )
    return [config for config in configs if config is not None]


def _scale_on(layer: LinearShape, tile_m: int) -> str:
    if layer.group_size == -1:
        return "epilogue"
    return "accumulator" if tile_m <= _SCALED_SUMS_M and not layer.weight.has_exact_products else "weight"


#: ``Family.times`` of each kernel.
TIMES = {"skinny": skinny_times, "wgmma": wgmma_times, "mma_sync": mma_sync_times}

# ---- Dumps -----------------------------------------------------------------------------------------------------------

_LARGE = LinearShape(8192, 28672, 128, False, "float16")
_SMALL = replace(_LARGE, k=4096, n=4096)


def dump_configs(version: str, target: Target) -> list[MarlinConfig]:
    """Return the configurations for dumps and compile checks.

    The configurations cover each tile of a kernel, and each feature once.
    """
    if not target.has("tma") or not target.has("wgmma" if version == "wgmma" else "mma_sync"):
        return []
    return list(_dumps(version, target))


@cache
def _dumps(version: str, target: Target) -> tuple[MarlinConfig, ...]:
    dumped = {"skinny": _skinny_dumps, "wgmma": _wgmma_dumps, "mma_sync": _mma_sync_dumps}[version]
    return tuple(dict.fromkeys(dumped(target, imagined_gpu(target, H200.sm_count))))


def _skinny_dumps(target: Target, gpu: Gpu) -> list[MarlinConfig]:
    middle, square = replace(_SMALL, n=12288), replace(_LARGE, n=8192)
    cases = [(layer, 1) for layer in (_SMALL, square, middle, _LARGE)] + [(_SMALL, 16), (_SMALL, 32), (_LARGE, 16)]
    cases += [
        (replace(_LARGE, n=57344), 1),
        (replace(square, dtype="bfloat16", has_zeros=True), 16),
        (replace(middle, group_size=32, has_zeros=True), 16),
        (replace(middle, group_size=64, dtype="bfloat16"), 32),
        (replace(_LARGE, group_size=-1, has_zeros=True), 8),
        (replace(_SMALL, n=1024), 1),
        (replace(_SMALL, k=13824, n=5120, dtype="bfloat16"), 16),
        (replace(_SMALL, k=8192, n=1280, has_zeros=True), 32),
        (replace(middle, format="mxfp4", group_size=32, dtype="bfloat16"), 1),
        (replace(_SMALL, format="fp8"), 16),
        (replace(square, format="int8", group_size=-1, dtype="bfloat16"), 8),
    ]
    cheapest = (cheapest_first(skinny_times, Problem(layer, m), gpu)[:1] for layer, m in cases)
    return [config for first in cheapest for config, _ in first]


def _wgmma_dumps(target: Target, gpu: Gpu) -> list[MarlinConfig]:
    sizes = ((tile, size) for tile in WGMMA_TILES for size in dict.fromkeys((max(tile.min_m, _DUMPED_M), tile.max_m)))
    configs = [fitted(tile.config(_LARGE, size), target) for tile, size in sizes]
    cases = [
        (replace(_LARGE, dtype="bfloat16", has_zeros=True), 64),
        (replace(_LARGE, group_size=32, has_zeros=True), 128),
        (replace(_LARGE, dtype="bfloat16", group_size=64, has_zeros=True), 1024),
        (replace(_LARGE, group_size=-1, has_zeros=True), 256),
        (replace(_SMALL, group_size=-1, dtype="bfloat16"), 64),
        (replace(_SMALL, k=8192, n=1280), 100),
        (replace(_SMALL, n=2048, has_zeros=True, dtype="bfloat16"), 200),
    ]
    cases += [(_LARGE, 1024), (_LARGE, 128), (replace(_LARGE, dtype="bfloat16", group_size=-1), 256)]
    cases += [
        (replace(_LARGE, format="nvfp4", group_size=16, dtype="bfloat16"), 1024),
        (replace(_SMALL, format="fp8", dtype="bfloat16"), 256),
        (replace(_SMALL, format="int8"), 64),
    ]
    configs += [cheapest_first(wgmma_times, Problem(layer, m), gpu)[0][0] for layer, m in cases]
    # The scales of most weights allow "as_stored". Only the tiles that differ most are dumped in all forms.
    rest = [configs[i].in_form(form) for form in ("shifted", "none") for i in (2, 6, -12)]
    return [*(config.in_form("as_stored") for config in configs), *rest]


def _mma_sync_dumps(target: Target, gpu: Gpu) -> list[MarlinConfig]:
    by_cp_async = dict.fromkeys(("weight_load_path", "scale_load_path", "activation_load_path"), "cp_async")
    cases: list[tuple[LinearShape, int, dict[str, str]]] = [
        (replace(_LARGE, dtype="bfloat16", has_zeros=True), 16, {}),
        (replace(_LARGE, group_size=32, has_zeros=True), 64, {}),
        (replace(_LARGE, group_size=-1), 1024, {}),
        (replace(_LARGE, format="mxfp4", group_size=32), 64, {}),
        (replace(_LARGE, format="fp8", dtype="bfloat16"), 16, {}),
        (_LARGE, 16, by_cp_async),
        (_LARGE, 1024, by_cp_async),
        (_SMALL, 16, {"scale_load_path": "cp_async"}),
    ]
    chosen = [choose_mma_sync(Problem(layer, m), gpu, **paths) for layer, m, paths in cases]
    return _mma_sync_configs(_LARGE, target) + chosen
