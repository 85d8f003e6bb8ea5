// xhat = (x - mean) rstd,   mean = sum(x) / m,   rstd = 1 / sqrt(sum((x - mean)^2) / m + eps)       over the m of a group
// y = xhat weight + bias                                                      weight and bias of the element's channel
//
// g = sum(grad_y),   h = sum(grad_y xhat)                                       over the s of each plane (n, channel, s)
// grad_x = rstd (grad_y weight - c2 - xhat c1),   c1 = sum(weight h) / m,   c2 = sum(weight g) / m        over the group
// grad_weight = sum(h),   grad_bias = sum(g)                                                                  over the n
//
// A group, channels of one image, is a row of neighbours. Where it fits the registers of a block it is read once. Else
// several blocks share it: a first pass leaves what each has found, the second combines that, from the end: what was read
// last is still in cache.
//
// Bytes per element: forward 2 x sizeof(T), backward 3 x sizeof(T); of groups that are shared, 3 and 5. About 8 flops
// forward, 12 backward.
//
// Reached on an H200 (GB/s of those bytes, forward / backward; a copy: 4251): 32x512x32x32 G32 bf16 2043 / 1802,
// 8x256x128x128 G32 bf16 1345 / 2039, 2x64x1000 G32 bf16 82 / 82, 32x512x32x32 G32 fp16 2034 / 1776, 32x512x32x32 G32
// fp32 1626 / 1368. Lost: a group that a block holds leaves room for few others, and larger ones are read twice.
#include "common/runs.cuh"

constexpr int kThreads = 256;
constexpr int kHeldThreads = 512;
constexpr int kMostFinishers = 32;

struct Groups {
  long long count, channels;  // groups of an image, channels of a group
  Divisor plane;  // by the elements of a channel
};

// The channel of each element of a pack, of which some are there: mostly one for all of them.
struct Channels {
  const Groups& groups;
  long long first;  // of the group
  int in_run, one;
  bool same;

  __device__ __forceinline__ Channels(const Groups& groups, long long group, const Place& place)
      : groups(groups), first(group % groups.count * groups.channels), in_run(place.in_run) {
    one = groups.plane.divide(in_run + place.first);
    same = groups.plane.divide(in_run + place.last - 1) == one;
  }

  __device__ __forceinline__ long long operator[](int e) const { return first + groups.plane.divide(in_run + e); }
};

template <typename T> __device__ __forceinline__ acc_t<T> parameter(const T* values, long long c, float otherwise) {
  return values ? to_acc(values[c]) : acc_t<T>(otherwise);
}

// (x - mean) rstd weight + bias of a channel; with an infinite weight as PyTorch has it, x (rstd weight) and the rest.
template <typename T> struct Affine {
  acc_t<T> mean, scale, shift;

  __device__ __forceinline__ Affine(acc_t<T> mu, acc_t<T> rstd, const T* weight, const T* bias, long long c)
      : mean(mu), scale(rstd * parameter(weight, c, 1)), shift(parameter(bias, c, 0)) {
    if (!isfinite(scale)) shift -= mean * scale, mean = 0;
  }
  __device__ __forceinline__ acc_t<T> operator()(acc_t<T> x) const { return (x - mean) * scale + shift; }
};

template <typename T>
__device__ __forceinline__ void store_normalised(T* y, const Place& place, const Pack<T>& x, const T* weight,
                                                 const T* bias, const Groups& groups, long long group, acc_t<T> mean,
                                                 acc_t<T> rstd) {
  if (place.last == place.first) return;
  const Channels channels(groups, group, place);
  if (channels.same) {
    const Affine<T> affine(mean, rstd, weight, bias, channels.first + channels.one);
    store_place(y, place, [&](int e) { return affine(x[e]); });
  } else {
    store_place(y, place, [&](int e) { return Affine<T>(mean, rstd, weight, bias, channels[e])(x[e]); });
  }
}

