// y[m, n] = sum over k of a[m, k] b[n, k] + bias[n]: products of half types on Hopper's tensor cores, for matmul and linear.
//
// Bytes: (m k + k n + m n) x sizeof(T); flops: 2 m n k.
#include "gemm/wgmma.cuh"

// Grid: clusters of CLUSTER blocks, as many as run at one time, or fewer. Block: kThreads. Shared memory: the stages, the
// consumers' slots, their biases and the barriers, see Block; from a multiple of 1024 on. A consumer warpgroup owns 64 or 128
// rows of a tile, sums in fp32 in the order of k. A_MN, B_MN: the operand is stored [k][m] or [k][n] instead of [m][k] or
// [n][k]. y is a pointer and a map of one array; `pitch` is 0 where the map is valid. bias may be null.
template <typename T, int M, int N, int STAGES, int SLOTS, int CLUSTER, bool PINGPONG, bool LATE, bool A_MN, bool B_MN>
__global__ void __launch_bounds__(wgmma_gemm::kThreads, 1)
    gemm_wgmma(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b,
               const __grid_constant__ TensorMap y_map, T* y, const T* bias, int m, int n, int k, int batches,
               int a_moves, int b_moves, int pitch, int group) {
  using namespace wgmma_gemm;
  using S = Shape<M, N, STAGES, SLOTS, CLUSTER, 1, PINGPONG, LATE>;
  extern __shared__ __align__(1024) char memory[];
  const Problem<T> problem{a,       b,       y_map, y,     bias, m,     n,       k, batches,
                           a_moves, b_moves, pitch, group, b,    y_map, nullptr, 0, 0};
  multiply<T, S, A_MN, B_MN, Sums>(problem, memory);
}
