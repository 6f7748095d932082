// cudatma: kernels/marlin_mma_sync.cu.j2 for sm_90a
// spec: MmaSyncSpec
//   dtype = 'float16'
//   group_size = -1
//   has_zeros = True
//   block_m = 128
//   block_n = 256
//   block_k = 64
//   warps_n = 8
//   slice_k = 1
//   stages = 3
//   weight_load_path = 'tma'
//   scale_load_path = 'tma'
//   activation_load_path = 'cp_async'
//   scale_on = 'epilogue'
//   weight_policy = 'evict_normal'
//   consumer_registers = 232
// 8 warps consume, 4 produce; a block takes 78896 B.
// One stage holds
//    16384 B  activations 128 x 64 float16, 128B swizzle
//     8192 B  weights 256 x 64 int4, packed layout 1
// Shared memory, by offset
//        0  activations, 49152 B
//    49152  weights, 24576 B
//    73728  output_staging, 5120 B
//    78848  full_barriers, 24 B
//    78872  empty_barriers, 24 B

// [PTX ISA, griddepcontrol] Waits until the kernels before this one in the stream are finished and their writes visible.
// Returns at once unless the launch was a programmatic dependent one.
__device__ __forceinline__ void griddepcontrol_wait() {
    asm volatile("griddepcontrol.wait;" : : : "memory");
}

// [PTX ISA, setmaxnreg] A whole warpgroup gives registers back to the block's pool.
template <u32 Registers>
__device__ __forceinline__ void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" : : "n"(Registers));
}

// ---- The problem's types and the tile, as named constants -----------------------------------------------------------
constexpr u32 BLOCK_M = 128;      // tokens of a block's tile (columns of the mma)
constexpr u32 BLOCK_N = 256;      // channels (rows of the mma)
constexpr u32 BLOCK_K = 64;      // depth of one stage
constexpr u32 WARPS_N = 8;      // warps side by side, each with all tokens
constexpr u32 SLICE_K = 1;      // warps that share a tile and split each stage's depth
constexpr u32 WARP_N = 32;
constexpr u32 STAGES = 3;
constexpr u32 CONSUMER_WARPS = 8;
constexpr u32 PRODUCER_THREADS = 128;
constexpr u32 PRODUCER_REGISTERS = 40;
constexpr u32 CONSUMER_REGISTERS = 232;
constexpr u32 GROUP_SIZE = 0;   // depths that share a scale; 0: the whole column
constexpr u32 GROUPS_PER_STAGE = 1;

constexpr u32 CLUSTER = 1;                      // blocks that work on one share
constexpr u32 WARP_TILES = WARPS_N;             // parts of a tile with a flag of their own
constexpr u32 C_GROUPS = WARP_N / 16;           // 16-channel fragments of a warp ...
constexpr u32 C_STRIDE = 16;                    // ... and the channels from one to the next
constexpr u32 N8 = BLOCK_M / 8;                 // 8-token fragments
constexpr u32 K64_PER_STAGE = BLOCK_K / 64;
constexpr u32 K64_PER_WARP = K64_PER_STAGE / SLICE_K;
constexpr u32 N64_PER_TILE = BLOCK_N / 64;
constexpr u32 K64_BLOCK_BYTES = 2048;           // one 64 x 64 block of packed weights

// ---- Shared memory: one array an operand, STAGES slots each; offsets from a 1024-byte aligned base ------------------
constexpr u32 ACTIVATION_STAGE_BYTES = 16384;
constexpr u32 WEIGHT_STAGE_BYTES = 8192;
constexpr u32 SCALE_STAGE_BYTES = 0;
constexpr u32 ZERO_SLOT_BYTES = 0;
constexpr u32 TRANSACTION_BYTES = 8192;   // what TMA brings into one stage
constexpr u32 FULL_ARRIVALS = 129;
constexpr u32 ACTIVATIONS = 0;
constexpr u32 WEIGHTS = 49152;
constexpr u32 SCALES = 73728;
constexpr u32 ZEROS = 73728;
constexpr u32 OUTPUT_STAGING = 73728;
constexpr u32 DEPTH_REDUCTION = 78848;
constexpr u32 FULL_BARRIERS = 78848;
constexpr u32 EMPTY_BARRIERS = 78872;
constexpr u32 STAGING_PITCH_BYTES = 80;
constexpr u32 STAGING_BYTES = 640;

