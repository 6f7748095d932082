"""Launch arguments of the Marlin GEMM and of the copy kernel for activations that may precede it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from cudatma.descriptor import L2Promotion, TiledSpec
from cudatma.descriptor.helpers import scale_map_spec, weight_map_spec, weight_tile_map_spec
from cudatma.dtypes import tma_type
from cudatma.errors import ArgumentError, DescriptorError, quoted
from cudatma.kernels.arguments import FLAGS, PARTIALS, ROWS, Arguments, At, Map, Sizes, Value
from cudatma.kernels.launch_struct import offsets, packer, work_values
from cudatma.kernels.marlin.config import MarlinConfig
from cudatma.kernels.marlin.permute_columns import (
    ELEMENT_BYTES,
    PermuteColumnsConfig,
    permute_sizes,
    result_pitch_bytes,
)
from cudatma.kernels.marlin.problem import LinearShape, Problem, weight_values
from cudatma.kernels.schedule import Schedule, ceil_div
from cudatma.layout import Swizzle
from cudatma.quantization.layout_v1 import group_count, part_shapes, row_blocks
from cudatma.target import Target

#: Name of the array of each parameter.
_ARRAYS = {
    "weight": "qweight",
    "scales": "scales",
    "zeros": "zeros",
    "bias": "bias",
    "output": "out",
    "partials": PARTIALS,
    "flags": FLAGS,
}
#: Arrays that kernels may read before the previous kernel has completed.
_EARLY = ("qweight", "scales", "zeros", "perm", "bias")
#: Number of elements of K in a row of the 128-byte swizzle.
_SPAN = 64


def gemm_arguments(problem: Problem, config: MarlinConfig, work: Schedule, target: Target) -> Arguments:
    """Return the launch arguments of the GEMM, which reads either x or the copied rows.

    Parameters
    ----------
    problem : Problem
        The computation.
    config : MarlinConfig
        The kernel, in the form that the weight's scales allow.
    work : Schedule
        Distribution of tiles among CTAs.
    target : Target
        Target of the kernel.
    """
    makers: dict[str, Callable[[], Any]] = {
        "weight_map": lambda: _weights(problem.layer, config),
        "half_weight_map": lambda: _weight_tiles(problem.layer, config, 1, half_rows=True),
        "scale_map": lambda: _table(problem.layer, config, "scales"),
        "zero_map": lambda: _table(problem.layer, config, "zeros"),
        "activation_map": lambda: _activations(problem, config),
        "activations": lambda: At(ROWS if problem.copies_x else "x"),
        "problem": lambda: Value(0),
    }
    parameters = tuple([makers[name]() if name in makers else At(_ARRAYS[name]) for name in config.parameter_names])
    sizes = sizes_for(problem, config, lambda m: work, target)(problem)
    return Arguments(config.template, config, parameters, sizes, config.launch_cluster, early=_EARLY)


def sizes_for(
    problem: Problem, config: MarlinConfig, work_of: Callable[[int], Schedule], target: Target
) -> Callable[[Problem], Sizes]:
    """Return a function that computes the sizes of any problem with the same plan_key.

    ``work_of`` returns the schedule for M rows. The schedule depends only on the number of tiles. Sizes for values of M
    with the same number of tiles differ only in one word of the struct and in the tensor map.
    """
    if config.scale_form not in ("none", problem.scale_form):
        forms = quoted(dict.fromkeys((problem.scale_form, "none")))
        raise ArgumentError("scale_form", config.scale_form, f"{forms} for the range of this weight's scales")
    k, n, pitch = problem.layer.k, problem.layer.n, x_pitch_bytes(problem)
    programmatic = problem.programmatic or problem.copies_x
    shared = dependent_smem_bytes(config, target) if programmatic else 0
    members, has_map = config.problem_members, "activation_map" in config.parameter_names
    place_of_m, tile_m = offsets(members)["m"], config.tile_m

    @cache
    def packed(exponent: int, tensor_scale: float) -> Callable[[Mapping[str, Any]], bytes]:
        fixed = weight_values(
            config,
            n,
            k,
            group_count(k, problem.layer.group_size),
            activation_pitch=pitch // ELEMENT_BYTES,
            programmatic=programmatic,
            scale_exponent=exponent if config.has_scale_back else 0,
            tensor_scale=tensor_scale,
        )
        return packer(members, fixed)

    @cache
    def by_tiles(tiles_m: int, exponent: int, tensor_scale: float) -> tuple[bytes, bytes, int, int, int]:
        m = tiles_m * tile_m
        work = work_of(m)
        struct = packed(exponent, tensor_scale)(
            work_values(
                work,
                m,
                n,
                k,
                tile_m,
                output_pitch=n if problem.out_pitch_bytes is None else problem.out_pitch_bytes // ELEMENT_BYTES,
                output_vectors=problem.has_aligned_out,
            )
        )
        ctas = work.partial_ctas
        flags_bytes = ctas * config.warp_tiles * 4
        return struct[:place_of_m], struct[place_of_m + 4 :], work.ctas, ctas * config.partial_bytes, flags_bytes

    def sizes(problem: Problem) -> Sizes:
        m = problem.m
        head, tail, ctas, partials, flags = by_tiles(-(-m // tile_m), problem.scale_exponent, problem.tensor_scale)
        struct = head + m.to_bytes(4, "little") + tail
        return Sizes(ctas, (struct,), (m,) if has_map else (), shared, programmatic, partials, flags)

    return sizes


def x_pitch_bytes(problem: Problem) -> int:
    """Return the row pitch of the activations in the array that the GEMM reads."""
    return result_pitch_bytes(problem.layer.k) if problem.copies_x else _source_pitch_bytes(problem)


def _source_pitch_bytes(problem: Problem) -> int:
    dense = problem.layer.k * ELEMENT_BYTES
    return dense if problem.x_pitch_bytes is None else problem.x_pitch_bytes


def dependent_smem_bytes(config: MarlinConfig, target: Target) -> int:
    """Return the number of bytes of dynamic shared memory per CTA in a dependent launch.

    If more than ``ctas_per_sm`` CTAs, including those of the previous launch, would fit on an SM, the size is
    increased. Otherwise, too many CTAs would be placed on SMs where the previous launch has already ended. A launch
    with this imbalance took 43 us instead of 30 us.
    """
    too_much = target.smem_share_bytes(config.ctas_per_sm + 1) + 1
    return max(config.smem_bytes, min(target.smem_share_bytes(config.ctas_per_sm), too_much))


def _weights(layer: LinearShape, config: MarlinConfig) -> Map:
    """Return the tensor map of the weights. A box contains a whole tile or a block of 64 columns."""
    if config.loads_weight_tiles:
        return _weight_tiles(layer, config, config.tile_n // 64)
    rows = part_shapes(layer.k, layer.n, layer.group_size, layer.weight.bits)["qweight"][0]
    return Map("qweight", weight_map_spec(rows, config.stage_row_blocks))


def _weight_tiles(layer: LinearShape, config: MarlinConfig, rows: int, *, half_rows: bool = False) -> Map:
    """Return the tensor map of whole tiles. N tiles that begin in the middle of a row of 64 columns need half rows."""
    blocks = row_blocks(layer.k, layer.weight.bits), ceil_div(layer.n, 64)
    return Map("qweight", weight_tile_map_spec(*blocks, config.stage_row_blocks, rows, half_rows=half_rows))


def _table(layer: LinearShape, config: MarlinConfig, name: str) -> Map:
    """Return the tensor map of scales or zero points."""
    shape = part_shapes(layer.k, layer.n, layer.group_size)[name]
    dtype = "uint8" if name == "zeros" else layer.dtype
    return Map(name, scale_map_spec(shape, dtype, config.scale_row, config.groups_per_stage))


def _activations(problem: Problem, config: MarlinConfig) -> Map:
    """Return the tensor map of the activations.

    Each CTA of a cluster loads some of the rows for the whole cluster. If a box has several blocks, the map splits K
    into blocks of 64. Raises DescriptorError if K is then not a multiple of 64.
    """
    k, pitch, rows = problem.layer.k, x_pitch_bytes(problem), config.loaded_m
    dims, strides, box = (k, problem.m), (pitch,), (_SPAN, rows)
    if (blocks := config.activation_box_blocks) > 1:
        if k % _SPAN:
            remedy = "use a config without deep_box, because TMA would not fill the end of the last block with zeros"
            raise DescriptorError("tile_k", _SPAN, f"a divisor of K = {k}", remedy)
        dims, strides = (_SPAN, problem.m, k // _SPAN), (pitch, _SPAN * ELEMENT_BYTES)  # type: ignore[assignment]
        box = (_SPAN, rows, blocks)  # type: ignore[assignment]
    spec = TiledSpec(
        dtype=tma_type(problem.layer.dtype),
        dims=dims,
        strides_bytes=strides,
        box=box,
        swizzle=Swizzle.B128,
        l2_promotion=L2Promotion.B128,
    )
    return Map(ROWS if problem.copies_x else "x", spec, (("dim", 1),))


def copy_sizes(problem: Problem, config: PermuteColumnsConfig, resident_ctas: int) -> Sizes:
    """Return the copy kernel's launch sizes."""
    m, k = problem.m, problem.layer.k
    return permute_sizes(config, m, k, _source_pitch_bytes(problem), resident_ctas, programmatic=problem.programmatic)
