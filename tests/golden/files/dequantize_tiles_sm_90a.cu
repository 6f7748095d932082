// cudatma: kernels/dequantize.cu.j2 for sm_90a
// spec: DequantizeSpec
//   dtype = 'float16'
//   group_size = 128
//   has_zeros = False
//   has_permutation = False
//   warps = 4
//   stages = 3
//   entry = 'dequantize'
// staged results: 8 x 64 depths x 64 channels, 128 bytes a depth
// behind them, at +65536:
// ring: 3 stages of 8704 bytes, expect_tx 8704, 1 producer and 4 consumer arrivals; 26160 bytes of shared memory
//   +0 weight: 8192 bytes, 8192 by TMA
//   +8192 scales: 512 bytes, 512 by TMA
//   barriers at +26112: full[3], empty[3]

constexpr u32 WARPS = 4;  // each takes the 64 x 64 blocks of its channels: a tile is 64 deep, WARPS blocks wide
constexpr u32 STAGES = 3;
constexpr u32 STAGE_BYTES = 8704;  // from one slot to the next
constexpr u32 EXPECTED_BYTES = 8704;  // what the loads of a tile report to its barrier
constexpr u32 BLOCK_BYTES = 2048;  // packed
constexpr u32 SCALES = 8192;  // in a slot, behind the packed blocks
constexpr u32 GROUPS = 1;  // groups in a tile's depth
constexpr u32 STEPS = 4 / GROUPS;  // 16-deep steps of a group
constexpr u32 ROW_BYTES = 128;  // from one depth to the next in the staged result of a warp
constexpr u32 BUFFER_BYTES = 64 * ROW_BYTES;
constexpr u32 RING = 65536;  // behind the staged results: two buffers a warp
constexpr u32 BARRIERS = RING + 26112;

// ---- int4 -> float16: one LOP3 puts two nibbles into the mantissas of a magic number -------------------------------
__device__ __forceinline__ u32 and_or(u32 a, u32 mask, u32 bits) {   // one LOP3: (a & mask) | bits
    u32 d;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(a), "r"(mask), "r"(bits));
    return d;
}
__device__ __forceinline__ u32 sub_f16x2(u32 a, u32 b) {
    u32 d;
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}
__device__ __forceinline__ u32 multiply_add(u32 a, u32 b, u32 c) {
    u32 d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}
__device__ __forceinline__ u32 multiply(u32 a, u32 b) {
    u32 d;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}
// low: 1024 + zero of channel g, subtracted; high: -(64 + zero) of channel g + 8, added after the division by 16.
struct ZeroPoint {
    u32 low, high;
};
__device__ __forceinline__ ZeroPoint zero_point(u32 zero_low, u32 zero_high) {
    return ZeroPoint{0x64006400u | zero_low | zero_low << 16, 0xd400d400u | zero_high << 4 | zero_high << 20};
}
// 0x6400 is 1024.0 with a unit in the last mantissa bit: or-ing v in gives exactly 1024 + v, or-ing v << 4 gives 1024 + 16 v;
// the latter times 1/16 is 64 + v, exact as well. So channel g needs no shift for its nibbles, nor does channel g + 8.
__device__ __forceinline__ void dequantize(u32 (&a)[4], u32 q, const ZeroPoint& zero) {
    const u32 upper = q >> 8;
    a[0] = sub_f16x2(and_or(q, 0x000f000fu, 0x64006400u), zero.low);
    a[1] = multiply_add(and_or(q, 0x00f000f0u, 0x64006400u), 0x2c002c00u, zero.high);
    a[2] = sub_f16x2(and_or(upper, 0x000f000fu, 0x64006400u), zero.low);
    a[3] = multiply_add(and_or(upper, 0x00f000f0u, 0x64006400u), 0x2c002c00u, zero.high);
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
#pragma unroll
        for (u32 c = 0; c < 4; ++c) {
            const u32 scale = word(scales, c), low = both_low(scale), high = both_high(scale);   // channels g and g + 8
            const ZeroPoint zero = zero_point(8, 8);
#pragma unroll
            for (u32 step = group * STEPS; step < (group + 1) * STEPS; ++step) {
                u32 a[4];
                dequantize(a, word(words[c], step), zero);
                a[0] = multiply(a[0], low), a[1] = multiply(a[1], high);
                a[2] = multiply(a[2], low), a[3] = multiply(a[3], high);
                const u32 piece = (2 * c + second) ^ (lane % 8);        // the 128-byte swizzle
                stmatrix_x4_trans(buffer + (16 * step + row) * ROW_BYTES + piece * 16, a);
            }
        }
    }
}
}  // namespace cudatma

// output[k, n] = (q[k, n] - zero[group(k), n]) * scale[group(k), n], rounded once.
// One thread loads tiles by TMA; WARPS warps dequantise a 64 x 64 block each and store it from shared memory, by TMA as well.
extern "C" __global__ void __launch_bounds__(160)
dequantize(
    const __grid_constant__ cudatma::TensorMap weight_map,
    const __grid_constant__ cudatma::TensorMap scale_map,
    const __grid_constant__ cudatma::TensorMap output_map,
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
                cp_async_bulk_tensor_2d_load(slot + SCALES, &scale_map, bar, n64 * 64, k64 / 2);
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
        if (lane == 0 && channel0 < channels) cp_async_bulk_tensor_2d_store(&output_map, buffer, channel0, row0);
        cp_async_bulk_commit_group();
        const u32 swapped = buffer;
        buffer = other, other = swapped;
    }
    cp_async_bulk_wait_group<0>();
}
