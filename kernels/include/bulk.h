// Bulk copies between global and shared memory (the TMA engine of sm_90 and later), and a model of
// them for simt.h.
//
// Addresses and sizes are multiples of 16 bytes; one phase of a barrier expects less than 1 MiB.
//   load   global to shared: expect(bytes) on the barrier first; the bytes are there once
//          wait(barrier, parity) returns. Parity alternates from 0 with each use of the barrier.
//   store  shared to global, in groups closed by commit(). wait_read<n>: all but the newest n groups
//          no longer need their shared bytes; wait_written<n>: they are written.
// Loads, stores, commit and the waits on groups belong to one thread of a block.
//
// The model moves bytes as late as its contract allows, and fills the target of a load with 0xEE
// until then: a forgotten wait shows. It knows no tensor maps, no multicast, no reductions.
#pragma once

#include "device.h"

#ifdef __CUDACC__

namespace bulk {

using Barrier = std::uint64_t;

static __device__ __forceinline__ std::uint32_t address(const void* shared) {
  return std::uint32_t(__cvta_generic_to_shared(shared));
}

#if __CUDA_ARCH__ >= 900

// One thread arrives in each phase: the one that calls expect.
static __device__ __forceinline__ void init(Barrier* barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(address(barrier)) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

static __device__ __forceinline__ void expect(Barrier* barrier, std::uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address(barrier)),
               "r"(bytes)
               : "memory");
}

static __device__ __forceinline__ void wait(Barrier* barrier, std::uint32_t parity) {
  asm volatile(
      "{\n\t.reg .pred done;\n"
      "again:\n\t"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n\t"
      "@!done bra again;\n\t}" ::"r"(address(barrier)),
      "r"(parity)
      : "memory");
}

static __device__ __forceinline__ void load(void* shared, const void* global, std::uint32_t bytes,
                                            Barrier* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          address(shared)),
      "l"(global), "r"(bytes), "r"(address(barrier))
      : "memory");
}

static __device__ __forceinline__ void store(void* global, const void* shared,
                                             std::uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global),
               "r"(address(shared)), "r"(bytes)
               : "memory");
}

static __device__ __forceinline__ void commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

template <int newest>
static __device__ __forceinline__ void wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(newest) : "memory");
}

template <int newest>
static __device__ __forceinline__ void wait_written() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(newest) : "memory");
}

#endif  // __CUDA_ARCH__ >= 900

}  // namespace bulk

#else

namespace bulk {

struct Barrier {
  std::uint32_t phase, arrivals_left;
  std::int64_t bytes_left;
};

void init(Barrier* barrier);
void expect(Barrier* barrier, std::uint32_t bytes);
void wait(Barrier* barrier, std::uint32_t parity);
void load(void* shared, const void* global, std::uint32_t bytes, Barrier* barrier);
void store(void* global, const void* shared, std::uint32_t bytes);
void commit();
void wait_groups(int newest, bool written);

template <int newest>
void wait_read() {
  wait_groups(newest, false);
}

template <int newest>
void wait_written() {
  wait_groups(newest, true);
}

}  // namespace bulk

#endif
