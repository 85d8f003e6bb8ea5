// What softmax and log_softmax share: both see the input as (outer, size, inner) and differ in the formulas of a struct
// F.
//
//     inner = 1, a row fits the registers of a block     rows        one read
//     inner = 1, longer rows                             wide rows   max and sum in one online pass, then a second read
//     inner > 1                                          columns     the same, neighbouring threads on neighbours
//
// NaN and +inf in a row, or a row of -inf alone, give NaN throughout: x - max is NaN for one element, and so is the
// sum. The maximum may therefore drop NaN.
#pragma once

#include "common/rows.cuh"

// The output's type: T, or with WIDEN that which T is computed in, as softmax(x, dtype=torch.float32) asks of half
// types.
template <typename T, bool WIDEN> struct Widened { using type = T; };
template <typename T> struct Widened<T, true> { using type = acc_t<T>; };
template <typename T, bool WIDEN> using out_t = typename Widened<T, WIDEN>::type;

// exp(x), x <= 0, as exactly as an output of type O can show: for half types two instructions, off by 2 ulp of fp32,
// that flush what a half type rounds to 0.
template <typename O> __device__ __forceinline__ acc_t<O> exp_for(acc_t<O> x) {
  if constexpr (sizeof(O) == 2) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * 1.4426950408889634f));
    return y;
  } else {
    return exp(x);
  }
}

struct Larger {
  template <typename A> static __device__ __forceinline__ A identity() { return -infinity<A>(); }
  template <typename A> __device__ __forceinline__ A operator()(A a, A b) const { return fmax(a, b); }
};

struct Softmax {
  template <typename A> static __device__ __forceinline__ A of_sum(A sum) { return A(1) / sum; }
  // x - max, and of_sum(sum of exp(x - max))
  template <typename O> static __device__ __forceinline__ acc_t<O> forward(acc_t<O> x, acc_t<O> of_sum) {
    return exp_for<O>(x) * of_sum;
  }
  template <typename A> static __device__ __forceinline__ A term(A grad_y, A y) { return grad_y * y; }
  // total is the sum of the terms
  template <typename O> static __device__ __forceinline__ acc_t<O> backward(acc_t<O> grad_y, acc_t<O> y,
                                                                            acc_t<O> total) {
    return y * (grad_y - total);
  }
};

struct LogSoftmax {
  template <typename A> static __device__ __forceinline__ A of_sum(A sum) { return log(sum); }
  template <typename O> static __device__ __forceinline__ acc_t<O> forward(acc_t<O> x, acc_t<O> of_sum) {
    return x - of_sum;
  }
  template <typename A> static __device__ __forceinline__ A term(A grad_y, A) { return grad_y; }
  template <typename O> static __device__ __forceinline__ acc_t<O> backward(acc_t<O> grad_y, acc_t<O> y,
                                                                            acc_t<O> total) {
    return grad_y - exp_for<O>(y) * total;
  }
};

// The maximum of numbers seen one group at a time, and the sum of exp(x - max).
template <typename O> struct Online {
  using A = acc_t<O>;
  A max = -infinity<A>(), sum = A(0);

  // -inf - -inf would be NaN before the first number is seen.
  static __device__ __forceinline__ A base(A max) { return max == -infinity<A>() ? A(0) : max; }

  // The numbers x(0) ... x(N - 1).
  template <int N, typename F> __device__ __forceinline__ void add(F x) {
    A top = max;
#pragma unroll
    for (int i = 0; i < N; ++i) top = Larger()(top, x(i));
    sum *= exp_for<O>(max - base(top));
#pragma unroll
    for (int i = 0; i < N; ++i) sum += exp_for<O>(x(i) - base(top));
    max = top;
  }

  // The sum, for a maximum over more numbers than this thread's.
  __device__ __forceinline__ A sum_for(A top) const { return sum * exp_for<O>(max - base(top)); }
};

// --- rows ---

