// Gated activations of packed rows of a few columns, off 16-byte boundaries: a block copies its rows, which lie next to each
// other, to shared memory and back. A thread owns a column of every `at_once`-th of them. GATED_ROWS_AT_ONCE, of a thread, is
// defined by gated.py.
#pragma once

#include "common/elementwise/activations.cuh"
#include "common/tile/tiny_rows.cuh"

// A block owns `each` of `rows` rows, which are whole vectors of y, and takes `at_once` of them at a time. gated.py makes it.
struct PackedRows {
  long long rows;
  int cols, each, at_once, unused;
};

// y = f(gate) up
//
// Grid: ceil(rows / each). Block: kSmallRows, no fewer than columns. Shared memory: 3 T for each element of y.
template <typename T>
__device__ __forceinline__ void shared_gated_forward(const T* __restrict__ x, T* __restrict__ y, const PackedRows& of,
                                                     int function) {
  constexpr int U = GATED_ROWS_AT_ONCE;
  extern __shared__ uint4 dynamic[];
  T *const tile = reinterpret_cast<T*>(dynamic), *const results = tile + 2 * of.each * of.cols;
  const long long begin = blockIdx.x * (long long)of.each;
  const int rows = static_cast<int>(min(of.rows - begin, (long long)of.each)), elements = rows * of.cols;
  fetch_all(tile, x + 2 * begin * of.cols, 2 * elements);
  end_group();
  const int first = threadIdx.x / unsigned(of.cols), pitch = of.at_once * of.cols;
  const T* gate = tile + threadIdx.x + first * of.cols;
  T* result = results + threadIdx.x;
  wait_for_groups<0>();
  __syncthreads();
#pragma unroll 1
  for (int left = first < of.at_once ? rows - first : 0; left > 0; left -= U * of.at_once) {
    T gates[U], ups[U];
    each_of<U>(left, of.at_once,
               [&](int u) { gates[u] = gate[2 * u * pitch], ups[u] = gate[2 * u * pitch + of.cols]; });
    each_of<U>(left, of.at_once, [&](int u) {
      result[u * pitch] = from_acc<T>(activate<T>(function, to_acc(gates[u])) * to_acc(ups[u]));
    });
    gate += 2 * U * pitch, result += U * pitch;
  }
  __syncthreads();
  store_all(y + begin * of.cols, results, elements);
}

// grad_gate = grad_y up f'(gate)
// grad_up = grad_y f(gate)
//
// The gradients take the place of x in shared memory. Grid, block, shared memory: the same.
template <typename F, typename T>
__device__ __forceinline__ void shared_gated_backward(const T* __restrict__ grad_y, const T* __restrict__ x,
                                                      T* __restrict__ grad_x, const PackedRows& of) {
  using A = acc_t<T>;
  constexpr int U = GATED_ROWS_AT_ONCE;
  extern __shared__ uint4 dynamic[];
  T *const tile = reinterpret_cast<T*>(dynamic), *const incoming = tile + 2 * of.each * of.cols;
  const long long begin = blockIdx.x * (long long)of.each;
  const int rows = static_cast<int>(min(of.rows - begin, (long long)of.each)), elements = rows * of.cols;
  fetch_all(tile, x + 2 * begin * of.cols, 2 * elements);
  fetch_all(incoming, grad_y + begin * of.cols, elements);
  end_group();
  const int first = threadIdx.x / unsigned(of.cols), pitch = of.at_once * of.cols;
  T* gate = tile + threadIdx.x + first * of.cols;
  const T* grad = incoming + threadIdx.x;
  wait_for_groups<0>();
  __syncthreads();
#pragma unroll 1
  for (int left = first < of.at_once ? rows - first : 0; left > 0; left -= U * of.at_once) {
    T gates[U], ups[U], grads[U];
    each_of<U>(left, of.at_once, [&](int u) {
      gates[u] = gate[2 * u * pitch], ups[u] = gate[2 * u * pitch + of.cols], grads[u] = grad[u * pitch];
    });
    each_of<U>(left, of.at_once, [&](int u) {
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
