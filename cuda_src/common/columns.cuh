// Statistics of the columns of a contiguous array of `rows` by `size`: channels that lie side by side.
//
//     blockDim.x   threads along the columns, a pack of W columns each; blockIdx.x is the tile of columns
//     blockDim.y   rows at a time, a multiple of W; blockIdx.y is the part of the rows, of gridDim.y
//
// A thread has W neighbouring columns, the same in all its rows, in packs that begin at 16-byte boundaries of one tensor:
// where rows are no whole packs, they begin elsewhere in each row, but W rows on at the same column again. A tile then is
// a pack narrower than its threads, and what they read beside it is not used:
//
//     row 0   |01234567|89abcdef|g.......            a tile of 8 columns and two threads:
//     row 1    .0123456|789abcde|fg......|           (0, 0) has 0..7; (0, 1) 0..6, (1, 1) 7; (0, 2) 0..5, (1, 2) 6 and 7
#pragma once

#include "common/runs.cuh"

constexpr int kColumnThreads = 256;
#ifndef STREAM
#define STREAM 0
#endif
#ifndef ROWS
#define ROWS 8
#endif
constexpr int kRowsAtOnce = ROWS;  // packs under way in a thread, of all tensors together

// The columns of a block and the rows of its part; of those a thread's.
template <typename T> struct ColumnTile {
  static constexpr int W = kVecWidth<T>;
  long long rows, size, start;  // of the array; the tile's first column
  long long row, end;  // this thread's first row; the end of the part's
  int first, left;  // where in the tile this thread's first column is, which may be below 0; columns of the tile

  // `like` is the tensor by whose boundaries packs are cut.
  __device__ __forceinline__ ColumnTile(long long rows, long long size, int part, const T* like)
      : rows(rows), size(size) {
    const bool whole = vectors_fit<W>(size, like);
    const int most = W * (blockDim.x - !whole);
    start = blockIdx.x * (long long)most;
    left = int(min(size - start, (long long)most));
    const long long each = (rows + gridDim.y - 1) / gridDim.y, begin = min(part * each, rows);
    end = min(begin + each, rows);
    row = begin + threadIdx.y;
    const int off = int(reinterpret_cast<unsigned long long>(like) / sizeof(T) % W);
    first = threadIdx.x * W - (whole ? 0 : int((row * size + start + off) % W));
  }

  __device__ __forceinline__ bool has(int e) const { return first + e >= 0 && first + e < left; }
  __device__ __forceinline__ bool any() const { return first > -W && first < left; }
  __device__ __forceinline__ bool all() const { return first >= 0 && first + W <= left; }

  // f(e, column) for each of this thread's columns.
  template <typename F> __device__ __forceinline__ void each(F f) const {
#pragma unroll
    for (int e = 0; e < W; ++e) {
      if (has(e)) f(e, start + first + e);
    }
  }

  // Where this thread's pack of a row begins.
  __device__ __forceinline__ long long at(long long row) const { return row * size + start + first; }

  // This thread's pack of a row; beside its columns it may be anything.
  __device__ __forceinline__ Pack<T> load(const T* tensor, long long at) const {
    if (is_aligned16(tensor + at) && at >= 0 && at + W <= rows * size) return load_aligned(tensor + at);
    return load_one_by_one(tensor + at, -first, left - first);
  }

  // f(e) to each of this thread's columns of a row.
  template <typename F> __device__ __forceinline__ void store(T* tensor, long long at, F f) const {
    if (all() && is_aligned16(tensor + at)) {
      unsigned word[4];
      round_to_words<T>(word, 0, f);
      if (STREAM) __stcs(reinterpret_cast<uint4*>(tensor + at), make_uint4(word[0], word[1], word[2], word[3]));
      else store_words(tensor + at, word[0], word[1], word[2], word[3]);
      return;
    }
#pragma unroll
    for (int e = 0; e < W; ++e) {
      if (has(e)) tensor[at + e] = from_acc<T>(f(e));
    }
  }

  // How many rows this thread has.
  __device__ __forceinline__ int count() const {
    return row < end ? int((end - row + blockDim.y - 1) / blockDim.y) : 0;
  }
};

// f(at, there, packs...) for U rows at a time of each tensor, the pack `at` of the first and so on, the first `there` of
// which are; blockDim.y rows apart. With BACK from the end.
template <bool BACK = false, typename T, typename F, typename... Tensors>
__device__ __forceinline__ void each_rows(const ColumnTile<T>& tile, F f, const Tensors*... tensors) {
  constexpr int U = kRowsAtOnce / sizeof...(tensors);
  if (!tile.any()) return;
  const int count = tile.count(), steps = (count + U - 1) / U;
  const long long pitch = blockDim.y * tile.size;
#pragma unroll 1
  for (int s = 0; s < steps; ++s) {
    const int done = (BACK ? steps - 1 - s : s) * U;
    const long long at = tile.at(tile.row) + done * pitch;
    const int there = min(count - done, U);
    Pack<T> packs[sizeof...(tensors)][U];
#pragma unroll
    for (int u = 0; u < U; ++u) {
      int t = 0;
      ((packs[t++][u] = u < there ? tile.load(tensors, at + u * pitch) : Pack<T>{}), ...);
    }
    f(at, there, packs);
  }
}

