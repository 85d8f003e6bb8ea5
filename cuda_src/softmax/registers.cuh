// Rows that fit the registers of the threads that share them: each element is read once.
#pragma once

#include "common/reduce/online_softmax_row.cuh"
#include "softmax/formulas.cuh"

// One row. All threads of the row take part; those that have no row find no elements in it.
template <int K, bool ALIGNED, typename T, typename O, typename Threads>
__device__ __forceinline__ void softmax_row(const T* x, O* y, long long row, long long rows, int size, Threads& threads,
                                            bool log) {
  using A = acc_t<T>;
  constexpr int W = kVecWidth<T>;
  const UnalignedRow<W, K == 1> ends(row, rows, size);
  const auto tile = Tile<K, W, ALIGNED>::at(row, rows, ends.whole);
  const long long at = row * size + ends.head, lone = row * size + ends.column;
  Vector<T> vectors[K];
  load_row(tile, x + at, from_acc<T>(-infinity<A>()), vectors);
  if constexpr (K == 1) {  // in a warp, where registers suffice to keep the exponentials
    const A max = threads.template over_lanes<Larger>(largest(vectors));
    const Exponential<O> exp(max);
    A exps[W];
#pragma unroll
    for (int e = 0; e < W; ++e) exps[e] = exp(vectors[0][e]);
    const A sum = reduce_elements<Sum, 1, W>([&](int, int e) { return exps[e]; });
    const A total = threads.template over_lanes<Sum>(sum);
    with_formulas(log, [&](auto f) {
      const A of_sum = f.template of_sum<O>(total);
      store_vector(tile, y + at, 0, [&](int e) { return f.template y<O>(exps[e], vectors[0][e] - max, of_sum); });
    });
  } else {
    const A alone = ends.lone ? to_acc(x[lone]) : -infinity<A>();
    const Pair<A> sums = online_row<O>(vectors, threads, ends.lone, alone);
    const Exponential<O> exp(sums.first);
    with_formulas(log, [&](auto f) {
      const A of_sum = f.template of_sum<O>(sums.second);
      const auto result = [&](A value) { return f.template y<O>(exp(value), value - sums.first, of_sum); };
#pragma unroll
      for (int k = 0; k < K; ++k) store_vector(tile, y + at, k, [&](int e) { return result(vectors[k][e]); });
      if (ends.lone) y[lone] = from_acc<O>(result(alone));
    });
  }
}

// f(row) for each row of this thread. All threads of a block call it equally often.
template <typename F> __device__ __forceinline__ void each_row(long long rows, F f) {
  const long long stride = gridDim.x * (long long)blockDim.y;
  for (long long first = blockIdx.x * (long long)blockDim.y; first < rows; first += stride) f(first + threadIdx.y);
}

// Grid: any size. Block: see row_tile.cuh; each thread has K vectors of its row. Where K > 1 these are the whole vectors of
// an UnalignedRow: all tensors must begin at 16-byte boundaries, a row must have W elements or more, and 2 W - 2 threads or
// more share it. Threads own whole vectors of x and y.
template <int K, typename T, typename O>
__device__ __forceinline__ void softmax_rows(const T* __restrict__ x, O* __restrict__ y, long long rows, int size,
                                             bool log) {
  using Threads = RowThreads<Pair<acc_t<T>>, false>;
  __shared__ typename Threads::Room room;
  Threads threads(room);
  if (K > 1 || all_aligned<kVecWidth<T>>(size, x, y)) {
    each_row(rows, [&](long long row) { softmax_row<K, true>(x, y, row, rows, size, threads, log); });
  } else if constexpr (K == 1) {
    each_row(rows, [&](long long row) { softmax_row<K, false>(x, y, row, rows, size, threads, log); });
  }
}

// One row, as softmax_row().
template <int K, bool ALIGNED, typename T, typename O, typename Threads>
__device__ __forceinline__ void softmax_row_bwd(const O* grad_y, const O* y, T* grad_x, long long row, long long rows,
                                                int size, Threads& threads, bool log) {
  using A = acc_t<O>;
  constexpr int W = kVecWidth<O>;
  const UnalignedRow<W, K == 1> ends(row, rows, size);
  const auto tile = Tile<K, W, ALIGNED>::at(row, rows, ends.whole);
  const long long at = row * size + ends.head, lone = row * size + ends.column;
  Vector<O> grads[K], outputs[K];
  load_row(tile, grad_y + at, from_acc<O>(A(0)), grads);
  load_row(tile, y + at, from_acc<O>(A(0)), outputs);
  A grad = A(0), output = A(0);
  if (ends.lone) grad = to_acc(grad_y[lone]), output = to_acc(y[lone]);
  A mine = A(0);
  with_formulas(log, [&](auto f) {
    mine = reduce_elements<Sum, K, W>([&](int k, int e) { return f.term(grads[k][e], outputs[k][e]); });
    if (ends.lone) mine += f.term(grad, output);
  });
  const A total = threads.template reduce<Sum>(mine);
  fold(grads), fold(outputs);
  with_formulas(log, [&](auto f) {
    const auto result = [&](A grad_y, A y) { return f.template grad_x<T>(grad_y, y, total); };
#pragma unroll
    for (int k = 0; k < K; ++k) {
      store_vector(tile, grad_x + at, k, [&](int e) { return result(grads[k][e], outputs[k][e]); });
    }
    if (ends.lone) grad_x[lone] = from_acc<T>(result(grad, output));
  });
}

// Grid, block: as of softmax_rows(). T is the type of x and grad_x, O that of y and grad_y.
template <int K, typename T, typename O>
__device__ __forceinline__ void softmax_rows_bwd(const O* __restrict__ grad_y, const O* __restrict__ y,
                                                 T* __restrict__ grad_x, long long rows, int size, bool log) {
  using Threads = RowThreads<acc_t<O>, false>;
  __shared__ typename Threads::Room room;
  Threads threads(room);
  if (K > 1 || all_aligned<kVecWidth<O>>(size, grad_y, y, grad_x)) {
    each_row(rows, [&](long long row) { softmax_row_bwd<K, true>(grad_y, y, grad_x, row, rows, size, threads, log); });
  } else if constexpr (K == 1) {
    each_row(rows, [&](long long row) { softmax_row_bwd<K, false>(grad_y, y, grad_x, row, rows, size, threads, log); });
  }
}
