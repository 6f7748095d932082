// cudatma: kernels/experts_skinny.cu.j2 for sm_90a
// config: ExpertsConfig
//   version = 'skinny'
//   dtype = 'bfloat16'
//   group_size = 64
//   has_zeros = True
//   tile_m = 8
//   tile_n = 128
//   tile_k = 256
//   stages = 4
//   slice_k = 2
//   deep_box = True
//   product = 'up'
// 8 consumer warps and 1 producer warp; 96480 bytes of shared memory per CTA.
// Arrays of a stage:
//     5120 bytes: activations 8 x 256 bfloat16, 128B swizzle
//    16384 bytes: weights 128 x 256 int4, packed layout 1
//     1024 bytes: scales 4 x 128 bfloat16
//      512 bytes: zero points 4 x 128 uint8

// primitives.cu contains
// u8, u16, u32, u64, TensorMap, shared_address, laneid, elect_sync, bar_sync, griddepcontrol_wait,
// griddepcontrol_launch_dependents, mbarrier_init, mbarrier_arrive, mbarrier_arrive_expect_tx,
// mbarrier_try_wait_parity, mbarrier_wait_parity, fence_mbarrier_init, cp_async_bulk_tensor_2d_load,
// cp_async_bulk_tensor_3d_load, cp_async_bulk_tensor_3d_load_hint, createpolicy_evict_first, ld_shared_b32,
// ld_shared_v2_b32, ld_shared_v4_b32, ld_shared_v4_f32, st_shared_v4_f32, ldmatrix_x2, ldmatrix_x4,
// movmatrix_trans, mma_m16n8k16_bf16, lop3_and_or, TmaPipeline, Divisor, divide, low_to_float, high_to_float,
// to_pair, subtract, word, add_fragment

