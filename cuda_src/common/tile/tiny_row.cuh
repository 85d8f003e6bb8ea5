// One row of tiny_rows.cuh, as its threads read it from shared memory: two elements of a half type at a time, since an
// access to one costs the same.
#pragma once

#include "common/reduce/online_softmax_row.cuh"
#include "common/tile/tiny_rows.cuh"

__device__ __forceinline__ int log2_of(int power_of_two) { return __popc(power_of_two - 1); }

// Two neighbours of a half type, which fill a word; of other types one element.
template <typename T> struct Few {
  static constexpr int COUNT = 1;
  T value;

  static __device__ __forceinline__ Few filled(T value) { return {value}; }
  static __device__ __forceinline__ Few rounded(acc_t<T> value, acc_t<T>) { return {from_acc<T>(value)}; }
  // Both elements; where not `whole` the first one, and `pad`.
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

// place[e] = f(e) for N elements; where not `whole` for the first alone.
template <int N, typename O, typename F> __device__ __forceinline__ void put_few(O* place, bool whole, F f) {
  if constexpr (N == 2 && sizeof(O) == 2) {
    if (whole) *reinterpret_cast<unsigned*>(place) = rounded_pair(f(0), f(1), O());
    else *place = from_acc<O>(f(0));
  } else {
    place[0] = from_acc<O>(f(0));
    if (N == 2 && whole) place[1] = from_acc<O>(f(1));
  }
}

// Two rows of `size` elements in shared memory, which begin at the same place within a word, read by one thread: a Few at a
// time, and single elements where a row begins or ends within a Few.
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

  // to[e] = f(a, b, e). `to` begins at the same place within a word, and may be one of the rows: several results are
  // computed before any is stored.
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

// A thread's part of a row that blockDim.x neighbouring threads share: `chunk` neighbouring Few, at most SLOTS, or those
// that are left of the row, in registers. Indices count from the first row in shared memory on.
template <typename T, int SLOTS_> struct TinyRow {
  static constexpr int N = Few<T>::COUNT, SLOTS = SLOTS_, GROUP = SLOTS / 4;
  int chunk, begin;
  int count;  // how many Few this thread has
  int lone;  // the index of a single element at one of the row's ends, where this thread has one; else -1

  __device__ __forceinline__ TinyRow(int row, int size, bool inside) {
    const int first = row * size, odd = first & N - 1, few = size / N, threads = blockDim.x;
    chunk = few + threads - 1 >> log2_of(threads);
    begin = first + odd + threadIdx.x * chunk * N;
    count = inside ? min(chunk, few - int(threadIdx.x) * chunk) : 0;
    lone = size % N && inside && threadIdx.x == threads - 1 ? (odd ? first : first + size - 1) : -1;
  }

  // f(k, whole) for each slot k that any thread has, and last for k = SLOTS where this thread has a single element.
  template <typename F> __device__ __forceinline__ void each(F f) const {
#pragma unroll
    for (int group = 0; group < SLOTS; group += GROUP) {
      if (group >= chunk) break;
#pragma unroll
      for (int k = group; k < group + GROUP; ++k) f(k, true);
    }
    if (N > 1 && lone >= 0) f(SLOTS, false);
  }

  // f(k, index, whole) for each Few of this thread, and otherwise(k) for the other slots that any thread has.
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

  // The reduction over all threads of the row.
  template <typename Op, typename A> static __device__ __forceinline__ A over_threads(A value) {
    for (int offset = blockDim.x / 2; offset > 0; offset /= 2) value = Op()(value, shuffle_xor(value, offset));
    return value;
  }
};

// f(row, inside) for `count` rows in shared memory. The block has kSmallRows threads, (threads of a row, rows); all lanes
// take part. Of rows of an odd number of halves every second one begins within a word. A warp takes every second row: these
// are an odd number of words apart, so that its lanes do not meet in a bank.
template <typename F> __device__ __forceinline__ void each_tiny_row(int count, bool odd, F f) {
  const int each = kWarp >> log2_of(blockDim.x), y = threadIdx.y, second = y & each ? 1 : 0;
  const int own = odd ? (y & -2 * each) + (y & each - 1) * 2 + second : y;
  for (int pass = 0; pass < count; pass += blockDim.y) f(pass + own, pass + own < count);
}
