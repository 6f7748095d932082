"""Other threads wait on a barrier that may not be initialized yet."""

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
extern "C" __global__ void load(const __grid_constant__ TensorMap map, float* out) {
    __shared__ __align__(128) float tile[8 * 32];
    __shared__ u64 barrier;
    const u32 bar = shared_address(&barrier);
    if (threadIdx.x == 0) {
        mbarrier_init(bar, 1);
        fence_mbarrier_init();
    }
    if (threadIdx.x == 0) {
        mbarrier_arrive_expect_tx(bar, sizeof(tile));
        cp_async_bulk_tensor_2d_load(shared_address(tile), &map, bar, 0, 0);
    }
    mbarrier_wait_parity(bar, 0);
    for (u32 i = threadIdx.x; i < 8 * 32; i += 64) out[i] = tile[i];
}
"""


def run(kernel: object) -> Report:
    data, out = np.arange(8 * 32, dtype=np.float32).reshape(8, 32), np.zeros((8, 32), np.float32)
    return collect(kernel, 64, (TensorMap.from_array(data, (8, 32)), out))


MISTAKE = Mistake(
    KERNEL,
    wrong="        fence_mbarrier_init();\n    }\n",
    right="        fence_mbarrier_init();\n    }\n    __syncthreads();\n",
    says="missing_init_sync",
    run=run,
)

if __name__ == "__main__":
    MISTAKE.main()
