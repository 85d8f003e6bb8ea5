// y[m, n] = scale_a[m] scale_b[n] sum over k of a[m, k] b[n, k] + bias[n], of 8-bit floating-point a and b, on Hopper's tensor cores.
//
// Bytes: m k + k n + m n sizeof(T); flops: 2 m n k.
//
// Reached on an H100, TFLOP/s of e4m3 with a scale for each row, bf16 results, sums promoted (in brackets cuBLAS): 8192x4096x4096
// 1345 (1255), 8192x14336x4096 1401 (1248), 8192x8192x8192 1459 (1252), 4096x4096x4096 1286 (1211), 64x4096x4096 146 (124),
// 16x4096x4096 35 (30). With fast sums, and with one scale for all, cuBLAS has up to a tenth more, and is what runs.
#include "gemm/wgmma.cuh"

// Grid, block, shared memory: see gemm_wgmma(). A, B: what a byte of each operand is; both have k in lines of 16 bytes, and k counts
// them by two. Where by_row is 0 there is one scale of each operand. bias may be null. promoted: the sums of each 128 of k are added
// in fp32; else all of k is summed in the tensor cores, which keep fewer bits.
template <typename T, class A, class B, int M, int N, int STAGES, int SLOTS, int CLUSTER, int SPLIT>
__global__ void __launch_bounds__(wgmma_gemm::kThreads, 1)
    scaled_mm_wgmma(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b,
                    const __grid_constant__ TensorMap y_map, T* y, const T* bias, const float* scale_a,
                    const float* scale_b, int by_row, bool promoted, int m, int n, int k, int pitch, int group) {
  using namespace wgmma_gemm;
  using S = Shape<M, N, STAGES, SLOTS, CLUSTER, SPLIT, false, false>;
  extern __shared__ __align__(1024) char memory[];
  Problem<T> problem{a, b, y_map, y, bias, m, n, k, 1, 0, 0, pitch, group, b, y_map, nullptr, 0, 0};
  problem.scale_a = scale_a, problem.scale_b = scale_b, problem.by_row = by_row, problem.promoted = promoted;
  multiply<T, S, false, false, Scaled<A, B>>(problem, memory);
}
