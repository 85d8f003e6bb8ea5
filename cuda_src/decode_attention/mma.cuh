// Half types: 16 rows of a group against 16 keys at a time, by mma.sync, from memory into registers and nowhere else.
#pragma once

#include "attention/problem.cuh"
#include "common/hw/dependent_launch.cuh"
#include "common/hw/mma.cuh"
#include "decode_attention/problem.cuh"

#ifndef DECODE_PREFETCH
#define DECODE_PREFETCH 1
#endif
namespace decode {

// 16 bytes that this block alone reads, and once; zeros where they do not exist. The four lanes of a key ask for a quarter of its
// row: with it L2 gets all of it, so that memory is read in longer runs.
__device__ __forceinline__ uint4 stream16_or_zero(const void* from, bool exists) {
  uint4 x;
  asm("{.reg .pred p; setp.ne.u32 p, %5, 0; mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; mov.b32 %3, 0;"
      " @p ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];}"
      : "=&r"(x.x), "=&r"(x.y), "=&r"(x.z), "=&r"(x.w)
      : "l"(from), "r"(static_cast<unsigned>(exists)));
  return x;
}

// A lane reads 16 bytes at a time, and the product takes them as they come: which element of a row is the how-manieth of the
// sum over D does not matter, as long as it is the same of q and of k, and a column of v is that of a result wherever the
// instruction has it. With g = lane / 4 and t = lane % 4:
//   q, k  32 elements of rows g and g + 8 are two products: words 0 and 1 of vector t are the first's, words 2 and 3 the second's
//   v     the vectors g of keys 2t, 2t+1, 2t+8 and 2t+9 are paired, element by element: element e of column 8g + e is of product e
template <typename T, int D, int WARPS>
__device__ __forceinline__ void forward_mma(const T* q, const T* k, const T* v, const int* lengths, const int* table,
                                            const Results<T>& to, float scale, float softcap, const Strides& qs,
                                            const Strides& ks, const Strides& vs, const Sizes& s) {
  constexpr int kRows = 16, kPitch = D + 32;  // of q in shared memory: eight neighbouring lanes meet no bank twice
  constexpr int kSumPitch = D + 8;
  extern __shared__ __align__(16) float shared[];
  T* rows = reinterpret_cast<T*>(shared);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const Work w = work_of<kRows>(s, lengths);
  const int begun = w.from + kStep * warp;  // of the warp's keys
  int block = block_of(s, w, table, begun);
#if DECODE_PREFETCH
  if (begun + lane % kStep < w.to) {  // the first keys and values are on their way while q is read
    const T* from = lane < kStep ? k + w.kv_head * ks.head + offset_of(s, ks, w, table != nullptr, block, begun)
                                 : v + w.kv_head * vs.head + offset_of(s, vs, w, table != nullptr, block, begun);
    from += lane % kStep * (lane < kStep ? ks.row : vs.row);
#pragma unroll
    for (int c = 0; c < D / 64; ++c) {
      if (64 * c < s.width) asm volatile("prefetch.global.L2 [%0];" ::"l"(from + 64 * c));
    }
  }
#endif
  for (int i = threadIdx.x; i < kRows * D / 8; i += 32 * WARPS) {
    const int row = i / (D / 8), chunk = i % (D / 8), at = w.first_row + row;
    uint4 x = {0, 0, 0, 0};
    if (at < s.queries * s.group && chunk * 8 < s.width) {
      const T* from = q + w.batch * qs.batch + at / s.group * qs.row + (w.kv_head * s.group + at % s.group) * qs.head;
      x = *reinterpret_cast<const uint4*>(from + chunk * 8);
    }
    *reinterpret_cast<uint4*>(rows + row * kPitch + chunk * 8) = x;
  }
  __syncthreads();
  const int row[2] = {g, g + 8};
  const Seen seen[2] = {seen_by(s, w, w.first_row + g), seen_by(s, w, w.first_row + g + 8)};
  float sums[D / 8][4] = {}, top[2] = {-infinity<float>(), -infinity<float>()}, total[2] = {0, 0};
  const auto fetch = [](const T* from, bool exists) { return stream16_or_zero(from, exists); };
  const T* k_lane = k + w.kv_head * ks.head + g * ks.row + 8 * t;
  const T* v_lane = v + w.kv_head * vs.head + 2 * t * vs.row + 8 * g;
  for (int key = begun; key < w.to; key += kStep * WARPS) {
    uint4 keys[2][D / 32], values[4][D / 64];
    const T* k_step = k_lane + offset_of(s, ks, w, table != nullptr, block, key);
    const T* v_step = v_lane + offset_of(s, vs, w, table != nullptr, block, key);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = 8 * i, at = key + row + g;
      const bool exists = at >= w.begin && at < w.to;
#pragma unroll
      for (int c = 0; c < D / 32; ++c)
        keys[i][c] = fetch(k_step + row * ks.row + 32 * c, exists && 32 * c + 8 * t < s.width);
    }
    const auto fetch_values = [&] {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = i % 2 + i / 2 * 8, at = key + row + 2 * t;
        const bool exists = at >= w.begin && at < w.to;
#pragma unroll
        for (int c = 0; c < D / 64; ++c)
          values[i][c] = fetch(v_step + row * vs.row + 64 * c, exists && 64 * c + 8 * g < s.width);
      }
    };
    if constexpr (D <= 128) fetch_values();  // wider rows have no registers for both at a time
    block = block_of(s, w, table, key + kStep * WARPS);  // of the next keys, so that nobody waits for it
    float scores[2][4] = {};
#pragma unroll
    for (int c = 0; c < D / 32; ++c) {
      const uint4 low = *reinterpret_cast<const uint4*>(rows + g * kPitch + 32 * c + 8 * t);
      const uint4 high = *reinterpret_cast<const uint4*>(rows + (g + 8) * kPitch + 32 * c + 8 * t);
      const unsigned first[4] = {low.x, high.x, low.y, high.y}, second[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        mma<T>(scores[i], first, keys[i][c].x, keys[i][c].y);
        mma<T>(scores[i], second, keys[i][c].z, keys[i][c].w);
      }
    }

