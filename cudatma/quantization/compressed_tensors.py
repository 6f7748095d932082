"""compressed-tensors' "pack-quantized" checkpoints (llm-compressor, vLLM), four-bit integers.

Tensors of a layer: weight_packed int32 (N, ceil(K / 8)), eight consecutive columns of K in a word, lowest nibble first;
weight_scale (N, G), or one value for the whole tensor; weight_zero_point int32 (ceil(N / 8), G), eight consecutive
rows of N in a word, only where asymmetric, or int8 (N, G), one value a byte (versions before 0.9.4); weight_shape
(2,) = (N, K); weight_g_idx (K,) where quantized in activation order. Integers are signed, -8..7, and words hold them
with 8 added, both weights and zero points, so that the difference of the stored values is the difference of the signed
ones and a symmetric weight has the offset 8. int8 zero points are stored as they are.
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
    """A PackedWeight from compressed-tensors' tensors (NumPy, CuPy, torch or DLPack); the shapes are those of this
    module's header, weight_shape may also be a tuple (N, K).

    group_size: -1 or a multiple of 32; None infers 32, 64, 128, 256, 512, 1024 or -1 from K and G. dtype: None keeps
    the scales' own. Raises QuantizationError, ArgumentTypeError.
    """
    check_bits(bits)
    n, k = weight_extents(weight_shape)
    packed, scale = nibbles_along_columns(weight_packed, "weight_packed"), host_array(weight_scale, "weight_scale")
    shapes = {"weight_packed": tuple(weight_packed.shape), "weight_scale": scale.shape}
    COMPRESSED_TENSORS.extent(shapes, k, n)
    if scale.size == 1:  # one value for the whole tensor
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
    """from_compressed_tensors() for the tensors ``{layer}.weight_packed`` ... of a checkpoint (a path, or what
    open_checkpoint returned).

    A configuration in the same folder has to agree with the layer. Raises WeightFileError if a file is unreadable,
    lacks a tensor or has another format; QuantizationError if tensors are invalid or contradict the configuration.
    """
    tensors, group_size, _ = read_layer(path, layer, COMPRESSED_TENSORS, group_size)
    return from_compressed_tensors(*tensors, group_size=group_size, dtype=dtype, bits=bits)
