// xhat = (x - mean) rstd,   mean = sum(x) / m,   rstd = 1 / sqrt(sum((x - mean)^2) / m + eps)       over the m of a group
// y = xhat weight + bias                                                      weight and bias of the element's channel
//
// g = sum(grad_y),   h = sum(grad_y xhat)                                       over the s of each plane (n, channel, s)
// grad_x = rstd (grad_y weight - c2 - xhat c1),   c1 = sum(weight h) / m,   c2 = sum(weight g) / m        over the group
// grad_weight = sum(h),   grad_bias = sum(g)                                                                  over the n
//
// A group, which is some channels of one image, is a row of neighbours. The ways to compute it:
//
//     sub_warp         short groups whose planes are not whole vectors of 16 bytes: group_norm_sub_warp.cu
//     persistent       the registers of a block, or of the blocks of a cluster, hold a group, which is read once
//     shared_memory    shared memory holds groups of small planes, which are read once
//     two_pass         larger groups, and fp64: group_norm_two_pass.cu
//     nhwc             channels that lie side by side, where the result is to lie so too: group_norm_nhwc.cu
//
// Bytes per element: forward 2 x sizeof(T), backward 3 x sizeof(T); in two passes 3 and 5. About 8 flops forward, 12 backward.
//
// Reached on an H200 (GB/s of the least of these bytes, forward / backward; a copy: 4226), G32 bf16: 32x512x32x32 2815 /
// 2751, 8x256x128x128 2731 / 2937, 32x512x31x33 2698 / 2400, 32x480x31x33 2531 / 2334, 64x256x4095 3197 / 3128. What keeps
// them from the rate of a copy: blocks load, wait for each other and store in turn, and in backward two of them fit on a
// multiprocessor (issue 52% of the cycles, DRAM 60%); vectors of two channels look for them when they are loaded and stored,
// and the sums of channels read again the elements that stand apart; with small tensors, the start of launches.
//
// Python defines PERSISTENT_THREADS_4 and _8, which a block has with that many vectors in a thread, SHARED_MEMORY_THREADS,
// FINALIZE_CHANNELS and FINALIZE_LINES.
#include "common/hw/cluster.cuh"
#include "group_norm/persistent.cuh"
#include "group_norm/shared_memory.cuh"
#include "common/hw/dependent_launch.cuh"

// y, and for backward mean and rstd, one of each for a row. Grid: ceil(rows / blockDim.y), or a cluster for each row. Block:
// (threads of a row, rows), see common/tile/row_tile.cuh; K vectors in each thread hold a row, or a block's part of it.
// ALIGNED: see persistent.cuh; otherwise a row has at least 2 W - 2 threads. weight and bias may be null.
template <typename T, int K, bool ALIGNED>
__global__ void __launch_bounds__(kPersistentThreads<K>, K == 8 ? 3 : 8)
    group_norm_fwd_persistent(const T* __restrict__ x, const T* __restrict__ weight, const T* __restrict__ bias,
                              T* __restrict__ y, Mean<acc_t<T>>* __restrict__ mean, acc_t<T>* __restrict__ rstd,
                              Groups groups, long long rows, long long size, acc_t<T> eps) {
  using A = acc_t<T>;
  using Threads = RowThreads<WarpSums<A>, true>;
  constexpr int W = kVecWidth<T>;
  constexpr bool kExact = K == 4 && sizeof(T) != 2;
  __shared__ typename Threads::Room room;
  Threads threads(room);
  const PersistentRow<K, T, ALIGNED> held(threads.group() * blockDim.y + threadIdx.y, rows, size, threads.part());
  Vector<T> vectors[K];
  T weights[K], biases[K];
  held.load(x, vectors);
  const T *const of_weight = groups.of(held.row, weight), *const of_bias = groups.of(held.row, bias);
  held.load_of_channel(groups, of_weight, 1, weights);
  held.load_of_channel(groups, of_bias, 0, biases);
  const A apart = held.load_apart(x, groups);
  const bool has_end = !ALIGNED && threadIdx.x < 2 * W && held.apart(groups, threadIdx.x) >= 0;
  A sum = reduce_elements<Sum, K, W>([&](int k, int e) { return vectors[k][e]; });  // elements that are not there are 0
  if (has_end) sum += apart;
  A count = A(has_end);
#pragma unroll
  for (int k = 0; k < K; ++k) count += held.any(k) ? A(W) : A(0);
  const Pair<A> of_warp = threads.template over_lanes<Sum>(Pair<A>{count, sum});
  WarpSums<A> found = {of_warp.first, of_warp.first > A(0) ? of_warp.second / of_warp.first : A(0)};
  fold(vectors);
  Pair<A> centred = {};
#pragma unroll
  for (int k = 0; k < K; ++k) {
    held.tile.each_of(k, [&](int e) {
      const A one = vectors[k][e] - found.about;
      centred.first += one, centred.second += one * one;
    });
  }
  if (has_end) {
    const A one = apart - found.about;
    centred.first += one, centred.second += one * one;
  }
  found.centred = threads.template over_lanes<Sum>(centred);
  found = threads.over_warps(
      found, [&](const WarpSums<A>&, const WarpSums<A>* parts, int count) { return combined(parts, count, A(size)); });
  fold(vectors);
  if (!held.live) return;
  A r;
  const Mean<A> mu = statistics<kExact>(found.about, found.centred, A(size), eps, r);
#pragma unroll
  for (int k = 0; k < K; ++k) {
    const GroupAffine<T> affine(mu, r, to_acc(weights[k]), to_acc(biases[k]));
    held.store(y, k, groups, [&](int e) { return affine(vectors[k][e]); });
  }
  held.each_apart(groups, [&](int i, int c, bool first) {
    const long long at = held.row * size + i;
    const GroupAffine<T> affine(mu, r, parameter(of_weight, c, 1), parameter(of_bias, c, 0));
    y[at] = from_acc<T>(affine(first ? apart : to_acc(x[at])));
  });
  if (threadIdx.x == 0 && threads.part() == 0) mean[held.row] = mu, rstd[held.row] = r;
}

