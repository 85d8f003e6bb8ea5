// batch_norm's kernels for channels side by side, but for what is done with y and grad_y on the way: `then` is Nothing or an
// Activated, `gate` EveryGradient or MaskedGradients (batch_norm/activated.cuh). Contracts: see batch_norm_nhwc.cu.
#pragma once

#include "batch_norm/nhwc.cuh"

template <typename T, typename Then>
__device__ __forceinline__ void nhwc_cluster_forward(const T* x, const void* weight, const void* bias, T* y,
                                                     acc_t<T>* mean, acc_t<T>* rstd, void* running_mean,
                                                     void* running_var, long long rows, long long size, int wide,
                                                     acc_t<T> momentum, acc_t<T> eps, const Then& then) {
  using A = acc_t<T>;
  constexpr int W = kVecWidth<T>;
  __shared__ Pair<A> shared[COLUMN_THREADS * W];
  __shared__ Moments<A> partials[COLUMN_THREADS], all[MAX_CLUSTER * kClusterColumns<T>];
  __shared__ ChannelAffine<T> affine[kClusterColumns<T>];
  if (gridDim.y > 1) cluster_begin();
  const ColumnTile<T, true> tile(rows, size, blockIdx.y);
  const int thread = threadIdx.y * blockDim.x + threadIdx.x, columns = blockDim.x * W;
  const long long channel = tile.start + thread;  // of the first threads, which combine what all threads have
  ChannelAffine<T> given = {};
  if (thread < tile.left) given = ChannelParameters<T>{weight, bias, wide}.affine(channel, {A(0), A(1)});
  Pair<A> own[W] = {};
  column_moments(tile, x, own);
  share_columns(tile, own, shared);
  if (gridDim.y > 1) cluster_wait();
  const int groups = COLUMN_THREADS / columns, column = thread & (columns - 1);
  Moments<A> part = {};
  if (column < tile.left) part = tile_moments(tile, shared, column, unsigned(thread) / unsigned(columns), groups);
  partials[thread] = part;
  __syncthreads();
  const auto merge = [&](const Moments<A>* from, int count) {
    from += thread;
    return merged<A>(  // in one go: a mean rounded at each step would cost a short channel its variance
        count, [&](int i) { return from[i * columns].count; },
        [&](int i) { return Pair<A>{from[i * columns].mean, from[i * columns].square}; });
  };
  if (thread < tile.left) share_tile(merge(partials, groups), all, columns, thread);
  wait_for_tile();
  Moments<A> moments = {};
  if (thread < tile.left) {
    moments = merge(all, gridDim.y);
    affine[thread] = {moments.mean, moments.rstd(eps) * given.scale, given.shift};
  }
  __syncthreads();
  ChannelAffine<T> of[W] = {};
  take_columns(tile, affine, of);
  store_normalised(tile, x, y, of, then);
  if (blockIdx.y > 0 || thread >= tile.left) return;
  save_statistics<T>(moments, channel, mean, rstd, running_mean, running_var, wide, momentum,
                     eps);  // last, since no block waits for it
}

template <typename T, bool ALIGNED, typename Then>
__device__ __forceinline__ void nhwc_forward(const T* x, const void* weight, const void* bias, T* y,
                                             const acc_t<T>* mean, const acc_t<T>* rstd, const void* running_mean,
                                             const void* running_var, long long rows, long long size,
                                             long long channels, int pixels, int wide, acc_t<T> eps, const Then& then) {
  const ChannelStatistics<T> statistics{mean, rstd, running_mean, running_var, wide, eps};
  const ChannelParameters<T> parameters{weight, bias, wide};
  const ColumnTile<T, ALIGNED> tile(rows, size, gridDim.y - 1 - blockIdx.y);
  ChannelAffine<T> of[ColumnTile<T, ALIGNED>::W] = {};
  tile.each(channels, pixels, [&](int e, long long c) { of[e] = parameters.affine(c, statistics[c]); });
  store_normalised(tile, x, y, of, then);
}

template <typename T, bool ALIGNED, typename Gate>
__device__ __forceinline__ void nhwc_backward_partials(const T* grad_y, const T* x, const acc_t<T>* mean,
                                                       const acc_t<T>* rstd, const void* running_mean,
                                                       const void* running_var, acc_t<T>* partials, long long rows,
                                                       long long size, long long channels, int pixels, int wide,
                                                       acc_t<T> eps, const Gate& gate) {
  using A = acc_t<T>;
  constexpr int W = ColumnTile<T, ALIGNED>::W;
  __shared__ Pair<A> shared[COLUMN_THREADS * W];
  const ChannelStatistics<T> statistics{mean, rstd, running_mean, running_var, wide, eps};
  const ColumnTile<T, ALIGNED> tile(rows, size, blockIdx.y);
  A about[W] = {};
  tile.each(channels, pixels, [&](int e, long long c) {
    const Pair<A> of = statistics[c];
    about[e] = SplitMean<T>(of.first, of.second).about;
  });
  Pair<A> sums[W] = {};
  column_sums(tile, grad_y, x, about, sums, gate);
  share_columns(tile, sums, shared);
  A* at = partials + 2 * (blockIdx.y * size + tile.start);
  for (int i = threadIdx.y * blockDim.x + threadIdx.x; i < tile.left; i += COLUMN_THREADS) {
    const Pair<A> of = statistics[channel_of(tile.start + i, channels, pixels)];
    const Pair<A> own = SplitMean<T>(of.first, of.second).about_mean(tile_sums(shared, W * blockDim.x, i));
    at[2 * i] = own.first, at[2 * i + 1] = own.second * of.second;
  }
}

