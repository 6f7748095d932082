"""Import symmetric four-bit weights in the layout of the original Marlin (IST-DASLab).

B is int32 (K / 16, 2 N). Each row of B holds a slice of 16 rows of the weight. In a slice, 128 consecutive words hold
64 columns. Lane 4 g + t (g = 0..7, t = 0..3) owns four of these words, and its word i holds columns 16 i to 16 i + 15.
Nibble r + 2 b + 4 h of the word holds the value with k = 2 t + h + 8 r and n = 16 i + 8 b + g.

s is fp16 (G, N) with permuted columns. If G is greater than 1, each 64 columns form an 8 x 8 matrix that is stored
transposed. If G is 1 (one scale per column, applied in the epilogue), column 8 u + 2 i + v of each 32 columns is at
position 8 i + 2 u + v (i, u = 0..3, v = 0..1).
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cudatma.quantization.agreement import read_layer
from cudatma.quantization.checkpoint import Checkpoint
from cudatma.quantization.formats import MARLIN, WORD_VALUES
from cudatma.quantization.importing import assemble, matrix, words
from cudatma.quantization.packed import PackedWeight

#: Number of rows of K per row of words, and number of columns per run of 128 words.
_SLICE, _RUN = 16, 64


def from_marlin(b: Any, s: Any, *, group_size: int | None = None, dtype: Any | None = None) -> PackedWeight:
    """Import a weight from the original Marlin's tensors.

    Parameters
    ----------
    b : array_like of int32, shape (K / 16, 2 N)
        Packed integers B. K must be a multiple of 16, and N must be a multiple of 64.
    s : array_like of float16, shape (G, N)
        Permuted scales.
    group_size : int, optional
        Number of rows of K that share a scale: a multiple of 32, or -1 for all rows. Default: inferred from K and G as
        32, 64, 128, 256, 512, 1024 or -1.
    dtype : str or dtype, optional
        Type of the scales, fp16 or bf16. Default: the type of ``s``.

    Returns
    -------
    PackedWeight
        The weight, on the host.

    Raises
    ------
    QuantizationError
        If shapes or values are invalid.
    ArgumentTypeError
        If an argument is not an array.
    """
    factors, data = matrix(s, "s"), words(b, "B")
    MARLIN.extent({"B": data.shape[:2], "s": factors.shape})
    return assemble(_values(data), _columns(factors), None, group_size=group_size, dtype=dtype)


def load_marlin(
    path: str | os.PathLike[str] | Checkpoint, layer: str, *, group_size: int | None = None, dtype: Any | None = None
) -> PackedWeight:
    """Load a layer of the original Marlin from a checkpoint.

    Parameters
    ----------
    path : str, os.PathLike or Checkpoint
        A ``.safetensors`` file, an index, a folder, or the result of ``open_checkpoint``.
    layer : str
        The layer's name. The tensors are ``{layer}.B`` and ``{layer}.s``.
    group_size : int, optional
        See ``from_marlin``. Default: the value in the folder's configuration, otherwise inferred.
    dtype : str or dtype, optional
        Type of the scales, fp16 or bf16. Default: the type in the file.

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
    tensors, group_size, _ = read_layer(path, layer, MARLIN, group_size)
    return from_marlin(*tensors, group_size=group_size, dtype=dtype)


def _values(data: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Unpack the bytes (K / 16, 2 N, 4) of B into values, uint8 (K, N)."""
    slices, columns, _ = data.shape
    runs = columns * WORD_VALUES // (_SLICE * _RUN)
    split = data.reshape(slices, runs, 8, 4, 4, 2, 2)  # slice run g t i h b; r is the low or the high nibble
    out = np.empty((slices, 2, 4, 2, runs, 4, 2, 8), dtype=np.uint8)  # slice r t h run i b g
    ordered = split.transpose(0, 3, 5, 1, 4, 6, 2)  # slice t h run i b g
    out[:, 0], out[:, 1] = ordered & 15, ordered >> 4
    return out.reshape(slices * _SLICE, runs * _RUN)


def _columns(stored: NDArray[Any]) -> NDArray[Any]:
    """Return scales (G, N) in column order."""
    groups, n = stored.shape
    if groups == 1:
        ordered = stored.reshape(1, n // 32, 4, 4, 2).transpose(0, 1, 3, 2, 4)
    else:
        ordered = stored.reshape(groups, n // _RUN, 8, 8).transpose(0, 1, 3, 2)
    return np.ascontiguousarray(ordered).reshape(groups, n)
