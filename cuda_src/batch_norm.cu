// xhat = (x - mean) rstd,   mean = sum(x) / m,   rstd = 1 / sqrt(sum((x - mean)^2) / m + eps)     over the m of a channel
// y = xhat weight + bias
// running_mean += momentum (mean - running_mean),   running_var += momentum (sum((x - mean)^2) / (m - 1) - running_var)
//
// grad_x = rstd weight (grad_y - c2 - xhat c1),   c1 = sum(grad_y xhat) / m,   c2 = sum(grad_y) / m
// grad_weight = sum(grad_y xhat),   grad_bias = sum(grad_y)
//
// Not in training, mean and rstd are those of running_mean and running_var, and c1 = c2 = 0.
//
// Images (n, c, s) are read as runs.cuh has it, blocks sharing a channel; channels that lie side by side, (m, c), as
// columns.cuh has it. A first pass leaves the moments, or the sums, of each block's part; the second combines them, and
// goes from the end: what was read last is still in cache. weight, bias, running_mean and running_var are of T, or with
// `wide` of float beside a half type.
//
// Bytes per element: training forward 3 x sizeof(T) (2 where the tensor stays in the cache), backward 5 x sizeof(T) (3);
// else forward 2 x sizeof(T), backward 3 x sizeof(T). About 8 flops forward, 10 backward.
//
// Reached on an H200 (GB/s of two and three passes over x, forward / backward; a copy: 4251): 64x256x56x56 training
// fp32 2257 / 2348, 64x256x56x56 training bf16 1678 / 2210, 64x256x56x56 inference fp32 3595 / 2853, 64x256x56x56
// inference bf16 3383 / 2896, 64x256x56x56 training channels_last fp16 853 / 1262. Lost: the second pass over x, of
// which little is still in L2; channels_last and (n, c), whose loads are too few under way.
#include "common/columns.cuh"
#include "common/runs.cuh"

constexpr int kThreads = 256;
constexpr int kFinishers = 8;  // threads that share the parts of a channel

// Element c of a parameter, or what stands for one that is not there.
template <typename T>
__device__ __forceinline__ acc_t<T> parameter(const void* values, long long c, int wide, acc_t<T> otherwise) {
  if (!values) return otherwise;
  return wide ? acc_t<T>(static_cast<const float*>(values)[c]) : to_acc(static_cast<const T*>(values)[c]);
}

template <typename T> __device__ __forceinline__ void set(void* values, long long c, int wide, acc_t<T> value) {
  if (wide) static_cast<float*>(values)[c] = float(value);
  else static_cast<T*>(values)[c] = from_acc<T>(value);
}

// Mean and rstd of a channel, as kept (training), or of the running statistics.
template <typename T> struct Statistics {
  const acc_t<T>*mean, *rstd;
  const void *running_mean, *running_var;
  int wide;
  acc_t<T> eps;

  __device__ __forceinline__ Pair<acc_t<T>> operator[](long long c) const {
    using A = acc_t<T>;
    if (mean) return {mean[c], rstd[c]};
    return {parameter<T>(running_mean, c, wide, A(0)), inverse_sqrt(parameter<T>(running_var, c, wide, A(1)) + eps)};
  }
};

// The running statistics a step on, and what is kept for backward.
template <typename T>
__device__ __forceinline__ void keep(const Moments<acc_t<T>>& of, long long c, acc_t<T>* mean, acc_t<T>* rstd,
                                     void* running_mean, void* running_var, int wide, acc_t<T> momentum, acc_t<T> eps) {
  using A = acc_t<T>;
  mean[c] = of.mean, rstd[c] = of.rstd(eps);
  const auto step = [&](void* values, A value) {
    if (values) set<T>(values, c, wide, (A(1) - momentum) * parameter<T>(values, c, wide, A(0)) + momentum * value);
  };
  step(running_mean, of.mean);
  step(running_var, of.square / (of.count - A(1)));
}

// --- images: (n, c, s) ---

// Three numbers of `parts`, (channels, runs.parts, 3), for each block. Grid: channels x runs.parts. Block: kThreads at
// most, a multiple of 32.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    batch_norm_moments(const T* __restrict__ x, acc_t<T>* __restrict__ parts, Runs runs) {
  __shared__ Moments<acc_t<T>> shared[kWarp];
  const long long channel = blockIdx.x / runs.parts;
  const Part<T> part(runs, channel, int(blockIdx.x % runs.parts), x);
  const auto of = block_merge(part_moments<4>(part, x), shared);
  if (threadIdx.x == 0) store_moments(parts + 3 * (long long)blockIdx.x, of);
}

