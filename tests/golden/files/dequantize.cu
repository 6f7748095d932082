// cudatma: kernels/dequantize.cu.j2 for sm_90a
// config: DequantizeConfig
//   dtype = 'bfloat16'
//   group_size = 32
//   has_zeros = True
//   has_permutation = True
// buffers: 8 x 64 rows x 64 columns, 144 bytes per row
// after the buffers, at +73728:
// ring: 2 stages of 9728 bytes; per stage, expect_tx of 9728 bytes, 1 producer arrival and 4 consumer arrivals; 19488 bytes of shared memory in total
//   +0 weight: 8192 bytes, 8192 loaded by TMA
//   +8192 scales: 1024 bytes, 1024 loaded by TMA
//   +9216 zeros: 512 bytes, 512 loaded by TMA
//   barriers at +19456: full[2], empty[2]

// primitives.cu contains
// u8, u16, u32, u64, TensorMap, shared_address, laneid, fence_proxy_async_shared_cta, fence_acq_rel_cta,
// mbarrier_init, mbarrier_arrive, mbarrier_arrive_expect_tx, mbarrier_try_wait_parity, mbarrier_wait_parity,
// fence_mbarrier_init, cp_async_bulk_tensor_2d_load, cp_async_bulk_tensor_3d_load, prefetch_tensormap,
// cp_async_bulk_store, cp_async_bulk_commit_group, cp_async_bulk_wait_group, cp_async_bulk_wait_group_read,
// ld_shared_v4_b32, stmatrix_x4_trans, lop3_and_or, TmaPipeline, subtract, multiply, both_low, both_high, word

namespace cudatma {
constexpr u32 WARPS = 4;   // consumer warps; each dequantizes one 64 x 64 block of a 64 x (64 * WARPS) tile of W
constexpr u32 STAGES = 2;
constexpr u32 STAGE_BYTES = 9728;   // bytes from one slot to the next
constexpr u32 EXPECTED_BYTES = 9728;   // bytes that TMA loads per tile
constexpr u32 BLOCK_BYTES = 2048;   // bytes per packed block
constexpr u32 SCALES = 8192;   // offset in a slot, after the packed blocks
constexpr u32 ZEROS = 9216;
constexpr int GROUP_SIZE = 32;   // elements of K that share a scale, or -1 for all of K
constexpr u32 GROUPS = 2;   // groups of scales per tile
constexpr u32 ROW_BYTES = 144;   // bytes from one row to the next in a warp's buffer
constexpr u32 BUFFER_BYTES = 64 * ROW_BYTES;
// A buffer that TMA stores as a whole uses the 128-byte swizzle. If the rows are stored one by one, they are padded instead. Both layouts
// place the chunks that one stmatrix writes in different banks.
constexpr bool IS_SWIZZLED = ROW_BYTES == 128;
constexpr u32 RING = 73728;  // offset of the ring, after the two buffers of each warp
constexpr u32 BARRIERS = RING + 19456;

// ---- Packed weights: the codes that a thread multiplies -------------------------------------------------------------
// A thread's codes in a block of 64 elements of K and 16 columns, one word of 8 codes per step of 16 elements of K.
using PackedCodes = uint4;
using StepCodes = u32;

__device__ __forceinline__ PackedCodes load_codes(u32 address, u32) { return ld_shared_v4_b32(address); }

__device__ __forceinline__ StepCodes step_codes(const PackedCodes& packed, u32 step) { return word(packed, step); }

// ---- int4 -> bfloat16: one LOP3 inserts two nibbles into the mantissas of a constant -----------------------
// 128 plus the zero points of columns g (low) and g + 8 (high), each in both halves. dequantize() subtracts this value from 128 + v.
struct ZeroPoint {
    u32 low, high;
};

// Return the ZeroPoint of the zero points of columns g and g + 8.
__device__ __forceinline__ ZeroPoint zero_point(u32 low, u32 high) {
    return ZeroPoint{0x43004300u | low | low << 16, 0x43004300u | high | high << 16};
}

// Dequantize the 8 nibbles of a word. 0x4300 is 128.0 in bf16. Its last mantissa bit has the weight 1.0, so the bits 0x4300 | v represent exactly 128 + v.
__device__ __forceinline__ void dequantize(u32 (&a)[4], StepCodes q, const ZeroPoint& zero) {
    a[0] = subtract(lop3_and_or(q, 0x000f000fu, 0x43004300u), zero.low);
    a[1] = subtract(lop3_and_or(q >> 4, 0x000f000fu, 0x43004300u), zero.high);
    a[2] = subtract(lop3_and_or(q >> 8, 0x000f000fu, 0x43004300u), zero.low);
    a[3] = subtract(lop3_and_or(q >> 12, 0x000f000fu, 0x43004300u), zero.high);
}

// ---- The kernel -----------------------------------------------------------------------------------------------------
// Return the index of the first scale group of a tile.
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
    const u32 codes = shared_address(slot) + warp * BLOCK_BYTES + lane * 16;
    PackedCodes packed[4];
#pragma unroll
    for (u32 c = 0; c < 4; ++c) packed[c] = load_codes(codes + c * 512, BLOCK_BYTES / 2);
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
                dequantize(a, step_codes(packed[c], k16), zero);
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
        // Wait until the previous stores from this buffer have read it. Each lane waits for its own stores, and stmatrix then synchronizes
        // the lanes.
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
                const u32 target = min((u32)permutation[k_begin + row], k - 1);   // clamped so that the store stays inside the output
                cp_async_bulk_store(output + target * output_pitch + n_begin * 2, buffer + row * ROW_BYTES, bytes);
            }
        }
        cp_async_bulk_commit_group();
        const u32 swapped = buffer;
        buffer = other, other = swapped;
    }
    cp_async_bulk_wait_group<0>();   // TMA must read shared memory before the CTA exits and finish its writes before the kernel ends
}