// Grid: any. Block: see rows.cuh; K packs in each thread hold a row. Threads own whole packs of x and y.
template <typename F, int K, typename T, typename O>
__device__ __forceinline__ void softmax_rows(const T* __restrict__ x, O* __restrict__ y, long long rows, int size) {
  using A = acc_t<T>;
  constexpr int W = kVecWidth<T>;
  __shared__ A shared[kWarp];
  for (long long first = blockIdx.x * (long long)blockDim.y; first < rows; first += gridDim.x * (long long)blockDim.y) {
    const long long row = first + threadIdx.y;
    const auto window = whole_row<K>(x + row * size, size, row < rows);
    Pack<T> packs[K];
    load_row(window, x + row * size, from_acc<T>(-infinity<A>()), packs);
    A max = -infinity<A>(), sum = A(0);
    each_element<K, W>([&](int k, int e) { max = Larger()(max, packs[k][e]); });
    max = row_reduce<Larger>(max, shared);
    each_element<K, W>([&](int k, int e) { sum += exp_for<O>(packs[k][e] - max); });
    const A of_sum = F::of_sum(row_reduce<Sum>(sum, shared));
#pragma unroll
    for (int k = 0; k < K; ++k) {
      store_pack(window, y + row * size, k, [&](int e) { return F::template forward<O>(packs[k][e] - max, of_sum); });
    }
  }
}

// Grid, block: as softmax_rows. T is the type of x and grad_x, O that of y and grad_y.
template <typename F, int K, typename T, typename O>
__device__ __forceinline__ void softmax_rows_bwd(const O* __restrict__ grad_y, const O* __restrict__ y,
                                                 T* __restrict__ grad_x, long long rows, int size) {
  using A = acc_t<O>;
  constexpr int W = kVecWidth<O>;
  __shared__ A shared[kWarp];
  for (long long first = blockIdx.x * (long long)blockDim.y; first < rows; first += gridDim.x * (long long)blockDim.y) {
    const long long row = first + threadIdx.y;
    const auto window = whole_row<K>(y + row * size, size, row < rows);
    Pack<O> grads[K], outputs[K];
    load_row(window, grad_y + row * size, from_acc<O>(A(0)), grads);
    load_row(window, y + row * size, from_acc<O>(A(0)), outputs);
    A total = A(0);
    each_element<K, W>([&](int k, int e) { total += F::term(grads[k][e], outputs[k][e]); });
    total = row_reduce<Sum>(total, shared);
    fold(grads), fold(outputs);
#pragma unroll
    for (int k = 0; k < K; ++k) {
      store_pack(window, grad_x + row * size, k,
                 [&](int e) { return F::template backward<T>(grads[k][e], outputs[k][e], total); });
    }
  }
}

// --- wide rows ---

// Grid: any. Block: (a multiple of 32, 1). The second pass goes backwards: what was read last is still in cache.
template <typename F, int K, typename T, typename O>
__device__ __forceinline__ void softmax_wide(const T* __restrict__ x, O* __restrict__ y, long long rows,
                                             long long size) {
  using A = acc_t<T>;
  constexpr int W = kVecWidth<T>;
  __shared__ A shared[kWarp];
  for (long long row = blockIdx.x; row < rows; row += gridDim.x) {
    const T* x_row = x + row * size;
    const long long windows = windows_of<K>(x_row, size);
    Pack<T> packs[K];
    Online<O> mine;
    for (long long c = 0; c < windows; ++c) {
      load_row(window_at<K>(x_row, size, c), x_row, from_acc<T>(-infinity<A>()), packs);
      mine.template add<K * W>([&](int i) { return packs[i / W][i % W]; });
    }
    const A max = block_reduce<Larger>(mine.max, shared);
    const A of_sum = F::of_sum(block_reduce<Sum>(mine.sum_for(max), shared));
    for (long long c = windows - 1; c >= 0; --c) {
      const auto window = window_at<K>(x_row, size, c);
      load_row(window, x_row, T(), packs);
#pragma unroll
      for (int k = 0; k < K; ++k) {
        store_pack(window, y + row * size, k, [&](int e) { return F::template forward<O>(packs[k][e] - max, of_sum); });
      }
    }
  }
}

// Grid, block: as softmax_wide.
template <typename F, int K, typename T, typename O>
__device__ __forceinline__ void softmax_wide_bwd(const O* __restrict__ grad_y, const O* __restrict__ y,
                                                 T* __restrict__ grad_x, long long rows, long long size) {
  using A = acc_t<O>;
  constexpr int W = kVecWidth<O>;
  __shared__ A shared[kWarp];
  for (long long row = blockIdx.x; row < rows; row += gridDim.x) {
    const O *g_row = grad_y + row * size, *y_row = y + row * size;
    const long long windows = windows_of<K>(y_row, size);
    Pack<O> grads[K], outputs[K];
    A total = A(0);
    for (long long c = 0; c < windows; ++c) {
      const auto window = window_at<K>(y_row, size, c);
      load_row(window, g_row, from_acc<O>(A(0)), grads);
      load_row(window, y_row, from_acc<O>(A(0)), outputs);
      each_element<K, W>([&](int k, int e) { total += F::term(grads[k][e], outputs[k][e]); });
    }
    total = block_reduce<Sum>(total, shared);
    for (long long c = windows - 1; c >= 0; --c) {
      const auto window = window_at<K>(y_row, size, c);
      load_row(window, g_row, from_acc<O>(A(0)), grads);
      load_row(window, y_row, from_acc<O>(A(0)), outputs);
#pragma unroll
      for (int k = 0; k < K; ++k) {
        store_pack(window, grad_x + row * size, k,
                   [&](int e) { return F::template backward<T>(grads[k][e], outputs[k][e], total); });
      }
    }
  }
}

