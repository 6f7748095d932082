"""setp and set. Source: PTX ISA, "Comparison and Selection Instructions", "Half Precision Comparison Instructions"."""

from __future__ import annotations

import numpy as np

from cudatma.emulator.arithmetic.ops_integer import kind
from cudatma.emulator.ptx.model import Instruction, Pair
from cudatma.emulator.ptx.types import CODES, unsigned
from cudatma.emulator.ptx.writer import RUNTIME, SegmentWriter, emitter, runtime

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
    raise e.error(f"unknown comparison `.{operator}`")


_JOIN = {"and": "&", "or": "|", "xor": "^"}
_ONES = {"f16": 0x3C00, "f16x2": 0x3C00, "bf16": 0x3F80, "bf16x2": 0x3F80}


def _compared(e: SegmentWriter, i: Instruction) -> str:
    """The truth of a comparison, of every part of packed operands."""
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
    """`` & c`` and the like: what .and, .or, .xor combine a comparison with; packed parts get the same."""
    joiner = next((p for p in i.parts[2:-1] if p in _JOIN), "")
    if not joiner:
        return ""
    other = e.src(i.operands[3], "pred")
    return f" {_JOIN[joiner]} {other}"


@emitter("setp")
def setp(e: SegmentWriter, i: Instruction) -> None:
    """p|q: the comparison and its inverse, or of packed halves the low and the high one."""
    to, is_packed = i.operands[0], i.parts[-1].endswith("x2")
    text, other = _compared(e, i), _joined(e, i)
    if not isinstance(to, Pair):
        e.need(not is_packed, "a packed setp needs two destinations")
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
    """1.0 in float results, all bits in integer ones."""
    name, result = i.parts[-1], i.parts[-2]
    text, other = _compared(e, i), _joined(e, i)
    if name.endswith("x2"):
        text = f"({text}){f'{other[:2]} np_repeat({other[3:]}, 2)' if other else ''}"
        e.dst(i.operands[0], f"({text} * u16({_ONES.get(result, 0xFFFF)})).view(u32)", "u32")
        return
    to = unsigned(CODES[result])
    one = {"f32": 0x3F800000, **_ONES}.get(result, -1)
    e.dst(i.operands[0], f"where(({text}){other}, {e.splat(one, to)}, {e.splat(0, to)})", to)
