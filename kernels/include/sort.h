// Sorting inside one block or one warp.
#pragma once

#include "device.h"

namespace device {

// The least power of two that is not below n.
static __host__ __device__ __forceinline__ int padded(int n) {
  int size = 1;
  while (size < n) size *= 2;
  return size;
}

// Bitonic sort of `size` (a power of two) keys in shared memory, largest first, by `threads` threads
// of which the caller is number `thread`. All call it, after a barrier behind the writes of the
// keys; the keys may be read when it returns. log2(size) * (log2(size) + 1) / 2 barriers.
template <class Barrier>
static __device__ __forceinline__ void sort_descending(std::uint64_t* keys, int size, int thread,
                                                       int threads, Barrier barrier) {
  for (int run = 2; run <= size; run *= 2) {
    for (int step = run / 2; step > 0; step /= 2) {
      for (int i = thread; i < size / 2; i += threads) {
        const int low = 2 * i - (i & (step - 1)), high = low + step;
        const bool descending = !(low & run) || run == size;
        const std::uint64_t a = keys[low], b = keys[high];
        if ((a < b) == descending && a != b) {
          keys[low] = b;
          keys[high] = a;
        }
      }
      barrier();
    }
  }
}

static __device__ __forceinline__ void block_sort_descending(std::uint64_t* keys, int size) {
  sort_descending(keys, size, int(threadIdx.x), int(blockDim.x), [] { __syncthreads(); });
}

static __device__ __forceinline__ void warp_sort_descending(std::uint64_t* keys, int size) {
  sort_descending(keys, size, int(threadIdx.x % 32), 32, [] { __syncwarp(kAllLanes); });
}

}  // namespace device
