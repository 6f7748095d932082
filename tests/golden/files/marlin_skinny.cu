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
// 6 warps consume, 1 produce; a CTA takes 76344 B.
// One stage holds
//     8192 B  activations 16 x 256 bfloat16, 128B swizzle
//    12288 B  weights 96 x 256 int4, packed layout 1
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

// [PTX ISA, mapa] Return the shared::cluster address of shared address `addr` in the CTA of rank `rank`.
__device__ __forceinline__ u32 mapa_shared_cluster(u32 addr, u32 rank) {
    u32 remote;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(addr), "r"(rank));
    return remote;
}

// [PTX ISA, barrier.cluster] Arrive on the cluster barrier without ordering memory accesses.
__device__ __forceinline__ void barrier_cluster_arrive_relaxed() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" : : : "memory");
}

// [PTX ISA, st.async] Store four values to `addr` in a CTA of the cluster. The barrier `bar` in that CTA counts the 16 bytes when they
// arrive. Both addresses must come from mapa_shared_cluster with the same rank, or be addresses in this CTA. In a launch without clusters
// this is an illegal instruction [H200]; __cluster_dims__(1, 1, 1) is enough.
__device__ __forceinline__ void st_async_v4_f32(u32 addr, const float (&value)[4], u32 bar) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];"
                 :: "r"(addr), "f"(value[0]), "f"(value[1]), "f"(value[2]), "f"(value[3]), "r"(bar) : "memory");
}

// [PTX ISA, mbarrier.try_wait] Wait until the phase with this parity has completed, with acquire semantics at cluster scope: this thread
// then sees the values that other CTAs sent with st.async.
__device__ __forceinline__ void mbarrier_wait_parity_acquire_cluster(u32 bar, u32 parity) {
    u32 done;
    do {
        asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                     : "=r"(done) : "r"(bar), "r"(parity) : "memory");
    } while (!done);
}

// [PTX ISA, barrier.cluster] Wait with acquire semantics until all threads of the cluster have arrived.
__device__ __forceinline__ void barrier_cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" : : : "memory");
}

// [PTX ISA, cp.async.bulk.tensor] Load the box of `map` at element (c0, c1, ..), c0 innermost, to shared address `dst`. One thread calls
// it. `bar` counts the bytes of the whole box: TMA fills elements outside the tensor. `dst` must be 128-byte aligned (1024-byte aligned
// with the 128-byte swizzle).
__device__ __forceinline__ void cp_async_bulk_tensor_2d_load(u32 dst, const TensorMap* map, u32 bar, int c0, int c1) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%3, %4}], [%2];"
                 :: "r"(dst), "l"(map), "r"(bar), "r"(c0), "r"(c1) : "memory");
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
constexpr u32 TILE_M = 16;   // rows of x per CTA: columns of the mma
constexpr u32 FRAGMENTS_8 = TILE_M < 8 ? 1 : TILE_M / 8;   // fragments of 8 rows of x; if there are fewer rows, a fragment repeats them
constexpr u32 N_TILE = 32, FRAGMENTS_16 = N_TILE / 16;   // columns of W per N tile (rows of the mma); fragments per N tile
constexpr u32 N_TILES = 3;   // N tiles per CTA
constexpr u32 TILE_K = 256;   // elements of K per stage
constexpr u32 SLICE_K = 2;   // number of warps that share an N tile; each multiplies a slice of every stage's K
constexpr u32 CONSUMER_WARPS = N_TILES * SLICE_K;
constexpr u32 CLUSTER_K = 2;   // CTAs per cluster; they share a tile and divide its K
constexpr u32 GROUP_SIZE = 64;   // elements of K that share a scale

// ---- Packed weights: rows of 64 x 64 blocks, each row 64 columns of W (an n64) along K ------------------------------
constexpr u32 K64_PER_STAGE = TILE_K / 64, K64_PER_WARP = K64_PER_STAGE / SLICE_K;
constexpr u32 K64_BLOCK_BYTES = 2048, HALF_BLOCK_BYTES = K64_BLOCK_BYTES / 2;   // the first half holds columns 0 to 31, the second half columns 32 to 63

