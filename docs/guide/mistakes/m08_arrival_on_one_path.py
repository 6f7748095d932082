"""One path through the loop does not release the slot."""

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
extern "C" __global__ void pass_on(const __grid_constant__ TensorMap map, float* out, int last) {
    __shared__ __align__(128) float tile[8 * 32];
    __shared__ u64 full, empty;
    const u32 f = shared_address(&full), e = shared_address(&empty);
    if (threadIdx.x == 0) {
        mbarrier_init(f, 1);
        mbarrier_init(e, 32);
        fence_mbarrier_init();
    }
    __syncthreads();
    for (int turn = 0; turn < 2; ++turn) {
        if (threadIdx.x == 32) {   // the producer
            mbarrier_wait_parity(e, (turn & 1) ^ 1);
            mbarrier_arrive_expect_tx(f, sizeof(tile));
            cp_async_bulk_tensor_2d_load(shared_address(tile), &map, f, 0, 8 * turn);
        } else if (threadIdx.x < 32) {   // 32 consumers
            mbarrier_wait_parity(f, turn & 1);
            for (int i = threadIdx.x; i < 8 * 32; i += 32) out[8 * 32 * turn + i] = tile[i];
            if (threadIdx.x < last) mbarrier_arrive(e);
        }
    }
}
"""


def run(kernel: object) -> Report:
    data, out = np.arange(16 * 32, dtype=np.float32).reshape(16, 32), np.zeros((16, 32), np.float32)
    return collect(kernel, 64, (TensorMap.from_array(data, (8, 32)), out, 31))


MISTAKE = Mistake(
    KERNEL, wrong="if (threadIdx.x < last) mbarrier_arrive(e);", right="mbarrier_arrive(e);", says="deadlock", run=run
)

if __name__ == "__main__":
    MISTAKE.main()
