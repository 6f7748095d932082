// cudatma: kernels/experts_route.cu.j2 for sm_90a
// config: RouteConfig
//   tile_m = 8
// no ring: ids are read from global memory, and experts are counted in static shared memory

// primitives.cu contains
// u8, u16, u32, u64, griddepcontrol_wait, griddepcontrol_launch_dependents

namespace cudatma {
constexpr u32 TILE_M = 8;   // rows of a block
constexpr u32 THREADS = 256, WARPS = THREADS / 32;   // a thread divides the pairs of one expert
constexpr u32 LOADS = 8;   // ids that a thread loads at a time

constexpr u32 NO_PLACE = 0xffffffffu;   // the place of a pair whose expert is not on this GPU; otherwise its index in the sorted pairs

// The launch parameters that are neither tensor maps nor pointers.
struct Problem {
    u32 pairs;                      // pairs of a token and one of its experts
    u32 experts;                    // experts whose weights are on this GPU
    u32 global_experts;             // experts on all GPUs
    u32 id_words;                   // 32-bit words of an expert id: 1 or 2
    u64 blocks_at;                  // offset of the number of blocks and the next tiles, and 16 bytes later of the blocks
    u64 pairs_at;                   // offset of the sorted pairs
    u64 places_at;                  // offset of each pair's index in the sorted pairs
};

// ---- Routing --------------------------------------------------------------------------------------------------------
// A pair is a token and one of its experts: pair p is choice p % top_k of token p / top_k. The routing kernel sorts the pairs by expert, and
// divides the pairs of each expert into blocks of TILE_M rows. The rows of all results are in the order of the sorted pairs.
struct Block {
    u32 expert;   // index of the expert's weights on this GPU
    u32 first;    // index of the block's first row in the sorted pairs
    u32 rows;     // number of rows from this one to the expert's last one
    u32 index;    // index of the block among the blocks of the expert
};

// The arrays of the routing kernel, in the memory that all launches of a call share.
struct Routing {
    u32* block_count;
    u32* next_tiles;   // number of tiles that CTAs have taken in addition to their first ones, for each of the two products
    Block* blocks;
    u32* pairs;        // pairs sorted by expert

    __device__ __forceinline__ Routing(u8* space, const Problem& problem)
        : block_count((u32*)(space + problem.blocks_at)), next_tiles((u32*)(space + problem.blocks_at) + 1),
          blocks((Block*)(space + problem.blocks_at) + 1), pairs((u32*)(space + problem.pairs_at)) {}
};

// Return the index of a pair's expert on this GPU, or a negative number if the weights of the expert are not on this GPU.
__device__ __forceinline__ int local_expert(const Problem& problem, const int* topk_ids, const int* expert_map, u32 pair) {
    const int* const words = topk_ids + (u64)pair * problem.id_words;
    const int id = words[0];
    if (problem.id_words == 2 && words[1] != 0) return -1;   // an int64 that is negative or too large
    if (id < 0 || (u32)id >= problem.global_experts) return -1;
    const int expert = expert_map == nullptr ? id : expert_map[id];
    return (u32)expert < problem.experts ? expert : -1;
}

// Numbers of pairs and of blocks.
struct Sizes {
    u32 pairs, blocks;
};

// Return the sum over the threads before this one, and set `total` to the sum over all threads.
__device__ __forceinline__ Sizes exclusive_sum(Sizes (&warp_sums)[WARPS], Sizes value, Sizes& total) {
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    Sizes sum = value;
#pragma unroll
    for (u32 distance = 1; distance < 32; distance *= 2) {
        const u32 pairs = __shfl_up_sync(0xffffffffu, sum.pairs, distance), blocks = __shfl_up_sync(0xffffffffu, sum.blocks, distance);
        if (lane >= distance) sum = Sizes{sum.pairs + pairs, sum.blocks + blocks};
    }
    if (lane == 31) warp_sums[warp] = sum;
    __syncthreads();
    const Sizes of_warp = lane < WARPS ? warp_sums[lane] : Sizes{0, 0}, before = lane < warp ? of_warp : Sizes{0, 0};
    total = Sizes{__reduce_add_sync(0xffffffffu, of_warp.pairs), __reduce_add_sync(0xffffffffu, of_warp.blocks)};
    return Sizes{__reduce_add_sync(0xffffffffu, before.pairs) + sum.pairs - value.pairs,
                 __reduce_add_sync(0xffffffffu, before.blocks) + sum.blocks - value.blocks};
}
}  // namespace cudatma

// Sort the pairs of tokens and experts by expert, and divide them into blocks. One CTA does this, because its steps depend on each other.
extern "C" __global__ void __launch_bounds__(256)
experts_route(
    const int* topk_ids,
    const int* expert_map,
    cudatma::u8* space,
    const __grid_constant__ cudatma::Problem problem) {
    using namespace cudatma;
    __shared__ u32 counts[THREADS];   // number of pairs of each expert, then the place of the expert's first pair
    __shared__ Sizes warp_sums[WARPS];
    const Routing routing(space, problem);
    const u32 expert = threadIdx.x;
    counts[expert] = 0;
    __syncthreads();
    griddepcontrol_launch_dependents();   // the first GEMM may start; it waits for this kernel before it reads
    griddepcontrol_wait();                // the previous kernel has written the ids, and no longer uses the memory
    u32* const places = (u32*)(space + problem.places_at);
    // Count the pairs. `places` receives a pair's index among the pairs of its expert.
#pragma unroll 1
    for (u32 first = threadIdx.x; first < problem.pairs; first += LOADS * THREADS) {
        int locals[LOADS];
#pragma unroll
        for (u32 i = 0; i < LOADS; ++i) {
            const u32 pair = first + i * THREADS;
            locals[i] = pair < problem.pairs ? local_expert(problem, topk_ids, expert_map, pair) : -1;
        }
#pragma unroll
        for (u32 i = 0; i < LOADS; ++i)
            if (locals[i] >= 0) places[first + i * THREADS] = atomicAdd(&counts[locals[i]], 1u);
    }
    __syncthreads();
    const u32 rows = counts[expert], blocks = (rows + TILE_M - 1) / TILE_M;
    Sizes total;
    const Sizes first = exclusive_sum(warp_sums, Sizes{rows, blocks}, total);
    if (threadIdx.x == 0) {
        *routing.block_count = total.blocks;
        routing.next_tiles[0] = routing.next_tiles[1] = 0;
    }
    counts[expert] = first.pairs;
    for (u32 i = 0; i < blocks; ++i)
        routing.blocks[first.blocks + i] = Block{expert, first.pairs + i * TILE_M, rows - i * TILE_M, i};
    __syncthreads();
#pragma unroll 1
    for (u32 first = threadIdx.x; first < problem.pairs; first += LOADS * THREADS) {
        int locals[LOADS];
        u32 indices[LOADS];
#pragma unroll
        for (u32 i = 0; i < LOADS; ++i) {
            const u32 pair = first + i * THREADS;
            locals[i] = pair < problem.pairs ? local_expert(problem, topk_ids, expert_map, pair) : -1;
            indices[i] = locals[i] >= 0 ? places[pair] : 0;   // written by this thread
        }
#pragma unroll
        for (u32 i = 0; i < LOADS; ++i) {
            const u32 pair = first + i * THREADS;
            if (pair >= problem.pairs) break;
            const u32 place = locals[i] >= 0 ? counts[locals[i]] + indices[i] : NO_PLACE;
            if (locals[i] >= 0) routing.pairs[place] = pair;
            places[pair] = place;
        }
    }
}
