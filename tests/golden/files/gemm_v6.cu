// cudatma: kernels/gemm_v6.cu.j2 for sm_90a
// config: GemmConfig
//   version = 'v6'
//   dtype = 'float16'
//   layout = 'CR'
//   tile_m = 128
//   tile_n = 256
//   tile_k = 64
//   stages = 3
//   warpgroups = 2
//   cluster_k = 2
// 8 warps consume, 1 produce; a CTA takes 229432 B.
// One stage holds
//    16384 B  a 128 x 64 float16, M-major, 128B swizzle
//    32768 B  b 64 x 256 float16, N-major, 128B swizzle
// Shared memory, by offset
//        0  a, 49152 B
//    49152  b, 98304 B
//   147456  staging, 16384 B
//   163840  cluster_sums, 65536 B
//   229376  cluster_barrier, 8 B
//   229384  full_barriers, 24 B
//   229408  empty_barriers, 24 B

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

// [PTX ISA, griddepcontrol] Wait until the previous kernels of the stream have completed and their writes are visible.
// Return at once unless this is a programmatic dependent launch.
__device__ __forceinline__ void griddepcontrol_wait() {
    asm volatile("griddepcontrol.wait;" : : : "memory");
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
// first. On a fresh barrier, parity 1 counts as completed and parity 0 does not.
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

// [PTX ISA, mbarrier.try_wait] Wait until the phase of this parity has completed. Acquire semantics: afterwards this thread
// sees the bytes that TMA delivered and the earlier writes of the threads that arrived.
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

// [PTX ISA, barrier.cluster] Arrive at the cluster's barrier without ordering memory accesses.
__device__ __forceinline__ void barrier_cluster_arrive_relaxed() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" : : : "memory");
}

// [PTX ISA, st.async] Store four values to `addr` in a CTA of the cluster. Its barrier `bar` counts 16 bytes when they have
// arrived. Both addresses are from mapa_shared_cluster with the same rank, or this CTA's own. Without a cluster launch this is an
// illegal instruction [H200]; __cluster_dims__(1, 1, 1) is enough.
__device__ __forceinline__ void st_async_v4_f32(u32 addr, const float (&value)[4], u32 bar) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];"
                 :
                 : "r"(addr), "f"(value[0]), "f"(value[1]), "f"(value[2]), "f"(value[3]), "r"(bar)
                 : "memory");
}

// [PTX ISA, mbarrier.try_wait] Wait until the phase of this parity has completed, with acquire semantics in the cluster: this
// thread sees what other CTAs sent by st.async.
__device__ __forceinline__ void mbarrier_wait_parity_acquire_cluster(u32 bar, u32 parity) {
    u32 done;
    do {
        asm volatile(
            "{\n"
            ".reg .pred p;\n"
            "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
            "selp.u32 %0, 1, 0, p;\n"
            "}"
            : "=r"(done)
            : "r"(bar), "r"(parity)
            : "memory");
    } while (!done);
}

// [PTX ISA, barrier.cluster] Wait, with acquire semantics, until all threads of the cluster have arrived.
__device__ __forceinline__ void barrier_cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" : : : "memory");
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

// [PTX ISA, prefetch] Prefetch the 128 bytes of a tensor map into the descriptor cache before the first load.
__device__ __forceinline__ void prefetch_tensormap(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" : : "l"(map) : "memory");
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
    __device__ __forceinline__ void acquire(u32 slot) const { mbarrier_wait_parity(empty_barrier(slot), phase ^ 1); }
    __device__ __forceinline__ void acquire() const { acquire(stage); }

    // Producer: arrive once, and let the slot be full when `bytes` more bytes have come. Call it before the loads.
    __device__ __forceinline__ void expect_tx(u32 slot, u32 bytes) const { mbarrier_arrive_expect_tx(get_barrier(slot), bytes); }
    __device__ __forceinline__ void expect_tx(u32 bytes) const { expect_tx(stage, bytes); }

    // Consumer: wait until the slot is full.
    __device__ __forceinline__ void wait(u32 slot) const { mbarrier_wait_parity(get_barrier(slot), phase); }
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

// [PTX ISA, ld] Add four sums of a fragment from shared memory.
__device__ __forceinline__ void add_fragment(float (&sums)[4], u32 smem) {
    float other[4];
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(other[0]), "=f"(other[1]), "=f"(other[2]), "=f"(other[3]) : "r"(smem) : "memory");
#pragma unroll
    for (u32 i = 0; i < 4; ++i) sums[i] += other[i];
}

}  // namespace cudatma

