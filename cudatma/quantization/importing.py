"""Shared steps of the importers: unpack words, infer group sizes, sort rows by group and convert scales."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from cudatma.dtypes import ACTIVATION_TYPES, ActivationType, activation_type
from cudatma.errors import QuantizationError, alternatives, counted
from cudatma.quantization.formats import WORD_VALUES, check_zero_points
from cudatma.quantization.layout_v1 import SYMMETRIC_ZERO, group_count
from cudatma.quantization.namespaces import host_array, is_float
from cudatma.quantization.packed import GROUP_SIZES, MAX_ZERO, PackedWeight, pack
from cudatma.quantization.weight_format import weight_format

#: Group sizes that can be inferred from the number of rows and the number of groups. Callers must specify other group
#: sizes.
FILE_GROUP_SIZES = (32, 64, 128, 256, 512, 1024)
#: The size of imported groups must be a multiple of this number. A group that is larger than packed weights support is
#: split into several groups with the same scale.
_STEP = min(size for size in GROUP_SIZES if size > 0)
ALLOWED_GROUP_SIZES = f"-1 or a multiple of {_STEP}"
_BITS = 4


def check_bits(bits: int) -> None:
    """Raise QuantizationError unless ``bits`` is 4."""
    if type(bits) is not int or bits != _BITS:
        raise QuantizationError("bits", repr(bits), "4", "quantize the model with four bits")


def words(value: Any, field: str) -> NDArray[np.uint8]:
    """Return the bytes, uint8 (R, C, 4), of an int32 or uint32 array (R, C), least significant first."""
    array = host_array(value, field)
    if array.dtype not in (np.int32, np.uint32) or array.ndim != 2:
        raise QuantizationError(field, f"{array.dtype} {array.shape}", "a two-dimensional int32 or uint32 array")
    return np.ascontiguousarray(array).view(np.uint8).reshape(*array.shape, 4)


def nibbles_along_rows(value: Any, field: str) -> NDArray[np.uint8]:
    """Unpack int32 (R, C) into uint8 (8 R, C), where nibble i (bits 4i..4i+3) of word [r, c] is value [8 r + i, c]."""
    data = words(value, field)
    rows, columns, _ = data.shape
    out = np.empty((rows, WORD_VALUES, columns), dtype=np.uint8)
    for byte in range(4):
        np.bitwise_and(data[:, :, byte], 15, out=out[:, 2 * byte])
        np.right_shift(data[:, :, byte], 4, out=out[:, 2 * byte + 1])
    return out.reshape(rows * WORD_VALUES, columns)


def nibbles_along_columns(value: Any, field: str) -> NDArray[np.uint8]:
    """Unpack int32 (R, C) into uint8 (R, 8 C), where nibble i (bits 4i..4i+3) of word [r, c] is value [r, 8 c + i]."""
    data = words(value, field)
    rows, columns, _ = data.shape
    out = np.empty((rows, columns, 4, 2), dtype=np.uint8)
    np.bitwise_and(data, 15, out=out[..., 0])
    np.right_shift(data, 4, out=out[..., 1])
    return out.reshape(rows, columns * WORD_VALUES)


def bytes_along_rows(value: Any, field: str) -> NDArray[np.uint8]:
    """Unpack int32 (R, C) into uint8 (4 R, C), where byte i of word [r, c] is value [4 r + i, c]."""
    data = words(value, field)
    out: NDArray[np.uint8] = data.transpose(0, 2, 1).reshape(-1, data.shape[1])
    return out


def codes_along_columns(value: Any, field: str, bits: int) -> NDArray[np.uint8]:
    """Unpack int32 (R, C) into uint8 (R, 32 / bits * C), where value i of word [r, c] is [r, 32 / bits * c + i]."""
    if bits == _BITS:
        return nibbles_along_columns(value, field)
    data = words(value, field)
    return data.reshape(len(data), -1)


def weight_extents(weight_shape: Any) -> tuple[int, int]:
    """Return (N, K) from compressed-tensors' weight_shape, a tuple or an integer array."""
    if isinstance(weight_shape, tuple | list):
        is_integers = all(isinstance(size, int | np.integer) for size in weight_shape)
        plain = np.asarray(weight_shape, dtype=None if is_integers else object)
    else:
        plain = host_array(weight_shape, "weight_shape")
    if plain.dtype.kind not in "iu" or plain.shape != (2,) or int(plain.min()) < 1:
        got = f"{plain.dtype} {plain.tolist()}"
        raise QuantizationError("weight_shape", got, "two positive integers (N, K)")
    return int(plain[0]), int(plain[1])


