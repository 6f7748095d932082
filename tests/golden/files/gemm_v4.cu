// cudatma: kernels/gemm_v4.cu.j2 for sm_90a
// config: GemmConfig
//   version = 'v4'
//   dtype = 'float16'
//   layout = 'RC'
//   tile_m = 128
//   tile_n = 256
//   tile_k = 64
//   stages = 3
//   warpgroups = 2
// 8 warps consume, 4 produce; a CTA takes 180272 B.
// One stage holds
//    16384 B  a 128 x 64 float16, K-major, 128B swizzle
//    32768 B  b 64 x 256 float16, K-major, 128B swizzle
// Shared memory, by offset
//        0  a, 49152 B
//    49152  b, 98304 B
//   147456  staging, 32768 B
//   180224  full_barriers, 24 B
//   180248  empty_barriers, 24 B

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

// [PTX ISA, cvta] Return the 32-bit shared address of a generic pointer, which the other primitives take.
__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// [PTX ISA, Special Registers, %laneid] Return this thread's lane. ptxas reads the register again rather than keep the value.
__device__ __forceinline__ u32 laneid() {
    u32 lane;
    asm("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
}

// [PTX ISA, elect.sync] Return true in exactly one lane. All 32 lanes of the warp call it.
__device__ __forceinline__ bool elect_sync() {
    u32 elected;
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "elect.sync _|p, 0xffffffff;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}"
        : "=r"(elected));
    return elected != 0;
}

// [PTX ISA, bar] Wait at named barrier `id` (1..15; 0 is __syncthreads) until `threads` threads, whole warps, have arrived.
__device__ __forceinline__ void bar_sync(u32 id, u32 threads) {
    asm volatile("bar.sync %0, %1;" : : "r"(id), "r"(threads) : "memory");
}

// [PTX ISA, griddepcontrol] Wait until the previous kernels of the stream have completed and their writes are visible.
// Return at once unless this is a programmatic dependent launch.
__device__ __forceinline__ void griddepcontrol_wait() {
    asm volatile("griddepcontrol.wait;" : : : "memory");
}

// [PTX ISA, griddepcontrol] Allow the next kernel to start once every CTA has called this or exited.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
    asm volatile("griddepcontrol.launch_dependents;" : : : "memory");
}

// [PTX ISA, setmaxnreg] Raise the registers per thread of this warpgroup to Registers (24..256, a multiple of 8). Wait until
// the CTA's pool has them.
template <u32 Registers>
__device__ __forceinline__ void setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" : : "n"(Registers));
}

// [PTX ISA, setmaxnreg] Lower the registers per thread of this warpgroup to Registers; the rest returns to the CTA's pool.
template <u32 Registers>
__device__ __forceinline__ void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" : : "n"(Registers));
}

// [PTX ISA, membar / fence, .proxy.async] Order this thread's ordinary accesses to shared memory before later accesses of the
// async proxy: TMA stores, wgmma operands, and TMA loads into a slot that ordinary stores wrote.
__device__ __forceinline__ void fence_proxy_async_shared_cta() {
    asm volatile("fence.proxy.async.shared::cta;" : : : "memory");
}

// [PTX ISA, mbarrier.init] Initialize the barrier at shared address `bar` (8 bytes, aligned to 8): each phase needs `count`
// arrivals. Other threads may use it after fence_mbarrier_init() by this thread and a barrier of the CTA or the cluster.
__device__ __forceinline__ void mbarrier_init(u32 bar, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" : : "r"(bar), "r"(count) : "memory");
}

// [PTX ISA, mbarrier.arrive] Arrive once, with release semantics: threads that wait see this thread's earlier writes.
__device__ __forceinline__ void mbarrier_arrive(u32 bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" : : "r"(bar) : "memory");
}

// [PTX ISA, mbarrier.arrive] Make the current phase wait for `bytes` more bytes, and arrive once.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(u32 bar, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" : : "r"(bar), "r"(bytes) : "memory");
}

// [PTX ISA, mbarrier.try_wait] Return whether the phase of this parity has completed. The thread may be suspended for a while
// first, for up to `ns` nanoseconds. On a fresh barrier, parity 1 counts as completed and parity 0 does not.
__device__ __forceinline__ bool mbarrier_try_wait_parity_hint(u32 bar, u32 parity, u32 ns) {
    u32 done;
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2, %3;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}"
        : "=r"(done)
        : "r"(bar), "r"(parity), "r"(ns)
        : "memory");
    return done != 0;
}

// [PTX ISA, mbarrier.try_wait] Wait until the phase of this parity has completed, and sleep for up to `ns` nanoseconds at a time. Acquire semantics: afterwards this thread
// sees the bytes that TMA delivered and the earlier writes of the threads that arrived.
__device__ __forceinline__ void mbarrier_wait_parity_hint(u32 bar, u32 parity, u32 ns) {
    while (!mbarrier_try_wait_parity_hint(bar, parity, ns)) {
    }
}

// [PTX ISA, membar / fence] Make this thread's mbarrier.init visible to the async proxy and the cluster.
__device__ __forceinline__ void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" : : : "memory");
}

