// gelu(x) and its slope, for the operators that contain it; the equations are those of gelu.cu.
#pragma once

#include "common/elementwise/sigmoid.cuh"

constexpr double kSqrtHalf = 0.70710678118654752440;
constexpr double kSqrtTwoOverPi = 0.79788456080286535588;
constexpr double kInverseSqrtTwoPi = 0.39894228040143267794;
constexpr double kCubic = 0.044715;

// Phi(x) and e^(-x^2 / 2).
template <typename A> struct Normal { A cdf, bell; };

// For half types, which erff would keep from the memory's pace: Phi(-|x|) = e^(-x^2 / 2) t P(t), t = 1 / (1 + 0.375 |x|),
// P fitted to a relative error of 3e-5 down to where e^(-x^2 / 2) is 0. No digits are lost to 1 + erf for negative x.
__device__ __forceinline__ Normal<float> fast_normal(float x) {
  const float t = fast_reciprocal(1.0f + 0.375f * fabsf(x)), scaled = 0.849321800288019f * x;  // sqrt(log2(e) / 2)
  float sum = -0.09064299f;
  sum = sum * t + 0.20028206f;
  sum = sum * t + 0.08356374f;
  sum = sum * t + 0.15773408f;
  sum = sum * t + 0.14906102f;
  const float bell = fast_exp2(-scaled * scaled), tail = bell * (t * sum);
  return {x >= 0.0f ? 1.0f - tail : tail, bell};
}

// x Phi(x) alone, with less: Phi(x) = 1 / (1 + 2^(x Q(x^2))), Q fitted up to |x| = 5.5. Of all bf16
// numbers the result is off by its rounding down to -4.5, by 2e-2 of itself to -5 and 0.27 to -5.5, where 1 + erf in fp32,
// which is PyTorch's, is off by 0.17 and 0.57; below -5.5, where that has no digits left, Phi is 0, and above 5.5 it is 1.
__device__ __forceinline__ float fast_gelu(float x) {
  const float square = fminf(x * x, 30.25f);
  float sum = 5.974913870e-08f;
  sum = sum * square + -3.755346779e-06f;
  sum = sum * square + 7.291759701e-05f;
  sum = sum * square + 5.641887633e-04f;
  sum = sum * square + -1.059210591e-01f;
  sum = sum * square + -2.301494982e+00f;
  return x * (x < -5.5f ? 0.0f : fast_reciprocal(1.0f + fast_exp2(x * sum)));
}

template <typename T> __device__ __forceinline__ Normal<acc_t<T>> normal(acc_t<T> x) {
  using A = acc_t<T>;
  if constexpr (sizeof(T) == 2) return fast_normal(x);
  else return {A(0.5) * (A(1) + erf(x * A(kSqrtHalf))), exp(A(-0.5) * x * x)};
}

template <typename A> __device__ __forceinline__ A inner(A x) {
  return A(kSqrtTwoOverPi) * (x + A(kCubic) * (x * x * x));
}

template <typename A> __device__ __forceinline__ A inner_slope(A x) {
  return A(kSqrtTwoOverPi) * (A(1) + A(3 * kCubic) * (x * x));
}

// A sigmoid costs half a tanhf, and keeps the digits that 1 + tanh u cancels for negative x.
template <typename T> __device__ __forceinline__ float gelu_tanh(float x) {
  return times_sigmoid_for<T>(x, 2.0f * inner(x));
}

template <typename T> __device__ __forceinline__ Activation<float> gelu_tanh_at(float x) {
  const Sigmoid<float> sigma = sigmoid_for<T>(2.0f * inner(x));
  // in this order: s or c is an exact 0 before a huge x can make the slope overflow
  return {x * sigma.s, sigma.s + 2.0f * x * sigma.s * sigma.c * inner_slope(x)};
}

// In double, operation by operation as PyTorch: there is no wider type to compare with.
template <typename T> __device__ __forceinline__ double gelu_tanh(double x) { return 0.5 * x * (1.0 + tanh(inner(x))); }

template <typename T> __device__ __forceinline__ Activation<double> gelu_tanh_at(double x) {
  const double t = tanh(inner(x));
  return {0.5 * x * (1.0 + t), 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * inner_slope(x)};
}

template <bool TANH> struct Gelu {
  template <typename T> static __device__ __forceinline__ acc_t<T> value(acc_t<T> x) {
    if constexpr (TANH) return gelu_tanh<T>(x);
    else if constexpr (sizeof(T) == 2) return fast_gelu(x);
    else return x * normal<T>(x).cdf;
  }

  // The value and the slope: what they share is computed once.
  template <typename T> static __device__ __forceinline__ Activation<acc_t<T>> at(acc_t<T> x) {
    using A = acc_t<T>;
    if constexpr (TANH) {
      return gelu_tanh_at<T>(x);
    } else {
      const Normal<A> normal_at = normal<T>(x);
      return {x * normal_at.cdf, normal_at.cdf + x * (A(kInverseSqrtTwoPi) * normal_at.bell)};
    }
  }
};
