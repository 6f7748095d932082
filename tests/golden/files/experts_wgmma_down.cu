// cudatma: kernels/experts_wgmma.cu.j2 for sm_90a
// config: ExpertsConfig
//   version = 'wgmma'
//   dtype = 'float16'
//   group_size = 128
//   has_zeros = False
//   tile_m = 64
//   tile_n = 256
//   tile_k = 128
//   stages = 6
//   consumer_registers = 232
//   warpgroups = 2
//   mmas_per_commit = 2
//   commits_in_flight = 1
//   product = 'down'
// 8 consumer warps and 4 producer warps; 217344 bytes of shared memory per CTA.
// Arrays of a stage:
//    16384 bytes: activations 64 x 128 float16, 128B swizzle
//    16384 bytes: weights 256 x 128 int4, packed layout 1
//      512 bytes: scales 1 x 256 float16

// primitives.cu contains
// u8, u16, u32, u64, TensorMap, shared_address, laneid, elect_sync, bar_sync, griddepcontrol_wait,
// griddepcontrol_launch_dependents, setmaxnreg_inc, setmaxnreg_dec, mbarrier_init, mbarrier_arrive,
// mbarrier_arrive_expect_tx, mbarrier_try_wait_parity, mbarrier_wait_parity, fence_mbarrier_init,
// cp_async_bulk_tensor_2d_load, cp_async_bulk_tensor_3d_load_hint, createpolicy_evict_normal, ld_shared_b32,
// ld_shared_v4_b32, stmatrix_x4_trans, matrix_descriptor, wgmma_fence, wgmma_commit_group, wgmma_wait_group,
// lop3_and_or, TmaPipeline, bar_sync_one_of, Divisor, divide, low_to_float, to_pair, subtract, multiply,
// multiply_add, both_low, both_high, word, packed_index

