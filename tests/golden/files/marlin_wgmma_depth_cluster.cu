// cudatma: kernels/marlin_wgmma.cu.j2 for sm_90a
// spec: WgmmaSpec
//   dtype = 'float16'
//   group_size = 128
//   has_zeros = False
//   block_m = 64
//   block_k = 256
//   warpgroups = 1
//   stack = 1
//   stages = 4
//   cluster = 1
//   mmas_per_commit = 2
//   commits_in_flight = 1
//   consumer_registers = 0
//   warpgroups_k = 2
//   weight_policy = 'evict_first'
//   fused = 'none'
//   cluster_k = 3
// 8 warps consume, 1 produce; a block takes 197064 B.
// One stage holds
//    32768 B  activations 64 x 256 float16, 128B swizzle
//     8192 B  weights 64 x 256 int4, packed layout 1
//      256 B  scales 2 x 64 float16
// Shared memory, by offset
//        0  activations, 131072 B
//   131072  weights, 32768 B
//   163840  scales, 1024 B
//   164864  depth_reduction, 16384 B
//   181248  output_staging, 3456 B
//   184704  cluster_reduction, 12288 B
//   196992  cluster_barrier, 8 B
//   197000  full_barriers, 32 B
//   197032  empty_barriers, 32 B

// [PTX ISA, barrier.cluster] Waits, with acquire order, until all threads of the cluster have arrived.
__device__ __forceinline__ void barrier_cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" : : : "memory");
}

// [PTX ISA, Asynchronous Warpgroup Level Matrix, Matrix Descriptor] Where an operand lies in shared memory. For rows of K under
// a swizzle: stride_bytes from 8 rows to the next 8, leading_bytes unused. swizzle: 0 none, 1 128B, 2 64B, 3 32B: the numbers run
// the other way than a tensor map's. A later k16 step of the same rows is 32 bytes further: 2 in the descriptor's low bits.
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

// [PTX ISA, griddepcontrol] The next kernel may start once all blocks have said so or ended.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
    asm volatile("griddepcontrol.launch_dependents;" : : : "memory");
}

// ---- The problem's types and the tile, as named constants -----------------------------------------------------------
constexpr u32 BLOCK_M = 64;      // tokens of a block's tile (columns of the wgmma)
constexpr u32 BLOCK_N = 64;      // channels (rows of the wgmmas)
constexpr u32 BLOCK_K = 256;      // depth of one stage
constexpr u32 WARPGROUPS = 1;   // with channels of their own
constexpr u32 WARPGROUPS_K = 2;   // that share channels and divide each stage's depth
constexpr u32 STACK = 1;          // 64-channel blocks of a warpgroup
constexpr u32 STAGES = 4;
constexpr u32 CLUSTER = 1;      // blocks that work on one share, side by side in N
constexpr u32 CLUSTER_MASK = 1;
constexpr u32 SHARE_M = 64;      // tokens that one of them loads for all
constexpr u32 CLUSTER_K = 3;   // blocks of the cluster, which divide the depth of its tile
constexpr u32 MMAS_PER_COMMIT = 2;      // wgmmas of an accumulator in a commit group, each 16 deep
constexpr u32 COMMITS_IN_FLIGHT = 1;  // groups that go on while the next one is dequantised
constexpr u32 RELEASE_BLOCK = 0;   // behind this 64-deep block all wgmmas of the stage before are complete
constexpr u32 CONSUMER_WARPS = 8;
constexpr u32 GROUP_SIZE = 128;   // depths that share a scale; 0: the whole column

constexpr u32 WARP_TILES = 4 * WARPGROUPS;      // parts of a tile with a flag of their own
constexpr u32 C_GROUPS = STACK;                 // 16-channel fragments of a warp ...
constexpr u32 C_STRIDE = 64;                    // ... and the channels from one to the next
constexpr u32 N8 = BLOCK_M / 8;                 // 8-token fragments
constexpr u32 K64_PER_STAGE = BLOCK_K / 64;
constexpr u32 K64_PER_WARPGROUP = 2;
constexpr u32 N64_PER_TILE = BLOCK_N / 64;
constexpr u32 K64_BLOCK_BYTES = 2048;           // one 64 x 64 block of packed weights
constexpr u32 ROW_BYTES = 128;                  // of the activations' boxes: 64 depths
constexpr u32 SWIZZLE_128B = 1, SWIZZLE_REPEAT_BYTES = 8 * ROW_BYTES;   // in a matrix descriptor

