"""Launch arguments of marlin_moe, and the workspace that its launches share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

from cudatma.descriptor import L2Promotion, TiledSpec
from cudatma.descriptor.helpers import scale_map_spec, weight_tile_map_spec
from cudatma.dtypes import tma_type
from cudatma.kernels.arguments import ROWS, Arguments, At, Map, Sizes, Value
from cudatma.kernels.experts.config import PRODUCTS, ExpertsConfig, SumConfig
from cudatma.kernels.experts.layer import MoeConfig
from cudatma.kernels.experts.problem import ELEMENT_BYTES, MoeProblem
from cudatma.kernels.launch_struct import packer
from cudatma.kernels.marlin.problem import scale_values
from cudatma.kernels.schedule import ceil_div
from cudatma.layout import Swizzle
from cudatma.pipeline import align_up
from cudatma.quantization.layout_v1 import BLOCK, blocks, group_count, row_blocks

_WORD_BYTES, _BLOCK_BYTES = 4, 16
_ALIGNMENT_BYTES = 128
#: Arrays that the second product reads before the first one has completed, in addition to the routing kernel's arrays.
_EARLY = ("w2_qweight", "w2_scales", "w2_zeros", "topk_ids", "expert_map")


class Workspace(NamedTuple):
    """Offsets in bytes of the arrays in the workspace, and its size.

    Attributes
    ----------
    hidden : int
        Results of the first product, at offset 0.
    results : int
        Results of the second product.
    blocks, pairs, places : int
        Arrays of the routing kernel.
    nbytes : int
        Size of the workspace.
    """

    hidden: int
    results: int
    blocks: int
    pairs: int
    places: int
    nbytes: int


def max_blocks(problem: MoeProblem, tile_m: int) -> int:
    """Return the maximum number of blocks of rows, regardless of the selected experts."""
    return min(problem.pairs, problem.pairs // tile_m + problem.experts)


def workspace(problem: MoeProblem, config: MoeConfig) -> Workspace:
    """Return the layout of the workspace."""
    pairs, row_bytes = problem.pairs, problem.down.k * ELEMENT_BYTES
    sizes = (
        pairs * row_bytes,
        pairs * problem.down.n * ELEMENT_BYTES,
        (1 + max_blocks(problem, config.up.tile_m)) * _BLOCK_BYTES,
        pairs * _WORD_BYTES,
        pairs * _WORD_BYTES,
    )
    offsets = [0]
    for size in sizes:
        offsets.append(align_up(offsets[-1] + size, _ALIGNMENT_BYTES))
    return Workspace(*offsets)


def launches(problem: MoeProblem, config: MoeConfig, resident: tuple[int, ...]) -> tuple[Arguments, ...]:
    """Return the launches of a call.

    ``resident`` contains the number of CTAs of each kernel that run at the same time.
    """
    parameters = {
        "route": (At("topk_ids"), At("expert_map"), At(ROWS), Value(0)),
        "up": _product_parameters(problem, config.up, "w1", "x", "bias1"),
        "down": _product_parameters(problem, config.down, "w2", ROWS, "bias2"),
        "sum": (At("topk_weights"), *_ids(config.sum), At(ROWS), At("out"), Value(0)),
    }
    sizes = sizes_for(problem, config, resident)(problem)
    return tuple(
        [
            Arguments(
                kernel.template,
                kernel,
                parameters[name],
                size,
                size.grid if name == "route" and isinstance(size.grid, int) else 1,
                early=_EARLY if name == "down" else (),
            )
            for (name, kernel), size in zip(config.named_kernels, sizes, strict=True)
        ]
    )


def sizes_for(
    problem: MoeProblem, config: MoeConfig, resident: tuple[int, ...]
) -> Callable[[MoeProblem], tuple[Sizes, ...]]:
    """Return a function that computes the launch sizes of any problem with the same plan_key."""
    names = [name for name, _ in config.named_kernels]
    ctas = dict(zip(names, resident, strict=True))
    fixed = _fixed_values(problem, config)
    pack = {name: packer(kernel.problem_members, fixed[name]) for name, kernel in config.named_kernels}
    tiles_n = {name: int(fixed[name]["tiles_n"]) for name in ("up", "down")}
    tile_m = config.up.tile_m

    cached_values = cache(scale_values)

    def factors(config: ExpertsConfig, problem: MoeProblem) -> dict[str, Any]:
        index = PRODUCTS.index(config.product)
        return cached_values(config, problem.exponents[index], problem.tensor_scales[index])

    def sizes(problem: MoeProblem) -> tuple[Sizes, ...]:
        at, m, pairs = workspace(problem, config), problem.m, problem.pairs
        values = {"m": m, "pairs": pairs, "blocks_at": at.blocks, "pairs_at": at.pairs, "places_at": at.places}
        up = values | {"result_at": at.hidden} | factors(config.up, problem)
        down = values | {"result_at": at.results} | factors(config.down, problem)
        most = max_blocks(problem, tile_m)
        launched = {
            "up": Sizes(
                min(ctas["up"], most * tiles_n["up"]),
                (pack["up"](up),),
                () if config.up.copies_rows else (m,),
                programmatic=config.route is not None or problem.programmatic,
            ),
            "down": Sizes(
                min(ctas["down"], most * tiles_n["down"]),
                (pack["down"](down),),
                (pairs,),
                programmatic=True,
                early_rows_at=0 if config.route is None else at.blocks,
            ),
            "sum": Sizes(config.sum.grid(m, problem.down.n), (pack["sum"](down),), programmatic=True),
        }
        if config.route is not None:
            struct = pack["route"](values)
            launched["route"] = Sizes(config.route.ctas, (struct,), programmatic=problem.programmatic)
        launched[names[0]] = launched[names[0]]._replace(rows_bytes=at.nbytes)
        return tuple([launched[name] for name in names])

    return sizes


def _fixed_values(problem: MoeProblem, config: MoeConfig) -> Mapping[str, dict[str, Any]]:
    """Return the members of each kernel's struct that do not depend on the number of tokens."""
    common = {
        "k": problem.up.k,
        "top_k": problem.top_k,
        "by_top_k": problem.top_k,
        "experts": problem.experts,
        "global_experts": problem.global_experts,
        "id_words": problem.id_words,
        "activation_pitch": problem.x_pitch_bytes // ELEMENT_BYTES,
        "output_pitch": problem.out_pitch_bytes // ELEMENT_BYTES,
    }
    up = common | _product_values(problem, config.up) | {"n": problem.down.k}
    down = common | _product_values(problem, config.down) | {"n": problem.down.n}
    return {"route": common, "up": up, "down": down, "sum": common | {"n": problem.down.n}}