namespace cudatma {

// ---- The tile of a CTA ----------------------------------------------------------------------------------------------
constexpr u32 TILE_M = 8;   // rows of x per CTA, which are columns of the MMAs
constexpr u32 FRAGMENTS_8 = TILE_M < 8 ? 1 : TILE_M / 8;   // fragments of 8 rows of x; if TILE_M < 8, the fragment repeats its rows
constexpr u32 N_TILE = 32, FRAGMENTS_16 = N_TILE / 16;   // columns of W per N tile, which become the rows (M) of the MMAs; fragments per N tile
constexpr u32 N_TILES = 4;   // N tiles per CTA
constexpr u32 TILE_K = 256;   // elements of K per stage
constexpr u32 SLICE_K = 2;   // warps that share an N tile; each multiplies a slice of every stage's K
constexpr u32 CONSUMER_WARPS = N_TILES * SLICE_K;
constexpr u32 GROUP_SIZE = 64;   // elements of K that share a scale

// ---- Packed weights: an n64 row contains 64 columns of W as 64 x 64 blocks along K ----------------------------------
constexpr u32 K64_PER_STAGE = TILE_K / 64, K64_PER_WARP = K64_PER_STAGE / SLICE_K;
// Each 1 KB half of a 2 KB block contains 32 columns.
constexpr u32 K64_BLOCK_BYTES = 2048, HALF_BLOCK_BYTES = 1024;

// ---- Shared memory: byte offsets from a base that is 1024-byte aligned, with sizes in the comments -------------------
constexpr u32 ACTIVATIONS = 0;                // 20480 bytes
constexpr u32 WEIGHTS = 20480;                // 65536 bytes
constexpr u32 SCALES = 86016;                 // 4096 bytes
constexpr u32 ZEROS = 90112;                  // 2048 bytes
constexpr u32 SLICE_SUMS = 92160;             // 4096 bytes
constexpr u32 TILES = 96256;                  // 160 bytes
constexpr u32 FULL_BARRIERS = 96416;          // 32 bytes

// ---- Slots: one per stage and operand -------------------------------------------------------------------------------
constexpr u32 STAGES = 4;
constexpr u32 ACTIVATION_STAGE_BYTES = 5120;
constexpr u32 LINE_BYTES = 128;   // bytes that 64 elements of K occupy in a row of activations
// Bytes from one row of activations to the next. This is an odd number of lines, so that eight rows differ in the bits that the 128-byte
// swizzle reads, and ldmatrix has no bank conflicts.
constexpr u32 ROW_BYTES = 640;
constexpr u32 WEIGHT_STAGE_BYTES = 16384;
constexpr u32 SCALE_STAGE_BYTES = 1024;
constexpr u32 SCALE_ROW = 128;   // scales per group in a slot, which contains the scales of whole n64 rows
constexpr u32 ZERO_SLOT_BYTES = 512;
constexpr u32 TRANSACTION_BYTES = 22016;   // bytes that TMA loads per stage
constexpr u32 FRAGMENT_BYTES = 32 * 16;   // bytes per fragment of fp32 sums (16 columns of W x 8 rows of x)
constexpr u32 N_TILE_SUM_BYTES = FRAGMENTS_16 * FRAGMENTS_8 * FRAGMENT_BYTES;
typedef TmaPipeline<STAGES> Ring;

// The named barriers of this kernel. __syncthreads() uses barrier 0.
enum NamedBarrier : u32 {
    SLICE_BARRIER = 1,   // all consumer warps
};

// The launch parameters that are neither tensor maps nor pointers.
struct Problem {
    u32 n;                          // number of columns of the result
    u32 tiles_n;                    // number of output tiles along N (a CTA or a cluster computes one tile)
    u32 k_iterations;               // number of stages per tile
    u32 pairs;                      // number of (token, expert) pairs
    u32 expert_rows;                // number of rows of packed weights (64 columns) per expert
    Divisor by_tiles_n;             // divides by tiles_n
    Divisor by_top_k;               // divides by top_k
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

// ---- Tiles of a CTA -------------------------------------------------------------------------------------------------
// A tile consists of a block of rows of one expert and TILE_N of the expert's columns. The weights of all experts form one weight: it contains
// the columns of one expert after another, and each expert is padded to whole n64 rows.
constexpr u32 TILE_N = N_TILES * N_TILE, N64_PER_TILE = TILE_N / 64;

struct CtaTile {
    u32 first_row;   // index of the tile's first n64 row in the weight of all experts
    u32 n_begin;     // index of the tile's first column in the expert's weight
    u32 first;       // index of the block's first row in the sorted pairs
    u32 rows;        // number of rows of the block
    u32 expert;
};

// Load tile `index`, unless it comes after the last tile.
__device__ __forceinline__ void load_tile(CtaTile& tile, const Problem& problem, const Routing& routing, u32 index, u32 tiles) {
    if (index >= tiles) return;
    const u32 block_index = divide(index, problem.by_tiles_n), tile_n = index - block_index * problem.tiles_n;
    const uint4 block = __ldcg((const uint4*)(routing.blocks + block_index));
    tile = CtaTile{block.x * problem.expert_rows + tile_n * N64_PER_TILE, tile_n * TILE_N, block.y, min(block.z, TILE_M), block.x};
}

// Wait for a tile's first stage, and read the record that the producer has written for the tile. The shuffles wait for the loads, so that no
// load is in flight when the slot is released.
__device__ __forceinline__ CtaTile receive_tile(const Ring& ring, const CtaTile* records, u32 lane) {
    ring.wait();
    const u32 field = lane < 5 ? ((const u32*)(records + ring.stage))[lane] : 0;
    return CtaTile{__shfl_sync(0xffffffffu, field, 0), __shfl_sync(0xffffffffu, field, 1), __shfl_sync(0xffffffffu, field, 2),
                   __shfl_sync(0xffffffffu, field, 3), __shfl_sync(0xffffffffu, field, 4)};
}

struct WarpTile {
    u32 slice;      // the warp's slice of each stage's K
    u32 position;   // position of the warp's N tile in shared memory
    u32 n_tile;     // number of the N tile, counted over the weights of all experts; equal to `position` before the first tile

