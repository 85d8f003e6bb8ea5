// conv2d.cu's equations for K x K filters with stride 1, no dilation, one group and few channels. Blocks compute tiles of 2 x 2
// windows of the result by FMAs.
//
// Bytes: (x + weight + y) x sizeof(T); 2 K^2 C flops per element of y, and as many for grad_x and for grad_weight. At 50
// TFLOP/s, n64 32->64 14x14 takes 9 us for each; 1->32 28x28 is 6.4 MB, twice 2 us. Each launch has another 3 us.
//
// Reached on an H200, forward / backward (cuDNN without TF32), fp32: n64 1->32 28x28 8.3 / 28 us (20 / 70), n64 32->64 14x14
// 24 / 59 us (31 / 76), n1024 32->64 14x14 265 / 568 us (245 / 838). Lost: a block waits for its tile and its weights;
// grad_weight adds what many blocks found.
#include "small_conv/fma.cuh"

// FORWARD: y = x correlated with weight (F, C, K, K). Else x is grad_y, y is grad_x, and weight is (C, F, K, K), whose taps are
// reversed. Grid: (tiles of 2 x 2 windows over all of y, ceil(F / (NF * groups))). Block: th * tw windows, times groups of NF
// filters, times the splits of the channels, in whole warps. A thread owns one window of its filters. Shared memory: the weights
// of the block's filters and the tile, for each of `chunk` channels; later the splits' sums.
template <typename T, int K, int NF, bool FORWARD>
__global__ void __launch_bounds__(kThreads<NF>, kBlocks<NF>)
    conv2d_direct(const T* __restrict__ x, const T* __restrict__ weight, const T* __restrict__ bias, T* __restrict__ y,
                  int C, int H, int W, int F, int YH, int YW, int ph, int pw, int th, int tw, int pair, int groups,
                  int chunk) {
  using A = acc_t<T>;
  const Images g{C, H, W, F, YH, YW, ph, pw, th, tw, pair, groups};
  const ImageTile origin(g, blockIdx.x, (YH + 1) / 2, (YW + 1) / 2);
  const Role<NF> role(g, C);
  const int first = blockIdx.y * groups * NF;
  A values[NF][4] = {};
  correlate_image<T, K, NF, FORWARD>(g, role, origin, first, chunk, x, weight, values);
  if (role.split > 0) return;
#pragma unroll
  for (int k = 0; k < NF; ++k) {
    const int f = first + role.group * NF + k;
    if (f >= F) return;
    store_window(y + (origin.n * F + f) * YH * YW, YH, YW, origin.a + role.window / tw, origin.b + role.window % tw,
                 values[k], bias ? to_acc(bias[f]) : A(0));
  }
}

// How many lanes of a warp of the gradient of weight differ in their filters, NF each; the others differ in channels.
template <int NF> constexpr int kLanes = NF > 1 ? SMALL_CONV_LANES : 32;

