// cudatma: kernels/marlin_skinny.cu.j2 for sm_90a
// spec: MarlinConfig
//   version = 'skinny'
//   dtype = 'float16'
//   group_size = -1
//   has_zeros = False
//   tile_m = 8
//   tile_n = 64
//   tile_k = 512
//   stages = 3
//   slice_k = 1
//   cluster_n = 1
//   cluster_k = 1
//   blocks_per_sm = 2
//   consumer_registers = 0
//   deep_box = False
//   warpgroups = 0
//   mmas_per_commit = 0
//   commits_in_flight = 0
//   scale_form = 'none'
//   pingpong = False
//   warps_n = 0
//   scale_on = ''
//   weight_load_path = 'tma'
//   scale_load_path = 'tma'
//   activation_load_path = 'tma'
// 2 warps consume, 1 produce; a CTA takes 73776 B.
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

// [PTX ISA, griddepcontrol] The next kernel may start once all CTAs have said so or ended.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
    asm volatile("griddepcontrol.launch_dependents;" : : : "memory");
}

    // Consumer: this arrival's share of the slot has been read; without a fence. Right only if instructions issued before the
    // call have used every value that was read from the slot; then no read can still be under way. A loop that releases each
    // slot one iteration after it read it has that property. release_used_by_warp(): one arrival for the warp, whose lanes all
    // call it.
    __device__ __forceinline__ void release_used(u32 slot) const { mbarrier_arrive(empty_barrier(slot)); }
    // Both: go on to the next slot; the parity toggles when the ring wraps.
    __device__ __forceinline__ void advance() {
        if (++stage == Stages) {
            stage = 0;
            next_lap();
        }
    }

// ---- The tile of a CTA ----------------------------------------------------------------------------------------------
constexpr u32 TILE_M = 8;             // rows of x, the columns of mma's operand B
constexpr u32 FRAGMENTS_8 = TILE_M < 8 ? 1 : TILE_M / 8;   // of 8 rows; a fragment repeats fewer rows
constexpr u32 N_TILE = 32;             // columns of W of an N tile, the rows of mma's operand A
constexpr u32 FRAGMENTS_16 = N_TILE / 16;
constexpr u32 N_TILES = 2;             // N tiles of a CTA
constexpr u32 TILE_K = 512;           // K of one stage
constexpr u32 SLICE_K = 1;             // warps that share an N tile: each multiplies a slice of every stage's K
constexpr u32 CONSUMER_WARPS = N_TILES * SLICE_K;

// ---- Packed weights: rows of 64 x 64 blocks, each row 64 columns of W (an n64) along K ------------------------------
constexpr u32 K64_PER_STAGE = TILE_K / 64;
constexpr u32 K64_PER_WARP = K64_PER_STAGE / SLICE_K;
constexpr u32 K64_BLOCK_BYTES = 2048;  // a block: the lower half holds columns 0..31, the upper half columns 32..63
constexpr u32 HALF_BLOCK_BYTES = K64_BLOCK_BYTES / 2;
constexpr bool HAS_HALF_ROW = N_TILES % 2;   // one N tile then lies in a row whose other half belongs to another CTA

// ---- Shared memory: an array of STAGES slots for each operand; offsets from a base aligned to 1024 bytes ------------
constexpr u32 STAGES = 3;
constexpr u32 ACTIVATIONS = 0;
constexpr u32 ACTIVATION_STAGE_BYTES = 8192;
constexpr u32 ROW_BYTES = 128;         // of an activation box: 64 elements of K
constexpr u32 WEIGHTS = 24576;
constexpr u32 WEIGHT_STAGE_BYTES = 16384;
constexpr u32 STAGE_TX_BYTES = 24576;   // bytes that the loads of one stage deliver
constexpr u32 BARRIERS = 73728;
typedef TmaPipeline<STAGES> Ring;

