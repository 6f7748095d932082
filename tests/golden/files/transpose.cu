// cudatma: kernels/transpose.cu.j2 for sm_90a
// config: TransposeConfig
//   element_bytes = 1
//   squares_y = 1
//   squares_x = 1
//   stages = 3
//   transposed_tiles = 2
// ring: 3 tiles of 128 x 128 elements, 16384 bytes, and 2 transposed tiles; 81968 bytes of shared memory

namespace cudatma {

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// [PTX ISA, Tensor-map] The 128 opaque bytes of a tensor map, which cuTensorMapEncode* fills. A kernel takes a tensor map as a parameter of
// type `const __grid_constant__ TensorMap`.
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

// [PTX ISA, bar] Wait at named barrier `id` until `threads` threads, in whole warps, have arrived. __syncthreads() uses barrier 0.
__device__ __forceinline__ void bar_sync(u32 id, u32 threads) {
    asm volatile("bar.sync %0, %1;" : : "r"(id), "r"(threads) : "memory");
}

// [PTX ISA, membar / fence, .proxy.async] Order this thread's ordinary accesses to shared memory before later accesses of the
// async proxy: reads by TMA stores and wgmma, and TMA loads that overwrite the data.
__device__ __forceinline__ void fence_proxy_async_shared_cta() {
    asm volatile("fence.proxy.async.shared::cta;" : : : "memory");
}

// [PTX ISA, membar / fence, .acq_rel.cta] Order this thread's memory accesses within the CTA. Without this fence, ptxas may issue an
// mbarrier.arrive while an earlier ld.shared is in flight.
__device__ __forceinline__ void fence_acq_rel_cta() {
    asm volatile("fence.acq_rel.cta;" : : : "memory");
}

// [PTX ISA, mbarrier.init] Initialize the barrier at shared address `bar` (8 bytes, 8-byte aligned) for `count` arrivals per phase. Before
// other threads use the barrier, this thread must call fence_mbarrier_init(), and then all threads of the CTA or cluster must synchronize.
__device__ __forceinline__ void mbarrier_init(u32 bar, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" : : "r"(bar), "r"(count) : "memory");
}

// [PTX ISA, mbarrier.arrive] Arrive once with release semantics, so that this thread's earlier writes are visible to waiting threads.
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
// The wait has acquire semantics, so that the bytes that TMA delivered and the earlier writes of the threads that arrived are then visible
// to this thread.
__device__ __forceinline__ void mbarrier_wait_parity(u32 bar, u32 parity) {
    while (!mbarrier_try_wait_parity(bar, parity)) {
    }
}

// [PTX ISA, membar / fence] Make this thread's mbarrier.init visible to the async proxy and the cluster.
__device__ __forceinline__ void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" : : : "memory");
}

// [PTX ISA, cp.async.bulk.tensor] Load the box of `map` that begins at element (c0, c1, ...), where c0 is the innermost coordinate, to
// shared address `dst`. Call this function from one thread. Barrier `bar` counts the bytes of the whole box, because TMA also fills
// elements outside the tensor. `dst` must be 128-byte aligned (1024-byte aligned with the 128-byte swizzle).
__device__ __forceinline__ void cp_async_bulk_tensor_3d_load(u32 dst, const TensorMap* map, u32 bar, int c0, int c1, int c2) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cta.global.tile.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%3, %4, %5}], [%2];"
                 :: "r"(dst), "l"(map), "r"(bar), "r"(c0), "r"(c1), "r"(c2) : "memory");
}

// [PTX ISA, cp.async.bulk.tensor] Store a box from shared address `src` to element (c0, c1, ...) and the following elements of `map` as
// part of this thread's current bulk group. Coordinates must be nonnegative. TMA clips the innermost dimension at multiples of 16 bytes,
// not at elements. The threads that wrote `src` must call fence_proxy_async_shared_cta() and then synchronize before this call.
__device__ __forceinline__ void cp_async_bulk_tensor_3d_store(const TensorMap* map, u32 src, int c0, int c1, int c2) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group"
                 " [%0, {%2, %3, %4}], [%1];"
                 :: "l"(map), "r"(src), "r"(c0), "r"(c1), "r"(c2) : "memory");
}

// [PTX ISA, prefetch] Prefetch a tensor map into the descriptor cache.
__device__ __forceinline__ void prefetch_tensormap(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" : : "l"(map) : "memory");
}

// [PTX ISA, cp.async.bulk.commit_group] Commit all bulk stores and reductions of this thread that are in no group yet, as one group.
__device__ __forceinline__ void cp_async_bulk_commit_group() {
    asm volatile("cp.async.bulk.commit_group;" : : : "memory");
}

