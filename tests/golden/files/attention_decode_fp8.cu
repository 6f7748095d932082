// cudatma: kernels/attention_decode.cu.j2 for sm_90a
// spec: AttentionConfig
//   version = 'decode_fp8'
//   dtype = 'bfloat16'
//   head_dim = 64
//   v_head_dim = 64
//   is_causal = False
//   has_window = False
//   has_softcap = False
//   has_sink = False
//   tile_m = 16
//   tile_n = 128
//   stages = 2
//   q_stages = 1
//   blocks_per_sm = 1
//   is_varlen = False
//   is_paged = True
//   box_rows = 16
// 4 warps consume, 1 produce; a CTA takes 33352 B.
// One stage holds
//     8192 B  k 128 x 64 float8_e4m3fn, 64B swizzle
//     8192 B  v 128 x 64 float8_e4m3fn, 64B swizzle
// Shared memory, by offset
//        0  k, 16384 B
//    16384  v, 16384 B
//    32768  warp_sums, 512 B
//    33280  is_last, 8 B
//    33288  k_full_barriers, 16 B
//    33304  k_empty_barriers, 16 B
//    33320  v_full_barriers, 16 B
//    33336  v_empty_barriers, 16 B

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
constexpr u32 TILE_M = 16;   // queries of a CTA's tile
constexpr u32 TILE_N = 128;   // keys of a block
constexpr u32 HEAD_DIM = 64;   // of q and k
constexpr u32 V_HEAD_DIM = 64;   // of v and the result
constexpr bool HAS_WINDOW = false;

#define INF __int_as_float(0x7f800000)   // NVRTC has no math.h

// Divides 0 .. 2^31 - 1 by a number that the host knows, with a multiplication; a division takes some 25 instructions.
struct Divisor {
    u32 multiplier, shift;     // 2^(31 + shift) / number, rounded up; 2^shift >= number
};

__device__ __forceinline__ u32 divide(u32 n, const Divisor& by) { return __umulhi(2 * n, by.multiplier) >> by.shift; }
// What a launch passes to the kernel, besides tensor maps and pointers: the members that this kernel reads.
struct Problem {
    u32 q_length;                   // rows of a sequence and a head of k: queries of all heads that share it
    u32 k_length;                   // keys that a sequence may have
    u32 heads;                      // of q, in a sequence
    u32 queries;                    // of a sequence and a head
    u32 group;                      // heads of q that share one of k and v
    u32 kv_heads;                   // of k and v
    u32 row_tiles;                  // tiles of rows
    u32 partial_rows;               // rows of a tile that the workspace holds
    u32 page_size;                  // keys of a page
    u32 k_scale_step;               // from the scale of a head of k to that of the next
    u32 v_scale_step;               // from the scale of a head of v to that of the next
    u32 table_pitch;                // entries from one sequence's pages to the next one's
    float scale_log2;               // scale of the scores, or the cap's, in powers of 2
    float v_scale;                  // scale of v, if the kernel is given no array of them
    Divisor by_group;               // divides by the heads of q that share one of k and v
    Divisor by_kv_heads;            // divides by kv_heads
    Divisor by_row_tiles;           // divides by row_tiles
    Divisor by_page_size;           // divides by page_size
    u64 output_pitch;               // elements from one row to the next
    u64 output_head;                // elements from one head of the result to the next
    u64 output_batch;               // elements from one sequence of the result to the next
    u64 q_pitch;                    // elements from one row of q to the next
    u64 q_head;                     // elements from one head of q to the next
    u64 q_batch;                    // elements from one sequence of q to the next
};

// ---- Between bfloat16 and fp32: two values in a register -------------------------------------------------------------
__device__ __forceinline__ u32 to_pair(float low, float high) {
    u32 d;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
}

// Before this call a kernel touches no global memory: the kernel before it in the stream may still run. The next kernel may begin only
// after the wait: what it reads before its own wait (weights, for one) was then written by kernels that have ended, if not by this one.
__device__ __forceinline__ void wait_for_previous_grid() {
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
}

// ---- Where a tile lies ----------------------------------------------------------------------------------------------
// Row r of a sequence and a head of k and v is query r / group of head r % group of those that share it: a whole group is
// in one tile, from row0 on.
struct Place {
    u32 row0, kv_head, batch;
};

