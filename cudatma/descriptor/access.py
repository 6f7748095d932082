"""Checks for hardware requirements that the driver does not validate.

The driver accepts some tensor maps through which no access is safe. With such a map, or at invalid coordinates, an
access traps (CUDA_ERROR_ILLEGAL_INSTRUCTION, which destroys the context) or silently writes past the end of a row. The
functions in this module detect these cases before a launch. Rules without a cited source were measured on an H200.
Coordinates are in TMA order, innermost first.
"""

from __future__ import annotations

from collections.abc import Sequence

from cudatma.descriptor import rules
from cudatma.descriptor.spec import AnySpec, Im2colSpec, Im2colWideSpec, TiledSpec
from cudatma.errors import DescriptorError, alternatives
from cudatma.layout import Interleave, Swizzle
from cudatma.target import Target

_INT32 = 1 << 31
_ARITHMETIC = ("uint32", "int32", "uint64", "int64", "float16", "bfloat16")

#: Maximum size of a dimension. The driver accepts larger dimensions, but every access through such a map traps.
MAX_REACHED_DIM = 1 << 31
_SUMMED_FLOATS = ("float32", "float32_ftz", "tfloat32", "tfloat32_ftz", "float64", "float16", "bfloat16")
#: Element types that each tensor reduction supports. Reductions of other types trap. [PTX ISA,
#: cp.reduce.async.bulk.tensor; measured: and, or and xor trap on int64; add accepts f32.ftz, tf32 and f64]
REDUCE_TYPES: dict[str, tuple[str, ...]] = {
    "add": ("uint32", "int32", "uint64", *_SUMMED_FLOATS),
    "min": _ARITHMETIC,
    "max": _ARITHMETIC,
    "inc": ("uint32",),
    "dec": ("uint32",),
    "and": ("uint32", "int32", "uint64"),
    "or": ("uint32", "int32", "uint64"),
    "xor": ("uint32", "int32", "uint64"),
}


def check_target(spec: AnySpec, target: Target) -> None:
    """Check that a target architecture supports a map.

    Raises TargetError if the target does not support TMA, or the map's packed type, ATOM swizzle or wide im2col mode.
    Raises DescriptorError if the box is larger than shared memory, or if an interleaved box has more than one channel
    slice or an unsupported swizzle.
    """
    target.require("tma", "a tensor map")
    if spec.dtype.packed:
        target.require("packed_types", f"dtype {spec.dtype.name}")
    if spec.swizzle.is_atom:
        target.require("swizzle_atoms", f"swizzle {spec.swizzle.label}")
    if isinstance(spec, Im2colWideSpec):
        target.require("im2col_w", "an im2col wide tensor map")
    if spec.footprint_bytes > target.smem_per_block_bytes:
        raise DescriptorError(
            "box" if isinstance(spec, TiledSpec) else "pixels_per_column",
            f"{spec.footprint_bytes} bytes",
            f"at most {target.smem_per_block_bytes} bytes of shared memory on {target.name}",
            "use a smaller box or several boxes",
        )
    check_described_bytes(spec, target)
    _check_channel_slice(spec)
    _check_interleaved_swizzle(spec)


def check_described_bytes(spec: AnySpec, target: Target) -> None:
    """Check that ``described_bytes`` is at most the driver's limit, the shared memory of an SM (228 KiB on an H200).

    Raises DescriptorError if it is larger. The limit was measured on an H200 and is inferred for other GPUs.
    """
    if spec.described_bytes > target.smem_per_sm_bytes:
        raise DescriptorError(
            "box" if isinstance(spec, TiledSpec) else "pixels_per_column",
            f"{spec.described_bytes} bytes",
            f"at most {target.smem_per_sm_bytes} bytes on {target.name}",
            "use a smaller box or several boxes",
        )


def _check_interleaved_swizzle(spec: AnySpec) -> None:
    """Check that the swizzle is 32B if the interleave is 32B, as CUDA's documentation requires.

    The driver also accepts other swizzles, and an H200 applies them.
    """
    if spec.interleave is Interleave.B32 and spec.swizzle is not Swizzle.B32:
        raise DescriptorError("swizzle", spec.swizzle.label, "32B with interleave 32B")


