// Half types: 16 rows of a group against 16 keys at a time, by mma.sync, from panels in shared memory that cp.async fills.
#pragma once

#include "attention/problem.cuh"
#include "common/hw/cp_async.cuh"
#include "common/hw/dependent_launch.cuh"
#include "common/hw/mma.cuh"
#include "decode_attention/problem.cuh"

namespace decode {

// A panel has 16 rows of k or v, D elements each. Lane (g, t) = (lane / 4, lane % 4) reads vectors of 16 bytes of it; eight
// neighbouring lanes meet no bank twice:
//   k  vectors 4c + t of the rows g and g + 8: vectors of odd rows change places in blocks of four
//   v  vectors 8c + g of the rows 2t, 2t + 1, 2t + 8 and 2t + 9: pairs of vectors do so by t
template <bool VALUES> __device__ __forceinline__ int place_in_panel(int row, int vector) {
  return vector ^ (VALUES ? row % 8 / 2 * 2 : row % 2 * 4);
}

#ifndef HINT
#define HINT 0
#endif
__device__ __forceinline__ void fetch_once(unsigned shared, const void* global, bool inside) {
#if __CUDA_ARCH__ >= 800
  const int bytes = inside ? 16 : 0;
#if HINT == 0
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
#elif HINT == 1
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
#elif HINT == 2
  asm volatile("{.reg .b64 p; createpolicy.fractional.L2::evict_first.b64 p, 1.0; cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, p;}" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
#endif
#endif
}
// Asks for the rows from `first` to `last` of a panel, by SHARE warps, of which this one is `turn`; zeros for others and beyond
// `width`. from: the first row's element 8 * (lane % (D / 8)).
template <typename T, int D, bool VALUES, int SHARE>
__device__ __forceinline__ void fetch_panel(unsigned panel, const T* from, long long pitch, int first, int last,
                                            int width, int turn) {
  constexpr int kVectors = D / 8, kAtOnce = 32 / kVectors;
  const int lane = threadIdx.x % 32, vector = lane % kVectors;
#pragma unroll
  for (int i = 0; i < kStep / kAtOnce / SHARE; ++i) {
    const int row = (i * SHARE + turn) * kAtOnce + lane / kVectors;
    fetch_once(panel + (row * kVectors + place_in_panel<VALUES>(row, vector)) * 16, from + row * pitch,
                    row >= first && row < last && 8 * vector < width);
  }
}

__device__ __forceinline__ uint4 load_shared16(unsigned address) {
  uint4 x;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(address)
               : "memory");
  return x;
}

__device__ __forceinline__ void store_shared16(unsigned address, uint4 x) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
               : "memory");
}

