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
// 8 warps consume, 1 produce; a CTA takes 96704 B.
// One stage holds
//     5120 B  activations 8 x 256 bfloat16, 128B swizzle
//    16384 B  weights 128 x 256 int4, packed layout 1
//     1024 B  scales 4 x 128 bfloat16
//      512 B  zero points 4 x 128 uint8

namespace cudatma {

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// [PTX ISA, Tensor-map] The 128 opaque bytes of cuTensorMapEncode*. A kernel takes them as `const __grid_constant__ TensorMap`.
struct alignas(64) TensorMap {
    u8 bytes[128];
};

// [PTX ISA, cvta] Return the 32-bit shared address of a generic pointer.
__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// [PTX ISA, Special Registers, %laneid] Return this thread's lane. ptxas rereads the special register instead of keeping the value in a
// register.
__device__ __forceinline__ u32 laneid() {
    u32 lane;
    asm("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
}

// [PTX ISA, elect.sync] Return true in exactly one lane of the warp. All 32 lanes must call it.
__device__ __forceinline__ bool elect_sync() {
    u32 elected;
    asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(elected));
    return elected != 0;
}

// [PTX ISA, bar] Wait at named barrier `id` until `threads` threads, in whole warps, have arrived. __syncthreads() uses barrier 0.
__device__ __forceinline__ void bar_sync(u32 id, u32 threads) {
    asm volatile("bar.sync %0, %1;" : : "r"(id), "r"(threads) : "memory");
}

// [PTX ISA, griddepcontrol] Wait until the previous kernels of the stream have completed and their writes are visible. Without programmatic
// dependent launch, it returns at once.
__device__ __forceinline__ void griddepcontrol_wait() {
    asm volatile("griddepcontrol.wait;" : : : "memory");
}

// [PTX ISA, griddepcontrol] Allow the next kernel to start once every CTA has called this function or exited.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
    asm volatile("griddepcontrol.launch_dependents;" : : : "memory");
}

// [PTX ISA, mbarrier.init] Initialize the barrier at shared address `bar` (8 bytes, 8-byte aligned) for `count` arrivals per phase. Before
// other threads may use it, this thread must call fence_mbarrier_init(), and the threads of the CTA or cluster must synchronize.
__device__ __forceinline__ void mbarrier_init(u32 bar, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" : : "r"(bar), "r"(count) : "memory");
}

// [PTX ISA, mbarrier.arrive] Arrive once with release semantics: waiting threads see this thread's earlier writes.
__device__ __forceinline__ void mbarrier_arrive(u32 bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" : : "r"(bar) : "memory");
}

// [PTX ISA, mbarrier.arrive] Make the current phase wait for `bytes` more bytes, and arrive once.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(u32 bar, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" : : "r"(bar), "r"(bytes) : "memory");
}

// [PTX ISA, mbarrier.try_wait] Return whether the phase with this parity has completed. If it has not, the thread may first be suspended
// for a time that the hardware chooses. On a new barrier, parity 1 counts as completed and parity 0 does not.
__device__ __forceinline__ bool mbarrier_try_wait_parity(u32 bar, u32 parity) {
    u32 done;
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done) : "r"(bar), "r"(parity) : "memory");
    return done != 0;
}

// [PTX ISA, mbarrier.try_wait] Wait until the phase with this parity has completed.
// Acquire semantics: this thread then sees the bytes that TMA delivered and the earlier writes of the threads that arrived.
__device__ __forceinline__ void mbarrier_wait_parity(u32 bar, u32 parity) {
    while (!mbarrier_try_wait_parity(bar, parity)) {
    }
}

// [PTX ISA, membar / fence] Make this thread's mbarrier.init visible to the async proxy and the cluster.
__device__ __forceinline__ void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" : : : "memory");
}

// [PTX ISA, cp.async.bulk.tensor] Load the box of `map` at element (c0, c1, ..), c0 innermost, to shared address `dst`. One thread calls
// it. `bar` counts the bytes of the whole box: TMA fills elements outside the tensor. `dst` must be 128-byte aligned (1024-byte aligned
// with the 128-byte swizzle).
__device__ __forceinline__ void cp_async_bulk_tensor_2d_load(u32 dst, const TensorMap* map, u32 bar, int c0, int c1) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%3, %4}], [%2];"
                 :: "r"(dst), "l"(map), "r"(bar), "r"(c0), "r"(c1) : "memory");
}

__device__ __forceinline__ void cp_async_bulk_tensor_3d_load(u32 dst, const TensorMap* map, u32 bar, int c0, int c1, int c2) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cta.global.tile.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%3, %4, %5}], [%2];"
                 :: "r"(dst), "l"(map), "r"(bar), "r"(c0), "r"(c1), "r"(c2) : "memory");
}

