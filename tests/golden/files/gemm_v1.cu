// cudatma: kernels/gemm_v1.cu.j2 for sm_90a
// config: GemmConfig
//   version = 'v1'
//   dtype = 'float16'
//   layout = 'RR'
//   tile_m = 128
//   tile_n = 256
//   tile_k = 64
//   stages = 3
//   warpgroups = 2
// 8 consumer warps and no producer warps; 163840 bytes of shared memory per CTA.
// Arrays of a stage:
//    16384 bytes: A 128 x 64 float16, K-major, 128B swizzle
//    32768 bytes: B 64 x 256 float16, N-major, 128B swizzle

// primitives.cu contains
// u8, u16, u32, u64, shared_address, laneid, griddepcontrol_wait, griddepcontrol_launch_dependents,
// fence_proxy_async_shared_cta, cp_async_16, cp_async_commit_group, cp_async_wait_group, ld_shared_v4_b32,
// stmatrix_x4, matrix_descriptor, wgmma_fence, wgmma_commit_group, wgmma_wait_group, wait_for_previous_grid,
// Divisor, divide, to_pair

namespace cudatma {

// ---- Tile -----------------------------------------------------------------------------------------------------------
constexpr u32 TILE_M = 128, TILE_N = 256;   // rows and columns of C per CTA
constexpr u32 TILE_K = 64;   // elements of K per stage
constexpr u32 STAGES = 3;
constexpr u32 THREADS = 256;
constexpr bool A_IS_K_MAJOR = true, B_IS_K_MAJOR = false;   // otherwise M-major or N-major

// ---- Shared memory: byte offsets from a base that is 1024-byte aligned, with sizes in the comments -------------------
constexpr u32 A = 0;                          // 49152 bytes
constexpr u32 B = 49152;                      // 98304 bytes
constexpr u32 STAGING = 147456;               // 16384 bytes

// ---- Slots: one per stage and operand -------------------------------------------------------------------------------
constexpr u32 ELEMENT_BYTES = 2;   // bytes per element of A and B
constexpr u32 SPAN_BYTES = 128, SPAN = SPAN_BYTES / ELEMENT_BYTES;   // row of the 128-byte swizzle in bytes and in elements
constexpr u32 MN_BOX_BYTES = TILE_K * SPAN_BYTES;   // bytes per box of an M-major or N-major operand (SPAN x TILE_K)
constexpr u32 B_SLOT_N = 256;   // columns of B in a slot, which holds whole boxes of an N-major operand
constexpr u32 A_STAGE_BYTES = TILE_M * TILE_K * ELEMENT_BYTES, B_STAGE_BYTES = B_SLOT_N * TILE_K * ELEMENT_BYTES;
constexpr u32 WARPGROUPS = 2, WARPGROUP_M = TILE_M / WARPGROUPS;   // warpgroups per tile; rows per warpgroup
constexpr u32 SWIZZLE_128B = 1, SWIZZLE_REPEAT_BYTES = 8 * SPAN_BYTES;   // fields of a matrix descriptor

// ---- Products -------------------------------------------------------------------------------------------------------
// In each 16 x 8 fragment, a thread holds columns 2 (lane % 4) and 2 (lane % 4) + 1 of rows lane / 4 and lane / 4 + 8.
constexpr u32 FRAGMENTS_16 = WARPGROUP_M / 64, FRAGMENTS_8 = TILE_N / 8;   // fragments per warp along M and along N
constexpr u32 FRAGMENT_STRIDE_M = 64;   // rows from one fragment to the next

// The accumulators of a warp are fragments of 16 x 8 values. Each lane holds four values of each fragment.
typedef float Accumulators[FRAGMENTS_16][FRAGMENTS_8][4];
constexpr u32 MMA_K = 32 / ELEMENT_BYTES;   // elements of K per wgmma

// [PTX ISA, wgmma.mma_async] Issue `d` += `a` * `b` for a warpgroup, or `d` = `a` * `b` if `accumulates` is false. `a` and `b` are matrix
// descriptors. Between wgmma_fence and wgmma_wait_group, only wgmma.mma_async instructions of the same shape may access `d`.
__device__ __forceinline__ void wgmma_m64n256k16_f32_f16_ss_nt(float (&d)[32][4], u64 a, u64 b, bool accumulates = true) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
        "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
        "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
        "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
        "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
        "}, %128, %129, p, 1, 1, 0, 1;\n}"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]),
          "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]), "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3]),
          "+f"(d[8][0]), "+f"(d[8][1]), "+f"(d[8][2]), "+f"(d[8][3]), "+f"(d[9][0]), "+f"(d[9][1]), "+f"(d[9][2]), "+f"(d[9][3]), "+f"(d[10][0]), "+f"(d[10][1]), "+f"(d[10][2]), "+f"(d[10][3]), "+f"(d[11][0]), "+f"(d[11][1]), "+f"(d[11][2]), "+f"(d[11][3]),
          "+f"(d[12][0]), "+f"(d[12][1]), "+f"(d[12][2]), "+f"(d[12][3]), "+f"(d[13][0]), "+f"(d[13][1]), "+f"(d[13][2]), "+f"(d[13][3]), "+f"(d[14][0]), "+f"(d[14][1]), "+f"(d[14][2]), "+f"(d[14][3]), "+f"(d[15][0]), "+f"(d[15][1]), "+f"(d[15][2]), "+f"(d[15][3]),
          "+f"(d[16][0]), "+f"(d[16][1]), "+f"(d[16][2]), "+f"(d[16][3]), "+f"(d[17][0]), "+f"(d[17][1]), "+f"(d[17][2]), "+f"(d[17][3]), "+f"(d[18][0]), "+f"(d[18][1]), "+f"(d[18][2]), "+f"(d[18][3]), "+f"(d[19][0]), "+f"(d[19][1]), "+f"(d[19][2]), "+f"(d[19][3]),
          "+f"(d[20][0]), "+f"(d[20][1]), "+f"(d[20][2]), "+f"(d[20][3]), "+f"(d[21][0]), "+f"(d[21][1]), "+f"(d[21][2]), "+f"(d[21][3]), "+f"(d[22][0]), "+f"(d[22][1]), "+f"(d[22][2]), "+f"(d[22][3]), "+f"(d[23][0]), "+f"(d[23][1]), "+f"(d[23][2]), "+f"(d[23][3]),
          "+f"(d[24][0]), "+f"(d[24][1]), "+f"(d[24][2]), "+f"(d[24][3]), "+f"(d[25][0]), "+f"(d[25][1]), "+f"(d[25][2]), "+f"(d[25][3]), "+f"(d[26][0]), "+f"(d[26][1]), "+f"(d[26][2]), "+f"(d[26][3]), "+f"(d[27][0]), "+f"(d[27][1]), "+f"(d[27][2]), "+f"(d[27][3]),
          "+f"(d[28][0]), "+f"(d[28][1]), "+f"(d[28][2]), "+f"(d[28][3]), "+f"(d[29][0]), "+f"(d[29][1]), "+f"(d[29][2]), "+f"(d[29][3]), "+f"(d[30][0]), "+f"(d[30][1]), "+f"(d[30][2]), "+f"(d[30][3]), "+f"(d[31][0]), "+f"(d[31][1]), "+f"(d[31][2]), "+f"(d[31][3])
        : "l"(a), "l"(b), "r"((u32)accumulates)
        : "memory");
}

