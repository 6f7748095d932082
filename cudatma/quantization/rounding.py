"""Quantize dense weights by rounding to nearest, with one scale per group along K.

In a symmetric int4 group, the element e with the largest magnitude becomes level -8, so scale = e / -8, which is
negative if e is positive. This scheme uses all sixteen levels. In contrast, the scale max|w| / 7 leaves level -8
unused, and the scale max|w| / 8 clips the largest positive elements. In an asymmetric group, scale = (max - min) / 15
for a range that includes 0, and zero = round(-min / scale). docs/lab/models.md lists the rounding errors. int8 groups
are symmetric, with levels from -128 to 127.

fp8 scales map the largest magnitude of a group to 448. NVFP4 scales, which are e4m3 numbers times one fp32 scale for
the whole weight, map it to 6. MXFP4 scales, which are powers of two, map it to at least 4 and less than 8. Scaled
magnitudes above 6 become 6. [OCP Microscaling Formats Specification 1.0, section 6.3]

Scales are rounded to fp16 or bf16 before the codes are computed, because kernels use the rounded scales.
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
    pack_codes,
    row_blocks,
)
from cudatma.quantization.namespaces import bfloat16_view, is_float, namespace_of, native_array, on_device_of
from cudatma.quantization.packed import PackedWeight
from cudatma.quantization.weight_format import WEIGHT_FORMATS, WeightFormat, weight_format

#: Exponent of the largest e2m1 number.
_E2M1_EXPONENT = 2
#: Fractions of the full range that a clip search tries. The fractions include 1, so that a search never increases
#: the error of a group.
CLIP_RATIOS = tuple(1.0 - 0.025 * step for step in range(21))

#: Number of elements to process at a time, small enough for a CPU's caches and large enough to hide the cost of a
#: kernel launch on a GPU.
_HOST_TILE_ELEMS, _DEVICE_TILE_ELEMS = 1 << 16, 1 << 23


@dataclass(frozen=True, slots=True)
class _Scheme:
    """Quantization scheme, including the number of rows per group and the fractions of a group's range to try."""

    format: WeightFormat
    group_rows: int
    symmetric: bool
    dtype: ActivationType
    ratios: tuple[float, ...]
    tensor_scale: float = 1.0


def quantize(
    weight: Any,
    *,
    group_size: int | None = None,
    symmetric: bool = True,
    dtype: Any = "float16",
    clip_search: bool = False,
    format: str = "int4",
) -> PackedWeight:
    """Quantize a dense weight.

    Parameters
    ----------
    weight : array_like, shape (K, N)
        Floating-point weight (in, out). It may be a NumPy or CuPy array, a torch tensor, or an object that supports
        DLPack.
    group_size : int, optional
        Number of rows of K that share a scale: 32, 64, 128 (the default) or -1 (all rows) for int4 and int8, 32 for
        mxfp4, 16 for nvfp4, 128 (the default) or -1 for fp8.
    symmetric : bool, default True
        Whether to use the offset 8 instead of a zero point for each group. Only int4 supports zero points.
    dtype : str or dtype, default "float16"
        Type of the scales, fp16 or bf16.
    clip_search : bool, default False
        Whether to try smaller ranges for each group and keep the range with the smallest squared error. The search
        makes quantization about 20 times slower.
    format : str, default "int4"
        Format of the weight: ``"int4"``, ``"mxfp4"``, ``"nvfp4"``, ``"fp8"`` or ``"int8"``.

    Returns
    -------
    PackedWeight
        The weight, on the same device as the input.

    Raises
    ------
    QuantizationError
        If the shape or dtype is invalid, if an element is NaN or infinite, or if the dequantized values of a group
        exceed the range of ``dtype``. The error names the element or group.
    ArgumentTypeError
        If ``weight`` is not an array, or if the format is unknown.

    Notes
    -----
    Values are rounded to nearest, with ties to even.

    Examples
    --------
    >>> cudatma.quantize(np.ones((4096, 1024), dtype=np.float32), group_size=64)
    PackedWeight(shape=(4096, 1024), group_size=64, float16, symmetric, host)
    """
    native = native_array(weight, "weight")
    return _quantize(native, group_size, symmetric, activation_type(dtype), clip_search, weight_format(format))


