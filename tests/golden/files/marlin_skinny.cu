// cudatma: kernels/marlin_skinny.cu.j2 for sm_90a
// config: MarlinConfig
//   version = 'skinny'
//   dtype = 'bfloat16'
//   group_size = 64
//   has_zeros = True
//   tile_m = 16
//   tile_n = 96
//   tile_k = 256
//   stages = 3
//   slice_k = 2
//   cluster_k = 2
// 6 consumer warps and 1 producer warp; 76344 bytes of shared memory per CTA.
// Arrays of a stage:
//     8192 bytes: activations 16 x 256 bfloat16, 128B swizzle
//    12288 bytes: weights 96 x 256 int4, packed layout 1
//     1024 bytes: scales 4 x 128 bfloat16
//      512 bytes: zero points 4 x 128 uint8

// primitives.cu contains
// u8, u16, u32, u64, TensorMap, shared_address, laneid, elect_sync, bar_sync, griddepcontrol_wait,
// griddepcontrol_launch_dependents, mbarrier_init, mbarrier_arrive, mbarrier_arrive_expect_tx,
// mbarrier_try_wait_parity, mbarrier_wait_parity, fence_mbarrier_init, mapa_shared_cluster,
// barrier_cluster_arrive_relaxed, st_async_v4_f32, mbarrier_wait_parity_acquire_cluster, barrier_cluster_wait,
// cp_async_bulk_tensor_2d_load, cp_async_bulk_tensor_3d_load_hint, createpolicy_evict_first, ld_shared_b32,
// ld_shared_v2_b32, ld_shared_v4_b32, ld_shared_v4_f32, st_shared_v4_f32, ldmatrix_x2, ldmatrix_x4,
// movmatrix_trans, mma_m16n8k16_bf16, lop3_and_or, TmaPipeline, low_to_float, high_to_float, to_pair, subtract,
// word, add_fragment

namespace cudatma {

// ---- The tile of a CTA ----------------------------------------------------------------------------------------------
constexpr u32 TILE_M = 16;   // rows of x per CTA, which are columns of the MMAs
constexpr u32 FRAGMENTS_8 = TILE_M < 8 ? 1 : TILE_M / 8;   // fragments of 8 rows of x; if TILE_M < 8, the fragment repeats its rows
constexpr u32 N_TILE = 32, FRAGMENTS_16 = N_TILE / 16;   // columns of W per N tile, which become the rows (M) of the MMAs; fragments per N tile
constexpr u32 N_TILES = 3;   // N tiles per CTA
constexpr u32 TILE_K = 256;   // elements of K per stage
constexpr u32 SLICE_K = 2;   // warps that share an N tile; each multiplies a slice of every stage's K
constexpr u32 CONSUMER_WARPS = N_TILES * SLICE_K;
constexpr u32 CLUSTER_K = 2;   // CTAs per cluster, which share a tile and split its K
constexpr u32 GROUP_SIZE = 64;   // elements of K that share a scale

// ---- Packed weights: an n64 row contains 64 columns of W as 64 x 64 blocks along K ----------------------------------
constexpr u32 K64_PER_STAGE = TILE_K / 64, K64_PER_WARP = K64_PER_STAGE / SLICE_K;
// Each 1 KB half of a 2 KB block contains 32 columns.
constexpr u32 K64_BLOCK_BYTES = 2048, HALF_BLOCK_BYTES = 1024;

// ---- Shared memory: byte offsets from a base that is 1024-byte aligned, with sizes in the comments -------------------
constexpr u32 ACTIVATIONS = 0;                // 24576 bytes
constexpr u32 WEIGHTS = 24576;                // 36864 bytes
constexpr u32 SCALES = 61440;                 // 3072 bytes
constexpr u32 ZEROS = 64512;                  // 1536 bytes
constexpr u32 SLICE_SUMS = 66048;             // 6144 bytes
constexpr u32 CLUSTER_SUMS = 72192;           // 4096 bytes
constexpr u32 CLUSTER_BARRIER = 76288;        // 8 bytes
constexpr u32 FULL_BARRIERS = 76296;          // 24 bytes

// ---- Slots: one per stage and operand -------------------------------------------------------------------------------
constexpr u32 STAGES = 3;
constexpr u32 ACTIVATION_STAGE_BYTES = 8192;
constexpr u32 ROW_BYTES = 128;   // bytes per row of an activation box (64 elements of K)
constexpr u32 WEIGHT_STAGE_BYTES = 12288;
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
    u32 m;                          // number of rows of the result
    u32 n;                          // number of columns of the result
    u32 tiles_n;                    // number of output tiles along N (a CTA or a cluster computes one tile)
    u32 k_iterations;               // number of stages per tile
    u32 output_vectors;             // 1 if every row of the result is aligned to 16 bytes
    u32 prefetch_stages;            // number of stages of weights that a dependent launch loads before it waits
    u64 output_pitch;               // stride between rows of the result, in elements
};