// What a launch passes to the kernel, besides tensor maps and pointers: the members that this kernel reads.
struct Problem {
    u32 m;                          // rows of the result
    u32 n;                          // columns of the result
    u32 tiles_n;                    // output tiles along N, each of one CTA or cluster
    u32 k_iterations;               // stages that one tile takes
    u32 output_vectors;             // 1: every row of the result is aligned to 16 bytes
    u32 scale_pitch;                // columns of a row of scales, padded
    u32 prefetch_stages;            // stages whose weights a dependent launch loads before it waits
    u64 output_pitch;               // elements from one row to the next
};

// ---- Which part of the output a CTA and a warp compute --------------------------------------------------------------
// N tiles are counted over the whole weight. If N_TILES is odd, every second CTA begins with the upper half of an n64 row.
struct CtaTile {
    u32 tile_m;
    u32 first_n_tile;
    u32 first_row;         // the n64 row that it lies in
    u32 first_whole_row;   // the first n64 row of which the CTA computes both halves
    bool half_first;       // the CTA begins with the upper half of a row; otherwise a half row is the lower half of the last row
    u32 k_iterations;      // stages

    __device__ __forceinline__ explicit CtaTile(const Problem& problem) : tile_m(0) {
        u32 tile_n = blockIdx.x;
        k_iterations = problem.k_iterations;
        for (; tile_n >= problem.tiles_n; ++tile_m) tile_n -= problem.tiles_n;   // usually there is one tile in M
        first_n_tile = tile_n * N_TILES;
        first_row = first_n_tile / 2;
        first_whole_row = (first_n_tile + 1) / 2;
        half_first = first_n_tile & 1;
    }

    // The CTA loads stage k of W and x in iteration k.
    __device__ __forceinline__ u32 stage_at(u32 k) const { return k; }

    // The N tile at a position in shared memory, where whole rows precede the half row.
    __device__ __forceinline__ u32 n_tile_at(u32 position) const {
        if constexpr (HAS_HALF_ROW) return first_n_tile + (half_first ? (position + 1) % N_TILES : position);
        return first_n_tile + position;
    }
};

struct WarpTile {
    u32 slice;      // the warp's slice of each stage's K
    u32 position;   // where its N tile lies in shared memory
    u32 n_tile;     // counted over the whole weight

    __device__ __forceinline__ WarpTile(const CtaTile& tile, u32 warp)
        : slice(warp / N_TILES), position(warp % N_TILES), n_tile(tile.n_tile_at(position)) {}
};

// ---- Between float16 and fp32: two values in a register -------------------------------------------------------------
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

// ---- Arithmetic of two halves in a register -------------------------------------------------------------------------
__device__ __forceinline__ u32 subtract(u32 a, u32 b) {
    u32 d;
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}

