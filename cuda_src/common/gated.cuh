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

template <typename T> struct Gradients {
  const T* __restrict__ grad_y;
  const T* __restrict__ gate;
  const T* __restrict__ up;
  T* __restrict__ grad_gate;
  T* __restrict__ grad_up;
  long long y_stride, gate_stride, up_stride, grad_stride;
};

// GATE, UP: which gradients are wanted.
template <typename F, typename T, bool GATE, bool UP> struct GatedBackward : Gradients<T> {
  using Gradients<T>::grad_y, Gradients<T>::gate, Gradients<T>::up, Gradients<T>::grad_gate, Gradients<T>::grad_up;
  using Gradients<T>::y_stride, Gradients<T>::gate_stride, Gradients<T>::up_stride, Gradients<T>::grad_stride;

  // Both at once where all rows fit; else one, since the two begin at different places of a vector.
  __device__ __forceinline__ void on(const Rows& shape, const Own& own) const {
    const long long least = min(y_stride, min(gate_stride, up_stride));
    on_span<GATE && UP>(shape, own, least, GATE ? grad_gate : grad_up, grad_stride, *this);
  }

  template <typename S> __device__ __forceinline__ void at(const S& span) const {
    using A = acc_t<T>;
    const auto grads = span.load(grad_y, y_stride), gates = span.load(gate, gate_stride);
    Vec<T, S::W> ups = {}, of_gate, of_up;
    if constexpr (GATE) ups = span.load(up, up_stride);
#pragma unroll
    for (int k = 0; k < S::W; ++k) {
      const A grad = to_acc(grads.data[k]), x = to_acc(gates.data[k]);
      if constexpr (GATE) {
        const auto here = F::template at<T>(x);
        of_gate.data[k] = from_acc<T>(grad * to_acc(ups.data[k]) * here.slope);
        of_up.data[k] = from_acc<T>(grad * here.value);
      } else {
        of_up.data[k] = from_acc<T>(grad * F::template value<T>(x));
      }
    }
    if constexpr (GATE) span.store(grad_gate, grad_stride, of_gate);
    if constexpr (UP) span.store(grad_up, grad_stride, of_up);
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
  const long long least = min(cols, min(gate_stride, up_stride));
  const GatedForward<F, T> work = {gate, up, y, gate_stride, up_stride, cols};
  const Own own = Own::of<T>(shape);
  if (fit) on_span<true>(shape, own, least, y, cols, work);
  else on_span<false>(shape, own, least, y, cols, work);
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
  const Gradients<T> all = {grad_y, gate, up, grad_gate, grad_up, cols, gate_stride, up_stride, grad_stride};
  const Own own = Own::of<T>(shape);
  if (fit && grad_gate && grad_up) return GatedBackward<F, T, true, true>{all}.on(shape, own);
  if (grad_gate) GatedBackward<F, T, true, false>{all}.on(shape, own);
  if (grad_up) GatedBackward<F, T, false, true>{all}.on(shape, own);
}
