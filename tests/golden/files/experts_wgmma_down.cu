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
// 8 warps consume, 4 produce; a CTA takes 199904 B.
// One stage holds
//    16384 B  activations 64 x 128 float16, 128B swizzle
//    16384 B  weights 256 x 128 int4, packed layout 1
//      512 B  scales 1 x 256 float16

// primitives.cu contains
// u8, u16, u32, u64, TensorMap, shared_address, laneid, elect_sync, griddepcontrol_wait,
// griddepcontrol_launch_dependents, setmaxnreg_inc, setmaxnreg_dec, mbarrier_init, mbarrier_arrive,
// mbarrier_arrive_expect_tx, mbarrier_try_wait_parity, mbarrier_wait_parity, fence_mbarrier_init,
// cp_async_bulk_tensor_2d_load, cp_async_bulk_tensor_3d_load_hint, createpolicy_evict_normal, ld_shared_b32,
// ld_shared_v4_b32, movmatrix_trans, matrix_descriptor, wgmma_fence, wgmma_commit_group, wgmma_wait_group,
// lop3_and_or, TmaPipeline, Divisor, divide, to_pair, subtract, multiply, multiply_add, both_low, both_high, word,
// packed_index

namespace cudatma {

// ---- Tile -----------------------------------------------------------------------------------------------------------
constexpr u32 TILE_M = 64;   // rows of M per CTA, which are columns of the MMAs
constexpr u32 TILE_N = 256;   // columns of N per CTA, which become the rows (M) of the MMAs
constexpr u32 TILE_K = 128;   // elements of K per stage
constexpr u32 SLICE_K = 1;   // warpgroups with the same columns of N, which split each stage's K
constexpr u32 STACK = 2;   // wgmmas along N per warpgroup, each of 64 columns
constexpr u32 STAGES = 6;
constexpr u32 MMAS_PER_COMMIT = 2;   // wgmmas per accumulator and commit group; each multiplies 16 elements of K
constexpr u32 COMMITS_IN_FLIGHT = 1;   // commit groups in flight while the weights of the next one are dequantized
constexpr u32 RELEASE_K64 = 0;   // block (64 elements of K) after which all wgmmas of the previous stage have completed
constexpr u32 CONSUMER_WARPS = 8;
constexpr u32 PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = 232;   // registers per thread
constexpr u32 GROUP_SIZE = 128;   // elements of K that share a scale
constexpr u32 FRAGMENTS_16 = STACK, FRAGMENT_STRIDE_N = 64;   // fragments of 16 columns of N per warp; columns from one fragment to the next
constexpr u32 FRAGMENTS_8 = TILE_M / 8;   // fragments of 8 rows of M
constexpr u32 K64_PER_STAGE = TILE_K / 64, K64_PER_SLICE = K64_PER_STAGE / SLICE_K, N64_PER_TILE = TILE_N / 64;   // 64 x 64 blocks of weights
constexpr u32 K64_BLOCK_BYTES = 2048;   // bytes per packed 64 x 64 block of weights
constexpr u32 ROW_BYTES = 128;   // bytes per row of an activation box (64 elements of K)
constexpr u32 SWIZZLE_128B = 1, SWIZZLE_REPEAT_BYTES = 8 * ROW_BYTES;   // fields of a matrix descriptor

// ---- Shared memory: byte offsets from a base that is 1024-byte aligned ----------------------------------------------
constexpr u32 ACTIVATIONS = 0;                // 98304 B
constexpr u32 WEIGHTS = 98304;                // 98304 B
constexpr u32 SCALES = 196608;                // 3072 B
constexpr u32 TILES = 199680;                 // 128 B
constexpr u32 FULL_BARRIERS = 199808;         // 48 B

// ---- Slots: one per stage and operand -------------------------------------------------------------------------------
constexpr u32 ACTIVATION_STAGE_BYTES = 16384;
constexpr u32 WEIGHT_STAGE_BYTES = 16384;
constexpr u32 SCALE_STAGE_BYTES = 512;
constexpr u32 TRANSACTION_BYTES = 33280;   // bytes that TMA loads per stage
constexpr u32 EMPTY_ARRIVALS = 8;   // arrivals of consumer warps that release a slot
using Ring = TmaPipeline<STAGES>;

// The launch parameters that are neither tensor maps nor pointers.
struct Problem {
    u32 n;                          // number of columns of the result
    u32 tiles_n;                    // number of output tiles along N; a CTA or cluster computes one tile
    u32 k_iterations;               // number of stages per tile
    u32 expert_rows;                // n64 rows of each expert in the weight
    u32 source_row;                 // row of the source where the sorted rows begin
    Divisor by_tiles_n;             // divides by tiles_n
    u64 result_at;                  // offset of this kernel's results in the workspace, in bytes
    u64 blocks_at;                  // offset of the number of blocks, and 16 bytes later of the blocks
    u64 pairs_at;                   // offset of the sorted pairs
};

// ---- Routing --------------------------------------------------------------------------------------------------------
// A pair is a token and one of its experts: pair p is choice p % top_k of token p / top_k. The routing kernel sorts the pairs by expert, and
// divides the pairs of each expert into blocks of rows. The rows of all results are in the order of the sorted pairs.
struct Block {
    u32 expert;   // index of the expert's weights on this GPU
    u32 first;    // index of the block's first row in the sorted pairs
    u32 rows;     // number of rows
    u32 unused;
};

// The arrays of the routing kernel, in the memory that all launches of a call share.
struct Routing {
    u32* block_count;
    u32* row_count;   // number of sorted pairs
    Block* blocks;
    u32* pairs;       // pairs sorted by expert

