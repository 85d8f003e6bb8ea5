// Reductions over a warp and over a block, in a fixed order: the same bits every time.
#pragma once

#include "common/core/types.cuh"

constexpr int kWarp = 32;
constexpr unsigned kFullMask = 0xffffffffu;

// Two numbers reduced at the cost of one pair of barriers.
template <typename A> struct Pair { A first, second; };

template <typename A> __device__ __forceinline__ Pair<A> operator+(Pair<A> a, Pair<A> b) {
  return {a.first + b.first, a.second + b.second};
}

struct Sum {
  template <typename A> static __device__ __forceinline__ A identity() { return A{}; }
  template <typename A> __device__ __forceinline__ A operator()(A a, A b) const { return a + b; }
};

// NaN wins over every number.
struct Max {
  template <typename A> static __device__ __forceinline__ A identity() { return -infinity<A>(); }
  template <typename A> __device__ __forceinline__ A operator()(A a, A b) const { return max_nan(a, b); }
};

template <typename A> __device__ __forceinline__ A shuffle_xor(A value, int offset) {
  return __shfl_xor_sync(kFullMask, value, offset);
}
template <typename A> __device__ __forceinline__ Pair<A> shuffle_xor(Pair<A> value, int offset) {
  return {shuffle_xor(value.first, offset), shuffle_xor(value.second, offset)};
}

// Every lane of the warp gets the result. All 32 lanes must take part.
template <typename Op, typename A> __device__ __forceinline__ A warp_reduce(A value) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) value = Op()(value, shuffle_xor(value, offset));
  return value;
}

// Sums each of N numbers over `lanes` neighbours of a warp, a power of two. All lanes of the warp take part, and each gets the
// sums of its neighbours.
template <int N, typename A> __device__ __forceinline__ void sum_over_lanes(A (&values)[N], int lanes) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    if (offset >= lanes) continue;
#pragma unroll
    for (int i = 0; i < N; ++i) values[i] += shuffle_xor(values[i], offset);
  }
}

// Every thread of the block gets the result. `shared` holds kWarp values; blockDim.x is a multiple of 32, blockDim.y
// and blockDim.z are 1. It begins with a barrier, so the same `shared` may serve the next call at once.
template <typename Op, typename A> __device__ __forceinline__ A block_reduce(A value, A* shared) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  value = warp_reduce<Op>(value);
  __syncthreads();
  if (lane == 0) shared[warp] = value;
  __syncthreads();
  value = lane < blockDim.x / kWarp ? shared[lane] : Op::template identity<A>();
  return warp_reduce<Op>(value);
}

// Every thread of a row gets the result. A row has blockDim.x threads: a power of two up to kWarp, several rows to a
// warp, all of whose lanes take part; or, one row to a block, as block_reduce asks.
template <typename Op, typename A> __device__ __forceinline__ A row_reduce(A value, A* shared) {
  if (blockDim.x > kWarp) return block_reduce<Op>(value, shared);
  for (int offset = blockDim.x / 2; offset > 0; offset /= 2) {
    value = Op()(value, shuffle_xor(value, offset));
  }
  return value;
}
