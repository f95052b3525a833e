// Replica transfers between NVLink domains through NCCL's device API (GIN): put and signal.
//
// Compiled for sm_90a against NCCL 2.30; never run: it needs two nodes, or two network cards.
//
// Every rank holds the same plan, so the owner of the bytes puts them: mains into remote slots in
// forward, slot gradients into remote regions in backward. (A get exists from NCCL 2.30.3 on, and not
// on every backend.) Each put increments a signal of its source rank at the receiver: signals
// 0..R-1 count parameters, R..2R-1 gradients. Signals only grow; `expected` [2R] in device memory
// holds the running totals, which the wait kernel derives from the plan. A put lands before its
// signal; a flush only frees its source. Peers in the own domain are left to csrc/device/transfers.cu.
//
// Letters as there. Windows are registered once per buffer, on the communicator that torch made.
#include <cstdint>
#include <new>

#include "nccl.h"
#include "nccl_device.h"

namespace {

using i32 = std::int32_t;
using i64 = std::int64_t;

constexpr int kBlocks = 8, kThreads = 32, kParts = 3;

struct Windows {
  ncclWindow_t part[kParts];  // w1, w2, w3
};

struct Plan {
  const i32* expert_G;
  const i32* place;  // [E] rank * e + index of the main
  int rank, R, e, S;
  i64 bytes;  // of one part
  int gradients;  // 0: parameters to replicas, 1: gradients to mains
};

struct Put {
  int from, to;     // ranks
  i64 source, target;  // byte offsets in the windows
};

// What replica slot g of the cluster needs; false when it is empty.
__device__ bool put_of(const Plan& p, int g, Put& put) {
  const int host = g / p.S, slot = g % p.S;
  const i32 expert = p.expert_G[host * (p.e + p.S) + p.e + slot];
  if (expert < 0) return false;
  const int home = p.place[expert] / p.e, index = p.place[expert] % p.e;
  if (p.gradients) {
    put = {host, home, slot * p.bytes, (i64(host) * p.e + index) * p.bytes};
  } else {
    put = {home, host, index * p.bytes, slot * p.bytes};
  }
  return true;
}

__device__ bool crosses(const ncclDevComm& comm, int peer) {
  return !ncclTeamRankIsMember(ncclTeamLsa(comm), ncclTeamWorld(comm), peer);
}

__global__ void put_kernel(ncclDevComm comm, Windows source, Windows target, Plan p) {
  ncclGin gin(comm, int(blockIdx.x) % comm.ginContextCount);
  for (int job = int(blockIdx.x); job < p.R * p.S * kParts; job += int(gridDim.x)) {
    Put put;
    if (!put_of(p, job / kParts, put) || put.from != p.rank || !crosses(comm, put.to)) continue;
    if (threadIdx.x) continue;
    const auto signal = ncclGinSignal_t(p.gradients * p.R + p.rank);
    gin.put(ncclTeamWorld(comm), put.to, target.part[job % kParts], std::size_t(put.target),
            source.part[job % kParts], std::size_t(put.source), std::size_t(p.bytes),
            ncclGin_SignalInc{signal});
  }
  gin.flush(ncclCoopCta());
}

// One thread a source rank: adds what its puts of this plan are to the running total, and waits.
__global__ void wait_kernel(ncclDevComm comm, Plan p, unsigned long long* expected) {
  ncclGin gin(comm, 0);
  for (int r = int(threadIdx.x); r < p.R; r += int(blockDim.x)) {
    unsigned long long puts = 0;
    for (int g = 0; g < p.R * p.S; ++g) {
      Put put;
      if (put_of(p, g, put) && put.from == r && put.to == p.rank && crosses(comm, r)) puts += kParts;
    }
    if (!puts) continue;
    const auto signal = ncclGinSignal_t(p.gradients * p.R + r);
    expected[signal] += puts;
    gin.waitSignal(ncclCoopThread(), signal, expected[signal]);
  }
}

}  // namespace

#define API extern "C" __attribute__((visibility("default")))

// Before 2.31 headers and the loaded library must be of one version; the loader compares.
API int topoep_gin_nccl_version() { return NCCL_VERSION_CODE; }

// Collective. A device communicator with a signal for each source rank and direction; 0, or an
// ncclResult_t.
API int topoep_gin_open(void* comm, long long ranks, void** opened) {
  auto* device = new (std::nothrow) ncclDevComm();
  if (!device) return ncclSystemError;
#if NCCL_VERSION_CODE >= 22900
  ncclDevCommRequirements needs = NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER;
  needs.ginConnectionType = NCCL_GIN_CONNECTION_FULL;
#else
  ncclDevCommRequirements needs{};
#endif
  needs.ginForceEnable = true;
  needs.ginContextCount = kBlocks;
  needs.ginSignalCount = int(2 * ranks);
  const ncclResult_t result = ncclDevCommCreate(static_cast<ncclComm_t>(comm), &needs, device);
  if (result != ncclSuccess) {
    delete device;
    return result;
  }
  *opened = device;
  return ncclSuccess;
}

API int topoep_gin_close(void* comm, void* opened) {
  auto* device = static_cast<ncclDevComm*>(opened);
  const ncclResult_t result = ncclDevCommDestroy(static_cast<ncclComm_t>(comm), device);
  delete device;
  return result;
}

// Collective: memory of ncclMemAlloc, 4096-byte aligned.
API int topoep_gin_register(void* comm, void* memory, long long bytes, void** window) {
  return ncclCommWindowRegister(static_cast<ncclComm_t>(comm), memory, std::size_t(bytes),
                                reinterpret_cast<ncclWindow_t*>(window),
                                NCCL_WIN_COLL_SYMMETRIC);
}

// source, target: kParts windows each. `expected` [2R] starts as zeros. 0, or a cudaError_t.
API int topoep_gin_transfer(void* opened, void* const* source, void* const* target,
                            const i32* expert_G, const i32* place, long long rank, long long R,
                            long long e, long long S, long long bytes, long long gradients,
                            unsigned long long* expected, void* stream_address) {
  const auto stream = static_cast<cudaStream_t>(stream_address);
  const ncclDevComm& comm = *static_cast<ncclDevComm*>(opened);
  const Plan p{expert_G, place, int(rank), int(R), int(e), int(S), bytes, int(gradients)};
  Windows from, to;
  for (int i = 0; i < kParts; ++i) {
    from.part[i] = static_cast<ncclWindow_t>(source[i]);
    to.part[i] = static_cast<ncclWindow_t>(target[i]);
  }
  put_kernel<<<kBlocks, kThreads, 0, stream>>>(comm, from, to, p);
  wait_kernel<<<1, 128, 0, stream>>>(comm, p, expected);
  return cudaGetLastError();
}
