// cudatma: kernels/ragged_copy.cu.j2 for sm_90a
// config: RaggedCopyConfig
//   element_bytes = 2
// ring: 4 stages of 8192 bytes; per stage, expect_tx of 8192 bytes, 1 producer arrival and 1 consumer arrival; 32832 bytes of shared memory in total
//   +0 tile: 8192 bytes, 8192 loaded by TMA
//   barriers at +32768: full[4], empty[4]

// primitives.cu contains
// u8, u16, u32, u64, TensorMap, shared_address, fence_acq_rel_cta, fence_proxy_tensormap_acquire_gpu,
// mbarrier_init, mbarrier_arrive, mbarrier_arrive_expect_tx, mbarrier_try_wait_parity, mbarrier_wait_parity,
// fence_mbarrier_init, cp_async_bulk_tensor_2d_load, cp_async_bulk_tensor_2d_store,
// tensormap_cp_fenceproxy_release_gpu, tensormap_replace_global_address, tensormap_replace_global_dim,
// tensormap_replace_global_stride, cp_async_bulk_commit_group, cp_async_bulk_wait_group,
// cp_async_bulk_wait_group_read, TmaPipeline

using namespace cudatma;

constexpr u32 STAGES = 4;   // at least 2 because a slot is released after the next store
constexpr u32 STAGE_BYTES = 8192;   // bytes from one slot to the next
constexpr u32 EXPECTED_BYTES = 8192;   // bytes that TMA loads per box
constexpr u32 BARRIERS = 32768;   // offset of the barriers, after the slots
constexpr u32 BOX_ROWS = 64;
constexpr u32 BOX_COLUMNS = 64;
// Number of tensor maps in global memory that each warp of a CTA edits in turn. A warp edits a map again MAPS arrays later, and each array
// has at least one box. By then, the copies that were issued MAPS boxes ago have completed, so TMA no longer uses the map.
constexpr u32 MAPS = 4;
static_assert(MAPS >= STAGES);

// An array and its copy. Boxes are numbered consecutively across all arrays.
struct Pair {
    const u8* source;
    u8* destination;
    u64 source_pitch, destination_pitch;   // bytes from one row to the next
    u32 rows, columns;
    u32 first_box;
    u32 boxes_x;                           // boxes along the columns
};

// The pair that a warp is processing. All members are uniform within the warp.
struct Cursor {
    const Pair* pairs;
    u32 count, index, edits;
    Pair pair;

    // Start at the pair that contains box number `box`. Every pair has at least one box.
    __device__ Cursor(const Pair* all, u32 pair_count, u32 box) : pairs(all), count(pair_count), index(0), edits(0) {
        u32 beyond = count;
        while (beyond - index > 1) {
            const u32 middle = (index + beyond) / 2;
            if (pairs[middle].first_box <= box) index = middle;
            else beyond = middle;
        }
        pair = pairs[index];
    }

    // Move to the pair that contains `box`. Return true if this is the warp's first box of the pair. The warp then needs a new map.
    __device__ bool enters(u32 box) {
        if (index + 1 < count && pairs[index + 1].first_box <= box) pair = pairs[++index];
        else if (edits > 0) return false;
        ++edits;
        return true;
    }

    __device__ int x(u32 box) const { return int((box - pair.first_box) % pair.boxes_x * BOX_COLUMNS); }
    __device__ int y(u32 box) const { return int((box - pair.first_box) / pair.boxes_x * BOX_ROWS); }
};

// Describe an array in the warp's working copy of a tensor map, and publish the copy as `map`. All lanes of the warp must call this
// function.
__device__ void publish(TensorMap* map, u32 copy, const void* address, u64 pitch, u32 rows, u32 columns, u32 lane) {
    if (lane == 0) {
        tensormap_replace_global_address(copy, address);
        tensormap_replace_global_dim<0>(copy, columns);
        tensormap_replace_global_dim<1>(copy, rows);
        tensormap_replace_global_stride<0>(copy, pitch);
    }
    __syncwarp();
    tensormap_cp_fenceproxy_release_gpu(map, copy);
    if (lane == 0) fence_proxy_tensormap_acquire_gpu(map);
    __syncwarp();
}

// Copy `count` 2D arrays of any shape. The boxes are divided evenly among the CTAs in contiguous ranges. Warp 0 waits until warp 1 has
// released a slot, then loads a box into the slot. Warp 1 waits until the slot is full, stores the box, and releases the slot after the
// store has read it. Each warp edits its tensor map at the first box of each pair. `maps` contains 2 * MAPS maps per CTA. The maps `source`
// and `destination` provide the element type and the box size. The warps replace addresses, sizes and pitches in copies of these maps.
extern "C" __global__ void __launch_bounds__(64)
ragged_copy(const __grid_constant__ TensorMap source, const __grid_constant__ TensorMap destination, const Pair* pairs,
    u32 count, u32 boxes, TensorMap* maps) {
    extern __shared__ __align__(128) u8 shared[];
    __shared__ __align__(128) TensorMap copies[2];
    const u32 slots = shared_address(shared), warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32 begin = u32(u64(boxes) * blockIdx.x / gridDim.x), end = u32(u64(boxes) * (blockIdx.x + 1) / gridDim.x);

    TmaPipeline<STAGES> pipeline;
    pipeline.init(slots + BARRIERS, 1, 1);
    if (begin == end) return;

    const TensorMap* original = warp == 0 ? &source : &destination;
    for (u32 i = lane; i < sizeof(TensorMap); i += 32) copies[warp].bytes[i] = original->bytes[i];
    __syncwarp();
    const u32 copy = shared_address(&copies[warp]);
    TensorMap* mine = maps + (blockIdx.x * 2 + warp) * MAPS;
    TensorMap* map = mine;
    Cursor cursor(pairs, count, begin);

    if (warp == 0) {
        for (u32 box = begin; box < end; ++box) {
            if (lane == 0) pipeline.acquire();   // waits until the store from STAGES boxes ago has read the slot
            if (cursor.enters(box)) {
                const Pair& pair = cursor.pair;
                map = mine + cursor.edits % MAPS;
                publish(map, copy, pair.source, pair.source_pitch, pair.rows, pair.columns, lane);
            }
            if (lane == 0) {
                pipeline.expect_tx(EXPECTED_BYTES);
                const u32 slot = slots + pipeline.stage * STAGE_BYTES;
                cp_async_bulk_tensor_2d_load(slot, map, pipeline.get_barrier(), cursor.x(box), cursor.y(box));
            }
            pipeline.advance();
        }
    } else {
        u32 previous = STAGES;   // the slot of the last store, or STAGES if there was none
        for (u32 box = begin; box < end; ++box) {
            if (cursor.enters(box)) {
                const Pair& pair = cursor.pair;
                map = mine + cursor.edits % MAPS;
                publish(map, copy, pair.destination, pair.destination_pitch, pair.rows, pair.columns, lane);
            }
            if (lane == 0) {
                pipeline.wait();
                // No proxy fence is needed because TMA both wrote the slot and reads it.
                cp_async_bulk_tensor_2d_store(map, slots + pipeline.stage * STAGE_BYTES, cursor.x(box), cursor.y(box));
                cp_async_bulk_commit_group();
                if (previous < STAGES) {
                    // Wait until the previous store has read its slot and its map. The store that was just issued may still be reading.
                    cp_async_bulk_wait_group_read<1>();
                    pipeline.release(previous);
                }
                previous = pipeline.stage;
            }
            pipeline.advance();
        }
        // TMA must read shared memory before the CTA exits and finish its writes before the kernel ends.
        if (lane == 0) cp_async_bulk_wait_group<0>();
    }
}
