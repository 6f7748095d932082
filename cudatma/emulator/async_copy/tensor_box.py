"""Geometry of TMA: the global and shared bytes that a tensor copy accesses, exactly as on an H200.

Sources: PTX ISA 5.5 "Tensors" (tiled mode, im2col mode, bounding box, traversal strides); CUDA driver API,
cuTensorMapEncodeTiled and cuTensorMapEncodeIm2col. The padding of narrow rows to the swizzle span, the boxes of
interleaved maps and the order of pixels in im2col's bounding box were measured.

Functions raise BoxError for copies that trap on hardware. descriptor.access defines the rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cudatma.descriptor import rules
from cudatma.descriptor.access import REDUCE_TYPES, bounding_box, check_traps, check_write_traps, first_pixel_dim
from cudatma.descriptor.codec import FIELDS, decode
from cudatma.descriptor.spec import Im2colSpec, TiledSpec
from cudatma.emulator.ptx.types import Array
from cudatma.errors import DescriptorError
from cudatma.layout import Interleave, Swizzle, swizzle, traversed
from cudatma.target import Target

CHUNK = 16
MapSpec = TiledSpec | Im2colSpec


class BoxError(ValueError):
    """A copy would trap on hardware. ``error`` is the CUresult without the prefix ``CUDA_ERROR_``."""

    def __init__(self, message: str, error: str = "ILLEGAL_INSTRUCTION") -> None:
        self.error = error
        super().__init__(message)


@dataclass(slots=True)
class Box:
    """Layout of a tensor copy in 16-byte chunks of shared memory. Arrays have shape (rows, chunks).

    Attributes
    ----------
    gmem
        Byte offsets from the tensor's base, int64.
    valid
        Number of bytes of each chunk, from its first byte, that are inside the tensor, int64.
    smem
        Swizzled shared-memory addresses without the CTA's rank, int64.
    flipped
        Whether the swizzle exchanges the halves of each chunk, bool, or None if it never does.
    unit_bytes
        Number of bytes of global memory per chunk, which is less than 16 for the padded packed types.
    expected_bytes
        Number of bytes that the mbarrier counts.
    """

    spec: MapSpec
    gmem: Array
    valid: Array
    smem: Array
    flipped: Array | None
    unit_bytes: int
    expected_bytes: int

    @property
    def plane_rows(self) -> int:
        """Number of box rows along the tensor's second dimension. These rows form a two-dimensional plane."""
        spec = self.spec
        if not isinstance(spec, TiledSpec) or spec.rank < 2 or spec.interleave is not Interleave.NONE:
            return len(self.smem)
        return min(len(self.smem), traversed(spec.box, spec.element_strides, spec.interleave)[1])


def read_map(data: bytes, target: Target | None = None) -> MapSpec:
    """Decode a tensor map. Raise BoxError if the hardware does not accept its 128 bytes.

    Targets without swizzle atoms ignore the swizzle atomicity bits (measured on an H200).
    """
    if target is not None and not target.has("swizzle_atoms"):
        first, bits = FIELDS["tiled"]["swizzle_atomicity"]
        value = int.from_bytes(data, "little") & ~(((1 << bits) - 1) << first)
        data = value.to_bytes(len(data), "little")
    try:
        spec = decode(data).spec
        if target is not None and spec.dtype.packed and not target.has("packed_types"):
            raise BoxError(f"element type {spec.dtype.name} is not supported on {target.name}")
        return spec
    except DescriptorError as error:
        trap = "MISALIGNED_ADDRESS" if error.field == "address" else "ILLEGAL_INSTRUCTION"
        raise BoxError(f"the tensor map is invalid ({error})", trap) from error


def tiled_box(spec: TiledSpec, coords: Sequence[int], destination: int) -> Box:
    """Return the layout of a box at coordinates (innermost first) and shared-memory address ``destination``."""
    counts, steps = list(traversed(spec.box, spec.element_strides, spec.interleave)), spec.element_strides
    if spec.interleave is not Interleave.NONE:
        counts[-2] = 1  # A copy transfers one channel slice, regardless of the box.
    rows, rows_inside = np.zeros(1, np.int64), np.ones(1, bool)
    for axis in range(1, spec.rank):
        index = coords[axis] + steps[axis] * np.arange(counts[axis], dtype=np.int64)
        inside = (index >= 0) & (index < spec.dims[axis])
        rows = ((index * spec.strides_bytes[axis - 1])[:, None] + rows).reshape(-1)
        rows_inside = (inside[:, None] & rows_inside).reshape(-1)
    if spec.interleave is not Interleave.NONE:
        return _slices(spec, rows, rows_inside, coords[0] + steps[0] * np.arange(counts[0]), destination)
    return _elements(spec, rows, rows_inside, coords[0], counts[0], destination)


