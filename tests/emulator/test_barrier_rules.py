"""Rules of mbarriers, atomics and proxy fences that PTX states by form, and the bits of an mbarrier in memory."""

from __future__ import annotations

import barrier_after_inval as after_inval
import catalogue
import numpy as np
import probe_configs as probes
import pytest
from barrier_states import CASES, STEPS, UNTOUCHED, states
from probe_subjects import subjects
from ptx_lines import HEADER, kernel
from ptx_of import module_of, probe

import cudatma
from cudatma.emulator import Report
from cudatma.emulator.ptx.early_uses import unfenced_wgmmas
from cudatma.emulator.ptx.flow import Flow
from cudatma.emulator.ptx.parser import parse
from cudatma.mbarrier_bits import decode, encode

#: %r1: the CTA's rank. %r2, %r3: a barrier, and the one of CTA 0. %r4, %r5: the lane's word of ``box``, and the one of
#: CTA 0. %d3, %d5: generic addresses of %r3 and %r5.
SHARED = ".shared .align 16 .b32 box[32]; .shared .align 8 .b64 ready;"
BEGIN = """
mov.u32 %r1, %cluster_ctarank; mov.u32 %r2, ready; mov.u32 %r4, box;
shl.b32 %r6, %r63, 2; add.u32 %r4, %r4, %r6; st.shared.u32 [%r4], 0;
setp.ne.u32 %p1, %r63, 0;
@%p1 bra BEGUN;
mbarrier.init.shared.b64 [%r2], COUNT; fence.mbarrier_init.release.cluster;
BEGUN:
barrier.cluster.arrive; barrier.cluster.wait;
mapa.shared::cluster.u32 %r3, %r2, 0; mapa.shared::cluster.u32 %r5, %r4, 0;
cvt.u64.u32 %d3, %r3; add.u64 %d3, %d3, 0x1000000000000000;
cvt.u64.u32 %d5, %r5; add.u64 %d5, %d5, 0x1000000000000000;
ld.param.u64 %d1, [p0];
setp.eq.u32 %p2, %r1, 0;
"""
END = "END: barrier.cluster.arrive; barrier.cluster.wait;"


def launch(body: str, count: int = 32, cluster: int = 2) -> Report:
    """Return the report of 4 schedules in which a cluster executes ``body``; %p2 is true in CTA 0."""
    module = kernel(BEGIN.replace("COUNT", str(count)) + body + END, 1, SHARED)
    out = np.zeros(64, np.uint32)
    return module.launch("k", cluster, 32, (out,), cluster=cluster, schedules=4, hazards="collect")


def first_kind(report: Report) -> str:
    return report.findings[0].kind if report.findings else ""


WAIT = "WAIT: mbarrier.try_wait.parity{wait}.shared::cta.b64 %p3, [%r2], 0; @!%p3 bra WAIT;"


def hand_over(first: str, before: str, arrive: str, wait: str, after: str, second: str) -> Report:
    """Let CTA 1 execute ``first`` and arrive at CTA 0's barrier, where CTA 0 waits before it executes ``second``."""
    return launch(
        f"@%p2 bra WAIT; {first} {before} mbarrier.arrive{arrive}.shared::cluster.b64 _, [%r3]; bra END;"
        f"{WAIT.format(wait=wait)} {after} {second}"
    )


WRITE, READ = "st.shared::cluster.u32 [%r5], 5;", "ld.shared.u32 %r7, [%r4];"
FENCE, NARROW = "fence.acq_rel.cluster;", "fence.acq_rel.cta;"


@pytest.mark.parametrize(
    ("before", "arrive", "wait", "after", "kind"),
    [
        ("", ".release.cluster", ".acquire.cluster", "", ""),
        ("", "", ".acquire.cluster", "", "data_race"),
        ("", ".release.cta", ".acquire.cluster", FENCE, "data_race"),
        ("", ".release.cluster", "", "", "data_race"),
        ("", ".release.cluster", "", FENCE, ""),
        ("", ".release.cluster", "", NARROW, "data_race"),
        ("", ".relaxed.cluster", ".acquire.cluster", "", "data_race"),
        (FENCE, ".relaxed.cluster", ".acquire.cluster", "", ""),
        (NARROW, ".relaxed.cluster", ".acquire.cluster", "", "data_race"),
        ("fence.release.gpu;", ".relaxed.cluster", ".relaxed.cluster", "fence.acquire.gpu;", ""),
        ("", ".release.cluster", ".relaxed.cluster", "", "data_race"),
    ],
)
def test_data_reach_another_cta_at_cluster_scope_alone(
    before: str, arrive: str, wait: str, after: str, kind: str
) -> None:
    report = hand_over(WRITE, before, arrive, wait, after, READ)
    assert first_kind(report) == kind, str(report)
    assert (
        report.is_clean or (arrive, wait) != ("", ".acquire.cluster") or "release.cluster" in report.hazards[0].advice
    )


