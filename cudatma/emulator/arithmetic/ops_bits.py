"""Emitters for logic, shifts, permutations and bit fields.

Source: PTX ISA, "Logic and Shift Instructions", "bfe", "bfi", "prmt", "fns".
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cudatma.emulator.arithmetic.ops_integer import kind, operands
from cudatma.emulator.ptx.model import Imm, Instruction, Pair
from cudatma.emulator.ptx.types import BYTES, Array, unsigned
from cudatma.emulator.ptx.writer import SegmentWriter, emitter, runtime

_LOGIC = {"and": "&", "or": "|", "xor": "^"}


@emitter("and", "or", "xor")
def logic(e: SegmentWriter, i: Instruction) -> None:
    operands(e, i, 3)
    code = unsigned(kind(e, i))
    a, b = (e.src(o, code) for o in i.operands[1:])
    e.dst(i.operands[0], f"{a} {_LOGIC[i.parts[0]]} {b}", code)


@emitter("not")
def bit_not(e: SegmentWriter, i: Instruction) -> None:
    code = unsigned(kind(e, i))
    e.dst(i.operands[0], f"~{e.src(i.operands[1], code)}", code)


@emitter("cnot")
def cnot(e: SegmentWriter, i: Instruction) -> None:
    code = unsigned(kind(e, i))
    e.dst(i.operands[0], f"({e.src(i.operands[1], code)} == 0).astype({code})", code)


@emitter("shl", "shr")
def shift(e: SegmentWriter, i: Instruction) -> None:
    """Emit code for shl and shr.

    As in NumPy, a shift by at least the width returns 0 or, for a signed right shift, the sign.
    """
    operands(e, i, 3)
    code = kind(e, i)
    if i.parts[0] == "shl":
        code = unsigned(code)
    amount = i.operands[2]
    if isinstance(amount, Imm):
        count = e.splat(min(amount.bits & 0xFFFFFFFF, 8 * BYTES[code]), code)
    else:
        count = f"minimum({e.src(amount, 'u32')}, {e.splat(8 * BYTES[code], 'u32')}).astype({code})"
    e.dst(i.operands[0], f"{e.src(i.operands[1], code)} {'<<' if i.parts[0] == 'shl' else '>>'} {count}", code)


@emitter("shf")
def funnel(e: SegmentWriter, i: Instruction) -> None:
    low, high, count = (e.src(o, "u32") for o in i.operands[1:4])
    count = f"({count} & {e.splat(31, 'u32')})" if "wrap" in i.parts else f"minimum({count}, {e.splat(32, 'u32')})"
    both = f"(({high}.astype(u64) << {e.splat(32, 'u64')}) | {low})"
    if "l" in i.parts:
        e.dst(i.operands[0], f"(({both} << {count}.astype(u64)) >> {e.splat(32, 'u64')}).astype(u32)", "u32")
    else:
        e.dst(i.operands[0], f"({both} >> {count}.astype(u64)).astype(u32)", "u32")


@runtime
def minimum(a: Array, b: Array) -> Array:
    result: Array = np.minimum(a, b)
    return result


@emitter("lop3")
def lop3(e: SegmentWriter, i: Instruction) -> None:
    """Emit code for lop3.b32 d, a, b, c, table.

    The .BoolOp form with destination d|p also tests the result and combines the test with the predicate q.
    """
    table = i.operands[4] if len(i.operands) > 4 else None
    if not isinstance(table, Imm):
        raise e.error("the fifth operand of lop3 must be an immediate")
    a, b, c = (e.src(o, "u32") for o in i.operands[1:4])
    text = lut_expression(table.bits & 255, a, b, c, e.splat(0, "u32"))
    to = i.operands[0]
    if isinstance(to, Pair):
        value = e.temporary(text)
        other = e.src(i.operands[5], "pred")
        joined = "|" if "or" in i.parts else "&"
        e.dst(to.first, value, "u32")
        e.dst(to.second, f"({value} != 0) {joined} {other}", "pred")
    else:
        e.dst(to, text, "u32")


def lut_expression(table: int, a: str, b: str, c: str, zero: str) -> str:
    """Return a bitwise expression for a truth table. Bit 4a + 2b + c of the table is the result for a, b and c."""

    def on_c(bits: int) -> str:
        return {0: "0", 1: f"~{c}", 2: c, 3: "1"}[bits]

    def join(name: str, high: str, low: str) -> str:
        if high == low:
            return high
        if (high, low) == ("1", "0"):
            return name
        if (high, low) == ("0", "1"):
            return f"~{name}"
        if high == "0":
            return f"(~{name} & {low})"
        if low == "0":
            return f"({name} & {high})"
        if high == "1":
            return f"({name} | {low})"
        if low == "1":
            return f"(~{name} | {high})"
        if high == f"~{low}":
            return f"({name} ^ {low})"
        if low == f"~{high}":
            return f"~({name} ^ {high})"
        return f"(({name} & {high}) | (~{name} & {low}))"

    def on_b(bits: int) -> str:
        return join(b, on_c(bits >> 2), on_c(bits & 3))

    high, low = on_b(table >> 4), on_b(table & 15)
    if (table >> 4) ^ (table & 15) == 15 and high not in ("0", "1") and low not in ("0", "1"):
        return f"({a} ^ {low})"
    text = join(a, high, low)
    return {"0": zero, "1": f"~{zero}"}.get(text, text)


@emitter("prmt")
def prmt(e: SegmentWriter, i: Instruction) -> None:
    a, b, selector = (e.src(o, "u32") for o in i.operands[1:4])
    mode = i.parts[2] if len(i.parts) > 2 else ""
    chosen = i.operands[3]
    if isinstance(chosen, Imm) and not mode:
        e.dst(i.operands[0], f"permute_fixed({a}, {b}, {chosen.bits & 0xFFFF})", "u32")
    else:
        e.dst(i.operands[0], f"permute({a}, {b}, {selector}, {mode!r})", "u32")


@runtime
def permute_fixed(a: Array, b: Array, selector: int) -> Array:
    """Compute prmt with a constant selector, which selects four of eight bytes or replicates their signs."""
    both = np.stack((a, b), axis=1).view(np.uint8)
    fields = [selector >> (4 * k) & 15 for k in range(4)]
    picked = both[:, [f & 7 for f in fields]]
    for k, f in enumerate(fields):
        if f & 8:
            picked[:, k] = np.where(picked[:, k] & 0x80, 255, 0)
    return np.ascontiguousarray(picked).view(np.uint32)[:, 0]


@runtime
def permute(a: Array, b: Array, selector: Array, mode: str) -> Array:
    """Compute prmt with one selector per lane, or in one of the modes f4e, b4e, rc8, ecl, ecr and rc16."""
    both = np.stack((a, b), axis=1).view(np.uint8)
    shifts = np.arange(4, dtype=np.uint32)
    low = (selector & 3).astype(np.int64)[:, None]
    step = np.arange(4)
    if mode == "":
        field = ((selector[:, None] >> (4 * shifts)) & 15).astype(np.int64)
        picked = np.take_along_axis(both, field & 7, axis=1)
        return np.where(field & 8, np.where(picked & 0x80, 255, 0), picked).astype(np.uint8).view(np.uint32)[:, 0]
    index = {
        "f4e": low + step,
        "b4e": (low - step) & 7,
        "rc8": low + 0 * step,
        "ecl": np.maximum(low, step),
        "ecr": np.minimum(low, step),
        "rc16": 2 * (low & 1) + (step & 1),
    }[mode]
    return np.take_along_axis(both, index, axis=1).view(np.uint32)[:, 0]


@emitter("bfe", "bfi", "bmsk", "szext", "fns")
def bit_fields(e: SegmentWriter, i: Instruction) -> None:
    root, code = i.parts[0], kind(e, i)
    if root == "bfe":
        start, length = (e.src(o, "u32") for o in i.operands[2:4])
        e.dst(i.operands[0], f"extract({e.src(i.operands[1], code)}, {start}, {length})", code)
    elif root == "bfi":
        code = unsigned(code)
        a, b = (e.src(o, code) for o in i.operands[1:3])
        start, length = (e.src(o, "u32") for o in i.operands[3:5])
        e.dst(i.operands[0], f"insert({a}, {b}, {start}, {length})", code)
    elif root == "bmsk":
        start, length = (e.src(o, "u32") for o in i.operands[1:3])
        e.dst(i.operands[0], f"bit_mask({start}, {length}, {'wrap' in i.parts})", "u32")
    elif root == "szext":
        a, length = e.src(i.operands[1], code), e.src(i.operands[2], "u32")
        length = f"({length} & 31)" if "wrap" in i.parts else f"minimum({length}, {e.splat(32, 'u32')})"
        e.dst(i.operands[0], f"extract({a}, {e.splat(0, 'u32')}, {length}.astype(u32))", code)
    else:
        mask, base, offset = (e.src(o, t) for o, t in zip(i.operands[1:], ("u32", "u32", "i32"), strict=True))
        e.dst(i.operands[0], f"find_nth_set({mask}, {base}, {offset})", "u32")


@runtime
def extract(a: Array, start: Array, length: Array) -> Array:
    """Compute bfe, which extracts a field and extends it with zeros or the sign.

    If the field extends beyond the top bit, the sign of the operand is used.
    """
    bits = 8 * a.dtype.itemsize
    values, first, count = a.astype(object), start & 255, length & 255
    out = []
    for value, p, n in zip(values, first.tolist(), count.tolist(), strict=True):
        raw = int(value) & ((1 << bits) - 1)
        field = (raw >> p) & ((1 << n) - 1) if n else 0
        if a.dtype.kind == "i" and n:
            sign = raw >> min(p + n - 1, bits - 1) & 1
            have = max(0, min(n, bits - p))
            if sign:
                field |= ((1 << bits) - 1) ^ ((1 << have) - 1)
        out.append(field & ((1 << bits) - 1))
    return np.array(out, dtype=unsigned_dtype(a)).view(a.dtype)


def unsigned_dtype(a: Array) -> np.dtype[Any]:
    return np.dtype(f"u{a.dtype.itemsize}")


@runtime
def insert(a: Array, b: Array, start: Array, length: Array) -> Array:
    """Compute bfi, which inserts the low ``length`` bits of ``a`` into ``b`` at ``start``."""
    bits = 8 * a.dtype.itemsize
    kind_of = a.dtype.type
    p = np.minimum(start & 255, bits).astype(a.dtype)
    n = np.minimum(length & 255, bits).astype(a.dtype)
    ones = ~np.zeros_like(a)
    mask = np.where(n >= bits, ones, (kind_of(1) << np.minimum(n, kind_of(bits - 1))) - kind_of(1)) << p
    mask = np.where(p >= bits, kind_of(0), mask)
    result: Array = (b & ~mask) | ((a << p) & mask)
    return result


@runtime
def bit_mask(start: Array, length: Array, wrap: bool) -> Array:
    out = []
    for a, b in zip(start.tolist(), length.tolist(), strict=True):
        a, b = (a & 31, b & 31) if wrap else (min(a, 32), min(b, 32))
        out.append(((1 << b) - 1) << a & 0xFFFFFFFF)
    return np.array(out, np.uint32)


@runtime
def find_nth_set(mask: Array, base: Array, offset: Array) -> Array:
    """Compute fns, the position of the n-th set bit up (or down) from ``base``, or 0xFFFFFFFF if there is none."""
    out = []
    for m, b, n in zip(mask.tolist(), base.tolist(), offset.tolist(), strict=True):
        b &= 31
        if n == 0:
            out.append(b if m >> b & 1 else 0xFFFFFFFF)
            continue
        order = range(b, 32) if n > 0 else range(b, -1, -1)
        positions = [p for p in order if m >> p & 1]
        out.append(positions[abs(n) - 1] if len(positions) >= abs(n) else 0xFFFFFFFF)
    return np.array(out, np.uint32)


@emitter("popc", "clz", "brev", "bfind")
def count_bits(e: SegmentWriter, i: Instruction) -> None:
    code = kind(e, i)
    raw = unsigned(code) if i.parts[0] != "bfind" else code
    value = e.src(i.operands[1], raw)
    result = raw if i.parts[0] == "brev" else "u32"
    extra = f", {'shiftamt' in i.parts}" if i.parts[0] == "bfind" else ""
    e.dst(i.operands[0], f"{i.parts[0]}({value}{extra})", result)


def _bits(a: Array) -> Array:
    """Return the bits of each lane, lowest first, shape (lanes, width)."""
    return np.unpackbits(np.ascontiguousarray(a).view(np.uint8).reshape(len(a), -1), axis=1, bitorder="little")


@runtime
def popc(a: Array) -> Array:
    result: Array = _bits(a).sum(axis=1, dtype=np.uint32)
    return result


@runtime
def clz(a: Array) -> Array:
    bits = _bits(a)[:, ::-1]
    result: Array = np.where(bits.any(axis=1), bits.argmax(axis=1), bits.shape[1]).astype(np.uint32)
    return result


@runtime
def brev(a: Array) -> Array:
    return np.packbits(_bits(a)[:, ::-1], axis=1, bitorder="little").view(a.dtype)[:, 0]


@runtime
def bfind(a: Array, shift_amount: bool) -> Array:
    raw = np.where(a < 0, ~a, a).view(unsigned_dtype(a)) if a.dtype.kind == "i" else a
    width = np.uint32(8 * a.dtype.itemsize - 1)
    place = width - clz(raw)
    result: Array = np.where(raw == 0, np.uint32(0xFFFFFFFF), width - place if shift_amount else place)
    return result
