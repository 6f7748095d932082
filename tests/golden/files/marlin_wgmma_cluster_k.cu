// cudatma: kernels/marlin_wgmma.cu.j2 for sm_90a
// spec: MarlinConfig
//   version = 'wgmma'
//   dtype = 'float16'
//   group_size = 128
//   has_zeros = False
//   tile_m = 64
//   tile_n = 64
//   tile_k = 256
//   stages = 4
//   slice_k = 2
//   cluster_n = 1
//   cluster_k = 3
//   blocks_per_sm = 1
//   consumer_registers = 0
//   deep_box = False
//   warpgroups = 1
//   mmas_per_commit = 2
//   commits_in_flight = 1
//   scale_form = 'none'
//   pingpong = False
//   warps_n = 0
//   scale_on = ''
//   weight_load_path = 'tma'
//   scale_load_path = 'tma'
//   activation_load_path = 'tma'
// 8 warps consume, 1 produce; a CTA takes 197064 B.
// One stage holds
//    32768 B  activations 64 x 256 float16, 128B swizzle
//     8192 B  weights 64 x 256 int4, packed layout 1
//      256 B  scales 2 x 64 float16
// Shared memory, by offset
//        0  activations, 131072 B
//   131072  weights, 32768 B
//   163840  scales, 1024 B
//   164864  slice_sums, 16384 B
//   181248  staging, 3456 B
//   184704  cluster_sums, 12288 B
//   196992  cluster_barrier, 8 B
//   197000  full_barriers, 32 B
//   197032  empty_barriers, 32 B

// [PTX ISA, Asynchronous Warpgroup Level Matrix, Matrix Descriptor] Where an operand lies in shared memory. For rows of K under
// a swizzle: stride_bytes from 8 rows to the next 8, leading_bytes unused. swizzle: 0 none, 1 128B, 2 64B, 3 32B: the numbers run
// the other way than a tensor map's. A later k16 step of the same rows is 32 bytes further: 2 in the descriptor's low bits.
// For rows of M or N (a transposed operand): stride_bytes from 8 of K to the next 8, leading_bytes from 64 of M or N to the next.
__device__ __forceinline__ u64 matrix_descriptor(u32 address, u32 leading_bytes, u32 stride_bytes, u32 swizzle) {
    return static_cast<u64>((address & 0x3ffff) >> 4) | static_cast<u64>(leading_bytes >> 4) << 16 |
           static_cast<u64>(stride_bytes >> 4) << 32 | static_cast<u64>(swizzle) << 62;
}

// [PTX ISA, wgmma.wait_group] Waits until at most the Newest (0..7) latest groups are in flight.
template <u32 Newest>
__device__ __forceinline__ void wgmma_wait_group() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" : : "n"(Newest) : "memory");
}

// [PTX ISA, griddepcontrol] Waits until the kernels before this one in the stream are finished and their writes visible.
// Returns at once unless the launch was a programmatic dependent one.
__device__ __forceinline__ void griddepcontrol_wait() {
    asm volatile("griddepcontrol.wait;" : : : "memory");
}

// [PTX ISA, griddepcontrol] The next kernel may start once all CTAs have said so or ended.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
    asm volatile("griddepcontrol.launch_dependents;" : : : "memory");
}

// [PTX ISA, barrier.cluster] Waits, with acquire order, until all threads of the cluster have arrived.
__device__ __forceinline__ void barrier_cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" : : : "memory");
}

// ---- The tile, as named constants -----------------------------------------------------------------------------------
constexpr u32 TILE_M = 64;      // rows of M of a CTA's tile: columns of the wgmma
constexpr u32 TILE_N = 64;      // columns of N: rows of the wgmmas
constexpr u32 TILE_K = 256;      // K of one stage
constexpr u32 WARPGROUPS = 1;   // along N
constexpr u32 SLICE_K = 2;      // warpgroups with the same columns of N, which divide each stage's K
constexpr u32 STACK = 1;          // wgmmas of 64 columns of N in a warpgroup
constexpr u32 STAGES = 4;
constexpr u32 CLUSTER = 1;      // CTAs of a cluster, along N; they share the activations
constexpr u32 LOADED_M = 64;     // rows of M that each of them loads, for all
constexpr u32 CLUSTER_K = 3;    // CTAs of a cluster that divide the K of its tile
constexpr u32 MMAS_PER_COMMIT = 2;      // wgmmas of an accumulator in a commit group, 16 of K each
constexpr u32 COMMITS_IN_FLIGHT = 1;  // commit groups outstanding while the next one is dequantized
constexpr u32 RELEASE_K64 = 0;   // after this 64-deep block all wgmmas of the previous stage are complete
constexpr u32 CONSUMER_WARPS = 8;
constexpr bool HAS_STAGE_SCALES = true;   // else they are of whole columns
constexpr bool HAS_ZEROS = false;           // else the zero point is 8
constexpr u32 GROUP_SIZE = 128;    // K that share a scale in a stage; TILE_K for whole columns

constexpr u32 WARP_TILES = 4 * WARPGROUPS;      // parts of a CTA's tile that warps hold
constexpr u32 FRAGMENTS_16 = STACK;              // of 16 columns of N in a warp ...
constexpr u32 FRAGMENT_STRIDE_N = 64;           // ... and the columns from one to the next
constexpr u32 FRAGMENTS_8 = TILE_M / 8;        // of 8 rows of M
constexpr u32 K64_PER_STAGE = TILE_K / 64;
constexpr u32 K64_PER_SLICE = K64_PER_STAGE / SLICE_K;
constexpr u32 N64_PER_TILE = TILE_N / 64;
constexpr u32 K64_BLOCK_BYTES = 2048;           // one 64 x 64 block of packed weights
constexpr u32 ROW_BYTES = 128;                  // of the activations' boxes: 64 of K
constexpr u32 SWIZZLE_128B = 1, SWIZZLE_REPEAT_BYTES = 8 * ROW_BYTES;   // in a matrix descriptor

