// xhat = (x - mean) rstd,   mean = sum(x) / m,   rstd = 1 / sqrt(sum((x - mean)^2) / m + eps)     over the m of a channel
// y = xhat weight + bias
// running_mean += momentum (mean - running_mean),   running_var += momentum (sum((x - mean)^2) / (m - 1) - running_var)
//
// grad_x = rstd weight (grad_y - c2 - xhat c1),   c1 = sum(grad_y xhat) / m,   c2 = sum(grad_y) / m
// grad_weight = sum(grad_y xhat),   grad_bias = sum(grad_y)
//
// Not in training, mean and rstd are those of running_mean and running_var, and c1 = c2 = 0.
//
// Images (n, c, s) are read as runs.cuh has it; channels that lie side by side, (m, c), as columns.cuh has it, and so are
// small planes, (n, c s), whose columns belong to channels by the `pixels`. Where k rows of columns are whole packs together
// and one is not, they are read as one, (m / k, k c), of which k columns are of a channel. A channel, or a tile of columns,
// that the blocks of a cluster share is read once from memory, and again from shared memory or the cache. Else a first pass
// leaves the moments, or the sums, of each block's part; the second combines them, and goes from the end: what was read last
// is still in cache. Of columns, a kernel between the two combines them once for all blocks.
//
// weight, bias, running_mean and running_var are of T, or with `wide` of float beside a half type.
//
// Bytes per element: training forward 2 x sizeof(T) (3 without clusters), backward 3 x sizeof(T) (5); else forward
// 2 x sizeof(T), backward 3 x sizeof(T). About 8 flops forward, 10 backward.
//
// Reached on an H200 (GB/s of the least of these bytes, forward / backward; a copy: 4253), of images: 64x256x56x56 training
// fp32 2921 / 2989, bf16 2225 / 2776; inference fp32 4021 / 3784, bf16 3704 / 3493; 64x3x224x223 bf16 1444 / 1768; of
// columns, training bf16: 64x256x56x56 channels_last 2052 / 2183, 256x2048x7x7 1958 / 2134, 4096x1000 892 / 1268, 4096x4095
// 1552 / 1783. Lost: half types are bound by the instructions for a pack of eight; the forms without clusters read
// everything twice, of which the cache holds the end.
#include "common/batch_norm_columns.cuh"
#include "common/batch_norm_runs.cuh"

constexpr int kThreads = 256;
constexpr int kClusterThreads = 512;

// --- images: (n, c, s). WHOLE: every run of every tensor is whole packs ---

// Training: y, mean, rstd and the running statistics, which may be null. Grid: channels x runs.parts, in clusters of
// runs.parts. Block: a multiple of 32. Shared memory: for `room` packs, of 16 bytes.
template <typename T, bool WHOLE>
__global__ void __launch_bounds__(kClusterThreads, 2)
    batch_norm_fwd_cluster(const T* __restrict__ x, const void* __restrict__ weight, const void* __restrict__ bias,
                           T* __restrict__ y, acc_t<T>* __restrict__ mean, acc_t<T>* __restrict__ rstd,
                           void* running_mean, void* running_var, Runs runs, int room, int wide, acc_t<T> momentum,
                           acc_t<T> eps) {
  using A = acc_t<T>;
  extern __shared__ uint4 kept[];
  __shared__ Pair<A> shared[kWarp];
  __shared__ Moments<A> all[kMaxCluster];
  if (cluster_blocks() > 1) cluster_begin();
  const long long c = runs.segment(blockIdx.x);
  const Part<T, WHOLE> part(runs, c, runs.part(blockIdx.x), y);
  const Source<T> source{x, kept, room};
  source.fetch(part);
  wait_for_groups<0>();
  share_in_cluster(block_moments(part_moments(part, source), part.elements(), shared), all);
  auto of = merged<A>(
      int(runs.parts), [&](int i) { return all[i].count; }, [&](int i) { return Pair<A>{all[i].mean, all[i].square}; });
  of.count = A(runs.count * runs.size);
  const auto affine = Parameters<T>{weight, bias, wide}.affine(c, {of.mean, of.rstd(eps)});
  store_normalised(part, source, y, [&] { return affine; });
  if (runs.part(blockIdx.x) > 0 || threadIdx.x > 0) return;
  keep<T>(of, c, mean, rstd, running_mean, running_var, wide, momentum, eps);
}

// Three numbers of `parts`, (channels, runs.parts, 3), for each block. Grid: channels x runs.parts. Block: kThreads at
// most, a multiple of 32.
template <typename T, bool WHOLE>
__global__ void __launch_bounds__(kThreads)
    batch_norm_moments(const T* __restrict__ x, acc_t<T>* __restrict__ parts, Runs runs) {
  __shared__ Pair<acc_t<T>> shared[kWarp];
  const Part<T, WHOLE> part(runs, runs.segment(blockIdx.x), runs.part(blockIdx.x), x);
  const auto of = block_moments(part_moments(part, Source<T>{x}), part.elements(), shared);
  if (threadIdx.x == 0) store_moments(parts + 3 * (long long)blockIdx.x, of);
}

