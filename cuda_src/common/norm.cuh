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

// The mean of `count` numbers from the sum of what each is times `scale`, a power of two: such a sum stays in range.
template <typename T> struct Mean {
  using A = acc_t<T>;
  A count, scale, share;  // share: 1 / count

  // A reciprocal of a half type is of the precision that its results show.
  __device__ __forceinline__ explicit Mean(int number)
      : count(A(number)), scale(__int_as_float((127 - 31 + __clz(number)) << 23)),
        share(sizeof(T) == 2 ? A(__fdividef(1.f, float(count))) : A(1) / count) {}

  __device__ __forceinline__ A operator()(A scaled) const {
    const A whole = count * scale;
    if constexpr (sizeof(T) > 2) return scaled / whole;
    const A guess = scaled * (share / scale);
    return fma(fma(-guess, whole, scaled), share / scale, guess);
  }
  // Of a sum of numbers as they are.
  __device__ __forceinline__ A of_all(A sum) const { return sizeof(T) == 2 ? sum * share : sum / count; }
};

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

// What has been computed is kept: else the compiler computes it again wherever it is needed.
#ifndef LAB_NOKEEP
__device__ __forceinline__ void keep(float& value) { asm volatile("" : "+f"(value)); }
__device__ __forceinline__ void keep(double& value) { asm volatile("" : "+d"(value)); }
#else
__device__ __forceinline__ void keep(float& value) { }
__device__ __forceinline__ void keep(double& value) { }
#endif

// The statistics of a row of packs get(k), whose pads are 0.
template <bool CENTRED, int K, bool VECTORS, typename T, typename Get, typename Sums, typename A = acc_t<T>>
__device__ __forceinline__ Statistics<A> statistics(const Tile<K, kVecWidth<T>, VECTORS>& tile, const Forward<T>& to,
                                                    Get get, Sums& sums) {
  constexpr int W = kVecWidth<T>;
  const Mean<T> mean_of(int(to.size));
  A parts[W] = {}, mean = A(0);  // of W sums that do not wait for each other
  if constexpr (CENTRED) {
#pragma unroll
    for (int k = 0; k < K; ++k) {
      const Pack<T> x = get(k);
#pragma unroll
      for (int e = 0; e < W; ++e) parts[e] = fma(x[e], mean_of.scale, parts[e]);
    }
    mean = mean_of(sums.add(tree_sum(parts)));
#pragma unroll
    for (int e = 0; e < W; ++e) parts[e] = A(0);
  }
#pragma unroll
  for (int k = 0; k < K; ++k) {
    const Pack<T> x = get(k);
    const auto square = [&](int e) {
      const A apart = x[e] - mean;
      parts[e] = fma(apart, apart, parts[e]);
    };
    if constexpr (CENTRED) {
      tile.each_of(k, square);
    } else {
#pragma unroll
      for (int e = 0; e < W; ++e) square(e);
    }
  }
  return {mean, rstd_of<T>(mean_of.of_all(sums.add(tree_sum(parts))) + to.eps)};
}