// ---- Shared memory: one array an operand, STAGES slots each; offsets from a 1024-byte aligned base ------------------
constexpr u32 ACTIVATION_STAGE_BYTES = 32768;
constexpr u32 WEIGHT_STAGE_BYTES = 8192;
constexpr u32 SCALE_STAGE_BYTES = 256;
constexpr u32 ZERO_SLOT_BYTES = 0;
constexpr u32 TRANSACTION_BYTES = 41216;   // what TMA brings into one stage
constexpr u32 EMPTY_ARRIVALS = 8;
constexpr u32 ACTIVATIONS = 0;
constexpr u32 WEIGHTS = 131072;
constexpr u32 SCALES = 163840;
constexpr u32 ZEROS = 164864;
constexpr u32 DEPTH_REDUCTION = 164864;
constexpr u32 OUTPUT_STAGING = 181248;
constexpr u32 CLUSTER_REDUCTION = 184704;
constexpr u32 CLUSTER_BARRIER = 196992;
constexpr u32 FULL_BARRIERS = 197000;
constexpr u32 EMPTY_BARRIERS = 197032;
constexpr u32 STAGING_TOKENS = 24;   // that leave a warpgroup together: those of one block of the cluster
constexpr u32 STAGING_PITCH_BYTES = 144;   // from one token to the next
constexpr u32 STAGING_BYTES = 3456;   // of one warpgroup

// Divides 0 .. 2^31 - 1 by a number that the host knows, with a multiplication; a division takes some 25 instructions.
struct Divisor {
    u32 multiplier, shift;     // 2^(31 + shift) / number, rounded up; 2^shift >= number
};

__device__ __forceinline__ u32 divide(u32 n, const Divisor& by) { return __umulhi(2 * n, by.multiplier) >> by.shift; }
// What a launch passes to the kernel, besides tensor maps and pointers: the members that this kernel reads.
struct Problem {
    u32 m;   // rows of the activations and of the result
    u32 n;   // columns of the weight and of the result
    u32 tiles_m;   // output tiles along M
    u32 tiles_n;   // output tiles along N, each of one CTA or cluster
    u32 raster_m;   // rows of tiles of a raster group
    u32 k_iterations;   // stages that one tile takes
    u32 output_vectors;   // 1: every row of the result is aligned to 16 bytes
    u32 prefetch_stages;   // stages whose weights a dependent launch loads before it waits
    Divisor by_raster_group;   // divides by the tiles of a raster group
    Divisor by_raster_group_rows;   // divides by raster_m
    Divisor by_last_rows;   // divides by the rows of tiles of the last raster group
    u64 output_pitch;   // elements from one row to the next
};

// ---- Which tile a cluster works on ----------------------------------------------------------------------------------
// One for each cluster, whose blocks take whole stages of its depth, as evenly as can be; of `share` the rest is the rank.
struct Piece {
    u32 tile, k_begin, k_end;
};

struct WorkQueue {
    u32 share;
    bool taken;

    __device__ __forceinline__ WorkQueue(const Problem& problem, u32 share) : share(share), taken(false) {}

    __device__ __forceinline__ bool next(const Problem& problem, Piece& piece) {
        if (taken) return false;
        taken = true;
        const u32 tile = share / CLUSTER_K, rank = share - tile * CLUSTER_K;
        piece = Piece{tile, rank * problem.k_iterations / CLUSTER_K, (rank + 1) * problem.k_iterations / CLUSTER_K};
        return true;
    }
};
// Tiles are numbered through raster groups of raster_m token tiles, channel by channel.
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
    Piece piece;
    u32 k, tile_m, tile_n;

    __device__ __forceinline__ StageCursor(const Problem& problem, u32 share)
        : queue(problem, share), piece{0, 0, 0}, k(0), tile_m(0), tile_n(0) {}

    __device__ __forceinline__ bool next(const Problem& problem) {
        if (++k < piece.k_end) return true;
        if (!queue.next(problem, piece)) return false;
        k = piece.k_begin;
        tile_position(problem, piece.tile, tile_m, tile_n);
        return true;
    }
};