// Divides 0 .. 2^31 - 1 by a number that the host knows, with a multiplication; a division takes some 25 instructions.
struct Divisor {
    u32 multiplier, shift;     // 2^(31 + shift) / number, rounded up; 2^shift >= number
};

__device__ __forceinline__ u32 divide(u32 n, const Divisor& by) { return __umulhi(2 * n, by.multiplier) >> by.shift; }
// What a launch passes to the kernel, besides tensor maps and pointers: the members that this kernel reads.
struct Problem {
    u32 m;   // rows of the activations and of the result
    u32 n;   // columns of the weight and of the result
    u32 k;   // columns of the activations, rows of the weight
    u32 tiles_m;   // output tiles along M
    u32 tiles_n;   // output tiles along N, each of one CTA or cluster
    u32 raster_m;   // rows of tiles of a raster group
    u32 k_iterations;   // stages that one tile takes
    u32 work_ranges;   // what the work is divided into: one range a cluster, or a CTA without clusters
    u32 stream_tiles;   // the first tiles, which are divided among all work ranges
    u32 stream_units;   // work units of them, a stage of a tile each, in every range
    u32 stream_extra;   // ranges that have one unit more: the first ones
    u32 weight_row_blocks;   // of them, blocks along K
    u32 scale_pitch;   // columns of a row of scales, padded
    u32 output_vectors;   // 1: every row of the result is aligned to 16 bytes
    Divisor by_k_iterations;   // divides by k_iterations
    Divisor by_raster_group;   // divides by the tiles of a raster group
    Divisor by_raster_group_rows;   // divides by raster_m
    Divisor by_last_rows;   // divides by the rows of tiles of the last raster group
    u64 activation_pitch;   // elements from one row to the next
    u64 output_pitch;   // elements from one row to the next
};

// ---- Which tiles a block works on -----------------------------------------------------------------------------------
// The stages of the first `stream_tiles` tiles form one line that is cut into equal, contiguous shares, one a block or, where
// blocks form clusters, one a cluster (stream-K); the remaining tiles are dealt out whole. A share may begin inside a tile:
// that first piece is a partial sum for the tile's owner, who holds the tile's first stage as the *last* piece of its own
// share. Partial sums are thus stored early and fixed up late. Owners wait only for blocks with a lower blockIdx (the
// share number counts down), which were dispatched before them: no wait can starve a block that has not started.

struct Piece {
    u32 tile, k_begin, k_end;
};

__device__ __forceinline__ u32 share_begin(const Problem& problem, u32 share) {
    return share * problem.stream_units + min(share, problem.stream_extra);
}

struct WorkQueue {
    u32 unit, unit_end;   // what is left of this block's share
    u32 tile, tiles;      // next whole tile

    __device__ __forceinline__ WorkQueue(const Problem& problem, u32 share)
        : unit(share_begin(problem, share)), unit_end(share_begin(problem, share + 1)),
          tile(problem.stream_tiles + share), tiles(problem.tiles_m * problem.tiles_n) {}

    __device__ __forceinline__ bool next(const Problem& problem, Piece& piece) {
        if (unit < unit_end) {
            piece.tile = divide(unit, problem.by_k_iterations);
            piece.k_begin = unit - piece.tile * problem.k_iterations;
            piece.k_end = min(problem.k_iterations, piece.k_begin + (unit_end - unit));
            unit += piece.k_end - piece.k_begin;
            return true;
        }
        if (tile >= tiles) return false;
        piece = Piece{tile, 0, problem.k_iterations};
        tile += problem.work_ranges;
        return true;
    }
};
// Tiles are numbered through raster groups of raster_m token tiles, channel by channel.
__device__ __forceinline__ void tile_position(const Problem& problem, u32 tile, u32& tile_m, u32& tile_n) {
    const u32 raster_group = divide(tile, problem.by_raster_group), first_row = raster_group * problem.raster_m;
    const u32 inside = tile - first_row * problem.tiles_n, rows_left = problem.tiles_m - first_row;
    const bool is_last = rows_left <= problem.raster_m;
    tile_n = divide(inside, is_last ? problem.by_last_rows : problem.by_raster_group_rows);
    tile_m = first_row + inside - tile_n * (is_last ? rows_left : problem.raster_m);
}

// The same work stage by stage, for the producer.
struct StageCursor {
    WorkQueue queue;
    Piece piece;
    u32 k, tile_m, tile_n;

