"""wgmma and wmma.

Source: PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions", "wmma.load", "wmma.store", "wmma.mma".
"""

from __future__ import annotations

import cudatma.emulator.tensor_core.wgmma
import cudatma.emulator.tensor_core.wmma  # noqa: F401  (run-time helpers)
from cudatma.emulator.machine.ops_memory import address_of, state_space
from cudatma.emulator.ptx.model import Imm, Instruction, Vec
from cudatma.emulator.ptx.writer import SegmentWriter, emitter
from cudatma.emulator.tensor_core.fragments import ELEMENT_BITS
from cudatma.emulator.tensor_core.mma import Mma
from cudatma.emulator.tensor_core.ops_tensor import immediate, items_of, shape_of, tuple_of, types_of


@emitter("wgmma")
def wgmma(e: SegmentWriter, i: Instruction) -> None:
    form = i.parts[1]
    if form == "fence":
        e.line(f"wgmma.fence(w, {e.at})")
    elif form == "commit_group":
        e.line(f"wgmma.commit(w, {e.at})")
    elif form == "wait_group":
        e.line(f"if wgmma.wait(w, {e.at}, {immediate(e, i.operands[0], 'the number of groups')}): return -1")
    elif form == "mma_async":
        _mma_async(e, i)
    else:
        raise e.error(f"unknown form wgmma.{form}")


def _mma_async(e: SegmentWriter, i: Instruction) -> None:
    """{d}, a-desc | {a}, b-desc{, metadata, selector}, scale-d, then scale-a, scale-b{, trans-a}, trans-b."""
    shape, kinds, operands = shape_of(e, i), types_of(i), list(i.operands)
    e.need(len(kinds) == 3 and kinds[0] in ("f16", "f32", "s32"), "these types are not served")
    _, n, k = shape
    sparse = "sp" in i.parts
    e.need(n % 8 == 0 and 8 <= n <= 256, f"N of {n}: multiples of 8 up to 256 are allowed")
    e.need(k * ELEMENT_BITS[kinds[1]] == (512 if sparse else 256), f"K of {k} for .{kinds[1]}")
    to, metadata = items_of(operands[0]), "None"
    e.need(len(to) == n // (4 if kinds[0] == "f16" else 2), f"{n // 2} accumulators are expected")
    from_registers = isinstance(operands[1], Vec)
    a = tuple_of(e, operands[1], "u32") if from_registers else e.src(operands[1], "u64")
    b = e.src(operands[2], "u64")
    if sparse:
        metadata = f"({e.src(operands[3], 'u32')}, {immediate(e, operands[4], 'the sparsity selector')})"
        del operands[3:5]
    scale = operands[3] if len(operands) > 3 else Imm(1)
    scale_d = e.splat(scale.bits, "pred") if isinstance(scale, Imm) else e.src(scale, "pred")
    rest = [immediate(e, operand, "a scale or transpose") for operand in operands[4:]]
    sign = rest[0] * rest[1] if len(rest) >= 2 else 1
    transposes = [bool(bit) for bit in rest[2:]]
    pair = (False, *transposes) if from_registers and transposes else tuple(transposes) or (False, False)
    logic = next((p for p in i.parts if p in ("and", "xor")), "")
    form = Mma(shape, (kinds[0], kinds[1], kinds[2], kinds[0]), "satfinite" in i.parts, sparse, logic=logic)
    d = tuple_of(e, operands[0], "u32")
    head = f"w, {e.at}, {e.constant(form, form)}, {a}, {b}, {d}, {scale_d}, {sign}, {pair}, {metadata}"
    value = e.temporary(f"wgmma.mma_async({head})")
    for position, item in enumerate(to):
        e.dst(item, f"{value}[{position}]", "u32")


def _code(kind: str) -> str:
    return "u64" if kind == "f64" else "u32"


@emitter("wmma")
def wmma(e: SegmentWriter, i: Instruction) -> None:
    """wmma.load.{a,b,c}, wmma.store.d, wmma.mma."""
    form, shape, kinds = i.parts[1], shape_of(e, i), types_of(i)
    space, by_column = state_space(i)[0], "col" in i.parts
    if form == "load":
        to = items_of(i.operands[0])
        stride = e.src(i.operands[2], "u32") if len(i.operands) > 2 else "None"
        head = f"w, {e.at}, {space!r}, {i.parts[2]!r}, {shape}, {kinds[0]!r}, {by_column}, {len(to)}"
        value = e.temporary(f"wmma.load({head}, {address_of(e, i.operands[1])}, {stride})")
        for position, item in enumerate(to):
            e.dst(item, f"{value}[{position}]", _code(kinds[0]))
    elif form == "store":
        stride = e.src(i.operands[2], "u32") if len(i.operands) > 2 else "None"
        values = tuple_of(e, i.operands[1], _code(kinds[0]))
        head = f"w, {e.at}, {space!r}, {shape}, {kinds[0]!r}, {by_column}, {address_of(e, i.operands[0])}"
        e.line(f"wmma.store({head}, {values}, {stride})")
    elif form == "mma":
        _wmma_mma(e, i, shape, kinds)
    else:
        raise e.error(f"unknown form wmma.{form}")


def _wmma_mma(e: SegmentWriter, i: Instruction, shape: tuple[int, int, int], kinds: list[str]) -> None:
    """Of f16 factors the opcode names D and C alone."""
    whole = [kinds[0], "f16", "f16", kinds[1]] if len(kinds) == 2 else kinds
    e.need(len(whole) == 4, "two or four element types are expected")
    logic = next((p for p in i.parts if p in ("and", "xor")), "")
    form = Mma(shape, (whole[0], whole[1], whole[2], whole[3]), "satfinite" in i.parts, logic=logic)
    parts = [tuple_of(e, o, _code(kind)) for o, kind in zip(i.operands[1:4], whole[1:], strict=True)]
    to = items_of(i.operands[0])
    value = e.temporary(f"wmma.mma(w, {e.at}, {e.constant(form, form)}, {len(to)}, {', '.join(parts)})")
    for position, item in enumerate(to):
        e.dst(item, f"{value}[{position}]", _code(whole[0]))
