// cudatma: kernels/attention_decode.cu.j2 for sm_90a
// config: AttentionConfig
//   version = 'decode'
//   dtype = 'bfloat16'
//   head_dim = 64
//   v_head_dim = 64
//   has_sink = True
//   tile_m = 64
//   tile_n = 64
//   is_paged = True
//   box_rows = 16
// 4 consumer warps and 1 producer warp; 41032 bytes of shared memory per CTA.
// Arrays of a stage:
//     8192 bytes: keys 64 x 64 bfloat16, 128B swizzle
//     8192 bytes: values 64 x 64 bfloat16, 128B swizzle

// primitives.cu contains
// u8, u16, u32, u64, TensorMap, shared_address, laneid, elect_sync, bar_sync, griddepcontrol_wait,
// griddepcontrol_launch_dependents, fence_proxy_async_shared_cta, mbarrier_init, mbarrier_arrive,
// mbarrier_arrive_expect_tx, mbarrier_try_wait_parity, mbarrier_wait_parity, fence_mbarrier_init,
// cp_async_bulk_tensor_4d_load, prefetch_tensormap, cp_async_16, cp_async_commit_group, cp_async_wait_group,
// ld_shared_b32, ld_shared_v4_b32, st_shared_b32, st_shared_v4_b32, stmatrix_x4, matrix_descriptor, wgmma_fence,
// wgmma_commit_group, wgmma_wait_group, ex2_approx_ftz, TmaPipeline, wait_for_previous_grid, ThreadPosition,
// Divisor, divide, to_pair

