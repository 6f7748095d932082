"""Choice of the kernels of marlin_moe."""

from __future__ import annotations

from math import expm1, inf
from typing import Any, NamedTuple

from cudatma.kernels.experts.config import (
    MAX_STAGES,
    PRODUCTS,
    ROUTE_THREADS,
    ExpertsConfig,
    GatherConfig,
    RouteConfig,
    SumConfig,
)
from cudatma.kernels.experts.problem import MoeProblem
from cudatma.kernels.gpu import Gpu
from cudatma.kernels.marlin.problem import PROBLEM_FIELDS, LinearShape
from cudatma.kernels.schedule import ceil_div
from cudatma.target import Target, get_target

#: (tile_m, maximum mean number of rows of an expert that has rows) of each kernel. A larger tile_m reads weights less
#: often, but computes more padding rows. [H200]
_SKINNY_TILE_MS = ((8, 4.5), (16, 10.0), (32, inf))
_WGMMA_TILE_MS = ((32, 20.0), (64, 72.0), (128, inf))
#: tile_n of the wgmma kernel.
_WGMMA_N = 256
#: Minimum mean number of rows for the wgmma kernel. [H200]
_MIN_WGMMA_ROWS = 12.0
#: (tile_k, slice_k, ctas_per_sm) of each tile_n, and of tile_n 64 for a long K. [H200]
_FIELDS = {256: (256, 1, 1), 128: (256, 2, 2), 64: (256, 2, 2)}
_LONG_FIELDS, _LONG_K = (512, 4, 1), 4096
#: Relative speed of each tile_n if all SMs are busy. [H200]
_RATES = {256: 1.0, 128: 0.96, 64: 0.93}


class MoeConfig(NamedTuple):
    """Kernels of a call: the routing, a copy of x in sorted order or None, the two grouped GEMMs, and the sum."""

    route: RouteConfig
    gather: GatherConfig | None
    up: ExpertsConfig
    down: ExpertsConfig
    sum: SumConfig

    @classmethod
    def of(cls, experts: int, up: ExpertsConfig, down: ExpertsConfig) -> MoeConfig:
        """Return the kernels for these grouped GEMMs, which must have the same tile_m and version."""
        gather = None if up.gathers_rows else GatherConfig()
        return cls(RouteConfig(up.tile_m, route_threads(experts)), gather, up, down, SumConfig(up.dtype))

    @property
    def named_kernels(self) -> tuple[tuple[str, str, Any], ...]:
        """(name, template, config) of each kernel in order of launch."""
        kernels: list[tuple[str, str, Any]] = [("route", "kernels/experts_route.cu.j2", self.route)]
        kernels += [] if self.gather is None else [("gather", "kernels/experts_gather.cu.j2", self.gather)]
        kernels += [("up", self.up.template, self.up), ("down", self.down.template, self.down)]
        return (*kernels, ("sum", "kernels/experts_sum.cu.j2", self.sum))

    @property
    def kernels(self) -> tuple[tuple[str, Any], ...]:
        """(template, config) of each kernel in order of launch."""
        return tuple([(template, config) for _, template, config in self.named_kernels])


class Choice(NamedTuple):
    """Version and tiles of the kernels, which determine their configurations.

    Attributes
    ----------
    version : str
        A key of PRESETS.
    tile_m : int
        Maximum number of rows of a block.
    up_n, down_n : int
        ``tile_n`` of the two products.
    """

    version: str
    tile_m: int
    up_n: int
    down_n: int


def mean_rows(pairs: int, experts: int) -> float:
    """Return the mean number of rows of the experts that have rows, if pairs choose experts at random."""
    expected = pairs / experts
    return expected / -expm1(-expected)


def choose(problem: MoeProblem, gpu: Gpu) -> Choice:
    """Return the version and the tiles for a problem."""
    rows = mean_rows(problem.pairs, problem.global_experts)
    if get_target(gpu.target).has_wgmma and problem.m >= 8 and rows >= _MIN_WGMMA_ROWS:
        return Choice("wgmma", _tile_m(_WGMMA_TILE_MS, rows), _WGMMA_N, _WGMMA_N)
    tile_m = 1 << (problem.m - 1).bit_length() if problem.m < 8 else _tile_m(_SKINNY_TILE_MS, rows)
    share = problem.experts / problem.global_experts
    blocks = max(1, round(share * max(problem.pairs / rows, problem.pairs / tile_m)))
    up_n, down_n = (_tile_n(problem.product(name).n, blocks, gpu.sm_count) for name in PRODUCTS)
    return Choice("skinny", tile_m, up_n, down_n)


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
    make = wgmma_config if choice.version == "wgmma" else product_config
    up = make("up", problem.up, choice.tile_m, target, choice.up_n)
    down = make("down", problem.down, choice.tile_m, target, choice.down_n)
    return MoeConfig.of(problem.experts, up, down)


def route_threads(experts: int) -> int:
    """Return the number of threads of the routing kernel."""
    return next(threads for threads in ROUTE_THREADS if threads >= experts)


def product_config(product: str, shape: LinearShape, tile_m: int, target: Target, tile_n: int) -> ExpertsConfig:
    """Return the skinny kernel's configuration for a product with this tile and the most stages that fit."""
    usual = _LONG_FIELDS if tile_n == 64 and shape.k >= _LONG_K else _FIELDS[tile_n]
    for tile_k, slice_k, ctas_per_sm in (usual, (256, 2, 1), (128, 2, 1)):
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
    config = ExpertsConfig(
        version="wgmma",
        product=product,
        tile_m=tile_m,
        tile_n=tile_n,
        stages=2,
        **{name: getattr(shape, name) for name in PROBLEM_FIELDS},
        tile_k=128,
        warpgroups=warpgroups,
        mmas_per_commit=2,
        commits_in_flight=1,
        consumer_registers=232 if warpgroups == 2 else 0,
    )
    return config.with_longest_ring(target.smem_share_bytes(1), MAX_STAGES) or config


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
        return [wgmma_config(product, shape, tile_m, target, tile_n) for shape, tile_m, tile_n in large]
    cases = ((qwen, 1, 128), (qwen, 8, 256), (odd, 16, 128), (zeros, 32, 64))
    configs = [product_config(product, shape, tile_m, target, tile_n) for shape, tile_m, tile_n in cases]
    return [config for config in configs if config.smem_bytes <= target.smem_share_bytes(config.ctas_per_sm)]


def route_configs(target: Target) -> list[RouteConfig]:
    """Return the config for dumps and compile checks, or none if the target cannot run it."""
    return [RouteConfig(8)] if target.has("griddepcontrol") else []


def gather_configs(target: Target) -> list[GatherConfig]:
    """Return the config for dumps and compile checks, or none if the target cannot run it."""
    return [GatherConfig()] if target.has("griddepcontrol") else []


def sum_configs(target: Target) -> list[SumConfig]:
    """Return the configs for dumps and compile checks, or none if the target cannot run them."""
    return [SumConfig(dtype) for dtype in ("float16", "bfloat16")] if target.has("griddepcontrol") else []
