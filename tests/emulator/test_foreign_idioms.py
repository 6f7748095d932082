"""Idioms of other kernels: control flow, the run-time library, cooperative groups, copies."""

from __future__ import annotations

import numpy as np
import pytest
from ptx_of import module_of

from cudatma.descriptor import TensorMap
from cudatma.emulator import TrapError

SCHEDULES = 8

FLOW = """
// Lane 0 and the others come to one shuffle by different paths, as compilers thread jumps.
extern "C" __global__ void threaded(int* out, int n) {
    int v;
    asm volatile(
        "{ .reg .pred first, more; .reg .u32 t; mov.u32 t, %%tid.x; setp.eq.u32 first, t, 0; setp.gt.s32 more, %1, 0;"
        " mov.u32 %0, t; @first bra ONE; @more bra MEET; bra OUT; ONE: add.u32 %0, %0, 100; @more bra MEET; bra OUT;"
        " MEET: shfl.sync.idx.b32 %0, %0, 0, 31, -1; bar.sync 0; OUT: }" : "=r"(v) : "r"(n));
    out[threadIdx.x] = v;
}

// Threads that have nothing to do leave before the others synchronise.
extern "C" __global__ void early_return(int* out, int n) {
    __shared__ int tile[64];
    const int i = threadIdx.x;
    if (i >= n) return;
    tile[i] = i;
    __syncthreads();
    out[i] = tile[n - 1 - i];
}

extern "C" __global__ void half_barrier(int* out) {
    __shared__ int tile[64];
    tile[threadIdx.x] = threadIdx.x;
    if (threadIdx.x < 16) __syncthreads();
    out[threadIdx.x] = tile[threadIdx.x];
}

"""


def test_lanes_on_different_paths_meet_at_a_shuffle() -> None:
    out = np.zeros(64, np.int32)
    assert module_of(FLOW).launch("threaded", 1, 64, (out, 1), schedules=SCHEDULES).is_clean
    assert (out == np.repeat([100, 32], 32)).all()


@pytest.mark.parametrize("count", [1, 31, 33, 50, 64])
def test_lanes_that_return_early_are_waited_for_by_nobody(count: int) -> None:
    out = np.full(64, -1, np.int32)
    assert module_of(FLOW).launch("early_return", 1, 64, (out, count), schedules=SCHEDULES).is_clean
    assert (out[:count] == np.arange(count)[::-1]).all()
    assert (out[count:] == -1).all()


def test_lanes_that_cannot_meet_are_reported() -> None:
    out = np.zeros(64, np.int32)
    report = module_of(FLOW).launch("half_barrier", 1, 64, (out,), schedules=SCHEDULES, hazards="collect")
    assert report.kinds == {"divergent_barrier"}


LIBRARY = """
extern "C" __device__ void* malloc(size_t);
extern "C" __device__ void free(void*);

struct Shape {
    __device__ virtual int area(int x) const { return x; }
};
struct Square : Shape {
    __device__ int area(int x) const override { return x * x; }
};
struct Strip : Shape {
    int width;
    __device__ int area(int x) const override { return x * width; }
};

extern "C" __global__ void shapes(int* out) {
    Shape* shape;
    if (threadIdx.x % 2) {
        Strip* strip = new Strip;
        strip->width = threadIdx.x;
        shape = strip;
    } else {
        shape = new Square;
    }
    out[threadIdx.x] = shape->area(7);
    delete shape;
}

extern "C" __global__ void scratch(long long* out, int n, int times) {
    int* data = static_cast<int*>(malloc(n * sizeof(int)));
    long long sum = -1;
    if (data) {
        for (int i = 0; i < n; ++i) data[i] = i * threadIdx.x;
        sum = 0;
        for (int i = 0; i < n; ++i) sum += data[i];
    }
    out[threadIdx.x] = sum;
    for (int i = 0; i < times; ++i) free(data);
}
"""


def test_objects_with_virtual_functions_on_the_heap() -> None:
    out = np.zeros(32, np.int32)
    assert module_of(LIBRARY).launch("shapes", 1, 32, (out,), schedules=3).is_clean
    lane = np.arange(32)
    assert (out == np.where(lane % 2, 7 * lane, 49)).all()


