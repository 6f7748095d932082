// cudatma: kernels/marlin_wgmma.cu.j2 for sm_90a
// config: MarlinConfig
//   version = 'wgmma'
//   dtype = 'float16'
//   group_size = 128
//   has_zeros = False
//   tile_m = 128
//   tile_n = 128
//   tile_k = 128
//   stages = 4
//   cluster_n = 2
//   consumer_registers = 232
//   warpgroups = 1
//   mmas_per_commit = 1
//   commits_in_flight = 3
//   scale_form = 'as_stored'
//   pingpong = True
// 8 consumer warps and 4 producer warps; 182336 bytes of shared memory per CTA.
// Arrays of a stage:
//    32768 bytes: activations 128 x 128 float16, 128B swizzle
//     8192 bytes: weights 128 x 128 int4, packed layout 1
//      256 bytes: scales 1 x 128 float16

// primitives.cu contains
// u8, u16, u32, u64, TensorMap, shared_address, laneid, elect_sync, bar_sync, bar_arrive, griddepcontrol_wait,
// griddepcontrol_launch_dependents, setmaxnreg_inc, setmaxnreg_dec, mbarrier_init, mbarrier_arrive_expect_tx,
// mbarrier_try_wait_parity, mbarrier_wait_parity, fence_mbarrier_init, cluster_ctarank, mapa_shared_cluster,
// mbarrier_arrive_shared_cluster, barrier_cluster_arrive, barrier_cluster_wait, cp_async_bulk_tensor_2d_load,
// cp_async_bulk_tensor_2d_load_multicast_hint, cp_async_bulk_tensor_3d_load_hint, prefetch_tensormap,
// createpolicy_evict_first, createpolicy_evict_last, createpolicy_evict_normal, ld_shared_b32, ld_shared_v4_b32,
// stmatrix_x2_trans, stmatrix_x4_trans, matrix_descriptor, wgmma_fence, wgmma_commit_group, wgmma_wait_group,
// TmaPipeline, bar_sync_one_of, Divisor, divide, low_to_float, to_pair, multiply, multiply_add, both_low,
// both_high, word, packed_index

