"""Reductions by TMA, which replace each element of a destination with op(old, new).

L2 performs the operation, so the SMs do not read the destination.

[PTX ISA, cp.reduce.async.bulk, cp.reduce.async.bulk.tensor]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from cudatma.arrays import ArrayInfo
from cudatma.descriptor import REDUCE_TYPES
from cudatma.dtypes import BFLOAT16, TmaType, tma_type
from cudatma.errors import ArgumentError, ArgumentTypeError, alternatives
from cudatma.kernels.arguments import Arguments
from cudatma.kernels.data_movement.checks import as_key, check_device, check_written, described, whole_numbers
from cudatma.kernels.data_movement.configs import check_choice, checked_cache
from cudatma.kernels.data_movement.copy import part_of
from cudatma.kernels.data_movement.movement import LaunchLimits, Movement, checked
from cudatma.kernels.data_movement.plans import run_plan, window_plan
from cudatma.kernels.data_movement.window import Axis, Window, carried, simplify
from cudatma.kernels.engine import run
from cudatma.kernels.host import host_array
from cudatma.kernels.operation import Checked

OPS = tuple(REDUCE_TYPES)
_BITWISE = ("and", "or", "xor")
#: Maps NumPy dtypes to element types in PTX.
_KINDS = {
    np.dtype(name): kind
    for name, kind in (
        *(("uint32", "u32"), ("int32", "s32"), ("uint64", "u64"), ("int64", "s64")),
        *(("float16", "f16"), ("float32", "f32"), ("float64", "f64")),
    )
} | {BFLOAT16: "bf16"}
#: Maps each operation to its dtypes. Bitwise operations ignore the dtype, and a sum of int64 equals a sum of uint64.
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
    """Reduce an array into a window of another array, ``dst[window] = op(dst[window], src)``, with TMA.

    The reduction of each element is atomic, so several reductions into one array may run at the same time. Their order
    is not defined.

    Parameters
    ----------
    dst : array
        Array to update. The addresses, the pitches and the rows of the window must be multiples of 16 bytes in both
        arrays.
    src : array
        The operand, with the same dtype and number of axes as ``dst``. Elements that would be outside dst are ignored.
    op : str
        ``"add"`` (uint32, int32, uint64, int64, float16, bfloat16, float32, float64), ``"min"`` and ``"max"`` (the same
        integers, float16, bfloat16), ``"and"``, ``"or"`` and ``"xor"`` (any integers and bool), or, for uint32,
        ``"inc"`` (old >= new ? 0 : old + 1) and ``"dec"`` (old == 0 or old > new ? new : old - 1).
    offset : sequence of int, optional
        Position of src in dst, one int per axis. It may be negative. Default: zeros.
    cache : str, optional
        L2 policy of the loads; see ``copy``.
    stream : stream, optional
        Stream of the launch. Default: the current stream of the source's library.
    backend : str, optional
        Where to run: ``"cuda"``, ``"emulator"``, ``"reference"`` or ``"auto"``; see ``marlin_gemm``.

    Returns
    -------
    array
        The updated array.

    Raises
    ------
    ArgumentError, ArgumentTypeError, DescriptorError, LaunchError, TargetError, CompileError, DriverError, HazardError
        If an argument is invalid, if TMA cannot reduce the arrays, or if the kernel cannot run; see ``copy``.

    Examples
    --------
    >>> total = np.ones(4, np.int32)
    >>> cudatma.reduce_into(total, np.arange(4, dtype=np.int32), "add", backend="reference").tolist()
    [1, 2, 3, 4]
    """
    return run(REDUCE_INTO, (src,), dst, as_key(op, offset, cache), stream=stream, backend=backend)


class _Problem(NamedTuple):
    src: ArrayInfo
    out: ArrayInfo
    starts: tuple[int, ...]
    op: str
    cache: str


class ReduceInto(Movement[_Problem]):
    """Operation of reduce_into(), with the options op, offset and cache. The result is dst."""

    name: ClassVar[str] = "reduce_into"

    def check(self, inputs: tuple[Any, ...], out: Any, options: tuple[Any, ...], resource: Any) -> Checked[_Problem]:
        into, info, (op, offset, cache) = described(out, "dst"), described(inputs[0], "src"), options
        check_device(into, info, "dst")
        check_choice("op", op, OPS)
        policy = checked_cache(cache)
        if info.dtype != into.dtype or len(info.shape) != len(into.shape):
            got = f"{len(info.shape)} axes of {info.dtype}"
            raise ArgumentError("src", got, f"an array with {len(into.shape)} axes of {into.dtype} to match dst")
        check_dtype(info.dtype, op)
        starts = whole_numbers("offset", (0,) * len(into.shape) if offset is None else offset, len(into.shape))
        check_written(into, info, "dst")
        return checked(_Problem, (info,), into, into.shape, starts, op, policy)

    def plan(self, problem: _Problem, limits: LaunchLimits) -> tuple[Arguments, ...]:
        """Return the launch, or an empty tuple if all of src is outside dst."""
        src, out, starts, op, cache = problem
        is_outside = not clip(src, out, starts)[0].size_elems
        return () if is_outside else (plan_reduce(out, src, starts, op, limits, cache),)

    def reference(self, problem: _Problem, arrays: Mapping[str, ArrayInfo]) -> None:
        """Reduce with NumPy, rounded once to the dtype."""
        part, target = clip(arrays["src"], arrays["out"], problem.starts)
        reduce_on_host(target, part, problem.op)


REDUCE_INTO = ReduceInto()


def check_dtype(dtype: np.dtype[Any], op: str) -> None:
    """Raise ArgumentTypeError unless the hardware supports the operation for this dtype."""
    if op in _BITWISE:
        fits, allowed = dtype.kind in "iub", "an integer type or bool"
    else:
        # The name of a dtype does not show its byte order, but sums require the byte order of the hardware.
        fits, allowed = dtype.name in _NAMES[op] and dtype.isnative, alternatives(_NAMES[op])
    if not fits:
        got = dtype.name if dtype.isnative else f"{dtype.name} in non-native byte order"
        raise ArgumentTypeError("src.dtype", got, f"{allowed} for {op}")


def clip(src: ArrayInfo, dst: ArrayInfo, starts: Sequence[int]) -> tuple[ArrayInfo, ArrayInfo]:
    """Return the overlapping parts of src and dst, where src begins at ``starts`` in dst."""
    target = part_of(dst, starts, src.shape)
    part = part_of(src, tuple(max(0, -start) for start in starts), target.shape)
    return part, target


def plan_reduce(
    dst: ArrayInfo, src: ArrayInfo, starts: Sequence[int], op: str, limits: LaunchLimits, cache: str = "", slot: int = 0
) -> Arguments:
    """Return the launch for an array that begins at ``starts`` in dst and overlaps dst.

    ``slot`` is the maximum size of a box in bytes, or 0 for the usual size. Raises DescriptorError if TMA cannot reduce
    the array.
    """
    part, target = clip(src, dst, starts)
    axes = tuple(
        Axis(0, n, n, s, d) for n, s, d in zip(part.shape, part.strides_bytes, target.strides_bytes, strict=True)
    )
    window, arrays = simplify(Window(part.pointer, target.pointer, src.dtype.itemsize, axes)), (src, dst)
    kind, run_kind = _types(src.dtype, op)
    if window.is_one_run:
        return run_plan(window, arrays, limits, op, run_kind, cache)
    if op in _BITWISE and window.is_dense:
        window = carried(window)
        kind = tma_type(f"uint{8 * window.itemsize}")
    return window_plan(window, arrays, limits, kind, op=op, cache=cache, slot=slot)


def _types(dtype: np.dtype[Any], op: str) -> tuple[TmaType, str]:
    """Return the type of the tensor map and the type in PTX for an operation."""
    if op in _BITWISE:
        wide = dtype.itemsize == 8
        return tma_type("uint64" if wide else "uint32"), "b64" if wide else "b32"
    kind = _KINDS[dtype]
    if op == "add" and kind == "s64":
        return tma_type("uint64"), "u64"
    return tma_type(dtype), kind


def reduce_on_host(dst: ArrayInfo, src: ArrayInfo, op: str) -> None:
    """Reduce with NumPy, rounded once to the dtype."""
    before, new = host_array(dst), host_array(src)
    one = new.dtype.type(1)
    if op == "inc":
        result = np.where(before >= new, 0, before + one)
    elif op == "dec":
        result = np.where((before == 0) | (before > new), new, before - one)
    else:
        names = {"add": "add", "min": "minimum", "max": "maximum"}
        with np.errstate(all="ignore"):  # Infinities and NaNs are valid results, as on the GPU.
            result = getattr(np, names.get(op, f"bitwise_{op}"))(before, new)
    before[...] = result.astype(before.dtype)
