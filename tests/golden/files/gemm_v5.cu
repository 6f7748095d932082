// cudatma: kernels/gemm_v5.cu.j2 for sm_90a
// config: GemmConfig
//   version = 'v5'
//   dtype = 'float8_e4m3fn'
//   layout = 'RC'
//   tile_m = 256
//   tile_n = 128
//   tile_k = 128
//   stages = 3
//   warpgroups = 2
//   cluster_n = 2
//   block_scales = True
//   scales_by_tma = True
// 8 consumer warps and 4 producer warps; 216112 bytes of shared memory per CTA.
// Arrays of a stage:
//    32768 bytes: A 256 x 128 float8_e4m3fn, K-major, 128B swizzle
//    16384 bytes: B 128 x 128 float8_e4m3fn, K-major, 128B swizzle
//     1024 bytes: scales of 256 rows of A, float32

// primitives.cu contains
// u8, u16, u32, u64, TensorMap, shared_address, laneid, elect_sync, bar_sync, griddepcontrol_wait,
// griddepcontrol_launch_dependents, setmaxnreg_inc, setmaxnreg_dec, fence_proxy_async_shared_cta, mbarrier_init,
// mbarrier_arrive_expect_tx, mbarrier_try_wait_parity_hint, mbarrier_wait_parity_hint, fence_mbarrier_init,
// cluster_ctarank, mapa_shared_cluster, mbarrier_arrive_shared_cluster, barrier_cluster_arrive,
// barrier_cluster_wait, cp_async_bulk_tensor_3d_load, cp_async_bulk_tensor_3d_load_multicast,
// cp_async_bulk_tensor_3d_store, prefetch_tensormap, cp_async_bulk_commit_group, cp_async_bulk_wait_group,
// cp_async_bulk_wait_group_read, ld_shared_f32, ld_shared_v4_b32, st_shared_v4_b32, stmatrix_x4, matrix_descriptor,
// wgmma_fence, wgmma_commit_group, wgmma_wait_group, TmaPipeline, bar_sync_one_of, wait_for_previous_grid,
// ThreadPosition, Divisor, divide, to_pair

namespace cudatma {

// ---- Tile -----------------------------------------------------------------------------------------------------------
constexpr u32 TILE_M = 256, TILE_N = 128;   // rows and columns of C per CTA
constexpr u32 TILE_K = 128;   // elements of K per stage
constexpr u32 STAGES = 3;
constexpr u32 THREADS = 384;
constexpr u32 CONSUMER_WARPS = 8;
constexpr bool A_IS_K_MAJOR = true, B_IS_K_MAJOR = true;   // otherwise M-major or N-major
constexpr u32 CLUSTER = 2;   // CTAs per cluster; they share the larger of the A and B tiles
constexpr u32 CLUSTER_M = 1, CLUSTER_N = 2;   // CTAs per cluster along M and along N
constexpr bool A_IS_SHARED = CLUSTER_N > 1;

// ---- Shared memory: byte offsets from a base that is 1024-byte aligned, with sizes in the comments -------------------
constexpr u32 A = 0;                          // 98304 bytes
constexpr u32 B = 98304;                      // 49152 bytes
constexpr u32 A_SCALE = 147456;               // 3072 bytes
constexpr u32 STAGING = 150528;               // 65536 bytes
constexpr u32 FULL_BARRIERS = 216064;         // 24 bytes

// ---- Slots: one per stage and operand -------------------------------------------------------------------------------
constexpr u32 ELEMENT_BYTES = 1;   // bytes per element of A and B
constexpr u32 SPAN_BYTES = 128, SPAN = SPAN_BYTES / ELEMENT_BYTES;   // row of the 128-byte swizzle in bytes and in elements
constexpr u32 MN_BOX_BYTES = TILE_K * SPAN_BYTES;   // bytes per box of an M-major or N-major operand (SPAN x TILE_K)
constexpr u32 B_SLOT_N = 128;   // columns of B in a slot, which holds whole boxes of an N-major operand
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
__device__ __forceinline__ void wgmma_m64n128k32_f32_e4m3_ss(float (&d)[16][4], u64 a, u64 b, bool accumulates = true) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
        "}, %64, %65, p, 1, 1;\n}"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]),
          "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]), "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3]),
          "+f"(d[8][0]), "+f"(d[8][1]), "+f"(d[8][2]), "+f"(d[8][3]), "+f"(d[9][0]), "+f"(d[9][1]), "+f"(d[9][2]), "+f"(d[9][3]), "+f"(d[10][0]), "+f"(d[10][1]), "+f"(d[10][2]), "+f"(d[10][3]), "+f"(d[11][0]), "+f"(d[11][1]), "+f"(d[11][2]), "+f"(d[11][3]),
          "+f"(d[12][0]), "+f"(d[12][1]), "+f"(d[12][2]), "+f"(d[12][3]), "+f"(d[13][0]), "+f"(d[13][1]), "+f"(d[13][2]), "+f"(d[13][3]), "+f"(d[14][0]), "+f"(d[14][1]), "+f"(d[14][2]), "+f"(d[14][3]), "+f"(d[15][0]), "+f"(d[15][1]), "+f"(d[15][2]), "+f"(d[15][3])
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

