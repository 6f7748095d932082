"""Instructions that all threads of a warp, or all that a member mask names, have to execute together.

Source: PTX ISA: "mma" and "ldmatrix" (.aligned: "all threads in the warp must execute the same instruction"; undefined
"if any thread in the warp has exited"), "shfl.sync" ("all non-exited threads corresponding to membermask"), "bar".
"""

from __future__ import annotations

import numpy as np
import pytest

from cudatma.emulator import Report, load

KERNEL = """.version 8.3
.target sm_90a
.address_size 64
.visible .entry k(.param .u32 limit) {
    .reg .pred %p<3>;
    .reg .b32 %r<12>;
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


@pytest.mark.parametrize("form", ["branch", "guard"])
def test_a_member_mask_of_those_who_come_is_clean(form: str) -> None:
    for instruction in (OTHERS["shfl"], OTHERS["bar.warp.sync"], OTHERS["redux"]):
        report = run(instruction.replace("0xffffffff", "0xffff"), form, 16)
        assert report.is_clean, str(report)
