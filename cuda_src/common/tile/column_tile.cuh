// Tiles of the columns of a contiguous array of `rows` by `size`: for statistics of channels that lie side by side.
//
//     blockDim.x   threads along the columns, of which each has W neighbours; blockIdx.x is the tile of columns
//     blockDim.y   rows at a time; blockIdx.y is the split of the rows, of which there are gridDim.y
//
// With ALIGNED all rows of all tensors are whole vectors, and a thread has one vector of each of its rows. Otherwise it has
// one element: neighbouring threads together still read neighbouring bytes, and vectors that begin elsewhere in each row
// would cost more instructions. Python defines COLUMN_THREADS, which a block has, and NHWC_BLOCKS and NHWC_BLOCKS_UNALIGNED, the
// blocks that fit on a multiprocessor.
#pragma once

#include "common/reduce/gate.cuh"
#include "common/reduce/strided.cuh"

constexpr int kRowVectors =
    8;  // that a thread loads before it waits: vectors of all tensors together, or elements of each

template <bool ALIGNED> constexpr int kColumnBlocks = ALIGNED ? NHWC_BLOCKS : NHWC_BLOCKS_UNALIGNED;

// How many of `rows` rows come before split i, and how many it has: each but the last ones has equally many.
__device__ __forceinline__ long long rows_before(long long rows, int splits, int i) {
  const long long each =
      rows < 1LL << 31 ? (unsigned(rows) + unsigned(splits) - 1) / unsigned(splits) : (rows + splits - 1) / splits;
  return min(i * each, rows);
}

__device__ __forceinline__ long long rows_of(long long rows, int splits, int i) {
  return rows_before(rows, splits, i + 1) - rows_before(rows, splits, i);
}

