"""Loads and stores of warps: lane addresses to regions, alignment, bounds, and what the hazard layer is told.

Every function takes the warp, the instruction's index in the body, lane addresses and the active mask (None: all).
Source: PTX ISA, "ld", "st", "Generic Addressing".
"""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np

from cudatma.emulator.errors import TrapError
from cudatma.emulator.machine import Warp
from cudatma.emulator.memory import LOCAL_WINDOW, RANK_SHIFT, SHARED_START, SHARED_WINDOW, Region
from cudatma.emulator.types import BYTES, LANES, NUMPY, Array
from cudatma.emulator.writer import runtime

_LANE_NUMBERS = np.arange(LANES, dtype=np.int64)


def trap(w: Warp, at: int, message: str) -> NoReturn:
    """Raise what the hardware would stop with, naming instruction, source line, block and warp."""
    program = w.split.frame.program
    instruction = program.instruction(at)
    source = program.module.source_of(instruction)
    place = f"PTX line {instruction.line}" + (f" ({source})" if source else "")
    raise TrapError(f"{message}; {place} `{instruction.text}`, block {w.block.index}, warp {w.index}")


def lanes_of(addresses: Array, mask: Array | None) -> Array:
    return addresses if mask is None else addresses[mask]


def _spread(values: Array, mask: Array | None) -> Array:
    """(count, active) values to (count, 32)."""
    if mask is None:
        return values
    out = np.zeros((values.shape[0], LANES), values.dtype)
    out[:, mask] = values
    return out


def _aligned(w: Warp, at: int, addresses: Array, size: int) -> None:
    if size > 1 and np.bitwise_or.reduce(addresses) & (size - 1):
        bad = int(addresses[(addresses & (size - 1)) != 0][0])
        trap(w, at, f"misaligned address {bad:#x}: {size} bytes are accessed at once")


# ---- global


def global_region(w: Warp, at: int, addresses: Array, size: int) -> Region | None:
    """The one region that holds all lanes' bytes, or None where lanes lie in several."""
    low, high = int(addresses.min()), int(addresses.max()) + size
    memory = w.launch.memory
    region = memory.last
    if region is None or low < region.base or high > region.end:
        region = memory.find(low)
        if region is None:
            outside(w, at, low, size)
        if high > region.end:
            return None
        memory.last = region
    return region


def outside(w: Warp, at: int, address: int, size: int) -> NoReturn:
    """Report an access to bytes that nobody mapped and stop."""
    message = f"access of {size} bytes at {address:#x}, {w.launch.memory.nearest(address)}"
    observer = w.block.cluster.observer
    if observer is not None:
        observer.report("out_of_bounds", w, at, message)
    trap(w, at, message)


def _regions(w: Warp, at: int, addresses: Array, size: int) -> list[tuple[Region, Array]]:
    """(region, indices of lanes) for lanes that lie in several regions."""
    found: dict[int, tuple[Region, list[int]]] = {}
    for lane, address in enumerate(addresses.tolist()):
        region = w.launch.memory.find(address)
        if region is None or address + size > region.end:
            outside(w, at, address, size)
        found.setdefault(region.base, (region, []))[1].append(lane)
    return [(region, np.array(lanes)) for region, lanes in found.values()]


@runtime
def ld_global(w: Warp, at: int, addresses: Array, code: str, count: int, mask: Array | None) -> Array:
    """(count, 32) elements from global, const or kernel parameter memory."""
    active = lanes_of(addresses, mask)
    size = BYTES[code] * count
    _aligned(w, at, active, size)
    region = global_region(w, at, active, size)
    if region is not None:
        return _spread(_gather(region, active, code, count), mask)
    values = np.zeros((count, len(active)), NUMPY[code])
    for part, lanes in _regions(w, at, active, size):
        values[:, lanes] = _gather(part, active[lanes], code, count)
    return _spread(values, mask)


def _gather(region: Region, addresses: Array, code: str, count: int) -> Array:
    offsets = (addresses - np.uint64(region.base)).view(np.int64)
    if region.base % NUMPY[code].itemsize:
        return _gather_bytes(region, offsets, code, count)
    return region.gather(offsets, code, count)


