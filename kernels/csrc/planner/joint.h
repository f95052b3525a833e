// The joint planner: candidates from a table of recipes, the best one relieved, never worse than
// none.
#pragma once

#include "joint_build.h"
#include "joint_relieve.h"

namespace topoep::joint {

// What relief can make of the candidate in `ports`: each peak halfway down to its domain's mean.
PLANNER_FN i64 promise(const Joint& j) {
  const Problem& p = j.p;
  const Ports& q = j.ports;
  DomainPeaks all{};
  for (int d = 0; d < p.M; ++d) {
    i64 load = 0, far_in = 0, far_out = 0, in = 0, out = 0;
    for (int r = d * p.g; r < (d + 1) * p.g; ++r) {
      load += q.load[r];
      far_in += q.far_in[r];
      far_out += q.far_out[r];
      in += near_in(q, r);
      out += near_out(j, q, r);
    }
    DomainPeaks m = find_peaks(j, d);
    m.load = i32((m.load + load / p.g) / 2);
    m.far = i32((m.far + std::max(far_in, far_out) / p.g) / 2);
    m.near = i32((m.near + std::max(in, out) / p.g) / 2);
    raise(all, m);
  }
  return price_peaks(j, all).score;
}

// Every row's candidate; the one with the best promise, then the lowest row, ends in `best`. False
// when none can be built.
inline bool sweep(Joint& j, const Recipe* table, int rows) {
  i64 lowest = kNever;
  for (int row = 0; row < rows; ++row) {
    select_pairs(j, table[row]);
    if (!build(j, table[row])) continue;
    price(j, j.trial);
    unlink(j, j.trial);
    const i64 value = promise(j);
    if (value >= lowest) continue;
    lowest = value;
    std::swap(j.trial, j.best);
  }
  return lowest < kNever;
}

// Cuts one line of demands by one line of rooms, both by ascending rank.
struct Line {
  const i32* slot;
  const Instances& in;
  int i;
  bool far;  // rooms are the outside parts, else the parts for the domain
  i32 room = 0;

  PLANNER_FN i32 room_of(int k) const {
    return far ? in.outside[k] : in.quota[k] - in.own[k] - in.outside[k];
  }

  PLANNER_FN void serve(i32* row, i32 demand) {
    while (demand > 0) {
      while (room == 0) room = room_of(++i);
      const i32 v = std::min(demand, room);
      row[in.slot[i]] += v;
      room -= v;
      demand -= v;
    }
  }
};

// Splits x's demands over its instances: own rank, then own domain, then what leaves the domains.
PLANNER_FN void write_expert(Joint& j, const Slots& s, int x) {
  const Problem& p = j.p;
  Instances& in = j.inst;
  const i32* load_R = column(j, x);
  gather_instances(j, s, x);
  serve_all<-1>(j, x, j.share);  // own parts and shares; the ports are not used any more
  for (int i = 0; i < in.n; ++i) {
    const int position = in.slot[i] < 0 ? p.main_index[x] : p.e + in.slot[i] % p.S;
    in.slot[i] = i32(p.slot(in.rank[i], position));
  }
  Line far{in.slot, in, -1, true};
  for (int d = 0, a = 0; d < p.M; ++d) {
    Line near{in.slot, in, a - 1, false};
    for (int source = d * p.g; source < (d + 1) * p.g; ++source) {
      i32* row = j.assignments_RG + i64(source) * p.G;
      row[p.slot(p.main[x], p.main_index[x])] = 0;
      i32 left = load_R[source] - j.share[source];
      if (a < in.n && in.rank[a] == source) {
        row[in.slot[a]] += in.own[a];
        left -= in.own[a++];
      }
      near.serve(row, left);
      far.serve(row, j.share[source]);
    }
  }
}

PLANNER_FN void pack_left(const Problem& p, Slots& s, int r) {
  for (int k = r * p.S, n = k; k < (r + 1) * p.S; ++k) {
    if (s.expert[k] < 0) continue;
    const i32 x = s.expert[k];
    s.expert[k] = -1;
    s.expert[n] = x;
    s.quota[n] = s.quota[k];
    s.outside[n++] = s.outside[k];
  }
}

inline void write_plan(Joint& j, Slots& s) {
  const Problem& p = j.p;
  for (int r = 0; r < p.R; ++r) pack_left(p, s, r);
  write_mains(p, j.expert_G, j.assignments_RG);
  link(j, s);
  for (int k = 0; k < p.R * p.S; ++k) {
    const int x = s.expert[k];
    if (x < 0) continue;
    j.expert_G[p.slot(k / p.S, p.e + k % p.S)] = x;
    if (j.first_slot[x] == k) write_expert(j, s, x);
  }
}

inline void plan_joint(Joint& j, const Recipe* table, int rows, int rounds) {
  set_up(j);
  std::fill(j.trial.expert, j.trial.expert + j.p.R * j.p.S, -1);
  const i64 none = price(j, j.trial).total - j.cost.plan;
  if (!sweep(j, table, rows) || relieve(j, j.best, rounds).total >= none) {
    std::fill(j.best.expert, j.best.expert + j.p.R * j.p.S, -1);
  }
  write_plan(j, j.best);
}

}  // namespace topoep::joint
