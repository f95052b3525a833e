// A warp on one domain: lane l has the domain's ranks l, l + 32, ... (C of them at most), and the
// joint planner's serving rule on them (planning/joint_ports.py).
#pragma once

#include "../planner/joint_terms.h"
#include "device.h"

namespace topoep::joint_device {

using topoep::i32;
using topoep::i64;
using u32 = std::uint32_t;
using u64 = std::uint64_t;

#define DEVICE_FN static __device__ __forceinline__
#ifdef __CUDACC__
#define UNROLL _Pragma("unroll")  // where nvcc would not: Lanes must lie in registers
#else
#define UNROLL
#endif

DEVICE_FN int lane_id() { return int(threadIdx.x % 32); }
DEVICE_FN int warp_id() { return int(threadIdx.x / 32); }
DEVICE_FN int warps() { return int(blockDim.x / 32); }
DEVICE_FN i32 least(i32 a, i32 b) { return a < b ? a : b; }
DEVICE_FN i32 most(i32 a, i32 b) { return a > b ? a : b; }

// Sums over the warp of values whose total lies below 2^32.
DEVICE_FN u32 warp_sum(u32 value) { return __reduce_add_sync(kAllLanes, value); }
DEVICE_FN i32 warp_sum(i32 value) { return i32(warp_sum(u32(value))); }

// One number for each of the lane's ranks.
template <int C>
struct Lanes {
  i32 of[C];
  __device__ __forceinline__ i32& operator[](int c) { return of[c]; }
  __device__ __forceinline__ i32 operator[](int c) const { return of[c]; }
};

// The ranks of one domain.
template <int C>
struct Ranks {
  int first, count;

  __device__ __forceinline__ bool has(int c) const { return c * 32 + lane_id() < count; }
  __device__ __forceinline__ int at(int c) const { return first + c * 32 + lane_id(); }
  __device__ __forceinline__ bool is(int c, int rank) const { return has(c) && at(c) == rank; }

  __device__ __forceinline__ Lanes<C> read(const i32* from_R) const {
    Lanes<C> v;
    for (int c = 0; c < C; ++c) v[c] = has(c) ? from_R[at(c)] : 0;
    return v;
  }
  __device__ __forceinline__ void write(i32* into_R, const Lanes<C>& v) const {
    for (int c = 0; c < C; ++c) {
      if (has(c)) into_R[at(c)] = v[c];
    }
  }
};

template <int C>
DEVICE_FN i32 sum(const Lanes<C>& v) {
  i32 own = 0;
  for (int c = 0; c < C; ++c) own += v[c];
  return warp_sum(own);
}

// Sums over this rank and the lower ones of the domain.
template <int C>
DEVICE_FN Lanes<C> prefix_sum(const Ranks<C>& ranks, const Lanes<C>& v) {
  Lanes<C> upto;
  i32 below = 0;
  for (int c = 0; c < C; ++c) {
    upto[c] = below + device::warp_prefix_sum(v[c], unsigned(least(ranks.count, 32)));
    if (c + 1 < C) below = __shfl_sync(kAllLanes, upto[c], 31);
  }
  return upto;
}

// What leaves the domain of each source's `demand`, where its instances execute `quota`: in
// proportion to what the own rank does not take, prefix rounding down. `leaving`: the sum.
template <int C>
DEVICE_FN Lanes<C> shares(const Ranks<C>& ranks, const Lanes<C>& demand, const Lanes<C>& quota,
                          i32 leaving) {
  Lanes<C> share{};
  if (leaving <= 0) return share;
  Lanes<C> rest;
  for (int c = 0; c < C; ++c) rest[c] = demand[c] - least(demand[c], quota[c]);
  const Lanes<C> upto = prefix_sum(ranks, rest);
  // At the last rank: all that may leave, positive because it covers what does.
  const i32 all = __shfl_sync(kAllLanes, upto[C - 1], C == 1 ? unsigned(ranks.count - 1) : 31u);
  i32 given = 0;
  for (int c = 0; c < C; ++c) {
    const i32 cut = i32(i64(leaving) * upto[c] / all);
    const i32 below = __shfl_up_sync(kAllLanes, cut, 1u);
    if (ranks.has(c)) share[c] = cut - (lane_id() ? below : given);
    if (c + 1 < C) given = __shfl_sync(kAllLanes, cut, 31);
  }
  return share;
}

// Gives `amount` assignments from outside to the ranks: always to the one that receives least so
// far, within its room, whole levels at a time; the last few one by one in ascending rank.
template <int C>
DEVICE_FN Lanes<C> pour(Lanes<C>& far_in, Lanes<C> room, i32 amount) {
  Lanes<C> poured{};
  while (amount > 0) {
    u32 low = ~0u, next = ~0u;
    for (int c = 0; c < C; ++c) {
      if (room[c] > 0 && u32(far_in[c]) < low) low = u32(far_in[c]);
    }
    low = __reduce_min_sync(kAllLanes, low);
    i32 lowest = 0;     // ranks at the low level
    Lanes<C> before{};  // of them below this rank
    for (int c = 0; c < C; ++c) {
      const bool at_low = room[c] > 0 && u32(far_in[c]) == low;
      const unsigned alike = __ballot_sync(kAllLanes, at_low);
      before[c] = at_low ? lowest + __popc(alike & ((1u << lane_id()) - 1)) : -1;
      lowest += __popc(alike);
      if (room[c] <= 0) continue;
      const u32 stop = at_low ? low + u32(room[c]) : u32(far_in[c]);
      next = stop < next ? stop : next;
    }
    next = __reduce_min_sync(kAllLanes, next);
    const i32 step = least(i32(next - low), most(amount / lowest, 1));
    for (int c = 0; c < C; ++c) {
      const i64 used = i64(before[c]) * step;
      if (used < 0 || used >= amount) continue;
      const i32 moved = least(step, amount - i32(used));
      poured[c] += moved;
      far_in[c] += moved;
      room[c] -= moved;
    }
    const i64 given = i64(lowest) * step;
    amount = given < amount ? amount - i32(given) : 0;
  }
  return poured;
}

// Traffic of a domain's ranks, in assignments.
template <int C>
struct Ports {
  Lanes<C> load, far_in, far_out, own;
};

// What a domain's ranks execute of one expert, and how much of it comes from outside.
template <int C>
struct Part {
  Lanes<C> quota, outside;
  i32 executed;  // sum of the quotas
};

// Replaces the part `before` of an expert by `now` at the ports, and sets its outside parts. Without
// an instance all of the demand leaves the domain. `demand`: of its ranks, `here` in sum.
template <int C>
DEVICE_FN void serve(const Ranks<C>& ranks, Ports<C>& ports, const Lanes<C>& demand, i32 here,
                     const Part<C>& before, Part<C>& now) {
  const Lanes<C> left = shares(ranks, demand, before.quota, here - before.executed);
  const Lanes<C> leaves = shares(ranks, demand, now.quota, here - now.executed);
  Lanes<C> room;
  for (int c = 0; c < C; ++c) {
    const i32 own = least(demand[c], now.quota[c]);
    ports.load[c] += now.quota[c] - before.quota[c];
    ports.own[c] += own - least(demand[c], before.quota[c]);
    ports.far_out[c] += leaves[c] - left[c];
    ports.far_in[c] -= before.outside[c];
    room[c] = now.quota[c] - own;
  }
  now.outside = pour(ports.far_in, room, now.executed - here);
}

}  // namespace topoep::joint_device
