"""Loads and stores of warps, including alignment checks, bounds checks and events for observers.

Functions take the warp, the instruction's index in the body, the lane addresses, and the active mask (None selects all
lanes). Source: PTX ISA, "ld", "st", "Generic Addressing".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import numpy as np

from cudatma.emulator.errors import TrapError
from cudatma.emulator.machine.memory import LOCAL_WINDOW, RANK_SHIFT, SHARED_START, SHARED_WINDOW, Region
from cudatma.emulator.machine.state import Warp
from cudatma.emulator.ptx.types import BYTES, LANES, NUMPY, Array
from cudatma.emulator.ptx.writer import runtime
from cudatma.errors import counted

_union = np.bitwise_or.reduce
#: Allowed operand of an instruction with .shared, for messages.
SHARED_OPERAND = "an address of the .shared state space, from cvta.to.shared (__cvta_generic_to_shared)"


def trap(w: Warp, at: int, message: str, error: str = "ILLEGAL_INSTRUCTION") -> NoReturn:
    """Raise a TrapError with the CUresult that a GPU would report.

    The launch adds the instruction, the source line, the CTA and the warp to the message.
    """
    raise TrapError(message, error, at)


def lanes_of(addresses: Array, mask: Array | None) -> Array:
    return addresses if mask is None else addresses[mask]


def spread(values: Array, mask: Array | None) -> Array:
    """Expand values of shape (count, active lanes) to (count, 32)."""
    if mask is None:
        return values
    out = np.zeros((values.shape[0], LANES), values.dtype)
    out[:, mask] = values
    return out


def check_aligned(w: Warp, at: int, addresses: Array, size: int) -> None:
    if int(_union(addresses)) & (size - 1):
        bad = int(addresses[(addresses & (size - 1)) != 0][0])
        trap(w, at, f"the address {bad:#x} of an access of {size} bytes is misaligned", "MISALIGNED_ADDRESS")


def active_of(values: tuple[Array, ...], mask: Array | None) -> tuple[Array, ...]:
    """Return the values of the active lanes in each vector."""
    return values if mask is None else tuple(value[mask] for value in values)


# ---- global


def global_region(w: Warp, at: int, addresses: Array, size: int) -> Region | None:
    """Return the region that contains the accesses of all lanes, or None if they are in several regions."""
    memory = w.launch.memory
    region = memory.recent.get(at)
    if region is not None and region.inside(addresses, size) is not None:
        return region
    low, high = int(addresses.min()), int(addresses.max()) + size
    region = memory.find(low)
    if region is None:
        outside(w, at, low, size)
    if high > region.end:
        return None
    memory.recent[at] = region
    return region


def _place(w: Warp, at: int, addresses: Array, size: int) -> tuple[Region, Array] | None:
    """Return the region and byte offsets of all lanes, or None if the lanes access several regions."""
    region = w.launch.memory.recent.get(at)
    offsets = region.inside(addresses, size) if region is not None else None
    if region is not None and offsets is not None:
        return region, offsets
    check_aligned(w, at, addresses, size)
    region = global_region(w, at, addresses, size)
    return None if region is None else (region, _offsets(region, addresses))


def _offsets(region: Region, addresses: Array) -> Array:
    result: Array = (addresses - region.base_word[: addresses.size]).view(np.int64)
    return result


def memory_of(w: Warp, address: int) -> str:
    """Return the name of the memory that contains a generic address, or "" if the address is not mapped."""
    window = address >> 60
    if window:
        return {SHARED_WINDOW >> 60: "shared memory", LOCAL_WINDOW >> 60: "local memory"}.get(window, "")
    region = w.launch.memory.find(address)
    return "" if region is None else f"global memory ({region.name})"


def is_shared_offset(w: Warp, address: int) -> bool:
    """Return whether an address in the .shared state space is inside the cluster's shared memory."""
    return any(0 <= address - block.shared_base < block.shared.size for block in w.block.cluster.blocks)


def check_window(w: Warp, at: int, address: int, allowed: str) -> None:
    """Trap if an address is in memory that the instruction cannot access. ``allowed`` is text for the message."""
    memory = memory_of(w, address)
    if memory:
        trap(
            w, at, f"the operand must be {allowed}, got {address:#x}, a generic address of {memory}", "ILLEGAL_ADDRESS"
        )


def as_shared(w: Warp, at: int, address: int) -> int:
    """Return the address of a shared-memory operand in the .shared state space.

    Hardware uses only the low half of a generic address, which for shared memory is the address in the .shared state
    space. PTX does not guarantee this behavior, so the emulator warns. A generic address of any other memory causes a
    trap.
    """
    if address >> 60 == SHARED_WINDOW >> 60:
        message = f"the operand must be {SHARED_OPERAND}, got {address:#x}, a generic address of shared memory"
        w.events.warning("out_of_bounds", w, at, message)
        return address - SHARED_WINDOW
    check_window(w, at, address, SHARED_OPERAND)
    return address


@runtime
def from_generic(addresses: Array) -> Array:
    """Convert generic addresses of shared memory to the .shared state space. Other addresses are unchanged."""
    is_shared = addresses >> np.uint64(60) == SHARED_WINDOW >> 60
    return addresses - is_shared * np.uint64(SHARED_WINDOW) if is_shared.any() else addresses


