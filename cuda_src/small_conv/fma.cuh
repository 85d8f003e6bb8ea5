// Convolutions of small images by FMAs, a tile of 2 x 2 windows at a time.
#pragma once

#include "common/core/vector.cuh"
#include "common/hw/cp_async.cuh"

// The images: x is (N, C, H, W), y is (N, F, PH, PW), and (ph, pw) is the padding. A tile is th x tw windows, and Patch says how
// it lies in shared memory. `groups` of threads share it, each for some filters.
struct Images { int C, H, W, F, PH, PW, ph, pw, th, tw, pair, groups; };

// A tile of image n, from window (a, b) on.
struct ImageTile {
  long long n;
  int a, b;

  __device__ __forceinline__ ImageTile(const Images& g, long long index, int windows_h, int windows_w) {
    const int across = (windows_w + g.tw - 1) / g.tw, tiles = (windows_h + g.th - 1) / g.th * across;
    n = index / tiles;
    const int tile = int(index - n * tiles);
    a = tile / across * g.th;
    b = tile % across * g.tw;
  }
};

// Stores the four values of window (a, b) in an image of H x W, those that lie inside.
template <typename T>
__device__ __forceinline__ void store_window(T* image, int H, int W, int a, int b, const acc_t<T> (&values)[4],
                                             acc_t<T> shift = 0) {
  const int w = 2 * b;
#pragma unroll
  for (int di = 0; di < 2; ++di) {
    const int h = 2 * a + di;
    if (h >= H || w >= W) continue;
    T* to = image + (h * W + w);
    const T left = from_acc<T>(values[2 * di] + shift), right = from_acc<T>(values[2 * di + 1] + shift);
    if (W % 2 == 0) {
      store_vec<T, 2>(to, {left, right});
    } else {
      to[0] = left;
      if (w + 1 < W) to[1] = right;
    }
  }
}

template <typename A> __device__ __forceinline__ A* shared_memory() {
  extern __shared__ __align__(16) unsigned char bytes[];
  return reinterpret_cast<A*>(bytes);
}

constexpr int kChannels = SMALL_CONV_CHANNELS;  // of a thread of the gradient of weight
constexpr int kWarpSize = 32;

// The most threads of a block, of NF filters each, and the least blocks of a multiprocessor.
template <int NF> constexpr int kThreads = NF > 4 ? SMALL_CONV_THREADS_OF_8 : SMALL_CONV_THREADS;
template <int NF> constexpr int kBlocks = NF == 4 ? 1 : 2;

// *to = *from, or 0 unless that is `present`. The thread sees it after wait_for_groups(), other threads after a barrier too.
// What needs no conversion is copied without a register in between.
template <typename T, typename A> __device__ __forceinline__ void fetch(A* to, const T* from, bool present) {
#if __CUDA_ARCH__ >= 800
  if constexpr (sizeof(T) == sizeof(A)) {
    const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(to));
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(address), "l"(from), "n"(sizeof(T)),
                 "r"(present ? int(sizeof(T)) : 0)
                 : "memory");
    return;
  }
#endif
  *to = present ? to_acc(*from) : A(0);
}

// Calls visit(c, row, column) for each of them: neighbouring threads have neighbouring columns.
template <typename F> __device__ __forceinline__ void for_each(int channels, int rows, int columns, F visit) {
  const int area = rows * columns, step_c = blockDim.x / area, step = blockDim.x - step_c * area;
  const int step_row = step / columns, step_column = step - step_row * columns;
  int c = threadIdx.x / area, row = (threadIdx.x - c * area) / columns;
  int column = threadIdx.x - c * area - row * columns;
#pragma unroll 4
  for (int i = threadIdx.x; i < channels * area; i += blockDim.x) {
    visit(c, row, column);
    c += step_c, row += step_row, column += step_column;
    if (column >= columns) column -= columns, ++row;
    if (row >= rows) row -= rows, ++c;
  }
}

// Channels of an image of H x W.
template <typename T> struct Planes {
  const T* data;
  int H, W;

  // *to = the pixel (h, w) of channel c; 0 outside the image, and unless it is `present`.
  template <typename A>
  __device__ __forceinline__ void fetch_pixel(A* to, int c, int h, int w, bool present = true) const {
    const bool inside = unsigned(h) < unsigned(H) && unsigned(w) < unsigned(W);
    fetch(to, data + ((long long)c * (H * W) + (h * W + w)), inside && present);
  }
};

