// cudatma: kernels/permute_columns.cu.j2 for sm_90a
// config: PermuteColumnsConfig
//   has_permutation = True
//   staged_columns = 8192
//   rows = 2
// ring: 2 stages of 32768 bytes; per stage, expect_tx of 32768 bytes, 1 producer arrival and 16 consumer arrivals; 65568 bytes of shared memory in total
//   +0 rows: 32768 bytes, 32768 loaded by TMA
//   barriers at +65536: full[2], empty[2]

// primitives.cu contains
// u8, u16, u32, u64, shared_address, griddepcontrol_wait, griddepcontrol_launch_dependents, fence_acq_rel_cta,
// mbarrier_init, mbarrier_arrive, mbarrier_arrive_expect_tx, mbarrier_try_wait_parity, mbarrier_wait_parity,
// fence_mbarrier_init, cp_async_bulk_load, TmaPipeline

using namespace cudatma;

constexpr u32 STAGES = 2;
constexpr u32 ROW_BYTES = 16384;   // bytes from one row to the next in a slot
constexpr u32 STAGE_BYTES = 32768;   // bytes from one slot to the next
constexpr u32 BARRIERS = 65536;  // offset of the barriers, after the slots
constexpr u32 CONSUMERS = 512;   // threads that write the result
constexpr u32 ROWS = 2;   // rows per step; a thread reads the permutation once for all of them
constexpr u32 CHUNK = 8;   // elements per 16-byte chunk; a thread writes one chunk at a time

// Set `from` to the columns of a chunk of the result. Elements after the last column repeat the last column.
__device__ __forceinline__ void source_columns(u32 (&from)[CHUNK], u32 chunk, u32 columns) {
#pragma unroll
    for (u32 i = 0; i < CHUNK; ++i) from[i] = min(chunk * CHUNK + i, columns - 1);
}

// Replace the columns of the result in `from` with the columns of the source.
__device__ __forceinline__ void permuted_columns(u32 (&from)[CHUNK], const int* order, u32 columns) {
#pragma unroll
    for (u32 i = 0; i < CHUNK; ++i) from[i] = min((u32)order[from[i]], columns - 1);   // clamped so that the load stays inside the row
}

// Return a chunk that contains the row elements at the columns in `from`.
__device__ __forceinline__ uint4 gather(const u16* row, const u32 (&from)[CHUNK]) {
    u32 pairs[4];
#pragma unroll
    for (u32 i = 0; i < 4; ++i) pairs[i] = row[from[2 * i]] | (u32)row[from[2 * i + 1]] << 16;
    return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

// Compute result[t, k] = source[t, order[k]] for rows of 16-bit elements.
// The CTAs with blockIdx.y == y process ROWS rows out of every gridDim.y * ROWS rows. The columns are divided among these CTAs. Rows of the
// result must begin at multiples of 16 bytes. The kernel writes all elements of a row's last chunk, even those after the last column.
// `source_pitch` is in elements, and `result_pitch` is in chunks.
extern "C" __global__ void __launch_bounds__(544)
permute_columns(
    const int* order,
    const u16* source, uint4* result, u32 rows, u32 columns, u64 source_pitch, u64 result_pitch) {
    extern __shared__ __align__(128) u8 shared[];
    const u32 slots = shared_address(shared);
    TmaPipeline<STAGES> pipeline;
    pipeline.init(slots + BARRIERS, 1, CONSUMERS / 32);
    griddepcontrol_launch_dependents();   // allows the GEMM to start and load its weights
    griddepcontrol_wait();                // previous kernels may still be writing the source or reading the result

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
        __syncwarp();   // no lane may still be reading the slot when lane 0 releases it
        if (threadIdx.x % 32 == 0) pipeline.release();
        pipeline.advance();
    }
}
