// The epilogue of products whose columns are normalised next: beside y, as it is rounded, the moments of its columns.
#pragma once

#include "common/reduce/shifted_moments.cuh"
#include "gemm/wgmma.cuh"

namespace wgmma_gemm {

// Where these go: `parts`, (mean, square) of each column, is [parts, n], and `counts`, the rows of a part, of [parts]. Each consumer
// leaves a part of its columns; those without rows are the last ones.
struct MomentParts {
  float2* parts;
  float* counts;
};

// m is a multiple of the 16 rows that a warp has of a piece. The Order is one row of tiles at a time, and the grid has equally many
// clusters for each column of tiles: so a block's tiles lie below each other.
struct Measured : Plain {
  static constexpr bool MEASURED = true;

  // A thread has two neighbouring columns in each piece of a row, and 16 of its 64 rows: a warp reads a line at a time.
  template <typename T, class S> struct Rows {
    static_assert(S::PIECE == 64 && S::SPLIT == 1 && S::CLUSTER == 1, "a line of a piece is a word of each lane");
    static_assert(S::PINGPONG && S::N == 128, "a consumer has a column of a tile for each thread");
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
        asm volatile("ld.shared.u32 %0, [%1];"
                     : "=r"(words[i])
                     : "r"(at + tma::swizzle<128>(i * 128 + lane))
                     : "memory");
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

    // Leaves the moments of all this consumer's rows, of its warps in their order. Its slots are free by then.
    __device__ __forceinline__ void save(const Block<T, S>& block, int consumer, unsigned slots) const {
      const MomentParts& to = *static_cast<const MomentParts*>(block.p.reduced);
      const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
      const unsigned mine = slots + warp * (S::N * 8) + lane * 16, counts = slots + 4 * S::N * 8;
#pragma unroll
      for (int i = 0; i < S::ACROSS; ++i) {
        const Moments<float> low = own[i][0].moments(ROWS * pieces[i]), high = own[i][1].moments(ROWS * pieces[i]);
        store_shared(mine + i * (S::PIECE * 8), low.mean, low.square);
        store_shared(mine + i * (S::PIECE * 8) + 8, high.mean, high.square);
      }
      if (lane == 0) store_shared(counts + warp * 8, ROWS * pieces[0], 0.f);
      named_barrier::sync(1 + consumer, 128);
      const int columns = block.order.columns, rows = block.step / columns;
      const int part = consumer * rows + block.first / columns, first = block.first % columns * S::WIDTH;
      Moments<float> all = {};
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const float2 of = load_shared(slots + (w * S::N + thread) * 8);
        all.merge({load_shared(counts + w * 8).x, of.x, of.y});
      }
      if (first == 0 && thread == 0) to.counts[part] = all.count;
      if (first + thread < block.p.n)
        to.parts[static_cast<long long>(part) * block.p.n + first + thread] = {all.mean, all.square};
    }

   private:
    static __device__ __forceinline__ void store_shared(unsigned at, float low, float high) {
      asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at), "f"(low), "f"(high) : "memory");
    }
    static __device__ __forceinline__ float2 load_shared(unsigned at) {
      float2 pair;
      asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(pair.x), "=f"(pair.y) : "r"(at) : "memory");
      return pair;
    }
  };
};

}  // namespace wgmma_gemm
