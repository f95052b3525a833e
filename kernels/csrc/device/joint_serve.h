// Serves and prices a whole start: a warp for each domain, the experts in the order of their lowest
// replica slot. All threads of the block call these functions.
#pragma once

#include "joint_device.h"

namespace topoep::joint_device {

// A change of the copies in flight, that a move tries out.
struct CopyChange {
  int in_rank, out_rank, lost_rank;  // a copy to in_rank and none to lost_rank (-1 = neither)
  bool in_near, lost_near;           // within the domain of out_rank, where the main is
};

DEVICE_FN i64 copy_time(const Arguments& a, const Served& s, int r, const CopyChange& by) {
  i32 in_far = s.in_far[r], in_near = s.in_near[r], out_far = s.out_far[r], out_near = s.out_near[r];
  (by.in_near ? in_near : in_far) += r == by.in_rank;
  (by.lost_near ? in_near : in_far) -= r == by.lost_rank;
  if (r == by.out_rank) {
    (by.in_near ? out_near : out_far) += by.in_rank >= 0;
    (by.lost_near ? out_near : out_far) -= by.lost_rank >= 0;
  }
  return a.cost.copy_far * most(in_far, out_far) + a.cost.copy_near * most(in_near, out_near);
}

// Raises this lane's peaks to the ports and copies of its ranks. `sent`: the ranks' own assignments.
template <int C>
DEVICE_FN void raise_to_ports(DomainPeaks& m, const Ranks<C>& ranks, const Ports<C>& q,
                              const Lanes<C>& sent) {
  for (int c = 0; c < C; ++c) {
    if (!ranks.has(c)) continue;
    m.load = most(m.load, q.load[c]);
    m.far = most(m.far, most(q.far_in[c], q.far_out[c]));
    m.near = most(m.near, most(q.load[c] - q.own[c] - q.far_in[c],
                               sent[c] - q.own[c] - q.far_out[c]));
  }
}

template <int C>
DEVICE_FN void raise_to_copies(const Arguments& a, const Served& s, DomainPeaks& m,
                               const Ranks<C>& ranks, const CopyChange& by) {
  for (int c = 0; c < C; ++c) {
    if (!ranks.has(c)) continue;
    const i64 time = copy_time(a, s, ranks.at(c), by);
    m.copies = time > m.copies ? time : m.copies;
  }
}

// The peaks over all lanes.
DEVICE_FN DomainPeaks warp_peaks(DomainPeaks m) {
  m.load = __reduce_max_sync(kAllLanes, m.load);
  m.far = __reduce_max_sync(kAllLanes, m.far);
  m.near = __reduce_max_sync(kAllLanes, m.near);
  m.copies = i64(device::warp_max(u64(m.copies)));
  return m;
}

DEVICE_FN CopyChange no_change() { return {-1, -1, -1, false, false}; }

template <int C>
DEVICE_FN DomainPeaks find_peaks(const Arguments& a, const Served& s, int d) {
  const Ranks<C> ranks = ranks_of<C>(a.p, d);
  DomainPeaks m{};
  raise_to_ports(m, ranks, read_ports(s, ranks), ranks.read(a.at.sent));
  raise_to_copies(a, s, m, ranks, no_change());
  return warp_peaks(m);
}

// The peaks over all domains, on every lane of the calling warp.
DEVICE_FN DomainPeaks all_peaks(const DomainPeaks* peaks_M, int M) {
  DomainPeaks m{};
  for (int d = lane_id(); d < M; d += 32) {
    m.load = most(m.load, peaks_M[d].load);
    m.far = most(m.far, peaks_M[d].far);
    m.near = most(m.near, peaks_M[d].near);
    m.copies = peaks_M[d].copies > m.copies ? peaks_M[d].copies : m.copies;
  }
  return warp_peaks(m);
}

// Serves domain d's part of every expert that has a replica somewhere.
template <int C>
DEVICE_FN void serve_domain(const Arguments& a, Served& s, int d) {
  const Problem& p = a.p;
  const Ranks<C> ranks = ranks_of<C>(p, d);
  const i32* base = a.at.base;
  Ports<C> ports{ranks.read(base), ranks.read(base + p.R), ranks.read(base + 2 * p.R),
                 ranks.read(base + 3 * p.R)};
  for (int start = 0; start < a.replica_slots(); start += 32) {
    const int k = start + lane_id();
    const bool first =
        k < a.replica_slots() && s.expert[k] >= 0 && s.first_slot[s.expert[k]] == k;
    for (unsigned left = __ballot_sync(kAllLanes, first); left; left &= left - 1) {
      const int x = s.expert[start + __ffs(left) - 1];
      const Lanes<C> slot = slots_of(p, s, ranks, x);
      bool hosted = p.home(x) == d;
      for (int c = 0; c < C; ++c) hosted |= slot[c] >= 0;
      if (!__ballot_sync(kAllLanes, hosted)) continue;
      Part<C> part = part_of(p, s, ranks, x, slot), main_alone{};
      main_alone.executed = p.home(x) == d ? a.at.total[x] : 0;
      for (int c = 0; c < C; ++c) {
        if (!ranks.is(c, p.main[x])) continue;
        main_alone.quota[c] = a.at.total[x];
        main_alone.outside[c] = a.outside_demand(x);
      }
      serve(ranks, ports, ranks.read(a.column(x)), a.demand(d, x), main_alone, part);
      store_outside(p, s, ranks, x, slot, part.outside);
    }
  }
  write_ports(s, ranks, ports);
}

// From replica slots with quotas, read behind a first barrier, to ports, copies, outside parts, what
// the mains execute, and peaks, written before a last one.
template <int C>
DEVICE_FN void serve_start(const Arguments& a, Served& s) {
  const Problem& p = a.p;
  const int size = int(blockDim.x);
  for (int x = int(threadIdx.x); x < p.E; x += size) {
    s.main_quota[x] = a.at.total[x];
    s.main_outside[x] = a.outside_demand(x);
    s.first_slot[x] = a.replica_slots();
  }
  for (int r = int(threadIdx.x); r < p.R; r += size) {
    s.in_far[r] = s.in_near[r] = s.out_far[r] = s.out_near[r] = 0;
  }
  __syncthreads();
  for (int k = int(threadIdx.x); k < a.replica_slots(); k += size) {
    const int x = s.expert[k], r = k / p.S;
    if (x < 0) continue;
    const bool near = p.home(x) == p.domain_of(r);
    atomicAdd(&s.main_quota[x], -s.quota[k]);
    atomicMin(&s.first_slot[x], k);
    atomicAdd(&(near ? s.in_near : s.in_far)[r], 1);
    atomicAdd(&(near ? s.out_near : s.out_far)[p.main[x]], 1);
  }
  __syncthreads();
  for (int d = warp_id(); d < p.M; d += warps()) {
    serve_domain<C>(a, s, d);
    const DomainPeaks m = find_peaks<C>(a, s, d);
    if (lane_id() == 0) s.peaks[d] = m;
  }
  __syncthreads();
}

// What relief can make of a domain: each of its peaks halfway down to the mean over its ranks.
template <int C>
DEVICE_FN DomainPeaks promised(const Arguments& a, const Served& s, int d) {
  const Ranks<C> ranks = ranks_of<C>(a.p, d);
  const Ports<C> q = read_ports(s, ranks);
  const i32 load = sum(q.load), far_in = sum(q.far_in), far_out = sum(q.far_out), own = sum(q.own);
  const i32 sent = sum(ranks.read(a.at.sent));
  DomainPeaks m = s.peaks[d];
  m.load = i32((i64(m.load) + load / a.p.g) / 2);
  m.far = i32((i64(m.far) + most(far_in, far_out) / a.p.g) / 2);
  m.near = i32((i64(m.near) + most(load - own - far_in, sent - own - far_out) / a.p.g) / 2);
  return m;
}

}  // namespace topoep::joint_device