    __device__ __forceinline__ StageCursor(const Problem& problem, u32 share)
        : queue(problem, share), piece{0, 0, 0}, k(0), tile_m(0), tile_n(0) {}

    __device__ __forceinline__ bool next(const Problem& problem) {
        if (++k < piece.k_end) return true;
        if (!queue.next(problem, piece)) return false;
        k = piece.k_begin;
        tile_position(problem, piece.tile, tile_m, tile_n);
        return true;
    }
};

__device__ __forceinline__ void advance(u32& stage, u32& phase) {
    if (++stage == STAGES) {
        stage = 0;
        phase ^= 1;
    }
}

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
    a[0] = sub_f16x2(and_or(q, 0x000f000fu, 0x64006400u), zero.low);
    a[1] = multiply_add(and_or(q, 0x00f000f0u, 0x64006400u), 0x2c002c00u, zero.high);
    a[2] = sub_f16x2(and_or(upper, 0x000f000fu, 0x64006400u), zero.low);
    a[3] = multiply_add(and_or(upper, 0x00f000f0u, 0x64006400u), 0x2c002c00u, zero.high);
}

// A thread's 16 bytes of a 64 x 64 block hold one word for each 16 rows of W: word i.
__device__ __forceinline__ u32 word(const uint4& words, u32 i) {
    return i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w;
}

// ---- Producer: how each operand reaches its slot --------------------------------------------------------------------
// N64_PER_TILE boxes of K64_PER_STAGE contiguous 2 KB blocks. Blocks past the last row are filled with zeros; blocks past this
// row's depth belong to the next channels, and meet activations that are zero.
__device__ __forceinline__ void load_weights(u32 smem, u32 full, const TensorMap* map, const Problem& problem, u32 tile_n,
                                             u32 k_iteration, u64 policy) {
#pragma unroll
    for (u32 i = 0; i < N64_PER_TILE; ++i) {
        const u32 row = (tile_n * N64_PER_TILE + i) * problem.weight_row_blocks + k_iteration * K64_PER_STAGE;
        cp_async_bulk_tensor_2d_load_hint(smem + i * K64_PER_STAGE * K64_BLOCK_BYTES, map, full, 0, row, policy);
    }
}
// The same boxes and the same swizzle by hand: 16-byte chunk c of token row r stands at chunk c ^ (r & 7).
__device__ __forceinline__ void load_activations(u32 smem, const u16* activations, const Problem& problem, u32 tile_m,
                                                 u32 k_iteration, u32 thread) {
    constexpr u32 PIECES = ACTIVATION_STAGE_BYTES / 16;
#pragma unroll 2
    for (u32 piece = thread; piece < PIECES; piece += PRODUCER_THREADS) {
        const u32 chunk = piece & 7, token = (piece >> 3) % BLOCK_M, k64 = (piece >> 3) / BLOCK_M;
        const u32 target = smem + k64 * BLOCK_M * 128 + token * 128 + ((chunk ^ (token & 7)) << 4);
        const u32 row = tile_m * BLOCK_M + token, depth = k_iteration * BLOCK_K + k64 * 64 + chunk * 8;
        const u32 valid = row < problem.m && depth < problem.k ? min(8u, problem.k - depth) : 0;   // elements
        const u16* source = activations + (valid ? row * problem.activation_pitch : 0);
        cp_async_16(target, source + (valid ? depth : 0), valid * 2);
    }
}

// ---- Accumulators, and partial sums between the blocks that split a tile ---------------------------------------------
// A warp's accumulators travel as whole fragments, 16 bytes a thread, so that both sides use the same addresses.
typedef float Accumulators[C_GROUPS][N8][4];

__device__ __forceinline__ void clear(Accumulators& acc) {
#pragma unroll
    for (u32 c = 0; c < C_GROUPS; ++c)
#pragma unroll
        for (u32 n = 0; n < N8; ++n)
#pragma unroll
            for (u32 i = 0; i < 4; ++i) acc[c][n][i] = 0.0f;
}
// Workspace: for every block one partial tile of BLOCK_M x BLOCK_N floats and one flag a warp tile. slot: share * CLUSTER + rank.
__device__ __forceinline__ float4* partial_sums(float4* partials, u32 slot, u32 warp_tile, u32 lane) {
    constexpr u32 WARP_FRAGMENTS = C_GROUPS * N8 * 32;
    return partials + (u64)(slot * WARP_TILES + warp_tile) * WARP_FRAGMENTS + lane;
}

