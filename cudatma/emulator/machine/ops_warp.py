"""Instructions in which the lanes of a warp look at each other.

Source: PTX ISA, "shfl.sync", "vote.sync", "match.sync", "redux.sync", "activemask", "elect.sync".
"""

from __future__ import annotations

import numpy as np

from cudatma.emulator.arithmetic.numeric import canon
from cudatma.emulator.arithmetic.ops_integer import kind
from cudatma.emulator.machine import sync
from cudatma.emulator.machine.state import FULL, Warp
from cudatma.emulator.ptx.model import Imm, Instruction, Pair, Sink
from cudatma.emulator.ptx.types import LANES, Array
from cudatma.emulator.ptx.writer import SegmentWriter, emitter, runtime

_LANE = np.arange(LANES, dtype=np.int64)


def _members(e: SegmentWriter, i: Instruction, position: int) -> None:
    """The lanes of the member mask meet; check it where it is not the constant of all lanes in a full warp."""
    operand = i.operands[position]
    if e.masked or e.guarded or not isinstance(operand, Imm) or ~operand.bits & 0xFFFFFFFF:
        e.line(f"members(w, {e.at}, {e.src(operand, 'u32')}, {e.mask}, {i.opcode!r})")
    else:
        e.line("w.meetings += 1")


@runtime
def members(w: Warp, at: int, member: Array, mask: Array | None, what: str) -> None:
    """The members meet; report a mask that names lanes which are elsewhere."""
    sync.meet(w, member, mask)
    sync.check_members(w, at, member, mask, what)


@emitter("shfl")
def shfl(e: SegmentWriter, i: Instruction) -> None:
    if "sync" in i.parts:
        _members(e, i, 4)
    mode = next((p for p in i.parts if p in ("up", "down", "bfly", "idx")), "")
    e.need(bool(mode), "one of .up, .down, .bfly, .idx is expected")
    a, b, c = (e.src(o, "u32") for o in i.operands[1:4])
    to = i.operands[0]
    fixed = all(isinstance(o, Imm) for o in i.operands[2:4])
    if fixed:
        b_bits, c_bits = (o.bits for o in i.operands[2:4] if isinstance(o, Imm))
        source, valid = shuffle_lanes(mode, np.full(LANES, b_bits & 31), np.full(LANES, c_bits & 0x1F1F))
        pair = f"{e.constant(source)}, {e.constant(valid)}"
    else:
        pair = e.temporary(f"shuffle_lanes({mode!r}, {b}.astype(i64), {c}.astype(i64))")
        pair = f"{pair}[0], {pair}[1]"
    value = e.temporary(f"({a})[{pair.split(', ')[0]}]")
    if isinstance(to, Pair):
        e.dst(to.first, value, "u32")
        e.dst(to.second, pair.split(", ")[1], "pred")
    else:
        e.dst(to, value, "u32")


@runtime
def shuffle_lanes(mode: str, b: Array, c: Array) -> tuple[Array, Array]:
    """(source lane, whether it is in the segment) of every lane."""
    b, clamp, segment = b & 31, c & 31, (c >> 8) & 31
    least = _LANE & segment
    most = least | (clamp & ~segment)
    if mode == "up":
        source = _LANE - b
        valid = source >= most
    elif mode == "down":
        source = _LANE + b
        valid = source <= most
    elif mode == "bfly":
        source = _LANE ^ b
        valid = source <= most
    else:
        source = least | (b & ~segment)
        valid = source <= most
    return np.where(valid, source, _LANE), valid


@emitter("vote")
def vote(e: SegmentWriter, i: Instruction) -> None:
    if "sync" in i.parts:
        _members(e, i, len(i.operands) - 1)
    mode = next((p for p in i.parts if p in ("all", "any", "uni", "ballot")), "")
    e.need(bool(mode), "one of .all, .any, .uni, .ballot is expected")
    text = f"cast_votes({mode!r}, {e.src(i.operands[1], 'pred')}, {e.mask})"
    e.dst(i.operands[0], text, "u32" if mode == "ballot" else "pred")


@runtime
def cast_votes(mode: str, votes: Array, mask: Array | None) -> Array:
    """A vote among the active lanes."""
    here = FULL if mask is None else mask
    if mode == "ballot":
        return np.full(LANES, bits_of(votes & here), np.uint32)
    cast = votes[here]
    result = {"all": cast.all(), "any": cast.any(), "uni": cast.all() or not cast.any()}[mode]
    return np.full(LANES, bool(result))


