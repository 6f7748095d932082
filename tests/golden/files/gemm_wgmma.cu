// cudatma: kernels/gemm_wgmma.cu.j2 for sm_90a
// spec: WgmmaSpec
//   dtype = 'float16'
//   block_m = 128
//   warpgroups = 2
//   stages = 4
// 8 warps consume, 1 produce; a CTA takes 140352 B.
// One stage holds
//    16384 B  a 128 x 64 float16, 128B swizzle
//    16384 B  b 128 x 64 float16, 128B swizzle
// Shared memory, by offset
//        0  a, 65536 B
//    65536  b, 65536 B
//   131072  staging, 9216 B
//   140288  full_barriers, 32 B
//   140320  empty_barriers, 32 B

// [PTX ISA, Asynchronous Warpgroup Level Matrix, Matrix Descriptor] Where an operand lies in shared memory. For rows of K under
// a swizzle: stride_bytes from 8 rows to the next 8, leading_bytes unused. swizzle: 0 none, 1 128B, 2 64B, 3 32B: the numbers run
// the other way than a tensor map's. A later k16 step of the same rows is 32 bytes further: 2 in the descriptor's low bits.
__device__ __forceinline__ u64 matrix_descriptor(u32 address, u32 leading_bytes, u32 stride_bytes, u32 swizzle) {
    return static_cast<u64>((address & 0x3ffff) >> 4) | static_cast<u64>(leading_bytes >> 4) << 16 |
           static_cast<u64>(stride_bytes >> 4) << 32 | static_cast<u64>(swizzle) << 62;
}

// [PTX ISA, wgmma.wait_group] Waits until at most the Newest (0..7) latest groups are in flight.
template <u32 Newest>
__device__ __forceinline__ void wgmma_wait_group() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" : : "n"(Newest) : "memory");
}

// ---- The tile, as named constants -----------------------------------------------------------------------------------
constexpr u32 BLOCK_M = 128;       // rows of M of a CTA's tile: columns of the wgmma
constexpr u32 BLOCK_N = 128;       // columns of N: rows of the wgmmas
constexpr u32 BLOCK_K = 64;        // K of one stage: 128 bytes a row, the swizzle's span
constexpr u32 WARPGROUPS = 2;      // along N, 64 columns each
constexpr u32 CONSUMER_WARPS = 8;
constexpr u32 STAGES = 4;

constexpr u32 N_FRAGMENTS = 1;            // of 16 columns of N in a warp
constexpr u32 M_FRAGMENTS = BLOCK_M / 8;  // of 8 rows of M
constexpr u32 ROW_BYTES = 128;
constexpr u32 SWIZZLE_128B = 1, SWIZZLE_REPEAT_BYTES = 8 * ROW_BYTES;   // in a matrix descriptor

// ---- Shared memory: STAGES slots of each operand, staging rows, barriers; offsets from a 1024-byte aligned base ------
constexpr u32 A_STAGE_BYTES = 16384;
constexpr u32 B_STAGE_BYTES = 16384;
constexpr u32 A = 0;
constexpr u32 B = 65536;
constexpr u32 STAGING = 131072;
constexpr u32 STAGING_ROWS = 32;     // rows of M that a warpgroup stores together
constexpr u32 STAGING_PITCH_BYTES = 144;   // from one row to the next
constexpr u32 STAGING_BYTES = 4608;   // of one warpgroup
constexpr u32 RING_BARRIERS = 140288;
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
    u32 output_vectors;             // 1: every row of the result is aligned to 16 bytes
    Divisor by_raster_group;        // divides by the tiles of a raster group
    Divisor by_raster_group_rows;   // divides by raster_m
    Divisor by_last_rows;           // divides by the rows of tiles of the last raster group
    u64 output_pitch;               // elements from one row to the next
};
// Raster order: tiles are numbered in groups of raster_m rows of tiles, and in each group column by column, so that CTAs
// that run at the same time share both operands in L2.
__device__ __forceinline__ void tile_position(const Problem& problem, u32 tile, u32& tile_m, u32& tile_n) {
    const u32 raster_group = divide(tile, problem.by_raster_group), first_row = raster_group * problem.raster_m;
    const u32 inside = tile - first_row * problem.tiles_n, rows_left = problem.tiles_m - first_row;
    const bool is_last = rows_left <= problem.raster_m;
    tile_n = divide(inside, is_last ? problem.by_last_rows : problem.by_raster_group_rows);
    tile_m = first_row + inside - tile_n * (is_last ? rows_left : problem.raster_m);
}

