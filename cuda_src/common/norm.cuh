// What the normalisations share: statistics of a row, and forward. CENTRED: about the mean, as layer_norm; else about 0,
// as rms_norm. backward is in norm_bwd.cuh.
//
// Mean and variance are of one pass: each thread sums what its elements differ by from the mean of its first pack, each
// warp what its threads' means do from the first one's, and the block the same of its warps. Such a shift is a mean of a
// part of the row: at worst, where one part is far from all others, as many times as there are parts is lost to
// cancellation, 32 at most, while E[x^2] - mean^2 loses (mean / std)^2.
#pragma once

#include "common/fetched.cuh"
#include "common/moments.cuh"

template <typename A> struct Statistics {
  A mean, rstd;

  static __device__ __forceinline__ Statistics of(const Moments<A>& row, A eps) { return {row.mean, row.rstd(eps)}; }
  static __device__ __forceinline__ Statistics about_zero(A squares, long long size, A eps) {
    return {A(0), inverse_sqrt(squares / size + eps)};
  }

  template <bool CENTRED> __device__ __forceinline__ A centred(A x) const { return CENTRED ? x - mean : x; }
  template <bool CENTRED> __device__ __forceinline__ A xhat(A x) const { return centred<CENTRED>(x) * rstd; }
};

// The moments of this thread's elements of a tile of packs get(k), whose pads are 0.
template <int UNROLL, int K, int W, bool VECTORS, typename Get>
__device__ __forceinline__ auto own_moments(const Tile<K, W, VECTORS>& tile, Get get) {
  constexpr int CHAINS = W < 4 ? W : 4;  // sums that do not wait for each other
  auto pack = get(0);
  using A = decltype(pack[0]);
  A first = A(0);
  int count = 0;
#pragma unroll
  for (int e = 0; e < W; ++e) first += pack[e];
  if constexpr (!VECTORS) tile.each_of(0, [&](int) { ++count; });
  const A about = VECTORS ? first / W : first / A(count ? count : 1);
  count = 0;
  Pair<A> sums[CHAINS] = {};
#pragma unroll(UNROLL)
  for (int k = 0; k < K; ++k) {
    if (k > 0) pack = get(k);
    tile.each_of(k, [&](int e) {
      const A apart = pack[e] - about;
      sums[e % CHAINS].first += apart, sums[e % CHAINS].second += apart * apart, ++count;
    });
  }
#pragma unroll
  for (int i = 1; i < CHAINS; ++i) sums[0] = sums[0] + sums[i];
  return Moments<A>::of(A(count), about, sums[0].first, sums[0].second);
}

// The moments of those of `lanes` neighbours of a warp, a power of two. All 32 lanes take part.
template <typename A> __device__ __forceinline__ Moments<A> merge_lanes(const Moments<A>& own, int lanes) {
  const A about = __shfl_sync(kFullMask, own.mean, 0, lanes), sum = own.count * (own.mean - about);
  Moments<A> all = {own.count, sum, own.square + sum * (own.mean - about)};
  for (int offset = lanes / 2; offset > 0; offset /= 2) {
    all.count += shuffle_xor(all.count, offset), all.mean += shuffle_xor(all.mean, offset);
    all.square += shuffle_xor(all.square, offset);
  }
  return Moments<A>::of(all.count, about, all.mean, all.square);
}

// Every thread of a row gets the moments of all its elements: as row_reduce.
template <typename A> __device__ __forceinline__ Moments<A> row_moments(Moments<A> own, Moments<A>* shared) {
  if (blockDim.x < kWarp) return merge_lanes(own, blockDim.x);
  own = merge_lanes(own, kWarp);
  if (blockDim.x == kWarp) return own;
  const int lane = threadIdx.x % kWarp;
  __syncthreads();
  if (lane == 0) shared[threadIdx.x / kWarp] = own;
  __syncthreads();
  return merge_lanes(lane < blockDim.x / kWarp ? shared[lane] : Moments<A>{}, kWarp);
}

// The tensors of forward. weight and bias may be null; residual and summed are null but in add_rms_norm, mean unless
// CENTRED.
template <typename T> struct Forward {
  const T *x, *residual, *weight, *bias;
  T *summed, *y;
  acc_t<T>*mean, *rstd;
  long long rows, size;
  acc_t<T> eps;

  __device__ __forceinline__ bool vectors() const {
    return vectors_fit<kVecWidth<T>>(size, x, residual, weight, bias, summed, y);
  }

  __device__ __forceinline__ void keep(long long row, const Statistics<acc_t<T>>& of) const {
    if (mean) mean[row] = of.mean;
    rstd[row] = of.rstd;
  }
};

