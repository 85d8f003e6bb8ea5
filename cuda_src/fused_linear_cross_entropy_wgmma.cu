// loss_n = a (max_n + log(sum_c exp(z_nc - max_n)) - z_nt) + s (... - mean_c z_nc), z = x W^T + b, t = target_n: the loss of
// fused_linear_cross_entropy.cu where no gradient is wanted, on Hopper's tensor cores. The logits z are in no memory: the
// product's epilogue leaves of each row and column of tiles the maximum, the sum of exponentials and, where s > 0, the sum.
//
// The kernel `parts` of that file makes losses of these. Bytes: (m k + n k) x sizeof(T), and 8 m n / N of the parts, written and read; flops: 2 m n k.
//
// Reached on an H100, bf16: 8192x4096x128256 in 12.1 to 13.0 ms, 665 to 709 TFLOP/s, beside 33 MB, where the logits in memory
// take 13.6 and 246 MB, and PyTorch 14.4 and 4,203; 16384x768x50257 in 2.15 ms, where PyTorch takes 14.4.
#include "loss/linear_wgmma.cuh"

// Grid, block, shared memory, who owns what: see gemm_wgmma(). Of row m: parts [columns of tiles, m] of (max, sum) and, where
// `totals` is not null, of sums; picked [m], written where target[m] is a class.
template <typename T, int M, int N, int STAGES, int SLOTS, int CLUSTER>
__global__ void __launch_bounds__(wgmma_gemm::kThreads, 1)
    linear_cross_entropy_wgmma(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b, const T* bias,
                               const long long* target, float2* sums, float* totals, float* picked, int m, int n, int k,
                               int group) {
  using namespace wgmma_gemm;
  using S = Shape<M, N, STAGES, SLOTS, CLUSTER, 1, false, true>;
  extern __shared__ __align__(1024) char memory[];
  const LossParts parts{target, sums, totals, picked};
  Problem<T> problem{a, b, a, nullptr, bias, m, n, k, 1, 0, 0, 1, group, b, a, nullptr, 0, 0};
  problem.reduced = &parts;  // and the pitch is 1, since there is no map of a result
  multiply<T, S, false, false, RowLosses>(problem, memory);
}