__device__ __forceinline__ Place tile_place(const Problem& problem, u32 tile) {
    const u32 rest = divide(tile, problem.by_kv_heads), batch = divide(rest, problem.by_row_tiles);
    return Place{(rest - batch * problem.row_tiles) * TILE_M, tile - rest * problem.kv_heads, batch};
}

// The problem of one sequence, whose k_length is its own; q_length are its rows.
__device__ __forceinline__ Problem sequence_problem(const Problem& problem, const int* seqlens, u32 batch) {
    Problem sequence = problem;
    sequence.k_length = min((u32)max(0, seqlens[batch]), problem.k_length);
    return sequence;
}

// ---- Which keys a row of q sees --------------------------------------------------------------------------------------
// Row r sees keys first_key(r) to end_key(r) - 1.
__device__ __forceinline__ int end_key(const Problem& problem, u32 row) {
    return problem.k_length;
}

__device__ __forceinline__ int first_key(const Problem& problem, u32 row) {
    return 0;
}

// Blocks of keys: begin to end - 1.
struct Blocks {
    u32 begin, end;
};

// Those that the rows of a tile see, all of them or some.
__device__ __forceinline__ Blocks key_blocks(const Problem& problem, const Place& place) {
    const u32 last_row = min(place.row0 + TILE_M, problem.q_length) - 1;
    const u32 end = (end_key(problem, last_row) + TILE_N - 1) / TILE_N;
    return Blocks{min(end, first_key(problem, place.row0) / TILE_N), end};
}

// One of the parts that CTAs take; no part is empty unless there are no blocks at all.
__device__ __forceinline__ Blocks part_of(const Blocks& blocks, u32 part, u32 parts) {
    const u32 count = blocks.end - blocks.begin;
    return Blocks{blocks.begin + part * count / parts, blocks.begin + (part + 1) * count / parts};
}

// ---- Shared memory: slots of rows, in spans as wide as the swizzle --------------------------------------------------------
constexpr u32 CONSUMER_WARPS = 4;
constexpr u32 STAGES = 2;   // blocks of keys, and of values
constexpr u32 K = 0;   // offsets from a 1024-byte aligned base
constexpr u32 V = 16384;
constexpr u32 KV_BYTES = 1;   // of an element
constexpr u32 K_STAGE_BYTES = KV_BYTES * TILE_N * HEAD_DIM, V_STAGE_BYTES = KV_BYTES * TILE_N * V_HEAD_DIM;
constexpr u32 SPAN_BYTES = 64, SPAN = SPAN_BYTES / KV_BYTES, SPAN_VECTORS = SPAN_BYTES / 16;
// Returns the offset of 16 bytes of a row in a span.
__device__ __forceinline__ u32 vector_offset(u32 row, u32 vector) {
    return row * SPAN_BYTES + (vector ^ row / (8 / SPAN_VECTORS) % SPAN_VECTORS) * 16;
}

// Returns the offset of 16 bytes of a row in a slot.
__device__ __forceinline__ u32 slot_offset(u32 row, u32 vector) {
    return vector / SPAN_VECTORS * TILE_N * SPAN_BYTES + vector_offset(row, vector % SPAN_VECTORS);
}

// ---- Products ---------------------------------------------------------------------------------------------------------
// All warps have the same 16 rows, and each its own keys. A thread holds, of rows lane / 4 and lane / 4 + 8, scores of keys 2 (lane % 4)
// and the next of every 8, and columns 4 (lane % 4) to 4 (lane % 4) + 3 of every 16 of the output: [f][i] and [f + 1][i] by turns.
constexpr u32 WARP_KEYS = TILE_N / CONSUMER_WARPS;   // of a block, that a warp multiplies
constexpr u32 SCORE_FRAGMENTS = WARP_KEYS / 8, OUTPUT_FRAGMENTS = V_HEAD_DIM / 8;
typedef u32 Queries[HEAD_DIM / 16][4];
typedef float Scores[SCORE_FRAGMENTS][4];
typedef float Output[OUTPUT_FRAGMENTS][4];
typedef u32 Probabilities[WARP_KEYS / 16][4];

// Two of four e4m3 bytes in fp16, which is exact.
__device__ __forceinline__ u32 low_to_half2(u32 bytes) {
    u32 d;
    asm("{ .reg .b16 l, h; mov.b32 {l, h}, %1; cvt.rn.f16x2.e4m3x2 %0, l; }" : "=r"(d) : "r"(bytes));
    return d;
}

