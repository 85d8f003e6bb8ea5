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
#include "batch_norm/nchw.cuh"

// Training: y, mean, rstd and the running statistics, which may be null. Grid: channels x segments.splits, in clusters of
// segments.splits. Block: a multiple of 32. Shared memory: `buffered` vectors of 16 bytes.
template <typename T, bool ALIGNED>
__global__ void __launch_bounds__(CLUSTER_THREADS, 2)
    batch_norm_fwd_nchw_cluster(const T* __restrict__ x, const void* __restrict__ weight, const void* __restrict__ bias,
                                T* __restrict__ y, acc_t<T>* __restrict__ mean, acc_t<T>* __restrict__ rstd,
                                void* running_mean, void* running_var, Segments segments, int buffered, int wide,
                                acc_t<T> momentum, acc_t<T> eps) {
  using A = acc_t<T>;
  extern __shared__ uint4 buffer[];
  __shared__ Pair<A> shared[kWarp];
  __shared__ Moments<A> all[MAX_CLUSTER];
  if (cluster_blocks() > 1) cluster_begin();
  const long long c = segments.segment(blockIdx.x);
  const Split<T, ALIGNED> split(segments, c, segments.split(blockIdx.x), y);
  const SegmentSource<T> source{x, buffer, buffered};
  source.prefetch(split);
  wait_for_groups<0>();
  share_in_cluster(block_moments(split_moments(split, source), split.elements(), shared), all);
  auto of = merged<A>(
      int(segments.splits), [&](int i) { return all[i].count; },
      [&](int i) { return Pair<A>{all[i].mean, all[i].square}; });
  of.count = A(segments.count * segments.size);
  const auto affine = ChannelParameters<T>{weight, bias, wide}.affine(c, {of.mean, of.rstd(eps)});
  store_normalised(split, source, y, [&] { return affine; });
  if (segments.split(blockIdx.x) > 0 || threadIdx.x > 0) return;
  save_statistics<T>(of, c, mean, rstd, running_mean, running_var, wide, momentum, eps);
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
  using A = acc_t<T>;
  __shared__ Moments<A> shared[kWarp];
  const unsigned block = gridDim.x - 1 - blockIdx.x, channels = gridDim.x / unsigned(segments.splits);
  // in inference the channels of an image follow each other, as they lie in memory
  const long long c = partials ? segments.segment(block) : block % channels;
  const int number = partials ? segments.split(block) : int(block / channels);
  const ChannelParameters<T> parameters{weight, bias, wide};
  Pair<A> of = {};
  if (partials) {
    Moments<A> moments = block_merge_partials(partials + 3 * c * segments.splits, int(segments.splits), shared);
    moments.count = A(segments.count * segments.size);
    of = {moments.mean, moments.rstd(eps)};
    if (number == 0 && threadIdx.x == 0) {
      save_statistics<T>(moments, c, mean, rstd, running_mean, running_var, wide, momentum, eps);
    }
  }
  store_normalised(Split<T, ALIGNED>(segments, c, number, y), SegmentSource<T>{x}, y, [&] {
    return parameters.affine(
        c, partials ? of : ChannelStatistics<T>{nullptr, nullptr, running_mean, running_var, wide, eps}[c]);
  });
}