namespace cudatma {

// ---- Tile -----------------------------------------------------------------------------------------------------------
constexpr u32 TILE_M = 64;   // rows per CTA
constexpr u32 TILE_N = 64;   // keys per block
constexpr u32 HEAD_DIM = 64, V_HEAD_DIM = 64;   // columns of q and k; columns of v and of the result

// ---- Shared memory: byte offsets from a base that is 1024-byte aligned, with sizes in the comments -------------------
constexpr u32 K = 0;                          // 16384 bytes
constexpr u32 V = 16384;                      // 16384 bytes
constexpr u32 Q = 32768;                      // 8192 bytes
constexpr u32 IS_LAST = 40960;                // 8 bytes
constexpr u32 K_FULL_BARRIERS = 40968;        // 16 bytes
constexpr u32 V_FULL_BARRIERS = 41000;        // 16 bytes
#define INF __int_as_float(0x7f800000)   // NVRTC does not provide math.h

// The launch parameters that are neither tensor maps nor pointers.
struct Problem {
    u32 q_length;                   // number of rows per sequence and KV head, which is queries * group
    u32 k_length;                   // maximum number of keys per sequence
    u32 heads;                      // number of query heads
    u32 queries;                    // number of queries per sequence and query head
    u32 group;                      // number of query heads per KV head
    u32 kv_heads;                   // number of KV heads
    u32 row_tiles;                  // number of row tiles per sequence and KV head
    u32 partial_rows;               // number of rows per tile in the workspace
    u32 page_size;                  // number of keys per page
    u32 table_pitch;                // stride between rows of the page table, in entries
    float scale_log2;               // multiplier for the scores (or their cap) before exp2
    Divisor by_group;               // divides by the number of query heads per KV head
    Divisor by_kv_heads;            // divides by kv_heads
    Divisor by_row_tiles;           // divides by row_tiles
    Divisor by_page_size;           // divides by page_size
    u64 output_pitch;               // stride between rows of the result, in elements
    u64 output_head;                // stride between heads of the result, in elements
    u64 output_batch;               // stride between sequences of the result, in elements
    u64 q_pitch;                    // stride between rows of q, in elements
    u64 q_head;                     // stride between heads of q, in elements
    u64 q_batch;                    // stride between sequences of q, in elements
};

// ---- Tiles of queries -----------------------------------------------------------------------------------------------
// A tile consists of rows of one sequence and one KV head, beginning with row0. Each row is a query of one of the `group` query heads that
// share the KV head. Row r contains query r / group of the group's head r % group. All heads of a query are in the same tile.
struct Place {
    u32 row0, kv_head, batch;
};

// Return the position of a tile.
__device__ __forceinline__ Place tile_place(const Problem& problem, u32 tile) {
    const u32 rest = divide(tile, problem.by_kv_heads), batch = divide(rest, problem.by_row_tiles);
    return Place{(rest - batch * problem.row_tiles) * TILE_M, tile - rest * problem.kv_heads, batch};
}

// Return the problem with k_length set to the number of keys of one sequence. q_length remains the number of rows.
__device__ __forceinline__ Problem sequence_problem(const Problem& problem, const int* seqlens, u32 batch) {
    Problem sequence = problem;
    sequence.k_length = min((u32)max(0, seqlens[batch]), problem.k_length);
    return sequence;
}

// ---- Masks: row r attends to keys first_key(r) to end_key(r) - 1 ----------------------------------------------------
__device__ __forceinline__ int end_key(const Problem& problem, u32 row) {
    return problem.k_length;
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

// Split the blocks among `parts` CTAs, and return part number `part`.
__device__ __forceinline__ Blocks part_of(const Blocks& blocks, u32 part, u32 parts) {
    const u32 count = blocks.end - blocks.begin;
    return Blocks{blocks.begin + part * count / parts, blocks.begin + (part + 1) * count / parts};
}

// ---- Slots: rows of q, k and v, divided into spans as wide as the swizzle -------------------------------------------
constexpr u32 CONSUMER_WARPS = 4;
constexpr u32 STAGES = 2;   // slots of each of the two rings, one of keys and one of values
constexpr u32 KV_BYTES = 2;   // bytes per element of k and v
constexpr u32 K_STAGE_BYTES = KV_BYTES * TILE_N * HEAD_DIM, V_STAGE_BYTES = KV_BYTES * TILE_N * V_HEAD_DIM;
constexpr u32 SPAN_BYTES = 128, SPAN = SPAN_BYTES / KV_BYTES, SPAN_VECTORS = SPAN_BYTES / 16;   // in bytes, elements and vectors
constexpr u32 SWIZZLE = SPAN_BYTES == 128 ? 1 : 2, SWIZZLE_REPEAT_BYTES = 8 * SPAN_BYTES;   // fields of a matrix descriptor
// The named barriers of this kernel. __syncthreads() uses barrier 0.
enum NamedBarrier : u32 {
    CONSUMERS_BARRIER = 1,
};

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
    const float* sink;   // for each head, the scaled score of an additional key whose value is zero
};

// Return the natural logarithm of a row's sum of exp(scaled score), or minus infinity if the row attends to no key. The sum is relative to
// 2^maximum.
__device__ __forceinline__ float log_of_sum(float maximum, float sum) {
    return sum == 0.0f ? -INF : 0.69314718f * (maximum + __log2f(sum));
}

// Add exp(sink) to a row's sum, raise the row's maximum to the sink if the maximum is lower, and return the factor by which the row's
// output must be multiplied.
__device__ __forceinline__ float inverse_of_sum(const LogSums& logs, u32 head, float& maximum, float& sum) {
    const float power = 1.44269504f * logs.sink[head], highest = fmaxf(maximum, power), factor = ex2_approx_ftz(maximum - highest);
    maximum = highest;
    sum = sum * factor + ex2_approx_ftz(power - highest);
    return sum == 0.0f ? 0.0f : __fdividef(factor, sum);
}

// Sum the partial sums of the four threads that share each row.
__device__ __forceinline__ void add_up_sums(float (&sums)[2]) {
#pragma unroll
    for (u32 r = 0; r < 2; ++r) {
        sums[r] += __shfl_xor_sync(0xffffffffu, sums[r], 1);
        sums[r] += __shfl_xor_sync(0xffffffffu, sums[r], 2);
    }
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

// ---- Rings of keys and values ---------------------------------------------------------------------------------------
using Ring = TmaPipeline<STAGES>;

// Initialize the rings of keys and values. All threads of the CTA must call this function. One thread fills a slot, and each consumer warp
// releases the slot.
__device__ __forceinline__ void init_rings(Ring& k_ring, Ring& v_ring, u32 smem) {
    k_ring.attach(smem + K_FULL_BARRIERS);
    if (threadIdx.x == 0) k_ring.init_barriers(1, CONSUMER_WARPS);
    v_ring.init(smem + V_FULL_BARRIERS, 1, CONSUMER_WARPS);   // the __syncthreads() in init() covers both rings
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

// ---- Queries: the consumer threads copy them into swizzled shared memory --------------------------------------------
__device__ __forceinline__ void load_queries(const Problem& problem, u32 smem, const u16* q, const Place& place) {
    constexpr u32 VECTORS = HEAD_DIM / 8;   // vectors per row
    const u16* sequence = q + place.batch * problem.q_batch;
#pragma unroll
    for (u32 i = threadIdx.x; i < TILE_M * VECTORS; i += 32 * CONSUMER_WARPS) {
        const u32 row = i / VECTORS, vector = i % VECTORS, q_row = place.row0 + row;
        const u32 query = divide(q_row, problem.by_group), head = place.kv_head * problem.group + q_row - query * problem.group;
        const bool is_inside = q_row < problem.q_length;
        const u16* source = sequence + (is_inside ? query * problem.q_pitch + head * problem.q_head + 8 * vector : 0);
        const u32 offset = vector / SPAN_VECTORS * TILE_M * SPAN_BYTES + vector_offset(row, vector % SPAN_VECTORS);
        cp_async_16(smem + Q + offset, source, is_inside ? 16 : 0);
    }
    cp_async_commit_group();
    cp_async_wait_group<0>();
    fence_proxy_async_shared_cta();   // wgmma reads the copied rows through the async proxy
}

// ---- Keys and values ------------------------------------------------------------------------------------------------
constexpr u32 BOX_ROWS = 16, BOXES = TILE_N / BOX_ROWS;   // rows per box (a box is within one page); boxes per block

// The cache position of each box of a block.
struct Block {
    int row[BOXES], page[BOXES];
};

// Return the boxes of a block. Boxes beyond the end of the sequence get page -1 because the page table may end there. TMA fills these boxes
// with zeros.
__device__ __forceinline__ Block find_block(const Problem& sequence, const int* page_table, const Place& place, u32 block) {
    Block boxes;
#pragma unroll
    for (u32 i = 0; i < BOXES; ++i) {
        const u32 key = block * TILE_N + i * BOX_ROWS;
        const u32 index = divide(key, sequence.by_page_size);
        boxes.row[i] = key - index * sequence.page_size;
        boxes.page[i] = key < sequence.k_length ? page_table[place.batch * sequence.table_pitch + index] : -1;
    }
    return boxes;
}

// Load a block of keys or values.
template <u32 Columns>
__device__ __forceinline__ void load_block(u32 slot, const TensorMap* map, u32 barrier, const Block& block, u32 kv_head) {
#pragma unroll
    for (u32 i = 0; i < BOXES; ++i)
#pragma unroll
        for (u32 column = 0; column < Columns; column += SPAN)
            cp_async_bulk_tensor_4d_load(slot + (column / SPAN * TILE_N + i * BOX_ROWS) * SPAN_BYTES, map, barrier, column, block.row[i],
                                         kv_head, block.page[i]);
}

// Load the blocks of a part, from the last to the first. Call this function from one thread.
__device__ __forceinline__ void produce(Ring& k_ring, Ring& v_ring, const Problem& sequence, u32 smem, const TensorMap* k_map,
                                        const TensorMap* v_map, const int* page_table, const Place& place, const Blocks& blocks) {
    if (blocks.begin == blocks.end) return;
    Block next = find_block(sequence, page_table, place, blocks.end - 1);
    for (u32 block = blocks.end; block-- > blocks.begin;) {
        const Block current = next;
        if (block > blocks.begin) next = find_block(sequence, page_table, place, block - 1);   // read before waiting for slots
        k_ring.acquire();
        k_ring.expect_tx(K_STAGE_BYTES);
        load_block<HEAD_DIM>(smem + K + k_ring.stage * K_STAGE_BYTES, k_map, k_ring.get_barrier(), current, place.kv_head);
        k_ring.advance();
        v_ring.acquire();
        v_ring.expect_tx(V_STAGE_BYTES);
        load_block<V_HEAD_DIM>(smem + V + v_ring.stage * V_STAGE_BYTES, v_map, v_ring.get_barrier(), current, place.kv_head);
        v_ring.advance();
    }
}

// ---- Results of one CTA ---------------------------------------------------------------------------------------------
// The query and the query head to which a row of the tile belongs.
struct RowPlace {
    u32 query, head;

    __device__ __forceinline__ RowPlace(const Problem& problem, const Place& place, u32 row) {
        query = divide(row, problem.by_group);
        head = place.kv_head * problem.group + row - query * problem.group;
    }

    // Return the address of the row in the result.
    __device__ __forceinline__ u16* output(const Problem& problem, const Place& place, u16* rows) const {
        return rows + place.batch * problem.output_batch + query * problem.output_pitch + head * problem.output_head;
    }

    __device__ __forceinline__ void store_lse(const Problem& problem, const Place& place, float* lse, float value) const {
        lse[((u64)place.batch * problem.heads + head) * problem.queries + query] = value;
    }
};

// Divide a warp's rows by their sums, stage them in the shared memory of the queries, and write them with 16-byte stores.
__device__ __forceinline__ void store_rows(Output& output, const Rows& rows, const Problem& problem, u32 smem, u16* result,
                                           const LogSums& logs, const Place& place, u32 warp, u32 lane) {
    constexpr u32 VECTORS = V_HEAD_DIM / 8;   // vectors per row
    float inverse[2];
#pragma unroll
    for (u32 r = 0; r < 2; ++r) {
        const u32 row = place.row0 + 16 * warp + lane / 4 + 8 * r;
        float maximum = rows.maximum[r], sum = rows.sum[r];
        const RowPlace to(problem, place, row);
        inverse[r] = inverse_of_sum(logs, to.head, maximum, sum);
        if (logs.lse != nullptr && lane % 4 == 0 && row < problem.q_length) to.store_lse(problem, place, logs.lse, log_of_sum(maximum, sum));
    }
    __syncwarp();
    rescale_output(output, inverse);
    stage_output(output, smem + Q, 16 * warp, lane);
    __syncwarp();
#pragma unroll
    for (u32 i = 0; i < 16 * VECTORS; i += 32) {
        const u32 row = 16 * warp + (i + lane) / VECTORS, vector = (i + lane) % VECTORS;
        if (place.row0 + row >= problem.q_length) continue;
        const uint4 values =
            ld_shared_v4_b32(smem + Q + vector / SPAN_VECTORS * TILE_M * SPAN_BYTES + vector_offset(row, vector % SPAN_VECTORS));
        *(uint4*)(RowPlace(problem, place, place.row0 + row).output(problem, place, result) + 8 * vector) = values;
    }
}

// ---- Results of several CTAs that share a tile's keys ---------------------------------------------------------------
// The partial results of one part of a tile: fp32 output rows and, after the rows of all parts of all tiles, the maximum (in powers of 2)
// and the sum of each row.
struct Partials {
    float* rows;
    float2* sums;

    __device__ __forceinline__ Partials(const Problem& problem, float* partials, u32 part) {
        const u64 first = ((u64)blockIdx.x * gridDim.y + part) * problem.partial_rows;
        rows = partials + first * V_HEAD_DIM;
        sums = (float2*)(partials + (u64)gridDim.x * gridDim.y * problem.partial_rows * V_HEAD_DIM) + first;
    }
};

// Store a warp's rows as partial results.
__device__ __forceinline__ void store_partials(const Output& output, const Rows& rows, const Problem& problem, float* partials,
                                               const Place& place, u32 warp, u32 lane) {
    const Partials own(problem, partials, blockIdx.y);
#pragma unroll
    for (u32 r = 0; r < 2; ++r) {
        const u32 row = 16 * warp + lane / 4 + 8 * r;
        if (place.row0 + row >= problem.q_length) continue;
        float* to = own.rows + row * V_HEAD_DIM + lane % 4 * 2;
#pragma unroll
        for (u32 f = 0; f < OUTPUT_FRAGMENTS; ++f) *(float2*)(to + 8 * f) = make_float2(output[f][2 * r], output[f][2 * r + 1]);
        if (lane % 4 == 0) own.sums[row] = make_float2(rows.maximum[r], rows.sum[r]);
    }
}

// Return whether this CTA is the last of the tile's `parts` CTAs to call this function. The stores of the other CTAs are visible to the
// last CTA, which resets the counter to 0. All threads of the consumer warps must call this function.
__device__ __forceinline__ bool is_last_part(u32* counters, u32 smem, u32 parts) {
    bar_sync(CONSUMERS_BARRIER, 32 * CONSUMER_WARPS);   // the atomic below releases the stores of all threads, so they must precede it
    if (threadIdx.x == 0) {
        u32 earlier;
        asm volatile("atom.inc.acq_rel.gpu.global.u32 %0, [%1], %2;"
                     : "=r"(earlier) : "l"(__cvta_generic_to_global(counters + blockIdx.x)), "r"(parts - 1) : "memory");
        st_shared_b32(smem + IS_LAST, earlier == parts - 1);
    }
    bar_sync(CONSUMERS_BARRIER, 32 * CONSUMER_WARPS);
    return ld_shared_b32(smem + IS_LAST) != 0;
}

// Store acc / total to four columns of a row.
__device__ __forceinline__ void store_vector(const Problem& problem, const Place& place, u32 row, u32 vector, const float (&acc)[4],
                                             float maximum, float total, u16* result, const LogSums& logs) {
    const RowPlace to(problem, place, place.row0 + row);
    const float inverse = inverse_of_sum(logs, to.head, maximum, total);
    *(uint2*)(to.output(problem, place, result) + 4 * vector) =
        make_uint2(to_pair(acc[0] * inverse, acc[1] * inverse), to_pair(acc[2] * inverse, acc[3] * inverse));
    if (logs.lse != nullptr && vector == 0) to.store_lse(problem, place, logs.lse, log_of_sum(maximum, total));
}

// Combine the parts of a tile in ascending order, so that the result is bitwise reproducible. Each thread computes four columns of a row at
// a time.
__device__ __forceinline__ void combine(const Problem& problem, float* partials, u32 parts, u16* result, const LogSums& logs,
                                        const Place& place) {
    constexpr u32 VECTORS = V_HEAD_DIM / 4, AT_ONCE = 8;   // vectors per row; parts whose loads are in flight at the same time
    const u32 rows = min(TILE_M, problem.q_length - place.row0);
    for (u32 i = threadIdx.x; i < rows * VECTORS; i += 32 * CONSUMER_WARPS) {
        const u32 row = i / VECTORS, vector = i % VECTORS;
        float maximum = MIN_POWER, total = 0.0f, acc[4] = {};
        for (u32 first = 0; first < parts; first += AT_ONCE) {
            float2 sums[AT_ONCE];
            float4 values[AT_ONCE];
#pragma unroll
            for (u32 p = 0; p < AT_ONCE; ++p) {
                const Partials part(problem, partials, min(first + p, parts - 1));
                sums[p] = __ldcg(part.sums + row);
                values[p] = __ldcg((const float4*)(part.rows + row * V_HEAD_DIM) + vector);
            }
            float next = maximum;
#pragma unroll
            for (u32 p = 0; p < AT_ONCE; ++p) next = fmaxf(next, sums[p].x);
            const float rescale = ex2_approx_ftz(maximum - next);
            maximum = next;
            total *= rescale;
#pragma unroll
            for (u32 c = 0; c < 4; ++c) acc[c] *= rescale;
#pragma unroll
            for (u32 p = 0; p < AT_ONCE; ++p) {
                const float weight = first + p < parts ? ex2_approx_ftz(sums[p].x - next) : 0.0f;
                total += weight * sums[p].y;
                acc[0] += weight * values[p].x;
                acc[1] += weight * values[p].y;
                acc[2] += weight * values[p].z;
                acc[3] += weight * values[p].w;
            }
        }
        store_vector(problem, place, row, vector, acc, maximum, total, result, logs);
    }
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

// Process the blocks of a warpgroup's queries from the last to the first. There must be at least one block. `q` is the shared-memory
// address of the queries, and `row0` is the warpgroup's first query in the sequence.
__device__ __forceinline__ void mainloop(Output& output, Rows& rows, Ring& k_ring, Ring& v_ring, const Problem& problem,
                                         const Blocks& blocks, u32 smem, u32 q, u32 row0, const ThreadPosition& at) {
    const u32 row = row0 + 16 * at.warp + at.lane / 4, last_row = min(row0 + 64, problem.q_length) - 1;
    // Blocks all_seen_begin to all_seen_end - 1 need no mask, because every query attends to every key of these blocks.
    const u32 all_seen_begin = (first_key(problem, last_row) + TILE_N - 1) / TILE_N, all_seen_end = end_key(problem, row0) / TILE_N;
    u32 n = blocks.end - 1;
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
    while (n > max(blocks.begin, all_seen_begin))
        next_block<false>(output, rows, p, k_ring, v_ring, problem, smem, q, --n, row, at.warpgroup, at.lane);
    v_ring.wait();
    multiply_values(output, p, smem + V + v_ring.stage * V_STAGE_BYTES);
    wgmma_wait_group<0>();
}

// Compute the attention of a tile's queries to the keys in `blocks`, one of the `parts` splits of the sequence's keys. All threads of the
// consumer warps must call this function. The last CTA of the tile combines the parts.
__device__ __forceinline__ void consume(Ring& k_ring, Ring& v_ring, const Problem& sequence, u32 smem, const u16* q, u16* output_rows,
                                        const LogSums& logs, float* partials, u32* counters, const Place& place, const Blocks& blocks, u32 parts,
                                        u32 warp, u32 lane) {
    Output output;
    Rows rows;
    load_queries(sequence, smem, q, place);
    clear(output, rows);
    const u32 end = blocks.end * TILE_N;
    if (blocks.begin < blocks.end && end > sequence.k_length) {
        v_ring.wait();
        clear_values(smem + V, TILE_N - (end - sequence.k_length));
    }
    bar_sync(CONSUMERS_BARRIER, 32 * CONSUMER_WARPS);   // no warp may read the queries or the zeros before all threads have written them
    if (blocks.begin < blocks.end)
        mainloop(output, rows, k_ring, v_ring, sequence, blocks, smem, smem + Q, place.row0, ThreadPosition{0, warp, lane});
    add_up_sums(rows.sum);
    if (parts == 1) {
        bar_sync(CONSUMERS_BARRIER, 32 * CONSUMER_WARPS);   // all warps must have read the queries before the results overwrite them
        store_rows(output, rows, sequence, smem, output_rows, logs, place, warp, lane);
        return;
    }
    store_partials(output, rows, sequence, partials, place, warp, lane);
    if (is_last_part(counters, smem, parts)) combine(sequence, partials, parts, output_rows, logs, place);
}
}  // namespace cudatma

// Attention of a few new queries to the keys in a cache. A CTA processes the queries of all heads that share a KV head, and one part of the
// sequence's keys. One warp loads, and four warps multiply. The last CTA of a tile combines the parts.
extern "C" __global__ void __launch_bounds__(160, 1)
attention_decode_bf16_d64_sink_n64_s2_b1_paged16(
    const cudatma::u16* q,
    const __grid_constant__ cudatma::TensorMap k_map,
    const __grid_constant__ cudatma::TensorMap v_map,
    const int* seqlens,
    const int* page_table,
    cudatma::u16* output_rows,
    float* lse,
    const float* sink,
    float* partials,
    cudatma::u32* counters,
    const __grid_constant__ cudatma::Problem problem) {
    using namespace cudatma;
    extern __shared__ __align__(1024) u8 dynamic_shared[];
    const u32 smem = shared_address(dynamic_shared);
    // The shuffle proves to ptxas that the value is uniform.
    const u32 warp_index = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
    if (threadIdx.x == 32 * CONSUMER_WARPS) {
        prefetch_tensormap(&k_map);
        prefetch_tensormap(&v_map);
    }
    Ring k_ring, v_ring;
    init_rings(k_ring, v_ring, smem);
    wait_for_previous_grid();
    const Place place = tile_place(problem, blockIdx.x);
    Problem sequence = sequence_problem(problem, seqlens, place.batch);
    const Blocks of_tile = key_blocks(sequence, place);
    const u32 parts = max(1, min(gridDim.y, of_tile.end - of_tile.begin));
    if (blockIdx.y >= parts) return;   // this sequence has fewer parts than the longest one
    const Blocks blocks = part_of(of_tile, blockIdx.y, parts);
    if (warp_index < CONSUMER_WARPS) {
        const LogSums logs = LogSums{lse, sink};
        consume(k_ring, v_ring, sequence, smem, q, output_rows, logs, partials, counters, place, blocks, parts, warp_index, laneid());
        return;
    }
    if (elect_sync())
        produce(k_ring, v_ring, sequence, smem, &k_map, &v_map, page_table, place, blocks);
    __syncwarp();
}
