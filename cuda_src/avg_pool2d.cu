// y[oh, ow]    = sum over i < kh, j < kw of x[oh * sh - ph + i, ow * sw - pw + j] / d(oh, ow), in each plane
// grad_x[h, w] = sum of grad_y[oh, ow] / d(oh, ow) over the windows that cover (h, w)
//
// What lies outside the plane counts as 0. d is the number given, or how many elements the window has: with `padded`
// those of the padding too, but not those beyond it, where a last window sticks out.
//
// Contiguous planes are worked on in bands: a block keeps in shared memory what its rows read, forward the elements,
// backward the quotients. Bytes per input element, k x k at stride k: (1 + 1 / k^2) sizeof(T), each way. kh * kw additions
// per output; backward as many as windows cover an element.
//
// Reached on an H200 (GB/s of those bytes, forward / backward; a copy: 4251): 256x64x112x112 k2 fp32 2256 / 1072,
// 256x64x112x112 k2 bf16 1257 / 532, 256x64x112x112 k3 s2 p1 bf16 1101 / 404, 256x64x111x111 k2 bf16 1230 / 526,
// 256x2048x7x7 k7 bf16 1728 / 480. Lost: backward makes one element a thread, and divides for each; forward too is
// bound by instructions in half types.
#include "common/window.cuh"

// The number that a window's sum is divided by. given: where it is not 0. 1 for a window without elements.
struct Averaging { long long given, padded; };

template <typename A> __device__ __forceinline__ A divisor_of(const Window& p, const Averaging& a, int oh, int ow) {
  if (a.given) return A(a.given);
  const Taps down = Taps::down(p, oh), across = Taps::across(p, ow);
  if (a.padded) return A(min(p.kh, p.H + p.ph - down.start)) * A(min(p.kw, p.W + p.pw - across.start));
  return down.any() && across.any() ? A(down.last - down.first + 1) * A(across.last - across.first + 1) : A(1);
}

// The averages of N planes side by side over the window at (oh, ow). load(h, w) gives their elements there.
template <int N, typename T, typename F>
__device__ __forceinline__ Vec<T, N> window_average(const Window& p, const Averaging& a, int oh, int ow, F load) {
  using A = acc_t<T>;
  const Taps down = Taps::down(p, oh), across = Taps::across(p, ow);
  A sum[N] = {};
  for (int h = down.start + down.first; h <= down.start + down.last; ++h) {
#pragma unroll 4
    for (int w = across.start + across.first; w <= across.start + across.last; ++w) {
      const Vec<T, N> x = load(h, w);
#pragma unroll
      for (int n = 0; n < N; ++n) sum[n] += to_acc(x.data[n]);
    }
  }
  const A d = divisor_of<A>(p, a, oh, ow);
  Vec<T, N> y;
#pragma unroll
  for (int n = 0; n < N; ++n) y.data[n] = from_acc<T>(sum[n] / d);
  return y;
}

// --- contiguous planes ---

// Grid: the bands of rows of outputs. Block: any. Each thread owns outputs, neighbours on neighbouring threads. Shared
// memory: the rows of x that the band reads, if they fit.
template <typename T>
__global__ void __launch_bounds__(256)
    avg_pool2d_fwd(const T* __restrict__ x, T* __restrict__ y, Window p, Bands b, Averaging a) {
  extern __shared__ uint4 shared[];
  const Band band(b, p.OH);
  const int first = max(band.first * p.sh - p.ph, 0);
  const T* run = x + (band.plane * p.H + first) * p.W;
  const T* held = reinterpret_cast<const T*>(shared) + lead_of(run);
  if (b.shared) {
    const int planes = b.count > 1 ? 1 : band.last / p.OH;
    const int last = b.count > 1 ? min((band.last - 1) * p.sh - p.ph + p.kh, p.H) : p.H;
    fetch_run(reinterpret_cast<T*>(shared), run, ((planes - 1) * p.H + last - first) * p.W);
  }
  const long long start = (band.plane * p.OH + band.first) * p.OW;
  const int count = (band.last - band.first) * p.OW;
  for (int i = threadIdx.x; i < count; i += blockDim.x) {
    const Output at(b, band.first, i);
    const int above = at.plane * p.H - first;
    const auto near = [&](int h, int w) { return Vec<T, 1>{held[(above + h) * p.W + w]}; };
    const auto far = [&](int h, int w) { return Vec<T, 1>{run[(long long)(above + h) * p.W + w]}; };
    y[start + i] =
        (b.shared ? window_average<1, T>(p, a, at.oh, at.ow, near) : window_average<1, T>(p, a, at.oh, at.ow, far))
            .data[0];
  }
}

