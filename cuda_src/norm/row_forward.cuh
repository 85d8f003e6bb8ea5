// Forward of rows that a block holds: in registers, or in shared memory while the next are on their way.
#pragma once

#include "common/tile/row_pipeline.cuh"
#include "norm/unaligned.cuh"
#include "common/reduce/row.cuh"

// The statistics of a row of vectors get(k), whose pads are 0, and where `lone` of an element `alone` more, which else is 0.
template <bool CENTRED, int K, typename T, typename Get, typename Sums, typename A = acc_t<T>>
__device__ __forceinline__ Statistics<A> statistics(const Tile<K, kVecWidth<T>, true>& tile, const Forward<T>& to,
                                                    Get get, Sums& sums, bool lone = false, A alone = A(0)) {
  constexpr int W = kVecWidth<T>;
  const A count = A(int(to.size));
  if constexpr (!CENTRED) {
    return {A(0), rstd_of<T>(sums.add(own_squares<K, W>(get) + alone * alone) / count + to.eps)};
  } else {
    const A scale = scale_for<A>(int(to.size));
    A parts[W] = {}, mean;
    if constexpr (K == 1) {  // about an element: of short rows that chance to be nearly constant the mean is then exact
      const Vector<T> x = get(0);
      const A about = __shfl_sync(kFullMask, x[0], 0, blockDim.x) * scale;
      tile.each_of(0, [&](int e) { parts[e] = fma(x[e], scale, -about); });
      if (lone) parts[0] += fma(alone, scale, -about);
      mean = mean_about(about, sums.add(tree_sum(parts)), count, scale);
    } else {
      parts[0] = alone * scale;
#pragma unroll
      for (int k = 0; k < K; ++k) {
        const Vector<T> x = get(k);
#pragma unroll
        for (int e = 0; e < W; ++e) parts[e] = fma(x[e], scale, parts[e]);
      }
      mean = sums.add(tree_sum(parts)) / (count * scale);
    }
#pragma unroll
    for (int e = 0; e < W; ++e) parts[e] = A(0);
    if (lone) parts[0] = (alone - mean) * (alone - mean);
#pragma unroll
    for (int k = 0; k < K; ++k) {
      const Vector<T> x = get(k);
      tile.each_of(k, [&](int e) {
        const A apart = x[e] - mean;
        parts[e] = fma(apart, apart, parts[e]);
      });
    }
    return {mean, rstd_of<T>(sums.add(tree_sum(parts)) / count + to.eps)};
  }
}

// As norm_rows: rows are fetched into shared memory, see PipelinedRow, with as many stages as said.
template <int TENSORS, int K, typename T, typename Sums>
__device__ __forceinline__ void norm_rows_fetched(const Forward<T>& to, int stages, Sums& sums) {
  using Row = Tile<K, kVecWidth<T>, true>;
  const auto fetched = PipelinedRow<TENSORS, K, T>::of_thread();
  const auto fetch = [&](long long row, int stage) {
    const Row tile = Row::at(row, to.rows, to.size);
    fetched.fetch(tile, to.x + row * to.size, stage, 0);
    if (TENSORS > 1) fetched.fetch(tile, to.residual + row * to.size, stage, 1);
  };
  const auto normalise = [&](long long row, int stage) {
    const Row tile = Row::at(row, to.rows, to.size);
    const long long at = row * to.size;
    if constexpr (TENSORS > 1) {
#pragma unroll
      for (int k = 0; k < K; ++k) {
        const Vector<T> sum = rounded_sum(fetched.get(stage, 0, k), fetched.get(stage, 1, k));
        store_words_of(tile, to.summed + at, k, sum.word);
        fetched.put(sum, stage, 0, k);
      }
    }
    const auto of = statistics<false>(tile, to, [&](int k) { return fetched.get(stage, 0, k); }, sums);
#pragma unroll
    for (int k = 0; k < K; ++k) store_normalised<false>(tile, to, to.y + at, 0, k, fetched.get(stage, 0, k), of);
    if (threadIdx.x == 0 && row < to.rows) to.keep(row, of);
  };
  const long long first = blockIdx.x * (long long)blockDim.y + threadIdx.y, stride = gridDim.x * (long long)blockDim.y;
  each_pipelined_row(first, threadIdx.y, stride, to.rows, stages == 2, fetch, normalise);
}