// y; in training, where there are `parts`, also mean, rstd and the running statistics, by the first block of a channel.
// Grid and block: as batch_norm_moments. weight, bias, and in training running_mean and running_var, may be null.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    batch_norm_fwd(const T* __restrict__ x, const void* __restrict__ weight, const void* __restrict__ bias,
                   T* __restrict__ y, const acc_t<T>* __restrict__ parts, acc_t<T>* __restrict__ mean,
                   acc_t<T>* __restrict__ rstd, void* running_mean, void* running_var, Runs runs, int wide,
                   acc_t<T> momentum, acc_t<T> eps) {
  using A = acc_t<T>;
  __shared__ Moments<A> shared[kWarp];
  const long long block = gridDim.x - 1 - (long long)blockIdx.x, c = block / runs.parts;
  const int number = int(block % runs.parts);
  Pair<A> of;
  if (parts) {
    const Moments<A> moments = block_merge_parts(parts + 3 * c * runs.parts, int(runs.parts), shared);
    of = {moments.mean, moments.rstd(eps)};
    if (number == 0 && threadIdx.x == 0) {
      keep<T>(moments, c, mean, rstd, running_mean, running_var, wide, momentum, eps);
    }
  } else {
    of = Statistics<T>{nullptr, nullptr, running_mean, running_var, wide, eps}[c];
  }
  const A scale = of.second * parameter<T>(weight, c, wide, A(1)), shift = parameter<T>(bias, c, wide, A(0));
  each_packs<4>(
      Part<T>(runs, c, number, y),
      [&](const Place(&places)[4], const Pack<T>(&packs)[1][4]) {
#pragma unroll
        for (int u = 0; u < 4; ++u) {
          store_place(y, places[u], [&](int e) { return (packs[0][u][e] - of.first) * scale + shift; });
        }
      },
      x);
}

// Two numbers of `parts`, (channels, runs.parts, 2), for each block: sum(grad_y), sum(grad_y xhat). Where the statistics
// were the running ones also grad_x, which may be null. Grid and block: as batch_norm_moments.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    batch_norm_bwd_sums(const T* __restrict__ grad_y, const T* __restrict__ x, const void* __restrict__ weight,
                        const acc_t<T>* __restrict__ mean, const acc_t<T>* __restrict__ rstd,
                        const void* __restrict__ running_mean, const void* __restrict__ running_var,
                        T* __restrict__ grad_x, acc_t<T>* __restrict__ parts, Runs runs, int wide, acc_t<T> eps) {
  using A = acc_t<T>;
  __shared__ Pair<A> shared[kWarp];
  const long long c = blockIdx.x / runs.parts;
  const int number = int(blockIdx.x % runs.parts);
  const Pair<A> of = Statistics<T>{mean, rstd, running_mean, running_var, wide, eps}[c];
  if (parts) {
    const Pair<A> sums = block_reduce<Sum>(part_sums<4>(Part<T>(runs, c, number, x), grad_y, x, of.first), shared);
    if (threadIdx.x == 0) {
      parts[2 * (long long)blockIdx.x] = sums.first, parts[2 * (long long)blockIdx.x + 1] = sums.second * of.second;
    }
  }
  if (!grad_x) return;
  const A scale = of.second * parameter<T>(weight, c, wide, A(1));
  each_packs<4>(
      Part<T>(runs, c, number, grad_x),
      [&](const Place(&places)[4], const Pack<T>(&packs)[1][4]) {
#pragma unroll
        for (int u = 0; u < 4; ++u) store_place(grad_x, places[u], [&](int e) { return packs[0][u][e] * scale; });
      },
      grad_y);
}

