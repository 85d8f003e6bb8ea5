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
//
// Reached on an H200 (bf16, GB/s of those bytes, forward / backward; a copy: 4276): 131072x1024 3949 / 3689, 32768x4096
// 3863 / 3380, 8192x16384 3483 / 3132, 16383x1001 1510 / 1438. Lost: instructions, above all the unpacking of half types
// for each of three passes over the registers; in backward also the sums of the parameters' gradients, whose registers
// leave room for few warps; rows of odd size are read two bytes at a time, weight and bias with them.
#include "common/rows.cuh"

// 1 / sqrt(value), rounded once: an error in rstd is the same in all of a row, and adds up in grad_weight.
template <typename A> __device__ __forceinline__ A inverse_sqrt(A value) {
  const A guess = A(1) / sqrt(value), high = value * guess, low = fma(value, guess, -high);
  const A left = fma(-high, guess, A(1)) - low * guess;
  return isfinite(left) ? guess + A(0.5) * guess * left : guess;
}

// What centred values say beside their sum of squares: the mean, corrected, and the variance about it.
template <typename A> struct Moments {
  A mean, rstd;

  __device__ __forceinline__ Moments(A mu, Pair<A> centred, long long size, A eps) {
    const A left = centred.first / size, about_mu = centred.second / size;
    const A variance = isfinite(about_mu) ? about_mu - left * left : about_mu;  // inf - inf would be NaN
    mean = mu + left;
    rstd = inverse_sqrt((variance < A(0) ? A(0) : variance) + eps);
  }
};

// x - mu and its square, added to their sums.
template <typename A> __device__ __forceinline__ void add_centred(A x, A mu, Pair<A>& sum) {
  const A centred = x - mu;
  sum.first += centred, sum.second += centred * centred;
}

// A factor or a summand for each column; without it, 1 or 0.
template <int K, bool VECTORS, typename T>
__device__ __forceinline__ Pack<T> load_parameter(const Tile<K, kVecWidth<T>, VECTORS>& tile, const T* parameter, int k,
                                                  float otherwise) {
  if (parameter) return load_per_column(tile, parameter, k, T());
  return Pack<T>::filled(from_acc<T>(otherwise));
}

// y for pack k of a row.
template <int K, bool VECTORS, typename T>
__device__ __forceinline__ void store_normalised(const Tile<K, kVecWidth<T>, VECTORS>& tile, T* y, int k,
                                                 const Pack<T>& x, const T* weight, const T* bias,
                                                 const Moments<acc_t<T>>& of) {
  const Pack<T> w = load_parameter(tile, weight, k, 1), b = load_parameter(tile, bias, k, 0);
  store_pack(tile, y, k, [&](int e) { return (x[e] - of.mean) * of.rstd * w[e] + b[e]; });
}

// What the threads of a block share in forward.
template <typename A> struct Shared {
  A sums[kWarp];
  Pair<A> moments[kWarp];
};

// One row, read once. All threads of the block take part; the tile of those that have no row is empty.
template <int K, bool VECTORS, typename T, typename A = acc_t<T>>
__device__ __forceinline__ Moments<A> normalise_row(const Tile<K, kVecWidth<T>, VECTORS>& tile, const T* x,
                                                    const T* weight, const T* bias, T* y, int size, A eps,
                                                    Shared<A>& shared) {
  Pack<T> packs[K];
  load_row(tile, x, from_acc<T>(A(0)), packs);
  Pair<A> centred = {};
  const A sum = reduce_elements<Sum, K, kVecWidth<T>>([&](int k, int e) { return packs[k][e]; });
  const A mu = row_reduce<Sum>(sum, shared.sums) / size;
  fold(packs);
  tile.each([&](int k, int e) { add_centred(packs[k][e], mu, centred); });
  const Moments<A> of(mu, row_reduce<Sum>(centred, shared.moments), size, eps);
  fold(packs);
#pragma unroll
  for (int k = 0; k < K; ++k) store_normalised(tile, y, k, packs[k], weight, bias, of);
  return of;
}

