// Relieves one start in one block (planning/joint_relieve.py). A turn lists every place where the
// heaviest experts of the busiest rank could go, tries each with a warp, and makes the best move.
#pragma once

#include "joint_serve.h"
#include "joint_turn.h"

namespace topoep::joint_device {

// Work of a rank above the band under each maximum, this lane's ranks.
struct Excess {
  u32 load, far, near;

  template <int C>
  __device__ __forceinline__ void add(const DomainPeaks& now, const Ranks<C>& ranks,
                                      const Ports<C>& q, const Lanes<C>& sent) {
    const i32 load_at = now.load - now.load / kBand, far_at = now.far - now.far / kBand;
    const i32 near_at = now.near - now.near / kBand;
    for (int c = 0; c < C; ++c) {
      if (!ranks.has(c)) continue;
      load += u32(most(0, q.load[c] - load_at));
      far += u32(most(0, q.far_in[c] - far_at)) + u32(most(0, q.far_out[c] - far_at));
      near += u32(most(0, q.load[c] - q.own[c] - q.far_in[c] - near_at)) +
              u32(most(0, sent[c] - q.own[c] - q.far_out[c] - near_at));
    }
  }

  __device__ __forceinline__ i64 priced(const JointCosts& cost) const {
    return cost.assignment * i64(warp_sum(load)) + cost.token_far * i64(warp_sum(far)) +
           cost.token_near * i64(warp_sum(near));
  }
};

template <int C>
DEVICE_FN i64 excess_of(const Arguments& a, const Served& s, const DomainPeaks& now, int d) {
  const Ranks<C> ranks = ranks_of<C>(a.p, d);
  Excess own{};
  own.add(now, ranks, read_ports(s, ranks), ranks.read(a.at.sent));
  return own.priced(a.cost);
}

DEVICE_FN i64 sum_excess(const DomainPeaks* peaks_M, int M) {
  i64 total = 0;
  for (int d = lane_id(); d < M; d += 32) total += peaks_M[d].excess;
  for (unsigned bit = 1; bit < 32; bit *= 2) total += __shfl_xor_sync(kAllLanes, total, bit);
  return total;
}

// Serves the domains of the move anew and prices the outcome; returns the better of it and `best`.
// With `commit` the outcome is kept instead. `excess`: of all domains before the move. The calling
// warp does all of it.
template <int C, bool commit>
DEVICE_FN Verdict try_move(const Arguments& a, Reliever& f, const DomainPeaks& now, i64 excess,
                           int number, const Verdict& best) {
  const Problem& p = a.p;
  Served& s = f.s;
  const Trial trial = f.trials[number];
  const Heavy from = f.heavy[trial.heavy];
  const i32* column = f.column + trial.heavy * p.R;
  const int x = from.expert, b = from.rank, m = p.main[x], h = p.home(x);
  const int t = trial.slot < 0 ? m : trial.slot / p.S;
  const int d = p.domain_of(b), dt = p.domain_of(t);
  const bool is_new = trial.slot >= 0 && s.expert[trial.slot] < 0;
  const bool vanishes = from.slot >= 0 && trial.amount == from.quota;
  const CopyChange change{is_new ? t : -1, m, vanishes ? b : -1, dt == h, d == h};
  DomainPeaks peaks{};
  Excess above{};
  for (int o = lane_id(); o < p.M; o += 32) {
    if (o == d || o == dt) continue;
    peaks.load = most(peaks.load, s.peaks[o].load);
    peaks.far = most(peaks.far, s.peaks[o].far);
    peaks.near = most(peaks.near, s.peaks[o].near);
    if (o != h && s.peaks[o].copies > peaks.copies) peaks.copies = s.peaks[o].copies;
  }
  if (h != d && h != dt) raise_to_copies(a, s, peaks, ranks_of<C>(p, h), change);
  for (int both = 0; both < (d == dt ? 1 : 2); ++both) {
    const int domain = both ? dt : d;
    const Ranks<C> ranks = ranks_of<C>(p, domain);
    const Lanes<C> slot = slots_of(p, s, ranks, x);
    const Part<C> part = part_of(p, s, ranks, x, slot);
    Part<C> after = part;
    for (int c = 0; c < C; ++c) {
      if (ranks.is(c, t)) after.quota[c] += trial.amount;
      if (ranks.is(c, b)) after.quota[c] -= trial.amount;
    }
    after.executed += (domain == dt ? trial.amount : 0) - (domain == d ? trial.amount : 0);
    Ports<C> ports = read_ports(s, ranks);
    serve(ranks, ports, ranks.read(column), a.demand(domain, x), part, after);
    excess -= s.peaks[domain].excess;
    if (!commit) {
      const Lanes<C> sent = ranks.read(a.at.sent);
      raise_to_ports(peaks, ranks, ports, sent);
      raise_to_copies(a, s, peaks, ranks, change);
      above.add(now, ranks, ports, sent);
    } else {
      write_ports(s, ranks, ports);
      store_outside(p, s, ranks, x, slot, after.outside);
      for (int c = 0; c < C; ++c) {
        if (is_new && ranks.is(c, t)) s.outside[trial.slot] = after.outside[c];
      }
    }
  }
  if (commit) {
    __syncwarp(kAllLanes);
    if (lane_id() > 0) return best;
    i32* gives = from.slot < 0 ? s.main_quota + x : s.quota + from.slot;
    i32* takes = trial.slot < 0 ? s.main_quota + x : s.quota + trial.slot;
    if (is_new) {
      s.expert[trial.slot] = x;
      s.quota[trial.slot] = 0;
      ++(dt == h ? s.in_near : s.in_far)[t];
      ++(dt == h ? s.out_near : s.out_far)[m];
    }
    *gives -= trial.amount;
    *takes += trial.amount;
    if (vanishes) {
      s.expert[from.slot] = -1;
      --(d == h ? s.in_near : s.in_far)[b];
      --(d == h ? s.out_near : s.out_far)[m];
    }
    return best;
  }
  const i64 score = price_peaks(a.cost, warp_peaks(peaks)).score;
  if (score > best.score) return best;
  const Verdict verdict{score, excess + above.priced(a.cost), trial.order, number};
  return verdict.before(best) ? verdict : best;
}

// The best of what the warps found, on every lane.
DEVICE_FN Verdict best_verdict(const Reliever& f) {
  Verdict best = f.verdicts[0];
  for (int w = 1; w < warps(); ++w) {
    if (f.verdicts[w].before(best)) best = f.verdicts[w];
  }
  return best;
}

// Improves the start in `f.s`, at most `rounds` moves, kinds in turn, until no kind has a move.
template <int C>
DEVICE_FN void relieve(const Arguments& a, Reliever& f) {
  const Problem& p = a.p;
  Served& s = f.s;
  serve_start<C>(a, s);
  int moves = 0, idle = 0;  // idle: turns without a move, in a row
  for (int turn = 0; moves < a.rounds && idle < kKinds; ++turn) {
    const int kind = turn % kKinds;
    if (turn > 0 && idle == 0) {
      for (int d = warps() - 1 - warp_id(); d < p.M; d += warps()) {
        const DomainPeaks m = find_peaks<C>(a, s, d);
        if (lane_id() == 0) s.peaks[d] = m;
      }
    }
    if (warp_id() == 0) list_heavy(a, f, kind);
    __syncthreads();
    const DomainPeaks now = all_peaks(s.peaks, p.M);
    const int heavy = f.counters[0];
    for (int i = int(threadIdx.x); i < heavy * p.R; i += int(blockDim.x)) {
      f.column[i] = a.column(f.heavy[i / p.R].expert)[i % p.R];
    }
    for (int i = warp_id(); i < heavy * p.M; i += warps()) {
      list_places<C>(a, f, kind, now.load, i / p.M, i % p.M);
    }
    for (int d = warps() - 1 - warp_id(); d < p.M; d += warps()) {
      const i64 own = excess_of<C>(a, s, now, d);
      if (lane_id() == 0) s.peaks[d].excess = own;
    }
    __syncthreads();
    const i64 excess = sum_excess(s.peaks, p.M);
    Verdict best{price_peaks(a.cost, now).score, excess, -1, -1};  // what a move must improve on
    for (int n = warp_id(); n < f.counters[1]; n += warps()) {
      best = try_move<C, false>(a, f, now, excess, n, best);
    }
    if (lane_id() == 0) f.verdicts[warp_id()] = best;
    __syncthreads();
    best = best_verdict(f);
    if (warp_id() == 0 && best.trial >= 0) try_move<C, true>(a, f, now, excess, best.trial, best);
    ++idle;
    if (best.trial >= 0) {
      ++moves;
      idle = 0;
    }
    __syncthreads();
  }
}

}  // namespace topoep::joint_device