// ---- Shared memory: STAGES slots of each operand, then the epilogue's part; offsets from a 1024-byte aligned base ----
constexpr u32 ACTIVATION_STAGE_BYTES = 32768;
constexpr u32 WEIGHT_STAGE_BYTES = 8192;
constexpr u32 SCALE_STAGE_BYTES = 256;
constexpr u32 ZERO_STAGE_BYTES = 0;
constexpr u32 TRANSACTION_BYTES = 41216;   // what TMA delivers to one stage
constexpr u32 EMPTY_ARRIVALS = 8;
constexpr u32 ACTIVATIONS = 0;
constexpr u32 WEIGHTS = 131072;
constexpr u32 SCALES = 163840;
constexpr u32 ZEROS = 0;
constexpr u32 SLICE_THREADS = 128;        // that hold the same part of the tile for one slice
constexpr u32 SLICE_SUMS = 164864;
constexpr u32 CLUSTER_SUMS = 184704;
constexpr u32 CLUSTER_BARRIER = 196992;
constexpr u32 STAGING = 181248;
constexpr u32 STAGING_ROWS = 24;   // rows of M that a warpgroup stores together
constexpr u32 OWN = STAGING_ROWS / 8;   // fragments along M that a CTA of the cluster adds up and stores
constexpr u32 STAGING_PITCH_BYTES = 144;   // from one row to the next
constexpr u32 STAGING_BYTES = 3456;   // of one warpgroup
constexpr u32 RING_BARRIERS = 197000;
using Ring = TmaPipeline<STAGES>;

// bar_sync() at named barrier First + index, index < Count. Each number is a constant in the code: ptxas sets all 16 barriers
// aside for a number that it does not know.
template <u32 First, u32 Count>
__device__ __forceinline__ void bar_sync_one_of(u32 index, u32 threads) {
    if constexpr (Count == 1) {
        bar_sync(First, threads);
    } else if (index == 0) {
        bar_sync(First, threads);
    } else {
        bar_sync_one_of<First + 1, Count - 1>(index - 1, threads);
    }
}
__device__ __forceinline__ void warpgroup_sync(u32 warpgroup) { bar_sync_one_of<1, WARPGROUPS>(warpgroup, 128); }
// The warpgroups with the same columns of N.
__device__ __forceinline__ void slice_sync(u32 warpgroup) {
    bar_sync_one_of<1 + WARPGROUPS, WARPGROUPS>(warpgroup, SLICE_K * SLICE_THREADS);
}

// Divides 0 .. 2^31 - 1 by a number that the host knows, with a multiplication; a division takes some 25 instructions.
struct Divisor {
    u32 multiplier, shift;     // 2^(31 + shift) / number, rounded up; 2^shift >= number
};

__device__ __forceinline__ u32 divide(u32 n, const Divisor& by) { return __umulhi(2 * n, by.multiplier) >> by.shift; }
// What a launch passes to the kernel, besides tensor maps and pointers: the members that this kernel reads.
struct Problem {
    u32 m;                          // rows of the result
    u32 n;                          // columns of the result
    u32 tiles_m;                    // output tiles along M
    u32 tiles_n;                    // output tiles along N, each of one CTA or cluster
    u32 raster_m;                   // rows of tiles of a raster group
    u32 k_iterations;               // stages that one tile takes
    u32 output_vectors;             // 1: every row of the result is aligned to 16 bytes
    u32 prefetch_stages;            // stages whose weights a dependent launch loads before it waits
    Divisor by_raster_group;        // divides by the tiles of a raster group
    Divisor by_raster_group_rows;   // divides by raster_m
    Divisor by_last_rows;           // divides by the rows of tiles of the last raster group
    u64 output_pitch;               // elements from one row to the next
};

// Stages k_begin .. k_end - 1 of an output tile.
struct WorkUnit {
    u32 tile, k_begin, k_end;
};

// ---- Tiles to CTAs: cluster split-K --------------------------------------------------------------------------------
// Each cluster computes one tile. Its CTAs take whole stages of the tile's K, in the order of their ranks, as evenly as
// possible.
struct WorkQueue {
    u32 cta;
    bool is_taken;

    __device__ __forceinline__ WorkQueue(const Problem&, u32 cta) : cta(cta), is_taken(false) {}

    __device__ __forceinline__ bool next(const Problem& problem, WorkUnit& unit) {
        if (is_taken) return false;
        is_taken = true;
        const u32 tile = cta / CLUSTER_K, rank = cta - tile * CLUSTER_K;
        unit = WorkUnit{tile, rank * problem.k_iterations / CLUSTER_K, (rank + 1) * problem.k_iterations / CLUSTER_K};
        return true;
    }
};

// Raster order: tiles are numbered in groups of raster_m rows of tiles, and in each group column by column, so that CTAs
// that run at the same time share operands in L2.
__device__ __forceinline__ void tile_position(const Problem& problem, u32 tile, u32& tile_m, u32& tile_n) {
    const u32 raster_group = divide(tile, problem.by_raster_group), first_row = raster_group * problem.raster_m;
    const u32 inside = tile - first_row * problem.tiles_n, rows_left = problem.tiles_m - first_row;
    const bool is_last = rows_left <= problem.raster_m;
    tile_n = divide(inside, is_last ? problem.by_last_rows : problem.by_raster_group_rows);
    tile_m = first_row + inside - tile_n * (is_last ? rows_left : problem.raster_m);
}