// Return the offset in bytes of element k of row `row` in an operand's slot.
template <bool IsKMajor, u32 Rows>
__device__ __forceinline__ constexpr u32 operand_offset(u32 row, u32 k) {
    return IsKMajor ? (k / SPAN * Rows + row) * SPAN_BYTES + ELEMENT_BYTES * (k % SPAN) : row / SPAN * MN_BOX_BYTES + k * SPAN_BYTES;
}

// Return the matrix descriptor of an operand's slot at `address`.
template <bool IsKMajor>
__device__ __forceinline__ u64 operand_descriptor(u32 address) {
    return matrix_descriptor(address, IsKMajor ? 16 : MN_BOX_BYTES, SWIZZLE_REPEAT_BYTES, SWIZZLE_128B);
}

// Advance the address in a descriptor by `bytes`. An addition suffices because the low bits of a descriptor contain the address in units of
// 16 bytes, and a shared-memory address cannot overflow them.
__device__ __forceinline__ u64 advanced(u64 descriptor, u32 bytes) {
    return (descriptor & 0xffffffff00000000) | (static_cast<u32>(descriptor) + bytes / 16);
}

// Return the matrix descriptor of a warpgroup's rows of A in a slot.
__device__ __forceinline__ u64 a_descriptor(u32 smem, u32 slot, u32 warpgroup) {
    const u32 rows = operand_offset<A_IS_K_MAJOR, TILE_M>(warpgroup * WARPGROUP_M, 0);
    return advanced(operand_descriptor<A_IS_K_MAJOR>(smem + A + rows), slot * A_STAGE_BYTES);
}

