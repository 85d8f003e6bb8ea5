// Forward of rows that a block holds: in registers, or in shared memory while the next row is copied there.
#pragma once

#include "common/tile/row_pipeline.cuh"
#include "norm/unaligned.cuh"
#include "common/reduce/row.cuh"

// The statistics of a row of vectors get(k), whose padding is 0. Where `has_edge`, this thread has the element `edge`
// besides, which else is 0.
template <bool CENTRED, int K, typename T, typename Get, typename Adder, typename A = acc_t<T>>
__device__ __forceinline__ RowStatistics<A> statistics(const Tile<K, kVecWidth<T>, true>& tile, const Forward<T>& to,
                                                       Get get, Adder& adder, bool has_edge = false, A edge = A(0)) {
  constexpr int W = kVecWidth<T>;
  const A count = A(int(to.size));
  if constexpr (!CENTRED) {
    return {A(0), rstd_of<T>(adder.add(own_squares<K, W>(get) + edge * edge) / count + to.eps)};
  } else {
    const A scale = scale_for<A>(int(to.size));
    A sums[W] = {}, mean;
    if constexpr (K == 1) {  // about an element: the mean of a short row that is nearly constant is then exact
      const Vector<T> x = get(0);
      const A about = __shfl_sync(kFullMask, x[0], 0, blockDim.x) * scale;
      tile.each_of(0, [&](int e) { sums[e] = fma(x[e], scale, -about); });
      if (has_edge) sums[0] += fma(edge, scale, -about);
      mean = mean_about(about, adder.add(tree_sum(sums)), count, scale);
    } else {
      sums[0] = edge * scale;
#pragma unroll
      for (int k = 0; k < K; ++k) {
        const Vector<T> x = get(k);
#pragma unroll
        for (int e = 0; e < W; ++e) sums[e] = fma(x[e], scale, sums[e]);
      }
      mean = adder.add(tree_sum(sums)) / (count * scale);
    }
#pragma unroll
    for (int e = 0; e < W; ++e) sums[e] = A(0);
    if (has_edge) sums[0] = (edge - mean) * (edge - mean);
#pragma unroll
    for (int k = 0; k < K; ++k) {
      const Vector<T> x = get(k);
      tile.each_of(k, [&](int e) {
        const A apart = x[e] - mean;
        sums[e] = fma(apart, apart, sums[e]);
      });
    }
    return {mean, rstd_of<T>(adder.add(tree_sum(sums)) / count + to.eps)};
  }
}

// As norm_block: rows are copied to shared memory, see PipelinedRow, in `stages` stages.
template <int INPUTS, int K, typename T, typename Adder>
__device__ __forceinline__ void norm_block_pipelined(const Forward<T>& to, int stages, Adder& adder) {
  using Row = Tile<K, kVecWidth<T>, true>;
  const auto pipeline = PipelinedRow<INPUTS, K, T>::of_thread();
  const auto fetch = [&](long long row, int stage) {
    const Row tile = Row::at(row, to.rows, to.size);
    pipeline.fetch(tile, to.x + row * to.size, stage, 0);
    if (INPUTS > 1) pipeline.fetch(tile, to.residual + row * to.size, stage, 1);
  };
  const auto normalise = [&](long long row, int stage) {
    const Row tile = Row::at(row, to.rows, to.size);
    const long long at = row * to.size;
    if constexpr (INPUTS > 1) {
#pragma unroll
      for (int k = 0; k < K; ++k) {
        const Vector<T> sum = rounded_sum(pipeline.get(stage, 0, k), pipeline.get(stage, 1, k));
        store_words_of(tile, to.summed + at, k, sum.word);
        pipeline.put(sum, stage, 0, k);
      }
    }
    const auto of = statistics<false>(tile, to, [&](int k) { return pipeline.get(stage, 0, k); }, adder);
#pragma unroll
    for (int k = 0; k < K; ++k) store_normalised<false>(tile, to, to.y + at, 0, k, pipeline.get(stage, 0, k), of);
    if (threadIdx.x == 0 && row < to.rows) to.save(row, of);
  };
  const long long first = blockIdx.x * (long long)blockDim.y + threadIdx.y, stride = gridDim.x * (long long)blockDim.y;
  each_pipelined_row(first, threadIdx.y, stride, to.rows, stages == 2, fetch, normalise);
}

