// Gated activations, f(gate) * up, over strided rows. `function` says which f: kSilu, kGeluTanh or kGeluExact. It is
// uniform over all threads, and a branch around what is computed costs nothing beside the loads and stores, which exist once.
#pragma once

#include "common/elementwise/activations.cuh"
#include "common/elementwise/strided_rows.cuh"
#include "common/tile/row_tile.cuh"

// F::value<T>(x) is f, F::at<T>(x) are f and its slope.
template <class F, typename T, int W>
__device__ __forceinline__ void gated_values(const Vec<T, W>& gates, const Vec<T, W>& ups, Vec<T, W>& result) {
#pragma unroll
  for (int k = 0; k < W; ++k) {
    result.data[k] = from_acc<T>(F::template value<T>(to_acc(gates.data[k])) * to_acc(ups.data[k]));
  }
}

template <class F, typename T, int W>
__device__ __forceinline__ void gated_slopes(const Vec<T, W>& grads, const Vec<T, W>& gates, const Vec<T, W>& ups,
                                             Vec<T, W>& of_gate, Vec<T, W>& of_up) {
#pragma unroll
  for (int k = 0; k < W; ++k) {
    const acc_t<T> grad = to_acc(grads.data[k]);
    const auto here = F::template at<T>(to_acc(gates.data[k]));
    of_gate.data[k] = from_acc<T>(grad * to_acc(ups.data[k]) * here.slope);
    of_up.data[k] = from_acc<T>(grad * here.value);
  }
}

template <typename T> struct GatedForward {
  const T* __restrict__ gate;
  const T* __restrict__ up;
  T* __restrict__ y;
  long long gate_stride, up_stride, y_stride;
  int function;

  template <typename S> __device__ __forceinline__ void at(const S& span) const {
    const auto gates = span.load(gate, gate_stride), ups = span.load(up, up_stride);
    Vec<T, S::W> result;
    if (function == kSilu) gated_values<Silu>(gates, ups, result);
    else if (function == kGeluTanh) gated_values<GeluTanh>(gates, ups, result);
    else gated_values<GeluExact>(gates, ups, result);
    span.store(y, y_stride, result);
  }
};

// The gradients of both, or of one where the other is null.
template <typename T> struct GatedGradients {
  const T* __restrict__ grad_y;
  const T* __restrict__ gate;
  const T* __restrict__ up;
  T* __restrict__ grad_gate;
  T* __restrict__ grad_up;
  long long y_stride, gate_stride, up_stride, grad_stride;
  int function;

  __device__ __forceinline__ const T* either() const { return grad_gate ? grad_gate : grad_up; }
};

// KEEP: that of up goes to `kept_up`, and is not stored.
template <typename T, bool KEEP = false> struct GatedBackward : GatedGradients<T> {
  using GatedGradients<T>::grad_y, GatedGradients<T>::gate, GatedGradients<T>::up, GatedGradients<T>::grad_gate,
      GatedGradients<T>::grad_up, GatedGradients<T>::function;
  using GatedGradients<T>::y_stride, GatedGradients<T>::gate_stride, GatedGradients<T>::up_stride,
      GatedGradients<T>::grad_stride;
  Words<T>* kept_up = nullptr;
  bool gives = false;  // whether another thread stores what this one computes

  template <bool FIT> __device__ __forceinline__ void on(const Rows& shape, const Own& own) const {
    const long long least = min(y_stride, min(gate_stride, up_stride));
    on_span<FIT>(shape, own, least, this->either(), grad_stride, *this);
  }

  template <typename S> __device__ __forceinline__ void at(const S& span) const {
    const auto grads = span.load(grad_y, y_stride), gates = span.load(gate, gate_stride);
    const auto ups = span.load(up, up_stride);
    Vec<T, S::W> of_gate, of_up;
    if (function == kSilu) gated_slopes<Silu>(grads, gates, ups, of_gate, of_up);
    else if (function == kGeluTanh) gated_slopes<GeluTanh>(grads, gates, ups, of_gate, of_up);
    else gated_slopes<GeluExact>(grads, gates, ups, of_gate, of_up);
    if (grad_gate && !gives) span.store(grad_gate, grad_stride, of_gate);
    if constexpr (KEEP) kept_up->elements = of_up;
    else if (grad_up) span.store(grad_up, grad_stride, of_up);
  }
};

