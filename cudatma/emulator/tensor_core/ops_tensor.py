"""Emitters for ldmatrix, stmatrix, movmatrix, mma, mma.sp, wgmma and wmma.

Source: PTX ISA, "Warp Level Matrix Multiply-Accumulate Instructions", "Asynchronous Warpgroup Level Matrix
Instructions", "wmma.load", "wmma.store", "wmma.mma".
"""

from __future__ import annotations

import re

import cudatma.emulator.tensor_core.wgmma
import cudatma.emulator.tensor_core.wmma  # noqa: F401  (run-time helpers)
from cudatma.emulator.machine.ops_memory import address_of, shared_address_of, state_space
from cudatma.emulator.ptx.model import Imm, Instruction, Operand, Vec
from cudatma.emulator.ptx.writer import SegmentWriter, emitter
from cudatma.emulator.tensor_core.fragments import ELEMENT_BITS
from cudatma.emulator.tensor_core.mma import Mma

_SHAPE = re.compile(r"m(\d+)n(\d+)k(\d+)$")
_PACKED = ("b6x16_p32", "b4x16_p64")


def items_of(operand: Operand) -> tuple[Operand, ...]:
    """Return the elements of a vector operand, or the operand itself as the only element."""
    return operand.items if isinstance(operand, Vec) else (operand,)


def tuple_of(e: SegmentWriter, operand: Operand, code: str) -> str:
    """Return a tuple expression of an operand's elements as vectors of a type."""
    return "(" + ", ".join(e.src(item, code) for item in items_of(operand)) + ",)"


def shape_of(e: SegmentWriter, i: Instruction) -> tuple[int, int, int]:
    """Return the shape (m, n, k) in the opcode."""
    for part in i.parts:
        shape = _SHAPE.match(part)
        if shape:
            return int(shape[1]), int(shape[2]), int(shape[3])
    raise e.error("the opcode has no shape")


def types_of(i: Instruction) -> list[str]:
    """Return the element types in the opcode in order."""
    return [part for part in i.parts if part in ELEMENT_BITS]


def immediate(e: SegmentWriter, operand: Operand, what: str) -> int:
    """Return the value of an operand that must be an immediate."""
    if not isinstance(operand, Imm):
        raise e.error(f"{what} must be an immediate")
    return operand.bits


def _count(i: Instruction) -> int:
    return next(int(p[1]) for p in i.parts if p in ("x1", "x2", "x4"))


@emitter("ldmatrix")
def ldmatrix(e: SegmentWriter, i: Instruction) -> None:
    """Emit code for ldmatrix.

    Shapes are m8n8 of b16, m16n16 of b8 (always .trans), and m8n16 and m16n16 of packed 4-bit and 6-bit elements.
    """
    count, transposed = _count(i), "trans" in i.parts
    source = next((p for p in i.parts if p in _PACKED), "")
    is_square = "m16n16" in i.parts
    if is_square:
        e.need(
            transposed and count < 4 and bool(source or "b8" in i.parts),
            ".m16n16 requires .trans, .x1 or .x2, and .b8 or a packed format",
        )
        form = f"square.{source}" if source else "square"
    elif "m8n16" in i.parts:
        e.need(bool(source) and not transposed, ".m8n16 requires a packed source format and does not support .trans")
        form = source
    else:
        e.need("m8n8" in i.parts and "b16" in i.parts, "the shape must be .m8n8 with .b16 or .m16n16 with .b8")
        form = "trans" if transposed else ""
    items = items_of(i.operands[0])
    size = 2 * count if is_square else count
    e.need(len(items) == size, f"the instruction must have {size} destinations")
    address = shared_address_of(e, i, i.operands[1])
    value = e.temporary(f"tensorcore.ldmatrix(w, {e.at}, {address}, {count}, {form!r})")
    for k, item in enumerate(items):
        e.dst(item, f"{value}[{k}]", "u32")


@emitter("stmatrix")
def stmatrix(e: SegmentWriter, i: Instruction) -> None:
    """Emit code for stmatrix: m8n8 of b16, or m16n8 of b8 (always .trans)."""
    count, form = _count(i), "trans" if "trans" in i.parts else ""
    if "m16n8" in i.parts:
        e.need("b8" in i.parts and bool(form), ".m16n8 requires .trans and .b8")
        form = "bytes"
    else:
        e.need("m8n8" in i.parts and "b16" in i.parts, "the shape must be .m8n8 with .b16 or .m16n8 with .b8")
    e.need(len(items_of(i.operands[1])) == count, f"the instruction must have {count} values")
    address = shared_address_of(e, i, i.operands[0])
    e.line(f"tensorcore.stmatrix(w, {e.at}, {address}, {tuple_of(e, i.operands[1], 'u32')}, {form!r})")


