"""Step 4. A store: a fence before it, a group after it.

TMA reads shared memory through a proxy of its own, and sees plain stores only after fence.proxy.async. There is no
barrier: stores go into a group, and wait_group.read waits until the group has read its source.
"""

from __future__ import annotations

from place import check, library, target

import cudatma
from cudatma import TensorMap

KERNEL = r"""
//% include "primitives/bulk_group.cuh.j2"
//% include "primitives/fence.cuh.j2"
//% include "primitives/tma_store.cuh.j2"
using namespace cudatma;

extern "C" __global__ void count(const __grid_constant__ TensorMap map, int columns) {
    __shared__ __align__(128) int tile[16 * 32];
    const int x = blockIdx.x * 32, y = blockIdx.y * 16;
    for (int i = threadIdx.x; i < 16 * 32; i += blockDim.x) tile[i] = (y + i / 32) * columns + x + i % 32;
    fence_proxy_async_shared_cta();   // by each thread, for its own writes
    __syncthreads();                  // after the fences of all threads
    if (threadIdx.x == 0) {
        cp_async_bulk_tensor_2d_store(&map, shared_address(tile), x, y);   // elements outside are not written
        cp_async_bulk_commit_group();
        cp_async_bulk_wait_group_read<0>();   // shared memory must outlive the reads
    }
}
"""

xp = library()
out = xp.zeros((100, 200), xp.int32)
cudatma.compile(KERNEL, target=target(), template=True).launch((7, 7), 128, (TensorMap.from_array(out, (16, 32)), 200))
check("every element counted", out, xp.arange(100 * 200, dtype=xp.int32).reshape(100, 200))
