// y = max(x, 0)            NaN stays NaN, as in PyTorch
// grad_x = grad_y  where y > 0, else 0
//
// Bytes per element: forward 2 x sizeof(T), backward 3 x sizeof(T), or 2 with a mask; no arithmetic to speak of. Either way
// the mask is a bit for each element of a half type: what a training step moves goes from 5 x sizeof(T) to 4.1.
//
// Reached on an H200 (us, forward / backward; a copy of as much: 126): 2^27 elements of bf16 128 / 188, with a mask 134 /
// 132; 2^26 of fp32 129 / 188, with a mask 134 / 133. Lost: the mask is 3% more to move, and a store of its own in each
// warp.
#include "common/elementwise/elementwise.cuh"

// A vector of elements from `first` on, which is taken element by element at the end, and where an address is off 16 bytes.
template <typename T> struct VectorAt {
  static constexpr int W = kVecWidth<T>;
  long long first, n;
  bool whole;

  __device__ __forceinline__ VectorAt(long long first, long long n, bool fit)
      : first(first), n(n), whole(fit && first + W <= n) {}

  __device__ __forceinline__ Words<T> load(const T* from) const {
    Words<T> values;
    if (whole) {
      values.words = *reinterpret_cast<const uint4*>(from + first);
    } else {
#pragma unroll
      for (int k = 0; k < W; ++k) values.elements.data[k] = first + k < n ? from[first + k] : from_acc<T>(0);
    }
    return values;
  }

  __device__ __forceinline__ void store(T* to, const Words<T>& values) const {
    if (whole) return store16(to + first, values.words);
#pragma unroll
    for (int k = 0; k < W; ++k) {
      if (first + k < n) to[first + k] = values.elements.data[k];
    }
  }
};

// Grid, block: see elementwise(). Each thread owns whole vectors of x and y. y may be x. `mask`, unless it is null, gets a
// byte for each vector: which of its elements are positive, or NaN, the first of them in the lowest bit.
template <typename T> __global__ void relu_fwd(const T* x, T* y, unsigned char* __restrict__ mask, long long n) {
  using A = acc_t<T>;
  constexpr int W = kVecWidth<T>;
  if (mask == nullptr) return elementwise<T>(n, [](A x) { return x <= A(0) ? A(0) : x; }, y, x);
  const long long v = global_thread();
  if (v * W >= n) return;
  const VectorAt<T> place(v * W, n, is_aligned16(x) && is_aligned16(y));
  Words<T> values = place.load(x);
  unsigned bits = 0;
#pragma unroll
  for (int k = 0; k < W; ++k) {
    if (to_acc(values.elements.data[k]) <= A(0)) values.elements.data[k] = from_acc<T>(A(0));
    else bits |= 1u << k;
  }
  place.store(y, values);
  mask[v] = static_cast<unsigned char>(bits);
}

// Grid, block: see elementwise(). Reads the mask, or, where there is none, the output: the input need not be kept.
template <typename T>
__global__ void relu_bwd(const T* __restrict__ grad_y, const T* __restrict__ y, const unsigned char* __restrict__ mask,
                         T* __restrict__ grad_x, long long n) {
  using A = acc_t<T>;
  constexpr int W = kVecWidth<T>;
  if (mask == nullptr) {
    return elementwise<T>(n, [](A grad_y, A y) { return y <= A(0) ? A(0) : grad_y; }, grad_x, grad_y, y);
  }
  const long long v = global_thread();
  if (v * W >= n) return;
  const VectorAt<T> place(v * W, n, is_aligned16(grad_y) && is_aligned16(grad_x));
  const unsigned bits = mask[v];
  Words<T> grads = place.load(grad_y);
#pragma unroll
  for (int k = 0; k < W; ++k) {
    if ((bits >> k & 1) == 0) grads.elements.data[k] = from_acc<T>(A(0));
  }
  place.store(grad_x, grads);
}
