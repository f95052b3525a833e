// The joint planner on the device, bit-identical to planning/joint.py. Launches, each of which needs
// the one before:
//
//   topoep    the published plan, into the output               plan_topoep.cu: one launch or three
//   sums      demands, the load by expert                       a block a domain
//   pairs     ports without replicas, pairs worth bringing      one block
//   starts    build, serve and price every start                a block a start
//   relieve   move work off the busiest ports                   a block for each of the most promising
//   write     the best one, or none                             a block a domain
//
// Reads load [R][E] and mains [E] (the experts by rank of their main, then by id); writes the Plan's
// two tensors. A domain has at most 96 ranks: a lane takes one, or three. Inputs are trusted.
// Nothing of the launches depends on data, so a CUDA graph may hold them.
#include "joint_device.h"
#include "joint_fill.h"
#include "joint_load.h"
#include "joint_relief.h"
#include "joint_rules.h"
#include "joint_serve.h"
#include "joint_turn.h"
#include "joint_write.h"

#define API extern "C" __attribute__((visibility("default")))

API int topoep_device_plan_topoep(const int* load, const int* mains, long long R, long long E,
                                  long long S, long long g, long long token_bytes,
                                  long long expert_bytes, long long token_far,
                                  long long token_near, int* expert_G, int* assignments_RG,
                                  void* stream_address);

