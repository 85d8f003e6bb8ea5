// What batch_norm's kernels have in common: parameters, statistics, what follows from them for each element, and how the
// partial results of several blocks for a channel come together. Python defines MAX_CLUSTER, FINALIZE_CHANNELS and
// FINALIZE_THREADS.
#pragma once

#include "common/hw/cluster.cuh"
#include "common/reduce/shifted_moments.cuh"

// Element c of a parameter, which is of T, or of float where it is `wide`; `otherwise` where there is no parameter.
template <typename T>
__device__ __forceinline__ acc_t<T> parameter(const void* values, long long c, int wide, acc_t<T> otherwise) {
  if (!values) return otherwise;
  return wide ? acc_t<T>(static_cast<const float*>(values)[c]) : to_acc(static_cast<const T*>(values)[c]);
}

template <typename T>
__device__ __forceinline__ void store_parameter(void* values, long long c, int wide, acc_t<T> value) {
  if (wide) static_cast<float*>(values)[c] = float(value);
  else static_cast<T*>(values)[c] = from_acc<T>(value);
}

// Mean and rstd of a channel: those saved in training, where `mean` is not null, else those of the running statistics.
template <typename T> struct ChannelStatistics {
  const acc_t<T>*mean, *rstd;
  const void *running_mean, *running_var;
  int wide;
  acc_t<T> eps;

  __device__ __forceinline__ Pair<acc_t<T>> operator[](long long c) const {
    using A = acc_t<T>;
    if (mean) return {mean[c], rstd[c]};
    return {parameter<T>(running_mean, c, wide, A(0)), inverse_sqrt(parameter<T>(running_var, c, wide, A(1)) + eps)};
  }
};

// Saves mean and rstd for backward, and moves the running statistics on by a step.
template <typename T>
__device__ __forceinline__ void save_statistics(const Moments<acc_t<T>>& of, long long c, acc_t<T>* mean,
                                                acc_t<T>* rstd, void* running_mean, void* running_var, int wide,
                                                acc_t<T> momentum, acc_t<T> eps) {
  using A = acc_t<T>;
  mean[c] = of.mean, rstd[c] = of.rstd(eps);
  const auto step = [&](void* values, A value) {
    if (!values) return;
    store_parameter<T>(values, c, wide, (A(1) - momentum) * parameter<T>(values, c, wide, A(0)) + momentum * value);
  };
  step(running_mean, of.mean);
  step(running_var, of.square / (of.count - A(1)));
}

// sum(grad_y) and sum(grad_y xhat) of a channel are its gradients, either of which may be null.
template <typename T>
__device__ __forceinline__ void store_parameter_gradients(Pair<acc_t<T>> sums, long long c, void* grad_weight,
                                                          void* grad_bias, int wide) {
  if (grad_weight) store_parameter<T>(grad_weight, c, wide, sums.second);
  if (grad_bias) store_parameter<T>(grad_bias, c, wide, sums.first);
}

// (x - mean) scale + shift
template <typename T> struct ChannelAffine {
  acc_t<T> mean, scale, shift;
  __device__ __forceinline__ acc_t<T> operator()(acc_t<T> x) const { return (x - mean) * scale + shift; }
};

template <typename T> struct ChannelParameters {
  const void *weight, *bias;
  int wide;

  __device__ __forceinline__ ChannelAffine<T> affine(long long c, Pair<acc_t<T>> statistics) const {
    const acc_t<T> w = parameter<T>(weight, c, wide, acc_t<T>(1)), b = parameter<T>(bias, c, wide, acc_t<T>(0));
    return {statistics.first, statistics.second * w, b};
  }
};

// scale (grad_y - c2 - (x - mean) slope),   slope = rstd c1. The mean of half types is at most a few thousand times their
// deviation, so that mean slope is subtracted from c2 once.
template <typename T> struct __align__(16) ChannelGradient {
  using A = acc_t<T>;
  A mean, scale, slope, c2;

  // Of a channel's sum(grad_y) and sum(grad_y xhat) over `count` elements.
  static __device__ __forceinline__ ChannelGradient of(A mean, A rstd, A weight, Pair<A> sums, A count) {
    const A slope = rstd * (sums.second / count), c2 = sums.first / count;
    return {mean, rstd * weight, slope, sizeof(T) == 2 ? c2 - mean * slope : c2};
  }
  __device__ __forceinline__ A operator()(A grad_y, A x) const {
    return scale * (sizeof(T) == 2 ? grad_y - fma(x, slope, c2) : grad_y - c2 - (x - mean) * slope);
  }
};

// Gives each block of a cluster the values of all: `all` has MAX_CLUSTER places. `value` is the same in every thread of a
// block, and cluster_begin() came before.
template <typename V> __device__ __forceinline__ void share_in_cluster(const V& value, V* all) {
  if (cluster_blocks() == 1) {
    if (threadIdx.x == 0) all[0] = value;
    __syncthreads();
    return;
  }
  cluster_wait();  // until every block has begun
  if (threadIdx.x < cluster_blocks()) store_remote(all + cluster_rank(), threadIdx.x, value);
  cluster_arrive();
  cluster_wait();
}

// The partials of a channel are dealt out over threadIdx.y, and merge(own, other) combines what the threads have in a fixed
// order. own(i) is for the partials i, i + FINALIZE_THREADS, ...; one thread calls store(result). Block: (FINALIZE_CHANNELS,
// FINALIZE_THREADS).
template <typename V, typename Own, typename Merge, typename Store>
__device__ __forceinline__ void finalize_channel(bool live, Own own, Merge merge, Store store) {
  __shared__ V shared[FINALIZE_THREADS][FINALIZE_CHANNELS];
  V value = {};
  if (live) value = own(threadIdx.y);
  for (int half = FINALIZE_THREADS / 2; half > 0; half /= 2) {
    shared[threadIdx.y][threadIdx.x] = value;
    __syncthreads();
    if (threadIdx.y < half) merge(value, shared[threadIdx.y + half][threadIdx.x]);
    __syncthreads();
  }
  if (threadIdx.y == 0 && live) store(value);
}
