// Attention forward by mma.sync.
#pragma once

#include "attention/mma.cuh"

namespace attention {

// A warp's M x 16 queries of a block's, with BN keys of a panel before them.
template <typename T, int D, int BN, int M> struct Softmax {
  float y[M][D / 8][4] = {};
  float highest[M][2], total[M][2] = {};  // of each row: its highest score, the sum of exponentials

  __device__ __forceinline__ Softmax() {
#pragma unroll
    for (int m = 0; m < M; ++m) highest[m][0] = highest[m][1] = -infinity<float>();
  }

  // Scores become exponentials below the new highest; what there was before shrinks accordingly.
  __device__ __forceinline__ void exponentiate(float (&s)[M][BN / 8][4], float scale) {
#pragma unroll
    for (int e = 0; e < M * 2; ++e) {
      const int m = e / 2, r = e % 2;
      float top = highest[m][r], sum = 0;
#pragma unroll
      for (int j = 0; j < BN / 8; ++j) top = fmaxf(top, fmaxf(s[m][j][2 * r], s[m][j][2 * r + 1]));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
      const float zero = top == -infinity<float>() ? 0 : top * scale;  // a row that has seen no key yet
      const float shrink = fast_exp2(highest[m][r] * scale - zero);
      highest[m][r] = top;
#pragma unroll
      for (int j = 0; j < BN / 4; ++j) {
        float& x = s[m][j / 2][2 * r + j % 2];
        sum += x = fast_exp2(x * scale - zero);
      }
      total[m][r] = total[m][r] * shrink + sum;
      if (!__any_sync(~0u, shrink != 1)) continue;  // most often, once a few panels have passed
#pragma unroll
      for (int j = 0; j < D / 8; ++j) y[m][j][2 * r] *= shrink, y[m][j][2 * r + 1] *= shrink;
    }
  }
};

// Keys that a row does not see get the score -inf. `row`: of this thread's first; `panel`: of the first key.
template <int BOUNDS, int BN, int M>
__device__ __forceinline__ void mask(float (&s)[M][BN / 8][4], const Sizes& sizes, int row, int panel) {
#pragma unroll
  for (int e = 0; e < M * 2; ++e) {
    const int m = e / 2, r = e % 2, query = row + 16 * m + 8 * r, column = panel + threadIdx.x % 4 * 2;
    const int end = keys_end<BOUNDS>(sizes, query) - column, begin = keys_begin<BOUNDS>(sizes, query) - column;
#pragma unroll
    for (int j = 0; j < BN / 4; ++j) {
      const int key = 8 * (j / 2) + j % 2;
      if (key >= end || (BOUNDS == 2 && key < begin)) s[m][j / 2][2 * r + j % 2] = -infinity<float>();
    }
  }
}

// Natural scores become those of the variant.
template <typename Variant, int BN, int M>
__device__ __forceinline__ void change(float (&s)[M][BN / 8][4], const Variant& variant, float scale, int batch,
                                       int head, int row, int panel) {
#pragma unroll
  for (int e = 0; e < M * 2; ++e) {
    const int m = e / 2, r = e % 2, query = row + 16 * m + 8 * r, column = panel + threadIdx.x % 4 * 2;
#pragma unroll
    for (int j = 0; j < BN / 4; ++j) {
      float& x = s[m][j / 2][2 * r + j % 2];
      x = variant.score(x * scale, batch, head, query, column + 8 * (j / 2) + j % 2);
    }
  }
}

// Keys that the mask of the variant hides get the score -inf.
template <typename Variant, int BN, int M>
__device__ __forceinline__ void hide(float (&s)[M][BN / 8][4], const Variant& variant, int batch, int head, int row,
                                     int panel) {
#pragma unroll
  for (int e = 0; e < M * 2; ++e) {
    const int m = e / 2, r = e % 2, query = row + 16 * m + 8 * r, column = panel + threadIdx.x % 4 * 2;
#pragma unroll
    for (int j = 0; j < BN / 4; ++j) {
      const int key = column + 8 * (j / 2) + j % 2;
      if (!variant.seen(batch, head, query, key)) s[m][j / 2][2 * r + j % 2] = -infinity<float>();
    }
  }
}

// Panels of BN keys pass by a block's 16 * M * WARPS queries, from the last to the first: the values of a panel arrive while its
// scores are computed, the keys of the next one during softmax and the product with the values.
template <typename T, int D, int BN, int M, int WARPS, int BOUNDS, typename Variant = Plain>
__device__ __forceinline__ void forward_mma(const T* q, const T* k, const T* v, T* y, float* lse, const float* sinks,
                                            float natural_scale, const Strides& qs, const Strides& ks,
                                            const Strides& vs, const Strides& ys, const Sizes& whole,
                                            const Variant& variant = {}) {
  constexpr int ROWS = 16 * M * WARPS, THREADS = 32 * WARPS;
  extern __shared__ uint4 memory[];
  const unsigned q_at = shared_address(memory), k_at = q_at + ROWS * D * 2, v_at = k_at + BN * D * 2;
  const int tiles = (whole.queries + ROWS - 1) / ROWS;
  const Turn turn(tiles, whole.heads, whole.batches, whole.section);
  const int head = turn.head, batch = turn.batch;
  const int first_row = (tiles - 1 - turn.tile) * ROWS;  // the longest first
  const auto sequence = sequence_of(variant, whole, batch);
  const Sizes& sizes = sequence.sizes;
  if (Variant::kPacked && first_row >= sizes.queries) return;
  q += batch * qs.batch + head * qs.head + (sequence.query + first_row) * qs.row;
  k += batch * ks.batch + head / sizes.group * ks.head + sequence.key * ks.row;
  v += batch * vs.batch + head / sizes.group * vs.head + sequence.key * vs.row;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, own_row = warp * 16 * M;
  const int warp_row = first_row + own_row, row = warp_row + lane / 4;
  const Panels panels = key_panels<BOUNDS, BN>(sizes, first_row, first_row + ROWS - 1);
  const int seen_by_all = keys_end<BOUNDS>(sizes, warp_row);  // by all rows of the warp
  const int begun_by_all = keys_begin<BOUNDS>(sizes, warp_row + 16 * M - 1);
  const float score_scale = Variant::kScores ? 1 : natural_scale, scale = score_scale * kLog2E;
  const auto keys = [&](int panel, int rows) {
    fetch<T, D, BN, THREADS>(k_at, k + static_cast<long long>(panel) * BN * ks.row, ks.row, rows, sizes.width);
  };

  Softmax<T, D, BN, M> softmax;
  fetch<T, D, ROWS, THREADS>(q_at, q, qs.row, sizes.queries - first_row, sizes.width);
  int begin = panels.begin, at = panels.end - 1;  // of the panels, or of the list of a map
  const int* list = nullptr;
  if constexpr (Variant::kMaps) list = variant.map.of(batch, head, first_row / ROWS), begin = 0, at = *list++ - 1;
  const auto passing = [&](int i) -> Passing {
    if constexpr (Variant::kMaps) return {list[i] / 2, head, list[i] % 2 != 0};
    else return {i, head, true};
  };
  Passing next = at >= begin ? passing(at) : Passing{};
  if (at >= begin) keys(next.panel, sizes.keys - next.panel * BN);
  else finish_copies();
  for (; at >= begin; --at) {
    const int panel = next.panel;
    const bool partial = next.partial;
    finish_copies();
    fetch<T, D, BN, THREADS>(v_at, v + static_cast<long long>(panel) * BN * vs.row, vs.row, sizes.keys - panel * BN,
                             sizes.value_width);
    float s[M][BN / 8][4] = {};
#pragma unroll
    for (int i = 0; i < D / 16; ++i) {
      unsigned a[M][4], b[4];
#pragma unroll
      for (int m = 0; m < M; ++m) {
        load_matrices<false>(a[m], place<D>(q_at, own_row + 16 * m + lane % 16, 2 * i + lane / 16));
      }
#pragma unroll
      for (int j = 0; j < BN / 16; ++j) {
        load_matrices<false>(b, place<D>(k_at, 16 * j + lane % 8 + lane / 16 * 8, 2 * i + lane / 8 % 2));
#pragma unroll
        for (int m = 0; m < M; ++m) mma<T>(s[m][2 * j], a[m], b[0], b[1]), mma<T>(s[m][2 * j + 1], a[m], b[2], b[3]);
      }
    }
    finish_copies();
    if (at > begin) next = passing(at - 1), keys(next.panel, BN);
    if constexpr (Variant::kScores) change<Variant, BN, M>(s, variant, natural_scale, batch, head, row, panel * BN);
    if constexpr (Variant::kMasks) {
      if (partial) hide<Variant, BN, M>(s, variant, batch, head, row, panel * BN);
    }
    if ((panel + 1) * BN > seen_by_all || (BOUNDS == 2 && panel * BN < begun_by_all)) {
      mask<BOUNDS, BN, M>(s, sizes, row, panel * BN);
    }
    softmax.exponentiate(s, scale);
    if constexpr (Variant::kDrops) {
#pragma unroll
      for (int m = 0; m < M; ++m) {
        const Kept<BN / 2> kept = variant.dropout.template draw<false, BN / 2>(batch * sizes.heads + head, row + 16 * m,
                                                                               panel * BN + lane % 4 * 2);
#pragma unroll
        for (int e = 0; e < BN / 2; ++e) s[m][e / 4][e % 4] = kept.of(e, s[m][e / 4][e % 4]);
      }
    }
#pragma unroll
    for (int i = 0; i < BN / 16; ++i) {
      unsigned a[M][4], b[4];
#pragma unroll
      for (int e = 0; e < M * 4; ++e) {
        const float* pair = &s[e / 4][2 * i + e % 4 / 2][e % 2 * 2];
        a[e / 4][e % 4] = pack<T>(pair[0], pair[1]);
      }
#pragma unroll
      for (int j = 0; j < D / 16; ++j) {
        load_matrices<true>(b, place<D>(v_at, 16 * i + lane % 16, 2 * j + lane / 16));
#pragma unroll
        for (int m = 0; m < M; ++m) {
          mma<T>(softmax.y[m][2 * j], a[m], b[0], b[1]), mma<T>(softmax.y[m][2 * j + 1], a[m], b[2], b[3]);
        }
      }
    }
  }

  y += batch * ys.batch + head * ys.head + (sequence.query + warp_row) * ys.row;
  lse += Variant::kPacked ? static_cast<long long>(head) * sizes.padded + sequence.query
                          : (static_cast<long long>(batch) * sizes.heads + head) * sizes.queries;
  const float sink = sinks ? sinks[head] : -infinity<float>();
#pragma unroll
  for (int m = 0; m < M; ++m) {
    float inverse[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int query = row + 16 * m + 8 * r;
      float sum = softmax.total[m][r];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      float highest = softmax.highest[m][r] * score_scale;
      const float shrink = add_sink(sink, highest, sum);
      inverse[r] = shrink * (1 / sum);
      if constexpr (Variant::kDrops) inverse[r] *= variant.dropout.scale;
      if (lane % 4 == 0 && query < sizes.queries) lse[query] = highest + logf(sum);
    }
    put<T, D>(q_at, own_row + 16 * m, softmax.y[m], inverse[0], inverse[1], y + 16 * m * ys.row, ys.row,
              sizes.queries - warp_row - 16 * m, sizes.value_width);
  }
}

}  // namespace attention
