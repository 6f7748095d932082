"""Import Q4_0 and Q8_0 tensors from GGUF files, which llama.cpp writes. The package gguf reads the files."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from cudatma.errors import ArgumentError, ArgumentTypeError, WeightFileError, alternatives, counted, reason_of
from cudatma.quantization.importing import assemble
from cudatma.quantization.packed import PackedWeight
from cudatma.quantization.safetensors_file import as_path, similar_names

#: Number of values per block, and size of the block's fp16 scale, which precedes the codes.
_VALUES, _SCALE_BYTES = 32, 2
_TYPES = ("Q4_0", "Q8_0")


def load_gguf(
    path: str | os.PathLike[str], name: str, *, expert: int | None = None, dtype: Any | None = None
) -> PackedWeight:
    """Load a Q4_0 or Q8_0 tensor from a GGUF file.

    Requires the package gguf (extra ``gguf``).

    Parameters
    ----------
    path : str or os.PathLike
        A ``.gguf`` file.
    name : str
        The tensor's name, such as ``blk.0.ffn_down.weight``.
    expert : int, optional
        Index of the expert in a tensor that contains all experts, such as ``blk.0.ffn_gate_exps.weight``.
    dtype : str or dtype, optional
        Type of the scales, fp16 or bf16. Default: fp16, the type in the file.

    Returns
    -------
    PackedWeight
        The weight (K, N), on the host, with groups of 32 rows. The format is int4 for Q4_0 and int8 for Q8_0.

    Raises
    ------
    WeightFileError
        If the file cannot be read or lacks the tensor, if the tensor has another type, or if gguf is not installed.
    ArgumentError
        If ``expert`` does not match the tensor.
    ArgumentTypeError
        If ``name`` is not a str, or if ``expert`` is not an int.
    QuantizationError
        If a scale is not finite or not in the range of ``dtype``.

    Examples
    --------
    >>> gate = cudatma.load_gguf("model.gguf", "blk.0.ffn_gate_exps.weight", expert=3)  # doctest: +SKIP
    """
    path = as_path(path)
    if not isinstance(name, str):
        raise ArgumentTypeError("name", repr(name), "a str")
    if expert is not None and type(expert) is not int:
        raise ArgumentTypeError("expert", repr(expert), "an int or None")
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise WeightFileError("package gguf", ..., f"installed to read {path}", "run `pip install gguf`") from error
    try:
        reader = GGUFReader(path)
    except (OSError, ValueError, IndexError, KeyError) as error:
        raise WeightFileError(
            str(path),
            f"a file that cannot be read ({reason_of(error)})",
            "a readable GGUF file",
            "copy or download the file again",
        ) from error
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    if name not in tensors:
        raise WeightFileError(name, "no such tensor", f"a tensor in {path}", similar_names(name, tensors))
    tensor = tensors[name]
    kind = tensor.tensor_type.name
    if kind not in _TYPES:
        allowed = f"of type {alternatives(_TYPES)}"
        raise WeightFileError(f"{path}: {name}", kind, allowed, "quantize the model to one of these types")
    data = np.asarray(tensor.data)
    if data.ndim not in (2, 3):
        allowed = "a tensor with 2 dimensions, or 3 dimensions for experts"
        raise WeightFileError(f"{path}: {name}", f"a tensor with {counted(data.ndim, 'dimension')}", allowed)
    experts = data.shape[0] if data.ndim == 3 else None
    if (experts is None) != (expert is None) or (expert is not None and not 0 <= expert < (experts or 0)):
        allowed = (
            "None for a tensor with 2 dimensions"
            if experts is None
            else f"0 to {experts - 1} for a tensor with 3 dimensions"
        )
        raise ArgumentError("expert", expert, allowed)
    rows = data if expert is None else data[expert]
    is_int4 = kind == "Q4_0"
    blocks = rows.reshape(len(rows), -1, _SCALE_BYTES + (_VALUES // 2 if is_int4 else _VALUES))
    stored_type = np.dtype(np.float16).newbyteorder(reader.byte_order)  # The reader does not swap the bytes of blocks.
    scales = np.ascontiguousarray(blocks[:, :, :_SCALE_BYTES]).view(stored_type)[:, :, 0].astype(np.float16)
    stored = blocks[:, :, _SCALE_BYTES:]
    # The low nibbles of a block hold its first 16 values. The offset of int8 codes is 128.
    codes = np.concatenate([stored & 15, stored >> 4], axis=2) if is_int4 else stored ^ np.uint8(128)
    q = np.ascontiguousarray(codes.reshape(len(rows), -1).T)
    return assemble(
        q,
        np.ascontiguousarray(scales.T),
        None,
        group_size=_VALUES,
        dtype=dtype,
        format="int4" if is_int4 else "int8",
    )
