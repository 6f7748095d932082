// cudatma: kernels/marlin_skinny.cu.j2 for sm_90a
// spec: SkinnySpec
//   dtype = 'float16'
//   group_size = 128
//   has_zeros = False
//   block_m = 1
//   n_tiles = 1
//   block_k = 512
//   slice_k = 4
//   stages = 3
//   weight_policy = 'evict_first'
//   blocks_per_sm = 1
//   deep_box = True
//   cluster_k = 3
// 4 warps consume, 1 produce; a block takes 34360 B.
// One stage holds
//     1024 B  activations 1 x 512 float16, 128B swizzle
//     8192 B  weights 32 x 512 int4, packed layout 1
//      512 B  scales 4 x 64 float16
// Shared memory, by offset
//        0  activations, 3072 B
//     3072  weights, 24576 B
//    27648  scales, 1536 B
//    29184  depth_reduction, 3072 B
//    32256  cluster_reduction, 2048 B
//    34304  cluster_barrier, 8 B
//    34312  full_barriers, 24 B
//    34336  empty_barriers, 24 B

// [PTX ISA, griddepcontrol] Waits until the kernels before this one in the stream are finished and their writes visible.
// Returns at once unless the launch was a programmatic dependent one.
__device__ __forceinline__ void griddepcontrol_wait() {
    asm volatile("griddepcontrol.wait;" : : : "memory");
}

// [PTX ISA, griddepcontrol] The next kernel may start once all blocks have said so or ended.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
    asm volatile("griddepcontrol.launch_dependents;" : : : "memory");
}

// [PTX ISA, barrier.cluster] Waits, with acquire order, until all threads of the cluster have arrived.
__device__ __forceinline__ void barrier_cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" : : : "memory");
}

// ---- The problem's types and the tile, as named constants -----------------------------------------------------------
constexpr u32 BLOCK_M = 1;      // tokens of a block (columns of the mma, where they are repeated)
constexpr u32 N_TILES = 1;      // N tiles of 32 channels (two rows of mmas) that a block computes, one a warp
constexpr u32 WHOLE_ROWS = 0;   // 64-channel rows of packed weights that lie in them as a whole
constexpr u32 BLOCK_K = 512;      // depth of one stage
constexpr u32 SLICE_K = 4;      // warps that work on the same N tile and divide each stage's depth
constexpr u32 CLUSTER_K = 3;  // blocks of the cluster, which work on the same channels and divide the depth
constexpr u32 COLUMN_BYTES = 1024;   // sums of an N tile
constexpr u32 STAGES = 3;
constexpr u32 CONSUMER_WARPS = 4;
constexpr u32 GROUP_SIZE = 128;   // depths that share a scale; 0: the whole column

constexpr u32 FRAGMENTS = 2;                    // 16-channel fragments of an N tile
constexpr u32 N8 = 1;                   // 8-token fragments
constexpr u32 K64_PER_STAGE = BLOCK_K / 64;
constexpr u32 K64_PER_WARP = K64_PER_STAGE / SLICE_K;
constexpr u32 K64_BLOCK_BYTES = 2048;           // one 64 x 64 block of packed weights; the upper 1024 are its channels 32..63
constexpr u32 HALF_BLOCK_BYTES = 1024, HALF_BLOCK_WORDS = HALF_BLOCK_BYTES / 8;
constexpr u32 ROW_BYTES = 128;                  // of the activations' boxes: 64 depths
constexpr u32 SCALE_ROW = 64;  // channels of a stage's row of scales: whole 64-channel rows

// ---- Shared memory: one array an operand, STAGES slots each; offsets from a 1024-byte aligned base ------------------
constexpr u32 ACTIVATION_STAGE_BYTES = 1024;
constexpr u32 WEIGHT_STAGE_BYTES = 8192;
constexpr u32 SCALE_STAGE_BYTES = 512;
constexpr u32 ZERO_SLOT_BYTES = 0;
constexpr u32 TRANSACTION_BYTES = 9728;   // what TMA brings into one stage
constexpr u32 ACTIVATIONS = 0;
constexpr u32 WEIGHTS = 3072;
constexpr u32 SCALES = 27648;
constexpr u32 ZEROS = 29184;
constexpr u32 DEPTH_REDUCTION = 29184;
constexpr u32 CLUSTER_REDUCTION = 32256;
constexpr u32 CLUSTER_BARRIER = 34304;
constexpr u32 FULL_BARRIERS = 34312;
constexpr u32 EMPTY_BARRIERS = 34336;