// [PTX ISA, cp.async.bulk.wait_group] Wait until all but the last Pending of this thread's bulk groups have written global memory.
template <u32 Pending>
__device__ __forceinline__ void cp_async_bulk_wait_group() {
    asm volatile("cp.async.bulk.wait_group %0;" : : "n"(Pending) : "memory");
}

// [PTX ISA, cp.async.bulk.wait_group.read] Wait until all but the last Pending of this thread's bulk groups have read shared memory,
// which may then be overwritten.
template <u32 Pending>
__device__ __forceinline__ void cp_async_bulk_wait_group_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" : : "n"(Pending) : "memory");
}

// [PTX ISA, ldmatrix] Load 8 x 8 matrices of 16-bit elements into a warp's registers. Lanes 8 i to 8 i + 7 pass the 16-byte aligned shared
// addresses of the rows of matrix i. In r[i], lane l receives elements 2 (l % 4) and 2 (l % 4) + 1 of row l / 4. The _trans variants
// transpose each matrix.
__device__ __forceinline__ void ldmatrix_x4_trans(u32 (&r)[4], u32 addr) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(addr) : "memory");
}

// [PTX ISA, stmatrix] Store 8 x 8 matrices of 16-bit elements from a warp's registers. Lanes 8 i to 8 i + 7 pass the 16-byte aligned shared
// addresses of the rows of matrix i. In r[i], lane l holds elements 2 (l % 4) and 2 (l % 4) + 1 of row l / 4. The _trans variants transpose
// each matrix.
__device__ __forceinline__ void stmatrix_x4(u32 addr, const u32 (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 :: "r"(addr), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
}

// A ring of Stages slots in shared memory. A producer fills the slots, and consumers read them. One pass over all slots is a lap.
//
// Each slot has two mbarriers. `full` completes a phase when the producer has arrived and its bytes have arrived in the slot. Consumers
// wait for this phase before they read the slot. `empty` completes a phase when the consumers have arrived. The producer waits for this
// phase before it refills the slot. Each thread keeps its position (`stage` and `phase`) in registers, starts at (0, 0), and advances once
// per slot:
//
//     producer   acquire()   expect_tx(bytes)   load(.., get_barrier(), ..)   advance()
//     consumer   wait()      read the slot      release()                     advance()
//
// The expected number of bytes must equal the number of loaded bytes. If the expected number is larger, wait() never returns. If it is
// smaller, wait() may return before all data has arrived. A consumer that wrote to the slot with ordinary stores must call
// fence_proxy_async_shared_cta() before it releases the slot. Methods that take a slot operate on that slot in the current lap and do not
// change `stage`.
template <u32 Stages>
struct TmaPipeline {
    u32 base;    // shared address of full[Stages], then empty[Stages]; 8 bytes each
    u32 stage;   // this thread's current slot
    u32 phase;   // parity of the current lap

    // Attach to the ring, initialize its barriers, and call __syncthreads(). All threads of the CTA must call this function. In a cluster,
    // all CTAs must also synchronize before one uses the barriers of another.
    __device__ __forceinline__ void init(u32 base_address, u32 producer_arrivals, u32 consumer_arrivals) {
        attach(base_address);
        if (threadIdx.x == 0 && threadIdx.y == 0 && threadIdx.z == 0) init_barriers(producer_arrivals, consumer_arrivals);
        __syncthreads();
    }

    // Start at slot 0 of the ring whose barriers are at base_address, which must be 8-byte aligned. The barriers are not accessed.
    __device__ __forceinline__ void attach(u32 base_address) {
        base = base_address;
        stage = 0;
        phase = 0;
    }

    // Initialize the barriers. One thread must call this function after attach(), and may use the ring at once. Other threads may use the
    // ring after the CTA or the cluster has synchronized. `producer_arrivals` is the number of calls of expect_tx() or arrive() that fill a
    // slot. `consumer_arrivals` is the number of calls of release*(), in all CTAs of the cluster, that free a slot.
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

    // Producer: wait until the consumers have released the slot. In the first lap, this function returns at once, because the phase with
    // parity 1 of a new barrier counts as completed.
    __device__ __forceinline__ void acquire(u32 slot) const { mbarrier_wait_parity(empty_barrier(slot), phase ^ 1); }
    __device__ __forceinline__ void acquire() const { acquire(stage); }

    // Producer: arrive once and expect `bytes` bytes. Call this function before the loads.
    __device__ __forceinline__ void expect_tx(u32 slot, u32 bytes) const { mbarrier_arrive_expect_tx(get_barrier(slot), bytes); }
    __device__ __forceinline__ void expect_tx(u32 bytes) const { expect_tx(stage, bytes); }

    // Consumer: wait until the slot is full.
    __device__ __forceinline__ void wait(u32 slot) const { mbarrier_wait_parity(get_barrier(slot), phase); }
    __device__ __forceinline__ void wait() const { wait(stage); }

    // Consumer: arrive once after reading the slot. The fence orders the reads before the arrival. ptxas does not guarantee this order, and
    // TMA could refill the slot while the reads are in flight.
    __device__ __forceinline__ void release(u32 slot) const {
        fence_acq_rel_cta();
        mbarrier_arrive(empty_barrier(slot));
    }
    __device__ __forceinline__ void release() const { release(stage); }

    // Advance to the next slot, and toggle the parity when the ring wraps around.
    __device__ __forceinline__ void advance() {
        if (++stage == Stages) {
            stage = 0;
            next_lap();
        }
    }

    // Toggle the parity. Callers that count the slots themselves must call this function once per lap.
    __device__ __forceinline__ void next_lap() { phase ^= 1; }
};

}  // namespace cudatma

