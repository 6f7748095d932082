"""setp, set and cvt. Source: PTX ISA, "Comparison and Selection Instructions", "cvt", "cvt.pack"."""

from __future__ import annotations

import numpy as np

from cudatma.emulator.model import Instruction, Pair, Reg
from cudatma.emulator.ops_integer import kind
from cudatma.emulator.types import BYTES, CODES, NUMPY, Array, unsigned
from cudatma.emulator.writer import RUNTIME, SegmentWriter, emitter, runtime

RUNTIME.update(maximum=np.maximum, isnan=np.isnan, isinf=np.isinf, isfinite=np.isfinite, concatenate=np.concatenate)

_ORDERED = {"eq": "==", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "lo": "<", "ls": "<=", "hi": ">", "hs": ">="}
_INVERSE = {"equ": "!=", "neu": "==", "ltu": ">=", "leu": ">", "gtu": "<=", "geu": "<"}


@runtime
def smallest_normal(name: str) -> float:
    return float(np.finfo(name).smallest_normal)


def _compare(e: SegmentWriter, operator: str, a: str, b: str, is_float: bool) -> str:
    if operator in _ORDERED:
        return f"({a} {_ORDERED[operator]} {b})"
    if operator == "ne":
        return f"(({a} < {b}) | ({a} > {b}))" if is_float else f"({a} != {b})"
    if operator == "neu":
        return f"({a} != {b})"
    if operator == "equ":
        return f"~(({a} < {b}) | ({a} > {b}))"
    if operator in _INVERSE:
        return f"~({a} {_INVERSE[operator]} {b})"
    if operator in ("num", "nan"):
        return f"{'~' if operator == 'num' else ''}(isnan({a}) | isnan({b}))"
    raise e.error(f"unknown comparison `.{operator}`")


def _sources(e: SegmentWriter, name: str, a: str, b: str) -> tuple[str, str, bool]:
    """Both operands as vectors that compare as their type does."""
    if name.startswith("f16"):
        return f"halves({a})", f"halves({b})", True
    if name.startswith("bf16"):
        return f"brains({a})", f"brains({b})", True
    return a, b, name in ("f32", "f64")


@emitter("setp")
def setp(e: SegmentWriter, i: Instruction) -> None:
    name, operator = i.parts[-1], i.parts[1]
    code = {"f16": "u16"}.get(name, kind(e, i))
    a, b = (e.temporary(e.src(o, code)) for o in i.operands[1:3])
    if "ftz" in i.parts and name == "f32":
        a, b = e.temporary(f"flush({a})"), e.temporary(f"flush({b})")
    if name == "pred":
        raise e.error("setp of predicates")
    first, second, is_float = _sources(e, name, a, b)
    if is_float and name not in ("f32", "f64"):
        first, second = e.temporary(first), e.temporary(second)
    text = _compare(e, operator, first, second, is_float)
    joiner = next((p for p in i.parts[2:] if p in ("and", "or", "xor")), "")
    to = i.operands[0]
    if name.endswith("x2"):
        both = e.temporary(text)
        if isinstance(to, Pair):
            e.dst(to.first, f"{both}[0::2]", "pred")
            e.dst(to.second, f"{both}[1::2]", "pred")
            return
        raise e.error("a packed setp needs two destinations")
    value = e.temporary(text) if isinstance(to, Pair) else text
    other = ""
    if joiner:
        other = f" {dict(zip(('and', 'or', 'xor'), '&|^', strict=True))[joiner]} {e.src(i.operands[3], 'pred')}"
    if isinstance(to, Pair):
        inverse = f"(~{value}){other}"
        e.dst(to.first, f"{value}{other}", "pred")
        e.dst(to.second, inverse, "pred")
    else:
        e.dst(to, f"{value}{other}", "pred")


