// Row kernels for the device: what csrc/rows/rows.cpp computes, bit for bit.
//
// Order never comes from atomics: elements are cut into chunks of kChunk, one warp walks each chunk
// in order, and prefix sums over (bucket, chunk) say where its elements go. Atomics only count.
// Letters: N elements, C = ceil(N / kChunk) chunks, B buckets, S source rows, T tokens, K choices,
// A assignments, D columns. Indices are int64. Indices are trusted: a check would wait for the host.
#include "bfloat16.h"
#include "device.h"

namespace {

using i32 = std::int32_t;
using i64 = std::int64_t;

constexpr int kChunk = 1024;   // elements that one warp ranks
constexpr int kThreads = 256;
constexpr int kScanThreads = 1024;

unsigned chunks_of(i64 N) { return unsigned((N + kChunk - 1) / kChunk); }

// ---- stable counting sort -----------------------------------------------------------------------

// A key is read as id + 1 from int32 expert_G (empty slots first), or as it is from int64.
__device__ __forceinline__ i64 key_at(const i64* key, i64 n) { return key[n]; }
__device__ __forceinline__ i64 key_at(const i32* key, i64 n) { return i64(key[n]) + 1; }

// count [C][B] of one chunk a block.
template <class Key>
KERNEL histogram_kernel(const Key* key, i64 N, i64 B, i32* count) {
  i32* own = count + i64(blockIdx.x) * B;
  for (i64 b = threadIdx.x; b < B; b += blockDim.x) own[b] = 0;
  __syncthreads();
  const i64 begin = i64(blockIdx.x) * kChunk, end = begin + kChunk < N ? begin + kChunk : N;
  for (i64 n = begin + threadIdx.x; n < end; n += blockDim.x) atomicAdd(&own[key_at(key, n)], 1);
}

// Exclusive prefix sum of one value a thread over the block; `total` gets the sum. `scratch` has 33
// entries.
__device__ __forceinline__ i64 block_prefix(i64 value, i64* scratch, i64& total) {
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const i64 upto = device::warp_prefix_sum(value);
  if (lane == 31) scratch[warp] = upto;
  __syncthreads();
  if (warp == 0) {
    const i64 own = lane < blockDim.x / 32 ? scratch[lane] : 0;
    const i64 sums = device::warp_prefix_sum(own);
    scratch[lane] = sums - own;
    if (lane == 31) scratch[32] = sums;
  }
  __syncthreads();
  total = scratch[32];
  const i64 result = scratch[warp] + upto - value;
  __syncwarp(kAllLanes);  // the next call writes only the own warp's entry before its barrier
  return result;
}

// One block: offset [B+1] of the buckets, and count [C][B] becomes where each chunk's part begins.
KERNEL bucket_offsets_kernel(i32* count, i64 C, i64 B, i64* offset) {
  __shared__ i64 scratch[33];
  i64 before = 0;
  for (i64 first = 0; first < B; first += blockDim.x) {
    const i64 b = first + threadIdx.x;
    i64 sum = 0, total;
    for (i64 c = 0; c < C && b < B; ++c) sum += count[c * B + b];
    i64 at = before + block_prefix(sum, scratch, total);
    before += total;
    if (b >= B) continue;
    offset[b] = at;
    for (i64 c = 0; c < C; ++c) {
      const i32 own = count[c * B + b];
      count[c * B + b] = i32(at);
      at += own;
    }
  }
  if (threadIdx.x == 0) offset[B] = before;
}

// Where element n of a chunk goes; one warp in step over the chunk's elements. The cursor [B] of the
// chunk advances.
template <class Key>
__device__ __forceinline__ i64 rank_in_order(const Key* key, i64 n, bool valid, i64 B, i32* cursor) {
  const unsigned lane = threadIdx.x % 32;
  const i64 bucket = valid ? key_at(key, n) : B;  // one more bucket for what lies beyond the end
  const unsigned alike = __match_any_sync(kAllLanes, bucket);
  const unsigned below = alike & ((1u << lane) - 1);
  const i64 at = valid ? cursor[bucket] + __popc(below) : 0;
  __syncwarp(kAllLanes);
  if (valid && !below) cursor[bucket] += __popc(alike);
  __syncwarp(kAllLanes);  // a match alone does not order memory
  return at;
}

template <class Key>
KERNEL place_kernel(const Key* key, i64 N, i64 B, i32* cursor, i64* order) {
  const i64 begin = i64(blockIdx.x) * kChunk;
  for (i64 n = begin + threadIdx.x; n - threadIdx.x < begin + kChunk; n += 32) {
    const bool valid = n < N;
    const i64 at = rank_in_order(key, n, valid, B, cursor + i64(blockIdx.x) * B);
    if (valid) order[at] = n;
  }
}

template <class Key>
int bucket(const Key* key, i64 N, i64 B, i32* count, i64* order, i64* offset,
           device::Stream stream) {
  const unsigned C = chunks_of(N);
  int error = 0;
  if (C) error = LAUNCH(histogram_kernel<Key>, C, 128, 0, stream, key, N, B, count);
  if (!error) {
    error = LAUNCH(bucket_offsets_kernel, 1, kScanThreads, 0, stream, count, i64(C), B, offset);
  }
  if (!error && C && order) {
    error = LAUNCH(place_kernel<Key>, C, 32, 0, stream, key, N, B, count, order);
  }
  return error;
}

// ---- slots of a source's assignments ------------------------------------------------------------

// end [G]: assignments of the source up to and with slot_order[i], in (expert, slot) order.
KERNEL split_ends_kernel(const i32* split, const i64* slot_order, i64 G, i64* end) {
  __shared__ i64 scratch[33];
  i64 before = 0;
  for (i64 first = 0; first < G; first += blockDim.x) {
    const i64 i = first + threadIdx.x;
    const i64 own = i < G ? split[slot_order[i]] : 0;
    i64 total;
    const i64 at = before + block_prefix(own, scratch, total);
    if (i < G) end[i] = at + own;
    before += total;
  }
}

// Assignments by (expert, token) meet slots by (expert, slot), each as often as the split says.
KERNEL assign_kernel(const i64* ids, i64 N, i64 E, i32* cursor, const i64* slot_order,
                     const i64* end, i64 G, i64* slot) {
  const i64 begin = i64(blockIdx.x) * kChunk;
  for (i64 n = begin + threadIdx.x; n - threadIdx.x < begin + kChunk; n += 32) {
    const bool valid = n < N;
    const i64 at = rank_in_order(ids, n, valid, E, cursor + i64(blockIdx.x) * E);
    if (!valid) continue;
    i64 low = 0, high = G - 1;  // the first slot whose end lies above `at`
    while (low < high) {
      const i64 middle = (low + high) / 2;
      if (end[middle] > at) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    slot[n] = slot_order[low];
  }
}

// ---- rows ---------------------------------------------------------------------------------------

struct alignas(16) Vector {
  std::uint32_t word[4];
};

// One warp a row; Unit is the widest that divides the row and its alignment.
template <class Unit>
KERNEL gather_kernel(const Unit* source, const i64* index, i64 N, i64 units, Unit* out) {
  const unsigned lane = threadIdx.x % 32, warps = blockDim.x / 32;
  for (i64 n = i64(blockIdx.x) * warps + threadIdx.x / 32; n < N; n += i64(gridDim.x) * warps) {
    const Unit* from = source + index[n] * units;
    Unit* to = out + n * units;
    for (i64 u = lane; u < units; u += 32) to[u] = from[u];
  }
}

__device__ __forceinline__ double widen(double v) { return v; }

__device__ __forceinline__ void narrow(float v, float& out) { out = v; }
__device__ __forceinline__ void narrow(double v, double& out) { out = v; }
__device__ __forceinline__ void narrow(float v, Bfloat16& out) {  // to nearest, ties to even
  union {
    float value;
    std::uint32_t word;
  } u{v};
  const std::uint32_t rounded = (u.word + 0x7fff + (u.word >> 16 & 1)) >> 16;
  out.bits = std::uint16_t((u.word & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
}

template <class Element, int width>
struct alignas(sizeof(Element) * width) Pack {
  Element at[width];
};

// One warp a source row, `width` columns a lane at a time: rows are added in their order, in
// registers.
template <class Element, class Sum, int width>
KERNEL sum_kernel(const Element* rows, const i64* order, const i64* offset, const Sum* weight, i64 S,
                  i64 D, Element* out) {
  using Columns = Pack<Element, width>;
  const unsigned lane = threadIdx.x % 32, warps = blockDim.x / 32;
  for (i64 s = i64(blockIdx.x) * warps + threadIdx.x / 32; s < S; s += i64(gridDim.x) * warps) {
    const i64 begin = offset[s], end = offset[s + 1];
    for (i64 d = i64(lane) * width; d < D; d += 32 * width) {
      Sum sum[width];
      for (int c = 0; c < width; ++c) sum[c] = 0;
      for (i64 i = begin; i < end; ++i) {
        const i64 n = order[i];
        const Columns columns = *reinterpret_cast<const Columns*>(rows + n * D + d);
        const Sum factor = weight ? weight[n] : Sum(1);
        for (int c = 0; c < width; ++c) sum[c] += factor * Sum(widen(columns.at[c]));
      }
      Columns result;
      for (int c = 0; c < width; ++c) narrow(sum[c], result.at[c]);
      *reinterpret_cast<Columns*>(out + s * D + d) = result;
    }
  }
}

unsigned blocks_for(i64 rows) {
  const i64 wanted = (rows + kThreads / 32 - 1) / (kThreads / 32), most = 16 * device::processors();
  return unsigned(wanted < most ? wanted : most);
}

template <class Element, class Sum>
int sum_rows(const void* rows, const i64* order, const i64* offset, const void* weight, i64 S, i64 D,
             void* out, device::Stream stream) {
  constexpr int kWide = 16 / int(sizeof(Element));
  const auto* from = static_cast<const Element*>(rows);
  const auto* factor = static_cast<const Sum*>(weight);
  auto* to = static_cast<Element*>(out);
  const auto address = reinterpret_cast<std::uintptr_t>(rows) | reinterpret_cast<std::uintptr_t>(out);
  if (D % kWide == 0 && address % 16 == 0) {
    constexpr auto kernel = sum_kernel<Element, Sum, kWide>;
    return LAUNCH(kernel, blocks_for(S), kThreads, 0, stream, from, order, offset, factor, S, D, to);
  }
  constexpr auto kernel = sum_kernel<Element, Sum, 1>;
  return LAUNCH(kernel, blocks_for(S), kThreads, 0, stream, from, order, offset, factor, S, D, to);
}

template <class Unit>
int gather(const void* source, const i64* index, i64 N, i64 bytes, void* out,
           device::Stream stream) {
  return LAUNCH(gather_kernel<Unit>, blocks_for(N), kThreads, 0, stream,
                static_cast<const Unit*>(source), index, N, i64(bytes / i64(sizeof(Unit))),
                static_cast<Unit*>(out));
}

// ---- one row for each distinct (target, row) ----------------------------------------------------

// One block, A elements in order.
KERNEL dedup_kernel(const i64* target, const i64* row, const i64* order, i64 A, i64* pair,
                    i64* index) {
  __shared__ i64 scratch[33];
  i64 before = 0;
  for (i64 first = 0; first < A; first += blockDim.x) {
    const i64 i = first + threadIdx.x;
    i64 is_new = 0, total;
    if (i < A) {
      const i64 a = order[i], b = i ? order[i - 1] : 0;
      is_new = i == 0 || target[a] != target[b] || row[a] != row[b];
    }
    const i64 at = before + block_prefix(is_new, scratch, total) + is_new - 1;
    before += total;
    if (i < A) pair[i] = at;
    if (is_new) index[at] = row[order[i]];
  }
}

// rows [P] are zero. A token counts once for each place among its K slots.
KERNEL count_rows_kernel(const i64* slot, i64 T, i64 K, i64 per_place, unsigned long long* rows) {
  for (i64 n = i64(blockIdx.x) * blockDim.x + threadIdx.x; n < T * K;
       n += i64(gridDim.x) * blockDim.x) {
    const i64 place = slot[n] / per_place;
    bool first = true;
    for (i64 before = n - n % K; before < n; ++before) first &= slot[before] / per_place != place;
    if (first) atomicAdd(&rows[place], 1ull);
  }
}

}  // namespace

#define API extern "C" __attribute__((visibility("default")))

// count: scratch [C][B]. order [N], offset [B+1] as topoep_rows_bucket.
API int topoep_device_bucket(const i64* key, long long N, long long B, i32* count, i64* order,
                             i64* offset, void* stream) {
  return bucket(key, N, B, count, order, offset, static_cast<device::Stream>(stream));
}

// Scratch: count [max chunks of N and G][E+1], slot_order [G], end [G], offset [E+2].
API int topoep_device_assign(const i64* ids, const i32* expert_G, const i32* split, long long N,
                             long long G, long long E, i32* count, i64* slot_order, i64* end,
                             i64* offset, i64* slot, void* stream_address) {
  const auto stream = static_cast<device::Stream>(stream_address);
  int error = bucket(expert_G, G, E + 1, count, slot_order, offset, stream);
  if (!error) {
    error = LAUNCH(split_ends_kernel, 1, kScanThreads, 0, stream, split, slot_order, i64(G), end);
  }
  if (!error) error = bucket(ids, N, E, count, static_cast<i64*>(nullptr), offset, stream);
  if (!error && N) {
    error = LAUNCH(assign_kernel, chunks_of(N), 32, 0, stream, ids, i64(N), i64(E), count,
                   slot_order, end, i64(G), slot);
  }
  return error;
}

API int topoep_device_gather(const void* source, const i64* index, long long N, long long bytes,
                             void* out, void* stream_address) {
  const auto stream = static_cast<device::Stream>(stream_address);
  const auto bits = reinterpret_cast<std::uintptr_t>(source) |
                    reinterpret_cast<std::uintptr_t>(out) | std::uintptr_t(bytes);
  if (!N || !bytes) return 0;
  if (bits % 16 == 0) return gather<Vector>(source, index, N, bytes, out, stream);
  if (bits % 4 == 0) return gather<std::uint32_t>(source, index, N, bytes, out, stream);
  return gather<std::uint8_t>(source, index, N, bytes, out, stream);
}

// kind: 0 float32, 1 bfloat16, 2 float64; weight may be null.
API int topoep_device_sum(const void* rows, const i64* order, const i64* offset, const void* weight,
                          long long S, long long D, long long kind, void* out,
                          void* stream_address) {
  const auto stream = static_cast<device::Stream>(stream_address);
  if (!S || !D) return 0;
  switch (kind) {
    case 0: return sum_rows<float, float>(rows, order, offset, weight, S, D, out, stream);
    case 1: return sum_rows<Bfloat16, float>(rows, order, offset, weight, S, D, out, stream);
    default: return sum_rows<double, double>(rows, order, offset, weight, S, D, out, stream);
  }
}

// count: scratch [C][B]; offset: scratch [B+1].
API int topoep_device_dedup(const i64* target, const i64* row, long long A, long long B, i32* count,
                            i64* offset, i64* order, i64* pair, i64* index, void* stream_address) {
  const auto stream = static_cast<device::Stream>(stream_address);
  if (int error = bucket(target, A, B, count, order, offset, stream)) return error;
  if (!A) return 0;
  return LAUNCH(dedup_kernel, 1, kScanThreads, 0, stream, target, row, order, i64(A), pair, index);
}

API int topoep_device_count_rows(const i64* slot, long long T, long long K, long long per_place,
                                 unsigned long long* rows, void* stream_address) {
  const auto stream = static_cast<device::Stream>(stream_address);
  if (!T) return 0;
  return LAUNCH(count_rows_kernel, blocks_for(T * K / 32 + 1), kThreads, 0, stream, slot, i64(T),
                i64(K), i64(per_place), rows);
}
