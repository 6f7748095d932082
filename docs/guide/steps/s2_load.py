"""Step 2. One load: one thread issues it, a barrier counts bytes, all threads wait.

The barrier's phase ends when its arrivals (one, with the expected bytes) and its bytes have come. The part of a tile
beyond the array is filled with zeros, and all bytes of the tile count.
"""

from __future__ import annotations

from place import check, library, target

import cudatma
from cudatma import TensorMap

KERNEL = r"""
//% include "primitives/mbarrier.cuh.j2"
//% include "primitives/tma_load.cuh.j2"
using namespace cudatma;

extern "C" __global__ void load(const __grid_constant__ TensorMap map, float* out, int x, int y) {
    __shared__ __align__(128) float tile[16 * 32];
    __shared__ u64 barrier;
    const u32 bar = shared_address(&barrier);
    if (threadIdx.x == 0) {
        mbarrier_init(bar, 1);     // one arrival, which also announces the bytes
        fence_mbarrier_init();     // the copy's proxy sees an initialised barrier
    }
    __syncthreads();               // all threads see it as well
    if (threadIdx.x == 0) {
        mbarrier_arrive_expect_tx(bar, sizeof(tile));
        cp_async_bulk_tensor_2d_load(shared_address(tile), &map, bar, x, y);
    }
    mbarrier_wait_parity(bar, 0);  // the first phase has parity 0
    for (u32 i = threadIdx.x; i < 16 * 32; i += blockDim.x) out[i] = tile[i];
}
"""

xp = library()
array = xp.arange(100 * 200, dtype=xp.float32).reshape(100, 200)
out = xp.zeros((16, 32), xp.float32)
kernel = cudatma.compile(KERNEL, target=target(), template=True)
kernel.launch(1, 128, (TensorMap.from_array(array, (16, 32)), out, 32, 48))
check("a box inside", out, array[48:64, 32:64])

kernel.launch(1, 128, (TensorMap.from_array(array, (16, 32)), out, 176, 90))
wanted = xp.zeros((16, 32), xp.float32)
wanted[:10, :24] = array[90:, 176:]
check("a box over the corner", out, wanted)
