// Groups short enough for a few threads, in vectors of BYTES, of which each is a whole number: 16, 8, or 4.
//
//     blockDim.x   THREADS that share a row, K vectors in each: 7 so that 8 threads have the 49 of planes of 7 x 7
//     blockDim.y   rows of a block
//
// Planes are of no fewer elements than a vector, which then has some of one channel or of two. What the elements of a channel
// are multiplied by is computed once, and found in shared memory.
#pragma once

#include "group_norm/group_norm.cuh"

constexpr int kShortThreads = 128, kShortWarps = kShortThreads / kWarp;  // of a block
// Blocks of a multiprocessor, at least, as measured.
template <typename T, int BYTES, int K>
constexpr int kShortBlocks = (BYTES == 16 ? K == 7 : sizeof(T) == 2) ? 8 : 9;
template <int BYTES, int K> constexpr int kShortBlocksBwd = BYTES == 16 && K == 7 ? 4 : 8;

// What a thread has of a row.
template <typename T, int BYTES, int THREADS, int K> struct Short {
  static constexpr int W = BYTES / sizeof(T), kRows = kShortThreads / THREADS, kWarps = (THREADS + kWarp - 1) / kWarp;
  using One = Vector<T, BYTES>;
  const int row;
  const bool live;
  const int left;  // elements of the row
  const long long first;  // of the thread in a tensor

  __device__ __forceinline__ Short(int rows, int size)
      : row(blockIdx.x * kRows + threadIdx.y),
        live(row < rows),
        left(live ? size : 0),
        first(row * (long long)size + threadIdx.x * W) {}

  // Where in the row vector k begins, and whether it is there.
  static __device__ __forceinline__ int index(int k) { return (k * THREADS + threadIdx.x) * W; }
  __device__ __forceinline__ bool any(int k) const { return index(k) < left; }

  // Of what an image's channels have, where that of the row's begins; `images` divides by its groups. Null stays null.
  __device__ __forceinline__ const T* of_group(const T* values, const Groups& groups, const Divisor& images) const {
    const int group = row - images.divide(row) * int(images.divisor);
    return values ? values + group * groups.channels : nullptr;
  }

  // All are under way before any is waited for; what is not there is 0.
  __device__ __forceinline__ void load(const T* tensor, One (&vectors)[K]) const {
#pragma unroll
    for (int k = 0; k < K; ++k) vectors[k] = any(k) ? load_aligned<T, BYTES>(tensor + first + k * THREADS * W) : One{};
  }

  // tensor[...] = of(k, value)(e) by the value of e's channel; there is one behind the last. No branches, so that vectors
  // overlap: in most warps some vector has two channels.
  template <typename V, typename F>
  __device__ __forceinline__ void store(T* tensor, const Groups& groups, const V* values, F of) const {
    const int plane = int(groups.plane.divisor);
#pragma unroll
    for (int k = 0; k < K; ++k) {
      const int c = min(groups.plane.divide(index(k)), int(groups.channels) - 1), border = (c + 1) * plane - index(k);
      const auto front = of(k, values[c]), behind = of(k, values[c + 1]);
      unsigned word[BYTES / 4];
      round_to_words<T>(word, 0, [&](int e) { return e > 0 && e >= border ? behind(e) : front(e); });
      T* const at = tensor + first + k * THREADS * W;
      if (!any(k)) continue;
      if constexpr (BYTES == 16) store_words(at, word[0], word[1], word[2], word[3]);
      else if constexpr (BYTES == 8) store_words(at, word[0], word[1]);
      else store_words(at, word[0]);
    }
  }

  // What the row's threads have left in shared memory, or what they sum in it, is there for all of them.
  static __device__ __forceinline__ void wait() {
    if constexpr (kWarps > 1) __syncthreads();
    else __syncwarp();
  }
  // Sums over the row's threads, in all of them; `room` is not in use before, nor after.
  template <int N, typename A> static __device__ __forceinline__ void sum(A (&values)[N], A (&room)[N][kShortWarps]) {
    sum_over_lanes(values, kWarps > 1 ? kWarp : THREADS);
    if constexpr (kWarps > 1) {
      const int warp = (threadIdx.y * THREADS + threadIdx.x) / kWarp;
#pragma unroll
      for (int n = 0; n < N; ++n) {
        if (threadIdx.x % kWarp == 0) room[n][warp] = values[n];
      }
      wait();
#pragma unroll
      for (int n = 0; n < N; ++n) {
        values[n] = A(0);
#pragma unroll
        for (int i = 0; i < kWarps; ++i) values[n] += room[n][threadIdx.y * kWarps + i];
      }
    }
  }
};

// sum / count, of half types in a few instructions: exact where it can be, and else rounded once but for the closest calls.
template <typename T> __device__ __forceinline__ acc_t<T> average(acc_t<T> sum, int count) {
  using A = acc_t<T>;
  if constexpr (sizeof(T) != 2) return sum / A(count);
  A share;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(share) : "f"(A(count)));
  const A guess = sum * share, left = fma(-guess, A(count), sum);
  return isfinite(left) ? fma(left, share, guess) : guess;
}

// Affine as it is kept: of half types, which have no need of the mean, in 8 bytes.
template <typename T> struct KeptAffine {
  static constexpr bool kHalf = sizeof(T) == 2;
  Vec<acc_t<T>, kHalf ? 2 : 4> of;

  __device__ __forceinline__ KeptAffine() {}
  explicit __device__ __forceinline__ KeptAffine(const Affine<T>& affine) {
    if constexpr (kHalf) of = {affine.scale, affine.shift};
    else of = {affine.scale, affine.shift, affine.mean};
  }
  __device__ __forceinline__ acc_t<T> operator()(acc_t<T> x) const {
    if constexpr (kHalf) return fma(x, of.data[0], of.data[1]);
    else return (x - of.data[2]) * of.data[0] + of.data[1];
  }
};
