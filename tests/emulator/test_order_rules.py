"""Rules of the hazard checks that mutants revealed, each on the kernel that shows it."""

from __future__ import annotations

import catalogue
import numpy as np
import pytest
from probe_subjects import subjects
from ptx_lines import HEADER
from ptx_of import module_of

from cudatma.emulator.ptx.early_uses import unfenced_wgmmas
from cudatma.emulator.ptx.flow import Flow
from cudatma.emulator.ptx.parser import parse

SUBJECTS = {subject.name: subject for subject in subjects()}


@pytest.mark.parametrize(
    ("name", "operator", "text", "kind"),
    [
        # mbarrier.inval by one thread while others still wait there
        ("box_copy/none_store", "drop_barrier", "bar.sync 0", "barrier_uninitialised"),
        # a tensor load and a tensor store of the same bytes under two swizzles
        ("box_copy/none_store", "map_swizzle", "argument 1: none becomes 64B", "swizzle_mismatch"),
        ("box_copy/128B_store", "map_swizzle", "argument 0: 128B becomes none", "swizzle_mismatch"),
        # tensormap.replace by one lane on bytes that all lanes wrote
        ("tensormap_edit/plain", "drop_warp_sync", "bar.warp.sync - 1", "lane_race"),
        # tensormap.cp_fenceproxy of 128 bytes that are not aligned to 128
        ("tensormap_edit/plain", "move_base", "_ZZ14tensormap_editE4copy + 64", "trap"),
        # fragments or accumulators written anew for a group of wgmmas without a fence
        ("wgmma_gemm/cluster1", "drop_fence", "wgmma.fence.sync.aligned", "wgmma_missing_fence"),
    ],
)
def test_rules(name: str, operator: str, text: str, kind: str) -> None:
    trial = SUBJECTS[name].trial()
    assert trial.unchanged(4).is_clean
    chosen = [mutant for mutant in trial.mutants if mutant.operator == operator and mutant.text == text]
    assert chosen
    assert any(kind in outcome.kinds for outcome in trial.outcomes(4, chosen))


GROUP = "{%f1,%f2,%f3,%f4}, {%r1,%r2,%r3,%r4}, %d1, 1, 1, 1, 0;"
WGMMA = f"wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {GROUP}"
FENCE, COMMIT, WRITE = "wgmma.fence.sync.aligned;", "wgmma.commit_group.sync.aligned;", "add.u32 %r2, %r5, 1;"


@pytest.mark.parametrize(
    ("body", "count"),
    [
        (f"{WRITE} {FENCE} {WGMMA} {COMMIT}", 0),
        (f"{WRITE} {WGMMA} {COMMIT}", 1),
        (f"{WRITE} {FENCE} {WGMMA} {COMMIT} {WRITE} {WGMMA} {COMMIT}", 1),
        (f"{WRITE} {FENCE} {WGMMA} {COMMIT} {WRITE} {FENCE} {WGMMA} {COMMIT}", 0),
        # Nothing but the wgmmas touches the accumulators, and fragments stay as they are.
        (f"{WRITE} {FENCE} {WGMMA} {COMMIT} {WGMMA} {COMMIT}", 0),
        # Compilers move a write after the group's fence, and use constants and renamed accumulators.
        (f"{FENCE} {WRITE} {WGMMA} {WGMMA} {COMMIT}", 0),
        (f"{WRITE} {FENCE} mov.f32 %f1, 0f00000000; {WGMMA} {COMMIT} mov.f32 %f9, %f1; mov.f32 %f1, %f9; {WGMMA}", 0),
        # The second round of a loop comes without a fence.
        (f"{FENCE} AGAIN: {WRITE} {WGMMA} {COMMIT} setp.eq.u32 %p1, %r6, 0; @%p1 bra AGAIN;", 1),
        (f"AGAIN: {WRITE} {FENCE} {WGMMA} {COMMIT} setp.eq.u32 %p1, %r6, 0; @%p1 bra AGAIN;", 0),
    ],
)
def test_wgmmas_whose_registers_no_fence_covers(body: str, count: int) -> None:
    registers = ".reg .pred %p<9>; .reg .b32 %r<9>; .reg .f32 %f<19>; .reg .b64 %d<9>;"
    module = parse(f"{HEADER}.visible .entry k() {{ {registers} {body} ret; }}")
    assert len(unfenced_wgmmas(Flow(module.functions["k"]))) == count


