typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// [PTX ISA, griddepcontrol] Wait until the previous kernels of the stream have completed and their writes are visible. Without programmatic
// dependent launch, this function returns immediately.
__device__ __forceinline__ void griddepcontrol_wait() {
    asm volatile("griddepcontrol.wait;" : : : "memory");
}

// [PTX ISA, griddepcontrol] Allow the next kernel to start once every CTA has called this function or exited.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
    asm volatile("griddepcontrol.launch_dependents;" : : : "memory");
}

// Used in all_reduce, marlin_mma_sync, marlin_wgmma, experts_wgmma_down
// ---- Conversions between fp32 and pairs of 16-bit values in a register ----------------------------------------------
__device__ __forceinline__ float low_to_float(u32 pair) {
    float d;
    asm("{ .reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l; }" : "=f"(d) : "r"(pair));
    return d;
}

// Used in attention_scalar, marlin_skinny, experts_skinny_up, experts_sum
// ---- Conversions between fp32 and pairs of 16-bit values in a register ----------------------------------------------
__device__ __forceinline__ float low_to_float(u32 pair) {
    return __uint_as_float(pair << 16);
}

// Used in all_reduce, marlin_mma_sync
__device__ __forceinline__ float high_to_float(u32 pair) {
    float d;
    asm("{ .reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, h; }" : "=f"(d) : "r"(pair));
    return d;
}

// Used in attention_scalar, marlin_skinny, experts_skinny_up, experts_sum
__device__ __forceinline__ float high_to_float(u32 pair) {
    return __uint_as_float(pair & 0xffff0000u);
}

// Used in all_reduce, marlin_mma_sync, marlin_wgmma, experts_wgmma_down
__device__ __forceinline__ u32 to_pair(float low, float high) {
    u32 d;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
}

// Used in attention_scalar, marlin_skinny, experts_skinny_up, experts_sum
__device__ __forceinline__ u32 to_pair(float low, float high) {
    u32 d;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
}

// Used in attention_a1, attention_a2, attention_a3, attention_a4, attention_mma_sync, attention_decode, gemm_v5
// ---- Conversions between fp32 and pairs of 16-bit values in a register ----------------------------------------------
__device__ __forceinline__ u32 to_pair(float low, float high) {
    u32 d;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
}

// Used in gemm_v1, gemm_v2, gemm_v3, gemm_v4, gemm_v6, gemm_v7, gemm_mma_sync
// ---- Conversions between fp32 and pairs of 16-bit values in a register ----------------------------------------------
__device__ __forceinline__ u32 to_pair(float low, float high) {
    u32 d;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
}

// Wait for the previous kernel of the stream, then allow the next kernel to start. A kernel must not access global memory before this call.
// Because the next kernel starts only after this wait, only this kernel can still be running when the next kernel makes the same call.
__device__ __forceinline__ void wait_for_previous_grid() {
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
}

// A divisor prepared by the host for dividends below 2^31. divide() takes one multiplication and one shift, whereas an integer division
// takes about 25 instructions.
struct Divisor {
    u32 multiplier, shift;   // multiplier = ceil(2^(31 + shift) / divisor), 2^shift >= divisor
};

__device__ __forceinline__ u32 divide(u32 n, const Divisor& by) { return __umulhi(2 * n, by.multiplier) >> by.shift; }

// [PTX ISA, cvta] Return the 32-bit shared-memory address of a generic pointer.
__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// [PTX ISA, Special Registers, %laneid] Return this thread's lane. ptxas rereads the special register at each use.
__device__ __forceinline__ u32 laneid() {
    u32 lane;
    asm("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
}

// [PTX ISA, bar] Wait at named barrier `id` until `threads` threads, in whole warps, have arrived. __syncthreads() uses barrier 0.
__device__ __forceinline__ void bar_sync(u32 id, u32 threads) {
    asm volatile("bar.sync %0, %1;" : : "r"(id), "r"(threads) : "memory");
}

// [PTX ISA, membar / fence, .proxy.async] Order this thread's ordinary accesses to shared memory before later accesses through
// the async proxy: reads by TMA stores and wgmma, and TMA loads that overwrite the data.
__device__ __forceinline__ void fence_proxy_async_shared_cta() {
    asm volatile("fence.proxy.async.shared::cta;" : : : "memory");
}

// [PTX ISA, cp.async] Copy 16 bytes from global memory to shared-memory address `dst`, bypassing L1. Only the first `src_bytes` (0 to 16)
// bytes are read, and the other bytes become zero. Both addresses must be 16-byte aligned.
__device__ __forceinline__ void cp_async_16(u32 dst, const void* src, u32 src_bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :: "r"(dst), "l"(__cvta_generic_to_global(src)), "r"(src_bytes) : "memory");
}

// [PTX ISA, cp.async.commit_group] Commit all cp.async operations of this thread that have not been committed yet, as one cp.async group.
__device__ __forceinline__ void cp_async_commit_group() {
    asm volatile("cp.async.commit_group;" : : : "memory");
}

// [PTX ISA, cp.async.wait_group] Wait until all but the last Pending of this thread's cp.async groups have completed.
template <u32 Pending>
__device__ __forceinline__ void cp_async_wait_group() {
    asm volatile("cp.async.wait_group %0;" : : "n"(Pending) : "memory");
}

// [PTX ISA, ld] Load 16 bytes of shared memory.
__device__ __forceinline__ uint4 ld_shared_v4_b32(u32 smem) {
    uint4 values;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(values.x), "=r"(values.y), "=r"(values.z), "=r"(values.w) : "r"(smem) : "memory");
    return values;
}

// [PTX ISA, stmatrix] Store 8 x 8 matrices of 16-bit elements from a warp's registers. Lanes 8 i to 8 i + 7 pass the 16-byte aligned
// shared-memory addresses of the rows of matrix i. In r[i], lane l holds elements 2 (l % 4) and 2 (l % 4) + 1 of row l / 4. The _trans
// variants transpose each matrix.
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

// [PTX ISA, wgmma.commit_group] Commit all wgmmas that have not been committed yet, as one wgmma group.
__device__ __forceinline__ void wgmma_commit_group() {
    asm volatile("wgmma.commit_group.sync.aligned;" : : : "memory");
}

// [PTX ISA, wgmma.wait_group] Wait until at most the latest Newest (0 to 7) wgmma groups of this warpgroup are pending.
template <u32 Newest>
__device__ __forceinline__ void wgmma_wait_group() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" : : "n"(Newest) : "memory");
}

// [PTX ISA, ex2] Return 2^x.
__device__ __forceinline__ float ex2_approx_ftz(float x) {
    float y;
    asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Call bar_sync() at named barrier First + index, where index < Count. The recursion makes each barrier number a constant, because ptxas
// reserves all 16 barriers if the number is unknown at compile time.
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

// [PTX ISA, Tensor-map] The 128 opaque bytes of a tensor map, which cuTensorMapEncode* fills. A kernel takes a tensor map as a parameter of
// type `const __grid_constant__ TensorMap`.
struct alignas(64) TensorMap {
    u8 bytes[128];
};

// [PTX ISA, elect.sync] Return true in exactly one lane of the warp. All 32 lanes must call this function.
__device__ __forceinline__ bool elect_sync() {
    u32 elected;
    asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(elected));
    return elected != 0;
}

// [PTX ISA, mbarrier.init] Initialize the barrier at shared-memory address `bar` (8 bytes, 8-byte aligned) for `count` arrivals per phase.
// Before other threads use the barrier, this thread must call fence_mbarrier_init(), and then all threads of the CTA or cluster must
// synchronize.
__device__ __forceinline__ void mbarrier_init(u32 bar, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" : : "r"(bar), "r"(count) : "memory");
}

// [PTX ISA, mbarrier.arrive] Arrive once with release semantics, which make this thread's earlier writes visible to waiting threads.
__device__ __forceinline__ void mbarrier_arrive(u32 bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" : : "r"(bar) : "memory");
}

// [PTX ISA, mbarrier.arrive] Increase the number of bytes that the current phase expects by `bytes`, and arrive once.
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
// The wait has acquire semantics. Afterward, the bytes that TMA delivered and the earlier writes of the threads that arrived are visible to
// this thread.
__device__ __forceinline__ void mbarrier_wait_parity(u32 bar, u32 parity) {
    while (!mbarrier_try_wait_parity(bar, parity)) {
    }
}

// [PTX ISA, membar / fence] Make this thread's mbarrier.init visible to the async proxy and the cluster.
__device__ __forceinline__ void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" : : : "memory");
}