// ---- Problem and results --------------------------------------------------------------------------------------------
typedef u16 Out;   // element of C (its bits)

// The launch parameters that are neither tensor maps nor pointers.
struct Problem {
    u32 m;                          // number of rows of the result
    u32 n;                          // number of columns of the result
    u32 tiles_m;                    // number of output tiles along M
    u32 tiles_n;                    // number of output tiles along N (a CTA or a cluster computes one tile)
    u32 raster_m;                   // number of rows of tiles per raster group
    u32 k_iterations;               // number of stages per tile
    u32 work_ranges;                // number of work ranges, one per cluster or, without clusters, per CTA
    u32 output_vectors;             // 1 if every row of the result is aligned to 16 bytes
    u32 output_by_tma;              // 1 if TMA can write the result
    u32 alternates;                 // 1 if every other tile of a CTA traverses K backwards
    u32 matrix_tiles_m;             // number of tiles along M per matrix of the batch
    u32 a_box_rows;                 // number of rows per box of A
    u32 stage_bytes;                // bytes that the boxes of a stage deliver
    Divisor by_raster_group;        // divides by the number of tiles per raster group
    Divisor by_raster_group_rows;   // divides by raster_m
    Divisor by_last_rows;           // divides by the number of rows of tiles in the last raster group
    Divisor by_matrix_tiles_m;      // divides by matrix_tiles_m
    u64 output_pitch;               // stride between rows of the result, in elements
    u64 output_batch;               // stride between matrices of the result, in elements
    u64 b_scale_column;             // stride between scales of columns or column blocks, in elements, or 0 for one
    u64 b_scale_k;                  // stride between the scales of B along K, in elements
    u64 b_scale_batch;              // stride between the scales of matrices of B, in elements
};

// The first row and column of a tile or of a part of a tile, and the index of its matrix in the batch.
struct Place {
    u32 row0, column0, batch;
};

// Return the position of a CTA's tile. `tile_m` and `tile_n` are the position of the cluster's tile. `tile_m` counts the rows of tiles
// across all matrices of the batch.
__device__ __forceinline__ Place tile_place(const Problem& problem, u32 tile_m, u32 tile_n, u32 rank) {
    const u32 batch = divide(tile_m, problem.by_matrix_tiles_m), along_m = (tile_m - batch * problem.matrix_tiles_m) * CLUSTER_M;
    return Place{(along_m + rank % CLUSTER_M) * TILE_M, (tile_n * CLUSTER_N + rank % CLUSTER_N) * TILE_N, batch};
}

