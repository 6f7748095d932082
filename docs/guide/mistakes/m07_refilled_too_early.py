"""The slot is refilled while other threads still read it."""

from __future__ import annotations

import numpy as np
from mistake import Mistake, collect

from cudatma import TensorMap
from cudatma.emulator import Report

KERNEL = r"""
//% include "primitives/fence.cuh.j2"
//% include "primitives/mbarrier.cuh.j2"
//% include "primitives/tma_load.cuh.j2"
using namespace cudatma;
extern "C" __global__ void load_twice(const __grid_constant__ TensorMap map, float* out) {
    __shared__ __align__(128) float tile[8 * 32];
    __shared__ u64 barrier;
    const u32 bar = shared_address(&barrier);
    if (threadIdx.x == 0) {
        mbarrier_init(bar, 1);
        fence_mbarrier_init();
    }
    __syncthreads();
    for (u32 turn = 0; turn < 2; ++turn) {
        if (threadIdx.x == 0) {
            mbarrier_arrive_expect_tx(bar, sizeof(tile));
            cp_async_bulk_tensor_2d_load(shared_address(tile), &map, bar, 0, 8 * turn);
        }
        mbarrier_wait_parity(bar, turn & 1);
        for (u32 i = threadIdx.x; i < 8 * 32; i += 64) out[8 * 32 * turn + i] = tile[i];
    }
}
"""


def run(kernel: object) -> Report:
    data, out = np.arange(16 * 32, dtype=np.float32).reshape(16, 32), np.zeros((16, 32), np.float32)
    return collect(kernel, 64, (TensorMap.from_array(data, (8, 32)), out))


MISTAKE = Mistake(
    KERNEL,
    wrong="out[8 * 32 * turn + i] = tile[i];\n",
    right="out[8 * 32 * turn + i] = tile[i];\n        __syncthreads();   // all have read the tile\n",
    says="overwritten_while_read",
    run=run,
)

if __name__ == "__main__":
    MISTAKE.main()