// [PTX ISA, cp.async.bulk.tensor] Load the box of `map` that begins at element (c0, c1, ...), where c0 is the innermost coordinate, to
// shared-memory address `dst`. Call this function from one thread. Barrier `bar` counts the bytes of the whole box, because TMA also fills
// elements outside the tensor. `dst` must be 128-byte aligned (1024-byte aligned with the 128-byte swizzle).
__device__ __forceinline__ void cp_async_bulk_tensor_4d_load(u32 dst, const TensorMap* map, u32 bar, int c0, int c1, int c2, int c3) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cta.global.tile.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%3, %4, %5, %6}], [%2];"
                 :: "r"(dst), "l"(map), "r"(bar), "r"(c0), "r"(c1), "r"(c2), "r"(c3) : "memory");
}

// Used in attention_a2, attention_a3, attention_decode, gemm_v2, gemm_v3, marlin_mma_sync
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
    u32 base;    // shared-memory address of full[Stages], then empty[Stages]; 8 bytes each
    u32 stage;   // this thread's current slot
    u32 phase;   // parity of the current lap

    // Attach to the ring, initialize its barriers, and call __syncthreads(). All threads of the CTA must call this function. In a cluster,
    // all CTAs must also synchronize before a CTA uses the barriers of another.
    __device__ __forceinline__ void init(u32 base_address, u32 producer_arrivals, u32 consumer_arrivals) {
        attach(base_address);
        if (threadIdx.x == 0 && threadIdx.y == 0 && threadIdx.z == 0) init_barriers(producer_arrivals, consumer_arrivals);
        __syncthreads();
    }

    // Start at slot 0 of the ring whose barriers are at base_address, which must be 8-byte aligned. This function does not access the
    // barriers.
    __device__ __forceinline__ void attach(u32 base_address) {
        base = base_address;
        stage = 0;
        phase = 0;
    }

    // Initialize the barriers. One thread must call this function after attach(), and may use the ring at once. Other threads may use the
    // ring after the CTA or the cluster has synchronized. `producer_arrivals` is the number of calls to expect_tx() or arrive() that fill a
    // slot. `consumer_arrivals` is the number of calls to release*(), in all CTAs of the cluster, that free a slot.
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

    // Producer: wait until the consumers have released the slot. In the first lap, this function returns immediately because the phase with
    // parity 1 of a new barrier counts as completed.
    __device__ __forceinline__ void acquire(u32 slot) const { mbarrier_wait_parity(empty_barrier(slot), phase ^ 1); }
    __device__ __forceinline__ void acquire() const { acquire(stage); }

    // Producer: arrive once and expect `bytes` bytes. Call this function before the loads.
    __device__ __forceinline__ void expect_tx(u32 slot, u32 bytes) const { mbarrier_arrive_expect_tx(get_barrier(slot), bytes); }
    __device__ __forceinline__ void expect_tx(u32 bytes) const { expect_tx(stage, bytes); }

    // Consumer: wait until the slot is full.
    __device__ __forceinline__ void wait(u32 slot) const { mbarrier_wait_parity(get_barrier(slot), phase); }
    __device__ __forceinline__ void wait() const { wait(stage); }

    // Consumer: arrive once without a fence. Previous instructions must have used all values of the slot, so that no read is in flight.
    // Consumers therefore release a slot one iteration after the iteration that read it.
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

// Used in attention_a4
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
    u32 base;    // shared-memory address of full[Stages], then empty[Stages]; 8 bytes each
    u32 stage;   // this thread's current slot
    u32 phase;   // parity of the current lap

    // Attach to the ring, initialize its barriers, and call __syncthreads(). All threads of the CTA must call this function. In a cluster,
    // all CTAs must also synchronize before a CTA uses the barriers of another.
    __device__ __forceinline__ void init(u32 base_address, u32 producer_arrivals, u32 consumer_arrivals) {
        attach(base_address);
        if (threadIdx.x == 0 && threadIdx.y == 0 && threadIdx.z == 0) init_barriers(producer_arrivals, consumer_arrivals);
        __syncthreads();
    }

    // Start at slot 0 of the ring whose barriers are at base_address, which must be 8-byte aligned. This function does not access the
    // barriers.
    __device__ __forceinline__ void attach(u32 base_address) {
        base = base_address;
        stage = 0;
        phase = 0;
    }

    // Initialize the barriers. One thread must call this function after attach(), and may use the ring at once. Other threads may use the
    // ring after the CTA or the cluster has synchronized. `producer_arrivals` is the number of calls to expect_tx() or arrive() that fill a
    // slot. `consumer_arrivals` is the number of calls to release*(), in all CTAs of the cluster, that free a slot.
    __device__ __forceinline__ void init_barriers(u32 producer_arrivals, u32 consumer_arrivals) const {
        for (u32 slot = 0; slot < Stages; ++slot) {
            mbarrier_init(get_barrier(slot), producer_arrivals);
            mbarrier_init(empty_barrier(slot), consumer_arrivals);
        }
        fence_mbarrier_init();
    }

    // Initialize a ring without `empty` barriers, which takes 8 * Stages bytes. One thread must call this function instead of
    // init_barriers(). acquire() and release*() must not be called; the producer must determine in another way when a slot is free.
    __device__ __forceinline__ void init_full_barriers(u32 producer_arrivals) const {
        for (u32 slot = 0; slot < Stages; ++slot) mbarrier_init(get_barrier(slot), producer_arrivals);
        fence_mbarrier_init();
    }

    // Return the barrier that counts the bytes of a slot's loads.
    __device__ __forceinline__ u32 get_barrier(u32 slot) const { return base + 8 * slot; }
    __device__ __forceinline__ u32 get_barrier() const { return get_barrier(stage); }

    // Return the barrier on which the consumers of a slot arrive.
    __device__ __forceinline__ u32 empty_barrier(u32 slot) const { return base + 8 * (Stages + slot); }
    __device__ __forceinline__ u32 empty_barrier() const { return empty_barrier(stage); }

    // Producer: wait until the consumers have released the slot. In the first lap, this function returns immediately because the phase with
    // parity 1 of a new barrier counts as completed.
    __device__ __forceinline__ void acquire(u32 slot) const { mbarrier_wait_parity(empty_barrier(slot), phase ^ 1); }
    __device__ __forceinline__ void acquire() const { acquire(stage); }

    // Producer: arrive once and expect `bytes` bytes. Call this function before the loads.
    __device__ __forceinline__ void expect_tx(u32 slot, u32 bytes) const { mbarrier_arrive_expect_tx(get_barrier(slot), bytes); }
    __device__ __forceinline__ void expect_tx(u32 bytes) const { expect_tx(stage, bytes); }

    // Producer: arrive once after ordinary stores to the slot.
    __device__ __forceinline__ void arrive(u32 slot) const { mbarrier_arrive(get_barrier(slot)); }
    __device__ __forceinline__ void arrive() const { arrive(stage); }

    // Consumer: wait until the slot is full.
    __device__ __forceinline__ void wait(u32 slot) const { mbarrier_wait_parity(get_barrier(slot), phase); }
    __device__ __forceinline__ void wait() const { wait(stage); }

    // Consumer: arrive once without a fence. Previous instructions must have used all values of the slot, so that no read is in flight.
    // Consumers therefore release a slot one iteration after the iteration that read it.
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

// Used in attention_mma_sync, transpose, ragged_copy, tile_copy, permute_columns, dequantize
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
    u32 base;    // shared-memory address of full[Stages], then empty[Stages]; 8 bytes each
    u32 stage;   // this thread's current slot
    u32 phase;   // parity of the current lap

    // Attach to the ring, initialize its barriers, and call __syncthreads(). All threads of the CTA must call this function. In a cluster,
    // all CTAs must also synchronize before a CTA uses the barriers of another.
    __device__ __forceinline__ void init(u32 base_address, u32 producer_arrivals, u32 consumer_arrivals) {
        attach(base_address);
        if (threadIdx.x == 0 && threadIdx.y == 0 && threadIdx.z == 0) init_barriers(producer_arrivals, consumer_arrivals);
        __syncthreads();
    }

    // Start at slot 0 of the ring whose barriers are at base_address, which must be 8-byte aligned. This function does not access the
    // barriers.
    __device__ __forceinline__ void attach(u32 base_address) {
        base = base_address;
        stage = 0;
        phase = 0;
    }

    // Initialize the barriers. One thread must call this function after attach(), and may use the ring at once. Other threads may use the
    // ring after the CTA or the cluster has synchronized. `producer_arrivals` is the number of calls to expect_tx() or arrive() that fill a
    // slot. `consumer_arrivals` is the number of calls to release*(), in all CTAs of the cluster, that free a slot.
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

    // Producer: wait until the consumers have released the slot. In the first lap, this function returns immediately because the phase with
    // parity 1 of a new barrier counts as completed.
    __device__ __forceinline__ void acquire(u32 slot) const { mbarrier_wait_parity(empty_barrier(slot), phase ^ 1); }
    __device__ __forceinline__ void acquire() const { acquire(stage); }

    // Producer: arrive once and expect `bytes` bytes. Call this function before the loads.
    __device__ __forceinline__ void expect_tx(u32 slot, u32 bytes) const { mbarrier_arrive_expect_tx(get_barrier(slot), bytes); }
    __device__ __forceinline__ void expect_tx(u32 bytes) const { expect_tx(stage, bytes); }

    // Consumer: wait until the slot is full.
    __device__ __forceinline__ void wait(u32 slot) const { mbarrier_wait_parity(get_barrier(slot), phase); }
    __device__ __forceinline__ void wait() const { wait(stage); }

    // Consumer: arrive once after reading the slot. The fence orders the reads before the arrival. Without it, ptxas may issue the arrival
    // first, and TMA could refill the slot while the reads are in flight.
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