// Return the matrix descriptor of B in a slot.
__device__ __forceinline__ u64 b_descriptor(u32 smem, u32 slot) {
    return advanced(operand_descriptor<B_IS_K_MAJOR>(smem + B), slot * B_STAGE_BYTES);
}

// Issue the MMAs of a slot as one commit group. The products are added to the accumulators, or replace them if `accumulates` is false.
__device__ __forceinline__ void multiply(Accumulators& acc, u32 smem, u32 slot, u32 warpgroup, bool accumulates) {
    const u64 a = a_descriptor(smem, slot, warpgroup), b = b_descriptor(smem, slot);
    wgmma_fence();
#pragma unroll
    for (u32 k = 0; k < TILE_K; k += MMA_K)
#pragma unroll
        for (u32 m = 0; m < FRAGMENTS_16; ++m)
            wgmma_m64n256k16_f32_f16_ss_nt(acc[m], advanced(a, operand_offset<A_IS_K_MAJOR, TILE_M>(64 * m, k)),
                          advanced(b, operand_offset<B_IS_K_MAJOR, TILE_N>(0, k)), k > 0 || accumulates);
    wgmma_commit_group();
}

// ---- Problem and results --------------------------------------------------------------------------------------------
typedef u16 Out;   // element of C (its bits)

// The launch parameters that are neither tensor maps nor pointers.
struct Problem {
    u32 m;                          // number of rows of the result
    u32 n;                          // number of columns of the result
    u32 k;                          // size of the K dimension
    u32 tiles_m;                    // number of output tiles along M
    u32 tiles_n;                    // number of output tiles along N (a CTA or a cluster computes one tile)
    u32 raster_m;                   // number of rows of tiles per raster group
    u32 k_iterations;               // number of stages per tile
    u32 output_vectors;             // 1 if every row of the result is aligned to 16 bytes
    u32 matrix_tiles_m;             // number of tiles along M per matrix of the batch
    Divisor by_raster_group;        // divides by the number of tiles per raster group
    Divisor by_raster_group_rows;   // divides by raster_m
    Divisor by_last_rows;           // divides by the number of rows of tiles in the last raster group
    Divisor by_matrix_tiles_m;      // divides by matrix_tiles_m
    u64 output_pitch;               // stride between rows of the result, in elements
    u64 output_batch;               // stride between matrices of the result, in elements
    u64 a_pitch;                    // stride between rows (or columns) of A, in elements
    u64 b_pitch;                    // stride between rows (or columns) of B, in elements
    u64 a_batch;                    // stride between matrices of A, in elements
    u64 b_batch;                    // stride between matrices of B, in elements
};

// The first row and column of a tile or of a part of a tile, and the index of its matrix in the batch.
struct Place {
    u32 row0, column0, batch;
};

// Return the position of a tile. `tile_m` counts the rows of tiles across all matrices of the batch.
__device__ __forceinline__ Place tile_place(const Problem& problem, u32 tile_m, u32 tile_n) {
    const u32 batch = divide(tile_m, problem.by_matrix_tiles_m);
    return Place{(tile_m - batch * problem.matrix_tiles_m) * TILE_M, tile_n * TILE_N, batch};
}

// The output and the operands of the epilogue, in global memory.
struct Result {
    Out* output;
};

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

