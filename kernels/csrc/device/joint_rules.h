// Starts that no recipe gives: the published rule's, none, and levelled ranks.
#pragma once

#include "joint_choose.h"

namespace topoep::joint_device {

// The published rule's replicas, whose plan lies in the output, with what they execute as quotas.
DEVICE_FN void take_published(const Arguments& a, Served& s) {
  const Problem& p = a.p;
  for (int k = int(threadIdx.x); k < a.replica_slots(); k += int(blockDim.x)) {
    const i64 slot = p.slot(k / p.S, p.e + k % p.S);
    i32 quota = 0;
    for (int source = 0; source < p.R; ++source) quota += a.assignments_RG[source * i64(p.G) + slot];
    s.quota[k] = quota;
    s.expert[k] = quota ? a.expert_G[slot] : -1;
  }
}

DEVICE_FN void take_none(const Arguments& a, Served& s) {
  for (int k = int(threadIdx.x); k < a.replica_slots(); k += int(blockDim.x)) s.expert[k] = -1;
}

// The emptiest rank of [first, end) below the mean that has a free slot, as load and rank; ~0 if
// there is none.
DEVICE_FN u64 emptiest(const Arguments& a, const i32* load_R, const i32* used_R, int first, int end) {
  u64 best = ~u64(0);
  for (int r = first + lane_id(); r < end; r += 32) {
    if (load_R[r] >= a.at.sums[0] || used_R[r] == a.p.S) continue;
    const u64 key = u64(load_R[r]) << 32 | u32(r);
    best = key < best ? key : best;
  }
  return device::warp_min(best);
}

// Every rank levelled, wherever the tokens are (planning/joint_level.py): the fullest hands work of
// its largest main to the emptiest one with a free slot. By one warp.
DEVICE_FN void level_ranks(const Arguments& a, Builder& b) {
  const Problem& p = a.p;
  Served& s = b.s;
  const i32 mean = a.at.sums[0];
  i32 *load_R = b.far_in_left, *used_R = b.copies_out;
  for (;;) {
    u64 fullest = 0;
    for (int r = lane_id(); r < p.R; r += 32) {
      const u64 key = u64(load_R[r]) << 32 | (0xffffffffu - u32(r));
      fullest = key > fullest ? key : fullest;
    }
    fullest = device::warp_max(fullest);
    const int full = int(0xffffffffu - u32(fullest)), first = p.domain_of(full) * p.g;
    const i32 load = i32(fullest >> 32);
    if (load <= mean) return;
    u64 host = emptiest(a, load_R, used_R, first, first + p.g);
    if (host == ~u64(0) || (mean - i64(host >> 32)) * kNearFirst < mean) {
      host = emptiest(a, load_R, used_R, 0, p.R);
    }
    if (host == ~u64(0)) return;
    const int r = int(u32(host)), slot = r * p.S + used_R[r];
    u64 largest = 0;  // main that the host does not hold yet, by what it executes
    for (int k = lane_id(); k < p.e; k += 32) {
      const int x = p.mains[full * p.e + k];
      bool held = false;
      for (int n = r * p.S; n < slot; ++n) held |= s.expert[n] == x;
      const u64 key = u64(b.kept[x]) << 32 | (0xffffffffu - u32(k));
      if (!held && b.kept[x] > 0 && key > largest) largest = key;
    }
    largest = device::warp_max(largest);
    if (!largest) return;
    if (lane_id() == 0) {
      const int x = p.mains[full * p.e + int(0xffffffffu - u32(largest))];
      const i32 moved = least(i32(largest >> 32), least(load - mean, mean - i32(host >> 32)));
      s.expert[slot] = x;
      s.quota[slot] = moved;
      ++used_R[r];
      b.kept[x] -= moved;
      load_R[full] -= moved;
      load_R[r] += moved;
    }
    __syncwarp(kAllLanes);
  }
}

DEVICE_FN void take_levelled(const Arguments& a, Builder& b) {
  const Problem& p = a.p;
  const int size = int(blockDim.x), thread = int(threadIdx.x);
  for (int r = thread; r < p.R; r += size) {
    b.far_in_left[r] = a.at.base[r];  // holds loads here
    b.copies_out[r] = 0;              // slots in use
  }
  for (int x = thread; x < p.E; x += size) b.kept[x] = a.at.total[x];
  take_none(a, b.s);
  __syncthreads();
  if (warp_id() == 0) level_ranks(a, b);
}

}  // namespace topoep::joint_device
