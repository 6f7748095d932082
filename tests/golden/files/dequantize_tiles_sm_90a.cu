// cudatma: kernels/dequantize.cu.j2 for sm_90a
// spec: DequantizeSpec
//   dtype = 'float16'
//   group_size = 128
//   has_zeros = False
//   has_permutation = False
//   warps = 4
//   stages = 3
//   entry = 'dequantize'
// buffers: 8 x 64 rows x 64 columns, 128 bytes a row
// after them, at +65536:
// ring: 3 stages of 8704 bytes, expect_tx 8704, 1 producer and 4 consumer arrivals; 26160 bytes of shared memory
//   +0 weight: 8192 bytes, 8192 by TMA
//   +8192 scales: 512 bytes, 512 by TMA
//   barriers at +26112: full[3], empty[3]

constexpr u32 WARPS = 4;  // of consumers: each dequantizes one 64 x 64 block of a tile of 64 rows and 64 * WARPS columns of W
constexpr u32 STAGES = 3;
constexpr u32 STAGE_BYTES = 8704;  // from one slot to the next
constexpr u32 EXPECTED_BYTES = 8704;  // what the loads of a tile report to its barrier
constexpr u32 BLOCK_BYTES = 2048;  // of a packed block
constexpr u32 SCALES = 8192;  // in a slot, after the packed blocks
constexpr int GROUP_SIZE = 128;  // K that shares a scale; -1: all of it
constexpr u32 GROUPS = 1;       // groups of scales in a tile
constexpr u32 ROW_BYTES = 128;  // from one row to the next in a warp's buffer
constexpr u32 BUFFER_BYTES = 64 * ROW_BYTES;
// TMA stores a buffer in the 128-byte swizzle as a whole. Rows that are stored one by one have a gap after each instead. In both
// layouts, no two chunks that stmatrix writes together lie in the same bank.
constexpr bool IS_SWIZZLED = ROW_BYTES == 128;
constexpr u32 RING = 65536;  // after the buffers, two for each warp
constexpr u32 BARRIERS = RING + 26112;

// ---- Between float16 and fp32: two values in a register -------------------------------------------------------------

// ---- Arithmetic of two halves in a register -------------------------------------------------------------------------
__device__ __forceinline__ u32 subtract(u32 a, u32 b) {
    u32 d;
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}

__device__ __forceinline__ u32 multiply(u32 a, u32 b) {
    u32 d;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}

__device__ __forceinline__ u32 multiply_add(u32 a, u32 b, u32 c) {
    u32 d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
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

// ---- int4 -> float16: one LOP3 puts two nibbles into the mantissas of a magic number -------------------------------
__device__ __forceinline__ u32 and_or(u32 a, u32 mask, u32 bits) {   // one LOP3: (a & mask) | bits
    u32 d;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(a), "r"(mask), "r"(bits));
    return d;
}

// low: 1024 + zero point of column g, which is subtracted. high: -(64 + zero point) of column g + 8, which is added after the
// division by 16. Each in both halves.
struct ZeroPoint {
    u32 low, high;
};

__device__ __forceinline__ ZeroPoint zero_point(u32 zero_low, u32 zero_high) {
    return ZeroPoint{0x64006400u | zero_low | zero_low << 16, 0xd400d400u | zero_high << 4 | zero_high << 20};
}

// 0x6400 is 1024.0 in fp16, whose last mantissa bit counts 1: 0x6400 | v is exactly 1024 + v, and 0x6400 | v << 4 is 1024 + 16 v.
// 1/16 of the latter is exactly 64 + v. The nibbles of column g + 8 therefore need no shift.
__device__ __forceinline__ void dequantize(u32 (&a)[4], u32 q, const ZeroPoint& zero) {
    const u32 upper = q >> 8;
    a[0] = subtract(and_or(q, 0x000f000fu, 0x64006400u), zero.low);
    a[1] = multiply_add(and_or(q, 0x00f000f0u, 0x64006400u), 0x2c002c00u, zero.high);
    a[2] = subtract(and_or(upper, 0x000f000fu, 0x64006400u), zero.low);
    a[3] = multiply_add(and_or(upper, 0x00f000f0u, 0x64006400u), 0x2c002c00u, zero.high);
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
#pragma unroll
        for (u32 c = 0; c < 4; ++c) {
            const u32 scale = word(scales, c), low = both_low(scale), high = both_high(scale);   // of columns g and g + 8
            const ZeroPoint zero = zero_point(8, 8);
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
// The last warp is the producer: its first lane loads tiles by TMA. The other warps are consumers: each dequantizes a 64 x 64 block
// into its buffer in shared memory and stores the buffer by bulk copies.
extern "C" __global__ void __launch_bounds__(160)
dequantize(
    const __grid_constant__ cudatma::TensorMap weight_map,
    const __grid_constant__ cudatma::TensorMap scale_map,
    const __grid_constant__ cudatma::TensorMap output_map,
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
        if (lane == 0 && n_begin < n) cp_async_bulk_tensor_2d_store(&output_map, buffer, n_begin, k_begin);
        cp_async_bulk_commit_group();
        const u32 swapped = buffer;
        buffer = other, other = swapped;
    }
    cp_async_bulk_wait_group<0>();   // shared memory must outlive the reads, and the kernel must outlive the writes
}