// ---- Stores to C through staging rows in shared memory --------------------------------------------------------------
constexpr u32 WARP_STAGING_BYTES = 16 * SPAN_BYTES;   // bytes of a warp's 16 staging rows
constexpr u32 STAGED_N = 64;   // columns that a warp stages at a time

// Write at most STAGED_N columns of a warp's 16 rows, beginning at fragment n, to shared memory with the 128-byte swizzle.
__device__ __forceinline__ void stage_fragments(const float (&acc)[FRAGMENTS_8][4], u32 staging, u32 n, u32 lane) {
    const u32 row = lane % 16;
#pragma unroll
    for (u32 i = 0; i < min(STAGED_N / 8, FRAGMENTS_8 - n); i += 2) {   // 16 columns
        const float(&low)[4] = acc[n + i], (&high)[4] = acc[n + i + 1];
        const u32 pairs[4] = {to_pair(low[0], low[1]), to_pair(low[2], low[3]), to_pair(high[0], high[1]), to_pair(high[2], high[3])};
        stmatrix_x4(staging + row * SPAN_BYTES + ((i + lane / 16) ^ (row & 7)) * 16, pairs);
    }
}

// Copy a warp's rows to its staging rows, and write them to C with 16-byte stores. `place` is the position of the warp's part.
__device__ __forceinline__ void store_rows(Accumulators& acc, const Problem& problem, const Result& result, u32 staging, const Place& place,
                                           u32 lane) {
    constexpr u32 VECTORS = STAGED_N * sizeof(Out) / 16, ROWS = 32 / VECTORS;   // vectors per row; rows that a warp stores at a time
    Out* output = result.output + place.batch * problem.output_batch;
#pragma unroll
    for (u32 m = 0; m < FRAGMENTS_16; ++m)
#pragma unroll
        for (u32 n = 0; n < FRAGMENTS_8; n += STAGED_N / 8) {
            __syncwarp();   // all lanes must have read the previous columns before staging overwrites them
            stage_fragments(acc[m], staging, n, lane);
            __syncwarp();
#pragma unroll
            for (u32 i = 0; i < 16; i += ROWS) {
                const u32 row = i + lane / VECTORS, vector = lane % VECTORS, column = 8 * n + 16 / sizeof(Out) * vector;
                if (column >= TILE_N) continue;   // the last part may be narrower
                store_vector(problem, output, ld_shared_v4_b32(staging + row * SPAN_BYTES + (vector ^ (row & 7)) * 16),
                             place.row0 + FRAGMENT_STRIDE_M * m + row, place.column0 + column);
            }
        }
}

// Set the position of a tile. Tiles are numbered in groups of raster_m rows of tiles, and column by column within a group. CTAs that run at
// the same time therefore share operands in L2.
__device__ __forceinline__ void tile_position(const Problem& problem, u32 tile, u32& tile_m, u32& tile_n) {
    const u32 raster_group = divide(tile, problem.by_raster_group), first_row = raster_group * problem.raster_m;
    const u32 inside = tile - first_row * problem.tiles_n, rows_left = problem.tiles_m - first_row;
    const bool is_last = rows_left <= problem.raster_m;
    tile_n = divide(inside, is_last ? problem.by_last_rows : problem.by_raster_group_rows);
    tile_m = first_row + inside - tile_n * (is_last ? rows_left : problem.raster_m);
}

// ---- Loads: all threads copy 16-byte vectors to shared memory with the 128-byte swizzle -----------------------------

// Copy one slot of an operand of `rows` x `columns` elements, beginning at (row0, column0). A slot consists of Spans parts, each with Rows
// rows and SPAN columns. Elements outside the operand become zero. `pitch` is the number of elements from one row to the next.
template <u32 Rows, u32 Spans>
__device__ __forceinline__ void load_slot(u32 slot, const u8* operand, u64 pitch, u32 row0, u32 column0, u32 rows, u32 columns) {
#pragma unroll
    for (u32 i = threadIdx.x; i < Rows * Spans * 8; i += THREADS) {
        const u32 row = i / 8 % Rows, span = i / 8 / Rows, vector = i % 8;
        const u32 column = column0 + span * SPAN + vector * (16 / ELEMENT_BYTES);
        const bool is_inside = row0 + row < rows && column < columns;
        const u32 bytes = is_inside ? min(16u, ELEMENT_BYTES * (columns - column)) : 0;
        const u8* source = operand + (is_inside ? ((row0 + row) * pitch + column) * ELEMENT_BYTES : 0);
        cp_async_16(slot + (span * Rows + row) * SPAN_BYTES + (vector ^ (row & 7)) * 16, source, bytes);
    }
}

