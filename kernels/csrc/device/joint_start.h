// Builds one candidate in one block (planning/joint_build.py): the first warp chooses what to bring
// and divides the work over the domains; then each domain is filled by a warp, a lane for a rank.
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
    __syncwarp(kAllLanes);
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

// An item: its size, then lowest expert first. Two alike are pieces of one main: their order cannot
// show.
DEVICE_FN void add_item(i32* count, u64* items, i32 size, int x) {
  items[atomicAdd(count, 1)] = u64(size) << 32 | (0xffffffffu - u32(x));
}

DEVICE_FN void sort_items(u64* items, int count, int& sorted_size) {
  sorted_size = 1;
  while (sorted_size < count) sorted_size *= 2;
  for (int i = count + lane_id(); i < sorted_size; i += 32) items[i] = 0;
  __syncwarp(kAllLanes);
  device::warp_sort_descending(items, sorted_size);
}

// Cuts pieces off the mains of rank r until it is at the level and its mains keep no more than
// `far` from outside. A piece carries outside work first. Returns what is left of its load.
DEVICE_FN i32 shed(const Arguments& a, Builder& b, int r, i32 load, i32 level, i32 far, i32* count,
                   u64* items) {
  const Problem& p = a.p;
  const i32* mains = p.mains + r * p.e;
  i32 over = load - level, far_over = -far;
  for (int k = 0; k < p.e; ++k) far_over += b.kept_outside[mains[k]];
  while (over > 0 || far_over > 0) {
    int best = -1;
    i32 piece = 0;
    if (far_over > 0 && far_over > over) {  // the main with most outside work
      for (int k = 0; k < p.e; ++k) {
        const i32 v = least(b.kept[mains[k]], b.kept_outside[mains[k]]);
        if (v > piece) piece = v, best = mains[k];
      }
      if (best < 0) {
        far_over = 0;
        continue;
      }
      piece = least(piece, far_over);
    } else {  // the smallest main that covers `over`, else the largest
      i32 kept = 0;
      for (int k = 0; k < p.e; ++k) {
        const i32 v = b.kept[mains[k]];
        if (v > 0 && (v >= over ? kept < over || v < kept : kept < over && v > kept)) {
          kept = v;
          best = mains[k];
        }
      }
      if (best < 0) return load;
      piece = least(over, kept);
    }
    const i32 outside = least(piece, b.kept_outside[best]);
    b.kept[best] -= piece;
    b.kept_outside[best] -= outside;
    load -= piece;
    over -= piece;
    far_over -= outside;
    add_item(count, items, piece, best);
  }
  return load;
}

// The ranks of a domain while a warp fills their slots.
template <int C>
struct Filling {
  Ranks<C> ranks;
  Lanes<C> load, used, arrived;
  int free;     // slots
  int arrivals;  // far copies that one rank may receive

  // Puts x on `rank`; returns the slot.
  __device__ __forceinline__ int put(const Problem& p, Served& s, int rank, int x, i32 amount,
                                     bool foreign) {
    int slot = 0;
    for (int c = 0; c < C; ++c) {
      if (!ranks.is(c, rank)) continue;
      slot = rank * p.S + used[c]++;
      s.expert[slot] = x;
      s.quota[slot] = amount;
      load[c] += amount;
      arrived[c] += foreign;
    }
    --free;
    __syncwarp(kAllLanes);
    return __shfl_sync(kAllLanes, slot, unsigned(rank - ranks.first));
  }

  __device__ __forceinline__ void add_load(int rank, i32 amount) {
    for (int c = 0; c < C; ++c) load[c] += ranks.is(c, rank) ? amount : 0;
  }

  __device__ __forceinline__ bool open(const Problem& p, int c, bool foreign) const {
    return ranks.has(c) && used[c] < p.S && !(foreign && arrived[c] >= arrivals);
  }
};

