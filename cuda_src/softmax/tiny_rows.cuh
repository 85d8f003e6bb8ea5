// Rows off 16-byte boundaries of softmax and log_softmax, of up to 32 vectors: see small_rows.cuh and small_row.cuh.
#pragma once

#include "common/tile/tiny_row.cuh"
#include "softmax/formulas.cuh"

// On a multiprocessor: as many as have the registers.
template <typename T, bool WIDEN> constexpr int kSmallBlocks = WIDEN ? 3 : sizeof(T) == 2 ? 6 : 4;
template <typename O> constexpr int kSmallBlocksBwd = sizeof(O) == 8 ? 3 : 5;

// One row, out of shared memory; `to` may be `from`.
template <typename F, typename T, typename O>
__device__ __forceinline__ void softmax_small_row(const TinyRow<T>& row, const T* from, O* to) {
  using A = acc_t<T>;
  constexpr int N = Few<T>::COUNT, SLOTS = TinyRow<T>::SLOTS;
  constexpr bool KEPT = sizeof(O) > 2;  // exponentials: of half types they cost less than the registers
  const T pad = from_acc<T>(-infinity<A>());
  Few<T> x[SLOTS + 1], most = Few<T>::filled(pad);
  row.load(from, pad, x);
  row.each([&](int k, bool) { most = most.larger(x[k]); });
  const A max = row.template over_threads<Larger>(N > 1 ? Larger()(most[0], most[N - 1]) : most[0]);
  const QuickExponential<O> exp(max);
  A exps[SLOTS + 1][N], sums[4] = {};
  row.each([&](int k, bool whole) {
    exps[k][0] = exp(x[k][0]);
    if (whole && N > 1) exps[k][N - 1] = exp(x[k][N - 1]);
    sums[k % 4] += whole && N > 1 ? exps[k][0] + exps[k][N - 1] : exps[k][0];
    x[k].fold();
  });
  const A sum = row.template over_threads<Sum>((sums[0] + sums[1]) + (sums[2] + sums[3]));
  const A of_sum = F::template of_quick_sum<O>(sum, exp);
  row.store(to,
            [&](int k, int e) { return F::template y<O>(KEPT ? exps[k][e] : exp(x[k][e]), x[k][e] - max, of_sum); });
}

// Grid: ceil(rows / rows_each). Block: (threads of a row, rows), kSmallRows in all; `rows_each` is a multiple of its rows.
// Shared memory: so many rows of x, and, of another type, of y.
template <typename F, typename T, typename O>
__device__ __forceinline__ void softmax_small(const T* __restrict__ x, O* __restrict__ y, long long rows, int size,
                                              int rows_each) {
  extern __shared__ uint4 dynamic[];
  T* from = reinterpret_cast<T*>(dynamic);
  O* to = reinterpret_cast<O*>(from + (sizeof(T) == sizeof(O) ? 0 : rows_each * size));
  const long long first = blockIdx.x * (long long)rows_each;
  const int count = int(rows - first < rows_each ? rows - first : rows_each);
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
  fetch_all(from, x + first * size, count * size, thread);
  end_group();
  wait_for_groups<0>();
  __syncthreads();
  each_tiny_row(count, size & Few<T>::COUNT - 1,
                [&](int row, bool inside) { softmax_small_row<F>(TinyRow<T>(row, size, inside), from, to); });
  __syncthreads();
  store_all(y + first * size, to, count * size, thread);
}

// As softmax_small_row.
template <typename F, typename T, typename O>
__device__ __forceinline__ void softmax_small_row_bwd(const TinyRow<O>& row, const O* grad_y, const O* y, T* grad_x) {
  using A = acc_t<O>;
  constexpr int N = Few<O>::COUNT, SLOTS = TinyRow<O>::SLOTS;
  const O zero = from_acc<O>(A(0));
  Few<O> grads[SLOTS + 1], outputs[SLOTS + 1];
  row.load(grad_y, zero, grads);
  row.load(y, zero, outputs);
  A sums[4] = {};
  row.each([&](int k, bool whole) {
    sums[k % 4] += F::term(grads[k][0], outputs[k][0]);
    if (whole && N > 1) sums[k % 4] += F::term(grads[k][N - 1], outputs[k][N - 1]);
  });
  const A total = row.template over_threads<Sum>((sums[0] + sums[1]) + (sums[2] + sums[3]));
  row.each([&](int k, bool) { grads[k].fold(), outputs[k].fold(); });
  row.store(grad_x, [&](int k, int e) { return F::template grad_x<T>(grads[k][e], outputs[k][e], total); });
}

// Grid, block: as softmax_small. Shared memory: so many rows of grad_y, of y, and, of another type, of grad_x.
template <typename F, typename T, typename O>
__device__ __forceinline__ void softmax_small_bwd(const O* __restrict__ grad_y, const O* __restrict__ y,
                                                  T* __restrict__ grad_x, long long rows, int size, int rows_each) {
  extern __shared__ uint4 dynamic[];
  O *grads = reinterpret_cast<O*>(dynamic), *outputs = grads + rows_each * size;
  T* to = reinterpret_cast<T*>(sizeof(T) == sizeof(O) ? grads : outputs + rows_each * size);
  const long long first = blockIdx.x * (long long)rows_each;
  const int count = int(rows - first < rows_each ? rows - first : rows_each);
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
  fetch_all(grads, grad_y + first * size, count * size, thread);
  fetch_all(outputs, y + first * size, count * size, thread);
  end_group();
  wait_for_groups<0>();
  __syncthreads();
  each_tiny_row(count, size & Few<O>::COUNT - 1, [&](int row, bool inside) {
    softmax_small_row_bwd<F>(TinyRow<O>(row, size, inside), grads, outputs, to);
  });
  __syncthreads();
  store_all(grad_x + first * size, to, count * size, thread);
}
