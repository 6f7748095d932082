"""Launch arguments of marlin_moe, and the memory that its launches share."""

from __future__ import annotations

from typing import Any, NamedTuple

from cudatma.descriptor import L2Promotion, TiledSpec
from cudatma.descriptor.helpers import scale_map_spec, weight_tile_map_spec
from cudatma.dtypes import tma_type
from cudatma.kernels.arguments import ROWS, Arguments, At, Map, Sizes, Value
from cudatma.kernels.experts.choose import MoeConfig
from cudatma.kernels.experts.config import ExpertsConfig
from cudatma.kernels.experts.problem import MoeProblem
from cudatma.kernels.launch_struct import pack
from cudatma.kernels.schedule import ceil_div
from cudatma.layout import Swizzle
from cudatma.pipeline import align_up
from cudatma.quantization.layout_v1 import group_count

_ELEMENT_BYTES, _WORD_BYTES, _BLOCK_BYTES = 2, 4, 16
_ALIGNMENT_BYTES = 128
#: Number of columns that a thread of the sum adds up, and the maximum number of rows of its grid.
_CHUNK_ELEMS, _MAX_GRID_ROWS = 8, 65535
#: Maximum number of CTAs of the gather, as a multiple of the number that run at the same time.
_GATHER_CTAS = 2
#: Arrays that the grouped GEMMs may read before the previous kernel has ended.
_WEIGHTS = ("w1_qweight", "w1_scales", "w1_zeros", "w2_qweight", "w2_scales", "w2_zeros")


class Space(NamedTuple):
    """Offsets in bytes of the arrays in the memory that the launches of a call share, and its size.

    hidden: the results of the first product. Sorted rows of x precede it if the kernels need them. results: the results
    of the second product. blocks, pairs, places: the arrays of the routing kernel.
    """

    hidden: int
    results: int
    blocks: int
    pairs: int
    places: int
    nbytes: int


