// y[m, n] = sum over k of x[m, k] weight[n, k] + bias[n]
// grad_x = grad_y weight,  grad_weight = grad_y^T x,  grad_bias = column sums of grad_y
//
// Each is one GEMM; grad_bias is the column of grad_weight that belongs to one more feature of x, always 1, so grad_y is
// read once for both and the sum has GEMM's order and precision.
// Bytes: (m k + k n + m n) x sizeof(T) each; flops: 2 m n k each.
//
// On an H200 in bf16, forward and backward in TFLOP/s (cuBLAS): 4096^3 409 and 374 (768 and 744), 8192 x 14336 x 4096 432
// and 357 (792 and 765); fp32 64 x 128 x 3136 14 and 21 us (31 and 23). Lost: as in matmul.cu,
// Hopper's wgmma and bulk copies, without which its tensor cores are not filled.
#include "gemm/gemm.cuh"

// Grid: tiles x splits, see GemmBlock. Block: kGemmThreads<TILE>. Shared memory: gemm_tile's ring. A block owns one
// TILE x TILE tile of the result, or of one split's partial sums; sums in acc_t<T>. Forward: a = x, b = weight^T, and
// bias may be null. Backward: bias null; column takes grad_bias, where gemm.ones asks for it.
template <typename T, int TILE>
__global__ void __launch_bounds__(kGemmThreads<T, TILE>, kGemmBlocks<T, TILE>)
    linear_fwd(const T* __restrict__ a, const T* __restrict__ b, const T* __restrict__ bias, T* __restrict__ y,
               T* __restrict__ column, acc_t<T>* __restrict__ partial, const Gemm gemm) {
  constexpr int W = GemmEngine<T, TILE>::W;
  const GemmBlock block(gemm, kTileM<TILE>, kTileN<TILE>);
  gemm_tile<T, TILE>(
      block, MatrixOperand<T>::template make<W>(a, gemm, gemm.a, block.batch, gemm.m, block.k_end),
      MatrixOperand<T>::template make<W>(b, gemm, gemm.b, block.batch, gemm.n, block.k_end,
                                         TILE != 256 && gemm.ones && block.n0 + kTileN<TILE> > gemm.n),
      [&] { return Output<T>::template make<W>(y, partial, bias, column, gemm, block.batch, block.split); });
}

// Grid, block, shared memory: see gemm_add_splits().
template <typename T>
__global__ void linear_sum(const acc_t<T>* __restrict__ partial, const T* __restrict__ bias, T* __restrict__ y,
                           T* __restrict__ column, const Gemm gemm) {
  gemm_add_splits<T>(partial, y, bias, column, gemm);
}
