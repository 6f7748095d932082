// cudatma: kernels/marlin_wgmma.cu.j2 for sm_90a
// spec: MarlinConfig
//   version = 'wgmma'
//   dtype = 'bfloat16'
//   group_size = 32
//   has_zeros = True
//   tile_m = 24
//   tile_n = 256
//   tile_k = 128
//   stages = 4
//   slice_k = 1
//   cluster_n = 1
//   cluster_k = 1
//   blocks_per_sm = 1
//   consumer_registers = 0
//   deep_box = False
//   warpgroups = 2
//   mmas_per_commit = 4
//   commits_in_flight = 1
//   scale_form = 'none'
//   pingpong = False
//   warps_n = 0
//   scale_on = ''
//   weight_load_path = 'tma'
//   scale_load_path = 'tma'
//   activation_load_path = 'tma'
// 8 warps consume, 1 produce; a CTA takes 111168 B.
// One stage holds
//     6144 B  activations 24 x 128 bfloat16, 128B swizzle
//    16384 B  weights 256 x 128 int4, packed layout 1
//     2048 B  scales 4 x 256 bfloat16
//     1024 B  zero points 4 x 256 uint8
// Shared memory, by offset
//        0  activations, 24576 B
//    24576  weights, 65536 B
//    90112  scales, 8192 B
//    98304  zeros, 4096 B
//   102400  staging, 8704 B
//   111104  full_barriers, 32 B
//   111136  empty_barriers, 32 B

// [PTX ISA, Asynchronous Warpgroup Level Matrix, Matrix Descriptor] Where an operand lies in shared memory. For rows of K under
// a swizzle: stride_bytes from 8 rows to the next 8, leading_bytes unused. swizzle: 0 none, 1 128B, 2 64B, 3 32B: the numbers run
// the other way than a tensor map's. A later k16 step of the same rows is 32 bytes further: 2 in the descriptor's low bits.
// For rows of M or N (a transposed operand): stride_bytes from 8 of K to the next 8, leading_bytes from 64 of M or N to the next.
__device__ __forceinline__ u64 matrix_descriptor(u32 address, u32 leading_bytes, u32 stride_bytes, u32 swizzle) {
    return static_cast<u64>((address & 0x3ffff) >> 4) | static_cast<u64>(leading_bytes >> 4) << 16 |
           static_cast<u64>(stride_bytes >> 4) << 32 | static_cast<u64>(swizzle) << 62;
}

// [PTX ISA, wgmma.wait_group] Waits until at most the Newest (0..7) latest groups are in flight.
template <u32 Newest>
__device__ __forceinline__ void wgmma_wait_group() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" : : "n"(Newest) : "memory");
}

// [PTX ISA, griddepcontrol] Waits until the kernels before this one in the stream are finished and their writes visible.
// Returns at once unless the launch was a programmatic dependent one.
__device__ __forceinline__ void griddepcontrol_wait() {
    asm volatile("griddepcontrol.wait;" : : : "memory");
}

// [PTX ISA, griddepcontrol] The next kernel may start once all CTAs have said so or ended.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
    asm volatile("griddepcontrol.launch_dependents;" : : : "memory");
}

// ---- The tile, as named constants -----------------------------------------------------------------------------------
constexpr u32 TILE_M = 24;      // rows of M of a CTA's tile: columns of the wgmma
constexpr u32 TILE_N = 256;      // columns of N: rows of the wgmmas
constexpr u32 TILE_K = 128;      // K of one stage
constexpr u32 WARPGROUPS = 2;   // along N
constexpr u32 SLICE_K = 1;      // warpgroups with the same columns of N, which divide each stage's K
constexpr u32 STACK = 2;          // wgmmas of 64 columns of N in a warpgroup
constexpr u32 STAGES = 4;
constexpr u32 CLUSTER = 1;      // CTAs of a cluster, along N; they share the activations
constexpr u32 LOADED_M = 24;     // rows of M that each of them loads, for all
constexpr u32 CLUSTER_K = 1;    // CTAs of a cluster that divide the K of its tile
constexpr u32 MMAS_PER_COMMIT = 4;      // wgmmas of an accumulator in a commit group, 16 of K each
constexpr u32 COMMITS_IN_FLIGHT = 1;  // commit groups outstanding while the next one is dequantized
constexpr u32 RELEASE_K64 = 0;   // after this 64-deep block all wgmmas of the previous stage are complete
constexpr u32 CONSUMER_WARPS = 8;
constexpr bool HAS_STAGE_SCALES = true;   // else they are of whole columns
constexpr bool HAS_ZEROS = true;           // else the zero point is 8
constexpr u32 GROUP_SIZE = 32;    // K that share a scale in a stage; TILE_K for whole columns

