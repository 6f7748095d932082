// cudatma: kernels/attention_a3.cu.j2 for sm_120a
// config: AttentionConfig
//   version = 'mma_sync'
//   dtype = 'bfloat16'
//   head_dim = 64
//   v_head_dim = 64
//   is_causal = True
//   tile_m = 64
//   tile_n = 64
// 4 consumer warps and 1 producer warp; 41032 bytes of shared memory per CTA.
// Arrays of a stage:
//     8192 bytes: keys 64 x 64 bfloat16, 128B swizzle
//     8192 bytes: values 64 x 64 bfloat16, 128B swizzle

// primitives.cu contains
// u8, u16, u32, u64, TensorMap, shared_address, laneid, elect_sync, griddepcontrol_wait,
// griddepcontrol_launch_dependents, fence_acq_rel_cta, mbarrier_init, mbarrier_arrive, mbarrier_arrive_expect_tx,
// mbarrier_try_wait_parity, mbarrier_wait_parity, fence_mbarrier_init, cp_async_bulk_tensor_4d_load,
// ld_shared_v4_b32, ldmatrix_x4, ldmatrix_x4_trans, stmatrix_x4, mma_m16n8k16_bf16, ex2_approx_ftz, TmaPipeline,
// wait_for_previous_grid, ThreadPosition, Divisor, divide, to_pair

