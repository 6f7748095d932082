// cudatma: kernels/attention_a3.cu.j2 for sm_90a
// config: AttentionConfig
//   version = 'a3'
//   dtype = 'bfloat16'
//   head_dim = 64
//   v_head_dim = 64
//   is_causal = True
//   has_window = True
//   tile_m = 128
//   tile_n = 64
//   is_varlen = True
// 8 consumer warps and 4 producer warps; 49224 bytes of shared memory per CTA.
// Arrays of a stage:
//     8192 bytes: keys 64 x 64 bfloat16, 128B swizzle
//     8192 bytes: values 64 x 64 bfloat16, 128B swizzle

// primitives.cu contains
// u8, u16, u32, u64, TensorMap, shared_address, laneid, elect_sync, bar_sync, griddepcontrol_wait,
// griddepcontrol_launch_dependents, setmaxnreg_inc, setmaxnreg_dec, fence_proxy_async_shared_cta, mbarrier_init,
// mbarrier_arrive, mbarrier_arrive_expect_tx, mbarrier_try_wait_parity, mbarrier_wait_parity, fence_mbarrier_init,
// cp_async_bulk_tensor_4d_load, ld_shared_v4_b32, st_shared_v4_b32, stmatrix_x4, matrix_descriptor, wgmma_fence,
// wgmma_commit_group, wgmma_wait_group, ex2_approx_ftz, TmaPipeline, bar_sync_one_of, wait_for_previous_grid,
// ThreadPosition, Divisor, divide, to_pair