def compressed_zero_points(words: Any, n: int, groups: int) -> NDArray[np.uint8]:
    """Convert compressed-tensors' zero points, 32-bit words or int8 values, to uint8 (G, N) with 8 added."""
    values = host_array(words, "weight_zero_point")
    check_zero_points(values.shape, values.dtype == np.int8, n, groups)
    if values.dtype != np.int8:
        return np.ascontiguousarray(nibbles_along_rows(words, "weight_zero_point")[:n].T)
    if values.min() < -SYMMETRIC_ZERO or values.max() >= SYMMETRIC_ZERO:
        got = f"values from {values.min()} to {values.max()}"
        raise QuantizationError("weight_zero_point", got, "-8 to 7", "pass four-bit values")
    values = np.broadcast_to(values.reshape(1, 1), (n, groups)) if values.size == 1 else values
    return np.ascontiguousarray(values.T.astype(np.int16) + SYMMETRIC_ZERO, dtype=np.uint8)


def matrix(value: Any, field: str) -> NDArray[Any]:
    """Return scales as a two-dimensional floating-point array on the host, or raise QuantizationError."""
    array = host_array(value, field)
    if array.ndim != 2 or 0 in array.shape or not is_float(array.dtype):
        allowed = "a two-dimensional, nonempty floating-point array"
        raise QuantizationError(field, f"{array.dtype} {array.shape}", allowed)
    return array


