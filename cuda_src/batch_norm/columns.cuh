// Statistics of the columns of a contiguous array of `rows` by `size`: channels that lie side by side.
//
//     blockDim.x   threads along the columns, W neighbours each; blockIdx.x is the tile of columns
//     blockDim.y   rows at a time; blockIdx.y is the part of the rows, of gridDim.y
//
// WHOLE: all rows of all tensors are whole vectors, of which a thread has one in each of its rows. Else it has one element:
// neighbouring threads together still read neighbouring bytes, and vectors that begin elsewhere in each row would cost the
// more instructions.
#pragma once

#include "common/reduce/strided.cuh"

constexpr int kColumnThreads = 256;
constexpr int kRowsAtOnce = 8;  // under way in a thread: vectors of all tensors together, or elements of each

// Blocks that find room on a multiprocessor: COLUMN_BLOCKS of segments.py.
template <typename T, bool WHOLE> constexpr int kColumnBlocks = WHOLE ? 3 : sizeof(T) == 8 ? 4 : 5;

// How many of `rows` rows are before part i, and in it: each part but the last ones has equally many.
__device__ __forceinline__ long long rows_before(long long rows, int parts, int i) {
  const long long each =
      rows < 1LL << 31 ? (unsigned(rows) + unsigned(parts) - 1) / unsigned(parts) : (rows + parts - 1) / parts;
  return min(i * each, rows);
}

__device__ __forceinline__ long long rows_of(long long rows, int parts, int i) {
  return rows_before(rows, parts, i + 1) - rows_before(rows, parts, i);
}

// What a thread has of a row.
template <typename T, bool WHOLE> struct Piece {
  T value;

  __device__ __forceinline__ acc_t<T> operator[](int) const { return to_acc(value); }
  static __device__ __forceinline__ Piece load(const T* from) { return {*from}; }
  static __device__ __forceinline__ Piece none() { return {from_acc<T>(0)}; }
  template <typename F> static __device__ __forceinline__ void store(T* to, F f) { *to = from_acc<T>(f(0)); }
};

template <typename T> struct Piece<T, true> {
  Vector<T> vector;

  __device__ __forceinline__ acc_t<T> operator[](int e) const { return vector[e]; }
  static __device__ __forceinline__ Piece load(const T* from) { return {load_aligned(from)}; }
  static __device__ __forceinline__ Piece none() { return {}; }
  template <typename F> static __device__ __forceinline__ void store(T* to, F f) {
    unsigned word[4];
    round_to_words<T>(word, 0, f);
    store_words(to, word[0], word[1], word[2], word[3]);
  }
};

// Which channel a column is of: so many columns of each, one after the other, and again from the first where a row is
// several rows of channels.
__device__ __forceinline__ long long channel_of(long long column, long long channels, int pixels) {
  const long long c = pixels > 1 ? unsigned(column) / unsigned(pixels) : column;
  return c < channels ? c : unsigned(c) % unsigned(channels);
}

// The columns of a block and the rows of its part; of those a thread's.
template <typename T, bool WHOLE> struct ColumnTile {
  static constexpr int W = WHOLE ? kVecWidth<T> : 1;
  long long start;  // the tile's first column
  long long at, pitch;  // where this thread's first piece is; how far apart they are
  int first, left;  // of the tile: this thread's first column; how many there are
  int rows, count;  // of the part; of this thread

  __device__ __forceinline__ ColumnTile(long long all_rows, long long size, int part) {
    const int most = W * blockDim.x;
    start = blockIdx.x * (long long)most;
    left = int(min(size - start, (long long)most));
    rows = int(rows_of(all_rows, gridDim.y, part));
    first = threadIdx.x * W;
    count = any() && threadIdx.y < rows ? (rows - 1 - threadIdx.y) / blockDim.y + 1 : 0;
    at = (rows_before(all_rows, gridDim.y, part) + threadIdx.y) * size + start + first, pitch = blockDim.y * size;
  }

  __device__ __forceinline__ bool any() const { return first < left; }

  // f(e, c) for each of this thread's columns, which is of channel c.
  template <typename F> __device__ __forceinline__ void each(long long channels, int pixels, F f) const {
    if (!any()) return;
    long long c = channel_of(start + first, channels, pixels);
    int pixel = pixels > 1 ? unsigned(start + first) % unsigned(pixels) : 0;
#pragma unroll
    for (int e = 0; e < W; ++e) {
      f(e, c);
      if (++pixel < pixels) continue;
      pixel = 0;
      if (++c == channels) c = 0;
    }
  }
};

// What a thread has under way of N tensors.
template <typename T, bool WHOLE, int N> struct Pieces {
  static constexpr int U = WHOLE ? kRowsAtOnce / N : kRowsAtOnce;
  Piece<T, WHOLE> of[N][U];
};

