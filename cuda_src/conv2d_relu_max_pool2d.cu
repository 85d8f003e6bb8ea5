// u[n, f, h, w] = sum over c, i, j of weight[f, c, i, j] x[n, c, h - ph + i, w - pw + j] + bias[f]       (rounded to T)
// y[n, f, a, b] = max over di, dj < 2 of max(u[n, f, 2a + di, 2b + dj], 0)
//
// place[n, f, a, b] = 2 di + dj of the maximum, or 4 where no gradient passes: it is the 0 that relu made
// grad_u[n, f, h, w]       = grad_y[n, f, h / 2, w / 2] where place says (h % 2, w % 2), else 0
// grad_weight[f, c, i, j]  = sum over n, h, w of grad_u[n, f, h, w] x[n, c, h - ph + i, w - pw + j]
// grad_bias[f]             = sum over n, h, w of grad_u[n, f, h, w]
// grad_x[n, c, h, w]       = sum over f, i, j of weight[f, c, K - 1 - i, K - 1 - j] grad_u[n, f, h - qh + i, w - qw + j],
//                            q = K - 1 - p
// NaN wins, the last of them; of equals, the first.
//
// u is never stored: forward reads x and writes a quarter of u's elements, and a byte for each; the three kernels of a
// layer (convolution, relu, pooling) are one launch, which is what a small network waits for. 2 K^2 C flops for each
// element of u, by FMAs in acc_t<T>; as many for grad_x, a quarter as many for grad_weight, whose grad_u is read as it is
// kept: one number for four places.
//
// Reached on an H200, forward / backward (PyTorch's three layers, the better of eager and compiled): n64 1->32 28x28 fp32
// 7.5 / 19 us (22 / 47), n64 32->64 14x14 fp32 27 / 62 us (31 / 79), n1024 32->64 14x14 fp32 281 / 523 us (244 / 865); half
// types see conv2d_relu_max_pool2d_mma.cu. Lost: a thread reads 26 times from shared memory for 288 FMAs, and 13 warps of a
// block leave a quarter of a multiprocessor's schedulers a warp more than the rest.
#include "common/pooled_fma.cuh"

// Threads of a block, NF filters each, and blocks of a multiprocessor, at the least.
template <int NF> constexpr int kThreads = NF > 4 ? 448 : 512;
template <int NF> constexpr int kBlocks = NF > 4 ? 2 : 1;

// Grid: (tiles of all images, ceil(F / (NF * blockDim.x / (th * tw)))). Block: th * tw windows, times groups of NF filters,
// in whole warps. A thread owns one window of its filters. Shared memory: for each of `chunk` channels the weights of the
// block's filters and the tile.
template <typename T, int K, int NF>
__global__ void __launch_bounds__(kThreads<NF>, kBlocks<NF>)
    conv2d_relu_max_pool2d_fwd(const T* __restrict__ x, const T* __restrict__ weight, const T* __restrict__ bias,
                               T* __restrict__ y, unsigned char* __restrict__ place, int C, int H, int W, int F, int PH,
                               int PW, int ph, int pw, int th, int tw, int pair, int chunk) {
  using A = acc_t<T>;
  const Images g{C, H, W, F, PH, PW, ph, pw, th, tw, pair};
  const Part part(g, blockIdx.x, PH, PW);
  const int windows = th * tw, window = threadIdx.x % windows;
  const int first = blockIdx.y * (blockDim.x / windows) * NF;
  const T* image = x + part.n * C * H * W;
  const int h0 = 2 * part.a - ph, w0 = 2 * part.b - pw;
  A values[NF][4] = {};
  correlate_tile<K>(
      g, shared_memory<A>(), C, chunk,
      [&](A* tile, int from, int here) {
        Patch<K>(g).fill(tile, here, [&](int c, int row, int column) {
          const int h = h0 + row, w = w0 + column;
          const bool inside = h >= 0 && h < H && w >= 0 && w < W;
          return inside ? image + (((long long)(from + c) * H + h) * W + w) : nullptr;
        });
      },
      [&](A* to, int filters, int from, int here) {
        fill_filters<K, true>(to, weight, first, filters, F, from, here, C);
      },
      values);
  const int a = part.a + window / tw, b = part.b + window % tw;
  if (threadIdx.x / windows >= blockDim.x / windows || a >= PH || b >= PW) return;
#pragma unroll
  for (int k = 0; k < NF; ++k) {
    const int f = first + threadIdx.x / windows * NF + k;
    if (f >= F) return;
    const long long at = ((part.n * F + f) * PH + a) * PW + b;
    pool<T>(values[k], bias ? to_acc(bias[f]) : A(0), y + at, place + at);
  }
}