// The pixels that th x tw windows of 2 x 2 read, in shared memory, for each channel. Windows are two rows apart, and two rows
// take `pair` numbers: so many that neighbouring windows lie in neighbouring banks, across rows of windows too.
template <int K> struct Patch {
  int rows, columns, pair;

  __device__ __forceinline__ Patch(const Images& g) : rows(2 * g.th + K - 1), columns(2 * g.tw + K - 1), pair(g.pair) {}
  __device__ __forceinline__ int size() const { return rows / 2 * pair; }
  __device__ __forceinline__ int at(int row, int column) const {
    return (row >> 1) * pair + (row & 1) * columns + column;
  }

  // tile[c][row][column] = the pixel at (h0 + row, w0 + column), 0 outside.
  template <typename T, typename A>
  __device__ __forceinline__ void fill(A* tile, int channels, const Planes<T>& image, int h0, int w0) const {
    for_each(channels, rows, columns, [&](int c, int row, int column) {
      image.fetch_pixel(tile + c * size() + at(row, column), c, h0 + row, w0 + column);
    });
  }
};

// Filters lie in shared memory as [channel][tap][filter]. This is how long a row of filters is: a whole number of vectors, and
// longer than the filters, so that rows begin in different banks.
__device__ __forceinline__ int filters_pitch(int filters) { return (filters | 3) + 1; }

// values[f][2 di + dj] += the sum over the taps of filter f times the pixels from (di, dj) on; filters have rows of `row`.
template <int K, int NF, typename A>
__device__ __forceinline__ void correlate(const A* tile, const Patch<K>& patch, const A* weights, int row,
                                          A (&values)[NF][4]) {
  A x[K + 1][K + 1];
#pragma unroll
  for (int i = 0; i <= K; ++i) {
#pragma unroll
    for (int j = 0; j <= K; j += 2) {
      const Vec<A, 2> pair = load_vec<A, 2>(tile + patch.at(i, j));
      x[i][j] = pair.data[0], x[i][j + 1] = pair.data[1];
    }
  }
  constexpr int W = NF < kVecWidth<A> ? NF : kVecWidth<A>;
#pragma unroll
  for (int k = 0; k < K * K; ++k) {
#pragma unroll
    for (int f = 0; f < NF; f += W) {
      const Vec<A, W> w = load_vec<A, W>(weights + k * row + f);
#pragma unroll
      for (int e = 0; e < W; ++e) {
#pragma unroll
        for (int d = 0; d < 4; ++d) {
          values[f + e][d] = fma(w.data[e], x[d / 2 + k / K][d % 2 + k % K], values[f + e][d]);
        }
      }
    }
  }
}

// Copies the filters of `here` channels from `channel` on to shared memory; the lanes of a warp read what lies together.
// FORWARD: weight is (all filters, all channels, K, K); else it is (all channels, all filters, K, K), and its taps are
// reversed. Filters beyond the last are zero.
template <int K, bool FORWARD, typename T, typename A>
__device__ __forceinline__ void fill_filters(A* to, const T* weight, int first, int filters, int all, int channel,
                                             int here, int channels) {
  const int row = filters_pitch(filters), outer = FORWARD ? filters : here, inner = (FORWARD ? here : filters) * K * K;
  const int present = FORWARD ? inner : min(inner, (all - first) * K * K);
  for (int o = threadIdx.x / kWarpSize; o < outer; o += blockDim.x / kWarpSize) {
    const bool there = !FORWARD || first + o < all;
    const T* from = FORWARD ? weight + ((long long)(first + o) * channels + channel) * (K * K)
                            : weight + ((long long)(channel + o) * all + first) * (K * K);
#pragma unroll 4
    for (int e = threadIdx.x % kWarpSize; e < inner; e += kWarpSize) {
      const int m = e / (K * K), tap = e - m * (K * K);
      const int at = FORWARD ? e * row + o : (o * K * K + K * K - 1 - tap) * row + m;
      fetch(to + at, from + e, there && e < present);
    }
  }
}

// Adds the values of the splits, in their order, to those of split 0; a split is `threads` threads behind the one before.
// Shared memory: `slots` for N numbers of each thread.
template <typename A, int N>
__device__ __forceinline__ void add_splits(A* slots, int split, int splits, int threads, A (&values)[N]) {
  if (splits == 1) return;
  slots += threadIdx.x;
  __syncthreads();
#pragma unroll
  for (int k = 0; k < N; ++k) slots[k * blockDim.x] = values[k];
  __syncthreads();
#pragma unroll 1
  for (int s = 1; split == 0 && s < splits; ++s) {
#pragma unroll
    for (int k = 0; k < N; ++k) values[k] += slots[k * blockDim.x + s * threads];
  }
}