def test_malloc_gives_each_lane_its_own_memory() -> None:
    out = np.zeros(64, np.int64)
    module = module_of(LIBRARY)
    assert module.launch("scratch", 1, 64, (out, 5, 1), schedules=3).is_clean
    assert (out == 10 * np.arange(64)).all()
    module.launch("scratch", 1, 1, (out, 64 << 20, 0), schedules=1)
    assert out[0] == -1, "the heap has 8 MiB"
    with pytest.raises(TrapError, match="free of"):
        module.launch("scratch", 1, 1, (out, 5, 2), schedules=1)


GROUPS = """
struct Workspace { unsigned bytes, barrier; };

__device__ void grid_sync() {
    unsigned high, low;
    asm("mov.u32 %0, %%envreg1;" : "=r"(high));
    asm("mov.u32 %0, %%envreg2;" : "=r"(low));
    auto* space = reinterpret_cast<Workspace*>((static_cast<unsigned long long>(high) << 32) | low);
    asm volatile("barrier.sync 0;" : : : "memory");
    if (threadIdx.x == 0) {
        unsigned old, now;
        const unsigned add = blockIdx.x == 0 ? 0x80000000u - (gridDim.x - 1) : 1;
        asm volatile("atom.add.release.gpu.u32 %0, [%1], %2;" : "=r"(old) : "l"(&space->barrier), "r"(add) : "memory");
        do {
            asm volatile("ld.acquire.gpu.u32 %0, [%1];" : "=r"(now) : "l"(&space->barrier) : "memory");
        } while (!((old ^ now) >> 31));
    }
    asm volatile("barrier.sync 0;" : : : "memory");
}

extern "C" __global__ void reversed(int* out, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    out[i] = 3 * i;
    grid_sync();
    const int v = out[n - 1 - i];
    grid_sync();
    out[i] = v;
}

// Two warps of four meet through the shared memory that the system keeps for groups of several warps.
extern "C" __global__ void pairs(int* out) {
    extern __shared__ int tile[];
    unsigned start, old, now;
    asm("mov.u32 %0, %%reserved_smem_offset_1;" : "=r"(start));
    start += 4 * (threadIdx.x / 64);
    tile[threadIdx.x] = threadIdx.x;
    __syncwarp();
    if (threadIdx.x % 32 == 0)
        asm volatile("atom.shared.add.acq_rel.cta.u32 %0, [%1], 1;" : "=r"(old) : "r"(start) : "memory");
    do {
        asm volatile("ld.acquire.cta.shared.u32 %0, [%1];" : "=r"(now) : "r"(start) : "memory");
    } while (now != 2);
    out[threadIdx.x] = tile[threadIdx.x ^ 32];
}
"""


def test_a_grid_synchronises_through_the_driver_s_workspace() -> None:
    out = np.zeros(4 * 64, np.int32)
    assert module_of(GROUPS).launch("reversed", 4, 64, (out, out.size), schedules=4).is_clean
    assert (out == 3 * np.arange(out.size)[::-1]).all()


def test_the_system_s_shared_memory_lies_after_the_kernel_s() -> None:
    out = np.zeros(128, np.int32)
    assert module_of(GROUPS).launch("pairs", 1, 128, (out,), shared_bytes=512, schedules=4).is_clean
    assert (out == np.arange(128) ^ 32).all()


