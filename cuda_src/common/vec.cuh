// 16-byte accesses.
#pragma once

#include "common/types.cuh"

// N elements that are loaded and stored as one.
template <typename T, int N> struct __align__(sizeof(T) * N) Vec { T data[N]; };

// How many T make 16 bytes.
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
