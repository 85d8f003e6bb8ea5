// Bulk tensor copies of sm_90 and later (TMA): one thread has the hardware copy a box of a tensor into shared memory, or back.
// What lies outside of the tensor is zero, or is not written. Coordinates count elements, the innermost dimension first.
#pragma once

// What the host encodes of a tensor and a box: cupyops.tensor_map gives one. Take it as `const __grid_constant__ TensorMap`.
struct __align__(64) TensorMap { char bytes[128]; };

namespace tma {

__device__ __forceinline__ void prefetch(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Copies a box to shared memory, whose bytes are told to the mbarrier `barrier`.
__device__ __forceinline__ void load(unsigned shared, const TensorMap& map, int x, int y, int z, unsigned barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::
          "r"(shared),
      "l"(&map), "r"(x), "r"(y), "r"(z), "r"(barrier)
      : "memory");
}

// The same of a tensor of four dimensions.
__device__ __forceinline__ void load(unsigned shared, const TensorMap& map, int x, int y, int z, int w,
                                     unsigned barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], "
      "[%6];" ::"r"(shared),
      "l"(&map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(barrier)
      : "memory");
}

// Copies bytes that lie in line, a multiple of 16.
__device__ __forceinline__ void load_line(unsigned shared, const void* global, int bytes, unsigned barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
               "l"(global), "r"(bytes), "r"(barrier)
               : "memory");
}

// The first load, into every block of the cluster whose bit is set in `blocks`, and to the barrier at that place of each.
__device__ __forceinline__ void load_to_blocks(unsigned shared, const TensorMap& map, int x, int y, int z,
                                               unsigned barrier, unsigned blocks) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0],"
      " [%1, {%2, %3, %4}], [%5], %6;" ::"r"(shared),
      "l"(&map), "r"(x), "r"(y), "r"(z), "r"(barrier), "h"(static_cast<unsigned short>(blocks))
      : "memory");
}

// Makes what this thread's block has written to shared memory by ordinary stores visible to bulk copies.
__device__ __forceinline__ void fence_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Copies a box from shared memory.
__device__ __forceinline__ void store(const TensorMap& map, int x, int y, int z, unsigned shared) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%1, %2, %3}], [%4];" ::"l"(&map), "r"(x),
               "r"(y), "r"(z), "r"(shared)
               : "memory");
}

// The same of a tensor of four dimensions.
__device__ __forceinline__ void store(const TensorMap& map, int x, int y, int z, int w, unsigned shared) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%1, %2, %3, %4}], [%5];" ::"l"(&map),
               "r"(x), "r"(y), "r"(z), "r"(w), "r"(shared)
               : "memory");
}

// Adds floats that lie in line, a multiple of 16 bytes, to those in memory.
__device__ __forceinline__ void add_line(float* global, unsigned shared, int bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(global), "r"(shared),
               "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void end_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until all groups of this thread's stores but the newest PENDING have been read from shared memory.
template <int PENDING> __device__ __forceinline__ void wait_for_stores() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

// Waits until all of this thread's stores are in memory.
__device__ __forceinline__ void finish_stores() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Where a byte of a box lies whose lines are as long as the swizzle: 32, 64 or 128 bytes.
template <int SPAN> __device__ __forceinline__ unsigned swizzle(unsigned byte) {
  return byte ^ (byte >> 3 & (SPAN - 16));
}

}  // namespace tma