namespace cudatma {

// ---- Tile -----------------------------------------------------------------------------------------------------------
constexpr u32 TILE_M = 128;   // queries per CTA
constexpr u32 TILE_N = 64;   // keys per block
constexpr u32 HEAD_DIM = 64, V_HEAD_DIM = 64;   // columns of q and k; columns of v and of the result

// ---- Shared memory: byte offsets from a base that is 1024-byte aligned, with sizes in the comments -------------------
constexpr u32 K = 0;                          // 16384 bytes
constexpr u32 V = 16384;                      // 16384 bytes
constexpr u32 Q = 32768;                      // 16384 bytes
constexpr u32 Q_BARRIER = 49152;              // 8 bytes
constexpr u32 K_FULL_BARRIERS = 49160;        // 16 bytes
constexpr u32 V_FULL_BARRIERS = 49192;        // 16 bytes
#define INF __int_as_float(0x7f800000)   // NVRTC does not provide math.h

// The launch parameters that are neither tensor maps nor pointers.
struct Problem {
    u32 tiles_m;                    // number of query heads in all sequences
    u32 tiles_n;                    // number of query tiles per head
    u32 raster_heads;               // number of heads per raster group
    u32 last_group;                 // first head of the last raster group
    u32 q_length;                   // number of queries per sequence
    u32 k_length;                   // number of keys per sequence
    u32 heads;                      // number of query heads
    u32 q_total;                    // total number of queries across all sequences
    u32 k_total;                    // total number of keys across all sequences
    u32 upper;                      // query i attends to keys below i + upper; signed
    u32 lower;                      // query i attends to keys from i + lower; signed
    float scale_log2;               // multiplier for the scores (or their cap) before exp2
    Divisor by_raster_tiles;        // divides by the number of tiles per raster group
    Divisor by_raster_heads;        // divides by raster_heads
    Divisor by_last_heads;          // divides by the number of heads in the last raster group
    Divisor by_heads;               // divides by heads
    Divisor by_group;               // divides by the number of query heads per KV head
    u64 output_pitch;               // stride between rows of the result, in elements
    u64 output_head;                // stride between heads of the result, in elements
    u64 output_batch;               // stride between sequences of the result, in elements
};

// ---- Tiles of queries -----------------------------------------------------------------------------------------------
// A tile consists of queries of one sequence and one query head. `row0` is its first query, and `kv_head` is the KV head to which
// its queries attend.
struct Place {
    u32 row0, head, kv_head, batch;
    u32 q_begin, k_begin;   // the sequence's first row in q, and its first row in k and v
};

// Return the position of a tile. Tiles are numbered in raster groups of heads, whose keys and values stay in L2. Within a group, the last
// queries of each head come first because they attend to the most keys. The last group has more heads so that short tiles keep all SMs busy
// at the end.
__device__ __forceinline__ Place tile_place(const Problem& problem, u32 tile) {
    const u32 first_head = min(divide(tile, problem.by_raster_tiles) * problem.raster_heads, problem.last_group);
    const bool is_last = first_head == problem.last_group;
    const u32 inside = tile - first_head * problem.tiles_n;
    const u32 column = divide(inside, is_last ? problem.by_last_heads : problem.by_raster_heads);
    const u32 any_head = first_head + inside - column * (is_last ? problem.tiles_m - first_head : problem.raster_heads);
    const u32 row0 = (problem.tiles_n - 1 - column) * TILE_M;
    const u32 batch = divide(any_head, problem.by_heads), head = any_head - batch * problem.heads;
    return Place{row0, head, divide(head, problem.by_group), batch};
}

// Return the length of a sequence and set its first row, both clamped to an array of `total` rows.
__device__ __forceinline__ u32 sequence_rows(const int* offsets, u32 sequence, u32 total, u32& begin) {
    const u32 end = min((u32)max(0, offsets[sequence + 1]), total);
    begin = min((u32)max(0, offsets[sequence]), end);
    return end - begin;
}

// Return the problem with the lengths of the tile's sequence, and set the sequence's first rows.
__device__ __forceinline__ Problem sequence_problem(const Problem& problem, const int* q_offsets, const int* k_offsets, Place& place) {
    Problem sequence = problem;
    sequence.q_length = min(sequence_rows(q_offsets, place.batch, problem.q_total, place.q_begin), problem.q_length);
    sequence.k_length = min(sequence_rows(k_offsets, place.batch, problem.k_total, place.k_begin), problem.k_length);
    sequence.upper += sequence.k_length - sequence.q_length;
    sequence.lower += sequence.k_length - sequence.q_length;
    return sequence;
}

// ---- Masks: row r attends to keys first_key(r) to end_key(r) - 1 ----------------------------------------------------
__device__ __forceinline__ int end_key(const Problem& problem, u32 row) {
    return min((int)problem.k_length, max(0, (int)(row + problem.upper)));
}

__device__ __forceinline__ int first_key(const Problem& problem, u32 row) {
    return max(0, (int)(row + problem.lower));
}

// The blocks of keys from begin to end - 1.
struct Blocks {
    u32 begin, end;
};

// Return the blocks that contain at least one key to which a row of the tile attends.
__device__ __forceinline__ Blocks key_blocks(const Problem& problem, const Place& place) {
    const u32 last_row = min(place.row0 + TILE_M, problem.q_length) - 1;
    const u32 end = (end_key(problem, last_row) + TILE_N - 1) / TILE_N;
    return Blocks{min(end, first_key(problem, place.row0) / TILE_N), end};
}

// ---- Slots: rows of q, k and v, divided into spans as wide as the swizzle -------------------------------------------
constexpr u32 WARPGROUPS = 2;   // number of consumer warpgroups; each has 64 queries
constexpr u32 CONSUMER_WARPS = 8;
constexpr u32 STAGES = 2;   // slots of each of the two rings, one of keys and one of values
constexpr u32 Q_BYTES = 2 * TILE_M * HEAD_DIM;
constexpr u32 KV_BYTES = 2;   // bytes per element of k and v
constexpr u32 K_STAGE_BYTES = KV_BYTES * TILE_N * HEAD_DIM, V_STAGE_BYTES = KV_BYTES * TILE_N * V_HEAD_DIM;
constexpr u32 SPAN_BYTES = 128, SPAN = SPAN_BYTES / KV_BYTES, SPAN_VECTORS = SPAN_BYTES / 16;   // in bytes, elements and vectors
constexpr u32 SWIZZLE = SPAN_BYTES == 128 ? 1 : 2, SWIZZLE_REPEAT_BYTES = 8 * SPAN_BYTES;   // fields of a matrix descriptor
// The named barriers of this kernel. __syncthreads() uses barrier 0.
enum NamedBarrier : u32 {
    WARPGROUP_BARRIER = 1,   // the first of several barriers, one per warpgroup
    CONSUMERS_BARRIER = WARPGROUP_BARRIER + WARPGROUPS,
};

__device__ __forceinline__ void warpgroup_sync(u32 warpgroup) { bar_sync_one_of<WARPGROUP_BARRIER, WARPGROUPS>(warpgroup, 128); }

// Return the offset of a row's 16-byte vector within a span.
__device__ __forceinline__ u32 vector_offset(u32 row, u32 vector) {
    return row * SPAN_BYTES + (vector ^ row / (8 / SPAN_VECTORS) % SPAN_VECTORS) * 16;
}

// ---- Products -------------------------------------------------------------------------------------------------------
// In each 16 x 8 fragment, a thread holds columns 2 (lane % 4) and 2 (lane % 4) + 1 of rows lane / 4 and lane / 4 + 8.
constexpr u32 SCORE_FRAGMENTS = TILE_N / 8, OUTPUT_FRAGMENTS = V_HEAD_DIM / 8;
typedef float Scores[SCORE_FRAGMENTS][4];
typedef float Output[OUTPUT_FRAGMENTS][4];
typedef u32 Probabilities[TILE_N / 16][4];   // operand A of each MMA with the values, which covers 16 keys

// [PTX ISA, wgmma.mma_async] Issue `d` += `a` * `b` for a warpgroup, or `d` = `a` * `b` if `accumulates` is false. This function
// computes the scores, `q` * `k`^T. `a` and `b` are matrix descriptors. Between wgmma_fence and wgmma_wait_group, only wgmma.mma_async
// instructions of the same shape may access `d`.
__device__ __forceinline__ void wgmma_m64n64k16_f32_bf16_ss(float (&d)[8][4], u64 a, u64 b, bool accumulates = true) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
        "}, %32, %33, p, 1, 1, 0, 0;\n}"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]),
          "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]), "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3])
        : "l"(a), "l"(b), "r"((u32)accumulates)
        : "memory");
}

