// Forward of rows off 16-byte boundaries, divided as UnalignedRow says: whole vectors of what is written, which begins at a
// boundary, and the elements of an unaligned head and tail, of which some threads have one each. What the vectors meet of
// weight and bias is shifted by a kernel before this one, so that it begins at boundaries too.
#pragma once

#include "norm/norm.cuh"
#include "common/hw/dependent_launch.cuh"

template <typename T> __device__ __forceinline__ void store_words(T* to, const Vector<T>& vector) {
  store_words(to, vector.word[0], vector.word[1], vector.word[2], vector.word[3]);
}
template <typename T> __device__ __forceinline__ void store_words(T* to, const Vector<T, 8>& vector) {
  store_words(to, vector.word[0], vector.word[1]);
}

// Row blockIdx.y of `shifted` becomes the elements of `parameter` from number blockIdx.y on: what the vectors of a row meet
// whose head has so many elements. Grid: (any, W). Block: any. A row of `shifted` has as many whole vectors as hold all
// elements. It may not be launched to overlap the kernel before it: the forward that overlaps this one reads rows before
// it waits.
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

// K vectors `step` elements apart, the first at `own`; 0 for those that begin `left` elements or more behind that. Unless
// ALIGNED they may be off 16-byte boundaries.
template <bool ALIGNED, int K, typename T, int BYTES>
__device__ __forceinline__ void load_own(const T* own, int left, int step, Vector<T, BYTES> (&vectors)[K]) {
  if (ALIGNED || is_aligned16(own)) {
#pragma unroll
    for (int k = 0; k < K; ++k) {
      vectors[k] = k * step < left ? load_aligned<T, BYTES>(own + k * step) : Vector<T, BYTES>{};
    }
  } else if constexpr (!ALIGNED) {
#pragma unroll
    for (int k = 0; k < K; ++k) vectors[k] = k * step < left ? load_elements(own + k * step) : Vector<T>{};
  }
}

// *y = what x, this thread's element of the head or the tail, becomes; it lies in `column`.
template <bool CENTRED, typename T, typename A = acc_t<T>>
__device__ __forceinline__ void store_edge(const T* weight, const T* bias, T* y, int column, T x,
                                           const RowStatistics<A>& of) {
  const A w = weight ? to_acc(weight[column]) : A(1), b = CENTRED && bias ? to_acc(bias[column]) : A(0);
  *y = from_acc<T>(of.template y<CENTRED>(to_acc(x), w, b));
}
