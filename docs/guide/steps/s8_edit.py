"""Step 8. A tensor map that the kernel edits: other addresses and sizes without a new launch.

A working copy is in shared memory. tensormap.replace changes a field of it, tensormap.cp_fenceproxy publishes it to
global memory, and each thread that uses it there acquires it first. No copy through the old map may be in flight; two
alternating maps give such copies time to finish. cudatma.ragged_copy is a complete kernel of this kind.
"""

from __future__ import annotations

from place import address, check, library, target

import cudatma
from cudatma import TensorMap

KERNEL = r"""
//% include "primitives/fence.cuh.j2"
//% include "primitives/mbarrier.cuh.j2"
//% include "primitives/tensormap.cuh.j2"
//% include "primitives/tma_load.cuh.j2"
using namespace cudatma;

// The first boxes of `count` arrays of 64 columns, each with as many rows as it has.
extern "C" __global__ void first_boxes(const __grid_constant__ TensorMap given, TensorMap* maps, float* const* arrays,
                                       const u32* rows, float* out, u32 count) {
    __shared__ __align__(128) float tile[8 * 32];
    __shared__ __align__(128) TensorMap copy;
    __shared__ u64 barrier;
    const u32 lane = threadIdx.x, bar = shared_address(&barrier), working = shared_address(&copy);
    if (lane == 0) {
        mbarrier_init(bar, 1);
        fence_mbarrier_init();
    }
    for (u32 i = lane; i < sizeof(TensorMap); i += 32) copy.bytes[i] = given.bytes[i];
    __syncwarp();
    for (u32 n = 0; n < count; ++n) {
        TensorMap* map = maps + n % 2;
        if (lane == 0) {
            tensormap_replace_global_address(working, arrays[n]);
            tensormap_replace_global_dim<1>(working, rows[n]);
        }
        __syncwarp();
        tensormap_cp_fenceproxy_release_gpu(map, working);   // the whole warp
        if (lane == 0) {
            fence_proxy_tensormap_acquire_gpu(map);
            mbarrier_arrive_expect_tx(bar, sizeof(tile));
            cp_async_bulk_tensor_2d_load(shared_address(tile), map, bar, 0, 0);
        }
        __syncwarp();
        mbarrier_wait_parity(bar, n & 1);
        for (u32 i = lane; i < 8 * 32; i += 32) out[n * 8 * 32 + i] = tile[i];
        __syncwarp();   // all lanes have read the tile
    }
}
"""

xp = library()
sizes = (3, 8, 20, 1)
arrays = [xp.full((rows, 64), rows, xp.float32) for rows in sizes]
addresses = xp.asarray([address(array) for array in arrays], xp.uint64)
room = xp.zeros(3 * 128, xp.uint8)
maps = room[-address(room) % 128 :][: 2 * 128]  # aligned to 128 bytes
out = xp.zeros((len(sizes), 8, 32), xp.float32)
kernel = cudatma.compile(KERNEL, target=target(), template=True)
rows = xp.asarray(sizes, xp.uint32)
arguments = (TensorMap.from_array(arrays[0], (8, 32)), maps, addresses, rows, out, len(sizes))
if target() is None:
    kernel.launch(1, 32, arguments)
else:
    kernel.emulate(1, 32, arguments, arrays=tuple(arrays))  # it must know what the addresses point to
wanted = xp.zeros_like(out)
for n, array in enumerate(arrays):
    wanted[n, : min(8, len(array))] = array[:8, :32]
check("the first boxes of four arrays", out, wanted)
