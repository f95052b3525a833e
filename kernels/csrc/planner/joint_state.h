// State of the joint planner, and what it computes once per load.
//
// planning/joint.py is the specification; the phases here carry its names. A candidate is a set of
// (domain, expert) pairs to bring and a recipe of targets; it becomes replica slots with quotas.
// Of the experts only those with a replica are served again, so a candidate's cost hardly grows with
// E.
#pragma once

#include <algorithm>

#include "joint_terms.h"
#include "problem.h"
#include "topoep.h"

namespace topoep::joint {

// The replica slots of the cluster. A main executes what its replicas leave.
struct Slots {
  i32* expert;   // [R*S] -1 = empty
  i32* quota;    // [R*S] assignments executed here
  i32* outside;  // [R*S] of them from other domains
};

// The instances of one expert, by ascending rank.
struct Instances {
  int n;
  i32* rank;
  i32* slot;     // replica slot, -1 = the main
  i32* quota;
  i32* own;      // of them from the instance's rank
  i32* outside;  // of them from other domains
  i32* stored;   // `outside` as the slots have it
};

// Traffic of every rank, in assignments: [R] each, four rows of one block.
struct Ports {
  i32 *load, *far_in, *far_out, *own;
};

struct Joint {
  Problem p;
  JointCosts cost;
  i32 mean;     // of the rank loads, rounded up
  i32* total;   // [E]
  i32* sent;    // [R]
  Ports base;   // without replicas
  i64* domain_far_out;  // [M] without replicas

  // Pairs worth bringing, by (demand desc, expert, domain); [4*R*S]
  int pairs;
  i64* keys;  // [M*E] scratch
  i32 *pair_domain, *pair_expert, *pair_demand;
  unsigned char* chosen;

  // The candidate under construction
  int touched;             // experts with a chosen pair
  i32* touched_expert;     // [R*S]
  i32* touch_index;        // [E] position above + 1, 0 = untouched
  i32* amount;             // [R*S][M] assignments executed in a domain
  unsigned char* hosted;   // [R*S][M]
  i64* domain_load;        // [M]
  i32 *base_quota, *base_outside;       // [E] of mains by rank and position, without replicas
  i32 *main_quota, *main_outside;       // [E] the same for the candidate
  i32 *mains_load, *mains_outside;      // [R] their sums
  i32 *copies_out, *copies_in;          // [R], [M]
  i64 *far_in_left, *far_out_left;      // [R], [M]
  i32 *item_size, *item_expert, *item_source;
  i32 *used, *arrived, *brought;        // [g], [g], [g*S]
  Slots trial;

  // Price
  i32 *column_of, *columns;             // [E], [E][R]: load of one expert, gathered on first use
  int columns_used;
  i32 *first_slot, *last_slot, *next_slot;  // [E], [E], [R*S]
  Ports ports, without, with;           // now; without and with the expert being moved
  i32 *in_far, *in_near, *out_far, *out_near;  // [R] copies
  DomainPeaks* peaks;                   // [M]
  Instances inst;
  i32* share;                           // [R] assignments of a source that leave its domain

  // What relief may start from: slots that were priced, the most promising first.
  int starts, max_starts;
  Slots* start;        // [max_starts]
  i64* start_promise;  // [max_starts]

  Topoep published;  // the published rule, on the same problem
  i32* expert_G;
  i32* assignments_RG;

