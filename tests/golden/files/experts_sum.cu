// cudatma: kernels/experts_sum.cu.j2 for sm_90a
// config: SumConfig
//   dtype = 'bfloat16'
// no ring: results are read from global memory

// primitives.cu contains
// u8, u16, u32, u64, griddepcontrol_wait, griddepcontrol_launch_dependents, low_to_float, high_to_float, to_pair

namespace cudatma {
constexpr u32 CHUNK = 8;   // columns per 16-byte chunk, which a thread adds up
constexpr u32 NO_PLACE = 0xffffffffu;   // place of a pair whose expert is not on this GPU; other places are indices in the sorted pairs

// The launch parameters that are neither tensor maps nor pointers.
struct Problem {
    u32 m;                          // number of rows of the result
    u32 n;                          // number of columns of the result
    u32 top_k;                      // number of experts per token
    u64 output_pitch;               // stride between rows of the result, in elements
    u64 result_at;                  // offset of this kernel's results in the workspace, in bytes
    u64 places_at;                  // offset of each pair's index in the sorted pairs
};
}  // namespace cudatma

// Compute output[t], the sum over j of topk_weights[t, j] * results[pair t * top_k + j], in the order of j. The CTAs with blockIdx.y == y process
// every gridDim.y-th token, beginning with token y. The columns are divided among these CTAs.
extern "C" __global__ void __launch_bounds__(128)
experts_sum(
    const float* topk_weights,
    cudatma::u8* space,
    cudatma::u16* output,
    const __grid_constant__ cudatma::Problem problem) {
    using namespace cudatma;
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();   // wait until the second GEMM has written the results
    const u32 column = (blockIdx.x * 128 + threadIdx.x) * CHUNK;
    if (column >= problem.n) return;
    const u16* const results = (const u16*)(space + problem.result_at) + column;
    const u32* const places = (const u32*)(space + problem.places_at);
    for (u32 token = blockIdx.y; token < problem.m; token += gridDim.y) {
        float sums[CHUNK] = {};
#pragma unroll 8
        for (u32 pair = token * problem.top_k; pair < (token + 1) * problem.top_k; ++pair) {
            const u32 place = __ldcg(places + pair);
            if (place == NO_PLACE) continue;
            const uint4 four = __ldcg((const uint4*)(results + (u64)place * problem.n));
            const u32 words[4] = {four.x, four.y, four.z, four.w};
            const float weight = topk_weights[pair];
#pragma unroll
            for (u32 i = 0; i < CHUNK; i += 2) {
                sums[i] += weight * low_to_float(words[i / 2]);
                sums[i + 1] += weight * high_to_float(words[i / 2]);
            }
        }
        *(uint4*)(output + token * problem.output_pitch + column) =
            make_uint4(to_pair(sums[0], sums[1]), to_pair(sums[2], sums[3]), to_pair(sums[4], sums[5]), to_pair(sums[6], sums[7]));
    }
}
