// Builds one candidate from a recipe: which experts to bring where, how much each domain executes,
// and the replica slots that level its ranks.
#pragma once

#include "joint_state.h"

namespace topoep::joint {

PLANNER_FN int most_copies(const Joint& j, const Recipe& q) {
  return std::max(1, (q.copies * (j.p.M - 1) + 2) / 3);
}

// Greedy over the pairs, most demanded first: relieve main ranks that receive too much (pass 0),
// then domains that send too much (pass 1). Fills `chosen`.
PLANNER_FN void select_pairs(Joint& j, const Recipe& q) {
  const Problem& p = j.p;
  const int most_out = most_copies(j, q), most_in = p.g * p.S * q.share / 8;
  const i64 far = i64(j.mean) * q.select_far / 100;
  std::memset(j.chosen, 0, j.pairs);
  std::memset(j.copies_out, 0, sizeof(i32) * p.R);
  std::memset(j.copies_in, 0, sizeof(i32) * p.M);
  std::copy(j.base.far_in, j.base.far_in + p.R, j.far_in_left);
  std::copy(j.domain_far_out, j.domain_far_out + p.M, j.far_out_left);
  for (int pass = 0; pass < 2; ++pass) {
    for (int i = 0; i < j.pairs; ++i) {
      const int d = j.pair_domain[i], m = p.main[j.pair_expert[i]];
      if (j.chosen[i] || j.copies_in[d] >= most_in || j.copies_out[m] >= most_out) continue;
      if (pass == 0 ? j.far_in_left[m] <= far : j.far_out_left[d] <= far * p.g) continue;
      j.chosen[i] = 1;
      ++j.copies_in[d];
      ++j.copies_out[m];
      j.far_in_left[m] -= j.pair_demand[i];
      j.far_out_left[d] -= j.pair_demand[i];
    }
  }
}

// amount[i][d] of every touched expert: each domain executes its own demand where the expert is
// hosted, home executes the rest.
PLANNER_FN void bring(Joint& j) {
  const Problem& p = j.p;
  j.touched = 0;
  for (int d = 0; d < p.M; ++d) j.domain_load[d] = 0;
  for (int r = 0; r < p.R; ++r) j.domain_load[p.domain_of(r)] += j.base.load[r];
  for (int n = 0; n < j.pairs; ++n) {
    if (!j.chosen[n]) continue;
    const int d = j.pair_domain[n], x = j.pair_expert[n], h = p.home(x);
    if (!j.touch_index[x]) {
      const i64 row = i64(j.touched) * p.M;
      j.touched_expert[j.touched] = x;
      j.touch_index[x] = ++j.touched;
      for (int t = 0; t < p.M; ++t) {
        j.amount[row + t] = t == h ? j.total[x] : 0;
        j.hosted[row + t] = t == h;
      }
    }
    const i64 row = i64(j.touch_index[x] - 1) * p.M;
    j.hosted[row + d] = 1;
    j.amount[row + d] = j.pair_demand[n];
    j.amount[row + h] -= j.pair_demand[n];
    j.domain_load[d] += j.pair_demand[n];
    j.domain_load[h] -= j.pair_demand[n];
  }
}

// Levels the domains: the fullest hands work to the emptiest, spread over all experts that both
// host, because one lump would land on one in-port.
PLANNER_FN void shift_work(Joint& j) {
  const Problem& p = j.p;
  const i64 level = i64(j.mean) * p.g;
  for (int step = 0; step < 2 * p.M; ++step) {
    int h = 0, t = 0;
    for (int d = 1; d < p.M; ++d) {
      if (j.domain_load[d] > j.domain_load[h]) h = d;
      if (j.domain_load[d] < j.domain_load[t]) t = d;
    }
    i64 shared = 0;
    for (int i = 0; i < j.touched; ++i) {
      const i64 row = i64(i) * p.M;
      if (j.hosted[row + h] && j.hosted[row + t]) shared += j.amount[row + h];
    }
    const i64 need = std::min({j.domain_load[h] - level, level - j.domain_load[t], shared});
    if (need <= 0) return;
    i64 before = 0, given = 0;
    for (int i = 0; i < j.touched; ++i) {
      const i64 row = i64(i) * p.M;
      if (!j.hosted[row + h] || !j.hosted[row + t]) continue;
      before += j.amount[row + h];
      const i64 v = need * before / shared - given;  // prefix rounding
      given += v;
      j.amount[row + h] -= i32(v);
      j.amount[row + t] += i32(v);
    }
    j.domain_load[h] -= need;
    j.domain_load[t] += need;
    if (j.domain_load[h] > level && j.domain_load[t] < level) return;  // nothing left to share
  }
}

// What the mains execute before near copies relieve them.
PLANNER_FN void lower_mains(Joint& j) {
  const Problem& p = j.p;
  std::memcpy(j.main_quota, j.base_quota, sizeof(i32) * p.E);
  std::memcpy(j.main_outside, j.base_outside, sizeof(i32) * p.E);
  std::memcpy(j.mains_load, j.base.load, sizeof(i32) * p.R);
  std::memcpy(j.mains_outside, j.base.far_in, sizeof(i32) * p.R);
  for (int i = 0; i < j.touched; ++i) {
    const int x = j.touched_expert[i], m = p.main[x], h = p.home(x);
    const int k = m * p.e + p.main_index[x];
    const i32 now = j.amount[i64(i) * p.M + h], outside = std::max(0, now - j.demand(h, x));
    j.mains_load[m] -= j.main_quota[k] - now;
    j.mains_outside[m] -= j.main_outside[k] - outside;
    j.main_quota[k] = now;
    j.main_outside[k] = outside;
  }
}

PLANNER_FN void add_item(Joint& j, int& items, i32 size, int x, int source) {
  int i = items++;  // kept by (size desc, expert asc, earlier first)
  for (; i > 0; --i) {
    const i32 other = j.item_size[i - 1];
    if (other > size || (other == size && j.item_expert[i - 1] <= x)) break;
    j.item_size[i] = j.item_size[i - 1];
    j.item_expert[i] = j.item_expert[i - 1];
    j.item_source[i] = j.item_source[i - 1];
  }
  j.item_size[i] = size;
  j.item_expert[i] = x;
  j.item_source[i] = source;
}

// Cuts pieces off the mains of rank r until it is at the level and its mains keep no more than
// `far` from outside. A piece carries outside work first.
PLANNER_FN void shed(Joint& j, int r, i32 level, i32 far, int& items) {
  const Problem& p = j.p;
  i32* quota = j.main_quota + r * p.e;
  i32* outside = j.main_outside + r * p.e;
  i32 over = j.mains_load[r] - level, far_over = j.mains_outside[r] - far;
  while (over > 0 || far_over > 0) {
    int best = -1;
    i32 piece = 0;
    if (far_over > 0 && far_over > over) {  // the main with most outside work
      for (int k = 0; k < p.e; ++k) {
        const i32 v = std::min(quota[k], outside[k]);
        if (v > piece) piece = v, best = k;
      }
      if (best < 0) {
        far_over = 0;
        continue;
      }
      piece = std::min(piece, far_over);
    } else {  // the smallest main that covers `over`, else the largest
      for (int k = 0; k < p.e; ++k) {
        const i32 v = quota[k], b = best < 0 ? 0 : quota[best];
        if (v > 0 && (v >= over ? b < over || v < b : b < over && v > b)) best = k;
      }
      if (best < 0) return;
      piece = std::min(over, quota[best]);
    }
    const i32 from_outside = std::min(piece, outside[best]);
    quota[best] -= piece;
    outside[best] -= from_outside;
    j.mains_load[r] -= piece;
    over -= piece;
    far_over -= from_outside;
    add_item(j, items, piece, p.mains[r * p.e + best], r);
  }
}

PLANNER_FN bool holds(const Joint& j, const Slots& s, int r, int used, int x) {
  for (int k = r * j.p.S; k < r * j.p.S + used; ++k) {
    if (s.expert[k] == x) return true;
  }
  return false;
}

// Experts of other domains that d hosts, by (amount desc, expert), into `brought`.
PLANNER_FN int list_brought(Joint& j, int d) {
  const Problem& p = j.p;
  int n = 0;
  const auto amount = [&](int x) { return j.amount[i64(j.touch_index[x] - 1) * p.M + d]; };
  for (int i = 0; i < j.touched; ++i) {
    const int x = j.touched_expert[i];
    if (p.home(x) == d || amount(x) == 0) continue;
    int k = n++;
    for (; k > 0; --k) {
      const int y = j.brought[k - 1];
      if (amount(y) > amount(x) || (amount(y) == amount(x) && y < x)) break;
      j.brought[k] = y;
    }
    j.brought[k] = x;
  }
  return n;
}

// Fills the slots of domain d so that no rank executes more than the level, if that can be done.
// False when a brought expert finds no slot.
PLANNER_FN bool fill(Joint& j, int d, const Recipe& q, i32 level, Slots& s) {
  const Problem& p = j.p;
  const int first = d * p.g, end = first + p.g;
  const int arrivals = std::min(most_copies(j, q), p.S);  // far copies that one rank may receive
  i32* load = j.mains_load;
  i32 *used = j.used - first, *arrived = j.arrived - first;
  for (int r = first; r < end; ++r) used[r] = arrived[r] = 0;
  for (int k = first * p.S; k < end * p.S; ++k) s.expert[k] = -1, s.outside[k] = 0;
  int free = p.g * p.S, items = 0;
  const auto put = [&](int r, int x, i32 amount, bool foreign) {
    const int k = r * p.S + used[r]++;
    s.expert[k] = x;
    s.quota[k] = amount;
    load[r] += amount;
    arrived[r] += foreign;
    --free;
    return k;
  };
  const int brought = list_brought(j, d);
  for (int i = 0; i < brought; ++i) {
    const int x = j.brought[i];
    const i32 amount = j.amount[i64(j.touch_index[x] - 1) * p.M + d];
    if (!q.whole) {
      add_item(j, items, amount, x, -1);
      continue;
    }
    int best = -1;  // the emptiest rank
    for (int r = first; r < end; ++r) {
      if (used[r] < p.S && arrived[r] < arrivals && (best < 0 || load[r] < load[best])) best = r;
    }
    if (best < 0) return false;
    put(best, x, amount, true);
  }
  int pending = items;  // brought experts without a slot: each has one reserved
  const i64 far = q.fill_far > 0 ? i64(j.mean) * q.fill_far / 100 : INT32_MAX;
  for (int r = first; r < end; ++r) shed(j, r, level, i32(far), items);
  for (int i = 0; i < items; ++i) {
    const int x = j.item_expert[i], source = j.item_source[i];
    const bool foreign = source < 0;
    i32 rest = j.item_size[i];
    int last = -1;
    pending -= foreign;
    while (rest > 0) {
      const bool must = foreign && last < 0;
      int best = -1;
      i32 most = 0;  // room of `best`
      for (int r = first; r < end && (must || free > pending); ++r) {
        if (used[r] == p.S || r == source || (foreign && arrived[r] >= arrivals) ||
            holds(j, s, r, used[r], x)) {
          continue;
        }
        const i32 room = level - load[r];  // the smallest that takes the rest, else the largest
        if (best < 0 || (room >= rest ? most < rest || room < most : most < rest && room > most)) {
          best = r;
          most = room;
        }
      }
      if (best < 0 || (!must && most <= 0)) break;
      const bool cut = most < rest && most > 0 && free - 1 > pending;
      const i32 amount = cut ? most : rest;
      last = put(best, x, amount, foreign);
      rest -= amount;
    }
    if (foreign && last < 0) return false;
    if (rest > 0 && foreign) {  // no more slots: its last instance takes the rest
      s.quota[last] += rest;
      load[last / p.S] += rest;
    } else if (rest > 0) {
      load[source] += rest;  // stays on the main
    }
  }
  return true;
}

// What each domain executes of the candidate `chosen`. Returns the level for its ranks.
PLANNER_FN i32 divide_work(Joint& j) {
  const Problem& p = j.p;
  bring(j);
  shift_work(j);
  lower_mains(j);
  i64 level = j.mean;
  for (int d = 0; d < p.M; ++d) level = std::max(level, (j.domain_load[d] + p.g - 1) / p.g);
  return i32(level);
}

PLANNER_FN void forget_touched(Joint& j) {
  for (int i = 0; i < j.touched; ++i) j.touch_index[j.touched_expert[i]] = 0;
}

// The slots of the candidate `chosen` into `trial`; false when they do not fit.
inline bool build(Joint& j, const Recipe& q) {
  const i32 level = divide_work(j);
  bool fits = true;
  for (int d = 0; d < j.p.M && fits; ++d) fits = fill(j, d, q, level, j.trial);
  forget_touched(j);
  return fits;
}

}  // namespace topoep::joint
