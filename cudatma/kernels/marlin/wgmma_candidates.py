"""Configurations of the wgmma kernel that are worth ranking: tiles fitted to M, whole or divided by clusters.

docs/performance/marlin_wgmma.md holds the measurements that the list comes from.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from cudatma.kernels.cost import Candidate, cheapest
from cudatma.kernels.gpu import CLUSTER_K, H200, Gpu, clusters_at_once, imagined_gpu
from cudatma.kernels.marlin.cost import WgmmaTile, wgmma_cost
from cudatma.kernels.marlin.problem import LinearShape, Problem, weight_policy
from cudatma.kernels.marlin.wgmma import WgmmaSpec
from cudatma.kernels.schedule import ceil_div
from cudatma.target import Target, get_target

#: With fewer rows of x the skinny GEMM is faster: at M = 8 in 18 of 19 layers, by 1 to 10 %. [H200]
_LEAST_M = 9
#: block_m: fine steps for small M, where few rows of the last tile may be empty.
_SIZES = (*range(8, 65, 8), *range(80, 257, 16))
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
    commits_in_flight) up to _SMALL_M rows, and of more; small_m None: the same.
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

    @property
    def block_n(self) -> int:
        return 64 * self.warpgroups * self.stack

    def pipeline(self, block_m: int) -> tuple[int, int]:
        """(mmas_per_commit, commits_in_flight)"""
        return self.small_m if self.small_m and block_m <= _SMALL_M else self.large_m

    def sizes(self, m: int) -> list[int]:
        """Values of block_m: the least for each number of tiles that ``m`` rows can be cut into; none where
        ``least_m`` is more than one tile needs."""
        enough = next((size for size in _SIZES if size >= m), _SIZES[-1])
        most = min(self.most_m, enough)
        able = [size for size in _SIZES if self.least_m <= size <= most and size % (8 * self.cluster) == 0]
        able = [size for size in able if size >= min(m, _LEAST_OF_SEVERAL) and (not self.pingpong or m > size)]
        fewest = {ceil_div(m, size): size for size in reversed(able)}
        return list(fewest.values())


#: In the first, warpgroups divide K. One warpgroup's 64 columns pay off with a large block_m, for which it dequantizes
#: once. 192 columns are for layers that 128 or 256 columns cut into slightly more than a wave; ptxas spills there with
#: a block_m of more than 128. For small M, MMAs are short, and fewer commit groups are 1 to 4 % faster. The last one is
#: for M of several tiles: one warpgroup stores while the other multiplies. [H200]
_TILES = (
    _Tile(256, 1, 8, 8, 64, warpgroups_k=2, small_m=(4, 1)),
    _Tile(256, 1, 8, 80, 128),
    _Tile(256, 2, 6, 8, 96, small_m=(2, 1)),
    _Tile(256, 3, 4, 8, 80, small_m=(2, 1)),
    _Tile(256, 2, 4, 8, 64, stack=2, small_m=(2, 1)),
    _Tile(128, 1, 8, 80, 256),
    _Tile(128, 2, 6, 48, 192),
    _Tile(128, 2, 6, 128, 192, cluster=2),
    _Tile(128, 3, 5, 48, 128),
    _Tile(128, 2, 5, 64, 128, stack=2),
    _Tile(128, 2, 3, 256, 256),
    _Tile(64, 2, 6, 128, 256, cluster=2, large_m=(2, 1)),
    _Tile(128, 1, 4, 128, 128, stack=2, cluster=2, pingpong=True),
)


def wgmma_candidates(problem: Problem, gpu: Gpu) -> Iterator[Candidate[WgmmaSpec]]:
    """Each tile, with each number of tiles that M can be cut into, and each number of CTAs that may divide K."""
    target, layer, m = get_target(gpu.target), problem.layer, problem.m
    if m < _LEAST_M or not (target.has_wgmma and target.has_setmaxnreg and target.has_multicast):
        return
    for tile in _TILES:
        warpgroups = (tile.warpgroups, tile.warpgroups_k)
        for block_m in tile.sizes(m):
            for cluster_k in _divisions(tile, block_m, m, layer, gpu):
                sizes = block_m, tile.block_n, tile.block_k
                costed = WgmmaTile(*sizes, *warpgroups, tile.cluster, cluster_k, pingpong=tile.pingpong)
                cost = wgmma_cost(costed, m, layer.n, layer.k, gpu)
                yield Candidate(cost, partial(_built, tile, block_m, cluster_k, layer, m, target))


def _divisions(tile: _Tile, block_m: int, m: int, layer: LinearShape, gpu: Gpu) -> Iterator[int]:
    """Numbers of CTAs that may divide K. All clusters run at once: a second wave takes twice as long. Each CTA has a
    stage."""
    yield 1
    if tile.cluster > 1:
        return
    tiles = ceil_div(m, block_m) * ceil_div(layer.n, tile.block_n)
    for cluster_k in CLUSTER_K[1:]:
        if tiles <= clusters_at_once(cluster_k, gpu.sm_count) and layer.k > tile.block_k * (cluster_k - 1):
            yield cluster_k


def _built(
    tile: _Tile, block_m: int, cluster_k: int, layer: LinearShape, m: int, target: Target, least_stages: int
) -> WgmmaSpec | None:
    """The spec, with fewer stages where shared memory does not hold the tile's; None with fewer than ``least_stages``
    that a CTA would use. Scales of small groups, and a cluster's sums, leave less shared memory to the ring: a ring of
    two stages is a third slower at 128 x 64 x 256. [H200]"""
    spec = _shortened(replace(_spec(tile, block_m, layer, m), cluster_k=cluster_k), target)
    enough = min(least_stages, ceil_div(ceil_div(layer.k, tile.block_k), cluster_k))
    return spec if spec.stages >= enough and spec.smem_bytes <= target.smem_per_block_bytes else None


def _spec(tile: _Tile, block_m: int, layer: LinearShape, m: int) -> WgmmaSpec:
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
        pingpong=tile.pingpong,
        mmas_per_commit=mmas_per_commit,
        commits_in_flight=commits_in_flight,
        consumer_registers=_REGISTERS if several and tile.stack * block_m // 2 > plain else 0,
        weight_policy=weight_policy(m, block_m),
    )


def _shortened(spec: WgmmaSpec, target: Target) -> WgmmaSpec:
    """The spec, with fewer stages where shared memory does not hold them."""
    while spec.stages > 2 and spec.smem_bytes > target.smem_per_block_bytes:
        spec = replace(spec, stages=spec.stages - 1)
    return spec


def _fitting(spec: WgmmaSpec, target: Target) -> WgmmaSpec:
    """As _shortened(). Raises ArgumentError where the spec does not fit either."""
    spec = _shortened(spec, target)
    spec.check_target(target)
    return spec


def dump_specs(target: Target) -> list[WgmmaSpec]:
    """The instances that stand for all in dumps and compile checks: each tile, and each feature once."""
    large, small = LinearShape(8192, 28672, 128, False, "float16"), LinearShape(4096, 4096, 128, False, "float16")
    if not target.has_wgmma:
        return []
    gpu = imagined_gpu(target, H200.sm_count)
    sizes = ((tile, size) for tile in _TILES for size in dict.fromkeys((max(tile.least_m, _DUMPED_M), tile.most_m)))
    specs = [_fitting(_spec(tile, size, large, size), target) for tile, size in sizes]
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
    chosen = (cheapest(wgmma_candidates(Problem(layer, m), gpu)) for layer, m in cases)
    specs += [spec for spec in chosen if spec is not None]
    # Most weights have scales for "as_stored". The tiles that differ most are dumped for all.
    rest = [specs[i].in_form(fused) for fused in ("shifted", "none") for i in (2, 6, -9)]
    return list(dict.fromkeys([*(spec.in_form("as_stored") for spec in specs), *rest]))