def gather_box(spec: TiledSpec, coords: Sequence[int], destination: int) -> Box:
    """Return the layout of tile::gather4 and tile::scatter4. ``coords`` are (column, row, row, row, row)."""
    index = np.array(coords[1:], np.int64)
    inside = (index >= 0) & (index < spec.dims[1])
    return _elements(spec, index * spec.strides_bytes[0], inside, coords[0], spec.box[0], destination)


def im2col_box(spec: Im2colSpec, coords: Sequence[int], offsets: Sequence[int], destination: int) -> Box:
    """Return the layout of an im2col copy.

    ``coords`` are (c, w, (h, (d,)) n) or, with interleave, (w, (h, (d,)) c, n). ``offsets`` is the position in the
    filter, w first.
    """
    spatial, interleaved = spec.rank - 2, spec.interleave is not Interleave.NONE
    first = first_pixel_dim(spec)
    dims = spec.dims[first : first + spatial]
    size = spec.dtype.element_bytes
    strides = (spec.interleave.slice_bytes if interleaved else size, *spec.strides_bytes)
    place = im2col_pixels(spec, coords)
    image = place[:, spatial]
    rows = image * strides[-1]
    inside = (image >= 0) & (image < spec.dims[-1])
    for axis in range(spatial):
        position = place[:, axis] + (offsets[axis] if offsets else 0)
        rows = rows + position * strides[first + axis]
        inside &= (position >= 0) & (position < dims[axis])
    if interleaved:
        channel = coords[-2]
        # An array makes the product wrap at 64 bits.
        rows = rows + np.array([channel], np.int64) * strides[-2]
        inside &= 0 <= channel < spec.dims[-2]
        return _slices(spec, rows, inside, None, destination)
    return _elements(spec, rows, inside, coords[0], spec.channels_per_pixel, destination)


def im2col_pixels(spec: Im2colSpec, coords: Sequence[int]) -> Array:
    """Return the position of each pixel in a column, W first, and its image number, shape (pixels, spatial + 1).

    Positions do not include the filter offset. ``coords`` has the same meaning as in im2col_box().
    """
    spatial, first = spec.rank - 2, first_pixel_dim(spec)
    steps = (*spec.element_strides[first : first + spatial], spec.element_strides[-1])
    low, high = bounding_box(spec)
    start = [coord - lower for coord, lower in zip(coords[first : first + spatial], low, strict=True)]
    extents = [upper - lower + 1 for upper, lower in zip(high, low, strict=True)]
    return _walk(start, steps, extents, coords[-1], spec.pixels_per_column) + np.array([*low, 0], np.int64)


def _walk(start: list[int], steps: Sequence[int], extents: list[int], image: int, pixels: int) -> Array:
    """Return each pixel's distance from the lower corner and its image number, shape (pixels, spatial + 1).

    Pixels advance like a mixed-radix counter over the bounding box, W fastest and images slowest. A position that
    leaves the box returns to the lower corner, regardless of the first position. ``steps`` has one entry per spatial
    dimension and one for images.
    """
    spatial = len(start)
    out = np.zeros((pixels, spatial + 1), np.int64)
    at = list(start)
    for pixel in range(pixels):
        out[pixel, :spatial] = at
        out[pixel, spatial] = image
        for k in range(spatial):
            at[k] += steps[k]
            if at[k] < extents[k]:
                break
            at[k] = 0
        else:
            image += steps[-1]
    return out