    __device__ __forceinline__ Routing(u8* space, const Problem& problem)
        : block_count((u32*)(space + problem.blocks_at)), row_count((u32*)(space + problem.blocks_at) + 1),
          blocks((Block*)(space + problem.blocks_at) + 1), pairs((u32*)(space + problem.pairs_at)) {}
};

// Stages k_begin to k_end - 1 of a tile.
struct WorkUnit {
    u32 tile, k_begin, k_end;
};

// ---- Which part of the result a CTA computes ------------------------------------------------------------------------
// A tile is a block of rows of one expert, and TILE_N of the expert's columns. The weights of all experts are one weight whose columns are the
// experts' columns, one expert after another, each padded to whole n64 rows.
struct CtaTile {
    u32 first_row;   // the first n64 row in the weight of all experts
    u32 n_begin;     // the first column in the expert's weight
    u32 first;       // index of the block's first row in the sorted pairs
    u32 rows;        // number of rows of the block
};

// Load the tile with this index. Tiles after the last one are not loaded.
__device__ __forceinline__ void load_tile(CtaTile& tile, const Problem& problem, const Routing& routing, u32 index, u32 tiles) {
    if (index >= tiles) return;
    const u32 block_index = divide(index, problem.by_tiles_n), tile_n = index - block_index * problem.tiles_n;
    const uint4 block = __ldcg((const uint4*)(routing.blocks + block_index));
    tile = CtaTile{block.x * problem.expert_rows + tile_n * N64_PER_TILE, tile_n * TILE_N, block.y, block.z};
}

// Wait for a tile's first stage, and read the record with which the producer has passed the tile. The shuffles use the values, so that no load
// is in flight when the slot is released.
__device__ __forceinline__ CtaTile receive_tile(const Ring& ring, const CtaTile* records, u32 lane) {
    ring.wait();
    const u32 field = lane < 4 ? ((const u32*)(records + ring.stage))[lane] : 0;
    return CtaTile{__shfl_sync(0xffffffffu, field, 0), __shfl_sync(0xffffffffu, field, 1), __shfl_sync(0xffffffffu, field, 2),
                   __shfl_sync(0xffffffffu, field, 3)};
}

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

// Dequantize the 8 nibbles of a word. 0x6400 is 1024.0 in fp16. Its last mantissa bit has the value 1, so 0x6400 | v is exactly 1024 + v,
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
// [PTX ISA, wgmma.mma_async] Issue d += a b for a warpgroup, or d = a b if `accumulates` is false. a is in registers and has the layout of
// operand A of mma.m16n8k16. b is a matrix descriptor. No other instruction may access a or d between wgmma_fence and wgmma_wait_group.
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

// Return `value` through a shuffle, so that ptxas keeps the value in a register instead of recomputing an address in each stage.
__device__ __forceinline__ u32 keep_in_register(u32 value, u32 lane = laneid()) { return __shfl_sync(0xffffffffu, value, lane); }

// The position of a thread among the consumers.
struct WarpPosition {
    u32 warpgroup;   // index along N
    u32 warp;        // index in the warpgroup
    u32 lane;
};

// The addresses from which this thread reads slot 0. The addresses in the following slots are multiples of a stage's size further on.
struct SlotAddresses {
    u32 activations, weights, scales;

