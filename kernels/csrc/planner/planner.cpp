// C ABI of the CPU planners. Every function returns 0, or the code of the first thing wrong with
// its input; nothing is written then. Pointers are checked for contents, not for validity.
#include <initializer_list>
#include <new>
#include <vector>

#include "joint.h"
#include "row_slots.h"
#include "topoep.h"

namespace topoep {
namespace {

// topoep_kernels/ops.py holds their messages.
enum Error {
  kOk = 0,
  kBadSizes,
  kBadMain,
  kNegativeLoad,
  kLargeLoad,
  kBadCost,
  kBadSearch,
  kNoMemory,
  kBadCounts
};

// Reused by every plan of this thread: planning allocates nothing after the first call.
thread_local std::vector<char> block;

char* reserve(i64 bytes) {
  if (i64(block.size()) < bytes) block.resize(bytes);
  return block.data();
}

bool set_sizes(Problem& p, i64 R, i64 E, i64 S, i64 g) {
  const i64 most = i64(1) << 31;
  if (R < 1 || E < 1 || S < 0 || g < 1 || R >= most || E >= most || S >= most) return false;
  if (E % R || R % g || E + R * S >= most || (E + R * S) >= most / R) return false;
  p.R = int(R), p.E = int(E), p.S = int(S), p.g = int(g);
  p.M = p.R / p.g, p.e = p.E / p.R, p.per = p.e + p.S, p.G = p.R * p.per;
  return true;
}

// Narrows an int64 load into `copy`; checks that counts are non-negative and their sum fits int32.
template <class T>
Error check_load(const T* load, i64 count, i32* copy, i64& total) {
  T any = 0;
  std::uint64_t sum = 0;
  for (i64 i = 0; i < count; ++i) {
    any |= load[i];
    sum += std::uint64_t(load[i]);
    if (copy) copy[i] = i32(load[i]);
  }
  if (any < 0) return kNegativeLoad;
  if (any >= (i64(1) << 31) || sum >= (std::uint64_t(1) << 31)) return kLargeLoad;
  total = i64(sum);
  return kOk;
}

// Whether `count` of each unit price add up to less than a quarter of what int64 holds.
bool prices_fit(std::initializer_list<i64> units, i64 count) {
  double sum = 0;
  for (i64 unit : units) {
    if (unit < 0) return false;
    sum += double(unit) * double(count);
  }
  return sum < double(kNever / 2);
}

template <class State>
Error start(State& state, const void* load, int load_is_int64, const i32* main, i64 R, i64 E, i64 S,
            i64 g, i64& total) try {
  Problem& p = state.p;
  if (!set_sizes(p, R, E, S, g)) return kBadSizes;
  p.main = main;
  Workspace measure(nullptr);
  measure.take<i32>(load_is_int64 ? R * E : 0);
  measure.take<i32>(R);
  carve(state, measure);
  Workspace workspace(reserve(measure.used()));
  i32* copy = workspace.take<i32>(load_is_int64 ? R * E : 0);
  i32* count_R = workspace.take<i32>(R);
  carve(state, workspace);
  const Error error = load_is_int64
                          ? check_load(static_cast<const i64*>(load), R * E, copy, total)
                          : check_load(static_cast<const i32*>(load), R * E, nullptr, total);
  p.load = load_is_int64 ? copy : static_cast<const i32*>(load);
  if (error) return error;
  return index_mains(p, count_R) ? kOk : kBadMain;
} catch (const std::bad_alloc&) {
  return kNoMemory;
}

}  // namespace
}  // namespace topoep

#define API extern "C" __attribute__((visibility("default")))

using topoep::i32;
using topoep::i64;

// load [R][E] int32 or int64, main [E]; writes expert_G [G] and assignments_RG [R][G].
API int topoep_plan_topoep(const void* load, int load_is_int64, const i32* main, i64 R, i64 E,
                           i64 S, i64 g, i64 token_bytes, i64 expert_bytes, i64 token_far, i64 token_near,
                           i32* expert_G, i32* assignments_RG) {
  using namespace topoep;
  Topoep state;
  i64 total = 0;
  if (Error error = start(state, load, load_is_int64, main, R, E, S, g, total)) return error;
  if (!prices_fit({token_bytes, token_bytes, token_far, token_near}, total) ||
      !prices_fit({expert_bytes}, 1)) {
    return kBadCost;
  }
  state.cost = {token_bytes, expert_bytes, token_far, token_near};
  state.expert_G = expert_G;
  state.assignments_RG = assignments_RG;
  sum_demand(state.p);
  plan_topoep(state);
  return kOk;
}

