// cudatma: kernels/gemm_mma_sync.cu.j2 for sm_120a
// config: GemmConfig
//   version = 'mma_sync'
//   dtype = 'float16'
//   layout = 'CC'
//   tile_m = 128
//   tile_n = 256
//   tile_k = 32
//   stages = 4
//   warpgroups = 2
// 8 consumer warps and 4 producer warps; 98368 bytes of shared memory per CTA.
// Arrays of a stage:
//     8192 bytes: A 128 x 32 float16, M-major, 128B swizzle
//    16384 bytes: B 32 x 256 float16, K-major, 64B swizzle

// primitives.cu contains
// u8, u16, u32, u64, TensorMap, shared_address, laneid, elect_sync, griddepcontrol_wait,
// griddepcontrol_launch_dependents, setmaxnreg_inc, setmaxnreg_dec, fence_proxy_async_shared_cta,
// fence_acq_rel_cta, mbarrier_init, mbarrier_arrive, mbarrier_arrive_expect_tx, mbarrier_try_wait_parity,
// mbarrier_wait_parity, fence_mbarrier_init, cp_async_bulk_tensor_3d_load, st_shared_v4_b32, ldmatrix_x4,
// ldmatrix_x4_trans, mma_m16n8k16_f16, TmaPipeline, wait_for_previous_grid, Divisor, divide, to_pair

