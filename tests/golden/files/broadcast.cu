// cudatma: kernels/broadcast.cu.j2 for sm_90a
// config: BroadcastConfig
//   copies = 4
//   stage_bytes = 16384
//   stages = 6
//   in_flight = 3
// ring: 6 slots of 16384 bytes, of which 3 may be in stores; 98400 bytes of shared memory

namespace cudatma {

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

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

// [PTX ISA, Special Registers, %cluster_ctarank] Return this CTA's rank in its cluster.
__device__ __forceinline__ u32 cluster_ctarank() {
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// [PTX ISA, mapa] Return the shared::cluster address of shared address `addr` in the CTA of rank `rank`.
__device__ __forceinline__ u32 mapa_shared_cluster(u32 addr, u32 rank) {
    u32 remote;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(addr), "r"(rank));
    return remote;
}

// [PTX ISA, mbarrier.arrive] Arrive once on a barrier in any CTA of the cluster. `bar` is an address from mapa_shared_cluster. The default
// semantics, a release at CTA scope, suffice to release a slot that this CTA only read.
__device__ __forceinline__ void mbarrier_arrive_shared_cluster(u32 bar) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" : : "r"(bar) : "memory");
}

// [PTX ISA, barrier.cluster] Arrive on the cluster barrier with release semantics. All threads of the cluster must call this function.
__device__ __forceinline__ void barrier_cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" : : : "memory");
}

// [PTX ISA, barrier.cluster] Wait with acquire semantics until all threads of the cluster have arrived.
__device__ __forceinline__ void barrier_cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" : : : "memory");
}

// [PTX ISA, cp.async.bulk] Load `bytes` contiguous bytes from `src` to shared address `dst`. Barrier `bar` counts the bytes as they arrive.
// Call this function from one thread. The addresses and the size must be multiples of 16.
// Load into every CTA of the cluster whose bit is set in `mask`. The destination and the barrier have the same offsets in each of these
// CTAs, and the barrier of each CTA must expect the bytes.
__device__ __forceinline__ void cp_async_bulk_load_multicast(u32 dst, const void* src, u32 bytes, u32 bar, u16 mask) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], %4;"
                 :: "r"(dst), "l"(__cvta_generic_to_global(src)), "r"(bytes), "r"(bar), "h"(mask) : "memory");
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

    // Initialize the barriers. One thread must call this function after attach(), and may use the ring at once. Other threads may use the
    // ring after the CTA or the cluster has synchronized. `producer_arrivals` is the number of calls of expect_tx() or arrive() that fill a
    // slot. `consumer_arrivals` is the number of calls of release*(), in all CTAs of the cluster, that free a slot.
    __device__ __forceinline__ void init_barriers(u32 producer_arrivals, u32 consumer_arrivals) const {
        for (u32 slot = 0; slot < Stages; ++slot) {
            mbarrier_init(get_barrier(slot), producer_arrivals);
            mbarrier_init(empty_barrier(slot), consumer_arrivals);
        }
        fence_mbarrier_init();
    }

    // Return the barrier that counts the bytes of a slot's loads.
    __device__ __forceinline__ u32 get_barrier(u32 slot) const { return base + 8 * slot; }
    __device__ __forceinline__ u32 get_barrier() const { return get_barrier(stage); }

    // Return the barrier on which the consumers of a slot arrive.
    __device__ __forceinline__ u32 empty_barrier(u32 slot) const { return base + 8 * (Stages + slot); }
    __device__ __forceinline__ u32 empty_barrier() const { return empty_barrier(stage); }

    // Producer: wait until the consumers have released the slot. In the first lap, this function returns at once, because the phase with
    // parity 1 of a new barrier counts as completed.
    __device__ __forceinline__ void acquire(u32 slot) const { mbarrier_wait_parity(empty_barrier(slot), phase ^ 1); }
    __device__ __forceinline__ void acquire() const { acquire(stage); }

    // Producer: arrive once and expect `bytes` bytes. Call this function before the loads.
    __device__ __forceinline__ void expect_tx(u32 slot, u32 bytes) const { mbarrier_arrive_expect_tx(get_barrier(slot), bytes); }
    __device__ __forceinline__ void expect_tx(u32 bytes) const { expect_tx(stage, bytes); }

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

using namespace cudatma;