// Used in window_copy, run_copy, gather_boxes, im2col, rows
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
    u32 base;    // shared-memory address of full[Stages], then empty[Stages]; 8 bytes each
    u32 stage;   // this thread's current slot
    u32 phase;   // parity of the current lap

    // Start at slot 0 of the ring whose barriers are at base_address, which must be 8-byte aligned. This function does not access the
    // barriers.
    __device__ __forceinline__ void attach(u32 base_address) {
        base = base_address;
        stage = 0;
        phase = 0;
    }

    // Initialize a ring without `empty` barriers, which takes 8 * Stages bytes. One thread must call this function instead of
    // init_barriers(). acquire() and release*() must not be called; the producer must determine in another way when a slot is free.
    __device__ __forceinline__ void init_full_barriers(u32 producer_arrivals) const {
        for (u32 slot = 0; slot < Stages; ++slot) mbarrier_init(get_barrier(slot), producer_arrivals);
        fence_mbarrier_init();
    }

    // Return the barrier that counts the bytes of a slot's loads.
    __device__ __forceinline__ u32 get_barrier(u32 slot) const { return base + 8 * slot; }
    __device__ __forceinline__ u32 get_barrier() const { return get_barrier(stage); }

    // Consumer: wait until the slot is full.
    __device__ __forceinline__ void wait(u32 slot) const { mbarrier_wait_parity(get_barrier(slot), phase); }
    __device__ __forceinline__ void wait() const { wait(stage); }

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

// Used in broadcast
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
    u32 base;    // shared-memory address of full[Stages], then empty[Stages]; 8 bytes each
    u32 stage;   // this thread's current slot
    u32 phase;   // parity of the current lap

    // Start at slot 0 of the ring whose barriers are at base_address, which must be 8-byte aligned. This function does not access the
    // barriers.
    __device__ __forceinline__ void attach(u32 base_address) {
        base = base_address;
        stage = 0;
        phase = 0;
    }

    // Initialize the barriers. One thread must call this function after attach(), and may use the ring at once. Other threads may use the
    // ring after the CTA or the cluster has synchronized. `producer_arrivals` is the number of calls to expect_tx() or arrive() that fill a
    // slot. `consumer_arrivals` is the number of calls to release*(), in all CTAs of the cluster, that free a slot.
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

    // Producer: wait until the consumers have released the slot. In the first lap, this function returns immediately because the phase with
    // parity 1 of a new barrier counts as completed.
    __device__ __forceinline__ void acquire(u32 slot) const { mbarrier_wait_parity(empty_barrier(slot), phase ^ 1); }
    __device__ __forceinline__ void acquire() const { acquire(stage); }

    // Producer: arrive once and expect `bytes` bytes. Call this function before the loads.
    __device__ __forceinline__ void expect_tx(u32 slot, u32 bytes) const { mbarrier_arrive_expect_tx(get_barrier(slot), bytes); }
    __device__ __forceinline__ void expect_tx(u32 bytes) const { expect_tx(stage, bytes); }

    // Consumer: wait until the slot is full.
    __device__ __forceinline__ void wait(u32 slot) const { mbarrier_wait_parity(get_barrier(slot), phase); }
    __device__ __forceinline__ void wait() const { wait(stage); }

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

// Used in gemm_v4, gemm_v7
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
    static constexpr u32 SUSPEND_NS = 10000000;   // maximum time for which a wait suspends the thread
    u32 base;    // shared-memory address of full[Stages], then empty[Stages]; 8 bytes each
    u32 stage;   // this thread's current slot
    u32 phase;   // parity of the current lap

    // Attach to the ring, initialize its barriers, and call __syncthreads(). All threads of the CTA must call this function. In a cluster,
    // all CTAs must also synchronize before a CTA uses the barriers of another.
    __device__ __forceinline__ void init(u32 base_address, u32 producer_arrivals, u32 consumer_arrivals) {
        attach(base_address);
        if (threadIdx.x == 0 && threadIdx.y == 0 && threadIdx.z == 0) init_barriers(producer_arrivals, consumer_arrivals);
        __syncthreads();
    }

    // Start at slot 0 of the ring whose barriers are at base_address, which must be 8-byte aligned. This function does not access the
    // barriers.
    __device__ __forceinline__ void attach(u32 base_address) {
        base = base_address;
        stage = 0;
        phase = 0;
    }

    // Initialize the barriers. One thread must call this function after attach(), and may use the ring at once. Other threads may use the
    // ring after the CTA or the cluster has synchronized. `producer_arrivals` is the number of calls to expect_tx() or arrive() that fill a
    // slot. `consumer_arrivals` is the number of calls to release*(), in all CTAs of the cluster, that free a slot.
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

    // Producer: wait until the consumers have released the slot. In the first lap, this function returns immediately because the phase with
    // parity 1 of a new barrier counts as completed.
    __device__ __forceinline__ void acquire(u32 slot) const { mbarrier_wait_parity_hint(empty_barrier(slot), phase ^ 1, SUSPEND_NS); }
    __device__ __forceinline__ void acquire() const { acquire(stage); }

    // Producer: arrive once and expect `bytes` bytes. Call this function before the loads.
    __device__ __forceinline__ void expect_tx(u32 slot, u32 bytes) const { mbarrier_arrive_expect_tx(get_barrier(slot), bytes); }
    __device__ __forceinline__ void expect_tx(u32 bytes) const { expect_tx(stage, bytes); }

    // Consumer: wait until the slot is full.
    __device__ __forceinline__ void wait(u32 slot) const { mbarrier_wait_parity_hint(get_barrier(slot), phase, SUSPEND_NS); }
    __device__ __forceinline__ void wait() const { wait(stage); }

    // Consumer: arrive once without a fence. Previous instructions must have used all values of the slot, so that no read is in flight.
    // Consumers therefore release a slot one iteration after the iteration that read it.
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

