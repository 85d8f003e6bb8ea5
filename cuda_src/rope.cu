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

// Stops the program: a position out of range is never a wild read.
__device__ __forceinline__ void bad_position(long long at, long long position, long long positions) {
  printf("cupyops: positions, element %lld, is %lld, expected one in [0, %lld)\n", at, position, positions);
  __trap();
}

// One row, and the tables' rows for its position. This thread has every blockDim.x-th vector of N elements.
template <typename T, int N> struct Row {
  using A = acc_t<T>;
  const T* x;
  T* y;
  const T* cosine;
  const T* sine;
  A sign;

  // Pairs (j, j + half).
  __device__ __forceinline__ void turn_halves(int half) const {
    for (int j = threadIdx.x * N; j < half; j += blockDim.x * N) {
      Vec<T, N> first = load_vec<T, N>(x + j), second = load_vec<T, N>(x + half + j);
      const Vec<T, N> cosines = load_vec<T, N>(cosine + j), sines = load_vec<T, N>(sine + j);
#pragma unroll
      for (int k = 0; k < N; ++k) turn(first.data[k], second.data[k], cosines.data[k], sines.data[k]);
      store_vec<T, N>(y + j, first);
      store_vec<T, N>(y + half + j, second);
    }
  }

  // Pairs (2j, 2j + 1).
  __device__ __forceinline__ void turn_neighbours(int half) const {
    if constexpr (N == 1) {
      for (int j = threadIdx.x; j < half; j += blockDim.x) {
        T first = x[2 * j], second = x[2 * j + 1];
        turn(first, second, cosine[j], sine[j]);
        y[2 * j] = first, y[2 * j + 1] = second;
      }
    } else {
      for (int j = threadIdx.x * (N / 2); j < half; j += blockDim.x * (N / 2)) {
        Vec<T, N> pairs = load_vec<T, N>(x + 2 * j);
        const Vec<T, N / 2> cosines = load_vec<T, N / 2>(cosine + j), sines = load_vec<T, N / 2>(sine + j);
#pragma unroll
        for (int k = 0; k < N / 2; ++k) turn(pairs.data[2 * k], pairs.data[2 * k + 1], cosines.data[k], sines.data[k]);
        store_vec<T, N>(y + 2 * j, pairs);
      }
    }
  }

  __device__ __forceinline__ void pass(int begin, int end) const {
    for (int i = begin + threadIdx.x * N; i < end; i += blockDim.x * N) store_vec<T, N>(y + i, load_vec<T, N>(x + i));
  }

  __device__ __forceinline__ void turn(T& first, T& second, T cosine, T sine) const {
    const A a = to_acc(first), b = to_acc(second), c = to_acc(cosine), s = sign * to_acc(sine);
    first = from_acc<T>(a * c - b * s);
    second = from_acc<T>(b * c + a * s);
  }
};

template <bool INTERLEAVED, typename T, int N>
__device__ __forceinline__ void turn_row(const Row<T, N>& row, int half, int size) {
  if (INTERLEAVED) row.turn_neighbours(half);
  else row.turn_halves(half);
  row.pass(2 * half, size);
}

// Grid: ceil(rows / blockDim.y). Block: (x, y), any; the threads of a row share its vectors. y is dense, and row r of x
// lies where `layout` says, as does its position: behind `positions`, or, where that is null, the number itself.
// cosine, sine: [limit x half]. `whole`: size, half and the strides of x are whole vectors. `back`: by -angle.
template <typename T, bool INTERLEAVED>
__global__ void rope(const T* __restrict__ x, const T* __restrict__ cosine, const T* __restrict__ sine,
                     const long long* __restrict__ positions, T* __restrict__ y,
                     const __grid_constant__ Layout<2> layout, long long rows, int half, int size, long long limit,
                     int whole, int back) {
  constexpr int W = kVecWidth<T>;
  const long long r = blockIdx.x * (long long)blockDim.y + threadIdx.y;
  if (r >= rows) return;
  const Offsets<2> from = locate(layout, r);
  const long long position = positions ? positions[from.at[1]] : from.at[1];
  if (position < 0 || position >= limit) bad_position(from.at[1], position, limit);
  const T* row_x = x + from.at[0];
  T* row_y = y + r * size;
  const T *row_cosine = cosine + position * half, *row_sine = sine + position * half;
  const acc_t<T> sign = back ? -1 : 1;
  if (whole && is_aligned16(x) && is_aligned16(y) && is_aligned16(cosine) && is_aligned16(sine)) {
    turn_row<INTERLEAVED>(Row<T, W>{row_x, row_y, row_cosine, row_sine, sign}, half, size);
  } else {
    turn_row<INTERLEAVED>(Row<T, 1>{row_x, row_y, row_cosine, row_sine, sign}, half, size);
  }
}