// grad_x in training, of the parts that batch_norm_bwd_sums left; grad_weight and grad_bias, which may be null, by the
// first block of a channel. Grid and block: as batch_norm_moments.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    batch_norm_bwd(const T* __restrict__ grad_y, const T* __restrict__ x, const void* __restrict__ weight,
                   const acc_t<T>* __restrict__ mean, const acc_t<T>* __restrict__ rstd,
                   const acc_t<T>* __restrict__ parts, T* __restrict__ grad_x, void* __restrict__ grad_weight,
                   void* __restrict__ grad_bias, Runs runs, int wide) {
  using A = acc_t<T>;
  __shared__ Pair<A> shared[kWarp];
  const long long block = gridDim.x - 1 - (long long)blockIdx.x, c = block / runs.parts;
  const int number = int(block % runs.parts);
  Pair<A> sums = {};
  for (int p = threadIdx.x; p < runs.parts; p += blockDim.x) {
    const A* at = parts + 2 * (c * runs.parts + p);
    sums = sums + Pair<A>{at[0], at[1]};
  }
  sums = block_reduce<Sum>(sums, shared);
  if (number == 0 && threadIdx.x == 0) {
    if (grad_weight) set<T>(grad_weight, c, wide, sums.second);
    if (grad_bias) set<T>(grad_bias, c, wide, sums.first);
  }
  const A count = A(runs.count * runs.size), mu = mean[c], r = rstd[c], scale = r * parameter<T>(weight, c, wide, A(1));
  const A c1 = sums.second / count, c2 = sums.first / count;
  each_packs<4>(
      Part<T>(runs, c, number, grad_x),
      [&](const Place(&places)[4], const Pack<T>(&packs)[2][4]) {
#pragma unroll
        for (int u = 0; u < 4; ++u) {
          store_place(grad_x, places[u],
                      [&](int e) { return scale * (packs[0][u][e] - c2 - (packs[1][u][e] - mu) * r * c1); });
        }
      },
      grad_y, x);
}

// --- columns: (m, c) ---

template <bool VECTORS, typename T, typename A = acc_t<T>>
__device__ __forceinline__ void columns_moments(const T* x, A* parts, long long rows, long long size,
                                                Moments<A>* shared) {
  constexpr int W = kVecWidth<T>;
  const ColumnTile<T, VECTORS> tile(size);
  ColumnMoments<W, A> own = {};
  each_rows(
      tile, rows, [&](long long, int there, const Pack<T>(&packs)[1][kRowsAtOnce]) { own.add(packs[0], there); }, x);
  fold_columns(
      tile, shared, [&](int e) { return Moments<A>{own.count, own.mean[e], own.square[e]}; },
      [](Moments<A>& total, const Moments<A>& other) { total.merge(other); },
      [&](int i, const Moments<A>& total) { store_moments(parts + 3 * (blockIdx.y * size + tile.start + i), total); });
}

// Three numbers of `parts`, (gridDim.y, size, 3), for each column of each part of the rows. Grid: (tiles of columns,
// parts). Block: see columns.cuh.
template <typename T>
__global__ void __launch_bounds__(kColumnThreads)
    batch_norm_columns_moments(const T* __restrict__ x, acc_t<T>* __restrict__ parts, long long rows, long long size) {
  __shared__ Moments<acc_t<T>> shared[kColumnThreads * kVecWidth<T>];
  if (vectors_fit<kVecWidth<T>>(size, x)) columns_moments<true>(x, parts, rows, size, shared);
  else columns_moments<false>(x, parts, rows, size, shared);
}

// mean, rstd and the running statistics, of `count` parts. Grid: ceil(size / kWarp). Block: (kWarp, kFinishers): columns
// by threadIdx.x, parts dealt out over threadIdx.y. running_mean and running_var may be null.
template <typename T>
__global__ void __launch_bounds__(kWarp* kFinishers)
    batch_norm_columns_finish(const acc_t<T>* __restrict__ parts, acc_t<T>* __restrict__ mean,
                              acc_t<T>* __restrict__ rstd, void* running_mean, void* running_var, long long size,
                              int count, int wide, acc_t<T> momentum, acc_t<T> eps) {
  using A = acc_t<T>;
  __shared__ Moments<A> shared[kFinishers][kWarp];
  const long long c = blockIdx.x * (long long)kWarp + threadIdx.x;
  Moments<A> own = {};
  for (int p = threadIdx.y; c < size && p < count; p += kFinishers) {
    const A* at = parts + 3 * (p * size + c);
    own.merge({at[0], at[1], at[2]});
  }
  shared[threadIdx.y][threadIdx.x] = own;
  __syncthreads();
  if (threadIdx.y > 0 || c >= size) return;
  for (int y = 1; y < kFinishers; ++y) own.merge(shared[y][threadIdx.x]);
  keep<T>(own, c, mean, rstd, running_mean, running_var, wide, momentum, eps);
}