// As norm_rows: rows in registers.
template <bool CENTRED, int TENSORS, int K, bool ALIGNED, typename T, typename Sums>
__device__ __forceinline__ void norm_rows_loaded(const Forward<T>& to, Sums& sums) {
  constexpr int W = kVecWidth<T>;
  using Row = Tile<K, W, true>;
  const int own = threadIdx.x * W, step = blockDim.x * W;
  const long long pitch = (to.size + W - 1) & -W;
  const long long first = blockIdx.x * (long long)blockDim.y + threadIdx.y, stride = gridDim.x * (long long)blockDim.y;
  const T* const weight = ALIGNED ? to.weight : written_before(to.weight);
  const T* const bias = ALIGNED ? to.bias : written_before(to.bias);
  for (long long row = first; row - threadIdx.y < to.rows; row += stride) {
    const UnalignedRow<W, ALIGNED> cut(row, to.rows, to.size);
    const Row tile = Row::at(row, to.rows, cut.whole);
    const int left = tile.left - own;
    long long at = row * to.size + cut.head + own;
    fold_address(at);
    Vector<T> x[K];
    load_own<ALIGNED>(to.x + at, left, step, x);
    const long long place = row * to.size + cut.column;
    T alone = from_acc<T>(0);
    if (cut.lone) alone = to.x[place];
    if constexpr (TENSORS > 1) {
      Vector<T> residual[K];
      load_own<ALIGNED>(to.residual + at, left, step, residual);
      T* summed = to.summed + at;
      fold_address(summed);
#pragma unroll
      for (int k = 0; k < K; ++k) {
        x[k] = rounded_sum(x[k], residual[k]);
        if (k * step < left) store_words(summed + k * step, x[k]);
      }
      if (cut.lone) to.summed[place] = alone = from_acc<T>(to_acc(alone) + to_acc(to.residual[place]));
    }
    const auto get = [&](int k) {
      x[k].fold();
      return x[k];
    };
    const auto of = statistics<CENTRED>(tile, to, get, sums, cut.lone, to_acc(alone));
    T* y = to.y + at;
    fold_address(y);
    const long long shifted = cut.head * pitch + own;
    const auto parameter = [&](const T* values, int k, float otherwise) {
      return values ? load_aligned(values + shifted + k * step) : Vector<T>::filled(from_acc<T>(otherwise));
    };
#pragma unroll
    for (int k = 0; k < K; ++k) {
      if (k * step >= left) continue;
      const Vector<T> w = parameter(weight, k, 1), b = CENTRED ? parameter(bias, k, 0) : Vector<T>{};
      store_words(y + k * step, rounded<T>([&](int e) { return of.template y<CENTRED>(x[k][e], w[e], b[e]); }));
    }
    if (cut.lone) store_lone<CENTRED>(weight, bias, to.y + place, cut.column, alone, of);
    if (threadIdx.x == 0 && row < to.rows) to.keep(row, of);
  }
}

// Rows held by a block, each read once. Grid: any. Block: see rows.cuh; K vectors of each thread are a row. TENSORS are x and,
// in add_rms_norm, residual. Threads own whole vectors of y. mean and rstd are kept for backward, a number per row. ALIGNED:
// whether all rows and tensors fit; about 0, shared memory is then as PipelinedRow, with as many stages as said. Else rows go to
// registers, at least 2 W threads share one that is not of whole vectors, only what is written must begin at 16-byte
// boundaries, and the parameters are as shift_parameter() leaves them.
template <bool CENTRED, int TENSORS, int K, bool ALIGNED, typename T>
__device__ __forceinline__ void norm_rows(const Forward<T>& to, int stages) {
  using Sums = RowSums<acc_t<T>, 1, false>;
  __shared__ typename Sums::Room room;
  Sums sums(room);
  if constexpr (!CENTRED && ALIGNED) norm_rows_fetched<TENSORS, K>(to, stages, sums);
  else norm_rows_loaded<CENTRED, TENSORS, K, ALIGNED>(to, sums);
}