// As norm_block: rows are loaded to registers.
template <bool CENTRED, int INPUTS, int K, bool ALIGNED, typename T, typename Adder>
__device__ __forceinline__ void norm_block_registers(const Forward<T>& to, Adder& adder) {
  constexpr int W = kVecWidth<T>;
  using Row = Tile<K, W, true>;
  const int own = threadIdx.x * W, step = blockDim.x * W;
  const long long pitch = (to.size + W - 1) & -W;
  const long long first = blockIdx.x * (long long)blockDim.y + threadIdx.y, stride = gridDim.x * (long long)blockDim.y;
  const T* const weight = ALIGNED ? to.weight : written_before(to.weight);
  const T* const bias = ALIGNED ? to.bias : written_before(to.bias);
  for (long long row = first; row - threadIdx.y < to.rows; row += stride) {
    const UnalignedRow<W, ALIGNED> edges(row, to.rows, to.size);
    const Row tile = Row::at(row, to.rows, edges.whole);
    const int left = tile.left - own;
    long long at = row * to.size + edges.head + own;
    fold_address(at);
    Vector<T> x[K];
    load_own<ALIGNED>(to.x + at, left, step, x);
    const long long place = row * to.size + edges.column;
    T edge = from_acc<T>(0);
    if (edges.lone) edge = to.x[place];
    if constexpr (INPUTS > 1) {
      Vector<T> residual[K];
      load_own<ALIGNED>(to.residual + at, left, step, residual);
      T* summed = to.summed + at;
      fold_address(summed);
#pragma unroll
      for (int k = 0; k < K; ++k) {
        x[k] = rounded_sum(x[k], residual[k]);
        if (k * step < left) store_words(summed + k * step, x[k]);
      }
      if (edges.lone) to.summed[place] = edge = from_acc<T>(to_acc(edge) + to_acc(to.residual[place]));
    }
    const auto get = [&](int k) {
      x[k].fold();
      return x[k];
    };
    const auto of = statistics<CENTRED>(tile, to, get, adder, edges.lone, to_acc(edge));
    T* y = to.y + at;
    fold_address(y);
    const long long shifted = edges.head * pitch + own;
    const auto parameter = [&](const T* values, int k, float otherwise) {
      return values ? load_aligned(values + shifted + k * step) : Vector<T>::filled(from_acc<T>(otherwise));
    };
#pragma unroll
    for (int k = 0; k < K; ++k) {
      if (k * step >= left) continue;
      const Vector<T> w = parameter(weight, k, 1), b = CENTRED ? parameter(bias, k, 0) : Vector<T>{};
      store_words(y + k * step, rounded<T>([&](int e) { return of.template y<CENTRED>(x[k][e], w[e], b[e]); }));
    }
    if (edges.lone) store_edge<CENTRED>(weight, bias, to.y + place, edges.column, edge, of);
    if (threadIdx.x == 0 && row < to.rows) to.save(row, of);
  }
}

// Rows that a block holds, each read once. INPUTS: the tensors that are read, x and in add_rms_norm residual. Grid: any.
// Block: see row_tile.cuh; K vectors of each thread are a row, and threads own whole vectors of y. mean and rstd are saved
// for backward, a number for each row. ALIGNED: whether all rows and tensors begin at 16-byte boundaries. If so, and unless
// CENTRED, rows are pipelined: dynamic shared memory is then that of PipelinedRow, of `stages` stages. Else rows go to
// registers; unless ALIGNED only what is written must begin at 16-byte boundaries, at least 2 W threads share a row, and the
// parameters are as shift_parameter() leaves them.
template <bool CENTRED, int INPUTS, int K, bool ALIGNED, typename T>
__device__ __forceinline__ void norm_block(const Forward<T>& to, int stages) {
  using Adder = RowAdder<acc_t<T>, 1, false>;
  __shared__ typename Adder::Buffer buffer;
  Adder adder(buffer);
  if constexpr (!CENTRED && ALIGNED) norm_block_pipelined<INPUTS, K>(to, stages, adder);
  else norm_block_registers<CENTRED, INPUTS, K, ALIGNED>(to, adder);
}
