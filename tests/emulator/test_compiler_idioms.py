"""Idioms of compilers and of other projects: moved and merged instructions, and loads of more bytes than are used."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ptx_lines import HEADER, kernel, run
from ptx_of import module_of

from cudatma.descriptor import TensorMap
from cudatma.emulator import Report, TrapError, load

RNG = np.random.default_rng(5)
M32 = 2**32


def word(seed: int) -> list[int]:
    rng = np.random.default_rng(seed)
    edges = [0, 1, M32 - 1, 2**31, 2**31 - 1, M32 - 2]
    return [edges[k % 6] if k < 12 else int(v) for k, v in enumerate(rng.integers(0, M32, 32))]


def test_carry_chains_multiply_64_by_64_bits() -> None:
    """Range reductions and 128-bit integers use mad.lo.cc, madc.hi.cc and addc."""
    a0, a1, b0, b1 = (word(k) for k in range(4))
    body = """
    mul.lo.u32 %r20, %r1, %r3; mul.hi.u32 %r21, %r1, %r3;
    mad.lo.cc.u32 %r21, %r1, %r4, %r21; madc.hi.u32 %r22, %r1, %r4, 0;
    mad.lo.cc.u32 %r21, %r2, %r3, %r21; madc.hi.cc.u32 %r22, %r2, %r3, %r22; addc.u32 %r23, 0, 0;
    mad.lo.cc.u32 %r22, %r2, %r4, %r22; madc.hi.u32 %r23, %r2, %r4, %r23;"""
    got = run(body, ["b32"] * 4, [("b32", v) for v in (a0, a1, b0, b1)])
    for k in range(32):
        product = (a0[k] | a1[k] << 32) * (b0[k] | b1[k] << 32)
        assert [int(g[k]) for g in got] == [product >> s & (M32 - 1) for s in (0, 32, 64, 96)]


def test_subtraction_leaves_the_carry_of_the_complement() -> None:
    """A chain of sub.cc, subc.cc borrows; addc after it reads 1 where nothing was borrowed."""
    a0, a1, b0, b1 = (word(k + 7) for k in range(4))
    body = "sub.cc.u32 %r20, %r1, %r3; subc.cc.u32 %r21, %r2, %r4; addc.u32 %r22, 0, 0; subc.u32 %r23, 0, 0;"
    got = run(body, ["b32"] * 4, [("b32", v) for v in (a0, a1, b0, b1)])
    for k in range(32):
        a, b = a0[k] | a1[k] << 32, b0[k] | b1[k] << 32
        assert int(got[0][k]) | int(got[1][k]) << 32 == (a - b) % 2**64
        assert (int(got[2][k]), int(got[3][k])) == (int(a >= b), 0 if a >= b else M32 - 1)


def test_video_instructions_of_the_simd_intrinsics() -> None:
    a, b, c = (word(k + 20) for k in range(3))
    body = """
    vabsdiff4.u32.u32.u32 %r20, %r1, %r2, %r3; vabsdiff4.u32.u32.u32.add %r21, %r1, %r2, %r3;
    vadd2.s32.s32.s32.sat %r22, %r1, %r2, %r3; vset4.u32.u32.lt %r23, %r1, %r2, %r3;
    vavrg4.u32.u32.u32 %r24.b10, %r1, %r2, %r3; vadd.s32.s32.s32.sat %r25.b2, %r1.h1, %r2.b0, %r3;
    vmin.s32.u32.s32.max %r26, %r1.b3, %r2, %r3; vmad.s32.s32.s32.sat.shr7 %r27, %r1, %r2, %r3;
    vshr.u32.u32.u32.wrap %r28, %r1, %r2.b1; vsub2.s32.s32.s32 %r29, %r1.h13, %r2.h02, %r3;"""
    got = run(body, ["b32"] * 10, [("b32", v) for v in (a, b, c)])

    def parts(value: int, bits: int, signed: bool = False) -> list[int]:
        fields = [value >> s & ((1 << bits) - 1) for s in range(0, 32, bits)]
        return [f - (1 << bits) if signed and f >> (bits - 1) else f for f in fields]

    def join(fields: list[int], bits: int) -> int:
        return sum((f & ((1 << bits) - 1)) << (bits * k) for k, f in enumerate(fields))

    def s32(value: int) -> int:
        return value - M32 if value >> 31 else value

    for k in range(32):
        x, y, z = a[k], b[k], c[k]
        differences = [abs(p - q) for p, q in zip(parts(x, 8), parts(y, 8), strict=True)]
        sums = [p + q for p, q in zip(parts(x, 16, True), parts(y, 16, True), strict=True)]
        halves = parts(x, 16, True) + parts(y, 16, True)
        average = [(p + q + 1) >> 1 for p, q in zip(parts(x, 8), parts(y, 8), strict=True)]
        byte = max(-128, min(127, parts(x, 16, True)[1] + parts(y, 8, True)[0]))
        wanted = [
            join(differences, 8),
            sum(differences) + z,
            join([max(-32768, min(32767, s)) for s in sums], 16),
            join([int(p < q) for p, q in zip(parts(x, 8), parts(y, 8), strict=True)], 8),
            join(average[:2] + parts(z, 8)[2:], 8),
            z & 0xFF00FFFF | (byte & 255) << 16,
            max(min(x >> 24, s32(y)), s32(z)),
            max(-(2**31), min(2**31 - 1, (s32(x) * s32(y) + s32(z)) >> 7)),
            x >> ((y >> 8 & 255) & 31),
            join([halves[3] - halves[2], halves[1] - halves[0]], 16),
        ]
        assert [int(g[k]) for g in got] == [w & (M32 - 1) for w in wanted]


def test_parameters_are_addressed_in_32_bits() -> None:
    """Triton takes a tensor map's address as mov.b32, widens it and turns it generic."""
    text = f"""{HEADER}
    .visible .entry k(.param .u64 .ptr .global .align 1 p0, .param .align 64 .b8 p1[128], .param .u32 p2) {{
    .reg .b32 %r<9>; .reg .b64 %d<9>;
    ld.param.u64 %d1, [p0]; mov.b32 %r1, p1; cvt.u64.u32 %d2, %r1; cvta.param.u64 %d3, %d2;
    ld.u32 %r2, [%d3+4]; mov.b64 %d4, p1; ld.param.u32 %r3, [%d4+8]; cvta.to.param.u64 %d5, %d3;
    ld.param.u32 %r4, [%d5+12]; ld.param.u32 %r5, [p2]; ld.param.u32 %r6, [p1+16];
    st.global.v4.u32 [%d1], {{%r2, %r3, %r4, %r5}}; st.global.u32 [%d1+16], %r6; ret; }}"""
    out = np.zeros(5, np.uint32)
    load(text).launch("k", 1, 1, (out, np.arange(32, dtype=np.uint32).tobytes(), 77))
    assert out.tolist() == [1, 2, 3, 77, 4]