// ---- Tiles of CTAs and warps ----------------------------------------------------------------------------------------
// N tiles are numbered over the whole weight.
// Because N_TILES is odd, each CTA shares its first or its last n64 row with a neighbor.
struct CtaTile {
    u32 tile_m;
    u32 first_n_tile;
    u32 first_row;         // the n64 row that contains the first N tile
    u32 first_whole_row;   // the first n64 row that the CTA computes completely
    bool half_first;       // whether the CTA begins with the upper half of an n64 row
    u32 rank;              // the CTA's rank in its cluster
    u32 k_begin;           // the CTA's first stage
    u32 k_iterations;      // number of stages

    __device__ __forceinline__ explicit CtaTile(const Problem& problem) : tile_m(0) {
        u32 tile_n = blockIdx.x / CLUSTER_K;
        rank = blockIdx.x - tile_n * CLUSTER_K;
        k_begin = rank * problem.k_iterations / CLUSTER_K;
        k_iterations = (rank + 1) * problem.k_iterations / CLUSTER_K - k_begin;
        for (; tile_n >= problem.tiles_n; ++tile_m) tile_n -= problem.tiles_n;   // usually M has only one tile
        first_n_tile = tile_n * N_TILES;
        first_row = first_n_tile / 2;
        first_whole_row = (first_n_tile + 1) / 2;
        half_first = first_n_tile & 1;
    }

    // Return the stage of W and x that the CTA loads in iteration k.
    __device__ __forceinline__ u32 stage_at(u32 k) const { return k_begin + k; }

    // Return the N tile at a position in shared memory, where whole rows precede the half row.
    __device__ __forceinline__ u32 n_tile_at(u32 position) const {
        return first_n_tile + (half_first ? (position + 1) % N_TILES : position);
    }
};

struct WarpTile {
    u32 slice;      // the warp's slice of each stage's K
    u32 position;   // position of the warp's N tile in shared memory
    u32 n_tile;     // number of the N tile in the whole weight

