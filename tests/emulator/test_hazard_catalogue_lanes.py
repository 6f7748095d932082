"""Races between lanes of one warp, and waits by single lanes; each bug is next to the correct kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from catalogue import Case, checks_of, module_of

Made = tuple[tuple[Any, ...], Callable[[], bool]]


def filled(wanted: Callable[[Any], Any], size: int = 32, given: int = 1024) -> Callable[[], Made]:
    """Return arguments (in, out), and a check that out is what ``wanted`` computes from in."""

    def make() -> Made:
        source = np.random.default_rng(3).integers(0, 1000, given).astype(np.uint32)
        out = np.zeros(size, np.uint32)
        return (source, out), lambda: bool((out == wanted(source)).all())

    return make


EXCHANGE = """
extern "C" __global__ void k(const u32* in, u32* out) {
    __shared__ u32 box[64];
    u32* mine = box + 32 * (threadIdx.x / 32);
    const u32 lane = threadIdx.x % 32;
    mine[lane] = in[threadIdx.x];
#ifndef NO_FIRST
    __syncwarp();
#endif
    const u32 v = mine[31 - lane];   //! NO_FIRST
#ifndef NO_SECOND
    __syncwarp();
#endif
    mine[lane] = v + 1;   //! NO_SECOND
    __syncwarp();
    out[threadIdx.x] = mine[lane ^ 1];
}
"""


def exchanged(source: Any) -> Any:
    return (source[:64].reshape(2, 32)[:, ::-1] + 1)[:, np.arange(32) ^ 1].reshape(-1)


TREE = """
extern "C" __global__ void k(const u32* in, u32* out) {
    __shared__ u32 box[32];
    const u32 lane = threadIdx.x;
    box[lane] = in[lane];
#ifndef NO_FIRST
    __syncwarp();
#endif
    for (u32 d = 16; d; d /= 2) {
        if (lane < d) box[lane] += box[lane + d];   //! NO_FIRST IN_LOOP
#ifndef IN_LOOP
        __syncwarp();
#endif
    }
    out[lane] = box[0];
}
"""

# Every instruction of the whole warp is a place where lanes meet.
SHUFFLED = """
extern "C" __global__ void k(const u32* in, u32* out) {
    __shared__ u32 box[32];
    const u32 lane = threadIdx.x;
    box[lane] = in[lane];
    u32 v = in[lane + 32];
#ifndef NO_SHUFFLE
    v = __shfl_xor_sync(0xffffffff, v, 1);
#endif
    out[lane] = v + box[lane ^ 1];   //! NO_SHUFFLE
}
"""

BROADCAST = """
extern "C" __global__ void k(const u32* in, u32* out) {
    __shared__ u32 total;
    for (u32 i = 0; i < 3; ++i) {
        if (threadIdx.x == 0) total = in[i];   //! NO_SECOND
#ifndef NO_FIRST
        __syncwarp();
#endif
        out[32 * i + threadIdx.x] = total + threadIdx.x;   //! NO_FIRST
#ifndef NO_SECOND
        __syncwarp();
#endif
    }
}
"""

IN_GLOBAL = """
extern "C" __global__ void k(u32* in, u32* out) {
    in[threadIdx.x] += 5;
#ifndef NO_FIRST
    __syncwarp();
#endif
    const u32 v = in[(threadIdx.x + 1) % 32];   //! NO_FIRST
#ifndef NO_SECOND
    __syncwarp();
#endif
    in[threadIdx.x] = v;
    out[threadIdx.x] = v;
}
"""

# ---- one lane waits or copies for the others

ONE_WAITS = """
extern "C" __global__ void k(const u32* in, u32* out) {
    __shared__ alignas(128) u32 box[256];
    __shared__ alignas(8) u64 barrier;
    const u32 bar = ADDRESS(&barrier);
    if (threadIdx.x == 0) {
        INIT(bar, 1); FENCE_INIT();
    }
    for (u32 i = 0; i < 3; ++i) {
        if (threadIdx.x == 0) {
            EXPECT(bar, 1024);
            BULK_LOAD(ADDRESS(box), in + 256 * i, 1024, bar);   //! NO_REFILL_MEETING
            WAIT(bar, i & 1);
        }
#ifndef NO_MEETING
        __syncwarp();
#endif
        for (u32 j = threadIdx.x; j < 256; j += 32) out[256 * i + j] = box[j];   //! NO_MEETING
#ifndef NO_REFILL_MEETING
        __syncwarp();
#endif
    }
}
"""

STAGED_STORE = """
extern "C" __global__ void k(const u32* in, u32* out) {
    __shared__ alignas(128) u32 box[256];
    for (u32 i = 0; i < 3; ++i) {
        for (u32 j = threadIdx.x; j < 256; j += 32) box[j] = in[256 * i + j] + 1;   //! NO_REUSE_MEETING NO_READ_WAIT
        FENCE_ASYNC_SHARED();
#ifndef NO_MEETING
        __syncwarp();
#endif
        if (threadIdx.x == 0) {
            BULK_STORE(out + 256 * i, ADDRESS(box), 1024);   //! NO_MEETING
            COMMIT();
#ifndef NO_READ_WAIT
            WAIT_READ(0);
#endif
        }
#ifndef NO_REUSE_MEETING
        __syncwarp();
#endif
    }
    if (threadIdx.x == 0) WAIT_ALL(0);
}
"""

# Each lane stages and stores a row of its own: nobody has to meet.
OWN_ROWS = """
extern "C" __global__ void k(const u32* in, u32* out) {
    __shared__ alignas(128) u32 box[32][8];
    for (u32 i = 0; i < 3; ++i) {
        for (u32 j = 0; j < 8; ++j) box[threadIdx.x][j] = in[256 * i + 8 * threadIdx.x + j] + 1;   //! NO_READ_WAIT
#ifndef NO_FENCE
        FENCE_ASYNC_SHARED();
#endif
        BULK_STORE(out + 256 * i + 8 * threadIdx.x, ADDRESS(box[threadIdx.x]), 32);   //! NO_FENCE
        COMMIT();
#ifndef NO_READ_WAIT
        WAIT_READ(0);
#endif
    }
    WAIT_ALL(0);
}
"""

# ---- cp.async: groups are counted by each thread

DOUBLE_BUFFER = """
constexpr u32 TILES = 4;
extern "C" __global__ void k(const u32* in, u32* out) {
    __shared__ alignas(16) u32 box[2][256];
    const u32 t = threadIdx.x;   // 64 threads, 16 bytes each
    CP_ASYNC(ADDRESS(box[0] + 4 * t), in + 4 * t);
    CP_COMMIT();
    for (u32 i = 0; i < TILES; ++i) {
        const u32 s = i % 2;
        if (i + 1 < TILES) CP_ASYNC(ADDRESS(box[s ^ 1] + 4 * t), in + 256 * (i + 1) + 4 * t);   //! NO_REUSE_BARRIER
#ifndef NO_COMMIT
        CP_COMMIT();
#endif
#ifdef WRONG_COUNT
        CP_WAIT(2);
#elif !defined(NO_WAIT)
        CP_WAIT(1);
#endif
#ifndef NO_BARRIER
        __syncthreads();
#endif
        for (u32 j = 0; j < 256; j += 64)
            out[256 * i + t + j] = box[s][t + j];   //! WRONG_COUNT NO_WAIT NO_BARRIER NO_COMMIT
#ifndef NO_REUSE_BARRIER
        __syncthreads();
#endif
    }
}
"""

ONE_WARP = """
extern "C" __global__ void k(const u32* in, u32* out) {
    __shared__ alignas(16) u32 box[128];
    CP_ASYNC(ADDRESS(box + 4 * threadIdx.x), in + 4 * threadIdx.x);
    CP_COMMIT();
    CP_WAIT(0);
#ifndef NO_MEETING
    __syncwarp();
#endif
    for (u32 j = 0; j < 4; ++j) out[32 * j + threadIdx.x] = box[32 * j + threadIdx.x];   //! NO_MEETING
}
"""

# Half of the lanes load A in two groups, the other half B in one: what wait_group 1 leaves pending differs.
HALVES = """
extern "C" __global__ void k(const u32* in, u32* out) {
    __shared__ alignas(16) u32 a[2][64], b[64];
    const u32 t = threadIdx.x;
    if (t < 16) {
        CP_ASYNC(ADDRESS(a[0] + 4 * t), in + 4 * t);
        CP_COMMIT();
        CP_ASYNC(ADDRESS(a[1] + 4 * t), in + 64 + 4 * t);
        CP_COMMIT();
        CP_WAIT(1);
        out[t] = a[0][4 * t];
#ifndef NO_LAST
        CP_WAIT(0);
#endif
        out[32 + t] = a[1][4 * t];   //! NO_LAST
    } else {
        CP_ASYNC(ADDRESS(b + 4 * (t - 16)), in + 128 + 4 * (t - 16));
        CP_COMMIT();
#ifdef OTHERS_COUNT
        CP_WAIT(1);
#else
        CP_WAIT(0);
#endif
        out[t] = b[4 * (t - 16)] + 7;   //! OTHERS_COUNT
    }
}
"""


def halves(source: Any) -> Any:
    return np.concatenate([source[0:64:4], source[128:192:4] + 7, source[64:128:4], np.zeros(16, np.uint32)])


ON_BARRIER = """
extern "C" __global__ void k(const u32* in, u32* out) {
    __shared__ alignas(16) u32 box[2][128];
    __shared__ alignas(8) u64 full[2], empty[2];
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, f = ADDRESS(full), e = ADDRESS(empty);
    if (threadIdx.x == 0)
        for (u32 s = 0; s < 2; ++s) { INIT(f + 8 * s, 32); INIT(e + 8 * s, 32); }
    __syncthreads();
    for (u32 i = 0; i < 6; ++i) {
        const u32 s = i % 2, phase = i / 2 & 1;
        if (warp == 0) {
#ifndef NO_EMPTY_WAIT
            WAIT(e + 8 * s, phase ^ 1);
#endif
            CP_ASYNC(ADDRESS(box[s] + 4 * lane), in + 128 * i + 4 * lane);   //! NO_EMPTY_WAIT
#ifdef PLAIN_ARRIVE
            ARRIVE(f + 8 * s);
#else
            asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" :: "r"(f + 8 * s) : "memory");
#endif
        } else {
            WAIT(f + 8 * s, phase);
            for (u32 j = 0; j < 4; ++j) out[128 * i + 32 * j + lane] = box[s][32 * j + lane];   //! PLAIN_ARRIVE
            ARRIVE(e + 8 * s);
        }
    }
}
"""

LANES = "lane_race"
#: Lanes meet in halves, then in quarters that span both: lane 0's value reaches lane 16 over lane 8.
PARTS = """
extern "C" __global__ void k(const u32* in, u32* out) {
    __shared__ u32 box[32];
    const u32 lane = threadIdx.x, half = lane < 16 ? 0xffffu : 0xffff0000u;
    box[lane] = in[lane];
#ifdef SHUFFLED
    if (lane < 16) out[lane] = __shfl_sync(0xffffu, lane, 3);
#else
    __syncwarp(half);
#endif
#ifdef OTHER_HALF
    out[lane] = box[lane ^ 16];   //! OTHER_HALF
#else
    out[lane] = box[lane ^ 8];   //! SHUFFLED
#endif
#ifndef NO_CHAIN
    __syncwarp(lane >= 8 && lane < 24 ? 0x00ffff00u : 0xff0000ffu);
#endif
    if (lane == 16) out[lane] += box[0];   //! NO_CHAIN
#ifndef NO_SECOND
    __syncwarp(half);
#endif
    if (lane) box[lane] = lane;   //! NO_SECOND
}
"""


def parts(source: Any) -> Any:
    wanted = source[:32][np.arange(32) ^ 8]
    wanted[16] += source[0]
    return wanted


# The lanes meet before stmatrix writes, and not after it.
MATRICES = """
extern "C" __global__ void k(const u32* in, u32* out) {
    __shared__ __align__(128) u32 tile[128];
    __shared__ __align__(8) u64 full;
    const u32 lane = threadIdx.x % 32, bar = ADDRESS(&full);
    if (threadIdx.x == 0) INIT(bar, 1);
    __syncthreads();
    if (threadIdx.x < 32) {
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %1, %1, %1};"
                     :: "r"(ADDRESS(tile) + 16 * lane), "r"(in[lane]) : "memory");