// [PTX ISA, cp.async.bulk.tensor] Load the box of `map` at (c0, c1, ..), counted in elements, c0 innermost, to shared address `dst`
// (aligned to 128 bytes, to 1024 under the 128-byte swizzle). One thread calls it. Elements outside of the tensor are filled.
// `bar` counts the bytes of the whole box.
__device__ __forceinline__ void cp_async_bulk_tensor_3d_load(
    u32 dst, const TensorMap* map, u32 bar, int c0, int c1, int c2) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cta.global.tile.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4, %5}], [%2];"
        :
        : "r"(dst), "l"(map), "r"(bar), "r"(c0), "r"(c1), "r"(c2)
        : "memory");
}

// [PTX ISA, cp.async.bulk.tensor] Store the box at shared address `src` to `map` at (c0, c1, ..), none of them negative, as a part of
// this thread's current bulk group. The innermost dimension is clipped at 16 bytes, not at the element: keep dim[0] a multiple of
// 16 bytes. The threads that wrote `src` call fence_proxy_async_shared_cta() before the barrier that precedes this call.
__device__ __forceinline__ void cp_async_bulk_tensor_3d_store(
    const TensorMap* map, u32 src, int c0, int c1, int c2) {
    asm volatile(
        "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group"
        " [%0, {%2, %3, %4}], [%1];"
        :
        : "l"(map), "r"(src), "r"(c0), "r"(c1), "r"(c2)
        : "memory");
}

// [PTX ISA, cp.async.bulk.commit_group] Make one group of this thread's bulk stores and reductions since the last commit.
__device__ __forceinline__ void cp_async_bulk_commit_group() {
    asm volatile("cp.async.bulk.commit_group;" : : : "memory");
}

// [PTX ISA, cp.async.bulk.wait_group] Wait until at most Pending of this thread's groups have not written global memory. A group
// belongs to the thread that issued it.
template <u32 Pending>
__device__ __forceinline__ void cp_async_bulk_wait_group() {
    asm volatile("cp.async.bulk.wait_group %0;" : : "n"(Pending) : "memory");
}

// [PTX ISA, cp.async.bulk.wait_group.read] Wait until at most Pending of this thread's groups have not read shared memory, which
// may then be reused.
template <u32 Pending>
__device__ __forceinline__ void cp_async_bulk_wait_group_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" : : "n"(Pending) : "memory");
}

// [PTX ISA, stmatrix] Store 8 x 8 matrices of 16-bit elements from a warp's registers: lanes 8 i .. 8 i + 7 hold the shared addresses
// (aligned to 16) of the rows of matrix i; lane l has in r[i] elements 2 (l % 4), 2 (l % 4) + 1 of row l / 4.
// _trans transposes them.
__device__ __forceinline__ void stmatrix_x4(u32 addr, const u32 (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 :
                 : "r"(addr), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}

// [PTX ISA, Asynchronous Warpgroup Level Matrix, Matrix Descriptor] Return the descriptor of an operand in shared memory.
// swizzle: 0 none, 1 128B, 2 64B, 3 32B; a tensor map numbers them the other way round.
// K-major rows under a swizzle: stride_bytes leads from 8 rows to the next 8; leading_bytes is not used. The next k16 step is 32
// bytes further, which adds 2 to the descriptor.
// M-major or N-major rows (a transposed operand): stride_bytes leads from 8 of K to the next 8, leading_bytes from 64 of M or N to
// the next 64.
__device__ __forceinline__ u64 matrix_descriptor(u32 address, u32 leading_bytes, u32 stride_bytes, u32 swizzle) {
    return static_cast<u64>((address & 0x3ffff) >> 4) | static_cast<u64>(leading_bytes >> 4) << 16 |
           static_cast<u64>(stride_bytes >> 4) << 32 | static_cast<u64>(swizzle) << 62;
}

// [PTX ISA, wgmma.fence] Order the warpgroup's earlier register writes before the wgmmas that follow.
__device__ __forceinline__ void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" : : : "memory");
}

// [PTX ISA, wgmma.commit_group] Make one group of the wgmmas since the last commit.
__device__ __forceinline__ void wgmma_commit_group() {
    asm volatile("wgmma.commit_group.sync.aligned;" : : : "memory");
}

// [PTX ISA, wgmma.wait_group] Wait until at most Newest (0..7) groups are in flight.
template <u32 Newest>
__device__ __forceinline__ void wgmma_wait_group() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" : : "n"(Newest) : "memory");
}

// A ring of Stages slots in shared memory, filled by a producer and read by consumers.
//
// Each slot has two mbarriers. `full` completes a phase when the producer's arrivals and bytes have come; consumers wait for it.
// `empty` completes a phase when the consumers have arrived; the producer waits for it before it fills the slot again. Each thread
// keeps its position, `stage` and `phase`, in registers. Producer and consumers both start at (0, 0) and advance() once a slot:
//
//     producer   acquire()   expect_tx(bytes)   load(.., get_barrier(), ..)   advance()
//     consumer   wait()      read the slot      release()                     advance()
//
// The expected bytes are exactly those that the loads deliver: with one byte more wait() never returns, with one less it may return
// before the data. A consumer that wrote the slot with ordinary stores calls fence_proxy_async_shared_cta() before it releases the
// slot. The forms with a slot number act on that slot in the current lap and leave `stage` alone.
template <u32 Stages>
struct TmaPipeline {
    static constexpr u32 barrier_bytes = 16 * Stages;  // of shared memory at base_address, which is aligned to 8

    u32 base;   // full[0..Stages), then empty[0..Stages); 8 bytes each
    u32 stage;  // the slot at which this thread is
    u32 phase;  // parity of the current lap; toggles when `stage` wraps

