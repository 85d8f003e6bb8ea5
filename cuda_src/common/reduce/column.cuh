// One pass over gradients that also sums what they are made of, for each column or each channel, in a fixed order.
//
// A Step has `static constexpr int SUMS` and `A operator()(A grad_y, A x, A parameter, A (&term)[SUMS])`, which returns the
// gradient of x and tells what is to be added to each of the sums. Where the pointer to x is null, x is taken to be 0.
//
// COLUMN_THREADS, of a block, and COLUMN_FINALIZE_THREADS are defined by column.py.
#pragma once

#include "common/reduce/warp_block.cuh"
#include "common/core/vector_load.cuh"

template <typename T> constexpr int kColumnBlocks = sizeof(T) == 8 ? 2 : 4;  // of a multiprocessor, at least

// Sums each of `columns` columns of `rows` numbers in shared memory, in a fixed order; one thread gives a column's sum to
// store(column, total). The numbers of a column are `pitch` apart, and the first is number first(column). There is space for
// a double of each thread in place of the numbers. All threads take part, once the numbers are there.
template <typename A, typename First, typename F>
__device__ __forceinline__ void sum_rows(void* shared, int columns, int rows, int pitch, First first, F store) {
  const A* const values = static_cast<A*>(shared);
  double* const totals = static_cast<double*>(shared);
  const int threads = blockDim.x * blockDim.y, thread = threadIdx.y * blockDim.x + threadIdx.x;
  const int parts = 1 << (31 - __clz(max(threads / columns, 1)));  // of a column's rows, where it has several threads
#pragma unroll 1
  for (int column = parts > 1 ? thread % columns : thread; column < columns; column += threads) {
    const A* of = values + first(column);
    double total = 0;
    for (int y = parts > 1 ? thread / columns : 0; y < rows; y += parts) total += of[y * pitch];
    if (parts > 1) {
      __syncthreads();
      totals[thread] = total;
      __syncthreads();
      for (int half = parts / 2; half > 0; half /= 2) {
        if (thread < half * columns) totals[thread] = total += totals[thread + half * columns];
        __syncthreads();
      }
      if (thread >= columns) break;
    }
    store(column, total);
  }
}

// Sums each of a thread's W values over threadIdx.y. One thread gives the sum of the values k of threads x to store(x, k,
// total). `shared` has space for W values of each thread, and for a double of each. All threads take part.
template <int W, typename A, typename F>
__device__ __forceinline__ void sum_over_y(const A (&sum)[W], void* shared, F store) {
  const int across = blockDim.x, threads = across * blockDim.y, thread = threadIdx.y * across + threadIdx.x;
  A* const values = static_cast<A*>(shared);
  __syncthreads();
#pragma unroll
  for (int k = 0; k < W; ++k) values[k * threads + thread] = sum[k];
  __syncthreads();
  sum_rows<A>(
      shared, across * W, blockDim.y, across, [&](int column) { return column / across * threads + column % across; },
      [&](int column, double total) { store(column % across, column / across, total); });
}

// The same where the W values of each thread, in the order of threads, make rows of `columns` numbers: the sum of each column
// is given to store(column, total).
template <int W, typename A, typename F>
__device__ __forceinline__ void sum_folded(const A (&sum)[W], int columns, void* shared, F store) {
  const int threads = blockDim.x * blockDim.y, thread = threadIdx.y * blockDim.x + threadIdx.x;
  A* const values = static_cast<A*>(shared);
  __syncthreads();
#pragma unroll
  for (int k = 0; k < W; ++k) values[thread * W + k] = sum[k];
  __syncthreads();
  sum_rows<A>(shared, columns, threads * W / columns, columns, [](int column) { return column; }, store);
}

