// xhat = (x - mean) rstd,   mean = sum(x) / m,   rstd = 1 / sqrt(sum((x - mean)^2) / m + eps)     over the m of a channel
// y = xhat weight + bias
// running_mean += momentum (mean - running_mean),   running_var += momentum (sum((x - mean)^2) / (m - 1) - running_var)
//
// grad_x = rstd weight (grad_y - c2 - xhat c1),   c1 = sum(grad_y xhat) / m,   c2 = sum(grad_y) / m
// grad_weight = sum(grad_y xhat),   grad_bias = sum(grad_y)
//
// In inference mean and rstd are those of running_mean and running_var, and c1 = c2 = 0.
//
// This file has the kernels for images, (n, c, s), whose channels are strided segments (common/reduce/strided.cuh).
// batch_norm_nhwc.cu has those for channels that lie side by side. They take two ways:
//
//     nchw_cluster    the blocks of a cluster share a channel. It is read from memory once, and the second time from shared
//                     memory or the L2 cache.
//     nchw_two_pass   a first pass leaves partial moments, or sums, of each block's split. The second pass combines them,
//                     and goes from the end, since what was read last is still in the cache. fp64 takes this way alone, and
//                     for channels that lie side by side too: their runs have one element.
//
// With ALIGNED every run of every tensor is whole vectors. weight, bias, running_mean and running_var are of T, or beside a
// half type all of float, where `wide` is 1.
//
// Bytes per element: training forward 2 x sizeof(T) (3 in two passes), backward 3 x sizeof(T) (5); inference forward
// 2 x sizeof(T), backward 3 x sizeof(T). About 8 flops forward, 10 backward.
//
// Reached on an H200 (GB/s of the least of these bytes, forward / backward; a copy: 4226). Images: 64x256x56x56 training
// fp32 2902 / 2983, bf16 2244 / 2752; inference fp32 3992 / 3785, bf16 3666 / 3483; 64x3x224x223 bf16 1437 / 1706. Channels
// side by side, training bf16: 64x256x56x56 channels_last 2046 / 2208, 256x2048x7x7 1918 / 2153, 4096x1000 871 / 1252,
// 4096x4095 1532 / 1773. What keeps them from the rate of a copy: half types are bound by the instructions for a vector of
// eight elements; two passes read everything twice, and the cache holds only the end of it. Small planes in clusters, of
// which backward reads once, took as long.
//
// Python defines SEGMENT_THREADS, the most that a block of two passes has, and CLUSTER_THREADS.
#include "batch_norm/nchw_kernels.cuh"

// Training: y, mean, rstd and the running statistics, which may be null. Grid: channels x segments.splits, in clusters of
// segments.splits. Block: a multiple of 32. Shared memory: `buffered` vectors of 16 bytes.
template <typename T, bool ALIGNED>
__global__ void __launch_bounds__(CLUSTER_THREADS, 2)
    batch_norm_fwd_nchw_cluster(const T* __restrict__ x, const void* __restrict__ weight, const void* __restrict__ bias,
                                T* __restrict__ y, acc_t<T>* __restrict__ mean, acc_t<T>* __restrict__ rstd,
                                void* running_mean, void* running_var, Segments segments, int buffered, int wide,
                                acc_t<T> momentum, acc_t<T> eps) {
  nchw_cluster_forward<T, ALIGNED, Nothing>(x, weight, bias, y, mean, rstd, running_mean, running_var, segments,
                                            buffered, wide, momentum, eps, {});
}

// The first pass of training: `partials`, (channels, segments.splits, 3), are count, mean and square of each block. Grid:
// channels x segments.splits. Block: at most SEGMENT_THREADS, a multiple of 32.
template <typename T, bool ALIGNED>
__global__ void __launch_bounds__(SEGMENT_THREADS)
    batch_norm_fwd_nchw_partials(const T* __restrict__ x, acc_t<T>* __restrict__ partials, Segments segments) {
  __shared__ Pair<acc_t<T>> shared[kWarp];
  const Split<T, ALIGNED> split(segments, segments.segment(blockIdx.x), segments.split(blockIdx.x), x);
  const auto of = block_moments(split_moments(split, SegmentSource<T>{x}), split.elements(), shared);
  if (threadIdx.x == 0) store_moments(partials + 3 * (long long)blockIdx.x, of);
}

// y. The second pass of training, where there are `partials`: the first block of a channel also writes mean, rstd and the
// running statistics. Or inference, by running_mean and running_var. weight and bias may be null, and in training
// running_mean and running_var. Grid and block: as batch_norm_fwd_nchw_partials.
template <typename T, bool ALIGNED>
__global__ void __launch_bounds__(SEGMENT_THREADS)
    batch_norm_fwd_nchw(const T* __restrict__ x, const void* __restrict__ weight, const void* __restrict__ bias,
                        T* __restrict__ y, const acc_t<T>* __restrict__ partials, acc_t<T>* __restrict__ mean,
                        acc_t<T>* __restrict__ rstd, void* running_mean, void* running_var, Segments segments, int wide,
                        acc_t<T> momentum, acc_t<T> eps) {
  nchw_forward<T, ALIGNED, Nothing>(x, weight, bias, y, partials, mean, rstd, running_mean, running_var, segments, wide,
                                    momentum, eps, {});
}

