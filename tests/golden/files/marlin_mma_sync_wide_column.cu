// cudatma: kernels/marlin_mma_sync.cu.j2 for sm_90a
// spec: MarlinConfig
//   version = 'mma_sync'
//   dtype = 'float16'
//   group_size = -1
//   has_zeros = True
//   tile_m = 128
//   tile_n = 256
//   tile_k = 64
//   stages = 3
//   slice_k = 1
//   cluster_n = 1
//   cluster_k = 1
//   blocks_per_sm = 1
//   consumer_registers = 232
//   deep_box = False
//   warpgroups = 0
//   mmas_per_commit = 0
//   commits_in_flight = 0
//   scale_form = 'none'
//   pingpong = False
//   warps_n = 8
//   scale_on = 'epilogue'
//   weight_load_path = 'tma'
//   scale_load_path = 'tma'
//   activation_load_path = 'cp_async'
// 8 warps consume, 4 produce; a CTA takes 78896 B.
// One stage holds
//    16384 B  activations 128 x 64 float16, 128B swizzle
//     8192 B  weights 256 x 64 int4, packed layout 1
// Shared memory, by offset
//        0  activations, 49152 B
//    49152  weights, 24576 B
//    73728  staging, 5120 B
//    78848  full_barriers, 24 B
//    78872  empty_barriers, 24 B

// [PTX ISA, griddepcontrol] Waits until the kernels before this one in the stream are finished and their writes visible.
// Returns at once unless the launch was a programmatic dependent one.
__device__ __forceinline__ void griddepcontrol_wait() {
    asm volatile("griddepcontrol.wait;" : : : "memory");
}

// [PTX ISA, griddepcontrol] The next kernel may start once all CTAs have said so or ended.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
    asm volatile("griddepcontrol.launch_dependents;" : : : "memory");
}

// [PTX ISA, setmaxnreg] A whole warpgroup raises its registers a thread to Registers (24..256, a multiple of 8); waits
// until the CTA's pool has them.
template <u32 Registers>
__device__ __forceinline__ void setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" : : "n"(Registers));
}

// [PTX ISA, setmaxnreg] A whole warpgroup gives registers back to the CTA's pool.
template <u32 Registers>
__device__ __forceinline__ void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" : : "n"(Registers));
}

// ---- The tile, as named constants -----------------------------------------------------------------------------------
constexpr u32 TILE_M = 128;      // rows of M of a CTA's tile: columns of the mma
constexpr u32 TILE_N = 256;      // columns of N: rows of the mma
constexpr u32 TILE_K = 64;      // K of one stage
constexpr u32 WARPS_N = 8;      // warps along N, each with all rows of M
constexpr u32 SLICE_K = 1;      // warps with the same columns of N, which divide each stage's K
constexpr u32 WARP_N = 32;
constexpr u32 STAGES = 3;
constexpr u32 CONSUMER_WARPS = 8;
constexpr u32 PRODUCER_THREADS = 128;
constexpr u32 PRODUCER_REGISTERS = 40;
constexpr u32 CONSUMER_REGISTERS = 232;
constexpr bool HAS_STAGE_SCALES = false;   // else they are of whole columns
constexpr bool HAS_ZEROS = true;           // else the zero point is 8
constexpr bool SCALES_SUMS = false;   // scales fp32 sums of a group; else its weights, or the result
constexpr u32 GROUP_SIZE = 64;     // K that share a scale in a stage; TILE_K for whole columns

constexpr u32 WARP_TILES = WARPS_N;             // parts of a CTA's tile that warps hold
constexpr u32 FRAGMENTS_16 = WARP_N / 16;        // of 16 columns of N in a warp ...
constexpr u32 FRAGMENT_STRIDE_N = 16;           // ... and the columns from one to the next
constexpr u32 FRAGMENTS_8 = TILE_M / 8;        // of 8 rows of M
constexpr u32 FIX_UP_UNROLL = 1;        // partial tiles whose loads are in flight together
constexpr u32 K64_PER_STAGE = TILE_K / 64;
constexpr u32 K64_PER_WARP = K64_PER_STAGE / SLICE_K;
constexpr u32 N64_PER_TILE = TILE_N / 64;
constexpr u32 K64_BLOCK_BYTES = 2048;           // one 64 x 64 block of packed weights
constexpr u32 ROW_BYTES = 128;                  // of the activations' boxes: 64 of K

