// y[m, n] = sum over k of a[m, k] b[k, n] + c[m, n]: a product and what is added to it, as two gradients of one tensor, on Hopper's
// tensor cores.
//
// Bytes: (m k + k n + 2 m n) x sizeof(T), where a sum of its own moves 2 m n more; flops: 2 m n k.
//
// On an H100 in bf16, 128 images, us; cuDNN's gradient with a sum behind it; and bytes over 2.95 TB/s:
//   64 -> 256, 56 x 56     179   300   157
//   128 -> 512, 28 x 28     96   157    78
//   256 -> 1024, 14 x 14    46    87    39
//   512 -> 2048, 7 x 7      30    52    20
#include "gemm/wgmma.cuh"

// Grid, block, shared memory, who owns what: see gemm_wgmma(). Shared memory has two barriers more. c has a map alike y's.
template <typename T, int M, int N, int STAGES, int SLOTS>
__global__ void __launch_bounds__(wgmma_gemm::kThreads, 1)
    conv2d_add_wgmma(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b,
                     const __grid_constant__ TensorMap c_map, const __grid_constant__ TensorMap y_map, int m, int n,
                     int k, int group) {
  using namespace wgmma_gemm;
  using S = Shape<M, N, STAGES, SLOTS, 1, 1, true, false>;
  extern __shared__ __align__(1024) char memory[];
  const Problem<T> problem{a, b, y_map, nullptr, nullptr, m, n, k, 1, 0, 0, 0, group, b, c_map, nullptr, 0, 0};
  multiply<T, S, false, true, Added>(problem, memory);
}