__device__ __forceinline__ void store_partials(const Accumulators& acc, float4* partials, u32* flags, u32 slot, u32 warp_tile,
                                               u32 lane) {
    float4* sums = partial_sums(partials, slot, warp_tile, lane);
#pragma unroll
    for (u32 c = 0; c < C_GROUPS; ++c)
#pragma unroll
        for (u32 n = 0; n < N8; ++n)
            sums[(c * N8 + n) * 32] = make_float4(acc[c][n][0], acc[c][n][1], acc[c][n][2], acc[c][n][3]);
    __syncwarp();
    if (lane == 0)   // release at gpu scope covers the other lanes' stores, which __syncwarp ordered before it
        asm volatile("st.release.gpu.global.u32 [%0], 1;" :: "l"(flags + slot * WARP_TILES + warp_tile) : "memory");
}

// The owner of a tile adds the sums of other shares' blocks of its own rank in the order of the shares, whatever order they
// arrive in: the result is the same bits every time. It clears the flags for the next launch.
__device__ __forceinline__ void fix_up(Accumulators& acc, const Problem& problem, float4* partials, u32* flags, u32 share,
                                       u32 rank, u32 units_missing, u32 warp_tile, u32 lane) {
    u32 last = share;   // the last share with a part of this tile
    while (units_missing > 0) {
        ++last;
        units_missing -= min(units_missing, share_begin(problem, last + 1) - share_begin(problem, last));
    }
    for (u32 other = share + 1 + lane; other <= last; other += 32) {   // each lane waits for one of them
        u32* flag = flags + (other * CLUSTER + rank) * WARP_TILES + warp_tile;
        u32 ready = 0;
        do {
            asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(ready) : "l"(flag) : "memory");
        } while (ready == 0);
        *flag = 0;   // its writer comes back in a later launch at the earliest
    }
    __syncwarp();
#pragma unroll 1
    for (u32 other = share + 1; other <= last; ++other) {
        const float4* sums = partial_sums(partials, other * CLUSTER + rank, warp_tile, lane);
#pragma unroll
        for (u32 c = 0; c < C_GROUPS; ++c)
#pragma unroll
            for (u32 n = 0; n < N8; ++n) {
                const float4 sum = __ldcg(sums + (c * N8 + n) * 32);
                acc[c][n][0] += sum.x;
                acc[c][n][1] += sum.y;
                acc[c][n][2] += sum.z;
                acc[c][n][3] += sum.w;
            }
    }
}

// ---- Result: scales of whole columns, bias, 16-byte stores -----------------------------------------------------------------
// channel0: this warp's first channel; its fragments follow at a distance of C_STRIDE.
__device__ __forceinline__ void scale_and_bias(Accumulators& acc, const Problem& problem, const u16* bias, const u16* scales,
                                               u32 channel0, u32 lane) {
    const u32 group = lane >> 2;
#pragma unroll
    for (u32 c = 0; c < C_GROUPS; ++c) {
        const u32 low = channel0 + C_STRIDE * c + group, high = low + 8;
        // Whole-column scales, in the order of the packed layout: channel 16 c + 8 r + g at 8 g + 2 c + r.
        const u32 first = channel0 + C_STRIDE * c;
        u32 scale_pair = 0;
        if (low < problem.scale_pitch)
            scale_pair = *(const u32*)(scales + (first / 64 * 64 + 8 * group + 2 * (first % 64 / 16)));
        const float scale_low = low_to_float(scale_pair), scale_high = high_to_float(scale_pair);
        const float bias_low = bias && low < problem.n ? low_to_float(bias[low]) : 0.0f;
        const float bias_high = bias && high < problem.n ? low_to_float(bias[high]) : 0.0f;
#pragma unroll
        for (u32 n = 0; n < N8; ++n) {
            acc[c][n][0] = acc[c][n][0] * scale_low + bias_low;
            acc[c][n][1] = acc[c][n][1] * scale_low + bias_low;
            acc[c][n][2] = acc[c][n][2] * scale_high + bias_high;
            acc[c][n][3] = acc[c][n][3] * scale_high + bias_high;
        }
    }
}
// Eight channels of one token, from shared memory ...
__device__ __forceinline__ uint4 load_vector(u32 smem) {
    uint4 values;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(values.x), "=r"(values.y), "=r"(values.z), "=r"(values.w)
                 : "r"(smem) : "memory");
    return values;
}

