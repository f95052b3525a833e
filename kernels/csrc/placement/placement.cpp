// C ABI of the placement solver. Returns 0, or the code of the first thing wrong with its input;
// nothing is written then.
#include <algorithm>
#include <cstdint>
#include <new>

#include "solver.h"

using topoep::placement::i32;
using topoep::placement::i64;

// sets [U][K] of distinct experts, weight [U] tokens, load [E]; writes rank [E].
// topoep_kernels/ops.py holds the messages of the codes.
extern "C" __attribute__((visibility("default"))) int topoep_place(
    const i32* sets, const i32* weight, i64 U, i64 K, const i64* load, i64 E, i64 ranks, i64 nodes,
    i64 node_weight, i64 balance, i64 starts, i64 moves, i64 kicks, i64 seed, i32* rank) try {
  using namespace topoep::placement;
  constexpr i64 kMost = i64(1) << 30;
  if (E < 1 || ranks < 1 || nodes < 1 || E >= 1 << 15 || E % ranks || ranks % nodes) return 1;
  if (node_weight < 0 || node_weight > 1000 || balance < 0 || balance > 10000) return 2;
  if (starts < 0 || starts > 1000 || moves < 0 || moves > kMost || kicks < 0 || kicks > kMost) {
    return 2;
  }
  if (U < 0 || K < 1 || K > E || U * K >= kMost) return 3;
  Sets given;
  given.experts = int(E);
  for (i64 u = 0; u < U; ++u) {
    const i32* set = sets + u * K;
    for (i64 i = 0; i < K; ++i) {
      if (set[i] < 0 || set[i] >= E || std::find(set, set + i, set[i]) != set + i) return 3;
    }
    if (weight[u] < 0) return 3;
    given.tokens += weight[u];
    if (given.tokens * K >= kMost) return 3;
    given.add(set, int(K), weight[u]);
  }
  i64 total = 0;
  for (i64 e = 0; e < E; ++e) {
    if (load[e] < 0 || load[e] >= i64(1) << 31) return 4;
    total += load[e];
  }
  if (total >= i64(1) << 31) return 4;
  const std::vector<i64> loads(load, load + E);
  const std::vector<i32> placed =
      place(given, loads, int(ranks), int(nodes), {node_weight, balance},
            {int(starts), moves, int(kicks)}, std::uint64_t(seed));
  std::copy(placed.begin(), placed.end(), rank);
  return 0;
} catch (const std::bad_alloc&) {
  return 5;
}