__device__ __forceinline__ u32 high_to_half2(u32 bytes) {
    u32 d;
    asm("{ .reg .b16 l, h; mov.b32 {l, h}, %1; cvt.rn.f16x2.e4m3x2 %0, h; }" : "=r"(d) : "r"(bytes));
    return d;
}

// fp16 in the type of the queries, which is exact for what was e4m3.
__device__ __forceinline__ u32 half2_to_pair(u32 half2) {
    float low, high;
    asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h; }" : "=f"(low), "=f"(high) : "r"(half2));
    return to_pair(low, high);
}

// A step is 16 of the head's columns in another order: a thread has four adjacent ones, two for each half of an operand.
__device__ __forceinline__ void load_queries(Queries& queries, const Problem& problem, const u16* q, const Place& place, u32 lane) {
#pragma unroll
    for (u32 r = 0; r < 2; ++r) {
        const u32 row = place.row0 + lane / 4 + 8 * r, query = divide(row, problem.by_group);
        const u32 head = place.kv_head * problem.group + row - query * problem.group;
        const bool is_inside = row < problem.q_length;
        const uint2* source = (const uint2*)(q + place.batch * problem.q_batch +
                                             (is_inside ? query * problem.q_pitch + head * problem.q_head : 0));
#pragma unroll
        for (u32 step = 0; step < HEAD_DIM / 16; ++step) {
            const uint2 four = is_inside ? source[4 * step + lane % 4] : make_uint2(0, 0);
            queries[step][r] = four.x;
            queries[step][2 + r] = four.y;
        }
    }
}

// scores = q k^T of the rows and a warp's keys, which begin at row0 of the slot.
__device__ __forceinline__ void multiply_keys(Scores& scores, const Queries& queries, u32 k, u32 row0, u32 lane) {
#pragma unroll
    for (u32 f = 0; f < SCORE_FRAGMENTS; ++f)
#pragma unroll
        for (u32 i = 0; i < 4; ++i) scores[f][i] = 0.0f;
#pragma unroll
    for (u32 step = 0; step < HEAD_DIM / 16; step += 2)
#pragma unroll
        for (u32 n = 0; n < WARP_KEYS; n += 16) {
            u32 keys[4];   // lanes 8..15 have the other step, 16..31 the other keys
            ldmatrix_x4(keys, k + slot_offset(row0 + n + lane / 16 * 8 + lane % 8, step + lane / 8 % 2));
#pragma unroll
            for (u32 i = 0; i < 4; ++i)
                mma_m16n8k16_bf16(scores[n / 8 + i / 2], queries[step + i % 2], half2_to_pair(low_to_half2(keys[i])),
                                 half2_to_pair(high_to_half2(keys[i])));
        }
}

// Probabilities are fp16 for every type of the queries, because values are exact in fp16. They are at most 2^MOST_POWER.
__device__ __forceinline__ u32 to_half2(float low, float high) {
    u32 d;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
}

// output += p v for a warp's values, whose rows are keys: ldmatrix transposes pairs of columns, and prmt gives each column its keys.
__device__ __forceinline__ void multiply_values(Output& output, const Scores& p, u32 v, u32 row0, u32 lane) {
#pragma unroll
    for (u32 n = 0; n < WARP_KEYS; n += 16) {
        const float(&low)[4] = p[n / 8], (&high)[4] = p[n / 8 + 1];
        const u32 rows[4] = {to_half2(low[0], low[1]), to_half2(low[2], low[3]), to_half2(high[0], high[1]), to_half2(high[2], high[3])};
#pragma unroll
        for (u32 d = 0; d < V_HEAD_DIM; d += 32) {
            u32 values[4];   // lanes 8..15 have the other keys, 16..31 the other 16 columns
            ldmatrix_x4_trans(values, v + slot_offset(row0 + n + lane % 16, d / 16 + lane / 16));
#pragma unroll
            for (u32 i = 0; i < 4; ++i) values[i] = __byte_perm(values[i], 0, 0x3120);
#pragma unroll
            for (u32 i = 0; i < 4; i += 2) {
                mma_m16n8k16_f16(output[d / 8 + i], rows, low_to_half2(values[i]), low_to_half2(values[i + 1]));
                mma_m16n8k16_f16(output[d / 8 + i + 1], rows, high_to_half2(values[i]), high_to_half2(values[i + 1]));
            }
        }
    }
}

