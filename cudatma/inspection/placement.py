"""Where each element of a box lands: its global bytes, its shared bytes, its banks.

The geometry is the emulator's, which is bit-exact with an H200 (cudatma.emulator.async_copy.tensor_box); here it
gets coordinates and names. Everything is in TMA order. Element (r, c) of a box is element c of its row r: rows are
numbered as they lie in shared memory, dimension 1 fastest; in im2col mode a row is a pixel and c a channel; with
interleave a row holds pixels, and c counts the values of their slices.
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

#: No thread block of any GPU has more shared memory; larger boxes are not laid out.
MOST_SMEM_BYTES = max(target.smem_per_block_bytes for target in TARGETS.values())


@dataclass(frozen=True, slots=True)
class Element:
    """One element of a box. row, index: (r, c). coords: its place in the tensor. is_inside: whether it is in there.

    gmem_offset: bytes from the tensor's base, exact where it is inside. smem_address: absolute. bit: where a packed
    value begins in its byte, else 0. bank: the first one that it touches.
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
    """A box at coordinates, laid out against a shared-memory address.

    spec: tiled or im2col. coords: as the instruction takes them, the origin by default. offsets: of im2col, W first.
    base: shared address of the box, a multiple of 128. Raises DescriptorError where the access is illegal, the box is
    larger than any block's shared memory, or the map is im2col wide; ArgumentError for a base that is not aligned.
    """

    def __init__(
        self, spec: AnySpec, coords: Sequence[int] | None = None, offsets: Sequence[int] | None = None, base: int = 0
    ) -> None:
        if isinstance(spec, Im2colWideSpec):
            raise DescriptorError("spec", "im2col wide", "tiled or im2col", "documents do not say enough to lay it out")
        if isinstance(base, bool) or not isinstance(base, int) or base % 128 or not 0 <= base < MOST_SMEM_BYTES:
            raise ArgumentError("base", base, f"a multiple of 128 below {MOST_SMEM_BYTES}")
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
        """Chunks of 16 bytes of shared memory, (rows, chunks)."""
        if isinstance(self.spec, TiledSpec):
            return tiled_box(self.spec, self.coords, self.base)
        return im2col_box(self.spec, self.coords, self.offsets, self.base)

    @property
    def rows(self) -> int:
        return int(self.box.gmem.shape[0])

    @property
    def chunks(self) -> int:
        """Chunks of a row."""
        return int(self.box.gmem.shape[1])

    @property
    def chunk_elems(self) -> int:
        """Elements of a chunk: 16 bytes, or 16 packed values."""
        return self.box.unit_bytes * 8 // self.spec.dtype.element_bits

    @property
    def row_elems(self) -> int:
        return self.chunks * self.chunk_elems

    def row_coords(self, row: int) -> tuple[int, ...]:
        """The place of a row's first element in the tensor; with im2col its pixel, the filter's offset added."""
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
        found: list[list[int]] = [] if pixels is None else pixels.tolist()
        return found

    def element(self, row: int, index: int) -> Element:
        """Element (r, c) of the box. ArgumentError where it is not in the box."""
        if not (0 <= row < self.rows and 0 <= index < self.row_elems):
            allowed = f"r in 0..{self.rows - 1}, c in 0..{self.row_elems - 1}"
            raise ArgumentError("element", f"({row}, {index})", allowed)
        box, bits = self.box, self.spec.dtype.element_bits
        chunk, within = divmod(index, self.chunk_elems)
        # Padded packed values lie densely in the first bytes of their chunk, as the loads of PTX ISA 5.5.1.1 say.
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
    """Whether some block's shared memory could hold a box. DescriptorError."""
    size = max(spec.footprint_bytes, spec.expected_bytes)
    if size > MOST_SMEM_BYTES:
        raise DescriptorError("box", f"{size} bytes of shared memory", f"at most {MOST_SMEM_BYTES}, as a block has")


def origin(spec: AnySpec) -> tuple[int, ...]:
    """The first place where a box can be loaded: 0 everywhere, or im2col's lower corner."""
    place = [0] * spec.rank
    if isinstance(spec, Im2colSpec):
        first = first_pixel_dim(spec)
        place[first : first + spec.rank - 2] = list(spec.lower_corner)
    elif isinstance(spec, Im2colWideSpec):
        place[1] = spec.lower_corner_w
    return tuple(place)


__all__ = ["CHUNK", "MOST_SMEM_BYTES", "Element", "Placement", "origin"]
