// z[m, n] = sum over k of x[m, k] weight[n, k] + bias[n],  y = f(z) + residual
// grad_z = grad_y f'(z), and the gradients of x, weight and bias from it as in linear.cu;  grad_residual = grad_y
//
// Forward in the epilogue of one GEMM; linear_act_wgmma.cu has Hopper's. Backward is of the kernels of the activation, relu.cu,
// gelu.cu or silu.cu, and of linear.cu.
// Bytes: (m k + k n + m n) x sizeof(T), and m n more for z, where backward will read it, and for a residual; flops: 2 m n k.
#include "common/elementwise/activations.cuh"
#include "gemm/gemm.cuh"

// Which f, as _dispatch/epilogues.py counts them. It is a number of the launch: the epilogue is a small part of a tile's work.
enum Function { kIdentity, kRelu, kGeluExact, kGeluTanh, kSilu };

template <typename T> __device__ __forceinline__ acc_t<T> activate(int function, acc_t<T> z) {
  switch (function) {
    case kRelu:
      return Relu::value<T>(z);
    case kGeluExact:
      return GeluExact::value<T>(z);
    case kGeluTanh:
      return GeluTanh::value<T>(z);
    case kSilu:
      return Silu::value<T>(z);
    default:
      return z;
  }
}

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

// Grid, block, shared memory, who owns what: see linear_fwd(). kept and residual may be null.
template <typename T, int TILE>
__global__ void __launch_bounds__(kGemmThreads<T, TILE>, kGemmBlocks<T, TILE>)
    linear_act_fwd(const T* __restrict__ a, const T* __restrict__ b, const T* __restrict__ bias,
                   const T* __restrict__ residual, int function, T* __restrict__ y, T* __restrict__ kept,
                   acc_t<T>* __restrict__ partial, const Gemm gemm) {
  constexpr int W = GemmEngine<T, TILE>::W;
  const GemmBlock block(gemm, kTileM<TILE>, kTileN<TILE>);
  gemm_tile<T, TILE>(block, MatrixOperand<T>::template make<W>(a, gemm, gemm.a, block.batch, gemm.m, block.k_end),
                     MatrixOperand<T>::template make<W>(b, gemm, gemm.b, block.batch, gemm.n, block.k_end), [&] {
                       const Activated<T> epilogue{residual, kept, function, gemm.n};
                       return Output<T, Activated<T>>::template make<W>(y, partial, bias, nullptr, gemm, block.batch,
                                                                        block.split, epilogue);
                     });
}

// Grid, block, shared memory: see gemm_add_splits().
template <typename T>
__global__ void linear_act_sum(const acc_t<T>* __restrict__ partial, const T* __restrict__ bias,
                               const T* __restrict__ residual, int function, T* __restrict__ y, T* __restrict__ kept,
                               const Gemm gemm) {
  gemm_add_splits<T>(partial, y, bias, nullptr, gemm, Activated<T>{residual, kept, function, gemm.n});
}