// [PTX ISA, wgmma.mma_async] Like the previous function, but for `output` += `p` * `v`. `a` is in registers, in the layout of operand A
// of mma.m16n8k16.
__device__ __forceinline__ void wgmma_m64n64k16_f32_bf16_nt(float (&d)[8][4], const u32 (&a)[4], u64 b, bool accumulates = true) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
        "}, {%32, %33, %34, %35}, %36, p, 1, 1, 1;\n}"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]),
          "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]), "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((u32)accumulates)
        : "memory");
}

// Issue `scores` = `q` * `k`^T for a warpgroup's queries and a block of keys as one commit group.
__device__ __forceinline__ void multiply_keys(Scores& scores, u32 q, u32 k, u32 warpgroup) {
    const u64 queries = matrix_descriptor(q + warpgroup * 64 * SPAN_BYTES, 16, SWIZZLE_REPEAT_BYTES, SWIZZLE);
    const u64 keys = matrix_descriptor(k, 16, SWIZZLE_REPEAT_BYTES, SWIZZLE);
    wgmma_fence();
#pragma unroll
    for (u32 d = 0; d < HEAD_DIM; d += 16) {
        const u64 q_at = queries + (d / SPAN * TILE_M * SPAN_BYTES + d % SPAN * 2) / 16;
        const u64 k_at = keys + (d / SPAN * TILE_N * SPAN_BYTES + d % SPAN * 2) / 16;
        wgmma_m64n64k16_f32_bf16_ss(scores, q_at, k_at, d > 0);
    }
    wgmma_commit_group();
}

// Issue `output` += `p` `v` for a block of values as one commit group.
__device__ __forceinline__ void multiply_values(Output& output, const Probabilities& p, u32 v) {
    const u64 values = matrix_descriptor(v, TILE_N * SPAN_BYTES, SWIZZLE_REPEAT_BYTES, SWIZZLE);
    wgmma_fence();
#pragma unroll
    for (u32 n = 0; n < TILE_N; n += 16)
        wgmma_m64n64k16_f32_bf16_nt(output, p[n / 16], values + n * SPAN_BYTES / 16);
    wgmma_commit_group();
}

// ---- Softmax --------------------------------------------------------------------------------------------------------
constexpr float MAX_POWER = 8.0f;   // exponentials may grow to 2^MAX_POWER before a warp rescales its rows

// The initial maximum of a row: the lowest finite float, so that a masked score minus the maximum is minus infinity rather than NaN.
constexpr float MIN_POWER = -3.402823466e38f;