def test_inline_assembly_has_the_line_of_its_call() -> None:
    """LLVM adds the number of the line inside the assembly to that of the call."""
    body = """
    .loc 1 14 5
    // begin inline asm
    mov.u32 %r1, 0;
    .loc 1 15 5
    ld.global.u32 %r1, [%d1];
    // end inline asm
    .loc 1 16 5
    ld.global.u32 %r2, [%d1];
    """
    report = kernel("mov.b64 %d1, 64;" + body, 0, '.file 1 "add.py"').launch("k", 1, 1, hazards="collect")
    assert report.hazards[0].source == "add.py:14"


def test_a_barrier_reduction_writes_its_register() -> None:
    """__syncthreads_count: the destination of bar.red lives on, and nothing was read before it."""
    body = """
    setp.gt.u32 %p1, %r63, 40; bar.red.popc.u32 %r1, 0, %p1; bar.red.and.pred %p2, 0, %p1; selp.u32 %r2, 1, 0, %p2;
    ld.param.u64 %d1, [p0]; mul.wide.u32 %d2, %r63, 8; add.u64 %d1, %d1, %d2; st.global.v2.u32 [%d1], {%r1, %r2};"""
    out = np.zeros((64, 2), np.uint32)
    assert kernel(body, 1).launch("k", 1, 64, (out,)).is_clean
    assert (out == [23, 0]).all()


