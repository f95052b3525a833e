// State of the joint planner, and what is computed once per load.
//
// planning/joint.py is the specification; the phases here carry its names. One candidate plan is a
// set of (domain, expert) pairs to bring, a recipe of targets, and from them replica slots with
// quotas. Only experts that a candidate touches are looked at again, so its cost does not grow with E.
#pragma once

#include <algorithm>
#include <cstdlib>

#include "problem.h"

namespace topoep {

struct JointCosts {
  i64 assignment, token_far, token_near, copy_far, copy_near, plan;  // picoseconds
  i64 balance_weight;  // per cent of the compute term added to a candidate's score
};

// One row of the candidate table: the targets that a candidate is built for.
struct Recipe {
  i32 copies;       // far copies that may leave one rank, times (M-1)/3
  i32 share;        // eighths of a domain's slots for brought experts
  i32 slack;        // per mille above the mean that is level enough
  i32 shift;        // 1: move demand between domains that both host the expert
  i32 whole;        // 1: place brought experts whole, 0: cut them to fit
  i32 select_far;   // per cent of the mean: far port at which bringing stops
  i32 fill_far;     // per cent of the mean: far in-port that mains are relieved to, 0 = off
};

// Replica slots of the whole cluster; what a main executes is what its replicas leave.
struct Slots {
  i32* expert;  // [R*S] -1 = empty
  i32* quota;   // [R*S] assignments executed here
  i32* outside; // [R*S] of them from other domains
};

struct Joint {
  Problem p;
  JointCosts cost;
  i64 mean;  // of the rank loads, rounded up

  // Without replicas, per rank
  i32* total;                                  // [E] assignments to an expert
  i64 *sent, *load, *far_in, *far_out, *own;   // [R]
  i64* domain_far_out;                         // [M]

  // Pairs worth bringing, by (demand desc, expert, domain)
  int pairs;
  i64* keys;                                   // [M*E]
  i32 *pair_domain, *pair_expert, *pair_demand;  // [4*R*S]
  unsigned char *chosen, *best_chosen;         // [4*R*S]

  // The candidate being built
  int touched;                     // experts with a chosen pair
  i32* touched_expert;             // [R*S]
  i32* touch_index;                // [E] position above + 1, 0 = not touched
  i32* amount;                     // [R*S][M] assignments executed in a domain
  unsigned char* hosted;           // [R*S][M]
  i64* domain_load;                // [M]
  i64 *c_load, *c_far_in;          // [R] of the mains alone, after bringing and shifting
  i32 *c_quota, *c_outside;        // [E] by rank and position: what a main executes; from outside
  i32 *copies_out, *copies_in;     // [R] scratch of select, [M]
  i64 *scratch_R, *scratch_M;

  // Fill
  i32 *item_size, *item_expert, *item_source;  // [items]
  i32 *main_quota, *main_outside;  // [g*e] of the domain being filled
  i32 *used, *arrived;             // [g]
  i64* rank_load;                  // [g]
  i32* brought;                    // [g*S]
  Slots attempt, trial, best;      // of one fill, of one candidate, of the search

  // Price
  i32 *first_slot, *next_slot, *last_slot;      // by expert [E], by slot [R*S], by expert [E]
  i32 *column_of, *columns; int columns_used;   // load of one expert by source, gathered on first use
  i32 *base_ports, *ports, *ports_without;      // [4][R] load, far in, far out, own
  i32 *p_load, *p_far_in, *p_far_out, *p_own;   // the rows of ports
  i32 *in_far, *in_near, *out_far, *out_near;   // [R] copies
  i32 *inst_rank, *inst_quota, *inst_own, *inst_far, *inst_slot;  // [R+1] instances of one expert
  i32* saved; i32* share;                      // [R] assignments of a source that leave its domain

