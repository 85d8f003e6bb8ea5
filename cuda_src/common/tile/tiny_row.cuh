// One of the rows of small_rows.cuh as its threads take it out of shared memory: of half types two elements at a time, since
// an access costs the same for one.
#pragma once

#include "common/reduce/online_softmax_row.cuh"
#include "common/tile/tiny_rows.cuh"

__device__ __forceinline__ int log2_of(int power_of_two) { return __popc(power_of_two - 1); }

// Two neighbours of a half type, which make a word; else an element.
template <typename T> struct Few {
  static constexpr int COUNT = 1;
  T value;

  static __device__ __forceinline__ Few filled(T value) { return {value}; }
  static __device__ __forceinline__ Few rounded(acc_t<T> value, acc_t<T>) { return {from_acc<T>(value)}; }
  // Where not `whole`, the first, and `pad`.
  static __device__ __forceinline__ Few at(const T* place, bool, T) { return {*place}; }
  __device__ __forceinline__ acc_t<T> operator[](int) const { return value; }
  __device__ __forceinline__ Few larger(Few other) const { return {Larger()(value, other.value)}; }
  // See Vector.
  __device__ __forceinline__ void fold() {}
};

template <typename T> struct TwoHalves {
  static constexpr int COUNT = 2;
  unsigned word;

  static __device__ __forceinline__ Few<T> filled(T value) { return {raw_bits(value) | raw_bits(value) << 16}; }
  static __device__ __forceinline__ Few<T> rounded(float first, float second) {
    return {rounded_pair(first, second, T())};
  }
  static __device__ __forceinline__ Few<T> at(const T* place, bool whole, T pad) {
    return {whole ? *reinterpret_cast<const unsigned*>(place) : raw_bits(*place) | raw_bits(pad) << 16};
  }
  __device__ __forceinline__ float operator[](int e) const { return unpack(word, e, T()); }
  __device__ __forceinline__ void fold() { asm volatile("" : "+r"(word)); }
  __device__ __forceinline__ Few<T> larger(Few<T> other) const {
#if __CUDA_ARCH__ >= 800
    return {larger_words(word, other.word, T())};
#else
    return rounded(Larger()((*this)[0], other[0]), Larger()((*this)[1], other[1]));
#endif
  }
};
template <> struct Few<__half> : TwoHalves<__half> {};
template <> struct Few<__nv_bfloat16> : TwoHalves<__nv_bfloat16> {};

// place[e] = f(e) for N elements, or the first.
template <int N, typename O, typename F> __device__ __forceinline__ void put_few(O* place, bool whole, F f) {
  if constexpr (N == 2 && sizeof(O) == 2) {
    if (whole) *reinterpret_cast<unsigned*>(place) = rounded_pair(f(0), f(1), O());
    else *place = from_acc<O>(f(0));
  } else {
    place[0] = from_acc<O>(f(0));
    if (N == 2 && whole) place[1] = from_acc<O>(f(1));
  }
}

// Two rows of `size` in shared memory, which begin alike within a word, as one thread meets them: a Few at a time, but where a
// row begins or ends within one.
template <typename T> struct TwoRows {
  static constexpr int N = Few<T>::COUNT;
  const T *one, *other;
  int size;

  // f(a, b, e) for each element e, in order.
  template <typename F> __device__ __forceinline__ void each(F f) const {
    const auto take = [&](int e) { f(to_acc(one[e]), to_acc(other[e]), e); };
    if constexpr (N == 2) {
      const auto take_two = [&](int e) {
        const Few<T> a = at(one, e), b = at(other, e);
        f(a[0], b[0], e), f(a[1], b[1], e + 1);
      };
      each_word_of_row(one, size, take, take_two);
    } else {
#pragma unroll 4
      for (int e = 0; e < size; ++e) take(e);
    }
  }

  // to[e] = f(a, b, e): `to` begins as they do, and may be one of them. Several are computed before any is stored.
  template <typename F> __device__ __forceinline__ void store(T* to, F f) const {
    constexpr int U = 4;
    const int first = N > 1 ? int(reinterpret_cast<unsigned long long>(one) / sizeof(T) % N) : 0;
    if (first > 0) *to = from_acc<T>(f(to_acc(*one), to_acc(*other), 0));
    int e = first;
#pragma unroll 1
    for (; e + U * N <= size; e += U * N) {
      Few<T> few[U];
#pragma unroll
      for (int u = 0; u < U; ++u) few[u] = of(e + u * N, f);
#pragma unroll
      for (int u = 0; u < U; ++u) *reinterpret_cast<Few<T>*>(to + e + u * N) = few[u];
    }
#pragma unroll 1
    for (; e + N <= size; e += N) *reinterpret_cast<Few<T>*>(to + e) = of(e, f);
    if (e < size) to[e] = from_acc<T>(f(to_acc(one[e]), to_acc(other[e]), e));
  }

 private:
  static __device__ __forceinline__ Few<T> at(const T* row, int e) { return *reinterpret_cast<const Few<T>*>(row + e); }
  template <typename F> __device__ __forceinline__ Few<T> of(int e, F f) const {
    const Few<T> a = at(one, e), b = at(other, e);
    return Few<T>::rounded(f(a[0], b[0], e), N > 1 ? f(a[N - 1], b[N - 1], e + N - 1) : acc_t<T>(0));
  }
};

