"""A CTA of the cluster receives a multicast tile but expects no bytes."""

from __future__ import annotations

import numpy as np
from mistake import Mistake, collect

from cudatma import TensorMap
from cudatma.emulator import Report

KERNEL = r"""
//% include "primitives/fence.cuh.j2"
//% include "primitives/mbarrier.cuh.j2"
//% include "primitives/tma_load.cuh.j2"
//% include "primitives/cluster.cuh.j2"
using namespace cudatma;
extern "C" __global__ void __cluster_dims__(2) share(const __grid_constant__ TensorMap map, float* out) {
    __shared__ __align__(128) float tile[8 * 32];
    __shared__ u64 barrier;
    const u32 bar = shared_address(&barrier), rank = cluster_ctarank();
    if (threadIdx.x == 0) {
        mbarrier_init(bar, 1);
        fence_mbarrier_init();
    }
    barrier_cluster_arrive();
    barrier_cluster_wait();   // both barriers are there
    if (threadIdx.x == 0) {
        mbarrier_arrive_expect_tx(bar, rank == 0 ? sizeof(tile) : 0);
        if (rank == 0) cp_async_bulk_tensor_2d_load_multicast(shared_address(tile), &map, bar, 0, 0, 3);
    }
    mbarrier_wait_parity(bar, 0);
    for (u32 i = threadIdx.x; i < 8 * 32; i += 64) out[8 * 32 * rank + i] = tile[i];
}
"""


def run(kernel: object) -> Report:
    data, out = np.arange(8 * 32, dtype=np.float32).reshape(8, 32), np.zeros((2, 8, 32), np.float32)
    return collect(kernel, 64, (TensorMap.from_array(data, (8, 32)), out), grid=2, cluster=2)


MISTAKE = Mistake(
    KERNEL,
    wrong="mbarrier_arrive_expect_tx(bar, rank == 0 ? sizeof(tile) : 0);",
    right="mbarrier_arrive_expect_tx(bar, sizeof(tile));",
    says="byte_count",
    run=run,
)

if __name__ == "__main__":
    MISTAKE.main()
