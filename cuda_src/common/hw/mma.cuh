// Instructions of a warp for tensor cores: ldmatrix, and mma.sync for fp16 (sm_75 and later) and bf16 (sm_80 and later).
#pragma once

#include "common/core/types.cuh"

// Loads four 8x8 matrices of 16-bit elements from shared memory. Each lane names one row of 8 elements, by its shared address or
// by a pointer, and receives two elements of each matrix; with TRANSPOSE, of the transposed matrices.
template <bool TRANSPOSE> __device__ __forceinline__ void load_matrices(unsigned (&fragment)[4], unsigned row) {
  if constexpr (TRANSPOSE) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
                 : "r"(row)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
                 : "r"(row)
                 : "memory");
  }
}
template <bool TRANSPOSE> __device__ __forceinline__ void load_matrices(unsigned (&fragment)[4], const void* row) {
  load_matrices<TRANSPOSE>(fragment, static_cast<unsigned>(__cvta_generic_to_shared(row)));
}

// sums += a b, where a is 16x16 and b is 16x8. Lane (g, t) = (lane / 4, lane % 4) has the sums (g, 2t), (g, 2t+1), (g+8, 2t)
// and (g+8, 2t+1).
template <typename T>
__device__ __forceinline__ void mma(float (&sums)[4], const unsigned (&a)[4], unsigned b0, unsigned b1);

#if __CUDA_ARCH__ >= 800
#define MMA_16X8X16(type)                                                   \
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type       \
               ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "                  \
               "{%8, %9}, {%0, %1, %2, %3};"                                \
               : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]) \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
template <>
__device__ __forceinline__ void mma<__half>(float (&sums)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  MMA_16X8X16("f16");
}
template <>
__device__ __forceinline__ void mma<__nv_bfloat16>(float (&sums)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  MMA_16X8X16("bf16");
}
#undef MMA_16X8X16
#elif __CUDA_ARCH__ >= 750
__device__ __forceinline__ void mma_16x8x8(float (&sums)[4], unsigned a0, unsigned a1, unsigned b) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
               : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
               : "r"(a0), "r"(a1), "r"(b));
}
template <>
__device__ __forceinline__ void mma<__half>(float (&sums)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  mma_16x8x8(sums, a[0], a[1], b0);
  mma_16x8x8(sums, a[2], a[3], b1);
}
#endif
