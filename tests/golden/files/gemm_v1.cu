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
// 8 warps consume, 0 produce; a CTA takes 163840 B.
// One stage holds
//    16384 B  a 128 x 64 float16, K-major, 128B swizzle
//    32768 B  b 64 x 256 float16, N-major, 128B swizzle
// Shared memory, by offset
//        0  a, 49152 B
//    49152  b, 98304 B
//   147456  staging, 16384 B

namespace cudatma {

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// [PTX ISA, cvta] Return the 32-bit shared address of a generic pointer, which the other primitives take.
__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// [PTX ISA, Special Registers, %laneid] Return this thread's lane. ptxas reads the register again rather than keep the value.
__device__ __forceinline__ u32 laneid() {
    u32 lane;
    asm("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
}

// [PTX ISA, griddepcontrol] Wait until the previous kernels of the stream have completed and their writes are visible.
// Return at once unless this is a programmatic dependent launch.
__device__ __forceinline__ void griddepcontrol_wait() {
    asm volatile("griddepcontrol.wait;" : : : "memory");
}

// [PTX ISA, griddepcontrol] Allow the next kernel to start once every CTA has called this or exited.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
    asm volatile("griddepcontrol.launch_dependents;" : : : "memory");
}

// [PTX ISA, membar / fence, .proxy.async] Order this thread's ordinary accesses to shared memory before later accesses of the
// async proxy: TMA stores, wgmma operands, and TMA loads into a slot that ordinary stores wrote.
__device__ __forceinline__ void fence_proxy_async_shared_cta() {
    asm volatile("fence.proxy.async.shared::cta;" : : : "memory");
}

// [PTX ISA, cp.async] Copy 16 bytes from global memory to shared address `dst`, bypassing L1. Only the first `src_bytes` (0..16)
// are read; the rest is zero. Both addresses are aligned to 16.
__device__ __forceinline__ void cp_async_16(u32 dst, const void* src, u32 src_bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :
                 : "r"(dst), "l"(__cvta_generic_to_global(src)), "r"(src_bytes)
                 : "memory");
}

// [PTX ISA, cp.async.commit_group] Make one group of this thread's cp.asyncs since the last commit.
__device__ __forceinline__ void cp_async_commit_group() {
    asm volatile("cp.async.commit_group;" : : : "memory");
}

// [PTX ISA, cp.async.wait_group] Wait until at most Pending of this thread's groups have not completed.
template <u32 Pending>
__device__ __forceinline__ void cp_async_wait_group() {
    asm volatile("cp.async.wait_group %0;" : : "n"(Pending) : "memory");
}

// [PTX ISA, stmatrix] Store 8 x 8 matrices of 16-bit elements from a warp's registers: lanes 8 i .. 8 i + 7 hold the shared addresses
// (aligned to 16) of the rows of matrix i; lane l has in r[i] elements 2 (l % 4), 2 (l % 4) + 1 of row l / 4.
// _trans transposes them.
__device__ __forceinline__ void stmatrix_x4(u32 addr, const u32 (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 :
                 : "r"(addr), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}

// [PTX ISA, Asynchronous Warpgroup Level Matrix, Matrix Descriptor] Return the descriptor of an operand in shared memory.
// swizzle: 0 none, 1 128B, 2 64B, 3 32B; a tensor map numbers them the other way round.
// K-major rows under a swizzle: stride_bytes leads from 8 rows to the next 8; leading_bytes is not used. The next k16 step is 32
// bytes further, which adds 2 to the descriptor.
// M-major or N-major rows (a transposed operand): stride_bytes leads from 8 of K to the next 8, leading_bytes from 64 of M or N to
// the next 64.
__device__ __forceinline__ u64 matrix_descriptor(u32 address, u32 leading_bytes, u32 stride_bytes, u32 swizzle) {
    return static_cast<u64>((address & 0x3ffff) >> 4) | static_cast<u64>(leading_bytes >> 4) << 16 |
           static_cast<u64>(stride_bytes >> 4) << 32 | static_cast<u64>(swizzle) << 62;
}

// [PTX ISA, wgmma.fence] Order the warpgroup's earlier register writes before the wgmmas that follow.
__device__ __forceinline__ void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" : : : "memory");
}

