// Convolutions of small images by tensor cores, a tile of 2 x 2 windows at a time: mma.sync on images in shared memory whose
// channels are neighbours. With ldmatrix each lane names a row of eight elements, so the rows of a matrix may be any pixels:
// the four pixels of a window go to one thread, and a tap is an offset. Needs sm_80.
#pragma once

#include "common/hw/mma.cuh"
#include "small_conv/pooled.cuh"

constexpr int kUnit = 8;  // elements of a 16-byte unit

// th x tw windows of 2 x 2 pixels, and the pixels that K x K taps reach around them. Pixels of the same parities lie together,
// as four images of a quarter of the pixels, so that the pixels of neighbouring windows are neighbours. A pixel is an odd
// number of units, and the four images are 4 mod 8 units apart, so that eight rows lie in different banks.
template <int K> struct Tile {
  int th, tw, up, row, quarter;  // units of a pixel, of a row of pixels, of one of the four images

  __device__ __forceinline__ int rows() const { return 2 * th + K - 1; }
  __device__ __forceinline__ int columns() const { return 2 * tw + K - 1; }
  // Where pixel (r, s) lies, in elements.
  __device__ __forceinline__ int pixel(int r, int s) const {
    return (((r & 1) * 2 + (s & 1)) * quarter + (r >> 1) * row + (s >> 1) * up) * kUnit;
  }
  __device__ __forceinline__ int window(int index) const { return (index / tw * row + index % tw * up) * kUnit; }

  // Copies the pixels from (h0, w0) on of an image (C, H, W), `units` units of channels; zeros outside.
  template <typename T> __device__ __forceinline__ void fill(T* tile, const T* image, int units, int C, int H, int W,
                                                             int h0, int w0) const {
    const long long plane = (long long)H * W;
    const int across = columns(), area = rows() * across;
#pragma unroll 2
    for (int i = threadIdx.x; i < units * area; i += blockDim.x) {
      const int unit = i / area, at = i - unit * area, r = at / across, s = at - r * across;
      const int h = h0 + r, w = w0 + s;
      const bool inside = h >= 0 && h < H && w >= 0 && w < W;
      const T* from = image + unit * kUnit * plane + (long long)h * W + w;
      Vec<T, kUnit> values;
#pragma unroll
      for (int e = 0; e < kUnit; ++e) {
        values.data[e] = inside && unit * kUnit + e < C ? from[e * plane] : from_acc<T>(0);
      }
      store_vec<T, kUnit>(tile + pixel(r, s) + unit * kUnit, values);
    }
  }

  // The same of the gradient before the pooling: that of grad (C, PH, PW) where `place` says, zeros elsewhere.
  template <typename T>
  __device__ __forceinline__ void fill(T* tile, const T* grad, const unsigned char* place, int units, int C, int PH,
                                       int PW, int h0, int w0) const {
    const long long plane = (long long)PH * PW;
    const int a0 = h0 >> 1, b0 = w0 >> 1;
    const int across = ((w0 + columns() - 1) >> 1) - b0 + 1, area = (((h0 + rows() - 1) >> 1) - a0 + 1) * across;
#pragma unroll 2
    for (int i = threadIdx.x; i < units * area; i += blockDim.x) {
      const int unit = i / area, at = i - unit * area, a = a0 + at / across, b = b0 + at % across;
      const bool inside = a >= 0 && a < PH && b >= 0 && b < PW;
      const long long from = unit * kUnit * plane + (long long)a * PW + b;
      T values[kUnit];
      int places[kUnit];
#pragma unroll
      for (int e = 0; e < kUnit; ++e) {
        const bool there = inside && unit * kUnit + e < C;
        values[e] = there ? grad[from + e * plane] : from_acc<T>(0);
        places[e] = there ? place[from + e * plane] : -1;
      }
#pragma unroll
      for (int d = 0; d < 4; ++d) {
        const int r = 2 * a + d / 2 - h0, s = 2 * b + d % 2 - w0;
        if (r < 0 || r >= rows() || s < 0 || s >= columns()) continue;
        Vec<T, kUnit> here;
#pragma unroll
        for (int e = 0; e < kUnit; ++e) here.data[e] = places[e] == d ? values[e] : from_acc<T>(0);
        store_vec<T, kUnit>(tile + pixel(r, s) + unit * kUnit, here);
      }
    }
  }
};

// Filters lie in shared memory as [tap][output][channel]. This is how many elements a tap has: a unit more than its filters,
// so that taps begin in different banks.
__device__ __forceinline__ int filters_pitch(int outputs, int up) { return (outputs * up + 1) * kUnit; }

