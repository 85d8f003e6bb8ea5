// The GEMM's inner product by tensor cores: mma.sync on fp16 (sm_75 and later) and bf16 (sm_80 and later), sums in fp32.
#pragma once

#include "gemm/layout.cuh"
#include "common/hw/mma.cuh"

// A block multiplies panels of TILE_M x BK and BK x TILE_N. A panel lies in shared memory as its operand does in memory,
// [i][k] or [k][i], so that 16-byte copies fill it either way; a pad of 16 bytes per row lets ldmatrix read eight rows
// without a bank conflict. Warps form a grid of 2 x WARPS_N, each with WM x WN sums in m16n8 fragments: 64 x 64 in the
// large tiles, so that 8 ldmatrix feed 32 mma.
template <typename T, int TILE> struct MmaEngine {
  using Element = T;
  static constexpr int W = 8;
  static constexpr int THREADS = kGemmThreads<T, TILE>;
  static constexpr int BK = TILE == 256 ? 64 : 32;
  static constexpr int STAGES = TILE <= 64 ? 4 : 3;
#if __CUDA_ARCH__ >= 800
  static constexpr bool ASYNC = true;
#else
  static constexpr bool ASYNC = false;
#endif
  static constexpr int ROW_K = BK + W;  // the row length of [i][k]; that of [k][i] is the tile's width and W
  static constexpr int PANEL_A = kTileM<TILE> * ROW_K, PANEL_B = kTileN<TILE> * ROW_K;  // no less than [k][i] takes
  static constexpr int WARPS_N = THREADS / 64, WM = kTileM<TILE> / 2, WN = kTileN<TILE> / WARPS_N;
  static constexpr int FM = WM / 16, FN = WN / 8;

  float sums[FM][FN][4] = {};
  unsigned a[2][FM][4], b[2][FN / 2][4];

  template <int SIZE> static __device__ __forceinline__ T* place(T* panel, bool along_k, int i, int k) {
    return panel + (along_k ? i * ROW_K + k : k * (SIZE + W) + i);
  }

  template <int SIZE> static __device__ __forceinline__ void store(T* panel, bool along_k, int i, int k,
                                                                   Vec<T, W> chunk) {
    store_vec<T, W>(place<SIZE>(panel, along_k, i, k), chunk);
  }

  // Reads the fragments of 16 k into one of the two buffers; multiply() takes them from there.
  template <bool A_ALONG_K, bool B_ALONG_K>
  __device__ __forceinline__ void read(int buffer, const T* a_panel, const T* b_panel, int k) {
    const T* a_lane = lane_place<kTileM<TILE>, A_ALONG_K, false>(a_panel, warp_m());
    const T* b_lane = lane_place<kTileN<TILE>, B_ALONG_K, true>(b_panel, warp_n());
#pragma unroll
    for (int m = 0; m < FM; ++m) fragment<kTileM<TILE>, A_ALONG_K>(a[buffer][m], a_lane, m * 16, k);
#pragma unroll
    for (int n = 0; n < FN / 2; ++n) fragment<kTileN<TILE>, B_ALONG_K>(b[buffer][n], b_lane, n * 16, k);
  }

  __device__ __forceinline__ void multiply(int buffer) {
#pragma unroll
    for (int m = 0; m < FM; ++m) {
#pragma unroll
      for (int n = 0; n < FN; ++n) {
        mma<T>(sums[m][n], a[buffer][m], b[buffer][n / 2][n % 2 * 2], b[buffer][n / 2][n % 2 * 2 + 1]);
      }
    }
  }

  // Whole panels.
  __device__ __forceinline__ void multiply(const T* a_panel, bool a_along_k, const T* b_panel, bool b_along_k) {
    if (a_along_k) {
      b_along_k ? multiply<true, true>(a_panel, b_panel) : multiply<true, false>(a_panel, b_panel);
    } else {
      b_along_k ? multiply<false, true>(a_panel, b_panel) : multiply<false, false>(a_panel, b_panel);
    }
  }

  template <bool A_ALONG_K, bool B_ALONG_K> __device__ __forceinline__ void multiply(const T* a_panel,
                                                                                     const T* b_panel) {
    read<A_ALONG_K, B_ALONG_K>(0, a_panel, b_panel, 0);
#pragma unroll
    for (int part = 0; part < BK / 16; ++part) {
      if (part + 1 < BK / 16) read<A_ALONG_K, B_ALONG_K>((part + 1) % 2, a_panel, b_panel, (part + 1) * 16);
      multiply(part % 2);
    }
  }

  // In rounds of 16 rows of the warp. The loop is kept rolled, and its body picks the round's registers.
  template <typename Out> __device__ __forceinline__ void write(const Out& out, int m0, int n0, float* shared) const {
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int round = 0; round < FM; ++round) {
      store_by_warp<16, WN, W>(out, m0 + warp_m() + round * 16, n0 + warp_n(), shared, [&](float* corner, int row) {
        corner += lane / 4 * row + lane % 4 * 2;
#pragma unroll
        for (int m = 0; m < FM; ++m) {
          if (m != round) continue;
#pragma unroll
          for (int n = 0; n < FN; ++n) {
            store_vec<float, 2>(corner + n * 8, {sums[m][n][0], sums[m][n][1]});
            store_vec<float, 2>(corner + n * 8 + 8 * row, {sums[m][n][2], sums[m][n][3]});
          }
        }
      });
    }
  }

 private:
  static __device__ __forceinline__ int warp_m() { return threadIdx.x / 32 / WARPS_N * WM; }
  static __device__ __forceinline__ int warp_n() { return threadIdx.x / 32 % WARPS_N * WN; }

  // Where this lane's row of eight elements is, in the first fragment of a warp that begins at i. Register r of a fragment
  // of A has the elements at i + 8 (r % 2), k + 8 (r / 2); of B at i + 8 (r / 2), k + 8 (r % 2): mma wants the two that
  // differ in k side by side, and registers in another order would have to be moved.
  template <int SIZE, bool ALONG_K, bool IS_B> static __device__ __forceinline__ const T* lane_place(const T* panel,
                                                                                                     int i) {
    const int lane = threadIdx.x % 32, inner = lane / 8 % 2 * 8, outer = lane / 16 * 8;
    const int row_i = (IS_B ? outer : inner) + (ALONG_K ? lane % 8 : 0);
    const int row_k = (IS_B ? inner : outer) + (ALONG_K ? 0 : lane % 8);
    return place<SIZE>(const_cast<T*>(panel), ALONG_K, i + row_i, row_k);
  }

  // 16 x 16 elements at (i, k).
  template <int SIZE, bool ALONG_K>
  static __device__ __forceinline__ void fragment(unsigned (&values)[4], const T* lane_place, int i, int k) {
    load_matrices<!ALONG_K>(values, place<SIZE>(const_cast<T*>(lane_place), ALONG_K, i, k));
  }
};