def outside(w: Warp, at: int, address: int, size: int) -> NoReturn:
    """Trap because of an access to unmapped bytes."""
    if address >> 60:
        check_window(w, at, address, "an address of global memory")
    message = f"access of {counted(size, 'byte')} at {address:#x}, {w.launch.memory.nearest(address)}"
    if is_shared_offset(w, address):
        message += (
            "; the address is valid in the .shared state space, so convert it to a generic address with cvta.shared "
            "or use an instruction with .shared"
        )
    w.events.violation("out_of_bounds", w, at, message)
    trap(w, at, message, "ILLEGAL_ADDRESS")


def regions_of(w: Warp, at: int, addresses: Array, size: int) -> list[tuple[Region, Array]]:
    """Divide lanes whose addresses are in several regions, and return (region, lane indices) pairs."""
    parts: dict[int, tuple[Region, list[int]]] = {}
    for lane, address in enumerate(addresses.tolist()):
        region = w.launch.memory.find(address)
        if region is None or address + size > region.end:
            outside(w, at, address, size)
        parts.setdefault(region.base, (region, []))[1].append(lane)
    return [(region, np.array(lanes)) for region, lanes in parts.values()]


@runtime
def ld_global(w: Warp, at: int, addresses: Array, code: str, count: int, mask: Array | None, order: str = "") -> Array:
    """Load (count, 32) elements from global, constant or kernel parameter memory."""
    active = lanes_of(addresses, mask)
    size = BYTES[code] * count
    place = _place(w, at, active, size)
    if place is not None:
        region, offsets = place
        w.events.global_read(w, at, region, offsets, size, order)
        elements = _gather(region, offsets, code, count)
        if order:
            yield_if_unchanged(w, at, elements, order, int(active[0]))
        return spread(elements, mask)
    values = np.zeros((count, len(active)), NUMPY[code])
    for part, lanes in regions_of(w, at, active, size):
        offsets = _offsets(part, active[lanes])
        w.events.global_read(w, at, part, offsets, size, order)
        values[:, lanes] = _gather(part, offsets, code, count)
    return spread(values, mask)


@dataclass(slots=True)
class FlagWait:
    """Wait of a split that polls a flag in memory."""

    at: int
    value: int
    place: str
    may_time_out: bool = False

    def describe(self) -> str:
        value = self.value if self.value < 1000 else hex(self.value)
        return f"polls {self.place}, whose value remains {value}"


def yield_if_unchanged(w: Warp, at: int, elements: Array, order: str, address: int) -> None:
    """Yield to other splits if a strong load or atomic operation repeatedly reads the same values.

    ``address`` is the generic address of the first element.
    """
    observed = at, elements.tobytes()
    if observed != w.last_read:
        w.last_read = observed
        if order != "nc":
            w.launch.scheduler.synchronized()
    elif order != "nc":
        value = int(elements.view(NUMPY[f"u{8 * elements.itemsize}"]).flat[0])
        w.launch.scheduler.spin(w.split, FlagWait(at, value, _flag_name(w, address)))


def _flag_name(w: Warp, address: int) -> str:
    if address >> 60:
        return f"shared address {address - SHARED_WINDOW:#x}"
    region = w.launch.memory.find(address)
    return f"byte {address - region.base} of {region.name}" if region is not None else f"address {address:#x}"


def _gather(region: Region, offsets: Array, code: str, count: int) -> Array:
    if region.base % NUMPY[code].itemsize:
        return _gather_bytes(region, offsets, code, count)
    return region.gather(offsets, code, count)


def _gather_bytes(region: Region, offsets: Array, code: str, count: int) -> Array:
    """Load elements from a region whose base address is not aligned to their size."""
    size = NUMPY[code].itemsize
    raw = region.data[offsets[:, None] + np.arange(size * count)]
    result: Array = np.ascontiguousarray(raw).view(NUMPY[code]).T
    return result


@runtime
def st_global(
    w: Warp, at: int, addresses: Array, code: str, values: tuple[Array, ...], mask: Array | None, order: str = ""
) -> None:
    """Store one vector of elements per operand."""
    active = lanes_of(addresses, mask)
    size = BYTES[code] * len(values)
    rows = active_of(values, mask)
    place = _place(w, at, active, size)
    if place is not None:
        _scatter(w, at, *place, code, rows, order)
        return
    for part, lanes in regions_of(w, at, active, size):
        _scatter(w, at, part, _offsets(part, active[lanes]), code, tuple(row[lanes] for row in rows), order)


def _scatter(w: Warp, at: int, region: Region, offsets: Array, code: str, rows: tuple[Array, ...], order: str) -> None:
    if not region.is_writable:
        trap(w, at, f"a store must not write {region.name}, which is read-only")
    size = BYTES[code] * len(rows)
    same = partial(_holds, region, offsets, code, rows)
    w.launch.scheduler.store(same)
    w.events.global_write(w, at, region, offsets, size, order, same)
    if region.base % NUMPY[code].itemsize:
        raw = np.ascontiguousarray(np.stack(rows, axis=1)).view(np.uint8).reshape(len(offsets), size)
        region.data[offsets[:, None] + np.arange(size)] = raw
    else:
        region.scatter(offsets, code, rows)


