"""Launches that copy a window as one run of bytes, as boxes of tensor maps, or with plain loads and stores.

The launches call the source "src" and the result "out". Only the addresses modulo 16 matter, because the addresses of a
window are converted to offsets from these arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import gcd, prod
from typing import Any

import numpy as np

from cudatma.arrays import ArrayInfo
from cudatma.descriptor import OobFill, check_load, check_reduce, check_store, check_target
from cudatma.descriptor.rules import TMA_ALIGNMENT_BYTES
from cudatma.dtypes import TmaType, tma_type
from cudatma.errors import DescriptorError
from cudatma.kernels.arguments import Arguments, At, Map, Sizes, map_over
from cudatma.kernels.data_movement import ring as rings
from cudatma.kernels.data_movement.configs import PLAIN, RUN, WINDOW, PlainConfig, RunConfig, WindowConfig
from cudatma.kernels.data_movement.movement import LaunchLimits
from cudatma.kernels.data_movement.ring import SMALL_SLOT_BYTES, Setting
from cudatma.kernels.data_movement.window import Axis, Window, choose_box, cropped, tile_counts

_MAX_BOXES = 1 << 31
_PLAIN_CTAS = 4


def tensor_map(
    name: str, info: ArrayInfo, box: Sequence[int], limits: LaunchLimits, *, offset_bytes: int = 0, **options: Any
) -> Map:
    """Return a tiled tensor map over an array, or over the part that begins ``offset_bytes`` after its first element.

    ``info`` provides the address, shape, strides and dtype of the part. The last axis is the innermost. See map_over()
    for ``options``. Raises DescriptorError or TargetError.
    """
    axes = tuple(reversed(range(len(info.shape))))
    tiled = map_over(name, info, box, axes=axes, offset_bytes=offset_bytes, **options)
    if info.pointer % TMA_ALIGNMENT_BYTES:
        remedy = "begin the view at an aligned element"
        raise DescriptorError("address", chunk_place(info.pointer), "a multiple of 16 bytes", remedy)
    check_target(tiled.spec, limits.target)
    return tiled


def chunk_place(address: int) -> str:
    """Describe the position of an address in its 16-byte chunk."""
    return f"byte {address % TMA_ALIGNMENT_BYTES} of a 16-byte chunk"


def run_plan(
    window: Window,
    arrays: tuple[ArrayInfo, ArrayInfo],
    limits: LaunchLimits,
    op: str = "copy",
    kind: str = "b8",
    cache: str = "",
    setting: Setting | None = None,
) -> Arguments:
    """Return the launch for one run of bytes (window.is_one_run) by bulk copies.

    ``setting`` is the ring. None selects the measured ring. Raises DescriptorError if the two addresses are at
    different offsets in a 16-byte chunk or if, in a reduction, an address or the size is not a multiple of 16 bytes.
    """
    nbytes, first = window.nbytes, window.first_byte
    head = min(-first % TMA_ALIGNMENT_BYTES, nbytes)
    tail = (nbytes - head) % TMA_ALIGNMENT_BYTES
    if (first - window.destination) % TMA_ALIGNMENT_BYTES:
        got = f"{chunk_place(first)} and {chunk_place(window.destination)}"
        raise DescriptorError(
            "address", got, "at the same offset in a 16-byte chunk in both arrays", "pass an aligned copy"
        )
    if op != "copy" and (head or tail):
        got = f"{nbytes} bytes from {chunk_place(first)}"
        raise DescriptorError("address, size", got, "multiples of 16 bytes in a reduction", "pad the arrays")
    body = nbytes - head - tail
    ring_setting = setting or _run_setting(limits, op, body)
    ctas, stage = ring_setting.ctas(limits.ctas), ring_setting.slot(limits.target)
    config = RunConfig(op, kind, stage, *ring_setting.ring(limits.target, stage), *_policies(ring_setting, op, cache))
    source = At("src", first + head - arrays[0].pointer)
    destination = At("out", window.destination + head - arrays[1].pointer)
    edges = (head, tail) if op == "copy" else ()
    return Arguments(RUN, config, (source, destination, body, *edges), Sizes(max(1, min(ctas, -(-body // stage)))))


def _run_setting(limits: LaunchLimits, op: str, nbytes: int) -> Setting:
    """Return the measured ring if every CTA gets a segment, otherwise the usual ring or a ring with small slots."""
    for setting in (rings.RUN if op == "copy" else rings.REDUCTIONS, Setting()):
        if nbytes >= setting.ctas(limits.ctas) * setting.slot(limits.target):
            return setting
    return Setting(SMALL_SLOT_BYTES)


def window_plan(
    window: Window,
    arrays: tuple[ArrayInfo, ArrayInfo],
    limits: LaunchLimits,
    kind: TmaType | None = None,
    *,
    nan: bool = False,
    op: str = "copy",
    cache: str = "",
    setting: Setting | None = None,
    slot: int = 0,
) -> Arguments:
    """Return the launch that copies boxes of two tensor maps.

    ``kind`` is the element type, by default unsigned integers of the window's itemsize. ``setting`` is the ring. None
    selects the measured ring. ``slot`` is the maximum size of a box in bytes, or 0 for the size in the setting.

    Raises DescriptorError if TMA cannot copy the window because addresses, pitches, the result's rows or the innermost
    start are not multiples of 16 bytes, because there are gaps between elements, or because there are more than five
    axes or a negative stride.
    """
    part = cropped(window)
    chosen = tma_type(f"uint{8 * part.itemsize}") if kind is None else kind
    if part.itemsize not in (1, 2, 4, 8):
        raise DescriptorError("dtype", f"{part.itemsize} bytes", "1, 2, 4 or 8 bytes wide", "view the array as bytes")
    if not part.has_body:
        raise DescriptorError(
            "offset", "the offset of a window outside the source", "the offset of a window that overlaps the source"
        )
    extents = tuple(axis.extent for axis in part.axes)
    ring = setting or (rings.BOXES if op == "copy" else rings.REDUCTIONS)
    slot = slot or ring.slot(limits.target)
    box = choose_box(extents, part.itemsize, slot)
    source = replace(
        arrays[0],
        pointer=part.source,
        shape=tuple(axis.body for axis in part.axes),
        strides_bytes=tuple(axis.source_stride for axis in part.axes),
    )
    destination = replace(
        arrays[1],
        pointer=part.destination,
        shape=extents,
        strides_bytes=tuple(axis.destination_stride for axis in part.axes),
    )
    fill = OobFill.NAN if nan else OobFill.ZEROS
    from_src, from_out = part.source - arrays[0].pointer, part.destination - arrays[1].pointer
    load = tensor_map("src", source, box, limits, dtype=chosen, oob_fill=fill, offset_bytes=from_src)
    store = tensor_map("out", destination, box, limits, dtype=chosen, offset_bytes=from_out)
    starts = tuple(axis.start for axis in reversed(part.axes))
    check_load(load.spec, starts)
    check_store(store.spec)
    if op != "copy":
        check_reduce(store.spec, op)
    config = WindowConfig(op, len(box), slot, *ring.ring(limits.target, slot), *_policies(ring, op, cache))
    tiles = tile_counts(extents, box)
    boxes, box_bytes = prod(tiles), prod(box) * part.itemsize
    if boxes >= _MAX_BOXES:
        raise DescriptorError(
            "shape", f"{boxes} boxes", "small enough for fewer than 2**31 boxes", "split the window into several calls"
        )
    axes = [value for axis in zip(starts, reversed(box), reversed(tiles), strict=True) for value in axis]
    return Arguments(WINDOW, config, (load, store, *axes, box_bytes, boxes), Sizes(min(ring.ctas(limits.ctas), boxes)))


def _policies(setting: Setting, op: str, cache: str) -> tuple[str, str]:
    """Return the L2 policies of loads and stores for a call's ``cache``. Stores of reductions have no policy."""
    load, store = (cache, cache) if cache else (setting.load_cache, setting.store_cache)
    return load, store if op == "copy" else ""


