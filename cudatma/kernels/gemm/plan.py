"""The launch of a dense GEMM: operands that the kernels cannot read are copied in front of it, and a kernel gets its
arguments."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from cudatma import context
from cudatma.arrays import ArrayInfo, describe, empty_like_library
from cudatma.descriptor import TensorMap
from cudatma.errors import ArgumentError, LaunchError
from cudatma.kernels.data_movement.copy import copy
from cudatma.kernels.data_movement.transpose import transpose
from cudatma.kernels.gemm.matrices import ALIGNMENT, as_rows, dense_rows, letter_of, why_copied
from cudatma.kernels.gemm.request import Request
from cudatma.kernels.gemm.spec import GemmSpec
from cudatma.kernels.gpu import IN_L2_BYTES
from cudatma.kernels.launch import Launch
from cudatma.kernels.launch_struct import pack, work_values
from cudatma.kernels.schedule import DivisorStruct, Schedule, ceil_div
from cudatma.target import Target

#: Arrays that a call may do without; the kernel gets the address 0. What TMA may read comes first, after a and b: known
#: calls look at the alignment of the first arrays.
OPTIONAL = ("a_scale", "b_scale", "bias")

#: m n / (m + n) below which reading operands takes longer than multiplying. [H200]
_BOUND_BY_MEMORY = 180
#: The layout of fp8 operands, and of those without contiguous rows or columns.
_PREFERRED = {"a": "R", "b": "C"}


def plan_gemm(request: Request, result: ArrayInfo, spec: GemmSpec, target: Target, sm_count: int) -> Launch:
    """The launch for a request whose layout is the spec's, after arranged(). result: (batch, M, N), of result_rows().
    Raises TargetError, ArgumentError."""
    spec.check_target(target)
    work = spec.schedule(request.problem(), sm_count)
    operands = zip((request.a, request.b), spec.layout, strict=True)
    a_rows, b_rows = (dense_rows(as_rows(info, letter)) for info, letter in operands)
    by_tma = spec.stores_by_tma and _is_aligned(result) and result.shape[2] * result.dtype.itemsize % ALIGNMENT == 0
    values = _values(request, result, spec, work) | {"output_by_tma": int(by_tma)}
    for name, rows in (("a", a_rows), ("b", b_rows)):
        step, pitch, element = rows.strides_bytes
        values |= {f"{name}_batch": step // element, f"{name}_pitch": pitch // element}
    m = request.sizes[0]
    values |= {"a_box_rows": spec.a_box_rows(m), "stage_bytes": spec.stage_bytes(m)}
    args: dict[str, Any] = dict.fromkeys(OPTIONAL, 0) | request.arrays()
    args |= {"a": a_rows, "b": b_rows, "output": result, "problem": pack(spec.problem_members, values)}
    maps = (("a_map", a_rows, spec.a_box(m), spec.is_a_k_major), ("b_map", b_rows, spec.b_box, spec.is_b_k_major))
    for name, rows, box, is_k_major in maps:
        if name in spec.parameter_names:
            args[name] = _tensor_map(rows, box, spec.swizzle(is_k_major), target)
    if spec.ring_has_scales:
        scales = request.block_rows
        if scales is None or not request.has_scales_for_tma:
            raise ArgumentError("spec.scales_by_tma", True, "False for scales that TMA cannot read")
        args["a_scale_map"] = _tensor_map(dense_rows(scales), (1, 1, spec.block_m), "none", target)
    if "output_map" in spec.parameter_names:
        args["output_map"] = _tensor_map(result, spec.output_box, "128B", target) if by_tma else args["a_map"]
    ordered = tuple([args[name] for name in spec.parameter_names])
    touched = (result, *request.arrays().values())
    shared_bytes = target.smem_share_bytes(2) + 1 if work.ctas <= sm_count else 0  # the next kernel finds no room twice
    return Launch(
        spec.template,
        spec,
        work.ctas,
        ordered,
        touched,
        cluster=spec.launch_cluster,
        shared_bytes=shared_bytes,
        programmatic=not _is_memory_bound(request),
    )


def _is_memory_bound(request: Request) -> bool:
    """Whether there are few rows or columns, and operands that L2 does not hold. While the kernel before this one ends,
    CTAs would be placed where SMs become free, and share the ways to memory unevenly. [H200]"""
    (m, n, k), element = request.sizes, request.a.dtype.itemsize
    return request.batch * element * k * (m + n) > IN_L2_BYTES and m * n < _BOUND_BY_MEMORY * (m + n)


def _is_aligned(result: ArrayInfo) -> bool:
    """Whether every row starts at a multiple of 16 bytes."""
    return not any(value % ALIGNMENT for value in (result.pointer, *result.strides_bytes[:2]))


def _values(request: Request, result: ArrayInfo, spec: GemmSpec, work: Schedule) -> dict[str, Any]:
    """Members of the kernels' Problem, all but those of A, B and tensor maps."""
    (m, n, k), (step, pitch, element) = request.sizes, result.strides_bytes
    tiles_m = ceil_div(m, spec.cluster_m)
    values = request.scales.strides() | work_values(
        work, m, n, k, spec.cluster_m, output_pitch=pitch // element, output_vectors=_is_aligned(result)
    )
    alternates = not request.batch_invariant and not spec.block_scales  # which tiles these are depends on M
    values |= {"alternates": int(alternates)}
    values |= {"matrix_tiles_m": tiles_m, "by_matrix_tiles_m": DivisorStruct.of(tiles_m)}
    return values | {"output_batch": step // element, "alpha": request.alpha, "beta": request.beta}


def _tensor_map(rows: ArrayInfo, box: tuple[int, int, int], swizzle: str, target: Target) -> TensorMap:
    """Of (batch, rows, columns)."""
    kind = "uint8" if rows.dtype.itemsize == 1 else None
    rows = replace(rows, owner=None)  # the launch has it
    return TensorMap.from_array(rows, box, dtype=kind, axes=(2, 1, 0), swizzle=swizzle, target=target)


def arranged(request: Request, backend: str, stream: int | None) -> Request:
    """The request with operands that the kernels can read. stream: of the copies, and of the launch that follows; None
    on the host. Raises what copy() raises, LaunchError where a copy would be captured.
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
    batch, count, columns = rows.shape
    matrices = batch if rows.strides_bytes[0] else 1  # one that serves the whole batch is copied once
    kind = np.dtype(np.uint8) if info.dtype.itemsize == 1 else info.dtype  # CuPy has no fp8
    vector = ALIGNMENT // kind.itemsize
    buffer = describe(empty_like_library(info, (matrices, count, ceil_div(columns, vector) * vector), kind, stream))
    source, target = (replace(each, shape=(matrices, count, columns), dtype=kind) for each in (rows, buffer))
    if count > 1 and columns > 1 and rows.strides_bytes[1] == kind.itemsize:
        transpose(as_rows(source, "C"), out=target, backend=backend, stream=stream)
    else:
        copy(source, out=target, backend=backend, stream=stream)
    step = target.strides_bytes[0] if matrices > 1 else 0
    strides = (step, *target.strides_bytes[1:])
    return as_rows(replace(target, shape=rows.shape, strides_bytes=strides, dtype=info.dtype), letter)


def _refuse_capture(device: int, stream: int, what: str) -> None:
    """Raise LaunchError if the stream captures a graph, which would keep the address of memory that is freed."""
    with context.using(device) as driver:
        if context.is_capturing(driver, stream):
            allowed = "operands that the kernels read as they lie (docs/gemm.md)"
            raise LaunchError(
                "stream", f"a stream that captures a graph, for {what}", allowed, "copy it before the capture"
            )
