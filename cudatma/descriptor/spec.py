"""What a tensor map asks for: frozen configs, valid by construction.

A spec checks every rule of the driver that does not depend on the GPU (rules.py) when it is made. What depends on the
GPU, on a coordinate or on the direction of a copy is asked for separately (access.py). Everything is in TMA order:
index 0 is the innermost dimension, ``strides_bytes[i]`` is the pitch of dimension i + 1.
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
    """Fields and rules that all tensor maps share; use TiledSpec, Im2colSpec or Im2colWideSpec.

    dtype: TmaType, its name or a NumPy dtype. dims: elements, rank 1..5. strides_bytes: rank - 1 of them.
    element_strides: traversal steps 1..8, one a dimension, all 1 if left empty; [0] is ignored without interleave.
    interleave, swizzle, l2_promotion, oob_fill: members or their labels. address: global memory, 0 if not yet known.
    Raises DescriptorError with the field and index that broke a rule.
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
        return len(self.dims)

    @property
    @abstractmethod
    def box_layout(self) -> BoxLayout:
        """Rows and pitch of one box in shared memory."""

    @property
    @abstractmethod
    def described_bytes(self) -> int:
        """The box's size as the driver computes it: bits 512-543, and what it holds against shared memory.

        It floors box / element_strides, in the innermost dimension too, and knows neither padding nor interleave: it is
        not what arrives (expected_bytes) or what is needed (footprint_bytes).
        """

    @property
    def expected_bytes(self) -> int:
        """What one load adds to the mbarrier's transaction count (for padded packed types: their shared memory)."""
        return self.box_layout.expected_bytes

    @property
    def footprint_bytes(self) -> int:
        """What one box needs in shared memory; more than expected_bytes where narrow rows are padded to a swizzle."""
        return self.box_layout.footprint_bytes

    @property
    def smem_alignment_bytes(self) -> int:
        """Alignment of the box in shared memory."""
        return required_alignment(self.swizzle)

    def _set(self, **values: Any) -> None:
        """Store normalised values; the dataclass is frozen for everybody else."""
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _check_tensor(self, least_rank: int) -> None:
        """Normalise the shared fields and check the rules on them."""
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
        rules.check_rank(rank, least_rank, self.interleave)
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
    """A box of a tensor of rank 1..5. [CUDA driver API, cuTensorMapEncodeTiled; PTX ISA 5.5.3]

    box: elements traversed in each dimension, 1..256. With interleave box[0] counts pixels of one channel slice each,
    and box[-2] the channels of one slice (layout.Interleave has the order). The other fields: MapSpec.
    """

    box: tuple[int, ...]

    def __post_init__(self) -> None:
        self._check_tensor(least_rank=1)
        self._set(box=rules.as_ints(self.box, "box"))
        rules.check_length(self.box, self.rank, "box", self.rank)
        rules.check_box(self.box, self.dtype, self.interleave, self.swizzle)

    @property
    def box_layout(self) -> BoxLayout:
        counts = traversed(self.box, self.element_strides, self.interleave)
        if self.interleave is Interleave.NONE:
            return box_layout(counts, rules.smem_bits(self.dtype), self.swizzle)
        return interleaved_layout(counts[0], prod((*counts[1:-2], counts[-1])), self.interleave, self.swizzle)

    @property
    def described_bytes(self) -> int:
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
        """A spec for an array that is given in NumPy order.

        shape, strides_bytes, box, element_strides: one value for each axis of the array, outermost first.
        axes: the array's axes from innermost to outermost; by default all of them reversed (C order), or as they are
        where only the first axis is dense (Fortran order). The innermost axis must be dense.
        options: the other fields of TiledSpec. Raises DescriptorError, which counts axes as the array does.
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
    """Columns of pixels from a batch of images, NWC, NHWC or NDHWC. [cuTensorMapEncodeIm2col; PTX ISA 5.5.4]

    lower_corner, upper_corner: offsets of the bounding box, rank - 2 of them, W first. They belong to dims[1] and up,
    with interleave to dims[0] and up.
    channels_per_pixel: 1..256; with interleave one slice of channels arrives, whatever it is.
    pixels_per_column: 1..1024; traversal steps do not change it. Others: MapSpec.
    """

    lower_corner: tuple[int, ...]
    upper_corner: tuple[int, ...]
    channels_per_pixel: int
    pixels_per_column: int

    def __post_init__(self) -> None:
        self._check_tensor(least_rank=3)
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
        if self.interleave is Interleave.NONE:
            counts = (self.channels_per_pixel, self.pixels_per_column)
            return box_layout(counts, rules.smem_bits(self.dtype), self.swizzle)
        return interleaved_layout(1, self.pixels_per_column, self.interleave, self.swizzle)

    @property
    def described_bytes(self) -> int:
        return self.channels_per_pixel * self.pixels_per_column * rules.smem_bits(self.dtype) // 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Im2colWideSpec(MapSpec):
    """Pixels along W only, for sm_100 and up. [cuTensorMapEncodeIm2colWide; PTX ISA 5.5.5]

    lower_corner_w, upper_corner_w: offsets of the bounding box along W, 16 bits. mode: W loads ``pixels_per_column``
    pixels, W128 always 128. Halo pixels come on top of expected_bytes and footprint_bytes. Others: MapSpec.
    """

    lower_corner_w: int
    upper_corner_w: int
    channels_per_pixel: int
    pixels_per_column: int
    mode: Im2colWideMode = Im2colWideMode.W

    def __post_init__(self) -> None:
        self._check_tensor(least_rank=3)
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
        pixels = 128 if self.mode is Im2colWideMode.W128 else self.pixels_per_column
        return box_layout((self.channels_per_pixel, pixels), rules.smem_bits(self.dtype), self.swizzle)

    @property
    def described_bytes(self) -> int:
        return self.expected_bytes


AnySpec: TypeAlias = TiledSpec | Im2colSpec | Im2colWideSpec


def array_axes(
    sizes: Sequence[int], pitches: Sequence[int], dtype: TmaType, axes: Sequence[int] | None
) -> tuple[int, ...]:
    """The array's axes from innermost to outermost, the innermost dense."""
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
            raise DescriptorError("axes", axes, f"a permutation of 0..{rank - 1}")
    inner = order[0]
    if not dense(inner):
        raise DescriptorError(
            f"strides_bytes[{inner}]",
            pitches[inner],
            f"{dtype.element_bytes} bytes in the innermost axis",
            "TMA cannot step over elements there; make the array contiguous, or name another innermost axis in axes=",
        )
    return order