constexpr u32 WARP_TILES = 4 * WARPGROUPS;      // parts of a CTA's tile that warps hold
constexpr u32 FRAGMENTS_16 = STACK;              // of 16 columns of N in a warp ...
constexpr u32 FRAGMENT_STRIDE_N = 64;           // ... and the columns from one to the next
constexpr u32 FRAGMENTS_8 = TILE_M / 8;        // of 8 rows of M
constexpr u32 FIX_UP_UNROLL = 2;        // partial tiles whose loads are in flight together
constexpr u32 K64_PER_STAGE = TILE_K / 64;
constexpr u32 K64_PER_SLICE = K64_PER_STAGE / SLICE_K;
constexpr u32 N64_PER_TILE = TILE_N / 64;
constexpr u32 K64_BLOCK_BYTES = 2048;           // one 64 x 64 block of packed weights
constexpr u32 ROW_BYTES = 128;                  // of the activations' boxes: 64 of K
constexpr u32 SWIZZLE_128B = 1, SWIZZLE_REPEAT_BYTES = 8 * ROW_BYTES;   // in a matrix descriptor

// ---- Shared memory: STAGES slots of each operand, then the epilogue's part; offsets from a 1024-byte aligned base ----
constexpr u32 ACTIVATION_STAGE_BYTES = 6144;
constexpr u32 WEIGHT_STAGE_BYTES = 16384;
constexpr u32 SCALE_STAGE_BYTES = 2048;
constexpr u32 ZERO_STAGE_BYTES = 1024;
constexpr u32 TRANSACTION_BYTES = 25600;   // what TMA delivers to one stage
constexpr u32 EMPTY_ARRIVALS = 8;
constexpr u32 ACTIVATIONS = 0;
constexpr u32 WEIGHTS = 24576;
constexpr u32 SCALES = 90112;
constexpr u32 ZEROS = 98304;
constexpr u32 STAGING = 102400;
constexpr u32 STAGING_ROWS = 16;   // rows of M that a warpgroup stores together
constexpr u32 STAGING_PITCH_BYTES = 272;   // from one row to the next
constexpr u32 STAGING_BYTES = 4352;   // of one warpgroup
constexpr u32 RING_BARRIERS = 111104;
using Ring = TmaPipeline<STAGES>;

// bar_sync() at named barrier First + index, index < Count. Each number is a constant in the code: ptxas sets all 16 barriers
// aside for a number that it does not know.
template <u32 First, u32 Count>
__device__ __forceinline__ void bar_sync_one_of(u32 index, u32 threads) {
    if constexpr (Count == 1) {
        bar_sync(First, threads);
    } else if (index == 0) {
        bar_sync(First, threads);
    } else {
        bar_sync_one_of<First + 1, Count - 1>(index - 1, threads);
    }
}
__device__ __forceinline__ void warpgroup_sync(u32 warpgroup) { bar_sync_one_of<1, WARPGROUPS>(warpgroup, 128); }
// Divides 0 .. 2^31 - 1 by a number that the host knows, with a multiplication; a division takes some 25 instructions.
struct Divisor {
    u32 multiplier, shift;     // 2^(31 + shift) / number, rounded up; 2^shift >= number
};

