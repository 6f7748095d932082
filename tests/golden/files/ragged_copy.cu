// cudatma: kernels/ragged_copy.cu.j2 for sm_90a
// config: RaggedCopyConfig
//   element_bytes = 2
// ring: 4 stages of 8192 bytes, expect_tx 8192, 1 producer and 1 consumer arrivals; 32832 bytes of shared memory
//   +0 tile: 8192 bytes, 8192 by TMA
//   barriers at +32768: full[4], empty[4]

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

// [PTX ISA, membar / fence, .proxy.tensormap::generic] Acquire a tensor map that was changed on the GPU. Call this function before TMA uses
// the map.
__device__ __forceinline__ void fence_proxy_tensormap_acquire_gpu(const TensorMap* map) {
    asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" : : "l"(map) : "memory");
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

// [PTX ISA, tensormap.cp_fenceproxy] Copy a tensor map from shared address `src` to global memory and release it. All lanes of a warp must
// call this function. Threads that use the map must first call fence_proxy_tensormap_acquire_gpu(dst).
__device__ __forceinline__ void tensormap_cp_fenceproxy_release_gpu(TensorMap* dst, u32 src) {
    asm volatile("tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%0], [%1], 128;"
                 :: "l"(__cvta_generic_to_global(dst)), "r"(src) : "memory");
}

// [PTX ISA, tensormap.replace] Set the global address of the tensor map at shared address `map`. No TMA operation may be using the map.
__device__ __forceinline__ void tensormap_replace_global_address(u32 map, const void* address) {
    asm volatile("tensormap.replace.tile.global_address.shared::cta.b1024.b64 [%0], %1;"
                 :: "r"(map), "l"(__cvta_generic_to_global(address)) : "memory");
}

// [PTX ISA, tensormap.replace] Set the tensor size, in elements, of dimension Ordinal (0 is innermost) of the tensor map at shared address
// `map`.
template <u32 Ordinal>
__device__ __forceinline__ void tensormap_replace_global_dim(u32 map, u32 value) {
    asm volatile("tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [%0], %1, %2;"
                 :: "r"(map), "n"(Ordinal), "r"(value) : "memory");
}

// [PTX ISA, tensormap.replace] Set the stride, in bytes, of dimension Ordinal + 1 of the tensor map at shared address `map`.
template <u32 Ordinal>
__device__ __forceinline__ void tensormap_replace_global_stride(u32 map, u64 stride_bytes) {
    asm volatile("tensormap.replace.tile.global_stride.shared::cta.b1024.b64 [%0], %1, %2;"
                 :: "r"(map), "n"(Ordinal), "l"(stride_bytes) : "memory");
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

constexpr u32 STAGES = 4;   // at least 2, because a slot is released after the next store
constexpr u32 STAGE_BYTES = 8192;   // bytes from one slot to the next
constexpr u32 EXPECTED_BYTES = 8192;   // bytes that TMA loads per box
constexpr u32 BARRIERS = 32768;   // offset of the barriers, after the slots
constexpr u32 BOX_ROWS = 64;
constexpr u32 BOX_COLUMNS = 64;
// Number of tensor maps in global memory that each warp of a CTA edits in turn. A warp edits a map again after MAPS other arrays, each of
// which has at least one box. By then, the copies that were issued MAPS boxes ago have completed, so TMA no longer uses the map.
constexpr u32 MAPS = 4;
static_assert(MAPS >= STAGES);

// An array and its copy. Boxes are numbered across all arrays.
struct Pair {
    const u8* source;
    u8* destination;
    u64 source_pitch, destination_pitch;   // bytes from one row to the next
    u32 rows, columns;
    u32 first_box;
    u32 boxes_x;                           // boxes along the columns
};

// The pair that a warp processes. All members are uniform within the warp.
struct Cursor {
    const Pair* pairs;
    u32 count, index, edits;
    Pair pair;

    // Start at the last pair whose first box is at most `box`. Every pair has at least one box.
    __device__ Cursor(const Pair* all, u32 pair_count, u32 box) : pairs(all), count(pair_count), index(0), edits(0) {
        u32 beyond = count;
        while (beyond - index > 1) {
            const u32 middle = (index + beyond) / 2;
            if (pairs[middle].first_box <= box) index = middle;
            else beyond = middle;
        }
        pair = pairs[index];
    }

    // Move to the pair that contains `box`. Return whether this is the warp's first box of the pair, so that the warp needs a new map.
    __device__ bool enters(u32 box) {
        if (index + 1 < count && pairs[index + 1].first_box <= box) pair = pairs[++index];
        else if (edits > 0) return false;
        ++edits;
        return true;
    }

    __device__ int x(u32 box) const { return int((box - pair.first_box) % pair.boxes_x * BOX_COLUMNS); }
    __device__ int y(u32 box) const { return int((box - pair.first_box) / pair.boxes_x * BOX_ROWS); }
};

// Describe an array in the warp's working copy of a tensor map, and publish the copy as `map`. All lanes of the warp must call this
// function.
__device__ void publish(TensorMap* map, u32 copy, const void* address, u64 pitch, u32 rows, u32 columns, u32 lane) {
    if (lane == 0) {
        tensormap_replace_global_address(copy, address);
        tensormap_replace_global_dim<0>(copy, columns);
        tensormap_replace_global_dim<1>(copy, rows);
        tensormap_replace_global_stride<0>(copy, pitch);
    }
    __syncwarp();
    tensormap_cp_fenceproxy_release_gpu(map, copy);
    if (lane == 0) fence_proxy_tensormap_acquire_gpu(map);
    __syncwarp();
}

// Copy `count` 2D arrays of any shapes. A CTA processes `boxes / gridDim.x` consecutive boxes. Warp 0 waits until warp 1 has released a
// slot, and loads a box into the slot. Warp 1 waits until the slot is full, stores the box, and releases the slot after the store has read
// it. Each warp edits its tensor map at the first box of each pair. `maps` contains 2 * MAPS maps per CTA. `source` and `destination`
// provide the element type and the box size. The warps replace their addresses, sizes and pitches.
extern "C" __global__ void __launch_bounds__(64)
ragged_copy(const __grid_constant__ TensorMap source, const __grid_constant__ TensorMap destination, const Pair* pairs,
    u32 count, u32 boxes, TensorMap* maps) {
    extern __shared__ __align__(128) u8 shared[];
    __shared__ __align__(128) TensorMap copies[2];
    const u32 slots = shared_address(shared), warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32 begin = u32(u64(boxes) * blockIdx.x / gridDim.x), end = u32(u64(boxes) * (blockIdx.x + 1) / gridDim.x);

    TmaPipeline<STAGES> pipeline;
    pipeline.init(slots + BARRIERS, 1, 1);
    if (begin == end) return;

    const TensorMap* original = warp == 0 ? &source : &destination;
    for (u32 i = lane; i < sizeof(TensorMap); i += 32) copies[warp].bytes[i] = original->bytes[i];
    __syncwarp();
    const u32 copy = shared_address(&copies[warp]);
    TensorMap* mine = maps + (blockIdx.x * 2 + warp) * MAPS;
    TensorMap* map = mine;
    Cursor cursor(pairs, count, begin);

    if (warp == 0) {
        for (u32 box = begin; box < end; ++box) {
            if (lane == 0) pipeline.acquire();   // waits until the store from STAGES boxes ago has read the slot
            if (cursor.enters(box)) {
                const Pair& pair = cursor.pair;
                map = mine + cursor.edits % MAPS;
                publish(map, copy, pair.source, pair.source_pitch, pair.rows, pair.columns, lane);
            }
            if (lane == 0) {
                pipeline.expect_tx(EXPECTED_BYTES);
                const u32 slot = slots + pipeline.stage * STAGE_BYTES;
                cp_async_bulk_tensor_2d_load(slot, map, pipeline.get_barrier(), cursor.x(box), cursor.y(box));
            }
            pipeline.advance();
        }
    } else {
        u32 previous = STAGES;   // the slot of the last store, or STAGES if there was none
        for (u32 box = begin; box < end; ++box) {
            if (cursor.enters(box)) {
                const Pair& pair = cursor.pair;
                map = mine + cursor.edits % MAPS;
                publish(map, copy, pair.destination, pair.destination_pitch, pair.rows, pair.columns, lane);
            }
            if (lane == 0) {
                pipeline.wait();
                // No proxy fence is needed, because TMA both wrote the slot and reads it.
                cp_async_bulk_tensor_2d_store(map, slots + pipeline.stage * STAGE_BYTES, cursor.x(box), cursor.y(box));
                cp_async_bulk_commit_group();
                if (previous < STAGES) {
                    // Wait until the previous store has read its slot and its map. The store that was just issued may still be reading.
                    cp_async_bulk_wait_group_read<1>();
                    pipeline.release(previous);
                }
                previous = pipeline.stage;
            }
            pipeline.advance();
        }
        // TMA must read shared memory before the CTA exits and finish its writes before the kernel ends.
        if (lane == 0) cp_async_bulk_wait_group<0>();
    }
}
