// Sums over the rows of a block of (x, y) threads, in a fixed order.
#pragma once

#include "common/vec.cuh"

constexpr int kSumThreads = 256;

// W neighbours at once where `aligned`, else one by one.
template <typename T, int W> __device__ __forceinline__ Vec<T, W> load_some(const T* from, bool aligned) {
  if (aligned) return load_vec<T, W>(from);
  Vec<T, W> result;
#pragma unroll
  for (int k = 0; k < W; ++k) result.data[k] = from[k];
  return result;
}

template <typename T, int W> __device__ __forceinline__ void store_some(T* to, const Vec<T, W>& value, bool aligned) {
  if (aligned) return store_vec<T, W>(to, value);
#pragma unroll
  for (int k = 0; k < W; ++k) to[k] = value.data[k];
}

// The sum over threadIdx.y, a tree; threads of threadIdx.y = 0 have it. blockDim.y is a power of two; `shared` holds
// kSumThreads * W values. All threads take part.
template <int W> __device__ __forceinline__ void sum_over_y(double (&sum)[W], double* shared) {
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
  for (int half = blockDim.y / 2; half > 0; half /= 2) {
    __syncthreads();
#pragma unroll
    for (int k = 0; k < W; ++k) shared[k * kSumThreads + thread] = sum[k];
    __syncthreads();
    if (threadIdx.y < half) {
#pragma unroll
      for (int k = 0; k < W; ++k) sum[k] += shared[k * kSumThreads + thread + half * blockDim.x];
    }
  }
}

template <int W, typename A>
__device__ __forceinline__ void store_sum_over_y(const A (&sum)[W], A* to, bool owns, double* shared) {
  double total[W];
#pragma unroll
  for (int k = 0; k < W; ++k) total[k] = sum[k];
  sum_over_y<W>(total, shared);
  if (threadIdx.y > 0 || !owns) return;
#pragma unroll
  for (int k = 0; k < W; ++k) to[k] = total[k];
}
