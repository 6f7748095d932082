"""GPTQ checkpoints (AutoGPTQ, GPTQModel, Transformers), four bits.

Tensors of a layer: qweight int32 (K / 8, N), eight consecutive rows in a word, lowest nibble first; qzeros int32
(G, N / 8), eight consecutive columns in a word; scales (G, N); g_idx (K,), the group of each row, which is not
sorted where the model was quantized in activation order ("desc_act").

Zero points: the first format ("gptq") stores them minus one, "gptq_v2" stores them plain. The tensors do not say which
applies: "checkpoint_format" of quantize_config.json, or of config.json's "quantization_config", does. The first format
has no code for a zero point of 0: AutoGPTQ and its readers add 1 to each value separately, and a stored 15 means 16;
GPTQModel subtracts 1 from the eight values of a word as one 32-bit number, so that a 0 borrows from the next value and
the addition returns it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cudatma.errors import QuantizationError, WeightFileError
from cudatma.quantization.checkpoint import Checkpoint, open_checkpoint, quantization_section
from cudatma.quantization.importing import (
    GPTQ,
    WORD_VALUES,
    assemble,
    check_arrays,
    check_bits,
    check_layer,
    matrix,
    nibbles_along_columns,
    nibbles_along_rows,
    require_shape,
)
from cudatma.quantization.namespaces import host_array
from cudatma.quantization.packed import PackedWeight

_OTHER_BITS = "eight values a word for four bits; other bit widths are not supported"
#: How zero points are stored: minus one, each separately; minus one, borrowing inside a word (GPTQModel's asymmetric
#: files of the first format); plain.
ZERO_POINT_FORMATS = ("v1", "v1_borrow", "v2")
_QUOTED = " or ".join(map(repr, ZERO_POINT_FORMATS))
_ONES = 0x11111111
#: checkpoint_format of a configuration -> zero_point_format.
_CHECKPOINT_FORMATS = {"gptq": "v1", "gptq_v2": "v2"}


def from_gptq(
    qweight: Any,
    qzeros: Any,
    scales: Any,
    g_idx: Any | None = None,
    *,
    zero_point_format: str = "v1",
    group_size: int | None = None,
    dtype: Any | None = None,
    bits: int = 4,
) -> PackedWeight:
    """A PackedWeight from GPTQ tensors (NumPy, CuPy, torch or DLPack); the shapes are those of this module's header.

    group_size None: inferred from K and G. dtype None: the scales' own type. Zero points that are all 8 give a
    symmetric weight; g_idx that is not sorted gives a perm. Raises QuantizationError, ArgumentTypeError.
    """
    check_bits(bits)
    check_arrays({"qweight": qweight, "scales": scales}, GPTQ)
    q, zeros = nibbles_along_rows(qweight, "qweight"), _zero_points(qzeros, zero_point_format)
    factors = matrix(scales, "scales")
    groups, n = factors.shape
    rows = q.shape[0] // WORD_VALUES
    require_shape("qweight", (rows, q.shape[1]), (rows, n), "its columns are those of scales")
    zero_words = (zeros.shape[0], zeros.shape[1] // WORD_VALUES)
    require_shape("qzeros", zero_words, (groups, -(-n // WORD_VALUES)), _OTHER_BITS)
    index = None if g_idx is None else host_array(g_idx, "g_idx")
    if index is not None and index.size == 0:  # written by some tools for layers without activation order
        index = None
    if index is not None:
        require_shape("qweight", (rows, n), (-(-index.size // WORD_VALUES), n), _OTHER_BITS)
        q = q[: index.size]
    return assemble(q, factors, zeros[:, :n], group_size=group_size, dtype=dtype, g_idx=index)


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

    zero_point_format: None: what "checkpoint_format" of the quantize_config.json or config.json in the same folder
    asks for, "v1" where neither is there or says it, "v1_borrow" where they say that GPTQModel wrote asymmetric ones.
    Raises WeightFileError for files that cannot be read, lack a tensor or are of another tool, QuantizationError for
    wrong contents.
    """
    checkpoint = open_checkpoint(path)
    check_layer(checkpoint, layer, GPTQ)
    if zero_point_format is None:
        folder = checkpoint.path.parent
        zero_point_format = configured_format(quantization_section(folder), str(folder))
    return from_gptq(
        checkpoint.read(f"{layer}.qweight"),
        checkpoint.read(f"{layer}.qzeros"),
        checkpoint.read(f"{layer}.scales"),
        checkpoint.read_if_present(f"{layer}.g_idx"),
        zero_point_format=zero_point_format,
        group_size=group_size,
        dtype=dtype,
        bits=bits,
    )


def configured_format(section: Mapping[str, Any], where: str) -> str:
    """The zero_point_format of a GPTQ configuration: "checkpoint_format", and for asymmetric weights of the first
    format, which tool wrote it. WeightFileError for a format that is neither."""
    named = str(section.get("checkpoint_format") or "gptq")
    if named not in _CHECKPOINT_FORMATS:
        remedy = f"say zero_point_format={_QUOTED} to read it all the same"
        raise WeightFileError(f"{where}: checkpoint_format", named, ", ".join(_CHECKPOINT_FORMATS), remedy)
    meta = section.get("meta")
    tool = str(meta.get("quantizer", "")) if isinstance(meta, Mapping) else ""
    borrows = "gptqmodel" in tool.lower() and section.get("sym") is False
    found = _CHECKPOINT_FORMATS[named]
    return "v1_borrow" if found == "v1" and borrows else found


def _zero_points(qzeros: Any, zero_point_format: str) -> NDArray[np.uint8]:
    """int32 (G, N / 8) -> zero points uint8 (G, N)."""
    if zero_point_format not in ZERO_POINT_FORMATS:
        raise QuantizationError("zero_point_format", zero_point_format, ", ".join(ZERO_POINT_FORMATS))
    stored = nibbles_along_columns(qzeros, "qzeros")
    if zero_point_format == "v1":
        return np.add(stored, 1, dtype=np.uint8)
    if zero_point_format == "v1_borrow":
        whole = np.ascontiguousarray(host_array(qzeros, "qzeros")).view(np.uint32) + np.uint32(_ONES)
        return nibbles_along_columns(whole, "qzeros")
    return stored
