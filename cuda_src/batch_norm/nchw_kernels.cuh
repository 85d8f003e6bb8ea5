// batch_norm's kernels for images, (n, c, s), but for what is done with y and grad_y on the way: `then` is Nothing or an
// Activated, `gate` EveryGradient or MaskedGradients (batch_norm/activated.cuh). Contracts: see batch_norm.cu.
#pragma once

#include "batch_norm/nchw.cuh"

template <typename T, bool ALIGNED, typename Then>
__device__ __forceinline__ void nchw_cluster_forward(const T* x, const void* weight, const void* bias, T* y,
                                                     acc_t<T>* mean, acc_t<T>* rstd, void* running_mean,
                                                     void* running_var, const Segments& segments, int buffered,
                                                     int wide, acc_t<T> momentum, acc_t<T> eps, const Then& then) {
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
  store_normalised(split, source, y, [&] { return affine; }, then);
  if (segments.split(blockIdx.x) > 0 || threadIdx.x > 0) return;
  save_statistics<T>(of, c, mean, rstd, running_mean, running_var, wide, momentum, eps);
}

template <typename T, bool ALIGNED, typename Then>
__device__ __forceinline__ void nchw_forward(const T* x, const void* weight, const void* bias, T* y,
                                             const acc_t<T>* partials, acc_t<T>* mean, acc_t<T>* rstd,
                                             void* running_mean, void* running_var, const Segments& segments, int wide,
                                             acc_t<T> momentum, acc_t<T> eps, const Then& then) {
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
  store_normalised(
      Split<T, ALIGNED>(segments, c, number, y), SegmentSource<T>{x}, y,
      [&] {
        return parameters.affine(
            c, partials ? of : ChannelStatistics<T>{nullptr, nullptr, running_mean, running_var, wide, eps}[c]);
      },
      then);
}

template <typename T, bool ALIGNED, typename Gate>
__device__ __forceinline__ void nchw_cluster_backward(const T* grad_y, const T* x, const void* weight,
                                                      const acc_t<T>* mean, const acc_t<T>* rstd, T* grad_x,
                                                      void* grad_weight, void* grad_bias, const Segments& segments,
                                                      int buffered, int wide, const Gate& gate) {
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
  share_in_cluster(block_reduce<Sum>(passed_sums(split, grads, inputs, centre.about, gate), shared), all);
  Pair<A> sums = all[0];
  for (int i = 1; i < segments.splits; ++i) sums = sums + all[i];
  sums = centre.about_mean(sums), sums.second *= r;
  if (segments.split(blockIdx.x) == 0 && threadIdx.x == 0) {
    store_parameter_gradients<T>(sums, c, grad_weight, grad_bias, wide);
  }
  if (!grad_x) return;
  const A w = parameter<T>(weight, c, wide, A(1)), count = A(segments.count * segments.size);
  store_gradient(split, grads, inputs, grad_x, ChannelGradient<T>::of(mu, r, w, sums, count), gate);
}

template <typename T, bool ALIGNED, typename Gate>
__device__ __forceinline__ void nchw_backward_partials(const T* grad_y, const T* x, const void* weight,
                                                       const acc_t<T>* mean, const acc_t<T>* rstd,
                                                       const void* running_mean, const void* running_var, T* grad_x,
                                                       acc_t<T>* partials, const Segments& segments, int wide,
                                                       acc_t<T> eps, const Gate& gate) {
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
        Vector<T> grad_z[U];
        pass(gate, places, vectors[0], grad_z);
        add_products(sums, places, grad_z, vectors[1], centre.about);
#pragma unroll
        for (int u = 0; u < U; ++u) {
          if (grad_x) split.store(grad_x, places[u], [&](int e) { return grad_z[u][e] * scale; });
        }
      },
      SegmentSource<T>{grad_y}, SegmentSource<T>{x});
  if (!partials) return;
  sums = centre.about_mean(block_reduce<Sum>(sums, shared));
  A* at = partials + 2 * (long long)blockIdx.x;
  if (threadIdx.x == 0) at[0] = sums.first, at[1] = sums.second * of.second;
}

template <typename T, bool ALIGNED, typename Gate>
__device__ __forceinline__ void nchw_backward(const T* grad_y, const T* x, const void* weight, const acc_t<T>* mean,
                                              const acc_t<T>* rstd, const acc_t<T>* partials, T* grad_x,
                                              void* grad_weight, void* grad_bias, const Segments& segments, int wide,
                                              const Gate& gate) {
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
                 ChannelGradient<T>::of(mean[c], rstd[c], w, sums, count), gate);
}