def _holds(region: Region, offsets: Array, code: str, rows: Sequence[Array]) -> bool:
    """Return whether memory already contains the bytes to be stored. Writers of equal values do not race."""
    size = BYTES[code] * len(rows)
    new = np.ascontiguousarray(np.stack(rows, axis=1)).view(np.uint8).reshape(len(offsets), size)
    return bool((region.data[offsets[:, None] + np.arange(size)] == new).all())


# ---- shared


def shared_offsets(w: Warp, at: int, addresses: Array, size: int, remote: bool) -> tuple[Any, Array]:
    """Return the CTA and the int64 offsets of shared-memory addresses, which must be in one CTA's memory."""
    block = w.block
    own = block.shared.inside(addresses, size)
    if own is not None:
        return block, own
    first = int(addresses[0])
    if first >> 60:
        generic = first - as_shared(w, at, first)
        if generic:
            return shared_offsets(w, at, addresses - np.uint64(generic), size, remote)
    rank = first >> RANK_SHIFT
    if rank != block.rank:
        blocks = block.cluster.blocks
        if not remote or rank >= len(blocks):
            check_window(w, at, first, SHARED_OPERAND)
            message = f"shared address {first:#x} belongs to CTA {rank} of the cluster"
            if rank < len(blocks):
                message += "; only .shared::cluster forms can access another CTA"
            else:
                message += f", which has {counted(len(blocks), 'CTA')}"
            w.events.violation("out_of_bounds", w, at, message)
            trap(w, at, message)
        block = blocks[rank]
    offsets = addresses.astype(np.int64) - block.shared_base
    if int(offsets.min()) < 0 or int(offsets.max()) + size > block.shared.size:
        bad = offsets[(offsets < 0) | (offsets + size > block.shared.size)]
        message = (
            f"access of {counted(size, 'byte')} at offset {int(bad[0])} (address {int(bad[0]) + SHARED_START:#x}) "
            f"exceeds the {block.shared.size} bytes of shared memory"
        )
        w.events.violation("out_of_bounds", w, at, message)
        trap(w, at, message)
    return block, offsets


def _by_rank(w: Warp, addresses: Array) -> list[Any]:
    """Return the lane indices, grouped by the CTA rank in the lanes' shared-memory addresses."""
    if w.block.shared.inside(addresses, 1) is not None:
        return [slice(None)]
    ranks = addresses >> addresses.dtype.type(RANK_SHIFT)
    return [np.flatnonzero(ranks == rank) for rank in np.unique(ranks)]


@runtime
def ld_shared(
    w: Warp, at: int, addresses: Array, code: str, count: int, mask: Array | None, remote: bool, order: str = ""
) -> Array:
    """Load (count, 32) elements from shared memory. ``remote`` allows .shared::cluster addresses."""
    active = lanes_of(addresses, mask)
    size = BYTES[code] * count
    own = w.block.shared.inside(active, size)
    if own is not None:
        return spread(_load_at(w, at, w.block, own, code, count, order), mask)
    check_aligned(w, at, active, size)
    if remote and len(groups := _by_rank(w, active)) > 1:
        values = np.zeros((count, len(active)), NUMPY[code])
        for lanes in groups:
            values[:, lanes] = _load_lanes(w, at, active[lanes], code, count, True, order)
        return spread(values, mask)
    return spread(_load_lanes(w, at, active, code, count, remote, order), mask)


def _load_lanes(w: Warp, at: int, active: Array, code: str, count: int, remote: bool, order: str) -> Array:
    block, offsets = shared_offsets(w, at, active, BYTES[code] * count, remote)
    return _load_at(w, at, block, offsets, code, count, order)


def _load_at(w: Warp, at: int, block: Any, offsets: Array, code: str, count: int, order: str) -> Array:
    w.events.shared_read(w, at, block, offsets, BYTES[code] * count, order, False)
    result: Array = block.shared.gather(offsets, code, count)
    if order:
        yield_if_unchanged(w, at, result, order, SHARED_WINDOW + block.shared_base + int(np.ravel(offsets)[0]))
    return result


@runtime
def st_shared(
    w: Warp,
    at: int,
    addresses: Array,
    code: str,
    values: tuple[Array, ...],
    mask: Array | None,
    remote: bool,
    order: str = "",
) -> None:
    """Store one vector of elements per operand into shared memory."""
    active = lanes_of(addresses, mask)
    size = BYTES[code] * len(values)
    check_aligned(w, at, active, size)
    rows = active_of(values, mask)
    for lanes in _by_rank(w, active) if remote else [slice(None)]:
        block, offsets = shared_offsets(w, at, active[lanes], size, remote)
        parts = [row[lanes] for row in rows]
        same = partial(_holds, block.shared, offsets, code, parts)
        w.launch.scheduler.store(same)
        w.events.shared_write(w, at, block, offsets, size, order, False, same)
        block.shared.scatter(offsets, code, parts)
