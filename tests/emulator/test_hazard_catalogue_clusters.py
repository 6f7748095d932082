"""Clusters and warpgroups: multicast, another block's shared memory, wgmma; each bug next to the correct kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from catalogue import Case, checks_of, module_of

from cudatma.descriptor import TensorMap

Made = tuple[tuple[Any, ...], Callable[[], bool]]
TILES = 6

# Two blocks share each tile: each loads one half of it for both; a slot's empty barrier waits for the readers of both.
MULTICAST = """
constexpr u32 STAGES = 2;
#ifndef ARRIVALS
#define ARRIVALS 4
#endif
extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(96)
k(const __grid_constant__ Map map, u32* out, u32 tiles) {
    __shared__ alignas(128) u32 slots[STAGES][256];
    __shared__ alignas(8) u64 full[STAGES], empty[STAGES];
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, f = ADDRESS(full), e = ADDRESS(empty);
    u32 rank;
    asm volatile("mov.u32 %0, %cluster_ctarank;" : "=r"(rank));
    if (threadIdx.x == 0) {
        for (u32 s = 0; s < STAGES; ++s) { INIT(f + 8 * s, 1); INIT(e + 8 * s, ARRIVALS); }
#ifndef NO_INIT_FENCE
        FENCE_INIT();
#endif
    }
#if defined(BLOCK_ONLY)
    __syncthreads();
#elif defined(RELAXED)
    CLUSTER_ARRIVE_RELAXED();
    CLUSTER_WAIT();
#else
    CLUSTER_ARRIVE();
    CLUSTER_WAIT();
#endif
    for (u32 i = 0; i < tiles; ++i) {
        const u32 s = i % STAGES, phase = i / STAGES & 1;
        if (warp == 2) {
            if (lane == 0) {
#if defined(DEFAULT_SCOPE)
                WAIT(e + 8 * s, phase ^ 1);
#elif !defined(NO_ACQUIRE)
                WAIT_CLUSTER(e + 8 * s, phase ^ 1);
#endif
                EXPECT(f + 8 * s, 1024);
                const u32 to = ADDRESS(slots[s]) + 512 * rank;
                TMA_MULTICAST(to, &map, f + 8 * s, 0, 8 * i + 4 * rank, 3);   //! NO_ACQUIRE OWN_ONLY
            }
        } else {
            WAIT_CLUSTER(f + 8 * s, phase);
            u32 v[4];
            for (u32 j = 0; j < 4; ++j) v[j] = slots[s][threadIdx.x + 64 * j];
#ifdef IN_PLACE
            for (u32 j = 0; j < 4; ++j) slots[s][threadIdx.x + 64 * j] = 0;
            FENCE_ASYNC();
#endif
            __syncwarp();
            if (lane < 2) {
                u32 there;
                MAPA(there, e + 8 * s, lane);
#if defined(DEFAULT_SCOPE)
                asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" :: "r"(there) : "memory");
#elif defined(OWN_ONLY)
                if (lane == rank) { ARRIVE_REMOTE(there); ARRIVE_REMOTE(there); }
#else
                ARRIVE_REMOTE(there);
#endif
            }
            for (u32 j = 0; j < 4; ++j) out[256 * (tiles * rank + i) + threadIdx.x + 64 * j] = v[j];
        }
    }
#ifndef NO_END
    CLUSTER_ARRIVE();
    CLUSTER_WAIT();
#endif
}
"""


def multicast() -> Made:
    given = np.random.default_rng(5).integers(0, 99, (8 * TILES, 32)).astype(np.uint32)
    out = np.zeros((2, 8 * TILES, 32), np.uint32)
    return (TensorMap.from_array(given, (4, 32), encoder="codec"), out, TILES), lambda: bool((out == given).all())


# Blocks put values into each other's shared memory, round after round.
NEIGHBOURS = """
extern "C" __global__ void __cluster_dims__(2, 1, 1) k(u32* out) {
    __shared__ u32 box[32];
    u32 rank, there, sum = 0;
    asm volatile("mov.u32 %0, %cluster_ctarank;" : "=r"(rank));
    MAPA(there, ADDRESS(box + threadIdx.x), rank ^ 1);
    for (u32 i = 0; i < 3; ++i) {
        const u32 v = 32 * i + threadIdx.x;
        asm volatile("st.shared::cluster.u32 [%0], %1;" :: "r"(there), "r"(v) : "memory");   //! NO_SECOND
#if defined(RELAXED)
        CLUSTER_ARRIVE_RELAXED();
        CLUSTER_WAIT();
#elif defined(BLOCK_ONLY)
        __syncthreads();
#else
        CLUSTER_ARRIVE();
        CLUSTER_WAIT();
#endif
        sum += box[31 - threadIdx.x];   //! RELAXED BLOCK_ONLY
#ifndef NO_SECOND
        CLUSTER_ARRIVE();
        CLUSTER_WAIT();
#endif
    }
    out[32 * rank + threadIdx.x] = sum;
#ifdef NO_SECOND
    CLUSTER_ARRIVE();
    CLUSTER_WAIT();
#endif
}
"""


# Halves of a warp arrive and wait one after the other; an arrival that nobody has waited for is not to be repeated.
HALVES = """
extern "C" __global__ void __cluster_dims__(2, 1, 1) k(u32* out) {
    __shared__ u32 box[32];
    u32 rank, there, v;
    asm volatile("mov.u32 %0, %cluster_ctarank;" : "=r"(rank));
    box[threadIdx.x] = threadIdx.x;
    if (threadIdx.x < 16) {
        asm volatile("barrier.cluster.arrive;" MEMORY);
#ifdef TWICE
        asm volatile("barrier.cluster.arrive;" MEMORY);   //! TWICE
#endif
        asm volatile("barrier.cluster.wait;" MEMORY);
    } else {
        asm volatile("barrier.cluster.arrive;" MEMORY);
#ifndef NO_WAIT
        asm volatile("barrier.cluster.wait;" MEMORY);
#endif
    }
    __syncwarp();
    MAPA(there, ADDRESS(box + threadIdx.x), rank ^ 1);
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(v) : "r"(there) : "memory");
    out[32 * rank + threadIdx.x] = v;
    CLUSTER_ARRIVE();   //! NO_WAIT
    CLUSTER_WAIT();
}
"""


def halves() -> Made:
    out = np.zeros(64, np.uint32)
    return (out,), lambda: bool((out.reshape(2, 32) == np.arange(32)).all())


def neighbours() -> Made:
    out = np.zeros(64, np.uint32)
    return (out,), lambda: bool((out.reshape(2, 32) == 96 + 3 * np.arange(31, -1, -1)).all())


# st.async into the other block, counted by bytes on its barrier.
REMOTE_STORES = """
extern "C" __global__ void __cluster_dims__(2, 1, 1) k(u32* out) {
    __shared__ alignas(16) u32 box[32];
    __shared__ alignas(8) u64 barrier;
    u32 rank, there, bar_there;
    const u32 bar = ADDRESS(&barrier);
    asm volatile("mov.u32 %0, %cluster_ctarank;" : "=r"(rank));
    MAPA(there, ADDRESS(box + threadIdx.x), rank ^ 1);
    MAPA(bar_there, bar, rank ^ 1);
    if (threadIdx.x == 0) {
        INIT(bar, 1); FENCE_INIT();
#ifdef SHORT
        EXPECT(bar, 112);   //! SHORT
#else
        EXPECT(bar, 128);
#endif
    }
#ifndef NO_INIT_SYNC
    CLUSTER_ARRIVE();
    CLUSTER_WAIT();
#endif
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];"
                 :: "r"(there), "r"(threadIdx.x + 7), "r"(bar_there) : "memory");