namespace cudatma {

// ---- Tile -----------------------------------------------------------------------------------------------------------
constexpr u32 TILE_M = 64;   // queries per CTA
constexpr u32 TILE_N = 64;   // keys per block
constexpr u32 HEAD_DIM = 64, V_HEAD_DIM = 64;   // columns of q and k; columns of v and of the result

// ---- Shared memory: byte offsets from a base that is 1024-byte aligned, with sizes in the comments -------------------
constexpr u32 K = 0;                          // 16384 bytes
constexpr u32 V = 16384;                      // 16384 bytes
constexpr u32 Q = 32768;                      // 8192 bytes
constexpr u32 Q_BARRIER = 40960;              // 8 bytes
constexpr u32 K_FULL_BARRIERS = 40968;        // 16 bytes
constexpr u32 V_FULL_BARRIERS = 41000;        // 16 bytes
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
    u32 upper;                      // query i attends to keys below i + upper; signed
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

// ---- Masks: row r attends to keys first_key(r) to end_key(r) - 1 ----------------------------------------------------
__device__ __forceinline__ int end_key(const Problem& problem, u32 row) {
    return min((int)problem.k_length, max(0, (int)(row + problem.upper)));
}

__device__ __forceinline__ int first_key(const Problem& problem, u32 row) {
    return 0;
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
constexpr u32 CONSUMER_WARPS = 4;
constexpr u32 STAGES = 2;   // slots of each of the two rings, one of keys and one of values
constexpr u32 Q_BYTES = 2 * TILE_M * HEAD_DIM;
constexpr u32 KV_BYTES = 2;   // bytes per element of k and v
constexpr u32 K_STAGE_BYTES = KV_BYTES * TILE_N * HEAD_DIM, V_STAGE_BYTES = KV_BYTES * TILE_N * V_HEAD_DIM;
constexpr u32 SPAN_BYTES = 128, SPAN = SPAN_BYTES / KV_BYTES, SPAN_VECTORS = SPAN_BYTES / 16;   // in bytes, elements and vectors
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

// Compute `scores` = `q` `k`^T for a block of keys and a warp's 16 queries, which begin at row tile_row of the tile.
__device__ __forceinline__ void multiply_keys(Scores& scores, u32 q, u32 k, u32 tile_row, u32 lane) {
#pragma unroll
    for (u32 f = 0; f < SCORE_FRAGMENTS; ++f)
#pragma unroll
        for (u32 i = 0; i < 4; ++i) scores[f][i] = 0.0f;
#pragma unroll
    for (u32 d = 0; d < HEAD_DIM; d += 16) {
        const u32 vector = d % SPAN / 8, q_span = q + d / SPAN * TILE_M * SPAN_BYTES, k_span = k + d / SPAN * TILE_N * SPAN_BYTES;
        u32 queries[4];   // lanes 8 to 15 pass addresses of the next 8 rows; lanes 16 to 31 pass the next 8 columns
        ldmatrix_x4(queries, q_span + vector_offset(tile_row + lane % 16, vector + lane / 16));
#pragma unroll
        for (u32 n = 0; n < TILE_N; n += 16) {
            u32 keys[4];   // lanes 8 to 15 pass addresses of the next 8 columns; lanes 16 to 31 pass the next 8 keys
            ldmatrix_x4(keys, k_span + vector_offset(n + lane / 16 * 8 + lane % 8, vector + lane / 8 % 2));
            mma_m16n8k16_bf16(scores[n / 8], queries, keys[0], keys[1]);
            mma_m16n8k16_bf16(scores[n / 8 + 1], queries, keys[2], keys[3]);
        }
    }
}

// Compute `output` += `p` `v` for a block of values, whose rows are keys. ldmatrix transposes the values.
__device__ __forceinline__ void multiply_values(Output& output, const Probabilities& p, u32 v, u32 lane) {
#pragma unroll
    for (u32 n = 0; n < TILE_N; n += 16)
#pragma unroll
        for (u32 d = 0; d < V_HEAD_DIM; d += 16) {
            u32 values[4];   // lanes 8 to 15 pass addresses of the next 8 keys; lanes 16 to 31 pass the next 8 columns
            const u32 span = v + d / SPAN * TILE_N * SPAN_BYTES;
            ldmatrix_x4_trans(values, span + vector_offset(n + lane % 16, d % SPAN / 8 + lane / 16));
            mma_m16n8k16_bf16(output[d / 8], p[n / 16], values[0], values[1]);
            mma_m16n8k16_bf16(output[d / 8 + 1], p[n / 16], values[2], values[3]);
        }
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
        const int end = end_key(problem, row + 8 * r) - column;
#pragma unroll
        for (u32 f = 0; f < SCORE_FRAGMENTS; ++f)
#pragma unroll
            for (u32 i = 0; i < 2; ++i) {
                const int at = 8 * f + i;
                if (at >= end) scores[f][2 * r + i] = -INF;
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
        float* head = logs.lse + ((u64)place.batch * problem.heads + place.head) * problem.q_length;
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
    load_rows<TILE_M, HEAD_DIM>(target, map, barrier, place.row0, place.head, place.batch);
}

__device__ __forceinline__ void load_keys(u32 target, const TensorMap* map, u32 barrier, u32 block, const Place& place) {
    load_rows<TILE_N, HEAD_DIM>(target, map, barrier, block * TILE_N, place.kv_head, place.batch);
}

__device__ __forceinline__ void load_values(u32 target, const TensorMap* map, u32 barrier, u32 block, const Place& place) {
    load_rows<TILE_N, V_HEAD_DIM>(target, map, barrier, block * TILE_N, place.kv_head, place.batch);
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

// Release the slot after this warp's ldmatrix instructions have read it. All lanes of the warp must call this function.
__device__ __forceinline__ void release_read_by_warp(const Ring& ring, u32 lane) {
    __syncwarp();
    if (lane == 0) ring.release();
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
// Process a block of keys: compute the scores and the softmax, and multiply by the values. `row` is the thread's first query in the
// sequence.
// `q` is the shared-memory address of the queries. `first` is the warp's first query in the tile.
template <bool IsMasked>
__device__ __forceinline__ void attend_block(Output& output, Rows& rows, Ring& k_ring, Ring& v_ring, const Problem& problem, u32 smem,
                                             u32 q, u32 block, u32 first, u32 row, u32 lane) {
    Scores scores;
    k_ring.wait();
    multiply_keys(scores, q, smem + K + k_ring.stage * K_STAGE_BYTES, first, lane);
    release_read_by_warp(k_ring, lane);
    k_ring.advance();
    float rescale[2];
    const u32 key0 = block * TILE_N;
    if (softmax<IsMasked>(scores, rows, rescale, problem, row, key0, lane)) rescale_output(output, rescale);
    Probabilities p;
    round_scores(p, scores);
    v_ring.wait();
    multiply_values(output, p, smem + V + v_ring.stage * V_STAGE_BYTES, lane);
    release_read_by_warp(v_ring, lane);
    v_ring.advance();
}

// Process the blocks of keys for a warp's 16 queries, from the last block to the first. `q` is the shared-memory address of the queries.
// `row0` is the first query of the warp's warpgroup in the sequence.
__device__ __forceinline__ void mainloop(Output& output, Rows& rows, Ring& k_ring, Ring& v_ring, const Problem& problem,
                                         const Blocks& blocks, u32 smem, u32 q, u32 row0, const ThreadPosition& at) {
    const u32 first = 64 * at.warpgroup + 16 * at.warp, first_row = row0 + 16 * at.warp, lane = at.lane, row = first_row + lane / 4;
    const u32 last_row = min(first_row + 16, problem.q_length) - 1;
    // Blocks all_seen_begin to all_seen_end - 1 need no mask, because every query attends to every key of these blocks.
    const u32 all_seen_begin = (first_key(problem, last_row) + TILE_N - 1) / TILE_N, all_seen_end = end_key(problem, first_row) / TILE_N;
    for (u32 block = blocks.end; block-- > blocks.begin;) {
        if (block >= all_seen_begin && block < all_seen_end)
            attend_block<false>(output, rows, k_ring, v_ring, problem, smem, q, block, first, row, lane);
        else
            attend_block<true>(output, rows, k_ring, v_ring, problem, smem, q, block, first, row, lane);
    }
}

// Load the blocks of a tile, from the last to the first.
__device__ __forceinline__ void produce(Ring& k_ring, Ring& v_ring, u32 smem, const TensorMap* k_map, const TensorMap* v_map,
                                        const Place& place, const Blocks& blocks) {
    for (u32 block = blocks.end; block-- > blocks.begin;) {
        produce_keys(k_ring, smem, k_map, block, place);
        produce_values(v_ring, smem, v_map, block, place);
    }
}

// Compute and store a tile. All threads of the consumer warps must call this function.
__device__ __forceinline__ void consume(Ring& k_ring, Ring& v_ring, const Problem& problem, u32 smem, u16* output_rows,
                                        const LogSums& logs, const Place& place, const Blocks& blocks, const ThreadPosition& at) {
    const u32 row0 = place.row0 + 64 * at.warpgroup;
    Output output;
    Rows rows;
    clear(output, rows);
    mbarrier_wait_parity(smem + Q_BARRIER, 0);
    if (blocks.begin < blocks.end)
        mainloop(output, rows, k_ring, v_ring, problem, blocks, smem, smem + Q, row0, at);
    finish_rows(output, rows, problem, logs, place, row0 + 16 * at.warp + at.lane / 4, at.lane);
    __syncwarp();   // all lanes must have read the queries before the results overwrite them
    store_rows(output, problem, output_rows, smem + Q, place, 64 * at.warpgroup + 16 * at.warp, at.lane);
}
}  // namespace cudatma

// Attention, version mma_sync. A producer warp loads keys and values into two rings by TMA. Each CTA computes one tile.
extern "C" __global__ void __launch_bounds__(160, 1)
attention_mma_sync_bf16_d64_causal_64x64_s2(
    const __grid_constant__ cudatma::TensorMap q_map,
    const __grid_constant__ cudatma::TensorMap k_map,
    const __grid_constant__ cudatma::TensorMap v_map,
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
    const Place place = tile_place(problem, blockIdx.x);
    if (warp_index >= CONSUMER_WARPS) {
        if (elect_sync()) {
            mbarrier_arrive_expect_tx(smem + Q_BARRIER, Q_BYTES);
            load_queries(smem + Q, &q_map, smem + Q_BARRIER, place);
            produce(k_ring, v_ring, smem, &k_map, &v_map, place, key_blocks(problem, place));
        }
        __syncwarp();
    } else {
        consume(k_ring, v_ring, problem, smem, output_rows, LogSums{lse}, place, key_blocks(problem, place),
                ThreadPosition{warp_index / 4, warp_index % 4, laneid()});
    }
}
