// cudatma: kernels/attention_a3.cu.j2 for sm_120a
// config: AttentionConfig
//   version = 'mma_sync'
//   dtype = 'bfloat16'
//   head_dim = 64
//   v_head_dim = 64
//   is_causal = True
//   tile_m = 64
//   tile_n = 64
// 4 warps consume, 1 produce; a CTA takes 41032 B.
// One stage holds
//     8192 B  k 64 x 64 bfloat16, 128B swizzle
//     8192 B  v 64 x 64 bfloat16, 128B swizzle

namespace cudatma {

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// [PTX ISA, Tensor-map] The 128 opaque bytes of a tensor map, which cuTensorMapEncode* fills. A kernel takes a tensor map as a parameter of
// type `const __grid_constant__ TensorMap`.
struct alignas(64) TensorMap {
    u8 bytes[128];
};

// [PTX ISA, cvta] Return the 32-bit shared address of a generic pointer.
__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// [PTX ISA, Special Registers, %laneid] Return this thread's lane. ptxas rereads the special register instead of keeping the value in a
// register.
__device__ __forceinline__ u32 laneid() {
    u32 lane;
    asm("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
}

// [PTX ISA, elect.sync] Return true in exactly one lane of the warp. All 32 lanes must call this function.
__device__ __forceinline__ bool elect_sync() {
    u32 elected;
    asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(elected));
    return elected != 0;
}

// [PTX ISA, griddepcontrol] Wait until the previous kernels of the stream have completed and their writes are visible. Without programmatic
// dependent launch, the function returns at once.
__device__ __forceinline__ void griddepcontrol_wait() {
    asm volatile("griddepcontrol.wait;" : : : "memory");
}

// [PTX ISA, griddepcontrol] Allow the next kernel to start once every CTA has called this function or exited.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
    asm volatile("griddepcontrol.launch_dependents;" : : : "memory");
}

// [PTX ISA, membar / fence, .acq_rel.cta] Order this thread's memory accesses within the CTA. Without this fence, ptxas may issue an
// mbarrier.arrive while an earlier ld.shared is in flight.
__device__ __forceinline__ void fence_acq_rel_cta() {
    asm volatile("fence.acq_rel.cta;" : : : "memory");
}

// [PTX ISA, mbarrier.init] Initialize the barrier at shared address `bar` (8 bytes, 8-byte aligned) for `count` arrivals per phase. Before
// other threads use the barrier, this thread must call fence_mbarrier_init(), and then all threads of the CTA or cluster must synchronize.
__device__ __forceinline__ void mbarrier_init(u32 bar, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" : : "r"(bar), "r"(count) : "memory");
}

// [PTX ISA, mbarrier.arrive] Arrive once with release semantics, so that this thread's earlier writes are visible to waiting threads.
__device__ __forceinline__ void mbarrier_arrive(u32 bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" : : "r"(bar) : "memory");
}

// [PTX ISA, mbarrier.arrive] Make the current phase wait for `bytes` more bytes, and arrive once.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(u32 bar, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" : : "r"(bar), "r"(bytes) : "memory");
}

// [PTX ISA, mbarrier.try_wait] Return whether the phase with this parity has completed. If it has not, the thread may first be suspended
// for a time that the hardware chooses. On a new barrier, parity 1 counts as completed and parity 0 does not.
__device__ __forceinline__ bool mbarrier_try_wait_parity(u32 bar, u32 parity) {
    u32 done;
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done) : "r"(bar), "r"(parity) : "memory");
    return done != 0;
}

// [PTX ISA, mbarrier.try_wait] Wait until the phase with this parity has completed.
// The wait has acquire semantics, so that the bytes that TMA delivered and the earlier writes of the threads that arrived are then visible
// to this thread.
__device__ __forceinline__ void mbarrier_wait_parity(u32 bar, u32 parity) {
    while (!mbarrier_try_wait_parity(bar, parity)) {
    }
}

// [PTX ISA, membar / fence] Make this thread's mbarrier.init visible to the async proxy and the cluster.
__device__ __forceinline__ void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" : : : "memory");
}