def array_fields(order: Sequence[int]) -> dict[str, str]:
    """The fields of a TiledSpec, which count from the innermost dimension, as those of the array: ``"box[0]"`` ->
    ``"box[1]"``. order: the array's axes from innermost to outermost."""
    names = {f"strides_bytes[{index}]": f"strides_bytes[{axis}]" for index, axis in enumerate(order[1:])}
    for index, axis in enumerate(order):
        names |= {f"dims[{index}]": f"shape[{axis}]"}
        names |= {f"{name}[{index}]": f"{name}[{axis}]" for name in ("box", "element_strides")}
    return names


def tma_strides(sizes: Sequence[int], pitches: Sequence[int], dtype: TmaType, order: Sequence[int]) -> tuple[int, ...]:
    """Pitches of dimensions 1 and up. A dimension of size 1 has no pitch of its own (NumPy gives it any): it gets the
    smallest legal one that steps over the dimensions inside of it."""
    strides: list[int] = []
    extent = sizes[order[0]] * dtype.element_bytes
    for axis in order[1:]:
        pitch = pitches[axis] if sizes[axis] != 1 else min(-(-extent // 32) * 32, rules.STRIDE_LIMIT - 32)
        strides.append(pitch)
        extent = max(extent, pitch * sizes[axis])
    return tuple(strides)
