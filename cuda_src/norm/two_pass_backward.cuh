// Backward of rows that neither a block nor a cluster holds, and of all rows of fp64: each is read twice for grad_x, and
// once more, by columns, for the parameters' gradients.
#pragma once

#include "norm/backward.cuh"

// See norm_two_pass_bwd: one row. Where there is no mean it is 0, and so is c2.
template <int K, bool ALIGNED, typename T, typename Adder, typename A = acc_t<T>>
__device__ __forceinline__ void norm_row_in_two_passes_bwd(const Backward<T>& to, long long row, Adder& adder) {
  constexpr int W = kVecWidth<T>;
  using Part = Tile<K, W, ALIGNED>;
  const int parts = Part::count(to.size);
  const RowStatistics<A> of = to.statistics(row);
  const T zero = from_acc<T>(0);
  const auto start = [](int c) { return c * (long long)Part::capacity(); };
  RowGradient<true, T> g[K];
  const auto load = [&](const Part& part, int c) {
    const long long at = row * to.size + start(c);
#pragma unroll
    for (int k = 0; k < K; ++k) {
      g[k] = {load_vector(part, to.x + at, k, zero), load_vector(part, to.grad_y + at, k, zero),
              load_parameter(part, to.weight ? to.weight + start(c) : nullptr, k, 1), of};
    }
  };
  Pair<A> total = {};
  for (int c = 0; c < parts; ++c) {
    load(Part::at(row, to.rows, to.size, c), c);
    Pair<A> own = {};  // added up apart: in a very long row the sum so far is large
    each_element<K, W>([&](int k, int e) { g[k].add_to(own, e); });
    total.first += own.first, total.second += own.second;
  }
  total = row_sum<true>(total, adder);
  const A slope = of.rstd * (total.first / to.size), c2 = to.mean ? total.second / to.size : A(0);
  for (int c = parts - 1; c >= 0; --c) {
    const Part part = Part::at(row, to.rows, to.size, c);
    load(part, c);
    const long long at = row * to.size + start(c);
#pragma unroll
    for (int k = 0; k < K; ++k) {
      const Vector<T> more = to.grad_summed ? load_vector(part, to.grad_summed + at, k, zero) : Vector<T>{};
      store_vector(part, to.grad_x + at, k, [&](int e) {
        const A grad = g[k].grad_x(e, slope, c2);
        return to.grad_summed ? grad + more[e] : grad;
      });
    }
  }
}

// grad_x of rows of any length; the parameters' gradients are norm_strided_bwd's work. Grid: any. Block: (a multiple of 32,
// 1).
template <typename T> __device__ __forceinline__ void norm_two_pass_bwd(const Backward<T>& to) {
  using Adder = BackwardAdder<true, 1, true, acc_t<T>>;
  __shared__ typename Adder::Buffer buffer;
  Adder adder(buffer);
  const bool aligned = to.aligned();
  for (long long row = blockIdx.x; row < to.rows; row += gridDim.x) {
    if (aligned) norm_row_in_two_passes_bwd<2, true>(to, row, adder);
    else norm_row_in_two_passes_bwd<1, false>(to, row, adder);
  }
}

// See norm_strided_bwd. Where there is no mean it is 0.
template <bool ALIGNED, typename T, typename A = acc_t<T>>
__device__ __forceinline__ void norm_columns_bwd(const Backward<T>& to, A* shared) {
  constexpr int W = kVecWidth<T>;
  using Columns = Tile<1, W, ALIGNED>;
  const Columns tile = Columns::at(0, 1, to.size, blockIdx.x);
  const long long start = blockIdx.x * (long long)Columns::capacity(), place = to.partial(blockIdx.y) + start;
  const T zero = from_acc<T>(0);
  A weight_sum[1][W] = {}, bias_sum[1][W] = {};
#pragma unroll 4
  for (long long row = blockIdx.y; row < to.rows; row += gridDim.y) {
    const long long at = row * to.size + start;
    const Vector<T> x = load_per_column(tile, to.x + at, 0, zero), g = load_per_column(tile, to.grad_y + at, 0, zero);
    const RowStatistics<A> of = to.statistics(row);
#pragma unroll
    for (int e = 0; e < W; ++e) {
      weight_sum[0][e] += g[e] * of.template xhat<true>(x[e]);
      bias_sum[0][e] += g[e];
    }
  }
  if (to.weight_partials) store_partials(tile, weight_sum, to.weight_partials + place, shared);
  if (to.bias_partials) store_partials(tile, bias_sum, to.bias_partials + place, shared);
}

// Partials of the parameters' gradients, of rows of any length. Grid: (tiles of columns, rows of partials). Block: (threads,
// 1), at most BACKWARD_THREADS; a thread owns one vector of columns, in every gridDim.y-th row, and the sums go to row
// blockIdx.y of weight_partials and bias_partials, (gridDim.y, pitch_of(size)).
template <typename T> __device__ __forceinline__ void norm_strided_bwd(const Backward<T>& to) {
  __shared__ __align__(16) acc_t<T> shared[BACKWARD_THREADS * kVecWidth<T>];
  if (all_aligned<kVecWidth<T>>(to.size, to.grad_y, to.x)) norm_columns_bwd<true>(to, shared);
  else norm_columns_bwd<false>(to, shared);
}
