// batch_norm.cu's equations for channels that lie side by side, (m, c), read as columns.cuh has it, and for small planes,
// (n, c s), whose columns belong to channels by the `pixels`. Where k rows of columns are whole vectors together and one is
// not, they are read as one, (m / k, k c), of which k columns are of a channel.
//
// A tile of columns that the blocks of a cluster share is read once from memory, and again from the cache. Else a first
// pass leaves the moments, or the sums, of each part of the rows; batch_norm_columns_finish, or batch_norm_bwd_finish,
// combines them once for all blocks of the second, which goes from the end. WHOLE: see columns.cuh.
//
// Bytes, what was reached and what was lost: see batch_norm.cu.
#include "batch_norm/nhwc.cuh"

// Mean and square, (size, 2), of each part of the rows, for each column. Grid: (tiles of columns, parts). Block:
// kColumnThreads, see columns.cuh.
template <typename T, bool WHOLE>
__global__ void __launch_bounds__(kColumnThreads, (kColumnBlocks<T, WHOLE>))
    batch_norm_columns_moments(const T* __restrict__ x, acc_t<T>* __restrict__ parts, long long rows, long long size) {
  using A = acc_t<T>;
  constexpr int W = ColumnTile<T, WHOLE>::W;
  __shared__ Pair<A> shared[kColumnThreads * W];
  const ColumnTile<T, WHOLE> tile(rows, size, blockIdx.y);
  Pair<A> own[W] = {};
  column_moments(tile, x, own);
  share_columns(tile, own, shared);
  A* at = parts + 2 * (blockIdx.y * size + tile.start);
  for (int i = threadIdx.y * blockDim.x + threadIdx.x; i < tile.left; i += kColumnThreads) {
    const Moments<A> of = tile_moments(tile, shared, i);
    at[2 * i] = of.mean, at[2 * i + 1] = of.square;
  }
}

// mean, rstd and the running statistics, of the `count` parts that batch_norm_columns_moments left of rows by `folds` x
// channels x pixels. Grid: ceil(channels / kFinished). Block: (kFinished, kFinishers). running_mean and running_var may be
// null.
template <typename T>
__global__ void __launch_bounds__(kFinished* kFinishers)
    batch_norm_columns_finish(const acc_t<T>* __restrict__ parts, acc_t<T>* __restrict__ mean,
                              acc_t<T>* __restrict__ rstd, void* running_mean, void* running_var, long long rows,
                              long long channels, int pixels, int folds, int count, int wide, acc_t<T> momentum,
                              acc_t<T> eps) {
  using A = acc_t<T>;
  constexpr int kHeld = 8;  // parts under way
  const long long c = blockIdx.x * (long long)kFinished + threadIdx.x;
  const int all = count * folds * pixels;
  finish_channel<Moments<A>>(
      c < channels,
      [&](int first) {
        Moments<A> own = {};
        for (int i = first; i < all; i += kHeld * kFinishers) {
          Pair<A> held[kHeld];
          A counts[kHeld];
#pragma unroll
          for (int k = 0; k < kHeld; ++k) {
            const int at = i + k * kFinishers, part = at / pixels;
            counts[k] = at < all ? A(rows_of(rows, count, part / folds)) : A(0), held[k] = {};
            if (at >= all) continue;
            const A* from = parts + 2 * ((part * channels + c) * pixels + (at - part * pixels));
            held[k] = {from[0], from[1]};
          }
          own.merge(merged<A>(kHeld, [&](int k) { return counts[k]; }, [&](int k) { return held[k]; }));
        }
        return own;
      },
      [](Moments<A>& own, const Moments<A>& other) { own.merge(other); },
      [&](const Moments<A>& of) { keep<T>(of, c, mean, rstd, running_mean, running_var, wide, momentum, eps); });
}

