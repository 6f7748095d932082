"""Launch arguments of the dense GEMM."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cudatma.context import Cache
from cudatma.descriptor import TiledSpec
from cudatma.descriptor.rules import TMA_ALIGNMENT_BYTES
from cudatma.dtypes import tma_type
from cudatma.errors import ArgumentError
from cudatma.kernels.arguments import Arguments, At, Map, Sizes, Value
from cudatma.kernels.gemm.config import GemmConfig
from cudatma.kernels.gemm.matrices import Matrix
from cudatma.kernels.gemm.problem import NO_OPERANDS, SCALE_BLOCK, Problem, element_bytes
from cudatma.kernels.gpu import IN_L2_BYTES, Gpu
from cudatma.kernels.launch_struct import offsets, pack, work_values
from cudatma.kernels.schedule import ceil_div
from cudatma.target import get_target

#: Below this value of m n / (m + n), reading the operands takes longer than multiplying them. [H200]
_BOUND_BY_MEMORY = 180
#: Maximum number of tile counts for which a plan keeps sizes.
_MAX_TILES = 4096


def gemm_arguments(problem: Problem, config: GemmConfig, gpu: Gpu) -> Arguments:
    """Return the arguments of the launch. Raises TargetError or ArgumentError.

    The problem must have the configuration's layout.
    """
    config.check_target(get_target(gpu.target))
    if problem.operands == NO_OPERANDS:
        raise ArgumentError("problem.operands", None, "the layouts of the arrays")
    parameters = tuple([_parameter(name, problem, config) for name in config.parameter_names])
    sizes = sizes_for(problem, config, gpu)(problem)
    return Arguments(config.template, config, parameters, sizes, config.launch_cluster)


def _parameter(name: str, problem: Problem, config: GemmConfig) -> Map | At | Value:
    """Return the argument for a parameter. M is a dimension of every tensor map except B's."""
    m, n, k, operands = problem.m, problem.n, problem.k, problem.operands
    if name == "output_map" and not _is_stored_by_tma(problem, config):
        name = "b_map"  # The kernel does not use the map, but the map must be valid.
    if name == "a_map":
        swizzle = config.swizzle(config.is_a_k_major)
        dims, axis = ((k, m), 1) if config.is_a_k_major else ((m, k), 0)
        spec = _matrices(dims, operands.a, problem, config.a_box(m), config.dtype, swizzle)
        return Map("a", spec, (("dim", axis), ("box", axis)))
    if name == "b_map":
        swizzle = config.swizzle(config.is_b_k_major)
        dims = (k, n) if config.is_b_k_major else (n, k)
        return Map("b", _matrices(dims, operands.b, problem, config.b_box, config.dtype, swizzle))
    if name == "output_map":
        spec = _matrices((n, m), operands.out, problem, config.output_box, config.result_dtype, "128B")
        return Map("out", spec, (("dim", 1),))
    if name == "a_scale_map":
        if operands.scale_rows is None:
            raise ArgumentError("scales_by_tma", True, "False (TMA cannot read these scales)")
        dims, box = (m, ceil_div(k, SCALE_BLOCK)), (1, 1, config.tile_m)
        return Map("a_scale", _matrices(dims, operands.scale_rows, problem, box, "float32"), (("dim", 0),))
    return Value(0) if name == "problem" else At("out" if name == "output" else name)


def _matrices(
    dims: tuple[int, int], matrix: Matrix, problem: Problem, box: tuple[int, ...], dtype: str, swizzle: Any = "none"
) -> TiledSpec:
    """Return the tensor map of a batch of matrices.

    ``dims`` begins with the innermost axis, and ``box`` begins with the batch.
    """
    kind = tma_type("uint8" if dtype.startswith("float8") else dtype)
    strides = matrix.pitch_bytes, matrix.batch_bytes if problem.batch > 1 else matrix.pitch_bytes
    dims_of_batch = *dims, problem.batch
    return TiledSpec(dtype=kind, dims=dims_of_batch, strides_bytes=strides, box=box[::-1], swizzle=swizzle)