  i32* expert_G;
  i32* assignments_RG;
};

inline int max_pairs(const Problem& p) { return 4 * p.R * p.S; }

inline void carve(Slots& s, const Problem& p, Workspace& w) {
  s.expert = w.take<i32>(i64(p.R) * p.S);
  s.quota = w.take<i32>(i64(p.R) * p.S);
  s.outside = w.take<i32>(i64(p.R) * p.S);
}

inline void carve(Joint& j, Workspace& w) {
  const Problem& p = j.p;
  const i64 R = p.R, E = p.E, M = p.M, RS = R * p.S, pairs = max_pairs(p);
  const i64 items = i64(p.g) * p.S + 2 * i64(p.g) * (p.e + 1) + 2;
  carve(j.p, w);
  j.total = w.take<i32>(E);
  for (i64** a : {&j.sent, &j.load, &j.far_in, &j.far_out, &j.own, &j.c_load, &j.c_far_in,
                  &j.scratch_R}) {
    *a = w.take<i64>(R);
  }
  j.domain_far_out = w.take<i64>(M);
  for (i32** a : {&j.base_ports, &j.ports, &j.ports_without}) *a = w.take<i32>(4 * R);
  j.saved = w.take<i32>(4 * R);
  j.column_of = w.take<i32>(E);
  j.columns = w.take<i32>(E * R);
  j.domain_load = w.take<i64>(M);
  j.scratch_M = w.take<i64>(M);
  j.keys = w.take<i64>(M * E);
  for (i32** a : {&j.pair_domain, &j.pair_expert, &j.pair_demand}) *a = w.take<i32>(pairs);
  j.chosen = w.take<unsigned char>(pairs);
  j.best_chosen = w.take<unsigned char>(pairs);
  j.touched_expert = w.take<i32>(RS);
  j.touch_index = w.take<i32>(E);
  j.amount = w.take<i32>(RS * M);
  j.hosted = w.take<unsigned char>(RS * M);
  for (i32** a : {&j.c_quota, &j.c_outside, &j.first_slot, &j.last_slot}) *a = w.take<i32>(E);
  for (i32** a : {&j.copies_out, &j.copies_in, &j.in_far, &j.in_near, &j.out_far, &j.out_near,
                  &j.share}) {
    *a = w.take<i32>(R);
  }
  for (i32** a : {&j.inst_rank, &j.inst_quota, &j.inst_own, &j.inst_far, &j.inst_slot}) *a = w.take<i32>(R + 1);
  for (i32** a : {&j.item_size, &j.item_expert, &j.item_source}) *a = w.take<i32>(items);
  for (i32** a : {&j.main_quota, &j.main_outside}) *a = w.take<i32>(i64(p.g) * p.e);
  j.used = w.take<i32>(p.g);
  j.arrived = w.take<i32>(p.g);
  j.rank_load = w.take<i64>(p.g);
  j.brought = w.take<i32>(i64(p.g) * p.S + 1);
  j.next_slot = w.take<i32>(RS);
  carve(j.attempt, p, w);
  carve(j.trial, p, w);
  carve(j.best, p, w);
}

inline i32 demand(const Joint& j, int d, int x) { return j.p.demand[i64(d) * j.p.E + x]; }
inline i32 load(const Joint& j, int s, int x) { return j.p.load[i64(s) * j.p.E + x]; }

inline const i32* column(Joint& j, int x) {
  if (j.column_of[x] < 0) {
    j.column_of[x] = j.columns_used++;
    i32* c = j.columns + i64(j.column_of[x]) * j.p.R;
    for (int s = 0; s < j.p.R; ++s) c[s] = load(j, s, x);
  }
  return j.columns + i64(j.column_of[x]) * j.p.R;
}

inline void sum_base(Joint& j) {
  const Problem& p = j.p;
  std::memset(j.total, 0, sizeof(i32) * p.E);
  std::memset(j.domain_far_out, 0, sizeof(i64) * p.M);
  for (int d = 0; d < p.M; ++d) {
    for (int x = 0; x < p.E; ++x) j.total[x] += demand(j, d, x);
  }
  i64 sum = 0;
  for (int r = 0; r < p.R; ++r) {
    const int d = r / p.g;
    i64 sent = 0, inside = 0;
    const i32* row = p.load + i64(r) * p.E;
    for (int x = 0; x < p.E; ++x) sent += row[x];
    for (int k = d * p.g * p.e; k < (d + 1) * p.g * p.e; ++k) inside += row[p.mains[k]];
    j.sent[r] = sent;
    j.far_out[r] = sent - inside;
    j.domain_far_out[d] += sent - inside;
    j.load[r] = j.far_in[r] = j.own[r] = 0;
    for (int k = r * p.e; k < (r + 1) * p.e; ++k) {
      const int x = p.mains[k];
      j.c_quota[k] = j.total[x];
      j.c_outside[k] = j.total[x] - demand(j, d, x);
      j.load[r] += j.total[x];
      j.far_in[r] += j.c_outside[k];
      j.own[r] += row[x];
    }
    sum += sent;
  }
  j.mean = (sum + p.R - 1) / p.R;
}

// Pairs that a far copy could pay for: at least half its price in far assignments.
inline void list_pairs(Joint& j) {
  const Problem& p = j.p;
  const i64 least = std::max<i64>(1, j.cost.copy_far / std::max<i64>(1, 2 * j.cost.token_far));
  i64 n = 0;
  for (int d = 0; d < p.M; ++d) {
    for (int x = 0; x < p.E; ++x) {
      const i64 v = demand(j, d, x);
      if (v < least || p.home(x) == d) continue;
      j.keys[n++] = ((i64(1) << 31) - v) << 32 | (i64(x) * p.M + d);
    }
  }
  j.pairs = int(std::min<i64>(n, max_pairs(p)));
  if (n > j.pairs) std::nth_element(j.keys, j.keys + j.pairs, j.keys + n);
  std::sort(j.keys, j.keys + j.pairs);
  for (int i = 0; i < j.pairs; ++i) {
    const i64 id = j.keys[i] & ((i64(1) << 32) - 1);
    j.pair_domain[i] = i32(id % p.M);
    j.pair_expert[i] = i32(id / p.M);
    j.pair_demand[i] = demand(j, j.pair_domain[i], j.pair_expert[i]);
  }
}

inline void set_up(Joint& j) {
  const Problem& p = j.p;
  sum_demand(j.p);
  sum_base(j);
  list_pairs(j);
  std::memset(j.touch_index, 0, sizeof(i32) * p.E);
  for (int x = 0; x < p.E; ++x) j.first_slot[x] = j.column_of[x] = -1;
  j.columns_used = 0;
  for (int r = 0; r < p.R; ++r) {
    j.base_ports[r] = i32(j.load[r]);
    j.base_ports[p.R + r] = i32(j.far_in[r]);
    j.base_ports[2 * p.R + r] = i32(j.far_out[r]);
    j.base_ports[3 * p.R + r] = i32(j.own[r]);
  }
  j.p_load = j.ports;
  j.p_far_in = j.ports + p.R;
  j.p_far_out = j.ports + 2 * p.R;
  j.p_own = j.ports + 3 * p.R;
}

}  // namespace topoep
