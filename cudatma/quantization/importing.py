"""What the importers share: nibbles out of 32-bit words, group sizes, act-order, scale types; the format of a layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cudatma.dtypes import ACTIVATION_TYPES, ActivationType, activation_type
from cudatma.errors import QuantizationError, WeightFileError
from cudatma.quantization.checkpoint import Checkpoint
from cudatma.quantization.layout_v1 import SYMMETRIC_ZERO, group_count
from cudatma.quantization.namespaces import host_array, is_float
from cudatma.quantization.packed import PackedWeight
from cudatma.quantization.packing import pack

#: Group sizes that files may have. Those over 128 are imported as several groups of 128 with the same scale.
FILE_GROUP_SIZES = (32, 64, 128, 256, 512, 1024)
_LARGEST = 128
_BITS = 4
#: Values of four bits in a 32-bit word.
WORD_VALUES = 32 // _BITS


def check_bits(bits: int) -> None:
    """QuantizationError unless ``bits`` is 4."""
    if bits != _BITS:
        raise QuantizationError("bits", bits, "4", "quantize the model again with four bits")


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


def require_shape(field: str, shape: tuple[int, ...], allowed: tuple[int, ...], remedy: str) -> None:
    """QuantizationError unless a tensor's shape is the one that the other tensors ask for."""
    if shape != allowed:
        raise QuantizationError(field, shape, str(allowed), remedy)


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
    """A PackedWeight from imported integers: q (K, N), scales (G, N), zeros (G, N) or None, g_idx (K,) or None.

    group_size None: the one that K and G allow. dtype None: the scales' own. Zero points that are all 8 become None.
    """
    k, groups = q.shape[0], scales.shape[0]
    size = _file_group_size(k, groups, group_size)
    perm = None if g_idx is None else _act_order(g_idx, k, groups, size)
    if perm is not None:
        q = q[perm]
    scales = _converted(scales, dtype)
    if zeros is not None and bool((zeros == SYMMETRIC_ZERO).all()):
        zeros = None
    if size > _LARGEST:
        wanted = group_count(k, _LARGEST)
        scales = np.repeat(scales, size // _LARGEST, axis=0)[:wanted]
        zeros = None if zeros is None else np.repeat(zeros, size // _LARGEST, axis=0)[:wanted]
        size = _LARGEST
    return pack(q, scales, zeros, group_size=size, perm=perm)


def _file_group_size(k: int, groups: int, asked: int | None) -> int:
    """The group size of a file's tensors: -1 for one group. At most one size gives G groups where G is over 1."""
    known = ", ".join(map(str, (*FILE_GROUP_SIZES, -1)))
    if asked is not None:
        if type(asked) is not int or asked not in (*FILE_GROUP_SIZES, -1):
            raise QuantizationError("group_size", asked, known)
        if group_count(k, asked) != groups:
            allowed = f"{group_count(k, asked)} groups for K = {k} and group_size {asked}"
            raise QuantizationError("scales", f"{groups} groups", allowed, "leave group_size out to have it inferred")
        return asked if asked <= _LARGEST or groups > 1 else -1
    if groups == 1:
        return -1
    fitting = [size for size in FILE_GROUP_SIZES if group_count(k, size) == groups]
    if not fitting:
        raise QuantizationError("scales", f"{groups} groups for K = {k}", f"group sizes {known}")
    return fitting[0]


def _act_order(g_idx: Any, k: int, groups: int, size: int) -> NDArray[np.int32] | None:
    """The permutation that sorts rows by group (stable), None where they are sorted already."""
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


@dataclass(frozen=True, slots=True)
class Format:
    """name: of the importers, ``load_NAME``. title: of the tool. tensors: of a layer, with their shapes."""

    name: str
    title: str
    tensors: str


GPTQ = Format("gptq", "GPTQ", "qweight (K / 8, N), qzeros (G, N / 8), scales (G, N)")
AWQ = Format("awq", "AWQ", "qweight (K, N / 8), qzeros (G, N / 8), scales (G, N)")
COMPRESSED_TENSORS = Format(
    "compressed_tensors", "compressed-tensors", "weight_packed (N, K / 8), weight_scale (N, G), weight_shape (2,)"
)
MARLIN = Format("marlin", "the original Marlin", "B (K / 16, 2 N), s (G, N)")


def check_layer(checkpoint: Checkpoint, layer: str, wanted: Format) -> None:
    """WeightFileError where a layer of a file is of another format; it names that and what reads it."""
    shapes = checkpoint.shapes(layer)
    found = _recognized(shapes)
    if found is not None and found is not wanted:
        remedy = f"read it with load_{found.name}"
        raise WeightFileError(layer, f"what looks like {found.title}: {_shown(shapes)}", wanted.tensors, remedy)
    if found is None and "weight" in shapes:
        got = f"a weight that is not quantized: {_shown(shapes)}"
        raise WeightFileError(layer, got, wanted.tensors, "cudatma.quantize packs it")


def check_arrays(arrays: Mapping[str, Any], wanted: Format) -> None:
    """QuantizationError where a layer's arrays are of another format; it names that and what takes them."""
    shapes = {name: tuple(getattr(array, "shape", ())) for name, array in arrays.items()}
    found = _recognized(shapes)
    if found is not None and found is not wanted:
        got = f"what looks like {found.title}: {_shown(shapes)}"
        raise QuantizationError("qweight", got, wanted.tensors, f"pass it to from_{found.name}")


def _recognized(shapes: Mapping[str, tuple[int, ...]]) -> Format | None:
    if "weight_packed" in shapes:
        return COMPRESSED_TENSORS
    if {"B", "s"} <= shapes.keys():
        return MARLIN
    qweight, scales = shapes.get("qweight", ()), shapes.get("scales", ())
    if len(qweight) == len(scales) == 2:
        if qweight[1] == scales[1]:
            return GPTQ
        if qweight[1] * WORD_VALUES == scales[1]:
            return AWQ
    return None


def _shown(shapes: Mapping[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{name} {shape}" for name, shape in shapes.items())
