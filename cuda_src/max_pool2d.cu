// y[oh, ow]    = max over i < kh, j < kw of x[oh * sh - ph + i * dh, ow * sw - pw + j * dw], in each plane
// grad_x[h, w] = sum of grad_y[oh, ow] over the windows whose maximum is at (h, w)
//
// What lies outside the plane counts as -inf, a window that is all outside gives -inf. NaN wins; of equals, the first.
//
// Forward keeps the place of each maximum: as a byte, i * kw + j, or as PyTorch's index, h * W + w. Contiguous planes are
// worked on in bands, contiguous runs that a block copies to shared memory, or sums up there: backward adds each window's
// gradient at its place, windows that may meet one after the other, so in a fixed order and without atomics. Channels last,
// and where no band fits, each element of grad_x looks at the windows that cover it.
// Bytes per input element, k x k at stride k: forward sizeof(T) + (sizeof(T) + 1) / k^2, backward the same. kh * kw
// comparisons per output.
//
// Reached on an H200 (GB/s of those bytes, forward / backward; a copy: 4251): 256x64x112x112 k2 fp32 4094 / 3832,
// 256x64x112x112 k2 bf16 3781 / 3632, 256x64x112x112 k3 s2 p1 bf16 1205 / 1108, 256x64x112x112 k3 s2 p1 last bf16
// 1348 / 630, 256x64x111x111 k2 bf16 1640 / 1247. Lost: windows that overlap take many instructions for each element.
#include "common/window.cuh"

// What is kept of the maximum at tap (i, j) of a window that begins at (h, w).
template <typename I> __device__ __forceinline__ I place(const Window& p, int h, int w, int i, int j) {
  if constexpr (sizeof(I) == 1) return I(i * p.kw + j);
  else return I(h + i * p.dh) * p.W + (w + j * p.dw);
}

// The maxima of N planes side by side over a window. load(h, w) gives their elements there, several of them under way.
// K is kh = kw where that is known: taps outside repeat the nearest inside, which changes nothing.
template <typename I, int K, int N, typename T, typename F>
__device__ __forceinline__ void window_max(const Window& p, const Taps& down, const Taps& across, F load, Vec<T, N>& y,
                                           I (&argmax)[N]) {
  using A = acc_t<T>;
  constexpr int U = K ? K : 3;
  A best[N];
  int best_i[N], best_j[N];
#pragma unroll
  for (int n = 0; n < N; ++n) best[n] = -infinity<A>(), best_i[n] = down.first, best_j[n] = across.first;
  const bool any = down.any() && across.any();
  const int begin_i = K ? 0 : down.first, end_i = !any ? 0 : K ? K : down.last + 1;
  const int begin_j = K ? 0 : across.first, end_j = K ? K : across.last + 1;
#pragma unroll(K ? K : 1)
  for (int row = begin_i; row < end_i; ++row) {
    const int i = down.clamp(row), h = down.start + i * p.dh;
#pragma unroll(K ? K : 1)
    for (int column = begin_j; column < end_j; column += U) {
      Vec<T, N> x[U];
#pragma unroll
      for (int u = 0; u < U; ++u) x[u] = load(h, across.start + across.clamp(column + u) * p.dw);
#pragma unroll
      for (int u = 0; u < U; ++u) {
#pragma unroll
        for (int n = 0; n < N; ++n) {
          const A value = to_acc(x[u].data[n]);
          const bool wins = value > best[n] || value != value;
          best[n] = wins ? value : best[n];
          best_i[n] = wins ? i : best_i[n];
          best_j[n] = wins ? column + u : best_j[n];
        }
      }
    }
  }
#pragma unroll
  for (int n = 0; n < N; ++n) {
    y.data[n] = from_acc<T>(best[n]);
    argmax[n] = place<I>(p, down.start, across.start, best_i[n], any ? across.clamp(best_j[n]) : best_j[n]);
  }
}

// --- contiguous planes ---

// Grid: the bands of rows of outputs. Block: any. Each thread owns outputs, neighbours on neighbouring threads. Shared
// memory: the rows of x that the band reads, if they fit.
template <typename T, typename I, int K>
__global__ void __launch_bounds__(256)
    max_pool2d_fwd(const T* __restrict__ x, T* __restrict__ y, I* __restrict__ argmax, Window p, Bands b) {
  extern __shared__ uint4 shared[];
  const Band band(b, p.OH);
  const int first = max(band.first * p.sh - p.ph, 0);
  const T* run = x + (band.plane * p.H + first) * p.W;
  const T* held = reinterpret_cast<const T*>(shared) + lead_of(run);
  if (b.shared) {
    const int planes = b.count > 1 ? 1 : band.last / p.OH;
    const int last = b.count > 1 ? min((band.last - 1) * p.sh - p.ph + (p.kh - 1) * p.dh + 1, p.H) : p.H;
    fetch_run(reinterpret_cast<T*>(shared), run, ((planes - 1) * p.H + last - first) * p.W);
  }
  const long long start = (band.plane * p.OH + band.first) * p.OW;
  const int count = (band.last - band.first) * p.OW;
  for (int i = threadIdx.x; i < count; i += blockDim.x) {
    const Output at(b, band.first, i);
    const Taps down = Taps::down(p, at.oh), across = Taps::across(p, at.ow);
    const int above = at.plane * p.H - first;
    Vec<T, 1> best;
    I which[1];
    if (b.shared) {
      const auto load = [&](int h, int w) { return Vec<T, 1>{held[(above + h) * p.W + w]}; };
      window_max<I, K>(p, down, across, load, best, which);
    } else {
      const auto load = [&](int h, int w) { return Vec<T, 1>{run[(long long)(above + h) * p.W + w]}; };
      window_max<I, 0>(p, down, across, load, best, which);
    }
    y[start + i] = best.data[0];
    argmax[start + i] = which[0];
  }
}

