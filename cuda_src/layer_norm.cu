// xhat = (x - mean) rstd,   mean = sum(x) / n,   rstd = 1 / sqrt(sum((x - mean)^2) / n + eps)        over each row of n
// y = xhat weight + bias
//
// grad_x = rstd (wg - c2 - xhat c1),   wg = grad_y weight,   c1 = sum(wg xhat) / n,   c2 = sum(wg) / n
// grad_weight = sum(grad_y xhat),   grad_bias = sum(grad_y)                                          over the rows
//
// The variance is summed over centred values: E[x^2] - mean^2 cancels when |mean| >> std. What is left of their sum,
// which would be 0 were the mean exact, corrects the mean: an error there weighs |mean| / std times as much in xhat.
//
// Bytes per element: forward 2 x sizeof(T), backward 3 x sizeof(T), the parameters' gradients included; about 8 flops
// forward, 14 backward.
#include "common/rows.cuh"

// A factor or a summand for each column; without it, 1 or 0.
template <int K, typename T>
__device__ __forceinline__ Pack<T> load_parameter(const Window<K, kVecWidth<T>>& window, const T* parameter, int k,
                                                  float otherwise) {
  if (parameter) return load_pack(window, parameter, k, T());
  Pack<T> pack = {};
#pragma unroll
  for (int e = 0; e < kVecWidth<T>; ++e) pack.set(e, from_acc<T>(otherwise));
  return pack;
}

// What centred values say beside their sum of squares: the mean, corrected, and the variance about it.
template <typename A> struct Moments {
  A mean, rstd;

  __device__ __forceinline__ Moments(A mu, Pair<A> centred, long long size, A eps) {
    const A left = centred.first / size, variance = centred.second / size - left * left;
    mean = mu + left;
    rstd = A(1) / sqrt((variance < A(0) ? A(0) : variance) + eps);
  }
};

// x - mu and its square, to be summed; nothing for pads.
template <int K, int W, typename A>
__device__ __forceinline__ void add_centred(const Window<K, W>& window, int k, int e, A x, A mu, Pair<A>& sum) {
  const A centred = window.has(window.index(k, e)) ? x - mu : A(0);
  sum.first += centred, sum.second += centred * centred;
}

// y for pack k of a row.
template <int K, typename T>
__device__ __forceinline__ void store_normalised(const Window<K, kVecWidth<T>>& window, T* y, int k, const Pack<T>& x,
                                                 const T* weight, const T* bias, const Moments<acc_t<T>>& of) {
  const Pack<T> w = load_parameter(window, weight, k, 1), b = load_parameter(window, bias, k, 0);
  store_pack(window, y, k, [&](int e) { return (x[e] - of.mean) * of.rstd * w[e] + b[e]; });
}

// Grid: any. Block: see rows.cuh; K packs in each thread hold a row. Threads own whole packs of x and y. weight and
// bias may be null. mean and rstd are kept for backward, one number per row.
template <typename T, int K>
__global__ void __launch_bounds__(1024)
    layer_norm_fwd(const T* __restrict__ x, const T* __restrict__ weight, const T* __restrict__ bias, T* __restrict__ y,
                   acc_t<T>* __restrict__ mean, acc_t<T>* __restrict__ rstd, long long rows, int size, acc_t<T> eps) {
  using A = acc_t<T>;
  constexpr int W = kVecWidth<T>;
  __shared__ A sums[kWarp];
  __shared__ Pair<A> moments[kWarp];
  for (long long first = blockIdx.x * (long long)blockDim.y; first < rows; first += gridDim.x * (long long)blockDim.y) {
    const long long row = first + threadIdx.y;
    const auto window = whole_row<K>(x + row * size, size, row < rows);
    Pack<T> packs[K];
    load_row(window, x + row * size, from_acc<T>(A(0)), packs);
    A sum = A(0);
    Pair<A> centred = {};
    each_element<K, W>([&](int k, int e) { sum += packs[k][e]; });
    const A mu = row_reduce<Sum>(sum, sums) / size;
    fold(packs);
    each_element<K, W>([&](int k, int e) { add_centred(window, k, e, packs[k][e], mu, centred); });
    const Moments<A> of(mu, row_reduce<Sum>(centred, moments), size, eps);
    fold(packs);
#pragma unroll
    for (int k = 0; k < K; ++k) store_normalised(window, y + row * size, k, packs[k], weight, bias, of);
    if (threadIdx.x == 0 && row < rows) mean[row] = of.mean, rstd[row] = of.rstd;
  }
}