// y; in training, where there are `parts`, also mean, rstd and the running statistics, by the first block of a channel.
// Grid and block: as batch_norm_moments. weight, bias, and in training running_mean and running_var, may be null.
template <typename T, bool WHOLE>
__global__ void __launch_bounds__(kThreads)
    batch_norm_fwd(const T* __restrict__ x, const void* __restrict__ weight, const void* __restrict__ bias,
                   T* __restrict__ y, const acc_t<T>* __restrict__ parts, acc_t<T>* __restrict__ mean,
                   acc_t<T>* __restrict__ rstd, void* running_mean, void* running_var, Runs runs, int wide,
                   acc_t<T> momentum, acc_t<T> eps) {
  using A = acc_t<T>;
  __shared__ Moments<A> shared[kWarp];
  const unsigned block = gridDim.x - 1 - blockIdx.x, channels = gridDim.x / unsigned(runs.parts);
  const long long c = parts ? runs.segment(block) : block % channels;  // as they lie in memory
  const int number = parts ? runs.part(block) : int(block / channels);
  const Parameters<T> parameters{weight, bias, wide};
  Pair<A> of = {};
  if (parts) {
    Moments<A> moments = block_merge_parts(parts + 3 * c * runs.parts, int(runs.parts), shared);
    moments.count = A(runs.count * runs.size);
    of = {moments.mean, moments.rstd(eps)};
    if (number == 0 && threadIdx.x == 0) {
      keep<T>(moments, c, mean, rstd, running_mean, running_var, wide, momentum, eps);
    }
  }
  store_normalised(Part<T, WHOLE>(runs, c, number, y), Source<T>{x}, y, [&] {  // after the loads of x
    return parameters.affine(c, parts ? of : Statistics<T>{nullptr, nullptr, running_mean, running_var, wide, eps}[c]);
  });
}

// Training: grad_x, grad_weight and grad_bias, each of which may be null. Grid and block: as batch_norm_fwd_cluster, with
// room in shared memory for so many packs of either tensor.
template <typename T, bool WHOLE>
__global__ void __launch_bounds__(kClusterThreads, 2)
    batch_norm_bwd_cluster(const T* __restrict__ grad_y, const T* __restrict__ x, const void* __restrict__ weight,
                           const acc_t<T>* __restrict__ mean, const acc_t<T>* __restrict__ rstd, T* __restrict__ grad_x,
                           void* __restrict__ grad_weight, void* __restrict__ grad_bias, Runs runs, int room,
                           int wide) {
  using A = acc_t<T>;
  extern __shared__ uint4 kept[];
  __shared__ Pair<A> shared[kWarp], all[kMaxCluster];
  if (cluster_blocks() > 1) cluster_begin();
  const long long c = runs.segment(blockIdx.x);
  const Part<T, WHOLE> part(runs, c, runs.part(blockIdx.x), x);
  const A mu = mean[c], r = rstd[c];
  const Centre<T> centre(mu, r);
  const Source<T> grads{grad_y, kept, room}, inputs{x, kept + room, room};
  grads.fetch(part), inputs.fetch(part);
  wait_for_groups<0>();
  share_in_cluster(block_reduce<Sum>(part_sums(part, grads, inputs, centre.about), shared), all);
  Pair<A> sums = all[0];
  for (int i = 1; i < runs.parts; ++i) sums = sums + all[i];
  sums = centre.moved(sums), sums.second *= r;
  if (runs.part(blockIdx.x) == 0 && threadIdx.x == 0) set_gradients<T>(sums, c, grad_weight, grad_bias, wide);
  if (!grad_x) return;
  const A w = parameter<T>(weight, c, wide, A(1)), count = A(runs.count * runs.size);
  store_gradient(part, grads, inputs, grad_x, Gradient<T>::of(mu, r, w, sums, count));
}

