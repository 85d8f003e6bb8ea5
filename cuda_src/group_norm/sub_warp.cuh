// Groups short enough for a part of a warp, or for up to four warps, that are whole vectors of BYTES, 16 or 8.
//
//     blockDim.x   threads that share a row, with K vectors in each: 7 so that 8 threads have the 49 of planes of 7 x 7. They
//                  are THREADS; where that is 0, a power of two from 16 to SUB_WARP_THREADS
//     blockDim.y   rows of a block, which has SUB_WARP_THREADS in all
//
// A plane has at least as many elements as a vector, which then has elements of one channel or of two. What the elements of a
// channel are multiplied by is computed once, and read from shared memory.
#pragma once

#include "group_norm/group_norm.cuh"

constexpr int kSubWarpWarps = SUB_WARP_THREADS / kWarp;  // of a block
// Blocks that must fit on a multiprocessor, as measured.
template <typename T, int BYTES, int K>
constexpr int kSubWarpBlocks = (BYTES == 16 ? K == 7 : sizeof(T) == 2) ? 8 : 9;
template <int BYTES, int K> constexpr int kSubWarpBlocksBwd = BYTES == 16 && K == 7 ? 4 : 8;

// What a thread has of a row.
template <typename T, int BYTES, int THREADS, int K> struct SubWarpRow {
  static constexpr int W = BYTES / sizeof(T);
  using One = Vector<T, BYTES>;
  const int row;
  const bool live;
  const int left;  // elements of the row
  const long long first;  // this thread's first element in a tensor

  __device__ __forceinline__ SubWarpRow(int rows, int size)
      : row(blockIdx.x * (SUB_WARP_THREADS / threads()) + threadIdx.y),
        live(row < rows),
        left(live ? size : 0),
        first(row * (long long)size + threadIdx.x * W) {}

  static __device__ __forceinline__ int threads() { return THREADS ? THREADS : int(blockDim.x); }
  static __device__ __forceinline__ int warps() { return (threads() + kWarp - 1) / kWarp; }

  // Where in the row vector k begins, and whether it is there.
  static __device__ __forceinline__ int index(int k) { return (k * threads() + threadIdx.x) * W; }
  __device__ __forceinline__ bool any(int k) const { return index(k) < left; }

  // Where a parameter's values for the row's channels begin; null stays null. `images` divides by the groups of an image.
  __device__ __forceinline__ const T* of_group(const T* values, const Groups& groups, const Divisor& images) const {
    const int group = row - images.divide(row) * int(images.divisor);
    return values ? values + group * groups.channels : nullptr;
  }

  // Loads all vectors before any is waited for; those that are not there are 0.
  __device__ __forceinline__ void load(const T* tensor, One (&vectors)[K]) const {
#pragma unroll
    for (int k = 0; k < K; ++k)
      vectors[k] = any(k) ? load_aligned<T, BYTES>(tensor + first + k * threads() * W) : One{};
  }

  // tensor[...] = of(k, value)(e), by the value of e's channel; `values` has one more behind the last channel. There are no
  // branches, so that vectors overlap: in most warps some vector has two channels.
  template <typename V, typename F>
  __device__ __forceinline__ void store(T* tensor, const Groups& groups, const V* values, F of) const {
    const int plane = int(groups.plane.divisor);
#pragma unroll
    for (int k = 0; k < K; ++k) {
      const int c = min(groups.plane.divide(index(k)), int(groups.channels) - 1), border = (c + 1) * plane - index(k);
      const auto front = of(k, values[c]), behind = of(k, values[c + 1]);
      unsigned word[BYTES / 4];
      round_to_words<T>(word, 0, [&](int e) { return e > 0 && e >= border ? behind(e) : front(e); });
      T* const at = tensor + first + k * threads() * W;
      if (!any(k)) continue;
      if constexpr (BYTES == 16) store_words(at, word[0], word[1], word[2], word[3]);
      else store_words(at, word[0], word[1]);
    }
  }

  // A barrier of the row's threads.
  static __device__ __forceinline__ void wait() {
    if (warps() > 1) __syncthreads();
    else __syncwarp();
  }
  // Sums over the row's threads, in each of them; `buffer` is used here alone.
  template <int N, typename A> static __device__ __forceinline__ void sum(A (&values)[N],
                                                                          A (&buffer)[N][kSubWarpWarps]) {
    sum_over_lanes(values, min(threads(), kWarp));
    if (warps() > 1) {
      const int warp = (threadIdx.y * threads() + threadIdx.x) / kWarp;
#pragma unroll
      for (int n = 0; n < N; ++n) {
        if (threadIdx.x % kWarp == 0) buffer[n][warp] = values[n];
      }
      wait();
#pragma unroll
      for (int n = 0; n < N; ++n) {
        values[n] = A(0);
#pragma unroll
        for (int i = 0; i < kSubWarpWarps; ++i) {
          if (i < warps()) values[n] += buffer[n][threadIdx.y * warps() + i];
        }
      }
    }
  }
};

// sum / count, for half types in a few instructions: exact where it can be, and otherwise rounded once in all but the closest
// cases.
template <typename T> __device__ __forceinline__ acc_t<T> average(acc_t<T> sum, int count) {
  using A = acc_t<T>;
  if constexpr (sizeof(T) != 2) return sum / A(count);
  A share;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(share) : "f"(A(count)));
  const A guess = sum * share, left = fma(-guess, A(count), sum);
  return isfinite(left) ? fma(left, share, guess) : guess;
}

// GroupAffine as it lies in shared memory: for half types, which do not need the mean, in 8 bytes.
template <typename T> struct SharedAffine {
  static constexpr bool kHalf = sizeof(T) == 2;
  Vec<acc_t<T>, kHalf ? 2 : 4> of;

  __device__ __forceinline__ SharedAffine() {}
  explicit __device__ __forceinline__ SharedAffine(const GroupAffine<T>& affine) {
    if constexpr (kHalf) of = {affine.scale, affine.shift};
    else of = {affine.scale, affine.shift, affine.mean};
  }
  __device__ __forceinline__ acc_t<T> operator()(acc_t<T> x) const {
    if constexpr (kHalf) return fma(x, of.data[0], of.data[1]);
    else return (x - of.data[2]) * of.data[0] + of.data[1];
  }
};