// As layer_norm_fwd, for rows too long for registers: read three times. Block: (a multiple of 32, 1).
template <typename T>
__global__ void __launch_bounds__(1024)
    layer_norm_fwd_wide(const T* __restrict__ x, const T* __restrict__ weight, const T* __restrict__ bias,
                        T* __restrict__ y, acc_t<T>* __restrict__ mean, acc_t<T>* __restrict__ rstd, long long rows,
                        long long size, acc_t<T> eps) {
  using A = acc_t<T>;
  constexpr int K = 2, W = kVecWidth<T>;
  __shared__ A sums[kWarp];
  __shared__ Pair<A> moments[kWarp];
  for (long long row = blockIdx.x; row < rows; row += gridDim.x) {
    const T* x_row = x + row * size;
    const long long windows = windows_of<K>(x_row, size);
    Pack<T> packs[K];
    A sum = A(0);
    Pair<A> centred = {};
    for (long long c = 0; c < windows; ++c) {
      load_row(window_at<K>(x_row, size, c), x_row, from_acc<T>(A(0)), packs);
      each_element<K, W>([&](int k, int e) { sum += packs[k][e]; });
    }
    const A mu = block_reduce<Sum>(sum, sums) / size;
    for (long long c = windows - 1; c >= 0; --c) {
      const auto window = window_at<K>(x_row, size, c);
      load_row(window, x_row, T(), packs);
      each_element<K, W>([&](int k, int e) { add_centred(window, k, e, packs[k][e], mu, centred); });
    }
    const Moments<A> of(mu, block_reduce<Sum>(centred, moments), size, eps);
    for (long long c = 0; c < windows; ++c) {
      const auto window = window_at<K>(x_row, size, c);
      load_row(window, x_row, T(), packs);
#pragma unroll
      for (int k = 0; k < K; ++k) store_normalised(window, y + row * size, k, packs[k], weight, bias, of);
    }
    if (threadIdx.x == 0) mean[row] = of.mean, rstd[row] = of.rstd;
  }
}

// What backward reads of pack k of a row: xhat and the gradient with respect to it.
template <typename T> struct Gradient {
  Pack<T> x, grad_y, weight;
  acc_t<T> mean, rstd;

  __device__ __forceinline__ acc_t<T> xhat(int e) const { return (x[e] - mean) * rstd; }
  __device__ __forceinline__ acc_t<T> wg(int e) const { return grad_y[e] * weight[e]; }
};

// A window on whole rows that is the same for each: what a thread owns are columns. Vectors need rows of whole vectors.
template <int K, typename T>
__device__ __forceinline__ Window<K, kVecWidth<T>> columns_of(const T* x, const T* grad_y, long long size,
                                                              long long origin) {
  using Tile = Window<K, kVecWidth<T>>;
  const long long left = size - origin;
  const bool vectors = size % kVecWidth<T> == 0 && is_aligned16(x) && is_aligned16(grad_y);
  return Tile{origin, 0, left < Tile::capacity() ? int(left) : Tile::capacity(), vectors ? 1 : int(blockDim.x)};
}

constexpr int kBackwardThreads = 512;

// The block's sum for each column of the window, over threadIdx.y in order, to a row of the parts. `shared` holds W
// values of each thread of the block: they are laid out as the columns are.
template <int K, int W, typename A>
__device__ __forceinline__ void store_parts(const Window<K, W>& window, const A (&values)[K][W], A* row, A* shared) {
  const int slab = W * blockDim.x, threads = blockDim.x * blockDim.y;
#pragma unroll
  for (int k = 0; k < K; ++k) {
    __syncthreads();
#pragma unroll
    for (int e = 0; e < W; ++e) shared[threadIdx.y * slab + window.index(0, e)] = values[k][e];
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.y * blockDim.x + threadIdx.x; i < slab; i += threads) {
      A total = A(0);
#pragma unroll 1
      for (int y = 0; y < blockDim.y; ++y) total += shared[y * slab + i];
      if (window.has(k * slab + i)) row[window.origin + k * slab + i] = total;
    }
  }
}

