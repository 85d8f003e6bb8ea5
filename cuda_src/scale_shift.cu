// y = x weight + bias                weight and bias broadcast to x
// grad_x = grad_y weight
// grad_weight = sum grad_y x         over the dimensions that weight is broadcast along
// grad_bias = sum grad_y             over those that bias is
//
// Bytes per element: forward 2 x sizeof(T) (weight and bias stay in the caches), backward 3 x sizeof(T): one pass reads
// grad_y and x, writes grad_x and leaves partial sums. Two and four flops.
//
// In memory order x is [outer x channels x inner], with one weight per channel:
//   weight over the last dimensions   [rows x cols x 1]          one number        [1 x 1 x n]
//   weight (C, 1, 1), NCHW            [N x C x H W]               the same, NHWC    [N H W x C x 1]
// Where inner is short, x is read as rows of channels x inner columns; else a warp reads along the inner spans of one
// channel. Either leaves partial sums [slabs x channels x inner'] that scale_shift_bwd_finish adds up, in a fixed order.
// A thread adds its few elements in acc_t<T>; sums across threads and slabs are few, and made in double.
#include "common/broadcast.cuh"
#include "common/column_sums.cuh"
#include "common/reduce.cuh"

// Grid, block: see broadcast(). x, weight and bias have any strides, 0 where broadcast; y is dense.
template <typename T, bool BIAS>
__global__ void scale_shift_fwd(const T* __restrict__ x, const T* __restrict__ weight, const T* __restrict__ bias,
                                T* __restrict__ y, const __grid_constant__ Layout<2 + BIAS> layout, long long n) {
  using A = acc_t<T>;
  if constexpr (BIAS) {
    const T* const in[] = {x, weight, bias};
    broadcast<T>(layout, n, [](const A(&value)[3]) { return value[0] * value[1] + value[2]; }, y, in);
  } else {
    const T* const in[] = {x, weight};
    broadcast<T>(layout, n, [](const A(&value)[2]) { return value[0] * value[1]; }, y, in);
  }
}

// W elements of one channel or one row, and what they add to the sums. x and grad_x may be null: no sum of grad_y x is
// wanted, no gradient of x.
template <typename T, int W> struct Strip {
  using A = acc_t<T>;
  A sum_weight[W] = {}, sum_bias[W] = {};

  __device__ __forceinline__ void add(const T* grad_y, const T* x, T* grad_x, const A (&scale)[W], bool aligned) {
    const Vec<T, W> grads = load_some<T, W>(grad_y, aligned);
    const Vec<T, W> values = x ? load_some<T, W>(x, aligned) : Vec<T, W>{};
    Vec<T, W> product;
#pragma unroll
    for (int k = 0; k < W; ++k) {
      const A grad = to_acc(grads.data[k]);
      sum_weight[k] += grad * to_acc(values.data[k]);
      sum_bias[k] += grad;
      product.data[k] = from_acc<T>(grad * scale[k]);
    }
    if (grad_x) store_some<T, W>(grad_x, product, aligned);
  }
};

// x is [rows x columns], and columns k * inner to (k + 1) * inner - 1 share weight[k].
// Grid: tiles x slabs, folded, tiles fastest: a tile is blockDim.x * W columns, a slab `slab_rows` rows. Block: (x, y)
// of kSumThreads in all; each thread owns W columns, and every blockDim.y-th row of its slab. VEC: columns is a multiple of W.
// partial: sums of grad_y x [slabs x columns] where x is given, then sums of grad_y where bias_wanted.
template <typename T, bool VEC>
__global__ void scale_shift_bwd_columns(const T* __restrict__ grad_y, const T* __restrict__ x,
                                        const T* __restrict__ weight, T* __restrict__ grad_x,
                                        acc_t<T>* __restrict__ partial, int bias_wanted, long long rows,
                                        long long columns, long long inner, long long slab_rows) {
  constexpr int W = VEC ? kVecWidth<T> : 1;
  using A = acc_t<T>;
  __shared__ double shared[kSumThreads * W];
  const unsigned tiles = (columns + blockDim.x * W - 1) / (blockDim.x * W);
  const long long slab = blockIdx.x / tiles, slabs = gridDim.x / tiles;
  const long long column = (blockIdx.x % tiles * (long long)blockDim.x + threadIdx.x) * W;
  const bool aligned = VEC && is_aligned16(grad_y) && is_aligned16(x) && is_aligned16(grad_x);
  Strip<T, W> strip;
  if (column < columns) {
    A scale[W] = {};
#pragma unroll
    for (int k = 0; k < W; ++k) {
      if (grad_x) scale[k] = to_acc(weight[inner == 1 ? column + k : (column + k) / inner]);
    }
    const long long last = min((slab + 1) * slab_rows, rows);
#pragma unroll 4
    for (long long row = slab * slab_rows + threadIdx.y; row < last; row += blockDim.y) {
      const long long at = row * columns + column;
      strip.add(grad_y + at, x ? x + at : nullptr, grad_x ? grad_x + at : nullptr, scale, aligned);
    }
  }
  A* to = partial + slab * columns + column;
  if (x) store_sum_over_y<W>(strip.sum_weight, to, column < columns, shared);
  if (bias_wanted) store_sum_over_y<W>(strip.sum_bias, to + (x ? slabs * columns : 0), column < columns, shared);
}