// Load with an L2 policy from createpolicy_*.
__device__ __forceinline__ void cp_async_bulk_tensor_3d_load_hint(
    u32 dst, const TensorMap* map, u32 bar, int c0, int c1, int c2, u64 policy) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cta.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"
                 " [%0], [%1, {%4, %5, %6}], [%2], %3;"
                 :: "r"(dst), "l"(map), "r"(bar), "l"(policy), "r"(c0), "r"(c1), "r"(c2) : "memory");
}

// [PTX ISA, createpolicy] Return the L2 policy evict_first.
__device__ __forceinline__ u64 createpolicy_evict_first() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// [PTX ISA, ld] Load 4 bytes of shared memory.
__device__ __forceinline__ u32 ld_shared_b32(u32 smem) {
    u32 value;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(value) : "r"(smem) : "memory");
    return value;
}

// [PTX ISA, ld] Load 8 bytes of shared memory.
__device__ __forceinline__ uint2 ld_shared_v2_b32(u32 smem) {
    uint2 values;
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(values.x), "=r"(values.y) : "r"(smem) : "memory");
    return values;
}

// [PTX ISA, ld] Load 16 bytes of shared memory.
__device__ __forceinline__ uint4 ld_shared_v4_b32(u32 smem) {
    uint4 values;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(values.x), "=r"(values.y), "=r"(values.z), "=r"(values.w) : "r"(smem) : "memory");
    return values;
}

// [PTX ISA, ld] Load 16 bytes of shared memory.
__device__ __forceinline__ void ld_shared_v4_f32(float (&values)[4], u32 smem) {
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(values[0]), "=f"(values[1]), "=f"(values[2]), "=f"(values[3]) : "r"(smem) : "memory");
}

// [PTX ISA, st] Store 16 bytes to shared memory.
__device__ __forceinline__ void st_shared_v4_f32(u32 smem, const float (&values)[4]) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};"
                 : : "r"(smem), "f"(values[0]), "f"(values[1]), "f"(values[2]), "f"(values[3]) : "memory");
}

// [PTX ISA, ldmatrix] Load 8 x 8 matrices of 16-bit elements into a warp's registers. Lanes 8 i to 8 i + 7 pass the 16-byte aligned shared
// addresses of the rows of matrix i. In r[i], lane l receives elements 2 (l % 4) and 2 (l % 4) + 1 of row l / 4. The _trans variants
// transpose each matrix.
__device__ __forceinline__ void ldmatrix_x2(u32 (&r)[2], u32 addr) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1]) : "r"(addr) : "memory");
}

__device__ __forceinline__ void ldmatrix_x4(u32 (&r)[4], u32 addr) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(addr) : "memory");
}

// [PTX ISA, movmatrix] Transpose one 8 x 8 matrix of 16-bit elements across the registers of a warp.
__device__ __forceinline__ u32 movmatrix_trans(u32 r) {
    u32 transposed;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(r));
    return transposed;
}

// [PTX ISA, mma.m16n8k16] Compute d += a b for a warp: a is 16 x 16, b is 16 x 8, both bf16; d is 16 x 8 in fp32. In d[0..1],
// lane l holds columns 2 (l % 4) and 2 (l % 4) + 1 of row l / 4; in d[2..3], the same columns of row l / 4 + 8.
__device__ __forceinline__ void mma_m16n8k16_bf16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
        " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// [PTX ISA, lop3] Return (a & mask) | bits.
__device__ __forceinline__ u32 lop3_and_or(u32 a, u32 mask, u32 bits) {
    u32 d;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(a), "r"(mask), "r"(bits));
    return d;
}

// A ring of Stages slots in shared memory. A producer fills the slots, and consumers read them. One pass over all slots is a lap.
//
// Each slot has two mbarriers. `full` completes a phase when the producer has arrived and its bytes have landed; consumers wait for it.
// `empty` completes a phase when the consumers have arrived; the producer waits for it before it refills the slot. Each thread keeps its
// position (`stage` and `phase`) in registers, starts at (0, 0), and advances once per slot:
//
//     producer   acquire()   expect_tx(bytes)   load(.., get_barrier(), ..)   advance()
//     consumer   wait()      read the slot      release()                     advance()
//
// The expected number of bytes must equal the number of loaded bytes. If it is larger, wait() never returns; if it is smaller, wait() may
// return before the data has landed. A consumer that wrote to the slot with ordinary stores must call fence_proxy_async_shared_cta() before
// it releases the slot. Methods with a slot parameter act on that slot in the current lap and do not change `stage`.
template <u32 Stages>
struct TmaPipeline {
    u32 base;    // shared address of full[Stages], then empty[Stages]; 8 bytes each
    u32 stage;   // this thread's current slot
    u32 phase;   // parity of the current lap