// ... to the result.
__device__ __forceinline__ void store_vector(const Problem& problem, u16* output, uint4 values, u32 token, u32 channel) {
    if (token >= problem.m || channel >= problem.n) return;
    u16* target = output + token * problem.output_pitch + channel;
    if (problem.output_vectors && channel + 8 <= problem.n) {
        *(uint4*)target = values;
    } else {   // a row that is not 16-byte aligned, or the last channels
        const u32 words[4] = {values.x, values.y, values.z, values.w};
#pragma unroll
        for (u32 i = 0; i < 8; ++i)
            if (channel + i < problem.n) target[i] = (u16)(words[i / 2] >> (i % 2 * 16));
    }
}

// ---- Result: transposed through the warp's own staging rows, 8 tokens at a time -------------------------------------
// stmatrix.trans turns fragments (channels x tokens) into rows of tokens, which leave as 16-byte stores.
__device__ __forceinline__ void store_result(Accumulators& acc, const Problem& problem, u16* output, u32 smem,
                                             u32 warp_tile, u32 token0, u32 channel0, u32 lane) {
    constexpr u32 VECTORS_PER_TOKEN = WARP_N / 8;
    const u32 staging = smem + OUTPUT_STAGING + warp_tile * STAGING_BYTES;
#pragma unroll
    for (u32 n = 0; n < N8; ++n) {
        __syncwarp();   // the rows of the previous 8 tokens are read
#pragma unroll
        for (u32 c = 0; c < C_GROUPS; ++c) {
            const u32 fragments[2] = {to_pair(acc[c][n][0], acc[c][n][1]), to_pair(acc[c][n][2], acc[c][n][3])};
            stmatrix_x2_trans(staging + (lane & 7) * STAGING_PITCH_BYTES + (2 * c + (lane >> 3 & 1)) * 16, fragments);
        }
        __syncwarp();
#pragma unroll
        for (u32 vector = lane; vector < 8 * VECTORS_PER_TOKEN; vector += 32) {
            const u32 row = vector / VECTORS_PER_TOKEN, column = vector % VECTORS_PER_TOKEN;
            const u32 token = token0 + 8 * n + row, channel = channel0 + 8 * column;
            store_vector(problem, output, load_vector(staging + row * STAGING_PITCH_BYTES + column * 16), token, channel);
        }
    }
}

// ---- Consumer: one piece of work ------------------------------------------------------------------------------------
// Where a warp stands in the tile.
struct WarpPosition {
    u32 lane, k;               // k: which part of the stage's depth
    u32 tile, channel0;        // which part of the block's channels, and its first one
    __device__ __forceinline__ explicit WarpPosition(u32 warp, u32 lane)
        : lane(lane), k(warp / WARPS_N), tile(warp % WARPS_N), channel0(tile * WARP_N) {}
};

// This thread's channels of a 64-channel row in permuted order: C_GROUPS pairs (g, g + 8), side by side.
__device__ __forceinline__ u32 permuted_channel(u32 channel0, u32 lane) {
    return channel0 / 64 * 64 + 8 * (lane >> 2) + 2 * (channel0 % 64 / 16);
}

// The lane's own value, through a shuffle: ptxas would otherwise compute an address anew in each stage.
__device__ __forceinline__ u32 keep_in_register(u32 value, u32 lane = laneid()) { return __shfl_sync(0xffffffffu, value, lane); }

// Where this thread reads in slot 0; the other slots follow at a stage's distance.
struct SlotAddresses {
    u32 activations, weights, scales, zeros;

    __device__ __forceinline__ SlotAddresses(u32 smem, const WarpPosition& warp) {
        const u32 k64 = warp.k * K64_PER_WARP, lane = warp.lane, token = lane & 7;
        const u32 row = (lane >> 4) * 8 + token, chunk = lane >> 3 & 1;
        // 16-byte chunk c of token t stands at c ^ (t & 7) in the 128-byte swizzle.
        activations = keep_in_register(smem + ACTIVATIONS + (k64 * BLOCK_M + row) * 128 + ((chunk ^ token) << 4),
                                       threadIdx.x % 32);
        weights = keep_in_register(smem + WEIGHTS + (warp.channel0 / 64 * K64_PER_STAGE + k64) * K64_BLOCK_BYTES +
                                   warp.channel0 % 64 * 32 + lane * 16, threadIdx.x % 32);
        scales = zeros = 0;
    }
};

