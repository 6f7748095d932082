// cudatma: kernels/gemm_v2.cu.j2 for sm_90a
// config: GemmConfig
//   version = 'v2'
//   dtype = 'float16'
//   layout = 'CR'
//   tile_m = 128
//   tile_n = 256
//   tile_k = 64
//   stages = 3
//   warpgroups = 2
// 8 warps consume, 0 produce; a CTA takes 163888 B.
// One stage holds
//    16384 B  a 128 x 64 float16, M-major, 128B swizzle
//    32768 B  b 64 x 256 float16, N-major, 128B swizzle

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

// [PTX ISA, Special Registers, %laneid] Return this thread's lane. ptxas rereads the special register instead of keeping the value in a
// register.
__device__ __forceinline__ u32 laneid() {
    u32 lane;
    asm("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
}

// [PTX ISA, elect.sync] Return true in exactly one lane of the warp. All 32 lanes must call this function.
__device__ __forceinline__ bool elect_sync() {
    u32 elected;
    asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(elected));
    return elected != 0;
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

// [PTX ISA, membar / fence, .proxy.async] Order this thread's ordinary accesses to shared memory before later accesses of the
// async proxy: reads by TMA stores and wgmma, and TMA loads that overwrite the data.
__device__ __forceinline__ void fence_proxy_async_shared_cta() {
    asm volatile("fence.proxy.async.shared::cta;" : : : "memory");
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
__device__ __forceinline__ void cp_async_bulk_tensor_3d_load(u32 dst, const TensorMap* map, u32 bar, int c0, int c1, int c2) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cta.global.tile.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%3, %4, %5}], [%2];"
                 :: "r"(dst), "l"(map), "r"(bar), "r"(c0), "r"(c1), "r"(c2) : "memory");
}

// [PTX ISA, ld] Load 16 bytes of shared memory.
__device__ __forceinline__ uint4 ld_shared_v4_b32(u32 smem) {
    uint4 values;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(values.x), "=r"(values.y), "=r"(values.z), "=r"(values.w) : "r"(smem) : "memory");
    return values;
}

// [PTX ISA, st] Store 16 bytes to shared memory.
__device__ __forceinline__ void st_shared_v4_b32(u32 smem, const uint4& values) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};"
                 : : "r"(smem), "r"(values.x), "r"(values.y), "r"(values.z), "r"(values.w) : "memory");
}

// [PTX ISA, stmatrix] Store 8 x 8 matrices of 16-bit elements from a warp's registers. Lanes 8 i to 8 i + 7 pass the 16-byte aligned shared
// addresses of the rows of matrix i. In r[i], lane l holds elements 2 (l % 4) and 2 (l % 4) + 1 of row l / 4. The _trans variants transpose
// each matrix.
__device__ __forceinline__ void stmatrix_x4(u32 addr, const u32 (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 :: "r"(addr), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
}

// [PTX ISA, Asynchronous Warpgroup Level Matrix, Matrix Descriptor] Return the descriptor of an operand in shared memory.
// `swizzle` is 0 for none, 1 for 128B, 2 for 64B and 3 for 32B. (Tensor maps number the swizzles in reverse.) In a K-major operand with a
// swizzle, `stride_bytes` is the distance between groups of 8 rows, and `leading_bytes` is not used. To advance by 16 elements (32 bytes)
// of K, add 2 to the descriptor. In an M-major or N-major (transposed) operand, `stride_bytes` is the distance between groups of 8 elements
// of K, and `leading_bytes` is the distance between groups of 64 elements of M or N.
__device__ __forceinline__ u64 matrix_descriptor(u32 address, u32 leading_bytes, u32 stride_bytes, u32 swizzle) {
    return static_cast<u64>((address & 0x3ffff) >> 4) | static_cast<u64>(leading_bytes >> 4) << 16 |
           static_cast<u64>(stride_bytes >> 4) << 32 | static_cast<u64>(swizzle) << 62;
}

// [PTX ISA, wgmma.fence] Order the warpgroup's earlier register accesses before the wgmmas that follow.
__device__ __forceinline__ void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" : : : "memory");
}

// [PTX ISA, wgmma.commit_group] Commit all wgmmas that are in no group yet, as one group.
__device__ __forceinline__ void wgmma_commit_group() {
    asm volatile("wgmma.commit_group.sync.aligned;" : : : "memory");
}

