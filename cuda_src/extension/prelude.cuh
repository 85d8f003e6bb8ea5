// What the kernels of a C++ extension expect of PyTorch's headers, included before its file: number types, tensor accessors,
// loops over a grid, atomic additions. It is written for NVRTC, which has no host code and no C++ library.
#pragma once

#include "extension/accessor.cuh"
#include "extension/library.cuh"

#ifndef WITH_CUDA  // which the setup.py of many define
#define WITH_CUDA 1
#endif
#ifndef __NVCC__  // as nvcc and its headers define them
#define __NVCC__ 1
#endif
#ifndef CUDA_VERSION
#define CUDA_VERSION (__CUDACC_VER_MAJOR__ * 1000 + __CUDACC_VER_MINOR__ * 10)
#endif
#ifndef CUDART_VERSION
#define CUDART_VERSION CUDA_VERSION
#endif
#define __asm__ asm
#define __volatile__ volatile
#define C10_DEVICE __device__
#define C10_HOST_DEVICE __host__ __device__
#define C10_HOST __host__
#define AT_HOST_DEVICE __host__ __device__
#define AT_DEVICE __device__
#define C10_RESTRICT __restrict__
#define RESTRICT __restrict__
#define C10_WARP_SIZE 32
#define C10_LAUNCH_BOUNDS_0 __launch_bounds__(256, 4)
#define C10_LAUNCH_BOUNDS_1(threads) __launch_bounds__(threads)
#define C10_LAUNCH_BOUNDS_2(threads, blocks) __launch_bounds__(threads, blocks)
#define C10_ALWAYS_INLINE inline __attribute__((always_inline))
#define CUDA_KERNEL_ASSERT(condition) assert(condition)
#define CUDA_KERNEL_LOOP_TYPE(i, n, index_type)                                  \
  long long cupyops_next_##i = (long long)blockIdx.x * blockDim.x + threadIdx.x; \
  for (index_type i = cupyops_next_##i; cupyops_next_##i < (n);                  \
       cupyops_next_##i += (long long)blockDim.x * gridDim.x, i = cupyops_next_##i)
#ifndef CUDA_KERNEL_LOOP
#define CUDA_KERNEL_LOOP(i, n) CUDA_KERNEL_LOOP_TYPE(i, n, int)
#endif
#ifndef CUDA_1D_KERNEL_LOOP
#define CUDA_1D_KERNEL_LOOP(i, n) CUDA_KERNEL_LOOP(i, n)
#endif
#ifndef CUDA_1D_KERNEL_LOOP_T
#define CUDA_1D_KERNEL_LOOP_T(i, n, index_t) CUDA_KERNEL_LOOP_TYPE(i, n, index_t)
#endif

namespace at {

using c10::BFloat16;
using c10::Half;

template <typename T>
struct OpMathType {
  using type = T;
};
template <>
struct OpMathType<Half> {
  using type = float;
};
template <>
struct OpMathType<BFloat16> {
  using type = float;
};
template <typename T>
using opmath_type = typename OpMathType<T>::type;
template <typename T, bool is_cuda>
using acc_type = opmath_type<T>;
template <typename T>
using acc_type_device = opmath_type<T>;

template <typename T>
__host__ __device__ constexpr T ceil_div(T a, T b) {
  return (a + b - 1) / b;
}
namespace cuda {
template <typename T>
__host__ __device__ constexpr T ATenCeilDiv(T a, T b) {
  return (a + b - 1) / b;
}
}  // namespace cuda

}  // namespace at

// Additions to memory that is shared: for the half types CUDA's own, which need compute capability 7.0 and 8.0. They are
// templates, so that those that a file has itself are taken before them.
template <typename T>
__device__ inline std::enable_if_t<std::is_same_v<T, c10::Half>, T> atomicAdd(T* address, T value) {
  return atomicAdd(reinterpret_cast<__half*>(address), static_cast<__half>(value));
}
template <typename T>
__device__ inline std::enable_if_t<std::is_same_v<T, c10::BFloat16>, T> atomicAdd(T* address, T value) {
  return atomicAdd(reinterpret_cast<__nv_bfloat16*>(address), static_cast<__nv_bfloat16>(value));
}
template <typename T>
__device__ inline std::enable_if_t<std::is_same_v<T, long long>, T> atomicAdd(T* address, T value) {
  return atomicAdd(reinterpret_cast<unsigned long long*>(address), static_cast<unsigned long long>(value));
}
template <typename A, typename B>  // of two types, so that one that a file has itself is taken before it
__host__ __device__ constexpr A THCCeilDiv(A a, B b) {
  return (a + b - 1) / b;
}
template <typename T>
__device__ inline T gpuAtomicAdd(T* address, T value) {
  return atomicAdd(address, value);
}
template <typename T>
__device__ inline void gpuAtomicAddNoReturn(T* address, T value) {
  atomicAdd(address, value);
}

namespace at {
namespace native {
// adds to element `index` of `tensor`
template <typename scalar_t, typename index_t>
__device__ inline void fastAtomicAdd(scalar_t* tensor, index_t index, const index_t count, scalar_t value, bool) {
  gpuAtomicAdd(tensor + index, value);
}
}  // namespace native
}  // namespace at

// templates of any number of arguments: those that a file has itself are taken before them
namespace cupyops_shuffles {
template <typename T>
__device__ inline T at(T value, int lane, int width = 32, unsigned mask = 0xffffffff) {
  return __shfl_sync(mask, value, lane, width);
}
template <typename T>
__device__ inline T up(T value, unsigned delta, int width = 32, unsigned mask = 0xffffffff) {
  return __shfl_up_sync(mask, value, delta, width);
}
template <typename T>
__device__ inline T down(T value, unsigned delta, int width = 32, unsigned mask = 0xffffffff) {
  return __shfl_down_sync(mask, value, delta, width);
}
template <typename T>
__device__ inline T across(T value, int lanes, int width = 32, unsigned mask = 0xffffffff) {
  return __shfl_xor_sync(mask, value, lanes, width);
}
}  // namespace cupyops_shuffles
template <typename T, typename... Rest>
__device__ inline T WARP_SHFL(T value, Rest... rest) {
  return cupyops_shuffles::at(value, rest...);
}
template <typename T, typename... Rest>
__device__ inline T WARP_SHFL_UP(T value, Rest... rest) {
  return cupyops_shuffles::up(value, rest...);
}
template <typename T, typename... Rest>
__device__ inline T WARP_SHFL_DOWN(T value, Rest... rest) {
  return cupyops_shuffles::down(value, rest...);
}
template <typename T, typename... Rest>
__device__ inline T WARP_SHFL_XOR(T value, Rest... rest) {
  return cupyops_shuffles::across(value, rest...);
}
template <typename... Rest>
__device__ inline unsigned WARP_BALLOT(int predicate, Rest... mask) {
  return __ballot_sync((0xffffffff & ... & unsigned(mask)), predicate);
}

namespace c10 {
using at::opmath_type;
}  // namespace c10
namespace torch {
using namespace at;
using c10::BFloat16;
using c10::Half;
}  // namespace torch