    // Attach to the ring and initialize its barriers. All threads of the CTA call it; it ends in __syncthreads(). In a cluster, a
    // cluster barrier must follow before a CTA uses the barriers of another one.
    __device__ __forceinline__ void init(u32 base_address, u32 producer_arrivals, u32 consumer_arrivals) {
        attach(base_address);
        if (threadIdx.x == 0 && threadIdx.y == 0 && threadIdx.z == 0) init_barriers(producer_arrivals, consumer_arrivals);
        __syncthreads();
    }

    // Start at slot 0 of the ring at base_address, and leave its barriers alone.
    __device__ __forceinline__ void attach(u32 base_address) {
        base = base_address;
        stage = 0;
        phase = 0;
    }

    // Initialize the barriers. One thread calls it after attach(), and may use the ring at once; the others may after a barrier that
    // they share with this thread, of the CTA or the cluster. producer_arrivals: calls of expect_tx() or arrive() that complete a
    // slot. consumer_arrivals: calls of release*() that free it; in a cluster, those of all its CTAs.
    __device__ __forceinline__ void init_barriers(u32 producer_arrivals, u32 consumer_arrivals) const {
        for (u32 slot = 0; slot < Stages; ++slot) {
            mbarrier_init(get_barrier(slot), producer_arrivals);
            mbarrier_init(empty_barrier(slot), consumer_arrivals);
        }
        fence_mbarrier_init();   // the async proxy and the cluster see initialized barriers
    }

    // Return the barrier that counts the bytes of a slot's loads.
    __device__ __forceinline__ u32 get_barrier(u32 slot) const { return base + 8 * slot; }
    __device__ __forceinline__ u32 get_barrier() const { return get_barrier(stage); }

    // Return the barrier at which the consumers of a slot arrive.
    __device__ __forceinline__ u32 empty_barrier(u32 slot) const { return base + 8 * (Stages + slot); }
    __device__ __forceinline__ u32 empty_barrier() const { return empty_barrier(stage); }

    // Producer: wait until the consumers have released the slot. The first lap finds every slot empty: on a fresh barrier the phase
    // of parity 1 counts as completed.
    __device__ __forceinline__ void acquire(u32 slot) const { mbarrier_wait_parity_hint(empty_barrier(slot), phase ^ 1, 10000000); }
    __device__ __forceinline__ void acquire() const { acquire(stage); }

    // Producer: arrive once, and let the slot be full when `bytes` more bytes have come. Call it before the loads.
    __device__ __forceinline__ void expect_tx(u32 slot, u32 bytes) const { mbarrier_arrive_expect_tx(get_barrier(slot), bytes); }
    __device__ __forceinline__ void expect_tx(u32 bytes) const { expect_tx(stage, bytes); }

    // Consumer: wait until the slot is full.
    __device__ __forceinline__ void wait(u32 slot) const { mbarrier_wait_parity_hint(get_barrier(slot), phase, 10000000); }
    __device__ __forceinline__ void wait() const { wait(stage); }

    // Consumer: arrive once without a fence. Correct only if instructions issued before the call have used every value that was read
    // from the slot; then no read can be in flight. A loop that releases each slot one iteration after it read it has that property.
    __device__ __forceinline__ void release_used(u32 slot) const { mbarrier_arrive(empty_barrier(slot)); }

    // Consumer: release_used() once for the warp, whose lanes all call it.
    __device__ __forceinline__ void release_used_by_warp(u32 slot, u32 lane) const {
        __syncwarp();
        if (lane == 0) release_used(slot);
    }

    // Go to the next slot; the parity toggles when the ring wraps.
    __device__ __forceinline__ void advance() {
        if (++stage == Stages) {
            stage = 0;
            next_lap();
        }
    }

    // Toggle the parity, for callers that number the slots themselves.
    __device__ __forceinline__ void next_lap() { phase ^= 1; }
};

// Call bar_sync() at named barrier First + index, index < Count. Each number is a constant in the code: for a number
// unknown at compile time, ptxas reserves all 16 barriers.
template <u32 First, u32 Count>
__device__ __forceinline__ void bar_sync_one_of(u32 index, u32 threads) {
    if constexpr (Count == 1) {
        bar_sync(First, threads);
    } else if (index == 0) {
        bar_sync(First, threads);
    } else {
        bar_sync_one_of<First + 1, Count - 1>(index - 1, threads);
    }
}

// Wait for the previous kernel of the stream, then allow the next one to start. A kernel touches no global memory before this call.
// The next kernel starts after this wait: whatever it reads before its own wait (weights, for example) was written by kernels that
// have completed, or by this one.
__device__ __forceinline__ void wait_for_previous_grid() {
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
}

// Divides 0 .. 2^31 - 1 by a number that the host knows, with one multiplication; an integer division takes about 25 instructions.
struct Divisor {
    u32 multiplier, shift;     // 2^(31 + shift) / number, rounded up; 2^shift >= number
};

__device__ __forceinline__ u32 divide(u32 n, const Divisor& by) { return __umulhi(2 * n, by.multiplier) >> by.shift; }

// ---- Between fp32 and the operands' 16-bit type, two values in a register ------------------------------------------------
__device__ __forceinline__ u32 to_pair(float low, float high) {
    u32 d;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
}

// [PTX ISA, ld] Load 16 bytes of shared memory.
__device__ __forceinline__ uint4 load_vector(u32 smem) {
    uint4 values;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(values.x), "=r"(values.y), "=r"(values.z), "=r"(values.w)
                 : "r"(smem) : "memory");
    return values;
}

}  // namespace cudatma

