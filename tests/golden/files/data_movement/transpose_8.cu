// cudatma: kernels/transpose.cu.j2 for sm_120a
// spec: TransposeSpec
//   element_bytes = 8
//   squares_y = 4
//   squares_x = 2
//   stages = 2
//   turned = 1
//   warps = 4
//   raster_group = 16
//   entry = 'transpose'
// ring: 2 tiles of 64 x 32 elements, 16384 bytes, and 1 turned ones; 49184 bytes of shared memory

using namespace cudatma;

typedef u64 Element;

constexpr u32 STAGES = 2;
constexpr u32 STAGE_BYTES = 16384;  // a tile: its panels, one after the other
constexpr u32 BARRIERS = 49152;  // behind the slots and the turned tiles
constexpr u32 TURNED = 32768;  // where the turned tiles stand
constexpr u32 TURNED_TILES = 1;
constexpr u32 WARPS = 4;  // that turn tiles; one more warp loads
constexpr int SIDE = 16;  // elements of 128 bytes: a panel's width, and the side of a square
constexpr int SQUARES_Y = 4, SQUARES_X = 2;  // squares of a tile
constexpr u32 LINE = 128;  // bytes of a panel's row: one span of the swizzle
constexpr u32 IN_PANEL = 8192;  // a tile's rows
constexpr u32 OUT_PANEL = 4096;  // a tile's columns
constexpr int TILE_ROWS = SQUARES_Y * SIDE, TILE_COLUMNS = SQUARES_X * SIDE;
constexpr int RASTER_GROUP = 16;  // tiles below each other that are taken before the next ones to the right

// The address of 16-byte chunk `chunk` of row `row` of a panel under TMA's 128-byte swizzle; panels begin on 1024 bytes.
__device__ __forceinline__ u32 chunk_at(u32 panel, u32 row, u32 chunk) {
    return panel + row * LINE + ((chunk ^ (row & 7)) << 4);
}

constexpr u32 PARTS = 2;               // of a square: a warp turns half of its blocks
constexpr u32 BLOCK = 16 / sizeof(Element);  // elements of a 16-byte chunk: a lane turns BLOCK x BLOCK in its registers

// Turns part `part` of the square that begins at row `row` of panel `from` into rows `column`, .. of panel `to`.
//
// The square is 8 x 8 blocks. A lane takes block (a, b) = (q ^ t, q), q = lane % 8: of eight lanes that are served
// together the chunks that they read lie in eight different places of a line, and so do those that they write.
__device__ __forceinline__ void turn(u32 from, u32 row, u32 to, u32 column, u32 part) {
    const u32 lane = laneid(), b = lane & 7, a = b ^ (lane >> 3 | part << 2);
    Element in[BLOCK][BLOCK];
#pragma unroll
    for (u32 i = 0; i < BLOCK; ++i) {
        const u32 at = chunk_at(from, row + BLOCK * a + i, b);
        asm volatile("ld.shared.v2.b64 {%0, %1}, [%2];" : "=l"(in[i][0]), "=l"(in[i][1]) : "r"(at) : "memory");
    }
#pragma unroll
    for (u32 i = 0; i < BLOCK; ++i) {
        const u32 at = chunk_at(to, column + BLOCK * b + i, a);
        asm volatile("st.shared.v2.b64 [%0], {%1, %2};" : : "r"(at), "l"(in[0][i]), "l"(in[1][i]) : "memory");
    }
}
// Where a tile stands: raster groups of RASTER_GROUP rows of tiles, in each of them column by column. Blocks that run together
// then cover about a square of the matrix and use all of the DRAM pages that they open, when they read and when they write.
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

// destination[z][x][y] = source[z][y][x], tile by tile; a block takes every gridDim.x-th tile. The last warp's first lane
// loads a tile as panels of SIDE columns. The other warps turn its squares into panels of SIDE rows; then thread 0 stores
// those, and waits for the stores of an earlier tile to have read before its panels are written again.
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
                cp_async_bulk_tensor_3d_load(slot + panel * IN_PANEL, &source, pipeline.get_barrier(),
                                             at.x * TILE_COLUMNS + panel * SIDE, at.y * TILE_ROWS, at.z);
            }
            pipeline.advance();
        }
        return;
    }

    if (threadIdx.x == 0) prefetch_tensormap(&destination);
    u32 turned = 0;
    for (u32 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const u32 from = slots + pipeline.stage * STAGE_BYTES, to = slots + TURNED + turned * STAGE_BYTES;
        if (threadIdx.x == 0) cp_async_bulk_wait_group_read<TURNED_TILES - 1>();
        bar_sync(1, WARPS * 32);
        pipeline.wait();
        for (u32 part = warp; part < SQUARES_Y * SQUARES_X * PARTS; part += WARPS) {
            const u32 square = part / PARTS, y = square / SQUARES_X, x = square % SQUARES_X;
            turn(from + x * IN_PANEL, y * SIDE, to + y * OUT_PANEL, x * SIDE, part % PARTS);
        }
        fence_proxy_async_shared_cta();
        __syncwarp();
        if (laneid() == 0) pipeline.release();
        pipeline.advance();
        bar_sync(1, WARPS * 32);
        if (threadIdx.x == 0) {
            const Place at = place_of(tile, tiles_x, tiles_y);
            for (int panel = 0; panel < SQUARES_Y; ++panel) {
                cp_async_bulk_tensor_3d_store(&destination, to + panel * OUT_PANEL, at.y * TILE_ROWS + panel * SIDE,
                                              at.x * TILE_COLUMNS, at.z);
            }
            cp_async_bulk_commit_group();
        }
        if (++turned == TURNED_TILES) turned = 0;
    }
    if (threadIdx.x == 0) cp_async_bulk_wait_group<0>();  // shared memory must outlive the reads, and the writes the kernel
}
