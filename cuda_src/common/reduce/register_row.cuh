// Rows that are reduced out of registers: all of a row is under way at once, and what is found of it needs no second read.
#pragma once

#include "common/tile/row_tile.cuh"

constexpr int kWholePacks = 4;  // of a thread
constexpr int kWholeThreads = 512;  // of a row, at most

// What a thread has of a row of x, read once; pads are 0. Grid: ceil(rows / blockDim.y). Block: see common/tile/row_tile.cuh.
// x is [rows x size], rows of whole vectors from a 16-byte boundary on; a row is one tile.
template <typename T> struct WholeRow {
  const long long row;
  const bool inside;
  const Tile<kWholePacks, kVecWidth<T>, true> tile;
  Vector<T> vectors[kWholePacks];

  __device__ __forceinline__ WholeRow(const T* __restrict__ x, long long rows, long long size)
      : row(blockIdx.x * (long long)blockDim.y + threadIdx.y), inside(row < rows), tile(tile.at(row, rows, size)) {
    const uint4* own = reinterpret_cast<const uint4*>(x + row * size) + threadIdx.x;
#pragma unroll
    for (int k = 0; k < kWholePacks; ++k) {
      const uint4 words = tile.all(tile.index(k, 0)) ? __ldcs(own) : uint4{};
      vectors[k] = {words.x, words.y, words.z, words.w};
      own += blockDim.x;
    }
  }

  // f(element) summed over all that the thread has, pads included.
  template <typename F> __device__ __forceinline__ acc_t<T> sum_of(F f) const {
    return reduce_elements<Sum, kWholePacks, kVecWidth<T>>([&](int k, int e) { return f(vectors[k][e]); });
  }
};
