"""Emitters for cvt and cvt.pack.

Source: PTX ISA, "cvt", "cvt.pack", "Alternate Floating-Point Data Formats".
"""

from __future__ import annotations

import cudatma.emulator.arithmetic.conversions  # noqa: F401  (run-time helpers)
from cudatma.emulator.arithmetic.conversions import FORMATS
from cudatma.emulator.ptx.model import Instruction, Operand, Reg, Vec
from cudatma.emulator.ptx.types import BYTES, CODES, NUMPY
from cudatma.emulator.ptx.writer import SegmentWriter, emitter

_MODES = ("rn", "rz", "rm", "rp", "rna", "rs")
_INT_MODES = ("rni", "rzi", "rmi", "rpi")
_PAIRS = ("f16x2", "bf16x2")
_SMALL = {f"{name}{count}": name for name in FORMATS if name not in ("f16", "bf16") for count in ("x2", "x4")}


@emitter("cvt")
def cvt(e: SegmentWriter, i: Instruction) -> None:
    """Emit code for conversions of scalars, packed 16-bit floats, tf32, floats of 8, 6 and 4 bits, ue8m0 and s2f6."""
    if i.parts[1] == "pack":
        _cvt_pack(e, i)
        return
    e.need(len(i.parts) >= 3, "cvt must have two types")
    to, source = i.parts[-2], i.parts[-1]
    if to == "tf32":
        e.need(source == "f32", "the source of a conversion to tf32 must be f32")
        value = _relu(i, e.src(i.operands[1], "f32"))
        e.dst(i.operands[0], f"to_tf32({value}, {_mode(i)!r}, {'satfinite' in i.parts})", "u32")
    elif "s2f6x2" in (to, source):
        _fixed_point(e, i, to, source)
    elif to == "ue8m0x2":
        high, low = _parts(e, i, source)
        tail = f"{_mode(i)!r}, {'satfinite' in i.parts}"
        e.dst(i.operands[0], f"pack((to_ue8m0({low}, {tail}), to_ue8m0({high}, {tail})), u16)", "u16")
    elif source == "ue8m0x2":
        e.need(to == "bf16x2", "the result of a conversion from ue8m0x2 must be bf16x2")
        value = f"from_ue8m0(bytes_of_lanes({e.src(i.operands[1], 'u16')}))"
        e.dst(i.operands[0], f"to_bf16({value}).view(u32)", "u32")
    elif source in _SMALL:
        _from_small(e, i, to, source)
    elif to in _SMALL:
        _to_small(e, i, to, source)
    elif to in _PAIRS and source == "f32":
        _to_pair(e, i, to)
    else:
        _cvt_scalar(e, i, to, source)


def _mode(i: Instruction) -> str:
    return next((p for p in i.parts[1:-2] if p in _MODES), "")


def _relu(i: Instruction, text: str) -> str:
    return f"relu({text})" if "relu" in i.parts else text


def _parts(e: SegmentWriter, i: Instruction, source: str) -> tuple[str, str]:
    """Return the upper and lower values, from ``d, a, b`` with f32 sources or ``d, a`` with a packed source."""
    if source == "f32":
        high, low = (e.src(o, "f32") for o in i.operands[1:3])
        return _relu(i, high), _relu(i, low)
    e.need(source in _PAIRS, f"a conversion from .{source} is not supported")
    both = f"{'halves' if source == 'f16x2' else 'brains'}({e.src(i.operands[1], 'u32')})"
    both = e.temporary(_relu(i, both))
    return f"{both}[1::2]", f"{both}[0::2]"


def _random(e: SegmentWriter, operand: Operand, shift: int, bits: int) -> str:
    """Return an expression that converts a field of the .rs random bits to a fraction from 0 to 1."""
    mask = (1 << bits) - 1
    text = f"({e.src(operand, 'u32')} >> {e.splat(shift, 'u32')}) & {e.splat(mask, 'u32')}"
    return f"({text}) / {float(1 << bits)}"


def _to_pair(e: SegmentWriter, i: Instruction, to: str) -> None:
    name, mode, saturates = to[:-2], _mode(i), "satfinite" in i.parts
    high, low = _parts(e, i, "f32")
    if mode == "rs":
        bits = 13 if name == "f16" else 16
        texts = [
            f"encode({value}, {name!r}, 'rs', {saturates}, {_random(e, i.operands[3], shift, bits)})"
            for value, shift in ((low, 0), (high, 16))
        ]
    else:
        texts = [f"float_to_float({value}, {mode!r}, {name!r}, {saturates})" for value in (low, high)]
    e.dst(i.operands[0], f"pack(({texts[0]}, {texts[1]}), u32)", "u32")


def _to_small(e: SegmentWriter, i: Instruction, to: str, source: str) -> None:
    """Emit conversions of two or four values to 8, 6 or 4 bits each, clamped to the largest finite value."""
    name = _SMALL[to]
    if to.endswith("x4"):
        vector = i.operands[1]
        e.need(
            isinstance(vector, Vec) and len(vector.items) == 4 and _mode(i) == "rs", ".x4 requires {a, b, e, f} and .rs"
        )
        items = vector.items if isinstance(vector, Vec) else ()
        # First random bit and number of random bits of each item. Items a and b use the upper bits.
        places = ((24, 8), (8, 8), (16, 8), (0, 8)) if name == "e2m1" else ((16, 16), (16, 16), (0, 16), (0, 16))
        codes = [
            f"encode({_relu(i, e.src(item, 'f32'))}, {name!r}, 'rs', True, {_random(e, i.operands[2], *place)})"
            for item, place in zip(items, places, strict=True)
        ]
    else:
        codes = [f"encode({value}, {name!r}, 'rn', True)" for value in _parts(e, i, source)]
    codes.reverse()
    if name == "e2m1":
        joined = [f"join_nibbles({codes[k]}, {codes[k + 1]})" for k in range(0, len(codes), 2)]
        width = f"u{8 * len(joined)}"
        e.dst(i.operands[0], f"pack(({', '.join(joined)},), {width})", width)
        return
    narrow = ", ".join(f"{code}.astype(u8)" for code in codes)
    width = f"u{8 * len(codes)}"
    e.dst(i.operands[0], f"pack(({narrow}), {width})", width)


