// cudatma: kernels/experts_gather.cu.j2 for sm_90a
// config: GatherConfig
// no ring: rows are copied from global memory to global memory

// primitives.cu contains
// u8, u16, u32, u64, griddepcontrol_wait, griddepcontrol_launch_dependents, Divisor, divide

namespace cudatma {
constexpr u32 CHUNK_BYTES = 16;   // bytes that a thread copies at a time

// The launch parameters that are neither tensor maps nor pointers.
struct Problem {
    u32 k;                          // size of the K dimension
    Divisor by_top_k;               // divides by top_k
    u64 activation_pitch;           // elements from one row of activations to the next
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
}  // namespace cudatma

// Copy the rows of x in the order of the sorted pairs, so that the first GEMM loads a block of rows as one box.
extern "C" __global__ void __launch_bounds__(256)
experts_gather(
    const cudatma::u16* activations,
    cudatma::u8* space,
    const __grid_constant__ cudatma::Problem problem) {
    using namespace cudatma;
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();   // the routing kernel has sorted the pairs
    const Routing routing(space, problem);
    const u32 rows = __ldcg(routing.row_count), chunks = problem.k * 2 / CHUNK_BYTES;
    for (u32 row = blockIdx.x; row < rows; row += gridDim.x) {
        const u32 token = divide(__ldcg(routing.pairs + row), problem.by_top_k);
        const uint4* const source = (const uint4*)(activations + token * problem.activation_pitch);
        uint4* const target = (uint4*)space + (u64)row * chunks;
        for (u32 chunk = threadIdx.x; chunk < chunks; chunk += 256) target[chunk] = source[chunk];
    }
}