template <bool VECTORS, typename T, typename A = acc_t<T>>
__device__ __forceinline__ void columns_forward(const T* x, const void* weight, const void* bias, T* y,
                                                const Statistics<T>& statistics, long long rows, long long size) {
  constexpr int W = kVecWidth<T>;
  const ColumnTile<T, VECTORS> tile(size);
  A mean[W] = {}, scale[W] = {}, shift[W] = {};
  tile.each([&](int e, long long c) {
    const Pair<A> of = statistics[c];
    mean[e] = of.first, scale[e] = of.second * parameter<T>(weight, c, statistics.wide, A(1));
    shift[e] = parameter<T>(bias, c, statistics.wide, A(0));
  });
  each_rows(
      tile, rows,
      [&](long long row, int there, const Pack<T>(&packs)[1][kRowsAtOnce]) {
        store_rows(tile, y, row, there, [&](int u, int e) { return (packs[0][u][e] - mean[e]) * scale[e] + shift[e]; });
      },
      x);
}

// y. mean and rstd, or running_mean and running_var; the others are null. Grid and block: as batch_norm_columns_moments.
template <typename T>
__global__ void __launch_bounds__(kColumnThreads)
    batch_norm_columns_fwd(const T* __restrict__ x, const void* __restrict__ weight, const void* __restrict__ bias,
                           T* __restrict__ y, const acc_t<T>* __restrict__ mean, const acc_t<T>* __restrict__ rstd,
                           const void* __restrict__ running_mean, const void* __restrict__ running_var, long long rows,
                           long long size, int wide, acc_t<T> eps) {
  const Statistics<T> statistics{mean, rstd, running_mean, running_var, wide, eps};
  if (vectors_fit<kVecWidth<T>>(size, x, y)) columns_forward<true>(x, weight, bias, y, statistics, rows, size);
  else columns_forward<false>(x, weight, bias, y, statistics, rows, size);
}

template <bool VECTORS, typename T, typename A = acc_t<T>>
__device__ __forceinline__ void columns_sums(const T* grad_y, const T* x, const void* weight,
                                             const Statistics<T>& statistics, T* grad_x, A* parts, long long rows,
                                             long long size, Pair<A>* shared) {
  constexpr int W = kVecWidth<T>;
  const ColumnTile<T, VECTORS> tile(size);
  A mean[W] = {}, rstd[W] = {}, scale[W] = {};
  Pair<A> sums[W] = {};
  tile.each([&](int e, long long c) {
    const Pair<A> of = statistics[c];
    mean[e] = of.first, rstd[e] = of.second;
    scale[e] = grad_x ? of.second * parameter<T>(weight, c, statistics.wide, A(1)) : A(0);
  });
  each_rows(
      tile, rows,
      [&](long long row, int there, const Pack<T>(&packs)[2][kRowsAtOnce]) {
#pragma unroll
        for (int e = 0; e < W; ++e) {
          Pair<A> own = {};
#pragma unroll
          for (int u = 0; u < kRowsAtOnce; ++u) {
            const A centred = u < there ? packs[1][u][e] - mean[e] : A(0);  // else 0 x inf would be NaN
            own.first += packs[0][u][e], own.second += packs[0][u][e] * centred;
          }
          sums[e] = sums[e] + own;
        }
        if (!grad_x) return;
        store_rows(tile, grad_x, row, there, [&](int u, int e) { return packs[0][u][e] * scale[e]; });
      },
      grad_y, x);
  if (!parts) return;
  fold_columns(
      tile, shared, [&](int e) { return Pair<A>{sums[e].first, sums[e].second * rstd[e]}; },
      [](Pair<A>& total, const Pair<A>& other) { total = total + other; },
      [&](int i, const Pair<A>& total) {
        A* at = parts + 2 * (blockIdx.y * size + tile.start + i);
        at[0] = total.first, at[1] = total.second;
      });
}

