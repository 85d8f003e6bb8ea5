// group_norm.cu's equations for short groups whose planes are not whole vectors of 16 bytes, as those of 7 x 7. They go
// straight from memory into registers, in vectors of 16 bytes or 8 that no two groups share. A part of a warp has a group, or
// up to four warps that wait for each other alone. The parameters' gradients are left to group_norm_bwd_parameters.
//
// Bytes: see group_norm.cu. Reached on an H200 (GB/s, forward / backward; a copy: 4226), bf16: 256x2048x7x7 G32 3373 / 2922,
// 16384x64x7x7 G16 3391 / 3325, 1024x64x7x7 G16 1457 / 1165. What keeps them from the rate of a
// copy: a thread has few bytes, so that what is computed for each vector, or for all of them, weighs as much (with vectors of 8
// bytes, instructions issue in 62% and 75% of the cycles); blocks load and compute in turn; with the smaller batch, the start
// of launches, three in backward.
#include "group_norm/sub_warp.cuh"
#include "common/hw/dependent_launch.cuh"

// y, and for backward mean and rstd, one of each for a row. Grid: ceil(rows / blockDim.y). Block: see sub_warp.cuh, of
// SUB_WARP_THREADS. Shared memory: for each of the block's rows a SharedAffine for each channel and one behind the
// last. Tensors begin at boundaries of BYTES; weight and bias may be null.
template <typename T, int BYTES, int THREADS, int K>
__global__ void __launch_bounds__(SUB_WARP_THREADS, kSubWarpBlocks<T, BYTES, K>)
    group_norm_fwd_sub_warp(const T* __restrict__ x, const T* __restrict__ weight, const T* __restrict__ bias,
                            T* __restrict__ y, Mean<acc_t<T>>* __restrict__ mean, acc_t<T>* __restrict__ rstd,
                            Groups groups, Divisor images, int rows, int size, acc_t<T> eps) {
  using A = acc_t<T>;
  using Row = SubWarpRow<T, BYTES, THREADS, K>;
  constexpr int W = Row::W;
  constexpr bool kExact = sizeof(T) != 2;
  extern __shared__ __align__(16) unsigned char bytes[];
  const Row own(rows, size);
  const int channels = int(groups.channels);
  const T *const weights = own.of_group(weight, groups, images), *const biases = own.of_group(bias, groups, images);
  A of_weight = A(1), of_bias = A(0);
  const auto load_parameters = [&](int c) {
    if (own.live && c < channels) of_weight = parameter(weights, c, 1), of_bias = parameter(biases, c, 0);
  };
  load_parameters(threadIdx.x);
  Vector<T, BYTES> vectors[K];
  own.load(x, vectors);
  __shared__ A of_warps[1][kSubWarpWarps], centred_of_warps[1 + kExact][kSubWarpWarps];
  A sum[] = {reduce_elements<Sum, K, W>([&](int k, int e) { return vectors[k][e]; })};
  Row::sum(sum, of_warps);
  if (BYTES == 16) fold(vectors);
  const A about = average<T>(sum[0], size);
  A centred[1 + kExact] = {};  // the squares, and what the mean's rounding leaves
#pragma unroll
  for (int k = 0; k < K; ++k) {
    Pair<A> of_vector = {};
#pragma unroll
    for (int e = 0; e < W; ++e) {
      const A one = vectors[k][e] - about;
      of_vector.first += one * one, of_vector.second += one;
    }
    centred[0] += own.any(k) ? of_vector.first : A(0);
    if (kExact) centred[kExact] += own.any(k) ? of_vector.second : A(0);
  }
  Row::sum(centred, centred_of_warps);
  if (BYTES == 16) fold(vectors);
  Mean<A> mu = {about, A(0)};
  A r;
  // a short sum of half types that differ little is exact; where they differ more, its rounding does not matter
  if constexpr (kExact) mu = statistics<true>(about, {centred[kExact], centred[0]}, A(size), eps, r);
  else r = rsqrtf(average<T>(centred[0], size) + eps);
  SharedAffine<T>* const affines = reinterpret_cast<SharedAffine<T>*>(bytes) + threadIdx.y * (channels + 1);
  for (int c = threadIdx.x; c <= channels; c += Row::threads()) {
    if (c > threadIdx.x) load_parameters(c);
    affines[c] = SharedAffine<T>(GroupAffine<T>(mu, r, of_weight, of_bias));
  }
  if (threadIdx.x == 0 && own.live) mean[own.row] = mu, rstd[own.row] = r;
  Row::wait();
  own.store(y, groups, affines, [&](int k, const SharedAffine<T>& affine) {
    return [&vectors, k, affine](int e) { return affine(vectors[k][e]); };
  });
}

