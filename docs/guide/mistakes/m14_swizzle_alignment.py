"""A tile with the 128-byte swizzle is not aligned to 1024 bytes: the pattern depends on the address."""

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
    extern __shared__ __align__(1024) u8 shared[];
    __shared__ u64 barrier;
    u8* tile = shared + 128;   // after a small array
    const u32 bar = shared_address(&barrier);
    if (threadIdx.x == 0) {
        mbarrier_init(bar, 1);
        fence_mbarrier_init();
        mbarrier_arrive_expect_tx(bar, 8 * 128);
        cp_async_bulk_tensor_2d_load(shared_address(tile), &map, bar, 0, 0);
    }
    __syncthreads();
    mbarrier_wait_parity(bar, 0);
    for (u32 i = threadIdx.x; i < 8 * 32; i += 64) {
        const u32 row = i / 32, chunk = i % 32 / 4 ^ row;   // the 128-byte swizzle moves 16-byte chunks
        out[i] = *(const float*)(tile + row * 128 + chunk * 16 + i % 4 * 4);
    }
}
"""


def run(kernel: object) -> Report:
    data, out = np.arange(8 * 32, dtype=np.float32).reshape(8, 32), np.zeros((8, 32), np.float32)
    return collect(kernel, 64, (TensorMap.from_array(data, (8, 32), swizzle="128B"), out), shared_bytes=2048)


MISTAKE = Mistake(
    KERNEL, wrong="u8* tile = shared + 128;", right="u8* tile = shared + 1024;", says="swizzle_alignment", run=run
)

if __name__ == "__main__":
    MISTAKE.main()