def quantize_linear(
    weight: Any,
    *,
    group_size: int | None = None,
    symmetric: bool = True,
    dtype: Any = "float16",
    clip_search: bool = False,
    format: str = "int4",
) -> PackedWeight:
    """Quantize the weight of a torch.nn.Linear.

    Parameters
    ----------
    weight : array_like, shape (N, K)
        Floating-point weight (out, in).
    group_size : int, optional
        Number of rows of K that share a scale: 32, 64, 128 (the default) or -1 (all rows) for int4 and int8, 32 for
        mxfp4, 16 for nvfp4, 128 (the default) or -1 for fp8.
    symmetric : bool, default True
        Whether to use the offset 8 instead of a zero point for each group. Only int4 supports zero points.
    dtype : str or dtype, default "float16"
        Type of the scales, fp16 or bf16.
    clip_search : bool, default False
        Whether to try smaller ranges for each group and keep the range with the smallest squared error.
    format : str, default "int4"
        Format of the weight; see ``quantize``.

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
    return _quantize(native.T, group_size, symmetric, activation_type(dtype), clip_search, weight_format(format))


def _check_dense(weight: Any) -> None:
    if weight.ndim != 2 or 0 in weight.shape:
        raise QuantizationError("weight", tuple(weight.shape), "two-dimensional and nonempty")
    if not is_float(weight.dtype):
        raise QuantizationError("weight", f"dtype {weight.dtype}", "a float16, bfloat16, float32 or float64 array")


def _quantize(
    weight: Any, group_size: int | None, symmetric: bool, dtype: ActivationType, clip_search: bool, kind: WeightFormat
) -> PackedWeight:
    _check_dense(weight)
    group_size = kind.default_group_size if group_size is None else group_size
    kind.check_group_size(group_size)
    for name, chosen in (("symmetric", symmetric), ("clip_search", clip_search)):
        if not isinstance(chosen, bool | np.bool_):
            raise ArgumentTypeError(name, repr(chosen), "True, False")
    kind.check_symmetric(bool(symmetric))
    xp = namespace_of(weight)
    k, n = weight.shape
    group_rows = blocks(k) * BLOCK if group_size == -1 else group_size
    ratios = CLIP_RATIOS if clip_search else CLIP_RATIOS[:1]
    n64, rows_of_blocks = blocks(n), row_blocks(k, kind.bits)
    table = (group_count(k, group_size), n64 * BLOCK)
    with on_device_of(weight), np.errstate(over="ignore", invalid="ignore"):
        tensor_scale = _tensor_scale(weight, kind, xp)
        scheme = _Scheme(kind, group_rows, bool(symmetric), dtype, ratios, tensor_scale)
        qweight = xp.empty((n64, rows_of_blocks, BLOCK_BYTES), dtype=np.uint8)
        scales = xp.zeros(table, dtype=np.float32)
        zeros = xp.full(table, SYMMETRIC_ZERO, dtype=np.uint8)
        fits = xp.ones(table, dtype=np.bool_)
        for rows, columns in _tiles(k, n, group_rows, xp):
            block = _grouped(weight[rows, columns], group_rows, xp)
            if tensor_scale != 1:
                block /= np.float32(tensor_scale)
            place = slice(rows.start // group_rows, rows.start // group_rows + len(block)), columns
            scales[place], zero, fits[place] = _search(block, scheme, xp)
            zeros[place] = zero
            packed = _pack_tile(_levels(block, scales[place], zero, scheme, xp), rows.stop - rows.start, kind, xp)
            first_n, first_k = columns.start // BLOCK, row_blocks(rows.start, kind.bits)
            qweight[first_n : first_n + packed.shape[0], first_k : first_k + packed.shape[1]] = packed
        if not bool(fits.all()):  # Apart from _tensor_scale(), this is the only wait for a GPU.
            _raise_unfit(weight, fits, group_rows, dtype, xp)
        return PackedWeight(
            qweight=qweight.reshape(n64 * rows_of_blocks, BLOCK_BYTES),
            scales=_narrowed(order_columns(scales), dtype, xp),
            zeros=None if symmetric else order_columns(zeros),
            perm=None,
            shape=(k, n),
            group_size=group_size,
            dtype=dtype.name,
            format=kind.name,
            tensor_scale=tensor_scale,
        )


def _tensor_scale(weight: Any, kind: WeightFormat, xp: Any) -> float:
    """Return the scale of the whole weight, which maps the largest group scale to 448, the largest e4m3 number."""
    if not kind.has_tensor_scale:
        return 1.0
    largest = max(float(xp.abs(_float32(rows, xp)).max()) for rows in _row_chunks(weight, xp))
    scale = np.float32(largest / (kind.largest * WEIGHT_FORMATS["fp8"].largest))
    return float(scale) if np.isfinite(scale) and scale > 0 else 1.0


def _row_chunks(weight: Any, xp: Any) -> Iterator[Any]:
    step = max(1, _tile_elems(xp) // weight.shape[1])
    for first in range(0, weight.shape[0], step):
        yield weight[first : first + step]


def _tiles(k: int, n: int, group_rows: int, xp: Any) -> Iterator[tuple[slice, slice]]:
    """Yield the rows and columns of tiles that consist of whole groups and whole 64 x 64 blocks.

    If possible, a tile is at most one eighth of the weight, so that temporary arrays stay small.
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
    # A float64 value beyond the range of float32 becomes infinite, which the range check of its group reports.
    block[:rows] = _float32(tile, xp) if tile.dtype == BFLOAT16 else tile
    block[rows:] = 0
    return block.reshape(groups, group_rows, n)


