// Loss and gradient of rows of logits that a block or a cluster keeps in shared memory: see common/tile/persistent_row.cuh.
#pragma once

#include "common/tile/persistent_row.cuh"
#include "loss/losses.cuh"
#include "common/reduce/online_softmax_row.cuh"

// The class of a row, -1 where it is ignored, and how much its loss counts.
template <typename A> struct Label {
  int t;
  A a;
};

// For each row: its sums go to done(row, label, sums, picked), called in the first thread of the row, and, with `write`, the
// gradients of a * (log(sum(exp(x))) - x_t), times scale(row), to grad_x, which may be x. label_of(row, target[row]) says
// what the label is; `picked` is the logit of its class.
template <int THREADS, int OWN, typename T, typename LabelOf, typename ScaleOf, typename Done, typename A = acc_t<T>>
__device__ __forceinline__ void persistent_losses(const T* x, const long long* target, T* grad_x,
                                                  const PersistentRows& of, bool write, LabelOf label_of,
                                                  ScaleOf scale_of, Done done) {
  using Threads = RowThreads<Pair<A>, true>;
  __shared__ typename Threads::Room room;
  Threads threads(room);
  const bool leads = threads.part() == 0 && threadIdx.x == 0;
  const int column = threads.part() * of.vectors * kVecWidth<T> * THREADS;
  long long row = 0, given = 0;
  Label<A> label;
  OnlineVectors<T> sums;
  A picked = A(0), scale = A(0), factor = A(0);
  const T* const from[] = {x};
  each_persistent_row<THREADS, OWN, 2>(
      from, of, from_acc<T>(-infinity<A>()), threads,
      [&](long long number) {
        row = number;
        given = target[number];
        sums = OnlineVectors<T>();
      },
      [&](const Vector<T>(&some)[1][2]) { sums.add(some[0]); },
      [&] {
        label = label_of(row, given);
        scale = scale_of(row);
        picked = label.t < 0 ? A(0) : to_acc(x[row * of.pitch + label.t]);
        sums.reduce(threads);
        factor = scale * label.a / sums.sum / sums.exp.of_max();
        if (leads) done(row, label, sums, picked);
      },
      [&](const PersistentPlace<T, THREADS>& place, const Vector<T>(&some)[1]) {
        if (!write) return;
        if (label.t < 0) put_persistent(place, grad_x, [](int) { return A(0); });
        else put_persistent(place, grad_x, [&](int e) { return factor * sums.exp(some[0][e]); });
      },
      [&](const PersistentPart<T, THREADS>& part) {  // of its class once more, in the thread that has put it
        if (write && label.t >= 0 && part.owns(label.t - column)) {
          const A p = Exponential<T>(sums.max)(picked) / sums.sum;
          grad_x[row * of.pitch + label.t] = from_acc<T>(scale * (label.a * p - label.a));
        }
      });
}
