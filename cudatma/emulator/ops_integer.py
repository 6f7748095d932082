"""Integer, logic, move and select instructions.

Source: PTX ISA, "Integer Arithmetic Instructions", "Logic and Shift Instructions", "Comparison and Selection
Instructions", "Data Movement: mov, prmt, shf".
"""

from __future__ import annotations

import numpy as np

from cudatma.emulator.model import Imm, Instruction, Pair, Reg, Sink, Sym, Vec
from cudatma.emulator.types import BYTES, CODES, Array, unsigned
from cudatma.emulator.writer import SegmentWriter, emitter, runtime

_WIDER = {"u16": "u32", "i16": "i32", "u32": "u64", "i32": "i64"}


def kind(e: SegmentWriter, i: Instruction, position: int = -1) -> str:
    """The emulator type that a part of the opcode names."""
    name = i.parts[position]
    if name not in CODES:
        raise e.error(f"unknown type `.{name}`")
    return CODES[name]


def operands(e: SegmentWriter, i: Instruction, count: int) -> None:
    e.need(len(i.operands) == count, f"{count} operands are expected, {len(i.operands)} stand here")


@emitter("mov")
def mov(e: SegmentWriter, i: Instruction) -> None:
    operands(e, i, 2)
    code = kind(e, i)
    to, source = i.operands
    if isinstance(source, Vec) and len(source.items) > 1:
        parts = [e.src(item, f"u{8 * BYTES[code] // len(source.items)}") for item in source.items]
        if code == "b128":
            e.need(len(parts) == 2, "mov.b128 packs two halves")
            parts = [e.src(item, "u64") for item in source.items]
            e.dst(to, f"pack128({', '.join(parts)})", "b128")
        else:
            e.dst(to, f"pack(({', '.join(parts)}), {unsigned(code)})", unsigned(code))
    elif isinstance(to, Vec) and len(to.items) > 1:
        if code == "b128":
            value = e.temporary(e.src(source, code))
            for position, item in enumerate(to.items):
                e.dst(item, f"{value}[{position}]", "u64")
            return
        width = 8 * BYTES[code] // len(to.items)
        value = e.temporary(f"unpack({e.src(source, unsigned(code))}, u{width}, {len(to.items)})")
        for position, item in enumerate(to.items):
            if not isinstance(item, Sink):
                e.dst(item, f"{value}[{position}]", f"u{width}")
    elif isinstance(source, Sym) and source.name in e.module.functions:
        e.dst(to, f"w.function_address({source.name!r})", "u64")
    else:
        e.dst(to, e.src(source, code), code)


@runtime
def pack(parts: tuple[Array, ...], to: type) -> Array:
    """Vectors of narrow elements side by side in wider ones, the first lowest."""
    return np.stack(parts, axis=1).view(to)[:, 0]


@runtime
def pack128(low: Array, high: Array) -> Array:
    return np.stack((low, high))


@runtime
def unpack(value: Array, to: type, count: int) -> Array:
    """The narrow parts of a vector: result[k] is the k-th lowest part of all lanes."""
    return np.ascontiguousarray(value).view(to).reshape(len(value), count).T


def write_add_sub(e: SegmentWriter, i: Instruction) -> None:
    """add, sub of integers, with .sat (s32) and the carry forms .cc; addc, subc take the carry flag."""
    operands(e, i, 3)
    code = kind(e, i)
    a, b = (e.src(o, code) for o in i.operands[1:])
    root = i.parts[0]
    symbol = "+" if root.startswith("add") else "-"
    if "sat" in i.parts:
        e.dst(i.operands[0], f"saturate({a}.astype(i64) {symbol} {b}.astype(i64))", "i32")
    elif "cc" in i.parts or root in ("addc", "subc"):
        raw = unsigned(code)
        a, b = e.src(i.operands[1], raw), e.src(i.operands[2], raw)
        carry = f"w.carry if {root in ('addc', 'subc')} else None"
        value = e.temporary(f"with_carry(w, {a}, {b}, {carry}, {symbol == '-'}, {'cc' in i.parts}, {e.mask})")
        e.dst(i.operands[0], value, raw)
    else:
        e.dst(i.operands[0], f"{a} {symbol} {b}", code)


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
    """Extended-precision add or subtract; the warp's carry flag (borrow for subtract) is kept where ``.cc`` asks."""
    step = np.zeros_like(a) if carry is None else carry.astype(a.dtype)
    if minus:
        result = a - b - step
        out = (a < b) | ((a == b) & (step != 0))
    else:
        result = a + b + step
        out = (result < a) | ((result == a) & (step != 0) & (b != 0)) | ((step != 0) & (result == a) & (b + step == 0))
    if sets:
        old = w.carry  # type: ignore[attr-defined]
        w.carry = out if mask is None else np.where(mask, out, old)  # type: ignore[attr-defined]
    return result


