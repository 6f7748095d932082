"""Shared steps of the importers: nibbles of 32-bit words, group sizes, activation order, scale types."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cudatma.dtypes import ACTIVATION_TYPES, ActivationType, activation_type
from cudatma.errors import QuantizationError
from cudatma.quantization.formats import WORD_VALUES, check_zero_points
from cudatma.quantization.layout_v1 import SYMMETRIC_ZERO, group_count
from cudatma.quantization.namespaces import host_array, is_float
from cudatma.quantization.packed import GROUP_SIZES, PackedWeight, pack

#: Group sizes that are inferred from the numbers of rows and groups; others have to be stated.
FILE_GROUP_SIZES = (32, 64, 128, 256, 512, 1024)
#: Any multiple of the smallest can be imported: groups that packed weights lack become several with the same scale.
_STEP = min(size for size in GROUP_SIZES if size > 0)
ALLOWED_GROUP_SIZES = f"-1, or a multiple of {_STEP}"
_BITS = 4


def check_bits(bits: int) -> None:
    """Raise QuantizationError unless ``bits`` is 4."""
    if bits != _BITS:
        raise QuantizationError("bits", repr(bits), "4", "quantize the model again with four bits")


def words(value: Any, field: str) -> NDArray[np.uint8]:
    """An int32 or uint32 array (R, C) as its bytes, uint8 (R, C, 4), least significant first."""
    array = host_array(value, field)
    if array.dtype not in (np.int32, np.uint32) or array.ndim != 2:
        raise QuantizationError(field, f"{array.dtype} {array.shape}", "int32 with two dimensions")
    return np.ascontiguousarray(array).view(np.uint8).reshape(*array.shape, 4)


def nibbles_along_rows(value: Any, field: str) -> NDArray[np.uint8]:
    """int32 (R, C) -> uint8 (8 R, C): nibble i (bits 4i..4i+3) of word [r, c] is value [8 r + i, c]."""
    data = words(value, field)
    rows, columns, _ = data.shape
    out = np.empty((rows, WORD_VALUES, columns), dtype=np.uint8)
    for byte in range(4):
        np.bitwise_and(data[:, :, byte], 15, out=out[:, 2 * byte])
        np.right_shift(data[:, :, byte], 4, out=out[:, 2 * byte + 1])
    return out.reshape(rows * WORD_VALUES, columns)


def nibbles_along_columns(value: Any, field: str) -> NDArray[np.uint8]:
    """int32 (R, C) -> uint8 (R, 8 C): nibble i (bits 4i..4i+3) of word [r, c] is value [r, 8 c + i]."""
    data = words(value, field)
    rows, columns, _ = data.shape
    out = np.empty((rows, columns, 4, 2), dtype=np.uint8)
    np.bitwise_and(data, 15, out=out[..., 0])
    np.right_shift(data, 4, out=out[..., 1])
    return out.reshape(rows, columns * WORD_VALUES)


def weight_extents(weight_shape: Any) -> tuple[int, int]:
    """Return (N, K) from compressed-tensors' weight_shape, a tuple or an integer array."""
    if isinstance(weight_shape, tuple | list):
        is_integers = all(isinstance(size, int | np.integer) for size in weight_shape)
        plain = np.asarray(weight_shape, dtype=None if is_integers else object)
    else:
        plain = host_array(weight_shape, "weight_shape")
    if plain.dtype.kind not in "iu" or plain.shape != (2,) or int(plain.min()) < 1:
        got = f"{plain.dtype} {plain.tolist()}"
        raise QuantizationError("weight_shape", got, "two integers (N, K), each at least 1")
    return int(plain[0]), int(plain[1])


def compressed_zero_points(stored: Any, n: int, groups: int) -> NDArray[np.uint8]:
    """Return compressed-tensors' zero points as uint8 (G, N) with 8 added, from words or from one int8 each."""
    plain = host_array(stored, "weight_zero_point")
    check_zero_points(plain.shape, plain.dtype == np.int8, n, groups)
    if plain.dtype != np.int8:
        return np.ascontiguousarray(nibbles_along_rows(stored, "weight_zero_point")[:n].T)
    if plain.min() < -SYMMETRIC_ZERO or plain.max() >= SYMMETRIC_ZERO:
        got = f"values from {plain.min()} to {plain.max()}"
        raise QuantizationError("weight_zero_point", got, "-8..7", "four bits hold no more")
    plain = np.broadcast_to(plain.reshape(1, 1), (n, groups)) if plain.size == 1 else plain
    return np.ascontiguousarray(plain.T.astype(np.int16) + SYMMETRIC_ZERO, dtype=np.uint8)


def matrix(value: Any, field: str) -> NDArray[Any]:
    """Scales as a host array of two dimensions and a floating type. QuantizationError otherwise."""
    array = host_array(value, field)
    if array.ndim != 2 or 0 in array.shape or not is_float(array.dtype):
        raise QuantizationError(field, f"{array.dtype} {array.shape}", "floating point with two dimensions")
    return array


