// Nodes first, then the ranks inside each node, then both together. Letters as in sets.h.
#pragma once
#include "pairs.h"
#include "swaps.h"

namespace topoep {
namespace placement {

struct Effort {
  int starts;  // random starting points beside the greedy one; every second is annealed
  i64 moves;   // random swaps of one annealing
  int kicks;   // disturbances of the best placement, each followed by a descent
};

struct Weights {
  i64 node;     // rows that one distinct node of a token weighs
  i64 balance;  // per cent
};

inline i64 load_weight(const Sets& sets, const Weights& weights, int groups) {
  return weights.balance * sets.tokens / (100 * groups);
}

// From `start`: disturb by a few random swaps and descend; keep what is cheaper, else go back.
inline std::vector<i32> polish(Swaps& swaps, const std::vector<i32>& start, int kicks,
                               Random& random) {
  constexpr int kSwaps = 3;
  const int experts = int(start.size());
  swaps.start(start);
  swaps.descend();
  swaps.keep();
  for (int i = 0; i < kicks; ++i) {
    const i64 cost = swaps.cost();
    for (int n = 0; n < kSwaps; ++n) {
      const int a = random.below(experts), b = random.below(experts);
      if (swaps.ranks()[a] != swaps.ranks()[b]) swaps.swap(a, b);
    }
    swaps.descend();
    swaps.cost() < cost ? swaps.keep() : swaps.undo();
  }
  return swaps.ranks();
}

// Groups of equal size with few distinct groups per token.
inline std::vector<i32> place_flat(const Sets& sets, const std::vector<i64>& load, int groups,
                                   const Weights& weights, const Effort& effort, Random& random) {
  if (groups == 1) return std::vector<i32>(sets.experts, 0);
  Pairs pairs(sets, groups);
  Swaps swaps(sets, load, groups, 1, 0, load_weight(sets, weights, groups));
  std::vector<i32> best;
  i64 cost = 0;
  for (int start = 0; start <= effort.starts; ++start) {
    std::vector<i32> group = start ? pairs.random(random) : pairs.greedy();
    if (start % 2) pairs.anneal(group, effort.moves, random);
    pairs.descend(group);
    swaps.start(group);
    swaps.descend();
    if (best.empty() || swaps.cost() < cost) cost = swaps.cost(), best = swaps.ranks();
  }
  return polish(swaps, best, effort.kicks, random);
}

// The sets as seen by some of the experts, renumbered; sets with fewer than two of them say nothing.
inline Sets restricted(const Sets& sets, const std::vector<i32>& members) {
  std::vector<i32> index(sets.experts, -1);
  for (size_t i = 0; i < members.size(); ++i) index[members[i]] = i32(i);
  Sets inside;
  inside.experts = int(members.size());
  inside.tokens = sets.tokens;
  std::vector<i32> kept;
  for (int u = 0; u < sets.size(); ++u) {
    kept.clear();
    for (i32 i = sets.begin[u]; i < sets.begin[u + 1]; ++i) {
      if (index[sets.member[i]] >= 0) kept.push_back(index[sets.member[i]]);
    }
    if (kept.size() > 1) inside.add(kept.data(), int(kept.size()), sets.weight[u]);
  }
  return inside;
}

// Rank of each expert. `nodes` divides `ranks`, `ranks` divides the experts.
inline std::vector<i32> place(const Sets& sets, const std::vector<i64>& load, int ranks, int nodes,
                              const Weights& weights, const Effort& effort, std::uint64_t seed) {
  Random random{seed};
  if (nodes == 1) return place_flat(sets, load, ranks, weights, effort, random);
  const std::vector<i32> node = place_flat(sets, load, nodes, weights, effort, random);
  const int per_node = ranks / nodes;
  std::vector<i32> rank(sets.experts);
  for (int n = 0; n < nodes; ++n) {
    std::vector<i32> members;
    std::vector<i64> load_inside;
    for (int e = 0; e < sets.experts; ++e) {
      if (node[e] == n) members.push_back(e), load_inside.push_back(load[e]);
    }
    const std::vector<i32> inside =
        place_flat(restricted(sets, members), load_inside, per_node, weights, effort, random);
    for (size_t i = 0; i < members.size(); ++i) rank[members[i]] = n * per_node + inside[i];
  }
  Swaps swaps(sets, load, ranks, nodes, weights.node, load_weight(sets, weights, ranks));
  return polish(swaps, rank, effort.kicks, random);
}

}  // namespace placement
}  // namespace topoep
