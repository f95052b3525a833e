// The joint planner: candidates from a table of recipes, the best one relieved, never worse than none.
#pragma once

#include "joint_build.h"
#include "joint_relieve.h"

namespace topoep::joint {

struct Search {
  i64 best;    // score of the plan in `best`
  i64 none;    // total of the plan without replicas
  int winner;  // row, -1 = none
};

// Prices the plan without replicas and every row's candidate; the lowest score, then the lowest row,
// ends in `best`.
inline Search sweep(Joint& j, const Recipe* table, int rows) {
  std::fill(j.best.expert, j.best.expert + j.p.R * j.p.S, -1);
  const Price none = price(j, j.best);
  Search search{none.score, none.total, -1};
  for (int row = 0; row < rows; ++row) {
    select_pairs(j, table[row]);
    if (!build(j, table[row])) continue;
    const Price candidate = price(j, j.trial);
    unlink(j, j.trial);
    if (candidate.total >= search.none || candidate.score >= search.best) continue;
    search.best = candidate.score;
    search.winner = row;
    std::swap(j.trial, j.best);
  }
  return search;
}

// Cuts one line of demands by one line of rooms, both by ascending rank.
struct Line {
  const i32* slot;
  const Instances& in;
  int i;
  bool far;  // rooms are the outside parts, else the parts for the domain
  i32 room = 0;

  i32 room_of(int k) const {
    return far ? in.outside[k] : in.quota[k] - in.own[k] - in.outside[k];
  }

  void serve(i32* row, i32 demand) {
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
inline void write_expert(Joint& j, const Slots& s, int x) {
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

inline void pack_left(const Problem& p, Slots& s) {
  for (int r = 0; r < p.R; ++r) {
    for (int k = r * p.S, n = k; k < (r + 1) * p.S; ++k) {
      if (s.expert[k] < 0) continue;
      const i32 x = s.expert[k];
      s.expert[k] = -1;
      s.expert[n] = x;
      s.quota[n] = s.quota[k];
      s.outside[n++] = s.outside[k];
    }
  }
}

inline void write_plan(Joint& j, Slots& s) {
  const Problem& p = j.p;
  pack_left(p, s);
  write_mains(p, j.expert_G, j.assignments_RG);
  link(j, s);
  for (int k = 0; k < p.R * p.S; ++k) {
    const int x = s.expert[k];
    if (x < 0) continue;
    j.expert_G[p.slot(k / p.S, p.e + k % p.S)] = x;
    if (j.first_slot[x] == k) write_expert(j, s, x);
  }
}

inline Search plan_joint(Joint& j, const Recipe* table, int rows, int rounds) {
  set_up(j);
  Search search = sweep(j, table, rows);
  if (search.winner >= 0) search.best = relieve(j, j.best, search.none, rounds);
  write_plan(j, j.best);
  return search;
}

}  // namespace topoep::joint
