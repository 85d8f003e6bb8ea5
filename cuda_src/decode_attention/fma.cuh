// fp32: four rows of a group against four keys at a time. The lanes of a warp share a row.
#pragma once

#include "common/core/vector.cuh"
#include "common/hw/dependent_launch.cuh"
#include "decode_attention/problem.cuh"

namespace decode {

template <typename T, int D, int WARPS>
__device__ __forceinline__ void forward_fma(const T* q, const T* k, const T* v, const int* lengths, const int* table,
                                            const Results<T>& to, float scale, float softcap, const Strides& qs,
                                            const Strides& ks, const Strides& vs, const Sizes& s) {
  constexpr int kRows = 4, kKeys = 4;
  constexpr int kVec = D / 32 < 4 ? D / 32 : 4,
                kVecs = D / 32 / kVec;  // columns of a lane: kVecs times kVec neighbours
  extern __shared__ __align__(16) float shared[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const Work w = work_of<kRows>(s, lengths);
  const auto read = [&](const T* from, bool exists, float (&x)[kVecs* kVec]) {
#pragma unroll
    for (int c = 0; c < kVecs; ++c) {
      const int column = (32 * c + lane) * kVec;
      const bool inside = exists && column < s.width;
      const Vec<T, kVec> vector = inside ? load_vec<T, kVec>(from + column) : Vec<T, kVec>{};
#pragma unroll
      for (int e = 0; e < kVec; ++e) x[c * kVec + e] = to_acc(vector.data[e]);
    }
  };
  int row[kRows];
  Seen seen[kRows];
  float rows[kRows][kVecs * kVec], sums[kRows][kVecs * kVec] = {}, top[kRows], total[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int at = w.first_row + r;
    row[r] = r;
    seen[r] = seen_by(s, w, at);
    top[r] = -infinity<float>();
    total[r] = 0;
    read(q + w.batch * qs.batch + at / s.group * qs.row + (w.kv_head * s.group + at % s.group) * qs.head,
         at < s.queries * s.group, rows[r]);
  }
  const T *k_head = k + w.kv_head * ks.head, *v_head = v + w.kv_head * vs.head;
  for (int step = w.from + kStep * warp; step < w.to; step += kStep * WARPS) {
    const int block = block_of(s, w, table, step);
    for (int key = step; key < min(step + kStep, w.to); key += kKeys) {
      float keys[kKeys][kVecs * kVec], values[kKeys][kVecs * kVec];
#pragma unroll
      for (int i = 0; i < kKeys; ++i) {
        const bool exists = key + i >= w.begin && key + i < w.to;
        read(k_head + offset_of(s, ks, w, table != nullptr, block, key + i), exists, keys[i]);
        read(v_head + offset_of(s, vs, w, table != nullptr, block, key + i), exists, values[i]);
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        float scores[kKeys], most = top[r];
#pragma unroll
        for (int i = 0; i < kKeys; ++i) {
          float sum = 0;
#pragma unroll
          for (int e = 0; e < kVecs * kVec; ++e) sum += rows[r][e] * keys[i][e];
#pragma unroll
          for (int apart = 16; apart; apart /= 2) sum += __shfl_xor_sync(~0u, sum, apart);
          const bool is_seen = key + i >= seen[r].begin && key + i < seen[r].end && key + i < w.to;
          scores[i] = is_seen ? score_of(sum, scale, softcap, Exact::kUnit) : -infinity<float>();
          most = fmaxf(most, scores[i]);
        }
        const float factor = expf(top[r] - base_of(most));
        top[r] = most;
        total[r] *= factor;
#pragma unroll
        for (int e = 0; e < kVecs * kVec; ++e) sums[r][e] *= factor;
#pragma unroll
        for (int i = 0; i < kKeys; ++i) {
          const float weight = expf(scores[i] - base_of(most));
          total[r] += weight;
#pragma unroll
          for (int e = 0; e < kVecs * kVec; ++e) sums[r][e] += weight * values[i][e];
        }
      }
    }
  }
  let_next_grid_begin();
  const auto add = [&](float* all, const float (&by)[kRows], int rows, bool first) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (r >= rows) break;
#pragma unroll
      for (int c = 0; c < kVecs; ++c) {
        Vec<float, kVec>& to = *reinterpret_cast<Vec<float, kVec>*>(all + r * D + (32 * c + lane) * kVec);
#pragma unroll
        for (int e = 0; e < kVec; ++e) to.data[e] = sums[r][c * kVec + e] * by[r] + (first ? 0.0f : to.data[e]);
      }
    }
  };
  finish<Exact, kRows, D, D, WARPS>(s, w, to, top, total, row, shared, add, [](int column) { return column; });
}

}  // namespace decode
