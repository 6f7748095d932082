"""Choice of the kernels of marlin_moe."""

from __future__ import annotations

from math import exp, inf
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
from cudatma.kernels.marlin.problem import LinearShape
from cudatma.kernels.schedule import ceil_div
from cudatma.target import Target, get_target

#: (tile_k, slice_k, ctas_per_sm) of each tile_n, and of tile_n 64 for a long K. [H200]
_FIELDS = {256: (256, 1, 1), 128: (256, 2, 2), 64: (256, 2, 2)}
_LONG_FIELDS, _LONG_K = (512, 4, 1), 4096
#: Relative speed of each tile_n if all SMs are busy. [H200]
_RATES = {256: 1.0, 128: 0.96, 64: 0.93}
#: (tile_m, maximum mean number of rows of an expert that has rows) of each kernel. A block of more rows reads its
#: weights less often, but multiplies more rows that do not exist. [H200]
_SKINNY_TILE_MS = ((8, 4.5), (16, 10.0), (32, inf))
_WGMMA_TILE_MS = ((32, 20.0), (64, 72.0), (128, inf))
#: The wgmma kernel is faster from this mean number of rows on. [H200]
_MIN_WGMMA_ROWS = 12.0
#: (tile_k, slice_k, ctas_per_sm) of each tile_n, and of tile_n 64 for a long K. [H200]
_FIELDS = {256: (256, 1, 1), 128: (256, 2, 2), 64: (256, 2, 2)}
_LONG_FIELDS, _LONG_K = (512, 4, 1), 4096
#: Relative speed of each tile_n if all SMs are busy. [H200]
_RATES = {256: 1.0, 128: 0.96, 64: 0.93}
#: (tile_m, maximum mean number of rows of an expert that has rows). A block of more rows reads its weights less often,
#: but multiplies more rows that do not exist.
_TILE_MS = ((8, 4.5), (16, 10.0), (32, float("inf")))


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
        gather = None if up.gathers_rows else GatherConfig(up.tile_m)
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


def mean_rows(pairs: int, experts: int) -> float:
    """Return the mean number of rows of the experts that have rows, if pairs choose experts at random."""
    expected = pairs / experts
    return expected / -(-expected and exp(-expected) - 1) if expected < 50 else expected


def choose_tile_m(problem: MoeProblem, target: Target) -> tuple[str, int]:
    """Return the version of the kernels and the number of rows of a block."""
    if problem.m < 8:
        return "skinny", 1 << (problem.m - 1).bit_length()
    rows = mean_rows(problem.pairs, problem.global_experts)
    version = "wgmma" if target.has_wgmma and rows >= _MIN_WGMMA_ROWS else "skinny"
    table = _WGMMA_TILE_MS if version == "wgmma" else _SKINNY_TILE_MS
    return version, next(tile_m for tile_m, limit in table if rows <= limit)


def configure(problem: MoeProblem, gpu: Gpu) -> MoeConfig:
    """Return the kernels for a problem."""
    target = get_target(gpu.target)
    version, tile_m = choose_tile_m(problem, target)
    if version == "wgmma":
        up, down = (wgmma_config(name, problem.product(name), tile_m, target) for name in PRODUCTS)
    else:
        up, down = (choose_product(name, problem, tile_m, gpu) for name in PRODUCTS)
    return MoeConfig.of(problem.experts, up, down)


def choose_product(product: str, problem: MoeProblem, tile_m: int, gpu: Gpu) -> ExpertsConfig:
    """Return the configuration of a product that keeps most SMs busy, weighted by the speed of its tile."""
    shape, target = problem.product(product), get_target(gpu.target)
    blocks = max(1.0, problem.pairs / max(1.0, mean_rows(problem.pairs, problem.global_experts)))
    blocks = max(blocks * problem.experts / problem.global_experts, problem.pairs / tile_m)

    def rate(tile_n: int) -> float:
        tiles = round(blocks) * ceil_div(shape.n, tile_n)
        return _RATES[tile_n] * tiles / (ceil_div(tiles, gpu.sm_count) * gpu.sm_count)

    tile_n = max((tile_n for tile_n in _RATES if tile_n <= ceil_div(shape.n, 64) * 64), key=rate)
    return product_config(product, shape, tile_m, target, tile_n)


def route_threads(experts: int) -> int:
    """Return the number of threads of the routing kernel."""
    return next(threads for threads in ROUTE_THREADS if threads >= experts)


def product_config(
    product: str, shape: LinearShape, tile_m: int, target: Target, tile_n: int, **fields: Any
) -> ExpertsConfig:
    """Return the configuration of a product with this tile and as many stages as fit.

    ``fields``: values of other fields, by default those that were fastest for the tile.
    """
    usual = _LONG_FIELDS if tile_n == 64 and shape.k >= _LONG_K else _FIELDS[tile_n]
    for tile_k, slice_k, ctas_per_sm in (usual, (256, 2, 1), (128, 2, 1)):
        config = ExpertsConfig(
            version="skinny",
            product=product,
            tile_m=tile_m,
            tile_n=tile_n,
            stages=2,
            group_size=shape.group_size,
            has_zeros=shape.has_zeros,
            dtype=shape.dtype,
            deep_box=shape.k % 64 == 0,
            **({"tile_k": tile_k, "slice_k": slice_k, "ctas_per_sm": ctas_per_sm} | fields),
        )
        longest = config.with_longest_ring(target.smem_share_bytes(config.ctas_per_sm), MAX_STAGES)
        if longest is not None:
            return longest
    return config


def wgmma_config(
    product: str, shape: LinearShape, tile_m: int, target: Target, tile_n: int = 256, **fields: Any
) -> ExpertsConfig:
    """Return the configuration of the wgmma kernel with this tile and as many stages as fit.

    ``fields``: values of other fields.
    """
    warpgroups = max(1, tile_n // 128)
    usual = {"tile_k": 128, "warpgroups": warpgroups, "mmas_per_commit": 2, "commits_in_flight": 1}
    if warpgroups == 2:
        usual["consumer_registers"] = 232
    config = ExpertsConfig(
        version="wgmma",
        product=product,
        tile_m=tile_m,
        tile_n=tile_n,
        stages=2,
        group_size=shape.group_size,
        has_zeros=shape.has_zeros,
        dtype=shape.dtype,
        **(usual | fields),
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
        cases = ((qwen, 32, 256), (qwen, 128, 256), (odd, 64, 128), (zeros, 64, 256)) if target.has_wgmma else ()
        return [wgmma_config(product, shape, tile_m, target, tile_n) for shape, tile_m, tile_n in cases]
    cases = ((qwen, 1, 128), (qwen, 8, 256), (odd, 16, 128), (zeros, 32, 64))
    configs = [product_config(product, shape, tile_m, target, tile_n) for shape, tile_m, tile_n in cases]
    return [config for config in configs if config.smem_bytes <= target.smem_share_bytes(config.ctas_per_sm)]


def route_configs(target: Target) -> list[RouteConfig]:
    """Return the config for dumps and compile checks, or none if the target cannot run it."""
    return [RouteConfig(8)] if target.has("griddepcontrol") else []


def gather_configs(target: Target) -> list[GatherConfig]:
    """Return the config for dumps and compile checks, or none if the target cannot run it."""
    return [GatherConfig(64)] if target.has("griddepcontrol") else []


def sum_configs(target: Target) -> list[SumConfig]:
    """Return the configs for dumps and compile checks, or none if the target cannot run them."""
    return [SumConfig(dtype) for dtype in ("float16", "bfloat16")] if target.has("griddepcontrol") else []
