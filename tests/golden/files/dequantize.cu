// cudatma: kernels/dequantize.cu.j2 for sm_90a
// config: DequantizeConfig
//   dtype = 'bfloat16'
//   group_size = 32
//   has_zeros = True
//   has_permutation = True
// buffers: 8 x 64 rows x 64 columns, 144 bytes per row
// after the buffers, at +73728:
// ring: 2 stages of 9728 bytes, expect_tx 9728, 1 producer and 4 consumer arrivals; 19488 bytes of shared memory
//   +0 weight: 8192 bytes, 8192 by TMA
//   +8192 scales: 1024 bytes, 1024 by TMA
//   +9216 zeros: 512 bytes, 512 by TMA
//   barriers at +19456: full[2], empty[2]

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

// [PTX ISA, membar / fence, .proxy.async] Order this thread's ordinary accesses to shared memory before later accesses of the
// async proxy: reads by TMA stores and wgmma, and TMA loads that overwrite the data.
__device__ __forceinline__ void fence_proxy_async_shared_cta() {
    asm volatile("fence.proxy.async.shared::cta;" : : : "memory");
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

__device__ __forceinline__ void cp_async_bulk_tensor_3d_load(u32 dst, const TensorMap* map, u32 bar, int c0, int c1, int c2) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cta.global.tile.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%3, %4, %5}], [%2];"
                 :: "r"(dst), "l"(map), "r"(bar), "r"(c0), "r"(c1), "r"(c2) : "memory");
}

// [PTX ISA, prefetch] Prefetch a tensor map into the descriptor cache.
__device__ __forceinline__ void prefetch_tensormap(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" : : "l"(map) : "memory");
}

// [PTX ISA, cp.async.bulk] Store `bytes` contiguous bytes from shared address `src` to `dst` as part of this thread's current bulk group.
__device__ __forceinline__ void cp_async_bulk_store(void* dst, u32 src, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                 :: "l"(__cvta_generic_to_global(dst)), "r"(src), "r"(bytes) : "memory");
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

// [PTX ISA, stmatrix] Store 8 x 8 matrices of 16-bit elements from a warp's registers. Lanes 8 i to 8 i + 7 pass the 16-byte aligned shared
// addresses of the rows of matrix i. In r[i], lane l holds elements 2 (l % 4) and 2 (l % 4) + 1 of row l / 4. The _trans variants transpose
// each matrix.
__device__ __forceinline__ void stmatrix_x4_trans(u32 addr, const u32 (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                 :: "r"(addr), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
}

// [PTX ISA, lop3] Return (a & mask) | bits.
__device__ __forceinline__ u32 lop3_and_or(u32 a, u32 mask, u32 bits) {
    u32 d;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(a), "r"(mask), "r"(bits));
    return d;
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

// ---- Arithmetic on pairs of 16-bit values in a register -------------------------------------------------------------
__device__ __forceinline__ u32 subtract(u32 a, u32 b) {
    u32 d;
    asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}

__device__ __forceinline__ u32 multiply(u32 a, u32 b) {
    u32 d;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}

// Return the low half of `pair` in both halves. ptxas folds these moves into an operand modifier, which it does not do with a byte
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

// Return word i of a thread's 16 bytes of a packed 64 x 64 block. The word contains the thread's weights in rows 16 i to 16 i + 15.
__device__ __forceinline__ u32 word(const uint4& words, u32 i) {
    return i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w;
}

}  // namespace cudatma

