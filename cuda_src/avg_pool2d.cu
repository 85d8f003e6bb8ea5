// y[oh, ow]    = sum over i < kh, j < kw of x[oh * sh - ph + i, ow * sw - pw + j] / d(oh, ow), in each plane
// grad_x[h, w] = sum of grad_y[oh, ow] / d(oh, ow) over the windows that cover (h, w)
//
// What lies outside the plane counts as 0. d is the number that is given, or how many elements the window has: with `padded`
// the elements of the padding count too, but not those beyond it, where a last window sticks out.
//
// Contiguous planes are divided into bands: a block copies the rows that a band reads to shared memory, 16 bytes at a time.
// Images whose channels are neighbours are read in vectors of channels; all else is read one element at a time.
// Bytes per input element, k x k at stride k: (1 + 1 / k^2) sizeof(T), each way.
//
// Reached on an H200 (GB/s of those bytes, forward / backward; a copy: 4226): 256x64x112x112 k2 fp32 4294 / 3922,
// 256x64x112x112 k2 bf16 4116 / 3850, 256x64x111x111 k2 bf16 3779 / 3854, 256x64x112x112 k3 s2 p1 bf16 3417 / 3273,
// 256x64x112x112 k3 s2 p1 last bf16 3574 / 3607, 256x2048x7x7 k7 bf16 2409 / 3163. Other windows: k3 bf16 2712 / 650.
// Lost, by Nsight Compute, before the ends of runs were copied in vectors: half types take an instruction an element. At k3
// 87% of all cycles issue, with the memory at 71 and 66% of its peak; backward at k2 73%, with the memory at 78%.
#include "common/reduce/warp_block.cuh"
#include "common/elementwise/sigmoid.cuh"
#include "pool/bands.cuh"
#include "pool/nhwc.cuh"

// The number that a window's sum is divided by: `given`, where that is not 0.
struct Averaging {
  long long given, padded;

  // How many elements of a window count in each direction.
  template <bool INSIDE, typename A> __device__ __forceinline__ A down(const Window& p, int oh) const {
    const A count = A(INSIDE ? p.kh : counted(oh * p.sh - p.ph, p.kh, p.ph, p.H));
    return given ? A(given) : count;
  }
  template <bool INSIDE, typename A> __device__ __forceinline__ A across(const Window& p, int ow) const {
    const A count = A(INSIDE ? p.kw : counted(ow * p.sw - p.pw, p.kw, p.pw, p.W));
    return given ? A(1) : count;
  }

 private:
  __device__ __forceinline__ int counted(int start, int kernel, int pad, int length) const {
    const int border = padded ? pad : 0;
    return min(start + kernel, length + border) - max(start, -border);
  }
};

// For half types the quotient is off by 2 ulp of fp32: it is a product with the reciprocal.
template <typename T> __device__ __forceinline__ acc_t<T> quotient(acc_t<T> sum, acc_t<T> d) {
  if constexpr (sizeof(T) == 2) return sum * fast_reciprocal(d);
  else return sum / d;
}

template <typename T, int N> struct Sums {
  acc_t<T> data[N];

  __device__ __forceinline__ void fold(const Sums& other) {
#pragma unroll
    for (int n = 0; n < N; ++n) data[n] += other.data[n];
  }
  __device__ __forceinline__ Vec<T, N> rounded() const {
    Vec<T, N> result;
#pragma unroll
    for (int n = 0; n < N; ++n) result.data[n] = from_acc<T>(data[n]);
    return result;
  }
};

