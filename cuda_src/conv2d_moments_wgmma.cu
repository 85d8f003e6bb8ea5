// y[m, n] = sum over k of x[m, k] weight[n, k], and of each column of y the moments: a convolution of one tap, whose rows are
// pixels, in front of a normalisation over a batch, on Hopper's tensor cores.
//
// Bytes: (m k + k n + m n) x sizeof(T), where a pass of its own for the moments reads m n more; flops: 2 m n k.
//
// On an H100 in bf16, 128 images, us, alone and with batch_norm_act behind it; and cuDNN's product with batch_norm_act's two passes:
//   64 -> 256, 56 x 56     106   272      98   338
//   256 -> 64, 56 x 56      92   141      93   165
//   128 -> 512, 28 x 28     52   139      54   180
//   256 -> 1024, 14 x 14    32    77      32    96
//   512 -> 2048, 7 x 7      27    51      26    60
//   2048 -> 512, 7 x 7      26    39      21    38: there it is not taken
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
  Problem<T> problem{a, b, y_map, nullptr, nullptr, m, n, k, 1, 0, 0, 0, 1, b, y_map, nullptr, 0, 0};
  problem.reduced = &moments;
  multiply<T, S, false, false, Measured>(problem, memory);
}
