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
DEVICE_FN Lanes<C> prefix_sum(const Lanes<C>& v) {
  Lanes<C> upto;
  i32 below = 0;
  for (int c = 0; c < C; ++c) {
    upto[c] = below + device::warp_prefix_sum(v[c]);
    below = __shfl_sync(kAllLanes, upto[c], 31);
  }
  return upto;
}

// What of each source's `demand` leaves the domain, whose instances execute `quota`: in proportion
// to what the own rank does not take, prefix rounding down. `here`: sum of the demand.
template <int C>
DEVICE_FN Lanes<C> shares(const Lanes<C>& demand, const Lanes<C>& quota, i32 here) {
  Lanes<C> share{};
  const i32 leaving = here - sum(quota);
  if (leaving <= 0) return share;
  Lanes<C> rest;
  for (int c = 0; c < C; ++c) rest[c] = demand[c] - least(demand[c], quota[c]);
  const Lanes<C> upto = prefix_sum(rest);
  const i32 all = __shfl_sync(kAllLanes, upto[C - 1], 31);  // positive: it covers what leaves
  i32 given = 0;
  for (int c = 0; c < C; ++c) {
    const i32 cut = i32(i64(leaving) * upto[c] / all);
    const i32 below = __shfl_up_sync(kAllLanes, cut, 1u);
    share[c] = cut - (lane_id() ? below : given);
    given = __shfl_sync(kAllLanes, cut, 31);
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
    i32 lowest = 0;  // ranks at the low level
    for (int c = 0; c < C; ++c) {
      if (room[c] <= 0) continue;
      const bool at_low = u32(far_in[c]) == low;
      const u32 stop = at_low ? low + u32(room[c]) : u32(far_in[c]);
      lowest += at_low;
      next = stop < next ? stop : next;
    }
    next = __reduce_min_sync(kAllLanes, next);
    const i32 step = least(i32(next - low), most(amount / warp_sum(lowest), 1));
    i32 before = 0, given = 0;
    for (int c = 0; c < C; ++c) {
      const bool takes = room[c] > 0 && u32(far_in[c]) == low;
      const unsigned takers = __ballot_sync(kAllLanes, takes);
      const i64 used = i64(before + __popc(takers & ((1u << lane_id()) - 1))) * step;
      const i32 moved = takes && used < amount ? least(step, amount - i32(used)) : 0;
      before += __popc(takers);
      poured[c] += moved;
      far_in[c] += moved;
      room[c] -= moved;
      given += moved;
    }
    amount -= warp_sum(given);
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
};

// Replaces the part `before` of an expert by `quota` at the ports; returns the outside parts.
// Without an instance all of the demand leaves the domain. `demand`: of its ranks, `here` in sum.
template <int C>
DEVICE_FN Lanes<C> serve(Ports<C>& ports, const Lanes<C>& demand, i32 here, const Part<C>& before,
                         const Lanes<C>& quota) {
  const Lanes<C> left = shares(demand, before.quota, here), leaves = shares(demand, quota, here);
  Lanes<C> room;
  for (int c = 0; c < C; ++c) {
    const i32 own = least(demand[c], quota[c]);
    ports.load[c] += quota[c] - before.quota[c];
    ports.own[c] += own - least(demand[c], before.quota[c]);
    ports.far_out[c] += leaves[c] - left[c];
    ports.far_in[c] -= before.outside[c];
    room[c] = quota[c] - own;
  }
  return pour(ports.far_in, room, most(0, sum(quota) - here));
}

}  // namespace topoep::joint_device