// Used in gemm_v5
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
    static constexpr u32 SUSPEND_NS = 10000000;   // maximum time for which a wait suspends the thread
    u32 base;    // shared-memory address of full[Stages], then empty[Stages]; 8 bytes each
    u32 stage;   // this thread's current slot
    u32 phase;   // parity of the current lap

    // Start at slot 0 of the ring whose barriers are at base_address, which must be 8-byte aligned. This function does not access the
    // barriers.
    __device__ __forceinline__ void attach(u32 base_address) {
        base = base_address;
        stage = 0;
        phase = 0;
    }

    // Initialize the barriers. One thread must call this function after attach(), and may use the ring at once. Other threads may use the
    // ring after the CTA or the cluster has synchronized. `producer_arrivals` is the number of calls to expect_tx() or arrive() that fill a
    // slot. `consumer_arrivals` is the number of calls to release*(), in all CTAs of the cluster, that free a slot.
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

    // Producer: wait until the consumers have released the slot. In the first lap, this function returns immediately because the phase with
    // parity 1 of a new barrier counts as completed.
    __device__ __forceinline__ void acquire(u32 slot) const { mbarrier_wait_parity_hint(empty_barrier(slot), phase ^ 1, SUSPEND_NS); }
    __device__ __forceinline__ void acquire() const { acquire(stage); }

    // Producer: arrive once and expect `bytes` bytes. Call this function before the loads.
    __device__ __forceinline__ void expect_tx(u32 slot, u32 bytes) const { mbarrier_arrive_expect_tx(get_barrier(slot), bytes); }
    __device__ __forceinline__ void expect_tx(u32 bytes) const { expect_tx(stage, bytes); }

    // Consumer: wait until the slot is full.
    __device__ __forceinline__ void wait(u32 slot) const { mbarrier_wait_parity_hint(get_barrier(slot), phase, SUSPEND_NS); }
    __device__ __forceinline__ void wait() const { wait(stage); }

    // Consumer: release a slot that all CTAs of the cluster fill by multicast. Lane r arrives on the barrier of CTA r.
    template <u32 ClusterSize>
    __device__ __forceinline__ void release_used_to_cluster(u32 slot, u32 lane) const {
        __syncwarp();
        if (lane < ClusterSize) mbarrier_arrive_shared_cluster(mapa_shared_cluster(empty_barrier(slot), lane));
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

// Used in gemm_v6
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
    u32 base;    // shared-memory address of full[Stages], then empty[Stages]; 8 bytes each
    u32 stage;   // this thread's current slot
    u32 phase;   // parity of the current lap

    // Start at slot 0 of the ring whose barriers are at base_address, which must be 8-byte aligned. This function does not access the
    // barriers.
    __device__ __forceinline__ void attach(u32 base_address) {
        base = base_address;
        stage = 0;
        phase = 0;
    }

    // Initialize the barriers. One thread must call this function after attach(), and may use the ring at once. Other threads may use the
    // ring after the CTA or the cluster has synchronized. `producer_arrivals` is the number of calls to expect_tx() or arrive() that fill a
    // slot. `consumer_arrivals` is the number of calls to release*(), in all CTAs of the cluster, that free a slot.
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

    // Producer: wait until the consumers have released the slot. In the first lap, this function returns immediately because the phase with
    // parity 1 of a new barrier counts as completed.
    __device__ __forceinline__ void acquire(u32 slot) const { mbarrier_wait_parity(empty_barrier(slot), phase ^ 1); }
    __device__ __forceinline__ void acquire() const { acquire(stage); }

    // Producer: arrive once and expect `bytes` bytes. Call this function before the loads.
    __device__ __forceinline__ void expect_tx(u32 slot, u32 bytes) const { mbarrier_arrive_expect_tx(get_barrier(slot), bytes); }
    __device__ __forceinline__ void expect_tx(u32 bytes) const { expect_tx(stage, bytes); }

    // Consumer: wait until the slot is full.
    __device__ __forceinline__ void wait(u32 slot) const { mbarrier_wait_parity(get_barrier(slot), phase); }
    __device__ __forceinline__ void wait() const { wait(stage); }

    // Consumer: arrive once without a fence. Previous instructions must have used all values of the slot, so that no read is in flight.
    // Consumers therefore release a slot one iteration after the iteration that read it.
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

// Used in gemm_mma_sync
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
    u32 base;    // shared-memory address of full[Stages], then empty[Stages]; 8 bytes each
    u32 stage;   // this thread's current slot
    u32 phase;   // parity of the current lap

    // Attach to the ring, initialize its barriers, and call __syncthreads(). All threads of the CTA must call this function. In a cluster,
    // all CTAs must also synchronize before a CTA uses the barriers of another.
    __device__ __forceinline__ void init(u32 base_address, u32 producer_arrivals, u32 consumer_arrivals) {
        attach(base_address);
        if (threadIdx.x == 0 && threadIdx.y == 0 && threadIdx.z == 0) init_barriers(producer_arrivals, consumer_arrivals);
        __syncthreads();
    }

    // Start at slot 0 of the ring whose barriers are at base_address, which must be 8-byte aligned. This function does not access the
    // barriers.
    __device__ __forceinline__ void attach(u32 base_address) {
        base = base_address;
        stage = 0;
        phase = 0;
    }

    // Initialize the barriers. One thread must call this function after attach(), and may use the ring at once. Other threads may use the
    // ring after the CTA or the cluster has synchronized. `producer_arrivals` is the number of calls to expect_tx() or arrive() that fill a
    // slot. `consumer_arrivals` is the number of calls to release*(), in all CTAs of the cluster, that free a slot.
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

    // Producer: wait until the consumers have released the slot. In the first lap, this function returns immediately because the phase with
    // parity 1 of a new barrier counts as completed.
    __device__ __forceinline__ void acquire(u32 slot) const { mbarrier_wait_parity(empty_barrier(slot), phase ^ 1); }
    __device__ __forceinline__ void acquire() const { acquire(stage); }

    // Producer: arrive once and expect `bytes` bytes. Call this function before the loads.
    __device__ __forceinline__ void expect_tx(u32 slot, u32 bytes) const { mbarrier_arrive_expect_tx(get_barrier(slot), bytes); }
    __device__ __forceinline__ void expect_tx(u32 bytes) const { expect_tx(stage, bytes); }

    // Consumer: wait until the slot is full.
    __device__ __forceinline__ void wait(u32 slot) const { mbarrier_wait_parity(get_barrier(slot), phase); }
    __device__ __forceinline__ void wait() const { wait(stage); }

    // Consumer: arrive once after reading the slot. The fence orders the reads before the arrival. Without it, ptxas may issue the arrival
    // first, and TMA could refill the slot while the reads are in flight.
    __device__ __forceinline__ void release(u32 slot) const {
        fence_acq_rel_cta();
        mbarrier_arrive(empty_barrier(slot));
    }
    __device__ __forceinline__ void release() const { release(stage); }

    // Consumer: arrive once without a fence. Previous instructions must have used all values of the slot, so that no read is in flight.
    // Consumers therefore release a slot one iteration after the iteration that read it.
    __device__ __forceinline__ void release_used(u32 slot) const { mbarrier_arrive(empty_barrier(slot)); }

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

// Used in marlin_skinny
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
    u32 base;    // shared-memory address of full[Stages], then empty[Stages]; 8 bytes each
    u32 stage;   // this thread's current slot
    u32 phase;   // parity of the current lap

    // Start at slot 0 of the ring whose barriers are at base_address, which must be 8-byte aligned. This function does not access the
    // barriers.
    __device__ __forceinline__ void attach(u32 base_address) {
        base = base_address;
        stage = 0;
        phase = 0;
    }

    // Initialize the barriers. One thread must call this function after attach(), and may use the ring at once. Other threads may use the
    // ring after the CTA or the cluster has synchronized. `producer_arrivals` is the number of calls to expect_tx() or arrive() that fill a
    // slot. `consumer_arrivals` is the number of calls to release*(), in all CTAs of the cluster, that free a slot.
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

    // Producer: wait until the consumers have released the slot. In the first lap, this function returns immediately because the phase with
    // parity 1 of a new barrier counts as completed.
    __device__ __forceinline__ void acquire(u32 slot) const { mbarrier_wait_parity(empty_barrier(slot), phase ^ 1); }
    __device__ __forceinline__ void acquire() const { acquire(stage); }

    // Producer: arrive once and expect `bytes` bytes. Call this function before the loads.
    __device__ __forceinline__ void expect_tx(u32 slot, u32 bytes) const { mbarrier_arrive_expect_tx(get_barrier(slot), bytes); }
    __device__ __forceinline__ void expect_tx(u32 bytes) const { expect_tx(stage, bytes); }

    // Consumer: wait until the slot is full.
    __device__ __forceinline__ void wait(u32 slot) const { mbarrier_wait_parity(get_barrier(slot), phase); }
    __device__ __forceinline__ void wait() const { wait(stage); }

    // Consumer: arrive once without a fence. Previous instructions must have used all values of the slot, so that no read is in flight.
    // Consumers therefore release a slot one iteration after the iteration that read it.
    __device__ __forceinline__ void release_used(u32 slot) const { mbarrier_arrive(empty_barrier(slot)); }

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

// Used in marlin_wgmma
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
    u32 base;    // shared-memory address of full[Stages], then empty[Stages]; 8 bytes each
    u32 stage;   // this thread's current slot
    u32 phase;   // parity of the current lap

    // Start at slot 0 of the ring whose barriers are at base_address, which must be 8-byte aligned. This function does not access the
    // barriers.
    __device__ __forceinline__ void attach(u32 base_address) {
        base = base_address;
        stage = 0;
        phase = 0;
    }

    // Initialize the barriers. One thread must call this function after attach(), and may use the ring at once. Other threads may use the
    // ring after the CTA or the cluster has synchronized. `producer_arrivals` is the number of calls to expect_tx() or arrive() that fill a
    // slot. `consumer_arrivals` is the number of calls to release*(), in all CTAs of the cluster, that free a slot.
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

    // Producer: wait until the consumers have released the slot. In the first lap, this function returns immediately because the phase with
    // parity 1 of a new barrier counts as completed.
    __device__ __forceinline__ void acquire(u32 slot) const { mbarrier_wait_parity(empty_barrier(slot), phase ^ 1); }
    __device__ __forceinline__ void acquire() const { acquire(stage); }

    // Producer: arrive once and expect `bytes` bytes. Call this function before the loads.
    __device__ __forceinline__ void expect_tx(u32 slot, u32 bytes) const { mbarrier_arrive_expect_tx(get_barrier(slot), bytes); }
    __device__ __forceinline__ void expect_tx(u32 bytes) const { expect_tx(stage, bytes); }

    // Consumer: wait until the slot is full.
    __device__ __forceinline__ void wait(u32 slot) const { mbarrier_wait_parity(get_barrier(slot), phase); }
    __device__ __forceinline__ void wait() const { wait(stage); }

    // Consumer: release a slot that all CTAs of the cluster fill by multicast. Lane r arrives on the barrier of CTA r.
    template <u32 ClusterSize>
    __device__ __forceinline__ void release_used_to_cluster(u32 slot, u32 lane) const {
        __syncwarp();
        if (lane < ClusterSize) mbarrier_arrive_shared_cluster(mapa_shared_cluster(empty_barrier(slot), lane));
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

// Used in experts_skinny_up
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
    u32 base;    // shared-memory address of full[Stages], then empty[Stages]; 8 bytes each
    u32 stage;   // this thread's current slot
    u32 phase;   // parity of the current lap

    // Attach to the ring, initialize its barriers, and call __syncthreads(). All threads of the CTA must call this function. In a cluster,
    // all CTAs must also synchronize before a CTA uses the barriers of another.
    __device__ __forceinline__ void init(u32 base_address, u32 producer_arrivals, u32 consumer_arrivals) {
        attach(base_address);
        if (threadIdx.x == 0 && threadIdx.y == 0 && threadIdx.z == 0) init_barriers(producer_arrivals, consumer_arrivals);
        __syncthreads();
    }

    // Start at slot 0 of the ring whose barriers are at base_address, which must be 8-byte aligned. This function does not access the
    // barriers.
    __device__ __forceinline__ void attach(u32 base_address) {
        base = base_address;
        stage = 0;
        phase = 0;
    }

    // Initialize the barriers. One thread must call this function after attach(), and may use the ring at once. Other threads may use the
    // ring after the CTA or the cluster has synchronized. `producer_arrivals` is the number of calls to expect_tx() or arrive() that fill a
    // slot. `consumer_arrivals` is the number of calls to release*(), in all CTAs of the cluster, that free a slot.
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

    // Producer: wait until the consumers have released the slot. In the first lap, this function returns immediately because the phase with
    // parity 1 of a new barrier counts as completed.
    __device__ __forceinline__ void acquire(u32 slot) const { mbarrier_wait_parity(empty_barrier(slot), phase ^ 1); }
    __device__ __forceinline__ void acquire() const { acquire(stage); }

    // Producer: arrive once and expect `bytes` bytes. Call this function before the loads.
    __device__ __forceinline__ void expect_tx(u32 slot, u32 bytes) const { mbarrier_arrive_expect_tx(get_barrier(slot), bytes); }
    __device__ __forceinline__ void expect_tx(u32 bytes) const { expect_tx(stage, bytes); }

    // Consumer: wait until the slot is full.
    __device__ __forceinline__ void wait(u32 slot) const { mbarrier_wait_parity(get_barrier(slot), phase); }
    __device__ __forceinline__ void wait() const { wait(stage); }

    // Consumer: arrive once without a fence. Previous instructions must have used all values of the slot, so that no read is in flight.
    // Consumers therefore release a slot one iteration after the iteration that read it.
    __device__ __forceinline__ void release_used(u32 slot) const { mbarrier_arrive(empty_barrier(slot)); }

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

// Used in experts_wgmma_down
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
    u32 base;    // shared-memory address of full[Stages], then empty[Stages]; 8 bytes each
    u32 stage;   // this thread's current slot
    u32 phase;   // parity of the current lap

    // Attach to the ring, initialize its barriers, and call __syncthreads(). All threads of the CTA must call this function. In a cluster,
    // all CTAs must also synchronize before a CTA uses the barriers of another.
    __device__ __forceinline__ void init(u32 base_address, u32 producer_arrivals, u32 consumer_arrivals) {
        attach(base_address);
        if (threadIdx.x == 0 && threadIdx.y == 0 && threadIdx.z == 0) init_barriers(producer_arrivals, consumer_arrivals);
        __syncthreads();
    }

    // Start at slot 0 of the ring whose barriers are at base_address, which must be 8-byte aligned. This function does not access the
    // barriers.
    __device__ __forceinline__ void attach(u32 base_address) {
        base = base_address;
        stage = 0;
        phase = 0;
    }

    // Initialize the barriers. One thread must call this function after attach(), and may use the ring at once. Other threads may use the
    // ring after the CTA or the cluster has synchronized. `producer_arrivals` is the number of calls to expect_tx() or arrive() that fill a
    // slot. `consumer_arrivals` is the number of calls to release*(), in all CTAs of the cluster, that free a slot.
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

    // Producer: wait until the consumers have released the slot. In the first lap, this function returns immediately because the phase with
    // parity 1 of a new barrier counts as completed.
    __device__ __forceinline__ void acquire(u32 slot) const { mbarrier_wait_parity(empty_barrier(slot), phase ^ 1); }
    __device__ __forceinline__ void acquire() const { acquire(stage); }

    // Producer: arrive once and expect `bytes` bytes. Call this function before the loads.
    __device__ __forceinline__ void expect_tx(u32 slot, u32 bytes) const { mbarrier_arrive_expect_tx(get_barrier(slot), bytes); }
    __device__ __forceinline__ void expect_tx(u32 bytes) const { expect_tx(stage, bytes); }

    // Producer: arrive once after ordinary stores to the slot.
    __device__ __forceinline__ void arrive(u32 slot) const { mbarrier_arrive(get_barrier(slot)); }
    __device__ __forceinline__ void arrive() const { arrive(stage); }

    // Consumer: wait until the slot is full.
    __device__ __forceinline__ void wait(u32 slot) const { mbarrier_wait_parity(get_barrier(slot), phase); }
    __device__ __forceinline__ void wait() const { wait(stage); }

    // Consumer: arrive once without a fence. Previous instructions must have used all values of the slot, so that no read is in flight.
    // Consumers therefore release a slot one iteration after the iteration that read it.
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

// [PTX ISA, setmaxnreg] Increase this warpgroup's registers per thread to Registers (24 to 256, a multiple of 8). The function waits until
// the CTA's pool has enough registers.
template <u32 Registers>
__device__ __forceinline__ void setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" : : "n"(Registers));
}

// [PTX ISA, setmaxnreg] Decrease this warpgroup's registers per thread to Registers (24 to 256, a multiple of 8), and return the released
// registers to the CTA's pool.
template <u32 Registers>
__device__ __forceinline__ void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" : : "n"(Registers));
}

