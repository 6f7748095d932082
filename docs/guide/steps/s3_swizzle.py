"""Step 3. The swizzle: columns of a tile without bank conflicts.

Rows of 128 bytes put the elements of a column into the same banks. Under the 128-byte swizzle the 16-byte chunk c of
row r is at chunk c ^ (r % 8). The pattern depends on the shared address: the tile begins at a multiple of 1024 bytes.
"""

from __future__ import annotations

from place import check, library, target

import cudatma
from cudatma import TensorMap
from cudatma.layout import Swizzle, swizzle

KERNEL = r"""
//% include "primitives/mbarrier.cuh.j2"
//% include "primitives/tma_load.cuh.j2"
using namespace cudatma;

extern "C" __global__ void column_sums(const __grid_constant__ TensorMap map, float* out) {
    __shared__ __align__(1024) float tile[32 * 32];
    __shared__ u64 barrier;
    const u32 bar = shared_address(&barrier);
    if (threadIdx.x == 0) {
        mbarrier_init(bar, 1);
        fence_mbarrier_init();
        mbarrier_arrive_expect_tx(bar, sizeof(tile));
        cp_async_bulk_tensor_2d_load(shared_address(tile), &map, bar, 0, 0);
    }
    __syncthreads();
    mbarrier_wait_parity(bar, 0);
    // Lane = row: 32 lanes read one column, from 8 chunks, so that at most 4 of them use the same bank.
    const u32 row = threadIdx.x;
    float sum = 0;
    for (u32 column = 0; column < 32; ++column) {
        const u32 chunk = column / 4 ^ row % 8;
        sum += tile[row * 32 + chunk * 4 + column % 4];
    }
    out[row] = sum;
}
"""

xp = library()
array = xp.arange(32 * 32, dtype=xp.float32).reshape(32, 32)
out = xp.zeros(32, xp.float32)
cudatma.compile(KERNEL, target=target(), template=True).launch(
    1, 32, (TensorMap.from_array(array, (32, 32), swizzle="128B"), out)
)
check("sums of rows, read through the swizzle", out, array.sum(axis=1))
print("chunks of row 3, by column:", [swizzle(3 * 128 + 16 * c, Swizzle.B128) % 128 // 16 for c in range(8)])
