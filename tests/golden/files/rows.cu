// cudatma: kernels/rows.cu.j2 for sm_100a
// config: RowsConfig
//   op = 'gather'
//   stage_bytes = 16384
//   stages = 6
//   in_flight = 3
// ring: 6 slots of 16384 bytes; stores may still be reading up to 3 of them; 98352 bytes of shared memory in total

// primitives.cu contains
// u8, u16, u32, u64, TensorMap, shared_address, mbarrier_init, mbarrier_arrive_expect_tx, mbarrier_try_wait_parity,
// mbarrier_wait_parity, fence_mbarrier_init, cp_async_bulk_tensor_2d_store, prefetch_tensormap,
// cp_async_bulk_tensor_2d_gather4_load, cp_async_bulk_commit_group, cp_async_bulk_wait_group,
// cp_async_bulk_wait_group_read, TmaPipeline

namespace cudatma {

// Copy work units blockIdx.x, blockIdx.x + gridDim.x, ... below `units` through a ring of Stages slots. Call this function from one thread.
//
// load(unit, slot address, barrier) makes the barrier expect the unit's bytes and loads them. store(unit, slot address) stores the slot.
//
// No proxy fence is needed because TMA both writes and reads the slots. No `empty` barriers are needed because the loading thread also
// stores, and waits for its bulk groups before it reuses a slot. The thread first fills all slots. After each store, the thread refills the
// slot that it stored StoresInFlight stores earlier, which TMA has read by then. TMA may still be reading the slots of later stores.
// The function returns after all stores have written global memory. `barriers` is the shared-memory address of the 8 * Stages bytes of the
// ring's barriers.
template <u32 Stages, u32 StoresInFlight, u32 StageBytes, typename Load, typename Store>
__device__ __forceinline__ void copy_units(u32 slots, u32 barriers, u32 units, Load load, Store store) {
    static_assert(StoresInFlight > 0 && StoresInFlight < Stages, "a slot must be left to load into");
    TmaPipeline<Stages> ring;   // its current stage is the slot of the next store
    ring.attach(barriers);
    ring.init_full_barriers(1);

    const u32 own_units = blockIdx.x < units ? (units - blockIdx.x - 1) / gridDim.x + 1 : 0;
    u32 loads = 0;                // number of loads issued
    u32 load_unit = blockIdx.x;   // the unit of the next load
    for (; loads < Stages && loads < own_units; ++loads, load_unit += gridDim.x)
        load(load_unit, slots + loads * StageBytes, ring.get_barrier(loads));
    u32 load_stage = 0;           // the slot of the next load
    u32 store_unit = blockIdx.x;
    for (u32 stores = 0; stores < own_units; ++stores, store_unit += gridDim.x) {
        ring.wait();
        store(store_unit, slots + ring.stage * StageBytes);
        cp_async_bulk_commit_group();
        ring.advance();
        if (stores >= StoresInFlight && loads < own_units) {
            cp_async_bulk_wait_group_read<StoresInFlight>();
            load(load_unit, slots + load_stage * StageBytes, ring.get_barrier(load_stage));
            if (++load_stage == Stages) load_stage = 0;
            ++loads;
            load_unit += gridDim.x;
        }
    }
    cp_async_bulk_wait_group<0>();   // TMA must read shared memory before the CTA exits and finish its writes before the kernel ends
}

}  // namespace cudatma
using namespace cudatma;

constexpr u32 STAGES = 6;
constexpr u32 STORES_IN_FLIGHT = 3;   // stores that may still be reading their slots
constexpr u32 STAGE_BYTES = 16384;   // bytes from one slot to the next
constexpr u32 BARRIERS = 98304;   // offset of the barriers, after the slots
constexpr u32 ROWS = 16;   // rows of a box, a multiple of the four rows of a gather4 instruction

// Gather `count` rows, destination[i] = source[index[i]], in boxes of ROWS rows and `columns` columns. TMA fills rows outside the source
// with zeros.
// `outside` is a row number outside both arrays, and `four_bytes` is the size of four rows of a box in bytes.
extern "C" __global__ void __launch_bounds__(32)
gather_rows(const __grid_constant__ TensorMap source, const __grid_constant__ TensorMap destination, const int* index,
    u32 count, int outside, int columns, u32 column_boxes, u32 four_bytes, u32 boxes) {
    extern __shared__ __align__(128) u8 shared[];
    const u32 slots = shared_address(shared);
    if (threadIdx.x != 0) return;
    prefetch_tensormap(&source);
    prefetch_tensormap(&destination);

    // Return index[i], or `outside` if i is past the end of the index or index[i] is negative.
    const auto row_at = [&](u32 i) {
        const int row = i < count ? index[i] : outside;
        return row < 0 ? outside : row;
    };
    const auto load = [&](u32 box, u32 slot, u32 barrier) {
        const int column = static_cast<int>(box % column_boxes) * columns;
        const u32 first = box / column_boxes * ROWS;
        mbarrier_arrive_expect_tx(barrier, ROWS / 4 * four_bytes);
        for (u32 four = 0; four < ROWS / 4; ++four) {
            const u32 i = first + 4 * four;
            cp_async_bulk_tensor_2d_gather4_load(slot + four * four_bytes, &source, barrier, column, row_at(i), row_at(i + 1),
                                                 row_at(i + 2), row_at(i + 3));
        }
    };
    const auto store = [&](u32 box, u32 slot) {
        const int column = static_cast<int>(box % column_boxes) * columns;
        const u32 first = box / column_boxes * ROWS;
        cp_async_bulk_tensor_2d_store(&destination, slot, column, static_cast<int>(first));
    };
    copy_units<STAGES, STORES_IN_FLIGHT, STAGE_BYTES>(slots, slots + BARRIERS, boxes, load, store);
}
