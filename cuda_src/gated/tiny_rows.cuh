// Gated activations of packed rows of a few columns, off 16-byte boundaries: see small_rows.cuh. A thread has a column of
// every sharers-th row of its block's.
#pragma once

#include "common/tile/tiny_rows.cuh"

// `each` of `rows` rows are a block's, whole vectors of y, of which `sharers` are taken at a time. gated.py makes it.
struct SmallRows {
  long long rows;
  int cols, each, sharers, unused;
};
constexpr int kGatedAtOnce = 8;  // rows of a thread

// y = f(gate) up
//
// Grid: ceil(rows / each). Block: kSmallRows, no fewer than columns. Shared memory: 3 T for each element of y.
template <typename F, typename T>
__device__ __forceinline__ void gated_small_forward(const T* __restrict__ x, T* __restrict__ y, const SmallRows& of) {
  constexpr int U = kGatedAtOnce;
  extern __shared__ uint4 dynamic[];
  T *const tile = reinterpret_cast<T*>(dynamic), *const results = tile + 2 * of.each * of.cols;
  const long long begin = blockIdx.x * (long long)of.each;
  const int rows = static_cast<int>(min(of.rows - begin, (long long)of.each)), elements = rows * of.cols;
  fetch_all(tile, x + 2 * begin * of.cols, 2 * elements);
  end_group();
  const int first = threadIdx.x / unsigned(of.cols), pitch = of.sharers * of.cols;
  const T* gate = tile + threadIdx.x + first * of.cols;
  T* result = results + threadIdx.x;
  wait_for_groups<0>();
  __syncthreads();
#pragma unroll 1
  for (int left = first < of.sharers ? rows - first : 0; left > 0; left -= U * of.sharers) {
    T gates[U], ups[U];
    each_of<U>(left, of.sharers,
               [&](int u) { gates[u] = gate[2 * u * pitch], ups[u] = gate[2 * u * pitch + of.cols]; });
    each_of<U>(left, of.sharers, [&](int u) {
      result[u * pitch] = from_acc<T>(F::template value<T>(to_acc(gates[u])) * to_acc(ups[u]));
    });
    gate += 2 * U * pitch, result += U * pitch;
  }
  __syncthreads();
  store_all(y + begin * of.cols, results, elements);
}

// grad_gate = grad_y up f'(gate)
// grad_up = grad_y f(gate)
//
// In place of x in shared memory. Grid, block, shared memory: the same.
template <typename F, typename T>
__device__ __forceinline__ void gated_small_backward(const T* __restrict__ grad_y, const T* __restrict__ x,
                                                     T* __restrict__ grad_x, const SmallRows& of) {
  using A = acc_t<T>;
  constexpr int U = kGatedAtOnce;
  extern __shared__ uint4 dynamic[];
  T *const tile = reinterpret_cast<T*>(dynamic), *const incoming = tile + 2 * of.each * of.cols;
  const long long begin = blockIdx.x * (long long)of.each;
  const int rows = static_cast<int>(min(of.rows - begin, (long long)of.each)), elements = rows * of.cols;
  fetch_all(tile, x + 2 * begin * of.cols, 2 * elements);
  fetch_all(incoming, grad_y + begin * of.cols, elements);
  end_group();
  const int first = threadIdx.x / unsigned(of.cols), pitch = of.sharers * of.cols;
  T* gate = tile + threadIdx.x + first * of.cols;
  const T* grad = incoming + threadIdx.x;
  wait_for_groups<0>();
  __syncthreads();
#pragma unroll 1
  for (int left = first < of.sharers ? rows - first : 0; left > 0; left -= U * of.sharers) {
    T gates[U], ups[U], grads[U];
    each_of<U>(left, of.sharers, [&](int u) {
      gates[u] = gate[2 * u * pitch], ups[u] = gate[2 * u * pitch + of.cols], grads[u] = grad[u * pitch];
    });
    each_of<U>(left, of.sharers, [&](int u) {
      const A g = to_acc(grads[u]);
      const auto here = F::template at<T>(to_acc(gates[u]));
      gate[2 * u * pitch] = from_acc<T>(g * to_acc(ups[u]) * here.slope);
      gate[2 * u * pitch + of.cols] = from_acc<T>(g * here.value);
    });
    gate += 2 * U * pitch, grad += U * pitch;
  }
  __syncthreads();
  store_all(grad_x + 2 * begin * of.cols, tile, 2 * elements);
}
