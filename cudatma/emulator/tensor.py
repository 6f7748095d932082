"""cp.async.bulk.tensor and cp.reduce.async.bulk.tensor: loads, stores and reductions through tensor maps.

Source: PTX ISA, "cp.async.bulk.tensor", "cp.reduce.async.bulk.tensor", "cp.async.bulk.prefetch.tensor".
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from cudatma.descriptor.spec import Im2colSpec, TiledSpec
from cudatma.emulator import access, atomics, bulk, groups
from cudatma.emulator.machine import Warp
from cudatma.emulator.mbarrier import find
from cudatma.emulator.memory import RANK_SHIFT, Region
from cudatma.emulator.tensor_box import (
    Box,
    BoxError,
    convert_on_load,
    fill_bits,
    im2col_box,
    read_map,
    store_mask,
    tiled_box,
)
from cudatma.emulator.types import NUMPY, Array
from cudatma.emulator.writer import RUNTIME
from cudatma.layout import Swizzle

LOW = (1 << RANK_SHIFT) - 1
_SMEM_ALIGNMENT = 128
#: Types that tensor reductions work on. Source: PTX ISA; measured: and, or, xor trap on int64, min and max on uint16.
_ADD = ("uint32", "int32", "uint64", "float32", "float32_ftz", "float16", "bfloat16")
_ORDERED = ("uint32", "int32", "uint64", "int64", "float16", "bfloat16")
_BITS = ("uint32", "int32", "uint64")
REDUCE_TYPES: dict[str, tuple[str, ...]] = {
    "add": _ADD,
    "min": _ORDERED,
    "max": _ORDERED,
    "inc": ("uint32",),
    "dec": ("uint32",),
    "and": _BITS,
    "or": _BITS,
    "xor": _BITS,
}
_NUMPY_OF: dict[str, Any] = {"float32_ftz": np.float32, "bfloat16": ml_dtypes.bfloat16}


def _map_at(w: Warp, at: int, address: int) -> TiledSpec | Im2colSpec:
    """The tensor map at a generic address."""
    if address % 64:
        access.trap(w, at, f"a tensor map at {address:#x}: 64-byte alignment is needed")
    if address >> 60 == 1:
        block, offset = bulk.shared_run(w, at, address, 128, "tensor map")
        data: Array = block.shared.data[offset : offset + 128]
    else:
        region = w.launch.memory.find(address)
        if region is None or address + 128 > region.end:
            access.outside(w, at, address, 128)
        data = region.data[address - region.base : address - region.base + 128]
    raw = data.tobytes()
    cache = w.launch.decoded_maps
    spec = cache.get(raw)
    if spec is None:
        try:
            spec = cache[raw] = read_map(raw).spec
        except BoxError as error:
            access.trap(w, at, str(error))
    observer = w.block.cluster.observer
    if observer is not None:
        observer.tensor_map_read(w, at, address)
    return spec


def _box(
    w: Warp, at: int, spec: TiledSpec | Im2colSpec, coords: Sequence[int], offsets: Sequence[int], to: int, mode: str
) -> Box:
    """Lay out the copy or trap."""
    if len(coords) != spec.rank:
        access.trap(w, at, f"{len(coords)} coordinates for a tensor map of rank {spec.rank}")
    if (to & LOW) % _SMEM_ALIGNMENT:
        access.trap(w, at, f"shared address {to & LOW:#x} of a tensor copy: 128-byte alignment is needed")
    try:
        if isinstance(spec, TiledSpec):
            if mode != "tile":
                raise BoxError(f"a tiled tensor map in mode .{mode}")
            return tiled_box(spec, coords, to & LOW)
        if not mode.startswith("im2col"):
            raise BoxError("an im2col tensor map in tile mode")
        return im2col_box(spec, coords, offsets, to & LOW)
    except BoxError as error:
        access.trap(w, at, str(error))


def _raw(size: int) -> np.dtype[Any]:
    return NUMPY[f"u{8 * size}"]


def _global(w: Warp, at: int, spec: TiledSpec | Im2colSpec, offsets: Array) -> tuple[Region, Array]:
    """(region, element indices from the region's start) of offsets from the tensor's base; traps outside of memory."""
    size = spec.dtype.element_bytes
    region = w.launch.memory.find(spec.address)
    low = spec.address + int(offsets.min())
    high = spec.address + int(offsets.max()) + size
    if region is None or low < region.base or high > region.end:
        access.outside(w, at, high - size if region is not None and low >= region.base else low, size)
    return region, offsets + (spec.address - region.base)


def _read_global(w: Warp, at: int, box: Box) -> Array:
    """(rows, n) raw elements: what a load delivers."""
    spec, size = box.spec, box.element_bytes
    result = np.full(box.gmem.shape, fill_bits(spec), _raw(size))
    inside = box.inside
    if inside.any():
        region, offsets = _global(w, at, spec, box.gmem[inside])
        result[inside] = convert_on_load(spec, _gather(region, offsets, size))
    return result


def _gather(region: Region, offsets: Array, size: int) -> Array:
    if int(offsets[0]) % size == 0:
        result: Array = region.view(f"u{8 * size}")[offsets // size]
        return result
    return np.ascontiguousarray(region.data[offsets[:, None] + np.arange(size)]).view(_raw(size))[:, 0]


def _scatter(region: Region, offsets: Array, size: int, values: Array) -> None:
    if int(offsets[0]) % size == 0:
        region.view(f"u{8 * size}")[offsets // size] = values
    else:
        region.data[offsets[:, None] + np.arange(size)] = values.view(np.uint8).reshape(-1, size)


def _smem_index(w: Warp, at: int, box: Box, block: Any) -> Array:
    """Element indices into the block's shared memory; a footprint that leaves it traps."""
    base = block.shared_base & LOW
    offsets = box.smem - base
    if int(box.chunks.max()) + 16 - base > block.shared.size:
        message = (
            f"a tensor box of {box.chunks.size * 16} bytes at {int(box.chunks.min()):#x} ends "
            f"{int(box.chunks.max()) + 16 - base - block.shared.size} bytes past the block's shared memory"
        )
        observer = w.block.cluster.observer
        if observer is not None:
            observer.report("out_of_bounds", w, at, message)
        access.trap(w, at, message)
    result: Array = offsets // box.element_bytes
    return result


def load(
    w: Warp,
    at: int,
    map_address: int,
    coords: Sequence[int],
    offsets: Sequence[int],
    to: int,
    bar: int,
    multicast: int | None,
    mode: str,
) -> None:
    """Global to shared memory; each destination's barrier gets the box's own bytes."""
    spec = _map_at(w, at, map_address)
    to, bar = bulk.strip(to), bulk.strip(bar)
    box = _box(w, at, spec, coords, offsets, to, mode)
    if box.inside.any():
        _global(w, at, spec, box.gmem[box.inside])
    observer = w.block.cluster.observer
    trace = w.launch.trace
    for address, barrier_address in bulk.targets_of(w, at, to, bar, multicast):
        block, _ = bulk.shared_run(w, at, address, 16, "destination")
        index = _smem_index(w, at, box, block)
        barrier = find(w, at, barrier_address, "cp.async.bulk.tensor")
        written = None
        if observer is not None:
            chunks = box.chunks - (block.shared_base & LOW)
            written = observer.async_write(w, at, block, chunks.reshape(-1), 16, "cp.async.bulk.tensor", barrier)
            observer.swizzled(block, chunks, spec.swizzle, address & LOW)
        mark = trace.copy_begins(w, at, block, box.expected_bytes) if trace is not None else None

        def complete(
            block: Any = block, index: Array = index, barrier: Any = barrier, written: Any = written, mark: Any = mark
        ) -> None:
            block.shared.view(f"u{8 * box.element_bytes}")[index] = _read_global(w, at, box)
            if observer is not None:
                observer.async_written(written, barrier, None)
            if mark is not None:
                trace.copy_ends(mark)
            barrier.complete_tx(box.expected_bytes)

        w.launch.scheduler.submit(complete)


def store(
    w: Warp, at: int, lane: int, map_address: int, coords: Sequence[int], source: int, operation: str, mode: str
) -> None:
    """Shared to global memory, plain or with a reduction, in the thread's bulk group."""
    spec = _map_at(w, at, map_address)
    source = bulk.strip(source)
    box = _box(w, at, spec, coords, (), source, mode)
    if operation and spec.dtype.name not in REDUCE_TYPES[operation]:
        access.trap(w, at, f"reduction .{operation} on a tensor map of {spec.dtype.name}")
    if spec.swizzle is Swizzle.B128_ATOM_32B_FLIP_8B:
        access.trap(w, at, "a store through a 128B_ATOM_32B_FLIP_8B map")
    try:
        mask = store_mask(box, coords)
    except BoxError as error:
        access.trap(w, at, str(error))
    block, _ = bulk.shared_run(w, at, source, 16, "source")
    index = _smem_index(w, at, box, block)
    size = box.element_bytes

    def read() -> Array:
        found: Array = block.shared.view(f"u{8 * size}")[index]
        return found

    def write(values: Array) -> None:
        if not mask.any():
            return
        offsets, kept = box.gmem[mask], values[mask]
        region, offsets, kept = _clipped(w, at, spec, offsets, kept)
        if not region.is_writable:
            access.trap(w, at, f"a tensor store into {region.name}, which is read-only")
        if operation:
            _reduce(region, offsets, kept, spec, operation)
        else:
            _scatter(region, offsets, size, kept)

    group = groups.queue(w, "bulk", lane).open
    chunks = (box.chunks - (block.shared_base & LOW)).reshape(-1)
    bulk.store_later(w, at, lane, block, chunks, read, write, group)


def _clipped(
    w: Warp, at: int, spec: TiledSpec | Im2colSpec, offsets: Array, values: Array
) -> tuple[Region, Array, Array]:
    """Drop what 16-byte clipping writes past the last byte of the array, after a report: it is not the array's."""
    region = w.launch.memory.find(spec.address)
    if region is None:
        access.outside(w, at, spec.address, 16)
    moved = offsets + (spec.address - region.base)
    size = spec.dtype.element_bytes
    outside = (moved < 0) | (moved + size > region.size)
    if outside.any():
        past = int(moved.max()) + size - region.size
        observer = w.block.cluster.observer
        if past >= 16 or int(moved.min()) < 0:
            access.outside(w, at, region.base + int(moved[outside][0]), size)
        if observer is not None:
            observer.report(
                "out_of_bounds",
                w,
                at,
                f"a tensor store overwrites {past} bytes past the end of {region.name}: "
                "stores clip at 16 bytes in the innermost dimension",
            )
        return region, moved[~outside], values[~outside]
    return region, moved, values


def _reduce(region: Region, offsets: Array, values: Array, spec: TiledSpec | Im2colSpec, operation: str) -> None:
    """Reduce into global memory; places that a stride of 0 makes coincide are reduced one after the other."""
    size = spec.dtype.element_bytes
    dtype = np.dtype(_NUMPY_OF.get(spec.dtype.name) or spec.dtype.numpy)
    while len(offsets):
        _, first = np.unique(offsets, return_index=True)
        here = offsets[first]
        old = _gather(region, here, size)
        new = atomics.apply(operation, old.view(dtype), np.ascontiguousarray(values[first]).view(dtype))
        _scatter(region, here, size, new.view(_raw(size)))
        rest = np.ones(len(offsets), bool)
        rest[first] = False
        offsets, values = offsets[rest], values[rest]


def prefetch(w: Warp, at: int, map_address: int, coords: Sequence[int], offsets: Sequence[int], mode: str) -> None:
    """cp.async.bulk.prefetch.tensor: nothing moves, but a bad map or coordinate traps as in a load."""
    _box(w, at, _map_at(w, at, map_address), coords, offsets, 0, mode)


RUNTIME["tensor"] = sys.modules[__name__]