// ---- Shared memory: STAGES slots of each operand, then the epilogue's part; offsets from a 1024-byte aligned base ----
constexpr u32 ACTIVATION_STAGE_BYTES = 16384;
constexpr u32 WEIGHT_STAGE_BYTES = 8192;
constexpr u32 SCALE_STAGE_BYTES = 0;
constexpr u32 ZERO_STAGE_BYTES = 0;
constexpr u32 TRANSACTION_BYTES = 8192;   // what TMA delivers to one stage
constexpr u32 FULL_ARRIVALS = 129;
constexpr u32 ACTIVATIONS = 0;
constexpr u32 WEIGHTS = 49152;
constexpr u32 SCALES = 0;
constexpr u32 ZEROS = 0;
constexpr u32 STAGING = 73728;
constexpr u32 STAGING_PITCH_BYTES = 80;   // from one row to the next
constexpr u32 STAGING_BYTES = 640;   // of one warp: eight rows
constexpr u32 RING_BARRIERS = 78848;
using Ring = TmaPipeline<STAGES>;

// Divides 0 .. 2^31 - 1 by a number that the host knows, with a multiplication; a division takes some 25 instructions.
struct Divisor {
    u32 multiplier, shift;     // 2^(31 + shift) / number, rounded up; 2^shift >= number
};

__device__ __forceinline__ u32 divide(u32 n, const Divisor& by) { return __umulhi(2 * n, by.multiplier) >> by.shift; }
// What a launch passes to the kernel, besides tensor maps and pointers: the members that this kernel reads.
struct Problem {
    u32 m;                          // rows of the result
    u32 n;                          // columns of the result
    u32 k;                          // size of the K dimension
    u32 tiles_m;                    // output tiles along M
    u32 tiles_n;                    // output tiles along N, each of one CTA or cluster
    u32 raster_m;                   // rows of tiles of a raster group
    u32 k_iterations;               // stages that one tile takes
    u32 work_ranges;                // work ranges: one per cluster, or per CTA without clusters
    u32 stream_tiles;               // the first tiles, which are divided among all work ranges
    u32 stream_stages;              // stages of them in every work range ...
    u32 stream_extra;               // ... and the number of ranges that have one more: the first ones
    u32 output_vectors;             // 1: every row of the result is aligned to 16 bytes
    u32 weight_row_blocks;          // of them, blocks along K
    u32 scale_pitch;                // columns of a row of scales, padded
    Divisor by_k_iterations;        // divides by k_iterations
    Divisor by_raster_group;        // divides by the tiles of a raster group
    Divisor by_raster_group_rows;   // divides by raster_m
    Divisor by_last_rows;           // divides by the rows of tiles of the last raster group
    u64 output_pitch;               // elements from one row to the next
    u64 activation_pitch;           // elements from one row to the next
};

// Stages k_begin .. k_end - 1 of an output tile.
struct WorkUnit {
    u32 tile, k_begin, k_end;
};

// ---- Tiles to CTAs: stream-K, then whole tiles ----------------------------------------------------------------------
// The stages of the first `stream_tiles` tiles form one sequence, which is cut into equal, contiguous work ranges: one for
// each CTA or, in a launch with clusters, for each cluster. The remaining tiles go to the ranges whole, in turn. A range may
// begin inside a tile. Its first work unit is then a partial sum, which it stores for the tile's owner: the range with the
// tile's first stage, the last one that this range has of the sequence. An owner waits only for CTAs with a lower blockIdx,
// because ranges are numbered down from the last one. Those CTAs were dispatched before the owner, so that no wait can
// starve a CTA that has not started.

// The first stage of a range in the sequence.
__device__ __forceinline__ u32 range_begin(const Problem& problem, u32 range) {
    return range * problem.stream_stages + min(range, problem.stream_extra);
}

struct WorkQueue {
    u32 stage, stage_end;   // what is left of this range of the sequence
    u32 tile, tiles;        // next whole tile

    __device__ __forceinline__ WorkQueue(const Problem& problem, u32 range)
        : stage(range_begin(problem, range)), stage_end(range_begin(problem, range + 1)),
          tile(problem.stream_tiles + range), tiles(problem.tiles_m * problem.tiles_n) {}