// The output and the operands of the epilogue, in global memory.
struct Result {
    Out* output;
    const float* b_scale;
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

using Ring = TmaPipeline<STAGES>;

// ---- Loads: TMA fills elements outside the tensors with zeros -------------------------------------------------------
// Load a stage of one operand. The boxes of a K-major operand have SPAN elements of K and all rows of the tile. The boxes of an M-major or
// N-major operand have SPAN rows and all of the stage's K. The boxes of A have no rows beyond the end of A because TMA takes longer to fill
// rows than to read them.
template <bool IsKMajor, u32 Rows>
__device__ __forceinline__ void load_box(u32 target, const TensorMap* map, u32 barrier, u32 k, u32 row, u32 batch) {
    if constexpr (IsKMajor) {
#pragma unroll
        for (u32 i = 0; i < TILE_K; i += SPAN)
            cp_async_bulk_tensor_3d_load(target + i / SPAN * Rows * SPAN_BYTES, map, barrier, k + i, row, batch);
    } else {
#pragma unroll
        for (u32 i = 0; i < Rows; i += SPAN)
            cp_async_bulk_tensor_3d_load(target + i / SPAN * MN_BOX_BYTES, map, barrier, row + i, k, batch);
    }
}

// Set to zero the rows of A's slots that wgmma reads but TMA does not load. All threads must call this function and then synchronize.
__device__ __forceinline__ void clear_unloaded(const Problem& problem, u32 smem) {
    if (problem.m >= (A_IS_K_MAJOR ? TILE_M : SPAN)) return;
    constexpr u32 ROW_BYTES = TILE_K < SPAN ? TILE_K * ELEMENT_BYTES : SPAN_BYTES;   // bytes per row of a K-major A
    for (u32 offset = 16 * threadIdx.x; offset < STAGES * A_STAGE_BYTES; offset += 16 * THREADS) {
        // Compute the row of A. For an M-major A, the XOR undoes the 128-byte swizzle.
        const u32 row = A_IS_K_MAJOR ? offset / ROW_BYTES % TILE_M : (offset / 16 ^ offset / SPAN_BYTES) % 8 * 8;
        if (row >= problem.a_box_rows) st_shared_v4_b32(smem + A + offset, uint4{});
    }
    fence_proxy_async_shared_cta();   // wgmma reads the zeros through the async proxy
}

struct Maps {
    const TensorMap *a, *b, *a_scale;
};

constexpr u32 A_SCALE_STAGE_BYTES = 1024;

// Load the scales of A's rows in block k of K.
__device__ __forceinline__ void load_scales(const Ring& ring, u32 smem, const TensorMap* map, u32 k, const Place& place) {
    cp_async_bulk_tensor_3d_load(smem + A_SCALE + ring.stage * A_SCALE_STAGE_BYTES, map, ring.get_barrier(), place.row0, k, place.batch);
}

// Prefetch the tensor maps from the first thread of the producer warp. The prefetch is allowed before the previous grid has completed,
// because no kernel writes the maps.
__device__ __forceinline__ void prefetch_maps(const Maps& maps) {
    if (threadIdx.x != 32 * CONSUMER_WARPS) return;
    prefetch_tensormap(maps.a);
    prefetch_tensormap(maps.b);
    prefetch_tensormap(maps.a_scale);
}

// ---- Stores ---------------------------------------------------------------------------------------------------------
// The named barriers of this kernel. __syncthreads() uses barrier 0.
enum NamedBarrier : u32 {
    STORE_BARRIER = 3,   // the first of several barriers, one per warpgroup
};

constexpr u32 STAGING_BUFFERS = 4;   // buffers per warpgroup
constexpr u32 BUFFER_BYTES = 64 * SPAN_BYTES;   // 64 rows of 128 bytes

__device__ __forceinline__ void store_sync(u32 warpgroup) { bar_sync_one_of<STORE_BARRIER, CONSUMER_WARPS / 4>(warpgroup, 128); }

// Stage a warpgroup's whole part of a tile with the 128-byte swizzle. One thread stores the part by TMA while the warpgroup computes the
// next tile. TMA stores a few large boxes faster than many small ones. `place` is the position of the warpgroup's part.
__device__ __forceinline__ void store_tile(Accumulators& acc, const Problem& problem, const Result& result, u32 smem,
                                           const TensorMap* map, const Place& place, const ThreadPosition& at) {
    const Place of_warp{place.row0 + 16 * at.warp, place.column0, place.batch};
    const u32 buffers = smem + STAGING + STAGING_BUFFERS * at.warpgroup * BUFFER_BYTES;
    if (!problem.output_by_tma) {   // the output's strides do not allow TMA
        store_rows(acc, problem, result, buffers + at.warp * WARP_STAGING_BYTES, of_warp, at.lane);
        return;
    }
    const bool issues = at.warp == 0 && at.lane == 0;
    if (issues) cp_async_bulk_wait_group_read<0>();   // TMA must have read the previous tile before staging overwrites it
    store_sync(at.warpgroup);   // the other threads wait for the thread that issued the stores
#pragma unroll
    for (u32 m = 0; m < FRAGMENTS_16; ++m)
#pragma unroll
        for (u32 n = 0; n < FRAGMENTS_8; n += STAGED_N / 8) {
            const u32 row = FRAGMENT_STRIDE_M * m + 16 * at.warp;
            stage_fragments(acc[m], buffers + (8 * n / STAGED_N * WARPGROUP_M + row) * SPAN_BYTES, n, at.lane);
        }
    fence_proxy_async_shared_cta();
    store_sync(at.warpgroup);   // all rows must be staged and visible to TMA before the store
    if (!issues) return;
#pragma unroll
    for (u32 n = 0; n < TILE_N; n += STAGED_N)
        cp_async_bulk_tensor_3d_store(map, buffers + n / STAGED_N * WARPGROUP_M * SPAN_BYTES, place.column0 + n, place.row0, place.batch);
    cp_async_bulk_commit_group();
}

// ---- Clusters -------------------------------------------------------------------------------------------------------
constexpr u16 CLUSTER_MASK = (1 << CLUSTER) - 1;

// Load this CTA's part of a shared slot into every CTA of the cluster. A K-major operand is divided along its rows, and any other
// operand is divided along K.
template <bool IsKMajor, u32 Rows>
__device__ __forceinline__ void load_part(u32 slot, const TensorMap* map, u32 barrier, u32 k, u32 row, u32 batch, u32 rank) {
    if constexpr (IsKMajor) {
        const u32 first = rank * (Rows / CLUSTER);
#pragma unroll
        for (u32 i = 0; i < TILE_K; i += SPAN)
            cp_async_bulk_tensor_3d_load_multicast(slot + (i / SPAN * Rows + first) * SPAN_BYTES, map, barrier, k + i, row + first, batch,
                                                   CLUSTER_MASK);
    } else {
        const u32 first = rank * (TILE_K / CLUSTER);
#pragma unroll
        for (u32 i = 0; i < Rows; i += SPAN)
            cp_async_bulk_tensor_3d_load_multicast(slot + i / SPAN * MN_BOX_BYTES + first * SPAN_BYTES, map, barrier, row + i, k + first, batch,
                                                   CLUSTER_MASK);
    }
}

// Load stage k of a tile into the current slot. This CTA loads the whole tile of the operand that is not shared into its own slot, and
// its part of the shared operand into the slots of all CTAs of the cluster. Call this function from one thread after the consumers of all
// CTAs have released the slot.
__device__ __forceinline__ void load_stage(const Problem& problem, const Ring& ring, u32 smem, const Maps& maps, u32 k, const Place& place,
                                           u32 rank) {
    const u32 a = smem + A + ring.stage * A_STAGE_BYTES, b = smem + B + ring.stage * B_STAGE_BYTES;
    ring.expect_tx(problem.stage_bytes);
    load_scales(ring, smem, maps.a_scale, k, place);
    if constexpr (A_IS_SHARED) {
        load_part<A_IS_K_MAJOR, TILE_M>(a, maps.a, ring.get_barrier(), k * TILE_K, place.row0, place.batch, rank);
        load_box<B_IS_K_MAJOR, TILE_N>(b, maps.b, ring.get_barrier(), k * TILE_K, place.column0, place.batch);
    } else {
        load_box<A_IS_K_MAJOR, TILE_M>(a, maps.a, ring.get_barrier(), k * TILE_K, place.row0, place.batch);
        load_part<B_IS_K_MAJOR, TILE_N>(b, maps.b, ring.get_barrier(), k * TILE_K, place.column0, place.batch, rank);
    }
}

// Stages k_begin to k_end - 1 of an output tile.
struct WorkUnit {
    u32 tile, k_begin, k_end;
};

// ---- Schedule: whole tiles ------------------------------------------------------------------------------------------
// A work range consists of every work_ranges-th tile.
struct WorkQueue {
    u32 tile, tiles;

