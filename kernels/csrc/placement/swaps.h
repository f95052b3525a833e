// Swap search on the true cost: distinct groups per token, plus the spread of the loads. Tables make
// the exact change of any swap a handful of additions. Letters as in sets.h.
#pragma once
#include <algorithm>
#include <utility>

#include "sets.h"

namespace topoep {
namespace placement {

// One level of groups (ranks, or nodes) and what leaving and entering them costs, in tokens.
struct Level {
  i64 weight = 0;        // of one distinct group of one token, in kUnit
  std::vector<i32> group;  // (E,)
  std::vector<i32> freed;  // (E,): tokens of e that have nobody else on its group
  std::vector<i32> paid;   // (H, E): tokens of e that have nobody on group h
  std::vector<i32> both;   // (E, E): what `freed` of a and b count of tokens holding both
};

class Swaps {
 public:
  // `ranks` groups; with `nodes` > 1 also the nodes of ranks/nodes ranks each, at `node_weight`.
  Swaps(const Sets& sets, const std::vector<i64>& load, int ranks, int nodes, i64 node_weight,
        i64 load_weight)
      : sets_(sets), E_(sets.experts), R_(ranks), per_node_(ranks / nodes),
        load_(scaled_loads(load, ranks)), load_weight_(load_weight), levels_(nodes > 1 ? 2 : 1) {
    levels_[0].weight = kUnit;
    if (nodes > 1) levels_[1].weight = node_weight * kUnit;
    index_experts();
  }

  void start(const std::vector<i32>& rank_E) {
    rank_ = rank_E;
    history_.clear();
    sum_.assign(R_, 0);
    for (int e = 0; e < E_; ++e) sum_[rank_[e]] += load_[e];
    cost_ = 0;
    for (i64 sum : sum_) cost_ += load_weight_ * sum * sum;
    for (size_t l = 0; l < levels_.size(); ++l) {
      Level& level = levels_[l];
      level.group = rank_;
      if (l == 1) {
        for (i32& group : level.group) group /= per_node_;
      }
      const i64 groups = l == 1 ? R_ / per_node_ : R_;
      level.freed.assign(E_, 0);
      level.paid.assign(groups * E_, 0);
      level.both.assign(i64(E_) * E_, 0);
      for (int e = 0; e < E_; ++e) {
        for (i64 h = 0; h < groups; ++h) level.paid[h * E_ + e] = tokens_[e];
      }
      for (int u = 0; u < sets_.size(); ++u) cost_ += level.weight * tally(level, u, 1);
    }
  }

  const std::vector<i32>& ranks() const { return rank_; }
  i64 cost() const { return cost_; }

  // The best swap until none helps. Ties: lowest pair.
  void descend() {
    while (true) {
      i64 best = 0;
      int best_a = -1, best_b = -1;
      for (int a = 0; a < E_; ++a) {
        for (int b = a + 1; b < E_; ++b) {
          if (rank_[a] == rank_[b]) continue;
          const i64 value = change(a, b);
          if (value < best) best = value, best_a = a, best_b = b;
        }
      }
      if (best_a < 0) return;
      swap(best_a, best_b);
    }
  }

  void swap(int a, int b) {
    cost_ += change(a, b);
    for (Level& level : levels_) {
      if (level.group[a] == level.group[b]) continue;
      tally_tokens(level, a, b, -1);
      std::swap(level.group[a], level.group[b]);
      tally_tokens(level, a, b, 1);
    }
    sum_[rank_[a]] += load_[b] - load_[a];
    sum_[rank_[b]] += load_[a] - load_[b];
    std::swap(rank_[a], rank_[b]);
    history_.emplace_back(a, b);
  }

  void keep() { history_.clear(); }

  // Back to what was last kept (or started from).
  void undo() {
    while (!history_.empty()) {
      const auto [a, b] = history_.back();
      swap(a, b);
      history_.resize(history_.size() - 2);
    }
  }

 private:
  // A token that holds both experts visits the same groups after the swap, hence `both`.
  i64 change(int a, int b) const {
    const i64 x = load_[a] - load_[b];
    i64 value = load_weight_ * 2 * x * (x + sum_[rank_[b]] - sum_[rank_[a]]);
    for (const Level& level : levels_) {
      const i64 ga = level.group[a], gb = level.group[b];
      if (ga == gb) continue;
      value += level.weight * (i64(level.paid[gb * E_ + a]) + level.paid[ga * E_ + b] +
                               level.both[i64(a) * E_ + b] - level.freed[a] - level.freed[b]);
    }
    return value;
  }

  // Add (sign 1) or take (sign -1) one set's part of a level's tables; returns its groups' tokens.
  i64 tally(Level& level, int u, i32 sign) {
    const i32* member = &sets_.member[sets_.begin[u]];
    const int count = sets_.begin[u + 1] - sets_.begin[u];
    const i32 weight = sign * sets_.weight[u];
    i64 groups = 0;
    for (int i = 0; i < count; ++i) {
      const i32 group = level.group[member[i]];
      int first = i, company = 0;
      for (int j = count - 1; j >= 0; --j) {
        if (level.group[member[j]] == group) first = j, ++company;
      }
      if (company == 1) {
        level.freed[member[i]] += weight;
        for (int j = 0; j < count; ++j) {
          if (i == j) continue;
          level.both[i64(member[i]) * E_ + member[j]] += weight;
          level.both[i64(member[j]) * E_ + member[i]] += weight;
        }
      }
      if (first == i) {
        groups += weight;
        for (int j = 0; j < count; ++j) level.paid[i64(group) * E_ + member[j]] -= weight;
      }
    }
    return groups;
  }

  // Every set of a or b, each once.
  void tally_tokens(Level& level, int a, int b, i32 sign) {
    for (i32 at = begin_of_[a]; at < begin_of_[a + 1]; ++at) tally(level, set_of_[at], sign);
    for (i32 at = begin_of_[b]; at < begin_of_[b + 1]; ++at) {
      const int u = set_of_[at];
      const i32* begin = sets_.member.data() + sets_.begin[u];
      const i32* end = sets_.member.data() + sets_.begin[u + 1];
      if (std::find(begin, end, a) == end) tally(level, u, sign);
    }
  }

  void index_experts() {
    begin_of_.assign(E_ + 1, 0);
    tokens_.assign(E_, 0);
    for (i32 e : sets_.member) ++begin_of_[e + 1];
    for (int e = 0; e < E_; ++e) begin_of_[e + 1] += begin_of_[e];
    set_of_.resize(sets_.member.size());
    std::vector<i32> next(begin_of_.begin(), begin_of_.end() - 1);
    for (int u = 0; u < sets_.size(); ++u) {
      for (i32 i = sets_.begin[u]; i < sets_.begin[u + 1]; ++i) {
        set_of_[next[sets_.member[i]]++] = u;
        tokens_[sets_.member[i]] += sets_.weight[u];
      }
    }
  }

  const Sets& sets_;
  int E_, R_, per_node_;
  std::vector<i64> load_;  // scaled
  i64 load_weight_;
  std::vector<Level> levels_;
  std::vector<i32> begin_of_, set_of_;  // the sets that hold an expert
  std::vector<i32> tokens_;             // (E,): tokens that chose it
  std::vector<i32> rank_;
  std::vector<i64> sum_;  // (R,): scaled load
  i64 cost_ = 0;
  std::vector<std::pair<int, int>> history_;  // swaps since the last keep
};

}  // namespace placement
}  // namespace topoep