    // Attach to the ring, initialize its barriers, and call __syncthreads(). All threads of the CTA must call it. In a cluster, a cluster
    // barrier must follow before a CTA uses the barriers of another one.
    __device__ __forceinline__ void init(u32 base_address, u32 producer_arrivals, u32 consumer_arrivals) {
        attach(base_address);
        if (threadIdx.x == 0 && threadIdx.y == 0 && threadIdx.z == 0) init_barriers(producer_arrivals, consumer_arrivals);
        __syncthreads();
    }

    // Start at slot 0 of the ring at base_address, which must be 8-byte aligned. This does not touch the barriers.
    __device__ __forceinline__ void attach(u32 base_address) {
        base = base_address;
        stage = 0;
        phase = 0;
    }

    // Initialize the barriers. One thread calls it after attach() and may use the ring at once; other threads may use the ring after the
    // CTA or the cluster has synchronized. producer_arrivals: number of calls of expect_tx() or arrive() that fill a slot.
    // consumer_arrivals: number of calls of release*(), in all CTAs of the cluster, that free a slot.
    __device__ __forceinline__ void init_barriers(u32 producer_arrivals, u32 consumer_arrivals) const {
        for (u32 slot = 0; slot < Stages; ++slot) {
            mbarrier_init(get_barrier(slot), producer_arrivals);
            mbarrier_init(empty_barrier(slot), consumer_arrivals);
        }
        fence_mbarrier_init();
    }

    // Return the barrier that counts the bytes of a slot's loads.
    __device__ __forceinline__ u32 get_barrier(u32 slot) const { return base + 8 * slot; }
    __device__ __forceinline__ u32 get_barrier() const { return get_barrier(stage); }

    // Return the barrier on which the consumers of a slot arrive.
    __device__ __forceinline__ u32 empty_barrier(u32 slot) const { return base + 8 * (Stages + slot); }
    __device__ __forceinline__ u32 empty_barrier() const { return empty_barrier(stage); }

    // Producer: wait until the consumers have released the slot. In the first lap, it returns at once, because the phase with parity 1 of a
    // new barrier counts as completed.
    __device__ __forceinline__ void acquire(u32 slot) const { mbarrier_wait_parity(empty_barrier(slot), phase ^ 1); }
    __device__ __forceinline__ void acquire() const { acquire(stage); }

    // Producer: arrive once and expect `bytes` bytes. Call it before the loads.
    __device__ __forceinline__ void expect_tx(u32 slot, u32 bytes) const { mbarrier_arrive_expect_tx(get_barrier(slot), bytes); }
    __device__ __forceinline__ void expect_tx(u32 bytes) const { expect_tx(stage, bytes); }

    // Consumer: wait until the slot is full.
    __device__ __forceinline__ void wait(u32 slot) const { mbarrier_wait_parity(get_barrier(slot), phase); }
    __device__ __forceinline__ void wait() const { wait(stage); }

    // Consumer: arrive once without a fence. Previous instructions must have used all values of the slot, so that no read is in flight. A
    // consumer therefore releases a slot one iteration after it has read the slot.
    __device__ __forceinline__ void release_used(u32 slot) const { mbarrier_arrive(empty_barrier(slot)); }

    // Go to the next slot, and toggle the parity when the ring wraps.
    __device__ __forceinline__ void advance() {
        if (++stage == Stages) {
            stage = 0;
            next_lap();
        }
    }

    // Toggle the parity. Callers that count the slots themselves call it once per lap.
    __device__ __forceinline__ void next_lap() { phase ^= 1; }
};

// A divisor that the host has prepared for numbers below 2^31. divide() takes one multiplication; an integer division takes about 25
// instructions.
struct Divisor {
    u32 multiplier, shift;   // multiplier = ceil(2^(31 + shift) / divisor), 2^shift >= divisor
};

__device__ __forceinline__ u32 divide(u32 n, const Divisor& by) { return __umulhi(2 * n, by.multiplier) >> by.shift; }

// ---- Conversions: fp32 and pairs of 16-bit values in a register -----------------------------------------------------
__device__ __forceinline__ float low_to_float(u32 pair) {
    return __uint_as_float(pair << 16);
}

__device__ __forceinline__ float high_to_float(u32 pair) {
    return __uint_as_float(pair & 0xffff0000u);
}

__device__ __forceinline__ u32 to_pair(float low, float high) {
    u32 d;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
}

