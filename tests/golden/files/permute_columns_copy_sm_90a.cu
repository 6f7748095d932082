// cudatma: kernels/permute_columns.cu.j2 for sm_90a
// spec: PermuteColumnsSpec
//   has_permutation = False
//   staged_columns = 0
//   rows = 1
//   stages = 2
//   consumers = 512
//   entry = 'permute_columns'
// no ring: elements come from global memory

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

constexpr u32 CONSUMERS = 512;  // threads that write
constexpr u32 ROWS = 1;  // rows taken at a time
constexpr u32 PIECE = 8;  // elements of 16 bytes: what a thread writes at a time

// Where the elements of a piece come from: columns of the source. What lies behind the last column reads the last one.
__device__ __forceinline__ void source_columns(u32 (&from)[PIECE], u32 piece, u32 columns) {
#pragma unroll
    for (u32 i = 0; i < PIECE; ++i) from[i] = min(piece * PIECE + i, columns - 1);
}
__device__ __forceinline__ uint4 gather(const u16* row, const u32 (&from)[PIECE]) {
    u32 pairs[4];
#pragma unroll
    for (u32 i = 0; i < 4; ++i) pairs[i] = row[from[2 * i]] | (u32)row[from[2 * i + 1]] << 16;
    return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

// result[t, k] = source[t, k] for rows of 16-bit elements.
// gridDim.y blocks take ROWS rows in turn, gridDim.x blocks share their columns. Rows of the result begin at multiples of 16
// bytes; its last piece is written whole.
//   source_pitch  elements        result_pitch  pieces
extern "C" __global__ void __launch_bounds__(512)
permute_columns(
    const u16* source, uint4* result, u32 rows, u32 columns, u64 source_pitch, u64 result_pitch) {
    griddepcontrol_launch_dependents();   // the GEMM may come in and ask for its weights
    griddepcontrol_wait();                // source may still be written, result still be read by kernels before this one

    const u32 step = gridDim.y * ROWS;
    const u32 pieces = (columns + PIECE - 1) / PIECE;
    for (u32 first = blockIdx.y * ROWS; first < rows; first += step) {
        const u32 count = min(ROWS, rows - first);
        for (u32 piece = blockIdx.x * CONSUMERS + threadIdx.x; piece < pieces; piece += gridDim.x * CONSUMERS) {
            u32 from[PIECE];
            source_columns(from, piece, columns);
#pragma unroll
            for (u32 r = 0; r < ROWS; ++r) {
                if (r >= count) break;
                const u16* row = source + (first + r) * source_pitch;
                result[(first + r) * result_pitch + piece] = gather(row, from);
            }
        }
    }
}
