// cudatma: kernels/run_copy.cu.j2 for sm_90a
// config: RunConfig
//   op = 'copy'
//   kind = 'b8'
//   stage_bytes = 16384
//   stages = 6
//   in_flight = 3
// ring: 6 slots of 16384 bytes; stores may still be reading up to 3 of them; 98352 bytes of shared memory in total

// primitives.cu contains
// u8, u16, u32, u64, shared_address, mbarrier_init, mbarrier_arrive_expect_tx, mbarrier_try_wait_parity,
// mbarrier_wait_parity, fence_mbarrier_init, cp_async_bulk_load, cp_async_bulk_store, cp_async_bulk_commit_group,
// cp_async_bulk_wait_group, cp_async_bulk_wait_group_read, TmaPipeline

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
constexpr u32 STAGE_BYTES = 16384;   // bytes per segment; the last segment may be shorter
constexpr u32 BARRIERS = 98304;   // offset of the barriers, after the slots

// Copy `bytes` bytes by bulk copies, and the `head` bytes before them and the `tail` bytes after them by ordinary loads and stores. The
// bulk copies begin at `source` and `destination`, which must be multiples of 16. `head` and `tail` must be less than 16.
extern "C" __global__ void __launch_bounds__(32)
run_copy(const u8* source, u8* destination, u64 bytes, u32 head, u32 tail) {
    extern __shared__ __align__(128) u8 shared[];
    const u32 slots = shared_address(shared);
    if (blockIdx.x == 0) {
        const u32 lane = threadIdx.x;
        if (lane < head) (destination - head)[lane] = (source - head)[lane];
        if (lane < tail) (destination + bytes)[lane] = (source + bytes)[lane];
    }
    if (threadIdx.x != 0) return;
    const u32 segments = static_cast<u32>((bytes + STAGE_BYTES - 1) / STAGE_BYTES);
    const auto size_of = [&](u64 offset) {
        const u64 rest = bytes - offset;
        return rest < STAGE_BYTES ? static_cast<u32>(rest) : STAGE_BYTES;
    };
    const auto load = [&](u32 segment, u32 slot, u32 barrier) {
        const u64 offset = static_cast<u64>(segment) * STAGE_BYTES;
        const u32 size = size_of(offset);
        mbarrier_arrive_expect_tx(barrier, size);
        cp_async_bulk_load(slot, source + offset, size, barrier);
    };
    const auto store = [&](u32 segment, u32 slot) {
        const u64 offset = static_cast<u64>(segment) * STAGE_BYTES;
        cp_async_bulk_store(destination + offset, slot, size_of(offset));
    };
    copy_units<STAGES, STORES_IN_FLIGHT, STAGE_BYTES>(slots, slots + BARRIERS, segments, load, store);
}