def sizes_for(problem: Problem, config: GemmConfig, gpu: Gpu) -> Callable[[Problem], Sizes]:
    """Return a function that computes the sizes of any problem with the same plan_key.

    Values of M with the same number of tiles differ in one word of the struct and in the tensor maps.
    """
    by_tiles: Cache[Callable[[int], Sizes]] = Cache(_MAX_TILES)
    tile_m, max_box_rows = config.cluster_tile_m, config.max_a_box_rows

    def sizes(problem: Problem) -> Sizes:
        m, operands = problem.m, problem.operands
        box_rows, by_memory = min(max_box_rows, -(-m // 8) * 8), is_bound_by_memory(problem)
        key = -(-m // tile_m), box_rows, by_memory, operands.alpha, operands.beta
        sizes_at = by_tiles.get(key)
        if sizes_at is None:
            sizes_at = _sizes_of_tiles(problem, config, gpu)
            by_tiles.put(key, sizes_at)
        return sizes_at(m)

    return sizes


def _sizes_of_tiles(problem: Problem, config: GemmConfig, gpu: Gpu) -> Callable[[int], Sizes]:
    """Return a function that maps M to the sizes, for every M that gives the same number of tiles as the problem."""
    operands, element, out_bytes = problem.operands, config.element_bytes, config.out_bytes
    by_tma = _is_stored_by_tma(problem, config)
    box_rows = config.a_box_rows(problem.m)
    work = config.divide_tiles(problem, gpu.sm_count)
    tiles_m = ceil_div(problem.m, config.cluster_tile_m)
    vectors, pitch = operands.out.is_aligned, operands.out.pitch_bytes // out_bytes
    values = dict(operands.scale_strides) | {
        **work_values(
            work, problem.m, problem.n, problem.k, config.cluster_tile_m, output_pitch=pitch, output_vectors=vectors
        ),
        # M determines which tiles traverse K backwards.
        "alternates": int(not problem.batch_invariant and not config.block_scales),
        "matrix_tiles_m": tiles_m,
        "by_matrix_tiles_m": tiles_m,
        "output_batch": operands.out.batch_bytes // out_bytes,
        "output_by_tma": int(by_tma),
        "alpha": operands.alpha,
        "beta": operands.beta,
        "a_batch": operands.a.batch_bytes // element,
        "a_pitch": operands.a.pitch_bytes // element,
        "b_batch": operands.b.batch_bytes // element,
        "b_pitch": operands.b.pitch_bytes // element,
        "a_box_rows": box_rows,
        "stage_bytes": config.boxes_bytes(box_rows),
    }
    members, names = config.problem_members, config.parameter_names
    struct, at = pack(members, values), offsets(members)["m"]
    head, tail = struct[:at], struct[at + 4 :]
    # The CTAs of a single wave take more than half of an SM's shared memory, so that no two CTAs of the next kernel
    # share an SM.
    shared = get_target(gpu.target).smem_share_bytes(2) + 1 if work.ctas <= gpu.sm_count else 0
    programmatic = not is_bound_by_memory(problem)
    has_a_map = "a_map" in names
    # M is the only size-dependent field in the tensor maps of the result and A's scales.
    others = int(by_tma and "output_map" in names) + int("a_scale_map" in names)

    def sizes(m: int) -> Sizes:
        fields = ((m, box_rows) if has_a_map else ()) + (m,) * others
        return Sizes(work.ctas, (head + m.to_bytes(4, "little") + tail,), fields, shared, programmatic)

    return sizes


def is_bound_by_memory(problem: Problem) -> bool:
    """Return whether there are few rows or columns and the operands do not fit in L2.

    Such a launch does not use programmatic dependent launch, because its CTAs would then share memory bandwidth
    unevenly. [H200]
    """
    m, n = problem.m, problem.n
    nbytes = problem.batch * element_bytes(problem.dtype) * problem.k * (m + n)
    return nbytes > IN_L2_BYTES and m * n < _BOUND_BY_MEMORY * (m + n)


def _is_stored_by_tma(problem: Problem, config: GemmConfig) -> bool:
    return (
        config.stores_by_tma
        and problem.operands.out.is_aligned
        and problem.n * config.out_bytes % TMA_ALIGNMENT_BYTES == 0
    )
