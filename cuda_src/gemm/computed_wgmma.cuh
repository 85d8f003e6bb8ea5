// An epilogue that a line of C computes, on Hopper's tensor cores: y = f(z, captured tensors and numbers), z = x weight^T + bias.
// The text that includes this defines f, and the kernel around it: see cupyops/_expression/linear_text.py.
//
// On an H100 in bf16, us, of one kernel; of cuBLAS's product and a kernel after it; of cuBLAS's product alone; k: where z is kept
//   16384 x 3072 x 768    z * sigmoid(1.702 * z)        142, k 161    186    119
//                         z * sigmoid(1.702 * z) + r    185, k 213    216    116
//                         z + r                         172           216    116
//                         30 * tanh(z / 30)             158, k 178    187    116
//                         z > 20 ? z : log1p(exp(z))    201, k 222    182    116
//                         n * tanh(c * z + row) + r     220, k 257    235    116    (c: a column, n: a number)
//    8192 x 4096 x 4096   z * sigmoid(1.702 * z) + r    450, k 461    462    399
//                         z + r                         424           452    388
//                         30 * tanh(z / 30)             424, k 437    446    395
//
// One of these compiles in 0.6 to 0.95 s there; the one that captures four tensors, in 1.5: see UNROLLED.
#pragma once

#include "common/elementwise/expression.cuh"
#include "gemm/wgmma.cuh"

namespace wgmma_gemm {

// How neighbouring columns of a captured tensor lie: all are one element; pairs that one access reads; anyhow.
enum Columns { kSame, kPairs, kAnyhow };

// A captured tensor over [m, n]: strides, 0 where all rows or columns share an element.
template <typename X, bool ROWS, Columns COLUMNS> struct Matrix {
  using Element = X;
  const X* __restrict__ data;
  long long row_stride, column_stride;

  // The elements of columns `column` and column + 1. Outside of [m, n], as tails of tiles are, those of the nearest.
  template <bool WHOLE> __device__ __forceinline__ Vec<X, 2> pair(int row, int column, int m, int n) const {
    if (!WHOLE) row = min(row, m - 1), column = min(column, COLUMNS == kPairs ? n - 2 : n - 1);
    const X* const at = data + (ROWS ? row * row_stride : 0);
    if constexpr (COLUMNS == kSame) return splat<X, 2>(*at);
    if constexpr (COLUMNS == kPairs) return load_vec<X, 2>(at + column);
    return {at[column * column_stride], at[(WHOLE ? column + 1 : min(column + 1, n - 1)) * column_stride]};
  }
};

// What a thread has of one in a piece: N pairs, of rows g and g + 8, then the same 8 columns further.
template <typename M, int N> struct Pairs {
  Vec<typename M::Element, 2> pairs[N];

  template <bool WHOLE>
  __device__ __forceinline__ void load(const M& matrix, int row, int column, int m, int n) {
#pragma unroll
    for (int c = 0; c < N; ++c) {
      pairs[c] = matrix.template pair<WHOLE>(row + c % 2 * 8, column + c / 2 * 8, m, n);
    }
  }
  template <int I> __device__ __forceinline__ auto at(int c) const { return to_body(pairs[c].data[I]); }
};

}  // namespace wgmma_gemm
