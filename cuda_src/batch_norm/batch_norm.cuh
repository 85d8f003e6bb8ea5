// What batch_norm's kernels have in common: parameters, statistics, what follows from them for each element, and how
// what several blocks have of a channel comes together.
#pragma once

#include "common/hw/cluster.cuh"
#include "common/reduce/welford.cuh"

constexpr int kFinishers = 32;  // threads that share the parts of a channel
constexpr int kFinished = 8;  // channels of a block that combines parts

// Element c of a parameter, or what stands for one that is not there.
template <typename T>
__device__ __forceinline__ acc_t<T> parameter(const void* values, long long c, int wide, acc_t<T> otherwise) {
  if (!values) return otherwise;
  return wide ? acc_t<T>(static_cast<const float*>(values)[c]) : to_acc(static_cast<const T*>(values)[c]);
}

template <typename T> __device__ __forceinline__ void set(void* values, long long c, int wide, acc_t<T> value) {
  if (wide) static_cast<float*>(values)[c] = float(value);
  else static_cast<T*>(values)[c] = from_acc<T>(value);
}

// Mean and rstd of a channel, as kept (training), or of the running statistics.
template <typename T> struct Statistics {
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

// The running statistics a step on, and what is kept for backward.
template <typename T>
__device__ __forceinline__ void keep(const Moments<acc_t<T>>& of, long long c, acc_t<T>* mean, acc_t<T>* rstd,
                                     void* running_mean, void* running_var, int wide, acc_t<T> momentum, acc_t<T> eps) {
  using A = acc_t<T>;
  mean[c] = of.mean, rstd[c] = of.rstd(eps);
  const auto step = [&](void* values, A value) {
    if (values) set<T>(values, c, wide, (A(1) - momentum) * parameter<T>(values, c, wide, A(0)) + momentum * value);
  };
  step(running_mean, of.mean);
  step(running_var, of.square / (of.count - A(1)));
}

// sum(grad_y) and sum(grad_y xhat) of a channel are its gradients, either of which may be null.
template <typename T>
__device__ __forceinline__ void set_gradients(Pair<acc_t<T>> sums, long long c, void* grad_weight, void* grad_bias,
                                              int wide) {
  if (grad_weight) set<T>(grad_weight, c, wide, sums.second);
  if (grad_bias) set<T>(grad_bias, c, wide, sums.first);
}

// (x - mean) scale + shift
template <typename T> struct Affine {
  acc_t<T> mean, scale, shift;
  __device__ __forceinline__ acc_t<T> operator()(acc_t<T> x) const { return (x - mean) * scale + shift; }
};

template <typename T> struct Parameters {
  const void *weight, *bias;
  int wide;

  __device__ __forceinline__ Affine<T> affine(long long c, Pair<acc_t<T>> statistics) const {
    const acc_t<T> w = parameter<T>(weight, c, wide, acc_t<T>(1)), b = parameter<T>(bias, c, wide, acc_t<T>(0));
    return {statistics.first, statistics.second * w, b};
  }
};

// scale (grad_y - c2 - (x - mean) slope),   slope = rstd c1. Half types, whose mean is no more than a few thousand times
// what they differ from it by, have mean slope subtracted from c2 once.
template <typename T> struct __align__(16) Gradient {
  using A = acc_t<T>;
  A mean, scale, slope, c2;

  // Of a channel's sum(grad_y) and sum(grad_y xhat) over `count`.
  static __device__ __forceinline__ Gradient of(A mean, A rstd, A weight, Pair<A> sums, A count) {
    const A slope = rstd * (sums.second / count), c2 = sums.first / count;
    return {mean, rstd * weight, slope, sizeof(T) == 2 ? c2 - mean * slope : c2};
  }
  __device__ __forceinline__ A operator()(A grad_y, A x) const {
    return scale * (sizeof(T) == 2 ? grad_y - fma(x, slope, c2) : grad_y - c2 - (x - mean) * slope);
  }
};

// What each block of a cluster has, to all of them: `all` has kMaxCluster. `value` is the same in every thread of a block,
// and cluster_begin() came before.
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

// The parts of a channel dealt out over threadIdx.y, and merge(own, other) what threads then have, in a fixed order.
// own(i) for the parts i, i + kFinishers, ...; kept(result) by one thread. Block: (kFinished, kFinishers).
template <typename V, typename Own, typename Merge, typename Kept>
__device__ __forceinline__ void finish_channel(bool live, Own own, Merge merge, Kept kept) {
  __shared__ V shared[kFinishers][kFinished];
  V value = {};
  if (live) value = own(threadIdx.y);
  for (int half = kFinishers / 2; half > 0; half /= 2) {
    shared[threadIdx.y][threadIdx.x] = value;
    __syncthreads();
    if (threadIdx.y < half) merge(value, shared[threadIdx.y + half][threadIdx.x]);
    __syncthreads();
  }
  if (threadIdx.y == 0 && live) kept(value);
}
