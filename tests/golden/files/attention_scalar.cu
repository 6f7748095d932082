// cudatma: kernels/attention_scalar.cu.j2 for sm_90a
// config: AttentionConfig
//   version = 'scalar'
//   dtype = 'bfloat16'
//   head_dim = 64
//   v_head_dim = 64
//   is_causal = True
//   tile_m = 32
//   tile_n = 32
//   stages = 1
// 4 consumer warps and no producer warps; 8192 bytes of shared memory per CTA.
// Arrays of a stage:
//     4096 bytes: keys 32 x 64 bfloat16, 128B swizzle
//     4096 bytes: values 32 x 64 bfloat16, 128B swizzle

// primitives.cu contains
// u8, u16, u32, u64, griddepcontrol_wait, griddepcontrol_launch_dependents, wait_for_previous_grid, Divisor,
// divide, low_to_float, high_to_float, to_pair

namespace cudatma {

// ---- Tile -----------------------------------------------------------------------------------------------------------
constexpr u32 TILE_M = 32;   // queries per CTA
constexpr u32 TILE_N = 32;   // keys per block
constexpr u32 HEAD_DIM = 64, V_HEAD_DIM = 64;   // columns of q and k; columns of v and of the result

// ---- Shared memory: byte offsets from a base that is 1024-byte aligned, with sizes in the comments -------------------
constexpr u32 K = 0;                          // 4096 bytes
constexpr u32 V = 4096;                       // 4096 bytes
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
    u64 q_pitch;                    // stride between rows of q, in elements
    u64 q_head;                     // stride between heads of q, in elements
    u64 q_batch;                    // stride between sequences of q, in elements
    u64 k_pitch;                    // stride between rows of k, in elements
    u64 k_head;                     // stride between heads of k, in elements
    u64 k_batch;                    // stride between sequences of k, in elements
    u64 v_pitch;                    // stride between rows of v, in elements
    u64 v_head;                     // stride between heads of v, in elements
    u64 v_batch;                    // stride between sequences of v, in elements
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

constexpr u32 THREADS = 128;
constexpr u32 PARTS = THREADS / TILE_M;   // threads that share a query
constexpr u32 VECTORS = HEAD_DIM / 8 / PARTS, V_VECTORS = V_HEAD_DIM / 8 / PARTS;   // vectors of 8 elements per thread
static_assert(PARTS == 4, "sum_parts() adds up four lanes");

// Convert 8 elements to fp32.
__device__ __forceinline__ void to_floats(float (&values)[8], uint4 vector) {
    const u32 pairs[4] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
        values[2 * i] = low_to_float(pairs[i]);
        values[2 * i + 1] = high_to_float(pairs[i]);
    }
}

// Copy the rows of a block. Rows past the end of the head, which has `rows` rows, become zero. All threads must call this function.
template <u32 Columns>
__device__ __forceinline__ void load_block(uint4* slot, const u16* head, u64 pitch, u32 row0, u32 rows) {
    for (u32 i = threadIdx.x; i < TILE_N * Columns / 8; i += THREADS) {
        const u32 row = row0 + i / (Columns / 8), vector = i % (Columns / 8);
        slot[i] = row < rows ? *(const uint4*)(head + row * pitch + 8 * vector) : uint4{0, 0, 0, 0};
    }
}

// Return the sum of `x` over the four threads that share a query.
__device__ __forceinline__ float sum_parts(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}
}  // namespace cudatma

