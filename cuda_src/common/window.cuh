// Windows over planes; bands of contiguous planes in shared memory.
#pragma once

#include "common/async.cuh"
#include "common/divisor.cuh"
#include "common/vec.cuh"

// The geometry: sizes of input and output planes, and kernel, stride, padding, dilation.
struct Window { int H, W, OH, OW, kh, kw, sh, sw, ph, pw, dh, dw; };

// A window in one direction: it begins at `start`, and of its taps `first` to `last` lie inside.
struct Taps {
  int start, first, last;

  __device__ __forceinline__ Taps(int o, int stride, int pad, int kernel, int dilation, int length)
      : start(o * stride - pad), first(0) {
    if (start < 0) first = dilation == 1 ? -start : (-start + dilation - 1) / dilation;
    const int room = length - 1 - start;
    last = min(kernel - 1, dilation == 1 ? room : room / dilation);
  }
  __device__ __forceinline__ bool any() const { return first <= last; }
  __device__ __forceinline__ int clamp(int tap) const { return min(max(tap, first), last); }

  static __device__ __forceinline__ Taps down(const Window& p, int oh) { return Taps(oh, p.sh, p.ph, p.kh, p.dh, p.H); }
  static __device__ __forceinline__ Taps across(const Window& p, int ow) {
    return Taps(ow, p.sw, p.pw, p.kw, p.dw, p.W);
  }
};

// n = quotient * d + remainder; 64-bit division only where n asks for it.
__device__ __forceinline__ long long divide(long long n, const Divisor& d, int& remainder) {
  const long long quotient = n >> 31 == 0 ? d.divide(int(n)) : n / d.divisor;
  remainder = int(n - quotient * d.divisor);
  return quotient;
}

// How blocks share contiguous planes: `each` whole planes to a block, or a plane in `count` bands of `rows`.
struct Bands {
  long long planes, each, rows, count, shared;  // shared: whether what a band needs fits into shared memory
  Divisor width, height;  // of the planes of outputs
};

// Rows first <= r < last, counted on over the planes of a block, each of `height`.
struct Band {
  long long plane;
  int first, last;

  __device__ __forceinline__ Band(const Bands& b, int height) {
    const long long group = blockIdx.x / unsigned(b.count);
    const int part = int(blockIdx.x - group * b.count);
    plane = group * b.each;
    first = part * int(b.rows);
    last = b.count > 1 ? min(first + int(b.rows), height) : int(min(b.each, b.planes - plane)) * height;
  }
};

// An output of a band: i counts from row `first` on.
struct Output {
  int plane, oh, ow;

  __device__ __forceinline__ Output(const Bands& b, int first, int i) {
    const int row = b.width.divide(i), r = first + row;
    ow = i - row * int(b.width.divisor);
    plane = b.height.divide(r);
    oh = r - plane * int(b.height.divisor);
  }
};

// Where the element of a run that is at `run` lies behind a 16-byte boundary.
template <typename T> __device__ __forceinline__ int lead_of(const T* run) {
  return int(reinterpret_cast<unsigned long long>(run) / sizeof(T) % kVecWidth<T>);
}

// `count` elements at shared + lead_of(run), by 16-byte copies but for the ends. The block waits for all.
template <typename T> __device__ __forceinline__ void fetch_run(T* shared, const T* run, int count) {
  constexpr int V = kVecWidth<T>;
  const int lead = lead_of(run);
  shared += lead;
  for (int e = int(threadIdx.x) * V - lead; e < count; e += blockDim.x * V) {
    if (e >= 0 && e + V <= count) {
      fetch16(shared + e, run + e);
      continue;
    }
    for (int k = max(e, 0); k < min(e + V, count); ++k) shared[k] = run[k];
  }
  end_group();
  wait_for_groups<0>();
  __syncthreads();
}

// The reverse, rounded from acc_t<T>: `count` sums at shared + lead_of(run).
template <typename T> __device__ __forceinline__ void store_run(T* run, const acc_t<T>* shared, int count) {
  constexpr int V = kVecWidth<T>;
  const int lead = lead_of(run);
  shared += lead;
  for (int e = int(threadIdx.x) * V - lead; e < count; e += blockDim.x * V) {
    if (e >= 0 && e + V <= count) {
      Vec<T, V> pack;
#pragma unroll
      for (int k = 0; k < V; ++k) pack.data[k] = from_acc<T>(shared[e + k]);
      store_vec<T, V>(run + e, pack);
      continue;
    }
    for (int k = max(e, 0); k < min(e + V, count); ++k) run[k] = from_acc<T>(shared[k]);
  }
}

// --- channels last ---

// Elements of images whose channels are neighbours, V of them to a thread: how they divide.
struct Cells { Divisor vectors, width, height, sh, sw; };

// A thread's channels from c on, at (h, w) of an image.
struct Cell {
  long long image;
  int c, h, w;

  __device__ __forceinline__ Cell(const Cells& cells, long long thread, int V) {
    image = divide(divide(divide(thread, cells.vectors, c), cells.width, w), cells.height, h);
    c *= V;
  }
};

// The windows that cover a place in one direction, apart from dilation: first to last.
struct Covering {
  int first, last;

  __device__ __forceinline__ Covering(int place, int pad, int span, int count, const Divisor& stride) {
    const int end = place + pad, begin = end - span;  // windows start at one of begin + 1 ... end, counted from -pad
    first = begin < 0 ? 0 : stride.divide(begin) + 1;
    last = min(count - 1, stride.divide(end));
  }
};

// N elements, by one access where the address allows it.
template <typename T, int N> __device__ __forceinline__ Vec<T, N> read(const T* from) {
  if (reinterpret_cast<unsigned long long>(from) % sizeof(Vec<T, N>) == 0) return load_vec<T, N>(from);
  Vec<T, N> result;
#pragma unroll
  for (int n = 0; n < N; ++n) result.data[n] = from[n];
  return result;
}
