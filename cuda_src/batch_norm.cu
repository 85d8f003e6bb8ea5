// xhat = (x - mean) rstd,   mean = sum(x) / m,   rstd = 1 / sqrt(sum((x - mean)^2) / m + eps)     over the m of a channel
// y = xhat weight + bias
// running_mean += momentum (mean - running_mean),   running_var += momentum (sum((x - mean)^2) / (m - 1) - running_var)
//
// grad_x = rstd weight (grad_y - c2 - xhat c1),   c1 = sum(grad_y xhat) / m,   c2 = sum(grad_y) / m
// grad_weight = sum(grad_y xhat),   grad_bias = sum(grad_y)
//
// Not in training, mean and rstd are those of running_mean and running_var, and c1 = c2 = 0.
//
// Here are the kernels of images, (n, c, s), read as runs.cuh has it; those of channels that lie side by side are in
// batch_norm_columns.cu. A channel that the blocks of a cluster share is read once from memory, and again from shared
// memory or the cache. Else a first pass leaves the moments, or the sums, of each block's part; the second combines
// them, and goes from the end: what was read last is still in cache. WHOLE: every run of every tensor is whole vectors.
//
// weight, bias, running_mean and running_var are of T, or with `wide` of float beside a half type.
//
// Bytes per element: training forward 2 x sizeof(T) (3 without clusters), backward 3 x sizeof(T) (5); else forward
// 2 x sizeof(T), backward 3 x sizeof(T). About 8 flops forward, 10 backward.
//
// Reached on an H200 (GB/s of the least of these bytes, forward / backward; a copy: 4226), of images: 64x256x56x56
// training fp32 2902 / 2983, bf16 2244 / 2752; inference fp32 3992 / 3785, bf16 3666 / 3483; 64x3x224x223 bf16 1437 /
// 1706; of columns, training bf16: 64x256x56x56 channels_last 2046 / 2208, 256x2048x7x7 1918 / 2153, 4096x1000 871 /
// 1252, 4096x4095 1532 / 1773. Lost: half types are bound by the instructions for a vector of eight; the forms without
// clusters read everything twice, of which the cache holds the end. Small planes held in clusters, of which backward
// reads once, took as long.
#include "batch_norm/nchw.cuh"

constexpr int kThreads = 256;
constexpr int kClusterThreads = 512;

// Training: y, mean, rstd and the running statistics, which may be null. Grid: channels x runs.parts, in clusters of
// runs.parts. Block: a multiple of 32. Shared memory: for `room` vectors, of 16 bytes.
template <typename T, bool WHOLE>
__global__ void __launch_bounds__(kClusterThreads, 2)
    batch_norm_fwd_cluster(const T* __restrict__ x, const void* __restrict__ weight, const void* __restrict__ bias,
                           T* __restrict__ y, acc_t<T>* __restrict__ mean, acc_t<T>* __restrict__ rstd,
                           void* running_mean, void* running_var, Runs runs, int room, int wide, acc_t<T> momentum,
                           acc_t<T> eps) {
  using A = acc_t<T>;
  extern __shared__ uint4 kept[];
  __shared__ Pair<A> shared[kWarp];
  __shared__ Moments<A> all[kMaxCluster];
  if (cluster_blocks() > 1) cluster_begin();
  const long long c = runs.segment(blockIdx.x);
  const Part<T, WHOLE> part(runs, c, runs.part(blockIdx.x), y);
  const Source<T> source{x, kept, room};
  source.fetch(part);
  wait_for_groups<0>();
  share_in_cluster(block_moments(part_moments(part, source), part.elements(), shared), all);
  auto of = merged<A>(
      int(runs.parts), [&](int i) { return all[i].count; }, [&](int i) { return Pair<A>{all[i].mean, all[i].square}; });
  of.count = A(runs.count * runs.size);
  const auto affine = Parameters<T>{weight, bias, wide}.affine(c, {of.mean, of.rstd(eps)});
  store_normalised(part, source, y, [&] { return affine; });
  if (runs.part(blockIdx.x) > 0 || threadIdx.x > 0) return;
  keep<T>(of, c, mean, rstd, running_mean, running_var, wide, momentum, eps);
}

// Three numbers of `parts`, (channels, runs.parts, 3), for each block. Grid: channels x runs.parts. Block: kThreads at
// most, a multiple of 32.
template <typename T, bool WHOLE>
__global__ void __launch_bounds__(kThreads)
    batch_norm_moments(const T* __restrict__ x, acc_t<T>* __restrict__ parts, Runs runs) {
  __shared__ Pair<acc_t<T>> shared[kWarp];
  const Part<T, WHOLE> part(runs, runs.segment(blockIdx.x), runs.part(blockIdx.x), x);
  const auto of = block_moments(part_moments(part, Source<T>{x}), part.elements(), shared);
  if (threadIdx.x == 0) store_moments(parts + 3 * (long long)blockIdx.x, of);
}

