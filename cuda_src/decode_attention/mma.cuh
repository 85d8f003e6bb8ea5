// Half types: 16 or 32 rows of a group against 16 keys at a time, by mma.sync, from panels in shared memory that cp.async fills.
#pragma once

#include "attention/problem.cuh"
#include "common/hw/cp_async.cuh"
#include "common/hw/dependent_launch.cuh"
#include "common/hw/mma.cuh"
#include "decode_attention/problem.cuh"

namespace decode {

// A panel has kStep rows of k or v, of D elements. Of it lane (g, t) = (lane / 4, lane % 4) reads vectors of 16 bytes, so placed
// that eight neighbouring lanes meet no bank twice:
//   k  vectors 4c + t of the rows g and g + 8: those of odd rows change places in fours
//   v  vectors 8c + g of the rows 2t, 2t + 1, 2t + 8 and 2t + 9: they change places in pairs, by t
template <bool VALUES> __device__ __forceinline__ int place_in_panel(int row, int vector) {
  return vector ^ (VALUES ? row % 8 / 2 * 2 : row % 2 * 4);
}

// A warp asks for the rows of a panel from `first` to `last` of which `seen` has the bit; zeros for others, and beyond `width`.
// from: element lane % (D / 8) * 8 of the panel's first row.
template <typename T, int D, bool VALUES>
__device__ __forceinline__ void fetch_panel(unsigned panel, const T* from, long long pitch, int first, int last,
                                            unsigned seen, int width) {
  constexpr int kVectors = D / 8, kAtOnce = 32 / kVectors;
  const int lane = threadIdx.x % 32, vector = lane % kVectors;
#pragma unroll
  for (int i = 0; i < kStep / kAtOnce; ++i) {
    const int row = i * kAtOnce + lane / kVectors;
    fetch16_or_zero(panel + (row * kVectors + place_in_panel<VALUES>(row, vector)) * 16, from + row * pitch,
                    row >= first && row < last && seen >> row & 1 && 8 * vector < width);
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

// The products take the elements of a row as lanes read them: which is the how-manieth of the sum over D does not matter, as long
// as it is the same of q and of k, and a column of v is that of a result wherever the instruction has it.
//   q, k  32 elements of rows g and g + 8 are two products: words 0 and 1 of vector t are the first's, words 2 and 3 the second's
//   v     the vectors g of keys 2t, 2t+1, 2t+8 and 2t+9 are paired, element by element: element e of column 8g + e is of product e
//
// The rows of a block, TILES times 16 of them: in registers, for which more than 16 times 128 elements have no room.
template <typename T, int D, int TILES> struct Rows {
  static constexpr bool kHeld = D * TILES <= 128;
  uint4 held[2 * TILES][kHeld ? D / 32 : 1];
  unsigned at;  // this lane's vectors in shared memory

  __device__ __forceinline__ Rows(unsigned shared) : at(shared + threadIdx.x % 32 * 16) {}

  // row_of(i) points to row i, or is null where there is none. One warp stores for all.
  template <typename Of> __device__ __forceinline__ void load(Of row_of, int width) {
    const int lane = threadIdx.x % 32, t = lane % 4;
    if (kHeld || threadIdx.x < 32) {
#pragma unroll
      for (int r = 0; r < 2 * TILES; ++r) {
        const T* from = row_of(lane / 4 + 8 * r);
#pragma unroll
        for (int c = 0; c < D / 32; ++c) {
          const bool exists = from != nullptr && 32 * c + 8 * t < width;
          const uint4 x = exists ? *reinterpret_cast<const uint4*>(from + 32 * c + 8 * t) : uint4{0, 0, 0, 0};
          if constexpr (kHeld) held[r][c] = x;
          else store_shared16(at + (r * (D / 32) + c) * 512, x);
        }
      }
    }
    if constexpr (!kHeld) __syncthreads();
  }

  // scores += q k^T. keys: where vector t of row g of a panel would lie.
  __device__ __forceinline__ void multiply(float (&scores)[TILES][2][4], unsigned keys) const {
    const int odd = threadIdx.x / 4 % 2;
#pragma unroll
    for (int c = 0; c < D / 32; ++c) {
      const uint4 x[2] = {load_shared16(keys + (c ^ odd) * 64), load_shared16(keys + D * 16 + (c ^ odd) * 64)};
#pragma unroll
      for (int tile = 0; tile < TILES; ++tile) {
        const int r = 2 * tile;
        uint4 low, high;
        if constexpr (kHeld) low = held[r][c], high = held[r + 1][c];
        else
          low = load_shared16(at + (r * (D / 32) + c) * 512), high = load_shared16(at + ((r + 1) * (D / 32) + c) * 512);
        const unsigned first[4] = {low.x, high.x, low.y, high.y}, second[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          mma<T>(scores[tile][i], first, x[i].x, x[i].y);
          mma<T>(scores[tile][i], second, x[i].z, x[i].w);
        }
      }
    }
  }
};

// What a warp has of its rows: the largest score of each, what exponentials add up to, and their sum with the values.
template <typename T, int D, int TILES> struct Sums {
  float sums[TILES][D / 8][4] = {}, top[2 * TILES], total[2 * TILES] = {};

  __device__ __forceinline__ Sums() {
#pragma unroll
    for (int r = 0; r < 2 * TILES; ++r) top[r] = -infinity<float>();
  }

  // Makes scores of a tile and the keys of a step exponentials, beside which all that was there shrinks.
  template <bool MASKED>
  __device__ __forceinline__ void weigh(int tile, float (&scores)[2][4], Step step, int last,
                                        const Seen (&seen)[2 * TILES], float scale, float softcap) {
    const int first = 2 * tile;
    float most[2] = {top[first], top[first + 1]}, factor[2];
    const int t = threadIdx.x % 4;
    const auto of = [=](int e) { return e / 2 * 8 + 2 * t + e % 2; };  // key e of the four of a lane
    unsigned exist = 0;
#pragma unroll
    for (int e = 0; e < 4; ++e) exist |= (step.key + of(e) < last ? step.seen >> of(e) & 1 : 0) << e;
    unsigned sees[2];
#pragma unroll
    for (int r = 0; r < 2; ++r)
      sees[r] = seen[first + r].template among<MASKED, 4>(exist, [=](int e) { return step.key + of(e); });
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int r = i % 4 / 2;
      float& score = scores[i / 4][i % 4];
      const bool is_seen = sees[r] >> (i / 4 * 2 + i % 2) & 1;
      score = is_seen ? score_of(score, scale, softcap, Fast::kUnit) : -infinity<float>();
      most[r] = fmaxf(most[r], score);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      most[r] = fmaxf(most[r], __shfl_xor_sync(~0u, most[r], 1));
      most[r] = fmaxf(most[r], __shfl_xor_sync(~0u, most[r], 2));
      factor[r] = top[first + r] == most[r] ? 1.0f : fast_exp2(top[first + r] - base_of(most[r]));
      top[first + r] = most[r];
      total[first + r] *= factor[r];
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int r = i % 4 / 2;
      float& score = scores[i / 4][i % 4];
      score = fast_exp2(score - base_of(top[first + r]));
      total[first + r] += score;
    }
    if (!__any_sync(~0u, factor[0] != 1 || factor[1] != 1)) return;
#pragma unroll
    for (int n = 0; n < D / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[tile][n][i] *= factor[i / 2];
    }
  }

  // Adds exponentials times values. values: where vector g of row 2t of a panel lies.
  __device__ __forceinline__ void add(const float (&scores)[TILES][2][4], unsigned values) {
    unsigned weights[TILES][4];
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        weights[tile][i] = attention::pack<T>(scores[tile][i / 2][i % 2 * 2], scores[tile][i / 2][i % 2 * 2 + 1]);
    }
#pragma unroll
    for (int c = 0; c < D / 64; ++c) {
      unsigned words[4][4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint4 x = load_shared16(values + ((i % 2 + i / 2 * 8) * (D / 8) + 8 * c) * 16);
        words[i][0] = x.x, words[i][1] = x.y, words[i][2] = x.z, words[i][3] = x.w;
      }
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const unsigned halves = e % 2 ? 0x7632 : 0x5410, low = __byte_perm(words[0][e / 2], words[1][e / 2], halves),
                       high = __byte_perm(words[2][e / 2], words[3][e / 2], halves);
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) mma<T>(sums[tile][8 * c + e], weights[tile], low, high);
      }
    }
  }
};

