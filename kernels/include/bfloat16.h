// bfloat16 as its bits, and sums in float32.
#pragma once

#include "device.h"

struct Bfloat16 {
  std::uint16_t bits;
};

__device__ __forceinline__ float widen(float v) { return v; }
__device__ __forceinline__ float widen(Bfloat16 v) {
  union {
    std::uint32_t word;
    float value;
  } u{std::uint32_t(v.bits) << 16};
  return u.value;
}