__device__ __forceinline__ void advance(u32& stage, u32& phase) {
    if (++stage == STAGES) {
        stage = 0;
        phase ^= 1;
    }
}

// ---- int4 -> float16: one LOP3 puts two nibbles into the mantissas of a magic number -------------------------------
__device__ __forceinline__ u32 and_or(u32 a, u32 mask, u32 bits) {   // one LOP3: (a & mask) | bits
    u32 d;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(a), "r"(mask), "r"(bits));
    return d;
}

__device__ __forceinline__ u32 sub_f16x2(u32 a, u32 b) {
    u32 d;
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}

__device__ __forceinline__ u32 multiply_add(u32 a, u32 b, u32 c) {
    u32 d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

__device__ __forceinline__ u32 multiply(u32 a, u32 b) {
    u32 d;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}

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
    a[0] = sub_f16x2(and_or(q, 0x000f000fu, 0x64006400u), zero.low);
    a[1] = multiply_add(and_or(q, 0x00f000f0u, 0x64006400u), 0x2c002c00u, zero.high);
    a[2] = sub_f16x2(and_or(upper, 0x000f000fu, 0x64006400u), zero.low);
    a[3] = multiply_add(and_or(upper, 0x00f000f0u, 0x64006400u), 0x2c002c00u, zero.high);
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

// ---- Producer: the loads of one stage; one thread issues them -------------------------------------------------------
// Operands that no kernel before this one writes: weights, as one box of K64_PER_STAGE x N64_PER_TILE blocks, scales and zero
// points. Blocks outside of the tensor arrive as zeros, and so do their scales.
__device__ __forceinline__ void load_constants(u32 smem, u32 slot, u32 full, const TensorMap* weight_map,
                                               const TensorMap* scale_map,
                                               u32 tile_n, u32 k_iteration, u64 policy) {
    cp_async_bulk_tensor_3d_load_hint(smem + WEIGHTS + slot * WEIGHT_STAGE_BYTES, weight_map, full, 0,
                                      k_iteration * K64_PER_STAGE, tile_n * N64_PER_TILE, policy);
    cp_async_bulk_tensor_2d_load(smem + SCALES + slot * SCALE_STAGE_BYTES, scale_map, full, tile_n * BLOCK_N,
                                 k_iteration * BLOCK_K / GROUP_SIZE);
}

// K64_PER_STAGE boxes of tokens x 64 depths in the 128-byte swizzle; tokens and depths outside are zero.
__device__ __forceinline__ void load_activations(u32 smem, u32 slot, u32 full, const TensorMap* map, u32 tile_m,
                                                 u32 k_iteration, u32 rank) {
    const u32 share = rank * SHARE_M;
    const u32 target = smem + ACTIVATIONS + slot * ACTIVATION_STAGE_BYTES + share * ROW_BYTES;
#pragma unroll
    for (u32 i = 0; i < K64_PER_STAGE; ++i)
        cp_async_bulk_tensor_2d_load(target + i * BLOCK_M * ROW_BYTES, map, full, k_iteration * BLOCK_K + i * 64,
                                     tile_m * BLOCK_M + share);
}

// ---- Accumulators, and partial sums between the blocks that split a tile ---------------------------------------------
// A warp's accumulators travel as whole fragments, 16 bytes a thread, so that both sides use the same addresses.
typedef float Accumulators[C_GROUPS][N8][4];

__device__ __forceinline__ void clear(Accumulators& acc) {
#pragma unroll
    for (u32 c = 0; c < C_GROUPS; ++c)
#pragma unroll
        for (u32 n = 0; n < N8; ++n)
#pragma unroll
            for (u32 i = 0; i < 4; ++i) acc[c][n][i] = 0.0f;
}

// ---- Result: scales of whole columns, bias, 16-byte stores -----------------------------------------------------------------
// channel0: this warp's first channel; its fragments follow at a distance of C_STRIDE.
__device__ __forceinline__ void add_bias(Accumulators& acc, const Problem& problem, const u16* bias, u32 channel0, u32 lane) {
    if (bias == nullptr) return;
    const u32 group = lane >> 2;
#pragma unroll
    for (u32 c = 0; c < C_GROUPS; ++c) {
        const u32 low = channel0 + C_STRIDE * c + group, high = low + 8;
        const float bias_low = low < problem.n ? low_to_float(bias[low]) : 0.0f;
        const float bias_high = high < problem.n ? low_to_float(bias[high]) : 0.0f;
#pragma unroll
        for (u32 n = 0; n < N8; ++n) {
            acc[c][n][0] += bias_low;
            acc[c][n][1] += bias_low;
            acc[c][n][2] += bias_high;
            acc[c][n][3] += bias_high;
        }
    }
}
// Eight channels of one token, from shared memory ...
__device__ __forceinline__ uint4 load_vector(u32 smem) {
    uint4 values;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(values.x), "=r"(values.y), "=r"(values.z), "=r"(values.w)
                 : "r"(smem) : "memory");
    return values;
}

