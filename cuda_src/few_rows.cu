// Products of at most 64 rows, as decoding has them, for linear, linear_act and gated_linear:
//
//   z[m, n] = sum over k of x[m, k] weight[n, k] + bias[n],  y = f(z) + residual;  of up to four weights in one launch
//   y[m, n] = f(sum over k of x[m, k] gate[n, k]) * (sum over k of x[m, k] up[n, k])
//
// and the same of x after an RMS norm, x[m, k] * norm[k] / sqrt(mean over k of x[m, k]^2 + eps): the products are of x * norm, and
// their sums are divided.
//
// Bytes: n k x sizeof(T) of the weights, which are read once; x is read by each block, from L2.
//
// Reached on an H200 in bf16, in us (PyTorch's functions): one product after the other in a CUDA graph, weights in no cache.
//
//   k, columns                    1 row          8 rows         16             32             64
//   2048, 2048                    5.3 (6.1)      4.7 (6.1)
//   2048, 2048 + 512 + 512                       6.2 (17.5)     6.9 (17.9)     8.9 (17.9)     11.3 (18.0)
//   2048, silu of 8192 x 8192                    21.7 (26.2)    23.5 (26.6)    27.3 (27.1)
//   8192, 2048                                   12.4 (13.2)    13.1 (13.3)
//
// In fp32 2048 columns take 7.1 of one row (7.4), and 10.6 of 8 (21.9); the gate 36.8 (52.9) and 46.7 (97.1).
// Lost: 128256 columns take 135 of one row (127), 3.9 TB/s; small weights are read at 1.6 to 3.1, since a launch and the first
// answer of memory weigh more there. 32 and 64 rows of one weight are slower than cuBLAS, 7.0 and 9.0 of 2048 columns (6.4): each
// block reads all of x. Launches that do not overlap take 1 us more. Asking L2 for more than 48 KiB of a block gains 2% at most.
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