// The state of a thread's two rows. `maximum` is the largest score at the last rescaling of the row, scaled to base 2. `sum` is this
// thread's part of the sum of 2^(scaled score - maximum).
struct Rows {
    float maximum[2], sum[2];
};

// Set masked scores to minus infinity. `row` is the thread's first row, and `key0` is the first key of the scores.
__device__ __forceinline__ void mask(Scores& scores, const Problem& problem, u32 row, u32 key0, u32 lane) {
    const int column = key0 + lane % 4 * 2;
#pragma unroll
    for (u32 r = 0; r < 2; ++r) {
        const int end = end_key(problem, row + 8 * r) - column, first = first_key(problem, row + 8 * r) - column;
#pragma unroll
        for (u32 f = 0; f < SCORE_FRAGMENTS; ++f)
#pragma unroll
            for (u32 i = 0; i < 2; ++i) {
                const int at = 8 * f + i;
                if ((at >= end) | (at < first)) scores[f][2 * r + i] = -INF;
            }
    }
}

// Replace the scores with 2^(scaled score - maximum). Return true if the maximum of any row of the warp rose by more than MAX_POWER. In
// this case, the function updates the maxima of all rows and sets `rescale`, and the caller must multiply the output by `rescale`.
template <bool IsMasked>
__device__ __forceinline__ bool softmax(Scores& scores, Rows& rows, float (&rescale)[2], const Problem& problem, u32 row, u32 key0,
                                        u32 lane) {
    if constexpr (IsMasked) mask(scores, problem, row, key0, lane);
    float maximum[2];
#pragma unroll
    for (u32 r = 0; r < 2; ++r) {
        maximum[r] = fmaxf(scores[0][2 * r], scores[0][2 * r + 1]);
#pragma unroll
        for (u32 f = 1; f < SCORE_FRAGMENTS; ++f) maximum[r] = fmaxf(maximum[r], fmaxf(scores[f][2 * r], scores[f][2 * r + 1]));
        maximum[r] *= problem.scale_log2;
    }
    const float growth = fmaxf(maximum[0] - rows.maximum[0], maximum[1] - rows.maximum[1]);
    const bool rises = __any_sync(0xffffffffu, growth > MAX_POWER);
    if (rises) {
#pragma unroll
        for (u32 r = 0; r < 2; ++r) {
            maximum[r] = fmaxf(maximum[r], rows.maximum[r]);
            maximum[r] = fmaxf(maximum[r], __shfl_xor_sync(0xffffffffu, maximum[r], 1));
            maximum[r] = fmaxf(maximum[r], __shfl_xor_sync(0xffffffffu, maximum[r], 2));
            rescale[r] = ex2_approx_ftz(rows.maximum[r] - maximum[r]);
            rows.maximum[r] = maximum[r];
            rows.sum[r] *= rescale[r];
        }
    }
#pragma unroll
    for (u32 r = 0; r < 2; ++r)
#pragma unroll
        for (u32 f = 0; f < SCORE_FRAGMENTS; ++f)
#pragma unroll
            for (u32 i = 0; i < 2; ++i) {
                float& score = scores[f][2 * r + i];
                score = ex2_approx_ftz(score * problem.scale_log2 - rows.maximum[r]);
                rows.sum[r] += score;
            }
    return rises;
}

// Round the probabilities to MMA operands. Each operand covers 16 keys, which are two fragments of the scores.
__device__ __forceinline__ void round_scores(Probabilities& p, const Scores& scores) {
#pragma unroll
    for (u32 n = 0; n < SCORE_FRAGMENTS / 2; ++n)
#pragma unroll
        for (u32 i = 0; i < 4; ++i) p[n][i] = to_pair(scores[2 * n + i / 2][i % 2 * 2], scores[2 * n + i / 2][i % 2 * 2 + 1]);
}

// Multiply a thread's two rows of the output by `rescale`.
__device__ __forceinline__ void rescale_output(Output& output, const float (&rescale)[2]) {
#pragma unroll
    for (u32 f = 0; f < OUTPUT_FRAGMENTS; ++f)
#pragma unroll
        for (u32 i = 0; i < 4; ++i) output[f][i] *= rescale[i / 2];
}