__device__ __forceinline__ u32 divide(u32 n, const Divisor& by) { return __umulhi(2 * n, by.multiplier) >> by.shift; }
// What a launch passes to the kernel, besides tensor maps and pointers: the members that this kernel reads.
struct Problem {
    u32 m;                          // rows of the result
    u32 n;                          // columns of the result
    u32 tiles_m;                    // output tiles along M
    u32 tiles_n;                    // output tiles along N, each of one CTA or cluster
    u32 raster_m;                   // rows of tiles of a raster group
    u32 k_iterations;               // stages that one tile takes
    u32 work_ranges;                // work ranges: one per cluster, or per CTA without clusters
    u32 stream_tiles;               // the first tiles, which are divided among all work ranges
    u32 stream_stages;              // stages of them in every work range ...
    u32 stream_extra;               // ... and the number of ranges that have one more: the first ones
    u32 output_vectors;             // 1: every row of the result is aligned to 16 bytes
    u32 prefetch_stages;            // stages whose weights a dependent launch loads before it waits
    Divisor by_k_iterations;        // divides by k_iterations
    Divisor by_raster_group;        // divides by the tiles of a raster group
    Divisor by_raster_group_rows;   // divides by raster_m
    Divisor by_last_rows;           // divides by the rows of tiles of the last raster group
    u64 output_pitch;               // elements from one row to the next
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

// ---- Between bfloat16 and fp32: two values in a register -------------------------------------------------------------
__device__ __forceinline__ float low_to_float(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ u32 to_pair(float low, float high) {
    u32 d;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
}

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

// column0: the warp's first column; its fragments along N follow at a distance of FRAGMENT_STRIDE_N.
__device__ __forceinline__ void add_bias(Accumulators& acc, const Problem& problem, const u16* bias, u32 column0, u32 lane) {
    if (bias == nullptr) return;
    const u32 g = lane >> 2;
#pragma unroll
    for (u32 c = 0; c < FRAGMENTS_16; ++c) {
        const u32 low = column0 + FRAGMENT_STRIDE_N * c + g, high = low + 8;
        const float bias_low = low < problem.n ? low_to_float(bias[low]) : 0.0f;
        const float bias_high = high < problem.n ? low_to_float(bias[high]) : 0.0f;
#pragma unroll
        for (u32 r = 0; r < FRAGMENTS_8; ++r) {
            acc[c][r][0] += bias_low;
            acc[c][r][1] += bias_low;
            acc[c][r][2] += bias_high;
            acc[c][r][3] += bias_high;
        }
    }
}

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

// A warpgroup stores rows `first` and following of its part of the tile, at most STAGING_ROWS of them, through its staging
// rows: stmatrix.trans turns fragments (columns x rows) into rows, which leave as 16-byte stores. row0, column0: the part's
// first row and column of the result. Before the call all warps have read what they staged before.
__device__ __forceinline__ void store_rows_of_warpgroup(const Accumulators& acc, const Problem& problem, u16* output, u32 smem,
                                                        u32 warpgroup, u32 warp, u32 lane, u32 first, u32 row0, u32 column0) {
    constexpr u32 VECTORS_PER_ROW = 8 * FRAGMENTS_16;   // of eight columns
    constexpr u32 VECTORS_PER_THREAD = (STAGING_ROWS * VECTORS_PER_ROW + 127) / 128;
    const u32 staging = smem + STAGING + warpgroup * STAGING_BYTES, thread = warp * 32 + lane;
    const u32 rows = min(STAGING_ROWS, TILE_M - first);   // the last ones may be fewer
    const u32 vectors = rows * VECTORS_PER_ROW;
#pragma unroll
    for (u32 row = 0; row < rows; row += 16)
#pragma unroll
        for (u32 c = 0; c < FRAGMENTS_16; ++c) {
            const u32 r = (first + row) / 8, column = (8 * c + 2 * warp + (lane >> 3 & 1)) * 16;
            const u32 target = staging + (row + (lane & 7)) * STAGING_PITCH_BYTES + column;
            const u32 low[2] = {to_pair(acc[c][r][0], acc[c][r][1]), to_pair(acc[c][r][2], acc[c][r][3])};
            if (row + 8 < rows) {
                const float(&next)[4] = acc[c][r + 1];
                const u32 both[4] = {low[0], low[1], to_pair(next[0], next[1]), to_pair(next[2], next[3])};
                stmatrix_x4_trans(target + (lane >> 4) * 8 * STAGING_PITCH_BYTES, both);
            } else {
                stmatrix_x2_trans(target, low);
            }
        }
    warpgroup_sync(warpgroup);   // all warps have written the rows
    // The compiler drops the second test where all threads have an i-th vector.
    uint4 values[VECTORS_PER_THREAD];   // all loads before the first store, which waits for one
#pragma unroll
    for (u32 i = 0; i < VECTORS_PER_THREAD; ++i) {
        const u32 vector = 128 * i + thread, row = vector / VECTORS_PER_ROW, column = vector % VECTORS_PER_ROW;
        if (128 * (i + 1) <= vectors || vector < vectors)
            values[i] = load_vector(staging + row * STAGING_PITCH_BYTES + column * 16);
    }
#pragma unroll
    for (u32 i = 0; i < VECTORS_PER_THREAD; ++i) {
        const u32 vector = 128 * i + thread, row = vector / VECTORS_PER_ROW, column = vector % VECTORS_PER_ROW;
        if (128 * (i + 1) <= vectors || vector < vectors)
            store_vector(problem, output, values[i], row0 + first + row, column0 + 8 * column);
    }
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

// ---- int4 times the scale of its group ------------------------------------------------------------------------------
// Of a group of weights, for columns g and g + 8 of a fragment: the scales, twice each, and the zero points.
struct GroupScale {
    u32 low, high;
    ZeroPoint zero;
};

// pair: the scales of columns g (low half) and g + 8 (high half).
__device__ __forceinline__ void set_scales(GroupScale& group, u32 pair) {
    group.low = both_low(pair);
    group.high = both_high(pair);
}

__device__ __forceinline__ void dequantize_group(u32 (&a)[4], u32 q, const GroupScale& group) {
    dequantize(a, q, group.zero);
    if constexpr (HAS_STAGE_SCALES) {
        a[0] = multiply(a[0], group.low);
        a[1] = multiply(a[1], group.high);
        a[2] = multiply(a[2], group.low);
        a[3] = multiply(a[3], group.high);
    }
}

// ---- Main loop: int4 weights from shared memory to operand A's registers, wgmma with activations from shared memory ---------
__device__ __forceinline__ void wgmma_m64n24k16_f32_bf16(float (&d)[3][4], const u32 (&a)[4], u64 b, bool accumulates = true) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %17, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n24k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11"
        "}, {%12, %13, %14, %15}, %16, p, 1, 1, 0;\n"
        "}"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((u32)accumulates)
        : "memory");
}

// The lane's own value, through a shuffle: ptxas would otherwise compute an address anew in each stage.
__device__ __forceinline__ u32 keep_in_register(u32 value, u32 lane = laneid()) { return __shfl_sync(0xffffffffu, value, lane); }

// Where a warp stands among the consumers.
struct WarpPosition {
    u32 warpgroup, slice, warp, lane;   // slice: of each stage's K. warp: of the warpgroup
};

// Where this thread reads in slot 0; the other slots follow at a stage's distance.
struct SlotAddresses {
    u32 activations, weights, scales = 0, zeros = 0;