#ifndef NO_WAIT
    WAIT_CLUSTER(bar, 0);
#endif
    out[32 * rank + threadIdx.x] = box[31 - threadIdx.x];   //! NO_WAIT
    CLUSTER_ARRIVE();
    CLUSTER_WAIT();
}
"""


def remote_stores() -> Made:
    out = np.zeros(64, np.uint32)
    return (out,), lambda: bool((out.reshape(2, 32) == 7 + np.arange(31, -1, -1)).all())


# A bulk copy from this block's shared memory to the other's.
REMOTE_BULK = """
extern "C" __global__ void __cluster_dims__(2, 1, 1) k(u32* out) {
    __shared__ alignas(128) u32 from[32], to[32];
    __shared__ alignas(8) u64 barrier;
    u32 rank, there, bar_there;
    const u32 bar = ADDRESS(&barrier);
    asm volatile("mov.u32 %0, %cluster_ctarank;" : "=r"(rank));
    MAPA(there, ADDRESS(to), rank ^ 1);
    MAPA(bar_there, bar, rank ^ 1);
    if (threadIdx.x == 0) { INIT(bar, 1); FENCE_INIT(); EXPECT(bar, 128); }
    from[threadIdx.x] = threadIdx.x + 100 * rank;
#ifndef NO_FENCE
    FENCE_ASYNC_SHARED();
#endif
    CLUSTER_ARRIVE();
    CLUSTER_WAIT();
    if (threadIdx.x == 0) BULK_TO_CLUSTER(there, ADDRESS(from), 128, bar_there);   //! NO_FENCE NO_END
#ifndef NO_WAIT
    WAIT_CLUSTER(bar, 0);   // this block's bytes have come: the other's may be under way
#endif
#ifdef REWRITES
    from[threadIdx.x] = 0;   //! REWRITES
#endif
    out[32 * rank + threadIdx.x] = to[threadIdx.x];   //! NO_WAIT
#ifndef NO_END
    CLUSTER_ARRIVE();
    CLUSTER_WAIT();
#endif
}
"""


def remote_bulk() -> Made:
    out = np.zeros(64, np.uint32)
    wanted = np.arange(32) + 100 * np.array([[1], [0]])
    return (out,), lambda: bool((out.reshape(2, 32) == wanted).all())


# Messages instead of a last cluster barrier: a block stays until the other one has read its memory.
MESSAGES = """
extern "C" __global__ void __cluster_dims__(2, 1, 1) k(u32* out) {
    __shared__ alignas(128) u32 from[32], to[32];
    __shared__ alignas(8) u64 full, done;
    u32 rank, v, there, full_there, done_there;
    asm volatile("mov.u32 %0, %cluster_ctarank;" : "=r"(rank));
    MAPA(full_there, ADDRESS(&full), rank ^ 1);
    MAPA(done_there, ADDRESS(&done), rank ^ 1);
    MAPA(there, ADDRESS(to), rank ^ 1);
    if (threadIdx.x == 0) {
        INIT(ADDRESS(&full), 1); INIT(ADDRESS(&done), 32); FENCE_INIT();
        EXPECT(ADDRESS(&full), 128);
    }
    from[threadIdx.x] = threadIdx.x + 100 * rank;
    FENCE_ASYNC_SHARED();
    CLUSTER_ARRIVE();
    CLUSTER_WAIT();
    if (threadIdx.x == 0) BULK_TO_CLUSTER(there, ADDRESS(from), 128, full_there);
    WAIT_CLUSTER(ADDRESS(&full), 0);
    MAPA(there, ADDRESS(from + threadIdx.x), rank ^ 1);
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(v) : "r"(there) : "memory");   //! RELAXED
#ifdef RELAXED
    asm volatile("mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%0];" :: "r"(done_there) : "memory");