#: Two slots filled by cp.async, never committed: each arrival on a barrier covers the copies before it alone.
SLOTS = """
extern "C" __global__ void k(const u32* in, u32* out) {
    __shared__ __align__(16) u32 box[2][128];
    __shared__ __align__(8) u64 full[2];
    const u32 lane = threadIdx.x % 32, bar = shared_address(full);
    if (threadIdx.x == 0) { mbarrier_init(bar, 32); mbarrier_init(bar + 8, 32); }
    __syncthreads();
    if (threadIdx.x < 32) {
        for (u32 s = 0; s < 2; ++s) {
            cp_async_16(shared_address(box[s] + 4 * lane), in + 128 * s + 4 * lane, 16);
            cp_async_mbarrier_arrive_noinc(bar + 8 * s);
        }
    } else {
        mbarrier_wait_parity(bar, 0);
        u32 sum = box[0][lane];
#ifndef BUG
        mbarrier_wait_parity(bar + 8, 0);
#endif
        out[lane] = sum + box[1][lane];
    }
}"""


@pytest.mark.parametrize("bug", [False, True])
def test_an_arrival_covers_the_copies_before_it_alone(bug: bool) -> None:
    given, out = np.arange(256, dtype=np.uint32), np.zeros(32, np.uint32)
    report = module_of(("#define BUG\n" if bug else "") + SLOTS).launch(
        "k", 1, 64, (given, out), schedules=8, hazards="collect"
    )
    assert report.kinds == ({"read_before_load"} if bug else set()), str(report)
    assert bug or (out == given[:32] + given[128:160]).all()


#: Warp 1 overwrites what warp 0 reads.
REUSED = """
extern "C" __global__ void k(u32* given, u32* out) {
    __shared__ u32 box[32];
    const u32 lane = threadIdx.x % 32;
    if (threadIdx.x < 32) PLACE[lane] = threadIdx.x;
    __syncthreads();
    if (threadIdx.x < 32) out[lane] = PLACE[31 - lane];   //! READ
    else PLACE[lane] = lane + 5;
}"""


@pytest.mark.parametrize("place", ["box", "given"])
def test_a_write_after_a_read_names_the_read(place: str) -> None:
    source = REUSED.replace("PLACE", place)
    args = np.zeros(32, np.uint32), np.zeros(32, np.uint32)
    module = catalogue.module_of(source, ())
    report = module.launch("k", 1, 64, args, hazards="collect", replay=0)
    (hazard,) = report.hazards
    line = catalogue.line_of(source, (), "READ")
    assert f"(kernel.cu:{line}) by `ld.{'shared' if place == 'box' else 'global'}.u32`" in hazard.message


#: Thread 0 stores a word and issues a copy; thread 32 waits for the copy, and perhaps for an arrival of thread 0.
COMPLETION = """
extern "C" __global__ void k(const u32* in, u32* out) {
    __shared__ alignas(128) u32 box[32];
    __shared__ u32 word;
    __shared__ alignas(8) u64 full;
    const u32 f = ADDRESS(&full);
    if (threadIdx.x == 32) { INIT(f, 1); FENCE_INIT(); }
#ifndef ISSUER_ARRIVES
    if (threadIdx.x == 32) EXPECT(f, 128);
#endif
    __syncthreads();
    if (threadIdx.x == 0) {
        word = in[5];
#ifdef ISSUER_ARRIVES
        EXPECT(f, 128);
#endif
        BULK_LOAD(ADDRESS(box), in, 128, f);
    } else if (threadIdx.x == 32) {
        WAIT(f, 0);
        out[0] = word + box[7];
    }
}"""


@pytest.mark.parametrize(("defines", "kinds"), [(("ISSUER_ARRIVES",), set()), ((), {"data_race"})])
def test_the_completion_of_a_copy_orders_the_copy_alone(defines: tuple[str, ...], kinds: set[str]) -> None:
    args = np.arange(32, dtype=np.uint32), np.zeros(1, np.uint32)
    report = catalogue.module_of(COMPLETION, defines).launch("k", 1, 64, args, hazards="collect", schedules=4)
    assert report.kinds == kinds, str(report)
