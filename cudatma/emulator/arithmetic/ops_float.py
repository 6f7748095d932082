"""Emitters for float arithmetic and for opcodes that support both integers and floats.

Source: PTX ISA, "Floating Point Instructions", "Half Precision Floating Point Instructions", "Mixed Precision Floating
Point Instructions".
"""

from __future__ import annotations

import cudatma.emulator.arithmetic.numeric
import cudatma.emulator.arithmetic.rounding  # noqa: F401  (run-time helpers)
from cudatma.emulator.arithmetic.ops_integer import (
    kind,
    operands,
    write_add_sub,
    write_div_rem,
    write_extreme,
    write_mul_mad,
    write_sign,
)
from cudatma.emulator.ptx.model import Instruction, Operand
from cudatma.emulator.ptx.writer import SegmentWriter, emitter

_FLOATS = {"f16", "f32", "f64", "f16x2", "f32x2", "bf16", "bf16x2"}
_MODES = ("rn", "rz", "rm", "rp")
_SYMBOLS = {"add": "+", "sub": "-", "mul": "*"}


def rounding(i: Instruction) -> str:
    """Return the rounding mode in the opcode, or "rn" if there is none."""
    return next((p for p in i.parts[1:] if p in _MODES), "rn")


class Values:
    """Operands and result of a float instruction as expressions in the type of its arithmetic.

    f16 values are computed in float16, and bf16 values are computed in float32. Packed types become vectors of all
    their elements.
    """

    def __init__(self, e: SegmentWriter, i: Instruction) -> None:
        self.e, self.i, self.name = e, i, i.parts[-1]
        self.is_half, self.is_brain = self.name.startswith("f16"), self.name.startswith("bf16")
        self.is_small = self.is_half or self.is_brain
        self.raw = {"f64": "u64", "f32": "u32", "f32x2": "u64", "f16x2": "u32", "bf16x2": "u32"}.get(self.name, "u16")
        self.flushes = "ftz" in i.parts and self.name != "f64"

    def source(self, position: int) -> str:
        operand = self.i.operands[position]
        if self.name in ("f32", "f64"):
            text = self.e.src(operand, self.name)
        else:
            unpack = "halves" if self.is_half else "brains" if self.is_brain else "singles"
            text = f"{unpack}({self.e.src(operand, self.raw)})"
        return f"flush({text})" if self.flushes else text

    def sources(self) -> list[str]:
        return [self.source(position) for position in range(1, len(self.i.operands))]

    def store(self, text: str, is_canonical: bool = False) -> None:
        """Assign a result and apply .ftz, .sat and .relu. ``is_canonical`` is true if NaNs are already canonical."""
        parts = self.i.parts
        if not is_canonical and not self.is_brain and self.name != "f64":
            text = f"{'canon16' if self.is_half else 'canon'}({text})"
        if self.flushes:
            text = f"flush({text})"
        if "sat" in parts:
            text = f"clamp01({text})"
        if "relu" in parts:
            text = f"relu({text})"
        if self.is_brain:
            text = f"to_bf16({text})"
        if self.name in ("f32", "f64"):
            self.e.dst(self.i.operands[0], text, self.name)
        else:
            self.e.dst(self.i.operands[0], f"({text}).view({self.raw})", self.raw)


@emitter("add", "sub", "mul")
def arithmetic(e: SegmentWriter, i: Instruction) -> None:
    name, root = i.parts[-1], i.parts[0]
    if name not in _FLOATS:
        (write_mul_mad if root == "mul" else write_add_sub)(e, i)
        return
    operands(e, i, 3)
    if i.parts[-2] == "f32":
        _mixed(e, i)
        return
    v = Values(e, i)
    a, b = v.sources()
    mode, width = rounding(i), 64 if name == "f64" else 32
    if root == "mul" and v.is_brain:
        v.store(f"mul_brain({a}, {b})")
    elif mode != "rn":
        operation = "mul" if root == "mul" else "add"
        v.store(f"{operation}{width}_mode({a}, {'-' if root == 'sub' else ''}{b}, {mode!r})", True)
    else:
        v.store(f"{a} {_SYMBOLS[root]} {b}")


def _mixed(e: SegmentWriter, i: Instruction) -> None:
    """Emit code for {add,sub}.f32.f16 d, a, c and fma.f32.f16 d, a, b, c, and for the forms with bf16."""
    convert = {"f16": "halves({}).astype(f32)", "bf16": "brains({})"}
    e.need(i.parts[-1] in convert, f"f32 cannot be combined with .{i.parts[-1]}")
    small = [convert[i.parts[-1]].format(e.src(o, "u16")) for o in i.operands[1:-1]]
    last, mode = e.src(i.operands[-1], "f32"), rounding(i)
    if i.parts[0] == "fma":
        text = f"fma32_mode({small[0]}, {small[1]}, {last}, {mode!r})"
    else:
        text = f"add32_mode({small[0]}, {'-' if i.parts[0] == 'sub' else ''}{last}, {mode!r})"
    e.dst(i.operands[0], f"clamp01({text})" if "sat" in i.parts else text, "f32")


