"""Each hazard: a kernel with the bug is reported with its kind, the same kernel without it is clean."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ptx_lines import kernel
from ptx_of import module_of

from cudatma.emulator import CAUSES, Report
from cudatma.errors import ArgumentError, HazardError

#: A ring of two slots filled by bulk copies, read by three warps, added 1, staged and stored by bulk copies.
RELAY = """
constexpr u32 BYTES = 1024;
#ifndef EXPECT
#define EXPECT BYTES
#endif
#ifndef CONSUMERS
#define CONSUMERS 3
#endif
#ifndef BARRIERS
#define BARRIERS 3072
#endif
extern "C" __global__ void __launch_bounds__(128) relay(const u32* in, u32* out, u32 tiles) {
    extern __shared__ __align__(128) u8 smem[];
    const u32* slots = (const u32*)smem;
    u32* staging = (u32*)(smem + 2048);
    const u32 base = shared_address(smem), full = base + BARRIERS, empty = full + 16;
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
#ifndef BUG_NO_INIT
        for (u32 s = 0; s < 2; ++s) { mbarrier_init(full + 8 * s, 1); mbarrier_init(empty + 8 * s, CONSUMERS); }
#endif
#ifdef BUG_REINIT
        mbarrier_init(full, 1);
#endif
#ifndef BUG_INIT_FENCE
        fence_mbarrier_init();
#endif
    }
#ifndef BUG_INIT_SYNC
    __syncthreads();
#endif
    if (warp == 3) {
        if (lane == 0) {
            for (u32 i = 0; i < tiles; ++i) {
                const u32 s = i % 2, phase = i / 2 & 1;
#ifndef BUG_EMPTY_WAIT
                mbarrier_wait_parity(empty + 8 * s, phase ^ 1);
#endif
                mbarrier_arrive_expect_tx(full + 8 * s, EXPECT);
                cp_async_bulk_load(base + 1024 * s, in + 256 * i, BYTES, full + 8 * s);
#ifdef BUG_TWO_LOADS
                cp_async_bulk_load(base + 1024 * s, in + 256 * i, BYTES, full + 8 * s);
#endif
            }
        }
        return;
    }
    for (u32 i = 0; i < tiles; ++i) {
        const u32 s = i % 2, phase = i / 2 & 1;
#ifdef BUG_PARITY
        mbarrier_wait_parity(full + 8 * s, phase ^ 1);
#elif !defined(BUG_FULL_WAIT)
        mbarrier_wait_parity(full + 8 * s, phase);
#endif
#ifdef BUG_EARLY_RELEASE
        __syncwarp();
        if (lane == 0) mbarrier_arrive(empty + 8 * s);
#endif
        u32 v[3];
        for (u32 j = 0; j < 3; ++j) if (threadIdx.x + 96 * j < 256) v[j] = slots[256 * s + threadIdx.x + 96 * j];
#if !defined(BUG_NO_ARRIVE) && !defined(BUG_EARLY_RELEASE)
#ifndef BUG_WARP_SYNC
        __syncwarp();
#endif
        if (lane == 0) mbarrier_arrive(empty + 8 * s);
#endif
#ifdef BUG_TWICE
        if (lane == 0) mbarrier_arrive(empty + 8 * s);
#endif
        for (u32 j = 0; j < 3; ++j) if (threadIdx.x + 96 * j < 256) staging[threadIdx.x + 96 * j] = v[j] + 1;
#ifdef BUG_OVERWRITE
        if (threadIdx.x == 0) *(u32*)(smem + BARRIERS) = 0;
#endif
#ifdef BUG_DIVERGENT
        if (lane < 16) bar_sync(2, 48); else bar_sync(2, 48);
#endif
#ifndef BUG_PROXY
        fence_proxy_async_shared_cta();
#endif
#ifndef BUG_BAR
        bar_sync(1, 96);
#endif
        if (threadIdx.x == 0) {
            cp_async_bulk_store(out + 256 * i, base + 2048, BYTES);
#ifndef BUG_COMMIT
            cp_async_bulk_commit_group();
#endif
#ifndef BUG_READ_WAIT
            cp_async_bulk_wait_group_read<0>();
#endif
        }
        bar_sync(1, 96);
    }
#ifndef BUG_READ_WAIT
    if (threadIdx.x == 0) cp_async_bulk_wait_group<0>();
