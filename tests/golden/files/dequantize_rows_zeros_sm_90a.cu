// cudatma: kernels/dequantize.cu.j2 for sm_90a
// spec: DequantizeSpec
//   dtype = 'bfloat16'
//   group_size = 32
//   has_zeros = True
//   has_permutation = True
//   warps = 4
//   stages = 2
//   entry = 'dequantize'
// staged results: 8 x 64 depths x 64 channels, 144 bytes a depth
// behind them, at +73728:
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

// [PTX ISA, membar / fence, .proxy.async] Orders this thread's plain accesses to shared memory before TMA's later
// ones: before a tile store of what was written, and before a slot that plain stores wrote is filled again.
__device__ __forceinline__ void fence_proxy_async_shared_cta() {
    asm volatile("fence.proxy.async.shared::cta;" : : : "memory");
}

// [PTX ISA, membar / fence, .acq_rel.cta] Orders this thread's memory accesses within the block. ptxas may issue a later
// mbarrier.arrive while earlier ld.shared are under way; it waits for them at this fence.
__device__ __forceinline__ void fence_acq_rel_cta() {
    asm volatile("fence.acq_rel.cta;" : : : "memory");
}

__device__ __forceinline__ void stmatrix_x4_trans(u32 addr, const u32 (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                 :
                 : "r"(addr), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}

// [PTX ISA, Special Registers, %laneid] This thread's place in its warp. ptxas reads it again rather than keep it in a register.
__device__ __forceinline__ u32 laneid() {
    u32 lane;
    asm("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
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

__device__ __forceinline__ void cp_async_bulk_tensor_3d_load(
    u32 dst, const TensorMap* map, u32 bar, int c0, int c1, int c2) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cta.global.tile.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4, %5}], [%2];"
        :
        : "r"(dst), "l"(map), "r"(bar), "r"(c0), "r"(c1), "r"(c2)
        : "memory");
}

// [PTX ISA, prefetch] Brings the 128 bytes of a tensor map to the descriptor cache before the first load needs them.
__device__ __forceinline__ void prefetch_tensormap(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" : : "l"(map) : "memory");
}

// [PTX ISA, cp.async.bulk] The way back; part of the issuing thread's current bulk group.
__device__ __forceinline__ void cp_async_bulk_store(void* dst, u32 src, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                 :
                 : "l"(__cvta_generic_to_global(dst)), "r"(src), "r"(bytes)
                 : "memory");
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

constexpr u32 WARPS = 4;  // each takes the 64 x 64 blocks of its channels: a tile is 64 deep, WARPS blocks wide
constexpr u32 STAGES = 2;
constexpr u32 STAGE_BYTES = 9728;  // from one slot to the next
constexpr u32 EXPECTED_BYTES = 9728;  // what the loads of a tile report to its barrier
constexpr u32 BLOCK_BYTES = 2048;  // packed
constexpr u32 SCALES = 8192;  // in a slot, behind the packed blocks
constexpr u32 ZEROS = 9216;
constexpr u32 GROUPS = 2;  // groups in a tile's depth
constexpr u32 STEPS = 4 / GROUPS;  // 16-deep steps of a group
constexpr u32 ROW_BYTES = 144;  // from one depth to the next in the staged result of a warp
constexpr u32 BUFFER_BYTES = 64 * ROW_BYTES;
constexpr u32 RING = 73728;  // behind the staged results: two buffers a warp
constexpr u32 BARRIERS = RING + 19456;

// ---- int4 -> bfloat16: one LOP3 puts two nibbles into the mantissas of a magic number -------------------------------
__device__ __forceinline__ u32 and_or(u32 a, u32 mask, u32 bits) {   // one LOP3: (a & mask) | bits
    u32 d;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(a), "r"(mask), "r"(bits));
    return d;
}
__device__ __forceinline__ u32 sub_bf16x2(u32 a, u32 b) {
    u32 d;
    asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}
__device__ __forceinline__ u32 multiply(u32 a, u32 b) {
    u32 d;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}
