// What batch_norm's kernels for channels side by side have in common: how the threads of a block and the blocks of a cluster
// combine what they have of each column, and what the second pass writes. Python defines CLUSTER_VECTORS, which a tile of a
// cluster has along the columns at most.
#pragma once

#include "batch_norm/activated.cuh"
#include "batch_norm/batch_norm.cuh"
#include "common/tile/column_tile.cuh"

template <typename T> constexpr int kClusterColumns = CLUSTER_VECTORS * kVecWidth<T>;

// A barrier of all blocks that share a tile.
__device__ __forceinline__ void wait_for_tile() {
  if (gridDim.y == 1) return __syncthreads();
  cluster_arrive();
  cluster_wait();
}

// Gives each block of a cluster what all have for column i of a tile: `all` is (gridDim.y, columns).
template <typename V> __device__ __forceinline__ void share_tile(const V& value, V* all, int columns, int i) {
  for (int rank = 0; rank < gridDim.y; ++rank) {
    if (gridDim.y > 1) store_remote(all + blockIdx.y * columns + i, rank, value);
    else all[i] = value;
  }
}

// This thread's columns of what `all` in shared memory has for those of the tile.
template <typename T, bool ALIGNED, typename V, int W>
__device__ __forceinline__ void take_columns(const ColumnTile<T, ALIGNED>& tile, const V* all, V (&own)[W]) {
#pragma unroll
  for (int e = 0; e < W && tile.any(); ++e) own[e] = all[tile.first + e];
}

template <typename T, bool ALIGNED, int W>
__device__ __forceinline__ void store_normalised(const ColumnTile<T, ALIGNED>& tile, const T* x, T* y,
                                                 const ChannelAffine<T> (&of)[W], Nothing) {
  each_rows<true>(
      tile,
      [&](long long at, int present, const Pieces<T, ALIGNED, 1>& pieces) {
        store_rows(tile, y, at, present, pieces, [&](int u, int e) { return of[e](pieces.of[0][u][e]); });
      },
      x);
}

// The same, then what follows.
template <typename T, int W>
__device__ __forceinline__ void store_normalised(const ColumnTile<T, true>& tile, const T* x, T* y,
                                                 const ChannelAffine<T> (&of)[W], const Activated<T>& then) {
  if (then.residual) {
    each_rows<true, true>(
        tile,
        [&](long long at, int present, const Pieces<T, true, 2>& pieces) {
#pragma unroll
          for (int u = 0; u < Pieces<T, true, 2>::U; ++u) {
            if (u >= present) continue;
            then.store(y, at + u * tile.pitch, [&](int e) { return of[e](pieces.of[0][u][e]) + pieces.of[1][u][e]; });
          }
        },
        x, then.residual);
  } else {
    each_rows<true, true>(
        tile,
        [&](long long at, int present, const Pieces<T, true, 1>& pieces) {
#pragma unroll
          for (int u = 0; u < Pieces<T, true, 1>::U; ++u) {
            if (u < present) then.store(y, at + u * tile.pitch, [&](int e) { return of[e](pieces.of[0][u][e]); });
          }
        },
        x);
  }
}

template <typename T, bool ALIGNED, int W, typename Gate>
__device__ __forceinline__ void store_gradient(const ColumnTile<T, ALIGNED>& tile, const T* grad_y, const T* x,
                                               T* grad_x, const ChannelGradient<T> (&of)[W], const Gate& gate) {
  each_rows<true, Gate::kMasked>(
      tile,
      [&](long long at, int present, const Pieces<T, ALIGNED, 2>& pieces) {
        Piece<T, ALIGNED> grad_z[Pieces<T, ALIGNED, 2>::U];
        pass(gate, tile, at, present, pieces.of[0], grad_z);
        store_rows(tile, grad_x, at, present, pieces,
                   [&](int u, int e) { return of[e](grad_z[u][e], pieces.of[1][u][e]); });
        if constexpr (Gate::kMasked) {
          if (gate.grad_z)
            store_rows(tile, gate.grad_z, at, present, pieces, [&](int u, int e) { return grad_z[u][e]; });
        }
      },
      grad_y, x);
}
