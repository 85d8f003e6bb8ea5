// xhat = (x - mean) rstd,   mean = sum(x) / m,   rstd = 1 / sqrt(sum((x - mean)^2) / m + eps)       over the m of a group
// y = xhat weight + bias                                                      weight and bias of the element's channel
//
// g = sum(grad_y),   h = sum(grad_y xhat)                                       over the s of each plane (n, channel, s)
// grad_x = rstd (grad_y weight - c2 - xhat c1),   c1 = sum(weight h) / m,   c2 = sum(weight g) / m        over the group
// grad_weight = sum(h),   grad_bias = sum(g)                                                                  over the n
//
// A group, channels of one image, is a row of neighbours. Where it fits a block, or the blocks of a cluster, it is read
// once: into registers, or small planes into shared memory. The kernels of larger groups are in group_norm_wide.cu, those of
// short groups whose planes are no whole vectors of 16 bytes in group_norm_short.cu.
//
// Bytes per element: forward 2 x sizeof(T), backward 3 x sizeof(T); of groups too large to hold, 3 and 5. About 8 flops
// forward, 12 backward.
//
// Reached on an H200 (GB/s of the least of these bytes, forward / backward; a copy: 4226), G32 bf16: 32x512x32x32 2815 /
// 2751, 8x256x128x128 2731 / 2937, 32x512x31x33 2698 / 2400, 32x480x31x33 2531 / 2334, 64x256x4095 3197 / 3128. Lost: blocks
// load, wait for each other and store in turn, of backward two on a multiprocessor (issue 52% of the cycles, DRAM 60%);
// mixed vectors look for their channel when they are loaded and stored, and the sums of channels read what stands apart again;
// of small tensors, the start of launches.
#include "common/hw/cluster.cuh"
#include "group_norm/persistent.cuh"
#include "group_norm/shared_planes.cuh"
#include "common/hw/dependent_launch.cuh"

constexpr int kHeldThreads = 512;
constexpr int kFinished = 8;  // channels of a block that adds up their parts
constexpr int kMostFinishers = 128;

// Grid: ceil(rows / blockDim.y), or a cluster for each row. Block: (threads of a row, rows): see rows.cuh; K vectors in each
// thread hold a row, or a block's part of it; MIXED: see group_norm_held.cuh. mean and rstd are kept for backward, one of
// each for a row. weight and bias may be null.
template <typename T, int K, bool MIXED>
__global__ void __launch_bounds__(K == 8 ? 256 : kHeldThreads, K == 8   ? 3 - (sizeof(T) == 8)
                                                               : K == 4 ? 2
                                                                        : 1)
    group_norm_fwd(const T* __restrict__ x, const T* __restrict__ weight, const T* __restrict__ bias, T* __restrict__ y,
                   Mean<acc_t<T>>* __restrict__ mean, acc_t<T>* __restrict__ rstd, Groups groups, long long rows,
                   long long size, acc_t<T> eps) {
  using A = acc_t<T>;
  using Threads = RowThreads<Found<A>, true>;
  constexpr int W = kVecWidth<T>;
  constexpr bool kExact = K == 1 && sizeof(T) != 2;
  __shared__ typename Threads::Room room;
  Threads threads(room);
  const Held<K, T, MIXED> held(threads.group() * blockDim.y + threadIdx.y, rows, size, threads.part());
  Vector<T> vectors[K];
  T weights[K], biases[K];
  held.load(x, vectors);
  const T *const of_weight = groups.of(held.row, weight), *const of_bias = groups.of(held.row, bias);
  held.load_of_channel(groups, of_weight, 1, weights);
  held.load_of_channel(groups, of_bias, 0, biases);
  const A apart = held.load_apart(x, groups);
  const bool lone = MIXED && threadIdx.x < 2 * W && held.apart(groups, threadIdx.x) >= 0;
  A sum = reduce_elements<Sum, K, W>([&](int k, int e) { return vectors[k][e]; });  // what is not there is 0
  if (lone) sum += apart;
  A count = A(lone);
#pragma unroll
  for (int k = 0; k < K; ++k) count += held.any(k) ? A(W) : A(0);
  const Pair<A> of_warp = threads.template over_lanes<Sum>(Pair<A>{count, sum});
  Found<A> found = {of_warp.first, of_warp.first > A(0) ? of_warp.second / of_warp.first : A(0)};
  fold(vectors);
  Pair<A> centred = {};
#pragma unroll
  for (int k = 0; k < K; ++k) {
    held.tile.each_of(k, [&](int e) {
      const A one = vectors[k][e] - found.about;
      centred.first += one, centred.second += one * one;
    });
  }
  if (lone) {
    const A one = apart - found.about;
    centred.first += one, centred.second += one * one;
  }
  found.centred = threads.template over_lanes<Sum>(centred);
  found = threads.over_warps(
      found, [&](const Found<A>&, const Found<A>* parts, int count) { return of_warps(parts, count, A(size)); });
  fold(vectors);
  if (!held.live) return;
  A r;
  const Mean<A> mu = statistics<kExact>(found.about, found.centred, A(size), eps, r);
#pragma unroll
  for (int k = 0; k < K; ++k) {
    const Affine<T> affine(mu, r, to_acc(weights[k]), to_acc(biases[k]));
    held.store(y, k, groups, [&](int e) { return affine(vectors[k][e]); });
  }
  held.each_apart(groups, [&](int i, int c, bool first) {
    const long long at = held.row * size + i;
    const Affine<T> affine(mu, r, parameter(of_weight, c, 1), parameter(of_bias, c, 0));
    y[at] = from_acc<T>(affine(first ? apart : to_acc(x[at])));
  });
  if (threadIdx.x == 0 && threads.part() == 0) mean[held.row] = mu, rstd[held.row] = r;
}

