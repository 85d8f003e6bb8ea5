// What the kernels of a convolution by tiles of 2 x 2 windows have in common, FMAs' and tensor cores', with a pooling by 2
// at its end or without.
#pragma once

#include "common/core/vector.cuh"

constexpr int kNone = 4;  // a place that no gradient comes from

// The images: x is (N, C, H, W), y (N, F, PH, PW); (ph, pw) is the padding. A tile is th x tw windows, and lies in
// shared memory as Patch has it; `groups` of threads share it, which take the filters in turn.
struct Images { int C, H, W, F, PH, PW, ph, pw, th, tw, pair, groups; };

// A tile of one image.
struct Part {
  long long n;
  int a, b;  // of the first window

  __device__ __forceinline__ Part(const Images& g, long long index, int windows_h, int windows_w) {
    const int across = (windows_w + g.tw - 1) / g.tw, tiles = (windows_h + g.th - 1) / g.th * across;
    n = index / tiles;
    const int tile = int(index - n * tiles);
    a = tile / across * g.th;
    b = tile % across * g.tw;
  }
};

// relu and pooling of a window's four, and which of them it was.
template <typename T>
__device__ __forceinline__ void pool(const acc_t<T> (&values)[4], acc_t<T> shift, T* y, unsigned char* place) {
  acc_t<T> best = 0;
  int at = kNone;
#pragma unroll
  for (int d = 0; d < 4; ++d) {
    const acc_t<T> u = to_acc(from_acc<T>(values[d] + shift));
    if (u > best || u != u) best = u, at = d;
  }
  *y = from_acc<T>(best);
  *place = (unsigned char)at;
}

// The four of window (a, b) of an image of H x W, as many as lie inside.
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
