// cudatma: kernels/permute_columns.cu.j2 for sm_90a
// spec: PermuteColumnsSpec
//   has_permutation = True
//   staged_columns = 8192
//   rows = 2
//   stages = 2
//   consumers = 512
//   entry = 'permute_columns'
// ring: 2 stages of 32768 bytes, expect_tx 32768, 1 producer and 16 consumer arrivals; 65568 bytes of shared memory
//   +0 rows: 32768 bytes, 32768 by TMA
//   barriers at +65536: full[2], empty[2]

// [PTX ISA, griddepcontrol] Waits until the kernels before this one in the stream are finished and their writes visible.
// Returns at once unless the launch was a programmatic dependent one.
__device__ __forceinline__ void griddepcontrol_wait() {
    asm volatile("griddepcontrol.wait;" : : : "memory");
}

// [PTX ISA, griddepcontrol] The next kernel may start once all blocks have said so or ended.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
    asm volatile("griddepcontrol.launch_dependents;" : : : "memory");
}

}  // namespace cudatma
using namespace cudatma;

constexpr u32 STAGES = 2;
constexpr u32 ROW_BYTES = 16384;  // from one row to the next in a slot
constexpr u32 STAGE_BYTES = 32768;  // from one slot to the next
constexpr u32 BARRIERS = 65536;  // behind the slots
constexpr u32 CONSUMERS = 512;  // threads that write
constexpr u32 ROWS = 2;  // rows taken at a time: they share one reading of the permutation
constexpr u32 PIECE = 8;  // elements of 16 bytes: what a thread writes at a time

// Where the elements of a piece come from: columns of the source. What lies behind the last column reads the last one.
__device__ __forceinline__ void source_columns(u32 (&from)[PIECE], u32 piece, u32 columns) {
#pragma unroll
    for (u32 i = 0; i < PIECE; ++i) from[i] = min(piece * PIECE + i, columns - 1);
}
__device__ __forceinline__ void permuted_columns(u32 (&from)[PIECE], const int* order, u32 columns) {
#pragma unroll
    for (u32 i = 0; i < PIECE; ++i) from[i] = min((u32)order[from[i]], columns - 1);   // whatever it holds, no read leaves the row
}
__device__ __forceinline__ uint4 gather(const u16* row, const u32 (&from)[PIECE]) {
    u32 pairs[4];
#pragma unroll
    for (u32 i = 0; i < 4; ++i) pairs[i] = row[from[2 * i]] | (u32)row[from[2 * i + 1]] << 16;
    return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

// result[t, k] = source[t, order[k]] for rows of 16-bit elements.
// gridDim.y blocks take ROWS rows in turn, gridDim.x blocks share their columns. Rows of the result begin at multiples of 16
// bytes; its last piece is written whole.
//   source_pitch  elements        result_pitch  pieces
extern "C" __global__ void __launch_bounds__(544)
permute_columns(
    const int* order,
    const u16* source, uint4* result, u32 rows, u32 columns, u64 source_pitch, u64 result_pitch) {
    extern __shared__ __align__(128) u8 shared[];
    const u32 slots = shared_address(shared);
    TmaPipeline<STAGES> pipeline;
    pipeline.init(slots + BARRIERS, 1, CONSUMERS / 32);
    griddepcontrol_launch_dependents();   // the GEMM may come in and ask for its weights
    griddepcontrol_wait();                // source may still be written, result still be read by kernels before this one

    const u32 step = gridDim.y * ROWS;
    if (threadIdx.x >= CONSUMERS) {
        // ---- Producer: one thread brings whole rows -----------------------------------------------------------------
        if (threadIdx.x == CONSUMERS) {
            for (u32 first = blockIdx.y * ROWS; first < rows; first += step) {
                const u32 count = min(ROWS, rows - first), bytes = columns * 2;
                pipeline.acquire();
                pipeline.expect_tx(count * bytes);
                for (u32 r = 0; r < count; ++r)
                    cp_async_bulk_load(slots + pipeline.stage * STAGE_BYTES + r * ROW_BYTES, source + (first + r) * source_pitch,
                                       bytes, pipeline.get_barrier());
                pipeline.advance();
            }
        }
        return;
    }

    // ---- Consumers --------------------------------------------------------------------------------------------------
    const u32 pieces = (columns + PIECE - 1) / PIECE;
    for (u32 first = blockIdx.y * ROWS; first < rows; first += step) {
        const u32 count = min(ROWS, rows - first);
        pipeline.wait();
        const u8* slot = shared + pipeline.stage * STAGE_BYTES;
        for (u32 piece = blockIdx.x * CONSUMERS + threadIdx.x; piece < pieces; piece += gridDim.x * CONSUMERS) {
            u32 from[PIECE];
            source_columns(from, piece, columns);
            permuted_columns(from, order, columns);
#pragma unroll
            for (u32 r = 0; r < ROWS; ++r) {
                if (r >= count) break;
                const u16* row = (const u16*)(slot + r * ROW_BYTES);
                result[(first + r) * result_pitch + piece] = gather(row, from);
            }
        }
        __syncwarp();   // the warp has read the slot
        if (threadIdx.x % 32 == 0) pipeline.release();
        pipeline.advance();
    }
}
