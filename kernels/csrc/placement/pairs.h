// Starting points from pairs alone: how often two experts serve one token. Cheap, and for top-2 the
// true cost. Letters as in sets.h.
#pragma once
#include <numeric>

#include "sets.h"

namespace topoep {
namespace placement {

class Pairs {
 public:
  Pairs(const Sets& sets, int groups) : E_(sets.experts), H_(groups), W_(i64(E_) * E_, 0) {
    for (int u = 0; u < sets.size(); ++u) {
      for (i32 i = sets.begin[u]; i < sets.begin[u + 1]; ++i) {
        for (i32 j = sets.begin[u]; j < sets.begin[u + 1]; ++j) {
          if (i != j) at(sets.member[i], sets.member[j]) += sets.weight[u];
        }
      }
    }
  }

  // Groups grown one after another: first the free expert with most company, then whoever is
  // chosen most often with those inside. Ties: lowest expert.
  std::vector<i32> greedy() const {
    std::vector<i32> group(E_, -1);
    std::vector<i64> gain(E_);
    for (int h = 0; h < H_; ++h) {
      for (int n = 0; n < E_ / H_; ++n) {
        if (n == 0) {
          for (int e = 0; e < E_; ++e) {
            gain[e] = 0;
            for (int f = 0; f < E_; ++f) gain[e] += group[f] < 0 ? at(e, f) : 0;
          }
        }
        int best = -1;
        for (int e = 0; e < E_; ++e) {
          if (group[e] < 0 && (best < 0 || gain[e] > gain[best])) best = e;
        }
        group[best] = h;
        for (int e = 0; e < E_; ++e) gain[e] = (n == 0 ? 0 : gain[e]) + at(best, e);
      }
    }
    return group;
  }

  std::vector<i32> random(Random& random) const {
    std::vector<i32> group(E_);
    for (int e = 0; e < E_; ++e) group[e] = e / (E_ / H_);
    for (int e = E_ - 1; e > 0; --e) std::swap(group[e], group[random.below(e + 1)]);
    return group;
  }

  // Threshold accepting: random swaps that lose at most a bound, which falls linearly to zero.
  void anneal(std::vector<i32>& group, i64 moves, Random& random) {
    fill(group);
    const i64 total = std::accumulate(W_.begin(), W_.end(), i64(0));
    const i64 highest = kHeat * total / (i64(E_) * H_);
    for (i64 move = 0; move < moves; ++move) {
      const int a = random.below(E_), b = random.below(E_);
      if (group[a] != group[b] && gain(group, a, b) >= -(highest * (moves - move) / moves)) {
        swap(group, a, b);
      }
    }
  }

  // The best swap until none helps. Ties: lowest pair.
  void descend(std::vector<i32>& group) {
    fill(group);
    while (true) {
      i64 best = 0;
      int best_a = -1, best_b = -1;
      for (int a = 0; a < E_; ++a) {
        for (int b = a + 1; b < E_; ++b) {
          if (group[a] == group[b]) continue;
          const i64 value = gain(group, a, b);
          if (value > best) best = value, best_a = a, best_b = b;
        }
      }
      if (best_a < 0) return;
      swap(group, best_a, best_b);
    }
  }

 private:
  static constexpr i64 kHeat = 2;  // times the mean pair weight of an expert with one group

  i32& at(int e, int f) { return W_[i64(e) * E_ + f]; }
  i32 at(int e, int f) const { return W_[i64(e) * E_ + f]; }
  i64 company(int h, int e) const { return D_[i64(h) * E_ + e]; }

  void fill(const std::vector<i32>& group) {
    D_.assign(i64(H_) * E_, 0);
    for (int e = 0; e < E_; ++e) {
      for (int f = 0; f < E_; ++f) D_[i64(group[e]) * E_ + f] += at(e, f);
    }
  }

  i64 gain(const std::vector<i32>& group, int a, int b) const {
    const int ga = group[a], gb = group[b];
    return company(gb, a) - company(ga, a) + company(ga, b) - company(gb, b) - 2 * i64(at(a, b));
  }

  void swap(std::vector<i32>& group, int a, int b) {
    i32* in_a = &D_[i64(group[a]) * E_];
    i32* in_b = &D_[i64(group[b]) * E_];
    const i32 *of_a = &W_[i64(a) * E_], *of_b = &W_[i64(b) * E_];
    for (int e = 0; e < E_; ++e) {
      in_a[e] += of_b[e] - of_a[e];
      in_b[e] += of_a[e] - of_b[e];
    }
    std::swap(group[a], group[b]);
  }

  int E_, H_;
  std::vector<i32> W_;  // (E, E): tokens that chose both, 0 on the diagonal
  std::vector<i32> D_;  // (H, E): tokens of expert e, once for each other expert in group h
};

}  // namespace placement
}  // namespace topoep
