"""AWQ checkpoints (AutoAWQ's "gemm" version), four bits.

Tensors of a layer: qweight int32 (K, N / 8), qzeros int32 (G, N / 8), scales (G, N). A word holds eight consecutive
columns with the even ones first: column 2 m + h of the eight is in nibble m + 4 h. Zero points are stored plain.
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
    """A PackedWeight from AWQ tensors (NumPy, CuPy, torch or DLPack); the shapes are those of this module's header.

    group_size: -1 or a multiple of 32; None infers 32, 64, 128, 256, 512, 1024 or -1 from K and G. dtype: None keeps
    the scales' own. Raises QuantizationError, ArgumentTypeError.
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
    """from_awq() for the tensors ``{layer}.qweight`` ... of a checkpoint (a path, or what open_checkpoint returned).

    A configuration in the same folder has to agree with the layer. Raises WeightFileError if a file is unreadable,
    lacks a tensor or has another format; QuantizationError if tensors are invalid or contradict the configuration.
    """
    tensors, group_size, _ = read_layer(path, layer, AWQ, group_size)
    return from_awq(*tensors, group_size=group_size, dtype=dtype, bits=bits)


def _columns(value: Any, field: str) -> NDArray[np.uint8]:
    """int32 (R, N / 8) -> uint8 (R, N) in column order."""
    stored = nibbles_along_columns(value, field)
    rows, n = stored.shape
    split = stored.reshape(rows, n // WORD_VALUES, 2, 4)  # nibble 4 h + m
    return np.ascontiguousarray(split.transpose(0, 1, 3, 2)).reshape(rows, n)  # column 2 m + h
