// Backward of rows that are too long to be held: each is read twice, and once more, by columns, for the
// parameters' gradients.
#pragma once

#include "norm/backward.cuh"

// See norm_wide_bwd: one row, read twice.
template <bool CENTRED, int K, bool ALIGNED, typename T, typename Sums, typename A = acc_t<T>>
__device__ __forceinline__ void norm_wide_row_bwd(const Backward<T>& to, long long row, Sums& sums) {
  constexpr int W = kVecWidth<T>;
  using Part = Tile<K, W, ALIGNED>;
  const int parts = Part::count(to.size);
  const Statistics<A> of = to.statistics(row);
  const T zero = from_acc<T>(0);
  const auto start = [](int c) { return c * (long long)Part::capacity(); };
  Gradient<CENTRED, T> g[K];
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
  total = row_sum<CENTRED>(total, sums);
  const A slope = of.rstd * (total.first / to.size), c2 = total.second / to.size;
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

// grad_x of rows too long for registers; the parameters' gradients are norm_columns_bwd's work. Grid: any. Block: (a
// multiple of 64, 1), at most kBackwardThreads.
template <bool CENTRED, typename T> __device__ __forceinline__ void norm_wide_bwd(const Backward<T>& to) {
  using Sums = BackwardSums<CENTRED, 1, true, acc_t<T>>;
  __shared__ typename Sums::Room room;
  Sums sums(room);
  const bool aligned = to.aligned();
  for (long long row = blockIdx.x; row < to.rows; row += gridDim.x) {
    if (aligned) norm_wide_row_bwd<CENTRED, 2, true>(to, row, sums);
    else norm_wide_row_bwd<CENTRED, 1, false>(to, row, sums);
  }
}

// See norm_columns_bwd.
template <bool CENTRED, bool ALIGNED, typename T, typename A = acc_t<T>>
__device__ __forceinline__ void norm_columns_bwd_of(const Backward<T>& to, A* shared) {
  constexpr int W = kVecWidth<T>;
  using Columns = Tile<1, W, ALIGNED>;
  const Columns tile = Columns::at(0, 1, to.size, blockIdx.x);
  const long long start = blockIdx.x * (long long)Columns::capacity(), part = to.part(blockIdx.y) + start;
  const T zero = from_acc<T>(0);
  A weight_sum[1][W] = {}, bias_sum[1][W] = {};
#pragma unroll 4
  for (long long row = blockIdx.y; row < to.rows; row += gridDim.y) {
    const long long at = row * to.size + start;
    const Vector<T> x = load_per_column(tile, to.x + at, 0, zero), g = load_per_column(tile, to.grad_y + at, 0, zero);
    const Statistics<A> of = to.statistics(row);
#pragma unroll
    for (int e = 0; e < W; ++e) {
      weight_sum[0][e] += g[e] * of.template xhat<CENTRED>(x[e]);
      if (CENTRED) bias_sum[0][e] += g[e];
    }
  }
  if (to.weight_parts) store_parts(tile, weight_sum, to.weight_parts + part, shared);
  if (to.bias_parts) store_parts(tile, bias_sum, to.bias_parts + part, shared);
}

// A part of the parameters' gradients for rows too long for registers. Grid: (tiles of columns, parts). Block: (threads,
// 1); a thread owns one vector of columns, in every gridDim.y-th row. Row blockIdx.y of `weight_parts` and `bias_parts`
// (gridDim.y, pitch_of(size)) gets the sum.
template <bool CENTRED, typename T> __device__ __forceinline__ void norm_columns_bwd(const Backward<T>& to) {
  __shared__ __align__(16) acc_t<T> shared[kBackwardThreads * kVecWidth<T>];
  if (all_aligned<kVecWidth<T>>(to.size, to.grad_y, to.x)) norm_columns_bwd_of<CENTRED, true>(to, shared);
  else norm_columns_bwd_of<CENTRED, false>(to, shared);
}