// Places one item of `size`; false when a brought expert finds no slot.
template <int C>
DEVICE_FN bool place(const Arguments& a, Served& s, Filling<C>& f, int x, i32 size, int source,
                     i32 level, int pending) {
  const Problem& p = a.p;
  const bool foreign = source < 0;
  i32 rest = size;
  int last = -1;
  while (rest > 0) {
    const bool must = foreign && last < 0;
    if (!must && f.free <= pending) break;
    u64 best = ~u64(0);  // the smallest room that takes the rest, else the largest; lowest rank
    const Lanes<C> held = slots_of(p, s, f.ranks, x);
    for (int c = 0; c < C; ++c) {
      if (!f.open(p, c, foreign) || f.ranks.is(c, source) || held[c] >= 0) continue;
      const i64 room = i64(level) - f.load[c];
      const u64 by_room = room >= rest ? u64(room) : u64(1) << 40 | u64((i64(1) << 32) - room);
      const u64 key = by_room << 16 | u64(f.ranks.at(c) - f.ranks.first);
      best = key < best ? key : best;
    }
    best = device::warp_min(best);
    if (best == ~u64(0)) break;
    const u64 by_room = best >> 16;
    const i64 room = by_room >> 40 ? (i64(1) << 32) - i64(by_room & ((u64(1) << 40) - 1))
                                   : i64(by_room);
    if (!must && room <= 0) break;
    const bool cut = room < rest && room > 0 && f.free - 1 > pending;
    const i32 amount = cut ? i32(room) : rest;
    last = f.put(p, s, f.ranks.first + int(best & 0xffff), x, amount, foreign);
    rest -= amount;
  }
  if (foreign && last < 0) return false;
  if (rest > 0 && foreign && lane_id() == 0) s.quota[last] += rest;  // no more slots
  if (rest > 0) f.add_load(foreign ? last / p.S : source, rest);     // else it stays on the main
  return true;
}

// Fills the slots of domain d so that no rank executes more than the level, if that can be done.
// False when a brought expert finds no slot. `items` and its count are this warp's scratch.
template <int C>
DEVICE_FN bool fill(const Arguments& a, const Recipe& q, Builder& b, int d, i32 level,
                    const i32* amount, i32* count, u64* items) {
  const Problem& p = a.p;
  Filling<C> f{ranks_of<C>(p, d), {}, {}, {}, p.g * p.S, least(most_copies(p, q), p.S)};
  if (lane_id() == 0) *count = 0;
  __syncwarp(kAllLanes);
  for (int i = lane_id(); i < b.counters[0]; i += 32) {
    const int x = b.touched_expert[i];
    const i32 brought = amount[i64(i) * p.M + d];
    if (p.home(x) != d && brought > 0) add_item(count, items, brought, x);
  }
  for (int c = 0; c < C; ++c) {
    if (!f.ranks.has(c)) continue;
    for (int k = 0; k < p.e; ++k) f.load[c] += b.kept[p.mains[f.ranks.at(c) * p.e + k]];
  }
  __syncwarp(kAllLanes);
  int pending = *count, size = 0;  // pending: brought experts without a slot: each has one reserved
  __syncwarp(kAllLanes);  // the count goes on below
  if (q.whole) {
    sort_items(items, pending, size);
    for (int i = 0; i < pending; ++i) {
      u64 best = ~u64(0);  // the emptiest rank
      for (int c = 0; c < C; ++c) {
        const u64 key = u64(f.load[c]) << 32 | u32(f.ranks.at(c));
        if (f.open(p, c, true) && key < best) best = key;
      }
      best = device::warp_min(best);
      if (best == ~u64(0)) return false;
      f.put(p, b.s, int(u32(best)), int(0xffffffffu - u32(items[i])), i32(items[i] >> 32), true);
    }
    pending = 0;
    if (lane_id() == 0) *count = 0;
    __syncwarp(kAllLanes);
  }
  const i64 far = q.fill_far > 0 ? i64(a.at.sums[0]) * q.fill_far / 100 : INT32_MAX;
  for (int c = 0; c < C; ++c) {
    if (f.ranks.has(c)) {
      f.load[c] = shed(a, b, f.ranks.at(c), f.load[c], level, i32(far), count, items);
    }
  }
  __syncwarp(kAllLanes);
  const int n = *count;
  sort_items(items, n, size);
  for (int i = 0; i < n; ++i) {
    const int x = int(0xffffffffu - u32(items[i]));
    const int source = p.home(x) == d ? p.main[x] : -1;
    pending -= source < 0;
    if (!place(a, b.s, f, x, i32(items[i] >> 32), source, level, pending)) return false;
    __syncwarp(kAllLanes);
  }
  return true;
}