// [PTX ISA, wgmma.wait_group] Wait until at most the latest Newest (0 to 7) wgmma groups of this warpgroup are pending.
template <u32 Newest>
__device__ __forceinline__ void wgmma_wait_group() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" : : "n"(Newest) : "memory");
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

    // Consumer: arrive once without a fence. Previous instructions must have used all values of the slot, so that no read is in flight. A
    // consumer therefore releases a slot one iteration after it has read the slot.
    __device__ __forceinline__ void release_used(u32 slot) const { mbarrier_arrive(empty_barrier(slot)); }

    // Consumer: call release_used() once for the warp. All lanes must call this function.
    __device__ __forceinline__ void release_used_by_warp(u32 slot, u32 lane) const {
        __syncwarp();
        if (lane == 0) release_used(slot);
    }

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

// Wait for the previous kernel of the stream, then allow the next kernel to start. A kernel must not access global memory before this call.
// The next kernel starts only after the wait, so only this kernel can still be running when the next kernel makes the same call.
__device__ __forceinline__ void wait_for_previous_grid() {
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
}

// A divisor that the host has prepared for dividends below 2^31. divide() takes one multiplication and one shift, whereas an integer
// division takes about 25 instructions.
struct Divisor {
    u32 multiplier, shift;   // multiplier = ceil(2^(31 + shift) / divisor), 2^shift >= divisor
};

__device__ __forceinline__ u32 divide(u32 n, const Divisor& by) { return __umulhi(2 * n, by.multiplier) >> by.shift; }

// ---- Conversions between fp32 and pairs of 16-bit values in a register ----------------------------------------------
__device__ __forceinline__ u32 to_pair(float low, float high) {
    u32 d;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
}

}  // namespace cudatma