// [PTX ISA, cp.async.bulk.tensor] Load the box of `map` that begins at element (c0, c1, ...), where c0 is the innermost coordinate, to
// shared address `dst`. Call this function from one thread. Barrier `bar` counts the bytes of the whole box, because TMA also fills
// elements outside the tensor. `dst` must be 128-byte aligned (1024-byte aligned with the 128-byte swizzle).
__device__ __forceinline__ void cp_async_bulk_tensor_4d_load(u32 dst, const TensorMap* map, u32 bar, int c0, int c1, int c2, int c3) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cta.global.tile.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%3, %4, %5, %6}], [%2];"
                 :: "r"(dst), "l"(map), "r"(bar), "r"(c0), "r"(c1), "r"(c2), "r"(c3) : "memory");
}

// [PTX ISA, ld] Load 16 bytes of shared memory.
__device__ __forceinline__ uint4 ld_shared_v4_b32(u32 smem) {
    uint4 values;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(values.x), "=r"(values.y), "=r"(values.z), "=r"(values.w) : "r"(smem) : "memory");
    return values;
}

// [PTX ISA, ldmatrix] Load 8 x 8 matrices of 16-bit elements into a warp's registers. Lanes 8 i to 8 i + 7 pass the 16-byte aligned shared
// addresses of the rows of matrix i. In r[i], lane l receives elements 2 (l % 4) and 2 (l % 4) + 1 of row l / 4. The _trans variants
// transpose each matrix.
__device__ __forceinline__ void ldmatrix_x4(u32 (&r)[4], u32 addr) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(addr) : "memory");
}

__device__ __forceinline__ void ldmatrix_x4_trans(u32 (&r)[4], u32 addr) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(addr) : "memory");
}

