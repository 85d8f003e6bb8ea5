// sigmoid(a) = 1 / (1 + e^-a), for activations that are bound by arithmetic rather than by memory in 16-bit types.
#pragma once

#include "common/core/fast_math.cuh"

// s = sigmoid(a) and its complement c = 1 - s.
template <typename A> struct Sigmoid { A s, c; };

// One ulp, and the whole range: unlike __fdividef it does not flush for divisors above 2^126.
__device__ __forceinline__ float reciprocal(float value) {
  float result;
  asm("rcp.approx.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
}

// In float, the smaller of the two comes without the cancellation of 1 - s, as q / (1 + q) with q = e^-|a|, and the larger
// as 1 less that, which is nearer than a second division. A NaN stays in both.
__device__ __forceinline__ Sigmoid<float> sigmoid(float a) {
  const float q = expf(-fabsf(a)), small = q * reciprocal(1.0f + q), large = 1.0f - small;
  return a >= 0.0f ? Sigmoid<float>{large, small} : Sigmoid<float>{small, large};
}

// In double, as PyTorch writes it: there is no wider type to compare with, so the roundings should be the same.
__device__ __forceinline__ Sigmoid<double> sigmoid(double a) {
  const double s = 1.0 / (1.0 + exp(-a));
  return {s, 1.0 - s};
}

// x * sigmoid(a). e^-a overflows to inf for a below -88, and the product is then -0 as in PyTorch.
__device__ __forceinline__ float times_sigmoid(float x, float a) { return x * reciprocal(1.0f + expf(-a)); }
__device__ __forceinline__ double times_sigmoid(double x, double a) { return x / (1.0 + exp(-a)); }

// --- as exactly as a result of type T can show ---

// f(x) and f'(x) of an activation f.
template <typename A> struct Activation { A value, slope; };

// What is below 2^-126, or its reciprocal, becomes 0.
__device__ __forceinline__ float fast_reciprocal(float value) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
}

template <typename T> __device__ __forceinline__ Sigmoid<acc_t<T>> sigmoid_for(acc_t<T> a) {
  if constexpr (sizeof(T) == 2) {
    const float s = fast_reciprocal(1.0f + exp_for<T>(-a));
    return {s, 1.0f - s};
  } else {
    return sigmoid(a);
  }
}

template <typename T> __device__ __forceinline__ acc_t<T> times_sigmoid_for(acc_t<T> x, acc_t<T> a) {
  if constexpr (sizeof(T) == 2) return x * fast_reciprocal(1.0f + exp_for<T>(-a));
  else return times_sigmoid(x, a);
}
