"""Execute atom and red lane by lane, so that each lane observes the result of the previous lane.

Source: PTX ISA, "atom", "red": operations, types, .noftz and .vec forms.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from cudatma.emulator.arithmetic.numeric import canon, flush
from cudatma.emulator.machine import access
from cudatma.emulator.machine.memory import SHARED_WINDOW, Region
from cudatma.emulator.machine.state import Warp
from cudatma.emulator.ptx.types import BYTES, CODES, LANES, NUMPY, Array, unsigned
from cudatma.emulator.ptx.writer import runtime

_ELEMENT: dict[str, Any] = {
    "f16": np.float16,
    "f16x2": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "bf16x2": ml_dtypes.bfloat16,
}


def apply(operation: str, old: Array, value: Array, second: Array | None = None) -> Array:
    """Return the new memory values. All arrays have the element type. inc and dec wrap as PTX defines."""
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
        result = second if (old == value).all() else old
    elif operation == "exch":
        result = value
    else:
        result = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[operation](old, value)
    return np.asarray(result).astype(old.dtype, copy=False)


def _locate(w: Warp, at: int, address: int, size: int, *, space: str, remote: bool, order: str) -> tuple[Region, int]:
    """Return the region and offset of one lane's operand. ``remote`` allows access to other CTAs."""
    vector = np.array([address], np.uint64)
    window = address >> 60 if not space else (1 if space == "shared" else 0)
    if space == "shared" or (not space and window == 1):
        if not space:
            vector = vector - np.uint64(SHARED_WINDOW)
        block, offsets = access.shared_offsets(w, at, vector, size, remote)
        w.events.shared_atomic(w, at, block, offsets, size, order)
        return block.shared, int(offsets[0])
    if window == 2:
        access.trap(w, at, "an atomic operation must not access local memory")
    region = access.global_region(w, at, vector, size)
    if region is None:
        access.outside(w, at, address, size)
    if not region.is_writable:
        access.trap(w, at, f"an atomic operation must not access {region.name}, which is read-only")
    return region, address - region.base


#: Element types that do not need a separate array per lane.
_CODES = {NUMPY[code]: code for code in ("u32", "i32", "u64", "i64", "f32", "f64")}
#: Maps an operation to a function (old, value, second) -> new on Python integers. Sums wrap when they are stored.
_ON_INTEGERS: dict[str, Callable[[int, int, int], int]] = {
    "add": lambda old, value, _: old + value,
    "min": lambda old, value, _: min(old, value),
    "max": lambda old, value, _: max(old, value),
    "inc": lambda old, value, _: 0 if old >= value else old + 1,
    "dec": lambda old, value, _: value if old == 0 or old > value else old - 1,
    "and": lambda old, value, _: old & value,
    "or": lambda old, value, _: old | value,
    "xor": lambda old, value, _: old ^ value,
    "exch": lambda old, value, _: value,
    "cas": lambda old, value, second: second if old == value else old,
}


def _on_integers(cells: Array, index: Array, operation: str, operands: list[Array]) -> Array:
    """Apply an operation lane by lane on Python integers and return the old values."""
    kind, bits = cells.dtype.kind, 8 * cells.dtype.itemsize
    low_limit = -(1 << (bits - 1)) if kind == "i" else 0
    apply_one = _ON_INTEGERS[operation]
    now: dict[int, int] = {}
    before = []
    for place, value, second in zip(index.tolist(), operands[0].tolist(), operands[-1].tolist(), strict=True):
        old = now[place] if place in now else int(cells[place])
        before.append(old)
        now[place] = (apply_one(old, value, second) - low_limit & (1 << bits) - 1) + low_limit
    for place, value in now.items():
        cells[place] = value
    return np.array(before, cells.dtype)


def _on_floats(cells: Array, index: Array, operation: str, operands: list[Array]) -> Array | None:
    """Add normal numbers to one cell or to distinct cells. Return None if each lane needs a separate step."""
    if operation != "add" or len(set(index.tolist())) not in (1, index.size):
        return None
    value = operands[0]
    if index.size > 1 and index[0] == index[1]:
        steps: Array = np.add.accumulate(np.concatenate([cells[index[:1]], value]), dtype=cells.dtype)
        before, after, index = steps[:-1], steps[-1:], index[:1]
    else:
        before = cells[index]
        after = before + value
    if not _is_plain(before, value, after):
        return None
    cells[index] = after
    return before


