"""What the hardware asks of one access, beyond the rules that the driver checks when a tensor map is made.

The driver accepts descriptors and coordinates that then trap (CUDA_ERROR_ILLEGAL_INSTRUCTION, the context is lost) or
write past a row without an error. These checks are the same rules in Python, before anything is launched. Unless a
source is named they are measured on an H200. Coordinates are in TMA order, innermost first.
"""

from __future__ import annotations

from collections.abc import Sequence

from cudatma.descriptor import rules
from cudatma.descriptor.spec import AnySpec, Im2colSpec, Im2colWideSpec, TiledSpec
from cudatma.errors import DescriptorError
from cudatma.layout import Interleave, Swizzle
from cudatma.target import Target

_INT32 = 1 << 31
_ARITHMETIC = ("uint32", "int32", "uint64", "int64", "float16", "bfloat16")

#: Dimensions may be larger in a tensor map, but then every access traps.
MAX_REACHED_DIM = 1 << 31
_SUMMED_FLOATS = ("float32", "float32_ftz", "tfloat32", "tfloat32_ftz", "float64", "float16", "bfloat16")
#: Element types of each tensor reduction; all others trap. [PTX ISA, cp.reduce.async.bulk.tensor; measured: and/or/xor
#: trap on int64, add takes f32.ftz, tf32 and f64]
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
    """Whether a GPU of this architecture can use the map at all.

    Raises TargetError where it lacks TMA, packed types, ATOM swizzles or the wide im2col modes, and DescriptorError
    where one box is larger than shared memory, or is interleaved and takes more than one slice of channels or a swizzle
    that does not go with it.
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
            f"{spec.footprint_bytes} bytes of shared memory",
            f"at most {target.smem_per_block_bytes} bytes on {target.name}",
            "shrink the box, or issue several",
        )
    check_described_bytes(spec, target)
    _check_channel_slice(spec)
    _check_interleaved_swizzle(spec)


def check_described_bytes(spec: AnySpec, target: Target) -> None:
    """The driver's own rule of size: described_bytes are at most the shared memory of an SM, 228 KiB on an H200.

    DescriptorError otherwise. That the shared memory of an SM is the limit on other GPUs too is inferred.
    """
    if spec.described_bytes > target.smem_per_sm_bytes:
        raise DescriptorError(
            "box" if isinstance(spec, TiledSpec) else "pixels_per_column",
            f"{spec.described_bytes} bytes",
            f"at most {target.smem_per_sm_bytes} bytes on {target.name}",
            "shrink the box, or issue several",
        )


def _check_interleaved_swizzle(spec: AnySpec) -> None:
    """Interleave 32B goes with swizzle 32B, says CUDA's documentation. The driver encodes other swizzles all the same,
    and an H200 serves them like any other."""
    if spec.interleave is Interleave.B32 and spec.swizzle is not Swizzle.B32:
        raise DescriptorError("swizzle", spec.swizzle.label, "32B with interleave 32B")


def _check_channel_slice(spec: AnySpec) -> None:
    """Interleaved boxes take one slice of channels: of a wider one an H200 delivers the first slice only."""
    if not isinstance(spec, TiledSpec) or spec.interleave is Interleave.NONE:
        return
    most = 8 * spec.interleave.slice_bytes // rules.smem_bits(spec.dtype)
    if spec.box[-2] > most:
        raise DescriptorError(
            f"box[{spec.rank - 2}]",
            spec.box[-2],
            f"at most {most} channels, one slice, with interleave {spec.interleave.label}",
            "load each slice with a copy of its own",
        )


def check_load(spec: AnySpec, coords: Sequence[int], offsets: Sequence[int] | None = None) -> None:
    """Whether a load (or a prefetch) at ``coords`` is legal. Coordinates may be negative or lie outside.

    coords: as in check_traps(). offsets: im2col only, rank - 2 of them, W first, 0..2**16 - 1 at rank 3,
    2**8 - 1 at rank 4, 2**5 - 1 at rank 5. [PTX ISA 5.5.4.1] Raises DescriptorError.
    """
    if spec.swizzle is Swizzle.B128_ATOM_64B and rules.is_padded(spec.dtype):
        raise DescriptorError("swizzle", spec.swizzle.label, f"stores only for {spec.dtype.name}")
    check_traps(spec, coords)
    if isinstance(spec, Im2colWideSpec):
        # From the documents: the first pixel may lie left of the bounding box, not right of it. [PTX ISA 5.5.5.1]
        last = spec.dims[1] - 1 + spec.upper_corner_w
        if rules.as_int(coords[1], "coords[1]") > last:
            raise DescriptorError("coords[1]", coords[1], f"up to {last}, the right end of the bounding box")
    if offsets is None:
        return
    if not isinstance(spec, Im2colSpec):
        raise DescriptorError("offsets", offsets, "None for a map that is not im2col")
    values = rules.as_ints(offsets, "offsets")
    rules.check_length(values, spec.rank - 2, "offsets", spec.rank)
    most = rules.CORNER_RANGE[spec.rank][1] * 2 + 1
    for index, value in enumerate(values):
        if not 0 <= value <= most:
            raise DescriptorError(f"offsets[{index}]", value, f"0..{most} at rank {spec.rank}")


def check_store(spec: AnySpec, coords: Sequence[int] | None = None) -> None:
    """Whether a store is legal and writes nothing outside of the tensor.

    The innermost dimension is clipped at 16 bytes, not at the element: where dims[0] ends inside a chunk, a box that
    reaches the end overwrites up to 15 bytes after it. Negative coordinates trap. Without ``coords`` the map as a whole
    is judged: any box might reach the end. Raises DescriptorError.
    """
    _check_write(spec, coords)


def check_reduce(spec: AnySpec, op: str, coords: Sequence[int] | None = None) -> None:
    """Whether a tensor reduction is legal: check_store(), and an element type that ``op`` knows (REDUCE_TYPES)."""
    if op not in REDUCE_TYPES:
        raise DescriptorError("op", op, ", ".join(REDUCE_TYPES))
    if spec.dtype.name not in REDUCE_TYPES[op]:
        remedy = "describe the bits as uint32 or uint64" if op in ("and", "or", "xor") else ""
        raise DescriptorError("dtype", spec.dtype.name, f"{', '.join(REDUCE_TYPES[op])} for reduction {op}", remedy)
    _check_write(spec, coords)


def _check_write(spec: AnySpec, coords: Sequence[int] | None) -> None:
    # Direction rules of types and swizzles: PTX ISA 5.5.1.1 and 5.5.7, CUDA driver API.
    if spec.swizzle is Swizzle.B128_ATOM_32B_FLIP_8B:
        raise DescriptorError("swizzle", spec.swizzle.label, "loads only", "use 128B_ATOM_32B for stores")
    if spec.dtype.name == "16u4_align16b":
        raise DescriptorError("dtype", spec.dtype.name, "loads only", "use 16u4_align8b for stores")
    if coords is not None:
        check_write_traps(spec, coords)
    row_bits = spec.dims[0] * spec.dtype.element_bits
    if spec.interleave is Interleave.NONE and row_bits % (8 * rules.CHUNK_BYTES) and _reaches_end(spec, coords):
        past = rules.CHUNK_BYTES - row_bits // 8 % rules.CHUNK_BYTES
        raise DescriptorError(
            "dims[0]",
            f"{spec.dims[0]} elements of {spec.dtype.element_bits} bits",
            f"rows of whole {rules.CHUNK_BYTES}-byte chunks in a store",
            f"it would overwrite {past} bytes after each row: describe rows with their padding where that is yours, or "
            "use plain stores",
        )


def check_traps(spec: AnySpec, coords: Sequence[int]) -> None:
    """What the hardware stops in any access with an illegal instruction. Raises DescriptorError.

    coords: one int32 for each dimension. Without interleave the innermost must start a 16-byte chunk, in im2col mode
    too. An im2col column begins inside of the bounding box. No dimension has more than 2**31 elements.
    """
    values = _coordinates(spec, coords)
    for index, dim in enumerate(spec.dims):
        if dim > MAX_REACHED_DIM:
            raise DescriptorError(f"dims[{index}]", dim, "1..2**31 elements in an access", "describe a part of it")
    if isinstance(spec, Im2colSpec):
        for index, (low, high) in enumerate(zip(*bounding_box(spec), strict=True), first_pixel_dim(spec)):
            if not low <= values[index] <= high:
                raise DescriptorError(f"coords[{index}]", values[index], f"{low}..{high}, the bounding box")


def check_write_traps(spec: AnySpec, coords: Sequence[int]) -> None:
    """check_traps() for stores and reductions: no negative coordinate, no im2col bounding box beyond the tensor."""
    check_traps(spec, coords)
    for index, value in enumerate(coords):
        if value < 0:
            raise DescriptorError(f"coords[{index}]", value, "0 and up in a store", "clip the box at the start")
    if isinstance(spec, Im2colSpec):
        for name, corner, beyond in (("lower_corner", spec.lower_corner, -1), ("upper_corner", spec.upper_corner, 1)):
            for index, value in enumerate(corner):
                if value * beyond > 0:
                    allowed = f"0 and {'up' if beyond < 0 else 'down'} in a store"
                    raise DescriptorError(f"{name}[{index}]", value, allowed, "store through a map without padding")


def first_pixel_dim(spec: Im2colSpec) -> int:
    """The dimension of an im2col map that W is: 1, or 0 with interleave."""
    return 1 if spec.interleave is Interleave.NONE else 0


def bounding_box(spec: Im2colSpec) -> tuple[list[int], list[int]]:
    """Lowest and highest position of an im2col map's bounding box, W first."""
    first = first_pixel_dim(spec)
    dims = spec.dims[first : first + spec.rank - 2]
    return list(spec.lower_corner), [dim - 1 + upper for dim, upper in zip(dims, spec.upper_corner, strict=True)]


