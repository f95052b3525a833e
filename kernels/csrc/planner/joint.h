// The joint planner: candidates from a table of recipes, the best one polished, never worse than none.
#pragma once

#include "joint_fill.h"
#include "joint_price.h"
#include "joint_relieve.h"

namespace topoep {

// Greedy over the pairs: first to relieve main ranks that receive too much, then domains that send
// too much. Fills `chosen`.
inline void select_pairs(Joint& j, const Recipe& q) {
  const Problem& p = j.p;
  const int most_out = std::max(1, (q.copies * (p.M - 1) + 2) / 3);
  const int most_in = p.g * p.S * q.share / 8;
  const i64 far = j.mean * q.select_far / 100;
  std::memset(j.chosen, 0, j.pairs);
  std::memset(j.copies_out, 0, sizeof(i32) * p.R);
  std::memset(j.copies_in, 0, sizeof(i32) * p.M);
  std::memcpy(j.scratch_R, j.far_in, sizeof(i64) * p.R);
  std::memcpy(j.scratch_M, j.domain_far_out, sizeof(i64) * p.M);
  for (int pass = 0; pass < 2; ++pass) {
    for (int i = 0; i < j.pairs; ++i) {
      const int d = j.pair_domain[i], m = p.main[j.pair_expert[i]];
      if (j.chosen[i] || j.copies_in[d] >= most_in || j.copies_out[m] >= most_out) continue;
      if (pass == 0 ? j.scratch_R[m] <= far : j.scratch_M[d] <= far * p.g) continue;
      j.chosen[i] = 1;
      ++j.copies_in[d];
      ++j.copies_out[m];
      j.scratch_R[m] -= j.pair_demand[i];
      j.scratch_M[d] -= j.pair_demand[i];
    }
  }
}

// amount[i][d] of every touched expert, and the mains' loads after the chosen pairs left.
inline void bring(Joint& j) {
  const Problem& p = j.p;
  j.touched = 0;
  std::memset(j.domain_load, 0, sizeof(i64) * p.M);
  for (int r = 0; r < p.R; ++r) j.domain_load[r / p.g] += j.load[r];
  for (int n = 0; n < j.pairs; ++n) {
    if (!j.chosen[n]) continue;
    const int d = j.pair_domain[n], x = j.pair_expert[n], h = p.home(x);
    if (!j.touch_index[x]) {
      const int i = j.touched++;
      j.touch_index[x] = j.touched;
      j.touched_expert[i] = x;
      for (int t = 0; t < p.M; ++t) {
        j.amount[i64(i) * p.M + t] = t == h ? j.total[x] : 0;
        j.hosted[i64(i) * p.M + t] = t == h;
      }
    }
    const i64 at = i64(j.touch_index[x] - 1) * p.M;
    j.hosted[at + d] = 1;
    j.amount[at + d] = j.pair_demand[n];
    j.amount[at + h] -= j.pair_demand[n];
    j.domain_load[d] += j.pair_demand[n];
    j.domain_load[h] -= j.pair_demand[n];
  }
}

// Levels the domains: the fullest hands demand to the emptiest, spread over all experts that both
// host, because one lump would land on one in-port.
inline void shift_demand(Joint& j, i64 domain_level) {
  const Problem& p = j.p;
  for (int step = 0; step < 2 * p.M; ++step) {
    int h = 0, t = 0;
    for (int d = 1; d < p.M; ++d) {
      if (j.domain_load[d] > j.domain_load[h]) h = d;
      if (j.domain_load[d] < j.domain_load[t]) t = d;
    }
    i64 need = std::min(j.domain_load[h] - domain_level, domain_level - j.domain_load[t]);
    if (need <= 0) return;
    i64 shared = 0;
    for (int i = 0; i < j.touched; ++i) {
      const i64 at = i64(i) * p.M;
      if (j.hosted[at + h] && j.hosted[at + t]) shared += j.amount[at + h];
    }
    if (shared == 0) return;
    need = std::min(need, shared);
    i64 before = 0, given = 0;
    for (int i = 0; i < j.touched; ++i) {
      const i64 at = i64(i) * p.M;
      if (!j.hosted[at + h] || !j.hosted[at + t]) continue;
      before += j.amount[at + h];
      const i64 v = need * before / shared - given;
      given += v;
      j.amount[at + h] -= i32(v);
      j.amount[at + t] += i32(v);
    }
    j.domain_load[h] -= given;
    j.domain_load[t] += given;
    if (j.domain_load[h] > domain_level && j.domain_load[t] < domain_level) return;
  }
}

// What the mains execute before any near copy.
inline void lower_mains(Joint& j) {
  const Problem& p = j.p;
  std::memcpy(j.c_load, j.load, sizeof(i64) * p.R);
  std::memcpy(j.c_far_in, j.far_in, sizeof(i64) * p.R);
  for (int i = 0; i < j.touched; ++i) {
    const int x = j.touched_expert[i], m = p.main[x], h = p.home(x), k = m * p.e + p.main_index[x];
    const i32 now = j.amount[i64(i) * p.M + h];
    const i32 outside = std::max(0, now - demand(j, h, x));
    j.c_load[m] -= j.c_quota[k] - now;
    j.c_far_in[m] -= j.c_outside[k] - outside;
    j.c_quota[k] = now;
    j.c_outside[k] = outside;
  }
}

inline void restore_mains(Joint& j) {
  const Problem& p = j.p;
  for (int i = 0; i < j.touched; ++i) {
    const int x = j.touched_expert[i], k = p.main[x] * p.e + p.main_index[x];
    j.c_quota[k] = j.total[x];
    j.c_outside[k] = j.total[x] - demand(j, p.home(x), x);
    j.touch_index[x] = 0;
  }
}

inline int list_brought(Joint& j, int d) {
  const Problem& p = j.p;
  int n = 0;
  for (int i = 0; i < j.touched; ++i) {
    const int x = j.touched_expert[i];
    const i64 at = i64(i) * p.M + d;
    if (!j.hosted[at] || p.home(x) == d || j.amount[at] == 0) continue;
    if (n == p.g * p.S) return -1;
    int k = n++;
    for (; k > 0; --k) {
      const int y = j.brought[k - 1];
      const i32 amount = executed_in(j, d, y);
      if (amount > j.amount[at] || (amount == j.amount[at] && y < x)) break;
      j.brought[k] = y;
    }
    j.brought[k] = x;
  }
  return n;
}

constexpr int kLevels = 3;  // levels tried for a domain that cannot meet its own

// The domain's slots at the lowest level that three tries find. Returns its busiest load or -1.
inline i64 level_domain(Joint& j, int d, FillTargets t, Slots out) {
  const Problem& p = j.p;
  const int brought = list_brought(j, d), slots = p.g * p.S;
  if (brought < 0) return -1;
  const i64 wanted = t.level;
  i64 low = wanted, best = kNever;
  for (int i = 0; i < kLevels; ++i) {
    const i64 reached = fill(j, d, brought, t, j.attempt);
    if (reached < 0) return -1;
    if (reached < best) {
      best = reached;
      std::memcpy(out.expert, j.attempt.expert, sizeof(i32) * slots);
      std::memcpy(out.quota, j.attempt.quota, sizeof(i32) * slots);
    }
    if (reached <= wanted || (reached <= t.level && t.level == wanted)) break;
    if (reached > t.level) low = t.level;
    if (best - low <= wanted / 64) break;
    t.level = (low + best) / 2;
  }
  return best;
}

// Builds the candidate of `chosen` and `q` in `trial`; returns its score, kNever when it cannot beat
// `limit` or does not beat the plan without replicas.
inline i64 build(Joint& j, const Recipe& q, i64 limit, i64 none) {
  const Problem& p = j.p;
  const i64 slack_level = j.mean + j.mean * q.slack / 1000;
  bring(j);
  if (q.shift) shift_demand(j, slack_level * p.g);
  lower_mains(j);
  FillTargets t;
  t.level = slack_level;
  for (int d = 0; d < p.M; ++d) t.level = std::max(t.level, (j.domain_load[d] + p.g - 1) / p.g);
  t.far_in = q.fill_far > 0 ? j.mean * q.fill_far / 100 : kNever;
  t.arrivals = std::min(std::max(1, (q.copies * (p.M - 1) + 2) / 3), p.S);
  t.whole = q.whole;
  bool good = true;
  for (int d = 0; d < p.M && good; ++d) {
    const i64 at = i64(d) * p.g * p.S;
    good = level_domain(j, d, t, {j.trial.expert + at, j.trial.quota + at}) >= 0;
  }
  restore_mains(j);
  if (!good) return kNever;
  (void)limit;
  const Price price_of = price(j, j.trial);
  unlink(j, j.trial);
  return price_of.total < none ? score(j, price_of) : kNever;
}

inline void keep(Joint& j) { std::swap(j.trial, j.best); }

inline Search sweep(Joint& j, const Recipe* table, int rows) {
  const Problem& p = j.p;
  for (int k = 0; k < p.R * p.S; ++k) j.best.expert[k] = -1, j.best.quota[k] = 0;
  const Price none = price(j, j.best);
  unlink(j, j.best);
  Search s{score(j, none), none.total, -1, 1};
  if (j.pairs == 0 && p.S == 0) return s;
  for (int row = 0; row < rows; ++row) {
    select_pairs(j, table[row]);
    const i64 v = build(j, table[row], s.best, s.none);
    ++s.built;
    if (v >= s.best) continue;
    s.best = v;
    s.winner = row;
    std::memcpy(j.best_chosen, j.chosen, j.pairs);
    keep(j);
  }
  return s;
}

// Cuts x's demands over its instances along two lines: near parts for the sources of the domain,
// outside parts for what leaves a domain.
inline void write_expert(Joint& j, const Slots& s, int x) {
  const Problem& p = j.p;
  const int n = gather_instances(j, s, x);
  serve<-1>(j, x, n, j.share);  // own parts and shares; outside parts are stored
  for (int i = 0; i < n; ++i) {
    const int r = j.inst_rank[i], k = j.inst_slot[i];
    j.inst_slot[i] = i32(p.slot(r, k < 0 ? p.main_index[x] : p.e + k % p.S));
  }
  const i64 main_slot = p.slot(p.main[x], p.main_index[x]);
  int a = 0, far = 0;
  i32 far_room = j.inst_far[0];
  for (int d = 0; d < p.M; ++d) {
    int b = a;
    while (b < n && j.inst_rank[b] < (d + 1) * p.g) ++b;
    int near = a, own = a;
    i32 near_room = a < b ? j.inst_quota[a] - j.inst_own[a] - j.inst_far[a] : 0;
    for (int source = d * p.g; source < (d + 1) * p.g; ++source) {
      i32* row = j.assignments_RG + i64(source) * p.G;
      row[main_slot] = 0;
      i32 left = load(j, source, x) - j.share[source];
      if (own < b && j.inst_rank[own] == source) {
        row[j.inst_slot[own]] += j.inst_own[own];
        left -= j.inst_own[own++];
      }
      while (left > 0) {
        while (near_room == 0) {
          ++near;
          near_room = j.inst_quota[near] - j.inst_own[near] - j.inst_far[near];
        }
        const i32 v = std::min(left, near_room);
        row[j.inst_slot[near]] += v;
        near_room -= v;
        left -= v;
      }
      for (left = j.share[source]; left > 0;) {
        while (far_room == 0) far_room = j.inst_far[++far];
        const i32 v = std::min(left, far_room);
        row[j.inst_slot[far]] += v;
        far_room -= v;
        left -= v;
      }
    }
    a = b;
  }
}

// Writes the Plan of `s`: each source serves itself, then its domain in ascending rank, then far.
inline void write_plan(Joint& j, Slots s) {
  const Problem& p = j.p;
  for (int r = 0; r < p.R; ++r) {  // replica slots fill from the left
    int n = r * p.S;
    for (int k = r * p.S; k < (r + 1) * p.S; ++k) {
      if (s.expert[k] < 0) continue;
      const i32 x = s.expert[k];
      s.expert[k] = -1;
      s.expert[n] = x;
      s.quota[n] = s.quota[k];
      s.outside[n++] = s.outside[k];
    }
  }
  write_mains(p, j.expert_G, j.assignments_RG);
  start_ports(j);
  link(j, s);
  for (int k = 0; k < p.R * p.S; ++k) {
    const int x = s.expert[k];
    if (x < 0) continue;
    j.expert_G[p.slot(k / p.S, p.e + k % p.S)] = x;
    if (j.first_slot[x] == k) write_expert(j, s, x);
  }
  unlink(j, s);
}

inline Search plan_joint(Joint& j, const Recipe* table, int rows, int rounds) {
  set_up(j);
  Search s = sweep(j, table, rows);
  if (s.winner >= 0) relieve(j, s, rounds);
  write_plan(j, j.best);
  return s;
}

}  // namespace topoep
