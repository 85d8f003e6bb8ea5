// y[m, n] = sum over k of x[m, k] weight[n, k], and of each column of y the moments: a convolution of one tap, whose rows are
// pixels, in front of a normalisation over a batch, on Hopper's tensor cores.
//
// Bytes: (m k + k n + m n) x sizeof(T), where a pass of its own for the moments reads m n more; flops: 2 m n k.
#include "gemm/measured_wgmma.cuh"

// Grid, block, shared memory, who owns what: see gemm_wgmma(), but for `parts` and `counts`, and what these ask of the grid: see
// gemm/measured_wgmma.cuh.
template <typename T, int M, int N, int STAGES, int SLOTS>
__global__ void __launch_bounds__(wgmma_gemm::kThreads, 1)
    conv2d_moments_wgmma(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b,
                         const __grid_constant__ TensorMap y_map, float2* parts, float* counts, int m, int n, int k) {
  using namespace wgmma_gemm;
  using S = Shape<M, N, STAGES, SLOTS, 1, 1, true, false>;
  extern __shared__ __align__(1024) char memory[];
  const MomentParts moments{parts, counts};
  Problem<T> problem{a, b, y_map, nullptr, nullptr, m, n, k, 1, 0, 0, 0, 1, b, y_map, nullptr, 0, 0, nullptr};
  problem.reduced = &moments;
  multiply<T, S, false, false, Measured>(problem, memory);
}
