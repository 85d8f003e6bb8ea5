// The second pass of batch_norm's kernels for images, (n, c, s): what they write for each vector of a split.
#pragma once

#include "batch_norm/activated.cuh"
#include "batch_norm/batch_norm.cuh"
#include "common/reduce/strided.cuh"

// y, of the ChannelAffine that of() gives; of() is called after the loads.
template <typename P, typename T, typename Of>
__device__ __forceinline__ void store_normalised(const P& split, const SegmentSource<T>& x, T* y, Of of, Nothing) {
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

// The same, then what follows.
template <typename P, typename T, typename Of>
__device__ __forceinline__ void store_normalised(const P& split, const SegmentSource<T>& x, T* y, Of of,
                                                 const Activated<T>& then) {
  constexpr int U = P::kUnroll;
  if (then.residual) {
    each_vectors<true>(
        split,
        [&](const RunVector(&places)[U], const Vector<T>(&vectors)[2][U]) {
          const ChannelAffine<T> affine = of();
#pragma unroll
          for (int u = 0; u < U; ++u) {
            if (places[u].last == 0) continue;
            then.store(y, places[u].at, [&](int e) { return affine(vectors[0][u][e]) + vectors[1][u][e]; });
          }
        },
        x, SegmentSource<T>{then.residual});
  } else {
    each_vectors<true>(
        split,
        [&](const RunVector(&places)[U], const Vector<T>(&vectors)[1][U]) {
          const ChannelAffine<T> affine = of();
#pragma unroll
          for (int u = 0; u < U; ++u) {
            if (places[u].last > 0) then.store(y, places[u].at, [&](int e) { return affine(vectors[0][u][e]); });
          }
        },
        x);
  }
}

// grad_z of U vectors of a split, of their grad_y.
template <typename T, int U, typename Gate>
__device__ __forceinline__ void pass(const Gate& gate, const RunVector (&places)[U], const Vector<T> (&grad_y)[U],
                                     Vector<T> (&grad_z)[U]) {
  const auto bits =
      gate.template load<U>([&](int u) { return places[u].last > 0; }, [&](int u) { return places[u].at; });
#pragma unroll
  for (int u = 0; u < U; ++u) grad_z[u] = bits(u, grad_y[u]);
}

// split_sums of those that pass.
template <typename P, typename T, typename Gate, typename A = acc_t<T>>
__device__ __forceinline__ Pair<A> passed_sums(const P& split, const SegmentSource<T>& grad_y,
                                               const SegmentSource<T>& x, A about, const Gate& gate) {
  constexpr int U = P::kUnroll;
  Pair<A> sums = {};
  each_vectors(
      split,
      [&](const RunVector(&places)[U], const Vector<T>(&vectors)[2][U]) {
        Vector<T> grad_z[U];
        pass(gate, places, vectors[0], grad_z);
        add_products(sums, places, grad_z, vectors[1], about);
      },
      grad_y, x);
  return sums;
}

template <typename P, typename T, typename Gate>
__device__ __forceinline__ void store_gradient(const P& split, const SegmentSource<T>& grad_y,
                                               const SegmentSource<T>& x, T* grad_x, const ChannelGradient<T>& of,
                                               const Gate& gate) {
  constexpr int U = P::kUnroll;
  each_vectors<true>(
      split,
      [&](const RunVector(&places)[U], const Vector<T>(&vectors)[2][U]) {
        Vector<T> grad_z[U];
        pass(gate, places, vectors[0], grad_z);
#pragma unroll
        for (int u = 0; u < U; ++u) {
          split.store(grad_x, places[u], [&](int e) { return of(grad_z[u][e], vectors[1][u][e]); });
          if constexpr (Gate::kMasked) {
            if (gate.grad_z) split.put(gate.grad_z, places[u], grad_z[u]);
          }
        }
      },
      grad_y, x);
}