// The averages of N channels side by side, first <= oh < last of column ow. load(h, start, j) gives the elements at row h
// and column start + j.
template <int K, int S, typename T, int N, typename Load, typename Store>
__device__ __forceinline__ void averages_down(const Window& p, const Averaging& a, int first, int last, int ow,
                                              Load load, Store store) {
  const Taps taps = Taps::across(p, ow);
  const acc_t<T> across = a.across<kInside<K, S>, acc_t<T>>(p, ow);
  int rows[K ? K : 1];  // how many rows have an element at tap j
#pragma unroll
  for (int j = 0; j < K; ++j) rows[j] = j >= taps.first && j <= taps.last ? p.H : 0;
  const auto row = [&](int h, int, bool) {
    Sums<T, N> sum = {};
#pragma unroll(K ? K : 4)
    for (int j = K ? 0 : taps.first; j < (K ? K : taps.last + 1); ++j) {
      Vec<T, N> x = {};
      if (K == 0 || kInside<K, S> || unsigned(h) < unsigned(rows[K ? j : 0])) x = load(h, taps.start, j);
#pragma unroll
      for (int n = 0; n < N; ++n) sum.data[n] = K && j == 0 ? to_acc(x.data[n]) : sum.data[n] + to_acc(x.data[n]);
    }
    return sum;
  };
  windows_down<K, S, kRowsAtOnce<N>>(p, first, last, row, [&](int oh, Sums<T, N>& sum) {
    const acc_t<T> d = a.down<kInside<K, S>, acc_t<T>>(p, oh) * across;
#pragma unroll
    for (int n = 0; n < N; ++n) sum.data[n] = quotient<T>(sum.data[n], d);
    store(oh, sum.rounded());
  });
}

// The gradients of N channels side by side, of a column of tiles. load(oh, ow) gives those of the outputs.
template <int K, int S, typename T, int N, typename Load, typename Store>
__device__ __forceinline__ void shares_down(const Window& p, const Averaging& a, const Divisor& sh, const Divisor& sw,
                                            int first, int last, int column, Load load, Store store) {
  acc_t<T> across[K ? (K + S - 1) / S : 1];
#pragma unroll
  for (int u = 0; u * S < K; ++u) across[u] = a.across<kInside<K, S>, acc_t<T>>(p, column - u);
  const auto get = [&](bool there, int oh, int ow, int u) {
    Sums<T, N> share = {};
    Vec<T, N> grad = {};
    if (there) grad = load(oh, ow);
    const acc_t<T> d = a.down<kInside<K, S>, acc_t<T>>(p, oh) * (K ? across[u] : a.across<false, acc_t<T>>(p, ow));
#pragma unroll
    for (int n = 0; n < N; ++n) share.data[n] = there ? quotient<T>(to_acc(grad.data[n]), d) : acc_t<T>(0);
    return share;
  };
  const auto add = [](Sums<T, N>& sum, const Sums<T, N>& share, int, int, int, int, bool first) {
    if (first) sum = share;
    else sum.fold(share);
  };
  tiles_down<K, S, kRowsAtOnce<N>, Sums<T, N>>(
      p, sh, sw, first, last, column, get, add,
      [&](int h, int w, const Sums<T, N>& sum) { store(h, w, sum.rounded()); });
}

// --- contiguous planes ---

// Grid: the bands of rows of outputs. Block: any. Each thread owns strips of columns, and neighbouring threads own neighbouring
// columns. Shared memory: the rows of x that the band reads.
template <typename T, int K, int S>
__global__ void __launch_bounds__(256)
    avg_pool2d_fwd_bands(const T* __restrict__ x, T* __restrict__ y, Averaging a, Window geometry, Bands b) {
  extern __shared__ uint4 shared[];
  const Window p = geometry.known<K, S, false>();
  const Band band(b, p.OH);
  const int top = max(band.first * p.sh - p.ph, 0), bottom = min((band.last - 1) * p.sh - p.ph + p.kh, p.H);
  const long long begin = (band.plane * p.H + top) * p.W;
  T* averages = y + (band.plane * p.OH + band.first) * p.OW;
  uint4* free = shared;
  const T* rows = copy_async(free, x, b.planes * p.H * p.W, begin, ((band.planes - 1) * p.H + bottom - top) * p.W);
  wait_for_copies();
  band.each_strip(b, p.OW, [&](int plane, int first, int last, int ow) {
    const T* from = rows + (plane * p.H - top) * p.W;
    T* to = averages + (plane * p.OH + first - band.first) * p.OW + ow;
    averages_down<K, S, T, 1>(
        p, a, first, last, ow, [&](int h, int start, int j) { return Vec<T, 1>{(from + start + h * p.W)[j]}; },
        [&](int, Vec<T, 1> average) { *to = average.data[0], to += p.OW; });
  });
}

