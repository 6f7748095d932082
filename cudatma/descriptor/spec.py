"""Specs of tensor maps: frozen dataclasses that are validated on construction.

A spec validates every driver rule that does not depend on the GPU (rules.py). access.py validates the rules that depend
on the GPU, the coordinates or the direction of a copy. Index 0 is the innermost dimension (TMA order), and
``strides_bytes[i]`` is the pitch of dimension i + 1.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

from cudatma.descriptor import rules
from cudatma.descriptor.rules import Im2colWideMode, L2Promotion, OobFill
from cudatma.dtypes import TmaType, tma_type
from cudatma.errors import DescriptorError
from cudatma.layout import (
    BoxLayout,
    Interleave,
    Swizzle,
    box_layout,
    interleaved_layout,
    required_alignment,
    to_tma_order,
    traversed,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MapSpec(ABC):
    """Base class of TiledSpec, Im2colSpec and Im2colWideSpec with the fields that all tensor maps share.

    Sequences are in TMA order, innermost dimension first.

    Parameters
    ----------
    dtype : TmaType, str or dtype
        Element type as a TmaType, a name or a NumPy dtype.
    dims : tuple of int
        Size of each of the 1 to 5 dimensions in elements.
    strides_bytes : tuple of int
        Pitch of dimensions 1 to rank - 1 in bytes.
    element_strides : tuple of int
        Traversal stride of each dimension in elements, 1 to 8. Default: 1 in each dimension. Without interleaving, the
        hardware ignores the innermost traversal stride.
    interleave : Interleave or str, default: "none"
        Layout of the channel slices.
    swizzle : Swizzle or str, default: "none"
        Permutation of the 16-byte chunks in shared memory.
    l2_promotion : L2Promotion or str, default: "none"
        Granularity of L2 fetches in bytes.
    oob_fill : OobFill or str, default: "zeros"
        Value of elements outside the tensor.
    address : int, default: 0
        Global address in bytes, or 0 if it is not yet known.

    Raises
    ------
    DescriptorError
        If a field is invalid. The error names the field and the index.
    """

    dtype: TmaType
    dims: tuple[int, ...]
    strides_bytes: tuple[int, ...] = ()
    element_strides: tuple[int, ...] = ()
    interleave: Interleave = Interleave.NONE
    swizzle: Swizzle = Swizzle.NONE
    l2_promotion: L2Promotion = L2Promotion.NONE
    oob_fill: OobFill = OobFill.ZEROS
    address: int = 0

    @property
    def rank(self) -> int:
        """Number of dimensions."""
        return len(self.dims)

    @property
    @abstractmethod
    def box_layout(self) -> BoxLayout:
        """Row size and pitch of a box in shared memory."""

    @property
    @abstractmethod
    def described_bytes(self) -> int:
        """Box size in bytes that the driver stores in bits 512-543 and compares with its shared-memory limit.

        The driver counts floor(box / element_strides) elements in each dimension, including the innermost, and ignores
        padding and interleave. ``expected_bytes`` is the number of bytes that one load transfers, and
        ``footprint_bytes`` is the number of bytes that the box occupies.
        """

    @property
    def expected_bytes(self) -> int:
        """Number of bytes by which one load advances the mbarrier's transaction count.

        The padding of the padded packed types is included.
        """
        return self.box_layout.expected_bytes

    @property
    def footprint_bytes(self) -> int:
        """Number of bytes of shared memory that a box occupies.

        The number exceeds ``expected_bytes`` if the swizzle pads narrow rows to its span.
        """
        return self.box_layout.footprint_bytes

    @property
    def smem_alignment_bytes(self) -> int:
        """Required alignment of a box in shared memory, in bytes."""
        return required_alignment(self.swizzle)

    def _set(self, **values: Any) -> None:
        """Store normalized values in the frozen dataclass."""
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _check_tensor(self, min_rank: int) -> None:
        """Normalize and check the shared fields."""
        dims = rules.as_ints(self.dims, "dims")
        self._set(
            dtype=tma_type(self.dtype),
            dims=dims,
            strides_bytes=rules.as_ints(self.strides_bytes, "strides_bytes"),
            element_strides=rules.as_ints(self.element_strides, "element_strides") or (1,) * len(dims),
            interleave=Interleave.parse(self.interleave, "interleave"),
            swizzle=Swizzle.parse(self.swizzle, "swizzle"),
            l2_promotion=L2Promotion.parse(self.l2_promotion, "l2_promotion"),
            oob_fill=OobFill.parse(self.oob_fill, "oob_fill"),
            address=rules.as_int(self.address, "address"),
        )
        rank, dtype = self.rank, self.dtype
        rules.check_rank(rank, min_rank, self.interleave)
        rules.check_length(self.strides_bytes, rank - 1, "strides_bytes", rank)
        rules.check_length(self.element_strides, rank, "element_strides", rank)
        rules.check_dims(self.dims, dtype)
        rules.check_strides(self.strides_bytes, dtype, self.interleave)
        rules.check_address(self.address, dtype, self.interleave)
        rules.check_element_strides(self.element_strides)
        rules.check_interleave(self.interleave, dtype)
        rules.check_packed_swizzle(self.swizzle, dtype)
        rules.check_fill(self.oob_fill is OobFill.NAN, dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class TiledSpec(MapSpec):
    """Specification of a tiled tensor map over a tensor of rank 1 to 5.

    Sequences are in TMA order, innermost dimension first.

    Parameters
    ----------
    dtype, dims, strides_bytes, element_strides : as in MapSpec
        Element type, sizes, pitches and traversal strides. See ``MapSpec``.
    interleave, swizzle, l2_promotion, oob_fill, address : optional
        Modes and global address. See ``MapSpec``.
    box : tuple of int
        Extent of the box in each dimension in elements, 1 to 256, before traversal strides apply. With interleaving,
        box[0] counts the pixels of a channel slice, and box[-2] counts the channels of a slice. See ``Interleave`` for
        the order of the dimensions.

    Raises
    ------
    DescriptorError
        If a field is invalid.

    References
    ----------
    CUDA driver API, cuTensorMapEncodeTiled; PTX ISA 5.5.3.

    Examples
    --------
    >>> spec = cudatma.TiledSpec(dtype="float16", dims=(1024, 512), strides_bytes=(2048,), box=(64, 64), swizzle="128B")
    >>> spec.expected_bytes, spec.smem_alignment_bytes
    (8192, 1024)
    """

    box: tuple[int, ...]

    def __post_init__(self) -> None:
        self._check_tensor(min_rank=1)
        self._set(box=rules.as_ints(self.box, "box"))
        rules.check_length(self.box, self.rank, "box", self.rank)
        rules.check_box(self.box, self.dtype, self.interleave, self.swizzle)

    @property
    def box_layout(self) -> BoxLayout:
        """Row size and pitch of a box in shared memory."""
        counts = traversed(self.box, self.element_strides, self.interleave)
        if self.interleave is Interleave.NONE:
            return box_layout(counts, rules.smem_bits(self.dtype), self.swizzle)
        return interleaved_layout(counts[0], prod((*counts[1:-2], counts[-1])), self.interleave, self.swizzle)

    @property
    def described_bytes(self) -> int:
        """Box size in bytes, as the driver computes it. See ``MapSpec``."""
        whole = (size // step for size, step in zip(self.box, self.element_strides, strict=True))
        return prod(whole) * rules.smem_bits(self.dtype) // 8

    @classmethod
    def from_strided(
        cls,
        address: int,
        shape: Sequence[int],
        *,
        strides_bytes: Sequence[int],
        dtype: object,
        box: Sequence[int],
        axes: Sequence[int] | None = None,
        element_strides: Sequence[int] | None = None,
        **options: Any,
    ) -> TiledSpec:
        """Create the spec of an array whose axes are in NumPy order.

        Parameters
        ----------
        address : int
            Global address of the first element.
        shape : sequence of int
            Size of each axis in elements, outermost first.
        strides_bytes : sequence of int
            Pitch of each axis in bytes. The innermost axis must be contiguous.
        dtype : TmaType, str or dtype
            Element type.
        box : sequence of int
            Extent of the box along each axis in elements.
        axes : sequence of int, optional
            Axes of the array, from innermost to outermost. Default: Fortran order if only the first axis is contiguous,
            otherwise C order.
        element_strides : sequence of int, optional
            Traversal stride of each axis in elements. Default: 1 along each axis.
        **options
            Other fields of TiledSpec.

        Returns
        -------
        TiledSpec
            Spec of a map over the array.

        Raises
        ------
        DescriptorError
            If a field is invalid. The error numbers axes in the order of the array.
        """
        sizes, pitches = rules.as_ints(shape, "shape"), rules.as_ints(strides_bytes, "strides_bytes")
        rank, kind = len(sizes), tma_type(dtype)
        steps = (1,) * rank if element_strides is None else rules.as_ints(element_strides, "element_strides")
        extents = rules.as_ints(box, "box")
        for name, values in (("strides_bytes", pitches), ("element_strides", steps), ("box", extents)):
            rules.check_length(values, rank, name, rank)
        order = array_axes(sizes, pitches, kind, axes)
        try:
            return cls(
                dtype=kind,
                dims=tuple(sizes[axis] for axis in order),
                strides_bytes=tma_strides(sizes, pitches, kind, order),
                box=tuple(extents[axis] for axis in order),
                element_strides=tuple(steps[axis] for axis in order),
                address=address,
                **options,
            )
        except DescriptorError as error:
            raise error.renamed(array_fields(order)) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Im2colSpec(MapSpec):
    """Specification of an im2col tensor map over a batch of NWC, NHWC or NDHWC images.

    Sequences are in TMA order, innermost dimension first.

    Parameters
    ----------
    dtype, dims, strides_bytes, element_strides : as in MapSpec
        Element type, sizes, pitches and traversal strides. See ``MapSpec``.
    interleave, swizzle, l2_promotion, oob_fill, address : optional
        Modes and global address. See ``MapSpec``.
    lower_corner, upper_corner : tuple of int
        Offsets of the bounding box's corners from those of the image, rank - 2 values, W first. W is dims[1], or
        dims[0] with interleaving.
    channels_per_pixel : int
        Number of channels per box, 1 to 256. With interleaving, a load always transfers one channel slice.
    pixels_per_column : int
        Number of pixels per box, 1 to 1024. Traversal strides do not change it.

    Raises
    ------
    DescriptorError
        If a field is invalid.

    References
    ----------
    CUDA driver API, cuTensorMapEncodeIm2col; PTX ISA 5.5.4.
    """

    lower_corner: tuple[int, ...]
    upper_corner: tuple[int, ...]
    channels_per_pixel: int
    pixels_per_column: int

    def __post_init__(self) -> None:
        self._check_tensor(min_rank=3)
        self._set(
            lower_corner=rules.as_ints(self.lower_corner, "lower_corner"),
            upper_corner=rules.as_ints(self.upper_corner, "upper_corner"),
            channels_per_pixel=rules.as_int(self.channels_per_pixel, "channels_per_pixel"),
            pixels_per_column=rules.as_int(self.pixels_per_column, "pixels_per_column"),
        )
        first = 1 if self.interleave is Interleave.NONE else 0
        rules.check_corners(self.lower_corner, self.upper_corner, self.dims, first=first)
        channels = self.channels_per_pixel
        rules.check_inner_box(channels, "channels_per_pixel", self.dtype, self.interleave, self.swizzle)
        rules.check_pixels(self.pixels_per_column)

    @property
    def box_layout(self) -> BoxLayout:
        """Row size and pitch of a box in shared memory."""
        if self.interleave is Interleave.NONE:
            counts = (self.channels_per_pixel, self.pixels_per_column)
            return box_layout(counts, rules.smem_bits(self.dtype), self.swizzle)
        return interleaved_layout(1, self.pixels_per_column, self.interleave, self.swizzle)

    @property
    def described_bytes(self) -> int:
        """Box size in bytes, as the driver computes it. See ``MapSpec``."""
        return self.channels_per_pixel * self.pixels_per_column * rules.smem_bits(self.dtype) // 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Im2colWideSpec(MapSpec):
    """Specification of an im2col wide tensor map (sm_100 and later), which loads pixels only along W.

    Sequences are in TMA order, innermost dimension first. ``expected_bytes`` and ``footprint_bytes`` do not include
    halo pixels.

    Parameters
    ----------
    dtype, dims, strides_bytes, element_strides : as in MapSpec
        Element type, sizes, pitches and traversal strides. See ``MapSpec``.
    interleave, swizzle, l2_promotion, oob_fill, address : optional
        Modes and global address. See ``MapSpec``.
    lower_corner_w, upper_corner_w : int
        Offsets of the bounding box's ends from those of the image along W, each a signed 16-bit number.
    channels_per_pixel : int
        Number of channels per box, 1 to 256.
    pixels_per_column : int
        Number of pixels per box, 1 to 1024.
    mode : Im2colWideMode or str, default: "w"
        "w" loads ``pixels_per_column`` pixels. "w128" always loads 128 pixels.

    Raises
    ------
    DescriptorError
        If a field is invalid.

    References
    ----------
    CUDA driver API, cuTensorMapEncodeIm2colWide; PTX ISA 5.5.5.
    """

    lower_corner_w: int
    upper_corner_w: int
    channels_per_pixel: int
    pixels_per_column: int
    mode: Im2colWideMode = Im2colWideMode.W

    def __post_init__(self) -> None:
        self._check_tensor(min_rank=3)
        self._set(
            lower_corner_w=rules.as_int(self.lower_corner_w, "lower_corner_w"),
            upper_corner_w=rules.as_int(self.upper_corner_w, "upper_corner_w"),
            channels_per_pixel=rules.as_int(self.channels_per_pixel, "channels_per_pixel"),
            pixels_per_column=rules.as_int(self.pixels_per_column, "pixels_per_column"),
            mode=Im2colWideMode.parse(self.mode, "mode"),
        )
        rules.check_wide(self.interleave, self.swizzle)
        rules.check_corners((self.lower_corner_w,), (self.upper_corner_w,), self.dims, wide=True)
        channels = self.channels_per_pixel
        rules.check_inner_box(channels, "channels_per_pixel", self.dtype, self.interleave, self.swizzle)
        rules.check_pixels(self.pixels_per_column)

    @property
    def box_layout(self) -> BoxLayout:
        """Row size and pitch of a box in shared memory."""
        pixels = 128 if self.mode is Im2colWideMode.W128 else self.pixels_per_column
        return box_layout((self.channels_per_pixel, pixels), rules.smem_bits(self.dtype), self.swizzle)

    @property
    def described_bytes(self) -> int:
        """Box size in bytes, as the driver computes it. See ``MapSpec``."""
        return self.expected_bytes


AnySpec: TypeAlias = TiledSpec | Im2colSpec | Im2colWideSpec


def array_axes(
    sizes: Sequence[int], pitches: Sequence[int], dtype: TmaType, axes: Sequence[int] | None
) -> tuple[int, ...]:
    """Return the axes of an array, innermost first. Raises DescriptorError if the innermost axis is not contiguous."""
    rank = len(sizes)
    rules.check_rank(rank, 1, Interleave.NONE)
    c_order, f_order = to_tma_order(range(rank)), tuple(range(rank))

    def dense(axis: int) -> bool:
        return sizes[axis] == 1 or pitches[axis] == dtype.element_bytes

    if axes is None:
        order = f_order if dense(0) and not dense(rank - 1) else c_order
    else:
        order = rules.as_ints(axes, "axes")
        if sorted(order) != list(f_order):
            raise DescriptorError("axes", axes, f"a permutation of 0 to {rank - 1}")
    inner = order[0]
    if not dense(inner):
        raise DescriptorError(
            f"strides_bytes[{inner}]",
            pitches[inner],
            f"{dtype.element_bytes} bytes along the innermost axis",
            "make the array contiguous or choose another innermost axis with axes=",
        )
    return order


def array_fields(order: Sequence[int]) -> dict[str, str]:
    """Map field names of a TiledSpec to those of an array, such as ``"box[0]"`` to ``"box[1]"``.

    A TiledSpec counts from the innermost dimension. ``order`` lists the axes of the array from innermost to outermost.
    """
    names = {f"strides_bytes[{index}]": f"strides_bytes[{axis}]" for index, axis in enumerate(order[1:])}
    for index, axis in enumerate(order):
        names |= {f"dims[{index}]": f"shape[{axis}]"}
        names |= {f"{name}[{index}]": f"{name}[{axis}]" for name in ("box", "element_strides")}
    return names


def tma_strides(sizes: Sequence[int], pitches: Sequence[int], dtype: TmaType, order: Sequence[int]) -> tuple[int, ...]:
    """Return the pitches of dimensions 1 to rank - 1 in bytes.

    The arbitrary pitch that NumPy gives a dimension of size 1 is replaced with the smallest legal pitch.
    """
    strides: list[int] = []
    extent = sizes[order[0]] * dtype.element_bytes
    for axis in order[1:]:
        pitch = pitches[axis] if sizes[axis] != 1 else min(-(-extent // 32) * 32, rules.STRIDE_LIMIT - 32)
        strides.append(pitch)
        extent = max(extent, pitch * sizes[axis])
    return tuple(strides)