namespace cudatma {

// ---- The tile, as named constants -----------------------------------------------------------------------------------
constexpr u32 TILE_M = 128;     // of a CTA's tile
constexpr u32 TILE_N = 256;
constexpr u32 TILE_K = 64;      // of one stage
constexpr u32 STAGES = 3;
constexpr u32 THREADS = 288;
constexpr u32 CONSUMER_WARPS = 8;
constexpr bool A_IS_K_MAJOR = false, B_IS_K_MAJOR = false;   // else M-major, N-major

// ---- Shared memory: offsets from the base, which is aligned to 1024 bytes --------------------------------------------------
constexpr u32 A = 0;   // 49152 B
constexpr u32 B = 49152;   // 98304 B
constexpr u32 STAGING = 147456;   // 16384 B
constexpr u32 CLUSTER_SUMS = 163840;   // 65536 B
constexpr u32 CLUSTER_BARRIER = 229376;   // 8 B
constexpr u32 FULL_BARRIERS = 229384;   // 24 B

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
__device__ __forceinline__ void wgmma_m64n256k16_f32_f16_ss_tt(float (&d)[32][4], u64 a, u64 b, bool accumulates = true) {
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
        "}, %128, %129, p, 1, 1, 1, 1;\n"
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
            wgmma_m64n256k16_f32_f16_ss_tt(acc[m], advanced(a, operand_offset<A_IS_K_MAJOR, TILE_M>(64 * m, k)),
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
    u32 output_vectors;             // 1: every row of the result is aligned to 16 bytes
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

// The producer thread prefetches the tensor maps before it waits for the previous grid: kernel parameters may be read while that runs.
__device__ __forceinline__ void prefetch_maps(const Maps& maps) {
    if (threadIdx.x != 32 * CONSUMER_WARPS) return;
    prefetch_tensormap(maps.a);
    prefetch_tensormap(maps.b);
}

// ---- Clusters -----------------------------------------------------------------------------------------------------------
constexpr u32 CLUSTER_K = 2;   // CTAs, which divide K
constexpr u32 WARP_TILES = CONSUMER_WARPS;
constexpr u32 OWN = FRAGMENTS_8 / CLUSTER_K;   // fragments along N that a CTA adds up and stores

// ---- Accumulators, and partial sums of them -------------------------------------------------------------------------
// Partial sums travel as whole fragments, 16 bytes a thread, so that both sides use the same addresses.

// ---- Within a cluster: split-K over distributed shared memory --------------------------------------------------------
// CTA r of the cluster adds up OWN of the FRAGMENTS_8 fragments, from r * OWN on; the last CTAs have fewer, or none.
constexpr u32 CLUSTER_FRAGMENT_BYTES = 32 * 16;

__device__ __forceinline__ u32 own_fragments(u32 rank) {
    return rank * OWN < FRAGMENTS_8 ? min(OWN, FRAGMENTS_8 - rank * OWN) : 0;
}

// What the CTA of this rank receives.
__device__ __forceinline__ u32 cluster_sums_bytes(u32 rank) {
    return (CLUSTER_K - 1) * WARP_TILES * FRAGMENTS_16 * own_fragments(rank) * CLUSTER_FRAGMENT_BYTES;
}

// Where a CTA receives the sums of a warp of its `sender`-th peer.
__device__ __forceinline__ u32 cluster_sums(u32 smem, u32 sender, u32 warp_tile, u32 lane) {
    return smem + CLUSTER_SUMS + (sender * WARP_TILES + warp_tile) * FRAGMENTS_16 * OWN * CLUSTER_FRAGMENT_BYTES + lane * 16;
}

// Sends to every peer the sums that the peer adds up, and adds what the peers send to this CTA's own sums, in the order of
// ranks. Returns whether this CTA has rows of the result.
__device__ __forceinline__ bool reduce_cluster(Accumulators& acc, u32 smem, u32 rank, u32 warp_tile, u32 lane) {
    barrier_cluster_wait();   // all CTAs have started and initialized their barriers
#pragma unroll
    for (u32 peer = 0; peer < CLUSTER_K; ++peer) {
        if (peer == rank) continue;
        const u32 target = mapa_shared_cluster(cluster_sums(smem, rank - (rank > peer), warp_tile, lane), peer);
        const u32 barrier = mapa_shared_cluster(smem + CLUSTER_BARRIER, peer);
#pragma unroll
        for (u32 c = 0; c < FRAGMENTS_16; ++c)
#pragma unroll
            for (u32 r = peer * OWN; r < min((peer + 1) * OWN, FRAGMENTS_8); ++r)
                st_async_v4_f32(target + (c * OWN + r - peer * OWN) * CLUSTER_FRAGMENT_BYTES, acc[c][r], barrier);
    }
    if (own_fragments(rank) == 0) return false;
    mbarrier_wait_parity_acquire_cluster(smem + CLUSTER_BARRIER, 0);   // the sums of all peers have arrived
#pragma unroll
    for (u32 r = 0; r < FRAGMENTS_8; ++r) {
        if (r / OWN != rank) continue;
#pragma unroll
        for (u32 sender = 0; sender < CLUSTER_K - 1; ++sender)
#pragma unroll
            for (u32 c = 0; c < FRAGMENTS_16; ++c)
                add_fragment(acc[c][r],
                             cluster_sums(smem, sender, warp_tile, lane) + (c * OWN + r % OWN) * CLUSTER_FRAGMENT_BYTES);
    }
    return true;
}

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
__device__ __forceinline__ void produce(Ring& ring, const Problem& problem, u32 k_begin, u32 k_end, u32 smem,
                                        const Maps& maps, const Place& place) {
    for (u32 k = k_begin; k < k_end; ++k, ring.advance()) {
        ring.acquire();
        load_stage(problem, ring, smem, maps, k, place);
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
}  // namespace cudatma

// C = A B, v6: the CTAs of a cluster divide the K of one tile, send each other their sums, and each stores a part of the
// columns. Else as v3.
extern "C" __global__ void __launch_bounds__(288, 1)
gemm_v6_f16_cr_128x256x64_w2_s3_k2(
    const __grid_constant__ cudatma::TensorMap a_map,
    const __grid_constant__ cudatma::TensorMap b_map,
    cudatma::Out* output,
    const __grid_constant__ cudatma::Problem problem) {
    using namespace cudatma;
    extern __shared__ __align__(1024) u8 dynamic_shared[];
    const u32 smem = shared_address(dynamic_shared);
    // Through a shuffle, so that ptxas knows that it is the same in a whole warp.
    const u32 warp_index = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), warpgroup = warp_index / 4, lane = laneid();
    // The CTAs of a cluster take whole stages of the tile's K in the order of their ranks, as evenly as possible.
    const u32 rank = cluster_ctarank();
    const u32 k_begin = rank * problem.k_iterations / CLUSTER_K, k_end = (rank + 1) * problem.k_iterations / CLUSTER_K;
    u32 tile_m, tile_n;
    tile_position(problem, blockIdx.x / CLUSTER_K, tile_m, tile_n);
    Place place = tile_place(problem, tile_m, tile_n);

    prefetch_maps(Maps{&a_map, &b_map});
    clear_unloaded(problem, smem);
    Ring ring;
    ring.attach(smem + FULL_BARRIERS);
    if (threadIdx.x == 0) {
        mbarrier_init(smem + CLUSTER_BARRIER, 1);
        ring.init_barriers(1, CONSUMER_WARPS);   // one thread loads; each consumer warp releases a slot
        mbarrier_arrive_expect_tx(smem + CLUSTER_BARRIER, cluster_sums_bytes(rank));
    }
    __syncthreads();                    // the barriers are initialized
    barrier_cluster_arrive_relaxed();   // reduce_cluster() waits; fence_mbarrier_init() has ordered the barriers
    griddepcontrol_wait();   // no trigger for the next kernel: clusters that are placed early were slower
    if (warp_index == CONSUMER_WARPS) {
        if (elect_sync()) produce(ring, problem, k_begin, k_end, smem, Maps{&a_map, &b_map}, place);
        __syncwarp();
        return;
    }
    Accumulators acc;
    multiply_stages(acc, ring, k_end - k_begin, smem, warpgroup, lane);
    wgmma_wait_group<0>();
    reduce_cluster(acc, smem, rank, warp_index, lane);
    place.row0 += warpgroup * WARPGROUP_M + warp_index % 4 * 16;
    store_rows<CLUSTER_K>(acc, problem, Result{output}, smem + STAGING + warp_index * WARP_STAGING_BYTES, place, lane, rank);
}
