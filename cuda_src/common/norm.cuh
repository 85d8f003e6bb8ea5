// What the normalisations share: statistics of a row, and forward. CENTRED: about the mean, as layer_norm; else about 0,
// as rms_norm. backward is in norm_bwd.cuh.
//
// The variance is summed over centred values: E[x^2] - mean^2 cancels when |mean| >> std. What is left of their sum,
// which would be 0 were the mean exact, corrects the mean: an error there weighs |mean| / std times as much in xhat.
#pragma once

#include "common/fetched.cuh"

// 1 / sqrt(value), rounded once: an error in rstd is the same in all of a row, and adds up in grad_weight.
template <typename A> __device__ __forceinline__ A inverse_sqrt(A value) {
  const A guess = A(1) / sqrt(value), high = value * guess, low = fma(value, guess, -high);
  const A left = fma(-high, guess, A(1)) - low * guess;
  return isfinite(left) ? guess + A(0.5) * guess * left : guess;
}

template <typename A> struct Moments {
  A mean, rstd;

  // Of values centred about `mu`: the mean, corrected, and the variance about it.
  static __device__ __forceinline__ Moments about(A mu, Pair<A> centred, long long size, A eps) {
    const A left = centred.first / size, about_mu = centred.second / size;
    const A variance = isfinite(about_mu) ? about_mu - left * left : about_mu;  // inf - inf would be NaN
    return {mu + left, inverse_sqrt((variance < A(0) ? A(0) : variance) + eps)};
  }

  static __device__ __forceinline__ Moments about_zero(A squares, long long size, A eps) {
    return {A(0), inverse_sqrt(squares / size + eps)};
  }

  template <bool CENTRED> __device__ __forceinline__ A xhat(A x) const { return (CENTRED ? x - mean : x) * rstd; }
};

// x - mu and its square, added to their sums.
template <typename A> __device__ __forceinline__ void add_centred(A x, A mu, Pair<A>& sum) {
  const A centred = x - mu;
  sum.first += centred, sum.second += centred * centred;
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

  __device__ __forceinline__ void keep(long long row, const Moments<acc_t<T>>& of) const {
    if (mean) mean[row] = of.mean;
    rstd[row] = of.rstd;
  }
};

// What the threads of a block share in forward.
template <typename A> struct Shared {
  A sums[kWarp];
  Pair<A> moments[kWarp];
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
                                                 const Moments<acc_t<T>>& of) {
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

// The moments of a row of packs get(k), whose pads are 0.
template <bool CENTRED, int K, bool VECTORS, typename T, typename Get, typename A = acc_t<T>>
__device__ __forceinline__ Moments<A> moments(const Tile<K, kVecWidth<T>, VECTORS>& tile, const Forward<T>& to, Get get,
                                              Shared<A>& shared) {
  Pack<T> packs[K];
#pragma unroll
  for (int k = 0; k < K; ++k) packs[k] = get(k);
  const A own = reduce_elements<Sum, K, kVecWidth<T>>([&](int k, int e) {
    const A x = packs[k][e];
    return CENTRED ? x : x * x;
  });
  const A sum = row_reduce<Sum>(own, shared.sums);
  if constexpr (!CENTRED) return Moments<A>::about_zero(sum, to.size, to.eps);
  const A mu = sum / to.size;
  Pair<A> centred = {};
#pragma unroll(VECTORS ? K : 1)
  for (int k = 0; k < K; ++k) {
    Pack<T> pack = get(k);
    pack.fold();
    tile.each_of(k, [&](int e) { add_centred(pack[e], mu, centred); });
  }
  return Moments<A>::about(mu, row_reduce<Sum>(centred, shared.moments), to.size, to.eps);
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
    const auto of = moments<CENTRED>(tile, to, [&](int k) { return fetched.get(stage, 0, k); }, shared);
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

// See norm_wide: one row, read anew for each pass, every second time from its end: what was read last is still in cache.
template <bool CENTRED, int K, bool VECTORS, typename T, typename A = acc_t<T>>
__device__ __forceinline__ Moments<A> norm_wide_row(const Forward<T>& to, long long row, Shared<A>& shared) {
  using Part = Tile<K, kVecWidth<T>, VECTORS>;
  const int parts = Part::count(to.size);
  const T *x = to.x + row * to.size, *source = to.residual ? to.summed + row * to.size : x;
  Pack<T> packs[K], residual[K];
  const auto start = [](int c) { return c * (long long)Part::capacity(); };
  const auto load = [&](const Part& part, const T* from) { load_row(part, from, from_acc<T>(0), packs); };
  A sum = A(0);
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
    sum += reduce_elements<Sum, K, kVecWidth<T>>([&](int k, int e) {
      const A value = packs[k][e];
      return CENTRED ? value : value * value;
    });
  }
  sum = block_reduce<Sum>(sum, shared.sums);
  Moments<A> of = Moments<A>::about_zero(sum, to.size, to.eps);
  if constexpr (CENTRED) {
    const A mu = sum / to.size;
    Pair<A> centred = {};
    for (int c = parts - 1; c >= 0; --c) {
      const Part part = Part::at(row, to.rows, to.size, c);
      load(part, source + start(c));
      Pair<A> own = {};  // added up apart: in a very long row the sum so far is large
#pragma unroll
      for (int k = 0; k < K; ++k) part.each_of(k, [&](int e) { add_centred(packs[k][e], mu, own); });
      centred.first += own.first, centred.second += own.second;
    }
    of = Moments<A>::about(mu, block_reduce<Sum>(centred, shared.moments), to.size, to.eps);
  }
  for (int i = 0; i < parts; ++i) {
    const int c = CENTRED ? i : parts - 1 - i;
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
