// What attention by wgmma and TMA has of its own: operands in panels, and how results leave.
#pragma once

#include "attention/problem.cuh"
#include "common/core/vector.cuh"
#include "common/hw/mbarrier.cuh"
#include "common/hw/named_barrier.cuh"
#include "common/hw/tma.cuh"
#include "common/hw/wgmma.cuh"

namespace attention {

constexpr int kLine = 128;  // bytes of a line of a panel: 64 elements, the swizzle of TMA

// Which stage of a ring is next, and the parity of its phase.
template <int STAGES> struct Ring {
  int stage = 0, phase = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == STAGES) stage = 0, phase ^= 1;
  }
};

// Coordinates by which TMA finds rows from `row` on, of which there are `rows` in all, and which begin at `start` of packed
// sequences. Maps of these (segment_map of the host) have the rows of a sequence alone: past its end they read zeros, and write
// nothing.
struct Place { int row, batch; };
constexpr int kSegment = 256;
template <typename Variant> __device__ __forceinline__ Place place_of(int row, int rows, int start, int batch) {
  if constexpr (Variant::kPacked) {
    const int left = max(0, min(kSegment, rows - row));
    return {kSegment - left, start + row + left};
  } else {
    return {row, batch};
  }
}

// Columns in whole panels of TMA.
__device__ __forceinline__ constexpr int whole(int columns) { return (columns + 63) / 64 * 64; }

// Columns of the panels that TMA copies: all that there are of the kernel's, and of packed sequences those alone in which rows have
// elements. A box of a segment map that is wholly outside makes the hardware look before the tensor.
template <typename Variant> struct Widths {
  int first, second;
  __device__ __forceinline__ Widths(int columns, int values, const Sizes& sizes)
      : first(Variant::kPacked ? min(columns, whole(sizes.width)) : columns),
        second(Variant::kPacked ? min(values, whole(sizes.value_width)) : values) {}
};

// Panels of `rows` lines, from the column `from` to `to`, are zeros, written by the whole block.
__device__ __forceinline__ void clear_panels(unsigned at, int rows, int from, int to) {
  for (unsigned i = from * rows * 2 + threadIdx.x * 16; i < to * rows * 2; i += blockDim.x * 16) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(at + i), "r"(0) : "memory");
  }
}

// What the producer says of a stage, where there is a map: the entry of its list, and the head of the queries.
__device__ __forceinline__ void put_entry(unsigned at, int entry, int head) {
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(at), "r"(entry), "r"(head) : "memory");
}
__device__ __forceinline__ Passing passing_at(unsigned at) {
  int entry, head;
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(entry), "=r"(head) : "r"(at) : "memory");
  entry = __shfl_sync(~0u, entry, 0),
  head = __shfl_sync(~0u, head, 0);  // the compiler then knows that a warp shares it
  return {entry / 2, head, entry % 2 != 0};
}

// An operand in panels of 64 columns, whose lines have kLine bytes; of one that is MN-major, `leading` bytes from one panel to
// the next. The low half of what an instruction is told, to which bytes / 16 may be added: 32 bits save registers.
__device__ __forceinline__ unsigned operand(unsigned start, unsigned leading) {
  return start >> 4 | leading >> 4 << 16;
}
__device__ __forceinline__ unsigned long long descriptor(unsigned low) {
  constexpr unsigned kBetweenLines8 = 8 * kLine, kSwizzle128 = 1;
  return static_cast<unsigned long long>(kBetweenLines8 >> 4 | kSwizzle128 << 30) << 32 | low;
}

// Until at most PENDING groups of products are in flight; what is read of `sums` is read after that.
template <int PENDING, int N> __device__ __forceinline__ void finish(float (&sums)[N]) {
  wgmma::wait_for_groups<PENDING>();
#pragma unroll
  for (int i = 0; i < N; ++i) wgmma::keep_behind(sums[i]);
}