// g and h of each plane, (rows, channels, blocks of a cluster, 2), and grad_x. Grid and block: as group_norm_fwd; `lanes`
// threads, a power of two and no more than a row has, sum what vectors hold of a channel. Shared memory: a pair for each
// vector that a block holds. weight and grad_x may be null.
template <typename T, int K, bool MIXED>
__global__ void __launch_bounds__(K == 8 ? 256 : kHeldThreads, K == 8 ? 2 : 1)
    group_norm_bwd(const T* __restrict__ grad_y, const T* __restrict__ x, const T* __restrict__ weight,
                   const Mean<acc_t<T>>* __restrict__ mean, const acc_t<T>* __restrict__ rstd, T* __restrict__ grad_x,
                   acc_t<T>* __restrict__ sums, Groups groups, long long rows, long long size, int lanes) {
  let_next_grid_begin();
  using A = acc_t<T>;
  using Threads = RowThreads<Pair<A>, true>;
  constexpr int W = kVecWidth<T>;
  extern __shared__ __align__(16) unsigned char bytes[];
  __shared__ typename Threads::Room room;
  Threads threads(room);
  Pair<A>* shared = reinterpret_cast<Pair<A>*>(bytes);
  const Held<K, T, MIXED> held(threads.group() * blockDim.y + threadIdx.y, rows, size, threads.part());
  const int channels = int(groups.channels), plane = int(groups.plane.divisor), count = K * blockDim.x;
  Vector<T> grads[K], inputs[K];
  held.load(grad_y, grads);
  held.load(x, inputs);
  T weights[K];
  const T* const of_group = groups.of(held.row, weight);
  held.load_of_channel(groups, of_group, 1, weights);
  const Mean<A> mu = held.live ? mean[held.row] : Mean<A>{};
  const A r = held.live ? rstd[held.row] : A(0);
  const Centre<T> centre(mu.first, r, mu.second);
  const auto add = [&](Pair<A>& to, A grad, A value) { to.first += grad, to.second += grad * (value - centre.about); };
  const auto sum = [&](int k) {
    Pair<A> own = {};
#pragma unroll
    for (int e = 0; e < W; ++e) add(own, grads[k][e], inputs[k][e]);
    return own;
  };
  Pair<A> total = {};
  const auto keep = [&](int c, Pair<A> own) {
    own = centre.moved(own), own.second *= r;
    A* to = sums + 2 * ((held.row * channels + c) * cluster_blocks() + threads.part());
    to[0] = own.first, to[1] = own.second;
    const A w = parameter(of_group, c, 1);
    total = total + Pair<A>{w * own.first, w * own.second};
  };
  T apart_grad, apart_input;  // the first that the thread has
  if (const int i = held.apart(groups, threadIdx.x); i >= 0) {
    apart_grad = grad_y[held.row * size + i], apart_input = x[held.row * size + i];
  }
  if (const int only = held.channel(groups); only >= 0) {
    Pair<A> own = {};
#pragma unroll
    for (int k = 0; k < K; ++k) {
      if (held.any(k)) own = own + sum(k);
    }
    own = block_reduce<Sum>(own, shared);
    for (int c = threadIdx.x; c < channels; c += blockDim.x) keep(c, c == only ? own : Pair<A>{});
  } else {
    Pair<A>* const vectors = shared + threadIdx.y * count;
#pragma unroll
    for (int k = 0; k < K; ++k) vectors[k * blockDim.x + threadIdx.x] = held.any(k) ? sum(k) : Pair<A>{};
    int lane = threadIdx.x % lanes;
    T rest_grad, rest_input;  // of the channel that comes next
    const auto stretch = [&](int c) {
      const int start = int(held.start), begin = threads.part() == 0 ? 0 : start;
      const int end = threads.part() == cluster_blocks() - 1 ? int(size) : min(int(size), start + count * W);
      return Stretch<W>(start, plane, c, begin, held.live && c < channels ? end : begin);
    };
    const auto load_rest = [&](const Stretch<W>& of, int j) {
      const bool there = j < of.rests();
      const long long at = held.row * size + of.rest(j);
      rest_grad = there ? grad_y[at] : from_acc<T>(0), rest_input = there ? x[at] : from_acc<T>(0);
    };
    if constexpr (MIXED) {
      fold(grads), fold(inputs);
      asm volatile("" : "+r"(lane));  // what follows comes behind all of the vectors: before them it is in their way
      load_rest(stretch(threadIdx.x / lanes), lane);
    }
    __syncthreads();
    const int step = blockDim.x / lanes;
    for (int first = 0; first < channels; first += step) {
      const int c = first + threadIdx.x / lanes;
      const bool there = c < channels && held.live;
      Pair<A> own = {};
      if constexpr (MIXED) {
        const Stretch<W> of = stretch(c);
        add(own, to_acc(rest_grad), to_acc(rest_input));
#pragma unroll 1
        for (int j = lane + lanes; j < of.rests(); j += lanes) {
          load_rest(of, j);
          add(own, to_acc(rest_grad), to_acc(rest_input));
        }
        if (first + step < channels) load_rest(stretch(c + step), lane);
        own = sum_of_lanes(own, vectors, of.first, of.last, lane, lanes);
      } else {
        const PacksOf<W> of{plane, int(held.start), count};
        own = sum_of_lanes(own, vectors, of.first(min(c, channels)), of.first(min(c, channels) + 1), lane, lanes);
      }
      if (lane == 0 && there) keep(c, own);
    }
  }
  total = threads.template reduce<Sum>(total);
  if (!grad_x || !held.live) return;
  fold(grads), fold(inputs);
  const Pair<A> c = means(total, A(size), mu, r);
#pragma unroll
  for (int k = 0; k < K; ++k) {
    const Gradient<T> gradient(mu.first, r, c, to_acc(weights[k]));
    held.store(grad_x, k, groups, [&](int e) { return gradient(grads[k][e], inputs[k][e]); });
  }
  held.each_apart(groups, [&](int i, int of, bool first) {
    const long long at = held.row * size + i;
    const Gradient<T> gradient(mu.first, r, c, parameter(of_group, of, 1));
    const T grad = first ? apart_grad : grad_y[at], input = first ? apart_input : x[at];
    grad_x[at] = from_acc<T>(gradient(to_acc(grad), to_acc(input)));
  });
}

