// State of the joint planner on the device: what its launches hand on in global memory, and what a
// block that builds, prices or relieves one start keeps in shared memory.
//
// Letters as in planner/problem.h; D[d,x] is `demand`.
#pragma once

#include "../planner/problem.h"
#include "joint_lanes.h"

namespace topoep::joint_device {

using namespace topoep::joint;

constexpr int kRecipes = 16;  // most rows of the table
constexpr i64 kVoid = INT64_MAX;  // promise of a start that does not fit

// In global memory: written by one launch, read by later ones.
struct Tables {
  i32 *main, *main_index, *demand;  // Problem's
  i32* column;                      // [E][R] the load, by expert
  i32* total;                       // [E]
  i32* sent;                        // [R]
  i32* base;                        // [4][R] ports without replicas: load, far in, far out, own
  i32* sums;                        // mean of the rank loads rounded up; number of pairs
  i32 *pair_domain, *pair_expert, *pair_demand;  // [4*R*S] worth bringing, most demanded first
  i32* amount;  // [rows][R*S][M] executed in a domain of a brought expert; -1 = not hosted
  i32* slots;   // [starts][3][R*S] expert, quota, outside part
  i64 *promise, *total_price;      // [starts] before relief
  i64 *relieved_score, *relieved_total;  // [relieved]
  i32* relieved_start;             // [relieved]
  i32* mains_of;                   // [relieved][2][E] quota and outside part of the mains
};

struct Arguments {
  Problem p;  // `mains`: by rank of the main instance, then by id; no `load` beyond the first launch
  JointCosts cost;
  Recipe table[kRecipes];
  int rows, rounds, relieved;
  i32 least_demand;  // of a pair worth bringing
  Tables at;
  i32 *expert_G, *assignments_RG;

  // The table's rows, then these: a further one is listed here and taken in joint_start_kernel.
  enum Rule { kPublished, kEmpty, kLevelled, kRules };
  PLANNER_FN int starts() const { return rows + kRules; }
  PLANNER_FN int replica_slots() const { return p.R * p.S; }
  PLANNER_FN i64 max_pairs() const { return 4 * i64(replica_slots()); }
  PLANNER_FN i32 demand(int d, int x) const { return at.demand[i64(d) * p.E + x]; }
  PLANNER_FN i32 outside_demand(int x) const { return at.total[x] - demand(p.home(x), x); }
  PLANNER_FN const i32* column(int x) const { return at.column + i64(x) * p.R; }
};

PLANNER_FN i64 carve_tables(const Arguments& a, char* base, Tables& t) {
  const Problem& p = a.p;
  const i64 slots = a.replica_slots();
  Workspace w(base);
  t.main = w.take<i32>(p.E);
  t.main_index = w.take<i32>(p.E);
  t.demand = w.take<i32>(i64(p.M) * p.E);
  t.column = w.take<i32>(i64(p.E) * p.R);
  t.total = w.take<i32>(p.E);
  t.sent = w.take<i32>(p.R);
  t.base = w.take<i32>(4 * i64(p.R));
  t.sums = w.take<i32>(2);
  t.pair_domain = w.take<i32>(a.max_pairs());
  t.pair_expert = w.take<i32>(a.max_pairs());
  t.pair_demand = w.take<i32>(a.max_pairs());
  t.amount = w.take<i32>(a.rows * slots * p.M);
  t.slots = w.take<i32>(3 * a.starts() * slots);
  t.promise = w.take<i64>(a.starts());
  t.total_price = w.take<i64>(a.starts());
  t.relieved_score = w.take<i64>(a.relieved);
  t.relieved_total = w.take<i64>(a.relieved);
  t.relieved_start = w.take<i32>(a.relieved);
  t.mains_of = w.take<i32>(2 * i64(a.relieved) * p.E);
  return w.used();
}

// A start with its exact serving, in shared memory.
struct Served {
  i32 *expert, *quota, *outside;        // [R*S] -1 = empty; assignments executed; from outside
  i32 *main_quota, *main_outside;       // [E] the same of the mains
  i32* first_slot;                      // [E] lowest replica slot, R*S = none
  i32 *load, *far_in, *far_out, *own;   // [R] ports
  i32 *in_far, *in_near, *out_far, *out_near;  // [R] copies
  DomainPeaks* peaks;                   // [M]
};

PLANNER_FN void carve_served(const Arguments& a, Workspace& w, Served& s) {
  const Problem& p = a.p;
  s.expert = w.take<i32>(a.replica_slots());
  s.quota = w.take<i32>(a.replica_slots());
  s.outside = w.take<i32>(a.replica_slots());
  s.main_quota = w.take<i32>(p.E);
  s.main_outside = w.take<i32>(p.E);
  s.first_slot = w.take<i32>(p.E);
  s.load = w.take<i32>(p.R);
  s.far_in = w.take<i32>(p.R);
  s.far_out = w.take<i32>(p.R);
  s.own = w.take<i32>(p.R);
  s.in_far = w.take<i32>(p.R);
  s.in_near = w.take<i32>(p.R);
  s.out_far = w.take<i32>(p.R);
  s.out_near = w.take<i32>(p.R);
  s.peaks = w.take<DomainPeaks>(p.M);
}

template <int C>
DEVICE_FN Ranks<C> ranks_of(const Problem& p, int d) {
  return {d * p.g, p.g};
}

// Replica slot of expert x on each rank, -1 = none.
template <int C>
DEVICE_FN Lanes<C> slots_of(const Problem& p, const Served& s, const Ranks<C>& ranks, int x) {
  Lanes<C> slot;
  for (int c = 0; c < C; ++c) {
    slot[c] = -1;
    for (int k = ranks.at(c) * p.S; ranks.has(c) && k < (ranks.at(c) + 1) * p.S; ++k) {
      if (s.expert[k] == x) slot[c] = k;
    }
  }
  return slot;
}

// What the ranks execute of x, whose replicas there are `slot`.
template <int C>
DEVICE_FN Part<C> part_of(const Problem& p, const Served& s, const Ranks<C>& ranks, int x,
                          const Lanes<C>& slot) {
  Part<C> part{};
  for (int c = 0; c < C; ++c) {
    if (slot[c] >= 0) {
      part.quota[c] = s.quota[slot[c]];
      part.outside[c] = s.outside[slot[c]];
    } else if (ranks.is(c, p.main[x])) {
      part.quota[c] = s.main_quota[x];
      part.outside[c] = s.main_outside[x];
    }
  }
  part.executed = sum(part.quota);
  return part;
}

// Stores outside parts of x on the ranks, whose replicas there are `slot`.
template <int C>
DEVICE_FN void store_outside(const Problem& p, Served& s, const Ranks<C>& ranks, int x,
                             const Lanes<C>& slot, const Lanes<C>& outside) {
  for (int c = 0; c < C; ++c) {
    if (slot[c] >= 0) {
      s.outside[slot[c]] = outside[c];
    } else if (ranks.is(c, p.main[x])) {
      s.main_outside[x] = outside[c];
    }
  }
}

template <int C>
DEVICE_FN Ports<C> read_ports(const Served& s, const Ranks<C>& ranks) {
  return {ranks.read(s.load), ranks.read(s.far_in), ranks.read(s.far_out), ranks.read(s.own)};
}

template <int C>
DEVICE_FN void write_ports(Served& s, const Ranks<C>& ranks, const Ports<C>& ports) {
  ranks.write(s.load, ports.load);
  ranks.write(s.far_in, ports.far_in);
  ranks.write(s.far_out, ports.far_out);
  ranks.write(s.own, ports.own);
}

}  // namespace topoep::joint_device
