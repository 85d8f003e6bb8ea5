// fp32: four rows of a group against the keys, of which a warp takes several at a time: D / 16 lanes share a row of the cache.
#pragma once

#include "common/core/vector.cuh"
#include "common/hw/cp_async.cuh"
#include "common/hw/dependent_launch.cuh"
#include "decode_attention/problem.cuh"

namespace decode {

// Adds up N values over the two lanes that differ in BIT, each of which keeps half of them: the upper one the last.
template <int BIT, int N> __device__ __forceinline__ void add_and_halve(float* x) {
  const bool is_upper = threadIdx.x & BIT;
#pragma unroll
  for (int i = 0; i < N / 2; ++i) {
    const float own = is_upper ? x[i + N / 2] : x[i], other = is_upper ? x[i] : x[i + N / 2];
    x[i] = own + __shfl_xor_sync(~0u, other, BIT);
  }
}

// What lanes have of a warp's four rows. A lane multiplies 16 columns of all rows with those of its own key; what comes of that
// is added up so that each lane has the score of one row, whose exponential it takes for all. Lanes with other keys have largest
// scores and sums of their own until the end.
template <int D> struct FourRows {
  static constexpr int kRows = 4, kColumns = 16, kLanes = D / kColumns, kAtOnce = 32 / kLanes;
  float rows[kRows][kColumns], sums[kRows * kColumns] = {}, top = -infinity<float>(), total = 0;

  static __device__ __forceinline__ int own_row() { return threadIdx.x % 2 * 2 + threadIdx.x / 2 % 2; }
  static __device__ __forceinline__ int own_key() { return threadIdx.x % 32 / kLanes; }
  // Of row `row`, what a lane with the same key has.
  static __device__ __forceinline__ float of_row(int row, float x) {
    return __shfl_sync(~0u, x, row % 2 * 2 + row / 2, kLanes);
  }
  // Where the columns 4i to 4i + 3 of this lane lie. Rows of 64 begin in the same bank: those of odd keys change places.
  static __device__ __forceinline__ int column(int i) {
    const int turn = D == 64 ? i ^ own_key() % 2 : i;
    return (turn * kLanes + threadIdx.x % kLanes) * 4;
  }

  // The sums of products of all rows with the key at `key` of shared memory: that of this lane's row.
  __device__ __forceinline__ float multiply(const float* key) const {
    float products[kRows] = {};
#pragma unroll
    for (int i = 0; i < kColumns / 4; ++i) {
      const Vec<float, 4> x = load_vec<float, 4>(key + column(i));
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int e = 0; e < 4; ++e) products[r] += rows[r][4 * i + e] * x.data[e];
      }
    }
    add_and_halve<1, 4>(products);
    add_and_halve<2, 2>(products);
#pragma unroll
    for (int apart = 4; apart < kLanes; apart *= 2) products[0] += __shfl_xor_sync(~0u, products[0], apart);
    return products[0];
  }

  // Makes scores of this lane's row exponentials, beside which all that was there shrinks.
  template <int N> __device__ __forceinline__ void weigh(float (&scores)[N]) {
    float most = top;
#pragma unroll
    for (int i = 0; i < N; ++i) most = fmaxf(most, scores[i]);
    const float factor = most == top ? 1.0f : expf(top - base_of(most));
    top = most;
    total *= factor;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      scores[i] = expf(scores[i] - base_of(most));
      total += scores[i];
    }
    if (__any_sync(~0u, factor != 1)) scale(factor);
  }

  // Adds the value at `value` of shared memory, `weight` times.
  __device__ __forceinline__ void add(float weight, const float* value) {
    float weights[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) weights[r] = of_row(r, weight);
#pragma unroll
    for (int i = 0; i < kColumns / 4; ++i) {
      const Vec<float, 4> x = load_vec<float, 4>(value + column(i));
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int e = 0; e < 4; ++e) sums[kColumns * r + 4 * i + e] += weights[r] * x.data[e];
      }
    }
  }

  // Adds up what lanes with different keys have. Of the sums a lane keeps kKept rows from `first_kept()` on; top and total are of
  // its own row still.
  static constexpr int kKept = kAtOnce == 2 ? 2 : 1;
  static __device__ __forceinline__ int first_kept() {
    return kKept == 2 ? own_key() % 2 * 2 : own_key() % 2 * 2 + own_key() / 2 % 2;
  }
  __device__ __forceinline__ void add_keys() {
    float most = top;
#pragma unroll
    for (int apart = kLanes; apart < 32; apart *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, apart));
    const float factor = expf(top - base_of(most));
    top = most;
    total *= factor;
