"""Copies and stores between the CTAs of a cluster, bulk reductions, and the copies of SM100."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ptx_of import module_of

from cudatma.descriptor import TensorMap, TiledSpec
from cudatma.emulator import EmulatedModule
from cudatma.emulator.errors import TrapError

EXCHANGE = """
extern "C" __global__ void __cluster_dims__(2, 1, 1) k(u32* out) {
    __shared__ __align__(128) u32 mine[64], theirs[64], words[32];
    __shared__ __align__(8) u64 barrier;
    const u32 rank = cluster_ctarank(), t = threadIdx.x, bar = shared_address(&barrier);
    if (t == 0) { mbarrier_init(bar, 1); fence_mbarrier_init(); mbarrier_arrive_expect_tx(bar, 256 + 128); }
    mine[t] = 1000 * rank + t;
    mine[t + 32] = 1000 * rank + t + 32;
    fence_proxy_async_shared_cta();
    barrier_cluster_arrive(); barrier_cluster_wait();
    const u32 remote_bar = mapa_shared_cluster(bar, rank ^ 1);
    if (t == 0)
        asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], 256, [%2];"
            :: "r"(mapa_shared_cluster(shared_address(theirs), rank ^ 1)), "r"(shared_address(mine)), "r"(remote_bar)
            : "memory");
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];"
        :: "r"(mapa_shared_cluster(shared_address(words + t), rank ^ 1)), "r"(7 * t + rank), "r"(remote_bar)
        : "memory");
    mbarrier_wait_parity(bar, 0);
    out[blockIdx.x * 96 + t] = theirs[t];
    out[blockIdx.x * 96 + 32 + t] = theirs[t + 32];
    out[blockIdx.x * 96 + 64 + t] = words[t];
    barrier_cluster_arrive(); barrier_cluster_wait();
}"""


def test_blocks_write_into_each_other() -> None:
    out = np.zeros((2, 96), np.uint32)
    assert module_of(EXCHANGE).launch("k", 2, 32, (out,), schedules=8).is_clean
    for rank in range(2):
        assert out[rank, :64].tolist() == [1000 * (1 - rank) + t for t in range(64)]
        assert out[rank, 64:].tolist() == [7 * t + 1 - rank for t in range(32)]


TO_ITSELF = """
extern "C" __global__ void CLUSTER k(float* out) {
    __shared__ __align__(16) float words[4];
    __shared__ __align__(8) u64 barrier;
    const u32 bar = shared_address(&barrier);
    if (threadIdx.x == 0) { mbarrier_init(bar, 1); fence_mbarrier_init(); }
    __syncwarp();
    if (threadIdx.x == 0) {
        const float sent[4] = {1.0f, 2.0f, 3.0f, 4.0f};
        mbarrier_arrive_expect_tx(bar, 16);
        st_async_v4_f32(shared_address(words), sent, bar);
    }
    mbarrier_wait_parity(bar, 0);
    out[threadIdx.x] = words[threadIdx.x % 4];
}"""


def test_st_async_to_its_own_block_needs_a_cluster_of_one() -> None:
    """Without a cluster it is an illegal instruction on an H200."""
    out = np.zeros(32, np.float32)
    report = module_of(TO_ITSELF.replace("CLUSTER", "__cluster_dims__(1, 1, 1)")).launch("k", 1, 32, (out,))
    assert report.is_clean
    assert ["in one other CTA of the cluster" in warning.message for warning in report.warnings] == [True]
    assert (out == 1 + np.arange(32) % 4).all()
    with pytest.raises(TrapError, match=r"st\.async requires a launch with a cluster"):
        module_of(TO_ITSELF.replace("CLUSTER", "")).launch("k", 1, 32, (out,))


REDUCE = """
extern "C" __global__ void k(float* sums, u32* most) {
    __shared__ __align__(128) float a[32];
    __shared__ __align__(128) u32 b[32];
    a[threadIdx.x] = threadIdx.x * 0.5f;
    b[threadIdx.x] = threadIdx.x * 37 % 64;
    fence_proxy_async_shared_cta();
    __syncwarp();
    if (threadIdx.x == 0) {
        asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], 128;"
                     :: "l"(__cvta_generic_to_global(sums)), "r"(shared_address(a)) : "memory");
        asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.max.u32 [%0], [%1], 128;"
                     :: "l"(__cvta_generic_to_global(most)), "r"(shared_address(b)) : "memory");
        cp_async_bulk_commit_group();
        cp_async_bulk_wait_group<0>();
    }
}"""


def test_bulk_reductions() -> None:
    sums, most = np.ones(32, np.float32), np.full(32, 20, np.uint32)
    assert module_of(REDUCE).launch("k", 3, 32, (sums, most), schedules=1).is_clean
    assert (sums == 1 + 3 * np.arange(32) * 0.5).all()
    assert (most == np.maximum(20, np.arange(32) * 37 % 64)).all()


GATHER = """
//% include "primitives/tma_gather.cuh.j2"
extern "C" __global__ void rows(const __grid_constant__ TensorMap map, const __grid_constant__ TensorMap out,
                                int column, int r0, int r1, int r2, int r3,
                                int s0, int s1, int s2, int s3, u32 bytes, u8* dump) {
    extern __shared__ __align__(1024) u8 box[];
    __shared__ u64 barrier;
    const u32 bar = shared_address(&barrier), smem = shared_address(box);
    if (threadIdx.x == 0) {
        mbarrier_init(bar, 1);
        fence_mbarrier_init();
        mbarrier_arrive_expect_tx(bar, bytes);
        cp_async_bulk_tensor_2d_gather4_load(smem, &map, bar, column, r0, r1, r2, r3);
    }
    __syncthreads();
    mbarrier_wait_parity(bar, 0);
    for (u32 i = threadIdx.x; i < bytes; i += blockDim.x) dump[i] = box[i];
    if (threadIdx.x == 0) {
        cp_async_bulk_tensor_2d_scatter4_store(&out, smem, column, s0, s1, s2, s3);
        cp_async_bulk_commit_group();
        cp_async_bulk_wait_group<0>();
    }
}
"""
LOAD = """
extern "C" __global__ void load(const __grid_constant__ TensorMap map, int column, int row,
                                u32 bytes, u32 size, u8* dump) {
    extern __shared__ __align__(1024) u8 box[];
    __shared__ u64 barrier;
    const u32 bar = shared_address(&barrier);
    if (threadIdx.x == 0) {
        mbarrier_init(bar, 1);
        fence_mbarrier_init();
        mbarrier_arrive_expect_tx(bar, bytes);
        cp_async_bulk_tensor_2d_load(shared_address(box), &map, bar, column, row);
    }
    __syncthreads();
    mbarrier_wait_parity(bar, 0);
    for (u32 i = threadIdx.x; i < size; i += blockDim.x) dump[i] = box[i];
}
"""


@pytest.fixture(scope="module")
def rows() -> EmulatedModule:
    return module_of(GATHER, "sm_100a")


def test_four_rows_are_gathered_and_scattered(rows: EmulatedModule) -> None:
    source = np.arange(40 * 48, dtype=np.float32).reshape(40, 48)
    out = np.full_like(source, -1)
    maps = [TensorMap.from_array(a, (1, 16), encoder="codec") for a in (source, out)]
    dump = np.zeros((4, 16), np.float32)
    taken, given = (7, -1, 39, 7), (3, 1, 38, 40)  # one outside of the tensor on either side
    report = rows.launch(
        "rows", 1, 32, (*maps, 8, *taken, *given, 256, dump), shared_bytes=256, arrays=(source, out), schedules=4
    )
    assert report.is_clean
    wanted = np.stack([source[r, 8:24] if 0 <= r < 40 else np.zeros(16, np.float32) for r in taken])
    assert (dump == wanted).all()
    expected = np.full_like(source, -1)
    for r, row in zip(given[:3], wanted, strict=False):
        expected[r, 8:24] = row
    assert (out == expected).all()


def test_a_box_of_several_rows_traps(rows: EmulatedModule) -> None:
    source = np.zeros((40, 48), np.float32)
    map_ = TensorMap.from_array(source, (2, 16), encoder="codec")
    dump = np.zeros((4, 16), np.float32)
    with pytest.raises(TrapError, match="a box of one row"):
        rows.launch("rows", 1, 32, (map_, map_, 0, *[0] * 8, 256, dump), shared_bytes=512, arrays=(source,))


@pytest.mark.parametrize(
    ("dtype", "box", "unit"), [("16u4_align8b", 64, 16), ("16u4_align16b", 128, 8), ("16u6_align16b", 128, 12)]
)
def test_packed_types_lie_in_shared_memory_with_their_gaps(dtype: str, box: int, unit: int) -> None:
    bits = {"4": 4, "6": 6}[dtype[3]]
    memory = np.random.default_rng(1).integers(1, 256, (8, 256 * bits // 8), dtype=np.uint8)
    raw = np.zeros(memory.size + 32, np.uint8)
    source = raw[-raw.ctypes.data % 32 :][: memory.size].reshape(memory.shape)
    source[:] = memory
    spec = TiledSpec(
        dtype=dtype,
        dims=(256, 8),
        strides_bytes=(source.strides[0],),
        box=(box, 3),
        address=source.ctypes.data,
    )
    map_: Any = TensorMap(spec, encoder="codec", owner=source)
    dump = np.zeros(spec.footprint_bytes, np.uint8)
    args = (map_, 128, 6, spec.expected_bytes, dump.size, dump)
    module_of(LOAD, "sm_100a").launch("load", 1, 32, args, shared_bytes=dump.size, arrays=(source,))
    chunks = dump.reshape(3, -1, 16)
    wanted = np.zeros_like(chunks)
    part = memory[6:, 128 * bits // 8 :][:, : chunks.shape[1] * unit]
    wanted[:2, :, :unit] = part.reshape(2, -1, unit)  # the third row lies outside
    assert (chunks == wanted).all()


def test_packed_types_trap_on_hopper() -> None:
    source = np.zeros((8, 64), np.uint8)
    spec = TiledSpec(dtype="16u4_align8b", dims=(128, 8), strides_bytes=(64,), box=(32, 1), address=source.ctypes.data)
    map_: Any = TensorMap(spec, encoder="codec", owner=source)
    dump = np.zeros(16, np.uint8)
    with pytest.raises(TrapError, match="sm_90a"):
        module_of(LOAD).launch("load", 1, 32, (map_, 0, 0, 16, 16, dump), shared_bytes=64, arrays=(source,))