// rstd (grad_y weight - c2 - xhat c1)
template <typename T>
__device__ __forceinline__ void store_gradient(T* grad_x, const Place& place, const Pack<T>& grad_y, const Pack<T>& x,
                                               const T* weight, const Groups& groups, long long group, acc_t<T> mean,
                                               acc_t<T> rstd, Pair<acc_t<T>> c) {
  using A = acc_t<T>;
  if (place.last == place.first) return;
  const Channels channels(groups, group, place);
  const auto of = [&](int e, A w) { return rstd * (grad_y[e] * w - c.first - (x[e] - mean) * rstd * c.second); };
  if (channels.same) {
    const A w = parameter(weight, channels.first + channels.one, 1);
    store_place(grad_x, place, [&](int e) { return of(e, w); });
  } else {
    store_place(grad_x, place, [&](int e) { return of(e, parameter(weight, channels[e], 1)); });
  }
}

// Grid: ceil(rows / blockDim.y). Block: (threads of a row, rows): see rows.cuh; K packs in each thread hold a row.
// mean and rstd are kept for backward, one number for each row. weight and bias may be null.
template <typename T, int K>
__global__ void __launch_bounds__(kHeldThreads)
    group_norm_fwd(const T* __restrict__ x, const T* __restrict__ weight, const T* __restrict__ bias, T* __restrict__ y,
                   acc_t<T>* __restrict__ mean, acc_t<T>* __restrict__ rstd, Runs runs, Groups groups, long long rows,
                   acc_t<T> eps) {
  using A = acc_t<T>;
  constexpr int W = kVecWidth<T>;
  __shared__ A sums[kWarp];
  __shared__ Pair<A> shared[kWarp];
  const long long row = blockIdx.x * (long long)blockDim.y + threadIdx.y;
  Part<T> part(runs, row, 0, y);
  if (row >= rows) part.end = 0;
  Place places[K];
  Pack<T> packs[K];
#pragma unroll
  for (int k = 0; k < K; ++k) places[k] = part[k * blockDim.x + threadIdx.x], packs[k] = load_place(x, places[k]);
  const bool whole = all_whole(places, W);
  const A sum = reduce_elements<Sum, K, W>([&](int k, int e) { return packs[k][e]; });  // what is not there is 0
  const A about = row_reduce<Sum>(sum, sums) / A(runs.size);
  fold(packs);
  Pair<A> centred = {};
  each_element<K, W>([&](int k, int e) {
    const A one = whole || places[k].has(e) ? packs[k][e] - about : A(0);
    centred.first += one, centred.second += one * one;
  });
  centred = row_reduce<Sum>(centred, shared);
  fold(packs);
  const auto of = Moments<A>::of(A(runs.size), about, centred.first, centred.second);
  const A r = of.rstd(eps);
#pragma unroll
  for (int k = 0; k < K; ++k) store_normalised(y, places[k], packs[k], weight, bias, groups, row, of.mean, r);
  if (threadIdx.x == 0 && row < rows) mean[row] = of.mean, rstd[row] = r;
}

// Three numbers of `parts`, (rows, runs.parts, 3), for each block. Grid: rows x runs.parts. Block: a multiple of 32.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    group_norm_moments(const T* __restrict__ x, acc_t<T>* __restrict__ parts, Runs runs) {
  __shared__ Moments<acc_t<T>> shared[kWarp];
  const Part<T> part(runs, blockIdx.x / runs.parts, int(blockIdx.x % runs.parts), x);
  const auto of = block_merge(part_moments<4>(part, x), shared);
  if (threadIdx.x == 0) store_moments(parts + 3 * (long long)blockIdx.x, of);
}

