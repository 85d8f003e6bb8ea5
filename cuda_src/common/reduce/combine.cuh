// Combines what the threads of a block have by a rule of any kind, rule.combine_(a, b), in a fixed order. A type that is no
// number needs a shuffle_down() of its own.
#pragma once

#include "common/reduce/warp_block.cuh"

template <typename A> __device__ __forceinline__ A shuffle_down(const A& value, int offset) {
  return __shfl_down_sync(kFullMask, value, offset);
}

// Combines the values of so many neighbouring lanes, a power of two, into that of the first. A rule for which there is a
// shorter way has an overload.
template <typename Rule, typename A>
__device__ __forceinline__ A fold_lanes(const Rule& rule, A value, int lanes) {
  for (int half = lanes / 2; half > 0; half /= 2) value = rule.combine_(value, shuffle_down(value, half));
  return value;
}

// The same for `count` neighbouring threads, among which `index` is a thread's number. All threads of the block take part.
template <typename A, typename Rule>
__device__ __forceinline__ A fold_neighbours(A value, A* shared, int index, int count, const Rule& rule) {
  const int warp = (threadIdx.y * blockDim.x + threadIdx.x) / kWarp;
  value = fold_lanes(rule, value, count < kWarp ? count : kWarp);
  if (count <= kWarp) return value;
  if (index % kWarp == 0) shared[warp] = value;
  __syncthreads();
  if (index >= kWarp) return value;
  return fold_lanes(rule, shared[warp + index % (count / kWarp)], count / kWarp);
}

// Combines the C values of each thread with those of the threads of the same threadIdx.x; store(value, x, c) takes the results.
template <int C, typename A, typename Rule, typename Store>
__device__ __forceinline__ void fold_across(A (&value)[C], A* shared, const Rule& rule, Store store) {
  const int thread = threadIdx.y * blockDim.x + threadIdx.x, lanes = blockDim.x, threads = blockDim.x * blockDim.y;
  for (int half = kWarp / 2; half >= lanes; half /= 2) {
#pragma unroll
    for (int c = 0; c < C; ++c) value[c] = rule.combine_(value[c], shuffle_down(value[c], half));
  }
  const int wide = lanes < kWarp ? kWarp : lanes, groups = threads / wide;
  if (thread % wide < lanes) {
#pragma unroll
    for (int c = 0; c < C; ++c) shared[(c * groups + thread / wide) * lanes + threadIdx.x] = value[c];
  }
  __syncthreads();
  for (int i = thread; i < lanes * C; i += threads) {
    const int x = i / C, c = i % C;
    A total = shared[c * groups * lanes + x];
#pragma unroll 4
    for (int group = 1; group < groups; ++group) total = rule.combine_(total, shared[(c * groups + group) * lanes + x]);
    store(total, x, c);
  }
}
