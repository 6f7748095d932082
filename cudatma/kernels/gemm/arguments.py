"""Arguments of a dense GEMM's launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cudatma.descriptor import TiledSpec
from cudatma.dtypes import tma_type
from cudatma.errors import ArgumentError
from cudatma.kernels.arguments import Arguments, At, Map, Sizes, Value
from cudatma.kernels.gemm.matrices import ALIGNMENT, Matrix
from cudatma.kernels.gemm.problem import NO_OPERANDS, SCALE_BLOCK, Problem, element_bytes
from cudatma.kernels.gemm.spec import GemmSpec
from cudatma.kernels.gpu import IN_L2_BYTES, Gpu
from cudatma.kernels.launch_struct import offsets, pack, work_values
from cudatma.kernels.schedule import ceil_div
from cudatma.target import get_target

#: m n / (m + n) below which reading operands takes longer than multiplying. [H200]
_BOUND_BY_MEMORY = 180


def gemm_arguments(problem: Problem, spec: GemmSpec, gpu: Gpu) -> Arguments:
    """Return the launch for a problem whose layout is the spec's. Raises TargetError, ArgumentError."""
    spec.check_target(get_target(gpu.target))
    if problem.operands == NO_OPERANDS:
        raise ArgumentError("problem.operands", None, "the layouts of the arrays")
    makers: dict[str, Callable[[], Any]] = {
        "a_map": lambda: _operand_map("a", problem, spec),
        "b_map": lambda: _operand_map("b", problem, spec),
        "a_scale_map": lambda: _scale_map(problem, spec),
        "output_map": lambda: _output_map(problem, spec),
        "output": lambda: At("out"),
        "problem": lambda: Value(0),
    }
    parameters = tuple([makers[name]() if name in makers else At(name) for name in spec.parameter_names])
    return Arguments(spec.template, spec, parameters, sizes_for(problem, spec, gpu)(problem.m), spec.launch_cluster)


def sizes_for(problem: Problem, spec: GemmSpec, gpu: Gpu) -> Callable[[int], Sizes]:
    """Return a function of M that returns the sizes, for every M with the problem's size_key()."""
    operands, element, out_bytes = problem.operands, spec.element_bytes, spec.out_bytes
    by_tma = _is_stored_by_tma(problem, spec)
    box_rows = spec.a_box_rows(problem.m)
    work = spec.schedule(problem, gpu.sm_count)
    tiles_m = ceil_div(problem.m, spec.cluster_m)
    vectors, pitch = operands.out.is_aligned, operands.out.pitch_bytes // out_bytes
    values = dict(operands.scale_strides) | {
        **work_values(
            work, problem.m, problem.n, problem.k, spec.cluster_m, output_pitch=pitch, output_vectors=vectors
        ),
        # Which tiles go through K backwards depends on M.
        "alternates": int(not problem.batch_invariant and not spec.block_scales),
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
        "stage_bytes": spec.boxes_bytes(box_rows),
    }
    members, names = spec.problem_members, spec.parameter_names
    struct, at = pack(members, values), offsets(members)["m"]
    head, tail = struct[:at], struct[at + 4 :]
    # The CTAs of a single wave take more than half of an SM's shared memory, so that CTAs of the next kernel do not
    # share an SM.
    shared = get_target(gpu.target).smem_share_bytes(2) + 1 if work.ctas <= gpu.sm_count else 0
    programmatic = not is_bound_by_memory(problem)
    has_a_map = "a_map" in names
    # The maps of the result and of A's scales, whose only sized field is M.
    others = int(by_tma and "output_map" in names) + int("a_scale_map" in names)

    def sizes(m: int) -> Sizes:
        fields = ((m, box_rows) if has_a_map else ()) + (m,) * others
        return Sizes(work.ctas, (head + m.to_bytes(4, "little") + tail,), fields, shared, programmatic)

    return sizes


def size_key(problem: Problem, spec: GemmSpec) -> tuple[Any, ...]:
    """Return what determines the sizes of a launch, besides M in one word of the struct and in the tensor maps."""
    m = problem.m
    return -(-m // spec.cluster_m), spec.a_box_rows(m), is_bound_by_memory(problem)


def is_bound_by_memory(problem: Problem) -> bool:
    """Return whether there are few rows or columns, and operands that L2 does not hold.

    Such a launch is not a programmatic dependent: while the kernel before it ends, CTAs would be placed where SMs
    become free, and share the paths to memory unevenly. [H200]
    """
    m, n = problem.m, problem.n
    nbytes = problem.batch * element_bytes(problem.dtype) * problem.k * (m + n)
    return nbytes > IN_L2_BYTES and m * n < _BOUND_BY_MEMORY * (m + n)


def _is_stored_by_tma(problem: Problem, spec: GemmSpec) -> bool:
    return spec.stores_by_tma and problem.operands.out.is_aligned and problem.n * spec.out_bytes % ALIGNMENT == 0


def _operand_map(name: str, problem: Problem, spec: GemmSpec) -> Map:
    """Return the map of A or B. M is the dimension of A's rows if K is contiguous, else the innermost one."""
    if name == "a":
        matrix, is_k_major, rows, box = problem.operands.a, spec.is_a_k_major, problem.m, spec.a_box(problem.m)
    else:
        matrix, is_k_major, rows, box = problem.operands.b, spec.is_b_k_major, problem.n, spec.b_box
    dims, axis = ((problem.k, rows), 1) if is_k_major else ((rows, problem.k), 0)
    sized = (("dim", axis), ("box", axis)) if name == "a" else ()
    return Map(name, _spec(dims, matrix, problem, box, spec.dtype, swizzle=spec.swizzle(is_k_major)), sized)


def _output_map(problem: Problem, spec: GemmSpec) -> Map:
    """Return the map that TMA stores through; if it does not, another valid map, which the kernel does not use."""
    if not _is_stored_by_tma(problem, spec):
        return _operand_map("b", problem, spec)
    dims, matrix = (problem.n, problem.m), problem.operands.out
    over = _spec(dims, matrix, problem, spec.output_box, spec.result_dtype, swizzle="128B")
    return Map("out", over, (("dim", 1),))


def _scale_map(problem: Problem, spec: GemmSpec) -> Map:
    rows = problem.operands.scale_rows
    if rows is None:
        raise ArgumentError("spec.scales_by_tma", True, "False for scales that TMA cannot read")
    dims = problem.m, ceil_div(problem.k, SCALE_BLOCK)
    return Map("a_scale", _spec(dims, rows, problem, (1, 1, spec.block_m), "float32"), (("dim", 0),))


def _spec(
    dims: tuple[int, int], matrix: Matrix, problem: Problem, box: tuple[int, ...], dtype: str, **options: Any
) -> TiledSpec:
    """Return the spec of a batch of matrices. ``dims`` begins with the innermost dimension, ``box`` with the batch."""
    kind = tma_type("uint8" if dtype.startswith("float8") else dtype)
    strides = matrix.pitch_bytes, matrix.batch_bytes if problem.batch > 1 else matrix.pitch_bytes
    return TiledSpec(dtype=kind, dims=(*dims, problem.batch), strides_bytes=strides, box=box[::-1], **options)