// ---- Shared memory: offsets in bytes from a base that is aligned to 1024 --------------------------------------------
constexpr u32 ACTIVATIONS = 0;                // 24576 B
constexpr u32 WEIGHTS = 24576;                // 36864 B
constexpr u32 SCALES = 61440;                 // 3072 B
constexpr u32 ZEROS = 64512;                  // 1536 B
constexpr u32 SLICE_SUMS = 66048;             // 6144 B
constexpr u32 CLUSTER_SUMS = 72192;           // 4096 B
constexpr u32 CLUSTER_BARRIER = 76288;        // 8 B
constexpr u32 FULL_BARRIERS = 76296;          // 24 B

// ---- Slots: one per stage and operand -------------------------------------------------------------------------------
constexpr u32 STAGES = 3;
constexpr u32 ACTIVATION_STAGE_BYTES = 8192;
constexpr u32 ROW_BYTES = 128;   // bytes per row of a box of activations: 64 elements of K
constexpr u32 WEIGHT_STAGE_BYTES = 12288;
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
    u32 m;                          // rows of the result
    u32 n;                          // columns of the result
    u32 tiles_n;                    // output tiles along N; a CTA or cluster computes one tile
    u32 k_iterations;               // stages per tile
    u32 output_vectors;             // 1: every row of the result is aligned to 16 bytes
    u32 prefetch_stages;            // stages whose weights a dependent launch loads before it waits
    u64 output_pitch;               // elements from one row to the next
};

// ---- Which part of the output a CTA and a warp compute --------------------------------------------------------------
// N tiles are numbered over the whole weight.
// N_TILES is odd: the CTA shares its first or its last n64 row with a neighbor.
struct CtaTile {
    u32 tile_m;
    u32 first_n_tile;
    u32 first_row;         // the n64 row of the first N tile
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
        for (; tile_n >= problem.tiles_n; ++tile_m) tile_n -= problem.tiles_n;   // there is usually only one tile along M
        first_n_tile = tile_n * N_TILES;
        first_row = first_n_tile / 2;
        first_whole_row = (first_n_tile + 1) / 2;
        half_first = first_n_tile & 1;
    }

    // Return the stage of W and x that the CTA loads in iteration k.
    __device__ __forceinline__ u32 stage_at(u32 k) const { return k_begin + k; }

    // Return the N tile at a position in shared memory. Whole rows precede the half row.
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
    const TensorMap* half_weight_map;
    const TensorMap* scale_map;
    const TensorMap* zero_map;
    const TensorMap* activation_map;
};

// Expect the bytes of a stage, and load the operands that do not depend on previous kernels: weights, scales and zero points. TMA fills
// elements outside the tensors with zeros.
__device__ __forceinline__ void load_weights(const Ring& ring, u32 slot, u32 smem, const Maps& maps, const CtaTile& tile, u32 k,
                                             u64 policy) {
    const u32 stage = tile.stage_at(k), k64 = stage * K64_PER_STAGE, full = ring.get_barrier(slot);
    const u32 weights = smem + WEIGHTS + slot * WEIGHT_STAGE_BYTES;
    ring.expect_tx(slot, TRANSACTION_BYTES);
    cp_async_bulk_tensor_3d_load_hint(weights, maps.weight_map, full, 0, k64, tile.first_whole_row, policy);
    constexpr u32 WHOLE_ROWS = N_TILES / 2;   // number of whole rows, which precede the half row in a slot
    const u32 half_row = tile.half_first ? tile.first_row : tile.first_whole_row + WHOLE_ROWS;
    const u32 first_word = tile.half_first ? HALF_BLOCK_BYTES / 8 : 0;   // the map's elements are 8 bytes long
    cp_async_bulk_tensor_3d_load_hint(weights + WHOLE_ROWS * K64_PER_STAGE * K64_BLOCK_BYTES, maps.half_weight_map, full,
                                      first_word, k64, half_row, policy);
    const u32 group = stage * TILE_K / GROUP_SIZE;
    cp_async_bulk_tensor_2d_load(smem + SCALES + slot * SCALE_STAGE_BYTES, maps.scale_map, full, tile.first_row * 64, group);
    cp_async_bulk_tensor_2d_load(smem + ZEROS + slot * ZERO_SLOT_BYTES, maps.zero_map, full, tile.first_row * 64, group);
}