// Where in its plane the maximum of a window is, or -1 if the window is empty.
template <typename I> __device__ __forceinline__ int position(const Window& p, const Divisor& kw, int oh, int ow,
                                                              I kept) {
  const Taps down = Taps::down(p, oh), across = Taps::across(p, ow);
  if (!down.any() || !across.any()) return -1;
  if constexpr (sizeof(I) > 1) return int(kept);
  const int i = kw.divide(int(kept)), j = int(kept) - i * p.kw;
  return (down.start + i * p.dh) * p.W + across.start + j * p.dw;
}

// Grid: the bands of rows of grad_x. Block: any. Each thread owns kWindows windows at a time that reach the band. Those
// that are less than `phases` apart (a power of two each way) may meet: they add one after the other. Shared memory: the
// band, in acc_t<T>.
constexpr int kWindows = 4;
template <typename T, typename I>
__global__ void __launch_bounds__(256)
    max_pool2d_bwd(const T* __restrict__ grad_y, const I* __restrict__ argmax, T* __restrict__ grad_x, Window p,
                   Bands b, Divisor kw, int phases_h, int phases_w) {
  using A = acc_t<T>;
  extern __shared__ uint4 shared[];
  const Band band(b, p.H);
  T* run = grad_x + (band.plane * p.H + band.first) * p.W;
  const int count = (band.last - band.first) * p.W, lead = lead_of(run);
  A* sums = reinterpret_cast<A*>(shared) + lead;
  for (int i = threadIdx.x; i < int((lead + count) * sizeof(A) + 15) / 16; i += blockDim.x) {
    shared[i] = make_uint4(0, 0, 0, 0);
  }
  const int planes = b.count > 1 ? 1 : band.last / p.H, bottom = b.count > 1 ? band.last - 1 : p.H - 1;
  const int reach = band.first + p.ph - (p.kh - 1) * p.dh;
  const int first = reach <= 0 ? 0 : (reach + p.sh - 1) / p.sh, last = min(p.OH - 1, (bottom + p.ph) / p.sh);
  const int windows = ((planes - 1) * p.OH + last - first + 1) * p.OW, phases = phases_h * phases_w;
  const long long start = (band.plane * p.OH + first) * p.OW;
  for (int begin = 0; begin < windows; begin += kWindows * blockDim.x) {
    A grad[kWindows];
    int at[kWindows], phase[kWindows];
    I kept[kWindows];
#pragma unroll
    for (int u = 0; u < kWindows; ++u) {
      const int i = begin + u * blockDim.x + threadIdx.x;
      grad[u] = i < windows ? to_acc(grad_y[start + i]) : A(0);
      kept[u] = i < windows ? argmax[start + i] : I(0);
    }
#pragma unroll
    for (int u = 0; u < kWindows; ++u) {
      const int i = begin + u * blockDim.x + threadIdx.x;
      phase[u] = -1;
      if (i >= windows) continue;
      const Output from(b, first, i);
      const int inside = position(p, kw, from.oh, from.ow, kept[u]);
      at[u] = (from.plane * p.H - band.first) * p.W + inside;
      if (inside < 0 || at[u] < 0 || at[u] >= count) continue;
      phase[u] = (from.oh & (phases_h - 1)) * phases_w + (from.ow & (phases_w - 1));
    }
    for (int now = 0; now < phases; ++now) {
      __syncthreads();
#pragma unroll
      for (int u = 0; u < kWindows; ++u) {
        if (phase[u] == now) sums[at[u]] += grad[u];
      }
    }
  }
  __syncthreads();
  store_run(run, reinterpret_cast<const A*>(shared), count);
}

