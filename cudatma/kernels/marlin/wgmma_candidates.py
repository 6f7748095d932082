"""Configurations of the wgmma kernel that are worth ranking: tiles fitted to M, whole or divided by clusters.

docs/performance/marlin_wgmma.md holds the measurements that the list comes from.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cudatma.errors import ArgumentError, TargetError
from cudatma.kernels.cost import LEAST_STAGES, cheapest_first
from cudatma.kernels.family import Times
from cudatma.kernels.gpu import CLUSTER_K, H200, Gpu, clusters_at_once, imagined_gpu
from cudatma.kernels.marlin.cost import WGMMA_TERMS, columns_of, rows_of, wgmma_cost
from cudatma.kernels.marlin.problem import LinearShape, Problem
from cudatma.kernels.marlin.wgmma import WgmmaSpec
from cudatma.kernels.schedule import ceil_div
from cudatma.target import Target, get_target

#: With fewer rows of x the skinny GEMM is faster: at M = 8 in 18 of 19 layers, by 1 to 10 %. [H200]
_LEAST_M = 9
#: block_m: fine steps for small M, where few rows of the last tile may be empty.
_SIZES = (*range(16, 65, 8), *range(80, 257, 16))
#: Tiles of fewer rows are for problems that one of them covers.
_LEAST_OF_SEVERAL = 48
#: Up to this block_m a tile has the pipeline for small M.
_SMALL_M = 64
#: block_m that dumps show of a tile in addition to the largest: its last 8 rows are stored without another 8.
_DUMPED_M = 40
#: Accumulators of a thread from which ptxas spills unless setmaxnreg provides registers: with stack 1; with stack 2,
#: whose weights take registers too.
_PLAIN_ACCUMULATORS, _STACKED_ACCUMULATORS, _REGISTERS = 96, 88, 232


@dataclass(frozen=True, slots=True)
class _Tile:
    """Fields of WgmmaSpec that go with any block_m from ``least_m`` to ``most_m``.

    stages: at most, fewer where shared memory does not hold them. small_m, large_m: (mmas_per_commit,
    commits_in_flight) up to _SMALL_M rows, and of more; small_m None: the same. shared, shared_divided: values of
    block_m that menus prefer (``Family.is_shared``), with cluster_k 1 and 2.
    """

    block_k: int
    warpgroups: int
    stages: int
    least_m: int
    most_m: int
    stack: int = 1
    warpgroups_k: int = 1
    cluster: int = 1
    pingpong: bool = False
    small_m: tuple[int, int] | None = None
    large_m: tuple[int, int] = (1, 3)
    shared: tuple[int, ...] = ()
    shared_divided: tuple[int, ...] = ()

    def pipeline(self, block_m: int) -> tuple[int, int]:
        """(mmas_per_commit, commits_in_flight)"""
        return self.small_m if self.small_m and block_m <= _SMALL_M else self.large_m

    @property
    def sizes(self) -> list[int]:
        """Values of block_m."""
        return [size for size in _SIZES if self.least_m <= size <= self.most_m and size % (8 * self.cluster) == 0]

    def limits(self, block_m: int) -> tuple[int, float]:
        """Return the first and the last M at which the tile is worth ranking."""
        index = _SIZES.index(self.least_m)
        first = max(_LEAST_M, _SIZES[index - 1] + 1 if index else 1, block_m + 1 if self.pingpong else 1)
        return first, block_m if block_m < _LEAST_OF_SEVERAL else np.inf


#: In the first, warpgroups divide K. One warpgroup's 64 columns pay off with a large block_m, for which it dequantizes
#: once. 192 columns are for layers that 128 or 256 columns cut into slightly more than a wave; ptxas spills there with
#: a block_m of more than 128. For small M, MMAs are short, and fewer commit groups are 1 to 4 % faster. The last one is
#: for M of several tiles: one warpgroup stores while the other multiplies. [H200]
_TILES = (
    _Tile(256, 1, 8, 16, 64, warpgroups_k=2, small_m=(4, 1), shared_divided=(16, 24, 32, 40, 48, 56, 64)),
    _Tile(256, 1, 8, 80, 128, shared_divided=(80, 96, 112)),
    _Tile(256, 2, 6, 16, 96, small_m=(2, 1), shared_divided=(32, 48, 64, 80)),
    _Tile(256, 3, 4, 16, 80, small_m=(2, 1), shared_divided=(48, 64)),
    _Tile(256, 2, 4, 16, 64, stack=2, small_m=(2, 1), shared=(16, 32, 48, 64)),
    _Tile(128, 1, 8, 80, 256, shared_divided=(128, 144, 176)),
    _Tile(128, 2, 6, 48, 192, shared_divided=(96, 112, 128)),
    _Tile(128, 2, 6, 128, 192, cluster=2, shared=(144, 160, 176)),
    _Tile(128, 3, 5, 48, 128, shared=(80, 96, 112, 128), shared_divided=(80, 96, 112, 128)),
    _Tile(128, 2, 5, 64, 128, stack=2, shared=(128,)),
    _Tile(128, 2, 3, 256, 256),
    _Tile(64, 2, 6, 128, 256, cluster=2, large_m=(2, 1), shared=(208, 256)),
    _Tile(128, 1, 4, 128, 128, stack=2, cluster=2, pingpong=True, shared=(128,)),
)


#: Fields that a _Tile and its specs share.
_tile_fields = attrgetter("block_k", "warpgroups", "warpgroups_k", "stack", "cluster", "pingpong")
_SHARED = frozenset(
    (block_m, cluster_k, *_tile_fields(tile))
    for tile in _TILES
    for cluster_k, sizes in ((1, tile.shared), (2, tile.shared_divided))
    for block_m in sizes
)


def is_shared(spec: object) -> bool:
    """Return ``Family.is_shared``: the kernels of a smallest menu for the four shapes of Llama-3-8B together.

    By an exact solution of the set cover, other shapes of 4096 to 28672 need few others.
    """
    return isinstance(spec, WgmmaSpec) and (spec.block_m, spec.cluster_k, *_tile_fields(spec)) in _SHARED


def wgmma_times(problem: Problem, ms: NDArray[np.int64], gpu: Gpu) -> Times[WgmmaSpec]:
    """Return ``Family.times`` of this kernel: each tile, with each number of CTAs that may divide K."""
    if not get_target(gpu.target).has_wgmma:
        return []
    specs, of = _candidates(replace(problem.layer, k=1, n=1), gpu)
    stages = ceil_div(problem.k, of.block_k)
    # Small groups' scales and a cluster's sums leave less memory to the ring. With two stages, 128 x 64 x 256 is a
    # third slower. [H200]
    has_ring = (stages >= of.cluster_k) & (of.stages >= np.minimum(LEAST_STAGES, ceil_div(stages, of.cluster_k)))
    # All clusters run at once: a second wave takes twice as long.
    last = np.minimum(of.last_m, of.block_m * np.floor(of.at_once / ceil_div(problem.n, of.block_n)))
    able = np.flatnonzero(has_ring & (of.first_m <= last))
    of = rows_of(of, able)
    serves = (of.first_m <= ms) & (ms <= last[able])
    us = np.full(serves.shape, np.inf)
    for group in (of.cluster_k == 1, of.cluster_k > 1):  # the second group serves few M
        part = np.ix_(group[:, 0], (serves & group).any(axis=0))
        cost = wgmma_cost(rows_of(of, group[:, 0]), ms[part[1]], problem.n, problem.k, gpu)
        us[part] = np.where(serves[part], cost.us, np.inf)
    return [(specs[able[row]], us[row]) for row in np.flatnonzero(serves.any(axis=1))]


@lru_cache(maxsize=64)
def _candidates(layer: LinearShape, gpu: Gpu) -> tuple[list[WgmmaSpec], Any]:
    """Return the specs that a GPU runs for weights of a kind, and their columns.

    The columns contain the terms of the cost model, the first and the last M at which the tile is worth ranking, and
    the clusters that run at once where they divide K, else inf.
    """
    target, specs, limits = get_target(gpu.target), [], []
    for tile in _TILES:
        for block_m in tile.sizes:
            for cluster_k in CLUSTER_K if tile.cluster == 1 else (1,):
                with suppress(ArgumentError, TargetError):
                    specs.append(_fitting(_spec(tile, block_m, layer, cluster_k), target))
                    at_once = clusters_at_once(cluster_k, gpu.sm_count) if cluster_k > 1 else np.inf
                    limits.append((*tile.limits(block_m), at_once))
    columns = columns_of(specs, ("stages", *WGMMA_TERMS))
    columns.first_m, columns.last_m, columns.at_once = np.array(limits).T[..., None]
    return specs, columns


def _spec(tile: _Tile, block_m: int, layer: LinearShape, cluster_k: int = 1) -> WgmmaSpec:
    """Return a tile's spec with block_m and cluster_k, and with the most stages that the tile may have."""
    plain = _PLAIN_ACCUMULATORS if tile.stack == 1 else _STACKED_ACCUMULATORS
    mmas_per_commit, commits_in_flight = tile.pipeline(block_m)
    several = tile.warpgroups > 1 or tile.pingpong  # one warpgroup has enough registers anyway
    return WgmmaSpec(
        dtype=layer.dtype,
        group_size=layer.group_size,
        has_zeros=layer.has_zeros,
        block_m=block_m,
        block_k=tile.block_k,
        warpgroups=tile.warpgroups,
        warpgroups_k=tile.warpgroups_k,
        stack=tile.stack,
        stages=tile.stages,
        cluster=tile.cluster,
        cluster_k=cluster_k,
        pingpong=tile.pingpong,
        mmas_per_commit=mmas_per_commit,
        commits_in_flight=commits_in_flight,
        consumer_registers=_REGISTERS if several and tile.stack * block_m // 2 > plain else 0,
    )