// sums[64][N] = a b^T over D, begun as a group: a are 64 rows of panels of ROWS at `a_start`, b the N rows of panels of N.
template <typename T, int D, int N, int ROWS>
__device__ __forceinline__ void begin_across(float (&sums)[N / 2], unsigned a_start, unsigned b_start) {
  const unsigned a = operand(a_start, 16), b = operand(b_start, 16);
#pragma unroll
  for (int i = 0; i < D / 16; ++i) {
    const unsigned inside = i % 4 * 2, panel = i / 4 * 8;
    wgmma::Product<T, N, false, false>::add(sums, descriptor(a + panel * ROWS + inside),
                                            descriptor(b + panel * N + inside), i > 0);
  }
  wgmma::end_group();
}

// sums[64][D] += weights[64][N] b, begun as a group: b the N rows of panels of N.
template <typename T, int D, int N>
__device__ __forceinline__ void begin_along(float (&sums)[D / 2], const unsigned* weights, unsigned b_start) {
  const unsigned b = operand(b_start, N * kLine);
#pragma unroll
  for (int i = 0; i < N / 16; ++i) {
    wgmma::ProductOfRegisters<T, D>::add(sums, weights + 4 * i, descriptor(b + i * kLine));
  }
  wgmma::end_group();
}

// Half types of which a product is made, as sums are held.
template <typename T, int N> __device__ __forceinline__ void round(unsigned (&rounded)[N / 2], const float (&sums)[N]) {
#pragma unroll
  for (int i = 0; i < N / 2; ++i) rounded[i] = pack<T>(sums[2 * i], sums[2 * i + 1]);
}

// The 64 x D sums of a warpgroup, each row times its factor, rounded: into shared memory, for TMA to take. `apart`: bytes between
// the panels.
template <typename T, int D>
__device__ __forceinline__ void put(unsigned at, unsigned apart, const float (&sums)[D / 2], float upper, float lower) {
  const int lane = threadIdx.x % 32, line = threadIdx.x / 32 % 4 * 16 + lane % 16;
#pragma unroll
  for (int i = 0; i < D / 16; ++i) {
    const unsigned chunk = (i % 4 * 2 + lane / 16) ^ line % 8;
    const float* d = sums + 8 * i;
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at + i / 4 * apart +
                                                                                          line * kLine + chunk * 16),
                 "r"(pack<T>(d[0] * upper, d[1] * upper)), "r"(pack<T>(d[2] * lower, d[3] * lower)),
                 "r"(pack<T>(d[4] * upper, d[5] * upper)), "r"(pack<T>(d[6] * lower, d[7] * lower))
                 : "memory");
  }
  tma::fence_shared();
}

// Between a lane and the one that differs in bit BIT: the upper one's first word and the lower one's second change places.
template <int BIT> __device__ __forceinline__ void trade(unsigned& first, unsigned& second, int lane) {
  const bool is_upper = lane & BIT;
  const unsigned got = __shfl_xor_sync(~0u, is_upper ? first : second, BIT);
  (is_upper ? first : second) = got;
}

// The same from registers into memory: `to` is the row of this thread's upper sums, `rows` are there from it on, of `width`
// columns. The four lanes of a row trade, so that each has 8 columns that are neighbours.
template <typename T, int D>
__device__ __forceinline__ void store_rows(T* to, long long stride, int rows, int width, const float (&sums)[D / 2],
                                           float upper, float lower) {
  const int lane = threadIdx.x % 4;
#pragma unroll
  for (int i = 0; i < D / 32; ++i) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float by = r ? lower : upper;
      unsigned words[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        words[j] = pack<T>(sums[16 * i + 4 * j + 2 * r] * by, sums[16 * i + 4 * j + 2 * r + 1] * by);
      }
      trade<1>(words[0], words[1], lane), trade<1>(words[2], words[3], lane);
      trade<2>(words[0], words[2], lane), trade<2>(words[1], words[3], lane);
      const int column = 32 * i + 8 * lane;
      if (8 * r < rows && column < width) {
        store16(to + 8 * r * stride + column, {words[0], words[1], words[2], words[3]});
      }
    }
  }
}

}  // namespace attention