// x is [outer x channels x inner].
// Grid: any that gives each slab of each channel a warp, channels fastest. Block: kSumThreads. A warp owns `slab_units` units
// of W elements of one channel's outer x inner / W; its lanes take every 32nd. VEC: inner is a multiple of W.
// partial: sums of grad_y x [slabs x channels] where x is given, then sums of grad_y where bias_wanted.
template <typename T, bool VEC>
__global__ void scale_shift_bwd_spans(const T* __restrict__ grad_y, const T* __restrict__ x,
                                      const T* __restrict__ weight, T* __restrict__ grad_x,
                                      acc_t<T>* __restrict__ partial, int bias_wanted, long long outer,
                                      long long channels, long long inner, long long slabs, long long slab_units) {
  constexpr int W = VEC ? kVecWidth<T> : 1;
  using A = acc_t<T>;
  const long long slab = global_thread() / kWarp / channels, channel = global_thread() / kWarp % channels;
  if (slab >= slabs) return;
  const bool aligned = VEC && is_aligned16(grad_y) && is_aligned16(x) && is_aligned16(grad_x);
  A scale[W] = {};
#pragma unroll
  for (int k = 0; k < W; ++k) {
    if (grad_x) scale[k] = to_acc(weight[channel]);
  }
  const long long span = inner / W, last = min((slab + 1) * slab_units, outer * span);
  long long unit = slab * slab_units + threadIdx.x % kWarp;
  long long a = unit / span, b = unit % span;
  const long long step_a = kWarp / span, step_b = kWarp % span;
  Strip<T, W> strip;
#pragma unroll 4
  for (; unit < last; unit += kWarp) {
    const long long at = ((a * channels + channel) * span + b) * W;
    strip.add(grad_y + at, x ? x + at : nullptr, grad_x ? grad_x + at : nullptr, scale, aligned);
    a += step_a, b += step_b;  // a division per unit would cost more than the sums
    if (b >= span) ++a, b -= span;
  }
  double total_weight = 0, total_bias = 0;
#pragma unroll
  for (int k = 0; k < W; ++k) total_weight += strip.sum_weight[k], total_bias += strip.sum_bias[k];
  total_weight = warp_reduce<Sum>(total_weight);
  total_bias = warp_reduce<Sum>(total_bias);
  if (threadIdx.x % kWarp > 0) return;
  const long long at = slab * channels + channel;
  if (x) partial[at] = total_weight;
  if (bias_wanted) partial[at + (x ? slabs * channels : 0)] = total_bias;
}

// grad[channel] = the sum of partial [slabs x channels x inner] over slabs and inner; for blockIdx.y = 1 of the second such
// array, into grad_second. Grid: ceil(channels / blockDim.x), 1 or 2. Block: (x, y) of kSumThreads in all; a thread owns a
// channel and every blockDim.y-th slab.
template <typename T>
__global__ void scale_shift_bwd_finish(const acc_t<T>* __restrict__ partial, T* __restrict__ grad_first,
                                       T* __restrict__ grad_second, long long slabs, long long channels,
                                       long long inner) {
  using A = acc_t<T>;
  __shared__ double shared[kSumThreads];
  const long long channel = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  partial += blockIdx.y * slabs * channels * inner;
  double sum[1] = {};
  if (channel < channels) {
    for (long long slab = threadIdx.y; slab < slabs; slab += blockDim.y) {
      const A* from = partial + (slab * channels + channel) * inner;
      for (long long b = 0; b < inner; ++b) sum[0] += from[b];
    }
  }
  sum_over_y<1>(sum, shared);
  if (threadIdx.y > 0 || channel >= channels) return;
  (blockIdx.y == 0 ? grad_first : grad_second)[channel] = from_acc<T>(static_cast<A>(sum[0]));
}
