// cudatma: kernels/marlin_mma_sync.cu.j2 for sm_90a
// config: MarlinConfig
//   version = 'mma_sync'
//   dtype = 'float16'
//   group_size = 128
//   has_zeros = True
//   tile_m = 8
//   tile_n = 128
//   tile_k = 256
//   stages = 4
//   slice_k = 2
//   warps_n = 4
//   scale_on = 'accumulator'
// 8 consumer warps and 1 producer warp; 91712 bytes of shared memory per CTA.
// Arrays of a stage:
//     4096 bytes: activations 8 x 256 float16, 128B swizzle
//    16384 bytes: weights 128 x 256 int4, packed layout 1
//      512 bytes: scales 2 x 128 float16
//      256 bytes: zero points 2 x 128 uint8

// primitives.cu contains
// u8, u16, u32, u64, TensorMap, shared_address, laneid, elect_sync, bar_sync, griddepcontrol_wait,
// griddepcontrol_launch_dependents, mbarrier_init, mbarrier_arrive, mbarrier_arrive_expect_tx,
// mbarrier_try_wait_parity, mbarrier_wait_parity, fence_mbarrier_init, cp_async_bulk_tensor_2d_load,
// cp_async_bulk_tensor_2d_load_hint, createpolicy_evict_first, createpolicy_evict_normal, ld_shared_u16,
// ld_shared_b32, ld_shared_v2_b32, ld_shared_v4_b32, ld_shared_v4_f32, st_shared_v4_f32, ldmatrix_x2, ldmatrix_x4,
// stmatrix_x2_trans, mma_m16n8k16_f16, lop3_and_or, TmaPipeline, Divisor, divide, low_to_float, high_to_float,
// to_pair, subtract, multiply_add, word, add_fragment, packed_column