// `sums`, (rows, channels, blocks of a cluster, 2), which are g and h of each plane, and grad_x. Grid and block: as
// group_norm_fwd_persistent; `lanes` threads, a power of two and no more than a row has, sum what the vectors hold of a channel.
// Shared memory: a pair for each vector that a block holds. weight and grad_x may be null.
template <typename T, int K, bool ALIGNED>
__global__ void __launch_bounds__(kPersistentThreads<K>, K == 8 ? 2 : 4)
    group_norm_bwd_persistent(const T* __restrict__ grad_y, const T* __restrict__ x, const T* __restrict__ weight,
                              const Mean<acc_t<T>>* __restrict__ mean, const acc_t<T>* __restrict__ rstd,
                              T* __restrict__ grad_x, acc_t<T>* __restrict__ sums, Groups groups, long long rows,
                              long long size, int lanes) {
  let_next_grid_begin();
  using A = acc_t<T>;
  using Threads = RowThreads<Pair<A>, true>;
  extern __shared__ __align__(16) unsigned char bytes[];
  __shared__ typename Threads::Room room;
  Threads threads(room);
  const PersistentRow<K, T, ALIGNED> held(threads.group() * blockDim.y + threadIdx.y, rows, size, threads.part());
  const int channels = int(groups.channels);
  Vector<T> grads[K], inputs[K];
  held.load(grad_y, grads);
  held.load(x, inputs);
  T weights[K];
  const T* const of_group = groups.of(held.row, weight);
  held.load_of_channel(groups, of_group, 1, weights);
  const Mean<A> mu = held.live ? mean[held.row] : Mean<A>{};
  const A r = held.live ? rstd[held.row] : A(0);
  const SplitMean<T> centre(mu.first, r, mu.second);
  Pair<A> total = {};
  const auto keep = [&](int c, Pair<A> own) {
    own = centre.about_mean(own), own.second *= r;
    A* to = sums + 2 * ((held.row * channels + c) * cluster_blocks() + threads.part());
    to[0] = own.first, to[1] = own.second;
    const A w = parameter(of_group, c, 1);
    total = total + Pair<A>{w * own.first, w * own.second};
  };
  T apart_grad, apart_input;  // the first that the thread has
  if (const int i = held.apart(groups, threadIdx.x); i >= 0) {
    apart_grad = grad_y[held.row * size + i], apart_input = x[held.row * size + i];
  }
  sum_channels(held, groups, threads.part(), grad_y, x, grads, inputs, centre.about, lanes,
               reinterpret_cast<Pair<A>*>(bytes), keep);
  total = threads.template reduce<Sum>(total);
  if (!grad_x || !held.live) return;
  fold(grads), fold(inputs);
  const Pair<A> c = means(total, A(size), mu, r);
#pragma unroll
  for (int k = 0; k < K; ++k) {
    const GroupGradient<T> gradient(mu.first, r, c, to_acc(weights[k]));
    held.store(grad_x, k, groups, [&](int e) { return gradient(grads[k][e], inputs[k][e]); });
  }
  held.each_apart(groups, [&](int i, int of, bool first) {
    const long long at = held.row * size + i;
    const GroupGradient<T> gradient(mu.first, r, c, parameter(of_group, of, 1));
    const T grad = first ? apart_grad : grad_y[at], input = first ? apart_input : x[at];
    grad_x[at] = from_acc<T>(gradient(to_acc(grad), to_acc(input)));
  });
}