// ---- Arithmetic on pairs of 16-bit values in a register -------------------------------------------------------------
__device__ __forceinline__ u32 subtract(u32 a, u32 b) {
    u32 d;
    asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}

// Return word i of the 16 bytes that a thread holds of a packed 64 x 64 block: the thread's weights in rows 16 i to 16 i + 15.
__device__ __forceinline__ u32 word(const uint4& words, u32 i) {
    return i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w;
}

// Add a thread's four values of a fragment from shared memory.
__device__ __forceinline__ void add_fragment(float (&sums)[4], u32 smem) {
    float other[4];
    ld_shared_v4_f32(other, smem);
#pragma unroll
    for (u32 i = 0; i < 4; ++i) sums[i] += other[i];
}

}  // namespace cudatma

namespace cudatma {

// ---- The tile of a CTA ----------------------------------------------------------------------------------------------
constexpr u32 TILE_M = 8;   // rows of x per CTA: columns of the mma
constexpr u32 FRAGMENTS_8 = TILE_M < 8 ? 1 : TILE_M / 8;   // fragments of 8 rows of x; if there are fewer rows, a fragment repeats them
constexpr u32 N_TILE = 32, FRAGMENTS_16 = N_TILE / 16;   // columns of W per N tile (rows of the mma); fragments per N tile
constexpr u32 N_TILES = 4;   // N tiles per CTA
constexpr u32 TILE_K = 256;   // elements of K per stage
constexpr u32 SLICE_K = 2;   // number of warps that share an N tile; each multiplies a slice of every stage's K
constexpr u32 CONSUMER_WARPS = N_TILES * SLICE_K;
constexpr u32 GROUP_SIZE = 64;   // elements of K that share a scale

// ---- Packed weights: rows of 64 x 64 blocks, each row 64 columns of W (an n64) along K ------------------------------
constexpr u32 K64_PER_STAGE = TILE_K / 64, K64_PER_WARP = K64_PER_STAGE / SLICE_K;
constexpr u32 K64_BLOCK_BYTES = 2048, HALF_BLOCK_BYTES = K64_BLOCK_BYTES / 2;   // the first half holds columns 0 to 31, the second half columns 32 to 63

// ---- Shared memory: offsets in bytes from a base that is aligned to 1024 --------------------------------------------
constexpr u32 ACTIVATIONS = 0;                // 20480 B
constexpr u32 WEIGHTS = 20480;                // 65536 B
constexpr u32 SCALES = 86016;                 // 4096 B
constexpr u32 ZEROS = 90112;                  // 2048 B
constexpr u32 SLICE_SUMS = 92160;             // 4096 B
constexpr u32 TILES = 96256;                  // 384 B
constexpr u32 FULL_BARRIERS = 96640;          // 32 B

// ---- Slots: one per stage and operand -------------------------------------------------------------------------------
constexpr u32 STAGES = 4;
constexpr u32 ACTIVATION_STAGE_BYTES = 5120;
constexpr u32 LINE_BYTES = 128;   // bytes of 64 elements of K of a row
// Bytes from one row of activations to the next. This is an odd number of lines, so that eight rows differ in the bits that the 128-byte
// swizzle reads, and ldmatrix has no bank conflicts.
constexpr u32 ROW_BYTES = 640;
constexpr u32 WEIGHT_STAGE_BYTES = 16384;
constexpr u32 SCALE_STAGE_BYTES = 1024;
constexpr u32 SCALE_ROW = 128;   // number of scales per group in a slot, for whole n64 rows
constexpr u32 ZERO_SLOT_BYTES = 512;
constexpr u32 TRANSACTION_BYTES = 22016;   // bytes that the loads of a stage deliver
constexpr u32 FRAGMENT_BYTES = 32 * 16;   // bytes per fragment of fp32 sums: 16 columns of W x 8 rows of x
constexpr u32 N_TILE_SUM_BYTES = FRAGMENTS_16 * FRAGMENTS_8 * FRAGMENT_BYTES;
typedef TmaPipeline<STAGES> Ring;

// Named barriers. __syncthreads() uses 0.
enum NamedBarrier : u32 {
    SLICE_BARRIER = 1,   // for all consumer warps
};

// The launch parameters that are neither tensor maps nor pointers.
struct Problem {
    u32 n;                          // columns of the result
    u32 tiles_n;                    // output tiles along N; a CTA or cluster computes one tile
    u32 k_iterations;               // stages per tile
    u32 pairs;                      // pairs of a token and one of its experts
    u32 expert_n_tiles;             // N tiles of each expert in the weight, padded
    Divisor by_tiles_n;             // divides by tiles_n
    Divisor by_top_k;               // divides by top_k
    u64 result_at;                  // offset of this kernel's results in the shared memory of the launches, in bytes
    u64 blocks_at;                  // offset of the number of blocks, and 16 bytes later of the blocks
    u64 pairs_at;                   // offset of the sorted pairs
};

// ---- Routing --------------------------------------------------------------------------------------------------------
// A pair is a token and one of its experts: pair p is choice p % top_k of token p / top_k. The routing kernel sorts the pairs by expert and
// divides the pairs of each expert into blocks of at most 8 rows.
struct Block {
    u32 expert;   // index of the expert's weights on this GPU
    u32 first;    // index of the block's first pair in the sorted pairs
    u32 rows;     // number of pairs
    u32 unused;
};

// The arrays of the routing kernel, in the memory that all launches of a call share.
struct Routing {
    u32* block_count;
    Block* blocks;
    u32* pairs;   // pairs sorted by expert