    __device__ __forceinline__ bool next(const Problem& problem, WorkUnit& unit) {
        if (stage < stage_end) {
            unit.tile = divide(stage, problem.by_k_iterations);
            unit.k_begin = stage - unit.tile * problem.k_iterations;
            unit.k_end = min(problem.k_iterations, unit.k_begin + (stage_end - stage));
            stage += unit.k_end - unit.k_begin;
            return true;
        }
        if (tile >= tiles) return false;
        unit = WorkUnit{tile, 0, problem.k_iterations};
        tile += problem.work_ranges;
        return true;
    }
};

// Raster order: tiles are numbered in groups of raster_m rows of tiles, and in each group column by column, so that CTAs
// that run at the same time share operands in L2.
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
    WorkUnit unit;
    u32 k, tile_m, tile_n;

    __device__ __forceinline__ StageCursor(const Problem& problem, u32 range)
        : queue(problem, range), unit{0, 0, 0}, k(0), tile_m(0), tile_n(0) {}

    __device__ __forceinline__ bool next(const Problem& problem) {
        if (++k < unit.k_end) return true;
        if (!queue.next(problem, unit)) return false;
        k = unit.k_begin;
        tile_position(problem, unit.tile, tile_m, tile_n);
        return true;
    }
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

// ---- Accumulators, and partial sums of them -------------------------------------------------------------------------
// Partial sums travel as whole fragments, 16 bytes a thread, so that both sides use the same addresses.

// A warp's accumulators: fragments of 16 x 8 values, four a lane.

typedef float Accumulators[FRAGMENTS_16][FRAGMENTS_8][4];

__device__ __forceinline__ void clear(Accumulators& acc) {
#pragma unroll
    for (u32 c = 0; c < FRAGMENTS_16; ++c)
#pragma unroll
        for (u32 r = 0; r < FRAGMENTS_8; ++r)
#pragma unroll
            for (u32 i = 0; i < 4; ++i) acc[c][r][i] = 0.0f;
}

// ---- Across CTAs: stream-K ------------------------------------------------------------------------------------------
// For every CTA, a partial tile of fp32 sums and one flag for each of its WARP_TILES.
struct Workspace {
    float4* partials;
    u32* flags;
};

__device__ __forceinline__ float4* partial_sums(const Workspace& workspace, u32 cta, u32 warp_tile, u32 lane) {
    constexpr u32 WARP_FRAGMENTS = FRAGMENTS_16 * FRAGMENTS_8 * 32;
    return workspace.partials + (u64)(cta * WARP_TILES + warp_tile) * WARP_FRAGMENTS + lane;
}

__device__ __forceinline__ void store_partials(const Accumulators& acc, const Workspace& workspace, u32 cta, u32 warp_tile,
                                               u32 lane) {
    float4* sums = partial_sums(workspace, cta, warp_tile, lane);
#pragma unroll
    for (u32 c = 0; c < FRAGMENTS_16; ++c)
#pragma unroll
        for (u32 r = 0; r < FRAGMENTS_8; ++r)
            sums[(c * FRAGMENTS_8 + r) * 32] = make_float4(acc[c][r][0], acc[c][r][1], acc[c][r][2], acc[c][r][3]);
    __syncwarp();
    if (lane == 0)   // release at gpu scope covers the other lanes' stores, which __syncwarp ordered before it
        asm volatile("st.release.gpu.global.u32 [%0], 1;"
                     :: "l"(workspace.flags + cta * WARP_TILES + warp_tile) : "memory");
}

// The owner of a tile adds the partial sums of the following ranges, `stages_missing` stages in all, in the order of the
// ranges, whatever order they arrive in: the result is the same bits every time. In clusters it adds those of the CTAs of its
// own rank. It clears the flags for the next launch.
template <u32 ClusterSize = 1>
__device__ __forceinline__ void fix_up(Accumulators& acc, const Problem& problem, const Workspace& workspace, u32 range,
                                       u32 stages_missing, u32 warp_tile, u32 lane, u32 rank = 0) {
    u32 last = range;   // the last range with a part of this tile
    while (stages_missing > 0) {
        ++last;
        stages_missing -= min(stages_missing, range_begin(problem, last + 1) - range_begin(problem, last));
    }
    for (u32 other = range + 1 + lane; other <= last; other += 32) {   // each lane waits for one of them
        u32* flag = workspace.flags + (other * ClusterSize + rank) * WARP_TILES + warp_tile;
        u32 is_stored = 0;
        do {
            asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(is_stored) : "l"(flag) : "memory");
        } while (is_stored == 0);
        *flag = 0;   // its CTA sets it again in a later launch at the earliest
    }
    __syncwarp();