def _from_small(e: SegmentWriter, i: Instruction, to: str, source: str) -> None:
    e.need(to == "f16x2" and source.endswith("x2"), f"a conversion from .{source} to .{to} is not supported")
    name = _SMALL[source]
    if name == "e2m1":
        raw = f"nibbles({e.src(i.operands[1], 'u8')})"
    else:
        raw = f"bytes_of_lanes({e.src(i.operands[1], 'u16')})"
    e.dst(i.operands[0], f"canon16({_relu(i, f'decode({raw}, {name!r}).astype(f16)')}).view(u32)", "u32")


def _fixed_point(e: SegmentWriter, i: Instruction, to: str, source: str) -> None:
    """Emit conversions to s2f6 (divided by the scale factors) and from s2f6 (multiplied by the scale factors)."""
    scales = "None"
    if "scaled::n2::ue8m0" in i.parts:
        scales = e.temporary(f"from_ue8m0(bytes_of_lanes({e.src(i.operands[-1], 'u16')}))")
    relu = "relu" in i.parts
    if to == "s2f6x2":
        high, low = _parts(e, i, source)
        if scales != "None":
            high, low = f"({high} / {scales}[1::2])", f"({low} / {scales}[0::2])"
        e.dst(i.operands[0], f"pack((to_s2f6({low}, {relu}), to_s2f6({high}, {relu})), u16)", "u16")
        return
    e.need(to == "bf16x2", "the result of a conversion from s2f6x2 must be bf16x2")
    value = f"from_s2f6(bytes_of_lanes({e.src(i.operands[1], 'u16')}))"
    if scales != "None":
        value = f"({value} * {scales})"
    text = f"encode({_relu(i, value)}, 'bf16', 'rn', {'satfinite' in i.parts})"
    e.dst(i.operands[0], f"{text}.view(u32)", "u32")


def _cvt_scalar(e: SegmentWriter, i: Instruction, to: str, source: str) -> None:
    known = (*CODES, "bf16")
    e.need(
        to in known and source in known and not to.endswith("x2"),
        f"a conversion from .{source} to .{to} is not supported",
    )
    operand, code = i.operands[1], CODES[source]
    if source in ("f16", "bf16"):
        text = f"{'halves' if source == 'f16' else 'brains'}({e.src(operand, 'u16')})"
    elif source == "f32" and isinstance(operand, Reg) and BYTES[e.classes[operand.index]] > 4:
        text = f"{e.src(operand, 'u32')}.view(f32)"
    else:
        text = e.src(operand, code)
    is_float = source in ("f16", "bf16", "f32", "f64")
    if "ftz" in i.parts and source == "f32":
        text = f"flush({text})"
    if to in ("f16", "bf16", "f32", "f64"):
        _to_float(e, i, text, source, to)
        return
    result = CODES[to]
    if is_float:
        whole = next((p for p in i.parts[1:-2] if p in _INT_MODES), "rzi")
        value = f"float_to_int({text}, {whole!r}, {NUMPY[result].name!r})"
    else:
        value = f"clamp_int({text}, {NUMPY[result].name!r})" if "sat" in i.parts else f"{text}.astype({result})"
    e.dst(i.operands[0], value, result)


def _to_float(e: SegmentWriter, i: Instruction, text: str, source: str, to: str) -> None:
    """Emit a conversion to a float type (f16 and bf16 as bits), including integer rounding, .sat, .relu and .ftz."""
    raw, mode = {"f16": "u16", "bf16": "u16"}.get(to, to), _mode(i)
    whole = next((p for p in i.parts[1:-2] if p in _INT_MODES), "")
    if source not in ("f16", "bf16", "f32", "f64"):
        text = f"int_to_float({text}, {mode!r}, {to!r})"
        e.dst(i.operands[0], f"clamp01({text})" if "sat" in i.parts else text, raw)
        return
    if whole:
        text = f"round_to_integral({text}, {whole!r})"
    if "sat" in i.parts:
        text = f"clamp01({text})"
    text = _relu(i, text)
    if source != to:
        text = f"float_to_float({text}, {mode!r}, {to!r}, {'satfinite' in i.parts})"
    elif to == "f16":
        text = f"({text}).view(u16)"
    elif to == "bf16":
        text = f"to_bf16({text})"
    if "ftz" in i.parts and to == "f32":
        text = f"flush({text})"
    e.dst(i.operands[0], text, raw)


def _cvt_pack(e: SegmentWriter, i: Instruction) -> None:
    """Emit code for cvt.pack.sat.{u16,s16}.s32 d, a, b and cvt.pack.sat.{u8,s8,...}.s32.b32 d, a, b, c."""
    name = i.parts[3]
    e.need(name[1:] in ("2", "4", "8", "16") and name[0] in "us", f"cvt.pack to .{name} is not supported")
    a, b = (e.src(o, "i32") for o in i.operands[1:3])
    upper = e.src(i.operands[3], "u32") if len(i.operands) == 4 else e.splat(0, "u32")
    e.dst(i.operands[0], f"pack_fields({a}, {b}, {upper}, {int(name[1:])}, {name[0] == 's'})", "u32")
