"""Pipelines of TMA loads and stores in different styles; each bug is next to the correct kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from catalogue import Case, checks_of

from cudatma.descriptor import TensorMap

Made = tuple[tuple[Any, ...], Callable[[], bool]]
TILES = 7


def tiles_of(dtype: Any = np.uint32) -> tuple[Any, Any, Any, Any]:
    """Return arguments (in, map of in, out, map of out): TILES boxes of 8 x 32 elements in one column."""
    given = np.random.default_rng(1).integers(0, 99, (8 * TILES, 32)).astype(dtype)
    out = np.zeros_like(given)
    return (
        given,
        TensorMap.from_array(given, (8, 32), encoder="codec"),
        out,
        TensorMap.from_array(out, (8, 32), encoder="codec"),
    )


def copied(add: int, *, maps: bool) -> Callable[[], Made]:
    """Return arguments (map of in, out) or (map of in, map of out), and a check that out is in plus a number."""

    def make() -> Made:
        given, source, out, target = tiles_of()
        return (source, target if maps else out, TILES), lambda: bool((out == given + add).all())

    return make


# ---- a producer warp that elects a lane, consumers that give slots back warp by warp; the producer's phase is flipped

RING = """
constexpr u32 STAGES = 3, BYTES = 1024;
#ifndef EXPECTED
#define EXPECTED BYTES
#endif
#ifndef CONSUMER_WARPS
#define CONSUMER_WARPS 2
#endif
#ifndef FIRST_PHASE
#define FIRST_PHASE 1
#endif
struct State { u32 stage, phase; __device__ void next() { if (++stage == STAGES) { stage = 0; phase ^= 1; } } };
extern "C" __global__ void __launch_bounds__(96) k(const __grid_constant__ Map map, u32* out, u32 tiles) {
    __shared__ alignas(128) u32 slots[STAGES][256];
    __shared__ alignas(8) u64 full[STAGES], empty[STAGES];
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, f = ADDRESS(full), e = ADDRESS(empty);
    u32 leader;
    ELECT(leader);
    if (warp == 0 && leader) {
        for (u32 s = 0; s < STAGES; ++s) {
            INIT(f + 8 * s, 1);   //! NO_INIT_FENCE
            INIT(e + 8 * s, CONSUMER_WARPS);
        }
#ifdef TWO_INITS
        INIT(f, 1);   //! TWO_INITS
#endif
#ifdef MISALIGNED
        INIT(f + 4, 1);   //! MISALIGNED
#endif
#if defined(GUIDE)
        FENCE_ASYNC();
#elif !defined(NO_INIT_FENCE)
        FENCE_INIT();
#endif
    }
#ifndef NO_INIT_SYNC
    __syncthreads();
#endif
    if (warp == 2) {
        State state{0, FIRST_PHASE};
        if (leader)
            for (u32 i = 0; i < tiles; ++i, state.next()) {
#ifndef NO_ACQUIRE
                WAIT(e + 8 * state.stage, state.phase);
#endif
#ifdef ARRIVE_ONLY
                ARRIVE(f + 8 * state.stage);
#else
                EXPECT(f + 8 * state.stage, EXPECTED);   //! EXPECTED(BYTES-16)
#endif
                const u32 bar = f + 8 * state.stage;
                TMA_LOAD(ADDRESS(slots[state.stage]), &map, bar, 0, 8 * i);   //! NO_ACQUIRE EARLY_RELEASE
#ifdef TWO_LOADS
                TMA_LOAD(ADDRESS(slots[state.stage]), &map, bar, 0, 8 * i);   //! TWO_LOADS
#endif
            }
    } else {
        State state{0, 0};
        for (u32 i = 0; i < tiles; ++i, state.next()) {
#ifdef FLIPPED
            WAIT(f + 8 * state.stage, state.phase ^ 1);
#elif defined(ONE_TRY)
            asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; }"
                         :: "r"(f + 8 * state.stage), "r"(state.phase) : "memory");
#elif !defined(NO_WAIT)
            WAIT(f + 8 * state.stage, state.phase);
#endif
#ifdef EARLY_RELEASE
            __syncwarp();
            if (lane == 0) ARRIVE(e + 8 * state.stage);
#endif
            for (u32 j = 0; j < 256; j += 64)
                out[256 * i + threadIdx.x + j] = slots[state.stage][threadIdx.x + j];   //! NO_WAIT FLIPPED ONE_TRY
#if !defined(EARLY_RELEASE) && !defined(NO_RELEASE)
#ifndef NO_MEETING
            __syncwarp();
#endif
            if (lane == 0) ARRIVE(e + 8 * state.stage);
#endif
#ifdef TWO_ARRIVALS
            if (lane == 0) ARRIVE(e + 8 * state.stage);
#endif
#ifdef STORE_OVER
            if (threadIdx.x == 0) *(volatile u64*)&full[0] = 0;   //! STORE_OVER
#endif
        }
    }
}
"""

# ---- one barrier of all threads, waited for by token: thread 0 adds the bytes to its arrival

TOKENS = """
extern "C" __global__ void k(const __grid_constant__ Map map, u32* out, u32 tiles) {
    __shared__ alignas(128) u32 box[256];
    __shared__ alignas(8) u64 barrier;
    const u32 bar = ADDRESS(&barrier);
    if (threadIdx.x == 0) { INIT(bar, blockDim.x); FENCE_ASYNC(); }
    __syncthreads();
    for (u32 i = 0; i < tiles; ++i) {
        u64 token;
        if (threadIdx.x == 0) {
            TMA_LOAD(ADDRESS(box), &map, bar, 0, 8 * i);   //! NO_REUSE_BARRIER
#ifdef NO_EXPECT
            asm volatile("mbarrier.arrive.shared::cta.b64 %0, [%1];" : "=l"(token) : "r"(bar) : "memory");
#else
            asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 %0, [%1], 1024;"
                         : "=l"(token) : "r"(bar) : "memory");
#endif
        } else {
            asm volatile("mbarrier.arrive.shared::cta.b64 %0, [%1];" : "=l"(token) : "r"(bar) : "memory");
        }
#ifndef NO_WAIT
        asm volatile("{ .reg .pred p; W: mbarrier.try_wait.shared::cta.b64 p, [%0], %1; @p bra D; bra W; D: }"
                     :: "r"(bar), "l"(token) : "memory");
#endif
        for (u32 j = threadIdx.x; j < 256; j += 64) out[256 * i + j] = box[j];   //! NO_WAIT
#ifndef NO_REUSE_BARRIER
        __syncthreads();
#endif
    }
}
"""

# ---- an epilogue with two buffers: one store is in flight while the next is prepared

EPILOGUE = """
extern "C" __global__ void k(const __grid_constant__ Map in, const __grid_constant__ Map out, u32 tiles) {
    __shared__ alignas(128) u32 box[256];
    __shared__ alignas(128) u32 staging[2][256];
    __shared__ alignas(8) u64 barrier;
    const u32 bar = ADDRESS(&barrier), t = threadIdx.x;
    if (t == 0) { INIT(bar, 1); FENCE_INIT(); }
    __syncthreads();
    for (u32 i = 0; i < tiles; ++i) {
        if (t == 0) { EXPECT(bar, 1024); TMA_LOAD(ADDRESS(box), &in, bar, 0, 8 * i); }
        WAIT(bar, i & 1);
#ifdef TOO_MANY
        if (t == 0) WAIT_READ(2);
#elif !defined(NO_READ_WAIT)
        if (t == 0) WAIT_READ(1);
#endif
#ifndef NO_REUSE_BARRIER
        __syncthreads();
#endif
        for (u32 j = t; j < 256; j += 64) staging[i % 2][j] = box[j] + 1;   //! TOO_MANY NO_READ_WAIT NO_REUSE_BARRIER
#ifdef FENCE_BY_ONE
        __syncthreads();
        if (t == 0) FENCE_ASYNC_SHARED();
#else
#if defined(WRONG_FENCE)
        FENCE_ASYNC_GLOBAL();
#elif defined(MEMORY_FENCE)
        __threadfence_block();
#elif !defined(NO_FENCE)
        FENCE_ASYNC_SHARED();
#endif
#ifndef NO_BARRIER
        __syncthreads();
#endif
#endif
        if (t == 0) {
            TMA_STORE(&out, ADDRESS(staging[i % 2]), 0, 8 * i);   //! NO_FENCE WRONG_FENCE MEMORY_FENCE NO_COMMIT NO_END
#ifndef NO_COMMIT
            COMMIT();
#endif
        }
    }
#ifndef NO_END
    if (t == 0) WAIT_READ(0);
#endif
}
"""

# ---- results are written over the slot that the load came into, and the slot is loaded again

IN_PLACE = """
extern "C" __global__ void k(const __grid_constant__ Map in, const __grid_constant__ Map out, u32 tiles) {
    __shared__ alignas(128) u32 box[256];
    __shared__ alignas(8) u64 barrier;
    const u32 bar = ADDRESS(&barrier), t = threadIdx.x;
    if (t == 0) { INIT(bar, 1); FENCE_INIT(); }
    __syncthreads();
    for (u32 i = 0; i < tiles; ++i) {
        if (t == 0) { EXPECT(bar, 1024); TMA_LOAD(ADDRESS(box), &in, bar, 0, 8 * i); }   //! NO_READ_WAIT
        WAIT(bar, i & 1);
        for (u32 j = t; j < 256; j += 64) box[j] += 2;
#ifndef NO_FENCE
        FENCE_ASYNC();
#endif
        __syncthreads();
        if (t == 0) {
            TMA_STORE(&out, ADDRESS(box), 0, 8 * i);   //! NO_FENCE
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

# Plain stores clear a slot, then a load comes into it: the slot was written through the generic proxy.
CLEARED = """
extern "C" __global__ void k(const __grid_constant__ Map map, u32* out, u32 tiles) {
    __shared__ alignas(128) u32 box[256];
    __shared__ alignas(8) u64 barrier;
    const u32 bar = ADDRESS(&barrier), t = threadIdx.x;
    if (t == 0) { INIT(bar, 1); FENCE_INIT(); }
    for (u32 i = 0; i < tiles; ++i) {
        for (u32 j = t; j < 256; j += 64) box[j] = 0;
#ifndef NO_FENCE
        FENCE_ASYNC_SHARED();
#endif
        __syncthreads();
        if (t == 0) { EXPECT(bar, 1024); TMA_LOAD(ADDRESS(box), &map, bar, 0, 8 * i); }   //! NO_FENCE
        WAIT(bar, i & 1);
        for (u32 j = t; j < 256; j += 64) out[256 * i + j] = box[j];
        __syncthreads();
    }
}
"""

# ---- two groups of consumers take turns at named barriers

PING_PONG = """
extern "C" __global__ void k(const __grid_constant__ Map map, u32* out, u32 tiles) {
    __shared__ alignas(128) u32 box[2][256];
    __shared__ u32 shared_sum[64];
    __shared__ alignas(8) u64 full[2];
    const u32 group = threadIdx.x / 64, t = threadIdx.x % 64, f = ADDRESS(full);
    if (threadIdx.x == 0) { INIT(f, 1); INIT(f + 8, 1); FENCE_INIT(); }
    __syncthreads();
    if (group == 1) NAMED_ARRIVE(1, 128);   // group 0 goes first
    for (u32 i = group, n = 0; i < tiles; i += 2, ++n) {
        if (t == 0) { EXPECT(f + 8 * group, 1024); TMA_LOAD(ADDRESS(box[group]), &map, f + 8 * group, 0, 8 * i); }
        WAIT(f + 8 * group, n & 1);
        u32 v[4];
        for (u32 j = 0; j < 4; ++j) v[j] = box[group][t + 64 * j];
#ifndef NO_TURN
        NAMED_SYNC(1 + group, 128);
#endif
        shared_sum[t] = v[0] + v[1] + v[2] + v[3];   //! NO_TURN
        NAMED_SYNC(3 + group, 64);
        for (u32 j = 0; j < 4; ++j) out[256 * i + t + 64 * j] = v[j] + (shared_sum[63 - t] == ~0u);
#ifndef NO_ARRIVE
        if (i + 1 < tiles) NAMED_ARRIVE(2 - group, 128);
#endif
    }
}
"""

OVERWRITTEN, EARLY, RACE, FENCE = "overwritten_while_read", "read_before_load", "data_race", "missing_proxy_fence"
#: Kinds that also occur after the two sides of a pipeline are out of step.
_AFTER = ("deadlock", "arrival_overflow", "write_race", "uninitialized_shared", "wrong_parity", OVERWRITTEN, EARLY)


def and_then(kind: str, *others: str) -> tuple[str, ...]:
    return (kind, *others, *_AFTER)


CASES = [
    Case(
        "ring",
        RING,
        {
            "NO_INIT_FENCE": "missing_init_fence",
            "NO_INIT_SYNC": ("barrier_uninitialized", "missing_init_sync", "trap", "deadlock"),
            "NO_ACQUIRE": and_then(OVERWRITTEN),
            "FIRST_PHASE 0": "deadlock",
            "NO_WAIT": and_then(EARLY),
            "ONE_TRY": and_then(EARLY),
            "FLIPPED": and_then("wrong_parity"),
            "EARLY_RELEASE": (OVERWRITTEN, EARLY, "wrong_parity"),
            "NO_MEETING": OVERWRITTEN,
            "NO_RELEASE": "deadlock",
            "CONSUMER_WARPS 1": and_then(OVERWRITTEN),
            "CONSUMER_WARPS 3": "deadlock",
            "EXPECTED (BYTES-16)": ("byte_count", "deadlock", EARLY),
            "EXPECTED (BYTES+16)": ("byte_count", "deadlock"),
            "ARRIVE_ONLY": and_then("byte_count"),
            "TWO_INITS": and_then("barrier_reinitialized", "missing_init_fence"),
            "MISALIGNED": ("barrier_misaligned", "trap"),
            "TWO_LOADS": and_then(OVERWRITTEN, "byte_count"),
            "TWO_ARRIVALS": and_then(OVERWRITTEN),
            "STORE_OVER": "barrier_overwritten",
        },
        copied(0, maps=False),
        block=96,
        variants=("GUIDE",),
    ),
    Case(
        "tokens",
        TOKENS,
        {
            "NO_WAIT": and_then(EARLY),
            "NO_REUSE_BARRIER": and_then(OVERWRITTEN, "lane_race"),
            "NO_EXPECT": and_then("byte_count"),
        },
        copied(0, maps=False),
        block=64,
    ),
    Case(
        "epilogue",
        EPILOGUE,
        {
            "NO_FENCE": FENCE,
            "WRONG_FENCE": FENCE,
            "MEMORY_FENCE": FENCE,
            "NO_BARRIER": and_then(RACE, "lane_race", "store_source_reused"),
            "TOO_MANY": "store_source_reused",
            "NO_READ_WAIT": ("store_source_reused",),
            "NO_REUSE_BARRIER": ("store_source_reused", OVERWRITTEN, EARLY, "lane_race"),
            "NO_COMMIT": ("uncommitted_group", "store_source_reused"),
            "NO_END": "exit_with_pending_store",
        },
        copied(1, maps=True),
        block=64,
        variants=("FENCE_BY_ONE",),
    ),
    Case(
        "in place", IN_PLACE, {"NO_FENCE": FENCE, "NO_READ_WAIT": "store_source_reused"}, copied(2, maps=True), block=64
    ),
    Case("cleared slots", CLEARED, {"NO_FENCE": FENCE}, copied(0, maps=False), block=64),
    Case("ping-pong", PING_PONG, {"NO_TURN": RACE, "NO_ARRIVE": "deadlock"}, copied(0, maps=False), block=128),
]


test_the_right_kernel_is_clean, test_the_bug_is_reported = checks_of(CASES, bug_sweep=12)
