// Rows in registers: how the threads that share a row of a contiguous array divide it among them.
//
//     blockDim.x   threads share a row: a power of two up to 32, several rows to a warp; or 32 n, one row to a block
//     blockDim.y   rows of a block; 1 where blockDim.x > 32. The block is a whole number of warps.
//
// A thread holds K packs of 16 bytes of each tensor. Packs begin at 16-byte boundaries of memory, not of the row: a row
// of odd size, which begins anywhere, is still read by vectors, and only its two ends by elements.
//
//     row        |-------- elements ---------|
//     window   [ . . a b ][ c d e f ][ g h . . ]        shift 2: begin = 2, end = 10
#pragma once

#include "common/reduce.cuh"
#include "common/vec.cuh"

__device__ __forceinline__ unsigned raw_bits(__half value) { return __half_as_ushort(value); }
__device__ __forceinline__ unsigned raw_bits(__nv_bfloat16 value) { return __bfloat16_as_ushort(value); }
__device__ __forceinline__ __half from_raw_bits(unsigned bits, __half) { return __ushort_as_half(bits); }
__device__ __forceinline__ __nv_bfloat16 from_raw_bits(unsigned bits, __nv_bfloat16) {
  return __ushort_as_bfloat16(bits);
}

// 16 bytes of T in four registers. Words and not elements, because a pack is filled either by one load or element by
// element: were the two to meet as elements, each vector would have to arrive, to be taken apart, before the next is
// asked for.
template <typename T> struct Pack {
  unsigned word[4];

  __device__ __forceinline__ acc_t<T> operator[](int e) const {
    if constexpr (sizeof(T) == 8) return __hiloint2double(word[2 * e + 1], word[2 * e]);
    else if constexpr (sizeof(T) == 4) return __uint_as_float(word[e]);
    else return to_acc(from_raw_bits((word[e / 2] >> (e % 2 * 16)) & 0xffff, T()));
  }

  // Elements are set in order, on a pack of zeros.
  __device__ __forceinline__ void set(int e, T value) {
    if constexpr (sizeof(T) == 8) word[2 * e] = __double2loint(value), word[2 * e + 1] = __double2hiint(value);
    else if constexpr (sizeof(T) == 4) word[e] = __float_as_uint(value);
    else word[e / 2] |= raw_bits(value) << (e % 2 * 16);
  }

  // What was unpacked is unpacked anew when it is next needed. Else the compiler keeps it, in twice the registers for
  // half types, while the block waits for a reduction.
  __device__ __forceinline__ void fold() {
    asm volatile("" : "+r"(word[0]), "+r"(word[1]), "+r"(word[2]), "+r"(word[3]));
  }
};

// A part of a row: K packs of W elements in each of the blockDim.x threads that share it.
template <int K, int W> struct Window {
  long long origin;  // of its first element, counted from the row's; below 0 by the shift
  int begin, end;  // which of its elements are the row's
  int step;  // between the elements of a pack: 1, or blockDim.x where no vectors can be had and elements are dealt

  static __device__ __forceinline__ int capacity() { return K * W * blockDim.x; }

  __device__ __forceinline__ int index(int k, int e) const {
    return k * W * blockDim.x + threadIdx.x * (step == 1 ? W : 1) + e * step;
  }

  __device__ __forceinline__ bool has(int i) const { return begin <= i && i < end; }

  // Whether pack k is consecutive elements of the row, all of them.
  __device__ __forceinline__ bool whole(int k) const {
    const int first = index(k, 0);
    return step == 1 && begin <= first && first + W <= end;
  }
};

// By how many elements a row overshoots a 16-byte boundary.
template <typename T> __device__ __forceinline__ int shift_of(const T* row) {
  return int(reinterpret_cast<unsigned long long>(row) / sizeof(T) % kVecWidth<T>);
}

// The window that holds a whole row of at most capacity() elements, none if the row is not `live`. Where the shift
// would not fit beside them, elements are dealt.
template <int K, typename T> __device__ __forceinline__ Window<K, kVecWidth<T>> whole_row(const T* row, int size,
                                                                                          bool live) {
  using Tile = Window<K, kVecWidth<T>>;
  const int shift = shift_of(row);
  if (!live) return Tile{0, 0, 0, 1};
  return shift + size <= Tile::capacity() ? Tile{-shift, shift, shift + size, 1} : Tile{0, 0, size, int(blockDim.x)};
}

