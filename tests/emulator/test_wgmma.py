"""wgmma: swizzles and majors of tiles that TMA loaded, register rules, every element type, and a whole GEMM."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from probe_configs import WgmmaGemm
from ptx_lines import kernel
from ptx_of import module_of, probe

from cudatma import compile
from cudatma.descriptor import TensorMap
from cudatma.emulator import Report
from cudatma.emulator.machine.memory import SHARED_START
from cudatma.emulator.tensor_core.wgmma import operand_of

pytestmark = pytest.mark.usefixtures("without_ptxas")

#: One warpgroup: D (64 x N) = A (64 x K) B (N x K)^T. SPAN: bytes of a swizzled row; MODE: the descriptor's code.
#: B_MN: B is stored as (K x N), N contiguous, and read transposed.
GEMM = """
#ifndef MODE
#define MODE 1
#endif
#ifndef WRONG_MODE
#define WRONG_MODE MODE
#endif
#ifndef SPAN
#define SPAN 128
#endif
// leading and stride offsets of the descriptors, the base offset of A's
#ifndef A_OFFSETS
#define A_OFFSETS 16, 8 * SPAN
#endif
#ifndef B_OFFSETS
#ifdef B_MN
#define B_OFFSETS K * SPAN, 8 * SPAN
#else
#define B_OFFSETS 16, 8 * SPAN
#endif
#endif
#ifndef A_BASE
#define A_BASE 0
#endif
#ifndef A_TRANSPOSED
#define A_TRANSPOSED 0
#endif
constexpr u32 M = 64, N = 64, K = 64;
constexpr u32 PANEL = SPAN / 2;              // elements of a swizzled row
constexpr u32 A_PANEL_BYTES = M * SPAN, B_PANEL_BYTES = N * SPAN;
__device__ __forceinline__ u64 descriptor(u32 address, u32 leading, u32 stride, u64 mode) {
    return (u64)((address & 0x3ffff) >> 4) | (u64)(leading >> 4) << 16 | (u64)(stride >> 4) << 32 | mode << 62;
}
#define R4(b) "+f"(d[b]), "+f"(d[b + 1]), "+f"(d[b + 2]), "+f"(d[b + 3])
#define R16(b) R4(b), R4(b + 4), R4(b + 8), R4(b + 12)
extern "C" __global__ void __launch_bounds__(128)
gemm(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map,
     const __grid_constant__ TensorMap second_a_map, const u32* a_fragments, float* out) {
    extern __shared__ __align__(1024) u8 smem[];
    const u32 a = shared_address(smem), b = a + M * K * 2, bar = b + N * K * 2;
    if (threadIdx.x == 0) { mbarrier_init(bar, 1); fence_mbarrier_init(); }
    __syncthreads();
    if (threadIdx.x == 0) {
        mbarrier_arrive_expect_tx(bar, (M + N) * K * 2);
        for (u32 p = 0; p < K / PANEL; ++p) {
            if (blockIdx.x) cp_async_bulk_tensor_2d_load(a + p * A_PANEL_BYTES, &second_a_map, bar, p * PANEL, 0);
            else cp_async_bulk_tensor_2d_load(a + p * A_PANEL_BYTES, &a_map, bar, p * PANEL, 0);
        }
#ifdef B_MN
        for (u32 p = 0; p < N / PANEL; ++p) cp_async_bulk_tensor_2d_load(b + p * K * SPAN, &b_map, bar, p * PANEL, 0);
#else
        for (u32 p = 0; p < K / PANEL; ++p)
            cp_async_bulk_tensor_2d_load(b + p * B_PANEL_BYTES, &b_map, bar, p * PANEL, 0);
#endif
    }
    mbarrier_wait_parity(bar, 0);
    float d[32];
    for (u32 i = 0; i < 32; ++i) d[i] = 0;
#ifndef BUG_FENCE
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
#pragma unroll
    for (u32 k = 0; k < K; k += 16) {
        const u32 inside = k % PANEL * 2, panel = k / PANEL;
        const u64 da = descriptor(a + panel * A_PANEL_BYTES + inside, A_OFFSETS, WRONG_MODE) | (u64)A_BASE << 49;
#ifdef B_MN
        const u64 db = descriptor(b + k / 8 * (8 * SPAN), B_OFFSETS, MODE);
#else
        const u64 db = descriptor(b + panel * B_PANEL_BYTES + inside, B_OFFSETS, MODE);
#endif
#ifdef A_REGISTERS
        const u32* f = a_fragments + (k / 16 * 128 + threadIdx.x) * 4;
        asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
            "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,"
            "%30,%31}, {%32,%33,%34,%35}, %36, 1, 1, 1, 0;"
            : R16(0), R16(16) : "r"(f[0]), "r"(f[1]), "r"(f[2]), "r"(f[3]), "l"(db) : "memory");
#else
        asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
            "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,"
            "%30,%31}, %32, %33, 1, 1, 1, %34, %35;"
            : R16(0), R16(16) : "l"(da), "l"(db), "n"(A_TRANSPOSED),
#ifdef B_MN
            "n"(1)
#else
            "n"(0)
#endif
            : "memory");
