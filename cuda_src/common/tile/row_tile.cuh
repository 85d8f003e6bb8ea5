// Rows in registers: how the threads that share a row of a contiguous array divide it among them.
//
//     blockDim.x   threads share a row: a power of two up to 32, several rows to a warp; or 32 n, one row to a block
//     blockDim.y   rows of a block; 1 where blockDim.x > 32. The block is a whole number of warps.
//
// A thread holds K vectors of 16 bytes of each tensor: W neighbours. Vectors begin where the index in the whole array, not in
// the row, is a multiple of W. In an array that begins at a 16-byte boundary each is then one access, whatever the size of a
// row:
//
//     row 0   |01234567|89abcdef|g.......            17 elements of 2 bytes: three vectors,
//     row 1    .0123456|789abcde|fg......|           the last of row 0 and the first of row 1 being the same 16 bytes
//
// A vector at an end of a row is read whole, and what is not the row's is masked; it is written element by element. An array
// that begins elsewhere (a view such as x[1:], or a weight, which begins anew for each row) is read through the two aligned
// vectors that a vector straddles. ALIGNED says that all rows and arrays begin at 16-byte boundaries: none of this is compiled
// in then. A kernel has it as a template value, or branches once, by all_aligned(), into code for each.
#pragma once

#include "common/reduce/warp_block.cuh"
#include "common/core/vector.cuh"

__device__ __forceinline__ unsigned raw_bits(__half value) { return __half_as_ushort(value); }
__device__ __forceinline__ unsigned raw_bits(__nv_bfloat16 value) { return __bfloat16_as_ushort(value); }

__device__ __forceinline__ __half from_bits(unsigned short bits, __half) { return __ushort_as_half(bits); }
__device__ __forceinline__ __nv_bfloat16 from_bits(unsigned short bits, __nv_bfloat16) {
  return __ushort_as_bfloat16(bits);
}

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

// Element e of words of T.
template <typename T> __device__ __forceinline__ T element(const unsigned* word, int e) {
  if constexpr (sizeof(T) == 8) return __hiloint2double(word[2 * e + 1], word[2 * e]);
  else if constexpr (sizeof(T) == 4) return __uint_as_float(word[e]);
  else return from_bits(static_cast<unsigned short>(word[e / 2] >> e % 2 * 16), T());
}

// 16 bytes of T in four registers, or fewer bytes: half the registers that the elements of a half type take once unpacked.
template <typename T, int BYTES = 16> struct Vector {
  unsigned word[BYTES / 4];

  __device__ __forceinline__ acc_t<T> operator[](int e) const {
    if constexpr (sizeof(T) == 8) return __hiloint2double(word[2 * e + 1], word[2 * e]);
    else if constexpr (sizeof(T) == 4) return __uint_as_float(word[e]);
    else return unpack(word[e / 2], e % 2, T());
  }

  // Elements are set in order, on a vector of zeros.
  __device__ __forceinline__ void set(int e, T value) {
    if constexpr (sizeof(T) == 8) word[2 * e] = __double2loint(value), word[2 * e + 1] = __double2hiint(value);
    else if constexpr (sizeof(T) == 4) word[e] = __float_as_uint(value);
    else word[e / 2] |= raw_bits(value) << (e % 2 * 16);
  }

  static __device__ __forceinline__ Vector filled(T value) {
    Vector vector = {};
#pragma unroll
    for (int e = 0; e < int(BYTES / sizeof(T)); ++e) vector.set(e, value);
    return vector;
  }

  // What was unpacked is unpacked anew when it is next needed. Else the compiler keeps it, for half types in twice the
  // registers, while the block waits for a reduction.
  __device__ __forceinline__ void fold() {
    if constexpr (BYTES == 16) asm volatile("" : "+r"(word[0]), "+r"(word[1]), "+r"(word[2]), "+r"(word[3]));
    else if constexpr (BYTES == 8) asm volatile("" : "+r"(word[0]), "+r"(word[1]));
    else asm volatile("" : "+r"(word[0]));
  }
};