def _reaches_end(spec: AnySpec, coords: Sequence[int] | None) -> bool:
    """Whether a box at ``coords`` covers the last element of a row; any might where no coordinates are given."""
    if coords is None:
        return True
    inner = spec.box[0] if isinstance(spec, TiledSpec) else spec.channels_per_pixel
    return coords[0] < spec.dims[0] <= coords[0] + inner


def _coordinates(spec: AnySpec, coords: Sequence[int]) -> tuple[int, ...]:
    """Coordinates as ints: one int32 a dimension, the first on a 16-byte chunk without interleave."""
    values = rules.as_ints(coords, "coords")
    rules.check_length(values, spec.rank, "coords", spec.rank)
    for index, value in enumerate(values):
        if not -_INT32 <= value < _INT32:
            raise DescriptorError(f"coords[{index}]", value, "a signed 32-bit integer")
    if isinstance(spec, TiledSpec | Im2colSpec) and spec.interleave is Interleave.NONE:
        # Padded packed types are counted in whole groups of 128 values; nothing smaller is ever loaded.
        multiple = 128 if rules.is_padded(spec.dtype) else 8 * rules.CHUNK_BYTES // spec.dtype.element_bits
        if values[0] % multiple:
            raise DescriptorError(
                "coords[0]",
                values[0],
                f"multiples of {multiple} ({rules.CHUNK_BYTES} bytes)",
                "start the box at a chunk and skip elements in shared memory",
            )
    return values