// A warp asks for the keys and the values of STAGES steps ahead, which nobody else reads: no warp waits for another before the end.
template <typename T, int D, int ROWS, int WARPS, int STAGES, bool MASKED>
__device__ __forceinline__ void forward_mma(const T* q, const T* k, const T* v, const int* lengths, const int* table,
                                            const bool* mask, const Results<T>& to, float scale, float softcap,
                                            const Strides& qs, const Strides& ks, const Strides& vs, const Strides& ms,
                                            const Sizes& s) {
  constexpr int kTiles = ROWS / 16, kPanel = kStep * D * 2, kSumPitch = D + 8, kPending = 2 * STAGES - 1;
  extern __shared__ __align__(16) float shared[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const unsigned panels = static_cast<unsigned>(__cvta_generic_to_shared(shared)),
                 ring = panels + warp * STAGES * 2 * kPanel;
  const Work w = work_of<MASKED, ROWS, WARPS>(s, lengths);
  const T* k_lane = k + w.kv_head * ks.head + lane % (D / 8) * 8;
  const T* v_lane = v + w.kv_head * vs.head + lane % (D / 8) * 8;
  const auto fetch_keys = [&](unsigned panel, Step of, int block) {
    const T* from = k_lane + offset_of(s, ks, w, table != nullptr, block, of.key);
    if (of.key < w.to) fetch_panel<T, D, false>(panel, from, ks.row, w.begin - of.key, w.to - of.key, of.seen, s.width);
    end_group();
  };
  const auto fetch_values = [&](unsigned panel, Step of, int block) {
    const T* from = v_lane + offset_of(s, vs, w, table != nullptr, block, of.key);
    if (of.key < w.to)
      fetch_panel<T, D, true>(panel + kPanel, from, vs.row, w.begin - of.key, w.to - of.key, of.seen, s.width);
    end_group();
  };
  Rows<T, D, kTiles> rows(panels + WARPS * STAGES * 2 * kPanel);
  const auto row_of = [&](int row) {
    const int at = w.first_row + row;
    const T* from = q + w.batch * qs.batch + at / s.group * qs.row + (w.kv_head * s.group + at % s.group) * qs.head;
    return at < s.queries * s.group ? from : nullptr;
  };
  rows.load(row_of, s.width);
  int row[2 * kTiles];
  Seen seen[2 * kTiles];
#pragma unroll
  for (int r = 0; r < 2 * kTiles; ++r)
    row[r] = g + 8 * r, seen[r] = seen_by<MASKED>(s, w, mask, ms, w.first_row + row[r]);
  Sums<T, D, kTiles> has;

  // One loop, which begins by only asking: a second text of what finds the next step would double the kernel.
  Steps<MASKED, kStep> turns(s, w, mask, ms, ROWS);
  const Step none = {w.to, 0};
  Step steps[STAGES], soon = none;  // those on their way, and the one to ask for next
  int stage = 0, ahead = 0;
#pragma unroll
  for (int i = 0; i < STAGES; ++i) steps[i] = none;
#pragma unroll 1
  for (int turn = -STAGES - 1; turn < 0 || steps[0].key < w.to; ++turn) {
    const unsigned panel = ring + stage * 2 * kPanel;
    const Step step = steps[0], next = soon;
    const int block = ahead;
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) steps[i] = steps[i + 1];
    steps[STAGES - 1] = next;
    soon = turns.next();
    float scores[kTiles][2][4] = {};
    if (turn >= 0) {
      wait_for_groups<kPending>();
      __syncwarp();
      rows.multiply(scores, panel + (g * (D / 8) + t) * 16);
      __syncwarp();  // all of the warp have read these keys
    }
    check_block(s, w, table, next.key, block);
    fetch_keys(panel, next, block);
    ahead = block_of(s, w, table, soon.key);  // so that nobody waits for it
    if (turn >= 0) {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile)
        has.template weigh<MASKED>(tile, scores[tile], step, w.to, seen, scale, softcap);
      wait_for_groups<kPending>();
      __syncwarp();
      has.add(scores, panel + kPanel + (2 * t * (D / 8) + (g ^ 2 * t)) * 16);
      __syncwarp();
    }
    fetch_values(panel, next, block);
    stage = stage + 1 == STAGES ? 0 : stage + 1;
  }
