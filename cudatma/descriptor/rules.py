"""The driver's enumerations and validation rules for tensor maps.

Index 0 is the innermost dimension (TMA order). A violated rule raises DescriptorError. cudatma.layout defines Swizzle
and Interleave, and access.py validates further hardware requirements. Sources: CUDA driver API, cuTensorMapEncodeTiled,
cuTensorMapEncodeIm2col and cuTensorMapEncodeIm2colWide.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence

from cudatma.dtypes import TmaType
from cudatma.errors import DescriptorError, alternatives, counted
from cudatma.layout import Interleave, Mode, Swizzle


class L2Promotion(Mode):
    """Granularity at which L2 fetches from DRAM (CUtensorMapL2promotion)."""

    NONE = 0
    B64 = 1
    B128 = 2
    B256 = 3


class OobFill(Mode):
    """Fill value for elements outside the tensor: zero, or a NaN that FMA treats as zero.

    Only floating-point types can be filled with NaN.
    """

    ZEROS = 0
    NAN = 1


class Im2colWideMode(Mode):
    """Number of pixels loaded along W: ``pixels_per_column``, or always 128."""

    W = 0
    W128 = 1


MAX_RANK = 5
MAX_DIM = 1 << 32
STRIDE_LIMIT = 1 << 40
MAX_BOX = 256
MAX_ELEMENT_STRIDE = 8
MAX_PIXELS = 1024
#: Alignment of addresses and strides that TMA requires. address_alignment() also handles the exceptions.
TMA_ALIGNMENT_BYTES = 16
#: Size of a chunk, the unit in which TMA transfers the rows of a box.
CHUNK_BYTES = 16
#: Maps the rank to the range of an im2col corner, a signed number of 16, 8 or 5 bits.
CORNER_RANGE = {3: (-(1 << 15), (1 << 15) - 1), 4: (-(1 << 7), (1 << 7) - 1), 5: (-(1 << 4), (1 << 4) - 1)}

_PADDED = ("16u4_align16b", "16u6_align16b")
_PADDED_SWIZZLES = {
    "16u4_align16b": (Swizzle.NONE, Swizzle.B128, Swizzle.B128_ATOM_32B),
    "16u6_align16b": (Swizzle.NONE, Swizzle.B128, Swizzle.B128_ATOM_32B, Swizzle.B128_ATOM_64B),
}
_WIDEST_SPAN = max(swizzle.span_bytes for swizzle in Swizzle)
_WIDE_SWIZZLES = (Swizzle.B64, Swizzle.B128, Swizzle.B128_ATOM_32B)


def as_int(value: object, field: str) -> int:
    """Convert a Python or NumPy integer to an int. Raises DescriptorError for bools and other types."""
    if not isinstance(value, bool):
        try:
            return operator.index(value)  # type: ignore[arg-type]
        except TypeError:
            pass
    raise DescriptorError(field, value, "an integer")


def as_ints(values: object, field: str) -> tuple[int, ...]:
    """Convert a sequence of integers to a tuple of ints. Raises DescriptorError with the index of an invalid value."""
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise DescriptorError(field, values, "a sequence of integers")
    return tuple(as_int(value, f"{field}[{index}]") for index, value in enumerate(values))


def is_padded(dtype: TmaType) -> bool:
    """Return whether TMA pads each group of 16 packed values to 16 bytes in shared memory."""
    return dtype.name in _PADDED


def smem_bits(dtype: TmaType) -> int:
    """Return the number of bits per element in shared memory, which is 8 for the padded packed types."""
    return 8 if is_padded(dtype) else dtype.element_bits


def address_alignment(dtype: TmaType, interleave: Interleave) -> int:
    """Return the required alignment of the address and strides: 16 or 32 bytes."""
    return 32 if interleave is Interleave.B32 or is_padded(dtype) else TMA_ALIGNMENT_BYTES


def check_length(values: Sequence[int], length: int, field: str, rank: int) -> None:
    """Check that there are exactly ``length`` values."""
    if len(values) != length:
        allowed = f"a sequence of {counted(length, 'value')}" if length else "empty"
        raise DescriptorError(field, values, f"{allowed} for rank {rank}")


def check_rank(rank: int, min_rank: int, interleave: Interleave) -> None:
    """Check that the rank is ``min_rank`` to 5, and at least 3 with interleaving."""
    if interleave is not Interleave.NONE:
        min_rank = max(min_rank, 3)
    if not min_rank <= rank <= MAX_RANK:
        why = f" with interleave {interleave.label}" if interleave is not Interleave.NONE else ""
        raise DescriptorError(
            "rank", rank, f"{min_rank} to {MAX_RANK}{why}", "merge dimensions or add dimensions of size 1"
        )


def check_dims(dims: Sequence[int], dtype: TmaType) -> None:
    """Check that each dimension has 1 to 2**32 elements, and that dims[0] is a multiple of the packing group size."""
    for index, dim in enumerate(dims):
        if not 1 <= dim <= MAX_DIM:
            raise DescriptorError(f"dims[{index}]", dim, "1 to 2**32 elements")
    multiple = 128 if is_padded(dtype) else 2 if dtype.packed else 1
    if dims[0] % multiple:
        raise DescriptorError("dims[0]", dims[0], f"a multiple of {multiple} for {dtype.name}", "pad the rows")


def check_strides(strides_bytes: Sequence[int], dtype: TmaType, interleave: Interleave) -> None:
    """Check that the strides are multiples of 16 or 32 bytes below 2**40.

    Strides of 0 (broadcasts) and strides that make rows overlap are legal.
    """
    multiple = address_alignment(dtype, interleave)
    for index, stride in enumerate(strides_bytes):
        if not 0 <= stride < STRIDE_LIMIT:
            raise DescriptorError(
                f"strides_bytes[{index}]", stride, "0 to 2**40 - 16 bytes", "copy the array if it has negative strides"
            )
        if stride % multiple:
            raise DescriptorError(
                f"strides_bytes[{index}]",
                stride,
                f"a multiple of {multiple} bytes",
                "pad the rows or use ordinary loads",
            )


def check_address(address: int, dtype: TmaType, interleave: Interleave) -> None:
    """Check that the address fits in 64 bits and has the alignment that address_alignment() returns."""
    multiple = address_alignment(dtype, interleave)
    if not 0 <= address < 1 << 64:
        raise DescriptorError("address", address, "0 to 2**64 - 1")
    if address % multiple:
        raise DescriptorError(
            "address", hex(address), f"a multiple of {multiple} bytes", "start the view at an aligned element"
        )


def check_element_strides(element_strides: Sequence[int]) -> None:
    """Check that the traversal stride of each dimension is 1 to 8."""
    for index, step in enumerate(element_strides):
        if not 1 <= step <= MAX_ELEMENT_STRIDE:
            raise DescriptorError(f"element_strides[{index}]", step, f"1 to {MAX_ELEMENT_STRIDE}")


def check_inner_box(elems: int, field: str, dtype: TmaType, interleave: Interleave, swizzle: Swizzle) -> None:
    """Check that the innermost box extent is 1 to 256 elements, a multiple of 16 bytes, and within the swizzle span.

    The documentation requires a multiple of 16 bytes only without interleaving, but the driver of an H200 always does.
    The span limit applies only without interleaving.
    """
    if not 1 <= elems <= MAX_BOX:
        raise DescriptorError(field, elems, f"1 to {MAX_BOX} elements", "use several boxes or a wider element type")
    if is_padded(dtype) and elems != 128:
        raise DescriptorError(field, elems, f"128 elements for {dtype.name}")
    bits = elems * smem_bits(dtype)
    if bits % (8 * CHUNK_BYTES):
        raise DescriptorError(
            field, f"{elems} x {smem_bits(dtype)} bits", f"a multiple of {CHUNK_BYTES} bytes in total", "widen the box"
        )
    if interleave is Interleave.NONE and swizzle is not Swizzle.NONE and bits > 8 * swizzle.span_bytes:
        raise DescriptorError(
            field,
            f"{bits // 8} bytes",
            f"at most {swizzle.span_bytes} bytes ({8 * swizzle.span_bytes // smem_bits(dtype)} elements) with swizzle "
            f"{swizzle.label}",
            "use several boxes" + (" or a wider swizzle" if swizzle.span_bytes < _WIDEST_SPAN else ""),
        )


def check_box(box: Sequence[int], dtype: TmaType, interleave: Interleave, swizzle: Swizzle) -> None:
    """Check box[0] with check_inner_box(), and that the other box extents are 1 to 256 elements."""
    check_inner_box(box[0], "box[0]", dtype, interleave, swizzle)
    for index, size in enumerate(box[1:], 1):
        if not 1 <= size <= MAX_BOX:
            raise DescriptorError(f"box[{index}]", size, f"1 to {MAX_BOX} elements", "use several boxes")


def check_interleave(interleave: Interleave, dtype: TmaType) -> None:
    """Check that a map of the 6-bit type is not interleaved."""
    if interleave is not Interleave.NONE and dtype.name == "16u6_align16b":
        raise DescriptorError("interleave", interleave.label, f"none for {dtype.name}")


def check_packed_swizzle(swizzle: Swizzle, dtype: TmaType) -> None:
    """Check that a padded packed type supports the swizzle."""
    allowed = _PADDED_SWIZZLES.get(dtype.name)
    if allowed is not None and swizzle not in allowed:
        raise DescriptorError("swizzle", swizzle.label, f"{alternatives(s.label for s in allowed)} for {dtype.name}")


def check_fill(nan: bool, dtype: TmaType) -> None:
    """Check that the type is a floating-point type if the fill value is NaN."""
    if nan and not dtype.is_float:
        raise DescriptorError(
            "oob_fill", "nan", f"zeros for {dtype.name}", "use a floating-point type to fill with NaN"
        )


def check_corners(
    lower: Sequence[int], upper: Sequence[int], dims: Sequence[int], *, first: int = 1, wide: bool = False
) -> None:
    """Check that the im2col corners (W first) are in range and that the bounding box is not empty.

    The corners are signed numbers of 16, 8 or 5 bits, depending on the rank. In dimension i + first, the box extends
    from lower[i] to dims[i + first] - 1 + upper[i]. ``first`` is the index of W: 0 with interleaving, otherwise 1. If
    ``wide`` is True, there is one corner of 16 bits along W at any rank. Like the driver, this function truncates the
    extent to a signed 32-bit number.
    """
    rank = 3 if wide else len(dims)
    low, high = CORNER_RANGE[rank]

    def field(name: str, index: int) -> str:
        return f"{name}_w" if wide else f"{name}[{index}]"

    for name, corner in (("lower_corner", lower), ("upper_corner", upper)):
        check_length(corner, rank - 2, name, rank)
        for index, value in enumerate(corner):
            if not low <= value <= high:
                raise DescriptorError(field(name, index), value, f"{low} to {high} at rank {rank}")
    for index in range(rank - 2):
        dim = index + first
        extent = dims[dim] + upper[index] - lower[index]
        if _signed_32(extent) < 1:
            allowed = (
                f"at least {lower[index] - dims[dim] + 1}" if extent < 1 else "less than 2**31 beyond lower_corner"
            )
            raise DescriptorError(
                field("upper_corner", index),
                upper[index],
                f"{allowed} (the bounding box has extent {extent} in dimension {dim})",
            )


def _signed_32(value: int) -> int:
    return (value + (1 << 31)) % (1 << 32) - (1 << 31)


def check_pixels(pixels: int) -> None:
    """Check that a column has 1 to 1024 pixels."""
    if not 1 <= pixels <= MAX_PIXELS:
        raise DescriptorError("pixels_per_column", pixels, f"1 to {MAX_PIXELS}")


def check_wide(interleave: Interleave, swizzle: Swizzle) -> None:
    """Check that an im2col wide map is not interleaved and has swizzle 64B, 128B or 128B_ATOM_32B."""
    if interleave is not Interleave.NONE:
        raise DescriptorError("interleave", interleave.label, "none in im2col wide mode")
    if swizzle not in _WIDE_SWIZZLES:
        allowed = alternatives(s.label for s in _WIDE_SWIZZLES)
        raise DescriptorError("swizzle", swizzle.label, f"{allowed} in im2col wide mode")
