"""Execute cp.async.bulk.tensor and cp.reduce.async.bulk.tensor: loads, stores and reductions of tensor boxes.

Source: PTX ISA, "cp.async.bulk.tensor", "cp.reduce.async.bulk.tensor", "cp.async.bulk.prefetch.tensor".
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from cudatma.descriptor.spec import TiledSpec
from cudatma.emulator.async_copy import bulk, groups, tensor_values
from cudatma.emulator.async_copy.mbarrier import find
from cudatma.emulator.async_copy.tensor_box import (
    CHUNK,
    FOUR_ROWS,
    Box,
    BoxError,
    MapSpec,
    check_load,
    check_store,
    gather_box,
    im2col_box,
    read_map,
    tiled_box,
)
from cudatma.emulator.machine import access
from cudatma.emulator.machine.events import Copy
from cudatma.emulator.machine.memory import RANK_SHIFT, Region
from cudatma.emulator.machine.state import Warp
from cudatma.emulator.ptx.types import Array
from cudatma.emulator.ptx.writer import RUNTIME

LOW = (1 << RANK_SHIFT) - 1
_SMEM_ALIGNMENT = 128
_NOTHING = np.zeros(0, np.uint8)


def _map_at(w: Warp, at: int, address: int) -> MapSpec:
    """Return the spec of the tensor map at a generic address."""
    region = w.launch.memory.find(address)
    if region is None:
        check_map_place(w, at, address)
    if address % 64:
        access.trap(w, at, f"a tensor map must be 64-byte aligned, got address {address:#x}")
    if region is None or address + 128 > region.end:
        access.outside(w, at, address, 128)
    raw = region.data[address - region.base : address - region.base + 128].tobytes()
    cache = w.launch.decoded_maps
    spec = cache.get(raw)
    if spec is None:
        try:
            spec = cache[raw] = read_map(raw, w.launch.setup.extra.get("target"))
        except BoxError as error:
            access.trap(w, at, str(error), error.error)
    w.events.map_read(w, at, region, address - region.base)
    return spec


def check_map_place(w: Warp, at: int, address: int) -> None:
    """Trap if the tensor map is in memory from which TMA cannot read it."""
    memory = access.memory_of(w, address) if address >> 60 else ""
    if not memory and access.is_shared_offset(w, address):
        memory = "shared memory, or is a parameter whose address was not converted with cvta.param"
    if memory:
        message = (
            f"tensor map at {address:#x} is in {memory}; TMA reads tensor maps only from kernel parameters, constant "
            "or global memory. Declare the parameter as `const __grid_constant__ CUtensorMap`; otherwise, the "
            "compiler copies the parameter to local memory if the kernel takes its address"
        )
        access.trap(w, at, message, "ILLEGAL_ADDRESS")


def _box(w: Warp, at: int, spec: MapSpec, coords: Sequence[int], offsets: Sequence[int], to: int, mode: str) -> Box:
    """Validate a copy and return the layout of its box."""
    if (to & LOW) % _SMEM_ALIGNMENT:
        message = f"the shared address of a tensor copy must be {_SMEM_ALIGNMENT}-byte aligned, got {to & LOW:#x}"
        access.trap(w, at, message, "MISALIGNED_ADDRESS")
    if isinstance(spec, TiledSpec):
        if mode in FOUR_ROWS:
            return gather_box(spec, coords, to & LOW)
        return tiled_box(spec, coords, to & LOW)
    return im2col_box(spec, coords, offsets, to & LOW)


def _region(w: Warp, at: int, box: Box) -> Region | None:
    """Return the memory that contains the elements of a box, or None if the box is outside the tensor.

    Trap if the elements are not in mapped memory.
    """
    if not box.valid.any():
        return None
    inside, spec = box.valid > 0, box.spec
    region = w.launch.memory.find(spec.address)
    low = spec.address + int(box.gmem[inside].min())
    high = spec.address + int((box.gmem + box.valid)[inside].max())
    if region is None or low < region.base or high > region.end:
        access.outside(w, at, high - 1 if region is not None and low >= region.base else low, 1)
    return region


def _smem_offsets(w: Warp, at: int, box: Box, block: Any) -> Array:
    """Return the offsets of the box's chunks in the CTA's shared memory. Trap if any chunk is outside."""
    offsets = box.smem - (block.shared_base & LOW)
    past = int(offsets.max()) + CHUNK - block.shared.size
    if past > 0:
        size, first = box.smem.size * CHUNK, int(box.smem.min())
        message = f"a tensor box of {size} bytes at {first:#x} ends {past} bytes past the block's shared memory"
        w.events.violation("out_of_bounds", w, at, message)
        access.trap(w, at, message, "ILLEGAL_ADDRESS")
    result: Array = offsets
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
    lane: int = 0,
) -> None:
    """Load a box from global to shared memory. The mbarrier of each destination counts the bytes of the box."""
    spec = _map_at(w, at, map_address)
    try:
        check_load(spec, coords, mode)
    except BoxError as error:
        access.trap(w, at, str(error), error.error)
    box = _box(w, at, spec, coords, offsets, to, mode)
    region = _region(w, at, box)
    group = groups.queue(w, lane).open
    for address, barrier_address in bulk.targets_of(w, at, to, bar, multicast):
        block, offset = bulk.shared_run(w, at, address, 16, "destination")
        chunks = _smem_offsets(w, at, box, block)
        barrier = find(w, at, barrier_address, "cp.async.bulk.tensor")
        copy = Copy(w, at, "cp.async.bulk.tensor", block, chunks, CHUNK, barrier)
        copy.box, copy.destination, copy.map_address = box, offset, map_address
        w.events.copy_issued(copy)
        w.events.tensor_source(copy, region, group)

        def complete(copy: Copy = copy) -> None:
            words = tensor_values.loaded_words(box, *_origin(region, spec))
            tensor_values.shared_chunks(copy.block.shared.data)[copy.offsets // CHUNK] = words
            w.events.copy_landed(copy)
            copy.barrier.complete_tx(box.expected_bytes)

        w.launch.scheduler.submit(complete)


def store(
    w: Warp, at: int, lane: int, map_address: int, coords: Sequence[int], source: int, operation: str, mode: str
) -> None:
    """Store or reduce a box from shared to global memory as part of the thread's bulk group."""
    spec = _map_at(w, at, map_address)
    try:
        check_store(spec, coords, mode, operation)
    except BoxError as error:
        access.trap(w, at, str(error), error.error)
    box = _box(w, at, spec, coords, (), source, mode)
    mask = tensor_values.written_chunks(box)
    block, _ = bulk.shared_run(w, at, source, 16, "source")
    offsets = _smem_offsets(w, at, box, block)

    def read() -> Array:
        words: Array = tensor_values.shared_chunks(block.shared.data)[offsets // CHUNK]
        return words

    def write(words: Array) -> None:
        if not mask.any():
            return
        region = _store_region(w, at, box, mask)
        if not region.is_writable:
            access.trap(w, at, f"a tensor store must not write {region.name}, which is read-only")
        places = box.gmem[mask] + (spec.address - region.base)
        if operation:
            tensor_values.reduce(region.data, places, words[mask], spec, operation)
        else:
            tensor_values.write(region.data, places, words[mask], box.unit_bytes)

    group = groups.queue(w, lane).open
    is_repeat = not operation and not bulk.is_first(w, (at, map_address, *coords, source))
    w.events.tensor_target(w, at, box, mask, operation, group, is_repeat)
    chunks = offsets.reshape(-1)
    w.events.box_stored(w, at, block, chunks, box, map_address, group)
    # Elements outside the tensor are not stored, so the corresponding bytes in shared memory may be unwritten.
    used = chunks[mask.reshape(-1)] if mask.any() else chunks
    bulk.store_later(w, at, block, used, read, write, group)


def _store_region(w: Warp, at: int, box: Box, mask: Array) -> Region:
    """Return the memory that a store writes.

    The hardware clips in units of 16 bytes, so a store can write past the end of the array. The emulator reports this
    case.
    """
    spec, written = box.spec, box.gmem[mask]
    region = w.launch.memory.find(spec.address)
    if region is None:
        access.outside(w, at, spec.address, CHUNK)
    low, high = spec.address + int(written.min()), spec.address + int(written.max()) + CHUNK
    past = high - region.end
    if low < region.base or past >= CHUNK:
        access.outside(w, at, low if low < region.base else high - CHUNK, CHUNK)
    if past > 0:
        message = (
            f"a tensor store overwrites {past} bytes past the end of {region.name}, because "
            "a store clips the innermost dimension at a multiple of 16 bytes"
        )
        w.events.violation("out_of_bounds", w, at, message)
    return region


def _origin(region: Region | None, spec: MapSpec) -> tuple[Array, int]:
    """Return the bytes that contain the tensor (none if the box is outside), and the offset of the tensor in them."""
    return (_NOTHING, 0) if region is None else (region.data, spec.address - region.base)


def prefetch(w: Warp, at: int, map_address: int, coords: Sequence[int], offsets: Sequence[int], mode: str) -> None:
    """Execute cp.async.bulk.prefetch.tensor, whose only effect is to trap if the map or a coordinate is invalid."""
    try:
        check_load(_map_at(w, at, map_address), coords, mode)
    except BoxError as error:
        access.trap(w, at, str(error), error.error)


RUNTIME["tensor"] = sys.modules[__name__]