// ... to the result.
__device__ __forceinline__ void store_vector(const Problem& problem, u16* output, uint4 values, u32 token, u32 channel) {
    if (token >= problem.m || channel >= problem.n) return;
    u16* target = output + token * problem.output_pitch + channel;
    if (problem.output_vectors && channel + 8 <= problem.n) {
        *(uint4*)target = values;
    } else {   // a row that is not 16-byte aligned, or the last channels
        const u32 words[4] = {values.x, values.y, values.z, values.w};
#pragma unroll
        for (u32 i = 0; i < 8; ++i)
            if (channel + i < problem.n) target[i] = (u16)(words[i / 2] >> (i % 2 * 16));
    }
}
// Each warpgroup meets at a barrier of its own. Constant numbers: ptxas sets all 16 barriers aside for one that it does not know.
__device__ __forceinline__ void warpgroup_sync(u32 warpgroup) {
    bar_sync(1, 128);
}

// ---- Result: transposed through the warpgroup's staging rows, STAGING_TOKENS at a time ------------------------------
// stmatrix.trans turns fragments (channels x tokens) into rows of tokens, which leave as 16-byte stores. channel0: the
// warpgroup's first.
__device__ __forceinline__ void store_result(Accumulators& acc, const Problem& problem, u16* output, u32 smem,
                                             u32 warpgroup, u32 warp, u32 lane, u32 token0, u32 channel0, u32 rank) {
    constexpr u32 VECTORS_PER_TOKEN = 8 * STACK;   // of eight channels
    constexpr u32 VECTORS_PER_THREAD = (STAGING_TOKENS * VECTORS_PER_TOKEN + 127) / 128;
    const u32 staging = smem + OUTPUT_STAGING + warpgroup * STAGING_BYTES, thread = warp * 32 + lane;
#pragma unroll
    for (u32 first = 0; first < BLOCK_M; first += STAGING_TOKENS) {
        if (first / STAGING_TOKENS != rank) continue;   // another block's
        const u32 tokens = min(STAGING_TOKENS, BLOCK_M - first);   // the last ones may be fewer
        const u32 vectors = tokens * VECTORS_PER_TOKEN;
#pragma unroll
        for (u32 token = 0; token < tokens; token += 16)
#pragma unroll
            for (u32 c = 0; c < C_GROUPS; ++c) {
                const u32 n = (first + token) / 8, column = (8 * c + 2 * warp + (lane >> 3 & 1)) * 16;
                const u32 target = staging + (token + (lane & 7)) * STAGING_PITCH_BYTES + column;
                const u32 low[2] = {to_pair(acc[c][n][0], acc[c][n][1]), to_pair(acc[c][n][2], acc[c][n][3])};
                if (token + 8 < tokens) {
                    const float(&next)[4] = acc[c][n + 1];
                    const u32 both[4] = {low[0], low[1], to_pair(next[0], next[1]), to_pair(next[2], next[3])};
                    stmatrix_x4_trans(target + (lane >> 4) * 8 * STAGING_PITCH_BYTES, both);
                } else {
                    stmatrix_x2_trans(target, low);
                }
            }
        warpgroup_sync(warpgroup);   // they are complete
        // Where all threads have an i-th vector the compiler knows, and asks no more.
        uint4 values[VECTORS_PER_THREAD];   // all loads before the first store, which waits for one
#pragma unroll
        for (u32 i = 0; i < VECTORS_PER_THREAD; ++i) {
            const u32 vector = 128 * i + thread, row = vector / VECTORS_PER_TOKEN, column = vector % VECTORS_PER_TOKEN;
            if (128 * (i + 1) <= vectors || vector < vectors)
                values[i] = load_vector(staging + row * STAGING_PITCH_BYTES + column * 16);
        }
#pragma unroll
        for (u32 i = 0; i < VECTORS_PER_THREAD; ++i) {
            const u32 vector = 128 * i + thread, row = vector / VECTORS_PER_TOKEN, column = vector % VECTORS_PER_TOKEN;
            if (128 * (i + 1) <= vectors || vector < vectors)
                store_vector(problem, output, values[i], token0 + first + row, channel0 + 8 * column);
        }
    }
}

