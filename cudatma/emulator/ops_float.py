"""Float arithmetic instructions, and those that integers and floats share: add, sub, mul, mad, neg, abs, min, max.

Source: PTX ISA, "Floating Point Instructions", "Half Precision Floating Point Instructions".
"""

from __future__ import annotations

from cudatma.emulator.model import Instruction
from cudatma.emulator.ops_integer import kind, operands, write_add_sub, write_mul_mad
from cudatma.emulator.writer import SegmentWriter, emitter

_FLOATS = {"f16", "f32", "f64", "f16x2", "bf16", "bf16x2"}
_PAIRS = {"u16x2": "u16", "s16x2": "i16"}
_MODES = ("rn", "rz", "rm", "rp")


def rounding(i: Instruction) -> str:
    """The rounding mode named by the opcode, "rn" where none is."""
    return next((p for p in i.parts[1:] if p in _MODES), "rn")


def _small(e: SegmentWriter, i: Instruction, position: int) -> str:
    """A half-precision operand as a vector that arithmetic works on: float16, or float32 for bf16."""
    name = i.parts[-1]
    code = "u32" if name.endswith("x2") else "u16"
    return f"{'halves' if name.startswith('f16') else 'brains'}({e.src(i.operands[position], code)})"


def _store_small(e: SegmentWriter, i: Instruction, text: str) -> None:
    """Assign a float16 vector (or float32 one holding bf16 values to be rounded), with .relu and .sat."""
    name = i.parts[-1]
    code = "u32" if name.endswith("x2") else "u16"
    if "sat" in i.parts:
        text = f"clamp01({text})"
    if "relu" in i.parts:
        text = f"relu({text})"
    e.dst(i.operands[0], f"({text}).view({code})" if name.startswith("f16") else f"to_bf16({text}).view({code})", code)


def _finish(e: SegmentWriter, i: Instruction, text: str, code: str) -> None:
    """Assign an f32 or f64 result, with .sat and .ftz."""
    if "ftz" in i.parts and code == "f32":
        text = f"flush({text})"
    if "sat" in i.parts:
        text = f"clamp01({text})"
    if "relu" in i.parts:
        text = f"relu({text})"
    e.dst(i.operands[0], text, code)


def _source(e: SegmentWriter, i: Instruction, position: int, code: str) -> str:
    text = e.src(i.operands[position], code)
    return f"flush({text})" if "ftz" in i.parts and code == "f32" else text


@emitter("add", "sub", "mul")
def arithmetic(e: SegmentWriter, i: Instruction) -> None:
    name, root = i.parts[-1], i.parts[0]
    if name in _PAIRS:
        e.need(root != "mul", "packed integers are not multiplied")
        a, b = (f"pairs({e.src(o, 'u32')}, {_PAIRS[name]})" for o in i.operands[1:3])
        e.dst(i.operands[0], f"({a} {'+' if root == 'add' else '-'} {b}).view(u32)", "u32")
        return
    if name not in _FLOATS:
        (write_mul_mad if root == "mul" else write_add_sub)(e, i)
        return
    operands(e, i, 3)
    symbol = {"add": "+", "sub": "-", "mul": "*"}[root]
    mode = rounding(i)
    if name not in ("f32", "f64"):
        _store_small(e, i, f"{_small(e, i, 1)} {symbol} {_small(e, i, 2)}")
        return
    if name == "f32" and len(i.parts) > 2 and i.parts[-2] == "f32":
        raise e.error("mixed-precision arithmetic is not served")
    a, b = _source(e, i, 1, name), _source(e, i, 2, name)
    if mode != "rn":
        e.need(name == "f32", f".{mode} of f64 is not served")
        text = (
            f"mul32_mode({a}, {b}, {mode!r})"
            if root == "mul"
            else (f"add32_mode({a}, {'-' if root == 'sub' else ''}{b}, {mode!r})")
        )
    else:
        text = f"{a} {symbol} {b}"
    _finish(e, i, text, name)


@emitter("fma", "mad")
def fma(e: SegmentWriter, i: Instruction) -> None:
    name = i.parts[-1]
    if name not in _FLOATS:
        write_mul_mad(e, i)
        return
    operands(e, i, 4)
    if name in ("f32", "f64"):
        a, b, c = (_source(e, i, p, name) for p in (1, 2, 3))
        mode = rounding(i)
        if name == "f64":
            e.need(mode == "rn", f".{mode} of f64 is not served")
            text = f"fma64({a}, {b}, {c})"
        else:
            text = f"fma32({a}, {b}, {c})" if mode == "rn" else f"fma32_mode({a}, {b}, {c}, {mode!r})"
        _finish(e, i, text, name)
        return
    function = "fma16" if name.startswith("f16") else "fma_brain"
    _store_small(e, i, f"{function}({_small(e, i, 1)}, {_small(e, i, 2)}, {_small(e, i, 3)})")