// [PTX ISA, st] Store 16 bytes to shared memory.
__device__ __forceinline__ void st_shared_v4_b32(u32 smem, const uint4& values) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};"
                 : : "r"(smem), "r"(values.x), "r"(values.y), "r"(values.z), "r"(values.w) : "memory");
}

// The position of a thread among the consumers. `warp` is the index of the warp in its warpgroup.
struct ThreadPosition {
    u32 warpgroup, warp, lane;
};

// [PTX ISA, cp.async.bulk.tensor] Store shared memory at `src` to the box of `map` that begins at element (c0, c1, ...), as part of this
// thread's current bulk group. Coordinates must be nonnegative. TMA clips the innermost dimension at multiples of 16 bytes,
// not at elements. The threads that wrote `src` must call fence_proxy_async_shared_cta() and then synchronize before this call.
__device__ __forceinline__ void cp_async_bulk_tensor_4d_store(const TensorMap* map, u32 src, int c0, int c1, int c2, int c3) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group"
                 " [%0, {%2, %3, %4, %5}], [%1];"
                 :: "l"(map), "r"(src), "r"(c0), "r"(c1), "r"(c2), "r"(c3) : "memory");
}

// [PTX ISA, cp.async.bulk.commit_group] Commit all bulk stores and reductions of this thread that have not been committed yet, as one bulk group.
__device__ __forceinline__ void cp_async_bulk_commit_group() {
    asm volatile("cp.async.bulk.commit_group;" : : : "memory");
}

// [PTX ISA, cp.async.bulk.wait_group.read] Wait until all but the last Pending of this thread's bulk groups have read shared memory,
// which may then be overwritten.
template <u32 Pending>
__device__ __forceinline__ void cp_async_bulk_wait_group_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" : : "n"(Pending) : "memory");
}

// [PTX ISA, ld] Load 4 bytes of shared memory.
__device__ __forceinline__ u32 ld_shared_b32(u32 smem) {
    u32 value;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(value) : "r"(smem) : "memory");
    return value;
}

// [PTX ISA, st] Store 4 bytes to shared memory.
__device__ __forceinline__ void st_shared_b32(u32 smem, u32 value) {
    asm volatile("st.shared.b32 [%0], %1;" : : "r"(smem), "r"(value) : "memory");
}

// [PTX ISA, membar / fence, .acq_rel.cta] Order this thread's memory accesses within the CTA. Without this fence, ptxas may issue an
// mbarrier.arrive while an earlier ld.shared is in flight.
__device__ __forceinline__ void fence_acq_rel_cta() {
    asm volatile("fence.acq_rel.cta;" : : : "memory");
}

