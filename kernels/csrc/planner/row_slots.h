// Which of a source's tokens use which instance, so that few rows travel.
//
// planning/row_slots.py is the specification. Letters: R ranks, G slots, T tokens of the source, K
// top-k; expert x's assignments lie one after the other in `where`, by token.
#pragma once

#include <algorithm>

#include "problem.h"

namespace topoep::rows {

// What an assignment would add to the rows of its token, by rising price.
enum Row { kNone, kNear, kFar, kFarAndNear, kRows };

struct Picker {
  int R, g, per, E, rank;
  i64 T, K;
  bool relayed;              // dedup-node: over a relay in each node
  i64 price[kRows];
  unsigned char level[kRows][kRows];   // order of price[here] - price[later], equal ones alike
  const i64* ids;            // [T][K]
  const i32* expert;         // [G]
  const i32* count;          // [G] of this source
  std::int16_t* slot;        // [T][K] result
  i64* starts;               // [E+1] of x's assignments in `where`
  i64* where;                // [T*K] index t*K+k
  i32* first;                // [E+1] of x's used slots in `used`
  i32* used;                 // [G] slots with a count, by expert, then slot
  i32* order;                // [E] experts with several used slots
  unsigned char *ranks, *nodes;        // [T][R], [T][M]: where each token goes
  unsigned char* row;        // [instances][T] of one expert: Row of each token and instance
  unsigned char* regret;     // [T] level of each token of `left`
  i64* left;                 // [T] tokens of one expert without a slot yet
};

inline void carve(Picker& p, Workspace& w) {
  const i64 G = i64(p.R) * p.per, M = p.R / p.g;
  p.starts = w.take<i64>(p.E + 1);
  p.where = w.take<i64>(p.T * p.K);
  p.first = w.take<i32>(p.E + 1);
  p.used = w.take<i32>(G);
  p.order = w.take<i32>(p.E);
  p.ranks = w.take<unsigned char>(p.T * p.R);
  p.nodes = w.take<unsigned char>(p.T * M);
  p.row = w.take<unsigned char>(p.T * p.R);
  p.regret = w.take<unsigned char>(p.T);
  p.left = w.take<i64>(p.T);
}

// Groups assignments and used slots by expert. False when the counts are not those of `ids`.
inline bool group(Picker& p) {
  const int G = p.R * p.per;
  std::fill(p.starts, p.starts + p.E + 1, 0);
  for (i64 i = 0; i < p.T * p.K; ++i) {
    if (p.ids[i] < 0 || p.ids[i] >= p.E) return false;
    ++p.starts[p.ids[i]];
  }
  for (i64 x = 0, sum = 0; x <= p.E; ++x) {
    const i64 n = x < p.E ? p.starts[x] : 0;
    p.starts[x] = sum;
    sum += n;
  }
  for (i64 i = 0; i < p.T * p.K; ++i) p.where[p.starts[p.ids[i]]++] = i;
  for (int x = p.E; x > 0; --x) p.starts[x] = p.starts[x - 1];
  p.starts[0] = 0;

  std::fill(p.first, p.first + p.E + 1, 0);
  for (int s = 0; s < G; ++s) {
    if (p.count[s] < 0 || (p.count[s] > 0 && (p.expert[s] < 0 || p.expert[s] >= p.E))) return false;
    if (p.count[s] > 0) ++p.first[p.expert[s]];
  }
  for (int x = 0, sum = 0; x <= p.E; ++x) {
    const int n = x < p.E ? p.first[x] : 0;
    p.first[x] = sum;
    sum += n;
  }
  for (int s = 0; s < G; ++s) {
    if (p.count[s] > 0) p.used[p.first[p.expert[s]]++] = s;
  }
  for (int x = p.E; x > 0; --x) p.first[x] = p.first[x - 1];
  p.first[0] = 0;
  for (int x = 0; x < p.E; ++x) {
    i64 sum = 0;
    for (int i = p.first[x]; i < p.first[x + 1]; ++i) sum += p.count[p.used[i]];
    const i64 n = p.starts[x + 1] - p.starts[x];  // above T only where a token repeats an expert
    if (sum != n || n > p.T || p.first[x + 1] - p.first[x] > p.R) return false;
  }
  return true;
}

inline void visit(Picker& p, i64 t, int slot) {
  const int r = slot / p.per;
  p.ranks[t * p.R + r] = 1;
  p.nodes[t * (p.R / p.g) + r / p.g] = 1;
}

inline Row row_at(const Picker& p, i64 t, int slot) {
  const int r = slot / p.per, node = r / p.g;
  if (p.ranks[t * p.R + r]) return kNone;
  if (!p.relayed) return node == p.rank / p.g ? kNear : kFar;
  const bool relay = r % p.g == p.rank % p.g;
  if (p.nodes[t * (p.R / p.g) + node]) return relay ? kNone : kNear;
  return relay ? kFar : kFarAndNear;
}

// Ranks all regrets: the price of a row here, less the cheapest at a later instance.
inline void rank_regrets(Picker& p) {
  i64 regret[kRows * kRows];
  int n = 0;
  for (i64 here : p.price) {
    for (i64 later : p.price) regret[n++] = here - later;
  }
  std::sort(regret, regret + n);
  const i64* end = std::unique(regret, regret + n);
  for (int here = 0; here < kRows; ++here) {
    for (int later = 0; later < kRows; ++later) {
      const i64 value = p.price[here] - p.price[later];
      const i64* at = std::lower_bound(static_cast<const i64*>(regret), end, value);
      p.level[here][later] = (unsigned char)(at - regret);
    }
  }
}

// Deals expert x's tokens to its instances.
inline void deal(Picker& p, int x) {
  const i64* where = p.where + p.starts[x];
  const i64 n = p.starts[x + 1] - p.starts[x];
  const i32* slots = p.used + p.first[x];
  const int instances = p.first[x + 1] - p.first[x];
  for (int i = 0; i < instances; ++i) {
    for (i64 k = 0; k < n; ++k) p.row[i * n + k] = row_at(p, where[k] / p.K, slots[i]);
  }
  i64 open = n;
  for (i64 k = 0; k < n; ++k) p.left[k] = k;
  for (int i = 0; i < instances; ++i) {
    const auto give = [&](i64 k) {
      p.slot[where[k]] = std::int16_t(slots[i]);
      visit(p, where[k] / p.K, slots[i]);
    };
    if (i == instances - 1) {
      for (i64 k = 0; k < open; ++k) give(p.left[k]);
      return;
    }
    // A stable counting sort by regret: tokens below `takes` in that order are given a slot.
    i64 begin[kRows * kRows + 1] = {};
    for (i64 k = 0; k < open; ++k) {
      const i64 token = p.left[k];
      int cheapest = p.row[(i + 1) * n + token];
      for (int o = i + 2; o < instances; ++o) {
        const int other = p.row[o * n + token];
        if (p.price[other] < p.price[cheapest]) cheapest = other;
      }
      p.regret[k] = p.level[p.row[i * n + token]][cheapest];
      ++begin[p.regret[k] + 1];
    }
    for (int level = 1; level <= kRows * kRows; ++level) begin[level] += begin[level - 1];
    const i64 takes = p.count[slots[i]];
    i64 kept = 0;
    for (i64 k = 0; k < open; ++k) {
      const i64 token = p.left[k];
      if (begin[p.regret[k]]++ < takes) {
        give(token);
      } else {
        p.left[kept++] = token;
      }
    }
    open = kept;
  }
}

// Fills `slot`; false, with nothing of use in it, when the counts are not those of `ids`.
inline bool pick_slots(Picker& p) {
  if (!group(p)) return false;
  rank_regrets(p);
  const int M = p.R / p.g;
  std::fill(p.ranks, p.ranks + p.T * p.R, 0);
  std::fill(p.nodes, p.nodes + p.T * M, 0);
  for (i64 t = 0; t < p.T; ++t) visit(p, t, p.rank * p.per);
  int split = 0;
  for (int x = 0; x < p.E; ++x) {
    const int instances = p.first[x + 1] - p.first[x];
    if (instances > 1) p.order[split++] = x;
    if (instances != 1) continue;
    for (i64 k = p.starts[x]; k < p.starts[x + 1]; ++k) {
      p.slot[p.where[k]] = std::int16_t(p.used[p.first[x]]);
      visit(p, p.where[k] / p.K, p.used[p.first[x]]);
    }
  }
  std::stable_sort(p.order, p.order + split, [&](int x, int y) {
    return p.starts[x + 1] - p.starts[x] > p.starts[y + 1] - p.starts[y];
  });
  for (int i = 0; i < split; ++i) deal(p, p.order[i]);
  return true;
}

}  // namespace topoep::rows