namespace cudatma {

// ---- The tile, as named constants -----------------------------------------------------------------------------------
constexpr u32 TILE_M = 128;     // of a CTA's tile
constexpr u32 TILE_N = 256;
constexpr u32 TILE_K = 64;      // of one stage
constexpr u32 STAGES = 3;
constexpr u32 THREADS = 384;
constexpr u32 CONSUMER_WARPS = 8;
constexpr bool A_IS_K_MAJOR = true, B_IS_K_MAJOR = true;   // else M-major, N-major

// ---- Shared memory: offsets from the base, which is aligned to 1024 bytes --------------------------------------------------
constexpr u32 A = 0;   // 49152 B
constexpr u32 B = 49152;   // 98304 B
constexpr u32 STAGING = 147456;   // 32768 B
constexpr u32 FULL_BARRIERS = 180224;   // 24 B

// ---- Slots: STAGES of each operand --------------------------------------------------------------------------------------
constexpr u32 ELEMENT_BYTES = 2;   // of A and B
constexpr u32 SPAN_BYTES = 128, SPAN = SPAN_BYTES / ELEMENT_BYTES;   // of the 128-byte swizzle, and its elements
constexpr u32 MN_BOX_BYTES = TILE_K * SPAN_BYTES;   // of an M-major or N-major operand: SPAN of M or N, the stage's K
constexpr u32 B_SLOT_N = 256;   // columns of B in a slot: of an N-major one whole boxes
constexpr u32 A_STAGE_BYTES = TILE_M * TILE_K * ELEMENT_BYTES, B_STAGE_BYTES = B_SLOT_N * TILE_K * ELEMENT_BYTES;
constexpr u32 WARPGROUPS = 2;    // along M
constexpr u32 WARPGROUP_M = TILE_M / WARPGROUPS;   // in wgmmas of 64 rows
constexpr u32 SWIZZLE_128B = 1, SWIZZLE_REPEAT_BYTES = 8 * SPAN_BYTES;   // in a matrix descriptor

// ---- Products ---------------------------------------------------------------------------------------------------------
// A thread holds, of rows lane / 4 and lane / 4 + 8 of its warp's 16, columns 2 (lane % 4) and the next of every 8.
constexpr u32 FRAGMENTS_16 = WARPGROUP_M / 64, FRAGMENTS_8 = TILE_N / 8;   // of a warp, along M and along N
constexpr u32 FRAGMENT_STRIDE_M = 64;   // from the rows of one fragment to those of the next

// A warp's accumulators: fragments of 16 x 8 values, four a lane.
typedef float Accumulators[FRAGMENTS_16][FRAGMENTS_8][4];
constexpr u32 MMA_K = 32 / ELEMENT_BYTES;   // of one wgmma

// [PTX ISA, wgmma.mma_async] d += a b; d = a b, whatever d was, where `accumulates` is false. From wgmma_fence to wgmma_wait_group nothing else
// may touch d.
__device__ __forceinline__ void wgmma_m64n256k16_f32_f16_ss(float (&d)[32][4], u64 a, u64 b, bool accumulates = true) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %130, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
        "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
        "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
        "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
        "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
        "}, %128, %129, p, 1, 1, 0, 0;\n"
        "}"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]),
          "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]), "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3]),
          "+f"(d[8][0]), "+f"(d[8][1]), "+f"(d[8][2]), "+f"(d[8][3]), "+f"(d[9][0]), "+f"(d[9][1]), "+f"(d[9][2]), "+f"(d[9][3]), "+f"(d[10][0]), "+f"(d[10][1]), "+f"(d[10][2]), "+f"(d[10][3]), "+f"(d[11][0]), "+f"(d[11][1]), "+f"(d[11][2]), "+f"(d[11][3]),
          "+f"(d[12][0]), "+f"(d[12][1]), "+f"(d[12][2]), "+f"(d[12][3]), "+f"(d[13][0]), "+f"(d[13][1]), "+f"(d[13][2]), "+f"(d[13][3]), "+f"(d[14][0]), "+f"(d[14][1]), "+f"(d[14][2]), "+f"(d[14][3]), "+f"(d[15][0]), "+f"(d[15][1]), "+f"(d[15][2]), "+f"(d[15][3]),
          "+f"(d[16][0]), "+f"(d[16][1]), "+f"(d[16][2]), "+f"(d[16][3]), "+f"(d[17][0]), "+f"(d[17][1]), "+f"(d[17][2]), "+f"(d[17][3]), "+f"(d[18][0]), "+f"(d[18][1]), "+f"(d[18][2]), "+f"(d[18][3]), "+f"(d[19][0]), "+f"(d[19][1]), "+f"(d[19][2]), "+f"(d[19][3]),
          "+f"(d[20][0]), "+f"(d[20][1]), "+f"(d[20][2]), "+f"(d[20][3]), "+f"(d[21][0]), "+f"(d[21][1]), "+f"(d[21][2]), "+f"(d[21][3]), "+f"(d[22][0]), "+f"(d[22][1]), "+f"(d[22][2]), "+f"(d[22][3]), "+f"(d[23][0]), "+f"(d[23][1]), "+f"(d[23][2]), "+f"(d[23][3]),
          "+f"(d[24][0]), "+f"(d[24][1]), "+f"(d[24][2]), "+f"(d[24][3]), "+f"(d[25][0]), "+f"(d[25][1]), "+f"(d[25][2]), "+f"(d[25][3]), "+f"(d[26][0]), "+f"(d[26][1]), "+f"(d[26][2]), "+f"(d[26][3]), "+f"(d[27][0]), "+f"(d[27][1]), "+f"(d[27][2]), "+f"(d[27][3]),
          "+f"(d[28][0]), "+f"(d[28][1]), "+f"(d[28][2]), "+f"(d[28][3]), "+f"(d[29][0]), "+f"(d[29][1]), "+f"(d[29][2]), "+f"(d[29][3]), "+f"(d[30][0]), "+f"(d[30][1]), "+f"(d[30][2]), "+f"(d[30][3]), "+f"(d[31][0]), "+f"(d[31][1]), "+f"(d[31][2]), "+f"(d[31][3])
        : "l"(a), "l"(b), "r"((u32)accumulates)
        : "memory");
}