namespace topoep::joint_device {
namespace {

constexpr int kWideLanes = 3;  // ranks of a lane where a domain has more than 32

// Without the 1, ptxas spills in order to fit two blocks into a processor.
#define BOUNDS(threads) __launch_bounds__(threads, 1)

// Threads of a block whose lanes take C ranks: so many that their registers suffice.
template <int C>
constexpr int kThreads = C == 1 ? 512 : 256;

KERNEL BOUNDS(kThreads<1>) joint_sums_kernel(Arguments a) {
  SHARED_MEMORY(shared);
  sum_domain(a, int(blockIdx.x), reinterpret_cast<i32*>(shared));
}

KERNEL BOUNDS(kThreads<1>) joint_pairs_kernel(Arguments a) {
  SHARED_MEMORY(shared);
  Workspace w(shared);
  PairScratch scratch;
  carve_pairs(a, w, scratch);
  sum_cluster(a);
  list_pairs(a, scratch);
}

template <int C>
KERNEL BOUNDS(kThreads<C>) joint_start_kernel(Arguments a) {
  SHARED_MEMORY(shared);
  Workspace w(shared);
  Builder b;
  carve_builder(a, w, b, warps());
  Served& s = b.s;
  const Problem& p = a.p;
  const int start = int(blockIdx.x), slots = a.replica_slots();
  if (start < a.rows) {
    if (!build<C>(a, start, b)) {
      if (threadIdx.x == 0) a.at.promise[start] = kVoid;
      return;
    }
  } else if (start == a.rows + Arguments::kPublished) {
    take_published(a, s);
  } else if (start == a.rows + Arguments::kEmpty) {
    take_none(a, s);
  } else {
    take_levelled(a, b);
  }
  serve_start<C>(a, s);
  if (warp_id() == 0) {
    const i64 total = price_peaks(a.cost, all_peaks(s.peaks, p.M)).total;
    if (lane_id() == 0) a.at.total_price[start] = total;
  }
  __syncthreads();
  for (int d = warp_id(); d < p.M; d += warps()) {
    const DomainPeaks m = promised<C>(a, s, d);
    if (lane_id() == 0) s.peaks[d] = m;
  }
  i32* into = a.at.slots + 3 * i64(start) * slots;
  for (int k = int(threadIdx.x); k < slots; k += int(blockDim.x)) {
    into[k] = s.expert[k];
    into[slots + k] = s.quota[k];
  }
  __syncthreads();
  if (warp_id() > 0) return;
  const i64 promise = price_peaks(a.cost, all_peaks(s.peaks, p.M)).score;
  const int doubt = start == a.rows + Arguments::kLevelled ? kLevelDoubt : 0;
  if (lane_id() == 0) a.at.promise[start] = promise / 100 * (100 + doubt);
}

// The start with `place` better ones: lowest promise first, first ones on ties.
DEVICE_FN int start_in_place(const Arguments& a, int place) {
  const int own = lane_id() < a.starts() ? lane_id() : 0;
  const i64 promise = a.at.promise[own];
  int better = 0;
  for (int i = 0; i < a.starts(); ++i) {
    const i64 other = a.at.promise[i];
    better += other < promise || (other == promise && i < own);
  }
  const unsigned found = __ballot_sync(kAllLanes, lane_id() < a.starts() && better == place);
  return __ffs(found) - 1;
}

template <int C>
KERNEL BOUNDS(kThreads<C>) joint_relieve_kernel(Arguments a) {
  SHARED_MEMORY(shared);
  Workspace w(shared);
  Reliever f;
  carve_reliever(a, w, f, warps());
  Served& s = f.s;
  const Problem& p = a.p;
  const int place = int(blockIdx.x), slots = a.replica_slots(), start = start_in_place(a, place);
  if (a.at.promise[start] == kVoid) {
    if (threadIdx.x == 0) a.at.relieved_score[place] = kVoid;
    return;
  }
  i32* at = a.at.slots + 3 * i64(start) * slots;
  for (int k = int(threadIdx.x); k < slots; k += int(blockDim.x)) {
    s.expert[k] = at[k];
    s.quota[k] = at[slots + k];
  }
  relieve<C>(a, f);
  for (int k = int(threadIdx.x); k < slots; k += int(blockDim.x)) {
    at[k] = s.expert[k];
    at[slots + k] = s.quota[k];
    at[2 * slots + k] = s.outside[k];
  }
  i32* mains = a.at.mains_of + 2 * i64(place) * p.E;
  for (int x = int(threadIdx.x); x < p.E; x += int(blockDim.x)) {
    mains[x] = s.main_quota[x];
    mains[p.E + x] = s.main_outside[x];
  }
  if (threadIdx.x == 0) a.at.relieved_start[place] = start;
  for (int d = warp_id(); d < p.M; d += warps()) {
    const DomainPeaks m = find_peaks<C>(a, s, d);
    if (lane_id() == 0) s.peaks[d] = m;
  }
  __syncthreads();
  if (warp_id() > 0) return;
  const Price price = price_peaks(a.cost, all_peaks(s.peaks, p.M));
  if (lane_id() > 0) return;
  a.at.relieved_score[place] = price.score;
  a.at.relieved_total[place] = price.total;
}

template <int C>
KERNEL BOUNDS(kThreads<C>) joint_write_kernel(Arguments a) {
  SHARED_MEMORY(shared);
  Workspace w(shared);
  Writer f;
  carve_writer(a, w, f);
  write_domain<C>(a, f, int(blockIdx.x));
}

// Bytes of shared memory that a block of each launch needs.
struct SharedBytes {
  i64 sums, pairs, start, relief, write;

