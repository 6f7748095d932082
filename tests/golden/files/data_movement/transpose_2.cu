// cudatma: kernels/transpose.cu.j2 for sm_90a
// spec: TransposeSpec
//   element_bytes = 2
//   squares_y = 2
//   squares_x = 1
//   stages = 3
//   transposed_tiles = 2
//   warps = 4
//   raster_group = 16
//   entry = 'transpose'
// ring: 3 tiles of 128 x 64 elements, 16384 bytes, and 2 transposed ones; 81968 bytes of shared memory

using namespace cudatma;

typedef u16 Element;

constexpr u32 STAGES = 3;
constexpr u32 STAGE_BYTES = 16384;  // a tile: its panels, one after the other
constexpr u32 TRANSPOSED = 49152;   // the transposed tiles, which stores read; after the slots
constexpr u32 TRANSPOSED_TILES = 2;
constexpr u32 BARRIERS = 81920;
constexpr u32 WARPS = 4;  // that transpose tiles; one more warp loads
constexpr int SIDE = 64;  // elements of 128 bytes: a panel's width, and the side of a square
constexpr int SQUARES_Y = 2, SQUARES_X = 1;  // of a tile
constexpr u32 LINE_BYTES = 128;  // a row of a panel: one span of the swizzle
constexpr u32 LOADED_PANEL_BYTES = 16384;   // SIDE columns of all rows of a tile
constexpr u32 STORED_PANEL_BYTES = 8192;   // SIDE rows of all columns of a tile
constexpr int TILE_ROWS = SQUARES_Y * SIDE, TILE_COLUMNS = SQUARES_X * SIDE;
constexpr int RASTER_GROUP = 16;  // rows of tiles that are taken column by column

// The address of 16-byte chunk `chunk` of row `row` of a panel under TMA's 128-byte swizzle; panels begin on 1024 bytes.
__device__ __forceinline__ u32 chunk_at(u32 panel, u32 row, u32 chunk) {
    return panel + row * LINE_BYTES + ((chunk ^ (row & 7)) << 4);
}

constexpr u32 PARTS = 8;  // of a square: a warp transposes eight matrices of 8 x 8 elements

// Transposes part `part` of the square that begins at row `row` of panel `from` into rows `column`, .. of panel `to`.
//
// ldmatrix reads a matrix of 8 x 8 elements transposed, stmatrix writes its rows. In both panels, the eight rows of a matrix lie at
// eight different chunks of their lines, and no two meet in a bank.
__device__ __forceinline__ void transpose_part(u32 from, u32 row, u32 to, u32 column, u32 part) {
    const u32 lane = laneid(), line = lane & 7;
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
        const u32 x = half * 4 + (lane >> 3);  // the matrix whose row this lane addresses
        u32 r[4];
        ldmatrix_x4_trans(r, chunk_at(from, row + 8 * part + line, x));
        stmatrix_x4(chunk_at(to, column + 8 * x + line, part), r);
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