def assemble(
    q: NDArray[np.uint8],
    scales: NDArray[Any],
    zeros: NDArray[np.uint8] | None,
    *,
    group_size: int | None,
    dtype: Any | None,
    g_idx: Any | None = None,
    format: str = "int4",
) -> PackedWeight:
    """Pack imported codes, scales and zero points.

    Parameters
    ----------
    q : ndarray of uint8, shape (K, N)
        Codes, from 0 to 15 for int4.
    scales : ndarray, shape (G, N)
        Floating-point scales.
    zeros : ndarray of uint8, shape (G, N), or None
        Zero points. For a symmetric weight, pass None or an array in which every element is 8.
    group_size : int or None
        Number of rows of K that share a scale. If None, the number is inferred from K and G.
    dtype : dtype or None
        Type of the scales in the result. If None, the type of ``scales`` is used.
    g_idx : array_like of int, shape (K,), optional
        Group of each row.
    format : str, default "int4"
        Format of the codes, "int4" or "int8".

    Returns
    -------
    PackedWeight
        The packed weight.
    """
    k, groups = q.shape[0], scales.shape[0]
    size = file_group_size(k, groups, group_size)
    perm = None if g_idx is None else act_order(g_idx, k, groups, size)
    if perm is not None:
        q = q[perm]
    scales = convert_scales(scales, dtype)
    if zeros is not None and bool((zeros == SYMMETRIC_ZERO).all()):
        zeros = None
    stored = packed_group_size(size)
    if stored != size:
        rows = group_count(k, stored)
        scales = np.repeat(scales, size // stored, axis=0)[:rows]
        zeros = None if zeros is None else np.repeat(zeros, size // stored, axis=0)[:rows]
    return pack_imported(q, scales, zeros, group_size=stored, perm=perm, format=format)


def packed_group_size(size: int) -> int:
    """Return the largest supported group size that divides ``size``, the group size of a file."""
    return size if size in GROUP_SIZES else max(part for part in GROUP_SIZES if part > 0 and size % part == 0)


def check_file_group_size(size: object, field: str) -> None:
    """Raise QuantizationError unless weights with groups of this size can be imported."""
    if type(size) is not int or (size != -1 and (size < _STEP or size % _STEP)):
        raise QuantizationError(
            field, repr(size), ALLOWED_GROUP_SIZES, "quantize the model again with one of these sizes"
        )


def file_group_size(k: int, groups: int, stated: int | None) -> int:
    """Return the group size of a file's tensors, or -1 for a single group.

    If ``stated`` is None, the function infers one of FILE_GROUP_SIZES from the number of groups. Raises
    QuantizationError if no size matches, or if the size does not divide K and another size matches too.
    """
    if stated is not None:
        check_file_group_size(stated, "group_size")
        if group_count(k, stated) != groups:
            allowed = f"divided into {counted(group_count(k, stated), 'group')} for K = {k} and group_size {stated}"
            raise QuantizationError("scales", f"{groups} groups", allowed, "omit group_size to infer it")
        return stated if stated in GROUP_SIZES or groups > 1 else -1
    if groups == 1:
        return -1
    # Tools write multiples of 32 as group sizes. They use other group sizes only if these divide K.
    sizes = [size for size in range(16, k, 16) if group_count(k, size) == groups and not (size % _STEP and k % size)]
    inferable = [size for size in sizes if size in FILE_GROUP_SIZES]
    if not inferable:
        allowed = f"divided into groups of {alternatives(FILE_GROUP_SIZES)} rows, or a single group"
        raise QuantizationError("scales", f"{groups} groups for K = {k}", allowed, "pass group_size")
    if k % inferable[0] and len(sizes) > 1:
        other = next(size for size in sizes if size != inferable[0])
        allowed = f"{inferable[0]} or {other} for K = {k} and {counted(groups, 'group')}"
        remedy = "pass group_size, or specify it in the configuration"
        raise QuantizationError("group_size", None, allowed, remedy)
    return inferable[0]


def act_order(g_idx: Any, k: int, groups: int, size: int) -> NDArray[np.int32] | None:
    """Return the permutation that stably sorts rows by group, or None if the rows are already sorted."""
    index = host_array(g_idx, "g_idx")
    if index.dtype.kind not in "iu" or index.shape != (k,):
        raise QuantizationError("g_idx", f"{index.dtype} {index.shape}", f"an integer array with shape ({k},)")
    if index.min() < 0 or index.max() >= groups:
        raise QuantizationError("g_idx", f"values from {index.min()} to {index.max()}", f"0 to {groups - 1}")
    sorted_index = np.arange(k) // (k if size == -1 else size)
    if np.array_equal(index, sorted_index):
        return None
    perm = np.argsort(index, kind="stable")
    if not np.array_equal(index[perm], sorted_index):
        allowed = f"groups of exactly {size} rows, except that the last group may be shorter"
        raise QuantizationError("g_idx", "groups of unequal size", allowed, "import the unsharded weight")
    return perm.astype(np.int32)


def pack_imported(
    q: NDArray[np.uint8],
    scales: NDArray[Any],
    zeros: NDArray[np.uint8] | None = None,
    *,
    group_size: int,
    perm: NDArray[np.int32] | None = None,
    format: str = "int4",
    tensor_scale: float = 1.0,
) -> PackedWeight:
    """Pack imported codes. Raises QuantizationError if a value exceeds the range of the scales' type."""
    weight = pack(q, scales, zeros, group_size=group_size, perm=perm, format=format, tensor_scale=tensor_scale)
    kind, limit = weight_format(format), float(ml_dtypes.finfo(scales.dtype).max)
    factors = np.abs(scales.astype(np.float64)) * abs(tensor_scale)
    suspects = factors * (kind.largest if zeros is None else MAX_ZERO) > limit
    rows = len(q) if group_size == -1 else group_size
    for group in np.flatnonzero(suspects.any(axis=1)).tolist():
        codes = q[group * rows : (group + 1) * rows]
        levels = kind.values[codes] if zeros is None else codes.astype(np.float32) - zeros[group]
        values = np.abs(levels).max(axis=0) * factors[group]
        if (values > limit).any():
            column = int(np.argmax(values > limit))
            got = f"{scales[group, column]:g}, which gives values up to {values[column]:g}"
            allowed = f"small enough for values of at most {limit:g} (the maximum of {weight.dtype})"
            remedy = (
                "pass dtype='bfloat16' (--dtype bfloat16)" if weight.dtype == "float16" else "scale the weight down"
            )
            raise QuantizationError(f"scales[{group}, {column}]", got, allowed, remedy)
    return weight


def convert_scales(scales: NDArray[Any], dtype: Any | None) -> NDArray[Any]:
    """Return scales in fp16 or bf16. Raises QuantizationError if a scale overflows or becomes 0."""
    if dtype is None:
        if scales.dtype.name not in ACTIVATION_TYPES:
            remedy = "pass dtype='float16' or dtype='bfloat16' to round the scales"
            raise QuantizationError("scales", scales.dtype.name, ", ".join(ACTIVATION_TYPES), remedy)
        return scales
    kind: ActivationType = activation_type(dtype)
    with np.errstate(over="ignore"):
        rounded = scales.astype(kind.numpy)
    invalid = np.isfinite(scales) & (~np.isfinite(rounded) | ((rounded == 0) & (scales != 0)))
    if invalid.any():
        group, column = (int(i) for i in np.argwhere(invalid)[0])
        got = f"{float(scales[group, column]):g}"
        remedy = "pass dtype='bfloat16'" if kind.name == "float16" else "keep the original type of the scales"
        raise QuantizationError(f"scales[{group}, {column}]", got, f"a value in the range of {kind.name}", remedy)
    return rounded