// What is subtracted from 128 + v: the zero point of channels g (low) and g + 8 (high), each in both halves.
struct ZeroPoint {
    u32 low, high;
};
__device__ __forceinline__ ZeroPoint zero_point(u32 zero_low, u32 zero_high) {
    return ZeroPoint{0x43004300u | zero_low | zero_low << 16, 0x43004300u | zero_high | zero_high << 16};
}
// 0x4300 is 128.0 with a unit in the last mantissa bit: or-ing v in gives exactly 128 + v.
__device__ __forceinline__ void dequantize(u32 (&a)[4], u32 q, const ZeroPoint& zero) {
    a[0] = sub_bf16x2(and_or(q, 0x000f000fu, 0x43004300u), zero.low);
    a[1] = sub_bf16x2(and_or(q >> 4, 0x000f000fu, 0x43004300u), zero.high);
    a[2] = sub_bf16x2(and_or(q >> 8, 0x000f000fu, 0x43004300u), zero.low);
    a[3] = sub_bf16x2(and_or(q >> 12, 0x000f000fu, 0x43004300u), zero.high);
}
// As moves of halves, which ptxas makes a modifier of the instruction that reads the pair; a byte permutation it would keep.
__device__ __forceinline__ u32 both_low(u32 pair) {
    u32 d;
    asm("{ .reg .b16 l, h; mov.b32 {l, h}, %1; mov.b32 %0, {l, l}; }" : "=r"(d) : "r"(pair));
    return d;
}
__device__ __forceinline__ u32 both_high(u32 pair) {
    u32 d;
    asm("{ .reg .b16 l, h; mov.b32 {l, h}, %1; mov.b32 %0, {h, h}; }" : "=r"(d) : "r"(pair));
    return d;
}
// A thread's 16 bytes of a 64-deep block: one word for each 16-deep step.
__device__ __forceinline__ u32 word(const uint4& words, u32 i) {
    return i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w;
}
// A warp turns its packed block into 64 depths x 64 channels. stmatrix transposes the fragments of mma's operand A, whose
// rows are channels: lanes 0-7 name the rows of depths 0-7, channels 0-7; then channels 8-15, and the same 8 deeper.
__device__ __forceinline__ void dequantize_block(const u8* slot, u32 warp, u32 lane, u32 buffer) {
    const u32 row = lane % 8 + lane / 16 * 8, second = lane / 8 % 2;   // second: of a pair of 16-byte pieces
    uint4 words[4];
#pragma unroll
    for (u32 c = 0; c < 4; ++c) words[c] = *(const uint4*)(slot + warp * BLOCK_BYTES + c * 512 + lane * 16);
#pragma unroll
    for (u32 group = 0; group < GROUPS; ++group) {
        const uint4 scales = *(const uint4*)(slot + SCALES + (group * WARPS + warp) * 128 + lane / 4 * 16);
        const uint2 zeros = *(const uint2*)(slot + ZEROS + (group * WARPS + warp) * 64 + lane / 4 * 8);
#pragma unroll
        for (u32 c = 0; c < 4; ++c) {
            const u32 scale = word(scales, c), low = both_low(scale), high = both_high(scale);   // channels g and g + 8
            const u32 pair = (c < 2 ? zeros.x : zeros.y) >> (c % 2 * 16);
            const ZeroPoint zero = zero_point(pair & 0xff, pair >> 8 & 0xff);
#pragma unroll
            for (u32 step = group * STEPS; step < (group + 1) * STEPS; ++step) {
                u32 a[4];
                dequantize(a, word(words[c], step), zero);
                a[0] = multiply(a[0], low), a[1] = multiply(a[1], high);
                a[2] = multiply(a[2], low), a[3] = multiply(a[3], high);
                const u32 piece = 2 * c + second;                       // rows have a gap: no two meet in a bank
                stmatrix_x4_trans(buffer + (16 * step + row) * ROW_BYTES + piece * 16, a);
            }
        }
    }
}
}  // namespace cudatma

// output[k, n] = (q[k, n] - zero[group(k), n]) * scale[group(k), n], rounded once.
// Row k of the packed weight goes to row permutation[k].
// One thread loads tiles by TMA; WARPS warps dequantise a 64 x 64 block each and store it from shared memory, by TMA as well.
extern "C" __global__ void __launch_bounds__(160)
dequantize(
    const __grid_constant__ cudatma::TensorMap weight_map,
    const __grid_constant__ cudatma::TensorMap scale_map,
    const __grid_constant__ cudatma::TensorMap zero_map,
    cudatma::u8* output, cudatma::u64 output_pitch,   // bytes from row to row
    const int* permutation, cudatma::u32 depth,
    cudatma::u32 channels, cudatma::u32 tiles_n, cudatma::u32 tiles) {   // channels: whole 16 bytes
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
                cp_async_bulk_tensor_2d_load(slot + SCALES, &scale_map, bar, n64 * 64, k64 * 2);
                cp_async_bulk_tensor_2d_load(slot + ZEROS, &zero_map, bar, n64 * 64, k64 * 2);
                pipeline.advance();
            }
        }
        return;
    }

    // ---- Consumers --------------------------------------------------------------------------------------------------
    u32 buffer = smem + warp * 2 * BUFFER_BYTES, other = buffer + BUFFER_BYTES;
    for (u32 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const u32 row0 = tile / tiles_n * 64, channel0 = (tile % tiles_n * WARPS + warp) * 64;
        cp_async_bulk_wait_group_read<1>();   // the store before the last has read this buffer; stmatrix waits for all lanes
        pipeline.wait();
        dequantize_block(shared + RING + pipeline.stage * STAGE_BYTES, warp, lane, buffer);
        fence_proxy_async_shared_cta();
        __syncwarp();                         // the warp has read the slot, and written its buffer
        if (lane == 0) pipeline.release();
        pipeline.advance();
        if (channel0 < channels) {
            const u32 bytes = min(64u, channels - channel0) * 2;
#pragma unroll
            for (u32 row = lane; row < 64; row += 32) {
                if (row0 + row >= depth) break;
                const u32 target = min((u32)permutation[row0 + row], depth - 1);   // no store leaves the array
                cp_async_bulk_store(output + target * output_pitch + channel0 * 2, buffer + row * ROW_BYTES, bytes);
            }
        }
        cp_async_bulk_commit_group();
        const u32 swapped = buffer;
        buffer = other, other = swapped;
    }
    cp_async_bulk_wait_group<0>();
}