// Initialize the output and the state of a thread's rows.
__device__ __forceinline__ void clear(Output& output, Rows& rows) {
#pragma unroll
    for (u32 f = 0; f < OUTPUT_FRAGMENTS; ++f)
#pragma unroll
        for (u32 i = 0; i < 4; ++i) output[f][i] = 0.0f;
#pragma unroll
    for (u32 r = 0; r < 2; ++r) {
        rows.maximum[r] = MIN_POWER;
        rows.sum[r] = 0.0f;
    }
}

// ---- Results --------------------------------------------------------------------------------------------------------
struct LogSums {
    float* lse;          // the logarithm of each row's sum, or nullptr
};

// Return the natural logarithm of a row's sum of exp(scaled score), or minus infinity if the row attends to no key. The sum is relative to
// 2^maximum.
__device__ __forceinline__ float log_of_sum(float maximum, float sum) {
    return sum == 0.0f ? -INF : 0.69314718f * (maximum + __log2f(sum));
}

// Return the reciprocal of a row's sum, or 0 if the row attends to no key.
__device__ __forceinline__ float inverse_of_sum(float sum) { return sum == 0.0f ? 0.0f : __fdividef(1.0f, sum); }
// Sum the partial sums of the four threads that share each row.
__device__ __forceinline__ void add_up_sums(float (&sums)[2]) {
#pragma unroll
    for (u32 r = 0; r < 2; ++r) {
        sums[r] += __shfl_xor_sync(0xffffffffu, sums[r], 1);
        sums[r] += __shfl_xor_sync(0xffffffffu, sums[r], 2);
    }
}

// Divide the output by the rows' sums, and store the logarithms of the sums. `row` is the thread's first row.
__device__ __forceinline__ void finish_rows(Output& output, const Rows& rows, const Problem& problem, const LogSums& logs, const Place& place,
                                            u32 row, u32 lane) {
    float sums[2] = {rows.sum[0], rows.sum[1]}, maxima[2] = {rows.maximum[0], rows.maximum[1]}, inverse[2];
    add_up_sums(sums);
#pragma unroll
    for (u32 r = 0; r < 2; ++r) inverse[r] = inverse_of_sum(sums[r]);
    if (logs.lse != nullptr && lane % 4 == 0) {
        float* head = logs.lse + (u64)place.head * problem.q_total + place.q_begin;
#pragma unroll
        for (u32 r = 0; r < 2; ++r)
            if (row + 8 * r < problem.q_length) head[row + 8 * r] = log_of_sum(maxima[r], sums[r]);
    }
    __syncwarp();
    rescale_output(output, inverse);
}

// Write a warp's 16 rows to the tile at `staging`, in the same swizzle as the queries. `row0` is the warp's first row in the tile.
__device__ __forceinline__ void stage_output(const Output& output, u32 staging, u32 row0, u32 lane) {
    const u32 row = row0 + lane % 16;
#pragma unroll
    for (u32 f = 0; f < OUTPUT_FRAGMENTS; f += 2) {   // 16 columns
        const float(&low)[4] = output[f], (&high)[4] = output[f + 1];
        const u32 pairs[4] = {to_pair(low[0], low[1]), to_pair(low[2], low[3]), to_pair(high[0], high[1]), to_pair(high[2], high[3])};
        stmatrix_x4(staging + f / SPAN_VECTORS * TILE_M * SPAN_BYTES + vector_offset(row, f % SPAN_VECTORS + lane / 16), pairs);
    }
}

// Stage a warp's rows in the shared memory of the queries, and write them to global memory with 16-byte stores. `row0` is the warp's first
// row in the tile.
__device__ __forceinline__ void store_rows(const Output& output, const Problem& problem, u16* result, u32 staging, const Place& place,
                                           u32 row0, u32 lane) {
    constexpr u32 VECTORS = V_HEAD_DIM / 8;   // vectors per row
    stage_output(output, staging, row0, lane);
    __syncwarp();
    u16* head = result + place.batch * problem.output_batch + place.head * problem.output_head;
#pragma unroll
    for (u32 i = 0; i < 16 * VECTORS; i += 32) {
        const u32 row = row0 + (i + lane) / VECTORS, vector = (i + lane) % VECTORS;
        const u32 from = staging + vector / SPAN_VECTORS * TILE_M * SPAN_BYTES + vector_offset(row, vector % SPAN_VECTORS);
        const uint4 values = ld_shared_v4_b32(from);
        if (place.row0 + row < problem.q_length) *(uint4*)(head + (place.row0 + row) * problem.output_pitch + 8 * vector) = values;
    }
}

