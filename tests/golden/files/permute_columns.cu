// cudatma: kernels/permute_columns.cu.j2 for sm_90a
// config: PermuteColumnsConfig
//   has_permutation = True
//   staged_columns = 8192
//   rows = 2
// ring: 2 stages of 32768 bytes, expect_tx 32768, 1 producer and 16 consumer arrivals; 65568 bytes of shared memory
//   +0 rows: 32768 bytes, 32768 by TMA
//   barriers at +65536: full[2], empty[2]

namespace cudatma {

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// [PTX ISA, cvta] Return the 32-bit shared address of a generic pointer.
__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// [PTX ISA, griddepcontrol] Wait until the previous kernels of the stream have completed and their writes are visible. Without programmatic
// dependent launch, the function returns at once.
__device__ __forceinline__ void griddepcontrol_wait() {
    asm volatile("griddepcontrol.wait;" : : : "memory");
}

// [PTX ISA, griddepcontrol] Allow the next kernel to start once every CTA has called this function or exited.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
    asm volatile("griddepcontrol.launch_dependents;" : : : "memory");
}

// [PTX ISA, membar / fence, .acq_rel.cta] Order this thread's memory accesses within the CTA. Without this fence, ptxas may issue an
// mbarrier.arrive while an earlier ld.shared is in flight.
__device__ __forceinline__ void fence_acq_rel_cta() {
    asm volatile("fence.acq_rel.cta;" : : : "memory");
}

// [PTX ISA, mbarrier.init] Initialize the barrier at shared address `bar` (8 bytes, 8-byte aligned) for `count` arrivals per phase. Before
// other threads use the barrier, this thread must call fence_mbarrier_init(), and then all threads of the CTA or cluster must synchronize.
__device__ __forceinline__ void mbarrier_init(u32 bar, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" : : "r"(bar), "r"(count) : "memory");
}

// [PTX ISA, mbarrier.arrive] Arrive once with release semantics, so that this thread's earlier writes are visible to waiting threads.
__device__ __forceinline__ void mbarrier_arrive(u32 bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" : : "r"(bar) : "memory");
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

// [PTX ISA, cp.async.bulk] Load `bytes` contiguous bytes from `src` to shared address `dst`. Barrier `bar` counts the bytes as they arrive.
// Call this function from one thread. The addresses and the size must be multiples of 16.
__device__ __forceinline__ void cp_async_bulk_load(u32 dst, const void* src, u32 bytes, u32 bar) {
    asm volatile("cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :: "r"(dst), "l"(__cvta_generic_to_global(src)), "r"(bytes), "r"(bar) : "memory");
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

    // Attach to the ring, initialize its barriers, and call __syncthreads(). All threads of the CTA must call this function. In a cluster,
    // all CTAs must also synchronize before one uses the barriers of another.
    __device__ __forceinline__ void init(u32 base_address, u32 producer_arrivals, u32 consumer_arrivals) {
        attach(base_address);
        if (threadIdx.x == 0 && threadIdx.y == 0 && threadIdx.z == 0) init_barriers(producer_arrivals, consumer_arrivals);
        __syncthreads();
    }

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

    // Consumer: arrive once after reading the slot. The fence orders the reads before the arrival. ptxas does not guarantee this order, and
    // TMA could refill the slot while the reads are in flight.
    __device__ __forceinline__ void release(u32 slot) const {
        fence_acq_rel_cta();
        mbarrier_arrive(empty_barrier(slot));
    }
    __device__ __forceinline__ void release() const { release(stage); }

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

constexpr u32 STAGES = 2;
constexpr u32 ROW_BYTES = 16384;   // bytes from one row to the next in a slot
constexpr u32 STAGE_BYTES = 32768;   // bytes from one slot to the next
constexpr u32 BARRIERS = 65536;  // offset of the barriers, after the slots
constexpr u32 CONSUMERS = 512;   // threads that write the result
constexpr u32 ROWS = 2;   // rows per step, for which a thread reads the permutation once
constexpr u32 CHUNK = 8;   // elements per 16-byte chunk; a thread writes one chunk at a time

// Set `from` to the columns of a chunk of the result. Elements after the last column repeat the last column.
__device__ __forceinline__ void source_columns(u32 (&from)[CHUNK], u32 chunk, u32 columns) {
#pragma unroll
    for (u32 i = 0; i < CHUNK; ++i) from[i] = min(chunk * CHUNK + i, columns - 1);
}

// Replace the columns of the result in `from` with the columns of the source.
__device__ __forceinline__ void permuted_columns(u32 (&from)[CHUNK], const int* order, u32 columns) {
#pragma unroll
    for (u32 i = 0; i < CHUNK; ++i) from[i] = min((u32)order[from[i]], columns - 1);   // clamped, so that the load stays inside the row
}

// Return a chunk with the elements of a row at the columns in `from`.
__device__ __forceinline__ uint4 gather(const u16* row, const u32 (&from)[CHUNK]) {
    u32 pairs[4];
#pragma unroll
    for (u32 i = 0; i < 4; ++i) pairs[i] = row[from[2 * i]] | (u32)row[from[2 * i + 1]] << 16;
    return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

// Compute result[t, k] = source[t, order[k]] for rows of 16-bit elements.
// Row y of the grid processes ROWS of every gridDim.y * ROWS rows, and the gridDim.x CTAs of that row divide the columns. Rows of the
// result must begin at multiples of 16 bytes. The kernel writes the last chunk of a row as a whole. `source_pitch` is in elements, and
// `result_pitch` is in chunks.
extern "C" __global__ void __launch_bounds__(544)
permute_columns(
    const int* order,
    const u16* source, uint4* result, u32 rows, u32 columns, u64 source_pitch, u64 result_pitch) {
    extern __shared__ __align__(128) u8 shared[];
    const u32 slots = shared_address(shared);
    TmaPipeline<STAGES> pipeline;
    pipeline.init(slots + BARRIERS, 1, CONSUMERS / 32);
    griddepcontrol_launch_dependents();   // allows the GEMM to start and load its weights
    griddepcontrol_wait();                // previous kernels may still write the source or read the result

    const u32 step = gridDim.y * ROWS;
    if (threadIdx.x >= CONSUMERS) {
        // ---- Producer: one thread loads whole rows ------------------------------------------------------------------
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
    const u32 chunks = (columns + CHUNK - 1) / CHUNK;
    for (u32 first = blockIdx.y * ROWS; first < rows; first += step) {
        const u32 count = min(ROWS, rows - first);
        pipeline.wait();
        const u8* slot = shared + pipeline.stage * STAGE_BYTES;
        for (u32 chunk = blockIdx.x * CONSUMERS + threadIdx.x; chunk < chunks; chunk += gridDim.x * CONSUMERS) {
            u32 from[CHUNK];
            source_columns(from, chunk, columns);
            permuted_columns(from, order, columns);
#pragma unroll
            for (u32 r = 0; r < ROWS; ++r) {
                if (r >= count) break;
                const u16* row = (const u16*)(slot + r * ROW_BYTES);
                result[(first + r) * result_pitch + chunk] = gather(row, from);
            }
        }
        __syncwarp();   // no lane may still be reading the slot when lane 0 releases it
        if (threadIdx.x % 32 == 0) pipeline.release();
        pipeline.advance();
    }
}
