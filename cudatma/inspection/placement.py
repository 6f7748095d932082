"""Compute each box element's position in global memory, in shared memory and in the banks.

The emulator computes the positions (cudatma.emulator.async_copy.tensor_box), which match those of an H200 bit for bit.
Sequences are in TMA order. Element (r, c) of a box is element c of row r. Rows are numbered in the order of shared
memory, with dimension 1 fastest. In im2col mode, r is a pixel and c is a channel. With interleaving, a row consists of
pixels, and c counts the values of their channel slices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from cudatma.descriptor import rules
from cudatma.descriptor.access import check_load, check_traps, first_pixel_dim
from cudatma.descriptor.spec import AnySpec, Im2colSpec, Im2colWideSpec, TiledSpec
from cudatma.emulator.async_copy.tensor_box import CHUNK, Box, im2col_box, im2col_pixels, tiled_box
from cudatma.errors import ArgumentError, DescriptorError
from cudatma.layout import BANK_BYTES, BANKS, Interleave, traversed
from cudatma.target import TARGETS

#: Maximum shared memory of a thread block on any supported GPU. A larger box raises an error.
MAX_SMEM_BYTES = max(target.smem_per_block_bytes for target in TARGETS.values())


@dataclass(frozen=True, slots=True)
class Element:
    """An element of a box.

    Parameters
    ----------
    row, index : int
        Row of the element and its index in the row.
    coords : tuple of int
        Position in the tensor.
    is_inside : bool
        Whether the position is inside the tensor.
    gmem_offset : int
        Number of bytes from the tensor's base. The number is exact only if the element is inside.
    smem_address : int
        Address in shared memory.
    bit : int
        First bit of a packed value in its byte, otherwise 0.
    bank : int
        First bank that the element occupies.
    """

    row: int
    index: int
    coords: tuple[int, ...]
    is_inside: bool
    gmem_offset: int
    smem_address: int
    bit: int
    bank: int


class Placement:
    """Layout of the box at given coordinates and a shared-memory address.

    Parameters
    ----------
    spec : TiledSpec or Im2colSpec
        Specification of the map.
    coords : sequence of int, optional
        Coordinates of the box. Default: the first coordinates at which a box can be loaded.
    offsets : sequence of int, optional
        Im2col offsets, W first.
    base : int, default: 0
        Shared-memory address of the box. It must be a multiple of 128.

    Raises
    ------
    DescriptorError
        If the access is illegal, if the box is larger than the shared memory of any block, or if the map is im2col
        wide.
    ArgumentError
        If ``base`` is not a multiple of 128.
    """

    def __init__(
        self, spec: AnySpec, coords: Sequence[int] | None = None, offsets: Sequence[int] | None = None, base: int = 0
    ) -> None:
        if isinstance(spec, Im2colWideSpec):
            raise DescriptorError(
                "spec", "im2col wide", "tiled or im2col (the layout of im2col wide is not documented)"
            )
        if isinstance(base, bool) or not isinstance(base, int) or base % 128 or not 0 <= base < MAX_SMEM_BYTES:
            raise ArgumentError("base", base, f"a multiple of 128 below {MAX_SMEM_BYTES}")
        check_size(spec)
        place = origin(spec) if coords is None else tuple(coords)
        check_traps(spec, place)
        if offsets is not None:
            check_load(spec, place, offsets)
        self.spec: TiledSpec | Im2colSpec = spec
        self.coords, self.base = tuple(int(c) for c in place), base
        self.offsets = tuple(int(o) for o in offsets or (0,) * (spec.rank - 2)) if isinstance(spec, Im2colSpec) else ()

    @cached_property
    def box(self) -> Box:
        """Box as 16-byte chunks of shared memory, with shape (rows, chunks)."""
        if isinstance(self.spec, TiledSpec):
            return tiled_box(self.spec, self.coords, self.base)
        return im2col_box(self.spec, self.coords, self.offsets, self.base)

    @property
    def rows(self) -> int:
        return int(self.box.gmem.shape[0])

    @property
    def chunks(self) -> int:
        """Number of chunks per row."""
        return int(self.box.gmem.shape[1])

    @property
    def chunk_elems(self) -> int:
        """Number of elements per chunk of 16 bytes or of 16 packed values."""
        return self.box.unit_bytes * 8 // self.spec.dtype.element_bits

    @property
    def row_elems(self) -> int:
        return self.chunks * self.chunk_elems

    def row_coords(self, row: int) -> tuple[int, ...]:
        """Return the tensor position of a row's first element. For im2col, this is the pixel plus the filter offset."""
        spec, place = self.spec, list(self.coords)
        if isinstance(spec, TiledSpec):
            counts = list(traversed(spec.box, spec.element_strides, spec.interleave))
            if spec.interleave is not Interleave.NONE:
                counts[-2] = 1
            for axis in range(1, spec.rank):
                row, index = divmod(row, counts[axis])
                place[axis] += index * spec.element_strides[axis]
            return tuple(place)
        first, spatial = first_pixel_dim(spec), spec.rank - 2
        pixel = self._pixels[row]
        for axis in range(spatial):
            place[first + axis] = int(pixel[axis]) + self.offsets[axis]
        place[-1] = int(pixel[spatial])
        return tuple(place)

    @cached_property
    def _pixels(self) -> list[list[int]]:
        pixels = im2col_pixels(self.spec, self.coords) if isinstance(self.spec, Im2colSpec) else None
        rows: list[list[int]] = [] if pixels is None else pixels.tolist()
        return rows

    def element(self, row: int, index: int) -> Element:
        """Return element (row, index) of the box. Raises ArgumentError if it is outside the box."""
        if not (0 <= row < self.rows and 0 <= index < self.row_elems):
            allowed = f"(row, index) with a row from 0 to {self.rows - 1} and an index from 0 to {self.row_elems - 1}"
            raise ArgumentError("element", f"({row}, {index})", allowed)
        box, bits = self.box, self.spec.dtype.element_bits
        chunk, within = divmod(index, self.chunk_elems)
        # Padded packed values are contiguous at the start of their chunk. [PTX ISA 5.5.1.1]
        byte, bit = divmod(within * bits, 8)
        inside = bool((byte + 1) <= int(box.valid[row, chunk]))
        address = int(box.smem[row, chunk]) + (
            byte ^ 8 if box.flipped is not None and box.flipped[row, chunk] else byte
        )
        return Element(
            row,
            index,
            self._element_coords(row, index),
            inside,
            int(box.gmem[row, chunk]) + byte,
            address,
            bit,
            address // BANK_BYTES % BANKS,
        )

    def _element_coords(self, row: int, index: int) -> tuple[int, ...]:
        spec, place = self.spec, list(self.row_coords(row))
        if spec.interleave is Interleave.NONE:
            place[0] += index
        elif isinstance(spec, TiledSpec):
            values = 8 * spec.interleave.slice_bytes // rules.smem_bits(spec.dtype)
            place[0] += index // values * spec.element_strides[0]
        return tuple(place)


def check_size(spec: AnySpec) -> None:
    """Raise DescriptorError if the box is larger than the shared memory of a block on any supported GPU."""
    size = max(spec.footprint_bytes, spec.expected_bytes)
    if size > MAX_SMEM_BYTES:
        raise DescriptorError("box", f"{size} bytes", f"at most {MAX_SMEM_BYTES} bytes of shared memory on any GPU")


def origin(spec: AnySpec) -> tuple[int, ...]:
    """Return the first coordinates at which a box can be loaded: 0, or the lower corner for im2col."""
    place = [0] * spec.rank
    if isinstance(spec, Im2colSpec):
        first = first_pixel_dim(spec)
        place[first : first + spec.rank - 2] = list(spec.lower_corner)
    elif isinstance(spec, Im2colWideSpec):
        place[1] = spec.lower_corner_w
    return tuple(place)


__all__ = ["CHUNK", "MAX_SMEM_BYTES", "Element", "Placement", "origin"]