@emitter("set")
def set_(e: SegmentWriter, i: Instruction) -> None:
    name, result = i.parts[-1], i.parts[-2]
    code = {"f16": "u16"}.get(name, kind(e, i))
    a, b = (e.temporary(e.src(o, code)) for o in i.operands[1:3])
    first, second, is_float = _sources(e, name, a, b)
    text = _compare(e, i.parts[1], first, second, is_float)
    joiner = next((p for p in i.parts[2:] if p in ("and", "or", "xor")), "")
    if joiner:
        text += f" {dict(zip(('and', 'or', 'xor'), '&|^', strict=True))[joiner]} {e.src(i.operands[3], 'pred')}"
    if result == "f32":
        e.dst(i.operands[0], f"({text}).astype(f32)", "f32")
    elif result in ("f16x2", "bf16x2"):
        one = 0x3C00 if result == "f16x2" else 0x3F80
        e.dst(i.operands[0], f"(({text}).astype(u16) * u16({one})).view(u32)", "u32")
    elif name.endswith("x2"):
        e.dst(i.operands[0], f"(({text}).astype(u16) * u16(65535)).view(u32)", "u32")
    elif result in ("f16", "bf16"):
        one = 0x3C00 if result == "f16" else 0x3F80
        e.dst(i.operands[0], f"({text}).astype(u16) * u16({one})", "u16")
    else:
        to = unsigned(CODES[result])
        e.dst(i.operands[0], f"where({text}, {e.splat(-1, to)}, {e.splat(0, to)})", to)


_FLOAT = {"f16": "float16", "f32": "float32", "f64": "float64"}
_INT_MODES = ("rni", "rzi", "rmi", "rpi")
_FP8X2 = ("e4m3x2", "e5m2x2")


@emitter("cvt")
def cvt(e: SegmentWriter, i: Instruction) -> None:
    """All conversions of scalars, packed halves, tf32 and 8-bit floats."""
    if i.parts[1] == "pack":
        _cvt_pack(e, i)
        return
    e.need(len(i.parts) >= 3, "cvt needs two types")
    to, source = i.parts[-2], i.parts[-1]
    mode = next((p for p in i.parts[1:-2] if p in ("rn", "rz", "rm", "rp", "rna", "rs")), "")
    e.need(mode != "rs", "stochastic rounding is not served")
    if to in ("f16x2", "bf16x2") and source == "f32":
        high, low = (_rounded(e, e.src(o, "f32"), to[:-2], mode, i) for o in i.operands[1:3])
        e.dst(i.operands[0], f"pack(({low}, {high}), u32)", "u32")
    elif to in _FP8X2 and source == "f32":
        high, low = (f"to_fp8({_relu(i, e.src(o, 'f32'))}, {to[:-2]!r})" for o in i.operands[1:3])
        e.dst(i.operands[0], f"pack(({low}, {high}), u16)", "u16")
    elif to in _FP8X2 and source in ("f16x2", "bf16x2"):
        wide = f"{'halves' if source == 'f16x2' else 'brains'}({e.src(i.operands[1], 'u32')}).astype(f32)"
        e.dst(i.operands[0], f"to_fp8({_relu(i, wide)}, {to[:-2]!r}).view(u16)", "u16")
    elif to == "f16x2" and source in _FP8X2:
        value = f"from_fp8({e.src(i.operands[1], 'u16')}, {source[:-2]!r}).astype(f16)"
        e.dst(i.operands[0], f"({_relu(i, value)}).view(u32)", "u32")
    elif to == "tf32":
        e.need(source == "f32", "tf32 comes from f32")
        value = _relu(i, e.src(i.operands[1], "f32"))
        e.dst(i.operands[0], f"to_tf32({value}, {mode!r})", "u32")
    else:
        _cvt_scalar(e, i, to, source, mode)


def _relu(i: Instruction, text: str) -> str:
    return f"relu({text})" if "relu" in i.parts else text


