// The element types of kernels, and the type that each is computed in.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

// fp16, bf16 and fp32 are computed in fp32, and fp64 in fp64 throughout, so that gradcheck is meaningful.
template <typename T> struct Accumulator { using type = float; };
template <> struct Accumulator<double> { using type = double; };
template <typename T> using acc_t = typename Accumulator<T>::type;

__device__ __forceinline__ float to_acc(__half value) { return __half2float(value); }
__device__ __forceinline__ float to_acc(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ __forceinline__ float to_acc(float value) { return value; }
__device__ __forceinline__ double to_acc(double value) { return value; }

// Rounds to the nearest T; kernels do so once, at the store.
template <typename T> __device__ __forceinline__ T from_acc(acc_t<T> value);
template <> __device__ __forceinline__ __half from_acc<__half>(float value) { return __float2half_rn(value); }
template <> __device__ __forceinline__ __nv_bfloat16 from_acc<__nv_bfloat16>(float value) {
  return __float2bfloat16_rn(value);
}
template <> __device__ __forceinline__ float from_acc<float>(float value) { return value; }
template <> __device__ __forceinline__ double from_acc<double>(double value) { return value; }

// A product that is rounded by itself. In a fused multiply-add it would not be, and the difference of two equal products would
// not be zero.
__device__ __forceinline__ float mul_rn(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ double mul_rn(double a, double b) { return __dmul_rn(a, b); }

// NVRTC defines no INFINITY.
template <typename A> __device__ __forceinline__ A infinity();
template <> __device__ __forceinline__ float infinity<float>() { return __int_as_float(0x7f800000); }
template <> __device__ __forceinline__ double infinity<double>() { return __longlong_as_double(0x7ff0000000000000LL); }

// The maximum as PyTorch has it: NaN wins, where fmaxf would drop it.
template <typename A> __device__ __forceinline__ A max_nan(A a, A b) { return (a > b || a != a) ? a : b; }

// Indices of threads have 64 bits, since tensors may have more than 2^31 elements.
__device__ __forceinline__ long long global_thread() { return blockIdx.x * (long long)blockDim.x + threadIdx.x; }
__device__ __forceinline__ long long global_threads() { return gridDim.x * (long long)blockDim.x; }
