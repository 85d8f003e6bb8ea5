// Grids that overlap: see `overlap` of Kernel.configure. Before sm_90 they do not.
#pragma once

#include "common/core/types.cuh"

// Once all blocks have said so, or ended, the next grid on the stream may be given room, if it is launched to overlap.
__device__ __forceinline__ void let_next_grid_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// `tensor`, which the grid before this one may have written: once that has ended.
template <typename T> __device__ __forceinline__ T* written_before(T* tensor) {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  asm volatile("" : "+l"(tensor)::"memory");  // else it were known as what nobody writes, and read earlier
  return tensor;
}