// [PTX ISA, wgmma.commit_group] Make one group of the wgmmas since the last commit.
__device__ __forceinline__ void wgmma_commit_group() {
    asm volatile("wgmma.commit_group.sync.aligned;" : : : "memory");
}

// [PTX ISA, wgmma.wait_group] Wait until at most Newest (0..7) groups are in flight.
template <u32 Newest>
__device__ __forceinline__ void wgmma_wait_group() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" : : "n"(Newest) : "memory");
}

// Wait for the previous kernel of the stream, then allow the next one to start. A kernel touches no global memory before this call.
// The next kernel starts after this wait: whatever it reads before its own wait (weights, for example) was written by kernels that
// have completed, or by this one.
__device__ __forceinline__ void wait_for_previous_grid() {
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
}

// Divides 0 .. 2^31 - 1 by a number that the host knows, with one multiplication; an integer division takes about 25 instructions.
struct Divisor {
    u32 multiplier, shift;     // 2^(31 + shift) / number, rounded up; 2^shift >= number
};

__device__ __forceinline__ u32 divide(u32 n, const Divisor& by) { return __umulhi(2 * n, by.multiplier) >> by.shift; }

// ---- Between fp32 and the operands' 16-bit type, two values in a register ------------------------------------------------
__device__ __forceinline__ u32 to_pair(float low, float high) {
    u32 d;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
}

// [PTX ISA, ld] Load 16 bytes of shared memory.
__device__ __forceinline__ uint4 load_vector(u32 smem) {
    uint4 values;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(values.x), "=r"(values.y), "=r"(values.z), "=r"(values.w)
                 : "r"(smem) : "memory");
    return values;
}

}  // namespace cudatma

