"""Arguments of a dense GEMM's launch, and the copies of operands that the kernels cannot read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np

from cudatma import context
from cudatma.arrays import ArrayInfo, describe, empty_like_library
from cudatma.descriptor import TiledSpec
from cudatma.dtypes import tma_type
from cudatma.errors import ArgumentError, LaunchError
from cudatma.kernels.arguments import Arguments, At, Map, Sizes, Value
from cudatma.kernels.data_movement.copy import COPY
from cudatma.kernels.data_movement.movement import Movement
from cudatma.kernels.data_movement.transpose import TRANSPOSE
from cudatma.kernels.engine import run
from cudatma.kernels.gemm.matrices import ALIGNMENT, as_rows, letter_of, why_copied
from cudatma.kernels.gemm.problem import SCALE_BLOCK, Matrix, Problem, element_bytes, operands_of
from cudatma.kernels.gemm.request import Request
from cudatma.kernels.gemm.spec import GemmSpec
from cudatma.kernels.gpu import IN_L2_BYTES, Gpu
from cudatma.kernels.launch_struct import offsets, pack, work_values
from cudatma.kernels.schedule import ceil_div
from cudatma.pipeline import align_up
from cudatma.target import Target

#: m n / (m + n) below which reading operands takes longer than multiplying. [H200]
_BOUND_BY_MEMORY = 180
#: Rows of a for which layouts_up_to() has layouts, besides the bound: one row, and numbers of them that are a multiple
#: of 16 bytes or not. An aligned address far from 0.
_ROWS, _FAR = (1, 2, 8, 16), 1 << 50
#: The layout of fp8 operands and of copies.
_PREFERRED = {"a": "R", "b": "C"}


def gemm_arguments(problem: Problem, spec: GemmSpec, target: Target, sm_count: int) -> Arguments:
    """Return the launch for a problem whose layout is the spec's. Raises TargetError, ArgumentError."""
    spec.check_target(target)
    makers: dict[str, Callable[[], Any]] = {
        "a_map": lambda: _operand_map("a", problem, spec),
        "b_map": lambda: _operand_map("b", problem, spec),
        "a_scale_map": lambda: _scale_map(problem, spec),
        "output_map": lambda: _output_map(problem, spec),
        "output": lambda: At("out"),
        "problem": lambda: Value(0),
    }
    parameters = tuple([makers[name]() if name in makers else At(name) for name in spec.parameter_names])
    sizes = sizes_for(problem, spec, target, sm_count)(problem.m)
    return Arguments(spec.template, spec, parameters, sizes, spec.launch_cluster)


def sizes_for(problem: Problem, spec: GemmSpec, target: Target, sm_count: int) -> Callable[[int], Sizes]:
    """Return a function of M that returns the sizes, for every M with the problem's size_key()."""
    operands, element = operands_of(problem), spec.element_bytes
    n, k = problem.n, problem.k
    work = spec.schedule(problem, sm_count)
    tiles_m = ceil_div(problem.m, spec.cluster_m)
    by_tma = _is_stored_by_tma(problem, spec)
    values: dict[str, Any] = dict(operands.scale_strides) | work_values(
        work,
        problem.m,
        n,
        k,
        spec.cluster_m,
        output_pitch=operands.out.pitch_bytes // spec.out_bytes,
        output_vectors=operands.out.is_aligned,
    )
    values |= {
        # Which tiles these are depends on M.
        "alternates": int(not problem.batch_invariant and not spec.block_scales),
        "matrix_tiles_m": tiles_m,
        "by_matrix_tiles_m": tiles_m,
        "output_batch": operands.out.batch_bytes // spec.out_bytes,
        "output_by_tma": int(by_tma),
        "alpha": operands.alpha,
        "beta": operands.beta,
        "a_batch": operands.a.batch_bytes // element,
        "a_pitch": operands.a.pitch_bytes // element,
        "b_batch": operands.b.batch_bytes // element,
        "b_pitch": operands.b.pitch_bytes // element,
        "a_box_rows": (box_rows := spec.a_box_rows(problem.m)),
        "stage_bytes": spec.stage_bytes(problem.m),
    }
    struct, at = pack(spec.problem_members, values), offsets(spec.problem_members)["m"]
    head, tail = struct[:at], struct[at + 4 :]
    shared = target.smem_share_bytes(2) + 1 if work.ctas <= sm_count else 0  # the next kernel finds no room twice
    programmatic = not is_bound_by_memory(problem)
    has_a_map, has_output_map = ("a_map" in spec.parameter_names), by_tma and "output_map" in spec.parameter_names
    # The maps of the result and of A's scales.
    others = int(has_output_map) + int("a_scale_map" in spec.parameter_names)

    def sizes(m: int) -> Sizes:
        fields: tuple[int, ...] = (m, box_rows) if has_a_map else ()
        fields += (m,) * others
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
    return spec.stores_by_tma and operands_of(problem).out.is_aligned and problem.n * spec.out_bytes % ALIGNMENT == 0