    __device__ __forceinline__ WarpTile(const CtaTile& tile, u32 warp)
        : slice(warp / N_TILES), position(warp % N_TILES), n_tile(tile.n_tile_at(position)) {}
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

// ---- Producer: one thread -------------------------------------------------------------------------------------------
struct Maps {
    const TensorMap* weight_map;
    const TensorMap* half_weight_map;
    const TensorMap* scale_map;
    const TensorMap* zero_map;
    const TensorMap* activation_map;
};

// Make the slot's barrier expect the bytes of a stage, and load the operands that do not depend on previous kernels: weights, scales and
// zero points. TMA fills elements outside the tensors with zeros.
__device__ __forceinline__ void load_weights(const Ring& ring, u32 slot, u32 smem, const Maps& maps, const CtaTile& tile, u32 k,
                                             u64 policy) {
    const u32 stage = tile.stage_at(k), row_block = stage * 4, full = ring.get_barrier(slot);
    const u32 weights = smem + WEIGHTS + slot * WEIGHT_STAGE_BYTES;
    ring.expect_tx(slot, TRANSACTION_BYTES);
    cp_async_bulk_tensor_3d_load_hint(weights, maps.weight_map, full, 0, row_block, tile.first_whole_row, policy);
    constexpr u32 WHOLE_ROWS = N_TILES / 2;   // whole n64 rows, which precede the half row in a slot
    const u32 half_row = tile.half_first ? tile.first_row : tile.first_whole_row + WHOLE_ROWS;
    const u32 first_word = tile.half_first ? HALF_BLOCK_BYTES / 8 : 0;   // the map's elements have 8 bytes
    cp_async_bulk_tensor_3d_load_hint(weights + WHOLE_ROWS * K64_PER_STAGE * K64_BLOCK_BYTES, maps.half_weight_map, full,
                                      first_word, row_block, half_row, policy);
    const u32 group = stage * TILE_K / GROUP_SIZE;
    cp_async_bulk_tensor_2d_load(smem + SCALES + slot * SCALE_STAGE_BYTES, maps.scale_map, full, tile.first_row * 64, group);
    cp_async_bulk_tensor_2d_load(smem + ZEROS + slot * ZERO_SLOT_BYTES, maps.zero_map, full, tile.first_row * 64, group);
}

// Load activations as K64_PER_STAGE boxes of TILE_M rows and 64 elements of K with the 128-byte swizzle. TMA fills elements outside x with
// zeros.
__device__ __forceinline__ void load_activations(const Ring& ring, u32 slot, u32 smem, const Maps& maps, const CtaTile& tile,
                                                 u32 k) {
    const u32 target = smem + ACTIVATIONS + slot * ACTIVATION_STAGE_BYTES, stage = tile.stage_at(k);
#pragma unroll
    for (u32 i = 0; i < K64_PER_STAGE; ++i)
        cp_async_bulk_tensor_2d_load(target + i * TILE_M * ROW_BYTES, maps.activation_map, ring.get_barrier(slot),
                                     stage * TILE_K + i * 64, tile.tile_m * TILE_M);
}

// Initialize the barriers and load the first stages. The other warps may use the barriers after the next __syncthreads().
//
// Activations depend on the previous kernel, but weights do not. A dependent launch therefore loads the weights of prefetch_stages stages
// before it waits for the previous kernel. It does not load the weights of all stages, because the activations of the first stage would
// then arrive only after all of these weights.
__device__ __forceinline__ void fill_ring(const Ring& ring, u32 smem, const Maps& maps, const CtaTile& tile,
                                          const Problem& problem, u64 policy) {
    mbarrier_init(smem + CLUSTER_BARRIER, 1);
    ring.init_barriers(1, CONSUMER_WARPS);
    // This CTA owns every CLUSTER_K-th N tile, and receives the sums of all other CTAs for each of these tiles.
    constexpr u32 SENDERS = CLUSTER_K - 1;
    mbarrier_arrive_expect_tx(smem + CLUSTER_BARRIER, (N_TILES + SENDERS - tile.rank) / CLUSTER_K * SENDERS * N_TILE_SUM_BYTES);
    const u32 filled = min(STAGES, tile.k_iterations), prefetched = min(filled, problem.prefetch_stages);
#pragma unroll 1
    for (u32 k = 0; k < prefetched; ++k) load_weights(ring, k, smem, maps, tile, k, policy);
    griddepcontrol_launch_dependents();   // allows the next kernel to start and load its weights
    griddepcontrol_wait();                // the previous kernel may still be writing the activations
#pragma unroll 1
    for (u32 k = 0; k < filled; ++k) {
        if (k >= prefetched) load_weights(ring, k, smem, maps, tile, k, policy);
        load_activations(ring, k, smem, maps, tile, k);
    }
}

// Load each of the remaining stages after the consumers have released its slot.
__device__ __forceinline__ void refill_ring(Ring& ring, u32 smem, const Maps& maps, const CtaTile& tile, u64 policy) {
    ring.next_lap();   // fill_ring() loaded the first lap
#pragma unroll 1
    for (u32 k = STAGES; k < tile.k_iterations; ++k) {
        ring.acquire();
        load_weights(ring, ring.stage, smem, maps, tile, k, policy);
        load_activations(ring, ring.stage, smem, maps, tile, k);
        ring.advance();
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
        // A block of 64 elements of K has TILE_M rows of 128 bytes. The 128-byte swizzle moves chunk c of row r to c ^ (r % 8), where r
        // counts the rows of all blocks.
        const u32 swizzle_row = k64 * TILE_M + row;
        activations = keep_in_register(smem + ACTIVATIONS + swizzle_row * ROW_BYTES + ((chunk ^ swizzle_row % 8) << 4));
        const bool in_half_row = warp_tile.position == N_TILES - 1;
        const u32 half = in_half_row ? 0 : warp_tile.position % 2 * HALF_BLOCK_BYTES;
        k64_stride = in_half_row ? K64_BLOCK_BYTES / 2 : K64_BLOCK_BYTES;
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
        // If TILE_M is less than 8, block i begins in the middle of the swizzle's 8 rows. TILE_M is a power of two, so the number of the
        // block's first row and the number of the lane's row have no common bits, and XOR adds them in the address and in the swizzle.
        load_block_activations(b, (activations ^ (i * TILE_M % 8) << 4) + i * TILE_M * ROW_BYTES);
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

// Multiply the stages of a tile. The warp releases a slot during the next stage, after it has used all values of the slot. Otherwise ptxas
// could issue the arrival while an ld.shared is in flight.
__device__ __forceinline__ void consume(Accumulators& acc, ZeroPoints& zero_points, Ring& ring, const SlotAddresses& slots,
                                        u32 k_iterations, u32 lane) {
    u32 previous = 0;   // the slot of the previous stage
#pragma unroll 1
    for (u32 k = 0; k < k_iterations; ++k) {
        __syncwarp();
        if (k > 0 && lane == 0) ring.release_used(previous);
        ring.wait();
        multiply_stage(acc, zero_points, slots, ring.stage);
        previous = ring.stage;
        ring.advance();
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

// Add up the sums of the CTAs of a cluster. Each N tile has one owner. The other CTAs send their sums to the owner, which adds them to its
// own sums in the order of the ranks. Return whether this warp holds the result.
__device__ __forceinline__ bool reduce_cluster(OwnSums& own, u32 smem, const CtaTile& tile, const WarpTile& warp_tile, u32 lane) {
    const u32 owner = warp_tile.position % CLUSTER_K, received = warp_tile.position / CLUSTER_K * (CLUSTER_K - 1);
    const u32 first = fragment_offset(first_own_fragment(warp_tile), 0);
    const u32 sums = smem + CLUSTER_SUMS + received * N_TILE_SUM_BYTES + first + lane * 16;
    // Wait until the owner has initialized its barrier. The owner also waits, because compute-sanitizer's racecheck hangs if some of the
    // threads that arrived do not wait.
    barrier_cluster_wait();
    if (tile.rank != owner) {
        const u32 sender = tile.rank - (tile.rank > owner);   // index of this rank among the ranks other than the owner
        const u32 target = mapa_shared_cluster(sums + sender * N_TILE_SUM_BYTES, owner);
        const u32 barrier = mapa_shared_cluster(smem + CLUSTER_BARRIER, owner);
#pragma unroll
        for (u32 c = 0; c < OWN; ++c)
#pragma unroll
            for (u32 m = 0; m < FRAGMENTS_8; ++m) st_async_v4_f32(target + fragment_offset(c, m), own[c][m], barrier);
        return false;
    }
    mbarrier_wait_parity_acquire_cluster(smem + CLUSTER_BARRIER, 0);   // wait for the sums of all other CTAs
#pragma unroll
    for (u32 sender = 0; sender < CLUSTER_K - 1; ++sender)
#pragma unroll
        for (u32 c = 0; c < OWN; ++c)
#pragma unroll
            for (u32 m = 0; m < FRAGMENTS_8; ++m) add_fragment(own[c][m], sums + sender * N_TILE_SUM_BYTES + fragment_offset(c, m));
    return true;
}

// ---- Epilogue: n_begin is the first column of the owner of the sums -------------------------------------------------
// Add the bias.
__device__ __forceinline__ void add_bias(OwnSums& own, const Problem& problem, const u16* bias, u32 n_begin, u32 lane) {
#pragma unroll
    for (u32 c = 0; c < OWN; ++c)
#pragma unroll
        for (u32 r = 0; r < 2; ++r) {
            const u32 column = n_begin + 16 * c + 8 * r + (lane >> 2);
            const float added = column < problem.n ? low_to_float(bias[column]) : 0.0f;
#pragma unroll
            for (u32 m = 0; m < FRAGMENTS_8; ++m) {
                own[c][m][2 * r] += added;
                own[c][m][2 * r + 1] += added;
            }
        }
}

// Store two adjacent columns of a row of the output.
__device__ __forceinline__ void store_pair(const Problem& problem, u16* target, u32 column, u32 pair) {
    if (__builtin_expect(problem.output_vectors && column + 2 <= problem.n, 1)) {
        *(u32*)target = pair;
    } else {   // an unaligned row, or the last column
        if (column < problem.n) target[0] = (u16)pair;
        if (column + 1 < problem.n) target[1] = (u16)(pair >> 16);
    }
}

// Store the result. movmatrix transposes the fragments, so that each lane holds two adjacent columns of a row of the output.
__device__ __forceinline__ void store_result(const OwnSums& own, const Problem& problem, u16* output, u32 tile_m, u32 n_begin,
                                             u32 lane) {
    const u32 m_begin = tile_m * TILE_M, column = n_begin + 2 * (lane & 3);
    u16* const target = output + m_begin * problem.output_pitch + column;
#pragma unroll
    for (u32 m = 0; m < FRAGMENTS_8; ++m) {
        if (m > 0 && m_begin + 8 * m >= problem.m) return;   // uniform within the warp, so movmatrix below is executed by all lanes
        u32 pairs[OWN][2];
#pragma unroll
        for (u32 c = 0; c < OWN; ++c)
#pragma unroll
            for (u32 r = 0; r < 2; ++r)
                pairs[c][r] = movmatrix_trans(to_pair(own[c][m][2 * r], own[c][m][2 * r + 1]));
        const u32 row = 8 * m + (lane >> 2);
        if (row >= TILE_M || m_begin + row >= problem.m) continue;
#pragma unroll
        for (u32 c = 0; c < OWN; ++c)
#pragma unroll
            for (u32 r = 0; r < 2; ++r) {
                const u32 offset = 16 * c + 8 * r;
                store_pair(problem, target + row * problem.output_pitch + offset, column + offset, pairs[c][r]);
            }
    }
}
}  // namespace cudatma

// y = x W for small M, computed as y^T = W^T x^T, so that the N dimension becomes the rows (M) of the MMAs. A CTA computes N_TILES N tiles
// over all of K or, in a cluster, over its part of K. The last warp is the producer. It waits until the consumers have released a slot, and
// loads the next stage into that slot. The other warps are consumers. They wait until a slot is full, multiply, and release the slot.
extern "C" __global__ void __launch_bounds__(224, 1)
marlin_skinny_bf16_g64_zeros_16x96x256_k2_s3_c2(
    const __grid_constant__ cudatma::TensorMap weight_map,
    const __grid_constant__ cudatma::TensorMap half_weight_map,
    const __grid_constant__ cudatma::TensorMap scale_map,
    const __grid_constant__ cudatma::TensorMap zero_map,
    const __grid_constant__ cudatma::TensorMap activation_map,
    const cudatma::u16* bias,
    cudatma::u16* output,
    const __grid_constant__ cudatma::Problem problem) {
    using namespace cudatma;
    extern __shared__ __align__(1024) u8 dynamic_shared[];
    const u32 smem = shared_address(dynamic_shared);
    // The shuffle proves to ptxas that the value is uniform.
    const u32 warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const bool is_producer = warp == CONSUMER_WARPS;

    const CtaTile tile(problem);
    const Maps maps{&weight_map, &half_weight_map, &scale_map, &zero_map, &activation_map};
    const u64 policy = createpolicy_evict_first();   // L2 policy for the weights, which are read only once
    Ring ring;
    ring.attach(smem + FULL_BARRIERS);

    // elect_sync() proves to ptxas that only one thread runs this code. With the condition lane == 0, ptxas would generate a loop around
    // each copy.
    if (is_producer && elect_sync()) fill_ring(ring, smem, maps, tile, problem, policy);
    __syncwarp();
    barrier_cluster_arrive_relaxed();   // relaxed: fence_mbarrier_init() orders the initialization, and reduce_cluster() waits
    __syncthreads();   // consumers wait until the producer has initialized the barriers
    if (is_producer) {
        if (elect_sync()) refill_ring(ring, smem, maps, tile, policy);
        return;
    }

    const WarpTile warp_tile(tile, warp);
    const SlotAddresses slots(smem, tile, warp_tile, lane);
    Accumulators acc;
    clear(acc);
    ZeroPoints zero_points;
    consume(acc, zero_points, ring, slots, tile.k_iterations, lane);
    OwnSums own;
    if (!reduce_slices(own, acc, smem, warp_tile, lane)) return;
    if (!reduce_cluster(own, smem, tile, warp_tile, lane)) return;
    griddepcontrol_wait();   // the previous kernel may still be using the output
    const u32 n_begin = warp_tile.n_tile * N_TILE + 16 * first_own_fragment(warp_tile);
    if (__builtin_expect(bias != nullptr, 0)) add_bias(own, problem, bias, n_begin, lane);
    store_result(own, problem, output, tile.tile_m, n_begin, lane);
}
