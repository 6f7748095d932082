// cudatma: kernels/tile_copy.cu.j2 for sm_90a
// spec: TileCopySpec
//   element_bytes = 4
//   box_rows = 32
//   box_columns = 64
//   stages = 3
//   entry = 'tile_copy'
// ring: 3 stages of 8192 bytes, expect_tx 8192, 1 producer and 1 consumer arrivals; 24624 bytes of shared memory
//   +0 tile: 8192 bytes, 8192 by TMA
//   barriers at +24576: full[3], empty[3]

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

// [PTX ISA, cp.async.bulk.commit_group] Closes the group of this thread's stores and reductions since the last one.
__device__ __forceinline__ void cp_async_bulk_commit_group() {
    asm volatile("cp.async.bulk.commit_group;" : : : "memory");
}

// [PTX ISA, cp.async.bulk.wait_group] Waits until at most Pending of this thread's groups are unfinished: the others
// have written global memory. Groups belong to the thread that issued them.
template <u32 Pending>
__device__ __forceinline__ void cp_async_bulk_wait_group() {
    asm volatile("cp.async.bulk.wait_group %0;" : : "n"(Pending) : "memory");
}

// [PTX ISA, cp.async.bulk.wait_group.read] The same, but only until shared memory has been read and may be reused.
template <u32 Pending>
__device__ __forceinline__ void cp_async_bulk_wait_group_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" : : "n"(Pending) : "memory");
}

__device__ __forceinline__ void cp_async_bulk_tensor_2d_load(
    u32 dst, const TensorMap* map, u32 bar, int c0, int c1) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4}], [%2];"
        :
        : "r"(dst), "l"(map), "r"(bar), "r"(c0), "r"(c1)
        : "memory");
}

// [PTX ISA, prefetch] Brings the 128 bytes of a tensor map to the descriptor cache before the first load needs them.
__device__ __forceinline__ void prefetch_tensormap(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" : : "l"(map) : "memory");
}

__device__ __forceinline__ void cp_async_bulk_tensor_2d_store(
    const TensorMap* map, u32 src, int c0, int c1) {
    asm volatile(
        "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group"
        " [%0, {%2, %3}], [%1];"
        :
        : "l"(map), "r"(src), "r"(c0), "r"(c1)
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

constexpr u32 STAGES = 3;            // at least 2: a slot is freed one store later
constexpr u32 STAGE_BYTES = 8192;      // from one slot to the next
constexpr u32 EXPECTED_BYTES = 8192;   // what the load of one box reports to its barrier
constexpr u32 BARRIERS = 24576;         // behind the slots
constexpr int BOX_ROWS = 32;
constexpr int BOX_COLUMNS = 64;

// destination = source, box by box, for 2D arrays cut into tiles_y x tiles_x boxes. A block takes every gridDim.x-th
// box. Thread 0 loads: it waits for a slot to be free. Thread 32 stores: it waits for a slot to be full, and frees it
// when its store has read it. Boxes reach over the arrays' edges: loads fill with zeros, stores leave them out.
extern "C" __global__ void __launch_bounds__(64)
tile_copy(const __grid_constant__ TensorMap source, const __grid_constant__ TensorMap destination, int tiles_x, int tiles_y) {
    extern __shared__ __align__(128) u8 shared[];
    const u32 slots = shared_address(shared);
    const int tiles = tiles_x * tiles_y;

    TmaPipeline<STAGES> pipeline;
    pipeline.init(slots + BARRIERS, 1, 1);

    if (threadIdx.x == 0) {
        prefetch_tensormap(&source);
        for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
            const int x = tile % tiles_x * BOX_COLUMNS, y = tile / tiles_x * BOX_ROWS;
            pipeline.acquire();
            pipeline.expect_tx(EXPECTED_BYTES);
            cp_async_bulk_tensor_2d_load(slots + pipeline.stage * STAGE_BYTES, &source, pipeline.get_barrier(), x, y);
            pipeline.advance();
        }
    } else if (threadIdx.x == 32) {
        prefetch_tensormap(&destination);
        u32 previous = STAGES;  // the slot of the last store; none yet
        for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
            const int x = tile % tiles_x * BOX_COLUMNS, y = tile / tiles_x * BOX_ROWS;
            pipeline.wait();
            // TMA wrote the slot and TMA reads it: no proxy fence, which plain stores would need.
            cp_async_bulk_tensor_2d_store(&destination, slots + pipeline.stage * STAGE_BYTES, x, y);
            cp_async_bulk_commit_group();
            if (previous < STAGES) {
                cp_async_bulk_wait_group_read<1>();  // this store may still read its slot; the one before has
                pipeline.release(previous);
            }
            previous = pipeline.stage;
            pipeline.advance();
        }
        cp_async_bulk_wait_group<0>();  // shared memory must outlive the reads, and the writes the kernel
    }
}