// Attention, version scalar. Each thread loops over keys and values in shared memory. Four threads share a query, and each thread processes
// every fourth vector of 8 elements.
extern "C" __global__ void __launch_bounds__(128)
attention_scalar_bf16_d64_causal_32x32_s1(
    const cudatma::u16* q,
    const cudatma::u16* k,
    const cudatma::u16* v,
    cudatma::u16* output_rows,
    float* lse,
    const __grid_constant__ cudatma::Problem problem) {
    using namespace cudatma;
    extern __shared__ __align__(16) u8 dynamic_shared[];
    uint4* keys = (uint4*)(dynamic_shared + K);
    uint4* values = (uint4*)(dynamic_shared + V);
    wait_for_previous_grid();
    const Place place = tile_place(problem, blockIdx.x);
    const Blocks blocks = key_blocks(problem, place);
    const u16* k_head = k + place.batch * problem.k_batch + place.kv_head * problem.k_head;
    const u16* v_head = v + place.batch * problem.v_batch + place.kv_head * problem.v_head;
    const u32 row = place.row0 + threadIdx.x / PARTS, part = threadIdx.x % PARTS;
    const bool is_inside = row < problem.q_length;

    float query[VECTORS][8], output[V_VECTORS][8] = {};
    const u16* q_row = q + place.batch * problem.q_batch + place.head * problem.q_head + (is_inside ? row : 0) * problem.q_pitch;
#pragma unroll
    for (u32 i = 0; i < VECTORS; ++i) to_floats(query[i], *(const uint4*)(q_row + (i * PARTS + part) * 8));

    float maximum = -INF, sum = 0.0f;
    const int end = end_key(problem, row), first = first_key(problem, row);
    for (u32 block = blocks.begin; block < blocks.end; ++block) {
        __syncthreads();   // all threads must have read the previous block before the loads below overwrite it
        load_block<HEAD_DIM>(keys, k_head, problem.k_pitch, block * TILE_N, problem.k_length);
        load_block<V_HEAD_DIM>(values, v_head, problem.v_pitch, block * TILE_N, problem.k_length);
        __syncthreads();
        float scores[TILE_N], highest = maximum;
#pragma unroll
        for (u32 n = 0; n < TILE_N; ++n) {
            float score = 0.0f;
#pragma unroll
            for (u32 i = 0; i < VECTORS; ++i) {
                float key[8];
                to_floats(key, keys[n * (HEAD_DIM / 8) + i * PARTS + part]);
#pragma unroll
                for (u32 e = 0; e < 8; ++e) score += query[i][e] * key[e];
            }
            score = sum_parts(score);
            const int at = block * TILE_N + n;
            scores[n] = at < end && at >= first ? score * problem.scale_log2 : -INF;
            highest = fmaxf(highest, scores[n]);
        }
        // If all scores so far are masked or NaN, the maximum is minus infinity. To avoid the NaN of -INF - -INF, subtract 0 instead.
        const float base = highest == -INF ? 0.0f : highest, rescale = exp2f(maximum - base);
        maximum = highest;
        sum *= rescale;
#pragma unroll
        for (u32 i = 0; i < V_VECTORS; ++i)
#pragma unroll
            for (u32 e = 0; e < 8; ++e) output[i][e] *= rescale;
#pragma unroll
        for (u32 n = 0; n < TILE_N; ++n) {
            const float p = exp2f(scores[n] - base);
            sum += p;
#pragma unroll
            for (u32 i = 0; i < V_VECTORS; ++i) {
                float value[8];
                to_floats(value, values[n * (V_HEAD_DIM / 8) + i * PARTS + part]);
#pragma unroll
                for (u32 e = 0; e < 8; ++e) output[i][e] += p * value[e];
            }
        }
    }

    if (!is_inside) return;
    const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
    u16* result = output_rows + place.batch * problem.output_batch + place.head * problem.output_head + row * problem.output_pitch;
#pragma unroll
    for (u32 i = 0; i < V_VECTORS; ++i) {
        const float(&o)[8] = output[i];
        *(uint4*)(result + (i * PARTS + part) * 8) = uint4{to_pair(o[0] * inverse, o[1] * inverse), to_pair(o[2] * inverse, o[3] * inverse),
                                                           to_pair(o[4] * inverse, o[5] * inverse), to_pair(o[6] * inverse, o[7] * inverse)};
    }
    if (lse != nullptr && part == 0)
        lse[((u64)place.batch * problem.heads + place.head) * problem.q_length + row] =
            sum == 0.0f ? -INF : 0.69314718f * (maximum + __log2f(sum));
}
