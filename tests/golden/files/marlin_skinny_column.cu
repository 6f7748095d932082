// cudatma: kernels/marlin_skinny.cu.j2 for sm_90a
// spec: SkinnySpec
//   dtype = 'float16'
//   group_size = -1
//   has_zeros = False
//   block_m = 8
//   n_tiles = 2
//   block_k = 512
//   slice_k = 1
//   stages = 3
//   weight_policy = 'evict_normal'
//   blocks_per_sm = 2
//   deep_box = False
//   cluster_k = 1
// 2 warps consume, 1 produce; a block takes 73776 B.
// One stage holds
//     8192 B  activations 8 x 512 float16, 128B swizzle
//    16384 B  weights 64 x 512 int4, packed layout 1
// Shared memory, by offset
//        0  activations, 24576 B
//    24576  weights, 49152 B
//    73728  full_barriers, 24 B
//    73752  empty_barriers, 24 B

// [PTX ISA, griddepcontrol] Waits until the kernels before this one in the stream are finished and their writes visible.
// Returns at once unless the launch was a programmatic dependent one.
__device__ __forceinline__ void griddepcontrol_wait() {
    asm volatile("griddepcontrol.wait;" : : : "memory");
}

// [PTX ISA, griddepcontrol] The next kernel may start once all blocks have said so or ended.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
    asm volatile("griddepcontrol.launch_dependents;" : : : "memory");
}

// ---- The problem's types and the tile, as named constants -----------------------------------------------------------
constexpr u32 BLOCK_M = 8;      // tokens of a block (columns of the mma)
constexpr u32 N_TILES = 2;      // N tiles of 32 channels (two rows of mmas) that a block computes, one a warp
constexpr u32 WHOLE_ROWS = 1;   // 64-channel rows of packed weights that lie in them as a whole
constexpr u32 BLOCK_K = 512;      // depth of one stage
constexpr u32 SLICE_K = 1;      // warps that work on the same N tile and divide each stage's depth
constexpr u32 STAGES = 3;
constexpr u32 CONSUMER_WARPS = 2;
constexpr u32 GROUP_SIZE = 512;   // depths that share a scale; 0: the whole column

constexpr u32 FRAGMENTS = 2;                    // 16-channel fragments of an N tile
constexpr u32 N8 = 1;                   // 8-token fragments
constexpr u32 K64_PER_STAGE = BLOCK_K / 64;
constexpr u32 K64_PER_WARP = K64_PER_STAGE / SLICE_K;
constexpr u32 K64_BLOCK_BYTES = 2048;           // one 64 x 64 block of packed weights; the upper 1024 are its channels 32..63
constexpr u32 HALF_BLOCK_BYTES = 1024, HALF_BLOCK_WORDS = HALF_BLOCK_BYTES / 8;
constexpr u32 ROW_BYTES = 128;                  // of the activations' boxes: 64 depths
constexpr u32 SCALE_ROW = 64;  // channels of a stage's row of scales: whole 64-channel rows

// ---- Shared memory: one array an operand, STAGES slots each; offsets from a 1024-byte aligned base ------------------
constexpr u32 ACTIVATION_STAGE_BYTES = 8192;
constexpr u32 WEIGHT_STAGE_BYTES = 16384;
constexpr u32 SCALE_STAGE_BYTES = 0;
constexpr u32 ZERO_SLOT_BYTES = 0;
constexpr u32 TRANSACTION_BYTES = 24576;   // what TMA brings into one stage
constexpr u32 ACTIVATIONS = 0;
constexpr u32 WEIGHTS = 24576;
constexpr u32 SCALES = 73728;
constexpr u32 ZEROS = 73728;
constexpr u32 DEPTH_REDUCTION = 73728;
constexpr u32 FULL_BARRIERS = 73728;
constexpr u32 EMPTY_BARRIERS = 73752;

