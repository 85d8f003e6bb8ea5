// Mean and variance of many numbers (Welford; Chan et al.): those of a few at a time about their own mean, which are then
// merged in a fixed order. The variance is summed over centred values: E[x^2] - mean^2 cancels when |mean| >> std.
#pragma once

#include "common/reduce/warp_block.cuh"

// 1 / sqrt(value), rounded once: an error in rstd is the same for all elements of a group, and adds up in grad_weight.
template <typename A> __device__ __forceinline__ A inverse_sqrt(A value) {
  const A guess = A(1) / sqrt(value), high = value * guess, low = fma(value, guess, -high);
  const A left = fma(-high, guess, A(1)) - low * guess;
  return isfinite(left) ? guess + A(0.5) * guess * left : guess;
}

// Of `count` numbers: their mean, and the sum of the squares of their differences from it.
template <typename A> struct Moments {
  A count, mean, square;

  // Of numbers whose differences from `about` sum to `sum`, and the squares of these to `squares`. `about` is nearly their
  // mean, and the difference is corrected here.
  static __device__ __forceinline__ Moments of(A count, A about, A sum, A squares) {
    if (count == A(0)) return {};
    const A left = sum / count, corrected = squares - left * sum;
    return {count, about + left, isfinite(squares) && corrected > A(0) ? corrected : squares};
  }

  __device__ __forceinline__ void merge(const Moments& other) {
    if (other.count == A(0)) return;
    if (count == A(0)) {
      *this = other;
      return;
    }
    const A total = count + other.count, share = other.count / total, apart = other.mean - mean;
    mean += apart * share;
    square += other.square + apart * apart * (count * share);
    count = total;
  }

  __device__ __forceinline__ A rstd(A eps) const { return inverse_sqrt(square / count + eps); }
};

template <typename A> __device__ __forceinline__ Moments<A> shuffle_down(const Moments<A>& value, int offset) {
  return {__shfl_down_sync(kFullMask, value.count, offset), __shfl_down_sync(kFullMask, value.mean, offset),
          __shfl_down_sync(kFullMask, value.square, offset)};
}

// Lane 0 gets the moments of all the warp's numbers. All 32 lanes must take part.
template <typename A> __device__ __forceinline__ Moments<A> warp_merge(Moments<A> value) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) value.merge(shuffle_down(value, offset));
  return value;
}

// Every thread gets the moments of all of the block's numbers. `shared` holds kWarp moments; blockDim.x is a multiple of 32,
// blockDim.y and blockDim.z are 1. It begins with a barrier, so that the next call may use the same `shared` at once.
template <typename A> __device__ __forceinline__ Moments<A> block_merge(Moments<A> value, Moments<A>* shared) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  value = warp_merge(value);
  __syncthreads();
  if (lane == 0) shared[warp] = value;
  __syncthreads();
  if (warp == 0) {
    value = warp_merge(lane < blockDim.x / kWarp ? shared[lane] : Moments<A>{});
    if (lane == 0) shared[0] = value;
  }
  __syncthreads();
  return shared[0];
}

// Every thread gets the moments of the `count` partials that other blocks have left by store_moments, STRIDE numbers apart.
// As block_merge.
template <int STRIDE = 3, typename A>
__device__ __forceinline__ Moments<A> block_merge_partials(const A* partials, int count, Moments<A>* shared) {
  Moments<A> own = {};
  for (int p = threadIdx.x; p < count; p += blockDim.x) {
    own.merge({partials[STRIDE * p], partials[STRIDE * p + 1], partials[STRIDE * p + 2]});
  }
  if (count > kWarp) return block_merge(own, shared);
  if (threadIdx.x < kWarp) own = warp_merge(own);
  __syncthreads();
  if (threadIdx.x == 0) shared[0] = own;
  __syncthreads();
  return shared[0];
}

template <typename A> __device__ __forceinline__ void store_moments(A* at, const Moments<A>& value) {
  at[0] = value.count, at[1] = value.mean, at[2] = value.square;
}