// As group_norm_fwd, of the parts that group_norm_moments left. Grid and block: the same.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    group_norm_fwd_wide(const T* __restrict__ x, const T* __restrict__ weight, const T* __restrict__ bias,
                        T* __restrict__ y, const acc_t<T>* __restrict__ parts, acc_t<T>* __restrict__ mean,
                        acc_t<T>* __restrict__ rstd, Runs runs, Groups groups, acc_t<T> eps) {
  using A = acc_t<T>;
  __shared__ Moments<A> shared[kWarp];
  const long long block = gridDim.x - 1 - (long long)blockIdx.x, row = block / runs.parts;
  const int number = int(block % runs.parts);
  const Moments<A> of = block_merge_parts(parts + 3 * row * runs.parts, int(runs.parts), shared);
  const A r = of.rstd(eps);
  if (number == 0 && threadIdx.x == 0) mean[row] = of.mean, rstd[row] = r;
  each_packs<4>(
      Part<T>(runs, row, number, y),
      [&](const Place(&places)[4], const Pack<T>(&packs)[1][4]) {
#pragma unroll
        for (int u = 0; u < 4; ++u) store_normalised(y, places[u], packs[0][u], weight, bias, groups, row, of.mean, r);
      },
      x);
}

// g and h of each plane, (rows, channels, 2), and grad_x, of rows that K packs in each thread hold; every channel is
// whole packs, and all tensors begin at a 16-byte boundary. Grid: rows. Block: a multiple of 32; `held` has a pair for
// each pack of a row. weight and grad_x may be null.
template <typename T, int K>
__global__ void __launch_bounds__(kHeldThreads)
    group_norm_bwd(const T* __restrict__ grad_y, const T* __restrict__ x, const T* __restrict__ weight,
                   const acc_t<T>* __restrict__ mean, const acc_t<T>* __restrict__ rstd, T* __restrict__ grad_x,
                   acc_t<T>* __restrict__ sums, Runs runs, Groups groups) {
  using A = acc_t<T>;
  constexpr int W = kVecWidth<T>;
  __shared__ Pair<A> held[K * kHeldThreads];
  __shared__ Pair<A> shared[kWarp];
  const long long row = blockIdx.x;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
  const int channels = int(groups.channels), plane = int(runs.total / channels);
  const Part<T> part(runs, row, 0, x);
  const A mu = mean[row], r = rstd[row];
  Place places[K];
  Pack<T> grads[K], inputs[K];
#pragma unroll
  for (int k = 0; k < K; ++k) {
    places[k] = part[k * blockDim.x + threadIdx.x];
    grads[k] = load_place(grad_y, places[k]), inputs[k] = load_place(x, places[k]);
  }
#pragma unroll
  for (int k = 0; k < K; ++k) {
    Pair<A> own = {};
#pragma unroll
    for (int e = 0; e < W; ++e) own.first += grads[k][e], own.second += grads[k][e] * (inputs[k][e] - mu);
    held[k * blockDim.x + threadIdx.x] = own;
  }
  __syncthreads();
  for (int c = warp; c < channels; c += warps) {
    Pair<A> own = {};
    for (int i = lane; i < plane; i += kWarp) own = own + held[c * plane + i];
    own = warp_reduce<Sum>(own);
    own.second *= r;
    if (lane > 0) continue;
    held[c * plane] = own;
    A* at = sums + 2 * (row * channels + c);
    at[0] = own.first, at[1] = own.second;
  }
  if (!grad_x) return;
  __syncthreads();
  const long long first = row % groups.count * groups.channels;
  Pair<A> total = {};
  for (int c = threadIdx.x; c < channels; c += blockDim.x) {
    const A w = parameter(weight, first + c, 1);
    total = total + Pair<A>{w * held[c * plane].first, w * held[c * plane].second};
  }
  total = block_reduce<Sum>(total, shared);
  fold(grads), fold(inputs);
  const Pair<A> c{total.first / A(runs.size), total.second / A(runs.size)};
#pragma unroll
  for (int k = 0; k < K; ++k) store_gradient(grad_x, places[k], grads[k], inputs[k], weight, groups, row, mu, r, c);
}

