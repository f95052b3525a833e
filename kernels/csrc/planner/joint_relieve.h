// Relieves the busiest rank of each kind of port: moves work of one expert to another instance, or
// to a new one in a free slot, as long as the exact score falls.
#pragma once

#include "joint_price.h"

namespace topoep::joint {

struct Move {
  int expert, from, to, rank;  // replica slots or -1 = the main; rank of `to`
  i32 amount;
  Price price;
  i64 excess;
};

struct Relief {
  Kind kind;
  DomainPeaks now;  // of the whole cluster, before the move
  Move best;
};

// Work of domain d above the band under each maximum, priced: of equal scores the one with less of
// it is nearer to the next gain, because several ranks share a maximum.
PLANNER_FN i64 excess(const Joint& j, const DomainPeaks& now, int d) {
  const Ports& q = j.ports;
  const i32 load = now.load - now.load / kBand, far = now.far - now.far / kBand,
            near = now.near - now.near / kBand;
  i64 sum_load = 0, sum_far = 0, sum_near = 0;
  for (int r = d * j.p.g; r < (d + 1) * j.p.g; ++r) {
    sum_load += std::max(0, q.load[r] - load);
    sum_far += std::max(0, q.far_in[r] - far) + std::max(0, q.far_out[r] - far);
    sum_near += std::max(0, near_in(q, r) - near) + std::max(0, near_out(j, q, r) - near);
  }
  return j.cost.assignment * sum_load + j.cost.token_far * sum_far + j.cost.token_near * sum_near;
}

// Keeps the current ports and copies as the best move when they are. Only the domains d and dt, and
// the copies of domain h, differ from `peaks`.
PLANNER_FN void judge(Joint& j, Relief& f, int d, int dt, int h, const Move& move) {
  DomainPeaks all = find_peaks(j, d);
  if (dt != d) raise(all, find_peaks(j, dt));
  if (h != d && h != dt) raise(all, find_peaks(j, h));
  for (int o = 0; o < j.p.M; ++o) {
    if (o != d && o != dt && o != h) raise(all, j.peaks[o]);
  }
  const Price price = price_peaks(j.cost, all);
  if (price.score > f.best.price.score) return;
  i64 left = excess(j, f.now, d) + (dt != d ? excess(j, f.now, dt) : 0);
  for (int o = 0; o < j.p.M; ++o) left += o != d && o != dt ? j.peaks[o].excess : 0;
  if (price.score == f.best.price.score && left >= f.best.excess) return;
  f.best = move;
  f.best.price = price;
  f.best.excess = left;
}

// How much of instance `from` to move to rank t: half the gap of the port in question, without
// lifting the busiest load.
PLANNER_FN i32 amount_to_move(const Joint& j, const Relief& f, int b, int t) {
  const Ports& q = j.with;
  const i32 room = f.now.load - q.load[t];
  switch (f.kind) {
    case kFar: return std::min((q.far_in[b] - q.far_in[t]) / 2, room);
    case kLoad: return (q.load[b] - q.load[t]) / 2;
    case kNear: return std::min((near_in(q, b) - near_in(q, t)) / 2, room);
    default: return INT32_MAX;  // copies: the whole instance
  }
}

PLANNER_FN void insert_instance(Instances& in, int at, int rank, int slot) {
  for (int i = in.n++; i > at; --i) {
    in.rank[i] = in.rank[i - 1];
    in.slot[i] = in.slot[i - 1];
    in.quota[i] = in.quota[i - 1];
    in.stored[i] = in.stored[i - 1];
  }
  in.rank[at] = rank;
  in.slot[at] = slot;
  in.quota[at] = in.stored[at] = 0;
}

PLANNER_FN void erase_instance(Instances& in, int at) {
  --in.n;
  for (int i = at; i < in.n; ++i) {
    in.rank[i] = in.rank[i + 1];
    in.slot[i] = in.slot[i + 1];
    in.quota[i] = in.quota[i + 1];
    in.stored[i] = in.stored[i + 1];
  }
}

// Prices the move of the gathered expert x from instance `from` to `to`, an index or, for a new
// instance on rank t in free slot `slot`, where it is inserted. Only the two domains are served
// anew.
PLANNER_FN void try_move(Joint& j, Relief& f, int x, int from, int to, int t, int slot) {
  Instances& in = j.inst;
  const int b = in.rank[from], d = j.p.domain_of(b), dt = j.p.domain_of(t);
  const i32 v = std::min(amount_to_move(j, f, b, t), in.quota[from]);
  if (v <= 0) return;
  const bool is_new = to == in.n || in.rank[to] != t;
  const bool vanishes = in.slot[from] >= 0 && v == in.quota[from];
  copy_domain_ports(j, j.without, j.ports, d);
  if (dt != d) serve_in<-1>(j, x, dt);
  in.quota[from] -= v;
  if (is_new) {
    insert_instance(in, to, t, slot);
    count_copy(j, x, t, 1);
  }
  in.quota[to] += v;
  if (vanishes) count_copy(j, x, b, -1);
  serve_in<1>(j, x, d);
  if (dt != d) serve_in<1>(j, x, dt);
  const int from_slot = in.slot[from + (is_new && from >= to)];
  judge(j, f, d, dt, j.p.home(x), {x, from_slot, in.slot[to], t, v, {}, 0});
  if (vanishes) count_copy(j, x, b, 1);
  in.quota[to] -= v;
  if (is_new) {
    count_copy(j, x, t, -1);
    erase_instance(in, to);
  }
  in.quota[from] += v;
  if (dt != d) copy_domain_ports(j, j.with, j.ports, dt);
}

// Tries every place where rank b's work for x could go: its other instances, then in each domain
// the least loaded rank with a free slot. `only`: of these places, counted from 0, one alone.
PLANNER_FN void try_expert(Joint& j, Relief& f, const Slots& s, int x, int b, int only = -1) {
  const Problem& p = j.p;
  Instances& in = j.inst;
  gather_instances(j, s, x);
  int from = 0;
  while (in.rank[from] != b) ++from;
  serve_in<-1>(j, x, p.domain_of(b));
  copy_domain_ports(j, j.ports, j.without, p.domain_of(b));
  for (int i = 0; i < in.n; ++i) {
    if (i == from || (only >= 0 && i != only)) continue;
    try_move(j, f, x, from, i, in.rank[i], in.slot[i]);
  }
  for (int d = 0, i = 0; d < p.M; ++d) {
    int best = -1, best_slot = -1, at = -1;
    for (int r = d * p.g; r < (d + 1) * p.g; ++r) {
      if (i < in.n && in.rank[i] == r) {
        ++i;
        continue;
      }
      int slot = r * p.S;
      while (slot < (r + 1) * p.S && s.expert[slot] >= 0) ++slot;
      if (slot == (r + 1) * p.S || (best >= 0 && j.with.load[r] >= j.with.load[best])) continue;
      best = r, best_slot = slot, at = i;
    }
    if (best < 0 || (only >= 0 && in.n + d != only)) continue;
    try_move(j, f, x, from, at, best, best_slot);
  }
  copy_domain_ports(j, j.with, j.ports, p.domain_of(b));
}

// What rank r adds to the kind's term: the largest binds it.
PLANNER_FN i64 weight_in(const Joint& j, Kind kind, int r) {
  const Ports& q = j.ports;
  switch (kind) {
    case kFar: return q.far_in[r];
    case kLoad: return q.load[r];
    case kNear: return std::max(near_in(q, r), near_out(j, q, r));
    default: return copy_time(j, r);
  }
}

// The rank that binds the kind's term; lowest on ties.
inline int busiest(const Joint& j, Kind kind) {
  int best = 0;
  for (int r = 1; r < j.p.R; ++r) {
    if (weight_in(j, kind, r) > weight_in(j, kind, best)) best = r;
  }
  return best;
}

// The (expert, rank) that a move may relieve rank b of, the kWidth most promising.
struct Shortlist {
  int n = 0;
  int expert[kWidth], rank[kWidth];
  i32 weight[kWidth];