namespace cudatma {

// ---- Tile -----------------------------------------------------------------------------------------------------------
constexpr u32 TILE_M = 128;   // rows of M per CTA, which are columns of the MMAs
constexpr u32 TILE_N = 128;   // columns of N per CTA, which become the rows (M) of the MMAs
constexpr u32 TILE_K = 128;   // elements of K per stage
constexpr u32 WARPGROUPS = 1;   // warpgroups along N
constexpr u32 SLICE_K = 1;   // warpgroups with the same columns of N, among which each stage's K is divided
constexpr u32 PINGPONG = 2;   // warpgroups, which take turns at the CTA's work units
constexpr u32 STACK = 2;   // wgmmas along N per warpgroup; each covers 64 columns
constexpr u32 STAGES = 4;
constexpr u32 CLUSTER = 2;   // CTAs per cluster along N, which share the activations
constexpr u32 CLUSTER_MASK = 3;   // multicast mask: all CTAs of the cluster
constexpr u32 LOADED_M = 64;   // rows of the activations that each CTA loads for the whole cluster
constexpr u32 MMAS_PER_COMMIT = 1;   // wgmmas per accumulator and commit group; each multiplies 16 elements of K
constexpr u32 COMMITS_IN_FLIGHT = 3;   // commit groups in flight while the weights of the next one are dequantized
constexpr u32 RELEASE_K64 = 0;   // block (64 elements of K) after which all wgmmas of the previous stage have completed
constexpr u32 CONSUMER_WARPS = 8;
constexpr u32 PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = 232;   // registers per thread
constexpr u32 GROUP_SIZE = 128;   // elements of K that share a scale
constexpr u32 WARP_TILES = 4 * WARPGROUPS;   // number of warps among which a CTA's tile is divided
constexpr u32 FRAGMENTS_16 = STACK, FRAGMENT_STRIDE_N = 64;   // fragments of 16 columns of N per warp; columns from one fragment to the next
constexpr u32 FRAGMENTS_8 = TILE_M / 8;   // fragments of 8 rows of M
constexpr u32 FIX_UP_UNROLL = 1;   // number of partial tiles whose loads are in flight at the same time
constexpr u32 K64_PER_STAGE = TILE_K / 64, K64_PER_SLICE = K64_PER_STAGE / SLICE_K, N64_PER_TILE = TILE_N / 64;   // 64 x 64 blocks of weights
constexpr u32 K64_BLOCK_BYTES = 2048;   // bytes per packed 64 x 64 block of weights
constexpr u32 ROW_BYTES = 128;   // bytes per row of an activation box (64 elements of K)
constexpr u32 SWIZZLE_128B = 1, SWIZZLE_REPEAT_BYTES = 8 * ROW_BYTES;   // fields of a matrix descriptor

// ---- Shared memory: byte offsets from a base that is 1024-byte aligned, with sizes in the comments -------------------
constexpr u32 ACTIVATIONS = 0;                // 131072 bytes
constexpr u32 WEIGHTS = 131072;               // 32768 bytes
constexpr u32 SCALES = 163840;                // 1024 bytes
constexpr u32 STAGING = 164864;               // 17408 bytes
constexpr u32 FULL_BARRIERS = 182272;         // 32 bytes

// ---- Slots: one per stage and operand -------------------------------------------------------------------------------
constexpr u32 ACTIVATION_STAGE_BYTES = 32768;
constexpr u32 WEIGHT_STAGE_BYTES = 8192;
constexpr u32 SCALE_STAGE_BYTES = 256;
constexpr u32 TRANSACTION_BYTES = 41216;   // bytes that TMA loads per stage
constexpr u32 EMPTY_ARRIVALS = 8;   // number of arrivals that release a slot, one from each consumer warp that reads it
constexpr u32 STAGING_ROWS = 32;   // rows of M that a warpgroup stores at a time
constexpr u32 STAGING_PITCH_BYTES = 272;   // bytes from one staging row to the next
constexpr u32 STAGING_BYTES = 8704;   // bytes of a warpgroup's staging rows
using Ring = TmaPipeline<STAGES>;

// The named barriers of this kernel. __syncthreads() uses barrier 0.
enum NamedBarrier : u32 {
    WARPGROUP_BARRIER = 1,   // the first of several barriers, one per warpgroup
    ORDER_BARRIER = WARPGROUP_BARRIER + PINGPONG,   // the first of several barriers, one per warpgroup
};

__device__ __forceinline__ void warpgroup_sync(u32 group) { bar_sync_one_of<WARPGROUP_BARRIER, PINGPONG>(group, 128); }

// Advance the ring past the slots of the other warpgroup's work unit.
__device__ __forceinline__ void skip(Ring& ring, u32 slots) {
    const u32 next = ring.stage + slots;
    ring.stage = next % STAGES;
    ring.phase ^= next / STAGES & 1;
}

// Wait until the other warpgroup has issued the wgmmas of the previous work unit. Without this barrier, a slot still full from two laps ago
// would satisfy the parity wait.
constexpr u32 ORDER_THREADS = PINGPONG * 128;
__device__ __forceinline__ void wait_for_order(u32 group) { bar_sync_one_of<ORDER_BARRIER, PINGPONG>(group, ORDER_THREADS); }

// Allow the other warpgroup to issue the wgmmas of the next work unit.
__device__ __forceinline__ void pass_order(u32 group) {
    if (group == 0) {
        bar_arrive(ORDER_BARRIER + 1, ORDER_THREADS);
    } else {
        bar_arrive(ORDER_BARRIER, ORDER_THREADS);
    }
}

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
    u32 prefetch_stages;            // number of stages of weights that a dependent launch loads before it waits
    u32 scale_offset;               // multiplier for the scales, in both halves
    float scale_back;               // multiplier for the sums
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

// ---- Accumulators and partial sums ----------------------------------------------------------------------------------

// The accumulators of a warp are fragments of 16 x 8 values. Each lane holds four values of each fragment.
typedef float Accumulators[FRAGMENTS_16][FRAGMENTS_8][4];

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
// Each range belongs to a cluster, and a CTA adds the sums of the CTAs with the same rank in other clusters.
__device__ __forceinline__ void fix_up(Accumulators& acc, const Problem& problem, const Workspace& workspace, u32 range,
                                       u32 stages_missing, u32 warp_tile, u32 lane, u32 rank) {
    u32 last = range;   // the last range with stages of this tile
    while (stages_missing > 0) {
        ++last;
        stages_missing -= min(stages_missing, range_begin(problem, last + 1) - range_begin(problem, last));
    }
    for (u32 other = range + 1 + lane; other <= last; other += 32) {   // each lane waits for one range
        u32* flag = workspace.flags + (other * CLUSTER + rank) * WARP_TILES + warp_tile;
        u32 is_stored = 0;
        do {
            asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(is_stored) : "l"(flag) : "memory");
        } while (is_stored == 0);
        *flag = 0;   // no CTA sets this flag again in this launch
    }
    __syncwarp();
#pragma unroll FIX_UP_UNROLL
    for (u32 other = range + 1; other <= last; ++other) {
        const float4* sums = partial_sums(workspace, other * CLUSTER + rank, warp_tile, lane);
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

// Store at most STAGING_ROWS rows of a warpgroup's part of a tile, beginning at row `first` of the part, through the warpgroup's staging
// rows. stmatrix.trans transposes the fragments, because their rows are columns of the result. `row0` and `column0` are the part's first
// row and column in the result. Before the call, all warps must have read the previous contents of the staging rows.
__device__ __forceinline__ void store_rows_of_warpgroup(const Accumulators& acc, const Problem& problem, u16* output, u32 smem,
                                                        u32 warpgroup, u32 warp, u32 lane, u32 first, u32 row0, u32 column0) {
    constexpr u32 VECTORS_PER_ROW = 8 * FRAGMENTS_16;   // vectors of 8 columns
    constexpr u32 VECTORS_PER_THREAD = (STAGING_ROWS * VECTORS_PER_ROW + 127) / 128;
    const u32 staging = smem + STAGING + warpgroup * STAGING_BYTES, thread = warp * 32 + lane;
    const u32 rows = min(STAGING_ROWS, TILE_M - first);   // the last step may have fewer rows
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
    warpgroup_sync(warpgroup);   // all warps must have staged their rows before any thread reads them
    // Issue all loads before the first store, because a store waits for its load. The compiler removes the condition if all threads have an
    // i-th vector.
    uint4 values[VECTORS_PER_THREAD];
#pragma unroll
    for (u32 i = 0; i < VECTORS_PER_THREAD; ++i) {
        const u32 vector = 128 * i + thread, row = vector / VECTORS_PER_ROW, column = vector % VECTORS_PER_ROW;
        if (128 * (i + 1) <= vectors || vector < vectors)
            values[i] = ld_shared_v4_b32(staging + row * STAGING_PITCH_BYTES + column * 16);
    }
#pragma unroll
    for (u32 i = 0; i < VECTORS_PER_THREAD; ++i) {
        const u32 vector = 128 * i + thread, row = vector / VECTORS_PER_ROW, column = vector % VECTORS_PER_ROW;
        if (128 * (i + 1) <= vectors || vector < vectors)
            store_vector(problem, output, values[i], row0 + first + row, column0 + 8 * column);
    }
}

// ---- Packed weights: the codes that a thread multiplies -------------------------------------------------------------
// A thread's codes in a block of 64 elements of K and 16 columns, one word of 8 codes per step of 16 elements of K.
using PackedCodes = uint4;
using StepCodes = u32;

__device__ __forceinline__ PackedCodes load_codes(u32 address, u32) { return ld_shared_v4_b32(address); }

__device__ __forceinline__ StepCodes step_codes(const PackedCodes& packed, u32 step) { return word(packed, step); }

// ---- int4 -> fp16, scale and offset in one multiply-add --------------------------------------------------------
// A nibble v whose lowest bit is bit b of a half is the subnormal v 2^(b - 24), so a mask suffices to extract a weight. The
// multiply-add v 2^(b - 24) * s 2^(24 - b) - 8 s = (v - 8) s rounds once, like a multiplication after a subtraction of 8, and
// gives a bitwise identical result. The factor s 2^(24 - b) must be finite. Packing therefore multiplies all scales of a weight by
// the same power 2^-p, and scale_back() multiplies the sums by 2^p.
constexpr u32 NIBBLE_LOW = 0, NIBBLE_HIGH = NIBBLE_LOW + 4;   // b for columns g and g + 8
constexpr u32 MASK_LOW = 0x000f000fu << NIBBLE_LOW, MASK_HIGH = 0x000f000fu << NIBBLE_HIGH;
// MINUS_POWER is -2^11 in both halves, and TO_FACTORS is 2^(10 - b) for columns g and g + 8. Their product with -8 s is s 2^(24 - b).
constexpr u32 MINUS_POWER = 0xe800e800u, TO_FACTORS = 0x64006400u - (NIBBLE_LOW << 10) - (NIBBLE_HIGH << 26);

// The factors and offsets for columns g and g + 8 of a fragment in one group of weights.
struct GroupScale {
    u32 factor_low, factor_high;   // s 2^(24 - b), each in both halves
    u32 offset_low, offset_high;   // -8 s
};

// Set the factors and offsets of a group. `pair` contains the scales of columns g and g + 8. All products are exact.
__device__ __forceinline__ void set_scales(GroupScale& group, u32 pair, u32 scale_offset) {
    const u32 offsets = multiply(pair, scale_offset);
    const u32 factors = multiply(multiply(offsets, MINUS_POWER), TO_FACTORS);
    group = GroupScale{both_low(factors), both_high(factors), both_low(offsets), both_high(offsets)};
}

// Dequantize and scale the 8 nibbles of a word.
__device__ __forceinline__ void dequantize_group(u32 (&a)[4], StepCodes q, const GroupScale& group) {
    const u32 lower = q << NIBBLE_LOW, upper = q >> (8 - NIBBLE_LOW);
    a[0] = multiply_add(lower & MASK_LOW, group.factor_low, group.offset_low);
    a[1] = multiply_add(lower & MASK_HIGH, group.factor_high, group.offset_high);
    a[2] = multiply_add(upper & MASK_LOW, group.factor_low, group.offset_low);
    a[3] = multiply_add(upper & MASK_HIGH, group.factor_high, group.offset_high);
}

// Multiply the complete sums of a tile by 2^p, which is exact.
__device__ __forceinline__ void scale_back(Accumulators& acc, const Problem& problem) {
#pragma unroll
    for (u32 c = 0; c < FRAGMENTS_16; ++c)
#pragma unroll
        for (u32 r = 0; r < FRAGMENTS_8; ++r)
#pragma unroll
            for (u32 i = 0; i < 4; ++i) acc[c][r][i] *= problem.scale_back;
}

// ---- Main loop: wgmma multiplies dequantized weights in registers (A) by activations in shared memory (B) -----------
// [PTX ISA, wgmma.mma_async] Issue D += A * B for a warpgroup, or D = A * B if `accumulates` is false. `a` contains A in registers, in the
// layout of operand A of mma.m16n8k16. `b` is the matrix descriptor of B. Between wgmma_fence and wgmma_wait_group, only wgmma.mma_async
// instructions of the same shape may access `d`, and only wgmma.mma_async instructions may access the registers of `a`.
__device__ __forceinline__ void wgmma_m64n128k16_f32_f16(float (&d)[16][4], const u32 (&a)[4], u64 b, bool accumulates = true) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
        "}, {%64, %65, %66, %67}, %68, p, 1, 1, 0;\n}"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]),
          "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]), "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3]),
          "+f"(d[8][0]), "+f"(d[8][1]), "+f"(d[8][2]), "+f"(d[8][3]), "+f"(d[9][0]), "+f"(d[9][1]), "+f"(d[9][2]), "+f"(d[9][3]), "+f"(d[10][0]), "+f"(d[10][1]), "+f"(d[10][2]), "+f"(d[10][3]), "+f"(d[11][0]), "+f"(d[11][1]), "+f"(d[11][2]), "+f"(d[11][3]),
          "+f"(d[12][0]), "+f"(d[12][1]), "+f"(d[12][2]), "+f"(d[12][3]), "+f"(d[13][0]), "+f"(d[13][1]), "+f"(d[13][2]), "+f"(d[13][3]), "+f"(d[14][0]), "+f"(d[14][1]), "+f"(d[14][2]), "+f"(d[14][3]), "+f"(d[15][0]), "+f"(d[15][1]), "+f"(d[15][2]), "+f"(d[15][3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((u32)accumulates)
        : "memory");
}

