"""Stores are never committed to a group: the wait returns at once."""

from __future__ import annotations

import numpy as np
from mistake import Mistake, collect

from cudatma import TensorMap
from cudatma.emulator import Report

KERNEL = r"""
//% include "primitives/fence.cuh.j2"
//% include "primitives/mbarrier.cuh.j2"
//% include "primitives/tma_load.cuh.j2"
//% include "primitives/tma_store.cuh.j2"
//% include "primitives/bulk_group.cuh.j2"
using namespace cudatma;
extern "C" __global__ void store(const __grid_constant__ TensorMap map) {
    __shared__ __align__(128) float tile[8 * 32];
    for (u32 turn = 0; turn < 2; ++turn) {
        for (u32 i = threadIdx.x; i < 8 * 32; i += 64) tile[i] = 1000.0f * turn + i;
        fence_proxy_async_shared_cta();
        __syncthreads();
        if (threadIdx.x == 0) {
            cp_async_bulk_tensor_2d_store(&map, shared_address(tile), 0, 8 * turn);
            cp_async_bulk_wait_group_read<0>();
        }
        __syncthreads();   // the store has read the tile
    }
}
"""


def run(kernel: object) -> Report:
    out = np.zeros((16, 32), np.float32)
    return collect(kernel, 64, (TensorMap.from_array(out, (8, 32)),))


MISTAKE = Mistake(
    KERNEL,
    wrong="shared_address(tile), 0, 8 * turn);\n",
    right="shared_address(tile), 0, 8 * turn);\n            cp_async_bulk_commit_group();\n",
    says="uncommitted_group",
    run=run,
)

if __name__ == "__main__":
    MISTAKE.main()
