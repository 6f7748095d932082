"""Step 6. Multicast: one read of global memory fills a tile in every CTA of a cluster (SM90, SM100).

Each CTA arms its own barrier for the bytes that it receives, whichever CTA issues the load. No CTA may send before
all barriers are initialized, and no CTA may exit while another still sends to it.
"""

from __future__ import annotations

from place import check, library, target

import cudatma
from cudatma import TensorMap

KERNEL = r"""
//% include "primitives/cluster.cuh.j2"
//% include "primitives/mbarrier.cuh.j2"
//% include "primitives/tma_load.cuh.j2"
using namespace cudatma;

extern "C" __global__ void __cluster_dims__(2) share(const __grid_constant__ TensorMap map, float* out) {
    __shared__ __align__(128) float tile[2][8 * 32];   // a half from each CTA
    __shared__ u64 barrier;
    const u32 bar = shared_address(&barrier), rank = cluster_ctarank();
    if (threadIdx.x == 0) {
        mbarrier_init(bar, 1);
        fence_mbarrier_init();
        mbarrier_arrive_expect_tx(bar, sizeof(tile));  // armed for both halves, before any CTA may send
    }
    barrier_cluster_arrive();
    barrier_cluster_wait();
    if (threadIdx.x == 0)   // each CTA loads one half, for both
        cp_async_bulk_tensor_2d_load_multicast(shared_address(tile[rank]), &map, bar, 0, 8 * rank, 0b11);
    mbarrier_wait_parity(bar, 0);
    for (u32 i = threadIdx.x; i < 16 * 32; i += blockDim.x) out[rank * 16 * 32 + i] = tile[i / 256][i % 256];
    barrier_cluster_arrive();
    barrier_cluster_wait();
}
"""

xp = library()
array = xp.arange(16 * 32, dtype=xp.float32).reshape(16, 32)
out = xp.zeros((2, 16, 32), xp.float32)
cudatma.compile(KERNEL, target=target(), template=True).launch(
    2, 64, (TensorMap.from_array(array, (8, 32)), out), cluster=2
)
check("both blocks have the whole tile", out, xp.stack([array, array]))
