// Replica transfers between ranks whose memory is mapped here (one NVLink domain): parameters into
// replica slots, gradients back to the mains (TopoEP paper, section 3.2).
//
// Jobs come from the plan in device memory: nothing of a launch depends on data, so a CUDA graph may
// hold it. Letters: R ranks, E experts, e = E/R mains a rank, S replica slots, per = e + S slots a
// rank, P parts of an expert (its weight matrices), each of `bytes` bytes, a multiple of 16.
//
//   base [P][R]  address of every rank's buffer of a part, 0 where it is not mapped here (another
//                domain: those transfers are the gin library's, and are left out here)
//   place [E]    rank * e + index of each expert's main instance
//
// The caller fences: before a pull all mains are written, after it none is overwritten until all
// ranks have passed; before reduce all pushes are done. Jobs are cut into chunks of kChunk bytes,
// chunk i to block i mod blocks: one hot expert is spread over all of them.
#include "bfloat16.h"
#include "bulk.h"

namespace {

using i32 = std::int32_t;
using i64 = std::int64_t;
using Address = unsigned long long;

constexpr int kStages = 4;
constexpr i64 kChunk = 32 * 1024;
constexpr int kThreads = 128;  // below sm_90 all of them copy; with bulk copies one drives the ring
constexpr int kRingBytes = kStages * int(kChunk) + 128;

struct Direction {
  i64 region;  // bytes from a rank's base to what this rank addresses there
  bool pull;   // peer to own, else own to peer
};

struct Transfer {
  const i32* expert_G;
  const i32* place;
  const Address* base;
  const Address* own;  // [P] this rank's slots (pull) or slot gradients (push), [S] experts each
  int rank, R, e, S, P;
  i64 bytes;
  Direction direction;
};

struct Chunk {
  const char* from;
  char* to;
  std::uint32_t bytes;  // 0: nothing to do
};

// Chunk c of slot `job / P`, part `job % P`.
__device__ __forceinline__ Chunk chunk_at(const Transfer& t, i64 c, i64 chunks) {
  const i64 job = c / chunks, begin = c % chunks * kChunk;
  const int slot = int(job / t.P), part = int(job % t.P);
  const int expert = t.expert_G[t.rank * (t.e + t.S) + t.e + slot];
  if (expert < 0) return {nullptr, nullptr, 0};
  const int home = t.place[expert] / t.e, index = t.place[expert] % t.e;
  const Address peer = t.base[i64(part) * t.R + home];
  if (!peer) return {nullptr, nullptr, 0};
  char* there = reinterpret_cast<char*>(peer) + t.direction.region + index * t.bytes + begin;
  char* here = reinterpret_cast<char*>(t.own[part]) + slot * t.bytes + begin;
  const i64 rest = t.bytes - begin;
  const auto size = std::uint32_t(rest < kChunk ? rest : kChunk);
  return t.direction.pull ? Chunk{there, here, size} : Chunk{here, there, size};
}

// This block's next chunk that has something to do, from `c` on; `end` when there is none.
__device__ __forceinline__ i64 next_chunk(const Transfer& t, i64 c, i64 end, i64 chunks,
                                          Chunk& chunk) {
  for (; c < end; c += gridDim.x) {
    chunk = chunk_at(t, c, chunks);
    if (chunk.bytes) return c;
  }
  return end;
}

#if !defined(__CUDACC__) || __CUDA_ARCH__ >= 900

// One thread keeps kStages - 1 loads in flight behind the store of the oldest.
__device__ __forceinline__ void copy_chunks(const Transfer& t, char* shared) {
  if (threadIdx.x) return;
  auto* full = reinterpret_cast<bulk::Barrier*>(shared);
  char* ring = shared + 128;
  for (int stage = 0; stage < kStages; ++stage) bulk::init(full + stage);
  const i64 chunks = (t.bytes + kChunk - 1) / kChunk, end = i64(t.S) * t.P * chunks;
  i64 load_at = blockIdx.x, store_at = blockIdx.x;
  unsigned loaded = 0, stored = 0;
  for (;;) {
    while (loaded < stored + kStages - 1) {
      Chunk next{};
      load_at = next_chunk(t, load_at, end, chunks, next);
      if (load_at >= end) break;
      // The stage was last read by the store before the newest.
      if (loaded >= kStages) bulk::wait_read<1>();
      const unsigned stage = loaded % kStages;
      bulk::expect(full + stage, next.bytes);
      bulk::load(ring + stage * kChunk, next.from, next.bytes, full + stage);
      ++loaded;
      load_at += gridDim.x;
    }
    if (stored == loaded) break;
    Chunk oldest{};
    store_at = next_chunk(t, store_at, end, chunks, oldest);
    const unsigned stage = stored % kStages;
    bulk::wait(full + stage, stored / kStages & 1);
    bulk::store(oldest.to, ring + stage * kChunk, oldest.bytes);
    bulk::commit();
    ++stored;
    store_at += gridDim.x;
  }
  bulk::wait_written<0>();
}

#else

struct alignas(16) Vector {
  std::uint32_t word[4];
};

__device__ __forceinline__ void copy_chunks(const Transfer& t, char*) {
  const i64 chunks = (t.bytes + kChunk - 1) / kChunk, end = i64(t.S) * t.P * chunks;
  Chunk chunk{};
  for (i64 c = next_chunk(t, blockIdx.x, end, chunks, chunk); c < end;
       c = next_chunk(t, c + gridDim.x, end, chunks, chunk)) {
    const auto* from = reinterpret_cast<const Vector*>(chunk.from);
    auto* to = reinterpret_cast<Vector*>(chunk.to);
    for (unsigned i = threadIdx.x; i < chunk.bytes / 16; i += kThreads) to[i] = from[i];
  }
}

#endif

KERNEL transfer_kernel(Transfer t) {
  SHARED_MEMORY(shared);
  copy_chunks(t, shared);
}

// ---- sums of arrived gradients ------------------------------------------------------------------

template <class Element>
struct alignas(4 * sizeof(Element)) Four {
  Element at[4];
};

// total [e][n] fp32 += region [R][e][n] of every rank that hosts a replica of the main, in ascending
// rank. blockIdx.x / blocks_each is the main. Regions of other ranks are not read.
template <class Element>
KERNEL reduce_kernel(float* total, const Element* region, const i32* expert_G, int rank, int R,
                     int e, int S, i64 n, unsigned blocks_each) {
  SHARED_MEMORY(shared);
  auto* hosts = reinterpret_cast<std::uint32_t*>(shared);  // a bit for each rank
  const int main = int(blockIdx.x / blocks_each), words = (R + 31) / 32, per = e + S;
  const i32 expert = expert_G[rank * per + main];
  for (int w = int(threadIdx.x); w < words; w += kThreads) {
    std::uint32_t bits = 0;
    for (int r = 32 * w; r < 32 * w + 32 && r < R; ++r) {
      for (int j = e; j < per; ++j) bits |= std::uint32_t(expert_G[r * per + j] == expert) << r % 32;
    }
    hosts[w] = bits;
  }
  __syncthreads();
  using Columns = Four<Element>;
  using Sums = Four<float>;
  auto* sums = reinterpret_cast<Sums*>(total + main * n);
  const i64 step = i64(blocks_each) * kThreads;
  for (i64 i = i64(blockIdx.x % blocks_each) * kThreads + threadIdx.x; i < n / 4; i += step) {
    Sums sum = sums[i];
    for (int w = 0; w < words; ++w) {
      for (std::uint32_t bits = hosts[w]; bits; bits &= bits - 1) {
        const i64 r = 32 * w + __ffs(bits) - 1;
        const Columns arrived = reinterpret_cast<const Columns*>(region + (r * e + main) * n)[i];
        for (int c = 0; c < 4; ++c) sum.at[c] += widen(arrived.at[c]);
      }
    }
    sums[i] = sum;
  }
}

template <class Element>
int reduce(float* total, const void* region, const i32* expert_G, int rank, int R, int e, int S,
           i64 n, device::Stream stream) {
  const unsigned each = unsigned((4 * device::processors() + e - 1) / e);
  return LAUNCH(reduce_kernel<Element>, each * unsigned(e), kThreads,
                sizeof(std::uint32_t) * std::size_t((R + 31) / 32), stream, total,
                static_cast<const Element*>(region), expert_G, rank, R, e, S, n, each);
}

}  // namespace