// Copy this thread's part of stage k of a tile as one cp.async group. The group is empty if k is past the last stage.
__device__ __forceinline__ void load_stage(const Problem& problem, u32 smem, u32 slot, const u8* a, const u8* b, u32 k,
                                           const Place& place) {
    if (k < problem.k_iterations) {
        const u32 a_slot = smem + A + slot * A_STAGE_BYTES, b_slot = smem + B + slot * B_STAGE_BYTES;
        if constexpr (A_IS_K_MAJOR) load_slot<TILE_M, TILE_K / SPAN>(a_slot, a, problem.a_pitch, place.row0, k * TILE_K, problem.m, problem.k);
        else load_slot<TILE_K, TILE_M / SPAN>(a_slot, a, problem.a_pitch, k * TILE_K, place.row0, problem.k, problem.m);
        if constexpr (B_IS_K_MAJOR) load_slot<TILE_N, TILE_K / SPAN>(b_slot, b, problem.b_pitch, place.column0, k * TILE_K, problem.n, problem.k);
        else load_slot<TILE_K, TILE_N / SPAN>(b_slot, b, problem.b_pitch, k * TILE_K, place.column0, problem.k, problem.n);
    }
    cp_async_commit_group();   // commit even an empty group because cp_async_wait_group() counts groups
}
}  // namespace cudatma

// C = A B, version v1. cp.async fills the slots. Each CTA computes one tile. All warps load STAGES - 1 stages ahead and multiply.
extern "C" __global__ void __launch_bounds__(256, 1)
gemm_v1_f16_rr_128x256x64_w2_s3(
    const cudatma::u8* a,
    const cudatma::u8* b,
    cudatma::Out* output,
    const __grid_constant__ cudatma::Problem problem) {
    using namespace cudatma;
    extern __shared__ __align__(1024) u8 dynamic_shared[];
    const u32 smem = shared_address(dynamic_shared);
    // The shuffle proves to ptxas that the value is uniform.
    const u32 warp_index = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), warpgroup = warp_index / 4;
    u32 tile_m, tile_n;
    tile_position(problem, blockIdx.x, tile_m, tile_n);
    Place place = tile_place(problem, tile_m, tile_n);
    const u8* a_matrix = a + place.batch * problem.a_batch * ELEMENT_BYTES;
    const u8* b_matrix = b + place.batch * problem.b_batch * ELEMENT_BYTES;

    wait_for_previous_grid();
    for (u32 k = 0; k < STAGES - 1; ++k) load_stage(problem, smem, k, a_matrix, b_matrix, k, place);
    Accumulators acc;
    u32 slot = 0, free_slot = STAGES - 1;
    for (u32 k = 0; k < problem.k_iterations; ++k) {
        cp_async_wait_group<STAGES - 2>();   // wait for this thread's copies of stage k
        fence_proxy_async_shared_cta();      // wgmma reads the copied rows through the async proxy
        __syncthreads();                     // wait for all threads' copies, and until all warps have multiplied the previous stage
        load_stage(problem, smem, free_slot, a_matrix, b_matrix, k + STAGES - 1, place);
        multiply(acc, smem, slot, warpgroup, k > 0);
        wgmma_wait_group<0>();
        free_slot = slot;
        slot = slot + 1 == STAGES ? 0 : slot + 1;
    }
    place.row0 += warpgroup * WARPGROUP_M + warp_index % 4 * 16;
    store_rows(acc, problem, Result{output}, smem + STAGING + warp_index * WARP_STAGING_BYTES, place, laneid());
}