// Gradients of [n] elements. x may be null, where it is not read, and grad_x, where nobody wants it. A vector has K sums, and
// K parameters: one for each element, or one in all.
template <int K, typename T, typename Step> struct SummedGradients {
  static constexpr int W = kVecWidth<T>;
  using A = acc_t<T>;
  const T* grad_y;
  const T* x;
  T* grad_x;
  long long n;
  A sum[Step::SUMS][K] = {};

  __device__ __forceinline__ bool aligned() const {
    return is_aligned16(grad_y) && is_aligned16(x) && is_aligned16(grad_x);
  }

  __device__ __forceinline__ A add(const Step& step, int k, T grad, T value, A parameter) {
    A term[Step::SUMS];
    const A result = step(to_acc(grad), to_acc(value), parameter, term);
#pragma unroll
    for (int s = 0; s < Step::SUMS; ++s) sum[s][k % K] += term[s];
    return result;
  }

  // Takes those of the U vectors, each from element `at` on, that are `there`: their elements begin <= k < end, or, unless
  // UNALIGNED, all of them.
  template <bool UNALIGNED, int U>
  __device__ __forceinline__ void add_vectors(const Step& step, const long long (&at)[U], const bool (&there)[U],
                                              const int (&begin)[U], const int (&end)[U], const A (&parameters)[K]) {
    Vec<T, W> grads[U], values[U];
#pragma unroll
    for (int u = 0; u < U; ++u) {
      if (!there[u]) continue;
      grads[u] = load_vec<T, W>(grad_y + at[u]);
      values[u] = x ? load_vec<T, W>(x + at[u]) : Vec<T, W>{};
    }
#pragma unroll
    for (int u = 0; u < U; ++u) {
      if (!there[u]) continue;
      const bool whole = !UNALIGNED || end[u] - begin[u] == W;
      // few vectors are not whole, and the elements of those that are need no test
      if (!whole) {
#pragma unroll
        for (int k = 0; k < W; ++k) {
          if (k < begin[u] || k >= end[u]) grads[u].data[k] = values[u].data[k] = T(0);
        }
      }
      Vec<T, W> result;
#pragma unroll
      for (int k = 0; k < W; ++k) {
        result.data[k] = from_acc<T>(add(step, k, grads[u].data[k], values[u].data[k], parameters[k % K]));
      }
      if (!grad_x) continue;
      if (whole) {
        store_whole(grad_x + at[u], result);
        continue;
      }
#pragma unroll
      for (int k = 0; k < W; ++k) {
        if (k >= begin[u] && k < end[u]) grad_x[at[u] + k] = result.data[k];
      }
    }
  }

  // Takes elements begin <= k < end of the vector from `at` on, one by one.
  __device__ __forceinline__ void add_singly(const Step& step, long long at, int begin, int end,
                                             const A (&parameters)[K]) {
#pragma unroll
    for (int k = 0; k < W; ++k) {
      const long long i = at + k;
      if (k < begin || k >= end) continue;
      const A result = add(step, k, grad_y[i], x ? x[i] : T(0), parameters[k % K]);
      if (grad_x) grad_x[i] = from_acc<T>(result);
    }
  }
};

// column.py makes these. `period` vectors are whole rows of the array: a thread has the same columns in every period, also
// where vectors straddle rows.
struct Columns {
  long long n, columns, inner;  // elements of the array and of a row; neighbours that share a parameter
  long long period, periods, slab_periods;
  long long folded;  // whether a block has whole periods, of several rows, and adds these up too
};

