// What the convolutions by tiles of 2 x 2 windows share: those by FMAs and by tensor cores, with a pooling by 2 and without.
#pragma once

#include "common/core/vector.cuh"

constexpr int kNoPlace = 4;  // no pixel of the window gets a gradient

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

// ReLU and pooling of the four values of a window, and the place of the largest.
template <typename T>
__device__ __forceinline__ void pool(const acc_t<T> (&values)[4], acc_t<T> shift, T* y, unsigned char* place) {
  acc_t<T> best = 0;
  int at = kNoPlace;
#pragma unroll
  for (int d = 0; d < 4; ++d) {
    const acc_t<T> u = to_acc(from_acc<T>(values[d] + shift));
    if (u > best || u != u) best = u, at = d;
  }
  *y = from_acc<T>(best);
  *place = (unsigned char)at;
}

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
