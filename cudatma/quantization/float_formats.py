"""Import fp8, NVFP4 and MXFP4 weights."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from cudatma.errors import QuantizationError
from cudatma.quantization.formats import FP8_BLOCK_SIZE
from cudatma.quantization.importing import convert_scales, pack_imported
from cudatma.quantization.namespaces import host_array
from cudatma.quantization.packed import PackedWeight

#: Exponent bias of e8m0, and its code for NaN.
_E8M0_BIAS, _E8M0_NAN = 127, 255


def from_fp8_blocks(scale_inv: Any, weight: Any, *, dtype: Any) -> PackedWeight:
    """Import an e4m3 weight (N, K) with one scale per block of 128 x 128 values."""
    codes = _bytes(weight, "weight")
    scales = np.repeat(host_array(scale_inv, "weight_scale_inv"), FP8_BLOCK_SIZE, axis=0)[: codes.shape[0]]
    return _packed(codes, scales, "fp8", FP8_BLOCK_SIZE, dtype)


def from_fp8_channels(scale: Any, weight: Any, *, dtype: Any) -> PackedWeight:
    """Import an e4m3 weight (N, K) with one scale per tensor or one scale per output."""
    codes = _bytes(weight, "weight")
    scales = np.broadcast_to(host_array(scale, "weight_scale").reshape(-1, 1), (codes.shape[0], 1))
    return _packed(codes, scales, "fp8", -1, dtype)


def from_nvfp4(tensor_scale: Any, weight: Any, scale: Any, *, dtype: Any, inverse: bool = False) -> PackedWeight:
    """Import an NVFP4 weight, uint8 (N, K / 2), with e4m3 scales (N, K / 16) and a tensor scale.

    If ``inverse`` is true, values are divided by the tensor scale, as in compressed-tensors.
    """
    name = "weight_global_scale" if inverse else "weight_scale_2"
    factor = host_array(tensor_scale, name).astype(np.float32).reshape(-1)
    if factor.size != 1 or not np.isfinite(factor[0]) or factor[0] == 0:
        remedy = "copy or download the checkpoint again"
        raise QuantizationError(name, factor.tolist(), "a single finite, nonzero number", remedy)
    value = np.float32(1) / factor[0] if inverse else factor[0]
    scales = scale_values(scale, "weight_scale")
    return _packed(_nibbles(_bytes(weight, "weight")), scales, "nvfp4", 16, dtype, float(value))


def from_mxfp4(blocks: Any, scales: Any, *, dtype: Any) -> PackedWeight:
    """Import an MXFP4 weight, uint8 (N, K / 32, 16), with e8m0 scales, uint8 (N, K / 32)."""
    words = _bytes(blocks, "blocks")
    codes, values = _nibbles(words.reshape(len(words), -1)), scale_values(scales, "scales")
    if codes.size and codes.shape == (len(values), 32 * values[0].size):
        # All-zero groups often have the smallest scale, 2^-127, which would extend the range of the weight's scales.
        is_zero = ~(codes & 7).reshape(*values.shape, 32).any(axis=2)
        values = np.where(is_zero & np.isfinite(values), np.float32(0), values)
    return _packed(codes, values, "mxfp4", 32, dtype)


def scale_values(scales: Any, field: str) -> NDArray[Any]:
    """Return the values of scales that are stored as floating-point numbers, or as e8m0 numbers in uint8."""
    array = host_array(scales, field)
    if array.dtype == np.uint8:
        values: NDArray[np.float32] = np.ldexp(np.float32(1), array.astype(np.int32) - _E8M0_BIAS)
        values[array == _E8M0_NAN] = np.nan
        return values
    return array.astype(np.float32) if array.dtype == ml_dtypes.float8_e4m3fn else array


def _bytes(value: Any, field: str) -> NDArray[np.uint8]:
    array = host_array(value, field)
    if array.dtype.itemsize != 1:
        raise QuantizationError(field, f"{array.dtype} {array.shape}", "an array with one byte per element")
    return np.ascontiguousarray(array).view(np.uint8)


def _nibbles(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Unpack bytes (N, K / 2) into codes (N, K), low nibble first."""
    return np.stack([codes & 15, codes >> 4], axis=2).reshape(len(codes), -1)


def _packed(
    codes: NDArray[np.uint8], scales: NDArray[Any], name: str, group_size: int, dtype: Any, tensor_scale: float = 1.0
) -> PackedWeight:
    """Pack codes (N, K) and scales (N, G)."""
    columns = convert_scales(np.ascontiguousarray(scales.T), dtype)
    q = np.ascontiguousarray(codes.T)
    return pack_imported(q, columns, group_size=group_size, format=name, tensor_scale=tensor_scale)
