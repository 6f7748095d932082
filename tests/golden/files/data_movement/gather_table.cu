// cudatma: kernels/gather_boxes.cu.j2 for sm_90a
// spec: GatherSpec
//   rank = 3
//   places = 'table'
//   stage_bytes = 16384
//   stages = 6
//   in_flight = 3
// ring: 6 slots of 16384 bytes, 3 of them may be in stores; 98352 bytes of shared memory

using namespace cudatma;

constexpr u32 RANK = 3;
constexpr u32 STAGES = 6;
constexpr u32 STORES_IN_FLIGHT = 3;   // stores that may still read their slots
constexpr u32 STAGE_BYTES = 16384;    // from one slot to the next; a box is at most as large
constexpr u32 BARRIERS = 98304;       // after the slots

// destination[i] = box i of the source, `box_bytes` contiguous bytes. Axis 0 is the innermost.
// starts: RANK ints for each box, where it begins; the outermost axis first.
// Loads fill what lies outside of the source.
extern "C" __global__ void __launch_bounds__(32)
gather_boxes(const __grid_constant__ TensorMap source, u8* destination,
    const int* starts,
    u32 box_bytes, u32 boxes) {
    extern __shared__ __align__(128) u8 shared[];
    const u32 slots = shared_address(shared);
    if (threadIdx.x != 0) return;
    prefetch_tensormap(&source);

    const auto load = [&](u32 box, u32 slot, u32 barrier) {
        const int* start = starts + static_cast<u64>(box) * RANK + RANK - 1;
        const int at0 = *start--;
        const int at1 = *start--;
        const int at2 = *start--;
        mbarrier_arrive_expect_tx(barrier, box_bytes);
        cp_async_bulk_tensor_3d_load(slot, &source, barrier, at0, at1, at2);
    };
    const auto store = [&](u32 box, u32 slot) {
        cp_async_bulk_store(destination + static_cast<u64>(box) * box_bytes, slot, box_bytes);
    };
    copy_units<STAGES, STORES_IN_FLIGHT, STAGE_BYTES>(slots, slots + BARRIERS, boxes, load, store);
}
