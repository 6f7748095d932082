"""Emitters for integer arithmetic.

Source: PTX ISA, "Integer Arithmetic Instructions", "Extended-Precision Integer Arithmetic".
"""

from __future__ import annotations

import numpy as np

from cudatma.emulator.ptx.model import Instruction
from cudatma.emulator.ptx.types import CODES, Array, unsigned
from cudatma.emulator.ptx.writer import SegmentWriter, emitter, runtime

_WIDER = {"u16": "u32", "i16": "i32", "u32": "u64", "i32": "i64"}


def kind(e: SegmentWriter, i: Instruction, position: int = -1) -> str:
    """Return the emulator type of the opcode part at ``position``, by default the last part."""
    name = i.parts[position]
    if name not in CODES:
        raise e.error(f"type `.{name}` is not supported")
    return CODES[name]


def operands(e: SegmentWriter, i: Instruction, count: int) -> None:
    e.need(len(i.operands) == count, f"the instruction must have {count} operands, got {len(i.operands)}")


def write_add_sub(e: SegmentWriter, i: Instruction) -> None:
    """Emit code for integer add and sub, including .sat (s32) and .cc, and for addc and subc."""
    operands(e, i, 3)
    code = kind(e, i)
    a, b = (e.src(o, code) for o in i.operands[1:])
    root = i.parts[0]
    symbol = "+" if root.startswith("add") else "-"
    if i.parts[-1] in _PAIRS:
        part = _PAIRS[i.parts[-1]]
        e.dst(i.operands[0], f"(pairs({a}, {part}) {symbol} pairs({b}, {part})).view(u32)", "u32")
    elif "sat" in i.parts:
        e.dst(i.operands[0], f"saturate({a}.astype(i64) {symbol} {b}.astype(i64))", "i32")
    elif "cc" in i.parts or root in ("addc", "subc"):
        raw = unsigned(code)
        a, b = e.src(i.operands[1], raw), e.src(i.operands[2], raw)
        carry = f"w.carry if {root in ('addc', 'subc')} else None"
        value = e.temporary(f"with_carry(w, {a}, {b}, {carry}, {symbol == '-'}, {'cc' in i.parts}, {e.mask})")
        e.dst(i.operands[0], value, raw)
    else:
        e.dst(i.operands[0], f"{a} {symbol} {b}", code)


_PAIRS = {"u16x2": "u16", "s16x2": "i16"}


def write_sign(e: SegmentWriter, i: Instruction) -> None:
    """Emit code for integer neg and abs."""
    code = kind(e, i)
    text = e.src(i.operands[1], code)
    e.dst(i.operands[0], f"-{text}" if i.parts[0] == "neg" else f"abs({text})", code)


def write_extreme(e: SegmentWriter, i: Instruction) -> None:
    """Emit code for integer min and max, including packed pairs. .relu clamps the result to at least 0."""
    operands(e, i, 3)
    function = "maximum" if i.parts[0] == "max" else "minimum"
    code, name = kind(e, i), i.parts[-1]
    a, b = (e.src(o, code) for o in i.operands[1:3])
    if name in _PAIRS:
        a, b = f"pairs({a}, {_PAIRS[name]})", f"pairs({b}, {_PAIRS[name]})"
    text = f"{function}({a}, {b})"
    if "relu" in i.parts:
        text = f"maximum({text}, {_PAIRS.get(name, code)}(0))"
    e.dst(i.operands[0], f"{text}.view({code})" if name in _PAIRS else text, code)


@emitter("addc", "subc")
def carry_chain(e: SegmentWriter, i: Instruction) -> None:
    write_add_sub(e, i)


@runtime
def saturate(value: Array) -> Array:
    return np.clip(value, -(2**31), 2**31 - 1).astype(np.int32)


@runtime
def with_carry(
    w: object, a: Array, b: Array, carry: Array | None, minus: bool, sets: bool, mask: Array | None
) -> Array:
    """Add or subtract with extended precision, and update the warp's carry flag if ``sets`` is true.

    Subtraction adds the complement and 1 (or the flag), so the new flag is 1 if there is no borrow. NVIDIA's compilers
    depend on this behavior, because their 128-bit division reads the flag with addc.
    """
    if minus:
        b = ~b
    step = np.full_like(a, minus) if carry is None else carry.astype(a.dtype)
    result = a + b + step
    out = (result < a) | ((result == a) & (step != 0))
    if sets:
        old = w.carry  # type: ignore[attr-defined]
        w.carry = out if mask is None else np.where(mask, out, old)  # type: ignore[attr-defined]
    return result