// Grid: any. Block: see rows.cuh; K packs in each thread hold a row. Threads own whole packs of x and y. weight and
// bias may be null. mean and rstd are kept for backward, one number per row.
template <typename T, int K>
__global__ void __launch_bounds__(1024)
    layer_norm_fwd(const T* __restrict__ x, const T* __restrict__ weight, const T* __restrict__ bias, T* __restrict__ y,
                   acc_t<T>* __restrict__ mean, acc_t<T>* __restrict__ rstd, long long rows, int size, acc_t<T> eps) {
  constexpr int W = kVecWidth<T>;
  __shared__ Shared<acc_t<T>> shared;
  const bool vectors = vectors_fit<W>(size, x, weight, bias, y);
  for (long long first = blockIdx.x * (long long)blockDim.y; first < rows; first += gridDim.x * (long long)blockDim.y) {
    const long long row = first + threadIdx.y, at = row * size;
    const auto of = vectors ? normalise_row(Tile<K, W, true>::at(row, rows, size), x + at, weight, bias, y + at, size, eps, shared)
                            : normalise_row(Tile<K, W, false>::at(row, rows, size), x + at, weight, bias, y + at, size, eps, shared);
    if (threadIdx.x == 0 && row < rows) mean[row] = of.mean, rstd[row] = of.rstd;
  }
}

// A row too long for registers, read three times, the second time from its end: what was read last is still in cache.
template <int K, bool VECTORS, typename T, typename A = acc_t<T>>
__device__ __forceinline__ Moments<A> normalise_wide_row(const T* x, const T* weight, const T* bias, T* y,
    long long row, long long rows, long long size, A eps, Shared<A>& shared) {
  using Part = Tile<K, kVecWidth<T>, VECTORS>;
  const int parts = Part::count(size);
  const auto start = [](int c) { return c * (long long)Part::capacity(); };
  Pack<T> packs[K];
  A sum = A(0);
  Pair<A> centred = {};
  for (int c = 0; c < parts; ++c) {
    load_row(Part::at(row, rows, size, c), x + start(c), from_acc<T>(A(0)), packs);
    sum += reduce_elements<Sum, K, kVecWidth<T>>([&](int k, int e) { return packs[k][e]; });
  }
  const A mu = block_reduce<Sum>(sum, shared.sums) / size;
  for (int c = parts - 1; c >= 0; --c) {
    const Part part = Part::at(row, rows, size, c);
    load_row(part, x + start(c), T(), packs);
    Pair<A> own = {};  // added up apart: in a very long row the sum so far is large
    part.each([&](int k, int e) { add_centred(packs[k][e], mu, own); });
    centred.first += own.first, centred.second += own.second;
  }
  const Moments<A> of(mu, block_reduce<Sum>(centred, shared.moments), size, eps);
  for (int c = 0; c < parts; ++c) {
    const Part part = Part::at(row, rows, size, c);
    load_row(part, x + start(c), T(), packs);
#pragma unroll
    for (int k = 0; k < K; ++k) {
      const T *w = weight ? weight + start(c) : nullptr, *b = bias ? bias + start(c) : nullptr;
      store_normalised(part, y + start(c), k, packs[k], w, b, of);
    }
  }
  return of;
}

// As layer_norm_fwd, for rows too long for registers. Block: (a multiple of 32, 1).
template <typename T>
__global__ void __launch_bounds__(1024)
    layer_norm_fwd_wide(const T* __restrict__ x, const T* __restrict__ weight, const T* __restrict__ bias,
                        T* __restrict__ y, acc_t<T>* __restrict__ mean, acc_t<T>* __restrict__ rstd, long long rows,
                        long long size, acc_t<T> eps) {
  __shared__ Shared<acc_t<T>> shared;
  const bool vectors = vectors_fit<kVecWidth<T>>(size, x, weight, bias, y);
  for (long long row = blockIdx.x; row < rows; row += gridDim.x) {
    const long long at = row * size;
    const auto of = vectors ? normalise_wide_row<4, true>(x + at, weight, bias, y + at, row, rows, size, eps, shared)
                            : normalise_wide_row<2, false>(x + at, weight, bias, y + at, row, rows, size, eps, shared);
    if (threadIdx.x == 0) mean[row] = of.mean, rstd[row] = of.rstd;
  }
}

// What backward reads of pack k of a row: xhat and the gradient with respect to it.
template <typename T> struct Gradient {
  Pack<T> x, grad_y, weight;
  acc_t<T> mean, rstd;

  __device__ __forceinline__ acc_t<T> xhat(int e) const { return (x[e] - mean) * rstd; }
  __device__ __forceinline__ acc_t<T> wg(int e) const { return mul_rn(grad_y[e], weight[e]); }
};

constexpr int kBackwardThreads = 512;

// The block's sum for each column of a tile, over threadIdx.y in order, to its place in a row of the parts. `shared`
// holds W values of each thread of the block: they are laid out as the columns are.
template <int K, int W, bool VECTORS, typename A>
__device__ __forceinline__ void store_parts(const Tile<K, W, VECTORS>& tile, const A (&values)[K][W], A* row,
                                            A* shared) {
  const int slab = W * blockDim.x, threads = blockDim.x * blockDim.y;
#pragma unroll
  for (int k = 0; k < K; ++k) {
    __syncthreads();
#pragma unroll
    for (int e = 0; e < W; ++e) shared[threadIdx.y * slab + tile.index(0, e)] = values[k][e];
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.y * blockDim.x + threadIdx.x; i < slab; i += threads) {
      A total = A(0);
#pragma unroll 1
      for (int y = 0; y < blockDim.y; ++y) total += shared[y * slab + i];
      if (k * slab + i < tile.left) row[k * slab + i] = total;
    }
  }
}

