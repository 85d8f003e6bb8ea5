// What softmax and log_softmax share: both see the input as (outer, size, inner) and differ in the formulas of a struct
// F.
//
//     inner = 1, a row fits the registers of a block         rows        one read
//     inner = 1, a short row off 16-byte boundaries          small rows  one read, see softmax_small.cuh
//     inner = 1, or the shared memory of a block or cluster  held rows   one read
//     inner = 1, longer rows                                 wide rows   max and sum in one online pass, a second read
//     inner > 1                                              columns     the same, neighbouring threads on neighbours
//
// Rows of one vector a thread, and wide rows, come in two versions, by vectors and by elements; see rows.cuh. Of other rows
// what is no whole vector goes by elements.
#pragma once

#include "common/tile/persistent_row.cuh"
#include "common/reduce/online_softmax_row.cuh"
#include "softmax/strided.cuh"

// --- rows ---

// One row: vectors in, y out. All threads of the row take part; those that have no row find nothing in it.
template <typename F, int K, bool ALIGNED, typename T, typename O, typename Threads>
__device__ __forceinline__ void softmax_row(const T* x, O* y, long long row, long long rows, int size,
                                            Threads& threads) {
  using A = acc_t<T>;
  constexpr int W = kVecWidth<T>;
  const UnalignedRow<W, K == 1> cut(row, rows, size);
  const auto tile = Tile<K, W, ALIGNED>::at(row, rows, cut.whole);
  const long long at = row * size + cut.head, lone = row * size + cut.column;
  Vector<T> vectors[K];
  load_row(tile, x + at, from_acc<T>(-infinity<A>()), vectors);
  if constexpr (K == 1) {  // in a warp: what is computed for the sum is kept
    const A max = threads.template over_lanes<Larger>(largest(vectors));
    const Exponential<O> exp(max);
    A exps[W];
#pragma unroll
    for (int e = 0; e < W; ++e) exps[e] = exp(vectors[0][e]);
    const A sum = reduce_elements<Sum, 1, W>([&](int, int e) { return exps[e]; });
    const A of_sum = F::template of_sum<O>(threads.template over_lanes<Sum>(sum));
    store_vector(tile, y + at, 0, [&](int e) { return F::template y<O>(exps[e], vectors[0][e] - max, of_sum); });
  } else {
    const A alone = cut.lone ? to_acc(x[lone]) : -infinity<A>();
    const Pair<A> sums = online_row<O>(vectors, threads, cut.lone, alone);
    const Exponential<O> exp(sums.first);
    const A of_sum = F::template of_sum<O>(sums.second);
    const auto result = [&](A value) { return F::template y<O>(exp(value), value - sums.first, of_sum); };
#pragma unroll
    for (int k = 0; k < K; ++k) store_vector(tile, y + at, k, [&](int e) { return result(vectors[k][e]); });
    if (cut.lone) y[lone] = from_acc<O>(result(alone));
  }
}

// f(row) for each row of a thread, and for as many of others of its block.
template <typename F> __device__ __forceinline__ void each_row(long long rows, F f) {
  const long long stride = gridDim.x * (long long)blockDim.y;
  for (long long first = blockIdx.x * (long long)blockDim.y; first < rows; first += stride) f(first + threadIdx.y);
}

// Grid: any. Block: see rows.cuh; K vectors in each thread hold a row. Several hold the whole vectors of a UnalignedRow: 2 W - 2
// threads or more then share a row, and all tensors begin at 16-byte boundaries. Threads own whole vectors of x and y.
template <typename F, int K, typename T, typename O>
__device__ __forceinline__ void softmax_rows(const T* __restrict__ x, O* __restrict__ y, long long rows, int size) {
  using Threads = RowThreads<Pair<acc_t<T>>, false>;
  __shared__ typename Threads::Room room;
  Threads threads(room);
  if (K > 1 || all_aligned<kVecWidth<T>>(size, x, y)) {
    each_row(rows, [&](long long row) { softmax_row<F, K, true>(x, y, row, rows, size, threads); });
  } else if constexpr (K == 1) {
    each_row(rows, [&](long long row) { softmax_row<F, K, false>(x, y, row, rows, size, threads); });
  }
}

