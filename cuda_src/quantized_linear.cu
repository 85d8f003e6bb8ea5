// A linear layer of few rows, of which the weight has 8 or 4 bits: int8, float8_e4m3fn, or two numbers from 0 to 15 a byte.
//
//   y[m, n] = sum over k of x[m, k] (w[n, k] - zero[n, g]) scale[n, g] + bias[n]      where g = k / group
//           = sum over g of scale[n, g] (sum of x[m, k] w[n, k] - zero[n, g] sum of x[m, k]) + bias[n]
//
// Numbers of 8 bits, and those of 4 less 8, are bf16 and fp16 exactly. Tensor cores add up x w, and x where there are zero points,
// in fp32; scales are applied behind that, and the result is rounded once, at the store.
// Bytes: the weight once, x once for each 16 rows of the weight, most of that from L1.
#include "quantized/product.cuh"

// Grid: (16 rows of the weight each, 8 TILES rows of x each). Block: whole warps, at most 512 threads, which have shares of k that lie
// behind each other, in steps of 4 BYTES of a row; what they have is added in their order. Shared memory: 8 TILES rows of 20
// floats for each warp. BYTES: 4, 8 or 16, which row_bytes and the addresses of rows are multiples of; a group is k, or whole
// steps. k is a multiple of 8 and of BYTES, and rows of x begin at 16-byte boundaries. Of two scales one is null, and so it is with
// zero points, which may both be.
template <typename T, typename W, int TILES, int BYTES>
__global__ void __launch_bounds__(512)
    quantized_linear_fwd(const T* x, const unsigned char* __restrict__ weight, const float* scale, const T* scale_half,
                         const float* zero, const T* zero_half, const T* bias, T* __restrict__ y, long long scale_row,
                         long long scale_group, long long zero_row, long long zero_group, long long row_bytes,
                         long long x_row, int m, int n, int k, int group) {
#if __CUDA_ARCH__ >= 800
  extern __shared__ float partial[];
  quantized::product<T, W, TILES, BYTES>(x, weight, {scale, scale_half, scale_row, scale_group},
                                         {zero, zero_half, zero_row, zero_group}, bias, y,
                                         {m, n, k, group, row_bytes, x_row}, partial);
#endif
}
