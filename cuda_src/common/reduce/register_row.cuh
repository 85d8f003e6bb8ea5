// Rows that are reduced out of registers: all of a row is under way at once, and a second pass over it needs no second read.
// REGISTER_VECTORS, of a thread, and FOLD_THREADS, of a row at most, are defined by reduction.py.
#pragma once

#include "common/tile/row_tile.cuh"

// A thread's part of a row of x, read once; what lies beyond the row is 0. Grid: ceil(rows / blockDim.y). Block: see
// common/tile/row_tile.cuh. x is [rows x size], rows of whole vectors from a 16-byte boundary on; a row is one tile.
template <typename T> struct RegisterRow {
  const long long row;
  const bool inside;
  const Tile<REGISTER_VECTORS, kVecWidth<T>, true> tile;
  Vector<T> vectors[REGISTER_VECTORS];

  __device__ __forceinline__ RegisterRow(const T* __restrict__ x, long long rows, long long size)
      : row(blockIdx.x * (long long)blockDim.y + threadIdx.y), inside(row < rows), tile(tile.at(row, rows, size)) {
    const uint4* own = reinterpret_cast<const uint4*>(x + row * size) + threadIdx.x;
#pragma unroll
    for (int k = 0; k < REGISTER_VECTORS; ++k) {
      const uint4 words = tile.all(tile.index(k, 0)) ? __ldcs(own) : uint4{};
      vectors[k] = {words.x, words.y, words.z, words.w};
      own += blockDim.x;
    }
  }

  // f(element) summed over all that the thread has, what lies beyond the row included.
  template <typename F> __device__ __forceinline__ acc_t<T> sum_of(F f) const {
    return reduce_elements<Sum, REGISTER_VECTORS, kVecWidth<T>>([&](int k, int e) { return f(vectors[k][e]); });
  }
};