def _rounded(e: SegmentWriter, text: str, to: str, mode: str, i: Instruction) -> str:
    """float32 to the 16 bits of f16 or bf16."""
    text = _relu(i, text)
    if to == "f16":
        return f"float_to_float({text}, {mode!r}, 'float16').view(u16)"
    if mode == "rz":
        return f"({text}.view(u32) >> 16).astype(u16)"
    e.need(mode in ("rn", ""), f"bf16 with .{mode}")
    return f"to_bf16({text})"


def _cvt_scalar(e: SegmentWriter, i: Instruction, to: str, source: str, mode: str) -> None:
    e.need(to in CODES and source in CODES, "unknown conversion")
    operand = i.operands[1]
    if source == "bf16":
        text, code = f"brains({e.src(operand, 'u16')})", "f32"
    else:
        code = CODES[source]
        if source in _FLOAT and isinstance(operand, Reg) and BYTES[e.classes[operand.index]] > BYTES[code]:
            text = f"{e.src(operand, unsigned(code))}.view({code})"
        else:
            text = e.src(operand, code)
    if "ftz" in i.parts and code == "f32":
        text = f"flush({text})"
    whole = next((p for p in i.parts[1:-2] if p in _INT_MODES), "")
    if to in _FLOAT or to == "bf16":
        _to_float(e, i, text, code, to, mode, whole)
    elif code in _FLOAT:
        result = CODES[to]
        rounded = whole or "rzi"
        value = f"float_to_int({text}, {rounded!r}, {NUMPY[result].name!r})"
        e.dst(i.operands[0], value, result)
    else:
        result = CODES[to]
        value = f"clamp_int({text}, {NUMPY[result].name!r})" if "sat" in i.parts else f"{text}.astype({result})"
        e.dst(i.operands[0], value, result)


def _to_float(e: SegmentWriter, i: Instruction, text: str, code: str, to: str, mode: str, whole: str) -> None:
    name = "float32" if to == "bf16" else _FLOAT[to]
    if code in _FLOAT:
        if whole:
            text = f"round_to_integral({text}, {whole!r})"
        if name != _FLOAT[code]:
            text = f"float_to_float({text}, {mode!r}, {name!r})"
    else:
        text = f"int_to_float({text}, {mode!r}, {name!r})"
    if "sat" in i.parts:
        text = f"clamp01({text})"
    text = _relu(i, text)
    if to == "bf16":
        e.dst(i.operands[0], _rounded(e, text, "bf16", mode, i) if code in _FLOAT else f"to_bf16({text})", "u16")
        return
    if "ftz" in i.parts and to == "f32":
        text = f"flush({text})"
    e.dst(i.operands[0], text, to)


@runtime
def clamp_int(a: Array, to: str) -> Array:
    """Saturating integer conversion."""
    info = np.iinfo(to)
    low = max(int(info.min), int(np.iinfo(a.dtype).min))
    high = min(int(info.max), int(np.iinfo(a.dtype).max))
    return np.clip(a, a.dtype.type(low), a.dtype.type(high)).astype(to)


def _cvt_pack(e: SegmentWriter, i: Instruction) -> None:
    """cvt.pack.sat.{u16,s16}.s32 d, a, b and cvt.pack.sat.{u8,s8,...}.s32.b32 d, a, b, c: a in the upper part."""
    to = CODES[i.parts[3]]
    e.need(to in ("u16", "i16", "u8", "i8"), "cvt.pack to 4 and 2 bits is not served")
    a, b = (f"clamp_int({e.src(o, 'i32')}, {NUMPY[to].name!r})" for o in i.operands[1:3])
    if len(i.operands) == 3:
        e.dst(i.operands[0], f"pack(({b}, {a}), u32)", "u32")
    else:
        c = e.src(i.operands[3], "u32")
        low = e.splat(16, "u32")
        e.dst(i.operands[0], f"({c} << {low}) | pack(({b}, {a}), u16).astype(u32)", "u32")
