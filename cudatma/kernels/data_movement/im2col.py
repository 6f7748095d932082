"""Arrange the inputs of a convolution in columns with TMA's im2col mode.

A column holds all inputs of the filter for one output pixel.

[PTX ISA, cp.async.bulk.tensor, .im2col]
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any, ClassVar, NamedTuple

import numpy as np

from cudatma.arrays import ArrayInfo, dense_strides
from cudatma.descriptor import Im2colSpec, check_load, check_store
from cudatma.descriptor import check_target as check_map_target
from cudatma.descriptor.rules import TMA_ALIGNMENT_BYTES
from cudatma.dtypes import tma_type
from cudatma.errors import ArgumentError, ArgumentTypeError, DescriptorError
from cudatma.kernels.arguments import Arguments, Map, Sizes
from cudatma.kernels.checks import check_field_types
from cudatma.kernels.data_movement.checks import as_key, check_out, check_size, described, whole_numbers
from cudatma.kernels.data_movement.configs import check_rank
from cudatma.kernels.data_movement.movement import LaunchLimits, Movement, checked
from cudatma.kernels.data_movement.plans import chunk_place, tensor_map
from cudatma.kernels.data_movement.ring import SLOT_BYTES, CopyRing, usual_ring
from cudatma.kernels.data_movement.window import choose_box
from cudatma.kernels.engine import run
from cudatma.kernels.host import host_array
from cudatma.kernels.operation import Checked
from cudatma.target import Target

TEMPLATE = "kernels/im2col.cu.j2"
_AXES = ("w", "h", "d")
_INT32 = 1 << 31


@dataclass(frozen=True, slots=True)
class Im2colCopyConfig(CopyRing):
    """A configuration of ``kernels/im2col.cu.j2``.

    Attributes
    ----------
    rank : int
        Number of axes of the images, including batch and channels, 3 to 5.
    stage_bytes : int
        Maximum size of a box in bytes.
    stages, in_flight : int
        See CopyRing.

    Raises
    ------
    ArgumentError
        If a field is invalid.
    """

    rank: int
    stage_bytes: int
    stages: int
    in_flight: int
    entry: str = "im2col"

    def __post_init__(self) -> None:
        check_field_types(self)
        check_rank(self.rank, 3)
        self.check_ring()

    @property
    def at(self) -> str:
        """Names of the coordinates, beginning with w."""
        return ", ".join(_AXES[: self.rank - 2])

    @property
    def offsets(self) -> str:
        return ", ".join(f"offset_{axis}" for axis in _AXES[: self.rank - 2])


@dataclass(frozen=True, slots=True)
class Convolution:
    """Image size, number of filter taps, stride, padding and dilation, each with one value per spatial axis."""

    size: tuple[int, ...]
    taps: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]

    @property
    def out(self) -> tuple[int, ...]:
        """Number of output pixels along each axis, or an empty tuple if the filter does not fit."""
        return tuple(
            max(0, (size + 2 * pad - step * (taps - 1) - 1) // stride + 1)
            for size, taps, stride, pad, step in zip(
                self.size, self.taps, self.stride, self.padding, self.dilation, strict=True
            )
        )


def im2col(
    src: Any,
    kernel: int | Sequence[int],
    *,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    out: Any = None,
    stream: Any = None,
    backend: str | None = None,
) -> Any:
    """Arrange the inputs of a convolution as columns, one per output pixel.

    Parameters
    ----------
    src : array (images, [depth, [height,]] width, channels)
        The images in channels-last order, with elements of 1, 2, 4 or 8 bytes. The channels of a pixel must take a
        multiple of 16 bytes.
    kernel, stride, padding, dilation : int or sequence of int
        One value, or one value per spatial axis. The stride must be at most 8. Zeros are padded on both sides. padding
        and dilation * (kernel - 1) - padding must be less than 32768 for one spatial axis, 128 for two, and 16 for
        three.
    out : array (images, out depth, ..., kernel depth, ..., channels), optional
        The result, in C order, so that ``out.reshape(pixels, -1) @ weight.reshape(-1, filters)`` is the convolution.
        Default: a new array.
    stream : stream, optional
        Stream of the launch. Default: the current stream of the source's library.
    backend : str, optional
        Where to run: ``"cuda"``, ``"emulator"``, ``"reference"`` or ``"auto"``; see ``marlin_gemm``.

    Returns
    -------
    array
        The columns.

    Raises
    ------
    ArgumentError, ArgumentTypeError, DescriptorError, LaunchError, TargetError, CompileError, DriverError, HazardError
        If an argument is invalid, if the convolution exceeds a TMA limit, or if the kernel cannot run; see ``copy``.

    Examples
    --------
    >>> images = np.ones((1, 6, 6, 16), np.float32)
    >>> cudatma.im2col(images, 3, backend="reference").shape
    (1, 4, 4, 3, 3, 16)
    """
    return run(IM2COL, (src,), out, as_key(kernel, stride, padding, dilation), stream=stream, backend=backend)


class _Problem(NamedTuple):
    src: ArrayInfo
    out: ArrayInfo
    conv: Convolution


class Im2col(Movement[_Problem]):
    """Operation of im2col(), with the options kernel, stride, padding and dilation."""

    name: ClassVar[str] = "im2col"

    def check(self, inputs: tuple[Any, ...], out: Any, options: tuple[Any, ...], resource: Any) -> Checked[_Problem]:
        info = described(inputs[0], "src")
        if not 3 <= len(info.shape) <= 5:
            raise ArgumentError(
                "src.shape", info.shape, "a tuple of 3 to 5 extents (images, depth, height, width, channels)"
            )
        if info.dtype.itemsize not in (1, 2, 4, 8):
            raise ArgumentError("src.dtype", str(info.dtype), "1, 2, 4 or 8 bytes wide", "view the array as bytes")
        if not info.size_elems:
            raise ArgumentError("src.shape", info.shape, "the shape of a nonempty array")
        conv = convolution(info.shape[1:-1], *options)
        shape = (info.shape[0], *conv.out, *conv.taps, info.shape[-1])
        check_size(shape, info.dtype, "kernel, padding")
        return checked(_Problem, (info,), check_out(out, info, shape, dense=True), shape, conv)

    def plan(self, problem: _Problem, limits: LaunchLimits) -> tuple[Arguments, ...]:
        return (plan_im2col(*problem, limits),)

    def reference(self, problem: _Problem, arrays: Mapping[str, ArrayInfo]) -> None:
        columns_on_host(arrays["src"], arrays["out"], problem.conv)


IM2COL = Im2col()


def convolution(size: tuple[int, ...], kernel: Any, stride: Any, padding: Any, dilation: Any) -> Convolution:
    """Return the convolution over images of this size. Raises ArgumentError or ArgumentTypeError."""
    sizes = {}
    for field, value, minimum in (
        ("kernel", kernel, 1),
        ("stride", stride, 1),
        ("padding", padding, 0),
        ("dilation", dilation, 1),
    ):
        try:
            extent: Any = (operator.index(value),) * len(size)
        except TypeError:
            extent = value
        if isinstance(value, bool):
            raise ArgumentTypeError(field, value, "an int or a sequence with one int per spatial axis")
        sizes[field] = whole_numbers(field, extent, len(size))
        for axis, number in enumerate(sizes[field]):
            if not minimum <= number < _INT32:
                raise ArgumentError(f"{field}[{axis}]", number, f"at least {minimum} and less than 2**31")
    return Convolution(size, sizes["kernel"], sizes["stride"], sizes["padding"], sizes["dilation"])


def plan_im2col(
    src: ArrayInfo, out: ArrayInfo, conv: Convolution, limits: LaunchLimits, slot: int = SLOT_BYTES
) -> Arguments:
    """Return the launch. ``slot`` is the maximum size of a box in bytes.

    Raises DescriptorError if TMA cannot read the images.
    """
    itemsize, channels, taps = src.dtype.itemsize, src.shape[-1], prod(conv.taps)
    kind = tma_type(f"uint{8 * itemsize}")
    pixels = out.size_elems // (channels * taps)
    pixel_box, channel_box = choose_box((pixels, channels), itemsize, slot)
    load = _image_map(src, conv, kind, channel_box, pixel_box, limits)
    columns = replace(
        out,
        shape=(pixels, taps, channels),
        strides_bytes=dense_strides((pixels, taps, channels), out.dtype),
        dtype=np.dtype(kind.name),
    )
    store = tensor_map("out", columns, (pixel_box, 1, channel_box), limits)
    check_store(store.spec)
    channel_boxes = -(-channels // channel_box)
    boxes = -(-pixels // pixel_box) * taps * channel_boxes
    if boxes >= _INT32:
        raise ArgumentError(
            "src.shape",
            f"{boxes} boxes",
            "small enough for fewer than 2**31 boxes",
            "split the images into several calls",
        )
    config = Im2colCopyConfig(len(src.shape), *usual_ring(limits.target))
    axes = zip(
        *(reversed(each) for each in (conv.out, conv.taps, conv.stride, conv.padding, conv.dilation)), strict=True
    )
    numbers = [value for axis in axes for value in axis]
    sizes = (channel_box, channel_boxes, taps, pixel_box, pixel_box * channel_box * itemsize, boxes)
    return Arguments(TEMPLATE, config, (load, store, *numbers, *sizes), Sizes(min(limits.ctas, boxes)))


def _image_map(src: ArrayInfo, conv: Convolution, kind: Any, channels: int, pixels: int, limits: LaunchLimits) -> Map:
    """Return the im2col tensor map of the images. Its bounding box contains the positions of the filter's first tap."""
    lower = tuple(-pad for pad in reversed(conv.padding))
    reach = tuple(step * (taps - 1) for taps, step in zip(conv.taps, conv.dilation, strict=True))
    upper = tuple(pad - far for pad, far in zip(reversed(conv.padding), reversed(reach), strict=True))
    spec = Im2colSpec(
        dtype=kind,
        dims=tuple(reversed(src.shape)),
        strides_bytes=_pitches(src),
        element_strides=(1, *reversed(conv.stride), 1),
        lower_corner=lower,
        upper_corner=upper,
        channels_per_pixel=channels,
        pixels_per_column=pixels,
    )
    if src.pointer % TMA_ALIGNMENT_BYTES:
        raise DescriptorError("address", chunk_place(src.pointer), "a multiple of 16 bytes", "pass an aligned copy")
    check_map_target(spec, limits.target)
    check_load(spec, (0, *lower, 0), tuple(reversed(reach)))
    return Map("src", spec)