// [PTX ISA, stmatrix] Store 8 x 8 matrices of 16-bit elements from a warp's registers. Lanes 8 i to 8 i + 7 pass the 16-byte aligned shared
// addresses of the rows of matrix i. In r[i], lane l holds elements 2 (l % 4) and 2 (l % 4) + 1 of row l / 4. The _trans variants transpose
// each matrix.
__device__ __forceinline__ void stmatrix_x4(u32 addr, const u32 (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 :: "r"(addr), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
}

// [PTX ISA, mma.m16n8k16] Compute d += a b for a warp. a (16 x 16) and b (16 x 8) are bf16, and d (16 x 8) is fp32. In
// d[0] and d[1], lane l holds columns 2 (l % 4) and 2 (l % 4) + 1 of row l / 4. In d[2] and d[3], it holds the same columns of row l / 4 +
// 8.
__device__ __forceinline__ void mma_m16n8k16_bf16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
        " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// [PTX ISA, ex2] Return 2^x.
__device__ __forceinline__ float ex2_approx_ftz(float x) {
    float y;
    asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// A ring of Stages slots in shared memory. A producer fills the slots, and consumers read them. One pass over all slots is a lap.
//
// Each slot has two mbarriers. `full` completes a phase when the producer has arrived and its bytes have arrived in the slot. Consumers
// wait for this phase before they read the slot. `empty` completes a phase when the consumers have arrived. The producer waits for this
// phase before it refills the slot. Each thread keeps its position (`stage` and `phase`) in registers, starts at (0, 0), and advances once
// per slot:
//
//     producer   acquire()   expect_tx(bytes)   load(.., get_barrier(), ..)   advance()
//     consumer   wait()      read the slot      release()                     advance()
//
// The expected number of bytes must equal the number of loaded bytes. If the expected number is larger, wait() never returns. If it is
// smaller, wait() may return before all data has arrived. A consumer that wrote to the slot with ordinary stores must call
// fence_proxy_async_shared_cta() before it releases the slot. Methods that take a slot operate on that slot in the current lap and do not
// change `stage`.
template <u32 Stages>
struct TmaPipeline {
    u32 base;    // shared address of full[Stages], then empty[Stages]; 8 bytes each
    u32 stage;   // this thread's current slot
    u32 phase;   // parity of the current lap

    // Attach to the ring, initialize its barriers, and call __syncthreads(). All threads of the CTA must call this function. In a cluster,
    // all CTAs must also synchronize before one uses the barriers of another.
    __device__ __forceinline__ void init(u32 base_address, u32 producer_arrivals, u32 consumer_arrivals) {
        attach(base_address);
        if (threadIdx.x == 0 && threadIdx.y == 0 && threadIdx.z == 0) init_barriers(producer_arrivals, consumer_arrivals);
        __syncthreads();
    }

    // Start at slot 0 of the ring whose barriers are at base_address, which must be 8-byte aligned. The barriers are not accessed.
    __device__ __forceinline__ void attach(u32 base_address) {
        base = base_address;
        stage = 0;
        phase = 0;
    }

    // Initialize the barriers. One thread must call this function after attach(), and may use the ring at once. Other threads may use the
    // ring after the CTA or the cluster has synchronized. `producer_arrivals` is the number of calls of expect_tx() or arrive() that fill a
    // slot. `consumer_arrivals` is the number of calls of release*(), in all CTAs of the cluster, that free a slot.
    __device__ __forceinline__ void init_barriers(u32 producer_arrivals, u32 consumer_arrivals) const {
        for (u32 slot = 0; slot < Stages; ++slot) {
            mbarrier_init(get_barrier(slot), producer_arrivals);
            mbarrier_init(empty_barrier(slot), consumer_arrivals);
        }
        fence_mbarrier_init();
    }

    // Return the barrier that counts the bytes of a slot's loads.
    __device__ __forceinline__ u32 get_barrier(u32 slot) const { return base + 8 * slot; }
    __device__ __forceinline__ u32 get_barrier() const { return get_barrier(stage); }

    // Return the barrier on which the consumers of a slot arrive.
    __device__ __forceinline__ u32 empty_barrier(u32 slot) const { return base + 8 * (Stages + slot); }
    __device__ __forceinline__ u32 empty_barrier() const { return empty_barrier(stage); }

    // Producer: wait until the consumers have released the slot. In the first lap, this function returns at once, because the phase with
    // parity 1 of a new barrier counts as completed.
    __device__ __forceinline__ void acquire(u32 slot) const { mbarrier_wait_parity(empty_barrier(slot), phase ^ 1); }
    __device__ __forceinline__ void acquire() const { acquire(stage); }

    // Producer: arrive once and expect `bytes` bytes. Call this function before the loads.
    __device__ __forceinline__ void expect_tx(u32 slot, u32 bytes) const { mbarrier_arrive_expect_tx(get_barrier(slot), bytes); }
    __device__ __forceinline__ void expect_tx(u32 bytes) const { expect_tx(stage, bytes); }

    // Consumer: wait until the slot is full.
    __device__ __forceinline__ void wait(u32 slot) const { mbarrier_wait_parity(get_barrier(slot), phase); }
    __device__ __forceinline__ void wait() const { wait(stage); }

    // Consumer: arrive once after reading the slot. The fence orders the reads before the arrival. ptxas does not guarantee this order, and
    // TMA could refill the slot while the reads are in flight.
    __device__ __forceinline__ void release(u32 slot) const {
        fence_acq_rel_cta();
        mbarrier_arrive(empty_barrier(slot));
    }
    __device__ __forceinline__ void release() const { release(stage); }

    // Advance to the next slot, and toggle the parity when the ring wraps around.
    __device__ __forceinline__ void advance() {
        if (++stage == Stages) {
            stage = 0;
            next_lap();
        }
    }

    // Toggle the parity. Callers that count the slots themselves must call this function once per lap.
    __device__ __forceinline__ void next_lap() { phase ^= 1; }
};

// Wait for the previous kernel of the stream, then allow the next kernel to start. A kernel must not access global memory before this call.
// The next kernel starts only after the wait, so only this kernel can still be running when the next kernel makes the same call.
__device__ __forceinline__ void wait_for_previous_grid() {
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
}

// The position of a thread among the consumers. `warp` is the index of the warp in its warpgroup.
struct ThreadPosition {
    u32 warpgroup, warp, lane;
};

// A divisor that the host has prepared for dividends below 2^31. divide() takes one multiplication and one shift, whereas an integer
// division takes about 25 instructions.
struct Divisor {
    u32 multiplier, shift;   // multiplier = ceil(2^(31 + shift) / divisor), 2^shift >= divisor
};

__device__ __forceinline__ u32 divide(u32 n, const Divisor& by) { return __umulhi(2 * n, by.multiplier) >> by.shift; }

// ---- Conversions between fp32 and pairs of 16-bit values in a register ----------------------------------------------
__device__ __forceinline__ u32 to_pair(float low, float high) {
    u32 d;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
}

}  // namespace cudatma

namespace cudatma {

// ---- Tile -----------------------------------------------------------------------------------------------------------
constexpr u32 TILE_M = 64;   // queries per CTA
constexpr u32 TILE_N = 64;   // keys per block
constexpr u32 HEAD_DIM = 64, V_HEAD_DIM = 64;   // columns of q and k; columns of v and of the result

// ---- Shared memory: byte offsets from a base that is 1024-byte aligned ----------------------------------------------
constexpr u32 K = 0;                          // 16384 B
constexpr u32 V = 16384;                      // 16384 B
constexpr u32 Q = 32768;                      // 8192 B
constexpr u32 Q_BARRIER = 40960;              // 8 B
constexpr u32 K_FULL_BARRIERS = 40968;        // 16 B
constexpr u32 V_FULL_BARRIERS = 41000;        // 16 B
#define INF __int_as_float(0x7f800000)   // NVRTC has no math.h

// The launch parameters that are neither tensor maps nor pointers.
struct Problem {
    u32 tiles_m;                    // number of heads of all sequences
    u32 tiles_n;                    // number of tiles of queries per head
    u32 raster_heads;               // number of heads per raster group
    u32 last_group;                 // first head of the last raster group
    u32 q_length;                   // number of queries per sequence
    u32 k_length;                   // number of keys per sequence
    u32 heads;                      // number of heads of q per sequence
    u32 upper;                      // query i sees keys below i + upper; signed
    float scale_log2;               // scale (or cap) of the scores for exponentials with base 2
    Divisor by_raster_tiles;        // divides by the number of tiles per raster group
    Divisor by_raster_heads;        // divides by raster_heads
    Divisor by_last_heads;          // divides by the number of heads in the last raster group
    Divisor by_heads;               // divides by heads
    Divisor by_group;               // divides by the number of heads of q that share a head of k and v
    u64 output_pitch;               // elements from one row of the result to the next
    u64 output_head;                // elements from one head of the result to the next
    u64 output_batch;               // elements from one sequence of the result to the next
};

// ---- Tiles of queries -----------------------------------------------------------------------------------------------
// A tile consists of queries of one sequence and one head of q. `row0` is its first query, and `kv_head` is the head of k and v to which
// its queries attend.
struct Place {
    u32 row0, head, kv_head, batch;
};

// Return the position of a tile. Tiles are numbered in raster groups of heads, whose keys and values stay in L2. Within a group, the last
// queries of each head come first, because they attend to the most keys. The last group has more heads, so that their short tiles keep all
// SMs busy at the end.
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
typedef u32 Probabilities[TILE_N / 16][4];   // operand A of the MMAs with the values; each covers 16 keys

// Compute scores = q k^T for a block of keys and a warp's 16 queries, which begin at row tile_row of the tile.
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

// Compute output += p v for a block of values, whose rows are keys. ldmatrix transposes the values.
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

// The initial maximum of a row, which is the lowest finite float instead of minus infinity, so that a masked score minus the maximum is
// minus infinity instead of NaN.
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
// this case the rows have new maxima, `rescale` is set, and the caller must multiply the output by `rescale`.
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
// Add up the partial sums of the four threads that share each row.
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
// Load Rows rows of a head in boxes as wide as one span of the swizzle.
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
// `q` is the shared address of the queries. `first` is the warp's first query in the tile.
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

// Process the blocks of keys for a warp's 16 queries, from the last block to the first. `q` is the shared address of the queries. `row0` is
// the first query of the warp's warpgroup in the sequence.
__device__ __forceinline__ void mainloop(Output& output, Rows& rows, Ring& k_ring, Ring& v_ring, const Problem& problem,
                                         const Blocks& blocks, u32 smem, u32 q, u32 row0, const ThreadPosition& at) {
    const u32 first = 64 * at.warpgroup + 16 * at.warp, first_row = row0 + 16 * at.warp, lane = at.lane, row = first_row + lane / 4;
    const u32 last_row = min(first_row + 16, problem.q_length) - 1;
    // Blocks all_seen_begin to all_seen_end - 1 need no mask, because all queries attend to all of their keys.
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
    __syncwarp();   // the results overwrite the queries, which all lanes must have read
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
    // The shuffle shows ptxas that the value is uniform within a warp.
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
