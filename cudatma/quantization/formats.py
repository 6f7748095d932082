"""Checkpoint formats of quantized layers.

A format specifies the names of a layer's tensors, and how K, N and the number of groups follow from their shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from cudatma.errors import QuantizationError, WeightFileError
from cudatma.quantization.checkpoint import Checkpoint
from cudatma.quantization.safetensors_file import FLOAT_DTYPES
from cudatma.quantization.weight_format import weight_format

#: Number of four-bit values per 32-bit word.
WORD_VALUES = 8
_WORD_BITS = 32
#: Remedy for a checkpoint that cannot be imported.
FROM_FLOAT = "quantize the original float checkpoint with `cudatma convert --quantize`"
Shapes = Mapping[str, tuple[int, ...]]
_WORDS = ("I32", "U32")
_E4M3 = ("F8_E4M3",)


@dataclass(frozen=True, slots=True)
class Extent:
    """Size of a layer: its rows (K), its columns (N), and its scale groups along K."""

    k: int
    n: int
    groups: int


#: Function that returns a layer's extent, given the shapes of its tensors, and K and N if they are known.
Measure = Callable[[Shapes, int | None, int | None], Extent]


def require_shape(field: str, shape: tuple[int, ...], allowed: tuple[int, ...], remedy: str) -> None:
    """Raise QuantizationError unless a tensor has the shape required by the other tensors."""
    if shape != allowed:
        raise QuantizationError(field, shape, str(allowed), remedy)


def _require_words(field: str, shape: tuple[int, ...], axis: int, values: int, word_values: int = WORD_VALUES) -> None:
    """Raise QuantizationError unless an axis has the number of words required for ``values`` values."""
    allowed = list(shape)
    allowed[axis] = -(-values // word_values)
    bits, expected_bits = _WORD_BITS * shape[axis] / values, _WORD_BITS // word_values
    is_other = bits in (1, 2, 3, 4, 5, 6, 8, 16) and bits != expected_bits
    number, per_word = ("four", "eight") if expected_bits == 4 else ("eight", "four")
    width = f"quantize with {number} bits instead of {bits:g}; " if is_other else ""
    require_shape(field, shape, tuple(allowed), f"{width}pass tensors with {per_word} values per word")


def _gptq_extent(word_values: int) -> Measure:
    def extent(shapes: Shapes, k: int | None, _: int | None) -> Extent:
        words, zeros, (groups, n) = shapes["qweight"], shapes["qzeros"], shapes["scales"]
        require_shape("qweight", words, (words[0], n), "pass tensors with the same number of columns")
        k = word_values * words[0] if k is None else k
        require_shape("qzeros", zeros, (groups, zeros[1]), "pass one row for each row of scales")
        _require_words("qzeros", zeros, 1, n, word_values)
        _require_words("qweight", words, 0, k, word_values)
        return Extent(k, n, groups)

    return extent


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


#: Side length of the square blocks in an fp8 weight. Each block has one scale.
FP8_BLOCK_SIZE = 128


def _matrix(shapes: Shapes, name: str, values: int = 1) -> tuple[int, int]:
    """Return (N, K) of a weight whose elements each hold ``values`` values along K."""
    if len(shapes[name]) != 2 or 0 in shapes[name]:
        raise QuantizationError(name, shapes[name], "two-dimensional and nonempty")
    return shapes[name][0], values * shapes[name][1]


def _fp8_block_extent(scales: str) -> Measure:
    def extent(shapes: Shapes, *_: int | None) -> Extent:
        n, k = _matrix(shapes, "weight")
        expected = -(-n // FP8_BLOCK_SIZE), -(-k // FP8_BLOCK_SIZE)
        remedy = f"pass one scale for each block of {FP8_BLOCK_SIZE} x {FP8_BLOCK_SIZE} values"
        require_shape(scales, shapes[scales], expected, remedy)
        return Extent(k, n, expected[1])

    return extent


def _fp8_channel_extent(shapes: Shapes, *_: int | None) -> Extent:
    n, k = _matrix(shapes, "weight")
    if shapes["weight_scale"] not in ((n, 1), (n,), (1,), (1, 1), ()):
        raise QuantizationError(
            "weight_scale", shapes["weight_scale"], f"({n}, 1) or a single scale", "pass one scale per output (N)"
        )
    return Extent(k, n, 1)


def _nvfp4_extent(weight: str) -> Measure:
    def extent(shapes: Shapes, *_: int | None) -> Extent:
        n, k = _matrix(shapes, weight, 2)
        require_shape("weight_scale", shapes["weight_scale"], (n, k // 16), "pass one scale per 16 values along K")
        return Extent(k, n, k // 16)

    return extent


def _mxfp4_extent(shapes: Shapes, *_: int | None) -> Extent:
    blocks = shapes["blocks"]
    if len(blocks) != 4 or 0 in blocks or blocks[3] != 16:
        raise QuantizationError("blocks", blocks, "(experts, N, K / 32, 16)")
    require_shape("scales", shapes["scales"], blocks[:3], "pass one scale for each block")
    return Extent(32 * blocks[2], blocks[1], blocks[2])


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
    """Checkpoint format of quantized layers.

    Attributes
    ----------
    name : str
        Name of the format, as in the names of its importers (for example, ``from_gptq`` and ``load_gptq``).
    title : str
        Name of the format in messages.
    tensors : str
        Names and shapes of the tensors, for error messages.
    required, optional : tuple of str
        Names of a layer's tensors without the layer's prefix. A conversion finds layers by the first required tensor.
    scales, zeros, g_idx : str
        Names of the tensors that contain the scales, the zero points and the group of each row, or "".
    integers : tuple of str
        Names of the required tensors that contain codes or zero points.
    measure : Measure
        Function that computes a layer's extent.
    weight_format : str
        Format of the packed weight; see ``PackedWeight.format``.
    dtypes, scale_dtypes : tuple of str
        Types of ``integers`` and ``scales`` in safetensors files.
    group_size : int
        Number of rows per scale (-1 for all rows) if the format fixes it, otherwise 0.
    separator : str
        Text between the layer's prefix and the name of a tensor.
    left_out : tuple of str
        Names of tensors with activation scales, which are not used.
    """

    name: str
    title: str
    tensors: str
    required: tuple[str, ...]
    optional: tuple[str, ...]
    scales: str
    integers: tuple[str, ...]
    measure: Measure
    zeros: str = ""
    g_idx: str = ""
    weight_format: str = "int4"
    dtypes: tuple[str, ...] = _WORDS
    scale_dtypes: tuple[str, ...] = FLOAT_DTYPES
    group_size: int = 0
    separator: str = "."
    left_out: tuple[str, ...] = ()

    @property
    def bits(self) -> int:
        """Number of bits per code."""
        return weight_format(self.weight_format).bits

    @property
    def description(self) -> str:
        """Description of a layer in this format, for error messages."""
        return f"a layer of {self.title} with the tensors {self.tensors}"

    def import_remedy(self, prefix: str) -> str:
        """Return ``prefix`` and the name, or advice to convert the checkpoint if there is no public importer."""
        return "convert the checkpoint with `cudatma convert`" if self.group_size else f"{prefix}{self.name}"

    def extent(self, shapes: Shapes, k: int | None = None, n: int | None = None) -> Extent:
        """Return the extent of a layer whose tensors have these shapes.

        ``k`` and ``n`` are the exact sizes if another tensor (g_idx or weight_shape) specifies them. Raises a
        QuantizationError that names the tensor if a shape does not match the format.
        """
        for name in (*self.integers, self.scales) if not self.group_size else ():
            dimensions = (1, 2) if name == "weight_scale" else (2,)
            if len(shapes[name]) not in dimensions or 0 in shapes[name]:
                raise QuantizationError(name, shapes[name], "two-dimensional and nonempty")
        return self.measure(shapes, k, n)


GPTQ = Format(
    "gptq",
    "GPTQ",
    "qweight (K / 8, N), qzeros (G, N / 8), scales (G, N)",
    required=("qweight", "qzeros", "scales"),
    optional=("g_idx",),
    scales="scales",
    integers=("qweight", "qzeros"),
    measure=_gptq_extent(WORD_VALUES),
    zeros="qzeros",
    g_idx="g_idx",
)
GPTQ8 = replace(
    GPTQ,
    title="8-bit GPTQ",
    tensors="qweight (K / 4, N), qzeros (G, N / 4), scales (G, N)",
    measure=_gptq_extent(WORD_VALUES // 2),
    weight_format="int8",
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
_ACTIVATION_SCALES = ("input_scale", "input_global_scale")
FP8_BLOCK = Format(
    "fp8_block",
    "fp8 with blocks",
    "weight (N, K) in e4m3, weight_scale_inv (N / 128, K / 128)",
    required=("weight_scale_inv", "weight"),
    optional=(),
    scales="weight_scale_inv",
    integers=("weight",),
    measure=_fp8_block_extent("weight_scale_inv"),
    weight_format="fp8",
    dtypes=_E4M3,
    group_size=FP8_BLOCK_SIZE,
    left_out=_ACTIVATION_SCALES,
)
FP8_CHANNEL = Format(
    "fp8_channel",
    "fp8",
    "weight (N, K) in e4m3, weight_scale (N, 1) or one scale",
    required=("weight_scale", "weight"),
    optional=(),
    scales="weight_scale",
    integers=("weight",),
    measure=_fp8_channel_extent,
    weight_format="fp8",
    dtypes=_E4M3,
    group_size=-1,
    left_out=_ACTIVATION_SCALES,
)
FP8_BLOCK_COMPRESSED = replace(
    FP8_BLOCK,
    tensors="weight (N, K) in e4m3, weight_scale (N / 128, K / 128)",
    required=("weight_scale", "weight"),
    scales="weight_scale",
    measure=_fp8_block_extent("weight_scale"),
)
NVFP4_MODELOPT = Format(
    "nvfp4_modelopt",
    "ModelOpt's NVFP4",
    "weight (N, K / 2) in uint8, weight_scale (N, K / 16) in e4m3, weight_scale_2",
    required=("weight_scale_2", "weight", "weight_scale"),
    optional=(),
    scales="weight_scale",
    integers=("weight",),
    measure=_nvfp4_extent("weight"),
    weight_format="nvfp4",
    dtypes=("U8",),
    scale_dtypes=_E4M3,
    group_size=16,
    left_out=_ACTIVATION_SCALES,
)
NVFP4_COMPRESSED = Format(
    "nvfp4_compressed",
    "compressed-tensors' NVFP4",
    "weight_packed (N, K / 2) in uint8, weight_scale (N, K / 16) in e4m3, weight_global_scale",
    required=("weight_global_scale", "weight_packed", "weight_scale"),
    optional=(),
    scales="weight_scale",
    integers=("weight_packed",),
    measure=_nvfp4_extent("weight_packed"),
    weight_format="nvfp4",
    dtypes=("U8",),
    scale_dtypes=_E4M3,
    group_size=16,
    left_out=_ACTIVATION_SCALES,
)
MXFP4 = Format(
    "mxfp4",
    "MXFP4 of gpt-oss",
    "blocks (experts, N, K / 32, 16) and scales (experts, N, K / 32) in uint8",
    required=("blocks", "scales"),
    optional=(),
    scales="scales",
    integers=("blocks",),
    measure=_mxfp4_extent,
    weight_format="mxfp4",
    dtypes=("U8",),
    scale_dtypes=("U8",),
    group_size=32,
    separator="_",
)
FORMATS = (GPTQ, AWQ, COMPRESSED_TENSORS, MARLIN, FP8_BLOCK, NVFP4_MODELOPT, NVFP4_COMPRESSED, MXFP4, FP8_CHANNEL)


def check_zero_points(shape: tuple[int, ...], is_unpacked: bool, n: int, groups: int) -> None:
    """Check the shape of weight_zero_point, which contains words packed along N, or one byte per scale."""
    if not is_unpacked:
        require_shape("weight_zero_point", shape, (-(-n // WORD_VALUES), groups), "pack the zero points along N")
    elif set(shape) != {1}:  # A single value applies to the whole tensor.
        require_shape("weight_zero_point", shape, (n, groups), "pass one value per scale")


def check_layer(checkpoint: Checkpoint, layer: str, expected: Format) -> None:
    """Raise WeightFileError if a layer in a file is not in the expected format.

    The error names the layer's format and states how to import it.
    """
    shapes = checkpoint.shapes(layer)
    detected = recognized(shapes)
    if detected is not None and detected is not expected:
        got = f"a layer that looks like {detected.title}: {_shown(shapes)}"
        raise WeightFileError(layer, got, expected.description, detected.import_remedy("read the layer with load_"))
    if detected is None and "weight" in shapes:
        got = f"an unquantized weight: {_shown(shapes)}"
        raise WeightFileError(layer, got, expected.description, "quantize the weight with cudatma.quantize")


def check_arrays(arrays: Mapping[str, Any], expected: Format) -> None:
    """Raise QuantizationError if a layer's arrays are not in the expected format.

    The error names the arrays' format and states how to import them.
    """
    shapes = {name: tuple(getattr(array, "shape", ())) for name, array in arrays.items()}
    detected = recognized(shapes)
    if detected is not None and detected is not expected:
        got = f"arrays that look like {detected.title}: {_shown(shapes)}"
        allowed = f"part of {expected.description}"
        raise QuantizationError("qweight", got, allowed, detected.import_remedy("pass the tensors to from_"))


def recognized(shapes: Shapes) -> Format | None:
    """Return the format that matches a layer's tensor names and shapes, or None."""
    if "weight_packed" in shapes:
        return NVFP4_COMPRESSED if "weight_global_scale" in shapes else COMPRESSED_TENSORS
    for kind in (FP8_BLOCK, NVFP4_MODELOPT, FP8_CHANNEL, MXFP4):
        if set(kind.required) <= shapes.keys():
            return kind
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
