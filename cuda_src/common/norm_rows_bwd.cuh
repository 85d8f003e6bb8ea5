// Backward of rows that a block or a cluster holds in shared memory, the next on their way: all gradients in one pass.
#pragma once

#include "common/fetched.cuh"
#include "common/norm_bwd.cuh"

// Threads that hold rows, of a block at most, and of a multiprocessor: so many as leave each registers for its sums of the
// parameters' gradients. Rows off 16-byte boundaries take longer on their way: more threads, of fewer registers, which is
// enough but for two sums for each column of a half type.
template <bool CENTRED, bool VECTORS, typename T>
constexpr int kRowsThreads = VECTORS || (CENTRED && sizeof(T) == 2) ? kBackwardThreads : 640;

// Which of this thread's K packs are of a row, the same in all rows that begin alike within a pack: pack k where k < count,
// and wholly, each one access, where from <= k < whole. Nothing of this is found, nor to be asked, where VECTORS.
template <int K, int W> struct OwnPacks {
  int from = 0, whole = 0, count = 0;

  template <bool VECTORS> __device__ __forceinline__ OwnPacks(const Tile<K, W, VECTORS>& tile, bool aligned) {
    if constexpr (!VECTORS) {
      from = tile.index(0, 0) < tile.begin;
#pragma unroll
      for (int k = 0; k < K; ++k) {
        const int i = tile.index(k, 0);
        count += tile.any(i);
        whole += aligned && i + W <= tile.left;
      }
      asm volatile("" : "+r"(from), "+r"(whole), "+r"(count));  // else they are found anew for each row
    }
  }

  __device__ __forceinline__ bool any(int k) const { return k < count; }
  __device__ __forceinline__ bool is_whole(int k) const { return k >= from && k < whole; }
  __device__ __forceinline__ bool all_whole() const { return from == 0 && whole == count; }

  // f(k) for each that is there and not whole: those at the ends of the row, or all where it is not aligned.
  template <typename F> __device__ __forceinline__ void each_other(bool aligned, F f) const {
    if (all_whole()) return;
    const int step = aligned && count > 1 ? count - 1 : 1;
#pragma unroll 1
    for (int k = 0; k < count; k += step) {
      if (!is_whole(k)) f(k);
    }
  }
};