#pragma unroll FIX_UP_UNROLL
    for (u32 other = range + 1; other <= last; ++other) {
        const float4* sums = partial_sums(workspace, other * ClusterSize + rank, warp_tile, lane);
#pragma unroll
        for (u32 c = 0; c < FRAGMENTS_16; ++c)
#pragma unroll
            for (u32 r = 0; r < FRAGMENTS_8; ++r) {
                const float4 sum = __ldcg(sums + (c * FRAGMENTS_8 + r) * 32);
                acc[c][r][0] += sum.x;
                acc[c][r][1] += sum.y;
                acc[c][r][2] += sum.z;
                acc[c][r][3] += sum.w;
            }
    }
}

// ---- Epilogue: accumulators to rows of the result -------------------------------------------------------------------

// 16 bytes of one row, from shared memory ...
__device__ __forceinline__ uint4 load_vector(u32 smem) {
    uint4 values;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(values.x), "=r"(values.y), "=r"(values.z), "=r"(values.w)
                 : "r"(smem) : "memory");
    return values;
}

// ... to the result.
template <typename Element>
__device__ __forceinline__ void store_vector(const Problem& problem, Element* output, uint4 values, u32 row, u32 column) {
    constexpr u32 COLUMNS = 16 / sizeof(Element);
    if (row >= problem.m || column >= problem.n) return;
    Element* target = output + row * problem.output_pitch + column;
    if (problem.output_vectors && column + COLUMNS <= problem.n) {
        *(uint4*)target = values;
    } else {   // a row that is not 16-byte aligned, or the last columns
        const u32 words[4] = {values.x, values.y, values.z, values.w};
#pragma unroll
        for (u32 i = 0; i < COLUMNS; ++i) {
            if (column + i >= problem.n) continue;
            if constexpr (COLUMNS == 4) target[i] = __uint_as_float(words[i]);
            else target[i] = (Element)(words[i / 2] >> (i % 2 * 16));
        }
    }
}

// A warp stores its part of the tile through its staging rows, eight rows at a time.
__device__ __forceinline__ void store_rows_of_warp(const Accumulators& acc, const Problem& problem, u16* output, u32 smem,
                                                   u32 warp_tile, u32 lane, u32 row0, u32 column0) {
    constexpr u32 VECTORS_PER_ROW = 2 * FRAGMENTS_16;   // of eight columns
    const u32 staging = smem + STAGING + warp_tile * STAGING_BYTES;
#pragma unroll
    for (u32 r = 0; r < FRAGMENTS_8; ++r) {
        __syncwarp();   // all lanes have read the eight rows before
#pragma unroll
        for (u32 c = 0; c < FRAGMENTS_16; ++c) {
            const u32 fragments[2] = {to_pair(acc[c][r][0], acc[c][r][1]), to_pair(acc[c][r][2], acc[c][r][3])};
            stmatrix_x2_trans(staging + (lane & 7) * STAGING_PITCH_BYTES + (2 * c + (lane >> 3 & 1)) * 16, fragments);
        }
        __syncwarp();
#pragma unroll
        for (u32 vector = lane; vector < 8 * VECTORS_PER_ROW; vector += 32) {
            const u32 row = vector / VECTORS_PER_ROW, column = vector % VECTORS_PER_ROW;
            store_vector(problem, output, load_vector(staging + row * STAGING_PITCH_BYTES + column * 16),
                         row0 + 8 * r + row, column0 + 8 * column);
        }
    }
}

// Scales of whole columns and the bias, in one pass. In a packed row of 64 columns, 16 c + 8 r + g stands at 8 g + 2 c + r.
// column0: the warp's first column.
__device__ __forceinline__ void scale_and_bias(Accumulators& acc, const Problem& problem, const u16* bias, const u16* scales,
                                               u32 column0, u32 lane) {
    const u32 g = lane >> 2;
#pragma unroll
    for (u32 c = 0; c < FRAGMENTS_16; ++c) {
        const u32 first = column0 + FRAGMENT_STRIDE_N * c, low = first + g, high = low + 8;
        u32 scale_pair = 0;
        if (low < problem.scale_pitch)
            scale_pair = *(const u32*)(scales + (first / 64 * 64 + 8 * g + 2 * (first % 64 / 16)));
        const float scale_low = low_to_float(scale_pair), scale_high = high_to_float(scale_pair);
        const float bias_low = bias && low < problem.n ? low_to_float(bias[low]) : 0.0f;
        const float bias_high = bias && high < problem.n ? low_to_float(bias[high]) : 0.0f;
#pragma unroll
        for (u32 r = 0; r < FRAGMENTS_8; ++r) {
            acc[c][r][0] = acc[c][r][0] * scale_low + bias_low;
            acc[c][r][1] = acc[c][r][1] * scale_low + bias_low;
            acc[c][r][2] = acc[c][r][2] * scale_high + bias_high;
            acc[c][r][3] = acc[c][r][3] * scale_high + bias_high;
        }
    }
}

