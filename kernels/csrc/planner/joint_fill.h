// Fills the replica slots of one domain so that no rank executes more than a level.
#pragma once

#include "joint_state.h"

namespace topoep::joint {

struct FillTargets {
  i64 level;    // assignments on a rank
  i64 far_in;   // outside assignments that mains of one rank keep, kNever = all
  int arrivals; // far copies that one rank may receive
  bool whole;
};

inline i32 executed_in(const Joint& j, int d, int x) {
  const int i = j.touch_index[x] - 1;
  if (i < 0) return d == j.p.home(x) ? j.total[x] : 0;
  return j.amount[i64(i) * j.p.M + d];
}

// Sheds of mains: what is above the level, and outside demand above the far target. Appends items.
inline int shed(Joint& j, int d, const FillTargets& t, int items) {
  const Problem& p = j.p;
  for (int r = 0; r < p.g; ++r) {
    i64 over = j.rank_load[r] - t.level;
    i64 far = j.c_far_in[d * p.g + r] - t.far_in;
    i32* quota = j.main_quota + r * p.e;
    i32* outside = j.main_outside + r * p.e;
    while (over > 0 || far > 0) {
      int best = -1;
      i64 piece = 0;
      if (far > 0 && far > over) {
        for (int k = 0; k < p.e; ++k) {
          const i64 v = std::min(quota[k], outside[k]);
          if (v > piece) piece = v, best = k;
        }
        if (best < 0) {
          far = 0;
          continue;
        }
        piece = std::min(piece, far);
      } else {  // the smallest main that covers `over`, else the largest
        for (int k = 0; k < p.e; ++k) {
          const i64 v = quota[k];
          if (v <= 0) continue;
          const i64 b = best < 0 ? 0 : quota[best];
          if (best < 0 || (v >= over ? b < over || v < b : b < over && v > b)) best = k;
        }
        if (best < 0) break;
        piece = std::min<i64>(over, quota[best]);
      }
      const i64 from_outside = std::min<i64>(piece, outside[best]);
      quota[best] -= i32(piece);
      outside[best] -= i32(from_outside);
      j.rank_load[r] -= piece;
      over -= piece;
      far -= from_outside;
      j.item_size[items] = i32(piece);
      j.item_expert[items] = p.mains[(d * p.g + r) * p.e + best];
      j.item_source[items++] = r;
    }
  }
  return items;
}

inline void sort_items(Joint& j, int n) {
  for (int i = 1; i < n; ++i) {
    const i32 size = j.item_size[i], x = j.item_expert[i], source = j.item_source[i];
    int k = i - 1;
    for (; k >= 0 && (j.item_size[k] < size || (j.item_size[k] == size && j.item_expert[k] > x));
         --k) {
      j.item_size[k + 1] = j.item_size[k];
      j.item_expert[k + 1] = j.item_expert[k];
      j.item_source[k + 1] = j.item_source[k];
    }
    j.item_size[k + 1] = size;
    j.item_expert[k + 1] = x;
    j.item_source[k + 1] = source;
  }
}

inline bool holds(const Joint& j, const i32* slots, int r, int x) {
  for (int k = 0; k < j.used[r]; ++k) {
    if (slots[r * j.p.S + k] == x) return true;
  }
  return false;
}

// Moves half gaps from the busiest rank along experts that it and another rank both hold.
inline void even_out(Joint& j, int d, Slots s) {
  const Problem& p = j.p;
  const int first = d * p.g, slots = p.g * p.S;
  for (int step = 0; step < 2 * p.g; ++step) {
    int b = 0;
    for (int r = 1; r < p.g; ++r) {
      if (j.rank_load[r] > j.rank_load[b]) b = r;
    }
    i64 delta = 0;
    i32 *from = nullptr, *to = nullptr;
    int target = 0;
    const auto consider = [&](i32* a, i32* into, int r) {
      const i64 v = std::min<i64>((j.rank_load[b] - j.rank_load[r]) / 2, *a);
      if (v > delta) delta = v, from = a, to = into, target = r;
    };
    for (int k = 0; k < slots; ++k) {
      const int x = s.expert[k];
      if (x < 0) continue;
      const int r = k / p.S, m = p.main[x] - first;
      const bool home = m >= 0 && m < p.g;
      i32* main = home ? j.main_quota + m * p.e + p.main_index[x] : nullptr;
      if (home && m == b) consider(main, s.quota + k, r);
      if (r != b) continue;
      if (home) consider(s.quota + k, main, m);
      for (int o = 0; o < slots; ++o) {
        if (s.expert[o] == x && o != k) consider(s.quota + k, s.quota + o, o / p.S);
      }
    }
    if (delta <= 0) return;
    *from -= i32(delta);
    *to += i32(delta);
    j.rank_load[b] -= delta;
    j.rank_load[target] += delta;
  }
}

// Slots of domain d into `s` (g*S). Returns the busiest rank's load, or -1 if a brought expert has no
// room. `brought` experts come in order of (amount desc, expert).
inline i64 fill(Joint& j, int d, int brought, const FillTargets& t, Slots s) {
  const Problem& p = j.p;
  const int first = d * p.g;
  std::memcpy(j.main_quota, j.c_quota + i64(first) * p.e, sizeof(i32) * p.g * p.e);
  std::memcpy(j.main_outside, j.c_outside + i64(first) * p.e, sizeof(i32) * p.g * p.e);
  for (int r = 0; r < p.g; ++r) {
    j.used[r] = j.arrived[r] = 0;
    j.rank_load[r] = j.c_load[first + r];
  }
  for (int k = 0; k < p.g * p.S; ++k) s.expert[k] = -1, s.quota[k] = 0;
  int free = p.g * p.S, items = 0;
  const auto put = [&](int r, int x, i64 amount) {
    const int k = r * p.S + j.used[r]++;
    s.expert[k] = x;
    s.quota[k] = i32(amount);
    j.rank_load[r] += amount;
    --free;
    return k;
  };
  for (int i = 0; i < brought; ++i) {
    const int x = j.brought[i];
    const i32 amount = executed_in(j, d, x);
    if (!t.whole) {
      j.item_size[items] = amount;
      j.item_expert[items] = x;
      j.item_source[items++] = -1;
      continue;
    }
    int best = -1;
    for (int r = 0; r < p.g; ++r) {
      if (j.used[r] < p.S && j.arrived[r] < t.arrivals &&
          (best < 0 || j.rank_load[r] < j.rank_load[best])) {
        best = r;
      }
    }
    if (best < 0) return -1;
    put(best, x, amount);
    ++j.arrived[best];
  }
  int pending = items;
  items = shed(j, d, t, items);
  sort_items(j, items);
  for (int i = 0; i < items; ++i) {
    const int x = j.item_expert[i], source = j.item_source[i];
    const bool foreign = source < 0;
    i64 rest = j.item_size[i];
    int last = -1;
    pending -= foreign;
    while (rest > 0 || (foreign && last < 0)) {
      int best = -1;
      const bool must = foreign && last < 0;
      for (int r = 0; r < p.g && (must || free > pending); ++r) {
        if (j.used[r] == p.S || r == source || (foreign && j.arrived[r] >= t.arrivals) ||
            holds(j, s.expert, r, x)) {
          continue;
        }
        const i64 room = t.level - j.rank_load[r];
        const i64 most = best < 0 ? 0 : t.level - j.rank_load[best];
        // the smallest room that takes the rest, else the largest room
        if (best < 0 || (room >= rest ? most < rest || room < most : most < rest && room > most)) {
          best = r;
        }
      }
      if (best < 0) break;
      const i64 room = t.level - j.rank_load[best];
      if (!must && room <= 0) break;
      const bool cut = room < rest && room > 0 && free - 1 > pending;
      const i64 amount = cut ? room : rest;
      last = put(best, x, amount);
      j.arrived[best] += foreign;
      rest -= amount;
    }
    if (foreign && last < 0) return -1;
    if (rest > 0 && foreign) {  // no more slots: its last instance takes the rest
      s.quota[last] += i32(rest);
      j.rank_load[last / p.S] += rest;
    } else if (rest > 0) {
      j.main_quota[source * p.e + p.main_index[x]] += i32(rest);
      j.rank_load[source] += rest;
    }
  }
  if (!getenv("NOEV")) even_out(j, d, s);
  i64 busiest = 0;
  for (int r = 0; r < p.g; ++r) busiest = std::max(busiest, j.rank_load[r]);
  return busiest;
}

}  // namespace topoep::joint
