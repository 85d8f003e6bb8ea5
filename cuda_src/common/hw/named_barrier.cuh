// Barriers of some of a block's threads, by number: 0 is __syncthreads(), 1 to 15 are a kernel's own. `threads` counts those that
// take part, a multiple of 32.
#pragma once

namespace named_barrier {

// Waits until all have come.
__device__ __forceinline__ void sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Counts as having come, without waiting.
__device__ __forceinline__ void arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

}  // namespace named_barrier