  PLANNER_FN i32 demand(int d, int x) const { return p.demand[i64(d) * p.E + x]; }
  PLANNER_FN i32 outside_demand(int x) const { return total[x] - demand(p.home(x), x); }
};

PLANNER_FN i64 max_pairs(const Problem& p) { return 4 * i64(p.R) * p.S; }

PLANNER_FN Ports take_ports(const Problem& p, Workspace& w) {
  i32* block = w.take<i32>(4 * i64(p.R));
  return {block, block + p.R, block + 2 * p.R, block + 3 * p.R};
}

PLANNER_FN void copy_ports(const Joint& j, const Ports& from, const Ports& to) {
  std::memcpy(to.load, from.load, sizeof(i32) * 4 * j.p.R);
}

PLANNER_FN void copy_domain_ports(const Joint& j, const Ports& from, const Ports& to, int d) {
  const int first = d * j.p.g;
  for (int row = 0; row < 4; ++row) {
    const i64 at = i64(row) * j.p.R + first;
    std::memcpy(to.load + at, from.load + at, sizeof(i32) * j.p.g);
  }
}

PLANNER_FN Slots take_slots(const Problem& p, Workspace& w) {
  const i64 n = i64(p.R) * p.S;
  return {w.take<i32>(n), w.take<i32>(n), w.take<i32>(n)};
}

PLANNER_FN void carve(Joint& j, Workspace& w) {
  const Problem& p = j.p;
  const i64 R = p.R, E = p.E, M = p.M, RS = R * p.S, g = p.g;
  // Fill: every shed takes one main's all, or ends one of a rank's two excesses.
  const i64 items = g * p.S + 2 * g * (p.e + 1);
  const auto ints = [&w](i64 n) { return w.take<i32>(n); };
  carve(j.p, w);
  j.total = ints(E);
  j.sent = ints(R);
  for (Ports* a : {&j.base, &j.ports, &j.without, &j.with}) *a = take_ports(p, w);
  j.keys = w.take<i64>(M * E);
  for (i64** a : {&j.domain_far_out, &j.domain_load, &j.far_out_left}) *a = w.take<i64>(M);
  j.far_in_left = w.take<i64>(R);
  for (i32** a : {&j.pair_domain, &j.pair_expert, &j.pair_demand}) *a = ints(max_pairs(p));
  j.chosen = w.take<unsigned char>(max_pairs(p));
  for (i32** a : {&j.touched_expert, &j.next_slot}) *a = ints(RS);
  for (i32** a : {&j.touch_index, &j.base_quota, &j.base_outside, &j.main_quota, &j.main_outside,
                  &j.column_of, &j.first_slot, &j.last_slot}) {
    *a = ints(E);
  }
  j.amount = ints(RS * M);
  j.hosted = w.take<unsigned char>(RS * M);
  for (i32** a : {&j.mains_load, &j.mains_outside, &j.copies_out, &j.in_far, &j.in_near, &j.out_far,
                  &j.out_near, &j.share}) {
    *a = ints(R);
  }
  j.copies_in = ints(M);
  for (i32** a : {&j.item_size, &j.item_expert, &j.item_source}) *a = ints(items);
  for (i32** a : {&j.used, &j.arrived}) *a = ints(g);
  j.brought = ints(g * p.S);
  j.trial = take_slots(p, w);
  j.max_starts = i32(std::max<i64>(1, kRelieved / (R * R)));
  j.start = w.take<Slots>(j.max_starts);
  j.start_promise = w.take<i64>(j.max_starts);
  for (int i = 0; i < j.max_starts; ++i) {
    const Slots slots = take_slots(p, w);
    if (j.start) j.start[i] = slots;
  }
  carve_scratch(j.published, p, w);
  j.columns = ints(E * R);
  j.peaks = w.take<DomainPeaks>(M);
  j.inst = {0, ints(R), ints(R), ints(R), ints(R), ints(R), ints(R)};
}

PLANNER_FN const i32* column(Joint& j, int x) {
  if (j.column_of[x] < 0) {
    j.column_of[x] = j.columns_used++;
    i32* load_R = j.columns + i64(j.column_of[x]) * j.p.R;
    for (int s = 0; s < j.p.R; ++s) load_R[s] = j.p.load[i64(s) * j.p.E + x];
  }
  return j.columns + i64(j.column_of[x]) * j.p.R;
}

inline void sum_base(Joint& j) {
  const Problem& p = j.p;
  std::memcpy(j.total, p.demand, sizeof(i32) * p.E);
  for (int d = 1; d < p.M; ++d) {
    for (int x = 0; x < p.E; ++x) j.total[x] += j.demand(d, x);
  }
  i64 sum = 0;
  for (int d = 0; d < p.M; ++d) j.domain_far_out[d] = 0;
  for (int r = 0; r < p.R; ++r) {
    const i32* row = p.load + i64(r) * p.E;
    const int d = p.domain_of(r);
    i32 sent = 0, inside = 0;
    for (int x = 0; x < p.E; ++x) sent += row[x];
    for (int k = d * p.g * p.e; k < (d + 1) * p.g * p.e; ++k) inside += row[p.mains[k]];
    i32 load = 0, far_in = 0, own = 0;
    for (int k = r * p.e; k < (r + 1) * p.e; ++k) {
      const int x = p.mains[k];
      load += j.base_quota[k] = j.total[x];
      far_in += j.base_outside[k] = j.outside_demand(x);
      own += row[x];
    }
    j.sent[r] = sent;
    j.base.load[r] = load;
    j.base.far_in[r] = far_in;
    j.base.far_out[r] = sent - inside;
    j.base.own[r] = own;
    j.domain_far_out[d] += sent - inside;
    sum += sent;
  }
  j.mean = i32((sum + p.R - 1) / p.R);
}

// Pairs sort by ascending key. 0: not worth bringing, because it brings less than half the price of
// a far copy in far assignments.
PLANNER_FN i64 pair_key(const Joint& j, int d, int x) {
  const i64 least = std::max<i64>(1, j.cost.copy_far / std::max<i64>(1, 2 * j.cost.token_far));
  const i64 v = j.demand(d, x);
  if (v < least || j.p.home(x) == d) return 0;
  return ((i64(1) << 31) - v) << 32 | (i64(x) * j.p.M + d);
}

PLANNER_FN void set_pair(Joint& j, int i, i64 key) {
  const i64 id = key & ((i64(1) << 32) - 1);
  j.pair_domain[i] = i32(id % j.p.M);
  j.pair_expert[i] = i32(id / j.p.M);
  j.pair_demand[i] = j.demand(j.pair_domain[i], j.pair_expert[i]);
}

inline void list_pairs(Joint& j) {
  const Problem& p = j.p;
  i64 n = 0;
  for (int d = 0; d < p.M; ++d) {
    for (int x = 0; x < p.E; ++x) {
      if (const i64 key = pair_key(j, d, x)) j.keys[n++] = key;
    }
  }
  j.pairs = int(std::min<i64>(n, max_pairs(p)));
  if (n > j.pairs) std::nth_element(j.keys, j.keys + j.pairs, j.keys + n);
  std::sort(j.keys, j.keys + j.pairs);
  for (int i = 0; i < j.pairs; ++i) set_pair(j, i, j.keys[i]);
}

inline void set_up(Joint& j) {
  sum_demand(j.p);
  sum_base(j);
  list_pairs(j);
  j.columns_used = 0;
  for (int x = 0; x < j.p.E; ++x) {
    j.touch_index[x] = 0;
    j.first_slot[x] = j.column_of[x] = -1;
  }
}

}  // namespace topoep::joint