def _elements(spec: MapSpec, rows: Array, rows_inside: Array, first: int, count: int, destination: int) -> Box:
    """Return the layout of ``count`` elements from index ``first`` in each row.

    Rows that are narrower than the swizzle span are padded to the span.
    """
    bits = spec.dtype.element_bits
    unit = 2 * bits if rules.is_padded(spec.dtype) else CHUNK  # Number of bytes per 16 packed values.
    chunks = count * bits // (8 * unit)
    offsets = first * bits // 8 + unit * np.arange(chunks, dtype=np.int64)
    valid = np.clip(spec.dims[0] * bits // 8 - offsets, 0, unit) * (offsets >= 0)
    pitch_bytes = max(chunks * CHUNK, spec.swizzle.span_bytes)
    return _finish(spec, rows[:, None] + offsets, rows_inside[:, None] * valid, destination, pitch_bytes, unit)


def _slices(spec: MapSpec, rows: Array, rows_inside: Array, pixels: Array | None, destination: int) -> Box:
    """Return the layout of contiguous channel slices: ``pixels`` slices from each row, or one slice per row."""
    width = spec.interleave.slice_bytes
    parts = CHUNK * np.arange(width // CHUNK, dtype=np.int64)
    if pixels is None:
        offsets, within = parts, np.ones(len(parts), bool)
    else:
        offsets = ((pixels * width)[:, None] + parts).reshape(-1)
        within = np.repeat((pixels >= 0) & (pixels < spec.dims[0]), len(parts))
    valid = CHUNK * (rows_inside[:, None] & within)
    return _finish(spec, rows[:, None] + offsets, valid, destination, len(offsets) * CHUNK, CHUNK)


def _finish(spec: MapSpec, gmem: Array, valid: Array, destination: int, pitch_bytes: int, unit: int) -> Box:
    rows, chunks = gmem.shape
    start = destination + pitch_bytes * np.arange(rows, dtype=np.int64)[:, None]
    smem = swizzle(start + CHUNK * np.arange(chunks, dtype=np.int64), spec.swizzle)
    flipped = None
    if spec.swizzle is Swizzle.B128_ATOM_32B_FLIP_8B:
        flipped, smem = (smem & 8) != 0, smem & ~np.int64(8)
    return Box(spec, gmem, valid, smem, flipped, unit, rows * chunks * CHUNK)


#: Modes that access four rows of a two-dimensional tensor, on sm_100 and later. [PTX ISA, cp.async.bulk.tensor]
FOUR_ROWS = ("tile::gather4", "tile::scatter4")


def check_load(spec: MapSpec, coords: Sequence[int], mode: str) -> None:
    """Raise BoxError if a load or prefetch is invalid. ``mode`` is the instruction's mode, "tile" or "im2col"."""
    _check_instruction(spec, coords, mode)
    try:
        check_traps(spec, coords[:2] if mode in FOUR_ROWS else coords)
    except DescriptorError as error:
        raise BoxError(str(error)) from error


def check_store(spec: MapSpec, coords: Sequence[int], mode: str, operation: str) -> None:
    """Raise BoxError if a store or, if ``operation`` is not empty, a reduction is invalid."""
    _check_instruction(spec, coords, mode)
    if operation and spec.dtype.name not in REDUCE_TYPES[operation]:
        raise BoxError(f"reduction .{operation} is not supported for dtype {spec.dtype.name}")
    if spec.swizzle is Swizzle.B128_ATOM_32B_FLIP_8B:
        raise BoxError("swizzle 128B_ATOM_32B_FLIP_8B is not supported for stores")
    try:
        for row in coords[1:] if mode in FOUR_ROWS else ():
            check_write_traps(spec, (coords[0], row))
        if mode not in FOUR_ROWS:
            check_write_traps(spec, coords)
    except DescriptorError as error:
        raise BoxError(str(error)) from error


def _check_instruction(spec: MapSpec, coords: Sequence[int], mode: str) -> None:
    """Raise BoxError unless the rank and mode of the instruction match the map."""
    if mode in FOUR_ROWS:
        if not isinstance(spec, TiledSpec) or spec.rank != 2 or spec.box[1] != 1:
            raise BoxError(f"the tensor map of .{mode} must be tiled, with rank 2 and a box of one row")
        coords, mode = coords[:2], "tile"
    if len(coords) != spec.rank:
        raise BoxError(f"the tensor map has rank {spec.rank}, but the instruction has {len(coords)} coordinates")
    is_tiled = isinstance(spec, TiledSpec)
    if is_tiled != (mode == "tile"):
        raise BoxError(f"mode .{mode} does not support {'a tiled' if is_tiled else 'an im2col'} tensor map")
