// Short rows that do not begin at 16-byte boundaries, through shared memory: see tiny_rows.cuh and tiny_row.cuh of common.
#pragma once

#include "common/tile/tiny_row.cuh"
#include "softmax/formulas.cuh"

// Blocks of a multiprocessor: as many as the registers allow.
template <typename T> constexpr int kTinyBlocks = sizeof(T) == 2 ? 6 : 4;
constexpr int kTinyBlocksBwd = 5;

// One row in shared memory, whose result may take its place: `to` may be `from`.
template <typename T>
__device__ __forceinline__ void softmax_tiny_row(const TinyRow<T, TINY_SLOTS>& row, const T* from, T* to, bool log) {
  using A = acc_t<T>;
  constexpr int N = Few<T>::COUNT, SLOTS = TinyRow<T, TINY_SLOTS>::SLOTS;
  constexpr bool KEEP =
      sizeof(T) > 2;  // exponentials: for half types computing them again costs less than the registers
  const T pad = from_acc<T>(-infinity<A>());
  Few<T> x[SLOTS + 1], most = Few<T>::filled(pad);
  row.load(from, pad, x);
  row.each([&](int k, bool) { most = most.larger(x[k]); });
  const A max = row.template over_threads<Larger>(N > 1 ? Larger()(most[0], most[N - 1]) : most[0]);
  const QuickExponential<T> exp(max);
  A exps[SLOTS + 1][N], sums[4] = {};
  row.each([&](int k, bool whole) {
    exps[k][0] = exp(x[k][0]);
    if (whole && N > 1) exps[k][N - 1] = exp(x[k][N - 1]);
    sums[k % 4] += whole && N > 1 ? exps[k][0] + exps[k][N - 1] : exps[k][0];
    x[k].fold();
  });
  const A sum = row.template over_threads<Sum>((sums[0] + sums[1]) + (sums[2] + sums[3]));
  with_formulas(log, [&](auto f) {
    const A of_sum = f.template of_quick_sum<T>(sum, exp);
    row.store(to,
              [&](int k, int e) { return f.template y<T>(KEEP ? exps[k][e] : exp(x[k][e]), x[k][e] - max, of_sum); });
  });
}

// Grid: ceil(rows / rows_each). Block: (threads of a row, rows), kSmallRows in all; `rows_each` is a multiple of its rows.
// Shared memory: `rows_each` rows.
template <typename T>
__device__ __forceinline__ void softmax_tiny_rows(const T* __restrict__ x, T* __restrict__ y, long long rows, int size,
                                                  int rows_each, bool log) {
  extern __shared__ uint4 dynamic[];
  T* own = reinterpret_cast<T*>(dynamic);
  const long long first = blockIdx.x * (long long)rows_each;
  const int count = int(rows - first < rows_each ? rows - first : rows_each);
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
  fetch_all(own, x + first * size, count * size, thread);
  end_group();
  wait_for_groups<0>();
  __syncthreads();
  each_tiny_row(count, size & Few<T>::COUNT - 1, [&](int row, bool inside) {
    softmax_tiny_row(TinyRow<T, TINY_SLOTS>(row, size, inside), own, own, log);
  });
  __syncthreads();
  store_all(y + first * size, own, count * size, thread);
}

// One row, as softmax_tiny_row().
template <typename T>
__device__ __forceinline__ void softmax_tiny_row_bwd(const TinyRow<T, TINY_SLOTS>& row, const T* grad_y, const T* y,
                                                     T* grad_x, bool log) {
  using A = acc_t<T>;
  constexpr int N = Few<T>::COUNT, SLOTS = TinyRow<T, TINY_SLOTS>::SLOTS;
  const T zero = from_acc<T>(A(0));
  Few<T> grads[SLOTS + 1], outputs[SLOTS + 1];
  row.load(grad_y, zero, grads);
  row.load(y, zero, outputs);
  A sums[4] = {};
  with_formulas(log, [&](auto f) {
    row.each([&](int k, bool whole) {
      sums[k % 4] += f.term(grads[k][0], outputs[k][0]);
      if (whole && N > 1) sums[k % 4] += f.term(grads[k][N - 1], outputs[k][N - 1]);
    });
  });
  const A total = row.template over_threads<Sum>((sums[0] + sums[1]) + (sums[2] + sums[3]));
  row.each([&](int k, bool) { grads[k].fold(), outputs[k].fold(); });
  with_formulas(log, [&](auto f) {
    row.store(grad_x, [&](int k, int e) { return f.template grad_x<T>(grads[k][e], outputs[k][e], total); });
  });
}

// Grid, block: as of softmax_tiny_rows(). Shared memory: `rows_each` rows of grad_y, and of y.
template <typename T>
__device__ __forceinline__ void softmax_tiny_rows_bwd(const T* __restrict__ grad_y, const T* __restrict__ y,
                                                      T* __restrict__ grad_x, long long rows, int size, int rows_each,
                                                      bool log) {
  extern __shared__ uint4 dynamic[];
  T *grads = reinterpret_cast<T*>(dynamic), *outputs = grads + rows_each * size;
  const long long first = blockIdx.x * (long long)rows_each;
  const int count = int(rows - first < rows_each ? rows - first : rows_each);
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
  fetch_all(grads, grad_y + first * size, count * size, thread);
  fetch_all(outputs, y + first * size, count * size, thread);
  end_group();
  wait_for_groups<0>();
  __syncthreads();
  each_tiny_row(count, size & Few<T>::COUNT - 1, [&](int row, bool inside) {
    softmax_tiny_row_bwd(TinyRow<T, TINY_SLOTS>(row, size, inside), grads, outputs, grads, log);
  });
  __syncthreads();
  store_all(grad_x + first * size, grads, count * size, thread);
}
