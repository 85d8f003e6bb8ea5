// What batch_norm's kernels of columns have in common: columns, (m, c) or (n, c s), made channels, what the blocks of a
// cluster tell each other, and what is written.
#pragma once

#include "batch_norm/batch_norm.cuh"
#include "batch_norm/columns.cuh"

template <typename T> constexpr int kClusterColumns = 8 * kVecWidth<T>;  // of a tile that a cluster has, at most

// The sums of column i of this block's tile: in eight that a tree adds up, which is more exact than one after the other.
template <typename A> __device__ __forceinline__ Pair<A> tile_sums(const Pair<A>* shared, int slab, int i) {
  constexpr int kSums = 8;
  Pair<A> sums[kSums] = {};
  for (int y = 0; y < blockDim.y; y += kSums) {
#pragma unroll
    for (int k = 0; k < kSums; ++k) {
      if (y + k < blockDim.y) sums[k] = sums[k] + shared[slot((y + k) * slab + i)];
    }
  }
  return reduce_elements<Sum, 1, kSums>([&](int, int k) { return sums[k]; });
}

__device__ __forceinline__ void meet_tile() {
  if (gridDim.y == 1) return __syncthreads();
  cluster_arrive();
  cluster_wait();
}

// What the blocks of a cluster have for each column of a tile, to all of them: `all` is (gridDim.y, columns).
template <typename V> __device__ __forceinline__ void share_tile(const V& value, V* all, int columns, int i) {
  for (int rank = 0; rank < gridDim.y; ++rank) {
    if (gridDim.y > 1) store_remote(all + blockIdx.y * columns + i, rank, value);
    else all[i] = value;
  }
}

// What follows for this thread's columns, of what `all` in shared memory has for those of the tile.
template <typename T, bool WHOLE, typename V, int W>
__device__ __forceinline__ void take_columns(const ColumnTile<T, WHOLE>& tile, const V* all, V (&own)[W]) {
#pragma unroll
  for (int e = 0; e < W && tile.any(); ++e) own[e] = all[tile.first + e];
}

template <typename T, bool WHOLE, int W>
__device__ __forceinline__ void store_normalised(const ColumnTile<T, WHOLE>& tile, const T* x, T* y,
                                                 const Affine<T> (&of)[W]) {
  each_rows<true>(
      tile,
      [&](long long at, int there, const Pieces<T, WHOLE, 1>& pieces) {
        store_rows(tile, y, at, there, pieces, [&](int u, int e) { return of[e](pieces.of[0][u][e]); });
      },
      x);
}

template <typename T, bool WHOLE, int W>
__device__ __forceinline__ void store_gradient(const ColumnTile<T, WHOLE>& tile, const T* grad_y, const T* x, T* grad_x,
                                               const Gradient<T> (&of)[W]) {
  each_rows<true>(
      tile,
      [&](long long at, int there, const Pieces<T, WHOLE, 2>& pieces) {
        store_rows(tile, grad_x, at, there, pieces,
                   [&](int u, int e) { return of[e](pieces.of[0][u][e], pieces.of[1][u][e]); });
      },
      grad_y, x);
}
