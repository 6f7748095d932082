// cudatma: kernels/permute_columns.cu.j2 for sm_90a
// spec: PermuteColumnsSpec
//   has_permutation = True
//   staged_columns = 8192
//   rows = 2
//   stages = 2
//   consumers = 512
//   entry = 'permute_columns'
// ring: 2 stages of 32768 bytes, expect_tx 32768, 1 producer and 16 consumer arrivals; 65568 bytes of shared memory
//   +0 rows: 32768 bytes, 32768 by TMA
//   barriers at +65536: full[2], empty[2]

namespace cudatma {

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// The 128 opaque bytes that cuTensorMapEncode* wrote; a kernel takes them as `const __grid_constant__ TensorMap`.
// [PTX ISA, Tensor-map] The object is aligned to 64 bytes.
struct alignas(64) TensorMap {
    u8 bytes[128];
};

// [PTX ISA, cvta] A generic pointer into shared memory as the 32-bit address that the other primitives take.
__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// [PTX ISA, griddepcontrol] Waits until the kernels before this one in the stream are finished and their writes visible.
// Returns at once unless the launch was a programmatic dependent one.
__device__ __forceinline__ void griddepcontrol_wait() {
    asm volatile("griddepcontrol.wait;" : : : "memory");
}

// [PTX ISA, griddepcontrol] The next kernel may start once all blocks have said so or ended.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
    asm volatile("griddepcontrol.launch_dependents;" : : : "memory");
}

// [PTX ISA, cp.async.bulk] One thread asks for `bytes` contiguous bytes at `src` to be written to shared address `dst`;
// both addresses and the size are multiples of 16. `bar` receives the bytes.
//   _hint       the L2 policy of createpolicy_*.
//   _multicast  to the same offset in every block of the cluster whose bit is set in `mask`.
__device__ __forceinline__ void cp_async_bulk_load(u32 dst, const void* src, u32 bytes, u32 bar) {
    asm volatile("cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :
                 : "r"(dst), "l"(__cvta_generic_to_global(src)), "r"(bytes), "r"(bar)
                 : "memory");
}

// [PTX ISA, membar / fence, .acq_rel.cta] Orders this thread's memory accesses within the block. ptxas may issue a later
// mbarrier.arrive while earlier ld.shared are under way; it waits for them at this fence.
__device__ __forceinline__ void fence_acq_rel_cta() {
    asm volatile("fence.acq_rel.cta;" : : : "memory");
}

// [PTX ISA, mbarrier.init] A barrier at shared address `bar` (8 bytes, aligned to 8) whose phases need `count` arrivals.
// Other threads may use it after fence_mbarrier_init() by this thread and a block-wide (or cluster-wide) barrier.
__device__ __forceinline__ void mbarrier_init(u32 bar, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" : : "r"(bar), "r"(count) : "memory");
}

// [PTX ISA, mbarrier.arrive] One arrival, with release order: what this thread did before is seen by the waiters.
__device__ __forceinline__ void mbarrier_arrive(u32 bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" : : "r"(bar) : "memory");
}

// [PTX ISA, mbarrier.arrive] expect_tx(bytes), then one arrival: the phase ends with the last byte, not before.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(u32 bar, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" : : "r"(bar), "r"(bytes) : "memory");
}

// [PTX ISA, mbarrier.try_wait] Whether the phase of this parity has ended; the thread may be suspended for a while
// first. On a fresh barrier parity 1 counts as ended and parity 0 does not.
__device__ __forceinline__ bool mbarrier_try_wait_parity(u32 bar, u32 parity) {
    u32 done;
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}"
        : "=r"(done)
        : "r"(bar), "r"(parity)
        : "memory");
    return done != 0;
}

// [PTX ISA, mbarrier.try_wait] Waits until the phase of this parity has ended, with acquire order: the bytes that TMA
// delivered and what the arriving threads wrote can be read afterwards.
__device__ __forceinline__ void mbarrier_wait_parity(u32 bar, u32 parity) {
    while (!mbarrier_try_wait_parity(bar, parity)) {
    }
}

// [PTX ISA, membar / fence] Makes this thread's mbarrier.init visible to the async proxy and to the cluster.
__device__ __forceinline__ void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" : : : "memory");
}

