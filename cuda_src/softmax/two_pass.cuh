// The general form: an input of any (outer, size, inner) and any alignment, of which each element is read twice, first for
// the maximum and the sum, in one online pass, and then for the result.
//
// Where inner = 1 a block owns a row, and reads vectors. Rows of other sizes than whole vectors, and tensors off 16-byte
// boundaries, have code of their own: see row_tile.cuh. Where inner > 1: see strided.cuh.
#pragma once

#include "common/reduce/online_softmax_row.cuh"
#include "softmax/strided.cuh"

// One row. The second pass goes backwards, since what was read last is still in a cache. Which operator it is matters to the
// second alone.
template <int K, bool ALIGNED, typename T, typename O, typename A = acc_t<T>>
__device__ __forceinline__ void softmax_two_pass_row(const T* x, O* y, long long row, long long rows, long long size,
                                                     A* shared, bool log) {
  constexpr int W = kVecWidth<T>;
  using Piece = Tile<K, W, ALIGNED>;
  const int pieces = Piece::count(size);
  Vector<T> vectors[K];
  Online<O> mine;
  for (int c = 0; c < pieces; ++c) {
    load_row(Piece::at(row, rows, size, c), x + c * (long long)Piece::capacity(), from_acc<T>(-infinity<A>()), vectors);
    mine.template add<K * W>(largest(vectors), [&](int i) { return vectors[i / W][i % W]; });
  }
  const A max = block_reduce<Larger>(mine.max, shared);
  const Exponential<O> exp(max);
  const A of_sum = of_sum_by<O>(log, block_reduce<Sum>(mine.sum_for(max), shared));
  for (int c = pieces - 1; c >= 0; --c) {
    const Piece piece = Piece::at(row, rows, size, c);
    const long long at = c * (long long)Piece::capacity();
    load_row(piece, x + at, T(), vectors);
    with_formulas(log, [&](auto f) {
#pragma unroll
      for (int k = 0; k < K; ++k) {
        store_vector(piece, y + at, k,
                     [&](int e) { return f.template y<O>(exp(vectors[k][e]), vectors[k][e] - max, of_sum); });
      }
    });
  }
}

// Grid: any size. Block: one dimension, a multiple of 32. A block owns a row, and takes every gridDim.x-th.
template <int K, typename T, typename O>
__device__ __forceinline__ void softmax_two_pass_rows(const T* __restrict__ x, O* __restrict__ y, long long rows,
                                                      long long size, bool log) {
  __shared__ acc_t<T> shared[kWarp];
  const bool aligned = all_aligned<kVecWidth<T>>(size, x, y);
  for (long long row = blockIdx.x; row < rows; row += gridDim.x) {
    const long long at = row * size;
    if (aligned) softmax_two_pass_row<K, true>(x + at, y + at, row, rows, size, shared, log);
    else softmax_two_pass_row<2, false>(x + at, y + at, row, rows, size, shared, log);
  }
}

// One row, as softmax_two_pass_row().
template <typename F, int K, bool ALIGNED, typename T, typename O, typename S = long_sum_t<O>>
__device__ __forceinline__ void softmax_two_pass_row_bwd(const O* grad_y, const O* y, T* grad_x, long long row,
                                                         long long rows, long long size, S* shared) {
  using A = acc_t<O>;
  constexpr int W = kVecWidth<O>;
  using Piece = Tile<K, W, ALIGNED>;
  const int pieces = Piece::count(size);
  const O zero = from_acc<O>(A(0));
  Vector<O> grads[K], outputs[K];
  S sum = S(0);
  for (int c = 0; c < pieces; ++c) {
    const Piece piece = Piece::at(row, rows, size, c);
    const long long at = c * (long long)Piece::capacity();
    load_row(piece, grad_y + at, zero, grads);
    load_row(piece, y + at, zero, outputs);
    sum += reduce_elements<Sum, K, W>([&](int k, int e) { return F::term(grads[k][e], outputs[k][e]); });
  }
  const A total = A(block_reduce<Sum>(sum, shared));
  for (int c = pieces - 1; c >= 0; --c) {
    const Piece piece = Piece::at(row, rows, size, c);
    const long long at = c * (long long)Piece::capacity();
    load_row(piece, grad_y + at, zero, grads);
    load_row(piece, y + at, zero, outputs);
#pragma unroll
    for (int k = 0; k < K; ++k) {
      store_vector(piece, grad_x + at, k,
                   [&](int e) { return F::template grad_x<T>(grads[k][e], outputs[k][e], total); });
    }
  }
}

// Grid, block: as of softmax_two_pass_rows().
template <typename F, int K, typename T, typename O>
__device__ __forceinline__ void softmax_two_pass_rows_bwd(const O* __restrict__ grad_y, const O* __restrict__ y,
                                                          T* __restrict__ grad_x, long long rows, long long size) {
  __shared__ long_sum_t<O> shared[kWarp];
  const bool aligned = all_aligned<kVecWidth<O>>(size, grad_y, y, grad_x);
  for (long long row = blockIdx.x; row < rows; row += gridDim.x) {
    const long long at = row * size;
    if (aligned) softmax_two_pass_row_bwd<F, K, true>(grad_y + at, y + at, grad_x + at, row, rows, size, shared);
    else softmax_two_pass_row_bwd<F, 1, false>(grad_y + at, y + at, grad_x + at, row, rows, size, shared);
  }
}

// Grid, block: as of softmax_two_pass_rows() where inner is 1, else as of softmax_strided().
template <typename T, typename O>
__device__ __forceinline__ void softmax_two_pass(const T* __restrict__ x, O* __restrict__ y, long long outer,
                                                 long long size, long long inner, bool log) {
  if (inner == 1) return softmax_two_pass_rows<4>(x, y, outer, size, log);
  if constexpr (sizeof(T) == 2) {
    if (inner % 2 == 0) return softmax_strided<2>(x, y, outer, size, inner, log);
  }
  softmax_strided<1>(x, y, outer, size, inner, log);
}

template <typename F, typename T, typename O>
__device__ __forceinline__ void softmax_two_pass_bwd(const O* __restrict__ grad_y, const O* __restrict__ y,
                                                     T* __restrict__ grad_x, long long outer, long long size,
                                                     long long inner) {
  if (inner == 1) return softmax_two_pass_rows_bwd<F, 2>(grad_y, y, grad_x, outer, size);
  if constexpr (sizeof(T) == 2) {
    if (inner % 2 == 0) return softmax_strided_bwd<F, 2>(grad_y, y, grad_x, outer, size, inner);
  }
  softmax_strided_bwd<F, 1>(grad_y, y, grad_x, outer, size, inner);
}
