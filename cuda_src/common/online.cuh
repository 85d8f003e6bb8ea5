// The sum of exp(x - max x) over numbers that are seen one group at a time, for softmax and the losses.
//
// A maximum over a row may drop NaN: x - max is then NaN for one element, and so is the sum. The same holds for +inf,
// and for a row of -inf alone.
#pragma once

#include "common/exponential.cuh"

struct Larger {
  template <typename A> static __device__ __forceinline__ A identity() { return -infinity<A>(); }
  template <typename A> __device__ __forceinline__ A operator()(A a, A b) const { return fmax(a, b); }
};

// The maximum, and the sum for it, as exact as a result of type O can show.
template <typename O> struct Online {
  using A = acc_t<O>;
  A max = -infinity<A>(), sum = A(0);

  // What is taken off before exp: not -inf, as -inf - -inf would be NaN before the first number is seen.
  static __device__ __forceinline__ A base(A max) { return max == -infinity<A>() ? A(0) : max; }

  // The numbers x(0) ... x(N - 1).
  template <int N, typename F> __device__ __forceinline__ void add(F x) {
    A top = max;
#pragma unroll
    for (int i = 0; i < N; ++i) top = Larger()(top, x(i));
    sum = sum_for(top);
    const A off = base(top);
#pragma unroll
    for (int i = 0; i < N; ++i) sum += exp_for<O>(x(i) - off);
    max = top;
  }

  // The sum, for a maximum over more numbers than these.
  __device__ __forceinline__ A sum_for(A top) const { return sum * exp_for<O>(max - base(top)); }
};