// Used in attention_mma_sync, gemm_mma_sync
// [PTX ISA, ldmatrix] Load 8 x 8 matrices of 16-bit elements into a warp's registers. Lanes 8 i to 8 i + 7 pass the 16-byte aligned
// shared-memory addresses of the rows of matrix i. In r[i], lane l receives elements 2 (l % 4) and 2 (l % 4) + 1 of row l / 4. The _trans
// variants transpose each matrix.
__device__ __forceinline__ void ldmatrix_x4(u32 (&r)[4], u32 addr) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(addr) : "memory");
}

// Used in marlin_mma_sync, marlin_skinny, experts_skinny_up
__device__ __forceinline__ void ldmatrix_x4(u32 (&r)[4], u32 addr) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(addr) : "memory");
}

// Used in attention_mma_sync, gemm_mma_sync
__device__ __forceinline__ void ldmatrix_x4_trans(u32 (&r)[4], u32 addr) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(addr) : "memory");
}

// Used in transpose
// [PTX ISA, ldmatrix] Load 8 x 8 matrices of 16-bit elements into a warp's registers. Lanes 8 i to 8 i + 7 pass the 16-byte aligned
// shared-memory addresses of the rows of matrix i. In r[i], lane l receives elements 2 (l % 4) and 2 (l % 4) + 1 of row l / 4. The _trans
// variants transpose each matrix.
__device__ __forceinline__ void ldmatrix_x4_trans(u32 (&r)[4], u32 addr) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(addr) : "memory");
}

// [PTX ISA, mma.m16n8k16] Compute `d` += `a` * `b` for a warp. `a` (16 x 16) and `b` (16 x 8) are bf16, and `d` (16 x 8) is
// fp32. In d[0] and d[1], lane l holds columns 2 (l % 4) and 2 (l % 4) + 1 of row l / 4. In d[2] and d[3], it holds the same columns of row
// l / 4 + 8.
__device__ __forceinline__ void mma_m16n8k16_bf16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
        " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// [PTX ISA, prefetch] Prefetch a tensor map into the descriptor cache.
__device__ __forceinline__ void prefetch_tensormap(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" : : "l"(map) : "memory");
}

// Used in window_copy
// [PTX ISA, cp.async.bulk.tensor] Load the box of `map` that begins at element (c0, c1, ...), where c0 is the innermost coordinate, to
// shared-memory address `dst`. Call this function from one thread. Barrier `bar` counts the bytes of the whole box, because TMA also fills
// elements outside the tensor. `dst` must be 128-byte aligned (1024-byte aligned with the 128-byte swizzle).
// Load with an L2 policy from createpolicy_*.
__device__ __forceinline__ void cp_async_bulk_tensor_2d_load_hint(
    u32 dst, const TensorMap* map, u32 bar, int c0, int c1, u64 policy) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"
                 " [%0], [%1, {%4, %5}], [%2], %3;"
                 :: "r"(dst), "l"(map), "r"(bar), "l"(policy), "r"(c0), "r"(c1) : "memory");
}

// Used in marlin_mma_sync
// Load with an L2 policy from createpolicy_*.
__device__ __forceinline__ void cp_async_bulk_tensor_2d_load_hint(
    u32 dst, const TensorMap* map, u32 bar, int c0, int c1, u64 policy) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"
                 " [%0], [%1, {%4, %5}], [%2], %3;"
                 :: "r"(dst), "l"(map), "r"(bar), "l"(policy), "r"(c0), "r"(c1) : "memory");
}

// [PTX ISA, cp.async.bulk.tensor] Store shared memory at `src` to the box of `map` that begins at element (c0, c1, ...), as part of this
// thread's current bulk group. Coordinates must be nonnegative. TMA clips the innermost dimension at multiples of 16 bytes,
// not at elements. The threads that wrote `src` must call fence_proxy_async_shared_cta() and then synchronize before this call.
// Store with an L2 policy from createpolicy_*.
__device__ __forceinline__ void cp_async_bulk_tensor_2d_store_hint(const TensorMap* map, u32 src, int c0, int c1, u64 policy) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group.L2::cache_hint"
                 " [%0, {%3, %4}], [%1], %2;"
                 :: "l"(map), "r"(src), "l"(policy), "r"(c0), "r"(c1) : "memory");
}

// [PTX ISA, cp.async.bulk.wait_group] Wait until all but the last Pending of this thread's bulk groups have written global memory.
template <u32 Pending>
__device__ __forceinline__ void cp_async_bulk_wait_group() {
    asm volatile("cp.async.bulk.wait_group %0;" : : "n"(Pending) : "memory");
}

// [PTX ISA, createpolicy] Return the L2 policy evict_first.
__device__ __forceinline__ u64 createpolicy_evict_first() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// [PTX ISA, cp.async.bulk] Load `bytes` contiguous bytes from `src` to shared-memory address `dst`. Barrier `bar` counts the bytes as they
// arrive. Call this function from one thread. The addresses and the size must be multiples of 16.
__device__ __forceinline__ void cp_async_bulk_load(u32 dst, const void* src, u32 bytes, u32 bar) {
    asm volatile("cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :: "r"(dst), "l"(__cvta_generic_to_global(src)), "r"(bytes), "r"(bar) : "memory");
}

// [PTX ISA, cp.async.bulk] Store `bytes` contiguous bytes from shared-memory address `src` to `dst` as part of this thread's current bulk
// group.
__device__ __forceinline__ void cp_async_bulk_store(void* dst, u32 src, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                 :: "l"(__cvta_generic_to_global(dst)), "r"(src), "r"(bytes) : "memory");
}

// Used in transpose, gather_boxes, gemm_v2, gemm_v3, gemm_v4, gemm_v5, gemm_v6, gemm_v7, gemm_mma_sync
// [PTX ISA, cp.async.bulk.tensor] Load the box of `map` that begins at element (c0, c1, ...), where c0 is the innermost coordinate, to
// shared-memory address `dst`. Call this function from one thread. Barrier `bar` counts the bytes of the whole box, because TMA also fills
// elements outside the tensor. `dst` must be 128-byte aligned (1024-byte aligned with the 128-byte swizzle).
__device__ __forceinline__ void cp_async_bulk_tensor_3d_load(u32 dst, const TensorMap* map, u32 bar, int c0, int c1, int c2) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cta.global.tile.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%3, %4, %5}], [%2];"
                 :: "r"(dst), "l"(map), "r"(bar), "r"(c0), "r"(c1), "r"(c2) : "memory");
}

// Used in experts_skinny_up, dequantize
__device__ __forceinline__ void cp_async_bulk_tensor_3d_load(u32 dst, const TensorMap* map, u32 bar, int c0, int c1, int c2) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cta.global.tile.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%3, %4, %5}], [%2];"
                 :: "r"(dst), "l"(map), "r"(bar), "r"(c0), "r"(c1), "r"(c2) : "memory");
}

// [PTX ISA, cp.async.bulk.tensor] Store shared memory at `src` to the box of `map` that begins at element (c0, c1, ...), as part of this
// thread's current bulk group. Coordinates must be nonnegative. TMA clips the innermost dimension at multiples of 16 bytes,
// not at elements. The threads that wrote `src` must call fence_proxy_async_shared_cta() and then synchronize before this call.
__device__ __forceinline__ void cp_async_bulk_tensor_3d_store(const TensorMap* map, u32 src, int c0, int c1, int c2) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group"
                 " [%0, {%2, %3, %4}], [%1];"
                 :: "l"(map), "r"(src), "r"(c0), "r"(c1), "r"(c2) : "memory");
}

// [PTX ISA, cp.async.bulk.tensor, .im2col] Load the pixels of a convolution for one filter position. The coordinates of the first pixel are
// the channel c0, the position along the tensor's spatial axes (w, then h, then d), and the image n. The offsets are the filter position
// along the spatial axes. TMA fills pixels outside the map's bounding box with zeros, and barrier `bar` counts the bytes of all pixels.
__device__ __forceinline__ void cp_async_bulk_tensor_4d_im2col_load(
    u32 dst, const TensorMap* map, u32 bar, int c0, int c1, int c2, int c3, u16 offset0, u16 offset1) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cta.global.im2col.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%3, %4, %5, %6}], [%2], {%7, %8};"
                 :: "r"(dst), "l"(map), "r"(bar), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "h"(offset0), "h"(offset1) : "memory");
}

// [PTX ISA, Special Registers, %cluster_ctarank] Return this CTA's rank in its cluster.
__device__ __forceinline__ u32 cluster_ctarank() {
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// [PTX ISA, mapa] Return the shared::cluster address of shared-memory address `addr` in the CTA of rank `rank`.
__device__ __forceinline__ u32 mapa_shared_cluster(u32 addr, u32 rank) {
    u32 remote;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(addr), "r"(rank));
    return remote;
}

// [PTX ISA, mbarrier.arrive] Arrive once on a barrier in any CTA of the cluster. `bar` is an address from mapa_shared_cluster. The default
// semantics, a release at CTA scope, suffice to release a slot that this CTA only read.
__device__ __forceinline__ void mbarrier_arrive_shared_cluster(u32 bar) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" : : "r"(bar) : "memory");
}

