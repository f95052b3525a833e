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

// Instances of x by ascending rank into inst_*; returns their number.
inline int gather_instances(Joint& j, const Slots& s, int x) {
  const Problem& p = j.p;
  int n = 0, main_at = -1;
  i32 left = j.total[x];
  for (int k = j.first_slot[x]; k >= 0; k = j.next_slot[k]) {
    if (main_at < 0 && k / p.S > p.main[x]) main_at = n++;
    j.inst_rank[n] = k / p.S;
    j.inst_quota[n++] = s.quota[k];
    left -= s.quota[k];
  }
  if (main_at < 0) main_at = n++;
  j.inst_rank[main_at] = p.main[x];
  j.inst_quota[main_at] = left;
  return n;
}

// Gives `amount` assignments from outside to instances [a, b): always to the instance whose rank
// receives least so far, within its quota; the last few one by one in order.
inline void pour_outside(Joint& j, int a, int b, i64 amount) {
  while (amount > 0) {
    i64 low = kNever, next = kNever, count = 0;
    for (int i = a; i < b; ++i) {
      const i64 room = j.inst_quota[i] - j.inst_own[i] - j.inst_far[i];
      if (room > 0) low = std::min(low, j.p_far_in[j.inst_rank[i]]);
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
      j.p_far_in[j.inst_rank[i]] += v;
      amount -= v;
    }
  }
}

// Serves x: inst_own, inst_far of its n instances, share[s] for every source; ports updated.
inline void serve(Joint& j, int x, int n) {
  const Problem& p = j.p;
  const int h = p.home(x);
  j.p_own[p.main[x]] -= load(j, p.main[x], x);  // the base served everything on the main
  j.p_far_in[p.main[x]] -= j.total[x] - demand(j, h, x);
  j.p_load[p.main[x]] -= j.total[x];
  int a = 0;
  for (int d = 0; d < p.M; ++d) {
    int b = a;
    i64 executed = 0, own = 0;
    for (; b < n && j.inst_rank[b] < (d + 1) * p.g; ++b) {
      const int r = j.inst_rank[b];
      const i32 mine = std::min(load(j, r, x), j.inst_quota[b]);
      j.inst_own[b] = mine;
      j.inst_far[b] = 0;
      j.p_own[r] += mine;
      j.p_load[r] += j.inst_quota[b];
      executed += j.inst_quota[b];
      own += mine;
    }
    const i64 here = demand(j, d, x);
    if (a == b) {  // nothing here: all of it leaves, as in the base
      for (int s = d * p.g; s < (d + 1) * p.g; ++s) j.share[s] = load(j, s, x);
      continue;
    }
    const i64 leaving = std::max<i64>(0, here - executed), rest = here - own;
    i64 before = 0, given = 0;
    for (int s = d * p.g, i = a; s < (d + 1) * p.g; ++s) {
      i64 left = load(j, s, x);
      if (d != h) j.p_far_out[s] -= left;
      if (i < b && j.inst_rank[i] == s) left -= j.inst_own[i++];
      before += left;
      const i64 upto = leaving > 0 ? leaving * before / rest : 0;  // proportional, prefix rounding
      j.share[s] = i32(upto - given);
      j.p_far_out[s] += upto - given;
      given = upto;
    }
    if (executed > here) pour_outside(j, a, b, executed - here);
    a = b;
  }
}

inline void start_ports(Joint& j) {
  const i64 bytes = sizeof(i64) * j.p.R;
  std::memcpy(j.p_load, j.load, bytes);
  std::memcpy(j.p_far_in, j.far_in, bytes);
  std::memcpy(j.p_far_out, j.far_out, bytes);
  std::memcpy(j.p_own, j.own, bytes);
}

struct Price {
  i64 total, max_load;
};

// The cost model of the design, exactly: compute + token + replica + plan in picoseconds.
inline Price price(Joint& j, const Slots& s) {
  const Problem& p = j.p;
  const JointCosts& c = j.cost;
  start_ports(j);
  for (i32* a : {j.in_far, j.in_near, j.out_far, j.out_near}) std::memset(a, 0, sizeof(i32) * p.R);
  link(j, s);
  bool replicas = false;
  for (int k = 0; k < p.R * p.S; ++k) {
    const int x = s.expert[k];
    if (x < 0) continue;
    replicas = true;
    const int r = k / p.S, m = p.main[x];
    const bool near = p.home(x) == p.domain_of(r);
    ++(near ? j.in_near : j.in_far)[r];
    ++(near ? j.out_near : j.out_far)[m];
    if (j.first_slot[x] == k) serve(j, x, gather_instances(j, s, x));
  }
  unlink(j, s);
  i64 max_load = 0, far = 0, near = 0, copies = 0;
  for (int r = 0; r < p.R; ++r) {
    max_load = std::max(max_load, j.p_load[r]);
    far = std::max({far, j.p_far_in[r], j.p_far_out[r]});
    near = std::max({near, j.p_load[r] - j.p_own[r] - j.p_far_in[r],
                     j.sent[r] - j.p_own[r] - j.p_far_out[r]});
    copies = std::max(copies, c.copy_far * std::max(j.in_far[r], j.out_far[r]) +
                                  c.copy_near * std::max(j.in_near[r], j.out_near[r]));
  }
  return {c.assignment * max_load + c.token_far * far + c.token_near * near + copies +
              (replicas ? c.plan : 0),
          max_load};
}

inline i64 score(const Joint& j, const Price& q) {
  return q.total + j.cost.assignment * q.max_load / 100 * j.cost.balance_weight;
}

}  // namespace topoep
