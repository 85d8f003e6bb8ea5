// exp, as exactly as a result of type O can show: for half types two instructions, off by 2 ulp of fp32 and one more for
// each power of two that |x| holds, where expf takes eight. What is below 2^-126 becomes 0.
#pragma once

#include "common/core/types.cuh"

__device__ __forceinline__ float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

template <typename O> __device__ __forceinline__ acc_t<O> exp_for(acc_t<O> x) {
  if constexpr (sizeof(O) == 2) return fast_exp2(x * 1.4426950408889634f);
  else return exp(x);
}
