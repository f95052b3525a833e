// Sorting inside one block.
#pragma once

#include "device.h"

namespace device {

// Bitonic sort of `size` (a power of two) keys in shared memory, largest first. All threads of the
// block call it, after a barrier behind the writes of the keys; the keys may be read when it
// returns. log2(size) * (log2(size) + 1) / 2 barriers.
template <int threads>
static __device__ __forceinline__ void sort_descending(std::uint64_t* keys, int size) {
  for (int run = 2; run <= size; run *= 2) {
    for (int step = run / 2; step > 0; step /= 2) {
      for (int i = int(threadIdx.x); i < size / 2; i += threads) {
        const int low = 2 * i - (i & (step - 1)), high = low + step;
        const bool descending = !(low & run) || run == size;
        const std::uint64_t a = keys[low], b = keys[high];
        if ((a < b) == descending && a != b) {
          keys[low] = b;
          keys[high] = a;
        }
      }
      __syncthreads();
    }
  }
}

}  // namespace device
