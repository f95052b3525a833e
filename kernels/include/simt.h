// Runs the CUDA C++ of this folder on a CPU, thread by thread, to test kernels without a GPU.
//
// A block's threads are fibers of one OS thread; blocks run one after the other. A fiber runs until
// it waits: at a block barrier, in a warp collective, or in simt::pause(). Which fiber goes on is
// the schedule's choice (set_schedule): ascending, descending, or drawn at random. A kernel must
// give the same bytes under all of them; one that lacks a barrier does not. Dynamic shared memory is
// filled with 0xCD before each block. A launch returns nonzero, and error() says what happened and
// where, when
//   - threads meet at different __syncthreads, or one exits while others wait at one;
//   - lanes meet at different warp collectives, a lane calls one that its mask leaves out, a mask
//     names a lane that has exited or does not exist, or masks overlap without being equal;
//   - every thread waits (deadlock).
//
// What it cannot see, so that a GPU must show it:
//   - weak memory: missing fences, wrong scopes, proxies. Fibers see every store at once;
//   - a race between two warps that no lane order exposes: they interleave only where they wait;
//   - blocks that need each other at the same time: no grid barrier, no cluster barrier, no spin on
//     another block. Write the phases of such a kernel as functions, launched one after the other;
//   - a spin that does not call simt::pause(): it never ends here;
//   - limits of registers, shared memory and alignment: those are the compiler's (static gates);
//   - static __shared__ arrays keep the values of the block before, and may not have constructors;
//   - floating point: compile with -ffp-contract=off; a GPU build contracts differently unless told.
// One dimension only (x). Bulk copies: bulk.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static thread_local
#define __align__(n) alignas(n)

namespace simt {

enum class Order { kForward, kReverse, kRandom };

struct Index {
  unsigned x;
};

struct Site {
  const char* file;
  int line;
};

// What one launch did, summed over its blocks; `longest`: the most barriers and warp collectives of a
// block that had to follow one another.
struct Counters {
  std::int64_t barriers, collectives, longest, bulk_copies;
};

enum class Op { kShuffle, kBallot, kAdd, kMin, kMax, kOr, kMatch, kSync };

void set_schedule(Order order, std::uint64_t seed);
const Counters& counters();  // of this thread's last launch
const std::vector<std::int64_t>& chains();  // `longest` of the first launches since set_schedule
const char* error();         // of this thread's last launch, "" when it succeeded

// Runs body(argument) once per thread of every block; 0, or 1 with error() set.
int launch(unsigned blocks, unsigned threads, std::size_t shared_bytes, void (*body)(void*),
           void* argument);

Index thread_index();
Index block_index();
Index block_size();
Index grid_size();
char* shared_memory();

void block_barrier(Site site);
std::uint64_t collective(Op op, unsigned mask, std::uint64_t value, unsigned lane, Site site);
void pause();                    // lets other threads go on; for loops that wait for them
void progressed();               // a wait elsewhere (bulk.h) has ended
void count_bulk_copy();
[[noreturn]] void fail(const char* what);  // ends the launch; only from inside a kernel

// Values travel as 64 bits. Reductions compare them unsigned, so signed ones are shifted.
template <class T>
std::uint64_t pack(T value) {
  std::uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  return bits;
}

template <class T>
T unpack(std::uint64_t bits) {
  T value;
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

inline std::uint64_t order_key(unsigned value) { return value; }
inline std::uint64_t order_key(int value) { return std::uint64_t(std::int64_t(value) + (1ll << 31)); }
inline void from_order_key(std::uint64_t key, unsigned& value) { value = unsigned(key); }
inline void from_order_key(std::uint64_t key, int& value) {
  value = int(std::int64_t(key) - (1ll << 31));
}

template <class T>
T extreme(Op op, unsigned mask, T value, Site site) {
  T result;
  from_order_key(collective(op, mask, order_key(value), 0, site), result);
  return result;
}

template <class T>
T shuffle(unsigned mask, T value, unsigned lane, Site site) {
  return unpack<T>(collective(Op::kShuffle, mask, pack(value), lane, site));
}

inline unsigned lane() { return thread_index().x % 32; }

template <class T, class U>
T atomic_add(T* at, U value) {
  const T old = *at;
  *at = old + T(value);
  return old;
}

template <class T>
T atomic_min(T* at, T value) {
  const T old = *at;
  if (value < old) *at = value;
  return old;
}

}  // namespace simt

#define SIMT_SITE (::simt::Site{__FILE__, __LINE__})
#define threadIdx (::simt::thread_index())
#define blockIdx (::simt::block_index())
#define blockDim (::simt::block_size())
#define gridDim (::simt::grid_size())

#define __syncthreads() ::simt::block_barrier(SIMT_SITE)
#define __syncwarp(mask) ::simt::collective(::simt::Op::kSync, mask, 0, 0, SIMT_SITE)
#define __shfl_sync(mask, value, lane) ::simt::shuffle(mask, value, (lane) % 32u, SIMT_SITE)
#define __shfl_up_sync(mask, value, by) \
  ::simt::shuffle(mask, value,          \
                  ::simt::lane() >= (by) ? ::simt::lane() - (by) : ::simt::lane(), SIMT_SITE)
#define __shfl_xor_sync(mask, value, bits) \
  ::simt::shuffle(mask, value, ::simt::lane() ^ (bits), SIMT_SITE)
#define __ballot_sync(mask, predicate) \
  unsigned(::simt::collective(::simt::Op::kBallot, mask, (predicate) ? 1 : 0, 0, SIMT_SITE))
#define __match_any_sync(mask, value) \
  unsigned(::simt::collective(::simt::Op::kMatch, mask, ::simt::pack(value), 0, SIMT_SITE))
#define __reduce_add_sync(mask, value) \
  decltype(value)(::simt::collective(::simt::Op::kAdd, mask, ::simt::pack(value), 0, SIMT_SITE))
#define __reduce_min_sync(mask, value) \
  ::simt::extreme(::simt::Op::kMin, mask, value, SIMT_SITE)
#define __reduce_max_sync(mask, value) \
  ::simt::extreme(::simt::Op::kMax, mask, value, SIMT_SITE)
#define __reduce_or_sync(mask, value) \
  unsigned(::simt::collective(::simt::Op::kOr, mask, value, 0, SIMT_SITE))

#define __threadfence() ((void)0)
#define __threadfence_system() ((void)0)
#define atomicAdd(at, value) ::simt::atomic_add(at, value)
#define atomicMin(at, value) ::simt::atomic_min(at, value)
#define __popc(bits) __builtin_popcount(bits)
#define __ffs(bits) __builtin_ffs(int(bits))
