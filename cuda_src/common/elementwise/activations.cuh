// Activations as types, for kernels that compute one beside something else: the value, and the value with the slope. Where a
// gradient is a select rather than a product with a slope, as of relu, kernels of its own compute it.
#pragma once

#include "common/elementwise/gelu.cuh"

struct Identity {
  template <typename T> static __device__ __forceinline__ acc_t<T> value(acc_t<T> x) { return x; }
};

// NaN stays NaN.
struct Relu {
  template <typename T> static __device__ __forceinline__ acc_t<T> value(acc_t<T> x) {
    return x < acc_t<T>(0) ? acc_t<T>(0) : x;
  }
};

struct Silu {
  template <typename T> static __device__ __forceinline__ acc_t<T> value(acc_t<T> x) {
    return times_sigmoid_for<T>(x, x);
  }

  template <typename T> static __device__ __forceinline__ Activation<acc_t<T>> at(acc_t<T> x) {
    const Sigmoid<acc_t<T>> sigma = sigmoid_for<T>(x);
    return {x * sigma.s, sigma.s * (acc_t<T>(1) + x * sigma.c)};
  }
};

using GeluExact = Gelu<false>;
using GeluTanh = Gelu<true>;

// Which activation a launch has, where that is no template value; _dispatch/elementwise/activations.py has the same order.
enum Function { kIdentity, kRelu, kGeluExact, kGeluTanh, kSilu };

template <typename T> __device__ __forceinline__ acc_t<T> activate(int function, acc_t<T> x) {
  switch (function) {
    case kRelu:
      return Relu::value<T>(x);
    case kGeluExact:
      return GeluExact::value<T>(x);
    case kGeluTanh:
      return GeluTanh::value<T>(x);
    case kSilu:
      return Silu::value<T>(x);
    default:
      return x;
  }
}