    __device__ __forceinline__ SlotAddresses(u32 smem, const WarpPosition& at) {
        const u32 k64 = at.slice * K64_PER_SLICE;
        activations = smem + ACTIVATIONS + k64 * TILE_M * ROW_BYTES;
        weights = keep_in_register(smem + WEIGHTS + (at.warpgroup * STACK * K64_PER_STAGE + k64) * K64_BLOCK_BYTES +
                                   at.warp * 512 + at.lane * 16);
        if constexpr (HAS_STAGE_SCALES) {
            // In a row of scales: columns g and g + 8.
            const u32 pair = k64 * 64 / GROUP_SIZE * TILE_N + at.warpgroup * STACK * 64 + 8 * (at.lane >> 2) + 2 * at.warp;
            scales = keep_in_register(smem + SCALES + pair * 2);
            if constexpr (HAS_ZEROS) zeros = keep_in_register(smem + ZEROS + pair);
        }
    }
};

// What a thread holds of the weights: the 64-deep block that is multiplied and, where there are several, the next one.
constexpr u32 PACKED_BLOCKS = K64_PER_SLICE > 1 ? 2 : 1;
struct WeightFragments {
    uint4 packed[PACKED_BLOCKS][STACK];   // one word for each 16-deep step
    GroupScale group[STACK];
};

__device__ __forceinline__ void load_packed(WeightFragments& weights, const SlotAddresses& slots, u32 stage, u32 k64) {
#pragma unroll
    for (u32 s = 0; s < STACK; ++s)
        asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(weights.packed[k64 % PACKED_BLOCKS][s].x), "=r"(weights.packed[k64 % PACKED_BLOCKS][s].y),
                       "=r"(weights.packed[k64 % PACKED_BLOCKS][s].z), "=r"(weights.packed[k64 % PACKED_BLOCKS][s].w)
                     : "r"(slots.weights + stage * WEIGHT_STAGE_BYTES + (s * K64_PER_STAGE + k64) * K64_BLOCK_BYTES)
                     : "memory");
}