// What a launch passes to the kernel, besides tensor maps and pointers: the members that this kernel reads.
struct Problem {
    u32 m;                          // rows of the activations and of the result
    u32 n;                          // columns of the weight and of the result
    u32 tiles_n;                    // output tiles along N, each of one CTA or cluster
    u32 k_iterations;               // stages that one tile takes
    u32 scale_pitch;                // columns of a row of scales, padded
    u32 output_vectors;             // 1: every row of the result is aligned to 16 bytes
    u32 prefetch_stages;            // stages whose weights a dependent launch loads before it waits
    u64 output_pitch;               // elements from one row to the next
};
// ---- Which channels a block computes --------------------------------------------------------------------------------
// N tiles are counted over the whole weight. With an odd number of them every other block begins in the upper half of a row.
struct NTiles {
    u32 first;          // of this block
    u32 first_row;      // the 64-channel row that it lies in
    u32 first_whole;    // the first row that lies in the block as a whole
    bool half_first;    // the block begins with the upper half of a row; else an odd block ends with the lower half of one

    __device__ __forceinline__ explicit NTiles(u32 tile_n)
        : first(tile_n * N_TILES), first_row(first / 2), first_whole((first + 1) / 2), half_first(first & 1) {}

    // Shared memory has the whole rows first, whichever end the half row belongs to. The N tile at a position there.
    __device__ __forceinline__ u32 at(u32 position) const {
        return first + position;
    }
};
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
__device__ __forceinline__ float low_to_float(u32 pair) {
    float d;
    asm("{ .reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l; }" : "=f"(d) : "r"(pair));
    return d;
}
__device__ __forceinline__ float high_to_float(u32 pair) {
    float d;
    asm("{ .reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, h; }" : "=f"(d) : "r"(pair));
    return d;
}
__device__ __forceinline__ u32 to_pair(float low, float high) {
    u32 d;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
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
// A thread's 16 bytes of a 64-deep block: one word for each 16-deep step.
__device__ __forceinline__ u32 word(const uint4& words, u32 i) {
    return i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w;
}
// ---- Producer: the loads of one stage; one thread issues them -------------------------------------------------------
struct Maps {
    const TensorMap *weight, *half_weight, *scale, *zero, *activation;
};

// Operands that no kernel before this one writes: weights, the whole rows first and then half a row, scales and zero points.
// Blocks outside of the tensor arrive as zeros, and so do their scales.
__device__ __forceinline__ void load_constants(u32 smem, u32 slot, const Maps& maps, const NTiles& n_tiles, u32 k_iteration,
                                               u64 policy) {
    const u32 full = smem + FULL_BARRIERS + 8 * slot, k64 = k_iteration * K64_PER_STAGE;
    mbarrier_arrive_expect_tx(full, TRANSACTION_BYTES);
    const u32 weights = smem + WEIGHTS + slot * WEIGHT_STAGE_BYTES;
    cp_async_bulk_tensor_3d_load_hint(weights, maps.weight, full, 0, k64, n_tiles.first_whole, policy);
}

// K64_PER_STAGE boxes of BLOCK_M tokens x 64 depths in the 128-byte swizzle; tokens and depths outside are zero.
__device__ __forceinline__ void load_activations(u32 smem, u32 slot, const Maps& maps, u32 tile_m, u32 k_iteration) {
    const u32 target = smem + ACTIVATIONS + slot * ACTIVATION_STAGE_BYTES;
#pragma unroll
    for (u32 i = 0; i < K64_PER_STAGE; ++i)
        cp_async_bulk_tensor_2d_load(target + i * BLOCK_M * ROW_BYTES, maps.activation, smem + FULL_BARRIERS + 8 * slot,
                                     k_iteration * BLOCK_K + i * 64, tile_m * BLOCK_M);
}
// ---- Consumer: one warp, its N tile, a part of each stage's depth ---------------------------------------------------
typedef float Accumulators[FRAGMENTS][N8][4];   // 16-channel fragments by 8-token fragments

// The lane's own value, through a shuffle: ptxas would otherwise compute an address anew in each stage.
__device__ __forceinline__ u32 keep_in_register(u32 value, u32 lane = laneid()) { return __shfl_sync(0xffffffffu, value, lane); }

// Where this thread reads in slot 0; the other slots follow at a stage's distance.
struct SlotAddresses {
    u32 activations, weights, scales, zeros;
    u32 block_bytes;                            // from one 64-deep block of weights to the next

    // position: of the warp's N tile among those in shared memory. n_tile: the same one, counted over the whole weight.
    __device__ __forceinline__ SlotAddresses(u32 smem, const NTiles& n_tiles, u32 position, u32 n_tile, u32 part, u32 lane) {
        const u32 k64 = part * K64_PER_WARP, token = lane & 7;
        // One ldmatrix.x4 brings two 16-deep steps: its matrices are 16-byte chunks 0..3 of the tokens' rows.
        const u32 row = token, chunk = lane >> 3;
        // Chunk c of token t stands at c ^ (t & 7) in the 128-byte swizzle.
        activations = keep_in_register(smem + ACTIVATIONS + (k64 * BLOCK_M + row) * ROW_BYTES + ((chunk ^ token) << 4));
        block_bytes = K64_BLOCK_BYTES;
        const u32 upper = position % 2 * HALF_BLOCK_BYTES;
        weights = keep_in_register(smem + WEIGHTS + position / 2 * K64_PER_STAGE * K64_BLOCK_BYTES + upper + k64 * block_bytes +
                                   lane * 16);
        scales = zeros = 0;
    }

};

__device__ __forceinline__ void clear(Accumulators& acc) {
#pragma unroll
    for (u32 c = 0; c < FRAGMENTS; ++c)
#pragma unroll
        for (u32 n = 0; n < N8; ++n) acc[c][n][0] = acc[c][n][1] = acc[c][n][2] = acc[c][n][3] = 0.0f;
}

// Activations of a 64-deep block: operand B of its four 16-deep steps, which lie 32 bytes apart under the swizzle.
__device__ __forceinline__ void load_activation_fragments(u32 (&b)[4][N8][2], u32 row) {
#pragma unroll
    for (u32 step = 0; step < 4; step += 2) {
        u32 r[4];
        ldmatrix_x4(r, row ^ (step << 5));
        b[step][0][0] = r[0];
        b[step][0][1] = r[1];
        b[step + 1][0][0] = r[2];
        b[step + 1][0][1] = r[3];
    }
}
// This warp's part of one stage.
__device__ __forceinline__ void multiply_stage(Accumulators& acc, ZeroPoint (&zeros)[FRAGMENTS], const SlotAddresses& slots,
                                               u32 stage) {
    const u32 weights = slots.weights + stage * WEIGHT_STAGE_BYTES;
    const u32 activations = slots.activations + stage * ACTIVATION_STAGE_BYTES;
    Accumulators& sums = acc;
#pragma unroll
    for (u32 i = 0; i < K64_PER_WARP; ++i) {
        uint4 packed[FRAGMENTS];   // one word for each 16-deep step
#pragma unroll
        for (u32 c = 0; c < FRAGMENTS; ++c)
            asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(packed[c].x), "=r"(packed[c].y), "=r"(packed[c].z), "=r"(packed[c].w)
                         : "r"(weights + i * slots.block_bytes + c * 512) : "memory");
        u32 b[4][N8][2];
        load_activation_fragments(b, activations + i * BLOCK_M * ROW_BYTES);
#pragma unroll
        for (u32 step = 0; step < 4; ++step) {
#pragma unroll
            for (u32 c = 0; c < FRAGMENTS; ++c) {
                u32 a[4];
                dequantize(a, word(packed[c], step), zeros[c]);
#pragma unroll
                for (u32 n = 0; n < N8; ++n) mma_m16n8k16_f16(sums[c][n], a, b[step][n][0], b[step][n][1]);
            }
        }
    }
}
// ---- Result: the warps of the same N tile add up, and store -------------------------------------------------------------
constexpr u32 FRAGMENT_BYTES = 32 * 16;   // of sums, of a warp
// Of the warps that divide a depth the first OWNERS have OWN fragments each, add up the others' sums of them, and store.
constexpr u32 OWNERS = SLICE_K < FRAGMENTS ? SLICE_K : FRAGMENTS, OWN = FRAGMENTS / OWNERS;
typedef float OwnSums[OWN][N8][4];
// Whole-column scales, in the order of the packed layout: channel 16 c + 8 r + g at 8 g + 2 c + r. begin: the first channel
// that own has.
__device__ __forceinline__ void scale_columns(OwnSums& own, const Problem& problem, const u16* scales, u32 begin, u32 lane) {
#pragma unroll
    for (u32 c = 0; c < OWN; ++c) {
        const u32 channel = begin + 16 * c;
        u32 pair = 0;
        if (channel < problem.scale_pitch)
            pair = *(const u32*)(scales + (channel / 64 * 64 + 8 * (lane >> 2) + 2 * (channel % 64 / 16)));
#pragma unroll
        for (u32 n = 0; n < N8; ++n)
#pragma unroll
            for (u32 i = 0; i < 4; ++i) own[c][n][i] *= i < 2 ? low_to_float(pair) : high_to_float(pair);
    }
}