// ---- Consumer: one piece of work ------------------------------------------------------------------------------------
__device__ __forceinline__ void wgmma_m64n64k16_f32_f16(float (&d)[8][4], const u32 (&a)[4], u64 b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
        "}, {%32, %33, %34, %35}, %36, 1, 1, 1, 0;"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]),
          "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]), "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)
        : "memory");
}

// The lane's own value, through a shuffle: ptxas would otherwise compute an address anew in each stage.
__device__ __forceinline__ u32 keep_in_register(u32 value, u32 lane = laneid()) { return __shfl_sync(0xffffffffu, value, lane); }

// Where this thread reads in slot 0; the other slots follow at a stage's distance.
struct SlotAddresses {
    u32 activations, weights, scales, zeros;

    // part: of a stage's depth.
    __device__ __forceinline__ SlotAddresses(u32 smem, u32 warpgroup, u32 part, u32 warp, u32 lane) {
        const u32 place = warpgroup * STACK * 64 + 8 * (lane >> 2) + 2 * warp;   // in a row of scales: channels g, g + 8
        const u32 k64 = part * K64_PER_WARPGROUP;
        activations = smem + ACTIVATIONS + k64 * BLOCK_M * ROW_BYTES;
        weights = keep_in_register(smem + WEIGHTS + (warpgroup * STACK * K64_PER_STAGE + k64) * K64_BLOCK_BYTES + warp * 512 + lane * 16);
        const u32 row = k64 * 64 / GROUP_SIZE;
        scales = keep_in_register(smem + SCALES + (row * BLOCK_N + place) * 2);
        zeros = 0;
    }
};

// What a thread holds of the weights.
constexpr u32 PACKED_BLOCKS = 2;   // the 64-deep block that is multiplied, and the next one
struct WeightFragments {
    uint4 packed[PACKED_BLOCKS][STACK];   // one word for each 16-deep step
    u32 scale_low[STACK], scale_high[STACK];   // of channels g and g + 8, twice
    ZeroPoint zeros[STACK];
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
                     : "r"(slots.scales + stage * SCALE_STAGE_BYTES + (row * BLOCK_N + 64 * s) * 2)
                     : "memory");
#pragma unroll
    for (u32 s = 0; s < STACK; ++s) {
        weights.scale_low[s] = both_low(scales[s]);
        weights.scale_high[s] = both_high(scales[s]);
    }
}
// step: of the 64-deep block k64.
__device__ __forceinline__ void dequantize_step(u32 (&a)[STACK][4], const WeightFragments& weights, u32 k64, u32 step) {
#pragma unroll
    for (u32 s = 0; s < STACK; ++s) {
        dequantize(a[s], word(weights.packed[k64 % PACKED_BLOCKS][s], step), weights.zeros[s]);
        a[s][0] = multiply(a[s][0], weights.scale_low[s]);
        a[s][1] = multiply(a[s][1], weights.scale_high[s]);
        a[s][2] = multiply(a[s][2], weights.scale_low[s]);
        a[s][3] = multiply(a[s][3], weights.scale_high[s]);
    }
}

// This warp has read a slot; whoever fills it hears of it.
__device__ __forceinline__ void release(u32 empty, u32 slot, u32 lane) {
    __syncwarp();
    if (lane == 0) mbarrier_arrive(empty + 8 * slot);
}