    __device__ __forceinline__ Routing(u8* space, const Problem& problem)
        : block_count((u32*)(space + problem.blocks_at)), blocks((Block*)(space + problem.blocks_at) + 1),
          pairs((u32*)(space + problem.pairs_at)) {}
};

// ---- Which part of the result a CTA and a warp compute --------------------------------------------------------------
// A tile is a block of rows of one expert, and N_TILES N tiles of the expert's columns. The weights of all experts are one weight whose
// columns are the experts' columns, one expert after another, each padded to whole n64 rows.
struct CtaTile {
    static constexpr u32 first_row = 0;   // a warp's scales have the same place in the slots of every tile

    u32 first_n_tile;   // in the weight of all experts
    u32 n_begin;        // the first column in the expert's weight
    u32 rows;           // number of rows of the block
};

// A tile, and the pairs of its rows. Rows that the block does not have get the number of pairs. The producer loads them ahead of time, because
// a tile may take less time than the two dependent loads from global memory.
struct GatheredTile {
    CtaTile tile;
    u32 first;   // index of the block's first pair in the sorted pairs
    u32 pairs[TILE_M];

    // Load the block of a tile.
    __device__ __forceinline__ void load_block(const Problem& problem, const Routing& routing, u32 index, u32 tiles) {
        if (index >= tiles) return;
        const u32 block_index = divide(index, problem.by_tiles_n), tile_n = index - block_index * problem.tiles_n;
        const uint4 block = __ldcg((const uint4*)(routing.blocks + block_index));
        tile = CtaTile{block.x * problem.expert_n_tiles + tile_n * N_TILES, tile_n * N_TILES * N_TILE, block.z};
        first = block.y;
    }

    // Load the pairs of the block.
    __device__ __forceinline__ void load_pairs(const Problem& problem, const Routing& routing, u32 index, u32 tiles) {
        if (index >= tiles) return;
#pragma unroll
        for (u32 r = 0; r < TILE_M; ++r) pairs[r] = r < tile.rows ? __ldcg(routing.pairs + first + r) : problem.pairs;
    }
};

// The tile of each slot that holds a tile's first stage, as the producer passes it to the consumers.
constexpr u32 TILE_BYTES = 48;   // bytes per slot: a CtaTile, and from offset 16 on the pairs of the rows

struct WarpTile {
    u32 slice;        // the warp's slice of each stage's K
    u32 position;     // position of the warp's N tile in shared memory
    u32 n_tile;       // number of the N tile in the weight of all experts; the position before the first tile

