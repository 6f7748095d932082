"""Emitters for instructions that exchange values between the lanes of a warp.

Source: PTX ISA, "shfl.sync", "vote.sync", "match.sync", "redux.sync", "activemask", "elect.sync".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import cudatma.emulator.machine.undefined  # noqa: F401  (run-time helpers)
from cudatma.emulator.arithmetic.numeric import canon
from cudatma.emulator.arithmetic.ops_integer import kind
from cudatma.emulator.machine.state import FULL
from cudatma.emulator.ptx.model import Imm, Instruction, Pair, Reg, Sink
from cudatma.emulator.ptx.types import LANES, NUMPY, Array, lane_bits
from cudatma.emulator.ptx.writer import RUNTIME, SegmentWriter, emitter, runtime

_LANE = np.arange(LANES, dtype=np.int64)


#: Groups of an instruction that all lanes execute with a mask that includes all lanes.
WHOLE = (FULL,)
RUNTIME["WHOLE"] = WHOLE


def gather_members(e: SegmentWriter, i: Instruction, value: str) -> tuple[str, str]:
    """Emit code that synchronizes the lanes in the member mask.

    Return expressions for the values of all synchronized lanes, and for the groups in which they synchronized.
    """
    operand = i.operands[-1]
    member = e.src(operand, "u32")
    if e.masked:
        met = e.temporary(f"gather(w, {e.at}, {i.opcode!r}, {member}, {value}, {e.segment.index + 1})")
        e.line(f"if {met}.__class__ is int: return {met}")
        return f"{met}[0]", f"{met}[1]"
    if i.names_all:
        e.line("w.meetings += 1")
        return value, "WHOLE"
    return value, e.temporary(f"all_meet(w, {e.at}, {i.opcode!r}, {member})")


def _exchange(e: SegmentWriter, i: Instruction, code: str) -> tuple[str, str]:
    """Return expressions for the second operand in all synchronized lanes, and for their groups.

    For an instruction without .sync, the active lanes form the only group.
    """
    value = e.temporary(e.src(i.operands[1], code))
    if "sync" in i.parts:
        return gather_members(e, i, value)
    return value, f"({e.mask},)" if e.masked or e.guarded else "WHOLE"


@emitter("shfl")
def shfl(e: SegmentWriter, i: Instruction) -> None:
    mode = next((p for p in i.parts if p in ("up", "down", "bfly", "idx")), "")
    e.need(bool(mode), "shfl must have .up, .down, .bfly or .idx")
    value, groups = _exchange(e, i, "u32")
    b, c = (e.src(o, "u32") for o in i.operands[2:4])
    to = i.operands[0]
    fixed = [o.bits for o in i.operands[2:4] if isinstance(o, Imm)]
    if len(fixed) == 2:
        lanes = shuffle_lanes(mode, np.full(LANES, fixed[0] & 31), np.full(LANES, fixed[1] & 0x1F1F))
        source, valid = e.constant(lanes[0]), e.constant(lanes[1])
    else:
        pair = e.temporary(f"shuffle_lanes({mode!r}, {b}.astype(i64), {c}.astype(i64))")
        source, valid = f"{pair}[0]", f"{pair}[1]"
    if groups == "WHOLE":
        value = e.temporary(f"{value}[{source}]")
    else:
        of, at = (
            operand.index if isinstance(operand, Reg) else -1 for operand in (i.operands[1], getattr(to, "first", to))
        )
        value = e.temporary(f"shuffled(w, {e.at}, {value}, {source}, {groups}, {e.mask}, {of}, {at})")
    if isinstance(to, Pair):
        e.dst(to.first, value, "u32")
        e.dst(to.second, valid, "pred")
    else:
        e.dst(to, value, "u32")


@runtime
def shuffle_lanes(mode: str, b: Array, c: Array) -> tuple[Array, Array]:
    """Return each lane's source lane, and whether the source lane is in the segment."""
    b, clamp, segment = b & 31, c & 31, (c >> 8) & 31
    first = _LANE & segment
    last = first | (clamp & ~segment)
    if mode == "up":
        source = _LANE - b
        valid = source >= last
    elif mode == "down":
        source = _LANE + b
        valid = source <= last
    elif mode == "bfly":
        source = _LANE ^ b
        valid = source <= last
    else:
        source = first | (b & ~segment)
        valid = source <= last
    return np.where(valid, source, _LANE), valid


def _by_group(groups: tuple[Array, ...], code: str, result: Callable[[Array], Any]) -> Array:
    """Return a vector that contains each group's result in all lanes of the group."""
    if len(groups) == 1:
        return np.full(LANES, result(groups[0]), NUMPY[code])
    values = np.zeros(LANES, NUMPY[code])
    for lanes in groups:
        values[lanes] = result(lanes)
    return values