namespace cudatma {
constexpr u32 WARPS = 4;   // consumer warps; each dequantizes one 64 x 64 block of a 64 x (64 * WARPS) tile of W
constexpr u32 STAGES = 2;
constexpr u32 STAGE_BYTES = 9728;   // bytes from one slot to the next
constexpr u32 EXPECTED_BYTES = 9728;   // bytes that TMA loads per tile
constexpr u32 BLOCK_BYTES = 2048;   // bytes per packed block
constexpr u32 SCALES = 8192;   // offset in a slot, after the packed blocks
constexpr u32 ZEROS = 9216;
constexpr int GROUP_SIZE = 32;   // elements of K that share a scale, or -1 if all of K does
constexpr u32 GROUPS = 2;   // groups of scales per tile
constexpr u32 ROW_BYTES = 144;   // bytes from one row to the next in a warp's buffer
constexpr u32 BUFFER_BYTES = 64 * ROW_BYTES;
// A buffer that TMA stores as a whole has the 128-byte swizzle. If the rows are stored one by one, they are padded instead. In both
// layouts, the chunks that stmatrix writes together are in different banks.
constexpr bool IS_SWIZZLED = ROW_BYTES == 128;
constexpr u32 RING = 73728;  // offset of the ring, after the two buffers of each warp
constexpr u32 BARRIERS = RING + 19456;

// ---- int4 -> bfloat16: one LOP3 inserts two nibbles into the mantissas of a constant -----------------------
// 128 plus the zero points of columns g (low) and g + 8 (high), each in both halves. dequantize() subtracts this value from 128 + v.
struct ZeroPoint {
    u32 low, high;
};

// Return the ZeroPoint of the zero points of columns g and g + 8.
__device__ __forceinline__ ZeroPoint zero_point(u32 low, u32 high) {
    return ZeroPoint{0x43004300u | low | low << 16, 0x43004300u | high | high << 16};
}

// Dequantize the 8 nibbles of a word. 0x4300 is 128.0 in bf16. Its last mantissa bit has the value 1, so 0x4300 | v is exactly 128 + v.
__device__ __forceinline__ void dequantize(u32 (&a)[4], u32 q, const ZeroPoint& zero) {
    a[0] = subtract(lop3_and_or(q, 0x000f000fu, 0x43004300u), zero.low);
    a[1] = subtract(lop3_and_or(q >> 4, 0x000f000fu, 0x43004300u), zero.high);
    a[2] = subtract(lop3_and_or(q >> 8, 0x000f000fu, 0x43004300u), zero.low);
    a[3] = subtract(lop3_and_or(q >> 12, 0x000f000fu, 0x43004300u), zero.high);
}

// ---- The kernel -----------------------------------------------------------------------------------------------------
// Return the first group of scales of a tile.
__device__ __forceinline__ u32 first_group(u32 k64) {
    return GROUP_SIZE < 0 ? 0 : k64 * 64 / (u32)GROUP_SIZE;
}

// Dequantize a warp's packed block into 64 rows x 64 columns of W. The packed order is the register order of operand A of mma.m16n8k16. The
// rows of that operand are columns of W, so stmatrix transposes it. Lanes 0 to 7 pass the addresses of rows 0 to 7 at columns 0 to 7, and
// lanes 8 to 15 pass the addresses of the same rows at columns 8 to 15. Lanes 16 to 31 pass the addresses of rows 8 to 15 in the same
// order.
__device__ __forceinline__ void dequantize_block(const u8* slot, u32 warp, u32 lane, u32 buffer) {
    constexpr u32 K16_PER_GROUP = 4 / GROUPS;
    const u32 row = lane % 8 + lane / 16 * 8, second = lane / 8 % 2;   // second is 1 if the lane passes the second of two chunks
    uint4 words[4];
#pragma unroll
    for (u32 c = 0; c < 4; ++c) words[c] = *(const uint4*)(slot + warp * BLOCK_BYTES + c * 512 + lane * 16);
#pragma unroll
    for (u32 group = 0; group < GROUPS; ++group) {
        const uint4 scales = *(const uint4*)(slot + SCALES + (group * WARPS + warp) * 128 + lane / 4 * 16);
        const uint2 zeros = *(const uint2*)(slot + ZEROS + (group * WARPS + warp) * 64 + lane / 4 * 8);
#pragma unroll
        for (u32 c = 0; c < 4; ++c) {
            const u32 scale = word(scales, c), low = both_low(scale), high = both_high(scale);   // scales of columns g and g + 8
            const u32 pair = (c < 2 ? zeros.x : zeros.y) >> (c % 2 * 16);
            const ZeroPoint zero = zero_point(pair & 0xff, pair >> 8 & 0xff);
#pragma unroll
            for (u32 k16 = group * K16_PER_GROUP; k16 < (group + 1) * K16_PER_GROUP; ++k16) {
                u32 a[4];
                dequantize(a, word(words[c], k16), zero);
                a[0] = multiply(a[0], low), a[1] = multiply(a[1], high);
                a[2] = multiply(a[2], low), a[3] = multiply(a[3], high);
                const u32 chunk = IS_SWIZZLED ? (2 * c + second) ^ (lane % 8) : 2 * c + second;
                stmatrix_x4_trans(buffer + (16 * k16 + row) * ROW_BYTES + chunk * 16, a);
            }
        }
    }
}
}  // namespace cudatma