def _check_channel_slice(spec: AnySpec) -> None:
    """Check that an interleaved box has one channel slice. An H200 loads only the first slice of a wider box."""
    if not isinstance(spec, TiledSpec) or spec.interleave is Interleave.NONE:
        return
    max_channels = 8 * spec.interleave.slice_bytes // rules.smem_bits(spec.dtype)
    if spec.box[-2] > max_channels:
        raise DescriptorError(
            f"box[{spec.rank - 2}]",
            spec.box[-2],
            f"at most {max_channels} channels (one slice) with interleave {spec.interleave.label}",
            "load each slice with a separate copy",
        )


def check_load(spec: AnySpec, coords: Sequence[int], offsets: Sequence[int] | None = None) -> None:
    """Check that a load or prefetch at ``coords`` is legal. Coordinates may be negative or outside the tensor.

    ``coords`` must meet the requirements of check_traps(). ``offsets`` applies only to im2col loads. It has rank - 2
    values, W first. Each value must be at least 0, and at most 2**16 - 1 at rank 3, 2**8 - 1 at rank 4 and 2**5 - 1 at
    rank 5. [PTX ISA 5.5.4.1] Raises DescriptorError if the load is illegal.
    """
    if spec.swizzle is Swizzle.B128_ATOM_64B and rules.is_padded(spec.dtype):
        raise DescriptorError("swizzle", spec.swizzle.label, f"a mode that supports loads of {spec.dtype.name}")
    check_traps(spec, coords)
    if isinstance(spec, Im2colWideSpec):
        # The first pixel may be to the left of the bounding box, but not to the right. [PTX ISA 5.5.5.1, not measured]
        last = spec.dims[1] - 1 + spec.upper_corner_w
        if rules.as_int(coords[1], "coords[1]") > last:
            raise DescriptorError("coords[1]", coords[1], f"at most {last} (the right edge of the bounding box)")
    if offsets is None:
        return
    if not isinstance(spec, Im2colSpec):
        raise DescriptorError("offsets", offsets, "None unless the spec is an Im2colSpec")
    values = rules.as_ints(offsets, "offsets")
    rules.check_length(values, spec.rank - 2, "offsets", spec.rank)
    max_offset = rules.CORNER_RANGE[spec.rank][1] * 2 + 1
    for index, value in enumerate(values):
        if not 0 <= value <= max_offset:
            raise DescriptorError(f"offsets[{index}]", value, f"0 to {max_offset} at rank {spec.rank}")


def check_store(spec: AnySpec, coords: Sequence[int] | None = None) -> None:
    """Check that a store is legal and writes only inside the tensor.

    The hardware clips the innermost dimension in units of 16-byte chunks, not elements. If dims[0] ends inside a chunk,
    a box that reaches the end of a row overwrites up to 15 bytes after the row. Negative coordinates trap. If
    ``coords`` is None, the function assumes that the box reaches the end of a row. Raises DescriptorError if the store
    is illegal.
    """
    _check_write(spec, coords)


def check_reduce(spec: AnySpec, op: str, coords: Sequence[int] | None = None) -> None:
    """Check that a reduction is legal.

    The reduction must pass check_store(), and REDUCE_TYPES must list the map's element type for ``op``. Raises
    DescriptorError if the reduction is illegal.
    """
    if op not in REDUCE_TYPES:
        raise DescriptorError("op", op, ", ".join(REDUCE_TYPES))
    if spec.dtype.name not in REDUCE_TYPES[op]:
        remedy = "create the map with dtype uint32 or uint64" if op in ("and", "or", "xor") else ""
        raise DescriptorError("dtype", spec.dtype.name, f"{alternatives(REDUCE_TYPES[op])} for reduction {op}", remedy)
    _check_write(spec, coords)


def _check_write(spec: AnySpec, coords: Sequence[int] | None) -> None:
    # Sources for the types and swizzles that allow only one direction: PTX ISA 5.5.1.1 and 5.5.7, CUDA driver API.
    if spec.swizzle is Swizzle.B128_ATOM_32B_FLIP_8B:
        raise DescriptorError(
            "swizzle", spec.swizzle.label, "a mode that supports stores", "use 128B_ATOM_32B for stores"
        )
    if spec.dtype.name == "16u4_align16b":
        raise DescriptorError("dtype", spec.dtype.name, "a type that supports stores", "use 16u4_align8b for stores")
    if coords is not None:
        check_write_traps(spec, coords)
    row_bits = spec.dims[0] * spec.dtype.element_bits
    if spec.interleave is Interleave.NONE and row_bits % (8 * rules.CHUNK_BYTES) and _reaches_end(spec, coords):
        past = rules.CHUNK_BYTES - row_bits // 8 % rules.CHUNK_BYTES
        raise DescriptorError(
            "dims[0]",
            f"{spec.dims[0]} elements of {spec.dtype.element_bits} bits",
            f"a multiple of {rules.CHUNK_BYTES} bytes (a store would overwrite {past} bytes after a row)",
            "include the padding in dims[0] if you own it, or use ordinary stores",
        )


