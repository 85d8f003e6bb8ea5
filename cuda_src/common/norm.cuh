// What the normalisations share: statistics of a row, and forward. CENTRED: about the mean, as layer_norm; else about 0,
// as rms_norm. backward is in norm_bwd.cuh.
//
// Of rows that are held, mean and variance are of two passes; of longer ones each thread takes the moments of what it reads
// at a time.
#pragma once

#include "common/fetched.cuh"
#include "common/moments.cuh"
#include "common/row_sums.cuh"

template <typename A> struct Statistics {
  A mean, rstd;

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

// 1 / sqrt(value), of half types as exact as their precision asks.
template <typename T> __device__ __forceinline__ acc_t<T> rstd_of(acc_t<T> value) {
  if constexpr (sizeof(T) == 2) return rsqrtf(value);
  else return inverse_sqrt(value);
}

// A power of two, 1 / count or less than twice that: a sum of numbers so scaled stays in range.
template <typename A> __device__ __forceinline__ A scale_for(int count) {
  return __int_as_float((127 - 31 + __clz(count)) << 23);
}

// The mean of `count` numbers x from about = x_0 scale and the sum of x scale - about. It is in range where theirs is, and the
// least numbers lose no more than a bit.
template <typename A> __device__ __forceinline__ A mean_about(A about, A sum, A count, A scale) {
  return A(2) * (about * (A(0.5) / scale) + sum / (A(2) * count * scale));
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

template <int W, typename A> __device__ __forceinline__ A tree_sum(const A (&parts)[W]) {
  return reduce_elements<Sum, 1, W>([&](int, int e) { return parts[e]; });
}

template <typename T> __device__ __forceinline__ Pack<T> rounded_sum(const Pack<T>& a, const Pack<T>& b) {
  Pack<T> sum;
  round_to_words<T>(sum.word, 0, [&](int e) { return a[e] + b[e]; });
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
template <bool CENTRED, int K, bool VECTORS, typename T, typename Get, typename Sums, typename A = acc_t<T>>
__device__ __forceinline__ Statistics<A> statistics(const Tile<K, kVecWidth<T>, VECTORS>& tile, const Forward<T>& to,
                                                    Get get, Sums& sums) {
  const A count = A(int(to.size));
  if constexpr (!CENTRED) {
    return {A(0), rstd_of<T>(sums.add(own_squares<K, kVecWidth<T>>(get)) / count + to.eps)};
  } else {
    constexpr int W = kVecWidth<T>;
    const A scale = scale_for<A>(int(to.size));
    A parts[W] = {}, mean;
    if constexpr (K == 1) {  // about an element: of short rows that chance to be nearly constant the mean is then exact
      const Pack<T> x = get(0);
      const A about = __shfl_sync(kFullMask, x[0], 0, blockDim.x) * scale;
      tile.each_of(0, [&](int e) { parts[e] = fma(x[e], scale, -about); });
      mean = mean_about(about, sums.add(tree_sum(parts)), count, scale);
    } else {
#pragma unroll
      for (int k = 0; k < K; ++k) {
        const Pack<T> x = get(k);
#pragma unroll
        for (int e = 0; e < W; ++e) parts[e] = fma(x[e], scale, parts[e]);
      }
      mean = sums.add(tree_sum(parts)) / (count * scale);
    }
#pragma unroll
    for (int e = 0; e < W; ++e) parts[e] = A(0);
#pragma unroll
    for (int k = 0; k < K; ++k) {
      const Pack<T> x = get(k);
      tile.each_of(k, [&](int e) {
        const A apart = x[e] - mean;
        parts[e] = fma(apart, apart, parts[e]);
      });
    }
    return {mean, rstd_of<T>(sums.add(tree_sum(parts)) / count + to.eps)};
  }
}

// As norm_rows, about 0: rows are fetched into shared memory, see Fetched, with as many stages as said.
template <int TENSORS, int K, bool VECTORS, typename T, typename Sums>
__device__ __forceinline__ void norm_rows_fetched(const Forward<T>& to, int stages, Sums& sums) {
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
        const Pack<T> sum = rounded_sum(fetched.get(stage, 0, k), fetched.get(stage, 1, k));
        store_words_of(tile, to.summed + at, k, sum.word);
        fetched.put(sum, stage, 0, k);
      }
    }
    const auto of = statistics<false>(tile, to, [&](int k) { return fetched.get(stage, 0, k); }, sums);
#pragma unroll(VECTORS ? K : 1)
    for (int k = 0; k < K; ++k) store_normalised<false>(tile, to, to.y + at, 0, k, fetched.get(stage, 0, k), of);
    if (threadIdx.x == 0 && row < to.rows) to.keep(row, of);
  };
  const long long first = blockIdx.x * (long long)blockDim.y + threadIdx.y, stride = gridDim.x * (long long)blockDim.y;
  each_fetched(first, threadIdx.y, stride, to.rows, stages == 2, fetch, normalise);
}