// Calls f(output element, its argmax if it were at (h, w)) for the windows that cover (h, w), in order.
template <typename I, typename F> __device__ __forceinline__ void covering_windows(const Window& p, int h, int w, F f) {
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

// Where no band fits, or too many windows meet. Grid: ceil(planes * H * W / blockDim.x), one dimension. Each thread owns
// an element of grad_x, summed in acc_t<T>.
template <typename T, typename I>
__global__ void max_pool2d_bwd_gather(const T* __restrict__ grad_y, const I* __restrict__ argmax,
                                      T* __restrict__ grad_x, long long inputs, Window p, Cells cells) {
  const long long input = global_thread();
  if (input >= inputs) return;
  const Cell at(cells, input, 1);
  const long long plane = at.image * p.OH * p.OW;
  acc_t<T> sum = 0;
  covering_windows<I>(p, at.h, at.w, [&](long long output, I here) {
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
__global__ void __launch_bounds__(256)
    max_pool2d_fwd_last(const T* __restrict__ x, T* __restrict__ y, I* __restrict__ argmax, long long threads, int C,
                        Window p, Cells cells) {
  constexpr int V = VECTORS ? kVecWidth<T> : 1;
  const long long thread = global_thread();
  if (thread >= threads) return;
  const Cell at(cells, thread, V);
  const T* image = x + at.image * p.H * p.W * C + at.c;
  Vec<T, V> best;
  I which[V];
  const auto load = [&](int h, int w) { return read<T, V>(image + ((long long)h * p.W + w) * C); };
  window_max<I, 0>(p, Taps::down(p, at.h), Taps::across(p, at.w), load, best, which);
  store_vec<T, V>(y + thread * V, best);
  constexpr int P = kPlaces<I, V>;
#pragma unroll
  for (int first = 0; first < V; first += P) {
    Vec<I, P> places;
#pragma unroll
    for (int v = 0; v < P; ++v) places.data[v] = which[first + v];
    store_vec<I, P>(argmax + thread * V + first, places);
  }
}

// Grid: ceil(N * H * W * C / V / blockDim.x), one dimension. Each thread owns V channels of an element of grad_x, as
// above. The windows that cover it are read two by two, all four under way.
template <typename T, typename I, bool VECTORS>
__global__ void __launch_bounds__(256)
    max_pool2d_bwd_last(const T* __restrict__ grad_y, const I* __restrict__ argmax, T* __restrict__ grad_x,
                        long long threads, int C, Window p, Cells cells) {
  constexpr int V = VECTORS ? kVecWidth<T> : 1;
  constexpr int P = kPlaces<I, V>;
  const long long thread = global_thread();
  if (thread >= threads) return;
  const Cell at(cells, thread, V);
  const long long image = at.image * p.OH * p.OW;
  const Covering down(at.h, p.ph, (p.kh - 1) * p.dh + 1, p.OH, cells.sh);
  const Covering across(at.w, p.pw, (p.kw - 1) * p.dw + 1, p.OW, cells.sw);
  acc_t<T> sum[V] = {};
  for (int row = down.first; row <= down.last; row += 2) {
    for (int column = across.first; column <= across.last; column += 2) {
      Vec<T, V> grad[4];
      Vec<I, P> which[4][V / P];
      I here[4];
      bool there[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int oh = row + k / 2, ow = column + k % 2, h0 = oh * p.sh - p.ph, w0 = ow * p.sw - p.pw;
        const int i = p.dh == 1 ? at.h - h0 : (at.h - h0) / p.dh, j = p.dw == 1 ? at.w - w0 : (at.w - w0) / p.dw;
        there[k] = oh <= down.last && ow <= across.last && h0 + i * p.dh == at.h && w0 + j * p.dw == at.w;
        here[k] = place<I>(p, h0, w0, i, j);
        if (!there[k]) continue;
        const long long from = (image + (long long)oh * p.OW + ow) * C + at.c;
        grad[k] = read<T, V>(grad_y + from);
#pragma unroll
        for (int part = 0; part < V / P; ++part) which[k][part] = read<I, P>(argmax + from + part * P);
      }
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        if (!there[k]) continue;
#pragma unroll
        for (int v = 0; v < V; ++v) {
          if (which[k][v / P].data[v % P] == here[k]) sum[v] += to_acc(grad[k].data[v]);
        }
      }
    }
  }
  Vec<T, V> result;
#pragma unroll
  for (int v = 0; v < V; ++v) result.data[v] = from_acc<T>(sum[v]);
  store_vec<T, V>(grad_x + thread * V, result);
}

// --- 2 x 2 windows that tile contiguous planes: the most common pooling, with every access a vector ---

// Grid: ceil(rows * groups / blockDim.x), one dimension; rows = planes * OH, groups.divisor = W / kVecWidth<T>. Each thread
// owns 16 bytes of two rows of x and the outputs of that.
template <typename T>
__global__ void max_pool2d_fwd_2x2(const T* __restrict__ x, T* __restrict__ y, unsigned char* __restrict__ argmax,
                                   long long rows, Divisor groups) {
  constexpr int W = kVecWidth<T>;
  int group;
  const long long thread = global_thread(), row = divide(thread, groups, group);
  if (row >= rows) return;
  const T* at = x + (2 * row * groups.divisor + group) * W;
  const Vec<T, W> upper = read<T, W>(at), lower = read<T, W>(at + groups.divisor * W);
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
                                   T* __restrict__ grad_x, long long rows, Divisor groups) {
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
  T* at = grad_x + (2 * row * groups.divisor + group) * W;
  store_vec<T, W>(at, upper);
  store_vec<T, W>(at + groups.divisor * W, lower);
}
