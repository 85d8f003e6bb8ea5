// The epilogue of products whose columns are normalised next: beside y, as it is rounded, the moments of its columns.
#pragma once

#include "common/reduce/shifted_moments.cuh"
#include "gemm/wgmma.cuh"

namespace wgmma_gemm {

// Where these go: `parts`, (mean, square) of each column, is [parts, n], and `counts`, the rows of a part, of [parts]. Every warp
// of the consumers leaves a part of its columns; those without rows are the last ones.
struct MomentParts {
  float2* parts;
  float* counts;
};

// It is for whole pieces, of which m is a multiple, and for an Order of one row of tiles at a time, of whose columns the grid has
// equally many clusters: so a block's tiles lie below each other.
struct Measured : Plain {
  static constexpr bool MEASURED = true;

  // A thread has two neighbouring columns in each piece of a row, and 16 of its 64 rows: a warp reads a line at a time.
  template <typename T, class S> struct Rows {
    static_assert(S::PIECE == 64 && S::SPLIT == 1, "a line of a piece is a word of each lane");
    static constexpr int ROWS = 16;
    Centred<float> own[S::ACROSS][2] = {};
    int pieces[S::ACROSS] = {};  // so far

    // Adds the piece that a slot has, number `across` of its row.
    __device__ __forceinline__ void add(unsigned slot, int across) {
      Centred<float>(&of)[2] = own[across];
      const unsigned at = slot + threadIdx.x % 128 / 32 * (ROWS * 128), lane = threadIdx.x % 32 * 4;
      unsigned words[ROWS];
#pragma unroll
      for (int i = 0; i < ROWS; ++i) {
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(words[i]) : "r"(at + tma::swizzle<128>(i * 128 + lane)) : "memory");
      }
      if (pieces[across] == 0) {
        const float2 first = unpacked<T>(words[0]);
        of[0].about = first.x, of[1].about = first.y;
      }
#pragma unroll
      for (int i = 0; i < ROWS; ++i) {
        const float2 pair = unpacked<T>(words[i]);
        of[0].add(pair.x), of[1].add(pair.y);
      }
      const int count = ++pieces[across];
      if (count & (count - 1)) return;  // after 1, 2, 4, 8 ...
      of[0].draw_nearer(ROWS * count), of[1].draw_nearer(ROWS * count);
    }

    // Leaves the moments of all this warp's rows.
    __device__ __forceinline__ void save(const Block<T, S>& block, int consumer) const {
      const MomentParts& to = *static_cast<const MomentParts*>(block.p.reduced);
      const int columns = block.order.columns, lane = threadIdx.x % 32, before = block.first / columns;
      const int part = ((consumer * (block.step / columns) + before) * S::CLUSTER + block.rank) * 4 + threadIdx.x % 128 / 32;
      const int first = block.first % columns * S::WIDTH;
      if (first == 0 && lane == 0) to.counts[part] = ROWS * pieces[0];
#pragma unroll
      for (int i = 0; i < S::ACROSS; ++i) {
        const int column = first + i * S::PIECE + lane * 2;
        if (column >= block.p.n) continue;
        const Moments<float> low = own[i][0].moments(ROWS * pieces[i]), high = own[i][1].moments(ROWS * pieces[i]);
        float2* const at = to.parts + static_cast<long long>(part) * block.p.n + column;
        *reinterpret_cast<float4*>(at) = {low.mean, low.square, high.mean, high.square};
      }
    }
  };
};

}  // namespace wgmma_gemm
