"""Races in global memory: flags, fences, atomics, bulk copies, the previous grid; each next to the correct kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from catalogue import Case, checks_of

from cudatma.descriptor import TensorMap

Made = tuple[tuple[Any, ...], Callable[[], bool]]


def zeros(*sizes: int) -> list[np.ndarray[Any, np.dtype[np.uint32]]]:
    return [np.zeros(size, np.uint32) for size in sizes]


def nothing(*sizes: int) -> Callable[[], Made]:
    return lambda: (tuple(zeros(*sizes)), lambda: True)


# ---- a flag from one block to another, in the ways in which people write it

HANDOVER = """
extern "C" __global__ void k(u32* data, u32* flag, u32* out) {
    if (blockIdx.x == 0) {
        data[threadIdx.x] = threadIdx.x + 1;
#ifndef NO_BARRIER
        __syncthreads();
#endif
        if (threadIdx.x == 0) {
#if defined(NARROW)
            __threadfence_block();
#elif !defined(NO_RELEASE)
            __threadfence();
#endif
#ifdef ATOMIC
            atomicExch(flag, 1);
#else
            *(volatile u32*)flag = 1;
#endif
        }
        return;
    }
    if (threadIdx.x == 0) {
#ifndef NO_WAIT
        while (*(volatile u32*)flag == 0) { }
#endif
#ifndef NO_ACQUIRE
        __threadfence();
#endif
    }
#ifndef NO_READER_BARRIER
    __syncthreads();
#endif
    out[threadIdx.x] = data[threadIdx.x];   //! NO_RELEASE NARROW NO_WAIT NO_ACQUIRE NO_BARRIER NO_READER_BARRIER
}
"""


def handover() -> Made:
    data, flag, out = zeros(64, 1, 64)
    return (data, flag, out), lambda: bool((out == np.arange(64) + 1).all())


ACQUIRE_RELEASE = """
extern "C" __global__ void k(u32* data, u32* flag, u32* out) {
    if (blockIdx.x == 0) {
        data[threadIdx.x] = threadIdx.x + 1;
        __syncthreads();
        if (threadIdx.x == 0)
#if defined(RELAXED)
            asm volatile("st.relaxed.gpu.global.u32 [%0], 1;" :: "l"(flag) : "memory");
#elif defined(CTA_SCOPE)
            asm volatile("st.release.cta.global.u32 [%0], 1;" :: "l"(flag) : "memory");
#else
            asm volatile("st.release.gpu.global.u32 [%0], 1;" :: "l"(flag) : "memory");
#endif
        return;
    }
    u32 seen = 0;
    if (threadIdx.x == 0)
        do {
#ifdef RELAXED_READ
            asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory");
#else
            asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory");
#endif
        } while (seen == 0);
    __syncthreads();
    out[threadIdx.x] = data[threadIdx.x];   //! RELAXED CTA_SCOPE RELAXED_READ
}
"""

# The last block to arrive adds what all have left, as reductions of many libraries do; its ticket is an atomic, so that
# every block's release is carried along the chain of updates.
LAST_BLOCK = """
__device__ u32 tickets;
extern "C" __global__ void k(const u32* in, u32* partial, u32* out, u32 blocks) {
    __shared__ u32 sum, last;
    if (threadIdx.x == 0) sum = 0;
    __syncthreads();
    atomicAdd(&sum, in[blockIdx.x * 64 + threadIdx.x]);
    __syncthreads();
    if (threadIdx.x == 0) {
        partial[blockIdx.x] = sum;
#ifndef NO_RELEASE
        __threadfence();
#endif
        last = atomicAdd(&tickets, 1) == blocks - 1;
#ifndef NO_ACQUIRE
        __threadfence();
#endif
    }
    __syncthreads();
    if (last) {
        if (threadIdx.x < 32) {
            u32 v = threadIdx.x < blocks ? partial[threadIdx.x] : 0;   //! NO_RELEASE NO_ACQUIRE
            for (u32 d = 16; d; d /= 2) v += __shfl_xor_sync(0xffffffff, v, d);
            if (threadIdx.x == 0) { *out = v; tickets = 0; }
        }
    }
}
"""

# Every thread fences its own stores before the barrier, and one thread signals after it.
FENCE_FIRST = LAST_BLOCK.replace(
    """        partial[blockIdx.x] = sum;
