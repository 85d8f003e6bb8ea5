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

// exp(x - max), as exactly as a result of type O can show.
template <typename O> struct Exponential {
  using A = acc_t<O>;
  A base;

  // Not -inf is taken off, as -inf - -inf would be NaN before the first number is seen.
  __device__ __forceinline__ explicit Exponential(A max) : base(max == -infinity<A>() ? A(0) : max) {}

  __device__ __forceinline__ A operator()(A x) const { return exp_for<O>(x - base); }
  __device__ __forceinline__ A log_sum(A sum) const { return log(sum); }
};

// For half types a power of two: one multiplication and addition, rounded once. The offset is rounded, but the same for
// all of a row; log_sum() takes that back. Of numbers near the largest of bf16, whose products would overflow, no two are
// so near each other that a unit so small matters.
struct PowerOfTwo {
  float unit, offset, max;

  __device__ __forceinline__ explicit PowerOfTwo(float top)
      : unit(fabsf(top) < 1e30f ? 1.4426950408889634f : 0x1p-10f), max(top == -infinity<float>() ? 0.f : top) {
    offset = max * unit;
  }

  __device__ __forceinline__ float operator()(float x) const {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(fmaf(x, unit, -offset)));
    return y;
  }

  // log(sum of exp(x - max)), where `sum` is that of these.
  __device__ __forceinline__ float log_sum(float sum) const {
    return log(sum) - 0.6931471805599453f * fmaf(max, unit, -offset);
  }
};
template <> struct Exponential<__half> : PowerOfTwo { using PowerOfTwo::PowerOfTwo; };
template <> struct Exponential<__nv_bfloat16> : PowerOfTwo { using PowerOfTwo::PowerOfTwo; };

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

  __device__ __forceinline__ A log_sum() const { return Exponential<O>(max).log_sum(sum); }
};
