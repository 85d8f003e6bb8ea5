// What the kernels of a convolution that ends in a pooling by 2 have in common, FMAs' and tensor cores'.
#pragma once

#include "common/vec.cuh"

constexpr int kNone = 4;  // a place that no gradient comes from

// The images: x is (N, C, H, W), y (N, F, PH, PW); (ph, pw) is the padding. A tile is th x tw windows, and lies in
// shared memory as Patch has it.
struct Images { int C, H, W, F, PH, PW, ph, pw, th, tw, pair; };

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

template <typename A> __device__ __forceinline__ A* shared_memory() {
  extern __shared__ __align__(16) unsigned char bytes[];
  return reinterpret_cast<A*>(bytes);
}
