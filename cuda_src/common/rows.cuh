// Rows in registers: how the threads that share a row of a contiguous array divide it among them.
//
//     blockDim.x   threads share a row: a power of two up to 32, several rows to a warp; or 32 n, one row to a block
//     blockDim.y   rows of a block; 1 where blockDim.x > 32. The block is a whole number of warps.
//
// A thread holds K packs of 16 bytes of each tensor. Where every row begins at a 16-byte boundary, a pack is so many
// neighbours, loaded at once; else (rows of odd size, views such as x[1:]) elements are dealt out one by one, which
// keeps neighbouring threads on neighbouring elements. Which it is holds for a whole launch: kernels branch once, by
// vectors_fit(), into code that was compiled for each.
#pragma once

#include "common/reduce.cuh"
#include "common/vec.cuh"

__device__ __forceinline__ unsigned raw_bits(__half value) { return __half_as_ushort(value); }
__device__ __forceinline__ unsigned raw_bits(__nv_bfloat16 value) { return __bfloat16_as_ushort(value); }

// Element 0 or 1 of a word of a half type, in one instruction or two, and a word of two numbers.
__device__ __forceinline__ float unpack(unsigned word, int e, __nv_bfloat16) {
  return __uint_as_float(e ? word & 0xffff0000u : word << 16);
}
__device__ __forceinline__ float unpack(unsigned word, int e, __half) {
  return __half2float(__ushort_as_half(e ? word >> 16 : word & 0xffff));
}
__device__ __forceinline__ unsigned rounded_pair(float first, float second, __nv_bfloat16) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
  return raw_bits(pair.x) | raw_bits(pair.y) << 16;
}
__device__ __forceinline__ unsigned rounded_pair(float first, float second, __half) {
  const __half2 pair = __floats2half2_rn(first, second);
  return raw_bits(pair.x) | raw_bits(pair.y) << 16;
}

// 16 bytes of T in four registers: half the registers of half types that are unpacked.
template <typename T> struct Pack {
  unsigned word[4];

  __device__ __forceinline__ acc_t<T> operator[](int e) const {
    if constexpr (sizeof(T) == 8) return __hiloint2double(word[2 * e + 1], word[2 * e]);
    else if constexpr (sizeof(T) == 4) return __uint_as_float(word[e]);
    else return unpack(word[e / 2], e % 2, T());
  }

  // Elements are set in order, on a pack of zeros.
  __device__ __forceinline__ void set(int e, T value) {
    if constexpr (sizeof(T) == 8) word[2 * e] = __double2loint(value), word[2 * e + 1] = __double2hiint(value);
    else if constexpr (sizeof(T) == 4) word[e] = __float_as_uint(value);
    else word[e / 2] |= raw_bits(value) << (e % 2 * 16);
  }

  static __device__ __forceinline__ Pack filled(T value) {
    Pack pack = {};
#pragma unroll
    for (int e = 0; e < kVecWidth<T>; ++e) pack.set(e, value);
    return pack;
  }

  // What was unpacked is unpacked anew when it is next needed. Else the compiler keeps it, in twice the registers for
  // half types, while the block waits for a reduction.
  __device__ __forceinline__ void fold() {
    asm volatile("" : "+r"(word[0]), "+r"(word[1]), "+r"(word[2]), "+r"(word[3]));
  }
};

template <int K, typename T> __device__ __forceinline__ void fold(Pack<T> (&packs)[K]) {
#pragma unroll
  for (int k = 0; k < K; ++k) packs[k].fold();
}

// The same value, known to the compiler at this point only: it would keep the place of every element from the load to
// the store, and spill them.
__device__ __forceinline__ unsigned hidden(unsigned value) {
  asm volatile("" : "+r"(value));
  return value;
}

// Whether each pack of W elements is one access: rows of whole packs, from a 16-byte boundary on. A null pointer fits.
template <int W, typename... T> __device__ __forceinline__ bool vectors_fit(long long size, const T*... tensors) {
  return size % W == 0 && (is_aligned16(tensors) && ...);
}

// A part of a row, or all of it: K packs of W elements in each of the blockDim.x threads that share it.
template <int K, int W, bool VECTORS> struct Tile {
  int left;  // elements of the row from the tile's first on: those beyond are not there; 0 where there is no row

  static __device__ __forceinline__ int capacity() { return K * W * blockDim.x; }

  // How many tiles a row is.
  static __device__ __forceinline__ int count(long long size) { return int((size + capacity() - 1) / capacity()); }

  // Tile number c of a row.
  static __device__ __forceinline__ Tile at(long long size, int c) {
    const long long left = size - c * (long long)capacity();
    return {left < capacity() ? int(left) : capacity()};
  }

  // Where element e of pack k lies.
  static __device__ __forceinline__ int index(int k, int e) {
    return VECTORS ? (k * blockDim.x + threadIdx.x) * W + e : (k * W + e) * hidden(blockDim.x) + threadIdx.x;
  }

  // Packs that are vectors are there as a whole or not at all.
  __device__ __forceinline__ bool has(int k, int e) const { return index(k, VECTORS ? 0 : e) < left; }

  // f(k, e) for each of this thread's elements that is there.
  template <typename F> __device__ __forceinline__ void each(F f) const {
#pragma unroll
    for (int k = 0; k < K; ++k) {
      if (VECTORS && !has(k, 0)) continue;
#pragma unroll
      for (int e = 0; e < W; ++e) {
        if (VECTORS || has(k, e)) f(k, e);
      }
    }
  }
};