def write_mul_mad(e: SegmentWriter, i: Instruction) -> None:
    """Emit code for integer mul, mad and madc with .lo, .hi or .wide, including .sat (mad.hi.s32) and carries."""
    code, root = kind(e, i), i.parts[0]
    operands(e, i, 3 if root == "mul" else 4)
    form = next((p for p in i.parts if p in ("lo", "hi", "wide")), "")
    e.need(bool(form), "the opcode must have .lo, .hi or .wide")
    a, b = e.src(i.operands[1], code), e.src(i.operands[2], code)
    result = code
    if form == "lo":
        text = f"{a} * {b}"
    elif form == "wide":
        result = _WIDER.get(code, "")
        e.need(bool(result), f".wide is not supported for {code}")
        text = f"{a}.astype({result}) * {b}.astype({result})"
    else:
        text = f"high_product({a}, {b})"
    if root == "mul":
        e.dst(i.operands[0], text, result)
    elif "cc" in i.parts or root == "madc":
        raw = unsigned(result)
        carry = "w.carry" if root == "madc" else "None"
        c = e.src(i.operands[3], raw)
        head = f"({text}).view({raw}), {c}, {carry}, False"
        e.dst(i.operands[0], e.temporary(f"with_carry(w, {head}, {'cc' in i.parts}, {e.mask})"), raw)
    else:
        c = e.src(i.operands[3], result)
        saturates = "sat" in i.parts
        e.dst(i.operands[0], f"saturate(({text}).astype(i64) + {c})" if saturates else f"{text} + {c}", result)


@runtime
def high_product(a: Array, b: Array) -> Array:
    """Return the upper half of the full product of two integers."""
    if a.dtype.itemsize < 8:
        wide = np.int64 if a.dtype.kind == "i" else np.uint64
        return ((a.astype(wide) * b.astype(wide)) >> (8 * a.dtype.itemsize)).astype(a.dtype)
    product = a.astype(object) * b.astype(object)
    return np.array([int(p) >> 64 for p in product], dtype=a.dtype)


@emitter("mul24", "mad24")
def mul24(e: SegmentWriter, i: Instruction) -> None:
    code = kind(e, i)
    a, b = (f"low24({e.src(o, code)})" for o in i.operands[1:3])
    shift = 0 if "lo" in i.parts else 16
    text = f"(({a} * {b}) >> {shift}).astype({code})"
    if i.parts[0] == "mad24":
        c = e.src(i.operands[3], code)
        text = f"saturate({text}.astype(i64) + {c})" if "sat" in i.parts else f"{text} + {c}"
    e.dst(i.operands[0], text, code)


@runtime
def low24(a: Array) -> Array:
    wide = a.astype(np.int64) & 0xFFFFFF
    return np.where(wide >> 23, wide - (1 << 24), wide) if a.dtype.kind == "i" else wide


@emitter("rem")
def write_div_rem(e: SegmentWriter, i: Instruction) -> None:
    """Emit code for integer div and rem."""
    operands(e, i, 3)
    code = kind(e, i)
    a, b = (e.src(o, code) for o in i.operands[1:])
    e.dst(i.operands[0], f"{'quotient' if i.parts[0] == 'div' else 'remainder'}({a}, {b})", code)


@runtime
def quotient(a: Array, b: Array) -> Array:
    """Divide and round toward zero. Division by zero sets all bits, as in the code that ptxas generates."""
    safe = np.where(b == 0, b.dtype.type(1), b)
    result = a // safe
    if a.dtype.kind == "i":
        result = result + ((result * safe != a) & ((a < 0) != (safe < 0)))
    return np.where(b == 0, ~np.zeros_like(a), result).astype(a.dtype)


@runtime
def remainder(a: Array, b: Array) -> Array:
    """Return the remainder. Division by zero sets all bits, as in the code that ptxas generates for every width."""
    safe = np.where(b == 0, b.dtype.type(1), b)
    return np.where(b == 0, ~np.zeros_like(a), a - quotient(a, safe) * safe).astype(a.dtype)


@emitter("sad")
def sad(e: SegmentWriter, i: Instruction) -> None:
    code = kind(e, i)
    a, b, c = (e.src(o, code) for o in i.operands[1:])
    e.dst(i.operands[0], f"where({a} < {b}, {b} - {a}, {a} - {b}) + {c}", code)


@emitter("dp4a", "dp2a")
def dot_product(e: SegmentWriter, i: Instruction) -> None:
    kinds = [p for p in i.parts if p in ("u32", "s32")]
    a, b = (e.src(o, "u32") for o in i.operands[1:3])
    signed = (kinds[0] == "s32", kinds[1] == "s32")
    code = "i32" if any(signed) else "u32"
    form = "4" if i.parts[0] == "dp4a" else ("hi" if "hi" in i.parts else "lo")
    e.dst(i.operands[0], f"dot({a}, {b}, {signed}, {form!r}).astype({code}) + {e.src(i.operands[3], code)}", code)


@runtime
def dot(a: Array, b: Array, signed: tuple[bool, bool], form: str) -> Array:
    """Compute dp4a (four 8-bit products) or dp2a (two 16-bit by 8-bit products, with the low or high half of b)."""
    b8 = b.view(np.int8 if signed[1] else np.uint8).reshape(-1, 4).astype(np.int64)
    if form == "4":
        a8 = a.view(np.int8 if signed[0] else np.uint8).reshape(-1, 4).astype(np.int64)
        return np.asarray((a8 * b8).sum(axis=1))
    a16 = a.view(np.int16 if signed[0] else np.uint16).reshape(-1, 2).astype(np.int64)
    result: Array = (a16 * (b8[:, 2:] if form == "hi" else b8[:, :2])).sum(axis=1)
    return result
