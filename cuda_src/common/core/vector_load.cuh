// Stores of 16 bytes that the compiler cannot split.
#pragma once

#include "common/core/vector.cuh"

// As store_vec, which the compiler may split if it has put the halves into registers that are not neighbours.
template <typename T> __device__ __forceinline__ void store_whole(T* to, const Vec<T, kVecWidth<T>>& value) {
  const uint4 words = *reinterpret_cast<const uint4*>(&value);
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(words.x), "r"(words.y), "r"(words.z),
               "r"(words.w));
}
