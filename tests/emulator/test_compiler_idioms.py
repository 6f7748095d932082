"""Idioms of compilers: moved and merged instructions, and loads that use only some of their bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ptx_lines import HEADER, kernel, run

from cudatma.emulator import Report, load

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
    assert masked(SHARED, pragma).kinds == {"uninitialised_shared"}


def test_a_race_concerns_used_bytes_alone() -> None:
    assert masked(GLOBAL, "", grid=2).kinds == {"global_race"}
    assert masked(GLOBAL, '.pragma "used_bytes_mask 0xf";', grid=2).kinds == {"global_race"}
    assert masked(GLOBAL, '.pragma "used_bytes_mask 0xf000";', grid=2).is_clean