template <int K, typename T, int BYTES> __device__ __forceinline__ void fold(Vector<T, BYTES> (&vectors)[K]) {
#pragma unroll
  for (int k = 0; k < K; ++k) vectors[k].fold();
}

// Whether each vector of W elements is one access: rows of whole vectors, from a 16-byte boundary on. A null pointer fits.
template <int W, typename... T> __device__ __forceinline__ bool all_aligned(long long size, const T*... tensors) {
  return size % W == 0 && (is_aligned16(tensors) && ...);
}

// A part of a row, or all of it: K vectors of W elements in each of the blockDim.x threads that share it. Indices are
// counted from the tile's first element; those below 0, down to the first vector's beginning, are the row before's.
template <int K, int W, bool ALIGNED> struct Tile {
  int begin, left;  // the tile's elements: begin <= index < left; none where there is no row
  int low, high;  // what lies in the array: low <= index < high
  int shift;  // of the vectors' boundaries

  static __device__ __forceinline__ int capacity() { return K * W * blockDim.x; }

  // How many tiles a row is.
  static __device__ __forceinline__ int count(long long size) {
    return int((size + (ALIGNED ? 0 : W - 1) + capacity() - 1) / capacity());
  }

  // Tile number c of a row of an array (rows, size); its first element is number c * capacity() of the row.
  static __device__ __forceinline__ Tile at(long long row, long long rows, long long size, int c = 0) {
    const long long start = c * (long long)capacity(), left = row < rows ? size - start : 0;
    if constexpr (ALIGNED) return {0, clipped(left, capacity()), 0, 0, 0};
    const int shift = int(row * size) & (W - 1);
    return {c && row < rows ? -shift : 0, clipped(left, capacity() - shift), -clipped(row * size + start, kFar),
            clipped((rows - row) * size - start, kFar), shift};
  }

  // Where element e of vector k lies.
  __device__ __forceinline__ int index(int k, int e) const {
    return (k * blockDim.x + threadIdx.x) * W + e - (ALIGNED ? 0 : shift);
  }

  // Whether any of the N elements from i on is there, and whether all are.
  template <int N = W> __device__ __forceinline__ bool any(int i) const {
    return i < left && (ALIGNED || i + N > begin);
  }
  template <int N = W> __device__ __forceinline__ bool all(int i) const {
    return ALIGNED ? i < left : i >= begin && i + N <= left;
  }

  // f(e) for each element of vector k that is there.
  template <typename F> __device__ __forceinline__ void each_of(int k, F f) const {
    const int i = index(k, 0);
    if (all(i)) {
#pragma unroll
      for (int e = 0; e < W; ++e) f(e);
    } else if (!ALIGNED && any(i)) {
#pragma unroll
      for (int e = 0; e < W; ++e) {
        if (all<1>(i + e)) f(e);
      }
    }
  }

 private:
  static constexpr int kFar = 1 << 30;
  static __device__ __forceinline__ int clipped(long long value, int most) { return value < most ? int(value) : most; }
};

// A row off 16-byte boundaries, divided otherwise: whole vectors of what is written, which begins at a boundary, and an
// unaligned head and tail of up to 2 W - 2 elements together, of which some threads have one each.
template <int W, bool ALIGNED> struct UnalignedRow {
  int head = 0, whole;  // elements before the vectors, and those of the vectors
  bool lone = false;  // whether this thread has an element of the head or the tail
  int column = 0;  // the place of that element

  __device__ __forceinline__ UnalignedRow(long long row, long long rows, long long size) : whole(int(size)) {
    if (ALIGNED) return;
    head = int(-row * size) & (W - 1);
    whole = (whole - head) & -W;
    lone = threadIdx.x < int(size) - whole && row < rows;
    column = threadIdx.x + (threadIdx.x < head ? 0 : whole);
  }
};

template <typename T, int BYTES = 16> __device__ __forceinline__ Vector<T, BYTES> load_aligned(const T* at) {
  if constexpr (BYTES == 16) {
    const uint4 words = *reinterpret_cast<const uint4*>(at);
    return {words.x, words.y, words.z, words.w};
  } else if constexpr (BYTES == 8) {
    const uint2 words = *reinterpret_cast<const uint2*>(at);
    return {words.x, words.y};
  } else {
    return {*reinterpret_cast<const unsigned*>(at)};
  }
}

