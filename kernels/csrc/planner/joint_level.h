// A start that levels every rank, wherever the tokens are: the fullest rank hands work to the
// emptiest one with a free slot.
#pragma once

#include "joint_state.h"

namespace topoep::joint {

// The emptiest rank of [first, end) below the mean that has a free slot; -1 if there is none.
PLANNER_FN int emptiest(const Joint& j, const i32* used, int first, int end) {
  int best = -1;
  for (int r = first; r < end; ++r) {
    if (j.mains_load[r] >= j.mean || used[r] == j.p.S) continue;
    if (best < 0 || j.mains_load[r] < j.mains_load[best]) best = r;
  }
  return best;
}

PLANNER_FN int level_host(const Joint& j, const i32* used, int full) {
  const int first = j.p.domain_of(full) * j.p.g;
  const int near = emptiest(j, used, first, first + j.p.g);
  if (near >= 0 && i64(j.mean - j.mains_load[near]) * kNearFirst >= j.mean) return near;
  return emptiest(j, used, 0, j.p.R);
}

// Position of the largest main of rank `full` that `host` does not host yet; -1 if all are empty.
PLANNER_FN int largest_main(const Joint& j, const i32* used, int full, int host) {
  const Problem& p = j.p;
  int best = -1;
  i32 most = 0;
  for (int k = 0; k < p.e; ++k) {
    if (j.main_quota[full * p.e + k] <= most) continue;
    bool hosted = false;
    for (int n = 0; n < used[host]; ++n) {
      hosted |= j.trial.expert[host * p.S + n] == p.mains[full * p.e + k];
    }
    if (hosted) continue;
    best = k;
    most = j.main_quota[full * p.e + k];
  }
  return best;
}

// Fills `trial`.
PLANNER_FN void level(Joint& j) {
  const Problem& p = j.p;
  i32 *load = j.mains_load, *used = j.copies_out;
  for (int k = 0; k < p.R * p.S; ++k) {
    j.trial.expert[k] = -1;
    j.trial.quota[k] = j.trial.outside[k] = 0;
  }
  std::memcpy(j.main_quota, j.base_quota, sizeof(i32) * p.E);
  std::memcpy(load, j.base.load, sizeof(i32) * p.R);
  std::memset(used, 0, sizeof(i32) * p.R);
  while (true) {
    int full = 0;
    for (int r = 1; r < p.R; ++r) {
      if (load[r] > load[full]) full = r;
    }
    if (load[full] <= j.mean) return;
    const int host = level_host(j, used, full);
    if (host < 0) return;
    const int main = largest_main(j, used, full, host);
    if (main < 0) return;
    i32& quota = j.main_quota[full * p.e + main];
    const i32 moved = std::min({quota, load[full] - j.mean, j.mean - load[host]});
    const int slot = host * p.S + used[host]++;
    j.trial.expert[slot] = p.mains[full * p.e + main];
    j.trial.quota[slot] = moved;
    quota -= moved;
    load[full] -= moved;
    load[host] += moved;
  }
}

}  // namespace topoep::joint