// What a thread has of a row: an element, or a vector.
template <typename T, bool ALIGNED> struct Piece {
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

// The channel of a column. Each channel has `pixels` columns, one after the other; where a row is several rows of channels,
// they begin again with the first.
__device__ __forceinline__ long long channel_of(long long column, long long channels, int pixels) {
  const long long c = pixels > 1 ? unsigned(column) / unsigned(pixels) : column;
  return c < channels ? c : unsigned(c) % unsigned(channels);
}

// The columns of a block and the rows of its split, and which of them are this thread's.
template <typename T, bool ALIGNED> struct ColumnTile {
  static constexpr int W = ALIGNED ? kVecWidth<T> : 1;
  long long start;  // the tile's first column
  long long at, pitch;  // where this thread's first piece is, and the elements from one piece to the next
  int first, left;  // in the tile: this thread's first column; how many columns there are
  int rows, count;  // of the split; of this thread

  __device__ __forceinline__ ColumnTile(long long all_rows, long long size, int split) {
    const int most = W * blockDim.x;
    start = blockIdx.x * (long long)most;
    left = int(min(size - start, (long long)most));
    rows = int(rows_of(all_rows, gridDim.y, split));
    first = threadIdx.x * W;
    count = any() && threadIdx.y < rows ? (rows - 1 - threadIdx.y) / blockDim.y + 1 : 0;
    at = (rows_before(all_rows, gridDim.y, split) + threadIdx.y) * size + start + first, pitch = blockDim.y * size;
  }

  __device__ __forceinline__ bool any() const { return first < left; }

  // Calls f(e, c) for each of this thread's columns, which belongs to channel c.
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

// The pieces of N tensors that a thread loads before it waits.
template <typename T, bool ALIGNED, int N> struct Pieces {
  static constexpr int U = ALIGNED ? kRowVectors / N : kRowVectors;
  Piece<T, ALIGNED> of[N][U];
};

// Calls f(at, present, pieces) for U rows of each tensor at a time, of which `present` are there and the first begins at
// element `at`. With REVERSED it goes from the end to the beginning. ONCE: f, which is long, exists once, whether U rows are there
// or fewer; else also without comparisons, in which planes of 7 x 7 take 3 to 7% less time.
template <bool REVERSED = false, bool ONCE = false, typename T, bool ALIGNED, typename F, typename... Tensors>
__device__ __forceinline__ void each_rows(const ColumnTile<T, ALIGNED>& tile, F f, const Tensors*... tensors) {
  constexpr int N = sizeof...(tensors), U = Pieces<T, ALIGNED, N>::U;
  using P = Piece<T, ALIGNED>;
  const auto step = [&](int i, int present) {
    const long long at = tile.at + i * tile.pitch;
    Pieces<T, ALIGNED, N> pieces;
#pragma unroll
    for (int u = 0; u < U; ++u) {
      int t = 0;
      ((pieces.of[t++][u] = u < present ? P::load(tensors + at + u * tile.pitch) : P::none()), ...);
    }
    f(at, present, pieces);
  };
  const int steps = (tile.count + U - 1) / U;
#pragma unroll 1
  for (int s = 0; s < steps; ++s) {
    const int i = (REVERSED ? steps - 1 - s : s) * U;
    if (!ONCE && i + U <= tile.count) step(i, U);  // here the compiler leaves the comparisons out
    else step(i, ONCE ? min(U, tile.count - i) : tile.count - i);
  }
}

// The mean and square of each of this thread's columns, each of tile.count numbers.
template <typename T, bool ALIGNED, typename A = acc_t<T>, int W = ColumnTile<T, ALIGNED>::W>
__device__ __forceinline__ void column_moments(const ColumnTile<T, ALIGNED>& tile, const T* x, Pair<A> (&result)[W]) {
  constexpr int U = Pieces<T, ALIGNED, 1>::U;
  Centred<A> own[W] = {};
  int steps = 0;
  A count = A(0);
  each_rows(
      tile,
      [&](long long, int present, const Pieces<T, ALIGNED, 1>& pieces) {
#pragma unroll
        for (int e = 0; e < W; ++e) own[e].about = steps == 0 ? pieces.of[0][0][e] : own[e].about;
#pragma unroll
        for (int u = 0; u < U; ++u) {
#pragma unroll
          for (int e = 0; e < W && u < present; ++e) own[e].add(pieces.of[0][u][e]);
        }
        count += A(present);
        if ((++steps & (steps - 1)) != 0 || steps * U >= tile.count) return;  // after 1, 2, 4, 8 ... but not the last
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

// grad_z of the pieces that each_rows has given of grad_y: see gate.cuh.
template <typename T, bool ALIGNED, int U, typename Gate>
__device__ __forceinline__ void pass(const Gate& gate, const ColumnTile<T, ALIGNED>& tile, long long at, int present,
                                     const Piece<T, ALIGNED> (&grad_y)[U], Piece<T, ALIGNED> (&grad_z)[U]) {
  const auto bits =
      gate.template load<U>([&](int u) { return u < present; }, [&](int u) { return at + u * tile.pitch; });
#pragma unroll
  for (int u = 0; u < U; ++u) {
    if constexpr (Gate::kMasked) grad_z[u] = {bits(u, grad_y[u].vector)};
    else grad_z[u] = grad_y[u];
  }
}

// sum(grad_y) and sum(grad_y (x - about)) of each of this thread's columns, of those grad_y that pass the gate.
template <typename T, bool ALIGNED, typename Gate, typename A = acc_t<T>, int W = ColumnTile<T, ALIGNED>::W>
__device__ __forceinline__ void column_sums(const ColumnTile<T, ALIGNED>& tile, const T* grad_y, const T* x,
                                            const A (&about)[W], Pair<A> (&sums)[W], const Gate& gate) {
  each_rows<false, Gate::kMasked>(
      tile,
      [&](long long at, int present, const Pieces<T, ALIGNED, 2>& pieces) {
        Piece<T, ALIGNED> grad_z[Pieces<T, ALIGNED, 2>::U];
        pass(gate, tile, at, present, pieces.of[0], grad_z);
#pragma unroll
        for (int e = 0; e < W; ++e) {
          Pair<A> own = {};
#pragma unroll
          for (int u = 0; u < pieces.U; ++u) {
            const A centred = u < present ? pieces.of[1][u][e] - about[e] : A(0);  // else 0 x inf would be NaN
            own.first += grad_z[u][e], own.second += grad_z[u][e] * centred;
          }
          sums[e] = sums[e] + own;
        }
      },
      grad_y, x);
}

// to[...] = f(u, e) for the rows that each_rows has given.
template <typename T, bool ALIGNED, int N, typename F>
__device__ __forceinline__ void store_rows(const ColumnTile<T, ALIGNED>& tile, T* to, long long at, int present,
                                           const Pieces<T, ALIGNED, N>&, F f) {
#pragma unroll
  for (int u = 0; u < Pieces<T, ALIGNED, N>::U; ++u) {
    if (u < present) Piece<T, ALIGNED>::store(to + at + u * tile.pitch, [&](int e) { return f(u, e); });
  }
}

// Where number i of share_columns lies: threads store neighbours one after the other, which would meet in the same banks.
__device__ __forceinline__ int swizzled(int i) { return i ^ (i >> 3 & 7); }

// Puts what each thread has for its columns side by side: `shared` is (blockDim.y, blockDim.x W), each number at its
// swizzled place.
template <typename T, bool ALIGNED, typename V, int W>
__device__ __forceinline__ void share_columns(const ColumnTile<T, ALIGNED>& tile, const V (&values)[W], V* shared) {
  const int first = threadIdx.y * (blockDim.x * W) + tile.first;
#pragma unroll
  for (int e = 0; e < W; ++e) shared[swizzled(first + e)] = values[e];
  __syncthreads();
}

// The moments of column i of a tile that share_columns has put side by side: those of the threads y, y + step, ...
template <typename T, bool ALIGNED, typename A = acc_t<T>>
__device__ __forceinline__ Moments<A> tile_moments(const ColumnTile<T, ALIGNED>& tile, const Pair<A>* shared, int i,
                                                   int y = 0, int step = 1) {
  const int each = tile.rows / int(blockDim.y), more = tile.rows % int(blockDim.y), slab = blockDim.x * tile.W;
  return merged<A>(
      (int(blockDim.y) - y + step - 1) / step, [&](int k) { return A(each + (y + k * step < more)); },
      [&](int k) { return y + k * step < tile.rows ? shared[swizzled((y + k * step) * slab + i)] : Pair<A>{}; });
}

// The sums of column i of this block's tile, in eight that a tree adds up, which is more exact than one after the other.
template <typename A> __device__ __forceinline__ Pair<A> tile_sums(const Pair<A>* shared, int slab, int i) {
  constexpr int kSums = 8;
  Pair<A> sums[kSums] = {};
  for (int y = 0; y < blockDim.y; y += kSums) {
#pragma unroll
    for (int k = 0; k < kSums; ++k) {
      if (y + k < blockDim.y) sums[k] = sums[k] + shared[swizzled((y + k) * slab + i)];
    }
  }
  return reduce_elements<Sum, 1, kSums>([&](int, int k) { return sums[k]; });
}
