"""Choice of the kernels of marlin_moe."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache, partial
from itertools import product as combinations
from math import ceil, expm1, inf, prod, sqrt
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cudatma.kernels.cost import runs
from cudatma.kernels.experts.arguments import max_blocks
from cudatma.kernels.experts.config import (
    MAX_STAGES,
    PRESETS,
    PRODUCTS,
    ROUTE_CTAS,
    ROW_BOX,
    ExpertsConfig,
    RouteConfig,
    SumConfig,
)
from cudatma.kernels.experts.layer import LayerConfig, grouped
from cudatma.kernels.experts.problem import MoeProblem
from cudatma.kernels.family import Family, Option, SizeNames, Times
from cudatma.kernels.gpu import Gpu
from cudatma.kernels.marlin.problem import WEIGHT_OPTIONS, LinearShape
from cudatma.kernels.schedule import Schedule, ceil_div
from cudatma.quantization.layout_v1 import BLOCK
from cudatma.quantization.layout_v1 import blocks as blocks_of
from cudatma.target import Target, get_target

#: Values of tile_m of the skinny kernel.
_SKINNY_TILES = (1, 2, 4, 8, 16, 32)
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


def mean_rows(pairs: int, experts: int) -> float:
    """Return the mean number of rows of the experts that have rows, if pairs choose experts at random."""
    expected = pairs / experts
    return expected / -expm1(-expected)


def rule(problem: MoeProblem, gpu: Gpu) -> LayerConfig:
    """Return the tiles for a problem according to measured thresholds."""
    target, invariant = get_target(gpu.target), problem.batch_invariant
    rows = mean_rows(problem.pairs, problem.global_experts)
    share = problem.experts / problem.global_experts
    if target.has_wgmma and target.has_setmaxnreg and (invariant or (problem.m >= 8 and rows >= _MIN_WGMMA_ROWS)):
        tile_m = _wgmma_tile_m(rows)
        blocks = share * problem.pairs * max(1 / rows, 1 / tile_m)
        up_n, down_n = (
            _WGMMA_N
            if blocks * ceil_div(problem.product(name).n, _WGMMA_N) >= _MIN_WIDE_TILES * gpu.sm_count
            else _NARROW_WGMMA_N
            for name in PRODUCTS
        )
        return layer_config("wgmma", problem.up, problem.down, tile_m, up_n, down_n, target)
    tile_m = 1 << (problem.m - 1).bit_length() if problem.m < 8 else _tile_m(_SKINNY_TILE_MS, rows)
    if invariant:
        return layer_config(
            "skinny", problem.up, problem.down, tile_m, *_INVARIANT_SKINNY_NS, target, fields=(_INVARIANT_FIELDS,)
        )
    direct = problem.m == 1 or (rows <= _MAX_DIRECT_ROWS and problem.pairs <= _MAX_DIRECT_PAIRS)
    tile_m = 1 if direct else tile_m
    blocks = max(1, round(share * max(problem.pairs / rows, problem.pairs / tile_m)))
    up_n, down_n = (_tile_n(problem.product(name).n, blocks, gpu.sm_count) for name in PRODUCTS)
    return layer_config("skinny", problem.up, problem.down, tile_m, up_n, down_n, target, direct)


@lru_cache(maxsize=4096)
def layer_config(
    version: str,
    up: LinearShape,
    down: LinearShape,
    tile_m: int,
    up_n: int,
    down_n: int,
    target: Target,
    direct: bool = False,
    fields: tuple[tuple[int, int, int], ...] = (),
) -> LayerConfig:
    """Return the configuration with these tiles, and the pipelines of product_config() or wgmma_config()."""
    make = wgmma_config if version == "wgmma" else partial(product_config, fields=fields)
    shapes = ("up", up, up_n), ("down", down, down_n)
    products = [make(name, shape, tile_m, target, tile_n) for name, shape, tile_n in shapes]
    return LayerConfig.of(*[replace(config, direct=direct) for config in products])


def times(problem: MoeProblem, ms: NDArray[np.int64], gpu: Gpu) -> Times[LayerConfig]:
    """Return the configurations of both versions with their predicted times."""
    target, configs = get_target(gpu.target), {rule(problem, gpu): None}
    if not problem.batch_invariant:
        tiles: dict[str, tuple[Any, Any]] = {"skinny": (_SKINNY_TILES, tuple(_RATES))}
        if target.has_wgmma and target.has_setmaxnreg:
            tiles["wgmma"] = PRESETS["wgmma"].allowed["tile_m"], (_WGMMA_N, _NARROW_WGMMA_N)
        for version, (tile_ms, tile_ns) in tiles.items():
            for tile_m, up_n, down_n in combinations(tile_ms, tile_ns, tile_ns):
                config = layer_config(version, problem.up, problem.down, tile_m, up_n, down_n, target)
                configs |= dict.fromkeys([config, replace(config, direct=True)] if tile_m == 1 else [config])
    able = (config for config in configs if runs(config, problem, target))
    return [(config, np.asarray(config.cost_at(ms, problem, gpu).us)) for config in able]


def _schedule(kernel: Any, problem: MoeProblem, gpu: Gpu) -> Schedule:
    """Return the work of a kernel for the expected number of blocks, if pairs choose experts at random."""
    if isinstance(kernel, RouteConfig):
        return Schedule(kernel.ctas, 1, 1, 0, 0)
    if isinstance(kernel, SumConfig):
        return Schedule(prod(kernel.grid(problem.m, problem.k)), 1, 1, 0, 0)
    shape, pairs = problem.product(kernel.product), problem.pairs * problem.experts / problem.global_experts
    rows = mean_rows(problem.pairs, problem.global_experts)
    blocks = max(1, round(pairs if kernel.direct else pairs / rows * ceil(rows / kernel.tile_m)))
    tiles_n, limit = ceil_div(blocks_of(shape.n) * BLOCK, kernel.tile_n), max_blocks(problem, kernel.tile_m)
    ctas = min(gpu.sm_count * kernel.ctas_per_sm, limit * tiles_n)
    return Schedule(ctas, blocks, tiles_n, ceil_div(shape.k, kernel.tile_k), 0)


EXPERTS: Family[MoeProblem, LayerConfig] = Family(
    name="experts",
    config=LayerConfig,
    kernels=tuple(PRESETS),
    read_problem=MoeProblem.from_json,
    times=times,
    schedule=_schedule,
    rule=rule,
    index=("k", "n", "experts", "top_k"),
    table=Path(__file__).with_name("tuned.json"),
    options=(
        *WEIGHT_OPTIONS,
        Option("experts", 8, (), "number of experts"),
        Option("top_k", 2, (), "number of experts of each token"),
    ),
    trial="cudatma.kernels.experts.sample:ExpertsTrial",
    sizes=SizeNames("number of tokens", "intermediate size", "hidden size"),
)


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
        tile = {"tile_m": tile_m, "tile_n": tile_n, "tile_k": tile_k}
        config = grouped("skinny", product, shape, **tile, slice_k=slice_k, ctas_per_sm=ctas_per_sm)
        longest = config.with_longest_ring(target.smem_share_bytes(config.ctas_per_sm), MAX_STAGES)
        if longest is not None:
            return longest
    return config


def wgmma_config(product: str, shape: LinearShape, tile_m: int, target: Target, tile_n: int) -> ExpertsConfig:
    """Return the wgmma kernel's configuration for a product with this tile and the most stages that fit."""
    for tile_k in (256, 128) if tile_m <= _DEEP_TILE_M else (128,):
        config = grouped("wgmma", product, shape, tile_m=tile_m, tile_n=tile_n, tile_k=tile_k)
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
