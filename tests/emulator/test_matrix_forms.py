"""mma.sync and rarer matrix instructions against matrices built element by element from the PTX ISA."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from mma_fragments import Place, a8, a16, a32, b8, b16, b32, c4, fragment, run_mma
from ptx_lines import kernel

from cudatma import compile

CASES: list[tuple[str, Any, tuple[int, int, int], Place, int, Place, int]] = [
    ("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", np.float16, (16, 8, 16), a16, 8, b16, 4),
    ("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", ml_dtypes.bfloat16, (16, 8, 16), a16, 8, b16, 4),
    ("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32", np.float16, (16, 8, 8), a16, 4, b16, 2),
    ("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32", np.float32, (16, 8, 8), a32, 4, b32, 2),
    ("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32", ml_dtypes.float8_e4m3fn, (16, 8, 32), a8, 16, b8, 8),
    ("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32", np.int8, (16, 8, 32), a8, 16, b8, 8),
    ("mma.sync.aligned.m16n8k32.row.col.s32.u8.u8.s32", np.uint8, (16, 8, 32), a8, 16, b8, 8),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: ".".join(case[0].split(".")[3:]))
def test_products(case: Any) -> None:
    opcode, dtype, (m, n, k), a_place, a_count, b_place, b_count = case
    rng = np.random.default_rng(4)
    is_integer = np.dtype(dtype).kind in "iu"
    low = 0 if dtype == np.uint8 else -8
    a, b = (rng.integers(low, 9, shape).astype(dtype) for shape in ((m, k), (k, n)))
    c = rng.integers(-50, 50, (m, n)).astype(np.int32 if is_integer else np.float32)
    parts = [fragment(a, a_place, a_count, 4), fragment(b, b_place, b_count, 4), fragment(c, c4, 4, 4)]
    got = run_mma(opcode, *parts)
    wanted = (a.astype(np.float64) @ b.astype(np.float64) + c).astype(c.dtype)
    assert (got == fragment(wanted, c4, 4, 4)).all()


@pytest.mark.parametrize(("init", "kinds"), [("", ["uninitialized_register"]), ("= {}", [])], ids=["none", "zeros"])
def test_what_an_mma_adds_to_was_written(init: str, kinds: list[str]) -> None:
    source = f"""
    //% include "primitives/mma.cuh.j2"
    extern "C" __global__ void k(float* out) {{
        const cudatma::u32 ones = 0x3c003c00, a[4] = {{ones, ones, ones, ones}};
        float d[4] {init};
        cudatma::mma_m16n8k16_f16(d, a, ones, ones);
        for (int i = 0; i < 4; ++i) out[4 * threadIdx.x + i] = d[i];
    }}"""
    out = np.zeros(128, np.float32)
    report = compile(source, "sm_90a", template=True).emulate(1, 32, (out,), hazards="collect")
    assert sorted(report.kinds) == kinds, str(report)
    assert (out == 16).all()


def test_half_accumulators() -> None:
    rng = np.random.default_rng(4)
    a, b = rng.integers(-4, 5, (16, 16)).astype(np.float16), rng.integers(-4, 5, (16, 8)).astype(np.float16)
    c = rng.integers(-50, 50, (16, 8)).astype(np.float16)
    parts = [fragment(a, a16, 8, 4), fragment(b, b16, 4, 4), fragment(c, c4, 4, 4)]
    got = run_mma("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16", *parts)
    wanted = (a.astype(np.float64) @ b.astype(np.float64) + c).astype(np.float16)
    assert (got == fragment(wanted, c4, 4, 4)).all()


def test_doubles() -> None:
    rng = np.random.default_rng(4)
    a, b, c = rng.normal(size=(8, 4)), rng.normal(size=(4, 8)), rng.normal(size=(8, 8))
    parts = [
        fragment(a, lambda lane, i: (lane // 4, lane % 4), 1, 8),
        fragment(b, lambda lane, i: (lane % 4, lane // 4), 1, 8),
        fragment(c, lambda lane, i: (lane // 4, lane % 4 * 2 + i), 2, 8),
    ]
    got = run_mma("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64", *parts, width=8).view(np.float64)
    wanted = fragment(a @ b + c, lambda lane, i: (lane // 4, lane % 4 * 2 + i), 2, 8).view(np.float64)
    assert np.abs(got - wanted).max() < 1e-12


# ---- narrow integers and floats, block scales, sparse A, m8n8k4, bytes in ldmatrix, wmma


RNG = np.random.default_rng(12)


def words(codes: Any, place: Any, count: int, bits: int) -> Any:
    """(registers, 32) words of a matrix of ``bits``-wide codes, ``count`` elements a lane, the first lowest."""
    per = 32 // bits
    out = np.zeros((count // per, 32), np.uint32)
    for lane in range(32):
        for i in range(count):
            out[i // per, lane] |= np.uint32(int(codes[place(lane, i)]) << (i % per * bits))
    return out


def a_place(bits: int) -> Any:
    """A of m16: registers alternate between rows g and g + 8, every second step goes on in k."""
    per = 32 // bits
    return lambda lane, i: (lane // 4 + 8 * (i // per % 2), lane % 4 * per + i % per + 4 * per * (i // per // 2))


def b_place(bits: int) -> Any:
    per = 32 // bits
    return lambda lane, i: (lane % 4 * per + i % per + 4 * per * (i // per), lane // 4)


@pytest.mark.parametrize("kind", ["s4", "u4"])
@pytest.mark.parametrize("k", [32, 64])
def test_four_bit_integers(kind: str, k: int) -> None:
    a, b = RNG.integers(0, 16, (16, k)), RNG.integers(0, 16, (k, 8))
    c = RNG.integers(-99, 99, (16, 8)).astype(np.int32)
    signed = [np.where(m >= 8, m - 16, m) if kind == "s4" else m for m in (a, b)]
    got = run_mma(
        f"mma.sync.aligned.m16n8k{k}.row.col.s32.{kind}.{kind}.s32",
        words(a, a_place(4), k // 2, 4),
        words(b, b_place(4), k // 4, 4),
        fragment(c, c4, 4, 4),
    )
    assert (got == fragment((signed[0] @ signed[1] + c).astype(np.int32), c4, 4, 4)).all()


@pytest.mark.parametrize("logic", ["xor", "and"])
@pytest.mark.parametrize("k", [128, 256])
def test_single_bits(logic: str, k: int) -> None:
    a, b = RNG.integers(0, 2, (16, k)), RNG.integers(0, 2, (k, 8))
    c = RNG.integers(-9, 9, (16, 8)).astype(np.int32)
    joined = (a[:, :, None] ^ b[None]) if logic == "xor" else (a[:, :, None] & b[None])
    got = run_mma(
        f"mma.sync.aligned.m16n8k{k}.row.col.s32.b1.b1.s32.{logic}.popc",
        words(a, a_place(1), k // 2, 1),
        words(b, b_place(1), k // 4, 1),
        fragment(c, c4, 4, 4),
    )
    assert (got == fragment((joined.sum(axis=1) + c).astype(np.int32), c4, 4, 4)).all()


@pytest.mark.parametrize("depth", [16, 32])
def test_integer_products_saturate_or_wrap(depth: int) -> None:
    a, b = np.full((16, depth), 127, np.int8), np.full((depth, 8), 127, np.int8)
    c = np.full((16, 8), 2**31 - 10, np.int32)
    parts = [words(a, a_place(8), depth // 2, 8), words(b, b_place(8), depth // 4, 8), fragment(c, c4, 4, 4)]
    shape = f"m16n8k{depth}.row.col"
    clamped = run_mma(f"mma.sync.aligned.{shape}.satfinite.s32.s8.s8.s32", *parts)
    assert (clamped == 2**31 - 1).all()
    wrapped = run_mma(f"mma.sync.aligned.{shape}.s32.s8.s8.s32", *parts)
    assert (wrapped.view(np.int32) == 2**31 - 10 + depth * 127 * 127 - 2**32).all()


SMALL = {
    "e4m3": (ml_dtypes.float8_e4m3fn, 0),
    "e5m2": (ml_dtypes.float8_e5m2, 0),
    "e3m2": (ml_dtypes.float6_e3m2fn, 0),
    "e2m3": (ml_dtypes.float6_e2m3fn, 0),
    "e2m1": (ml_dtypes.float4_e2m1fn, 2),
}


def small(kind: str, shape: tuple[int, int]) -> tuple[Any, Any]:
    """(values, codes as mma's byte containers) of a matrix."""
    dtype, shift = SMALL[kind]
    values = RNG.integers(-6, 7, shape).astype(dtype)
    return values.astype(np.float64), values.view(np.uint8).astype(np.int64) << shift


@pytest.mark.parametrize("kinds", [("e3m2", "e2m3"), ("e2m1", "e4m3"), ("e5m2", "e2m1")])
def test_six_and_four_bit_floats_stand_in_bytes(kinds: tuple[str, str]) -> None:
    (a, a_code), (b, b_code) = small(kinds[0], (16, 32)), small(kinds[1], (32, 8))
    c = RNG.integers(-9, 9, (16, 8)).astype(np.float32)
    got = run_mma(
        f"mma.sync.aligned.m16n8k32.row.col.kind::f8f6f4.f32.{kinds[0]}.{kinds[1]}.f32",
        words(a_code, a8, 16, 8),
        words(b_code, b8, 8, 8),
        fragment(c, c4, 4, 4),
    )
    assert (got == fragment((a @ b + c).astype(np.float32), c4, 4, 4)).all()


@pytest.mark.parametrize(("byte", "a_thread", "b_thread"), [(0, 0, 0), (2, 1, 3)])
def test_block_scales_of_bytes(byte: int, a_thread: int, b_thread: int) -> None:
    """One scale a row of A (rows g and g + 8 in a pair of lanes) and one a column of B (one lane of four)."""
    (a, a_code), (b, b_code) = small("e4m3", (16, 32)), small("e2m1", (32, 8))
    c = np.zeros((16, 8), np.float32)
    scales = [RNG.integers(0, 2**32, 32, dtype=np.uint32) & np.uint32(0x07070707) | np.uint32(0x78787878) for _ in "ab"]
    factor = [np.ldexp(1.0, (s >> np.uint32(8 * byte) & 255).astype(int) - 127) for s in scales]
    rows = [factor[0][4 * (r % 8) + 2 * a_thread + r // 8] for r in range(16)]
    columns = [factor[1][4 * n + b_thread] for n in range(8)]
    got = run_mma(
        f"mov.u16 %h1, {byte}; mov.u16 %h2, {a_thread}; "
        "mma.sync.aligned.m16n8k32.row.col.kind::mxf8f6f4.block_scale.scale_vec::1X.f32.e4m3.e2m1.f32.ue8m0",
        words(a_code, a8, 16, 8),
        words(b_code, b8, 8, 8),
        fragment(c, c4, 4, 4),
        extra=scales,
        tail=f"{{0}}, {{{{%h1, %h2}}}}, {{1}}, {{{{{byte}, {b_thread}}}}}",
    )
    wanted = (np.array(rows)[:, None] * (a @ b) * np.array(columns)).astype(np.float32)
    assert (got == fragment(wanted, c4, 4, 4)).all()


@pytest.mark.parametrize(("kind", "scale", "count"), [("mxf4", "ue8m0", 2), ("mxf4nvf4", "ue4m3", 4)])
def test_block_scales_of_packed_nibbles(kind: str, scale: str, count: int) -> None:
    values = [RNG.integers(-6, 7, s).astype(ml_dtypes.float4_e2m1fn) for s in ((16, 64), (64, 8))]
    a, b = (v.astype(np.float64) for v in values)
    raw = RNG.integers(0x70, 0x7E, (2, 32, 4)).astype(np.uint8)
    if scale == "ue8m0":
        factor = np.ldexp(1.0, raw.astype(int) - 127)
    else:
        factor = raw.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    a_scale = np.array([[factor[0, 4 * (r % 8) + r // 8, j] for j in range(count)] for r in range(16)])
    b_scale = np.array([[factor[1, 4 * n, j] for j in range(count)] for n in range(8)])
    got = run_mma(
        f"mma.sync.aligned.m16n8k64.row.col.kind::{kind}.block_scale.scale_vec::{count}X.f32.e2m1.e2m1.f32.{scale}",
        words(values[0].view(np.uint8), a_place(4), 32, 4),
        words(values[1].view(np.uint8), b_place(4), 16, 4),
        np.zeros((4, 32), np.uint32),
        extra=[r.reshape(-1).view(np.uint32) for r in raw],
        tail="{0}, {{0, 0}}, {1}, {{0, 0}}",
    )
    wide = [np.repeat(s, 64 // count, axis=1) for s in (a_scale, b_scale)]
    wanted = (a * wide[0]) @ (b * wide[1].T)
    assert np.allclose(got.view(np.float32), fragment(wanted.astype(np.float32), c4, 4, 4).view(np.float32), rtol=1e-6)


def sparse_rows(k: int, chunk: int) -> tuple[Any, Any, Any]:
    """(dense A, stored A, columns of the stored elements): half of each chunk of a row is kept, in order."""
    columns = np.zeros((16, k // 2), int)
    for row in range(16):
        kept: list[int] = []
        for first in range(0, k, chunk):
            if chunk == 8:
                pairs = np.sort(RNG.choice(4, 2, replace=False))
                kept += [first + 2 * int(p) + j for p in pairs for j in (0, 1)]
            else:
                kept += [first + int(p) for p in np.sort(RNG.choice(chunk, chunk // 2, replace=False))]
        columns[row] = kept
    stored = RNG.integers(-6, 7, (16, k // 2))
    dense = np.zeros((16, k), int)
    np.put_along_axis(dense, columns, stored, axis=1)
    return dense, stored, columns


def fields(columns: Any, chunk: int) -> Any:
    """Metadata of each row as a Python integer: two bits an index (tf32: 4 bits that count halves)."""
    out = []
    for row in columns:
        bits = 0
        if chunk == 2:
            for n, column in enumerate(row):
                bits |= (0b1110 if column % 2 else 0b0100) << (4 * n)
        elif chunk == 8:
            for n, column in enumerate(row[::2]):
                bits |= (column % 8 // 2) << (2 * n)
        else:
            for n, column in enumerate(row):
                bits |= (column % 4) << (2 * n)
        out.append(bits)
    return out


SPARSE: list[tuple[str, str, int, int, Any, int, int]] = [
    ("f32.f16.f16.f32", "half", 16, 4, np.float16, 16, 3),
    ("f32.bf16.bf16.f32", "half", 32, 4, ml_dtypes.bfloat16, 16, 1),
    ("f32.tf32.tf32.f32", "half", 8, 2, np.float32, 32, 2),
    ("f32.tf32.tf32.f32", "half", 16, 2, np.float32, 32, 0),
    ("s32.s8.s8.s32", "word", 32, 4, np.int8, 8, 1),
    ("s32.s8.s8.s32", "word", 64, 4, np.int8, 8, 0),
    ("s32.s4.s4.s32", "word", 64, 8, None, 4, 1),
    ("s32.s4.s4.s32", "word", 128, 8, None, 4, 0),
]


@pytest.mark.parametrize("case", SPARSE, ids=lambda case: f"{case[0]}-k{case[2]}")
def test_sparse_products(case: Any) -> None:
    """Metadata of 16-bit and wider types: thread j has 16 bits of rows g (low) and g + 8; of others a word of a row."""
    types, layout, k, chunk, dtype, bits, selector = case
    dense, stored, columns = sparse_rows(k, chunk)
    b = RNG.integers(-6, 7, (k, 8))
    rows = fields(columns, chunk)
    metadata = RNG.integers(0, 2**32, 32, dtype=np.uint64)
    for group in range(8):
        if layout == "half":
            count = {16: 1, 32: 2}[k if chunk == 4 else 2 * k]
            for j in range(count):
                low, high = (rows[r] >> (16 * j) & 0xFFFF for r in (group, group + 8))
                metadata[4 * group + selector * count + j] = low | high << 16
        else:
            count = k // (64 if bits == 4 else 32)
            for j in range(count):
                for half in range(2):
                    place = 4 * group + 2 * selector * count + 2 * j + half
                    metadata[place] = rows[group + 8 * half] >> (32 * j) & 0xFFFFFFFF
    codes = [m & 15 if dtype is None else m.astype(dtype).view(f"u{bits // 8}") for m in (stored, b)]
    count_a, count_b = 16 * k // 2 // 32, k * 8 // 32
    c = RNG.integers(-99, 99, (16, 8)).astype(np.int32 if types[0] == "s" else np.float32)
    got = run_mma(
        f"mma.sp::ordered_metadata.sync.aligned.m16n8k{k}.row.col.{types}",
        words(codes[0], a_place(bits), count_a, bits),
        words(codes[1], b_place(bits), count_b, bits),
        fragment(c, c4, 4, 4),
        extra=[metadata.astype(np.uint32)],
        tail=f"{{0}}, {selector}",
    )
    assert (got == fragment((dense @ b + c).astype(c.dtype), c4, 4, 4)).all()


@pytest.mark.parametrize("a_layout", ["row", "col"])
@pytest.mark.parametrize("b_layout", ["row", "col"])
@pytest.mark.parametrize("kind", ["f16", "f32"])
def test_four_products_of_quads(a_layout: str, b_layout: str, kind: str) -> None:
    a, b = (RNG.integers(-4, 5, (4, 8, 4)).astype(np.float16) for _ in range(2))
    c = RNG.integers(-9, 9, (4, 8, 8)).astype(np.float16 if kind == "f16" else np.float32)
    a_regs, b_regs = np.zeros((32, 4), np.float16), np.zeros((32, 4), np.float16)
    c_regs = np.zeros((32, 8), c.dtype)
    wanted = np.zeros_like(c_regs)
    result = np.einsum("pmk,pnk->pmn", a.astype(float), b.astype(float)) + c
    for lane in range(32):
        quad, row, high = lane % 16 // 4, lane % 4, 4 * (lane >= 16)
        for i in range(4):
            a_regs[lane, i] = a[quad, row + high, i] if a_layout == "row" else a[quad, i + high, row]
            b_regs[lane, i] = b[quad, row + high, i] if b_layout == "col" else b[quad, i + high, row]
        for i in range(8):
            wide = ((lane & 1) + (i & 2) + high, (i & 4) + (lane & 2) + (i & 1))
            place = (row + high, i) if kind == "f16" else wide
            c_regs[lane, i], wanted[lane, i] = c[quad][place], result[quad][place]
    parts = [np.ascontiguousarray(m).view(np.uint32).T.copy() for m in (a_regs, b_regs, c_regs)]
    got = run_mma(f"mma.sync.aligned.m8n8k4.{a_layout}.{b_layout}.{kind}.f16.f16.{kind}", *parts)
    assert (got == np.ascontiguousarray(wanted).view(np.uint32).T).all()


SHARED = ".shared .align 128 .b8 s[1024];\n"
FILL = "mov.u32 %r1, s; shl.b32 %r2, %r63, 5; add.u32 %r3, %r1, %r2; ld.param.u64 %d1, [p0]; cvt.u64.u32 %d2, %r2;"
FILL += "add.u64 %d3, %d1, %d2; ld.global.v4.u32 {%r4, %r5, %r6, %r7}, [%d3];"
FILL += "ld.global.v4.u32 {%r8, %r9, %r10, %r11}, [%d3+16]; st.shared.v4.u32 [%r3], {%r4, %r5, %r6, %r7};"
FILL += "st.shared.v4.u32 [%r3+16], {%r8, %r9, %r10, %r11}; bar.sync 0; shl.b32 %r12, %r63, 4; add.u32 %r12, %r1, %r12;"


def load_matrices(opcode: str, count: int, memory: Any) -> Any:
    """(registers, 32) of an ldmatrix whose lane l points at row l of 16 bytes."""
    names = [f"%r{20 + k}" for k in range(count)]
    body = FILL + f"{opcode} {{{', '.join(names)}}}, [%r12]; ld.param.u64 %d4, [p1]; mul.wide.u32 %d5, %r63, 4;"
    body += "add.u64 %d4, %d4, %d5;" + "".join(f"st.global.u32 [%d4+{128 * k}], {n};" for k, n in enumerate(names))
    out = np.zeros((count, 32), np.uint32)
    assert kernel(body, 2, SHARED).launch("k", 1, 32, (memory, out)).is_clean
    return out


def test_square_matrices_of_bytes_are_loaded_by_columns() -> None:
    memory = RNG.integers(0, 256, 1024).astype(np.uint8)
    rows = memory[:512].reshape(2, 16, 16)
    got = load_matrices("ldmatrix.sync.aligned.m16n16.x2.trans.shared.b8", 4, memory)
    for register in range(4):
        for lane in range(32):
            matrix, column = register // 2, lane // 4 + 8 * (register % 2)
            wanted = [int(rows[matrix, 4 * (lane % 4) + j, column]) for j in range(4)]
            assert got[register, lane].tobytes() == bytes(wanted)


@pytest.mark.parametrize(("source", "bits", "shift"), [("b4x16_p64", 4, 2), ("b6x16_p32", 6, 0)])
def test_packed_rows_are_spread_to_bytes(source: str, bits: int, shift: int) -> None:
    memory = RNG.integers(0, 256, 1024).astype(np.uint8)
    got = load_matrices(f"ldmatrix.sync.aligned.m8n16.x1.shared.b8x16.{source}", 1, memory)
    for lane in range(32):
        row = int.from_bytes(memory[16 * (lane // 4) :][:16].tobytes(), "little")
        wanted = [(row >> (bits * (4 * (lane % 4) + j)) & ((1 << bits) - 1)) << shift for j in range(4)]
        assert got[0, lane].tobytes() == bytes(wanted)


def test_accumulators_of_bytes_are_stored_by_columns() -> None:
    matrix = RNG.integers(0, 256, (16, 8)).astype(np.uint8)
    registers = np.zeros((32, 4), np.uint8)
    for lane in range(32):
        for i in range(4):
            registers[lane, i] = matrix[lane // 4 + 8 * (i // 2), 2 * (lane % 4) + i % 2]
    body = "mov.u32 %r1, s; shl.b32 %r2, %r63, 4; add.u32 %r3, %r1, %r2; ld.param.u64 %d1, [p0];"
    body += "mul.wide.u32 %d2, %r63, 4; add.u64 %d3, %d1, %d2; ld.global.u32 %r4, [%d3];"
    body += "stmatrix.sync.aligned.m16n8.x1.trans.shared.b8 [%r3], {%r4}; bar.sync 0; add.u32 %r5, %r1, %r2;"
    body += "setp.lt.u32 %p1, %r63, 8; ld.param.u64 %d4, [p1]; cvt.u64.u32 %d5, %r2; add.u64 %d4, %d4, %d5;"
    body += "@%p1 ld.shared.v4.u32 {%r6, %r7, %r8, %r9}, [%r5]; @%p1 st.global.v4.u32 [%d4], {%r6, %r7, %r8, %r9};"
    out = np.zeros((8, 16), np.uint8)
    assert kernel(body, 2, SHARED).launch("k", 1, 32, (registers, out)).is_clean
    assert (out == matrix.T).all()


def wmma(a: Any, b: Any, c: Any, load: tuple[str, str, str], product: str, counts: tuple[int, int, int]) -> Any:
    """D of wmma.load, wmma.mma, wmma.store; load: the opcodes' ends of a, b and c; counts: registers of each."""
    letter = "%d" if counts[2] == 2 and c.dtype == np.float64 else "%r"
    at, names = (2 if letter == "%r" else 20), []
    for count in (*counts, counts[2]):
        names.append("{" + ", ".join(f"{letter}{at + k}" for k in range(count)) + "}")
        at += count
    body = "".join(f"ld.param.u64 %d{k + 1}, [p{k}];" for k in range(4))
    for k, (name, end) in enumerate(zip("abc", load, strict=True)):
        body += f"wmma.load.{name}.sync.aligned.{end} {names[k]}, [%d{k + 1}], {(a, b, c)[k].shape[1]};"
    body += f"wmma.mma.{product} {names[3]}, {', '.join(names[:3])};"
    body += f"wmma.store.d.sync.aligned.{load[2]} [%d4], {names[3]}, {c.shape[1]};"
    out = np.zeros_like(c)
    assert kernel(body, 4).launch("k", 1, 32, (a, b, c, out)).is_clean
    return out


@pytest.mark.parametrize(("m", "n"), [(16, 16), (32, 8), (8, 32)])
@pytest.mark.parametrize("kind", ["f16", "bf16", "s8"])
def test_wmma_of_row_and_column_major_matrices(kind: str, m: int, n: int) -> None:
    dtype: Any = {"f16": np.float16, "bf16": ml_dtypes.bfloat16, "s8": np.int8}[kind]
    a, b = RNG.integers(-4, 5, (m, 16)), RNG.integers(-4, 5, (16, n))
    c = RNG.integers(-9, 9, (m, n)).astype(np.int32 if kind == "s8" else np.float32)
    acc = "s32" if kind == "s8" else "f32"
    shape, per = f"m{m}n{n}k16", 4 if kind == "s8" else 2
    counts = (8, 8, 8) if kind == "f16" else (m * 16 // 32 // per, n * 16 // 32 // per, 8)
    load = (f"row.{shape}.global.{kind}", f"col.{shape}.{kind}", f"row.{shape}.global.{acc}")
    types = f"{acc}.{acc}" if kind == "f16" else f"{acc}.{kind}.{kind}.{acc}"
    got = wmma(
        a.astype(dtype),
        np.ascontiguousarray(b.T).astype(dtype),
        c,
        load,
        f"sync.aligned.row.col.{shape}.{types}",
        counts,
    )
    assert (got == a @ b + c).all()


def test_wmma_of_tf32_doubles_nibbles_and_bits() -> None:
    a, b = RNG.integers(-4, 5, (16, 8)).astype(np.float32), RNG.integers(-4, 5, (8, 16)).astype(np.float32)
    c = RNG.integers(-9, 9, (16, 16)).astype(np.float32)
    load = ("row.m16n16k8.tf32", "row.m16n16k8.tf32", "row.m16n16k8.f32")
    product = "sync.aligned.row.row.m16n16k8.f32.tf32.tf32.f32"
    assert (wmma(a, b, c, load, product, (4, 4, 8)) == a @ b + c).all()
    x, y, z = RNG.normal(size=(8, 4)), RNG.normal(size=(4, 8)), RNG.normal(size=(8, 8))
    load = ("row.m8n8k4.f64", "row.m8n8k4.f64", "row.m8n8k4.f64")
    product = "sync.aligned.row.row.m8n8k4.rn.f64.f64.f64.f64"
    assert np.allclose(wmma(x, y, z, load, product, (1, 1, 2)), x @ y + z, rtol=1e-14)
    bits = RNG.integers(0, 2, (2, 8, 128)).astype(np.uint8)
    packed = [np.packbits(m, axis=1, bitorder="little") for m in bits]
    count = np.zeros((8, 8), np.int32)
    body = "".join(f"ld.param.u64 %d{k + 1}, [p{k}];" for k in range(3))
    body += "wmma.load.a.sync.aligned.row.m8n8k128.b1 {%r1}, [%d1], 128;"
    body += "wmma.load.b.sync.aligned.col.m8n8k128.b1 {%r2}, [%d2], 128; mov.u32 %r3, 0; mov.u32 %r4, 0;"
    body += "wmma.mma.xor.popc.sync.aligned.row.col.m8n8k128.s32.b1.b1.s32 {%r5, %r6}, {%r1}, {%r2}, {%r3, %r4};"
    body += "wmma.store.d.sync.aligned.row.m8n8k128.s32 [%d3], {%r5, %r6};"
    assert kernel(body, 3).launch("k", 1, 32, (packed[0], packed[1], count)).is_clean
    assert (count == (bits[0][:, None, :] ^ bits[1][None]).sum(axis=2)).all()


def test_nan_of_tensor_cores_is_canonical() -> None:
    a = np.zeros((16, 16), np.float16)
    a[0, 0] = np.nan
    parts = [fragment(a, a16, 8, 4), fragment(np.ones((16, 8), np.float16), b16, 4, 4), np.zeros((4, 32), np.uint32)]
    got = run_mma("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", *parts)
    assert set(got[:2, :4].reshape(-1).tolist()) == {0x7FFFFFFF}
