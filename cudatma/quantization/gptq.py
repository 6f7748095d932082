"""GPTQ checkpoints (AutoGPTQ, GPTQModel, Transformers), four bits.

Tensors of a layer: qweight int32 (K / 8, N), eight consecutive rows in a word, lowest nibble first; qzeros int32
(G, N / 8), eight consecutive columns in a word; scales (G, N); g_idx (K,), the group of each row, which is not
sorted where the model was quantized in activation order ("desc_act").

Zero points: the first format ("gptq") stores them minus one, "gptq_v2" stores them plain. The tensors do not say which
applies: "checkpoint_format" of the folder's configuration does. Some symmetric files store 8 under the first format,
where it would mean 9; they are read as 8. The first format
has no code for a zero point of 0: AutoGPTQ and its readers add 1 to each value separately, and a stored 15 means 16;
GPTQModel subtracts 1 from the eight values of a word as one 32-bit number, so that a 0 borrows from the next value and
the addition returns it.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cudatma.errors import QuantizationError
from cudatma.quantization.agreement import read_layer
from cudatma.quantization.checkpoint import Checkpoint
from cudatma.quantization.formats import GPTQ, check_arrays
from cudatma.quantization.importing import (
    assemble,
    check_bits,
    matrix,
    nibbles_along_columns,
    nibbles_along_rows,
)
from cudatma.quantization.layout_v1 import SYMMETRIC_ZERO
from cudatma.quantization.namespaces import host_array
from cudatma.quantization.packed import PackedWeight

#: How zero points are stored: minus one, each separately; minus one, borrowing inside a word (GPTQModel's asymmetric
#: files of the first format); plain.
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
    """A PackedWeight from GPTQ tensors (NumPy, CuPy, torch or DLPack); the shapes are those of this module's header.

    zero_point_format: one of ZERO_POINT_FORMATS. None: the first format, "v1", unless every stored value is 8: no
    symmetric weight has a zero point of 9, so these are read as 8. group_size: -1 or a multiple of 32; None infers 32,
    64, 128, 256, 512, 1024 or -1 from K and G. dtype: None keeps the scales' own. Zero points that are all 8 give a
    symmetric weight; g_idx that is not sorted gives a perm. Raises QuantizationError, ArgumentTypeError.
    """
    check_bits(bits)
    check_arrays({"qweight": qweight, "scales": scales}, GPTQ)
    q, zeros = nibbles_along_rows(qweight, "qweight"), nibbles_along_columns(qzeros, "qzeros")
    factors = matrix(scales, "scales")
    index = None if g_idx is None else host_array(g_idx, "g_idx")
    if index is not None and index.size == 0:  # written by some tools for layers without activation order
        index = None
    shapes = {name: tuple(array.shape) for name, array in (("qweight", qweight), ("qzeros", qzeros))}
    extent = GPTQ.extent({**shapes, "scales": factors.shape}, None if index is None else index.size)
    zeros = _zero_points(zeros, qzeros, zero_point_format)[:, : extent.n]
    return assemble(q[: extent.k], factors, zeros, group_size=group_size, dtype=dtype, g_idx=index)


def load_gptq(
    path: str | os.PathLike[str] | Checkpoint,
    layer: str,
    *,
    zero_point_format: str | None = None,
    group_size: int | None = None,
    dtype: Any | None = None,
    bits: int = 4,
) -> PackedWeight:
    """from_gptq() for the tensors ``{layer}.qweight`` ... of a checkpoint (a path, or what open_checkpoint returned).

    A configuration in the same folder has to agree with the layer, and states the format of the zero points
    (docs/howto/convert_a_checkpoint.md). Without a configuration, zero_point_format has the default of from_gptq(). If
    zero_point_format is given, the configuration is not read. Raises WeightFileError if a file is unreadable, lacks a
    tensor or has another format; QuantizationError if tensors are invalid or contradict the configuration.
    """
    tensors, group_size, zero_point_format = read_layer(path, layer, GPTQ, group_size, zero_point_format)
    return from_gptq(*tensors, zero_point_format=zero_point_format, group_size=group_size, dtype=dtype, bits=bits)


def _zero_points(stored: NDArray[np.uint8], qzeros: Any, zero_point_format: str | None) -> NDArray[np.uint8]:
    """Return zero points uint8 (G, N) from the stored values and the words that hold them, int32 (G, N / 8)."""
    if zero_point_format not in (None, *ZERO_POINT_FORMATS):
        raise QuantizationError("zero_point_format", zero_point_format, ", ".join(ZERO_POINT_FORMATS))
    if zero_point_format == "v2" or (zero_point_format is None and bool((stored == SYMMETRIC_ZERO).all())):
        return stored
    if zero_point_format == "v1_borrow":
        whole = np.ascontiguousarray(host_array(qzeros, "qzeros")).view(np.uint32) + np.uint32(_ONES)
        return nibbles_along_columns(whole, "qzeros")
    return np.add(stored, 1, dtype=np.uint8)