// ---- Softmax ------------------------------------------------------------------------------------------------------------
constexpr float MOST_POWER = 8.0f;   // of 2, that an exponential may reach before the rows of its warp are rescaled

// Below every scaled score but minus infinity, in powers of 2. What a row's exponents refer to until it sees a key: exponents of
// scores of minus infinity are then minus infinity too, and not NaN.
constexpr float LEAST_POWER = -3.402823466e38f;

// Of a thread's two rows: the largest scaled score when the row was last rescaled, in powers of 2, and the thread's part of the sum
// of 2^(scaled score - maximum).
struct Rows {
    float maximum[2], sum[2];
};

__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Scores of keys that a row does not see become minus infinity. row: of the thread's first one. key0: of the block.
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
                if (at >= end || (HAS_WINDOW && at < first)) scores[f][2 * r + i] = -INF;
            }
    }
}

// Scores become 2^(scaled score - maximum). True where a maximum of the warp's rows rose by more than MOST_POWER: rows have their new
// maxima, and the caller multiplies what they added up before by rescale, which is not written otherwise.
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
    const bool rises = __any_sync(0xffffffffu, growth > MOST_POWER);
    if (rises) {
#pragma unroll
        for (u32 r = 0; r < 2; ++r) {
            maximum[r] = fmaxf(maximum[r], rows.maximum[r]);
            maximum[r] = fmaxf(maximum[r], __shfl_xor_sync(0xffffffffu, maximum[r], 1));
            maximum[r] = fmaxf(maximum[r], __shfl_xor_sync(0xffffffffu, maximum[r], 2));
            rescale[r] = exp2_approx(rows.maximum[r] - maximum[r]);
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
                score = exp2_approx(score * problem.scale_log2 - rows.maximum[r]);
                rows.sum[r] += score;
            }
    return rises;
}

__device__ __forceinline__ void rescale_output(Output& output, const float (&rescale)[2]) {
#pragma unroll
    for (u32 f = 0; f < OUTPUT_FRAGMENTS; ++f)
#pragma unroll
        for (u32 i = 0; i < 4; ++i) output[f][i] *= rescale[i / 2];
}

__device__ __forceinline__ void clear(Output& output, Rows& rows) {
#pragma unroll
    for (u32 f = 0; f < OUTPUT_FRAGMENTS; ++f)
#pragma unroll
        for (u32 i = 0; i < 4; ++i) output[f][i] = 0.0f;
#pragma unroll
    for (u32 r = 0; r < 2; ++r) {
        rows.maximum[r] = LEAST_POWER;
        rows.sum[r] = 0.0f;
    }
}

// ---- Results ----------------------------------------------------------------------------------------------------------
// lse: where the logarithms of the rows' sums go; nullptr: nowhere.
struct LogSums {
    float* lse;
};

// The natural logarithm of a row's sum of exp(scale score); minus infinity where it has seen no key. maximum: in powers of 2, which
// the sum is relative to.
__device__ __forceinline__ float log_of_sum(float maximum, float sum) {
    return sum == 0.0f ? -INF : 0.69314718f * (maximum + __log2f(sum));
}

// What a row's output is multiplied by to be divided by its sum; 0 where it has seen no key.
__device__ __forceinline__ float inverse_of_sum(const LogSums& logs, u32 head, float& maximum, float& sum) {
    return sum == 0.0f ? 0.0f : __fdividef(1.0f, sum);
}

// The sums of a row's exponentials, of all its threads.
__device__ __forceinline__ void add_up_sums(float (&sums)[2]) {
#pragma unroll
    for (u32 r = 0; r < 2; ++r) {
        sums[r] += __shfl_xor_sync(0xffffffffu, sums[r], 1);
        sums[r] += __shfl_xor_sync(0xffffffffu, sums[r], 2);
    }
}

constexpr u32 CONSUMERS_BARRIER = 1;   // number of the named barrier of the consumer warps
constexpr u32 IS_LAST = 33280;