// Training: grad_x, grad_weight and grad_bias, each of which may be null. Grid and block: as batch_norm_fwd_nchw_cluster.
// Shared memory: `buffered` vectors of either tensor.
template <typename T, bool ALIGNED>
__global__ void __launch_bounds__(CLUSTER_THREADS, 2)
    batch_norm_bwd_nchw_cluster(const T* __restrict__ grad_y, const T* __restrict__ x, const void* __restrict__ weight,
                                const acc_t<T>* __restrict__ mean, const acc_t<T>* __restrict__ rstd,
                                T* __restrict__ grad_x, void* __restrict__ grad_weight, void* __restrict__ grad_bias,
                                Segments segments, int buffered, int wide) {
  using A = acc_t<T>;
  extern __shared__ uint4 buffer[];
  __shared__ Pair<A> shared[kWarp], all[MAX_CLUSTER];
  if (cluster_blocks() > 1) cluster_begin();
  const long long c = segments.segment(blockIdx.x);
  const Split<T, ALIGNED> split(segments, c, segments.split(blockIdx.x), x);
  const A mu = mean[c], r = rstd[c];
  const SplitMean<T> centre(mu, r);
  const SegmentSource<T> grads{grad_y, buffer, buffered}, inputs{x, buffer + buffered, buffered};
  grads.prefetch(split), inputs.prefetch(split);
  wait_for_groups<0>();
  share_in_cluster(block_reduce<Sum>(split_sums(split, grads, inputs, centre.about), shared), all);
  Pair<A> sums = all[0];
  for (int i = 1; i < segments.splits; ++i) sums = sums + all[i];
  sums = centre.about_mean(sums), sums.second *= r;
  if (segments.split(blockIdx.x) == 0 && threadIdx.x == 0) {
    store_parameter_gradients<T>(sums, c, grad_weight, grad_bias, wide);
  }
  if (!grad_x) return;
  const A w = parameter<T>(weight, c, wide, A(1)), count = A(segments.count * segments.size);
  store_gradient(split, grads, inputs, grad_x, ChannelGradient<T>::of(mu, r, w, sums, count));
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
  using A = acc_t<T>;
  using P = Split<T, ALIGNED>;
  constexpr int U = P::kUnroll;
  __shared__ Pair<A> shared[kWarp];
  const long long c = segments.segment(blockIdx.x);
  const P split(segments, c, segments.split(blockIdx.x), x);
  const Pair<A> of = ChannelStatistics<T>{mean, rstd, running_mean, running_var, wide, eps}[c];
  const SplitMean<T> centre(of.first, of.second);
  const A scale = of.second * parameter<T>(weight, c, wide, A(1));
  Pair<A> sums = {};
  each_vectors(
      split,
      [&](const RunVector(&places)[U], const Vector<T>(&vectors)[2][U]) {
        add_products(sums, places, vectors[0], vectors[1], centre.about);
#pragma unroll
        for (int u = 0; u < U; ++u) {
          if (grad_x) split.store(grad_x, places[u], [&](int e) { return vectors[0][u][e] * scale; });
        }
      },
      SegmentSource<T>{grad_y}, SegmentSource<T>{x});
  if (!partials) return;
  sums = centre.about_mean(block_reduce<Sum>(sums, shared));
  A* at = partials + 2 * (long long)blockIdx.x;
  if (threadIdx.x == 0) at[0] = sums.first, at[1] = sums.second * of.second;
}

// The second pass of training: grad_x. The first block of a channel also writes grad_weight and grad_bias, which may be
// null. Grid and block: as batch_norm_fwd_nchw_partials.
template <typename T, bool ALIGNED>
__global__ void __launch_bounds__(SEGMENT_THREADS)
    batch_norm_bwd_nchw(const T* __restrict__ grad_y, const T* __restrict__ x, const void* __restrict__ weight,
                        const acc_t<T>* __restrict__ mean, const acc_t<T>* __restrict__ rstd,
                        const acc_t<T>* __restrict__ partials, T* __restrict__ grad_x, void* __restrict__ grad_weight,
                        void* __restrict__ grad_bias, Segments segments, int wide) {
  using A = acc_t<T>;
  __shared__ Pair<A> shared[kWarp];
  const unsigned block = gridDim.x - 1 - blockIdx.x;
  const long long c = segments.segment(block);
  const int number = segments.split(block);
  Pair<A> sums = {};
  for (int i = threadIdx.x; i < segments.splits; i += blockDim.x) {
    const A* at = partials + 2 * (c * segments.splits + i);
    sums = sums + Pair<A>{at[0], at[1]};
  }
  sums = block_reduce<Sum>(sums, shared);
  if (number == 0 && threadIdx.x == 0) store_parameter_gradients<T>(sums, c, grad_weight, grad_bias, wide);
  const A w = parameter<T>(weight, c, wide, A(1)), count = A(segments.count * segments.size);
  store_gradient(Split<T, ALIGNED>(segments, c, number, grad_x), SegmentSource<T>{grad_y}, SegmentSource<T>{x}, grad_x,
                 ChannelGradient<T>::of(mean[c], rstd[c], w, sums, count));
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
