"""Copies by TMA: whole arrays as runs of bytes, windows of 1 to 5 axes as boxes; by plain code whatever TMA cannot."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from cudatma.arrays import ArrayInfo
from cudatma.deprecation import former_arguments
from cudatma.dtypes import TmaType, tma_type
from cudatma.errors import ArgumentError, ArgumentTypeError, DescriptorError, counted
from cudatma.kernels.data_movement.call import Call, Place, described
from cudatma.kernels.data_movement.plans import plain_plan, run_plan, window_plan
from cudatma.kernels.data_movement.specs import CACHES, check_choice
from cudatma.kernels.data_movement.window import Axis, Window, carried, cropped, folded, simplify
from cudatma.kernels.host import host_array
from cudatma.kernels.launch import Launch

PADS = ("zeros", "nan")
VIAS = ("auto", "tma", "plain")
#: Bytes of an element as which a window is copied, where it is whole in them: a box has at most 256 elements a row, and
#: wide rows are faster (docs/operations.md).
_WIDEST = 8


@former_arguments("out")
def copy(
    src: Any,
    *,
    out: Any = None,
    offset: Sequence[int] | None = None,
    shape: Sequence[int] | None = None,
    pad: str | None = None,
    cache: str | None = None,
    via: str = "auto",
    stream: Any = None,
    backend: str | None = None,
) -> Any:
    """Copy a window of an array; returns ``out``, a new C-ordered array of the source's library unless given.

    src: CuPy, torch, DLPack or ``__cuda_array_interface__``; NumPy on the emulator. Any strides, any dtype of plain
    bytes. offset: where the window begins, one int an axis (0 by default), negative with ``pad``. shape: of the window;
    by default up to the source's end. out: of that shape and dtype, any strides, no bytes of the window.
    pad: what elements outside of the source become, "zeros" or "nan" (float16, bfloat16, float32, float64); None: a
    window that leaves the source is an error.
    cache: L2 policy of loads and stores, "evict_first", "evict_last", "evict_normal", None for the GPU's default.
    via: "tma" raises DescriptorError where TMA cannot: addresses, pitches, the window's first byte and the result's
    rows are multiples of 16 bytes, elements of a row follow each other, five axes at most after merging. "plain" copies
    with plain loads and stores; "auto" takes TMA where it can. stream: None is the current stream of the arrays'
    library. backend: as in marlin_gemm.

    [PTX ISA, cp.async.bulk, cp.async.bulk.tensor] Raises ArgumentError, ArgumentTypeError, DescriptorError,
    TargetError, CompileError, DriverError, HazardError (emulator).
    """
    call = Call("copy", backend, described(src, "src"), out, stream, offset, shape, pad, cache, via)
    if call.is_known:
        return call.again()
    info = call.src
    starts, extents = check_window(info, offset, shape, pad)
    check_choice("cache", cache or "", CACHES)
    check_choice("via", via, VIAS)
    fill = nan_type(info, pad)
    result = call.take(extents, part_of(info, starts, extents))
    if not result.size_elems:
        return call.result
    if call.place.backend == "reference":
        copy_on_host(info, result, starts, fill is not None)
        return call.result
    return call.first([plan_copy(info, result, starts, call.place, fill, cache or "", via)])


def plan_copy(
    src: ArrayInfo,
    out: ArrayInfo,
    starts: Sequence[int],
    place: Place,
    fill: TmaType | None = None,
    cache: str = "",
    via: str = "auto",
) -> Launch:
    """The launch for a window that begins at ``starts`` and has out's shape. fill: the type whose NaN is filled in."""
    window = simplify(window_of(src, out, starts))
    arrays = (src, out)
    if via == "plain":
        return plain_plan(window, arrays, place, _nan_bits(fill))
    try:
        if window.is_one_run and (window.first_byte - window.destination) % 16 == 0:
            return run_plan(window, arrays, place, cache=cache)
        if fill is not None and not window.is_inside:
            return window_plan(window, arrays, place, fill, nan=True, cache=cache)
        if window.has_body and window.is_dense:
            window = folded(carried(cropped(window), _WIDEST))
        return window_plan(window, arrays, place, cache=cache)
    except DescriptorError:
        if via == "tma":
            raise
    return plain_plan(simplify(window_of(src, out, starts)), arrays, place, _nan_bits(fill))


