// TopoEP on the device: one block per NVLink domain, bit-identical to planning/topoep.py.
//
// Three phases, each a function of the block; between them every block must have finished the one
// before. On sm_90 they are one launch of one cluster, with a cluster barrier between them. More
// domains than a cluster holds, an older GPU, or the CPU: three launches.
//
//   choose   the domain's g*S largest benefits become its replicas           writes expert_G
//   route    even split of its sources' demands over the instances           writes assignments_RG
//   refine   half-gap moves from its busiest rank, by one warp               updates both
//
// Reads load [R][E] and mains [E] (the experts by rank of their main, then by id); writes the Plan's
// two tensors. Row r of assignments_RG is rank r's split. Inputs are trusted: a check would have to
// wait for the device. Nothing of the launch depends on data, so a CUDA graph may hold it.
#include "../planner/topoep.h"
#include "device.h"
#include "sort.h"

namespace topoep {
namespace {

constexpr int kThreads = 256;

struct Arguments {
  const i32* load;
  const i32* mains;
  int R, E, S, g;
  TopoepCosts cost;
  i32* expert_G;
  i32* assignments_RG;
  int cells_in_shared;  // whether a domain's columns of assignments_RG fit there
};

// Shared memory of one block. Phases use it one after the other; none reads what another left.
struct Scratch {
  Topoep t;
  std::uint64_t* keys;  // choose: [E rounded up to a power of two]
  i32* instances;       // route: [E] instances seen so far
  i32* index_G;         // route: which instance of its expert each slot holds
};

PLANNER_FN Problem sizes_of(const Arguments& a) {
  Problem p{};
  p.R = a.R, p.E = a.E, p.S = a.S, p.g = a.g;
  p.M = p.R / p.g, p.e = p.E / p.R, p.per = p.e + p.S, p.G = p.R * p.per;
  p.load = a.load;
  return p;
}

enum Phase { kChoose, kRoute, kRefine, kPhases };

// Lays out what a phase needs; without a base it only measures.
PLANNER_FN i64 carve_phase(const Arguments& a, int phase, char* base, Scratch& s) {
  Workspace w(base);
  Topoep& t = s.t;
  Problem& p = t.p;
  p = sizes_of(a);
  t.cost = a.cost;
  t.assignments_RG = a.assignments_RG;
  i32* main = w.take<i32>(p.E);
  p.main = main;
  p.main_index = w.take<i32>(p.E);
  const int width = p.g * p.per;
  if (phase == kChoose) {
    s.keys = w.take<std::uint64_t>(device::padded(p.E));
  } else {
    t.expert_G = w.take<i32>(p.G);
  }
  if (phase == kRoute) {
    s.instances = w.take<i32>(p.E);
    s.index_G = w.take<i32>(p.G);
  } else if (phase == kRefine) {
    t.occupied = w.take<i32>(p.R);
    t.used = w.take<i64>(width);
    t.before = w.take<i64>(width);
    t.load = w.take<i64>(p.g);
    t.cells = a.cells_in_shared ? w.take<i32>(i64(p.R) * width) : nullptr;
    t.stride = width;
  }
  return w.used();
}

__device__ __forceinline__ void place_mains(const Arguments& a, Problem& p) {
  i32* main = const_cast<i32*>(p.main);
  for (int i = int(threadIdx.x); i < p.E; i += kThreads) {
    main[a.mains[i]] = i / p.e;
    p.main_index[a.mains[i]] = i % p.e;
  }
  __syncthreads();
}

// Stage 1: replicas of the domain's largest positive benefits, rank by rank, slot by slot.
__device__ __forceinline__ void choose(const Arguments& a, int d, char* shared) {
  Scratch s;
  carve_phase(a, kChoose, shared, s);
  Problem& p = s.t.p;
  place_mains(a, p);
  const int size = device::padded(p.E), first = d * p.g;
  for (int x = int(threadIdx.x); x < size; x += kThreads) {
    std::uint64_t key = 0;
    if (x < p.E && p.home(x) != d) {
      i32 demand = 0;
      for (int i = 0; i < p.g; ++i) demand += p.load[i64(first + i) * p.E + x];
      // Largest demand first, then lowest id.
      if (2 * a.cost.token_bytes * demand > a.cost.expert_bytes) {
        key = std::uint64_t(demand) << 32 | (0xffffffffu - unsigned(x));
      }
    }
    s.keys[x] = key;
  }
  __syncthreads();
  device::block_sort_descending(s.keys, size);
  for (int k = int(threadIdx.x); k < p.g * p.per; k += kThreads) {
    const int r = k / p.per, j = k % p.per;
    const int i = (j - p.e) * p.g + r;  // round robin: the i-th goes to rank i mod g
    i32 x = -1;
    if (j < p.e) {
      x = a.mains[(first + r) * p.e + j];
    } else if (i < size && s.keys[i]) {
      x = i32(0xffffffffu - unsigned(s.keys[i]));
    }
    a.expert_G[p.slot(first, 0) + k] = x;
  }
}

// Rows of the domain's sources: all of a demand on the domain's own instance, else an even split
// over all instances. There is at most one of an expert in a domain so far.
__device__ __forceinline__ void route(const Arguments& a, int d, char* shared) {
  Scratch s;
  carve_phase(a, kRoute, shared, s);
  Problem& p = s.t.p;
  i32* expert_G = s.t.expert_G;
  i32* local = p.main_index;  // [E] whether the domain holds an instance; the index is not needed
  const int width = p.g * p.per;
  for (int x = int(threadIdx.x); x < p.E; x += kThreads) s.instances[x] = local[x] = 0;
  for (int k = int(threadIdx.x); k < p.G; k += kThreads) expert_G[k] = a.expert_G[k];
  __syncthreads();
  for (int other = 0; other < p.M; ++other) {
    for (int k = int(threadIdx.x); k < width; k += kThreads) {
      const int x = expert_G[other * width + k];
      if (x < 0) continue;
      s.index_G[other * width + k] = s.instances[x]++;
      if (other == d) local[x] = 1;
    }
    __syncthreads();
  }
  for (int i = 0; i < p.g; ++i) {
    const int source = d * p.g + i;
    i32* row = a.assignments_RG + i64(source) * p.G;
    for (int k = int(threadIdx.x); k < p.G; k += kThreads) {
      const int x = expert_G[k];
      i32 share = 0;
      if (x >= 0 && (!local[x] || k / width == d)) {
        const i32 demand = p.load[i64(source) * p.E + x];
        const int n = local[x] ? 1 : s.instances[x];
        share = demand / n;
        const int turn = ((s.index_G[k] - source) % n + n) % n;
        if (turn < demand - share * n) ++share;
      }
      row[k] = share;
    }
  }
}

// What the lanes of a warp found, each in its candidates: the best of all, on every lane.
__device__ __forceinline__ Move agree(const Topoep& t, int d, Move best) {
  const std::uint64_t key = best.delta == 0 ? 0
                                            : std::uint64_t(best.delta) << 32 |
                                                  std::uint64_t(0x7fffffff - best.load) << 1 |
                                                  std::uint64_t(!best.is_new);
  const std::uint64_t top = device::warp_max(key);
  bool tied = top > 0 && key == top;
  unsigned winners = __ballot_sync(kAllLanes, tied);
  if (__popc(winners) > 1) {
    if (tied && best.cost < 0) {
      best.cost = communication(t, d, best.slot, best.delta, best.target);
    }
    const std::uint64_t cheapest = device::warp_min(tied ? std::uint64_t(best.cost) : ~0ull);
    tied = tied && std::uint64_t(best.cost) == cheapest;
    const std::uint64_t id = std::uint64_t(best.expert) << 32 | unsigned(best.target);
    const std::uint64_t lowest = device::warp_min(tied ? id : ~0ull);
    winners = __ballot_sync(kAllLanes, tied && id == lowest);
  }
  const unsigned from = winners ? unsigned(__ffs(winners)) - 1 : 0;
  best.delta = i64(top >> 32);
  best.expert = __shfl_sync(kAllLanes, best.expert, from);
  best.target = __shfl_sync(kAllLanes, best.target, from);
  best.slot = __shfl_sync(kAllLanes, best.slot, from);
  return best;
}

__device__ __forceinline__ Move best_move_of_warp(const Topoep& t, int d) {
  const Problem& p = t.p;
  const int lane = int(threadIdx.x % 32);
  std::uint64_t key = 0;  // largest load, then lowest rank
  for (int r = lane; r < p.g; r += 32) {
    const std::uint64_t own = std::uint64_t(t.load[r]) << 32 | (0xffffffffu - unsigned(r));
    key = own > key ? own : key;
  }
  const int busiest = int(0xffffffffu - unsigned(device::warp_max(key)));
  const int candidates = (p.e + t.occupied[d * p.g + busiest]) * p.g;
  Move best{};
  for (int c = lane; c < candidates; c += 32) {
    consider(t, d, busiest, busiest * p.per + c / p.g, c % p.g, best);
  }
  return agree(t, d, best);
}

// `commit` of topoep.h with a lane for each source.
__device__ __forceinline__ void commit_by_warp(Topoep& t, int d, const Move& move) {
  const Problem& p = t.p;
  const int lane = int(threadIdx.x % 32), first = d * p.g;
  int k = 0;
  if (lane == 0) k = landing_slot(t, d, move);
  k = __shfl_sync(kAllLanes, k, 0);
  i32 left = i32(move.delta), from_below = 0;
  for (int start = 0; start < p.R && left > 0; start += 32) {
    const int source = start + lane;
    i32* row = t.cells + source * t.stride;
    const i32 have = source < p.R ? row[move.slot] : 0;
    const i32 upto = device::warp_prefix_sum(have);
    const i32 room = left - (upto - have);  // sources give up in ascending rank
    const i32 moved = room <= 0 ? 0 : have < room ? have : room;
    if (moved > 0) {
      row[move.slot] -= moved;
      row[k] += moved;
    }
    from_below += i32(__reduce_add_sync(kAllLanes, unsigned(source < first ? moved : 0)));
    left -= i32(__reduce_add_sync(kAllLanes, unsigned(moved)));
  }
  if (lane == 0) {
    t.before[move.slot] -= from_below;
    t.before[k] += from_below;
    t.used[move.slot] -= move.delta;
    t.used[k] += move.delta;
    t.load[move.slot / p.per] -= move.delta;
    t.load[move.target] += move.delta;
  }
  __syncwarp(kAllLanes);
}

// Stage 2 of the domain, on its columns of assignments_RG.
__device__ __forceinline__ void refine(const Arguments& a, int d, char* shared) {
  Scratch s;
  carve_phase(a, kRefine, shared, s);
  Topoep& t = s.t;
  Problem& p = t.p;
  place_mains(a, p);
  const int width = p.g * p.per, first = d * p.g;
  const i64 at = p.slot(first, 0);
  if (!a.cells_in_shared) {
    t.cells = a.assignments_RG + at;
    t.stride = p.G;
  }
  for (int k = int(threadIdx.x); k < width; k += kThreads) {
    t.expert_G[at + k] = a.expert_G[at + k];
    i64 used = 0;
    for (int source = 0; source < p.R; ++source) {
      if (source == first) t.before[k] = used;
      const i32 count = a.assignments_RG[i64(source) * p.G + at + k];
      if (a.cells_in_shared) t.cells[i64(source) * width + k] = count;
      used += count;
    }
    t.used[k] = used;
  }
  __syncthreads();
  for (int r = int(threadIdx.x); r < p.g; r += kThreads) {
    i64 load = 0;
    int occupied = 0;
    for (int j = 0; j < p.per; ++j) {
      load += t.used[r * p.per + j];
      occupied += j >= p.e && t.expert_G[at + r * p.per + j] >= 0;
    }
    t.load[r] = load;
    t.occupied[first + r] = occupied;
  }
  __syncthreads();
  if (threadIdx.x < 32) {
    for (Move move = best_move_of_warp(t, d); move.delta > 0; move = best_move_of_warp(t, d)) {
      commit_by_warp(t, d, move);
    }
  }
  __syncthreads();
  for (int k = int(threadIdx.x); k < width; k += kThreads) {
    a.expert_G[at + k] = t.expert_G[at + k];
    if (!a.cells_in_shared) continue;
    for (int source = 0; source < p.R; ++source) {
      a.assignments_RG[i64(source) * p.G + at + k] = t.cells[i64(source) * width + k];
    }
  }
}

KERNEL topoep_phase_kernel(Arguments a, int phase) {
  SHARED_MEMORY(shared);
  const int d = int(blockIdx.x);
  if (phase == kChoose) {
    choose(a, d, shared);
  } else if (phase == kRoute) {
    route(a, d, shared);
  } else {
    refine(a, d, shared);
  }
}

#ifdef __CUDACC__
KERNEL __launch_bounds__(kThreads) topoep_cluster_kernel(Arguments a) {
  SHARED_MEMORY(shared);
  const int d = int(blockIdx.x);
  choose(a, d, shared);
  cluster_barrier();
  route(a, d, shared);
  cluster_barrier();
  refine(a, d, shared);
}
#endif

// Bytes of shared memory that any phase needs; keeps the cells out of it when they do not fit.
i64 shared_bytes(Arguments& a) {
  i64 bytes = 0;
  for (int phase = 0; phase < kPhases; ++phase) {
    Scratch s;
    a.cells_in_shared = phase == kRefine;
    i64 own = carve_phase(a, phase, nullptr, s);
    if (own > device::shared_limit() && a.cells_in_shared) {
      a.cells_in_shared = 0;
      own = carve_phase(a, phase, nullptr, s);
    }
    bytes = own > bytes ? own : bytes;
  }
  return bytes;
}

}  // namespace
}  // namespace topoep

#define API extern "C" __attribute__((visibility("default")))

// 0, device::kTooLarge, or an error code of the launch.
API int topoep_device_plan_topoep(const int* load, const int* mains, long long R, long long E,
                                  long long S, long long g, long long token_bytes,
                                  long long expert_bytes, long long token_far,
                                  long long token_near, int* expert_G, int* assignments_RG,
                                  void* stream_address) {
  using namespace topoep;
  const auto stream = static_cast<device::Stream>(stream_address);
  Arguments a{load, mains, int(R), int(E), int(S), int(g),
              {token_bytes, expert_bytes, token_far, token_near}, expert_G, assignments_RG, 0};
  const i64 bytes = shared_bytes(a);
  const unsigned domains = unsigned(R / g);
  if (bytes > device::shared_limit()) return device::kTooLarge;
#ifdef __CUDACC__
  if (int(domains) <= device::cluster_limit()) {
    return device::launch_cluster(topoep_cluster_kernel, domains, kThreads, bytes, stream, a);
  }
#endif
  for (int phase = 0; phase < kPhases; ++phase) {
    if (int error = LAUNCH(topoep_phase_kernel, domains, kThreads, bytes, stream, a, phase)) {
      return error;
    }
  }
  return 0;
}