namespace cudatma {

// ---- Tile -----------------------------------------------------------------------------------------------------------
constexpr u32 TILE_M = 64;   // rows of M per CTA, which are columns of the MMAs
constexpr u32 TILE_N = 256;   // columns of N per CTA, which become the rows (M) of the MMAs
constexpr u32 TILE_K = 128;   // elements of K per stage
constexpr u32 WARPGROUPS = 2;   // warpgroups along N
constexpr u32 SLICE_K = 1;   // warpgroups with the same columns of N, among which each stage's K is divided
constexpr u32 STACK = 2;   // wgmmas along N per warpgroup; each covers 64 columns
constexpr u32 STAGES = 6;
constexpr u32 MMAS_PER_COMMIT = 2;   // wgmmas per accumulator and commit group; each multiplies 16 elements of K
constexpr u32 COMMITS_IN_FLIGHT = 1;   // commit groups in flight while the weights of the next one are dequantized
constexpr u32 RELEASE_K64 = 0;   // block (64 elements of K) after which all wgmmas of the previous stage have completed
constexpr u32 CONSUMER_WARPS = 8;
constexpr u32 PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = 232;   // registers per thread
constexpr u32 GROUP_SIZE = 128;   // elements of K that share a scale
constexpr u32 FRAGMENTS_16 = STACK, FRAGMENT_STRIDE_N = 64;   // fragments of 16 columns of N per warp; columns from one fragment to the next
constexpr u32 K64_PER_STAGE = TILE_K / 64, K64_PER_SLICE = K64_PER_STAGE / SLICE_K, N64_PER_TILE = TILE_N / 64;   // 64 x 64 blocks of weights
constexpr u32 K64_BLOCK_BYTES = 2048;   // bytes per packed 64 x 64 block of weights
constexpr u32 ROW_BYTES = 128;   // bytes per row of an activation box (64 elements of K)
constexpr u32 SWIZZLE_128B = 1, SWIZZLE_REPEAT_BYTES = 8 * ROW_BYTES;   // fields of a matrix descriptor

// ---- Shared memory: byte offsets from a base that is 1024-byte aligned, with sizes in the comments -------------------
constexpr u32 ACTIVATIONS = 0;                // 98304 bytes
constexpr u32 WEIGHTS = 98304;                // 98304 bytes
constexpr u32 SCALES = 196608;                // 3072 bytes
constexpr u32 STAGING = 199680;               // 17408 bytes
constexpr u32 TILES = 217088;                 // 160 bytes
constexpr u32 FULL_BARRIERS = 217248;         // 48 bytes

// ---- Slots: one per stage and operand -------------------------------------------------------------------------------
constexpr u32 ACTIVATION_STAGE_BYTES = 16384;
constexpr u32 WEIGHT_STAGE_BYTES = 16384;
constexpr u32 SCALE_STAGE_BYTES = 512;
constexpr u32 TRANSACTION_BYTES = 16896;   // bytes that TMA loads per stage
constexpr u32 EMPTY_ARRIVALS = 8;   // number of arrivals that release a slot, one from each consumer warp that reads it
constexpr u32 STAGING_ROWS = 32;   // rows of M that a warpgroup stores at a time
constexpr u32 STAGING_PITCH_BYTES = 272;   // bytes from one staging row to the next
constexpr u32 STAGING_BYTES = 8704;   // bytes of a warpgroup's staging rows
using Ring = TmaPipeline<STAGES>;

// The named barriers of this kernel. __syncthreads() uses barrier 0.
enum NamedBarrier : u32 {
    WARPGROUP_BARRIER = 1,   // the first of several barriers, one per warpgroup
};

__device__ __forceinline__ void warpgroup_sync(u32 warpgroup) { bar_sync_one_of<WARPGROUP_BARRIER, WARPGROUPS>(warpgroup, 128); }

// The launch parameters that are neither tensor maps nor pointers.
struct Problem {
    u32 n;                          // number of columns of the result
    u32 tiles_n;                    // number of output tiles along N (a CTA or a cluster computes one tile)
    u32 k_iterations;               // number of stages per tile
    u32 expert_rows;                // number of rows of packed weights (64 columns) per expert
    Divisor by_tiles_n;             // divides by tiles_n
    u64 result_at;                  // offset of this kernel's results in the workspace, in bytes
    u64 blocks_at;                  // offset of the number of blocks and the next tiles, which precede the blocks
    u64 pairs_at;                   // offset of the sorted pairs
};

// ---- Routing --------------------------------------------------------------------------------------------------------
// A pair consists of a token and one of its experts: pair p is expert p % top_k of token p / top_k. The routing kernel sorts the pairs by expert,
// and divides the pairs of each expert into blocks of TILE_M rows. The results of both GEMMs are in the order of the sorted pairs. A run is a
// sequence of blocks of an expert: all of its blocks, all but a short last block, or only the short last block.
struct Block {
    u32 expert;   // index of the expert's weights on this GPU
    u32 first;    // index of the block's first row in the sorted pairs
    u32 rows;     // number of rows from the block's first row to the last row of its run
    u32 index;    // index of the block in its run
};

// The arrays of the routing kernel, in the workspace that all launches of a call share.
struct Routing {
    u32* block_count;
    u32* next_tiles;   // number of tiles that CTAs have taken after their first tiles, for each of the two products
    Block* blocks;
    u32* pairs;        // pairs sorted by expert

    __device__ __forceinline__ Routing(u8* space, const Problem& problem)
        : block_count((u32*)(space + problem.blocks_at)), next_tiles((u32*)(space + problem.blocks_at) + 1),
          blocks((Block*)(space + problem.blocks_at) + 1), pairs((u32*)(space + problem.pairs_at)) {}
};

// The stages from k_begin to k_end - 1 of a tile.
struct WorkUnit {
    u32 tile, k_begin, k_end;
};

// ---- Tiles of a CTA -------------------------------------------------------------------------------------------------
// A tile consists of a block of rows of one expert and TILE_N of the expert's columns. The weights of all experts form one weight: it contains
// the columns of one expert after another, and each expert is padded to whole n64 rows.
struct CtaTile {
    u32 first_row;   // index of the tile's first n64 row in the weight of all experts
    u32 n_begin;     // index of the tile's first column in the expert's weight
    u32 first;       // index of the block's first row in the sorted pairs
    u32 rows;        // number of rows of the block, or 0 after the last tile
    u32 expert;
};

// Number of blocks of an expert whose tiles are grouped by columns, so that the weights of these columns stay in L2.
constexpr u32 RASTER_BLOCKS = 16;

// The tiles of a CTA. The index of the first tile is that of the CTA. Each CTA then takes the next tile that no CTA has taken, because some tiles
// take longer than others. Indices and blocks are loaded one tile in advance.
struct TileQueue {
    u32 index, following;   // indices of the current tile and of the next one
    uint4 block;            // entry of routing.blocks for a block of the current tile's expert; tile() derives the tile's block from it

    __device__ __forceinline__ TileQueue(const Problem& problem, const Routing& routing, u32 tiles) : index(blockIdx.x), following(0) {
        load_block(problem, routing, tiles);
    }

