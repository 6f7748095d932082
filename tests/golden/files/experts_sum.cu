// cudatma: kernels/experts_sum.cu.j2 for sm_90a
// config: SumConfig
//   dtype = 'bfloat16'
// no ring: results are read from global memory

namespace cudatma {

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// [PTX ISA, griddepcontrol] Wait until the previous kernels of the stream have completed and their writes are visible. Without programmatic
// dependent launch, it returns at once.
__device__ __forceinline__ void griddepcontrol_wait() {
    asm volatile("griddepcontrol.wait;" : : : "memory");
}

// [PTX ISA, griddepcontrol] Allow the next kernel to start once every CTA has called this function or exited.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
    asm volatile("griddepcontrol.launch_dependents;" : : : "memory");
}

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

}  // namespace cudatma

namespace cudatma {
constexpr u32 CHUNK = 8;   // columns per 16-byte chunk, which a thread adds up

// The launch parameters that are neither tensor maps nor pointers.
struct Problem {
    u32 m;                          // rows of the result
    u32 n;                          // columns of the result
    u32 top_k;                      // experts of each token
    u32 experts;                    // experts whose weights are on this GPU
    u32 global_experts;             // experts on all GPUs
    u32 id_words;                   // 32-bit words of an expert id: 1 or 2
    u64 output_pitch;               // elements from one row to the next
    u64 result_at;                  // offset of this kernel's results in the shared memory of the launches, in bytes
};

// Return the index of a pair's expert on this GPU, or a negative number if the weights of the expert are not on this GPU.
__device__ __forceinline__ int local_expert(const Problem& problem, const int* topk_ids, const int* expert_map, u32 pair) {
    const int id = topk_ids[(u64)pair * problem.id_words];   // the low word of an int64
    if (id < 0 || (u32)id >= problem.global_experts) return -1;
    const int expert = expert_map == nullptr ? id : expert_map[id];
    return (u32)expert < problem.experts ? expert : -1;
}
}  // namespace cudatma

// output[t] = the sum over j of topk_weights[t, j] * result of pair t * top_k + j, in the order of j. Row y of the grid processes every
// gridDim.y-th token, and the CTAs of the row divide the columns.
extern "C" __global__ void __launch_bounds__(128)
experts_sum(
    const float* topk_weights,
    const int* topk_ids,
    const int* expert_map,
    cudatma::u8* space,
    cudatma::u16* output,
    const __grid_constant__ cudatma::Problem problem) {
    using namespace cudatma;
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();   // the second GEMM has written the results
    const u32 column = (blockIdx.x * 128 + threadIdx.x) * CHUNK;
    if (column >= problem.n) return;
    const u16* const results = (const u16*)(space + problem.result_at) + column;
    for (u32 token = blockIdx.y; token < problem.m; token += gridDim.y) {
        float sums[CHUNK] = {};
#pragma unroll 8
        for (u32 pair = token * problem.top_k; pair < (token + 1) * problem.top_k; ++pair) {
            if (local_expert(problem, topk_ids, expert_map, pair) < 0) continue;
            const uint4 four = __ldcg((const uint4*)(results + (u64)pair * problem.n));
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