// As group_norm_fwd; a block has `of_block` planes of a row, or all of blockDim.y rows. blockDim.x is a multiple of LANES.
// Shared memory: for the vectors of a block. Tensors begin at 16-byte boundaries.
template <typename T, int LANES>
__global__ void __launch_bounds__(kHeldThreads, 3)
    group_norm_fwd_small(const T* __restrict__ x, const T* __restrict__ weight, const T* __restrict__ bias,
                         T* __restrict__ y, Mean<acc_t<T>>* __restrict__ mean, acc_t<T>* __restrict__ rstd,
                         int of_block, Groups groups, long long rows, long long size, acc_t<T> eps) {
  using A = acc_t<T>;
  using Threads = RowThreads<Pair<A>, true>;
  constexpr bool kExact = sizeof(T) != 2;
  extern __shared__ uint4 kept[];
  __shared__ typename Threads::Room room;
  Threads threads(room);
  const Share<T, LANES> share(threads, of_block, groups, rows, size);
  share.span.fetch(x, kept);
  const T *const weights = groups.of(share.row, weight), *const biases = groups.of(share.row, bias);
  end_group(), wait_for_groups<0>();
  __syncthreads();
  A sum = A(0);
  share.each_value(kept, [&](A value) { sum += value; });
  const A about = threads.template reduce<Sum>({sum, A(0)}).first / A(size);
  Pair<A> centred = {};
  share.each_value(kept, [&](A value) {
    const A one = value - about;
    centred.first += one, centred.second += one * one;
  });
  centred = threads.template reduce<Sum>(centred);
  A r;
  const Mean<A> mu = statistics<kExact>(about, centred, A(size), eps, r);
  __syncthreads();  // from here on in place
  T* const own = share.own(kept);
  const auto load = [&](int i, int count) { return Few<T>::load(own + i, count); };
  share.each([&](int c, int from, int to) {
    if (from >= to) return;
    const Affine<T> affine(mu, r, parameter(weights, c, 1), parameter(biases, c, 0));
    share.elements(own, from, to, load, [&](int i, int count, const Few<T>& few) {
      Few<T>::store(own + i, count, [&](int e) { return affine(few[e]); });
    });
  });
  if (threadIdx.x == 0 && threads.part() == 0 && share.live) mean[share.row] = mu, rstd[share.row] = r;
  __syncthreads();
  share.span.store(y, kept);
}

