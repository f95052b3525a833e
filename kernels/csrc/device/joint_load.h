// What the joint planner computes once per load: sums, ports without replicas, and the pairs of a
// domain and an expert worth bringing there.
#pragma once

#include "joint_device.h"
#include "sort.h"

namespace topoep::joint_device {

// Shared memory of the block that lists the pairs.
struct PairScratch {
  u64* keys;  // [4*R*S, rounded up to a power of two]
  i32* sums;  // [32] of the warps
  i32* filled;
};

PLANNER_FN void carve_pairs(const Arguments& a, Workspace& w, PairScratch& s) {
  s.keys = w.take<u64>(device::padded(int(a.max_pairs())));
  s.sums = w.take<i32>(32);
  s.filled = w.take<i32>(1);
}

// Domain d's sources: demand, the load by expert, and the ports that need no other domain. A block
// a domain; `shared`: [E].
DEVICE_FN void sum_domain(const Arguments& a, int d, i32* main) {
  const Problem& p = a.p;
  const int size = int(blockDim.x), first = d * p.g;
  for (int i = int(threadIdx.x); i < p.E; i += size) {
    const int x = p.mains[i];
    main[x] = i / p.e;
    if (d > 0) continue;
    a.at.main[x] = i / p.e;
    a.at.main_index[x] = i % p.e;
  }
  for (int x = int(threadIdx.x); x < p.E; x += size) {
    i32 demand = 0;
    for (int source = first; source < first + p.g; ++source) {
      const i32 count = p.load[i64(source) * p.E + x];
      demand += count;
      a.at.column[i64(x) * p.R + source] = count;
    }
    a.at.demand[i64(d) * p.E + x] = demand;
  }
  __syncthreads();
  for (int r = first + warp_id(); r < first + p.g; r += warps()) {
    i32 sent = 0, inside = 0, own = 0;
    for (int x = lane_id(); x < p.E; x += 32) {
      const i32 count = p.load[i64(r) * p.E + x];
      sent += count;
      inside += main[x] / p.g == d ? count : 0;
      own += main[x] == r ? count : 0;
    }
    sent = warp_sum(sent);
    inside = warp_sum(inside);
    own = warp_sum(own);
    if (lane_id() > 0) continue;
    a.at.sent[r] = sent;
    a.at.base[2 * p.R + r] = sent - inside;
    a.at.base[3 * p.R + r] = own;
  }
}

// Totals, loads and far in-ports of all ranks, the mean. One block; a barrier follows.
DEVICE_FN void sum_cluster(const Arguments& a) {
  const Problem& p = a.p;
  for (int x = int(threadIdx.x); x < p.E; x += int(blockDim.x)) {
    i32 total = 0;
    for (int d = 0; d < p.M; ++d) total += a.demand(d, x);
    a.at.total[x] = total;
  }
  __syncthreads();
  for (int r = warp_id(); r < p.R; r += warps()) {
    i32 load = 0, far_in = 0;
    for (int k = r * p.e + lane_id(); k < (r + 1) * p.e; k += 32) {
      load += a.at.total[p.mains[k]];
      far_in += a.outside_demand(p.mains[k]);
    }
    load = warp_sum(load);
    far_in = warp_sum(far_in);
    if (lane_id() > 0) continue;
    a.at.base[r] = load;
    a.at.base[p.R + r] = far_in;
  }
  if (warp_id() > 0) return;
  i32 sent = 0;
  for (int r = lane_id(); r < p.R; r += 32) sent += a.at.sent[r];
  sent = warp_sum(sent);
  if (lane_id() == 0) a.at.sums[0] = i32((i64(sent) + p.R - 1) / p.R);
}

// Larger keys come first: by demand, then lowest expert, then lowest domain; no two are equal. 0:
// not worth bringing, because it brings less than half the price of a far copy in far assignments.
DEVICE_FN u64 pair_key(const Arguments& a, int d, int x) {
  const i32 demand = a.demand(d, x);
  if (demand < a.least_demand || a.p.home(x) == d) return 0;
  return u64(demand) << 32 | (0xffffffffu - u32(x * a.p.M + d));
}

// Sum of `value` over the block; `shared` holds a number a warp.
DEVICE_FN i32 block_sum(i32 value, i32* shared) {
  value = warp_sum(value);
  __syncthreads();  // behind the reads of the call before
  if (lane_id() == 0) shared[warp_id()] = value;
  __syncthreads();
  return warp_sum(lane_id() < warps() ? shared[lane_id()] : 0);
}

// The first pairs' keys, sorted; how many there are. Where there are more than there is room for,
// the smallest key that remains is found bit by bit.
DEVICE_FN int sort_pairs(const Arguments& a, PairScratch& s) {
  const Problem& p = a.p;
  const int room = int(a.max_pairs());
  const int size = int(blockDim.x), all = p.M * p.E;
  const auto key_of = [&](int i) { return pair_key(a, i % p.M, i / p.M); };
  const auto count_from = [&](u64 cut) {
    i32 own = 0;
    for (int i = int(threadIdx.x); i < all; i += size) own += key_of(i) >= cut;
    return block_sum(own, s.sums);
  };
  u64 cut = 1;
  int count = count_from(cut);
  if (count > room) {
    cut = 0;
    for (u64 bit = u64(1) << 62; bit > 0; bit >>= 1) {
      // Bits between the expert's number and the demand are set in every key.
      if (bit < (u64(1) << 32) && bit >= u64(device::padded(all))) {
        cut |= bit;
        continue;
      }
      if (count_from(cut | bit) >= room) cut |= bit;
    }
    count = room;
  }
  if (threadIdx.x == 0) *s.filled = 0;
  const int sorted = device::padded(count);
  __syncthreads();
  for (int i = int(threadIdx.x); i < all; i += size) {
    const u64 key = key_of(i);
    if (key >= cut) s.keys[atomicAdd(s.filled, 1)] = key;  // sorted below
  }
  for (int i = count + int(threadIdx.x); i < sorted; i += size) s.keys[i] = 0;
  __syncthreads();
  device::block_sort_descending(s.keys, sorted);
  return count;
}

DEVICE_FN void list_pairs(const Arguments& a, PairScratch& s) {
  const int count = sort_pairs(a, s);
  for (int i = int(threadIdx.x); i < count; i += int(blockDim.x)) {
    const int id = int(0xffffffffu - u32(s.keys[i]));
    a.at.pair_domain[i] = id % a.p.M;
    a.at.pair_expert[i] = id / a.p.M;
    a.at.pair_demand[i] = i32(s.keys[i] >> 32);
  }
  if (threadIdx.x == 0) a.at.sums[1] = count;
}

}  // namespace topoep::joint_device
