// The step of Adam for numbers at one place, whatever they are kept in; adam.cu has the equations.
#pragma once

#include "optim/multi_tensor.cuh"

// In float to 2 units in the last place, in a few instructions: of an update, that is far below a parameter's last place.
// The quotient is 0 where b exceeds 2^126, which no root does.
__device__ __forceinline__ float root(float a) {
  float y;
  asm("sqrt.approx.f32 %0, %1;" : "=f"(y) : "f"(a));
  return y;
}
__device__ __forceinline__ double root(double a) { return sqrt(a); }
__device__ __forceinline__ float quotient(float a, float b) { return __fdividef(a, b); }
__device__ __forceinline__ double quotient(double a, double b) { return a / b; }

// On param, grad, exp_avg, exp_avg_sq and, with amsgrad, the largest exp_avg_sq.
template <typename T, bool AMSGRAD> struct Adam {
  using A = acc_t<T>;
  static constexpr int kArrays = AMSGRAD ? 5 : 4;
  Gradient<T> gradient;
  A rest1, beta2, rest2;                      // rest1 is 1 - beta1, rest2 is 1 - beta2
  A step_size, unbias_root, eps;              // lr / (1 - beta1^step), 1 / sqrt(1 - beta2^step)
  A keep, weight_decay;  // what decoupled decay leaves of param; the decay that is not decoupled

  __device__ __forceinline__ bool loads(int) const { return true; }
  __device__ __forceinline__ bool stores(int j) const { return j != 1 || gradient.scaled; }
  __device__ __forceinline__ void operator()(A (&x)[kArrays]) const {
    A g = gradient(x[1]);
    if (weight_decay != A(0)) g = fma(weight_decay, x[0], g);  // not 0 * param, which an infinite param makes NaN
    x[2] = fma(rest1, g - x[2], x[2]);
    x[3] = fma(rest2 * g, g, beta2 * x[3]);
    if constexpr (AMSGRAD) x[4] = max_nan(x[4], x[3]);
    const A scale = fma(root(x[kArrays - 1]), unbias_root, eps);
    x[0] = fma(-step_size, quotient(x[2], scale), keep * x[0]);
  }
};

// 1 - beta^step, without the cancellation of a beta near 1.
__device__ __forceinline__ float unbias(float log_beta, float step) { return -expm1f(step * log_beta); }
__device__ __forceinline__ double unbias(double log_beta, double step) { return -expm1(step * log_beta); }

// The rule of the step that is counted t already.
template <typename T, bool AMSGRAD, typename A = acc_t<T>>
__device__ __forceinline__ Adam<T, AMSGRAD> adam_rule(Gradient<T> gradient, A t, A rate, A rest1, A log_beta1, A beta2,
                                                      A rest2, A log_beta2, A eps, A weight_decay, bool decoupled) {
  return {gradient,
          rest1,
          beta2,
          rest2,
          rate / unbias(log_beta1, t),
          A(1) / sqrt(unbias(log_beta2, t)),
          eps,
          decoupled ? fma(-rate, weight_decay, A(1)) : A(1),
          decoupled ? A(0) : weight_decay};
}