// A vector from any address on.
template <typename T> __device__ __forceinline__ Vector<T> load_elements(const T* at) {
  Vector<T> vector = {};
#pragma unroll
  for (int e = 0; e < kVecWidth<T>; ++e) vector.set(e, at[e]);
  return vector;
}

// The W elements from number `offset` of two vectors on.
template <typename T> __device__ __forceinline__ Vector<T> straddled(const Vector<T>& a, const Vector<T>& b,
                                                                     int offset) {
  unsigned word[8];
#pragma unroll
  for (int i = 0; i < 4; ++i) word[i] = a.word[i], word[i + 4] = b.word[i];
  const int bytes = offset * int(sizeof(T));
#pragma unroll
  for (int i = 0; i < 6; ++i) word[i] = bytes & 8 ? word[i + 2] : word[i];
#pragma unroll
  for (int i = 0; sizeof(T) <= 4 && i < 5; ++i) word[i] = bytes & 4 ? word[i + 1] : word[i];
#pragma unroll
  for (int i = 0; sizeof(T) == 2 && i < 4; ++i) word[i] = __funnelshift_r(word[i], word[i + 1], bytes % 4 * 8);
  return {word[0], word[1], word[2], word[3]};
}

// What is not the tile's replaced by `pad`.
template <int K, int W, typename T>
__device__ __forceinline__ Vector<T> masked(const Tile<K, W, false>& tile, const Vector<T>& vector, int i, T pad) {
  if (tile.all(i)) return vector;
  Vector<T> result = {};
#pragma unroll
  for (int e = 0; e < W; ++e) result.set(e, tile.template all<1>(i + e) ? element<T>(vector.word, e) : pad);
  return result;
}

// The W elements of `row` from i on, one by one: those of the tile, and `pad` in place of others.
template <int K, int W, typename T>
__device__ __forceinline__ Vector<T> load_elements(const Tile<K, W, false>& tile, const T* row, int i, T pad) {
  Vector<T> vector = {};
#pragma unroll
  for (int e = 0; e < W; ++e) {
    T value = pad;
    if (tile.template all<1>(i + e)) value = row[i + e];
    vector.set(e, value);
  }
  return vector;
}

// The W elements of `row` from i on: those of the tile, and `pad` in place of others. Reads low <= index < high alone.
template <int K, int W, typename T>
__device__ __forceinline__ Vector<T> load_across(const Tile<K, W, false>& tile, const T* row, int i, int low, int high,
                                                 T pad) {
  if (!tile.any(i)) return Vector<T>::filled(pad);
  const int offset = int(reinterpret_cast<unsigned long long>(row + i) % 16 / sizeof(T)), first = i - offset;
  if (first < low || first + (offset ? 2 * W : W) > high) return load_elements(tile, row, i, pad);
  Vector<T> vector = load_aligned(row + first);
  if (offset) vector = straddled(vector, load_aligned(row + first + W), offset);
  return masked(tile, vector, i, pad);
}

// This thread's vector k; `row` points to the tile's first element, and `pad` takes the place of what is not there.
template <int K, bool ALIGNED, typename T>
__device__ __forceinline__ Vector<T> load_vector(const Tile<K, kVecWidth<T>, ALIGNED>& tile, const T* row, int k,
                                                 T pad) {
  const int i = tile.index(k, 0);
  if constexpr (ALIGNED) return tile.all(i) ? load_aligned(row + i) : Vector<T>::filled(pad);
  else return load_across(tile, row, i, tile.low, tile.high, pad);
}

// The same of an array that has one row for all: `row` points to what belongs to the tile's first column.
template <int K, bool ALIGNED, typename T>
__device__ __forceinline__ Vector<T> load_per_column(const Tile<K, kVecWidth<T>, ALIGNED>& tile, const T* row, int k,
                                                     T pad) {
  const int i = tile.index(k, 0);
  if constexpr (ALIGNED) return tile.all(i) ? load_aligned(row + i) : Vector<T>::filled(pad);
  else return load_across(tile, row, i, tile.begin, tile.left, pad);
}