// As group_norm_fwd_persistent; a block has `planes` planes of a row, or all of them of blockDim.y rows. Shared memory: for the
// vectors that a block has of a tensor. Tensors begin at 16-byte boundaries.
template <typename T>
__global__ void __launch_bounds__(SHARED_MEMORY_THREADS, 3)
    group_norm_fwd_shared_memory(const T* __restrict__ x, const T* __restrict__ weight, const T* __restrict__ bias,
                                 T* __restrict__ y, Mean<acc_t<T>>* __restrict__ mean, acc_t<T>* __restrict__ rstd,
                                 int planes, Groups groups, long long rows, long long size, acc_t<T> eps) {
  using A = acc_t<T>;
  using Threads = RowThreads<Pair<A>, true>;
  constexpr bool kExact = sizeof(T) != 2;
  extern __shared__ uint4 buffer[];
  __shared__ typename Threads::Room room;
  Threads threads(room);
  const SharedPlanes<T> block(threads, planes, groups, rows, size);
  block.span.fetch(x, buffer);
  const T *const weights = groups.of(block.row, weight), *const biases = groups.of(block.row, bias);
  end_group(), wait_for_groups<0>();
  __syncthreads();
  A sum = A(0);
  block.each_value(buffer, [&](A value) { sum += value; });
  const A about = threads.template reduce<Sum>({sum, A(0)}).first / A(size);
  Pair<A> centred = {};
  block.each_value(buffer, [&](A value) {
    const A one = value - about;
    centred.first += one, centred.second += one * one;
  });
  centred = threads.template reduce<Sum>(centred);
  A r;
  const Mean<A> mu = statistics<kExact>(about, centred, A(size), eps, r);
  __syncthreads();  // from here on the results replace the elements in shared memory
  T* const own = block.own(buffer);
  const auto load = [&](int i, int count) { return SharedWord<T>::load(own + i, count); };
  block.each([&](int c, int from, int to) {
    const GroupAffine<T> affine(mu, r, parameter(weights, c, 1), parameter(biases, c, 0));
    block.elements(own, from, to, load, [&](int i, int count, const SharedWord<T>& word) {
      SharedWord<T>::store(own + i, count, [&](int e) { return affine(word[e]); });
    });
  });
  if (threadIdx.x == 0 && threads.part() == 0 && block.live) mean[block.row] = mu, rstd[block.row] = r;
  __syncthreads();
  block.span.store(y, buffer);
}

