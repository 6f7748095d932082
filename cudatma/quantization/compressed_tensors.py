"""compressed-tensors' "pack-quantized" checkpoints (llm-compressor, vLLM), four-bit integers.

Tensors of a layer: weight_packed int32 (N, ceil(K / 8)), eight consecutive columns of K in a word, lowest nibble first;
weight_scale (N, G), or one value for the whole tensor; weight_zero_point int32 (ceil(N / 8), G), eight consecutive
rows of N in a word, only where asymmetric; weight_shape (2,) = (N, K); weight_g_idx (K,) where quantized in activation
order. Integers are signed, -8..7, and stored with 8 added, both weights and zero points, so that the difference of the
stored values is the difference of the signed ones and a symmetric weight has the offset 8.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cudatma.errors import QuantizationError
from cudatma.quantization.checkpoint import Checkpoint, open_checkpoint
from cudatma.quantization.importing import (
    COMPRESSED_TENSORS,
    WORD_VALUES,
    assemble,
    check_bits,
    check_layer,
    matrix,
    nibbles_along_columns,
    nibbles_along_rows,
    require_shape,
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

    group_size None: inferred from K and G. dtype None: the scales' own type. Raises QuantizationError,
    ArgumentTypeError.
    """
    check_bits(bits)
    n, k = _shape(weight_shape)
    packed = nibbles_along_columns(weight_packed, "weight_packed")
    word_columns = -(-k // WORD_VALUES)
    remedy = f"weight_shape ({n}, {k}) in four bits; other bit widths are not supported"
    require_shape("weight_packed", (len(packed), packed.shape[1] // WORD_VALUES), (n, word_columns), remedy)
    scale = _scales(weight_scale, n)
    zeros: NDArray[np.uint8] | None = None
    if weight_zero_point is not None:
        stored = nibbles_along_rows(weight_zero_point, "weight_zero_point")
        zero_words = (len(stored) // WORD_VALUES, stored.shape[1])
        zero_shape = (-(-n // WORD_VALUES), scale.shape[1])
        require_shape("weight_zero_point", zero_words, zero_shape, "it is packed along N")
        zeros = stored[:n].T
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

    Raises WeightFileError for files that cannot be read, lack a tensor or are of another tool, QuantizationError for
    wrong contents.
    """
    checkpoint = open_checkpoint(path)
    check_layer(checkpoint, layer, COMPRESSED_TENSORS)
    return from_compressed_tensors(
        checkpoint.read(f"{layer}.weight_packed"),
        checkpoint.read(f"{layer}.weight_scale"),
        checkpoint.read(f"{layer}.weight_shape"),
        checkpoint.read_if_present(f"{layer}.weight_zero_point"),
        checkpoint.read_if_present(f"{layer}.weight_g_idx"),
        group_size=group_size,
        dtype=dtype,
        bits=bits,
    )


def _shape(weight_shape: Any) -> tuple[int, int]:
    """(N, K) from a tuple or an integer array of two."""
    plain = (
        np.asarray(weight_shape)
        if isinstance(weight_shape, (tuple, list))
        else host_array(weight_shape, "weight_shape")
    )
    if plain.dtype.kind not in "iu" or plain.shape != (2,) or int(plain.min()) < 1:
        raise QuantizationError(
            "weight_shape", f"{plain.dtype} {plain.tolist()}", "two integers (N, K), each at least 1"
        )
    return int(plain[0]), int(plain[1])


def _scales(weight_scale: Any, n: int) -> NDArray[Any]:
    """Scales as (N, G); one value for the whole tensor is repeated."""
    scale = host_array(weight_scale, "weight_scale")
    if scale.size == 1:
        scale = np.repeat(scale.reshape(1, 1), n, axis=0)
    scale = matrix(scale, "weight_scale")
    if scale.shape[0] != n:
        raise QuantizationError("weight_scale", scale.shape, f"({n}, G)", "it has one row for each of the N outputs")
    return scale