// The same work stage by stage, for the producer.
struct StageCursor {
    WorkQueue queue;
    WorkUnit unit;
    u32 k, tile_m, tile_n;

    __device__ __forceinline__ StageCursor(const Problem& problem, u32 range)
        : queue(problem, range), unit{0, 0, 0}, k(0), tile_m(0), tile_n(0) {}

    __device__ __forceinline__ bool next(const Problem& problem) {
        if (++k < unit.k_end) return true;
        if (!queue.next(problem, unit)) return false;
        k = unit.k_begin;
        tile_position(problem, unit.tile, tile_m, tile_n);
        return true;
    }
};

// ---- Between float16 and fp32: two values in a register -------------------------------------------------------------
__device__ __forceinline__ float low_to_float(u32 pair) {
    float d;
    asm("{ .reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l; }" : "=f"(d) : "r"(pair));
    return d;
}

__device__ __forceinline__ u32 to_pair(float low, float high) {
    u32 d;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
}

// ---- Arithmetic of two halves in a register -------------------------------------------------------------------------
__device__ __forceinline__ u32 subtract(u32 a, u32 b) {
    u32 d;
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}

__device__ __forceinline__ u32 multiply(u32 a, u32 b) {
    u32 d;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}

__device__ __forceinline__ u32 multiply_add(u32 a, u32 b, u32 c) {
    u32 d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

// Moves of halves: ptxas folds them into a modifier of the instruction that reads the pair. It would keep a byte permutation.
__device__ __forceinline__ u32 both_low(u32 pair) {
    u32 d;
    asm("{ .reg .b16 l, h; mov.b32 {l, h}, %1; mov.b32 %0, {l, l}; }" : "=r"(d) : "r"(pair));
    return d;
}

__device__ __forceinline__ u32 both_high(u32 pair) {
    u32 d;
    asm("{ .reg .b16 l, h; mov.b32 {l, h}, %1; mov.b32 %0, {h, h}; }" : "=r"(d) : "r"(pair));
    return d;
}

// A thread's 16 bytes of a 64 x 64 block hold one word for each 16 rows of W: word i.
__device__ __forceinline__ u32 word(const uint4& words, u32 i) {
    return i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w;
}

// A fragment of sums in shared memory, 16 bytes a thread.
__device__ __forceinline__ void store_fragment(u32 smem, const float (&sums)[4]) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};"
                 :: "r"(smem), "f"(sums[0]), "f"(sums[1]), "f"(sums[2]), "f"(sums[3]) : "memory");
}

__device__ __forceinline__ void add_fragment(float (&sums)[4], u32 smem) {
    float other[4];
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(other[0]), "=f"(other[1]), "=f"(other[2]), "=f"(other[3]) : "r"(smem) : "memory");
#pragma unroll
    for (u32 i = 0; i < 4; ++i) sums[i] += other[i];
}

// ---- Accumulators, and partial sums of them -------------------------------------------------------------------------
// Partial sums travel as whole fragments, 16 bytes a thread, so that both sides use the same addresses.

// A warp's accumulators: fragments of 16 x 8 values, four a lane.

typedef float Accumulators[FRAGMENTS_16][FRAGMENTS_8][4];

__device__ __forceinline__ void clear(Accumulators& acc) {
#pragma unroll
    for (u32 c = 0; c < FRAGMENTS_16; ++c)
#pragma unroll
        for (u32 r = 0; r < FRAGMENTS_8; ++r)
#pragma unroll
            for (u32 i = 0; i < 4; ++i) acc[c][r][i] = 0.0f;
}

// ---- Within a CTA: slice-K ------------------------------------------------------------------------------------------
// SLICE_K groups of SLICE_THREADS threads hold the same part of the tile, each for one slice of every stage's K. Groups
// 1 .. SLICE_K - 1 store their sums in shared memory, and group 0 adds them to its own in the order of the slices. part: the
// part's number in the tile. thread: of the group. Returns whether this group goes on with the sum.
__device__ __forceinline__ bool reduce_slices(Accumulators& acc, u32 smem, u32 part, u32 slice, u32 thread) {
    constexpr u32 FRAGMENT_BYTES = SLICE_THREADS * 16, SUM_BYTES = FRAGMENTS_16 * FRAGMENTS_8 * FRAGMENT_BYTES;
    const u32 sums = smem + SLICE_SUMS + part * (SLICE_K - 1) * SUM_BYTES + thread * 16;
    if (slice > 0) {
#pragma unroll
        for (u32 c = 0; c < FRAGMENTS_16; ++c)
#pragma unroll
            for (u32 r = 0; r < FRAGMENTS_8; ++r)
                store_fragment(sums + (slice - 1) * SUM_BYTES + (c * FRAGMENTS_8 + r) * FRAGMENT_BYTES, acc[c][r]);
    }
    slice_sync(part);   // group 0 waits for the sums of the others
    if (slice == 0) {
#pragma unroll
        for (u32 other = 0; other < SLICE_K - 1; ++other)
#pragma unroll
            for (u32 c = 0; c < FRAGMENTS_16; ++c)
#pragma unroll
                for (u32 r = 0; r < FRAGMENTS_8; ++r)
                    add_fragment(acc[c][r], sums + other * SUM_BYTES + (c * FRAGMENTS_8 + r) * FRAGMENT_BYTES);
    }
    return slice == 0;
}

// ---- Within a cluster: split-K over distributed shared memory --------------------------------------------------------
// CTA r of the cluster adds up OWN of the FRAGMENTS_8 fragments, from r * OWN on; the last CTAs have fewer, or none.
constexpr u32 CLUSTER_FRAGMENT_BYTES = 32 * 16;

