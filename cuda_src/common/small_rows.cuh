// Rows of a few elements, off 16-byte boundaries: a thread takes a row, or a column of several, out of shared memory, to which
// the rows of a block, which lie next to each other, are copied whole.
#pragma once

#include "common/async.cuh"
#include "common/vec.cuh"

constexpr int kSmallRows = 256;  // of a block, and threads

// `count` elements to shared memory, 16 bytes at a time where those fit: complete once wait_for_groups<0>() and a barrier
// have been passed.
template <typename T> __device__ __forceinline__ void fetch_all(T* shared, const T* from, int count) {
  constexpr int W = kVecWidth<T>;
  const int whole = is_aligned16(from) ? count & -W : 0;
  for (int i = threadIdx.x * W; i < whole; i += kSmallRows * W) fetch16(shared + i, from + i);
  for (int i = whole + threadIdx.x; i < count; i += kSmallRows) shared[i] = from[i];
}

template <typename T> __device__ __forceinline__ void store_all(T* to, const T* shared, int count) {
  constexpr int W = kVecWidth<T>;
  const int whole = is_aligned16(to) ? count & -W : 0;
  for (int i = threadIdx.x * W; i < whole; i += kSmallRows * W) {
    *reinterpret_cast<uint4*>(to + i) = *reinterpret_cast<const uint4*>(shared + i);
  }
  for (int i = whole + threadIdx.x; i < count; i += kSmallRows) to[i] = shared[i];
}

// f(u) for every u < U where u * step < left: in most blocks all, in which the compiler asks no more.
template <int U, typename F> __device__ __forceinline__ void each_of(int left, int step, F f) {
  if ((U - 1) * step < left) {
#pragma unroll
    for (int u = 0; u < U; ++u) f(u);
  } else {
#pragma unroll
    for (int u = 0; u < U; ++u) {
      if (u * step < left) f(u);
    }
  }
}
