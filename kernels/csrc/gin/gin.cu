// Replica transfers between NVLink domains through NCCL's device API (GIN): put and signal.
//
// Compiled against NCCL 2.28.9 and 2.30.7 for sm_90a and sm_100a; never run: it needs two nodes, or
// two network cards. What is put where, and what is waited for, is jobs.h, which the CPU tests run.
//
// Every rank holds the same plan, so the owner of the bytes puts them: mains into remote slots in
// forward, slot gradients into remote regions in backward. (A get exists from NCCL 2.30.3 on, and not
// on every backend.) Each put increments a signal of its source rank at the receiver, on the context
// that carries it. Signals only grow: `expected` holds the running totals, which the wait kernel
// derives from the plan. A put lands before its signal; a flush only frees its source. Peers of the
// own domain are left to csrc/device/transfers.cu, which gets their addresses from here.
//
// Order on one stream: fence, put, (transfers within the domain), wait, fence. All buffers lie in one
// window, at the same offsets on every rank.
#include "jobs.h"
#include "nccl.h"
#include "nccl_device.h"

namespace {

using namespace gin;
using Address = unsigned long long;

constexpr int kThreads = 128;

struct Offsets {
  i64 source[kParts], target[kParts];  // of the parts' buffers in the window
};

struct Opened {
  ncclDevComm comm;
  ncclWindow_t window;
  Address* expected;  // [kBlocks][2R]
};

__device__ bool crosses(const ncclDevComm& comm, int peer) {
  return !ncclTeamRankIsMember(ncclTeamLsa(comm), ncclTeamWorld(comm), peer);
}

// base [R]: where each rank's window is mapped here, 0 for other domains.
__global__ void peers_kernel(ncclDevComm comm, ncclWindow_t window, Address* base) {
  for (int r = int(threadIdx.x); r < comm.nRanks; r += int(blockDim.x)) {
    base[r] = crosses(comm, r) ? 0 : reinterpret_cast<Address>(ncclGetPeerPointer(window, 0, r));
  }
}

__global__ void fence_kernel(ncclDevComm comm) {
  ncclGin gin(comm, 0);
  ncclBarrierSession<ncclCoopCta> barrier(ncclCoopCta(), ncclTeamTagWorld(), gin, 0);
  // Relaxed: puts are waited for by their signals.
  barrier.sync(ncclCoopCta(), cuda::memory_order_acq_rel, ncclGinFenceLevel::Relaxed);
}

__global__ void put_kernel(ncclDevComm comm, ncclWindow_t window, Offsets at, Plan p) {
  if (threadIdx.x) return;
  ncclGin gin(comm, context_of(int(blockIdx.x), comm.ginContextCount));
  for (int job = int(blockIdx.x); job < jobs(p); job += kBlocks) {
    Message put;
    if (!put_of(p, job, put) || put.from != p.rank || !crosses(comm, put.to)) continue;
    gin.put(ncclTeamWorld(comm), put.to, window, std::size_t(at.target[job % kParts] + put.target),
            window, std::size_t(at.source[job % kParts] + put.source), std::size_t(p.bytes),
            ncclGin_SignalInc{ncclGinSignal_t(signal_of(p, p.rank))});
  }
}

// One block a context, one thread a source rank: adds what its puts of this plan are to the running
// total, and waits. Then this rank's own puts have left their sources.
__global__ void wait_kernel(ncclDevComm comm, Plan p, Address* expected) {
  const int contexts = int(comm.ginContextCount), context = int(blockIdx.x);
  if (context >= contexts) return;
  ncclGin gin(comm, context);
  for (int r = int(threadIdx.x); r < p.R; r += int(blockDim.x)) {
    const int puts = crosses(comm, r) ? arriving(p, r, context, contexts) : 0;
    if (!puts) continue;
    const int signal = signal_of(p, r);
    Address& total = expected[context * 2 * p.R + signal];
    total += Address(puts);
    gin.waitSignal(ncclCoopThread(), ncclGinSignal_t(signal), total);
  }
  __syncthreads();
  gin.flush(ncclCoopCta());
}

int create(ncclComm_t comm, int ranks, ncclDevComm* device) {
#if NCCL_VERSION_CODE >= 22900
  ncclDevCommRequirements needs = NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER;
  needs.ginConnectionType = NCCL_GIN_CONNECTION_FULL;
#else
  ncclDevCommRequirements needs{};
#endif
  needs.barrierCount = 1;
  needs.ginForceEnable = true;
  needs.ginContextCount = kBlocks;
  needs.ginSignalCount = 2 * ranks;
  return ncclDevCommCreate(comm, &needs, device);
}

}  // namespace

