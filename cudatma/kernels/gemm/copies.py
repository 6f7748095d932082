"""Copies of operands that the kernels of the dense GEMM cannot read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np

from cudatma import context
from cudatma.arrays import ArrayInfo, describe, empty_like_library
from cudatma.descriptor.rules import TMA_ALIGNMENT_BYTES
from cudatma.errors import LaunchError
from cudatma.kernels.data_movement.copy import COPY
from cudatma.kernels.data_movement.movement import Movement
from cudatma.kernels.data_movement.transpose import TRANSPOSE
from cudatma.kernels.engine import run
from cudatma.kernels.gemm.matrices import as_rows, letter_of, why_copied
from cudatma.kernels.gpu import Gpu
from cudatma.pipeline import align_up

#: Row counts for layouts_up_to(), in addition to the bound: a single row, a count for which columns are multiples of
#: 16 bytes, and a count for which they are not. The address is aligned and far from 0.
_ROWS, _FAR = (1, 2, 8, 16), 1 << 50


def readable(info: ArrayInfo, field: str, backend: str, stream: int | None) -> ArrayInfo:
    """Return an operand (batch, rows, columns), or a copy of it if the kernels cannot read it.

    ``stream`` is the launch's stream, on which the copy runs, or None on the host. Raises the errors of copy(), and
    LaunchError if the stream is being captured, because the graph would keep the address of freed memory.
    """
    letter = letter_of(info, field)
    why = why_copied(info, letter)
    if not why:
        return info
    if info.device is not None and stream is not None:
        with context.using(info.device) as driver:
            if context.is_capturing(driver, stream):
                allowed = f"outside a graph capture ({field} has {why} and must be copied)"
                remedy = f"copy {field} before the capture (docs/design/gemm.md)"
                raise LaunchError("stream", "a stream under graph capture", allowed, remedy)
    rows = as_rows(info, letter)
    operation, options, source, target = _copy(rows)
    pitch = target.strides_bytes[1] // target.dtype.itemsize
    buffer = describe(empty_like_library(info, (*target.shape[:2], pitch), target.dtype, stream))
    target = replace(buffer, shape=target.shape)
    run(operation, (source,), target, options, stream, backend)
    step = target.strides_bytes[0] if target.shape[0] > 1 else 0
    strides = (step, *target.strides_bytes[1:])
    return as_rows(replace(target, shape=rows.shape, strides_bytes=strides, dtype=info.dtype), letter)


def copied(**operands: ArrayInfo) -> str:
    """Return a description of the operands that readable() copies, with the reasons."""
    reasons = {field: why_copied(info, letter_of(info, field)) for field, info in operands.items()}
    return "; ".join(f"{field} is copied first because it has {why}" for field, why in reasons.items() if why)


def _copy(rows: ArrayInfo) -> tuple[Movement[Any], tuple[Any, ...], ArrayInfo, ArrayInfo]:
    """Return the operation that copies rows, its options, its source, and the layout of its result."""
    batch, count, columns = rows.shape
    matrices = batch if rows.strides_bytes[0] else 1  # A matrix that the whole batch shares is copied only once.
    kind = np.dtype(np.uint8) if rows.dtype.itemsize == 1 else rows.dtype  # CuPy has no fp8 dtype.
    source = replace(rows, shape=(matrices, count, columns), dtype=kind)
    pitch = align_up(columns * kind.itemsize, TMA_ALIGNMENT_BYTES)
    target = replace(source, pointer=0, strides_bytes=(count * pitch, pitch, kind.itemsize), owner=None)
    if count > 1 and columns > 1 and rows.strides_bytes[1] == kind.itemsize:
        return TRANSPOSE, ("auto",), as_rows(source, "C"), target
    return COPY, (None, None, None, None, "auto"), source, target


def copy_kernels(infos: Iterable[ArrayInfo], field: str, gpu: Gpu) -> Iterator[tuple[str, Any]]:
    """Yield (template, config) for each kernel that copies operands with these layouts."""
    for info in infos:
        letter = letter_of(info, field)
        if why_copied(info, letter):
            operation, options, source, target = _copy(as_rows(info, letter))
            apart = replace(source, pointer=_FAR + source.pointer % TMA_ALIGNMENT_BYTES)
            problem = operation.check((apart,), target, options, None).problem
            yield from operation.kernels(problem, operation.configure(problem, gpu, {}))


def layouts_up_to(a: ArrayInfo, max_m: int) -> Iterator[ArrayInfo]:
    """Yield layouts of ``a`` with up to ``max_m`` rows, one for each way in which ``a`` may be copied.

    The layouts cover aligned and misaligned rows, dense rows, rows with gaps, and a single row.
    """
    (batch, m, k), (step, down, across), element = a.shape, a.strides_bytes, a.dtype.itemsize
    for rows in sorted({*(count for count in _ROWS if count <= max_m), max_m}):
        if across == element or k == 1:
            dense = k * element
            aligned = align_up(dense, TMA_ALIGNMENT_BYTES)
            pitches = [(pitch, element) for pitch in (down, dense, dense + element, aligned)]
        elif down == element or m == 1:
            dense = rows * element
            aligned = align_up(dense, TMA_ALIGNMENT_BYTES)
            pitches = [(element, pitch) for pitch in (across, dense, dense + element, aligned)]
        else:
            pitches = [(down, across)]
        for pitch, pointer in product(dict.fromkeys(pitches), (0, element)):
            packed = max(rows * pitch[0], k * pitch[1])
            for gap in (0, TMA_ALIGNMENT_BYTES) if batch > 1 else (0,):
                steps = packed + gap if step else 0
                yield replace(a, pointer=pointer, shape=(batch, rows, k), strides_bytes=(steps, *pitch))