// ---- Rings of keys and of values ----------------------------------------------------------------------------------------
constexpr u32 K_BARRIERS = 33288;
constexpr u32 V_BARRIERS = 33320;
using Ring = TmaPipeline<STAGES>;

// All threads of the CTA call it. One thread arrives for a loaded slot; each consumer warp releases it.
__device__ __forceinline__ void init_rings(Ring& k_ring, Ring& v_ring, u32 smem) {
    k_ring.attach(smem + K_BARRIERS);
    if (threadIdx.x == 0) k_ring.init_barriers(1, CONSUMER_WARPS);
    v_ring.init(smem + V_BARRIERS, 1, CONSUMER_WARPS);   // its __syncthreads() serves both rings
}

// Releases the slot after this warp's ldmatrix have read it. The arrival must not overtake them.
__device__ __forceinline__ void release_read_by_warp(const Ring& ring, u32 lane) {
    __syncwarp();
    if (lane == 0) ring.release();
}

// ---- Values beyond the end of a sequence ----------------------------------------------------------------------------------
__device__ __forceinline__ void store_zeros(u32 smem) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" : : "r"(smem), "r"(0) : "memory");
}

// Writes zeros over the values beyond the sequence's end in the slot of its last block: their probabilities are zero, but they may be
// NaNs. All threads of the consumer warps call it, and meet before they use the slot.
__device__ __forceinline__ void clear_values(u32 slot, u32 first_row) {
    constexpr u32 VECTORS = V_STAGE_BYTES / TILE_N / 16;   // of a row
    for (u32 i = first_row * VECTORS + threadIdx.x; i < TILE_N * VECTORS; i += 32 * CONSUMER_WARPS) {
        const u32 row = i / VECTORS, vector = i % VECTORS;
        store_zeros(slot + vector / SPAN_VECTORS * TILE_N * SPAN_BYTES + vector_offset(row, vector % SPAN_VECTORS));
    }
    fence_proxy_async_shared_cta();   // TMA fills the slot again, and wgmma would read it, through the async proxy
}

// ---- Keys and values ----------------------------------------------------------------------------------------------------
constexpr u32 BOX_ROWS = 16, BOXES = TILE_N / BOX_ROWS;   // of a block: each box lies in one page

// Where the boxes of a block lie in the cache.
struct Block {
    int row[BOXES], page[BOXES];
};

// What lies outside of the cache is zero, and so are keys beyond the sequence's last page: its table ends there.
__device__ __forceinline__ Block find_block(const Problem& sequence, const int* page_table, const Place& place, u32 block) {
    Block found;
#pragma unroll
    for (u32 i = 0; i < BOXES; ++i) {
        const u32 key = block * TILE_N + i * BOX_ROWS;
        const u32 index = divide(key, sequence.by_page_size);
        found.row[i] = key - index * sequence.page_size;
        found.page[i] = key < sequence.k_length ? page_table[place.batch * sequence.table_pitch + index] : -1;
    }
    return found;
}

template <u32 Columns>
__device__ __forceinline__ void load_block(u32 slot, const TensorMap* map, u32 barrier, const Block& block, u32 kv_head) {
#pragma unroll
    for (u32 i = 0; i < BOXES; ++i)
#pragma unroll
        for (u32 column = 0; column < Columns; column += SPAN)
            cp_async_bulk_tensor_4d_load(slot + (column / SPAN * TILE_N + i * BOX_ROWS) * SPAN_BYTES, map, barrier, column, block.row[i],
                                         kv_head, block.page[i]);
}

