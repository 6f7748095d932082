// C functions around vLLM's Machete: fp16 activations and scales (-DMACHETE_BF16: bf16), u4b8 weights. With
// -DMACHETE_PREPACK the packing, else one schedule (-DSCHEDULE_NAME, -DTILE_CHANNELS, -DTILE_TOKENS, -DTILE_CLUSTER).
#include <optional>
#include <string>
#include <vector>
#ifdef MACHETE_PREPACK
#include "quantization/machete/machete_prepack_kernel.cuh"
#else
#include "quantization/machete/machete_mm_kernel.cuh"
#endif
#include "machete.h"

namespace machete {
#ifdef MACHETE_BF16
using Element = cutlass::bfloat16_t;
#else
using Element = cutlass::half_t;
#endif

#ifdef MACHETE_PREPACK
using Prepacked = PrepackedLayoutBTemplate<Element, cutlass::uint4b_t, Element, float, cutlass::layout::ColumnMajor,
                                           cutlass::gemm::KernelTmaWarpSpecializedCooperative>;

// source: (N, K / 8) words, eight codes along K each; as vLLM's prepack_impl does.
extern "C" int machete_prepack(const void* source, void* to, int n, int k, cudaStream_t stream) {
  try {
    using ElementB = typename Prepacked::ElementB;
    using StrideB = cutlass::detail::TagToStrideB_t<cutlass::layout::ColumnMajor>;
    auto layout = make_layout(make_shape(int64_t(n), int64_t(k), int64_t(1)), StrideB{int64_t(k), _1{}, int64_t(0)});
    prepack_B_template<Prepacked>(stream, static_cast<ElementB const*>(source), layout, static_cast<ElementB*>(to));
  } catch (std::exception const& error) {
    return -1;
  }
  return (int)cudaGetLastError();
}

#else
struct Schedule {
  using TileShapeNM = Shape<Int<TILE_CHANNELS>, Int<TILE_TOKENS>>;
  using ClusterShape = Shape<Int<TILE_CLUSTER>, _1, _1>;
  using EpilogueSchedule = cutlass::epilogue::TmaWarpSpecializedCooperative;
  using TileScheduler = cutlass::gemm::StreamKScheduler;
  using EpilogueTileType = cutlass::epilogue::collective::EpilogueTileAuto;
};
using Kernel = MacheteKernelTemplate<Element, cutlass::vllm_uint4b8_t, Element, float, Element, void, void, void,
                                     cutlass::gemm::KernelTmaWarpSpecializedCooperative, Schedule>;

static typename Kernel::Arguments arguments(const void* x, const void* weight, const void* scales, void* out, int m,
                                            int n, int k, int group) {
  using torch::stable::Tensor;
  Tensor a{const_cast<void*>(x), {m, k}, {k, 1}}, b{const_cast<void*>(weight), {k / 8, n}, {n, 1}};
  Tensor d{out, {m, n}, {n, 1}};
  std::optional<Tensor> s{Tensor{const_cast<void*>(scales), {k / group, n}, {n, 1}}};
  return Kernel::create_arguments(nullptr, a, b, d, s, std::nullopt, int64_t(group), std::nullopt, std::nullopt);
}

static size_t workspace(int m, int n, int k, int group) {
  char any = 0;
  return Kernel::get_workspace_size(arguments(&any, &any, &any, &any, m, n, k, group));
}

static int run(const void* x, const void* weight, const void* scales, void* out, int m, int n, int k, int group,
               void* workspace, cudaStream_t stream) {
  try {
    auto all = arguments(x, weight, scales, out, m, n, k, group);
    if (!Kernel::can_implement(all)) return 1000;
    Kernel::run(all, workspace, stream);
  } catch (std::exception const& error) {
    return 3000;
  }
  return 0;
}

#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)
extern "C" const MacheteEntry SCHEDULE_NAME = {
    TEXT(TILE_CHANNELS) "x" TEXT(TILE_TOKENS) " c" TEXT(TILE_CLUSTER) "x1", TILE_CHANNELS, TILE_TOKENS, TILE_CLUSTER, workspace,
    run};
#endif
}  // namespace machete
