// y[oh, ow]    = max over i < kh, j < kw of x[oh * sh - ph + i * dh, ow * sw - pw + j * dw], in each plane
// grad_x[h, w] = sum of grad_y[oh, ow] over the windows whose maximum is at (h, w)
//
// What lies outside the plane counts as -inf, a window that is all outside gives -inf. NaN wins; of equals, the first.
//
// Forward keeps the place of each maximum: as a byte, i * kw + j, or as PyTorch's index, h * W + w. Backward gathers:
// each element of grad_x looks at the windows that cover it, so it is written once, in a fixed order, without atomics.
// Bytes per input element, k x k at stride k: forward sizeof(T) + (sizeof(T) + 1) / k^2, backward the same. kh * kw
// comparisons per output.
#include "common/vec.cuh"

// The geometry: sizes of input and output planes, and kernel, stride, padding, dilation.
struct Pool { int H, W, OH, OW, kh, kw, sh, sw, ph, pw, dh, dw; };

// n = quotient * d + remainder; 64-bit division only where n asks for it.
__device__ __forceinline__ long long divide(long long n, int d, int& remainder) {
  if (n >> 31 == 0) {
    remainder = int(unsigned(n) % unsigned(d));
    return unsigned(n) / unsigned(d);
  }
  const long long quotient = n / d;
  remainder = int(n - quotient * d);
  return quotient;
}

// The first tap of a window that begins at `start` which is not before the plane.
__device__ __forceinline__ int first_tap(int start, int dilation) {
  return start < 0 ? (-start + dilation - 1) / dilation : 0;
}

// What is kept of the maximum at tap (i, j) of a window that begins at (h, w).
template <typename I> __device__ __forceinline__ I place(const Pool& p, int h, int w, int i, int j) {
  if constexpr (sizeof(I) == 1) return I(i * p.kw + j);
  else return I(h + i * p.dh) * p.W + (w + j * p.dw);
}

// The maxima of N planes side by side over the window at (oh, ow). load(h, w) gives their elements there.
template <typename I, int N, typename T, typename F>
__device__ __forceinline__ void window_max(const Pool& p, int kh, int kw, int oh, int ow, F load, Vec<T, N>& y,
                                           I (&argmax)[N]) {
  using A = acc_t<T>;
  const int h0 = oh * p.sh - p.ph, w0 = ow * p.sw - p.pw;
  A best[N];
#pragma unroll
  for (int n = 0; n < N; ++n) {
    best[n] = -infinity<A>();
    argmax[n] = place<I>(p, h0, w0, first_tap(h0, p.dh), first_tap(w0, p.dw));
  }
#pragma unroll
  for (int i = 0; i < kh; ++i) {
    const int h = h0 + i * p.dh;
    if (h < 0 || h >= p.H) continue;
#pragma unroll
    for (int j = 0; j < kw; ++j) {
      const int w = w0 + j * p.dw;
      if (w < 0 || w >= p.W) continue;
      const Vec<T, N> x = load(h, w);
#pragma unroll
      for (int n = 0; n < N; ++n) {
        const A value = to_acc(x.data[n]);
        if (!(value > best[n] || value != value)) continue;
        best[n] = value;
        argmax[n] = place<I>(p, h0, w0, i, j);
      }
    }
  }
#pragma unroll
  for (int n = 0; n < N; ++n) y.data[n] = from_acc<T>(best[n]);
}

// Calls f(output element, its argmax if it were at (h, w)) for the windows that cover (h, w), in order.
template <typename I, typename F> __device__ __forceinline__ void covering_windows(const Pool& p, int h, int w, F f) {
  const int h_end = h + p.ph, w_end = w + p.pw;
  const int oh_first = max(0, (h_end - (p.kh - 1) * p.dh + p.sh - 1) / p.sh), oh_last = min(p.OH - 1, h_end / p.sh);
  const int ow_first = max(0, (w_end - (p.kw - 1) * p.dw + p.sw - 1) / p.sw), ow_last = min(p.OW - 1, w_end / p.sw);
  for (int oh = oh_first; oh <= oh_last; ++oh) {
    const int rows = h_end - oh * p.sh;
    if (p.dh != 1 && rows % p.dh != 0) continue;
    for (int ow = ow_first; ow <= ow_last; ++ow) {
      const int columns = w_end - ow * p.sw;
      if (p.dw != 1 && columns % p.dw != 0) continue;
      f((long long)oh * p.OW + ow, place<I>(p, oh * p.sh - p.ph, ow * p.sw - p.pw, rows / p.dh, columns / p.dw));
    }
  }
}

