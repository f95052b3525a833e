// From the best start to the Plan: a block writes the slots of one domain, for all sources.
#pragma once

#include "joint_device.h"
#include "joint_serve.h"

namespace topoep::joint_device {

// Shared memory of a block that writes.
struct Writer {
  Served s;
  i32* held;  // [g*S] replica slot of each of the domain's Plan slots for replicas, -1 = empty
};

PLANNER_FN void carve_writer(const Arguments& a, Workspace& w, Writer& f) {
  carve_served(a, w, f.s);
  f.held = w.take<i32>(i64(a.p.g) * a.p.S);
}

// The relieved start with the lowest score, the most promising on ties; -1 when the plan without
// replicas is not slower.
DEVICE_FN int choose_winner(const Arguments& a) {
  int best = 0;
  for (int i = 1; i < a.relieved; ++i) {
    if (a.at.relieved_score[i] < a.at.relieved_score[best]) best = i;
  }
  const i64 none = a.at.total_price[a.rows + Arguments::kEmpty] - a.cost.plan;
  return a.at.relieved_total[best] < none ? best : -1;
}

DEVICE_FN void read_winner(const Arguments& a, Served& s, int winner) {
  const Problem& p = a.p;
  const int size = int(blockDim.x), slots = a.replica_slots();
  const i32* from = a.at.slots + (winner < 0 ? 0 : 3 * i64(a.at.relieved_start[winner]) * slots);
  const i32* mains = a.at.mains_of + (winner < 0 ? 0 : 2 * i64(winner) * p.E);
  for (int x = int(threadIdx.x); x < p.E; x += size) {
    s.first_slot[x] = slots;
    s.main_quota[x] = mains[x];
    s.main_outside[x] = mains[p.E + x];
  }
  __syncthreads();
  for (int k = int(threadIdx.x); k < slots; k += size) {
    s.expert[k] = winner < 0 ? -1 : from[k];
    s.quota[k] = from[slots + k];
    s.outside[k] = from[2 * slots + k];
    if (s.expert[k] >= 0) atomicMin(&s.first_slot[s.expert[k]], k);
  }
  __syncthreads();
}

// How much of [a, a + length) lies in [b, b + other).
DEVICE_FN i32 overlap(i32 a, i32 length, i32 b, i32 other) {
  return most(0, least(a + length, b + other) - most(a, b));
}

// All sources' assignments for the instance of x on rank r: own rank, then own domain, then what
// leaves the domains. In a domain, the sources in ascending rank lie on one line that the parts for
// the own domain cut; over the cluster, what leaves lies on a second one that outside parts cut.
template <int C>
DEVICE_FN void write_column(const Arguments& a, const Served& s, int x, int r, i64 slot_G) {
  const Problem& p = a.p;
  const int d = p.domain_of(r);
  i32 far_first = 0, near_first = 0, quota = 0, outside = 0, own = 0;
  for (int o = 0; o <= d; ++o) {  // where this instance's parts begin on the lines
    const Ranks<C> ranks = ranks_of<C>(p, o);
    const Part<C> part = part_of(p, s, ranks, x, slots_of(p, s, ranks, x));
    const Lanes<C> demand = ranks.read(a.column(x));
    Lanes<C> far{}, near{}, mine[3]{};
    for (int c = 0; c < C; ++c) {
      const i32 taken = least(demand[c], part.quota[c]);
      if (ranks.has(c) && ranks.at(c) < r) {
        far[c] = part.outside[c];
        near[c] = part.quota[c] - part.outside[c] - taken;
      }
      if (!ranks.is(c, r)) continue;
      mine[0][c] = part.quota[c];
      mine[1][c] = part.outside[c];
      mine[2][c] = taken;
    }
    far_first += sum(far);
    if (o < d) continue;
    near_first = sum(near);
    quota = sum(mine[0]);
    outside = sum(mine[1]);
    own = sum(mine[2]);
  }
  i32 left_before = 0;
  for (int o = 0; o < p.M; ++o) {
    const Ranks<C> ranks = ranks_of<C>(p, o);
    const Part<C> part = part_of(p, s, ranks, x, slots_of(p, s, ranks, x));
    const Lanes<C> demand = ranks.read(a.column(x));
    const i32 leaving = most(0, a.demand(o, x) - part.executed);
    const Lanes<C> leaves = shares(ranks, demand, part.quota, leaving);
    const Lanes<C> left_upto = prefix_sum(ranks, leaves);
    Lanes<C> stays;
    for (int c = 0; c < C; ++c) {
      stays[c] = demand[c] - leaves[c] - least(demand[c], part.quota[c]);
    }
    const Lanes<C> stays_upto = prefix_sum(ranks, stays);
    for (int c = 0; c < C; ++c) {
      if (!ranks.has(c)) continue;
      const i32 before = left_before + left_upto[c] - leaves[c];
      i32 count = overlap(before, leaves[c], far_first, outside);
      if (o == d) {
        count += overlap(stays_upto[c] - stays[c], stays[c], near_first, quota - own - outside);
      }
      if (ranks.at(c) == r) count += own;
      a.assignments_RG[i64(ranks.at(c)) * p.G + slot_G] = count;
    }
    left_before += leaving;
  }
}

// Domain d's slots: who sits there, and all sources' assignments.
template <int C>
DEVICE_FN void write_domain(const Arguments& a, Writer& f, int d) {
  const Problem& p = a.p;
  Served& s = f.s;
  const int size = int(blockDim.x), width = p.g * p.per, first = d * p.g;
  const int slots = a.replica_slots();
  read_winner(a, s, choose_winner(a));
  for (int i = int(threadIdx.x); i < p.g; i += size) {  // replicas fill from the left
    int n = i * p.S;
    for (int k = (first + i) * p.S; k < (first + i + 1) * p.S; ++k) {
      if (s.expert[k] >= 0) f.held[n++] = k;
    }
    while (n < (i + 1) * p.S) f.held[n++] = -1;
  }
  __syncthreads();
  const auto expert_in = [&](int i) {
    const int r = i / p.per, j = i % p.per;
    if (j < p.e) return int(p.mains[(first + r) * p.e + j]);
    const int k = f.held[r * p.S + j - p.e];
    return k < 0 ? -1 : int(s.expert[k]);
  };
  const i64 at = p.slot(first, 0);
  for (int i = int(threadIdx.x); i < width; i += size) a.expert_G[at + i] = expert_in(i);
  for (int cell = int(threadIdx.x); cell < p.R * width; cell += size) {
    const int source = cell / width, x = expert_in(cell % width);
    if (x >= 0 && s.first_slot[x] < slots) continue;
    a.assignments_RG[i64(source) * p.G + at + cell % width] =
        x < 0 ? 0 : p.load[i64(source) * p.E + x];
  }
  for (int i = warp_id(); i < width; i += warps()) {
    const int x = expert_in(i);
    if (x >= 0 && s.first_slot[x] < slots) write_column<C>(a, s, x, first + i / p.per, at + i);
  }
}

}  // namespace topoep::joint_device
