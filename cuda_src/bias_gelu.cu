// y = gelu(x + bias)                 bias over the last dimension; gelu as in gelu.cu
// grad_x = grad_y gelu'(x + bias)
// grad_bias = sum grad_x             over the rows, of the unrounded products
//
// Bytes per element: forward 2 x sizeof(T) (bias stays in the caches), backward 3 x sizeof(T): one pass reads grad_y and x,
// writes grad_x and leaves partial sums. About 26 flops.
//
// Reached on an H200 (GB/s of those bytes, forward / backward; a copy: 4251): 16384x4096 bf16 2485 / 3119, 16384x4095
// bf16 506 / 1667. Lost: forward is bound by instructions; widths that are no multiple of a vector go by single
// elements.
#include "common/broadcast.cuh"
#include "common/column_sums.cuh"
#include "common/gelu.cuh"

// Grid, block: see broadcast(). x has any strides, bias those of its expansion to the shape of x; y is dense.
template <typename T, bool TANH>
__global__ void bias_gelu_fwd(const T* __restrict__ x, const T* __restrict__ bias, T* __restrict__ y,
                              const __grid_constant__ Layout<2> layout, long long n) {
  using A = acc_t<T>;
  const T* const in[] = {x, bias};
  broadcast<T>(layout, n, [](const A(&v)[2]) { return Gelu<TANH>::template value<T>(v[0] + v[1]); }, y, in);
}

// grad_y, x and grad_x are [rows x columns]; grad_x and partial may be null, where nobody wants them.
// Grid: tiles x slabs, folded, tiles fastest: a tile is blockDim.x * W columns, a slab `slab_rows` rows. Block: (x, y) of
// kSumThreads in all; each thread owns W columns, and every blockDim.y-th row of its slab. VEC: columns is a multiple of W.
// partial: sums [slabs x columns].
template <typename T, bool TANH, bool VEC>
__global__ void bias_gelu_bwd(const T* __restrict__ grad_y, const T* __restrict__ x, const T* __restrict__ bias,
                              T* __restrict__ grad_x, acc_t<T>* __restrict__ partial, long long rows, long long columns,
                              long long slab_rows) {
  constexpr int W = VEC ? kVecWidth<T> : 1;
  using A = acc_t<T>;
  __shared__ double shared[kSumThreads * W];
  const unsigned tiles = (columns + blockDim.x * W - 1) / (blockDim.x * W);
  const long long slab = blockIdx.x / tiles;
  const long long column = (blockIdx.x % tiles * (long long)blockDim.x + threadIdx.x) * W;
  const bool aligned = VEC && is_aligned16(grad_y) && is_aligned16(x) && is_aligned16(grad_x);
  A sum[W] = {};
  if (column < columns) {
    A shift[W];
#pragma unroll
    for (int k = 0; k < W; ++k) shift[k] = to_acc(bias[column + k]);
    const long long last = min((slab + 1) * slab_rows, rows);
#pragma unroll 2
    for (long long row = slab * slab_rows + threadIdx.y; row < last; row += blockDim.y) {
      const long long at = row * columns + column;
      const Vec<T, W> grads = load_some<T, W>(grad_y + at, aligned), values = load_some<T, W>(x + at, aligned);
      Vec<T, W> result;
#pragma unroll
      for (int k = 0; k < W; ++k) {
        const A slope = Gelu<TANH>::template at<T>(to_acc(values.data[k]) + shift[k]).slope;
        const A grad = to_acc(grads.data[k]) * slope;
        sum[k] += grad;
        result.data[k] = from_acc<T>(grad);
      }
      if (grad_x) store_some<T, W>(grad_x + at, result, aligned);
    }
  }
  if (partial) store_sum_over_y<W>(sum, partial + slab * columns + column, column < columns, shared);
}

// grad_bias[column] = the sum of partial [slabs x columns] over slabs. Grid: ceil(columns / blockDim.x). Block: (x, y) of
// kSumThreads in all; a thread owns a column and every blockDim.y-th slab.
template <typename T>
__global__ void bias_gelu_bwd_finish(const acc_t<T>* __restrict__ partial, T* __restrict__ grad_bias, long long slabs,
                                     long long columns) {
  __shared__ double shared[kSumThreads];
  const long long column = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  double sum[1] = {};
  if (column < columns) {
    for (long long slab = threadIdx.y; slab < slabs; slab += blockDim.y) sum[0] += partial[slab * columns + column];
  }
  sum_over_y<1>(sum, shared);
  if (threadIdx.y == 0 && column < columns) grad_bias[column] = from_acc<T>(static_cast<acc_t<T>>(sum[0]));
}
