"""Layout of a TMA box in shared memory: swizzle, pitch, footprint, alignment and bank conflicts.

**NumPy order and TMA order.** NumPy lists the outermost dimension first, and a tensor map lists the innermost dimension
first. Only to_tma_order() converts between the two orders. In this project ``dims``, ``box``, ``element_strides`` and
``coords`` are in TMA order unless a docstring states otherwise.

Sources: PTX ISA 5.5.7 "Swizzling Modes", 5.5.6 "Interleave Layout", 5.5.3.2 "Traversal-Stride"; CUDA driver API,
cuTensorMapEncodeTiled. The 32B, 64B and 128B swizzles, the padding of rows to the swizzle span and the bytes of
interleaved boxes were measured on an H200. The ATOM swizzles (sm_100 and later) follow the tables of the PTX ISA and
were not measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from math import prod
from typing import TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from cudatma.errors import ArgumentError, DescriptorError

M = TypeVar("M", bound="Mode")

BANKS = 32
BANK_BYTES = 4
WARP_LANES = 32


class Mode(IntEnum):
    """Base class of a tensor map's enumerations, whose members have the driver's values."""

    @property
    def label(self) -> str:
        """Name of the mode, such as ``"none"``, ``"128B"`` or ``"128B_ATOM_32B"``."""
        if not (self.name.startswith("B") and self.name[1:2].isdigit()):
            return self.name.lower()
        width, _, rest = self.name[1:].partition("_")
        return f"{width}B_{rest}" if rest else f"{width}B"

    @classmethod
    def parse(cls: type[M], value: object, field: str) -> M:
        """Return the member with this value, or with this label in upper or lower case.

        Raises a DescriptorError with the field name ``field`` if there is no such member.
        """
        if isinstance(value, cls):
            return value
        if isinstance(value, str):
            for member in cls:
                if value.strip().upper() in (member.label.upper(), member.name):
                    return member
        elif isinstance(value, int) and not isinstance(value, (bool, Mode)) and value in {int(m) for m in cls}:
            return cls(value)
        raise DescriptorError(field, value, ", ".join(member.label for member in cls))


class Swizzle(Mode):
    """Permutation of 16-byte chunks in shared memory (CUtensorMapSwizzle)."""

    NONE = 0
    B32 = 1
    B64 = 2
    B128 = 3
    B128_ATOM_32B = 4
    B128_ATOM_32B_FLIP_8B = 5
    B128_ATOM_64B = 6

    @property
    def span_bytes(self) -> int:
        """Number of bytes within which chunks are permuted (also the minimum row pitch), or 0 without swizzle."""
        return 0 if self is Swizzle.NONE else min(16 << int(self), 128)

    @property
    def is_atom(self) -> bool:
        """Whether the mode is a 128B swizzle with 32B or 64B atomicity (feature ``swizzle_atoms``)."""
        return self >= Swizzle.B128_ATOM_32B


class Interleave(Mode):
    """Interleaved layouts of channel slices, NC/8HWC8 and NC/16HWC16 (CUtensorMapInterleave).

    The dimensions of an interleaved map are W, H, D, C and N, innermost first. A map of rank 4 has no D, and a map of
    rank 3 has neither H nor D. An element along W is a whole slice of channels, and a step along C moves to the next
    slice.
    """

    NONE = 0
    B16 = 1
    B32 = 2

    @property
    def slice_bytes(self) -> int:
        """Number of bytes per channel slice, or 0 without interleave."""
        return 16 * int(self)


def to_tma_order(values: Iterable[int]) -> tuple[int, ...]:
    """Convert values from NumPy order (outermost first) to TMA order (innermost first)."""
    return tuple(reversed(tuple(values)))


#: Pairs (mask, shift) of each mode. The address bits in the mask are XORed with the bits ``shift`` positions higher.
_XOR: dict[Swizzle, tuple[tuple[int, int], ...]] = {
    Swizzle.NONE: (),
    Swizzle.B32: ((0x10, 3),),
    Swizzle.B64: ((0x30, 3),),
    Swizzle.B128: ((0x70, 3),),
    Swizzle.B128_ATOM_32B: ((0x60, 2),),
    Swizzle.B128_ATOM_32B_FLIP_8B: ((0x60, 2), (0x08, 4)),
    Swizzle.B128_ATOM_64B: ((0x40, 1),),
}


@overload
def swizzle(address: int, mode: Swizzle) -> int: ...
@overload
def swizzle(address: NDArray[np.int64], mode: Swizzle) -> NDArray[np.int64]: ...
def swizzle(address: int | NDArray[np.int64], mode: Swizzle) -> int | NDArray[np.int64]:
    """Return the address at which a swizzle stores the byte that the plain layout stores at ``address``.

    ``address`` is an absolute byte address in shared memory (an int or an int64 array), not an offset into a buffer.
    The function is its own inverse. The flip mode also swaps the halves of the 16-byte chunks in every odd 128-byte
    line. Source: PTX ISA 5.5.7. The 32B, 64B and 128B modes were also measured.
    """
    result = address
    for mask, shift in _XOR[mode]:
        result = result ^ ((address >> shift) & mask)
    return result


def required_alignment(mode: Swizzle) -> int:
    """Return the alignment in bytes of the shared-memory destination: 128, 256, 512 or 1024.

    cp.async.bulk.tensor requires 128. The swizzle pattern repeats after 256 (32B), 512 (64B) or 1024 bytes (128B). With
    this alignment, a box starts at the first line of the pattern, as wgmma descriptors expect. The patterns of the ATOM
    modes repeat sooner, but the PTX ISA specifies 1024 for every 128-byte swizzle.
    """
    return max(128, 8 * mode.span_bytes)


@dataclass(frozen=True, slots=True)
class BoxLayout:
    """Layout of a box in shared memory: ``rows`` rows of ``row_bytes`` bytes each, ``pitch_bytes`` bytes apart."""

    rows: int
    row_bytes: int
    pitch_bytes: int

    @property
    def expected_bytes(self) -> int:
        """Number of bytes that the mbarrier counts. It includes elements outside the tensor but no padding."""
        return self.rows * self.row_bytes

    @property
    def footprint_bytes(self) -> int:
        """Number of bytes of shared memory per box, including the padding of rows to the swizzle span."""
        return self.rows * self.pitch_bytes


def traversed(box: Sequence[int], element_strides: Sequence[int], interleave: Interleave) -> tuple[int, ...]:
    """Return the number of elements that TMA delivers in each dimension (TMA order), ceil(box[i] / element_strides[i]).

    Without interleave, the hardware ignores element_strides[0] and delivers all of box[0].
    """
    counts = [-(-size // step) for size, step in zip(box, element_strides, strict=True)]
    if interleave is Interleave.NONE:
        counts[0] = box[0]
    return tuple(counts)


def box_layout(counts: Sequence[int], element_bits: int, mode: Swizzle = Swizzle.NONE) -> BoxLayout:
    """Return the layout of a box without interleave.

    ``counts`` contains the number of elements along each dimension, in TMA order. Each must be positive.
    ``element_bits`` is the size of an element in shared memory. Rows narrower than the swizzle span are padded to the
    span.
    """
    row_bytes = counts[0] * element_bits // 8
    return BoxLayout(prod(counts[1:]), row_bytes, max(row_bytes, mode.span_bytes))


def interleaved_layout(pixels: int, rows: int, interleave: Interleave, mode: Swizzle = Swizzle.NONE) -> BoxLayout:
    """Return the layout of ``rows`` rows of ``pixels`` pixels along W, where each pixel is one slice of channels.

    The mbarrier counts one slice of 16 or 32 bytes per pixel for any element type, and a pixel has the same size in
    shared memory. The layout has a single row, because rows are contiguous even if they are narrower than the swizzle
    span (1500 boxes were measured on an H200). The pitch of this row is a multiple of the swizzle span.
    """
    size = rows * pixels * interleave.slice_bytes
    span = max(mode.span_bytes, interleave.slice_bytes)
    return BoxLayout(1, size, -(-size // span) * span)


def wavefronts(addresses: Iterable[int | None], access_bytes: int) -> tuple[int, int]:
    """Return the number of shared-memory wavefronts of one warp access, and the minimum for these lanes.

    ``addresses`` contains a byte address for each of at most 32 lanes, or None for an inactive lane. ``access_bytes``
    is 1, 2, 4, 8 or 16 and must divide the addresses. Shared memory has 32 banks of 4 bytes. The hardware splits a wide
    access into groups of 32, 16 or 8 lanes that together access at most 128 bytes. Lanes that access the same word
    cause no conflict. Raises ArgumentError if the size or an address is invalid.
    """
    lanes = list(addresses)
    if access_bytes not in (1, 2, 4, 8, 16):
        raise ArgumentError("access_bytes", access_bytes, "1, 2, 4, 8 or 16")
    if len(lanes) > WARP_LANES:
        raise ArgumentError("addresses", f"{len(lanes)} addresses", f"a sequence of at most {WARP_LANES} addresses")
    for lane, address in enumerate(lanes):
        if address is not None and (address < 0 or address % access_bytes):
            raise ArgumentError(f"addresses[{lane}]", address, f"a nonnegative multiple of {access_bytes}")
    group = min(WARP_LANES, BANKS * BANK_BYTES // access_bytes)
    total = minimum = 0
    for start in range(0, len(lanes), group):
        words = {
            word
            for address in lanes[start : start + group]
            if address is not None
            for word in range(address // BANK_BYTES, -(-(address + access_bytes) // BANK_BYTES))
        }
        loads = [0] * BANKS
        for word in words:
            loads[word % BANKS] += 1
        total += max(loads)
        minimum += 1 if words else 0
    return total, minimum


def bank_conflicts(addresses: Iterable[int | None], access_bytes: int) -> int:
    """Return the number of wavefronts that bank conflicts add to the minimum of a warp access.

    The arguments are the same as for wavefronts().
    """
    total, minimum = wavefronts(addresses, access_bytes)
    return total - minimum