def _operand_map(name: str, problem: Problem, spec: GemmSpec) -> Map:
    """Return the map of A or B, of which M is the dimension of rows if K is contiguous, else the innermost one."""
    operands = operands_of(problem)
    is_a = name == "a"
    over, is_k_major = (operands.a, spec.is_a_k_major) if is_a else (operands.b, spec.is_b_k_major)
    rows = problem.m if is_a else problem.n
    dims = (problem.k, rows) if is_k_major else (rows, problem.k)
    box = tuple(reversed(spec.a_box(problem.m) if is_a else spec.b_box))
    axis = 1 if is_k_major else 0
    sized = (("dim", axis), ("box", axis)) if is_a else ()
    return Map(name, _spec(dims, over, problem, box, spec.dtype, swizzle=spec.swizzle(is_k_major)), sized)


def _output_map(problem: Problem, spec: GemmSpec) -> Map:
    """Return the map that TMA stores through; if it does not, another valid map, which the kernel does not use."""
    if not _is_stored_by_tma(problem, spec):
        return _operand_map("b", problem, spec)
    box, dims = tuple(reversed(spec.output_box)), (problem.n, problem.m)
    over = _spec(dims, operands_of(problem).out, problem, box, spec.result_dtype, swizzle="128B")
    return Map("out", over, (("dim", 1),))


def _scale_map(problem: Problem, spec: GemmSpec) -> Map:
    rows = operands_of(problem).scale_rows
    if rows is None:
        raise ArgumentError("spec.scales_by_tma", True, "False for scales that TMA cannot read")
    dims = problem.m, ceil_div(problem.k, SCALE_BLOCK)
    return Map("a_scale", _spec(dims, rows, problem, (spec.block_m, 1, 1), "float32"), (("dim", 0),))


def _spec(
    dims: tuple[int, int], over: Matrix, problem: Problem, box: tuple[int, ...], dtype: str, **options: Any
) -> TiledSpec:
    """Return the spec of a batch of matrices, innermost dimension first."""
    kind = tma_type("uint8" if dtype.startswith("float8") else dtype)
    strides = over.pitch_bytes, over.batch_bytes if problem.batch > 1 else over.pitch_bytes
    return TiledSpec(dtype=kind, dims=(*dims, problem.batch), strides_bytes=strides, box=box, **options)


def arranged(request: Request, backend: str, stream: int | None) -> Request:
    """Return the request with operands that the kernels can read.

    The copies use ``stream``, as the launch does; None on the host. Raises what copy() raises, and LaunchError if a
    copy would be captured.
    """
    a, b = _arranged(request.a, "a", backend, stream), _arranged(request.b, "b", backend, stream)
    return request if a is request.a and b is request.b else replace(request, a=a, b=b)


def copied(request: Request) -> str:
    """Which operands arranged() copies and why, in words."""
    told = []
    for field, info in (("a", request.a), ("b", request.b)):
        if why := why_copied(as_rows(info, letter_of(info, _PREFERRED[field]))):
            told.append(f"{field} is copied first: it has {why}")
    return "; ".join(told)


