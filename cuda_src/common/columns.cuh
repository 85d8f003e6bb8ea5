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
constexpr int kRowsAtOnce = 8;  // packs under way in a thread, of all tensors together

// How many of `rows` rows are before part i, and in it: each part but the last ones has equally many.
__device__ __forceinline__ long long rows_before(long long rows, int parts, int i) {
  const long long each =
      rows < 1LL << 31 ? (unsigned(rows) + unsigned(parts) - 1) / unsigned(parts) : (rows + parts - 1) / parts;
  return min(i * each, rows);
}

__device__ __forceinline__ long long rows_of(long long rows, int parts, int i) {
  return rows_before(rows, parts, i + 1) - rows_before(rows, parts, i);
}

// The columns of a block and the rows of its part; of those a thread's.
template <typename T> struct ColumnTile {
  static constexpr int W = kVecWidth<T>;
  long long size, start;  // of the array; the tile's first column
  long long at, pitch;  // where this thread's first pack begins; how far apart its packs are
  int count;  // of its packs
  int first, left;  // where in the tile this thread's first column is, which may be below 0; columns of the tile
  int rows;  // of the part
  bool inside;  // whether its packs lie in the array with all that is beside its columns

  // `like` is the tensor by whose boundaries packs are cut.
  __device__ __forceinline__ ColumnTile(long long all_rows, long long size, int part, const T* like) : size(size) {
    const bool whole = vectors_fit<W>(size, like);
    const int most = W * (blockDim.x - !whole);
    start = blockIdx.x * (long long)most;
    left = int(min(size - start, (long long)most));
    rows = int(rows_of(all_rows, gridDim.y, part));
    const long long row = rows_before(all_rows, gridDim.y, part) + threadIdx.y;
    const int off = int(reinterpret_cast<unsigned long long>(like) / sizeof(T) % W);
    first = threadIdx.x * W - (whole ? 0 : int((row * size + start + off) % W));
    count = any() && threadIdx.y < rows ? (rows - 1 - threadIdx.y) / blockDim.y + 1 : 0;
    at = row * size + start + first, pitch = blockDim.y * size;
    inside = at >= 0 && at + (count - 1) * pitch + W <= all_rows * size;
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
};

// This thread's packs of a tensor: what is beside its columns may be anything.
template <typename T> struct ColumnPacks {
  static constexpr int W = kVecWidth<T>;
  const ColumnTile<T>& tile;
  T* begin;
  bool loads, stores;  // of whole packs

  __device__ __forceinline__ ColumnPacks(const ColumnTile<T>& tile, const T* tensor)
      : tile(tile), begin(const_cast<T*>(tensor) + tile.at) {
    const bool aligned = is_aligned16(begin);
    loads = aligned && tile.inside, stores = aligned && tile.all();
  }

  __device__ __forceinline__ Pack<T> load(int i) const {
    const T* from = begin + i * tile.pitch;
    if (loads) return load_aligned(from);
    return load_one_by_one(from, -tile.first, tile.left - tile.first);
  }

  template <typename F> __device__ __forceinline__ void store(int i, F f) const {
    Pack<T> pack;
    round_to_words<T>(pack.word, 0, f);
    T* to = begin + i * tile.pitch;
    if (stores) {
      store_words(to, pack.word[0], pack.word[1], pack.word[2], pack.word[3]);
      return;
    }
#pragma unroll
    for (int e = 0; e < W; ++e) {
      if (tile.has(e)) to[e] = element<T>(pack.word, e);
    }
  }
};

// f(i, there, packs...) for U packs at a time of each tensor, number i and on, the first `there` of which are. With BACK
// from the end.
template <bool BACK = false, typename T, typename F, typename... Tensors>
__device__ __forceinline__ void each_rows(const ColumnTile<T>& tile, F f, const ColumnPacks<T>& tensor,
                                          const Tensors&... more) {
  constexpr int N = 1 + sizeof...(more), U = kRowsAtOnce / N;
  const int steps = (tile.count + U - 1) / U;
#pragma unroll 1
  for (int s = 0; s < steps; ++s) {
    const int i = (BACK ? steps - 1 - s : s) * U, there = min(tile.count - i, U);
    Pack<T> packs[N][U];
#pragma unroll
    for (int u = 0; u < U; ++u) {
      int t = 1;
      packs[0][u] = u < there ? tensor.load(i + u) : Pack<T>{};
      ((packs[t++][u] = u < there ? more.load(i + u) : Pack<T>{}), ...);
    }
    f(i, there, packs);
  }
}

// The moments of each of this thread's columns, each of tile.count numbers.
template <typename T, typename A = acc_t<T>>
__device__ __forceinline__ void column_moments(const ColumnTile<T>& tile, const T* x, Pair<A> (&result)[kVecWidth<T>]) {
  constexpr int U = kRowsAtOnce, W = kVecWidth<T>;
  Centred<A> own[W] = {};
  int steps = 0;
  A count = A(0);
  each_rows(
      tile,
      [&](int, int there, const Pack<T>(&packs)[1][U]) {
        if (steps == 0) {
#pragma unroll
          for (int e = 0; e < W; ++e) {
            A sum = A(0);
#pragma unroll
            for (int u = 0; u < U; ++u) sum += packs[0][u][e];  // those that are not there are 0
            own[e].about = sum / A(there);
          }
        }
#pragma unroll
        for (int u = 0; u < U; ++u) {
#pragma unroll
          for (int e = 0; e < W && u < there; ++e) own[e].add(packs[0][u][e]);
        }
        count += A(there);
        if ((++steps & (steps - 1)) != 0) return;  // 1, 2, 4, 8 ...
#pragma unroll
        for (int e = 0; e < W; ++e) own[e].draw_nearer(count);
      },
      ColumnPacks<T>(tile, x));
#pragma unroll
  for (int e = 0; e < W; ++e) {
    const Moments<A> of = own[e].moments(count);
    result[e] = {of.mean, of.square};
  }
}

// sum(grad_y) and sum(grad_y (x - about)) of each of this thread's columns; f(i, there, packs) besides.
template <typename T, typename F, typename A = acc_t<T>>
__device__ __forceinline__ void column_sums(const ColumnTile<T>& tile, const T* grad_y, const T* x,
                                            const A (&about)[kVecWidth<T>], Pair<A> (&sums)[kVecWidth<T>], F f) {
  constexpr int U = kRowsAtOnce / 2, W = kVecWidth<T>;
  each_rows(
      tile,
      [&](int i, int there, const Pack<T>(&packs)[2][U]) {
#pragma unroll
        for (int e = 0; e < W; ++e) {
          Pair<A> own = {};
#pragma unroll
          for (int u = 0; u < U; ++u) {
            const A centred = u < there ? packs[1][u][e] - about[e] : A(0);  // else 0 x inf would be NaN
            own.first += packs[0][u][e], own.second += packs[0][u][e] * centred;
          }
          sums[e] = sums[e] + own;
        }
        f(i, there, packs);
      },
      ColumnPacks<T>(tile, grad_y), ColumnPacks<T>(tile, x));
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

// The moments of column i of a tile that share_columns has put side by side, those of threads y, y + step, ...
template <typename T, typename A = acc_t<T>>
__device__ __forceinline__ Moments<A> tile_moments(const ColumnTile<T>& tile, const Pair<A>* shared, int i, int y = 0,
                                                   int step = 1) {
  const int each = tile.rows / int(blockDim.y), more = tile.rows % int(blockDim.y), slab = blockDim.x * kVecWidth<T>;
  return merged<A>((int(blockDim.y) - y + step - 1) / step, [&](int k) { return A(each + (y + k * step < more)); },
                   [&](int k) { return y + k * step < tile.rows ? shared[(y + k * step) * slab + i] : Pair<A>{}; });
}
