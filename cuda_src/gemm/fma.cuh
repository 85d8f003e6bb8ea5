// The GEMM's inner product by fused multiply-adds: fp32, fp64, and what the tensor cores of an older card do not take.
#pragma once

#include "gemm/layout.cuh"

// A block multiplies a TILE_M x BK panel of A by a BK x TILE_N panel of B, kept in shared memory as [k][i] in acc_t<T>.
// Each thread owns TM x TN sums, in groups of W x W that lie a thread grid apart, so that a warp (8 x 4 threads) reads
// whole 128-byte lines of shared memory.
template <typename T, int TILE> struct FmaEngine {
  using Element = acc_t<T>;
  using A = acc_t<T>;
  static constexpr int W = kVecWidth<A>;
  static constexpr int THREADS = kGemmThreads<T, TILE>;
  static constexpr int BK = sizeof(A) == 8 ? 8 : 16;
  static constexpr int STAGES = 2;
  static constexpr bool ASYNC = false;
  // The pad spreads the transposing stores over the banks.
  static constexpr int ROW_A = kTileM<TILE> + W, ROW_B = kTileN<TILE> + W;
  static constexpr int PANEL_A = BK * ROW_A, PANEL_B = BK * ROW_B;
  static constexpr int COLUMNS = TILE == 32 ? 8 : 16, ROWS = THREADS / COLUMNS;
  static constexpr int TM = kTileM<TILE> / ROWS, TN = kTileN<TILE> / COLUMNS;
  // Each panel is summed by itself and then added: one chain of all k has an error some times larger. The registers for
  // that are there in the small tiles.
  static constexpr bool BLOCKED = TILE <= 64 && sizeof(A) == 4;

  A sums[TM][TN] = {};
  int ty, tx;

  __device__ __forceinline__ FmaEngine() {
    const int warp = threadIdx.x / 32;
    tx = warp % (COLUMNS / 8) * 8 + lane_x();
    ty = warp / (COLUMNS / 8) * 4 + lane_y();
  }

  // W elements of T, along k or along i from (i, k), into a panel whose tile is SIZE wide.
  template <int SIZE> static __device__ __forceinline__ void store(A* panel, bool along_k, int i, int k,
                                                                   Vec<T, W> chunk) {
    constexpr int ROW = SIZE + W;
    Vec<A, W> wide;
#pragma unroll
    for (int e = 0; e < W; ++e) wide.data[e] = to_acc(chunk.data[e]);
    if (along_k) {
#pragma unroll
      for (int e = 0; e < W; ++e) panel[(k + e) * ROW + i] = wide.data[e];
    } else {
      store_vec<A, W>(panel + k * ROW + i, wide);
    }
  }

  __device__ __forceinline__ void multiply(const A* a_panel, bool, const A* b_panel, bool) {
    A fresh[TM][TN] = {};
    A(&into)[TM][TN] = *(BLOCKED ? &fresh : &sums);
#pragma unroll
    for (int k = 0; k < BK; ++k) {
      A a[TM], b[TN];
      read<TM, ROWS>(a, a_panel + k * ROW_A + ty * W);
      read<TN, COLUMNS>(b, b_panel + k * ROW_B + tx * W);
#pragma unroll
      for (int m = 0; m < TM; ++m) {
#pragma unroll
        for (int n = 0; n < TN; ++n) into[m][n] += a[m] * b[n];
      }
    }
    if constexpr (BLOCKED) {
#pragma unroll
      for (int m = 0; m < TM; ++m) {
#pragma unroll
        for (int n = 0; n < TN; ++n) sums[m][n] += fresh[m][n];
      }
    }
  }

  // In rounds of one group of W x W sums per thread. The loop is kept rolled, and its body picks the round's registers.
  template <typename Out> __device__ __forceinline__ void write(const Out& out, int m0, int n0, A* shared) const {
    constexpr int GROUPS_N = TN / W, GROUPS = TM / W * GROUPS_N;
    const int warp_m = (ty - lane_y()) * W, warp_n = (tx - lane_x()) * W;
#pragma unroll 1
    for (int round = 0; round < GROUPS; ++round) {
      const int m = m0 + warp_m + round / GROUPS_N * ROWS * W, n = n0 + warp_n + round % GROUPS_N * COLUMNS * W;
      store_by_warp<4 * W, 8 * W, W>(out, m, n, shared, [&](A* corner, int row) {
        corner += lane_y() * W * row + lane_x() * W;
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) {
          if (group != round) continue;
#pragma unroll
          for (int e = 0; e < W; ++e) {
#pragma unroll
            for (int f = 0; f < W; ++f) corner[e * row + f] = sums[group / GROUPS_N * W + e][group % GROUPS_N * W + f];
          }
        }
      });
    }
  }

 private:
  // Neighbouring lanes share an address in B, every sixteenth in A: so 16-byte reads take the fewest passes.
  static __device__ __forceinline__ int lane_x() { return threadIdx.x / 2 % 8; }
  static __device__ __forceinline__ int lane_y() { return threadIdx.x % 32 / 16 * 2 + threadIdx.x % 2; }

  template <int COUNT, int GRID> static __device__ __forceinline__ void read(A (&values)[COUNT], const A* line) {
#pragma unroll
    for (int group = 0; group < COUNT; group += W) {
      const Vec<A, W> loaded = load_vec<A, W>(line + group * GRID);
#pragma unroll
      for (int e = 0; e < W; ++e) values[group + e] = loaded.data[e];
    }
  }
};