// N elements, by one access where the address allows it.
template <typename T, int N> __device__ __forceinline__ Vec<T, N> read(const T* from) {
  if (reinterpret_cast<unsigned long long>(from) % sizeof(Vec<T, N>) == 0) return load_vec<T, N>(from);
  Vec<T, N> result;
#pragma unroll
  for (int n = 0; n < N; ++n) result.data[n] = from[n];
  return result;
}

// --- contiguous planes ---

// Grid: ceil(planes * OH * OW / blockDim.x), one dimension. Each thread owns an output. K is kh = kw where they are 2
// or 3.
template <typename T, typename I, int K>
__global__ void max_pool2d_fwd(const T* __restrict__ x, T* __restrict__ y, I* __restrict__ argmax, long long outputs,
                               int H, int W, int OH, int OW, int kh, int kw, int sh, int sw, int ph, int pw, int dh,
                               int dw) {
  const Pool p{H, W, OH, OW, kh, kw, sh, sw, ph, pw, dh, dw};
  const long long output = global_thread();
  if (output >= outputs) return;
  int oh, ow;
  const T* plane = x + divide(divide(output, OW, ow), OH, oh) * H * W;
  Vec<T, 1> best;
  I which[1];
  auto load = [&](int h, int w) { return Vec<T, 1>{plane[(long long)h * W + w]}; };
  window_max(p, K ? K : kh, K ? K : kw, oh, ow, load, best, which);
  y[output] = best.data[0];
  argmax[output] = which[0];
}

// Grid: ceil(planes * H * W / blockDim.x), one dimension. Each thread owns an element of grad_x, summed in acc_t<T>.
template <typename T, typename I>
__global__ void max_pool2d_bwd(const T* __restrict__ grad_y, const I* __restrict__ argmax, T* __restrict__ grad_x,
                               long long inputs, int H, int W, int OH, int OW, int kh, int kw, int sh, int sw, int ph,
                               int pw, int dh, int dw) {
  const Pool p{H, W, OH, OW, kh, kw, sh, sw, ph, pw, dh, dw};
  const long long input = global_thread();
  if (input >= inputs) return;
  int h, w;
  const long long plane = divide(divide(input, W, w), H, h) * OH * OW;
  acc_t<T> sum = 0;
  covering_windows<I>(p, h, w, [&](long long output, I here) {
    if (argmax[plane + output] == here) sum += to_acc(grad_y[plane + output]);
  });
  grad_x[input] = from_acc<T>(sum);
}

// --- channels last ---

// Of V places, how many one access takes.
template <typename I, int V> constexpr int kPlaces = V * sizeof(I) > 16 ? 16 / sizeof(I) : V;

// Grid: ceil(N * OH * OW * C / V / blockDim.x), one dimension. Each thread owns V channels of an output, side by side:
// 16 bytes of them with VECTORS, when V divides C, else one.
template <typename T, typename I, bool VECTORS>
__global__ void max_pool2d_fwd_last(const T* __restrict__ x, T* __restrict__ y, I* __restrict__ argmax,
                                    long long outputs, int C, int H, int W, int OH, int OW, int kh, int kw, int sh,
                                    int sw, int ph, int pw, int dh, int dw) {
  constexpr int V = VECTORS ? kVecWidth<T> : 1;
  const Pool p{H, W, OH, OW, kh, kw, sh, sw, ph, pw, dh, dw};
  const long long output = global_thread() * V;
  if (output >= outputs) return;
  int c, ow, oh;
  const T* image = x + divide(divide(divide(output, C, c), OW, ow), OH, oh) * H * W * C;
  Vec<T, V> best;
  I which[V];
  auto load = [&](int h, int w) { return read<T, V>(image + ((long long)h * W + w) * C + c); };
  window_max(p, kh, kw, oh, ow, load, best, which);
  store_vec<T, V>(y + output, best);
  constexpr int P = kPlaces<I, V>;
#pragma unroll
  for (int first = 0; first < V; first += P) {
    Vec<I, P> places;
#pragma unroll
    for (int v = 0; v < P; ++v) places.data[v] = which[first + v];
    store_vec<I, P>(argmax + output + first, places);
  }
}