// What a launch passes to the kernel, besides tensor maps and pointers: the members that this kernel reads.
struct Problem {
    u32 m;                          // rows of the activations and of the result
    u32 n;                          // columns of the weight and of the result
    u32 tiles_n;                    // output tiles along N, each of one CTA or cluster
    u32 k_iterations;               // stages that one tile takes
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
        return first + (half_first ? (position + 1) % N_TILES : position);
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
    const u32 half = smem + WEIGHTS + slot * WEIGHT_STAGE_BYTES + WHOLE_ROWS * K64_PER_STAGE * K64_BLOCK_BYTES;
    cp_async_bulk_tensor_3d_load_hint(half, maps.half_weight, full, n_tiles.half_first ? HALF_BLOCK_WORDS : 0, k64,
                                      n_tiles.half_first ? n_tiles.first_row : n_tiles.first_whole + WHOLE_ROWS, policy);
    const u32 group = k_iteration * BLOCK_K / GROUP_SIZE;
    cp_async_bulk_tensor_2d_load(smem + SCALES + slot * SCALE_STAGE_BYTES, maps.scale, full, n_tiles.first_row * 64, group);
}

// One box of 64 depths x BLOCK_M tokens x K64_PER_STAGE blocks in the 128-byte swizzle; tokens and blocks outside are zero.
__device__ __forceinline__ void load_activations(u32 smem, u32 slot, const Maps& maps, u32 tile_m, u32 k_iteration) {
    cp_async_bulk_tensor_3d_load(smem + ACTIVATIONS + slot * ACTIVATION_STAGE_BYTES, maps.activation,
                                 smem + FULL_BARRIERS + 8 * slot, 0, tile_m * BLOCK_M, k_iteration * K64_PER_STAGE);
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
        const u32 row = token % BLOCK_M, chunk = lane >> 3;
        // Chunk c of row r stands at c ^ (r & 7) in the 128-byte swizzle, where each 64-deep block has BLOCK_M rows.
        const u32 first = k64 * BLOCK_M + row;
        activations = keep_in_register(smem + ACTIVATIONS + first * ROW_BYTES + ((chunk ^ first % 8) << 4));
        const bool in_half_row = position == N_TILES - 1;
        block_bytes = in_half_row ? HALF_BLOCK_BYTES : K64_BLOCK_BYTES;
        const u32 upper = in_half_row ? 0 : position % 2 * HALF_BLOCK_BYTES;
        weights = keep_in_register(smem + WEIGHTS + position / 2 * K64_PER_STAGE * K64_BLOCK_BYTES + upper + k64 * block_bytes +
                                   lane * 16);
        const u32 at = k64 * 64 / GROUP_SIZE * SCALE_ROW + (n_tile / 2 - n_tiles.first_row) * 64 + place_in_row(n_tile, lane);
        scales = keep_in_register(smem + SCALES + at * 2);
        zeros = 0;
    }

    // This thread's channels of an N tile, four side by side in the permuted order of a 64-channel row: channel
    // 16 c + 8 r + g stands at 8 g + 2 c + r, c from 0 or 2 on. Those of the row's other N tile follow, or precede.
    __device__ __forceinline__ static u32 place_in_row(u32 n_tile, u32 lane) { return 8 * (lane >> 2) + 4 * (n_tile & 1); }
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
// A group, or this warp's part of a stage, ends: its sums are scaled into the accumulators.
__device__ __forceinline__ void scale_sums(Accumulators& acc, Accumulators& sums, u32 smem) {
    u32 pairs[FRAGMENTS];   // of channels g (low half) and g + 8 (high half)
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(pairs[0]), "=r"(pairs[1]) : "r"(smem) : "memory");
#pragma unroll
    for (u32 c = 0; c < FRAGMENTS; ++c) {
        const float low = low_to_float(pairs[c]), high = high_to_float(pairs[c]);
#pragma unroll
        for (u32 n = 0; n < N8; ++n) {
            acc[c][n][0] += sums[c][n][0] * low;
            acc[c][n][1] += sums[c][n][1] * low;
            acc[c][n][2] += sums[c][n][2] * high;
            acc[c][n][3] += sums[c][n][3] * high;
        }
    }
    clear(sums);
}
// This warp's part of one stage.
__device__ __forceinline__ void multiply_stage(Accumulators& acc, ZeroPoint (&zeros)[FRAGMENTS], const SlotAddresses& slots,
                                               u32 stage) {
    const u32 weights = slots.weights + stage * WEIGHT_STAGE_BYTES;
    const u32 activations = slots.activations + stage * ACTIVATION_STAGE_BYTES;
    const u32 scales = slots.scales + stage * SCALE_STAGE_BYTES;
    Accumulators sums;   // of the group at hand, not yet scaled
    clear(sums);
#pragma unroll
    for (u32 i = 0; i < K64_PER_WARP; ++i) {
        uint4 packed[FRAGMENTS];   // one word for each 16-deep step
#pragma unroll
        for (u32 c = 0; c < FRAGMENTS; ++c)
            asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(packed[c].x), "=r"(packed[c].y), "=r"(packed[c].z), "=r"(packed[c].w)
                         : "r"(weights + i * slots.block_bytes + c * 512) : "memory");
        u32 b[4][N8][2];
        // A power of two of rows a part: the block's first row only adds bits to the part's, in the swizzle as well.
        load_activation_fragments(b, (activations ^ (i * BLOCK_M % 8) << 4) + i * BLOCK_M * ROW_BYTES);
#pragma unroll
        for (u32 step = 0; step < 4; ++step) {
            const u32 done = i * 64 + step * 16;   // depths of this warp's part
#pragma unroll
            for (u32 c = 0; c < FRAGMENTS; ++c) {
                u32 a[4];
                dequantize(a, word(packed[c], step), zeros[c]);
#pragma unroll
                for (u32 n = 0; n < N8; ++n) mma_m16n8k16_f16(sums[c][n], a, b[step][n][0], b[step][n][1]);
            }
            if ((done + 16) % GROUP_SIZE == 0 || done + 16 == K64_PER_WARP * 64)
                scale_sums(acc, sums, scales + done / GROUP_SIZE * SCALE_ROW * 2);
        }
    }
}
// ---- Result: the warps of the same N tile add up, and store -------------------------------------------------------------
constexpr u32 FRAGMENT_BYTES = 32 * 16;   // of sums, of a warp
// Of the warps that divide a depth the first OWNERS have OWN fragments each, add up the others' sums of them, and store.
constexpr u32 OWNERS = SLICE_K < FRAGMENTS ? SLICE_K : FRAGMENTS, OWN = FRAGMENTS / OWNERS;
typedef float OwnSums[OWN][N8][4];

