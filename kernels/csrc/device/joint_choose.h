// What a candidate brings into which domain, and how much each domain then executes: by one warp
// (planning/joint_build.py: select, bring, shift).
#pragma once

#include "joint_device.h"
#include "joint_serve.h"
#include "sort.h"

namespace topoep::joint_device {

// Shared memory of a block that builds a start.
struct Builder {
  Served s;
  u32* chosen;                           // [4*R*S / 32] bits of the chosen pairs
  i32 *copies_out, *far_in_left;         // [R]
  i32 *copies_in, *far_out_left, *load;  // [M]; load: what a domain executes
  i32 *touched_expert, *touch_index;     // [R*S]; [E] position in it + 1, 0 = untouched
  i32 *kept, *kept_outside;              // [E] what mains keep when pieces are cut off
  i32* counters;                         // [2 + warps]: experts touched, void, items of each warp
  u64* items;                            // [warps][max_items] work that looks for a slot
  int max_items;                         // a power of two
};

PLANNER_FN void carve_builder(const Arguments& a, Workspace& w, Builder& b, int warps) {
  const Problem& p = a.p;
  carve_served(a, w, b.s);
  b.chosen = w.take<u32>((a.max_pairs() + 31) / 32);
  b.copies_out = w.take<i32>(p.R);
  b.far_in_left = w.take<i32>(p.R);
  b.copies_in = w.take<i32>(p.M);
  b.far_out_left = w.take<i32>(p.M);
  b.load = w.take<i32>(p.M);
  b.touched_expert = w.take<i32>(a.replica_slots());
  b.touch_index = w.take<i32>(p.E);
  b.kept = w.take<i32>(p.E);
  b.kept_outside = w.take<i32>(p.E);
  b.counters = w.take<i32>(2 + warps);
  // Every cut takes all that one main keeps, or ends one of a rank's two excesses.
  b.max_items = device::padded(p.g * p.S + 2 * p.g * (p.e + 1));
  b.items = w.take<u64>(i64(b.max_items) * (warps < p.M ? warps : p.M));
}

PLANNER_FN int most_copies(const Problem& p, const Recipe& q) {
  const int copies = (q.copies * (p.M - 1) + 2) / 3;
  return copies > 1 ? copies : 1;
}

// Greedy over the pairs, most demanded first: relieve main ranks that receive too much (pass 0),
// then domains that send too much (pass 1).
DEVICE_FN void select_pairs(const Arguments& a, const Recipe& q, Builder& b) {
  const Problem& p = a.p;
  const int most_out = most_copies(p, q), most_in = p.g * p.S * q.share / 8;
  const int pairs = a.at.sums[1];
  const i64 far = i64(a.at.sums[0]) * q.select_far / 100;
  for (int pass = 0; pass < 2; ++pass) {
    for (int start = 0; start < pairs; start += 32) {
      const int i = start + lane_id();
      const int d = i < pairs ? a.at.pair_domain[i] : 0;
      const int m = i < pairs ? p.main[a.at.pair_expert[i]] : 0;
      u32 chosen = pass == 0 ? 0 : b.chosen[start / 32], behind = kAllLanes;
      for (;;) {  // what does not qualify now never will: the sums only sink
        const bool wanted = pass == 0 ? b.far_in_left[m] > far : b.far_out_left[d] > far * p.g;
        const bool fits = b.copies_in[d] < most_in && b.copies_out[m] < most_out;
        const u32 open = __ballot_sync(kAllLanes, i < pairs && wanted && fits) & behind & ~chosen;
        if (!open) break;
        const int lane = __ffs(open) - 1;
        if (lane_id() == lane) {
          const i32 demand = a.at.pair_demand[i];
          ++b.copies_in[d];
          ++b.copies_out[m];
          b.far_in_left[m] -= demand;
          b.far_out_left[d] -= demand;
        }
        chosen |= 1u << lane;
        behind = lane == 31 ? 0 : kAllLanes << (lane + 1);
        __syncwarp(kAllLanes);
      }
      if (lane_id() == 0) b.chosen[start / 32] = chosen;
      __syncwarp(kAllLanes);
    }
  }
}

// amount[i][d] of every touched expert, in the order of their first pairs: each domain executes its
// own demand where the expert is hosted, home executes the rest.
DEVICE_FN void bring(const Arguments& a, Builder& b, i32* amount) {
  const Problem& p = a.p;
  const int pairs = a.at.sums[1];
  int touched = 0;
  for (int start = 0; start < pairs; start += 32) {
    const int i = start + lane_id();
    const bool chosen = b.chosen[start / 32] >> lane_id() & 1;
    const int x = chosen ? a.at.pair_expert[i] : -1 - lane_id();
    const unsigned alike = __match_any_sync(kAllLanes, x);
    const bool first = chosen && !b.touch_index[x] && lane_id() == __ffs(alike) - 1;
    const unsigned firsts = __ballot_sync(kAllLanes, first);
    if (first) {
      const int row = touched + __popc(firsts & ((1u << lane_id()) - 1)), home = p.home(x);
      b.touched_expert[row] = x;
      b.touch_index[x] = row + 1;
      for (int t = 0; t < p.M; ++t) amount[i64(row) * p.M + t] = t == home ? a.at.total[x] : -1;
    }
    touched += __popc(firsts);
    __syncwarp(kAllLanes);
    if (chosen) {
      const int d = a.at.pair_domain[i], home = p.home(x);
      const i32 demand = a.at.pair_demand[i];
      i32* row = amount + i64(b.touch_index[x] - 1) * p.M;
      row[d] = demand;
      atomicAdd(&row[home], -demand);
      atomicAdd(&b.load[d], demand);
      atomicAdd(&b.load[home], -demand);
    }
  }
  if (lane_id() == 0) b.counters[0] = touched;
}

// Levels the domains: the fullest hands work to the emptiest, spread over all experts that both
// host.
DEVICE_FN void shift_work(const Arguments& a, Builder& b, i32* amount) {
  const Problem& p = a.p;
  const int touched = b.counters[0];
  const i64 level = i64(a.at.sums[0]) * p.g;
  for (int step = 0; step < 2 * p.M; ++step) {
    u64 full = 0, idle = ~u64(0);
    for (int d = lane_id(); d < p.M; d += 32) {
      const u64 load = u64(b.load[d]) << 32;
      full = load + (0xffffffffu - u32(d)) > full ? load + (0xffffffffu - u32(d)) : full;
      idle = load + u32(d) < idle ? load + u32(d) : idle;
    }
    full = device::warp_max(full);
    idle = device::warp_min(idle);
    const int h = int(0xffffffffu - u32(full)), t = int(u32(idle));
    const i64 load_h = i64(full >> 32), load_t = i64(idle >> 32);
    i32 shared = 0;
    for (int i = lane_id(); i < touched; i += 32) {
      const i32* row = amount + i64(i) * p.M;
      if (row[h] >= 0 && row[t] >= 0) shared += row[h];
    }
    shared = warp_sum(shared);
    i64 need = load_h - level < level - load_t ? load_h - level : level - load_t;
    need = need < shared ? need : shared;
    if (need <= 0) return;
    i32 before = 0, given = 0;
    for (int start = 0; start < touched; start += 32) {
      const int i = start + lane_id();
      i32* row = amount + i64(i < touched ? i : 0) * p.M;
      const bool both = i < touched && row[h] >= 0 && row[t] >= 0;
      const i32 upto = before + device::warp_prefix_sum(both ? row[h] : 0);
      const i32 cut = i32(need * upto / shared);  // prefix rounding
      const i32 below = __shfl_up_sync(kAllLanes, cut, 1u);
      if (both) {
        const i32 moved = cut - (lane_id() ? below : given);
        row[h] -= moved;
        row[t] += moved;
      }
      before = __shfl_sync(kAllLanes, upto, 31);
      given = __shfl_sync(kAllLanes, cut, 31);
    }
    if (lane_id() == 0) {
      b.load[h] -= i32(need);
      b.load[t] += i32(need);
    }
    __syncwarp(kAllLanes);
    if (load_h - need > level && load_t + need < level) return;  // nothing left to share
  }
}

}  // namespace topoep::joint_device