    __device__ __forceinline__ explicit WarpTile(u32 warp) : slice(warp / N_TILES), position(warp % N_TILES), n_tile(position) {}
};

// ---- int4 -> bfloat16: one LOP3 puts two nibbles into the mantissas of a magic number ----------------------
// 128 plus the zero points of columns g (low) and g + 8 (high), each in both halves. dequantize() subtracts it from 128 + v.
struct ZeroPoint {
    u32 low, high;
};

// Return the ZeroPoint of the zero points of columns g and g + 8.
__device__ __forceinline__ ZeroPoint zero_point(u32 low, u32 high) {
    return ZeroPoint{0x43004300u | low | low << 16, 0x43004300u | high | high << 16};
}

// Dequantize the 8 nibbles of a word. 0x4300 is 128.0 in bf16, and its last mantissa bit has the value 1: 0x4300 | v is exactly 128 + v.
__device__ __forceinline__ void dequantize(u32 (&a)[4], u32 q, const ZeroPoint& zero) {
    a[0] = subtract(lop3_and_or(q, 0x000f000fu, 0x43004300u), zero.low);
    a[1] = subtract(lop3_and_or(q >> 4, 0x000f000fu, 0x43004300u), zero.high);
    a[2] = subtract(lop3_and_or(q >> 8, 0x000f000fu, 0x43004300u), zero.low);
    a[3] = subtract(lop3_and_or(q >> 12, 0x000f000fu, 0x43004300u), zero.high);
}

// ---- Producer: one thread -------------------------------------------------------------------------------------------
struct Maps {
    const TensorMap* weight_map;
    const TensorMap* scale_map;
    const TensorMap* zero_map;
    const TensorMap* activation_map;
};

// Expect the bytes of a stage, and load weights, scales and zero points.
__device__ __forceinline__ void load_weights(const Ring& ring, u32 smem, const Maps& maps, const CtaTile& tile, u32 stage, u64 policy) {
    const u32 slot = ring.stage, full = ring.get_barrier(), row = tile.first_n_tile / 2;
    ring.expect_tx(TRANSACTION_BYTES);
    cp_async_bulk_tensor_3d_load_hint(smem + WEIGHTS + slot * WEIGHT_STAGE_BYTES, maps.weight_map, full, 0, stage * K64_PER_STAGE, row,
                                      policy);
    const u32 group = stage * TILE_K / GROUP_SIZE;
    cp_async_bulk_tensor_2d_load(smem + SCALES + slot * SCALE_STAGE_BYTES, maps.scale_map, full, row * 64, group);
    cp_async_bulk_tensor_2d_load(smem + ZEROS + slot * ZERO_SLOT_BYTES, maps.zero_map, full, row * 64, group);
}

// Return the row of the source that a pair multiplies. If the block does not have the row, this is an index after the last row.
__device__ __forceinline__ u32 source_row(const Problem& problem, u32 pair) {
    return divide(pair, problem.by_top_k);   // the source has one row per token
}

// Load the rows of a block one by one. TMA fills elements outside the source with zeros, and so do rows that the block does not have.
__device__ __forceinline__ void load_rows(const Ring& ring, u32 smem, const Maps& maps, const u32 (&rows)[TILE_M], u32 stage) {
    const u32 slot = smem + ACTIVATIONS + ring.stage * ACTIVATION_STAGE_BYTES, full = ring.get_barrier();
#pragma unroll
    for (u32 r = 0; r < TILE_M; ++r) {
        cp_async_bulk_tensor_3d_load(slot + r * ROW_BYTES, maps.activation_map, full, 0, stage * K64_PER_STAGE, rows[r]);
    }
}

// Pass a tile to the consumers, who read it when they have waited for the slot of its first stage.
__device__ __forceinline__ void pass_tile(const Ring& ring, u8* shared, const GatheredTile& gathered) {
    u32* const record = (u32*)(shared + TILES + ring.stage * TILE_BYTES);
    record[0] = gathered.tile.first_n_tile;
    record[1] = gathered.tile.n_begin;
    record[2] = gathered.tile.rows;
#pragma unroll
    for (u32 r = 0; r < TILE_M; ++r) record[4 + r] = gathered.pairs[r];
}

// Fill the slots for every tile of this CTA.
__device__ __forceinline__ void produce(Ring& ring, u8* shared, u32 smem, const Maps& maps, const Problem& problem, const Routing& routing,
                                        u32 tiles) {
    const u64 policy = createpolicy_evict_first();   // L2 policy of the weights, because most of them are read only once
    const u32 step = gridDim.x;
    GatheredTile current, next, after_next;
    current.load_block(problem, routing, blockIdx.x, tiles);
    next.load_block(problem, routing, blockIdx.x + step, tiles);
    current.load_pairs(problem, routing, blockIdx.x, tiles);
#pragma unroll 1
    for (u32 index = blockIdx.x; index < tiles; index += step) {
        next.load_pairs(problem, routing, index + step, tiles);
        after_next.load_block(problem, routing, index + 2 * step, tiles);
        u32 rows[TILE_M];
#pragma unroll
        for (u32 r = 0; r < TILE_M; ++r) rows[r] = source_row(problem, current.pairs[r]);
#pragma unroll 1
        for (u32 k = 0; k < problem.k_iterations; ++k) {
            ring.acquire();
            if (k == 0) pass_tile(ring, shared, current);
            load_weights(ring, smem, maps, current.tile, k, policy);
            load_rows(ring, smem, maps, rows, k);
            ring.advance();
        }
        current = next;
        next.tile = after_next.tile;
        next.first = after_next.first;
    }
}

// ---- Consumers: a warp multiplies its N tile, and its slice of each stage's K ---------------------------------------

// A warp's accumulators: fragments of 16 x 8 values. Each lane holds four values of a fragment.
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

// Return the index of this thread's scales and zero points in an n64 row, which equals packed_column() of the N tile. The expression is
// repeated because a call makes ptxas order the additions differently.
__device__ __forceinline__ u32 place_in_row(u32 n_tile, u32 lane) { return 8 * (lane >> 2) + 4 * (n_tile & 1); }

// The addresses from which this thread reads slot 0. Each following slot is one stage further.
struct SlotAddresses {
    u32 activations;
    u32 weights;
    u32 scales;
    u32 zeros;
    u32 k64_stride;   // bytes from one 64-deep block of the N tile to the next