def _fitting(spec: WgmmaSpec, target: Target) -> WgmmaSpec:
    """Return the spec with fewer stages where shared memory does not hold them.

    Raises ArgumentError if it does not hold two, and TargetError if the target lacks a feature.
    """
    stages = max(2, spec.max_stages(target.smem_per_block_bytes))
    spec = spec if stages >= spec.stages else replace(spec, stages=stages)
    spec.check_target(target)
    return spec


def dump_specs(target: Target) -> list[WgmmaSpec]:
    """Return the instances that dumps and compile checks cover: each tile, and each feature once."""
    large, small = LinearShape(8192, 28672, 128, False, "float16"), LinearShape(4096, 4096, 128, False, "float16")
    if not target.has_wgmma:
        return []
    gpu = imagined_gpu(target, H200.sm_count)
    sizes = ((tile, size) for tile in _TILES for size in dict.fromkeys((max(tile.least_m, _DUMPED_M), tile.most_m)))
    specs = [_fitting(_spec(tile, size, large), target) for tile, size in sizes]
    cases = [
        (replace(large, dtype="bfloat16", has_zeros=True), 64),
        (replace(large, group_size=32, has_zeros=True), 128),
        (replace(large, dtype="bfloat16", group_size=64, has_zeros=True), 1024),
        (replace(large, group_size=-1, has_zeros=True), 256),
        (replace(small, group_size=-1, dtype="bfloat16"), 64),
        (replace(small, k=8192, n=1280), 100),
        (replace(small, n=2048, has_zeros=True, dtype="bfloat16"), 200),
    ]
    cases += [(large, 1024), (large, 128), (replace(large, dtype="bfloat16", group_size=-1), 256)]
    specs += [cheapest_first(wgmma_times, Problem(layer, m), gpu)[0][0] for layer, m in cases]
    # Most weights have scales for "as_stored". The tiles that differ most are dumped for all.
    rest = [specs[i].in_form(fused) for fused in ("shifted", "none") for i in (2, 6, -9)]
    return list(dict.fromkeys([*(spec.in_form("as_stored") for spec in specs), *rest]))