// As batch_norm_bwd_sums; `parts` are (gridDim.y, size, 2). Grid and block: as batch_norm_columns_moments.
template <typename T>
__global__ void __launch_bounds__(kColumnThreads)
    batch_norm_columns_bwd_sums(const T* __restrict__ grad_y, const T* __restrict__ x, const void* __restrict__ weight,
                                const acc_t<T>* __restrict__ mean, const acc_t<T>* __restrict__ rstd,
                                const void* __restrict__ running_mean, const void* __restrict__ running_var,
                                T* __restrict__ grad_x, acc_t<T>* __restrict__ parts, long long rows, long long size,
                                int wide, acc_t<T> eps) {
  __shared__ Pair<acc_t<T>> shared[kColumnThreads * kVecWidth<T>];
  const Statistics<T> statistics{mean, rstd, running_mean, running_var, wide, eps};
  if (vectors_fit<kVecWidth<T>>(size, grad_y, x, grad_x)) {
    columns_sums<true>(grad_y, x, weight, statistics, grad_x, parts, rows, size, shared);
  } else {
    columns_sums<false>(grad_y, x, weight, statistics, grad_x, parts, rows, size, shared);
  }
}

// grad_weight and grad_bias, of `count` parts `step` channels apart; `sums`, (size, 2), gets both as they are summed.
// Each may be null. Part p of channel c is at p step_part + c step_channel. Grid and block: as batch_norm_columns_finish.
template <typename T>
__global__ void __launch_bounds__(kWarp* kFinishers)
    batch_norm_bwd_finish(const acc_t<T>* __restrict__ parts, acc_t<T>* __restrict__ sums,
                          void* __restrict__ grad_weight, void* __restrict__ grad_bias, long long size,
                          long long step_part, long long step_channel, int count, int wide) {
  using A = acc_t<T>;
  __shared__ Pair<A> shared[kFinishers][kWarp];
  const long long c = blockIdx.x * (long long)kWarp + threadIdx.x;
  Pair<A> own = {};
  for (int p = threadIdx.y; c < size && p < count; p += kFinishers) {
    const A* at = parts + 2 * (p * step_part + c * step_channel);
    own = own + Pair<A>{at[0], at[1]};
  }
  shared[threadIdx.y][threadIdx.x] = own;
  __syncthreads();
  if (threadIdx.y > 0 || c >= size) return;
  for (int y = 1; y < kFinishers; ++y) own = own + shared[y][threadIdx.x];
  if (sums) sums[2 * c] = own.first, sums[2 * c + 1] = own.second;
  if (grad_weight) set<T>(grad_weight, c, wide, own.second);
  if (grad_bias) set<T>(grad_bias, c, wide, own.first);
}

template <bool VECTORS, typename T, typename A = acc_t<T>>
__device__ __forceinline__ void columns_backward(const T* grad_y, const T* x, const void* weight, const A* mean,
                                                 const A* rstd, const A* sums, T* grad_x, long long rows,
                                                 long long size, int wide) {
  constexpr int W = kVecWidth<T>;
  const ColumnTile<T, VECTORS> tile(size);
  A mu[W] = {}, scale[W] = {}, slope[W] = {}, c2[W] = {};
  tile.each([&](int e, long long c) {
    mu[e] = mean[c], scale[e] = rstd[c] * parameter<T>(weight, c, wide, A(1));
    slope[e] = rstd[c] * (sums[2 * c + 1] / A(rows)), c2[e] = sums[2 * c] / A(rows);
  });
  each_rows(
      tile, rows,
      [&](long long row, int there, const Pack<T>(&packs)[2][kRowsAtOnce]) {
        store_rows(tile, grad_x, row, there, [&](int u, int e) {
          return scale[e] * (packs[0][u][e] - c2[e] - (packs[1][u][e] - mu[e]) * slope[e]);
        });
      },
      grad_y, x);
}

// grad_x in training; `sums` as batch_norm_bwd_finish left them. Grid and block: as batch_norm_columns_moments.
template <typename T>
__global__ void __launch_bounds__(kColumnThreads)
    batch_norm_columns_bwd(const T* __restrict__ grad_y, const T* __restrict__ x, const void* __restrict__ weight,
                           const acc_t<T>* __restrict__ mean, const acc_t<T>* __restrict__ rstd,
                           const acc_t<T>* __restrict__ sums, T* __restrict__ grad_x, long long rows, long long size,
                           int wide) {
  if (vectors_fit<kVecWidth<T>>(size, grad_y, x, grad_x)) {
    columns_backward<true>(grad_y, x, weight, mean, rstd, sums, grad_x, rows, size, wide);
  } else {
    columns_backward<false>(grad_y, x, weight, mean, rstd, sums, grad_x, rows, size, wide);
  }
}
