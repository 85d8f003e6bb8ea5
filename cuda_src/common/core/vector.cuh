// Vectors: several elements that one access of up to 16 bytes moves.
#pragma once

#include "common/core/types.cuh"

// N elements that are loaded and stored together.
template <typename T, int N> struct __align__(sizeof(T) * N) Vec { T data[N]; };

// How many elements a 16-byte vector has.
template <typename T> constexpr int kVecWidth = 16 / sizeof(T);

__device__ __forceinline__ bool is_aligned16(const void* pointer) {
  return (reinterpret_cast<unsigned long long>(pointer) & 15) == 0;
}

template <typename T, int N> __device__ __forceinline__ Vec<T, N> load_vec(const T* pointer) {
  return *reinterpret_cast<const Vec<T, N>*>(pointer);
}

template <typename T, int N> __device__ __forceinline__ void store_vec(T* pointer, Vec<T, N> value) {
  *reinterpret_cast<Vec<T, N>*>(pointer) = value;
}

// A 16-byte vector, and the same bytes as words.
template <typename T> union Words {
  uint4 words;
  Vec<T, kVecWidth<T>> elements;

  __device__ __forceinline__ Words() {}
};

// Stores 16 bytes by one instruction. The compiler may split a store_vec whose address it cannot reason about.
__device__ __forceinline__ void store16(void* to, uint4 words) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(words.x), "r"(words.y), "r"(words.z),
               "r"(words.w)
               : "memory");
}