@emitter("movmatrix")
def movmatrix(e: SegmentWriter, i: Instruction) -> None:
    e.dst(i.operands[0], f"tensorcore.movmatrix({e.src(i.operands[1], 'u32')})", "u32")


#: Maps each element type to the allowed values of K for dense m16n8 shapes, and for m8n8 shapes of the types in _SMALL.
_DEPTHS = {
    **dict.fromkeys(("f16", "bf16"), (8, 16)),
    "tf32": (4, 8),
    **dict.fromkeys(("s8", "u8"), (16, 32)),
    **dict.fromkeys(("e4m3", "e5m2"), (16, 32)),
    **dict.fromkeys(("e3m2", "e2m3", "e2m1"), (32,)),
    "e2m1p": (64,),
    **dict.fromkeys(("s4", "u4"), (32, 64)),
    "b1": (128, 256),
    "f64": (4, 8, 16),
}
_SMALL = {"s8": 16, "u8": 16, "s4": 32, "u4": 32, "b1": 128, "f64": 4}
#: Maps each element type to the smaller K of its sparse shapes. The larger K is twice as large.
_SPARSE = {"f16": 16, "bf16": 16, "tf32": 8, "s8": 32, "u8": 32, "s4": 64, "u4": 64}
_SCALES = {"scale_vec::1X": 1, "scale_vec::2X": 2, "scale_vec::4X": 4}


def _kinds(e: SegmentWriter, i: Instruction) -> tuple[str, str, str, str]:
    """Return the types of D, A, B and C. Packed e2m1 is "e2m1p"."""
    kinds = types_of(i)
    e.need(len(kinds) == 4, "the opcode must have four element types")
    if {"kind::mxf4", "kind::mxf4nvf4"} & set(i.parts):
        kinds = [f"{kind}p" if kind == "e2m1" else kind for kind in kinds]
    e.need(
        kinds[1] in _DEPTHS and kinds[2] in _DEPTHS and kinds[0] in ("f16", "f32", "f64", "s32"),
        "the element types are not supported",
    )
    return kinds[0], kinds[1], kinds[2], kinds[3]


def _form(e: SegmentWriter, i: Instruction) -> Mma:
    """Check the shape of an mma against the types and return its form."""
    kinds, (m, n, k) = _kinds(e, i), shape_of(e, i)
    sparse = i.parts[1].startswith("sp")
    a_kind = kinds[1]
    if sparse:
        min_k = _SPARSE.get(a_kind, 128 if a_kind == "e2m1p" else 64)
        allowed = (m, n) == (16, 8) and (k == min_k or (k == 2 * min_k and a_kind in _SPARSE))
    else:
        allowed = ((m, n) == (16, 8) and k in _DEPTHS[a_kind]) or (m, n, k) == (8, 8, _SMALL.get(a_kind))
    e.need(allowed, f"an MMA of .{a_kind} does not support the shape m{m}n{n}k{k}")
    scale, count = "", 0
    if "block_scale" in i.parts:
        scale = next((p for p in i.parts if p in ("ue8m0", "ue4m3")), "")
        e.need(bool(scale), "the opcode must have a scale type")
        count = next((_SCALES[p] for p in i.parts if p in _SCALES), 2 if "kind::mxf4" in i.parts else 1)
    logic = next((p for p in i.parts if p in ("xor", "and")), "")
    return Mma((m, n, k), kinds, "satfinite" in i.parts, sparse, scale, count, logic)


def _registers(form: Mma) -> tuple[int, int, int, int]:
    """Return the number of registers in each of the fragments D, A, B and C."""
    m, n, k = form.shape

    def count(elements: int, kind: str) -> int:
        bits = 16 if kind == "f16" else ELEMENT_BITS[kind]
        return elements * bits // 32 // max(32, bits)

    d, a, b, c = form.kinds
    stored = k // 2 if form.sparse else k
    return count(m * n, d), count(m * stored, a), count(k * n, b), count(m * n, c)