namespace cudatma {

// ---- The tile, as named constants -----------------------------------------------------------------------------------
constexpr u32 TILE_M = 128;     // of a CTA's tile
constexpr u32 TILE_N = 256;
constexpr u32 TILE_K = 64;      // of one stage
constexpr u32 STAGES = 3;
constexpr u32 THREADS = 256;
constexpr bool A_IS_K_MAJOR = true, B_IS_K_MAJOR = false;   // else M-major, N-major

// ---- Shared memory: offsets from the base, which is aligned to 1024 bytes --------------------------------------------------
constexpr u32 A = 0;   // 49152 B
constexpr u32 B = 49152;   // 98304 B
constexpr u32 STAGING = 147456;   // 16384 B

// ---- Slots: STAGES of each operand --------------------------------------------------------------------------------------
constexpr u32 ELEMENT_BYTES = 2;   // of A and B
constexpr u32 SPAN_BYTES = 128, SPAN = SPAN_BYTES / ELEMENT_BYTES;   // of the 128-byte swizzle, and its elements
constexpr u32 MN_BOX_BYTES = TILE_K * SPAN_BYTES;   // of an M-major or N-major operand: SPAN of M or N, the stage's K
constexpr u32 B_SLOT_N = 256;   // columns of B in a slot: of an N-major one whole boxes
constexpr u32 A_STAGE_BYTES = TILE_M * TILE_K * ELEMENT_BYTES, B_STAGE_BYTES = B_SLOT_N * TILE_K * ELEMENT_BYTES;
constexpr u32 WARPGROUPS = 2;    // along M
constexpr u32 WARPGROUP_M = TILE_M / WARPGROUPS;   // in wgmmas of 64 rows
constexpr u32 SWIZZLE_128B = 1, SWIZZLE_REPEAT_BYTES = 8 * SPAN_BYTES;   // in a matrix descriptor

// ---- Products ---------------------------------------------------------------------------------------------------------
// A thread holds, of rows lane / 4 and lane / 4 + 8 of its warp's 16, columns 2 (lane % 4) and the next of every 8.
constexpr u32 FRAGMENTS_16 = WARPGROUP_M / 64, FRAGMENTS_8 = TILE_N / 8;   // of a warp, along M and along N
constexpr u32 FRAGMENT_STRIDE_M = 64;   // from the rows of one fragment to those of the next

// A warp's accumulators: fragments of 16 x 8 values, four a lane.
typedef float Accumulators[FRAGMENTS_16][FRAGMENTS_8][4];
constexpr u32 MMA_K = 32 / ELEMENT_BYTES;   // of one wgmma

// [PTX ISA, wgmma.mma_async] d += a b; d = a b, whatever d was, where `accumulates` is false. From wgmma_fence to wgmma_wait_group nothing else
// may touch d.
__device__ __forceinline__ void wgmma_m64n256k16_f32_f16_ss_nt(float (&d)[32][4], u64 a, u64 b, bool accumulates = true) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %130, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
        "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
        "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
        "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
        "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
        "}, %128, %129, p, 1, 1, 0, 1;\n"
        "}"
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

// Return the offset in bytes of row `row` and column k in an operand's slot.
template <bool IsKMajor, u32 Rows>
__device__ __forceinline__ constexpr u32 operand_offset(u32 row, u32 k) {
    return IsKMajor ? (k / SPAN * Rows + row) * SPAN_BYTES + ELEMENT_BYTES * (k % SPAN) : row / SPAN * MN_BOX_BYTES + k * SPAN_BYTES;
}

// Return the matrix descriptor of an operand's slot at `address`.
template <bool IsKMajor>
__device__ __forceinline__ u64 operand_descriptor(u32 address) {
    return matrix_descriptor(address, IsKMajor ? 16 : MN_BOX_BYTES, SWIZZLE_REPEAT_BYTES, SWIZZLE_128B);
}

// Return the descriptor of what is `bytes` further: one addition, because the low bits of a descriptor are the address without its last four
// bits, which does not overflow in shared memory.
__device__ __forceinline__ u64 advanced(u64 descriptor, u32 bytes) {
    return (descriptor & 0xffffffff00000000) | (static_cast<u32>(descriptor) + bytes / 16);
}

// Return the descriptor of a warpgroup's rows of A in a slot; b_descriptor(): that of B.
__device__ __forceinline__ u64 a_descriptor(u32 smem, u32 slot, u32 warpgroup) {
    const u32 rows = operand_offset<A_IS_K_MAJOR, TILE_M>(warpgroup * WARPGROUP_M, 0);
    return advanced(operand_descriptor<A_IS_K_MAJOR>(smem + A + rows), slot * A_STAGE_BYTES);
}

__device__ __forceinline__ u64 b_descriptor(u32 smem, u32 slot) {
    return advanced(operand_descriptor<B_IS_K_MAJOR>(smem + B), slot * B_STAGE_BYTES);
}

// Issue the products of a slot as one commit group. They replace the sums unless `accumulates`.
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

// ---- Results ----------------------------------------------------------------------------------------------------------

typedef u16 Out;   // bits of an element of the result

// What a launch passes to the kernel, besides tensor maps and pointers: the members that this kernel reads.
struct Problem {
    u32 m;                          // rows of the result
    u32 n;                          // columns of the result
    u32 k;                          // size of the K dimension
    u32 tiles_m;                    // output tiles along M
    u32 tiles_n;                    // output tiles along N, each of one CTA or cluster
    u32 raster_m;                   // rows of tiles of a raster group
    u32 k_iterations;               // stages that one tile takes
    u32 output_vectors;             // 1: every row of the result is aligned to 16 bytes
    u32 matrix_tiles_m;             // tiles along M of one matrix of the batch
    Divisor by_raster_group;        // divides by the tiles of a raster group
    Divisor by_raster_group_rows;   // divides by raster_m
    Divisor by_last_rows;           // divides by the rows of tiles of the last raster group
    Divisor by_matrix_tiles_m;      // divides by matrix_tiles_m
    u64 output_pitch;               // elements from one row to the next
    u64 output_batch;               // elements from one matrix of the result to the next
    u64 a_pitch;                    // elements from one row of A to the next, or from one column
    u64 b_pitch;                    // elements from one row of B to the next, or from one column
    u64 a_batch;                    // elements from one matrix of A to the next
    u64 b_batch;                    // elements from one matrix of B to the next
};

// Where a tile, or a part of it, begins in C, and in which matrix of the batch.
struct Place {
    u32 row0, column0, batch;
};

// Return where a tile begins. tile_m counts the tiles of all matrices of the batch in turn. In a cluster of ClusterM x ClusterN CTAs, tile_m
// and tile_n are those of the cluster, and rank is the CTA's.
template <u32 ClusterM = 1, u32 ClusterN = 1>
__device__ __forceinline__ Place tile_place(const Problem& problem, u32 tile_m, u32 tile_n, u32 rank = 0) {
    const u32 batch = divide(tile_m, problem.by_matrix_tiles_m), along_m = (tile_m - batch * problem.matrix_tiles_m) * ClusterM;
    return Place{(along_m + rank % ClusterM) * TILE_M, (tile_n * ClusterN + rank % ClusterN) * TILE_N, batch};
}

// Where the results go, and the arrays that the epilogue applies.
struct Result {
    Out* output;
};

// Store 16 bytes of a row of the result.
template <typename Element>
__device__ __forceinline__ void store_vector(const Problem& problem, Element* output, uint4 values, u32 row, u32 column) {
    constexpr u32 COLUMNS = 16 / sizeof(Element);
    if (row >= problem.m || column >= problem.n) return;
    Element* target = output + row * problem.output_pitch + column;
    if (problem.output_vectors && column + COLUMNS <= problem.n) {
        *(uint4*)target = values;
    } else {   // a row that is not 16-byte aligned, or the last columns
        const u32 words[4] = {values.x, values.y, values.z, values.w};
#pragma unroll
        for (u32 i = 0; i < COLUMNS; ++i) {
            if (column + i >= problem.n) continue;
            if constexpr (COLUMNS == 4) target[i] = __uint_as_float(words[i]);
            else target[i] = (Element)(words[i / 2] >> (i % 2 * 16));
        }
    }
}

constexpr u32 WARP_STAGING_BYTES = 16 * SPAN_BYTES;   // a warp's 16 rows
constexpr u32 STAGED_N = 64;                  // columns that it stages at a time

// Write STAGED_N columns of a warp's 16 rows, or the rest of them, from column 8 n on, in the 128-byte swizzle.
__device__ __forceinline__ void stage_fragments(const float (&acc)[FRAGMENTS_8][4], u32 staging, u32 n, u32 lane) {
    const u32 row = lane % 16;
#pragma unroll
    for (u32 i = 0; i < min(STAGED_N / 8, FRAGMENTS_8 - n); i += 2) {   // 16 columns
        const float(&low)[4] = acc[n + i], (&high)[4] = acc[n + i + 1];
        const u32 pairs[4] = {to_pair(low[0], low[1]), to_pair(low[2], low[3]), to_pair(high[0], high[1]), to_pair(high[2], high[3])};
        stmatrix_x4(staging + row * SPAN_BYTES + ((i + lane / 16) ^ (row & 7)) * 16, pairs);
    }
}

// Store a warp's rows by 16-byte stores, through its staging rows. place: where the warp's part begins. Only one of Parts parts of the
// columns is stored.
template <u32 Parts = 1>
__device__ __forceinline__ void store_rows(Accumulators& acc, const Problem& problem, const Result& result, u32 staging, const Place& place,
                                           u32 lane, u32 part = 0) {
    constexpr u32 VECTORS = STAGED_N * sizeof(Out) / 16, ROWS = 32 / VECTORS;   // of a row; that a warp stores at a time
    Out* output = result.output + place.batch * problem.output_batch;
#pragma unroll
    for (u32 m = 0; m < FRAGMENTS_16; ++m)
#pragma unroll
        for (u32 n = 0; n < FRAGMENTS_8; n += STAGED_N / 8) {
            if (n / (FRAGMENTS_8 / Parts) != part) continue;
            __syncwarp();   // all lanes have read the columns before
            stage_fragments(acc[m], staging, n, lane);
            __syncwarp();
#pragma unroll
            for (u32 i = 0; i < 16; i += ROWS) {
                const u32 row = i + lane / VECTORS, vector = lane % VECTORS, column = 8 * n + 16 / sizeof(Out) * vector;
                if (column >= TILE_N) continue;   // the last ones are fewer
                store_vector(problem, output, load_vector(staging + row * SPAN_BYTES + (vector ^ (row & 7)) * 16),
                             place.row0 + FRAGMENT_STRIDE_M * m + row, place.column0 + column);
            }
        }
}

// Raster order: tiles are numbered in groups of raster_m rows of tiles, and in each group column by column, so that CTAs
// that run at the same time share operands in L2.
__device__ __forceinline__ void tile_position(const Problem& problem, u32 tile, u32& tile_m, u32& tile_n) {
    const u32 raster_group = divide(tile, problem.by_raster_group), first_row = raster_group * problem.raster_m;
    const u32 inside = tile - first_row * problem.tiles_n, rows_left = problem.tiles_m - first_row;
    const bool is_last = rows_left <= problem.raster_m;
    tile_n = divide(inside, is_last ? problem.by_last_rows : problem.by_raster_group_rows);
    tile_m = first_row + inside - tile_n * (is_last ? rows_left : problem.raster_m);
}

// ---- Loads: each thread copies some vectors of 16 bytes to where the 128-byte swizzle has them ----------------------------

// A slot of an operand of `rows` x `columns` elements in memory, from (row0, column0) on: Spans parts of SPAN columns, Rows rows
// each. What lies outside is zero. pitch: of rows, in elements.
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

// Stage k of a tile, as one group of this thread's copies.
__device__ __forceinline__ void load_stage(const Problem& problem, u32 smem, u32 slot, const u8* a, const u8* b, u32 k,
                                           const Place& place) {
    if (k < problem.k_iterations) {
        const u32 a_slot = smem + A + slot * A_STAGE_BYTES, b_slot = smem + B + slot * B_STAGE_BYTES;
        if constexpr (A_IS_K_MAJOR) load_slot<TILE_M, TILE_K / SPAN>(a_slot, a, problem.a_pitch, place.row0, k * TILE_K, problem.m, problem.k);
        else load_slot<TILE_K, TILE_M / SPAN>(a_slot, a, problem.a_pitch, k * TILE_K, place.row0, problem.k, problem.m);
        if constexpr (B_IS_K_MAJOR) load_slot<TILE_N, TILE_K / SPAN>(b_slot, b, problem.b_pitch, place.column0, k * TILE_K, problem.n, problem.k);
        else load_slot<TILE_K, TILE_N / SPAN>(b_slot, b, problem.b_pitch, k * TILE_K, place.column0, problem.k, problem.n);
    }
    cp_async_commit_group();   // empty ones too: waiting counts groups
}
}  // namespace cudatma