@emitter("fma", "mad", "madc")
def fma(e: SegmentWriter, i: Instruction) -> None:
    name = i.parts[-1]
    if name not in _FLOATS:
        write_mul_mad(e, i)
        return
    operands(e, i, 4)
    if i.parts[-2] == "f32":
        _mixed(e, i)
        return
    v, mode = Values(e, i), rounding(i)
    a, b, c = v.sources()
    if v.is_small:
        text = f"{'fma16' if v.is_half else 'fma_brain'}({a}, {b}, {c})"
        if "oob" in i.parts:
            raw = ", ".join(e.src(o, v.raw) for o in i.operands[1:])
            text = f"oob_zero({text}, {raw})"
    else:
        function = "fma64" if name == "f64" else "fma32"
        text = f"{function}({a}, {b}, {c})" if mode == "rn" else f"{function}_mode({a}, {b}, {c}, {mode!r})"
    v.store(text, True)


@emitter("neg", "abs")
def sign(e: SegmentWriter, i: Instruction) -> None:
    """Emit code for neg and abs, which change only the sign bits of floats."""
    operands(e, i, 2)
    if i.parts[-1] not in _FLOATS:
        write_sign(e, i)
        return
    v = Values(e, i)
    bit = {"u64": 1 << 63, "u32": 1 << 31, "u16": 0x8000}[v.raw]
    bit = 0x80008000 if v.name in ("f16x2", "bf16x2") else bit
    text = f"({v.source(1)}).view({v.raw})" if v.flushes else e.src(i.operands[1], v.raw)
    text = f"{text} ^ {e.splat(bit, v.raw)}" if i.parts[0] == "neg" else f"{text} & {e.splat(~bit, v.raw)}"
    e.dst(i.operands[0], text, v.raw)


@emitter("min", "max")
def extreme(e: SegmentWriter, i: Instruction) -> None:
    """Emit code for min and max of two operands (three for f32), with .NaN, .abs and .xorsign.abs."""
    if i.parts[-1] not in _FLOATS:
        write_extreme(e, i)
        return
    e.need(len(i.operands) in (3, 4), "the instruction must have two or three sources")
    v = Values(e, i)
    function = ("larger" if i.parts[0] == "max" else "smaller") + ("_nan" if "NaN" in i.parts else "")
    values = [e.temporary(text) for text in v.sources()]
    used = [f"abs({value})" for value in values] if "abs" in i.parts else values
    text = used[0]
    for value in used[1:]:
        text = f"{function}({text}, {value})"
    if "xorsign" in i.parts:
        text = f"xor_sign({text}, {values[0]}, {values[1]})"
    v.store(text)


@emitter("rcp", "sqrt", "rsqrt", "sin", "cos", "lg2", "ex2", "tanh")
def special(e: SegmentWriter, i: Instruction) -> None:
    """Emit code for the special functions. rcp and sqrt also have rounding modes."""
    operands(e, i, 2)
    v, root, mode = Values(e, i), i.parts[0], rounding(i)
    a = v.source(1)
    if v.name == "f64" and "ftz" in i.parts:
        v.store(f"upper_word({root!r}, {a})")
    elif root == "sqrt" and mode != "rn":
        v.store(f"sqrt{64 if v.name == 'f64' else 32}_mode({a}, {mode!r})", True)
    elif root == "rcp" and mode != "rn":
        one = e.splat(0x3FF0000000000000 if v.name == "f64" else 0x3F800000, v.name)
        v.store(f"div{64 if v.name == 'f64' else 32}_mode({one}, {a}, {mode!r})", True)
    else:
        v.store(f"special_function({root!r}, {a})")


@emitter("div")
def div(e: SegmentWriter, i: Instruction) -> None:
    """Emit code for div of integers and floats. For floats, .rn and .full round the quotient to nearest."""
    operands(e, i, 3)
    if not kind(e, i).startswith("f"):
        write_div_rem(e, i)
        return
    v, mode = Values(e, i), rounding(i)
    a, b = v.sources()
    if mode != "rn":
        v.store(f"div{64 if v.name == 'f64' else 32}_mode({a}, {b}, {mode!r})", True)
    elif "approx" in i.parts:
        v.store(f"div32_approx({a}, {b})", True)
    else:
        v.store(f"{a} / {b}")


def _bits(e: SegmentWriter, operand: Operand, name: str) -> str:
    return e.src(operand, "u32" if name == "f32" else "u64")


@emitter("copysign")
def copysign(e: SegmentWriter, i: Instruction) -> None:
    """Emit code for copysign. The result has the sign of ``a`` and the magnitude of ``b``."""
    name = i.parts[-1]
    raw, bit = ("u32", 1 << 31) if name == "f32" else ("u64", 1 << 63)
    a, b = (_bits(e, o, name) for o in i.operands[1:3])
    e.dst(i.operands[0], f"({a} & {e.splat(bit, raw)}) | ({b} & {e.splat(~bit, raw)})", raw)


@emitter("testp")
def testp(e: SegmentWriter, i: Instruction) -> None:
    a = e.temporary(e.src(i.operands[1], i.parts[-1]))
    tiny = "float32" if kind(e, i) == "f32" else "float64"
    text = {
        "finite": f"isfinite({a})",
        "infinite": f"isinf({a})",
        "number": f"~isnan({a})",
        "notanumber": f"isnan({a})",
        "normal": f"isfinite({a}) & (abs({a}) >= smallest_normal({tiny!r}))",
        "subnormal": f"({a} != 0) & (abs({a}) < smallest_normal({tiny!r}))",
    }
    e.need(i.parts[1] in text, "the test is not supported")
    e.dst(i.operands[0], text[i.parts[1]], "pred")
