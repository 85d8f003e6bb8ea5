// Products of at most 64 rows, as decoding has them, for linear, linear_act and gated_linear:
//
//   z[m, n] = sum over k of x[m, k] weight[n, k] + bias[n],  y = f(z) + residual;  of up to four weights in one launch
//   y[m, n] = f(sum over k of x[m, k] gate[n, k]) * (sum over k of x[m, k] up[n, k])
//
// and the same of x after an RMS norm, x[m, k] * norm[k] / sqrt(mean over k of x[m, k]^2 + eps): the products are of x * norm, and
// their sums are divided.
//
// Bytes: n k x sizeof(T) of the weights, which are read once; x is read by each block, from L2.
#include "gemm/few_rows.cuh"

// Grid: a cluster, or a block, for each tile of 16 N columns of each weight; of a gate half as many. Block: 32 * WARPS. Shared
// memory: see by_mma(). M: tiles of 8 rows.
template <typename T, int M, int N, int WARPS, int STAGES, int CHUNKS, int BLOCKS, bool NORM>
__global__ void __launch_bounds__(32 * WARPS, BLOCKS)
    few_rows_mma(const T* x, const T* w0, const T* w1, const T* w2, const T* w3, const T* b0, const T* b1, const T* b2,
                 const T* b3, T* y0, T* y1, T* y2, T* y3, const T* residual, T* kept, const T* norm, float eps,
                 const few_rows::Sizes sizes) {
#if __CUDA_ARCH__ >= 800
  const few_rows::Tensors<T> of{x, {w0, w1, w2, w3}, {b0, b1, b2, b3}, {y0, y1, y2, y3}, residual, kept, norm, eps};
  few_rows::by_mma<T, M, N, WARPS, STAGES, CHUNKS, NORM>(of, sizes, few_rows::Whole<T>());
#endif
}

// Grid: the same for each ROWS rows, of tiles of N * WARPS columns. Block: 32 * WARPS. Shared memory: see by_fma(). T is float.
template <typename T, int ROWS, int N, int WARPS, int STAGES, int BLOCKS, bool NORM>
__global__ void __launch_bounds__(32 * WARPS, BLOCKS)
    few_rows_fma(const T* x, const T* w0, const T* w1, const T* w2, const T* w3, const T* b0, const T* b1, const T* b2,
                 const T* b3, T* y0, T* y1, T* y2, T* y3, const T* residual, T* kept, const T* norm, float eps,
                 const few_rows::Sizes sizes) {
#if __CUDA_ARCH__ >= 800
  const few_rows::Tensors<T> of{x, {w0, w1, w2, w3}, {b0, b1, b2, b3}, {y0, y1, y2, y3}, residual, kept, norm, eps};
  few_rows::by_fma<ROWS, N, WARPS, STAGES, NORM>(of, sizes);
#endif
}