namespace cudatma {

// ---- Tile -----------------------------------------------------------------------------------------------------------
constexpr u32 TILE_M = 8;   // rows of M per CTA, which are columns of the MMAs
constexpr u32 TILE_N = 128;   // columns of N per CTA, which become the rows (M) of the MMAs
constexpr u32 TILE_K = 256;   // elements of K per stage
constexpr u32 WARPS_N = 4, WARP_N = 32;   // warps along N, each with all rows of M; columns per warp
constexpr u32 SLICE_K = 2;   // warps with the same columns of N, which split each stage's K
constexpr u32 STAGES = 4;
constexpr u32 CONSUMER_WARPS = 8;
constexpr u32 GROUP_SIZE = 128;   // elements of K that share a scale
constexpr u32 WARP_TILES = WARPS_N;   // warps that divide a CTA's tile
constexpr u32 FRAGMENTS_16 = WARP_N / 16, FRAGMENT_STRIDE_N = 16;   // fragments of 16 columns of N per warp; columns from one fragment to the next
constexpr u32 FRAGMENTS_8 = TILE_M / 8;   // fragments of 8 rows of M
constexpr u32 FIX_UP_UNROLL = 8;   // partial tiles whose loads are in flight at the same time
constexpr u32 K64_PER_STAGE = TILE_K / 64, K64_PER_WARP = K64_PER_STAGE / SLICE_K, N64_PER_TILE = TILE_N / 64;   // 64 x 64 blocks of weights
constexpr u32 K64_BLOCK_BYTES = 2048;   // bytes per packed 64 x 64 block of weights
constexpr u32 ROW_BYTES = 128;   // bytes per row of an activation box (64 elements of K)

// ---- Shared memory: byte offsets from a base that is 1024-byte aligned, with sizes in the comments -------------------
constexpr u32 ACTIVATIONS = 0;                // 16384 bytes
constexpr u32 WEIGHTS = 16384;                // 65536 bytes
constexpr u32 SCALES = 81920;                 // 2048 bytes
constexpr u32 ZEROS = 83968;                  // 1024 bytes
constexpr u32 STAGING = 84992;                // 2560 bytes
constexpr u32 SLICE_SUMS = 87552;             // 4096 bytes
constexpr u32 FULL_BARRIERS = 91648;          // 32 bytes

// ---- Slots: one per stage and operand -------------------------------------------------------------------------------
constexpr u32 ACTIVATION_STAGE_BYTES = 4096;
constexpr u32 WEIGHT_STAGE_BYTES = 16384;
constexpr u32 SCALE_STAGE_BYTES = 512;
constexpr u32 ZERO_SLOT_BYTES = 256;
constexpr u32 TRANSACTION_BYTES = 21248;   // bytes that TMA loads per stage
constexpr u32 FULL_ARRIVALS = 1;   // arrivals that fill a slot
constexpr u32 STAGING_PITCH_BYTES = 80;   // bytes from one staging row to the next
constexpr u32 STAGING_BYTES = 640;   // bytes of a warp's eight staging rows
constexpr u32 SLICE_THREADS = 32;   // threads that hold one part of the tile for one slice
using Ring = TmaPipeline<STAGES>;

// The named barriers of this kernel. __syncthreads() uses barrier 0.
enum NamedBarrier : u32 {
    SLICE_BARRIER = 1,   // the first of several barriers, one per part of the tile
};

// Wait until all warps with the same columns of N have arrived.
__device__ __forceinline__ void slice_sync(u32 warp_tile) { bar_sync(SLICE_BARRIER + warp_tile, SLICE_K * SLICE_THREADS); }

// The launch parameters that are neither tensor maps nor pointers.
struct Problem {
    u32 m;                          // number of rows of the result
    u32 n;                          // number of columns of the result
    u32 tiles_m;                    // number of output tiles along M
    u32 tiles_n;                    // number of output tiles along N (a CTA or a cluster computes one tile)
    u32 raster_m;                   // number of rows of tiles per raster group
    u32 k_iterations;               // number of stages per tile
    u32 work_ranges;                // number of work ranges, one per cluster or, without clusters, per CTA
    u32 stream_tiles;               // number of leading tiles that are split among all work ranges
    u32 stream_stages;              // number of stages per work range in the split tiles
    u32 stream_extra;               // number of leading work ranges that have one additional stage
    u32 output_vectors;             // 1 if every row of the result is aligned to 16 bytes
    u32 weight_row_blocks;          // number of blocks of weights along K
    u32 prefetch_stages;            // number of stages of weights that a dependent launch loads before it waits
    Divisor by_k_iterations;        // divides by k_iterations
    Divisor by_raster_group;        // divides by the number of tiles per raster group
    Divisor by_raster_group_rows;   // divides by raster_m
    Divisor by_last_rows;           // divides by the number of rows of tiles in the last raster group
    u64 output_pitch;               // stride between rows of the result, in elements
};

// Stages k_begin to k_end - 1 of an output tile.
struct WorkUnit {
    u32 tile, k_begin, k_end;
};

// ---- Schedule: stream-K, then whole tiles ---------------------------------------------------------------------------
// The stages of the first `stream_tiles` tiles form one sequence, which is divided into equal, contiguous work ranges. There is one range
// per CTA or, in a launch with clusters, one per cluster. The remaining tiles are dealt to the ranges in turn. If a range begins inside a
// tile, its first work unit computes partial sums and stores them for the tile's owner, the range with the tile's first stage. Ranges are
// numbered in reverse, so an owner waits only for CTAs with a lower blockIdx. These CTAs were dispatched earlier, so an owner never waits
// for a CTA that has not started.

// Return the first stage of a range in the sequence.
__device__ __forceinline__ u32 range_begin(const Problem& problem, u32 range) {
    return range * problem.stream_stages + min(range, problem.stream_extra);
}

struct WorkQueue {
    u32 stage, stage_end;   // the stages of the sequence that this range has not processed yet
    u32 tile, tiles;        // the next whole tile

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

// Set the position of a tile. Tiles are numbered in groups of raster_m rows of tiles, and column by column within a group. CTAs that run at
// the same time therefore share operands in L2.
__device__ __forceinline__ void tile_position(const Problem& problem, u32 tile, u32& tile_m, u32& tile_n) {
    const u32 raster_group = divide(tile, problem.by_raster_group), first_row = raster_group * problem.raster_m;
    const u32 inside = tile - first_row * problem.tiles_n, rows_left = problem.tiles_m - first_row;
    const bool is_last = rows_left <= problem.raster_m;
    tile_n = divide(inside, is_last ? problem.by_last_rows : problem.by_raster_group_rows);
    tile_m = first_row + inside - tile_n * (is_last ? rows_left : problem.raster_m);
}

// An iterator over the stages of a queue's work units in the order in which the producer loads them.
struct StageCursor {
    WorkQueue queue;
    WorkUnit unit;
    u32 k, tile_m, tile_n;