// Training: grad_x, grad_weight and grad_bias, each of which may be null. Grid and block: as batch_norm_fwd_nchw_cluster.
// Shared memory: `buffered` vectors of either tensor.
template <typename T, bool ALIGNED>
__global__ void __launch_bounds__(CLUSTER_THREADS, 2)
    batch_norm_bwd_nchw_cluster(const T* __restrict__ grad_y, const T* __restrict__ x, const void* __restrict__ weight,
                                const acc_t<T>* __restrict__ mean, const acc_t<T>* __restrict__ rstd,
                                T* __restrict__ grad_x, void* __restrict__ grad_weight, void* __restrict__ grad_bias,
                                Segments segments, int buffered, int wide) {
  nchw_cluster_backward<T, ALIGNED, EveryGradient>(grad_y, x, weight, mean, rstd, grad_x, grad_weight, grad_bias,
                                                   segments, buffered, wide, {});
}

// The first pass of backward: `partials`, (channels, segments.splits, 2), are sum(grad_y) and sum(grad_y xhat) of each
// block. Or inference: grad_x besides. Both may be null. Grid and block: as batch_norm_fwd_nchw_partials.
template <typename T, bool ALIGNED>
__global__ void __launch_bounds__(SEGMENT_THREADS)
    batch_norm_bwd_nchw_partials(const T* __restrict__ grad_y, const T* __restrict__ x, const void* __restrict__ weight,
                                 const acc_t<T>* __restrict__ mean, const acc_t<T>* __restrict__ rstd,
                                 const void* __restrict__ running_mean, const void* __restrict__ running_var,
                                 T* __restrict__ grad_x, acc_t<T>* __restrict__ partials, Segments segments, int wide,
                                 acc_t<T> eps) {
  nchw_backward_partials<T, ALIGNED, EveryGradient>(grad_y, x, weight, mean, rstd, running_mean, running_var, grad_x,
                                                    partials, segments, wide, eps, {});
}

// The second pass of training: grad_x. The first block of a channel also writes grad_weight and grad_bias, which may be
// null. Grid and block: as batch_norm_fwd_nchw_partials.
template <typename T, bool ALIGNED>
__global__ void __launch_bounds__(SEGMENT_THREADS)
    batch_norm_bwd_nchw(const T* __restrict__ grad_y, const T* __restrict__ x, const void* __restrict__ weight,
                        const acc_t<T>* __restrict__ mean, const acc_t<T>* __restrict__ rstd,
                        const acc_t<T>* __restrict__ partials, T* __restrict__ grad_x, void* __restrict__ grad_weight,
                        void* __restrict__ grad_bias, Segments segments, int wide) {
  nchw_backward<T, ALIGNED, EveryGradient>(grad_y, x, weight, mean, rstd, partials, grad_x, grad_weight, grad_bias,
                                           segments, wide, {});
}

// grad_weight and grad_bias, and in training `of`, from which grad_x follows, each of which may be null. A channel has
// `count` partials for each of its `pixels` columns, of `values` elements in all. Partial p of column i is at p step_partial
// + i step_column; in images a channel is one column. Grid: ceil(channels / FINALIZE_CHANNELS). Block: (FINALIZE_CHANNELS,
// FINALIZE_THREADS).
template <typename T>
__global__ void __launch_bounds__(FINALIZE_CHANNELS* FINALIZE_THREADS)
    batch_norm_bwd_finalize(const acc_t<T>* __restrict__ partials, const void* __restrict__ weight,
                            const acc_t<T>* __restrict__ mean, const acc_t<T>* __restrict__ rstd,
                            ChannelGradient<T>* __restrict__ of, void* __restrict__ grad_weight,
                            void* __restrict__ grad_bias, long long channels, long long values, int pixels, int count,
                            long long step_partial, long long step_column, int wide) {
  using A = acc_t<T>;
  const long long c = blockIdx.x * (long long)FINALIZE_CHANNELS + threadIdx.x;
  finalize_channel<Pair<A>>(
      c < channels,
      [&](int first) {
        Pair<A> own = {};
#pragma unroll 8
        for (int i = first; i < count * pixels; i += FINALIZE_THREADS) {
          const int part = i / pixels;
          const A* at = partials + part * step_partial + (c * pixels + i - part * pixels) * step_column;
          own = own + Pair<A>{at[0], at[1]};
        }
        return own;
      },
      [](Pair<A>& own, const Pair<A>& other) { own = own + other; },
      [&](const Pair<A>& sums) {
        if (of) {
          of[c] = ChannelGradient<T>::of(mean[c], rstd[c], parameter<T>(weight, c, wide, A(1)), sums, A(values));
        }
        store_parameter_gradients<T>(sums, c, grad_weight, grad_bias, wide);
      });
}
