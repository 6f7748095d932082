// cudatma: kernels/tile_copy.cu.j2 for sm_90a
// config: TileCopyConfig
//   element_bytes = 4
//   box_rows = 32
//   stages = 3
// ring: 3 stages of 8192 bytes; per stage, expect_tx of 8192 bytes, 1 producer arrival and 1 consumer arrival; 24624 bytes of shared memory in total
//   +0 tile: 8192 bytes, 8192 loaded by TMA
//   barriers at +24576: full[3], empty[3]

// primitives.cu contains
// u8, u16, u32, u64, TensorMap, shared_address, fence_acq_rel_cta, mbarrier_init, mbarrier_arrive,
// mbarrier_arrive_expect_tx, mbarrier_try_wait_parity, mbarrier_wait_parity, fence_mbarrier_init,
// cp_async_bulk_tensor_2d_load, cp_async_bulk_tensor_2d_store, prefetch_tensormap, cp_async_bulk_commit_group,
// cp_async_bulk_wait_group, cp_async_bulk_wait_group_read, TmaPipeline

using namespace cudatma;

constexpr u32 STAGES = 3;   // at least 2 because a slot is released after the next store
constexpr u32 STAGE_BYTES = 8192;   // bytes from one slot to the next
constexpr u32 EXPECTED_BYTES = 8192;   // bytes that TMA loads per box
constexpr u32 BARRIERS = 24576;   // offset of the barriers, after the slots
constexpr int BOX_ROWS = 32;
constexpr int BOX_COLUMNS = 64;

// Copy a 2D array in tiles_y x tiles_x boxes. A CTA copies every gridDim.x-th box. Thread 0 waits until thread 32 has released a slot, and
// loads a box into the slot. Thread 32 waits until the slot is full, stores the box, and releases the slot after the store has read it.
// Boxes may extend beyond the edges of the array. Loads fill elements outside the array with zeros, and stores omit these elements.
extern "C" __global__ void __launch_bounds__(64)
tile_copy(const __grid_constant__ TensorMap source, const __grid_constant__ TensorMap destination, int tiles_x, int tiles_y) {
    extern __shared__ __align__(128) u8 shared[];
    const u32 slots = shared_address(shared);
    const int tiles = tiles_x * tiles_y;

    TmaPipeline<STAGES> pipeline;
    pipeline.init(slots + BARRIERS, 1, 1);

    if (threadIdx.x == 0) {
        prefetch_tensormap(&source);
        for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
            const int x = tile % tiles_x * BOX_COLUMNS, y = tile / tiles_x * BOX_ROWS;
            pipeline.acquire();
            pipeline.expect_tx(EXPECTED_BYTES);
            cp_async_bulk_tensor_2d_load(slots + pipeline.stage * STAGE_BYTES, &source, pipeline.get_barrier(), x, y);
            pipeline.advance();
        }
    } else if (threadIdx.x == 32) {
        prefetch_tensormap(&destination);
        u32 previous = STAGES;   // the slot of the last store, or STAGES if there was none
        for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
            const int x = tile % tiles_x * BOX_COLUMNS, y = tile / tiles_x * BOX_ROWS;
            pipeline.wait();
            // No proxy fence is needed because TMA both wrote the slot and reads it.
            cp_async_bulk_tensor_2d_store(&destination, slots + pipeline.stage * STAGE_BYTES, x, y);
            cp_async_bulk_commit_group();
            if (previous < STAGES) {
                cp_async_bulk_wait_group_read<1>();   // wait until the previous store has read its slot; this store may still be reading
                pipeline.release(previous);
            }
            previous = pipeline.stage;
            pipeline.advance();
        }
        cp_async_bulk_wait_group<0>();   // TMA must read shared memory before the CTA exits and finish its writes before the kernel ends
    }
}
