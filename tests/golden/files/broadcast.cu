// cudatma: kernels/broadcast.cu.j2 for sm_90a
// config: BroadcastConfig
//   copies = 4
//   stage_bytes = 16384
//   stages = 6
//   in_flight = 3
// ring: 6 slots of 16384 bytes; stores may still be reading up to 3 of them; 98400 bytes of shared memory in total

// primitives.cu contains
// u8, u16, u32, u64, shared_address, mbarrier_init, mbarrier_arrive_expect_tx, mbarrier_try_wait_parity,
// mbarrier_wait_parity, fence_mbarrier_init, cluster_ctarank, mapa_shared_cluster, mbarrier_arrive_shared_cluster,
// barrier_cluster_arrive, barrier_cluster_wait, cp_async_bulk_load_multicast, cp_async_bulk_store,
// cp_async_bulk_commit_group, cp_async_bulk_wait_group, cp_async_bulk_wait_group_read, TmaPipeline

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
        if (size == 0) return;  // the last tile may have fewer parts than the cluster has CTAs
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
    // A CTA may exit before the other CTAs, because it has received all of their data and arrivals, and no CTA accesses its shared memory
    // anymore.
}