// A ring of Stages slots in shared memory, filled by one producer and read by many consumers.
//
// Each slot has two mbarriers: `full` (the producer's arrivals and bytes end a phase; consumers wait for it) and `empty`
// (the consumers' arrivals end a phase; the producer waits for it before it fills the slot again). A thread keeps where
// it stands, `stage` and `phase`, in registers; producer and consumers both start at (0, 0) and advance() once a slot:
//
//     producer   acquire()   expect_tx(bytes)   load(.., get_barrier(), ..)   advance()
//     consumer   wait()      read the slot      release()                     advance()
//
// The expected bytes are exactly those that the loads deliver: with one more wait() never returns, with one less it may
// return before the data. A consumer that wrote the slot with plain stores fences (fence_proxy_async_shared_cta)
// before release().
//
// The forms with a slot number act on that slot in the current lap and leave `stage` alone; next_lap() follows the last.
template <u32 Stages>
struct TmaPipeline {
    static constexpr u32 barrier_bytes = 16 * Stages;  // shared memory that init() wants at base_address, aligned to 8

    u32 base;   // full[0..Stages), then empty[0..Stages); 8 bytes each
    u32 stage;  // the slot this thread is at
    u32 phase;  // parity of the current lap; toggles when `stage` wraps

    // All threads of the block call it; it ends in __syncthreads(). producer_arrivals: calls of expect_tx() or arrive()
    // that complete a slot; consumer_arrivals: calls of release() that free it. A cluster also needs its own barrier.
    __device__ __forceinline__ void init(u32 base_address, u32 producer_arrivals, u32 consumer_arrivals) {
        attach(base_address);
        if (threadIdx.x == 0 && threadIdx.y == 0 && threadIdx.z == 0) {
            for (u32 slot = 0; slot < Stages; ++slot) {
                mbarrier_init(get_barrier(slot), producer_arrivals);
                mbarrier_init(empty_barrier(slot), consumer_arrivals);
            }
            fence_mbarrier_init();
        }
        __syncthreads();
    }

    // Starts at slot 0 of a ring whose barriers are fresh, without initialising them.
    __device__ __forceinline__ void attach(u32 base_address) {
        base = base_address;
        stage = 0;
        phase = 0;
    }

    // The barrier that the loads of a slot report their bytes to.
    __device__ __forceinline__ u32 get_barrier(u32 slot) const { return base + 8 * slot; }
    __device__ __forceinline__ u32 get_barrier() const { return get_barrier(stage); }

    // The barrier that the consumers of a slot arrive at.
    __device__ __forceinline__ u32 empty_barrier(u32 slot) const { return base + 8 * (Stages + slot); }
    __device__ __forceinline__ u32 empty_barrier() const { return empty_barrier(stage); }

    // Producer: waits for the consumers to release the slot. The first lap finds every slot empty: on a fresh barrier
    // the phase of parity 1 counts as ended.
    __device__ __forceinline__ void acquire(u32 slot) { mbarrier_wait_parity(empty_barrier(slot), phase ^ 1); }
    __device__ __forceinline__ void acquire() { acquire(stage); }

    // Producer: one arrival, and the slot is full when `bytes` more bytes have come. Before the loads it counts.
    __device__ __forceinline__ void expect_tx(u32 slot, u32 bytes) { mbarrier_arrive_expect_tx(get_barrier(slot), bytes); }
    __device__ __forceinline__ void expect_tx(u32 bytes) { expect_tx(stage, bytes); }

    // Producer: one arrival without bytes, for threads that fill the slot with plain stores.
    __device__ __forceinline__ void arrive(u32 slot) { mbarrier_arrive(get_barrier(slot)); }
    __device__ __forceinline__ void arrive() { arrive(stage); }

    // Consumer: waits for the slot to be full.
    __device__ __forceinline__ void wait(u32 slot) { mbarrier_wait_parity(get_barrier(slot), phase); }
    __device__ __forceinline__ void wait() { wait(stage); }

    // Consumer: whether the slot is full; returns at once or after a short suspension.
    __device__ __forceinline__ bool try_wait(u32 slot) const { return mbarrier_try_wait_parity(get_barrier(slot), phase); }
    __device__ __forceinline__ bool try_wait() const { return try_wait(stage); }

    // Consumer: this arrival's share of the slot has been read; the producer waits for consumer_arrivals of them.
    // The fence keeps the arrival behind the reads, which ptxas alone does not: TMA could refill the slot under them.
    __device__ __forceinline__ void release(u32 slot) {
        fence_acq_rel_cta();
        mbarrier_arrive(empty_barrier(slot));
    }
    __device__ __forceinline__ void release() { release(stage); }