CALLS = """
.func (.param .b32 r) twice(.param .b32 a) { .reg .b32 %r<3>; ld.param.b32 %r1, [a]; add.s32 %r2, %r1, %r1;
  st.param.b32 [r], %r2; ret; }
.func (.param .b32 r) plus(.param .b32 a) { .reg .b32 %r<3>; ld.param.b32 %r1, [a]; add.s32 %r2, %r1, 100;
  st.param.b32 [r], %r2; ret; }
.global .align 8 .u64 table[2] = {twice, plus};
"""


def test_indirect_calls_through_a_table_of_functions() -> None:
    body = """
    and.b32 %r1, %r63, 1; mul.wide.u32 %d1, %r1, 8; mov.u64 %d2, table; add.u64 %d3, %d2, %d1; ld.global.u64 %d4, [%d3];
    { .param .b32 a0; .param .b32 v0; st.param.b32 [a0], %r63;
    proto: .callprototype (.param .b32 _) _ (.param .b32 _);
    call (v0), %d4, (a0), proto; ld.param.b32 %r2, [v0]; }
    ld.param.u64 %d5, [p0]; mul.wide.u32 %d6, %r63, 4; add.u64 %d5, %d5, %d6; st.global.u32 [%d5], %r2;"""
    out = np.zeros(32, np.uint32)
    assert kernel(body, 1, CALLS).launch("k", 1, 32, (out,)).is_clean
    assert out.tolist() == [k + 100 if k % 2 else 2 * k for k in range(32)]


def test_alloca_and_calls_share_the_stack() -> None:
    """Each lane fills its own array; a call between allocation and use does not tread on it."""
    body = """
    stacksave.u64 %d10; mov.u64 %d1, 64; alloca.u64 %d2, %d1, 16; cvta.local.u64 %d3, %d2;
    st.local.u32 [%d2+60], %r63; st.u32 [%d3], 7;
    { .param .b32 a0; .param .b32 v0; st.param.b32 [a0], %r63; call (v0), twice, (a0); ld.param.b32 %r2, [v0]; }
    ld.local.u32 %r3, [%d2]; ld.u32 %r4, [%d3+60]; stackrestore.u64 %d10; alloca.u64 %d4, %d1, 16;
    setp.eq.u64 %p1, %d4, %d2; selp.u32 %r5, 1, 0, %p1; ld.param.u64 %d5, [p0]; mul.wide.u32 %d6, %r63, 16;
    add.u64 %d5, %d5, %d6; st.global.v4.u32 [%d5], {%r2, %r3, %r4, %r5};"""
    out = np.zeros((32, 4), np.uint32)
    assert kernel(body, 1, CALLS).launch("k", 1, 32, (out,)).is_clean
    assert out.tolist() == [[2 * k, 7, k, 1] for k in range(32)]