// One thread. The last block comes first.
__device__ __forceinline__ void produce(Ring& k_ring, Ring& v_ring, const Problem& sequence, u32 smem, const TensorMap* k_map,
                                        const TensorMap* v_map, const int* page_table, const Place& place, const Blocks& blocks) {
    if (blocks.begin == blocks.end) return;
    Block next = find_block(sequence, page_table, place, blocks.end - 1);
    for (u32 block = blocks.end; block-- > blocks.begin;) {
        const Block current = next;
        if (block > blocks.begin) next = find_block(sequence, page_table, place, block - 1);   // ahead of the waits for slots
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

// ---- Results: of one CTA, or of the parts of several ------------------------------------------------------------------------
// Where a row's result goes.
struct RowPlace {
    u32 query, head;

    __device__ __forceinline__ RowPlace(const Problem& problem, const Place& place, u32 row) {
        query = divide(row, problem.by_group);
        head = place.kv_head * problem.group + row - query * problem.group;
    }

    __device__ __forceinline__ u16* output(const Problem& problem, const Place& place, u16* rows) const {
        return rows + place.batch * problem.output_batch + query * problem.output_pitch + head * problem.output_head;
    }

    __device__ __forceinline__ void store_lse(const Problem& problem, const Place& place, float* lse, float value) const {
        lse[((u64)place.batch * problem.heads + head) * problem.queries + query] = value;
    }
};

// ---- Across CTAs: the parts of a tile's keys ----------------------------------------------------------------------------------
// For each part of each tile, rows of fp32 sums; behind those of all parts, each row's maximum, in powers of 2, and sum.
struct Partials {
    float* rows;
    float2* sums;

    __device__ __forceinline__ Partials(const Problem& problem, float* partials, u32 part) {
        const u64 first = ((u64)blockIdx.x * gridDim.y + part) * problem.partial_rows;
        rows = partials + first * V_HEAD_DIM;
        sums = (float2*)(partials + (u64)gridDim.x * gridDim.y * problem.partial_rows * V_HEAD_DIM) + first;
    }
};

// Whether this CTA is the last one of `parts` to come here; it sees what the others stored. The counter is 0 again then. The
// threads of all consumer warps call it.
__device__ __forceinline__ bool is_last_part(u32* counters, u32 smem, u32 parts) {
    bar_sync(CONSUMERS_BARRIER, 32 * CONSUMER_WARPS);   // acq_rel at gpu scope covers the other threads' stores, which this orders
    if (threadIdx.x == 0) {
        u32 earlier;
        asm volatile("atom.inc.acq_rel.gpu.global.u32 %0, [%1], %2;"
                     : "=r"(earlier)
                     : "l"(__cvta_generic_to_global(counters + blockIdx.x)), "r"(parts - 1)
                     : "memory");
        asm volatile("st.shared.u32 [%0], %1;" : : "r"(smem + IS_LAST), "r"((u32)(earlier == parts - 1)) : "memory");
    }
    bar_sync(CONSUMERS_BARRIER, 32 * CONSUMER_WARPS);
    u32 is_last;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(is_last) : "r"(smem + IS_LAST) : "memory");
    return is_last != 0;
}

// The result of four columns of a row, acc divided by total.
__device__ __forceinline__ void store_vector(const Problem& problem, const Place& place, u32 row, u32 vector, const float (&acc)[4],
                                             float maximum, float total, u16* result, const LogSums& logs) {
    const RowPlace to(problem, place, place.row0 + row);
    const float inverse = inverse_of_sum(logs, to.head, maximum, total);
    *(uint2*)(to.output(problem, place, result) + 4 * vector) =
        make_uint2(to_pair(acc[0] * inverse, acc[1] * inverse), to_pair(acc[2] * inverse, acc[3] * inverse));
    if (logs.lse != nullptr && vector == 0) to.store_lse(problem, place, logs.lse, log_of_sum(maximum, total));
}

// Adds the parts up in their order, whatever order they arrive in: the result is the same bits every time. A thread has four
// columns of a row.
__device__ __forceinline__ void combine(const Problem& problem, float* partials, u32 parts, u16* result, const LogSums& logs,
                                        const Place& place) {
    constexpr u32 VECTORS = V_HEAD_DIM / 4, AT_ONCE = 8;
    const u32 rows = min(TILE_M, problem.q_length - place.row0);
    for (u32 i = threadIdx.x; i < rows * VECTORS; i += 32 * CONSUMER_WARPS) {
        const u32 row = i / VECTORS, vector = i % VECTORS;
        float maximum = LEAST_POWER, total = 0.0f, acc[4] = {};
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
            const float rescale = exp2_approx(maximum - next);
            maximum = next;
            total *= rescale;
#pragma unroll
            for (u32 c = 0; c < 4; ++c) acc[c] *= rescale;
#pragma unroll
            for (u32 p = 0; p < AT_ONCE; ++p) {
                const float weight = first + p < parts ? exp2_approx(sums[p].x - next) : 0.0f;
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
template <bool IsMasked>
__device__ __forceinline__ void attend_block(Output& output, Rows& rows, const Queries& queries, Ring& k_ring, Ring& v_ring,
                                             const Problem& problem, u32 smem, u32 block, u32 row, u32 warp, u32 lane) {
    Scores scores;
    k_ring.wait();
    multiply_keys(scores, queries, smem + K + k_ring.stage * K_STAGE_BYTES, warp * WARP_KEYS, lane);
    release_read_by_warp(k_ring, lane);
    k_ring.advance();
    float rescale[2];
    if (softmax<IsMasked>(scores, rows, rescale, problem, row, block * TILE_N + warp * WARP_KEYS, lane)) rescale_output(output, rescale);
    v_ring.wait();
    multiply_values(output, scores, smem + V + v_ring.stage * V_STAGE_BYTES, warp * WARP_KEYS, lane);
    release_read_by_warp(v_ring, lane);
    v_ring.advance();
}

constexpr u32 WARP_SUMS = 32768;

// Addresses of a warp's row: the sums of its columns, which take the place of keys and values, and its maximum and sum.
__device__ __forceinline__ u32 warp_row(u32 smem, u32 warp, u32 row) { return smem + K + 4 * (warp * TILE_M + row) * V_HEAD_DIM; }
__device__ __forceinline__ u32 warp_sum(u32 smem, u32 warp, u32 row) { return smem + WARP_SUMS + 8 * (warp * TILE_M + row); }

__device__ __forceinline__ void store_warp_rows(const Output& output, const Rows& rows, u32 smem, u32 warp, u32 lane) {
#pragma unroll
    for (u32 r = 0; r < 2; ++r) {
        const u32 row = lane / 4 + 8 * r;
#pragma unroll
        for (u32 f = 0; f < OUTPUT_FRAGMENTS; f += 2)
            asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};"
                         :
                         : "r"(warp_row(smem, warp, row) + 4 * (8 * f + lane % 4 * 4)), "f"(output[f][2 * r]), "f"(output[f + 1][2 * r]),
                           "f"(output[f][2 * r + 1]), "f"(output[f + 1][2 * r + 1])
                         : "memory");
        if (lane % 4 == 0)
            asm volatile("st.shared.v2.f32 [%0], {%1, %2};" : : "r"(warp_sum(smem, warp, row)), "f"(rows.maximum[r]), "f"(rows.sum[r]) : "memory");
    }
}

// Adds the warps up: four columns of a row, which becomes its result, or the CTA's part of it.
__device__ __forceinline__ void add_up_warps(const Problem& problem, u32 smem, float v_scale, u16* result, const LogSums& logs,
                                             float* partials, const Place& place, u32 parts) {
    constexpr u32 VECTORS = V_HEAD_DIM / 4;
    const u32 count = min(TILE_M, problem.q_length - place.row0);
    for (u32 i = threadIdx.x; i < count * VECTORS; i += 32 * CONSUMER_WARPS) {
        const u32 row = i / VECTORS, vector = i % VECTORS;
        float2 sums[CONSUMER_WARPS];
        float maximum = LEAST_POWER, total = 0.0f, acc[4] = {};
#pragma unroll
        for (u32 w = 0; w < CONSUMER_WARPS; ++w) {
            asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(sums[w].x), "=f"(sums[w].y) : "r"(warp_sum(smem, w, row)) : "memory");
            maximum = fmaxf(maximum, sums[w].x);
        }
#pragma unroll
        for (u32 w = 0; w < CONSUMER_WARPS; ++w) {
            float4 values;
            asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                         : "=f"(values.x), "=f"(values.y), "=f"(values.z), "=f"(values.w)
                         : "r"(warp_row(smem, w, row) + 16 * vector)
                         : "memory");
            const float weight = exp2_approx(sums[w].x - maximum), scaled = weight * v_scale;
            total += weight * sums[w].y;
            acc[0] += scaled * values.x;
            acc[1] += scaled * values.y;
            acc[2] += scaled * values.z;
            acc[3] += scaled * values.w;
        }
        if (parts == 1) {
            store_vector(problem, place, row, vector, acc, maximum, total, result, logs);
            continue;
        }
        const Partials own(problem, partials, blockIdx.y);
        *((float4*)(own.rows + row * V_HEAD_DIM) + vector) = make_float4(acc[0], acc[1], acc[2], acc[3]);
        if (vector == 0) own.sums[row] = make_float2(maximum, total);
    }
}

