// u[n, f, h, w] = sum over c, i, j of weight[f, c, i, j] x[n, c, h - ph + i, w - pw + j] + bias[f]       (rounded to T)
// y[n, f, a, b] = max over di, dj < 2 of max(u[n, f, 2a + di, 2b + dj], 0)
//
// place[n, f, a, b] = 2 di + dj of the maximum, or 4 where no gradient passes: it is the 0 that relu made
// grad_u[n, f, h, w]       = grad_y[n, f, h / 2, w / 2] where place says (h % 2, w % 2), else 0
// grad_weight[f, c, i, j]  = sum over n, h, w of grad_u[n, f, h, w] x[n, c, h - ph + i, w - pw + j]
// grad_bias[f]             = sum over n, h, w of grad_u[n, f, h, w]
// grad_x[n, c, h, w]       = sum over f, i, j of weight[f, c, K - 1 - i, K - 1 - j] grad_u[n, f, h - qh + i, w - qw + j],
//                            q = K - 1 - p
// NaN wins, and the last NaN of several; of equal values the first wins.
//
// u is never stored: forward reads x, and writes a quarter of u's elements and a byte for each. The three kernels of a layer
// (convolution, ReLU, pooling) are one launch, and launches are what a small network waits for. An element of u takes 2 K^2 C
// flops, by FMAs in acc_t<T>; grad_x takes as many, and grad_weight a quarter, since it reads grad_u as grad_y and place: one
// number for four pixels.
//
// Reached on an H200, forward / backward (PyTorch's three layers, the better of eager and compiled): n64 1->32 28x28 fp32
// 7.7 / 17 us (23 / 46), n64 32->64 14x14 fp32 24 / 51 us (32 / 79), n1024 32->64 14x14 fp32 265 / 538 us (245 / 865); half
// types see conv2d_relu_max_pool2d_mma.cu. Lost: a thread reads 26 times from shared memory for 288 FMAs, and 13 warps of a
// block leave a quarter of a multiprocessor's schedulers a warp more than the rest.
#include "small_conv/fma.cuh"

// Grid: (tiles of all images, ceil(F / (NF * groups))). Block: th * tw windows, times groups of NF filters, times the splits
// of the channels, in whole warps. A thread owns one window of its filters. Shared memory: the weights of the block's filters
// and the tile, for each of `chunk` channels; later the splits' sums.
template <typename T, int K, int NF>
__global__ void __launch_bounds__(kThreads<NF>, kBlocks<NF>)
    conv2d_relu_max_pool2d_fwd(const T* __restrict__ x, const T* __restrict__ weight, const T* __restrict__ bias,
                               T* __restrict__ y, unsigned char* __restrict__ place, int C, int H, int W, int F, int PH,
                               int PW, int ph, int pw, int th, int tw, int pair, int groups, int chunk) {
  using A = acc_t<T>;
  const Images g{C, H, W, F, PH, PW, ph, pw, th, tw, pair, groups};
  const ImageTile origin(g, blockIdx.x, PH, PW);
  const Role<NF> role(g, C);
  const int first = blockIdx.y * groups * NF;
  A values[NF][4] = {};
  correlate_image<T, K, NF, true>(g, role, origin, first, chunk, x, weight, values);
  const int a = origin.a + role.window / tw, b = origin.b + role.window % tw;
  if (role.split > 0 || a >= PH || b >= PW) return;
#pragma unroll
  for (int k = 0; k < NF; ++k) {
    const int f = first + role.group * NF + k;
    if (f >= F) return;
    const long long at = ((origin.n * F + f) * PH + a) * PW + b;
    pool<T>(values[k], bias ? to_acc(bias[f]) : A(0), y + at, place + at);
  }
}

// Grid: (tiles of 2 x 2 windows over all of x, ceil(C / (NF * groups))). Block and shared memory: as above, but filters are
// channels of x, and channels are those of y. A thread owns 2 x 2 elements of its channels.
template <typename T, int K, int NF>
__global__ void __launch_bounds__(kThreads<NF>)
    conv2d_relu_max_pool2d_bwd(const T* __restrict__ grad_y, const unsigned char* __restrict__ place,
                               const T* __restrict__ weight, T* __restrict__ grad_x, int C, int H, int W, int F, int PH,
                               int PW, int ph, int pw, int th, int tw, int pair, int groups, int chunk) {
  using A = acc_t<T>;
  const Images g{C, H, W, F, PH, PW, ph, pw, th, tw, pair, groups};
  const ImageTile origin(g, blockIdx.x, (H + 1) / 2, (W + 1) / 2);
  const Role<NF> role(g, F);
  const int first = blockIdx.y * groups * NF;
  const int h0 = 2 * origin.a - (K - 1 - ph), w0 = 2 * origin.b - (K - 1 - pw);
  const long long plane = origin.n * F * PH * PW;
  A values[NF][4] = {};
  correlate_tile<K>(
      g, role, shared_memory<A>(), F, chunk,
      [&](A* tile, int from, int here) {
        Patch<K>(g).fill_windows(tile, here, h0, w0, [&](int f, int a, int b) {
          if (a < 0 || b < 0 || a >= PH || b >= PW) return Placed<A>{A(0), kNoPlace};
          const long long at = plane + ((long long)(from + f) * PH + a) * PW + b;
          return Placed<A>{to_acc(grad_y[at]), place[at]};
        });
      },
      [&](A* to, int filters, int from, int here) {
        fill_filters<K, false>(to, weight, first, filters, C, from, here, F);
      },
      values);
  if (role.split > 0) return;
#pragma unroll
  for (int k = 0; k < NF; ++k) {
    const int c = first + role.group * NF + k;
    if (c >= C) return;
    store_window(grad_x + (origin.n * C + c) * H * W, H, W, origin.a + role.window / tw, origin.b + role.window % tw,
                 values[k]);
  }
}