  bool fit() const {
    const i64 limit = device::shared_limit();
    return sums <= limit && pairs <= limit && start <= limit && relief <= limit && write <= limit;
  }
};

template <class Carve>
i64 bytes_of(Carve carve) {
  Workspace w(nullptr);
  carve(w);
  return w.used();
}

template <int C>
SharedBytes shared_bytes(const Arguments& a) {
  constexpr int warps = kThreads<C> / 32;
  return {
      a.p.E * i64(sizeof(i32)),
      bytes_of([&](Workspace& w) { PairScratch s; carve_pairs(a, w, s); }),
      bytes_of([&](Workspace& w) { Builder b; carve_builder(a, w, b, warps); }),
      bytes_of([&](Workspace& w) { Reliever f; carve_reliever(a, w, f, warps); }),
      bytes_of([&](Workspace& w) { Writer f; carve_writer(a, w, f); }),
  };
}

// Whether the device plans this shape: ranks of a domain, rows of the table, shared memory.
bool fits(const Arguments& a) {
  if (a.rows > kRecipes || a.p.g > 32 * kWideLanes) return false;
  return (a.p.g > 32 ? shared_bytes<kWideLanes>(a) : shared_bytes<1>(a)).fit();
}

template <int C>
int launch_all(const Arguments& a, device::Stream stream) {
  constexpr int most = kThreads<1>, threads = kThreads<C>;
  const unsigned domains = unsigned(a.p.M), starts = unsigned(a.starts());
  const unsigned relieved = unsigned(a.relieved);
  const SharedBytes bytes = shared_bytes<C>(a);
  int error = LAUNCH(joint_sums_kernel, domains, most, bytes.sums, stream, a);
  if (!error) error = LAUNCH(joint_pairs_kernel, 1u, most, bytes.pairs, stream, a);
  if (!error) error = LAUNCH(joint_start_kernel<C>, starts, threads, bytes.start, stream, a);
  if (!error) error = LAUNCH(joint_relieve_kernel<C>, relieved, threads, bytes.relief, stream, a);
  if (!error) error = LAUNCH(joint_write_kernel<C>, domains, threads, bytes.write, stream, a);
  return error;
}

Arguments arguments(i64 R, i64 E, i64 S, i64 g, i64 rows) {
  Arguments a{};
  Problem& p = a.p;
  p.R = int(R), p.E = int(E), p.S = int(S), p.g = int(g);
  p.M = p.R / p.g, p.e = p.E / p.R, p.per = p.e + p.S, p.G = p.R * p.per;
  a.rows = int(rows);
  const i64 relieved = kRelieved / (R * R);
  a.relieved = int(relieved < 1 ? 1 : relieved < a.starts() ? relieved : a.starts());
  return a;
}

}  // namespace
}  // namespace topoep::joint_device

using topoep::i32;
using topoep::i64;

// Bytes of device memory that a plan of this shape works in; device::kTooLarge when the device does
// not plan it.
API long long topoep_device_joint_workspace(long long R, long long E, long long S, long long g,
                                            long long rows) {
  using namespace topoep::joint_device;
  const Arguments a = arguments(R, E, S, g, rows);
  Tables tables;
  return fits(a) ? carve_tables(a, nullptr, tables) : device::kTooLarge;
}

// `table` [rows][5] of Recipe lies on the host, at most 16 rows: it becomes part of the launches.
// 0, device::kTooLarge, or an error code of a launch.
API int topoep_device_plan_joint(const int* load, const int* mains, long long R, long long E,
                                 long long S, long long g, long long token_bytes,
                                 long long expert_bytes, long long assignment, long long token_far,
                                 long long token_near, long long copy_far, long long copy_near,
                                 long long plan, long long balance_weight, long long table,
                                 long long rows, long long rounds, char* workspace, int* expert_G,
                                 int* assignments_RG, void* stream_address) {
  using namespace topoep::joint_device;
  const auto stream = static_cast<device::Stream>(stream_address);
  Arguments a = arguments(R, E, S, g, rows);
  if (!fits(a)) return device::kTooLarge;
  a.cost = {assignment, token_far, token_near, copy_far, copy_near, plan, balance_weight};
  const i64 half_copy = copy_far / (token_far > 0 ? 2 * token_far : 1);
  a.least_demand = i32(half_copy < 1 ? 1 : half_copy < INT32_MAX ? half_copy : INT32_MAX);
  const auto* recipes = reinterpret_cast<const Recipe*>(table);
  for (int row = 0; row < a.rows; ++row) a.table[row] = recipes[row];
  a.rounds = int(rounds < INT32_MAX ? rounds : INT32_MAX);
  a.expert_G = expert_G;
  a.assignments_RG = assignments_RG;
  carve_tables(a, workspace, a.at);
  a.p.load = load;
  a.p.mains = const_cast<i32*>(mains);
  a.p.main = a.at.main;
  a.p.main_index = a.at.main_index;
  a.p.demand = a.at.demand;
  if (int error = topoep_device_plan_topoep(load, mains, R, E, S, g, token_bytes, expert_bytes,
                                            token_far, token_near, expert_G, assignments_RG,
                                            stream_address)) {
    return error;
  }
  return g > 32 ? launch_all<kWideLanes>(a, stream) : launch_all<1>(a, stream);
}
