// Each pair (a, b) of the first `rotary` elements of a row is turned by the angle of the row's position p:
//
//     y_a = a cos[p, j] - b sin[p, j]
//     y_b = b cos[p, j] + a sin[p, j]
//
// halves: pair j is elements j and j + rotary / 2; interleaved: elements 2j and 2j + 1. Elements from `rotary` on pass.
// grad_x is grad_y, turned back: the same with -sin.
//
// Bytes per element: 2 x sizeof(T), either way; rows of cos and sin come from the caches. Three flops.
//
// Reached on an H200 (GB/s of those bytes, forward / backward; a copy: 4251): 4x32x4096x128 r128 bf16 3902 / 3916,
// 4x4096x32x128 r128 bshd bf16 3785 / 3801, 4x32x4096x128 r128 interleaved bf16 3500 / 3506, 4x32x4096x128 r64 bf16
// 3335 / 3347, 4x32x4096x128 r128 fp16 3912 / 3903. Lost: the tables, which every head reads again from L2; heads
// whose halves are no whole vectors go by single elements (1065).
#include "common/broadcast.cuh"

#ifndef UNROLL
#define UNROLL 4
#endif

// Stops the program: a position out of range is never a wild read.
__device__ __forceinline__ void bad_position(long long at, long long position, long long positions) {
  printf("cupyops: positions, element %lld, is %lld, expected one in [0, %lld)\n", at, position, positions);
  __trap();
}

// How rope.py divides the work: `heads` rows of one position, some of which a thread has.
struct Heads {
  long long rows, heads;
  long long x_stride, y_stride;  // from a head to the next
  int groups, chunk;  // of blockDim.y positions; heads of a thread
  int turned, units;  // what turns of a row, and with what passes: see rope()
  long long x_row, y_row, step;  // from a position's rows to the next's, and of the position, where `even`
  int even, one;  // `one`: a chunk is all the heads
};

// N elements each of two halves of a row, or N neighbours.
template <typename T, bool INTERLEAVED, int N> struct Pairs {
  using A = acc_t<T>;
  static constexpr bool NEIGHBOURS = INTERLEAVED && N > 1;
  static constexpr int ANGLES = NEIGHBOURS ? N / 2 : N;
  Vec<T, N> first, second;

  static __device__ __forceinline__ int begin(int unit) { return INTERLEAVED ? unit * 2 * ANGLES : unit * N; }

  __device__ __forceinline__ void load(const T* x, int half) {
    first = load_vec<T, N>(x);
    if (!NEIGHBOURS) second = load_vec<T, N>(x + (INTERLEAVED ? 1 : half));
  }
  __device__ __forceinline__ void store(T* y, int half) const {
    store_vec<T, N>(y, first);
    if (!NEIGHBOURS) store_vec<T, N>(y + (INTERLEAVED ? 1 : half), second);
  }
  __device__ __forceinline__ void turn(const Vec<T, ANGLES>& cosines, const Vec<T, ANGLES>& sines, A sign) {
#pragma unroll
    for (int k = 0; k < ANGLES; ++k) {
      T& low = NEIGHBOURS ? first.data[2 * k] : first.data[k];
      T& high = NEIGHBOURS ? first.data[2 * k + 1] : second.data[k];
      const A a = to_acc(low), b = to_acc(high), c = to_acc(cosines.data[k]), s = sign * to_acc(sines.data[k]);
      low = from_acc<T>(a * c - b * s);
      high = from_acc<T>(b * c + a * s);
    }
  }
};

// f(0), f(1) ... for `heads` heads at x and y, U under way at once.
template <int U, typename Unit, typename T, typename F>
__device__ __forceinline__ void each_head(const Heads& of, int heads, int half, const T* x, T* y, F f) {
#pragma unroll 1
  for (int head = 0; head < heads; head += U) {
    Unit unit[U];
#pragma unroll
    for (int u = 0; u < U; ++u) {
      if (head + u < heads) unit[u].load(x + u * of.x_stride, half);
    }
#pragma unroll
    for (int u = 0; u < U; ++u) {
      if (head + u < heads) f(unit[u]), unit[u].store(y + u * of.y_stride, half);
    }
    x += U * of.x_stride, y += U * of.y_stride;
  }
}

template <typename T, int N> struct Passing {
  Vec<T, N> all;
  __device__ __forceinline__ void load(const T* x, int) { all = load_vec<T, N>(x); }
  __device__ __forceinline__ void store(T* y, int) const { store_vec<T, N>(y, all); }
};

// A row is [half | half | rest], or [2 half | rest]: `turned` units of N pairs or, interleaved, of N / 2, then units of N
// elements of the rest. Grid: ceil(rows / blockDim.y) x chunks, folded, chunks slowest. Block: (x, y), any; a thread has
// every blockDim.x-th unit of one position in a chunk of its heads, so that it reads cos and sin once for them all.
// `layout`: where the first of the heads of a position begins in x, which position it is (behind `positions` or, where that
// is null, the number itself), and where it begins in y, which is dense. cosine, sine: [limit x half]. N divides half,
// the size of a row and the strides of x, and all are aligned to it. `back`: by -angle.
template <typename T, bool INTERLEAVED, int N>
__global__ void rope(const T* __restrict__ x, const T* __restrict__ cosine, const T* __restrict__ sine,
                     const long long* __restrict__ positions, T* __restrict__ y,
                     const __grid_constant__ Heads heads, long long limit, int half, int back,
                     const __grid_constant__ Layout<3> layout) {
  constexpr int U = N * sizeof(T) >= 16 ? UNROLL : 2 * UNROLL;
  using Turning = Pairs<T, INTERLEAVED, N>;
  const unsigned chunk = heads.one ? 0 : blockIdx.x / heads.groups;
  const long long r = (blockIdx.x - chunk * heads.groups) * (long long)blockDim.y + threadIdx.y;
  if (r >= heads.rows) return;
  Offsets<3> from = {r * heads.x_row, r * heads.step, r * heads.y_row};
  if (!heads.even) from = locate(layout, r);
  long long position = from.at[1];
  if (positions) {
    position = positions[position];
    if (position < 0 || position >= limit) bad_position(from.at[1], position, limit);
  }
  const long long first = chunk * (long long)heads.chunk;
  const int here = static_cast<int>(min(heads.heads - first, (long long)heads.chunk));
  const T* row_x = x + from.at[0] + first * heads.x_stride;
  T* row_y = y + from.at[2] + first * heads.y_stride;
  const acc_t<T> sign = back ? -1 : 1;
  for (int unit = threadIdx.x; unit < heads.units; unit += blockDim.x) {
    if (unit < heads.turned) {
      const int begin = Turning::begin(unit);
      const long long angle = position * half + unit * Turning::ANGLES;
      const auto cosines = load_vec<T, Turning::ANGLES>(cosine + angle), sines = load_vec<T, Turning::ANGLES>(sine + angle);
      each_head<U, Turning>(heads, here, half, row_x + begin, row_y + begin,
                            [&](Turning& pairs) { pairs.turn(cosines, sines, sign); });
    } else {
      const int begin = 2 * half + (unit - heads.turned) * N;
      each_head<U, Passing<T, N>>(heads, here, half, row_x + begin, row_y + begin, [](Passing<T, N>&) {});
    }
  }
}