// ---- How each operand reaches its slot ------------------------------------------------------------------------------
// N64_PER_TILE boxes of K64_PER_STAGE contiguous 2 KB blocks. Blocks past the last row of blocks are filled with zeros; blocks
// past this row's K belong to the next columns, and meet activations that are zero.
__device__ __forceinline__ void load_weights(u32 smem, u32 full, const TensorMap* map, const Problem& problem, u32 tile_n,
                                             u32 k, u64 policy) {
#pragma unroll
    for (u32 i = 0; i < N64_PER_TILE; ++i) {
        const u32 row = (tile_n * N64_PER_TILE + i) * problem.weight_row_blocks + k * K64_PER_STAGE;
        cp_async_bulk_tensor_2d_load_hint(smem + i * K64_PER_STAGE * K64_BLOCK_BYTES, map, full, 0, row, policy);
    }
}

// The same boxes by cp.async, and the same swizzle by hand: 16-byte chunk c of row r stands at chunk c ^ (r & 7).
__device__ __forceinline__ void copy_activations(u32 smem, const u16* activations, const Problem& problem, u32 tile_m, u32 k,
                                                 u32 thread) {
    constexpr u32 COPIES = ACTIVATION_STAGE_BYTES / 16;
#pragma unroll 2
    for (u32 copy = thread; copy < COPIES; copy += PRODUCER_THREADS) {
        const u32 chunk = copy & 7, row = (copy >> 3) % TILE_M, k64 = (copy >> 3) / TILE_M;
        const u32 target = smem + k64 * TILE_M * ROW_BYTES + row * ROW_BYTES + ((chunk ^ (row & 7)) << 4);
        const u32 m = tile_m * TILE_M + row, first = k * TILE_K + k64 * 64 + chunk * 8;
        const u32 valid = m < problem.m && first < problem.k ? min(8u, problem.k - first) : 0;   // elements
        const u16* source = activations + (valid ? m * problem.activation_pitch : 0);
        cp_async_16(target, source + (valid ? first : 0), valid * 2);
    }
}

// ---- Main loop: int4 weights and activations from shared memory to registers, mma.sync --------------------------------------
// Where a warp stands among the consumers.
struct WarpPosition {
    u32 lane, slice;           // slice: of each stage's K
    u32 tile, column0;         // its part of the CTA's tile, and the part's first column
    __device__ __forceinline__ WarpPosition(u32 warp, u32 lane)
        : lane(lane), slice(warp / WARPS_N), tile(warp % WARPS_N), column0(tile * WARP_N) {}
};

// This thread's columns of a packed row of 64 columns: FRAGMENTS_16 pairs (g, g + 8), side by side.
__device__ __forceinline__ u32 packed_column(u32 column0, u32 lane) {
    return column0 / 64 * 64 + 8 * (lane >> 2) + 2 * (column0 % 64 / 16);
}

// The lane's own value, through a shuffle: ptxas would otherwise compute an address anew in each stage.
__device__ __forceinline__ u32 keep_in_register(u32 value, u32 lane = laneid()) { return __shfl_sync(0xffffffffu, value, lane); }

// Where this thread reads in slot 0; the other slots follow at a stage's distance.
struct SlotAddresses {
    u32 activations, weights, scales = 0, zeros = 0;

