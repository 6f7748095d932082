// cudatma: kernels/tile_copy.cu.j2 for sm_90a
// config: TileCopyConfig
//   element_bytes = 4
//   box_rows = 32
//   stages = 3
// ring: 3 stages of 8192 bytes, expect_tx 8192, 1 producer and 1 consumer arrivals; 24624 bytes of shared memory
//   +0 tile: 8192 bytes, 8192 by TMA
//   barriers at +24576: full[3], empty[3]

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

// [PTX ISA, cp.async.bulk.tensor] Load the box of `map` that begins at element (c0, c1, ...), where c0 is the innermost coordinate, to
// shared address `dst`. Call this function from one thread. Barrier `bar` counts the bytes of the whole box, because TMA also fills
// elements outside the tensor. `dst` must be 128-byte aligned (1024-byte aligned with the 128-byte swizzle).
__device__ __forceinline__ void cp_async_bulk_tensor_2d_load(u32 dst, const TensorMap* map, u32 bar, int c0, int c1) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%3, %4}], [%2];"
                 :: "r"(dst), "l"(map), "r"(bar), "r"(c0), "r"(c1) : "memory");
}

// [PTX ISA, cp.async.bulk.tensor] Store a box from shared address `src` to element (c0, c1, ...) and the following elements of `map` as
// part of this thread's current bulk group. Coordinates must be nonnegative. TMA clips the innermost dimension at multiples of 16 bytes,
// not at elements. The threads that wrote `src` must call fence_proxy_async_shared_cta() and then synchronize before this call.
__device__ __forceinline__ void cp_async_bulk_tensor_2d_store(const TensorMap* map, u32 src, int c0, int c1) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group"
                 " [%0, {%2, %3}], [%1];"
                 :: "l"(map), "r"(src), "r"(c0), "r"(c1) : "memory");
}

// [PTX ISA, prefetch] Prefetch a tensor map into the descriptor cache.
__device__ __forceinline__ void prefetch_tensormap(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" : : "l"(map) : "memory");
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

constexpr u32 STAGES = 3;   // at least 2, because a slot is released after the next store
constexpr u32 STAGE_BYTES = 8192;   // bytes from one slot to the next
constexpr u32 EXPECTED_BYTES = 8192;   // bytes that TMA loads per box
constexpr u32 BARRIERS = 24576;   // offset of the barriers, after the slots
constexpr int BOX_ROWS = 32;
constexpr int BOX_COLUMNS = 64;

// Copy a 2D array, which is divided into tiles_y x tiles_x boxes. A CTA copies every gridDim.x-th box. Thread 0 waits until thread 32 has
// released a slot, and loads a box into the slot. Thread 32 waits until the slot is full, stores the box, and releases the slot after the
// store has read it. Boxes may extend beyond the edges of the array. Loads fill elements outside the array with zeros, and stores omit
// these elements.
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
        u32 previous = STAGES;   // the slot of the last store, or STAGES if there was none
        for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
            const int x = tile % tiles_x * BOX_COLUMNS, y = tile / tiles_x * BOX_ROWS;
            pipeline.wait();
            // No proxy fence is needed, because TMA both wrote the slot and reads it.
            cp_async_bulk_tensor_2d_store(&destination, slots + pipeline.stage * STAGE_BYTES, x, y);
            cp_async_bulk_commit_group();
            if (previous < STAGES) {
                cp_async_bulk_wait_group_read<1>();   // the previous store must have read its slot; this store may still be reading
                pipeline.release(previous);
            }
            previous = pipeline.stage;
            pipeline.advance();
        }
        cp_async_bulk_wait_group<0>();   // TMA must read shared memory before the CTA exits and finish its writes before the kernel ends
    }
}