// f(u, e) to this thread's columns of the rows that each_rows is at.
template <int U, typename T, typename F>
__device__ __forceinline__ void store_rows(const ColumnTile<T>& tile, T* tensor, long long at, int there, F f) {
#pragma unroll
  for (int u = 0; u < U; ++u) {
    if (u < there) tile.store(tensor, at + u * (blockDim.y * tile.size), [&](int e) { return f(u, e); });
  }
}

// The moments of each of this thread's columns, each of tile.count() numbers.
template <typename T, typename A = acc_t<T>>
__device__ __forceinline__ void column_moments(const ColumnTile<T>& tile, const T* x, Pair<A> (&result)[kVecWidth<T>]) {
  constexpr int U = kRowsAtOnce, W = kVecWidth<T>;
  Centred<A> own[W] = {};
  int steps = 0;
  A count = A(0);
  each_rows(
      tile,
      [&](long long, int there, const Pack<T>(&packs)[1][U]) {
        if (steps == 0) {
#pragma unroll
          for (int e = 0; e < W; ++e) {
            A sum = A(0);
#pragma unroll
            for (int u = 0; u < U; ++u) sum += packs[0][u][e];  // those that are not there are 0
            own[e].about = sum / A(there);
          }
        }
        if (there == U) {
          each_element<U, W>([&](int u, int e) { own[e].add(packs[0][u][e]); });
        } else {
#pragma unroll
          for (int u = 0; u < U - 1; ++u) {
#pragma unroll
            for (int e = 0; e < W && u < there; ++e) own[e].add(packs[0][u][e]);
          }
        }
        count += A(there);
        if ((++steps & (steps - 1)) != 0) return;  // 1, 2, 4, 8 ...
#pragma unroll
        for (int e = 0; e < W; ++e) own[e].draw_nearer(count);
      },
      x);
#pragma unroll
  for (int e = 0; e < W; ++e) {
    const Moments<A> of = own[e].moments(count);
    result[e] = {of.mean, of.square};
  }
}

// Sum(grad_y) and sum(grad_y (x - mean)) of each of this thread's columns; f(at, there, packs) besides.
template <typename T, typename F, typename A = acc_t<T>>
__device__ __forceinline__ void column_sums(const ColumnTile<T>& tile, const T* grad_y, const T* x,
                                            const A (&mean)[kVecWidth<T>], Pair<A> (&sums)[kVecWidth<T>], F f) {
  constexpr int U = kRowsAtOnce / 2, W = kVecWidth<T>;
  each_rows(
      tile,
      [&](long long at, int there, const Pack<T>(&packs)[2][U]) {
#pragma unroll
        for (int e = 0; e < W; ++e) {
          Pair<A> own = {};
#pragma unroll
          for (int u = 0; u < U; ++u) {
            const A centred = u < there ? packs[1][u][e] - mean[e] : A(0);  // else 0 x inf would be NaN
            own.first += packs[0][u][e], own.second += packs[0][u][e] * centred;
          }
          sums[e] = sums[e] + own;
        }
        f(at, there, packs);
      },
      grad_y, x);
}

// What each thread has for its columns put side by side: `shared` is (blockDim.y, blockDim.x W).
template <typename T, typename V>
__device__ __forceinline__ void share_columns(const ColumnTile<T>& tile, const V (&values)[kVecWidth<T>], V* shared) {
  V* row = shared + threadIdx.y * (blockDim.x * kVecWidth<T>);
#pragma unroll
  for (int e = 0; e < kVecWidth<T>; ++e) {
    if (tile.has(e)) row[tile.first + e] = values[e];
  }
  __syncthreads();
}

// Groups of numbers made one: group i is of count_of(i) numbers, of(i) their mean and square.
template <typename A, typename Count, typename Of>
__device__ __forceinline__ Moments<A> merged(int groups, Count count_of, Of of) {
  A count = A(0), mean = A(0), square = A(0);
#pragma unroll 8
  for (int i = 0; i < groups; ++i) count += count_of(i);
  if (count == A(0)) return {};
#pragma unroll 8
  for (int i = 0; i < groups; ++i) mean += of(i).first * (count_of(i) / count);
#pragma unroll 8
  for (int i = 0; i < groups; ++i) {
    const Pair<A> one = of(i);
    const A apart = one.first - mean;
    square += one.second + apart * apart * count_of(i);
  }
  return {count, mean, square};
}

// How many of `rows` rows are in part i, where each part but the last has equally many.
__device__ __forceinline__ long long rows_of(long long rows, int parts, int i) {
  const long long each = (rows + parts - 1) / parts;
  return max(0LL, min(each, rows - i * each));
}
