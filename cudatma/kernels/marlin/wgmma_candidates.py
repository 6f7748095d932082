"""Configurations of the wgmma kernel that are worth ranking: a list of forms, cut to M, whole or divided by clusters.

docs/performance/marlin_wgmma.md holds the measurements that the list comes from.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from cudatma.kernels.candidates import Candidate, cheapest
from cudatma.kernels.gpu import H200, Gpu, imagined_gpu
from cudatma.kernels.marlin.clusters import CLUSTER_K, clusters_at_once
from cudatma.kernels.marlin.cost import WgmmaTile, wgmma_cost
from cudatma.kernels.marlin.problem import LinearShape, Problem, weight_policy
from cudatma.kernels.marlin.wgmma import WgmmaSpec
from cudatma.kernels.schedule import ceil_div
from cudatma.target import Target, get_target

#: With fewer rows of x the skinny GEMM is faster: at M = 8 in 18 of 19 layers, by 1 to 10 %. [H200]
_LEAST_M = 9
#: Tokens of a tile: fine where they are few, so that little of the last one is empty.
_SIZES = (*range(8, 65, 8), *range(80, 257, 16))
#: Tiles of fewer tokens are for one of them alone.
_LEAST_OF_SEVERAL = 48
#: Tiles of so many have the pipeline of few.
_FEW_TOKENS = 64
#: What dumps show of a form, beside its most: the last eight of them are alone where results leave by sixteens.
_DUMPED_TOKENS = 40
#: With more accumulators a thread, setmaxnreg has to make room; and with so many where two blocks of channels are
#: stacked, whose weights take registers too. ptxas spills otherwise.
_PLAIN_ACCUMULATORS, _STACKED_ACCUMULATORS, _REGISTERS = 96, 88, 232


@dataclass(frozen=True, slots=True)
class _Form:
    """Fields of WgmmaSpec that go with any number of tokens from ``least`` to ``most``. stages: at most, fewer where
    shared memory does not hold them. few: (mmas_per_commit, commits_in_flight) of tiles of few tokens, where
    not ``many``."""

    block_k: int
    warpgroups: int
    stages: int
    least: int
    most: int
    stack: int = 1
    warpgroups_k: int = 1
    cluster: int = 1
    few: tuple[int, int] | None = None
    many: tuple[int, int] = (1, 3)

    @property
    def block_n(self) -> int:
        return 64 * self.warpgroups * self.stack

    def pipeline(self, block_m: int) -> tuple[int, int]:
        """(mmas_per_commit, commits_in_flight)"""
        return self.few if self.few and block_m <= _FEW_TOKENS else self.many

    def sizes(self, m: int) -> list[int]:
        """Tokens of a tile: the fewest for each number of tiles that ``m`` tokens can be cut into; none where all of
        the form's tiles are longer than one needs to be."""
        enough = next((size for size in _SIZES if size >= m), _SIZES[-1])
        most = min(self.most, enough)
        able = [size for size in _SIZES if self.least <= size <= most and size % (8 * self.cluster) == 0]
        able = [size for size in able if size >= min(m, _LEAST_OF_SEVERAL)]
        fewest = {ceil_div(m, size): size for size in reversed(able)}
        return list(fewest.values())


#: In the first, warpgroups divide the depth. 64 channels of one warpgroup want many tokens, for which it dequantises
#: once. 192 channels are for layers that 128 or 256 cut into a wave and a bit, and ptxas spills with more than 128
#: tokens. Few tokens: products are short, and fewer commit groups are 1 to 4 % faster. [H200]
_FORMS = (
    _Form(256, 1, 8, 8, 64, warpgroups_k=2, few=(4, 1)),
    _Form(256, 1, 8, 80, 128),
    _Form(256, 2, 6, 8, 96, few=(2, 1)),
    _Form(256, 3, 4, 8, 80, few=(2, 1)),
    _Form(256, 2, 4, 8, 64, stack=2, few=(2, 1)),
    _Form(128, 1, 8, 80, 256),
    _Form(128, 2, 6, 48, 192),
    _Form(128, 2, 6, 128, 192, cluster=2),
    _Form(128, 3, 5, 48, 128),
    _Form(128, 2, 5, 64, 128, stack=2),
    _Form(128, 2, 3, 256, 256),
    _Form(64, 2, 6, 128, 256, cluster=2, many=(2, 1)),
)


