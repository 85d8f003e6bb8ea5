// Rows of a few elements, off 16-byte boundaries: a thread takes a row, or some share one, out of shared memory, to which the
// rows of a block, which lie next to each other, are copied whole.
#pragma once

#include "common/async.cuh"
#include "common/vec.cuh"

constexpr int kSmallRows = 256;  // of a block, and threads

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
