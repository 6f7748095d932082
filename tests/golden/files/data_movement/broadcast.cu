// cudatma: kernels/broadcast.cu.j2 for sm_90a
// spec: BroadcastSpec
//   copies = 4
//   stage_bytes = 16384
//   stages = 6
//   in_flight = 3
//   entry = 'broadcast'
// ring: 6 slots of 16384 bytes, 3 of them may be in stores; 98352 bytes of shared memory

using namespace cudatma;

constexpr u32 COPIES = 4;             // blocks of a cluster: each writes one copy
constexpr u16 EVERYBODY = 15;
constexpr u32 STAGES = 6;
constexpr u32 IN_FLIGHT = 3;          // stores that may still read their slots
constexpr u32 SHARE_BYTES = 4096;     // what one block loads of a tile, for all of them
constexpr u32 STAGE_BYTES = 16384;    // a tile: COPIES shares
constexpr u32 BARRIERS = 98304;       // behind the slots: full[STAGES], then free[STAGES]

// COPIES destinations, `bytes` apart, = source; `bytes` is a multiple of 16. A cluster takes every tile that is its turn.
// Of each tile a block asks for its own share and has it delivered to all blocks, so that the tile is read from L2 once.
//
// Nobody sends to a slot that its receiver has not armed. A slot's `full` is armed with all bytes of its next tile, by its
// own block, before that block arrives at the slot's `free` in every block of the cluster; whoever sends waits for all
// of those arrivals. The first lap is armed before the cluster's barrier.
extern "C" __global__ void __launch_bounds__(32)
broadcast(const u8* source, u8* destination, u64 bytes) {
    extern __shared__ __align__(128) u8 shared[];
    const u32 slots = shared_address(shared), full = slots + BARRIERS, free = full + 8 * STAGES;
    const u32 rank = cluster_ctarank();
    const u32 cluster = blockIdx.x / COPIES, clusters = gridDim.x / COPIES;
    const u32 tiles = static_cast<u32>((bytes + STAGE_BYTES - 1) / STAGE_BYTES);
    const u32 mine = cluster < tiles ? (tiles - cluster - 1) / clusters + 1 : 0;  // the cluster's tiles

    const auto begin_of = [&](u32 turn) { return static_cast<u64>(cluster + turn * clusters) * STAGE_BYTES; };
    const auto size_of = [&](u64 offset, u32 most) {
        const u64 rest = offset < bytes ? bytes - offset : 0;
        return rest < most ? static_cast<u32>(rest) : most;
    };
    const auto arm = [&](u32 slot, u32 turn) {
        mbarrier_arrive_expect_tx(full + 8 * slot, size_of(begin_of(turn), STAGE_BYTES));
    };
    const auto send = [&](u32 slot, u32 turn) {
        const u64 offset = begin_of(turn) + rank * SHARE_BYTES;
        const u32 size = size_of(offset, SHARE_BYTES);
        if (size == 0) return;  // the last tile may have fewer shares
        const u32 to = slots + slot * STAGE_BYTES + rank * SHARE_BYTES;
        cp_async_bulk_load_multicast(to, source + offset, size, full + 8 * slot, EVERYBODY);
    };

    if (threadIdx.x == 0) {
        for (u32 slot = 0; slot < STAGES; ++slot) {
            mbarrier_init(full + 8 * slot, 1);
            mbarrier_init(free + 8 * slot, COPIES);
        }
        fence_mbarrier_init();
        for (u32 slot = 0; slot < STAGES && slot < mine; ++slot) arm(slot, slot);
    }
    __syncwarp();
    barrier_cluster_arrive();
    barrier_cluster_wait();

    if (threadIdx.x == 0) {
        u32 asked = 0;
        for (; asked < STAGES && asked < mine; ++asked) send(asked, asked);
        u8* const copy = destination + rank * bytes;
        u32 next = 0, phase = 0;            // the slot whose tile is waited for, and the parity of its lap
        u32 freed = 0, freed_phase = 0;     // the slot that is filled again next, and the parity of its release
        for (u32 turn = 0; turn < mine; ++turn) {
            mbarrier_wait_parity(full + 8 * next, phase);
            cp_async_bulk_store(copy + begin_of(turn), slots + next * STAGE_BYTES, size_of(begin_of(turn), STAGE_BYTES));
            cp_async_bulk_commit_group();
            if (++next == STAGES) {
                next = 0;
                phase ^= 1;
            }
            if (turn >= IN_FLIGHT && asked < mine) {
                cp_async_bulk_wait_group_read<IN_FLIGHT>();
                arm(freed, asked);
                for (u32 block = 0; block < COPIES; ++block) {
                    mbarrier_arrive_shared_cluster(mapa_shared_cluster(free + 8 * freed, block));
                }
                mbarrier_wait_parity(free + 8 * freed, freed_phase);
                send(freed, asked);
                if (++freed == STAGES) {
                    freed = 0;
                    freed_phase ^= 1;
                }
                ++asked;
            }
        }
        cp_async_bulk_wait_group<0>();
    }
    // A block has waited for all that the others send to it and for all of their arrivals: it may leave before they do.
}