    __device__ __forceinline__ void load_block(const Problem& problem, const Routing& routing, u32 tiles) {
        if (index < tiles) block = __ldcg((const uint4*)(routing.blocks + divide(index, problem.by_tiles_n)));
    }

    // Choose the next tile.
    __device__ __forceinline__ void choose(const Routing& routing, u32 tiles) {
        if (index < tiles) following = gridDim.x + atomicAdd(routing.next_tiles + 1, 1u);
    }

    // Advance to the next tile, and choose the tile after it.
    __device__ __forceinline__ void advance(const Problem& problem, const Routing& routing, u32 tiles) {
        index = following;
        load_block(problem, routing, tiles);
        choose(routing, tiles);
    }

    // Return the current tile. Within an expert, tiles are ordered by group of RASTER_BLOCKS blocks, then by columns, then by block.
    __device__ __forceinline__ CtaTile tile(const Problem& problem, u32 tiles) const {
        if (index >= tiles) return CtaTile{};
        const u32 expert = block.x, own = divide(index, problem.by_tiles_n);   // the block that has been loaded
        const u32 own_index = block.w, blocks = own_index + (block.z + TILE_M - 1) / TILE_M;
        const u32 group = own_index / RASTER_BLOCKS * RASTER_BLOCKS, size = min(RASTER_BLOCKS, blocks - group);
        const u32 within = index - (own - own_index + group) * problem.tiles_n, tile_n = within / size;
        const u32 skipped = (group + within - tile_n * size - own_index) * TILE_M;   // rows from the loaded block to the tile's block, modulo 2^32
        return CtaTile{expert * problem.expert_rows + tile_n * N64_PER_TILE, tile_n * TILE_N, block.y + skipped,
                       min(TILE_M, block.z - skipped), expert};
    }
};

// Wait for a tile's first stage, and read the record that the producer has written for the tile. The shuffles wait for the loads, so that no
// load is in flight when the slot is released.
__device__ __forceinline__ CtaTile receive_tile(const Ring& ring, const CtaTile* records, u32 lane) {
    ring.wait();
    const u32 field = lane < 5 ? ((const u32*)(records + ring.stage))[lane] : 0;
    return CtaTile{__shfl_sync(0xffffffffu, field, 0), __shfl_sync(0xffffffffu, field, 1), __shfl_sync(0xffffffffu, field, 2),
                   __shfl_sync(0xffffffffu, field, 3), __shfl_sync(0xffffffffu, field, 4)};
}

constexpr u32 ROW_BOX = 32;   // rows of a box
constexpr u32 ROW_BOX_STAGE_BYTES = ROW_BOX * TILE_K * 2;   // bytes that one box of rows occupies in a stage
// Return the number of boxes that the main loop of a block multiplies. There is a main loop only for some counts, so the number is rounded up.
__device__ __forceinline__ u32 row_boxes(const CtaTile& tile) {
    if (tile.rows <= 32) return 1;
    return TILE_M / ROW_BOX;
}

// A warp's accumulators for at most ROWS rows: fragments of 16 columns and 8 rows, of which each lane holds four values.
template <u32 ROWS>
using Sums = float[FRAGMENTS_16][ROWS / 8][4];

// ---- Packed weights: the codes that a thread multiplies -------------------------------------------------------------
// A thread's codes in a block of 64 elements of K and 16 columns, one word of 8 codes per step of 16 elements of K.
using PackedCodes = uint4;
using StepCodes = u32;

__device__ __forceinline__ PackedCodes load_codes(u32 address, u32) { return ld_shared_v4_b32(address); }

__device__ __forceinline__ StepCodes step_codes(const PackedCodes& packed, u32 step) { return word(packed, step); }

// ---- int4 -> float16: one LOP3 inserts two nibbles into the mantissas of a constant -----------------------
// `low` is 1024 plus the zero point of column g, and dequantize() subtracts it. `high` is -(64 + zero point) of column g + 8, and
// dequantize() adds it after a division by 16. Each value is in both halves.
struct ZeroPoint {
    u32 low, high;
};

// Return the ZeroPoint of the zero points of columns g and g + 8.
__device__ __forceinline__ ZeroPoint zero_point(u32 low, u32 high) {
    return ZeroPoint{0x64006400u | low | low << 16, 0xd400d400u | high << 4 | high << 20};
}

// Dequantize the 8 nibbles of a word. 0x6400 is 1024.0 in fp16. Its last mantissa bit has the weight 1.0, so the bits 0x6400 | v represent exactly 1024 + v,
// and 0x6400 | v << 4 is exactly 1024 + 16 v, which is 16 (64 + v). The nibbles of column g + 8 therefore need no shift.
__device__ __forceinline__ void dequantize(u32 (&a)[4], StepCodes q, const ZeroPoint& zero) {
    const u32 upper = q >> 8;
    a[0] = subtract(lop3_and_or(q, 0x000f000fu, 0x64006400u), zero.low);
    a[1] = multiply_add(lop3_and_or(q, 0x00f000f0u, 0x64006400u), 0x2c002c00u, zero.high);
    a[2] = subtract(lop3_and_or(upper, 0x000f000fu, 0x64006400u), zero.low);
    a[3] = multiply_add(lop3_and_or(upper, 0x00f000f0u, 0x64006400u), 0x2c002c00u, zero.high);
}

// ---- Weights times the scale of their group -------------------------------------------------------------------------
// The scales, each in both halves, and the zero points of columns g and g + 8 of a fragment, for one group of weights.
struct GroupScale {
    u32 low, high;
    ZeroPoint zero;
};

// Set the scales of a group. `pair` contains the scales of columns g (low half) and g + 8 (high half).
__device__ __forceinline__ void set_scales(GroupScale& group, u32 pair) {
    group.low = both_low(pair);
    group.high = both_high(pair);
}

// Dequantize and scale the 8 codes of a step.
__device__ __forceinline__ void dequantize_group(u32 (&a)[4], const StepCodes& codes, const GroupScale& group) {
    dequantize(a, codes, group.zero);
    a[0] = multiply(a[0], group.low);
    a[1] = multiply(a[1], group.high);
    a[2] = multiply(a[2], group.low);
    a[3] = multiply(a[3], group.high);
}

// ---- Main loop: wgmma multiplies dequantized weights in registers (A) by activations in shared memory (B) -----------
// [PTX ISA, wgmma.mma_async] Issue D += A * B for a warpgroup, or D = A * B if `accumulates` is false. `a` contains A in registers, in the
// layout of operand A of mma.m16n8k16. `b` is the matrix descriptor of B. Between wgmma_fence and wgmma_wait_group, only wgmma.mma_async
// instructions of the same shape may access `d`, and only wgmma.mma_async instructions may access the registers of `a`.
__device__ __forceinline__ void wgmma_m64n32k16_f32_f16(float (&d)[4][4], const u32 (&a)[4], u64 b, bool accumulates = true) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %21, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
        "}, {%16, %17, %18, %19}, %20, p, 1, 1, 0;\n}"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((u32)accumulates)
        : "memory");
}