// Partial sums of grad_weight and grad_bias, over the tiles of all images that a block strides over: row blockIdx.x of
// `partials` (gridDim.x, F * C * K * K + F). Grid: (rows of partials, chunks of `chunk` channels, ceil(F / kFilters)). Block: a
// warp has kFilters filters and a few channels, kChannels to a lane, and `splits` warps share the windows of the same. Shared
// memory: the four gradients of each [window][filter], and the tile of `chunk` channels; later the splits' sums.
template <typename T, int K, int NF>
__global__ void __launch_bounds__(SMALL_CONV_THREADS)
    conv2d_direct_bwd_weight(const T* __restrict__ grad_y, const T* __restrict__ x, acc_t<T>* __restrict__ partials,
                             long long tiles, int C, int H, int W, int F, int YH, int YW, int ph, int pw, int th,
                             int tw, int pair, int chunk, int splits) {
  using A = acc_t<T>;
  constexpr int V = kVecWidth<A>, kFilters = kLanes<NF> * NF, kPitch = 4 * (kFilters + 1);
  const Images g{C, H, W, F, YH, YW, ph, pw, th, tw, pair};
  const Patch<K> patch(g);
  const int lane = threadIdx.x % kLanes<NF>, warp = threadIdx.x / kWarpSize, windows = th * tw;
  const int split = warp % splits;
  const int mine = (warp / splits * (kWarpSize / kLanes<NF>)+threadIdx.x % kWarpSize / kLanes<NF>)*kChannels;
  const int first = blockIdx.y * chunk, here = min(chunk, C - first), f0 = blockIdx.z * kFilters;
  const int step_row = splits / tw, step_column = splits % tw;
  const bool biased = first + mine == 0;
  A* grads = shared_memory<A>();
  A* tile = grads + windows * kPitch;
  A sums[NF][kChannels][K][K] = {}, bias_sums[NF] = {};
  for (long long index = blockIdx.x; index < tiles; index += gridDim.x) {
    const ImageTile origin(g, index, (YH + 1) / 2, (YW + 1) / 2);
    const Planes<T> image{x + (origin.n * C + first) * H * W, H, W};
    const Planes<T> grad_image{grad_y + (origin.n * F + f0) * YH * YW, YH, YW};
    __syncthreads();
    patch.fill(tile, here, image, 2 * origin.a - ph, 2 * origin.b - pw);
    for_each(kFilters, 2 * th, 2 * tw, [&](int f, int row, int column) {
      A* to = grads + (row / 2 * tw + column / 2) * kPitch + 4 * f + row % 2 * 2 + column % 2;
      grad_image.fetch_pixel(to, f, 2 * origin.a + row, 2 * origin.b + column, f0 + f < F);
    });
    end_group();
    wait_for_groups<0>();
    __syncthreads();
    int row = split / tw, column = split % tw;
    for (int window = split; window < windows; window += splits) {
      A grad[NF][4];
#pragma unroll
      for (int n = 0; n < NF; ++n) {
#pragma unroll
        for (int d = 0; d < 4; d += V) {
          const A* from = grads + window * kPitch + (n * kLanes<NF> + lane) * 4 + d;
          const Vec<A, V> some = load_vec<A, V>(from);
#pragma unroll
          for (int e = 0; e < V; ++e) grad[n][d + e] = some.data[e];
        }
        if (biased) bias_sums[n] += (grad[n][0] + grad[n][1]) + (grad[n][2] + grad[n][3]);
      }
      const A* from = tile + mine * patch.size() + patch.at(2 * row, 2 * column);
#pragma unroll
      for (int c = 0; c < kChannels; ++c, from += patch.size()) {
        if (mine + c >= here) continue;
#pragma unroll
        for (int r = 0; r <= K; ++r) {
          A pixels[K + 1];
#pragma unroll
          for (int j = 0; j <= K; j += 2) {
            const Vec<A, 2> two = load_vec<A, 2>(from + patch.at(r, j));
            pixels[j] = two.data[0], pixels[j + 1] = two.data[1];
          }
#pragma unroll
          for (int di = 0; di < 2; ++di) {
            const int i = r - di;
            if (i < 0 || i >= K) continue;
#pragma unroll
            for (int j = 0; j < K; ++j) {
#pragma unroll
              for (int n = 0; n < NF; ++n) {
                A& sum = sums[n][c][i][j];
                sum = fma(grad[n][2 * di], pixels[j], sum);
                sum = fma(grad[n][2 * di + 1], pixels[j + 1], sum);
              }
            }
          }
        }
      }
      row += step_row, column += step_column;
      if (column >= tw) column -= tw, ++row;
    }
  }
  A* to = partials + blockIdx.x * ((long long)F * C * (K * K) + F);
#pragma unroll
  for (int n = 0; n < NF; ++n) {
    const int f = f0 + n * kLanes<NF> + lane;
    store_partials(g, to, grads, split, splits, first + mine, first + here, f, sums[n], bias_sums[n]);
  }
}

// Adds `count` partials in a fixed order. Each has `size` numbers: those of grad_weight as (channel, tap, filter), then those of
// grad_bias. Grid: ceil(size / 32). Block: (32, a power of two); threadIdx.y has every blockDim.y-th partial. Either result may
// be null.
template <typename T>
__global__ void conv2d_direct_sum(const acc_t<T>* __restrict__ partials, T* __restrict__ grad_weight,
                                  T* __restrict__ grad_bias, int count, int size, int filters) {
  using A = acc_t<T>;
  __shared__ A shared[32][kWarpSize];
  const int column = blockIdx.x * kWarpSize + threadIdx.x;
  A sum = A(0);
#pragma unroll 8
  for (int p = threadIdx.y; column < size && p < count; p += blockDim.y) sum += partials[(long long)p * size + column];
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