#else
    ARRIVE_REMOTE(done_there);   //! LEAVES
#endif
#ifndef LEAVES
    WAIT_CLUSTER(ADDRESS(&done), 0);
#ifndef RELAXED
    if (v == to[threadIdx.x]) from[threadIdx.x] = 0;
#endif
#endif
    out[32 * rank + threadIdx.x] = v;
}
"""


# ---- wgmma: a ring of two, one group of products in flight while the next is issued

PRODUCT = """
constexpr u32 STAGES = 3;
struct alignas(1024) Tile { u8 bytes[8192]; };
__device__ u64 describe(u32 address) {   // K-major, 128-byte swizzle: 8 rows of 128 bytes
#ifdef WRONG_SWIZZLE
    const u64 mode = 2;
#else
    const u64 mode = 1;
#endif
    return (u64)(address >> 4 & 0x3FFF) | (u64)1 << 16 | (u64)64 << 32 | mode << 62;
}
#define ACC(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
extern "C" __global__ void __launch_bounds__(160)
k(const __grid_constant__ Map a, const __grid_constant__ Map b, float* out, u32 tiles) {
    extern __shared__ __align__(1024) u8 smem[];
    Tile* as = (Tile*)smem;
    u8* bs = smem + STAGES * 8192;   // 8 rows a stage
    __shared__ alignas(8) u64 full[STAGES], empty[STAGES];
    const u32 warp = threadIdx.x / 32, f = ADDRESS(full), e = ADDRESS(empty);
    if (threadIdx.x == 0) {
        for (u32 s = 0; s < STAGES; ++s) { INIT(f + 8 * s, 1); INIT(e + 8 * s, 4); }
        FENCE_INIT();
    }
    __syncthreads();
    if (warp == 4) {
        if (threadIdx.x % 32 == 0)
            for (u32 i = 0; i < tiles; ++i) {
                const u32 s = i % STAGES;
                WAIT(e + 8 * s, (i / STAGES & 1) ^ 1);
                EXPECT(f + 8 * s, 8192 + 1024);
                TMA_LOAD(ADDRESS(as[s].bytes), &a, f + 8 * s, 64 * i, 0);   //! RELEASE_TOO_EARLY WAIT_TOO_FEW
                TMA_LOAD(ADDRESS(bs + 1024 * s), &b, f + 8 * s, 64 * i, 0);
            }
        return;
    }
    float d[4] = {0, 0, 0, 0};
    for (u32 i = 0; i < tiles; ++i) {
        const u32 s = i % STAGES;
        WAIT(f + 8 * s, i / STAGES & 1);
#ifndef NO_FENCE
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
        for (u32 j = 0; j < 4; ++j)
            asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0, %1, %2, %3}, %4, %5, 1, 1, 1, 0, 0;"
                         : ACC(0) : "l"(describe(ADDRESS(as[s].bytes) + 32 * j)),
                                    "l"(describe(ADDRESS(bs + 1024 * s) + 32 * j)));