__device__ __forceinline__ void wgmma_m64n64k16_f32_f16(float (&d)[8][4], const u32 (&a)[4], u64 b, bool accumulates = true) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
        "}, {%32, %33, %34, %35}, %36, p, 1, 1, 0;\n}"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]),
          "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]), "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((u32)accumulates)
        : "memory");
}

// Issue the wgmma for ROWS rows.
template <u32 ROWS>
__device__ __forceinline__ void wgmma_rows(float (&d)[ROWS / 8][4], const u32 (&a)[4], u64 b) {
    if constexpr (ROWS == 32) wgmma_m64n32k16_f32_f16(d, a, b);
    if constexpr (ROWS == 64) wgmma_m64n64k16_f32_f16(d, a, b);
}

// Return `value` through a shuffle, so that ptxas keeps the value in a register instead of recomputing an address in each stage.
__device__ __forceinline__ u32 keep_in_register(u32 value, u32 lane = laneid()) { return __shfl_sync(0xffffffffu, value, lane); }

// The position of a thread among the consumers.
struct WarpPosition {
    u32 warpgroup;   // index along N
    u32 warp;        // index in the warpgroup
    u32 lane;
};

// The addresses from which this thread reads slot 0. In slot i, they are larger by i times the size of a stage.
struct SlotAddresses {
    u32 activations, weights, scales;

    __device__ __forceinline__ SlotAddresses(u32 smem, const WarpPosition& at) {
        activations = smem + ACTIVATIONS;
        weights = keep_in_register(smem + WEIGHTS + at.warpgroup * STACK * K64_PER_STAGE * K64_BLOCK_BYTES + at.warp * 512 + at.lane * 16);
        const u32 pair = packed_index(at.warpgroup * STACK * 64, at.warp, at.lane);
        scales = keep_in_register(smem + SCALES + pair * 2);
    }
};

