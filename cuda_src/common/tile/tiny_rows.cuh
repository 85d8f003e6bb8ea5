// Rows of a few elements that do not begin at 16-byte boundaries. The rows of a block lie next to each other, and are copied
// to shared memory as one array; there a thread takes a row, or a column of several rows, or a few threads share a row.
#pragma once

#include "common/hw/cp_async.cuh"
#include "common/tile/row_tile.cuh"

constexpr int kSmallRows = 256;  // threads of a block, and rows where each takes one
constexpr int kSmallUnits = 4;  // loads of 16 bytes that a thread has in flight

// Copies `count` elements to shared memory, 16 bytes at a time where these are aligned. The copy is complete after
// wait_for_groups<0>() and a barrier. `thread` is the number of the thread in the block.
template <typename T>
__device__ __forceinline__ void fetch_all(T* shared, const T* from, int count, int thread = threadIdx.x) {
  constexpr int W = kVecWidth<T>;
  const int whole = is_aligned16(from) ? count & -W : 0;
  for (int i = thread * W; i < whole; i += kSmallRows * W) fetch16(shared + i, from + i);
  for (int i = whole + thread; i < count; i += kSmallRows) shared[i] = from[i];
}

// Copies `count` elements from shared memory.
template <typename T>
__device__ __forceinline__ void store_all(T* to, const T* shared, int count, int thread = threadIdx.x) {
  constexpr int W = kVecWidth<T>;
  const int whole = is_aligned16(to) ? count & -W : 0;
  for (int i = thread * W; i < whole; i += kSmallRows * W) {
    *reinterpret_cast<uint4*>(to + i) = *reinterpret_cast<const uint4*>(shared + i);
  }
  for (int i = whole + thread; i < count; i += kSmallRows) to[i] = shared[i];
}

// f(u) for every u < U where u * step < left. Where that is all of them, as in most blocks, none is asked about.
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

// fetch_all() of elements that nobody reads again: see load_once(). The copy is complete after a barrier.
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

// Copies the kSmallRows rows of this block, of x [rows x size], to shared memory, and returns this thread's row there; null
// where it has none. Grid: ceil(rows / kSmallRows). Block: kSmallRows.
template <typename T> __device__ __forceinline__ const T* fetch_row(const T* x, long long rows, int size) {
  extern __shared__ uint4 dynamic[];
  T* all = reinterpret_cast<T*>(dynamic);
  const long long first = blockIdx.x * (long long)kSmallRows;
  const int count = int(rows - first < kSmallRows ? rows - first : kSmallRows);
  fetch_once(all, x + first * size, count * size);
  __syncthreads();
  return threadIdx.x < count ? all + threadIdx.x * size : nullptr;
}

// Goes through a row of a half type in shared memory, which may begin within a word, in order: calls two(e) for each whole
// word, of elements e and e + 1, and one(e) for a first or last element that shares its word with another row.
template <typename T, typename One, typename Two>
__device__ __forceinline__ void each_word_of_row(const T* own, int size, One one, Two two) {
  const int first = static_cast<int>(reinterpret_cast<unsigned long long>(own) / sizeof(T) % 2);
  const int pairs = (size - first) / 2, last = first + 2 * pairs;
  if (first) one(0);
#pragma unroll 4
  for (int i = 0; i < pairs; ++i) two(first + 2 * i);
  if (last < size) one(last);
}

// f(value, e) for each element of a row in shared memory, in order.
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
