"""Which tool's format a layer's tensors are in, so that a wrong importer can name the right one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cudatma.errors import QuantizationError, WeightFileError
from cudatma.quantization.checkpoint import Checkpoint
from cudatma.quantization.importing import WORD_VALUES


@dataclass(frozen=True, slots=True)
class Format:
    """name: of the importers, ``load_NAME``. title: of the tool. tensors: of a layer, with their shapes."""

    name: str
    title: str
    tensors: str


GPTQ = Format("gptq", "GPTQ", "qweight (K / 8, N), qzeros (G, N / 8), scales (G, N)")
AWQ = Format("awq", "AWQ", "qweight (K, N / 8), qzeros (G, N / 8), scales (G, N)")
COMPRESSED_TENSORS = Format(
    "compressed_tensors", "compressed-tensors", "weight_packed (N, K / 8), weight_scale (N, G), weight_shape (2,)"
)
MARLIN = Format("marlin", "the original Marlin", "B (K / 16, 2 N), s (G, N)")


def check_layer(checkpoint: Checkpoint, layer: str, wanted: Format) -> None:
    """WeightFileError where a layer of a file is of another format; it names that and what reads it."""
    shapes = checkpoint.shapes(layer)
    found = _recognized(shapes)
    if found is not None and found is not wanted:
        remedy = f"read it with load_{found.name}"
        raise WeightFileError(layer, f"what looks like {found.title}: {_shown(shapes)}", wanted.tensors, remedy)
    if found is None and "weight" in shapes:
        got = f"a weight that is not quantized: {_shown(shapes)}"
        raise WeightFileError(layer, got, wanted.tensors, "cudatma.quantize packs it")


def check_arrays(arrays: Mapping[str, Any], wanted: Format) -> None:
    """QuantizationError where a layer's arrays are of another format; it names that and what takes them."""
    shapes = {name: tuple(getattr(array, "shape", ())) for name, array in arrays.items()}
    found = _recognized(shapes)
    if found is not None and found is not wanted:
        got = f"what looks like {found.title}: {_shown(shapes)}"
        raise QuantizationError("qweight", got, wanted.tensors, f"pass it to from_{found.name}")


def _recognized(shapes: Mapping[str, tuple[int, ...]]) -> Format | None:
    if "weight_packed" in shapes:
        return COMPRESSED_TENSORS
    if {"B", "s"} <= shapes.keys():
        return MARLIN
    qweight, scales = shapes.get("qweight", ()), shapes.get("scales", ())
    if len(qweight) == len(scales) == 2:
        if qweight[1] == scales[1]:
            return GPTQ
        if qweight[1] * WORD_VALUES == scales[1]:
            return AWQ
    return None


def _shown(shapes: Mapping[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{name} {shape}" for name, shape in shapes.items())