// ---- Loads: TMA fills elements outside the tensors with zeros -------------------------------------------------------
// Load Rows rows of a head in boxes that are one swizzle span wide.
template <u32 Rows, u32 Columns>
__device__ __forceinline__ void load_rows(u32 target, const TensorMap* map, u32 barrier, u32 row, u32 head, u32 batch) {
#pragma unroll
    for (u32 i = 0; i < Columns; i += SPAN)
        cp_async_bulk_tensor_4d_load(target + i / SPAN * Rows * SPAN_BYTES, map, barrier, i, row, head, batch);
}

__device__ __forceinline__ void load_queries(u32 target, const TensorMap* map, u32 barrier, const Place& place) {
    load_rows<TILE_M, HEAD_DIM>(target, map, barrier, place.q_begin + place.row0, place.head, 0);
}

__device__ __forceinline__ void load_keys(u32 target, const TensorMap* map, u32 barrier, u32 block, const Place& place) {
    load_rows<TILE_N, HEAD_DIM>(target, map, barrier, place.k_begin + block * TILE_N, place.kv_head, 0);
}

__device__ __forceinline__ void load_values(u32 target, const TensorMap* map, u32 barrier, u32 block, const Place& place) {
    load_rows<TILE_N, V_HEAD_DIM>(target, map, barrier, place.k_begin + block * TILE_N, place.kv_head, 0);
}

// ---- Rings of keys and values ---------------------------------------------------------------------------------------
using Ring = TmaPipeline<STAGES>;

// Initialize the rings of keys and values. All threads of the CTA must call this function. One thread fills a slot, and each consumer warp
// releases the slot.
__device__ __forceinline__ void init_rings(Ring& k_ring, Ring& v_ring, u32 smem) {
    k_ring.attach(smem + K_FULL_BARRIERS);
    if (threadIdx.x == 0) k_ring.init_barriers(1, CONSUMER_WARPS);
    v_ring.init(smem + V_FULL_BARRIERS, 1, CONSUMER_WARPS);   // the __syncthreads() in init() covers both rings
}

// ---- Producer: one thread -------------------------------------------------------------------------------------------
// Load the keys of a block into the ring's next slot.
__device__ __forceinline__ void produce_keys(Ring& ring, u32 smem, const TensorMap* map, u32 block, const Place& place) {
    ring.acquire();
    ring.expect_tx(K_STAGE_BYTES);
    load_keys(smem + K + ring.stage * K_STAGE_BYTES, map, ring.get_barrier(), block, place);
    ring.advance();
}

// Load the values of a block into the ring's next slot.
__device__ __forceinline__ void produce_values(Ring& ring, u32 smem, const TensorMap* map, u32 block, const Place& place) {
    ring.acquire();
    ring.expect_tx(V_STAGE_BYTES);
    load_values(smem + V + ring.stage * V_STAGE_BYTES, map, ring.get_barrier(), block, place);
    ring.advance();
}

// ---- Consumers ------------------------------------------------------------------------------------------------------
// Compute the scores and the softmax of a block while wgmma multiplies the previous block's probabilities `p` by its values.
template <bool IsMasked>
__device__ __forceinline__ void next_block(Output& output, Rows& rows, Probabilities& p, Ring& k_ring, Ring& v_ring, const Problem& problem,
                                           u32 smem, u32 q, u32 block, u32 row, u32 warpgroup, u32 lane) {
    Scores scores;
    k_ring.wait();
    multiply_keys(scores, q, smem + K + k_ring.stage * K_STAGE_BYTES, warpgroup);
    v_ring.wait();
    multiply_values(output, p, smem + V + v_ring.stage * V_STAGE_BYTES);
    wgmma_wait_group<1>();   // the scores are complete
    float rescale[2];
    const bool rises = softmax<IsMasked>(scores, rows, rescale, problem, row, block * TILE_N, lane);
    // The condition on the sums is always true because sums are never negative. Without this dependence, ptxas would move the next wait
    // before the exponentials.
    __syncwarp();
    if (lane == 0 && !(rows.sum[0] + rows.sum[1] < 0.0f)) k_ring.release_used(k_ring.stage);
    k_ring.advance();
    wgmma_wait_group<0>();   // the output is complete, and `p` may be overwritten
    v_ring.release_used_by_warp(v_ring.stage, lane);
    v_ring.advance();
    round_scores(p, scores);
    if (rises) rescale_output(output, rescale);
}

