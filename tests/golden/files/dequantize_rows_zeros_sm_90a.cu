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