def _arranged(info: ArrayInfo, field: str, backend: str, stream: int | None) -> ArrayInfo:
    letter = letter_of(info, _PREFERRED[field])
    rows = as_rows(info, letter)
    why = why_copied(rows)
    if not why:
        return info
    if info.device is not None and stream is not None:
        _refuse_capture(info.device, stream, f"{field} with {why}")
    operation, options, source, target = _copy(rows)
    pitch = target.strides_bytes[1] // target.dtype.itemsize
    buffer = describe(empty_like_library(info, (*target.shape[:2], pitch), target.dtype, stream))
    target = replace(buffer, shape=target.shape)
    run(operation, (source,), target, options, stream, backend)
    step = target.strides_bytes[0] if target.shape[0] > 1 else 0
    strides = (step, *target.strides_bytes[1:])
    return as_rows(replace(target, shape=rows.shape, strides_bytes=strides, dtype=info.dtype), letter)


def _copy(rows: ArrayInfo) -> tuple[Movement[Any], tuple[Any, ...], ArrayInfo, ArrayInfo]:
    """Return how rows are copied: the operation, its options, its source, and the layout of its result."""
    batch, count, columns = rows.shape
    matrices = batch if rows.strides_bytes[0] else 1  # one that serves the whole batch is copied once
    kind = np.dtype(np.uint8) if rows.dtype.itemsize == 1 else rows.dtype  # CuPy has no fp8
    source = replace(rows, shape=(matrices, count, columns), dtype=kind)
    pitch = align_up(columns * kind.itemsize, ALIGNMENT)
    target = replace(source, pointer=0, strides_bytes=(count * pitch, pitch, kind.itemsize), owner=None)
    if count > 1 and columns > 1 and rows.strides_bytes[1] == kind.itemsize:
        return TRANSPOSE, ("auto",), as_rows(source, "C"), target
    return COPY, (None, None, None, None, "auto"), source, target


def copy_kernels(infos: Iterable[ArrayInfo], field: str, gpu: Gpu) -> Iterator[tuple[str, Any]]:
    """Yield (template, spec) of the kernels that copy operands with these layouts."""
    for info in infos:
        rows = as_rows(info, letter_of(info, _PREFERRED[field]))
        if why_copied(rows):
            operation, options, source, target = _copy(rows)
            apart = replace(source, pointer=_FAR + source.pointer % ALIGNMENT)
            problem = operation.check((apart,), target, options, None).problem
            yield from operation.kernels(problem, operation.configure(problem, gpu, {}))


def layouts_up_to(a: ArrayInfo, max_m: int) -> Iterator[ArrayInfo]:
    """Yield layouts of a with up to ``max_m`` rows: one for each case in which it is copied differently.

    Those are aligned and misaligned rows, dense ones and rows with gaps, and a single row.
    """
    (batch, m, k), (step, down, across), element = a.shape, a.strides_bytes, a.dtype.itemsize
    for rows in sorted({*(one for one in _ROWS if one <= max_m), max_m}):
        if across == element or k == 1:
            dense = k * element
            pitches = [(pitch, element) for pitch in (down, dense, dense + element, align_up(dense, ALIGNMENT))]
        elif down == element or m == 1:
            dense = rows * element
            pitches = [(element, pitch) for pitch in (across, dense, dense + element, align_up(dense, ALIGNMENT))]
        else:
            pitches = [(down, across)]
        for pitch, pointer in product(dict.fromkeys(pitches), (0, element)):
            packed = max(rows * pitch[0], k * pitch[1])
            for gap in (0, ALIGNMENT) if batch > 1 else (0,):
                steps = packed + gap if step else 0
                yield replace(a, pointer=pointer, shape=(batch, rows, k), strides_bytes=(steps, *pitch))


def _refuse_capture(device: int, stream: int, what: str) -> None:
    """Raise LaunchError if the stream captures a graph, which would keep the address of memory that is freed."""
    with context.using(device) as driver:
        if context.is_capturing(driver, stream):
            allowed = "operands that the kernels read as they lie (docs/gemm.md)"
            raise LaunchError(
                "stream", f"a stream that captures a graph, for {what}", allowed, "copy it before the capture"
            )