#endif
}
"""


def relay(
    *defines: str, schedules: int = 8, tiles: int = 5, shared_bytes: int = 3072 + 48, stop_at: tuple[str, ...] = ()
) -> tuple[Report, Any, Any]:
    source = "".join(f"#define {d}\n" for d in defines) + RELAY
    given = np.random.default_rng(0).integers(0, 1000, tiles * 256, dtype=np.uint32)
    out = np.zeros_like(given)
    report = module_of(source).launch(
        "relay",
        1,
        128,
        (given, out, tiles),
        shared_bytes=shared_bytes,
        schedules=schedules,
        hazards="collect",
        step_limit=200_000,
        stop_at=stop_at,
    )
    return report, given, out


def test_the_relay_without_a_bug_is_clean() -> None:
    report, given, out = relay(schedules=20)
    assert report.is_clean, str(report)
    assert (out == given + 1).all()


@pytest.mark.sweep(10)
@pytest.mark.parametrize(
    ("define", "kind"),
    [
        ("BUG_INIT_FENCE", "missing_init_fence"),
        ("BUG_INIT_SYNC", "missing_init_sync"),
        ("BUG_REINIT", "barrier_reinitialised"),
        ("BUG_NO_INIT", "barrier_uninitialised"),
        ("BUG_EMPTY_WAIT", "overwritten_while_read"),
        ("BUG_FULL_WAIT", "read_before_load"),
        ("BUG_PARITY", "wrong_parity"),
        ("BUG_NO_ARRIVE", "deadlock"),
        ("BUG_EARLY_RELEASE", "overwritten_while_read"),
        ("BUG_WARP_SYNC", "overwritten_while_read"),
        ("BUG_TWICE", "overwritten_while_read"),
        ("BUG_PROXY", "missing_proxy_fence"),
        ("BUG_BAR", "data_race"),
        ("BUG_COMMIT", "uncommitted_group"),
        ("BUG_READ_WAIT", "store_source_reused"),
        ("BUG_READ_WAIT", "exit_with_pending_store"),
        ("BUG_OVERWRITE", "barrier_overwritten"),
        ("BUG_DIVERGENT", "divergent_barrier"),
        ("EXPECT (BYTES - 16)", "byte_count"),
        ("EXPECT (BYTES + 16)", "byte_count"),
        ("EXPECT (BYTES + 16)", "deadlock"),
        ("BUG_TWO_LOADS", "byte_count"),
        ("BUG_TWO_LOADS", "write_race"),
        ("CONSUMERS 2", "overwritten_while_read"),
        ("CONSUMERS 4", "deadlock"),
        ("BARRIERS 3076", "barrier_misaligned"),
    ],
)
def test_a_bug_is_reported_with_its_kind(define: str, kind: str) -> None:
    report, _, _ = relay(define)
    assert kind in report.kinds, str(report)
    stopped, _, _ = relay(define, stop_at=(kind,))
    assert kind in stopped.kinds
    assert stopped.steps <= report.steps
    hazard = next(h for h in report.findings if h.kind == kind)
    assert hazard.cause == CAUSES[kind]
    assert hazard.kernel == "relay"
    assert hazard.ptx_line > 0
    assert hazard.source.startswith("kernel.cu:")


def test_a_schedule_ends_at_a_kind_that_is_asked_for() -> None:
    whole, stopped = (relay("BUG_FULL_WAIT", stop_at=stop_at)[0] for stop_at in ((), ("read_before_load", "trap")))
    assert stopped.kinds <= whole.kinds
    assert stopped.steps < whole.steps / 2
    assert relay("BUG_FULL_WAIT", stop_at=("data_race",))[0].findings == whole.findings


@pytest.mark.parametrize("stop_at", [("races",), "data_race"])
def test_a_kind_to_stop_at_that_there_is_not(stop_at: Any) -> None:
    with pytest.raises(ArgumentError, match=r"^stop_at: got .*data_race"):
        relay(stop_at=stop_at)


def test_a_failing_schedule_can_be_replayed() -> None:
    report, given, _ = relay("BUG_EMPTY_WAIT")
    hazard = report.hazards[0]
    module = module_of("#define BUG_EMPTY_WAIT\n" + RELAY)
    again = module.launch(
        "relay",
        1,
        128,
        (given, np.zeros_like(given), 5),
        shared_bytes=3120,
        seed=hazard.seed,
        replay=hazard.schedule,
        hazards="collect",
    )
    assert hazard.kind in again.kinds


def test_raise_names_everything_that_was_found() -> None:
    module = module_of("#define BUG_PROXY\n" + RELAY)
    pattern = r"missing_proxy_fence.*\n.*PTX line \d+ \(kernel.cu:\d+, inlined at kernel.cu:\d+\)"
    with pytest.raises(HazardError, match=pattern):
        module.launch("relay", 1, 128, (np.zeros(1280, np.uint32), np.zeros(1280, np.uint32), 5), shared_bytes=3120)


SMALL = {
    "race": (
        """
extern "C" __global__ void k(u32* out) {
    __shared__ u32 box[64];
    box[threadIdx.x] = threadIdx.x;
#ifndef BUG
    __syncthreads();
#endif
    out[threadIdx.x] = box[63 - threadIdx.x];
}""",
        64,
        64,
        "data_race",
    ),
    "write after read": (
        """
