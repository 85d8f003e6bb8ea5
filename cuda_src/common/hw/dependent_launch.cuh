// Programmatic dependent launch: a grid may begin while the one before it ends, see `overlap` of Kernel.configure. Before
// sm_90 these functions do nothing.
#pragma once

#include "common/core/types.cuh"

// Lets the next grid on the stream begin, if it is launched to overlap, once all blocks have called this or ended.
__device__ __forceinline__ void let_next_grid_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Waits until the grid before this one has ended, which may have written `tensor`; returns `tensor`.
template <typename T> __device__ __forceinline__ T* written_before(T* tensor) {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  asm volatile(""
               : "+l"(tensor)::"memory");  // else the compiler, which knows no writer, could move loads before the wait
  return tensor;
}