// The tensors of backward; weight and what is written may be null.
template <typename T> struct Backward {
  const T *grad_y, *x, *weight;
  const acc_t<T>*mean, *rstd;
  T* grad_x;
  acc_t<T>*weight_parts, *bias_parts;
};

// All the rows of a block; see layer_norm_bwd.
template <int K, bool VECTORS, bool PARAMETERS, typename T, typename A = acc_t<T>>
__device__ __forceinline__ void backward_rows(const Backward<T>& to, long long rows, int size, Pair<A>* sums,
                                              A* shared) {
  constexpr int W = kVecWidth<T>;
  const Tile<K, W, VECTORS> whole{size};
  A weight_sum[K][W] = {}, bias_sum[K][W] = {};
  for (long long first = blockIdx.x * (long long)blockDim.y; first < rows; first += gridDim.x * (long long)blockDim.y) {
    const long long row = first + threadIdx.y;
    const bool live = row < rows;
    const Tile<K, W, VECTORS> tile{live ? size : 0};
    const A mu = live ? to.mean[row] : A(0), r = live ? to.rstd[row] : A(0);
    Pack<T> inputs[K], grads[K];
    load_row(tile, to.x + row * size, from_acc<T>(A(0)), inputs);
    load_row(tile, to.grad_y + row * size, from_acc<T>(A(0)), grads);
    const auto pack = [&](int k) {
      return Gradient<T>{inputs[k], grads[k], load_parameter(whole, to.weight, k, 1), mu, r};
    };
    Pair<A> c = {};
#pragma unroll
    for (int k = 0; k < K; ++k) {
      const Gradient<T> g = pack(k);
#pragma unroll
      for (int e = 0; e < W; ++e) {
        c.first += g.wg(e) * g.xhat(e), c.second += g.wg(e);
        if (PARAMETERS) weight_sum[k][e] += g.grad_y[e] * g.xhat(e), bias_sum[k][e] += g.grad_y[e];
      }
    }
    if (!to.grad_x) continue;
    c = row_reduce<Sum>(c, sums);
    const A c1 = c.first / size, c2 = c.second / size;
    fold(inputs), fold(grads);
#pragma unroll
    for (int k = 0; k < K; ++k) {
      const Gradient<T> g = pack(k);
      store_pack(tile, to.grad_x + row * size, k, [&](int e) { return r * (g.wg(e) - c2 - g.xhat(e) * c1); });
    }
  }
  const long long part = blockIdx.x * (long long)size;
  if (PARAMETERS && to.weight_parts) store_parts(whole, weight_sum, to.weight_parts + part, shared);
  if (PARAMETERS && to.bias_parts) store_parts(whole, bias_sum, to.bias_parts + part, shared);
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
  constexpr int W = kVecWidth<T>;
  __shared__ Pair<acc_t<T>> sums[kWarp];
  __shared__ acc_t<T> shared[PARAMETERS ? kBackwardThreads * W : 1];
  const Backward<T> to{grad_y, x, weight, mean, rstd, grad_x, weight_parts, bias_parts};
  if (vectors_fit<W>(size, grad_y, x, weight, grad_x)) {
    backward_rows<K, true, PARAMETERS>(to, rows, size, sums, shared);
  } else {
    backward_rows<K, false, PARAMETERS>(to, rows, size, sums, shared);
  }
}

