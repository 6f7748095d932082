"""Ordinary and ordered accesses to shared memory, fences of mbarrier.init, and bounded waits.

Each bug is next to the correct kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from catalogue import NAME, Case, checks_of, line_of

Made = tuple[tuple[Any, ...], Callable[[], bool]]


def copied(count: int) -> Callable[[], Made]:
    """Return arguments (in, out), and a check that the first ``count`` elements of out equal in."""

    def make() -> Made:
        given = np.random.default_rng(5).integers(0, 99, 1024).astype(np.uint32)
        out = np.zeros_like(given)
        return (given, out), lambda: bool((out[:count] == given[:count]).all())

    return make


# ---- two warps exchange their values, twice

EXCHANGE = """
#ifndef BARRIER_THREADS
#define BARRIER_THREADS 64
#endif
extern "C" __global__ void k(const u32* in, u32* out) {
    __shared__ u32 box[64];
    const u32 t = threadIdx.x;
#ifdef SHARED_BOUNDS
    box[t + 1] = in[t];
#elif defined(UNWRITTEN)
    if (t < 60) box[t] = in[t];
#else
    box[t] = in[t];
#endif
#ifndef NO_BARRIER
    NAMED_SYNC(1, t < 32 ? 64 : BARRIER_THREADS);   //! BARRIER_THREADS
#endif
    const u32 v = box[63 - t];   //! NO_BARRIER UNWRITTEN
#ifndef NO_SECOND
    __syncthreads();
#endif
    box[t] = v;   //! NO_SECOND
    __syncthreads();
#ifdef GLOBAL_BOUNDS
    out[t + 1] = box[63 - t];   //! GLOBAL_BOUNDS
#else
    out[t] = box[63 - t];
#endif
}
"""


def exchanged() -> Made:
    given, out = np.arange(64, dtype=np.uint32), np.zeros(64, np.uint32)
    return (given, out), lambda: bool((out == given).all())


# ---- a tile that a bulk copy fills, and that threads read with an ordering qualifier

TILE = """
#ifndef QUALIFIER
#define QUALIFIER "volatile"
#endif
#define READ(to, from) asm volatile("ld." QUALIFIER ".shared.u32 %0, [%1];" : "=r"(to) : "r"(from) : "memory")
#define WRITE(to, v) asm volatile("st.volatile.shared.u32 [%0], %1;" :: "r"(to), "r"(v) : "memory")
extern "C" __global__ void k(const u32* in, u32* out) {
    __shared__ alignas(128) u32 box[256];
    __shared__ alignas(8) u64 barrier;
    const u32 bar = ADDRESS(&barrier), t = threadIdx.x;
    if (t == 0) { INIT(bar, 1); FENCE_INIT(); }
    __syncthreads();
    for (u32 i = 0; i < 4; ++i) {
        if (t == 0) {
            EXPECT(bar, 1024);
#ifdef TWO_ARRIVALS
            ARRIVE(bar);   //! TWO_ARRIVALS
#endif
            BULK_LOAD(ADDRESS(box), in + 256 * i, 1024, bar);   //! NO_REUSE_BARRIER
        }
#ifdef STORE_EARLY
        WRITE(ADDRESS(box + t), t);   //! STORE_EARLY
#endif
#ifndef NO_WAIT
        WAIT(bar, i & 1);
#endif
        for (u32 j = t; j < 256; j += 64) {
            u32 v;
            READ(v, ADDRESS(box + j));   //! NO_WAIT
            out[256 * i + j] = v;
        }
#ifndef NO_REUSE_BARRIER
        __syncthreads();
#endif
    }
}
"""

# ---- threads hand a value over through volatile flags; another one reads a word that nobody wrote

FLAGS = """
extern "C" __global__ void k(const u32* in, u32* out) {
    __shared__ u32 box[64];
    __shared__ u32 turn;
    volatile u32* flag = &turn;
    const u32 t = threadIdx.x;
#ifndef NO_CLEAR
    if (t == 0) *flag = 0;
#endif
    __syncthreads();
    if (t == 0) {
        for (u32 i = 0; i < 4; ++i) {
            box[0] = in[i];
            __threadfence_block();
            *flag = 2 * i + 1;
            while (*flag != 2 * i + 2) { }
        }
    } else if (t == 32) {
        for (u32 i = 0; i < 4; ++i) {
            while (*flag != 2 * i + 1) { }   //! NO_CLEAR
            __threadfence_block();
            out[i] = box[0];
            __threadfence_block();
            *flag = 2 * i + 2;
        }
    }
}
"""

# ---- a result is staged with volatile stores and copied out by a bulk store

STAGED = """
extern "C" __global__ void k(const u32* in, u32* out) {
    __shared__ alignas(128) u32 box[256];
    volatile u32* staging = box;
    const u32 t = threadIdx.x;
    for (u32 i = 0; i < 4; ++i) {
        for (u32 j = t; j < 256; j += 64) staging[j] = in[256 * i + j];   //! NO_READ_WAIT
#ifndef NO_FENCE
        FENCE_ASYNC_SHARED();
#endif
        __syncthreads();
        if (t == 0) {
            BULK_STORE(out + 256 * i, ADDRESS(box), 1024);   //! NO_FENCE
            COMMIT();
#ifndef NO_READ_WAIT
            WAIT_READ(0);
#endif
        }
        __syncthreads();
    }
    if (t == 0) WAIT_ALL(0);
}
"""

# Two warps fill a slot each, or both the same one; one warp fills a slot twice.
PRODUCERS = """
extern "C" __global__ void k(const u32* in, u32* out) {
    __shared__ alignas(128) u32 box[2][64];
    __shared__ alignas(8) u64 full[2];
    const u32 f = ADDRESS(full), t = threadIdx.x, w = t / 32;
    if (t == 0) { INIT(f, 1); INIT(f + 8, 1); FENCE_INIT(); }
    __syncthreads();
#if defined(SAME_WARP)
    if (t == 0) for (u32 k = 0; k < 2; ++k) {
        EXPECT(f + 8 * k, 256);
        BULK_LOAD(ADDRESS(box[0]), in + 64 * k, 256, f + 8 * k);   //! SAME_WARP
    }
#else
    if (t % 32 == 0) {
        EXPECT(f + 8 * w, 256);
#ifdef SAME_SLOT
        BULK_LOAD(ADDRESS(box[0]), in + 64 * w, 256, f + 8 * w);   //! SAME_SLOT
#else
        BULK_LOAD(ADDRESS(box[w]), in + 64 * w, 256, f + 8 * w);
#endif
    }
#endif
    WAIT(f, 0);
    WAIT(f + 8, 0);
    out[t] = box[0][t];
#if !defined(SAME_SLOT) && !defined(SAME_WARP)
    out[64 + t] = box[1][t];
#endif
}
"""

_EARLY = ("read_before_load", "uninitialized_shared", "overwritten_while_read", "write_race", "arrival_overflow")
CASES = [
    Case(
        "exchange",
        EXCHANGE,
        {
            "NO_BARRIER": ("data_race", "uninitialized_shared"),
            "NO_SECOND": "data_race",
            "UNWRITTEN": "uninitialized_shared",
            "BARRIER_THREADS 96": ("barrier_count", "deadlock"),
            "BARRIER_THREADS 48": "trap",
            "GLOBAL_BOUNDS": ("out_of_bounds", "trap"),
            "SHARED_BOUNDS": ("out_of_bounds", "trap"),
        },
        exchanged,
        block=64,
    ),
    Case(
        "volatile tile",
        TILE,
        {
            "NO_WAIT": _EARLY,
            "NO_REUSE_BARRIER": ("overwritten_while_read", "read_before_load", "wrong_parity"),
            "STORE_EARLY": ("write_race", "missing_proxy_fence"),
            "TWO_ARRIVALS": "arrival_overflow",
        },
        copied(1024),
        block=64,
    ),
    Case("flags", FLAGS, {"NO_CLEAR": ("uninitialized_shared", "deadlock")}, copied(4), block=64),
    Case(
        "volatile staging",
        STAGED,
        {"NO_FENCE": "missing_proxy_fence", "NO_READ_WAIT": "store_source_reused"},
        copied(1024),
        block=64,
    ),
    Case(
        "two producers",
        PRODUCERS,
        {"SAME_SLOT": "write_race", "SAME_WARP": ("overwritten_while_read", "write_race")},
        copied(128),
        block=64,
    ),
]


test_the_right_kernel_is_clean, test_the_bug_is_reported = checks_of(CASES)


@pytest.mark.parametrize("qualifier", ["relaxed.cta", "acquire.cta"])
def test_other_qualifiers_do_not_excuse_a_missing_wait(qualifier: str) -> None:
    """Neither orders the read after the copy."""
    name = f'QUALIFIER "{qualifier}"'
    report, _ = CASES[1].run(name, "NO_WAIT", schedules=3)
    assert "read_before_load" in report.kinds, str(report)
    report, is_right = CASES[1].run(name, schedules=3)
    assert report.is_clean, str(report)
    assert is_right


# ---- who initializes a barrier, and who fences it

INIT_FENCE = """
#ifndef FENCE
#define FENCE() FENCE_INIT()
#endif
#ifndef FENCER
#define FENCER 0
#endif
extern "C" __global__ void k(const u32* in, u32* out) {
    __shared__ alignas(128) u32 box[256];
    __shared__ alignas(8) u64 barrier;
    const u32 bar = ADDRESS(&barrier), t = threadIdx.x;
    if (t == 0) INIT(bar, 1);
#ifdef MEETING
    __syncthreads();
#endif
    if (t == FENCER) FENCE();
    __syncthreads();
    if (t == 0) { EXPECT(bar, 1024); BULK_LOAD(ADDRESS(box), in, 1024, bar); }
    WAIT(bar, 0);
    for (u32 j = t; j < 256; j += 64) out[j] = box[j];
}
"""

INIT_CASE = Case("init fence", INIT_FENCE, {}, copied(256), block=64)


@pytest.mark.parametrize(
    ("defines", "is_fenced"),
    [
        ((), True),
        (("FENCER 5",), False),
        (("FENCER 5", "MEETING"), False),
        (("FENCER 40", "MEETING"), False),
        (("FENCE() FENCE_ASYNC()",), True),
        (("FENCE() FENCE_ASYNC()", "FENCER 5"), False),
        (("FENCE() FENCE_ASYNC()", "FENCER 5", "MEETING"), True),
        (("FENCE() FENCE_ASYNC()", "FENCER 40"), False),
        (("FENCE() FENCE_ASYNC()", "FENCER 40", "MEETING"), True),
    ],
    ids=str,
)
def test_an_init_is_fenced_by_its_thread_or_by_a_proxy_fence_after_it(
    defines: tuple[str, ...], is_fenced: bool
) -> None:
    """fence.mbarrier_init covers what its own thread initialized; fence.proxy.async what is ordered before it."""
    report, is_right = INIT_CASE.run(*defines, schedules=4)
    assert report.kinds == (set() if is_fenced else {"missing_init_fence"}), str(report)
    assert is_right


# ---- waits that a clock, or a count, bounds: too few bytes come, and the kernel goes on all the same

BOUNDED = """
#ifndef EXPECTED
#define EXPECTED 1024
#endif
extern "C" __global__ void k(const u32* in, u32* out) {
    __shared__ alignas(128) u32 box[256];
    __shared__ alignas(8) u64 barrier;
    const u32 bar = ADDRESS(&barrier), t = threadIdx.x;
    if (t == 0) { INIT(bar, 1); FENCE_INIT(); }
    __syncthreads();
    if (t == 0) {
        EXPECT(bar, EXPECTED);   //! EXPECTED
        BULK_LOAD(ADDRESS(box), in, 1024, bar);
    }
    const long long start = clock64();
    u32 done = 0;
    do asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], 0; selp.u32 %0, 1, 0, p; }"
                    : "=r"(done) : "r"(bar) : "memory");
    while (!done && clock64() - start < 1000000000);
#ifdef TRAP
    if (!done) __trap();
#endif
    for (u32 j = t; j < 256; j += 64) out[j] = box[j];
}
"""
BOUNDED_CASE = Case("bounded wait", BOUNDED, {}, copied(256), block=64)


@pytest.mark.parametrize("more", [(), ("TRAP",)], ids=["reads", "traps"])
def test_too_few_bytes_are_named_where_a_wait_is_bounded(more: tuple[str, ...]) -> None:
    report, is_right = BOUNDED_CASE.run(*more, schedules=6)
    assert report.is_clean, str(report)
    assert is_right
    report, _ = BOUNDED_CASE.run("EXPECTED 1040", *more, schedules=2)
    assert report.kinds == {"byte_count", "trap" if more else "read_before_load"}, str(report)
    found = next(hazard for hazard in report.hazards if hazard.kind == "byte_count")
    assert "16 bytes never arrived" in found.message
    assert found.source == f"{NAME}:{line_of(BOUNDED, ('EXPECTED 1040', *more), 'EXPECTED')}"