// A fragment of sums in shared memory, 16 bytes a thread.
__device__ __forceinline__ void store_fragment(u32 smem, const float (&sums)[4]) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};"
                 :: "r"(smem), "f"(sums[0]), "f"(sums[1]), "f"(sums[2]), "f"(sums[3]) : "memory");
}

__device__ __forceinline__ void add_fragment(float (&sums)[4], u32 smem) {
    float other[4];
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(other[0]), "=f"(other[1]), "=f"(other[2]), "=f"(other[3]) : "r"(smem) : "memory");
#pragma unroll
    for (u32 i = 0; i < 4; ++i) sums[i] += other[i];
}

// Each part leaves its sums of others' fragments; an owner adds them to its own in the order of the parts. Returns whether
// this warp has fragments. position: of the warp's N tile among those in shared memory.
__device__ __forceinline__ bool reduce_depth(OwnSums& own, const Accumulators& acc, u32 smem, u32 position, u32 part,
                                             u32 lane) {
    constexpr u32 N_TILE_BYTES = 2 * N8 * FRAGMENT_BYTES, PART_BYTES = N_TILES * N_TILE_BYTES;
    const u32 base = smem + DEPTH_REDUCTION + position * N_TILE_BYTES + lane * 16;
#pragma unroll
    for (u32 c = 0; c < FRAGMENTS; ++c) {
        const u32 owner = c / OWN, place = part - (part > owner);
#pragma unroll
        for (u32 n = 0; n < N8; ++n) {
            if (part == owner) {
#pragma unroll
                for (u32 i = 0; i < 4; ++i) own[c % OWN][n][i] = acc[c][n][i];
            } else {
                store_fragment(base + place * PART_BYTES + (c * N8 + n) * FRAGMENT_BYTES, acc[c][n]);
            }
        }
    }
    bar_sync(1, 32 * CONSUMER_WARPS);   // the others' sums are there
    if (part >= OWNERS) return false;
    const u32 first = base + part * OWN * N8 * FRAGMENT_BYTES;
#pragma unroll
    for (u32 place = 0; place < SLICE_K - 1; ++place)
#pragma unroll
        for (u32 c = 0; c < OWN; ++c)
#pragma unroll
            for (u32 n = 0; n < N8; ++n) add_fragment(own[c][n], first + place * PART_BYTES + (c * N8 + n) * FRAGMENT_BYTES);
    return true;
}
// An N tile belongs to one block of the cluster. The others send it their sums, which it adds to its own in the
// order of their ranks. first: the warp's first fragment. Returns whether this warp goes on.
__device__ __forceinline__ bool reduce_cluster(OwnSums& own, u32 smem, u32 position, u32 first, u32 rank, u32 lane) {
    const u32 owner = position % CLUSTER_K, base = smem + CLUSTER_REDUCTION + position / CLUSTER_K * (CLUSTER_K - 1) * COLUMN_BYTES
                      + first * N8 * FRAGMENT_BYTES + lane * 16;
    // The owner too: racecheck never ends where some of those that have arrived do not wait.
    barrier_cluster_wait();   // the owner has begun, and its barrier is there
    if (rank != owner) {
        const u32 place = rank - (rank > owner);
        const u32 target = mapa_shared_cluster(base + place * COLUMN_BYTES, owner);
        const u32 barrier = mapa_shared_cluster(smem + CLUSTER_BARRIER, owner);
#pragma unroll
        for (u32 c = 0; c < OWN; ++c)
#pragma unroll
            for (u32 n = 0; n < N8; ++n) st_async_v4_f32(target + (c * N8 + n) * FRAGMENT_BYTES, own[c][n], barrier);
        return false;
    }
    mbarrier_wait_parity_acquire_cluster(smem + CLUSTER_BARRIER, 0);   // the others' sums are there
#pragma unroll
    for (u32 p = 0; p < CLUSTER_K - 1; ++p)
#pragma unroll
        for (u32 c = 0; c < OWN; ++c)
#pragma unroll
            for (u32 n = 0; n < N8; ++n) add_fragment(own[c][n], base + p * COLUMN_BYTES + (c * N8 + n) * FRAGMENT_BYTES);
    return true;
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
        if (token >= BLOCK_M || tile_m * BLOCK_M + token >= problem.m) continue;
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
extern "C" __global__ void __launch_bounds__(160, 1)
marlin_skinny_f16_g128_1x32x512_k4_s3_d_c3(
    const __grid_constant__ cudatma::TensorMap half_weight_map,
    const __grid_constant__ cudatma::TensorMap scale_map,
    const __grid_constant__ cudatma::TensorMap activation_map,
    const cudatma::u16* bias,
    cudatma::u16* output,
    const __grid_constant__ cudatma::Problem problem) {
    using namespace cudatma;
    extern __shared__ __align__(1024) u8 dynamic_shared[];
    const u32 smem = shared_address(dynamic_shared);
    const u32 full = smem + FULL_BARRIERS, empty = smem + EMPTY_BARRIERS;
    // Through a shuffle, so that ptxas knows that it is the same in a whole warp.
    const u32 warp_index = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    // Which stages are this block's.
    const u32 tile = blockIdx.x / CLUSTER_K, rank = blockIdx.x - tile * CLUSTER_K;
    const u32 k_begin = rank * problem.k_iterations / CLUSTER_K;
    const u32 k_iterations = (rank + 1) * problem.k_iterations / CLUSTER_K - k_begin;
    u32 tile_n = tile, tile_m = 0;   // there is one tile of tokens, as a rule
    for (; tile_n >= problem.tiles_n; ++tile_m) tile_n -= problem.tiles_n;
    const NTiles n_tiles(tile_n);

    const Maps maps{nullptr, &half_weight_map,
                    &scale_map, nullptr, &activation_map};
    const bool produces = warp_index == CONSUMER_WARPS;
    const u64 policy = createpolicy_evict_first();

    // ---- Producer: one thread issues every copy, the first ones before the other warps know of the barriers --------------
    // elect_sync() rather than lane 0: ptxas then knows that one thread goes on, and puts no loop around each copy.
    if (produces && elect_sync()) {
        for (u32 stage = 0; stage < STAGES; ++stage) {
            mbarrier_init(full + 8 * stage, 1);
            mbarrier_init(empty + 8 * stage, CONSUMER_WARPS);
        }
        mbarrier_init(smem + CLUSTER_BARRIER, 1);
        fence_mbarrier_init();   // the asynchronous proxy, and the cluster, see initialised barriers
        // Of each N tile that is this block's, the others' sums.
        constexpr u32 SENDERS = CLUSTER_K - 1;
        mbarrier_arrive_expect_tx(smem + CLUSTER_BARRIER, (N_TILES + SENDERS - rank) / CLUSTER_K * SENDERS * COLUMN_BYTES);
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
    __syncwarp();
    barrier_cluster_arrive_relaxed();   // a fence has ordered the barriers
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
    OwnSums own;
    const u32 own_first = part * OWN;   // of the N tile's fragments
    if (!reduce_depth(own, acc, smem, position, part, lane)) return;
    if (!reduce_cluster(own, smem, position, own_first, rank, lane)) return;
    griddepcontrol_wait();   // the result may still be in use by the kernel before this one
    const u32 own_channel = channel0 + 16 * own_first;
    if (__builtin_expect(bias != nullptr, 0)) add_bias(own, problem, bias, own_channel, lane);
    store_result(own, problem, output, tile_m, own_channel, lane);
}