    __device__ __forceinline__ SlotAddresses(u32 smem, const WarpPosition& warp) {
        const u32 k64 = warp.slice * K64_PER_WARP, lane = warp.lane;
        // ldmatrix takes the addresses of rows: of 16 rows, or of 8 where a tile has no more.
        const u32 row = (TILE_M == 8 ? 0 : (lane >> 4) * 8) + (lane & 7), chunk = lane >> 3 & 1;
        // 16-byte chunk c of row r stands at c ^ (r & 7) in the 128-byte swizzle.
        activations = keep_in_register(smem + ACTIVATIONS + (k64 * TILE_M + row) * ROW_BYTES + ((chunk ^ (lane & 7)) << 4),
                                       threadIdx.x % 32);
        weights = keep_in_register(smem + WEIGHTS + (warp.column0 / 64 * K64_PER_STAGE + k64) * K64_BLOCK_BYTES +
                                   warp.column0 % 64 * 32 + lane * 16, threadIdx.x % 32);
        if constexpr (HAS_STAGE_SCALES) {
            const u32 at = k64 * 64 / GROUP_SIZE * TILE_N + packed_column(warp.column0, lane);
            scales = keep_in_register(smem + SCALES + at * 2, threadIdx.x % 32);
            if constexpr (HAS_ZEROS) zeros = keep_in_register(smem + ZEROS + at, threadIdx.x % 32);
        }
    }
};

// What a thread holds of the weights for 64 of K.
struct WeightFragments {
    uint4 packed[FRAGMENTS_16];        // one word for each 16-deep step
    u32 scale_pairs[FRAGMENTS_16];     // of columns g (low half) and g + 8 (high half)
    ZeroPoint zeros[FRAGMENTS_16];
};

__device__ __forceinline__ void load_scale_pairs(u32 (&pairs)[FRAGMENTS_16], u32 smem) {
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(pairs[0]), "=r"(pairs[1]) : "r"(smem) : "memory");
}

__device__ __forceinline__ void load_zero_points(ZeroPoint (&zeros)[FRAGMENTS_16], u32 smem) {
#pragma unroll
    for (u32 c = 0; c < FRAGMENTS_16; ++c) {
        u32 pair;
        asm volatile("ld.shared.u16 %0, [%1];" : "=r"(pair) : "r"(smem + 2 * c) : "memory");
        zeros[c] = zero_point(pair & 0xff, pair >> 8);
    }
}

// k: inside this warp's slice of the stage, a multiple of the group size or the first of a 64-deep block.
__device__ __forceinline__ void load_group(WeightFragments& weights, const SlotAddresses& slots, u32 stage, u32 k) {
    const u32 row = k / GROUP_SIZE * TILE_N;
    load_scale_pairs(weights.scale_pairs, slots.scales + stage * SCALE_STAGE_BYTES + row * 2);
    if constexpr (HAS_ZEROS) load_zero_points(weights.zeros, slots.zeros + stage * ZERO_STAGE_BYTES + row);
}

// k64: of this warp's slice of the stage.
__device__ __forceinline__ void load_weight_fragments(WeightFragments& weights, const SlotAddresses& slots, u32 stage, u32 k64) {
    const u32 base = slots.weights + stage * WEIGHT_STAGE_BYTES + k64 * K64_BLOCK_BYTES;
#pragma unroll
    for (u32 c = 0; c < FRAGMENTS_16; ++c)
        asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(weights.packed[c].x), "=r"(weights.packed[c].y), "=r"(weights.packed[c].z),
                       "=r"(weights.packed[c].w)
                     : "r"(base + c * 512) : "memory");
    if constexpr (HAS_STAGE_SCALES) load_group(weights, slots, stage, k64 * 64);
}

// Activations of one 16-deep step: operand B for all rows of the tile. ldmatrix reads 8 x 8 tiles. The step's two chunks
// differ from step 0's in bits 5 and 6 of the swizzled address.
typedef u32 ActivationFragments[FRAGMENTS_8][2];

__device__ __forceinline__ void load_activation_fragments(ActivationFragments& b, u32 address, u32 step) {
    if constexpr (FRAGMENTS_8 == 1) {
        ldmatrix_x2(b[0], address ^ (step << 5));
    } else {
#pragma unroll
        for (u32 r = 0; r < FRAGMENTS_8; r += 2) {
            u32 four[4];
            ldmatrix_x4(four, (address ^ (step << 5)) + r * 8 * ROW_BYTES);
            b[r][0] = four[0];
            b[r][1] = four[1];
            b[r + 1][0] = four[2];
            b[r + 1][1] = four[3];
        }
    }
}