@emitter("neg", "abs")
def sign(e: SegmentWriter, i: Instruction) -> None:
    """Of floats: the sign bits alone are changed."""
    operands(e, i, 2)
    name = i.parts[-1]
    code = kind(e, i)
    if name not in _FLOATS:
        text = e.src(i.operands[1], code)
        e.dst(i.operands[0], f"-{text}" if i.parts[0] == "neg" else f"abs({text})", code)
        return
    raw = {"f64": "u64", "f32": "u32", "f16x2": "u32", "bf16x2": "u32"}.get(name, "u16")
    bit = {"f64": 1 << 63, "f32": 1 << 31, "f16x2": 0x80008000, "bf16x2": 0x80008000}.get(name, 0x8000)
    text = e.convert(_source(e, i, 1, code), code, raw)
    text = f"{text} ^ {e.splat(bit, raw)}" if i.parts[0] == "neg" else f"{text} & {e.splat(~bit, raw)}"
    e.dst(i.operands[0], text, raw)


@emitter("min", "max")
def extreme(e: SegmentWriter, i: Instruction) -> None:
    name = i.parts[-1]
    wide = i.parts[0] == "max"
    count = len(i.operands)
    if name not in _FLOATS:
        if name in _PAIRS:
            a, b = (f"pairs({e.src(o, 'u32')}, {_PAIRS[name]})" for o in i.operands[1:3])
            least = f"maximum({'maximum' if wide else 'minimum'}({a}, {b}), {_PAIRS[name]}(0))"
            text = least if "relu" in i.parts else f"{'maximum' if wide else 'minimum'}({a}, {b})"
            e.dst(i.operands[0], f"{text}.view(u32)", "u32")
            return
        code = kind(e, i)
        a, b = (e.src(o, code) for o in i.operands[1:3])
        text = f"{'maximum' if wide else 'minimum'}({a}, {b})"
        e.dst(i.operands[0], f"maximum({text}, {e.splat(0, code)})" if "relu" in i.parts else text, code)
        return
    function = ("larger" if wide else "smaller") + ("_nan" if "NaN" in i.parts else "")
    small = name not in ("f32", "f64")
    values = [_small(e, i, p) if small else _source(e, i, p, name) for p in range(1, count)]
    text = values[0]
    for value in values[1:]:
        text = f"{function}({text}, {value})"
    if "xorsign" in i.parts:
        raise e.error(".xorsign is not served")
    (_store_small(e, i, text) if small else _finish(e, i, text, name))


@emitter("rcp", "sqrt", "rsqrt", "sin", "cos", "lg2", "ex2", "tanh")
def special(e: SegmentWriter, i: Instruction) -> None:
    """Special functions; sqrt and rcp in rounding modes are correctly rounded to nearest only."""
    operands(e, i, 2)
    name = i.parts[-1]
    e.need(rounding(i) == "rn", "only .rn and .approx are served")
    root = i.parts[0]
    if name in ("f32", "f64"):
        a = _source(e, i, 1, name)
        _finish(e, i, f"special_function({root!r}, {a})", name)
    else:
        _store_small(e, i, f"special_function({root!r}, {_small(e, i, 1)})")


def write_float_div(e: SegmentWriter, i: Instruction) -> None:
    """div of floats: .rn, .full and .approx all give the quotient to nearest."""
    name = i.parts[-1]
    e.need(rounding(i) == "rn", "only .rn, .full and .approx are served")
    _finish(e, i, f"{_source(e, i, 1, name)} / {_source(e, i, 2, name)}", name)


@emitter("copysign")
def copysign(e: SegmentWriter, i: Instruction) -> None:
    """d takes the sign of a and the magnitude of b."""
    name = i.parts[-1]
    raw = "u32" if name == "f32" else "u64"
    bit = 1 << (31 if name == "f32" else 63)
    a, b = (e.src(o, raw) for o in i.operands[1:3])
    e.dst(i.operands[0], f"({a} & {e.splat(bit, raw)}) | ({b} & {e.splat(~bit, raw)})", raw)


@emitter("testp")
def testp(e: SegmentWriter, i: Instruction) -> None:
    a = e.temporary(e.src(i.operands[1], i.parts[-1]))
    tiny = "float32" if i.parts[-1] == "f32" else "float64"
    text = {
        "finite": f"isfinite({a})",
        "infinite": f"isinf({a})",
        "number": f"~isnan({a})",
        "notanumber": f"isnan({a})",
        "normal": f"isfinite({a}) & (abs({a}) >= smallest_normal({tiny!r}))",
        "subnormal": f"({a} != 0) & (abs({a}) < smallest_normal({tiny!r}))",
    }
    e.need(i.parts[1] in text, "unknown test")
    e.dst(i.operands[0], text[i.parts[1]], "pred")
