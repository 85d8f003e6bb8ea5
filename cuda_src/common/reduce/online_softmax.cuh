// The sum of exp(x - max x) over numbers that are seen one group at a time, for softmax and the losses.
//
// A maximum over a row may drop NaN: x - max is then NaN for one element, and so is the sum. The same holds for +inf,
// and for a row of -inf alone.
#pragma once

#include "common/core/fast_math.cuh"

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

// The same but for a factor, of_max(), which exp(max) comes out as: for half types one instruction less, since the product
// with log2(e) is rounded once the base has been taken off. From 2^16 on, where neighbours are 256 apart, the factor would be
// far from 1, and of what powers are taken does not matter: all but the maximum come to 0.
template <typename O> struct QuickExponential {
  using A = acc_t<O>;
  static constexpr bool QUICK = sizeof(O) == 2;
  A slope, offset, residue;

  __device__ __forceinline__ explicit QuickExponential(A max) {
    const A base = max == -infinity<A>() ? A(0) : max;
    slope = QUICK && fabs(base) < A(65536) ? A(1.4426950408889634) : A(1);
    offset = mul_rn(base, slope);
    residue = fma(base, slope, -offset);
  }

  __device__ __forceinline__ A operator()(A x) const {
    if constexpr (QUICK) return fast_exp2(fma(x, slope, -offset));
    else return exp(x - offset);
  }

  __device__ __forceinline__ A of_max() const {
    if constexpr (QUICK) return fast_exp2(residue);
    else return A(1);
  }

  // What a sum of such exponentials for another maximum is multiplied by, to be one of these.
  __device__ __forceinline__ A of(A other_max, const QuickExponential& other) const {
    if constexpr (QUICK) return fast_exp2(fma(other_max, slope, -offset) - other.residue);
    else return exp(other_max - offset);
  }
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