// Two numbers of `parts`, (channels, runs.parts, 2), for each block: sum(grad_y), sum(grad_y xhat). Where the statistics
// were the running ones also grad_x. Both may be null. Grid and block: as batch_norm_moments.
template <typename T, bool WHOLE>
__global__ void __launch_bounds__(kThreads)
    batch_norm_bwd_sums(const T* __restrict__ grad_y, const T* __restrict__ x, const void* __restrict__ weight,
                        const acc_t<T>* __restrict__ mean, const acc_t<T>* __restrict__ rstd,
                        const void* __restrict__ running_mean, const void* __restrict__ running_var,
                        T* __restrict__ grad_x, acc_t<T>* __restrict__ parts, Runs runs, int wide, acc_t<T> eps) {
  using A = acc_t<T>;
  using P = Part<T, WHOLE>;
  constexpr int U = P::kAtOnce;
  __shared__ Pair<A> shared[kWarp];
  const long long c = runs.segment(blockIdx.x);
  const P part(runs, c, runs.part(blockIdx.x), x);
  const Pair<A> of = Statistics<T>{mean, rstd, running_mean, running_var, wide, eps}[c];
  const Centre<T> centre(of.first, of.second);
  const A scale = of.second * parameter<T>(weight, c, wide, A(1));
  Pair<A> sums = {};
  each_packs(
      part,
      [&](const Place(&places)[U], const Pack<T>(&packs)[2][U]) {
        add_products(sums, places, packs[0], packs[1], centre.about);
#pragma unroll
        for (int u = 0; u < U; ++u) {
          if (grad_x) part.store(grad_x, places[u], [&](int e) { return packs[0][u][e] * scale; });
        }
      },
      Source<T>{grad_y}, Source<T>{x});
  if (!parts) return;
  sums = centre.moved(block_reduce<Sum>(sums, shared));
  A* at = parts + 2 * (long long)blockIdx.x;
  if (threadIdx.x == 0) at[0] = sums.first, at[1] = sums.second * of.second;
}

// grad_x in training, of the parts that batch_norm_bwd_sums left; grad_weight and grad_bias, which may be null, by the
// first block of a channel. Grid and block: as batch_norm_moments.
template <typename T, bool WHOLE>
__global__ void __launch_bounds__(kThreads)
    batch_norm_bwd(const T* __restrict__ grad_y, const T* __restrict__ x, const void* __restrict__ weight,
                   const acc_t<T>* __restrict__ mean, const acc_t<T>* __restrict__ rstd,
                   const acc_t<T>* __restrict__ parts, T* __restrict__ grad_x, void* __restrict__ grad_weight,
                   void* __restrict__ grad_bias, Runs runs, int wide) {
  using A = acc_t<T>;
  __shared__ Pair<A> shared[kWarp];
  const unsigned block = gridDim.x - 1 - blockIdx.x;
  const long long c = runs.segment(block);
  const int number = runs.part(block);
  Pair<A> sums = {};
  for (int p = threadIdx.x; p < runs.parts; p += blockDim.x) {
    const A* at = parts + 2 * (c * runs.parts + p);
    sums = sums + Pair<A>{at[0], at[1]};
  }
  sums = block_reduce<Sum>(sums, shared);
  if (number == 0 && threadIdx.x == 0) set_gradients<T>(sums, c, grad_weight, grad_bias, wide);
  const A w = parameter<T>(weight, c, wide, A(1)), count = A(runs.count * runs.size);
  store_gradient(Part<T, WHOLE>(runs, c, number, grad_x), Source<T>{grad_y}, Source<T>{x}, grad_x,
                 Gradient<T>::of(mean[c], rstd[c], w, sums, count));
}

// --- columns: (m, c), or (n, c s). WHOLE: see columns.cuh ---

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

// grad_weight and grad_bias, of `count` parts for each of the `pixels` of a channel, and `of`, what grad_x follows from in
// training, of so many `values`. Each may be null. Part p of column i is at p step_part + i step_column. Grid and block: as
// batch_norm_columns_finish.
template <typename T>
__global__ void __launch_bounds__(kFinished* kFinishers)
    batch_norm_bwd_finish(const acc_t<T>* __restrict__ parts, const void* __restrict__ weight,
                          const acc_t<T>* __restrict__ mean, const acc_t<T>* __restrict__ rstd,
                          Gradient<T>* __restrict__ of, void* __restrict__ grad_weight, void* __restrict__ grad_bias,
                          long long channels, long long values, int pixels, int count, long long step_part,
                          long long step_column, int wide) {
  using A = acc_t<T>;
  const long long c = blockIdx.x * (long long)kFinished + threadIdx.x;
  finish_channel<Pair<A>>(
      c < channels,
      [&](int first) {
        Pair<A> own = {};
#pragma unroll 8
        for (int i = first; i < count * pixels; i += kFinishers) {
          const int part = i / pixels;
          const A* at = parts + part * step_part + (c * pixels + i - part * pixels) * step_column;
          own = own + Pair<A>{at[0], at[1]};
        }
        return own;
      },
      [](Pair<A>& own, const Pair<A>& other) { own = own + other; },
      [&](const Pair<A>& sums) {
        if (of) of[c] = Gradient<T>::of(mean[c], rstd[c], parameter<T>(weight, c, wide, A(1)), sums, A(values));
        set_gradients<T>(sums, c, grad_weight, grad_bias, wide);
      });
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
