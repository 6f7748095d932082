"""Loads and stores of local memory, generic addresses, and .param variables of calls.

Source: PTX ISA, "ld", "st", "Generic Addressing", "Abstracting the ABI".
"""

from __future__ import annotations

import numpy as np

from cudatma.emulator.errors import TrapError
from cudatma.emulator.machine.access import (
    active_of,
    check_aligned,
    check_window,
    lanes_of,
    ld_global,
    ld_shared,
    spread,
    st_global,
    st_shared,
    trap,
)
from cudatma.emulator.machine.memory import LOCAL_WINDOW, SHARED_WINDOW, Region
from cudatma.emulator.machine.state import Warp
from cudatma.emulator.ptx.types import BYTES, LANES, Array
from cudatma.emulator.ptx.writer import runtime
from cudatma.errors import counted

_LANE_NUMBERS = np.arange(LANES, dtype=np.int64)


# ---- local


def _local_offsets(w: Warp, at: int, addresses: Array, size: int, mask: Array | None) -> Array:
    lanes = _LANE_NUMBERS if mask is None else _LANE_NUMBERS[mask]
    inside = addresses.astype(np.int64)
    if int(inside.min()) < 0 or int(inside.max()) + size > w.local_bytes:
        check_window(w, at, int(inside.max()), "an address of the .local state space, from cvta.to.local")
        message = f"local access of {counted(size, 'byte')} at {int(inside.max()):#x} exceeds local memory, "
        message += f"which ends at {w.local_bytes:#x}"
        w.events.violation("out_of_bounds", w, at, message)
        trap(w, at, message)
    return inside + lanes * w.local_bytes


@runtime
def ld_local(w: Warp, at: int, addresses: Array, code: str, count: int, mask: Array | None) -> Array:
    active = lanes_of(addresses, mask)
    check_aligned(w, at, active, BYTES[code] * count)
    offsets = _local_offsets(w, at, active, BYTES[code] * count, mask)
    return spread(w.local.gather(offsets, code, count), mask)


@runtime
def st_local(w: Warp, at: int, addresses: Array, code: str, values: tuple[Array, ...], mask: Array | None) -> None:
    active = lanes_of(addresses, mask)
    check_aligned(w, at, active, BYTES[code] * len(values))
    offsets = _local_offsets(w, at, active, BYTES[code] * len(values), mask)
    w.local.scatter(offsets, code, active_of(values, mask))


# ---- generic


def windows(addresses: Array, mask: Array | None) -> list[tuple[int, Array | None]]:
    """Divide generic addresses by window and return (window, mask) pairs.

    Window 0 is global memory, window 1 is shared memory, and window 2 is local memory.
    """
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
            value = ld_global(w, at, addresses, code, count, part, order)
        result = value if result is None or part is None else np.where(part, value, result)
    if result is None:
        raise TrapError("the load has no active lanes")
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
            st_global(w, at, addresses, code, values, part, order)


# ---- parameters of calls


def _param(w: Warp, name: str, offset: int, size: int) -> tuple[Region, int]:
    buffer = w.param_buffer(w.split.frame, name, max(offset, 0) + size)
    if offset < 0 or offset + size > buffer.size // LANES:
        raise TrapError(
            f"access of {size} bytes at offset {offset} exceeds parameter {name} of {buffer.size // LANES} bytes"
        )
    return buffer, buffer.size // LANES


@runtime
def ld_param(w: Warp, name: str, offset: int, code: str, count: int, mask: Array | None) -> Array:
    """Load from a .param variable of the current call: a formal parameter, or the result of a callee."""
    buffer, pitch = _param(w, name, offset, BYTES[code] * count)
    return buffer.gather(_LANE_NUMBERS * pitch + offset, code, count)


@runtime
def st_param(w: Warp, name: str, offset: int, code: str, values: tuple[Array, ...], mask: Array | None) -> None:
    buffer, pitch = _param(w, name, offset, BYTES[code] * len(values))
    offsets = _LANE_NUMBERS * pitch + offset
    active = offsets if mask is None else offsets[mask]
    buffer.scatter(active, code, active_of(values, mask))