// y; in training, where there are `parts`, also mean, rstd and the running statistics, by the first block of a channel.
// Grid and block: as batch_norm_moments. weight, bias, and in training running_mean and running_var, may be null.
template <typename T, bool WHOLE>
__global__ void __launch_bounds__(kThreads)
    batch_norm_fwd(const T* __restrict__ x, const void* __restrict__ weight, const void* __restrict__ bias,
                   T* __restrict__ y, const acc_t<T>* __restrict__ parts, acc_t<T>* __restrict__ mean,
                   acc_t<T>* __restrict__ rstd, void* running_mean, void* running_var, Runs runs, int wide,
                   acc_t<T> momentum, acc_t<T> eps) {
  using A = acc_t<T>;
  __shared__ Moments<A> shared[kWarp];
  const unsigned block = gridDim.x - 1 - blockIdx.x, channels = gridDim.x / unsigned(runs.parts);
  const long long c = parts ? runs.segment(block) : block % channels;  // as they lie in memory
  const int number = parts ? runs.part(block) : int(block / channels);
  const Parameters<T> parameters{weight, bias, wide};
  Pair<A> of = {};
  if (parts) {
    Moments<A> moments = block_merge_parts(parts + 3 * c * runs.parts, int(runs.parts), shared);
    moments.count = A(runs.count * runs.size);
    of = {moments.mean, moments.rstd(eps)};
    if (number == 0 && threadIdx.x == 0) {
      keep<T>(moments, c, mean, rstd, running_mean, running_var, wide, momentum, eps);
    }
  }
  store_normalised(Part<T, WHOLE>(runs, c, number, y), Source<T>{x}, y, [&] {  // after the loads of x
    return parameters.affine(c, parts ? of : Statistics<T>{nullptr, nullptr, running_mean, running_var, wide, eps}[c]);
  });
}

// Training: grad_x, grad_weight and grad_bias, each of which may be null. Grid and block: as batch_norm_fwd_cluster, with
// room in shared memory for so many vectors of either tensor.
template <typename T, bool WHOLE>
__global__ void __launch_bounds__(kClusterThreads, 2)
    batch_norm_bwd_cluster(const T* __restrict__ grad_y, const T* __restrict__ x, const void* __restrict__ weight,
                           const acc_t<T>* __restrict__ mean, const acc_t<T>* __restrict__ rstd, T* __restrict__ grad_x,
                           void* __restrict__ grad_weight, void* __restrict__ grad_bias, Runs runs, int room,
                           int wide) {
  using A = acc_t<T>;
  extern __shared__ uint4 kept[];
  __shared__ Pair<A> shared[kWarp], all[kMaxCluster];
  if (cluster_blocks() > 1) cluster_begin();
  const long long c = runs.segment(blockIdx.x);
  const Part<T, WHOLE> part(runs, c, runs.part(blockIdx.x), x);
  const A mu = mean[c], r = rstd[c];
  const Centre<T> centre(mu, r);
  const Source<T> grads{grad_y, kept, room}, inputs{x, kept + room, room};
  grads.fetch(part), inputs.fetch(part);
  wait_for_groups<0>();
  share_in_cluster(block_reduce<Sum>(part_sums(part, grads, inputs, centre.about), shared), all);
  Pair<A> sums = all[0];
  for (int i = 1; i < runs.parts; ++i) sums = sums + all[i];
  sums = centre.moved(sums), sums.second *= r;
  if (runs.part(blockIdx.x) == 0 && threadIdx.x == 0) set_gradients<T>(sums, c, grad_weight, grad_bias, wide);
  if (!grad_x) return;
  const A w = parameter<T>(weight, c, wide, A(1)), count = A(runs.count * runs.size);
  store_gradient(part, grads, inputs, grad_x, Gradient<T>::of(mu, r, w, sums, count));
}

