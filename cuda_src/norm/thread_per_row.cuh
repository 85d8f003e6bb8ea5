// Rows of a few elements: see small_rows.cuh and small_row.cuh.
#pragma once

#include "norm/backward.cuh"
#include "common/tile/tiny_row.cuh"

// Rows of forward. Grid: any. Block: kSmallRows. Shared memory: that of TENSORS tensors of kSmallRows rows, and 2 acc_t<T>
// for each column. mean and rstd as norm_rows.
template <bool CENTRED, int TENSORS, typename T> __device__ __forceinline__ void norm_small(const Forward<T>& to) {
  using A = acc_t<T>;
  extern __shared__ uint4 dynamic[];
  const int size = int(to.size);
  T *x = reinterpret_cast<T*>(dynamic), *residual = x + kSmallRows * size;
  Pair<A>* parameters = reinterpret_cast<Pair<A>*>(x + TENSORS * kSmallRows * size);
  for (int e = threadIdx.x; e < size; e += kSmallRows) {
    parameters[e] = {to.weight ? to_acc(to.weight[e]) : A(1), CENTRED && to.bias ? to_acc(to.bias[e]) : A(0)};
  }
  const A count = A(size), scale = scale_for<A>(size);
  T *own = x + threadIdx.x * size, *more = residual + threadIdx.x * size, *out = TENSORS > 1 ? more : own;
  for (long long first = blockIdx.x * (long long)kSmallRows; first < to.rows;
       first += gridDim.x * (long long)kSmallRows) {
    const int rows = int(to.rows - first < kSmallRows ? to.rows - first : kSmallRows), elements = rows * size;
    const long long at = first * size;
    __syncthreads();
    fetch_all(x, to.x + at, elements);
    if (TENSORS > 1) fetch_all(residual, to.residual + at, elements);
    end_group();
    wait_for_groups<0>();
    __syncthreads();
    if (threadIdx.x < rows) {
      A mean = A(0), squares = A(0);
      if (TENSORS > 1) TwoRows<T>{own, more, size}.store(own, [](A a, A b, int) { return a + b; });
      if (CENTRED) {  // about the first: see statistics()
        const A about = to_acc(own[0]) * scale;
        each_of_row(own, size, [&](A value, int) { mean += fma(value, scale, -about); });
        mean = mean_about(about, mean, count, scale);
      }
      each_of_row(own, size, [&](A value, int) {
        const A apart = value - mean;
        squares = fma(apart, apart, squares);
      });
      const Statistics<A> of = {mean, rstd_of<T>(squares / count + to.eps)};
      to.keep(first + threadIdx.x, of);
      TwoRows<T>{own, own, size}.store(out, [&](A value, A, int e) {
        const Pair<A> p = parameters[e];
        return of.template y<CENTRED>(value, p.first, p.second);
      });
    }
    __syncthreads();
    store_all(to.y + at, TENSORS > 1 ? residual : x, elements);
    if (TENSORS > 1) store_all(to.summed + at, x, elements);
  }
}

// Rows of backward, and the block's part of the parameters' gradients, as norm_rows_bwd: a thread then takes a column, in
// every (kSmallRows / size)-th row. Grid: as many blocks as there are parts. Block: kSmallRows, no fewer than columns.
// Shared memory: that of TENSORS tensors of kSmallRows rows, and an acc_t<T> for each column.
template <bool CENTRED, int TENSORS, typename T> __device__ __forceinline__ void norm_small_bwd(const Backward<T>& to) {
  let_next_grid_begin();
  using A = acc_t<T>;
  extern __shared__ uint4 dynamic[];
  __shared__ Statistics<A> statistics[kSmallRows];
  const int size = int(to.size), sharers = kSmallRows / size, column = threadIdx.x % size, sharer = threadIdx.x / size;
  T *x = reinterpret_cast<T*>(dynamic), *grad = x + kSmallRows * size, *more = grad + kSmallRows * size;
  A* weight = reinterpret_cast<A*>(x + TENSORS * kSmallRows * size);
  for (int e = threadIdx.x; e < size; e += kSmallRows) weight[e] = to.weight ? to_acc(to.weight[e]) : A(1);
  const int own = threadIdx.x * size;
  A weight_sum = A(0), bias_sum = A(0);
  for (long long first = blockIdx.x * (long long)kSmallRows; first < to.rows;
       first += gridDim.x * (long long)kSmallRows) {
    const int rows = int(to.rows - first < kSmallRows ? to.rows - first : kSmallRows), elements = rows * size;
    const long long at = first * size;
    __syncthreads();
    fetch_all(x, to.x + at, elements);
    fetch_all(grad, to.grad_y + at, elements);
    if (TENSORS > 2) fetch_all(more, to.grad_summed + at, elements);
    end_group();
    const Statistics<A> of = to.statistics(first + threadIdx.x);
    statistics[threadIdx.x] = of;
    wait_for_groups<0>();
    __syncthreads();
    if ((to.weight_parts || to.bias_parts) && sharer < sharers) {
#pragma unroll 4
      for (int row = sharer; row < rows; row += sharers) {
        const A g = to_acc(grad[row * size + column]);
        weight_sum += g * statistics[row].template xhat<CENTRED>(to_acc(x[row * size + column]));
        if (CENTRED) bias_sum += g;
      }
    }
    if (!to.grad_x) continue;
    __syncthreads();
    if (threadIdx.x < rows) {
      const TwoRows<T> both{grad + own, x + own, size};
      A c1 = A(0), c2 = A(0);
      both.each([&](A g, A input, int e) {
        const A wg = mul_rn(g, weight[e]);
        c1 += wg * of.template xhat<CENTRED>(input);
        if (CENTRED) c2 += wg;
      });
      const A slope = of.rstd * (c1 / A(size));
      c2 /= A(size);
      both.store(grad + own, [&](A g, A input, int e) {
        const A wg = mul_rn(g, weight[e]);
        const A result = of.rstd * ((CENTRED ? wg - c2 : wg) - of.template centred<CENTRED>(input) * slope);
        return TENSORS > 2 ? result + to_acc(more[own + e]) : result;
      });
    }
    __syncthreads();
    store_all(to.grad_x + at, grad, elements);
  }
  Pair<A>* sums = reinterpret_cast<Pair<A>*>(statistics);
  __syncthreads();
  sums[threadIdx.x] = {weight_sum, bias_sum};
  __syncthreads();
  if (threadIdx.x >= size) return;
  for (int i = 1; i < sharers; ++i) {
    weight_sum += sums[threadIdx.x + i * size].first;
    bias_sum += sums[threadIdx.x + i * size].second;
  }
  if (to.weight_parts) to.weight_parts[to.part(blockIdx.x) + threadIdx.x] = weight_sum;
  if (to.bias_parts) to.bias_parts[to.part(blockIdx.x) + threadIdx.x] = bias_sum;
}