def write_mul_mad(e: SegmentWriter, i: Instruction) -> None:
    """mul and mad of integers: .lo, .hi, .wide."""
    code = kind(e, i)
    form = next((p for p in i.parts if p in ("lo", "hi", "wide")), "")
    e.need(bool(form), "one of .lo, .hi, .wide is expected")
    a, b = e.src(i.operands[1], code), e.src(i.operands[2], code)
    result = code
    if form == "lo":
        text = f"{a} * {b}"
    elif form == "wide":
        result = _WIDER.get(code, "")
        e.need(bool(result), f".wide of {code}")
        text = f"{a}.astype({result}) * {b}.astype({result})"
    else:
        text = f"high_product({a}, {b})"
    if i.parts[0] == "mad":
        operands(e, i, 4)
        total = f"{text} + {e.src(i.operands[3], result)}"
        if "sat" in i.parts:
            total = f"saturate({text}.astype(i64) + {e.src(i.operands[3], result)}.astype(i64))"
        if "cc" in i.parts:
            raise e.error("mad.cc is not served")
        text = total
    e.dst(i.operands[0], text, result)


@runtime
def high_product(a: Array, b: Array) -> Array:
    """The upper half of the full product."""
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
        text += f" + {e.src(i.operands[3], code)}"
    e.dst(i.operands[0], text, code)


@runtime
def low24(a: Array) -> Array:
    wide = a.astype(np.int64) & 0xFFFFFF
    return np.where(wide >> 23, wide - (1 << 24), wide) if a.dtype.kind == "i" else wide


@emitter("div", "rem")
def div_rem(e: SegmentWriter, i: Instruction) -> None:
    operands(e, i, 3)
    code = kind(e, i)
    if code.startswith("f"):
        from cudatma.emulator.ops_float import write_float_div

        write_float_div(e, i)
        return
    a, b = (e.src(o, code) for o in i.operands[1:])
    e.dst(i.operands[0], f"{'quotient' if i.parts[0] == 'div' else 'remainder'}({a}, {b})", code)


@runtime
def quotient(a: Array, b: Array) -> Array:
    """Integer division towards zero; by zero all bits are set (the ISA leaves it open)."""
    safe = np.where(b == 0, b.dtype.type(1), b)
    result = a // safe
    if a.dtype.kind == "i":
        result = result + ((result * safe != a) & ((a < 0) != (safe < 0)))
    return np.where(b == 0, ~np.zeros_like(a), result).astype(a.dtype)


@runtime
def remainder(a: Array, b: Array) -> Array:
    safe = np.where(b == 0, b.dtype.type(1), b)
    return np.where(b == 0, a, a - quotient(a, safe) * safe).astype(a.dtype)


@emitter("sad")
def sad(e: SegmentWriter, i: Instruction) -> None:
    code = kind(e, i)
    a, b, c = (e.src(o, code) for o in i.operands[1:])
    e.dst(i.operands[0], f"where({a} < {b}, {b} - {a}, {a} - {b}) + {c}", code)


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
    """Amounts of the width and more give 0, or the sign for signed right shifts, as NumPy's shifts do."""
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
    """lop3.b32 d, a, b, c, table; the .BoolOp form d|p also tests the result and combines it with q."""
    table = i.operands[4] if len(i.operands) > 4 else None
    if not isinstance(table, Imm):
        raise e.error("lop3 wants an immediate table as fifth operand")
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
    """A bitwise expression with this truth table (bit 4a + 2b + c), split on a, then on b."""

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
    """prmt with a constant selector: four bytes out of eight, each perhaps replaced by its sign."""
    both = np.stack((a, b), axis=1).view(np.uint8)
    fields = [selector >> (4 * k) & 15 for k in range(4)]
    picked = both[:, [f & 7 for f in fields]]
    for k, f in enumerate(fields):
        if f & 8:
            picked[:, k] = np.where(picked[:, k] & 0x80, 255, 0)
    return picked.view(np.uint32)[:, 0]


@runtime
def permute(a: Array, b: Array, selector: Array, mode: str) -> Array:
    """prmt with a selector a lane, and its modes f4e, b4e, rc8, ecl, ecr, rc16."""
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
    """bfe: the field, zero- or sign-extended; the sign of a field past the top is the operand's own."""
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


def unsigned_dtype(a: Array) -> np.dtype[np.unsignedinteger[np.typing.NBitBase]]:
    return np.dtype(f"u{a.dtype.itemsize}")


@runtime
def insert(a: Array, b: Array, start: Array, length: Array) -> Array:
    """bfi: the low ``length`` bits of a into b at ``start``."""
    bits = 8 * a.dtype.itemsize
    kind_of = a.dtype.type
    p = np.minimum(start & 255, bits).astype(a.dtype)
    n = np.minimum(length & 255, bits).astype(a.dtype)
    ones = ~np.zeros_like(a)
    mask = np.where(n >= bits, ones, (kind_of(1) << np.minimum(n, kind_of(bits - 1))) - kind_of(1)) << p
    mask = np.where(p >= bits, kind_of(0), mask)
    return (b & ~mask) | ((a << p) & mask)