// Grid: the bands of rows of tiles of grad_x. Block and threads: as above, of tiles. Shared memory: the rows of grad_y whose
// windows reach the band, and the band.
template <typename T, int K, int S>
__global__ void __launch_bounds__(256)
    avg_pool2d_bwd_bands(const T* __restrict__ grad_y, T* __restrict__ grad_x, Averaging a, Window geometry, Divisor sh,
                         Divisor sw, Bands b) {
  extern __shared__ uint4 shared[];
  const Window p = geometry.known<K, S, false>();
  const Tiles<K, S> tiles(p);
  const Band band(b, tiles.rows);
  const Extent<K, S> extent(p, band.first, band.last);
  const long long begin = (band.plane * p.OH + extent.begin) * p.OW;
  T* result = grad_x + (band.plane * p.H + extent.top) * p.W;
  uint4* free = shared;
  const int windows = max((band.planes - 1) * p.OH + extent.end - extent.begin, 0) * p.OW;
  const T* rows = copy_async(free, grad_y, b.planes * p.OH * p.OW, begin, windows);
  const int count = ((band.planes - 1) * p.H + extent.bottom - extent.top) * p.W;
  T* sums = take_buffer(free, result, count);
  wait_for_copies();
  band.each_strip(b, tiles.columns, [&](int plane, int first, int last, int column) {
    const T* from = rows + (plane * p.OH - extent.begin) * p.OW;
    T* to = sums + (plane * p.H - extent.top) * p.W;
    shares_down<K, S, T, 1>(
        p, a, sh, sw, first, last, column, [&](int oh, int ow) { return Vec<T, 1>{from[oh * p.OW + ow]}; },
        [&](int h, int w, Vec<T, 1> sum) { to[h * p.W + w] = sum.data[0]; });
  });
  __syncthreads();
  store_run(result, sums, count);
}

// --- images whose channels are neighbours ---

// Grid: at least of.threads threads, in any blocks. Each thread owns V channels of a strip of outputs, side by side: 16 bytes
// with ALIGNED, when the number of channels and the addresses allow it, else one.
template <typename T, int K, int S, bool ALIGNED>
__global__ void __launch_bounds__(256)
    avg_pool2d_fwd_nhwc(const T* __restrict__ x, T* __restrict__ y, Averaging a, Window geometry, Strips of) {
  constexpr int V = ALIGNED ? kVecWidth<T> : 1;
  if (global_thread() >= of.threads) return;
  const Window p = geometry.known<K, S, false>();
  const Strip at(of, global_thread(), V, p.OH);
  const int C = int(of.channels);
  x += at.image * p.H * p.W * C + at.c;
  y += ((at.image * p.OH + at.first) * p.OW + at.column) * C + at.c;
  averages_down<K, S, T, V>(
      p, a, at.first, at.last, at.column,
      [&](int h, int start, int j) {
        return load_vec<T, V>(x + offset_t<K>(start) * C + offset_t<K>(h) * p.W * C + j * C);
      },
      [&](int, Vec<T, V> average) { store_vec<T, V>(y, average), y += (long long)p.OW * C; });
}

// Grid and threads: as above, of the tiles of grad_x.
template <typename T, int K, int S, bool ALIGNED>
__global__ void __launch_bounds__(256)
    avg_pool2d_bwd_nhwc(const T* __restrict__ grad_y, T* __restrict__ grad_x, Averaging a, Window geometry, Divisor sh,
                        Divisor sw, Strips of) {
  constexpr int V = ALIGNED ? kVecWidth<T> : 1;
  if (global_thread() >= of.threads) return;
  const Window p = geometry.known<K, S, false>();
  const Strip at(of, global_thread(), V, Tiles<K, S>(p).rows);
  const int C = int(of.channels);
  grad_y += at.image * p.OH * p.OW * C + at.c;
  grad_x += at.image * p.H * p.W * C + at.c;
  shares_down<K, S, T, V>(
      p, a, sh, sw, at.first, at.last, at.column,
      [&](int oh, int ow) { return load_vec<T, V>(grad_y + (offset_t<K>(oh) * p.OW + ow) * C); },
      [&](int h, int w, Vec<T, V> sum) { store_vec<T, V>(grad_x + (offset_t<K>(h) * p.W + w) * C, sum); });
}

