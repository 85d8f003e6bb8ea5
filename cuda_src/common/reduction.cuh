// y[k] = post(in[k, 0] o in[k, 1] o ...) for an associative and commutative o, over inputs of any strides. A fixed order:
// the same bits every time, on every GPU.
//
//     ROWS      the innermost dimension in memory is reduced: threadIdx.x runs along it, threadIdx.y over results
//     not ROWS  it is kept: threadIdx.x runs over results, threadIdx.y along what is reduced
//     LINE      what is reduced is one dimension, and no input is broadcast over a vector: loads hang on no branch, and
//               several are under way at once
//
// What is reduced is cut into slabs of `slab_units` units. Where there are several, their results are partial ones, which
// fold_slabs() combines.
#pragma once

#include "common/pointwise.cuh"
#include "common/reduce.cuh"

constexpr int kFoldThreads = 256;

// The C values of each of `count` threads, a power of two, combined into those of the first. `index` is a thread's place
// among them, in `shared` they are `stride` apart; neighbours in a warp need none of it. All threads of the block take part.
template <int C, typename A, typename Rule>
__device__ __forceinline__ void fold_threads(A (&value)[C], A (*shared)[kFoldThreads], int index, int count, int stride,
                                             const Rule& rule) {
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
  for (int half = count / 2; half > 0; half /= 2) {
    if (stride == 1 && half < kWarp) {
#pragma unroll
      for (int c = 0; c < C; ++c) {
        value[c] = rule.combine_(value[c], __shfl_down_sync(kFullMask, value[c], half));
      }
      continue;
    }
#pragma unroll
    for (int c = 0; c < C; ++c) {
      if (index >= half && index < 2 * half) shared[c][thread] = value[c];
    }
    __syncthreads();  // one is enough: the next step writes what this one does not read
#pragma unroll
    for (int c = 0; c < C; ++c) {
      if (index < half) value[c] = rule.combine_(value[c], shared[c][thread + half * stride]);
    }
  }
}

// How a launch divides the work. Units are of K elements: of the reduced ones for ROWS, else of the results.
struct Division {
  long long results, units;  // to reduce to, in units for not ROWS; of each to reduce
  long long tail;  // elements beyond the last whole unit, of a single reduced dimension
  long long tiles, slab_units;
};

// locate() where there is one dimension.
template <int N> __device__ __forceinline__ Offsets<N> step_to(const Layout<N>& layout, long long unit) {
  Offsets<N> offsets;
#pragma unroll
  for (int j = 0; j < N; ++j) offsets.at[j] = unit * layout.stride[j][0];
  return offsets;
}

// Grid: tiles x slabs, one dimension, tiles fastest. Block: kFoldThreads, both dimensions powers of two. A thread takes
// every blockDim.x-th (.y-th) unit of its slab. unit.map_<K>(from, at, vector, mapped) reads K elements, contiguous or
// broadcast along the innermost dimension of `vector`; unit.store_(value, slab, offset) takes a result. The last of the
// offsets in `kept` is the output's.
template <bool ROWS, bool LINE, int K, typename A, int N, typename Unit>
__device__ __forceinline__ void fold(const Unit& unit, const Layout<N + 1>& kept, const Layout<N>& reduced,
                                     const Division& division) {
  constexpr int C = ROWS ? 1 : K;
  __shared__ A shared[C][kFoldThreads];
  const long long tile = blockIdx.x % division.tiles, slab = blockIdx.x / division.tiles;
  const int index = ROWS ? threadIdx.x : threadIdx.y, count = ROWS ? blockDim.x : blockDim.y;
  const long long result = ROWS ? tile * blockDim.y + threadIdx.y : tile * (long long)blockDim.x + threadIdx.x;
  const bool inside = result < division.results;
  const Offsets<N + 1> from = locate(kept, inside ? result : 0);
  A folded[K], mapped[K];
#pragma unroll
  for (int k = 0; k < K; ++k) folded[k] = unit.rule_.identity_();
  const long long end = (slab + 1) * division.slab_units, last = end < division.units ? end : division.units;
  if (inside) {
#pragma unroll 4
    for (long long u = slab * division.slab_units + index; u < last; u += count) {
      const Offsets<N> at = LINE ? step_to(reduced, u) : locate(reduced, u);
      if constexpr (ROWS) unit.template map_<K>(from, at, reduced, mapped);
      else unit.template map_<K>(from, at, kept, mapped);
#pragma unroll
      for (int k = 0; k < K; ++k) folded[k] = unit.rule_.combine_(folded[k], mapped[k]);
    }
    const long long tail = last == division.units ? division.tail : 0;
    for (long long t = index; t < tail; t += count) {
      Offsets<N> at;
#pragma unroll
      for (int j = 0; j < N; ++j) at.at[j] = reduced.stride[j][0] == 0 ? 0 : division.units * K + t;
      A single[1];
      unit.template map_<1>(from, at, reduced, single);
      folded[0] = unit.rule_.combine_(folded[0], single[0]);
    }
  }
  A value[C];
#pragma unroll
  for (int c = 0; c < C; ++c) value[c] = folded[c];
#pragma unroll
  for (int k = C; k < K; ++k) value[0] = unit.rule_.combine_(value[0], folded[k]);
  fold_threads<C>(value, shared, index, count, ROWS ? 1 : blockDim.x, unit.rule_);
  if (index > 0 || !inside) return;
#pragma unroll
  for (int c = 0; c < C; ++c) unit.store_(value[c], slab, from.at[N] + c);
}

// The partial results [slabs x results] combined, each given to store_(value, 0, offset). Grid: ceil(results /
// blockDim.x). Block: as fold() has it without ROWS.
template <typename A, typename Unit>
__device__ __forceinline__ void fold_slabs(const Unit& unit, const A* __restrict__ partial, long long slabs,
                                           long long results) {
  __shared__ A shared[1][kFoldThreads];
  const long long result = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  A value[1] = {unit.rule_.identity_()};
  if (result < results) {
    for (long long slab = threadIdx.y; slab < slabs; slab += blockDim.y) {
      value[0] = unit.rule_.combine_(value[0], partial[slab * results + result]);
    }
  }
  fold_threads<1>(value, shared, threadIdx.y, blockDim.y, blockDim.x, unit.rule_);
  if (threadIdx.y == 0 && result < results) unit.store_(value[0], 0, result);
}