// y. mean and rstd, or running_mean and running_var; the others are null. Grid and block: as batch_norm_columns_moments.
template <typename T, bool WHOLE>
__global__ void __launch_bounds__(kColumnThreads, (kColumnBlocks<T, WHOLE>))
    batch_norm_columns_fwd(const T* __restrict__ x, const void* __restrict__ weight, const void* __restrict__ bias,
                           T* __restrict__ y, const acc_t<T>* __restrict__ mean, const acc_t<T>* __restrict__ rstd,
                           const void* __restrict__ running_mean, const void* __restrict__ running_var, long long rows,
                           long long size, long long channels, int pixels, int wide, acc_t<T> eps) {
  const Statistics<T> statistics{mean, rstd, running_mean, running_var, wide, eps};
  const Parameters<T> parameters{weight, bias, wide};
  const ColumnTile<T, WHOLE> tile(rows, size, gridDim.y - 1 - blockIdx.y);
  Affine<T> of[ColumnTile<T, WHOLE>::W] = {};
  tile.each(channels, pixels, [&](int e, long long c) { of[e] = parameters.affine(c, statistics[c]); });
  store_normalised(tile, x, y, of);
}

// Training: y, mean, rstd and the running statistics, which may be null. Grid: (tiles of columns, a cluster). Block:
// kColumnThreads, at most kClusterColumns<T> along the columns, a power of two.
template <typename T, bool WHOLE>
__global__ void __launch_bounds__(kColumnThreads, (kColumnBlocks<T, WHOLE>))
    batch_norm_columns_fwd_cluster(const T* __restrict__ x, const void* __restrict__ weight,
                                   const void* __restrict__ bias, T* __restrict__ y, acc_t<T>* __restrict__ mean,
                                   acc_t<T>* __restrict__ rstd, void* running_mean, void* running_var, long long rows,
                                   long long size, int wide, acc_t<T> momentum, acc_t<T> eps) {
  using A = acc_t<T>;
  constexpr int W = ColumnTile<T, WHOLE>::W;
  __shared__ Pair<A> shared[kColumnThreads * W];
  __shared__ Moments<A> parts[kColumnThreads], all[kMaxCluster * kClusterColumns<T>];
  __shared__ Affine<T> affine[kClusterColumns<T>];
  if (gridDim.y > 1) cluster_begin();
  const ColumnTile<T, WHOLE> tile(rows, size, blockIdx.y);
  const int thread = threadIdx.y * blockDim.x + threadIdx.x, columns = blockDim.x * W;
  const long long channel = tile.start + thread;  // of the first threads, which combine what all have
  Affine<T> given = {};
  if (thread < tile.left) given = Parameters<T>{weight, bias, wide}.affine(channel, {A(0), A(1)});
  Pair<A> own[W] = {};
  column_moments(tile, x, own);
  share_columns(tile, own, shared);
  if (gridDim.y > 1) cluster_wait();
  const int groups = kColumnThreads / columns, column = thread & (columns - 1);
  Moments<A> part = {};
  if (column < tile.left) part = tile_moments(tile, shared, column, unsigned(thread) / unsigned(columns), groups);
  parts[thread] = part;
  __syncthreads();
  const auto merge = [&](const Moments<A>* from, int count) {
    from += thread;
    return merged<A>(  // in one go: a mean rounded at each step would cost a short channel its variance
        count, [&](int i) { return from[i * columns].count; },
        [&](int i) { return Pair<A>{from[i * columns].mean, from[i * columns].square}; });
  };
  if (thread < tile.left) share_tile(merge(parts, groups), all, columns, thread);
  meet_tile();
  Moments<A> moments = {};
  if (thread < tile.left) {
    moments = merge(all, gridDim.y);
    affine[thread] = {moments.mean, moments.rstd(eps) * given.scale, given.shift};
  }
  __syncthreads();
  Affine<T> of[W] = {};
  take_columns(tile, affine, of);
  store_normalised(tile, x, y, of);
  if (blockIdx.y > 0 || thread >= tile.left) return;
  keep<T>(moments, channel, mean, rstd, running_mean, running_var, wide, momentum, eps);  // last: no block waits for it
}

