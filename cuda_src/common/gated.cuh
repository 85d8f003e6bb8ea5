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

template <typename F, typename T> struct GatedBackward {
  const T* __restrict__ grad_y;
  const T* __restrict__ gate;
  const T* __restrict__ up;
  T* __restrict__ grad_gate;
  T* __restrict__ grad_up;
  long long y_stride, gate_stride, up_stride, grad_stride;

  template <typename S> __device__ __forceinline__ void at(const S& span) const {
    using A = acc_t<T>;
    const auto grads = span.load(grad_y, y_stride), gates = span.load(gate, gate_stride),
               ups = span.load(up, up_stride);
    Vec<T, S::W> of_gate, of_up;
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
// Grid, block: see each_span(). `up` null: it lies behind gate, in each row. y is dense.
template <typename F, typename T>
__device__ __forceinline__ void gated_forward(const T* __restrict__ gate, const T* __restrict__ up, T* __restrict__ y,
                                              long long rows, long long cols, long long gate_stride,
                                              long long up_stride) {
  if (up == nullptr) up = gate + cols;
  const bool fit = rows_fit(gate, gate_stride, rows) && rows_fit(up, up_stride, rows) && rows_fit(y, cols, rows);
  each_span<T>(rows, cols, fit, GatedForward<F, T>{gate, up, y, gate_stride, up_stride, cols});
}

// grad_gate = grad_y up f'(gate)
// grad_up = grad_y f(gate)
//
// Grid, block: see each_span(). One of the gradients may be null, where nobody wants it. `up` null: packed, as above, and
// so are the gradients, both.
template <typename F, typename T>
__device__ __forceinline__ void gated_backward(const T* __restrict__ grad_y, const T* __restrict__ gate,
                                               const T* __restrict__ up, T* __restrict__ grad_gate,
                                               T* __restrict__ grad_up, long long rows, long long cols,
                                               long long gate_stride, long long up_stride) {
  long long grad_stride = cols;
  if (up == nullptr) up = gate + cols, grad_up = grad_gate + cols, grad_stride = 2 * cols;
  const bool fit = rows_fit(grad_y, cols, rows) && rows_fit(gate, gate_stride, rows) && rows_fit(up, up_stride, rows) &&
                   rows_fit(grad_gate, grad_stride, rows) && rows_fit(grad_up, grad_stride, rows);
  each_span<T>(rows, cols, fit,
               GatedBackward<F, T>{grad_y, gate, up, grad_gate, grad_up, cols, gate_stride, up_stride, grad_stride});
}
