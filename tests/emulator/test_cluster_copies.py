"""Copies and stores between the blocks of a cluster, and bulk reductions."""

from __future__ import annotations

import numpy as np
import pytest
from ptx_of import module_of

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
    assert ["other than that of the executing thread" in warning.message for warning in report.warnings] == [True]
    assert (out == 1 + np.arange(32) % 4).all()
    with pytest.raises(TrapError, match=r"st\.async in a launch without a cluster"):
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