// `sums`, (rows, channels, 2), which are g and h of each plane, and grad_x. Grid and block: as group_norm_fwd_shared_memory.
// Shared memory: for `most` vectors of each tensor. weight and grad_x may be null.
template <typename T>
__global__ void __launch_bounds__(SHARED_MEMORY_THREADS, 3)
    group_norm_bwd_shared_memory(const T* __restrict__ grad_y, const T* __restrict__ x, const T* __restrict__ weight,
                                 const Mean<acc_t<T>>* __restrict__ mean, const acc_t<T>* __restrict__ rstd,
                                 T* __restrict__ grad_x, acc_t<T>* __restrict__ sums, int planes, Groups groups,
                                 long long rows, long long size, int most) {
  let_next_grid_begin();
  using A = acc_t<T>;
  using Threads = RowThreads<Pair<A>, true>;
  extern __shared__ uint4 buffer[];
  __shared__ typename Threads::Room room;
  Threads threads(room);
  const SharedPlanes<T> block(threads, planes, groups, rows, size);
  block.span.fetch(grad_y, buffer), block.span.fetch(x, buffer + most);
  const T* const weights = groups.of(block.row, weight);
  end_group(), wait_for_groups<0>();
  const Mean<A> mu = block.live ? mean[block.row] : Mean<A>{};
  const A r = block.live ? rstd[block.row] : A(0);
  const SplitMean<T> centre(mu.first, r, mu.second);
  __syncthreads();
  T *const grads = block.own(buffer), *const inputs = block.own(buffer + most);
  using Both = Pair<SharedWord<T>>;
  const auto load = [&](int i, int count) {
    return Both{SharedWord<T>::load(grads + i, count), SharedWord<T>::load(inputs + i, count)};
  };
  Pair<A> total = {};
  block.each([&](int c, int from, int to) {
    Pair<A> own = {};
    block.elements(grads, from, to, load, [&](int, int count, const Both& words) {
      for (int e = 0; e < count; ++e) {
        own.first += words.first[e], own.second += words.first[e] * (words.second[e] - centre.about);
      }
    });
    own = centre.about_mean(own), own.second *= r;
    A* at = sums + 2 * (block.row * groups.channels + c);
    at[0] = own.first, at[1] = own.second;
    const A w = parameter(weights, c, 1);
    total = total + Pair<A>{w * own.first, w * own.second};
  });
  total = threads.template reduce<Sum>(total);
  if (!grad_x) return;
  const Pair<A> of = means(total, A(size), mu, r);
  block.each([&](int c, int from, int to) {
    const GroupGradient<T> gradient(mu.first, r, of, parameter(weights, c, 1));
    block.elements(grads, from, to, load, [&](int i, int count, const Both& words) {
      SharedWord<T>::store(grads + i, count, [&](int e) { return gradient(words.first[e], words.second[e]); });
    });
  });
  __syncthreads();
  block.span.store(grad_x, buffer);
}

// grad_weight and grad_bias, each of which may be null, of the sums of planes, (images, channels, count, 2), added in a fixed
// order. Or, where there are `partials`, (gridDim.y, channels, 1, 2): the sums of `each` images in each of gridDim.y blocks,
// which a second launch adds. Grid: (ceil(channels / FINALIZE_CHANNELS), any). Block: (FINALIZE_CHANNELS, a power of two from
// 4 to FINALIZE_LINES): threadIdx.x is the channel, and the images are dealt out over threadIdx.y.
template <typename T>
__global__ void __launch_bounds__(FINALIZE_CHANNELS* FINALIZE_LINES)
    group_norm_bwd_parameters(const acc_t<T>* __restrict__ sums, T* __restrict__ grad_weight, T* __restrict__ grad_bias,
                              acc_t<T>* __restrict__ partials, long long images, long long each, long long channels,
                              int count) {
  let_next_grid_begin();
  using A = acc_t<T>;
  constexpr int kLines = kWarp / FINALIZE_CHANNELS;  // of a warp
  __shared__ Pair<A> shared[FINALIZE_LINES / kLines][FINALIZE_CHANNELS];
  const long long c = blockIdx.x * (long long)FINALIZE_CHANNELS + threadIdx.x;
  const long long first = blockIdx.y * each;
  const A* const own_sums = written_before(sums) + 2 * first * channels * count;
  images = min(images - first, each);
  Pair<A> own = {};
  for (int i = 0; c < channels && i < count; ++i) {
#pragma unroll 8
    for (long long image = threadIdx.y; image < images; image += blockDim.y) {
      const Vec<A, 2> at = load_vec<A, 2>(own_sums + 2 * ((image * channels + c) * count + i));
      own = own + Pair<A>{at.data[0], at.data[1]};
    }
  }
  const auto add_lines = [&] {
#pragma unroll
    for (int offset = FINALIZE_CHANNELS; offset < kWarp; offset *= 2) own = own + shuffle_xor(own, offset);
  };
  add_lines();
  if (threadIdx.y % kLines == 0) shared[threadIdx.y / kLines][threadIdx.x] = own;
  __syncthreads();
  if (threadIdx.y >= kLines) return;
  own = {};
  for (int warp = threadIdx.y; warp < blockDim.y / kLines; warp += kLines) own = own + shared[warp][threadIdx.x];
  add_lines();
  if (threadIdx.y > 0 || c >= channels) return;
  if (partials) return store_vec(partials + 2 * (blockIdx.y * channels + c), Vec<A, 2>{own.first, own.second});
  if (grad_weight) grad_weight[c] = from_acc<T>(own.second);
  if (grad_bias) grad_bias[c] = from_acc<T>(own.first);
}
