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
// channel. Either leaves partial sums [slabs x channels x inner'] that scale_shift_bwd_finish adds up, in a fixed order,
// unless a warp has all of a channel. A thread adds its few elements in acc_t<T>; sums across threads and slabs are few,
// and made in double.
//
// Reached on an H200 (GB/s of those bytes, forward / backward; a copy: 4226): 131072x1024 per column bf16 4022 / 3824,
// fp16 4024 / 3830, fp32 4134 / 4010, scalar 4017 / 3807, per row 3995 / 4144, 64x256x56x56 per channel 3827 / 3412,
// 16383x1001 per column 2853 / 2348, 1000003x17 3004 / 2317. Lost: in backward the second launch (scale_shift_bwd_finish
// alone, of cold caches: 6.9 us); in what takes 20 or 40 us, the start of launches.
#include "common/elementwise/broadcast.cuh"
#include "common/reduce/column.cuh"
#include "common/elementwise/broadcast_params.cuh"

// Grid, block: see spread_over(). x and y are dense and laid out alike.
template <typename T, bool BIAS, int FORM>
__global__ void scale_shift_fwd(const T* __restrict__ x, const T* __restrict__ weight, const T* __restrict__ bias,
                                T* __restrict__ y, const __grid_constant__ Spread spread, long long n) {
  using A = acc_t<T>;
  if constexpr (BIAS) {
    const T* const in[] = {weight, bias};
    spread_over<FORM, FORM == kEachColumn ? 3 : 1>(
        spread, n, [](A x, const A(&p)[2]) { return x * p[0] + p[1]; }, y, x, in);
  } else {
    const T* const in[] = {weight};
    spread_over<FORM, FORM == kEachColumn ? 3 : 1>(spread, n, [](A x, const A(&p)[1]) { return x * p[0]; }, y, x, in);
  }
}

// Grid, block: see broadcast(). x, weight and bias have any strides, 0 where broadcast; y is dense.
template <typename T, bool BIAS>
__global__ void scale_shift_fwd_broadcast(const T* __restrict__ x, const T* __restrict__ weight,
                                          const T* __restrict__ bias, T* __restrict__ y,
                                          const __grid_constant__ Layout<2 + BIAS> layout, long long n) {
  using A = acc_t<T>;
  if constexpr (BIAS) {
    const T* const in[] = {x, weight, bias};
    broadcast<T>(layout, n, [](const A(&value)[3]) { return value[0] * value[1] + value[2]; }, y, in);
  } else {
    const T* const in[] = {x, weight};
    broadcast<T>(layout, n, [](const A(&value)[2]) { return value[0] * value[1]; }, y, in);
  }
}

// WEIGHT: grad_weight is summed, before grad_bias; else x is not read.
template <typename A, bool WEIGHT> struct ScaleShift {
  static constexpr bool READS = WEIGHT;
  static constexpr int SUMS = 1 + WEIGHT;

  __device__ __forceinline__ A operator()(A grad_y, A x, A weight, A (&term)[SUMS]) const {
    if (WEIGHT) term[0] = grad_y * x;
    term[SUMS - 1] = grad_y;
    return grad_y * weight;
  }
};

// Grid, block, partial: see sum_columns().
template <typename T, bool WEIGHT>
__global__ void __launch_bounds__(kSumThreads, kSumBlocks<T>)
    scale_shift_bwd_columns(const T* __restrict__ grad_y, const T* __restrict__ x, const T* __restrict__ weight,
                            T* __restrict__ grad_x, acc_t<T>* __restrict__ partial,
                            const __grid_constant__ Columns columns) {
  sum_columns<1, T>(columns, ScaleShift<acc_t<T>, WEIGHT>(), grad_y, x, weight, grad_x, partial);
}

// Grid, block: see sum_spans(). partial: [sums][slabs][channels], or null where there is one slab: the sums go to first and
// second at once.
template <typename T, bool WEIGHT, bool CUT>
__global__ void __launch_bounds__(kSumThreads, kSpanBlocks<T>)
    scale_shift_bwd_spans(const T* __restrict__ grad_y, const T* __restrict__ x, const T* __restrict__ weight,
                          T* __restrict__ grad_x, acc_t<T>* __restrict__ partial, T* first, T* second,
                          const __grid_constant__ Spans spans) {
  sum_spans<CUT, T>(spans, ScaleShift<acc_t<T>, WEIGHT>(), grad_y, x, weight, grad_x,
                    [&](int s, long long slab, long long channel, double total) {
                      T* const to = s == 0 ? first : second;
                      if (partial) partial[(s * spans.slabs + slab) * spans.channels + channel] = total;
                      else if (to) to[channel] = from_acc<T>(static_cast<acc_t<T>>(total));
                    });
}

// Grid, block: see finish_sums().
template <typename T>
__global__ void __launch_bounds__(kFinishThreads)
    scale_shift_bwd_finish(const acc_t<T>* __restrict__ partial, T* __restrict__ grad_first,
                           T* __restrict__ grad_second, long long slabs, long long channels, long long inner) {
  finish_sums<T>(partial, grad_first, grad_second, slabs, channels, inner);
}
