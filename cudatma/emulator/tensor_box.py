"""Which global bytes and which shared bytes a tensor copy touches: the geometry of TMA, bit-exact with an H200.

Sources: PTX ISA 5.5 "Tensors" (tiled mode, im2col mode, bounding box, traversal strides); CUDA driver API,
cuTensorMapEncodeTiled and cuTensorMapEncodeIm2col; measured: padding of narrow rows to the swizzle span, 16-byte
clipping of stores, traps on coordinates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cudatma.descriptor.codec import Decoded, decode
from cudatma.descriptor.spec import Im2colSpec, TiledSpec
from cudatma.emulator.types import Array
from cudatma.errors import DescriptorError
from cudatma.layout import Interleave, swizzle

CHUNK = 16


class BoxError(ValueError):
    """What the hardware answers with an illegal instruction."""


@dataclass(slots=True)
class Box:
    """One tensor copy laid out.

    element_bytes: of one element in both memories. gmem: (rows, n) int64 offsets from the tensor's base; inside: (rows,
    n) bool, whether the element lies in the tensor. smem: (rows, n) int64 absolute shared addresses (without rank),
    swizzled. chunks: (rows, c) int64 absolute addresses of the 16-byte chunks that are touched in shared memory.
    expected_bytes: what the mbarrier counts.
    """

    spec: TiledSpec | Im2colSpec
    element_bytes: int
    gmem: Array
    inside: Array
    smem: Array
    chunks: Array
    expected_bytes: int


def read_map(data: bytes) -> Decoded:
    """Decode 128 bytes; BoxError where they are no tensor map that the hardware takes."""
    try:
        return decode(data)
    except DescriptorError as error:
        raise BoxError(f"the tensor map is not valid ({error})") from error


def tiled_box(spec: TiledSpec, coords: Sequence[int], destination: int) -> Box:
    """Lay out a box at coordinates (innermost first) against shared address ``destination``."""
    size = spec.dtype.element_bytes
    if spec.dtype.packed:
        raise BoxError(f"element type {spec.dtype.name} is not served by this emulator")
    if spec.interleave is not Interleave.NONE:
        return _interleaved_box(spec, coords, destination)
    if coords[0] * size % CHUNK:
        raise BoxError(f"coordinate[0] = {coords[0]} of {size}-byte elements does not start a 16-byte chunk")
    steps = (1, *spec.element_strides[1:])
    counts = [-(-extent // step) for extent, step in zip(spec.box, steps, strict=True)]
    index = [c + s * np.arange(n, dtype=np.int64) for c, s, n in zip(coords, steps, counts, strict=True)]
    rows = np.zeros(1, np.int64)
    rows_inside = np.ones(1, bool)
    for axis in range(1, spec.rank):
        inside = (index[axis] >= 0) & (index[axis] < spec.dims[axis])
        rows = (index[axis] * spec.strides_bytes[axis - 1])[:, None] + rows[None, :]
        rows_inside = inside[:, None] & rows_inside[None, :]
        rows, rows_inside = rows.reshape(-1), rows_inside.reshape(-1)
    inner = (index[0] >= 0) & (index[0] < spec.dims[0])
    gmem = rows[:, None] + (index[0] * size)[None, :]
    return _finish(spec, size, gmem, rows_inside[:, None] & inner[None, :], destination)


def im2col_box(spec: Im2colSpec, coords: Sequence[int], offsets: Sequence[int], destination: int) -> Box:
    """Lay out the pixels of an im2col copy: coords are (c, w, (h, (d,)) n), offsets the filter's position, w first."""
    size = spec.dtype.element_bytes
    if spec.interleave is not Interleave.NONE:
        raise BoxError("im2col with interleave is not served by this emulator")
    spatial = spec.rank - 2
    low = spec.lower_corner
    high = [spec.dims[1 + k] - 1 + spec.upper_corner[k] for k in range(spatial)]
    steps = spec.element_strides[1 : 1 + spatial]
    counts = [(high[k] - low[k]) // steps[k] + 1 for k in range(spatial)]
    # The walk is a mixed-radix counter over the bounding box, W fastest, and the image last.
    start = [(coords[1 + k] - low[k]) for k in range(spatial)]
    pixels = spec.pixels_per_column
    place = _walk(start, steps, counts, coords[-1], pixels)
    position = (
        np.array([[low[k] for k in range(spatial)]]) + place[:, :spatial] + np.array(list(offsets) or [0] * spatial)
    )
    image = place[:, spatial]
    rows = image * spec.strides_bytes[-1]
    inside = (image >= 0) & (image < spec.dims[-1])
    for k in range(spatial):
        rows = rows + position[:, k] * spec.strides_bytes[k]
        inside &= (position[:, k] >= 0) & (position[:, k] < spec.dims[1 + k])
    channel = coords[0] + np.arange(spec.channels_per_pixel, dtype=np.int64)
    channel_inside = (channel >= 0) & (channel < spec.dims[0])
    gmem = rows[:, None] + (channel * size)[None, :]
    return _finish(spec, size, gmem, inside[:, None] & channel_inside[None, :], destination)


def _walk(start: list[int], steps: Sequence[int], counts: list[int], image: int, pixels: int) -> Array:
    """(pixels, spatial + 1): distances from the lower corner and the image, one pixel after the other."""
    spatial = len(start)
    out = np.zeros((pixels, spatial + 1), np.int64)
    at = list(start)
    limits = [(counts[k] - 1) * steps[k] for k in range(spatial)]
    for pixel in range(pixels):
        out[pixel, :spatial] = at
        out[pixel, spatial] = image
        for k in range(spatial):
            at[k] += steps[k]
            if at[k] <= limits[k]:
                break
            at[k] = 0
        else:
            image += 1
    return out


def _interleaved_box(spec: TiledSpec, coords: Sequence[int], destination: int) -> Box:
    """NC/8HWC8 and NC/16HWC16: dimension 0 holds the channels of one 16- or 32-byte slice.

    The slice is moved whole; box[0] elements of it are counted. The layout in shared memory follows the PTX ISA's
    description and is not measured.
    """
    raise BoxError(f"interleave {spec.interleave.label} is not served by this emulator")


def _finish(spec: TiledSpec | Im2colSpec, size: int, gmem: Array, inside: Array, destination: int) -> Box:
    rows, count = gmem.shape
    row_bytes = count * size
    pitch = max(row_bytes, spec.swizzle.span_bytes)
    start = destination + pitch * np.arange(rows, dtype=np.int64)[:, None]
    smem = swizzle(start + size * np.arange(count, dtype=np.int64)[None, :], spec.swizzle)
    chunks = swizzle(start + CHUNK * np.arange(-(-row_bytes // CHUNK), dtype=np.int64)[None, :], spec.swizzle)
    return Box(spec, size, gmem, inside, smem, chunks & ~np.int64(CHUNK - 1), rows * row_bytes)


def store_mask(box: Box, coords: Sequence[int]) -> Array:
    """Which elements a store or reduction writes: clipped at 16 bytes in the innermost dimension, exactly in the
    others.

    Raises BoxError for a negative coordinate, which traps.
    """
    if any(c < 0 for c in coords):
        raise BoxError(f"coordinates {tuple(coords)}: a store or reduction takes no negative ones")
    spec = box.spec
    count = box.gmem.shape[1]
    limit = -(-spec.dims[0] * box.element_bytes // CHUNK) * CHUNK // box.element_bytes
    inner: Array = np.arange(coords[0], coords[0] + count) < limit
    whole_rows: Array = (
        np.asarray(box.inside.any(axis=1)) if coords[0] < spec.dims[0] else np.zeros(len(box.inside), bool)
    )
    return whole_rows[:, None] & inner[None, :]


_NAN_BITS = {2: 0x7FFF, 4: 0x7FFFFFFF, 8: 0x7FFFFFFFFFFFFFFF}


def fill_bits(spec: TiledSpec | Im2colSpec) -> int:
    """The bits that loads put where the box leaves the tensor."""
    return _NAN_BITS.get(spec.dtype.element_bytes, 0) if int(spec.oob_fill) else 0


def convert_on_load(spec: TiledSpec | Im2colSpec, values: Array) -> Array:
    """What a load does to the bits: tf32 maps round to 10 mantissa bits, ftz maps flush subnormals."""
    name = spec.dtype.name
    if name.endswith("_ftz"):
        values = np.where(values & np.uint32(0x7F800000), values, values & np.uint32(0x80000000))
    if name.startswith("tfloat32"):
        rounded = values + np.uint32(0xFFF) + ((values >> 13) & np.uint32(1))
        finite = (values & np.uint32(0x7F800000)) != np.uint32(0x7F800000)
        values = np.where(finite, rounded, values) & np.uint32(0xFFFFE000)
    return values