// --- global: one window, which is the whole of a contiguous plane; d is one number ---

// Grid: ceil(planes / each). Block: a multiple of 32. A group of `lanes` threads, a power of two up to 32 or all threads of the
// block, sums one plane after another. Shared memory: the block's planes, if it `fits`.
template <typename T>
__global__ void __launch_bounds__(256)
    avg_pool2d_fwd_global(const T* __restrict__ x, T* __restrict__ y, Averaging a, long long planes, long long size,
                          int each, int lanes, bool fits) {
  using A = acc_t<T>;
  extern __shared__ uint4 shared[];
  __shared__ A partials[kWarp];
  const A d = A(a.given ? a.given : size);
  const long long first = blockIdx.x * (long long)each;
  const int count = int(min((long long)each, planes - first)), lane = threadIdx.x & (lanes - 1);
  const auto sum_of = [&](const T* plane) {
    A sum = 0;
#pragma unroll 8
    for (long long e = lane; e < size; e += lanes) sum += to_acc(plane[e]);
    return sum;
  };
  const T* buffer = nullptr;
  if (fits) {
    uint4* free = shared;
    buffer = copy_async(free, x, planes * size, first * size, int(count * size));
    wait_for_copies();
  }
  x += first * size;
  const int groups = blockDim.x / lanes;
  for (int begin = 0; begin < count; begin += groups) {
    const int plane = begin + threadIdx.x / lanes;
    A sum = 0;
    if (plane < count) sum = fits ? sum_of(buffer + plane * int(size)) : sum_of(x + plane * size);
    if (lanes > kWarp) {
      sum = block_reduce<Sum>(sum, partials);
    } else {
      for (int offset = lanes / 2; offset > 0; offset /= 2) sum += shuffle_xor(sum, offset);
    }
    if (lane == 0 && plane < count) y[first + plane] = from_acc<T>(quotient<T>(sum, d));
  }
}

// Grid: ceil(elements / (U * kVecWidth<T> * blockDim.x)). Each thread owns U vectors of grad_x, or what is left of them.
// A plane has 16 elements or more, so a vector lies in two planes at most.
template <typename T>
__global__ void avg_pool2d_bwd_global(const T* __restrict__ grad_y, T* __restrict__ grad_x, Averaging a,
                                      long long elements, Divisor size) {
  using A = acc_t<T>;
  constexpr int V = kVecWidth<T>, U = POOL_VECTORS;
  const A d = A(a.given ? a.given : size.divisor);
  const long long first = (blockIdx.x * (long long)U * blockDim.x + threadIdx.x) * V;
  T grad[U][2];  // the gradients of the plane where the vector begins, and of the next
  int left[U];
#pragma unroll
  for (int u = 0; u < U; ++u) {
    const long long start = first + u * V * (long long)blockDim.x;
    if (start >= elements) break;
    int at;
    const long long plane = divide(start, size, at);
    left[u] = int(size.divisor) - at;
    grad[u][0] = grad_y[plane];
    grad[u][1] = grad_y[start + left[u] < elements ? plane + 1 : plane];
  }
#pragma unroll
  for (int u = 0; u < U; ++u) {
    const long long start = first + u * V * (long long)blockDim.x;
    if (start >= elements) break;
    const T own = from_acc<T>(quotient<T>(to_acc(grad[u][0]), d)),
            next = from_acc<T>(quotient<T>(to_acc(grad[u][1]), d));
    Vec<T, V> vector;
#pragma unroll
    for (int k = 0; k < V; ++k) vector.data[k] = k < left[u] ? own : next;
    if (start + V <= elements) {
      store_vec<T, V>(grad_x + start, vector);
    } else {
#pragma unroll
      for (int k = 0; k < V; ++k) {
        if (start + k < elements) grad_x[start + k] = vector.data[k];
      }
    }
  }
}