namespace cudatma {

// ---- Tile -----------------------------------------------------------------------------------------------------------
constexpr u32 TILE_M = 128, TILE_N = 256;   // rows and columns of C per CTA
constexpr u32 TILE_K = 32;   // elements of K per stage
constexpr u32 STAGES = 4;
constexpr u32 THREADS = 384;
constexpr u32 CONSUMER_WARPS = 8;
constexpr bool A_IS_K_MAJOR = false, B_IS_K_MAJOR = true;   // otherwise M-major or N-major

// ---- Shared memory: byte offsets from a base that is 1024-byte aligned, with sizes in the comments -------------------
constexpr u32 A = 0;                          // 32768 bytes
constexpr u32 B = 32768;                      // 65536 bytes
constexpr u32 FULL_BARRIERS = 98304;          // 32 bytes

// ---- Slots: one per stage and operand -------------------------------------------------------------------------------
constexpr u32 ELEMENT_BYTES = 2;   // bytes per element of A and B
constexpr u32 SPAN_BYTES = 128, SPAN = SPAN_BYTES / ELEMENT_BYTES;   // row of the 128-byte swizzle in bytes and in elements
constexpr u32 MN_BOX_BYTES = TILE_K * SPAN_BYTES;   // bytes per box of an M-major or N-major operand (SPAN x TILE_K)
constexpr u32 B_SLOT_N = 256;   // columns of B in a slot, which holds whole boxes of an N-major operand
constexpr u32 A_STAGE_BYTES = TILE_M * TILE_K * ELEMENT_BYTES, B_STAGE_BYTES = B_SLOT_N * TILE_K * ELEMENT_BYTES;
constexpr u32 K_ROW_BYTES = TILE_K < SPAN ? TILE_K * ELEMENT_BYTES : SPAN_BYTES;   // width of a K-major operand's swizzle
constexpr u32 WARPS_M = 2, WARPS_N = 4;   // warps along M and along N
constexpr u32 WARP_M = TILE_M / WARPS_M, WARP_N = TILE_N / WARPS_N;
constexpr u32 CONSUMER_REGISTERS = 240, PRODUCER_REGISTERS = 24;   // registers per thread

// ---- Fragments ------------------------------------------------------------------------------------------------------
// A fragment of an operand has 16 rows of M or N and 32 bytes of K. ldmatrix loads it as four matrices.
//
// Return the address of the 16 bytes that a lane passes to ldmatrix for the first fragment in slot 0. `row0` is the warp's first row of the
// operand. Lanes 8 to 15 pass the addresses of rows 8 to 15, and lanes 16 to 31 pass the addresses of the second half of K. The swizzle
// moves 16-byte chunk c of row r to position c ^ (r % 8), or to c ^ (r / 2 % 4) if rows have 64 bytes.
template <bool IsKMajor>
__device__ __forceinline__ u32 lane_address(u32 slots, u32 row0, u32 lane) {
    if constexpr (IsKMajor) {
        const u32 row = row0 + lane % 16, chunk = lane / 16;
        return slots + row * K_ROW_BYTES + (chunk ^ (row * K_ROW_BYTES / SPAN_BYTES % (K_ROW_BYTES / 16))) * 16;
    } else {   // the rows of ldmatrix.trans are along K
        const u32 k = lane % 8 + lane / 16 * 8, chunk = row0 % SPAN / 8 + lane / 8 % 2;
        return slots + row0 / SPAN * MN_BOX_BYTES + k * SPAN_BYTES + (chunk ^ (k % 8)) * 16;
    }
}

// Permute the lanes for operand B, whose two halves of K must be in adjacent registers. Lanes 8 to 15 pass the addresses of the second half
// of K, and lanes 16 to 31 pass the addresses of rows 8 to 15.
__device__ __forceinline__ u32 lane_of_b(u32 lane) { return (lane & 7) | (lane << 1 & 16) | (lane >> 1 & 8); }

// Load a fragment. `address` is lane_address() in the slot. The next step along K and the next fragment of an M-major or N-major operand
// are two chunks away within a swizzled row, so only bits 5 and 6 of the address change.
template <bool IsKMajor, u32 Rows>
__device__ __forceinline__ void load_fragment(u32 (&r)[4], u32 address, u32 fragment, u32 step) {
    if constexpr (IsKMajor) {
        constexpr u32 STEPS_IN_ROW = K_ROW_BYTES / 32;
        const u32 box = step / STEPS_IN_ROW * Rows * K_ROW_BYTES;
        ldmatrix_x4(r, (address ^ (step % STEPS_IN_ROW << 5)) + box + fragment * 16 * K_ROW_BYTES);
    } else {
        ldmatrix_x4_trans(r, (address ^ (fragment % 4 << 5)) + fragment / 4 * MN_BOX_BYTES + step * 16 * SPAN_BYTES);
    }
}

constexpr u32 STEPS = TILE_K * ELEMENT_BYTES / 32;   // MMAs along the K of a stage
constexpr u32 FRAGMENTS_16 = WARP_M / 16, FRAGMENTS_8 = WARP_N / 8;   // fragments per warp along M and along N
constexpr u32 FRAGMENT_STRIDE_M = 16;   // rows from one fragment to the next

// The operands of one step.
struct Fragments {
    u32 a[FRAGMENTS_16][4];
    u32 b[FRAGMENTS_8 / 2][4];   // 16 columns each
};

// Load the operands of a step. `a` and `b` are the lane's addresses in the slot.
__device__ __forceinline__ void load_fragments(Fragments& to, u32 a, u32 b, u32 step) {
#pragma unroll
    for (u32 m = 0; m < FRAGMENTS_16; ++m) load_fragment<A_IS_K_MAJOR, TILE_M>(to.a[m], a, m, step);
#pragma unroll
    for (u32 n = 0; n < FRAGMENTS_8 / 2; ++n) load_fragment<B_IS_K_MAJOR, TILE_N>(to.b[n], b, n, step);
}

// ---- Products -------------------------------------------------------------------------------------------------------
// In each 16 x 8 fragment, a lane holds columns 2 (lane % 4) and 2 (lane % 4) + 1 of rows lane / 4 and lane / 4 + 8.

// The accumulators of a warp are fragments of 16 x 8 values. Each lane holds four values of each fragment.
typedef float Accumulators[FRAGMENTS_16][FRAGMENTS_8][4];
__device__ __forceinline__ void clear(Accumulators& acc) {
#pragma unroll
    for (u32 c = 0; c < FRAGMENTS_16; ++c)
#pragma unroll
        for (u32 r = 0; r < FRAGMENTS_8; ++r)
#pragma unroll
            for (u32 i = 0; i < 4; ++i) acc[c][r][i] = 0.0f;
}

__device__ __forceinline__ void multiply(Accumulators& acc, const Fragments& by) {
#pragma unroll
    for (u32 m = 0; m < FRAGMENTS_16; ++m)
#pragma unroll
        for (u32 n = 0; n < FRAGMENTS_8; ++n)
            mma_m16n8k16_f16(acc[m][n], by.a[m], by.b[n / 2][n % 2 * 2], by.b[n / 2][n % 2 * 2 + 1]);
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
    u32 matrix_tiles_m;             // number of tiles along M per matrix of the batch
    u32 a_box_rows;                 // number of rows per box of A
    u32 stage_bytes;                // bytes that the boxes of a stage deliver
    Divisor by_raster_group;        // divides by the number of tiles per raster group
    Divisor by_raster_group_rows;   // divides by raster_m
    Divisor by_last_rows;           // divides by the number of rows of tiles in the last raster group
    Divisor by_matrix_tiles_m;      // divides by matrix_tiles_m
    u64 output_pitch;               // stride between rows of the result, in elements
    u64 output_batch;               // stride between matrices of the result, in elements
};

// The first row and column of a tile or of a part of a tile, and the index of its matrix in the batch.
struct Place {
    u32 row0, column0, batch;
};

// Return the position of a tile. `tile_m` counts the rows of tiles across all matrices of the batch.
__device__ __forceinline__ Place tile_place(const Problem& problem, u32 tile_m, u32 tile_n) {
    const u32 batch = divide(tile_m, problem.by_matrix_tiles_m);
    return Place{(tile_m - batch * problem.matrix_tiles_m) * TILE_M, tile_n * TILE_N, batch};
}

// The output and the operands of the epilogue, in global memory.
struct Result {
    Out* output;
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

// Return the bits of `ones` where `mask` is 1, and the bits of `zeros` elsewhere. ptxas would compile a conditional expression on the lane
// to a branch.
__device__ __forceinline__ u32 select(u32 mask, u32 ones, u32 zeros) { return (ones & mask) | (zeros & ~mask); }

// Exchange `high` of the lower lane with `low` of the upper lane in each pair of lanes whose numbers differ by Distance.
template <u32 Distance>
__device__ __forceinline__ void exchange(u32& low, u32& high, u32 lane) {
    const u32 upper = 0 - (lane / Distance & 1);   // all ones in the upper lane
    const u32 other = __shfl_xor_sync(0xffffffffu, select(upper, low, high), Distance);
    low = select(upper, other, low);
    high = select(upper, high, other);
}

// Store a warp's part of a tile with 16-byte stores. Four lanes hold the 8 columns of a row of a fragment. Transposing adjacent fragments
// among these lanes gives each lane a 16-byte vector without shared memory. `place` is the position of the warp's part.
__device__ __forceinline__ void store_rows(Accumulators& acc, const Problem& problem, const Result& result, const Place& place, u32 lane) {
    Out* output = result.output + place.batch * problem.output_batch;
#pragma unroll
    for (u32 m = 0; m < FRAGMENTS_16; ++m)
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {   // rows 0 to 7, then 8 to 15
            const u32 row = place.row0 + FRAGMENT_STRIDE_M * m + 8 * half + lane / 4;
#pragma unroll
            for (u32 n = 0; n < FRAGMENTS_8; n += 4) {   // each lane receives all 8 columns of one row of one fragment
                u32 pairs[4];
#pragma unroll
                for (u32 i = 0; i < 4; ++i) pairs[i] = to_pair(acc[m][n + i][2 * half], acc[m][n + i][2 * half + 1]);
                exchange<1>(pairs[0], pairs[1], lane);
                exchange<1>(pairs[2], pairs[3], lane);
                exchange<2>(pairs[0], pairs[2], lane);
                exchange<2>(pairs[1], pairs[3], lane);
                store_vector(problem, output, uint4{pairs[0], pairs[1], pairs[2], pairs[3]}, row, place.column0 + 8 * (n + lane % 4));
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
    const TensorMap *a, *b;
};

// Load stage k of a tile into the current slot. Call this function from one thread.
__device__ __forceinline__ void load_stage(const Problem& problem, const Ring& ring, u32 smem, const Maps& maps, u32 k, const Place& place) {
    ring.expect_tx(problem.stage_bytes);
    load_box<A_IS_K_MAJOR, TILE_M>(smem + A + ring.stage * A_STAGE_BYTES, maps.a, ring.get_barrier(), k * TILE_K, place.row0, place.batch);
    load_box<B_IS_K_MAJOR, TILE_N>(smem + B + ring.stage * B_STAGE_BYTES, maps.b, ring.get_barrier(), k * TILE_K, place.column0, place.batch);
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

// An iterator over the stages of a queue's work units in the order in which the producer loads them.
struct StageCursor {
    WorkQueue queue;
    WorkUnit unit;
    u32 k, tile_m, tile_n;

    __device__ __forceinline__ StageCursor(const Problem& problem, u32 range)
        : queue(problem, range), unit{0, 0, 0}, k(0), tile_m(0), tile_n(0) {}

    // Advance to the next stage. Return false if there are no more stages.
    __device__ __forceinline__ bool next(const Problem& problem) {
        if (++k < unit.k_end) return true;
        if (!queue.next(problem, unit)) return false;
        k = unit.k_begin;
        tile_position(problem, unit.tile, tile_m, tile_n);
        return true;
    }
};

// ---- Producer: one thread -------------------------------------------------------------------------------------------
// Load this CTA's tiles. A tile's loads do not wait until the consumers have stored the previous tile.
__device__ __forceinline__ void produce(Ring& ring, const Problem& problem, u32 smem, const Maps& maps) {
    for (StageCursor at(problem, blockIdx.x); at.next(problem); ring.advance()) {
        ring.acquire();
        load_stage(problem, ring, smem, maps, at.k, tile_place(problem, at.tile_m, at.tile_n));
    }
}

// ---- Consumers ------------------------------------------------------------------------------------------------------
// Return the first row and the first column of a consumer warp's part of the tile.
__device__ __forceinline__ u32 row0_of(u32 warp) { return warp % WARPS_M * WARP_M; }
__device__ __forceinline__ u32 column0_of(u32 warp) { return warp / WARPS_M * WARP_N; }

// The addresses from which a lane reads slot 0.
struct LaneAddresses {
    u32 a, b;
    __device__ __forceinline__ LaneAddresses(u32 smem, u32 warp, u32 lane)
        : a(lane_address<A_IS_K_MAJOR>(smem + A, row0_of(warp), lane)),
          b(lane_address<B_IS_K_MAJOR>(smem + B, column0_of(warp), lane_of_b(lane))) {}
};

__device__ __forceinline__ void load_step(Fragments& to, const LaneAddresses& from, u32 slot, u32 step) {
    load_fragments(to, from.a + slot * A_STAGE_BYTES, from.b + slot * B_STAGE_BYTES, step);
}

// Multiply a stage. On entry, fragments[0] contains the fragments of step 0. The warp loads the fragments of each step before it issues the
// MMAs of the previous step. It releases the slot of the previous stage during the MMAs of this stage, after it has used all values of that
// slot.
template <bool IsLast>
__device__ __forceinline__ void multiply_stage(Accumulators& acc, Fragments (&fragments)[2], Ring& ring, const LaneAddresses& from,
                                               bool is_first, u32& previous) {
#pragma unroll
    for (u32 step = 0; step + 1 < STEPS; ++step) {
        load_step(fragments[(step + 1) % 2], from, ring.stage, step + 1);
        if (step == 0) {
            __syncwarp();
            if (!is_first && laneid() == 0) ring.release_used(previous);
        }
        multiply(acc, fragments[step % 2]);
    }
    previous = ring.stage;
    ring.advance();
    if constexpr (!IsLast) {
        ring.wait();
        load_step(fragments[0], from, ring.stage, 0);
    }
    multiply(acc, fragments[1]);
}

__device__ __forceinline__ void mainloop(Accumulators& acc, Ring& ring, const WorkUnit& unit, const LaneAddresses& from) {
    Fragments fragments[2];
    u32 k = unit.k_begin, previous = 0;
    ring.wait();
    load_step(fragments[0], from, ring.stage, 0);
#pragma unroll 1
    for (; k + 1 < unit.k_end; ++k) multiply_stage<false>(acc, fragments, ring, from, k == unit.k_begin, previous);
    multiply_stage<true>(acc, fragments, ring, from, k == unit.k_begin, previous);
    // Release the last slot with a fence. Without the fence, ptxas may move the MMAs of the last stage, and the reads of their operands,
    // past the arrival.
    __syncwarp();
    if (laneid() == 0) ring.release(previous);
}

__device__ __forceinline__ void consume(Ring& ring, const Problem& problem, const Result& result, const LaneAddresses& from) {
    WorkQueue queue(problem, blockIdx.x);
    WorkUnit unit;
    while (queue.next(problem, unit)) {
        Accumulators acc;
        clear(acc);
        mainloop(acc, ring, unit, from);
        // Compute the position of the results after the main loop, because the loop needs the registers.
        const u32 warp = threadIdx.x / 32;
        u32 tile_m, tile_n;
        tile_position(problem, unit.tile, tile_m, tile_n);
        Place place = tile_place(problem, tile_m, tile_n);
        place.row0 += row0_of(warp);
        place.column0 += column0_of(warp);
        store_rows(acc, problem, result, place, laneid());
    }
}
}  // namespace cudatma

// C = A B by mma.sync, for GPUs without wgmma. A producer warp loads by TMA, and consumer warps multiply. CTAs are persistent and compute
// one tile after another.
extern "C" __global__ void __launch_bounds__(384, 1)
gemm_mma_sync_f16_cc_128x256x32_w2_s4(
    const __grid_constant__ cudatma::TensorMap a_map,
    const __grid_constant__ cudatma::TensorMap b_map,
    cudatma::Out* output,
    const __grid_constant__ cudatma::Problem problem) {
    using namespace cudatma;
    extern __shared__ __align__(1024) u8 dynamic_shared[];
    const u32 smem = shared_address(dynamic_shared);
    // The shuffle proves to ptxas that the value is uniform.
    const u32 warp_index = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);

    clear_unloaded(problem, smem);
    Ring ring;
    ring.init(smem + FULL_BARRIERS, 1, CONSUMER_WARPS);   // one thread fills a slot, and each consumer warp releases the slot
    wait_for_previous_grid();
    if (warp_index >= CONSUMER_WARPS) {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        if (warp_index == CONSUMER_WARPS && elect_sync()) produce(ring, problem, smem, Maps{&a_map, &b_map});
    } else {
        setmaxnreg_inc<CONSUMER_REGISTERS>();
        consume(ring, problem, Result{output}, LaneAddresses(smem, warp_index, laneid()));
    }
}
