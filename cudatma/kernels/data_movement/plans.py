"""A window as a launch: as one run of bytes, as boxes of tensor maps, or by plain code."""

from __future__ import annotations

from dataclasses import replace
from math import gcd, prod

import numpy as np

from cudatma.arrays import ArrayInfo
from cudatma.descriptor import OobFill, check_load, check_reduce, check_store
from cudatma.dtypes import TmaType, tma_type
from cudatma.errors import DescriptorError
from cudatma.kernels.data_movement import ring as rings
from cudatma.kernels.data_movement.call import Place, tensor_map
from cudatma.kernels.data_movement.ring import SMALL_SLOT_BYTES, Setting
from cudatma.kernels.data_movement.specs import PLAIN, RUN, WINDOW, PlainSpec, RunSpec, WindowSpec
from cudatma.kernels.data_movement.window import CHUNK_BYTES, Axis, Window, choose_box, cropped, tile_counts
from cudatma.kernels.launch import Launch

_MOST_BOXES = 1 << 31
_PLAIN_BLOCKS = 4


def run_plan(
    window: Window,
    arrays: tuple[ArrayInfo, ArrayInfo],
    place: Place,
    op: str = "copy",
    kind: str = "b8",
    cache: str = "",
    setting: Setting | None = None,
) -> Launch:
    """One run of bytes (window.is_one_run) by bulk copies. setting: of the ring, None for what was measured.

    Raises DescriptorError where the two addresses differ by something other than whole 16-byte chunks; of a reduction,
    where address or size is not a multiple of 16 bytes.
    """
    nbytes, first = window.nbytes, window.first_byte
    head = min(-first % CHUNK_BYTES, nbytes)
    tail = (nbytes - head) % CHUNK_BYTES
    if (first - window.destination) % CHUNK_BYTES:
        got = f"{first:#x} and {window.destination:#x}"
        raise DescriptorError("address", got, "the same place in a 16-byte chunk", "copy to an aligned array")
    if op != "copy" and (head or tail):
        got = f"{nbytes} bytes at {first:#x}"
        raise DescriptorError("address", got, "multiples of 16 bytes in a reduction", "pad the arrays")
    whole = nbytes - head - tail
    chosen = setting or _run_setting(place, op, whole)
    ctas, stage = chosen.ctas(place.ctas), chosen.slot(place.target)
    spec = RunSpec(op, kind, stage, *chosen.ring(place.target, stage), *_policies(chosen, op, cache))
    source, destination = (
        replace(info, pointer=address + head) for info, address in zip(arrays, (first, window.destination), strict=True)
    )
    edges = (head, tail) if op == "copy" else ()
    grid = max(1, min(ctas, -(-whole // stage)))
    return Launch(RUN, spec, grid, (source, destination, whole, *edges), arrays)


def _run_setting(place: Place, op: str, nbytes: int) -> Setting:
    """The measured ring for runs of which every CTA has a segment, else the usual ring, or one of small slots."""
    for found in (rings.RUN if op == "copy" else rings.REDUCTIONS, Setting()):
        if nbytes >= found.ctas(place.ctas) * found.slot(place.target):
            return found
    return Setting(SMALL_SLOT_BYTES)


def window_plan(
    window: Window,
    arrays: tuple[ArrayInfo, ArrayInfo],
    place: Place,
    kind: TmaType | None = None,
    *,
    nan: bool = False,
    op: str = "copy",
    cache: str = "",
    setting: Setting | None = None,
    slot: int = 0,
) -> Launch:
    """Boxes of two tensor maps. kind: the element type, by default unsigned integers of the window's itemsize. setting:
    of the ring, None for what was measured. slot: the most bytes of a box, 0 for the setting's.

    Raises DescriptorError where TMA cannot: addresses, pitches or the result's rows off 16 bytes, elements that do not
    follow each other, more than five axes, a negative stride, an innermost start off 16 bytes.
    """
    part = cropped(window)
    chosen = tma_type(f"uint{8 * part.itemsize}") if kind is None else kind
    if part.itemsize not in (1, 2, 4, 8):
        raise DescriptorError("dtype", f"{part.itemsize} bytes", "elements of 1, 2, 4 or 8 bytes", "view it as bytes")
    if not part.has_body:
        raise DescriptorError("offset", "a window outside of the source", "one that has elements of it")
    extents = tuple(axis.extent for axis in part.axes)
    ring = setting or (rings.BOXES if op == "copy" else rings.REDUCTIONS)
    slot = slot or ring.slot(place.target)
    box = choose_box(extents, part.itemsize, slot)
    carrier = np.dtype(f"uint{8 * part.itemsize}") if chosen.numpy is None else chosen.numpy
    source = replace(
        arrays[0],
        pointer=part.source,
        shape=tuple(axis.body for axis in part.axes),
        strides_bytes=tuple(axis.source_stride for axis in part.axes),
        dtype=carrier,
    )
    destination = replace(
        arrays[1],
        pointer=part.destination,
        shape=extents,
        strides_bytes=tuple(axis.destination_stride for axis in part.axes),
        dtype=carrier,
    )
    fill = OobFill.NAN if nan else OobFill.ZEROS
    load = tensor_map(source, box, place, dtype=chosen, oob_fill=fill)
    store = tensor_map(destination, box, place, dtype=chosen)
    starts = tuple(axis.start for axis in reversed(part.axes))
    check_load(load.spec, starts)
    check_store(store.spec)
    if op != "copy":
        check_reduce(store.spec, op)
    spec = WindowSpec(op, len(box), slot, *ring.ring(place.target, slot), *_policies(ring, op, cache))
    tiles = tile_counts(extents, box)
    boxes, box_bytes = prod(tiles), prod(box) * part.itemsize
    if boxes >= _MOST_BOXES:
        raise DescriptorError("shape", f"{boxes} boxes", "below 2**31", "copy it in parts")
    axes = [value for axis in zip(starts, reversed(box), reversed(tiles), strict=True) for value in axis]
    return Launch(WINDOW, spec, min(ring.ctas(place.ctas), boxes), (load, store, *axes, box_bytes, boxes), arrays)


def _policies(setting: Setting, op: str, cache: str) -> tuple[str, str]:
    """L2 policies of loads and stores for a call's ``cache``; stores of reductions have none."""
    load, store = (cache, cache) if cache else (setting.load_cache, setting.store_cache)
    return load, store if op == "copy" else ""


def plain_plan(window: Window, arrays: tuple[ArrayInfo, ArrayInfo], place: Place, fill: int = 0) -> Launch:
    """Any window, element by element. fill: the bits of what stands outside of the source.

    Elements that are not aligned to their size, or have none of the hardware's, are copied in smaller parts; then only
    zeros can be filled in: DescriptorError.
    """
    parts = [window.itemsize, window.source, window.destination]
    parts += [stride for axis in window.axes for stride in (axis.source_stride, axis.destination_stride)]
    width = next(w for w in (8, 4, 2, 1) if gcd(*parts) % w == 0)
    axes = window.axes
    if width != window.itemsize:
        if fill:
            got = f"{hex(window.source)} and {hex(window.destination)}"
            raise DescriptorError(
                "address", got, f"multiples of {window.itemsize} bytes to fill in NaN", "pad with zeros"
            )
        count = window.itemsize // width
        axes = (*axes, Axis(0, count, count, width, width))
    packed = np.array(
        [(a.start, a.extent, a.size, a.source_stride, a.destination_stride) for a in axes], np.int64
    ).tobytes()
    source, destination = (
        replace(info, pointer=address)
        for info, address in zip(arrays, (window.source, window.destination), strict=True)
    )
    elements = prod(axis.extent for axis in axes)
    spec = PlainSpec(width, len(axes), 32 if elements < 1 << 31 else 64)
    ctas = min(place.ctas * _PLAIN_BLOCKS, -(-elements // spec.threads))
    return Launch(PLAIN, spec, ctas, (source, destination, packed, elements, fill), arrays)
