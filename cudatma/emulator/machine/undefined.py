"""Tracking of undefined values, which result from a shuffle that reads a lane that does not participate.

Each frame records the undefined lanes of its registers. Instructions propagate undefined lanes from sources to
destinations. An undefined value is reported when it is stored, or used as an address, as a branch condition, or as an
operand of an asynchronous instruction.

Source: PTX ISA, "shfl.sync": the result is unpredictable if the source lane is inactive or not in the membermask.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from cudatma.emulator.machine.state import Frame, Warp
from cudatma.emulator.ptx.flow import registers_of
from cudatma.emulator.ptx.types import Array
from cudatma.emulator.ptx.writer import runtime

#: Opcodes whose result in a lane depends on several lanes.
_COLLECTIVE = {"vote", "match", "redux", "mma", "wmma", "ldmatrix", "movmatrix"}
_EFFECTS = {
    "st",
    "red",
    "atom",
    "ld",
    "ldu",
    "cp",
    "mbarrier",
    "stmatrix",
    "wgmma",
    "bar",
    "barrier",
    "bra",
    "brx",
    "ret",
}
_EFFECTS |= {"exit", "ldmatrix", "multimem", "tensormap"}
#: Bit pattern of an undefined value.
GARBAGE = 0xBADBAD


@runtime
def track(w: Warp, at: int, mask: Array, irrelevant: tuple[Array | None, ...] | None) -> None:
    """Propagate undefined values from the sources of an instruction to its destinations, or report their use.

    ``irrelevant`` contains the lanes in which each source does not affect the result.
    """
    frame = w.split.frame
    undefined, instruction = frame.undefined, frame.program.instruction(at)
    written, read = frame.program.flow.accesses[at]
    sources: list[tuple[Iterable[int], Array | None]] = [(read, None)]
    if irrelevant is not None:
        sources = [(registers_of(o), lanes) for o, lanes in zip(instruction.operands[1:], irrelevant, strict=True)]
        if instruction.guard is not None:
            sources.append((instruction.guard[:1], None))
    affected = np.zeros_like(mask)
    for registers, lanes in sources:
        for register in undefined.keys() & registers:
            affected |= undefined[register] if lanes is None else undefined[register] & ~lanes
    affected &= mask
    parts = instruction.parts
    if affected.any() and parts[0] in _EFFECTS and parts[1:2] != ("param",):
        line = frame.program.instruction(frame.undefined_at).line
        text = f"uses an undefined value, because the shuffle at PTX line {line} read a lane that does not participate"
        w.events.violation("uninitialized_register", w, at, text)
        affected = np.zeros_like(mask)
    if affected.any() and parts[0] in _COLLECTIVE:
        affected = mask
    for register in written:
        _mark(frame, register, affected, mask)
    if not undefined:
        w.split.is_full = bool(w.split.mask.all())


def _mark(frame: Frame, register: int, lanes: Array, mask: Array) -> None:
    """Record which of a register's written lanes are undefined."""
    before = frame.undefined.get(register)
    if before is None and not lanes.any():
        return
    now = lanes & mask if before is None else (before & ~mask) | (lanes & mask)
    if now.any():
        frame.undefined[register] = now
    else:
        frame.undefined.pop(register, None)


@runtime
def shuffled(
    w: Warp, at: int, value: Array, source: Array, groups: tuple[Array, ...], mask: Array | None, of: int, to: int
) -> Array:
    """Return each lane's value from its source lane. The value is undefined if the source is not in the lane's group.

    ``of`` and ``to`` are the source and destination registers, or -1 if an operand is not a register.
    """
    known: Array = source < 0
    for lanes in groups:
        known |= lanes & lanes[source]
    frame = w.split.frame
    here = w.split.mask if mask is None else mask
    missing = here & ~known
    if frame.undefined or missing.any():
        before = frame.undefined.get(of)
        _mark(frame, to, missing if before is None else missing | (known & before[source]), here)
        if missing.any():
            frame.undefined_at = at
        w.split.is_full = not frame.undefined and bool(w.split.mask.all())
    result = value[source]
    result[~known] = GARBAGE
    return result