// A thread's packed weights: those of the current block of 64 elements of K and, if a stage has several blocks, those of the next block.
constexpr u32 PACKED_BLOCKS = K64_PER_SLICE > 1 ? 2 : 1;
struct WeightFragments {
    PackedCodes packed[PACKED_BLOCKS][STACK];
    GroupScale group[STACK];   // the current group
    u32 scales[STACK];   // the next group
};

// Load a thread's packed weights of a block.
__device__ __forceinline__ void load_packed(WeightFragments& weights, const SlotAddresses& slots, u32 stage, u32 k64) {
#pragma unroll
    for (u32 s = 0; s < STACK; ++s)
        weights.packed[k64 % PACKED_BLOCKS][s] =
            load_codes(slots.weights + stage * WEIGHT_STAGE_BYTES + (s * K64_PER_STAGE + k64) * K64_BLOCK_BYTES, K64_BLOCK_BYTES / 2);
}

// Load a thread's scales of the next group. `row` is the index of the group in the stage.
__device__ __forceinline__ void load_next_group(WeightFragments& weights, const SlotAddresses& slots, u32 stage, u32 row) {
#pragma unroll
    for (u32 s = 0; s < STACK; ++s)
        weights.scales[s] = ld_shared_b32(slots.scales + stage * SCALE_STAGE_BYTES + (row * TILE_N + 64 * s) * 2);
}

// Make the next group the current one.
__device__ __forceinline__ void begin_group(WeightFragments& weights, const Problem& problem) {
#pragma unroll
    for (u32 s = 0; s < STACK; ++s) {
        set_scales(weights.group[s], weights.scales[s]);
    }
}

// Dequantize one step (16 elements of K) of block k64.
__device__ __forceinline__ void dequantize_step(u32 (&a)[STACK][4], const WeightFragments& weights, u32 k64, u32 step) {
#pragma unroll
    for (u32 s = 0; s < STACK; ++s)
        dequantize_group(a[s], step_codes(weights.packed[k64 % PACKED_BLOCKS][s], step), weights.group[s]);
}

// Release the slot after this warp has read it.
__device__ __forceinline__ void release(const Ring& ring, u32 slot, u32 lane) {
    ring.release_used_by_warp(slot, lane);
}