// Grid: tiles x slabs in one dimension, tiles fastest; a tile is blockDim.x vectors of a period, a slab `slab_periods`
// periods. Block: (x, y) of COLUMN_THREADS at most. Each thread owns a vector of every blockDim.y-th period of its slab, of
// which U are under way at once. The block leaves those of its sums that are `wanted`, a bit for each, in partial:
// [SUMS][slabs][period * W], or, folded, [SUMS][slabs][columns]. `parameters` [columns / inner] may be null, for a step that
// has none.
template <int U, typename T, typename Step>
__device__ __forceinline__ void sum_columns(const Columns& size, const Step& step, const T* __restrict__ grad_y,
                                            const T* x, const T* parameters, T* grad_x, acc_t<T>* __restrict__ partial,
                                            int wanted) {
  constexpr int W = kVecWidth<T>;
  using A = acc_t<T>;
  __shared__ __align__(16) A shared[COLUMN_THREADS * W];
  const unsigned tiles = static_cast<unsigned>((size.period + blockDim.x - 1) / blockDim.x);
  const long long slab = blockIdx.x / tiles, slabs = gridDim.x / tiles;
  const long long column = blockIdx.x % tiles * (long long)blockDim.x + threadIdx.x;  // of vectors
  SummedGradients<W, T, Step> gradients = {grad_y, x, grad_x, size.n};
  if (column < size.period) {
    const long long whole = gradients.aligned() ? size.n / W : 0;
    acc_t<T> own[W] = {};
    long long from = column * W % size.columns;
#pragma unroll
    for (int k = 0; k < W; ++k) {
      if (parameters) own[k] = to_acc(parameters[size.inner == 1 ? from : from / size.inner]);
      if (++from == size.columns) from = 0;
    }
    const long long first = slab * size.slab_periods + threadIdx.y,
                    last = min((slab + 1) * size.slab_periods, size.periods);
    // those of the vectors first * period + column, and so on, that are whole
    const long long end = min(last, (whole - column + size.period - 1) / size.period);
    const long long stride = blockDim.y * size.period * W;
    long long at = (first * size.period + column) * W;
#pragma unroll 1
    for (int left = static_cast<int>((end - first + blockDim.y - 1) / blockDim.y); left > 0; left -= U) {
      long long offset[U];
      bool there[U];
      const int all[U] = {};
#pragma unroll
      for (int u = 0; u < U; ++u) offset[u] = at + u * stride, there[u] = u < left;
      gradients.template add_vectors<false>(step, offset, there, all, all, own);
      at += U * stride;
    }
    if (whole * W < size.n) {
#pragma unroll 1
      for (long long row = first; row < last; row += blockDim.y) {
        const long long v = row * size.period + column;
        if (v >= whole) gradients.add_singly(step, v * W, 0, static_cast<int>(min(size.n - v * W, (long long)W)), own);
      }
    }
  }
#pragma unroll
  for (int s = 0; s < Step::SUMS; ++s) {
    if ((wanted >> s & 1) == 0) continue;
    if (size.folded) {
      A* const to = partial + (s * slabs + slab) * size.columns;
      sum_folded<W>(gradients.sum[s], static_cast<int>(size.columns), shared,
                    [&](int c, double total) { to[c] = total; });
      continue;
    }
    A* const to = partial + (s * slabs + slab) * size.period * W;
    const long long tile = column - threadIdx.x;
    sum_over_y<W>(gradients.sum[s], shared, [&](int x, int k, double total) {
      if (tile + x < size.period) to[(tile + x) * W + k] = total;
    });
  }
}

template <typename T> constexpr int kChannelBlocks = sizeof(T) == 8 ? 2 : 6;  // of a multiprocessor, at least

// An array [outer x channels x inner], in which the outer x units vectors of a channel are cut into slabs of `slab_units`.
struct Channels {
  long long n, channels, inner;
  long long units;  // vectors of `inner` elements
  long long slab_units, slabs, all_units;  // vectors of a slab; slabs and vectors of a channel
  long long unit_step, start_step;  // what kWarp units are: units, and, beyond the last of them, elements
};