// table [rows][5] of joint::Recipe; otherwise as above.
API int topoep_plan_joint(const void* load, int load_is_int64, const i32* main, i64 R, i64 E, i64 S,
                          i64 g, i64 token_bytes, i64 expert_bytes, i64 assignment, i64 token_far,
                          i64 token_near, i64 copy_far, i64 copy_near, i64 plan,
                          i64 balance_weight, const i32* table, i64 rows, i64 rounds,
                          i32* expert_G, i32* assignments_RG) {
  using namespace topoep;
  joint::Joint state;
  i64 total = 0;
  if (Error error = start(state, load, load_is_int64, main, R, E, S, g, total)) return error;
  if (balance_weight < 0 || balance_weight > 1000000 || rows < 0 || rows > 1000000 || rounds < 0) {
    return kBadSearch;
  }
  const auto* recipes = reinterpret_cast<const joint::Recipe*>(table);
  for (i64 row = 0; row < rows; ++row) {
    const joint::Recipe& q = recipes[row];
    for (i32 v : {q.copies, q.share, q.whole, q.select_far, q.fill_far}) {
      if (v < 0 || v > 1000) return kBadSearch;
    }
    if (q.share > 8) return kBadSearch;
  }
  // The excess counts a rank's traffic in and out; a score adds the weighted compute term.
  if (!prices_fit({assignment, token_far, token_far, token_near, token_near}, total) ||
      !prices_fit({assignment}, total / 100 * balance_weight + balance_weight) ||
      !prices_fit({copy_far, copy_near}, R * S) || !prices_fit({plan}, 1) ||
      !prices_fit({token_bytes, token_bytes}, total) || !prices_fit({expert_bytes}, 1)) {
    return kBadCost;
  }
  state.cost = {assignment, token_far, token_near, copy_far, copy_near, plan, balance_weight};
  state.expert_G = expert_G;
  state.assignments_RG = assignments_RG;
  state.published.p = state.p;
  state.published.cost = {token_bytes, expert_bytes, token_far, token_near};
  state.published.expert_G = expert_G;
  state.published.assignments_RG = assignments_RG;
  plan_joint(state, recipes, int(rows), int(std::min<i64>(rounds, INT32_MAX)));
  return kOk;
}

// ids [T][K] of source `rank`, expert [G] and count [G] of the plan; writes slot [T][K].
API int topoep_pick_slots(const i64* ids, i64 T, i64 K, const i32* expert, const i32* count, i64 R,
                          i64 g, i64 per, i64 E, i64 rank, int relayed, i64 token_far,
                          i64 token_near, std::int16_t* slot) try {
  using namespace topoep;
  if (R < 1 || g < 1 || R % g || per < 1 || E < 1 || rank < 0 || rank >= R || T < 0 || K < 1 ||
      R * per > (1 << 15) || E > R * per || T >= (i64(1) << 31) / K) {
    return kBadSizes;
  }
  if (!prices_fit({token_far, token_near}, 1)) return kBadCost;
  rows::Picker p{};
  p.R = int(R), p.g = int(g), p.per = int(per), p.E = int(E), p.rank = int(rank);
  p.T = T, p.K = K, p.relayed = relayed != 0;
  p.price[rows::kNear] = token_near;
  p.price[rows::kFar] = token_far;
  p.price[rows::kFarAndNear] = token_far + token_near;
  p.ids = ids, p.expert = expert, p.count = count, p.slot = slot;
  Workspace measure(nullptr);
  carve(p, measure);
  Workspace workspace(reserve(measure.used()));
  carve(p, workspace);
  return pick_slots(p) ? kOk : kBadCounts;
} catch (const std::bad_alloc&) {
  return topoep::kNoMemory;
}