#pragma unroll
    for (int apart = kLanes; apart < 32; apart *= 2) total += __shfl_xor_sync(~0u, total, apart);
    scale(factor);
    if constexpr (D == 64) {  // the columns of odd keys go back to their places
      const bool is_odd = own_key() % 2;
#pragma unroll
      for (int i = 0; i < kRows * kColumns; i += 8) {
#pragma unroll
        for (int e = i; e < i + 4; ++e) {
          const float first = sums[e], second = sums[e + 4];
          sums[e] = is_odd ? second : first, sums[e + 4] = is_odd ? first : second;
        }
      }
    }
    add_and_halve<kLanes, kRows * kColumns>(sums);
    if constexpr (kAtOnce > 2) add_and_halve<2 * kLanes, kRows * kColumns / 2>(sums);
    if constexpr (kAtOnce > 4) {
#pragma unroll
      for (int i = 0; i < kColumns; ++i) sums[i] += __shfl_xor_sync(~0u, sums[i], 4 * kLanes);
    }
  }

 private:
  __device__ __forceinline__ void scale(float factor) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float by = of_row(r, factor);
#pragma unroll
      for (int e = 0; e < kColumns; ++e) sums[kColumns * r + e] *= by;
    }
  }
};

// A warp asks for COUNT rows of D elements, from `first` to `last`, of which `seen` has the bit; zeros for others, and beyond
// `width`. from: the first row.
template <int D, int COUNT>
__device__ __forceinline__ void fetch_rows(unsigned panel, const float* from, long long pitch, int first, int last,
                                           unsigned seen, int width) {
  constexpr int kVectors = COUNT * D / 4;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < kVectors; i += 32) {
    const int row = (i + lane) / (D / 4), column = (i + lane) % (D / 4) * 4;
    fetch16_or_zero(panel + (i + lane) * 16, from + row * pitch + column,
                    row >= first && row < last && seen >> row & 1 && column < width);
  }
}