// `sums`, (rows, channels, 2), which are g and h of each plane, and grad_x. Grid and block: as group_norm_fwd_sub_warp; `lanes`
// threads, a power of two and no more than a row has, sum what the vectors hold of a channel. Shared memory: for each of the
// block's rows a pair for each vector that its threads hold, and three for each channel and for one behind the last. weight and
// grad_x may be null.
template <typename T, int BYTES, int THREADS, int K>
__global__ void __launch_bounds__(SUB_WARP_THREADS, kSubWarpBlocksBwd<BYTES, K>)
    group_norm_bwd_sub_warp(const T* __restrict__ grad_y, const T* __restrict__ x, const T* __restrict__ weight,
                            const Mean<acc_t<T>>* __restrict__ mean, const acc_t<T>* __restrict__ rstd,
                            T* __restrict__ grad_x, acc_t<T>* __restrict__ sums, Groups groups, Divisor images,
                            int rows, int size, int lanes) {
  let_next_grid_begin();
  using A = acc_t<T>;
  using Row = SubWarpRow<T, BYTES, THREADS, K>;
  using One = Vector<T, BYTES>;
  constexpr int W = Row::W;
  const int threads = Row::threads(), count = K * threads;
  extern __shared__ __align__(16) unsigned char bytes[];
  const Row own(rows, size);
  const int channels = int(groups.channels);
  const auto start = [&](int c) { return unsigned(c * int(groups.plane.divisor)); };
  One grads[K], inputs[K];
  own.load(grad_y, grads);
  own.load(x, inputs);
  Pair<A>* const vectors = reinterpret_cast<Pair<A>*>(bytes) + threadIdx.y * (count + 3 * (channels + 1));
  Pair<A>*const fronts = vectors + count, *const rests = fronts + channels + 1;
  A* const weights = reinterpret_cast<A*>(rests + channels + 1);
  const T* const of_group = own.of_group(weight, groups, images);
  const Mean<A> mu = own.live ? mean[own.row] : Mean<A>{};
  const A r = own.live ? rstd[own.row] : A(0);
  const SplitMean<T> centre(mu.first, r, mu.second);
  const auto add = [&](Pair<A>& to, A grad, A value) { to.first += grad, to.second += grad * (value - centre.about); };
  for (int c = threadIdx.x; c <= channels; c += Row::threads()) {
    weights[c] = own.live && c < channels ? parameter(of_group, c, 1) : A(0);
    const int border = start(c) % W;  // there is none where a vector is one element, nor at the row's ends
    Pair<A> front = {}, rest = {};
    if (border > 0 && own.live) {  // a vector of two channels is loaded twice: to find it among all would cost more
      const long long at = own.row * (long long)size + (start(c) - border);
      const One grad = load_aligned<T, BYTES>(grad_y + at), input = load_aligned<T, BYTES>(x + at);
#pragma unroll
      for (int e = 0; e < W; ++e) {
        if (e < border) add(front, grad[e], input[e]);
        else add(rest, grad[e], input[e]);
      }
    }
    fronts[c] = front, rests[c] = rest;
  }
#pragma unroll
  for (int k = 0; k < K; ++k) {
    Pair<A> sum = {};
#pragma unroll
    for (int e = 0; e < W; ++e) add(sum, grads[k][e], inputs[k][e]);
    vectors[k * threads + threadIdx.x] = own.any(k) ? sum : Pair<A>{};
  }
  Row::wait();
  Pair<A> total = {};
  const int lane = threadIdx.x & (lanes - 1), step = threads / lanes;
#pragma unroll 1
  for (int first = 0; first < channels; first += step) {
    const int c = first + threadIdx.x / lanes;
    const int end = c < channels ? start(c + 1) / W : 0;
    Pair<A> sum = {};
#pragma unroll 4
    for (int i = (start(c) + W - 1) / W + lane; i < end; i += lanes) sum = sum + vectors[i];
    for (int offset = lanes / 2; offset > 0; offset /= 2) sum = sum + shuffle_xor(sum, offset);
    if (lane > 0 || c >= channels || !own.live) continue;
    sum = sum + rests[c] + fronts[c + 1];
    sum = centre.about_mean(sum), sum.second *= r;
    store_vec<A, 2>(sums + 2 * (own.row * (long long)channels + c), {sum.first, sum.second});
    total = total + Pair<A>{weights[c] * sum.first, weights[c] * sum.second};
  }
  if (!grad_x) return;
  __shared__ A of_warps[2][kSubWarpWarps];
  A totals[] = {total.first, total.second};
  Row::sum(totals, of_warps);
  fold(grads), fold(inputs);
  Pair<A> c = {average<T>(totals[0], size), average<T>(totals[1], size)};
  if constexpr (sizeof(T) != 2) c = means(Pair<A>{totals[0], totals[1]}, A(size), mu, r);
  own.store(grad_x, groups, weights, [&](int k, A weight) {
    return [&grads, &inputs, k, gradient = GroupGradient<T>(mu.first, r, c, weight)](int e) {
      return gradient(grads[k][e], inputs[k][e]);
    };
  });
}