// Sums, (size, 2), of each part of the rows, for each column: as batch_norm_bwd_sums, but grad_x, which may be null, only
// where the statistics were not of TRAINING. Grid and block: as batch_norm_columns_moments.
template <typename T, bool WHOLE, bool TRAINING>
__global__ void __launch_bounds__(kColumnThreads, (kColumnBlocks<T, WHOLE> - !TRAINING))
    batch_norm_columns_bwd_sums(const T* __restrict__ grad_y, const T* __restrict__ x, const void* __restrict__ weight,
                                const acc_t<T>* __restrict__ mean, const acc_t<T>* __restrict__ rstd,
                                const void* __restrict__ running_mean, const void* __restrict__ running_var,
                                T* __restrict__ grad_x, acc_t<T>* __restrict__ parts, long long rows, long long size,
                                long long channels, int pixels, int wide, acc_t<T> eps) {
  using A = acc_t<T>;
  constexpr int W = ColumnTile<T, WHOLE>::W;
  __shared__ Pair<A> shared[kColumnThreads * W];
  const Statistics<T> statistics{mean, rstd, running_mean, running_var, wide, eps};
  const ColumnTile<T, WHOLE> tile(rows, size, blockIdx.y);
  A about[W] = {}, scale[W] = {};
  tile.each(channels, pixels, [&](int e, long long c) {
    const Pair<A> of = statistics[c];
    about[e] = Centre<T>(of.first, of.second).about;
    if (!TRAINING) scale[e] = of.second * parameter<T>(weight, c, wide, A(1));
  });
  Pair<A> sums[W] = {};
  column_sums(tile, grad_y, x, about, sums, [&](long long at, int there, const Pieces<T, WHOLE, 2>& pieces) {
    if (TRAINING || !grad_x) return;
    store_rows(tile, grad_x, at, there, pieces, [&](int u, int e) { return pieces.of[0][u][e] * scale[e]; });
  });
  if (!parts) return;
  share_columns(tile, sums, shared);
  A* at = parts + 2 * (blockIdx.y * size + tile.start);
  for (int i = threadIdx.y * blockDim.x + threadIdx.x; i < tile.left; i += kColumnThreads) {
    const Pair<A> of = statistics[channel_of(tile.start + i, channels, pixels)];
    const Pair<A> own = Centre<T>(of.first, of.second).moved(tile_sums(shared, W * blockDim.x, i));
    at[2 * i] = own.first, at[2 * i + 1] = own.second * of.second;
  }
}

// grad_x in training; `given` as batch_norm_bwd_finish left it. Grid and block: as batch_norm_columns_bwd_sums.
template <typename T, bool WHOLE>
__global__ void __launch_bounds__(kColumnThreads, (kColumnBlocks<T, WHOLE>))
    batch_norm_columns_bwd(const T* __restrict__ grad_y, const T* __restrict__ x, const Gradient<T>* __restrict__ given,
                           T* __restrict__ grad_x, long long rows, long long size, long long channels, int pixels) {
  const ColumnTile<T, WHOLE> tile(rows, size, gridDim.y - 1 - blockIdx.y);
  Gradient<T> of[ColumnTile<T, WHOLE>::W] = {};
  tile.each(channels, pixels, [&](int e, long long c) { of[e] = given[c]; });
  store_gradient(tile, grad_y, x, grad_x, of);
}