__device__ __forceinline__ u32 own_fragments(u32 rank) {
    return rank * OWN < FRAGMENTS_8 ? min(OWN, FRAGMENTS_8 - rank * OWN) : 0;
}

// What the CTA of this rank receives.
__device__ __forceinline__ u32 cluster_sums_bytes(u32 rank) {
    return (CLUSTER_K - 1) * WARP_TILES * FRAGMENTS_16 * own_fragments(rank) * CLUSTER_FRAGMENT_BYTES;
}

// Where a CTA receives the sums of a warp of its `sender`-th peer.
__device__ __forceinline__ u32 cluster_sums(u32 smem, u32 sender, u32 warp_tile, u32 lane) {
    return smem + CLUSTER_SUMS + (sender * WARP_TILES + warp_tile) * FRAGMENTS_16 * OWN * CLUSTER_FRAGMENT_BYTES + lane * 16;
}

// Sends to every peer the sums that the peer adds up, and adds what the peers send to this CTA's own sums, in the order of
// ranks. Returns whether this CTA has rows of the result.
__device__ __forceinline__ bool reduce_cluster(Accumulators& acc, u32 smem, u32 rank, u32 warp_tile, u32 lane) {
    barrier_cluster_wait();   // all CTAs have started and initialized their barriers
#pragma unroll
    for (u32 peer = 0; peer < CLUSTER_K; ++peer) {
        if (peer == rank) continue;
        const u32 target = mapa_shared_cluster(cluster_sums(smem, rank - (rank > peer), warp_tile, lane), peer);
        const u32 barrier = mapa_shared_cluster(smem + CLUSTER_BARRIER, peer);
#pragma unroll
        for (u32 c = 0; c < FRAGMENTS_16; ++c)
#pragma unroll
            for (u32 r = peer * OWN; r < min((peer + 1) * OWN, FRAGMENTS_8); ++r)
                st_async_v4_f32(target + (c * OWN + r - peer * OWN) * CLUSTER_FRAGMENT_BYTES, acc[c][r], barrier);
    }
    if (own_fragments(rank) == 0) return false;
    mbarrier_wait_parity_acquire_cluster(smem + CLUSTER_BARRIER, 0);   // the sums of all peers have arrived
#pragma unroll
    for (u32 r = 0; r < FRAGMENTS_8; ++r) {
        if (r / OWN != rank) continue;
#pragma unroll
        for (u32 sender = 0; sender < CLUSTER_K - 1; ++sender)
#pragma unroll
            for (u32 c = 0; c < FRAGMENTS_16; ++c)
                add_fragment(acc[c][r],
                             cluster_sums(smem, sender, warp_tile, lane) + (c * OWN + r % OWN) * CLUSTER_FRAGMENT_BYTES);
    }
    return true;
}

// ---- Epilogue: accumulators to rows of the result -------------------------------------------------------------------

// column0: the warp's first column; its fragments along N follow at a distance of FRAGMENT_STRIDE_N.
__device__ __forceinline__ void add_bias(Accumulators& acc, const Problem& problem, const u16* bias, u32 column0, u32 lane) {
    if (bias == nullptr) return;
    const u32 g = lane >> 2;
#pragma unroll
    for (u32 c = 0; c < FRAGMENTS_16; ++c) {
        const u32 low = column0 + FRAGMENT_STRIDE_N * c + g, high = low + 8;
        const float bias_low = low < problem.n ? low_to_float(bias[low]) : 0.0f;
        const float bias_high = high < problem.n ? low_to_float(bias[high]) : 0.0f;
#pragma unroll
        for (u32 r = 0; r < FRAGMENTS_8; ++r) {
            acc[c][r][0] += bias_low;
            acc[c][r][1] += bias_low;
            acc[c][r][2] += bias_high;
            acc[c][r][3] += bias_high;
        }
    }
}

// 16 bytes of one row, from shared memory ...
__device__ __forceinline__ uint4 load_vector(u32 smem) {
    uint4 values;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(values.x), "=r"(values.y), "=r"(values.z), "=r"(values.w)
                 : "r"(smem) : "memory");
    return values;
}

// ... to the result.
template <typename Element>
__device__ __forceinline__ void store_vector(const Problem& problem, Element* output, uint4 values, u32 row, u32 column) {
    constexpr u32 COLUMNS = 16 / sizeof(Element);
    if (row >= problem.m || column >= problem.n) return;
    Element* target = output + row * problem.output_pitch + column;
    if (problem.output_vectors && column + COLUMNS <= problem.n) {
        *(uint4*)target = values;
    } else {   // a row that is not 16-byte aligned, or the last columns
        const u32 words[4] = {values.x, values.y, values.z, values.w};
#pragma unroll
        for (u32 i = 0; i < COLUMNS; ++i) {
            if (column + i >= problem.n) continue;
            if constexpr (COLUMNS == 4) target[i] = __uint_as_float(words[i]);
            else target[i] = (Element)(words[i / 2] >> (i % 2 * 16));
        }
    }
}

