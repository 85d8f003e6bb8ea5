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
// Reached on an H200 (forward / backward; PyTorch's three layers take 32 / 81, 37 / 96 us): n64 1->32 28x28 fp32 10
// us / 22 us, n64 32->64 14x14 fp32 46 us / 159 us, n1024 1->32 28x28 fp32 102 us / 115 us, n1024 32->64 14x14 fp32
// 523 us / 876 us, n64 1->32 28x28 bf16 11 us / 22 us. Lost: with 32 channels and more the loads into shared memory
// wait with nothing to do meanwhile; cuDNN is faster there, though in three launches.
#include "common/vec.cuh"

constexpr int kFilters = 4;  // outputs of a thread, each 2 x 2
constexpr int kChannels = 2;  // of a thread of the gradient of weight
constexpr int kNone = 4;  // a place that no gradient comes from
constexpr int kWarpSize = 32;
constexpr int kPitch = kWarpSize + 1;  // so that neighbours in either direction lie in different banks

// The images: x is (N, C, H, W), y (N, F, PH, PW); (ph, pw) is the padding. A tile is th x tw windows, and lies in
// shared memory in rows of `pitch`.
struct Images { int C, H, W, F, PH, PW, ph, pw, th, tw, pitch; };

// A tile of one image.
struct Part {
  long long n;
  int a, b;  // of the first window

  __device__ __forceinline__ Part(const Images& g, long long index, int windows_h, int windows_w) {
    const int across = (windows_w + g.tw - 1) / g.tw, tiles = (windows_h + g.th - 1) / g.th * across;
    n = index / tiles;
    const int tile = int(index - n * tiles);
    a = tile / across * g.th;
    b = tile % across * g.tw;
  }
};

constexpr int kUnder = 8;  // loads of a thread that are under way at once

// to[index] = value of every item i < count, where item(i) gives {index, value}; dealt to the threads of the block, each in
// order, several loaded before the first is stored.
template <typename A> struct Item {
  int index;
  A value;
};
template <typename A, typename F> __device__ __forceinline__ void deal(A* to, int count, F item) {
  for (int first = threadIdx.x; first < count; first += kUnder * blockDim.x) {
    Item<A> items[kUnder];
#pragma unroll
    for (int u = 0; u < kUnder; ++u) {
      if (first + u * blockDim.x < count) items[u] = item(first + u * blockDim.x);
    }
#pragma unroll
    for (int u = 0; u < kUnder; ++u) {
      if (first + u * blockDim.x < count) to[items[u].index] = items[u].value;
    }
  }
}

// What th x tw windows of 2 x 2 read, in shared memory, for each channel.
template <int K> struct Patch {
  int rows, columns, pitch;

  __device__ __forceinline__ Patch(const Images& g)
      : rows(2 * g.th + K - 1), columns(2 * g.tw + K - 1), pitch(g.pitch) {}
  __device__ __forceinline__ int size() const { return rows * pitch; }

  // tile[c][row][column] = load(c, row, column)
  template <typename A, typename F> __device__ __forceinline__ void fill(A* tile, int channels, F load) const {
    const int area = rows * columns, step_c = blockDim.x / area, step = blockDim.x - step_c * area;
    const int step_row = step / columns, step_column = step - step_row * columns;
    int c = threadIdx.x / area, row = (threadIdx.x - c * area) / columns;
    int column = threadIdx.x - c * area - row * columns;
    deal(tile, channels * area, [&](int) {
      const Item<A> item = {(c * rows + row) * pitch + column, load(c, row, column)};
      c += step_c, row += step_row, column += step_column;
      if (column >= columns) column -= columns, ++row;
      if (row >= rows) row -= rows, ++c;
      return item;
    });
  }
};

// Taps of a filter in shared memory, in whole vectors.
template <typename A, int K> constexpr int kTaps = (K * K + kVecWidth<A> - 1) / kVecWidth<A> * kVecWidth<A>;

