// conv2d_relu_max_pool2d.cu's equations for half types by tensor cores, on sm_80 and later. They are implicit GEMMs: a row is a
// pixel of a tile, which is in shared memory once, and k runs over the channels under one tap after another. The sums of a
// window's four pixels meet in one thread, which pools them. Sums are in fp32.
//
// Reached on an H200, forward / backward, bf16 (PyTorch's three layers, the better of eager and compiled): n64 32->64 14x14
// 13 / 36 us (26 / 68), n1024 57 / 156 us (104 / 312). Lost: a block waits for its tile, and computes little on it.
#include "small_conv/mma.cuh"

// The same as conv2d_relu_max_pool2d_fwd by tensor cores, on sm_80 and later. Grid: (blocks that stride over the tiles of
// all images, ceil(F / filters of a block)). Block: a warp for each 8 windows of a tile and 8 NB filters. Shared memory: the
// filters, then a tile.
template <typename T, int K, int NB>
__global__ void __launch_bounds__(SMALL_CONV_MMA_THREADS, 2)
    conv2d_relu_max_pool2d_fwd_mma(const T* __restrict__ x, const T* __restrict__ weight, const T* __restrict__ bias,
                                   T* __restrict__ y, unsigned char* __restrict__ place, long long tiles, int C, int H,
                                   int W, int F, int PH, int PW, int ph, int pw, int th, int tw, int up, int row,
                                   int quarter) {
#if __CUDA_ARCH__ >= 800
  const Tile<K> g{th, tw, up, row, quarter};
  const Images images{C, H, W, F, PH, PW, ph, pw, th, tw};
  correlate_tiles<T, K, NB, true>(
      g, images, tiles, PH, PW, weight, F, C,
      [&](T* tile, const ImageTile& origin, int units) {
        g.fill(tile, x + origin.n * C * H * W, units, C, H, W, 2 * origin.a - ph, 2 * origin.b - pw);
      },
      [&](const ImageTile& origin, int f, int a, int b, const float (&values)[4]) {
        const long long at = ((origin.n * F + f) * PH + a) * PW + b;
        pool<T>(values, bias ? to_acc(bias[f]) : 0.0f, y + at, place + at);
      });
#endif
}

// The same as conv2d_relu_max_pool2d_bwd by tensor cores, launched as the kernel above on tiles of 2 x 2 pixels of x.
template <typename T, int K, int NB>
__global__ void __launch_bounds__(SMALL_CONV_MMA_THREADS, 2)
    conv2d_relu_max_pool2d_bwd_mma(const T* __restrict__ grad_y, const unsigned char* __restrict__ place,
                                   const T* __restrict__ weight, T* __restrict__ grad_x, long long tiles, int C, int H,
                                   int W, int F, int PH, int PW, int ph, int pw, int th, int tw, int up, int row,
                                   int quarter) {
#if __CUDA_ARCH__ >= 800
  const Tile<K> g{th, tw, up, row, quarter};
  const Images images{C, H, W, F, PH, PW, ph, pw, th, tw};
  correlate_tiles<T, K, NB, false>(
      g, images, tiles, (H + 1) / 2, (W + 1) / 2, weight, C, F,
      [&](T* tile, const ImageTile& origin, int units) {
        const long long plane = origin.n * F * PH * PW;
        g.fill(tile, grad_y + plane, place + plane, units, F, PH, PW, 2 * origin.a - (K - 1 - ph),
               2 * origin.b - (K - 1 - pw));
      },
      [&](const ImageTile& origin, int c, int a, int b, const float (&values)[4]) {
        store_window(grad_x + (origin.n * C + c) * H * W, H, W, a, b, values);
      });
#endif
}

