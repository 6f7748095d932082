"""ldmatrix, stmatrix, movmatrix, mma, wgmma.

Source: PTX ISA, "Warp Level Matrix ...", "Asynchronous Warpgroup Level ...".
"""

from __future__ import annotations

import re

import cudatma.emulator.tensorcore
import cudatma.emulator.wgmma  # noqa: F401
from cudatma.emulator.fragments import ELEMENT_BITS
from cudatma.emulator.model import Imm, Instruction, Operand, Vec
from cudatma.emulator.ops_memory import address_of
from cudatma.emulator.writer import SegmentWriter, emitter

_SHAPE = re.compile(r"m(\d+)n(\d+)k(\d+)$")


def _items(operand: Operand) -> tuple[Operand, ...]:
    return operand.items if isinstance(operand, Vec) else (operand,)


def _tuple(e: SegmentWriter, operand: Operand, code: str) -> str:
    return "(" + ", ".join(e.src(item, code) for item in _items(operand)) + ",)"


def _count(e: SegmentWriter, i: Instruction) -> int:
    e.need("m8n8" in i.parts and "b16" in i.parts, "only .m8n8 of .b16 is served")
    return next(int(p[1]) for p in i.parts if p in ("x1", "x2", "x4"))


@emitter("ldmatrix")
def ldmatrix(e: SegmentWriter, i: Instruction) -> None:
    count = _count(e, i)
    items = _items(i.operands[0])
    e.need(len(items) == count, f"{count} destinations are expected")
    value = e.temporary(
        f"tensorcore.ldmatrix(w, {e.at}, {address_of(e, i.operands[1])}, {count}, {'trans' in i.parts})"
    )
    for k, item in enumerate(items):
        e.dst(item, f"{value}[{k}]", "u32")


@emitter("stmatrix")
def stmatrix(e: SegmentWriter, i: Instruction) -> None:
    count = _count(e, i)
    e.need(len(_items(i.operands[1])) == count, f"{count} values are expected")
    address = address_of(e, i.operands[0])
    e.line(f"tensorcore.stmatrix(w, {e.at}, {address}, {_tuple(e, i.operands[1], 'u32')}, {'trans' in i.parts})")


@emitter("movmatrix")
def movmatrix(e: SegmentWriter, i: Instruction) -> None:
    e.dst(i.operands[0], f"tensorcore.movmatrix({e.src(i.operands[1], 'u32')})", "u32")


def _shape(e: SegmentWriter, i: Instruction) -> tuple[int, int, int]:
    for part in i.parts:
        found = _SHAPE.match(part)
        if found:
            return int(found[1]), int(found[2]), int(found[3])
    raise e.error("a shape is expected")


_MMA = {
    "f16": {(16, 8, 8), (16, 8, 16)},
    "bf16": {(16, 8, 8), (16, 8, 16)},
    "tf32": {(16, 8, 4), (16, 8, 8)},
    "s8": {(16, 8, 16), (16, 8, 32), (8, 8, 16)},
    "u8": {(16, 8, 16), (16, 8, 32), (8, 8, 16)},
    "e4m3": {(16, 8, 32), (16, 8, 16)},
    "e5m2": {(16, 8, 32), (16, 8, 16)},
    "f64": {(8, 8, 4), (16, 8, 4), (16, 8, 8), (16, 8, 16)},
}


@emitter("mma")
def mma(e: SegmentWriter, i: Instruction) -> None:
    """mma.sync.aligned.shape.row.col.d.a.b.c."""
    e.need(i.parts[1] == "sync" and "sp" not in "".join(i.parts[1:3]), "sparse mma is not served")
    shape = _shape(e, i)
    kinds = i.parts[-4:]
    e.need(kinds[1] in _MMA and shape in _MMA[kinds[1]], "this shape and type are not served")
    e.need(kinds[0] in ("f16", "f32", "f64", "s32") and "xor" not in i.parts, "this type is not served")
    m, n, k = shape
    per = {True: 2, False: 1}
    wide = {kind: "u64" if kind == "f64" else "u32" for kind in kinds}
    sizes = (
        m * n // 32 // per[kinds[0] == "f16"],
        m * k * ELEMENT_BITS[kinds[1]] // 32 // max(32, ELEMENT_BITS[kinds[1]]),
        k * n * ELEMENT_BITS[kinds[2]] // 32 // max(32, ELEMENT_BITS[kinds[2]]),
        m * n // 32 // per[kinds[3] == "f16"],
    )
    for operand, size in zip(i.operands, sizes, strict=True):
        e.need(len(_items(operand)) == size, f"a fragment of {size} registers is expected")
    parts = [_tuple(e, operand, wide[kind]) for operand, kind in zip(i.operands, kinds, strict=True)]
    value = e.temporary(
        f"tensorcore.mma_traced(w, {e.at}, {shape}, {tuple(kinds)}, {', '.join(parts[1:])}, {'satfinite' in i.parts})"
    )
    for position, item in enumerate(_items(i.operands[0])):
        e.dst(item, f"{value}[{position}]", wide[kinds[0]])


@emitter("wgmma")
def wgmma(e: SegmentWriter, i: Instruction) -> None:
    form = i.parts[1]
    if form == "fence":
        e.line(f"wgmma.fence(w, {e.at})")
    elif form == "commit_group":
        e.line(f"wgmma.commit(w, {e.at})")
    elif form == "wait_group":
        count = i.operands[0]
        if not isinstance(count, Imm):
            raise e.error("the number of groups is an immediate")
        e.line(f"if wgmma.wait(w, {e.at}, {count.bits}): return -1")
    elif form == "mma_async" and "sp" not in i.parts:
        _mma_async(e, i)
    else:
        raise e.error(f"wgmma.{form} is not served")


def _mma_async(e: SegmentWriter, i: Instruction) -> None:
    """{d}, a-desc | {a}, b-desc, scale-d, imm-scale-a, imm-scale-b{, imm-trans-a}, imm-trans-b."""
    shape = _shape(e, i)
    kinds = i.parts[-3:]
    e.need(kinds[1] in ELEMENT_BITS and kinds[0] in ("f16", "f32", "s32"), "these types are not served")
    _, n, k = shape
    e.need(n % 8 == 0 and 8 <= n <= 256 and k * ELEMENT_BITS[kinds[1]] == 256, "this shape is not served")
    to = _items(i.operands[0])
    e.need(len(to) == n // (4 if kinds[0] == "f16" else 2), f"{n // 2} accumulators are expected")
    from_registers = isinstance(i.operands[1], Vec)
    a = _tuple(e, i.operands[1], "u32") if from_registers else e.src(i.operands[1], "u64")
    b = e.src(i.operands[2], "u64")
    scale = i.operands[3] if len(i.operands) > 3 else Imm(1)
    scale_d = e.splat(scale.bits, "pred") if isinstance(scale, Imm) else e.src(scale, "pred")
    rest = [operand.bits if isinstance(operand, Imm) else 1 for operand in i.operands[4:]]
    signs = (rest[0], rest[1]) if len(rest) >= 2 else (1, 1)
    transposes = [bool(bit) for bit in rest[2:]]
    pair = (
        (False, transposes[0]) if from_registers and transposes else tuple(transposes) if transposes else (False, False)
    )
    value = e.temporary(
        f"wgmma.mma_async(w, {e.at}, {shape}, {tuple(kinds)}, {a}, {b}, {_tuple(e, i.operands[0], 'u32')}, {scale_d}, "
        f"{signs}, {pair})"
    )
    for position, item in enumerate(to):
        e.dst(item, f"{value}[{position}]", "u32")