__device__ __forceinline__ void add_bias(OwnSums& own, const Problem& problem, const u16* bias, u32 begin, u32 lane) {
#pragma unroll
    for (u32 c = 0; c < OWN; ++c)
#pragma unroll
        for (u32 r = 0; r < 2; ++r) {
            const u32 channel = begin + 16 * c + 8 * r + (lane >> 2);
            const float added = channel < problem.n ? low_to_float(bias[channel]) : 0.0f;
#pragma unroll
            for (u32 n = 0; n < N8; ++n) {
                own[c][n][2 * r] += added;
                own[c][n][2 * r + 1] += added;
            }
        }
}

// Two channels of one token.
__device__ __forceinline__ void store_pair(const Problem& problem, u16* target, u32 channel, u32 pair) {
    if (__builtin_expect(problem.output_vectors && channel + 2 <= problem.n, 1)) {
        *(u32*)target = pair;
    } else {   // a row that is not aligned, or the last channel
        if (channel < problem.n) target[0] = (u16)pair;
        if (channel + 1 < problem.n) target[1] = (u16)(pair >> 16);
    }
}

// movmatrix turns fragments (channels x tokens) into rows of tokens: two channels a lane.
__device__ __forceinline__ void store_result(const OwnSums& own, const Problem& problem, u16* output, u32 tile_m, u32 begin,
                                             u32 lane) {
    const u32 channel = begin + 2 * (lane & 3);
    u16* const target = output + tile_m * BLOCK_M * problem.output_pitch + channel;
#pragma unroll
    for (u32 n = 0; n < N8; ++n) {
        if (n > 0 && tile_m * BLOCK_M + 8 * n >= problem.m) return;   // the same for the whole warp
        u32 pairs[OWN][2];
#pragma unroll
        for (u32 c = 0; c < OWN; ++c)
#pragma unroll
            for (u32 r = 0; r < 2; ++r)
                pairs[c][r] = movmatrix_trans(to_pair(own[c][n][2 * r], own[c][n][2 * r + 1]));
        const u32 token = 8 * n + (lane >> 2);
        if (tile_m * BLOCK_M + token >= problem.m) continue;
#pragma unroll
        for (u32 c = 0; c < OWN; ++c)
#pragma unroll
            for (u32 r = 0; r < 2; ++r)
                store_pair(problem, target + token * problem.output_pitch + 16 * c + 8 * r, channel + 16 * c + 8 * r, pairs[c][r]);
    }
}
}  // namespace cudatma

