// cudatma: kernels/transpose.cu.j2 for sm_90a
// config: TransposeConfig
//   element_bytes = 1
//   squares_y = 1
//   squares_x = 1
//   stages = 3
//   transposed_tiles = 2
// ring: 3 tiles of 128 x 128 elements, 16384 bytes each, and 2 transposed tiles; 81968 bytes of shared memory in total

// primitives.cu contains
// u8, u16, u32, u64, TensorMap, shared_address, laneid, bar_sync, fence_proxy_async_shared_cta, fence_acq_rel_cta,
// mbarrier_init, mbarrier_arrive, mbarrier_arrive_expect_tx, mbarrier_try_wait_parity, mbarrier_wait_parity,
// fence_mbarrier_init, cp_async_bulk_tensor_3d_load, cp_async_bulk_tensor_3d_store, prefetch_tensormap,
// cp_async_bulk_commit_group, cp_async_bulk_wait_group, cp_async_bulk_wait_group_read, ldmatrix_x4_trans,
// stmatrix_x4, TmaPipeline

using namespace cudatma;

typedef u8 Element;

constexpr u32 STAGES = 3;
constexpr u32 STAGE_BYTES = 16384;   // bytes per tile, whose panels are contiguous
constexpr u32 TRANSPOSED = 49152;   // offset of the transposed tiles, after the slots
constexpr u32 TRANSPOSED_TILES = 2;
constexpr u32 BARRIERS = 81920;
constexpr u32 WARPS = 4;   // warps that transpose tiles; one more warp loads
constexpr int SIDE = 128;   // elements per 128 bytes; a panel is SIDE elements wide, and a square has SIDE rows and columns
constexpr int SQUARES_Y = 1, SQUARES_X = 1;   // squares per tile along each axis
constexpr u32 LINE_BYTES = 128;   // bytes per row of a panel, equal to the width of the swizzle
constexpr u32 LOADED_PANEL_BYTES = 16384;   // a panel contains SIDE columns of all rows of a tile
constexpr u32 STORED_PANEL_BYTES = 16384;   // a panel contains SIDE rows of all columns of a tile
constexpr int TILE_ROWS = SQUARES_Y * SIDE, TILE_COLUMNS = SQUARES_X * SIDE;
constexpr int RASTER_GROUP = 16;   // rows of tiles per raster group

// Return the address of a 16-byte chunk of a row of a panel with the 128-byte swizzle. Panels are aligned to 1024 bytes.
__device__ __forceinline__ u32 chunk_at(u32 panel, u32 row, u32 chunk) {
    return panel + row * LINE_BYTES + ((chunk ^ (row & 7)) << 4);
}

constexpr u32 PARTS = 8;   // parts per square; a warp transposes one part (eight blocks of 16 x 16 bytes)

// Transpose part `part` of a square. The square begins at row `row` of panel `from`, and its transpose begins at row `column` of panel `to`.
//
// ldmatrix transposes pairs of bytes, so each lane receives the pair at the same position in each of two rows. The 16 rows of a block are
// divided between two matrices A and B, so that lane 4 c + j holds pair c of rows 4 j to 4 j + 3. __byte_perm combines these pairs into
// four bytes of row 2 c and four bytes of row 2 c + 1 of the result, and stmatrix writes the result as two matrices. To avoid bank
// conflicts, the rows are divided between A and B, and the result's rows between the two matrices that stmatrix writes, so that the eight
// rows of each matrix are in eight different chunks of their lines. A contains rows 0, 1, 4, 5, 10, 11, 14 and 15, and B contains the other
// rows. The first matrix that stmatrix writes contains rows 0, 2, 4, 6, 9, 11, 13 and 15, and the second one contains the other rows.
__device__ __forceinline__ void transpose_part(u32 from, u32 row, u32 to, u32 column, u32 part) {
    const u32 lane = laneid(), line = lane & 7, second = lane >> 3 & 1, block = lane >> 4;
    const u32 read_row = 2 * (line & 6) + (line & 1) + 2 * ((line >> 2) ^ second);
    const u32 written_row = 2 * line + ((line >> 2) ^ second);
    // Lanes with j >= 2 receive rows 4 j and 4 j + 1 from B, and lanes with c >= 4 write row 2 c + 1 first.
    const u32 even = lane & 2 ? 0x2064 : 0x6420, odd = even + 0x1111;
    const u32 first = lane & 16 ? odd : even, other = lane & 16 ? even : odd;
#pragma unroll
    for (u32 pair = 0; pair < 4; ++pair) {
        const u32 x = 2 * pair + block;   // the block whose row this lane addresses
        u32 in[4], out[4];
        ldmatrix_x4_trans(in, chunk_at(from, row + 16 * part + read_row, x));
        out[0] = __byte_perm(in[0], in[1], first);
        out[1] = __byte_perm(in[0], in[1], other);
        out[2] = __byte_perm(in[2], in[3], first);
        out[3] = __byte_perm(in[2], in[3], other);
        stmatrix_x4(chunk_at(to, column + 16 * x + written_row, part), out);
    }
}