@runtime
def bit_mask(start: Array, length: Array, wrap: bool) -> Array:
    out = []
    for a, b in zip(start.tolist(), length.tolist(), strict=True):
        a, b = (a & 31, b & 31) if wrap else (min(a, 32), min(b, 32))
        out.append(((1 << b) - 1) << a & 0xFFFFFFFF)
    return np.array(out, np.uint32)


@runtime
def find_nth_set(mask: Array, base: Array, offset: Array) -> Array:
    """fns: position of the n-th set bit from ``base`` upwards (or downwards), 0xFFFFFFFF where there is none."""
    out = []
    for m, b, n in zip(mask.tolist(), base.tolist(), offset.tolist(), strict=True):
        b &= 31
        if n == 0:
            out.append(b if m >> b & 1 else 0xFFFFFFFF)
            continue
        order = range(b, 32) if n > 0 else range(b, -1, -1)
        found = [p for p in order if m >> p & 1]
        out.append(found[abs(n) - 1] if len(found) >= abs(n) else 0xFFFFFFFF)
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
    """(lanes, width) bits, the lowest first."""
    return np.unpackbits(np.ascontiguousarray(a).view(np.uint8).reshape(len(a), -1), axis=1, bitorder="little")


@runtime
def popc(a: Array) -> Array:
    return _bits(a).sum(axis=1, dtype=np.uint32)


@runtime
def clz(a: Array) -> Array:
    bits = _bits(a)[:, ::-1]
    return np.where(bits.any(axis=1), bits.argmax(axis=1), bits.shape[1]).astype(np.uint32)


@runtime
def brev(a: Array) -> Array:
    return np.packbits(_bits(a)[:, ::-1], axis=1, bitorder="little").view(a.dtype)[:, 0]


@runtime
def bfind(a: Array, shift_amount: bool) -> Array:
    raw = np.where(a < 0, ~a, a).view(unsigned_dtype(a)) if a.dtype.kind == "i" else a
    width = np.uint32(8 * a.dtype.itemsize - 1)
    place = width - clz(raw)
    return np.where(raw == 0, np.uint32(0xFFFFFFFF), width - place if shift_amount else place)


@emitter("selp")
def selp(e: SegmentWriter, i: Instruction) -> None:
    operands(e, i, 4)
    code = kind(e, i)
    a, b = (e.src(o, code) for o in i.operands[1:3])
    e.dst(i.operands[0], f"where({e.src(i.operands[3], 'pred')}, {a}, {b})", code)


@emitter("slct")
def slct(e: SegmentWriter, i: Instruction) -> None:
    code, test = kind(e, i, -2), kind(e, i)
    a, b = (e.src(o, code) for o in i.operands[1:3])
    e.dst(i.operands[0], f"where({e.src(i.operands[3], test)} >= 0, {a}, {b})", code)


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
    """dp4a: four 8-bit products; dp2a: two 16-bit by 8-bit products with the low or high half of b."""
    b8 = b.view(np.int8 if signed[1] else np.uint8).reshape(-1, 4).astype(np.int64)
    if form == "4":
        a8 = a.view(np.int8 if signed[0] else np.uint8).reshape(-1, 4).astype(np.int64)
        return (a8 * b8).sum(axis=1)
    a16 = a.view(np.int16 if signed[0] else np.uint16).reshape(-1, 2).astype(np.int64)
    return (a16 * (b8[:, 2:] if form == "hi" else b8[:, :2])).sum(axis=1)


@emitter("cvta")
def cvta(e: SegmentWriter, i: Instruction) -> None:
    """Addresses to and from the generic window of a state space."""
    spaces = {p.split("::")[0] for p in i.parts[1:]} & {"global", "shared", "local", "const", "param"}
    e.need(len(spaces) == 1, "cvta needs one state space")
    (space,) = spaces
    value = e.src(i.operands[1], "u64")
    base = {"shared": 1 << 60, "local": 1 << 61}.get(space, 0)
    if base:
        value = f"{value} {'-' if 'to' in i.parts else '+'} {e.splat(base, 'u64')}"
    e.dst(i.operands[0], value, "u64")


@emitter("isspacep")
def isspacep(e: SegmentWriter, i: Instruction) -> None:
    e.dst(i.operands[0], f"w.is_space({i.parts[1]!r}, {e.src(i.operands[1], 'u64')})", "pred")


@emitter("mapa", "getctarank")
def cluster_address(e: SegmentWriter, i: Instruction) -> None:
    """Shared addresses carry the rank of their block in bits 24 and up."""
    code = kind(e, i)
    address = e.src(i.operands[1], code)
    if i.parts[0] == "getctarank":
        shifted = f"(({address} >> {e.splat(24, code)}) & {e.splat(0xFF, code)})"
        e.dst(i.operands[0], e.convert(shifted, code, "u32"), "u32")
        return
    keep = e.splat(~(0xFF << 24), code)
    rank = e.convert(e.src(i.operands[2], "u32"), "u32", code)
    e.dst(i.operands[0], f"({address} & {keep}) | ({rank} << {e.splat(24, code)})", code)


def is_register(operand: object) -> bool:
    return isinstance(operand, Reg)
