// Rows of up to 32 vectors: neighbouring lanes share a row and have a vector of it each, and each thread has several rows
// under way at once. What all rows meet, the parameters above all, is loaded once for them.
#pragma once

#include "common/tile/row_pipeline.cuh"
#include "norm/backward.cuh"
#include "norm/unaligned.cuh"

// A thread's vector of R rows. The rows of a warp, and so its vectors, follow each other in memory.
//
//     blockDim.x   lanes share a row: a power of two, up to kWarp
//     blockDim.y   rows, R times. The block is a whole number of warps.
template <int R, typename T> struct SubWarpRows {
  static constexpr int W = kVecWidth<T>;
  const int size, column, step;  // of the thread's vector; from a thread's row to its next
  const long long own;  // the thread's first row among its block's

  explicit __device__ __forceinline__ SubWarpRows(long long size)
      : size(int(size)),
        column(threadIdx.x * W),
        step(kWarp >> (31 - __clz(blockDim.x))),
        own((threadIdx.y & -step) * R + (threadIdx.y & (step - 1))) {}

  // f(row) for the first row of the thread in each R blockDim.y rows of the block; as often for all threads.
  template <typename F> __device__ __forceinline__ void each(long long rows, F f) const {
    const long long stride = gridDim.x * (long long)(R * blockDim.y);
    for (long long first = blockIdx.x * (long long)(R * blockDim.y); first < rows; first += stride) f(first + own);
  }

  __device__ __forceinline__ bool inside() const { return column < size; }

  // How many rows there are from `row` on, for those inside.
  __device__ __forceinline__ int left(long long row, long long rows) const {
    if (!inside() || row >= rows) return 0;
    return rows - row < R * kWarp ? int(rows - row) : R * kWarp;
  }

  // Where the thread's vector of `row` is; of its next row, `pitch` further.
  template <typename P> __device__ __forceinline__ P* at(P* tensor, long long row) const {
    P* first = tensor + row * size + column;
    fold_address(first);
    return first;
  }
  __device__ __forceinline__ int pitch() const { return step * size; }

  __device__ __forceinline__ void load(const T* tensor, long long row, int left, Vector<T> (&vectors)[R]) const {
    const T* first = at(tensor, row);
#pragma unroll
    for (int r = 0; r < R; ++r) {
      uint4 words = {};
      if (r * step < left) words = __ldg(reinterpret_cast<const uint4*>(first + r * pitch()));
      vectors[r] = {words.x, words.y, words.z, words.w};
    }
  }

  __device__ __forceinline__ Vector<T> parameter(const T* values, float otherwise) const {
    if (!inside()) return {};
    return values ? load_aligned(values + column) : Vector<T>::filled(from_acc<T>(otherwise));
  }
};

// sum / divisor, of half types by its reciprocal.
template <typename T, typename A = acc_t<T>> struct Divisor {
  const A divisor, reciprocal;

  explicit __device__ __forceinline__ Divisor(A divisor) : divisor(divisor), reciprocal(A(1) / divisor) {}
  __device__ __forceinline__ A of(A sum) const { return sizeof(T) == 2 ? sum * reciprocal : sum / divisor; }
};

// The statistics of R rows, whose padding is 0; for lanes that have padding alone the mean is 0 too.
template <bool CENTRED, int R, typename T, typename A = acc_t<T>>
__device__ __forceinline__ void sub_warp_statistics(const SubWarpRows<R, T>& own, A eps, const Vector<T> (&x)[R],
                                                    RowStatistics<A> (&of)[R]) {
  constexpr int W = kVecWidth<T>;
  const A count = A(own.size);
  const Divisor<T> by_size(count);
  A sums[R], means[R] = {};
  if constexpr (CENTRED) {  // about the first element: see statistics()
    const A scale = scale_for<A>(own.size), half = A(0.5) / scale;
    const Divisor<T> by_scaled(A(2) * count * scale);
    A about[R];
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const A first = __shfl_sync(kFullMask, x[r][0], 0, blockDim.x) * scale;
      about[r] = own.inside() ? first : A(0);
      A terms[W];
#pragma unroll
      for (int e = 0; e < W; ++e) terms[e] = fma(x[r][e], scale, -about[r]);
      sums[r] = tree_sum(terms);
    }
    sum_over_lanes(sums, blockDim.x);
#pragma unroll
    for (int r = 0; r < R; ++r) means[r] = own.inside() ? A(2) * (about[r] * half + by_scaled.of(sums[r])) : A(0);
  }
#pragma unroll
  for (int r = 0; r < R; ++r) {
    A terms[W];
#pragma unroll
    for (int e = 0; e < W; ++e) {
      const A apart = CENTRED ? x[r][e] - means[r] : x[r][e];
      terms[e] = apart * apart;
    }
    sums[r] = tree_sum(terms);
  }
  sum_over_lanes(sums, blockDim.x);
#pragma unroll
  for (int r = 0; r < R; ++r) of[r] = {means[r], rstd_of<T>(by_size.of(sums[r]) + eps)};
}

