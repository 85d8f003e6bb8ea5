// What the normalisations over rows share: what a row is normalised by, the tensors of forward, and how y follows from
// them. CENTRED: about the mean, as layer_norm is; else about 0, as rms_norm is.
//
// Each form has a header of its own; cupyops/_dispatch/norm/norm.py says which rows take which.
//
//     thread_per_row.cuh       a few elements, off 16-byte boundaries: a thread has a row; backward too
//     sub_warp.cuh             up to 32 vectors: neighbouring lanes share a row, several rows at a time; backward too
//     block_forward.cuh        rows that a block holds: each is read once
//     block_backward.cuh       rows that a block, or a cluster, holds: each is read once
//     shared_memory.cuh        rows that only the shared memory of a block holds: each is read once
//     two_pass_forward.cuh     longer rows, and all of fp64: each is read twice
//     two_pass_backward.cuh    the same of backward
//
// Rows that are held have their mean and variance from two passes over what is held. Of longer rows each thread takes the
// moments of what it reads at a time, and merges them.
#pragma once

#include "common/reduce/welford.cuh"
#include "common/tile/row_tile.cuh"

template <typename A> struct RowStatistics {
  A mean, rstd;

  template <bool CENTRED> __device__ __forceinline__ A centred(A x) const { return CENTRED ? x - mean : x; }
  template <bool CENTRED> __device__ __forceinline__ A xhat(A x) const { return centred<CENTRED>(x) * rstd; }
  template <bool CENTRED> __device__ __forceinline__ A y(A x, A weight, A bias) const {
    return CENTRED ? xhat<true>(x) * weight + bias : xhat<false>(x) * weight;
  }
};

// 1 / sqrt(value). For half types the approximate instruction is as exact as their precision asks.
template <typename T> __device__ __forceinline__ acc_t<T> rstd_of(acc_t<T> value) {
  if constexpr (sizeof(T) == 2) return rsqrtf(value);
  else return inverse_sqrt(value);
}

// A power of two, at least 1 / count and less than twice that: a sum of `count` numbers that are scaled by it stays in
// range.
template <typename A> __device__ __forceinline__ A scale_for(int count) {
  return __int_as_float((127 - 31 + __clz(count)) << 23);
}

// The mean of `count` numbers x, from about = x_0 scale and sum = the sum of (x scale - about). It is in range where the
// numbers are, and the least numbers lose no more than a bit.
template <typename A> __device__ __forceinline__ A mean_about(A about, A sum, A count, A scale) {
  return A(2) * (about * (A(0.5) / scale) + sum / (A(2) * count * scale));
}

// The tensors of forward. weight and bias may be null; residual and summed are null but where a residual is added, mean
// unless CENTRED.
template <typename T> struct Forward {
  const T *x, *residual, *weight, *bias;
  T *summed, *y;
  acc_t<T>*mean, *rstd;
  long long rows, size;
  acc_t<T> eps;

  __device__ __forceinline__ bool aligned() const {
    return all_aligned<kVecWidth<T>>(size, x, residual, weight, bias, summed, y);
  }

  // For backward: a number of each for a row.
  __device__ __forceinline__ void save(long long row, const RowStatistics<acc_t<T>>& of) const {
    if (mean) mean[row] = of.mean;
    rstd[row] = of.rstd;
  }
};

// Vector k of a factor or a summand for each column; without that, of 1 or 0.
template <int K, bool ALIGNED, typename T>
__device__ __forceinline__ Vector<T> load_parameter(const Tile<K, kVecWidth<T>, ALIGNED>& tile, const T* parameter,
                                                    int k, float otherwise) {
  if (parameter) return load_per_column(tile, parameter, k, T());
  return Vector<T>::filled(from_acc<T>(otherwise));
}

// y for vector k of the tile that begins with column `start`, to which y points.
template <bool CENTRED, int K, bool ALIGNED, typename T>
__device__ __forceinline__ void store_normalised(const Tile<K, kVecWidth<T>, ALIGNED>& tile, const Forward<T>& to, T* y,
                                                 long long start, int k, const Vector<T>& x,
                                                 const RowStatistics<acc_t<T>>& of) {
  const Vector<T> w = load_parameter(tile, to.weight ? to.weight + start : nullptr, k, 1);
  const Vector<T> b = CENTRED ? load_parameter(tile, to.bias ? to.bias + start : nullptr, k, 0) : Vector<T>{};
  store_vector(tile, y, k, [&](int e) { return of.template y<CENTRED>(x[e], w[e], b[e]); });
}

template <int W, typename A> __device__ __forceinline__ A tree_sum(const A (&terms)[W]) {
  return reduce_elements<Sum, 1, W>([&](int, int e) { return terms[e]; });
}

// The sum of the squares of this thread's elements.
template <int K, int W, typename Get> __device__ __forceinline__ auto own_squares(Get get) {
  decltype(get(0)) vectors[K];
#pragma unroll
  for (int k = 0; k < K; ++k) vectors[k] = get(k);
  return reduce_elements<Sum, K, W>([&](int k, int e) { return vectors[k][e] * vectors[k][e]; });
}

template <typename T, typename F> __device__ __forceinline__ Vector<T> rounded(F f) {
  Vector<T> vector;
  round_to_words<T>(vector.word, 0, f);
  return vector;
}

template <typename T> __device__ __forceinline__ Vector<T> rounded_sum(const Vector<T>& a, const Vector<T>& b) {
  return rounded<T>([&](int e) { return a[e] + b[e]; });
}
