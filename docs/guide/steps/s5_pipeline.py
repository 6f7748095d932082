"""Step 5. A ring of stages: one warp loads ahead, the other warps compute.

A slot has two barriers: `full` (the loads have come) and `empty` (all readers are done). Both sides walk through the
slots, and toggle their parity when the ring wraps. TmaPipeline of parts/pipeline.cuh.j2 does the counting.
"""

from __future__ import annotations

from place import check, library, target

import cudatma
from cudatma import TensorMap

KERNEL = r"""
//% include "primitives/tma_load.cuh.j2"
//% include "parts/pipeline.cuh.j2"
using namespace cudatma;

constexpr u32 STAGES = 3, ROWS = 16, COLUMNS = 32;

// out[block]: the sum of the tiles of one CTA, which are below each other.
extern "C" __global__ void sums(const __grid_constant__ TensorMap map, unsigned long long* out, int tiles) {
    __shared__ __align__(128) int ring[STAGES][ROWS * COLUMNS];
    __shared__ __align__(8) u8 barriers[TmaPipeline<STAGES>::barrier_bytes];
    TmaPipeline<STAGES> pipeline;
    pipeline.init(shared_address(barriers), 1, 32);   // one producer; 32 consumers release a slot

    if (threadIdx.x == 32) {   // ---- the producer: one thread
        for (int tile = 0; tile < tiles; ++tile) {
            pipeline.acquire();                       // the slot is empty
            pipeline.expect_tx(sizeof(ring[0]));
            cp_async_bulk_tensor_2d_load(shared_address(ring[pipeline.stage]), &map, pipeline.get_barrier(),
                                         blockIdx.x * COLUMNS, tile * ROWS);
            pipeline.advance();
        }
    } else if (threadIdx.x < 32) {   // ---- the consumers: one warp
        unsigned long long sum = 0;
        for (int tile = 0; tile < tiles; ++tile) {
            pipeline.wait();                          // the slot is full
            for (u32 i = threadIdx.x; i < ROWS * COLUMNS; i += 32) sum += ring[pipeline.stage][i];
            pipeline.release();
            pipeline.advance();
        }
        for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
        if (threadIdx.x == 0) out[blockIdx.x] = sum;
    }
}
"""

xp = library()
array = xp.arange(160 * 128, dtype=xp.int32).reshape(160, 128)
out = xp.zeros(4, xp.uint64)
cudatma.compile(KERNEL, target=target(), template=True).launch(4, 64, (TensorMap.from_array(array, (16, 32)), out, 10))
check("sums of four groups of columns", out, array.reshape(160, 4, 32).sum(axis=(0, 2)).astype(xp.uint64))
