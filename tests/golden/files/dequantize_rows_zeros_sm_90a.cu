// cudatma: kernels/dequantize.cu.j2 for sm_90a
// spec: DequantizeSpec
//   dtype = 'bfloat16'
//   group_size = 32
//   has_zeros = True
//   has_permutation = True
//   warps = 4
//   stages = 2
//   entry = 'dequantize'
// buffers: 8 x 64 rows x 64 columns, 144 bytes a row
// after them, at +73728:
// ring: 2 stages of 9728 bytes, expect_tx 9728, 1 producer and 4 consumer arrivals; 19488 bytes of shared memory
//   +0 weight: 8192 bytes, 8192 by TMA
//   +8192 scales: 1024 bytes, 1024 by TMA
//   +9216 zeros: 512 bytes, 512 by TMA
//   barriers at +19456: full[2], empty[2]

constexpr u32 WARPS = 4;  // of consumers: each dequantizes one 64 x 64 block of a tile of 64 rows and 64 * WARPS columns of W
constexpr u32 STAGES = 2;
constexpr u32 STAGE_BYTES = 9728;  // from one slot to the next
constexpr u32 EXPECTED_BYTES = 9728;  // what the loads of a tile report to its barrier
constexpr u32 BLOCK_BYTES = 2048;  // of a packed block
constexpr u32 SCALES = 8192;  // in a slot, after the packed blocks
constexpr u32 ZEROS = 9216;
constexpr int GROUP_SIZE = 32;  // K that shares a scale; -1: all of it
constexpr u32 GROUPS = 2;       // groups of scales in a tile
constexpr u32 ROW_BYTES = 144;  // from one row to the next in a warp's buffer
constexpr u32 BUFFER_BYTES = 64 * ROW_BYTES;
// TMA stores a buffer in the 128-byte swizzle as a whole. Rows that are stored one by one have a gap after each instead. In both
// layouts, no two chunks that stmatrix writes together lie in the same bank.
constexpr bool IS_SWIZZLED = ROW_BYTES == 128;
constexpr u32 RING = 73728;  // after the buffers, two for each warp
constexpr u32 BARRIERS = RING + 19456;

// ---- Between bfloat16 and fp32: two values in a register -------------------------------------------------------------

// ---- Arithmetic of two halves in a register -------------------------------------------------------------------------
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

// Moves of halves: ptxas folds them into a modifier of the instruction that reads the pair. It would keep a byte permutation.
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

// A thread's 16 bytes of a 64 x 64 block hold one word for each 16 rows of W: word i.
__device__ __forceinline__ u32 word(const uint4& words, u32 i) {
    return i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w;
}

// ---- int4 -> bfloat16: one LOP3 puts two nibbles into the mantissas of a magic number -------------------------------
__device__ __forceinline__ u32 and_or(u32 a, u32 mask, u32 bits) {   // one LOP3: (a & mask) | bits
    u32 d;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(a), "r"(mask), "r"(bits));
    return d;
}

// What is subtracted from 128 + v: 128 plus the zero point of columns g (low) and g + 8 (high), each in both halves.
struct ZeroPoint {
    u32 low, high;
};

__device__ __forceinline__ ZeroPoint zero_point(u32 zero_low, u32 zero_high) {
    return ZeroPoint{0x43004300u | zero_low | zero_low << 16, 0x43004300u | zero_high | zero_high << 16};
}

// 0x4300 is 128.0 in bf16, whose last mantissa bit counts 1: 0x4300 | v is exactly 128 + v.
__device__ __forceinline__ void dequantize(u32 (&a)[4], u32 q, const ZeroPoint& zero) {
    a[0] = subtract(and_or(q, 0x000f000fu, 0x43004300u), zero.low);
    a[1] = subtract(and_or(q >> 4, 0x000f000fu, 0x43004300u), zero.high);
    a[2] = subtract(and_or(q >> 8, 0x000f000fu, 0x43004300u), zero.low);
    a[3] = subtract(and_or(q >> 12, 0x000f000fu, 0x43004300u), zero.high);
}

