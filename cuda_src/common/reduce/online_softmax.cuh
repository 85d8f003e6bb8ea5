// The sum of exp(x - max x) over numbers that come one group at a time, for softmax and the losses.
//
// The maximum of a row may ignore NaN: x - max is then NaN for that element, and so is the sum. With +inf in a row, and in a
// row of -inf alone, x - max is NaN too, and so is the sum.
#pragma once

#include "common/core/fast_math.cuh"

struct Larger {
  template <typename A> static __device__ __forceinline__ A identity() { return -infinity<A>(); }
  template <typename A> __device__ __forceinline__ A operator()(A a, A b) const { return fmax(a, b); }
};

// exp(x - max), as exactly as a result of type O can show. The difference is taken first: it is exact near the maximum,
// where the rounding of a product would show, and the result is 1 at the maximum itself.
template <typename O> struct Exponential {
  using A = acc_t<O>;
  A base;

  // For a maximum of -inf 0 is subtracted, since -inf - -inf would be NaN before the first number has come.
  __device__ __forceinline__ explicit Exponential(A max) : base(max == -infinity<A>() ? A(0) : max) {}

  __device__ __forceinline__ A operator()(A x) const { return exp_for<O>(x - base); }
};

// The same times a factor, of_max(), which is what exp(max - max) comes out as. For half types it takes one instruction
// less: the product with log2(e) and the subtraction of the base are one multiply-add, and the base's own product was
// rounded. From a maximum of 2^16 on, where neighbouring numbers are 256 apart, the factor would be far from 1; there powers
// of 2 serve as well as those of e, since all but that of the maximum are 0.
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

  // The factor that makes a sum of the exponentials of `other` one of these.
  __device__ __forceinline__ A of(A other_max, const QuickExponential& other) const {
    if constexpr (QUICK) return fast_exp2(fma(other_max, slope, -offset) - other.residue);
    else return exp(other_max - offset);
  }
};

// The maximum of some numbers, and the sum of exp(x - max).
template <typename O> struct Online {
  using A = acc_t<O>;
  A max = -infinity<A>(), sum = A(0);

  // Adds the numbers x(0) ... x(N - 1), of which `largest` is the maximum.
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

  // The sum for a maximum `top` over more numbers than these.
  __device__ __forceinline__ A sum_for(A top) const { return sum * Exponential<O>(top)(max); }
};