#endif
    }
#ifndef BUG_COMMIT
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
#ifndef BUG_WAIT
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#endif
    if (blockIdx.x) return;
    const u32 row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
    for (u32 i = 0; i < 32; ++i) out[(row + 8 * (i / 2 % 2)) * N + i / 4 * 8 + column + i % 2] = d[i];
}
"""
MODES = {"none": (0, 16), "32B": (3, 32), "64B": (2, 64), "128B": (1, 128)}


def run(mode: str, *defines: str, hazards: str = "raise", second: str = "") -> tuple[Any, Any, Report]:
    """Return (result, reference, report) of the product of two random matrices; ``second`` is A's swizzle in a second
    CTA.
    """
    code, span = MODES[mode]
    rng = np.random.default_rng(1)
    a = rng.normal(size=(64, 64)).astype(np.float16)
    b = rng.normal(size=(64, 64)).astype(np.float16)
    panel = span // 2
    fragments = np.zeros((4, 128, 4), np.uint32)
    for step in range(4):
        for thread in range(128):
            row, column = thread // 32 * 16 + thread % 32 // 4, step * 16 + thread % 4 * 2
            for register in range(4):
                pair = a[row + 8 * (register & 1), column + 8 * (register >> 1) :][:2]
                fragments[step, thread, register] = np.ascontiguousarray(pair).view(np.uint32)[0]
    operands = ((a, mode), (b, mode), (a, second or mode))
    maps = [TensorMap.from_array(x, (64, panel), swizzle=swizzle, encoder="codec") for x, swizzle in operands]
    out = np.zeros((64, 64), np.float32)
    head = "".join(f"#define {d}\n" for d in (f"MODE {code}", f"SPAN {span}", *defines))
    report = module_of(head + GEMM).launch(
        "gemm",
        2 if second else 1,
        128,
        (*maps, fragments, out),
        shared_bytes=16384 + 8,
        schedules=4,
        hazards=hazards,
        arrays=(a, b),
    )
    wanted = a.astype(np.float64) @ (b if "B_MN" in defines else b.T).astype(np.float64)
    return out, wanted, report


@pytest.mark.sweep(4)
@pytest.mark.parametrize("defines", [(), ("A_REGISTERS",), ("B_MN",)], ids=str)
@pytest.mark.parametrize("mode", ["32B", "64B", "128B"])
def test_products(mode: str, defines: tuple[str, ...]) -> None:
    out, wanted, report = run(mode, *defines)
    assert report.is_clean
    assert np.abs(out - wanted).max() < 1e-4


@pytest.mark.parametrize(
    ("define", "kind"),
    [
        ("BUG_FENCE", "wgmma_missing_fence"),
        ("BUG_COMMIT", "wgmma_uncommitted"),
        ("BUG_WAIT", "wgmma_registers"),
        ("WRONG_MODE 2", "swizzle_mismatch"),
    ],
)
def test_rules(define: str, kind: str) -> None:
    _, _, report = run("128B", define, hazards="collect")
    assert kind in report.kinds, str(report)


@pytest.mark.parametrize(("second", "kinds"), [("128B", set()), ("none", {"swizzle_mismatch"})])
def test_each_tile_under_one_descriptor_is_compared(second: str, kinds: set[str]) -> None:
    _, _, report = run("128B", hazards="collect", second=second)
    assert report.kinds == kinds, str(report)


@pytest.mark.parametrize(
    ("mode", "defines", "message"),
    [
        (
            "128B",
            ("A_OFFSETS 16, 4 * SPAN",),
            "reads row 7 and row 8 from row 7 column 0 and row 4 column 0 of a box",
        ),
        ("128B", ("A_OFFSETS 8 * SPAN, 16",), "reads neighboring bytes of row 56 from row 0 column 7 and row 1"),
        ("128B", ("A_OFFSETS 16, 16 * SPAN",), "reads row 31 from row 55 of a box that has more rows"),
        ("128B", ("A_TRANSPOSED 1",), "reads neighboring elements of k 0 from row 0 column 7 and row 1 column 0"),
        ("128B", ("A_BASE 2ull",), "reads column 6 of a box for column 0"),
        (
            "64B",
            ("B_MN", "B_OFFSETS 8 * SPAN, K * SPAN"),
            "reads neighboring elements of k 0 from row 0 column 3 and row 8",
        ),
        ("128B", ("A_OFFSETS 8192, 8 * SPAN",), ""),  # the leading offset of swizzled K-major operands is not used
        ("128B", ("A_OFFSETS 0, 8 * SPAN",), ""),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_offsets_that_do_not_follow_the_tile_are_named(mode: str, defines: tuple[str, ...], message: str) -> None:
    out, wanted, report = run(mode, *defines, hazards="collect")
    assert message in str(report)
    assert report.kinds == ({"swizzle_mismatch"} if message else set()), str(report)
    assert message or np.abs(out - wanted).max() < 1e-4


#: D = A B + D of ones, in core matrices that plain stores fill. INIT: what D is before; SCALE: scale-d; OFFSETS: the
#: leading and the stride offset; WHO: which warps execute the wgmma.
ONES = """
//% include "primitives/fence.cuh.j2"
//% include "primitives/wgmma_mma.cuh.j2"
using namespace cudatma;
extern "C" __global__ void __launch_bounds__(128) ones(float* out) {
    __shared__ __align__(1024) u8 smem[6144];
    for (u32 i = threadIdx.x; i < 3072; i += 128) reinterpret_cast<u16*>(smem)[i] = 0x3c00;
    fence_proxy_async_shared_cta();
    __syncthreads();
    const u64 a = matrix_descriptor(shared_address(smem), OFFSETS, 0), b = a + 2048 / 16;
    const u32 warp = threadIdx.x / 32;
    float d[8][4];
    INIT
    wgmma_fence();
    if (WHO) wgmma_m64n64k16_f32_f16_ss(d, a, b + PLACE, SCALE);
    wgmma_commit_group();
    wgmma_wait_group<0>();
    for (u32 i = 0; i < 32; ++i) out[threadIdx.x * 32 + i] = d[i / 4][i % 4];
}
"""
CLEAR = "for (u32 i = 0; i < 32; ++i) d[i / 4][i % 4] = 0;"


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({}, ""),
        ({"INIT": "", "SCALE": "false"}, ""),
        ({"INIT": ""}, "uninitialized_register"),
        ({"SCALE": "threadIdx.x & 1"}, "wgmma_operands"),
        ({"SCALE": "warp == 1"}, "wgmma_operands"),
        ({"PLACE": "threadIdx.x / 64"}, "wgmma_operands"),
        ({"WHO": "warp != 3"}, "divergent_warp"),
        ({"WHO": "warp < 4"}, ""),
        ({"INIT": CLEAR + " if (warp == 2) return;"}, "divergent_warp"),
        ({"OFFSETS": "256, 128"}, "swizzle_mismatch"),
        ({"OFFSETS": "0, 0"}, ""),  # one core matrix for the whole operand
    ],
    ids=str,
)
def test_what_a_warpgroup_has_in_common_and_what_it_adds_to(changes: dict[str, str], kind: str) -> None:
    source = ONES
    whole = {"INIT": CLEAR, "SCALE": "true", "PLACE": "0", "OFFSETS": "128, 256", "WHO": "true"}
    for name, text in {**whole, **changes}.items():
        source = source.replace(name, text)
    out = np.zeros(4096, np.float32)
    report = compile(source, "sm_90a", template=True).emulate(1, 128, (out,), hazards="collect")
    assert report.kinds == ({kind} if kind else set()), str(report)
    assert kind or (out == 16).all()


def test_descriptors_read_what_an_h200_reads() -> None:
    """The elements of operand A for random descriptors of all swizzles, both majors, with base offsets."""
    path = Path(__file__).parents[1] / "fixtures" / "wgmma_reads_h200.json"
    for mn_major, code, base, start, leading, stride, crc in json.loads(path.read_text())["rows"]:
        bits = (SHARED_START + start) >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | base << 49 | code << 62
        places = operand_of(bits, 64, 32, bool(mn_major)).places
        elements = (places[:, :, None] // 2 + np.arange(8)).reshape(len(places), -1)
        read = np.ascontiguousarray(elements.T if mn_major else elements, "<i4")
        assert zlib.crc32(read.tobytes()) == crc, (mn_major, code, base, start, leading, stride)


def test_a_target_without_wgmma_is_named() -> None:
    maps = [TensorMap.from_array(np.zeros((64, 64), np.float16), (64, 64), swizzle="128B", encoder="codec")] * 3
    report = module_of("#define SPAN 128\n" + GEMM).launch(
        "gemm",
        1,
        128,
        (*maps, np.zeros(2048, np.uint32), np.zeros((64, 64), np.float32)),
        shared_bytes=16392,
        target="sm_120a",
        hazards="collect",
        schedules=1,
    )
    assert "target" in report.kinds
    assert "sm_120a does not support wgmma" in str(report)


# ---- wgmma of every element type, sparse A, negation, scale-d and saturation, on shared memory without swizzle


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
    """Return (r, 32) bytes as K-major core matrices: 8 rows of 16 bytes, chunk by chunk."""
    return np.ascontiguousarray(rows.reshape(-1, 8, 2, 16).transpose(0, 2, 1, 3)).reshape(-1)


def run_wgmma(opcode: str, a: Any, b: Any, c: Any, tail: str, metadata: Any = None) -> Any:
    """Return D (64 x 8) in 32-bit elements, for (64, 32) and (8 or 16, 32) bytes of A and B.

    ``tail`` holds the operands after b-desc; {m} is replaced by the metadata.
    """
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


# ---- a whole GEMM on wgmma, TMA, mbarriers and a ring that wraps, alone and with multicast in a cluster, against NumPy


def gemm(spec: WgmmaGemm, m: int, n: int, k: int, **options: Any) -> tuple[Any, Any, Report]:
    """Return (result, reference in float64, report) of A (m, k) B (n, k)^T with random numbers."""
    rng = np.random.default_rng(m + n + k)
    a, b = (rng.normal(size=(rows, k)).astype(np.float16) for rows in (m, n))
    d = np.full((m, n), np.nan, np.float32)
    boxes = ((a, (spec.loaded_m, 64), "128B"), (b, (spec.tile_n, 64), "128B"), (d, (64, spec.tile_n), "none"))
    maps = [TensorMap.from_array(x, box, swizzle=mode, encoder="codec") for x, box, mode in boxes]
    report = probe("wgmma_gemm", spec).launch(
        spec.entry,
        (n // spec.tile_n, m // spec.tile_m),
        spec.threads,
        (*maps, k // spec.tile_k),
        cluster=spec.cluster,
        shared_bytes=spec.smem_bytes,
        arrays=(a, b, d),
        **options,
    )
    return d, a.astype(np.float64) @ b.astype(np.float64).T, report


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("spec", "m", "n", "k"),
    [
        (WgmmaGemm(), 128, 128, 128),  # fewer tiles than stages
        (WgmmaGemm(), 128, 128, 640),  # the ring wraps twice
        (WgmmaGemm(1, 64, 3), 64, 128, 256),
        (WgmmaGemm(cluster=2), 128, 256, 640),
    ],
    ids=str,
)
def test_the_product_is_right_and_clean(spec: WgmmaGemm, m: int, n: int, k: int) -> None:
    found, wanted, report = gemm(spec, m, n, k, schedules=3)
    assert report.is_clean
    assert np.abs(found - wanted).max() < 1e-4
