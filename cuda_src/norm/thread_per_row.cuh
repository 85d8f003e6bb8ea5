// Rows of a few elements, which threads take out of shared memory: see tiny_rows.cuh and tiny_row.cuh.
#pragma once

#include "norm/backward.cuh"
#include "common/tile/tiny_row.cuh"

// Rows of forward: a thread has a row. Grid: any. Block: kSmallRows. Dynamic shared memory: that of kSmallRows rows of x,
// and of residual where it is not null, and 2 acc_t<T> for each column.
template <bool CENTRED, typename T> __device__ __forceinline__ void norm_thread_per_row(const Forward<T>& to) {
  using A = acc_t<T>;
  extern __shared__ uint4 dynamic[];
  const int size = int(to.size);
  const bool summed = to.residual != nullptr;
  T *x = reinterpret_cast<T*>(dynamic), *residual = x + kSmallRows * size;
  Pair<A>* parameters = reinterpret_cast<Pair<A>*>(x + (summed ? 2 : 1) * kSmallRows * size);
  for (int e = threadIdx.x; e < size; e += kSmallRows) {
    parameters[e] = {to.weight ? to_acc(to.weight[e]) : A(1), CENTRED && to.bias ? to_acc(to.bias[e]) : A(0)};
  }
  const A count = A(size), scale = scale_for<A>(size);
  T *own = x + threadIdx.x * size, *own_residual = residual + threadIdx.x * size, *out = summed ? own_residual : own;
  for (long long first = blockIdx.x * (long long)kSmallRows; first < to.rows;
       first += gridDim.x * (long long)kSmallRows) {
    const int rows = int(to.rows - first < kSmallRows ? to.rows - first : kSmallRows), elements = rows * size;
    const long long at = first * size;
    __syncthreads();
    fetch_all(x, to.x + at, elements);
    if (summed) fetch_all(residual, to.residual + at, elements);
    end_group();
    wait_for_groups<0>();
    __syncthreads();
    if (threadIdx.x < rows) {
      A mean = A(0), squares = A(0);
      if (summed) TwoRows<T>{own, own_residual, size}.store(own, [](A a, A b, int) { return a + b; });
      if (CENTRED) {  // about the first: see statistics()
        const A about = to_acc(own[0]) * scale;
        each_of_row(own, size, [&](A value, int) { mean += fma(value, scale, -about); });
        mean = mean_about(about, mean, count, scale);
      }
      each_of_row(own, size, [&](A value, int) {
        const A apart = value - mean;
        squares = fma(apart, apart, squares);
      });
      const RowStatistics<A> of = {mean, rstd_of<T>(squares / count + to.eps)};
      to.save(first + threadIdx.x, of);
      TwoRows<T>{own, own, size}.store(out, [&](A value, A, int e) {
        const Pair<A> p = parameters[e];
        return of.template y<CENTRED>(value, p.first, p.second);
      });
    }
    __syncthreads();
    store_all(to.y + at, summed ? residual : x, elements);
    if (summed) store_all(to.summed + at, x, elements);
  }
}

// Rows of backward: a thread has a row for grad_x; and for the block's row of partials, as norm_block_bwd has them, a column
// of every (kSmallRows / size)-th row. Grid: as many blocks as there are rows of partials. Block: kSmallRows, no fewer than
// columns. Dynamic shared memory: that of kSmallRows rows of x, of grad_y, and of grad_summed where it is not null, and an
// acc_t<T> for each column.
template <bool CENTRED, typename T> __device__ __forceinline__ void norm_thread_per_row_bwd(const Backward<T>& to) {
  let_next_grid_begin();
  using A = acc_t<T>;
  extern __shared__ uint4 dynamic[];
  __shared__ RowStatistics<A> statistics[kSmallRows];
  const int size = int(to.size), sharers = kSmallRows / size, column = threadIdx.x % size, sharer = threadIdx.x / size;
  const bool summed = to.grad_summed != nullptr;
  T *x = reinterpret_cast<T*>(dynamic), *grad = x + kSmallRows * size, *more = grad + kSmallRows * size;
  A* weight = reinterpret_cast<A*>(x + (summed ? 3 : 2) * kSmallRows * size);
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
    if (summed) fetch_all(more, to.grad_summed + at, elements);
    end_group();
    const RowStatistics<A> of = to.statistics(first + threadIdx.x);
    statistics[threadIdx.x] = of;
    wait_for_groups<0>();
    __syncthreads();
    if ((to.weight_partials || to.bias_partials) && sharer < sharers) {
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
        return summed ? result + to_acc(more[own + e]) : result;
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
  if (to.weight_partials) to.weight_partials[to.partial(blockIdx.x) + threadIdx.x] = weight_sum;
  if (to.bias_partials) to.bias_partials[to.partial(blockIdx.x) + threadIdx.x] = bias_sum;
}