@pytest.mark.parametrize(
    ("first", "second", "kind"),
    [
        ("ld.shared::cluster.u32 %r7, [%r5];", "st.shared.u32 [%r4], 7;", ""),
        (WRITE, "st.shared.u32 [%r4], 7;", "data_race"),
        ("ld.global.u32 %r7, [%d1];", "st.global.u32 [%d1], 7;", ""),
        ("st.global.u32 [%d1], 5;", "st.global.u32 [%d1], 7;", "global_race"),
        ("st.global.u32 [%d1], 5;", "ld.global.u32 %r7, [%d1];", "global_race"),
    ],
)
def test_a_remote_arrival_without_a_scope_orders_writes_after_reads(first: str, second: str, kind: str) -> None:
    """Consumers of a multicast ring release slots in this way."""
    report = hand_over(first, "", "", "", "", second)
    assert first_kind(report) == kind, str(report)


@pytest.mark.parametrize(
    ("text", "is_right"),
    [
        ("mbarrier.arrive.shared::cta.b64 %d7, [%r3];", False),
        ("mbarrier.arrive.shared.b64 _, [%r3];", False),
        ("mbarrier.arrive.b64 %d7, [%d3];", False),
        ("mbarrier.arrive.expect_tx.shared.b64 _, [%r3], 0;", False),
        ("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r3], 0;", False),
        ("mbarrier.test_wait.parity.shared::cta.b64 %p3, [%r3], 1;", False),
        ("mbarrier.try_wait.parity.b64 %p3, [%d3], 1;", False),
        ("mbarrier.inval.shared.b64 [%r3];", False),
        ("cp.async.mbarrier.arrive.noinc.shared.b64 [%r3];", False),
        ("atom.shared.add.u32 %r7, [%r5], 1;", False),
        ("red.shared::cta.add.u32 [%r5], 1;", False),
        ("mbarrier.arrive.shared::cluster.b64 _, [%r3];", True),
        ("mbarrier.arrive.b64 _, [%d3];", True),
        ("mbarrier.expect_tx.relaxed.cluster.shared::cluster.b64 [%r3], 0;", True),
        ("atom.add.u32 %r7, [%d5], 1;", True),
        ("red.shared::cluster.add.u32 [%r5], 1;", True),
    ],
)
def test_forms_without_cluster_reach_their_own_cta_alone(text: str, is_right: bool) -> None:
    report = launch(f"@%p2 bra END; {text}")
    assert first_kind(report) == ("" if is_right else "out_of_bounds"), str(report)
    # CTA 0 itself may use the same address, although mapa made it.
    assert launch(f"@!%p2 bra END; {text}").is_clean or "inval" in text


EXPECT = "mbarrier.expect_tx.relaxed.cta.shared.b64 [%r2], {};"
COMPLETE = "mbarrier.complete_tx.relaxed.cta.shared.b64 [%r2], {};"
ARRIVE = "mbarrier.arrive.shared.b64 %d7, [%r2];"
TEST = "mbarrier.test_wait.shared.b64 %p3, [%r2], %d7;"


@pytest.mark.parametrize(
    ("count", "text", "is_right"),
    [
        (1, "mbarrier.arrive.noComplete.shared.b64 %d7, [%r2], 1;", False),
        (2, "mbarrier.arrive.noComplete.shared.b64 %d7, [%r2], 1;", True),
        (1, EXPECT.format(1048575) + EXPECT.format(1), False),
        (1, EXPECT.format(1048576), False),
        (1, COMPLETE.format(1048575) + COMPLETE.format(1) + EXPECT.format(1048575) + EXPECT.format(1), False),
        (1, EXPECT.format(1048574) + EXPECT.format(1) + COMPLETE.format(1048575), True),
        (1, f"{ARRIVE} {TEST}", True),
        (1, f"{ARRIVE} mbarrier.arrive.shared.b64 _, [%r2]; {TEST}", False),
    ],
)
def test_limits(count: int, text: str, is_right: bool) -> None:
    report = launch(f"@%p1 bra END; {text}", count)
    assert first_kind(report) == ("" if is_right else "barrier_limit"), str(report)


