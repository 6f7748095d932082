"""Pure-Python encoder and decoder for the 128 bytes of a tensor map.

Bit n of the map is bit n % 8 of byte n // 8. FIELDS defines the layout. The evidence for it is as follows.

- Most fields are identical to those that the driver of an H200 writes, and this driver sets no bits outside the fields
  (docs/lab/emulator.md has the counts). The exceptions are swizzle atomicity, the packed formats and im2col wide.
- Swizzle atomicity (sm_100 and later) and the packed formats follow public documentation; they were not tested on a
  GPU that supports them.
- Each 16-bit im2col corner field stores W in its lowest bits.
- The positions of the corners, pixels and mode of an im2col wide map (sm_100 and later) are not published.
  encode_shared() assumes that the other fields have the same positions as in tiled and im2col maps.
- ``version`` is 0 on an H200 and in a map that tensormap.replace builds from zeros. Other GPUs may use other values.
- ``smem_bytes`` equals the spec's ``described_bytes``. ``smem_pattern`` is the number of bytes after which the swizzle
  repeats: 8 spans, or 16 bytes if there is no swizzle. In a map that tensormap.replace builds from zeros, both fields
  are 0, and loads through the map give the same result.

Element types have three numberings: the driver's enumeration, the enumeration of tensormap.replace in PTX, and the
numbering in the map (``TmaType.descriptor_format``), in which tf32 is fp32 with bit 80 set.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from cudatma.descriptor.rules import CHUNK_BYTES, CORNER_RANGE, L2Promotion, OobFill
from cudatma.descriptor.spec import AnySpec, Im2colSpec, Im2colWideSpec, TiledSpec
from cudatma.dtypes import TMA_TYPES, TmaType
from cudatma.errors import DescriptorError
from cudatma.layout import Interleave, Swizzle

DESCRIPTOR_BYTES = 128
_MASK_32 = (1 << 32) - 1

_COMMON: dict[str, tuple[int, int]] = {
    "address": (0, 64),
    "im2col": (64, 1),
    "version": (65, 3),
    "rank_minus_1": (68, 3),
    "format": (71, 4),
    "interleave": (75, 2),
    "swizzle": (77, 2),
    "nan_fill": (79, 1),
    "tf32": (80, 1),
    "l2_promotion": (81, 2),
    "swizzle_atomicity": (83, 2),
    **{f"stride_low[{i}]": (96 + 32 * i, 32) for i in range(4)},
    **{f"stride_high[{i}]": (224 + 4 * i, 4) for i in range(4)},
    **{f"dim_minus_1[{i}]": (256 + 32 * i, 32) for i in range(5)},
    **{f"element_stride_minus_1[{i}]": (416 + 3 * i, 3) for i in range(5)},
    "smem_bytes": (512, 32),
    "smem_pattern": (576, 16),
}
#: First bit and number of bits of each field, by kind of map.
FIELDS: dict[str, dict[str, tuple[int, int]]] = {
    "tiled": {**_COMMON, **{f"box_minus_1[{i}]": (440 + 8 * i, 8) for i in range(5)}},
    "im2col": {
        **_COMMON,
        "channels_minus_1": (440, 8),
        "lower_corner": (448, 16),
        "upper_corner": (464, 16),
        "pixels_minus_1": (480, 10),
    },
}
#: Fields that cannot be set through arguments of the driver's functions. decode() accepts any value in them.
DERIVED = ("version", "smem_bytes", "smem_pattern")
#: Positions of the fields that field_writer() can write.
_DIM_WORD, _STRIDE_WORD = _COMMON["dim_minus_1[0]"][0] // 32, _COMMON["stride_low[0]"][0] // 32
_SMEM_WORD, _STRIDE_HIGH_BYTE = _COMMON["smem_bytes"][0] // 32, _COMMON["stride_high[0]"][0] // 8
_BOX_BYTE = FIELDS["tiled"]["box_minus_1[0]"][0] // 8
_CORNER_BITS = {rank: high.bit_length() + 1 for rank, (_, high) in CORNER_RANGE.items()}
_DERIVED_BITS = sum(((1 << bits) - 1) << first for first, bits in (_COMMON[name] for name in DERIVED))


@dataclass(frozen=True, slots=True)
class Decoded:
    """A decoded tensor map.

    Parameters
    ----------
    spec : TiledSpec or Im2colSpec
        Specification of the map.
    version, smem_bytes, smem_pattern : int
        Values of the fields that the encoder derives.
    unknown : int
        The map as an integer, with all bits cleared except those outside all fields and those of dimensions beyond the
        rank.
    """

    spec: TiledSpec | Im2colSpec
    version: int
    smem_bytes: int
    smem_pattern: int
    unknown: int


def encode(spec: AnySpec, version: int = 0) -> bytes:
    """Return the 128 bytes that the driver would encode for a spec.

    Raises DescriptorError if ``spec`` is an Im2colWideSpec, whose encoding is not published, or if ``version`` is not
    in the range 0 to 7.
    """
    if not 0 <= version < 8:
        raise DescriptorError("version", version, "0 to 7")
    if not isinstance(spec, (TiledSpec, Im2colSpec)):
        remedy = "encode the spec with the driver" if isinstance(spec, Im2colWideSpec) else ""
        raise DescriptorError("spec", type(spec).__name__, "TiledSpec or Im2colSpec", remedy)
    fields = _common_fields(spec) | {"version": version}
    if isinstance(spec, TiledSpec):
        kind = "tiled"
        fields |= {f"box_minus_1[{i}]": size - 1 for i, size in enumerate(spec.box)}
    else:
        kind = "im2col"
        fields |= {
            "im2col": 1,
            "channels_minus_1": spec.channels_per_pixel - 1,
            "lower_corner": _pack_corner(spec.lower_corner, spec.rank),
            "upper_corner": _pack_corner(spec.upper_corner, spec.rank),
            "pixels_minus_1": spec.pixels_per_column - 1,
        }
    return _assemble(FIELDS[kind], fields)


def field_writer(
    words: Any, raw: Any, spec: AnySpec, fields: Sequence[tuple[str, int]]
) -> Callable[[Sequence[int]], None]:
    """Return a function that overwrites fields of a tiled map in place without validation.

    ``words`` and ``raw`` are views of the map as 32-bit words and as bytes. ``spec`` provides the rank and dtype.
    ``fields`` lists the kind ("dim", "stride" or "box") and the index of each value. Only the returned function may
    write these fields, because it skips strides that have not changed since its last call.
    """
    dims: list[tuple[int, int]] = []
    strides: list[tuple[int, int, int, int]] = []
    boxes: list[tuple[int, int]] = []
    written: dict[int, int] = {}
    for place, (kind, index) in enumerate(fields):
        if kind == "dim":
            dims.append((place, _DIM_WORD + index))
        elif kind == "stride":
            strides.append((place, _STRIDE_WORD + index, _STRIDE_HIGH_BYTE + index // 2, 4 * (index % 2)))
        else:
            boxes.append((place, _BOX_BYTE + index))

    def write(values: Sequence[int]) -> None:
        for place, word in dims:
            words[word] = values[place] - 1
        for place, word, high, shift in strides:
            value = values[place]
            if value != written.get(place):  # Strides rarely change.
                written[place] = value
                words[word] = value >> 4 & _MASK_32
                raw[high] = raw[high] & ~(15 << shift) | value >> 36 << shift
        for place, byte in boxes:
            if raw[byte] != values[place] - 1:
                raw[byte] = values[place] - 1
                whole = prod(raw[_BOX_BYTE + i] + 1 for i in range(spec.rank))
                words[_SMEM_WORD] = whole * spec.dtype.element_bytes & _MASK_32

    return write


def encode_shared(spec: AnySpec) -> bytes:
    """Return 128 bytes with only the fields that all kinds of maps share.

    The fields are at their positions in tiled and im2col maps; all other bits are 0. For an Im2colWideSpec, these
    positions are assumed, not verified.
    """
    return _assemble(_COMMON, _common_fields(spec))


def _assemble(layout: dict[str, tuple[int, int]], fields: dict[str, int]) -> bytes:
    value = 0
    for name, number in fields.items():
        value |= number << layout[name][0]
    return value.to_bytes(DESCRIPTOR_BYTES, "little")


def _common_fields(spec: AnySpec) -> dict[str, int]:
    atomicity = max(0, int(spec.swizzle) - int(Swizzle.B128))
    fields = {
        "address": spec.address,
        "rank_minus_1": spec.rank - 1,
        "format": spec.dtype.descriptor_format,
        "interleave": int(spec.interleave),
        "swizzle": int(spec.swizzle) - atomicity,
        "nan_fill": int(spec.oob_fill),
        "tf32": int(spec.dtype.name.startswith("tfloat32")),
        "l2_promotion": int(spec.l2_promotion),
        "swizzle_atomicity": atomicity,
        # No GPU can load a box of 4 GiB, but its spec is valid. The mask prevents an overflow into the next field.
        "smem_bytes": spec.described_bytes & _MASK_32,
        "smem_pattern": 8 * spec.swizzle.span_bytes or CHUNK_BYTES,
    }
    for i, stride in enumerate(spec.strides_bytes):
        fields[f"stride_low[{i}]"] = stride >> 4 & _MASK_32
        fields[f"stride_high[{i}]"] = stride >> 36
    for i, (dim, step) in enumerate(zip(spec.dims, spec.element_strides, strict=True)):
        fields[f"dim_minus_1[{i}]"] = dim - 1
        fields[f"element_stride_minus_1[{i}]"] = step - 1
    return fields


def read_fields(data: bytes | bytearray | memoryview) -> tuple[str, dict[str, int]]:
    """Return the kind (``"tiled"`` or ``"im2col"``) and the value of every field, valid or not.

    Raises DescriptorError unless ``data`` has 128 bytes.
    """
    value = _to_integer(data)
    kind = "im2col" if value >> 64 & 1 else "tiled"
    return kind, {name: value >> first & ((1 << bits) - 1) for name, (first, bits) in FIELDS[kind].items()}


def decode(data: bytes | bytearray | memoryview) -> Decoded:
    """Return the spec that 128 bytes encode, with the derived fields and the unknown bits.

    Raises DescriptorError if ``data`` does not have 128 bytes, if the spec is invalid, or if the value of a field is
    undefined, such as format 14, a rank above 5, or swizzle atomicity without a 128B swizzle.
    """
    kind, fields = read_fields(data)
    rank = fields["rank_minus_1"] + 1
    if rank > 5 or (kind == "im2col" and rank < 3):
        raise DescriptorError("rank", rank, "3 to 5" if kind == "im2col" else "1 to 5")
    common: dict[str, Any] = {
        "dtype": _dtype(fields),
        "dims": tuple(fields[f"dim_minus_1[{i}]"] + 1 for i in range(rank)),
        "strides_bytes": tuple(
            fields[f"stride_low[{i}]"] << 4 | fields[f"stride_high[{i}]"] << 36 for i in range(rank - 1)
        ),
        "element_strides": tuple(fields[f"element_stride_minus_1[{i}]"] + 1 for i in range(rank)),
        "interleave": Interleave.parse(fields["interleave"], "interleave"),
        "swizzle": _swizzle(fields),
        "l2_promotion": L2Promotion(fields["l2_promotion"]),
        "oob_fill": OobFill(fields["nan_fill"]),
        "address": fields["address"],
    }
    spec: TiledSpec | Im2colSpec
    if kind == "tiled":
        spec = TiledSpec(box=tuple(fields[f"box_minus_1[{i}]"] + 1 for i in range(rank)), **common)
    else:
        spec = Im2colSpec(
            lower_corner=_unpack_corner(fields["lower_corner"], rank),
            upper_corner=_unpack_corner(fields["upper_corner"], rank),
            channels_per_pixel=fields["channels_minus_1"] + 1,
            pixels_per_column=fields["pixels_minus_1"] + 1,
            **common,
        )
    unknown = (_to_integer(data) ^ _to_integer(encode(spec))) & ~_DERIVED_BITS
    return Decoded(spec, fields["version"], fields["smem_bytes"], fields["smem_pattern"], unknown)


def _to_integer(data: bytes | bytearray | memoryview) -> int:
    try:
        raw = memoryview(data).tobytes()
    except TypeError as error:
        raise DescriptorError("data", type(data).__name__, "bytes, bytearray or memoryview") from error
    if len(raw) != DESCRIPTOR_BYTES:
        raise DescriptorError("data", f"{len(raw)} bytes", f"{DESCRIPTOR_BYTES} bytes")
    return int.from_bytes(raw, "little")


def _dtype(fields: dict[str, int]) -> TmaType:
    number, tf32 = fields["format"], bool(fields["tf32"])
    for candidate in TMA_TYPES.values():
        if candidate.descriptor_format == number and candidate.name.startswith("tfloat32") == tf32:
            return candidate
    raise DescriptorError("format", f"{number} with tf32 bit {int(tf32)}", "0 to 13 (7 or 8 if the tf32 bit is set)")


def _swizzle(fields: dict[str, int]) -> Swizzle:
    mode, atomicity = fields["swizzle"], fields["swizzle_atomicity"]
    if atomicity and mode != Swizzle.B128:
        raise DescriptorError("swizzle_atomicity", atomicity, "0 unless the swizzle is 128B")
    return Swizzle(mode + atomicity)


def _pack_corner(corner: tuple[int, ...], rank: int) -> int:
    bits = _CORNER_BITS[rank]
    return sum((value & ((1 << bits) - 1)) << (bits * i) for i, value in enumerate(corner))


def _unpack_corner(packed: int, rank: int) -> tuple[int, ...]:
    bits = _CORNER_BITS[rank]
    sign = 1 << (bits - 1)
    values = (packed >> (bits * i) & ((1 << bits) - 1) for i in range(rank - 2))
    return tuple((value ^ sign) - sign for value in values)
