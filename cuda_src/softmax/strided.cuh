// softmax and log_softmax over a dimension that is not the last. The elements of a column lie `inner` apart, and
// neighbouring threads own neighbouring columns. See two_pass.cuh.
#pragma once

#include "common/reduce/warp_block.cuh"
#include "softmax/formulas.cuh"
#include "common/core/vector.cuh"

// V neighbouring columns, and where they begin.
template <int V> struct StridedColumns {
  long long start;  // the index of the first element of the first column
  bool live;  // whether there are such columns

  // Columns are counted through all of `outer`; V divides inner.
  __device__ __forceinline__ StridedColumns(long long group, long long outer, long long size, long long inner) {
    const long long column = group * V;
    live = column < outer * inner;
    start = live ? column / inner * size * inner + column % inner : 0;
  }
};

// Reduces V values of each thread over threadIdx.y. `shared` has room for V values of each thread. It begins with a barrier.
template <typename Op, int V, typename A> __device__ __forceinline__ void reduce_columns(A (&values)[V], A* shared) {
  if (blockDim.y == 1) return;
  const int mine = threadIdx.y * blockDim.x + threadIdx.x, threads = blockDim.x * blockDim.y;
  __syncthreads();
#pragma unroll
  for (int v = 0; v < V; ++v) shared[v * threads + mine] = values[v];
  for (int half = blockDim.y / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.y >= half) continue;
#pragma unroll
    for (int v = 0; v < V; ++v) {
      A* at = shared + v * threads + mine;
      *at = Op()(*at, at[half * blockDim.x]);
    }
  }
  __syncthreads();
#pragma unroll
  for (int v = 0; v < V; ++v) values[v] = shared[v * threads + threadIdx.x];
}

// V neighbours, by one load where `aligned` says that every such address is a multiple of their size.
template <int V, typename T>
__device__ __forceinline__ Vec<T, V> load_columns(const T* at, bool live, bool aligned) {
  Vec<T, V> result = {};
  if (live && aligned) return load_vec<T, V>(at);
#pragma unroll
  for (int v = 0; v < V; ++v) {
    if (live) result.data[v] = at[v];
  }
  return result;
}

template <typename T, int V> __device__ __forceinline__ bool aligned_for(const T* pointer) {
  return reinterpret_cast<unsigned long long>(pointer) % sizeof(Vec<T, V>) == 0;
}

template <typename O, int V> __device__ __forceinline__ void store_columns(O* at, const Vec<O, V>& values,
                                                                           bool aligned) {
  if (aligned) return store_vec<O, V>(at, values);
#pragma unroll
  for (int v = 0; v < V; ++v) at[v] = values.data[v];
}

// Grid: any size. Block: (threads on neighbouring columns, a power of two of threads that share a column), TWO_PASS_THREADS
// at most. A thread owns V neighbouring columns, and takes every blockDim.y-th element of each.
template <int V, typename T, typename O>
__device__ __forceinline__ void softmax_strided(const T* __restrict__ x, O* __restrict__ y, long long outer,
                                                long long size, long long inner, bool log) {
  using A = acc_t<T>;
  constexpr int U = 4;  // loads that a thread has in flight
  __shared__ A shared[TWO_PASS_THREADS * V];
  const bool x_vectors = aligned_for<T, V>(x), y_vectors = aligned_for<O, V>(y);
  for (long long first = blockIdx.x * (long long)blockDim.x; first * V < outer * inner;
       first += gridDim.x * (long long)blockDim.x) {
    const StridedColumns<V> columns(first + threadIdx.x, outer, size, inner);
    Online<O> mine[V];
    for (long long r = threadIdx.y; r < size; r += U * blockDim.y) {
      Vec<T, V> values[U];
#pragma unroll
      for (int u = 0; u < U; ++u) {
        const long long at = r + u * blockDim.y;
        values[u] = load_columns<V>(x + columns.start + at * inner, columns.live && at < size, x_vectors);
      }
#pragma unroll
      for (int v = 0; v < V; ++v) {
        mine[v].template add<U>(
            [&](int u) { return r + u * blockDim.y < size ? to_acc(values[u].data[v]) : -infinity<A>(); });
      }
    }
    A max[V], of_sum[V];
#pragma unroll
    for (int v = 0; v < V; ++v) max[v] = mine[v].max;
    reduce_columns<Larger>(max, shared);
#pragma unroll
    for (int v = 0; v < V; ++v) of_sum[v] = mine[v].sum_for(max[v]);
    reduce_columns<Sum>(of_sum, shared);
#pragma unroll
    for (int v = 0; v < V; ++v) of_sum[v] = of_sum_by<O>(log, of_sum[v]);
    with_formulas(log, [&](auto f) {
#pragma unroll U
      for (long long r = threadIdx.y; columns.live && r < size; r += blockDim.y) {
        const long long at = columns.start + r * inner;
        const Vec<T, V> value = load_columns<V>(x + at, true, x_vectors);
        Vec<O, V> result;
#pragma unroll
        for (int v = 0; v < V; ++v) {
          const A each = to_acc(value.data[v]);
          result.data[v] = from_acc<O>(f.template y<O>(Exponential<O>(max[v])(each), each - max[v], of_sum[v]));
        }
        store_columns(y + at, result, y_vectors);
      }
    });
  }
}

// Grid, block: as of softmax_strided().
template <typename F, int V, typename T, typename O>
__device__ __forceinline__ void softmax_strided_bwd(const O* __restrict__ grad_y, const O* __restrict__ y,
                                                    T* __restrict__ grad_x, long long outer, long long size,
                                                    long long inner) {
  using A = acc_t<O>;
  constexpr int U = 4;
  __shared__ A shared[TWO_PASS_THREADS * V];
  const bool g_vectors = aligned_for<O, V>(grad_y), y_vectors = aligned_for<O, V>(y),
             x_vectors = aligned_for<T, V>(grad_x);
  for (long long first = blockIdx.x * (long long)blockDim.x; first * V < outer * inner;
       first += gridDim.x * (long long)blockDim.x) {
    const StridedColumns<V> columns(first + threadIdx.x, outer, size, inner);
    A total[V] = {};
#pragma unroll U
    for (long long r = threadIdx.y; columns.live && r < size; r += blockDim.y) {
      const Vec<O, V> g = load_columns<V>(grad_y + columns.start + r * inner, true, g_vectors);
      const Vec<O, V> out = load_columns<V>(y + columns.start + r * inner, true, y_vectors);
#pragma unroll
      for (int v = 0; v < V; ++v) total[v] += F::term(to_acc(g.data[v]), to_acc(out.data[v]));
    }
    reduce_columns<Sum>(total, shared);
#pragma unroll U
    for (long long r = threadIdx.y; columns.live && r < size; r += blockDim.y) {
      const long long at = columns.start + r * inner;
      const Vec<O, V> g = load_columns<V>(grad_y + at, true, g_vectors), out = load_columns<V>(y + at, true, y_vectors);
      Vec<T, V> result;
#pragma unroll
      for (int v = 0; v < V; ++v) {
        result.data[v] = from_acc<T>(F::template grad_x<T>(to_acc(g.data[v]), to_acc(out.data[v]), total[v]));
      }
      store_columns(grad_x + at, result, x_vectors);
    }
  }
}
