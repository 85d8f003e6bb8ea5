// What every kernel of attention is told, which keys a query sees, and half types two at a time.
#pragma once

#include "common/core/fast_math.cuh"

namespace attention {

constexpr float kLog2E = 1.4426950408889634f;  // exp(x) = exp2(x * log2(e))

__device__ __forceinline__ unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// heads, group: of the queries, and how many of them share a head of keys and values. low, high: query i sees the keys from
// i + low to i + high. width, value_width: elements of a row of q and k, and of v and y, multiples of 8, at most the D of the
// kernel. padded: rows of lse2 and delta of a head; of packed sequences those of lse in forward. section: how many (batch, head) are worked on side by side, so that what streams stays in L2.
struct Sizes { int heads, group, batches, queries, keys, low, high, width, padded, section, value_width; };

// What attention is where scores are what they are: see variant.cuh.
struct Plain {
  static constexpr bool kScores = false, kShifts = false, kMasks = false, kMaps = false, kDrops = false,
                        kPacked = false;
};

// A panel that passes, the head of the queries, and whether some of its scores may not be seen, by the mask of a variant.
struct Passing {
  int panel, head;
  bool partial;
};

// Which panels of the other side the rows of a tile see by the mask: how many, then of each, in order, 2 * panel + 1 where some
// of its scores are not seen, else 2 * panel. Strides are of batch, head and tile, 0 where all have the same.
struct Map {
  const int* lists;
  const long long* strides;

  __device__ __forceinline__ const int* of(int batch, int head, int tile) const {
    return lists + batch * strides[0] + head * strides[1] + tile * strides[2];
  }
};

// One of N scores is kept, or its weight is dropped: a bit of each, as a thread holds scores.
template <int N> struct Kept {
  unsigned bits[(N + 31) / 32] = {};

  __device__ __forceinline__ bool operator[](int e) const { return bits[e / 32] >> e % 32 & 1; }
  __device__ __forceinline__ float of(int e, float x) const { return (*this)[e] ? x : 0; }
};

// In elements, of batch, head and row; the elements of a row are contiguous.
struct Strides { long long batch, head, row; };

// The sizes of one of a batch, and which rows are its first. Of packed sequences `sizes` has the longest, and each its own.
struct Sequence {
  Sizes sizes;
  int query, key;
};
struct Whole {
  const Sizes& sizes;
  static constexpr int query = 0, key = 0;
};
template <typename Variant> __device__ __forceinline__ auto sequence_of(const Variant& variant, const Sizes& sizes,
                                                                        int batch) {
  if constexpr (Variant::kPacked) return variant.sequence(sizes, batch);
  else return Whole{sizes};
}

// BOUNDS: 0, a query sees all keys; 1, those up to i + high; 2, of these the ones from i + low on. An end may be negative.
template <int BOUNDS> __device__ __forceinline__ int keys_end(const Sizes& sizes, int query) {
  return BOUNDS ? min(sizes.keys, query + sizes.high + 1) : sizes.keys;
}
template <int BOUNDS> __device__ __forceinline__ int keys_begin(const Sizes& sizes, int query) {
  return BOUNDS == 2 ? max(0, query + sizes.low) : 0;
}

// Which panels of ROWS keys the queries from `first` to `last` see; of an empty range begin is not below end.
struct Panels { int begin, end; };
template <int BOUNDS, int ROWS> __device__ __forceinline__ Panels key_panels(const Sizes& sizes, int first, int last) {
  return {keys_begin<BOUNDS>(sizes, first) / ROWS, (max(0, keys_end<BOUNDS>(sizes, last)) + ROWS - 1) / ROWS};
}

// The same of queries, for the keys from `first` to `last`.
template <int BOUNDS, int ROWS> __device__ __forceinline__ Panels query_panels(const Sizes& sizes, int first,
                                                                               int last) {
  const int end = BOUNDS == 2 ? max(0, min(sizes.queries, last - sizes.low + 1)) : sizes.queries;
  return {BOUNDS ? max(0, first - sizes.high) / ROWS : 0, (end + ROWS - 1) / ROWS};
}

// A row has one more score, the sink, with which no value goes: its highest score, and the sum of exponentials below that, become
// those with it. Returned is by how much sums of values shrink: to 0 where no key is seen, where the sum becomes 1, so that the sink
// is the LSE. A sink of -inf is none, by the same instructions: a branch made the kernel a seventh longer.
__device__ __forceinline__ float add_sink(float sink, float& highest, float& total) {
  const float top = fmaxf(highest, sink), zero = top == -infinity<float>() ? 0 : top;
  const float shrink = fast_exp2((highest - zero) * kLog2E);
  total = total * shrink + (sink == top ? 1 : fast_exp2((sink - zero) * kLog2E));
  highest = top;
  return shrink;
}

template <typename T> __device__ __forceinline__ unsigned pack(float low, float high);
template <> __device__ __forceinline__ unsigned pack<__half>(float low, float high) {
  const __half2 both = __floats2half2_rn(low, high);
  return reinterpret_cast<const unsigned&>(both);
}
template <> __device__ __forceinline__ unsigned pack<__nv_bfloat16>(float low, float high) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const unsigned&>(both);
}

template <typename T> __device__ __forceinline__ float2 unpack(unsigned both);
template <> __device__ __forceinline__ float2 unpack<__half>(unsigned both) {
  return __half22float2(reinterpret_cast<const __half2&>(both));
}
template <> __device__ __forceinline__ float2 unpack<__nv_bfloat16>(unsigned both) {
  return {__uint_as_float(both << 16), __uint_as_float(both & 0xffff0000u)};
}

}  // namespace attention
