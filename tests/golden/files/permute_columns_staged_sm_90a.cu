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

// [PTX ISA, griddepcontrol] The next kernel may start once all CTAs have said so or ended.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
    asm volatile("griddepcontrol.launch_dependents;" : : : "memory");
}

}  // namespace cudatma
using namespace cudatma;

constexpr u32 STAGES = 2;
constexpr u32 ROW_BYTES = 16384;  // from one row to the next in a slot
constexpr u32 STAGE_BYTES = 32768;  // from one slot to the next
constexpr u32 BARRIERS = 65536;  // after the slots
constexpr u32 CONSUMERS = 512;  // threads that write
constexpr u32 ROWS = 2;  // rows taken at a time, for which the permutation is read once
constexpr u32 CHUNK = 8;  // elements of 16 bytes: what a thread writes at a time

// The columns of the source that a chunk takes. Elements after the last column take the last one.
__device__ __forceinline__ void source_columns(u32 (&from)[CHUNK], u32 chunk, u32 columns) {
#pragma unroll
    for (u32 i = 0; i < CHUNK; ++i) from[i] = min(chunk * CHUNK + i, columns - 1);
}

__device__ __forceinline__ void permuted_columns(u32 (&from)[CHUNK], const int* order, u32 columns) {
#pragma unroll
    for (u32 i = 0; i < CHUNK; ++i) from[i] = min((u32)order[from[i]], columns - 1);   // no read leaves the row
}

__device__ __forceinline__ uint4 gather(const u16* row, const u32 (&from)[CHUNK]) {
    u32 pairs[4];
#pragma unroll
    for (u32 i = 0; i < 4; ++i) pairs[i] = row[from[2 * i]] | (u32)row[from[2 * i + 1]] << 16;
    return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

// result[t, k] = source[t, order[k]] for rows of 16-bit elements.
// Row y of CTAs takes ROWS rows of every gridDim.y * ROWS; the gridDim.x CTAs of a row divide their columns. Rows of the result begin
// at multiples of 16 bytes; their last chunk is written as a whole.
//   source_pitch  elements        result_pitch  chunks
extern "C" __global__ void __launch_bounds__(544)
permute_columns(
    const int* order,
    const u16* source, uint4* result, u32 rows, u32 columns, u64 source_pitch, u64 result_pitch) {
    extern __shared__ __align__(128) u8 shared[];
    const u32 slots = shared_address(shared);
    TmaPipeline<STAGES> pipeline;
    pipeline.init(slots + BARRIERS, 1, CONSUMERS / 32);
    griddepcontrol_launch_dependents();   // the GEMM may start and prefetch its weights
    griddepcontrol_wait();                // kernels before this one may still write the source or read the result

    const u32 step = gridDim.y * ROWS;
    if (threadIdx.x >= CONSUMERS) {
        // ---- Producer: one thread loads whole rows ------------------------------------------------------------------
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
    const u32 chunks = (columns + CHUNK - 1) / CHUNK;
    for (u32 first = blockIdx.y * ROWS; first < rows; first += step) {
        const u32 count = min(ROWS, rows - first);
        pipeline.wait();
        const u8* slot = shared + pipeline.stage * STAGE_BYTES;
        for (u32 chunk = blockIdx.x * CONSUMERS + threadIdx.x; chunk < chunks; chunk += gridDim.x * CONSUMERS) {
            u32 from[CHUNK];
            source_columns(from, chunk, columns);
            permuted_columns(from, order, columns);
#pragma unroll
            for (u32 r = 0; r < ROWS; ++r) {
                if (r >= count) break;
                const u16* row = (const u16*)(slot + r * ROW_BYTES);
                result[(first + r) * result_pitch + chunk] = gather(row, from);
            }
        }
        __syncwarp();   // all lanes have read the slot
        if (threadIdx.x % 32 == 0) pipeline.release();
        pipeline.advance();
    }
}
