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

// x + residual, rounded; and to `summed`.
template <int K, bool VECTORS, typename T>
__device__ __forceinline__ Pack<T> add_residual(const Tile<K, kVecWidth<T>, VECTORS>& tile, const Pack<T>& x,
                                                const Pack<T>& residual, T* summed, int k) {
  Pack<T> sum;
  round_to_words<T>(sum.word, 0, [&](int e) { return x[e] + residual[e]; });
  store_words_of(tile, summed, k, sum.word);
  return sum;
}

template <int W, typename A> __device__ __forceinline__ A tree_sum(const A (&parts)[W]) {
  return reduce_elements<Sum, 1, W>([&](int, int e) { return parts[e]; });
}

// Of this thread's elements, the sum of the squares.
template <int K, int W, typename Get> __device__ __forceinline__ auto own_squares(Get get) {
  decltype(get(0)) packs[K];
#pragma unroll
  for (int k = 0; k < K; ++k) packs[k] = get(k);
  return reduce_elements<Sum, K, W>([&](int k, int e) { return packs[k][e] * packs[k][e]; });
}

// What has been computed is kept: else the compiler computes it again wherever it is needed.
__device__ __forceinline__ void keep(float& value) { asm volatile("" : "+f"(value)); }
__device__ __forceinline__ void keep(double& value) { asm volatile("" : "+d"(value)); }

// The statistics of a row, of which this thread has `values`, in packs whose pads are 0; where CENTRED, these become what
// they differ from the mean by.
template <bool CENTRED, int K, int W, bool VECTORS, typename T, typename Sums, typename A = acc_t<T>>
__device__ __forceinline__ Statistics<A> statistics(const Tile<K, W, VECTORS>& tile, const Forward<T>& to,
                                                    A (&values)[K][W], Sums& sums) {
  const A count = A(int(to.size));
  A parts[W] = {}, mean = A(0);  // of W sums that do not wait for each other
  if constexpr (CENTRED) {
    const A scale = scale_for<A>(int(to.size));
    each_element<K, W>([&](int k, int e) { parts[e] = fma(values[k][e], scale, parts[e]); });
    mean = sums.add(tree_sum(parts)) / (count * scale);
    each_element<K, W>([&](int k, int e) { values[k][e] -= mean, keep(values[k][e]); });
#pragma unroll
    for (int e = 0; e < W; ++e) parts[e] = A(0);
#pragma unroll
    for (int k = 0; k < K; ++k) tile.each_of(k, [&](int e) { parts[e] = fma(values[k][e], values[k][e], parts[e]); });
  } else {
    each_element<K, W>([&](int k, int e) { parts[e] = fma(values[k][e], values[k][e], parts[e]); });
  }
  return {mean, rstd_of<T>(sums.add(tree_sum(parts)) / count + to.eps)};
}

// What this thread uses of weight and bias, in dynamic shared memory: 16 K bytes for each of the two and each thread.
template <int K, typename T> struct HeldParameters {
  uint4* mine;

  static __device__ __forceinline__ HeldParameters of_thread() {
    extern __shared__ uint4 held[];
    return {held + threadIdx.y * blockDim.x + threadIdx.x};
  }
  __device__ __forceinline__ uint4* slot(int which, int k) const {
    return mine + (which * K + k) * (blockDim.x * blockDim.y);
  }
  __device__ __forceinline__ void put(int which, int k, const Pack<T>& pack) const {
    *slot(which, k) = make_uint4(pack.word[0], pack.word[1], pack.word[2], pack.word[3]);
  }
  __device__ __forceinline__ Pack<T> get(int which, int k) const {
    return load_aligned(reinterpret_cast<const T*>(slot(which, k)));
  }
};