// A consumer warp. blocks: the CTA's part of the tile's keys, one of `parts`.
__device__ __forceinline__ void consume(Ring& k_ring, Ring& v_ring, const Problem& sequence, float v_scale, u32 smem, const u16* q,
                                        u16* output_rows, const LogSums& logs, float* partials, u32* counters, const Place& place,
                                        const Blocks& blocks, u32 parts, u32 warp, u32 lane) {
    Queries queries;
    Output output;
    Rows rows;
    load_queries(queries, sequence, q, place, lane);
    clear(output, rows);
    const u32 end = blocks.end * TILE_N, row = place.row0 + lane / 4;
    if (blocks.begin < blocks.end && end > sequence.k_length) {
        v_ring.wait();
        clear_values(smem + V, TILE_N - (end - sequence.k_length));
        bar_sync(CONSUMERS_BARRIER, 32 * CONSUMER_WARPS);
    }
    // Blocks from all_seen_begin to all_seen_end - 1 are seen by all rows.
    const u32 last_row = min(place.row0 + TILE_M, sequence.q_length) - 1;
    const u32 all_seen_begin = (first_key(sequence, last_row) + TILE_N - 1) / TILE_N, all_seen_end = end_key(sequence, place.row0) / TILE_N;
    for (u32 block = blocks.end; block-- > blocks.begin;) {
        if (block >= all_seen_begin && block < all_seen_end)
            attend_block<false>(output, rows, queries, k_ring, v_ring, sequence, smem, block, row, warp, lane);
        else
            attend_block<true>(output, rows, queries, k_ring, v_ring, sequence, smem, block, row, warp, lane);
    }
    add_up_sums(rows.sum);
    bar_sync(CONSUMERS_BARRIER, 32 * CONSUMER_WARPS);   // all have read the keys and values, whose place their sums take
    store_warp_rows(output, rows, smem, warp, lane);
    bar_sync(CONSUMERS_BARRIER, 32 * CONSUMER_WARPS);
    add_up_warps(sequence, smem, v_scale, output_rows, logs, partials, place, parts);
    if (parts > 1 && is_last_part(counters, smem, parts)) combine(sequence, partials, parts, output_rows, logs, place);
}
}  // namespace cudatma