    __device__ __forceinline__ SlotAddresses(u32 smem, const CtaTile& tile, const WarpTile& warp_tile, u32 lane) {
        const u32 k64 = warp_tile.slice * K64_PER_WARP;
        u32 row, chunk;   // row of x and 16-byte chunk whose address the lane passes to ldmatrix
        if constexpr (FRAGMENTS_8 == 1) {
            // One ldmatrix.x4 loads 32 elements of K of 8 rows: chunks 0 to 3 of each row.
            row = (lane & 7) % TILE_M;
            chunk = lane >> 3;
        } else {
            // One ldmatrix.x4 loads 16 elements of K of 16 rows: chunks 0 and 1 of rows 0 to 7, then of rows 8 to 15.
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

// Operand B of one 16-deep step: the activations of all rows of the tile.
typedef u32 ActivationFragments[FRAGMENTS_8][2];

// Load the activations of a step. In the swizzle, the chunks of a step differ from those of step 0 in bits 5 and 6 of the address.
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

// Load the activations of the four steps of a 64-deep block.
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

// Set the zero points of a thread. four: four bytes for columns g and g + 8 of the first fragment, then of the second fragment.
__device__ __forceinline__ void set_zero_points(ZeroPoints& zero_points, u32 four) {
    zero_points[0] = zero_point(four & 0xff, four >> 8 & 0xff);
    zero_points[1] = zero_point(four >> 16 & 0xff, four >> 24);
}

// Load a thread's zero points of a group.
__device__ __forceinline__ void load_zero_points(ZeroPoints& zero_points, u32 smem) {
    set_zero_points(zero_points, ld_shared_b32(smem));
}

// Multiply the sums by the scales of their columns, add them to the accumulators, and clear the sums. pairs: the scales of columns g (low
// half) and g + 8 (high half) of each fragment.
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
    Accumulators sums;   // sums of the current group, before scaling
    clear(sums);
#pragma unroll
    for (u32 i = 0; i < K64_PER_WARP; ++i) {
        uint4 packed[FRAGMENTS_16];   // one word per 16-deep step
#pragma unroll
        for (u32 c = 0; c < FRAGMENTS_16; ++c) packed[c] = ld_shared_v4_b32(weights + i * slots.k64_stride + c * 512);
        ActivationFragments b[4];   // one per step
        const u32 line = activations + i * LINE_BYTES;
        load_block_activations(b, line ^ (line >> 3 & 0x70));   // the 128-byte swizzle
#pragma unroll
        for (u32 k16 = 0; k16 < 4; ++k16) {
            const u32 done = i * 64 + k16 * 16;   // number of elements of K multiplied so far in this warp's slice
            if (done % GROUP_SIZE == 0)
                load_zero_points(zero_points, slots.zeros + slot * ZERO_SLOT_BYTES + done / GROUP_SIZE * SCALE_ROW);
#pragma unroll
            for (u32 c = 0; c < FRAGMENTS_16; ++c) {
                u32 a[4];
                dequantize(a, word(packed[c], k16), zero_points[c]);
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
// OWNERS of the warps that share an N tile own OWN fragments each. An owner adds up the sums of its fragments and stores the result.
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
        const u32 owner = c / OWN, sender = slice - (slice > owner);   // the index of the slice if the owner is not counted
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
    bar_sync(SLICE_BARRIER, 32 * CONSUMER_WARPS);   // all consumer warps have stored their sums
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

// ---- Epilogue: an owner's sums to the gated activation --------------------------------------------------------------
// The weights of gate and up alternate every 8 columns. A thread therefore holds the gate of a column (columns g of a fragment) and its up
// (columns g + 8).

__device__ __forceinline__ float activate(float gate, float up) { return __fdividef(gate, 1.0f + __expf(-gate)) * up; }   // SiLU

// Store the activations. movmatrix transposes the fragments, so that each lane has two adjacent columns of a row. n_begin: the owner's first
// column. pair: the pair of row `lane` of the block.
__device__ __forceinline__ void store_results(const OwnSums& own, const Problem& problem, u16* results, const CtaTile& tile, u32 n_begin,
                                              u32 pair, u32 lane) {
#pragma unroll
    for (u32 m = 0; m < FRAGMENTS_8; ++m) {
        if (m > 0 && 8 * m >= tile.rows) return;   // uniform within the warp
        const u32 row = 8 * m + (lane >> 2), row_pair = __shfl_sync(0xffffffffu, pair, row);
#pragma unroll
        for (u32 c = 0; c < OWN; ++c) {
            const float(&sums)[4] = own[c][m];
            const u32 two = movmatrix_trans(to_pair(activate(sums[0], sums[2]), activate(sums[1], sums[3])));
            const u32 column = (n_begin + 16 * c) / 2 + 2 * (lane & 3);
            if (row < tile.rows && column < problem.n) *(u32*)(results + (u64)row_pair * problem.n + column) = two;
        }
    }
}

// Wait for a tile's first stage, and read the tile that the producer has passed. Set `pair` to the pair of row `lane`. The shuffles use the
// values, so that no load is in flight when the slot is released.
__device__ __forceinline__ CtaTile receive_tile(const Ring& ring, const u8* shared, u32& pair, u32 lane) {
    ring.wait();
    const u32* const record = (const u32*)(shared + TILES + ring.stage * TILE_BYTES);
    const u32 field = lane < 3 ? record[lane] : 0;
    pair = __shfl_sync(0xffffffffu, lane < TILE_M ? record[4 + lane] : 0, lane);
    return CtaTile{__shfl_sync(0xffffffffu, field, 0), __shfl_sync(0xffffffffu, field, 1), __shfl_sync(0xffffffffu, field, 2)};
}

// Multiply the stages of a tile. A slot is released during the next stage, when all values read from the slot have been used. Otherwise
// ptxas may issue the arrival while an ld.shared is in flight. previous: the slot of the previous stage, or STAGES if there is none.
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

// The first of two grouped GEMMs: the results of a pair are activation(x W1), where x is the row of the pair's token.
// Computed as W^T x^T: columns of W are rows of the mma. A CTA computes several tiles, each a block of rows of one expert and N_TILES N tiles
// over all of K. The last warp is the producer: it waits until the consumers have released a slot, and loads the next stage into that slot,
// across the boundaries of tiles. The other warps are consumers: they wait until a slot is full, multiply, and release the slot.
extern "C" __global__ void __launch_bounds__(288, 1)
experts_skinny_up_bf16_g64_zeros_8x128x256_k2_s4_d(
    const __grid_constant__ cudatma::TensorMap weight_map,
    const __grid_constant__ cudatma::TensorMap scale_map,
    const __grid_constant__ cudatma::TensorMap zero_map,
    const __grid_constant__ cudatma::TensorMap activation_map,
    cudatma::u8* space,
    const __grid_constant__ cudatma::Problem problem) {
    using namespace cudatma;
    extern __shared__ __align__(1024) u8 dynamic_shared[];
    const u32 smem = shared_address(dynamic_shared);
    // The shuffle lets ptxas know that the value is uniform within a warp.
    const u32 warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const Routing routing(space, problem);
    Ring ring;
    ring.init(smem + FULL_BARRIERS, 1, CONSUMER_WARPS);
    griddepcontrol_wait();   // the previous kernel has written the rows, and the routing kernel has written the blocks
    griddepcontrol_launch_dependents();
    const u32 tiles = __ldcg(routing.block_count) * problem.tiles_n;

    if (warp == CONSUMER_WARPS) {
        // elect_sync() lets ptxas know that only one thread runs this code; with lane == 0, ptxas would put a loop around each copy.
        if (elect_sync()) produce(ring, dynamic_shared, smem, Maps{&weight_map, &scale_map, &zero_map, &activation_map}, problem, routing, tiles);
        return;
    }
    WarpTile warp_tile(warp);
    const SlotAddresses slots(smem, CtaTile{}, warp_tile, lane);
    ZeroPoints zero_points;
    u32 previous = STAGES;
#pragma unroll 1
    for (u32 index = blockIdx.x; index < tiles; index += gridDim.x) {
        u32 pair;
        const CtaTile tile = receive_tile(ring, dynamic_shared, pair, lane);
        Accumulators acc;
        clear(acc);
        consume(acc, zero_points, ring, slots, previous, problem.k_iterations, lane);
        bar_sync(SLICE_BARRIER, 32 * CONSUMER_WARPS);   // the owners have read the sums of the previous tile
        OwnSums own;
        if (!reduce_slices(own, acc, smem, warp_tile, lane)) continue;
        const u32 own_begin = 16 * first_own_fragment(warp_tile);
        const u32 n_begin = tile.n_begin + warp_tile.position * N_TILE + own_begin;   // the owner's first column
        store_results(own, problem, (u16*)(space + problem.result_at), tile, n_begin, pair, lane);
    }
}
