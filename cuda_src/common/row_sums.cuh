// Sums over the threads that share a row, in a fixed order, with one barrier.
#pragma once

#include "common/cluster.cuh"

// In shared memory: N numbers of each warp of each block, twice, since those of one sum may still be read while those of
// the next arrive.
template <typename A, int N, bool CLUSTERS> struct __align__(16) RowRoom {
  A parts[2][(CLUSTERS ? kMaxCluster : 1) * kWarp * N];
};

// The threads of a row: those of threadIdx.x of a block, see rows.cuh; with CLUSTERS those of all blocks of a cluster,
// which lies along x, each with a part of the row.
template <typename A, int N, bool CLUSTERS> class RowSums {
 public:
  using Room = RowRoom<A, N, CLUSTERS>;

  __device__ __forceinline__ explicit RowSums(Room& room) : room(room) {
    if (several()) cluster_arrive(), cluster_wait();  // no block may store to another before that has begun
  }

  // Which group of threads this is, of how many, and which part of a row is this block's.
  __device__ __forceinline__ long long group() const { return several() ? blockIdx.x / cluster_blocks() : blockIdx.x; }
  __device__ __forceinline__ long long groups() const { return several() ? gridDim.x / cluster_blocks() : gridDim.x; }
  __device__ __forceinline__ int part() const { return several() ? cluster_rank() : 0; }

  // Every thread of the row gets the sums of M numbers. All threads of all its blocks take part.
  template <int M> __device__ __forceinline__ void add(A (&values)[M]) {
    static_assert(M <= N, "more than there is room for");
    if (blockDim.x < kWarp) return over_lanes(values, blockDim.x);
    over_lanes(values, kWarp);
    if (blockDim.x == kWarp && !several()) return;
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
    const int blocks = several() ? cluster_blocks() : 1, count = warps * blocks;
    A* parts = room.parts[turn ^= 1];
    if (several()) {
      each<M>([&](int m) {
        if (lane < blocks) store_remote(parts + (cluster_rank() * warps + warp) * M + m, lane, values[m]);
      });
      cluster_arrive();
      cluster_wait();
    } else {
      each<M>([&](int m) {
        if (lane == 0) parts[warp * M + m] = values[m];
      });
      __syncthreads();
    }
    if (count <= kFew) {  // each thread adds them up: sooner done than by shuffles
      each<M>([&](int m) { values[m] = parts[m]; });
#pragma unroll
      for (int i = 1; i < kFew; ++i) {
        if (i < count) each<M>([&](int m) { values[m] += parts[i * M + m]; });
      }
      return;
    }
    each<M>([&](int m) { values[m] = A(0); });
    for (int i = lane; i < count; i += kWarp) each<M>([&](int m) { values[m] += parts[i * M + m]; });
    over_lanes(values, kWarp);
  }

  __device__ __forceinline__ A add(A value) {
    A values[1] = {value};
    add(values);
    return values[0];
  }

 private:
  static constexpr int kFew = 8;

  template <int M, typename F> static __device__ __forceinline__ void each(F f) {
#pragma unroll
    for (int m = 0; m < M; ++m) f(m);
  }

  template <int M> static __device__ __forceinline__ void over_lanes(A (&values)[M], int lanes) {
#pragma unroll
    for (int offset = kWarp / 2; offset > 0; offset /= 2) {
      if (offset < lanes) each<M>([&](int m) { values[m] += shuffle_xor(values[m], offset); });
    }
  }

  __device__ __forceinline__ bool several() const { return CLUSTERS && cluster_blocks() > 1; }

  Room& room;
  int turn = 0;
};
