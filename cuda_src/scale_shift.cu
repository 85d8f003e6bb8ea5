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
// Where inner is small, x is read as rows of channels x inner columns; else a warp reads along the neighbours of one
// channel. Either leaves partial sums [slabs x channels x inner'] that column_finalize adds up, in a fixed order, unless a
// warp has all of a channel. A thread adds its few elements in acc_t<T>; sums across threads and slabs are few, and made in
// double.
//
// Reached on an H200 (GB/s of those bytes, forward / backward; a copy: 4226): 131072x1024 per column bf16 4022 / 3824,
// fp16 4024 / 3830, fp32 4134 / 4010, scalar 4017 / 3807, per row 3995 / 4144, 64x256x56x56 per channel 3827 / 3412,
// 16383x1001 per column 2853 / 2348, 1000003x17 3004 / 2317. Lost: in backward the second launch (column_finalize
// alone, of cold caches: 6.9 us); in what takes 20 or 40 us, the start of launches.
//
// SCALE_SHIFT_VECTORS, which a thread has under way where each column has its weight, is defined by _scale_shift.py.
#include "common/elementwise/broadcast.cuh"
#include "common/reduce/column.cuh"
#include "common/elementwise/broadcast_params.cuh"

// Grid, block: see broadcast_params(). x and y are dense and laid out alike; bias may be null.
template <typename T, int FORM>
__global__ void scale_shift_fwd_params(const T* __restrict__ x, const T* __restrict__ weight,
                                       const T* __restrict__ bias, T* __restrict__ y,
                                       const __grid_constant__ BroadcastParams params, long long n) {
  using A = acc_t<T>;
  const T* const in[] = {weight, bias};
  broadcast_params<FORM, FORM == kPerColumn ? SCALE_SHIFT_VECTORS : 1>(
      params, n, [](A x, const A(&p)[2]) { return x * p[0] + p[1]; }, y, x, in);
}

// Grid, block: see broadcast(). x, weight and bias have any strides, 0 where broadcast; y is dense. Where bias is null, the
// layout has the weight's strides for it.
template <typename T>
__global__ void scale_shift_fwd_strided(const T* __restrict__ x, const T* __restrict__ weight,
                                        const T* __restrict__ bias, T* __restrict__ y,
                                        const __grid_constant__ Layout<3> layout, long long n) {
  using A = acc_t<T>;
  const bool shifts = bias != nullptr;
  const T* const in[] = {x, weight, shifts ? bias : weight};
  broadcast<T>(
      layout, n, [shifts](const A(&value)[3]) { return value[0] * value[1] + (shifts ? value[2] : A(-0.0)); }, y, in);
}

template <typename A> struct ScaleShift {
  static constexpr int SUMS = 2;

  __device__ __forceinline__ A operator()(A grad_y, A x, A weight, A (&term)[SUMS]) const {
    term[0] = grad_y * x;
    term[1] = grad_y;
    return grad_y * weight;
  }
};

// Grid, block, partial: see sum_columns(). What nobody wants is null: grad_x, and weight with it; grad_weight, and x with it;
// grad_bias. The gradients of the parameters are only asked whether they are wanted: column_finalize writes them.
template <typename T>
__global__ void __launch_bounds__(COLUMN_THREADS, kColumnBlocks<T>)
    scale_shift_bwd_columns(const T* __restrict__ grad_y, const T* __restrict__ x, const T* __restrict__ weight,
                            T* __restrict__ grad_x, const T* grad_weight, const T* grad_bias,
                            acc_t<T>* __restrict__ partial, const __grid_constant__ Columns columns) {
  const int wanted = (grad_weight != nullptr) | (grad_bias != nullptr) << 1;
  sum_columns<1, T>(columns, ScaleShift<acc_t<T>>(), grad_y, x, weight, grad_x, partial, wanted);
}

// Grid, block: see sum_channels(). What nobody wants is null, as above. partial: [2][slabs][channels], or null where there is
// one slab, so that a warp has the sum itself.
template <typename T, bool UNALIGNED>
__global__ void __launch_bounds__(COLUMN_THREADS, kChannelBlocks<T>)
    scale_shift_bwd_channels(const T* __restrict__ grad_y, const T* __restrict__ x, const T* __restrict__ weight,
                             T* __restrict__ grad_x, T* grad_weight, T* grad_bias, acc_t<T>* __restrict__ partial,
                             const __grid_constant__ Channels channels) {
  sum_channels<UNALIGNED, T>(channels, ScaleShift<acc_t<T>>(), grad_y, x, weight, grad_x,
                             [&](int s, long long slab, long long channel, double total) {
                               T* const to = s == 0 ? grad_weight : grad_bias;
                               if (partial) partial[(s * channels.slabs + slab) * channels.channels + channel] = total;
                               else if (to) to[channel] = from_acc<T>(static_cast<acc_t<T>>(total));
                             });
}