    __device__ __forceinline__ explicit WarpTile(u32 warp) : slice(warp / N_TILES), position(warp % N_TILES), n_tile(position) {}
};

// ---- Packed weights: the codes that a thread multiplies -------------------------------------------------------------
// A thread's codes in a block of 64 elements of K and 16 columns, one word of 8 codes per step of 16 elements of K.
using PackedCodes = uint4;
using StepCodes = u32;

__device__ __forceinline__ PackedCodes load_codes(u32 address, u32) { return ld_shared_v4_b32(address); }

__device__ __forceinline__ StepCodes step_codes(const PackedCodes& packed, u32 step) { return word(packed, step); }

// ---- int4 -> bfloat16: one LOP3 inserts two nibbles into the mantissas of a constant -----------------------
// 128 plus the zero points of columns g (low) and g + 8 (high), each in both halves. dequantize() subtracts this value from 128 + v.
struct ZeroPoint {
    u32 low, high;
};

// Return the ZeroPoint of the zero points of columns g and g + 8.
__device__ __forceinline__ ZeroPoint zero_point(u32 low, u32 high) {
    return ZeroPoint{0x43004300u | low | low << 16, 0x43004300u | high | high << 16};
}

// Dequantize the 8 nibbles of a word. 0x4300 is 128.0 in bf16. Its last mantissa bit has the weight 1.0, so the bits 0x4300 | v represent exactly 128 + v.
__device__ __forceinline__ void dequantize(u32 (&a)[4], StepCodes q, const ZeroPoint& zero) {
    a[0] = subtract(lop3_and_or(q, 0x000f000fu, 0x43004300u), zero.low);
    a[1] = subtract(lop3_and_or(q >> 4, 0x000f000fu, 0x43004300u), zero.high);
    a[2] = subtract(lop3_and_or(q >> 8, 0x000f000fu, 0x43004300u), zero.low);
    a[3] = subtract(lop3_and_or(q >> 12, 0x000f000fu, 0x43004300u), zero.high);
}

// ---- Producer -------------------------------------------------------------------------------------------------------
struct Maps {
    const TensorMap* weight_map;
    const TensorMap* scale_map;
    const TensorMap* zero_map;
    const TensorMap* activation_map;
};

// Make the slot's barrier expect the bytes of a stage, and load weights, scales and zero points.
__device__ __forceinline__ void load_weights(const Ring& ring, u32 smem, const Maps& maps, const CtaTile& tile, u32 stage, u64 policy) {
    const u32 slot = ring.stage, full = ring.get_barrier();
    ring.expect_tx(TRANSACTION_BYTES);
    cp_async_bulk_tensor_3d_load_hint(smem + WEIGHTS + slot * WEIGHT_STAGE_BYTES, maps.weight_map, full, 0, stage * 4,
                                      tile.first_row, policy);
    const u32 group = stage * TILE_K / GROUP_SIZE;
    cp_async_bulk_tensor_2d_load(smem + SCALES + slot * SCALE_STAGE_BYTES, maps.scale_map, full, tile.first_row * 64, group);
    cp_async_bulk_tensor_2d_load(smem + ZEROS + slot * ZERO_SLOT_BYTES, maps.zero_map, full, tile.first_row * 64, group);
}

typedef u32 Sources[TILE_M];   // for each row of the tile, the index of its row in the source

// Load the indices of the rows. Surplus rows of the tile get an index after the last row, which TMA fills with zeros.
__device__ __forceinline__ void load_sources(Sources& sources, const Problem& problem, const Routing& routing, const CtaTile& tile) {
#pragma unroll
    for (u32 r = 0; r < TILE_M; ++r) {
        const u32 pair = r < tile.rows ? __ldcg(routing.pairs + tile.first + r) : problem.pairs;
        sources[r] = divide(pair, problem.by_top_k);   // the source has one row per token
    }
}

// Load the rows of a stage one by one. TMA fills elements outside the source with zeros.
__device__ __forceinline__ void load_rows(const Ring& ring, u32 smem, const Maps& maps, const Sources& sources, u32 stage) {
    const u32 slot = smem + ACTIVATIONS + ring.stage * ACTIVATION_STAGE_BYTES, full = ring.get_barrier();
#pragma unroll
    for (u32 r = 0; r < TILE_M; ++r) {
        cp_async_bulk_tensor_3d_load(slot + r * ROW_BYTES, maps.activation_map, full, 0, stage * K64_PER_STAGE, sources[r]);
    }
}

// Fill the slots for every tile of this CTA, and pass each tile to the consumers in the record of its first slot. The records of
// tiles and the indices of rows are loaded in advance, because a tile may take less time than these two dependent loads from global memory.
__device__ __forceinline__ void produce(Ring& ring, CtaTile* records, u32 smem, const Maps& maps, const Problem& problem,
                                        const Routing& routing, u32 tiles) {
    const u64 policy = createpolicy_evict_first();   // L2 policy for the weights, most of which are read only once
    const u32 step = gridDim.x;
    CtaTile tile{}, next{}, after_next{};
    Sources sources, next_sources;
    load_tile(tile, problem, routing, blockIdx.x, tiles);
    load_tile(next, problem, routing, blockIdx.x + step, tiles);
    load_sources(sources, problem, routing, tile);
#pragma unroll 1
    for (u32 index = blockIdx.x; index < tiles; index += step) {
        load_sources(next_sources, problem, routing, next);
        load_tile(after_next, problem, routing, index + 2 * step, tiles);
#pragma unroll 1
        for (u32 k = 0; k < problem.k_iterations; ++k) {
            ring.acquire();
            if (k == 0) records[ring.stage] = tile;
            load_weights(ring, smem, maps, tile, k, policy);
            load_rows(ring, smem, maps, sources, k);
            ring.advance();
        }
        tile = next;
        next = after_next;
#pragma unroll
        for (u32 r = 0; r < TILE_M; ++r) sources[r] = next_sources[r];
    }
}

// ---- Consumers: each warp multiplies an N tile by its slice of each stage's K ---------------------------------------

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

// Return `value` through a shuffle, so that ptxas keeps the value in a register instead of recomputing an address in each stage.
__device__ __forceinline__ u32 keep_in_register(u32 value, u32 lane = laneid()) { return __shfl_sync(0xffffffffu, value, lane); }

// Return the index of this thread's scales and zero points in an n64 row, which equals packed_column() of the N tile modulo 64. The
// function does not call packed_column(), because ptxas would order the additions differently.
__device__ __forceinline__ u32 place_in_row(u32 n_tile, u32 lane) { return 8 * (lane >> 2) + 4 * (n_tile & 1); }

// The addresses from which this thread reads slot 0. The addresses in slot i are larger by i times the size of a stage.
struct SlotAddresses {
    u32 activations;
    u32 weights;
    u32 scales;
    u32 zeros;
    u32 k64_stride;   // bytes from one block (64 elements of K) of the N tile to the next