// Return the offset in bytes of row `row` and column k in an operand's slot.
template <bool IsKMajor, u32 Rows>
__device__ __forceinline__ constexpr u32 operand_offset(u32 row, u32 k) {
    return IsKMajor ? (k / SPAN * Rows + row) * SPAN_BYTES + ELEMENT_BYTES * (k % SPAN) : row / SPAN * MN_BOX_BYTES + k * SPAN_BYTES;
}

// Return the matrix descriptor of an operand's slot at `address`.
template <bool IsKMajor>
__device__ __forceinline__ u64 operand_descriptor(u32 address) {
    return matrix_descriptor(address, IsKMajor ? 16 : MN_BOX_BYTES, SWIZZLE_REPEAT_BYTES, SWIZZLE_128B);
}

// Return the descriptor of what is `bytes` further: one addition, because the low bits of a descriptor are the address without its last four
// bits, which does not overflow in shared memory.
__device__ __forceinline__ u64 advanced(u64 descriptor, u32 bytes) {
    return (descriptor & 0xffffffff00000000) | (static_cast<u32>(descriptor) + bytes / 16);
}

// Return the descriptor of a warpgroup's rows of A in a slot; b_descriptor(): that of B.
__device__ __forceinline__ u64 a_descriptor(u32 smem, u32 slot, u32 warpgroup) {
    const u32 rows = operand_offset<A_IS_K_MAJOR, TILE_M>(warpgroup * WARPGROUP_M, 0);
    return advanced(operand_descriptor<A_IS_K_MAJOR>(smem + A + rows), slot * A_STAGE_BYTES);
}

__device__ __forceinline__ u64 b_descriptor(u32 smem, u32 slot) {
    return advanced(operand_descriptor<B_IS_K_MAJOR>(smem + B), slot * B_STAGE_BYTES);
}

// Issue the products of a slot as one commit group. They replace the sums unless `accumulates`.
__device__ __forceinline__ void multiply(Accumulators& acc, u32 smem, u32 slot, u32 warpgroup, bool accumulates) {
    const u64 a = a_descriptor(smem, slot, warpgroup), b = b_descriptor(smem, slot);
    wgmma_fence();
#pragma unroll
    for (u32 k = 0; k < TILE_K; k += MMA_K)
#pragma unroll
        for (u32 m = 0; m < FRAGMENTS_16; ++m)
            wgmma_m64n256k16_f32_f16_ss(acc[m], advanced(a, operand_offset<A_IS_K_MAJOR, TILE_M>(64 * m, k)),
                          advanced(b, operand_offset<B_IS_K_MAJOR, TILE_N>(0, k)), k > 0 || accumulates);
    wgmma_commit_group();
}

// ---- Results ----------------------------------------------------------------------------------------------------------

typedef u16 Out;   // bits of an element of the result

// What a launch passes to the kernel, besides tensor maps and pointers: the members that this kernel reads.
struct Problem {
    u32 m;                          // rows of the result
    u32 n;                          // columns of the result
    u32 tiles_m;                    // output tiles along M
    u32 tiles_n;                    // output tiles along N, each of one CTA or cluster
    u32 raster_m;                   // rows of tiles of a raster group
    u32 k_iterations;               // stages that one tile takes
    u32 work_ranges;                // work ranges: one per cluster, or per CTA without clusters
    u32 output_vectors;             // 1: every row of the result is aligned to 16 bytes
    u32 output_by_tma;              // 1: TMA can write the result
    u32 alternates;                 // 1: every other tile of a CTA goes through K backwards
    u32 matrix_tiles_m;             // tiles along M of one matrix of the batch
    u32 a_box_rows;                 // rows of a box of A
    u32 stage_bytes;                // that the boxes of a stage deliver
    Divisor by_raster_group;        // divides by the tiles of a raster group
    Divisor by_raster_group_rows;   // divides by raster_m
    Divisor by_last_rows;           // divides by the rows of tiles of the last raster group
    Divisor by_matrix_tiles_m;      // divides by matrix_tiles_m
    u64 output_pitch;               // elements from one row to the next
    u64 output_batch;               // elements from one matrix of the result to the next
};

// Where a tile, or a part of it, begins in C, and in which matrix of the batch.
struct Place {
    u32 row0, column0, batch;
};