// --- columns ---

constexpr int kColumnThreads = 512;  // at most, in a block

// V columns next to each other, and where they are.
template <int V> struct Columns {
  long long start;  // the first element of the first column
  bool live;

  // Columns are counted through all of `outer`; V divides inner, or is 1.
  __device__ __forceinline__ Columns(long long group, long long outer, long long size, long long inner) {
    const long long column = group * V;
    live = column < outer * inner;
    start = live ? column / inner * size * inner + column % inner : 0;
  }
};

// V values of each thread over threadIdx.y. `shared` holds V values of each thread of the block. Begins with a barrier.
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

// V neighbours, by one load where `vectors` says that every such address is a multiple of their size.
template <int V, typename T>
__device__ __forceinline__ Vec<T, V> load_columns(const T* at, bool live, bool vectors) {
  Vec<T, V> result = {};
  if (live && vectors) return load_vec<T, V>(at);
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
                                                                           bool vectors) {
  if (vectors) return store_vec<O, V>(at, values);
#pragma unroll
  for (int v = 0; v < V; ++v) at[v] = values.data[v];
}

// Grid: any. Block: (neighbouring columns, a power of two that share the column's elements), at most kColumnThreads. A
// thread owns V neighbouring columns, every blockDim.y-th element of each.
template <typename F, int V, typename T, typename O>
__device__ __forceinline__ void softmax_columns(const T* __restrict__ x, O* __restrict__ y, long long outer,
                                                long long size, long long inner) {
  using A = acc_t<T>;
  constexpr int U = 4;  // loads under way in each thread
  __shared__ A shared[kColumnThreads * V];
  const bool x_vectors = aligned_for<T, V>(x), y_vectors = aligned_for<O, V>(y);
  for (long long first = blockIdx.x * (long long)blockDim.x; first * V < outer * inner;
       first += gridDim.x * (long long)blockDim.x) {
    const Columns<V> columns(first + threadIdx.x, outer, size, inner);
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
    for (int v = 0; v < V; ++v) of_sum[v] = F::of_sum(of_sum[v]);
#pragma unroll U
    for (long long r = threadIdx.y; columns.live && r < size; r += blockDim.y) {
      const long long at = columns.start + r * inner;
      const Vec<T, V> value = load_columns<V>(x + at, true, x_vectors);
      Vec<O, V> result;
#pragma unroll
      for (int v = 0; v < V; ++v) {
        result.data[v] = from_acc<O>(F::template forward<O>(to_acc(value.data[v]) - max[v], of_sum[v]));
      }
      store_columns(y + at, result, y_vectors);
    }
  }
}

// Grid, block: as softmax_columns.
template <typename F, int V, typename T, typename O>
__device__ __forceinline__ void softmax_columns_bwd(const O* __restrict__ grad_y, const O* __restrict__ y,
                                                    T* __restrict__ grad_x, long long outer, long long size,
                                                    long long inner) {
  using A = acc_t<O>;
  constexpr int U = 4;
  __shared__ A shared[kColumnThreads * V];
  const bool g_vectors = aligned_for<O, V>(grad_y), y_vectors = aligned_for<O, V>(y),
             x_vectors = aligned_for<T, V>(grad_x);
  for (long long first = blockIdx.x * (long long)blockDim.x; first * V < outer * inner;
       first += gridDim.x * (long long)blockDim.x) {
    const Columns<V> columns(first + threadIdx.x, outer, size, inner);
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
        result.data[v] = from_acc<T>(F::template backward<T>(to_acc(g.data[v]), to_acc(out.data[v]), total[v]));
      }
      store_columns(grad_x + at, result, x_vectors);
    }
  }
}
