"""Pack a layer's tensors with the importer for their format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cudatma.dtypes import ACTIVATION_TYPES
from cudatma.errors import QuantizationError
from cudatma.quantization.agreement import LayerFacts
from cudatma.quantization.awq import from_awq
from cudatma.quantization.compressed_tensors import from_compressed_tensors
from cudatma.quantization.float_formats import (
    from_fp8_blocks,
    from_fp8_channels,
    from_mxfp4,
    from_nvfp4,
    scale_values,
)
from cudatma.quantization.formats import GPTQ, GPTQ8, Format
from cudatma.quantization.gptq import from_gptq, from_gptq8
from cudatma.quantization.marlin_layout import from_marlin
from cudatma.quantization.packed import PackedWeight

_IMPORTERS: dict[str, Callable[..., PackedWeight]] = {
    "gptq": from_gptq,
    "awq": from_awq,
    "compressed_tensors": from_compressed_tensors,
    "marlin": from_marlin,
    "fp8_block": from_fp8_blocks,
    "fp8_channel": from_fp8_channels,
    "nvfp4_modelopt": from_nvfp4,
    "nvfp4_compressed": partial(from_nvfp4, inverse=True),
    "mxfp4": from_mxfp4,
}


def pack_layer(kind: Format, tensors: Mapping[str, Any], facts: LayerFacts, *, dtype: Any = None) -> PackedWeight:
    """Pack a layer's tensors with the importer for their format.

    Parameters
    ----------
    kind : Format
        Format of the layer.
    tensors : mapping of str to array
        NumPy arrays or torch tensors. The names do not include the layer's prefix.
    facts : LayerFacts
        Result of ``layer_facts``.
    dtype : str or dtype, optional
        Type of the scales. Default: the type of the scales in ``tensors``.

    Returns
    -------
    PackedWeight
        The packed weight.
    """
    values = [tensors.get(name) for name in (*kind.required, *kind.optional)]
    options: dict[str, Any] = {} if kind.group_size else {"group_size": facts.group_size}
    if kind in (GPTQ, GPTQ8):
        options["zero_point_format"] = facts.zero_point_format
    importer = from_gptq8 if kind is GPTQ8 else _IMPORTERS[kind.name]
    return importer(*values, dtype=dtype, **options)


def check_scales(name: str, scales: NDArray[Any], dtype: str) -> None:
    """Raise QuantizationError for the first scale that is not finite in ``dtype``, or that becomes 0."""
    scales = scale_values(scales, name)
    with np.errstate(over="ignore"):
        rounded = scales.astype(ACTIVATION_TYPES[dtype].numpy)
    invalid = ~np.isfinite(rounded) | ((rounded == 0) & (scales != 0))
    if invalid.any():
        first = np.argwhere(invalid)[0].tolist()
        value = float(scales[tuple(first)])
        remedy = "pass dtype='bfloat16'" if np.isfinite(value) else "copy or download the checkpoint again"
        raise QuantizationError(f"{name}{first}", f"{value:g}", f"a finite value in the range of {dtype}", remedy)