def assemble(
    q: NDArray[np.uint8],
    scales: NDArray[Any],
    zeros: NDArray[np.uint8] | None,
    *,
    group_size: int | None,
    dtype: Any | None,
    g_idx: Any | None = None,
) -> PackedWeight:
    """Pack imported integers: q (K, N), scales (G, N), zeros (G, N) or None, g_idx (K,) or None.

    group_size: None infers it from K and G. dtype: None keeps the scales' own. Zero points that are all 8 become
    None.
    """
    k, groups = q.shape[0], scales.shape[0]
    size = file_group_size(k, groups, group_size)
    perm = None if g_idx is None else act_order(g_idx, k, groups, size)
    if perm is not None:
        q = q[perm]
    scales = _converted(scales, dtype)
    if zeros is not None and bool((zeros == SYMMETRIC_ZERO).all()):
        zeros = None
    stored = packed_group_size(size)
    if stored != size:
        wanted = group_count(k, stored)
        scales = np.repeat(scales, size // stored, axis=0)[:wanted]
        zeros = None if zeros is None else np.repeat(zeros, size // stored, axis=0)[:wanted]
    return pack(q, scales, zeros, group_size=stored, perm=perm)


def packed_group_size(size: int) -> int:
    """Return the group size of a packed weight whose file has groups of ``size``: the largest that divides it."""
    return size if size in GROUP_SIZES else max(part for part in GROUP_SIZES if part > 0 and size % part == 0)


def check_file_group_size(size: object, field: str) -> None:
    """Raise QuantizationError unless weights with groups of this size can be imported."""
    if type(size) is not int or (size != -1 and (size < _STEP or size % _STEP)):
        raise QuantizationError(
            field, repr(size), ALLOWED_GROUP_SIZES, "quantize the model again with one of these sizes"
        )


def file_group_size(k: int, groups: int, stated: int | None) -> int:
    """Return the group size of a file's tensors, -1 for one group.

    stated: None infers the one of FILE_GROUP_SIZES that gives G groups. Raises QuantizationError if it does not divide
    K and another size gives G groups too.
    """
    if stated is not None:
        check_file_group_size(stated, "group_size")
        if group_count(k, stated) != groups:
            allowed = f"{group_count(k, stated)} groups for K = {k} and group_size {stated}"
            raise QuantizationError("scales", f"{groups} groups", allowed, "leave group_size out to have it inferred")
        return stated if stated in GROUP_SIZES or groups > 1 else -1
    if groups == 1:
        return -1
    # Tools write multiples of 32, and other sizes only where they divide K.
    fitting = [size for size in range(16, k, 16) if group_count(k, size) == groups and not (size % _STEP and k % size)]
    known = [size for size in fitting if size in FILE_GROUP_SIZES]
    if not known:
        sizes = ", ".join(map(str, (*FILE_GROUP_SIZES, -1)))
        raise QuantizationError("scales", f"{groups} groups for K = {k}", f"group sizes {sizes}", "pass group_size=")
    if k % known[0] and len(fitting) > 1:
        other = next(size for size in fitting if size != known[0])
        got = f"{groups} groups for K = {k}, of {known[0]} or {other} rows"
        remedy = "pass group_size=, or state group_size in the configuration"
        raise QuantizationError("scales", got, "one group size that fits", remedy)
    return known[0]


def act_order(g_idx: Any, k: int, groups: int, size: int) -> NDArray[np.int32] | None:
    """Return the permutation that sorts rows by group (stable), None where they are sorted already."""
    index = host_array(g_idx, "g_idx")
    if index.dtype.kind not in "iu" or index.shape != (k,):
        raise QuantizationError("g_idx", f"{index.dtype} {index.shape}", f"integers ({k},)")
    if index.min() < 0 or index.max() >= groups:
        raise QuantizationError("g_idx", f"{index.min()}..{index.max()}", f"0..{groups - 1}")
    plain = np.arange(k) // (k if size == -1 else size)
    if np.array_equal(index, plain):
        return None
    perm = np.argsort(index, kind="stable")
    if not np.array_equal(index[perm], plain):
        allowed = f"groups of exactly {size} rows, the last one shorter where K is no multiple"
        raise QuantizationError("g_idx", "groups of unequal size", allowed, "import the unsharded weight")
    return perm.astype(np.int32)


def _converted(scales: NDArray[Any], dtype: Any | None) -> NDArray[Any]:
    """Scales in fp16 or bf16. QuantizationError where one overflows, or vanishes though it was not zero."""
    if dtype is None:
        if scales.dtype.name not in ACTIVATION_TYPES:
            remedy = "pass dtype='float16' or 'bfloat16' to have them rounded"
            raise QuantizationError("scales", scales.dtype.name, ", ".join(ACTIVATION_TYPES), remedy)
        return scales
    kind: ActivationType = activation_type(dtype)
    with np.errstate(over="ignore"):
        rounded = scales.astype(kind.numpy)
    lost = np.isfinite(scales) & (~np.isfinite(rounded) | ((rounded == 0) & (scales != 0)))
    if lost.any():
        group, column = (int(i) for i in np.argwhere(lost)[0])
        got = f"{float(scales[group, column]):g}"
        remedy = "use dtype='bfloat16'" if kind.name == "float16" else "keep the scales' own type"
        raise QuantizationError(f"scales[{group}, {column}]", got, f"values that {kind.name} can hold", remedy)
    return rounded
