"""Step 9. All of it in one kernel: c = a b^T on the tensor cores, with a ring of TMA loads.

One thread loads 64 x 64 tiles of a and b, 128 bytes a row, under the 128-byte swizzle; four warps read them without
bank conflicts through ldmatrix, and multiply. The Marlin GEMM has the same structure.
"""

from __future__ import annotations

import numpy as np
from place import check, library, target

import cudatma
from cudatma import TensorMap

KERNEL = r"""
//% include "primitives/ldmatrix.cuh.j2"
//% include "primitives/mma.cuh.j2"
//% include "primitives/tma_load.cuh.j2"
//% include "parts/pipeline.cuh.j2"
using namespace cudatma;

constexpr u32 STAGES = 3, TILE_BYTES = 64 * 128, STAGE_BYTES = 2 * TILE_BYTES;

// The shared address of 16-byte chunk `chunk` of a row under the swizzle.
__device__ u32 at(u32 tile, u32 row, u32 chunk) { return tile + row * 128 + ((chunk ^ row % 8) << 4); }

// c (m, n) = a (m, k) b (n, k)^T; m, n, k are multiples of 64.
extern "C" __global__ void gemm(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b, float* c,
                                int n, int k) {
    extern __shared__ __align__(1024) u8 ring[];
    const u32 slots = shared_address(ring), warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    TmaPipeline<STAGES> pipeline;
    pipeline.init(slots + STAGES * STAGE_BYTES, 1, 4);   // one producer; each of four warps releases a slot

    if (warp == 4) {   // ---- the producer
        if (lane == 0)
            for (int depth = 0; depth < k; depth += 64) {
                const u32 slot = slots + pipeline.stage * STAGE_BYTES;
                pipeline.acquire();
                pipeline.expect_tx(STAGE_BYTES);   // of both tiles
                cp_async_bulk_tensor_2d_load(slot, &a, pipeline.get_barrier(), depth, blockIdx.y * 64);
                cp_async_bulk_tensor_2d_load(slot + TILE_BYTES, &b, pipeline.get_barrier(), depth, blockIdx.x * 64);
                pipeline.advance();
            }
        return;
    }

    float sums[8][4] = {};   // of 16 rows and 64 columns
    for (int depth = 0; depth < k; depth += 64) {
        const u32 tile_a = slots + pipeline.stage * STAGE_BYTES, tile_b = tile_a + TILE_BYTES;
        pipeline.wait();
        for (u32 step = 0; step < 4; ++step) {   // 16 elements of K each: two chunks
            u32 rows[4];
            ldmatrix_x4(rows, at(tile_a, warp * 16 + lane % 16, step * 2 + lane / 16));
            for (u32 pair = 0; pair < 4; ++pair) {   // 16 columns each
                u32 columns[4];
                ldmatrix_x4(columns, at(tile_b, pair * 16 + lane / 16 * 8 + lane % 8, step * 2 + lane / 8 % 2));
                mma_m16n8k16_f16(sums[pair * 2], rows, columns[0], columns[1]);
                mma_m16n8k16_f16(sums[pair * 2 + 1], rows, columns[2], columns[3]);
            }
        }
        __syncwarp();
        if (lane == 0) pipeline.release();
        pipeline.advance();
    }
    for (u32 i = 0; i < 8; ++i)
        for (u32 j = 0; j < 4; ++j) {
            const u32 row = blockIdx.y * 64 + warp * 16 + lane / 4 + j / 2 * 8;
            c[row * n + blockIdx.x * 64 + i * 8 + lane % 4 * 2 + j % 2] = sums[i][j];
        }
}
"""

xp = library()
m, n, k = 128, 192, 320
rng = np.random.default_rng(0)
a, b = (xp.asarray(rng.integers(-4, 5, shape).astype(np.float16)) for shape in ((m, k), (n, k)))
c = xp.zeros((m, n), xp.float32)
maps = [TensorMap.from_array(array, (64, 64), swizzle="128B") for array in (a, b)]
shared_bytes = 3 * 2 * 64 * 128 + 2 * 3 * 8
kernel = cudatma.compile(KERNEL, target=target(), template=True)
kernel.launch((n // 64, m // 64), 160, (*maps, c, n, k), shared_bytes=shared_bytes)
check("a product", c, a.astype(xp.float32) @ b.astype(xp.float32).T)
