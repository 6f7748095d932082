"""Two tensor maps bit for bit: which bits differ, in which field, and what each side has there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from cudatma.descriptor.codec import DESCRIPTOR_BYTES, FIELDS
from cudatma.errors import DescriptorError

UNKNOWN = "unknown"
_KIND_BIT = 64


@dataclass(frozen=True, slots=True)
class FieldDifference:
    """A field in which two maps differ.

    name: of codec.FIELDS, ``"unknown"`` for bits of no field, ``"a / b"`` where the two kinds of map have different
    fields there. first, bits: its position. left, right: the numbers there. differing: the bits that differ,
    numbered from the start of the map.
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
    """What compare() found.

    left, right: the 128 bytes. names: what they are. fields: the differences in the order of their bits. note: what
    the comparison cannot show; empty where it shows everything.
    """

    left: bytes
    right: bytes
    names: tuple[str, str]
    fields: tuple[FieldDifference, ...]
    note: str = ""

    @property
    def equal(self) -> bool:
        """Whether all 1024 bits are the same."""
        return not self.fields

    @property
    def bits(self) -> tuple[int, ...]:
        """Every bit that differs, ascending."""
        return tuple(bit for field in self.fields for bit in field.differing)

    def to_json(self) -> dict[str, Any]:
        """Plain data: names, equal, bits, note, and the fields with name, place and both values."""
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
        one, other = self.names
        if self.equal:
            lines = [f"{one} and {other}: all {8 * DESCRIPTOR_BYTES} bits are the same"]
        else:
            lines = [f"{one} and {other} differ in {len(self.bits)} of {8 * DESCRIPTOR_BYTES} bits:"]
            lines += [f"  {field}" for field in self.fields]
        return "\n".join([*lines, *([self.note] if self.note else [])])


def compare(left: bytes, right: bytes, names: tuple[str, str] = ("left", "right"), note: str = "") -> Comparison:
    """Compare two tensor maps of 128 bytes, whether or not they are valid. DescriptorError for another length."""
    for name, data in zip(names, (left, right), strict=True):
        if len(data) != DESCRIPTOR_BYTES:
            raise DescriptorError(name, f"{len(data)} bytes", f"{DESCRIPTOR_BYTES} bytes")
    one, other = int.from_bytes(left, "little"), int.from_bytes(right, "little")
    return Comparison(left, right, names, tuple(_differences(one, other)), note)


def field_at(bit: int, kind: str) -> tuple[str, int, int]:
    """Name, first bit and width of the field that a bit belongs to; ``("unknown", bit, 1)`` for a bit of no field.

    kind: ``"tiled"`` or ``"im2col"``.
    """
    for name, (first, bits) in FIELDS[kind].items():
        if first <= bit < first + bits:
            return name, first, bits
    return UNKNOWN, bit, 1


def _differences(one: int, other: int) -> Iterator[FieldDifference]:
    kinds = ["im2col" if value >> _KIND_BIT & 1 else "tiled" for value in (one, other)]
    groups: list[tuple[str, int, int, list[int]]] = []  # name, first bit, width, differing bits
    for bit in range(8 * DESCRIPTOR_BYTES):
        if not (one ^ other) >> bit & 1:
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
        yield FieldDifference(name, first, bits, one >> first & mask, other >> first & mask, tuple(differing))


def _place(bit: int, kinds: list[str]) -> tuple[str, int, int]:
    """field_at() where both kinds of map have the same field; else the bit alone, under both names."""
    left, right = (field_at(bit, kind) for kind in kinds)
    return left if left == right else (f"{left[0]} / {right[0]}", bit, 1)
