"""tensormap.replace and tensormap.cp_fenceproxy: editing the 128 bytes on the device.

Source: PTX ISA, "tensormap.replace" (fields, ordinals and the numbering of their values), "tensormap.cp_fenceproxy".
"""

from __future__ import annotations

import sys

from cudatma.emulator import access, bulk, groups
from cudatma.emulator.machine import Warp
from cudatma.emulator.types import Array
from cudatma.emulator.writer import RUNTIME

MAP_BYTES = 128
#: Field -> (first bit, bits, what is subtracted, right shift, bits from one ordinal to the next).
_FIELDS: dict[str, tuple[int, int, int, int, int]] = {
    "global_address": (0, 64, 0, 0, 0),
    "rank": (68, 3, 0, 0, 0),
    "box_dim": (440, 8, 1, 0, 8),
    "global_dim": (256, 32, 1, 0, 32),
    "element_stride": (416, 3, 1, 0, 3),
    "interleave_layout": (75, 2, 0, 0, 0),
    "swizzle_mode": (77, 2, 0, 0, 0),
    "fill_mode": (79, 1, 0, 0, 0),
    "swizzle_atomicity": (83, 2, 0, 0, 0),
}


def _set(value: int, first: int, bits: int, new: int) -> int:
    mask = ((1 << bits) - 1) << first
    return (value & ~mask) | ((new << first) & mask)


def edit(raw: bytes, field: str, ordinal: int, new: int) -> bytes:
    """The 128 bytes with one field replaced by a value in PTX's numbering."""
    value = int.from_bytes(raw, "little")
    if field == "global_stride":
        value = _set(value, 96 + 32 * ordinal, 32, new >> 4)
        value = _set(value, 224 + 4 * ordinal, 4, new >> 36)
    elif field == "elemtype":
        # PTX numbers tf32 11; the descriptor says f32 and sets bit 80. 13 and up are the packed types.
        value = _set(value, 80, 1, int(new == 11))
        value = _set(value, 71, 4, 7 if new == 11 else (new - 2 if new > 12 else new))
    else:
        first, bits, minus, shift, step = _FIELDS[field]
        value = _set(value, first + step * ordinal, bits, (new - minus) >> shift)
    return value.to_bytes(MAP_BYTES, "little")


def _place(w: Warp, at: int, address: int) -> Array:
    if address >> 60 == 1 or address < 1 << 32:
        block, offset = bulk.shared_run(w, at, address, MAP_BYTES, "tensor map")
        found: Array = block.shared.data[offset : offset + MAP_BYTES]
        return found
    region, offset = bulk.global_run(w, at, address, MAP_BYTES)
    return region.data[offset : offset + MAP_BYTES]


def replace(
    w: Warp, at: int, addresses: Array, field: str, ordinal: int | None, value: Array, mask: Array | None
) -> None:
    """tensormap.replace.tile.FIELD."""
    if field not in _FIELDS and field not in ("global_stride", "elemtype"):
        access.trap(w, at, f"tensormap.replace of `{field}`")
    for lane in groups.lanes(mask):
        place = _place(w, at, int(addresses[lane]))
        new = edit(place.tobytes(), field, ordinal or 0, int(value[lane]))
        place[:] = bytearray(new)
        observer = w.block.cluster.observer
        if observer is not None:
            observer.tensor_map_written(w, at, int(addresses[lane]))


def copy_fence(w: Warp, at: int, to: Array, source: Array, mask: Array | None) -> None:
    """tensormap.cp_fenceproxy: a warp copies 128 bytes from shared to global memory and releases them."""
    lane = groups.lanes(mask)[0]
    data = _place(w, at, int(source[lane])).copy()
    region, offset = bulk.global_run(w, at, int(to[lane]), MAP_BYTES)
    region.data[offset : offset + MAP_BYTES] = data
    observer = w.block.cluster.observer
    if observer is not None:
        observer.tensor_map_released(w, at, int(to[lane]))


RUNTIME["tensor_map"] = sys.modules[__name__]