// Attention of a few new queries to a cache. A CTA has the queries of all heads that share a head of k and v, and a part of the
// sequence's keys. One warp loads, four warps multiply. The last CTA of a tile adds up the parts.
extern "C" __global__ void __launch_bounds__(160, 1)
attention_decode_fp8_bf16_d64_n128_s2_b1_paged16(
    const cudatma::u16* q,
    const __grid_constant__ cudatma::TensorMap k_map,
    const __grid_constant__ cudatma::TensorMap v_map,
    const int* seqlens,
    const int* page_table,
    cudatma::u16* output_rows,
    float* lse,
    float* partials,
    cudatma::u32* counters,
    const float* k_scale,
    const float* v_scale,
    const __grid_constant__ cudatma::Problem problem) {
    using namespace cudatma;
    extern __shared__ __align__(1024) u8 dynamic_shared[];
    const u32 smem = shared_address(dynamic_shared);
    // Through a shuffle, so that ptxas knows that it is the same in a whole warp.
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
    if (blockIdx.y >= parts) return;   // this sequence has fewer parts than the longest
    const Blocks blocks = part_of(of_tile, blockIdx.y, parts);
    if (warp_index < CONSUMER_WARPS) {
        const LogSums logs = LogSums{lse};
        // The scores are multiplied by the scale of the keys, and the result by the scale of the values.
        float& of_keys = sequence.scale_log2;
        if (k_scale != nullptr) of_keys *= k_scale[place.kv_head * problem.k_scale_step];
        if (of_keys < 1.2e-38f) of_keys = 1.2e-38f;   // zero times a masked score would be NaN
        const float of_values = v_scale != nullptr ? v_scale[place.kv_head * problem.v_scale_step] : problem.v_scale;
        consume(k_ring, v_ring, sequence, of_values, smem, q, output_rows, logs, partials, counters, place, blocks, parts, warp_index,
                laneid());
        return;
    }
    if (elect_sync())
        produce(k_ring, v_ring, sequence, smem, &k_map, &v_map, page_table, place,
                blocks);
    __syncwarp();
}