// row: of the stage's groups.
__device__ __forceinline__ void load_group(WeightFragments& weights, const Problem& problem, const SlotAddresses& slots,
                                           u32 stage, u32 row) {
    u32 scales[STACK];
#pragma unroll
    for (u32 s = 0; s < STACK; ++s)
        asm volatile("ld.shared.b32 %0, [%1];"
                     : "=r"(scales[s])
                     : "r"(slots.scales + stage * SCALE_STAGE_BYTES + (row * TILE_N + 64 * s) * 2)
                     : "memory");
    u32 zeros[STACK];
#pragma unroll
    for (u32 s = 0; s < STACK; ++s)
        asm volatile("ld.shared.u16 %0, [%1];"
                     : "=r"(zeros[s])
                     : "r"(slots.zeros + stage * ZERO_STAGE_BYTES + row * TILE_N + 64 * s)
                     : "memory");
#pragma unroll
    for (u32 s = 0; s < STACK; ++s) {
        set_scales(weights.group[s], scales[s]);
        weights.group[s].zero = zero_point(zeros[s] & 0xff, zeros[s] >> 8);
    }
}

// step: of the 64-deep block k64.
__device__ __forceinline__ void dequantize_step(u32 (&a)[STACK][4], const WeightFragments& weights, u32 k64, u32 step) {
#pragma unroll
    for (u32 s = 0; s < STACK; ++s)
        dequantize_group(a[s], word(weights.packed[k64 % PACKED_BLOCKS][s], step), weights.group[s]);
}

// This warp has read a slot. The CTA that fills it waits for all of its consumers; in a cluster, where each CTA fills a part
// of every CTA's slot, for those of all CTAs.
__device__ __forceinline__ void release(const Ring& ring, u32 slot, u32 lane) {
    ring.release_used_by_warp(slot, lane);
}