// Return `value` through a shuffle, so that ptxas keeps the value in a register instead of recomputing an address in each stage.
__device__ __forceinline__ u32 keep_in_register(u32 value, u32 lane = laneid()) { return __shfl_sync(0xffffffffu, value, lane); }

// The position of a thread among the consumers.
struct WarpPosition {
    u32 warpgroup;   // index along N
    u32 warp;        // index in the warpgroup
    u32 lane;
    u32 group;       // the warpgroup, 0 or 1, which has its own tile
};

// The addresses from which this thread reads slot 0. In slot i, they are larger by i times the size of a stage.
struct SlotAddresses {
    u32 activations, weights, scales;

    __device__ __forceinline__ SlotAddresses(u32 smem, const WarpPosition& at) {
        activations = smem + ACTIVATIONS;
        weights = keep_in_register(smem + WEIGHTS + at.warpgroup * STACK * K64_PER_STAGE * K64_BLOCK_BYTES + at.warp * 512 + at.lane * 16);
        const u32 pair = packed_index(at.warpgroup * STACK * 64, at.warp, at.lane);
        scales = keep_in_register(smem + SCALES + pair * 2);
    }
};

// A thread's packed weights: those of the current block of 64 elements of K and, if a stage has several blocks, those of the next block.
constexpr u32 PACKED_BLOCKS = K64_PER_SLICE > 1 ? 2 : 1;
struct WeightFragments {
    PackedCodes packed[PACKED_BLOCKS][STACK];
    GroupScale group[STACK];   // the current group
    u32 scales[STACK];   // the next group
};