#pragma unroll
  for (int r = 0; r < 2 * kTiles; ++r) {
    has.total[r] += __shfl_xor_sync(~0u, has.total[r], 1);
    has.total[r] += __shfl_xor_sync(~0u, has.total[r], 2);
  }
  let_next_grid_begin();
  wait_for_groups<0>();
  __syncthreads();  // nobody reads panels any more, in whose place sums are
  // Columns that differ by 8 are neighbours there: so no two lanes of a half warp meet in a bank.
  const auto place = [](int column) { return column / 64 * 64 + column % 8 * 8 + column / 8 % 8; };
  const auto add = [&](float* all, const float (&by)[2 * kTiles], int rows, bool first) {
#pragma unroll
    for (int r = 0; r < 2 * kTiles; ++r) {
      if (8 * r >= rows) break;
#pragma unroll
      for (int n = 0; n < D / 8; ++n) {
        float2& to = *reinterpret_cast<float2*>(all + row[r] * kSumPitch + n / 8 * 64 + n % 8 * 8 + 2 * t);
        const float2 before = first ? float2{0, 0} : to;
        const float* sums = &has.sums[r / 2][n][r % 2 * 2];
        to = {sums[0] * by[r] + before.x, sums[1] * by[r] + before.y};
      }
    }
  };
  Finish<Fast, ROWS, D, kSumPitch, WARPS> finish(shared, min(ROWS, s.queries * s.group - w.first_row));
  finish.add_warps(has.top, has.total, row, add);
  finish.store(s, w, to, place);
}

}  // namespace decode
