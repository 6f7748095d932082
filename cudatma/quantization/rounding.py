"""Quantize dense weights to int4 by rounding to nearest, with one scale per group along K.

In a symmetric group, the element e with the largest magnitude is rounded to level -8, so that scale = e / -8, which is
negative if e is positive. This scheme uses all sixteen levels. In contrast, max|w| / 7 leaves level -8 unused, and
max|w| / 8 clips positive extremes. In an asymmetric group, scale = (max - min) / 15 over a range that includes 0, and
zero = round(-min / scale). docs/lab/models.md lists the errors.

The scale is rounded to fp16 or bf16 before the integers are computed, because kernels use the rounded scale.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import ml_dtypes
import numpy as np

from cudatma.dtypes import BFLOAT16, ActivationType, activation_type
from cudatma.errors import ArgumentTypeError, QuantizationError
from cudatma.quantization.layout_v1 import (
    BLOCK,
    BLOCK_BYTES,
    SYMMETRIC_ZERO,
    blocks,
    group_count,
    order_columns,
    pack_values,
)
from cudatma.quantization.namespaces import bfloat16_view, is_float, namespace_of, native_array, on_device_of
from cudatma.quantization.packed import PackedWeight, check_group_size

#: Fractions of the full range that a clip search tries. The fractions include 1, so that a search never increases
#: the error of a group.
CLIP_RATIOS = tuple(1.0 - 0.025 * step for step in range(21))

#: Number of elements to process at a time, small enough for a CPU's caches and large enough to hide the cost of a
#: kernel launch on a GPU.
_HOST_TILE_ELEMS, _DEVICE_TILE_ELEMS = 1 << 16, 1 << 23


@dataclass(frozen=True, slots=True)
class _Scheme:
    """Quantization scheme, including the number of rows per group and the fractions of a group's range to try."""

    group_rows: int
    symmetric: bool
    dtype: ActivationType
    ratios: tuple[float, ...]


def quantize(
    weight: Any, *, group_size: int = 128, symmetric: bool = True, dtype: Any = "float16", clip_search: bool = False
) -> PackedWeight:
    """Quantize a dense weight to int4.

    Parameters
    ----------
    weight : array_like, shape (K, N)
        Floating-point weight (in, out). It may be a NumPy or CuPy array, a torch tensor, or an object that supports
        DLPack.
    group_size : int, default 128
        Number of rows of K that share a scale: 32, 64, 128, or -1 for all rows.
    symmetric : bool, default True
        Whether to use the offset 8 instead of a zero point for each group.
    dtype : str or dtype, default "float16"
        Type of the scales, fp16 or bf16.
    clip_search : bool, default False
        Whether to try smaller ranges for each group and keep the range with the smallest squared error. The search
        makes quantization about 20 times slower.

    Returns
    -------
    PackedWeight
        The weight, on the same device as the input.

    Raises
    ------
    QuantizationError
        If an element is NaN or infinite, or if the dequantized values of a group exceed the range of ``dtype``. The
        error names the element or group.
    ArgumentTypeError
        If ``weight`` is not an array.

    Notes
    -----
    Values are rounded to nearest, with ties to even.

    Examples
    --------
    >>> cudatma.quantize(np.ones((4096, 1024), dtype=np.float32), group_size=64)
    PackedWeight(shape=(4096, 1024), group_size=64, float16, symmetric, host)
    """
    return _quantize(native_array(weight, "weight"), group_size, symmetric, activation_type(dtype), clip_search)