#define API extern "C" __attribute__((visibility("default")))

// Before 2.31 headers and the loaded library must be of one version; the loader compares.
API int topoep_gin_nccl_version() { return NCCL_VERSION_CODE; }

// Collective. Registers `bytes` of `memory` (of ncclMemAlloc, 4096-byte aligned) and makes a device
// communicator with a signal for each source rank and direction; writes where every rank's memory is
// mapped here to `base` [R] in device memory. Lives as long as the process. 0, or an ncclResult_t.
API int topoep_gin_open(void* comm_address, long long ranks, void* memory, long long bytes,
                        Address* base, void* stream_address, void** opened) {
  const auto comm = static_cast<ncclComm_t>(comm_address);
  const auto stream = static_cast<cudaStream_t>(stream_address);
  auto* o = new Opened{};
  const std::size_t totals = sizeof(Address) * std::size_t(kBlocks * 2 * ranks);
  int result = ncclCommWindowRegister(comm, memory, std::size_t(bytes), &o->window,
                                      NCCL_WIN_COLL_SYMMETRIC);
  if (result == ncclSuccess) result = create(comm, int(ranks), &o->comm);
  if (result == ncclSuccess && (cudaMalloc(&o->expected, totals) != cudaSuccess ||
                                cudaMemsetAsync(o->expected, 0, totals, stream) != cudaSuccess)) {
    result = ncclUnhandledCudaError;
  }
  if (result != ncclSuccess) {
    delete o;
    return result;
  }
  peers_kernel<<<1, kThreads, 0, stream>>>(o->comm, o->window, base);
  *opened = o;
  return cudaGetLastError() == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}

// Collective: what all ranks did before on their streams is done when this is passed. 0, or a
// cudaError_t, as below.
API int topoep_gin_fence(void* opened, void* stream_address) {
  const auto& o = *static_cast<Opened*>(opened);
  fence_kernel<<<1, kThreads, 0, static_cast<cudaStream_t>(stream_address)>>>(o.comm);
  return cudaGetLastError();
}

// source, target: where the kParts parts' buffers begin, in bytes from the start of the window.
API int topoep_gin_put(void* opened, const long long* source, const long long* target,
                       const i32* expert_G, const i32* place, long long rank, long long R,
                       long long e, long long S, long long bytes, long long gradients,
                       void* stream_address) {
  const auto& o = *static_cast<Opened*>(opened);
  const Plan p{expert_G, place, int(rank), int(R), int(e), int(S), bytes, int(gradients)};
  Offsets at;
  for (int i = 0; i < kParts; ++i) {
    at.source[i] = source[i];
    at.target[i] = target[i];
  }
  const auto stream = static_cast<cudaStream_t>(stream_address);
  put_kernel<<<kBlocks, 32, 0, stream>>>(o.comm, o.window, at, p);
  return cudaGetLastError();
}

// What was put here under this plan has arrived, and what was put from here may be overwritten.
API int topoep_gin_wait(void* opened, const i32* expert_G, const i32* place, long long rank,
                        long long R, long long e, long long S, long long gradients,
                        void* stream_address) {
  const auto& o = *static_cast<Opened*>(opened);
  const Plan p{expert_G, place, int(rank), int(R), int(e), int(S), 0, int(gradients)};
  const auto stream = static_cast<cudaStream_t>(stream_address);
  wait_kernel<<<kBlocks, kThreads, 0, stream>>>(o.comm, p, o.expected);
  return cudaGetLastError();
}