    __device__ __forceinline__ WorkQueue(const Problem& problem, u32 range) : tile(range), tiles(problem.tiles_m * problem.tiles_n) {}

    __device__ __forceinline__ bool next(const Problem& problem, WorkUnit& unit) {
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

// ---- Producer: one thread -------------------------------------------------------------------------------------------
// Load this CTA's tiles. A tile's loads do not wait until the consumers have stored the previous tile. If `alternates` is set, every
// other tile is loaded backward along K, because L2 still contains the last stages of the operand that consecutive tiles share.
__device__ __forceinline__ void produce(Ring& ring, const Problem& problem, u32 smem, const Maps& maps, u32 rank) {
    WorkQueue queue(problem, blockIdx.x / CLUSTER);
    WorkUnit unit;
    bool is_backward = true;   // toggled before each tile
    while (queue.next(problem, unit)) {
        u32 tile_m, tile_n;
        tile_position(problem, unit.tile, tile_m, tile_n);
        const Place place = tile_place(problem, tile_m, tile_n, rank);
        is_backward = problem.alternates && !is_backward;
        u32 k = is_backward ? problem.k_iterations - 1 : 0;
        for (u32 i = 0; i < problem.k_iterations; ++i, k += is_backward ? -1 : 1, ring.advance()) {
            ring.acquire();
            load_stage(problem, ring, smem, maps, k, place, rank);
        }
    }
}

// ---- Consumers ------------------------------------------------------------------------------------------------------

// Release the slot after this warp's wgmmas have read it.
__device__ __forceinline__ void release_slot(Ring& ring, u32 slot, u32 lane) {
    ring.release_used_to_cluster<CLUSTER>(slot, lane);
}

__device__ __forceinline__ void clear(Accumulators& acc) {
#pragma unroll
    for (u32 c = 0; c < FRAGMENTS_16; ++c)
#pragma unroll
        for (u32 r = 0; r < FRAGMENTS_8; ++r)
#pragma unroll
            for (u32 i = 0; i < 4; ++i) acc[c][r][i] = 0.0f;
}

// ---- Block scales ---------------------------------------------------------------------------------------------------
// Each stage is one block of K with its own scales. The MMAs accumulate the products of each block separately. The sums are then scaled and
// added to the accumulators.
typedef float BlockSums[FRAGMENTS_8][4];

// Issue the MMAs for 64 rows of a block as one commit group.
__device__ __forceinline__ void multiply_block(BlockSums& sums, u64 rows, u64 columns) {
    wgmma_fence();
    wgmma_m64n128k32_f32_e4m3_ss(sums, rows, columns, false);
#pragma unroll
    for (u32 k = MMA_K; k < TILE_K; k += MMA_K) wgmma_m64n128k32_f32_e4m3_ss(sums, advanced(rows, k), advanced(columns, k));
    wgmma_commit_group();
}

// Scale a thread's sums by one factor per row, and add them to the accumulators.
__device__ __forceinline__ void add_scaled(float (&acc)[FRAGMENTS_8][4], const BlockSums& sums, const float (&factors)[2]) {
#pragma unroll
    for (u32 n = 0; n < FRAGMENTS_8; ++n)
#pragma unroll
        for (u32 j = 0; j < 4; ++j) acc[n][j] += factors[j / 2] * sums[n][j];
}

// Return the scales of the tile's columns in the 32 blocks of K that begin with `first`. Each lane receives the scale of one block.
__device__ __forceinline__ float column_scales(const Problem& problem, const Result& result, const Place& place, u32 first, u32 lane) {
    const u32 k = min(first + lane, problem.k_iterations - 1), column = min(place.column0, problem.n - 1) / 128;
    return __ldg(result.b_scale + place.batch * problem.b_scale_batch + k * problem.b_scale_k + column * problem.b_scale_column);
}

// Return column_scales() for the first 32 blocks of the queue's next tile, or 0 if the queue has no more tiles.
__device__ __forceinline__ float next_columns(WorkQueue queue, const Problem& problem, const Result& result, u32 rank, u32 lane) {
    WorkUnit unit;
    if (!queue.next(problem, unit)) return 0;
    u32 tile_m, tile_n;
    tile_position(problem, unit.tile, tile_m, tile_n);
    return column_scales(problem, result, tile_place(problem, tile_m, tile_n, rank), 0, lane);
}

// Accumulate the scaled blocks of a tile. One warpgroup multiplies while the other scales, so the code between a warpgroup's MMAs must be
// short. The loop is unrolled so that ptxas can overlap the wait for the next slot and the computation of its descriptors with the scaling
// of the current block. A slot also contains the scales of A's rows, which the warps read before they release the slot. `columns` is
// column_scales() for the tile's first 32 blocks of K.
__device__ __forceinline__ void add_blocks(Accumulators& acc, Ring& ring, const Problem& problem, const Result& result,
                                           const Place& place, u32 smem, float columns, const ThreadPosition& at) {
    clear(acc);
    const u32 rows_scales = smem + A_SCALE + 4 * (at.warpgroup * WARPGROUP_M + 16 * at.warp + at.lane / 4);
    BlockSums sums = {};
    for (u32 first = 0; first < problem.k_iterations; first += 32) {
        const float current = columns;   // the scales of the 32 blocks that begin with `first`
        if (first + 32 < problem.k_iterations) columns = column_scales(problem, result, place, first + 32, at.lane);
        const u32 blocks = min(32, problem.k_iterations - first);
#pragma unroll 8
        for (u32 i = 0; i < blocks; ++i, ring.advance()) {
            const float column = __shfl_sync(0xffffffffu, current, i);   // the scale of the tile's columns in this block
            const u64 a = a_descriptor(smem, ring.stage, at.warpgroup), b = b_descriptor(smem, ring.stage);
            ring.wait();
#pragma unroll
            for (u32 m = 0; m < FRAGMENTS_16; ++m) {
                const u32 row_scales = rows_scales + ring.stage * A_SCALE_STAGE_BYTES + 4 * 64 * m;
                const float scales[2] = {ld_shared_f32(row_scales), ld_shared_f32(row_scales + 4 * 8)};
                multiply_block(sums, advanced(a, operand_offset<true, TILE_M>(64 * m, 0)), b);
                const float factors[2] = {scales[0] * column, scales[1] * column};
                wgmma_wait_group<0>();
                if (m + 1 == FRAGMENTS_16) release_slot(ring, ring.stage, at.lane);
                add_scaled(acc[m], sums, factors);
            }
        }
    }
}

// Compute and store this CTA's tiles.
__device__ __forceinline__ void consume(Ring& ring, const Problem& problem, u32 smem, const TensorMap* output_map, const Result& result,
                                        const ThreadPosition& at, u32 rank) {
    WorkQueue queue(problem, blockIdx.x / CLUSTER);
    WorkUnit unit;
    float columns = next_columns(queue, problem, result, rank, at.lane);
    while (queue.next(problem, unit)) {
        u32 tile_m, tile_n;
        tile_position(problem, unit.tile, tile_m, tile_n);
        Place place = tile_place(problem, tile_m, tile_n, rank);
        place.row0 += at.warpgroup * WARPGROUP_M;
        Accumulators acc;
        add_blocks(acc, ring, problem, result, place, smem, columns, at);
        columns = next_columns(queue, problem, result, rank, at.lane);   // these loads complete while the tile is stored
        store_tile(acc, problem, result, smem, output_map, place, at);
    }
    if (at.lane == 0) cp_async_bulk_wait_group<0>();   // the CTA must not exit while TMA reads its shared memory
}
}  // namespace cudatma

// C = A B, version v5. This version is like v4, but the CTAs of a cluster share the tile of one operand, and each CTA loads a part of this
// tile for all CTAs.
extern "C" __global__ void __launch_bounds__(384, 1)
gemm_v5_e4m3_rc_blocks_tma_256x128x128_w2_s3_c2(
    const __grid_constant__ cudatma::TensorMap a_map,
    const __grid_constant__ cudatma::TensorMap b_map,
    const __grid_constant__ cudatma::TensorMap output_map,
    cudatma::Out* output,
    const __grid_constant__ cudatma::TensorMap a_scale_map,
    const float* b_scale,
    const __grid_constant__ cudatma::Problem problem) {
    using namespace cudatma;
    extern __shared__ __align__(1024) u8 dynamic_shared[];
    const u32 smem = shared_address(dynamic_shared);
    // The shuffle proves to ptxas that the value is uniform.
    const u32 warp_index = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);

    prefetch_maps(Maps{&a_map, &b_map, &a_scale_map});
    clear_unloaded(problem, smem);
    Ring ring;
    ring.attach(smem + FULL_BARRIERS);
    if (threadIdx.x == 0) ring.init_barriers(1, CLUSTER * CONSUMER_WARPS);   // all consumer warps of the cluster release a slot
    barrier_cluster_arrive();
    barrier_cluster_wait();   // all CTAs must have initialized their barriers before one arrives on them or loads by multicast
    wait_for_previous_grid();
    const u32 rank = cluster_ctarank();
    if (warp_index >= CONSUMER_WARPS) {
        setmaxnreg_dec<24>();
        if (warp_index == CONSUMER_WARPS && elect_sync()) produce(ring, problem, smem, Maps{&a_map, &b_map, &a_scale_map}, rank);
        __syncwarp();
    } else {
        setmaxnreg_inc<240>();
        consume(ring, problem, smem, &output_map, Result{output, b_scale},
                ThreadPosition{warp_index / 4, warp_index % 4, laneid()}, rank);
    }
    // A CTA must not exit while another CTA may write to its shared memory or arrive on its barriers.
    barrier_cluster_arrive();
    barrier_cluster_wait();
}