// What the threads of a block share in forward.
template <typename A> struct Shared {
  A sums[kWarp];
  Moments<A> moments[kWarp];
};

// A factor or a summand for each column; without it, 1 or 0.
template <int K, bool VECTORS, typename T>
__device__ __forceinline__ Pack<T> load_parameter(const Tile<K, kVecWidth<T>, VECTORS>& tile, const T* parameter, int k,
                                                  float otherwise) {
  if (parameter) return load_per_column(tile, parameter, k, T());
  return Pack<T>::filled(from_acc<T>(otherwise));
}

// y for pack k of the tile that begins with column `start`; y points to that.
template <bool CENTRED, int K, bool VECTORS, typename T>
__device__ __forceinline__ void store_normalised(const Tile<K, kVecWidth<T>, VECTORS>& tile, const Forward<T>& to, T* y,
                                                 long long start, int k, const Pack<T>& x,
                                                 const Statistics<acc_t<T>>& of) {
  const Pack<T> w = load_parameter(tile, to.weight ? to.weight + start : nullptr, k, 1);
  if constexpr (CENTRED) {
    const Pack<T> b = load_parameter(tile, to.bias ? to.bias + start : nullptr, k, 0);
    store_pack(tile, y, k, [&](int e) { return of.template xhat<true>(x[e]) * w[e] + b[e]; });
  } else {
    store_pack(tile, y, k, [&](int e) { return of.template xhat<false>(x[e]) * w[e]; });
  }
}

// x + residual, rounded; and to `summed`.
template <int K, bool VECTORS, typename T>
__device__ __forceinline__ Pack<T> add_residual(const Tile<K, kVecWidth<T>, VECTORS>& tile, const Pack<T>& x,
                                                const Pack<T>& residual, T* summed, int k) {
  Pack<T> sum;
  round_to_words<T>(sum.word, 0, [&](int e) { return x[e] + residual[e]; });
  store_words_of(tile, summed, k, sum.word);
  return sum;
}

// Of this thread's elements, the sum of the squares.
template <int K, int W, typename Get> __device__ __forceinline__ auto own_squares(Get get) {
  decltype(get(0)) packs[K];
#pragma unroll
  for (int k = 0; k < K; ++k) packs[k] = get(k);
  return reduce_elements<Sum, K, W>([&](int k, int e) { return packs[k][e] * packs[k][e]; });
}

// The statistics of a row of packs get(k), whose pads are 0.
template <bool CENTRED, int K, bool VECTORS, typename T, typename Get, typename A = acc_t<T>>
__device__ __forceinline__ Statistics<A> statistics(const Tile<K, kVecWidth<T>, VECTORS>& tile, const Forward<T>& to,
                                                    Get get, Shared<A>& shared) {
  if constexpr (CENTRED) {
    return Statistics<A>::of(row_moments(own_moments<VECTORS ? K : 1>(tile, get), shared.moments), to.eps);
  } else {
    const A squares = row_reduce<Sum>(own_squares<K, kVecWidth<T>>(get), shared.sums);
    return Statistics<A>::about_zero(squares, to.size, to.eps);
  }
}

// See norm_rows.
template <bool CENTRED, int TENSORS, int K, bool VECTORS, typename T>
__device__ __forceinline__ void norm_rows_of(const Forward<T>& to, bool two, Shared<acc_t<T>>& shared) {
  using Row = Tile<K, kVecWidth<T>, VECTORS>;
  const auto fetched = Fetched<TENSORS, K, T>::of_thread();
  const auto fetch = [&](long long row, int stage) {
    const Row tile = Row::at(row, to.rows, to.size);
    fetched.fetch(tile, to.x + row * to.size, stage, 0);
    if (TENSORS > 1) fetched.fetch(tile, to.residual + row * to.size, stage, 1);
  };
  const auto normalise = [&](long long row, int stage) {
    const Row tile = Row::at(row, to.rows, to.size);
    const long long at = row * to.size;
    fetched.settle(tile, stage);
    if constexpr (TENSORS > 1) {
#pragma unroll(VECTORS ? K : 1)
      for (int k = 0; k < K; ++k) {
        const Pack<T> x = fetched.get(stage, 0, k), residual = fetched.get(stage, 1, k);
        fetched.put(add_residual(tile, x, residual, to.summed + at, k), stage, 0, k);
      }
    }
    const auto of = statistics<CENTRED>(tile, to, [&](int k) { return fetched.get(stage, 0, k); }, shared);
#pragma unroll(VECTORS ? K : 1)
    for (int k = 0; k < K; ++k) {
      store_normalised<CENTRED>(tile, to, to.y + at, 0, k, fetched.get(stage, 0, k), of);
    }
    if (threadIdx.x == 0 && row < to.rows) to.keep(row, of);
  };
  const long long first = blockIdx.x * (long long)blockDim.y + threadIdx.y, stride = gridDim.x * (long long)blockDim.y;
  each_fetched(first, threadIdx.y, stride, to.rows, two, fetch, normalise);
}