// Grid: any that gives each slab of each channel a warp, channels fastest. Block: COLUMN_THREADS. The lanes of a warp take
// every 32nd vector of their slab; what hides the latency of memory is many blocks, and not a thread's next vectors. Where
// channels are UNALIGNED, a unit is the part of a vector that lies in the channel, which is empty where `units` are more than
// there are. store(s, slab, channel, total) takes sum s of a slab; `parameters` [channels] may be null, for a step that has
// none.
template <bool UNALIGNED, typename T, typename Step, typename F>
__device__ __forceinline__ void sum_channels(const Channels& size, const Step& step, const T* __restrict__ grad_y,
                                             const T* x, const T* parameters, T* grad_x, F store) {
  constexpr int W = kVecWidth<T>;
  const long long warp = global_thread() / kWarp, slab = warp / size.channels, channel = warp - slab * size.channels;
  if (slab >= size.slabs) return;
  SummedGradients<1, T, Step> gradients = {grad_y, x, grad_x, size.n};
  const bool aligned = gradients.aligned();
  const acc_t<T> own[1] = {parameters ? to_acc(parameters[channel]) : acc_t<T>(0)};
  const long long last = min((slab + 1) * size.slab_units, size.all_units), around = size.channels * size.inner;
  long long unit = slab * size.slab_units + threadIdx.x % kWarp;
  // a division per unit would cost more than the sums
  const long long before = unit / size.units;
  long long b = unit - before * size.units, start = before * around + channel * size.inner;
#pragma unroll 1
  while (unit < last) {
    const long long at[1] = {(UNALIGNED ? start & -W : start) + b * W};
    const int begin[1] = {UNALIGNED ? static_cast<int>(max(start - at[0], 0LL)) : 0};
    const int end[1] = {UNALIGNED ? static_cast<int>(max(min(start + size.inner - at[0], (long long)W), 0LL)) : W};
    const bool there[1] = {aligned && begin[0] < end[0] && (!UNALIGNED || at[0] + W <= size.n)};
    unit += kWarp, b += size.unit_step, start += size.start_step;
    if (b >= size.units) b -= size.units, start += around;
    gradients.template add_vectors<UNALIGNED>(step, at, there, begin, end, own);
    if (!there[0]) gradients.add_singly(step, at[0], begin[0], end[0], own);
  }
#pragma unroll
  for (int s = 0; s < Step::SUMS; ++s) {
    const double total = warp_reduce<Sum>(static_cast<double>(gradients.sum[s][0]));
    if (threadIdx.x % kWarp == 0) store(s, slab, channel, total);
  }
}

// first[channel] = the sum of partial [slabs x channels x inner] over slabs and inner; blockIdx.y = 1 sums the second such
// array into `second`. One of the two may be null. Grid: (ceil(channels / blockDim.x), arrays). Block: (x, y) of
// COLUMN_FINALIZE_THREADS at most. A thread owns a channel and every blockDim.y-th slab.
template <typename T>
__device__ __forceinline__ void finalize_sums(const acc_t<T>* __restrict__ partial, T* first, T* second,
                                              long long slabs, long long channels, long long inner) {
  constexpr int U = 4;  // loads under way
  using A = acc_t<T>;
  __shared__ double shared[COLUMN_FINALIZE_THREADS];
  T* const to = blockIdx.y == 0 ? first : second;
  if (to == nullptr) return;
  const long long tile = blockIdx.x * (long long)blockDim.x, channel = tile + threadIdx.x;
  partial += blockIdx.y * slabs * channels * inner;
  double sum[1] = {};
  if (channel < channels) {
    for (long long b = 0; b < inner; ++b) {
      const A* from = partial + channel * inner + b;
      for (long long slab = threadIdx.y; slab < slabs; slab += U * blockDim.y) {
        A loaded[U];
#pragma unroll
        for (int u = 0; u < U; ++u) {
          const long long here = slab + u * blockDim.y;
          loaded[u] = here < slabs ? from[here * channels * inner] : A(0);
        }
#pragma unroll
        for (int u = 0; u < U; ++u) sum[0] += loaded[u];
      }
    }
  }
  sum_over_y<1>(sum, shared, [&](int x, int, double total) {
    if (tile + x < channels) to[tile + x] = from_acc<T>(static_cast<A>(total));
  });
}
