"""atom and red: lanes one after the other, each on the memory as the one before left it.

Source: PTX ISA, "atom", "red": operations, types, .noftz and .vec forms.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from cudatma.emulator import access
from cudatma.emulator.machine import Warp
from cudatma.emulator.memory import SHARED_WINDOW, Region
from cudatma.emulator.types import BYTES, CODES, LANES, NUMPY, Array, unsigned
from cudatma.emulator.writer import runtime

_ELEMENT: dict[str, Any] = {
    "f16": np.float16,
    "f16x2": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "bf16x2": ml_dtypes.bfloat16,
}


def apply(operation: str, old: Array, value: Array, second: Array | None = None) -> Array:
    """The new memory value; all arrays have the element type. inc, dec wrap as PTX says."""
    one = old.dtype.type(1)
    if operation == "add":
        result = old + value
    elif operation in ("min", "max"):
        function = {
            ("min", False): np.minimum,
            ("max", False): np.maximum,
            ("min", True): np.fmin,
            ("max", True): np.fmax,
        }
        result = function[operation, old.dtype.kind not in "iu"](old, value)
    elif operation == "inc":
        result = np.where(old >= value, old.dtype.type(0), old + one)
    elif operation == "dec":
        result = np.where((old == 0) | (old > value), value, old - one)
    elif operation == "cas" and second is not None:
        result = np.where(old == value, second, old)
    elif operation == "exch":
        result = value
    else:
        result = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[operation](old, value)
    return np.asarray(result).astype(old.dtype, copy=False)


def _locate(w: Warp, at: int, address: int, space: str, size: int, order: str, lane: int) -> tuple[Region, int]:
    """(region, offset) of one lane's operand."""
    vector = np.array([address], np.uint64)
    window = address >> 60 if not space else (1 if space == "shared" else 0)
    if space == "shared" or (not space and window == 1):
        if not space:
            vector = vector - np.uint64(SHARED_WINDOW)
        block, offsets = access.shared_offsets(w, at, vector, size, True)
        observer = w.block.cluster.observer
        if observer is not None:
            observer.atomic(w, at, block, offsets, size, order)
        return block.shared, int(offsets[0])
    if window == 2:
        access.trap(w, at, "an atomic operation on local memory")
    region = access.global_region(w, at, vector, size)
    if region is None:
        access.outside(w, at, address, size)
    if not region.is_writable:
        access.trap(w, at, f"an atomic operation on {region.name}, which is read-only")
    return region, address - region.base


@runtime
def atomic(
    w: Warp,
    at: int,
    addresses: Array,
    space: str,
    operation: str,
    name: str,
    sources: tuple[tuple[Array, ...], ...],
    mask: Array | None,
    order: str,
) -> Array:
    """(elements, 32) raw values from before; lanes that are not active give 0."""
    code = unsigned(CODES[name])
    count = len(sources[0])
    size = BYTES[code] * count
    element = np.dtype(_ELEMENT.get(name) or NUMPY[CODES[name]])
    old = np.zeros((count, LANES), NUMPY[code])
    active = np.arange(LANES) if mask is None else np.flatnonzero(mask)
    if np.bitwise_or.reduce(addresses[active]) & np.uint64(size - 1):
        access.trap(w, at, f"a misaligned atomic operation on {size} bytes")
    observer = w.block.cluster.observer
    if observer is not None:
        observer.atomic_order(w, at, order)
    w.launch.scheduler.progress += 1
    for lane in active.tolist():
        region, offset = _locate(w, at, int(addresses[lane]), space, size, order, lane)
        place = region.data[offset : offset + size]
        before = place.copy()
        old[:, lane] = before.view(NUMPY[code])
        operands = [np.array([v[lane] for v in group], NUMPY[code]).view(element) for group in sources]
        new = apply(operation, before.view(element), operands[0], operands[1] if len(operands) > 1 else None)
        place[:] = new.view(np.uint8)
    return old