// ---- The kernel -----------------------------------------------------------------------------------------------------
// The first group of scales of a tile.
__device__ __forceinline__ u32 first_group(u32 k64) {
    return GROUP_SIZE < 0 ? 0 : k64 * 64 / (u32)GROUP_SIZE;
}

// A warp dequantizes its packed block into 64 rows x 64 columns of W. The packed order is that of mma's operand A, whose rows are
// columns of W; stmatrix transposes it. Lanes 0..7 address rows 0..7 of W at columns 0..7, lanes 8..15 the same rows at columns
// 8..15; lanes 16..31 address rows 8..15 in the same way.
__device__ __forceinline__ void dequantize_block(const u8* slot, u32 warp, u32 lane, u32 buffer) {
    constexpr u32 K16_PER_GROUP = 4 / GROUPS;
    const u32 row = lane % 8 + lane / 16 * 8, second = lane / 8 % 2;   // second: of a pair of 16-byte chunks
    uint4 words[4];
#pragma unroll
    for (u32 c = 0; c < 4; ++c) words[c] = *(const uint4*)(slot + warp * BLOCK_BYTES + c * 512 + lane * 16);
#pragma unroll
    for (u32 group = 0; group < GROUPS; ++group) {
        const uint4 scales = *(const uint4*)(slot + SCALES + (group * WARPS + warp) * 128 + lane / 4 * 16);
        const uint2 zeros = *(const uint2*)(slot + ZEROS + (group * WARPS + warp) * 64 + lane / 4 * 8);
#pragma unroll
        for (u32 c = 0; c < 4; ++c) {
            const u32 scale = word(scales, c), low = both_low(scale), high = both_high(scale);   // of columns g and g + 8
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

// output[k, n] = (q[k, n] - zero[group(k), n]) * scale[group(k), n], rounded once.
// Row k of the packed weight goes to row permutation[k] of the output.
// The last warp is the producer: its first lane loads tiles by TMA. The other warps are consumers: each dequantizes a 64 x 64 block
// into its buffer in shared memory and stores the buffer by bulk copies.
extern "C" __global__ void __launch_bounds__(160)
dequantize(
    const __grid_constant__ cudatma::TensorMap weight_map,
    const __grid_constant__ cudatma::TensorMap scale_map,
    const __grid_constant__ cudatma::TensorMap zero_map,
    cudatma::u8* output, cudatma::u64 output_pitch,   // bytes from row to row
    const int* permutation, cudatma::u32 k,
    cudatma::u32 n, cudatma::u32 tiles_n, cudatma::u32 tiles) {   // n: columns of the output, whole 16 bytes
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
        // Each lane waits until its store before the last has read this buffer. stmatrix then waits for all lanes of the warp.
        cp_async_bulk_wait_group_read<1>();
        pipeline.wait();
        dequantize_block(shared + RING + pipeline.stage * STAGE_BYTES, warp, lane, buffer);
        fence_proxy_async_shared_cta();
        __syncwarp();   // all lanes have read the slot and written the buffer
        if (lane == 0) pipeline.release();
        pipeline.advance();
        if (n_begin < n) {
            const u32 bytes = min(64u, n - n_begin) * 2;
#pragma unroll
            for (u32 row = lane; row < 64; row += 32) {
                if (k_begin + row >= k) break;
                const u32 target = min((u32)permutation[k_begin + row], k - 1);   // no store leaves the array
                cp_async_bulk_store(output + target * output_pitch + n_begin * 2, buffer + row * ROW_BYTES, bytes);
            }
        }
        cp_async_bulk_commit_group();
        const u32 swapped = buffer;
        buffer = other, other = swapped;
    }
    cp_async_bulk_wait_group<0>();   // shared memory must outlive the reads, and the kernel must outlive the writes
}