// One 16-deep step. address: where this thread reads the tile's first rows in the 64-deep box.
__device__ __forceinline__ void multiply_step(Accumulators& acc, const WeightFragments& weights, u32 address, u32 step) {
    ActivationFragments b;
    load_activation_fragments(b, address, step);
#pragma unroll
    for (u32 c = 0; c < FRAGMENTS_16; ++c) {
        u32 a[4];
        dequantize(a, word(weights.packed[c], step), weights.zeros[c]);
        if constexpr (HAS_STAGE_SCALES && !SCALES_SUMS) {
            const u32 scale_low = both_low(weights.scale_pairs[c]), scale_high = both_high(weights.scale_pairs[c]);
            a[0] = multiply(a[0], scale_low);
            a[1] = multiply(a[1], scale_high);
            a[2] = multiply(a[2], scale_low);
            a[3] = multiply(a[3], scale_high);
        }
#pragma unroll
        for (u32 r = 0; r < FRAGMENTS_8; ++r) mma_m16n8k16_f16(acc[c][r], a, b[r][0], b[r][1]);
    }
}

// A group or a stage ends: adds its sums, scaled, to the accumulators.
__device__ __forceinline__ void scale_sums(Accumulators& acc, Accumulators& sums, const WeightFragments& weights) {
#pragma unroll
    for (u32 c = 0; c < FRAGMENTS_16; ++c) {
        const float low = low_to_float(weights.scale_pairs[c]), high = high_to_float(weights.scale_pairs[c]);
#pragma unroll
        for (u32 r = 0; r < FRAGMENTS_8; ++r) {
            acc[c][r][0] += sums[c][r][0] * low;
            acc[c][r][1] += sums[c][r][1] * low;
            acc[c][r][2] += sums[c][r][2] * high;
            acc[c][r][3] += sums[c][r][3] * high;
        }
    }
    clear(sums);
}

// Multiplies the stages of a work unit. A slot is released in the next iteration, when instructions issued before have used
// every value read from it (TmaPipeline::release_used()).
__device__ __forceinline__ void mainloop(Accumulators& acc, WeightFragments& weights, const SlotAddresses& slots, Ring& ring,
                                         const WorkUnit& unit, u32 lane) {
    Accumulators group;   // sums of the current group, not yet scaled
    Accumulators& sums = SCALES_SUMS ? group : acc;
    if constexpr (SCALES_SUMS) clear(group);
    u32 previous = ring.stage;
#pragma unroll 1
    for (u32 k = unit.k_begin; k < unit.k_end; ++k) {
        __syncwarp();
        if (k > unit.k_begin && lane == 0) ring.release_used(previous);
        ring.wait();
#pragma unroll
        for (u32 i = 0; i < K64_PER_WARP; ++i) {
            const u32 address = slots.activations + ring.stage * ACTIVATION_STAGE_BYTES + i * TILE_M * ROW_BYTES;
            load_weight_fragments(weights, slots, ring.stage, i);
#pragma unroll
            for (u32 step = 0; step < 4; ++step) {
                if constexpr (GROUP_SIZE == 32) {
                    if (step == 2) load_group(weights, slots, ring.stage, i * 64 + 32);
                }
                multiply_step(sums, weights, address, step);
                if constexpr (SCALES_SUMS) {
                    const u32 done = i * 64 + step * 16 + 16;   // K of this warp's slice
                    if (done % GROUP_SIZE == 0 || done == K64_PER_WARP * 64) scale_sums(acc, sums, weights);
                }
            }
        }
        previous = ring.stage;
        ring.advance();
    }
    ring.release_used_by_warp(previous, lane);
}

// The operands, by the names of the launch parameters. Maps that this kernel does not take are null.
struct Operands {
    const TensorMap *weight_map, *scale_map, *zero_map, *activation_map;
    const u16* scales;
    const u8* zeros;
    const u16* activations;
    const u16* bias;
    u16* output;
    Workspace workspace;
};

// Weights that several rows of tiles read should stay in L2.
__device__ __forceinline__ u64 choose_weight_policy(const Problem& problem) {
    const u64 first = createpolicy_evict_first(), normal = createpolicy_evict_normal();
    return problem.tiles_m > 1 ? normal : first;
}