// g and h of each plane, (rows, channels, 2), and grad_x. Grid and block: as group_norm_fwd_small. Shared memory: for `most`
// vectors of each tensor. weight and grad_x may be null.
template <typename T, int LANES>
__global__ void __launch_bounds__(kHeldThreads, 3)
    group_norm_bwd_small(const T* __restrict__ grad_y, const T* __restrict__ x, const T* __restrict__ weight,
                         const Mean<acc_t<T>>* __restrict__ mean, const acc_t<T>* __restrict__ rstd,
                         T* __restrict__ grad_x, acc_t<T>* __restrict__ sums, int of_block, Groups groups,
                         long long rows, long long size, int most) {
  let_next_grid_begin();
  using A = acc_t<T>;
  using Threads = RowThreads<Pair<A>, true>;
  extern __shared__ uint4 kept[];
  __shared__ typename Threads::Room room;
  Threads threads(room);
  const Share<T, LANES> share(threads, of_block, groups, rows, size);
  share.span.fetch(grad_y, kept), share.span.fetch(x, kept + most);
  const T* const weights = groups.of(share.row, weight);
  end_group(), wait_for_groups<0>();
  const Mean<A> mu = share.live ? mean[share.row] : Mean<A>{};
  const A r = share.live ? rstd[share.row] : A(0);
  const Centre<T> centre(mu.first, r, mu.second);
  __syncthreads();
  T *const grads = share.own(kept), *const inputs = share.own(kept + most);
  using Both = Pair<Few<T>>;
  const auto load = [&](int i, int count) {
    return Both{Few<T>::load(grads + i, count), Few<T>::load(inputs + i, count)};
  };
  Pair<A> total = {};
  share.each([&](int c, int from, int to) {
    Pair<A> own = {};
    share.elements(grads, from, to, load, [&](int, int count, const Both& few) {
      for (int e = 0; e < count; ++e) {
        own.first += few.first[e], own.second += few.first[e] * (few.second[e] - centre.about);
      }
    });
#pragma unroll
    for (int offset = LANES / 2; offset > 0; offset /= 2) own = own + shuffle_xor(own, offset);
    if (share.lane > 0 || from >= to) return;
    own = centre.moved(own), own.second *= r;
    A* at = sums + 2 * (share.row * groups.channels + c);
    at[0] = own.first, at[1] = own.second;
    const A w = parameter(weights, c, 1);
    total = total + Pair<A>{w * own.first, w * own.second};
  });
  total = threads.template reduce<Sum>(total);
  if (!grad_x) return;
  const Pair<A> of = means(total, A(size), mu, r);
  share.each([&](int c, int from, int to) {
    if (from >= to) return;
    const Gradient<T> gradient(mu.first, r, of, parameter(weights, c, 1));
    share.elements(grads, from, to, load, [&](int i, int count, const Both& few) {
      Few<T>::store(grads + i, count, [&](int e) { return gradient(few.first[e], few.second[e]); });
    });
  });
  __syncthreads();
  share.span.store(grad_x, kept);
}

