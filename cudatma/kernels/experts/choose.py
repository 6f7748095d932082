"""Choice of the kernels of marlin_moe."""

from __future__ import annotations

from math import exp
from typing import Any, NamedTuple

from cudatma.kernels.experts.config import ROUTE_THREADS, ExpertsConfig, RouteConfig, SumConfig
from cudatma.kernels.experts.problem import MoeProblem
from cudatma.kernels.gpu import H200, Gpu, imagined_gpu
from cudatma.kernels.marlin.problem import LinearShape
from cudatma.kernels.schedule import ceil_div
from cudatma.target import Target, get_target

#: Maximum number of stages.
_MAX_STAGES = 8
#: (tile_m, maximum mean number of rows of an expert that has rows). A block of more rows reads its weights less often,
#: but multiplies more rows that do not exist.
_TILE_MS = ((8, 4.5), (16, 10.0), (32, float("inf")))


class MoeConfig(NamedTuple):
    """Kernels of a call: the routing, the two grouped GEMMs, and the sum."""

    route: RouteConfig
    up: ExpertsConfig
    down: ExpertsConfig
    sum: SumConfig

    @property
    def kernels(self) -> tuple[tuple[str, Any], ...]:
        """(template, config) of each kernel in order of launch."""
        products = (self.up.template, self.up), (self.down.template, self.down)
        return ("kernels/experts_route.cu.j2", self.route), *products, ("kernels/experts_sum.cu.j2", self.sum)


def mean_rows(pairs: int, experts: int) -> float:
    """Return the mean number of rows of the experts that have rows, if pairs choose experts at random."""
    expected = pairs / experts
    return expected / -(-expected and exp(-expected) - 1) if expected < 50 else expected


def choose_tile_m(problem: MoeProblem) -> int:
    """Return the number of rows of a block."""
    if problem.m < 8:
        return 1 << (problem.m - 1).bit_length()
    rows = mean_rows(problem.pairs, problem.global_experts)
    return next(tile_m for tile_m, limit in _TILE_MS if rows <= limit)


def configure(problem: MoeProblem, gpu: Gpu) -> MoeConfig:
    """Return the kernels for a problem."""
    tile_m, target = choose_tile_m(problem), get_target(gpu.target)
    up, down = (product_config(name, problem.product(name), tile_m, target) for name in ("up", "down"))
    return MoeConfig(RouteConfig(tile_m, route_threads(problem.experts)), up, down, SumConfig(problem.up.dtype))


def route_threads(experts: int) -> int:
    """Return the number of threads of the routing kernel."""
    return next(threads for threads in ROUTE_THREADS if threads >= experts)


def product_config(
    product: str, shape: LinearShape, tile_m: int, target: Target, **fields: Any
) -> ExpertsConfig:
    """Return the configuration of a product, with as many stages as fit. ``fields``: values of other fields."""
    columns = ceil_div(shape.n, 64) * 64
    tile_n = 128 if columns % 128 == 0 else 64
    chosen: dict[str, Any] = {"tile_n": tile_n, "tile_k": 256 if shape.k > 256 else 128, "slice_k": 2} | fields
    if tile_m < 8 and chosen["tile_k"] % 64:
        chosen["tile_k"] = 128
    config = ExpertsConfig(
        version="skinny",
        product=product,
        tile_m=tile_m,
        stages=2,
        group_size=shape.group_size,
        has_zeros=shape.has_zeros,
        dtype=shape.dtype,
        deep_box=shape.k % 64 == 0,
        **chosen,
    )
    longest = config.with_longest_ring(target.smem_share_bytes(config.ctas_per_sm), _MAX_STAGES)
    return config if longest is None else longest


def dump_configs(target: Target) -> list[ExpertsConfig]:
    """Return the configs for dumps and compile checks, or no configs if the target cannot run them."""
    if not target.has("tma") or not target.has("griddepcontrol"):
        return []
    qwen, odd = LinearShape(2048, 1536, 128, False, "bfloat16"), LinearShape(720, 1440, -1, True, "float16")
    zeros = LinearShape(4096, 2048, 64, True, "float16")
    cases = [(name, shape, tile_m) for name in ("up", "down") for shape, tile_m in ((qwen, 1), (qwen, 8), (odd, 16))]
    cases += [("up", zeros, 32), ("down", zeros, 32)]
    return [product_config(*case, target) for case in cases]


def route_configs(target: Target) -> list[RouteConfig]:
    """Return the config for dumps and compile checks, or none if the target cannot run it."""
    return [RouteConfig(8)] if target.has("griddepcontrol") else []


def sum_configs(target: Target) -> list[SumConfig]:
    """Return the configs for dumps and compile checks, or none if the target cannot run them."""
    return [SumConfig(dtype) for dtype in ("float16", "bfloat16")] if target.has("griddepcontrol") else []


def imagined(target: Target) -> Gpu:
    """Return a GPU with this target for samples."""
    return imagined_gpu(target, H200.sm_count)