@emitter("vote")
def vote(e: SegmentWriter, i: Instruction) -> None:
    mode = next((p for p in i.parts if p in ("all", "any", "uni", "ballot")), "")
    e.need(bool(mode), "vote must have .all, .any, .uni or .ballot")
    votes, groups = _exchange(e, i, "pred")
    e.dst(i.operands[0], f"cast_votes({mode!r}, {votes}, {groups})", "u32" if mode == "ballot" else "pred")


@runtime
def cast_votes(mode: str, votes: Array, groups: tuple[Array, ...]) -> Array:
    """Return a vector that contains each group's vote in all lanes of the group."""
    if mode == "ballot":
        return _by_group(groups, "u32", lambda lanes: lane_bits(votes & lanes))

    def result(lanes: Array) -> bool:
        cast = votes[lanes]
        return bool(
            (mode != "any" and cast.all()) or (mode == "any" and cast.any()) or (mode == "uni" and not cast.any())
        )

    return _by_group(groups, "pred", result)


@emitter("activemask")
def activemask(e: SegmentWriter, i: Instruction) -> None:
    e.dst(i.operands[0], f"active_bits({e.mask})", "u32")


@runtime
def active_bits(mask: Array | None) -> Array:
    return np.full(LANES, 0xFFFFFFFF if mask is None else lane_bits(mask), np.uint32)


@emitter("match")
def match(e: SegmentWriter, i: Instruction) -> None:
    compared, groups = _exchange(e, i, kind(e, i, -1))
    value = e.temporary(f"find_matches({compared}, {groups}, {'all' in i.parts})")
    to = i.operands[0]
    if isinstance(to, Pair):
        e.dst(to.first, f"{value}[0]", "u32")
        e.dst(to.second, f"{value}[1]", "pred")
    else:
        e.dst(to, f"{value}[0]", "u32")


@runtime
def find_matches(value: Array, groups: tuple[Array, ...], every: bool) -> tuple[Array, Array]:
    """Return the lanes with equal values for match.any. For match.all, return all lanes or 0, and a predicate."""
    if every:
        matches = _by_group(groups, "u32", lambda lanes: lane_bits(lanes) * int(np.unique(value[lanes]).size == 1))
        return matches, matches != 0
    matches = np.zeros(LANES, np.uint32)
    for lanes in groups:
        table = (value[:, None] == value[None, :]) & lanes[None, :]
        matches[lanes] = np.packbits(table, axis=1, bitorder="little").view(np.uint32)[lanes, 0]
    return matches, FULL


@emitter("redux")
def redux(e: SegmentWriter, i: Instruction) -> None:
    code = kind(e, i, -1)
    operation = next((p for p in i.parts if p in ("add", "min", "max", "and", "or", "xor")), "")
    e.need(bool(operation), "this reduction is not supported")
    value, groups = _exchange(e, i, code)
    text = f"reduce_lanes({operation!r}, {code!r}, {value}, {groups}, {'NaN' in i.parts}, {'abs' in i.parts})"
    e.dst(i.operands[0], text, code)


@runtime
def reduce_lanes(
    operation: str, code: str, value: Array, groups: tuple[Array, ...], keep_nan: bool, magnitude: bool
) -> Array:
    if magnitude:
        value = np.abs(value)
    if value.dtype.kind == "f":
        return _by_group(groups, code, lambda lanes: _extreme(operation == "max", value[lanes], keep_nan))
    function = {
        "add": np.add,
        "min": np.minimum,
        "max": np.maximum,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
    }[operation]
    return _by_group(groups, code, lambda lanes: function.reduce(value[lanes], dtype=value.dtype))


def _extreme(largest: bool, values: Array, keep_nan: bool) -> Array:
    """Return the minimum or maximum of float32 values, where +0 is greater than -0.

    The result is NaN if all values are NaN or, with .NaN, if any value is NaN.
    """
    numbers = values[~np.isnan(values)]
    if not numbers.size or (keep_nan and numbers.size < values.size):
        result: Array = canon(np.full(1, np.nan, values.dtype))[0]
        return result
    result = numbers.max() if largest else numbers.min()
    if result == 0:
        signs = np.signbit(numbers[numbers == 0])
        is_negative = signs.all() if largest else signs.any()
        result = values.dtype.type(-0.0 if is_negative else 0.0)
    return np.asarray(result)


@emitter("elect")
def elect(e: SegmentWriter, i: Instruction) -> None:
    """Emit code for elect.sync d|p, members, which elects the lowest executing lane of the mask."""
    _, groups = gather_members(e, i, "None")
    value = e.temporary(f"elected({groups})")
    to = i.operands[0]
    if not isinstance(to, Pair):
        raise e.error("the destination of elect.sync must be d|p")
    if not isinstance(to.first, Sink):
        e.dst(to.first, f"{value}[0]", "u32")
    e.dst(to.second, f"{value}[1]", "pred")


@runtime
def elected(groups: tuple[Array, ...]) -> tuple[Array, Array]:
    leader = _by_group(groups, "u32", lambda lanes: int(lanes.argmax()))
    return leader, np.equal(_LANE, leader)
