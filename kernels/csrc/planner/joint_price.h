// From replica slots with quotas to who serves whom, exactly: the price of a plan and its token split.
//
// Each source first uses an instance on its own rank, then instances in its own domain, and only what
// its domain cannot execute leaves it.
#pragma once

#include "joint_state.h"

namespace topoep {

// Chains the slots of each expert in ascending order. `unlink` undoes it.
inline void link(Joint& j, const Slots& s) {
  for (int k = 0; k < j.p.R * j.p.S; ++k) {
    const int x = s.expert[k];
    if (x < 0) continue;
    if (j.first_slot[x] < 0) {
      j.first_slot[x] = k;
    } else {
      j.next_slot[j.last_slot[x]] = k;
    }
    j.last_slot[x] = k;
    j.next_slot[k] = -1;
  }
}

inline void unlink(Joint& j, const Slots& s) {
  for (int k = 0; k < j.p.R * j.p.S; ++k) {
    if (s.expert[k] >= 0) j.first_slot[s.expert[k]] = -1;
  }
}

// Instances of x by ascending rank into inst_*; returns their number. inst_slot: replica slot, -1 = main.
inline int gather_instances(Joint& j, const Slots& s, int x) {
  const Problem& p = j.p;
  const int m = p.main[x], h = p.home(x);
  int n = 0, main_at = -1;
  i32 left = j.total[x], near = 0, outside = 0;  // of the main; executed, from outside at home
  const auto place_main = [&] { main_at = n, j.inst_rank[n] = m, j.inst_slot[n++] = -1; };
  for (int k = j.first_slot[x]; k >= 0; k = j.next_slot[k]) {
    const int r = k / p.S;
    if (main_at < 0 && r > m) place_main();
    j.inst_rank[n] = r;
    j.inst_slot[n] = k;
    j.inst_quota[n] = s.quota[k];
    j.inst_far[n++] = s.outside[k];
    left -= s.quota[k];
    if (r / p.g == h) near += s.quota[k], outside += s.outside[k];
  }
  if (main_at < 0) place_main();
  j.inst_quota[main_at] = left;
  j.inst_far[main_at] = std::max(0, near + left - demand(j, h, x)) - outside;
  return n;
}

// Gives `amount` assignments from outside to instances [a, b): always to the instance whose rank
// receives least so far, within its quota; the last few one by one in order.
inline void pour_outside(Joint& j, int a, int b, i64 amount) {
  while (amount > 0) {
    i64 low = kNever, next = kNever, count = 0;
    for (int i = a; i < b; ++i) {
      const i64 room = j.inst_quota[i] - j.inst_own[i] - j.inst_far[i];
      if (room > 0) low = std::min<i64>(low, j.p_far_in[j.inst_rank[i]]);
    }
    for (int i = a; i < b; ++i) {
      const i64 room = j.inst_quota[i] - j.inst_own[i] - j.inst_far[i];
      if (room <= 0) continue;
      const i64 at = j.p_far_in[j.inst_rank[i]];
      count += at == low;
      next = std::min(next, at == low ? low + room : at);
    }
    const i64 step = std::min(next - low, std::max<i64>(amount / count, 1));
    for (int i = a; i < b && amount > 0; ++i) {
      const i64 room = j.inst_quota[i] - j.inst_own[i] - j.inst_far[i];
      if (room <= 0 || j.p_far_in[j.inst_rank[i]] != low) continue;
      const i64 v = std::min(step, amount);
      j.inst_far[i] += i32(v);
      j.p_far_in[j.inst_rank[i]] += i32(v);
      amount -= v;
    }
  }
}

// Adds (sign 1) or takes away (sign -1) what x costs at every port. With sign 1 the part of each
// instance that comes from outside is chosen, with -1 it is read from inst_far. `share`, if given,
// receives the assignments of each source that leave its domain.
template <int sign>
inline void serve(Joint& j, int x, int n, i32* share = nullptr) {
  const Problem& p = j.p;
  const i32* load_R = column(j, x);
  int a = 0;
  for (int d = 0; d < p.M; ++d) {
    const int first = d * p.g, end = first + p.g;
    int b = a;
    i64 executed = 0, own = 0;
    for (; b < n && j.inst_rank[b] < end; ++b) {
      const int r = j.inst_rank[b];
      const i32 mine = std::min(load_R[r], j.inst_quota[b]);
      j.inst_own[b] = mine;
      if (sign > 0) j.inst_far[b] = 0;
      else j.p_far_in[r] -= j.inst_far[b];
      j.p_own[r] += sign * mine;
      j.p_load[r] += sign * j.inst_quota[b];
      executed += j.inst_quota[b];
      own += mine;
    }
    if (a == b) {  // no instance here: all of it leaves
      for (int s = first; s < end; ++s) j.p_far_out[s] += sign * load_R[s];
      if (share) std::memcpy(share + first, load_R + first, sizeof(i32) * p.g);
      continue;
    }
    const i64 here = demand(j, d, x);
    const i64 leaving = std::max<i64>(0, here - executed), rest = here - own;
    if (leaving > 0) {
      i64 before = 0, given = 0;
      for (int s = first, i = a; s < end; ++s) {
        before += load_R[s];
        if (i < b && j.inst_rank[i] == s) before -= j.inst_own[i++];
        const i64 upto = leaving * before / rest;  // in proportion, prefix rounding
        j.p_far_out[s] += i32(sign * (upto - given));
        if (share) share[s] = i32(upto - given);
        given = upto;
      }
    } else if (share) {
      std::memset(share + first, 0, sizeof(i32) * p.g);
    }
    if (sign > 0 && executed > here) pour_outside(j, a, b, executed - here);
    a = b;
  }
}

// Takes away x served by its main alone.
inline void withdraw_main(Joint& j, int x) {
  const Problem& p = j.p;
  const i32* load_R = column(j, x);
  const int m = p.main[x], h = p.home(x);
  j.p_own[m] -= load_R[m];
  j.p_load[m] -= j.total[x];
  j.p_far_in[m] -= j.total[x] - demand(j, h, x);
  for (int s = 0; s < p.R; ++s) j.p_far_out[s] -= s / p.g == h ? 0 : load_R[s];
}

inline void start_ports(Joint& j) {
  std::memcpy(j.ports, j.base_ports, sizeof(i32) * 4 * j.p.R);
}

struct Price {
  i64 total, max_load;
};

inline void store_outside(Joint& j, Slots& s, int n) {
  for (int i = 0; i < n; ++i) {
    if (j.inst_slot[i] >= 0) s.outside[j.inst_slot[i]] = j.inst_far[i];
  }
}

inline void count_copy(Joint& j, int x, int r, int sign) {
  const int m = j.p.main[x];
  const bool near = j.p.home(x) == j.p.domain_of(r);
  (near ? j.in_near : j.in_far)[r] += sign;
  (near ? j.out_near : j.out_far)[m] += sign;
}

// The cost model of the design, exactly: compute + token + replica + plan in picoseconds.
inline Price price_ports(const Joint& j, bool replicas) {
  const JointCosts& c = j.cost;
  i32 max_load = 0, far = 0, near = 0;
  i64 copies = 0;
  for (int r = 0; r < j.p.R; ++r) {
    const i32 own = j.p_own[r], in = j.p_far_in[r], out = j.p_far_out[r];
    max_load = std::max(max_load, j.p_load[r]);
    far = std::max(far, std::max(in, out));
    near = std::max(near, std::max(j.p_load[r] - own - in, i32(j.sent[r]) - own - out));
  }
  for (int r = 0; r < j.p.R; ++r) {
    copies = std::max(copies, c.copy_far * std::max(j.in_far[r], j.out_far[r]) +
                                  c.copy_near * std::max(j.in_near[r], j.out_near[r]));
  }
  return {c.assignment * max_load + c.token_far * far + c.token_near * near + copies +
              (replicas ? c.plan : 0),
          max_load};
}

// Prices `s`; leaves its ports in `ports` and its slots linked.
inline Price price(Joint& j, Slots& s) {
  const Problem& p = j.p;
  start_ports(j);
  for (i32* a : {j.in_far, j.in_near, j.out_far, j.out_near}) std::memset(a, 0, sizeof(i32) * p.R);
  link(j, s);
  bool replicas = false;
  for (int k = 0; k < p.R * p.S; ++k) {
    const int x = s.expert[k];
    if (x < 0) continue;
    replicas = true;
    count_copy(j, x, k / p.S, 1);
    if (j.first_slot[x] != k) continue;
    withdraw_main(j, x);
    const int n = gather_instances(j, s, x);
    serve<1>(j, x, n);
    store_outside(j, s, n);
  }
  return price_ports(j, replicas);
}

inline i64 score(const Joint& j, const Price& q) {
  return q.total + j.cost.assignment * q.max_load / 100 * j.cost.balance_weight;
}

}  // namespace topoep