def wgmma_candidates(problem: Problem, gpu: Gpu) -> Iterator[Candidate[WgmmaSpec]]:
    """Each form with each number of tiles that M can be cut into, and each number of CTAs that may divide K."""
    target, layer, m = get_target(gpu.target), problem.layer, problem.m
    if m < _LEAST_M or not (target.has_wgmma and target.has_setmaxnreg and target.has_multicast):
        return
    for form in _FORMS:
        warpgroups = (form.warpgroups, form.warpgroups_k)
        for block_m in form.sizes(m):
            for cluster_k in _divisions(form, block_m, m, layer, gpu):
                tile = WgmmaTile(block_m, form.block_n, form.block_k, *warpgroups, form.cluster, cluster_k)
                cost = wgmma_cost(tile, m, layer.n, layer.k, gpu)
                yield Candidate(cost, partial(_built, form, block_m, cluster_k, layer, m, target))


def _divisions(form: _Form, block_m: int, m: int, layer: LinearShape, gpu: Gpu) -> Iterator[int]:
    """Numbers of CTAs that may divide K. Clusters that wait for others take twice as long; and each CTA has a stage."""
    yield 1
    if form.cluster > 1:
        return
    tiles = ceil_div(m, block_m) * ceil_div(layer.n, form.block_n)
    for cluster_k in CLUSTER_K[1:]:
        if tiles <= clusters_at_once(cluster_k, gpu.sm_count) and layer.k > form.block_k * (cluster_k - 1):
            yield cluster_k


def _built(
    form: _Form, block_m: int, cluster_k: int, layer: LinearShape, m: int, target: Target, least_stages: int
) -> WgmmaSpec | None:
    """The spec, with fewer stages where shared memory does not hold the form's; None with fewer than ``least_stages``
    that a CTA would use. Tables of small groups, and a cluster's sums, take room from the ring: one of two stages is a
    third slower at 128 x 64 x 256. [H200]"""
    spec = _shortened(replace(_spec(form, block_m, layer, m), cluster_k=cluster_k), target)
    enough = min(least_stages, ceil_div(ceil_div(layer.k, form.block_k), cluster_k))
    return spec if spec.stages >= enough and spec.smem_bytes <= target.smem_per_block_bytes else None


def _spec(form: _Form, block_m: int, layer: LinearShape, m: int) -> WgmmaSpec:
    plain = _PLAIN_ACCUMULATORS if form.stack == 1 else _STACKED_ACCUMULATORS
    mmas_per_commit, commits_in_flight = form.pipeline(block_m)
    makes_room = form.warpgroups > 1 and form.stack * block_m // 2 > plain  # one warpgroup has them anyway
    return WgmmaSpec(
        dtype=layer.dtype,
        group_size=layer.group_size,
        has_zeros=layer.has_zeros,
        block_m=block_m,
        block_k=form.block_k,
        warpgroups=form.warpgroups,
        warpgroups_k=form.warpgroups_k,
        stack=form.stack,
        stages=form.stages,
        cluster=form.cluster,
        mmas_per_commit=mmas_per_commit,
        commits_in_flight=commits_in_flight,
        consumer_registers=_REGISTERS if makes_room else 0,
        # Weights that several token tiles read should stay in L2.
        weight_policy=weight_policy(m, block_m),
    )


def _shortened(spec: WgmmaSpec, target: Target) -> WgmmaSpec:
    """The spec, with fewer stages where shared memory does not hold them."""
    while spec.stages > 2 and spec.smem_bytes > target.smem_per_block_bytes:
        spec = replace(spec, stages=spec.stages - 1)
    return spec


def _fitting(spec: WgmmaSpec, target: Target) -> WgmmaSpec:
    """The same, and it has to fit then."""
    spec = _shortened(spec, target)
    spec.check_target(target)
    return spec


def dump_specs(target: Target) -> list[WgmmaSpec]:
    """The instances that stand for all in dumps and compile checks: each tile, and each feature once."""
    large, small = LinearShape(8192, 28672, 128, False, "float16"), LinearShape(4096, 4096, 128, False, "float16")
    if not target.has_wgmma:
        return []
    gpu = imagined_gpu(target, H200.sm_count)
    sizes = ((form, size) for form in _FORMS for size in dict.fromkeys((max(form.least, _DUMPED_TOKENS), form.most)))
    specs = [_fitting(_spec(form, size, large, size), target) for form, size in sizes]
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
    # Most weights have the one form; the others with tiles that differ most.
    others = [specs[i].in_form(form) for form in ("shifted", "none") for i in (2, 6, -9)]
    return list(dict.fromkeys([*(spec.in_form("as_stored") for spec in specs), *others]))
