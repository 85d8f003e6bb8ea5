// z[m, n] = sum over k of x[m, k] weight[n, k] + bias[n],  y = f(z): linear_act's product, on Hopper's tensor cores.
//
// Bytes: (m k + k n + m n) x sizeof(T), and m n more for z, where backward will read it; flops: 2 m n k.
//
// Reached on an H100, bf16, m = 16384, n = 3072, k = 768: relu in 121 us, 639 TFLOP/s, where cuBLAS and torch.relu take 185; the
// exact gelu, with z kept, in 168, where they take 189.
#include "common/elementwise/activations.cuh"
#include "gemm/wgmma.cuh"

// Grid, block, shared memory, who owns what: see gemm_wgmma(). F: f. bias and kept, which is where z goes, may be null.
// kept is [m, n], and has a map alike y's.
template <typename T, class F, int M, int N, int STAGES, int SLOTS, int CLUSTER, bool PINGPONG, bool LATE>
__global__ void __launch_bounds__(wgmma_gemm::kThreads, 1)
    linear_act_wgmma(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b,
                     const __grid_constant__ TensorMap y_map, const __grid_constant__ TensorMap kept_map, T* y, T* kept,
                     long long kept_row, long long kept_part, const T* bias, int m, int n, int k, int pitch,
                     int group) {
  using namespace wgmma_gemm;
  using S = Shape<M, N, STAGES, SLOTS, CLUSTER, 1, PINGPONG, LATE>;
  extern __shared__ __align__(1024) char memory[];
  const Problem<T> problem{a, b, y_map, y,     bias, m,        n,    k,        1,
                           0, 0, pitch, group, b,    kept_map, kept, kept_row, kept_part};
  multiply<T, S, false, false, Activated<F>>(problem, memory);
}
