"""Copy arrays with TMA, as runs of bytes or as boxes of windows with 1 to 5 axes, or with plain loads and stores.

[PTX ISA, cp.async.bulk, cp.async.bulk.tensor]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import numpy as np

from cudatma.arrays import ArrayInfo
from cudatma.dtypes import TmaType, tma_type
from cudatma.errors import ArgumentError, DescriptorError
from cudatma.kernels.arguments import Arguments
from cudatma.kernels.data_movement.checks import as_key, check_out, check_size, described, whole_numbers
from cudatma.kernels.data_movement.configs import check_choice, checked_cache
from cudatma.kernels.data_movement.movement import LaunchLimits, Movement, checked
from cudatma.kernels.data_movement.plans import plain_plan, run_plan, window_plan
from cudatma.kernels.data_movement.window import Axis, Window, carried, cropped, folded, simplify
from cudatma.kernels.engine import run
from cudatma.kernels.host import host_array
from cudatma.kernels.operation import Checked

PADS = ("zeros", "nan")
VIAS = ("auto", "tma", "plain")
#: Element size in bytes for copying a window whose rows are multiples of this size. A box has at most 256
#: elements per row, so large elements allow wide rows, which are faster (docs/design/data_movement.md).
_WIDEST = 8
_INT64 = 1 << 63


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
    """Copy an array, or a window of an array.

    Parameters
    ----------
    src : array
        The source, with any strides and any dtype without Python objects: a CuPy array, a torch tensor, or an object
        that supports DLPack or ``__cuda_array_interface__``. The emulator also accepts a NumPy array. The launch waits
        for the stream in ``__cuda_array_interface__``.
    out : array, optional
        The result, with the window's shape and the source's dtype. Its elements must not share memory with each other
        or with the window. Default: a new C-ordered array from the source's library, allocated on the stream of the
        launch.
    offset : sequence of int, optional
        Index of the window's first element, one int per axis. It may be negative with ``pad``. Default: zeros.
    shape : sequence of int, optional
        Shape of the window. By default, the window extends to the end of the source.
    pad : {"zeros", "nan"}, optional
        Fill value for elements outside the source. ``"nan"`` requires float16, bfloat16, float32 or float64.
        Default: raise an error if the window exceeds the source.
    cache : {"evict_first", "evict_last", "evict_normal"}, optional
        L2 policy of loads and stores. Default: the default policy of the GPU.
    via : {"auto", "tma", "plain"}, default "auto"
        How to copy. ``"tma"`` raises DescriptorError if TMA cannot copy the window. For TMA, addresses, pitches, the
        window's first byte and the result's rows must be multiples of 16 bytes, rows must be contiguous, and at most
        five axes may remain after merging. ``"plain"`` uses plain loads and stores. ``"auto"`` uses TMA where possible.
    stream : stream, optional
        Stream of the launch. Default: the current stream of the source's library.
    backend : str, optional
        Where to run: ``"cuda"``, ``"emulator"``, ``"reference"`` or ``"auto"``; see ``marlin_gemm``.

    Returns
    -------
    array
        The result.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        If an argument is invalid.
    DescriptorError
        If TMA cannot copy the window and ``via`` is ``"tma"``.
    LaunchError
        If the first call is made during graph capture, or if the process was forked.
    TargetError, CompileError, DriverError
        If no kernel exists for the GPU, or if a kernel does not compile or load.
    HazardError
        If the emulator finds a hazard.

    Examples
    --------
    >>> x = np.arange(12, dtype=np.int32).reshape(3, 4)
    >>> cudatma.copy(x, offset=(1, 2), shape=(2, 4), pad="zeros", backend="reference").tolist()
    [[6, 7, 0, 0], [10, 11, 0, 0]]
    """
    return run(COPY, (src,), out, as_key(offset, shape, pad, cache, via), stream=stream, backend=backend)


class _Problem(NamedTuple):
    """Layouts of a copy. ``fill`` is the type whose NaN fills elements outside the source, or None for zeros."""

    src: ArrayInfo
    out: ArrayInfo
    starts: tuple[int, ...]
    fill: TmaType | None
    cache: str
    via: str


class Copy(Movement[_Problem]):
    """Operation of copy(), with the options offset, shape, pad, cache and via."""

    name: ClassVar[str] = "copy"

    def check(self, inputs: tuple[Any, ...], out: Any, options: tuple[Any, ...], resource: Any) -> Checked[_Problem]:
        info, (offset, shape, pad, cache, via) = described(inputs[0], "src"), options
        starts, extents = check_window(info, offset, shape, pad)
        policy = checked_cache(cache)
        check_choice("via", via, VIAS)
        fill = nan_type(info, pad)
        result = check_out(out, info, extents, part_of(info, starts, extents))
        return checked(_Problem, (info,), result, extents, starts, fill, policy, via)

    def plan(self, problem: _Problem, limits: LaunchLimits) -> tuple[Arguments, ...]:
        src, out, starts, fill, cache, via = problem
        return (plan_copy(src, out, starts, limits, fill, cache, via),)

    def reference(self, problem: _Problem, arrays: Mapping[str, ArrayInfo]) -> None:
        copy_on_host(arrays["src"], arrays["out"], problem.starts, problem.fill is not None)


COPY = Copy()


def plan_copy(
    src: ArrayInfo,
    out: ArrayInfo,
    starts: Sequence[int],
    limits: LaunchLimits,
    fill: TmaType | None = None,
    cache: str = "",
    via: str = "auto",
) -> Arguments:
    """Return the launch for a window that begins at ``starts`` and has the shape of ``out``.

    ``fill`` is the type whose NaN is the fill value, or None for zeros. Raises DescriptorError if TMA cannot copy the
    window.
    """
    window = simplify(window_of(src, out, starts))
    arrays = (src, out)
    if via == "plain":
        return plain_plan(window, arrays, limits, _nan_bits(fill))
    try:
        if window.is_one_run and (window.first_byte - window.destination) % 16 == 0:
            return run_plan(window, arrays, limits, cache=cache)
        if fill is not None and not window.is_inside:
            return window_plan(window, arrays, limits, fill, nan=True, cache=cache)
        if window.has_body and window.is_dense:
            window = folded(carried(cropped(window), _WIDEST))
        return window_plan(window, arrays, limits, cache=cache)
    except DescriptorError:
        if via == "tma":
            raise
    return plain_plan(simplify(window_of(src, out, starts)), arrays, limits, _nan_bits(fill))


def window_of(src: ArrayInfo, out: ArrayInfo, starts: Sequence[int]) -> Window:
    """Return the window of the source at ``starts`` that fills ``out``."""
    axes = zip(starts, out.shape, src.shape, src.strides_bytes, out.strides_bytes, strict=True)
    return Window(src.pointer, out.pointer, src.dtype.itemsize, tuple(Axis(*axis) for axis in axes))


def check_window(
    info: ArrayInfo, offset: Sequence[int] | None, shape: Sequence[int] | None, pad: str | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return (offset, shape) with one int per axis. Raises ArgumentError or ArgumentTypeError.

    If the window contains no element of the source, its offset is clamped to the nearest such offset.
    """
    if pad is not None:
        check_choice("pad", pad, PADS)
    starts = whole_numbers("offset", (0,) * len(info.shape) if offset is None else offset, len(info.shape))
    rest = tuple(max(0, size - start) for size, start in zip(info.shape, starts, strict=True))
    extents = rest if shape is None else whole_numbers("shape", shape, len(info.shape))
    for axis, (start, extent, size) in enumerate(zip(starts, extents, info.shape, strict=True)):
        if extent < 0:
            raise ArgumentError(f"shape[{axis}]", extent, "at least 0")
        if pad is None and not 0 <= start <= size - extent:
            allowed = (
                f"0 to {size - extent}" if extent <= size else f"the offset of a window of at most {size} elements"
            )
            raise ArgumentError(f"offset[{axis}]", start, allowed, "pass pad to fill the elements outside the source")
        if not -_INT64 <= start < _INT64:
            raise ArgumentError(f"offset[{axis}]", start, "a signed 64-bit integer")
    check_size(extents, info.dtype, "offset" if shape is None else "shape")
    nearest = zip(starts, extents, info.shape, strict=True)
    return tuple(max(-extent, min(start, size)) for start, extent, size in nearest), extents


