// Forward of rows off 16-byte boundaries, as UnalignedRow has them: vectors of what is written, which begin at boundaries, and one
// element more for some threads. What the vectors meet of weight and bias is shifted first, to begin at boundaries too.
#pragma once

#include "norm/norm.cuh"
#include "common/hw/dependent_launch.cuh"

template <typename T> __device__ __forceinline__ void store_words(T* to, const Vector<T>& vector) {
  store_words(to, vector.word[0], vector.word[1], vector.word[2], vector.word[3]);
}

// The elements of `parameter` from number blockIdx.y on, to row blockIdx.y of `shifted`: what the vectors of a row meet of
// which so many elements lie before a 16-byte boundary. Grid: (any, W); a row of `shifted` has whole vectors, none fewer than
// all elements are. Block: any. It is not to overlap a grid itself: the forward that overlaps it reads rows before it waits.
template <typename T> __device__ __forceinline__ void shift_parameter(const T* parameter, T* shifted, long long size) {
  constexpr int W = kVecWidth<T>;
  let_next_grid_begin();
  const long long vectors = (size + W - 1) / W;
  for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < vectors;
       i += gridDim.x * (long long)blockDim.x) {
    Vector<T> vector = {};
#pragma unroll
    for (int e = 0; e < W; ++e) {
      const long long from = i * W + e + blockIdx.y;
      if (from < size) vector.set(e, parameter[from]);
    }
    store_words(shifted + (blockIdx.y * vectors + i) * W, vector);
  }
}

// K vectors `step` elements apart, the first at `own`; 0 for those `left` elements or more behind that. Unless ALIGNED they
// may be off 16-byte boundaries.
template <bool ALIGNED, int K, typename T>
__device__ __forceinline__ void load_own(const T* own, int left, int step, Vector<T> (&vectors)[K]) {
  if (ALIGNED || is_aligned16(own)) {
#pragma unroll
    for (int k = 0; k < K; ++k) vectors[k] = k * step < left ? load_aligned(own + k * step) : Vector<T>{};
  } else {
#pragma unroll
    for (int k = 0; k < K; ++k) vectors[k] = k * step < left ? load_elements(own + k * step) : Vector<T>{};
  }
}

// *y = what is said of the thread's lone element, of `column`.
template <bool CENTRED, typename T, typename A = acc_t<T>>
__device__ __forceinline__ void store_lone(const T* weight, const T* bias, T* y, int column, T x,
                                           const Statistics<A>& of) {
  const A w = weight ? to_acc(weight[column]) : A(1), b = CENTRED && bias ? to_acc(bias[column]) : A(0);
  *y = from_acc<T>(of.template y<CENTRED>(to_acc(x), w, b));
}