def _pack_tile(levels: Any, rows: int, kind: WeightFormat, xp: Any) -> Any:
    """Pack codes, float32 (G, group_rows, n), into bytes (n64, blocks along K, 2048).

    Only the first ``rows`` rows are inside K. Padding dequantizes to 0: padding rows hold the group's zero point, and
    padding columns hold the code of 0.
    """
    n = levels.shape[2]
    values = levels.reshape(-1, n)[: blocks(rows) * BLOCK]
    q = xp.full((blocks(rows) * BLOCK, blocks(n) * BLOCK), kind.zero_code, dtype=np.uint8)
    q[: len(values), :n] = values
    return pack_codes(q, kind.bits, kind.is_e2m1, xp).reshape(blocks(n), -1, BLOCK_BYTES)


def _search(block: Any, scheme: _Scheme, xp: Any) -> tuple[Any, Any, Any]:
    """Return the scale and zero point (float32) with the smallest squared error, and whether all candidates fit.

    Each result has shape (G, n). The dtype represents the scales exactly.
    """
    low, high = xp.minimum(block.min(axis=1), 0), xp.maximum(block.max(axis=1), 0)
    scale, zero, fits = _parameters(low, high, scheme, xp)
    if len(scheme.ratios) == 1:
        return scale, zero, fits
    best = _squared_error(block, scale, zero, scheme, xp)
    for ratio in scheme.ratios[1:]:
        candidate = _parameters(low * np.float32(ratio), high * np.float32(ratio), scheme, xp)
        error = _squared_error(block, candidate[0], candidate[1], scheme, xp)
        better = error < best
        best = xp.where(better, error, best)
        scale, zero = xp.where(better, candidate[0], scale), xp.where(better, candidate[1], zero)
        fits &= candidate[2]
    return scale, zero, fits


def _parameters(low: Any, high: Any, scheme: _Scheme, xp: Any) -> tuple[Any, Any, Any]:
    """Return the scale and zero point for ranges low <= 0 <= high, and whether their values fit in the dtype.

    Each result has shape (G, n).
    """
    kind = scheme.format
    if kind.is_float:
        return _float_parameters(xp.maximum(high, -low), scheme, xp)
    if scheme.symmetric:
        exact = xp.where(high > -low, high, low) / np.float32(-kind.zero_code)
    else:
        exact = high / np.float32(15) - low / np.float32(15)
    scale = _rounded_up_from_0(exact, scheme.dtype, xp)
    if scheme.symmetric:
        zero = xp.full(scale.shape, kind.zero_code, dtype=np.float32)
    else:
        zero = xp.clip(xp.rint(-low / _divisor(scale, xp)), 0, 15)
    reach = xp.maximum(zero, _highest_code(kind) - zero) * xp.abs(scale)
    # low + high is finite only if both are. It cannot overflow, because low <= 0 <= high.
    return scale, zero, (reach <= _largest(scheme.dtype)) & xp.isfinite(low + high)


