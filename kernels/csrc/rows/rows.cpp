// Row kernels for the CPU, one thread: what execution does with tokens between two exchanges.
//
// Letters: N elements, B buckets, S source rows, T tokens, K choices, A assignments, D columns.
// Indices are int64. Callers check shapes and ranges of sizes; a function returns 1, with nothing
// of value written, when it meets an index outside its range, else 0.
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

using i32 = std::int32_t;
using i64 = std::int64_t;
using u16 = std::uint16_t;

constexpr i64 kStrip = 64;  // columns summed at a time

inline float widen(u16 bits) {  // bfloat16
  const std::uint32_t word = std::uint32_t(bits) << 16;
  float value;
  std::memcpy(&value, &word, sizeof value);
  return value;
}

// A loop compiled for several instruction sets; the loader picks one. Without contraction all give
// the same bits.
#if defined(__x86_64__) && !defined(__SANITIZE_ADDRESS__)
#define CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define CLONES
#endif


inline float widen(float value) { return value; }
inline double widen(double value) { return value; }
inline void narrow(float value, float& out) { out = value; }
inline void narrow(double value, double& out) { out = value; }
inline void narrow(float value, u16& out) {  // to nearest, ties to even; NaN stays NaN
  std::uint32_t word;
  std::memcpy(&word, &value, sizeof word);
  const std::uint32_t rounded = (word + 0x7fff + (word >> 16 & 1)) >> 16;
  out = u16((word & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
}

// Sums of one source row, a strip of columns at a time: its sums stay in registers while the rows
// pass. Two strips on, each row is on its way: rows lie anywhere, which no processor foresees.
#define SUM_BAG(Element, Sum)                                                                     \
  CLONES void sum_bag(const Element* rows, const i64* order, i64 count, const Sum* weight, i64 D, \
                      Element* out) {                                                             \
    i64 d = 0;                                                                                    \
    for (; d + kStrip <= D; d += kStrip) {                                                        \
      Sum sum[kStrip] = {};                                                                       \
      for (i64 i = 0; i < count; ++i) {                                                           \
        const Element* row = rows + order[i] * D + d;                                             \
        const Sum factor = weight ? weight[order[i]] : Sum(1);                                    \
        for (i64 line = 0; line < kStrip; line += 64 / i64(sizeof(Element))) {                    \
          __builtin_prefetch(row + 2 * kStrip + line);                                            \
        }                                                                                         \
        for (i64 k = 0; k < kStrip; ++k) sum[k] += factor * widen(row[k]);                        \
      }                                                                                           \
      for (i64 k = 0; k < kStrip; ++k) narrow(sum[k], out[d + k]);                                \
    }                                                                                             \
    for (; d < D; ++d) {                                                                          \
      Sum sum = 0;                                                                                \
      for (i64 i = 0; i < count; ++i) {                                                           \
        sum += (weight ? weight[order[i]] : Sum(1)) * widen(rows[order[i] * D + d]);              \
      }                                                                                           \
      narrow(sum, out[d]);                                                                        \
    }                                                                                             \
  }
SUM_BAG(float, float)
SUM_BAG(u16, float)
SUM_BAG(double, double)
#undef SUM_BAG

template <class Element, class Sum>
int sum_rows(const Element* rows, const i64* order, const i64* offset, const Sum* weight, i64 N,
             i64 S, i64 D, Element* out) {
  for (i64 s = 0; s < S; ++s, out += D) {
    const i64 begin = offset[s], end = offset[s + 1];
    if (begin < 0 || begin > end || end > N) return 1;
    for (i64 i = begin; i < end; ++i) {
      if (order[i] < 0 || order[i] >= N) return 1;
    }
    if (end - begin == 1 && !weight) {  // nothing to add
      std::memcpy(out, rows + order[begin] * D, D * sizeof(Element));
    } else {
      sum_bag(rows, order + begin, end - begin, weight, D, out);
    }
  }
  return 0;
}

// offset[b] = elements below bucket b, from counts in offset[1..B].
void accumulate(i64* offset, i64 B) {
  for (i64 b = 0; b < B; ++b) offset[b + 1] += offset[b];
}

int count(const i64* key, i64 N, i64 B, i64* offset) {
  std::memset(offset, 0, (B + 1) * sizeof(i64));
  for (i64 n = 0; n < N; ++n) {
    if (key[n] < 0 || key[n] >= B) return 1;
    ++offset[key[n] + 1];
  }
  accumulate(offset, B);
  return 0;
}

}  // namespace

#define API extern "C" __attribute__((visibility("default")))

// order [N]: positions by ascending key, equal keys in order; offset [B+1]: where a bucket begins.
API int topoep_rows_bucket(const i64* key, i64 N, i64 B, i64* order, i64* offset) {
  if (count(key, N, B, offset)) return 1;
  std::vector<i64> next(offset, offset + B);
  for (i64 n = 0; n < N; ++n) order[next[key[n]]++] = n;
  return 0;
}

// slot [N] of each of a source's assignments, ids [N] in token order, by the cut rule: expert_G [G]
// and the source's row of the plan, split [G]. 1 too when the split does not match the ids.
API int topoep_rows_assign(const i64* ids, const i32* expert_G, const i32* split, i64 N, i64 G,
                           i64 E, i64* slot) {
  struct Cursor {  // where an expert's next assignment goes
    i32 slot, left;
  };
  std::vector<Cursor> cursor(E, Cursor{-1, 0});
  std::vector<i32> next(G, -1);  // the next instance of the same expert
  std::vector<i32> last(E, -1);
  for (i64 g = 0; g < G; ++g) {
    const i32 x = expert_G[g];
    if (x >= E || (x < 0 && split[g])) return 1;
    if (x < 0 || split[g] == 0) continue;
    if (last[x] < 0) {
      cursor[x] = {i32(g), split[g]};
    } else {
      next[last[x]] = i32(g);
    }
    last[x] = i32(g);
  }
  for (i64 n = 0; n < N; ++n) {
    if (ids[n] < 0 || ids[n] >= E) return 1;
    Cursor& c = cursor[ids[n]];
    if (c.left == 0) {
      if (c.slot < 0 || next[c.slot] < 0) return 1;
      c = {next[c.slot], split[next[c.slot]]};
    }
    slot[n] = c.slot;
    --c.left;
  }
  return 0;
}

// out [N] rows of `bytes`: source[index].
API int topoep_rows_gather(const char* source, const i64* index, i64 N, i64 S, i64 bytes,
                           char* out) {
  for (i64 n = 0; n < N; ++n) {
    if (index[n] < 0 || index[n] >= S) return 1;
  }
  for (i64 n = 0; n < N; ++n) std::memcpy(out + n * bytes, source + index[n] * bytes, bytes);
  return 0;
}

// out [S][D]: sum over i in [offset[s], offset[s+1]) of weight[order[i]] * rows[order[i]], in this
// order; in fp32 (float64 for float64), rounded once. weight may be null. kind: 0 float32,
// 1 bfloat16, 2 float64.
API int topoep_rows_sum(const void* rows, const i64* order, const i64* offset, const void* weight,
                        i64 N, i64 S, i64 D, i64 kind, void* out) {
  switch (kind) {
    case 0:
      return sum_rows(static_cast<const float*>(rows), order, offset,
                      static_cast<const float*>(weight), N, S, D, static_cast<float*>(out));
    case 1:
      return sum_rows(static_cast<const u16*>(rows), order, offset,
                      static_cast<const float*>(weight), N, S, D, static_cast<u16*>(out));
    default:
      return sum_rows(static_cast<const double*>(rows), order, offset,
                      static_cast<const double*>(weight), N, S, D, static_cast<double*>(out));
  }
}

// One row for each distinct (target, row). row [A] ascends. order [A]: assignments by target;
// pair [A]: the row that serves each of them, counted over all targets; index [N]: its source row.
API int topoep_rows_dedup(const i64* target, const i64* row, i64 A, i64 B, i64 N, i64* order,
                          i64* pair, i64* index) {
  std::vector<i64> offset(B + 1);
  if (topoep_rows_bucket(target, A, B, order, offset.data())) return 1;
  i64 rows = 0, before = -1;
  for (i64 i = 0; i < A; ++i) {
    const i64 a = order[i];
    if (i == 0 || target[a] != target[before] || row[a] != row[before]) {
      if (rows == N) return 1;
      index[rows++] = row[a];
    }
    pair[i] = rows - 1;
    before = a;
  }
  return rows != N;
}

// rows [P]: tokens with at least one slot in place p, where slot s is in place s / per_place.
API int topoep_rows_count(const i64* slot, i64 T, i64 K, i64 P, i64 per_place, i64* rows) {
  std::memset(rows, 0, P * sizeof(i64));
  std::vector<i64> seen(P, -1);  // the last token counted
  for (i64 t = 0; t < T; ++t) {
    for (i64 k = 0; k < K; ++k) {
      const i64 place = slot[t * K + k] / per_place;
      if (slot[t * K + k] < 0 || place >= P) return 1;
      rows[place] += seen[place] != t;
      seen[place] = t;
    }
  }
  return 0;
}