// Load a thread's packed weights of a block.
__device__ __forceinline__ void load_packed(WeightFragments& weights, const SlotAddresses& slots, u32 stage, u32 k64) {
#pragma unroll
    for (u32 s = 0; s < STACK; ++s)
        weights.packed[k64 % PACKED_BLOCKS][s] =
            load_codes(slots.weights + stage * WEIGHT_STAGE_BYTES + (s * K64_PER_STAGE + k64) * K64_BLOCK_BYTES, K64_BLOCK_BYTES / 2);
}

// Load a thread's scales of the next group. `row` is the index of the group in the stage.
__device__ __forceinline__ void load_next_group(WeightFragments& weights, const SlotAddresses& slots, u32 stage, u32 row) {
#pragma unroll
    for (u32 s = 0; s < STACK; ++s)
        weights.scales[s] = ld_shared_b32(slots.scales + stage * SCALE_STAGE_BYTES + (row * TILE_N + 64 * s) * 2);
}

// Make the next group the current one.
__device__ __forceinline__ void begin_group(WeightFragments& weights, const Problem& problem) {
#pragma unroll
    for (u32 s = 0; s < STACK; ++s) {
        set_scales(weights.group[s], weights.scales[s], problem.scale_offset);
    }
}

// Dequantize one step (16 elements of K) of block k64.
__device__ __forceinline__ void dequantize_step(u32 (&a)[STACK][4], const WeightFragments& weights, u32 k64, u32 step) {
#pragma unroll
    for (u32 s = 0; s < STACK; ++s)
        dequantize_group(a[s], step_codes(weights.packed[k64 % PACKED_BLOCKS][s], step), weights.group[s]);
}