// grad_x of a row too long for registers, read twice.
template <int K, bool VECTORS, typename T, typename A = acc_t<T>>
__device__ __forceinline__ void backward_wide_row(const T* grad_y, const T* x, const T* weight, T* grad_x, A mu, A r,
                                                  long long size, Pair<A>* sums) {
  constexpr int W = kVecWidth<T>;
  using Part = Tile<K, W, VECTORS>;
  const int parts = Part::count(size);
  Gradient<T> g[K];
  const auto load = [&](const Part& part, long long start) {
    const T zero = from_acc<T>(A(0));
#pragma unroll
    for (int k = 0; k < K; ++k) {
      g[k] = {load_pack(part, x + start, k, zero), load_pack(part, grad_y + start, k, zero),
              load_parameter(part, weight ? weight + start : nullptr, k, 1), mu, r};
    }
  };
  Pair<A> c = {};
  for (int i = 0; i < parts; ++i) {
    load(Part::at(row, rows, size, i), i * (long long)Part::capacity());
    Pair<A> own = {};  // added up apart: in a very long row the sum so far is large
    each_element<K, W>([&](int k, int e) { own.first += g[k].wg(e) * g[k].xhat(e), own.second += g[k].wg(e); });
    c.first += own.first, c.second += own.second;
  }
  c = block_reduce<Sum>(c, sums);
  const A c1 = c.first / size, c2 = c.second / size;
  for (int i = parts - 1; i >= 0; --i) {
    const Part part = Part::at(row, rows, size, i);
    const long long start = i * (long long)Part::capacity();
    load(part, start);
#pragma unroll
    for (int k = 0; k < K; ++k) {
      store_pack(part, grad_x + start, k, [&](int e) { return r * (g[k].wg(e) - c2 - g[k].xhat(e) * c1); });
    }
  }
}

// grad_x of rows too long for registers; grad_weight and grad_bias are layer_norm_bwd_columns' work. Grid: any. Block:
// (a multiple of 32, 1). weight may be null.
template <typename T>
__global__ void __launch_bounds__(kBackwardThreads)
    layer_norm_bwd_wide(const T* __restrict__ grad_y, const T* __restrict__ x, const T* __restrict__ weight,
                        const acc_t<T>* __restrict__ mean, const acc_t<T>* __restrict__ rstd, T* __restrict__ grad_x,
                        long long rows, long long size) {
  __shared__ Pair<acc_t<T>> sums[kWarp];
  const bool vectors = vectors_fit<kVecWidth<T>>(size, grad_y, x, weight, grad_x);
  for (long long row = blockIdx.x; row < rows; row += gridDim.x) {
    const long long at = row * size;
    const acc_t<T> mu = mean[row], r = rstd[row];
    if (vectors) backward_wide_row<2, true>(grad_y + at, x + at, weight, grad_x + at, mu, r, size, sums);
    else backward_wide_row<1, false>(grad_y + at, x + at, weight, grad_x + at, mu, r, size, sums);
  }
}

// The columns of one block, see layer_norm_bwd_columns.
template <bool VECTORS, typename T, typename A = acc_t<T>>
__device__ __forceinline__ void backward_columns(const Backward<T>& to, long long rows, long long size, A* shared) {
  constexpr int W = kVecWidth<T>;
  using Columns = Tile<1, W, VECTORS>;
  const Columns tile = Columns::at(size, blockIdx.x);
  const long long start = blockIdx.x * (long long)Columns::capacity(), part = blockIdx.y * size + start;
  A weight_sum[1][W] = {}, bias_sum[1][W] = {};
#pragma unroll 4
  for (long long row = blockIdx.y; row < rows; row += gridDim.y) {
    const Pack<T> inputs = load_pack(tile, to.x + row * size + start, 0, from_acc<T>(A(0)));
    const Pack<T> grads = load_pack(tile, to.grad_y + row * size + start, 0, from_acc<T>(A(0)));
    const A mu = to.mean[row], r = to.rstd[row];
#pragma unroll
    for (int e = 0; e < W; ++e) weight_sum[0][e] += grads[e] * ((inputs[e] - mu) * r), bias_sum[0][e] += grads[e];
  }
  if (to.weight_parts) store_parts(tile, weight_sum, to.weight_parts + part, shared);
  if (to.bias_parts) store_parts(tile, bias_sum, to.bias_parts + part, shared);
}

// A part of grad_weight and grad_bias for rows too long for registers. Grid: (tiles of columns, parts). Block:
// (threads, 1); a thread owns one pack of columns, in every gridDim.y-th row. Row blockIdx.y of `weight_parts` and
// `bias_parts` (gridDim.y, size), which may be null, gets the sum.
template <typename T>
__global__ void __launch_bounds__(kBackwardThreads)
    layer_norm_bwd_columns(const T* __restrict__ grad_y, const T* __restrict__ x, const acc_t<T>* __restrict__ mean,
                           const acc_t<T>* __restrict__ rstd, acc_t<T>* __restrict__ weight_parts,
                           acc_t<T>* __restrict__ bias_parts, long long rows, long long size) {
  constexpr int W = kVecWidth<T>;
  __shared__ acc_t<T> shared[kBackwardThreads * W];
  const Backward<T> to{grad_y, x, nullptr, mean, rstd, nullptr, weight_parts, bias_parts};
  if (vectors_fit<W>(size, grad_y, x)) backward_columns<true>(to, rows, size, shared);
  else backward_columns<false>(to, rows, size, shared);
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
