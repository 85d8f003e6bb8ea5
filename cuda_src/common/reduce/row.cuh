// Sums over the threads that share a row, those of a block or of a cluster, in a fixed order and with one barrier. A cluster
// meets at its hardware barrier, which waits for all that has been stored to memory; or by an mbarrier exchange, in which an
// mbarrier of each block counts the bytes that come. Code that holds rows in registers is better off with the hardware
// barrier than with the loop that waits for an mbarrier.
#pragma once

#include "common/hw/cluster.cuh"

constexpr int kClusterWarps = 16;  // of a block that may be one of a cluster, at most

// In shared memory: N numbers of each warp of each block, twice, since those of one sum may still be read while those of
// the next arrive.
template <typename A, int N, bool CLUSTERS, bool MBARRIER> struct __align__(16) RowAdderBuffer {
  A partials[2][(CLUSTERS ? kMaxCluster * kClusterWarps : kWarp) * N];
};
template <typename A, int N, bool CLUSTERS>
struct RowAdderBuffer<A, N, CLUSTERS, true> : RowAdderBuffer<A, N, CLUSTERS, false> {
  unsigned long long arrived[2];  // the mbarriers: which of the partials have arrived
};

__device__ __forceinline__ unsigned shared_address(const void* shared) {
  return static_cast<unsigned>(__cvta_generic_to_shared(shared));
}
__device__ __forceinline__ unsigned remote_address(const void* shared, unsigned rank) {
  unsigned remote = 0;
#if __CUDA_ARCH__ >= 900
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(shared_address(shared)), "r"(rank));
#endif
  return remote;
}

// Sets the mbarriers up: by one thread of a block, before its cluster meets.
__device__ __forceinline__ void init_mbarriers(unsigned long long (&arrived)[2]) {
#if __CUDA_ARCH__ >= 900
  if (threadIdx.x > 0) return;
  for (int i = 0; i < 2; ++i) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(arrived + i)) : "memory");
  }
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

// *to = value in the block `rank`, whose mbarrier counts the bytes. `to` and `arrived` are the addresses of the same places in
// this block's own shared memory.
template <typename A>
__device__ __forceinline__ void send(A* to, unsigned rank, A value, unsigned long long* arrived) {
#if __CUDA_ARCH__ >= 900
  const unsigned place = remote_address(to, rank), barrier = remote_address(arrived, rank);
  if constexpr (sizeof(A) == 8) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];" ::"r"(place),
                 "l"(__double_as_longlong(value)), "r"(barrier)
                 : "memory");
  } else {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(place),
                 "r"(__float_as_uint(value)), "r"(barrier)
                 : "memory");
  }
#endif
}

__device__ __forceinline__ void expect_bytes(unsigned long long* arrived, int bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(arrived)), "r"(bytes)
               : "memory");
#endif
}

__device__ __forceinline__ void wait_for_bytes(unsigned long long* arrived, int parity) {
#if __CUDA_ARCH__ >= 900
  unsigned over = 0;
  while (!over) {
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(over)
                 : "r"(shared_address(arrived)), "r"(parity)
                 : "memory");
  }
#endif
}

// The threads of a row: those of threadIdx.x of a block, see row_tile.cuh; with CLUSTERS those of all blocks of a cluster,
// which lies along x, each with a part of the row. MBARRIER: those blocks meet by an mbarrier exchange.
template <typename A, int N, bool CLUSTERS, bool MBARRIER = false> class RowAdder {
 public:
  using Buffer = RowAdderBuffer<A, N, CLUSTERS, MBARRIER>;

  __device__ __forceinline__ explicit RowAdder(Buffer& buffer) : buffer(buffer) {
    if (!several()) return;
    if constexpr (MBARRIER) init_mbarriers(buffer.arrived);
    cluster_arrive(), cluster_wait();  // no block may store to another before that has begun
  }

  // Which group of threads this is, of how many, and which part of a row is this block's.
  __device__ __forceinline__ long long group() const { return several() ? blockIdx.x / cluster_blocks() : blockIdx.x; }
  __device__ __forceinline__ long long groups() const { return several() ? gridDim.x / cluster_blocks() : gridDim.x; }
  __device__ __forceinline__ int part() const { return several() ? cluster_rank() : 0; }

  // Every thread of the row gets the sums of M numbers. All threads of all its blocks take part.
  template <int M> __device__ __forceinline__ void add(A (&values)[M]) {
    static_assert(M <= N, "more numbers than the buffer holds");
    if (blockDim.x < kWarp) return sum_over_lanes(values, blockDim.x);
    sum_over_lanes(values, kWarp);
    if (blockDim.x == kWarp && !several()) return;
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
    const int blocks = several() ? cluster_blocks() : 1, count = warps * blocks;
    A* partials = buffer.partials[MBARRIER ? phase & 1 : (phase ^= 1)];
    if (several()) {
      A* mine = partials + (cluster_rank() * warps + warp) * M;
      if constexpr (MBARRIER) {
        unsigned long long* arrived = buffer.arrived + (phase & 1);
        if (threadIdx.x == 0) expect_bytes(arrived, count * M * int(sizeof(A)));
        each<M>([&](int m) {
          if (lane < blocks) send(mine + m, lane, values[m], arrived);
        });
        wait_for_bytes(arrived, phase >> 1 & 1);
      } else {
        each<M>([&](int m) {
          if (lane < blocks) store_remote(mine + m, lane, values[m]);
        });
        cluster_arrive();
        cluster_wait();
      }
    } else {
      each<M>([&](int m) {
        if (lane == 0) partials[warp * M + m] = values[m];
      });
      __syncthreads();
    }
    if (MBARRIER) ++phase;
    if (count <= kFew) {  // each thread adds them up, which takes less time than shuffles
      each<M>([&](int m) { values[m] = partials[m]; });
#pragma unroll
      for (int i = 1; i < kFew; ++i) {
        if (i < count) each<M>([&](int m) { values[m] += partials[i * M + m]; });
      }
      return;
    }
    each<M>([&](int m) { values[m] = A(0); });
    for (int i = lane; i < count; i += kWarp) each<M>([&](int m) { values[m] += partials[i * M + m]; });
    sum_over_lanes(values, kWarp);
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

  __device__ __forceinline__ bool several() const { return CLUSTERS && cluster_blocks() > 1; }

  Buffer& buffer;
  int phase = 0;
};
