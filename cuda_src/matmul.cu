// y[b, m, n] = sum over k of a[b, m, k] b[b, k, n]
// grad_a = grad_y b^T,  grad_b = a^T grad_y: products again, of the same kernel with strides exchanged.
//
// Bytes: (m k + k n + m n) x sizeof(T); flops: 2 m n k.
//
// On an H200, m = n = k = 4096 (cuBLAS): bf16 389 to 420 TFLOP/s by which operand is transposed (770); fp32 38 (51).
// 1001 x 999 x 1003 in bf16 takes 36 us (31), copies to rows of whole vectors included. Lost: Hopper's wgmma and bulk
// copies, since mma.sync cannot fill its tensor cores; in fp32, registers: 128 a thread, of which some spill.
#include "gemm/gemm.cuh"

// Grid: tiles x splits x batches, see GemmBlock. Block: kGemmThreads<TILE>. Shared memory: gemm_tile's ring. A block owns
// one TILE x TILE tile of y, or of one split's partial sums; sums in acc_t<T>.
template <typename T, int TILE>
__global__ void __launch_bounds__(kGemmThreads<T, TILE>, kGemmBlocks<T, TILE>)
    matmul_fwd(const T* __restrict__ a, const T* __restrict__ b, T* __restrict__ y, acc_t<T>* __restrict__ partial,
               const Gemm gemm) {
  constexpr int W = GemmEngine<T, TILE>::W;
  const GemmBlock block(gemm, kTileM<TILE>, kTileN<TILE>);
  gemm_tile<T, TILE>(block, MatrixOperand<T>::template make<W>(a, gemm, gemm.a, block.batch, gemm.m, block.k_end),
                     MatrixOperand<T>::template make<W>(b, gemm, gemm.b, block.batch, gemm.n, block.k_end), [&] {
                       return Output<T>::template make<W>(y, partial, nullptr, nullptr, gemm, block.batch, block.split);
                     });
}

// Grid, block, shared memory: see gemm_add_splits().
template <typename T>
__global__ void matmul_sum(const acc_t<T>* __restrict__ partial, T* __restrict__ y, const Gemm gemm) {
  gemm_add_splits<T>(partial, y, nullptr, nullptr, gemm);
}
