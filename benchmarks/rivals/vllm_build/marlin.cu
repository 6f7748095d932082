// C functions around vLLM's Marlin: fp16 activations and scales, u4b8 weights. build.sh makes marlin_body.cu and
// repack_body.cu.
#include <cstring>
#include "marlin_template.h"
#include "marlin_body.cu"
#include "repack_body.cu"

static char last_error[512];

extern "C" const char* marlin_error() { return last_error; }

// source: GPTQ's (K / 8, N) words. to: (K / 16, 2 N).
extern "C" int marlin_repack(const void* source, void* to, int k, int n, cudaStream_t stream) {
  int blocks = 0, shared_bytes = 0;
  cudaDeviceGetAttribute(&blocks, cudaDevAttrMultiProcessorCount, 0);
  cudaDeviceGetAttribute(&shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0);
  auto kernel = marlin::gptq_marlin_repack_kernel<marlin::repack_threads, 4, false>;
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  kernel<<<blocks, marlin::repack_threads, shared_bytes, stream>>>((uint32_t const*)source, (uint32_t*)to, k, n);
  return (int)cudaGetLastError();
}

// With the tile that vLLM chooses (-1), without atomic additions, with its fp32 reduction: its defaults.
extern "C" int marlin_gemm(const void* x, const void* weight, void* out, void* partials, void* scales, void* locks,
                           int m, int n, int k, int group, int sms, cudaStream_t stream) {
  try {
    auto type = vllm::kFloat16;
    marlin::marlin_mm(x, weight, out, partials, nullptr, nullptr, scales, nullptr, nullptr, m, n, k, k, locks, type,
                      vllm::kU4B8, type, type, false, false, k / group, group, 0, stream, -1, -1, sms, false, true,
                      false);
  } catch (std::exception const& error) {
    strncpy(last_error, error.what(), sizeof last_error - 1);
    return -1;
  }
  return (int)cudaGetLastError();
}
