"""mov, selections and addresses. Source: PTX ISA, "mov", "selp", "slct", "cvta", "isspacep", "mapa", "getctarank"."""

from __future__ import annotations

import numpy as np

from cudatma.emulator.arithmetic.ops_integer import kind, operands
from cudatma.emulator.ptx.model import Instruction, Sink, Sym, Vec
from cudatma.emulator.ptx.types import BYTES, Array, unsigned
from cudatma.emulator.ptx.writer import SegmentWriter, emitter, runtime


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
    """Addresses to and from the generic window of a state space."""
    spaces = {p.split("::")[0] for p in i.parts[1:]} & {"global", "shared", "local", "const", "param"}
    e.need(len(spaces) == 1, "cvta needs one state space")
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