// y = f(gate) up
//
// Grid, block: see common/elementwise/strided_rows.cuh. Where `up` is null, it lies behind gate, in each row. y is dense.
template <typename T>
__device__ __forceinline__ void gated_forward(const T* __restrict__ gate, const T* __restrict__ up, T* __restrict__ y,
                                              const Rows& shape, long long gate_stride, long long up_stride,
                                              int function) {
  const long long rows = shape.rows, cols = shape.cols;
  if (up == nullptr) up = gate + cols;
  const bool fit = rows_fit(gate, gate_stride, rows) && rows_fit(up, up_stride, rows) && rows_fit(y, cols, rows);
  const long long least = min(cols, min(gate_stride, up_stride));
  const GatedForward<T> work = {gate, up, y, gate_stride, up_stride, cols, function};
  const Own own = Own::of<T>(shape, global_thread());
  if (fit) on_span<true>(shape, own, least, y, cols, work);
  else on_span<false>(shape, own, least, y, cols, work);
}

// Gradients of rows off 16-byte boundaries. grad_gate is computed span by span. Vectors of grad_up end `shift` elements
// into a span: a thread stores the vector that ends in its own span, and gets the elements before from the lane before. The
// first lane of each warp only gives some: it has the last span of the warp before. All threads of a warp take part.
template <typename T>
__device__ __forceinline__ void gated_backward_unaligned(const GatedGradients<T>& all, const Rows& shape, int shift) {
  constexpr int W = kVecWidth<T>;
  const long long thread = global_thread();
  const Own own = Own::of<T>(shape, shift ? max(thread - thread / kWarp - 1, 0LL) : thread);
  const bool gives = shift && threadIdx.x % kWarp == 0;
  Words<T> up;
  up.words = make_uint4(0, 0, 0, 0);
  GatedBackward<T, true>{all, &up, gives}.template on<false>(shape, own);
  if (shift) {
    const Vector<T> mine = {up.words.x, up.words.y, up.words.z, up.words.w};
    Vector<T> before;
#pragma unroll
    for (int i = 0; i < 4; ++i) before.word[i] = __shfl_up_sync(kFullMask, mine.word[i], 1);
    const Vector<T> both = straddled(before, mine, shift);
    up.words = make_uint4(both.word[0], both.word[1], both.word[2], both.word[3]);
  }
  if (gives || own.row >= shape.rows || !all.grad_up) return;
  const T* row = all.either() + own.row * all.grad_stride;
  const int past = int(reinterpret_cast<unsigned long long>(row) & 15) / int(sizeof(T));
  const long long col = own.col - past - (shift ? W - shift : 0);
  const int begin = int(max(-col, 0LL)), end = int(min(shape.cols - col, (long long)W));
  Span<T, kAcross>{own.row, col, begin, end}.store(all.grad_up, all.grad_stride, up.elements);
}

// grad_gate = grad_y up f'(gate)
// grad_up = grad_y f(gate)
//
// Grid, block: see common/elementwise/strided_rows.cuh. One of the gradients may be null, where nobody wants it; they begin at
// 16-byte boundaries. Where `up` is null, gate is packed as above, and so are the gradients, both; where halves are no whole
// vectors, a row has one span more, and a warp 31.
template <typename T>
__device__ __forceinline__ void gated_backward(const T* __restrict__ grad_y, const T* __restrict__ gate,
                                               const T* __restrict__ up, T* __restrict__ grad_gate,
                                               T* __restrict__ grad_up, const Rows& shape, long long gate_stride,
                                               long long up_stride, int function) {
  const long long rows = shape.rows, cols = shape.cols;
  const bool packed = up == nullptr;
  const long long grad_stride = packed ? 2 * cols : cols;
  if (packed) up = gate + cols, grad_up = grad_gate + cols;
  const bool fit = rows_fit(grad_y, cols, rows) && rows_fit(gate, gate_stride, rows) && rows_fit(up, up_stride, rows) &&
                   rows_fit(grad_gate, grad_stride, rows) && rows_fit(grad_up, grad_stride, rows);
  const GatedGradients<T> all = {grad_y, gate,        up,        grad_gate,   grad_up,
                                 cols,   gate_stride, up_stride, grad_stride, function};
  const Own own = Own::of<T>(shape, global_thread());
  if (fit) GatedBackward<T>{all}.template on<true>(shape, own);
  else gated_backward_unaligned(all, shape, packed ? int(-cols) & (kVecWidth<T> - 1) : 0);
}