// Multiplies the stages of a work unit. MMAS_PER_COMMIT 16-deep slices of weights are dequantized while up to
// COMMITS_IN_FLIGHT commit groups of wgmmas are outstanding.
//
// A slot is released in the next stage, when no outstanding wgmma reads its activations. Instructions issued before have then
// used its weights (TmaPipeline::release_used()). Returns the last slot, whose products may still be outstanding.
__device__ __forceinline__ u32 mainloop(Accumulators& acc, WeightFragments& weights, const Problem& problem,
                                        const SlotAddresses& slots, Ring& ring, const WorkUnit& unit, u32 lane) {
    u32 previous = ring.stage;
#pragma unroll 1
    for (u32 k = unit.k_begin; k < unit.k_end; ++k) {
        // Through a shuffle, so that ptxas knows that the address is the same in a whole warp. Otherwise each wgmma's
        // descriptor, computed in registers, takes two moves to uniform registers.
        const u32 address = __shfl_sync(0xffffffffu, slots.activations + ring.stage * ACTIVATION_STAGE_BYTES, 0);
        ring.wait();
        const u64 activations = matrix_descriptor(address, 16, SWIZZLE_REPEAT_BYTES, SWIZZLE_128B);
        load_packed(weights, slots, ring.stage, 0);   // each 64-deep block's while the one before it is multiplied
#pragma unroll
        for (u32 i = 0; i < K64_PER_SLICE; ++i) {
            if (i + 1 < K64_PER_SLICE) load_packed(weights, slots, ring.stage, i + 1);
            if constexpr (HAS_STAGE_SCALES) {
                if (i * 64 % GROUP_SIZE == 0) load_group(weights, problem, slots, ring.stage, i * 64 / GROUP_SIZE);
            }
#pragma unroll
            for (u32 first = 0; first < 4; first += MMAS_PER_COMMIT) {
                u32 a[MMAS_PER_COMMIT][STACK][4];
#pragma unroll
                for (u32 j = 0; j < MMAS_PER_COMMIT; ++j) {
                    if constexpr (GROUP_SIZE == 32) {
                        if (first + j == 2) load_group(weights, problem, slots, ring.stage, i * 2 + 1);
                    }
                    dequantize_step(a[j], weights, i, first + j);
                }
                wgmma_fence();
#pragma unroll
                for (u32 j = 0; j < MMAS_PER_COMMIT; ++j)
#pragma unroll
                    for (u32 s = 0; s < STACK; ++s)
                        wgmma_m64n24k16_f32_bf16(
                            acc[s], a[j][s], activations + ((i * TILE_M * ROW_BYTES + (first + j) * 32) >> 4));
                wgmma_commit_group();
                wgmma_wait_group<COMMITS_IN_FLIGHT>();
            }
            if (i == RELEASE_K64 && k > unit.k_begin) release(ring, previous, lane);
        }
        previous = ring.stage;
        ring.advance();
    }
    return previous;
}

// The operands, by the names of the launch parameters. Maps that this kernel does not take are null.
struct Operands {
    const TensorMap *weight_map, *scale_map, *zero_map, *activation_map;
    const u16* bias;
    u16* output;
    Workspace workspace;
};

// ---- Producer: one thread -------------------------------------------------------------------------------------------
// L2 policies. Weights that several rows of tiles read should stay in L2.
struct Policies {
    u64 weights;
};

__device__ __forceinline__ Policies choose_policies(const Problem& problem) {
    const bool has_rows = problem.tiles_m > 1;
    const u64 first = createpolicy_evict_first(), normal = createpolicy_evict_normal();
    return {has_rows ? normal : first};
}

// Announces the bytes of a stage, and loads what no kernel before this one writes: weights, as one box of K64_PER_STAGE x
// N64_PER_TILE blocks, scales and zero points. Blocks outside of the tensor arrive as zeros, and so do their scales.
__device__ __forceinline__ void load_weights(const Ring& ring, u32 slot, const StageCursor& at, const Operands& operands,
                                             u32 smem, u32 rank, const Policies& policies) {
    const u32 full = ring.get_barrier(slot), tile_n = at.tile_n * CLUSTER + rank;
    ring.expect_tx(slot, TRANSACTION_BYTES);
    cp_async_bulk_tensor_3d_load_hint(smem + WEIGHTS + slot * WEIGHT_STAGE_BYTES, operands.weight_map, full, 0,
                                      at.k * K64_PER_STAGE, tile_n * N64_PER_TILE, policies.weights);
    if constexpr (HAS_STAGE_SCALES) {
        const u32 row = at.k * TILE_K / GROUP_SIZE;
        cp_async_bulk_tensor_2d_load(smem + SCALES + slot * SCALE_STAGE_BYTES, operands.scale_map, full, tile_n * TILE_N, row);
        if constexpr (HAS_ZEROS)
            cp_async_bulk_tensor_2d_load(smem + ZEROS + slot * ZERO_STAGE_BYTES, operands.zero_map, full, tile_n * TILE_N,
                                         row);
    }
}

