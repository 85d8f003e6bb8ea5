// y = max(x, 0)            NaN stays NaN, as in PyTorch
// grad_x = grad_y  where y > 0, else 0
//
// Bytes per element: forward 2 x sizeof(T), backward 3 x sizeof(T); no arithmetic to speak of.
#include "common/elementwise.cuh"

// Grid, block: see elementwise(). Each thread owns whole vectors of x and y. y may be x.
template <typename T> __global__ void relu_fwd(const T* x, T* y, long long n) {
  using A = acc_t<T>;
  elementwise<T>(n, [](A x) { return x <= A(0) ? A(0) : x; }, y, x);
}

// Grid, block: see elementwise(). Reads the output, so that the input need not be kept.
template <typename T>
__global__ void relu_bwd(const T* __restrict__ grad_y, const T* __restrict__ y, T* __restrict__ grad_x, long long n) {
  using A = acc_t<T>;
  elementwise<T>(n, [](A grad_y, A y) { return y <= A(0) ? A(0) : grad_y; }, grad_x, grad_y, y);
}

// The same, and which elements are positive, or NaN: a byte of `mask` for each vector, its first element in the lowest bit.
template <typename T>
__global__ void relu_fwd_mask(const T* __restrict__ x, T* __restrict__ y, unsigned char* __restrict__ mask,
                              long long n) {
  using A = acc_t<T>;
  constexpr int W = kVecWidth<T>;
  const bool fit = is_aligned16(x) && is_aligned16(y);
  for (long long v = global_thread(); v * W < n; v += global_threads()) {
    const bool whole = fit && v * W + W <= n;
    Vec<T, W> values = {};
    if (whole) values = load_vec<T, W>(x + v * W);
    unsigned bits = 0;
#pragma unroll
    for (int k = 0; k < W; ++k) {
      const long long i = v * W + k;
      if (!whole && i < n) values.data[k] = x[i];
      const A value = to_acc(values.data[k]);
      if (value <= A(0)) values.data[k] = from_acc<T>(A(0));
      else bits |= 1u << k;
      if (!whole && i < n) y[i] = values.data[k];
    }
    if (whole) store_vec<T, W>(y + v * W, values);
    mask[v] = static_cast<unsigned char>(bits);
  }
}

template <typename T>
__global__ void relu_bwd_mask(const T* __restrict__ grad_y, const unsigned char* __restrict__ mask,
                              T* __restrict__ grad_x, long long n) {
  using A = acc_t<T>;
  constexpr int W = kVecWidth<T>;
  const bool fit = is_aligned16(grad_y) && is_aligned16(grad_x);
  for (long long v = global_thread(); v * W < n; v += global_threads()) {
    const bool whole = fit && v * W + W <= n;
    Vec<T, W> grads = {};
    if (whole) grads = load_vec<T, W>(grad_y + v * W);
    const unsigned bits = mask[v];
#pragma unroll
    for (int k = 0; k < W; ++k) {
      const long long i = v * W + k;
      if (!whole && i < n) grads.data[k] = grad_y[i];
      if (!(bits >> k & 1)) grads.data[k] = from_acc<T>(A(0));
      if (!whole && i < n) grad_x[i] = grads.data[k];
    }
    if (whole) store_vec<T, W>(grad_x + v * W, grads);
  }
}