__device__ __forceinline__ u32 multiply_add(u32 a, u32 b, u32 c) {
    u32 d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
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

// ---- Producer: one thread issues every load -------------------------------------------------------------------------
struct Maps {
    const TensorMap* weight_map;
    const TensorMap* activation_map;
};

// Loads weights, scales and zero points, which no kernel before this one in the stream writes. What lies outside of the weight
// arrives as zeros.
__device__ __forceinline__ void load_weights(const Ring& ring, u32 slot, u32 smem, const Maps& maps, const CtaTile& tile, u32 k,
                                             u64 policy) {
    const u32 stage = tile.stage_at(k), k64 = stage * K64_PER_STAGE, full = ring.get_barrier(slot);
    const u32 weights = smem + WEIGHTS + slot * WEIGHT_STAGE_BYTES;
    ring.expect_tx(slot, STAGE_TX_BYTES);
    cp_async_bulk_tensor_3d_load_hint(weights, maps.weight_map, full, 0, k64, tile.first_whole_row, policy);
}

// Loads K64_PER_STAGE boxes of 64 elements of K x TILE_M rows in the 128-byte swizzle. What lies outside of x arrives as zeros.
__device__ __forceinline__ void load_activations(const Ring& ring, u32 slot, u32 smem, const Maps& maps, const CtaTile& tile,
                                                 u32 k) {
    const u32 target = smem + ACTIVATIONS + slot * ACTIVATION_STAGE_BYTES, stage = tile.stage_at(k);
#pragma unroll
    for (u32 i = 0; i < K64_PER_STAGE; ++i)
        cp_async_bulk_tensor_2d_load(target + i * TILE_M * ROW_BYTES, maps.activation_map, ring.get_barrier(slot),
                                     stage * TILE_K + i * 64, tile.tile_m * TILE_M);
}

// Initializes the barriers and loads the first stages, before the other warps may use the barriers.
//
// A dependent launch loads the weights of prefetch_stages stages before it waits for the kernel before it, which writes the
// activations. It does not prefetch the weights of every stage: the activations of the first stage would then arrive after all
// of them, and the first mma would wait for the whole ring.
__device__ __forceinline__ void fill_ring(const Ring& ring, u32 smem, const Maps& maps, const CtaTile& tile,
                                          const Problem& problem, u64 policy) {
    ring.init_barriers(1, CONSUMER_WARPS);
    const u32 filled = min(STAGES, tile.k_iterations), prefetched = min(filled, problem.prefetch_stages);
#pragma unroll 1
    for (u32 k = 0; k < prefetched; ++k) load_weights(ring, k, smem, maps, tile, k, policy);
    griddepcontrol_launch_dependents();   // the next kernel may start and prefetch its weights
    griddepcontrol_wait();                // the kernel before this one has written the activations
#pragma unroll 1
    for (u32 k = 0; k < filled; ++k) {
        if (k >= prefetched) load_weights(ring, k, smem, maps, tile, k, policy);
        load_activations(ring, k, smem, maps, tile, k);
    }
}

// Loads the other stages, each into the slot that the consumers have released.
__device__ __forceinline__ void refill_ring(Ring& ring, u32 smem, const Maps& maps, const CtaTile& tile, u64 policy) {
    ring.next_lap();   // fill_ring() was the first lap
#pragma unroll 1
    for (u32 k = STAGES; k < tile.k_iterations; ++k) {
        ring.acquire();
        load_weights(ring, ring.stage, smem, maps, tile, k, policy);
        load_activations(ring, ring.stage, smem, maps, tile, k);
        ring.advance();
    }
}

// ---- Consumers: a warp multiplies its N tile, and its slice of each stage's K ---------------------------------------
typedef float Accumulators[FRAGMENTS_16][FRAGMENTS_8][4];   // fragments of 16 columns of W by fragments of 8 rows of x

// The lane's own value, through a shuffle: ptxas would otherwise compute an address anew in each stage.
__device__ __forceinline__ u32 keep_in_register(u32 value, u32 lane = laneid()) { return __shfl_sync(0xffffffffu, value, lane); }

__device__ __forceinline__ void clear(Accumulators& acc) {
#pragma unroll
    for (u32 c = 0; c < FRAGMENTS_16; ++c)
#pragma unroll
        for (u32 m = 0; m < FRAGMENTS_8; ++m) acc[c][m][0] = acc[c][m][1] = acc[c][m][2] = acc[c][m][3] = 0.0f;
}

// The addresses from which this thread reads slot 0.
struct SlotAddresses {
    u32 activations;
    u32 weights;
    u32 k64_stride;   // bytes from one 64-deep block of the N tile to the next

    __device__ __forceinline__ SlotAddresses(u32 smem, const CtaTile& tile, const WarpTile& warp_tile, u32 lane) {
        const u32 k64 = warp_tile.slice * K64_PER_WARP;
        u32 row, chunk;   // that the lane passes to ldmatrix: 16 bytes of a row of x
        if constexpr (FRAGMENTS_8 == 1) {
            // One ldmatrix.x4 loads 32 elements of K of 8 rows: chunks 0..3 of each.
            row = (lane & 7) % TILE_M;
            chunk = lane >> 3;
        } else {
            // One ldmatrix.x4 loads 16 elements of K of 16 rows: chunks 0 and 1 of rows 0..7, then of rows 8..15.
            row = (lane >> 4) * 8 + (lane & 7);
            chunk = lane >> 3 & 1;
        }
        // A 64-deep block has TILE_M rows of 128 bytes; the 128-byte swizzle puts chunk c of the r-th of all rows at c ^ (r % 8).
        const u32 swizzle_row = k64 * TILE_M + row;
        activations = keep_in_register(smem + ACTIVATIONS + swizzle_row * ROW_BYTES + ((chunk ^ swizzle_row % 8) << 4));

        const bool in_half_row = HAS_HALF_ROW && warp_tile.position == N_TILES - 1;
        const u32 half = in_half_row ? 0 : warp_tile.position % 2 * HALF_BLOCK_BYTES;
        k64_stride = in_half_row ? HALF_BLOCK_BYTES : K64_BLOCK_BYTES;
        weights = keep_in_register(smem + WEIGHTS + warp_tile.position / 2 * K64_PER_STAGE * K64_BLOCK_BYTES + half +
                                   k64 * k64_stride + lane * 16);
    }
};

// Operand B of the four mmas of a 64-deep block of activations. Under the swizzle, 16 elements of K are 32 bytes apart.
__device__ __forceinline__ void load_activation_fragments(u32 (&b)[4][FRAGMENTS_8][2], u32 row) {
    if constexpr (FRAGMENTS_8 == 1) {
#pragma unroll
        for (u32 k16 = 0; k16 < 4; k16 += 2) {
            u32 r[4];
            ldmatrix_x4(r, row ^ (k16 << 5));
            b[k16][0][0] = r[0];
            b[k16][0][1] = r[1];
            b[k16 + 1][0][0] = r[2];
            b[k16 + 1][0][1] = r[3];
        }
    } else {
#pragma unroll
        for (u32 k16 = 0; k16 < 4; ++k16)
#pragma unroll
            for (u32 m = 0; m < FRAGMENTS_8; m += 2) {
                u32 r[4];
                ldmatrix_x4(r, (row ^ (k16 << 5)) + m * 8 * ROW_BYTES);
                b[k16][m][0] = r[0];
                b[k16][m][1] = r[1];
                b[k16][m + 1][0] = r[2];
                b[k16][m + 1][1] = r[3];
            }
    }
}

// This thread's weights of a fragment in a 64-deep block: one word for each 16 elements of K.
__device__ __forceinline__ uint4 load_packed(u32 smem) {
    uint4 packed;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(packed.x), "=r"(packed.y), "=r"(packed.z), "=r"(packed.w) : "r"(smem) : "memory");
    return packed;
}

