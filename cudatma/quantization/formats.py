"""Formats of quantized layers.

A format defines the names of a layer's tensors, and how K, N and the number of groups follow from their shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cudatma.errors import QuantizationError, WeightFileError
from cudatma.quantization.checkpoint import Checkpoint

#: Number of four-bit values per 32-bit word.
WORD_VALUES = 8
_WORD_BITS = 32
#: Remedy for a checkpoint that cannot be imported.
FROM_FLOAT = "quantize the original float checkpoint with `cudatma convert --quantize`"
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Extent:
    """Numbers of rows (K), columns (N) and scale groups along K of a layer."""

    k: int
    n: int
    groups: int


def require_shape(field: str, shape: tuple[int, ...], allowed: tuple[int, ...], remedy: str) -> None:
    """Raise QuantizationError unless a tensor has the shape required by the other tensors."""
    if shape != allowed:
        raise QuantizationError(field, shape, str(allowed), remedy)


def _require_words(field: str, shape: tuple[int, ...], axis: int, values: int) -> None:
    """Raise QuantizationError unless an axis has the number of words required for ``values`` four-bit values."""
    allowed = list(shape)
    allowed[axis] = -(-values // WORD_VALUES)
    bits = _WORD_BITS * shape[axis] / values
    width = f"quantize with four bits instead of {bits:g}; " if bits in (1, 2, 3, 5, 6, 8, 16) else ""
    require_shape(field, shape, tuple(allowed), f"{width}pass tensors with eight values per word")


def _gptq_extent(shapes: Shapes, k: int | None, _: int | None) -> Extent:
    words, zeros, (groups, n) = shapes["qweight"], shapes["qzeros"], shapes["scales"]
    require_shape("qweight", words, (words[0], n), "pass tensors with the same number of columns")
    k = WORD_VALUES * words[0] if k is None else k
    require_shape("qzeros", zeros, (groups, zeros[1]), "pass one row for each row of scales")
    _require_words("qzeros", zeros, 1, n)
    _require_words("qweight", words, 0, k)
    return Extent(k, n, groups)


def _awq_extent(shapes: Shapes, *_: int | None) -> Extent:
    words, zeros, (groups, n) = shapes["qweight"], shapes["qzeros"], shapes["scales"]
    _require_words("qweight", words, 1, n)
    require_shape("qzeros", zeros, (groups, zeros[1]), "pass one row for each row of scales")
    _require_words("qzeros", zeros, 1, n)
    return Extent(words[0], WORD_VALUES * words[1], groups)


def _marlin_extent(shapes: Shapes, *_: int | None) -> Extent:
    words, (groups, n) = shapes["B"], shapes["s"]
    if n % 64 or words[1] != 2 * n:
        allowed = f"(K / 16, {2 * n}) for N = {n}, where N is a multiple of 64"
        raise QuantizationError("B", words, allowed, "quantize the model with four bits")
    return Extent(16 * words[0], n, groups)


def _compressed_extent(shapes: Shapes, k: int | None, n: int | None) -> Extent:
    words, scales = shapes["weight_packed"], shapes["weight_scale"]
    n = words[0] if n is None else n
    if words[0] != n:
        raise QuantizationError("weight_packed", words, f"({n}, K / 8)", "pass one row per output (N)")
    k = WORD_VALUES * words[1] if k is None else k
    _require_words("weight_packed", words, 1, k)
    if set(scales) == {1}:  # A single scale applies to the whole tensor.
        return Extent(k, n, 1)
    if len(scales) != 2 or scales[0] != n:
        raise QuantizationError("weight_scale", scales, f"({n}, G)", "pass one row per output (N)")
    return Extent(k, n, scales[1])


@dataclass(frozen=True, slots=True)
class Format:
    """Format of quantized layers.

    Attributes
    ----------
    name : str
        Name of the format in the importers ``from_NAME`` and ``load_NAME``.
    title : str
        Name of the tool that writes the format.
    tensors : str
        Names and shapes of the tensors, for error messages.
    required, optional : tuple of str
        Names of a layer's tensors without the layer's prefix. The first required tensor occurs only in layers of this
        format.
    scales, zeros, g_idx : str
        Names of the tensors with the scales, the zero points and the group of each row, or "".
    integers : tuple of str
        Names of the required tensors of 32-bit words.
    measure : callable
        Function with which extent() computes the result.
    """

    name: str
    title: str
    tensors: str
    required: tuple[str, ...]
    optional: tuple[str, ...]
    scales: str
    integers: tuple[str, ...]
    measure: Callable[[Shapes, int | None, int | None], Extent]
    zeros: str = ""
    g_idx: str = ""

    def extent(self, shapes: Shapes, k: int | None = None, n: int | None = None) -> Extent:
        """Return the extent of a layer whose tensors have these shapes.

        ``k`` and ``n`` are the exact sizes if another tensor (g_idx or weight_shape) specifies them. Raise
        QuantizationError unless the shapes match four-bit values. The error names the tensor.
        """
        for name in (*self.integers, self.scales):
            dimensions = (1, 2) if name == "weight_scale" else (2,)
            if len(shapes[name]) not in dimensions or 0 in shapes[name]:
                raise QuantizationError(name, shapes[name], "two dimensions, each at least 1")
        return self.measure(shapes, k, n)


GPTQ = Format(
    "gptq",
    "GPTQ",
    "qweight (K / 8, N), qzeros (G, N / 8), scales (G, N)",
    required=("qweight", "qzeros", "scales"),
    optional=("g_idx",),
    scales="scales",
    integers=("qweight", "qzeros"),
    measure=_gptq_extent,
    zeros="qzeros",
    g_idx="g_idx",
)
AWQ = Format(
    "awq",
    "AWQ",
    "qweight (K, N / 8), qzeros (G, N / 8), scales (G, N)",
    required=("qweight", "qzeros", "scales"),
    optional=(),
    scales="scales",
    integers=("qweight", "qzeros"),
    measure=_awq_extent,
    zeros="qzeros",
)
COMPRESSED_TENSORS = Format(
    "compressed_tensors",
    "compressed-tensors",
    "weight_packed (N, K / 8), weight_scale (N, G), weight_shape (2,)",
    required=("weight_packed", "weight_scale", "weight_shape"),
    optional=("weight_zero_point", "weight_g_idx"),
    scales="weight_scale",
    integers=("weight_packed",),
    measure=_compressed_extent,
    zeros="weight_zero_point",
    g_idx="weight_g_idx",
)
MARLIN = Format(
    "marlin",
    "the original Marlin format",
    "B (K / 16, 2 N), s (G, N)",
    required=("B", "s"),
    optional=(),
    scales="s",
    integers=("B",),
    measure=_marlin_extent,
)
FORMATS = (GPTQ, AWQ, COMPRESSED_TENSORS, MARLIN)


def check_zero_points(shape: tuple[int, ...], is_unpacked: bool, n: int, groups: int) -> None:
    """Check the shape of weight_zero_point, which has packed words along N or one byte per scale."""
    if not is_unpacked:
        require_shape("weight_zero_point", shape, (-(-n // WORD_VALUES), groups), "pack the zero points along N")
    elif set(shape) != {1}:  # A single value applies to the whole tensor.
        require_shape("weight_zero_point", shape, (n, groups), "pass one value per scale")


def check_layer(checkpoint: Checkpoint, layer: str, expected: Format) -> None:
    """Raise WeightFileError if a layer in a file has a different format. The error names this format and its loader."""
    shapes = checkpoint.shapes(layer)
    detected = recognized(shapes)
    if detected is not None and detected is not expected:
        remedy = f"read the layer with load_{detected.name}"
        raise WeightFileError(
            layer, f"a layer that looks like {detected.title}: {_shown(shapes)}", expected.tensors, remedy
        )
    if detected is None and "weight" in shapes:
        got = f"a weight that is not quantized: {_shown(shapes)}"
        raise WeightFileError(layer, got, expected.tensors, "quantize the weight with cudatma.quantize")


def check_arrays(arrays: Mapping[str, Any], expected: Format) -> None:
    """Raise QuantizationError if a layer's arrays have a different format.

    The error names this format and its importer.
    """
    shapes = {name: tuple(getattr(array, "shape", ())) for name, array in arrays.items()}
    detected = recognized(shapes)
    if detected is not None and detected is not expected:
        got = f"an array that looks like {detected.title}: {_shown(shapes)}"
        raise QuantizationError("qweight", got, expected.tensors, f"pass the tensors to from_{detected.name}")


def recognized(shapes: Shapes) -> Format | None:
    """Return the format that matches a layer's tensor names and shapes, or None."""
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


def _shown(shapes: Shapes) -> str:
    return ", ".join(f"{name} {shape}" for name, shape in shapes.items())
