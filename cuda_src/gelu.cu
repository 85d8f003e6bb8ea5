// none:  y = x Phi(x),                   Phi(x) = (1 + erf(x / sqrt 2)) / 2
//        grad_x = grad_y (Phi(x) + x phi(x)),  phi(x) = e^(-x^2 / 2) / sqrt(2 pi)
// tanh:  y = x s,  s = (1 + tanh u) / 2 = sigmoid(2u),  u = sqrt(2 / pi) (x + 0.044715 x^3)
//        grad_x = grad_y (s + x (ds/du) (du/dx)),  ds/du = 2 s (1 - s),  du/dx = sqrt(2 / pi) (1 + 3 * 0.044715 x^2)
//
// Bytes per element: forward 2 x sizeof(T), backward 3 x sizeof(T). About 25 flops either way (none), 15 and 25 (tanh).
#include "common/elementwise.cuh"
#include "common/sigmoid.cuh"

constexpr double kSqrtHalf = 0.70710678118654752440;
constexpr double kSqrtTwoOverPi = 0.79788456080286535588;
constexpr double kInverseSqrtTwoPi = 0.39894228040143267794;
constexpr double kCubic = 0.044715;

template <typename A> __device__ __forceinline__ A two_phi(A x) { return A(1) + erf(x * A(kSqrtHalf)); }

template <typename A> __device__ __forceinline__ A inner(A x) {
  return A(kSqrtTwoOverPi) * (x + A(kCubic) * (x * x * x));
}

template <typename A> __device__ __forceinline__ A inner_slope(A x) {
  return A(kSqrtTwoOverPi) * (A(1) + A(3 * kCubic) * (x * x));
}

// A sigmoid costs half a tanhf, and keeps the digits that 1 + tanh u cancels for negative x.
__device__ __forceinline__ float gelu_tanh(float x) { return times_sigmoid(x, 2.0f * inner(x)); }

__device__ __forceinline__ float gelu_tanh_slope(float x) {
  const Sigmoid<float> sigma = sigmoid(2.0f * inner(x));
  // in this order: s or c is an exact 0 before a huge x can make the slope overflow
  return sigma.s + 2.0f * x * sigma.s * sigma.c * inner_slope(x);
}

// In double, operation by operation as PyTorch: there is no wider type to compare with.
__device__ __forceinline__ double gelu_tanh(double x) { return 0.5 * x * (1.0 + tanh(inner(x))); }

__device__ __forceinline__ double gelu_tanh_slope(double x) {
  const double t = tanh(inner(x));
  return 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * inner_slope(x);
}

// Grid, block: see elementwise(). Each thread owns whole vectors of x and y.
template <typename T, bool TANH> __global__ void gelu_fwd(const T* __restrict__ x, T* __restrict__ y, long long n) {
  using A = acc_t<T>;
  const auto value = [](A x) {
    if constexpr (TANH) return gelu_tanh(x);
    else return x * A(0.5) * two_phi(x);
  };
  elementwise<T>(n, value, y, x);
}

// Grid, block: see elementwise(). Reads the input: gelu falls and then rises, so y does not tell x.
template <typename T, bool TANH>
__global__ void gelu_bwd(const T* __restrict__ grad_y, const T* __restrict__ x, T* __restrict__ grad_x, long long n) {
  using A = acc_t<T>;
  const auto gradient = [](A grad_y, A x) {
    if constexpr (TANH) return grad_y * gelu_tanh_slope(x);
    else return grad_y * (A(0.5) * two_phi(x) + x * (A(kInverseSqrtTwoPi) * exp(A(-0.5) * x * x)));
  };
  elementwise<T>(n, gradient, grad_x, grad_y, x);
}