// g and h of each part of a plane, (planes, runs.parts, 2). Grid: ceil(planes x runs.parts / blockDim.y), where several
// parts ask for a blockDim.y of 1. Block: (threads of a plane, planes): see rows.cuh.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    group_norm_bwd_sums(const T* __restrict__ grad_y, const T* __restrict__ x, const acc_t<T>* __restrict__ mean,
                        const acc_t<T>* __restrict__ rstd, acc_t<T>* __restrict__ sums, Runs runs, long long channels,
                        long long planes) {
  using A = acc_t<T>;
  __shared__ Pair<A> shared[kWarp];
  const long long place = blockIdx.x * (long long)blockDim.y + threadIdx.y, plane = place / runs.parts;
  const bool live = plane < planes;
  Part<T> part(runs, plane, int(place % runs.parts), x);
  if (!live) part.begin = part.end = 0;
  const A mu = live ? mean[plane / channels] : A(0);
  const Pair<A> of = row_reduce<Sum>(part_sums<4>(part, grad_y, x, mu), shared);
  if (threadIdx.x == 0 && live) sums[2 * place] = of.first, sums[2 * place + 1] = of.second * rstd[plane / channels];
}

// grad_x of what group_norm_bwd_sums left, `count` parts for each plane. Grid and block: as group_norm_fwd_wide.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    group_norm_bwd_wide(const T* __restrict__ grad_y, const T* __restrict__ x, const T* __restrict__ weight,
                        const acc_t<T>* __restrict__ mean, const acc_t<T>* __restrict__ rstd,
                        const acc_t<T>* __restrict__ sums, T* __restrict__ grad_x, Runs runs, Groups groups,
                        int count) {
  using A = acc_t<T>;
  __shared__ Pair<A> shared[kWarp];
  const long long block = gridDim.x - 1 - (long long)blockIdx.x, row = block / runs.parts;
  const int all = int(groups.channels) * count;
  const long long first = row % groups.count * groups.channels;
  Pair<A> total = {};
  for (int i = threadIdx.x; i < all; i += blockDim.x) {
    const A w = parameter(weight, first + i / count, 1), *at = sums + 2 * (row * all + i);
    total = total + Pair<A>{w * at[0], w * at[1]};
  }
  total = block_reduce<Sum>(total, shared);
  const Pair<A> c{total.first / A(runs.size), total.second / A(runs.size)};
  const A mu = mean[row], r = rstd[row];
  each_packs<4>(
      Part<T>(runs, row, int(block % runs.parts), grad_x),
      [&](const Place(&places)[4], const Pack<T>(&packs)[2][4]) {
#pragma unroll
        for (int u = 0; u < 4; ++u) {
          store_gradient(grad_x, places[u], packs[0][u], packs[1][u], weight, groups, row, mu, r, c);
        }
      },
      grad_y, x);
}

// grad_weight and grad_bias of the sums of planes, (images, channels, count, 2), added in order. Grid: ceil(channels /
// kWarp). Block: (kWarp, at most kMostFinishers): channels by threadIdx.x, parts dealt out over threadIdx.y. Each gradient
// may be null.
template <typename T>
__global__ void __launch_bounds__(kWarp* kMostFinishers)
    group_norm_bwd_parameters(const acc_t<T>* __restrict__ sums, T* __restrict__ grad_weight, T* __restrict__ grad_bias,
                              long long images, long long channels, int count) {
  using A = acc_t<T>;
  __shared__ Pair<A> shared[kMostFinishers][kWarp];
  const long long c = blockIdx.x * (long long)kWarp + threadIdx.x;
  Pair<A> own = {};
  for (long long i = threadIdx.y; c < channels && i < images * count; i += blockDim.y) {
    const A* at = sums + 2 * ((i / count * channels + c) * count + i % count);
    own = own + Pair<A>{at[0], at[1]};
  }
  shared[threadIdx.y][threadIdx.x] = own;
  __syncthreads();
  if (threadIdx.y > 0 || c >= channels) return;
  for (int y = 1; y < blockDim.y; ++y) own = own + shared[y][threadIdx.x];
  if (grad_weight) grad_weight[c] = from_acc<T>(own.second);
  if (grad_bias) grad_bias[c] = from_acc<T>(own.first);
}
