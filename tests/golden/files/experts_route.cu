// cudatma: kernels/experts_route.cu.j2 for sm_90a
// config: RouteConfig
//   tile_m = 8
// no ring: ids are read from global memory, and experts are counted in static shared memory

// primitives.cu contains
// u8, u16, u32, u64, griddepcontrol_wait, griddepcontrol_launch_dependents

namespace cudatma {
constexpr u32 TILE_M = 8;   // maximum number of rows of a block
constexpr u32 SHORT_ROWS = 0;   // blocks with at most this number of rows come after all other blocks
constexpr u32 THREADS = 256, WARPS = THREADS / 32;   // a thread divides the pairs of one expert
constexpr u32 LOADS = 8;   // number of ids that a thread loads at a time
constexpr u32 STEP = THREADS;   // distance between consecutive pairs of a thread

constexpr u32 NO_PLACE = 0xffffffffu;   // place of a pair whose expert is not on this GPU; other places are indices in the sorted pairs

// The launch parameters that are neither tensor maps nor pointers.
struct Problem {
    u32 pairs;                      // number of (token, expert) pairs
    u32 experts;                    // number of experts whose weights are on this GPU
    u32 global_experts;             // number of experts on all GPUs
    u32 id_words;                   // number of 32-bit words per expert id, 1 or 2
    u64 blocks_at;                  // offset of the number of blocks and the next tiles, which precede the blocks
    u64 pairs_at;                   // offset of the sorted pairs
    u64 places_at;                  // offset of each pair's index in the sorted pairs
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

// Return the index of a pair's expert on this GPU, or a negative number if the weights of the expert are not on this GPU.
__device__ __forceinline__ int local_expert(const Problem& problem, const int* topk_ids, const int* expert_map, u32 pair) {
    const int* const words = topk_ids + (u64)pair * problem.id_words;
    const int id = words[0];
    if (problem.id_words == 2 && words[1] != 0) return -1;   // an int64 that is negative or too large
    if (id < 0 || (u32)id >= problem.global_experts) return -1;
    const int expert = expert_map == nullptr ? id : expert_map[id];
    return (u32)expert < problem.experts ? expert : -1;
}

// A thread's pairs with the indices first, first + STEP, and so on.
struct Pairs {
    int experts[LOADS];    // -1 for a pair that is skipped
    u32 indices[LOADS];    // index of each pair among this CTA's pairs of its expert
};

// Load the expert of each pair.
__device__ __forceinline__ void load_experts(Pairs& pairs, const Problem& problem, const int* topk_ids, const int* expert_map, u32 first) {
#pragma unroll
    for (u32 i = 0; i < LOADS; ++i) {
        const u32 pair = first + i * STEP;
        pairs.experts[i] = pair < problem.pairs ? local_expert(problem, topk_ids, expert_map, pair) : -1;
    }
}

// Count the pairs of each expert in `counts`.
__device__ __forceinline__ void count(Pairs& pairs, u32 (&counts)[THREADS]) {
#pragma unroll
    for (u32 i = 0; i < LOADS; ++i)
        if (pairs.experts[i] >= 0) pairs.indices[i] = atomicAdd(&counts[pairs.experts[i]], 1u);
}

// Store the place of each pair, and store each pair at its place. `places` contains the place of this CTA's first pair for each expert.
__device__ __forceinline__ void store_places(const Pairs& pairs, const Problem& problem, const Routing& routing, const u32 (&places)[THREADS],
                                             u32* place_of_pair, u32 first) {
#pragma unroll
    for (u32 i = 0; i < LOADS; ++i) {
        const u32 pair = first + i * STEP;
        if (pair >= problem.pairs) return;
        const u32 place = pairs.experts[i] >= 0 ? places[pairs.experts[i]] + pairs.indices[i] : NO_PLACE;
        if (pairs.experts[i] >= 0) routing.pairs[place] = pair;
        place_of_pair[pair] = place;
    }
}

// The number of pairs, of long blocks and of short blocks.
struct Sizes {
    u32 pairs, long_blocks, short_blocks;
};

// Return the sum over the threads before this one, and set `total` to the sum over all threads.
__device__ __forceinline__ Sizes exclusive_sum(Sizes (&warp_sums)[WARPS], Sizes value, Sizes& total) {
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, all = 0xffffffffu;
    Sizes sum = value;
#pragma unroll
    for (u32 distance = 1; distance < 32; distance *= 2) {
        const Sizes other{__shfl_up_sync(all, sum.pairs, distance), __shfl_up_sync(all, sum.long_blocks, distance),
                          __shfl_up_sync(all, sum.short_blocks, distance)};
        if (lane >= distance)
            sum = Sizes{sum.pairs + other.pairs, sum.long_blocks + other.long_blocks, sum.short_blocks + other.short_blocks};
    }
    if (lane == 31) warp_sums[warp] = sum;
    __syncthreads();
    const Sizes of_warp = lane < WARPS ? warp_sums[lane] : Sizes{0, 0, 0}, before = lane < warp ? of_warp : Sizes{0, 0, 0};
    total = Sizes{__reduce_add_sync(all, of_warp.pairs), __reduce_add_sync(all, of_warp.long_blocks), __reduce_add_sync(all, of_warp.short_blocks)};
    return Sizes{__reduce_add_sync(all, before.pairs) + sum.pairs - value.pairs,
                 __reduce_add_sync(all, before.long_blocks) + sum.long_blocks - value.long_blocks,
                 __reduce_add_sync(all, before.short_blocks) + sum.short_blocks - value.short_blocks};
}
}  // namespace cudatma

// Sort the pairs of tokens and experts by expert, and divide them into blocks. The grid has one CTA.
extern "C" __global__ void __launch_bounds__(256)
experts_route(
    const int* topk_ids,
    const int* expert_map,
    cudatma::u8* space,
    const __grid_constant__ cudatma::Problem problem) {
    using namespace cudatma;
    __shared__ u32 counts[THREADS];   // per expert: the number of this CTA's pairs, and later the place of the first one
    __shared__ Sizes warp_sums[WARPS];
    const Routing routing(space, problem);
    const u32 expert = threadIdx.x, begin = threadIdx.x;
    u32* const place_of_pair = (u32*)(space + problem.places_at);
    counts[expert] = 0;
    __syncthreads();
    griddepcontrol_launch_dependents();   // lets the first GEMM start; it waits for this kernel before it reads
    griddepcontrol_wait();                // the previous kernel has written the ids, and no longer uses the workspace
    Pairs pairs;   // the first pairs of this thread, which stay in registers
    load_experts(pairs, problem, topk_ids, expert_map, begin);
    count(pairs, counts);
#pragma unroll 1
    for (u32 first = begin + LOADS * STEP; first < problem.pairs; first += LOADS * STEP) {
        Pairs more;
        load_experts(more, problem, topk_ids, expert_map, first);
        count(more, counts);
#pragma unroll
        for (u32 i = 0; i < LOADS; ++i)
            if (more.experts[i] >= 0) place_of_pair[first + i * STEP] = more.indices[i];
    }
    __syncthreads();
    const u32 rows = counts[expert];
    const u32 whole = rows / TILE_M, rest = rows % TILE_M;
    const u32 long_blocks = whole + (rest > SHORT_ROWS), short_blocks = rest > 0 && rest <= SHORT_ROWS;
    Sizes total;
    const Sizes first = exclusive_sum(warp_sums, Sizes{rows, long_blocks, short_blocks}, total);
    counts[expert] = first.pairs;
    {
        if (threadIdx.x == 0) {
            *routing.block_count = total.long_blocks + total.short_blocks;
            routing.next_tiles[0] = routing.next_tiles[1] = 0;
        }
        const u32 long_rows = short_blocks ? whole * TILE_M : rows;
        for (u32 i = 0; i < long_blocks; ++i)
            routing.blocks[first.long_blocks + i] = Block{expert, first.pairs + i * TILE_M, long_rows - i * TILE_M, i};
        if (short_blocks) routing.blocks[total.long_blocks + first.short_blocks] = Block{expert, first.pairs + long_rows, rest, 0};
    }
    __syncthreads();
    store_places(pairs, problem, routing, counts, place_of_pair, begin);
#pragma unroll 1
    for (u32 first = begin + LOADS * STEP; first < problem.pairs; first += LOADS * STEP) {
        Pairs more;
        load_experts(more, problem, topk_ids, expert_map, first);
#pragma unroll
        for (u32 i = 0; i < LOADS; ++i) more.indices[i] = more.experts[i] >= 0 ? place_of_pair[first + i * STEP] : 0;
        store_places(more, problem, routing, counts, place_of_pair, first);
    }
}