def _gather_bytes(region: Region, offsets: Array, code: str, count: int) -> Array:
    """Elements of a region whose base is not aligned to them."""
    size = NUMPY[code].itemsize
    raw = region.data[offsets[:, None] + np.arange(size * count)]
    result: Array = np.ascontiguousarray(raw).view(NUMPY[code]).T
    return result


@runtime
def st_global(w: Warp, at: int, addresses: Array, code: str, values: tuple[Array, ...], mask: Array | None) -> None:
    """Store one vector of elements per operand."""
    active = lanes_of(addresses, mask)
    size = BYTES[code] * len(values)
    _aligned(w, at, active, size)
    rows = np.stack([lanes_of(value, mask) for value in values])
    region = global_region(w, at, active, size)
    parts = [(region, slice(None))] if region is not None else _regions(w, at, active, size)
    for part, lanes in parts:
        if not part.is_writable:
            trap(w, at, f"store into {part.name}, which is read-only")
        offsets = (active[lanes] - np.uint64(part.base)).view(np.int64)
        if part.base % NUMPY[code].itemsize:
            raw = np.ascontiguousarray(rows[:, lanes].T).view(np.uint8).reshape(len(offsets), size)
            part.data[offsets[:, None] + np.arange(size)] = raw
        else:
            part.scatter(offsets, code, rows[:, lanes])


# ---- shared


def shared_offsets(w: Warp, at: int, addresses: Array, size: int, remote: bool) -> tuple[Any, Array]:
    """(block, int64 offsets) of shared addresses; all lanes must lie in one block's memory and inside it."""
    first = int(addresses[0])
    rank = first >> RANK_SHIFT
    block = w.block
    if rank != block.rank:
        blocks = block.cluster.blocks
        if not remote or rank >= len(blocks):
            message = f"shared address {first:#x} names block {rank} of the cluster"
            observer = block.cluster.observer
            if observer is not None:
                observer.report("out_of_bounds", w, at, message)
            trap(w, at, message)
        block = blocks[rank]
        if block.is_done and w.block.cluster.observer is not None:
            w.block.cluster.observer.report(
                "block_gone", w, at, f"block {block.index} has ended, its shared memory is another's"
            )
    offsets = addresses.astype(np.int64) - block.shared_base
    if int(offsets.min()) < 0 or int(offsets.max()) + size > block.shared.size:
        bad = offsets[(offsets < 0) | (offsets + size > block.shared.size)]
        message = (
            f"access of {size} bytes at offset {int(bad[0])} of {block.shared.size} bytes of shared memory "
            f"(address {int(bad[0]) + SHARED_START:#x})"
        )
        observer = block.cluster.observer
        if observer is not None:
            observer.report("out_of_bounds", w, at, message)
        trap(w, at, message)
    return block, offsets


def _by_rank(addresses: Array) -> list[Array]:
    """Lane indices grouped by the block that their shared address names."""
    ranks = addresses >> addresses.dtype.type(RANK_SHIFT)
    return [np.flatnonzero(ranks == rank) for rank in np.unique(ranks)]


@runtime
def ld_shared(
    w: Warp, at: int, addresses: Array, code: str, count: int, mask: Array | None, remote: bool, order: str = ""
) -> Array:
    """(count, 32) elements from shared memory; remote: .shared::cluster."""
    active = lanes_of(addresses, mask)
    size = BYTES[code] * count
    _aligned(w, at, active, size)
    if remote and len(groups := _by_rank(active)) > 1:
        values = np.zeros((count, len(active)), NUMPY[code])
        for lanes in groups:
            values[:, lanes] = _load_one(w, at, active[lanes], code, count, True, order)
        return _spread(values, mask)
    return _spread(_load_one(w, at, active, code, count, remote, order), mask)


def _load_one(w: Warp, at: int, active: Array, code: str, count: int, remote: bool, order: str) -> Array:
    size = BYTES[code] * count
    block, offsets = shared_offsets(w, at, active, size, remote)
    observer = w.block.cluster.observer
    if observer is not None:
        observer.generic_read(w, at, block, offsets, size, order)
    result: Array = block.shared.gather(offsets, code, count)
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
    _aligned(w, at, active, size)
    rows = np.stack([lanes_of(value, mask) for value in values])
    for lanes in _by_rank(active) if remote else [slice(None)]:
        block, offsets = shared_offsets(w, at, active[lanes], size, remote)
        observer = w.block.cluster.observer
        if observer is not None:
            observer.generic_write(w, at, block, offsets, size, order)
        block.shared.scatter(offsets, code, rows[:, lanes])


