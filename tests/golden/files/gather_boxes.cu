// cudatma: kernels/gather_boxes.cu.j2 for sm_90a
// config: GatherConfig
//   rank = 3
//   places = 'table'
//   stage_bytes = 16384
//   stages = 6
//   in_flight = 3
// ring: 6 slots of 16384 bytes, of which 3 may be in stores; 98352 bytes of shared memory

namespace cudatma {

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// [PTX ISA, Tensor-map] The 128 opaque bytes of a tensor map, which cuTensorMapEncode* fills. A kernel takes a tensor map as a parameter of
// type `const __grid_constant__ TensorMap`.
struct alignas(64) TensorMap {
    u8 bytes[128];
};

// [PTX ISA, cvta] Return the 32-bit shared address of a generic pointer.
__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// [PTX ISA, mbarrier.init] Initialize the barrier at shared address `bar` (8 bytes, 8-byte aligned) for `count` arrivals per phase. Before
// other threads use the barrier, this thread must call fence_mbarrier_init(), and then all threads of the CTA or cluster must synchronize.
__device__ __forceinline__ void mbarrier_init(u32 bar, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" : : "r"(bar), "r"(count) : "memory");
}

// [PTX ISA, mbarrier.arrive] Make the current phase wait for `bytes` more bytes, and arrive once.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(u32 bar, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" : : "r"(bar), "r"(bytes) : "memory");
}

// [PTX ISA, mbarrier.try_wait] Return whether the phase with this parity has completed. If it has not, the thread may first be suspended
// for a time that the hardware chooses. On a new barrier, parity 1 counts as completed and parity 0 does not.
__device__ __forceinline__ bool mbarrier_try_wait_parity(u32 bar, u32 parity) {
    u32 done;
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done) : "r"(bar), "r"(parity) : "memory");
    return done != 0;
}

// [PTX ISA, mbarrier.try_wait] Wait until the phase with this parity has completed.
// The wait has acquire semantics, so that the bytes that TMA delivered and the earlier writes of the threads that arrived are then visible
// to this thread.
__device__ __forceinline__ void mbarrier_wait_parity(u32 bar, u32 parity) {
    while (!mbarrier_try_wait_parity(bar, parity)) {
    }
}

// [PTX ISA, membar / fence] Make this thread's mbarrier.init visible to the async proxy and the cluster.
__device__ __forceinline__ void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" : : : "memory");
}

// [PTX ISA, cp.async.bulk.tensor] Load the box of `map` that begins at element (c0, c1, ...), where c0 is the innermost coordinate, to
// shared address `dst`. Call this function from one thread. Barrier `bar` counts the bytes of the whole box, because TMA also fills
// elements outside the tensor. `dst` must be 128-byte aligned (1024-byte aligned with the 128-byte swizzle).
__device__ __forceinline__ void cp_async_bulk_tensor_3d_load(u32 dst, const TensorMap* map, u32 bar, int c0, int c1, int c2) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cta.global.tile.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%3, %4, %5}], [%2];"
                 :: "r"(dst), "l"(map), "r"(bar), "r"(c0), "r"(c1), "r"(c2) : "memory");
}

// [PTX ISA, prefetch] Prefetch a tensor map into the descriptor cache.
__device__ __forceinline__ void prefetch_tensormap(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" : : "l"(map) : "memory");
}

// [PTX ISA, cp.async.bulk] Store `bytes` contiguous bytes from shared address `src` to `dst` as part of this thread's current bulk group.
__device__ __forceinline__ void cp_async_bulk_store(void* dst, u32 src, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                 :: "l"(__cvta_generic_to_global(dst)), "r"(src), "r"(bytes) : "memory");
}

// [PTX ISA, cp.async.bulk.commit_group] Commit all bulk stores and reductions of this thread that are in no group yet, as one group.
__device__ __forceinline__ void cp_async_bulk_commit_group() {
    asm volatile("cp.async.bulk.commit_group;" : : : "memory");
}

// [PTX ISA, cp.async.bulk.wait_group] Wait until all but the last Pending of this thread's bulk groups have written global memory.
template <u32 Pending>
__device__ __forceinline__ void cp_async_bulk_wait_group() {
    asm volatile("cp.async.bulk.wait_group %0;" : : "n"(Pending) : "memory");
}

