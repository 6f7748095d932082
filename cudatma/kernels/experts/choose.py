"""Choice of the kernels of marlin_moe."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import ceil, expm1, inf, sqrt
from typing import Any, NamedTuple

from cudatma.kernels.experts.config import (
    MAX_EXPERTS,
    MAX_STAGES,
    PRODUCTS,
    ROUTE_CTAS,
    ROUTE_THREADS,
    ROW_BOX,
    ExpertsConfig,
    RouteConfig,
    SumConfig,
)
from cudatma.kernels.experts.problem import MoeProblem
from cudatma.kernels.gpu import Gpu
from cudatma.kernels.marlin.problem import PROBLEM_FIELDS, LinearShape
from cudatma.kernels.schedule import ceil_div
from cudatma.target import Target, get_target

#: (tile_m, maximum mean number of rows of an expert that has rows) of the skinny kernel. A larger tile_m reads weights
#: less often, but computes more padding rows. [H200]
_SKINNY_TILE_MS = ((8, 4.5), (16, 10.0), (32, inf))
_MAX_TILE_M = 128
#: Maximum tile_m for stages of 256 elements of K instead of 128, if three stages fit. [H100]
_DEEP_TILE_M = 64
#: tile_n of the wgmma kernel for many tiles, and for few tiles.
_WGMMA_N, _NARROW_WGMMA_N = 256, 128
#: Minimum number of wide tiles per SM. If there are fewer, the tiles are narrow. [H100]
_MIN_WIDE_TILES = 0.6
#: Minimum number of pairs for a routing kernel with several CTAs.
_MIN_PAIRS_OF_CLUSTER = 4096
#: Maximum mean number of rows per expert, and maximum number of pairs, for which each pair is a block. An expert's
#: weights are then read once for each of its rows, most of the time from L2.
_MAX_DIRECT_ROWS, _MAX_DIRECT_PAIRS = 1.2, 64
#: Minimum mean number of rows for the wgmma kernel. [H200]
_MIN_WGMMA_ROWS = 7.5
#: (tile_k, slice_k, ctas_per_sm) of each tile_n, and of tile_n 64 for a long K. [H200]
_FIELDS = {256: (256, 1, 1), 128: (256, 2, 2), 64: (256, 2, 2)}
_LONG_FIELDS, _LONG_K = (512, 4, 1), 4096
#: tile_n of the two products, and (tile_k, slice_k, ctas_per_sm), with which the skinny kernel adds in the same order
#: for every number of tokens.
_INVARIANT_SKINNY_NS, _INVARIANT_FIELDS = (64, 64), (256, 1, 1)
#: Relative speed of each tile_n if all SMs are busy. [H200]
_RATES = {256: 1.0, 128: 0.96, 64: 0.93}


class MoeConfig(NamedTuple):
    """Kernels of a call: the routing unless each pair is a block, the two grouped GEMMs, and the sum."""

    route: RouteConfig | None
    up: ExpertsConfig
    down: ExpertsConfig
    sum: SumConfig

    @classmethod
    def of(cls, threads: int, up: ExpertsConfig, down: ExpertsConfig, ctas: int = 1) -> MoeConfig:
        """Return the kernels for these grouped GEMMs, which must have the same tile_m and version."""
        route = None if up.direct else RouteConfig(up.tile_m, short_rows(up), threads, ctas)
        return cls(route, up, down, SumConfig(up.dtype, up.direct))

    @property
    def named_kernels(self) -> tuple[tuple[str, str, Any], ...]:
        """(name, template, config) of each kernel in order of launch."""
        route = () if self.route is None else (("route", "kernels/experts_route.cu.j2", self.route),)
        return (
            *route,
            ("up", self.up.template, self.up),
            ("down", self.down.template, self.down),
            ("sum", "kernels/experts_sum.cu.j2", self.sum),
        )

    @property
    def kernels(self) -> tuple[tuple[str, Any], ...]:
        """(template, config) of each kernel in order of launch."""
        return tuple([(template, config) for _, template, config in self.named_kernels])


class Choice(NamedTuple):
    """Version, tiles and threads of the kernels, which determine their configurations.

    Attributes
    ----------
    version : str
        A key of PRESETS.
    tile_m : int
        Maximum number of rows of a block.
    up_n, down_n : int
        ``tile_n`` of the two products.
    route_threads, route_ctas : int
        Number of threads per CTA and of CTAs of the routing kernel.
    direct : bool
        Whether each pair is a block, so that no routing kernel is needed.
    """

    version: str
    tile_m: int
    up_n: int
    down_n: int
    route_threads: int
    route_ctas: int = 1
    direct: bool = False


def mean_rows(pairs: int, experts: int) -> float:
    """Return the mean number of rows of the experts that have rows, if pairs choose experts at random."""
    expected = pairs / experts
    return expected / -expm1(-expected)


def choose(problem: MoeProblem, gpu: Gpu) -> Choice:
    """Return the version and the tiles for a problem."""
    target, invariant = get_target(gpu.target), problem.batch_invariant
    rows = mean_rows(problem.pairs, problem.global_experts)
    share = problem.experts / problem.global_experts
    threads = route_threads(problem.experts, problem.pairs)
    ctas = ROUTE_CTAS if problem.pairs >= _MIN_PAIRS_OF_CLUSTER and target.has("cluster") else 1
    if target.has_wgmma and target.has_setmaxnreg and (invariant or (problem.m >= 8 and rows >= _MIN_WGMMA_ROWS)):
        tile_m = _wgmma_tile_m(rows)
        blocks = share * problem.pairs * max(1 / rows, 1 / tile_m)
        up_n, down_n = (
            _WGMMA_N
            if blocks * ceil_div(problem.product(name).n, _WGMMA_N) >= _MIN_WIDE_TILES * gpu.sm_count
            else _NARROW_WGMMA_N
            for name in PRODUCTS
        )
        return Choice("wgmma", tile_m, up_n, down_n, threads, ctas)
    tile_m = 1 << (problem.m - 1).bit_length() if problem.m < 8 else _tile_m(_SKINNY_TILE_MS, rows)
    direct = not invariant and (problem.m == 1 or (rows <= _MAX_DIRECT_ROWS and problem.pairs <= _MAX_DIRECT_PAIRS))
    if direct:
        tile_m = 1
    if invariant:
        return Choice("skinny", tile_m, *_INVARIANT_SKINNY_NS, threads, ctas)
    blocks = max(1, round(share * max(problem.pairs / rows, problem.pairs / tile_m)))
    up_n, down_n = (_tile_n(problem.product(name).n, blocks, gpu.sm_count) for name in PRODUCTS)
    return Choice("skinny", tile_m, up_n, down_n, *((0, 0, True) if direct else (threads, ctas)))


def _wgmma_tile_m(rows: float) -> int:
    """Return the tile that holds the rows of most experts, whose numbers of rows have a Poisson distribution."""
    return min(_MAX_TILE_M, ceil_div(ceil(rows + sqrt(rows)), ROW_BOX) * ROW_BOX)


def _tile_m(table: tuple[tuple[int, float], ...], rows: float) -> int:
    return next(tile_m for tile_m, limit in table if rows <= limit)


def _tile_n(columns: int, blocks: int, sm_count: int) -> int:
    """Return the tile_n of the skinny kernel that keeps most SMs busy, weighted by the speed of the tile."""

    def rate(tile_n: int) -> float:
        tiles = blocks * ceil_div(columns, tile_n)
        return _RATES[tile_n] * tiles / (ceil_div(tiles, sm_count) * sm_count)

    return max((tile_n for tile_n in _RATES if tile_n <= ceil_div(columns, 64) * 64), key=rate)


def configure(problem: MoeProblem, choice: Choice, target: Target) -> MoeConfig:
    """Return the kernels of a choice."""
    make: Any = product_config if choice.version == "skinny" else wgmma_config
    if choice.version == "skinny" and problem.batch_invariant:
        make = partial(product_config, fields=(_INVARIANT_FIELDS,))
    up, down = (
        make(name, problem.product(name), choice.tile_m, target, tile_n).in_form(problem.scale_form(name))
        for name, tile_n in zip(PRODUCTS, (choice.up_n, choice.down_n), strict=True)
    )
    up, down = replace(up, gate=problem.gate, direct=choice.direct), replace(down, direct=choice.direct)
    return MoeConfig.of(choice.route_threads, up, down, choice.route_ctas)


def short_rows(config: ExpertsConfig) -> int:
    """Return the number of rows up to which a block takes much less time than a whole block."""
    return max(config.row_counts[:-1], default=0)


def route_threads(experts: int, pairs: int) -> int:
    """Return the number of threads of the routing kernel."""
    return next(threads for threads in ROUTE_THREADS if threads >= min(MAX_EXPERTS, max(experts, pairs // 2)))


def product_config(
    product: str,
    shape: LinearShape,
    tile_m: int,
    target: Target,
    tile_n: int,
    fields: tuple[tuple[int, int, int], ...] = (),
) -> ExpertsConfig:
    """Return the skinny kernel's configuration for a product with this tile and the most stages that fit.

    ``fields`` contains (tile_k, slice_k, ctas_per_sm) in order of preference.
    """
    usual = _LONG_FIELDS if tile_n == 64 and shape.k >= _LONG_K else _FIELDS[tile_n]
    for tile_k, slice_k, ctas_per_sm in fields or (usual, (256, 2, 1), (128, 2, 1)):
        config = ExpertsConfig(
            version="skinny",
            product=product,
            tile_m=tile_m,
            tile_n=tile_n,
            stages=2,
            **{name: getattr(shape, name) for name in PROBLEM_FIELDS},
            deep_box=shape.k % 64 == 0,
            tile_k=tile_k,
            slice_k=slice_k,
            ctas_per_sm=ctas_per_sm,
        )
        longest = config.with_longest_ring(target.smem_share_bytes(config.ctas_per_sm), MAX_STAGES)
        if longest is not None:
            return longest
    return config


def wgmma_config(product: str, shape: LinearShape, tile_m: int, target: Target, tile_n: int) -> ExpertsConfig:
    """Return the wgmma kernel's configuration for a product with this tile and the most stages that fit."""
    warpgroups = max(1, tile_n // 128)
    depths = (256, 128) if tile_m <= _DEEP_TILE_M else (128,)
    for tile_k in depths:
        config = ExpertsConfig(
            version="wgmma",
            product=product,
            tile_m=tile_m,
            tile_n=tile_n,
            stages=2,
            **{name: getattr(shape, name) for name in PROBLEM_FIELDS},
            tile_k=tile_k,
            warpgroups=warpgroups,
            mmas_per_commit=2,
            commits_in_flight=1,
            consumer_registers=232 if warpgroups == 2 else 0,
        )
        longest = config.with_longest_ring(target.smem_share_bytes(1), MAX_STAGES)
        if longest is not None and longest.stages > 2:
            return longest
    return longest or config


def dump_configs(version: str, target: Target) -> list[ExpertsConfig]:
    """Return the configs for dumps and compile checks, or no configs if the target cannot run them.

    ``version``: version of the kernel and product, such as "skinny_up".
    """
    kernel, product = version.split("_")
    if not target.has("tma") or not target.has("griddepcontrol"):
        return []
    qwen, odd = LinearShape(2048, 1536, 128, False, "bfloat16"), LinearShape(720, 1440, -1, True, "float16")
    zeros = LinearShape(4096, 2048, 64, True, "float16")
    if kernel == "wgmma":
        large = ((qwen, 128, 256), (odd, 64, 128), (zeros, 32, 256)) if target.has_wgmma else ()
        configs = [wgmma_config(product, shape, tile_m, target, tile_n) for shape, tile_m, tile_n in large]
        return [config.in_form("as_stored") for config in configs]
    cases = ((qwen, 1, 128), (qwen, 8, 256), (odd, 16, 128), (zeros, 32, 64))
    configs = [product_config(product, shape, tile_m, target, tile_n) for shape, tile_m, tile_n in cases]
    return [config for config in configs if config.smem_bytes <= target.smem_share_bytes(config.ctas_per_sm)]


def route_configs(target: Target) -> list[RouteConfig]:
    """Return the configs for dumps and compile checks that the target can run."""
    if not target.has("griddepcontrol"):
        return []
    return [RouteConfig(8), *([RouteConfig(128, 64, 1024, ROUTE_CTAS)] if target.has("cluster") else [])]


def sum_configs(target: Target) -> list[SumConfig]:
    """Return the configs for dumps and compile checks, or none if the target cannot run them."""
    return [SumConfig(dtype) for dtype in ("float16", "bfloat16")] if target.has("griddepcontrol") else []