def _ids(config: SumConfig) -> tuple[At, ...]:
    return (At("topk_ids"), At("expert_map")) if config.direct else ()


def _product_values(problem: MoeProblem, config: ExpertsConfig) -> dict[str, Any]:
    shape = problem.product(config.product)
    rows = blocks(shape.n)
    tiles_n = ceil_div(rows * BLOCK, config.tile_n)
    return {
        "tiles_n": tiles_n,
        "by_tiles_n": tiles_n,
        "k_iterations": ceil_div(shape.k, config.tile_k),
        "expert_rows": rows,
        "scale_pitch": problem.experts * rows * BLOCK,
    }


def _product_parameters(
    problem: MoeProblem, config: ExpertsConfig, weight: str, source: str, bias: str
) -> tuple[Any, ...]:
    shape = problem.product(config.product)
    rows = problem.experts * blocks(shape.n)
    groups = group_count(shape.k, shape.group_size)

    def table(name: str, dtype: str) -> Map:
        spec = scale_map_spec((groups, rows * BLOCK), dtype, config.scale_row, config.groups_per_stage)
        return Map(f"{weight}_{name}", spec)

    rows_of_blocks = row_blocks(shape.k, shape.weight.bits)
    weights = weight_tile_map_spec(rows_of_blocks, rows, config.stage_row_blocks, config.tile_n // BLOCK)
    makers: dict[str, Callable[[], Any]] = {
        "weight_map": lambda: Map(f"{weight}_qweight", weights),
        "scale_map": lambda: table("scales", shape.dtype),
        "zero_map": lambda: table("zeros", "uint8"),
        "activation_map": lambda: _rows_map(problem, config, source),
        "activations": lambda: At(source),
        "bias": lambda: At(bias),
        "tensor_scales": lambda: At(f"{weight}_tensor_scales"),
        "scales": lambda: At(f"{weight}_scales"),
        "zeros": lambda: At(f"{weight}_zeros"),
        "topk_ids": lambda: At("topk_ids"),
        "expert_map": lambda: At("expert_map"),
        "space": lambda: At(ROWS),
        "problem": lambda: Value(0),
    }
    return tuple([makers[name]() for name in config.parameter_names])


def _rows_map(problem: MoeProblem, config: ExpertsConfig, source: str) -> Map:
    """Return the tensor map of x or of the first product's results, whose number of rows is a size-dependent field.

    A box is one row of a stage, or 64 elements of one or more rows.
    """
    k = problem.product(config.product).k
    pitch = problem.x_pitch_bytes if source == "x" else k * ELEMENT_BYTES
    dims: tuple[int, ...] = (k, 1)
    strides: tuple[int, ...] = (pitch,)
    box: tuple[int, ...] = (64, 1 if config.gathers_rows else config.row_box)
    if config.deep_box:
        dims, strides, box = (64, k // 64, 1), (64 * ELEMENT_BYTES, pitch), (64, config.tile_k // 64, 1)
    spec = TiledSpec(
        dtype=tma_type(problem.up.dtype),
        dims=dims,
        strides_bytes=strides,
        box=box,
        swizzle=Swizzle.B128,
        l2_promotion=L2Promotion.B128,
    )
    return Map(source, spec, (("dim", len(dims) - 1),))
