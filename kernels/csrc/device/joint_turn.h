// What a turn of relief looks at: the heaviest experts of the busiest rank, and every place where
// their work could go.
#pragma once

#include "joint_device.h"
#include "joint_serve.h"

namespace topoep::joint_device {

// Order of moves: lowest score, least excess, first listed.
struct Verdict {
  i64 score, excess;
  i32 order, trial;

  __device__ __forceinline__ bool before(const Verdict& o) const {
    if (score != o.score) return score < o.score;
    if (excess != o.excess) return excess < o.excess;
    return order < o.order;
  }
};

// A move of work from a heavy expert's instance to another instance of it, or to a new one.
struct Trial {
  i32 heavy, slot, amount;  // which expert of the shortlist; replica slot or -1 = the main
  i32 order;                // experts as listed, then instances by rank, then new ones by domain
};

// An expert on a rank that a turn may relieve.
struct Heavy {
  i32 expert, rank, slot, quota;  // replica slot or -1 = the main; what it executes
};

// Shared memory of a block that relieves a start.
struct Reliever {
  Served s;
  Heavy* heavy;        // [kWidth]
  i32* counters;       // heavy experts, trials, whether the turn moved
  i32* column;         // [kWidth][R] their loads
  Trial* trials;       // [kWidth * (R + M)]
  Verdict* verdicts;   // [warps]
};

PLANNER_FN void carve_reliever(const Arguments& a, Workspace& w, Reliever& f, int warps) {
  const i64 places = a.p.R + a.p.M;
  carve_served(a, w, f.s);
  f.heavy = w.take<Heavy>(kWidth);
  f.counters = w.take<i32>(3);
  f.column = w.take<i32>(i64(kWidth) * a.p.R);
  f.trials = w.take<Trial>(kWidth * places);
  f.verdicts = w.take<Verdict>(warps);
}

DEVICE_FN i32 near_in(const Served& s, int r) { return s.load[r] - s.own[r] - s.far_in[r]; }

DEVICE_FN i32 near_out(const Arguments& a, const Served& s, int r) {
  return a.at.sent[r] - s.own[r] - s.far_out[r];
}

// The rank that binds the kind's term; lowest on ties.
DEVICE_FN int busiest(const Arguments& a, const Served& s, int kind) {
  i64 weight = -1;
  int rank = a.p.R;
  for (int r = lane_id(); r < a.p.R; r += 32) {
    i64 own = 0;
    if (kind == kFar) own = s.far_in[r];
    if (kind == kLoad) own = s.load[r];
    if (kind == kNear) own = most(near_in(s, r), near_out(a, s, r));
    if (kind == kCopies) own = copy_time(a, s, r, no_change());
    if (own <= weight) continue;
    weight = own;
    rank = r;
  }
  const bool has = weight >= 0;
  const u64 top = device::warp_max(has ? u64(weight) : 0);
  return int(__reduce_min_sync(kAllLanes, has && u64(weight) == top ? u32(rank) : ~0u));
}

// Larger keys weigh more; 0: not on the list. `k`: the rank's mains, then its slots.
DEVICE_FN u64 weight_key(const Arguments& a, const Served& s, int kind, int b, int k) {
  const Problem& p = a.p;
  const i32 grain = a.at.sums[0] / kGrain;
  const int slot = k < p.e ? -1 : b * p.S + k - p.e, x = slot < 0 ? p.mains[b * p.e + k] : s.expert[slot];
  if (x < 0) return 0;
  const i32 quota = slot < 0 ? s.main_quota[x] : s.quota[slot];
  const i32 outside = slot < 0 ? s.main_outside[x] : s.outside[slot];
  i32 weight = kind == kFar ? outside : quota;
  if (kind == kNear) weight = quota - outside - least(a.column(x)[b], quota);
  return weight > grain ? u64(weight) << 32 | (0xffffffffu - u32(k)) : 0;
}

// The same for the copy port: the smallest replicas that use it. `k`: any replica slot.
DEVICE_FN u64 copy_key(const Arguments& a, const Served& s, int b, int k) {
  const int x = s.expert[k];
  if (x < 0 || (k / a.p.S != b && a.p.main[x] != b)) return 0;
  return u64(0x7fffffff - s.quota[k]) << 32 | (0xffffffffu - u32(k));
}

// The kWidth heaviest experts of the rank that is busiest in `kind`, by the calling warp.
DEVICE_FN void list_heavy(const Arguments& a, Reliever& f, int kind) {
  const Problem& p = a.p;
  const Served& s = f.s;
  const int b = busiest(a, s, kind), all = kind == kCopies ? a.replica_slots() : p.per;
  u64 last = ~u64(0);
  int n = 0;
  for (; n < kWidth; ++n) {
    u64 best = 0;
    for (int k = lane_id(); k < all; k += 32) {
      const u64 key = kind == kCopies ? copy_key(a, s, b, k) : weight_key(a, s, kind, b, k);
      if (key < last && key > best) best = key;
    }
    last = device::warp_max(best);
    if (!last) break;
    if (lane_id() > 0) continue;
    const int k = int(0xffffffffu - u32(last));
    const int slot = kind == kCopies ? k : k < p.e ? -1 : b * p.S + k - p.e;
    const int x = slot < 0 ? p.mains[b * p.e + k] : s.expert[slot];
    f.heavy[n] = {x, slot < 0 ? b : slot / p.S, slot, slot < 0 ? s.main_quota[x] : s.quota[slot]};
  }
  if (lane_id() > 0) return;
  f.counters[0] = n;
  f.counters[1] = f.counters[2] = 0;
}

// How much of `from` to move to rank t: half the gap of the port in question, without lifting the
// busiest load; of a copy, all.
DEVICE_FN i32 amount_to_move(const Served& s, int kind, const Heavy& from, i32 busiest_load, int t) {
  const int b = from.rank;
  const i32 room = busiest_load - s.load[t];
  i32 amount = from.quota;
  if (kind == kFar) amount = least((s.far_in[b] - s.far_in[t]) / 2, room);
  if (kind == kLoad) amount = (s.load[b] - s.load[t]) / 2;
  if (kind == kNear) amount = least((near_in(s, b) - near_in(s, t)) / 2, room);
  return least(amount, from.quota);
}

DEVICE_FN void add_trial(Reliever& f, const Trial& trial) {
  if (trial.amount > 0) f.trials[atomicAdd(&f.counters[1], 1)] = trial;
}

// The places in domain d for heavy expert i: its instances, and the least loaded rank with a free
// slot that has none.
template <int C>
DEVICE_FN void list_places(const Arguments& a, Reliever& f, int kind, i32 busiest_load, int i,
                           int d) {
  const Problem& p = a.p;
  const Served& s = f.s;
  const Heavy& from = f.heavy[i];
  const Ranks<C> ranks = ranks_of<C>(p, d);
  const Lanes<C> slot = slots_of(p, s, ranks, from.expert);
  const Lanes<C> empty = slots_of(p, s, ranks, -1);  // some free slot: whether there is one
  const int first_order = i * (p.R + p.M);
  u64 best = ~u64(0);
  for (int c = 0; c < C; ++c) {
    if (!ranks.has(c)) continue;
    const int t = ranks.at(c);
    if (slot[c] >= 0 || p.main[from.expert] == t) {
      const i32 amount = amount_to_move(s, kind, from, busiest_load, t);
      if (t != from.rank) add_trial(f, {i, slot[c], amount, first_order + t});
    } else if (empty[c] >= 0) {
      const u64 key = u64(s.load[t]) << 32 | u32(t);
      best = key < best ? key : best;
    }
  }
  best = device::warp_min(best);
  if (best == ~u64(0) || lane_id() > 0) return;
  const int t = int(u32(best));
  int free = t * p.S;
  while (s.expert[free] >= 0) ++free;
  const i32 amount = amount_to_move(s, kind, from, busiest_load, t);
  add_trial(f, {i, free, amount, first_order + p.R + d});
}

}  // namespace topoep::joint_device
