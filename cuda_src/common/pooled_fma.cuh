// Convolutions of small images by FMAs, a tile of 2 x 2 windows at a time.
#pragma once

#include "common/async.cuh"
#include "common/pooled.cuh"

constexpr int kChannels = 2;  // of a thread of the gradient of weight
constexpr int kWarpSize = 32;
constexpr int kPitch = kWarpSize + 1;  // so that neighbours in either direction lie in different banks

// *to = *from, or 0 where `from` is null; it is there after wait_for_groups(), and a barrier for other threads. What needs
// no conversion is copied without a register in between.
template <typename T, typename A> __device__ __forceinline__ void fetch(A* to, const T* from) {
#if __CUDA_ARCH__ >= 800
  if constexpr (sizeof(T) == sizeof(A)) {
    const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(to));
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(address), "l"(from), "n"(sizeof(T)),
                 "r"(from ? int(sizeof(T)) : 0)
                 : "memory");
    return;
  }
#endif
  *to = from ? to_acc(*from) : A(0);
}

constexpr int kUnder = 8;  // loads of a thread that are under way at once

// What a pooling passes back of a window.
template <typename A> struct Placed {
  A value;
  int place;
};

// What th x tw windows of 2 x 2 read, in shared memory, for each channel. Two rows, which is what windows are apart, take
// `pair` numbers: as many as let neighbouring windows lie in neighbouring banks, from one row of windows to the next too.
template <int K> struct Patch {
  int rows, columns, pair;

  __device__ __forceinline__ Patch(const Images& g) : rows(2 * g.th + K - 1), columns(2 * g.tw + K - 1), pair(g.pair) {}
  __device__ __forceinline__ int size() const { return rows / 2 * pair; }
  __device__ __forceinline__ int at(int row, int column) const {
    return (row >> 1) * pair + (row & 1) * columns + column;
  }

  // tile[c][row][column] = *source(c, row, column), or 0 where that is null.
  template <typename A, typename F> __device__ __forceinline__ void fill(A* tile, int channels, F source) const {
    const int area = rows * columns, step_c = blockDim.x / area, step = blockDim.x - step_c * area;
    const int step_row = step / columns, step_column = step - step_row * columns;
    int c = threadIdx.x / area, row = (threadIdx.x - c * area) / columns;
    int column = threadIdx.x - c * area - row * columns;
#pragma unroll 4
    for (int i = threadIdx.x; i < channels * area; i += blockDim.x) {
      fetch(tile + c * size() + at(row, column), source(c, row, column));
      c += step_c, row += step_row, column += step_column;
      if (column >= columns) column -= columns, ++row;
      if (row >= rows) row -= rows, ++c;
    }
  }

  // tile[c][row][column] of what the windows (a, b) of an image were before their pooling, its first pixel being (h0, w0):
  // load(c, a, b) gives a window's value and place, kNone for a window outside.
  template <typename A, typename F>
  __device__ __forceinline__ void fill_windows(A* tile, int channels, int h0, int w0, F load) const {
    const int a0 = h0 >> 1, b0 = w0 >> 1, across = ((w0 + columns - 1) >> 1) - b0 + 1;
    const int area = (((h0 + rows - 1) >> 1) - a0 + 1) * across;
    for (int first = threadIdx.x; first < channels * area; first += kUnder * blockDim.x) {
      Placed<A> items[kUnder];
#pragma unroll
      for (int u = 0; u < kUnder; ++u) {
        const int i = first + u * blockDim.x, c = i / area, window = i - c * area, a = window / across;
        if (i < channels * area) items[u] = load(c, a0 + a, b0 + window - a * across);
      }
#pragma unroll
      for (int u = 0; u < kUnder; ++u) {
        const int i = first + u * blockDim.x, c = i / area, window = i - c * area, a = window / across;
        const int row = 2 * (a0 + a) - h0, column = 2 * (b0 + window - a * across) - w0;
        if (i >= channels * area) continue;
#pragma unroll
        for (int d = 0; d < 4; ++d) {
          const int r = row + d / 2, s = column + d % 2;
          if (r < 0 || r >= rows || s < 0 || s >= columns) continue;
          tile[c * size() + at(r, s)] = items[u].place == d ? items[u].value : A(0);
        }
      }
    }
  }
};

// Filters in shared memory are [channel][tap][filter], in rows of so many: a few more, for the banks.
__device__ __forceinline__ int filters_pitch(int filters) { return filters + 4; }

// values[f][2 di + dj] += the sum over the taps of filter f, in rows of `row`, and the patch at (di, dj).
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
  constexpr int W = kVecWidth<A>;
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

// The filters of `here` channels from `channel` on into shared memory, warp by warp, and lane by lane what lies together in
// memory. FORWARD: weight is (all filters, all channels, K, K); else (all channels, all filters, K, K), turned round. Zeros
// where there are no more filters.
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
      fetch(to + at, there && e < present ? from + e : nullptr);
    }
  }
}

// The values of this thread's window and filters: over `channels`, at most `chunk` of them in shared memory at a time.
// fill(tile, first, here) brings channels of the images there, fill_weights(to, filters, first, here) the filters.
template <int K, int NF, typename A, typename Fill, typename FillFilters>
__device__ __forceinline__ void correlate_tile(const Images& g, A* shared, int channels, int chunk, Fill fill,
                                               FillFilters fill_weights, A (&values)[NF][4]) {
  const Patch<K> patch(g);
  const int windows = g.th * g.tw, window = threadIdx.x % windows, group = threadIdx.x / windows;
  const int filters = blockDim.x / windows * NF, row = filters_pitch(filters);
  A* tile = shared + chunk * K * K * row;
  const int at = patch.at(window / g.tw * 2, window % g.tw * 2);
  for (int first = 0; first < channels; first += chunk) {
    const int here = min(chunk, channels - first);
    __syncthreads();
    fill(tile, first, here);
    fill_weights(shared, filters, first, here);
    end_group();
    wait_for_groups<0>();
    __syncthreads();
    for (int c = 0; group * NF < filters && c < here; ++c) {
      correlate<K>(tile + at + c * patch.size(), patch, shared + c * K * K * row + group * NF, row, values);
    }
  }
}