// C = A B, v1: cp.async fills the slots. Each CTA computes one tile. All warps load, STAGES - 1 stages ahead, and multiply.
extern "C" __global__ void __launch_bounds__(256, 1)
gemm_v1_f16_rr_128x256x64_w2_s3(
    const cudatma::u8* a,
    const cudatma::u8* b,
    cudatma::Out* output,
    const __grid_constant__ cudatma::Problem problem) {
    using namespace cudatma;
    extern __shared__ __align__(1024) u8 dynamic_shared[];
    const u32 smem = shared_address(dynamic_shared);
    // Through a shuffle, so that ptxas knows that it is the same in a whole warp.
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
        cp_async_wait_group<STAGES - 2>();   // this thread's copies of stage k have landed
        fence_proxy_async_shared_cta();      // wgmma reads them through the async proxy
        __syncthreads();                     // those of all threads; and all have multiplied the stage before
        load_stage(problem, smem, free_slot, a_matrix, b_matrix, k + STAGES - 1, place);
        multiply(acc, smem, slot, warpgroup, k > 0);
        wgmma_wait_group<0>();
        free_slot = slot;
        slot = slot + 1 == STAGES ? 0 : slot + 1;
    }
    place.row0 += warpgroup * WARPGROUP_M + warp_index % 4 * 16;
    store_rows(acc, problem, Result{output}, smem + STAGING + warp_index * WARP_STAGING_BYTES, place, laneid());
}