def nan_type(info: ArrayInfo, pad: str | None) -> TmaType | None:
    """Return the type whose NaN is the fill value, or None for zeros. Raises ArgumentError if the dtype has no NaN."""
    if pad != "nan":
        return None
    kind = tma_type(info.dtype) if info.dtype.itemsize in (2, 4, 8) and info.dtype.kind in "fV" else None
    if kind is None or not kind.is_float:
        raise ArgumentError(
            "pad",
            f"nan for {info.dtype}",
            '"zeros" unless the dtype is float16, bfloat16, float32 or float64',
            'pass pad="zeros"',
        )
    return kind


def _nan_bits(kind: TmaType | None) -> int:
    if kind is None or kind.numpy is None:
        return 0
    return int(np.array([np.nan], kind.numpy).view(f"uint{8 * kind.element_bytes}")[0])


def part_of(info: ArrayInfo, starts: Sequence[int], extents: Sequence[int]) -> ArrayInfo:
    """Return the elements of an array that a window reads."""
    axes = [Axis(start, extent, size, stride, 0) for start, extent, size, stride in
            zip(starts, extents, info.shape, info.strides_bytes, strict=True)]  # fmt: skip
    pointer = info.pointer + sum(axis.first * axis.source_stride for axis in axes)
    return replace(info, pointer=pointer, shape=tuple(axis.body for axis in axes))


def copy_on_host(src: ArrayInfo, out: ArrayInfo, starts: Sequence[int], nan: bool) -> None:
    """Copy the window with NumPy, and fill elements outside the source with NaN or zeros."""
    result = host_array(out)
    result[...] = np.array(np.nan, out.dtype) if nan else np.zeros((), out.dtype)
    axes = [Axis(*each, 0, 0) for each in zip(starts, out.shape, src.shape, strict=True)]
    if all(axis.body for axis in axes):
        inside = tuple(slice(axis.lead, axis.lead + axis.body) for axis in axes)
        part = tuple(slice(axis.first, axis.first + axis.body) for axis in axes)
        result[inside] = host_array(src)[part]
