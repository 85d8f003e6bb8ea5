// out[i] = f({in0[..], in1[..], ...}) where the inputs are views of any strides: broadcast, transposed, sliced.
#pragma once

#include "common/core/vector.cuh"

constexpr int kMaxDims = 5;  // MAX_DIMS of broadcast.py: a launch refuses a Layout of another size

// How a dense output and N inputs of its shape are walked. Dimensions are in the order of the output's memory, innermost
// first, and those that all inputs walk as one are merged. A unit is `width` elements of the innermost dimension: 16 bytes'
// worth where each input is contiguous or broadcast along it, else 1. broadcast.py makes it.
template <int N> struct Layout {
  long long size[kMaxDims];  // in units, for the innermost
  long long stride[N][kMaxDims];  // elements from one unit, row ... to the next; 0 where broadcast
  unsigned multiplier[kMaxDims];  // x / size = (x * multiplier / 2^32 + x) >> shift, for x < 2^31
  unsigned shift[kMaxDims];
  int dims;
  int width;
  int wide;  // there are 2^31 units or more: divide in 64 bits
  int unused;
};

template <int N> struct Offsets { long long at[N]; };

// Where the unit begins in each input.
template <int N> __device__ __forceinline__ Offsets<N> locate(const Layout<N>& layout, long long unit) {
  Offsets<N> offsets = {};
#pragma unroll
  for (int d = 0; d < kMaxDims; ++d) {
    if (d >= layout.dims) break;
    long long coordinate = unit;
    if (d + 1 < layout.dims) {  // what is left is the outermost coordinate: no division
      const unsigned low = static_cast<unsigned>(unit);
      unit = layout.wide ? unit / layout.size[d] : (__umulhi(low, layout.multiplier[d]) + low) >> layout.shift[d];
      coordinate -= unit * layout.size[d];
    }
#pragma unroll
    for (int j = 0; j < N; ++j) offsets.at[j] += coordinate * layout.stride[j][d];
  }
  return offsets;
}

template <typename T, int W> __device__ __forceinline__ Vec<T, W> splat(T value) {
  Vec<T, W> all;
#pragma unroll
  for (int k = 0; k < W; ++k) all.data[k] = value;
  return all;
}

// Grid: any, one dimension; ceil(n / (blockDim.x * width)) blocks give each thread one unit. Each thread owns the vectors,
// then the single elements, of its grid-stride. f takes an array with one value of each input, in acc_t<T>. A pointer
// off 16 bytes sends the whole launch down the scalar path; only a launch of one dimension has a tail.
template <typename T, int N, typename F>
__device__ __forceinline__ void broadcast(const Layout<N>& layout, long long n, F f, T* __restrict__ out,
                                          const T* const (&in)[N]) {
  constexpr int W = kVecWidth<T>;
  bool all_aligned = layout.width == W && is_aligned16(out);
#pragma unroll
  for (int j = 0; j < N; ++j) all_aligned = all_aligned && (layout.stride[j][0] == 0 || is_aligned16(in[j]));
  const long long vectors = all_aligned ? n / W : 0;
  acc_t<T> values[N];
  for (long long v = global_thread(); v < vectors; v += global_threads()) {
    const Offsets<N> offsets = locate(layout, v);
    Vec<T, W> loaded[N], result;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const T* from = in[j] + offsets.at[j];
      loaded[j] = layout.stride[j][0] == 0 ? splat<T, W>(*from) : load_vec<T, W>(from);
    }
#pragma unroll
    for (int k = 0; k < W; ++k) {
#pragma unroll
      for (int j = 0; j < N; ++j) values[j] = to_acc(loaded[j].data[k]);
      result.data[k] = from_acc<T>(f(values));
    }
    store_vec<T, W>(out + v * W, result);
  }
  for (long long i = vectors * W + global_thread(); i < n; i += global_threads()) {
    const bool single = layout.width == 1;
    const Offsets<N> offsets = locate(layout, single ? i : i / W);
    const int lane = single ? 0 : static_cast<int>(i % W);
#pragma unroll
    for (int j = 0; j < N; ++j) values[j] = to_acc(in[j][offsets.at[j] + (layout.stride[j][0] == 0 ? 0 : lane)]);
    out[i] = from_acc<T>(f(values));
  }
}
