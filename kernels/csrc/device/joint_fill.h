// Builds one candidate in one block (planning/joint_build.py): one warp chooses what to bring, then
// each domain's slots are filled by a warp, a lane for a rank.
#pragma once

#include "joint_choose.h"
#include "sort.h"

namespace topoep::joint_device {

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
  UNROLL
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
  UNROLL
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

// The slots of the candidate of recipe `row` into `b.s`; false when they do not fit.
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
  }
  __syncthreads();
  return !b.counters[1];
}

}  // namespace topoep::joint_device