// A warp asks for STAGES panels of keys and as many of values ahead, of 4 KiB each, which nobody else reads.
template <typename T, int D, int WARPS, int STAGES, bool MASKED>
__device__ __forceinline__ void forward_fma(const T* q, const T* k, const T* v, const int* lengths, const int* table,
                                            const bool* mask, const Results<T>& to, float scale, float softcap,
                                            const Strides& qs, const Strides& ks, const Strides& vs, const Strides& ms,
                                            const Sizes& s) {
  using Lane = FourRows<D>;
  constexpr int kPanel = 4096, kKeys = kPanel / (D * 4), kRows = Lane::kRows, kTurns = kKeys / Lane::kAtOnce;
  extern __shared__ __align__(16) float shared[];
  const int warp = threadIdx.x / 32;
  const Work w = work_of<MASKED, kRows, WARPS>(s, lengths);
  const T *k_head = k + w.kv_head * ks.head, *v_head = v + w.kv_head * vs.head;
  const float* ring = shared + warp * STAGES * 2 * kKeys * D;
  const unsigned ring_at = static_cast<unsigned>(__cvta_generic_to_shared(ring));
  // The keys from `key` on and their values.
  const auto fetch = [&](int stage, Step of, int block) {
    const unsigned panel = ring_at + stage * 2 * kPanel;
    if (of.key < w.to) {
      const T* keys = k_head + offset_of(s, ks, w, table != nullptr, block, of.key);
      const T* values = v_head + offset_of(s, vs, w, table != nullptr, block, of.key);
      fetch_rows<D, kKeys>(panel, keys, ks.row, w.begin - of.key, w.to - of.key, of.seen, s.width);
      fetch_rows<D, kKeys>(panel + kPanel, values, vs.row, w.begin - of.key, w.to - of.key, of.seen, s.width);
    }
    end_group();
  };
  Steps<MASKED, kKeys> turns(s, w, mask, ms, kRows);
  Step steps[STAGES + 1];  // the one at hand, and those that come after it
  int blocks[STAGES];
#pragma unroll
  for (int i = 0; i < STAGES; ++i) {
    steps[i] = turns.next();
    blocks[i] = block_of(s, w, table, steps[i].key);
  }
#pragma unroll
  for (int i = 0; i < STAGES; ++i) {
    check_block(s, w, table, steps[i].key, blocks[i]);
    fetch(i, steps[i], blocks[i]);
  }
  Lane has;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int at = w.first_row + r;
    const T* from = q + w.batch * qs.batch + at / s.group * qs.row + (w.kv_head * s.group + at % s.group) * qs.head;
#pragma unroll
    for (int i = 0; i < Lane::kColumns / 4; ++i) {
      const int column = Lane::column(i);
      const bool exists = at < s.queries * s.group && column < s.width;
      const Vec<T, 4> x = exists ? load_vec<T, 4>(from + column) : Vec<T, 4>{};
#pragma unroll
      for (int e = 0; e < 4; ++e) has.rows[r][4 * i + e] = x.data[e];
    }
  }
  const Seen seen = seen_by<MASKED>(s, w, mask, ms, w.first_row + Lane::own_row());
  steps[STAGES] = turns.next();
  int stage = 0, ahead = block_of(s, w, table, steps[STAGES].key);
  while (steps[0].key < w.to) {
    const Step step = steps[0], next = steps[STAGES];
    const int block = ahead;
#pragma unroll
    for (int i = 0; i < STAGES; ++i) steps[i] = steps[i + 1];
    steps[STAGES] = turns.next();
    const float *keys = ring + stage * 2 * kKeys * D + Lane::own_key() * D, *values = keys + kKeys * D;
    float scores[kTurns];
    wait_for_groups<STAGES - 1>();
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
      const int of = i * Lane::kAtOnce + Lane::own_key(), at = step.key + of;
      const bool is_seen = at < w.to && step.seen >> of & 1 && seen.has<MASKED>(at);
      const float product = has.multiply(keys + i * Lane::kAtOnce * D);
      scores[i] = is_seen ? score_of(product, scale, softcap, Exact::kUnit) : -infinity<float>();
    }
    has.weigh(scores);
#pragma unroll
    for (int i = 0; i < kTurns; ++i) has.add(scores[i], values + i * Lane::kAtOnce * D);
    __syncwarp();  // all of the warp have read these
    check_block(s, w, table, next.key, block);
    fetch(stage, next, block);
    ahead = block_of(s, w, table, steps[STAGES].key);  // so that nobody waits for it
    stage = stage + 1 == STAGES ? 0 : stage + 1;
  }
  has.add_keys();
  let_next_grid_begin();
  wait_for_groups<0>();
  __syncthreads();  // nobody reads keys any more, in whose place sums are
  int row[kRows];
  float tops[kRows], totals[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r)
    row[r] = r, tops[r] = Lane::of_row(r, has.top), totals[r] = Lane::of_row(r, has.total);
  const auto add = [&](float* all, const float (&by)[kRows], int rows, bool first) {
    if (Lane::own_key() >= 4) return;  // others have the same
#pragma unroll
    for (int i = 0; i < Lane::kKept * 4; ++i) {
      const int r = Lane::first_kept() + i / 4;
      const float factor = r == 0 ? by[0] : r == 1 ? by[1] : r == 2 ? by[2] : by[3];
      Vec<float, 4>& to =
          *reinterpret_cast<Vec<float, 4>*>(all + r * D + (i % 4 * Lane::kLanes + threadIdx.x % Lane::kLanes) * 4);
#pragma unroll
      for (int e = 0; e < 4; ++e) to.data[e] = has.sums[4 * i + e] * factor + (first ? 0.0f : to.data[e]);
    }
  };
  Finish<Exact, kRows, D, D, WARPS> finish(shared, min(kRows, s.queries * s.group - w.first_row));
  finish.add_warps(tops, totals, row, add);
  finish.store(s, w, to, [](int column) { return column; });
}

}  // namespace decode
