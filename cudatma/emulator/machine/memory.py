"""Memories of the emulated device, as arrays of bytes.

Global addresses are the host addresses of the arrays' bytes, so that a tensor map that contains the pointer of a NumPy
array works unchanged. Bits 24 and up of a shared-memory address contain the CTA's rank in its cluster. Shared memory
starts at offset 0x400, as on Hopper. The generic windows of shared and local memory are at 2^60 and 2^61.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable
from typing import Any

import numpy as np

from cudatma.emulator.ptx.types import LANES, NUMPY, Array
from cudatma.errors import ArgumentError, counted

SHARED_WINDOW, LOCAL_WINDOW = 1 << 60, 1 << 61
#: Offset of the first byte of a CTA's shared memory. The system reserves the bytes before it.
SHARED_START = 0x400
RANK_SHIFT = 24
#: Address of the first kernel parameter in the .param space, which has 32-bit addresses.
PARAM_START = 0x400


class Region:
    """Contiguous bytes at an address. ``data`` is a (size,) uint8 view of the owner's array."""

    __slots__ = ("_views", "base", "base_word", "data", "end", "is_writable", "name", "owner", "shadow", "size")

    def __init__(self, base: int, data: Array, name: str, owner: Any = None, is_writable: bool = True) -> None:
        self.base, self.data, self.name, self.owner, self.is_writable = base, data, name, owner, is_writable
        #: Base address in every lane, because NumPy is twice as fast with a vector as with a scalar.
        self.base_word: Array = np.full(LANES, base, np.uint64)
        self.size = int(data.size)
        self.end = base + self.size
        self._views: dict[str, Array] = {}
        #: Shadow of a global buffer (hazards.global_memory), or None before the first write.
        self.shadow: Any = None

    def element(self, offset: int) -> str:
        """Return the name of the element at a byte offset, such as "x[3, 17]", or "byte 68 of x"."""
        array = self.owner
        if isinstance(array, np.ndarray) and array.dtype.itemsize and array.size:
            place, rest = divmod(offset, array.dtype.itemsize)
            is_whole = array.size * array.dtype.itemsize == self.size and not rest
            order = "C" if array.flags.c_contiguous else "F"
            if is_whole and array.ndim and (array.flags.c_contiguous or array.flags.f_contiguous):
                index = np.unravel_index(place, array.shape, order)  # type: ignore[call-overload]
                return f"{self.name}[{', '.join(map(str, map(int, index)))}]"
        return f"byte {offset} of {self.name}"

    def view(self, code: str) -> Array:
        """Return a view of the bytes as elements of a type, without a partial element at the end."""
        elements = self._views.get(code)
        if elements is None:
            dtype = NUMPY[code]
            elements = self.data[: self.size - self.size % dtype.itemsize].view(dtype)
            self._views[code] = elements
        return elements

    def inside(self, addresses: Array, size: int) -> Array | None:
        """Return the int64 byte offsets of accesses of ``size`` bytes, or None if any is misaligned or outside.

        Addresses below the region wrap to large offsets. The bitwise OR of all offsets is an upper bound on the largest
        offset.
        """
        offsets = addresses - self.base_word[: addresses.size]
        bits = int(_union(offsets))
        if (bits | self.base) & (size - 1) or (
            bits + size > self.size and int(np.maximum.reduce(offsets)) + size > self.size
        ):
            return None
        result: Array = offsets.view(np.int64)
        return result

    def gather(self, offsets: Array, code: str, count: int) -> Array:
        """Return the elements at int64 byte offsets that are multiples of the element size, shape (count, lanes)."""
        first = in_units(offsets, _SHIFTS[code])
        if count == 1:
            result: Array = self.view(code)[first][None]
            return result
        return self.view(code)[first[None, :] + _STEPS[:count]]

    def scatter(self, offsets: Array, code: str, values: Iterable[Array]) -> None:
        """Write vectors of consecutive elements. If several lanes write the same bytes, the last lane wins."""
        first = in_units(offsets, _SHIFTS[code])
        view = self.view(code)
        for step, row in enumerate(values):
            view[first + step if step else first] = row


_union = np.bitwise_or.reduce
_STEPS = np.arange(16, dtype=np.int64)[:, None]
#: Maps each element type to the base-2 logarithm of its size in bytes.
_SHIFTS: dict[str, int] = {code: dtype.itemsize.bit_length() - 1 for code, dtype in NUMPY.items()}
#: Shift counts in every lane, because NumPy is twice as fast with a vector as with a scalar.
_LANE_SHIFTS: list[Array] = [np.full(LANES, shift, np.int64) for shift in range(6)]


