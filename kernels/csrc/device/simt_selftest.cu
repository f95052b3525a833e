// Kernels that are right, and kernels with one planted mistake each: what the SIMT machine must
// accept, and what it must report. tests/kernels/test_simt.py runs them by number.
#include "bulk.h"

namespace {

enum Case {
  kReverseBlock,        // out[i] = in[n-1-i] through shared memory
  kNoBarrier,           // the same without the barrier: wrong in some schedule
  kDivergentBarrier,    // two branches, a barrier in each
  kEarlyExit,           // one thread returns before a barrier
  kForgottenLane,       // a lane that its mask leaves out
  kExitedLane,          // a mask with a lane that has returned
  kOverlappingMasks,    // masks that share lanes
  kMixedCollectives,    // lanes of one warp in two different shuffles
  kHalves,              // disjoint masks of one warp at once: right
  kSums,                // prefix sums, ballots, minima and matches: right
  kWaitsForever,        // a spin on a flag that nobody sets
  kCopy,                // bulk copy there and back: right
  kCopyNoWait,          // the same, reading before the load's wait
  kCopyNoReadWait,      // the same, overwriting the source of a store
  kCopyMisaligned
};

__device__ __forceinline__ void copy(int* out, const int* in, int which, char* shared) {
  auto* barrier = reinterpret_cast<bulk::Barrier*>(shared);
  int* buffer = reinterpret_cast<int*>(shared + 128);
  if (threadIdx.x == 0) {
    bulk::init(barrier);
    const unsigned bytes = blockDim.x * sizeof(int);
    bulk::expect(barrier, bytes);
    bulk::load(buffer, in + (which == kCopyMisaligned), bytes, barrier);
  }
  __syncthreads();
  if (which != kCopyNoWait) bulk::wait(barrier, 0);
  buffer[threadIdx.x] += 1;
  __syncthreads();
  if (threadIdx.x == 0) {
    bulk::store(out, buffer, blockDim.x * sizeof(int));
    bulk::commit();
    if (which != kCopyNoReadWait) bulk::wait_read<0>();
    buffer[0] = -1;
    bulk::wait_written<0>();
  }
}

KERNEL selftest_kernel(int* out, const int* in, int which) {
  SHARED_MEMORY(shared);
  int* values = reinterpret_cast<int*>(shared);
  const unsigned i = threadIdx.x, lane = i % 32, n = blockDim.x;
  const unsigned half = lane < 16 ? 0x0000ffffu : 0xffff0000u;
  switch (which) {
    case kReverseBlock:
    case kNoBarrier:
      values[i] = in[i];
      if (which == kReverseBlock) __syncthreads();
      out[i] = values[n - 1 - i];
      return;
    case kDivergentBarrier:
      if (i % 2) {
        __syncthreads();
      } else {
        __syncthreads();
      }
      return;
    case kEarlyExit:
      if (i == 5) return;
      __syncthreads();
      return;
    case kForgottenLane:
      __syncwarp(0x7fffffffu);
      return;
    case kExitedLane:
      if (lane == 0) return;
      if (lane == 31) __syncwarp(0x80000001u);
      return;
    case kOverlappingMasks:
      if (lane < 16) {
        __syncwarp(0x0001ffffu);
      } else {
        __syncwarp(0xffff0000u);
      }
      return;
    case kMixedCollectives:
      if (lane < 16) {
        out[i] = __shfl_sync(kAllLanes, in[i], 0);
      } else {
        out[i] = __shfl_sync(kAllLanes, in[i], 1);
      }
      return;
    case kHalves:
      out[i] = int(__reduce_add_sync(half, unsigned(in[i])));
      return;
    case kSums: {
      const int sum = device::warp_prefix_sum(in[i]);
      const unsigned odd = __ballot_sync(kAllLanes, in[i] % 2 != 0);
      const unsigned alike = __match_any_sync(kAllLanes, in[i] / 4);
      const int least = __reduce_min_sync(kAllLanes, in[i]);
      out[4 * i] = sum;
      out[4 * i + 1] = int(odd);
      out[4 * i + 2] = int(alike);
      out[4 * i + 3] = least;
      return;
    }
    case kWaitsForever:
      if (i == 0) {
        while (out[0] != 1) simt::pause();
      }
      return;
    default:
      copy(out, in, which, shared);
  }
}

}  // namespace

// One block of `threads`. out has 4 * threads integers, in has threads.
extern "C" __attribute__((visibility("default"))) int topoep_simt_selftest(int* out, const int* in,
                                                                           int which,
                                                                           unsigned threads) {
  return LAUNCH(selftest_kernel, 1, threads, 128 + threads * sizeof(int), nullptr, out, in, which);
}