// ---- Raster order ---------------------------------------------------------------------------------------------------
// The column and row of a tile, and the index of its matrix.
struct Place {
    int x, y, z;
};

// Return the position of a tile. Tiles are numbered in raster groups of RASTER_GROUP rows of tiles, column by column within a group. CTAs
// that run at the same time then cover roughly a square of the matrix, so that both reads and writes use whole DRAM pages.
__device__ __forceinline__ Place place_of(u32 tile, u32 tiles_x, u32 tiles_y) {
    const u32 plane = tiles_x * tiles_y, inside = tile % plane;
    const u32 group = inside / (tiles_x * RASTER_GROUP), rest = inside % (tiles_x * RASTER_GROUP);
    const u32 height = min(static_cast<u32>(RASTER_GROUP), tiles_y - group * RASTER_GROUP);
    return {static_cast<int>(rest / height), static_cast<int>(group * RASTER_GROUP + rest % height),
            static_cast<int>(tile / plane)};
}

// Compute destination[z][x][y] = source[z][y][x], tile by tile. A CTA processes every gridDim.x-th tile. The first lane of the last warp
// loads a tile as panels of SIDE columns. The other warps transpose the squares of the tile into panels of SIDE rows, and thread 0 stores
// these panels. Thread 0 waits until the stores have read a transposed tile before the warps overwrite that tile.
extern "C" __global__ void __launch_bounds__(160)
transpose(const __grid_constant__ TensorMap source, const __grid_constant__ TensorMap destination,
    u32 tiles_x, u32 tiles_y, u32 tiles) {
    extern __shared__ __align__(1024) u8 shared[];
    const u32 slots = shared_address(shared);
    const u32 warp = threadIdx.x / 32;

    TmaPipeline<STAGES> pipeline;
    pipeline.init(slots + BARRIERS, 1, WARPS);

    if (warp == WARPS) {
        if (laneid() != 0) return;
        prefetch_tensormap(&source);
        for (u32 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
            const Place at = place_of(tile, tiles_x, tiles_y);
            const u32 slot = slots + pipeline.stage * STAGE_BYTES;
            pipeline.acquire();
            pipeline.expect_tx(STAGE_BYTES);
            for (int panel = 0; panel < SQUARES_X; ++panel) {
                cp_async_bulk_tensor_3d_load(slot + panel * LOADED_PANEL_BYTES, &source, pipeline.get_barrier(),
                                             at.x * TILE_COLUMNS + panel * SIDE, at.y * TILE_ROWS, at.z);
            }
            pipeline.advance();
        }
        return;
    }

    if (threadIdx.x == 0) prefetch_tensormap(&destination);
    u32 transposed = 0;   // the next transposed tile to write
    for (u32 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const u32 from = slots + pipeline.stage * STAGE_BYTES, to = slots + TRANSPOSED + transposed * STAGE_BYTES;
        if (threadIdx.x == 0) cp_async_bulk_wait_group_read<TRANSPOSED_TILES - 1>();
        bar_sync(1, WARPS * 32);
        pipeline.wait();
        for (u32 part = warp; part < SQUARES_Y * SQUARES_X * PARTS; part += WARPS) {
            const u32 square = part / PARTS, y = square / SQUARES_X, x = square % SQUARES_X;
            transpose_part(from + x * LOADED_PANEL_BYTES, y * SIDE, to + y * STORED_PANEL_BYTES, x * SIDE, part % PARTS);
        }
        fence_proxy_async_shared_cta();
        __syncwarp();
        if (laneid() == 0) pipeline.release();
        pipeline.advance();
        bar_sync(1, WARPS * 32);
        if (threadIdx.x == 0) {
            const Place at = place_of(tile, tiles_x, tiles_y);
            for (int panel = 0; panel < SQUARES_Y; ++panel) {
                cp_async_bulk_tensor_3d_store(&destination, to + panel * STORED_PANEL_BYTES, at.y * TILE_ROWS + panel * SIDE,
                                              at.x * TILE_COLUMNS, at.z);
            }
            cp_async_bulk_commit_group();
        }
        if (++transposed == TRANSPOSED_TILES) transposed = 0;
    }
    if (threadIdx.x == 0) cp_async_bulk_wait_group<0>();   // TMA must read shared memory before the CTA exits and finish its writes before the kernel ends
}
