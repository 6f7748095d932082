"""Names and evidence for all 1024 bits of a tensor map, and the comparison of two maps.

codec.py defines the positions of the fields. This module states the evidence for the meaning of each field (measured on
an H200, documented or unknown) and the known differences on other GPUs and drivers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from itertools import pairwise
from typing import Any

from cudatma.descriptor.codec import DERIVED, DESCRIPTOR_BYTES, FIELDS, read_fields
from cudatma.dtypes import TMA_TYPES
from cudatma.errors import DescriptorError

_PACKED_FORMATS = {t.descriptor_format for t in TMA_TYPES.values() if t.packed}
#: Drivers set this bit on sm_100 and later. It must be cleared if the tensor is not contiguous and its allocation is
#: small. The meaning of the bit is not published. [NVIDIA driver 595.71.05, release notes]
ALLOCATION_BIT = 85


class Evidence(Enum):
    """Evidence for the meaning of a bit."""

    MEASURED = "measured on an H200"
    DOCUMENTED = "documented, not measured"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class BitRange:
    """A field of a tensor map, or consecutive bits outside all fields.

    Parameters
    ----------
    name : str
        Name from ``codec.FIELDS``, or ``"unknown"``.
    first, bits : int
        Index of the first bit, and number of bits.
    value : int
        Value of the bits as an unsigned integer.
    evidence : Evidence
        Evidence for the meaning.
    note : str
        Remark, or "".
    """

    first: int
    bits: int
    name: str
    value: int
    evidence: Evidence
    note: str = ""

    @property
    def place(self) -> str:
        """Bit numbers as text, such as ``"64"`` or ``"65-67"``."""
        return str(self.first) if self.bits == 1 else f"{self.first}-{self.first + self.bits - 1}"


def explain(data: bytes | bytearray | memoryview, *, wide: bool = False) -> tuple[BitRange, ...]:
    """Return ranges that cover all 1024 bits of a valid or invalid map, in ascending order.

    Bits outside all fields are named ``"unknown"``. Pass ``wide=True`` for an im2col wide map, which the published bits
    do not identify. In this case, only the fields that all kinds of maps share are named, and their positions are
    assumed. Raises DescriptorError unless ``data`` has 128 bytes.
    """
    kind, fields = read_fields(data)
    value = int.from_bytes(bytes(data), "little")
    layout = FIELDS[kind]
    if wide:
        layout = {
            n: place for n, place in FIELDS["tiled"].items() if FIELDS["im2col"].get(n) == place and n != "im2col"
        }
    ranges: list[BitRange] = []
    at = 0
    for name, (first, bits) in sorted(layout.items(), key=lambda item: item[1]):
        ranges += _gap(value, at, first)
        part = _field(name, first, bits, fields)
        ranges.append(replace(part, evidence=Evidence.DOCUMENTED, note="position assumed") if wide else part)
        at = first + bits
    return (*ranges, *_gap(value, at, 8 * DESCRIPTOR_BYTES))


def _gap(value: int, start: int, end: int) -> list[BitRange]:
    """Return the runs of bits outside all fields, with the allocation bit as a separate run."""
    cuts = sorted({start, end, *(c for c in (ALLOCATION_BIT, ALLOCATION_BIT + 1) if start <= c <= end)})
    runs = []
    for first, last in pairwise(cuts):
        held = value >> first & ((1 << (last - first)) - 1)
        note = "set by drivers on sm_100 and later, 0 on an H200" if first == ALLOCATION_BIT else ""
        runs.append(BitRange(first, last - first, "unknown", held, Evidence.UNKNOWN, note))
    return runs


def _field(name: str, first: int, bits: int, fields: dict[str, int]) -> BitRange:
    value, evidence, note = fields[name], Evidence.MEASURED, ""
    index = int(name[name.index("[") + 1 : -1]) if "[" in name else 0
    if name.startswith("stride_"):
        index += 1  # Stride i is the pitch of dimension i + 1.
    if name == "swizzle_atomicity" or (name == "format" and value in _PACKED_FORMATS):
        evidence, note = Evidence.DOCUMENTED, "sm_100 and later"
    elif name in DERIVED:
        note = "not set by any argument of the driver's functions"
    elif index > fields["rank_minus_1"]:
        note = "beyond the rank" if not value else "beyond the rank but not 0"
    return BitRange(first, bits, name, value, evidence, note)


@dataclass(frozen=True, slots=True)
class Difference:
    """A property that may differ between GPUs or drivers.

    Parameters
    ----------
    what : str
        The property.
    h200 : str
        Behavior of an H200, verified with driver 580.159.
    others : str
        Documented behavior of sm_100a and sm_120a.
    source : str
        Documentation of the behavior.
    """

    what: str
    h200: str
    others: str
    source: str


#: Known differences. The values of ``others`` come from documentation and have not been verified on a GPU.
DIFFERENCES: tuple[Difference, ...] = (
    Difference(
        "bits 65-67, `version`",
        "0; maps with other values load the same box",
        "unknown; handwritten Hopper maps reportedly trap on GB10 (sm_121), where the driver's maps work",
        "public reports",
    ),
    Difference(
        "bit 85",
        "0, regardless of the allocation",
        "set by drivers; must be cleared if the allocation is below 128 KiB and the tensor is not contiguous",
        "NVIDIA driver 595.71.05, release notes; CUTLASS clears it for CUDA 13.1 and earlier; Triton pull request "
        "11011 also mentions 13.2 and 13.3",
    ),
    Difference(
        "allocation class",
        "no bit depends on the allocation",
        "cuTensorMapSetAllocationClass (CUDA 13.5) sets a class for a window of 4 or 128 KiB in an encoded map; the "
        "bits are not published",
        "CUDA driver API, cuTensorMapSetAllocationClass",
    ),
    Difference(
        "bits 83-84, `swizzle_atomicity`",
        "the driver rejects the ATOM swizzles; the GPU ignores the bits",
        "select one of four 128B swizzles",
        "CUDA driver API, CUtensorMapSwizzle; PTX ISA, tensormap.replace",
    ),
    Difference(
        "formats 11, 12, 13",
        "rejected by the driver",
        "packed 4-bit and 6-bit types",
        "CUDA driver API, CUtensorMapDataType; PTX ISA, tensormap.replace",
    ),
    Difference(
        "im2col wide",
        "documented only for compute capability 10.0 and later",
        "encoded by cuTensorMapEncodeIm2colWide; the positions of the corners, pixels and mode are not published, so "
        "these bits are shown without names",
        "CUDA driver API, cuTensorMapEncodeIm2colWide; PTX ISA 5.5.5",
    ),
    Difference(
        "a new address",
        "changes only the first eight bytes",
        "use cuTensorMapReplaceAddress, because other bits may depend on the allocation",
        "CUDA driver API, cuTensorMapReplaceAddress",
    ),
    Difference(
        "maximum box size, `smem_bytes`",
        "228 KiB accepted, 235008 bytes rejected",
        "inferred: the shared memory of an SM, 228 KiB on sm_100a and 100 KiB on sm_120a",
        "`descriptor.access.check_described_bytes`",
    ),
)


UNKNOWN = "unknown"
_KIND_BIT = 64


@dataclass(frozen=True, slots=True)
class FieldDifference:
    """A field in which two maps differ.

    Parameters
    ----------
    name : str
        Name from ``codec.FIELDS``, ``"unknown"`` for bits outside all fields, or ``"a / b"`` if the two kinds of
        map have different fields at this position.
    first, bits : int
        Index of the first bit, and number of bits.
    left, right : int
        Values of the field in the two maps.
    differing : tuple of int
        Indices of the differing bits, counted from the start of the map.
    """

    name: str
    first: int
    bits: int
    left: int
    right: int
    differing: tuple[int, ...]

    def __str__(self) -> str:
        last = self.first + self.bits - 1
        place = f"bit {self.first}" if self.bits == 1 else f"bits {self.first}-{last}"
        return f"{self.name} ({place}): {self.left:#x} and {self.right:#x}"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Result of ``compare``.

    Parameters
    ----------
    left, right : bytes
        The 128 bytes of each map.
    names : tuple of str
        Names of the two maps.
    fields : tuple of FieldDifference
        Differences in ascending order of bits.
    note : str
        Limitation of the comparison, or "".
    """

    left: bytes
    right: bytes
    names: tuple[str, str]
    fields: tuple[FieldDifference, ...]
    note: str = ""

    @property
    def equal(self) -> bool:
        """Whether all 1024 bits are equal."""
        return not self.fields

    @property
    def bits(self) -> tuple[int, ...]:
        """Indices of the differing bits, in ascending order."""
        return tuple(bit for field in self.fields for bit in field.differing)

    def to_json(self) -> dict[str, Any]:
        """Return the comparison as JSON-compatible data."""
        shown = [
            {
                "name": f.name,
                "first": f.first,
                "bits": f.bits,
                "left": f.left,
                "right": f.right,
                "differing": f.differing,
            }
            for f in self.fields
        ]
        return {"names": self.names, "equal": self.equal, "bits": self.bits, "note": self.note, "fields": shown}

    def __str__(self) -> str:
        left_name, right_name = self.names
        if self.equal:
            lines = [f"{left_name} and {right_name} are equal in all {8 * DESCRIPTOR_BYTES} bits"]
        else:
            lines = [f"{left_name} and {right_name} differ in {len(self.bits)} of {8 * DESCRIPTOR_BYTES} bits:"]
            lines += [f"  {field}" for field in self.fields]
        return "\n".join([*lines, *([self.note] if self.note else [])])