    if constexpr (D > 128) fetch_values();

    float most[2] = {top[0], top[1]}, factor[2];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int r = i % 4 / 2, at = key + i / 4 * 8 + 2 * t + i % 2;
      float& score = scores[i / 4][i % 4];
      const bool is_seen = at >= seen[r].begin && at < seen[r].end && at < w.to;
      score = is_seen ? score_of(score, scale, softcap, Fast::kUnit) : -infinity<float>();
      most[r] = fmaxf(most[r], score);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      most[r] = fmaxf(most[r], __shfl_xor_sync(~0u, most[r], 1));
      most[r] = fmaxf(most[r], __shfl_xor_sync(~0u, most[r], 2));
      factor[r] = fast_exp2(top[r] - base_of(most[r]));
      top[r] = most[r];
      total[r] *= factor[r];
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int r = i % 4 / 2;
      float& score = scores[i / 4][i % 4];
      score = fast_exp2(score - base_of(top[r]));
      total[r] += score;
    }
#pragma unroll
    for (int n = 0; n < D / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[n][i] *= factor[i / 2];
    }

    const unsigned weights[4] = {
        attention::pack<T>(scores[0][0], scores[0][1]), attention::pack<T>(scores[0][2], scores[0][3]),
        attention::pack<T>(scores[1][0], scores[1][1]), attention::pack<T>(scores[1][2], scores[1][3])};
#pragma unroll
    for (int c = 0; c < D / 64; ++c) {
      const unsigned words[4][4] = {{values[0][c].x, values[0][c].y, values[0][c].z, values[0][c].w},
                                    {values[1][c].x, values[1][c].y, values[1][c].z, values[1][c].w},
                                    {values[2][c].x, values[2][c].y, values[2][c].z, values[2][c].w},
                                    {values[3][c].x, values[3][c].y, values[3][c].z, values[3][c].w}};
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const unsigned halves = e % 2 ? 0x7632 : 0x5410;
        mma<T>(sums[8 * c + e], weights, __byte_perm(words[0][e / 2], words[1][e / 2], halves),
               __byte_perm(words[2][e / 2], words[3][e / 2], halves));
      }
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    total[r] += __shfl_xor_sync(~0u, total[r], 1);
    total[r] += __shfl_xor_sync(~0u, total[r], 2);
  }
  let_next_grid_begin();
  __syncthreads();  // nobody reads q any more, in whose place sums are
  // Columns that differ by 8 are neighbours there: so no two lanes of a half warp meet in a bank.
  const auto place = [](int column) { return column / 64 * 64 + column % 8 * 8 + column / 8 % 8; };
  const auto add = [&](float* all, const float (&by)[2], int rows, bool first) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (8 * r >= rows) break;
#pragma unroll
      for (int n = 0; n < D / 8; ++n) {
        float2& to = *reinterpret_cast<float2*>(all + row[r] * kSumPitch + n / 8 * 64 + n % 8 * 8 + 2 * t);
        const float2 before = first ? float2{0, 0} : to;
        to = {sums[n][2 * r] * by[r] + before.x, sums[n][2 * r + 1] * by[r] + before.y};
      }
    }
  };
  finish<Fast, kRows, D, kSumPitch, WARPS>(s, w, to, top, total, row, shared, add, place);
}

}  // namespace decode
