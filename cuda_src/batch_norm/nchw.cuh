// The second pass of batch_norm's kernels for images, (n, c, s): what they write for each vector of a split.
#pragma once

#include "batch_norm/batch_norm.cuh"
#include "common/reduce/strided.cuh"

// y, of the ChannelAffine that of() gives; of() is called after the loads.
template <typename P, typename T, typename Of>
__device__ __forceinline__ void store_normalised(const P& split, const SegmentSource<T>& x, T* y, Of of) {
  constexpr int U = P::kUnroll;
  each_vectors<true>(
      split,
      [&](const RunVector(&places)[U], const Vector<T>(&vectors)[1][U]) {
        const ChannelAffine<T> affine = of();
#pragma unroll
        for (int u = 0; u < U; ++u) split.store(y, places[u], [&](int e) { return affine(vectors[0][u][e]); });
      },
      x);
}

template <typename P, typename T>
__device__ __forceinline__ void store_gradient(const P& split, const SegmentSource<T>& grad_y,
                                               const SegmentSource<T>& x, T* grad_x, const ChannelGradient<T>& of) {
  constexpr int U = P::kUnroll;
  each_vectors<true>(
      split,
      [&](const RunVector(&places)[U], const Vector<T>(&vectors)[2][U]) {
#pragma unroll
        for (int u = 0; u < U; ++u) {
          split.store(grad_x, places[u], [&](int e) { return of(vectors[0][u][e], vectors[1][u][e]); });
        }
      },
      grad_y, x);
}