// A warpgroup stores rows `first` and following of its part of the tile, at most STAGING_ROWS of them, through its staging
// rows: stmatrix.trans turns fragments (columns x rows) into rows, which leave as 16-byte stores. row0, column0: the part's
// first row and column of the result. Before the call all warps have read what they staged before.
__device__ __forceinline__ void store_rows_of_warpgroup(const Accumulators& acc, const Problem& problem, u16* output, u32 smem,
                                                        u32 warpgroup, u32 warp, u32 lane, u32 first, u32 row0, u32 column0) {
    constexpr u32 VECTORS_PER_ROW = 8 * FRAGMENTS_16;   // of eight columns
    constexpr u32 VECTORS_PER_THREAD = (STAGING_ROWS * VECTORS_PER_ROW + 127) / 128;
    const u32 staging = smem + STAGING + warpgroup * STAGING_BYTES, thread = warp * 32 + lane;
    const u32 rows = min(STAGING_ROWS, TILE_M - first);   // the last ones may be fewer
    const u32 vectors = rows * VECTORS_PER_ROW;
#pragma unroll
    for (u32 row = 0; row < rows; row += 16)
#pragma unroll
        for (u32 c = 0; c < FRAGMENTS_16; ++c) {
            const u32 r = (first + row) / 8, column = (8 * c + 2 * warp + (lane >> 3 & 1)) * 16;
            const u32 target = staging + (row + (lane & 7)) * STAGING_PITCH_BYTES + column;
            const u32 low[2] = {to_pair(acc[c][r][0], acc[c][r][1]), to_pair(acc[c][r][2], acc[c][r][3])};
            if (row + 8 < rows) {
                const float(&next)[4] = acc[c][r + 1];
                const u32 both[4] = {low[0], low[1], to_pair(next[0], next[1]), to_pair(next[2], next[3])};
                stmatrix_x4_trans(target + (lane >> 4) * 8 * STAGING_PITCH_BYTES, both);
            } else {
                stmatrix_x2_trans(target, low);
            }
        }
    warpgroup_sync(warpgroup);   // all warps have written the rows
    // The compiler drops the second test where all threads have an i-th vector.
    uint4 values[VECTORS_PER_THREAD];   // all loads before the first store, which waits for one
#pragma unroll
    for (u32 i = 0; i < VECTORS_PER_THREAD; ++i) {
        const u32 vector = 128 * i + thread, row = vector / VECTORS_PER_ROW, column = vector % VECTORS_PER_ROW;
        if (128 * (i + 1) <= vectors || vector < vectors)
            values[i] = load_vector(staging + row * STAGING_PITCH_BYTES + column * 16);
    }
#pragma unroll
    for (u32 i = 0; i < VECTORS_PER_THREAD; ++i) {
        const u32 vector = 128 * i + thread, row = vector / VECTORS_PER_ROW, column = vector % VECTORS_PER_ROW;
        if (128 * (i + 1) <= vectors || vector < vectors)
            store_vector(problem, output, values[i], row0 + first + row, column0 + 8 * column);
    }
}

// ---- int4 -> float16: one LOP3 puts two nibbles into the mantissas of a magic number -------------------------------
__device__ __forceinline__ u32 and_or(u32 a, u32 mask, u32 bits) {   // one LOP3: (a & mask) | bits
    u32 d;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(a), "r"(mask), "r"(bits));
    return d;
}

// low: 1024 + zero point of column g, which is subtracted. high: -(64 + zero point) of column g + 8, which is added after the
// division by 16. Each in both halves.
struct ZeroPoint {
    u32 low, high;
};

__device__ __forceinline__ ZeroPoint zero_point(u32 zero_low, u32 zero_high) {
    return ZeroPoint{0x64006400u | zero_low | zero_low << 16, 0xd400d400u | zero_high << 4 | zero_high << 20};
}

// 0x6400 is 1024.0 in fp16, whose last mantissa bit counts 1: 0x6400 | v is exactly 1024 + v, and 0x6400 | v << 4 is 1024 + 16 v.
// 1/16 of the latter is exactly 64 + v. The nibbles of column g + 8 therefore need no shift.
__device__ __forceinline__ void dequantize(u32 (&a)[4], u32 q, const ZeroPoint& zero) {
    const u32 upper = q >> 8;
    a[0] = subtract(and_or(q, 0x000f000fu, 0x64006400u), zero.low);
    a[1] = multiply_add(and_or(q, 0x00f000f0u, 0x64006400u), 0x2c002c00u, zero.high);
    a[2] = subtract(and_or(upper, 0x000f000fu, 0x64006400u), zero.low);
    a[3] = multiply_add(and_or(upper, 0x00f000f0u, 0x64006400u), 0x2c002c00u, zero.high);
}

// ---- int4 times the scale of its group ------------------------------------------------------------------------------
// Of a group of weights, for columns g and g + 8 of a fragment: the scales, twice each, and the zero points.
struct GroupScale {
    u32 low, high;
    ZeroPoint zero;
};

// pair: the scales of columns g (low half) and g + 8 (high half).
__device__ __forceinline__ void set_scales(GroupScale& group, u32 pair) {
    group.low = both_low(pair);
    group.high = both_high(pair);
}

__device__ __forceinline__ void dequantize_group(u32 (&a)[4], u32 q, const GroupScale& group) {
    dequantize(a, q, group.zero);
    if constexpr (HAS_STAGE_SCALES) {
        a[0] = multiply(a[0], group.low);
        a[1] = multiply(a[1], group.high);
        a[2] = multiply(a[2], group.low);
        a[3] = multiply(a[3], group.high);
    }
}

// ---- Main loop: int4 weights from shared memory to operand A's registers, wgmma with activations from shared memory ---------
__device__ __forceinline__ void wgmma_m64n64k16_f32_f16(float (&d)[8][4], const u32 (&a)[4], u64 b, bool accumulates = true) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
        "}, {%32, %33, %34, %35}, %36, p, 1, 1, 0;\n"
        "}"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]),
          "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]), "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((u32)accumulates)
        : "memory");
}

// The lane's own value, through a shuffle: ptxas would otherwise compute an address anew in each stage.
__device__ __forceinline__ u32 keep_in_register(u32 value, u32 lane = laneid()) { return __shfl_sync(0xffffffffu, value, lane); }