// Grid: (tiles of 2 x 2 windows over all of x, ceil(C / (NF * blockDim.x / (th * tw)))). Block, shared memory: as
// above, the filters being channels of x and the channels those of y. A thread owns 2 x 2 elements of its channels.
template <typename T, int K, int NF>
__global__ void __launch_bounds__(kThreads<NF>)
    conv2d_relu_max_pool2d_bwd(const T* __restrict__ grad_y, const unsigned char* __restrict__ place,
                               const T* __restrict__ weight, T* __restrict__ grad_x, int C, int H, int W, int F, int PH,
                               int PW, int ph, int pw, int th, int tw, int pair, int chunk) {
  using A = acc_t<T>;
  const Images g{C, H, W, F, PH, PW, ph, pw, th, tw, pair};
  const Part part(g, blockIdx.x, (H + 1) / 2, (W + 1) / 2);
  const int windows = th * tw, window = threadIdx.x % windows;
  const int first = blockIdx.y * (blockDim.x / windows) * NF;
  const int h0 = 2 * part.a - (K - 1 - ph), w0 = 2 * part.b - (K - 1 - pw);
  const long long plane = part.n * F * PH * PW;
  A values[NF][4] = {};
  correlate_tile<K>(
      g, shared_memory<A>(), F, chunk,
      [&](A* tile, int from, int here) {
        Patch<K>(g).fill_windows(tile, here, h0, w0, [&](int f, int a, int b) {
          if (a < 0 || b < 0 || a >= PH || b >= PW) return Placed<A>{A(0), kNone};
          const long long at = plane + ((long long)(from + f) * PH + a) * PW + b;
          return Placed<A>{to_acc(grad_y[at]), place[at]};
        });
      },
      [&](A* to, int filters, int from, int here) {
        fill_filters<K, false>(to, weight, first, filters, C, from, here, F);
      },
      values);
  if (threadIdx.x / windows >= blockDim.x / windows) return;
#pragma unroll
  for (int k = 0; k < NF; ++k) {
    const int c = first + threadIdx.x / windows * NF + k;
    if (c >= C) return;
#pragma unroll
    for (int d = 0; d < 4; ++d) {
      const int h = 2 * (part.a + window / tw) + d / 2, w = 2 * (part.b + window % tw) + d % 2;
      if (h < H && w < W) grad_x[((part.n * C + c) * H + h) * W + w] = from_acc<T>(values[k][d]);
    }
  }
}

