"""A tensor map that the GPU edited is used without the acquire fence of its proxy."""

from __future__ import annotations

import numpy as np
from mistake import Mistake, collect

from cudatma import TensorMap
from cudatma.emulator import Report

KERNEL = r"""
//% include "primitives/fence.cuh.j2"
//% include "primitives/mbarrier.cuh.j2"
//% include "primitives/tma_load.cuh.j2"
//% include "primitives/tensormap.cuh.j2"
using namespace cudatma;
extern "C" __global__ void edit(const __grid_constant__ TensorMap given, TensorMap* made, const float* other, float* out) {
    __shared__ __align__(128) float tiles[2][8 * 32];
    __shared__ __align__(128) TensorMap copy;
    __shared__ u64 barriers[2];
    const u32 lane = threadIdx.x, map = shared_address(&copy);
    if (lane == 0) {
        mbarrier_init(shared_address(&barriers[0]), 1);
        mbarrier_init(shared_address(&barriers[1]), 1);
        fence_mbarrier_init();
    }
    for (u32 i = lane; i < sizeof(TensorMap); i += 32) copy.bytes[i] = given.bytes[i];
    __syncwarp();
    for (u32 turn = 0; turn < 2; ++turn) {
        const u32 bar = shared_address(&barriers[turn]);
        if (lane == 0 && turn == 1) tensormap_replace_global_address(map, other);
        __syncwarp();
        tensormap_cp_fenceproxy_release_gpu(made, map);
        if (lane == 0) {
            mbarrier_arrive_expect_tx(bar, sizeof(tiles[turn]));
            cp_async_bulk_tensor_2d_load(shared_address(tiles[turn]), made, bar, 0, 0);
        }
        __syncwarp();
        mbarrier_wait_parity(bar, 0);   // before the map changes
    }
    for (u32 i = lane; i < 2 * 8 * 32; i += 32) out[i] = tiles[i / 256][i % 256];
}
"""


def run(kernel: object) -> Report:
    data, out = np.arange(2 * 8 * 32, dtype=np.float32).reshape(2, 8, 32), np.zeros((2, 8, 32), np.float32)
    room = np.zeros(256, np.uint8)
    made = room[-room.ctypes.data % 128 :][:128]
    return collect(kernel, 32, (TensorMap.from_array(data[0], (8, 32)), made, data[1], out), arrays=(data,))


MISTAKE = Mistake(
    KERNEL,
    wrong="        if (lane == 0) {\n            mbarrier_arrive_expect_tx",
    right="        if (lane == 0) {\n            fence_proxy_tensormap_acquire_gpu(made);\n            mbarrier_arrive_expect_tx",
    says="tensor_map_fence",
    run=run,
)

if __name__ == "__main__":
    MISTAKE.main()