  PLANNER_FN void add(int x, int r, i32 w) {
    if (n == kWidth && w <= weight[n - 1]) return;
    int at = n < kWidth ? n++ : n - 1;
    for (; at > 0 && weight[at - 1] < w; --at) {
      weight[at] = weight[at - 1];
      expert[at] = expert[at - 1];
      rank[at] = rank[at - 1];
    }
    weight[at] = w;
    expert[at] = x;
    rank[at] = r;
  }
};

// The experts of rank b that weigh most in the kind's term.
PLANNER_FN Shortlist heaviest(Joint& j, const Slots& s, Kind kind, int b) {
  const Problem& p = j.p;
  Shortlist list;
  for (int k = 0; k < p.per; ++k) {
    const int x = k < p.e ? p.mains[b * p.e + k] : s.expert[b * p.S + k - p.e];
    if (x < 0 || j.total[x] <= j.mean / kGrain) continue;
    gather_instances(j, s, x);
    int i = 0;
    while (j.inst.rank[i] != b) ++i;
    const i32 quota = j.inst.quota[i], outside = j.inst.stored[i];
    const i32 near = quota - outside - std::min(column(j, x)[b], quota);
    const i32 weight = kind == kFar ? outside : kind == kLoad ? quota : near;
    if (weight > j.mean / kGrain) list.add(x, b, weight);
  }
  return list;
}

// The replicas with the smallest quotas of those that use rank b's copy port.
PLANNER_FN Shortlist smallest_copies(const Joint& j, const Slots& s, int b) {
  Shortlist list;
  for (int k = 0; k < j.p.R * j.p.S; ++k) {
    const int x = s.expert[k], r = k / j.p.S;
    if (x >= 0 && (r == b || j.p.main[x] == b)) list.add(x, r, -s.quota[k]);
  }
  return list;
}

PLANNER_FN Shortlist candidates(Joint& j, const Slots& s, Kind kind, int b) {
  return kind == kCopies ? smallest_copies(j, s, b) : heaviest(j, s, kind, b);
}

PLANNER_FN void commit(Joint& j, Slots& s, const Move& move) {
  const Problem& p = j.p;
  const int x = move.expert, r = move.from < 0 ? p.main[x] : move.from / p.S;
  const int d = p.domain_of(r), dt = p.domain_of(move.rank);
  gather_instances(j, s, x);
  serve_in<-1>(j, x, d);
  if (dt != d) serve_in<-1>(j, x, dt);
  if (move.to >= 0 && s.expert[move.to] < 0) {
    count_copy(j, x, move.rank, 1);
    unlink(j, s);
    s.expert[move.to] = x;
    s.quota[move.to] = s.outside[move.to] = 0;
    link(j, s);
  }
  if (move.from >= 0) s.quota[move.from] -= move.amount;
  if (move.to >= 0) s.quota[move.to] += move.amount;
  gather_instances(j, s, x);
  std::copy(j.inst.stored, j.inst.stored + j.inst.n, j.inst.outside);
  serve_in<1>(j, x, d);
  if (dt != d) serve_in<1>(j, x, dt);
  store_outside(j, s);
  if (move.from >= 0 && s.quota[move.from] == 0) {
    count_copy(j, x, r, -1);
    unlink(j, s);
    s.expert[move.from] = -1;
    link(j, s);
  }
}

// Improves `s`, at most `rounds` moves, kinds in turn, until no kind has a move. Returns its price.
inline Price relieve(Joint& j, Slots& s, int rounds) {
  const Problem& p = j.p;
  Relief f{};
  f.best.price = price(j, s);
  int moves = 0, idle = 0;  // idle: turns without a move, in a row
  for (int turn = 0; moves < rounds && idle < kKinds; ++turn) {
    f.kind = Kind(turn % kKinds);
    f.now = {};
    for (int d = 0; d < p.M; ++d) raise(f.now, j.peaks[d] = find_peaks(j, d));
    f.best.excess = 0;
    for (int d = 0; d < p.M; ++d) f.best.excess += j.peaks[d].excess = excess(j, f.now, d);
    f.best.expert = -1;
    copy_ports(j, j.ports, j.with);
    const Shortlist list = candidates(j, s, f.kind, busiest(j, f.kind));
    for (int i = 0; i < list.n; ++i) try_expert(j, f, s, list.expert[i], list.rank[i]);
    ++idle;
    if (f.best.expert < 0) continue;
    commit(j, s, f.best);
    ++moves;
    idle = 0;
  }
  unlink(j, s);
  return f.best.price;
}

}  // namespace topoep::joint