// A part of grad_weight and grad_bias for each block of a column of the grid. Grid: (parts, chunks of `chunk` channels,
// ceil(F / 32)): blocks stride over the tiles of all images. Block: a warp is 32 filters and kChannels channels, and
// there are `splits` such for the same, which share the windows. Row blockIdx.x of `parts` (gridDim.x, F * C * K * K + F)
// gets the sums. Shared memory: the tile of `chunk` channels, and of 32 filters grad_y and place; then the splits' sums.
template <typename T, int K>
__global__ void __launch_bounds__(512)
    conv2d_relu_max_pool2d_bwd_weight(const T* __restrict__ grad_y, const unsigned char* __restrict__ place,
                                      const T* __restrict__ x, acc_t<T>* __restrict__ parts, long long tiles, int C,
                                      int H, int W, int F, int PH, int PW, int ph, int pw, int th, int tw, int pair,
                                      int chunk, int splits) {
  using A = acc_t<T>;
  const Images g{C, H, W, F, PH, PW, ph, pw, th, tw, pair};
  const Patch<K> patch(g);
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize, windows = th * tw;
  const int split = warp % splits, mine = warp / splits * kChannels;
  const int first = blockIdx.y * chunk, here = min(chunk, C - first), f = blockIdx.z * kWarpSize + lane;
  A* tile = shared_memory<A>();
  A* grads = tile + chunk * patch.size();  // [window][filter]
  int* starts = reinterpret_cast<int*>(grads + windows * kPitch);
  A sums[kChannels][K * K] = {}, bias_sum = A(0);
  for (long long index = blockIdx.x; index < tiles; index += gridDim.x) {
    const Part part(g, index, PH, PW);
    const T* image = x + part.n * C * H * W;
    const int h0 = 2 * part.a - ph, w0 = 2 * part.b - pw;
    __syncthreads();
    patch.fill(tile, here, [&](int c, int row, int column) {
      const int h = h0 + row, w = w0 + column;
      const bool inside = h >= 0 && h < H && w >= 0 && w < W;
      return inside ? image + (((long long)(first + c) * H + h) * W + w) : nullptr;
    });
    // neighbouring threads on neighbouring windows of a filter
#pragma unroll 4
    for (int i = threadIdx.x; i < windows * kWarpSize; i += blockDim.x) {
      const int filter = i / windows, window = i - filter * windows;
      const int a = part.a + window / tw, b = part.b + window % tw, from = blockIdx.z * kWarpSize + filter;
      const bool live = a < PH && b < PW && from < F;
      const long long at = ((part.n * F + from) * PH + a) * PW + b;
      const int d = live ? place[at] : kNone;
      const A grad = live ? to_acc(grad_y[at]) : A(0);
      grads[window * kPitch + filter] = d == kNone ? A(0) : grad;
      const int row = window / tw * 2 + (d == kNone ? 0 : d / 2), column = window % tw * 2 + (d == kNone ? 0 : d % 2);
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
          sums[c][k] = fma(grad, from[c * patch.size() + k / K * patch.columns + k % K], sums[c][k]);
        }
      }
    }
  }
  // over the splits, in order
  A* row = parts + blockIdx.x * ((long long)F * C * (K * K) + F);
  A* slots = shared_memory<A>() + warp / splits * splits * kWarpSize;
  const auto total = [&](A value) {
    __syncthreads();
    slots[split * kWarpSize + lane] = value;
    __syncthreads();
    A sum = A(0);
    for (int s = 0; split == 0 && s < splits; ++s) sum += slots[s * kWarpSize + lane];
    return sum;
  };
#pragma unroll
  for (int c = 0; c < kChannels; ++c) {
#pragma unroll
    for (int k = 0; k < K * K; ++k) {
      const A sum = total(sums[c][k]);
      if (split == 0 && mine + c < here && f < F) row[((first + mine + c) * (K * K) + k) * F + f] = sum;
    }
  }
  const A sum = total(bias_sum);
  if (split == 0 && mine == 0 && first == 0 && f < F) row[C * (K * K) * F + f] = sum;
}

// grad_weight and grad_bias from `count` parts of `size` numbers, which are (channel, tap, filter) and then `filters` of
// grad_bias, added in a fixed order. Grid: ceil(size / 32). Block: (32, a power of two), threadIdx.y dealing out the parts.
// Either result may be null.
template <typename T>
__global__ void conv2d_relu_max_pool2d_bwd_sum(const acc_t<T>* __restrict__ parts, T* __restrict__ grad_weight,
                                               T* __restrict__ grad_bias, int count, int size, int filters) {
  using A = acc_t<T>;
  __shared__ A shared[32][kWarpSize];
  const int column = blockIdx.x * kWarpSize + threadIdx.x;
  A sum = A(0);
#pragma unroll 8
  for (int p = threadIdx.y; column < size && p < count; p += blockDim.y) sum += parts[(long long)p * size + column];
  shared[threadIdx.y][threadIdx.x] = sum;
  for (int half = blockDim.y / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.y < half) shared[threadIdx.y][threadIdx.x] += shared[threadIdx.y + half][threadIdx.x];
  }
  if (threadIdx.y > 0 || column >= size) return;
  const int taps = size / filters - 1, tap = column / filters, filter = column - tap * filters;
  T* to = tap == taps ? grad_bias + filter : grad_weight + (filter * taps + tap);
  if (tap == taps ? grad_bias != nullptr : grad_weight != nullptr) *to = from_acc<T>(shared[0][threadIdx.x]);
}
