// From replica slots with quotas to who serves whom, exactly: ports and price.
//
// A source first uses an instance on its own rank, then instances in its own domain; only what its
// domain cannot execute leaves it, in proportion over the domain's sources.
#pragma once

#include "joint_state.h"

namespace topoep::joint {

// Chains the slots of each expert in ascending order; `unlink` undoes it.
PLANNER_FN void link(Joint& j, const Slots& s) {
  for (int k = 0; k < j.p.R * j.p.S; ++k) {
    const int x = s.expert[k];
    if (x < 0) continue;
    (j.first_slot[x] < 0 ? j.first_slot[x] : j.next_slot[j.last_slot[x]]) = k;
    j.last_slot[x] = k;
    j.next_slot[k] = -1;
  }
}

PLANNER_FN void unlink(Joint& j, const Slots& s) {
  for (int k = 0; k < j.p.R * j.p.S; ++k) {
    if (s.expert[k] >= 0) j.first_slot[s.expert[k]] = -1;
  }
}

PLANNER_FN void gather_instances(Joint& j, const Slots& s, int x) {
  const Problem& p = j.p;
  Instances& in = j.inst;
  const int m = p.main[x], h = p.home(x);
  int main_at = -1;
  i32 left = j.total[x], executed_at_home = 0, outside_at_home = 0;
  in.n = 0;
  for (int k = j.first_slot[x]; k >= 0; k = j.next_slot[k]) {
    const int r = k / p.S;
    if (main_at < 0 && r > m) main_at = in.n++;
    in.rank[in.n] = r;
    in.slot[in.n] = k;
    in.quota[in.n] = s.quota[k];
    in.stored[in.n++] = s.outside[k];
    left -= s.quota[k];
    if (p.domain_of(r) == h) {
      executed_at_home += s.quota[k];
      outside_at_home += s.outside[k];
    }
  }
  if (main_at < 0) main_at = in.n++;
  in.rank[main_at] = m;
  in.slot[main_at] = -1;
  in.quota[main_at] = left;
  in.stored[main_at] = std::max(0, executed_at_home + left - j.demand(h, x)) - outside_at_home;
}

// Gives `amount` assignments from outside to instances [a, b): always to the one whose rank
// receives least so far, within its quota; the last few one by one in order.
PLANNER_FN void pour_outside(Joint& j, int a, int b, i32 amount) {
  Instances& in = j.inst;
  i32* far_in = j.ports.far_in;
  const auto room = [&in](int i) { return in.quota[i] - in.own[i] - in.outside[i]; };
  if (b == a + 1) {
    in.outside[a] = amount;
    far_in[in.rank[a]] += amount;
    return;
  }
  while (amount > 0) {
    i64 low = kNever, next = kNever;
    i32 count = 0;
    for (int i = a; i < b; ++i) {
      if (room(i) > 0) low = std::min<i64>(low, far_in[in.rank[i]]);
    }
    for (int i = a; i < b; ++i) {
      if (room(i) <= 0) continue;
      const i64 at = far_in[in.rank[i]];
      count += at == low;
      next = std::min(next, at == low ? low + room(i) : at);
    }
    const i32 step = i32(std::min<i64>(next - low, std::max(amount / count, 1)));
    for (int i = a; i < b && amount > 0; ++i) {
      if (room(i) <= 0 || far_in[in.rank[i]] != low) continue;
      const i32 v = std::min(step, amount);
      in.outside[i] += v;
      far_in[in.rank[i]] += v;
      amount -= v;
    }
  }
}

// Adds (sign 1) or takes away (-1) instances [a, b) of x, those of one domain, at every port.
// Adding chooses each instance's outside part, taking away reads the stored one. `share`, if given,
// receives what leaves each source's domain.
template <int sign>
PLANNER_FN void serve_domain(Joint& j, int x, int a, int b, i32* share = nullptr) {
  const Problem& p = j.p;
  Instances& in = j.inst;
  const i32* load_R = column(j, x);
  const int d = p.domain_of(in.rank[a]), first = d * p.g, end = first + p.g;
  i64 executed = 0, own = 0;
  for (int i = a; i < b; ++i) {
    const int r = in.rank[i];
    in.own[i] = std::min(load_R[r], in.quota[i]);
    in.outside[i] = sign > 0 ? 0 : in.stored[i];
    j.ports.far_in[r] += sign * in.outside[i];
    j.ports.own[r] += sign * in.own[i];
    j.ports.load[r] += sign * in.quota[i];
    executed += in.quota[i];
    own += in.own[i];
  }
  const i64 here = j.demand(d, x), leaving = std::max<i64>(0, here - executed);
  i32* far_out = j.ports.far_out;
  if (d != p.home(x)) {  // the base ports send all of it home
    for (int s = first; s < end; ++s) far_out[s] -= sign * load_R[s];
  }
  if (share) std::memset(share + first, 0, sizeof(i32) * p.g);
  i64 before = 0, given = 0;
  for (int s = first, i = a; s < end && leaving > 0; ++s) {  // in proportion, prefix rounding
    before += load_R[s];
    if (i < b && in.rank[i] == s) before -= in.own[i++];
    const i64 upto = leaving * before / (here - own);
    far_out[s] += i32(sign * (upto - given));
    if (share) share[s] = i32(upto - given);
    given = upto;
  }
  if (sign > 0 && executed > here) pour_outside(j, a, b, i32(executed - here));
}

// Index behind the last instance in the domain of instance a.
PLANNER_FN int domain_end(const Joint& j, int a) {
  const int end = (j.p.domain_of(j.inst.rank[a]) + 1) * j.p.g;
  int b = a + 1;
  while (b < j.inst.n && j.inst.rank[b] < end) ++b;
  return b;
}

template <int sign>
PLANNER_FN void serve_all(Joint& j, int x, i32* share = nullptr) {
  if (share) std::memcpy(share, column(j, x), sizeof(i32) * j.p.R);  // where no instance is
  for (int a = 0, b; a < j.inst.n; a = b) {
    b = domain_end(j, a);
    serve_domain<sign>(j, x, a, b, share);
  }
}

template <int sign>
PLANNER_FN void serve_in(Joint& j, int x, int d) {
  for (int a = 0; a < j.inst.n && j.inst.rank[a] < (d + 1) * j.p.g; ++a) {
    if (j.inst.rank[a] < d * j.p.g) continue;
    serve_domain<sign>(j, x, a, domain_end(j, a));
    return;
  }
}

// Takes x, served by its main alone, out of the base ports.
PLANNER_FN void withdraw_main(Joint& j, int x) {
  const int m = j.p.main[x];
  j.ports.load[m] -= j.total[x];
  j.ports.far_in[m] -= j.outside_demand(x);
  j.ports.own[m] -= column(j, x)[m];
}

PLANNER_FN void store_outside(Joint& j, Slots& s) {
  for (int i = 0; i < j.inst.n; ++i) {
    if (j.inst.slot[i] >= 0) s.outside[j.inst.slot[i]] = j.inst.outside[i];
  }
}

PLANNER_FN void count_copy(Joint& j, int x, int r, int sign) {
  const int m = j.p.main[x];
  const bool near = j.p.home(x) == j.p.domain_of(r);
  (near ? j.in_near : j.in_far)[r] += sign;
  (near ? j.out_near : j.out_far)[m] += sign;
}

PLANNER_FN i64 copy_time(const Joint& j, int r) {
  return j.cost.copy_far * std::max(j.in_far[r], j.out_far[r]) +
         j.cost.copy_near * std::max(j.in_near[r], j.out_near[r]);
}

PLANNER_FN i32 near_in(const Ports& q, int r) { return q.load[r] - q.own[r] - q.far_in[r]; }

PLANNER_FN i32 near_out(const Joint& j, const Ports& q, int r) {
  return j.sent[r] - q.own[r] - q.far_out[r];
}

// Ports, not excess, of domain d's ranks.
PLANNER_FN DomainPeaks find_peaks(const Joint& j, int d) {
  const Ports& q = j.ports;
  DomainPeaks m{};
  for (int r = d * j.p.g; r < (d + 1) * j.p.g; ++r) {
    m.load = std::max(m.load, q.load[r]);
    m.far = std::max(m.far, std::max(q.far_in[r], q.far_out[r]));
    m.near = std::max(m.near, std::max(near_in(q, r), near_out(j, q, r)));
  }
  for (int r = d * j.p.g; r < (d + 1) * j.p.g; ++r) m.copies = std::max(m.copies, copy_time(j, r));
  return m;
}

PLANNER_FN void raise(DomainPeaks& m, const DomainPeaks& by) {
  m.load = std::max(m.load, by.load);
  m.far = std::max(m.far, by.far);
  m.near = std::max(m.near, by.near);
  m.copies = std::max(m.copies, by.copies);
}

// Links `s`, leaves its ports and copies in place, and prices them.
inline Price price(Joint& j, Slots& s) {
  const Problem& p = j.p;
  copy_ports(j, j.base, j.ports);
  for (i32* a : {j.in_far, j.in_near, j.out_far, j.out_near}) std::memset(a, 0, sizeof(i32) * p.R);
  link(j, s);
  for (int k = 0; k < p.R * p.S; ++k) {
    const int x = s.expert[k];
    if (x < 0) continue;
    count_copy(j, x, k / p.S, 1);
    if (j.first_slot[x] != k) continue;
    withdraw_main(j, x);
    gather_instances(j, s, x);
    serve_all<1>(j, x);
    store_outside(j, s);
  }
  DomainPeaks all{};
  for (int d = 0; d < p.M; ++d) raise(all, find_peaks(j, d));
  return price_peaks(j.cost, all);
}

}  // namespace topoep::joint
