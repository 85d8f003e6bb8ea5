// What the forms of backward share: its tensors, a vector's part of the sums over a row, and the parameters' gradients,
// of which each block leaves a row of partials. The forms, and CENTRED: see norm.cuh.
//
//     grad_x = rstd (wg - c2 - xhat c1) + grad_summed,   wg = grad_y weight,   c1 = sum(wg xhat) / n,
//                                                        c2 = sum(wg) / n where CENTRED, else 0
//     grad_weight = sum(grad_y xhat),   grad_bias = sum(grad_y)                                     over the rows
#pragma once

#include "norm/norm.cuh"
#include "common/hw/dependent_launch.cuh"
#include "common/reduce/row.cuh"

// How far apart rows of partials are: whole vectors, whatever the size.
template <typename A> __device__ __forceinline__ long long pitch_of(long long size) {
  return (size + kVecWidth<A> - 1) & -(long long)kVecWidth<A>;
}

// The tensors of backward. weight and what is written may be null; grad_summed is null but where a residual is added, mean
// and bias_partials unless CENTRED.
template <typename T> struct Backward {
  const T *grad_y, *x, *weight, *grad_summed;
  const acc_t<T>*mean, *rstd;
  T* grad_x;
  acc_t<T>*weight_partials, *bias_partials;
  long long rows, size;

  __device__ __forceinline__ bool aligned() const {
    return all_aligned<kVecWidth<T>>(size, grad_y, x, weight, grad_summed, grad_x);
  }

  // Where row `number` of weight_partials or bias_partials begins.
  __device__ __forceinline__ long long partial(long long number) const { return number * pitch_of<acc_t<T>>(size); }

  __device__ __forceinline__ RowStatistics<acc_t<T>> statistics(long long row) const {
    if (row >= rows) return {};
    return {mean ? mean[row] : acc_t<T>(0), rstd[row]};
  }
};

// What backward has of one vector of a row.
template <bool CENTRED, typename T, typename A = acc_t<T>> struct RowGradient {
  Vector<T> x, grad_y, weight;
  RowStatistics<A> of;

  __device__ __forceinline__ A xhat(int e) const { return of.template xhat<CENTRED>(x[e]); }
  __device__ __forceinline__ A wg(int e) const { return mul_rn(grad_y[e], weight[e]); }
  __device__ __forceinline__ void add_to(Pair<A>& c, int e) const {
    c.first += wg(e) * xhat(e);
    if (CENTRED) c.second += wg(e);
  }
  // `slope`: rstd c1.
  __device__ __forceinline__ A grad_x(int e, A slope, A c2) const {
    return of.rstd * ((CENTRED ? wg(e) - c2 : wg(e)) - of.template centred<CENTRED>(x[e]) * slope);
  }
};

template <bool CENTRED, int K, bool ALIGNED, typename A>
using BackwardAdder = RowAdder<A, CENTRED ? 2 : 1, (K > 1), (K > 1 && !ALIGNED)>;

// Both sums over the row; one number where the other is 0, unless CENTRED.
template <bool CENTRED, typename A, typename Adder> __device__ __forceinline__ Pair<A> row_sum(Pair<A> c,
                                                                                               Adder& adder) {
  if constexpr (CENTRED) {
    A both[2] = {c.first, c.second};
    adder.add(both);
    return {both[0], both[1]};
  } else {
    return {adder.add(c.first), A(0)};
  }
}

// The block's sum for each column, added over threadIdx.y in order, to its place in a row of the partials. The tiles of all
// threads lie alike. `shared`, on a 16-byte boundary, holds W values of each thread of the block.
template <int K, int W, bool ALIGNED, typename A>
__device__ __forceinline__ void store_partials(const Tile<K, W, ALIGNED>& tile, const A (&values)[K][W], A* row,
                                               A* shared) {
  const int slab = W * blockDim.x, threads = blockDim.x * blockDim.y;
#pragma unroll
  for (int k = 0; k < K; ++k) {
    __syncthreads();
#pragma unroll
    for (int p = 0; p < W; p += kVecWidth<A>) {
      Vector<A> vector = {};
#pragma unroll
      for (int e = 0; e < kVecWidth<A>; ++e) vector.set(e, values[k][p + e]);
      *reinterpret_cast<uint4*>(shared + threadIdx.y * slab + threadIdx.x * W + p) =
          make_uint4(vector.word[0], vector.word[1], vector.word[2], vector.word[3]);
    }
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.y * blockDim.x + threadIdx.x; i < slab; i += threads) {
      A total = A(0);
#pragma unroll 4
      for (int y = 0; y < blockDim.y; ++y) total += shared[y * slab + i];
      const int column = k * slab + i - tile.shift;
      if (tile.template all<1>(column)) row[column] = total;
    }
  }
}

// The parameters' gradients from the partials of the blocks, (gridDim.y, count, pitch_of(size)), added in a fixed order.
// Grid: (ceil(size / 32), 1 or 2): grad_weight, then grad_bias, whichever is not null; it may overlap the grid that leaves
// the partials. Block: (as many threads as have a vector each of 32 columns, any number that makes whole warps), at most
// 1024 threads; threadIdx.y deals out the rows of the partials.
template <typename T>
__device__ __forceinline__ void norm_finalize(const acc_t<T>* __restrict__ partials, T* grad_weight, T* grad_bias,
                                              int count, long long size) {
  using A = acc_t<T>;
  constexpr int V = kVecWidth<A>, kAcross = kWarp / V, U = 8;
  __shared__ A shared[kWarp][kWarp];
  T* grad = blockIdx.y == 0 && grad_weight ? grad_weight : grad_bias;
  const long long first = blockIdx.x * (long long)kWarp, column = first + threadIdx.x * V, pitch = pitch_of<A>(size);
  const A* const own = written_before(partials) + blockIdx.y * count * pitch + column;
  const auto load = [&](const A* from) {
    if (column + V <= size) return load_vec<A, V>(from);
    Vec<A, V> values = {};
#pragma unroll
    for (int v = 0; v < V - 1; ++v) {
      if (column + v < size) values.data[v] = from[v];
    }
    return values;
  };
  A sums[V] = {};
  for (int p = threadIdx.y; column < size && p < count; p += U * blockDim.y) {
    Vec<A, V> values[U];
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const int here = p + u * blockDim.y;
      values[u] = here < count ? load(own + here * pitch) : Vec<A, V>{};
    }
#pragma unroll
    for (int u = 0; u < U; ++u) {
#pragma unroll
      for (int v = 0; v < V; ++v) sums[v] += values[u].data[v];
    }
  }
  const int thread = threadIdx.y * kAcross + threadIdx.x, warps = blockDim.y / V;
#pragma unroll
  for (int v = 0; v < V; ++v) {
#pragma unroll
    for (int offset = kWarp / 2; offset >= kAcross; offset /= 2) sums[v] += shuffle_xor(sums[v], offset);
    if (thread % kWarp < kAcross) shared[thread / kWarp][threadIdx.x * V + v] = sums[v];
  }
  __syncthreads();
  if (thread >= kWarp || first + thread >= size) return;
  A total = A(0);
#pragma unroll 8
  for (int warp = 0; warp < warps; ++warp) total += shared[warp][thread];
  grad[first + thread] = from_acc<T>(total);
}