using namespace cudatma;

typedef u8 Element;

constexpr u32 STAGES = 3;
constexpr u32 STAGE_BYTES = 16384;   // bytes per tile, whose panels are contiguous
constexpr u32 TRANSPOSED = 49152;   // offset of the transposed tiles, after the slots
constexpr u32 TRANSPOSED_TILES = 2;
constexpr u32 BARRIERS = 81920;
constexpr u32 WARPS = 4;   // warps that transpose tiles; one more warp loads
constexpr int SIDE = 128;   // elements in 128 bytes, which are the width of a panel and the side of a square
constexpr int SQUARES_Y = 1, SQUARES_X = 1;   // squares per tile along each axis
constexpr u32 LINE_BYTES = 128;   // bytes per row of a panel, equal to the width of the swizzle
constexpr u32 LOADED_PANEL_BYTES = 16384;   // a panel contains SIDE columns of all rows of a tile
constexpr u32 STORED_PANEL_BYTES = 16384;   // a panel contains SIDE rows of all columns of a tile
constexpr int TILE_ROWS = SQUARES_Y * SIDE, TILE_COLUMNS = SQUARES_X * SIDE;
constexpr int RASTER_GROUP = 16;   // rows of tiles per raster group

// Return the address of a 16-byte chunk of a row of a panel in the 128-byte swizzle. Panels are aligned to 1024 bytes.
__device__ __forceinline__ u32 chunk_at(u32 panel, u32 row, u32 chunk) {
    return panel + row * LINE_BYTES + ((chunk ^ (row & 7)) << 4);
}

constexpr u32 PARTS = 8;   // parts per square; a warp transposes one part (eight blocks of 16 x 16 bytes)

// Transpose a part of the square that begins at row `row` of panel `from` into the rows of panel `to` that begin at row `column`.
//
// ldmatrix transposes pairs of bytes, so each lane receives the same pair of two rows. The 16 rows of a block are divided between two
// matrices A and B, so that lane 4 c + j holds pair c of rows 4 j to 4 j + 3. __byte_perm combines these pairs into four bytes of row 2 c
// and four bytes of row 2 c + 1 of the result, and stmatrix writes the result. To avoid bank conflicts, the rows are divided between A and
// B, and between the two results, so that the eight rows of each matrix are in eight different chunks of their lines. A contains rows 0, 1,
// 4, 5, 10, 11, 14 and 15, and B contains the other rows. The first result contains rows 0, 2, 4, 6, 9, 11, 13 and 15, and the second
// result contains the other rows.
__device__ __forceinline__ void transpose_part(u32 from, u32 row, u32 to, u32 column, u32 part) {
    const u32 lane = laneid(), line = lane & 7, second = lane >> 3 & 1, block = lane >> 4;
    const u32 read_row = 2 * (line & 6) + (line & 1) + 2 * ((line >> 2) ^ second);
    const u32 written_row = 2 * line + ((line >> 2) ^ second);
    // Lanes with j >= 2 receive rows 4 j and 4 j + 1 from B, and lanes with c >= 4 write row 2 c + 1 first.
    const u32 even = lane & 2 ? 0x2064 : 0x6420, odd = even + 0x1111;
    const u32 first = lane & 16 ? odd : even, other = lane & 16 ? even : odd;
#pragma unroll
    for (u32 pair = 0; pair < 4; ++pair) {
        const u32 x = 2 * pair + block;   // the block whose row this lane addresses
        u32 in[4], out[4];
        ldmatrix_x4_trans(in, chunk_at(from, row + 16 * part + read_row, x));
        out[0] = __byte_perm(in[0], in[1], first);
        out[1] = __byte_perm(in[0], in[1], other);
        out[2] = __byte_perm(in[2], in[3], first);
        out[3] = __byte_perm(in[2], in[3], other);
        stmatrix_x4(chunk_at(to, column + 16 * x + written_row, part), out);
    }
}