def test_atomics_of_128_bits() -> None:
    cell = np.array([1, 2], np.uint64)
    body = """
    ld.param.u64 %d1, [p0]; .reg .b128 %q<4>;
    setp.eq.u32 %p1, %r63, 0; @!%p1 ret;
    mov.u64 %d2, 1; mov.u64 %d3, 2; mov.b128 %q1, {%d2, %d3}; mov.u64 %d4, 5; mov.u64 %d5, 6; mov.b128 %q2, {%d4, %d5};
    atom.relaxed.gpu.global.cas.b128 %q3, [%d1], %q1, %q2; mov.b128 {%d6, %d7}, %q3;
    atom.relaxed.gpu.global.cas.b128 %q3, [%d1], %q1, %q2;
    atom.relaxed.gpu.global.exch.b128 %q3, [%d1], %q1; mov.b128 {%d8, %d9}, %q3;
    ld.param.u64 %d10, [p1]; st.global.v2.u64 [%d10], {%d6, %d7}; st.global.v2.u64 [%d10+16], {%d8, %d9};"""
    raw = np.zeros(6, np.uint64)
    skip = -(raw.ctypes.data // 8) % 2
    memory, out = raw[skip : skip + 2], np.zeros(4, np.uint64)
    memory[:] = cell
    assert kernel(body, 2).launch("k", 1, 32, (memory, out)).is_clean
    assert out.tolist() == [1, 2, 5, 6]
    assert memory.tolist() == [1, 2]


def test_float_atomics_flush_in_global_memory_only() -> None:
    tiny = np.float32(1e-40)
    body = """
    ld.param.u64 %d1, [p0]; mov.u32 %r1, s; setp.eq.u32 %p1, %r63, 0; @!%p1 ret; ld.global.f32 %f1, [%d1];
    mov.f32 %f3, 0f00000000; st.shared.f32 [%r1], %f3; atom.shared.add.f32 %f2, [%r1], %f1; ld.shared.f32 %f2, [%r1];
    atom.global.add.f32 %f3, [%d1+4], %f1; st.global.f32 [%d1+8], %f2;"""
    memory = np.array([tiny, 0, 0], np.float32)
    kernel(body, 1, ".shared .align 4 .b8 s[4];\n").launch("k", 1, 32, (memory,))
    assert memory.tolist() == [float(tiny), 0.0, float(tiny)]


def test_vector_atomics() -> None:
    body = """
    ld.param.u64 %d1, [p0]; cvt.rn.f32.u32 %f1, %r63; mov.f32 %f2, 0f3F800000;
    red.global.add.v2.f32 [%d1], {%f1, %f2}; atom.global.v2.f32.add {%f3, %f4}, [%d1+8], {%f2, %f1};"""
    memory = np.zeros(4, np.float32)
    kernel(body, 1).launch("k", 1, 32, (memory,))
    assert memory.tolist() == [496, 32, 32, 496]


@pytest.mark.parametrize("form", ["st.bulk.weak.shared::cta [%d2], %d4, 0;", "st.bulk [%d3], %d4, 0;"])
def test_shared_memory_is_filled_with_zeros(form: str) -> None:
    body = f"""
    mov.u32 %r1, s; cvt.u64.u32 %d2, %r1; cvta.shared.u64 %d3, %d2; shl.b32 %r2, %r63, 2; add.u32 %r3, %r1, %r2;
    st.shared.u32 [%r3], 9; bar.sync 0; mov.u64 %d4, 64; setp.eq.u32 %p1, %r63, 0; @%p1 {form}
    bar.sync 0; ld.shared.u32 %r4, [%r3]; ld.param.u64 %d5, [p0]; mul.wide.u32 %d6, %r63, 4; add.u64 %d5, %d5, %d6;
    st.global.u32 [%d5], %r4;"""
    out = np.ones(32, np.uint32)
    assert kernel(body, 1, ".shared .align 16 .b8 s[128];\n").launch("k", 1, 32, (out,)).is_clean
    assert out.tolist() == [0] * 16 + [9] * 16


def test_clusters_take_over_the_work_of_others() -> None:
    """clusterlaunchcontrol: one block after the other cancels a block that waits and does its work."""
    body = """
    mov.u32 %r1, s; add.u32 %r2, %r1, 16; setp.eq.u32 %p1, %r63, 0; .reg .b128 %q<2>;
    @%p1 mbarrier.init.shared.b64 [%r2], 1; @%p1 fence.mbarrier_init.release.cluster; bar.sync 0;
    mov.u32 %r3, %ctaid.x; mov.u32 %r4, 0; ld.param.u64 %d1, [p0];
AGAIN:
    mul.wide.u32 %d2, %r3, 4; add.u64 %d3, %d1, %d2; add.u32 %r5, %r3, 1; @%p1 st.global.u32 [%d3], %r5; bar.sync 0;
    @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 16;
    @%p1 clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [%r1], [%r2];
WAIT:
    mbarrier.try_wait.parity.shared.b64 %p2, [%r2], %r4; @!%p2 bra WAIT;
    xor.b32 %r4, %r4, 1; cvt.u64.u32 %d4, %r1; ld.shared.b128 %q1, [%r1];
    clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p3, %q1;
    clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128 %r3, %q1; bar.sync 0;
    @%p3 bra AGAIN;"""
    out = np.zeros(7, np.uint32)
    report = kernel(body, 1, ".shared .align 16 .b8 s[24];\n").launch(
        "k", 7, 32, (out,), hazards="off", schedules=3, resident_clusters=2
    )
    assert out.tolist() == list(range(1, 8))
    assert report.hazards == []


def test_special_registers_of_drivers_and_profilers() -> None:
    body = "mov.u32 %r20, %envreg3; mov.u32 %r21, %reserved_smem_offset_end; mov.u32 %r22, %pm0; mov.u32 %r23, %nsmid;"
    got = run(body, ["b32"] * 4, [("b32", [0] * 32)])
    assert [int(g[0]) for g in got] == [0, 1024, 0, 132]


def test_reductions_of_floats_over_a_warp() -> None:
    values = np.array([-0.0, 0.0, 3, -7, np.nan, 5] + [1.0] * 26, np.float32)
    raw: list[Any] = [("b32", values.view(np.uint32).tolist())]
    forms = ["min.f32", "max.abs.f32", "min.NaN.f32"]
    body = "".join(f"redux.sync.{form} %r{20 + k}, %r1, -1;" for k, form in enumerate(forms))
    got = run(body, ["b32"] * 3, raw)
    assert got[0].view(np.float32)[0] == -7
    assert got[1].view(np.float32)[3] == 7
    assert set(got[2].tolist()) == {0x7FFFFFFF}


# ---- `.pragma "used_bytes_mask"`: the bytes of a load that a program does not use are not checked


NEWER = ".version 8.8\n.target sm_90a\n.address_size 64\n"
# Twelve of sixteen bytes have been written.
SHARED = """.visible .entry k(.param .u64 o) {
 .reg .b64 %rd<2>; .reg .b32 %r<9>;
 .shared .align 16 .b8 s[16];
 ld.param.u64 %rd1, [o];
 st.shared.v2.u32 [s], {1, 2};
 st.shared.u32 [s+8], 3;
 PRAGMA
 ld.shared.v4.u32 {%r1, %r2, %r3, %r4}, [s];
 add.u32 %r1, %r1, %r3;
 st.global.u32 [%rd1], %r1;
 ret;
}
"""
# Block 1 reads sixteen bytes, of which block 0 writes the first four.
GLOBAL = """.visible .entry k(.param .u64 o) {
 .reg .b64 %rd<2>; .reg .b32 %r<9>; .reg .pred %p;
 ld.param.u64 %rd1, [o];
 mov.u32 %r1, %ctaid.x;
 setp.eq.u32 %p, %r1, 0;
 @%p st.global.u32 [%rd1], 7;
 @%p ret;
 PRAGMA
 ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%rd1];
 st.global.u32 [%rd1+16], %r4;
 ret;
}
"""


def masked(body: str, pragma: str, grid: int = 1) -> Report:
    ptx = NEWER + body.replace("PRAGMA", pragma)
    return load(ptx).launch("k", grid, 1, (np.zeros(8, np.uint32),), schedules=3, hazards="collect")


@pytest.mark.parametrize("mask", ["4095", "0xfff", "0xF0F", "0"])
def test_bytes_outside_the_mask_are_not_checked(mask: str) -> None:
    report = masked(SHARED, f'.pragma "used_bytes_mask {mask}";')
    assert report.is_clean, str(report)


@pytest.mark.parametrize(
    "pragma",
    [
        "",
        '.pragma "nounroll";',
        '.pragma "used_bytes_mask 0xffff";',
        '.pragma "used_bytes_mask 0x1000";',
        '.pragma "used_bytes_mask 010";',
        '.pragma "used_bytes_mask 0xfff"; mov.u32 %r1, 0;',
    ],
)
def test_used_bytes_are_checked(pragma: str) -> None:
    assert masked(SHARED, pragma).kinds == {"uninitialized_shared"}


def test_a_race_concerns_used_bytes_alone() -> None:
    assert masked(GLOBAL, "", grid=2).kinds == {"global_race"}
    assert masked(GLOBAL, '.pragma "used_bytes_mask 0xf";', grid=2).kinds == {"global_race"}
    assert masked(GLOBAL, '.pragma "used_bytes_mask 0xf000";', grid=2).is_clean


SCHEDULES = 8

FLOW = """
// Lane 0 and the others come to one shuffle by different paths, as compilers thread jumps.
extern "C" __global__ void threaded(int* out, int n) {
    int v;
    asm volatile(
        "{ .reg .pred first, more; .reg .u32 t; mov.u32 t, %%tid.x; setp.eq.u32 first, t, 0; setp.gt.s32 more, %1, 0;"
        " mov.u32 %0, t; @first bra ONE; @more bra MEET; bra OUT; ONE: add.u32 %0, %0, 100; @more bra MEET; bra OUT;"
        " MEET: shfl.sync.idx.b32 %0, %0, 0, 31, -1; bar.sync 0; OUT: }" : "=r"(v) : "r"(n));
    out[threadIdx.x] = v;
}

// Threads that have nothing to do leave before the others synchronize.
extern "C" __global__ void early_return(int* out, int n) {
    __shared__ int tile[64];
    const int i = threadIdx.x;
    if (i >= n) return;
    tile[i] = i;
    __syncthreads();
    out[i] = tile[n - 1 - i];
}

extern "C" __global__ void half_barrier(int* out) {
    __shared__ int tile[64];
    tile[threadIdx.x] = threadIdx.x;
    if (threadIdx.x < 16) __syncthreads();
    out[threadIdx.x] = tile[threadIdx.x];
}

"""


def test_lanes_on_different_paths_meet_at_a_shuffle() -> None:
    out = np.zeros(64, np.int32)
    assert module_of(FLOW).launch("threaded", 1, 64, (out, 1), schedules=SCHEDULES).is_clean
    assert (out == np.repeat([100, 32], 32)).all()


@pytest.mark.parametrize("count", [1, 31, 33, 50, 64])
def test_lanes_that_return_early_are_waited_for_by_nobody(count: int) -> None:
    out = np.full(64, -1, np.int32)
    assert module_of(FLOW).launch("early_return", 1, 64, (out, count), schedules=SCHEDULES).is_clean
    assert (out[:count] == np.arange(count)[::-1]).all()
    assert (out[count:] == -1).all()


def test_lanes_that_cannot_meet_are_reported() -> None:
    out = np.zeros(64, np.int32)
    report = module_of(FLOW).launch("half_barrier", 1, 64, (out,), schedules=SCHEDULES, hazards="collect")
    assert report.kinds == {"divergent_barrier"}


LIBRARY = """
extern "C" __device__ void* malloc(size_t);
extern "C" __device__ void free(void*);

struct Shape {
    __device__ virtual int area(int x) const { return x; }
};
struct Square : Shape {
    __device__ int area(int x) const override { return x * x; }
};
struct Strip : Shape {
    int width;
    __device__ int area(int x) const override { return x * width; }
};

extern "C" __global__ void shapes(int* out) {
    Shape* shape;
    if (threadIdx.x % 2) {
        Strip* strip = new Strip;
        strip->width = threadIdx.x;
        shape = strip;
    } else {
        shape = new Square;
    }
    out[threadIdx.x] = shape->area(7);
    delete shape;
}

extern "C" __global__ void scratch(long long* out, int n, int times) {
    int* data = static_cast<int*>(malloc(n * sizeof(int)));
    long long sum = -1;
    if (data) {
        for (int i = 0; i < n; ++i) data[i] = i * threadIdx.x;
        sum = 0;
        for (int i = 0; i < n; ++i) sum += data[i];
    }
    out[threadIdx.x] = sum;
    for (int i = 0; i < times; ++i) free(data);
}
"""


def test_objects_with_virtual_functions_on_the_heap() -> None:
    out = np.zeros(32, np.int32)
    assert module_of(LIBRARY).launch("shapes", 1, 32, (out,), schedules=3).is_clean
    lane = np.arange(32)
    assert (out == np.where(lane % 2, 7 * lane, 49)).all()


def test_malloc_gives_each_lane_its_own_memory() -> None:
    out = np.zeros(64, np.int64)
    module = module_of(LIBRARY)
    assert module.launch("scratch", 1, 64, (out, 5, 1), schedules=3).is_clean
    assert (out == 10 * np.arange(64)).all()
    module.launch("scratch", 1, 1, (out, 64 << 20, 0), schedules=1)
    assert out[0] == -1, "the heap has 8 MiB"
    with pytest.raises(TrapError, match="free is called with"):
        module.launch("scratch", 1, 1, (out, 5, 2), schedules=1)


GROUPS = """
struct Workspace { unsigned bytes, barrier; };

__device__ void grid_sync() {
    unsigned high, low;
    asm("mov.u32 %0, %%envreg1;" : "=r"(high));
    asm("mov.u32 %0, %%envreg2;" : "=r"(low));
    auto* space = reinterpret_cast<Workspace*>((static_cast<unsigned long long>(high) << 32) | low);
    asm volatile("barrier.sync 0;" : : : "memory");
    if (threadIdx.x == 0) {
        unsigned old, now;
        const unsigned add = blockIdx.x == 0 ? 0x80000000u - (gridDim.x - 1) : 1;
        asm volatile("atom.add.release.gpu.u32 %0, [%1], %2;" : "=r"(old) : "l"(&space->barrier), "r"(add) : "memory");
        do {
            asm volatile("ld.acquire.gpu.u32 %0, [%1];" : "=r"(now) : "l"(&space->barrier) : "memory");
        } while (!((old ^ now) >> 31));
    }
    asm volatile("barrier.sync 0;" : : : "memory");
}

extern "C" __global__ void reversed(int* out, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    out[i] = 3 * i;
    grid_sync();
    const int v = out[n - 1 - i];
    grid_sync();
    out[i] = v;
}

// Two warps of four meet through the shared memory that the system keeps for groups of several warps.
extern "C" __global__ void pairs(int* out) {
    extern __shared__ int tile[];
    unsigned start, old, now;
    asm("mov.u32 %0, %%reserved_smem_offset_1;" : "=r"(start));
    start += 4 * (threadIdx.x / 64);
    tile[threadIdx.x] = threadIdx.x;
    __syncwarp();
    if (threadIdx.x % 32 == 0)
        asm volatile("atom.shared.add.acq_rel.cta.u32 %0, [%1], 1;" : "=r"(old) : "r"(start) : "memory");
    do {
        asm volatile("ld.acquire.cta.shared.u32 %0, [%1];" : "=r"(now) : "r"(start) : "memory");
    } while (now != 2);
    out[threadIdx.x] = tile[threadIdx.x ^ 32];
}
"""


def test_a_grid_synchronizes_through_the_driver_s_workspace() -> None:
    out = np.zeros(4 * 64, np.int32)
    assert module_of(GROUPS).launch("reversed", 4, 64, (out, out.size), schedules=4).is_clean
    assert (out == 3 * np.arange(out.size)[::-1]).all()


def test_the_system_s_shared_memory_lies_after_the_kernel_s() -> None:
    out = np.zeros(128, np.int32)
    assert module_of(GROUPS).launch("pairs", 1, 128, (out,), shared_bytes=512, schedules=4).is_clean
    assert (out == np.arange(128) ^ 32).all()


COPIES = """
// cp.async.wait_all needs no commit_group.
extern "C" __global__ void fetch(int* out, const int* in) {
    __shared__ __align__(16) int tile[128];
    cp_async_16(shared_address(tile + 4 * threadIdx.x), in + 4 * threadIdx.x, 16);
    asm volatile("cp.async.wait_all;" : : : "memory");
    __syncthreads();
    for (int k = 0; k < 4; ++k) out[32 * k + threadIdx.x] = tile[127 - 32 * k - threadIdx.x];
}

// All lanes of a warp initialize the barrier, with the same count.
extern "C" __global__ void joint_init(int* out, const int* in) {
    __shared__ __align__(128) int tile[32];
    __shared__ __align__(8) u64 bar;
    mbarrier_init(shared_address(&bar), 1);
    fence_mbarrier_init();
    __syncwarp();
    if (threadIdx.x == 0) {
        mbarrier_arrive_expect_tx(shared_address(&bar), sizeof(tile));
        cp_async_bulk_load(shared_address(tile), in, sizeof(tile), shared_address(&bar));
    }
    mbarrier_wait_parity(shared_address(&bar), 0);
    out[threadIdx.x] = tile[threadIdx.x];
}

// Rows of a tile are padded in shared memory; the box takes the padding along, the tensor map clips it.
extern "C" __global__ void padded(const __grid_constant__ TensorMap map) {
    __shared__ __align__(128) int tile[8][36];
    for (int row = 0; row < 8; ++row) tile[row][threadIdx.x] = 100 * row + threadIdx.x;
    fence_proxy_async_shared_cta();
    __syncwarp();
    if (threadIdx.x == 0) {
        cp_async_bulk_tensor_2d_store(&map, shared_address(tile), 0, 0);
        cp_async_bulk_commit_group();
        cp_async_bulk_wait_group<0>();
    }
}
"""


def test_wait_all_waits_for_what_no_group_holds() -> None:
    data, out = np.arange(128, dtype=np.int32) * 7, np.zeros(128, np.int32)
    assert module_of(COPIES).launch("fetch", 1, 32, (out, data), schedules=SCHEDULES).is_clean
    assert (out == data[::-1]).all()


def test_a_warp_may_initialize_a_barrier_together() -> None:
    data, out = np.arange(32, dtype=np.int32) * 7, np.zeros(32, np.int32)
    assert module_of(COPIES).launch("joint_init", 1, 32, (out, data), schedules=SCHEDULES).is_clean
    assert (out == data).all()


def test_padding_that_a_store_clips_may_hold_anything() -> None:
    out = np.zeros((8, 32), np.int32)
    tensor_map = TensorMap.from_array(out, (8, 36), encoder="codec")
    assert module_of(COPIES).launch("padded", 1, 32, (tensor_map,), schedules=3).is_clean
    assert (out == 100 * np.arange(8)[:, None] + np.arange(32)).all()


ATOMICS = """
extern "C" __global__ void update(int* memory, unsigned* counters, float* sums, const int* where, const int* values) {
    const int i = threadIdx.x, k = where[i], v = values[i];
    atomicAdd(memory + k, v), atomicMin(memory + 8 + k, v), atomicMax(memory + 16 + k, v);
    atomicAnd(memory + 24 + k, v), atomicOr(memory + 32 + k, v), atomicXor(memory + 40 + k, v);
    atomicInc(counters + k, 5), atomicDec(counters + 8 + k, 5);
    atomicAdd(sums + k, 0.5f * v);
}
"""


@pytest.mark.parametrize("cells", [1, 3, 8])
def test_atomics_of_a_warp_on_one_some_and_many_cells(cells: int) -> None:
    random = np.random.default_rng(cells)
    where = random.integers(0, cells, 64).astype(np.int32)
    values = random.integers(-(1 << 31), 1 << 31, 64).astype(np.int32)
    memory, counters, sums = np.zeros((6, 8), np.int32), np.zeros((2, 8), np.uint32), np.zeros(8, np.float32)
    memory[3] = -1
    module_of(ATOMICS).launch("update", 1, 64, (memory, counters, sums, where, values), schedules=3)
    for k in range(cells):
        mine = values[where == k]
        functions = (np.add, np.minimum, np.maximum, np.bitwise_and, np.bitwise_or, np.bitwise_xor)
        starts = (0, 0, 0, -1, 0, 0)
        expected = [f.reduce(mine, initial=start, dtype=np.int32) for f, start in zip(functions, starts, strict=True)]
        assert memory[:, k].tolist() == [int(value) for value in expected]
        assert counters[:, k].tolist() == [mine.size % 6, -mine.size % 6]
        assert np.isclose(sums[k], 0.5 * mine.astype(np.float64).sum(), rtol=1e-4, atol=1e3)


NEIGHBOURS = """
.version 8.0
.target sm_90
.address_size 64
.visible .entry k() {
    .shared .align 16 .b8 memory[48];
    .reg .pred %p<3>; .reg .b32 %r<8>;
    mov.u32 %r1, %tid.x;
    shr.u32 %r2, %r1, 5;
    and.b32 %r1, %r1, 31;
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra done;
    mov.u32 %r3, memory;
    mad.lo.u32 %r4, %r2, 16, %r3;
    st.shared.v4.b32 [%r4 + 16], {%r1, %r1, %r1, %r1};
    mad.lo.u32 %r4, %r2, 8, %r3;
    mbarrier.init.shared.b64 [%r4], 1;
    mbarrier.inval.shared.b64 [%r4];
done:
    ret;
}
"""


def test_warps_may_use_neighbouring_mbarriers_and_vectors() -> None:
    """Threads of two warps access different 8 or 16 bytes, so nothing has to order them."""
    report = load(NEIGHBOURS).launch("k", 1, 64, hazards="collect")
    assert report.is_clean, str(report)