// [PTX ISA, cp.async.bulk.wait_group.read] Wait until all but the last Pending of this thread's bulk groups have read shared memory,
// which may then be overwritten.
template <u32 Pending>
__device__ __forceinline__ void cp_async_bulk_wait_group_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" : : "n"(Pending) : "memory");
}

// A ring of Stages slots in shared memory. A producer fills the slots, and consumers read them. One pass over all slots is a lap.
//
// Each slot has two mbarriers. `full` completes a phase when the producer has arrived and its bytes have arrived in the slot. Consumers
// wait for this phase before they read the slot. `empty` completes a phase when the consumers have arrived. The producer waits for this
// phase before it refills the slot. Each thread keeps its position (`stage` and `phase`) in registers, starts at (0, 0), and advances once
// per slot:
//
//     producer   acquire()   expect_tx(bytes)   load(.., get_barrier(), ..)   advance()
//     consumer   wait()      read the slot      release()                     advance()
//
// The expected number of bytes must equal the number of loaded bytes. If the expected number is larger, wait() never returns. If it is
// smaller, wait() may return before all data has arrived. A consumer that wrote to the slot with ordinary stores must call
// fence_proxy_async_shared_cta() before it releases the slot. Methods that take a slot operate on that slot in the current lap and do not
// change `stage`.
template <u32 Stages>
struct TmaPipeline {
    u32 base;    // shared address of full[Stages], then empty[Stages]; 8 bytes each
    u32 stage;   // this thread's current slot
    u32 phase;   // parity of the current lap

    // Start at slot 0 of the ring whose barriers are at base_address, which must be 8-byte aligned. The barriers are not accessed.
    __device__ __forceinline__ void attach(u32 base_address) {
        base = base_address;
        stage = 0;
        phase = 0;
    }

    // Initialize a ring without `empty` barriers, which takes 8 * Stages bytes. One thread must call this function instead of
    // init_barriers(). acquire() and release*() must not be called, so the producer must determine in another way when a slot is free.
    __device__ __forceinline__ void init_full_barriers(u32 producer_arrivals) const {
        for (u32 slot = 0; slot < Stages; ++slot) mbarrier_init(get_barrier(slot), producer_arrivals);
        fence_mbarrier_init();
    }

    // Return the barrier that counts the bytes of a slot's loads.
    __device__ __forceinline__ u32 get_barrier(u32 slot) const { return base + 8 * slot; }
    __device__ __forceinline__ u32 get_barrier() const { return get_barrier(stage); }

    // Consumer: wait until the slot is full.
    __device__ __forceinline__ void wait(u32 slot) const { mbarrier_wait_parity(get_barrier(slot), phase); }
    __device__ __forceinline__ void wait() const { wait(stage); }

    // Advance to the next slot, and toggle the parity when the ring wraps around.
    __device__ __forceinline__ void advance() {
        if (++stage == Stages) {
            stage = 0;
            next_lap();
        }
    }

    // Toggle the parity. Callers that count the slots themselves must call this function once per lap.
    __device__ __forceinline__ void next_lap() { phase ^= 1; }
};

}  // namespace cudatma

namespace cudatma {

// Copy work units blockIdx.x, blockIdx.x + gridDim.x, ... below `units` through a ring of Stages slots. Call this function from one thread.
//
// load(unit, slot address, barrier) makes the barrier expect the unit's bytes, and loads them store(unit, slot address) stores the slot
//
// No proxy fence is needed, because TMA both writes and reads the slots. The ring has no `empty` barriers, because the thread that loads
// also stores, and it waits for its bulk groups before it reuses a slot. The thread first fills all slots. After each store, it refills the
// slot of the store that it issued StoresInFlight stores earlier. TMA has read that slot, but may still be reading the slots of later
// stores. The function returns after all stores have written global memory.
// `barriers` is the shared address of the 8 * Stages bytes of the ring's barriers.
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

constexpr u32 RANK = 3;
constexpr u32 STAGES = 6;
constexpr u32 STORES_IN_FLIGHT = 3;   // stores that may still be reading their slots
constexpr u32 STAGE_BYTES = 16384;   // bytes from one slot to the next, and maximum size of a box
constexpr u32 BARRIERS = 98304;   // offset of the barriers, after the slots

// Copy box i of the source to the i-th `box_bytes` bytes of the destination. Axis 0 is the innermost. TMA fills elements outside the
// source.
// `starts` contains the RANK coordinates of the first element of each box, with the outermost axis first.
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
