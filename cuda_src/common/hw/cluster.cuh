// Thread-block clusters: blocks that run at the same time on neighbouring multiprocessors and can store to each other's
// shared memory. Before sm_90, and in a launch that asks for no clusters, each block is a cluster of its own.
#pragma once

#include "common/reduce/warp_block.cuh"

constexpr int kMaxCluster = 8;  // blocks, which every GPU with clusters allows
constexpr int kRowCluster = 4;  // kRowCluster * kWarp warps share a row by RowThreads at most, in all of its blocks

__device__ __forceinline__ unsigned cluster_rank() {
  unsigned rank = 0;
#if __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
  return rank;
}

__device__ __forceinline__ unsigned cluster_blocks() {
  unsigned blocks = 1;
#if __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(blocks));
#endif
  return blocks;
}

// The first half of a barrier that only says that this block has begun, so that others may store to its shared memory. It
// orders no stores.
__device__ __forceinline__ void cluster_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}

// The two halves of a barrier of all threads of the cluster: what is stored before the first is seen after the second.
__device__ __forceinline__ void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// Stores `value` to the shared memory of the block `rank`, at the place whose address in this block's own is `to`.
template <typename A> __device__ __forceinline__ void store_remote(A* to, unsigned rank, const A& value) {
#if __CUDA_ARCH__ >= 900
  static_assert(sizeof(A) % 4 == 0, "whole words");
  const unsigned own = static_cast<unsigned>(__cvta_generic_to_shared(to));
  unsigned remote, words[sizeof(A) / 4];
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(own), "r"(rank));
  memcpy(words, &value, sizeof(A));
#pragma unroll
  for (int i = 0; i < int(sizeof(A) / 4); ++i) {
    asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(remote + 4 * i), "r"(words[i]) : "memory");
  }
#endif
}

// The threads that share a row: those of one threadIdx.y of a block, as in row_reduce; with CLUSTERS those of all blocks of
// a cluster, which lies along x, and of which each block has a part of the row. Reductions are in a fixed order.
template <typename A, bool CLUSTERS> class RowThreads {
 public:
  // In shared memory: a value of each warp of each block, in two phases, since the values of one reduction may still be read
  // while those of the next arrive.
  struct Room { A parts[2][CLUSTERS ? kRowCluster * kWarp : kWarp]; };

  __device__ __forceinline__ explicit RowThreads(Room& room) : room(room) {
    if (several()) cluster_begin();  // no block may store to another one before that has begun
  }

  // Which of the groups of threads that share a row this is, and how many there are.
  __device__ __forceinline__ long long group() const { return several() ? blockIdx.x / cluster_blocks() : blockIdx.x; }
  __device__ __forceinline__ long long groups() const { return several() ? gridDim.x / cluster_blocks() : gridDim.x; }

  // Which part of a row is this block's.
  __device__ __forceinline__ int part() const { return several() ? cluster_rank() : 0; }

  // Every thread of the row gets the result. All threads of all of the row's blocks must call it equally often, and at least
  // once.
  template <typename Op> __device__ __forceinline__ A reduce(A value) {
    value = over_lanes<Op>(value);
    return over_warps(value, [](A value, const A* parts, int count) {
      value = Op::template identity<A>();
      for (int i = threadIdx.x % kWarp; i < count; i += kWarp) value = Op()(value, parts[i]);
      return warp_reduce<Op>(value);
    });
  }

  // The reduction over those of the row's threads that are in this warp.
  template <typename Op, typename B> __device__ __forceinline__ B over_lanes(B value) const {
    for (int offset = min(blockDim.x, kWarp) / 2; offset > 0; offset /= 2)
      value = Op()(value, shuffle_xor(value, offset));
    return value;
  }

  // merge(value, parts, count), called by whole warps, where `parts` are the values of the row's warps; where the row has one
  // warp, `value` itself.
  template <typename Merge> __device__ __forceinline__ A over_warps(A value, Merge merge) {
    if (blockDim.x <= kWarp && !several()) return value;
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
    A* parts = room.parts[phase++ % 2];
    if (several()) {
      if (phase == 1) cluster_wait();
      if (lane < cluster_blocks()) store_remote(parts + cluster_rank() * warps + warp, lane, value);
      cluster_arrive();
      cluster_wait();
    } else {
      if (lane == 0) parts[warp] = value;
      __syncthreads();
    }
    return merge(value, parts, warps * (several() ? cluster_blocks() : 1));
  }

 private:
  __device__ __forceinline__ bool several() const { return CLUSTERS && cluster_blocks() > 1; }

  Room& room;
  int phase = 0;
};
