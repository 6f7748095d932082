// What vLLM's kernels use of torch's headers: checks that throw, and a tensor that is a pointer with two dimensions.
#pragma once
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#define STD_TORCH_CHECK(condition, ...)                                                  \
  do {                                                                                   \
    if (!(condition)) throw std::runtime_error("check failed: " #condition);             \
  } while (0)
#define STD_TORCH_CHECK_NOT_IMPLEMENTED(condition, ...) STD_TORCH_CHECK(condition)

namespace torch::headeronly {
struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};
enum class ScalarType { Byte, Char, Half, BFloat16, Float, Int };
template <class T>
struct CppTypeToScalarType {
  static constexpr ScalarType value = ScalarType::Byte;
};
template <>
struct CppTypeToScalarType<Half> {
  static constexpr ScalarType value = ScalarType::Half;
};
template <>
struct CppTypeToScalarType<BFloat16> {
  static constexpr ScalarType value = ScalarType::BFloat16;
};
template <>
struct CppTypeToScalarType<float> {
  static constexpr ScalarType value = ScalarType::Float;
};
}  // namespace torch::headeronly

namespace torch::stable {
struct Tensor {
  void* pointer = nullptr;
  int64_t sizes[2] = {0, 0}, strides[2] = {0, 1};
  int64_t dim() const { return 2; }
  int64_t size(int64_t i) const { return sizes[i]; }
  int64_t stride(int64_t i) const { return strides[i]; }
  int64_t numel() const { return sizes[0] * sizes[1]; }
  void* data_ptr() const { return pointer; }
  void const* const_data_ptr() const { return pointer; }
  void* mutable_data_ptr() const { return pointer; }
};
}  // namespace torch::stable
