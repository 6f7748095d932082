"""Instructions that all threads of a warp, or of a member mask, must execute together.

Source: PTX ISA: "mma" and "ldmatrix" (.aligned: "all threads in the warp must execute the same instruction"; undefined
"if any thread in the warp has exited"), "shfl.sync" ("all non-exited threads corresponding to membermask"), "bar".
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from catalogue import module_of

from cudatma.emulator import Report, load

KERNEL = """.version 8.3
.target sm_90a
.address_size 64
.global .align 128 .b8 map[128];
.visible .entry k(.param .u32 limit) {
    .reg .pred %p<3>;
    .reg .b32 %r<12>;
    .reg .b64 %rd<2>;
    mov.u64 %rd1, map;
    .shared .align 128 .b8 box[1024];
    mov.u32 %r1, %tid.x;
    ld.param.u32 %r2, [limit];
    and.b32 %r0, %r1, 31;
    setp.lt.u32 %p1, %r0, %r2;
    mov.u32 %r3, 0; mov.u32 %r4, 0; mov.u32 %r5, 0; mov.u32 %r6, 0; mov.u32 %r7, 0; mov.u32 %r8, 0;
    shl.b32 %r9, %r1, 4;
    mov.u32 %r10, box;
    add.u32 %r9, %r9, %r10;
    st.shared.v4.b32 [%r9], {%r3, %r3, %r3, %r3};
    bar.sync 0;
    FORM
    bar.sync 0;
    ret;
}
"""
FORMS = {
    "branch": "@!%p1 bra SKIP;\n INSTRUCTION\n SKIP:",
    "guard": "@%p1 INSTRUCTION",
    "exit": "@!%p1 exit;\n INSTRUCTION",
}
MATRICES = {
    "mma": "mma.sync.aligned.m16n8k8.row.col.f16.f16.f16.f16 {%r3, %r4}, {%r5, %r6}, {%r7}, {%r3, %r4};",
    "ldmatrix": "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r3}, [%r9];",
    "stmatrix": "stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r9], {%r3};",
    "movmatrix": "movmatrix.sync.aligned.m8n8.trans.b16 %r4, %r3;",
}
OTHERS = {
    "setmaxnreg": "setmaxnreg.dec.sync.aligned.u32 24;",
    "tensormap.cp_fenceproxy": "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned "
    "[%rd1], [box], 128;",
    "wgmma.fence": "wgmma.fence.sync.aligned;",
    "shfl": "shfl.sync.idx.b32 %r4, %r3, 0, 31, 0xffffffff;",
    "vote": "vote.sync.ballot.b32 %r4, %p1, 0xffffffff;",
    "redux": "redux.sync.add.u32 %r4, %r3, 0xffffffff;",
    "bar.warp.sync": "bar.warp.sync 0xffffffff;",
    "bar.sync": "bar.sync 1, 32;",
    "barrier.cluster": "barrier.cluster.arrive.aligned;",
}
EVERY = {**MATRICES, **OTHERS}


def run(instruction: str, form: str, limit: int, threads: int = 32) -> Report:
    text = KERNEL.replace("FORM", FORMS[form].replace("INSTRUCTION", instruction))
    return load(text).launch("k", 1, threads, (np.uint32(limit),), hazards="collect", schedules=3)


@pytest.mark.parametrize("form", ["branch", "guard"])
@pytest.mark.parametrize("name", EVERY)
def test_a_part_of_the_warp_is_reported(name: str, form: str) -> None:
    report = run(EVERY[name], form, 16)
    kind = "divergent_barrier" if name == "bar.sync" else "divergent_warp"
    assert report.kinds == {kind}, str(report)
    assert name in report.hazards[0].instruction


@pytest.mark.parametrize("form", ["branch", "guard", "exit"])
@pytest.mark.parametrize("limit", [0, 32])
@pytest.mark.parametrize("name", EVERY)
def test_a_condition_that_is_the_same_in_all_lanes_is_clean(name: str, limit: int, form: str) -> None:
    report = run(EVERY[name], form, limit)
    assert report.is_clean, str(report)


@pytest.mark.parametrize("limit", [16, 32])
@pytest.mark.parametrize("name", ["shfl", "vote", "redux", "bar.warp.sync"])
def test_lanes_that_their_own_mask_does_not_name_are_reported(name: str, limit: int) -> None:
    """All 32 lanes, or 16 of them, with a mask of the first eight."""
    report = run(EVERY[name].replace("0xffffffff", "0xff"), "guard", limit)
    assert report.kinds == {"divergent_warp"}, str(report)
    lanes = "0xffffff00" if limit == 32 else "0xff00"
    assert f"lanes {lanes} execute" in str(report)


@pytest.mark.parametrize("name", EVERY)
def test_lanes_that_have_left_count_for_matrices_alone(name: str) -> None:
    report = run(EVERY[name], "exit", 16)
    assert report.kinds == ({"divergent_warp"} if name in MATRICES else set()), str(report)


@pytest.mark.parametrize("name", ["shfl", "bar.warp.sync", "redux", "barrier.cluster", "ldmatrix"])
def test_a_warp_with_fewer_threads_is_whole(name: str) -> None:
    """Lanes that the block does not have are not missing."""
    report = run(EVERY[name], "guard", 32, threads=40)
    assert report.is_clean, str(report)


#: Half a warp has v = 3 lane, the other half 5 lane; each executes its own instruction, with the mask of all.
PARTED = """
extern "C" __global__ void k(u32* out) {
    const u32 lane = threadIdx.x;
    u32 v, found;
    if (lane < 16) {
        v = 3 * lane;
        found = FIRST;
    } else {
        v = 5 * lane;
        found = SECOND + 1;
    }
    out[lane] = found;
}
"""
VALUES = [(3 if lane < 16 else 5) * lane for lane in range(32)]
MEETINGS: dict[str, Callable[[int], int]] = {
    "__shfl_xor_sync(-1u, v, 16)": lambda lane: VALUES[lane ^ 16],
    "__ballot_sync(-1u, v & 1)": lambda lane: sum((v & 1) << k for k, v in enumerate(VALUES)),
    "__any_sync(-1u, v == 155)": lambda lane: 1,
    "__all_sync(-1u, v != 155)": lambda lane: 0,
    "__reduce_max_sync(-1u, v)": lambda lane: 155,
    "__match_any_sync(-1u, v % 2)": lambda lane: 0x55555555 << lane % 2,
    "(__syncwarp(), v)": lambda lane: VALUES[lane],
    "(__syncwarp(), __shfl_sync(-1u, v, 31) + __shfl_sync(-1u, v, 1))": lambda lane: 158,
}


@pytest.mark.parametrize("operation", MEETINGS)
def test_lanes_meet_at_different_instructions(operation: str) -> None:
    out = np.zeros(32, np.uint32)
    source = PARTED.replace("FIRST", operation).replace("SECOND", operation)
    report = module_of(source, ()).launch("k", 1, 32, (out,), hazards="collect", schedules=4)
    assert report.is_clean, str(report)
    assert out.tolist() == [MEETINGS[operation](lane) + (lane > 15) for lane in range(32)]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("__shfl_xor_sync(-1u, v, 16)", "__shfl_sync(-1u, v, 0)"),  # other qualifiers
        ("__shfl_sync(-1u, v, 0)", "__shfl_sync(0xffff0000u, v, 16)"),  # another mask
        ("__ballot_sync(-1u, v & 1)", "v"),  # nothing
    ],
)
def test_lanes_whose_instructions_differ_do_not_meet(first: str, second: str) -> None:
    source = PARTED.replace("FIRST", first).replace("SECOND", second)
    report = module_of(source, ()).launch("k", 1, 32, (np.zeros(32, np.uint32),), hazards="collect", schedules=4)
    assert {hazard.kind for hazard in report.hazards} == {"divergent_warp"}, str(report)


def test_what_a_lane_writes_after_the_meeting_is_not_ordered_before_it() -> None:
    source = """
    extern "C" __global__ void k(u32* out) {
        __shared__ u32 box[32];
        box[threadIdx.x] = out[threadIdx.x];
        __syncwarp();
        if (threadIdx.x == 0) {
            BEFORE
            __syncwarp();
            AFTER
        } else {
            __syncwarp();
            out[threadIdx.x] = box[threadIdx.x];
        }
    }
    """
    kinds = []
    for before, after in (("box[9] = 7;", ""), ("", "box[9] = 7;")):
        text = source.replace("BEFORE", before).replace("AFTER", after)
        report = module_of(text, ()).launch("k", 1, 32, (np.zeros(32, np.uint32),), hazards="collect", schedules=4)
        kinds.append(report.kinds)
    assert not kinds[0]
    assert "lane_race" in kinds[1]


#: All lanes execute one instruction, each half, or each lane of a kind, with its own mask.
GROUPS: dict[str, Callable[[int], int]] = {
    "__ballot_sync(half, v & 1)": lambda lane: sum((VALUES[k] & 1) << k for k in half_of(lane)),
    "__reduce_add_sync(half, v)": lambda lane: sum(VALUES[k] for k in half_of(lane)),
    "__reduce_add_sync(lane % 2 ? 0xaaaaaaaau : 0x55555555u, 1)": lambda lane: 16,
    "__match_any_sync(half, 7)": lambda lane: sum(1 << k for k in half_of(lane)),
    "__shfl_sync(half, v, lane ^ 1)": lambda lane: VALUES[lane ^ 1],
}


def half_of(lane: int) -> range:
    return range(lane // 16 * 16, lane // 16 * 16 + 16)


@pytest.mark.parametrize("odd_first", [False, True])
@pytest.mark.parametrize("operation", GROUPS)
def test_each_member_mask_is_a_group_of_its_own(operation: str, odd_first: bool) -> None:
    """odd_first: the odd lanes of both halves come to the instruction by another way than the even ones."""
    source = """
    extern "C" __global__ void k(u32* out) {
        const u32 lane = threadIdx.x, half = lane < 16 ? 0xffffu : 0xffff0000u, v = (lane < 16 ? 3 : 5) * lane;
        u32 found;
        if (ODD_FIRST && lane % 2) found = OPERATION;
        else found = OPERATION;
        out[lane] = found;
    }
    """
    source = source.replace("OPERATION", operation).replace("ODD_FIRST", str(int(odd_first)))
    out = np.zeros(32, np.uint32)
    report = module_of(source, ()).launch("k", 1, 32, (out,), hazards="collect", schedules=4)
    assert report.is_clean, str(report)
    assert out.tolist() == [GROUPS[operation](lane) for lane in range(32)]


def test_no_lane_waits_at_a_join_for_lanes_that_need_it_elsewhere() -> None:
    """Both halves are in all three branches, and each goes on as soon as its own lanes have met."""
    step = "v = FACTOR * v + __shfl_xor_sync(half, v, 8); v += __reduce_add_sync(half, v);"
    one, two, three = (f"{step} {step}".replace("FACTOR", factor) for factor in "357")
    source = f"""
    extern "C" __global__ void k(u32* out) {{
        const u32 lane = threadIdx.x, half = lane < 16 ? 0xffffu : 0xffff0000u;
        u32 v = lane;
        if (lane & 2) {{ {one} }}
        else if (lane & 4) {{ {two} }}
        else {{ {three} }}
        out[lane] = v;
    }}
    """
    values = np.arange(32, dtype=np.uint32)
    lanes = np.arange(32)
    for _ in range(2):
        values = np.where(lanes & 2, 3, np.where(lanes & 4, 5, 7)).astype(np.uint32) * values + values[lanes ^ 8]
        values += values.reshape(2, 16).sum(axis=1, dtype=np.uint32).repeat(16)
    out = np.zeros(32, np.uint32)
    report = module_of(source, ()).launch("k", 1, 32, (out,), hazards="collect", schedules=8)
    assert report.is_clean, str(report)
    assert (out == values).all()


@pytest.mark.parametrize(
    ("lanes", "look"), [(32, "atomicCAS((u32*)y, 0, 1) != 0"), (2, "y[0] || atomicExch((u32*)y, 1)")]
)
def test_a_lane_releases_its_lock_while_other_lanes_try_to_get_it(lanes: int, look: str) -> None:
    source = f"""
    extern "C" __global__ void k(volatile u32* y) {{
        if (threadIdx.x < {lanes}) {{
            while ({look}) {{}}
            __threadfence();
            y[1] = y[1] + 1;
            __threadfence();
            atomicExch((u32*)y, 0);
        }}
    }}
    """
    y = np.zeros(2, np.uint32)
    assert module_of(source, ()).launch("k", 2, 32, (y,), schedules=2).is_clean
    assert y.tolist() == [0, 2 * lanes]


def test_lanes_that_wait_for_a_polling_lane_are_no_divergent_warp() -> None:
    source = 'extern "C" __global__ void k(volatile u32* y) { if (threadIdx.x == 0) while (!y[0]) {} __syncthreads(); }'
    report = module_of(source, ()).launch("k", 1, 64, (np.zeros(1, np.uint32),), hazards="collect", schedules=2)
    assert report.kinds == {"deadlock"}, str(report)


@pytest.mark.parametrize("form", ["branch", "guard"])
def test_a_member_mask_of_those_who_come_is_clean(form: str) -> None:
    for instruction in (OTHERS["shfl"], OTHERS["bar.warp.sync"], OTHERS["redux"]):
        report = run(instruction.replace("0xffffffff", "0xffff"), form, 16)
        assert report.is_clean, str(report)


#: v is x[lane]; whether what a shuffle reads from a lane that does not take part has an effect. limit: lanes that stay.
UNDEFINED = [
    ("y[lane] = __shfl_down_sync(0xffff, v, 8);", 16, True),
    ("u32 t = __shfl_down_sync(0xffff, v, 8); y[lane] = lane < 8 ? t : v;", 16, False),
    ("u32 t = __shfl_down_sync(0xffff, v, 8); if (lane < 8) y[lane] = t;", 16, False),
    ("u32 t = __shfl_down_sync(0xffff, v, 8); if (t == 3) y[lane] = 1;", 16, True),
    ("y[lane] = x[__shfl_sync(0xffff, v, 20) & 31];", 16, True),
    ("y[lane] = __any_sync(0xffff, __shfl_sync(0xffff, v, 20) == 3);", 16, True),
    ("for (u32 i = 16; i; i /= 2) v += __shfl_down_sync(-1u, v, i); if (lane == 0) y[0] = v;", 20, True),
    ("for (u32 i = 8; i; i /= 2) v += __shfl_down_sync(0xffff, v, i); if (lane == 0) y[0] = v;", 16, False),
    ("u32 half = lane < 16 ? 0xffff : 0xffff0000; y[lane] = __shfl_down_sync(half, v, 4);", 32, True),
    ("u32 half = lane < 16 ? 0xffff : 0xffff0000; y[lane] = __shfl_down_sync(half, v, 4, 16);", 32, False),
    ("u32 half = lane < 16 ? 0xffff : 0xffff0000; y[lane] = __shfl_xor_sync(half, v, 4);", 32, False),
    (
        'u32 t = __shfl_down_sync(0xffff, v, 8), r = 0; asm volatile("{ .reg .pred p, q; setp.ne.u32 p, %1, 77; '
        'setp.eq.u32 q, %2, 0; @p selp.u32 %0, 1, 2, q; }" : "+r"(r) : "r"(t), "r"(lane)); y[lane] = r;',
        16,
        True,
    ),
]


@pytest.mark.parametrize(("body", "limit", "is_used"), UNDEFINED)
def test_an_undefined_value_is_reported_where_it_has_an_effect(body: str, limit: int, is_used: bool) -> None:
    source = (
        'extern "C" __global__ void k(const u32* x, u32* y, u32 limit) {\n'
        f"const u32 lane = threadIdx.x; u32 v = x[lane]; if (lane >= limit) return; {body} }}"
    )
    x, y = np.arange(32, dtype=np.uint32), np.zeros(32, np.uint32)
    report = module_of(source, ()).launch("k", 1, 32, (x, y, limit), hazards="collect", schedules=2)
    assert report.kinds == ({"uninitialized_register"} if is_used else set()), str(report)
