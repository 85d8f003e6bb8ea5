// exp, as exactly as a result of type O can show. For half types it takes two instructions where expf takes eight; the error
// is 2 ulp of fp32, and one more for each doubling of |x|. Results below 2^-126 become 0.
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
