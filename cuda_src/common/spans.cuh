// Elementwise over rows that are apart: each tensor is [rows x cols], its rows contiguous and a stride of its own apart.
//
// Grid: tiles * ceil(rows / blockDim.y), tiles fastest; a tile is blockDim.x * kVecWidth<T> columns. Block: (x, y), any.
// Each thread owns W elements of one row: neighbours, loaded at once, where every row of every tensor begins at a 16-byte
// boundary; else every blockDim.x-th, so that neighbouring threads are on neighbouring elements. Tensors that are laid out
// alike are one row.
#pragma once

#include "common/vec.cuh"

// W elements of a row; those from `cols` on are not there. WHOLE: neighbours, all there.
template <typename T, bool WHOLE> struct Span {
  static constexpr int W = kVecWidth<T>;
  long long row, col, cols;
  int step;

  __device__ __forceinline__ Vec<T, W> load(const T* from, long long stride) const {
    from += row * stride;
    if constexpr (WHOLE) {
      return load_vec<T, W>(from + col);
    } else {
      Vec<T, W> result = {};
#pragma unroll
      for (int k = 0; k < W; ++k) {
        if (col + k * step < cols) result.data[k] = from[col + k * step];
      }
      return result;
    }
  }

  __device__ __forceinline__ void store(T* to, long long stride, const Vec<T, W>& value) const {
    to += row * stride;
    if constexpr (WHOLE) {
      store_vec<T, W>(to + col, value);
    } else {
#pragma unroll
      for (int k = 0; k < W; ++k) {
        if (col + k * step < cols) to[col + k * step] = value.data[k];
      }
    }
  }
};

// Whether rows of T so far apart begin at 16-byte boundaries. A null pointer, and the stride of an only row, fit.
template <typename T> __device__ __forceinline__ bool rows_fit(const T* tensor, long long stride, long long rows) {
  return is_aligned16(tensor) && (rows == 1 || stride % kVecWidth<T> == 0);
}

// work.at(span) for this thread's span, if it has one. `fit`: rows_fit() of every tensor.
template <typename T, typename Work>
__device__ __forceinline__ void each_span(long long rows, long long cols, bool fit, const Work& work) {
  constexpr int W = kVecWidth<T>;
  const unsigned tile_cols = blockDim.x * W, tiles = (cols + tile_cols - 1) / tile_cols;
  const long long row = blockIdx.x / tiles * (long long)blockDim.y + threadIdx.y;
  const long long first = blockIdx.x % tiles * (long long)tile_cols;
  if (row >= rows) return;
  const long long col = first + threadIdx.x * W;
  if (!fit) work.at(Span<T, false>{row, first + threadIdx.x, cols, int(blockDim.x)});
  else if (col + W <= cols) work.at(Span<T, true>{row, col, cols, 1});
  else work.at(Span<T, false>{row, col, cols, 1});
}