// All gradients in one pass. Grid: one wave of blocks that stride over the rows; a multiple of W where not VECTORS. Block:
// see rows.cuh, at most kRowsThreads; K packs in each thread hold a row, or with K > 1 in each thread of a cluster.
// Shared memory: see Fetched, with as many stages as said, and 16 K bytes for each thread for the weight. With PARAMETERS,
// each thread adds its columns' part of grad_weight and grad_bias, in acc_t<T>, over all rows of the block, and its row of
// `weight_parts` and `bias_parts` (blocks or clusters, pitch_of(size)) gets the block's sum. VECTORS: as norm_rows. LATE,
// of two stages alone: statistics of the next row are asked for once this row is there, which of wide rows takes less time.
template <bool CENTRED, bool PARAMETERS, int TENSORS, int K, bool VECTORS, bool LATE, typename T, typename A = acc_t<T>>
__device__ __forceinline__ void norm_rows_bwd(const Backward<T>& to, int stages) {
  let_next_grid_begin();
  using Sums = BackwardSums<CENTRED, K, VECTORS, A>;
  __shared__ typename Sums::Room room;
  Sums sums(room);
  const bool two = stages == 2;
  constexpr int W = kVecWidth<T>;
  using Row = Tile<K, W, VECTORS>;
  const int period = VECTORS ? 1 : W;  // rows so far apart begin alike within a pack
  const long long group = sums.group(), stride = sums.groups() * blockDim.y, own = threadIdx.y * (long long)period;
  const long long first = group / period * blockDim.y * period + group % period + own;
  const int part = sums.part();

  const auto fetched = Fetched<TENSORS, K, T, !VECTORS>::of_thread(stages * TENSORS + 1);
  const int weights = two ? 2 : 1;  // the place of the weight, behind the stages
  const Row columns = Row::at(first, first + 1, to.size, part);
  const long long start = part * (long long)Row::capacity();
  const T* weight = to.weight ? to.weight + start : nullptr;
  if (VECTORS && weight) {
    fetched.fetch(columns, weight, weights, 0);
    end_group();
  } else {
#pragma unroll 1
    for (int k = 0; k < K; ++k) fetched.put(load_parameter(columns, weight, k, 1), weights, 0, k);
  }
  const bool aligned =
      is_aligned16(to.x) && is_aligned16(to.grad_y) && is_aligned16(to.grad_summed) && is_aligned16(to.grad_x);
  const OwnPacks<K, W> packs(columns, aligned);
  Statistics<A> of = {}, coming_of = {};
  if constexpr (LATE) coming_of = to.statistics(first);
  const auto ask_for = [&](long long row) { of = coming_of, coming_of = to.statistics(row); };
  const auto fetch = [&](long long row, int stage) {
    if constexpr (!LATE) ask_for(row);
    if constexpr (!VECTORS) {
      const long long from = row * to.size + start;
      if (aligned && row + 1 < to.rows) {  // a pack at an end has neighbours of other rows
        const int i = columns.index(0, 0);
        fetched.fetch_first(packs.count, to.x + from + i, stage, 0);
        fetched.fetch_first(packs.count, to.grad_y + from + i, stage, 1);
        if (TENSORS > 2) fetched.fetch_first(packs.count, to.grad_summed + from + i, stage, 2);
        return;
      }
    }
    const Row tile = Row::at(row, to.rows, to.size, part);
    const long long at = row * to.size + start;
    fetched.fetch(tile, to.x + at, stage, 0);
    fetched.fetch(tile, to.grad_y + at, stage, 1);
    if (TENSORS > 2) fetched.fetch(tile, to.grad_summed + at, stage, 2);
  };

  const A count = A(int(to.size)), share = A(1) / count;
  const auto mean_of = [&](A sum) { return sizeof(T) == 2 ? sum * share : sum / count; };
  A weight_sum[K][W] = {}, bias_sum[K][W] = {};
  const auto differentiate = [&](long long row, int stage) {
    const Row tile = Row::at(row, to.rows, to.size, part);
    if constexpr (LATE) ask_for(row + stride);
    else if (!two) of = to.statistics(row);
    if constexpr (!VECTORS) packs.each_other(aligned, [&](int k) { fetched.settle_pack(columns, stage, k); });
    const auto pack = [&](int k) {
      return Gradient<CENTRED, T>{fetched.get(stage, 0, k), fetched.get(stage, 1, k), fetched.get(weights, 0, k), of};
    };
    Pair<A> c = {};
#pragma unroll
    for (int k = 0; k < K; ++k) {
      if (!VECTORS && !packs.any(k)) continue;
      const Gradient<CENTRED, T> g = pack(k);
#pragma unroll
      for (int e = 0; e < W; ++e) {
        g.add_to(c, e);
        if (PARAMETERS) weight_sum[k][e] += g.grad_y[e] * g.xhat(e);
        if (PARAMETERS && CENTRED) bias_sum[k][e] += g.grad_y[e];
      }
    }
    if (!to.grad_x) return;
    c = row_sum<CENTRED>(c, sums);
    if (!VECTORS && row >= to.rows) return;
    const A slope = of.rstd * mean_of(c.first), c2 = mean_of(c.second);
    T* grad_x = to.grad_x + row * to.size + start;
    const auto gradient = [&](int k) {
      const Gradient<CENTRED, T> g = pack(k);
      const Pack<T> more = TENSORS > 2 ? fetched.get(stage, 2, k) : Pack<T>{};
      return [=](int e) {
        const A grad = g.grad_x(e, slope, c2);
        return TENSORS > 2 ? grad + more[e] : grad;
      };
    };
    if constexpr (VECTORS) {
#pragma unroll
      for (int k = 0; k < K; ++k) store_pack(tile, grad_x, k, gradient(k));
    } else {
#pragma unroll
      for (int k = 0; k < K; ++k) {
        if (!packs.any(k)) continue;
        Pack<T> result;
        round_to_words<T>(result.word, 0, gradient(k));
        if (packs.is_whole(k)) {
          store_words(grad_x + columns.index(k, 0), result.word[0], result.word[1], result.word[2], result.word[3]);
        } else {
          fetched.put(result, stage, 0, k);
        }
      }
      packs.each_other(aligned, [&](int k) { fetched.store_pack(columns, grad_x, stage, 0, k); });
    }
  };
  each_fetched(first, own, stride, to.rows, two, fetch, differentiate);
  if (!PARAMETERS) return;
  A* shared = reinterpret_cast<A*>(fetched.room());
  const long long at = to.part(group) + start;
  if (to.weight_parts) store_parts(columns, weight_sum, to.weight_parts + at, shared);
  if (to.bias_parts) store_parts(columns, bias_sum, to.bias_parts + at, shared);
}