    __device__ __forceinline__ SlotAddresses(u32 smem, const CtaTile& tile, const WarpTile& warp_tile, u32 lane) {
        const u32 k64 = warp_tile.slice * K64_PER_WARP;
        u32 row, chunk;   // row of x and 16-byte chunk whose address the lane passes to ldmatrix
        if constexpr (FRAGMENTS_8 == 1) {
            // One ldmatrix.x4 loads chunks 0 to 3 (32 elements of K) of 8 rows.
            row = (lane & 7) % TILE_M;
            chunk = lane >> 3;
        } else {
            // One ldmatrix.x4 loads chunks 0 and 1 (16 elements of K) of rows 0 to 7 and then of rows 8 to 15.
            row = (lane >> 4) * 8 + (lane & 7);
            chunk = lane >> 3 & 1;
        }
        activations = keep_in_register(smem + ACTIVATIONS + row * ROW_BYTES + k64 * LINE_BYTES + (chunk << 4));
        const u32 half = warp_tile.position % 2 * HALF_BLOCK_BYTES;
        k64_stride = K64_BLOCK_BYTES;
        weights = keep_in_register(smem + WEIGHTS + warp_tile.position / 2 * K64_PER_STAGE * K64_BLOCK_BYTES + half +
                                   k64 * k64_stride + lane * 16);
        const u32 row_in_cta = warp_tile.n_tile / 2 - tile.first_row;
        const u32 at = k64 * 64 / GROUP_SIZE * SCALE_ROW + row_in_cta * 64 + place_in_row(warp_tile.n_tile, lane);
        scales = keep_in_register(smem + SCALES + at * 2);
        zeros = keep_in_register(smem + ZEROS + at);
    }
};

// Operand B of a step of 16 elements of K, which consists of the activations of all rows of the tile.
typedef u32 ActivationFragments[FRAGMENTS_8][2];

// Load the activations of a step. With the swizzle, the addresses of a step's chunks differ from the addresses in step 0 only in bits 5 and
// 6.
__device__ __forceinline__ void load_activation_fragments(ActivationFragments& b, u32 address, u32 step) {
    if constexpr (FRAGMENTS_8 == 1) {
        ldmatrix_x2(b[0], address ^ (step << 5));
    } else {
#pragma unroll
        for (u32 r = 0; r < FRAGMENTS_8; r += 2) {
            u32 four[4];
            ldmatrix_x4(four, (address ^ (step << 5)) + r * 8 * ROW_BYTES);
            b[r][0] = four[0];
            b[r][1] = four[1];
            b[r + 1][0] = four[2];
            b[r + 1][1] = four[3];
        }
    }
}

// Load the activations of a block's four steps of 16 elements of K.
__device__ __forceinline__ void load_block_activations(ActivationFragments (&b)[4], u32 address) {
    if constexpr (FRAGMENTS_8 == 1) {   // one ldmatrix.x4 loads two steps
#pragma unroll
        for (u32 step = 0; step < 4; step += 2) {
            u32 four[4];
            ldmatrix_x4(four, address ^ (step << 5));
            b[step][0][0] = four[0];
            b[step][0][1] = four[1];
            b[step + 1][0][0] = four[2];
            b[step + 1][0][1] = four[3];
        }
    } else {
#pragma unroll
        for (u32 step = 0; step < 4; ++step) load_activation_fragments(b[step], address, step);
    }
}

typedef ZeroPoint ZeroPoints[FRAGMENTS_16];

// Set the zero points of a thread. The bytes of `four` are the zero points of columns g and g + 8 of the first fragment, then of the second
// fragment.
__device__ __forceinline__ void set_zero_points(ZeroPoints& zero_points, u32 four) {
    zero_points[0] = zero_point(four & 0xff, four >> 8 & 0xff);
    zero_points[1] = zero_point(four >> 16 & 0xff, four >> 24);
}

// Load a thread's zero points of a group.
__device__ __forceinline__ void load_zero_points(ZeroPoints& zero_points, u32 smem) {
    set_zero_points(zero_points, ld_shared_b32(smem));
}

// Multiply the sums by the scales of their columns, add the products to the accumulators, and clear the sums. `pairs` contains the scales
// of columns g (low half) and g + 8 (high half) of each fragment.
__device__ __forceinline__ void scale_sums(Accumulators& acc, Accumulators& sums, const u32 (&pairs)[FRAGMENTS_16]) {
#pragma unroll
    for (u32 c = 0; c < FRAGMENTS_16; ++c) {
        const float low = low_to_float(pairs[c]), high = high_to_float(pairs[c]);
#pragma unroll
        for (u32 r = 0; r < FRAGMENTS_8; ++r) {
            acc[c][r][0] += sums[c][r][0] * low;
            acc[c][r][1] += sums[c][r][1] * low;
            acc[c][r][2] += sums[c][r][2] * high;
            acc[c][r][3] += sums[c][r][3] * high;
        }
    }
    clear(sums);
}

__device__ __forceinline__ void multiply_stage(Accumulators& acc, ZeroPoints& zero_points, const SlotAddresses& slots, u32 slot) {
    const u32 weights = slots.weights + slot * WEIGHT_STAGE_BYTES;
    const u32 activations = slots.activations + slot * ACTIVATION_STAGE_BYTES;
    const u32 scales = slots.scales + slot * SCALE_STAGE_BYTES;
    Accumulators sums;   // unscaled sums of the current group
    clear(sums);
#pragma unroll
    for (u32 i = 0; i < K64_PER_WARP; ++i) {
        PackedCodes packed[FRAGMENTS_16];
#pragma unroll
        for (u32 c = 0; c < FRAGMENTS_16; ++c) packed[c] = load_codes(weights + i * slots.k64_stride + c * 512, slots.k64_stride / 2);
        ActivationFragments b[4];   // one per step
        const u32 line = activations + i * LINE_BYTES;
        load_block_activations(b, line ^ (line >> 3 & 0x70));   // the 128-byte swizzle
#pragma unroll
        for (u32 k16 = 0; k16 < 4; ++k16) {
            const u32 done = i * 64 + k16 * 16;   // elements of K that this warp has multiplied in the stage
            if (done % GROUP_SIZE == 0)
                load_zero_points(zero_points, slots.zeros + slot * ZERO_SLOT_BYTES + done / GROUP_SIZE * SCALE_ROW);
#pragma unroll
            for (u32 c = 0; c < FRAGMENTS_16; ++c) {
                u32 a[4];
                dequantize(a, step_codes(packed[c], k16), zero_points[c]);
#pragma unroll
                for (u32 m = 0; m < FRAGMENTS_8; ++m)
                    mma_m16n8k16_bf16(sums[c][m], a, b[k16][m][0], b[k16][m][1]);
            }
            if ((done + 16) % GROUP_SIZE == 0 || done + 16 == K64_PER_WARP * 64) {
                const uint2 loaded = ld_shared_v2_b32(scales + done / GROUP_SIZE * SCALE_ROW * 2);
                const u32 pairs[FRAGMENTS_16] = {loaded.x, loaded.y};
                scale_sums(acc, sums, pairs);
            }
        }
    }
}

// ---- Reduction of partial sums: within the CTA, then within the cluster ---------------------------------------------
// OWNERS of the SLICE_K warps that share an N tile own OWN fragments each. An owner adds up the sums of its fragments and stores the result.
constexpr u32 OWNERS = SLICE_K < FRAGMENTS_16 ? SLICE_K : FRAGMENTS_16, OWN = FRAGMENTS_16 / OWNERS;
typedef float OwnSums[OWN][FRAGMENTS_8][4];

// Return the first fragment that a warp owns.
__device__ __forceinline__ u32 first_own_fragment(const WarpTile& warp_tile) { return SLICE_K == 1 ? 0 : warp_tile.slice * OWN; }

// Return the offset in bytes of a fragment in the sums of an N tile.
__device__ __forceinline__ u32 fragment_offset(u32 c, u32 m) { return (c * FRAGMENTS_8 + m) * FRAGMENT_BYTES; }

// Add up the slices of an N tile. Every warp stores its sums of other owners' fragments to shared memory, and each owner adds these sums to
// its own in the order of the slices. Return whether this warp is an owner.
__device__ __forceinline__ bool reduce_slices(OwnSums& own, const Accumulators& acc, u32 smem, const WarpTile& warp_tile,
                                              u32 lane) {
    constexpr u32 SLICE_BYTES = N_TILES * N_TILE_SUM_BYTES;
    const u32 slice = warp_tile.slice;
    const u32 sums = smem + SLICE_SUMS + warp_tile.position * N_TILE_SUM_BYTES + lane * 16;
#pragma unroll
    for (u32 c = 0; c < FRAGMENTS_16; ++c) {
        const u32 owner = c / OWN, sender = slice - (slice > owner);   // index of this slice among the slices other than the owner
#pragma unroll
        for (u32 m = 0; m < FRAGMENTS_8; ++m) {
            if (slice == owner) {
#pragma unroll
                for (u32 i = 0; i < 4; ++i) own[c % OWN][m][i] = acc[c][m][i];
            } else {
                st_shared_v4_f32(sums + sender * SLICE_BYTES + fragment_offset(c, m), acc[c][m]);
            }
        }
    }
    bar_sync(SLICE_BARRIER, 32 * CONSUMER_WARPS);   // owners must not read the sums before all consumer warps have stored them
    if (slice >= OWNERS) return false;
    const u32 first = sums + fragment_offset(slice * OWN, 0);
#pragma unroll
    for (u32 sender = 0; sender < SLICE_K - 1; ++sender)
#pragma unroll
        for (u32 c = 0; c < OWN; ++c)
#pragma unroll
            for (u32 m = 0; m < FRAGMENTS_8; ++m) add_fragment(own[c][m], first + sender * SLICE_BYTES + fragment_offset(c, m));
    return true;
}

struct Biases {
    float low, high;   // of columns g and g + 8 of a fragment, where g is lane / 4
};

// Load a thread's biases for a fragment. `bias` contains the biases of all experts, and `column` is the fragment's first column in the
// expert's weight.
__device__ __forceinline__ Biases load_biases(const Problem& problem, const u16* bias, u32 expert, u32 column, u32 lane) {
    // The two columns are the gate column and the up column of one result column. In `bias`, an expert's gate columns precede its up
    // columns.
    const u32 low = column / 2 + (lane >> 2);
    const u16* const own = bias + (u64)expert * (2 * problem.n);
    return low < problem.n ? Biases{low_to_float(own[low]), low_to_float(own[problem.n + low])} : Biases{0.0f, 0.0f};
}

// Add the bias. `n_begin` is the owner's first column in the expert's weight.
__device__ __forceinline__ void add_bias(OwnSums& own, const Problem& problem, const u16* bias, u32 expert, u32 n_begin, u32 lane) {
#pragma unroll
    for (u32 c = 0; c < OWN; ++c) {
        const Biases biases = load_biases(problem, bias, expert, n_begin + 16 * c, lane);
#pragma unroll
        for (u32 m = 0; m < FRAGMENTS_8; ++m) {
            own[c][m][0] += biases.low;
            own[c][m][1] += biases.low;
            own[c][m][2] += biases.high;
            own[c][m][3] += biases.high;
        }
    }
}

// ---- Epilogue: apply the gated activation to an owner's sums --------------------------------------------------------
// Gate columns and up columns of the weight alternate in groups of 8. In each fragment, a thread therefore holds the gate (column g) and
// the up (column g + 8) of the same result column.

__device__ __forceinline__ float activate(float gate, float up) { return __fdividef(gate, 1.0f + __expf(-gate)) * up; }   // silu(gate) * up
// Store the activations. movmatrix transposes the fragments, so that each lane holds two adjacent columns of a row. `n_begin` is the
// owner's first column.
__device__ __forceinline__ void store_results(const OwnSums& own, const Problem& problem, u16* results, const CtaTile& tile, u32 n_begin,
                                              u32 lane) {
#pragma unroll
    for (u32 m = 0; m < FRAGMENTS_8; ++m) {
        if (m > 0 && 8 * m >= tile.rows) return;   // uniform within the warp
        const u32 row = 8 * m + (lane >> 2);
        u16* const target = results + (u64)(tile.first + row) * problem.n;
#pragma unroll
        for (u32 c = 0; c < OWN; ++c) {
            const float(&sums)[4] = own[c][m];
            const u32 two = movmatrix_trans(to_pair(activate(sums[0], sums[2]), activate(sums[1], sums[3])));
            const u32 column = (n_begin + 16 * c) / 2 + 2 * (lane & 3);
            if (row < tile.rows && column < problem.n) *(u32*)(target + column) = two;
        }
    }
}

// Multiply the stages of a tile. The warp releases a slot during the next stage, after it has used all values of the slot. Otherwise ptxas
// could issue the arrival while an ld.shared is in flight. `previous` is the slot of the previous stage, or STAGES if there is none.
__device__ __forceinline__ void consume(Accumulators& acc, ZeroPoints& zero_points, Ring& ring, const SlotAddresses& slots, u32& previous,
                                        u32 k_iterations, u32 lane) {
#pragma unroll 1
    for (u32 k = 0; k < k_iterations; ++k) {
        __syncwarp();
        if (previous < STAGES && lane == 0) ring.release_used(previous);
        ring.wait();
        multiply_stage(acc, zero_points, slots, ring.stage);
        previous = ring.stage;
        ring.advance();
    }
}
}  // namespace cudatma

// The first of two grouped GEMMs computes activation(x W1) for each pair, where x is the row of the pair's token.
// The product is computed as W^T x^T, so that the columns of W become the rows (M) of the MMAs. A CTA computes several tiles, each a block of
// rows of one expert and N_TILES N tiles over all of K. The last warp is the producer. It waits until the consumers have released a slot, and
// loads the next stage, which may belong to the next tile. The other warps are consumers. They wait until a slot is full, multiply, and release
// the slot.
extern "C" __global__ void __launch_bounds__(288, 1)
experts_skinny_up_bf16_g64_zeros_8x128x256_k2_s4_d(
    const __grid_constant__ cudatma::TensorMap weight_map,
    const __grid_constant__ cudatma::TensorMap scale_map,
    const __grid_constant__ cudatma::TensorMap zero_map,
    const __grid_constant__ cudatma::TensorMap activation_map,
    const cudatma::u16* bias,
    cudatma::u8* space,
    const __grid_constant__ cudatma::Problem problem) {
    using namespace cudatma;
    extern __shared__ __align__(1024) u8 dynamic_shared[];
    const u32 smem = shared_address(dynamic_shared);
    // The shuffle proves to ptxas that the value is uniform.
    const u32 warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    CtaTile* const records = (CtaTile*)(dynamic_shared + TILES);
    const Routing routing(space, problem);
    Ring ring;
    ring.init(smem + FULL_BARRIERS, 1, CONSUMER_WARPS);
    griddepcontrol_wait();   // wait until the routing kernel has written the blocks
    griddepcontrol_launch_dependents();
    // The routing kernel has completed, because every CTA of the first GEMM waits for it before it allows the second GEMM to start.
    const u32 tiles = __ldcg(routing.block_count) * problem.tiles_n;
    if (warp == CONSUMER_WARPS) {
        // elect_sync() proves to ptxas that only one thread runs this code. With the condition lane == 0, ptxas would put a loop around each copy.
        if (elect_sync()) produce(ring, records, smem, Maps{&weight_map, &scale_map, &zero_map, &activation_map}, problem, routing, tiles);
        return;
    }
    WarpTile warp_tile(warp);
    const SlotAddresses slots(smem, CtaTile{}, warp_tile, lane);
    ZeroPoints zero_points;
    u32 previous = STAGES;
#pragma unroll 1
    for (u32 index = blockIdx.x; index < tiles; index += gridDim.x) {
        const CtaTile tile = receive_tile(ring, records, lane);
        Accumulators acc;
        clear(acc);
        consume(acc, zero_points, ring, slots, previous, problem.k_iterations, lane);
        bar_sync(SLICE_BARRIER, 32 * CONSUMER_WARPS);   // the owners must have read the sums of the previous tile
        OwnSums own;
        if (!reduce_slices(own, acc, smem, warp_tile, lane)) continue;
        const u32 own_begin = 16 * first_own_fragment(warp_tile);
        const u32 n_begin = tile.n_begin + warp_tile.position * N_TILE + own_begin;   // the owner's first column
        if (bias != nullptr) add_bias(own, problem, bias, tile.expert, n_begin, lane);
        store_results(own, problem, (u16*)(space + problem.result_at), tile, n_begin, lane);
    }
}