@pytest.mark.parametrize("arrive", ["mbarrier.arrive.shared.b64 _,", "cp.async.mbarrier.arrive.noinc.shared.b64"])
def test_too_many_arrivals_are_called_too_many(arrive: str) -> None:
    """All lanes arrive where one is counted; two waits for the next phase show a deadlock as well."""
    text = f"{arrive} [%r2]; {WAIT.format(wait='')} mbarrier.try_wait.parity.shared.b64 %p3, [%r2], 1;"
    assert launch(text).is_clean
    report = launch(text, count=1)
    assert first_kind(report) == "arrival_overflow", str(report)
    assert "an instruction arrives 32 times" in report.hazards[0].message


@pytest.mark.parametrize(
    ("writer", "reader", "kind"),
    [
        ("", "fence.proxy.async.shared::cta;", ""),
        ("fence.proxy.async;", "", ""),
        ("fence.proxy.async.shared::cluster;", "", ""),
        ("fence.proxy.async.shared::cta;", "", "missing_proxy_fence"),
        ("", "fence.proxy.async.global;", "missing_proxy_fence"),
    ],
)
def test_a_proxy_fence_covers_its_state_space(writer: str, reader: str, kind: str) -> None:
    """CTA 1 writes into the shared memory of CTA 0, which stores it with a bulk copy."""
    report = launch(
        f"@%p2 bra MET; {WRITE} {writer} MET: barrier.cluster.arrive; barrier.cluster.wait; @!%p2 bra END; {reader}"
        "bar.warp.sync -1; @%p1 bra END; cp.async.bulk.global.shared::cta.bulk_group [%d1], [%r4], 128;"
        "cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;"
    )
    assert first_kind(report) == kind, str(report)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("red.global.add.u32 [%d1], 1;", ""),
        ("red.global.cluster.add.u32 [%d1], 1;", ""),
        ("red.global.cta.add.u32 [%d1], 1;", "global_race"),
        ("atom.acq_rel.cta.global.add.u32 %r7, [%d1], 1;", "global_race"),
        ("red.shared::cluster.add.u32 [%r5], 1;", ""),
        ("red.cta.shared::cluster.add.u32 [%r5], 1;", "data_race"),
    ],
)
def test_atomics_of_two_ctas_need_a_scope_that_includes_both(text: str, kind: str) -> None:
    report = launch(text)
    assert first_kind(report) == kind, str(report)


@pytest.mark.parametrize(
    ("before", "store", "load", "after", "kind"),
    [
        ("", "st.release.cluster", "ld.acquire.cluster", "", ""),
        ("", "st.release.cta", "ld.acquire.cluster", "", "data_race"),
        ("", "st.release.cluster", "ld.acquire.cta", "", "data_race"),
        ("", "st.relaxed.cluster", "ld.relaxed.cluster", FENCE, "data_race"),
        (FENCE, "st.volatile", "ld.volatile", FENCE, ""),
    ],
)
def test_flags_in_the_shared_memory_of_a_cluster(before: str, store: str, load: str, after: str, kind: str) -> None:
    report = launch(
        f"@%p1 bra END; @%p2 bra SPIN; st.shared::cluster.u32 [%r5+4], 5; {before}"
        f"{store}.shared::cluster.u32 [%r5], 1; bra END;"
        f"SPIN: {load}.shared.u32 %r7, [%r4]; setp.eq.u32 %p3, %r7, 0; @%p3 bra SPIN; {after}"
        "ld.shared.u32 %r8, [%r4+4];"
    )
    assert first_kind(report) == kind, str(report)


REDUCE = "red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u32 [%r5], %r1, [%r3];"
BULK_REDUCE = (
    "fence.proxy.async; bar.warp.sync -1; @%p1 bra END; cp.reduce.async.bulk.shared::cluster.shared::cta"
    ".mbarrier::complete_tx::bytes.add.u32 [%r5], [%r4], 128, [%r3];"
)
STORE = "st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 {}, %r1, {};"


@pytest.mark.parametrize(
    ("theirs", "own", "kinds"),
    [
        (REDUCE + REDUCE, "", set()),
        (BULK_REDUCE, "", set()),
        (REDUCE, "atom.shared.add.u32 %r7, [%r4], 1;", set()),
        (REDUCE, "st.shared.u32 [%r4], 1;", {"write_race", "data_race"}),
        (REDUCE, "ld.shared.u32 %r7, [%r4];", {"overwritten_while_read", "read_before_load"}),
        (BULK_REDUCE, "atom.shared.add.u32 %r7, [%r4], 1;", {"write_race", "missing_proxy_fence", "read_before_load"}),
        (STORE.format("[%r5]", "[%r3]"), "", {"write_race"}),
        (STORE.format("[%r5]", "[%r2]"), "", {"out_of_bounds"}),
    ],
)
def test_asynchronous_reductions_of_two_ctas_do_not_race(theirs: str, own: str, kinds: set[str]) -> None:
    """CTAs 1 and 2 write into CTA 0, which accesses the same words before it waits for all bytes."""
    size = 2 * 4 * theirs.count("complete_tx")
    report = launch(
        f"@%p2 bra WAIT; {theirs} bra END;"
        f"WAIT: {own} mbarrier.arrive.expect_tx.shared.b64 _, [%r2], {size};"
        f"{WAIT.replace('WAIT', 'AGAIN').format(wait='.acquire.cluster')} ld.shared.u32 %r7, [%r4];",
        cluster=3,
    )
    assert not kinds if report.is_clean else first_kind(report) in kinds, str(report)