// ---- Between float16 and fp32: two values in a register -------------------------------------------------------------
__device__ __forceinline__ u32 to_pair(float low, float high) {
    u32 d;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
}
// A warp's accumulators: fragments of 16 columns of N x 8 rows of M, four values a lane.

typedef float Accumulators[N_FRAGMENTS][M_FRAGMENTS][4];

__device__ __forceinline__ void clear(Accumulators& acc) {
#pragma unroll
    for (u32 c = 0; c < N_FRAGMENTS; ++c)
#pragma unroll
        for (u32 r = 0; r < M_FRAGMENTS; ++r)
#pragma unroll
            for (u32 i = 0; i < 4; ++i) acc[c][r][i] = 0.0f;
}

// ---- Epilogue: accumulators to rows of the result -------------------------------------------------------------------

// Eight columns of one row, from shared memory ...
__device__ __forceinline__ uint4 load_vector(u32 smem) {
    uint4 values;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(values.x), "=r"(values.y), "=r"(values.z), "=r"(values.w)
                 : "r"(smem) : "memory");
    return values;
}

// ... to the result.
__device__ __forceinline__ void store_vector(const Problem& problem, u16* output, uint4 values, u32 row, u32 column) {
    if (row >= problem.m || column >= problem.n) return;
    u16* target = output + row * problem.output_pitch + column;
    if (problem.output_vectors && column + 8 <= problem.n) {
        *(uint4*)target = values;
    } else {   // a row that is not 16-byte aligned, or the last columns
        const u32 words[4] = {values.x, values.y, values.z, values.w};
#pragma unroll
        for (u32 i = 0; i < 8; ++i)
            if (column + i < problem.n) target[i] = (u16)(words[i / 2] >> (i % 2 * 16));
    }
}