def _pitches(src: ArrayInfo) -> tuple[int, ...]:
    """Return the pitches of all axes except the innermost, in TMA order.

    Raises DescriptorError if the channels of a pixel are not contiguous.
    """
    itemsize = src.dtype.itemsize
    if src.shape[-1] > 1 and src.strides_bytes[-1] != itemsize:
        raise DescriptorError("src.strides", src.strides_bytes, f"{itemsize} bytes between channels")
    dense = dense_strides(src.shape, src.dtype)
    kept = [s if n > 1 else d for n, s, d in zip(src.shape, src.strides_bytes, dense, strict=True)]
    return tuple(reversed(kept[:-1]))


def columns_on_host(src: ArrayInfo, out: ArrayInfo, conv: Convolution) -> None:
    """Arrange the columns with NumPy, using one strided view of the padded images per tap."""
    images, columns = host_array(src), host_array(out)
    padded = np.pad(images, [(0, 0), *((pad, pad) for pad in conv.padding), (0, 0)])
    spatial = len(conv.size)
    for tap in product(*(range(taps) for taps in conv.taps)):
        inside = tuple(
            slice(at * step, at * step + (count - 1) * stride + 1, stride)
            for at, step, count, stride in zip(tap, conv.dilation, conv.out, conv.stride, strict=True)
        )
        place = (slice(None),) * (1 + spatial) + tap
        columns[place] = padded[(slice(None),) + inside]  # noqa: RUF005 - Python 3.10


def dump_configs(target: Target) -> list[Im2colCopyConfig]:
    """Return the configs for dumps and compile checks, or an empty list if the target cannot run them."""
    return [Im2colCopyConfig(4, *usual_ring(target))] if target.has("tma") else []