typedef ZeroPoint ZeroPoints[FRAGMENTS_16];

// four: the zero points of columns g and g + 8 of the first fragment, then of the second.
__device__ __forceinline__ void set_zero_points(ZeroPoints& zero_points, u32 four) {
    zero_points[0] = zero_point(four & 0xff, four >> 8 & 0xff);
    zero_points[1] = zero_point(four >> 16 & 0xff, four >> 24);
}

__device__ __forceinline__ void multiply_stage(Accumulators& acc, ZeroPoints& zero_points, const SlotAddresses& slots, u32 slot) {
    const u32 weights = slots.weights + slot * WEIGHT_STAGE_BYTES;
    const u32 activations = slots.activations + slot * ACTIVATION_STAGE_BYTES;
    Accumulators& sums = acc;
#pragma unroll
    for (u32 i = 0; i < K64_PER_WARP; ++i) {
        uint4 packed[FRAGMENTS_16];
#pragma unroll
        for (u32 c = 0; c < FRAGMENTS_16; ++c) packed[c] = load_packed(weights + i * slots.k64_stride + c * 512);
        u32 b[4][FRAGMENTS_8][2];
        // If TILE_M is less than 8, block i begins in the middle of the swizzle's 8 rows. Both are powers of two: adding its first
        // row sets bits that the lane's row does not have, in the address and in the swizzle.
        load_activation_fragments(b, (activations ^ (i * TILE_M % 8) << 4) + i * TILE_M * ROW_BYTES);
#pragma unroll
        for (u32 k16 = 0; k16 < 4; ++k16) {
#pragma unroll
            for (u32 c = 0; c < FRAGMENTS_16; ++c) {
                u32 a[4];
                dequantize(a, word(packed[c], k16), zero_points[c]);
#pragma unroll
                for (u32 m = 0; m < FRAGMENTS_8; ++m)
                    mma_m16n8k16_f16(sums[c][m], a, b[k16][m][0], b[k16][m][1]);
            }
        }
    }
}