namespace cudatma {

// ---- Tile -----------------------------------------------------------------------------------------------------------
constexpr u32 TILE_M = 128, TILE_N = 256;   // rows and columns of C per CTA
constexpr u32 TILE_K = 64;   // elements of K per stage
constexpr u32 STAGES = 3;
constexpr u32 THREADS = 256;
constexpr u32 CONSUMER_WARPS = 8;
constexpr bool A_IS_K_MAJOR = false, B_IS_K_MAJOR = false;   // otherwise M-major or N-major

// ---- Shared memory: byte offsets from a base that is 1024-byte aligned ----------------------------------------------
constexpr u32 A = 0;                          // 49152 B
constexpr u32 B = 49152;                      // 98304 B
constexpr u32 STAGING = 147456;               // 16384 B
constexpr u32 FULL_BARRIERS = 163840;         // 24 B

// ---- Slots: one per stage and operand -------------------------------------------------------------------------------
constexpr u32 ELEMENT_BYTES = 2;   // bytes per element of A and B
constexpr u32 SPAN_BYTES = 128, SPAN = SPAN_BYTES / ELEMENT_BYTES;   // row of the 128-byte swizzle in bytes and in elements
constexpr u32 MN_BOX_BYTES = TILE_K * SPAN_BYTES;   // bytes per box of an M-major or N-major operand (SPAN x TILE_K)
constexpr u32 B_SLOT_N = 256;   // columns of B in a slot, which holds whole boxes of an N-major operand
constexpr u32 A_STAGE_BYTES = TILE_M * TILE_K * ELEMENT_BYTES, B_STAGE_BYTES = B_SLOT_N * TILE_K * ELEMENT_BYTES;
constexpr u32 WARPGROUPS = 2, WARPGROUP_M = TILE_M / WARPGROUPS;   // warpgroups per tile; rows per warpgroup
constexpr u32 SWIZZLE_128B = 1, SWIZZLE_REPEAT_BYTES = 8 * SPAN_BYTES;   // fields of a matrix descriptor

// ---- Products -------------------------------------------------------------------------------------------------------
// In each 16 x 8 fragment, a thread holds columns 2 (lane % 4) and 2 (lane % 4) + 1 of rows lane / 4 and lane / 4 + 8.
constexpr u32 FRAGMENTS_16 = WARPGROUP_M / 64, FRAGMENTS_8 = TILE_N / 8;   // fragments per warp along M and along N
constexpr u32 FRAGMENT_STRIDE_M = 64;   // rows from one fragment to the next

// The accumulators of a warp are fragments of 16 x 8 values. Each lane holds four values of each fragment.
typedef float Accumulators[FRAGMENTS_16][FRAGMENTS_8][4];
constexpr u32 MMA_K = 32 / ELEMENT_BYTES;   // elements of K per wgmma

// [PTX ISA, wgmma.mma_async] Issue d += a b for a warpgroup, or d = a b if `accumulates` is false. a and b are matrix descriptors. No other
// instruction may access d between wgmma_fence and wgmma_wait_group.
__device__ __forceinline__ void wgmma_m64n256k16_f32_f16_ss_tt(float (&d)[32][4], u64 a, u64 b, bool accumulates = true) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
        "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
        "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
        "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
        "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
        "}, %128, %129, p, 1, 1, 1, 1;\n}"
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

// Return the offset in bytes of element k of row `row` in an operand's slot.
template <bool IsKMajor, u32 Rows>
__device__ __forceinline__ constexpr u32 operand_offset(u32 row, u32 k) {
    return IsKMajor ? (k / SPAN * Rows + row) * SPAN_BYTES + ELEMENT_BYTES * (k % SPAN) : row / SPAN * MN_BOX_BYTES + k * SPAN_BYTES;
}

// Return the matrix descriptor of an operand's slot at `address`.
template <bool IsKMajor>
__device__ __forceinline__ u64 operand_descriptor(u32 address) {
    return matrix_descriptor(address, IsKMajor ? 16 : MN_BOX_BYTES, SWIZZLE_REPEAT_BYTES, SWIZZLE_128B);
}

// Advance the address of a descriptor by `bytes`. One addition suffices, because the low bits of a descriptor are the address in units of
// 16 bytes, and a shared address cannot overflow them.
__device__ __forceinline__ u64 advanced(u64 descriptor, u32 bytes) {
    return (descriptor & 0xffffffff00000000) | (static_cast<u32>(descriptor) + bytes / 16);
}

// Return the matrix descriptor of a warpgroup's rows of A in a slot.
__device__ __forceinline__ u64 a_descriptor(u32 smem, u32 slot, u32 warpgroup) {
    const u32 rows = operand_offset<A_IS_K_MAJOR, TILE_M>(warpgroup * WARPGROUP_M, 0);
    return advanced(operand_descriptor<A_IS_K_MAJOR>(smem + A + rows), slot * A_STAGE_BYTES);
}

// Return the matrix descriptor of B in a slot.
__device__ __forceinline__ u64 b_descriptor(u32 smem, u32 slot) {
    return advanced(operand_descriptor<B_IS_K_MAJOR>(smem + B), slot * B_STAGE_BYTES);
}

// Issue the MMAs of a slot as one commit group. The products are added to the accumulators, or replace them if `accumulates` is false.
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

// ---- Problem and results --------------------------------------------------------------------------------------------
typedef u16 Out;   // element of C (its bits)

// The launch parameters that are neither tensor maps nor pointers.
struct Problem {
    u32 m;                          // number of rows of the result
    u32 n;                          // number of columns of the result
    u32 tiles_m;                    // number of output tiles along M
    u32 tiles_n;                    // number of output tiles along N; a CTA or cluster computes one tile
    u32 raster_m;                   // number of rows of tiles per raster group
    u32 k_iterations;               // number of stages per tile
    u32 output_vectors;             // 1: every row of the result is aligned to 16 bytes
    u32 matrix_tiles_m;             // number of tiles along M per matrix of the batch
    u32 a_box_rows;                 // number of rows per box of A
    u32 stage_bytes;                // bytes that the boxes of a stage deliver
    Divisor by_raster_group;        // divides by the number of tiles per raster group
    Divisor by_raster_group_rows;   // divides by raster_m
    Divisor by_last_rows;           // divides by the number of rows of tiles in the last raster group
    Divisor by_matrix_tiles_m;      // divides by matrix_tiles_m
    u64 output_pitch;               // elements from one row of the result to the next
    u64 output_batch;               // elements from one matrix of the result to the next
};

// The first row and column of a tile or of a part of a tile, and the index of its matrix in the batch.
struct Place {
    u32 row0, column0, batch;
};

// Return the position of a tile. tile_m runs over all matrices of the batch.
__device__ __forceinline__ Place tile_place(const Problem& problem, u32 tile_m, u32 tile_n) {
    const u32 batch = divide(tile_m, problem.by_matrix_tiles_m);
    return Place{(tile_m - batch * problem.matrix_tiles_m) * TILE_M, tile_n * TILE_N, batch};
}

// The output and the operands of the epilogue, in global memory.
struct Result {
    Out* output;
};

// Store 16 bytes of a row of the result. Elements outside the result are not stored.
template <typename Element>
__device__ __forceinline__ void store_vector(const Problem& problem, Element* output, uint4 values, u32 row, u32 column) {
    constexpr u32 COLUMNS = 16 / sizeof(Element);
    if (row >= problem.m || column >= problem.n) return;
    Element* target = output + row * problem.output_pitch + column;
    if (problem.output_vectors && column + COLUMNS <= problem.n) {
        *(uint4*)target = values;
    } else {   // an unaligned row, or the last columns
        const u32 words[4] = {values.x, values.y, values.z, values.w};
#pragma unroll
        for (u32 i = 0; i < COLUMNS; ++i) {
            if (column + i >= problem.n) continue;
            if constexpr (COLUMNS == 4) target[i] = __uint_as_float(words[i]);
            else target[i] = (Element)(words[i / 2] >> (i % 2 * 16));
        }
    }
}

// ---- Stores to C through staging rows in shared memory --------------------------------------------------------------
constexpr u32 WARP_STAGING_BYTES = 16 * SPAN_BYTES;   // bytes of a warp's 16 staging rows
constexpr u32 STAGED_N = 64;   // columns that a warp stages at a time

// Write at most STAGED_N columns of a warp's 16 rows, beginning at fragment n, to shared memory in the 128-byte swizzle.
__device__ __forceinline__ void stage_fragments(const float (&acc)[FRAGMENTS_8][4], u32 staging, u32 n, u32 lane) {
    const u32 row = lane % 16;
#pragma unroll
    for (u32 i = 0; i < min(STAGED_N / 8, FRAGMENTS_8 - n); i += 2) {   // 16 columns
        const float(&low)[4] = acc[n + i], (&high)[4] = acc[n + i + 1];
        const u32 pairs[4] = {to_pair(low[0], low[1]), to_pair(low[2], low[3]), to_pair(high[0], high[1]), to_pair(high[2], high[3])};
        stmatrix_x4(staging + row * SPAN_BYTES + ((i + lane / 16) ^ (row & 7)) * 16, pairs);
    }
}

// Copy a warp's rows to its staging rows, and write them to C with 16-byte stores. `place` is the position of the warp's part.
__device__ __forceinline__ void store_rows(Accumulators& acc, const Problem& problem, const Result& result, u32 staging, const Place& place,
                                           u32 lane) {
    constexpr u32 VECTORS = STAGED_N * sizeof(Out) / 16, ROWS = 32 / VECTORS;   // vectors per row; rows that a warp stores at a time
    Out* output = result.output + place.batch * problem.output_batch;
#pragma unroll
    for (u32 m = 0; m < FRAGMENTS_16; ++m)
#pragma unroll
        for (u32 n = 0; n < FRAGMENTS_8; n += STAGED_N / 8) {
            __syncwarp();   // staging overwrites the previous columns, which all lanes must have read
            stage_fragments(acc[m], staging, n, lane);
            __syncwarp();
#pragma unroll
            for (u32 i = 0; i < 16; i += ROWS) {
                const u32 row = i + lane / VECTORS, vector = lane % VECTORS, column = 8 * n + 16 / sizeof(Out) * vector;
                if (column >= TILE_N) continue;   // the last part may be narrower
                store_vector(problem, output, ld_shared_v4_b32(staging + row * SPAN_BYTES + (vector ^ (row & 7)) * 16),
                             place.row0 + FRAGMENT_STRIDE_M * m + row, place.column0 + column);
            }
        }
}

using Ring = TmaPipeline<STAGES>;

// ---- Loads: TMA fills elements outside the tensors with zeros -------------------------------------------------------
// Load a stage of one operand. The boxes of a K-major operand have SPAN elements of K and all rows of the tile. The boxes of an M-major or
// N-major operand have SPAN rows and all of the stage's K. The boxes of A have no rows beyond the end of A, because TMA takes longer to
// fill rows than to read them.
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

// Zero the rows of A's slots that TMA does not load, because wgmma reads them. All threads must call this function and then synchronize.
__device__ __forceinline__ void clear_unloaded(const Problem& problem, u32 smem) {
    if (problem.m >= (A_IS_K_MAJOR ? TILE_M : SPAN)) return;
    constexpr u32 ROW_BYTES = TILE_K < SPAN ? TILE_K * ELEMENT_BYTES : SPAN_BYTES;   // K-major
    for (u32 offset = 16 * threadIdx.x; offset < STAGES * A_STAGE_BYTES; offset += 16 * THREADS) {
        const u32 row = A_IS_K_MAJOR ? offset / ROW_BYTES % TILE_M : (offset / 16 ^ offset / SPAN_BYTES) % 8 * 8;   // swizzled
        if (row >= problem.a_box_rows) st_shared_v4_b32(smem + A + offset, uint4{});
    }
    fence_proxy_async_shared_cta();   // wgmma reads the zeros through the async proxy
}

struct Maps {
    const TensorMap *a, *b;
};

// Load stage k of a tile into the current slot. Call this function from one thread.
__device__ __forceinline__ void load_stage(const Problem& problem, const Ring& ring, u32 smem, const Maps& maps, u32 k, const Place& place) {
    ring.expect_tx(problem.stage_bytes);
    load_box<A_IS_K_MAJOR, TILE_M>(smem + A + ring.stage * A_STAGE_BYTES, maps.a, ring.get_barrier(), k * TILE_K, place.row0, place.batch);
    load_box<B_IS_K_MAJOR, TILE_N>(smem + B + ring.stage * B_STAGE_BYTES, maps.b, ring.get_barrier(), k * TILE_K, place.column0, place.batch);
}

// Set the position of a tile. Tiles are numbered in groups of raster_m rows of tiles, and column by column within a group. CTAs that run at
// the same time therefore share operands in L2.
__device__ __forceinline__ void tile_position(const Problem& problem, u32 tile, u32& tile_m, u32& tile_n) {
    const u32 raster_group = divide(tile, problem.by_raster_group), first_row = raster_group * problem.raster_m;
    const u32 inside = tile - first_row * problem.tiles_n, rows_left = problem.tiles_m - first_row;
    const bool is_last = rows_left <= problem.raster_m;
    tile_n = divide(inside, is_last ? problem.by_last_rows : problem.by_raster_group_rows);
    tile_m = first_row + inside - tile_n * (is_last ? rows_left : problem.raster_m);
}
}  // namespace cudatma