// Rows held by a block, each read once. Grid: any; a multiple of W where not VECTORS. Block: see rows.cuh; K packs of each
// thread are a row. Shared memory: see Fetched, with as many stages as said; TENSORS are x and, in add_rms_norm, residual.
// Threads own whole packs of x and y. mean and rstd are kept for backward, a number per row. VECTORS: whether size is a
// multiple of W, and the parameters begin at 16-byte boundaries; else threads keep what they use of the parameters, which
// begins alike within a pack in every W-th row.
template <bool CENTRED, int TENSORS, int K, bool VECTORS, typename T, typename A = acc_t<T>>
__device__ __forceinline__ void norm_rows(const Forward<T>& to, int stages) {
  constexpr int W = kVecWidth<T>;
  using Sums = RowSums<A, 1, false>;
  using Row = Tile<K, W, VECTORS>;
  __shared__ typename Sums::Room room;
  Sums sums(room);
  const int period = VECTORS ? 1 : W;
  const long long stride = gridDim.x * (long long)blockDim.y, own = threadIdx.y * (long long)period;
  const long long first = (VECTORS ? blockIdx.x * (long long)blockDim.y
                                   : blockIdx.x / period * blockDim.y * (long long)period + blockIdx.x % period) + own;
  const Row columns = Row::at(first, first + 1, to.size);
  const auto fetched = Fetched<TENSORS, K, T>::of_thread(stages, VECTORS ? 0 : 2);
  // the places of the parameters, behind the stages
  const auto parameter = [&](int which, int k) { return fetched.slot(stages, 0, which * K + k); };
  if constexpr (!VECTORS) {
#pragma unroll 1
    for (int k = 0; k < K; ++k) {
      const Pack<T> w = load_parameter(columns, to.weight, k, 1), b = load_parameter(columns, to.bias, k, 0);
      *parameter(0, k) = make_uint4(w.word[0], w.word[1], w.word[2], w.word[3]);
      if (CENTRED) *parameter(1, k) = make_uint4(b.word[0], b.word[1], b.word[2], b.word[3]);
    }
  }
  const auto held = [&](int which, int k) { return load_aligned(reinterpret_cast<const T*>(parameter(which, k))); };
  const auto fetch = [&](long long row, int stage) {
    const Row tile = columns.of(row, to.rows);
    fetched.fetch(tile, to.x + row * to.size, stage, 0);
    if (TENSORS > 1) fetched.fetch(tile, to.residual + row * to.size, stage, 1);
  };
  const auto normalise = [&](long long row, int stage) {
    const Row tile = columns.of(row, to.rows);
    const long long at = row * to.size;
    fetched.settle(tile, stage);
    if constexpr (TENSORS > 1) {
#pragma unroll
      for (int k = 0; k < K; ++k) {
        const Pack<T> x = fetched.get(stage, 0, k), residual = fetched.get(stage, 1, k);
        const Pack<T> sum = rounded_sum(x, residual);
        fetched.put(sum, stage, 0, k);
        if (tile.all(tile.index(k, 0))) {
          store_words(to.summed + at + tile.index(k, 0), sum.word[0], sum.word[1], sum.word[2], sum.word[3]);
        }
      }
      fetched.finish(tile, to.summed + at, stage);
    }
    const auto of = statistics<CENTRED>(tile, to, [&](int k) { return fetched.get(stage, 0, k); }, sums);
#pragma unroll
    for (int k = 0; k < K; ++k) {
      const Pack<T> x = fetched.get(stage, 0, k), w = VECTORS ? load_parameter(tile, to.weight, k, 1) : held(0, k);
      if constexpr (CENTRED) {
        const Pack<T> b = VECTORS ? load_parameter(tile, to.bias, k, 0) : held(1, k);
        fetched.store(tile, to.y + at, stage, k, [&](int e) { return of.template xhat<true>(x[e]) * w[e] + b[e]; });
      } else {
        fetched.store(tile, to.y + at, stage, k, [&](int e) { return of.template xhat<false>(x[e]) * w[e]; });
      }
    }
    fetched.finish(tile, to.y + at, stage);
    if (threadIdx.x == 0 && row < to.rows) to.keep(row, of);
  };
  each_fetched(first, own, stride, to.rows, stages == 2, fetch, normalise);
}

// See norm_wide: one row, read twice, the second time from its end: what was read last is still in cache.
template <bool CENTRED, int K, bool VECTORS, typename T, typename A = acc_t<T>>
__device__ __forceinline__ Statistics<A> norm_wide_row(const Forward<T>& to, long long row, Moments<A>* shared) {
  using Part = Tile<K, kVecWidth<T>, VECTORS>;
  const int parts = Part::count(to.size);
  Pack<T> packs[K], residual[K];
  const auto start = [](int c) { return c * (long long)Part::capacity(); };
  const auto load = [&](const Part& part, long long at) {
    load_row(part, to.x + at, from_acc<T>(0), packs);
    if (!to.residual) return;
    load_row(part, to.residual + at, from_acc<T>(0), residual);
#pragma unroll
    for (int k = 0; k < K; ++k) packs[k] = rounded_sum(packs[k], residual[k]);
  };
  const auto get = [&](int k) { return packs[k]; };
  A squares = A(0);
  Moments<A> moments = {};
  for (int c = 0; c < parts; ++c) {
    const Part part = Part::at(row, to.rows, to.size, c);
    load(part, row * to.size + start(c));
    if constexpr (CENTRED) moments.merge(own_moments<K>(part, get));
    else squares += reduce_elements<Sum, K, kVecWidth<T>>([&](int k, int e) { return packs[k][e] * packs[k][e]; });
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
    load(part, row * to.size + start(c));
#pragma unroll
    for (int k = 0; k < K; ++k) {
      if (to.residual) store_words_of(part, to.summed + row * to.size + start(c), k, packs[k].word);
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