def test_copies_that_end_on_an_mbarrier_are_awaited_there() -> None:
    report = launch(
        "cp.async.ca.shared.global [%r4], [%d1], 4; cp.async.mbarrier.arrive.noinc.shared.b64 [%r2];"
        f"ld.shared.u32 %r7, [%r4]; {WAIT.format(wait='')}"
    )
    assert first_kind(report) == "read_before_load", str(report)
    assert "the copy completes on an mbarrier" in report.hazards[0].message


# ---- mbarrier.inval writes barriers to memory in the layout of mbarrier_bits, as on an H200


@pytest.mark.parametrize(("count", "size"), CASES)
def test_each_step_leaves_the_bits_of_its_state(count: int, size: int) -> None:
    out = np.zeros((len(STEPS), 2), np.uint64)
    probe("mbarrier_bits", probes.Plain("mbarrier_bits")).launch(
        "mbarrier_bits", 1, 32, (out, count, size), schedules=1, hazards="off"
    )
    assert (out[:, 0] == UNTOUCHED).all()
    for step, raw, state in zip(STEPS, out[:, 1].tolist(), states(count, size), strict=True):
        assert decode(raw) == state, step
        assert raw == encode(state), step


def test_the_kernel_that_goes_on_after_inval_is_right_without_it() -> None:
    """Run the kernel of tests/runtime/test_mbarrier_bits_gpu.py: without inval, its phases end."""
    source, out = after_inval.operands()
    cudatma.compile(after_inval.SOURCE, None, target="sm_90a", debug=False, template=True).emulate(
        1, 32, (source, out, 0)
    )
    assert (out[:, 1] == 1).all()
    assert len(after_inval.differences(out.tolist())) == len(after_inval.CASES)  # no states are there


def test_using_a_barrier_after_inval_is_reported() -> None:
    source, out = after_inval.operands()
    with pytest.raises(cudatma.HazardError, match="no mbarrier is initialized"):
        cudatma.compile(after_inval.SOURCE, None, target="sm_90a", debug=False, template=True).emulate(
            1, 32, (source, out, 1)
        )


SUBJECTS = {subject.name: subject for subject in subjects()}


@pytest.mark.parametrize(
    ("name", "operator", "text", "kind"),
    [
        # mbarrier.inval by one thread while others still wait there
        ("box_copy/none_store", "drop_barrier", "bar.sync 0", "barrier_uninitialized"),
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
FENCES, COMMIT, WRITES = (
    "wgmma.fence.sync.aligned;",
    "wgmma.commit_group.sync.aligned;",
    "add.u32 %r2, %r5, 1;",
)


@pytest.mark.parametrize(
    ("body", "count"),
    [
        (f"{WRITES} {FENCES} {WGMMA} {COMMIT}", 0),
        (f"{WRITES} {WGMMA} {COMMIT}", 1),
        (f"{WRITES} {FENCES} {WGMMA} {COMMIT} {WRITES} {WGMMA} {COMMIT}", 1),
        (f"{WRITES} {FENCES} {WGMMA} {COMMIT} {WRITES} {FENCES} {WGMMA} {COMMIT}", 0),
        # Nothing but the wgmmas touches the accumulators, and fragments stay as they are.
        (f"{WRITES} {FENCES} {WGMMA} {COMMIT} {WGMMA} {COMMIT}", 0),
        # What compilers do: a write moved after the group's fence, constants and renamed accumulators.
        (f"{FENCES} {WRITES} {WGMMA} {WGMMA} {COMMIT}", 0),
        (
            f"{WRITES} {FENCES} mov.f32 %f1, 0f00000000; {WGMMA} {COMMIT} mov.f32 %f9, %f1; mov.f32 %f1, %f9; {WGMMA}",
            0,
        ),
        # The second round of a loop comes without a fence.
        (f"{FENCES} AGAIN: {WRITES} {WGMMA} {COMMIT} setp.eq.u32 %p1, %r6, 0; @%p1 bra AGAIN;", 1),
        (f"AGAIN: {WRITES} {FENCES} {WGMMA} {COMMIT} setp.eq.u32 %p1, %r6, 0; @%p1 bra AGAIN;", 0),
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
