// Rows of a few vectors: neighbouring lanes share a row, a vector each, and a thread has several rows under way at once. What
// all rows meet, parameters above all, is found once for them.
#pragma once

#include "common/tile/row_pipeline.cuh"
#include "norm/backward.cuh"
#include "norm/unaligned.cuh"

constexpr int kShortThreads = 256;  // of a block, at most
constexpr int kShortBlocks = 3;  // of a multiprocessor, at least
constexpr int kShortForward = 4, kShortBackward = 2;  // rows of a thread under way at once

// A thread's vector of R rows. The rows of a warp, and so its vectors, follow each other in memory.
//
//     blockDim.x   lanes share a row: a power of two, up to kWarp; R vectors or more are a row
//     blockDim.y   rows, R times. The block is a whole number of warps.
template <int R, typename T> struct ShortRows {
  static constexpr int W = kVecWidth<T>;
  const int size, column, step;  // of the thread's vector; from a thread's row to its next
  const long long own;  // the thread's first row among its block's

  explicit __device__ __forceinline__ ShortRows(long long size)
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
template <typename T, typename A = acc_t<T>> struct Share {
  const A divisor, reciprocal;

  explicit __device__ __forceinline__ Share(A divisor) : divisor(divisor), reciprocal(A(1) / divisor) {}
  __device__ __forceinline__ A of(A sum) const { return sizeof(T) == 2 ? sum * reciprocal : sum / divisor; }
};

// The statistics of R rows, whose pads are 0; for lanes that have pads alone the mean is 0 too.
template <bool CENTRED, int R, typename T, typename A = acc_t<T>>
__device__ __forceinline__ void short_statistics(const ShortRows<R, T>& own, A eps, const Vector<T> (&x)[R],
                                                 Statistics<A> (&of)[R]) {
  constexpr int W = kVecWidth<T>;
  const A count = A(own.size);
  const Share<T> share(count);
  A sums[R], means[R] = {};
  if constexpr (CENTRED) {  // about the first element: see statistics()
    const A scale = scale_for<A>(own.size), half = A(0.5) / scale;
    const Share<T> scaled(A(2) * count * scale);
    A about[R];
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const A first = __shfl_sync(kFullMask, x[r][0], 0, blockDim.x) * scale;
      about[r] = own.inside() ? first : A(0);
      A parts[W];
#pragma unroll
      for (int e = 0; e < W; ++e) parts[e] = fma(x[r][e], scale, -about[r]);
      sums[r] = tree_sum(parts);
    }
    sum_over_lanes(sums, blockDim.x);
#pragma unroll
    for (int r = 0; r < R; ++r) means[r] = own.inside() ? A(2) * (about[r] * half + scaled.of(sums[r])) : A(0);
  }
#pragma unroll
  for (int r = 0; r < R; ++r) {
    A parts[W];
#pragma unroll
    for (int e = 0; e < W; ++e) {
      const A apart = CENTRED ? x[r][e] - means[r] : x[r][e];
      parts[e] = apart * apart;
    }
    sums[r] = tree_sum(parts);
  }
  sum_over_lanes(sums, blockDim.x);
#pragma unroll
  for (int r = 0; r < R; ++r) of[r] = {means[r], rstd_of<T>(share.of(sums[r]) + eps)};
}

// Rows of forward. Grid: any. Block: see ShortRows. Rows and tensors fit; a lane keeps the statistics of a row, as norm_rows.
template <bool CENTRED, int TENSORS, typename T> __device__ __forceinline__ void norm_short(const Forward<T>& to) {
  using A = acc_t<T>;
  constexpr int R = kShortForward;
  const ShortRows<R, T> own(to.size);
  const Vector<T> weight = own.parameter(to.weight, 1), bias = CENTRED ? own.parameter(to.bias, 0) : Vector<T>{};
  own.each(to.rows, [&](long long row) {
    const int left = own.left(row, to.rows);
    Vector<T> x[R];
    own.load(to.x, row, left, x);
    if constexpr (TENSORS > 1) {
      Vector<T> residual[R];
      own.load(to.residual, row, left, residual);
      T* summed = own.at(to.summed, row);
#pragma unroll
      for (int r = 0; r < R; ++r) {
        x[r] = rounded_sum(x[r], residual[r]);
        if (r * own.step < left) store_words(summed + r * own.pitch(), x[r]);
      }
    }
    Statistics<A> of[R], mine;
    short_statistics<CENTRED>(own, to.eps, x, of);
    T* y = own.at(to.y, row);
#pragma unroll
    for (int r = 0; r < R; ++r) {
      if (r == 0 || threadIdx.x == r) mine = of[r];
      if (r * own.step >= left) continue;
      store_words(y + r * own.pitch(),
                  rounded<T>([&](int e) { return of[r].template y<CENTRED>(x[r][e], weight[e], bias[e]); }));
    }
    const int kept = threadIdx.x * own.step;
    if (threadIdx.x < R && kept < left) to.keep(row + kept, mine);
  });
}

// Rows of backward, and the block's part of the parameters' gradients, as norm_rows_bwd. Grid: as many blocks as there are
// parts. Block: see ShortRows, at most kShortThreads.
template <bool CENTRED, int TENSORS, typename T> __device__ __forceinline__ void norm_short_bwd(const Backward<T>& to) {
  let_next_grid_begin();
  using A = acc_t<T>;
  constexpr int R = kShortBackward, W = kVecWidth<T>, SUMS = CENTRED ? 2 : 1;
  __shared__ __align__(16) A shared[W * kShortThreads];
  const ShortRows<R, T> own(to.size);
  const Vector<T> weight = own.parameter(to.weight, 1);
  const Share<T> share(A(own.size));
  A weight_sum[1][W] = {}, bias_sum[1][W] = {};
  own.each(to.rows, [&](long long row) {
    const int left = own.left(row, to.rows);
    Vector<T> x[R], grad_y[R], more[R];
    Statistics<A> of[R];
    own.load(to.x, row, left, x);
    own.load(to.grad_y, row, left, grad_y);
    if (TENSORS > 2) own.load(to.grad_summed, row, left, more);
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const long long at = row + r * own.step;
      of[r] = r * own.step < left ? Statistics<A>{CENTRED ? to.mean[at] : A(0), to.rstd[at]} : Statistics<A>{};
    }
    A sums[SUMS * R];
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const Gradient<CENTRED, T> g{x[r], grad_y[r], weight, of[r]};
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
      const Gradient<CENTRED, T> g{x[r], grad_y[r], weight, of[r]};
      const A slope = of[r].rstd * share.of(sums[SUMS * r]), c2 = CENTRED ? share.of(sums[SUMS * r + 1]) : A(0);
      store_words(grad_x + r * own.pitch(), rounded<T>([&](int e) {
                    const A grad = g.grad_x(e, slope, c2);
                    return TENSORS > 2 ? grad + more[r][e] : grad;
                  }));
    }
  });
  const auto columns = Tile<1, W, true>::at(0, 1, to.size);
  const long long part = to.part(blockIdx.x);
  if (to.weight_parts) store_parts(columns, weight_sum, to.weight_parts + part, shared);
  if (to.bias_parts) store_parts(columns, bias_sum, to.bias_parts + part, shared);
}
