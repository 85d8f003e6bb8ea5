// Gated activations, f(gate) * up: the bodies of swiglu and geglu. F::value<T>(x) is f, F::at<T>(x) f and its slope.
#pragma once

#include "common/spans.cuh"

template <typename F, typename T> struct GatedForward {
  const T* __restrict__ gate;
  const T* __restrict__ up;
  T* __restrict__ y;
  long long gate_stride, up_stride, y_stride;

  template <typename S> __device__ __forceinline__ void at(const S& span) const {
    const auto gates = span.load(gate, gate_stride), ups = span.load(up, up_stride);
    Vec<T, S::W> result;
#pragma unroll
    for (int k = 0; k < S::W; ++k) {
      result.data[k] = from_acc<T>(F::template value<T>(to_acc(gates.data[k])) * to_acc(ups.data[k]));
    }
    span.store(y, y_stride, result);
  }
};

// What is null is not wanted.
template <typename F, typename T> struct GatedBackward {
  const T* __restrict__ grad_y;
  const T* __restrict__ gate;
  const T* __restrict__ up;
  T* __restrict__ grad_gate;
  T* __restrict__ grad_up;
  long long y_stride, gate_stride, up_stride, grad_stride;

  template <typename S> __device__ __forceinline__ void at(const S& span) const {
    using A = acc_t<T>;
    const auto grads = span.load(grad_y, y_stride), gates = span.load(gate, gate_stride);
    Vec<T, S::W> ups = {}, of_gate, of_up;
    if (grad_gate != nullptr) ups = span.load(up, up_stride);
#pragma unroll
    for (int k = 0; k < S::W; ++k) {
      const A grad = to_acc(grads.data[k]);
      const auto here = F::template at<T>(to_acc(gates.data[k]));
      of_gate.data[k] = from_acc<T>(grad * to_acc(ups.data[k]) * here.slope);
      of_up.data[k] = from_acc<T>(grad * here.value);
    }
    if (grad_gate != nullptr) span.store(grad_gate, grad_stride, of_gate);
    if (grad_up != nullptr) span.store(grad_up, grad_stride, of_up);
  }
};

// y = f(gate) up
//
// Grid, block: see spans.cuh. `up` null: it lies behind gate, in each row. y is dense.
template <typename F, typename T>
__device__ __forceinline__ void gated_forward(const T* __restrict__ gate, const T* __restrict__ up, T* __restrict__ y,
                                              const Rows& shape, long long gate_stride, long long up_stride) {
  const long long rows = shape.rows, cols = shape.cols;
  if (up == nullptr) up = gate + cols;
  const bool fit = rows_fit(gate, gate_stride, rows) && rows_fit(up, up_stride, rows) && rows_fit(y, cols, rows);
  each_span(shape, fit, y, cols, GatedForward<F, T>{gate, up, y, gate_stride, up_stride, cols});
}

// grad_gate = grad_y up f'(gate)
// grad_up = grad_y f(gate)
//
// Grid, block: see spans.cuh. One of the gradients may be null, where nobody wants it. `up` null: packed, as above, and so
// are the gradients, both. Where the two begin at different places of a vector, each is computed for itself.
template <typename F, typename T>
__device__ __forceinline__ void gated_backward(const T* __restrict__ grad_y, const T* __restrict__ gate,
                                               const T* __restrict__ up, T* __restrict__ grad_gate,
                                               T* __restrict__ grad_up, const Rows& shape, long long gate_stride,
                                               long long up_stride) {
  const long long rows = shape.rows, cols = shape.cols;
  long long grad_stride = cols;
  if (up == nullptr) up = gate + cols, grad_up = grad_gate + cols, grad_stride = 2 * cols;
  const bool fit = rows_fit(grad_y, cols, rows) && rows_fit(gate, gate_stride, rows) && rows_fit(up, up_stride, rows) &&
                   rows_fit(grad_gate, grad_stride, rows) && rows_fit(grad_up, grad_stride, rows);
  GatedBackward<F, T> work = {grad_y, gate, up, grad_gate, grad_up, cols, gate_stride, up_stride, grad_stride};
  const bool apart = !fit && grad_gate != nullptr && grad_up != nullptr;
  for (int pass = 0; pass <= int(apart); ++pass) {
    if (apart) {
      work.grad_gate = pass ? nullptr : grad_gate;
      work.grad_up = pass ? grad_up : nullptr;
    }
    each_span(shape, fit, work.grad_gate ? work.grad_gate : work.grad_up, grad_stride, work);
  }
}
