// y[oh, ow]    = max over i < kh, j < kw of x[oh * sh - ph + i * dh, ow * sw - pw + j * dw], in each plane
// grad_x[h, w] = sum of grad_y[oh, ow] over the windows whose maximum is at (h, w)
//
// What lies outside the plane counts as -inf, so a window that lies outside as a whole gives -inf. NaN wins; of equal values
// the first wins.
//
// Forward saves the place of each maximum: as a byte, i * kw + j, or as PyTorch's index, h * W + w. Backward is a gather:
// each element of grad_x looks at the windows that cover it, in a fixed order and without atomics. Contiguous planes are
// divided into bands: a block copies the rows that a band reads to shared memory, 16 bytes at a time, and stores results of
// less than 4 bytes in the same way. Images whose channels are neighbours are read in vectors of channels; all else is read
// one element at a time.
// Bytes per input element, k x k at stride k: forward sizeof(T) + (sizeof(T) + 1) / k^2, backward the same.
//
// Reached on an H200 (GB/s of those bytes but the places', forward / backward; a copy: 4226): 256x64x112x112 k2 fp32 4125
// / 3767, 256x64x112x112 k2 bf16 3800 / 3376, 256x64x111x111 k2 bf16 3538 / 3305, 256x64x112x112 k3 s2 p1 bf16 2775 /
// 2731, 256x64x112x112 k3 s2 p1 last bf16 3272 / 2874. Lost, by what the text counts and not by a profile: instructions,
// in half types, about 33 an output at k2 and 67 at k3.
#include "pool/bands.cuh"
#include "pool/nhwc.cuh"

// The type that a place is computed in.
template <typename I> struct PlaceOf { using type = int; };
template <> struct PlaceOf<long long> { using type = long long; };
template <typename I> using place_t = typename PlaceOf<I>::type;

// The maxima of N channels side by side, and their places.
template <typename A, typename P, int N> struct Best {
  A value[N];
  P at[N];

  __device__ __forceinline__ void offer(int n, A other, P there) {
    const bool wins = other > value[n] || other != other;
    value[n] = wins ? other : value[n];
    at[n] = wins ? there : at[n];
  }
  __device__ __forceinline__ void fold(const Best& below) {
#pragma unroll
    for (int n = 0; n < N; ++n) offer(n, below.value[n], below.at[n]);
  }
};

// The maxima of N channels side by side, first <= oh < last of column ow. load(h, w, j) gives the elements at column w + j.
// Where windows overlap, a tap outside the plane repeats the nearest one inside, which does not change the maximum; and places
// are counted from the plane's first element until the store, because they serve several windows.
template <int K, int S, typename T, typename I, int N, typename Load, typename Store>
__device__ __forceinline__ void maxima_down(const Window& p, int first, int last, int ow, Load load, Store store) {
  using A = acc_t<T>;
  using P = place_t<I>;
  constexpr bool BYTE = sizeof(I) == 1, SHARED = K > 0 && !kInside<K, S>, TAPS = BYTE && !SHARED;
  const int pitch = BYTE ? p.kw : p.W;  // from one row's places to the next
  const Taps taps = Taps::across(p, ow);
  const auto row = [&](int h, int i, bool any) {
    h = SHARED ? min(max(h, 0), p.H - 1) : h;
    const P before = P(TAPS ? i : h) * pitch;
    Best<A, P, N> best;
    if constexpr (K == 0) {
#pragma unroll
      for (int n = 0; n < N; ++n) {
        best.value[n] = -infinity<A>(), best.at[n] = TAPS ? taps.first : taps.start + taps.first * p.dw;
      }
    }
#pragma unroll(K ? K : 3)
    for (int j = K ? 0 : taps.first; j < (K ? K : any ? taps.last + 1 : 0); ++j) {
      const int w = SHARED ? min(max(taps.start + j, 0), p.W - 1) : taps.start + j * p.dw;
      const Vec<T, N> x = kInside<K, S> ? load(h, taps.start, j) : load(h, w, 0);
#pragma unroll
      for (int n = 0; n < N; ++n) {
        const A value = to_acc(x.data[n]);
        if (K && j == 0) best.value[n] = value, best.at[n] = TAPS ? j : w;
        else best.offer(n, value, TAPS ? j : w);
      }
    }
#pragma unroll
    for (int n = 0; n < N; ++n) best.at[n] += before;
    return best;
  };
  windows_down<K, S, kRowsAtOnce<N>>(p, first, last, row, [&](int oh, const Best<A, P, N>& best) {
    const int base = SHARED && BYTE ? (oh * S - p.ph) * K + taps.start : 0;
    Vec<T, N> y;
    I argmax[N];
#pragma unroll
    for (int n = 0; n < N; ++n) y.data[n] = from_acc<T>(best.value[n]), argmax[n] = I(best.at[n] - base);
    store(oh, y, argmax);
  });
}

// The gradients of N outputs side by side, and the places of their maxima.
template <typename T, typename P, int N> struct Chosen {
  Vec<T, N> grad;
  P at[N];
};