// Multiplies the stages of one piece: MMAS_PER_COMMIT k16 slices are dequantised while up to COMMITS_IN_FLIGHT groups of wgmmas
// go on.
//
// A slot is given back in the next stage, when no wgmma that reads its activations is in flight. Its weights have then been
// used by instructions that were issued before, so that ptxas cannot move the arrival in front of their loads.
__device__ __forceinline__ void consume_piece(Accumulators& acc, WeightFragments& weights, const Problem& problem,
                                              const SlotAddresses& slots, u32 full, u32 empty, u32& stage, u32& phase,
                                              const Piece& piece, u32 lane) {
    u32 previous = stage;
#pragma unroll 1
    for (u32 k = piece.k_begin; k < piece.k_end; ++k) {
        // Through a shuffle, so that ptxas knows that it is the same in a whole warp: else each wgmma's descriptor, computed
        // in registers, takes two moves to the uniform ones.
        const u32 address = __shfl_sync(0xffffffffu, slots.activations + stage * ACTIVATION_STAGE_BYTES, 0);
        mbarrier_wait_parity(full + 8 * stage, phase);   // every copy into the slot has landed
        const u64 activations = matrix_descriptor(address, 16, SWIZZLE_REPEAT_BYTES, SWIZZLE_128B);
        load_packed(weights, slots, stage, 0);   // each 64-deep block's while the one before it is multiplied
#pragma unroll
        for (u32 i = 0; i < K64_PER_WARPGROUP; ++i) {
            if (i + 1 < K64_PER_WARPGROUP) load_packed(weights, slots, stage, i + 1);
            if (i * 64 % GROUP_SIZE == 0) load_group(weights, problem, slots, stage, i * 64 / GROUP_SIZE);
#pragma unroll
            for (u32 first = 0; first < 4; first += MMAS_PER_COMMIT) {
                u32 a[MMAS_PER_COMMIT][STACK][4];
#pragma unroll
                for (u32 j = 0; j < MMAS_PER_COMMIT; ++j) {
                    dequantize_step(a[j], weights, i, first + j);
                }
                wgmma_fence();
#pragma unroll
                for (u32 j = 0; j < MMAS_PER_COMMIT; ++j)
#pragma unroll
                    for (u32 s = 0; s < STACK; ++s)
                        wgmma_m64n64k16_f32_f16(
                            acc[s], a[j][s], activations + ((i * BLOCK_M * ROW_BYTES + (first + j) * 32) >> 4));
                wgmma_commit_group();
                wgmma_wait_group<COMMITS_IN_FLIGHT>();
            }
            if (i == RELEASE_BLOCK && k > piece.k_begin) release(empty, previous, lane);
        }
        previous = stage;
        advance(stage, phase);
    }
    wgmma_wait_group<0>();
    release(empty, previous, lane);
}