def in_units(offsets: Array, shift: int) -> Array:
    """Convert nonnegative int64 byte offsets to units of 2 ** shift bytes, for shifts of 0 to 5."""
    if not shift:
        return offsets
    shifts = _LANE_SHIFTS[shift]
    result: Array = offsets >> (shifts if offsets.shape == shifts.shape else shifts[0])
    return result


def bytes_of(array: Any, name: str = "array") -> Array:
    """Return the bytes of a NumPy array as (n,) uint8 without a copy.

    For a view with gaps, return the bytes of the contiguous array that contains the view. Raise ArgumentError if there
    is no such array.
    """
    if not isinstance(array, np.ndarray):
        raise ArgumentError(name, type(array).__name__, "a NumPy array")
    if array.dtype.hasobject or not array.dtype.isnative:
        raise ArgumentError(
            name, f"dtype {array.dtype!s}", "an array of numbers in native byte order", "pass a converted copy"
        )
    array = array.view(np.ndarray)  # Subclasses such as np.matrix index differently.
    while not (array.flags.c_contiguous or array.flags.f_contiguous) and isinstance(array.base, np.ndarray):
        array = array.base
    if not array.flags.c_contiguous and not array.flags.f_contiguous:
        raise ArgumentError(name, f"strides {array.strides}", "a contiguous array or a view of one", "pass a copy")
    flat = array.reshape(-1, order="A") if array.ndim != 1 else array
    if array.size == 0:
        return np.zeros(0, np.uint8)
    result: Array = flat.view(np.uint8)
    return result


def address_of(array: Array) -> int:
    return int(array.__array_interface__["data"][0])


def _merge(one: Region, other: Region) -> Region:
    """Return a region that covers two overlapping regions. The result keeps the owners of both regions alive."""
    base, end = min(one.base, other.base), max(one.end, other.end)
    if other.base == base and other.end == end:
        return other
    data = np.frombuffer(memoryview((ctypes.c_uint8 * (end - base)).from_address(base)), np.uint8)
    is_writable = one.is_writable and other.is_writable
    return Region(base, data, f"{one.name} and {other.name}", (one.owner, other.owner), is_writable)


class GlobalMemory:
    """Regions that a kernel may access: arguments, registered arrays, module variables and parameters."""

    def __init__(self) -> None:
        self._bases: list[int] = []
        self._regions: dict[int, Region] = {}
        #: Maps an instruction to the region of its last access, which the next access probably uses again.
        self.recent: dict[int, Region] = {}

    def add(self, array: Any, name: str) -> int:
        """Map an array and return its address. An array inside a mapped array is not mapped again."""
        data = bytes_of(array, name)
        address = address_of(array)
        if data.size == 0:
            return address
        base = address_of(data)
        region = self.find(base)
        if region is None or base + data.size > region.end:
            self._insert(Region(base, data, name, array, bool(array.flags.writeable)))
        return address

    def _insert(self, region: Region) -> None:
        """Add a region, and merge it with regions that overlap it. Overlapping regions are parts of the same buffer."""
        near = self._bases[max(0, bisect_right(self._bases, region.base) - 1) : bisect_left(self._bases, region.end)]
        for old in [r for r in map(self._regions.__getitem__, near) if region.base < r.end]:
            self._bases.remove(old.base)
            del self._regions[old.base]
            region = _merge(old, region)
        insort(self._bases, region.base)
        self._regions[region.base] = region

    def remove(self, base: int) -> None:
        if base in self._regions:
            self._bases.remove(base)
            del self._regions[base]
        self.recent.clear()

    def regions(self) -> list[Region]:
        return list(self._regions.values())

    def snapshot(self) -> dict[int, Array]:
        """Return copies of the bytes of all writable regions."""
        return {base: region.data.copy() for base, region in self._regions.items() if region.is_writable}

    def restore(self, saved: dict[int, Array]) -> None:
        for base, data in saved.items():
            self._regions[base].data[:] = data

    def find(self, address: int) -> Region | None:
        """Return the region that contains an address, or None if there is none."""
        position = bisect_right(self._bases, address) - 1
        if position < 0:
            return None
        region = self._regions[self._bases[position]]
        return region if address < region.end else None

    def nearest(self, address: int) -> str:
        """Describe the region nearest to an address for an error message."""
        best = min(self._regions.values(), key=lambda r: max(r.base - address, address - r.end + 1), default=None)
        if best is None:
            return "no memory is mapped"
        if address < best.base:
            return f"{counted(best.base - address, 'byte')} before {best.name} ({counted(best.size, 'byte')})"
        return f"{counted(address - best.end, 'byte')} past the end of {best.name} ({counted(best.size, 'byte')})"
