"""Emitters for mov, selections, addresses and comparisons.

Source: PTX ISA, "mov", "cvta", "isspacep", "mapa", "getctarank", "Comparison and Selection Instructions", "Half
Precision Comparison Instructions".
"""

from __future__ import annotations

import numpy as np

from cudatma.emulator.arithmetic.ops_integer import kind, operands
from cudatma.emulator.ptx.model import Instruction, Pair, Sink, Sym, Vec
from cudatma.emulator.ptx.types import BYTES, CODES, Array, unsigned
from cudatma.emulator.ptx.writer import RUNTIME, SegmentWriter, emitter, runtime


@emitter("mov")
def mov(e: SegmentWriter, i: Instruction) -> None:
    operands(e, i, 2)
    code = kind(e, i)
    to, source = i.operands
    if isinstance(source, Vec) and len(source.items) > 1:
        parts = [e.src(item, f"u{8 * BYTES[code] // len(source.items)}") for item in source.items]
        if code == "b128":
            e.need(len(parts) == 2, "mov.b128 must have two halves")
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
    """Pack vectors of narrow elements into one vector of wider elements. The first vector provides the lowest bits."""
    return np.stack(parts, axis=1).view(to)[:, 0]


@runtime
def pack128(low: Array, high: Array) -> Array:
    return np.stack((low, high))


@runtime
def unpack(value: Array, to: type, count: int) -> Array:
    """Split each element into narrow parts. result[k] contains the k-th lowest part of all lanes."""
    result: Array = np.ascontiguousarray(value).view(to).reshape(len(value), count).T
    return result


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
    value = e.src(i.operands[3], test)
    if "ftz" in i.parts:
        value = f"flush({value})"
    e.dst(i.operands[0], f"where({value} >= 0, {a}, {b})", code)


@emitter("cvta")
def cvta(e: SegmentWriter, i: Instruction) -> None:
    """Emit conversions of addresses to and from the generic window of a state space."""
    spaces = {p.split("::")[0] for p in i.parts[1:]} & {"global", "shared", "local", "const", "param"}
    e.need(len(spaces) == 1, "cvta must have one state space")
    (space,) = spaces
    value = e.src(i.operands[1], "u64")
    base = {"shared": 1 << 60, "local": 1 << 61}.get(space, 0)
    shift = e.splat(base, "u64") if base else "w.launch.param_shift" if space == "param" else ""
    if shift:
        value = f"{value} {'-' if 'to' in i.parts else '+'} {shift}"
    e.dst(i.operands[0], value, "u64")


@emitter("isspacep")
def isspacep(e: SegmentWriter, i: Instruction) -> None:
    e.dst(i.operands[0], f"w.is_space({i.parts[1]!r}, {e.src(i.operands[1], 'u64')})", "pred")


@emitter("mapa", "getctarank")
def cluster_address(e: SegmentWriter, i: Instruction) -> None:
    """Emit code for mapa and getctarank. Bits 24 and up of a shared-memory address contain the rank of the CTA."""
    code = kind(e, i)
    address = e.src(i.operands[1], code)
    if i.parts[0] == "getctarank":
        shifted = f"(({address} >> {e.splat(24, code)}) & {e.splat(0xFF, code)})"
        e.dst(i.operands[0], e.convert(shifted, code, "u32"), "u32")
        return
    keep = e.splat(~(0xFF << 24), code)
    rank = e.convert(e.src(i.operands[2], "u32"), "u32", code)
    e.dst(i.operands[0], f"({address} & {keep}) | ({rank} << {e.splat(24, code)})", code)


RUNTIME.update(maximum=np.maximum, isnan=np.isnan, isinf=np.isinf, isfinite=np.isfinite, np_repeat=np.repeat)

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
    raise e.error(f"comparison `.{operator}` is not supported")


_JOIN = {"and": "&", "or": "|", "xor": "^"}
_ONES = {"f16": 0x3C00, "f16x2": 0x3C00, "bf16": 0x3F80, "bf16x2": 0x3F80}


def _compared(e: SegmentWriter, i: Instruction) -> str:
    """Return an expression for a comparison, which is elementwise for packed operands."""
    name = i.parts[-1]
    code = {"f16": "u16"}.get(name, kind(e, i))
    texts = [e.src(o, code) for o in i.operands[1:3]]
    if name.startswith(("f16", "bf16")):
        texts = [f"{'halves' if name.startswith('f16') else 'brains'}({text})" for text in texts]
    if "ftz" in i.parts and name in ("f16", "f16x2", "f32"):
        texts = [f"flush({text})" for text in texts]
    a, b = (e.temporary(text) for text in texts)
    return _compare(e, i.parts[1], a, b, name.startswith("bf16") or name[0] == "f")


def _joined(e: SegmentWriter, i: Instruction) -> str:
    """Return the suffix that combines a comparison, or each packed part, with a predicate (`` & c`` for .and)."""
    joiner = next((p for p in i.parts[2:-1] if p in _JOIN), "")
    if not joiner:
        return ""
    other = e.src(i.operands[3], "pred")
    return f" {_JOIN[joiner]} {other}"


@emitter("setp")
def setp(e: SegmentWriter, i: Instruction) -> None:
    """Emit code for setp.

    The destination p|q receives the comparison and its inverse, or the low and high results of packed operands.
    """
    to, is_packed = i.operands[0], i.parts[-1].endswith("x2")
    text, other = _compared(e, i), _joined(e, i)
    if not isinstance(to, Pair):
        e.need(not is_packed, "a packed setp must have two destinations")
        e.dst(to, f"{text}{other}", "pred")
        return
    value = e.temporary(text)
    if is_packed:
        results = (f"{value}[0::2]{other}", f"{value}[1::2]{other}")
    else:
        results = (f"{value}{other}", f"(~{value}){other}")
    named = [e.temporary(result) for result in results]
    for target, result in zip((to.first, to.second), named, strict=True):
        e.dst(target, result, "pred")


@emitter("set")
def set_(e: SegmentWriter, i: Instruction) -> None:
    """Emit code for set. True is 1.0 in a float result. It sets all bits of an integer result."""
    name, result = i.parts[-1], i.parts[-2]
    text, other = _compared(e, i), _joined(e, i)
    if name.endswith("x2"):
        text = f"({text}){f'{other[:2]} np_repeat({other[3:]}, 2)' if other else ''}"
        e.dst(i.operands[0], f"({text} * u16({_ONES.get(result, 0xFFFF)})).view(u32)", "u32")
        return
    to = unsigned(CODES[result])
    one = {"f32": 0x3F800000, **_ONES}.get(result, -1)
    e.dst(i.operands[0], f"where(({text}){other}, {e.splat(one, to)}, {e.splat(0, to)})", to)