template <typename T, bool ALIGNED, typename Gate>
__device__ __forceinline__ void nhwc_backward(const T* grad_y, const T* x, const ChannelGradient<T>* given, T* grad_x,
                                              long long rows, long long size, long long channels, int pixels,
                                              const Gate& gate) {
  const ColumnTile<T, ALIGNED> tile(rows, size, gridDim.y - 1 - blockIdx.y);
  ChannelGradient<T> of[ColumnTile<T, ALIGNED>::W] = {};
  tile.each(channels, pixels, [&](int e, long long c) { of[e] = given[c]; });
  store_gradient(tile, grad_y, x, grad_x, of, gate);
}

template <typename T, typename Gate>
__device__ __forceinline__ void nhwc_backward_inline(const T* grad_y, const T* x, const void* weight,
                                                     const acc_t<T>* mean, const acc_t<T>* rstd,
                                                     const acc_t<T>* partials, T* grad_x, void* grad_weight,
                                                     void* grad_bias, long long rows, long long size,
                                                     long long channels, int pixels, int count, int wide,
                                                     const Gate& gate) {
  using A = acc_t<T>;
  constexpr int W = kVecWidth<T>, kAll = 1 << 30;
  __shared__ ChannelGradient<T> gradient[COLUMN_THREADS * W / kWarp + 2];
  const ColumnTile<T, true> tile(rows, size, gridDim.y - 1 - blockIdx.y);
  const int thread = threadIdx.y * blockDim.x + threadIdx.x, lane = thread % kWarp;
  // where a row is several rows of channels, they are numbered on
  const int first = int(channel_of(tile.start, kAll, pixels)), last = int((tile.start + tile.left - 1) / pixels);
  const A values = A(rows * (size / channels));
#pragma unroll 1
  for (int at = first + thread / kWarp; at <= last; at += COLUMN_THREADS / kWarp) {
    const int c = at % int(channels);
    const A mu = mean[c], r = rstd[c], w = parameter<T>(weight, c, wide, A(1));
    Pair<A> sums = {};
#pragma unroll 4
    for (int i = lane; i < count * pixels; i += kWarp) {
      const int part = i / pixels;
      const A* from = partials + 2 * ((part * channels + c) * pixels + i - part * pixels);
      sums = sums + Pair<A>{from[0], from[1]};
    }
    sums = warp_reduce<Sum>(sums);
    if (lane > 0) continue;
    gradient[at - first] = ChannelGradient<T>::of(mu, r, w, sums, values);
    if (blockIdx.y == 0 && at < channels && at * (long long)pixels >= tile.start) {
      store_parameter_gradients<T>(sums, c, grad_weight, grad_bias, wide);
    }
  }
  __syncthreads();
  ChannelGradient<T> of[W] = {};
  tile.each(kAll, pixels, [&](int e, long long c) { of[e] = gradient[c - first]; });
  store_gradient(tile, grad_y, x, grad_x, of, gate);
}

template <typename T, typename Gate>
__device__ __forceinline__ void nhwc_cluster_backward(const T* grad_y, const T* x, const void* weight,
                                                      const acc_t<T>* mean, const acc_t<T>* rstd, T* grad_x,
                                                      void* grad_weight, void* grad_bias, long long rows,
                                                      long long size, int wide, const Gate& gate) {
  using A = acc_t<T>;
  constexpr int W = kVecWidth<T>;
  __shared__ Pair<A> shared[COLUMN_THREADS * W], all[MAX_CLUSTER * kClusterColumns<T>];
  __shared__ ChannelGradient<T> gradient[kClusterColumns<T>];
  if (gridDim.y > 1) cluster_begin();
  const ColumnTile<T, true> tile(rows, size, blockIdx.y);
  const int thread = threadIdx.y * blockDim.x + threadIdx.x, columns = blockDim.x * W;
  const long long channel = tile.start + thread;  // of the first threads, which combine what all threads have
  A mu = A(0), r = A(1), w = A(1), about[W] = {};
  if (thread < tile.left) mu = mean[channel], r = rstd[channel], w = parameter<T>(weight, channel, wide, A(1));
  tile.each(size, 1, [&](int e, long long c) { about[e] = SplitMean<T>(mean[c], rstd[c]).about; });
  Pair<A> own[W] = {};
  column_sums(tile, grad_y, x, about, own, gate);
  share_columns(tile, own, shared);
  if (gridDim.y > 1) cluster_wait();
  if (thread < tile.left) share_tile(tile_sums(shared, columns, thread), all, columns, thread);
  wait_for_tile();
  if (thread < tile.left) {
    Pair<A> sums = {};
    for (int i = 0; i < gridDim.y; ++i) sums = sums + all[i * columns + thread];
    sums = SplitMean<T>(mu, r).about_mean(sums), sums.second *= r;
    gradient[thread] = ChannelGradient<T>::of(mu, r, w, sums, A(rows));
    if (blockIdx.y == 0) store_parameter_gradients<T>(sums, channel, grad_weight, grad_bias, wide);
  }
  if (!grad_x) return;
  __syncthreads();
  ChannelGradient<T> of[W] = {};
  take_columns(tile, gradient, of);
  store_gradient(tile, grad_y, x, grad_x, of, gate);
}