// Two numbers of `parts`, (channels, runs.parts, 2), for each block: sum(grad_y), sum(grad_y xhat). Where the statistics
// were the running ones also grad_x. Both may be null. Grid and block: as batch_norm_moments.
template <typename T, bool WHOLE>
__global__ void __launch_bounds__(kThreads)
    batch_norm_bwd_sums(const T* __restrict__ grad_y, const T* __restrict__ x, const void* __restrict__ weight,
                        const acc_t<T>* __restrict__ mean, const acc_t<T>* __restrict__ rstd,
                        const void* __restrict__ running_mean, const void* __restrict__ running_var,
                        T* __restrict__ grad_x, acc_t<T>* __restrict__ parts, Runs runs, int wide, acc_t<T> eps) {
  using A = acc_t<T>;
  using P = Part<T, WHOLE>;
  constexpr int U = P::kAtOnce;
  __shared__ Pair<A> shared[kWarp];
  const long long c = runs.segment(blockIdx.x);
  const P part(runs, c, runs.part(blockIdx.x), x);
  const Pair<A> of = Statistics<T>{mean, rstd, running_mean, running_var, wide, eps}[c];
  const Centre<T> centre(of.first, of.second);
  const A scale = of.second * parameter<T>(weight, c, wide, A(1));
  Pair<A> sums = {};
  each_packs(
      part,
      [&](const Place(&places)[U], const Vector<T>(&vectors)[2][U]) {
        add_products(sums, places, vectors[0], vectors[1], centre.about);
#pragma unroll
        for (int u = 0; u < U; ++u) {
          if (grad_x) part.store(grad_x, places[u], [&](int e) { return vectors[0][u][e] * scale; });
        }
      },
      Source<T>{grad_y}, Source<T>{x});
  if (!parts) return;
  sums = centre.moved(block_reduce<Sum>(sums, shared));
  A* at = parts + 2 * (long long)blockIdx.x;
  if (threadIdx.x == 0) at[0] = sums.first, at[1] = sums.second * of.second;
}

// grad_x in training, of the parts that batch_norm_bwd_sums left; grad_weight and grad_bias, which may be null, by the
// first block of a channel. Grid and block: as batch_norm_moments.
template <typename T, bool WHOLE>
__global__ void __launch_bounds__(kThreads)
    batch_norm_bwd(const T* __restrict__ grad_y, const T* __restrict__ x, const void* __restrict__ weight,
                   const acc_t<T>* __restrict__ mean, const acc_t<T>* __restrict__ rstd,
                   const acc_t<T>* __restrict__ parts, T* __restrict__ grad_x, void* __restrict__ grad_weight,
                   void* __restrict__ grad_bias, Runs runs, int wide) {
  using A = acc_t<T>;
  __shared__ Pair<A> shared[kWarp];
  const unsigned block = gridDim.x - 1 - blockIdx.x;
  const long long c = runs.segment(block);
  const int number = runs.part(block);
  Pair<A> sums = {};
  for (int p = threadIdx.x; p < runs.parts; p += blockDim.x) {
    const A* at = parts + 2 * (c * runs.parts + p);
    sums = sums + Pair<A>{at[0], at[1]};
  }
  sums = block_reduce<Sum>(sums, shared);
  if (number == 0 && threadIdx.x == 0) set_gradients<T>(sums, c, grad_weight, grad_bias, wide);
  const A w = parameter<T>(weight, c, wide, A(1)), count = A(runs.count * runs.size);
  store_gradient(Part<T, WHOLE>(runs, c, number, grad_x), Source<T>{grad_y}, Source<T>{x}, grad_x,
                 Gradient<T>::of(mean[c], rstd[c], w, sums, count));
}

// grad_weight and grad_bias, of `count` parts for each of the `pixels` of a channel, and `of`, what grad_x follows from in
// training, of so many `values`. Each may be null. Part p of column i is at p step_part + i step_column; of images a
// channel is one column. Grid: ceil(channels / kFinished). Block: (kFinished, kFinishers).
template <typename T>
__global__ void __launch_bounds__(kFinished* kFinishers)
    batch_norm_bwd_finish(const acc_t<T>* __restrict__ parts, const void* __restrict__ weight,
                          const acc_t<T>* __restrict__ mean, const acc_t<T>* __restrict__ rstd,
                          Gradient<T>* __restrict__ of, void* __restrict__ grad_weight, void* __restrict__ grad_bias,
                          long long channels, long long values, int pixels, int count, long long step_part,
                          long long step_column, int wide) {
  using A = acc_t<T>;
  const long long c = blockIdx.x * (long long)kFinished + threadIdx.x;
  finish_channel<Pair<A>>(
      c < channels,
      [&](int first) {
        Pair<A> own = {};
#pragma unroll 8
        for (int i = first; i < count * pixels; i += kFinishers) {
          const int part = i / pixels;
          const A* at = parts + part * step_part + (c * pixels + i - part * pixels) * step_column;
          own = own + Pair<A>{at[0], at[1]};
        }
        return own;
      },
      [](Pair<A>& own, const Pair<A>& other) { own = own + other; },
      [&](const Pair<A>& sums) {
        if (of) of[c] = Gradient<T>::of(mean[c], rstd[c], parameter<T>(weight, c, wide, A(1)), sums, A(values));
        set_gradients<T>(sums, c, grad_weight, grad_bias, wide);
      });
}