COPIES = """
// cp.async.wait_all needs no commit_group.
extern "C" __global__ void fetch(int* out, const int* in) {
    __shared__ __align__(16) int tile[128];
    cp_async_16(shared_address(tile + 4 * threadIdx.x), in + 4 * threadIdx.x, 16);
    asm volatile("cp.async.wait_all;" : : : "memory");
    __syncthreads();
    for (int k = 0; k < 4; ++k) out[32 * k + threadIdx.x] = tile[127 - 32 * k - threadIdx.x];
}

// All lanes of a warp initialise the barrier, with the same count.
extern "C" __global__ void joint_init(int* out, const int* in) {
    __shared__ __align__(128) int tile[32];
    __shared__ __align__(8) u64 bar;
    mbarrier_init(shared_address(&bar), 1);
    fence_mbarrier_init();
    __syncwarp();
    if (threadIdx.x == 0) {
        mbarrier_arrive_expect_tx(shared_address(&bar), sizeof(tile));
        cp_async_bulk_load(shared_address(tile), in, sizeof(tile), shared_address(&bar));
    }
    mbarrier_wait_parity(shared_address(&bar), 0);
    out[threadIdx.x] = tile[threadIdx.x];
}

// Rows of a tile are padded in shared memory; the box takes the padding along, the tensor map clips it.
extern "C" __global__ void padded(const __grid_constant__ TensorMap map) {
    __shared__ __align__(128) int tile[8][36];
    for (int row = 0; row < 8; ++row) tile[row][threadIdx.x] = 100 * row + threadIdx.x;
    fence_proxy_async_shared_cta();
    __syncwarp();
    if (threadIdx.x == 0) {
        cp_async_bulk_tensor_2d_store(&map, shared_address(tile), 0, 0);
        cp_async_bulk_commit_group();
        cp_async_bulk_wait_group<0>();
    }
}
"""


def test_wait_all_waits_for_what_no_group_holds() -> None:
    data, out = np.arange(128, dtype=np.int32) * 7, np.zeros(128, np.int32)
    assert module_of(COPIES).launch("fetch", 1, 32, (out, data), schedules=SCHEDULES).is_clean
    assert (out == data[::-1]).all()


def test_a_warp_may_initialise_a_barrier_together() -> None:
    data, out = np.arange(32, dtype=np.int32) * 7, np.zeros(32, np.int32)
    assert module_of(COPIES).launch("joint_init", 1, 32, (out, data), schedules=SCHEDULES).is_clean
    assert (out == data).all()


def test_padding_that_a_store_clips_may_hold_anything() -> None:
    out = np.zeros((8, 32), np.int32)
    tensor_map = TensorMap.from_array(out, (8, 36), encoder="codec")
    assert module_of(COPIES).launch("padded", 1, 32, (tensor_map,), schedules=3).is_clean
    assert (out == 100 * np.arange(8)[:, None] + np.arange(32)).all()


ATOMICS = """
extern "C" __global__ void update(int* memory, unsigned* counters, float* sums, const int* where, const int* values) {
    const int i = threadIdx.x, k = where[i], v = values[i];
    atomicAdd(memory + k, v), atomicMin(memory + 8 + k, v), atomicMax(memory + 16 + k, v);
    atomicAnd(memory + 24 + k, v), atomicOr(memory + 32 + k, v), atomicXor(memory + 40 + k, v);
    atomicInc(counters + k, 5), atomicDec(counters + 8 + k, 5);
    atomicAdd(sums + k, 0.5f * v);
}
"""


@pytest.mark.parametrize("cells", [1, 3, 8])
def test_atomics_of_a_warp_on_one_some_and_many_cells(cells: int) -> None:
    random = np.random.default_rng(cells)
    where = random.integers(0, cells, 64).astype(np.int32)
    values = random.integers(-(1 << 31), 1 << 31, 64).astype(np.int32)
    memory, counters, sums = np.zeros((6, 8), np.int32), np.zeros((2, 8), np.uint32), np.zeros(8, np.float32)
    memory[3] = -1
    module_of(ATOMICS).launch("update", 1, 64, (memory, counters, sums, where, values), schedules=3)
    for k in range(cells):
        mine = values[where == k]
        functions = (np.add, np.minimum, np.maximum, np.bitwise_and, np.bitwise_or, np.bitwise_xor)
        starts = (0, 0, 0, -1, 0, 0)
        expected = [f.reduce(mine, initial=start, dtype=np.int32) for f, start in zip(functions, starts, strict=True)]
        assert memory[:, k].tolist() == [int(value) for value in expected]
        assert counters[:, k].tolist() == [mine.size % 6, -mine.size % 6]
        assert np.isclose(sums[k], 0.5 * mine.astype(np.float64).sum(), rtol=1e-4, atol=1e3)