def check_traps(spec: AnySpec, coords: Sequence[int]) -> None:
    """Check the requirements of every access. An access that violates one traps with an illegal instruction.

    ``coords`` must contain one int32 per dimension. Without interleaving, the innermost coordinate of a tiled or im2col
    map must be the start of a 16-byte chunk. An im2col column must start inside the bounding box. A dimension must have
    at most 2**31 elements. Raises DescriptorError if a requirement is not met.
    """
    values = _coordinates(spec, coords)
    for index, dim in enumerate(spec.dims):
        if dim > MAX_REACHED_DIM:
            raise DescriptorError(
                f"dims[{index}]", dim, "1 to 2**31 for an access", "create a map of a part of the tensor"
            )
    if isinstance(spec, Im2colSpec):
        for index, (low, high) in enumerate(zip(*bounding_box(spec), strict=True), first_pixel_dim(spec)):
            if not low <= values[index] <= high:
                raise DescriptorError(f"coords[{index}]", values[index], f"{low} to {high} (inside the bounding box)")


def check_write_traps(spec: AnySpec, coords: Sequence[int]) -> None:
    """Check the requirements of check_traps() and those that apply only to stores and reductions.

    Coordinates must be nonnegative, and an im2col map must not have padding. Raises DescriptorError if a
    requirement is not met.
    """
    check_traps(spec, coords)
    for index, value in enumerate(coords):
        if value < 0:
            raise DescriptorError(f"coords[{index}]", value, "at least 0 in a store", "start the box inside the tensor")
    if isinstance(spec, Im2colSpec):
        for name, corner, beyond in (("lower_corner", spec.lower_corner, -1), ("upper_corner", spec.upper_corner, 1)):
            for index, value in enumerate(corner):
                if value * beyond > 0:
                    allowed = f"at {'least' if beyond < 0 else 'most'} 0 in a store"
                    raise DescriptorError(f"{name}[{index}]", value, allowed, "use a map without padding for stores")


def first_pixel_dim(spec: Im2colSpec) -> int:
    """Return the index of dimension W in an im2col map: 0 with interleaving, otherwise 1."""
    return 1 if spec.interleave is Interleave.NONE else 0


def bounding_box(spec: Im2colSpec) -> tuple[list[int], list[int]]:
    """Return the first and last positions of an im2col map's bounding box in each dimension, W first."""
    first = first_pixel_dim(spec)
    dims = spec.dims[first : first + spec.rank - 2]
    return list(spec.lower_corner), [dim - 1 + upper for dim, upper in zip(dims, spec.upper_corner, strict=True)]


def _reaches_end(spec: AnySpec, coords: Sequence[int] | None) -> bool:
    """Return whether a box at ``coords`` covers the last element of a row, or True if ``coords`` is None."""
    if coords is None:
        return True
    inner = spec.box[0] if isinstance(spec, TiledSpec) else spec.channels_per_pixel
    return coords[0] < spec.dims[0] <= coords[0] + inner


def _coordinates(spec: AnySpec, coords: Sequence[int]) -> tuple[int, ...]:
    """Return the coordinates as ints after validation.

    There must be one int32 per dimension. Without interleaving, the first coordinate must be the start of a 16-byte
    chunk.
    """
    values = rules.as_ints(coords, "coords")
    rules.check_length(values, spec.rank, "coords", spec.rank)
    for index, value in enumerate(values):
        if not -_INT32 <= value < _INT32:
            raise DescriptorError(f"coords[{index}]", value, "a signed 32-bit integer")
    if isinstance(spec, TiledSpec | Im2colSpec) and spec.interleave is Interleave.NONE:
        # A box of padded packed values must start at a multiple of 128 values.
        multiple = 128 if rules.is_padded(spec.dtype) else 8 * rules.CHUNK_BYTES // spec.dtype.element_bits
        if values[0] % multiple:
            raise DescriptorError(
                "coords[0]",
                values[0],
                f"a multiple of {multiple} ({rules.CHUNK_BYTES} bytes)",
                "start the box at a multiple of 16 bytes and skip the extra elements in shared memory",
            )
    return values