// ---- Sums that meet in shared memory: whole fragments, 16 bytes a thread ---------------------------------------------
__device__ __forceinline__ void leave_fragment(u32 smem, const float (&sums)[4]) {
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

// ---- Warpgroups that divide a stage's depth: their sums meet in shared memory ---------------------------------------
// Each set of channels has a barrier of its own, behind the ones of the staging rows.
__device__ __forceinline__ void depth_sync(u32 warpgroup) {
    bar_sync(2, WARPGROUPS_K * 128);
}

// Part p > 0 leaves its sums as whole fragments; part 0 adds them in the order of p. Returns whether this warpgroup goes on.
__device__ __forceinline__ bool reduce_depth(Accumulators& acc, u32 smem, u32 warpgroup, u32 part, u32 warp, u32 lane) {
    constexpr u32 FRAGMENT_BYTES = 128 * 16, SUM_BYTES = STACK * N8 * FRAGMENT_BYTES;
    const u32 base = smem + DEPTH_REDUCTION + warpgroup * (WARPGROUPS_K - 1) * SUM_BYTES + (warp * 32 + lane) * 16;
    if (part > 0) {
#pragma unroll
        for (u32 c = 0; c < STACK; ++c)
#pragma unroll
            for (u32 n = 0; n < N8; ++n)
                leave_fragment(base + (part - 1) * SUM_BYTES + (c * N8 + n) * FRAGMENT_BYTES, acc[c][n]);
    }
    depth_sync(warpgroup);   // the others' sums are there
    if (part == 0) {
#pragma unroll
        for (u32 p = 0; p < WARPGROUPS_K - 1; ++p)
#pragma unroll
            for (u32 c = 0; c < STACK; ++c)
#pragma unroll
                for (u32 n = 0; n < N8; ++n) add_fragment(acc[c][n], base + p * SUM_BYTES + (c * N8 + n) * FRAGMENT_BYTES);
    }
    return part == 0;
}

// ---- Blocks of a cluster that divide the depth: each adds up a part of the tokens -----------------------------------------
// Of rank r: OWN 8-token fragments from r * OWN on; of the last ones fewer, or none.
constexpr u32 OWN = STAGING_TOKENS / 8, CLUSTER_FRAGMENT_BYTES = 32 * 16;

__device__ __forceinline__ u32 own_fragments(u32 rank) { return rank * OWN < N8 ? min(OWN, N8 - rank * OWN) : 0; }

// What the other blocks send to the one of this rank.
__device__ __forceinline__ u32 cluster_sums_bytes(u32 rank) {
    return (CLUSTER_K - 1) * WARP_TILES * STACK * own_fragments(rank) * CLUSTER_FRAGMENT_BYTES;
}

// Where a warp's sums from the block at `place` among the senders stand.
__device__ __forceinline__ u32 cluster_sums(u32 smem, u32 place, u32 warp_tile, u32 lane) {
    return smem + CLUSTER_REDUCTION + (place * WARP_TILES + warp_tile) * STACK * OWN * CLUSTER_FRAGMENT_BYTES + lane * 16;
}

// Sends the sums of others' tokens to them, and adds theirs to its own in the order of their ranks. Returns whether this
// block has tokens.
__device__ __forceinline__ bool reduce_cluster(Accumulators& acc, u32 smem, u32 rank, u32 warp_tile, u32 lane) {
    barrier_cluster_wait();   // all have begun, and their barriers are there
#pragma unroll
    for (u32 owner = 0; owner < CLUSTER_K; ++owner) {
        if (owner == rank) continue;
        const u32 target = mapa_shared_cluster(cluster_sums(smem, rank - (rank > owner), warp_tile, lane), owner);
        const u32 barrier = mapa_shared_cluster(smem + CLUSTER_BARRIER, owner);
#pragma unroll
        for (u32 s = 0; s < STACK; ++s)
#pragma unroll
            for (u32 n = owner * OWN; n < min((owner + 1) * OWN, N8); ++n)
                st_async_v4_f32(target + (s * OWN + n - owner * OWN) * CLUSTER_FRAGMENT_BYTES, acc[s][n], barrier);
    }
    if (own_fragments(rank) == 0) return false;
    mbarrier_wait_parity_acquire_cluster(smem + CLUSTER_BARRIER, 0);   // the others' sums are there
#pragma unroll
    for (u32 n = 0; n < N8; ++n) {
        if (n / OWN != rank) continue;
#pragma unroll
        for (u32 place = 0; place < CLUSTER_K - 1; ++place)
#pragma unroll
            for (u32 s = 0; s < STACK; ++s)
                add_fragment(acc[s][n], cluster_sums(smem, place, warp_tile, lane) + (s * OWN + n % OWN) * CLUSTER_FRAGMENT_BYTES);
    }
    return true;
}
}  // namespace cudatma

