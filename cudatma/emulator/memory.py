"""Byte memories of the emulated device.

Global addresses are the host addresses of the arrays' own bytes, so a tensor map that names a NumPy array's pointer
works as it is. Shared addresses have the block's rank in its cluster in bits 24 and up and begin at 0x400, as on
Hopper. Generic addresses of shared and local memory lie in windows at 2^60 and 2^61.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from typing import Any

import numpy as np

from cudatma.emulator.types import NUMPY, Array
from cudatma.errors import ArgumentError

SHARED_WINDOW, LOCAL_WINDOW = 1 << 60, 1 << 61
#: Offset of the first byte of a block's shared memory: below it the system's own KiB.
SHARED_START = 0x400
RANK_SHIFT = 24


class Region:
    """A run of bytes at an address. data: (size,) uint8, shared with whoever owns the array."""

    __slots__ = ("_views", "base", "data", "end", "is_writable", "name", "owner", "size")

    def __init__(self, base: int, data: Array, name: str, owner: Any = None, is_writable: bool = True) -> None:
        self.base, self.data, self.name, self.owner, self.is_writable = base, data, name, owner, is_writable
        self.size = int(data.size)
        self.end = base + self.size
        self._views: dict[str, Array] = {}

    def view(self, code: str) -> Array:
        """All whole elements of a type, from the first byte on."""
        found = self._views.get(code)
        if found is None:
            dtype = NUMPY[code]
            found = self.data[: self.size - self.size % dtype.itemsize].view(dtype)
            self._views[code] = found
        return found

    def gather(self, offsets: Array, code: str, count: int) -> Array:
        """(count, lanes) elements; offsets: byte offsets, int64, multiples of the element's size."""
        size = NUMPY[code].itemsize
        first = offsets // size if size > 1 else offsets
        if count == 1:
            result: Array = self.view(code)[first][None]
            return result
        return self.view(code)[first[None, :] + _STEPS[:count]]

    def scatter(self, offsets: Array, code: str, values: Array) -> None:
        """Write (count, lanes) elements; of several lanes at one place the last wins."""
        size = NUMPY[code].itemsize
        first = offsets // size if size > 1 else offsets
        view = self.view(code)
        for step, row in enumerate(values):
            view[first + step if step else first] = row


_STEPS = np.arange(16, dtype=np.int64)[:, None]


def bytes_of(array: Any, name: str = "array") -> Array:
    """The bytes behind a NumPy array as (n,) uint8 without a copy: of the array that a view with gaps was cut from.

    Raises ArgumentError where there is no array without gaps.
    """
    if not isinstance(array, np.ndarray):
        raise ArgumentError(name, type(array).__name__, "a NumPy array")
    while not (array.flags.c_contiguous or array.flags.f_contiguous) and isinstance(array.base, np.ndarray):
        array = array.base
    if not array.flags.c_contiguous and not array.flags.f_contiguous:
        raise ArgumentError(name, f"strides {array.strides}", "an array without gaps, or a view of one", "pass a copy")
    flat = array.reshape(-1, order="A") if array.ndim != 1 else array
    if array.size == 0:
        return np.zeros(0, np.uint8)
    result: Array = flat.view(np.uint8)
    return result


def address_of(array: Array) -> int:
    """Where an array's first byte lies."""
    return int(array.__array_interface__["data"][0])


class GlobalMemory:
    """The regions that a kernel may touch: arguments, registered arrays, module variables, parameters."""

    def __init__(self) -> None:
        self._bases: list[int] = []
        self._regions: dict[int, Region] = {}
        self.last: Region | None = None

    def add(self, array: Any, name: str) -> int:
        """Map an array; returns its address. An array that lies inside a mapped one is not mapped twice."""
        data = bytes_of(array, name)
        address = address_of(array)
        if data.size == 0:
            return address
        base = address_of(data)
        found = self.find(base)
        if found is None or base + data.size > found.end:
            self._insert(Region(base, data, name, array, bool(array.flags.writeable)))
        return address

    def _insert(self, region: Region) -> None:
        for old in [r for r in self._regions.values() if r.base < region.end and region.base < r.end]:
            self._bases.remove(old.base)
            del self._regions[old.base]
        insort(self._bases, region.base)
        self._regions[region.base] = region

    def remove(self, base: int) -> None:
        """Forget a region."""
        if base in self._regions:
            self._bases.remove(base)
            del self._regions[base]
        self.last = None

    def snapshot(self) -> dict[int, Array]:
        """Copies of all writable regions' bytes."""
        return {base: region.data.copy() for base, region in self._regions.items() if region.is_writable}

    def restore(self, saved: dict[int, Array]) -> None:
        """Put a snapshot's bytes back."""
        for base, data in saved.items():
            self._regions[base].data[:] = data

    def find(self, address: int) -> Region | None:
        """The region that holds an address."""
        position = bisect_right(self._bases, address) - 1
        if position < 0:
            return None
        region = self._regions[self._bases[position]]
        return region if address < region.end else None

    def nearest(self, address: int) -> str:
        """What lies nearest to an address, for error texts."""
        best = min(self._regions.values(), key=lambda r: max(r.base - address, address - r.end + 1), default=None)
        if best is None:
            return "no memory is mapped"
        if address < best.base:
            return f"{best.base - address} bytes before {best.name} ({best.size} bytes)"
        return f"{address - best.end} bytes past the end of {best.name} ({best.size} bytes)"