// All of this thread's vectors. Every load is under way before any is waited for: only then do the threads at the ends of a
// row mask theirs.
template <int K, bool ALIGNED, typename T>
__device__ __forceinline__ void load_row(const Tile<K, kVecWidth<T>, ALIGNED>& tile, const T* row, T pad,
                                         Vector<T> (&vectors)[K]) {
  constexpr int W = kVecWidth<T>;
  if constexpr (!ALIGNED) {
    if (is_aligned16(row + tile.index(0, 0))) {  // and so is every vector
#pragma unroll
      for (int k = 0; k < K; ++k) {
        const int i = tile.index(k, 0);
        vectors[k] = tile.any(i) && i + W <= tile.high ? load_aligned(row + i) : Vector<T>::filled(pad);
      }
#pragma unroll
      for (int k = 0; k < K; ++k) {
        const int i = tile.index(k, 0);
        if (!tile.any(i) || tile.all(i)) continue;
        vectors[k] = i + W <= tile.high ? masked(tile, vectors[k], i, pad) : load_elements(tile, row, i, pad);
      }
      return;
    }
  }
#pragma unroll
  for (int k = 0; k < K; ++k) vectors[k] = load_vector(tile, row, k, pad);
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

// Stores as instructions, since the compiler takes a vector apart where it cannot see what else is at its address.
__device__ __forceinline__ void store_words(void* at, unsigned a) {
  asm volatile("st.global.u32 [%0], %1;" ::"l"(at), "r"(a));
}
__device__ __forceinline__ void store_words(void* at, unsigned a, unsigned b) {
  asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(at), "r"(a), "r"(b));
}
__device__ __forceinline__ void store_words(void* at, unsigned a, unsigned b, unsigned c, unsigned d) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(a), "r"(b), "r"(c), "r"(d));
}

// The words of elements p, p + 1, ... of vector k, to their places in `row`.
template <int K, int W, bool ALIGNED, typename O, int WORDS>
__device__ __forceinline__ void store_words_of(const Tile<K, W, ALIGNED>& tile, O* row, int k,
                                               const unsigned (&word)[WORDS], int p = 0) {
  constexpr int P = WORDS * 4 / sizeof(O);
  const int i = tile.index(k, p);
  if (!tile.template any<P>(i)) return;
  O* at = row + i;
  if (ALIGNED || (tile.template all<P>(i) && reinterpret_cast<unsigned long long>(at) % (4 * WORDS) == 0)) {
    if constexpr (WORDS == 4) store_words(at, word[0], word[1], word[2], word[3]);
    else store_words(at, word[0], word[1]);
    return;
  }
#pragma unroll
  for (int e = 0; e < P; ++e) {
    if (tile.template all<1>(i + e)) at[e] = element<O>(word, e);
  }
}

// row[...] = f(e) for vector k. O may be narrower or wider than the type whose vectors the tile has.
template <int K, int W, bool ALIGNED, typename O, typename F>
__device__ __forceinline__ void store_vector(const Tile<K, W, ALIGNED>& tile, O* row, int k, F f) {
  constexpr int P = W < kVecWidth<O> ? W : kVecWidth<O>;
  if (!tile.any(tile.index(k, 0))) return;
#pragma unroll
  for (int p = 0; p < W; p += P) {
    unsigned word[P * sizeof(O) / 4];
    round_to_words<O>(word, p, f);
    store_words_of(tile, row, k, word, p);
  }
}

// f(k, e) for each of this thread's elements, padding included.
template <int K, int W, typename F> __device__ __forceinline__ void each_element(F f) {
#pragma unroll
  for (int k = 0; k < K; ++k) {
#pragma unroll
    for (int e = 0; e < W; ++e) f(k, e);
  }
}

// The reduction of f(k, e) over this thread's elements, padding included, as a tree: more exact and less serial than one
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
