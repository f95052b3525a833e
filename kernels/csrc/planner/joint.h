// The joint planner: candidates from a table of recipes, the published rule, empty slots and levelled
// ranks; the most promising relieved, never worse than none.
#pragma once

#include "joint_build.h"
#include "joint_level.h"
#include "joint_relieve.h"
#include "topoep.h"

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
  return price_peaks(j.cost, all).score;
}

// Keeps the start in `trial` if it is one of the most promising so far, the earlier ones on ties.
// `doubt`: per cent that its promise is taken above what it says.
inline void enter(Joint& j, int doubt = 0) {
  price(j, j.trial);
  unlink(j, j.trial);
  const i64 value = promise(j) / 100 * (100 + doubt);
  int at = j.starts;
  while (at > 0 && j.start_promise[at - 1] > value) --at;
  if (at == j.max_starts) return;
  if (j.starts < j.max_starts) ++j.starts;
  const Slots last = j.start[j.starts - 1];
  for (int i = j.starts - 1; i > at; --i) {
    j.start[i] = j.start[i - 1];
    j.start_promise[i] = j.start_promise[i - 1];
  }
  j.start[at] = j.trial;
  j.start_promise[at] = value;
  j.trial = last;
}

inline void clear(const Joint& j, Slots& s) {
  std::fill(s.expert, s.expert + i64(j.p.R) * j.p.S, -1);
}

// The published rule's replicas, with what they execute as quotas; uses the output as scratch.
inline void take_published(Joint& j) {
  const Problem& p = j.p;
  plan_topoep(j.published);
  std::fill(j.trial.quota, j.trial.quota + i64(p.R) * p.S, 0);
  for (int s = 0; s < p.R; ++s) {
    for (int k = 0; k < p.R * p.S; ++k) {
      j.trial.quota[k] += j.assignments_RG[i64(s) * p.G + p.slot(k / p.S, p.e + k % p.S)];
    }
  }
  for (int k = 0; k < p.R * p.S; ++k) {
    j.trial.expert[k] = j.trial.quota[k] ? j.expert_G[p.slot(k / p.S, p.e + k % p.S)] : -1;
  }
}

// Every start, of which the most promising remain.
inline void list_starts(Joint& j, const Recipe* table, int rows) {
  j.starts = 0;
  for (int row = 0; row < rows; ++row) {
    select_pairs(j, table[row]);
    if (build(j, table[row])) enter(j);
  }
  take_published(j);
  enter(j);
  clear(j, j.trial);
  enter(j);
  level(j);
  enter(j, kLevelDoubt);
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
  clear(j, j.trial);
  const i64 none = price(j, j.trial).total - j.cost.plan;
  list_starts(j, table, rows);
  Price lowest{kNever, kNever};
  int best = 0;
  for (int i = 0; i < j.starts; ++i) {
    const Price price = relieve(j, j.start[i], rounds);
    if (price.score >= lowest.score) continue;
    lowest = price;
    best = i;
  }
  if (lowest.total >= none) clear(j, j.start[best]);
  write_plan(j, j.start[best]);
}

}  // namespace topoep::joint
