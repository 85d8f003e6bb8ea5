// What batch_norm's kernels of images, (n, c, s), write.
#pragma once

#include "batch_norm/batch_norm.cuh"
#include "common/reduce/strided.cuh"

template <typename P, typename T, typename Of>
__device__ __forceinline__ void store_normalised(const P& part, const Source<T>& x, T* y, Of of) {
  constexpr int U = P::kAtOnce;
  each_packs<true>(
      part,
      [&](const Place(&places)[U], const Vector<T>(&vectors)[1][U]) {
        const Affine<T> affine = of();
#pragma unroll
        for (int u = 0; u < U; ++u) part.store(y, places[u], [&](int e) { return affine(vectors[0][u][e]); });
      },
      x);
}

template <typename P, typename T>
__device__ __forceinline__ void store_gradient(const P& part, const Source<T>& grad_y, const Source<T>& x, T* grad_x,
                                               const Gradient<T>& of) {
  constexpr int U = P::kAtOnce;
  each_packs<true>(
      part,
      [&](const Place(&places)[U], const Vector<T>(&vectors)[2][U]) {
#pragma unroll
        for (int u = 0; u < U; ++u) {
          part.store(grad_x, places[u], [&](int e) { return of(vectors[0][u][e], vectors[1][u][e]); });
        }
      },
      grad_y, x);
}
