// cudatma: kernels/transpose.cu.j2 for sm_90a
// spec: TransposeSpec
//   element_bytes = 1
//   squares_y = 1
//   squares_x = 1
//   stages = 3
//   transposed_tiles = 2
//   warps = 4
//   raster_group = 16
//   entry = 'transpose'
// ring: 3 tiles of 128 x 128 elements, 16384 bytes, and 2 transposed ones; 81968 bytes of shared memory

using namespace cudatma;

typedef u8 Element;

constexpr u32 STAGES = 3;
constexpr u32 STAGE_BYTES = 16384;  // a tile: its panels, one after the other
constexpr u32 TRANSPOSED = 49152;   // the transposed tiles, which stores read; after the slots
constexpr u32 TRANSPOSED_TILES = 2;
constexpr u32 BARRIERS = 81920;
constexpr u32 WARPS = 4;  // that transpose tiles; one more warp loads
constexpr int SIDE = 128;  // elements of 128 bytes: a panel's width, and the side of a square
constexpr int SQUARES_Y = 1, SQUARES_X = 1;  // of a tile
constexpr u32 LINE_BYTES = 128;  // a row of a panel: one span of the swizzle
constexpr u32 LOADED_PANEL_BYTES = 16384;   // SIDE columns of all rows of a tile
constexpr u32 STORED_PANEL_BYTES = 16384;   // SIDE rows of all columns of a tile
constexpr int TILE_ROWS = SQUARES_Y * SIDE, TILE_COLUMNS = SQUARES_X * SIDE;
constexpr int RASTER_GROUP = 16;  // rows of tiles that are taken column by column

// The address of 16-byte chunk `chunk` of row `row` of a panel under TMA's 128-byte swizzle; panels begin on 1024 bytes.
__device__ __forceinline__ u32 chunk_at(u32 panel, u32 row, u32 chunk) {
    return panel + row * LINE_BYTES + ((chunk ^ (row & 7)) << 4);
}

constexpr u32 PARTS = 8;  // of a square: a warp transposes eight blocks of 16 x 16 bytes

// Transposes part `part` of the square that begins at row `row` of panel `from` into rows `column`, .. of panel `to`.
//
// ldmatrix transposes pairs of bytes: a lane gets the same pair of two rows. Two matrices A and B share the 16 rows of a block.
// Lane 4 c + j then holds the pairs c of rows 4 j .. 4 j + 3; __byte_perm makes four bytes of row 2 c and four of row 2 c + 1 of the
// result from them, which stmatrix writes. The rows are divided between A and B, and between the two results, so that the eight rows
// of each matrix lie at eight different chunks of their lines, and no two meet in a bank:
//   A: rows 0 1 4 5 10 11 14 15, B: rows 2 3 6 7 8 9 12 13; first result: rows 0 2 4 6 9 11 13 15, second: the remaining rows.
__device__ __forceinline__ void transpose_part(u32 from, u32 row, u32 to, u32 column, u32 part) {
    const u32 lane = laneid(), line = lane & 7, second = lane >> 3 & 1, block = lane >> 4;
    const u32 read_row = 2 * (line & 6) + (line & 1) + 2 * ((line >> 2) ^ second);
    const u32 written_row = 2 * line + ((line >> 2) ^ second);
    // Lanes with j >= 2 have rows 4 j, 4 j + 1 from B; lanes with c >= 4 write row 2 c + 1 first.
    const u32 even = lane & 2 ? 0x2064 : 0x6420, odd = even + 0x1111;
    const u32 first = lane & 16 ? odd : even, other = lane & 16 ? even : odd;
#pragma unroll
    for (u32 pair = 0; pair < 4; ++pair) {
        const u32 x = 2 * pair + block;  // the block whose row this lane addresses
        u32 in[4], out[4];
        ldmatrix_x4_trans(in, chunk_at(from, row + 16 * part + read_row, x));
        out[0] = __byte_perm(in[0], in[1], first);
        out[1] = __byte_perm(in[0], in[1], other);
        out[2] = __byte_perm(in[2], in[3], first);
        out[3] = __byte_perm(in[2], in[3], other);
        stmatrix_x4(chunk_at(to, column + 16 * x + written_row, part), out);
    }
}

// ---- The order of tiles ---------------------------------------------------------------------------------------------
// Where a tile lies. Tiles are numbered by raster groups of RASTER_GROUP rows of tiles, and within a group column by column. The
// CTAs that run at the same time then cover about a square of the matrix, and use all of the DRAM pages that they open, both when
// they read and when they write.
struct Place {
    int x, y, z;
};
__device__ __forceinline__ Place place_of(u32 tile, u32 tiles_x, u32 tiles_y) {
    const u32 plane = tiles_x * tiles_y, inside = tile % plane;
    const u32 group = inside / (tiles_x * RASTER_GROUP), rest = inside % (tiles_x * RASTER_GROUP);
    const u32 height = min(static_cast<u32>(RASTER_GROUP), tiles_y - group * RASTER_GROUP);
    return {static_cast<int>(rest / height), static_cast<int>(group * RASTER_GROUP + rest % height),
            static_cast<int>(tile / plane)};
}

// destination[z][x][y] = source[z][y][x], tile by tile; a CTA takes every gridDim.x-th tile. The first lane of the last warp loads a
// tile as panels of SIDE columns. The other warps transpose its squares into panels of SIDE rows, which thread 0 stores. Before the
// warps write to a transposed tile again, thread 0 waits until the stores have read it.
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
    u32 transposed = 0;   // the transposed tile that is written next
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
    if (threadIdx.x == 0) cp_async_bulk_wait_group<0>();  // shared memory must outlive the reads, and the kernel the writes
}