constexpr u32 COPIES = 4;   // CTAs per cluster, each of which writes one copy
constexpr u16 ALL_CTAS = 15;   // multicast mask of the cluster
constexpr u32 STAGES = 6;
constexpr u32 STORES_IN_FLIGHT = 3;   // stores that may still be reading their slots
constexpr u32 PART_BYTES = 4096;   // bytes of a tile that one CTA loads for the whole cluster
constexpr u32 STAGE_BYTES = 16384;   // bytes per tile, which consists of COPIES parts
constexpr u32 BARRIERS = 98304;   // offset of the barriers, after the slots

// Copy the source to COPIES destinations, which are `bytes` bytes apart. `bytes` must be a multiple of 16. A cluster processes every
// (gridDim.x / COPIES)-th tile. Each CTA loads its part of a tile by multicast into all CTAs, so that L2 reads the tile only once. Each CTA
// then stores the whole tile to its own destination.
//
// A CTA may send to a slot only after the `full` barrier of the receiving CTA expects the bytes. Each CTA therefore makes its own `full`
// barrier expect all bytes of the slot's next tile, and then arrives on the slot's `empty` barrier in every CTA. A sender waits on its own
// `empty` barrier for the arrivals of all CTAs. In the first lap, the cluster barrier replaces these arrivals.
extern "C" __global__ void __launch_bounds__(32)
broadcast(const u8* source, u8* destination, u64 bytes) {
    extern __shared__ __align__(128) u8 shared[];
    const u32 slots = shared_address(shared);
    const u32 rank = cluster_ctarank();
    const u32 cluster = blockIdx.x / COPIES, clusters = gridDim.x / COPIES;
    const u32 tiles = static_cast<u32>((bytes + STAGE_BYTES - 1) / STAGE_BYTES);
    const u32 own_tiles = cluster < tiles ? (tiles - cluster - 1) / clusters + 1 : 0;   // tiles of this cluster

    TmaPipeline<STAGES> load_ring, store_ring;   // the positions of the next load and the next store in one ring
    load_ring.attach(slots + BARRIERS);
    store_ring.attach(slots + BARRIERS);

    const auto tile_begin = [&](u32 i) { return static_cast<u64>(cluster + i * clusters) * STAGE_BYTES; };   // offset of the cluster's tile i
    const auto size_from = [&](u64 offset, u32 max_bytes) {
        const u64 rest = offset < bytes ? bytes - offset : 0;
        return rest < max_bytes ? static_cast<u32>(rest) : max_bytes;
    };
    const auto expect = [&](u32 slot, u32 i) { load_ring.expect_tx(slot, size_from(tile_begin(i), STAGE_BYTES)); };
    const auto send = [&](u32 slot, u32 i) {
        const u64 offset = tile_begin(i) + rank * PART_BYTES;
        const u32 size = size_from(offset, PART_BYTES);
        if (size == 0) return;  // the last tile may have fewer parts than CTAs
        const u32 to = slots + slot * STAGE_BYTES + rank * PART_BYTES;
        cp_async_bulk_load_multicast(to, source + offset, size, load_ring.get_barrier(slot), ALL_CTAS);
    };

    if (threadIdx.x == 0) {
        load_ring.init_barriers(1, COPIES);
        for (u32 slot = 0; slot < STAGES && slot < own_tiles; ++slot) expect(slot, slot);
    }
    __syncwarp();
    barrier_cluster_arrive();
    barrier_cluster_wait();

    if (threadIdx.x == 0) {
        u32 loads = 0;
        for (; loads < STAGES && loads < own_tiles; ++loads) send(loads, loads);
        u8* const copy = destination + rank * bytes;
        load_ring.next_lap();   // the loop above has issued the loads of the first lap
        for (u32 i = 0; i < own_tiles; ++i) {
            store_ring.wait();
            const u64 begin = tile_begin(i);
            cp_async_bulk_store(copy + begin, slots + store_ring.stage * STAGE_BYTES, size_from(begin, STAGE_BYTES));
            cp_async_bulk_commit_group();
            store_ring.advance();
            if (i >= STORES_IN_FLIGHT && loads < own_tiles) {
                cp_async_bulk_wait_group_read<STORES_IN_FLIGHT>();
                const u32 slot = load_ring.stage;
                expect(slot, loads);
                for (u32 cta = 0; cta < COPIES; ++cta)
                    mbarrier_arrive_shared_cluster(mapa_shared_cluster(load_ring.empty_barrier(), cta));
                load_ring.acquire();
                send(slot, loads);
                load_ring.advance();
                ++loads;
            }
        }
        cp_async_bulk_wait_group<0>();   // TMA must read shared memory before the CTA exits and finish its writes before the kernel ends
    }
    // A CTA may exit before the other CTAs, because it has received all of their data and arrivals. No CTA accesses its shared memory after
    // that.
}