def max_blocks(problem: MoeProblem, tile_m: int) -> int:
    """Return the maximum number of blocks of rows, for any choice of experts."""
    pairs = problem.pairs
    return min(pairs, pairs // tile_m + problem.experts)


def space(problem: MoeProblem, config: MoeConfig) -> Space:
    """Return the layout of the memory that the launches share."""
    pairs, row_bytes = problem.pairs, problem.down.k * _ELEMENT_BYTES
    # The tensor map of the hidden rows begins at offset 0, so their offset is a multiple of their pitch.
    gathered = 0 if config.gather is None else align_up(pairs * problem.up.k * _ELEMENT_BYTES, row_bytes)
    sizes = (
        pairs * row_bytes,
        pairs * problem.down.n * _ELEMENT_BYTES,
        (1 + max_blocks(problem, config.up.tile_m)) * _BLOCK_BYTES,
        pairs * _WORD_BYTES,
        pairs * _WORD_BYTES,
    )
    offsets = [gathered]
    for size in sizes:
        offsets.append(align_up(offsets[-1] + size, _ALIGNMENT_BYTES))
    return Space(*offsets)


def launches(problem: MoeProblem, config: MoeConfig, resident: tuple[int, ...]) -> tuple[Arguments, ...]:
    """Return the launches of a call. ``resident``: number of CTAs of each kernel that run at the same time."""
    sizes = all_sizes(problem, config, resident)
    parameters = {
        "route": (At("topk_ids"), At("expert_map"), At(ROWS), Value(0)),
        "gather": (At("x"), At(ROWS), Value(0)),
        "up": _product_parameters(problem, config.up, "w1", "x" if config.gather is None else ROWS),
        "down": _product_parameters(problem, config.down, "w2", ROWS),
        "sum": (At("topk_weights"), At(ROWS), At("out"), Value(0)),
    }
    return tuple(
        [
            Arguments(template, kernel, parameters[name], size, early=_WEIGHTS)
            for (name, template, kernel), size in zip(config.named_kernels, sizes, strict=True)
        ]
    )


def all_sizes(problem: MoeProblem, config: MoeConfig, resident: tuple[int, ...]) -> tuple[Sizes, ...]:
    """Return the sizes of the launches."""
    at, hidden_bytes = space(problem, config), problem.down.k * _ELEMENT_BYTES
    values = {
        "m": problem.m,
        "k": problem.up.k,
        "pairs": problem.pairs,
        "top_k": problem.top_k,
        "by_top_k": problem.top_k,
        "experts": problem.experts,
        "global_experts": problem.global_experts,
        "id_words": problem.id_words,
        "activation_pitch": problem.x_pitch_bytes // _ELEMENT_BYTES,
        "output_pitch": problem.out_pitch_bytes // _ELEMENT_BYTES,
        "blocks_at": at.blocks,
        "pairs_at": at.pairs,
        "places_at": at.places,
    }
    m, pairs, n = problem.m, problem.pairs, problem.down.n
    down_values = values | {"n": n, "result_at": at.results, "source_row": at.hidden // hidden_bytes}
    sum_grid = ceil_div(n, config.sum.threads * _CHUNK_ELEMS), min(m, _MAX_GRID_ROWS)
    sizes = [
        Sizes(1, (pack(config.route.problem_members, values),), programmatic=problem.programmatic, rows_bytes=at.nbytes)
    ]
    if config.gather is not None:
        grid = min(pairs, resident[1] * _GATHER_CTAS)
        sizes.append(Sizes(grid, (pack(config.gather.problem_members, values),), programmatic=True))
    up_values = values | {"n": problem.down.k, "result_at": at.hidden, "source_row": 0}
    sizes.append(_product_sizes(problem, config.up, resident[-3], up_values, m if config.gather is None else pairs))
    sizes.append(_product_sizes(problem, config.down, resident[-2], down_values, at.hidden // hidden_bytes + pairs))
    sizes.append(Sizes(sum_grid, (pack(config.sum.problem_members, down_values),), programmatic=True))
    return tuple(sizes)


def _product_sizes(
    problem: MoeProblem, config: ExpertsConfig, resident: int, values: dict[str, Any], rows: int
) -> Sizes:
    shape = problem.product(config.product)
    columns = ceil_div(shape.n, 64) * 64
    tiles_n = ceil_div(columns, config.tile_n)
    values |= {
        "tiles_n": tiles_n,
        "by_tiles_n": tiles_n,
        "k_iterations": ceil_div(shape.k, config.tile_k),
        "expert_rows": columns // 64,
        "scale_pitch": problem.experts * columns,
    }
    grid = min(resident, max_blocks(problem, config.tile_m) * tiles_n)
    return Sizes(grid, (pack(config.problem_members, values),), (rows,), programmatic=True)


def _product_parameters(problem: MoeProblem, config: ExpertsConfig, weight: str, source: str) -> tuple[Any, ...]:
    shape = problem.product(config.product)
    columns = problem.experts * ceil_div(shape.n, 64) * 64
    groups = group_count(shape.k, shape.group_size)

    def table(name: str, dtype: str) -> Map:
        return Map(
            f"{weight}_{name}", scale_map_spec((groups, columns), dtype, config.scale_row, config.groups_per_stage)
        )

    makers: dict[str, Any] = {
        "weight_map": lambda: Map(
            f"{weight}_qweight",
            weight_tile_map_spec(ceil_div(shape.k, 64), columns // 64, config.tile_k // 64, config.tile_n // 64),
        ),
        "scale_map": lambda: table("scales", shape.dtype),
        "zero_map": lambda: table("zeros", "uint8"),
        "activation_map": lambda: _rows_map(problem, config, source),
        "scales": lambda: At(f"{weight}_scales"),
        "zeros": lambda: At(f"{weight}_zeros"),
        "space": lambda: At(ROWS),
        "problem": lambda: Value(0),
    }
    return tuple([makers[name]() if name in makers else At(name) for name in config.parameter_names])


def _rows_map(problem: MoeProblem, config: ExpertsConfig, source: str) -> Map:
    """Return the tensor map of x or of sorted rows. A box is one row of a stage, or 64 elements of one or more rows."""
    k = problem.product(config.product).k
    dense = source == ROWS
    rows, pitch = (problem.pairs, k * _ELEMENT_BYTES) if dense else (problem.m, problem.x_pitch_bytes)
    dims: tuple[int, ...] = (k, rows)
    strides: tuple[int, ...] = (pitch,)
    box: tuple[int, ...] = (64, 1 if config.gathers_rows else config.tile_m)
    if config.deep_box:
        dims, strides, box = (64, k // 64, rows), (64 * _ELEMENT_BYTES, pitch), (64, config.tile_k // 64, 1)
    spec = TiledSpec(
        dtype=tma_type(problem.up.dtype),
        dims=dims,
        strides_bytes=strides,
        box=box,
        swizzle=Swizzle.B128,
        l2_promotion=L2Promotion.B128,
    )
    return Map(source, spec, (("dim", len(dims) - 1),))
