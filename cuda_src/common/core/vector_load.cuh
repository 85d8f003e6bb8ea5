// 16 bytes at once, whatever the compiler makes of their parts.
#pragma once

#include "common/core/vector.cuh"

// As store_vec, which the compiler may split where it has packed the halves in registers that are apart.
template <typename T> __device__ __forceinline__ void store_whole(T* to, const Vec<T, kVecWidth<T>>& value) {
  const uint4 words = *reinterpret_cast<const uint4*>(&value);
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(words.x), "r"(words.y), "r"(words.z),
               "r"(words.w));
}