// Wait for the slots of a block and release them without reading them. Without the waits, this warpgroup could get more than one lap
// ahead of the other warpgroups.
__device__ __forceinline__ void skip_block(Ring& k_ring, Ring& v_ring, u32 lane) {
    k_ring.wait();
    v_ring.wait();
    k_ring.release_used_by_warp(k_ring.stage, lane);
    k_ring.advance();
    v_ring.release_used_by_warp(v_ring.stage, lane);
    v_ring.advance();
}

// Process the blocks of a warpgroup's queries from the last to the first. There must be at least one block. `q` is the shared-memory
// address of the queries, and `row0` is the warpgroup's first query in the sequence.
__device__ __forceinline__ void mainloop(Output& output, Rows& rows, Ring& k_ring, Ring& v_ring, const Problem& problem,
                                         const Blocks& blocks, u32 smem, u32 q, u32 row0, const ThreadPosition& at) {
    const u32 row = row0 + 16 * at.warp + at.lane / 4, last_row = min(row0 + 64, problem.q_length) - 1;
    // Blocks all_seen_begin to all_seen_end - 1 need no mask, because every query attends to every key of these blocks.
    const u32 all_seen_begin = (first_key(problem, last_row) + TILE_N - 1) / TILE_N, all_seen_end = end_key(problem, row0) / TILE_N;
    u32 n = blocks.end - 1;
    // Skip the blocks to which only queries of later warpgroups attend.
    const u32 own_end = max(blocks.begin + 1, (end_key(problem, last_row) + TILE_N - 1) / TILE_N);
#pragma unroll 1
    for (; n + 1 > own_end; --n) skip_block(k_ring, v_ring, at.lane);
    Probabilities p;
    {
        Scores scores;
        float rescale[2];
        k_ring.wait();
        multiply_keys(scores, q, smem + K + k_ring.stage * K_STAGE_BYTES, at.warpgroup);
        wgmma_wait_group<0>();
        k_ring.release_used_by_warp(k_ring.stage, at.lane);
        k_ring.advance();
        if (n >= all_seen_begin && n < all_seen_end) softmax<false>(scores, rows, rescale, problem, row, n * TILE_N, at.lane);
        else softmax<true>(scores, rows, rescale, problem, row, n * TILE_N, at.lane);
        round_scores(p, scores);
    }
    while (n > max(blocks.begin, all_seen_end))
        next_block<true>(output, rows, p, k_ring, v_ring, problem, smem, q, --n, row, at.warpgroup, at.lane);
    while (n > max(blocks.begin, all_seen_begin))
        next_block<false>(output, rows, p, k_ring, v_ring, problem, smem, q, --n, row, at.warpgroup, at.lane);
    while (n > blocks.begin) next_block<true>(output, rows, p, k_ring, v_ring, problem, smem, q, --n, row, at.warpgroup, at.lane);
    v_ring.wait();
    multiply_values(output, p, smem + V + v_ring.stage * V_STAGE_BYTES);
    wgmma_wait_group<0>();
}

// Load the blocks of a tile, from the last to the first.
__device__ __forceinline__ void produce(Ring& k_ring, Ring& v_ring, u32 smem, const TensorMap* k_map, const TensorMap* v_map,
                                        const Place& place, const Blocks& blocks) {
    for (u32 block = blocks.end; block-- > blocks.begin;) {
        produce_keys(k_ring, smem, k_map, block, place);
        produce_values(v_ring, smem, v_map, block, place);
    }
}

