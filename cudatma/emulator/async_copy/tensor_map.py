"""Execute tensormap.replace and tensormap.cp_fenceproxy, which edit the 128 bytes of a tensor map on the device.

Source: PTX ISA, "tensormap.replace" (fields, ordinals and the numbering of their values), "tensormap.cp_fenceproxy".
"""

from __future__ import annotations

import sys

import numpy as np

from cudatma.emulator.async_copy import bulk
from cudatma.emulator.machine import access
from cudatma.emulator.machine.events import never
from cudatma.emulator.machine.memory import SHARED_WINDOW
from cudatma.emulator.machine.state import Warp
from cudatma.emulator.ptx.types import Array, active_lanes
from cudatma.emulator.ptx.writer import RUNTIME

MAP_BYTES = 128
#: Maps each field to (first bit, number of bits, value to subtract, number of bits from one ordinal to the next).
_FIELDS: dict[str, tuple[int, int, int, int]] = {
    "global_address": (0, 64, 0, 0),
    "rank": (68, 3, 0, 0),
    "box_dim": (440, 8, 1, 8),
    "global_dim": (256, 32, 1, 32),
    "element_stride": (416, 3, 1, 3),
    "interleave_layout": (75, 2, 0, 0),
    "swizzle_mode": (77, 2, 0, 0),
    "fill_mode": (79, 1, 0, 0),
    "swizzle_atomicity": (83, 2, 0, 0),
}


def _set(value: int, first: int, bits: int, new: int) -> int:
    mask = ((1 << bits) - 1) << first
    return (value & ~mask) | ((new << first) & mask)


def edit(raw: bytes, field: str, ordinal: int, new: int) -> bytes:
    """Return the 128 bytes with a field replaced by a value in PTX's numbering."""
    value = int.from_bytes(raw, "little")
    if field == "global_stride":
        value = _set(value, 96 + 32 * ordinal, 32, new >> 4)
        value = _set(value, 224 + 4 * ordinal, 4, new >> 36)
    elif field == "elemtype":
        # In PTX, 11 and 12 mean tf32, which the tensor map encodes as f32 with bit 80 set. Packed types start at 13.
        # Other types do not change bit 80 (measured).
        value = _set(value, 80, 1, 1) if new in (11, 12) else value
        value = _set(value, 71, 4, new if new < 11 else new - 4 if new < 13 else new - 2)
    else:
        first, bits, minus, step = _FIELDS[field]
        value = _set(value, first + step * ordinal, bits, new - minus)
    return value.to_bytes(MAP_BYTES, "little")


def _check_value(w: Warp, at: int, field: str, new: int) -> None:
    """Report a value that does not fit in the field. The hardware inserts only the low bits of such a value."""
    if field == "global_stride":
        fits, allowed = new % 16 == 0 and new < 1 << 40, "multiples of 16 below 2^40"
    elif field in _FIELDS:
        _, bits, low, _ = _FIELDS[field]
        fits, allowed = low <= new < low + (1 << bits), f"{low} to {low + (1 << bits) - 1}"
    else:
        return
    if not fits:
        w.events.violation("out_of_bounds", w, at, f"the {field} of tensormap.replace must be {allowed}, got {new}")


def _place(w: Warp, at: int, address: int, is_shared: bool) -> Array:
    if is_shared:
        block, offset = bulk.shared_run(w, at, address, MAP_BYTES, "tensor map")
        data: Array = block.shared.data[offset : offset + MAP_BYTES]
        return data
    region, offset = bulk.global_run(w, at, address, MAP_BYTES)
    return region.data[offset : offset + MAP_BYTES]


def _notify_edit(w: Warp, at: int, address: int, is_shared: bool, together: bool) -> None:
    """Notify observers of a tensor map edit. ``together`` is true if several lanes edit the map at once."""
    if is_shared:
        block, offset = bulk.shared_run(w, at, address, MAP_BYTES, "tensor map")
        w.events.shared_write(w, at, block, np.array([offset]), MAP_BYTES, "", together, never)
        return
    region = w.launch.memory.find(address)
    if region is not None:
        w.events.map_edited(w, at, region, address - region.base, together)


def replace(
    w: Warp,
    at: int,
    addresses: Array,
    space: str,
    field: str,
    ordinal: int | None,
    value: Array,
    mask: Array | None,
) -> None:
    """Execute tensormap.replace.tile.FIELD. ``space`` is "shared", "global", or "" for generic addresses."""
    if field not in _FIELDS and field not in ("global_stride", "elemtype"):
        access.trap(w, at, f"tensormap.replace does not support the field `{field}`")
    lanes = active_lanes(mask)
    for lane in lanes:
        address = int(addresses[lane])
        is_shared = space == "shared"
        if not space and address & SHARED_WINDOW:
            address, is_shared = address - SHARED_WINDOW, True
        place = _place(w, at, address, is_shared)
        _check_value(w, at, field, int(value[lane]))
        _notify_edit(w, at, address, is_shared, len(lanes) > 1)
        new = edit(place.tobytes(), field, ordinal or 0, int(value[lane]))
        place[:] = bytearray(new)


def copy_fence(w: Warp, at: int, to: Array, source: Array, mask: Array | None) -> None:
    """Execute tensormap.cp_fenceproxy, which copies a tensor map from shared to global memory and releases it.

    Each lane copies four bytes at its own addresses, like the code that ptxas generates.
    """
    w.meetings += 1
    lanes = active_lanes(mask)
    pairs = list(dict.fromkeys((int(to[lane]), int(source[lane])) for lane in lanes))
    for address in (address for pair in pairs for address in pair):
        if address % MAP_BYTES:
            access.trap(
                w, at, f"the address of tensormap.cp_fenceproxy must be {MAP_BYTES}-byte aligned, got {address:#x}"
            )
    for _, address in pairs:
        block, inside = bulk.shared_run(w, at, address, MAP_BYTES, "tensor map")
        w.events.shared_read(w, at, block, np.array([inside]), MAP_BYTES, "", True)
    maps = {pair: _place(w, at, pair[1], True).copy() for pair in pairs}
    places = {pair: _place(w, at, pair[0], False) for pair in pairs}
    for address, _ in pairs:
        _notify_edit(w, at, address, False, True)
    for lane in lanes:
        pair, word = (int(to[lane]), int(source[lane])), slice(4 * lane, 4 * lane + 4)
        places[pair][word] = maps[pair][word]


RUNTIME["tensor_map"] = sys.modules[__name__]