// grad_weight and grad_bias of the sums of planes, (images, channels, count, 2), of larger groups too, added in a fixed order;
// or, of `each` images in each of gridDim.y blocks, what is to be added so again: `parts`, (gridDim.y, channels, 1, 2). Grid:
// (ceil(channels / kFinished), any). Block: (kFinished, a power of two, from 4 to kMostFinishers): channels by threadIdx.x,
// images dealt out over threadIdx.y. Each gradient may be null; parts is, where they are written.
template <typename T>
__global__ void __launch_bounds__(kFinished* kMostFinishers)
    group_norm_bwd_parameters(const acc_t<T>* __restrict__ sums, T* __restrict__ grad_weight, T* __restrict__ grad_bias,
                              acc_t<T>* __restrict__ parts, long long images, long long each, long long channels,
                              int count) {
  let_next_grid_begin();
  using A = acc_t<T>;
  constexpr int kLines = kWarp / kFinished;  // of a warp
  __shared__ Pair<A> shared[kMostFinishers / kLines][kFinished];
  const long long c = blockIdx.x * (long long)kFinished + threadIdx.x;
  const long long first = blockIdx.y * each;
  const A* const own_sums = written_before(sums) + 2 * first * channels * count;
  images = min(images - first, each);
  Pair<A> own = {};
  for (int part = 0; c < channels && part < count; ++part) {
#pragma unroll 8
    for (long long image = threadIdx.y; image < images; image += blockDim.y) {
      const Vec<A, 2> at = load_vec<A, 2>(own_sums + 2 * ((image * channels + c) * count + part));
      own = own + Pair<A>{at.data[0], at.data[1]};
    }
  }
  const auto add_lines = [&] {
#pragma unroll
    for (int offset = kFinished; offset < kWarp; offset *= 2) own = own + shuffle_xor(own, offset);
  };
  add_lines();
  if (threadIdx.y % kLines == 0) shared[threadIdx.y / kLines][threadIdx.x] = own;
  __syncthreads();
  if (threadIdx.y >= kLines) return;
  own = {};
  for (int warp = threadIdx.y; warp < blockDim.y / kLines; warp += kLines) own = own + shared[warp][threadIdx.x];
  add_lines();
  if (threadIdx.y > 0 || c >= channels) return;
  if (parts) return store_vec(parts + 2 * (blockIdx.y * channels + c), Vec<A, 2>{own.first, own.second});
  if (grad_weight) grad_weight[c] = from_acc<T>(own.second);
  if (grad_bias) grad_bias[c] = from_acc<T>(own.first);
}
