// y = max(x, 0)            NaN stays NaN, as in PyTorch
// grad_x = grad_y  where y > 0, else 0
//
// Bytes per element: forward 2 x sizeof(T), backward 3 x sizeof(T), or 2 with a mask; no arithmetic to speak of. Either way
// the mask is sizeof(T) / 16 more: what a training step moves goes from 5 to 4.1.
#include "common/elementwise.cuh"

// A vector of `tensor` from element `first` on; past the end, and where the address is off 16 bytes, element by element.
template <typename T> struct Place {
  static constexpr int W = kVecWidth<T>;
  long long first, n;
  bool fit;

  __device__ __forceinline__ Vec<T, W> load(const T* from) const {
    if (fit && first + W <= n) return load_vec<T, W>(from + first);
    Vec<T, W> values = {};
#pragma unroll
    for (int k = 0; k < W; ++k) {
      if (first + k < n) values.data[k] = from[first + k];
    }
    return values;
  }

  __device__ __forceinline__ void store(T* to, const Vec<T, W>& values) const {
    if (fit && first + W <= n) return store_vec<T, W>(to + first, values);
#pragma unroll
    for (int k = 0; k < W; ++k) {
      if (first + k < n) to[first + k] = values.data[k];
    }
  }
};

// Grid, block: see elementwise(). Each thread owns whole vectors of x and y. y may be x. `mask`, unless it is null, gets a
// byte for each vector: which of its elements are positive, or NaN, the first of them in the lowest bit.
template <typename T> __global__ void relu_fwd(const T* x, T* y, unsigned char* __restrict__ mask, long long n) {
  using A = acc_t<T>;
  if (mask == nullptr) return elementwise<T>(n, [](A x) { return x <= A(0) ? A(0) : x; }, y, x);
  const bool fit = is_aligned16(x) && is_aligned16(y);
  for (long long v = global_thread(); v * kVecWidth<T> < n; v += global_threads()) {
    const Place<T> place = {v * kVecWidth<T>, n, fit};
    Vec<T, kVecWidth<T>> values = place.load(x);
    unsigned bits = 0;
#pragma unroll
    for (int k = 0; k < kVecWidth<T>; ++k) {
      if (to_acc(values.data[k]) <= A(0)) values.data[k] = from_acc<T>(A(0));
      else bits |= 1u << k;
    }
    place.store(y, values);
    mask[v] = static_cast<unsigned char>(bits);
  }
}

// Grid, block: see elementwise(). Reads the mask, or, where there is none, the output: the input need not be kept.
template <typename T>
__global__ void relu_bwd(const T* __restrict__ grad_y, const T* __restrict__ y, const unsigned char* __restrict__ mask,
                         T* __restrict__ grad_x, long long n) {
  using A = acc_t<T>;
  if (mask == nullptr) {
    return elementwise<T>(n, [](A grad_y, A y) { return y <= A(0) ? A(0) : grad_y; }, grad_x, grad_y, y);
  }
  const bool fit = is_aligned16(grad_y) && is_aligned16(grad_x);
  for (long long v = global_thread(); v * kVecWidth<T> < n; v += global_threads()) {
    const Place<T> place = {v * kVecWidth<T>, n, fit};
    Vec<T, kVecWidth<T>> grads = place.load(grad_y);
    const unsigned bits = mask[v];
#pragma unroll
    for (int k = 0; k < kVecWidth<T>; ++k) {
      if ((bits >> k & 1) == 0) grads.data[k] = from_acc<T>(A(0));
    }
    place.store(grad_x, grads);
  }
}