// Grid: ceil(N * H * W * C / V / blockDim.x), one dimension. Each thread owns V channels of an element of grad_x, as
// above.
template <typename T, typename I, bool VECTORS>
__global__ void max_pool2d_bwd_last(const T* __restrict__ grad_y, const I* __restrict__ argmax, T* __restrict__ grad_x,
                                    long long inputs, int C, int H, int W, int OH, int OW, int kh, int kw, int sh,
                                    int sw, int ph, int pw, int dh, int dw) {
  constexpr int V = VECTORS ? kVecWidth<T> : 1;
  constexpr int P = kPlaces<I, V>;
  const Pool p{H, W, OH, OW, kh, kw, sh, sw, ph, pw, dh, dw};
  const long long input = global_thread() * V;
  if (input >= inputs) return;
  int c, w, h;
  const long long image = divide(divide(divide(input, C, c), W, w), H, h) * OH * OW;
  acc_t<T> sum[V] = {};
  covering_windows<I>(p, h, w, [&](long long output, I here) {
    const long long at = (image + output) * C + c;
    const Vec<T, V> grad = read<T, V>(grad_y + at);
#pragma unroll
    for (int first = 0; first < V; first += P) {
      const Vec<I, P> which = read<I, P>(argmax + at + first);
#pragma unroll
      for (int v = 0; v < P; ++v) sum[first + v] += which.data[v] == here ? to_acc(grad.data[first + v]) : acc_t<T>(0);
    }
  });
  Vec<T, V> result;
#pragma unroll
  for (int v = 0; v < V; ++v) result.data[v] = from_acc<T>(sum[v]);
  store_vec<T, V>(grad_x + input, result);
}

// --- 2 x 2 windows that tile contiguous planes: the most common pooling, with every access a vector ---

// Grid: ceil(rows * groups / blockDim.x), one dimension; rows = planes * OH, groups = W / kVecWidth<T>. Each thread
// owns 16 bytes of two rows of x and the outputs of that.
template <typename T>
__global__ void max_pool2d_fwd_2x2(const T* __restrict__ x, T* __restrict__ y, unsigned char* __restrict__ argmax,
                                   long long rows, int groups) {
  constexpr int W = kVecWidth<T>;
  int group;
  const long long thread = global_thread(), row = divide(thread, groups, group);
  if (row >= rows) return;
  const T* at = x + (2 * row * groups + group) * W;
  const Vec<T, W> upper = read<T, W>(at), lower = read<T, W>(at + (long long)groups * W);
  Vec<T, W / 2> best;
  Vec<unsigned char, W / 2> which;
#pragma unroll
  for (int n = 0; n < W / 2; ++n) {
    const T taps[4] = {upper.data[2 * n], upper.data[2 * n + 1], lower.data[2 * n], lower.data[2 * n + 1]};
    acc_t<T> max = -infinity<acc_t<T>>();
    int place = 0;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const acc_t<T> value = to_acc(taps[k]);
      const bool wins = value > max || value != value;
      max = wins ? value : max;
      place = wins ? k : place;
    }
    best.data[n] = from_acc<T>(max);
    which.data[n] = place;
  }
  store_vec<T, W / 2>(y + thread * (W / 2), best);
  store_vec<unsigned char, W / 2>(argmax + thread * (W / 2), which);
}

// Grid, threads: as above, of grad_x.
template <typename T>
__global__ void max_pool2d_bwd_2x2(const T* __restrict__ grad_y, const unsigned char* __restrict__ argmax,
                                   T* __restrict__ grad_x, long long rows, int groups) {
  constexpr int W = kVecWidth<T>;
  int group;
  const long long thread = global_thread(), row = divide(thread, groups, group);
  if (row >= rows) return;
  const Vec<T, W / 2> grad = read<T, W / 2>(grad_y + thread * (W / 2));
  const Vec<unsigned char, W / 2> which = read<unsigned char, W / 2>(argmax + thread * (W / 2));
  Vec<T, W> upper, lower;
#pragma unroll
  for (int n = 0; n < W; ++n) {
    upper.data[n] = which.data[n / 2] == n % 2 ? grad.data[n / 2] : from_acc<T>(0);
    lower.data[n] = which.data[n / 2] == 2 + n % 2 ? grad.data[n / 2] : from_acc<T>(0);
  }
  T* at = grad_x + (2 * row * groups + group) * W;
  store_vec<T, W>(at, upper);
  store_vec<T, W>(at + (long long)groups * W, lower);
}