def window_of(src: ArrayInfo, out: ArrayInfo, starts: Sequence[int]) -> Window:
    """The window of src at ``starts`` that fills out."""
    axes = zip(starts, out.shape, src.shape, src.strides_bytes, out.strides_bytes, strict=True)
    return Window(src.pointer, out.pointer, src.dtype.itemsize, tuple(Axis(*axis) for axis in axes))


def check_window(
    info: ArrayInfo, offset: Sequence[int] | None, shape: Sequence[int] | None, pad: str | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(offset, shape) with one int for each axis. Raises ArgumentError, ArgumentTypeError."""
    if pad is not None:
        check_choice("pad", pad, PADS)
    starts = whole_numbers("offset", (0,) * len(info.shape) if offset is None else offset, len(info.shape))
    rest = tuple(max(0, size - start) for size, start in zip(info.shape, starts, strict=True))
    extents = rest if shape is None else whole_numbers("shape", shape, len(info.shape))
    for axis, (start, extent, size) in enumerate(zip(starts, extents, info.shape, strict=True)):
        if extent < 0:
            raise ArgumentError(f"shape[{axis}]", extent, "0 and up")
        if pad is None and not 0 <= start <= size - extent:
            allowed = f"0..{size - extent}" if extent <= size else f"a window of at most {size} elements"
            raise ArgumentError(f"offset[{axis}]", start, allowed, "pad= fills what lies outside of the source")
    return starts, extents


def whole_numbers(field: str, values: object, count: int) -> tuple[int, ...]:
    """A tuple of ``count`` ints. Raises ArgumentTypeError, ArgumentError."""
    try:
        found = tuple(operator.index(value) for value in values)  # type: ignore[attr-defined]
    except TypeError as error:
        raise ArgumentTypeError(field, repr(values), f"{counted(count, 'int')}, one an axis") from error
    if len(found) != count:
        raise ArgumentError(field, found, f"{counted(count, 'int')}, one an axis")
    return found


def nan_type(info: ArrayInfo, pad: str | None) -> TmaType | None:
    """The element type that is filled with NaN; None for zeros. ArgumentError for a dtype that has none."""
    if pad != "nan":
        return None
    kind = tma_type(info.dtype) if info.dtype.itemsize in (2, 4, 8) and info.dtype.kind in "fV" else None
    if kind is None or not kind.is_float:
        raise ArgumentError("pad", f"nan for {info.dtype}", "float16, bfloat16, float32 and float64", "pad with zeros")
    return kind


def _nan_bits(kind: TmaType | None) -> int:
    if kind is None or kind.numpy is None:
        return 0
    return int(np.array([np.nan], kind.numpy).view(f"uint{8 * kind.element_bytes}")[0])


def part_of(info: ArrayInfo, starts: Sequence[int], extents: Sequence[int]) -> ArrayInfo:
    """The elements of an array that a window reads."""
    axes = [Axis(start, extent, size, stride, 0) for start, extent, size, stride in
            zip(starts, extents, info.shape, info.strides_bytes, strict=True)]  # fmt: skip
    pointer = info.pointer + sum(axis.first * axis.source_stride for axis in axes)
    return replace(info, pointer=pointer, shape=tuple(axis.body for axis in axes))


def copy_on_host(src: ArrayInfo, out: ArrayInfo, starts: Sequence[int], nan: bool) -> None:
    """The same by NumPy."""
    result = host_array(out)
    result[...] = np.array(np.nan, out.dtype) if nan else np.zeros((), out.dtype)
    axes = [Axis(*each, 0, 0) for each in zip(starts, out.shape, src.shape, strict=True)]
    if all(axis.body for axis in axes):
        inside = tuple(slice(axis.lead, axis.lead + axis.body) for axis in axes)
        taken = tuple(slice(axis.first, axis.first + axis.body) for axis in axes)
        result[inside] = host_array(src)[taken]