// Return where a tile begins. tile_m counts the tiles of all matrices of the batch in turn. In a cluster of ClusterM x ClusterN CTAs, tile_m
// and tile_n are those of the cluster, and rank is the CTA's.
template <u32 ClusterM = 1, u32 ClusterN = 1>
__device__ __forceinline__ Place tile_place(const Problem& problem, u32 tile_m, u32 tile_n, u32 rank = 0) {
    const u32 batch = divide(tile_m, problem.by_matrix_tiles_m), along_m = (tile_m - batch * problem.matrix_tiles_m) * ClusterM;
    return Place{(along_m + rank % ClusterM) * TILE_M, (tile_n * ClusterN + rank % ClusterN) * TILE_N, batch};
}

// Where the results go, and the arrays that the epilogue applies.
struct Result {
    Out* output;
};

// Store 16 bytes of a row of the result.
template <typename Element>
__device__ __forceinline__ void store_vector(const Problem& problem, Element* output, uint4 values, u32 row, u32 column) {
    constexpr u32 COLUMNS = 16 / sizeof(Element);
    if (row >= problem.m || column >= problem.n) return;
    Element* target = output + row * problem.output_pitch + column;
    if (problem.output_vectors && column + COLUMNS <= problem.n) {
        *(uint4*)target = values;
    } else {   // a row that is not 16-byte aligned, or the last columns
        const u32 words[4] = {values.x, values.y, values.z, values.w};
#pragma unroll
        for (u32 i = 0; i < COLUMNS; ++i) {
            if (column + i >= problem.n) continue;
            if constexpr (COLUMNS == 4) target[i] = __uint_as_float(words[i]);
            else target[i] = (Element)(words[i / 2] >> (i % 2 * 16));
        }
    }
}

constexpr u32 WARP_STAGING_BYTES = 16 * SPAN_BYTES;   // a warp's 16 rows
constexpr u32 STAGED_N = 64;                  // columns that it stages at a time

// Write STAGED_N columns of a warp's 16 rows, or the rest of them, from column 8 n on, in the 128-byte swizzle.
__device__ __forceinline__ void stage_fragments(const float (&acc)[FRAGMENTS_8][4], u32 staging, u32 n, u32 lane) {
    const u32 row = lane % 16;
#pragma unroll
    for (u32 i = 0; i < min(STAGED_N / 8, FRAGMENTS_8 - n); i += 2) {   // 16 columns
        const float(&low)[4] = acc[n + i], (&high)[4] = acc[n + i + 1];
        const u32 pairs[4] = {to_pair(low[0], low[1]), to_pair(low[2], low[3]), to_pair(high[0], high[1]), to_pair(high[2], high[3])};
        stmatrix_x4(staging + row * SPAN_BYTES + ((i + lane / 16) ^ (row & 7)) * 16, pairs);
    }
}

// Store a warp's rows by 16-byte stores, through its staging rows. place: where the warp's part begins. Only one of Parts parts of the
// columns is stored.
template <u32 Parts = 1>
__device__ __forceinline__ void store_rows(Accumulators& acc, const Problem& problem, const Result& result, u32 staging, const Place& place,
                                           u32 lane, u32 part = 0) {
    constexpr u32 VECTORS = STAGED_N * sizeof(Out) / 16, ROWS = 32 / VECTORS;   // of a row; that a warp stores at a time
    Out* output = result.output + place.batch * problem.output_batch;
#pragma unroll
    for (u32 m = 0; m < FRAGMENTS_16; ++m)
#pragma unroll
        for (u32 n = 0; n < FRAGMENTS_8; n += STAGED_N / 8) {
            if (n / (FRAGMENTS_8 / Parts) != part) continue;
            __syncwarp();   // all lanes have read the columns before
            stage_fragments(acc[m], staging, n, lane);
            __syncwarp();
#pragma unroll
            for (u32 i = 0; i < 16; i += ROWS) {
                const u32 row = i + lane / VECTORS, vector = lane % VECTORS, column = 8 * n + 16 / sizeof(Out) * vector;
                if (column >= TILE_N) continue;   // the last ones are fewer
                store_vector(problem, output, load_vector(staging + row * SPAN_BYTES + (vector ^ (row & 7)) * 16),
                             place.row0 + FRAGMENT_STRIDE_M * m + row, place.column0 + column);
            }
        }
}

using Ring = TmaPipeline<STAGES>;

// ---- Loads: what lies outside of the tensors is zero --------------------------------------------------------------------
// K-major: boxes of a span of K, all rows. M-major or N-major: boxes of SPAN rows, transposed, all of the stage's K. Of A no more rows
// than it has, since TMA fills slower than it reads; under a swizzle narrower boxes have the same pitch.
template <bool IsKMajor, u32 Rows>
__device__ __forceinline__ void load_box(u32 target, const TensorMap* map, u32 barrier, u32 k, u32 row, u32 batch) {
    if constexpr (IsKMajor) {
#pragma unroll
        for (u32 i = 0; i < TILE_K; i += SPAN)
            cp_async_bulk_tensor_3d_load(target + i / SPAN * Rows * SPAN_BYTES, map, barrier, k + i, row, batch);
    } else {
#pragma unroll
        for (u32 i = 0; i < Rows; i += SPAN)
            cp_async_bulk_tensor_3d_load(target + i / SPAN * MN_BOX_BYTES, map, barrier, row + i, k, batch);
    }
}

