"""Step 7. Reductions: a store that computes a sum, minimum, maximum or bit operation in L2, without a race.

All CTAs add their tile to the same place. The order of floating-point sums is not fixed; here they are integers.
"""

from __future__ import annotations

from place import check, library, target

import cudatma
from cudatma import TensorMap

KERNEL = r"""
//% include "primitives/bulk_group.cuh.j2"
//% include "primitives/fence.cuh.j2"
//% include "primitives/tma_reduce.cuh.j2"
using namespace cudatma;

extern "C" __global__ void add_up(const __grid_constant__ TensorMap map) {
    __shared__ __align__(128) int tile[8 * 32];
    for (u32 i = threadIdx.x; i < 8 * 32; i += blockDim.x) tile[i] = blockIdx.x + i;
    fence_proxy_async_shared_cta();
    __syncthreads();
    if (threadIdx.x == 0) {
        cp_reduce_async_bulk_tensor_2d_add(&map, shared_address(tile), 0, 0);
        cp_async_bulk_commit_group();
        cp_async_bulk_wait_group_read<0>();
    }
}
"""

xp = library()
out = xp.zeros((8, 32), xp.int32)
cudatma.compile(KERNEL, target=target(), template=True).launch(10, 64, (TensorMap.from_array(out, (8, 32)),))
check("ten blocks added up", out, 45 + 10 * xp.arange(8 * 32, dtype=xp.int32).reshape(8, 32))
