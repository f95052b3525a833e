// Relieves the busiest ports of a finished candidate, one move of one expert at a time.
#pragma once

#include "joint_price.h"

namespace topoep {

struct Search {
  i64 best, none;
  int winner;
  int built;
};

struct Relief {
  i64 score;
  int expert = -1, from, to, rank;  // replica slots, -1 = main; rank of `to`
  i32 amount;
};

// Tries moves of x away from rank b. The ports without x are in ports_without.
inline void try_moves(Joint& j, const Slots& s, int x, int b, i32 max_load, i64 none, Relief& best,
                      int kinds, int& trials) {
  const Problem& p = j.p;
  const int n = gather_instances(j, s, x);
  int from = 0;
  while (j.inst_rank[from] != b) ++from;
  const i32 have = j.inst_quota[from];
  if (have <= 0) return;
  const i32 *L = j.ports, *far_in = j.ports + p.R;
  i32* const saved = j.saved;  // ports with x
  std::memcpy(saved, j.ports, sizeof(i32) * 4 * p.R);
  L = saved, far_in = saved + p.R;
  i32 rank[512], slot[512], quota[512];
  for (int i = 0; i < n; ++i) rank[i] = j.inst_rank[i], slot[i] = j.inst_slot[i], quota[i] = j.inst_quota[i];
  serve<-1>(j, x, n);
  std::memcpy(j.ports_without, j.ports, sizeof(i32) * 4 * p.R);
  const auto attempt = [&](int t, int to_index, int to_slot) {
    const i32 room = max_load - L[t];
    const i32 gap = (far_in[b] - far_in[t]) / 2;
    i32 amounts[3] = {std::min(gap, room), (kinds & 16) ? gap : room, (L[b] - L[t]) / 2};
    for (int q = 0; q < 3; ++q) {
      const i32 v = std::min(amounts[q], have);
      if (v <= 0 || (q > 0 && v == std::min(amounts[0], have)) ||
          (q > 1 && v == std::min(amounts[1], have))) {
        continue;
      }
      ++trials;
      std::memcpy(j.ports, j.ports_without, sizeof(i32) * 4 * p.R);
      // instances with the move
      int m = 0;
      bool put = to_index >= 0;
      for (int i = 0; i < n; ++i) {
        if (!put && rank[i] > t) {
          j.inst_rank[m] = t, j.inst_quota[m] = v, ++m;
          put = true;
        }
        j.inst_rank[m] = rank[i];
        j.inst_quota[m] = quota[i] + (i == to_index ? v : 0) - (i == from ? v : 0);
        ++m;
      }
      if (!put) j.inst_rank[m] = t, j.inst_quota[m] = v, ++m;
      serve<1>(j, x, m);
      const bool vanish = slot[from] >= 0 && v == have;
      if (vanish) count_copy(j, x, b, -1);
      if (to_index < 0) count_copy(j, x, t, 1);
      const Price q2 = price_ports(j, true);
      if (vanish) count_copy(j, x, b, 1);
      if (to_index < 0) count_copy(j, x, t, -1);
      const i64 w = q2.total < none ? score(j, q2) : kNever;
      if (w < best.score) {
        best.score = w;
        best.expert = x;
        best.from = slot[from];
        best.to = to_slot;
        best.rank = t;
        best.amount = v;
      }
    }
  };
  for (int i = 0; i < n; ++i) {
    if (i != from) attempt(rank[i], i, slot[i]);
  }
  if (kinds & 8) {
    for (int d = 0; d < p.M; ++d) {
      int t = -1, free_slot = -1;
      for (int r = d * p.g; r < (d + 1) * p.g; ++r) {
        if (r == b || (t >= 0 && L[r] >= L[t])) continue;
        int f = -1;
        for (int k = (r + 1) * p.S - 1; k >= r * p.S; --k) {
          if (s.expert[k] < 0) f = k;
        }
        bool hosts = f < 0;
        for (int i = 0; i < n; ++i) hosts |= rank[i] == r;
        if (!hosts) t = r, free_slot = f;
      }
      if (t >= 0) attempt(t, -1, free_slot);
    }
  }
  std::memcpy(j.ports, saved, sizeof(i32) * 4 * p.R);
}

inline void relieve(Joint& j, Search& search, int rounds) {
  const Problem& p = j.p;
  Slots& s = j.best;
  const int kinds = getenv("RK") ? atoi(getenv("RK")) : 15;
  price(j, s);
  int trials = 0;
  for (int step = 0; step < rounds; ++step) {
    int by_far = 0, by_load = 0, by_near = 0;
    const auto near = [&](int r) {
      return std::max(j.p_load[r] - j.p_own[r] - j.p_far_in[r],
                      i32(j.sent[r]) - j.p_own[r] - j.p_far_out[r]);
    };
    for (int r = 1; r < p.R; ++r) {
      if (j.p_far_in[r] > j.p_far_in[by_far]) by_far = r;
      if (j.p_load[r] > j.p_load[by_load]) by_load = r;
      if (near(r) > near(by_near)) by_near = r;
    }
    Relief best;
    best.score = search.best;
    const i32 max_load = j.p_load[by_load];
    const int ranks[3] = {by_far, by_load, by_near};
    for (int c = 0; c < 3; ++c) {
      const int b = ranks[c];
      if (!(kinds >> c & 1)) continue;
      if ((c > 0 && b == ranks[0]) || (c > 1 && b == ranks[1])) continue;
      for (int k = 0; k < p.e; ++k) {
        if (j.total[p.mains[b * p.e + k]] >= 100) try_moves(j, s, p.mains[b * p.e + k], b, max_load, search.none, best, kinds, trials);
      }
      for (int k = b * p.S; k < (b + 1) * p.S; ++k) {
        if (s.expert[k] >= 0) try_moves(j, s, s.expert[k], b, max_load, search.none, best, kinds, trials);
      }
      if (best.score < search.best && (kinds & 64)) break;
    }
    if (best.score >= search.best) break;
    search.best = best.score;
    ++search.built;
    const int x = best.expert;
    int n = gather_instances(j, s, x);
    serve<-1>(j, x, n);
    if (best.from >= 0) {
      s.quota[best.from] -= best.amount;
      if (s.quota[best.from] == 0) {
        s.expert[best.from] = -1;
        count_copy(j, x, best.from / p.S, -1);
      }
    }
    if (best.to >= 0) {
      if (s.expert[best.to] < 0) {
        s.expert[best.to] = x;
        s.quota[best.to] = 0;
        count_copy(j, x, best.rank, 1);
      }
      s.quota[best.to] += best.amount;
    }
    for (int y = 0; y < p.E; ++y) j.first_slot[y] = -1;
    link(j, s);
    n = gather_instances(j, s, x);
    serve<1>(j, x, n);
    store_outside(j, s, n);
  }
  for (int y = 0; y < p.E; ++y) j.first_slot[y] = -1;
  search.built = trials;
}

}  // namespace topoep