// As softmax_row.
template <typename F, int K, bool ALIGNED, typename T, typename O, typename Threads>
__device__ __forceinline__ void softmax_row_bwd(const O* grad_y, const O* y, T* grad_x, long long row, long long rows,
                                                int size, Threads& threads) {
  using A = acc_t<O>;
  constexpr int W = kVecWidth<O>;
  const UnalignedRow<W, K == 1> cut(row, rows, size);
  const auto tile = Tile<K, W, ALIGNED>::at(row, rows, cut.whole);
  const long long at = row * size + cut.head, lone = row * size + cut.column;
  Vector<O> grads[K], outputs[K];
  load_row(tile, grad_y + at, from_acc<O>(A(0)), grads);
  load_row(tile, y + at, from_acc<O>(A(0)), outputs);
  A grad = A(0), output = A(0);
  if (cut.lone) grad = to_acc(grad_y[lone]), output = to_acc(y[lone]);
  A part = reduce_elements<Sum, K, W>([&](int k, int e) { return F::term(grads[k][e], outputs[k][e]); });
  if (cut.lone) part += F::term(grad, output);
  const A total = threads.template reduce<Sum>(part);
  fold(grads), fold(outputs);
#pragma unroll
  for (int k = 0; k < K; ++k) {
    store_vector(tile, grad_x + at, k, [&](int e) { return F::template grad_x<T>(grads[k][e], outputs[k][e], total); });
  }
  if (cut.lone) grad_x[lone] = from_acc<T>(F::template grad_x<T>(grad, output, total));
}

// Grid, block: as softmax_rows. T is the type of x and grad_x, O that of y and grad_y.
template <typename F, int K, typename T, typename O>
__device__ __forceinline__ void softmax_rows_bwd(const O* __restrict__ grad_y, const O* __restrict__ y,
                                                 T* __restrict__ grad_x, long long rows, int size) {
  using Threads = RowThreads<acc_t<O>, false>;
  __shared__ typename Threads::Room room;
  Threads threads(room);
  if (K > 1 || all_aligned<kVecWidth<O>>(size, grad_y, y, grad_x)) {
    each_row(rows, [&](long long row) { softmax_row_bwd<F, K, true>(grad_y, y, grad_x, row, rows, size, threads); });
  } else if constexpr (K == 1) {
    each_row(rows, [&](long long row) { softmax_row_bwd<F, K, false>(grad_y, y, grad_x, row, rows, size, threads); });
  }
}

// --- held rows ---

// What the sum over a long row is added in: of fp32 double, once for each vector, else where the terms cancel the rounding of
// their sums is larger than what is left.
template <typename O> struct LongSum { using type = acc_t<O>; };
template <> struct LongSum<float> { using type = double; };
template <typename O> using long_sum_t = typename LongSum<O>::type;

// Grid, block, shared memory: see each_persistent_row(). A row has a block or a cluster.
template <typename F, int THREADS, typename T, typename O>
__device__ __forceinline__ void softmax_held(const T* __restrict__ x, O* __restrict__ y, long long rows, long long size,
                                             int vectors) {
  using A = acc_t<T>;
  using Threads = RowThreads<Pair<A>, true>;
  __shared__ typename Threads::Room room;
  Threads threads(room);
  OnlineVectors<O> sums;
  A of_sum = A(0);
  const T* const from[] = {x};
  each_persistent_row<THREADS, 2>(
      from, PersistentRows{rows, size, size, vectors, is_aligned16(x) && is_aligned16(y)}, from_acc<T>(-infinity<A>()),
      threads, [&](long long) { sums = OnlineVectors<O>(); }, [&](const Vector<T>(&some)[1][2]) { sums.add(some[0]); },
      [&] {
        sums.reduce(threads);
        of_sum = F::template of_sum<O>(sums.sum, sums.exp.of_max());
      },
      [&](const Place<T, THREADS>& place, const Vector<T>(&some)[1]) {
        put_persistent(place, y,
                       [&](int e) { return F::template y<O>(sums.exp(some[0][e]), some[0][e] - sums.max, of_sum); });
      },
      [](const Part<T, THREADS>&) {});
}

// Grid, block, shared memory: as softmax_held.
template <typename F, int THREADS, typename T, typename O>
__device__ __forceinline__ void softmax_held_bwd(const O* __restrict__ grad_y, const O* __restrict__ y,
                                                 T* __restrict__ grad_x, long long rows, long long size, int vectors) {
  using A = acc_t<O>;
  using S = long_sum_t<O>;
  using Threads = RowThreads<S, true>;
  __shared__ typename Threads::Room room;
  Threads threads(room);
  S sum = S(0);
  A total = A(0);
  const O* const from[] = {grad_y, y};
  const bool aligned = is_aligned16(grad_y) && is_aligned16(y) && is_aligned16(grad_x);
  each_persistent_row<THREADS, 1>(
      from, PersistentRows{rows, size, size, vectors, aligned}, from_acc<O>(A(0)), threads,
      [&](long long) { sum = S(0); },
      [&](const Vector<O>(&some)[2][1]) {
        sum +=
            reduce_elements<Sum, 1, kVecWidth<O>>([&](int k, int e) { return F::term(some[0][k][e], some[1][k][e]); });
      },
      [&] { total = A(threads.template reduce<Sum>(sum)); },
      [&](const Place<O, THREADS>& place, const Vector<O>(&some)[2]) {
        put_persistent(place, grad_x, [&](int e) { return F::template grad_x<T>(some[0][e], some[1][e], total); });
      },
      [](const Part<O, THREADS>&) {});
}