// Where a warp stands among the consumers.
struct WarpPosition {
    u32 warpgroup, slice, warp, lane;   // slice: of each stage's K. warp: of the warpgroup
};

// Where this thread reads in slot 0; the other slots follow at a stage's distance.
struct SlotAddresses {
    u32 activations, weights, scales = 0, zeros = 0;

    __device__ __forceinline__ SlotAddresses(u32 smem, const WarpPosition& at) {
        const u32 k64 = at.slice * K64_PER_SLICE;
        activations = smem + ACTIVATIONS + k64 * TILE_M * ROW_BYTES;
        weights = keep_in_register(smem + WEIGHTS + (at.warpgroup * STACK * K64_PER_STAGE + k64) * K64_BLOCK_BYTES +
                                   at.warp * 512 + at.lane * 16);
        if constexpr (HAS_STAGE_SCALES) {
            // In a row of scales: columns g and g + 8.
            const u32 pair = k64 * 64 / GROUP_SIZE * TILE_N + at.warpgroup * STACK * 64 + 8 * (at.lane >> 2) + 2 * at.warp;
            scales = keep_in_register(smem + SCALES + pair * 2);
            if constexpr (HAS_ZEROS) zeros = keep_in_register(smem + ZEROS + pair);
        }
    }
};

// What a thread holds of the weights: the 64-deep block that is multiplied and, where there are several, the next one.
constexpr u32 PACKED_BLOCKS = K64_PER_SLICE > 1 ? 2 : 1;
struct WeightFragments {
    uint4 packed[PACKED_BLOCKS][STACK];   // one word for each 16-deep step
    GroupScale group[STACK];
};

__device__ __forceinline__ void load_packed(WeightFragments& weights, const SlotAddresses& slots, u32 stage, u32 k64) {
#pragma unroll
    for (u32 s = 0; s < STACK; ++s)
        asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(weights.packed[k64 % PACKED_BLOCKS][s].x), "=r"(weights.packed[k64 % PACKED_BLOCKS][s].y),
                       "=r"(weights.packed[k64 % PACKED_BLOCKS][s].z), "=r"(weights.packed[k64 % PACKED_BLOCKS][s].w)
                     : "r"(slots.weights + stage * WEIGHT_STAGE_BYTES + (s * K64_PER_STAGE + k64) * K64_BLOCK_BYTES)
                     : "memory");
}

// row: of the stage's groups.
__device__ __forceinline__ void load_group(WeightFragments& weights, const Problem& problem, const SlotAddresses& slots,
                                           u32 stage, u32 row) {
    u32 scales[STACK];
#pragma unroll
    for (u32 s = 0; s < STACK; ++s)
        asm volatile("ld.shared.b32 %0, [%1];"
                     : "=r"(scales[s])
                     : "r"(slots.scales + stage * SCALE_STAGE_BYTES + (row * TILE_N + 64 * s) * 2)
                     : "memory");
#pragma unroll
    for (u32 s = 0; s < STACK; ++s) {
        set_scales(weights.group[s], scales[s]);
    }
}

// step: of the 64-deep block k64.
__device__ __forceinline__ void dequantize_step(u32 (&a)[STACK][4], const WeightFragments& weights, u32 k64, u32 step) {
#pragma unroll
    for (u32 s = 0; s < STACK; ++s)
        dequantize_group(a[s], word(weights.packed[k64 % PACKED_BLOCKS][s], step), weights.group[s]);
}

// This warp has read a slot. The CTA that fills it waits for all of its consumers; in a cluster, where each CTA fills a part
// of every CTA's slot, for those of all CTAs.
__device__ __forceinline__ void release(const Ring& ring, u32 slot, u32 lane) {
    ring.release_used_by_warp(slot, lane);
}

// Multiplies the stages of a work unit. MMAS_PER_COMMIT 16-deep slices of weights are dequantized while up to
// COMMITS_IN_FLIGHT commit groups of wgmmas are outstanding.
//
// A slot is released in the next stage, when no outstanding wgmma reads its activations. Instructions issued before have then
// used its weights (TmaPipeline::release_used()). Returns the last slot, whose products may still be outstanding.
__device__ __forceinline__ u32 mainloop(Accumulators& acc, WeightFragments& weights, const Problem& problem,
                                        const SlotAddresses& slots, Ring& ring, const WorkUnit& unit, u32 lane) {
    u32 previous = ring.stage;
#pragma unroll 1
    for (u32 k = unit.k_begin; k < unit.k_end; ++k) {
        // Through a shuffle, so that ptxas knows that the address is the same in a whole warp. Otherwise each wgmma's
        // descriptor, computed in registers, takes two moves to uniform registers.
        const u32 address = __shfl_sync(0xffffffffu, slots.activations + ring.stage * ACTIVATION_STAGE_BYTES, 0);
        ring.wait();
        const u64 activations = matrix_descriptor(address, 16, SWIZZLE_REPEAT_BYTES, SWIZZLE_128B);
        load_packed(weights, slots, ring.stage, 0);   // each 64-deep block's while the one before it is multiplied
#pragma unroll
        for (u32 i = 0; i < K64_PER_SLICE; ++i) {
            if (i + 1 < K64_PER_SLICE) load_packed(weights, slots, ring.stage, i + 1);
            if constexpr (HAS_STAGE_SCALES) {
                if (i * 64 % GROUP_SIZE == 0) load_group(weights, problem, slots, ring.stage, i * 64 / GROUP_SIZE);
            }
#pragma unroll
            for (u32 first = 0; first < 4; first += MMAS_PER_COMMIT) {
                u32 a[MMAS_PER_COMMIT][STACK][4];
#pragma unroll
                for (u32 j = 0; j < MMAS_PER_COMMIT; ++j) {
                    if constexpr (GROUP_SIZE == 32) {
                        if (first + j == 2) load_group(weights, problem, slots, ring.stage, i * 2 + 1);
                    }
                    dequantize_step(a[j], weights, i, first + j);
                }
                wgmma_fence();
#pragma unroll
                for (u32 j = 0; j < MMAS_PER_COMMIT; ++j)
#pragma unroll
                    for (u32 s = 0; s < STACK; ++s)
                        wgmma_m64n64k16_f32_f16(
                            acc[s], a[j][s], activations + ((i * TILE_M * ROW_BYTES + (first + j) * 32) >> 4));
                wgmma_commit_group();
                wgmma_wait_group<COMMITS_IN_FLIGHT>();
            }
            if (i == RELEASE_K64 && k > unit.k_begin) release(ring, previous, lane);
        }
        previous = ring.stage;
        ring.advance();
    }
    return previous;
}