// Grid: the bands of rows of grad_x. Block: any. Each thread owns elements, neighbours on neighbouring threads. Shared
// memory: the quotients of the windows that reach the band, if they fit. b divides rows of grad_x, `windows` those of y.
template <typename T>
__global__ void __launch_bounds__(256) avg_pool2d_bwd(const T* __restrict__ grad_y, T* __restrict__ grad_x, Window p,
                                                      Bands b, Bands windows, Divisor sh, Divisor sw, Averaging a) {
  using A = acc_t<T>;
  extern __shared__ uint4 shared[];
  A* quotients = reinterpret_cast<A*>(shared);
  const Band band(b, p.H);
  const int planes = b.count > 1 ? 1 : band.last / p.H;
  const int first = b.count > 1 ? Covering(band.first, p.ph, p.kh, p.OH, sh).first : 0;
  const int last = b.count > 1 ? Covering(band.last - 1, p.ph, p.kh, p.OH, sh).last : p.OH - 1;
  const T* run = grad_y + (band.plane * p.OH + first) * p.OW;
  const auto quotient = [&](int oh, int ow, long long i) { return to_acc(run[i]) / divisor_of<A>(p, a, oh, ow); };
  if (b.shared) {
    const int count = ((planes - 1) * p.OH + last - first + 1) * p.OW;
#pragma unroll 4
    for (int i = threadIdx.x; i < count; i += blockDim.x) {
      const Output from(windows, first, i);
      quotients[i] = quotient(from.oh, from.ow, i);
    }
    __syncthreads();
  }
  const long long start = (band.plane * p.H + band.first) * p.W;
  const int count = (band.last - band.first) * p.W;
  for (int i = threadIdx.x; i < count; i += blockDim.x) {
    const Output at(b, band.first, i);  // an element of grad_x
    const Covering down(at.oh, p.ph, p.kh, p.OH, sh), across(at.ow, p.pw, p.kw, p.OW, sw);
    A sum = A(0);
    for (int oh = down.first; oh <= down.last; ++oh) {
      const int row = at.plane * p.OH + oh - first;
#pragma unroll 2
      for (int ow = across.first; ow <= across.last; ++ow) {
        sum += b.shared ? quotients[row * p.OW + ow] : quotient(oh, ow, (long long)row * p.OW + ow);
      }
    }
    grad_x[start + i] = from_acc<T>(sum);
  }
}

// --- channels last ---

// Grid: ceil(N * OH * OW * C / V / blockDim.x), one dimension. Each thread owns V channels of an output, side by side:
// 16 bytes of them with VECTORS, when V divides C, else one.
template <typename T, bool VECTORS>
__global__ void __launch_bounds__(256)
    avg_pool2d_fwd_last(const T* __restrict__ x, T* __restrict__ y, long long threads, int C, Window p, Cells cells,
                        Averaging a) {
  constexpr int V = VECTORS ? kVecWidth<T> : 1;
  const long long thread = global_thread();
  if (thread >= threads) return;
  const Cell at(cells, thread, V);
  const T* image = x + at.image * p.H * p.W * C + at.c;
  const auto load = [&](int h, int w) { return read<T, V>(image + ((long long)h * p.W + w) * C); };
  store_vec<T, V>(y + thread * V, window_average<V, T>(p, a, at.h, at.w, load));
}

// Grid, threads: as above, of grad_x.
template <typename T, bool VECTORS>
__global__ void __launch_bounds__(256)
    avg_pool2d_bwd_last(const T* __restrict__ grad_y, T* __restrict__ grad_x, long long threads, int C, Window p,
                        Cells cells, Averaging a) {
  using A = acc_t<T>;
  constexpr int V = VECTORS ? kVecWidth<T> : 1;
  const long long thread = global_thread();
  if (thread >= threads) return;
  const Cell at(cells, thread, V);
  const T* image = grad_y + at.image * p.OH * p.OW * C + at.c;
  const Covering down(at.h, p.ph, p.kh, p.OH, cells.sh), across(at.w, p.pw, p.kw, p.OW, cells.sw);
  A sum[V] = {};
  for (int oh = down.first; oh <= down.last; ++oh) {
#pragma unroll 2
    for (int ow = across.first; ow <= across.last; ++ow) {
      const Vec<T, V> grad = read<T, V>(image + ((long long)oh * p.OW + ow) * C);
      const A d = divisor_of<A>(p, a, oh, ow);
#pragma unroll
      for (int v = 0; v < V; ++v) sum[v] += to_acc(grad.data[v]) / d;
    }
  }
  Vec<T, V> result;
#pragma unroll
  for (int v = 0; v < V; ++v) result.data[v] = from_acc<T>(sum[v]);
  store_vec<T, V>(grad_x + thread * V, result);
}
