"""Reductions by TMA: each element of a destination becomes op(old, new) in L2; no SM reads it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cudatma.arrays import ArrayInfo
from cudatma.descriptor import REDUCE_TYPES
from cudatma.dtypes import BFLOAT16, TmaType, tma_type
from cudatma.errors import ArgumentError, ArgumentTypeError
from cudatma.kernels.data_movement.call import Call, Place, check_written, described
from cudatma.kernels.data_movement.copy import part_of, whole_numbers
from cudatma.kernels.data_movement.plans import run_plan, window_plan
from cudatma.kernels.data_movement.specs import CACHES, check_choice
from cudatma.kernels.data_movement.window import Axis, Window, carried, simplify
from cudatma.kernels.host import host_array
from cudatma.kernels.launch import Launch

OPS = tuple(REDUCE_TYPES)
_BITWISE = ("and", "or", "xor")
#: NumPy dtype -> PTX's element type.
_KINDS = {
    np.dtype(name): kind
    for name, kind in (
        *(("uint32", "u32"), ("int32", "s32"), ("uint64", "u64"), ("int64", "s64")),
        *(("float16", "f16"), ("float32", "f32"), ("float64", "f64")),
    )
} | {BFLOAT16: "bf16"}
#: Operation -> the dtypes it takes. Bitwise ones see bits alone; a sum of int64 is one of uint64.
_NAMES = {
    "add": ("uint32", "int32", "uint64", "int64", "float16", "bfloat16", "float32", "float64"),
    "min": ("uint32", "int32", "uint64", "int64", "float16", "bfloat16"),
    "max": ("uint32", "int32", "uint64", "int64", "float16", "bfloat16"),
    "inc": ("uint32",),
    "dec": ("uint32",),
}


def reduce_into(
    dst: Any,
    src: Any,
    op: str,
    *,
    offset: Sequence[int] | None = None,
    cache: str | None = None,
    stream: Any = None,
    backend: str | None = None,
) -> Any:
    """``dst[window] = op(dst[window], src)`` by TMA's reductions; returns ``dst``.

    dst, src: arrays of one dtype and as many axes; what of src lies outside of dst is left out. offset: where src
    begins in dst, one int an axis (0 by default), also negative. Each element is atomic by itself: several reductions
    into one array may run at a time, in no fixed order.
    op: "add" ({u,}int32, {u,}int64, float16, bfloat16, float32, float64), "min", "max" (integers as for add, float16,
    bfloat16), "and", "or", "xor" (any integers and bool), "inc" (old >= new ? 0 : old + 1) and "dec" (old == 0 or old >
    new ? new : old - 1), both of uint32.
    cache: L2 policy of the loads, as in copy(). stream, backend: as in copy().

    TMA alone does this: addresses, pitches and rows of the part in both arrays are whole 16-byte chunks.
    [PTX ISA, cp.reduce.async.bulk, cp.reduce.async.bulk.tensor] Raises as copy(); DescriptorError where TMA cannot.
    """
    into, info = described(dst, "dst"), described(src, "src")
    call = Call("reduce_into", backend, info, into, stream, op, offset, cache, field="dst")
    if call.is_known:
        call.again()
        return dst
    check_choice("op", op, OPS)
    check_choice("cache", cache or "", CACHES)
    if info.dtype != into.dtype or len(info.shape) != len(into.shape):
        got = f"{len(info.shape)} axes of {info.dtype}"
        raise ArgumentError("src", got, f"{len(into.shape)} axes of {into.dtype}, as dst")
    check_dtype(info.dtype, op)
    starts = whole_numbers("offset", (0,) * len(into.shape) if offset is None else offset, len(into.shape))
    part, target = clip(info, into, starts)
    check_written(into, info, "dst")
    if not part.size_elems:
        return dst
    if call.place.backend == "reference":
        reduce_on_host(target, part, op)
        return dst
    call.first([plan_reduce(target, part, op, call.place, cache or "")])
    return dst


def check_dtype(dtype: np.dtype[Any], op: str) -> None:
    """ArgumentTypeError unless the hardware has the operation for the dtype."""
    if op in _BITWISE:
        fits, allowed = dtype.kind in "iub", "integers and bool"
    else:
        # A dtype's name does not show its byte order, and sums need the hardware's.
        fits, allowed = dtype.name in _NAMES[op] and dtype.isnative, ", ".join(_NAMES[op])
    if not fits:
        got = dtype.name if dtype.isnative else f"{dtype.name} in the other order of bytes"
        raise ArgumentTypeError("src.dtype", got, f"{allowed} for {op}")


def clip(src: ArrayInfo, dst: ArrayInfo, starts: Sequence[int]) -> tuple[ArrayInfo, ArrayInfo]:
    """The elements of src that lie in dst where it begins at ``starts``, and those of dst that they meet."""
    target = part_of(dst, starts, src.shape)
    part = part_of(src, tuple(max(0, -start) for start in starts), target.shape)
    return part, target


def plan_reduce(dst: ArrayInfo, src: ArrayInfo, op: str, place: Place, cache: str = "", slot: int = 0) -> Launch:
    """The launch for two arrays of one shape. slot: the most bytes of a box, 0 for the usual.

    Raises DescriptorError where TMA cannot.
    """
    axes = zip(src.shape, src.strides_bytes, dst.strides_bytes, strict=True)
    window = Window(src.pointer, dst.pointer, src.dtype.itemsize, tuple(Axis(0, n, n, s, d) for n, s, d in axes))
    window, arrays = simplify(window), (src, dst)
    kind, run_kind = _types(src.dtype, op)
    if window.is_one_run:
        return run_plan(window, arrays, place, op, run_kind, cache)
    if op in _BITWISE and window.is_dense:
        window = carried(window)
        kind = tma_type(f"uint{8 * window.itemsize}")
    return window_plan(window, arrays, place, kind, op=op, cache=cache, slot=slot)


def _types(dtype: np.dtype[Any], op: str) -> tuple[TmaType, str]:
    """The tensor map's type and PTX's for an operation."""
    if op in _BITWISE:
        wide = dtype.itemsize == 8
        return tma_type("uint64" if wide else "uint32"), "b64" if wide else "b32"
    kind = _KINDS[dtype]
    if op == "add" and kind == "s64":
        return tma_type("uint64"), "u64"
    return tma_type(dtype), kind


def reduce_on_host(dst: ArrayInfo, src: ArrayInfo, op: str) -> None:
    """The same by NumPy, rounded once to the dtype."""
    old, new = host_array(dst), host_array(src)
    one = new.dtype.type(1)
    if op == "inc":
        result = np.where(old >= new, 0, old + one)
    elif op == "dec":
        result = np.where((old == 0) | (old > new), new, old - one)
    else:
        names = {"add": "add", "min": "minimum", "max": "maximum"}
        with np.errstate(all="ignore"):  # as the GPU: infinities and NaNs are results
            result = getattr(np, names.get(op, f"bitwise_{op}"))(old, new)
    old[...] = result.astype(old.dtype)