def bits_of(mask: Array) -> int:
    """A lane mask as a 32-bit integer."""
    return int(np.packbits(mask, bitorder="little").view(np.uint32)[0])


@emitter("activemask")
def activemask(e: SegmentWriter, i: Instruction) -> None:
    e.dst(i.operands[0], f"active_bits({e.mask})", "u32")


@runtime
def active_bits(mask: Array | None) -> Array:
    return np.full(LANES, 0xFFFFFFFF if mask is None else bits_of(mask), np.uint32)


@emitter("match")
def match(e: SegmentWriter, i: Instruction) -> None:
    _members(e, i, 2)
    code = kind(e, i, -1)
    every = "all" in i.parts
    value = e.temporary(f"find_matches({e.src(i.operands[1], code)}, {e.mask}, {every})")
    to = i.operands[0]
    if isinstance(to, Pair):
        e.dst(to.first, f"{value}[0]", "u32")
        e.dst(to.second, f"{value}[1]", "pred")
    else:
        e.dst(to, f"{value}[0]", "u32")


@runtime
def find_matches(value: Array, mask: Array | None, every: bool) -> tuple[Array, Array]:
    """match.any: lanes with the same value; match.all: all lanes where they agree, else none, and a predicate."""
    here = FULL if mask is None else mask
    if every:
        same = bool((value[here] == value[here][0]).all())
        return np.full(LANES, bits_of(here) if same else 0, np.uint32), np.full(LANES, same)
    table = (value[:, None] == value[None, :]) & here[None, :]
    packed = np.packbits(table, axis=1, bitorder="little").view(np.uint32)[:, 0]
    return packed, FULL


@emitter("redux")
def redux(e: SegmentWriter, i: Instruction) -> None:
    _members(e, i, 2)
    code = kind(e, i, -1)
    operation = next((p for p in i.parts if p in ("add", "min", "max", "and", "or", "xor")), "")
    e.need(bool(operation), "unknown reduction")
    text = (
        f"reduce_lanes({operation!r}, {e.src(i.operands[1], code)}, {e.mask}, {'NaN' in i.parts}, {'abs' in i.parts})"
    )
    e.dst(i.operands[0], text, code)


@runtime
def reduce_lanes(operation: str, value: Array, mask: Array | None, keep_nan: bool, magnitude: bool) -> Array:
    active = value if mask is None else value[mask]
    if magnitude:
        active = np.abs(active)
    if value.dtype.kind == "f":
        return np.full(LANES, _extreme(operation == "max", active, keep_nan), value.dtype)
    function = {
        "add": np.add,
        "min": np.minimum,
        "max": np.maximum,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
    }[operation]
    return np.full(LANES, function.reduce(active, dtype=value.dtype), value.dtype)


def _extreme(largest: bool, values: Array, keep_nan: bool) -> Array:
    """The least or largest of some float32, where +0 is above -0; NaN where all are, or, with .NaN, where one is."""
    numbers = values[~np.isnan(values)]
    if not numbers.size or (keep_nan and numbers.size < values.size):
        found: Array = canon(np.full(1, np.nan, values.dtype))[0]
        return found
    found = numbers.max() if largest else numbers.min()
    if found == 0:
        signs = np.signbit(numbers[numbers == 0])
        is_negative = signs.all() if largest else signs.any()
        found = values.dtype.type(-0.0 if is_negative else 0.0)
    return np.asarray(found)


@emitter("elect")
def elect(e: SegmentWriter, i: Instruction) -> None:
    """elect.sync d|p, members: the lowest member that is here."""
    _members(e, i, 1)
    value = e.temporary(f"elected({e.src(i.operands[1], 'u32')}, {e.mask})")
    to = i.operands[0]
    if not isinstance(to, Pair):
        raise e.error("elect.sync wants d|p")
    if not isinstance(to.first, Sink):
        e.dst(to.first, f"{value}[0]", "u32")
    e.dst(to.second, f"{value}[1]", "pred")


@runtime
def elected(member: Array, mask: Array | None) -> tuple[Array, Array]:
    here = FULL if mask is None else mask
    named = int(member[here.argmax()])
    able = here & ((named >> _LANE & 1) != 0)
    leader = int(able.argmax()) if able.any() else int(here.argmax())
    chosen: Array = np.equal(_LANE, leader)
    return np.full(LANES, leader, np.uint32), chosen
