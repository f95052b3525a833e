// One source for two machines: nvcc compiles the kernels for a GPU, g++ for the threads of simt.h.
//
// KERNEL f(...)       a kernel; launch it with LAUNCH(f, blocks, threads, shared bytes, stream, ...),
//                     whose value is an error code (0 = none), explained by topoep_device_error
// SHARED_MEMORY(p)    char* p: the block's dynamic shared memory, 128-byte aligned
#pragma once

#include <cstdint>

#ifdef __CUDACC__

#include <cuda_runtime.h>

#define KERNEL static __global__ void
#define SHARED_MEMORY(name) extern __shared__ __align__(128) char name[]

namespace device {

using Stream = cudaStream_t;

// Raises the kernel's limit of dynamic shared memory where 48 KiB do not do.
template <class... Parameters>
cudaError_t allow_shared(void (*kernel)(Parameters...), std::size_t bytes) {
  if (bytes <= 48 * 1024) return cudaSuccess;
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(bytes));
}

template <class... Parameters, class... Arguments>
int launch(void (*kernel)(Parameters...), unsigned blocks, unsigned threads, std::size_t shared,
           Stream stream, Arguments... arguments) {
  if (cudaError_t error = allow_shared(kernel, shared)) return error;
  kernel<<<blocks, threads, shared, stream>>>(arguments...);
  return cudaGetLastError();
}

// One cluster of all blocks, so that `cluster_barrier` can order them.
template <class... Parameters, class... Arguments>
int launch_cluster(void (*kernel)(Parameters...), unsigned blocks, unsigned threads,
                   std::size_t shared, Stream stream, Arguments... arguments) {
  if (cudaError_t error = allow_shared(kernel, shared)) return error;
  if (blocks > 8) {
    cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  }
  cudaLaunchConfig_t config{};
  config.gridDim = blocks;
  config.blockDim = threads;
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = blocks;
  cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
  config.attrs = &cluster;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...);
}

// What the current device grants; asked once per process: one process drives one kind of device.
inline int attribute(cudaDeviceAttr which) {
  int device = 0, value = 0;
  if (cudaGetDevice(&device) == cudaSuccess) cudaDeviceGetAttribute(&value, which, device);
  return value;
}

inline std::int64_t shared_limit() {
  static const int bytes = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  return bytes;
}

// Blocks that one cluster may hold: 16 on sm_90 and later (8 are portable), none before.
inline int cluster_limit() {
  static const int major = attribute(cudaDevAttrComputeCapabilityMajor);
  return major >= 9 ? 16 : 0;
}

inline int processors() {
  static const int count = attribute(cudaDevAttrMultiProcessorCount);
  return count;
}

}  // namespace device

// All blocks of the cluster, and what they wrote before: shared and global memory alike.
static __device__ __forceinline__ void cluster_barrier() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::
                   : "memory");
#endif
}

#define LAUNCH(kernel, blocks, threads, shared, stream, ...) \
  ::device::launch(kernel, blocks, threads, shared, stream, __VA_ARGS__)

#else

#include "simt.h"

#define KERNEL static void
#define SHARED_MEMORY(name) char* name = ::simt::shared_memory()

namespace device {

using Stream = void*;

inline std::int64_t shared_limit() { return 232448; }  // as sm_90 grants: 227 KiB
inline int processors() { return 4; }

template <class Body>
int launch(unsigned blocks, unsigned threads, std::size_t shared, Body body) {
  return simt::launch(
      blocks, threads, shared, [](void* b) { (*static_cast<Body*>(b))(); }, &body);
}

}  // namespace device

#define LAUNCH(kernel, blocks, threads, shared, stream, ...) \
  ((void)(stream), ::device::launch(blocks, threads, shared, [=] { kernel(__VA_ARGS__); }))

#endif

constexpr unsigned kAllLanes = 0xffffffffu;

namespace device {

// Error codes of the C functions, beside those of the launch (cudaError_t, or simt.h's 1).
constexpr int kTooLarge = -1;  // the shape's state does not fit into shared memory

// Largest value over the lanes of a full warp.
static __device__ __forceinline__ std::uint64_t warp_max(std::uint64_t value) {
  const unsigned high = __reduce_max_sync(kAllLanes, unsigned(value >> 32));
  const unsigned low = __reduce_max_sync(kAllLanes, unsigned(value >> 32) == high ? unsigned(value) : 0u);
  return std::uint64_t(high) << 32 | low;
}

static __device__ __forceinline__ std::uint64_t warp_min(std::uint64_t value) {
  return ~warp_max(~value);
}

// Sum over this lane and the ones below it, for the first `lanes` lanes.
template <class T>
static __device__ __forceinline__ T warp_prefix_sum(T value, unsigned lanes = 32) {
  const unsigned lane = threadIdx.x % 32;
  for (unsigned by = 1; by < lanes; by *= 2) {
    const T below = __shfl_up_sync(kAllLanes, value, by);
    if (lane >= by) value += below;
  }
  return value;
}

}  // namespace device