// As norm_rows: rows in registers.
template <bool CENTRED, int K, bool VECTORS, typename T, typename Sums>
__device__ __forceinline__ void norm_rows_loaded(const Forward<T>& to, Sums& sums) {
  constexpr int W = kVecWidth<T>;
  using Row = Tile<K, W, VECTORS>;
  const int period = VECTORS ? 1 : W;  // rows so far apart begin alike within a pack
  const long long group = blockIdx.x, stride = gridDim.x * (long long)blockDim.y;
  const long long own = threadIdx.y * (long long)period;
  const long long first = group / period * blockDim.y * period + group % period + own;
  const auto held = Fetched<1, K, T>::of_thread();  // weight and bias, in place of two stages
  if constexpr (!VECTORS) {
    const Row columns = Row::at(first, first + 1, to.size);
#pragma unroll 1
    for (int k = 0; k < K; ++k) {
      held.put(load_parameter(columns, to.weight, k, 1), 0, 0, k);
      if (CENTRED) held.put(load_parameter(columns, to.bias, k, 0), 1, 0, k);
    }
  }
  for (long long row = first; row - own < to.rows; row += stride) {
    const Row tile = Row::at(row, to.rows, to.size);
    const long long at = row * to.size;
    Pack<T> x[K];
    load_row(tile, to.x + at, T(), x);
    const auto get = [&](int k) {
      x[k].fold();
      return x[k];
    };
    const auto of = statistics<CENTRED>(tile, to, get, sums);
#pragma unroll
    for (int k = 0; k < K; ++k) {
      const Pack<T> w = VECTORS ? load_parameter(tile, to.weight, k, 1) : held.get(0, 0, k);
      if constexpr (CENTRED) {
        const Pack<T> b = VECTORS ? load_parameter(tile, to.bias, k, 0) : held.get(1, 0, k);
        store_pack(tile, to.y + at, k, [&](int e) { return of.template xhat<true>(x[k][e]) * w[e] + b[e]; });
      } else {
        store_pack(tile, to.y + at, k, [&](int e) { return of.template xhat<false>(x[k][e]) * w[e]; });
      }
    }
    if (threadIdx.x == 0 && row < to.rows) to.keep(row, of);
  }
}

// Rows held by a block, each read once. Grid: any. Block: see rows.cuh; K packs of each thread are a row. TENSORS are x and,
// in add_rms_norm, residual. Threads own whole packs of x and y. mean and rstd are kept for backward, a number per row.
// VECTORS: whether all rows and tensors fit. Where `fetches`, shared memory as Fetched, with as many stages as said. Else
// rows go to registers, and unless VECTORS threads keep what they use of the parameters, which begins alike within a pack in
// every W-th row: the grid is a multiple of W, shared memory 32 K bytes for each thread.
template <bool CENTRED, int TENSORS, int K, bool VECTORS, typename T>
__device__ __forceinline__ void norm_rows(const Forward<T>& to, int stages) {
  constexpr bool fetches = !CENTRED && (VECTORS || TENSORS > 1);
  using Sums = RowSums<acc_t<T>, 1, false>;
  __shared__ typename Sums::Room room;
  Sums sums(room);
  if constexpr (fetches) norm_rows_fetched<TENSORS, K, VECTORS>(to, stages, sums);
  else norm_rows_loaded<CENTRED, K, VECTORS>(to, sums);
}

// See norm_wide: one row, read twice, the second time from its end: what was read last is still in cache.
template <bool CENTRED, int K, bool VECTORS, typename T, typename A = acc_t<T>>
__device__ __forceinline__ Statistics<A> norm_wide_row(const Forward<T>& to, long long row, Moments<A>* shared) {
  using Part = Tile<K, kVecWidth<T>, VECTORS>;
  const int parts = Part::count(to.size);
  Pack<T> packs[K], residual[K];
  const auto start = [](int c) { return c * (long long)Part::capacity(); };
  const auto load = [&](const Part& part, long long at, bool again) {
    const bool summed = VECTORS && again && to.residual;  // else packs have what other blocks may be about to write
    load_row(part, (summed ? to.summed : to.x) + at, from_acc<T>(0), packs);
    if (!to.residual || summed) return;
    load_row(part, to.residual + at, from_acc<T>(0), residual);
#pragma unroll
    for (int k = 0; k < K; ++k) packs[k] = rounded_sum(packs[k], residual[k]);
  };
  const auto store_sum = [&](const Part& part, int c) {
#pragma unroll
    for (int k = 0; k < K; ++k) store_words_of(part, to.summed + row * to.size + start(c), k, packs[k].word);
  };
  const auto get = [&](int k) { return packs[k]; };
  A squares = A(0);
  Moments<A> moments = {};
  for (int c = 0; c < parts; ++c) {
    const Part part = Part::at(row, to.rows, to.size, c);
    load(part, row * to.size + start(c), false);
    if (VECTORS && to.residual) store_sum(part, c);
    if constexpr (CENTRED) moments.merge(own_moments<K>(part, get));
    else squares += own_squares<K, kVecWidth<T>>(get);
  }
  Statistics<A> of;
  if constexpr (CENTRED) {
    const Moments<A> all = block_merge(moments, shared);
    of = {all.mean, all.rstd(to.eps)};
  } else {
    of = {A(0), inverse_sqrt(block_reduce<Sum>(squares, &shared->count) / to.size + to.eps)};
  }
  for (int c = parts - 1; c >= 0; --c) {
    const Part part = Part::at(row, to.rows, to.size, c);
    load(part, row * to.size + start(c), true);
    if (!VECTORS && to.residual) store_sum(part, c);
#pragma unroll
    for (int k = 0; k < K; ++k) {
      store_normalised<CENTRED>(part, to, to.y + row * to.size + start(c), start(c), k, packs[k], of);
    }
  }
  return of;
}

// As norm_rows, for rows too long for registers. Block: (a multiple of 32, 1).
template <bool CENTRED, typename T> __device__ __forceinline__ void norm_wide(const Forward<T>& to) {
  __shared__ Moments<acc_t<T>> shared[kWarp];
  const bool vectors = to.vectors();
  for (long long row = blockIdx.x; row < to.rows; row += gridDim.x) {
    const auto of =
        vectors ? norm_wide_row<CENTRED, 4, true>(to, row, shared) : norm_wide_row<CENTRED, 2, false>(to, row, shared);
    if (threadIdx.x == 0) to.keep(row, of);
  }
}