// Zero-fill the rows of A's slots that TMA does not load: wgmma reads them. All threads call it before a barrier of the CTA.
__device__ __forceinline__ void clear_unloaded(const Problem& problem, u32 smem) {
    if (problem.m >= (A_IS_K_MAJOR ? TILE_M : SPAN)) return;
    constexpr u32 ROW_BYTES = TILE_K < SPAN ? TILE_K * ELEMENT_BYTES : SPAN_BYTES;   // K-major
    for (u32 offset = 16 * threadIdx.x; offset < STAGES * A_STAGE_BYTES; offset += 16 * THREADS) {
        const u32 row = A_IS_K_MAJOR ? offset / ROW_BYTES % TILE_M : (offset / 16 ^ offset / SPAN_BYTES) % 8 * 8;   // swizzled
        if (row >= problem.a_box_rows)
            asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" :: "r"(smem + A + offset), "r"(0) : "memory");
    }
    fence_proxy_async_shared_cta();   // wgmma reads the zeros through the async proxy
}

// The tensor maps of the loads.
struct Maps {
    const TensorMap *a, *b;
};

// Load stage k of a tile into the ring's slot. One thread calls it.
__device__ __forceinline__ void load_stage(const Problem& problem, const Ring& ring, u32 smem, const Maps& maps, u32 k, const Place& place) {
    ring.expect_tx(problem.stage_bytes);
    load_box<A_IS_K_MAJOR, TILE_M>(smem + A + ring.stage * A_STAGE_BYTES, maps.a, ring.get_barrier(), k * TILE_K, place.row0, place.batch);
    load_box<B_IS_K_MAJOR, TILE_N>(smem + B + ring.stage * B_STAGE_BYTES, maps.b, ring.get_barrier(), k * TILE_K, place.column0, place.batch);
}

// ---- Stores ------------------------------------------------------------------------------------------------------------
// Named barriers. __syncthreads() uses 0.
enum NamedBarrier : u32 {
    STORE_BARRIER = 3,   // the first of one for each warpgroup
};

constexpr u32 STAGING_BUFFERS = 2;   // of a warpgroup, each of 64 rows x 128 bytes
constexpr u32 BUFFER_BYTES = 64 * SPAN_BYTES;
__device__ __forceinline__ void store_sync(u32 warpgroup) { bar_sync_one_of<STORE_BARRIER, CONSUMER_WARPS / 4>(warpgroup, 128); }

// A warpgroup stages columns of its rows in the 128-byte swizzle. One of its threads stores them by TMA while the next tile is computed and,
// with two buffers, while the next columns are staged. Few large boxes take TMA less time than many small ones. stores: the number of stores
// that this warpgroup has issued.
// place: where the warpgroup's part begins. Elements outside of the result are not written.
__device__ __forceinline__ void store_tile(Accumulators& acc, u32& stores, const Problem& problem, const Result& result, u32 smem,
                                           const TensorMap* map, const Place& place, u32 warpgroup, u32 warp, u32 lane) {
    const Place of_warp{place.row0 + 16 * warp, place.column0, place.batch};
    const u32 buffers = smem + STAGING + STAGING_BUFFERS * warpgroup * BUFFER_BYTES;
    if (!problem.output_by_tma) {   // rows that TMA cannot write
        store_rows(acc, problem, result, buffers + warp * WARP_STAGING_BYTES, of_warp, lane);
        return;
    }
    const bool issues = warp == 0 && lane == 0;
#pragma unroll
    for (u32 m = 0; m < FRAGMENTS_16; ++m)
#pragma unroll
        for (u32 n = 0; n < FRAGMENTS_8; n += STAGED_N / 8) {
            const u32 buffer = buffers + stores % STAGING_BUFFERS * BUFFER_BYTES;
            if (issues) cp_async_bulk_wait_group_read<STAGING_BUFFERS - 1>();   // the last store from this buffer has read it
            store_sync(warpgroup);   // wait for the thread that issued the stores
            stage_fragments(acc[m], buffer + 16 * warp * SPAN_BYTES, n, lane);
            fence_proxy_async_shared_cta();
            store_sync(warpgroup);   // all rows are staged, and visible to TMA
            if (issues) {
                cp_async_bulk_tensor_3d_store(map, buffer, place.column0 + 8 * n, place.row0 + FRAGMENT_STRIDE_M * m, place.batch);
                cp_async_bulk_commit_group();
            }
            ++stores;
        }
}

// Stages k_begin .. k_end - 1 of an output tile.
struct WorkUnit {
    u32 tile, k_begin, k_end;
};

// ---- Tiles to CTAs: whole tiles, in turn --------------------------------------------------------------------------------
struct WorkQueue {
    u32 tile, tiles;

    __device__ __forceinline__ WorkQueue(const Problem& problem, u32 range) : tile(range), tiles(problem.tiles_m * problem.tiles_n) {}

    __device__ __forceinline__ bool next(const Problem& problem, WorkUnit& unit) {
        if (tile >= tiles) return false;
        unit = WorkUnit{tile, 0, problem.k_iterations};
        tile += problem.work_ranges;
        return true;
    }
};

// Raster order: tiles are numbered in groups of raster_m rows of tiles, and in each group column by column, so that CTAs
// that run at the same time share operands in L2.
__device__ __forceinline__ void tile_position(const Problem& problem, u32 tile, u32& tile_m, u32& tile_n) {
    const u32 raster_group = divide(tile, problem.by_raster_group), first_row = raster_group * problem.raster_m;
    const u32 inside = tile - first_row * problem.tiles_n, rows_left = problem.tiles_m - first_row;
    const bool is_last = rows_left <= problem.raster_m;
    tile_n = divide(inside, is_last ? problem.by_last_rows : problem.by_raster_group_rows);
    tile_m = first_row + inside - tile_n * (is_last ? rows_left : problem.raster_m);
}

