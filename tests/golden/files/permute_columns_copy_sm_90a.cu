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

// [PTX ISA, griddepcontrol] The next kernel may start once all CTAs have said so or ended.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
    asm volatile("griddepcontrol.launch_dependents;" : : : "memory");
}
}  // namespace cudatma
using namespace cudatma;

constexpr u32 CONSUMERS = 512;  // threads that write
constexpr u32 ROWS = 1;  // rows taken at a time
constexpr u32 CHUNK = 8;  // elements of 16 bytes: what a thread writes at a time

// The columns of the source that a chunk takes. Elements after the last column take the last one.
__device__ __forceinline__ void source_columns(u32 (&from)[CHUNK], u32 chunk, u32 columns) {
#pragma unroll
    for (u32 i = 0; i < CHUNK; ++i) from[i] = min(chunk * CHUNK + i, columns - 1);
}

__device__ __forceinline__ uint4 gather(const u16* row, const u32 (&from)[CHUNK]) {
    u32 pairs[4];
#pragma unroll
    for (u32 i = 0; i < 4; ++i) pairs[i] = row[from[2 * i]] | (u32)row[from[2 * i + 1]] << 16;
    return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

// result[t, k] = source[t, k] for rows of 16-bit elements.
// Row y of CTAs takes ROWS rows of every gridDim.y * ROWS; the gridDim.x CTAs of a row divide their columns. Rows of the result begin
// at multiples of 16 bytes; their last chunk is written as a whole.
//   source_pitch  elements        result_pitch  chunks
extern "C" __global__ void __launch_bounds__(512)
permute_columns(
    const u16* source, uint4* result, u32 rows, u32 columns, u64 source_pitch, u64 result_pitch) {
    griddepcontrol_launch_dependents();   // the GEMM may start and prefetch its weights
    griddepcontrol_wait();                // kernels before this one may still write the source or read the result

    const u32 step = gridDim.y * ROWS;
    const u32 chunks = (columns + CHUNK - 1) / CHUNK;
    for (u32 first = blockIdx.y * ROWS; first < rows; first += step) {
        const u32 count = min(ROWS, rows - first);
        for (u32 chunk = blockIdx.x * CONSUMERS + threadIdx.x; chunk < chunks; chunk += gridDim.x * CONSUMERS) {
            u32 from[CHUNK];
            source_columns(from, chunk, columns);
#pragma unroll
            for (u32 r = 0; r < ROWS; ++r) {
                if (r >= count) break;
                const u16* row = source + (first + r) * source_pitch;
                result[(first + r) * result_pitch + chunk] = gather(row, from);
            }
        }
    }
}
