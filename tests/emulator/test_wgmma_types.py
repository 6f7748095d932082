"""wgmma of every element type, sparse A, negation, scale-d and saturation, on shared memory without swizzle."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from ptx_lines import kernel

RNG = np.random.default_rng(21)
A_BYTES = 2048
#: Descriptor without swizzle, 16-byte chunks of 8 rows together: 128 bytes to the next chunk, 256 to the next 8 rows.
DESCRIPTOR = (128 >> 4) << 16 | (256 >> 4) << 32
TYPES: dict[str, Any] = {
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "tf32": np.float32,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "s8": np.int8,
    "u8": np.uint8,
}


def image(rows: Any) -> Any:
    """(r, 32) bytes as K-major core matrices: 8 rows of 16 bytes, chunk by chunk."""
    return np.ascontiguousarray(rows.reshape(-1, 8, 2, 16).transpose(0, 2, 1, 3)).reshape(-1)


def run_wgmma(opcode: str, a: Any, b: Any, c: Any, tail: str, metadata: Any = None) -> Any:
    """D (64 x 8) in 32-bit elements. a, b: (64, 32) and (8 or 16, 32) bytes; tail: the operands after b-desc; {m}
    stands for the metadata."""
    memory = np.zeros(4096, np.uint8)
    memory[:A_BYTES] = image(a)
    memory[A_BYTES : A_BYTES + b.size] = image(b)
    body = "mov.u32 %r1, s; shl.b32 %r2, %r63, 5; add.u32 %r3, %r1, %r2; ld.param.u64 %d1, [p0]; cvt.u64.u32 %d2, %r2;"
    body += "add.u64 %d1, %d1, %d2; ld.global.v4.u32 {%r4, %r5, %r6, %r7}, [%d1];"
    body += "ld.global.v4.u32 {%r8, %r9, %r10, %r11}, [%d1+16]; st.shared.v4.u32 [%r3], {%r4, %r5, %r6, %r7};"
    body += "st.shared.v4.u32 [%r3+16], {%r8, %r9, %r10, %r11}; fence.proxy.async; bar.sync 0;"
    body += "ld.param.u64 %d3, [p1]; mul.wide.u32 %d4, %r63, 4; add.u64 %d3, %d3, %d4; ld.global.u32 %r12, [%d3];"
    body += "ld.param.u64 %d5, [p2]; mul.wide.u32 %d6, %r63, 16; add.u64 %d5, %d5, %d6;"
    body += "ld.global.v4.u32 {%r20, %r21, %r22, %r23}, [%d5];"
    body += f"shr.u32 %r13, %r1, 4; cvt.u64.u32 %d7, %r13; or.b64 %d8, %d7, {DESCRIPTOR};"
    body += f"add.u64 %d9, %d8, {A_BYTES >> 4}; wgmma.fence.sync.aligned;"
    body += f"{opcode} {{%r20, %r21, %r22, %r23}}, %d8, %d9, {tail.format(m='%r12')};"
    body += "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;"
    body += "st.global.v4.u32 [%d5], {%r20, %r21, %r22, %r23};"
    place = np.arange(128)[:, None] // 32 * 16 + np.arange(128)[:, None] % 32 // 4 + np.array([0, 0, 8, 8])
    column = np.arange(128)[:, None] % 4 * 2 + np.array([0, 1, 0, 1])
    registers = np.ascontiguousarray(c[place, column])
    words = np.zeros(128, np.uint32) if metadata is None else metadata
    module = kernel(body, 3, ".shared .align 1024 .b8 s[4096];\n")
    assert module.launch("k", 1, 128, (memory, words, registers)).is_clean
    out = np.zeros_like(c)
    out[place, column] = registers
    return out


@pytest.mark.parametrize("kind", sorted(TYPES))
def test_every_type(kind: str) -> None:
    dtype = TYPES[kind]
    k = 32 // np.dtype(dtype).itemsize
    low = 0 if kind == "u8" else -6
    a, b = RNG.integers(low, 7, (64, k)).astype(dtype), RNG.integers(low, 7, (8, k)).astype(dtype)
    integer = kind in ("s8", "u8")
    c = RNG.integers(-9, 9, (64, 8)).astype(np.int32 if integer else np.float32)
    tail = "1" if integer else "1, 1, 1" + (", 0, 0" if kind in ("f16", "bf16") else "")
    acc = "s32" if integer else "f32"
    opcode = f"wgmma.mma_async.sync.aligned.m64n8k{k}.{acc}.{kind}.{kind}"
    got = run_wgmma(opcode, a.view(np.uint8), b.view(np.uint8), c, tail)
    assert (got == a.astype(np.float64) @ b.astype(np.float64).T + c).all()


def test_negation_and_scale_d() -> None:
    a, b = RNG.integers(-6, 7, (64, 16)).astype(np.float16), RNG.integers(-6, 7, (8, 16)).astype(np.float16)
    c = np.full((64, 8), np.nan, np.float32)
    opcode = "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16"
    got = run_wgmma(opcode, a.view(np.uint8), b.view(np.uint8), c, "0, -1, 1, 0, 0")
    assert (got == -(a.astype(np.float64) @ b.astype(np.float64).T)).all()


def test_integer_saturation() -> None:
    a, b = np.full((64, 32), 255, np.uint8), np.full((8, 32), 255, np.uint8)
    c = np.full((64, 8), 2**31 - 5, np.int32)
    opcode = "wgmma.mma_async.sync.aligned.m64n8k32{}.s32.u8.u8"
    assert (run_wgmma(opcode.format(".satfinite"), a, b, c, "1") == 2**31 - 1).all()
    assert (run_wgmma(opcode.format(""), a, b, c, "1") == 2**31 - 5 + 32 * 255 * 255 - 2**32).all()


def test_single_bits() -> None:
    a, b = RNG.integers(0, 256, (64, 32)).astype(np.uint8), RNG.integers(0, 256, (8, 32)).astype(np.uint8)
    c = RNG.integers(-9, 9, (64, 8)).astype(np.int32)
    got = run_wgmma("wgmma.mma_async.sync.aligned.m64n8k256.s32.b1.b1.and.popc", a, b, c, "1")
    bits = [np.unpackbits(m, axis=1).astype(int) for m in (a, b)]
    assert (got == bits[0] @ bits[1].T + c).all()


@pytest.mark.parametrize("kind", ["f16", "s8"])
def test_sparse_rows(kind: str) -> None:
    """Two of four elements are stored; each warp's lanes say where in its 16 rows."""
    dtype = TYPES[kind]
    stored_count = 32 // np.dtype(dtype).itemsize
    k = 2 * stored_count
    columns = np.array(
        [np.concatenate([4 * j + np.sort(RNG.choice(4, 2, replace=False)) for j in range(k // 4)]) for _ in range(64)]
    )
    stored = RNG.integers(-6, 7, (64, stored_count)).astype(dtype)
    dense = np.zeros((64, k))
    np.put_along_axis(dense, columns, stored.astype(np.float64), axis=1)
    b = RNG.integers(-6, 7, (8, k)).astype(dtype)
    rows = [sum(int(column) % 4 << 2 * n for n, column in enumerate(row)) for row in columns]
    metadata = np.zeros(128, np.uint32)
    for warp in range(4):
        for group in range(8):
            low, high = rows[16 * warp + group], rows[16 * warp + group + 8]
            place = 32 * warp + 4 * group
            if kind == "f16":
                metadata[place + 2 : place + 4] = [(low >> s & 0xFFFF) | (high >> s & 0xFFFF) << 16 for s in (0, 16)]
            else:
                metadata[place : place + 4] = [low & 0xFFFFFFFF, high & 0xFFFFFFFF, low >> 32, high >> 32]
    c = np.zeros((64, 8), np.float32 if kind == "f16" else np.int32)
    types, tail = ("f32.f16.f16", "{m}, 1, 1, 1, 1, 0, 0") if kind == "f16" else ("s32.s8.s8", "{m}, 0, 1")
    # B has rows of 64 bytes: two 16-byte chunks more than DESCRIPTOR's layout, so they follow as 8 more rows.
    raw = b.view(np.uint8).reshape(8, 2, 32).transpose(1, 0, 2).reshape(16, 32)
    opcode = f"wgmma.mma_async.sp.sync.aligned.m64n8k{k}.{types}"
    got = run_wgmma(opcode, stored.view(np.uint8), raw, c, tail, metadata)
    assert (got == dense @ b.astype(np.float64).T).all()