// This thread's pack k; `row` points to the tile's first element, and `pad` takes the place of what is not there.
template <int K, bool VECTORS, typename T>
__device__ __forceinline__ Pack<T> load_pack(const Tile<K, kVecWidth<T>, VECTORS>& tile, const T* row, int k, T pad) {
  Pack<T> pack = VECTORS ? Pack<T>::filled(pad) : Pack<T>{};
  if constexpr (VECTORS) {
    if (tile.has(k, 0)) {
      const uint4 words = *reinterpret_cast<const uint4*>(row + tile.index(k, 0));
      pack = Pack<T>{words.x, words.y, words.z, words.w};
    }
  } else {
#pragma unroll
    for (int e = 0; e < kVecWidth<T>; ++e) {
      const int i = tile.index(k, e);
      pack.set(e, i < tile.left ? row[i] : pad);
    }
  }
  return pack;
}

// All of this thread's packs, each under way before any is waited for.
template <int K, bool VECTORS, typename T>
__device__ __forceinline__ void load_row(const Tile<K, kVecWidth<T>, VECTORS>& tile, const T* row, T pad,
                                         Pack<T> (&packs)[K]) {
#pragma unroll
  for (int k = 0; k < K; ++k) packs[k] = load_pack(tile, row, k, pad);
}

// The words of elements first, first + 1, ... of f(e), rounded to O.
template <typename O, int WORDS, typename F> __device__ __forceinline__ void round_to_words(unsigned (&word)[WORDS],
                                                                                            int first, F f) {
#pragma unroll
  for (int i = 0; i < WORDS; ++i) {
    if constexpr (sizeof(O) == 2) {
      word[i] = rounded_pair(f(first + 2 * i), f(first + 2 * i + 1), O());
    } else if constexpr (sizeof(O) == 4) {
      word[i] = __float_as_uint(f(first + i));
    } else {
      const double value = f(first + i / 2);
      word[i] = i % 2 ? __double2hiint(value) : __double2loint(value);
    }
  }
}

// As instructions, since the compiler takes a vector apart where it cannot see what else is at its address.
__device__ __forceinline__ void store_words(void* at, unsigned a, unsigned b) {
  asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(at), "r"(a), "r"(b));
}
__device__ __forceinline__ void store_words(void* at, unsigned a, unsigned b, unsigned c, unsigned d) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(a), "r"(b), "r"(c), "r"(d));
}

// row[...] = f(e) for pack k. O may be narrower or wider than what the tile was cut for.
template <int K, int W, bool VECTORS, typename O, typename F>
__device__ __forceinline__ void store_pack(const Tile<K, W, VECTORS>& tile, O* row, int k, F f) {
  if constexpr (VECTORS) {
    constexpr int P = W < kVecWidth<O> ? W : kVecWidth<O>, WORDS = P * sizeof(O) / 4;
    if (!tile.has(k, 0)) return;
#pragma unroll
    for (int p = 0; p < W; p += P) {
      unsigned word[WORDS];
      round_to_words<O>(word, p, f);
      O* at = row + tile.index(k, p);
      if constexpr (WORDS == 4) store_words(at, word[0], word[1], word[2], word[3]);
      else store_words(at, word[0], word[1]);
    }
  } else {
#pragma unroll
    for (int e = 0; e < W; ++e) {
      const int i = tile.index(k, e);
      if (i < tile.left) row[i] = from_acc<O>(f(e));
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

// The reduction of f(k, e) over this thread's elements, pads included, as a tree: more exact and less serial than one
// after the other.
template <typename Op, int K, int W, typename F> __device__ __forceinline__ auto reduce_elements(F f) {
  decltype(f(0, 0)) parts[W];
  each_element<K, W>([&](int k, int e) { parts[e] = k == 0 ? f(k, e) : Op()(parts[e], f(k, e)); });
#pragma unroll
  for (int half = W / 2; half > 0; half /= 2) {
#pragma unroll
    for (int e = 0; e < half; ++e) parts[e] = Op()(parts[e], parts[e + half]);
  }
  return parts[0];
}
