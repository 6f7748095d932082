"""Import AWQ checkpoints (AutoAWQ's "gemm" version) with four-bit weights.

A layer has the tensors qweight int32 (K, N / 8), qzeros int32 (G, N / 8) and scales (G, N). A word holds eight
consecutive columns. Nibble m + 4 h holds column 2 m + h, so the even columns are in the low nibbles. Zero points are
stored unchanged.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cudatma.quantization.agreement import read_layer
from cudatma.quantization.checkpoint import Checkpoint
from cudatma.quantization.formats import AWQ, WORD_VALUES, check_arrays
from cudatma.quantization.importing import assemble, check_bits, matrix, nibbles_along_columns
from cudatma.quantization.packed import PackedWeight


def from_awq(
    qweight: Any, qzeros: Any, scales: Any, *, group_size: int | None = None, dtype: Any | None = None, bits: int = 4
) -> PackedWeight:
    """Import a weight from AWQ tensors.

    Parameters
    ----------
    qweight : array_like of int32, shape (K, N / 8)
        Packed integers. Each word holds eight columns, with the even columns in the four low nibbles.
    qzeros : array_like of int32, shape (G, N / 8)
        Packed zero points, with the same column order as qweight.
    scales : array_like, shape (G, N)
        Floating-point scales.
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
        The weight, on the host.

    Raises
    ------
    QuantizationError
        If shapes or values are invalid, or if the tensors have a different format.
    ArgumentTypeError
        If an argument is not an array.
    """
    check_bits(bits)
    check_arrays({"qweight": qweight, "scales": scales}, AWQ)
    q, zeros, factors = _columns(qweight, "qweight"), _columns(qzeros, "qzeros"), matrix(scales, "scales")
    AWQ.extent({"qweight": tuple(qweight.shape), "qzeros": tuple(qzeros.shape), "scales": factors.shape})
    return assemble(q, factors, zeros, group_size=group_size, dtype=dtype)


def load_awq(
    path: str | os.PathLike[str] | Checkpoint,
    layer: str,
    *,
    group_size: int | None = None,
    dtype: Any | None = None,
    bits: int = 4,
) -> PackedWeight:
    """Load an AWQ layer from a checkpoint.

    Parameters
    ----------
    path : str, os.PathLike or Checkpoint
        A ``.safetensors`` file, an index, a folder, or the result of ``open_checkpoint``.
    layer : str
        The layer's name. The tensors are ``{layer}.qweight``, ``{layer}.qzeros`` and ``{layer}.scales``.
    group_size : int, optional
        See ``from_awq``. Default: the value in the folder's configuration, otherwise inferred.
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
    tensors, group_size, _ = read_layer(path, layer, AWQ, group_size)
    return from_awq(*tensors, group_size=group_size, dtype=dtype, bits=bits)


def _columns(value: Any, field: str) -> NDArray[np.uint8]:
    """Return the values (R, N) of AWQ's words (R, N / 8) in column order."""
    stored = nibbles_along_columns(value, field)
    rows, n = stored.shape
    split = stored.reshape(rows, n // WORD_VALUES, 2, 4)  # Nibble 4 h + m.
    return np.ascontiguousarray(split.transpose(0, 1, 3, 2)).reshape(rows, n)  # Column 2 m + h.
