// mbarriers of sm_90 and later: a phase ends when all expected threads have arrived and all announced bytes have come. Shared
// memory is named by its 32-bit addresses; in a cluster, bits 24 and up of one are the rank of its block.
#pragma once

namespace mbarrier {

__device__ __forceinline__ void init(unsigned barrier, unsigned arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// After the last init(), before other blocks or bulk copies use the barriers.
__device__ __forceinline__ void fence_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ __forceinline__ void arrive(unsigned barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives, and announces bytes that bulk copies will bring.
__device__ __forceinline__ void arrive_and_expect(unsigned barrier, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// The address of the same place in the block `rank` of the cluster.
__device__ __forceinline__ unsigned in_block(unsigned address, unsigned rank) {
  unsigned there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}

// Arrives at a barrier of any block of the cluster. It says nothing of what this thread has written: of what it has read.
__device__ __forceinline__ void arrive_remote(unsigned barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// The same, and what was written before it is seen after wait_acquire(): a fence as wide as the GPU, too slow for a loop.
__device__ __forceinline__ void arrive_remote_release(unsigned barrier) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Waits for the end of the phase of this parity.
__device__ __forceinline__ void wait(unsigned barrier, unsigned parity) {
  unsigned over = 0;
  while (!over) {
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                 : "=r"(over)
                 : "r"(barrier), "r"(parity)
                 : "memory");
  }
}

__device__ __forceinline__ void wait_acquire(unsigned barrier, unsigned parity) {
  unsigned over = 0;
  while (!over) {
    asm volatile(
        "{.reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;"
        " selp.u32 %0, 1, 0, p;}"
        : "=r"(over)
        : "r"(barrier), "r"(parity)
        : "memory");
  }
}

}  // namespace mbarrier