// ---- Producer: PRODUCER_THREADS threads, which copy by cp.async; the first of them issues TMA ---------------------------
__device__ __forceinline__ void produce(Ring& ring, const Problem& problem, const Operands& operands, u32 smem, u32 range,
                                        u32 thread) {
    const u64 policy = choose_weight_policy(problem);
    StageCursor cursor(problem, range);
    griddepcontrol_wait();
    for (; cursor.next(problem); ring.advance()) {
        const u32 full = ring.get_barrier(), tile_m = cursor.tile_m, tile_n = cursor.tile_n, k = cursor.k;
        const u32 weights = smem + WEIGHTS + ring.stage * WEIGHT_STAGE_BYTES;
        const u32 activations = smem + ACTIVATIONS + ring.stage * ACTIVATION_STAGE_BYTES;
        ring.acquire();
        if (thread == 0) {
            ring.expect_tx(TRANSACTION_BYTES);
            load_weights(weights, full, operands.weight_map, problem, tile_n, k, policy);
        }
        __syncwarp();
        copy_activations(activations, operands.activations, problem, tile_m, k, thread);
        cp_async_mbarrier_arrive_noinc(full);   // arrives when this thread's copies have landed
    }
    cp_async_wait_group<0>();
}

// ---- Consumers ------------------------------------------------------------------------------------------------------
// Zero points of whole columns, which hold for a tile. column0: the warp's first column.
__device__ __forceinline__ void load_column_zeros(WeightFragments& weights, const Problem& problem, const u8* zeros, u32 column0,
                                                  u32 lane) {
#pragma unroll
    for (u32 c = 0; c < FRAGMENTS_16; ++c) {
        const u32 at = packed_column(column0, lane) + 2 * c;
        const u32 pair = column0 < problem.scale_pitch ? *(const u16*)(zeros + at) : 0x0808u;
        weights.zeros[c] = zero_point(pair & 0xff, pair >> 8);
    }
}

// Scales and stores the complete sums of a tile. row0: its first row. column0: the warp's first column.
__device__ __forceinline__ void epilogue(Accumulators& acc, const Problem& problem, const Operands& operands, u32 smem,
                                         const WarpPosition& warp, u32 row0, u32 column0) {
    scale_and_bias(acc, problem, operands.bias, operands.scales, column0, warp.lane);
    store_rows_of_warp(acc, problem, operands.output, smem, warp.tile, warp.lane, row0, column0);
}

// range: the CTA's work range.
__device__ __forceinline__ void consume(Ring& ring, const Problem& problem, const Operands& operands, u32 smem, u32 range,
                                        const WarpPosition& warp) {
    const SlotAddresses slots(smem, warp);
    WorkQueue queue(problem, range);
    WorkUnit unit;
    Accumulators acc;
    WeightFragments weights;
    griddepcontrol_wait();   // the kernel before this one may still use the workspace and the result
    while (queue.next(problem, unit)) {
        u32 tile_m, tile_n;
        tile_position(problem, unit.tile, tile_m, tile_n);
        const u32 column0 = tile_n * TILE_N + warp.column0;
        load_column_zeros(weights, problem, operands.zeros, column0, warp.lane);
        clear(acc);
        mainloop(acc, weights, slots, ring, unit, warp.lane);
        if (unit.k_begin > 0) {
            store_partials(acc, operands.workspace, range, warp.tile, warp.lane);
            continue;
        }
        if (unit.k_end < problem.k_iterations)
            fix_up(acc, problem, operands.workspace, range, problem.k_iterations - unit.k_end, warp.tile, warp.lane);
        epilogue(acc, problem, operands, smem, warp, tile_m * TILE_M, column0);
    }
}
}  // namespace cudatma

// Y = X W as Y^T = W^T X^T: columns of N are the rows of the mma. The last warps produce: they fill the slots of the ring. The
// first CONSUMER_WARPS warps consume: they dequantize weights, multiply, and store. Both walk through the same work units.
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
    const u32 warp_index = threadIdx.x / 32, lane = threadIdx.x % 32, range = problem.work_ranges - 1 - blockIdx.x;
    const Operands operands{&weight_map, nullptr, nullptr, nullptr, scales, zeros, activations, bias, output, {partials, flags}};
    Ring ring;
    ring.init(smem + RING_BARRIERS, FULL_ARRIVALS, CONSUMER_WARPS);
    griddepcontrol_launch_dependents();   // the next kernel may start and load its weights

    if (warp_index >= CONSUMER_WARPS) {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        produce(ring, problem, operands, smem, range, threadIdx.x - 32 * CONSUMER_WARPS);
        return;
    }
    setmaxnreg_inc<CONSUMER_REGISTERS>();
    consume(ring, problem, operands, smem, range, WarpPosition(warp_index, lane));
}
