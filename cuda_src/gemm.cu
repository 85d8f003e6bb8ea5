// matmul       y[b, m, n] = sum over k of a[b, m, k] b[b, k, n]
//              grad_a = grad_y b^T,  grad_b = a^T grad_y: products again, of the same kernel with strides exchanged
// linear       y[m, n] = sum over k of x[m, k] weight[n, k] + bias[n]
//              grad_x = grad_y weight,  grad_weight = grad_y^T x,  grad_bias = column sums of grad_y
// linear_act   z as y of linear,  y = f(z) + residual
//              grad_z = grad_y f'(z), and from it as of linear;  grad_residual = grad_y
//
// Each is one GEMM. grad_bias is the column of grad_weight that belongs to one more feature of x, always 1, so grad_y is
// read once for both and the sum has GEMM's order and precision. What follows a product is computed in its epilogue;
// gemm_wgmma.cu and linear_act_wgmma.cu have Hopper's. Backward of linear_act is of the kernels of the activation, relu.cu,
// gelu.cu or silu.cu, and of these.
// Bytes: (m k + k n + m n) x sizeof(T) each, and m n more for z, where backward will read it, and for a residual; flops:
// 2 m n k.
//
// On an H200 in bf16, TFLOP/s (cuBLAS): matmul of 4096^3 389 to 420 by which operand is transposed (770), linear 409 forward
// and 374 backward (768 and 744), of 8192 x 14336 x 4096 432 and 357 (792 and 765); in fp32 4096^3 38 (51), and linear of
// 64 x 128 x 3136 14 and 21 us (31 and 23). matmul of 1001 x 999 x 1003 in bf16 takes 36 us (31), copies to rows of whole
// vectors included. Lost: Hopper's wgmma and bulk copies, without which its tensor cores are not filled; in fp32,
// registers: 128 a thread, of which some spill.
#include "common/elementwise/activations.cuh"
#include "gemm/gemm.cuh"

// f(z) + residual of a result whose rows are n long. residual, and kept, where z goes, may be null and are laid out alike.
template <typename T> struct Activated {
  using A = acc_t<T>;
  const T* residual;
  T* kept;
  int function;
  long long n;

  // `whole`: the W elements of the result are one access.
  template <int W> __device__ __forceinline__ Vec<T, W> operator()(int row, int column, const A (&z)[W],
                                                                   bool whole) const {
    const long long at = row * n + column;
    Vec<T, W> packed, pre;
    A add[W] = {};
    if (residual) {
      if (whole && is_aligned16(residual)) packed = load_vec<T, W>(residual + at);
#pragma unroll
      for (int e = 0; e < W; ++e) add[e] = to_acc(whole && is_aligned16(residual) ? packed.data[e] : residual[at + e]);
    }
#pragma unroll
    for (int e = 0; e < W; ++e) {
      pre.data[e] = from_acc<T>(z[e]);
      packed.data[e] = from_acc<T>(activate<T>(function, z[e]) + add[e]);
    }
    if (kept) {
      if (whole && is_aligned16(kept)) store_vec<T, W>(kept + at, pre);
      else
#pragma unroll
        for (int e = 0; e < W; ++e) kept[at + e] = pre.data[e];
    }
    return packed;
  }
};

// Grid: tiles x splits x batches, see GemmBlock. Block: kGemmThreads<TILE>. Shared memory: gemm_tile's ring. A block owns
// one TILE x TILE tile of the result, or of one split's partial sums; sums in acc_t<T>. bias, residual, kept and column may be
// null; column takes the sums of the rows of a, where gemm.ones asks for them.
template <typename T, int TILE>
__global__ void __launch_bounds__(kGemmThreads<T, TILE>, kGemmBlocks<T, TILE>)
    gemm_fwd(const T* __restrict__ a, const T* __restrict__ b, const T* __restrict__ bias,
             const T* __restrict__ residual, int function, T* __restrict__ y, T* __restrict__ kept,
             T* __restrict__ column, acc_t<T>* __restrict__ partial, const Gemm gemm) {
  constexpr int W = GemmEngine<T, TILE>::W;
  const GemmBlock block(gemm, kTileM<TILE>, kTileN<TILE>);
  gemm_tile<T, TILE>(block, MatrixOperand<T>::template make<W>(a, gemm, gemm.a, block.batch, gemm.m, block.k_end),
                     MatrixOperand<T>::template make<W>(b, gemm, gemm.b, block.batch, gemm.n, block.k_end,
                                                        TILE != 256 && gemm.ones && block.n0 + kTileN<TILE> > gemm.n),
                     [&] {
                       const Activated<T> epilogue{residual, kept, function, gemm.n};
                       return Output<T, Activated<T>>::template make<W>(y, partial, bias, column, gemm, block.batch,
                                                                        block.split, epilogue);
                     });
}

// Grid, block, shared memory: see gemm_add_splits().
template <typename T>
__global__ void gemm_sum(const acc_t<T>* __restrict__ partial, const T* __restrict__ bias,
                         const T* __restrict__ residual, int function, T* __restrict__ y, T* __restrict__ kept,
                         T* __restrict__ column, const Gemm gemm) {
  gemm_add_splits<T>(partial, y, bias, column, gemm, Activated<T>{residual, kept, function, gemm.n});
}