// What a thread holds of the weights for 64 depths.
struct WeightFragments {
    uint4 packed[C_GROUPS];        // one word for each 16-deep step
    ZeroPoint zeros[C_GROUPS];
};

// k64: of this warp's part of the stage.
__device__ __forceinline__ void load_weight_fragments(WeightFragments& weights, const SlotAddresses& slots, u32 stage, u32 k64) {
    const u32 base = slots.weights + stage * WEIGHT_STAGE_BYTES + k64 * K64_BLOCK_BYTES;
#pragma unroll
    for (u32 c = 0; c < C_GROUPS; ++c)
        asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(weights.packed[c].x), "=r"(weights.packed[c].y), "=r"(weights.packed[c].z),
                       "=r"(weights.packed[c].w)
                     : "r"(base + c * 512) : "memory");
}

// Activations of one 16-deep step: operand B for all tokens of the warp. ldmatrix reads 8 x 8 tiles whose rows are tokens.
// The step's two chunks differ from step 0's in bits 5 and 6 of the swizzled address.
typedef u32 ActivationFragments[N8][2];

__device__ __forceinline__ void load_activation_fragments(ActivationFragments& b, u32 row, u32 step) {
#pragma unroll
    for (u32 n = 0; n < N8; n += 2) {
        u32 r[4];
        ldmatrix_x4(r, (row ^ (step << 5)) + n * 8 * 128);
        b[n][0] = r[0];
        b[n][1] = r[1];
        b[n + 1][0] = r[2];
        b[n + 1][1] = r[3];
    }
}

// One 16-deep step. row: where this thread reads the warp's first tokens in the 64-deep box.
__device__ __forceinline__ void multiply_step(Accumulators& acc, const WeightFragments& weights, u32 row, u32 step) {
    ActivationFragments b;
    load_activation_fragments(b, row, step);
#pragma unroll
    for (u32 c = 0; c < C_GROUPS; ++c) {
        u32 a[4];
        dequantize(a, word(weights.packed[c], step), weights.zeros[c]);
#pragma unroll
        for (u32 n = 0; n < N8; ++n) mma_m16n8k16_f16(acc[c][n], a, b[n][0], b[n][1]);
    }
}
// Multiplies the stages of one piece.
//
// A slot is released only when the loop has come round, not where its last value is read: ptxas may issue mbarrier.arrive
// while earlier ld.shared are still under way, and stores of other warps can hold those up until TMA has refilled the
// slot. Once the loop has come round, every value read has been used by an instruction that was issued before.
__device__ __forceinline__ void consume_piece(Accumulators& acc, WeightFragments& weights, const SlotAddresses& slots,
                                              u32 full, u32 empty, u32& stage, u32& phase, const Piece& piece, u32 lane) {
    Accumulators& sums = acc;
    u32 previous = stage;
#pragma unroll 1
    for (u32 k = piece.k_begin; k < piece.k_end; ++k) {
        __syncwarp();
        if (k > piece.k_begin && lane == 0) mbarrier_arrive(empty + 8 * previous);
        mbarrier_wait_parity(full + 8 * stage, phase);   // every copy into the slot has landed
#pragma unroll
        for (u32 i = 0; i < K64_PER_WARP; ++i) {
            const u32 row = slots.activations + stage * ACTIVATION_STAGE_BYTES + i * BLOCK_M * 128;
            load_weight_fragments(weights, slots, stage, i);
#pragma unroll
            for (u32 step = 0; step < 4; ++step) {
                multiply_step(sums, weights, row, step);
            }
        }
        previous = stage;
        advance(stage, phase);
    }
    __syncwarp();
    if (lane == 0) mbarrier_arrive(empty + 8 * previous);
}
}  // namespace cudatma

