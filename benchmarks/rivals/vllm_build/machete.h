#pragma once
#include <cstddef>
#include <cuda_runtime.h>

// One schedule of Machete. run returns 0, 1000 where it cannot compute this problem, 3000 where vLLM's code throws.
struct MacheteEntry {
  const char* name;
  int channels, tokens, cluster;
  size_t (*workspace)(int m, int n, int k, int group);
  int (*run)(const void* x, const void* weight, const void* scales, void* out, int m, int n, int k, int group,
             void* workspace, cudaStream_t stream);
};