// values[f][2 di + dj] += the sum over the taps of weight[f] and the patch at (di, dj).
template <int K, typename A>
__device__ __forceinline__ void correlate(const A* patch, int pitch, const A* weights, A (&values)[kFilters][4]) {
  A x[K + 1][K + 1];
#pragma unroll
  for (int i = 0; i <= K; ++i) {
#pragma unroll
    for (int j = 0; j <= K; j += 2) {
      const Vec<A, 2> pair = load_vec<A, 2>(patch + i * pitch + j);
      x[i][j] = pair.data[0], x[i][j + 1] = pair.data[1];
    }
  }
#pragma unroll
  for (int f = 0; f < kFilters; ++f) {
    A w[kTaps<A, K>];
#pragma unroll
    for (int k = 0; k < kTaps<A, K>; k += kVecWidth<A>) {
      const auto taps = load_vec<A, kVecWidth<A>>(weights + f * kTaps<A, K> + k);
#pragma unroll
      for (int e = 0; e < kVecWidth<A>; ++e) w[k + e] = taps.data[e];
    }
#pragma unroll
    for (int i = 0; i < K; ++i) {
#pragma unroll
      for (int j = 0; j < K; ++j) {
#pragma unroll
        for (int d = 0; d < 4; ++d) values[f][d] = fma(w[i * K + j], x[d / 2 + i][d % 2 + j], values[f][d]);
      }
    }
  }
}

// The values of this thread's window and filters: over `channels`, at most `chunk` of them in shared memory at a time.
// load(c, row, column) and weight(f, c, tap) give what is correlated, f counted from the block's first filter.
template <int K, typename A, typename Load, typename Weight>
__device__ __forceinline__ void correlate_tile(const Images& g, A* shared, int channels, int chunk, Load load,
                                               Weight weight, A (&values)[kFilters][4]) {
  const Patch<K> patch(g);
  const int windows = g.th * g.tw, window = threadIdx.x % windows, group = threadIdx.x / windows;
  const int filters = blockDim.x / windows * kFilters;
  A* weights = shared;
  A* tile = shared + chunk * filters * kTaps<A, K>;
  const int at = window / g.tw * 2 * patch.pitch + window % g.tw * 2;
  for (int first = 0; first < channels; first += chunk) {
    const int here = min(chunk, channels - first);
    __syncthreads();
    patch.fill(tile, here, [&](int c, int row, int column) { return load(first + c, row, column); });
    deal(weights, here * filters * kTaps<A, K>, [&](int i) {
      const int tap = i % kTaps<A, K>, filter = i / kTaps<A, K> % filters, c = i / kTaps<A, K> / filters;
      return Item<A>{i, tap < K * K ? weight(filter, first + c, tap) : A(0)};
    });
    __syncthreads();
    for (int c = 0; c < here; ++c) {
      const A* mine = weights + (c * filters + group * kFilters) * kTaps<A, K>;
      correlate<K>(tile + c * patch.size() + at, patch.pitch, mine, values);
    }
  }
}

template <typename A> __device__ __forceinline__ A* shared_memory() {
  extern __shared__ __align__(16) unsigned char bytes[];
  return reinterpret_cast<A*>(bytes);
}

// Grid: (tiles of all images, ceil(F / (kFilters * blockDim.x / (th * tw)))). Block: th * tw windows, times groups of
// kFilters filters. A thread owns one window of its filters. Shared memory: for each of `chunk` channels the weights of
// the block's filters and the tile.
template <typename T, int K>
__global__ void __launch_bounds__(256)
    conv2d_relu_max_pool2d_fwd(const T* __restrict__ x, const T* __restrict__ weight, const T* __restrict__ bias,
                               T* __restrict__ y, unsigned char* __restrict__ place, int C, int H, int W, int F, int PH,
                               int PW, int ph, int pw, int th, int tw, int pitch, int chunk) {
  using A = acc_t<T>;
  const Images g{C, H, W, F, PH, PW, ph, pw, th, tw, pitch};
  const Part part(g, blockIdx.x, PH, PW);
  const int windows = th * tw, window = threadIdx.x % windows;
  const int first = blockIdx.y * (blockDim.x / windows) * kFilters;
  const T* image = x + part.n * C * H * W;
  const int h0 = 2 * part.a - ph, w0 = 2 * part.b - pw;
  A values[kFilters][4] = {};
  correlate_tile<K>(
      g, shared_memory<A>(), C, chunk,
      [&](int c, int row, int column) {
        const int h = h0 + row, w = w0 + column;
        const bool inside = h >= 0 && h < H && w >= 0 && w < W;
        return inside ? to_acc(image[((long long)c * H + h) * W + w]) : A(0);
      },
      [&](int filter, int c, int tap) {
        const int f = first + filter;
        return f < F ? to_acc(weight[((long long)f * C + c) * (K * K) + tap]) : A(0);
      },
      values);
  const int a = part.a + window / tw, b = part.b + window % tw;
  if (a >= PH || b >= PW) return;
#pragma unroll
  for (int k = 0; k < kFilters; ++k) {
    const int f = first + threadIdx.x / windows * kFilters + k;
    if (f >= F) return;
    const A shift = bias ? to_acc(bias[f]) : A(0);
    A best = A(0);
    int best_at = kNone;
#pragma unroll
    for (int d = 0; d < 4; ++d) {
      const A u = to_acc(from_acc<T>(values[k][d] + shift));
      if (u > best || u != u) best = u, best_at = d;
    }
    const long long at = ((part.n * F + f) * PH + a) * PW + b;
    y[at] = from_acc<T>(best);
    place[at] = (unsigned char)best_at;
  }
}