// Grid: any, one wave of blocks that stride over the rows. Block: see rows.cuh, at most kBackwardThreads; K packs in
// each thread hold a row. With PARAMETERS, each thread adds its columns' part of grad_weight and grad_bias, in
// acc_t<T>, over all rows of the block, and row blockIdx.x of `weight_parts` and `bias_parts` (gridDim.x, size) gets
// the block's sum. weight, grad_x, weight_parts and bias_parts may be null.
template <typename T, int K, bool PARAMETERS>
__global__ void __launch_bounds__(kBackwardThreads)
    layer_norm_bwd(const T* __restrict__ grad_y, const T* __restrict__ x, const T* __restrict__ weight,
                   const acc_t<T>* __restrict__ mean, const acc_t<T>* __restrict__ rstd, T* __restrict__ grad_x,
                   acc_t<T>* __restrict__ weight_parts, acc_t<T>* __restrict__ bias_parts, long long rows, int size) {
  using A = acc_t<T>;
  constexpr int W = kVecWidth<T>;
  __shared__ Pair<A> sums[kWarp];
  __shared__ A shared[PARAMETERS ? kBackwardThreads * W : 1];
  auto window = columns_of<K>(x, grad_y, size, 0);
  A weight_sum[K][W] = {}, bias_sum[K][W] = {};
  for (long long first = blockIdx.x * (long long)blockDim.y; first < rows; first += gridDim.x * (long long)blockDim.y) {
    const long long row = first + threadIdx.y;
    const bool live = row < rows;
    window.end = live ? size : 0;
    const A mu = live ? mean[row] : A(0), r = live ? rstd[row] : A(0);
    Pack<T> inputs[K], grads[K];
    load_row(window, x + row * size, from_acc<T>(A(0)), inputs);
    load_row(window, grad_y + row * size, from_acc<T>(A(0)), grads);
    Pair<A> c = {};
#pragma unroll
    for (int k = 0; k < K; ++k) {
      const Gradient<T> g{inputs[k], grads[k], load_parameter(window, weight, k, 1), mu, r};
#pragma unroll
      for (int e = 0; e < W; ++e) {
        c.first += g.wg(e) * g.xhat(e), c.second += g.wg(e);
        if (PARAMETERS) weight_sum[k][e] += g.grad_y[e] * g.xhat(e), bias_sum[k][e] += g.grad_y[e];
      }
    }
    if (!grad_x) continue;
    c = row_reduce<Sum>(c, sums);
    const A c1 = c.first / size, c2 = c.second / size;
    fold(inputs), fold(grads);
#pragma unroll
    for (int k = 0; k < K; ++k) {
      const Gradient<T> g{inputs[k], grads[k], load_parameter(window, weight, k, 1), mu, r};
      store_pack(window, grad_x + row * size, k, [&](int e) { return r * (g.wg(e) - c2 - g.xhat(e) * c1); });
    }
  }
  window.end = size;
  if (PARAMETERS && weight_parts) store_parts(window, weight_sum, weight_parts + blockIdx.x * (long long)size, shared);
  if (PARAMETERS && bias_parts) store_parts(window, bias_sum, bias_parts + blockIdx.x * (long long)size, shared);
}