// [PTX ISA, barrier.cluster] Arrive on the cluster barrier with release semantics. All threads of the cluster must call this function.
__device__ __forceinline__ void barrier_cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" : : : "memory");
}

// [PTX ISA, barrier.cluster] Wait with acquire semantics until all threads of the cluster have arrived.
__device__ __forceinline__ void barrier_cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" : : : "memory");
}

// [PTX ISA, cp.async.bulk] Load `bytes` contiguous bytes from `src` to shared-memory address `dst`. Barrier `bar` counts the bytes as they
// arrive. Call this function from one thread. The addresses and the size must be multiples of 16.
// Load into every CTA of the cluster whose bit is set in `mask`. The destination and the barrier have the same offsets in each of these
// CTAs, and the barrier of each CTA must expect the bytes.
__device__ __forceinline__ void cp_async_bulk_load_multicast(u32 dst, const void* src, u32 bytes, u32 bar, u16 mask) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], %4;"
                 :: "r"(dst), "l"(__cvta_generic_to_global(src)), "r"(bytes), "r"(bar), "h"(mask) : "memory");
}

// [PTX ISA, cp.async.bulk.prefetch.tensor] Prefetch the box that begins at element (c0, c1, ...) into L2. No barrier signals its
// completion.
__device__ __forceinline__ void cp_async_bulk_prefetch_tensor_2d(const TensorMap* map, int c0, int c1) {
    asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1, %2}];"
                 :: "l"(map), "r"(c0), "r"(c1) : "memory");
}

// [PTX ISA, cp.async.bulk.tensor] Store shared memory at `src` to the box of `map` that begins at element (c0, c1, ...), as part of this
// thread's current bulk group. Coordinates must be nonnegative. TMA clips the innermost dimension at multiples of 16 bytes,
// not at elements. The threads that wrote `src` must call fence_proxy_async_shared_cta() and then synchronize before this call.
__device__ __forceinline__ void cp_async_bulk_tensor_2d_store(const TensorMap* map, u32 src, int c0, int c1) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group"
                 " [%0, {%2, %3}], [%1];"
                 :: "l"(map), "r"(src), "r"(c0), "r"(c1) : "memory");
}

// [PTX ISA, cp.async.bulk.tensor, .tile::gather4] Load box[0] elements, beginning at `column`, from each of four rows of a 2D tensor into
// consecutive rows at `dst`. The map's box[1] must be 1.
__device__ __forceinline__ void cp_async_bulk_tensor_2d_gather4_load(
    u32 dst, const TensorMap* map, u32 bar, int column, int row0, int row1, int row2, int row3) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cta.global.tile::gather4.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%3, %4, %5, %6, %7}], [%2];"
                 :: "r"(dst), "l"(map), "r"(bar), "r"(column), "r"(row0), "r"(row1), "r"(row2), "r"(row3) : "memory");
}

// [PTX ISA, membar / fence, .proxy.tensormap::generic] Acquire a tensor map that was changed on the GPU. Call this function before TMA uses
// the map.
__device__ __forceinline__ void fence_proxy_tensormap_acquire_gpu(const TensorMap* map) {
    asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" : : "l"(map) : "memory");
}

// [PTX ISA, cp.async.bulk.tensor] Load the box of `map` that begins at element (c0, c1, ...), where c0 is the innermost coordinate, to
// shared-memory address `dst`. Call this function from one thread. Barrier `bar` counts the bytes of the whole box, because TMA also fills
// elements outside the tensor. `dst` must be 128-byte aligned (1024-byte aligned with the 128-byte swizzle).
__device__ __forceinline__ void cp_async_bulk_tensor_2d_load(u32 dst, const TensorMap* map, u32 bar, int c0, int c1) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%3, %4}], [%2];"
                 :: "r"(dst), "l"(map), "r"(bar), "r"(c0), "r"(c1) : "memory");
}

// [PTX ISA, tensormap.cp_fenceproxy] Copy a tensor map from shared-memory address `src` to global memory and release it. All lanes of a
// warp must call this function. Threads that use the map must first call fence_proxy_tensormap_acquire_gpu(dst).
__device__ __forceinline__ void tensormap_cp_fenceproxy_release_gpu(TensorMap* dst, u32 src) {
    asm volatile("tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%0], [%1], 128;"
                 :: "l"(__cvta_generic_to_global(dst)), "r"(src) : "memory");
}

// [PTX ISA, tensormap.replace] Set the global address of the tensor map at shared-memory address `map`. No TMA operation may be using the
// map.
__device__ __forceinline__ void tensormap_replace_global_address(u32 map, const void* address) {
    asm volatile("tensormap.replace.tile.global_address.shared::cta.b1024.b64 [%0], %1;"
                 :: "r"(map), "l"(__cvta_generic_to_global(address)) : "memory");
}

// [PTX ISA, tensormap.replace] Set the tensor size, in elements, of dimension Ordinal (0 is innermost) of the tensor map at shared-memory
// address `map`.
template <u32 Ordinal>
__device__ __forceinline__ void tensormap_replace_global_dim(u32 map, u32 value) {
    asm volatile("tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [%0], %1, %2;"
                 :: "r"(map), "n"(Ordinal), "r"(value) : "memory");
}

// [PTX ISA, tensormap.replace] Set the stride, in bytes, of dimension Ordinal + 1 of the tensor map at shared-memory address `map`.
template <u32 Ordinal>
__device__ __forceinline__ void tensormap_replace_global_stride(u32 map, u64 stride_bytes) {
    asm volatile("tensormap.replace.tile.global_stride.shared::cta.b1024.b64 [%0], %1, %2;"
                 :: "r"(map), "n"(Ordinal), "l"(stride_bytes) : "memory");
}

// [PTX ISA, mbarrier.try_wait] Return whether the phase with this parity has completed. If it has not, the thread may first be suspended
// for at most `ns` nanoseconds. On a new barrier, parity 1 counts as completed and parity 0 does not.
__device__ __forceinline__ bool mbarrier_try_wait_parity_hint(u32 bar, u32 parity, u32 ns) {
    u32 done;
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2, %3;\nselp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done) : "r"(bar), "r"(parity), "r"(ns) : "memory");
    return done != 0;
}

// [PTX ISA, mbarrier.try_wait] Wait until the phase with this parity has completed, suspending the thread for at most `ns` nanoseconds at a time.
// The wait has acquire semantics. Afterward, the bytes that TMA delivered and the earlier writes of the threads that arrived are visible to
// this thread.
__device__ __forceinline__ void mbarrier_wait_parity_hint(u32 bar, u32 parity, u32 ns) {
    while (!mbarrier_try_wait_parity_hint(bar, parity, ns)) {
    }
}

// Load into every CTA of the cluster whose bit is set in `mask`. The destination and the barrier have the same offsets in each of these
// CTAs, and the barrier of each CTA must expect the bytes.
__device__ __forceinline__ void cp_async_bulk_tensor_3d_load_multicast(
    u32 dst, const TensorMap* map, u32 bar, int c0, int c1, int c2, u16 mask) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                 ".multicast::cluster [%0], [%1, {%4, %5, %6}], [%2], %3;"
                 :: "r"(dst), "l"(map), "r"(bar), "h"(mask), "r"(c0), "r"(c1), "r"(c2) : "memory");
}

// [PTX ISA, ld] Load 4 bytes of shared memory.
__device__ __forceinline__ float ld_shared_f32(u32 smem) {
    float value;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(smem) : "memory");
    return value;
}

// [PTX ISA, barrier.cluster] Arrive on the cluster barrier without ordering memory accesses.
__device__ __forceinline__ void barrier_cluster_arrive_relaxed() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" : : : "memory");
}

// [PTX ISA, st.async] Store four values to `addr` in a CTA of the cluster. The barrier `bar` in that CTA counts the 16 bytes when they
// arrive. Both addresses must come from mapa_shared_cluster with the same rank, or be addresses in this CTA. On an H200, the instruction is
// illegal in a launch without clusters; a cluster of one CTA (__cluster_dims__(1, 1, 1)) suffices.
__device__ __forceinline__ void st_async_v4_f32(u32 addr, const float (&value)[4], u32 bar) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];"
                 :: "r"(addr), "f"(value[0]), "f"(value[1]), "f"(value[2]), "f"(value[3]), "r"(bar) : "memory");
}

// [PTX ISA, mbarrier.try_wait] Wait until the phase with this parity has completed, with acquire semantics at cluster scope. The values
// that other CTAs sent with st.async are then visible to this thread.
__device__ __forceinline__ void mbarrier_wait_parity_acquire_cluster(u32 bar, u32 parity) {
    u32 done;
    do {
        asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                     : "=r"(done) : "r"(bar), "r"(parity) : "memory");
    } while (!done);
}