// K64_PER_STAGE boxes of rows x 64 of K in the 128-byte swizzle; what lies outside of the tensor is zero.
__device__ __forceinline__ void load_activations(const Ring& ring, u32 slot, const StageCursor& at, const Operands& operands,
                                                 u32 smem, u32 rank, const Policies& policies) {
    const u32 row = rank * LOADED_M;
    const u32 target = smem + ACTIVATIONS + slot * ACTIVATION_STAGE_BYTES + row * ROW_BYTES;
#pragma unroll
    for (u32 i = 0; i < K64_PER_STAGE; ++i)
        cp_async_bulk_tensor_2d_load(target + i * TILE_M * ROW_BYTES, operands.activation_map, ring.get_barrier(slot),
                                     at.k * TILE_K + i * 64, at.tile_m * TILE_M + row);
}

// The first lap of the ring, for which no slot has to be released. Weights, scales and zero points do not depend on the kernel
// before this one; activations do. A dependent launch therefore loads the weights of the first stages before it waits for that
// kernel. Not those of all stages: the activations of the first one would queue after them.
__device__ __forceinline__ void produce_first_lap(const Ring& ring, StageCursor& cursor, const Problem& problem,
                                                  const Operands& operands, u32 smem, u32 rank, const Policies& policies) {
    const u32 prefetched = min(STAGES, problem.prefetch_stages);
    StageCursor ahead(cursor);
#pragma unroll 1
    for (u32 slot = 0; slot < prefetched && ahead.next(problem); ++slot)
        load_weights(ring, slot, ahead, operands, smem, rank, policies);
    griddepcontrol_launch_dependents();   // the next kernel may start and load its weights
    griddepcontrol_wait();
#pragma unroll 1
    for (u32 slot = 0; slot < STAGES && cursor.next(problem); ++slot) {
        if (slot >= prefetched) load_weights(ring, slot, cursor, operands, smem, rank, policies);
        load_activations(ring, slot, cursor, operands, smem, rank, policies);
    }
}

__device__ __forceinline__ void produce(Ring& ring, StageCursor& cursor, const Problem& problem, const Operands& operands,
                                        u32 smem, u32 rank, const Policies& policies) {
    ring.next_lap();
#pragma unroll 1
    for (; cursor.next(problem); ring.advance()) {
        ring.acquire();
        load_weights(ring, ring.stage, cursor, operands, smem, rank, policies);
        load_activations(ring, ring.stage, cursor, operands, smem, rank, policies);
    }
}

// ---- Consumers: WARPGROUPS x SLICE_K warpgroups ---------------------------------------------------------------------
// Scales and stores the complete sums of a tile. row0: its first row. column0: the warpgroup's first column. rank_k: of this
// CTA among those that divide the tile's K; each stores the rows that it added up.
__device__ __forceinline__ void epilogue(Accumulators& acc, const Problem& problem, const Operands& operands, u32 smem,
                                         const WarpPosition& warp, u32 row0, u32 column0, u32 rank_k) {
    add_bias(acc, problem, operands.bias, column0 + 16 * warp.warp, warp.lane);
#pragma unroll
    for (u32 first = 0; first < TILE_M; first += STAGING_ROWS) {
        if constexpr (CLUSTER_K > 1) {   // one tile, and one store for each CTA: the staging rows are free
            if (first / STAGING_ROWS != rank_k) continue;
        } else {
            warpgroup_sync(warp.warpgroup);   // all warps have read the rows before, of this tile or of the one before it
        }
        store_rows_of_warpgroup(acc, problem, operands.output, smem, warp.warpgroup, warp.warp, warp.lane, first, row0, column0);
    }
}