// The operands, by the names of the launch parameters. Maps that this kernel does not take are null.
struct Operands {
    const TensorMap *weight_map, *scale_map, *zero_map, *activation_map;
    const u16* bias;
    u16* output;
};

// ---- Producer: one thread -------------------------------------------------------------------------------------------
// L2 policies. Weights that several rows of tiles read should stay in L2.
struct Policies {
    u64 weights;
};

__device__ __forceinline__ Policies choose_policies(const Problem& problem) {
    const bool has_rows = problem.tiles_m > 1;
    const u64 first = createpolicy_evict_first(), normal = createpolicy_evict_normal();
    return {has_rows ? normal : first};
}

// Announces the bytes of a stage, and loads what no kernel before this one writes: weights, as one box of K64_PER_STAGE x
// N64_PER_TILE blocks, scales and zero points. Blocks outside of the tensor arrive as zeros, and so do their scales.
__device__ __forceinline__ void load_weights(const Ring& ring, u32 slot, const StageCursor& at, const Operands& operands,
                                             u32 smem, u32 rank, const Policies& policies) {
    const u32 full = ring.get_barrier(slot), tile_n = at.tile_n * CLUSTER + rank;
    ring.expect_tx(slot, TRANSACTION_BYTES);
    cp_async_bulk_tensor_3d_load_hint(smem + WEIGHTS + slot * WEIGHT_STAGE_BYTES, operands.weight_map, full, 0,
                                      at.k * K64_PER_STAGE, tile_n * N64_PER_TILE, policies.weights);
    if constexpr (HAS_STAGE_SCALES) {
        const u32 row = at.k * TILE_K / GROUP_SIZE;
        cp_async_bulk_tensor_2d_load(smem + SCALES + slot * SCALE_STAGE_BYTES, operands.scale_map, full, tile_n * TILE_N, row);
        if constexpr (HAS_ZEROS)
            cp_async_bulk_tensor_2d_load(smem + ZEROS + slot * ZERO_STAGE_BYTES, operands.zero_map, full, tile_n * TILE_N,
                                         row);
    }
}

// K64_PER_STAGE boxes of rows x 64 of K in the 128-byte swizzle; what lies outside of the tensor is zero.
__device__ __forceinline__ void load_activations(const Ring& ring, u32 slot, const StageCursor& at, const Operands& operands,
                                                 u32 smem, u32 rank, const Policies& policies) {
    const u32 row = rank * LOADED_M;
    const u32 target = smem + ACTIVATIONS + slot * ACTIVATION_STAGE_BYTES + row * ROW_BYTES;
#pragma unroll
    for (u32 i = 0; i < K64_PER_STAGE; ++i)
        cp_async_bulk_tensor_2d_load(target + i * TILE_M * ROW_BYTES, operands.activation_map, ring.get_barrier(slot),
                                     at.k * TILE_K + i * 64, at.tile_m * TILE_M + row);
}

// The first lap of the ring, for which no slot has to be released. Weights, scales and zero points do not depend on the kernel
// before this one; activations do. A dependent launch therefore loads the weights of the first stages before it waits for that
// kernel. Not those of all stages: the activations of the first one would queue after them.
__device__ __forceinline__ void produce_first_lap(const Ring& ring, StageCursor& cursor, const Problem& problem,
                                                  const Operands& operands, u32 smem, u32 rank, const Policies& policies) {
    const u32 prefetched = min(STAGES, problem.prefetch_stages);
    StageCursor ahead(cursor);
#pragma unroll 1
    for (u32 slot = 0; slot < prefetched && ahead.next(problem); ++slot)
        load_weights(ring, slot, ahead, operands, smem, rank, policies);
    griddepcontrol_launch_dependents();   // the next kernel may start and load its weights
    griddepcontrol_wait();
#pragma unroll 1
    for (u32 slot = 0; slot < STAGES && cursor.next(problem); ++slot) {
        if (slot >= prefetched) load_weights(ring, slot, cursor, operands, smem, rank, policies);
        load_activations(ring, slot, cursor, operands, smem, rank, policies);
    }
}

__device__ __forceinline__ void produce(Ring& ring, StageCursor& cursor, const Problem& problem, const Operands& operands,
                                        u32 smem, u32 rank, const Policies& policies) {
    ring.next_lap();
#pragma unroll 1
    for (; cursor.next(problem); ring.advance()) {
        ring.acquire();
        load_weights(ring, ring.stage, cursor, operands, smem, rank, policies);
        load_activations(ring, ring.stage, cursor, operands, smem, rank, policies);
    }
}