// Load activations as K64_PER_STAGE boxes of TILE_M rows and 64 elements of K in the 128-byte swizzle. TMA fills elements outside x with
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
// Activations depend on the previous kernel; weights do not. A dependent launch therefore loads the weights of prefetch_stages stages
// before it waits for the previous kernel. It does not load the weights of all stages, because the activations of the first stage would
// then arrive after all of these weights.
__device__ __forceinline__ void fill_ring(const Ring& ring, u32 smem, const Maps& maps, const CtaTile& tile,
                                          const Problem& problem, u64 policy) {
    mbarrier_init(smem + CLUSTER_BARRIER, 1);
    ring.init_barriers(1, CONSUMER_WARPS);
    // This CTA owns every CLUSTER_K-th N tile. For each of these tiles, it receives the sums of all other CTAs.
    constexpr u32 SENDERS = CLUSTER_K - 1;
    mbarrier_arrive_expect_tx(smem + CLUSTER_BARRIER, (N_TILES + SENDERS - tile.rank) / CLUSTER_K * SENDERS * N_TILE_SUM_BYTES);
    const u32 filled = min(STAGES, tile.k_iterations), prefetched = min(filled, problem.prefetch_stages);
#pragma unroll 1
    for (u32 k = 0; k < prefetched; ++k) load_weights(ring, k, smem, maps, tile, k, policy);
    griddepcontrol_launch_dependents();   // the next kernel may start and load its weights
    griddepcontrol_wait();                // the previous kernel has written the activations
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
        // A 64-deep block has TILE_M rows of 128 bytes. The 128-byte swizzle moves chunk c of row r to c ^ (r % 8), where r counts the rows
        // of all blocks.
        const u32 swizzle_row = k64 * TILE_M + row;
        activations = keep_in_register(smem + ACTIVATIONS + swizzle_row * ROW_BYTES + ((chunk ^ swizzle_row % 8) << 4));
        const bool in_half_row = warp_tile.position == N_TILES - 1;
        const u32 half = in_half_row ? 0 : warp_tile.position % 2 * HALF_BLOCK_BYTES;
        k64_stride = in_half_row ? HALF_BLOCK_BYTES : K64_BLOCK_BYTES;
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
        // If TILE_M is less than 8, block i begins in the middle of the swizzle's 8 rows. TILE_M is a power of two, so the first row of the
        // block only sets bits that are zero in the lane's row, both in the address and in the swizzle.
        load_block_activations(b, (activations ^ (i * TILE_M % 8) << 4) + i * TILE_M * ROW_BYTES);
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

// Multiply the stages of a tile. A slot is released during the next stage, when all values read from the slot have been used. Otherwise
// ptxas may issue the arrival while an ld.shared is in flight.
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

// Add up the sums of the CTAs of a cluster. Each N tile has one owner. The other CTAs send their sums to the owner, which adds them to its
// own sums in the order of the ranks. Return whether this warp has the result.
__device__ __forceinline__ bool reduce_cluster(OwnSums& own, u32 smem, const CtaTile& tile, const WarpTile& warp_tile, u32 lane) {
    const u32 owner = warp_tile.position % CLUSTER_K, received = warp_tile.position / CLUSTER_K * (CLUSTER_K - 1);
    const u32 first = fragment_offset(first_own_fragment(warp_tile), 0);
    const u32 sums = smem + CLUSTER_SUMS + received * N_TILE_SUM_BYTES + first + lane * 16;
    // Wait until the owner's barrier is initialized. The owner itself need not wait, but compute-sanitizer's racecheck hangs if some of the
    // arrived threads do not wait.
    barrier_cluster_wait();
    if (tile.rank != owner) {
        const u32 sender = tile.rank - (tile.rank > owner);   // the index of the rank if the owner is not counted
        const u32 target = mapa_shared_cluster(sums + sender * N_TILE_SUM_BYTES, owner);
        const u32 barrier = mapa_shared_cluster(smem + CLUSTER_BARRIER, owner);
#pragma unroll
        for (u32 c = 0; c < OWN; ++c)
#pragma unroll
            for (u32 m = 0; m < FRAGMENTS_8; ++m) st_async_v4_f32(target + fragment_offset(c, m), own[c][m], barrier);
        return false;
    }
    mbarrier_wait_parity_acquire_cluster(smem + CLUSTER_BARRIER, 0);   // the sums of all other CTAs have arrived
#pragma unroll
    for (u32 sender = 0; sender < CLUSTER_K - 1; ++sender)
#pragma unroll
        for (u32 c = 0; c < OWN; ++c)
#pragma unroll
            for (u32 m = 0; m < FRAGMENTS_8; ++m) add_fragment(own[c][m], sums + sender * N_TILE_SUM_BYTES + fragment_offset(c, m));
    return true;
}

// ---- Epilogue: an owner's sums to rows of the output. n_begin: the owner's first column -----------------------------
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

// Store two adjacent columns of a row.
__device__ __forceinline__ void store_pair(const Problem& problem, u16* target, u32 column, u32 pair) {
    if (__builtin_expect(problem.output_vectors && column + 2 <= problem.n, 1)) {
        *(u32*)target = pair;
    } else {   // an unaligned row, or the last column
        if (column < problem.n) target[0] = (u16)pair;
        if (column + 1 < problem.n) target[1] = (u16)(pair >> 16);
    }
}

// Store the result. movmatrix transposes the fragments, so that each lane has two adjacent columns of a row of the output.
__device__ __forceinline__ void store_result(const OwnSums& own, const Problem& problem, u16* output, u32 tile_m, u32 n_begin,
                                             u32 lane) {
    const u32 m_begin = tile_m * TILE_M, column = n_begin + 2 * (lane & 3);
    u16* const target = output + m_begin * problem.output_pitch + column;
#pragma unroll
    for (u32 m = 0; m < FRAGMENTS_8; ++m) {
        if (m > 0 && m_begin + 8 * m >= problem.m) return;   // uniform within the warp
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

// y = x W for small M, computed as y^T = W^T x^T: columns of W are rows of the mma. A CTA computes N_TILES N tiles over all of K or, in a
// cluster, over its part of K. The last warp is the producer: it waits until the consumers have released a slot, and loads the next stage
// into that slot. The other warps are consumers: they wait until a slot is full, multiply, and release the slot.
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
    // The shuffle lets ptxas know that the value is uniform within a warp.
    const u32 warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const bool is_producer = warp == CONSUMER_WARPS;

    const CtaTile tile(problem);
    const Maps maps{&weight_map, &half_weight_map, &scale_map, &zero_map, &activation_map};
    const u64 policy = createpolicy_evict_first();   // L2 policy of the weights, because they are read only once
    Ring ring;
    ring.attach(smem + FULL_BARRIERS);

    // elect_sync() lets ptxas know that only one thread runs this code; with lane == 0, ptxas would put a loop around each copy.
    if (is_producer && elect_sync()) fill_ring(ring, smem, maps, tile, problem, policy);
    __syncwarp();
    barrier_cluster_arrive_relaxed();   // reduce_cluster() waits for it; relaxed, because fence_mbarrier_init() orders the barriers
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
    griddepcontrol_wait();   // the previous kernel may still use the output
    const u32 n_begin = warp_tile.n_tile * N_TILE + 16 * first_own_fragment(warp_tile);
    if (__builtin_expect(bias != nullptr, 0)) add_bias(own, problem, bias, n_begin, lane);
    store_result(own, problem, output, tile.tile_m, n_begin, lane);
}