# ---- local and generic


def _local_offsets(w: Warp, at: int, addresses: Array, size: int, mask: Array | None) -> Array:
    lanes = _LANE_NUMBERS if mask is None else _LANE_NUMBERS[mask]
    inside = addresses.astype(np.int64)
    if int(inside.min()) < 0 or int(inside.max()) + size > w.local_bytes:
        message = f"local access of {size} bytes at {int(inside.max()):#x}, {w.local_bytes} bytes are there"
        observer = w.block.cluster.observer
        if observer is not None:
            observer.report("out_of_bounds", w, at, message)
        trap(w, at, message)
    return inside + lanes * w.local_bytes


@runtime
def ld_local(w: Warp, at: int, addresses: Array, code: str, count: int, mask: Array | None) -> Array:
    active = lanes_of(addresses, mask)
    _aligned(w, at, active, BYTES[code] * count)
    offsets = _local_offsets(w, at, active, BYTES[code] * count, mask)
    return _spread(w.local.gather(offsets, code, count), mask)


@runtime
def st_local(w: Warp, at: int, addresses: Array, code: str, values: tuple[Array, ...], mask: Array | None) -> None:
    active = lanes_of(addresses, mask)
    _aligned(w, at, active, BYTES[code] * len(values))
    offsets = _local_offsets(w, at, active, BYTES[code] * len(values), mask)
    w.local.scatter(offsets, code, np.stack([lanes_of(value, mask) for value in values]))


def windows(addresses: Array, mask: Array | None) -> list[tuple[int, Array | None]]:
    """(window, mask) for generic addresses: 0 global, 1 shared, 2 local."""
    top = (addresses >> np.uint64(60)).astype(np.int64)
    active = lanes_of(top, mask)
    if (active == active[0]).all():
        return [(int(active[0]), mask)]
    here = np.ones(LANES, bool) if mask is None else mask
    return [(int(number), here & (top == number)) for number in np.unique(active)]


@runtime
def ld_generic(w: Warp, at: int, addresses: Array, code: str, count: int, mask: Array | None, order: str = "") -> Array:
    result: Array | None = None
    for number, part in windows(addresses, mask):
        if number == 1:
            value = ld_shared(w, at, (addresses - np.uint64(SHARED_WINDOW)), code, count, part, True, order)
        elif number == 2:
            value = ld_local(w, at, addresses - np.uint64(LOCAL_WINDOW), code, count, part)
        else:
            value = ld_global(w, at, addresses, code, count, part)
        result = value if result is None or part is None else np.where(part, value, result)
    if result is None:
        raise TrapError("a load without lanes")
    return result


@runtime
def st_generic(
    w: Warp, at: int, addresses: Array, code: str, values: tuple[Array, ...], mask: Array | None, order: str = ""
) -> None:
    for number, part in windows(addresses, mask):
        if number == 1:
            st_shared(w, at, addresses - np.uint64(SHARED_WINDOW), code, values, part, True, order)
        elif number == 2:
            st_local(w, at, addresses - np.uint64(LOCAL_WINDOW), code, values, part)
        else:
            st_global(w, at, addresses, code, values, part)


# ---- parameters of calls


def _param(w: Warp, name: str, offset: int, size: int) -> tuple[Region, int]:
    buffer = w.param_buffer(w.split.frame, name, offset + size)
    return buffer, buffer.size // LANES


@runtime
def ld_param(w: Warp, name: str, offset: int, code: str, count: int, mask: Array | None) -> Array:
    """From a .param variable of this activation: a formal parameter, or a callee's result."""
    buffer, pitch = _param(w, name, offset, BYTES[code] * count)
    return buffer.gather(_LANE_NUMBERS * pitch + offset, code, count)


@runtime
def st_param(w: Warp, name: str, offset: int, code: str, values: tuple[Array, ...], mask: Array | None) -> None:
    buffer, pitch = _param(w, name, offset, BYTES[code] * len(values))
    offsets = _LANE_NUMBERS * pitch + offset
    active = offsets if mask is None else offsets[mask]
    buffer.scatter(active, code, np.stack([lanes_of(value, mask) for value in values]))
