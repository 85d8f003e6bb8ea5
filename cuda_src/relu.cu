// y = max(x, 0)            NaN stays NaN, as in PyTorch
// grad_x = grad_y  where y > 0, else 0
//
// Bytes per element: forward 2 x sizeof(T), backward 3 x sizeof(T), or 2 with a mask; no arithmetic to speak of. Either way
// the mask is sizeof(T) / 16 more: what a training step moves goes from 5 to 4.1.
#include "common/elementwise.cuh"

#ifndef RELU_WORDS
#define RELU_WORDS 1
#endif

// A vector of elements from `first` on; past the end, and where the address is off 16 bytes, element by element.
template <typename T> struct Place {
  static constexpr int W = kVecWidth<T>;
  long long first, n;
  bool whole;

  __device__ __forceinline__ Place(long long first, long long n, bool fit)
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

// All bits of each element of word i that is positive, or NaN.
__device__ __forceinline__ unsigned positive(const Words<__half>& x, int i) {
  return __hgtu2_mask(*reinterpret_cast<const __half2*>(&x.word[i]), __float2half2_rn(0.0f));
}
__device__ __forceinline__ unsigned positive(const Words<__nv_bfloat16>& x, int i) {
  return __hgtu2_mask(*reinterpret_cast<const __nv_bfloat162*>(&x.word[i]), __float2bfloat162_rn(0.0f));
}
__device__ __forceinline__ unsigned positive(const Words<float>& x, int i) {
  return __uint_as_float(x.word[i]) <= 0.0f ? 0u : ~0u;
}
__device__ __forceinline__ unsigned positive(const Words<double>& x, int i) {
  return x.elements.data[i / 2] <= 0.0 ? 0u : ~0u;
}

// Grid, block: see elementwise(). Each thread owns whole vectors of x and y. y may be x. `mask`, unless it is null, gets a
// byte for each vector: which of its elements are positive, or NaN, the first of them in the lowest bit.
template <typename T> __global__ void relu_fwd(const T* x, T* y, unsigned char* __restrict__ mask, long long n) {
  using A = acc_t<T>;
  constexpr int W = kVecWidth<T>;
  if (mask == nullptr) return elementwise<T>(n, [](A x) { return x <= A(0) ? A(0) : x; }, y, x);
  const bool fit = is_aligned16(x) && is_aligned16(y);
  for (long long v = global_thread(); v * W < n; v += global_threads()) {
    const Place<T> place(v * W, n, fit);
    Words<T> values = place.load(x);
    unsigned bits = 0;
#if RELU_WORDS
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const unsigned here = positive(values, i);
      values.word[i] &= here;
      bits |= here & (W == 8 ? 0x20001u << 2 * i : 1u << i * W / 4);
    }
    bits |= bits >> 16;
#else
#pragma unroll
    for (int k = 0; k < W; ++k) {
      if (to_acc(values.elements.data[k]) <= A(0)) values.elements.data[k] = from_acc<T>(A(0));
      else bits |= 1u << k;
    }
#endif
    place.store(y, values);
    mask[v] = static_cast<unsigned char>(bits);
  }
}

// Word i of all the bits of each element whose bit is set in `bits`.
template <typename T> __device__ __forceinline__ unsigned spread(unsigned bits, int i) {
  constexpr int W = kVecWidth<T>;
  const int e = i * W / 4;  // the first element of the word
  const unsigned signs = (bits >> (e & 4) & 15) * 0x10204080u;  // bit k is the sign of byte k, of four
  const unsigned of = W == 8 ? 0x9988u + 0x2222u * (i & 1) : 0x8888u + 0x1111u * e;  // signs of bytes, one for each byte
  unsigned word;
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(word) : "r"(signs), "r"(of));
  return word;
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
  const bool fit = is_aligned16(grad_y) && is_aligned16(grad_x);
  for (long long v = global_thread(); v * W < n; v += global_threads()) {
    const Place<T> place(v * W, n, fit);
    const unsigned bits = mask[v];
    Words<T> grads = place.load(grad_y);
#if RELU_WORDS
#pragma unroll
    for (int i = 0; i < 4; ++i) grads.word[i] &= spread<T>(bits, i);
#else
#pragma unroll
    for (int k = 0; k < W; ++k) {
      if ((bits >> k & 1) == 0) grads.elements.data[k] = from_acc<T>(A(0));
    }
#endif
    place.store(grad_x, grads);
  }
}
