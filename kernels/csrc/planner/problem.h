// What every planner reads: sizes, the load, where the mains are; and the workspace they carve.
//
// Letters: R ranks, M domains of g = R/M ranks, E experts, e = E/R mains a rank, S replica slots a
// rank, per = e+S slots a rank, G = R*per slots. Counts are int32 in memory (the load holds at most
// 2^31 - 1 assignments) and int64 in sums and products.
#pragma once

#include <cstdint>
#include <cstring>

// Planner functions also run on a GPU, where csrc/device/ chains them.
#ifdef __CUDACC__
#define PLANNER_FN __host__ __device__ inline
#else
#define PLANNER_FN inline
#endif

namespace topoep {

using i32 = std::int32_t;
using i64 = std::int64_t;

constexpr i64 kNever = i64(1) << 62;  // above every price: loads and unit costs are checked

// One block of memory, cut from the front. Without a block it only measures.
class Workspace {
 public:
  PLANNER_FN explicit Workspace(char* base) : base_(base) {}

  template <class T>
  PLANNER_FN T* take(i64 count) {
    used_ = (used_ + 63) / 64 * 64;  // one cache line
    T* at = base_ ? reinterpret_cast<T*>(base_ + used_) : nullptr;
    used_ += count * i64(sizeof(T));
    return at;
  }

  PLANNER_FN i64 used() const { return used_; }

 private:
  char* base_;
  i64 used_ = 0;
};

struct Problem {
  int R, M, g, E, e, S, per, G;
  const i32* load;    // [R][E]
  const i32* main;    // [E] rank of the main instance
  i32* mains;         // [R][e] mains of a rank, ascending id
  i32* main_index;    // [E] position among the mains of its rank
  i32* demand;        // [M][E] assignments that the sources of a domain have for an expert

  PLANNER_FN int domain_of(int rank) const { return rank / g; }
  PLANNER_FN int home(int expert) const { return main[expert] / g; }
  PLANNER_FN i64 slot(int rank, int position) const { return i64(rank) * per + position; }
};

inline void carve(Problem& p, Workspace& w) {
  p.mains = w.take<i32>(p.E);
  p.main_index = w.take<i32>(p.E);
  p.demand = w.take<i32>(i64(p.M) * p.E);
}

// False unless `main` puts exactly e experts on every rank.
inline bool index_mains(Problem& p, i32* count_R) {
  std::memset(count_R, 0, sizeof(i32) * p.R);
  for (int x = 0; x < p.E; ++x) {
    const int r = p.main[x];
    if (r < 0 || r >= p.R || count_R[r] == p.e) return false;
    p.main_index[x] = count_R[r];
    p.mains[r * p.e + count_R[r]++] = x;
  }
  return true;  // E = R*e experts and no rank above e: every rank holds exactly e
}

inline void sum_demand(Problem& p) {
  std::memset(p.demand, 0, sizeof(i32) * i64(p.M) * p.E);
  for (int s = 0; s < p.R; ++s) {
    i32* into = p.demand + i64(s / p.g) * p.E;
    const i32* row = p.load + i64(s) * p.E;
    for (int x = 0; x < p.E; ++x) into[x] += row[x];
  }
}

// The plan without replicas: every assignment on its expert's main instance.
inline void write_mains(const Problem& p, i32* expert_G, i32* assignments_RG) {
  for (int r = 0; r < p.R; ++r) {
    for (int j = 0; j < p.per; ++j) {
      expert_G[p.slot(r, j)] = j < p.e ? p.mains[r * p.e + j] : -1;
    }
  }
  for (int s = 0; s < p.R; ++s) {
    const i32* row = p.load + i64(s) * p.E;
    i32* out = assignments_RG + i64(s) * p.G;
    for (int r = 0; r < p.R; ++r, out += p.per) {
      const i32* mains = p.mains + r * p.e;
      for (int j = 0; j < p.e; ++j) out[j] = row[mains[j]];
      for (int j = p.e; j < p.per; ++j) out[j] = 0;
    }
  }
}

}  // namespace topoep
