// What the plan asks of the network: one put for each replica slot and part whose main instance is on
// another rank. Both ends derive it, so nothing but the bytes and a signal travels. Shared by the
// kernels of gin.cu and by the model that tests run on the CPU.
//
// Letters: R ranks, E experts, e = E/R mains a rank, S replica slots a rank. Job (slot g of R*S, part
// of kParts) is number g * kParts + part; jobs go round robin over kBlocks blocks, and a block uses
// one GIN context: signals are counted by each context on its own.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define GIN_INLINE __host__ __device__ inline
#else
#define GIN_INLINE inline
#endif

namespace gin {

using i32 = std::int32_t;
using i64 = std::int64_t;

constexpr int kBlocks = 8, kParts = 3;  // parts: w1, w2, w3

struct Plan {
  const i32* expert_G;  // [R * (e + S)]
  const i32* place;     // [E] rank * e + index of the main
  int rank, R, e, S;
  i64 bytes;      // of one part of an expert
  int gradients;  // 0: parameters to replicas, 1: gradients to mains
};

struct Message {
  int from, to;        // ranks
  i64 source, target;  // bytes from the start of the part's buffer on the two ranks
};

GIN_INLINE int jobs(const Plan& p) { return p.R * p.S * kParts; }

// False when the job's slot is empty.
GIN_INLINE bool put_of(const Plan& p, int job, Message& put) {
  const int g = job / kParts, host = g / p.S, slot = g % p.S;
  const i32 expert = p.expert_G[host * (p.e + p.S) + p.e + slot];
  if (expert < 0) return false;
  const int home = p.place[expert] / p.e, index = p.place[expert] % p.e;
  if (p.gradients) {
    put = {host, home, slot * p.bytes, (i64(host) * p.e + index) * p.bytes};
  } else {
    put = {home, host, index * p.bytes, slot * p.bytes};
  }
  return true;
}

GIN_INLINE int context_of(int job, int contexts) { return job % kBlocks % contexts; }

// The signal at a receiver that counts what `from` puts there, of either direction.
GIN_INLINE int signal_of(const Plan& p, int from) { return p.gradients * p.R + from; }

// Puts of this plan from `from` to this rank that go through `context`.
GIN_INLINE int arriving(const Plan& p, int from, int context, int contexts) {
  int puts = 0;
  Message put;
  for (int job = 0; job < jobs(p); ++job) {
    if (context_of(job, contexts) != context || !put_of(p, job, put)) continue;
    puts += put.from == from && put.to == p.rank;
  }
  return puts;
}

}  // namespace gin