// Copies the filters of `outputs` outputs from `first` on. FORWARD: weight is (all outputs, channels, K, K); else it is
// (channels, all outputs, K, K), and its taps are reversed. Outputs and channels beyond the last are zero.
template <typename T, int K, bool FORWARD>
__device__ __forceinline__ void fill_filters(T* to, const T* weight, int first, int outputs, int all, int channels,
                                             int up) {
  const int pitch = filters_pitch(outputs, up), here = min(outputs, all - first);
  if (here < outputs || channels % 16) {
    for (int i = threadIdx.x; i < K * K * pitch / kUnit; i += blockDim.x) store_vec<T, kUnit>(to + i * kUnit, {});
    __syncthreads();
  }
  const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
  const int outer = FORWARD ? here : channels, inner = (FORWARD ? channels : here) * K * K;
  const T* from = weight + (FORWARD ? (long long)first * inner : first * K * K);
  const int stride = FORWARD ? inner : all * K * K;
  constexpr int IN_FLIGHT = 9;
  for (int o = threadIdx.x / 32; o < outer; o += warps) {
    for (int e0 = lane; e0 < inner; e0 += IN_FLIGHT * 32) {
      T values[IN_FLIGHT];
#pragma unroll
      for (int u = 0; u < IN_FLIGHT; ++u) {
        if (e0 + u * 32 < inner) values[u] = from[(long long)o * stride + e0 + u * 32];
      }
#pragma unroll
      for (int u = 0; u < IN_FLIGHT; ++u) {
        const int e = e0 + u * 32, m = e / (K * K), tap = e - m * K * K;
        if (e < inner) {
          to[FORWARD ? tap * pitch + o * up * kUnit + m : (K * K - 1 - tap) * pitch + m * up * kUnit + o] = values[u];
        }
      }
    }
  }
}

// sums[di][n][2 dj + e] of lane (g, t) = (lane / 4, lane % 4) is pixel (di, dj) of window g of the warp's eight, for output
// 8 n + 2 t + e of the warp's 8 NB, summed over the taps and over `chunks` of 16 channels.
template <typename T, int K, int NB>
__device__ __forceinline__ void correlate_mma(const Tile<K>& g, const T* tile, const T* filters, int pitch, int window,
                                              int chunks, float (&sums)[2][NB][4]) {
  const int lane = threadIdx.x % 32, dj = lane / 8 % 2;
  const T* pixels = tile + g.window(window) + lane / 16 * kUnit;
  const T* row = filters + ((lane / 16 * 8 + lane % 8) * g.up + lane / 8 % 2) * kUnit;
  for (int chunk = 0; chunk < chunks; ++chunk, pixels += 16, row += 16) {
#pragma unroll
    for (int j = 0; j < K; ++j) {
      unsigned a[K + 1][4];
#pragma unroll
      for (int r = 0; r <= K; ++r) load_matrices<false>(a[r], pixels + g.pixel(r, dj + j));
#pragma unroll
      for (int i = 0; i < K; ++i) {
#pragma unroll
        for (int n = 0; n < NB; n += 2) {
          unsigned b[4];
          load_matrices<false>(b, row + (i * K + j) * pitch + n * 8 * g.up * kUnit);
#pragma unroll
          for (int di = 0; di < 2; ++di) {
            mma<T>(sums[di][n], a[di + i], b[0], b[1]);
            mma<T>(sums[di][n + 1], a[di + i], b[2], b[3]);
          }
        }
      }
    }
  }
}

// Computes all of a block's tiles, of images of windows_h x windows_w windows: fill(tile, place, units) copies the pixels of a
// tile, store(place, output, a, b, values) stores the four of window (a, b). Block, grid, shared memory: see the kernels.
template <typename T, int K, int NB, bool FORWARD, typename Fill, typename Store>
__device__ __forceinline__ void correlate_tiles(const Tile<K>& g, const Images& images, long long tiles, int windows_h,
                                                int windows_w, const T* weight, int all, int channels, Fill fill,
                                                Store store) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, windows = g.th * g.tw, groups = (windows + 7) / 8;
  const int outputs = blockDim.x / 32 / groups * 8 * NB, pitch = filters_pitch(outputs, g.up);
  const int first = blockIdx.y * outputs, n0 = warp / groups * 8 * NB, group = warp % groups * 8;
  const int chunks = (channels + 15) / 16;
  T* filters = shared_memory<T>();
  T* tile = filters + K * K * pitch;
  fill_filters<T, K, FORWARD>(filters, weight, first, outputs, all, channels, g.up);
  for (long long index = blockIdx.x; index < tiles; index += gridDim.x) {
    const ImageTile place(images, index, windows_h, windows_w);
    __syncthreads();
    fill(tile, place, 2 * chunks);
    __syncthreads();
    float sums[2][NB][4] = {};
    correlate_mma<T, K, NB>(g, tile, filters + n0 * g.up * kUnit, pitch, min(group + lane % 8, windows - 1), chunks,
                            sums);
    const int window = group + lane / 4, a = place.a + window / g.tw, b = place.b + window % g.tw;
    if (window >= windows || a >= windows_h || b >= windows_w) continue;
#pragma unroll
    for (int n = 0; n < NB; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int output = first + n0 + n * 8 + lane % 4 * 2 + e;
        const float values[4] = {sums[0][n][e], sums[0][n][2 + e], sums[1][n][e], sums[1][n][2 + e]};
        if (output < all) store(place, output, a, b, values);
      }
    }
  }
}

__device__ __forceinline__ unsigned bits_of(__half value) { return __half_as_ushort(value); }
__device__ __forceinline__ unsigned bits_of(__nv_bfloat16 value) { return __bfloat16_as_ushort(value); }

// Two ones, as a register of a fragment.
template <typename T> __device__ __forceinline__ unsigned pair_of_ones() { return bits_of(from_acc<T>(1)) * 0x10001u; }
