"""Operands that the kernels cannot read are copied in front of them: pitches and addresses off 16 bytes, strides."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from cudatma import context
from cudatma.arrays import ArrayInfo, describe, empty_like_library
from cudatma.errors import LaunchError
from cudatma.kernels.data_movement.copy import copy
from cudatma.kernels.data_movement.transpose import transpose
from cudatma.kernels.gemm.matrices import ALIGNMENT, as_rows, letter_of, why_copied
from cudatma.kernels.gemm.request import Request
from cudatma.kernels.schedule import ceil_div

#: The layout of fp8 operands, and of those without contiguous rows or columns.
_PREFERRED = {"a": "R", "b": "C"}


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
