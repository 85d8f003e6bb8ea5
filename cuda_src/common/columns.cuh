// Statistics of the columns of a contiguous array of `rows` by `size`: channels that lie side by side.
//
//     blockDim.x   threads along the columns, a pack of W columns each; blockIdx.x is the tile of columns
//     blockDim.y   rows at a time; blockIdx.y is the part of the rows, of gridDim.y
//
// A thread has W columns, of 16 bytes: neighbours, read at once, where every row begins at a 16-byte boundary; else
// blockDim.x apart, read one by one, neighbouring threads on neighbours.
#pragma once

#include "common/moments.cuh"
#include "common/rows.cuh"

constexpr int kColumnThreads = 256;
constexpr int kRowsAtOnce = 4;  // under way in a thread

// The columns of a block, and of those a thread's.
template <typename T, bool VECTORS> struct ColumnTile {
  static constexpr int W = kVecWidth<T>;
  long long size, start;  // columns of the array, the tile's first
  int left;  // columns of the tile

  __device__ __forceinline__ explicit ColumnTile(long long size) : size(size) {
    const int most = W * blockDim.x;
    start = blockIdx.x * (long long)most;
    left = int(min(size - start, (long long)most));
  }

  // Where column e of this thread is in the tile.
  __device__ __forceinline__ int index(int e) const {
    return VECTORS ? threadIdx.x * W + e : e * blockDim.x + threadIdx.x;
  }

  // f(e, column) for each of this thread's columns.
  template <typename F> __device__ __forceinline__ void each(F f) const {
#pragma unroll
    for (int e = 0; e < W; ++e) {
      if (index(e) < left) f(e, start + index(e));
    }
  }

  // This thread's columns of a row; 0 in place of those that are not there.
  __device__ __forceinline__ Pack<T> load(const T* tensor, long long row) const {
    const T* from = tensor + row * size + start;
    Pack<T> pack = {};
    if constexpr (VECTORS) return index(0) < left ? load_aligned(from + index(0)) : pack;
#pragma unroll
    for (int e = 0; e < W; ++e) {
      if (index(e) < left) pack.set(e, from[index(e)]);
    }
    return pack;
  }

  // f(e) to each of this thread's columns of a row.
  template <typename F> __device__ __forceinline__ void store(T* tensor, long long row, F f) const {
    T* to = tensor + row * size + start;
    if constexpr (VECTORS) {
      unsigned word[4];
      round_to_words<T>(word, 0, f);
      if (index(0) < left) store_words(to + index(0), word[0], word[1], word[2], word[3]);
    } else {
#pragma unroll
      for (int e = 0; e < W; ++e) {
        if (index(e) < left) to[index(e)] = from_acc<T>(f(e));
      }
    }
  }
};

// f(row, there, packs...) for kRowsAtOnce rows at a time of each tensor, from `row` on and blockDim.y apart, the first
// `there` of which are. The rows are this block's part, of which a thread takes every blockDim.y-th.
template <typename T, bool VECTORS, typename F, typename... Tensors>
__device__ __forceinline__ void each_rows(const ColumnTile<T, VECTORS>& tile, long long rows, F f,
                                          const Tensors*... tensors) {
  const long long each = (rows + gridDim.y - 1) / gridDim.y, begin = min(blockIdx.y * each, rows);
  const long long end = min(begin + each, rows);
#pragma unroll 1
  for (long long row = begin + threadIdx.y; row < end; row += kRowsAtOnce * (long long)blockDim.y) {
    const int there = int(min((end - row + blockDim.y - 1) / blockDim.y, (long long)kRowsAtOnce));
    Pack<T> packs[sizeof...(tensors)][kRowsAtOnce];
#pragma unroll
    for (int u = 0; u < kRowsAtOnce; ++u) {
      const long long at = row + u * (long long)blockDim.y;
      int t = 0;
      ((packs[t++][u] = u < there ? tile.load(tensors, at) : Pack<T>{}), ...);
    }
    f(row, there, packs);
  }
}

// f(u, e) to this thread's columns of the rows that each_rows is at.
template <typename T, bool VECTORS, typename F>
__device__ __forceinline__ void store_rows(const ColumnTile<T, VECTORS>& tile, T* tensor, long long row, int there,
                                           F f) {
#pragma unroll
  for (int u = 0; u < kRowsAtOnce; ++u) {
    if (u < there) tile.store(tensor, row + u * (long long)blockDim.y, [&](int e) { return f(u, e); });
  }
}

// The moments of each of a thread's columns.
template <int W, typename A> struct ColumnMoments {
  A count, mean[W], square[W];

  template <typename T>
  __device__ __forceinline__ void add(const Pack<T> (&rows)[kRowsAtOnce], int there) {
    const A added = A(there), total = count + added, each = A(1) / added, share = added / total;
#pragma unroll
    for (int e = 0; e < W; ++e) {
      A sum = A(0), left = A(0), squares = A(0);
#pragma unroll
      for (int u = 0; u < kRowsAtOnce; ++u) sum += rows[u][e];  // those that are not there are 0
      const A about = sum * each;
#pragma unroll
      for (int u = 0; u < kRowsAtOnce; ++u) {
        const A centred = u < there ? rows[u][e] - about : A(0);
        left += centred, squares += centred * centred;
      }
      const Moments<A> own = Moments<A>::of(added, about, left, squares);
      const A apart = own.mean - mean[e];
      if (count == A(0)) {
        mean[e] = own.mean, square[e] = own.square;
      } else {
        mean[e] += apart * share, square[e] += own.square + apart * apart * (count * share);
      }
    }
    count = total;
  }
};

// What a thread has for its columns, by `value(e)`, combined over threadIdx.y in order, and given to store(column of the
// tile, result) by one thread. `shared` holds W values of each thread.
template <typename T, bool VECTORS, typename V, typename Value, typename Combine, typename Store>
__device__ __forceinline__ void fold_columns(const ColumnTile<T, VECTORS>& tile, V* shared, Value value,
                                             Combine combine, Store store) {
  constexpr int W = kVecWidth<T>;
  const int slab = W * blockDim.x, threads = blockDim.x * blockDim.y;
#pragma unroll
  for (int e = 0; e < W; ++e) shared[threadIdx.y * slab + tile.index(e)] = value(e);
  __syncthreads();
#pragma unroll 1
  for (int i = threadIdx.y * blockDim.x + threadIdx.x; i < tile.left; i += threads) {
    V total = shared[i];
#pragma unroll 1
    for (int y = 1; y < blockDim.y; ++y) combine(total, shared[y * slab + i]);
    store(i, total);
  }
}