#ifndef NO_COMMIT
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
#ifdef WAIT_TOO_FEW
        asm volatile("wgmma.wait_group.sync.aligned 2;" ::: "memory");
#else
        asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
#endif
#ifdef RELEASE_TOO_EARLY
        if (threadIdx.x % 32 == 0) ARRIVE(e + 8 * s);
#else
        if (i > 0 && threadIdx.x % 32 == 0) ARRIVE(e + 8 * ((i - 1) % STAGES));
#endif
    }
#ifndef NO_LAST_WAIT
    asm volatile("wgmma.wait_group.sync.aligned 0;" : ACC(0) :: "memory");
#endif
    const u32 row = 16 * warp + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
    out[8 * row + column] = d[0]; out[8 * row + column + 1] = d[1];   //! NO_LAST_WAIT
    out[8 * (row + 8) + column] = d[2]; out[8 * (row + 8) + column + 1] = d[3];
}
"""


def product() -> Made:
    rng = np.random.default_rng(2)
    a, b = (rng.integers(-4, 5, (rows, 64 * TILES)).astype(np.float16) for rows in (64, 8))
    out = np.zeros((64, 8), np.float32)
    maps = [TensorMap.from_array(x, (rows, 64), swizzle="128B", encoder="codec") for x, rows in ((a, 64), (b, 8))]
    return (*maps, out, TILES), lambda: bool((out == a.astype(np.float64) @ b.T.astype(np.float64)).all())


OVERWRITTEN, EARLY, RACE = "overwritten_while_read", "read_before_load", "data_race"
CASES = [
    Case(
        "multicast",
        MULTICAST,
        {
            "NO_INIT_FENCE": "missing_init_fence",
            "BLOCK_ONLY": ("missing_init_sync", "barrier_uninitialized", "trap"),
            "NO_ACQUIRE": (
                OVERWRITTEN,
                "write_race",
                EARLY,
                "wrong_parity",
                "deadlock",
                "arrival_overflow",
                "byte_count",
            ),
            "OWN_ONLY": (OVERWRITTEN, "write_race", EARLY, "wrong_parity", "deadlock", "byte_count"),
            "ARRIVALS 5": "deadlock",
            "NO_END": "block_gone",
        },
        multicast,
        grid=2,
        block=96,
        # A relaxed cluster barrier after an init fence; slots that are only read, released without a scope; slots that
        # are written, released at cluster scope.
        variants=("RELAXED", "DEFAULT_SCOPE", "IN_PLACE"),
    ),
    Case(
        "neighbours",
        NEIGHBOURS,
        {"RELAXED": RACE, "BLOCK_ONLY": (RACE, "uninitialized_shared", "block_gone"), "NO_SECOND": RACE},
        neighbours,
        grid=2,
    ),
    Case(
        "st.async",
        REMOTE_STORES,
        {
            "SHORT": ("byte_count", "deadlock", EARLY),
            "NO_INIT_SYNC": ("missing_init_sync", "barrier_uninitialized", "trap"),
            "NO_WAIT": (EARLY, "uninitialized_shared", OVERWRITTEN),
        },
        remote_stores,
        grid=2,
    ),
    Case(
        "shared to shared",
        REMOTE_BULK,
        {
            "NO_FENCE": "missing_proxy_fence",
            "NO_WAIT": (EARLY, "uninitialized_shared", OVERWRITTEN, "block_gone"),
            "REWRITES": "store_source_reused",
            "NO_END": "block_gone",
        },
        remote_bulk,
        grid=2,
    ),
    Case(
        "products",
        PRODUCT,
        {
            "NO_FENCE": "wgmma_missing_fence",
            "NO_COMMIT": ("wgmma_uncommitted", "wgmma_registers", OVERWRITTEN),
            "WAIT_TOO_FEW": OVERWRITTEN,
            "RELEASE_TOO_EARLY": OVERWRITTEN,
            "NO_LAST_WAIT": "wgmma_registers",
            "WRONG_SWIZZLE": "swizzle_mismatch",
        },
        product,
        block=160,
        shared_bytes=3 * (8192 + 1024),
    ),
    Case(
        "halves of a warp",
        HALVES,
        {"TWICE": ("arrival_overflow", "deadlock"), "NO_WAIT": "arrival_overflow"},
        halves,
        grid=2,
    ),
    Case("messages", MESSAGES, {"LEAVES": "block_gone", "RELAXED": "block_gone"}, remote_bulk, grid=2),
]


test_the_right_kernel_is_clean, test_the_bug_is_reported = checks_of(CASES, bug_sweep=8)


def test_slots_that_were_written_are_released_at_cluster_scope() -> None:
    report, _ = CASES[0].run("DEFAULT_SCOPE", "IN_PLACE", schedules=4)
    assert report.findings[0].kind == "write_race", str(report)


def test_bytes_that_do_not_add_up_come_after_the_refill_that_mixes_them() -> None:
    report, _ = CASES[0].run("NO_ACQUIRE", schedules=12)
    assert report.findings[0].kind == OVERWRITTEN, str(report)
    assert "byte_count" in report.kinds
    report, _ = replace(CASES[0], source=MULTICAST.replace("EXPECT(f + 8 * s, 1024)", "EXPECT(f + 8 * s, 512)")).run(
        schedules=4
    )
    assert report.findings[0].kind == "byte_count", str(report)
    assert EARLY in report.kinds


@pytest.mark.parametrize("case", [CASES[0], CASES[4]], ids=lambda case: case.name)
def test_what_sm_120_lacks(case: Case) -> None:
    args, _ = case.arguments()
    module = module_of(case.source, ())
    report = module.launch(
        "k", case.grid, case.block, args, cluster=1, shared_bytes=case.shared_bytes, target="sm_120a", hazards="collect"
    )
    assert "target" in report.kinds