@emitter("mma")
def mma(e: SegmentWriter, i: Instruction) -> None:
    """Emit code for mma{.sp}.sync.aligned.shape.row.col{...}.d.a.b.c.

    The operands are d, a, b, c{, metadata, selector}{, scales and their selectors}.
    """
    e.need("sync" in i.parts, "mma must have .sync")
    if shape_of(e, i) == (8, 8, 4) and types_of(i)[1:3] == ["f16", "f16"]:
        _quad(e, i)
        return
    form = _form(e, i)
    extra = list(i.operands[4:])
    for operand, size in zip(i.operands, _registers(form), strict=False):
        e.need(len(items_of(operand)) == size, f"the fragment must have {size} registers")
    wide = ["u64" if kind == "f64" else "u32" for kind in form.kinds]
    parts = [tuple_of(e, operand, code) for operand, code in zip(i.operands[1:4], wide[1:], strict=True)]
    if form.sparse:
        selector = immediate(e, extra[1], "the sparsity selector")
        parts.append(f"({e.src(extra[0], 'u32')}, {selector})")
        del extra[:2]
    if form.scale:
        parts += [] if form.sparse else ["None"]
        parts.append(f"({_scale(e, extra[0], extra[1])}, {_scale(e, extra[2], extra[3])})")
    name = e.constant(form, form)
    value = e.temporary(f"tensorcore.mma_traced(w, {e.at}, {name}, {', '.join(parts)})")
    for position, item in enumerate(items_of(i.operands[0])):
        e.dst(item, f"{value}[{position}]", wide[0])


def _scale(e: SegmentWriter, data: Operand, selectors: Operand) -> str:
    """Return an expression (data, byte, thread) for an operand's scales. All lanes must have the same selectors."""
    byte, thread = (
        str(item.bits & 3) if isinstance(item, Imm) else f"int({e.src(item, 'u16')}[0]) & 3"
        for item in items_of(selectors)
    )
    return f"({e.src(data, 'u32')}, {byte}, {thread})"


def _quad(e: SegmentWriter, i: Instruction) -> None:
    """Emit code for mma.m8n8k4 of f16."""
    kinds = types_of(i)
    layouts = [p for p in i.parts if p in ("row", "col")]
    parts = [tuple_of(e, operand, "u32") for operand in i.operands[1:4]]
    head = f"{(kinds[0], kinds[3])}, {layouts[0] == 'col'}, {layouts[1] == 'col'}"
    e.line("w.meetings += 1")
    value = e.temporary(f"tensorcore.quad_mma({head}, {', '.join(parts)})")
    for position, item in enumerate(items_of(i.operands[0])):
        e.dst(item, f"{value}[{position}]", "u32")


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
        raise e.error(f"wgmma.{form} is not supported")


def _mma_async(e: SegmentWriter, i: Instruction) -> None:
    """Emit code for wgmma.mma_async.

    The operands are {d}, a-desc | {a}, b-desc{, metadata, selector}, scale-d, scale-a, scale-b{, trans}.
    """
    shape, kinds, operands = shape_of(e, i), types_of(i), list(i.operands)
    e.need(len(kinds) == 3 and kinds[0] in ("f16", "f32", "s32"), "the element types are not supported")
    _, n, k = shape
    sparse = "sp" in i.parts
    e.need(n % 8 == 0 and 8 <= n <= 256, f"N must be a multiple of 8 from 8 to 256, got {n}")
    e.need(k * ELEMENT_BITS[kinds[1]] == (512 if sparse else 256), f"K = {k} is not supported for .{kinds[1]}")
    to, metadata = items_of(operands[0]), "None"
    count = n // (4 if kinds[0] == "f16" else 2)
    e.need(len(to) == count, f"the instruction must have {count} accumulator registers")
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
    """Emit code for wmma.load.{a,b,c}, wmma.store.d and wmma.mma."""
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
        raise e.error(f"wmma.{form} is not supported")


def _wmma_mma(e: SegmentWriter, i: Instruction, shape: tuple[int, int, int], kinds: list[str]) -> None:
    """Emit code for wmma.mma. If A and B are f16, the opcode contains only the types of D and C."""
    whole = [kinds[0], "f16", "f16", kinds[1]] if len(kinds) == 2 else kinds
    e.need(len(whole) == 4, "the opcode must have two or four element types")
    logic = next((p for p in i.parts if p in ("and", "xor")), "")
    form = Mma(shape, (whole[0], whole[1], whole[2], whole[3]), "satfinite" in i.parts, logic=logic)
    parts = [tuple_of(e, o, _code(kind)) for o, kind in zip(i.operands[1:4], whole[1:], strict=True)]
    to = items_of(i.operands[0])
    value = e.temporary(f"wmma.mma(w, {e.at}, {e.constant(form, form)}, {len(to)}, {', '.join(parts)})")
    for position, item in enumerate(to):
        e.dst(item, f"{value}[{position}]", _code(whole[0]))