// Lane r of those that share rows saves what row r of R is normalised by, `mine`; where fewer lanes than R have a vector, the
// first saves all.
template <int R, typename T, typename A = acc_t<T>>
__device__ __forceinline__ void save_statistics(const SubWarpRows<R, T>& own, const Forward<T>& to, long long row,
                                                int left, const RowStatistics<A> (&of)[R],
                                                const RowStatistics<A>& mine) {
  if (own.size >= R * kVecWidth<T>) {
    const int offset = threadIdx.x * own.step;
    if (threadIdx.x < R && offset < left) to.save(row + offset, mine);
  } else if (threadIdx.x == 0) {
#pragma unroll
    for (int r = 0; r < R; ++r) {
      if (r * own.step < left) to.save(row + r * own.step, of[r]);
    }
  }
}

// Rows of forward. Grid: any. Block: see SubWarpRows, at most SUB_WARP_THREADS. All rows and tensors begin at 16-byte
// boundaries.
template <bool CENTRED, int INPUTS, typename T> __device__ __forceinline__ void norm_sub_warp(const Forward<T>& to) {
  using A = acc_t<T>;
  constexpr int R = SUB_WARP_FORWARD_ROWS;
  const SubWarpRows<R, T> own(to.size);
  const Vector<T> weight = own.parameter(to.weight, 1), bias = CENTRED ? own.parameter(to.bias, 0) : Vector<T>{};
  own.each(to.rows, [&](long long row) {
    const int left = own.left(row, to.rows);
    Vector<T> x[R];
    own.load(to.x, row, left, x);
    if constexpr (INPUTS > 1) {
      Vector<T> residual[R];
      own.load(to.residual, row, left, residual);
      T* summed = own.at(to.summed, row);
#pragma unroll
      for (int r = 0; r < R; ++r) {
        x[r] = rounded_sum(x[r], residual[r]);
        if (r * own.step < left) store_words(summed + r * own.pitch(), x[r]);
      }
    }
    RowStatistics<A> of[R], mine;
    sub_warp_statistics<CENTRED>(own, to.eps, x, of);
    T* y = own.at(to.y, row);
#pragma unroll
    for (int r = 0; r < R; ++r) {
      if (r == 0 || threadIdx.x == r) mine = of[r];
      if (r * own.step >= left) continue;
      store_words(y + r * own.pitch(),
                  rounded<T>([&](int e) { return of[r].template y<CENTRED>(x[r][e], weight[e], bias[e]); }));
    }
    save_statistics(own, to, row, left, of, mine);
  });
}

// Rows of backward, and the block's row of partials, as norm_block_bwd. Grid: as many blocks as there are rows of partials.
// Block: see SubWarpRows, at most SUB_WARP_THREADS. `shared`: W values of each thread, on a 16-byte boundary.
template <bool CENTRED, int TENSORS, typename T>
__device__ __forceinline__ void norm_sub_warp_bwd(const Backward<T>& to, acc_t<T>* shared) {
  let_next_grid_begin();
  using A = acc_t<T>;
  constexpr int R = SUB_WARP_BACKWARD_ROWS, W = kVecWidth<T>, SUMS = CENTRED ? 2 : 1;
  const SubWarpRows<R, T> own(to.size);
  const Vector<T> weight = own.parameter(to.weight, 1);
  const Divisor<T> by_size(A(own.size));
  A weight_sum[1][W] = {}, bias_sum[1][W] = {};
  own.each(to.rows, [&](long long row) {
    const int left = own.left(row, to.rows);
    Vector<T> x[R], grad_y[R], more[R];
    RowStatistics<A> of[R];
    own.load(to.x, row, left, x);
    own.load(to.grad_y, row, left, grad_y);
    if (TENSORS > 2) own.load(to.grad_summed, row, left, more);
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const long long at = row + r * own.step;
      of[r] = r * own.step < left ? RowStatistics<A>{CENTRED ? to.mean[at] : A(0), to.rstd[at]} : RowStatistics<A>{};
    }
    A sums[SUMS * R];
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const RowGradient<CENTRED, T> g{x[r], grad_y[r], weight, of[r]};
      Pair<A> c = {};
#pragma unroll
      for (int e = 0; e < W; ++e) {
        g.add_to(c, e);
        weight_sum[0][e] += g.grad_y[e] * g.xhat(e);
        if (CENTRED) bias_sum[0][e] += g.grad_y[e];
      }
      sums[SUMS * r] = c.first;
      if (CENTRED) sums[SUMS * r + 1] = c.second;
    }
    if (!to.grad_x) return;
    sum_over_lanes(sums, blockDim.x);
    T* grad_x = own.at(to.grad_x, row);
#pragma unroll
    for (int r = 0; r < R; ++r) {
      if (r * own.step >= left) continue;
      const RowGradient<CENTRED, T> g{x[r], grad_y[r], weight, of[r]};
      const A slope = of[r].rstd * by_size.of(sums[SUMS * r]), c2 = CENTRED ? by_size.of(sums[SUMS * r + 1]) : A(0);
      store_words(grad_x + r * own.pitch(), rounded<T>([&](int e) {
                    const A grad = g.grad_x(e, slope, c2);
                    return TENSORS > 2 ? grad + more[r][e] : grad;
                  }));
    }
  });
  const auto columns = Tile<1, W, true>::at(0, 1, to.size);
  const long long place = to.partial(blockIdx.x);
  if (to.weight_partials) store_partials(columns, weight_sum, to.weight_partials + place, shared);
  if (to.bias_partials) store_partials(columns, bias_sum, to.bias_partials + place, shared);
}
