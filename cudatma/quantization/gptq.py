"""Import GPTQ checkpoints (AutoGPTQ, GPTQModel, Transformers) with four- or eight-bit weights.

A layer has these tensors:

- qweight int32 (K / 8, N): a word holds eight consecutive rows, lowest nibble first.
- qzeros int32 (G, N / 8): a word holds eight consecutive columns.
- scales (G, N).
- g_idx (K,): the group of each row. g_idx is not sorted if the model was quantized in activation order ("desc_act").

The first format ("gptq") stores zero points minus one. The second format ("gptq_v2") stores zero points unchanged. Only
"checkpoint_format" in the folder's configuration distinguishes the two formats. Some symmetric files in the first
format store 8, which would mean 9, for all zero points. They are read as 8.

The first format has no code for a zero point of 0. AutoGPTQ and compatible readers add 1 to each value separately, so a
stored 15 means 16. GPTQModel instead subtracts 0x11111111 from a word as a single 32-bit number, so a zero point of 0
borrows from the next value. Adding 0x11111111 to the stored word restores both values.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cudatma.errors import QuantizationError, quoted
from cudatma.quantization.agreement import read_layer
from cudatma.quantization.checkpoint import Checkpoint
from cudatma.quantization.formats import GPTQ, GPTQ8, check_arrays
from cudatma.quantization.importing import (
    assemble,
    bytes_along_rows,
    check_bits,
    codes_along_columns,
    matrix,
    nibbles_along_columns,
    nibbles_along_rows,
)
from cudatma.quantization.layout_v1 import SYMMETRIC_ZERO
from cudatma.quantization.namespaces import host_array
from cudatma.quantization.packed import PackedWeight
from cudatma.quantization.weight_format import weight_format

#: Encodings of zero points. "v1" subtracts one from each value. "v1_borrow" subtracts 0x11111111 from each word
#: (asymmetric GPTQModel files in the first format). "v2" stores values unchanged.
ZERO_POINT_FORMATS = ("v1", "v1_borrow", "v2")
_ONES = 0x11111111


def from_gptq(
    qweight: Any,
    qzeros: Any,
    scales: Any,
    g_idx: Any | None = None,
    *,
    zero_point_format: str | None = None,
    group_size: int | None = None,
    dtype: Any | None = None,
    bits: int = 4,
) -> PackedWeight:
    """Import a weight from GPTQ tensors.

    Parameters
    ----------
    qweight : array_like of int32, shape (K / 8, N)
        Packed integers. A word holds eight rows, lowest nibble first.
    qzeros : array_like of int32, shape (G, N / 8)
        Packed zero points. A word holds eight columns.
    scales : array_like, shape (G, N)
        Floating-point scales.
    g_idx : array_like of int, shape (K,), optional
        Group of each row. If the rows are not sorted by group, the result has a ``perm``. Default: the rows are sorted.
    zero_point_format : {"v1", "v1_borrow", "v2"}, optional
        Encoding of qzeros. "v1" stores zero points minus one, "v1_borrow" stores words minus 0x11111111, and "v2"
        stores zero points unchanged. Default: "v2" if every stored value is 8 (a symmetric weight), otherwise "v1".
    group_size : int, optional
        Number of rows of K that share a scale: a multiple of 32, or -1 for all rows. Default: inferred from K and G as
        32, 64, 128, 256, 512, 1024 or -1.
    dtype : str or dtype, optional
        Type of the scales, fp16 or bf16. Default: the type of ``scales``.
    bits : int, default 4
        Number of bits per value. Only 4 is supported.

    Returns
    -------
    PackedWeight
        The weight, on the host. It is symmetric if all zero points are 8.

    Raises
    ------
    QuantizationError
        If shapes or values are invalid, or if the tensors have a different format.
    ArgumentTypeError
        If an argument is not an array.

    Examples
    --------
    >>> words = np.full((128 // 8, 64), 0x77777777, dtype=np.int32)
    >>> zeros = np.full((1, 64 // 8), 0x77777777, dtype=np.int32)
    >>> cudatma.from_gptq(words, zeros, np.ones((1, 64), dtype=np.float16))
    PackedWeight(shape=(128, 64), group_size=-1, float16, symmetric, host)
    """
    check_bits(bits)
    check_arrays({"qweight": qweight, "scales": scales}, GPTQ)
    q, zeros = nibbles_along_rows(qweight, "qweight"), nibbles_along_columns(qzeros, "qzeros")
    factors = matrix(scales, "scales")
    index = None if g_idx is None else host_array(g_idx, "g_idx")
    if index is not None and index.size == 0:  # Some tools write an empty g_idx for layers without activation order.
        index = None
    shapes = {name: tuple(array.shape) for name, array in (("qweight", qweight), ("qzeros", qzeros))}
    extent = GPTQ.extent({**shapes, "scales": factors.shape}, None if index is None else index.size)
    zeros = _zero_points(zeros, qzeros, zero_point_format)[:, : extent.n]
    return assemble(q[: extent.k], factors, zeros, group_size=group_size, dtype=dtype, g_idx=index)


def from_gptq8(
    qweight: Any,
    qzeros: Any,
    scales: Any,
    g_idx: Any | None = None,
    *,
    zero_point_format: str,
    group_size: int | None = None,
    dtype: Any | None = None,
) -> PackedWeight:
    """Import a weight from 8-bit GPTQ tensors, where a word holds four values. All zero points must be 128.

    See from_gptq() for the parameters.
    """
    q = np.ascontiguousarray(bytes_along_rows(qweight, "qweight"))
    zeros, factors = codes_along_columns(qzeros, "qzeros", 8), matrix(scales, "scales")
    index = None if g_idx is None else host_array(g_idx, "g_idx")
    index = None if index is None or index.size == 0 else index
    shapes = {"qweight": tuple(qweight.shape), "qzeros": tuple(qzeros.shape), "scales": factors.shape}
    extent = GPTQ8.extent(shapes, None if index is None else index.size)
    expected = weight_format("int8").zero_code - (zero_point_format != "v2")
    if (wrong := zeros[:, : extent.n] != expected).any():
        got, remedy = (
            int(zeros[:, : extent.n][wrong][0]),
            "quantize symmetrically; int8 weights cannot have zero points",
        )
        raise QuantizationError("qzeros", got, f"{expected} everywhere", remedy)
    return assemble(q[: extent.k], factors, None, group_size=group_size, dtype=dtype, g_idx=index, format="int8")


def load_gptq(
    path: str | os.PathLike[str] | Checkpoint,
    layer: str,
    *,
    zero_point_format: str | None = None,
    group_size: int | None = None,
    dtype: Any | None = None,
    bits: int = 4,
) -> PackedWeight:
    """Load a GPTQ layer from a checkpoint.

    Parameters
    ----------
    path : str, os.PathLike or Checkpoint
        A ``.safetensors`` file, an index, a folder, or the result of ``open_checkpoint``.
    layer : str
        The layer's name, which is the prefix of the tensors' names, such as ``{layer}.qweight``.
    zero_point_format : {"v1", "v1_borrow", "v2"}, optional
        See ``from_gptq``. Default: the value in the folder's configuration. The configuration is read only if this
        argument is omitted.
    group_size : int, optional
        See ``from_gptq``. Default: the value in the folder's configuration, otherwise inferred.
    dtype : str or dtype, optional
        Type of the scales, fp16 or bf16. Default: the type in the file.
    bits : int, default 4
        Number of bits per value. Only 4 is supported.

    Returns
    -------
    PackedWeight
        The weight, on the host.

    Raises
    ------
    WeightFileError
        If a file cannot be read, lacks a tensor or has a different format.
    QuantizationError
        If the tensors are invalid or contradict the configuration in the same folder.
    """
    tensors, group_size, zero_point_format = read_layer(path, layer, GPTQ, group_size, zero_point_format)
    return from_gptq(*tensors, zero_point_format=zero_point_format, group_size=group_size, dtype=dtype, bits=bits)


def _zero_points(stored: NDArray[np.uint8], qzeros: Any, zero_point_format: str | None) -> NDArray[np.uint8]:
    """Return zero points as uint8 (G, N) from the stored values and their words, int32 (G, N / 8)."""
    if zero_point_format not in (None, *ZERO_POINT_FORMATS):
        raise QuantizationError("zero_point_format", zero_point_format, quoted(ZERO_POINT_FORMATS))
    if zero_point_format == "v2" or (zero_point_format is None and bool((stored == SYMMETRIC_ZERO).all())):
        return stored
    if zero_point_format == "v1_borrow":
        whole = np.ascontiguousarray(host_array(qzeros, "qzeros")).view(np.uint32) + np.uint32(_ONES)
        return nibbles_along_columns(whole, "qzeros")
    return np.add(stored, 1, dtype=np.uint8)