// grad_x of rows too long for registers, read twice; grad_weight and grad_bias are layer_norm_bwd_columns' work.
// Grid: any. Block: (a multiple of 32, 1). weight may be null.
template <typename T>
__global__ void __launch_bounds__(kBackwardThreads)
    layer_norm_bwd_wide(const T* __restrict__ grad_y, const T* __restrict__ x, const T* __restrict__ weight,
                        const acc_t<T>* __restrict__ mean, const acc_t<T>* __restrict__ rstd, T* __restrict__ grad_x,
                        long long rows, long long size) {
  using A = acc_t<T>;
  constexpr int K = 2, W = kVecWidth<T>;
  __shared__ Pair<A> sums[kWarp];
  for (long long row = blockIdx.x; row < rows; row += gridDim.x) {
    const T *x_row = x + row * size, *g_row = grad_y + row * size;
    const long long windows = windows_of<K>(x_row, size);
    const A mu = mean[row], r = rstd[row];
    const auto read = [&](const Window<K, W>& window, int k) {
      const T zero = from_acc<T>(A(0));
      return Gradient<T>{load_pack(window, x_row, k, zero), load_pack(window, g_row, k, zero),
                         load_parameter(window, weight, k, 1), mu, r};
    };
    Pair<A> c = {};
    for (long long i = 0; i < windows; ++i) {
      const auto window = window_at<K>(x_row, size, i);
      const Gradient<T> g[K] = {read(window, 0), read(window, 1)};
      each_element<K, W>([&](int k, int e) { c.first += g[k].wg(e) * g[k].xhat(e), c.second += g[k].wg(e); });
    }
    c = block_reduce<Sum>(c, sums);
    const A c1 = c.first / size, c2 = c.second / size;
    for (long long i = windows - 1; i >= 0; --i) {
      const auto window = window_at<K>(x_row, size, i);
      const Gradient<T> g[K] = {read(window, 0), read(window, 1)};
#pragma unroll
      for (int k = 0; k < K; ++k) {
        store_pack(window, grad_x + row * size, k, [&](int e) { return r * (g[k].wg(e) - c2 - g[k].xhat(e) * c1); });
      }
    }
  }
}

// A part of grad_weight and grad_bias for rows too long for registers. Grid: (tiles of columns, parts). Block:
// (threads, 1); a thread owns one pack of columns, in every gridDim.y-th row. Row blockIdx.y of `weight_parts` and
// `bias_parts` (gridDim.y, size), which may be null, gets the sum.
template <typename T>
__global__ void __launch_bounds__(kBackwardThreads)
    layer_norm_bwd_columns(const T* __restrict__ grad_y, const T* __restrict__ x, const acc_t<T>* __restrict__ mean,
                           const acc_t<T>* __restrict__ rstd, acc_t<T>* __restrict__ weight_parts,
                           acc_t<T>* __restrict__ bias_parts, long long rows, long long size) {
  using A = acc_t<T>;
  constexpr int K = 1, W = kVecWidth<T>;
  __shared__ A shared[kBackwardThreads * W];
  const auto window = columns_of<K>(x, grad_y, size, blockIdx.x * (long long)Window<K, W>::capacity());
  A weight_sum[K][W] = {}, bias_sum[K][W] = {};
#pragma unroll 4
  for (long long row = blockIdx.y; row < rows; row += gridDim.y) {
    const Pack<T> inputs = load_pack(window, x + row * size, 0, from_acc<T>(A(0)));
    const Pack<T> grads = load_pack(window, grad_y + row * size, 0, from_acc<T>(A(0)));
    const A mu = mean[row], r = rstd[row];
#pragma unroll
    for (int e = 0; e < W; ++e) weight_sum[0][e] += grads[e] * ((inputs[e] - mu) * r), bias_sum[0][e] += grads[e];
  }
  if (weight_parts) store_parts(window, weight_sum, weight_parts + blockIdx.y * size, shared);
  if (bias_parts) store_parts(window, bias_sum, bias_parts + blockIdx.y * size, shared);
}

// grad_weight and grad_bias from the parts of the blocks, (gridDim.y, count, size), added in order. Grid: (ceil(size /
// blockDim.x), 1 or 2): weight, then bias, whichever is not null. Block: (kWarp, any), threadIdx.y dealing out the
// parts; a thread of threadIdx.y 0 owns a column.
template <typename T>
__global__ void __launch_bounds__(1024)
    layer_norm_bwd_sum(const acc_t<T>* __restrict__ parts, T* __restrict__ grad_weight, T* __restrict__ grad_bias,
                       int count, long long size) {
  using A = acc_t<T>;
  __shared__ A shared[1024];
  T* grad = blockIdx.y == 0 && grad_weight ? grad_weight : grad_bias;
  const A* part = parts + blockIdx.y * count * size;
  const long long column = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  A sum = A(0);
#pragma unroll 4
  for (int p = threadIdx.y; column < size && p < count; p += blockDim.y) sum += part[p * size + column];
  shared[threadIdx.y * blockDim.x + threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y > 0 || column >= size) return;
  for (int y = 1; y < blockDim.y; ++y) sum += shared[y * blockDim.x + threadIdx.x];
  grad[column] = from_acc<T>(sum);
}
