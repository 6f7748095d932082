"""Dense weights to int4: round to nearest, per group along K, with an optional search for a tighter range.

Symmetric: the element of largest magnitude e gets level -8, so scale = e / -8 (negative where e is positive). All
sixteen levels serve; max|w| / 7 leaves level -8 unused and max|w| / 8 clips positive extremes. docs/quantization.md
has the measured errors. Asymmetric: scale = (max - min) / 15 over a range that includes 0, zero = round(-min / scale).

The scale is rounded to fp16 or bf16 first and the integers are computed with the rounded one, which is what kernels
use.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from cudatma.dtypes import BFLOAT16, ActivationType, activation_type
from cudatma.errors import ArgumentTypeError, QuantizationError
from cudatma.quantization.layout_v1 import SYMMETRIC_ZERO, group_count
from cudatma.quantization.namespaces import is_float, namespace_of, native_array, on_device_of
from cudatma.quantization.packed import PackedWeight, check_group_size
from cudatma.quantization.packing import pack

#: Shares of the full range that a clip search tries, the full range first, so that searching never makes a group worse.
CLIP_RATIOS = tuple(1.0 - 0.025 * step for step in range(21))

#: Elements worked on at once, so that temporaries stay in the caches of a CPU, or small beside a GPU's memory.
_HOST_CHUNK_ELEMS, _DEVICE_CHUNK_ELEMS = 1 << 21, 1 << 27


def quantize(
    weight: Any, *, group_size: int = 128, symmetric: bool = True, dtype: Any = "float16", clip_search: bool = False
) -> PackedWeight:
    """Quantize a dense weight of shape (K, N) = (in, out) to int4.

    weight: floating point; a NumPy or CuPy array, a torch tensor or anything with DLPack. The result lies on the same
    device. group_size: 32, 64, 128 or -1. dtype: of the scales, fp16 or bf16. clip_search: for each group try the
    ranges of CLIP_RATIOS and keep the one of least squared error (some 20 times slower).
    Ties round to even. Raises QuantizationError for NaN or infinite elements (with their index) and for groups whose
    dequantised values exceed the dtype's range (with the group); ArgumentTypeError for what is no float array.
    """
    return _quantize(native_array(weight, "weight"), group_size, symmetric, activation_type(dtype), clip_search)


def quantize_linear(
    weight: Any, *, group_size: int = 128, symmetric: bool = True, dtype: Any = "float16", clip_search: bool = False
) -> PackedWeight:
    """quantize() for the weight of torch.nn.Linear, which has shape (N, K) = (out, in). The result has shape (K, N)."""
    native = native_array(weight, "weight")
    _check_dense(native)
    return _quantize(native.T, group_size, symmetric, activation_type(dtype), clip_search)


def _check_dense(weight: Any) -> None:
    if weight.ndim != 2 or 0 in weight.shape:
        raise QuantizationError("weight", tuple(weight.shape), "two dimensions, each at least 1")
    if not is_float(weight.dtype):
        raise QuantizationError("weight", f"dtype {weight.dtype}", "float16, bfloat16, float32 or float64")


def _quantize(weight: Any, group_size: int, symmetric: bool, dtype: ActivationType, clip_search: bool) -> PackedWeight:
    _check_dense(weight)
    check_group_size(group_size)
    for name, chosen in (("symmetric", symmetric), ("clip_search", clip_search)):
        if not isinstance(chosen, bool | np.bool_):
            raise ArgumentTypeError(name, repr(chosen), "True, False")
    xp = namespace_of(weight)
    depth, width = weight.shape
    groups = group_count(depth, group_size)
    ratios = CLIP_RATIOS if clip_search else CLIP_RATIOS[:1]
    step = max(1, (_HOST_CHUNK_ELEMS if xp is np else _DEVICE_CHUNK_ELEMS) // depth)
    scales = np.empty((groups, width), dtype=dtype.numpy)
    zeros: NDArray[Any] | None = None if symmetric else np.empty((groups, width), dtype=np.uint8)
    with on_device_of(weight):
        q = xp.empty((depth, width), dtype=np.uint8)
        for first in range(0, width, step):
            columns = slice(first, min(first + step, width))
            block = _grouped(weight[:, columns], group_size, first, xp)
            scale, zero = _search(block, symmetric, ratios, dtype, first, xp)
            levels = _levels(block, scale, zero, xp) + zero[:, None]
            q[:, columns] = levels.reshape(-1, block.shape[2])[:depth].astype(np.uint8)
            scales[:, columns] = _to_host(scale).astype(dtype.numpy)  # exact: the values were rounded already
            if zeros is not None:
                zeros[:, columns] = _to_host(zero).astype(np.uint8)
    return pack(q, scales, zeros, group_size=group_size)


def _grouped(columns: Any, group_size: int, first: int, xp: Any) -> Any:
    """(K, n) -> float32 (G, group, n), the last group padded with zeros, which change neither range nor error."""
    finite = xp.isfinite(columns.astype(np.float32) if columns.dtype == BFLOAT16 else columns)
    if not bool(finite.all()):
        row, column = (int(i) for i in xp.argwhere(~finite)[0])
        got = str(columns[row, column])
        raise QuantizationError(f"weight[{row}, {first + column}]", got, "finite values", "repair the weight first")
    depth, width = columns.shape
    groups = group_count(depth, group_size)
    size = depth if group_size == -1 else group_size
    block = xp.zeros((groups * size, width), dtype=np.float32)
    with np.errstate(over="ignore"):  # a float64 beyond float32 becomes inf and is refused with its group
        block[:depth] = columns
    return block.reshape(groups, size, width)


def _search(
    block: Any, symmetric: bool, ratios: tuple[float, ...], dtype: ActivationType, first: int, xp: Any
) -> tuple[Any, Any]:
    """Scale (float32 that the dtype holds exactly) and zero point (float32) of least squared error, each (G, n)."""
    low, high = xp.minimum(block.min(axis=1), 0), xp.maximum(block.max(axis=1), 0)
    scale, zero = _parameters(low, high, symmetric, dtype, first, xp)
    if len(ratios) == 1:
        return scale, zero
    best = _squared_error(block, scale, zero, xp)
    for ratio in ratios[1:]:
        tried = _parameters(low * np.float32(ratio), high * np.float32(ratio), symmetric, dtype, first, xp)
        error = _squared_error(block, *tried, xp)
        better = error < best
        best = xp.where(better, error, best)
        scale, zero = xp.where(better, tried[0], scale), xp.where(better, tried[1], zero)
    return scale, zero


def _parameters(low: Any, high: Any, symmetric: bool, dtype: ActivationType, first: int, xp: Any) -> tuple[Any, Any]:
    """Scale and zero point of ranges low <= 0 <= high, each (G, n). QuantizationError where the dtype overflows."""
    with np.errstate(over="ignore", invalid="ignore"):
        if symmetric:
            wanted = xp.where(high > -low, high, low) / np.float32(-SYMMETRIC_ZERO)
        else:
            wanted = high / np.float32(15) - low / np.float32(15)
        scale = _rounded(wanted, dtype, xp)
        # A range that the dtype rounds to nothing keeps its smallest step, so that what can be represented survives.
        smallest = np.float32(ml_dtypes.finfo(dtype.numpy).smallest_subnormal)
        scale = xp.where((scale == 0) & (wanted != 0), xp.copysign(smallest, wanted), scale)
        if symmetric:
            zero = xp.full(scale.shape, SYMMETRIC_ZERO, dtype=np.float32)
        else:
            zero = xp.clip(xp.rint(-low / xp.where(scale == 0, np.float32(1), scale)), 0, 15)
        reach = xp.maximum(zero, 15 - zero) * xp.abs(scale)
    largest = float(ml_dtypes.finfo(dtype.numpy).max)
    fits = reach <= largest  # False for NaN and inf as well
    if not bool(fits.all()):
        group, column = (int(i) for i in xp.argwhere(~fits)[0])
        got = f"values from {float(low[group, column]):g} to {float(high[group, column]):g}"
        allowed = f"dequantised values that {dtype.name} holds, up to {largest:g}"
        remedy = (
            "scale the weight down" if dtype.name == "bfloat16" else "use dtype='bfloat16' or scale the weight down"
        )
        raise QuantizationError(f"weight[group {group}, channel {first + column}]", got, allowed, remedy)
    return scale, zero


def _rounded(values: Any, dtype: ActivationType, xp: Any) -> Any:
    """float32 rounded to the nearest fp16 or bf16 value, ties to even, and still float32."""
    if dtype.name == "float16":
        return values.astype(np.float16).astype(np.float32)
    if xp is np:
        return values.astype(dtype.numpy).astype(np.float32)
    bits = xp.ascontiguousarray(values).view(np.uint32)  # on the bits, because not every CuPy has bf16
    even = (bits >> np.uint32(16)) & np.uint32(1)
    return ((bits + np.uint32(0x7FFF) + even) & np.uint32(0xFFFF0000)).view(np.float32)


def _levels(block: Any, scale: Any, zero: Any, xp: Any) -> Any:
    """Integer levels relative to the zero point, -zero .. 15 - zero, as float32 (G, group, n)."""
    steps = block / xp.where(scale == 0, np.float32(1), scale)[:, None]
    return xp.clip(xp.rint(steps), -zero[:, None], 15 - zero[:, None])


def _squared_error(block: Any, scale: Any, zero: Any, xp: Any) -> Any:
    error = _levels(block, scale, zero, xp) * scale[:, None] - block
    return (error * error).sum(axis=1)


def _to_host(array: Any) -> NDArray[Any]:
    host: NDArray[Any] = array if isinstance(array, np.ndarray) else array.get()
    return host