// Y^T = W^T X^T. One thread of the last warps produces: it fills STAGES slots of shared memory, waiting for `empty`, signalling
// `full`. Warpgroups wait for `full`, multiply, and give the slot back through `empty`. Both walk through the same
// pieces of work.
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
    const u32 full = smem + FULL_BARRIERS, empty = smem + EMPTY_BARRIERS;
    // Through a shuffle, so that ptxas knows that it is the same in a whole warp.
    const u32 warp_index = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = laneid();

    const u32 share = blockIdx.x;
    const u32 rank = 0;

    // ---- Producer: one thread makes the barriers and issues every copy ----------------------------------------------
    // elect_sync() rather than the first lane: ptxas then knows that one thread goes on, and puts no loop around each copy.
    const bool produces = warp_index == CONSUMER_WARPS;
    const u64 policy = createpolicy_evict_first();
    StageCursor cursor(problem, share);
    const auto begin_stage = [&](const StageCursor& at, u32 slot) {
        mbarrier_arrive_expect_tx(full + 8 * slot, TRANSACTION_BYTES);
        load_constants(smem, slot, full + 8 * slot, &weight_map,
                       &scale_map, at.tile_n * CLUSTER + rank, at.k, policy);
    };
    // Weights, scales and zero points do not depend on the kernel before this one; activations do. So a dependent launch
    // asks for those of the first stages before it waits. Not of all: activations would stand behind them.
    const auto fill_ring = [&]() {
        const u32 prefetched = min(STAGES, problem.prefetch_stages);
        StageCursor ahead(cursor);
#pragma unroll 1
        for (u32 slot = 0; slot < prefetched && ahead.next(problem); ++slot) begin_stage(ahead, slot);
        griddepcontrol_launch_dependents();   // the next kernel may come in and ask for its weights
        griddepcontrol_wait();
#pragma unroll 1
        for (u32 slot = 0; slot < STAGES && cursor.next(problem); ++slot) {
            if (slot >= prefetched) begin_stage(cursor, slot);
            load_activations(smem, slot, full + 8 * slot, &activation_map, cursor.tile_m, cursor.k, rank);
        }
    };
    if (produces && elect_sync()) {
        prefetch_tensormap(&weight_map);
        prefetch_tensormap(&activation_map);
        prefetch_tensormap(&scale_map);
        for (u32 stage = 0; stage < STAGES; ++stage) {
            mbarrier_init(full + 8 * stage, 1);
            mbarrier_init(empty + 8 * stage, EMPTY_ARRIVALS);
        }
        mbarrier_init(smem + CLUSTER_BARRIER, 1);
        fence_mbarrier_init();   // the asynchronous proxy, and the cluster, see initialised barriers
        mbarrier_arrive_expect_tx(smem + CLUSTER_BARRIER, cluster_sums_bytes(blockIdx.x % CLUSTER_K));
        fill_ring();             // before the other warps know of the barriers
    }
    __syncwarp();
    __syncthreads();             // the barriers are there
    barrier_cluster_arrive_relaxed();   // a fence has ordered the barriers
    u32 stage = 0, phase = 0;   // phase flips each time the ring wraps

    if (warp_index >= CONSUMER_WARPS) {
        if (produces && elect_sync()) {
#pragma unroll 1
            for (; cursor.next(problem); advance(stage, phase)) {
                mbarrier_wait_parity(empty + 8 * stage, phase);   // all warps have read the slot
                begin_stage(cursor, stage);
                load_activations(smem, stage, full + 8 * stage, &activation_map, cursor.tile_m, cursor.k, rank);
            }
        }
        __syncwarp();
    } else {
        // ---- Consumers ----------------------------------------------------------------------------------------------
        const u32 warpgroup = warp_index / 4 % WARPGROUPS, part = warp_index / 4 / WARPGROUPS, warp = warp_index % 4;
        const SlotAddresses slots(smem, warpgroup, part, warp, lane);
        WorkQueue queue(problem, share);
        Piece piece;
        Accumulators acc;
        WeightFragments weights;
#pragma unroll
        for (u32 s = 0; s < STACK; ++s) weights.zeros[s] = zero_point(8, 8);
        griddepcontrol_wait();   // workspace and result may still be in use by the kernel before this one
        while (queue.next(problem, piece)) {
            u32 tile_m, tile_n;
            tile_position(problem, piece.tile, tile_m, tile_n);
            const u32 token0 = tile_m * BLOCK_M;
            const u32 channel0 = (tile_n * CLUSTER + rank) * BLOCK_N + warpgroup * STACK * 64;
            clear(acc);
            consume_piece(acc, weights, problem, slots, full, empty, stage, phase, piece, lane);
            if (!reduce_depth(acc, smem, warpgroup, part, warp, lane)) continue;
            const u32 rank_k = share % CLUSTER_K;
            if (!reduce_cluster(acc, smem, rank_k, warpgroup * 4 + warp, lane)) continue;
            add_bias(acc, problem, bias, channel0 + 16 * warp, lane);
            store_result(acc, problem, output, smem, warpgroup, warp, lane, token0, channel0, rank_k);
        }
    }
}