// The gradients of N elements: each is that of one window, or a sum.
template <bool ONE, typename T> struct Summed { using type = acc_t<T>; };
template <typename T> struct Summed<true, T> { using type = T; };
template <typename A, int N> struct Gradients { A data[N]; };

// The gradients of N channels side by side, of a column of tiles. load(oh, ow, chosen) loads those of the outputs.
template <int K, int S, typename T, typename I, int N, typename Load, typename Store>
__device__ __forceinline__ void gradients_down(const Window& p, const Divisor& sh, const Divisor& sw, int first,
                                               int last, int column, Load load, Store store) {
  constexpr bool ONE = kInside<K, S>;
  using P = place_t<I>;
  using All = Gradients<typename Summed<ONE, T>::type, N>;
  const auto get = [&](bool there, int oh, int ow, int) {
    Chosen<T, P, N> chosen = {};
#pragma unroll
    for (int n = 0; n < N; ++n) chosen.at[n] = -1;
    if (there) load(oh, ow, chosen);
    return chosen;
  };
  const auto add = [&](All& sum, const Chosen<T, P, N>& chosen, int i, int j, int h, int w, bool first) {
    const P here = sizeof(I) == 1 ? P(i * (K ? K : p.kw) + j) : P(h) * p.W + w;
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const bool here_too = chosen.at[n] == here;
      if constexpr (ONE) {
        if (here_too) sum.data[n] = chosen.grad.data[n];
      } else {
        const acc_t<T> grad = here_too ? to_acc(chosen.grad.data[n]) : acc_t<T>(0);
        sum.data[n] = first ? grad : sum.data[n] + grad;
      }
    }
  };
  tiles_down<K, S, kRowsAtOnce<N>, All>(p, sh, sw, first, last, column, get, add, [&](int h, int w, const All& sum) {
    Vec<T, N> rounded;
#pragma unroll
    for (int n = 0; n < N; ++n) {
      if constexpr (ONE) rounded.data[n] = sum.data[n];
      else rounded.data[n] = from_acc<T>(sum.data[n]);
    }
    store(h, w, rounded);
  });
}

// --- contiguous planes ---

// Grid: the bands of rows of outputs. Block: any. Each thread owns strips of columns, and neighbouring threads own neighbouring
// columns. Shared memory: the rows of x that the band reads, and the results that are staged.
template <typename T, int K, int S>
__global__ void __launch_bounds__(256)
    max_pool2d_fwd_bands(const T* __restrict__ x, T* __restrict__ y, unsigned char* __restrict__ argmax,
                         Window geometry, Bands b) {
  using I = unsigned char;
  extern __shared__ uint4 shared[];
  const Window p = geometry.known<K, S, true>();
  const Band band(b, p.OH);
  const int top = max(band.first * p.sh - p.ph, 0);
  const int bottom = min((band.last - 1) * p.sh - p.ph + (p.kh - 1) * p.dh + 1, p.H);
  const long long begin = (band.plane * p.H + top) * p.W;
  y += (band.plane * p.OH + band.first) * p.OW, argmax += (band.plane * p.OH + band.first) * p.OW;
  uint4* free = shared;
  const int count = ((band.planes - 1) * p.OH + band.last - band.first) * p.OW;
  const T* rows = copy_async(free, x, b.planes * p.H * p.W, begin, ((band.planes - 1) * p.H + bottom - top) * p.W);
  T* maxima = output_buffer(free, y, count);
  I* places = output_buffer(free, argmax, count);
  wait_for_copies();
  band.each_strip(b, p.OW, [&](int plane, int first, int last, int ow) {
    const T* from = rows + (plane * p.H - top) * p.W;
    int to = (plane * p.OH + first - band.first) * p.OW + ow;
    maxima_down<K, S, T, I, 1>(
        p, first, last, ow, [&](int h, int w, int j) { return Vec<T, 1>{(from + w + h * p.W)[j]}; },
        [&](int, Vec<T, 1> best, const I(&at)[1]) {
          maxima[to] = best.data[0], places[to] = at[0];
          to += p.OW;
        });
  });
  if (kStaged<T> || kStaged<I>) __syncthreads();
  if (kStaged<T>) store_run(y, maxima, count);
  if (kStaged<I>) store_run(argmax, places, count);
}