// What a thread does of a tile: a window, a group of NF filters, and every splits-th channel. Only blocks of few filters have
// enough threads to split the channels.
template <int NF> struct Role {
  int team, window, group, split, splits;

  __device__ __forceinline__ Role(const Images& g, int channels)
      : team(g.th * g.tw * g.groups), splits(NF > 4 ? 1 : min(blockDim.x / team, channels)) {
    const int windows = g.th * g.tw;
    split = threadIdx.x / team;
    window = threadIdx.x % windows;
    group = threadIdx.x % team / windows;
  }
};

// The values of this thread's window and filters, summed over `channels`; those of split 0 are complete. At most `chunk`
// channels are in shared memory at a time: fill(tile, first, here) copies the image there, and
// fill_weights(to, filters, first, here) the filters.
template <int K, int NF, typename A, typename Fill, typename FillFilters>
__device__ __forceinline__ void correlate_tile(const Images& g, const Role<NF>& role, A* shared, int channels,
                                               int chunk, Fill fill, FillFilters fill_weights, A (&values)[NF][4]) {
  const Patch<K> patch(g);
  const int filters = g.groups * NF, row = filters_pitch(filters);
  A* tile = shared + chunk * K * K * row;
  const int at = patch.at(role.window / g.tw * 2, role.window % g.tw * 2);
  for (int first = 0; first < channels; first += chunk) {
    const int here = min(chunk, channels - first);
    __syncthreads();
    fill(tile, first, here);
    fill_weights(shared, filters, first, here);
    end_group();
    wait_for_groups<0>();
    __syncthreads();
    for (int c = role.split; role.split < role.splits && c < here; c += role.splits) {
      correlate<K>(tile + at + c * patch.size(), patch, shared + c * K * K * row + role.group * NF, row, values);
    }
  }
#pragma unroll
  for (int k = 0; k < NF; ++k) add_splits(shared, role.split, role.splits, role.team, values[k]);
}

// The same for a tile of y and the filters from `first` on: x correlated with the filters, whose taps are reversed unless
// FORWARD.
template <typename T, int K, int NF, bool FORWARD>
__device__ __forceinline__ void correlate_image(const Images& g, const Role<NF>& role, const ImageTile& origin,
                                                int first, int chunk, const T* x, const T* weight,
                                                acc_t<T> (&values)[NF][4]) {
  using A = acc_t<T>;
  const long long plane = (long long)g.H * g.W;
  correlate_tile<K>(
      g, role, shared_memory<A>(), g.C, chunk,
      [&](A* tile, int from, int here) {
        const Planes<T> image{x + (origin.n * g.C + from) * plane, g.H, g.W};
        Patch<K>(g).fill(tile, here, image, 2 * origin.a - g.ph, 2 * origin.b - g.pw);
      },
      [&](A* to, int filters, int from, int here) {
        fill_filters<K, FORWARD>(to, weight, first, filters, g.F, from, here, g.C);
      },
      values);
}

// Stores a thread's sums for filter f and kChannels channels from c on, those below `end`, and where c is 0 its bias_sum. The
// block's partials are (C * K * K + 1, F). Shared memory: K numbers for each thread.
template <int K, typename A>
__device__ __forceinline__ void store_partials(const Images& g, A* partials, A* slots, int split, int splits, int c,
                                               int end, int f, A (&sums)[kChannels][K][K], A bias_sum) {
  A bias_sums[1] = {bias_sum};
  add_splits(slots, split, splits, kWarpSize, bias_sums);
  const bool stores = split == 0 && f < g.F;
  if (stores && c == 0) partials[g.C * (K * K) * g.F + f] = bias_sums[0];
#pragma unroll
  for (int k = 0; k < kChannels; ++k) {
#pragma unroll
    for (int i = 0; i < K; ++i) {
      add_splits(slots, split, splits, kWarpSize, sums[k][i]);
      if (!stores || c + k >= end) continue;
#pragma unroll
      for (int j = 0; j < K; ++j) partials[((c + k) * (K * K) + i * K + j) * g.F + f] = sums[k][i][j];
    }
  }
}