// A thread's part of a row that blockDim.x neighbours share: `chunk` Few side by side, or what is left of them, in registers.
// Indices count from the first row in shared memory on.
template <typename T> struct TinyRow {
  static constexpr int N = Few<T>::COUNT, SLOTS = sizeof(T) == 8 ? 8 : 16, GROUP = SLOTS / 4;
  int chunk, begin;
  int count;  // of this thread's Few
  int lone;  // an element that is left of the row, at one of its ends; -1: none

  __device__ __forceinline__ TinyRow(int row, int size, bool inside) {
    const int first = row * size, odd = first & N - 1, few = size / N, threads = blockDim.x;
    chunk = few + threads - 1 >> log2_of(threads);
    begin = first + odd + threadIdx.x * chunk * N;
    count = inside ? min(chunk, few - int(threadIdx.x) * chunk) : 0;
    lone = size % N && inside && threadIdx.x == threads - 1 ? (odd ? first : first + size - 1) : -1;
  }

  // f(k, whole) for each slot k that any thread has; last, for k = SLOTS, where this one has a lone element.
  template <typename F> __device__ __forceinline__ void each(F f) const {
#pragma unroll
    for (int group = 0; group < SLOTS; group += GROUP) {
      if (group >= chunk) break;
#pragma unroll
      for (int k = group; k < group + GROUP; ++k) f(k, true);
    }
    if (N > 1 && lone >= 0) f(SLOTS, false);
  }

  // f(k, index, whole) for each Few of this thread's, and otherwise(k) for the other slots that any thread has.
  template <typename F, typename G> __device__ __forceinline__ void each_own(F f, G otherwise) const {
#pragma unroll
    for (int group = 0; group < SLOTS; group += GROUP) {
      if (group >= chunk) break;
      if (group + GROUP <= count) {
#pragma unroll
        for (int k = group; k < group + GROUP; ++k) f(k, begin + k * N, true);
      } else {
#pragma unroll
        for (int k = group; k < group + GROUP; ++k) {
          if (k < count) f(k, begin + k * N, true);
          else otherwise(k);
        }
      }
    }
    if (N > 1 && lone >= 0) f(SLOTS, lone, false);
  }

  __device__ __forceinline__ void load(const T* from, T pad, Few<T> (&few)[SLOTS + 1]) const {
    each_own([&](int k, int i, bool whole) { few[k] = Few<T>::at(from + i, whole, pad); },
             [&](int k) { few[k] = Few<T>::filled(pad); });
  }

  // to[...] = f(k, e).
  template <typename O, typename F> __device__ __forceinline__ void store(O* to, F f) const {
    each_own([&](int k, int i, bool whole) { put_few<N>(to + i, whole, [&](int e) { return f(k, e); }); }, [](int) {});
  }

  // Over all threads of the row.
  template <typename Op, typename A> static __device__ __forceinline__ A over_threads(A value) {
    for (int offset = blockDim.x / 2; offset > 0; offset /= 2) value = Op()(value, shuffle_xor(value, offset));
    return value;
  }
};

// f(row, inside) for `count` rows in shared memory, of a block of kSmallRows threads, (threads of a row, rows). All lanes take
// part. Rows of an odd number of halves begin within a word, every second of them: a warp takes every second row, whose
// words are an odd number apart, so that its lanes meet in no bank.
template <typename F> __device__ __forceinline__ void each_tiny_row(int count, bool odd, F f) {
  const int each = kWarp >> log2_of(blockDim.x), y = threadIdx.y, second = y & each ? 1 : 0;
  const int own = odd ? (y & -2 * each) + (y & each - 1) * 2 + second : y;
  for (int pass = 0; pass < count; pass += blockDim.y) f(pass + own, pass + own < count);
}