// Grid: (tiles of 2 x 2 windows over all of x, ceil(C / (kFilters * blockDim.x / (th * tw)))). Block, shared memory: as
// above, the filters being channels of x and the channels those of y. A thread owns 2 x 2 elements of its channels.
template <typename T, int K>
__global__ void __launch_bounds__(256)
    conv2d_relu_max_pool2d_bwd(const T* __restrict__ grad_y, const unsigned char* __restrict__ place,
                               const T* __restrict__ weight, T* __restrict__ grad_x, int C, int H, int W, int F, int PH,
                               int PW, int ph, int pw, int th, int tw, int pitch, int chunk) {
  using A = acc_t<T>;
  const Images g{C, H, W, F, PH, PW, ph, pw, th, tw, pitch};
  const Part part(g, blockIdx.x, (H + 1) / 2, (W + 1) / 2);
  const int windows = th * tw, window = threadIdx.x % windows;
  const int first = blockIdx.y * (blockDim.x / windows) * kFilters;
  const int h0 = 2 * part.a - (K - 1 - ph), w0 = 2 * part.b - (K - 1 - pw);
  const long long plane = part.n * F * PH * PW;
  A values[kFilters][4] = {};
  correlate_tile<K>(
      g, shared_memory<A>(), F, chunk,
      [&](int f, int row, int column) {
        const int h = h0 + row, w = w0 + column;
        if (h < 0 || w < 0 || h >= 2 * PH || w >= 2 * PW) return A(0);
        const long long at = plane + ((long long)f * PH + h / 2) * PW + w / 2;
        return place[at] == h % 2 * 2 + w % 2 ? to_acc(grad_y[at]) : A(0);
      },
      [&](int filter, int f, int tap) {
        const int c = first + filter;
        return c < C ? to_acc(weight[((long long)f * C + c) * (K * K) + (K * K - 1 - tap)]) : A(0);
      },
      values);
#pragma unroll
  for (int k = 0; k < kFilters; ++k) {
    const int c = first + threadIdx.x / windows * kFilters + k;
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
                                      int H, int W, int F, int PH, int PW, int ph, int pw, int th, int tw, int pitch,
                                      int chunk, int splits) {
  using A = acc_t<T>;
  const Images g{C, H, W, F, PH, PW, ph, pw, th, tw, pitch};
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
      return inside ? to_acc(image[((long long)(first + c) * H + h) * W + w]) : A(0);
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
      starts[window * kPitch + filter] = row * patch.pitch + column;
    }
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
          sums[c][k] = fma(grad, from[c * patch.size() + k / K * patch.pitch + k % K], sums[c][k]);
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
      if (split == 0 && mine + c < here && f < F) row[((long long)f * C + first + mine + c) * (K * K) + k] = sum;
    }
  }
  const A sum = total(bias_sum);
  if (split == 0 && mine == 0 && first == 0 && f < F) row[(long long)F * C * (K * K) + f] = sum;
}

// grad_weight and grad_bias from `count` parts of `size` numbers, the last `filters` of them grad_bias's, added in order.
// Grid: ceil(size / 32). Block: (32, 8), threadIdx.y dealing out the parts. Either result may be null.
template <typename T>
__global__ void conv2d_relu_max_pool2d_bwd_sum(const acc_t<T>* __restrict__ parts, T* __restrict__ grad_weight,
                                               T* __restrict__ grad_bias, int count, long long size, int filters) {
  using A = acc_t<T>;
  __shared__ A shared[8][kWarpSize];
  const long long column = blockIdx.x * (long long)kWarpSize + threadIdx.x;
  A sum = A(0);
#pragma unroll 4
  for (int p = threadIdx.y; column < size && p < count; p += 8) sum += parts[p * size + column];
  shared[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y > 0 || column >= size) return;
  for (int y = 1; y < 8; ++y) sum += shared[y][threadIdx.x];
  const long long weights = size - filters;
  if (column < weights && grad_weight) grad_weight[column] = from_acc<T>(sum);
  if (column >= weights && grad_bias) grad_bias[column - weights] = from_acc<T>(sum);
}