// Window number c of a row of any length; there are windows_of(row, size) of them.
template <int K, typename T>
__device__ __forceinline__ Window<K, kVecWidth<T>> window_at(const T* row, long long size, long long c) {
  using Tile = Window<K, kVecWidth<T>>;
  const int shift = shift_of(row);
  const long long origin = c * Tile::capacity() - shift;
  const long long left = size - origin;
  return Tile{origin, c == 0 ? shift : 0, left < Tile::capacity() ? int(left) : Tile::capacity(), 1};
}

template <int K, typename T> __device__ __forceinline__ long long windows_of(const T* row, long long size) {
  const int capacity = Window<K, kVecWidth<T>>::capacity();
  return (size + shift_of(row) + capacity - 1) / capacity;
}

// The same value, known to the compiler at this point only: it would work out the index of every element before the
// loop over rows, and spill them.
__device__ __forceinline__ int hidden(int value) {
  asm volatile("" : "+r"(value));
  return value;
}

template <int K, typename T>
__device__ __forceinline__ Pack<T> load_vector(const Window<K, kVecWidth<T>>& window, const T* at, int k) {
  const uint4 words = *reinterpret_cast<const uint4*>(at + window.index(k, 0));
  return Pack<T>{words.x, words.y, words.z, words.w};
}

template <int K, typename T>
__device__ __forceinline__ Pack<T> load_elements(const Window<K, kVecWidth<T>>& window, const T* at, int k, T pad) {
  Pack<T> pack = {};
  int i = hidden(window.index(k, 0));
#pragma unroll
  for (int e = 0; e < kVecWidth<T>; ++e, i += window.step) pack.set(e, window.has(i) ? at[i] : pad);
  return pack;
}

// This thread's pack k of `row`, with `pad` in place of what is not the row's.
template <int K, typename T>
__device__ __forceinline__ Pack<T> load_pack(const Window<K, kVecWidth<T>>& window, const T* row, int k, T pad) {
  const T* at = row + window.origin;
  return window.whole(k) && is_aligned16(at) ? load_vector(window, at, k) : load_elements(window, at, k, pad);
}

// All of this thread's packs of `row`: the vectors first, each under way before any is waited for, then what is left.
template <int K, typename T>
__device__ __forceinline__ void load_row(const Window<K, kVecWidth<T>>& window, const T* row, T pad,
                                         Pack<T> (&packs)[K]) {
  const T* at = row + window.origin;
  const bool aligned = is_aligned16(at);
  bool left = false;
#pragma unroll
  for (int k = 0; k < K; ++k) {
    const bool vector = aligned && window.whole(k);
    left = left || !vector;
    packs[k] = Pack<T>{};
    if (vector) packs[k] = load_vector(window, at, k);
  }
  if (!left) return;
#pragma unroll 1
  for (int k = 0; k < K; ++k) {
    if (aligned && window.whole(k)) continue;
    const Pack<T> pack = load_elements(window, at, k, pad);
#pragma unroll
    for (int j = 0; j < K; ++j) {
      if (j == k) packs[j] = pack;  // an index known only at run time would put the packs into local memory
    }
  }
}

template <int K, typename T> __device__ __forceinline__ void fold(Pack<T> (&packs)[K]) {
#pragma unroll
  for (int k = 0; k < K; ++k) packs[k].fold();
}

// row[...] = f(e) for pack k. O may be narrower or wider than what the window was cut for.
template <int K, int W, typename O, typename F>
__device__ __forceinline__ void store_pack(const Window<K, W>& window, O* row, int k, F f) {
  constexpr int P = W < kVecWidth<O> ? W : kVecWidth<O>;
  O* at = row + window.origin;
  Vec<O, P> parts[W / P];
#pragma unroll
  for (int e = 0; e < W; ++e) parts[e / P].data[e % P] = from_acc<O>(f(e));
  if (window.whole(k) && reinterpret_cast<unsigned long long>(at) % sizeof(Vec<O, P>) == 0) {
#pragma unroll
    for (int p = 0; p < W / P; ++p) store_vec<O, P>(at + window.index(k, p * P), parts[p]);
  } else {
    int i = hidden(window.index(k, 0));
#pragma unroll
    for (int e = 0; e < W; ++e, i += window.step) {
      if (window.has(i)) at[i] = parts[e / P].data[e % P];
    }
  }
}

// f(k, e) for each of this thread's elements, pads included.
template <int K, int W, typename F> __device__ __forceinline__ void each_element(F f) {
#pragma unroll
  for (int k = 0; k < K; ++k) {
#pragma unroll
    for (int e = 0; e < W; ++e) f(k, e);
  }
}