__device__ __forceinline__ void consume(Accumulators& acc, ZeroPoints& zero_points, Ring& ring, const SlotAddresses& slots,
                                        u32 k_iterations, u32 lane) {
    u32 previous = 0;   // the slot of the stage before
#pragma unroll 1
    for (u32 k = 0; k < k_iterations; ++k) {
        // The warp releases a slot one iteration late, when every value that it read from it has been used: ptxas may issue an
        // arrival while an ld.shared is still under way.
        __syncwarp();
        if (k > 0 && lane == 0) ring.release_used(previous);
        ring.wait();
        multiply_stage(acc, zero_points, slots, ring.stage);
        previous = ring.stage;
        ring.advance();
    }
}

// ---- Reduction of partial sums: within the CTA, then within the cluster ---------------------------------------------
// Of the warps that share an N tile, the first OWNERS own OWN fragments each: they add up all sums of them, and store the result.
constexpr u32 OWNERS = SLICE_K < FRAGMENTS_16 ? SLICE_K : FRAGMENTS_16, OWN = FRAGMENTS_16 / OWNERS;
typedef float OwnSums[OWN][FRAGMENTS_8][4];

__device__ __forceinline__ u32 first_own_fragment(const WarpTile& warp_tile) { return SLICE_K > 1 ? warp_tile.slice * OWN : 0; }

// ---- Epilogue: an owner's sums to rows of the output. n_begin: the first column of its fragments --------------------
// Scales of whole columns, in the order of the packed layout: column 16 c + 8 r + g at 8 g + 2 c + r.
__device__ __forceinline__ void scale_columns(OwnSums& own, const Problem& problem, const u16* scales, u32 n_begin, u32 lane) {
#pragma unroll
    for (u32 c = 0; c < OWN; ++c) {
        const u32 column = n_begin + 16 * c;
        u32 pair = 0;
        if (column < problem.scale_pitch)
            pair = *(const u32*)(scales + (column / 64 * 64 + 8 * (lane >> 2) + 2 * (column % 64 / 16)));
#pragma unroll
        for (u32 m = 0; m < FRAGMENTS_8; ++m)
#pragma unroll
            for (u32 i = 0; i < 4; ++i) own[c][m][i] *= i < 2 ? low_to_float(pair) : high_to_float(pair);
    }
}

__device__ __forceinline__ void add_bias(OwnSums& own, const Problem& problem, const u16* bias, u32 n_begin, u32 lane) {
#pragma unroll
    for (u32 c = 0; c < OWN; ++c)
#pragma unroll
        for (u32 r = 0; r < 2; ++r) {
            const u32 column = n_begin + 16 * c + 8 * r + (lane >> 2);
            const float added = column < problem.n ? low_to_float(bias[column]) : 0.0f;
#pragma unroll
            for (u32 m = 0; m < FRAGMENTS_8; ++m) {
                own[c][m][2 * r] += added;
                own[c][m][2 * r + 1] += added;
            }
        }
}