// Release the slot in all CTAs of the cluster after this warp has read it.
__device__ __forceinline__ void release(const Ring& ring, u32 slot, u32 lane) {
    ring.release_used_to_cluster<CLUSTER>(slot, lane);
}

// Multiply the stages of a work unit. A warp dequantizes MMAS_PER_COMMIT steps of weights while at most COMMITS_IN_FLIGHT commit groups of
// wgmmas are in flight. The warp releases a slot during the next stage, when the wgmmas that read the slot's activations have completed and
// the warp has used the slot's weights. Return the last slot, whose wgmmas may still be in flight.
__device__ __forceinline__ u32 mainloop(Accumulators& acc, WeightFragments& weights, const Problem& problem,
                                        const SlotAddresses& slots, Ring& ring, const WorkUnit& unit, u32 lane) {
    u32 previous = ring.stage;
#pragma unroll 1
    for (u32 k = unit.k_begin; k < unit.k_end; ++k) {
        // The shuffle proves to ptxas that the address is uniform. Without it, ptxas would emit two moves to uniform registers for
        // each descriptor.
        const u32 address = __shfl_sync(0xffffffffu, slots.activations + ring.stage * ACTIVATION_STAGE_BYTES, 0);
        ring.wait();
        const u64 activations = matrix_descriptor(address, 16, SWIZZLE_REPEAT_BYTES, SWIZZLE_128B);
        // The loop loads each later block and group while it multiplies the one before it.
        load_packed(weights, slots, ring.stage, 0);
        load_next_group(weights, slots, ring.stage, 0);
#pragma unroll
        for (u32 i = 0; i < K64_PER_SLICE; ++i) {
            if (i + 1 < K64_PER_SLICE) load_packed(weights, slots, ring.stage, i + 1);
#pragma unroll
            for (u32 first = 0; first < 4; first += MMAS_PER_COMMIT) {
                u32 a[MMAS_PER_COMMIT][STACK][4];
#pragma unroll
                for (u32 j = 0; j < MMAS_PER_COMMIT; ++j) {
                    const u32 k_begin = i * 64 + 16 * (first + j);   // first element of K of the step
                    if (k_begin % GROUP_SIZE == 0) {
                        begin_group(weights, problem);
                        if (k_begin + GROUP_SIZE < K64_PER_SLICE * 64)
                            load_next_group(weights, slots, ring.stage, k_begin / GROUP_SIZE + 1);
                    }
                    dequantize_step(a[j], weights, i, first + j);
                }
                wgmma_fence();
#pragma unroll
                for (u32 j = 0; j < MMAS_PER_COMMIT; ++j)
#pragma unroll
                    for (u32 s = 0; s < STACK; ++s)
                        wgmma_m64n128k16_f32_f16(
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

// The operands. The members are named after the launch parameters.
struct Operands {
    const TensorMap* weight_map;
    const TensorMap* scale_map;
    const TensorMap* activation_map;
    const u16* bias;
    u16* output;
    Workspace workspace;
};

// ---- Producer: one thread -------------------------------------------------------------------------------------------
struct Policies {
    u64 weights;
    u64 activations;
};

// Return the L2 policies. The weights stay in L2 if several rows of tiles read them.
// In a cluster launch, the activations also stay in L2, because every column of tiles in a raster group reads the group's activations.
__device__ __forceinline__ Policies choose_policies(const Problem& problem) {
    const bool has_rows = problem.tiles_m > 1;
    const u64 first = createpolicy_evict_first(), normal = createpolicy_evict_normal();
    const u64 last = createpolicy_evict_last();
    return {has_rows ? normal : first, has_rows ? last : normal};
}

// Make the slot's barrier expect the bytes of a stage, and load the operands that do not depend on previous kernels: weights (one box of
// K64_PER_STAGE x N64_PER_TILE blocks), scales and zero points. TMA fills blocks and scales outside the tensors with zeros.
__device__ __forceinline__ void load_weights(const Ring& ring, u32 slot, const StageCursor& at, const Operands& operands,
                                             u32 smem, u32 rank, const Policies& policies) {
    const u32 full = ring.get_barrier(slot), tile_n = at.tile_n * CLUSTER + rank;
    ring.expect_tx(slot, TRANSACTION_BYTES);
    cp_async_bulk_tensor_3d_load_hint(smem + WEIGHTS + slot * WEIGHT_STAGE_BYTES, operands.weight_map, full, 0,
                                      at.k * 2, tile_n * N64_PER_TILE, policies.weights);
    const u32 row = at.k * TILE_K / GROUP_SIZE;
    cp_async_bulk_tensor_2d_load(smem + SCALES + slot * SCALE_STAGE_BYTES, operands.scale_map, full, tile_n * TILE_N, row);
}

// Load LOADED_M rows of the activations into every CTA of the cluster, as K64_PER_STAGE boxes of 64 elements of K with the 128-byte
// swizzle. TMA fills elements outside the tensor with zeros.
__device__ __forceinline__ void load_activations(const Ring& ring, u32 slot, const StageCursor& at, const Operands& operands,
                                                 u32 smem, u32 rank, const Policies& policies) {
    const u32 row = rank * LOADED_M, target = smem + ACTIVATIONS + slot * ACTIVATION_STAGE_BYTES + row * ROW_BYTES;
#pragma unroll
    for (u32 i = 0; i < K64_PER_STAGE; ++i)
        cp_async_bulk_tensor_2d_load_multicast_hint(target + i * TILE_M * ROW_BYTES, operands.activation_map,
                                                    ring.get_barrier(slot), at.k * TILE_K + i * 64, at.tile_m * TILE_M + row,
                                                    CLUSTER_MASK, policies.activations);
}

// Fill the slots of the first lap, which are free. Activations depend on the previous kernel, but weights, scales and zero points do not. A
// dependent launch therefore loads the weights of the first stages before it waits for the previous kernel. It does not load the weights of
// all stages, because the activations of the first stage would then arrive only after all of these weights.
__device__ __forceinline__ void produce_first_lap(const Ring& ring, StageCursor& cursor, const Problem& problem,
                                                  const Operands& operands, u32 smem, u32 rank, const Policies& policies) {
    const u32 prefetched = min(STAGES, problem.prefetch_stages);
    StageCursor ahead(cursor);
#pragma unroll 1
    for (u32 slot = 0; slot < prefetched && ahead.next(problem); ++slot)
        load_weights(ring, slot, ahead, operands, smem, rank, policies);
    griddepcontrol_launch_dependents();   // allows the next kernel to start and load its weights
    griddepcontrol_wait();                // the previous kernel may still be writing the activations
#pragma unroll 1
    for (u32 slot = 0; slot < STAGES && cursor.next(problem); ++slot) {
        if (slot >= prefetched) load_weights(ring, slot, cursor, operands, smem, rank, policies);
        load_activations(ring, slot, cursor, operands, smem, rank, policies);
    }
}

// Fill the slots of the following laps. Each slot is refilled after the consumers have released it.
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

// ---- Consumers: PINGPONG warpgroups ---------------------------------------------------------------------------------
// Scale and store the sums of a tile. `row0` is the tile's first row, and `column0` is the warpgroup's first column.
__device__ __forceinline__ void epilogue(Accumulators& acc, const Problem& problem, const Operands& operands, u32 smem,
                                         const WarpPosition& warp, u32 row0, u32 column0) {
    scale_back(acc, problem);
    add_bias(acc, problem, operands.bias, column0 + 16 * warp.warp, warp.lane);
#pragma unroll
    for (u32 first = 0; first < TILE_M; first += STAGING_ROWS) {
        warpgroup_sync(warp.group);   // all warps must have read the staging rows before the stores below overwrite them
        store_rows_of_warpgroup(acc, problem, operands.output, smem, warp.group, warp.warp, warp.lane, first, row0, column0);
    }
}

// Compute and store the work units of a range. All threads of the consumer warps must call this function.
__device__ __forceinline__ void consume(Ring& ring, const Problem& problem, const Operands& operands, u32 smem, u32 range, u32 rank,
                                        const WarpPosition& warp) {
    const SlotAddresses slots(smem, warp);
    const u32 warp_tile = warp.warpgroup * 4 + warp.warp;
    WorkQueue queue(problem, range);
    WorkUnit unit;
    Accumulators acc;
    WeightFragments weights;
    griddepcontrol_wait();   // the previous kernel may still be using the workspace and the result
    for (u32 i = 0; queue.next(problem, unit); ++i) {
        if (i % PINGPONG != warp.group) {   // the other warpgroup processes this work unit
            skip(ring, unit.k_end - unit.k_begin);
            continue;
        }
        u32 tile_m, tile_n;
        tile_position(problem, unit.tile, tile_m, tile_n);
        const u32 column0 = (tile_n * CLUSTER + rank) * TILE_N + warp.warpgroup * STACK * 64;
        clear(acc);
        WorkQueue rest(queue);
        WorkUnit following;
        const bool is_last = !rest.next(problem, following);
        if (i > 0) wait_for_order(warp.group);
        const u32 slot = mainloop(acc, weights, problem, slots, ring, unit, warp.lane);
        if (!is_last) pass_order(warp.group);
        wgmma_wait_group<0>();
        release(ring, slot, warp.lane);
        if (unit.k_begin > 0) {
            store_partials(acc, operands.workspace, range * CLUSTER + rank, warp_tile, warp.lane);
            continue;
        }
        if (unit.k_end < problem.k_iterations)
            fix_up(acc, problem, operands.workspace, range, problem.k_iterations - unit.k_end, warp_tile, warp.lane, rank);
        epilogue(acc, problem, operands, smem, warp, tile_m * TILE_M, column0);
    }
}
}  // namespace cudatma

// Y = X W, computed as Y^T = W^T X^T, so that the N dimension becomes the rows (M) of the MMAs. One thread of the last warps is the
// producer, which fills the slots of the ring by TMA. The other warpgroups are consumers. They dequantize weights into the registers of
// operand A, multiply, and store. Producer and consumers process the same sequence of work units.
// The two consumer warpgroups process work units alternately, so that one warpgroup stores its tile while the other multiplies.
extern "C" __global__ void __launch_bounds__(384, 1)
marlin_wgmma_f16_g128_fused_128x128x128_w1_s4_g13_r232_c2_pp(
    const __grid_constant__ cudatma::TensorMap weight_map,
    const __grid_constant__ cudatma::TensorMap scale_map,
    const __grid_constant__ cudatma::TensorMap activation_map,
    const cudatma::u16* bias,
    cudatma::u16* output,
    float4* partials,
    cudatma::u32* flags,
    const __grid_constant__ cudatma::Problem problem) {
    using namespace cudatma;
    extern __shared__ __align__(1024) u8 dynamic_shared[];
    const u32 smem = shared_address(dynamic_shared);
    // The shuffle proves to ptxas that the value is uniform.
    const u32 warp_index = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
    const Operands operands{&weight_map, &scale_map, &activation_map, bias, output, {partials, flags}};
    const u32 range = problem.work_ranges - 1 - blockIdx.x / CLUSTER;
    const u32 rank = cluster_ctarank();
    Ring ring;
    ring.attach(smem + FULL_BARRIERS);

    // One thread initializes the barriers and issues all copies. elect_sync() proves to ptxas that only one thread runs this code. With a
    // comparison of the lane index, ptxas would generate a loop around each copy.
    const bool is_producer_warp = warp_index == CONSUMER_WARPS;
    const Policies policies = choose_policies(problem);
    StageCursor cursor(problem, range);
    if (is_producer_warp && elect_sync()) {
        prefetch_tensormap(&weight_map);
        prefetch_tensormap(&activation_map);
        prefetch_tensormap(&scale_map);
        ring.init_barriers(1, EMPTY_ARRIVALS);
    }
    __syncwarp();
    barrier_cluster_arrive();
    barrier_cluster_wait();   // all CTAs must have initialized their barriers before one arrives on them or loads by multicast
    if (warp_index >= CONSUMER_WARPS) {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        if (is_producer_warp && elect_sync()) {
            produce_first_lap(ring, cursor, problem, operands, smem, rank, policies);   // multicast needs the barriers of all CTAs
            produce(ring, cursor, problem, operands, smem, rank, policies);
        }
        __syncwarp();
    } else {
        setmaxnreg_inc<CONSUMER_REGISTERS>();
        consume(ring, problem, operands, smem, range, rank, WarpPosition{0, warp_index % 4, laneid(), warp_index / 4});
    }
    // A CTA must not exit while another CTA may write to its shared memory or arrive on its barriers.
    barrier_cluster_arrive();
    barrier_cluster_wait();
}
