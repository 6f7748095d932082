"""Emitters for video instructions on scalars (vadd, vmad, ...) and on 2 half-words or 4 bytes (vadd2, vadd4, ...).

Source: PTX ISA, "Scalar Video Instructions", "SIMD Video Instructions".
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from cudatma.emulator.ptx.model import Instruction, Operand, Part
from cudatma.emulator.ptx.types import Array
from cudatma.emulator.ptx.writer import SegmentWriter, emitter, runtime

_OPCODE = re.compile(r"v(add|sub|avrg|absdiff|min|max|shl|shr|mad|set)([24]?)$")
_COMPARE = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater}
_COMPARE["ge"] = np.greater_equal
_SECOND = ("add", "min", "max")


def _average(a: Array, b: Array) -> Array:
    total = a + b
    return (total + (total >= 0)) >> 1


_OPERATIONS: dict[str, Callable[[Array, Array], Array]] = {
    "add": np.add,
    "sub": np.subtract,
    "avrg": _average,
    "absdiff": lambda a, b: np.abs(a - b),
    "min": np.minimum,
    "max": np.maximum,
    "shl": lambda a, b: a << b,
    "shr": lambda a, b: a >> b,
}


def _whole(e: SegmentWriter, operand: Operand) -> tuple[str, str]:
    """Return the register expression and the selector of an operand."""
    if isinstance(operand, Part):
        return e.src(operand.reg, "u32"), operand.selector
    return e.src(operand, "u32"), ""


@emitter(
    *("vadd", "vsub", "vabsdiff", "vmin", "vmax", "vshl", "vshr", "vset", "vmad"),
    *(f"v{name}{count}" for name in ("add", "sub", "avrg", "absdiff", "min", "max", "set") for count in (2, 4)),
)
def video(e: SegmentWriter, i: Instruction) -> None:
    opcode = _OPCODE.match(i.parts[0])
    if opcode is None:
        raise e.error("the video instruction is not supported")
    name, lanes = opcode[1], int(opcode[2] or 1)
    to = i.operands[0]
    mask = to.selector if isinstance(to, Part) else ""
    (a, a_part), (b, b_part) = (_whole(e, operand) for operand in i.operands[1:3])
    c = e.src(i.operands[3], "u32") if len(i.operands) > 3 else "None"
    types = [p for p in i.parts[1:] if p in ("u32", "s32")]
    if name == "set":
        types.insert(0, "u32")
    signs = tuple(kind == "s32" for kind in types)
    e.need(len(signs) == 3, "the opcode must have three types, or two for vset")
    after = i.parts[1 + sum(p in ("u32", "s32") for p in i.parts) :]
    compare = next((p for p in after if p in _COMPARE), "")
    second = next((p for p in after if p in _SECOND), "")
    flags = f"{'sat' in after}, {'wrap' in after}"
    if name == "mad":
        shift = 7 if "shr7" in after else 15 if "shr15" in after else 0
        head = f"{a}, {a_part!r}, {b}, {b_part!r}, {c}, {signs}"
        text = f"video_mad({head}, {'po' in after}, {shift}, {'sat' in after})"
    elif lanes == 1:
        text = f"video_scalar({name!r}, {compare!r}, {a}, {a_part!r}, {b}, {b_part!r}, {c}, {signs}, {flags}, "
        text += f"{second!r}, {mask!r})"
    else:
        text = f"video_lanes({name!r}, {compare!r}, {lanes}, {a}, {a_part!r}, {b}, {b_part!r}, {c}, {signs}, "
        text += f"{'sat' in after}, {second == 'add'}, {mask!r})"
    e.dst(to.reg if isinstance(to, Part) else to, text, "u32")


def _signed(value: Array, bits: int, signed: bool) -> Array:
    """Extend the low ``bits`` bits of int64 values with zeros or the sign."""
    low = value & ((1 << bits) - 1)
    return low - ((low >> (bits - 1)) << bits) if signed else low


def _select(value: Array, part: str, signed: bool) -> Array:
    """Return a byte, a half-word or all bits of each 32-bit lane as int64."""
    bits, place = {"b": (8, 8), "h": (16, 16), "": (32, 0)}[part[:1]]
    return _signed(value.astype(np.int64) >> (place * int(part[1:] or 0)), bits, signed)


def _clamp(value: Array, bits: int, signed: bool) -> Array:
    low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if signed else (0, (1 << bits) - 1)
    return np.clip(value, low, high)


def _words(value: Array) -> Array:
    return (value & 0xFFFFFFFF).astype(np.uint32)


@runtime
def video_scalar(
    name: str,
    compare: str,
    a: Array,
    a_part: str,
    b: Array,
    b_part: str,
    c: Array | None,
    signs: tuple[bool, bool, bool],
    saturates: bool,
    wraps: bool,
    second: str,
    mask: str,
) -> Array:
    """Operate on parts of two registers, and then combine the result with ``c`` or insert it into ``c``."""
    left, right = _select(a, a_part, signs[1]), _select(b, b_part, signs[2] and name not in ("shl", "shr"))
    if name in ("shl", "shr"):
        right = right & 31 if wraps else np.minimum(right, 32)
    result = _COMPARE[compare](left, right).astype(np.int64) if name == "set" else _OPERATIONS[name](left, right)
    bits = {"b": 8, "h": 16, "": 32}[mask[:1]]
    if saturates:
        result = _clamp(result, bits, signs[0])
    if c is None:
        return _words(result)
    third = _select(c, "", signs[0])
    if mask:
        place = bits * int(mask[1:])
        field = ((1 << bits) - 1) << place
        return _words((third & ~field) | ((result << place) & field))
    if second == "add":
        return _words(result + third)
    return _words(np.minimum(result, third) if second == "min" else np.maximum(result, third))


@runtime
def video_mad(
    a: Array,
    a_part: str,
    b: Array,
    b_part: str,
    c: Array,
    signs: tuple[bool, bool, bool],
    plus_one: bool,
    shift: int,
    saturates: bool,
) -> Array:
    """Return a * b + c (+ 1), shifted right and clamped to 32 bits. Python integers represent the 64-bit product."""
    signed = signs[1] or signs[2]
    left, right = _select(a, a_part, signs[1]), _select(b, b_part, signs[2])
    third = _select(c, "", signed)
    low, high = (-(2**31), 2**31 - 1) if signed else (0, 2**32 - 1)
    out = []
    for x, y, z in zip(left.tolist(), right.tolist(), third.tolist(), strict=True):
        total = (x * y + z + plus_one) >> shift
        out.append((max(low, min(high, total)) if saturates else total) & 0xFFFFFFFF)
    return np.array(out, np.uint32)


@runtime
def video_lanes(
    name: str,
    compare: str,
    lanes: int,
    a: Array,
    a_part: str,
    b: Array,
    b_part: str,
    c: Array,
    signs: tuple[bool, bool, bool],
    saturates: bool,
    accumulates: bool,
    mask: str,
) -> Array:
    """Operate on 2 half-words or 4 bytes of both registers. Insert the results into ``c``, or add them to ``c``."""
    bits = 32 // lanes
    pool = np.stack((a, b), axis=1).view(f"u{bits // 8}").astype(np.int64)
    first, other = ("10", "32") if lanes == 2 else ("3210", "7654")
    left, right = (
        _signed(pool[:, [int(digit) for digit in reversed(part[1:] or usual)]], bits, signed)
        for part, usual, signed in ((a_part, first, signs[1]), (b_part, other, signs[2]))
    )
    result = _COMPARE[compare](left, right).astype(np.int64) if name == "set" else _OPERATIONS[name](left, right)
    if saturates:
        result = _clamp(result, bits, signs[0])
    chosen = [int(digit) for digit in (mask[1:] or first)]
    if accumulates:
        return _words(result[:, chosen].sum(axis=1) + c.astype(np.int64))
    out = np.ascontiguousarray(c).view(f"u{bits // 8}").reshape(-1, lanes).copy()
    out[:, chosen] = result[:, chosen] & ((1 << bits) - 1)
    merged: Array = out.view(np.uint32)[:, 0]
    return merged
