// Products of groups, as of the experts of a mixture, on Hopper's tensor cores. Group g has the rows offs[g - 1] to offs[g]:
//
//     rows     y[i, n]    = sum over k of a[i, k] b[g, n, k]       for the rows i of each group g
//     shares   y[g, m, n] = sum over the rows i of a[i, m] b[i, n] of each group g
//
// The second is the gradient of b in the first. offs is read on the device: no size of a group is known before.
//
// Bytes: (rows k + groups k n + rows n) x sizeof(T) of either; flops: 2 rows k n.
#include "gemm/wgmma.cuh"

// Grid: as many blocks as run at one time, or fewer. Block, shared memory: see gemm_wgmma(). Groups: at most 2 N, of which tiles are
// counted where biases would be. A tile has rows of one group, and reads the next group's below them, which it does not store.
// Rows from offs[groups - 1] on are zeros. B_MN: b is stored [g][k][n] instead of [g][n][k]. n is a multiple of 8.
template <typename T, int M, int N, int STAGES, int SLOTS, bool LATE, bool B_MN>
__global__ void __launch_bounds__(wgmma_gemm::kThreads, 1)
    grouped_mm_rows(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b,
                    const __grid_constant__ TensorMap y_map, T* y, const int* offs, int rows, int n, int k, int groups,
                    int group) {
  using namespace wgmma_gemm;
  using S = Shape<M, N, STAGES, SLOTS, 1, 1, false, LATE>;
  extern __shared__ __align__(1024) char memory[];
  const long long end = static_cast<long long>(rows) * n;
  const long long tail = static_cast<long long>(min(max(offs[groups - 1], 0), rows)) * n;
  for (long long i = tail + (blockIdx.x * kThreads + threadIdx.x) * 8LL; i < end; i += gridDim.x * kThreads * 8LL) {
    *reinterpret_cast<uint4*>(y + i) = {0, 0, 0, 0};
  }
  const Problem<T> problem{a, b, y_map, y, nullptr, rows,    n, k, groups, 0,
                           1, 0, group, b, y_map,   nullptr, 0, 0, offs,   rows};
  multiply<T, S, false, B_MN, OfRows>(problem, memory);
}

// The same grid, block and shared memory. A stage begins at the group's row, and ends with zeros where the next group begins; of an
// empty group it is zeros.
template <typename T, int M, int N, int STAGES, int SLOTS, bool LATE>
__global__ void __launch_bounds__(wgmma_gemm::kThreads, 1)
    grouped_mm_shares(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b,
                      const __grid_constant__ TensorMap y_map, T* y, const int* offs, int rows, int m, int n,
                      int groups, int group) {
  using namespace wgmma_gemm;
  using S = Shape<M, N, STAGES, SLOTS, 1, 1, false, LATE>;
  extern __shared__ __align__(1024) char memory[];
  const Problem<T> problem{a, b, y_map, y, nullptr, m,       n, rows, groups, 0,
                           0, 0, group, b, y_map,   nullptr, 0, 0,    offs,   rows};
  multiply<T, S, true, true, OfShares>(problem, memory);
}