    __device__ __forceinline__ StageCursor(const Problem& problem, u32 range)
        : queue(problem, range), unit{0, 0, 0}, k(0), tile_m(0), tile_n(0) {}

    // Advance to the next stage. Return false if there are no more stages.
    __device__ __forceinline__ bool next(const Problem& problem) {
        if (++k < unit.k_end) return true;
        if (!queue.next(problem, unit)) return false;
        k = unit.k_begin;
        tile_position(problem, unit.tile, tile_m, tile_n);
        return true;
    }
};

// ---- Packed weights: the codes that a thread multiplies -------------------------------------------------------------
// A thread's codes in a block of 64 elements of K and 16 columns, one word of 8 codes per step of 16 elements of K.
using PackedCodes = uint4;
using StepCodes = u32;

__device__ __forceinline__ PackedCodes load_codes(u32 address, u32) { return ld_shared_v4_b32(address); }

__device__ __forceinline__ StepCodes step_codes(const PackedCodes& packed, u32 step) { return word(packed, step); }

// ---- int4 -> float16: one LOP3 inserts two nibbles into the mantissas of a constant -----------------------
// `low` is 1024 plus the zero point of column g, and dequantize() subtracts it. `high` is -(64 + zero point) of column g + 8, and
// dequantize() adds it after a division by 16. Each value is in both halves.
struct ZeroPoint {
    u32 low, high;
};

// Return the ZeroPoint of the zero points of columns g and g + 8.
__device__ __forceinline__ ZeroPoint zero_point(u32 low, u32 high) {
    return ZeroPoint{0x64006400u | low | low << 16, 0xd400d400u | high << 4 | high << 20};
}

// Dequantize the 8 nibbles of a word. 0x6400 is 1024.0 in fp16. Its last mantissa bit has the weight 1.0, so the bits 0x6400 | v represent exactly 1024 + v,
// and 0x6400 | v << 4 is exactly 1024 + 16 v, which is 16 (64 + v). The nibbles of column g + 8 therefore need no shift.
__device__ __forceinline__ void dequantize(u32 (&a)[4], StepCodes q, const ZeroPoint& zero) {
    const u32 upper = q >> 8;
    a[0] = subtract(lop3_and_or(q, 0x000f000fu, 0x64006400u), zero.low);
    a[1] = multiply_add(lop3_and_or(q, 0x00f000f0u, 0x64006400u), 0x2c002c00u, zero.high);
    a[2] = subtract(lop3_and_or(upper, 0x000f000fu, 0x64006400u), zero.low);
    a[3] = multiply_add(lop3_and_or(upper, 0x00f000f0u, 0x64006400u), 0x2c002c00u, zero.high);
}

// ---- Accumulators and partial sums ----------------------------------------------------------------------------------

// The accumulators of a warp are fragments of 16 x 8 values. Each lane holds four values of each fragment.
typedef float Accumulators[FRAGMENTS_16][FRAGMENTS_8][4];

// ---- Slice-K within a CTA -------------------------------------------------------------------------------------------
// Add up the sums of SLICE_K groups of SLICE_THREADS threads. All groups hold sums of the same part of the tile, each over one slice of
// every stage's K. Groups 1 to SLICE_K - 1 store their sums to shared memory, and group 0 adds them to its own sums in the order of the
// slices. Return whether this thread is in group 0. `part` is the index of the part in the tile, and `thread` is the index of the thread in
// its group.
__device__ __forceinline__ bool reduce_slices(Accumulators& acc, u32 smem, u32 part, u32 slice, u32 thread) {
    constexpr u32 FRAGMENT_BYTES = SLICE_THREADS * 16, SUM_BYTES = FRAGMENTS_16 * FRAGMENTS_8 * FRAGMENT_BYTES;
    const u32 sums = smem + SLICE_SUMS + part * (SLICE_K - 1) * SUM_BYTES + thread * 16;
    if (slice > 0) {
#pragma unroll
        for (u32 c = 0; c < FRAGMENTS_16; ++c)
#pragma unroll
            for (u32 r = 0; r < FRAGMENTS_8; ++r)
                st_shared_v4_f32(sums + (slice - 1) * SUM_BYTES + (c * FRAGMENTS_8 + r) * FRAGMENT_BYTES, acc[c][r]);
    }
    slice_sync(part);   // the other groups must have stored their sums before group 0 reads them
    if (slice == 0) {
#pragma unroll
        for (u32 other = 0; other < SLICE_K - 1; ++other)
#pragma unroll
            for (u32 c = 0; c < FRAGMENTS_16; ++c)
#pragma unroll
                for (u32 r = 0; r < FRAGMENTS_8; ++r)
                    add_fragment(acc[c][r], sums + other * SUM_BYTES + (c * FRAGMENTS_8 + r) * FRAGMENT_BYTES);
    }
    slice_sync(part);   // group 0 must have read the sums before the next work unit overwrites them
    return slice == 0;
}

// ---- Stream-K across CTAs -------------------------------------------------------------------------------------------
struct Workspace {
    float4* partials;   // the sums of one partial tile per CTA in whole fragments
    u32* flags;         // WARP_TILES flags per CTA
};

// Return the address of this lane's part of a warp's partial sums.
__device__ __forceinline__ float4* partial_sums(const Workspace& workspace, u32 cta, u32 warp_tile, u32 lane) {
    constexpr u32 WARP_FRAGMENTS = FRAGMENTS_16 * FRAGMENTS_8 * 32;
    return workspace.partials + (u64)(cta * WARP_TILES + warp_tile) * WARP_FRAGMENTS + lane;
}

// Store a warp's partial sums, and set its flag.
__device__ __forceinline__ void store_partials(const Accumulators& acc, const Workspace& workspace, u32 cta, u32 warp_tile,
                                               u32 lane) {
    float4* sums = partial_sums(workspace, cta, warp_tile, lane);
#pragma unroll
    for (u32 c = 0; c < FRAGMENTS_16; ++c)
#pragma unroll
        for (u32 r = 0; r < FRAGMENTS_8; ++r)
            sums[(c * FRAGMENTS_8 + r) * 32] = make_float4(acc[c][r][0], acc[c][r][1], acc[c][r][2], acc[c][r][3]);
    __syncwarp();
    if (lane == 0)   // the release covers the stores of all lanes, because __syncwarp() orders these stores before the release
        asm volatile("st.release.gpu.global.u32 [%0], 1;" :: "l"(workspace.flags + cta * WARP_TILES + warp_tile) : "memory");
}

// Add the partial sums of the following ranges, which cover `stages_missing` stages, to the sums of the tile's owner. The sums are added in
// the order of the ranges, so that the result is bitwise reproducible. The function also clears the flags for the next launch.
__device__ __forceinline__ void fix_up(Accumulators& acc, const Problem& problem, const Workspace& workspace, u32 range,
                                       u32 stages_missing, u32 warp_tile, u32 lane) {
    u32 last = range;   // the last range with stages of this tile
    while (stages_missing > 0) {
        ++last;
        stages_missing -= min(stages_missing, range_begin(problem, last + 1) - range_begin(problem, last));
    }
    for (u32 other = range + 1 + lane; other <= last; other += 32) {   // each lane waits for one range
        u32* flag = workspace.flags + (other) * WARP_TILES + warp_tile;
        u32 is_stored = 0;
        do {
            asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(is_stored) : "l"(flag) : "memory");
        } while (is_stored == 0);
        *flag = 0;   // no CTA sets this flag again in this launch
    }
    __syncwarp();
#pragma unroll FIX_UP_UNROLL
    for (u32 other = range + 1; other <= last; ++other) {
        const float4* sums = partial_sums(workspace, other, warp_tile, lane);
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

__device__ __forceinline__ void clear(Accumulators& acc) {
#pragma unroll
    for (u32 c = 0; c < FRAGMENTS_16; ++c)
#pragma unroll
        for (u32 r = 0; r < FRAGMENTS_8; ++r)
#pragma unroll
            for (u32 i = 0; i < 4; ++i) acc[c][r][i] = 0.0f;
}

// ---- Epilogue -------------------------------------------------------------------------------------------------------
// Add the bias. `column0` is the warp's first column. The warp's fragments along N are FRAGMENT_STRIDE_N columns apart.
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

// Store 16 bytes of a row of the result. Elements outside the result are not stored.
template <typename Element>
__device__ __forceinline__ void store_vector(const Problem& problem, Element* output, uint4 values, u32 row, u32 column) {
    constexpr u32 COLUMNS = 16 / sizeof(Element);
    if (row >= problem.m || column >= problem.n) return;
    Element* target = output + row * problem.output_pitch + column;
    if (problem.output_vectors && column + COLUMNS <= problem.n) {
        *(uint4*)target = values;
    } else {   // an unaligned row, or the last columns
        const u32 words[4] = {values.x, values.y, values.z, values.w};
#pragma unroll
        for (u32 i = 0; i < COLUMNS; ++i) {
            if (column + i >= problem.n) continue;
            if constexpr (COLUMNS == 4) target[i] = __uint_as_float(words[i]);
            else target[i] = (Element)(words[i / 2] >> (i % 2 * 16));
        }
    }
}

// Store a warp's part of the tile through the warp's staging rows, eight rows at a time.
__device__ __forceinline__ void store_rows_of_warp(const Accumulators& acc, const Problem& problem, u16* output, u32 smem,
                                                   u32 warp_tile, u32 lane, u32 row0, u32 column0) {
    constexpr u32 VECTORS_PER_ROW = 2 * FRAGMENTS_16;   // vectors of 8 columns
    const u32 staging = smem + STAGING + warp_tile * STAGING_BYTES;
#pragma unroll
    for (u32 r = 0; r < FRAGMENTS_8; ++r) {
        __syncwarp();   // all lanes must have read the previous eight rows before staging overwrites them
#pragma unroll
        for (u32 c = 0; c < FRAGMENTS_16; ++c) {
            const u32 fragments[2] = {to_pair(acc[c][r][0], acc[c][r][1]), to_pair(acc[c][r][2], acc[c][r][3])};
            stmatrix_x2_trans(staging + (lane & 7) * STAGING_PITCH_BYTES + (2 * c + (lane >> 3 & 1)) * 16, fragments);
        }
        __syncwarp();
#pragma unroll
        for (u32 vector = lane; vector < 8 * VECTORS_PER_ROW; vector += 32) {
            const u32 row = vector / VECTORS_PER_ROW, column = vector % VECTORS_PER_ROW;
            store_vector(problem, output, ld_shared_v4_b32(staging + row * STAGING_PITCH_BYTES + column * 16),
                         row0 + 8 * r + row, column0 + 8 * column);
        }
    }
}

// ---- Loads ----------------------------------------------------------------------------------------------------------
// Load weights as N64_PER_TILE boxes of K64_PER_STAGE contiguous blocks of 2 KB. TMA fills blocks after the last row of blocks with zeros.
// Blocks beyond a row's K belong to the next columns. Their products are zero, because TMA or cp.async sets the activations beyond K
// to zero.
__device__ __forceinline__ void load_weights(u32 smem, u32 full, const TensorMap* map, const Problem& problem, u32 tile_n,
                                             u32 k, u64 policy) {
#pragma unroll
    for (u32 i = 0; i < N64_PER_TILE; ++i) {
        const u32 row = (tile_n * N64_PER_TILE + i) * problem.weight_row_blocks + k * 4;
        cp_async_bulk_tensor_2d_load_hint(smem + i * K64_PER_STAGE * K64_BLOCK_BYTES, map, full, 0, row, policy);
    }
}

// Load the scales or the zero points of a stage.
__device__ __forceinline__ void load_table(u32 smem, u32 full, const TensorMap* map, u32 tile_n, u32 k) {
    cp_async_bulk_tensor_2d_load(smem, map, full, tile_n * TILE_N, k * TILE_K / GROUP_SIZE);
}

// Load activations as K64_PER_STAGE boxes of TILE_M rows and 64 elements of K with the 128-byte swizzle. TMA fills elements outside the
// tensor with zeros.
__device__ __forceinline__ void load_activations(u32 smem, u32 full, const TensorMap* map, u32 tile_m, u32 k) {
#pragma unroll
    for (u32 i = 0; i < K64_PER_STAGE; ++i)
        cp_async_bulk_tensor_2d_load(smem + i * TILE_M * ROW_BYTES, map, full, k * TILE_K + i * 64, tile_m * TILE_M);
}

// ---- Main loop: mma.sync multiplies dequantized weights and activations in registers --------------------------------
// The position of a warp among the consumers.
struct WarpPosition {
    u32 lane;
    u32 slice;     // the warp's slice of each stage's K
    u32 tile;      // the number of the warp's part of the CTA's tile
    u32 column0;   // the part's first column

    __device__ __forceinline__ WarpPosition(u32 warp, u32 lane)
        : lane(lane), slice(warp / WARPS_N), tile(warp % WARPS_N), column0(tile * WARP_N) {}
};

// Return `value` through a shuffle, so that ptxas keeps the value in a register instead of recomputing an address in each stage.
__device__ __forceinline__ u32 keep_in_register(u32 value, u32 lane = laneid()) { return __shfl_sync(0xffffffffu, value, lane); }

// The addresses from which this thread reads slot 0. The addresses in slot i are larger by i times the size of a stage.
struct SlotAddresses {
    u32 activations, weights, scales, zeros;

    __device__ __forceinline__ SlotAddresses(u32 smem, const WarpPosition& warp) {
        const u32 k64 = warp.slice * K64_PER_WARP, lane = warp.lane;
        // The row and the chunk whose address this lane passes to ldmatrix. ldmatrix loads 16 rows, or 8 if TILE_M is 8.
        const u32 row = (TILE_M == 8 ? 0 : (lane >> 4) * 8) + (lane & 7), chunk = lane >> 3 & 1;
        // The 128-byte swizzle moves 16-byte chunk c of row r to c ^ (r & 7).
        activations = keep_in_register(smem + ACTIVATIONS + (k64 * TILE_M + row) * ROW_BYTES + ((chunk ^ (lane & 7)) << 4),
                                       threadIdx.x % 32);
        weights = keep_in_register(smem + WEIGHTS + (warp.column0 / 64 * K64_PER_STAGE + k64) * K64_BLOCK_BYTES +
                                   warp.column0 % 64 * 32 + lane * 16, threadIdx.x % 32);
        const u32 at = k64 * 64 / GROUP_SIZE * TILE_N + packed_column(warp.column0, lane);
        scales = keep_in_register(smem + SCALES + at * 2, threadIdx.x % 32);
        zeros = keep_in_register(smem + ZEROS + at, threadIdx.x % 32);
    }
};

// A thread's weights for a block of 64 elements of K.
struct WeightFragments {
    PackedCodes packed[FRAGMENTS_16];
    u32 scale_pairs[FRAGMENTS_16];   // scales of columns g (low) and g + 8 (high)
    ZeroPoint zeros[FRAGMENTS_16];
};

// Operand B of a step of 16 elements of K, which consists of the activations of all rows of the tile.
typedef u32 ActivationFragments[FRAGMENTS_8][2];

// Load the activations of a step. With the swizzle, the addresses of a step's chunks differ from the addresses in step 0 only in bits 5 and
// 6.
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

// Load a thread's scales of a group. The pair of each fragment contains the scales of columns g (low half) and g + 8 (high half).
template <u32 Fragments>
__device__ __forceinline__ void load_scale_pairs(u32 (&pairs)[Fragments], u32 smem) {
    if constexpr (Fragments == 4) {
        const uint4 four = ld_shared_v4_b32(smem);
        pairs[0] = four.x, pairs[1] = four.y, pairs[2] = four.z, pairs[3] = four.w;
    } else if constexpr (Fragments == 2) {
        const uint2 two = ld_shared_v2_b32(smem);
        pairs[0] = two.x, pairs[1] = two.y;
    } else {
        pairs[0] = ld_shared_b32(smem);
    }
}

// Load a thread's zero points of a group.
__device__ __forceinline__ void load_zero_points(ZeroPoint (&zeros)[FRAGMENTS_16], u32 smem) {
#pragma unroll
    for (u32 c = 0; c < FRAGMENTS_16; ++c) {
        const u32 pair = ld_shared_u16(smem + 2 * c);
        zeros[c] = zero_point(pair & 0xff, pair >> 8);
    }
}

// Load a thread's scales and zero points. `k` is the first element of a group or of a block of 64
// in this warp's slice of the stage.
__device__ __forceinline__ void load_group(WeightFragments& weights, const SlotAddresses& slots, u32 stage, u32 k) {
    const u32 row = k / GROUP_SIZE * TILE_N;
    load_scale_pairs(weights.scale_pairs, slots.scales + stage * SCALE_STAGE_BYTES + row * 2);
    load_zero_points(weights.zeros, slots.zeros + stage * ZERO_SLOT_BYTES + row);
}

// Load a thread's weights of block k64 (64 elements of K) of this warp's slice.
__device__ __forceinline__ void load_weight_fragments(WeightFragments& weights, const SlotAddresses& slots, u32 stage, u32 k64) {
    const u32 base = slots.weights + stage * WEIGHT_STAGE_BYTES + k64 * K64_BLOCK_BYTES;
#pragma unroll
    for (u32 c = 0; c < FRAGMENTS_16; ++c)
        weights.packed[c] = load_codes(base + c * 512, K64_BLOCK_BYTES / 2);
    load_group(weights, slots, stage, k64 * 64);
}

// Multiply a step of 16 elements of K. `address` is the address that this thread passes to ldmatrix in step 0.
__device__ __forceinline__ void multiply_step(Accumulators& acc, const WeightFragments& weights, u32 address, u32 step) {
    ActivationFragments b;
    load_activation_fragments(b, address, step);
#pragma unroll
    for (u32 c = 0; c < FRAGMENTS_16; ++c) {
        u32 a[4];
        dequantize(a, step_codes(weights.packed[c], step), weights.zeros[c]);
#pragma unroll
        for (u32 r = 0; r < FRAGMENTS_8; ++r) mma_m16n8k16_f16(acc[c][r], a, b[r][0], b[r][1]);
    }
}

// Multiply the sums by the scales of their columns, add the products to the accumulators, and clear the sums. `pairs` contains the scales
// of columns g (low half) and g + 8 (high half) of each fragment.
__device__ __forceinline__ void scale_sums(Accumulators& acc, Accumulators& sums, const u32 (&pairs)[FRAGMENTS_16]) {
#pragma unroll
    for (u32 c = 0; c < FRAGMENTS_16; ++c) {
        const float low = low_to_float(pairs[c]), high = high_to_float(pairs[c]);
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

// Multiply the stages of a work unit. The warp releases a slot during the next stage, after it has used all values of the slot. Otherwise
// ptxas could issue the arrival while an ld.shared is in flight.
__device__ __forceinline__ void mainloop(Accumulators& acc, WeightFragments& weights, const SlotAddresses& slots, Ring& ring,
                                         const WorkUnit& unit, u32 lane) {
    Accumulators sums;   // unscaled sums of the current group
    clear(sums);
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
                if constexpr (GROUP_SIZE < 64) {
                    if (step > 0 && 16 * step % GROUP_SIZE == 0) load_group(weights, slots, ring.stage, i * 64 + 16 * step);
                }
                multiply_step(sums, weights, address, step);
                const u32 done = i * 64 + step * 16 + 16;   // elements of K that this warp has multiplied in the stage
                if (done % GROUP_SIZE == 0 || done == K64_PER_WARP * 64) scale_sums(acc, sums, weights.scale_pairs);
            }
        }
        previous = ring.stage;
        ring.advance();
    }
    ring.release_used_by_warp(previous, lane);
}

// The operands. The members are named after the launch parameters.
struct Operands {
    const TensorMap* weight_map;
    const TensorMap* scale_map;
    const TensorMap* zero_map;
    const TensorMap* activation_map;
    const u16* bias;
    u16* output;
    Workspace workspace;
};

// Return the L2 policy for the weights, which keeps them in L2 if several rows of tiles read them.
__device__ __forceinline__ u64 choose_weight_policy(const Problem& problem) {
    const u64 first = createpolicy_evict_first(), normal = createpolicy_evict_normal();
    return problem.tiles_m > 1 ? normal : first;
}

// ---- Producer: one thread -------------------------------------------------------------------------------------------
// Make the slot's barrier expect the bytes of a stage, and load the operands that do not depend on previous kernels.
__device__ __forceinline__ void load_constants(const Ring& ring, u32 slot, const StageCursor& at, const Problem& problem,
                                               const Operands& operands, u32 smem, u64 policy) {
    const u32 full = ring.get_barrier(slot);
    ring.expect_tx(slot, TRANSACTION_BYTES);
    load_weights(smem + WEIGHTS + slot * WEIGHT_STAGE_BYTES, full, operands.weight_map, problem, at.tile_n, at.k, policy);
    load_table(smem + SCALES + slot * SCALE_STAGE_BYTES, full, operands.scale_map, at.tile_n, at.k);
    load_table(smem + ZEROS + slot * ZERO_SLOT_BYTES, full, operands.zero_map, at.tile_n, at.k);
}

// Fill the slots. Activations depend on the previous kernel, but weights, scales and zero points do not. A dependent launch therefore loads
// the weights of the first stages before it waits for the previous kernel. It does not load the weights of all stages, because the
// activations of the first stage would then arrive only after all of these weights.
__device__ __forceinline__ void produce(Ring& ring, const Problem& problem, const Operands& operands, u32 smem, u32 range) {
    const u64 policy = choose_weight_policy(problem);
    const u32 prefetched = min(STAGES, problem.prefetch_stages);
    StageCursor cursor(problem, range), ahead(cursor);
#pragma unroll 1
    for (u32 slot = 0; slot < prefetched && ahead.next(problem); ++slot)
        load_constants(ring, slot, ahead, problem, operands, smem, policy);
    griddepcontrol_wait();
#pragma unroll 1
    for (u32 i = 0; cursor.next(problem); ++i) {
        ring.acquire();
        if (i >= prefetched) load_constants(ring, ring.stage, cursor, problem, operands, smem, policy);
        load_activations(smem + ACTIVATIONS + ring.stage * ACTIVATION_STAGE_BYTES, ring.get_barrier(), operands.activation_map,
                         cursor.tile_m, cursor.k);
        ring.advance();
    }
}

// ---- Consumers ------------------------------------------------------------------------------------------------------
// Scale and store the sums of a tile. `row0` is the tile's first row, and `column0` is the warp's first column.
__device__ __forceinline__ void epilogue(Accumulators& acc, const Problem& problem, const Operands& operands, u32 smem,
                                         const WarpPosition& warp, u32 row0, u32 column0) {
    add_bias(acc, problem, operands.bias, column0, warp.lane);
    store_rows_of_warp(acc, problem, operands.output, smem, warp.tile, warp.lane, row0, column0);
}

// Compute and store the work units of a range. All threads of the consumer warps must call this function.
__device__ __forceinline__ void consume(Ring& ring, const Problem& problem, const Operands& operands, u32 smem, u32 range,
                                        const WarpPosition& warp) {
    const SlotAddresses slots(smem, warp);
    WorkQueue queue(problem, range);
    WorkUnit unit;
    Accumulators acc;
    WeightFragments weights;
    griddepcontrol_wait();   // the previous kernel may still be using the workspace and the result
    while (queue.next(problem, unit)) {
        u32 tile_m, tile_n;
        tile_position(problem, unit.tile, tile_m, tile_n);
        const u32 column0 = tile_n * TILE_N + warp.column0;
        clear(acc);
        mainloop(acc, weights, slots, ring, unit, warp.lane);
        if (!reduce_slices(acc, smem, warp.tile, warp.slice, warp.lane)) continue;
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

// Y = X W, computed as Y^T = W^T X^T, so that the N dimension becomes the rows (M) of the MMAs. The last warps are producers, which fill
// the slots of the ring. The first CONSUMER_WARPS warps are consumers, which dequantize weights, multiply, and store. Producers and
// consumers process the same sequence of work units.
extern "C" __global__ void __launch_bounds__(288, 1)
marlin_mma_sync_f16_g128_zeros_8x128x256_w142_s4_tma(
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
    const u32 warp_index = threadIdx.x / 32, lane = threadIdx.x % 32, range = problem.work_ranges - 1 - blockIdx.x;
    const Operands operands{&weight_map, &scale_map, &zero_map, &activation_map, bias, output, {partials, flags}};
    Ring ring;
    ring.init(smem + FULL_BARRIERS, FULL_ARRIVALS, CONSUMER_WARPS);
    griddepcontrol_launch_dependents();   // allows the next kernel to start and load its weights

    if (warp_index >= CONSUMER_WARPS) {
        // elect_sync() proves to ptxas that only one thread runs this code. With a comparison of the lane index, ptxas would generate
        // a loop around each copy.
        if (warp_index == CONSUMER_WARPS && elect_sync()) produce(ring, problem, operands, smem, range);
        return;
    }
    consume(ring, problem, operands, smem, range, WarpPosition(warp_index, lane));
}