// ---- Consumers: WARPGROUPS x SLICE_K warpgroups ---------------------------------------------------------------------
// Scales and stores the complete sums of a tile. row0: its first row. column0: the warpgroup's first column. rank_k: of this
// CTA among those that divide the tile's K; each stores the rows that it added up.
__device__ __forceinline__ void epilogue(Accumulators& acc, const Problem& problem, const Operands& operands, u32 smem,
                                         const WarpPosition& warp, u32 row0, u32 column0, u32 rank_k) {
    add_bias(acc, problem, operands.bias, column0 + 16 * warp.warp, warp.lane);
#pragma unroll
    for (u32 first = 0; first < TILE_M; first += STAGING_ROWS) {
        if constexpr (CLUSTER_K > 1) {   // one tile, and one store for each CTA: the staging rows are free
            if (first / STAGING_ROWS != rank_k) continue;
        } else {
            warpgroup_sync(warp.warpgroup);   // all warps have read the rows before, of this tile or of the one before it
        }
        store_rows_of_warpgroup(acc, problem, operands.output, smem, warp.warpgroup, warp.warp, warp.lane, first, row0, column0);
    }
}

// range: the CTA's work range. rank: of the CTA in its cluster, along N.
__device__ __forceinline__ void consume(Ring& ring, const Problem& problem, const Operands& operands, u32 smem, u32 range,
                                        u32 rank, const WarpPosition& warp) {
    const SlotAddresses slots(smem, warp);
    const u32 warp_tile = warp.warpgroup * 4 + warp.warp, rank_k = range % CLUSTER_K;
    WorkQueue queue(problem, range);
    WorkUnit unit;
    Accumulators acc;
    WeightFragments weights;
#pragma unroll
    for (u32 s = 0; s < STACK; ++s) weights.group[s].zero = zero_point(8, 8);
    griddepcontrol_wait();   // the kernel before this one may still use the workspace and the result
    while (queue.next(problem, unit)) {
        u32 tile_m, tile_n;
        tile_position(problem, unit.tile, tile_m, tile_n);
        const u32 column0 = (tile_n * CLUSTER + rank) * TILE_N + warp.warpgroup * STACK * 64;
        clear(acc);
        const u32 slot = mainloop(acc, weights, problem, slots, ring, unit, warp.lane);
        wgmma_wait_group<0>();
        release(ring, slot, warp.lane);
        if (!reduce_slices(acc, smem, warp.warpgroup, warp.slice, warp.warp * 32 + warp.lane)) continue;
        if (!reduce_cluster(acc, smem, rank_k, warp_tile, warp.lane)) continue;
        epilogue(acc, problem, operands, smem, warp, tile_m * TILE_M, column0, rank_k);
    }
}
}  // namespace cudatma

// Y = X W as Y^T = W^T X^T: columns of N are the rows of the wgmma. One thread of the last warps produces: it fills the
// slots of the ring with TMA. The warpgroups before it consume: they dequantize weights into operand A's registers, multiply,
// and store. Producer and consumers walk through the same work units.
extern "C" __global__ void __launch_bounds__(288, 1)
marlin_wgmma_f16_g128_64x64x256_w1_k2_s4_g21_x3(
    const __grid_constant__ cudatma::TensorMap weight_map,
    const __grid_constant__ cudatma::TensorMap scale_map,
    const __grid_constant__ cudatma::TensorMap activation_map,
    const cudatma::u16* bias,
    cudatma::u16* output,
    const __grid_constant__ cudatma::Problem problem) {
    using namespace cudatma;
    extern __shared__ __align__(1024) u8 dynamic_shared[];
    const u32 smem = shared_address(dynamic_shared);
    // Through a shuffle, so that ptxas knows that it is the same in a whole warp.
    const u32 warp_index = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
    const Operands operands{&weight_map, &scale_map, nullptr, &activation_map, bias, output};
    const u32 range = blockIdx.x;
    const u32 rank = 0;
    Ring ring;
    ring.attach(smem + RING_BARRIERS);

    // One thread initializes the barriers and issues every copy. elect_sync() rather than the first lane: ptxas then knows
    // that one thread goes on, and puts no loop around each copy.
    const bool is_producer_warp = warp_index == CONSUMER_WARPS;
    const Policies policies = choose_policies(problem);
    StageCursor cursor(problem, range);
    if (is_producer_warp && elect_sync()) {
        prefetch_tensormap(&weight_map);
        prefetch_tensormap(&activation_map);
        prefetch_tensormap(&scale_map);
        mbarrier_init(smem + CLUSTER_BARRIER, 1);
        ring.init_barriers(1, EMPTY_ARRIVALS);
        mbarrier_arrive_expect_tx(smem + CLUSTER_BARRIER, cluster_sums_bytes(range % CLUSTER_K));
        // The copies need no other warp, but in a cluster the barriers of the other CTAs.
        if constexpr (CLUSTER == 1) produce_first_lap(ring, cursor, problem, operands, smem, rank, policies);
    }
    __syncwarp();
    __syncthreads();          // the barriers are initialized
    barrier_cluster_arrive_relaxed();   // reduce_cluster() waits; fence_mbarrier_init() has ordered the barriers
    if (warp_index >= CONSUMER_WARPS) {
        if (is_producer_warp && elect_sync()) {
            if constexpr (CLUSTER > 1) produce_first_lap(ring, cursor, problem, operands, smem, rank, policies);
            produce(ring, cursor, problem, operands, smem, rank, policies);
        }
        __syncwarp();
    } else {
        const u32 slice = SLICE_K > 1 ? warp_index / 4 / WARPGROUPS : 0;
        consume(ring, problem, operands, smem, range, rank,
                WarpPosition{warp_index / 4 - slice * WARPGROUPS, slice, warp_index % 4, laneid()});
    }
}
