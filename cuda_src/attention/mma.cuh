// Rows in shared memory for mma.sync: how they get there, how a warp reads them, and how its results leave.
#pragma once

#include "attention/problem.cuh"
#include "common/hw/cp_async.cuh"
#include "common/hw/mma.cuh"

namespace attention {

// The same value, of which the compiler does not know so: what a loop computes of it is not kept in registers all along.
__device__ __forceinline__ unsigned anew(unsigned x) {
  asm volatile("" : "+r"(x));
  return x;
}

// All copies of all threads are complete.
__device__ __forceinline__ void finish_copies() {
  end_group();
  wait_for_groups<0>();
  __syncthreads();
}

// Which tile of which head a block has, of `tiles` of each of heads * batches: heads come `section` at a time, and of these their
// first tiles, then their second ones, so that what passes by them stays in L2.
struct Turn {
  int tile, head, batch;

  __device__ __forceinline__ Turn(int tiles, int heads, int batches, int section) {
    const int number = blockIdx.x, whole = section * tiles, in = number % whole;
    const int first = number / whole * section, wide = min(section, heads * batches - first);
    tile = in / wide, head = (first + in % wide) % heads, batch = (first + in % wide) / heads;
  }
};

// Where a 16-byte chunk of a row of D elements lies. The chunks of a row change places, so that eight rows meet no bank twice.
template <int D> __device__ __forceinline__ unsigned place(unsigned base, int row, int chunk) {
  static_assert(D % 32 == 0, "chunks change places by eights, or by fours, of which two rows fill the banks");
  return base + row * D * 2 + (chunk ^ (D % 64 ? row / 2 % 4 : row % 8)) * 16;
}

// Begins to copy ROWS rows, of which `rows` exist and have `width` elements: the rest is zeros.
template <typename T, int D, int ROWS, int THREADS>
__device__ __forceinline__ void fetch(unsigned to, const T* from, long long stride, int rows, int width) {
  constexpr int CHUNKS = D / 8, SIDE = D % 64 ? 4 : CHUNKS;  // of a row; that threads side by side copy
  constexpr int STEP = THREADS / SIDE;                       // rows at a time
  static_assert(THREADS % SIDE == 0 && ROWS % STEP == 0, "a thread has chunks of every STEP-th row");
  const int first = threadIdx.x / SIDE, side = threadIdx.x % SIDE;
  from += first * stride + side * 8;
#pragma unroll
  for (int row = 0; row < ROWS; row += STEP, from += STEP * stride) {  // what is not inside is not read
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; chunk += SIDE) {
      fetch16_or_zero(place<D>(to, first + row, side + chunk), from + chunk * 8,
                      first + row < rows && (side + chunk) * 8 < width);
    }
  }
}

// sums[16][N] of a warp: a b^T over D, a the 16 rows from `a_row` on at `a`, b the N rows at `b`.
template <typename T, int D, int N>
__device__ __forceinline__ void add_rows(float (&sums)[N / 8][4], unsigned a, int a_row, unsigned b) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < D / 16; ++i) {
    unsigned left[4], right[4];
    load_matrices<false>(left, place<D>(a, a_row + lane % 16, 2 * i + lane / 16));
#pragma unroll
    for (int j = 0; j < N / 16; ++j) {
      load_matrices<false>(right, place<D>(b, 16 * j + lane % 8 + lane / 16 * 8, 2 * i + lane / 8 % 2));
      mma<T>(sums[2 * j], left, right[0], right[1]);
      mma<T>(sums[2 * j + 1], left, right[2], right[3]);
    }
  }
}

// sums[16][D] of a warp: weights[16][N], rounded, times the N rows at `b`.
template <typename T, int D, int N>
__device__ __forceinline__ void add_weighted(float (&sums)[D / 8][4], const float (&weights)[N / 8][4], unsigned b) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < N / 16; ++i) {
    unsigned left[4], right[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      left[e] = pack<T>(weights[2 * i + e / 2][e % 2 * 2], weights[2 * i + e / 2][e % 2 * 2 + 1]);
    }
#pragma unroll
    for (int j = 0; j < D / 16; ++j) {
      load_matrices<true>(right, place<D>(b, 16 * i + lane % 16, 2 * j + lane / 16));
      mma<T>(sums[2 * j], left, right[0], right[1]);
      mma<T>(sums[2 * j + 1], left, right[2], right[3]);
    }
  }
}