// The same partials as those of conv2d_relu_max_pool2d_bwd_weight, by tensor cores. Grid: (rows of partials, ceil(C / 32)).
// Block: a warp for each row of taps and 16 filters. A warp multiplies grad_u of 16 filters by the pixels under its taps; it
// makes the fragments of grad_u from grad_y and place, and four windows are the 16 pixels of a step. Shared memory: 16 bytes of
// zeros; a tile of 32 channels; for each filter and window a word with grad_y and place, in rows of `grads_row`; and where the
// windows begin.
template <typename T, int K>
__global__ void __launch_bounds__(128 * K, K == 3 ? 2 : 1)
    conv2d_relu_max_pool2d_bwd_weight_mma(const T* __restrict__ grad_y, const unsigned char* __restrict__ place,
                                          const T* __restrict__ x, float* __restrict__ partials, long long tiles, int C,
                                          int H, int W, int F, int PH, int PW, int ph, int pw, int th, int tw, int up,
                                          int row, int quarter, int grads_row) {
#if __CUDA_ARCH__ >= 800
  const Tile<K> g{th, tw, up, row, quarter};
  const Images images{C, H, W, F, PH, PW, ph, pw, th, tw};
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, i = warp % K, f0 = warp / K * 16;
  const int filters = blockDim.x / 32 / K * 16, first = blockIdx.y * 32, steps = (th * tw + 3) / 4;
  T* zeros = shared_memory<T>();
  T* tile = zeros + kUnit;
  unsigned* grads = reinterpret_cast<unsigned*>(tile + 4 * quarter * kUnit);
  int* starts = reinterpret_cast<int*>(grads + filters * grads_row);
  if (threadIdx.x < kUnit) zeros[threadIdx.x] = from_acc<T>(0);
  for (int w = threadIdx.x; w < steps * 4; w += blockDim.x) starts[w] = w < th * tw ? g.window(w) : -1;
  int taps[K];
#pragma unroll
  for (int j = 0; j < K; ++j) taps[j] = g.pixel(lane / 8 % 2 + i, lane % 2 + j) + lane / 16 * kUnit;
  float sums[K][4][4] = {}, bias_sums[4] = {};
  const unsigned ones = pair_of_ones<T>();
  for (long long index = blockIdx.x; index < tiles; index += gridDim.x) {
    const ImageTile origin(images, index, PH, PW);
    const long long plane = origin.n * F * PH * PW;
    __syncthreads();
    g.fill(tile, x + (origin.n * C + first) * H * W, 4, C - first, H, W, 2 * origin.a - ph, 2 * origin.b - pw);
    for (int k = threadIdx.x; k < filters * steps * 4; k += blockDim.x) {
      const int f = k / (steps * 4), window = k - f * steps * 4, a = origin.a + window / tw, b = origin.b + window % tw;
      const bool inside = window < th * tw && a < PH && b < PW && f < F;
      const long long at = plane + ((long long)f * PH + a) * PW + b;
      grads[f * grads_row + window] =
          inside ? bits_of(grad_y[at]) | unsigned(place[at]) << 16 : unsigned(kNoPlace) << 16;
    }
    __syncthreads();
    const unsigned* mine = grads + (f0 + lane / 4) * grads_row + lane % 4;
    for (int step = 0; step < steps; ++step, mine += 4) {
      unsigned a[4];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const unsigned word = mine[r * 8 * grads_row], at = word >> 16, value = (word & 0xffff) << (at % 2 * 16);
        a[r] = at / 2 == 0 ? value : 0;
        a[r + 2] = at / 2 == 1 ? value : 0;
      }
      const int start = starts[step * 4 + lane % 8 / 2];
#pragma unroll
      for (int j = 0; j < K; ++j) {
#pragma unroll
        for (int n = 0; n < 4; n += 2) {
          unsigned b[4];
          load_matrices<true>(b, start < 0 ? zeros : tile + start + taps[j] + n * kUnit);
          mma<T>(sums[j][n], a, b[0], b[1]);
          mma<T>(sums[j][n + 1], a, b[2], b[3]);
        }
      }
      if (i == 0 && first == 0) mma<T>(bias_sums, a, ones, ones);
    }
  }
  float* to = partials + blockIdx.x * (long long)(C * K * K + 1) * F;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int f = f0 + lane / 4 + 8 * r;
    if (f >= F) continue;
    if (i == 0 && first == 0 && lane % 4 == 0) to[C * K * K * F + f] = bias_sums[2 * r];
#pragma unroll
    for (int j = 0; j < K; ++j) {
#pragma unroll
      for (int n = 0; n < 4; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int c = first + n * 8 + lane % 4 * 2 + e;
          if (c < C) to[(c * K * K + i * K + j) * F + f] = sums[j][n][2 * r + e];
        }
      }
    }
  }
#endif
}