def compare(left: bytes, right: bytes, names: tuple[str, str] = ("left", "right"), note: str = "") -> Comparison:
    """Compare two valid or invalid tensor maps bit by bit. Raises DescriptorError unless each has 128 bytes."""
    for name, data in zip(names, (left, right), strict=True):
        if len(data) != DESCRIPTOR_BYTES:
            raise DescriptorError(name, f"{len(data)} bytes", f"{DESCRIPTOR_BYTES} bytes")
    left_bits, right_bits = int.from_bytes(left, "little"), int.from_bytes(right, "little")
    return Comparison(left, right, names, tuple(_differences(left_bits, right_bits)), note)


def field_at(bit: int, kind: str) -> tuple[str, int, int]:
    """Return the name, first bit and width of the field that contains a bit.

    The result is ``("unknown", bit, 1)`` if no field contains the bit. ``kind`` is ``"tiled"`` or ``"im2col"``.
    """
    for name, (first, bits) in FIELDS[kind].items():
        if first <= bit < first + bits:
            return name, first, bits
    return UNKNOWN, bit, 1


def _differences(left: int, right: int) -> Iterator[FieldDifference]:
    kinds = ["im2col" if value >> _KIND_BIT & 1 else "tiled" for value in (left, right)]
    groups: list[tuple[str, int, int, list[int]]] = []  # Name, first bit, width and differing bits.
    for bit in range(8 * DESCRIPTOR_BYTES):
        if not (left ^ right) >> bit & 1:
            continue
        name, first, bits = _place(bit, kinds)
        if groups:
            last_name, last_first, last_bits, differing = groups[-1]
            if (name, first) == (last_name, last_first):
                differing.append(bit)
                continue
            if name == last_name and bits == 1 and differing[-1] == bit - 1:
                differing.append(bit)
                groups[-1] = (name, last_first, last_bits + 1, differing)
                continue
        groups.append((name, first, bits, [bit]))
    for name, first, bits, differing in groups:
        mask = (1 << bits) - 1
        yield FieldDifference(name, first, bits, left >> first & mask, right >> first & mask, tuple(differing))


def _place(bit: int, kinds: list[str]) -> tuple[str, int, int]:
    """Return the field at a bit if both kinds of map have the same one, otherwise the bit with both fields' names."""
    left, right = (field_at(bit, kind) for kind in kinds)
    return left if left == right else (f"{left[0]} / {right[0]}", bit, 1)