// range: the CTA's work range. rank: of the CTA in its cluster, along N.
__device__ __forceinline__ void consume(Ring& ring, const Problem& problem, const Operands& operands, u32 smem, u32 range,
                                        u32 rank, const WarpPosition& warp) {
    const SlotAddresses slots(smem, warp);
    const u32 warp_tile = warp.warpgroup * 4 + warp.warp, rank_k = range % CLUSTER_K;
    WorkQueue queue(problem, range);
    WorkUnit unit;
    Accumulators acc;
    WeightFragments weights;
    griddepcontrol_wait();   // the kernel before this one may still use the workspace and the result
    while (queue.next(problem, unit)) {
        u32 tile_m, tile_n;
        tile_position(problem, unit.tile, tile_m, tile_n);
        const u32 column0 = (tile_n * CLUSTER + rank) * TILE_N + warp.warpgroup * STACK * 64;
        clear(acc);
        const u32 slot = mainloop(acc, weights, problem, slots, ring, unit, warp.lane);
        wgmma_wait_group<0>();
        release(ring, slot, warp.lane);
        if (unit.k_begin > 0) {
            store_partials(acc, operands.workspace, range * CLUSTER + rank, warp_tile, warp.lane);
            continue;
        }
        if (unit.k_end < problem.k_iterations)
            fix_up<CLUSTER>(acc, problem, operands.workspace, range, problem.k_iterations - unit.k_end, warp_tile, warp.lane,
                            rank);
        epilogue(acc, problem, operands, smem, warp, tile_m * TILE_M, column0, rank_k);
    }
}
}  // namespace cudatma

// Y = X W as Y^T = W^T X^T: columns of N are the rows of the wgmma. One thread of the last warps produces: it fills the
// slots of the ring with TMA. The warpgroups before it consume: they dequantize weights into operand A's registers, multiply,
// and store. Producer and consumers walk through the same work units.
extern "C" __global__ void __launch_bounds__(288, 1)
marlin_wgmma_bf16_g32_zeros_24x256x128_w2_s4_g41(
    const __grid_constant__ cudatma::TensorMap weight_map,
    const __grid_constant__ cudatma::TensorMap scale_map,
    const __grid_constant__ cudatma::TensorMap zero_map,
    const __grid_constant__ cudatma::TensorMap activation_map,
    const cudatma::u16* bias,
    cudatma::u16* output,
    float4* partials,
    cudatma::u32* flags,
    const __grid_constant__ cudatma::Problem problem) {
    using namespace cudatma;
    extern __shared__ __align__(1024) u8 dynamic_shared[];
    const u32 smem = shared_address(dynamic_shared);
    // Through a shuffle, so that ptxas knows that it is the same in a whole warp.
    const u32 warp_index = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
    const Operands operands{&weight_map, &scale_map, &zero_map, &activation_map, bias, output, {partials, flags}};
    const u32 range = problem.work_ranges - 1 - blockIdx.x / CLUSTER;
    const u32 rank = 0;
    Ring ring;
    ring.attach(smem + RING_BARRIERS);

    // One thread initializes the barriers and issues every copy. elect_sync() rather than the first lane: ptxas then knows
    // that one thread goes on, and puts no loop around each copy.
    const bool is_producer_warp = warp_index == CONSUMER_WARPS;
    const Policies policies = choose_policies(problem);
    StageCursor cursor(problem, range);
    if (is_producer_warp && elect_sync()) {
        prefetch_tensormap(&weight_map);
        prefetch_tensormap(&activation_map);
        prefetch_tensormap(&scale_map);
        ring.init_barriers(1, EMPTY_ARRIVALS);
        // The copies need no other warp, but in a cluster the barriers of the other CTAs.
        if constexpr (CLUSTER == 1) produce_first_lap(ring, cursor, problem, operands, smem, rank, policies);
    }
    __syncwarp();
    __syncthreads();          // the barriers are initialized
    if (warp_index >= CONSUMER_WARPS) {
        if (is_producer_warp && elect_sync()) {
            if constexpr (CLUSTER > 1) produce_first_lap(ring, cursor, problem, operands, smem, rank, policies);
            produce(ring, cursor, problem, operands, smem, rank, policies);
        }
        __syncwarp();
    } else {
        const u32 slice = SLICE_K > 1 ? warp_index / 4 / WARPGROUPS : 0;
        consume(ring, problem, operands, smem, range, rank,
                WarpPosition{warp_index / 4 - slice * WARPGROUPS, slice, warp_index % 4, laneid()});
    }
}