// Partial sums of grad_weight and grad_bias, over the tiles of all images that a block strides over: row blockIdx.x of
// `partials` (gridDim.x, F * C * K * K + F). Grid: (rows of partials, chunks of `chunk` channels, ceil(F / 32)). Block: a warp
// has 32 filters and kChannels channels, and `splits` warps share the windows of the same. Shared memory: the tile of `chunk`
// channels, and grad_y and place of 32 filters; later the splits' sums.
template <typename T, int K>
__global__ void __launch_bounds__(SMALL_CONV_THREADS)
    conv2d_relu_max_pool2d_bwd_weight(const T* __restrict__ grad_y, const unsigned char* __restrict__ place,
                                      const T* __restrict__ x, acc_t<T>* __restrict__ partials, long long tiles, int C,
                                      int H, int W, int F, int PH, int PW, int ph, int pw, int th, int tw, int pair,
                                      int chunk, int splits) {
  using A = acc_t<T>;
  constexpr int kPitch = kWarpSize + 1;  // so that neighbours in either direction lie in different banks
  const Images g{C, H, W, F, PH, PW, ph, pw, th, tw, pair};
  const Patch<K> patch(g);
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize, windows = th * tw;
  const int split = warp % splits, mine = warp / splits * kChannels;
  const int first = blockIdx.y * chunk, here = min(chunk, C - first), f = blockIdx.z * kWarpSize + lane;
  A* tile = shared_memory<A>();
  A* grads = tile + chunk * patch.size();  // [window][filter]
  int* starts = reinterpret_cast<int*>(grads + windows * kPitch);
  A sums[kChannels][K][K] = {}, bias_sum = A(0);
  for (long long index = blockIdx.x; index < tiles; index += gridDim.x) {
    const ImageTile origin(g, index, PH, PW);
    const Planes<T> image{x + (origin.n * C + first) * H * W, H, W};
    __syncthreads();
    patch.fill(tile, here, image, 2 * origin.a - ph, 2 * origin.b - pw);
    // neighbouring threads on neighbouring windows of a filter
#pragma unroll 4
    for (int i = threadIdx.x; i < windows * kWarpSize; i += blockDim.x) {
      const int filter = i / windows, window = i - filter * windows;
      const int a = origin.a + window / tw, b = origin.b + window % tw, from = blockIdx.z * kWarpSize + filter;
      const bool live = a < PH && b < PW && from < F;
      const long long at = ((origin.n * F + from) * PH + a) * PW + b;
      const int d = live ? place[at] : kNoPlace;
      const A grad = live ? to_acc(grad_y[at]) : A(0);
      grads[window * kPitch + filter] = d == kNoPlace ? A(0) : grad;
      const int row = window / tw * 2 + (d == kNoPlace ? 0 : d / 2),
                column = window % tw * 2 + (d == kNoPlace ? 0 : d % 2);
      starts[window * kPitch + filter] = row * patch.columns + column;
    }
    end_group();
    wait_for_groups<0>();
    __syncthreads();
#pragma unroll 2
    for (int window = split; window < windows; window += splits) {
      const A grad = grads[window * kPitch + lane];
      const A* from = tile + mine * patch.size() + starts[window * kPitch + lane];
      bias_sum += grad;
#pragma unroll
      for (int c = 0; c < kChannels; ++c) {
        if (mine + c >= here) continue;
#pragma unroll
        for (int k = 0; k < K * K; ++k) {
          A& sum = sums[c][k / K][k % K];
          sum = fma(grad, from[c * patch.size() + k / K * patch.columns + k % K], sum);
        }
      }
    }
  }
  A* to = partials + blockIdx.x * ((long long)F * C * (K * K) + F);
  store_partials(g, to, shared_memory<A>(), split, splits, first + mine, first + here, f, sums, bias_sum);
}
