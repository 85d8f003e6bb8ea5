// Statistics of the columns of a contiguous array of `rows` by `size`: channels that lie side by side.
//
//     blockDim.x   threads along the columns, a pack of W columns each; blockIdx.x is the tile of columns
//     blockDim.y   rows at a time; blockIdx.y is the part of the rows, of gridDim.y
//
// Columns are read as rows.cuh has it: packs where every row begins at a 16-byte boundary, else element by element.
#pragma once

#include "common/moments.cuh"
#include "common/rows.cuh"

constexpr int kColumnThreads = 256;
constexpr int kRowsAtOnce = 4;  // under way in a thread

// This block's rows, of which a thread takes every blockDim.y-th.
struct RowRange {
  long long begin, end;

  __device__ __forceinline__ explicit RowRange(long long rows) {
    const long long each = (rows + gridDim.y - 1) / gridDim.y;
    begin = min(blockIdx.y * each, rows), end = min(begin + each, rows);
  }
};

// f(row, there, packs...) for kRowsAtOnce rows at a time of each tensor, from `row` on and blockDim.y apart, the first
// `there` of which are.
template <bool VECTORS, typename T, typename F, typename... Tensors>
__device__ __forceinline__ void each_rows(const Tile<1, kVecWidth<T>, VECTORS>& tile, const RowRange& range,
                                          long long size, long long start, F f, const T* first,
                                          const Tensors*... more) {
#pragma unroll 1
  for (long long row = range.begin + threadIdx.y; row < range.end; row += kRowsAtOnce * (long long)blockDim.y) {
    const long long left = (range.end - row + blockDim.y - 1) / blockDim.y;
    const int there = int(min(left, (long long)kRowsAtOnce));
    Pack<T> packs[1 + sizeof...(more)][kRowsAtOnce];
#pragma unroll
    for (int u = 0; u < kRowsAtOnce; ++u) {
      const Tile<1, kVecWidth<T>, VECTORS> own{u < there ? tile.left : 0};
      const long long at = (row + u * (long long)blockDim.y) * size + start;
      int t = 0;
      packs[t++][u] = load_pack(own, first + at, 0, from_acc<T>(acc_t<T>(0)));
      ((packs[t++][u] = load_pack(own, more + at, 0, from_acc<T>(acc_t<T>(0)))), ...);
    }
    f(row, there, packs);
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
template <int W, bool VECTORS, typename V, typename Value, typename Combine, typename Store>
__device__ __forceinline__ void fold_columns(const Tile<1, W, VECTORS>& tile, V* shared, Value value, Combine combine,
                                             Store store) {
  const int slab = W * blockDim.x, threads = blockDim.x * blockDim.y;
#pragma unroll
  for (int e = 0; e < W; ++e) shared[threadIdx.y * slab + tile.index(0, e)] = value(e);
  __syncthreads();
#pragma unroll 1
  for (int i = threadIdx.y * blockDim.x + threadIdx.x; i < min(slab, tile.left); i += threads) {
    V total = shared[i];
#pragma unroll 1
    for (int y = 1; y < blockDim.y; ++y) combine(total, shared[y * slab + i]);
    store(i, total);
  }
}