// C = A B, version v2. TMA fills a ring of slots. Each CTA computes one tile. All warps multiply, and one thread of the first warp also
// loads.
extern "C" __global__ void __launch_bounds__(256, 1)
gemm_v2_f16_cr_128x256x64_w2_s3(
    const __grid_constant__ cudatma::TensorMap a_map,
    const __grid_constant__ cudatma::TensorMap b_map,
    cudatma::Out* output,
    const __grid_constant__ cudatma::Problem problem) {
    using namespace cudatma;
    extern __shared__ __align__(1024) u8 dynamic_shared[];
    const u32 smem = shared_address(dynamic_shared);
    // The shuffle shows ptxas that the value is uniform within a warp.
    const u32 warp_index = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), warpgroup = warp_index / 4, lane = laneid();
    u32 tile_m, tile_n;
    tile_position(problem, blockIdx.x, tile_m, tile_n);
    Place place = tile_place(problem, tile_m, tile_n);

    clear_unloaded(problem, smem);
    Ring reads;
    reads.init(smem + FULL_BARRIERS, 1, CONSUMER_WARPS);   // one thread fills a slot, and each warp releases the slot
    wait_for_previous_grid();
    Ring writes = reads;
    if (warp_index == 0) {
        for (u32 k = 0; k < min(STAGES, problem.k_iterations); ++k, writes.advance())
            if (elect_sync()) load_stage(problem, writes, smem, Maps{&a_map, &b_map}, k, place);
    }

    // One thread of the first warp refills a slot after all warps have released it. Before this divergent branch, the warps wait for their
    // wgmmas. If a wgmma were in flight across the branch, ptxas would serialize all wgmmas.
    Accumulators acc;
    for (u32 k = 0; k < problem.k_iterations; ++k, reads.advance()) {
        reads.wait();
        multiply(acc, smem, reads.stage, warpgroup, k > 0);
        wgmma_wait_group<0>();
        reads.release_used_by_warp(reads.stage, lane);
        if (warp_index == 0 && k + STAGES < problem.k_iterations) {
            if (elect_sync()) {
                writes.acquire();
                load_stage(problem, writes, smem, Maps{&a_map, &b_map}, k + STAGES, place);
            }
            __syncwarp();
            writes.advance();
        }
    }
    place.row0 += warpgroup * WARPGROUP_M + warp_index % 4 * 16;
    store_rows(acc, problem, Result{output}, smem + STAGING + warp_index * WARP_STAGING_BYTES, place, lane);
}