def _float_parameters(largest: Any, scheme: _Scheme, xp: Any) -> tuple[Any, Any, Any]:
    """Return the result of _parameters() for a floating-point format, given the largest magnitude of each group."""
    kind = scheme.format
    if kind.name == "mxfp4":
        # frexp() returns mantissas in [0.5, 1), so subtract 1 to get the floating-point exponent.
        scale = xp.ldexp(np.float32(1), xp.frexp(largest)[1] - 1 - _E2M1_EXPONENT).astype(np.float32)
        limits = ml_dtypes.finfo(scheme.dtype.numpy)
        # The product of the smallest code and a scale must not underflow.
        smallest = float(limits.smallest_subnormal) / kind.smallest
        scale = xp.clip(scale, np.float32(smallest), np.float32(2.0 ** (limits.maxexp - 1)))
    else:
        exact = largest / np.float32(kind.largest)
        scale = _rounded_e4m3(exact, xp) if kind.name == "nvfp4" else _rounded_up_from_0(exact, scheme.dtype, xp)
    scale = xp.where(largest == 0, np.float32(1), scale)
    reach = xp.minimum(kind.largest * scale, largest) * np.float32(abs(scheme.tensor_scale))
    fits = (reach <= _largest(scheme.dtype)) & xp.isfinite(largest) & (scale > 0)
    return scale, xp.zeros(scale.shape, dtype=np.float32), fits


def _rounded_up_from_0(values: Any, dtype: ActivationType, xp: Any) -> Any:
    """Round scales to the dtype, but never round a nonzero scale to 0.

    Such a scale becomes the smallest subnormal number, because otherwise all elements of the group would become 0.
    """
    scale = _rounded(values, dtype, xp)
    smallest = np.float32(ml_dtypes.finfo(dtype.numpy).smallest_subnormal)
    return xp.where((scale == 0) & (values != 0), xp.copysign(smallest, values), scale)


def _rounded_e4m3(values: Any, xp: Any) -> Any:
    """Round nonnegative values to positive e4m3 numbers."""
    kind = WEIGHT_FORMATS["fp8"]
    codes = xp.maximum(kind.nearest(values, xp), 1).astype(np.uint8)
    return xp.asarray(kind.values)[codes]


def _highest_code(kind: WeightFormat) -> int:
    return len(kind.values) - 1


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
            raise QuantizationError(f"weight[{first + row}, {column}]", got, "finite", "replace NaNs and infinities")
    group, column = (int(i) for i in xp.argwhere(~fits)[0])
    values = _float32(weight[group * group_rows : (group + 1) * group_rows, column], xp)
    got = f"values from {min(float(values.min()), 0):g} to {max(float(values.max()), 0):g}"
    allowed = f"in the range of {dtype.name} after dequantization (magnitudes up to {_largest(dtype):g})"
    remedy = "scale the weight down" if dtype.name == "bfloat16" else "pass dtype='bfloat16', or scale the weight down"
    raise QuantizationError(f"weight[group {group}, column {column}]", got, allowed, remedy)


def _largest(dtype: ActivationType) -> float:
    return float(ml_dtypes.finfo(dtype.numpy).max)


def _float32(values: Any, xp: Any) -> Any:
    """Convert to float32. On a GPU, convert the bits of bf16 values, because some CuPy versions do not support bf16."""
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


def _levels(block: Any, scale: Any, zero: Any, scheme: _Scheme, xp: Any) -> Any:
    """Return codes as float32 (G, group_rows, n)."""
    steps = block / _divisor(scale, xp)[:, None]
    if scheme.format.is_float:
        return scheme.format.nearest(steps, xp)
    xp.rint(steps, out=steps)
    steps += zero[:, None]
    return xp.clip(steps, 0, _highest_code(scheme.format), out=steps)


def _squared_error(block: Any, scale: Any, zero: Any, scheme: _Scheme, xp: Any) -> Any:
    error = _levels(block, scale, zero, scheme, xp)
    if scheme.format.is_float:
        error = xp.asarray(scheme.format.values)[error.astype(np.uint8)]
    else:
        error -= zero[:, None]
    error *= scale[:, None]
    error -= block
    error *= error
    return error.sum(axis=1)