// A warpgroup stores rows `first` and following of its part of the tile, at most STAGING_ROWS of them, through its staging
// rows: stmatrix.trans turns fragments (columns x rows) into rows, which leave as 16-byte stores. row0, column0: the part's
// first row and column of the result. Before the call all warps have read what they staged before.
__device__ __forceinline__ void store_rows_of_warpgroup(const Accumulators& acc, const Problem& problem, u16* output, u32 smem,
                                                        u32 warpgroup, u32 warp, u32 lane, u32 first, u32 row0, u32 column0) {
    constexpr u32 VECTORS_PER_ROW = 8 * N_FRAGMENTS;   // of eight columns
    constexpr u32 VECTORS_PER_THREAD = (STAGING_ROWS * VECTORS_PER_ROW + 127) / 128;
    const u32 staging = smem + STAGING + warpgroup * STAGING_BYTES, thread = warp * 32 + lane;
    const u32 rows = min(STAGING_ROWS, BLOCK_M - first);   // the last ones may be fewer
    const u32 vectors = rows * VECTORS_PER_ROW;
#pragma unroll
    for (u32 row = 0; row < rows; row += 16)
#pragma unroll
        for (u32 c = 0; c < N_FRAGMENTS; ++c) {
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

// ---- Producer: one thread -------------------------------------------------------------------------------------------
// A box of each operand a stage, in the 128-byte swizzle; what lies outside of the tensors is zero.
__device__ __forceinline__ void produce(Ring& ring, const Problem& problem, const TensorMap* a_map, const TensorMap* b_map,
                                        u32 smem, u32 tile_m, u32 tile_n) {
    for (u32 k = 0; k < problem.k_iterations; ++k, ring.advance()) {
        ring.acquire();
        ring.expect_tx(A_STAGE_BYTES + B_STAGE_BYTES);
        cp_async_bulk_tensor_2d_load(smem + A + ring.stage * A_STAGE_BYTES, a_map, ring.get_barrier(), k * BLOCK_K,
                                     tile_m * BLOCK_M);
        cp_async_bulk_tensor_2d_load(smem + B + ring.stage * B_STAGE_BYTES, b_map, ring.get_barrier(), k * BLOCK_K,
                                     tile_n * BLOCK_N);
    }
}

// ---- Consumers: WARPGROUPS warpgroups, 64 columns of N each -----------------------------------------------------------
__device__ __forceinline__ u64 swizzled_rows(u32 address) {
    return matrix_descriptor(address, 16, SWIZZLE_REPEAT_BYTES, SWIZZLE_128B);
}

// The wgmmas of one stage stay in flight while the next stage is waited for; a slot is released when those that read it are
// complete.
__device__ __forceinline__ void mainloop(Accumulators& acc, Ring& ring, const Problem& problem, u32 smem, u32 warpgroup, u32 lane) {
    u32 previous = 0;   // the slot of the stage before
    for (u32 k = 0; k < problem.k_iterations; ++k, ring.advance()) {
        const u32 a = smem + A + ring.stage * A_STAGE_BYTES;
        const u32 b = smem + B + ring.stage * B_STAGE_BYTES + warpgroup * 64 * ROW_BYTES;
        ring.wait();
        wgmma_fence();
#pragma unroll
        for (u32 inside = 0; inside < ROW_BYTES; inside += 32)   // 16 of K each
            wgmma_m64n128k16_f32_f16_ss(acc[0], swizzled_rows(b + inside), swizzled_rows(a + inside));
        wgmma_commit_group();
        wgmma_wait_group<1>();
        if (k > 0) ring.release_used_by_warp(previous, lane);
        previous = ring.stage;
    }
    wgmma_wait_group<0>();
}

__device__ __forceinline__ void epilogue(const Accumulators& acc, const Problem& problem, u16* output, u32 smem, u32 warpgroup,
                                         u32 warp, u32 lane, u32 tile_m, u32 tile_n) {
    for (u32 first = 0; first < BLOCK_M; first += STAGING_ROWS) {
        if (first > 0) warpgroup_sync(warpgroup);   // all warps have read the rows before
        store_rows_of_warpgroup(acc, problem, output, smem, warpgroup, warp, lane, first, tile_m * BLOCK_M,
                                tile_n * BLOCK_N + warpgroup * 64);
    }
}
}  // namespace cudatma

// Y = A B^T as Y^T = B A^T: columns of N are the rows of the wgmma. Each CTA computes one tile. One thread of the last warp
// produces: it fills the slots of the ring with TMA. The warpgroups before it consume: they multiply and store.
extern "C" __global__ void __launch_bounds__(288, 1)
gemm_wgmma_f16_128x128x64_s4(
    const __grid_constant__ cudatma::TensorMap a_map,
    const __grid_constant__ cudatma::TensorMap b_map,
    cudatma::u16* output,
    const __grid_constant__ cudatma::Problem problem) {
    using namespace cudatma;
    extern __shared__ __align__(1024) u8 dynamic_shared[];
    const u32 smem = shared_address(dynamic_shared);
    // Through a shuffle, so that ptxas knows that it is the same in a whole warp.
    const u32 warp_index = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
    u32 tile_m, tile_n;
    tile_position(problem, blockIdx.x, tile_m, tile_n);

    Ring ring;
    ring.init(smem + RING_BARRIERS, 1, CONSUMER_WARPS);   // one producer; each consumer warp releases a slot
    if (warp_index == CONSUMER_WARPS) {
        if (elect_sync()) {
            prefetch_tensormap(&a_map);
            prefetch_tensormap(&b_map);
            produce(ring, problem, &a_map, &b_map, smem, tile_m, tile_n);
        }
        return;
    }
    const u32 warpgroup = warp_index / 4, warp = warp_index % 4, lane = laneid();
    Accumulators acc;
    clear(acc);
    mainloop(acc, ring, problem, smem, warpgroup, lane);
    epilogue(acc, problem, output, smem, warpgroup, warp, lane, tile_m, tile_n);
}