    // Both: on to the next slot; the parity toggles when the ring wraps.
    __device__ __forceinline__ void advance() {
        if (++stage == Stages) {
            stage = 0;
            next_lap();
        }
    }

    // Both: what the wrap does, for those who number the slots themselves.
    __device__ __forceinline__ void next_lap() { phase ^= 1; }
};

}  // namespace cudatma
using namespace cudatma;

constexpr u32 STAGES = 2;
constexpr u32 ROW_BYTES = 16384;  // from one row to the next in a slot
constexpr u32 STAGE_BYTES = 32768;  // from one slot to the next
constexpr u32 BARRIERS = 65536;  // behind the slots
constexpr u32 CONSUMERS = 512;  // threads that write
constexpr u32 ROWS = 2;  // rows taken at a time: they share one reading of the permutation
constexpr u32 PIECE = 8;  // elements of 16 bytes: what a thread writes at a time

// Where the elements of a piece come from: columns of the source. What lies behind the last column reads the last one.
__device__ __forceinline__ void source_columns(u32 (&from)[PIECE], u32 piece, u32 columns) {
#pragma unroll
    for (u32 i = 0; i < PIECE; ++i) from[i] = min(piece * PIECE + i, columns - 1);
}
__device__ __forceinline__ void permuted_columns(u32 (&from)[PIECE], const int* order, u32 columns) {
#pragma unroll
    for (u32 i = 0; i < PIECE; ++i) from[i] = min((u32)order[from[i]], columns - 1);   // whatever it holds, no read leaves the row
}
__device__ __forceinline__ uint4 gather(const u16* row, const u32 (&from)[PIECE]) {
    u32 pairs[4];
#pragma unroll
    for (u32 i = 0; i < 4; ++i) pairs[i] = row[from[2 * i]] | (u32)row[from[2 * i + 1]] << 16;
    return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

// result[t, k] = source[t, order[k]] for rows of 16-bit elements.
// gridDim.y blocks take ROWS rows in turn, gridDim.x blocks share their columns. Rows of the result begin at multiples of 16
// bytes; its last piece is written whole.
//   source_pitch  elements        result_pitch  pieces
extern "C" __global__ void __launch_bounds__(544)
permute_columns(
    const int* order,
    const u16* source, uint4* result, u32 rows, u32 columns, u64 source_pitch, u64 result_pitch) {
    extern __shared__ __align__(128) u8 shared[];
    const u32 slots = shared_address(shared);
    TmaPipeline<STAGES> pipeline;
    pipeline.init(slots + BARRIERS, 1, CONSUMERS / 32);
    griddepcontrol_launch_dependents();   // the GEMM may come in and ask for its weights
    griddepcontrol_wait();                // source may still be written, result still be read by kernels before this one

    const u32 step = gridDim.y * ROWS;
    if (threadIdx.x >= CONSUMERS) {
        // ---- Producer: one thread brings whole rows -----------------------------------------------------------------
        if (threadIdx.x == CONSUMERS) {
            for (u32 first = blockIdx.y * ROWS; first < rows; first += step) {
                const u32 count = min(ROWS, rows - first), bytes = columns * 2;
                pipeline.acquire();
                pipeline.expect_tx(count * bytes);
                for (u32 r = 0; r < count; ++r)
                    cp_async_bulk_load(slots + pipeline.stage * STAGE_BYTES + r * ROW_BYTES, source + (first + r) * source_pitch,
                                       bytes, pipeline.get_barrier());
                pipeline.advance();
            }
        }
        return;
    }

    // ---- Consumers --------------------------------------------------------------------------------------------------
    const u32 pieces = (columns + PIECE - 1) / PIECE;
    for (u32 first = blockIdx.y * ROWS; first < rows; first += step) {
        const u32 count = min(ROWS, rows - first);
        pipeline.wait();
        const u8* slot = shared + pipeline.stage * STAGE_BYTES;
        for (u32 piece = blockIdx.x * CONSUMERS + threadIdx.x; piece < pieces; piece += gridDim.x * CONSUMERS) {
            u32 from[PIECE];
            source_columns(from, piece, columns);
            permuted_columns(from, order, columns);
#pragma unroll
            for (u32 r = 0; r < ROWS; ++r) {
                if (r >= count) break;
                const u16* row = (const u16*)(slot + r * ROW_BYTES);
                result[(first + r) * result_pitch + piece] = gather(row, from);
            }
        }
        __syncwarp();   // the warp has read the slot
        if (threadIdx.x % 32 == 0) pipeline.release();
        pipeline.advance();
    }
}
