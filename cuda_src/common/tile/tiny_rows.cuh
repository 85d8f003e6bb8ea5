// Rows of a few elements, off 16-byte boundaries: a thread takes a row, or a column of several, or some share a row, out of
// shared memory, to which the rows of a block, which lie next to each other, are copied whole.
#pragma once

#include "common/hw/cp_async.cuh"
#include "common/tile/row_tile.cuh"

constexpr int kSmallRows = 256;  // of a block, and threads
constexpr int kSmallUnits = 4;  // 16 bytes, under way in a thread

// `count` elements to shared memory, 16 bytes at a time where those fit: complete once wait_for_groups<0>() and a barrier
// have been passed. `thread` is the number in the block.
template <typename T>
__device__ __forceinline__ void fetch_all(T* shared, const T* from, int count, int thread = threadIdx.x) {
  constexpr int W = kVecWidth<T>;
  const int whole = is_aligned16(from) ? count & -W : 0;
  for (int i = thread * W; i < whole; i += kSmallRows * W) fetch16(shared + i, from + i);
  for (int i = whole + thread; i < count; i += kSmallRows) shared[i] = from[i];
}

template <typename T>
__device__ __forceinline__ void store_all(T* to, const T* shared, int count, int thread = threadIdx.x) {
  constexpr int W = kVecWidth<T>;
  const int whole = is_aligned16(to) ? count & -W : 0;
  for (int i = thread * W; i < whole; i += kSmallRows * W) {
    *reinterpret_cast<uint4*>(to + i) = *reinterpret_cast<const uint4*>(shared + i);
  }
  for (int i = whole + thread; i < count; i += kSmallRows) to[i] = shared[i];
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

// fetch_all() of what is read once and by nobody else: see load_once(). Complete once a barrier has been passed.
template <typename T> __device__ __forceinline__ void fetch_once(T* shared, const T* from, int count) {
  constexpr int W = kVecWidth<T>, U = kSmallUnits, step = kSmallRows * W;
  const int whole = is_aligned16(from) ? count & -W : 0;
  for (int i = threadIdx.x * W; i < whole; i += U * step) {
    uint4 held[U];
#pragma unroll
    for (int u = 0; u < U; ++u) {
      if (i + u * step < whole) held[u] = __ldcs(reinterpret_cast<const uint4*>(from + i + u * step));
    }
#pragma unroll
    for (int u = 0; u < U; ++u) {
      if (i + u * step < whole) *reinterpret_cast<uint4*>(shared + i + u * step) = held[u];
    }
  }
#pragma unroll 4
  for (int i = whole + threadIdx.x; i < count; i += kSmallRows) shared[i] = from[i];
}

// This thread's row of x [rows x size] in shared memory, as much of it as kSmallRows rows; null where there is none. Grid:
// ceil(rows / kSmallRows). Block: kSmallRows.
template <typename T> __device__ __forceinline__ const T* fetch_row(const T* x, long long rows, int size) {
  extern __shared__ uint4 dynamic[];
  T* all = reinterpret_cast<T*>(dynamic);
  const long long first = blockIdx.x * (long long)kSmallRows;
  const int count = int(rows - first < kSmallRows ? rows - first : kSmallRows);
  fetch_once(all, x + first * size, count * size);
  __syncthreads();
  return threadIdx.x < count ? all + threadIdx.x * size : nullptr;
}

// A row of a half type in shared memory, which begins anywhere in a word, in order: two(e) for each word of it, of elements e
// and e + 1, and one(e) where the first is the second of a word, or the last the first of one.
template <typename T, typename One, typename Two>
__device__ __forceinline__ void each_word_of_row(const T* own, int size, One one, Two two) {
  const int first = static_cast<int>(reinterpret_cast<unsigned long long>(own) / sizeof(T) % 2);
  const int pairs = (size - first) / 2, last = first + 2 * pairs;
  if (first) one(0);
#pragma unroll 4
  for (int i = 0; i < pairs; ++i) two(first + 2 * i);
  if (last < size) one(last);
}

// f(value, e) for each of a row in shared memory, in order.
template <typename T, typename F> __device__ __forceinline__ void each_of_row(const T* own, int size, F f) {
  if constexpr (sizeof(T) == 2) {
    const auto two = [&](int e) {
      const unsigned word = *reinterpret_cast<const unsigned*>(own + e);
      f(unpack(word, 0, T()), e), f(unpack(word, 1, T()), e + 1);
    };
    each_word_of_row(own, size, [&](int e) { f(to_acc(own[e]), e); }, two);
  } else {
#pragma unroll 8
    for (int e = 0; e < size; ++e) f(to_acc(own[e]), e);
  }
}
