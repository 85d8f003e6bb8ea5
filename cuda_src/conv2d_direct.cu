// conv2d.cu's equations for K x K filters with stride 1, no dilation and one group, of few channels: tiles of 2 x 2
// windows of the result, by FMAs, as conv2d_relu_max_pool2d.cu, and the sum over blocks that both share.
//
// Bytes: (x + weight + y) x sizeof(T); 2 K^2 C flops per element of y, and as many for grad_x and for grad_weight. At 50
// TFLOP/s, n64 32->64 14x14 takes 9 us for each; 1->32 28x28 is 6.4 MB, twice 2 us. Each launch has another 3 us.
#include "common/pooled_fma.cuh"

// y = x correlated with weight (F, C, K, K), or, unless FORWARD, with weight (C, F, K, K) turned round: from grad_y, grad_x.
// Grid: (tiles of 2 x 2 windows over all of y, ceil(F / (NF * groups))). Block: half of th * tw windows, times groups of NF
// filters, times the splits of the channels, in whole warps. A thread owns two windows of its filters. Shared memory: for
// each of `chunk` channels the weights of the block's filters and the tile; then the splits' sums.
template <typename T, int K, int NF, bool FORWARD>
__global__ void __launch_bounds__(kThreads<NF>, kBlocks<NF>)
    conv2d_direct(const T* __restrict__ x, const T* __restrict__ weight, const T* __restrict__ bias, T* __restrict__ y,
                  int C, int H, int W, int F, int YH, int YW, int ph, int pw, int th, int tw, int pair, int groups,
                  int chunk) {
  using A = acc_t<T>;
  const Images g{C, H, W, F, YH, YW, ph, pw, th, tw, pair, groups};
  const Part part(g, blockIdx.x, (YH + 1) / 2, (YW + 1) / 2);
  const Role role(g, C);
  const int first = blockIdx.y * groups * NF;
  A values[NF][4 * kWindows] = {};
  correlate_image<T, K, NF, FORWARD>(g, role, part, first, chunk, x, weight, values);
  role.for_windows(g, [&](int v, int row, int column) {
#pragma unroll
    for (int k = 0; k < NF; ++k) {
      const int f = first + role.group * NF + k;
      if (f >= F) return;
      store_window(y + (part.n * F + f) * YH * YW, YH, YW, part.a + row, part.b + column, values[k] + 4 * v,
                   bias ? to_acc(bias[f]) : A(0));
    }
  });
}

// Grid, block, shared memory: see sum_patches().
template <typename T, int K, int NF>
__global__ void __launch_bounds__(512)
    conv2d_direct_bwd_weight(const T* __restrict__ grad_y, const T* __restrict__ x, acc_t<T>* __restrict__ parts,
                             long long tiles, int C, int H, int W, int F, int YH, int YW, int ph, int pw, int th,
                             int tw, int pair, int chunk, int splits) {
  using A = acc_t<T>;
  const Images g{C, H, W, F, YH, YW, ph, pw, th, tw, pair, 1};
  sum_patches<T, K, NF>(g, (YH + 1) / 2, (YW + 1) / 2, x, parts, tiles, chunk, splits,
                        [&](A* grads, int filters, const Part& part) {
                          const int pitch = 4 * grads_pitch(filters), f0 = blockIdx.z * filters;
                          const Planes<T> image{grad_y + (part.n * F + f0) * YH * YW, YH, YW};
                          for_each(filters, 2 * th, 2 * tw, [&](int f, int row, int column) {
                            const T* from = f0 + f < F ? image.at(f, 2 * part.a + row, 2 * part.b + column) : nullptr;
                            fetch(grads + (row / 2 * tw + column / 2) * pitch + 4 * f + row % 2 * 2 + column % 2, from);
                          });
                        });
}

// grad_weight and grad_bias from `count` parts of `size` numbers, which are (channel, tap, filter) and then `filters` of
// grad_bias, added in a fixed order. Grid: ceil(size / 32). Block: (32, a power of two), threadIdx.y dealing out the parts.
// Either result may be null.
template <typename T>
__global__ void conv2d_direct_sum(const acc_t<T>* __restrict__ parts, T* __restrict__ grad_weight,
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