// Grid: the bands of rows of tiles of grad_x. Block and threads: as above, of tiles. Shared memory: the rows of grad_y and of
// argmax that may lie in the band, and the band.
template <typename T, int K, int S>
__global__ void __launch_bounds__(256)
    max_pool2d_bwd_bands(const T* __restrict__ grad_y, const unsigned char* __restrict__ argmax, T* __restrict__ grad_x,
                         Window geometry, Divisor sh, Divisor sw, Bands b) {
  using I = unsigned char;
  extern __shared__ uint4 shared[];
  const Window p = geometry.known<K, S, true>();
  const Tiles<K, S> tiles(p);
  const Band band(b, tiles.rows);
  const Extent<K, S> extent(p, band.first, band.last);
  const long long begin = (band.plane * p.OH + extent.begin) * p.OW;
  T* result = grad_x + (band.plane * p.H + extent.top) * p.W;
  uint4* free = shared;
  const int windows = max((band.planes - 1) * p.OH + extent.end - extent.begin, 0) * p.OW;
  const T* grads = copy_async(free, grad_y, b.planes * p.OH * p.OW, begin, windows);
  const I* places = copy_async(free, argmax, b.planes * p.OH * p.OW, begin, windows);
  const int count = ((band.planes - 1) * p.H + extent.bottom - extent.top) * p.W;
  T* sums = take_buffer(free, result, count);
  wait_for_copies();
  band.each_strip(b, tiles.columns, [&](int plane, int first, int last, int column) {
    const int from = (plane * p.OH - extent.begin) * p.OW, to = (plane * p.H - extent.top) * p.W;
    gradients_down<K, S, T, I, 1>(
        p, sh, sw, first, last, column,
        [&](int oh, int ow, Chosen<T, place_t<I>, 1>& chosen) {
          chosen.grad.data[0] = grads[from + oh * p.OW + ow];
          chosen.at[0] = places[from + oh * p.OW + ow];
        },
        [&](int h, int w, Vec<T, 1> sum) { sums[to + h * p.W + w] = sum.data[0]; });
  });
  __syncthreads();
  store_run(result, sums, count);
}

// --- images whose channels are neighbours ---

// How many of V places one access takes.
template <typename I, int V> constexpr int kPlaces = V * sizeof(I) > 16 ? 16 / sizeof(I) : V;

// Grid: at least of.threads threads, in any blocks. Each thread owns V channels of a strip of outputs, side by side: 16 bytes
// with ALIGNED, when the number of channels and the addresses allow it, else one.
template <typename T, typename I, int K, int S, bool ALIGNED>
__global__ void __launch_bounds__(256) max_pool2d_fwd_nhwc(const T* __restrict__ x, T* __restrict__ y,
                                                           I* __restrict__ argmax, Window geometry, Strips of) {
  constexpr int V = ALIGNED ? kVecWidth<T> : 1, P = kPlaces<I, V>;
  if (global_thread() >= of.threads) return;
  const Window p = geometry.known<K, S, true>();
  const Strip at(of, global_thread(), V, p.OH);
  const int C = int(of.channels);
  x += at.image * p.H * p.W * C + at.c;
  const long long to = ((at.image * p.OH + at.first) * p.OW + at.column) * C + at.c;
  y += to, argmax += to;
  maxima_down<K, S, T, I, V>(
      p, at.first, at.last, at.column,
      [&](int h, int w, int j) { return load_vec<T, V>(x + offset_t<K>(w) * C + offset_t<K>(h) * p.W * C + j * C); },
      [&](int, Vec<T, V> best, const I(&which)[V]) {
        store_vec<T, V>(y, best);
#pragma unroll
        for (int first = 0; first < V; first += P) {
          Vec<I, P> places;
#pragma unroll
          for (int v = 0; v < P; ++v) places.data[v] = which[first + v];
          store_vec<I, P>(argmax + first, places);
        }
        y += (long long)p.OW * C, argmax += (long long)p.OW * C;
      });
}

// Grid and threads: as above, of the tiles of grad_x.
template <typename T, typename I, int K, int S, bool ALIGNED>
__global__ void __launch_bounds__(256)
    max_pool2d_bwd_nhwc(const T* __restrict__ grad_y, const I* __restrict__ argmax, T* __restrict__ grad_x,
                        Window geometry, Divisor sh, Divisor sw, Strips of) {
  constexpr int V = ALIGNED ? kVecWidth<T> : 1, P = kPlaces<I, V>;
  if (global_thread() >= of.threads) return;
  const Window p = geometry.known<K, S, true>();
  const Strip at(of, global_thread(), V, Tiles<K, S>(p).rows);
  const int C = int(of.channels);
  grad_y += at.image * p.OH * p.OW * C + at.c, argmax += at.image * p.OH * p.OW * C + at.c;
  grad_x += at.image * p.H * p.W * C + at.c;
  gradients_down<K, S, T, I, V>(
      p, sh, sw, at.first, at.last, at.column,
      [&](int oh, int ow, Chosen<T, place_t<I>, V>& chosen) {
        const auto from = (offset_t<K>(oh) * p.OW + ow) * C;
        chosen.grad = load_vec<T, V>(grad_y + from);
#pragma unroll
        for (int first = 0; first < V; first += P) {
          const Vec<I, P> places = load_vec<I, P>(argmax + from + first);
#pragma unroll
          for (int v = 0; v < P; ++v) chosen.at[first + v] = places.data[v];
        }
      },
      [&](int h, int w, Vec<T, V> sum) { store_vec<T, V>(grad_x + (offset_t<K>(h) * p.W + w) * C, sum); });
}