// --- wide rows ---

constexpr int kWideThreads = 1024;  // at most, in a block

// A whole row, twice. The second pass goes backwards: what was read last is still in cache.
template <typename F, int K, bool ALIGNED, typename T, typename O, typename A = acc_t<T>>
__device__ __forceinline__ void softmax_wide_row(const T* x, O* y, long long row, long long rows, long long size,
                                                 A* shared) {
  constexpr int W = kVecWidth<T>;
  using Part = Tile<K, W, ALIGNED>;
  const int parts = Part::count(size);
  Vector<T> vectors[K];
  Online<O> mine;
  for (int c = 0; c < parts; ++c) {
    load_row(Part::at(row, rows, size, c), x + c * (long long)Part::capacity(), from_acc<T>(-infinity<A>()), vectors);
    mine.template add<K * W>(largest(vectors), [&](int i) { return vectors[i / W][i % W]; });
  }
  const A max = block_reduce<Larger>(mine.max, shared);
  const Exponential<O> exp(max);
  const A of_sum = F::template of_sum<O>(block_reduce<Sum>(mine.sum_for(max), shared));
  for (int c = parts - 1; c >= 0; --c) {
    const Part part = Part::at(row, rows, size, c);
    const long long at = c * (long long)Part::capacity();
    load_row(part, x + at, T(), vectors);
#pragma unroll
    for (int k = 0; k < K; ++k) {
      store_vector(part, y + at, k,
                   [&](int e) { return F::template y<O>(exp(vectors[k][e]), vectors[k][e] - max, of_sum); });
    }
  }
}

// Grid: any. Block: (a multiple of 32, 1), at most kWideThreads.
template <typename F, int K, typename T, typename O>
__device__ __forceinline__ void softmax_wide(const T* __restrict__ x, O* __restrict__ y, long long rows,
                                             long long size) {
  __shared__ acc_t<T> shared[kWarp];
  const bool aligned = all_aligned<kVecWidth<T>>(size, x, y);
  for (long long row = blockIdx.x; row < rows; row += gridDim.x) {
    const long long at = row * size;
    if (aligned) softmax_wide_row<F, K, true>(x + at, y + at, row, rows, size, shared);
    else softmax_wide_row<F, 2, false>(x + at, y + at, row, rows, size, shared);
  }
}

// As softmax_wide_row.
template <typename F, int K, bool ALIGNED, typename T, typename O, typename S = long_sum_t<O>>
__device__ __forceinline__ void softmax_wide_row_bwd(const O* grad_y, const O* y, T* grad_x, long long row,
                                                     long long rows, long long size, S* shared) {
  using A = acc_t<O>;
  constexpr int W = kVecWidth<O>;
  using Part = Tile<K, W, ALIGNED>;
  const int parts = Part::count(size);
  const O zero = from_acc<O>(A(0));
  Vector<O> grads[K], outputs[K];
  S sum = S(0);
  for (int c = 0; c < parts; ++c) {
    const Part part = Part::at(row, rows, size, c);
    const long long at = c * (long long)Part::capacity();
    load_row(part, grad_y + at, zero, grads);
    load_row(part, y + at, zero, outputs);
    sum += reduce_elements<Sum, K, W>([&](int k, int e) { return F::term(grads[k][e], outputs[k][e]); });
  }
  const A total = A(block_reduce<Sum>(sum, shared));
  for (int c = parts - 1; c >= 0; --c) {
    const Part part = Part::at(row, rows, size, c);
    const long long at = c * (long long)Part::capacity();
    load_row(part, grad_y + at, zero, grads);
    load_row(part, y + at, zero, outputs);
#pragma unroll
    for (int k = 0; k < K; ++k) {
      store_vector(part, grad_x + at, k,
                   [&](int e) { return F::template grad_x<T>(grads[k][e], outputs[k][e], total); });
    }
  }
}

// Grid, block: as softmax_wide.
template <typename F, int K, typename T, typename O>
__device__ __forceinline__ void softmax_wide_bwd(const O* __restrict__ grad_y, const O* __restrict__ y,
                                                 T* __restrict__ grad_x, long long rows, long long size) {
  __shared__ long_sum_t<O> shared[kWarp];
  const bool aligned = all_aligned<kVecWidth<O>>(size, grad_y, y, grad_x);
  for (long long row = blockIdx.x; row < rows; row += gridDim.x) {
    const long long at = row * size;
    if (aligned) softmax_wide_row_bwd<F, K, true>(grad_y + at, y + at, grad_x + at, row, rows, size, shared);
    else softmax_wide_row_bwd<F, 1, false>(grad_y + at, y + at, grad_x + at, row, rows, size, shared);
  }
}
