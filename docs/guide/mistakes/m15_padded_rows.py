"""Rows narrower than the swizzle span are padded to it: the box takes more memory than the bytes it counts."""

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
constexpr u32 ROOM = 64 * 32;   // bytes kept for the box
constexpr u32 OFFSET = 8192 - ROOM;

extern "C" __global__ void load(const __grid_constant__ TensorMap map, float* out) {
    extern __shared__ __align__(1024) u8 tile[];
    __shared__ u64 barrier;
    const u32 bar = shared_address(&barrier);
    if (threadIdx.x == 0) {
        mbarrier_init(bar, 1);
        fence_mbarrier_init();
        mbarrier_arrive_expect_tx(bar, 64 * 32);   // bytes that arrive, without the padding
        cp_async_bulk_tensor_2d_load(shared_address(tile + OFFSET), &map, bar, 0, 0);
    }
    __syncthreads();
    mbarrier_wait_parity(bar, 0);
    for (u32 i = threadIdx.x; i < 64 * 8; i += 64) {
        const u32 row = i / 8, chunk = i % 8 / 4 ^ row % 8;
        out[i] = *(const float*)(tile + OFFSET + row * 128 + chunk * 16 + i % 4 * 4);
    }
}
"""


def run(kernel: object) -> Report:
    data, out = np.arange(64 * 8, dtype=np.float32).reshape(64, 8), np.zeros((64, 8), np.float32)
    return collect(kernel, 64, (TensorMap.from_array(data, (64, 8), swizzle="128B"), out), shared_bytes=8192)


MISTAKE = Mistake(KERNEL, wrong="ROOM = 64 * 32;", right="ROOM = 64 * 128;", says="out_of_bounds", run=run)

if __name__ == "__main__":
    MISTAKE.main()
