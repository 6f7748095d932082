"""Waits that give up, copies without a wait, registers that are not freed; each bug is next to the correct kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from catalogue import Case, checks_of, module_of

Made = tuple[tuple[Any, ...], Callable[[], bool]]

# ---- try_wait may return false at any time, any number of times

TRIES = """
#define TRY(done, bar, parity) asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; " \\
    "selp.u32 %0, 1, 0, p; }" : "=r"(done) : "r"(bar), "r"((u32)(parity)) : "memory")
extern "C" __global__ void k(const u32* in, u32* out) {
    __shared__ alignas(128) u32 tile[256];
    __shared__ alignas(8) u64 barrier;
    const u32 bar = ADDRESS(&barrier);
    if (threadIdx.x == 0) { INIT(bar, 1); FENCE_INIT(); }
    __syncthreads();
    if (threadIdx.x == 0) { EXPECT(bar, 1024); BULK_LOAD(ADDRESS(tile), in, 1024, bar); }
    u32 done = 0;
#ifdef ONCE
    TRY(done, bar, 0);
#elif defined(THRICE)
    for (u32 i = 0; i < 3 && !done; ++i) TRY(done, bar, 0);
#elif defined(THOUSAND)
    for (u32 i = 0; i < 1000 && !done; ++i) TRY(done, bar, 0);
#elif defined(PEEK)
    TRY(done, bar, 0);
    while (!done) TRY(done, bar, 0);
#elif defined(COUNTING)
    u32 tries = 0;
    for (; !done; ++tries) TRY(done, bar, 0);
    if (tries == 1234567) out[0] = tries;
#else
    while (!done) TRY(done, bar, 0);
#endif
    for (u32 i = 0; i < 256; i += 64) out[threadIdx.x + i] = tile[threadIdx.x + i] + 1;   //! ONCE THRICE THOUSAND
}
"""


def copied() -> Made:
    given, out = np.arange(256, dtype=np.uint32), np.zeros(256, np.uint32)
    return (given, out), lambda: bool((out == given + 1).all())


# ---- a copy that is in flight when its CTA ends, or when its barrier is invalidated

LEAVING = """
#define INVAL(bar) asm volatile("mbarrier.inval.shared::cta.b64 [%0];" :: "r"(bar) : "memory")
extern "C" __global__ void k(const u32* in, u32* out) {
    __shared__ alignas(128) u32 tile[2][256];
    __shared__ alignas(8) u64 barriers[2];
    const u32 first = ADDRESS(barriers), second = first + 8;
    if (threadIdx.x == 0) { INIT(first, 1); INIT(second, 1); FENCE_INIT(); }
    __syncthreads();
    if (threadIdx.x == 0) {
        EXPECT(first, 1024);
        BULK_LOAD(ADDRESS(tile[0]), in, 1024, first);
        EXPECT(second, 1024);
        BULK_LOAD(ADDRESS(tile[1]), in, 1024, second);   //! LEAVES
    }
    WAIT(first, 0);
    for (u32 i = 0; i < 256; i += 64) out[threadIdx.x + i] = tile[0][threadIdx.x + i] + 1;
#if defined(INVALIDATES)
    __syncthreads();
    if (threadIdx.x == 0) INVAL(second);   //! INVALIDATES
#elif !defined(LEAVES)
    if (threadIdx.x == 32) WAIT(second, 0);   // one thread is enough
#ifdef RIGHT_INVAL
    __syncthreads();
    if (threadIdx.x == 0) INVAL(second);
#endif
#endif
}
"""

# ---- the pool of setmaxnreg: 384 threads begin with 168 registers each, 40 leave 128 * 128 for two warpgroups

POOL = """
#ifndef CONSUMER
#define CONSUMER "232"
#endif
#ifdef TWICE
#define LEFT "32"
#else
#define LEFT "40"
#endif
#ifdef GREEDY
#undef CONSUMER
#define CONSUMER "240"
#endif
extern "C" __global__ void __launch_bounds__(384, 1) k(u32* out) {
    if (threadIdx.x < 128) {
#ifndef KEEPS
#ifdef THREE_WARPS
        if (threadIdx.x < 96)
#endif
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");   //! THREE_WARPS
#endif
#if !defined(KEEPS) && !defined(THREE_WARPS)
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        asm volatile("setmaxnreg.dec.sync.aligned.u32 " LEFT ";");   //! TWICE
#endif
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 " CONSUMER ";");   //! GREEDY KEEPS
    }
    out[threadIdx.x] = threadIdx.x + 1;
}
"""


def counted() -> Made:
    out = np.zeros(384, np.uint32)
    return (out,), lambda: bool((out == np.arange(384) + 1).all())


CASES = [
    Case(
        "tries",
        TRIES,
        {
            #: A single try finds nothing of the tile there: what others do with it comes with the first mistake.
            "ONCE": ("read_before_load", "overwritten_while_read", "uninitialized_shared"),
            **dict.fromkeys(("THRICE", "THOUSAND"), "read_before_load"),
        },
        copied,
        block=64,
        variants=("PEEK", "COUNTING"),
    ),
    Case(
        "leaving",
        LEAVING,
        dict.fromkeys(("LEAVES", "INVALIDATES"), "exit_with_pending_load"),
        copied,
        block=64,
        variants=("RIGHT_INVAL",),
    ),
    Case(
        "pool",
        POOL,
        {
            **dict.fromkeys(("GREEDY", "KEEPS"), "register_pool"),
            "THREE_WARPS": ("divergent_warp", "register_pool"),
            "TWICE": "divergent_warp",
        },
        counted,
        block=384,
    ),
]


test_the_right_kernel_is_clean, test_the_bug_is_reported = checks_of(CASES)


def test_every_schedule_finds_a_copy_that_nobody_waited_for() -> None:
    """The hazard does not depend on whether the copy has completed by then."""
    for schedule in range(4):
        args, _ = copied()
        report = module_of(LEAVING, ("LEAVES",)).launch("k", 1, 64, args, replay=schedule, hazards="collect")
        assert report.kinds == {"exit_with_pending_load"}, str(report)


def test_the_register_pool_shows_its_arithmetic() -> None:
    report, _ = CASES[2].run("GREEDY", schedules=2)
    (hazard,) = report.hazards
    assert "needs 240 - 168 more registers per thread, 2304 for the warp" in hazard.message
    assert "12 warps started with 168 per thread according to the launch bounds (64512 in total)" in hazard.message
    assert "setmaxnreg.dec has freed 16384, setmaxnreg.inc has taken 16128" in hazard.message


@pytest.mark.parametrize(
    ("bounds", "registers", "kinds", "unchecked"),
    [
        ("__launch_bounds__(384, 1)", None, set(), ""),
        ("__launch_bounds__(384, 1)", 160, {"register_pool"}, ""),
        ("__launch_bounds__(384, 1)", 0, set(), "ptxas ignores setmaxnreg"),
        ("", 168, set(), ""),
        ("", None, set(), "the initial number of registers per thread is unknown"),
        ("__maxnreg__(160)", None, {"register_pool"}, ""),
    ],
)
def test_where_the_register_count_comes_from(
    bounds: str, registers: int | None, kinds: set[str], unchecked: str
) -> None:
    args, _ = counted()
    module = module_of(POOL.replace("__launch_bounds__(384, 1)", bounds), ())
    report = module.launch("k", 1, 384, args, schedules=2, hazards="collect", registers=registers)
    assert report.kinds == kinds, str(report)
    assert len(report.unchecked) == bool(unchecked)
    assert unchecked in str(report)
    assert ("unchecked" in str(report)) is bool(unchecked)