// sums of a warp: of I products by 16, whose fragments left(i, fragments) and right(i, j, fragment) read; the latter AHEAD products
// before they are multiplied.
template <typename T, int I, int AHEAD, int M, int N, typename Left, typename Right>
__device__ __forceinline__ void add_fragments(float (&sums)[M][N][4], const Left& left, const Right& right) {
  constexpr int J = N / 2, ALL = I * J;
  unsigned a[2][M][4], b[AHEAD + 1][4];
  left(0, a[0]);
#pragma unroll
  for (int t = 0; t < AHEAD; ++t) right(t / J, t % J, b[t]);
#pragma unroll
  for (int i = 0; i < I; ++i) {
    if (AHEAD == 0 && i > 0) left(i, a[i % 2]);
#pragma unroll
    for (int j = 0; j < J; ++j) {
      const int t = i * J + j, next = t + AHEAD;
      if (next < ALL) right(next / J, next % J, b[next % (AHEAD + 1)]);
      if (AHEAD > 0 && j == J - 1 && i + 1 < I) left(i + 1, a[(i + 1) % 2]);
      const unsigned (&of)[4] = b[t % (AHEAD + 1)];
#pragma unroll
      for (int m = 0; m < M; ++m) {
        mma<T>(sums[m][2 * j], a[i % 2][m], of[0], of[1]), mma<T>(sums[m][2 * j + 1], a[i % 2][m], of[2], of[3]);
      }
    }
  }
}

// sums[M * 16][N] of a warp: a b^T over D, of a the columns that left(i, fragments) reads, b the N rows at `b`.
template <typename T, int D, int N, int M, int AHEAD, typename Left>
__device__ __forceinline__ void add_rows(float (&sums)[M][N / 8][4], const Left& left, unsigned b) {
  const int lane = threadIdx.x % 32;
  add_fragments<T, D / 16, AHEAD>(sums, left, [&](int i, int j, unsigned (&fragment)[4]) {
    load_matrices<false>(fragment, place<D>(b, 16 * j + lane % 8 + lane / 16 * 8, 2 * i + lane / 8 % 2));
  });
}

// weights[M * 16][N], rounded, two of neighbouring columns in one.
template <typename T, int M, int N>
__device__ __forceinline__ void round(unsigned (&rounded)[M][N][2], const float (&weights)[M][N][4]) {
#pragma unroll
  for (int e = 0; e < M * N * 2; ++e) {
    const float* pair = &weights[e / (2 * N)][e % (2 * N) / 2][e % 2 * 2];
    rounded[e / (2 * N)][e % (2 * N) / 2][e % 2] = pack<T>(pair[0], pair[1]);
  }
}

// sums[M * 16][D] of a warp: rounded weights[M * 16][N] times the N rows at `b`.
template <typename T, int D, int N, int M, int AHEAD>
__device__ __forceinline__ void add_weighted(float (&sums)[M][D / 8][4], const unsigned (&weights)[M][N / 8][2],
                                             unsigned b) {
  const int lane = threadIdx.x % 32;
  const auto left = [&](int i, unsigned (&fragments)[M][4]) {
#pragma unroll
    for (int e = 0; e < M * 4; ++e) fragments[e / 4][e % 4] = weights[e / 4][2 * i + e % 4 / 2][e % 2];
  };
  add_fragments<T, N / 16, AHEAD>(sums, left, [&](int i, int j, unsigned (&fragment)[4]) {
    load_matrices<true>(fragment, place<D>(b, 16 * i + lane % 16, 2 * j + lane / 16));
  });
}

// The 16 rows of sums of a warp, each times a factor, rounded: by way of the rows from `line` on at `base`, which only this
// warp reads, to `to`, of which `rows` rows of `width` elements exist.
template <typename T, int D>
__device__ __forceinline__ void put(unsigned base, int line, const float (&sums)[D / 8][4], float first, float second,
                                    T* to, long long stride, int rows, int width) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int j = 0; j < D / 8; ++j) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float factor = r ? second : first;
      asm volatile("st.shared.b32 [%0], %1;" ::"r"(place<D>(base, line + lane / 4 + 8 * r, j) + lane % 4 * 4),
                   "r"(pack<T>(sums[j][2 * r] * factor, sums[j][2 * r + 1] * factor))
                   : "memory");
    }
  }
  __syncwarp();
  for (int i = lane; i < 16 * D / 8; i += 32) {
    const int row = i / (D / 8), chunk = i % (D / 8);
    uint4 x;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "r"(place<D>(base, line + row, chunk)));
    if (row < rows && chunk * 8 < width) *reinterpret_cast<uint4*>(to + row * stride + chunk * 8) = x;
  }
}

}  // namespace attention