extern "C" __global__ void k(u32* out) {
    __shared__ u32 box[64];
    box[threadIdx.x] = threadIdx.x;
    __syncthreads();
    u32 v = box[63 - threadIdx.x];
#ifndef BUG
    __syncthreads();
#endif
    box[threadIdx.x] = v;
    __syncthreads();
    out[threadIdx.x] = box[threadIdx.x];
}""",
        64,
        64,
        "data_race",
    ),
    "uninitialised": (
        """
extern "C" __global__ void k(u32* out) {
    __shared__ u32 box[64];
#ifndef BUG
    box[threadIdx.x] = threadIdx.x;
#else
    if (threadIdx.x < 60) box[threadIdx.x] = threadIdx.x;
#endif
    __syncthreads();
    out[threadIdx.x] = box[63 - threadIdx.x];
}""",
        64,
        64,
        "uninitialised_shared",
    ),
    "out of bounds": (
        """
extern "C" __global__ void k(u32* out) {
#ifndef BUG
    out[threadIdx.x] = 1;
#else
    out[threadIdx.x + 1] = 1;
#endif
}""",
        32,
        32,
        "out_of_bounds",
    ),
    "shared out of bounds": (
        """
extern "C" __global__ void k(u32* out) {
    extern __shared__ u32 box[];
#ifndef BUG
    box[threadIdx.x] = 1;
#else
    box[threadIdx.x + 4] = 1;
#endif
    __syncthreads();
    out[threadIdx.x] = 1;
}""",
        32,
        32,
        "out_of_bounds",
    ),
    "divergent warp": (
        """
extern "C" __global__ void k(u32* out) {
    u32 v = threadIdx.x;
#ifndef BUG
    v = __shfl_xor_sync(0xffffffffu, v, 1);
#else
    if (threadIdx.x < 7) v = __shfl_xor_sync(0xffffffffu, v, 1) + out[0]; else out[threadIdx.x] = 3;
#endif
    out[threadIdx.x] = v;
}""",
        32,
        32,
        "divergent_warp",
    ),
    "cp.async without a wait": (
        """
extern "C" __global__ void k(u32* out) {
    __shared__ __align__(16) u32 box[32 * 4];
    cp_async_16(shared_address(box + 4 * threadIdx.x), out, 16);
    cp_async_commit_group();
#ifndef BUG
    cp_async_wait_group<0>();
#endif
    const u32 v = box[4 * threadIdx.x];
    out[threadIdx.x] = v;
}""",
        32,
        32,
        "read_before_load",
    ),
}


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("bug", [False, True])
def test_small_kernels(name: str, bug: bool) -> None:
    source, size, threads, kind = SMALL[name]
    out = np.zeros(size, np.uint32)
    module = module_of(("#define BUG\n" if bug else "") + source)
    report = module.launch("k", 1, threads, (out,), shared_bytes=128, schedules=8, hazards="collect")
    assert report.is_clean is not bug, str(report)
    if bug:
        assert kind in report.kinds, str(report)


POLL = """
extern "C" __global__ void k(const u32* in, u32* out) {
    __shared__ __align__(128) u32 box[256];
    __shared__ __align__(8) u64 barrier;
    const u32 bar = shared_address(&barrier);
    if (threadIdx.x == 0) { mbarrier_init(bar, 1); fence_mbarrier_init(); }
    __syncthreads();
    if (threadIdx.x == 0) {
#ifdef BUG
        mbarrier_expect_tx(bar, 1024);
#else
        mbarrier_arrive_expect_tx(bar, 1024);
#endif
        cp_async_bulk_load(shared_address(box), in, 1024, bar);
    }
    while (!mbarrier_test_wait_parity(bar, 0)) {}
    out[threadIdx.x] = box[threadIdx.x];
}"""


@pytest.mark.parametrize("bug", [False, True])
def test_threads_that_poll_instead_of_waiting(bug: bool) -> None:
    given, out = np.arange(256, dtype=np.uint32), np.zeros(64, np.uint32)
    module = module_of(("#define BUG\n" if bug else "") + POLL)
    report = module.launch("k", 1, 64, (given, out), schedules=8, hazards="collect", step_limit=100_000)
    assert report.kinds == ({"deadlock"} if bug else set())
    assert bug or (out == given[:64]).all()


def test_a_register_that_nobody_wrote() -> None:
    body = "add.u32 %r2, %r1, 1;\nld.param.u64 %d1, [p0];\nst.global.u32 [%d1], %r2;"
    report = kernel(body, params=1).launch("k", 1, 32, (np.zeros(1, np.uint32),), hazards="collect")
    assert report.kinds == {"uninitialised_register"}
    assert "%r1 is read" in str(report)