// Rows held in registers, each read once. Grid: any; a multiple of W where not VECTORS. Block: see rows.cuh; K packs of each
// thread are a row, or with K > 1 of each thread of a cluster. TENSORS are x and, in add_rms_norm, residual. Threads own
// whole packs of x and y. mean and rstd are kept for backward, a number per row. Unless VECTORS, when size and all tensors
// are to fit, threads keep what they use of the parameters, which begins alike within a pack in every W-th row; shared
// memory: see HeldParameters.
template <bool CENTRED, int TENSORS, int K, bool VECTORS, typename T, typename A = acc_t<T>>
__device__ __forceinline__ void norm_rows(const Forward<T>& to) {
  constexpr int W = kVecWidth<T>;
  using Sums = RowSums<A, 1, (K > 1)>;
  using Row = Tile<K, W, VECTORS>;
  __shared__ typename Sums::Room room;
  Sums sums(room);
  const int period = VECTORS ? 1 : W, part = sums.part();
  const long long group = sums.group(), stride = sums.groups() * blockDim.y, own = threadIdx.y * (long long)period;
  const long long first = group / period * blockDim.y * period + group % period + own;
  const long long start = part * (long long)Row::capacity();
  const T *weight = to.weight ? to.weight + start : nullptr, *bias = to.bias ? to.bias + start : nullptr;
  const auto held = HeldParameters<K, T>::of_thread();
  if constexpr (!VECTORS) {
    const Row columns = Row::at(first, first + 1, to.size, part);
#pragma unroll 1
    for (int k = 0; k < K; ++k) {
      held.put(0, k, load_parameter(columns, weight, k, 1));
      if (CENTRED) held.put(1, k, load_parameter(columns, bias, k, 0));
    }
  }
  for (long long row = first; row - own < to.rows; row += stride) {
    const Row tile = Row::at(row, to.rows, to.size, part);
    const long long at = row * to.size + start;
    Pack<T> x[K];
    load_row_compact(tile, to.x + at, T(), x);
    if constexpr (TENSORS > 1) {
      Pack<T> residual[K];
      load_row_compact(tile, to.residual + at, T(), residual);
#pragma unroll
      for (int k = 0; k < K; ++k) x[k] = add_residual(tile, x[k], residual[k], to.summed + at, k);
    }
    A values[K][W];
    each_element<K, W>([&](int k, int e) { values[k][e] = x[k][e], keep(values[k][e]); });
    const auto of = statistics<CENTRED>(tile, to, values, sums);
#pragma unroll
    for (int k = 0; k < K; ++k) {
      const Pack<T> w = VECTORS ? load_parameter(tile, weight, k, 1) : held.get(0, k);
      if constexpr (CENTRED) {
        const Pack<T> b = VECTORS ? load_parameter(tile, bias, k, 0) : held.get(1, k);
        store_pack(tile, to.y + at, k, [&](int e) { return values[k][e] * of.rstd * w[e] + b[e]; });
      } else {
        store_pack(tile, to.y + at, k, [&](int e) { return values[k][e] * of.rstd * w[e]; });
      }
    }
    if (threadIdx.x == 0 && part == 0 && row < to.rows) to.keep(row, of);
  }
}

// See norm_wide: one row, read twice, the second time from its end: what was read last is still in cache.
template <bool CENTRED, int K, bool VECTORS, typename T, typename A = acc_t<T>>
__device__ __forceinline__ Statistics<A> norm_wide_row(const Forward<T>& to, long long row, Moments<A>* shared) {
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
  if constexpr (CENTRED) {
    const Moments<A> all = block_merge(moments, shared);
    of = {all.mean, all.rstd(to.eps)};
  } else {
    of = {A(0), inverse_sqrt(block_reduce<Sum>(squares, &shared->count) / to.size + to.eps)};
  }
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
  __shared__ Moments<acc_t<T>> shared[kWarp];
  const bool vectors = to.vectors();
  for (long long row = blockIdx.x; row < to.rows; row += gridDim.x) {
    const auto of =
        vectors ? norm_wide_row<CENTRED, 4, true>(to, row, shared) : norm_wide_row<CENTRED, 2, false>(to, row, shared);
    if (threadIdx.x == 0) to.keep(row, of);
  }
}