// ---- Values beyond the end of a sequence ----------------------------------------------------------------------------
// Set the rows of a slot of values to zero, beginning at `first_row`. These rows belong to keys beyond the end of the sequence. The
// probabilities of these keys are zero, but a NaN in their values would reach the output because 0 times NaN is NaN. All consumer threads
// must call this function and then synchronize.
__device__ __forceinline__ void clear_values(u32 slot, u32 first_row) {
    constexpr u32 VECTORS = V_STAGE_BYTES / TILE_N / 16;   // vectors per row
    for (u32 i = first_row * VECTORS + threadIdx.x; i < TILE_N * VECTORS; i += 32 * CONSUMER_WARPS) {
        const u32 row = i / VECTORS, vector = i % VECTORS;
        st_shared_v4_b32(slot + vector / SPAN_VECTORS * TILE_N * SPAN_BYTES + vector_offset(row, vector % SPAN_VECTORS), uint4{});
    }
    fence_proxy_async_shared_cta();   // order the zeros before accesses by the async proxy (wgmma and the next TMA load)
}

// Compute and store a tile. All threads of the consumer warps must call this function.
__device__ __forceinline__ void consume(Ring& k_ring, Ring& v_ring, const Problem& problem, u32 smem, u16* output_rows,
                                        const LogSums& logs, const Place& place, const Blocks& blocks, const ThreadPosition& at) {
    const u32 row0 = place.row0 + 64 * at.warpgroup;
    Output output;
    Rows rows;
    clear(output, rows);
    mbarrier_wait_parity(smem + Q_BARRIER, 0);
    if (blocks.begin < blocks.end && blocks.end * TILE_N > problem.k_length) {
        v_ring.wait();
        clear_values(smem + V, TILE_N - (blocks.end * TILE_N - problem.k_length));
        bar_sync(CONSUMERS_BARRIER, 32 * CONSUMER_WARPS);   // no warp may read the slot before all zeros are visible
    }
    if (blocks.begin < blocks.end)
        mainloop(output, rows, k_ring, v_ring, problem, blocks, smem, smem + Q, row0, at);
    finish_rows(output, rows, problem, logs, place, row0 + 16 * at.warp + at.lane / 4, at.lane);
    warpgroup_sync(at.warpgroup);   // all warps of the warpgroup must have read the queries before the results overwrite them
    store_rows(output, problem, output_rows + place.q_begin * problem.output_pitch, smem + Q, place, 64 * at.warpgroup + 16 * at.warp, at.lane);
}
}  // namespace cudatma

// Attention, version a3. A producer warp loads keys and values into two rings by TMA. Each CTA computes one tile.
// The softmax of a warpgroup overlaps with its own MMAs and with the MMAs of the other warpgroups.
extern "C" __global__ void __launch_bounds__(384, 1)
attention_a3_bf16_d64_causal_window_varlen_128x64_s2(
    const __grid_constant__ cudatma::TensorMap q_map,
    const __grid_constant__ cudatma::TensorMap k_map,
    const __grid_constant__ cudatma::TensorMap v_map,
    const int* cu_seqlens_q,
    const int* cu_seqlens_k,
    cudatma::u16* output_rows,
    float* lse,
    const __grid_constant__ cudatma::Problem problem) {
    using namespace cudatma;
    extern __shared__ __align__(1024) u8 dynamic_shared[];
    const u32 smem = shared_address(dynamic_shared);
    // The shuffle proves to ptxas that the value is uniform.
    const u32 warp_index = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
    if (threadIdx.x == 0) mbarrier_init(smem + Q_BARRIER, 1);
    Ring k_ring, v_ring;
    init_rings(k_ring, v_ring, smem);
    wait_for_previous_grid();
    Place place = tile_place(problem, blockIdx.x);
    const Problem sequence = sequence_problem(problem, cu_seqlens_q, cu_seqlens_k, place);
    if (place.row0 >= sequence.q_length) return;   // this sequence has fewer tiles than the longest one
    if (warp_index >= CONSUMER_WARPS) {
        setmaxnreg_dec<24>();
        if (warp_index == CONSUMER_WARPS && elect_sync()) {
            mbarrier_arrive_expect_tx(smem + Q_BARRIER, Q_BYTES);
            load_queries(smem + Q, &q_map, smem + Q_BARRIER, place);
            produce(k_ring, v_ring, smem, &k_map, &v_map, place, key_blocks(sequence, place));
        }
        __syncwarp();
    } else {
        setmaxnreg_inc<240>();
        consume(k_ring, v_ring, sequence, smem, output_rows, LogSums{lse}, place, key_blocks(sequence, place),
                ThreadPosition{warp_index / 4, warp_index % 4, laneid()});
    }
}
