// What placement works on: distinct expert sets with their weights, loads, and one stream of random
// numbers. Letters: E experts, U distinct sets, H groups (ranks or nodes) of E/H experts each.
#pragma once
#include <cstdint>
#include <vector>

namespace topoep {
namespace placement {

using i32 = std::int32_t;
using i64 = std::int64_t;

constexpr i64 kUnit = i64(1) << 24;  // cost of one row; the load term is in the same unit
constexpr i64 kMeanLoad = 1 << 12;   // loads are scaled so that a group's mean is this

struct Sets {
  int experts = 0;
  std::vector<i32> begin{0};  // set u holds member[begin[u] .. begin[u + 1])
  std::vector<i32> member;
  std::vector<i32> weight;  // tokens that chose exactly this set
  i64 tokens = 0;           // of all sets, those left out of a smaller problem included

  int size() const { return int(weight.size()); }
  void add(const i32* experts_of_set, int count, i32 tokens_of_set) {
    member.insert(member.end(), experts_of_set, experts_of_set + count);
    begin.push_back(i32(member.size()));
    weight.push_back(tokens_of_set);
  }
};

// splitmix64.
struct Random {
  std::uint64_t state;
  std::uint64_t next() {
    std::uint64_t z = (state += 0x9E3779B97F4A7C15u);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }
  int below(int n) { return int((next() >> 32) * std::uint64_t(n) >> 32); }
};

// Loads in units of 1 / kMeanLoad of a group's mean, rounded half up.
inline std::vector<i64> scaled_loads(const std::vector<i64>& load, int groups) {
  i64 total = 0;
  for (i64 value : load) total += value;
  if (total == 0) return std::vector<i64>(load.size(), 0);
  std::vector<i64> scaled;
  for (i64 value : load) scaled.push_back((2 * value * kMeanLoad * groups + total) / (2 * total));
  return scaled;
}

}  // namespace placement
}  // namespace topoep