// ---- Raster order ---------------------------------------------------------------------------------------------------
// The column and row of a tile, and the index of its matrix.
struct Place {
    int x, y, z;
};

// Return the position of a tile. Tiles are numbered in raster groups of RASTER_GROUP rows of tiles, column by column within a group. CTAs
// that run at the same time then cover roughly a square of the matrix, so that both reads and writes use whole DRAM pages.
__device__ __forceinline__ Place place_of(u32 tile, u32 tiles_x, u32 tiles_y) {
    const u32 plane = tiles_x * tiles_y, inside = tile % plane;
    const u32 group = inside / (tiles_x * RASTER_GROUP), rest = inside % (tiles_x * RASTER_GROUP);
    const u32 height = min(static_cast<u32>(RASTER_GROUP), tiles_y - group * RASTER_GROUP);
    return {static_cast<int>(rest / height), static_cast<int>(group * RASTER_GROUP + rest % height),
            static_cast<int>(tile / plane)};
}

// Compute destination[z][x][y] = source[z][y][x], tile by tile. A CTA processes every gridDim.x-th tile. The first lane of the last warp
// loads a tile as panels of SIDE columns. The other warps transpose the squares of the tile into panels of SIDE rows, and thread 0 stores
// these panels. Before the warps overwrite a transposed tile, thread 0 waits until its stores have read that tile.
extern "C" __global__ void __launch_bounds__(160)
transpose(const __grid_constant__ TensorMap source, const __grid_constant__ TensorMap destination,
    u32 tiles_x, u32 tiles_y, u32 tiles) {
    extern __shared__ __align__(1024) u8 shared[];
    const u32 slots = shared_address(shared);
    const u32 warp = threadIdx.x / 32;

    TmaPipeline<STAGES> pipeline;
    pipeline.init(slots + BARRIERS, 1, WARPS);

    if (warp == WARPS) {
        if (laneid() != 0) return;
        prefetch_tensormap(&source);
        for (u32 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
            const Place at = place_of(tile, tiles_x, tiles_y);
            const u32 slot = slots + pipeline.stage * STAGE_BYTES;
            pipeline.acquire();
            pipeline.expect_tx(STAGE_BYTES);
            for (int panel = 0; panel < SQUARES_X; ++panel) {
                cp_async_bulk_tensor_3d_load(slot + panel * LOADED_PANEL_BYTES, &source, pipeline.get_barrier(),
                                             at.x * TILE_COLUMNS + panel * SIDE, at.y * TILE_ROWS, at.z);
            }
            pipeline.advance();
        }
        return;
    }

    if (threadIdx.x == 0) prefetch_tensormap(&destination);
    u32 transposed = 0;   // the next transposed tile to write
    for (u32 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const u32 from = slots + pipeline.stage * STAGE_BYTES, to = slots + TRANSPOSED + transposed * STAGE_BYTES;
        if (threadIdx.x == 0) cp_async_bulk_wait_group_read<TRANSPOSED_TILES - 1>();
        bar_sync(1, WARPS * 32);
        pipeline.wait();
        for (u32 part = warp; part < SQUARES_Y * SQUARES_X * PARTS; part += WARPS) {
            const u32 square = part / PARTS, y = square / SQUARES_X, x = square % SQUARES_X;
            transpose_part(from + x * LOADED_PANEL_BYTES, y * SIDE, to + y * STORED_PANEL_BYTES, x * SIDE, part % PARTS);
        }
        fence_proxy_async_shared_cta();
        __syncwarp();
        if (laneid() == 0) pipeline.release();
        pipeline.advance();
        bar_sync(1, WARPS * 32);
        if (threadIdx.x == 0) {
            const Place at = place_of(tile, tiles_x, tiles_y);
            for (int panel = 0; panel < SQUARES_Y; ++panel) {
                cp_async_bulk_tensor_3d_store(&destination, to + panel * STORED_PANEL_BYTES, at.y * TILE_ROWS + panel * SIDE,
                                              at.x * TILE_COLUMNS, at.z);
            }
            cp_async_bulk_commit_group();
        }
        if (++transposed == TRANSPOSED_TILES) transposed = 0;
    }
    if (threadIdx.x == 0) cp_async_bulk_wait_group<0>();   // TMA must read shared memory before the CTA exits and finish its writes before the kernel ends
}
