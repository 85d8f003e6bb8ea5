// y[m, n] = sum over k of a[m, k] b[n, k] + bias[n]: products of half types on Hopper's tensor cores, for matmul and linear.
//
// Bytes: (m k + k n + m n) x sizeof(T); flops: 2 m n k.
#include "gemm/wgmma.cuh"

// Grid: clusters of CLUSTER x SPLIT blocks, as many as run at one time, or fewer; with SPLIT a cluster for each tile. Block:
// kThreads. Shared memory: the stages, the consumers' slots, their biases and the barriers, see Block; from a multiple of 1024 on.
// A consumer warpgroup owns 64 or 128 rows of a tile, sums in fp32 in the order of k, the shares of a split in the order of blocks
// from its own on. A_MN, B_MN: the operand is stored [k][m] or [k][n] instead of [m][k] or [n][k]. y is a pointer and a map of
// one array; `pitch` is 0 where the map is valid. bias may be null.
template <typename T, int M, int N, int STAGES, int SLOTS, int CLUSTER, int SPLIT, bool PINGPONG, bool LATE, bool A_MN,
          bool B_MN>
__global__ void __launch_bounds__(wgmma_gemm::kThreads, 1)
    gemm_wgmma(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b,
               const __grid_constant__ TensorMap y_map, T* y, const T* bias, int m, int n, int k, int batches,
               int a_moves, int b_moves, int pitch, int group) {
  using namespace wgmma_gemm;
  using S = Shape<M, N, STAGES, SLOTS, CLUSTER, SPLIT, PINGPONG, LATE>;
  extern __shared__ __align__(1024) char memory[];
  const Problem<T> problem{a,       b,     y_map, y, bias,  m,       n, k, batches, a_moves,
                           b_moves, pitch, group, b, y_map, nullptr, 0, 0, nullptr};
  multiply<T, S, A_MN, B_MN, Sums>(problem, memory);
}

// The same where k is long and tiles are few: `splits` blocks, or clusters, share a tile's k, and leave partial sums in fp32,
// [splits, m, n rounded up to 8], which another kernel adds up in their order.
template <typename T, int M, int N, int STAGES, int SLOTS, int CLUSTER, bool A_MN, bool B_MN>
__global__ void __launch_bounds__(wgmma_gemm::kThreads, 1)
    gemm_wgmma_partial(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b, float* partial, int m,
                       int n, int k, int splits, int group) {
  using namespace wgmma_gemm;
  using S = Shape<M, N, STAGES, SLOTS, CLUSTER, 1, false, false>;
  extern __shared__ __align__(1024) char memory[];
  const Problem<T> problem{
      a, b, a,     nullptr, nullptr, m,       n, k, splits, 0,
      0, 1, group, b,       a,       nullptr, 0, 0, partial};  // a pitch: there is no map of a result
  multiply<T, S, A_MN, B_MN, Partial>(problem, memory);
}