    __device__ __forceinline__ SlotAddresses(u32 smem, const WarpPosition& at) {
        activations = smem + ACTIVATIONS;
        weights = keep_in_register(smem + WEIGHTS + at.warpgroup * STACK * K64_PER_STAGE * K64_BLOCK_BYTES + at.warp * 512 + at.lane * 16);
        const u32 pair = packed_index(at.warpgroup * STACK * 64, at.warp, at.lane);
        scales = keep_in_register(smem + SCALES + pair * 2);
    }
};

// A thread's packed weights of the current block of 64 elements of K and, if a stage has several blocks, of the next block.
constexpr u32 PACKED_BLOCKS = K64_PER_SLICE > 1 ? 2 : 1;
struct WeightFragments {
    PackedCodes packed[PACKED_BLOCKS][STACK];
    GroupScale group[STACK];
};

// Load a thread's packed weights of a block.
__device__ __forceinline__ void load_packed(WeightFragments& weights, const SlotAddresses& slots, u32 stage, u32 k64) {
#pragma unroll
    for (u32 s = 0; s < STACK; ++s)
        weights.packed[k64 % PACKED_BLOCKS][s] =
            load_codes(slots.weights + stage * WEIGHT_STAGE_BYTES + (s * K64_PER_STAGE + k64) * K64_BLOCK_BYTES, K64_BLOCK_BYTES / 2);
}

// Load a thread's scales of a group. `row` is the index of the group in the stage.
__device__ __forceinline__ void load_group(WeightFragments& weights, const Problem& problem, const SlotAddresses& slots,
                                           u32 stage, u32 row) {
    u32 scales[STACK];
#pragma unroll
    for (u32 s = 0; s < STACK; ++s) scales[s] = ld_shared_b32(slots.scales + stage * SCALE_STAGE_BYTES + (row * TILE_N + 64 * s) * 2);
#pragma unroll
    for (u32 s = 0; s < STACK; ++s) {
        set_scales(weights.group[s], scales[s]);
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
__device__ __forceinline__ u32 mainloop(Accumulators& acc, WeightFragments& weights, const Problem& problem,
                                        const SlotAddresses& slots, Ring& ring, const WorkUnit& unit, u32 lane) {
    u32 previous = ring.stage;
#pragma unroll 1
    for (u32 k = unit.k_begin; k < unit.k_end; ++k) {
        // The shuffle shows ptxas that the address is uniform within a warp. Without it, ptxas would emit two moves to uniform registers
        // for each descriptor.
        const u32 address = __shfl_sync(0xffffffffu, slots.activations + ring.stage * ACTIVATION_STAGE_BYTES, 0);
        ring.wait();
        const u64 activations = matrix_descriptor(address, 16, SWIZZLE_REPEAT_BYTES, SWIZZLE_128B);
        load_packed(weights, slots, ring.stage, 0);   // the loop loads each later block while it multiplies the block before it
#pragma unroll
        for (u32 i = 0; i < K64_PER_SLICE; ++i) {
            if (i + 1 < K64_PER_SLICE) load_packed(weights, slots, ring.stage, i + 1);
            if (i * 64 % GROUP_SIZE == 0) load_group(weights, problem, slots, ring.stage, i * 64 / GROUP_SIZE);
#pragma unroll
            for (u32 first = 0; first < 4; first += MMAS_PER_COMMIT) {
                u32 a[MMAS_PER_COMMIT][STACK][4];
#pragma unroll
                for (u32 j = 0; j < MMAS_PER_COMMIT; ++j) {
                    if constexpr (GROUP_SIZE < 64) {
                        const u32 begin = 16 * (first + j);   // element of K in the block
                        if (begin > 0 && begin % GROUP_SIZE == 0)
                            load_group(weights, problem, slots, ring.stage, (i * 64 + begin) / GROUP_SIZE);
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

// ---- Producer: one thread -------------------------------------------------------------------------------------------
struct Maps {
    const TensorMap* weight_map;
    const TensorMap* scale_map;
    const TensorMap* activation_map;
};

// Expect the bytes of a stage, and load weights, scales and zero points.
__device__ __forceinline__ void load_weights(const Ring& ring, u32 smem, const Maps& maps, const CtaTile& tile, u32 stage, u64 policy) {
    const u32 slot = ring.stage, full = ring.get_barrier();
    ring.expect_tx(TRANSACTION_BYTES);
    cp_async_bulk_tensor_3d_load_hint(smem + WEIGHTS + slot * WEIGHT_STAGE_BYTES, maps.weight_map, full, 0, stage * 2,
                                      tile.first_row, policy);
    const u32 group = stage * TILE_K / GROUP_SIZE;
    cp_async_bulk_tensor_2d_load(smem + SCALES + slot * SCALE_STAGE_BYTES, maps.scale_map, full, tile.first_row * 64, group);
}

// Fill the slots for every tile of this CTA, and pass each tile to the consumers in the record of its first slot. Activations are
// K64_PER_STAGE boxes of TILE_M rows and 64 elements of K in the 128-byte swizzle. The rows after a block belong to the next expert or are
// uninitialized; their results are not stored. Tiles are loaded ahead of time, because a tile may take less time than the load.
__device__ __forceinline__ void produce(Ring& ring, CtaTile* records, u32 smem, const Maps& maps, const Problem& problem,
                                        const Routing& routing, u32 tiles) {
    const u64 policy = createpolicy_evict_normal();   // L2 policy of the weights, which several blocks of an expert read
    const u32 step = gridDim.x;
    CtaTile tile{}, next{};
    load_tile(tile, problem, routing, blockIdx.x, tiles);
#pragma unroll 1
    for (u32 index = blockIdx.x; index < tiles; index += step) {
        load_tile(next, problem, routing, index + step, tiles);
#pragma unroll 1
        for (u32 k = 0; k < problem.k_iterations; ++k) {
            ring.acquire();
            if (k == 0) records[ring.stage] = tile;
            load_weights(ring, smem, maps, tile, k, policy);
            const u32 target = smem + ACTIVATIONS + ring.stage * ACTIVATION_STAGE_BYTES;
#pragma unroll
            for (u32 i = 0; i < K64_PER_STAGE; ++i)
                cp_async_bulk_tensor_2d_load(target + i * TILE_M * ROW_BYTES, maps.activation_map, ring.get_barrier(), k * TILE_K + i * 64,
                                             problem.source_row + tile.first);
            ring.advance();
        }
        tile = next;
    }
}

// ---- Consumers: WARPGROUPS warpgroups -------------------------------------------------------------------------------
// Store the results. movmatrix transposes the fragments, so that each lane has two adjacent columns of a row. n_begin: the warp's first
// column.
__device__ __forceinline__ void store_results(const Accumulators& acc, const Problem& problem, u16* results, const CtaTile& tile, u32 n_begin,
                                              u32 lane) {
#pragma unroll
    for (u32 r = 0; r < FRAGMENTS_8; ++r) {
        if (8 * r >= tile.rows) return;   // uniform within the CTA
        const u32 row = 8 * r + (lane >> 2);
        u16* const target = results + (u64)(tile.first + row) * problem.n;
#pragma unroll
        for (u32 c = 0; c < FRAGMENTS_16; ++c) {
            const float(&sums)[4] = acc[c][r];
            const u32 first = n_begin + FRAGMENT_STRIDE_N * c;
#pragma unroll
            for (u32 half = 0; half < 2; ++half) {
                const u32 two = movmatrix_trans(to_pair(sums[2 * half], sums[2 * half + 1]));
                const u32 column = first + 8 * half + 2 * (lane & 3);
                if (row < tile.rows && column < problem.n) *(u32*)(target + column) = two;
            }
        }
    }
}

// Compute and store the tiles of this CTA. All threads of the consumer warps must call it.
__device__ __forceinline__ void consume(Ring& ring, const CtaTile* records, const Problem& problem, u32 smem, u16* results,
                                        u32 tiles, const WarpPosition& warp) {
    const SlotAddresses slots(smem, warp);
    Accumulators acc;
    WeightFragments weights;
#pragma unroll
    for (u32 s = 0; s < STACK; ++s) weights.group[s].zero = zero_point(8, 8);
#pragma unroll 1
    for (u32 index = blockIdx.x; index < tiles; index += gridDim.x) {
        const CtaTile tile = receive_tile(ring, records, warp.lane);
        const u32 first = warp.warpgroup * STACK * 64;
        clear(acc);
        const u32 slot = mainloop(acc, weights, problem, slots, ring, WorkUnit{index, 0, problem.k_iterations}, warp.lane);
        wgmma_wait_group<0>();
        release(ring, slot, warp.lane);
        store_results(acc, problem, results, tile, tile.n_begin + first + 16 * warp.warp, warp.lane);
    }
}
}  // namespace cudatma

// The second of two grouped GEMMs: the results of a pair are h W2, where h are the pair's results of the first one.
// Computed as W^T x^T: columns of W are rows of the wgmma. A CTA computes several tiles. One thread of the last warps is the producer: it fills
// the slots of the ring, across the boundaries of tiles. The other warpgroups are consumers: they dequantize weights into the registers of operand A,
// multiply, and store.
extern "C" __global__ void __launch_bounds__(384, 1)
experts_wgmma_down_f16_g128_64x256x128_k1_s6_w2_g21_r232(
    const __grid_constant__ cudatma::TensorMap weight_map,
    const __grid_constant__ cudatma::TensorMap scale_map,
    const __grid_constant__ cudatma::TensorMap activation_map,
    cudatma::u8* space,
    const __grid_constant__ cudatma::Problem problem) {
    using namespace cudatma;
    extern __shared__ __align__(1024) u8 dynamic_shared[];
    const u32 smem = shared_address(dynamic_shared);
    // The shuffle lets ptxas know that the value is uniform within a warp.
    const u32 warp_index = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
    CtaTile* const records = (CtaTile*)(dynamic_shared + TILES);
    const Routing routing(space, problem);
    Ring ring;
    ring.init(smem + FULL_BARRIERS, 1, EMPTY_ARRIVALS);
    griddepcontrol_wait();   // the previous kernel has written the rows, and the routing kernel has written the blocks
    griddepcontrol_launch_dependents();
    const u32 tiles = __ldcg(routing.block_count) * problem.tiles_n;

    if (warp_index >= CONSUMER_WARPS) {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        if (warp_index == CONSUMER_WARPS && elect_sync()) produce(ring, records, smem, Maps{&weight_map, &scale_map, &activation_map}, problem, routing, tiles);
    } else {
        setmaxnreg_inc<CONSUMER_REGISTERS>();
        consume(ring, records, problem, smem, (u16*)(space + problem.result_at), tiles,
                WarpPosition{warp_index / 4, warp_index % 4, laneid()});
    }
}