#define API extern "C" __attribute__((visibility("default")))

// pull: main `index` of each expert in this rank's slots, from its rank's buffer into the slot.
// push: each slot's gradient into region [this rank][index] of the main's rank.
API int topoep_device_transfer(const i32* expert_G, const i32* place, const Address* base,
                               const Address* own, long long rank, long long R, long long e,
                               long long S, long long P, long long bytes, long long pull,
                               long long blocks, void* stream_address) {
  const auto stream = static_cast<device::Stream>(stream_address);
  const Direction direction{pull ? 0 : rank * e * bytes, pull != 0};
  const Transfer t{expert_G, place,  base,   own,   int(rank), int(R),
                   int(e),   int(S), int(P), bytes, direction};
  if (!S) return 0;
  return LAUNCH(transfer_kernel, unsigned(blocks), kThreads, kRingBytes, stream, t);
}

// n: elements of one part of an expert, a multiple of 4. kind: 0 float32, 1 bfloat16 regions.
API int topoep_device_reduce(float* total, const void* region, const i32* expert_G, long long rank,
                             long long R, long long e, long long S, long long n, long long kind,
                             void* stream_address) {
  const auto stream = static_cast<device::Stream>(stream_address);
  if (!S) return 0;
  if (kind == 0) {
    return reduce<float>(total, region, expert_G, int(rank), int(R), int(e), int(S), n, stream);
  }
  return reduce<Bfloat16>(total, region, expert_G, int(rank), int(R), int(e), int(S), n, stream);
}
