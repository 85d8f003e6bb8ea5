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
// element of u, by FMAs in acc_t<T>; as many for grad_x and grad_weight, zeros of grad_u included.
//
// What shared memory gives a multiprocessor is a word for every four FMAs, equal words of a warp counted too. Hence two
// windows of 8 filters for a thread, 104 words for 576 FMAs of a channel, and four filters of two channels for that of the
// gradient of weight, 48 for 288. n1024 32->64 14x14 is 150 us of FMAs forward and twice that backward.
//
// Reached on an H200, forward / backward (PyTorch's three layers, the better of eager and compiled), with one window for a
// thread, before: n64 1->32 28x28 fp32 8.1 / 18 us (23 / 46), n64 32->64 14x14 fp32 24 / 58 us (32 / 79), n1024 32->64 14x14
// fp32 273 / 556 us (245 / 865); half types see conv2d_relu_max_pool2d_mma.cu. Lost: the last warp of a block is a quarter
// full, and a block waits for its tile and its weights.
#include "common/pooled_fma.cuh"

// Grid: (tiles of all images, ceil(F / (NF * groups))). Block: half of th * tw windows, times groups of NF filters, times
// the splits of the channels, in whole warps. A thread owns two windows of its filters. Shared memory: for each of `chunk`
// channels the weights of the block's filters and the tile; then the splits' sums.
template <typename T, int K, int NF>
__global__ void __launch_bounds__(kThreads<NF>, kBlocks<NF>)
    conv2d_relu_max_pool2d_fwd(const T* __restrict__ x, const T* __restrict__ weight, const T* __restrict__ bias,
                               T* __restrict__ y, unsigned char* __restrict__ place, int C, int H, int W, int F, int PH,
                               int PW, int ph, int pw, int th, int tw, int pair, int groups, int chunk) {
  using A = acc_t<T>;
  const Images g{C, H, W, F, PH, PW, ph, pw, th, tw, pair, groups};
  const Part part(g, blockIdx.x, PH, PW);
  const Role role(g, C);
  const int first = blockIdx.y * groups * NF;
  A values[NF][4 * kWindows] = {};
  correlate_image<T, K, NF, true>(g, role, part, first, chunk, x, weight, values);
  role.for_windows(g, [&](int v, int row, int column) {
    const int a = part.a + row, b = part.b + column;
    if (a >= PH || b >= PW) return;
#pragma unroll
    for (int k = 0; k < NF; ++k) {
      const int f = first + role.group * NF + k;
      if (f >= F) return;
      const long long at = ((part.n * F + f) * PH + a) * PW + b;
      pool<T>(values[k] + 4 * v, bias ? to_acc(bias[f]) : A(0), y + at, place + at);
    }
  });
}

// Grid: (tiles of 2 x 2 windows over all of x, ceil(C / (NF * groups))). Block, shared memory: as above, the filters being
// channels of x and the channels those of y. A thread owns twice 2 x 2 elements of its channels.
template <typename T, int K, int NF>
__global__ void __launch_bounds__(kThreads<NF>, kBlocks<NF>)
    conv2d_relu_max_pool2d_bwd(const T* __restrict__ grad_y, const unsigned char* __restrict__ place,
                               const T* __restrict__ weight, T* __restrict__ grad_x, int C, int H, int W, int F, int PH,
                               int PW, int ph, int pw, int th, int tw, int pair, int groups, int chunk) {
  using A = acc_t<T>;
  const Images g{C, H, W, F, PH, PW, ph, pw, th, tw, pair, groups};
  const Part part(g, blockIdx.x, (H + 1) / 2, (W + 1) / 2);
  const Role role(g, F);
  const int first = blockIdx.y * groups * NF;
  const int h0 = 2 * part.a - (K - 1 - ph), w0 = 2 * part.b - (K - 1 - pw);
  const long long plane = part.n * F * PH * PW;
  A values[NF][4 * kWindows] = {};
  correlate_tile<K>(
      g, role, shared_memory<A>(), F, chunk,
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
  role.for_windows(g, [&](int v, int row, int column) {
#pragma unroll
    for (int k = 0; k < NF; ++k) {
      const int c = first + role.group * NF + k;
      if (c >= C) return;
      store_window(grad_x + (part.n * C + c) * H * W, H, W, part.a + row, part.b + column, values[k] + 4 * v);
    }
  });
}

// Grid, block, shared memory: see sum_patches().
template <typename T, int K, int NF>
__global__ void __launch_bounds__(512)
    conv2d_relu_max_pool2d_bwd_weight(const T* __restrict__ grad_y, const unsigned char* __restrict__ place,
                                      const T* __restrict__ x, acc_t<T>* __restrict__ parts, long long tiles, int C,
                                      int H, int W, int F, int PH, int PW, int ph, int pw, int th, int tw, int pair,
                                      int chunk, int splits) {
  using A = acc_t<T>;
  const Images g{C, H, W, F, PH, PW, ph, pw, th, tw, pair, 1};
  sum_patches<T, K, NF>(g, PH, PW, x, parts, tiles, chunk, splits, [&](A* grads, int filters, const Part& part) {
    const int pitch = 4 * grads_pitch(filters), f0 = blockIdx.z * filters;
    const Planes<T> image{grad_y + (part.n * F + f0) * PH * PW, PH, PW};
    const unsigned char* places = place + (part.n * F + f0) * PH * PW;
    for_each(filters, th, tw, [&](int f, int row, int column) {
      const T* from = f0 + f < F ? image.at(f, part.a + row, part.b + column) : nullptr;
      const A grad = from ? to_acc(*from) : A(0);
      const int at = from ? places[from - image.data] : kNone;
      A* to = grads + (row * tw + column) * pitch + 4 * f;
#pragma unroll
      for (int d = 0; d < 4; d += kVecWidth<A>) {
        Vec<A, kVecWidth<A>> some;
#pragma unroll
        for (int e = 0; e < kVecWidth<A>; ++e) some.data[e] = at == d + e ? grad : A(0);
        store_vec<A, kVecWidth<A>>(to + d, some);
      }
    });
  });
}