// The product takes the elements of a row as lanes read them: which is the how-manieth of the sum over D does not matter, as long
// as it is the same of q and of k, and a column of v is that of a result wherever the instruction has it.
//   q, k  32 elements of rows g and g + 8 are two products: words 0 and 1 of vector t are the first's, words 2 and 3 the second's
//   v     the vectors g of keys 2t, 2t+1, 2t+8 and 2t+9 are paired, element by element: element e of column 8g + e is of product e
//
// TILES warps with 16 rows each share the keys, of which the block's WARPS / TILES teams have every so manieth step.
template <typename T, int D, int WARPS, int STAGES, int TILES>
__device__ __forceinline__ void forward_mma(const T* q, const T* k, const T* v, const int* lengths, const int* table,
                                            const Results<T>& to, float scale, float softcap, const Strides& qs,
                                            const Strides& ks, const Strides& vs, const Sizes& s) {
  constexpr int kTeams = WARPS / TILES, kPanel = 16 * D * 2, kSumPitch = D + 8;
  static_assert(TILES == 1 || TILES == WARPS);
  extern __shared__ __align__(16) float shared[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int team = warp / TILES, turn = warp % TILES;
  const Work w = work_of<16 * TILES, kTeams>(s, lengths);
  const auto all_of_team = [] {
    if constexpr (TILES == 1) __syncwarp();
    else __syncthreads();
  };

  const unsigned ring = static_cast<unsigned>(__cvta_generic_to_shared(shared)) + team * STAGES * 2 * kPanel;
  const T* k_lane = k + w.kv_head * ks.head + lane % (D / 8) * 8;
  const T* v_lane = v + w.kv_head * vs.head + lane % (D / 8) * 8;
  const auto fetch_keys = [&](int stage, int key, int block) {
    if (key < w.to) {
      fetch_panel<T, D, false, TILES>(ring + stage * 2 * kPanel,
                                      k_lane + offset_of(s, ks, w, table != nullptr, block, key), ks.row, w.begin - key,
                                      w.to - key, s.width, turn);
    }
    end_group();
  };
  const auto fetch_values = [&](int stage, int key, int block) {
    if (key < w.to) {
      fetch_panel<T, D, true, TILES>(ring + stage * 2 * kPanel + kPanel,
                                     v_lane + offset_of(s, vs, w, table != nullptr, block, key), vs.row, w.begin - key,
                                     w.to - key, s.width, turn);
    }
    end_group();
  };
  const int first_key = w.from + kStep * team;
  int blocks[STAGES];
#pragma unroll
  for (int stage = 0; stage < STAGES; ++stage) blocks[stage] = entry_of(s, w, table, first_key + stage * w.apart);
#pragma unroll
  for (int stage = 0; stage < STAGES; ++stage) {
    check_block(s, w, table, first_key + stage * w.apart, blocks[stage]);
    fetch_keys(stage, first_key + stage * w.apart, blocks[stage]);
    fetch_values(stage, first_key + stage * w.apart, blocks[stage]);
  }

  const int row[2] = {16 * turn + g, 16 * turn + g + 8};
  constexpr bool kHeld = D <= 128;  // in registers, for which wider rows have no room
  uint4 rows[2][kHeld ? D / 32 : 1];
  const unsigned q_at = ring + (kTeams - team) * STAGES * 2 * kPanel + turn * 16 * D * 2 + lane * 16;
  if (kHeld || team == 0) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int at = w.first_row + row[r];
      const T* from = q + w.batch * qs.batch + at / s.group * qs.row + (w.kv_head * s.group + at % s.group) * qs.head;
#pragma unroll
      for (int c = 0; c < D / 32; ++c) {
        const bool exists = at < s.queries * s.group && 32 * c + 8 * t < s.width;
        const uint4 x = exists ? *reinterpret_cast<const uint4*>(from + 32 * c + 8 * t) : uint4{0, 0, 0, 0};
        if constexpr (kHeld) rows[r][c] = x;
        else store_shared16(q_at + (r * (D / 32) + c) * 512, x);
      }
    }
  }
  if constexpr (!kHeld) __syncthreads();
  const Seen seen[2] = {seen_by(s, w, w.first_row + row[0]), seen_by(s, w, w.first_row + row[1])};
  float sums[D / 8][4] = {}, top[2] = {-infinity<float>(), -infinity<float>()}, total[2] = {0, 0};
  const unsigned k_at = ring + (g * (D / 8) + t) * 16, v_at = ring + kPanel + (2 * t * (D / 8) + (g ^ 2 * t)) * 16;
  int stage = 0, ahead = entry_of(s, w, table, first_key + STAGES * w.apart);
  for (int key = first_key; key < w.to; key += w.apart) {
    const unsigned of_stage = stage * 2 * kPanel;
    const int next = key + STAGES * w.apart;
    wait_for_groups<2 * STAGES - 1>();
    all_of_team();
    float scores[2][4] = {};
#pragma unroll
    for (int c = 0; c < D / 32; ++c) {
      uint4 low, high;
      if constexpr (kHeld) low = rows[0][c], high = rows[1][c];
      else low = load_shared16(q_at + c * 512), high = load_shared16(q_at + (D / 32 + c) * 512);
      const unsigned first[4] = {low.x, high.x, low.y, high.y}, second[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint4 keys = load_shared16(k_at + of_stage + 8 * i * (D / 8) * 16 + (c ^ g % 2) * 64);
        mma<T>(scores[i], first, keys.x, keys.y);
        mma<T>(scores[i], second, keys.z, keys.w);
      }
    }
    all_of_team();  // these keys have been read
    const int block = ahead;
    check_block(s, w, table, next, block);
    fetch_keys(stage, next, block);
    ahead = entry_of(s, w, table, next + w.apart);  // so that nobody waits for it

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
      factor[r] = top[r] == most[r] ? 1.0f : fast_exp2(top[r] - base_of(most[r]));
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
    if (__any_sync(~0u, factor[0] != 1 || factor[1] != 1)) {
#pragma unroll
      for (int n = 0; n < D / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[n][i] *= factor[i / 2];
      }
    }

    const unsigned weights[4] = {
        attention::pack<T>(scores[0][0], scores[0][1]), attention::pack<T>(scores[0][2], scores[0][3]),
        attention::pack<T>(scores[1][0], scores[1][1]), attention::pack<T>(scores[1][2], scores[1][3])};
    wait_for_groups<2 * STAGES - 1>();
    all_of_team();
#pragma unroll
    for (int c = 0; c < D / 64; ++c) {
      unsigned words[4][4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint4 x = load_shared16(v_at + of_stage + ((i % 2 + i / 2 * 8) * (D / 8) + 8 * c) * 16);
        words[i][0] = x.x, words[i][1] = x.y, words[i][2] = x.z, words[i][3] = x.w;
      }
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const unsigned halves = e % 2 ? 0x7632 : 0x5410;
        mma<T>(sums[8 * c + e], weights, __byte_perm(words[0][e / 2], words[1][e / 2], halves),
               __byte_perm(words[2][e / 2], words[3][e / 2], halves));
      }
    }
    all_of_team();
    fetch_values(stage, next, block);
    stage = stage + 1 == STAGES ? 0 : stage + 1;
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    total[r] += __shfl_xor_sync(~0u, total[r], 1);
    total[r] += __shfl_xor_sync(~0u, total[r], 2);
  }
  let_next_grid_begin();
  wait_for_groups<0>();
  __syncthreads();  // nobody reads panels any more, in whose place sums are
  // Columns that differ by 8 are neighbours there: so no two lanes of a half warp meet in a bank.
  const auto place = [](int column) { return column / 64 * 64 + column % 8 * 8 + column / 8 % 8; };
  const auto add = [&](float* all, const float (&by)[2], int rows, bool first) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (row[r] >= rows) break;
#pragma unroll
      for (int n = 0; n < D / 8; ++n) {
        float2& to = *reinterpret_cast<float2*>(all + row[r] * kSumPitch + n / 8 * 64 + n % 8 * 8 + 2 * t);
        const float2 before = first ? float2{0, 0} : to;
        to = {sums[n][2 * r] * by[r] + before.x, sums[n][2 * r + 1] * by[r] + before.y};
      }
    }
  };
  finish<Fast, 16 * TILES, D, kSumPitch, kTeams>(s, w, team, to, top, total, row, shared, add, place);
}

}  // namespace decode