// ---- Producer: one thread -------------------------------------------------------------------------------------------
// Load one tile after the other, also while the consumers store the previous one. Every other tile goes through K backwards: L2 still holds the
// end of the operands that both tiles read. ClusterM, ClusterN: CTAs of the cluster along M and N; rank: this CTA's.
template <u32 ClusterM = 1, u32 ClusterN = 1>
__device__ __forceinline__ void produce(Ring& ring, const Problem& problem, u32 smem, const Maps& maps, u32 rank = 0) {
    WorkQueue queue(problem, blockIdx.x / (ClusterM * ClusterN));
    WorkUnit unit;
    bool is_backward = true;   // of the tile before: the first one goes forward
    while (queue.next(problem, unit)) {
        u32 tile_m, tile_n;
        tile_position(problem, unit.tile, tile_m, tile_n);
        const Place place = tile_place<ClusterM, ClusterN>(problem, tile_m, tile_n, rank);
        is_backward = problem.alternates && !is_backward;
        u32 k = is_backward ? problem.k_iterations - 1 : 0;
        for (u32 i = 0; i < problem.k_iterations; ++i, k += is_backward ? -1 : 1, ring.advance()) {
            ring.acquire();
            load_stage(problem, ring, smem, maps, k, place);
        }
    }
}

// ---- Consumers ------------------------------------------------------------------------------------------------------

// Release the slot after this warp's wgmmas have read it.
__device__ __forceinline__ void release_slot(Ring& ring, u32 slot, u32 lane) {
    ring.release_used_by_warp(slot, lane);
}

// Multiply `stages` slots, at least one. The products of the first slot replace the sums, which need not be initialized. The products of a slot
// are in flight while the warp waits for the next slot; the slot is released when they are complete. Return the last slot, whose products are
// still in flight.
__device__ __forceinline__ u32 multiply_stages(Accumulators& acc, Ring& ring, u32 stages, u32 smem, u32 warpgroup, u32 lane) {
    ring.wait();
    multiply(acc, smem, ring.stage, warpgroup, false);
    u32 previous = ring.stage;
    ring.advance();
    for (u32 k = 1; k < stages; ++k, ring.advance()) {
        ring.wait();
        multiply(acc, smem, ring.stage, warpgroup, true);
        wgmma_wait_group<1>();
        release_slot(ring, previous, lane);
        previous = ring.stage;
    }
    return previous;
}

// Compute and store one tile after the other. ClusterM, ClusterN: CTAs of the cluster along M and N; rank: this CTA's.
template <u32 ClusterM = 1, u32 ClusterN = 1>
__device__ __forceinline__ void consume(Ring& ring, const Problem& problem, u32 smem, const TensorMap* output_map, const Result& result,
                                        u32 warpgroup, u32 warp, u32 lane, u32 rank = 0) {
    WorkQueue queue(problem, blockIdx.x / (ClusterM * ClusterN));
    WorkUnit unit;
    u32 stores = 0;
    while (queue.next(problem, unit)) {
        u32 tile_m, tile_n;
        tile_position(problem, unit.tile, tile_m, tile_n);
        Place place = tile_place<ClusterM, ClusterN>(problem, tile_m, tile_n, rank);
        place.row0 += warpgroup * WARPGROUP_M;
        Accumulators acc;
        const u32 last = multiply_stages(acc, ring, problem.k_iterations, smem, warpgroup, lane);
        wgmma_wait_group<0>();
        release_slot(ring, last, lane);
        store_tile(acc, stores, problem, result, smem, output_map, place, warpgroup, warp, lane);
    }
    if (lane == 0) cp_async_bulk_wait_group<0>();   // shared memory must outlive TMA's reads of it
}
}  // namespace cudatma

// C = A B, v4: as many CTAs as run at a time, each with one tile after the other. The next tile is loaded while
// this one is stored.
extern "C" __global__ void __launch_bounds__(384, 1)
gemm_v4_f16_rc_128x256x64_w2_s3(
    const __grid_constant__ cudatma::TensorMap a_map,
    const __grid_constant__ cudatma::TensorMap b_map,
    const __grid_constant__ cudatma::TensorMap output_map,
    cudatma::Out* output,
    const __grid_constant__ cudatma::Problem problem) {
    using namespace cudatma;
    extern __shared__ __align__(1024) u8 dynamic_shared[];
    const u32 smem = shared_address(dynamic_shared);
    // Through a shuffle, so that ptxas knows that it is the same in a whole warp.
    const u32 warp_index = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);

    clear_unloaded(problem, smem);
    Ring ring;
    ring.init(smem + FULL_BARRIERS, 1, CONSUMER_WARPS);   // one thread loads; each consumer warp releases a slot
    wait_for_previous_grid();
    if (warp_index >= CONSUMER_WARPS) {
        setmaxnreg_dec<24>();
        if (warp_index == CONSUMER_WARPS && elect_sync()) produce(ring, problem, smem, Maps{&a_map, &b_map});
        __syncwarp();
    } else {
        setmaxnreg_inc<240>();
        consume(ring, problem, smem, &output_map, Result{output}, warp_index / 4, warp_index % 4, laneid());
    }
}