// Stores two adjacent columns of a row.
__device__ __forceinline__ void store_pair(const Problem& problem, u16* target, u32 column, u32 pair) {
    if (__builtin_expect(problem.output_vectors && column + 2 <= problem.n, 1)) {
        *(u32*)target = pair;
    } else {   // an unaligned row, or the last column
        if (column < problem.n) target[0] = (u16)pair;
        if (column + 1 < problem.n) target[1] = (u16)(pair >> 16);
    }
}

// movmatrix transposes the fragments, so that a lane has two adjacent columns of a row of the output.
__device__ __forceinline__ void store_result(const OwnSums& own, const Problem& problem, u16* output, u32 tile_m, u32 n_begin,
                                             u32 lane) {
    const u32 m_begin = tile_m * TILE_M, column = n_begin + 2 * (lane & 3);
    u16* const target = output + m_begin * problem.output_pitch + column;
#pragma unroll
    for (u32 m = 0; m < FRAGMENTS_8; ++m) {
        if (m > 0 && m_begin + 8 * m >= problem.m) return;   // the whole warp returns
        u32 pairs[OWN][2];
#pragma unroll
        for (u32 c = 0; c < OWN; ++c)
#pragma unroll
            for (u32 r = 0; r < 2; ++r)
                pairs[c][r] = movmatrix_trans(to_pair(own[c][m][2 * r], own[c][m][2 * r + 1]));
        const u32 row = 8 * m + (lane >> 2);
        if (row >= TILE_M || m_begin + row >= problem.m) continue;
#pragma unroll
        for (u32 c = 0; c < OWN; ++c)
#pragma unroll
            for (u32 r = 0; r < 2; ++r) {
                const u32 offset = 16 * c + 8 * r;
                store_pair(problem, target + row * problem.output_pitch + offset, column + offset, pairs[c][r]);
            }
    }
}
}  // namespace cudatma

// y = x W for small M, computed as y^T = W^T x^T: N is the M dimension of the mma. A CTA computes N_TILES N tiles over all of K,
// or over its part of K in a cluster. The last warp is the producer: it waits until consumers have released a slot of the ring,
// and loads the next stage into it. The other warps are consumers: they wait until a stage has landed, multiply, and release it.
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
    // The shuffle tells ptxas that all lanes of a warp have the same value.
    const u32 warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const bool is_producer = warp == CONSUMER_WARPS;

    const CtaTile tile(problem);
    const Maps maps{&weight_map, &activation_map};
    const u64 policy = createpolicy_evict_first();   // of the weights in L2, which one row of tiles reads
    Ring ring;
    ring.attach(smem + BARRIERS);

    // elect_sync() rather than lane == 0: ptxas then knows that one thread goes on, and puts no loop around each copy.
    if (is_producer && elect_sync()) fill_ring(ring, smem, maps, tile, problem, policy);
    __syncthreads();   // consumers wait until the producer has initialized the barriers
    if (is_producer) {
        if (elect_sync()) refill_ring(ring, smem, maps, tile, policy);
        return;
    }

    const WarpTile warp_tile(tile, warp);
    const SlotAddresses slots(smem, tile, warp_tile, lane);
    Accumulators acc;
    clear(acc);
    ZeroPoints zero_points;
    set_zero_points(zero_points, 0x08080808u);   // symmetric weights
    consume(acc, zero_points, ring, slots, tile.k_iterations, lane);
    OwnSums& own = acc;
    griddepcontrol_wait();   // the kernel before this one may still read or write the output
    const u32 n_begin = warp_tile.n_tile * N_TILE + 16 * first_own_fragment(warp_tile);
    scale_columns(own, problem, scales, n_begin, lane);
    if (__builtin_expect(bias != nullptr, 0)) add_bias(own, problem, bias, n_begin, lane);
    store_result(own, problem, output, tile.tile_m, n_begin, lane);
}
