// 16-bit floating point numbers as storage, without any library: what the kernels read and write.
#pragma once

#include <cstdint>

namespace mtserve::kernels {

enum class DType { kFloat32, kFloat16, kBFloat16 };

struct BFloat16 {
  uint16_t bits;
};

struct Float16 {
  uint16_t bits;
};

}  // namespace mtserve::kernels
