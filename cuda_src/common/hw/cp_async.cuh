// Asynchronous copies of 16 bytes from global to shared memory (cp.async). Before sm_80 a copy is complete at once.
#pragma once

#include "common/core/types.cuh"

__device__ __forceinline__ void fetch16(void* shared, const void* global) {
#if __CUDA_ARCH__ >= 800
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(global) : "memory");
#else
  *static_cast<uint4*>(shared) = *static_cast<const uint4*>(global);
#endif
}

// As fetch16 to a shared address; zeros where `inside` is false, and nothing is read. Only from sm_80 on.
__device__ __forceinline__ void fetch16_or_zero(unsigned shared, const void* global, bool inside) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(inside ? 16 : 0)
               : "memory");
#endif
}

// Makes a group of the copies that this thread has started since the last call (cp.async.commit_group).
__device__ __forceinline__ void end_group() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until all groups of this thread but the newest PENDING are complete (cp.async.wait_group).
template <int PENDING> __device__ __forceinline__ void wait_for_groups() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
#endif
}