#ifndef NO_MEETING
        __syncwarp();
#endif
        if (lane == 0) ARRIVE(bar);
    } else {
        WAIT(bar, 0);
        out[lane] = tile[lane] + tile[lane + 96];   //! NO_MEETING
    }
}
"""

# Two warps write one place.
EQUAL = """
extern "C" __global__ void k(const u32* in, u32* out) {
    __shared__ __align__(128) u32 tile[32];
    const u32 lane = threadIdx.x % 32;
#ifdef OTHER_VALUES
    const u32 from = threadIdx.x;
#else
    const u32 from = lane;
#endif
    asm volatile("stmatrix.sync.aligned.m8n8.x1.shared.b16 [%0], {%1};"
                 :: "r"(ADDRESS(tile) + 16 * (lane % 8)), "r"(in[from]) : "memory");   //! OTHER_VALUES
    __syncthreads();
    if (threadIdx.x < 32) out[lane] = tile[lane];
}
"""

# All lanes wait for their copies, and halves of the warp meet.
HALVES_MEET = """
extern "C" __global__ void k(const u32* in, u32* out) {
    __shared__ __align__(16) u32 box[128];
    const u32 lane = threadIdx.x;
    CP_ASYNC(ADDRESS(box + 4 * lane), in + 4 * lane);
    asm volatile("cp.async.commit_group; cp.async.wait_group 0;" ::: "memory");
    __syncwarp(lane < 16 ? 0xffffu : 0xffff0000u);
#ifdef OTHER_HALF
    const u32 from = lane ^ 16;
#else
    const u32 from = lane ^ 8;
#endif
    out[lane] = box[4 * from];   //! OTHER_HALF
}
"""
# All lanes add to one sum in shared memory, and lane by lane to four in global memory.
SUMS = """
extern "C" __global__ void k(const u32* in, u32* out) {
    __shared__ u32 sum;
    const u32 lane = threadIdx.x;
    if (lane == 0) sum = 0;
    __syncwarp();
#ifdef PLAIN_SUM
    sum += in[lane];   //! PLAIN_SUM
#else
    atomicAdd(&sum, in[lane]);
#endif
#ifdef PLAIN_OUT
    out[1 + lane % 4] += in[lane];   //! PLAIN_OUT
#else
    atomicAdd(&out[1 + lane % 4], in[lane]);
#endif
#ifndef NO_MEETING
    __syncwarp();
#endif
    if (lane == 0) out[0] = sum;
}
"""


def sums(source: Any) -> Any:
    return np.array([source[:32].sum(), *source[:32].reshape(8, 4).sum(axis=0)])


# ---- after a part of a warp has met, each of its lanes publishes the accesses of these lanes only


def reversed_lanes(size: int = 96) -> Callable[[], Made]:
    """Return arguments (in, out), and a check that each row of out is the reversed row of in."""

    def make() -> Made:
        source = np.random.default_rng(3).integers(0, 1000, size).astype(np.uint32)
        out = np.zeros(size, np.uint32)
        return (source, out), lambda: bool((out.reshape(-1, 32) == source.reshape(-1, 32)[:, ::-1]).all())

    return make


# Warp 0 writes a row, warp 1 reads it, three times; each half of a warp meets and releases on its own.
GROUPS = """
extern "C" __global__ void k(const u32* in, u32* out) {
    __shared__ u32 box[32];
    __shared__ alignas(8) u64 full, empty;
    const u32 lane = threadIdx.x % 32, f = ADDRESS(&full), e = ADDRESS(&empty);
    const u32 half = lane < 16 ? 0xffffu : 0xffff0000u;
    if (threadIdx.x == 0) {
#if defined(ONE_HALF_WRITES) || defined(ONE_HALF_SHUFFLES)
        INIT(f, 1);
#elif defined(SIXTEEN_ARRIVE)
        INIT(f, 16);
#else
        INIT(f, 2);
#endif
#ifdef ONE_HALF_READS
        INIT(e, 1);
#else
        INIT(e, 2);
#endif
    }
    __syncthreads();
    for (u32 i = 0; i < 3; ++i) {
        if (threadIdx.x < 32) {
            WAIT(e, (i & 1) ^ 1);
            u32 v = in[32 * i + lane];
            box[lane] = v;   //! ONE_HALF_READS
#ifdef ONE_HALF_SHUFFLES
            if (lane < 16) v = __shfl_sync(0xffffu, v, 0);
            if (lane == 0) ARRIVE(f);
#elif defined(ONE_HALF_WRITES)
            __syncwarp(half);
            if (lane == 0) ARRIVE(f);
#elif defined(SIXTEEN_ARRIVE)
            __syncwarp(half);
            if (lane < 16) ARRIVE(f);
#else
            __syncwarp(half);
            if (lane % 16 == 0) ARRIVE(f);
#endif
        } else {
            WAIT(f, i & 1);
            out[32 * i + lane] = box[31 - lane];   //! ONE_HALF_WRITES ONE_HALF_SHUFFLES SIXTEEN_ARRIVE
            __syncwarp(half);
#ifdef ONE_HALF_READS
            if (lane == 0) ARRIVE(e);
#else
            if (lane % 16 == 0) ARRIVE(e);
#endif
        }
    }
}
"""

# Lanes meet in pairs, then in fours, and so on, until lane 0 knows all of them.
GROUPS_TREE = """
extern "C" __global__ void k(const u32* in, u32* out) {
    __shared__ u32 box[32];
    __shared__ alignas(8) u64 full;
    const u32 lane = threadIdx.x % 32, f = ADDRESS(&full);
    if (threadIdx.x == 0) INIT(f, 1);
    __syncthreads();
    if (threadIdx.x < 32) {
        box[lane] = in[lane];
#ifdef WITHOUT_LAST
        const u32 last = 16;
#else
        const u32 last = 32;
#endif
        for (u32 n = 2; n <= last; n *= 2)
            if (lane % (n / 2) == 0) {
                u32 members = 0;
                for (u32 k = lane / n * n; k < lane / n * n + n; k += n / 2) members |= 1u << k;
                __syncwarp(members);
            }
        if (lane == 0) ARRIVE(f);
    } else {
        WAIT(f, 0);
        out[lane] = box[31 - lane];   //! WITHOUT_LAST
    }
}
"""

# The same through a flag in global memory.
FLAG = """
extern "C" __global__ void k(const u32* in, u32* data, u32* flag, u32* out) {
    const u32 lane = threadIdx.x;
    if (blockIdx.x == 0) {
#ifdef ALL_WRITE
        data[lane] = in[lane];
#else
        if (lane < 16) data[lane] = in[lane];
#endif
        if (lane < 16) __syncwarp(0xffffu);
        if (lane == 0) { __threadfence(); *(volatile u32*)flag = 1; }
    } else {
        while (*(volatile u32*)flag == 0) {}
        __threadfence();
        out[lane] = data[lane];   //! ALL_WRITE
    }
}
"""


def flagged() -> Made:
    source = np.arange(1, 33, dtype=np.uint32)
    data, flag, out = np.zeros(32, np.uint32), np.zeros(1, np.uint32), np.zeros(32, np.uint32)
    return (source, data, flag, out), lambda: bool((out[:16] == source[:16]).all() and not out[16:].any())


CASES = [
    Case("sums", SUMS, {"PLAIN_SUM": LANES, "PLAIN_OUT": LANES}, filled(sums, 5)),
    Case("stmatrix", MATRICES, {"NO_MEETING": "data_race"}, filled(lambda a: 2 * a[:32]), block=64),
    Case("equal stmatrix", EQUAL, {"OTHER_VALUES": "data_race"}, filled(lambda a: a[:32]), block=64),
    Case("exchange", EXCHANGE, {"NO_FIRST": LANES, "NO_SECOND": LANES}, filled(exchanged, 64), block=64),
    Case(
        "parts of a warp",
        PARTS,
        {"SHUFFLED": LANES, "OTHER_HALF": LANES, "NO_CHAIN": LANES, "NO_SECOND": LANES},
        filled(parts),
    ),
    Case("tree", TREE, {"NO_FIRST": LANES, "IN_LOOP": LANES}, filled(lambda a: a[:32].sum())),
    Case(
        "a shuffle between",
        SHUFFLED,
        {"NO_SHUFFLE": LANES},
        filled(lambda a: a[32:64][np.arange(32) ^ 1] + a[:32][np.arange(32) ^ 1]),
    ),
    Case(
        "broadcast",
        BROADCAST,
        {"NO_FIRST": (LANES, "uninitialized_shared"), "NO_SECOND": LANES},
        filled(lambda a: (a[:3, None] + np.arange(32)).reshape(-1), 96),
    ),
    Case("global exchange", IN_GLOBAL, {"NO_FIRST": LANES, "NO_SECOND": LANES}, filled(lambda a: a[:32])),
    Case(
        "one lane waits",
        ONE_WAITS,
        {"NO_MEETING": "read_before_load", "NO_REFILL_MEETING": LANES},
        filled(lambda a: a[:768], 768),
    ),
    Case(
        "one lane stores",
        STAGED_STORE,
        {"NO_MEETING": LANES, "NO_REUSE_MEETING": "store_source_reused", "NO_READ_WAIT": "store_source_reused"},
        filled(lambda a: a[:768] + 1, 768),
    ),
    Case(
        "every lane stores",
        OWN_ROWS,
        {"NO_FENCE": "missing_proxy_fence", "NO_READ_WAIT": "store_source_reused"},
        filled(lambda a: a[:768] + 1, 768),
    ),
    Case(
        "cp.async double buffer",
        DOUBLE_BUFFER,
        {
            "WRONG_COUNT": ("read_before_load", "write_race"),
            "NO_WAIT": ("read_before_load", "write_race"),
            "NO_BARRIER": ("read_before_load", LANES, "uninitialized_shared", "overwritten_while_read"),
            "NO_COMMIT": ("read_before_load", "write_race"),
            "NO_REUSE_BARRIER": ("overwritten_while_read", "read_before_load"),
        },
        filled(lambda a: a, 1024),
        block=64,
    ),
    Case("cp.async in one warp", ONE_WARP, {"NO_MEETING": LANES}, filled(lambda a: a[:128], 128)),
    Case(
        "cp.async, and halves meet", HALVES_MEET, {"OTHER_HALF": LANES}, filled(lambda a: a[:128:4][np.arange(32) ^ 8])
    ),
    Case(
        "cp.async by halves",
        HALVES,
        {"NO_LAST": "read_before_load", "OTHERS_COUNT": "read_before_load"},
        filled(halves, 64),
    ),
    Case(
        "cp.async on a barrier",
        ON_BARRIER,
        {
            "NO_EMPTY_WAIT": ("write_race", "overwritten_while_read", "read_before_load", "deadlock"),
            "PLAIN_ARRIVE": ("read_before_load", "uninitialized_shared", "write_race"),
        },
        filled(lambda a: a[:768], 768),
        block=64,
    ),
    Case(
        "groups",
        GROUPS,
        {
            "ONE_HALF_WRITES": "data_race",
            "ONE_HALF_SHUFFLES": "data_race",
            "SIXTEEN_ARRIVE": "data_race",
            "ONE_HALF_READS": "data_race",
        },
        reversed_lanes(),
        block=64,
    ),
    Case("groups, a tree", GROUPS_TREE, {"WITHOUT_LAST": "data_race"}, reversed_lanes(32), block=64),
    Case("flag", FLAG, {"ALL_WRITE": "global_race"}, flagged, grid=2),
]


test_the_right_kernel_is_clean, test_the_bug_is_reported = checks_of(CASES, clean_sweep=7, bug_sweep=12)


@pytest.mark.parametrize("bug", ["PLAIN_SUM", "PLAIN_OUT"])
def test_lanes_that_update_one_place_are_advised_to_use_an_atomic_operation(bug: str) -> None:
    report, _ = Case("sums", SUMS, {}, filled(sums, 5)).run(bug, schedules=2)
    assert "use atomicAdd" in report.hazards[0].cause
    assert "with one instruction" not in report.hazards[0].cause, "the race is between a load and a store"
    assert "__syncwarp is missing" not in str(report)


def test_a_replay_knows_the_parts_from_the_start() -> None:
    args, _ = reversed_lanes(32)()
    report = module_of(GROUPS_TREE, ("WITHOUT_LAST",)).launch("k", 1, 64, args, replay=0, hazards="collect")
    assert report.kinds == {"data_race"}