def _is_plain(*values: Array) -> bool:
    """Return whether all values are normal numbers or zero, which need no special treatment."""
    tiny = np.finfo(values[0].dtype).tiny
    return all(bool((np.isfinite(v) & ((v == 0) | (np.abs(v) >= tiny))).all()) for v in values)


def _apply_fast(
    w: Warp, at: int, addresses: Array, element: np.dtype[Any], operation: str, operands: list[Array]
) -> tuple[Array, bool] | None:
    """Return the old values and whether any value has changed, or None if the cells are not in one global region."""
    size = element.itemsize
    region = access.global_region(w, at, addresses, size)
    if region is None or not region.is_writable or region.base % size:
        return None
    cells = region.view(unsigned(_CODES[element])).view(element)
    index = ((addresses - np.uint64(region.base)) // np.uint64(size)).astype(np.int64)
    work = _on_floats if element.kind == "f" else _on_integers
    before = work(cells, index, operation, operands)
    return None if before is None else (before, bool(np.count_nonzero(cells[index] != before)))


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
    remote: bool,
    returns: bool,
) -> Array:
    """Execute atom or red and return the old values as raw bits, shape (elements, 32). Inactive lanes contain 0."""
    code = "u64" if name == "b128" else unsigned(CODES[name])
    count = len(sources[0])
    size = BYTES[code] * count
    element = np.dtype(_ELEMENT.get(name) or NUMPY[code if name == "b128" else CODES[name]])
    old = np.zeros((count, LANES), NUMPY[code])
    active = np.arange(LANES) if mask is None else np.flatnonzero(mask)
    if np.bitwise_or.reduce(addresses[active]) & np.uint64(size - 1):
        access.trap(w, at, f"the address of an atomic operation on {size} bytes is misaligned")
    w.events.atomic(w, at, addresses[active], space, size, order, returns)
    if count == 1 and element in _CODES and int(addresses[active].max()) >> 60 == 0 and space != "shared":
        chosen = [group[0][active].view(element) for group in sources]
        quick = _apply_fast(w, at, addresses[active], element, operation, chosen)
        if quick is not None:
            old[0, active] = quick[0].view(NUMPY[code])
            _yield_after(w, at, old[:, active], quick[1], int(addresses[active[0]]))
            return old
    has_changed = False
    for lane in active.tolist():
        region, offset = _locate(w, at, int(addresses[lane]), size, space=space, remote=remote, order=order)
        place = region.data[offset : offset + size]
        before = place.copy()
        old[:, lane] = before.view(NUMPY[code])
        operands = [np.array([v[lane] for v in group], NUMPY[code]).view(element) for group in sources]
        current = before.view(element)
        is_shared = space == "shared" or int(addresses[lane]) >> 60 == 1
        if name == "f32" and operation == "add" and not is_shared:
            # Subnormal numbers are flushed only in global memory.
            new = canon(flush(apply(operation, flush(current), flush(operands[0]))))
        else:
            new = apply(operation, current, operands[0], operands[1] if len(operands) > 1 else None)
        place[:] = new.view(np.uint8)
        has_changed = has_changed or bool(np.count_nonzero(place != before))
    address = int(addresses[active[0]]) + (SHARED_WINDOW if space == "shared" else 0)
    _yield_after(w, at, old[:, active], has_changed, address)
    return old


def _yield_after(w: Warp, at: int, old: Array, has_changed: bool, address: int) -> None:
    """Yield to other splits after an operation that changed memory, or that observed the same value again.

    ``address`` is the generic address of the first element of ``old``.
    """
    if has_changed:
        w.launch.scheduler.progress += 1
        w.launch.scheduler.synchronized()
    else:
        access.yield_if_unchanged(w, at, old, "relaxed", address)
