// gate[m, n] = sum over k of x[m, k] weight_gate[n, k],  up likewise,  y = f(gate) up: on Hopper's tensor cores.
//
// Bytes: (m k + 2 k n + m n) x sizeof(T), and 2 m n more for gate and up, where backward will read them; flops: 4 m n k.
//
// Reached on an H100, bf16 and silu, gate and up kept: m = 8192, n = 14336, k = 4096 in 2.90 ms, 663 TFLOP/s, where two products
// of cuBLAS and what follows take 3.03; n = 5632, k = 2048 in 0.518 ms, where they take 0.638. gelu is not measured.
#include "common/elementwise/activations.cuh"
#include "gemm/wgmma.cuh"

// Grid, block, shared memory: see gemm_wgmma(). F: f. A tile multiplies N / 2 columns of either weight, so that a thread has both
// sums of a column. kept is where gate and up go, side by side or one after the other, as its strides say; it may be null. Its
// map is of [2, m, n].
template <typename T, class F, int M, int N, int STAGES, int SLOTS, int CLUSTER, bool PINGPONG, bool LATE>
__global__ void __launch_bounds__(wgmma_gemm::kThreads, 1)
    gated_linear_wgmma(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap gate,
                       const __grid_constant__ TensorMap up, const __grid_constant__ TensorMap y_map,
                       const __grid_constant__ TensorMap kept_map, T* y, T* kept, long long kept_row,
                       long long kept_part, int m, int n, int k, int pitch, int group) {
  using namespace wgmma_gemm;
  using S = Shape<M, N, STAGES, SLOTS, CLUSTER, 1, PINGPONG, LATE, true>;
  extern __shared__ __align__(1024) char memory[];
  const Problem<T> problem{a, gate, y_map, y,     nullptr, m,        n,    k,        1,
                           0, 0,    pitch, group, up,      kept_map, kept, kept_row, kept_part};
  multiply<T, S, false, false, Gated<F>>(problem, memory);
}
