// none:  y = x Phi(x),                   Phi(x) = (1 + erf(x / sqrt 2)) / 2
//        grad_x = grad_y (Phi(x) + x phi(x)),  phi(x) = e^(-x^2 / 2) / sqrt(2 pi)
// tanh:  y = x s,  s = (1 + tanh u) / 2 = sigmoid(2u),  u = sqrt(2 / pi) (x + 0.044715 x^3)
//        grad_x = grad_y (s + x (ds/du) (du/dx)),  ds/du = 2 s (1 - s),  du/dx = sqrt(2 / pi) (1 + 3 * 0.044715 x^2)
//
// Bytes per element: forward 2 x sizeof(T), backward 3 x sizeof(T). About 25 flops either way (none), 15 and 25 (tanh).
//
// Reached on an H200 (bf16, 2^27 elements, GB/s of those bytes, forward / backward; a copy: 4276): none 3696 / 4272, tanh
// 4030 / 4216. Lost: forward (none) has as much arithmetic as backward for two thirds of its bytes.
#include "common/elementwise.cuh"
#include "common/exponential.cuh"
#include "common/sigmoid.cuh"

constexpr double kSqrtHalf = 0.70710678118654752440;
constexpr double kSqrtTwoOverPi = 0.79788456080286535588;
constexpr double kInverseSqrtTwoPi = 0.39894228040143267794;
constexpr double kCubic = 0.044715;

// Phi(x) and e^(-x^2 / 2).
template <typename A> struct Normal { A cdf, bell; };

__device__ __forceinline__ float fast_reciprocal(float value) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
}

// For half types, which erff would keep from the memory's pace: Phi(-|x|) = e^(-x^2 / 2) t P(t), t = 1 / (1 + 0.31 |x|),
// P fitted to a relative error of 5e-6 down to where e^(-x^2 / 2) is 0. No digits are lost to 1 + erf for negative x.
template <typename T> __device__ __forceinline__ Normal<float> fast_normal(float x) {
  const float t = fast_reciprocal(1.0f + 0.31f * fabsf(x)), bell = exp_for<T>(-0.5f * x * x);
  float sum = -0.07393367f;
  sum = sum * t + 0.18046138f;
  sum = sum * t + 0.01573566f;
  sum = sum * t + 0.1334323f;
  sum = sum * t + 0.1204414f;
  sum = sum * t + 0.1238606f;
  const float tail = bell * (t * sum);
  return {x >= 0.0f ? 1.0f - tail : tail, bell};
}

template <typename T> __device__ __forceinline__ Normal<acc_t<T>> normal(acc_t<T> x) {
  using A = acc_t<T>;
  if constexpr (sizeof(T) == 2) return fast_normal<T>(x);
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
  const float a = 2.0f * inner(x);
  if constexpr (sizeof(T) == 2) return x * fast_reciprocal(1.0f + exp_for<T>(-a));
  else return times_sigmoid(x, a);
}

template <typename T> __device__ __forceinline__ Sigmoid<float> sigmoid_for(float a) {
  if constexpr (sizeof(T) == 4) return sigmoid(a);
  const float s = fast_reciprocal(1.0f + exp_for<T>(-a));
  return {s, 1.0f - s};
}

template <typename T> __device__ __forceinline__ float gelu_tanh_slope(float x) {
  const Sigmoid<float> sigma = sigmoid_for<T>(2.0f * inner(x));
  // in this order: s or c is an exact 0 before a huge x can make the slope overflow
  return sigma.s + 2.0f * x * sigma.s * sigma.c * inner_slope(x);
}

// In double, operation by operation as PyTorch: there is no wider type to compare with.
template <typename T> __device__ __forceinline__ double gelu_tanh(double x) { return 0.5 * x * (1.0 + tanh(inner(x))); }

template <typename T> __device__ __forceinline__ double gelu_tanh_slope(double x) {
  const double t = tanh(inner(x));
  return 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * inner_slope(x);
}

// Grid, block: see elementwise(). Each thread owns whole vectors of x and y.
template <typename T, bool TANH> __global__ void gelu_fwd(const T* __restrict__ x, T* __restrict__ y, long long n) {
  using A = acc_t<T>;
  const auto value = [](A x) {
    if constexpr (TANH) return gelu_tanh<T>(x);
    else return x * normal<T>(x).cdf;
  };
  elementwise<T>(n, value, y, x);
}

// Grid, block: see elementwise(). Reads the input: gelu falls and then rises, so y does not tell x.
template <typename T, bool TANH>
__global__ void gelu_bwd(const T* __restrict__ grad_y, const T* __restrict__ x, T* __restrict__ grad_x, long long n) {
  using A = acc_t<T>;
  const auto gradient = [](A grad_y, A x) {
    if constexpr (TANH) return grad_y * gelu_tanh_slope<T>(x);
    const Normal<A> at = normal<T>(x);
    return grad_y * (at.cdf + x * (A(kInverseSqrtTwoPi) * at.bell));
  };
  elementwise<T>(n, gradient, grad_x, grad_y, x);
}