// Multiply the stages of a work unit. A warp dequantizes MMAS_PER_COMMIT steps of weights while at most COMMITS_IN_FLIGHT commit groups of
// wgmmas are in flight. The warp releases a slot during the next stage, when the wgmmas that read the slot's activations have completed and
// the warp has used the slot's weights. Return the last slot, whose wgmmas may still be in flight.
template <u32 ROWS>
__device__ __forceinline__ u32 mainloop(Sums<ROWS>& acc, WeightFragments& weights, const Problem& problem,
                                        const SlotAddresses& slots, Ring& ring, const WorkUnit& unit, u32 lane) {
    u32 previous = ring.stage;
#pragma unroll 1
    for (u32 k = unit.k_begin; k < unit.k_end; ++k) {
        // The shuffle proves to ptxas that the address is uniform. Without it, ptxas would emit two moves to uniform registers for
        // each descriptor.
        const u32 address = __shfl_sync(0xffffffffu, slots.activations + ring.stage * ACTIVATION_STAGE_BYTES, 0);
        ring.wait();
        const u64 activations = matrix_descriptor(address, 16, SWIZZLE_REPEAT_BYTES, SWIZZLE_128B);
        // The loop loads each later block and group while it multiplies the one before it.
        load_packed(weights, slots, ring.stage, 0);
        load_next_group(weights, slots, ring.stage, 0);
#pragma unroll
        for (u32 i = 0; i < K64_PER_SLICE; ++i) {
            if (i + 1 < K64_PER_SLICE) load_packed(weights, slots, ring.stage, i + 1);
#pragma unroll
            for (u32 first = 0; first < 4; first += MMAS_PER_COMMIT) {
                u32 a[MMAS_PER_COMMIT][STACK][4];
#pragma unroll
                for (u32 j = 0; j < MMAS_PER_COMMIT; ++j) {
                    const u32 k_begin = i * 64 + 16 * (first + j);   // first element of K of the step
                    if (k_begin % GROUP_SIZE == 0) {
                        begin_group(weights, problem);
                        if (k_begin + GROUP_SIZE < K64_PER_SLICE * 64)
                            load_next_group(weights, slots, ring.stage, k_begin / GROUP_SIZE + 1);
                    }
                    dequantize_step(a[j], weights, i, first + j);
                }
                wgmma_fence();
#pragma unroll
                for (u32 j = 0; j < MMAS_PER_COMMIT; ++j)
#pragma unroll
                    for (u32 s = 0; s < STACK; ++s)
                        wgmma_rows<ROWS>(
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

// ---- Producer -------------------------------------------------------------------------------------------------------
struct Maps {
    const TensorMap* weight_map;
    const TensorMap* scale_map;
    const TensorMap* activation_map;
};

// Make the slot's barrier expect the bytes of a stage, and load weights, scales and zero points.
__device__ __forceinline__ void load_weights(const Ring& ring, u32 smem, const Maps& maps, const CtaTile& tile, u32 stage, u64 policy) {
    const u32 slot = ring.stage, full = ring.get_barrier();
    ring.expect_tx(TRANSACTION_BYTES + row_boxes(tile) * ROW_BOX_STAGE_BYTES);
    cp_async_bulk_tensor_3d_load_hint(smem + WEIGHTS + slot * WEIGHT_STAGE_BYTES, maps.weight_map, full, 0, stage * 2,
                                      tile.first_row, policy);
    const u32 group = stage * TILE_K / GROUP_SIZE;
    cp_async_bulk_tensor_2d_load(smem + SCALES + slot * SCALE_STAGE_BYTES, maps.scale_map, full, tile.first_row * 64, group);
}

// Load the rows of a stage as boxes of ROW_BOX rows and 64 elements of K with the 128-byte swizzle. The rows after a block belong to the next
// expert or are uninitialized. Their results are not stored.
__device__ __forceinline__ void load_rows(const Ring& ring, u32 smem, const Maps& maps, const CtaTile& tile, u32 stage) {
    const u32 target = smem + ACTIVATIONS + ring.stage * ACTIVATION_STAGE_BYTES;
    for (u32 box = 0; box < row_boxes(tile); ++box)
#pragma unroll
        for (u32 i = 0; i < K64_PER_STAGE; ++i)
            cp_async_bulk_tensor_2d_load(target + (i * TILE_M + box * ROW_BOX) * ROW_BYTES, maps.activation_map, ring.get_barrier(),
                                         stage * TILE_K + i * 64, tile.first + box * ROW_BOX);
}

// Fill the slots for every tile of this CTA, and pass each tile to the consumers in the record of its first slot. The weights of the first
// PREFETCHED stages are loaded before the previous kernel has written the rows.
__device__ __forceinline__ void produce(Ring& ring, CtaTile* records, u32 smem, const Maps& maps, const Problem& problem,
                                        const Routing& routing, u32 tiles) {
    constexpr u32 PREFETCHED = 2;
    const u64 policy = createpolicy_evict_normal();   // L2 policy for the weights, which several blocks of an expert read
    TileQueue queue(problem, routing, tiles);
    CtaTile tile = queue.tile(problem, tiles);
    u32 prefetched = tile.rows > 0 ? min(PREFETCHED, problem.k_iterations) : 0;
    Ring ahead(ring);
#pragma unroll 1
    for (u32 k = 0; k < prefetched; ++k) {
        if (k == 0) records[ahead.stage] = tile;
        load_weights(ahead, smem, maps, tile, k, policy);
        ahead.advance();
    }
    griddepcontrol_wait();   // the first GEMM has written the rows
    queue.choose(routing, tiles);
#pragma unroll 1
    while (tile.rows > 0) {
#pragma unroll 1
        for (u32 k = 0; k < problem.k_iterations; ++k) {
            if (prefetched > 0) {
                --prefetched;
            } else {
                ring.acquire();
                if (k == 0) records[ring.stage] = tile;
                load_weights(ring, smem, maps, tile, k, policy);
            }
            load_rows(ring, smem, maps, tile, k);
            ring.advance();
            if (k == 0) queue.advance(problem, routing, tiles);
        }
        tile = queue.tile(problem, tiles);
    }
    ring.acquire();
    records[ring.stage] = tile;   // no more tiles
    ring.arrive();
}

// ---- Consumers: WARPGROUPS warpgroups -------------------------------------------------------------------------------
// The results and the operands of the epilogue. `bias` may be null.
struct Epilogue {
    u16* results;
    const u16* bias;   // of all experts
};

struct Biases {
    float low, high;   // of columns g and g + 8 of a fragment, where g is lane / 4
};

// Load a thread's biases for a fragment. `bias` contains the biases of all experts, and `column` is the fragment's first column in the
// expert's weight.
__device__ __forceinline__ Biases load_biases(const Problem& problem, const u16* bias, u32 expert, u32 column, u32 lane) {
    const u32 low = column + (lane >> 2), high = low + 8;
    const u16* const own = bias + (u64)expert * problem.n;
    return Biases{low < problem.n ? low_to_float(own[low]) : 0.0f, high < problem.n ? low_to_float(own[high]) : 0.0f};
}

// Multiply the sums by the scales that the main loop has not applied, and add the bias. `column` is the warp's first column in the
// expert's weight. The warp's fragments are FRAGMENT_STRIDE_N columns apart.
template <u32 ROWS>
__device__ __forceinline__ void scale_and_bias(Sums<ROWS>& acc, const Problem& problem, const Epilogue& epilogue, const CtaTile& tile, u32 column,
                                               const WarpPosition& warp) {
    if (epilogue.bias == nullptr) return;
#pragma unroll
    for (u32 c = 0; c < FRAGMENTS_16; ++c) {
        Biases biases{0.0f, 0.0f};
        if (epilogue.bias) biases = load_biases(problem, epilogue.bias, tile.expert, column + FRAGMENT_STRIDE_N * c, warp.lane);
        constexpr float scale_low = 1.0f, scale_high = 1.0f;
#pragma unroll
        for (u32 r = 0; r < ROWS / 8; ++r) {
            acc[c][r][0] = acc[c][r][0] * scale_low + biases.low;
            acc[c][r][1] = acc[c][r][1] * scale_low + biases.low;
            acc[c][r][2] = acc[c][r][2] * scale_high + biases.high;
            acc[c][r][3] = acc[c][r][3] * scale_high + biases.high;
        }
    }
}

// Store a warpgroup's results through its staging rows, STAGING_ROWS rows at a time. stmatrix.trans transposes the fragments, because their rows
// are columns of the result. `column0` is the warpgroup's first column in the result.
template <u32 ROWS>
__device__ __forceinline__ void store_results(const Sums<ROWS>& acc, const Problem& problem, u16* results, u32 smem, const CtaTile& tile,
                                              u32 column0, const WarpPosition& warp) {
    constexpr u32 VECTORS_PER_ROW = 8 * FRAGMENTS_16;   // vectors of 8 columns
    constexpr u32 ROWS_AT_ONCE = ROWS < STAGING_ROWS ? ROWS : STAGING_ROWS, VECTORS_PER_THREAD = ROWS_AT_ONCE * VECTORS_PER_ROW / 128;
    const u32 staging = smem + STAGING + warp.warpgroup * STAGING_BYTES, thread = warp.warp * 32 + warp.lane;
#pragma unroll
    for (u32 first = 0; first < ROWS; first += ROWS_AT_ONCE) {
        if (first >= tile.rows) return;   // uniform within the CTA
        warpgroup_sync(warp.warpgroup);   // all warps must have read the staging rows before the stores below overwrite them
        const u32 at = staging + ((warp.lane & 7) + (warp.lane >> 4) * 8) * STAGING_PITCH_BYTES;
#pragma unroll
        for (u32 row = 0; row < ROWS_AT_ONCE && first + row < ROWS; row += 16) {
            const u32 r = (first + row) / 8;
            // Two of the four matrices contain 8 rows of the two halves of a fragment, and the other two contain the next 8 rows.
#pragma unroll
            for (u32 c = 0; c < FRAGMENTS_16; ++c) {
                u32 four[4];
#pragma unroll
                for (u32 i = 0; i < 4; ++i) {
                    const float(&sums)[4] = acc[c][r + i / 2];
                    four[i] = to_pair(sums[i % 2 * 2], sums[i % 2 * 2 + 1]);
                }
                stmatrix_x4_trans(at + row * STAGING_PITCH_BYTES + (8 * c + 2 * warp.warp + (warp.lane >> 3 & 1)) * 16, four);
            }
        }
        warpgroup_sync(warp.warpgroup);   // all warps must have staged their rows before any thread reads them
        uint4 values[VECTORS_PER_THREAD];   // all loads are issued before the first store, because a store waits for its load
#pragma unroll
        for (u32 i = 0; i < VECTORS_PER_THREAD; ++i) {
            const u32 vector = 128 * i + thread, row = vector / VECTORS_PER_ROW, column = vector % VECTORS_PER_ROW;
            values[i] = ld_shared_v4_b32(staging + row * STAGING_PITCH_BYTES + column * 16);
        }
#pragma unroll
        for (u32 i = 0; i < VECTORS_PER_THREAD; ++i) {
            const u32 vector = 128 * i + thread, row = first + vector / VECTORS_PER_ROW, column = column0 + vector % VECTORS_PER_ROW * 8;
            if (row < tile.rows && column < problem.n) *(uint4*)(results + (u64)(tile.first + row) * problem.n + column) = values[i];
        }
    }
}

// Compute and store a tile whose block has at most ROWS rows.
template <u32 ROWS>
__device__ __forceinline__ void compute(Ring& ring, WeightFragments& weights, const SlotAddresses& slots, const Problem& problem,
                                        const Epilogue& epilogue, u32 smem, const CtaTile& tile, const WarpPosition& warp) {
    Sums<ROWS> acc;
#pragma unroll
    for (u32 c = 0; c < FRAGMENTS_16; ++c)
#pragma unroll
        for (u32 r = 0; r < ROWS / 8; ++r)
#pragma unroll
            for (u32 i = 0; i < 4; ++i) acc[c][r][i] = 0.0f;
    const u32 slot = mainloop<ROWS>(acc, weights, problem, slots, ring, WorkUnit{0, 0, problem.k_iterations}, warp.lane);
    wgmma_wait_group<0>();
    release(ring, slot, warp.lane);
    const u32 column0 = tile.n_begin + warp.warpgroup * STACK * 64;   // the warpgroup's first column in the expert's weight
    scale_and_bias<ROWS>(acc, problem, epilogue, tile, column0 + 16 * warp.warp, warp);
    store_results<ROWS>(acc, problem, epilogue.results, smem, tile, column0, warp);
}

// Compute and store the tiles of this CTA. All threads of the consumer warps must call this function.
__device__ __forceinline__ void consume(Ring& ring, const CtaTile* records, const Problem& problem, u32 smem, const Epilogue& epilogue,
                                        const WarpPosition& warp) {
    const SlotAddresses slots(smem, warp);
    WeightFragments weights;
#pragma unroll
    for (u32 s = 0; s < STACK; ++s) weights.group[s].zero = zero_point(8, 8);
#pragma unroll 1
    while (true) {
        const CtaTile tile = receive_tile(ring, records, warp.lane);
        if (tile.rows == 0) return;
        if (tile.rows <= 32) compute<32>(ring, weights, slots, problem, epilogue, smem, tile, warp);
        else compute<64>(ring, weights, slots, problem, epilogue, smem, tile, warp);
    }
}
}  // namespace cudatma

// The second of two grouped GEMMs computes h W2 for each pair, where h is the pair's result of the first GEMM.
// The product is computed as W^T x^T, so that the columns of W become the rows (M) of the MMAs. A CTA computes several tiles.
// One thread of the last warps is the producer, which fills the slots of the ring for one tile after another. The other warpgroups are consumers,
// which dequantize weights into the registers of operand A, multiply, and store.
extern "C" __global__ void __launch_bounds__(384, 1)
experts_wgmma_down_f16_g128_64x256x128_k1_s6_w2_g21_r232(
    const __grid_constant__ cudatma::TensorMap weight_map,
    const __grid_constant__ cudatma::TensorMap scale_map,
    const __grid_constant__ cudatma::TensorMap activation_map,
    const cudatma::u16* bias,
    cudatma::u8* space,
    const __grid_constant__ cudatma::Problem problem) {
    using namespace cudatma;
    extern __shared__ __align__(1024) u8 dynamic_shared[];
    const u32 smem = shared_address(dynamic_shared);
    // The shuffle proves to ptxas that the value is uniform.
    const u32 warp_index = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
    CtaTile* const records = (CtaTile*)(dynamic_shared + TILES);
    const Routing routing(space, problem);
    Ring ring;
    ring.init(smem + FULL_BARRIERS, 1, EMPTY_ARRIVALS);
    if (warp_index >= CONSUMER_WARPS) {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        if (warp_index == CONSUMER_WARPS && elect_sync()) {
            // The routing kernel has completed: every CTA of the first GEMM waits for it before allowing this kernel to start.
            const u32 tiles = __ldcg(routing.block_count) * problem.tiles_n;
            produce(ring, records, smem, Maps{&weight_map, &scale_map, &activation_map}, problem, routing, tiles);
        }
    } else {
        setmaxnreg_inc<CONSUMER_REGISTERS>();
        griddepcontrol_wait();   // the first GEMM has written the rows
        griddepcontrol_launch_dependents();
        consume(ring, records, problem, smem, Epilogue{(u16*)(space + problem.result_at), bias}, WarpPosition{warp_index / 4, warp_index % 4, laneid()});
    }
}
