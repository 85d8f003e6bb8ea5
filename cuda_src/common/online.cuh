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

// exp(x - max), as exactly as a result of type O can show. The difference comes first: it is exact near the maximum, where a
// product rounded before would show, and 1 at the maximum itself.
template <typename O> struct Exponential {
  using A = acc_t<O>;
  A base;

  // Not -inf is taken off, as -inf - -inf would be NaN before the first number is seen.
  __device__ __forceinline__ explicit Exponential(A max) : base(max == -infinity<A>() ? A(0) : max) {}

  __device__ __forceinline__ A operator()(A x) const { return exp_for<O>(x - base); }
};

// The maximum, and the sum for it.
template <typename O> struct Online {
  using A = acc_t<O>;
  A max = -infinity<A>(), sum = A(0);

  // The numbers x(0) ... x(N - 1), and their maximum.
  template <int N, typename F> __device__ __forceinline__ void add(A largest, F x) {
    const A top = Larger()(max, largest);
    const Exponential<O> exp(top);
    sum *= exp(max);
#pragma unroll
    for (int i = 0; i < N; ++i) sum += exp(x(i));
    max = top;
  }

  template <int N, typename F> __device__ __forceinline__ void add(F x) {
    A top = max;
#pragma unroll
    for (int i = 0; i < N; ++i) top = Larger()(top, x(i));
    add<N>(top, x);
  }

  // The sum, for a maximum over more numbers than these.
  __device__ __forceinline__ A sum_for(A top) const { return sum * Exponential<O>(top)(max); }
};