// The slots of the candidate of recipe `row` into `b.s`; false when they do not fit. A barrier
// follows its last write.
template <int C>
DEVICE_FN bool build(const Arguments& a, int row, Builder& b) {
  const Problem& p = a.p;
  const Recipe& q = a.table[row];
  const int size = int(blockDim.x), thread = int(threadIdx.x);
  i32* amount = a.at.amount + i64(row) * a.replica_slots() * p.M;
  const i32 *base_load = a.at.base, *base_far_in = base_load + p.R, *base_far_out = base_far_in + p.R;
  for (int r = thread; r < p.R; r += size) {
    b.copies_out[r] = 0;
    b.far_in_left[r] = base_far_in[r];
  }
  for (int d = thread; d < p.M; d += size) {
    b.copies_in[d] = b.load[d] = b.far_out_left[d] = 0;
    for (int r = d * p.g; r < (d + 1) * p.g; ++r) {
      b.load[d] += base_load[r];
      b.far_out_left[d] += base_far_out[r];
    }
  }
  for (int x = thread; x < p.E; x += size) b.touch_index[x] = 0;
  for (int k = thread; k < a.replica_slots(); k += size) b.s.expert[k] = -1;
  if (thread == 0) b.counters[1] = 0;
  __syncthreads();
  if (warp_id() == 0) {
    select_pairs(a, q, b);
    bring(a, b, amount);
    __syncwarp(kAllLanes);
    shift_work(a, b, amount);
  }
  __syncthreads();
  for (int x = thread; x < p.E; x += size) {  // before near copies relieve the mains
    const int h = p.home(x), i = b.touch_index[x] - 1;
    b.kept[x] = i < 0 ? a.at.total[x] : amount[i64(i) * p.M + h];
    b.kept_outside[x] = most(0, b.kept[x] - a.demand(h, x));
  }
  i32 level = 0;
  for (int d = lane_id(); d < p.M; d += 32) level = most(level, i32((i64(b.load[d]) + p.g - 1) / p.g));
  level = most(a.at.sums[0], __reduce_max_sync(kAllLanes, level));
  __syncthreads();
  for (int d = warp_id(); d < p.M; d += warps()) {
    const int w = warp_id();
    const bool fits = fill<C>(a, q, b, d, level, amount, b.counters + 2 + w,
                              b.items + i64(w) * b.max_items);
    if (!fits && lane_id() == 0) b.counters[1] = 1;
    __syncwarp(kAllLanes);
  }
  __syncthreads();
  return !b.counters[1];
}

// The published rule's replicas, whose plan lies in the output, with what they execute as quotas.
DEVICE_FN void take_published(const Arguments& a, Served& s) {
  const Problem& p = a.p;
  for (int k = int(threadIdx.x); k < a.replica_slots(); k += int(blockDim.x)) {
    const i64 slot = p.slot(k / p.S, p.e + k % p.S);
    i32 quota = 0;
    for (int source = 0; source < p.R; ++source) quota += a.assignments_RG[source * i64(p.G) + slot];
    s.quota[k] = quota;
    s.expert[k] = quota ? a.expert_G[slot] : -1;
  }
  __syncthreads();
}

DEVICE_FN void take_none(const Arguments& a, Served& s) {
  for (int k = int(threadIdx.x); k < a.replica_slots(); k += int(blockDim.x)) s.expert[k] = -1;
  __syncthreads();
}

}  // namespace topoep::joint_device
