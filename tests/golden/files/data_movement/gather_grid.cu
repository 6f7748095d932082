// cudatma: kernels/gather_boxes.cu.j2 for sm_90a
// spec: GatherSpec
//   rank = 2
//   places = 'grid'
//   stage_bytes = 16384
//   stages = 6
//   in_flight = 3
// ring: 6 slots of 16384 bytes, 3 of them may be in stores; 98352 bytes of shared memory

using namespace cudatma;

constexpr u32 STAGES = 6;
constexpr u32 STORES_IN_FLIGHT = 3;   // stores that may still read their slots
constexpr u32 STAGE_BYTES = 16384;    // from one slot to the next; a box is at most as large
constexpr u32 BARRIERS = 98304;       // after the slots

// destination[i] = box i of the source, `box_bytes` contiguous bytes. Axis 0 is the innermost.
// The boxes form a grid and may overlap: tiles_i boxes along axis i begin at start_i, start_i + step_i, ..
// Loads fill what lies outside of the source.
extern "C" __global__ void __launch_bounds__(32)
halo_tiles(const __grid_constant__ TensorMap source, u8* destination,
    int start0, int step0, u32 tiles0,
    int start1, int step1, u32 tiles1,
    u32 box_bytes, u32 boxes) {
    extern __shared__ __align__(128) u8 shared[];
    const u32 slots = shared_address(shared);
    if (threadIdx.x != 0) return;
    prefetch_tensormap(&source);

    const auto load = [&](u32 box, u32 slot, u32 barrier) {
        u32 rest = box;
        const int at0 = start0 + static_cast<int>(rest % tiles0) * step0;
        rest /= tiles0;
        const int at1 = start1 + static_cast<int>(rest % tiles1) * step1;
        rest /= tiles1;
        mbarrier_arrive_expect_tx(barrier, box_bytes);
        cp_async_bulk_tensor_2d_load(slot, &source, barrier, at0, at1);
    };
    const auto store = [&](u32 box, u32 slot) {
        cp_async_bulk_store(destination + static_cast<u64>(box) * box_bytes, slot, box_bytes);
    };
    copy_units<STAGES, STORES_IN_FLIGHT, STAGE_BYTES>(slots, slots + BARRIERS, boxes, load, store);
}