// Y^T = W^T X^T for few tokens. A block computes N_TILES N tiles of 32 channels for the whole depth. The last warp produces: it
// fills STAGES slots of shared memory, waiting for `empty`, signalling `full`. The others wait for `full`, multiply, and give the
// slot back through `empty`.
extern "C" __global__ void __launch_bounds__(96, 2)
marlin_skinny_f16_column_8x64x512_k1_s3_b2(
    const __grid_constant__ cudatma::TensorMap weight_map,
    const __grid_constant__ cudatma::TensorMap activation_map,
    const cudatma::u16* scales,
    const cudatma::u16* bias,
    cudatma::u16* output,
    const __grid_constant__ cudatma::Problem problem) {
    using namespace cudatma;
    extern __shared__ __align__(1024) u8 dynamic_shared[];
    const u32 smem = shared_address(dynamic_shared);
    const u32 full = smem + FULL_BARRIERS, empty = smem + EMPTY_BARRIERS;
    // Through a shuffle, so that ptxas knows that it is the same in a whole warp.
    const u32 warp_index = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const u32 tile = blockIdx.x, k_begin = 0, k_iterations = problem.k_iterations;
    u32 tile_n = tile, tile_m = 0;   // there is one tile of tokens, as a rule
    for (; tile_n >= problem.tiles_n; ++tile_m) tile_n -= problem.tiles_n;
    const NTiles n_tiles(tile_n);

    const Maps maps{&weight_map, nullptr,
                    nullptr, nullptr, &activation_map};
    const bool produces = warp_index == CONSUMER_WARPS;
    const u64 policy = createpolicy_evict_normal();

    // ---- Producer: one thread issues every copy, the first ones before the other warps know of the barriers --------------
    // elect_sync() rather than lane 0: ptxas then knows that one thread goes on, and puts no loop around each copy.
    if (produces && elect_sync()) {
        for (u32 stage = 0; stage < STAGES; ++stage) {
            mbarrier_init(full + 8 * stage, 1);
            mbarrier_init(empty + 8 * stage, CONSUMER_WARPS);
        }
        fence_mbarrier_init();   // the asynchronous proxy sees initialised barriers
        // Weights, scales and zero points do not depend on the kernel before this one; activations do. A dependent launch
        // asks for some of them early. Not for all, and not in a plain launch: a stage's activations are then behind
        // every stage's weights, and the first mma waits for the whole ring.
        const u32 first = min(STAGES, k_iterations), prefetched = min(first, problem.prefetch_stages);
#pragma unroll 1
        for (u32 k = 0; k < prefetched; ++k) load_constants(smem, k, maps, n_tiles, k_begin + k, policy);
        griddepcontrol_launch_dependents();   // the next kernel may come in and ask for its weights
        griddepcontrol_wait();
#pragma unroll 1
        for (u32 k = 0; k < first; ++k) {
            if (k >= prefetched) load_constants(smem, k, maps, n_tiles, k_begin + k, policy);
            load_activations(smem, k, maps, tile_m, k_begin + k);
        }
    }
    __syncthreads();   // the barriers are there
    if (produces) {
        if (elect_sync()) {
            u32 stage = 0, phase = 0;   // phase flips each time the ring wraps
#pragma unroll 1
            for (u32 k = STAGES; k < k_iterations; ++k) {
                mbarrier_wait_parity(empty + 8 * stage, phase);   // all consumer warps have read the slot
                load_constants(smem, stage, maps, n_tiles, k_begin + k, policy);
                load_activations(smem, stage, maps, tile_m, k_begin + k);
                if (++stage == STAGES) {
                    stage = 0;
                    phase ^= 1;
                }
            }
        }
        return;
    }

    // ---- Consumers --------------------------------------------------------------------------------------------------
    const u32 part = warp_index / N_TILES, position = warp_index % N_TILES;
    const u32 n_tile = n_tiles.at(position), channel0 = n_tile * 32;
    const SlotAddresses slots(smem, n_tiles, position, n_tile, part, lane);
    Accumulators acc;
    clear(acc);
    ZeroPoint zero_points[FRAGMENTS];
#pragma unroll
    for (u32 c = 0; c < FRAGMENTS; ++c) zero_points[c] = zero_point(8, 8);
    u32 stage = 0, phase = 0, previous = 0;
#pragma unroll 1
    for (u32 k = 0; k < k_iterations; ++k) {
        // A slot is released when the loop has come round, not where its last value is read: ptxas may issue the arrival
        // while an ld.shared is still under way.
        __syncwarp();
        if (k > 0 && lane == 0) mbarrier_arrive(empty + 8 * previous);
        mbarrier_wait_parity(full + 8 * stage, phase);   // every copy into the slot has landed
        multiply_stage(acc, zero_points, slots, stage);
        previous = stage;
        if (++stage == STAGES) {
            stage = 0;
            phase ^= 1;
        }
    }
    OwnSums& own = acc;
    const u32 own_first = 0;
    griddepcontrol_wait();   // the result may still be in use by the kernel before this one
    const u32 own_channel = channel0 + 16 * own_first;
    scale_columns(own, problem, scales, own_channel, lane);
    if (__builtin_expect(bias != nullptr, 0)) add_bias(own, problem, bias, own_channel, lane);
    store_result(own, problem, output, tile_m, own_channel, lane);
}