// f(at, there, pieces) for the rows of each tensor U at a time, the first at element `at`, `there` of which are; with BACK
// from the end.
template <bool BACK = false, typename T, bool WHOLE, typename F, typename... Tensors>
__device__ __forceinline__ void each_rows(const ColumnTile<T, WHOLE>& tile, F f, const Tensors*... tensors) {
  constexpr int N = sizeof...(tensors), U = Pieces<T, WHOLE, N>::U;
  using P = Piece<T, WHOLE>;
  const auto step = [&](int i, int there) {
    const long long at = tile.at + i * tile.pitch;
    Pieces<T, WHOLE, N> pieces;
#pragma unroll
    for (int u = 0; u < U; ++u) {
      int t = 0;
      ((pieces.of[t++][u] = u < there ? P::load(tensors + at + u * tile.pitch) : P::none()), ...);
    }
    f(at, there, pieces);
  };
  const int steps = (tile.count + U - 1) / U;
#pragma unroll 1
  for (int s = 0; s < steps; ++s) {
    const int i = (BACK ? steps - 1 - s : s) * U;
    if (i + U <= tile.count) step(i, U);  // in which the compiler asks no more
    else step(i, tile.count - i);
  }
}

// The moments of each of this thread's columns, each of tile.count numbers.
template <typename T, bool WHOLE, typename A = acc_t<T>, int W = ColumnTile<T, WHOLE>::W>
__device__ __forceinline__ void column_moments(const ColumnTile<T, WHOLE>& tile, const T* x, Pair<A> (&result)[W]) {
  constexpr int U = Pieces<T, WHOLE, 1>::U;
  Centred<A> own[W] = {};
  int steps = 0;
  A count = A(0);
  each_rows(
      tile,
      [&](long long, int there, const Pieces<T, WHOLE, 1>& pieces) {
#pragma unroll
        for (int e = 0; e < W; ++e) own[e].about = steps == 0 ? pieces.of[0][0][e] : own[e].about;
#pragma unroll
        for (int u = 0; u < U; ++u) {
#pragma unroll
          for (int e = 0; e < W && u < there; ++e) own[e].add(pieces.of[0][u][e]);
        }
        count += A(there);
        if ((++steps & (steps - 1)) != 0 || steps * U >= tile.count) return;  // 1, 2, 4, 8 ... but the last
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

// sum(grad_y) and sum(grad_y (x - about)) of each of this thread's columns; f(at, there, pieces) besides.
template <typename T, bool WHOLE, typename F, typename A = acc_t<T>, int W = ColumnTile<T, WHOLE>::W>
__device__ __forceinline__ void column_sums(const ColumnTile<T, WHOLE>& tile, const T* grad_y, const T* x,
                                            const A (&about)[W], Pair<A> (&sums)[W], F f) {
  each_rows(
      tile,
      [&](long long at, int there, const Pieces<T, WHOLE, 2>& pieces) {
#pragma unroll
        for (int e = 0; e < W; ++e) {
          Pair<A> own = {};
#pragma unroll
          for (int u = 0; u < pieces.U; ++u) {
            const A centred = u < there ? pieces.of[1][u][e] - about[e] : A(0);  // else 0 x inf would be NaN
            own.first += pieces.of[0][u][e], own.second += pieces.of[0][u][e] * centred;
          }
          sums[e] = sums[e] + own;
        }
        f(at, there, pieces);
      },
      grad_y, x);
}

// to[...] = f(u, e) for the rows that each_rows has given.
template <typename T, bool WHOLE, int N, typename F>
__device__ __forceinline__ void store_rows(const ColumnTile<T, WHOLE>& tile, T* to, long long at, int there,
                                           const Pieces<T, WHOLE, N>&, F f) {
#pragma unroll
  for (int u = 0; u < Pieces<T, WHOLE, N>::U; ++u) {
    if (u < there) Piece<T, WHOLE>::store(to + at + u * tile.pitch, [&](int e) { return f(u, e); });
  }
}

// Where number i of share_columns lies: threads store neighbours one after the other, which would meet in the same banks.
__device__ __forceinline__ int slot(int i) { return i ^ (i >> 3 & 7); }

// What each thread has for its columns put side by side: `shared` is (blockDim.y, blockDim.x W), each number at its slot.
template <typename T, bool WHOLE, typename V, int W>
__device__ __forceinline__ void share_columns(const ColumnTile<T, WHOLE>& tile, const V (&values)[W], V* shared) {
  const int first = threadIdx.y * (blockDim.x * W) + tile.first;
#pragma unroll
  for (int e = 0; e < W; ++e) shared[slot(first + e)] = values[e];
  __syncthreads();
}

// The moments of column i of a tile that share_columns has put side by side, those of threads y, y + step, ...
template <typename T, bool WHOLE, typename A = acc_t<T>>
__device__ __forceinline__ Moments<A> tile_moments(const ColumnTile<T, WHOLE>& tile, const Pair<A>* shared, int i,
                                                   int y = 0, int step = 1) {
  const int each = tile.rows / int(blockDim.y), more = tile.rows % int(blockDim.y), slab = blockDim.x * tile.W;
  return merged<A>(
      (int(blockDim.y) - y + step - 1) / step, [&](int k) { return A(each + (y + k * step < more)); },
      [&](int k) { return y + k * step < tile.rows ? shared[slot((y + k * step) * slab + i)] : Pair<A>{}; });
}