#ifndef NO_RELEASE
        __threadfence();
#endif
        last""",
    """        partial[blockIdx.x] = sum;
    }
#ifndef NO_RELEASE
    __threadfence();
#endif
    __syncthreads();
    if (threadIdx.x == 0) {
        last""",
)


def last_block() -> Made:
    given = np.arange(5 * 64, dtype=np.uint32)
    partial, out = zeros(5, 1)
    return (given, partial, out, 5), lambda: bool(out[0] == given.sum())


# Blocks add their tiles into one buffer in turn, guarded by a semaphore.
SPLIT_K = """
extern "C" __global__ void k(u32* sum, u32* turn) {
#ifndef NO_WAIT
    if (threadIdx.x == 0) {
        u32 now;
        do asm volatile("ld.global.acquire.gpu.b32 %0, [%1];" : "=r"(now) : "l"(turn) : "memory");
        while (now != blockIdx.x);
    }
    __syncthreads();
#endif
    sum[threadIdx.x] += blockIdx.x + 1;   //! NO_WAIT NO_RELEASE
#ifndef NO_BARRIER
    __syncthreads();
#endif
    if (threadIdx.x == 0) {
        if (blockIdx.x == gridDim.x - 1) { *turn = 0; return; }
#ifndef NO_RELEASE
        asm volatile("fence.acq_rel.gpu;" ::: "memory");
#endif
        asm volatile("red.relaxed.gpu.global.add.s32 [%0], 1;" :: "l"(turn) : "memory");
    }
}
"""


def split_k() -> Made:
    total, turn = zeros(64, 1)
    return (total, turn), lambda: bool((total == 1 + 2 + 3).all() and turn[0] == 0)


# A grid-wide barrier by hand: all blocks swap halves of a buffer.
GRID_SYNC = """
__device__ u32 count, generation;
extern "C" __global__ void k(u32* a, u32* b) {
    const u32 i = blockIdx.x * 32 + threadIdx.x, n = gridDim.x * 32;
    a[i] = i;
    __syncthreads();
    if (threadIdx.x == 0) {
        const u32 mine = *(volatile u32*)&generation;
#ifndef NO_RELEASE
        __threadfence();
#endif
        if (atomicAdd(&count, 1) == gridDim.x - 1) {
            count = 0;
            __threadfence();
            atomicAdd(&generation, 1);
        } else {
            while (*(volatile u32*)&generation == mine) { }
        }
#ifndef NO_ACQUIRE
        __threadfence();
#endif
    }
    __syncthreads();
    b[i] = a[n - 1 - i];   //! NO_RELEASE NO_ACQUIRE
}
"""


def grid_sync() -> Made:
    a, b = zeros(96, 96)
    return (a, b), lambda: bool((b == np.arange(95, -1, -1)).all())


# ---- one block, several warps

SAME_BLOCK = """
extern "C" __global__ void k(u32* scratch, u32* out) {
    scratch[threadIdx.x] = threadIdx.x;
#ifndef NO_BARRIER
    __syncthreads();
#endif
    const u32 v = scratch[127 - threadIdx.x];   //! NO_BARRIER
#ifndef NO_SECOND
    __syncthreads();
#endif
    scratch[threadIdx.x] = v;
    __syncthreads();
    out[threadIdx.x] = scratch[threadIdx.x];
}
"""

COUNTERS = """
extern "C" __global__ void k(u32* bins, u32* found, const u32* keys) {
    const u32 key = keys[blockIdx.x * 64 + threadIdx.x];
#ifdef PLAIN
    bins[key] += 1;   //! PLAIN
#else
    atomicAdd(&bins[key], 1);
#endif
    if (key == 3) *found = 1;   // several threads say the same: the result is that
}
"""


def counters() -> Made:
    keys = (np.arange(128) * 7 % 8).astype(np.uint32)
    bins, found = zeros(8, 1)
    return (bins, found, keys), lambda: bool((bins == np.bincount(keys, minlength=8)).all() and found[0] == 1)


# ---- the async proxy in global memory

STORE_THEN_LOAD = """
extern "C" __global__ void k(const __grid_constant__ Map map, u32* data, u32* out) {
    __shared__ alignas(128) u32 box[8][32];
    __shared__ alignas(8) u64 barrier;
    const u32 bar = ADDRESS(&barrier);
    if (threadIdx.x == 0) { INIT(bar, 1); FENCE_INIT(); }
    for (u32 i = threadIdx.x; i < 256; i += 64) data[i] = i + 5;
#if defined(SHARED_ONLY)
    FENCE_ASYNC_SHARED();
#elif defined(WHOLE)
    FENCE_ASYNC();
#elif !defined(NO_FENCE)
    FENCE_ASYNC_GLOBAL();
#endif
#ifndef NO_BARRIER
    __syncthreads();
#endif
    if (threadIdx.x == 0) {
        EXPECT(bar, 1024);
        TMA_LOAD(ADDRESS(box), &map, bar, 0, 0);   //! NO_FENCE SHARED_ONLY NO_BARRIER
    }
    __syncthreads();
    WAIT(bar, 0);
    for (u32 i = threadIdx.x; i < 256; i += 64) out[i] = box[i / 32][i % 32];
}
"""


def store_then_load() -> Made:
    data, out = np.zeros((8, 32), np.uint32), np.zeros(256, np.uint32)
    map_ = TensorMap.from_array(data, (8, 32), encoder="codec")
    return (map_, data, out), lambda: bool((out == np.arange(256) + 5).all())


RESULT_OF_STORE = """
extern "C" __global__ void k(const __grid_constant__ Map map, u32* data, u32* out) {
    __shared__ alignas(128) u32 box[8][32];
    for (u32 i = threadIdx.x; i < 256; i += 32) box[i / 32][i % 32] = i;
    FENCE_ASYNC_SHARED();
    __syncwarp();
    if (threadIdx.x == 0) {
        TMA_STORE(&map, ADDRESS(box), 0, 0);
        COMMIT();
#ifdef READ_ONLY
        WAIT_READ(0);
#else
        WAIT_ALL(0);
#endif
    }
#ifndef NO_MEETING
    __syncwarp();
#endif
    for (u32 i = threadIdx.x; i < 256; i += 32) out[i] = data[255 - i];   //! READ_ONLY NO_MEETING
}
"""

# A store that is complete for its own thread reaches another block by release and acquire alone.
STORE_HANDOVER = """
extern "C" __global__ void k(u32* data, u32* flag, u32* out) {
    __shared__ alignas(128) u32 box[64];
    const u32 t = threadIdx.x;
    if (blockIdx.x == 0) {
        box[t] = t;
        FENCE_ASYNC();
        __syncthreads();
        if (t == 0) {
            BULK_STORE(data, ADDRESS(box), 256);
            COMMIT();
#ifdef READ_ONLY
            WAIT_READ(0);
#else
            WAIT_ALL(0);
#endif
#ifdef NO_RELEASE
            asm volatile("st.relaxed.gpu.global.u32 [%0], 1;" :: "l"(flag) : "memory");
#else
            asm volatile("st.release.gpu.global.u32 [%0], 1;" :: "l"(flag) : "memory");
#endif
            WAIT_ALL(0);
        }
    } else {
        u32 seen = 0;
        if (t == 0) do {
#ifdef NO_ACQUIRE
            asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory");
#else
            asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory");
#endif
        } while (!seen);
        __syncthreads();
        out[t] = data[63 - t];   //! READ_ONLY NO_RELEASE NO_ACQUIRE
    }
}
"""

OVERLAPPING_STORES = """
extern "C" __global__ void k(u32* data) {
    __shared__ alignas(128) u32 box[64];
    box[threadIdx.x] = threadIdx.x; box[threadIdx.x + 32] = 7;
    FENCE_ASYNC_SHARED();
    __syncwarp();
    if (threadIdx.x == 0) {
        BULK_STORE(data, ADDRESS(box), 128);
        COMMIT();
#ifndef NO_WAIT
        WAIT_ALL(0);
#endif
        BULK_STORE(data + 16, ADDRESS(box) + 128, 128);   //! NO_WAIT
        COMMIT();
        WAIT_ALL(0);
    }
}
"""

# All lanes issue the store, each waits for its own: the bytes are the same (CUTLASS's epilogues store so).
WARP_STORE = """
extern "C" __global__ void k(u32* data) {
    __shared__ alignas(128) u32 box[64];
    box[threadIdx.x] = threadIdx.x; box[threadIdx.x + 32] = 7;
    FENCE_ASYNC_SHARED();
    __syncwarp();
#ifdef DIFFERENT
    BULK_STORE(data, ADDRESS(box) + 128 * (threadIdx.x & 1), 128);   //! DIFFERENT
#else
    BULK_STORE(data, ADDRESS(box), 128);
#endif
    COMMIT();
    WAIT_ALL(0);
}
"""

TMA_ADDS = """
extern "C" __global__ void k(const __grid_constant__ Map map) {
    __shared__ alignas(128) u32 box[8][32];
    for (u32 i = threadIdx.x; i < 256; i += 32) box[i / 32][i % 32] = i;
    FENCE_ASYNC_SHARED();
    __syncwarp();
    if (threadIdx.x == 0) {
#ifdef PLAIN
        TMA_STORE(&map, ADDRESS(box), 0, 0);   //! PLAIN
#else
        TMA_ADD(&map, ADDRESS(box), 0, 0);
#endif
        COMMIT();
        WAIT_ALL(0);
    }
}
"""


def result_of_store() -> Made:
    data, out = np.zeros((8, 32), np.uint32), np.zeros(256, np.uint32)
    map_ = TensorMap.from_array(data, (8, 32), encoder="codec")
    return (map_, data, out), lambda: bool((out == np.arange(255, -1, -1)).all())


def tma_adds() -> Made:
    data = np.zeros((8, 32), np.uint32)
    map_ = TensorMap.from_array(data, (8, 32), encoder="codec")
    return (map_,), lambda: bool((data.reshape(-1) == 3 * np.arange(256)).all())


LOAD_THEN_OVERWRITE = """
extern "C" __global__ void k(u32* data, u32* out) {
    __shared__ alignas(128) u32 box[32];
    __shared__ alignas(8) u64 barrier;
    const u32 bar = ADDRESS(&barrier);
    if (threadIdx.x == 0) {
        INIT(bar, 1); FENCE_INIT();
        EXPECT(bar, 128);
        BULK_LOAD(ADDRESS(box), data, 128, bar);
    }
    __syncwarp();
#ifndef NO_WAIT
    WAIT(bar, 0);
#endif
    data[threadIdx.x] = 9;   //! NO_WAIT
#ifdef NO_WAIT
    WAIT(bar, 0);
#endif
    out[threadIdx.x] = box[threadIdx.x];
}
"""

# ---- a tensor map that the kernel makes itself

OWN_MAP = """
extern "C" __global__ void k(const __grid_constant__ Map given, Map* made, u32* out) {
    __shared__ alignas(128) u32 box[8][32];
    __shared__ alignas(8) u64 barrier;
    const u32 bar = ADDRESS(&barrier);
    if (threadIdx.x == 0) { INIT(bar, 1); FENCE_INIT(); }
    if (threadIdx.x < 32) ((u32*)made)[threadIdx.x] = ((const u32*)&given)[threadIdx.x];
    __syncthreads();
    if (threadIdx.x == 0) {
#ifndef NO_ACQUIRE
        asm volatile("fence.proxy.tensormap::generic.release.gpu;" ::: "memory");
#ifdef OTHER_MAP
        asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" :: "l"(made + 1) : "memory");
#else
        asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" :: "l"(made) : "memory");
#endif
#endif
        EXPECT(bar, 1024);
        TMA_LOAD(ADDRESS(box), made, bar, 0, 0);   //! NO_ACQUIRE OTHER_MAP
    }
    __syncthreads();
    WAIT(bar, 0);
    for (u32 i = threadIdx.x; i < 256; i += 64) out[i] = box[i / 32][i % 32];
}
"""


def own_map() -> Made:
    data, out = np.arange(256, dtype=np.uint32).reshape(8, 32), np.zeros(256, np.uint32)
    map_ = TensorMap.from_array(data, (8, 32), encoder="codec")
    raw = np.zeros(256, np.uint8)
    return (map_, raw[-raw.ctypes.data % 128 :][:128], out), lambda: bool((out == data.reshape(-1)).all())


EDITED_MAP = """
#define PUBLISH(made, copy) \\
    asm volatile("tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned " \\
                 "[%0], [%1], 128;" :: "l"(made), "r"(copy) : "memory"); \\
    asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" :: "l"(made) : "memory"); \\
    __syncwarp()
extern "C" __global__ void k(const __grid_constant__ Map given, Map* made, const u32* other, u32* out) {
    __shared__ alignas(128) u32 box[2][8][32];
    __shared__ alignas(128) u32 copy[32];
    __shared__ alignas(8) u64 barriers[2];
    const u32 first = ADDRESS(&barriers[0]), second = ADDRESS(&barriers[1]), map = ADDRESS(copy);
    if (threadIdx.x == 0) { INIT(first, 1); INIT(second, 1); FENCE_INIT(); }
    copy[threadIdx.x] = ((const u32*)&given)[threadIdx.x];
    __syncwarp();
    PUBLISH(made, map);
    if (threadIdx.x == 0) { EXPECT(first, 1024); TMA_LOAD(ADDRESS(box[0]), made, first, 0, 0); }
    __syncwarp();
#ifdef COMMITTED
    if (threadIdx.x == 0) { COMMIT(); WAIT_READ(0); }
#elif defined(UNCOMMITTED)
    if (threadIdx.x == 0) WAIT_READ(0);
#elif !defined(IN_FLIGHT)
    WAIT(first, 0);
#endif
    if (threadIdx.x == 0)
        asm volatile("tensormap.replace.tile.global_address.shared::cta.b1024.b64 [%0], %1;"
                     :: "r"(map), "l"(other) : "memory");
    __syncwarp();
    PUBLISH(made, map);   //! IN_FLIGHT UNCOMMITTED
    if (threadIdx.x == 0) { EXPECT(second, 1024); TMA_LOAD(ADDRESS(box[1]), made, second, 0, 0); }
    __syncwarp();
    WAIT(first, 0);
    WAIT(second, 0);
    for (u32 i = threadIdx.x; i < 512; i += 32) out[i] = box[i / 256][i % 256 / 32][i % 32];
}
"""


def edited_map() -> Made:
    data = [np.arange(256, dtype=np.uint32).reshape(8, 32) + 1000 * i for i in range(2)]
    raw, out = np.zeros(256, np.uint8), np.zeros(512, np.uint32)
    map_ = TensorMap.from_array(data[0], (8, 32), encoder="codec")
    args = (map_, raw[-raw.ctypes.data % 128 :][:128], data[1], out)
    return args, lambda: bool((out == np.concatenate(data).reshape(-1)).all())


# ---- the grid before this one

DEPENDENT = """
extern "C" __global__ void k(const u32* weights, const u32* activations, u32* out) {
    __shared__ u32 staged[64];
    staged[threadIdx.x] = weights[threadIdx.x];
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#ifdef EARLY_WRITE
    out[threadIdx.x] = 0;   //! EARLY_WRITE
#endif
#ifdef ONE_THREAD
    if (threadIdx.x == 0) asm volatile("griddepcontrol.wait;" ::: "memory");
    __syncthreads();
#elif !defined(NO_WAIT) && !defined(LATE)
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
    const u32 x = activations[threadIdx.x];   //! NO_WAIT LATE
#ifdef LATE
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
    out[threadIdx.x] = staged[threadIdx.x] * x;
}
"""


def dependent() -> Made:
    weights, x, out = np.arange(64, dtype=np.uint32), np.arange(64, dtype=np.uint32) + 2, np.zeros(64, np.uint32)
    return (weights, x, out), lambda: bool((out == weights * x).all())


RACE = "global_race"
CASES = [
    Case(
        "volatile flag",
        HANDOVER,
        dict.fromkeys(("NO_RELEASE", "NARROW", "NO_WAIT", "NO_ACQUIRE", "NO_BARRIER", "NO_READER_BARRIER"), RACE),
        handover,
        grid=2,
        block=64,
        variants=("ATOMIC",),
    ),
    Case(
        "acquire and release",
        ACQUIRE_RELEASE,
        dict.fromkeys(("RELAXED", "CTA_SCOPE", "RELAXED_READ"), RACE),
        handover,
        2,
        64,
    ),
    Case("last block", LAST_BLOCK, dict.fromkeys(("NO_RELEASE", "NO_ACQUIRE"), RACE), last_block, 5, 64),
    Case("fence before the barrier", FENCE_FIRST, {"NO_RELEASE": RACE, "NO_ACQUIRE": RACE}, last_block, 5, 64),
    Case("semaphore", SPLIT_K, dict.fromkeys(("NO_WAIT", "NO_RELEASE", "NO_BARRIER"), RACE), split_k, 3, 64),
    Case("grid barrier", GRID_SYNC, dict.fromkeys(("NO_RELEASE", "NO_ACQUIRE"), RACE), grid_sync, 3, 32),
    Case("one block", SAME_BLOCK, {"NO_BARRIER": RACE, "NO_SECOND": RACE}, nothing(128, 128), 1, 128),
    Case("counters", COUNTERS, {"PLAIN": (RACE, "lane_race")}, counters, 2, 64),
    Case(
        "stores, then a TMA load",
        STORE_THEN_LOAD,
        {"NO_FENCE": "missing_proxy_fence", "SHARED_ONLY": "missing_proxy_fence", "NO_BARRIER": RACE},
        store_then_load,
        block=64,
        variants=("WHOLE",),
    ),
    Case(
        "a TMA store's result",
        RESULT_OF_STORE,
        {"READ_ONLY": "read_before_store", "NO_MEETING": "read_before_store"},
        result_of_store,
    ),
    Case(
        "a bulk store handed to another block",
        STORE_HANDOVER,
        {"READ_ONLY": "read_before_store", "NO_RELEASE": RACE, "NO_ACQUIRE": RACE},
        nothing(64, 1, 64),
        2,
        64,
    ),
    Case("overlapping stores", OVERLAPPING_STORES, {"NO_WAIT": "write_race"}, nothing(64)),
    Case("reductions of several blocks", TMA_ADDS, {"PLAIN": "write_race"}, tma_adds, 3),
    Case("a load's source", LOAD_THEN_OVERWRITE, {"NO_WAIT": RACE}, nothing(32, 32)),
    Case(
        "a map of its own",
        OWN_MAP,
        dict.fromkeys(("NO_ACQUIRE", "OTHER_MAP"), "tensor_map_fence"),
        own_map,
        block=64,
        variants=("ONE_THREAD",),
    ),
    Case(
        "programmatic dependent launch",
        DEPENDENT,
        dict.fromkeys(("NO_WAIT", "LATE", "EARLY_WRITE"), "grid_dependency"),
        dependent,
        1,
        64,
        options={"produced_by_previous": (1,)},
    ),
    Case(
        "a map that is edited again",
        EDITED_MAP,
        dict.fromkeys(("IN_FLIGHT", "UNCOMMITTED"), "tensor_map_in_use"),
        edited_map,
        variants=("COMMITTED",),
    ),
    Case("a store that a whole warp issues", WARP_STORE, {"DIFFERENT": "write_race"}, nothing(64)),
]


test_the_right_kernel_is_clean, test_the_bug_is_reported = checks_of(CASES, clean_sweep=8, bug_sweep=14)