// grad_x in training, of planes of kWarp pixels or more that batch_norm_columns_bwd_sums left `count` parts of: a warp for
// each channel of the tile combines them, which spares a launch of batch_norm_bwd_finish where they are few. grad_weight and
// grad_bias, which may be null, by the block with a channel's first column. Grid and block: as batch_norm_columns_bwd_sums.
template <typename T, bool WHOLE>
__global__ void __launch_bounds__(kColumnThreads, (kColumnBlocks<T, WHOLE>))
    batch_norm_columns_bwd_few(const T* __restrict__ grad_y, const T* __restrict__ x, const void* __restrict__ weight,
                               const acc_t<T>* __restrict__ mean, const acc_t<T>* __restrict__ rstd,
                               const acc_t<T>* __restrict__ parts, T* __restrict__ grad_x,
                               void* __restrict__ grad_weight, void* __restrict__ grad_bias, long long rows,
                               long long size, long long channels, int pixels, int count, int wide) {
  using A = acc_t<T>;
  constexpr int W = ColumnTile<T, WHOLE>::W, kAll = 1 << 30;
  __shared__ Gradient<T> gradient[kColumnThreads * W / kWarp + 2];
  const ColumnTile<T, WHOLE> tile(rows, size, gridDim.y - 1 - blockIdx.y);
  const int thread = threadIdx.y * blockDim.x + threadIdx.x, lane = thread % kWarp;
  // counted on where a row is several rows of channels
  const int first = int(channel_of(tile.start, kAll, pixels)), last = int((tile.start + tile.left - 1) / pixels);
  const A values = A(rows * (size / channels));
#pragma unroll 1
  for (int at = first + thread / kWarp; at <= last; at += kColumnThreads / kWarp) {
    const int c = at % int(channels);
    const A mu = mean[c], r = rstd[c], w = parameter<T>(weight, c, wide, A(1));
    Pair<A> sums = {};
#pragma unroll 4
    for (int i = lane; i < count * pixels; i += kWarp) {
      const int part = i / pixels;
      const A* from = parts + 2 * ((part * channels + c) * pixels + i - part * pixels);
      sums = sums + Pair<A>{from[0], from[1]};
    }
    sums = warp_reduce<Sum>(sums);
    if (lane > 0) continue;
    gradient[at - first] = Gradient<T>::of(mu, r, w, sums, values);
    if (blockIdx.y == 0 && at < channels && at * (long long)pixels >= tile.start) {
      set_gradients<T>(sums, c, grad_weight, grad_bias, wide);
    }
  }
  __syncthreads();
  Gradient<T> of[W] = {};
  tile.each(kAll, pixels, [&](int e, long long c) { of[e] = gradient[c - first]; });
  store_gradient(tile, grad_y, x, grad_x, of);
}

// Training: grad_x, grad_weight and grad_bias, each of which may be null. Grid and block: as
// batch_norm_columns_fwd_cluster.
template <typename T, bool WHOLE>
__global__ void __launch_bounds__(kColumnThreads, (kColumnBlocks<T, WHOLE>))
    batch_norm_columns_bwd_cluster(const T* __restrict__ grad_y, const T* __restrict__ x,
                                   const void* __restrict__ weight, const acc_t<T>* __restrict__ mean,
                                   const acc_t<T>* __restrict__ rstd, T* __restrict__ grad_x,
                                   void* __restrict__ grad_weight, void* __restrict__ grad_bias, long long rows,
                                   long long size, int wide) {
  using A = acc_t<T>;
  constexpr int W = ColumnTile<T, WHOLE>::W;
  __shared__ Pair<A> shared[kColumnThreads * W], all[kMaxCluster * kClusterColumns<T>];
  __shared__ Gradient<T> gradient[kClusterColumns<T>];
  if (gridDim.y > 1) cluster_begin();
  const ColumnTile<T, WHOLE> tile(rows, size, blockIdx.y);
  const int thread = threadIdx.y * blockDim.x + threadIdx.x, columns = blockDim.x * W;
  const long long channel = tile.start + thread;  // of the first threads, which combine what all have
  A mu = A(0), r = A(1), w = A(1), about[W] = {};
  if (thread < tile.left) mu = mean[channel], r = rstd[channel], w = parameter<T>(weight, channel, wide, A(1));
  tile.each(size, 1, [&](int e, long long c) { about[e] = Centre<T>(mean[c], rstd[c]).about; });
  Pair<A> own[W] = {};
  column_sums(tile, grad_y, x, about, own, [](long long, int, const Pieces<T, WHOLE, 2>&) {});
  share_columns(tile, own, shared);
  if (gridDim.y > 1) cluster_wait();
  if (thread < tile.left) share_tile(tile_sums(shared, columns, thread), all, columns, thread);
  meet_tile();
  if (thread < tile.left) {
    Pair<A> sums = {};
    for (int i = 0; i < gridDim.y; ++i) sums = sums + all[i * columns + thread];
    sums = Centre<T>(mu, r).moved(sums), sums.second *= r;
    gradient[thread] = Gradient<T>::of(mu, r, w, sums, A(rows));
    if (blockIdx.y == 0) set_gradients<T>(sums, channel, grad_weight, grad_bias, wide);
  }
  if (!grad_x) return;
  __syncthreads();
  Gradient<T> of[W] = {};
  take_columns(tile, gradient, of);
  store_gradient(tile, grad_y, x, grad_x, of);
}
