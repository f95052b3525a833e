// TopoEP as published (paper, sections 4.1 to 4.3), bit-identical to planning/topoep.py.
//
// Stage 1 brings experts into domains, every demand is split evenly over the instances it may use,
// and stage 2 moves half gaps from the busiest rank of each domain. Phases over a state struct, in
// the order called; `plan_topoep` at the end chains them.
#pragma once

#include "problem.h"

namespace topoep {

struct TopoepCosts {
  i64 token_bytes, expert_bytes;  // S_tok, |W|
  i64 token_far, token_near;      // picoseconds, to break ties in stage 2
};

struct Topoep {
  Problem p;
  TopoepCosts cost;
  i32* occupied;   // [R] replica slots in use
  i32* chosen;     // [g*S] stage 1's experts of one domain, by benefit
  i32* instances;  // [R] slots of one expert, ascending
  i64* used;       // [g*per] assignments executed in each slot of one domain
  i64* before;     // [g*per] of them from sources below the domain
  i64* load;       // [g] assignments executed on each rank of one domain
  i32* cells;      // [R][g*per] assignments_RG of one domain's slots, rows `stride` apart
  i64 stride;
  i32* expert_G;
  i32* assignments_RG;
};

// All but the problem's own.
inline void carve_scratch(Topoep& t, const Problem& p, Workspace& w) {
  t.occupied = w.take<i32>(p.R);
  t.chosen = w.take<i32>(i64(p.g) * p.S + 1);
  t.instances = w.take<i32>(p.R);
  t.used = w.take<i64>(i64(p.g) * p.per);
  t.before = w.take<i64>(i64(p.g) * p.per);
  t.load = w.take<i64>(p.g);
}

inline void carve(Topoep& t, Workspace& w) {
  carve(t.p, w);
  carve_scratch(t, t.p, w);
}

// Stage 1: the domain's g*S largest positive benefits. Ranks are filled least occupied first,
// lowest on ties: from empty slots that is round robin.
inline void bring_experts(Topoep& t, int d) {
  const Problem& p = t.p;
  const i32* demand = p.demand + i64(d) * p.E;
  const int room = p.g * p.S;
  int n = 0;
  for (int x = 0; x < p.E && room > 0; ++x) {
    if (p.home(x) == d || 2 * t.cost.token_bytes * demand[x] <= t.cost.expert_bytes) continue;
    if (n == room && demand[x] <= demand[t.chosen[n - 1]]) continue;
    int i = n < room ? n++ : n - 1;
    for (; i > 0 && demand[t.chosen[i - 1]] < demand[x]; --i) t.chosen[i] = t.chosen[i - 1];
    t.chosen[i] = x;  // after equals, which have lower ids
  }
  for (int i = 0; i < n; ++i) {
    const int r = d * p.g + i % p.g;
    t.expert_G[p.slot(r, p.e + t.occupied[r]++)] = t.chosen[i];
  }
}

// The slot of expert x on rank r, or -1.
PLANNER_FN i64 slot_of(const Topoep& t, int x, int r) {
  const Problem& p = t.p;
  if (p.main[x] == r) return p.slot(r, p.main_index[x]);
  for (int j = p.e; j < p.e + t.occupied[r]; ++j) {
    if (t.expert_G[p.slot(r, j)] == x) return p.slot(r, j);
  }
  return -1;
}

// Split each demand for the expert of a replica slot evenly over the instances of the source's
// domain, else over all; the remainder goes one each to instances s mod n, s mod n + 1, ...
inline void route_expert(Topoep& t, i64 replica) {
  const Problem& p = t.p;
  const int x = t.expert_G[replica];
  int all = 0;
  for (int r = 0; r < p.R; ++r) {
    const i64 slot = slot_of(t, x, r);
    if (slot >= 0) t.instances[all++] = i32(slot);
    if (slot >= 0 && slot < replica && r != p.main[x]) return;  // done at its first replica
  }
  int first = 0;  // of the source domain's instances
  for (int d = 0; d < p.M; ++d) {
    int last = first;
    while (last < all && t.instances[last] < p.slot((d + 1) * p.g, 0)) ++last;
    const bool local = last > first;
    const int n = local ? last - first : all;
    const i32* slots = t.instances + (local ? first : 0);
    for (int s = d * p.g; s < (d + 1) * p.g; ++s) {
      i32* row = t.assignments_RG + i64(s) * p.G;
      const i32 demand = p.load[i64(s) * p.E + x];
      row[p.slot(p.main[x], p.main_index[x])] = 0;  // until now everything was there
      const i32 share = demand / n, remainder = demand % n;
      for (int i = 0, turn = (n - s % n) % n; i < n; ++i) {  // turn = (i - s) mod n
        row[slots[i]] = share + (turn < remainder);
        if (++turn == n) turn = 0;
      }
    }
    first = last;
  }
}

// Sums that stage 2 keeps up to date while it moves assignments inside domain d.
inline void sum_domain(Topoep& t, int d) {
  const Problem& p = t.p;
  const int width = p.g * p.per, first = d * p.g;
  t.cells = t.assignments_RG + p.slot(first, 0);
  t.stride = p.G;
  std::memset(t.used, 0, sizeof(i64) * width);
  for (int s = 0; s < p.R; ++s) {
    if (s == first) std::memcpy(t.before, t.used, sizeof(i64) * width);
    const i32* row = t.cells + s * t.stride;
    for (int k = 0; k < width; ++k) t.used[k] += row[k];
  }
  for (int r = 0; r < p.g; ++r) {
    t.load[r] = 0;
    for (int j = 0; j < p.per; ++j) t.load[r] += t.used[r * p.per + j];
  }
}

// Port time of moving `delta` assignments of slot k (of domain d) to rank `target` of the domain:
// sources give up in ascending rank; the target's own assignments then travel nowhere.
PLANNER_FN i64 communication(const Topoep& t, int d, int k, i64 delta, int target) {
  const Problem& p = t.p;
  const i64 below = delta < t.before[k] ? delta : t.before[k];
  i64 left = delta - below, near = 0;
  for (int i = 0; i < p.g && left > 0; ++i) {
    const i64 have = t.cells[(d * p.g + i) * t.stride + k];
    const i64 moved = have < left ? have : left;
    if (i != target) near += moved;
    left -= moved;
  }
  return t.cost.token_far * (below + left) + t.cost.token_near * near;
}

struct Move {
  i64 delta = 0, load, cost;
  int is_new, expert, target, slot;
};

// Better: larger delta, emptier target, hosting before new, cheaper, lower expert, lower rank.
PLANNER_FN bool precedes(const Topoep& t, int d, Move& a, Move& b) {
  if (a.delta != b.delta) return a.delta > b.delta;
  if (a.load != b.load) return a.load < b.load;
  if (a.is_new != b.is_new) return a.is_new < b.is_new;
  // Priced only when the first three tie.
  if (a.cost < 0) a.cost = communication(t, d, a.slot, a.delta, a.target);
  if (b.cost < 0) b.cost = communication(t, d, b.slot, b.delta, b.target);
  if (a.cost != b.cost) return a.cost < b.cost;
  if (a.expert != b.expert) return a.expert < b.expert;
  return a.target < b.target;
}

// Keeps the move of rank `busiest`'s slot k to rank r (both of domain d) in `best` when it is
// possible and better.
PLANNER_FN void consider(const Topoep& t, int d, int busiest, int k, int r, Move& best) {
  const Problem& p = t.p;
  const i64 gap = (t.load[busiest] - t.load[r]) / 2;
  const i64 delta = t.used[k] < gap ? t.used[k] : gap;
  if (delta <= 0 || delta < best.delta) return;
  const int x = t.expert_G[p.slot(d * p.g, 0) + k];
  const bool hosts = slot_of(t, x, d * p.g + r) >= 0;
  if (!hosts && t.occupied[d * p.g + r] == p.S) return;
  Move move{delta, t.load[r], -1, !hosts, x, r, k};
  if (best.delta == 0 || precedes(t, d, move, best)) best = move;
}

inline Move best_move(const Topoep& t, int d) {
  const Problem& p = t.p;
  int busiest = 0;
  for (int r = 1; r < p.g; ++r) {
    if (t.load[r] > t.load[busiest]) busiest = r;
  }
  Move best;
  for (int j = 0; j < p.e + t.occupied[d * p.g + busiest]; ++j) {
    for (int r = 0; r < p.g; ++r) consider(t, d, busiest, busiest * p.per + j, r, best);
  }
  return best;
}

// The slot of domain d, counted from its first, where the move lands: opened if it is new.
PLANNER_FN int landing_slot(Topoep& t, int d, const Move& move) {
  const Problem& p = t.p;
  const int target = d * p.g + move.target;
  i64 landing = slot_of(t, move.expert, target);
  if (landing < 0) {
    landing = p.slot(target, p.e + t.occupied[target]++);
    t.expert_G[landing] = move.expert;
  }
  return int(landing - p.slot(d * p.g, 0));
}

inline void commit(Topoep& t, int d, const Move& move) {
  const Problem& p = t.p;
  const int k = landing_slot(t, d, move);
  i64 left = move.delta;
  for (int s = 0; s < p.R && left > 0; ++s) {
    i32* row = t.cells + s * t.stride;
    const i64 moved = row[move.slot] < left ? row[move.slot] : left;
    row[move.slot] -= i32(moved);
    row[k] += i32(moved);
    left -= moved;
    if (s < d * p.g) {
      t.before[move.slot] -= moved;
      t.before[k] += moved;
    }
  }
  t.used[move.slot] -= move.delta;
  t.used[k] += move.delta;
  t.load[move.slot / p.per] -= move.delta;
  t.load[move.target] += move.delta;
}

// The problem's demand is summed already.
inline void plan_topoep(Topoep& t) {
  const Problem& p = t.p;
  write_mains(p, t.expert_G, t.assignments_RG);
  std::memset(t.occupied, 0, sizeof(i32) * p.R);
  for (int d = 0; d < p.M; ++d) bring_experts(t, d);
  for (int r = 0; r < p.R; ++r) {
    for (int j = p.e; j < p.e + t.occupied[r]; ++j) route_expert(t, p.slot(r, j));
  }
  for (int d = 0; d < p.M; ++d) {
    sum_domain(t, d);
    for (Move move = best_move(t, d); move.delta > 0; move = best_move(t, d)) commit(t, d, move);
  }
}

}  // namespace topoep