def quantize_linear(
    weight: Any, *, group_size: int = 128, symmetric: bool = True, dtype: Any = "float16", clip_search: bool = False
) -> PackedWeight:
    """Quantize the weight of a torch.nn.Linear to int4.

    Parameters
    ----------
    weight : array_like, shape (N, K)
        Floating-point weight (out, in).
    group_size : int, default 128
        Number of rows of K that share a scale: 32, 64, 128, or -1 for all rows.
    symmetric : bool, default True
        Whether to use the offset 8 instead of a zero point for each group.
    dtype : str or dtype, default "float16"
        Type of the scales, fp16 or bf16.
    clip_search : bool, default False
        Whether to try smaller ranges for each group and keep the range with the smallest squared error.

    Returns
    -------
    PackedWeight
        The weight, of shape (K, N), on the same device as the input.

    Raises
    ------
    QuantizationError
        If an element is NaN or infinite, or if the dequantized values of a group exceed the range of ``dtype``.
    ArgumentTypeError
        If ``weight`` is not an array.
    """
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
    k, n = weight.shape
    group_rows = blocks(k) * BLOCK if group_size == -1 else group_size
    scheme = _Scheme(group_rows, bool(symmetric), dtype, CLIP_RATIOS if clip_search else CLIP_RATIOS[:1])
    k64, n64 = blocks(k), blocks(n)
    table = (group_count(k, group_size), n64 * BLOCK)
    with on_device_of(weight), np.errstate(over="ignore", invalid="ignore"):
        qweight = xp.empty((n64, k64, BLOCK_BYTES), dtype=np.uint8)
        scales = xp.zeros(table, dtype=np.float32)
        zeros = xp.full(table, SYMMETRIC_ZERO, dtype=np.uint8)
        fits = xp.ones(table, dtype=np.bool_)
        for rows, columns in _tiles(k, n, group_rows, xp):
            block = _grouped(weight[rows, columns], group_rows, xp)
            place = slice(rows.start // group_rows, rows.start // group_rows + len(block)), columns
            scales[place], zero, fits[place] = _search(block, scheme, xp)
            zeros[place] = zero
            packed = _pack_tile(_levels(block, scales[place], zero, xp), rows.stop - rows.start, xp)
            first_n, first_k = columns.start // BLOCK, rows.start // BLOCK
            qweight[first_n : first_n + packed.shape[0], first_k : first_k + packed.shape[1]] = packed
        if not bool(fits.all()):  # Before the weight is checked, only this line waits for a GPU.
            _raise_unfit(weight, fits, group_rows, dtype, xp)
        return PackedWeight(
            qweight=qweight.reshape(n64 * k64, BLOCK_BYTES),
            scales=_narrowed(order_columns(scales), dtype, xp),
            zeros=None if symmetric else order_columns(zeros),
            perm=None,
            shape=(k, n),
            group_size=group_size,
            dtype=dtype.name,
        )


def _tiles(k: int, n: int, group_rows: int, xp: Any) -> Iterator[tuple[slice, slice]]:
    """Yield the rows and columns of tiles that consist of whole groups and whole 64 x 64 blocks.

    If the block size allows it, a tile is at most an eighth of the weight, so that temporary arrays stay small.
    """
    elems = min(_tile_elems(xp), k * n // 8)
    min_rows = max(group_rows, BLOCK)
    column_step = min(max(1, elems // min_rows // BLOCK), blocks(n)) * BLOCK
    row_step = min_rows * max(1, elems // (min_rows * column_step))
    for row in range(0, k, row_step):
        for column in range(0, n, column_step):
            yield slice(row, min(row + row_step, k)), slice(column, min(column + column_step, n))


def _tile_elems(xp: Any) -> int:
    return _HOST_TILE_ELEMS if xp is np else _DEVICE_TILE_ELEMS


def _grouped(tile: Any, group_rows: int, xp: Any) -> Any:
    """Copy a tile (k, n) to float32 (G, group_rows, n).

    Pad the last group with zeros, which affect neither the range nor the error.
    """
    rows, n = tile.shape
    groups = -(-rows // group_rows)
    block = xp.empty((groups * group_rows, n), dtype=np.float32)
    # A float64 value beyond the range of float32 becomes infinite. Its group then raises an error.
    block[:rows] = _float32(tile, xp) if tile.dtype == BFLOAT16 else tile
    block[rows:] = 0
    return block.reshape(groups, group_rows, n)


def _pack_tile(levels: Any, rows: int, xp: Any) -> Any:
    """Pack integers from 0 to 15, float32 (G, group_rows, n) with ``rows`` rows inside K, into bytes (n64, k64, 2048).

    Padding dequantizes to 0. Padding rows hold the group's zero point. Padding columns hold 8.
    """
    n = levels.shape[2]
    values = levels.reshape(-1, n)[: blocks(rows) * BLOCK]
    q = xp.full((blocks(rows) * BLOCK, blocks(n) * BLOCK), SYMMETRIC_ZERO, dtype=np.uint8)
    q[: len(values), :n] = values
    return pack_values(q).reshape(blocks(n), blocks(rows), BLOCK_BYTES)


def _search(block: Any, scheme: _Scheme, xp: Any) -> tuple[Any, Any, Any]:
    """Return the scale and zero point (float32) with the least squared error, and whether all candidates fit.

    Each result has shape (G, n). The scales are exact in the dtype.
    """
    low, high = xp.minimum(block.min(axis=1), 0), xp.maximum(block.max(axis=1), 0)
    scale, zero, fits = _parameters(low, high, scheme, xp)
    if len(scheme.ratios) == 1:
        return scale, zero, fits
    best = _squared_error(block, scale, zero, xp)
    for ratio in scheme.ratios[1:]:
        candidate = _parameters(low * np.float32(ratio), high * np.float32(ratio), scheme, xp)
        error = _squared_error(block, candidate[0], candidate[1], xp)
        better = error < best
        best = xp.where(better, error, best)
        scale, zero = xp.where(better, candidate[0], scale), xp.where(better, candidate[1], zero)
        fits &= candidate[2]
    return scale, zero, fits


def _parameters(low: Any, high: Any, scheme: _Scheme, xp: Any) -> tuple[Any, Any, Any]:
    """Return the scale and zero point of ranges low <= 0 <= high, and whether their values fit in the dtype.

    Each result has shape (G, n).
    """
    if scheme.symmetric:
        exact = xp.where(high > -low, high, low) / np.float32(-SYMMETRIC_ZERO)
    else:
        exact = high / np.float32(15) - low / np.float32(15)
    scale = _rounded(exact, scheme.dtype, xp)
    # If a scale rounds to 0, use the smallest positive scale of the dtype, so that the largest values do not become 0.
    smallest = np.float32(ml_dtypes.finfo(scheme.dtype.numpy).smallest_subnormal)
    scale = xp.where((scale == 0) & (exact != 0), xp.copysign(smallest, exact), scale)
    if scheme.symmetric:
        zero = xp.full(scale.shape, SYMMETRIC_ZERO, dtype=np.float32)
    else:
        zero = xp.clip(xp.rint(-low / _divisor(scale, xp)), 0, 15)
    reach = xp.maximum(zero, 15 - zero) * xp.abs(scale)
    # Because low <= 0 <= high, low + high is finite if low and high are finite.
    return scale, zero, (reach <= _largest(scheme.dtype)) & xp.isfinite(low + high)


def _raise_unfit(weight: Any, fits: Any, group_rows: int, dtype: ActivationType, xp: Any) -> NoReturn:
    """Raise QuantizationError for the first element that is not finite, otherwise for the first group out of range."""
    k, n = weight.shape
    step = max(1, _tile_elems(xp) // n)
    for first in range(0, k, step):
        rows = weight[first : first + step]
        finite = xp.isfinite(_float32(rows, xp) if rows.dtype == BFLOAT16 else rows)
        if not bool(finite.all()):
            row, column = (int(i) for i in xp.argwhere(~finite)[0])
            got = str(rows[row, column])
            raise QuantizationError(f"weight[{first + row}, {column}]", got, "finite values", "correct the weight")
    group, column = (int(i) for i in xp.argwhere(~fits)[0])
    values = _float32(weight[group * group_rows : (group + 1) * group_rows, column], xp)
    got = f"values from {min(float(values.min()), 0):g} to {max(float(values.max()), 0):g}"
    allowed = f"dequantized values in the range of {dtype.name}, at most {_largest(dtype):g}"
    remedy = "scale the weight down" if dtype.name == "bfloat16" else "pass dtype='bfloat16', or scale the weight down"
    raise QuantizationError(f"weight[group {group}, column {column}]", got, allowed, remedy)


def _largest(dtype: ActivationType) -> float:
    return float(ml_dtypes.finfo(dtype.numpy).max)


def _float32(values: Any, xp: Any) -> Any:
    """Convert to float32. Convert bf16 on a GPU by its bits, because some versions of CuPy do not support bf16."""
    if xp is np or values.dtype != BFLOAT16:
        return values.astype(np.float32, copy=False)
    return (values.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)


def _rounded(values: Any, dtype: ActivationType, xp: Any) -> Any:
    """Round float32 values to the nearest fp16 or bf16 values, with ties to even, and return them as float32."""
    if dtype.name == "float16":
        return values.astype(np.float16).astype(np.float32)
    if xp is np:
        return values.astype(dtype.numpy).astype(np.float32)
    bits = xp.ascontiguousarray(values).view(np.uint32)
    even = (bits >> np.uint32(16)) & np.uint32(1)
    return ((bits + np.uint32(0x7FFF) + even) & np.uint32(0xFFFF0000)).view(np.float32)


def _narrowed(values: Any, dtype: ActivationType, xp: Any) -> Any:
    """Convert float32 values that are exact in fp16 or bf16 to that type."""
    if xp is np or dtype.name == "float16":
        return values.astype(dtype.numpy)
    return bfloat16_view((values.view(np.uint32) >> np.uint32(16)).astype(np.uint16))


def _divisor(scale: Any, xp: Any) -> Any:
    return xp.where(scale == 0, np.float32(1), scale)


def _levels(block: Any, scale: Any, zero: Any, xp: Any) -> Any:
    """Return integers from 0 to 15 as float32 (G, group_rows, n)."""
    steps = block / _divisor(scale, xp)[:, None]
    xp.rint(steps, out=steps)
    steps += zero[:, None]
    return xp.clip(steps, 0, 15, out=steps)


def _squared_error(block: Any, scale: Any, zero: Any, xp: Any) -> Any:
    error = _levels(block, scale, zero, xp)
    error -= zero[:, None]
    error *= scale[:, None]
    error -= block
    error *= error
    return error.sum(axis=1)