// [PTX ISA, ld] Load 16 bytes of shared memory.
__device__ __forceinline__ void ld_shared_v4_f32(float (&values)[4], u32 smem) {
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(values[0]), "=f"(values[1]), "=f"(values[2]), "=f"(values[3]) : "r"(smem) : "memory");
}

// Add the four values of a fragment at shared-memory address `smem` to this thread's sums.
__device__ __forceinline__ void add_fragment(float (&sums)[4], u32 smem) {
    float other[4];
    ld_shared_v4_f32(other, smem);
#pragma unroll
    for (u32 i = 0; i < 4; ++i) sums[i] += other[i];
}

// [PTX ISA, bar] Arrive on named barrier `id` without waiting. The waiting threads must call bar_sync with the same `threads`.
__device__ __forceinline__ void bar_arrive(u32 id, u32 threads) {
    asm volatile("bar.arrive %0, %1;" : : "r"(id), "r"(threads) : "memory");
}

// [PTX ISA, mma.m16n8k16] Compute `d` += `a` * `b` for a warp. `a` (16 x 16) and `b` (16 x 8) are f16, and `d` (16 x 8) is
// fp32. In d[0] and d[1], lane l holds columns 2 (l % 4) and 2 (l % 4) + 1 of row l / 4. In d[2] and d[3], it holds the same columns of row
// l / 4 + 8.
__device__ __forceinline__ void mma_m16n8k16_f16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
        " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// [PTX ISA, createpolicy] Return the L2 policy evict_normal.
__device__ __forceinline__ u64 createpolicy_evict_normal() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// [PTX ISA, ld] Load 2 bytes of shared memory.
__device__ __forceinline__ u32 ld_shared_u16(u32 smem) {
    u32 value;
    asm volatile("ld.shared.u16 %0, [%1];" : "=r"(value) : "r"(smem) : "memory");
    return value;
}

// [PTX ISA, ld] Load 8 bytes of shared memory.
__device__ __forceinline__ uint2 ld_shared_v2_b32(u32 smem) {
    uint2 values;
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(values.x), "=r"(values.y) : "r"(smem) : "memory");
    return values;
}

// [PTX ISA, st] Store 16 bytes to shared memory.
__device__ __forceinline__ void st_shared_v4_f32(u32 smem, const float (&values)[4]) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};"
                 : : "r"(smem), "f"(values[0]), "f"(values[1]), "f"(values[2]), "f"(values[3]) : "memory");
}

// [PTX ISA, ldmatrix] Load 8 x 8 matrices of 16-bit elements into a warp's registers. Lanes 8 i to 8 i + 7 pass the 16-byte aligned
// shared-memory addresses of the rows of matrix i. In r[i], lane l receives elements 2 (l % 4) and 2 (l % 4) + 1 of row l / 4. The _trans
// variants transpose each matrix.
__device__ __forceinline__ void ldmatrix_x2(u32 (&r)[2], u32 addr) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1]) : "r"(addr) : "memory");
}

// [PTX ISA, stmatrix] Store 8 x 8 matrices of 16-bit elements from a warp's registers. Lanes 8 i to 8 i + 7 pass the 16-byte aligned
// shared-memory addresses of the rows of matrix i. In r[i], lane l holds elements 2 (l % 4) and 2 (l % 4) + 1 of row l / 4. The _trans
// variants transpose each matrix.
__device__ __forceinline__ void stmatrix_x2_trans(u32 addr, const u32 (&r)[2]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};"
                 :: "r"(addr), "r"(r[0]), "r"(r[1]) : "memory");
}

// [PTX ISA, lop3] Return (a & mask) | bits.
__device__ __forceinline__ u32 lop3_and_or(u32 a, u32 mask, u32 bits) {
    u32 d;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(a), "r"(mask), "r"(bits));
    return d;
}

// Used in marlin_mma_sync, experts_wgmma_down
// ---- Arithmetic on pairs of 16-bit values in a register -------------------------------------------------------------
__device__ __forceinline__ u32 subtract(u32 a, u32 b) {
    u32 d;
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}

// Used in marlin_skinny, experts_skinny_up, dequantize
// ---- Arithmetic on pairs of 16-bit values in a register -------------------------------------------------------------
__device__ __forceinline__ u32 subtract(u32 a, u32 b) {
    u32 d;
    asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}

__device__ __forceinline__ u32 multiply_add(u32 a, u32 b, u32 c) {
    u32 d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

// Return word i of a thread's 16 bytes of a packed 64 x 64 block. The word contains the thread's weights in rows 16 i to 16 i + 15.
__device__ __forceinline__ u32 word(const uint4& words, u32 i) {
    return i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w;
}

// Return the index of columns column0 + g and column0 + g + 8 in packed rows of 64 columns, where g is lane / 4. column0 must be a multiple
// of 16. A packed row contains column 16 c + 8 r + g at index 8 g + 2 c + r, so that a thread's columns of adjacent fragments are adjacent.
__device__ __forceinline__ u32 packed_column(u32 column0, u32 lane) {
    return column0 / 64 * 64 + 8 * (lane >> 2) + 2 * (column0 % 64 / 16);
}

// Load with an L2 policy from createpolicy_*.
__device__ __forceinline__ void cp_async_bulk_tensor_3d_load_hint(
    u32 dst, const TensorMap* map, u32 bar, int c0, int c1, int c2, u64 policy) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cta.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"
                 " [%0], [%1, {%4, %5, %6}], [%2], %3;"
                 :: "r"(dst), "l"(map), "r"(bar), "l"(policy), "r"(c0), "r"(c1), "r"(c2) : "memory");
}

// [PTX ISA, movmatrix] Transpose one 8 x 8 matrix of 16-bit elements across the registers of a warp.
__device__ __forceinline__ u32 movmatrix_trans(u32 r) {
    u32 transposed;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(r));
    return transposed;
}

// Load into every CTA of the cluster whose bit is set in `mask`, with an L2 policy from createpolicy_*.
__device__ __forceinline__ void cp_async_bulk_tensor_2d_load_multicast_hint(
    u32 dst, const TensorMap* map, u32 bar, int c0, int c1, u16 mask, u64 policy) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                 ".multicast::cluster.L2::cache_hint [%0], [%1, {%5, %6}], [%2], %3, %4;"
                 :: "r"(dst), "l"(map), "r"(bar), "h"(mask), "l"(policy), "r"(c0), "r"(c1) : "memory");
}

// [PTX ISA, createpolicy] Return the L2 policy evict_last.
__device__ __forceinline__ u64 createpolicy_evict_last() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// Used in marlin_wgmma
__device__ __forceinline__ void stmatrix_x4_trans(u32 addr, const u32 (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                 :: "r"(addr), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
}

// Used in experts_wgmma_down, dequantize
// [PTX ISA, stmatrix] Store 8 x 8 matrices of 16-bit elements from a warp's registers. Lanes 8 i to 8 i + 7 pass the 16-byte aligned
// shared-memory addresses of the rows of matrix i. In r[i], lane l holds elements 2 (l % 4) and 2 (l % 4) + 1 of row l / 4. The _trans
// variants transpose each matrix.
__device__ __forceinline__ void stmatrix_x4_trans(u32 addr, const u32 (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                 :: "r"(addr), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
}

// Used in marlin_wgmma
// ---- Arithmetic on pairs of 16-bit values in a register -------------------------------------------------------------
__device__ __forceinline__ u32 multiply(u32 a, u32 b) {
    u32 d;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}

// Used in experts_wgmma_down
__device__ __forceinline__ u32 multiply(u32 a, u32 b) {
    u32 d;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}

// Used in dequantize
__device__ __forceinline__ u32 multiply(u32 a, u32 b) {
    u32 d;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}

// Return the low half of `pair` in both halves. ptxas folds these moves into an operand modifier, but it does not fold a byte
// permutation.
__device__ __forceinline__ u32 both_low(u32 pair) {
    u32 d;
    asm("{ .reg .b16 l, h; mov.b32 {l, h}, %1; mov.b32 %0, {l, l}; }" : "=r"(d) : "r"(pair));
    return d;
}

// Return the high half of `pair` in both halves.
__device__ __forceinline__ u32 both_high(u32 pair) {
    u32 d;
    asm("{ .reg .b16 l, h; mov.b32 {l, h}, %1; mov.b32 %0, {h, h}; }" : "=r"(d) : "r"(pair));
    return d;
}

// Return the index of columns 16 c + g and 16 c + 8 + g of the packed row of 64 columns that begins at index `row`, where g is lane / 4. A
// packed row contains column 16 c + 8 r + g at index 8 g + 2 c + r.
__device__ __forceinline__ u32 packed_index(u32 row, u32 c, u32 lane) { return row + 8 * (lane >> 2) + 2 * c; }