// Y^T = W^T X^T. The last warps produce: they fill STAGES slots of shared memory, waiting for `empty`, signalling `full`. The first
// CONSUMER_WARPS warps wait for `full`, multiply, and give the slot back through `empty`. Both walk through the same pieces of work.
extern "C" __global__ void __launch_bounds__(384, 1)
marlin_mma_sync_f16_column_zeros_128x256x64_w181_s3_r232_w_tma_s_tma_x_cp_async(
    const __grid_constant__ cudatma::TensorMap weight_map,
    const cudatma::u16* scales,
    const cudatma::u8* zeros,
    const cudatma::u16* activations,
    const cudatma::u16* bias,
    cudatma::u16* output,
    float4* partials,
    cudatma::u32* flags,
    const __grid_constant__ cudatma::Problem problem) {
    using namespace cudatma;
    extern __shared__ __align__(1024) u8 dynamic_shared[];
    const u32 smem = shared_address(dynamic_shared);
    const u32 full = smem + FULL_BARRIERS, empty = smem + EMPTY_BARRIERS;
    const u32 warp_index = threadIdx.x / 32, lane = threadIdx.x % 32;

    if (threadIdx.x == 0) {
        for (u32 stage = 0; stage < STAGES; ++stage) {
            mbarrier_init(full + 8 * stage, FULL_ARRIVALS);
            mbarrier_init(empty + 8 * stage, CONSUMER_WARPS);
        }
        fence_mbarrier_init();   // the asynchronous proxy sees initialised barriers
    }
    __syncthreads();
    griddepcontrol_launch_dependents();   // the next kernel may come in and prefetch its weights

    const u32 share = problem.work_ranges - 1 - blockIdx.x;
    u32 stage = 0, phase = 0;   // phase flips each time the ring wraps

    if (warp_index >= CONSUMER_WARPS) {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        StageCursor cursor(problem, share);
        // ---- Producer: 128 threads copy; TMA, where an operand still uses it, is issued by the first ----------------
        const u32 thread = threadIdx.x - 32 * CONSUMER_WARPS;
        const u64 policy = createpolicy_evict_normal();
        griddepcontrol_wait();
        while (cursor.next(problem)) {
            const u32 bar = full + 8 * stage;
            mbarrier_wait_parity(empty + 8 * stage, phase ^ 1);   // all consumer warps have read the slot
            if (thread == 0) {
                mbarrier_arrive_expect_tx(bar, TRANSACTION_BYTES);
                load_weights(smem + WEIGHTS + stage * WEIGHT_STAGE_BYTES, bar, &weight_map, problem, cursor.tile_n, cursor.k,
                             policy);
            }
            __syncwarp();
            load_activations(smem + ACTIVATIONS + stage * ACTIVATION_STAGE_BYTES, activations, problem, cursor.tile_m, cursor.k,
                             thread);
            cp_async_mbarrier_arrive_noinc(bar);   // arrives when this thread's copies have landed
            advance(stage, phase);
        }
        cp_async_wait_group<0>();
        return;
    }

    // ---- Consumers --------------------------------------------------------------------------------------------------
    setmaxnreg_inc<CONSUMER_REGISTERS>();
    const WarpPosition warp(warp_index, lane);
    const SlotAddresses slots(smem, warp);
    WorkQueue queue(problem, share);
    Piece piece;
    Accumulators acc;
    WeightFragments weights;
    griddepcontrol_wait();   // workspace and result may still be in use by the kernel before this one
    while (queue.next(problem, piece)) {
        u32 tile_m, tile_n;
        tile_position(problem, piece.tile, tile_m, tile_n);
        const u32 token0 = tile_m * BLOCK_M, channel0 = tile_n * BLOCK_N + warp.channel0;
        // Whole-column zero points stay in registers for the tile.
#pragma unroll
        for (u32 c = 0; c < C_GROUPS; ++c) {
            const u32 at = permuted_channel(channel0, lane) + 2 * c;
            const u32 pair = channel0 < problem.scale_pitch ? *(const u16*)(zeros + at) : 0x0808u;
            weights.zeros[c] = zero_point(pair & 0xff, pair >> 8);
        }
        clear(acc);
        consume_piece(acc, weights, slots, full, empty, stage, phase, piece, lane);
        if (piece.k_begin > 0) {
            store_partials(acc, partials, flags, share, warp.tile, lane);
            continue;
        }
        if (piece.k_end < problem.k_iterations)
            fix_up(acc, problem, partials, flags, share, 0, problem.k_iterations - piece.k_end, warp.tile, lane);
        scale_and_bias(acc, problem, bias, scales, channel0, lane);
        store_result(acc, problem, output, smem, warp.tile, token0, channel0, lane);
    }
}
