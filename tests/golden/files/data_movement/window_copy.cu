// cudatma: kernels/window_copy.cu.j2 for sm_90a
// spec: WindowSpec
//   op = 'copy'
//   rank = 2
//   stage_bytes = 16384
//   stages = 6
//   in_flight = 3
//   load_cache = 'evict_first'
//   store_cache = 'evict_first'
// ring: 6 slots of 16384 bytes, 3 of them may be in stores; 98352 bytes of shared memory

using namespace cudatma;

constexpr u32 STAGES = 6;
constexpr u32 STORES_IN_FLIGHT = 3;   // stores that may still read their slots
constexpr u32 STAGE_BYTES = 16384;     // from one slot to the next; a box is at most as large
constexpr u32 BARRIERS = 98304;        // after the slots

// destination = a window of source, box by box; axis 0 is the innermost.
// start_i: where the window begins in the source; negative if the loads fill elements before the source. box_i: elements of a box.
// tiles_i: boxes along the axis. box_bytes: what the load of a box reports to its barrier. Boxes may extend beyond the ends: loads
// fill what lies outside of the source, stores leave out what lies outside of the destination.
extern "C" __global__ void __launch_bounds__(32)
window_copy(const __grid_constant__ TensorMap source, const __grid_constant__ TensorMap destination,
    int start0, int box0, u32 tiles0,
    int start1, int box1, u32 tiles1,
    u32 box_bytes, u32 boxes) {
    extern __shared__ __align__(128) u8 shared[];
    const u32 slots = shared_address(shared);
    if (threadIdx.x != 0) return;
    prefetch_tensormap(&source);
    prefetch_tensormap(&destination);
    const u64 load_policy = createpolicy_evict_first();
    const u64 store_policy = createpolicy_evict_first();
    const auto load = [&](u32 box, u32 slot, u32 barrier) {
        u32 rest = box;
        const int at0 = start0 + static_cast<int>(rest % tiles0) * box0;
        rest /= tiles0;
        const int at1 = start1 + static_cast<int>(rest % tiles1) * box1;
        rest /= tiles1;
        mbarrier_arrive_expect_tx(barrier, box_bytes);
        cp_async_bulk_tensor_2d_load_hint(slot, &source, barrier, at0, at1, load_policy);
    };
    const auto store = [&](u32 box, u32 slot) {
        u32 rest = box;
        const int at0 = static_cast<int>(rest % tiles0) * box0;
        rest /= tiles0;
        const int at1 = static_cast<int>(rest % tiles1) * box1;
        rest /= tiles1;
        cp_async_bulk_tensor_2d_store_hint(&destination, slot, at0, at1, store_policy);
    };
    copy_units<STAGES, STORES_IN_FLIGHT, STAGE_BYTES>(slots, slots + BARRIERS, boxes, load, store);
}
