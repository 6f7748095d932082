"""Import four-bit weights in the "pack-quantized" format of compressed-tensors (llm-compressor, vLLM).

A layer has these tensors:

- weight_packed int32 (N, ceil(K / 8)): each word holds eight consecutive values along K, lowest nibble first.
- weight_scale (N, G), or one value for the whole tensor.
- weight_zero_point, only if the weight is asymmetric: int32 (ceil(N / 8), G), where a word holds eight consecutive
  values along N, or int8 (N, G), where a byte holds one value (versions before 0.9.4).
- weight_shape (2,) = (N, K).
- weight_g_idx (K,), only if the weight was quantized in activation order.

Integers are signed, from -8 to 7. Words store them plus 8. The difference between a stored weight and a stored zero
point is therefore correct, and the offset of a symmetric weight is 8. int8 zero points are stored unchanged.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from cudatma.quantization.agreement import read_layer
from cudatma.quantization.checkpoint import Checkpoint
from cudatma.quantization.formats import COMPRESSED_TENSORS
from cudatma.quantization.importing import (
    assemble,
    check_bits,
    compressed_zero_points,
    matrix,
    nibbles_along_columns,
    weight_extents,
)
from cudatma.quantization.namespaces import host_array
from cudatma.quantization.packed import PackedWeight


def from_compressed_tensors(
    weight_packed: Any,
    weight_scale: Any,
    weight_shape: Any,
    weight_zero_point: Any | None = None,
    weight_g_idx: Any | None = None,
    *,
    group_size: int | None = None,
    dtype: Any | None = None,
    bits: int = 4,
) -> PackedWeight:
    """Import a weight from compressed-tensors tensors.

    Parameters
    ----------
    weight_packed : array_like of int32, shape (N, ceil(K / 8))
        Packed integers. A word holds eight values along K, lowest nibble first.
    weight_scale : array_like, shape (N, G) or one element
        Floating-point scales.
    weight_shape : tuple of int or array_like, shape (2,)
        Sizes (N, K) of the weight.
    weight_zero_point : array_like, optional
        Zero points: int32 (ceil(N / 8), G), packed along N, or int8 (N, G). Default: the weight is symmetric.
    weight_g_idx : array_like of int, shape (K,), optional
        Group of each row of K. Default: the rows are sorted by group.
    group_size : int, optional
        Number of rows of K that share a scale: a multiple of 32, or -1 for all rows. Default: inferred from K and G as
        32, 64, 128, 256, 512, 1024 or -1.
    dtype : str or dtype, optional
        Type of the scales, fp16 or bf16. Default: the type of ``weight_scale``.
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
    n, k = weight_extents(weight_shape)
    packed, scale = nibbles_along_columns(weight_packed, "weight_packed"), host_array(weight_scale, "weight_scale")
    shapes = {"weight_packed": tuple(weight_packed.shape), "weight_scale": scale.shape}
    COMPRESSED_TENSORS.extent(shapes, k, n)
    if scale.size == 1:  # One value for the whole tensor.
        scale = np.repeat(scale.reshape(1, 1), n, axis=0)
    scale = matrix(scale, "weight_scale")
    zeros = None if weight_zero_point is None else compressed_zero_points(weight_zero_point, n, scale.shape[1])
    q = np.ascontiguousarray(packed[:, :k].T)
    return assemble(q, scale.T, zeros, group_size=group_size, dtype=dtype, g_idx=weight_g_idx)


def load_compressed_tensors(
    path: str | os.PathLike[str] | Checkpoint,
    layer: str,
    *,
    group_size: int | None = None,
    dtype: Any | None = None,
    bits: int = 4,
) -> PackedWeight:
    """Load a compressed-tensors layer from a checkpoint.

    Parameters
    ----------
    path : str, os.PathLike or Checkpoint
        A ``.safetensors`` file, an index, a folder, or the result of ``open_checkpoint``.
    layer : str
        The layer's name, which is the prefix of the tensors' names, such as ``{layer}.weight_packed``.
    group_size : int, optional
        See ``from_compressed_tensors``. Default: the value in the folder's configuration, otherwise inferred.
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
    tensors, group_size, _ = read_layer(path, layer, COMPRESSED_TENSORS, group_size)
    return from_compressed_tensors(*tensors, group_size=group_size, dtype=dtype, bits=bits)
