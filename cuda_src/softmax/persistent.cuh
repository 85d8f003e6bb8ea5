// Rows that a block or a cluster keeps in shared memory: each element is read once.
#pragma once

#include "common/reduce/online_softmax_row.cuh"
#include "common/tile/persistent_row.cuh"
#include "softmax/formulas.cuh"

// Grid, block, shared memory: see each_persistent_row(). A block or a cluster owns a row.
template <int THREADS, int OWN, typename T, typename O>
__device__ __forceinline__ void softmax_persistent(const T* __restrict__ x, O* __restrict__ y, long long rows,
                                                   long long size, int vectors, bool log) {
  using A = acc_t<T>;
  using Threads = RowThreads<Pair<A>, true>;
  __shared__ typename Threads::Room room;
  Threads threads(room);
  OnlineVectors<O> sums;
  A of_sum = A(0);
  const T* const from[] = {x};
  each_persistent_row<THREADS, OWN, 2>(
      from, PersistentRows{rows, size, size, vectors, is_aligned16(x) && is_aligned16(y)}, from_acc<T>(-infinity<A>()),
      threads, [&](long long) { sums = OnlineVectors<O>(); }, [&](const Vector<T>(&some)[1][2]) { sums.add(some[0]); },
      [&] {
        sums.reduce(threads);
        with_formulas(log, [&](auto f) { of_sum = f.template of_sum<O>(sums.sum, sums.exp.of_max()); });
      },
      [&](const PersistentPlace<T, THREADS>& place, const Vector<T>(&some)[1]) {
        with_formulas(log, [&](auto f) {
          put_persistent(place, y,
                         [&](int e) { return f.template y<O>(sums.exp(some[0][e]), some[0][e] - sums.max, of_sum); });
        });
      },
      [](const PersistentPart<T, THREADS>&) {});
}

// Grid, block, shared memory: see each_persistent_row().
template <int THREADS, int OWN, typename T, typename O>
__device__ __forceinline__ void softmax_persistent_bwd(const O* __restrict__ grad_y, const O* __restrict__ y,
                                                       T* __restrict__ grad_x, long long rows, long long size,
                                                       int vectors, bool log) {
  using A = acc_t<O>;
  using S = long_sum_t<O>;
  using Threads = RowThreads<S, true>;
  __shared__ typename Threads::Room room;
  Threads threads(room);
  S sum = S(0);
  A total = A(0);
  const O* const from[] = {grad_y, y};
  const bool aligned = is_aligned16(grad_y) && is_aligned16(y) && is_aligned16(grad_x);
  each_persistent_row<THREADS, OWN, 1>(
      from, PersistentRows{rows, size, size, vectors, aligned}, from_acc<O>(A(0)), threads,
      [&](long long) { sum = S(0); },
      [&](const Vector<O>(&some)[2][1]) {
        with_formulas(log, [&](auto f) {
          sum +=
              reduce_elements<Sum, 1, kVecWidth<O>>([&](int k, int e) { return f.term(some[0][k][e], some[1][k][e]); });
        });
      },
      [&] { total = A(threads.template reduce<Sum>(sum)); },
      [&](const PersistentPlace<O, THREADS>& place, const Vector<O>(&some)[2]) {
        with_formulas(log, [&](auto f) {
          put_persistent(place, grad_x, [&](int e) { return f.template grad_x<T>(some[0][e], some[1][e], total); });
        });
      },
      [](const PersistentPart<O, THREADS>&) {});
}