def plain_plan(window: Window, arrays: tuple[ArrayInfo, ArrayInfo], limits: LaunchLimits, fill: int = 0) -> Arguments:
    """Return the launch that copies any window element by element.

    ``fill`` contains the bits of elements outside the source. Elements that are not aligned to their size, or whose
    size the hardware does not support, are copied in smaller parts. Such parts can be filled only with zeros. Raises
    DescriptorError for another fill value.
    """
    parts = [window.itemsize, window.source, window.destination]
    parts += [stride for axis in window.axes for stride in (axis.source_stride, axis.destination_stride)]
    width = next(w for w in (8, 4, 2, 1) if gcd(*parts) % w == 0)
    axes = window.axes
    if width != window.itemsize:
        if fill:
            got = f"{chunk_place(window.source)} and {chunk_place(window.destination)}"
            raise DescriptorError(
                "address", got, f"a multiple of {window.itemsize} bytes if the fill value is NaN", 'pass pad="zeros"'
            )
        count = window.itemsize // width
        axes = (*axes, Axis(0, count, count, width, width))
    packed = np.array(
        [(a.start, a.extent, a.size, a.source_stride, a.destination_stride) for a in axes], np.int64
    ).tobytes()
    source = At("src", window.source - arrays[0].pointer)
    destination = At("out", window.destination - arrays[1].pointer)
    elements = prod(axis.extent for axis in axes)
    config = PlainConfig(width, len(axes), 32 if elements < 1 << 31 else 64)
    ctas = min(limits.ctas * _PLAIN_CTAS, -(-elements // config.threads))
    return Arguments(PLAIN, config, (source, destination, packed, elements, fill), Sizes(ctas))