// Compute output[k, n] = (q[k, n] - zero[group(k), n]) * scale[group(k), n] with one rounding.
// Row k of the packed weight is row permutation[k] of the output.
// The last warp is the producer, and its first lane loads tiles by TMA. The other warps are consumers. Each consumer warp dequantizes a 64
// x 64 block into one of its buffers in shared memory, and stores the buffer by bulk copies.
extern "C" __global__ void __launch_bounds__(160)
dequantize(
    const __grid_constant__ cudatma::TensorMap weight_map,
    const __grid_constant__ cudatma::TensorMap scale_map,
    const __grid_constant__ cudatma::TensorMap zero_map,
    cudatma::u8* output, cudatma::u64 output_pitch,   // bytes from one row to the next
    const int* permutation, cudatma::u32 k,
    cudatma::u32 n, cudatma::u32 tiles_n, cudatma::u32 tiles) {   // n is the number of columns of the output, a multiple of 8
    using namespace cudatma;
    extern __shared__ __align__(1024) u8 shared[];
    const u32 smem = shared_address(shared), warp = threadIdx.x / 32, lane = laneid();

    TmaPipeline<STAGES> pipeline;
    pipeline.init(smem + BARRIERS, 1, WARPS);

    if (warp == WARPS) {
        // ---- Producer -----------------------------------------------------------------------------------------------
        if (lane == 0) {
            prefetch_tensormap(&weight_map);
            prefetch_tensormap(&scale_map);
            for (u32 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
                const u32 k64 = tile / tiles_n, n64 = tile % tiles_n * WARPS;
                const u32 slot = smem + RING + pipeline.stage * STAGE_BYTES, bar = pipeline.get_barrier();
                pipeline.acquire();
                pipeline.expect_tx(EXPECTED_BYTES);
                cp_async_bulk_tensor_3d_load(slot, &weight_map, bar, 0, k64, n64);
                cp_async_bulk_tensor_2d_load(slot + SCALES, &scale_map, bar, n64 * 64, first_group(k64));
                cp_async_bulk_tensor_2d_load(slot + ZEROS, &zero_map, bar, n64 * 64, first_group(k64));
                pipeline.advance();
            }
        }
        return;
    }

    // ---- Consumers --------------------------------------------------------------------------------------------------
    u32 buffer = smem + warp * 2 * BUFFER_BYTES, other = buffer + BUFFER_BYTES;
    for (u32 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const u32 k_begin = tile / tiles_n * 64, n_begin = (tile % tiles_n * WARPS + warp) * 64;
        // Wait until the last stores from this buffer have read it. Each lane waits for its own stores, and stmatrix then synchronizes the
        // lanes.
        cp_async_bulk_wait_group_read<1>();
        pipeline.wait();
        dequantize_block(shared + RING + pipeline.stage * STAGE_BYTES, warp, lane, buffer);
        fence_proxy_async_shared_cta();
        __syncwarp();   // wait until all lanes have read the slot and written the buffer
        if (lane == 0) pipeline.release();
        pipeline.advance();
        if (n_begin < n) {
            const u32 bytes = min(64u, n - n_begin) * 2;
#pragma unroll
            for (u32 row = lane; row < 64; row += 32) {
                if (k_begin + row >= k) break;
                const u32 target = min((u32)permutation[k_begin + row], k - 1);   // clamped, so that the store stays inside the output
                cp_async_bulk_store(output + target * output_pitch + n_begin * 2, buffer + row * ROW_BYTES, bytes);
            }
        }
        cp_async_bulk_commit_group();
        const u32 swapped = buffer;
        buffer = other, other = swapped;
    }
    cp_async_bulk_wait_group<0>();   // TMA must read shared memory before the CTA exits and finish its writes before the kernel ends
}