// Rows held by a block, each read once. Grid: any. Block: see rows.cuh; K packs of each thread are a row. Shared memory:
// see Fetched, with as many stages as said; TENSORS are x and, in add_rms_norm, residual. Threads own whole packs of x and
// y. mean and rstd are kept for backward, a number per row.
template <bool CENTRED, int TENSORS, int K, typename T>
__device__ __forceinline__ void norm_rows(const Forward<T>& to, int stages) {
  __shared__ Shared<acc_t<T>> shared;
  if (to.vectors()) norm_rows_of<CENTRED, TENSORS, K, true>(to, stages == 2, shared);
  else norm_rows_of<CENTRED, TENSORS, K, false>(to, stages == 2, shared);
}

// See norm_wide: one row, read twice, the second time from its end: what was read last is still in cache.
template <bool CENTRED, int K, bool VECTORS, typename T, typename A = acc_t<T>>
__device__ __forceinline__ Statistics<A> norm_wide_row(const Forward<T>& to, long long row, Shared<A>& shared) {
  using Part = Tile<K, kVecWidth<T>, VECTORS>;
  const int parts = Part::count(to.size);
  const T *x = to.x + row * to.size, *source = to.residual ? to.summed + row * to.size : x;
  Pack<T> packs[K], residual[K];
  const auto start = [](int c) { return c * (long long)Part::capacity(); };
  const auto load = [&](const Part& part, const T* from) { load_row(part, from, from_acc<T>(0), packs); };
  const auto get = [&](int k) { return packs[k]; };
  A squares = A(0);
  Moments<A> moments = {};
  for (int c = 0; c < parts; ++c) {
    const Part part = Part::at(row, to.rows, to.size, c);
    load(part, x + start(c));
    if (to.residual) {
      load_row(part, to.residual + row * to.size + start(c), from_acc<T>(0), residual);
#pragma unroll
      for (int k = 0; k < K; ++k) {
        packs[k] = add_residual(part, packs[k], residual[k], to.summed + row * to.size + start(c), k);
      }
    }
    if constexpr (CENTRED) moments.merge(own_moments<K>(part, get));
    else squares += own_squares<K, kVecWidth<T>>(get);
  }
  Statistics<A> of;
  if constexpr (CENTRED) of = Statistics<A>::of(row_moments(moments, shared.moments), to.eps);
  else of = Statistics<A>::about_zero(block_reduce<Sum>(squares, shared.sums), to.size, to.eps);
  for (int c = parts - 1; c >= 0; --c) {
    const Part part = Part::at(row, to.rows, to.size, c);
    load(part, source + start(c));
#pragma unroll
    for (int k = 0; k < K; ++k) {
      store_normalised<CENTRED>(part, to, to.y + row * to.size + start(c), start(c), k, packs[k], of);
    }
  }
  return of;
}

// As norm_rows, for rows too long for registers. Block: (a multiple of 32, 1).
template <bool CENTRED, typename T> __device__ __forceinline__ void norm_wide(const Forward<T>& to) {
  __shared__ Shared<acc_t<T>> shared;
  const bool vectors = to.vectors();
  for (long long row = blockIdx.x; row < to.rows; row += gridDim.x) {
    const auto of =
        vectors ? norm_wide_row<CENTRED, 4, true>(to, row, shared) : norm_wide_row<CENTRED, 2, false>(to, row, shared);
    if (threadIdx.x == 0) to.keep(row, of);
  }
}
