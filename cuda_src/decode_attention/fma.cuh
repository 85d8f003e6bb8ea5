// fp32: four rows of a group against four keys at a time. The lanes of a warp share a row.
#pragma once

#include "common/core/vector.cuh"
#include "common/hw/cp_async.cuh"
#include "common/hw/dependent_launch.cuh"
#include "decode_attention/problem.cuh"

namespace decode {

// Keys and values come into shared memory, STAGES times four keys ahead.
template <typename T, int D, int WARPS, int STAGES>
__device__ __forceinline__ void forward_fma(const T* q, const T* k, const T* v, const int* lengths, const int* table,
                                            const Results<T>& to, float scale, float softcap, const Strides& qs,
                                            const Strides& ks, const Strides& vs, const Sizes& s) {
  constexpr int kRows = 4, kKeys = 4;
  constexpr int kVec = D / 32 < 4 ? D / 32 : 4,
                kVecs = D / 32 / kVec;  // columns of a lane: kVecs times kVec neighbours
  extern __shared__ __align__(16) float shared[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const Work w = work_of<kRows, WARPS>(s, lengths);
  const T *k_head = k + w.kv_head * ks.head, *v_head = v + w.kv_head * vs.head;
  float* ring = shared + warp * STAGES * 2 * kKeys * D;
  const unsigned ring_at = static_cast<unsigned>(__cvta_generic_to_shared(ring));
  // The keys from `key` on and their values, as the `chunk`-th of this warp.
  const auto fetch_chunk = [&](int chunk, int key, int block) {
    const unsigned stage = ring_at + chunk % STAGES * 2 * kKeys * D * 4;
#pragma unroll
    for (int i = 0; i < D / 32 && key < w.to; ++i) {
      const int at = (32 * i + lane) * 4, row = key + at / D, column = at % D;
      const bool exists = row >= w.begin && row < w.to && column < s.width;
      fetch16_or_zero(stage + at * 4, k_head + offset_of(s, ks, w, table != nullptr, block, row) + column, exists);
      fetch16_or_zero(stage + (kKeys * D + at) * 4, v_head + offset_of(s, vs, w, table != nullptr, block, row) + column,
                      exists);
    }
    end_group();
  };
  const auto key_of = [&](int chunk) {
    return w.from + kStep * warp + chunk / (kStep / kKeys) * w.apart + chunk % (kStep / kKeys) * kKeys;
  };
  for (int chunk = 0; chunk < STAGES; ++chunk) {
    const int block = block_of(s, w, table, key_of(chunk));
    check_block(s, w, table, key_of(chunk), block);
    fetch_chunk(chunk, key_of(chunk), block);
  }
  const auto taken = [&](const float* from, float (&x)[kVecs* kVec]) {
#pragma unroll
    for (int c = 0; c < kVecs; ++c) {
      const Vec<float, kVec> vector = load_vec<float, kVec>(from + (32 * c + lane) * kVec);
#pragma unroll
      for (int e = 0; e < kVec; ++e) x[c * kVec + e] = vector.data[e];
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
    const T* from = q + w.batch * qs.batch + at / s.group * qs.row + (w.kv_head * s.group + at % s.group) * qs.head;
#pragma unroll
    for (int c = 0; c < kVecs; ++c) {
      const int column = (32 * c + lane) * kVec;
      const bool inside = at < s.queries * s.group && column < s.width;
      const Vec<T, kVec> vector = inside ? load_vec<T, kVec>(from + column) : Vec<T, kVec>{};
#pragma unroll
      for (int e = 0; e < kVec; ++e) rows[r][c * kVec + e] = vector.data[e];
    }
  }
  int ahead = block_of(s, w, table, key_of(STAGES));
  for (int chunk = 0; key_of(chunk) < w.to; ++chunk) {
    const int key = key_of(chunk), next = key_of(chunk + STAGES), block = ahead;
    const float* stage = ring + chunk % STAGES * 2 * kKeys * D;
    float values[kKeys][kVecs * kVec], products[kRows][kKeys] = {};
    wait_for_groups<STAGES - 1>();
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      float keys[kVecs * kVec];
      taken(stage + i * D, keys);
      taken(stage + (kKeys + i) * D, values[i]);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int e = 0; e < kVecs * kVec; ++e) products[r][i] += rows[r][e] * keys[e];
      }
    }
    __syncwarp();  // all of the warp have read these
    check_block(s, w, table, next, block);
    fetch_chunk(chunk + STAGES, next, block);
    ahead = block_of(s, w, table, key_of(chunk + STAGES + 1));  // so that nobody waits for it
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float scores[kKeys], most = top[r];
#pragma unroll
      for (int i = 0; i < kKeys; ++i) {
        float sum = products[r][i];
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
  wait_for_groups<0>();
  __syncthreads();  // nobody reads keys any more, in whose place sums are
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
  Finish<Exact, kRows, D, D, WARPS> finish(shared, min(kRows, s.queries * s.group - w.first_row));
  finish.add_warps(top, total, row, add);
  finish.store(s, w, to, [](int column) { return column; });
}

}  // namespace decode
