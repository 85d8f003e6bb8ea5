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

  // Scores become exponentials below the new highest; what there was before shrinks accordingly, which most often, once a few
  // panels have passed, is by nothing. The rows are looked at side by side, so that no one waits for another's shuffles.
  __device__ __forceinline__ void exponentiate(float (&s)[M][BN / 8][4], float scale) {
    float top[M][2];
    bool grows[M] = {};
#pragma unroll
    for (int e = 0; e < M * 2; ++e) {
      const int m = e / 2, r = e % 2;
      top[m][r] = highest[m][r];
#pragma unroll
      for (int j = 0; j < BN / 8; ++j) top[m][r] = fmaxf(top[m][r], fmaxf(s[m][j][2 * r], s[m][j][2 * r + 1]));
    }
#pragma unroll
    for (int e = 0; e < M * 2; ++e) {
      float& x = top[e / 2][e % 2];
      x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
      x = fmaxf(x, __shfl_xor_sync(~0u, x, 2));
      grows[e / 2] |= x > highest[e / 2][e % 2];
    }
#pragma unroll
    for (int m = 0; m < M; ++m) {
      if (__any_sync(~0u, grows[m])) raise(m, top[m], scale);
    }
#pragma unroll
    for (int e = 0; e < M * 2; ++e) {
      const int m = e / 2, r = e % 2;
      const float zero = highest[m][r] == -infinity<float>() ? 0 : highest[m][r] * scale;  // that has seen no key yet
#pragma unroll
      for (int j = 0; j < BN / 4; ++j) {
        float& x = s[m][j / 2][2 * r + j % 2];
        total[m][r] += x = fast_exp2(x * scale - zero);
      }
    }
  }

 private:
  __device__ __forceinline__ void raise(int m, const float (&top)[2], float scale) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float zero = top[r] == -infinity<float>() ? 0 : top[r] * scale;
      const float shrink = fast_exp2(highest[m][r] * scale - zero);
      highest[m][r] = top[r], total[m][r] *= shrink;
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

// Weights that are dropped become 0.
template <int BN, int M, typename Variant>
__device__ __forceinline__ void drop(float (&s)[M][BN / 8][4], const Variant& variant, int of, int row, int panel) {
#pragma unroll
  for (int m = 0; m < M; ++m) {
    const Kept<BN / 2> kept =
        variant.dropout.template draw<false, BN / 2>(of, row + 16 * m, panel + threadIdx.x % 4 * 2);
#pragma unroll
    for (int e = 0; e < BN / 2; ++e) s[m][e / 4][e % 4] = kept.of(e, s[m][e / 4][e % 4]);
  }
}

// The queries of a warp: narrow ones stay in registers, others are read again at each panel.
template <typename T, int D, int M> struct Queries {
  static constexpr bool HELD = D <= 64;
  unsigned at, held[HELD ? D / 16 : 1][M][4];
  int row;
  bool known = false;

  __device__ __forceinline__ Queries(unsigned at, int row) : at(at), row(row) {}
  __device__ __forceinline__ void read(int i, unsigned (&fragments)[M][4]) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < M; ++m) {
      load_matrices<false>(fragments[m], place<D>(at, row + 16 * m + lane % 16, 2 * i + lane / 16));
    }
  }
  __device__ __forceinline__ void begin() {  // they have arrived; at each panel
    at = anew(at);
    if (!HELD || known) return;
    known = true;
#pragma unroll
    for (int i = 0; i < D / 16; ++i) read(i, held[HELD ? i : 0]);
  }
  __device__ __forceinline__ void operator()(int i, unsigned (&fragments)[M][4]) const {
    if constexpr (HELD) {
#pragma unroll
      for (int e = 0; e < M * 4; ++e) fragments[e / 4][e % 4] = held[i][e / 4][e % 4];
    } else {
      read(i, fragments);
    }
  }
};

// y and lse of a warp's queries, of which `left` exist; y by way of the rows from `line` on at `through`.
template <typename T, int D, int BN, int M, typename Variant>
__device__ __forceinline__ void leave(const Softmax<T, D, BN, M>& softmax, unsigned through, int line, T* y, float* lse,
                                      long long stride, int left, int width, float scale, float sink,
                                      const Variant& variant) {
  const int lane = threadIdx.x % 32;
  __syncwarp();  // its lanes have read the rows in whose place y is put
#pragma unroll
  for (int m = 0; m < M; ++m) {
    float inverse[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int query = lane / 4 + 16 * m + 8 * r;
      float sum = softmax.total[m][r];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      float highest = softmax.highest[m][r] * scale;
      const float shrink = add_sink(sink, highest, sum);
      inverse[r] = shrink * (1 / sum);
      if constexpr (Variant::kDrops) inverse[r] *= variant.dropout.scale;
      if (lane % 4 == 0 && query < left) lse[query] = highest + logf(sum);
    }
    put<T, D>(through, line + 16 * m, softmax.y[m], inverse[0], inverse[1], y + 16 * m * stride, stride, left - 16 * m,
              width);
  }
}

// Panels of BN keys pass by a block's 16 * M * WARPS queries, from the last to the first. Of one stage the values of a panel arrive
// while its scores are computed, the keys of the next one during softmax and the product with the values; of two stages both arrive
// during all of the panel before.
template <typename T, int D, int BN, int M, int WARPS, int STAGES, int BOUNDS, typename Variant = Plain>
__device__ __forceinline__ void forward_mma(const T* q, const T* k, const T* v, T* y, float* lse, const float* sinks,
                                            float natural_scale, const Strides& qs, const Strides& ks,
                                            const Strides& vs, const Strides& ys, const Sizes& whole,
                                            const Variant& variant = {}) {
  constexpr int ROWS = 16 * M * WARPS, THREADS = 32 * WARPS, PANEL = BN * D * 2, AHEAD = D < 128 ? 1 : 2;
  extern __shared__ uint4 memory[];
  const unsigned q_at = shared_address(memory), panels_at = q_at + ROWS * D * 2;
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
  const int lane = threadIdx.x % 32, own_row = threadIdx.x / 32 * 16 * M;
  const int warp_row = first_row + own_row, row = warp_row + lane / 4;
  const Panels panels = key_panels<BOUNDS, BN>(sizes, first_row, first_row + ROWS - 1);
  const int seen_by_all = keys_end<BOUNDS>(sizes, warp_row);  // by all rows of the warp
  const int begun_by_all = keys_begin<BOUNDS>(sizes, warp_row + 16 * M - 1);
  const float score_scale = Variant::kScores ? 1 : natural_scale, scale = score_scale * kLog2E;
  const auto keys = [&](int panel, int stage, int rows) {
    fetch<T, D, BN, THREADS>(panels_at + stage * 2 * PANEL, k + static_cast<long long>(panel) * BN * ks.row, ks.row,
                             rows, sizes.width);
  };
  const auto values = [&](int panel, int stage, int rows) {
    fetch<T, D, BN, THREADS>(panels_at + stage * 2 * PANEL + PANEL, v + static_cast<long long>(panel) * BN * vs.row,
                             vs.row, rows, sizes.value_width);
  };

  Softmax<T, D, BN, M> softmax;
  Queries<T, D, M> queries(q_at, own_row);
  fetch<T, D, ROWS, THREADS>(q_at, q, qs.row, sizes.queries - first_row, sizes.width);
  int begin = panels.begin, at = panels.end - 1, stage = 0;  // of the panels, or of the list of a map
  const int* list = nullptr;
  if constexpr (Variant::kMaps) list = variant.map.of(batch, head, first_row / ROWS), begin = 0, at = *list++ - 1;
  const auto passing = [&](int i) -> Passing {
    if constexpr (Variant::kMaps) return {list[i] / 2, head, list[i] % 2 != 0};
    else return {i, head, true};
  };
  Passing next = at >= begin ? passing(at) : Passing{};
  const int rows = sizes.keys - next.panel * BN;  // of the panel that passes first, which alone may have fewer
  if (at >= begin) keys(next.panel, 0, rows);
  else finish_copies();
  if (STAGES == 2 && at >= begin) values(next.panel, 0, rows);
  for (; at >= begin; --at) {
    const Passing now = next;
    finish_copies();
    if (at > begin) next = passing(at - 1);
    if (STAGES == 1) values(now.panel, 0, sizes.keys - now.panel * BN);
    else if (at > begin) keys(next.panel, stage ^ 1, BN), values(next.panel, stage ^ 1, BN);
    const unsigned keys_at = panels_at + stage * 2 * PANEL;
    float s[M][BN / 8][4] = {};
    queries.begin();
    add_rows<T, D, BN, M, AHEAD>(s, queries, anew(keys_at));
    if (STAGES == 1) {
      finish_copies();
      if (at > begin) keys(next.panel, 0, BN);
    }
    if constexpr (Variant::kScores) change<Variant, BN, M>(s, variant, natural_scale, batch, head, row, now.panel * BN);
    if constexpr (Variant::kMasks) {
      if (now.partial) hide<Variant, BN, M>(s, variant, batch, head, row, now.panel * BN);
    }
    if ((now.panel + 1) * BN > seen_by_all || (BOUNDS == 2 && now.panel * BN < begun_by_all)) {
      mask<BOUNDS, BN, M>(s, sizes, row, now.panel * BN);
    }
    softmax.exponentiate(s, scale);
    if constexpr (Variant::kDrops) drop<BN, M>(s, variant, batch * sizes.heads + head, row, now.panel * BN);
    unsigned p[M][BN / 8][2];
    round<T>(p, s);
    add_weighted<T, D, BN, M, AHEAD>(softmax.y, p, anew(keys_at + PANEL));
    if (STAGES == 2) stage ^= 1;
  }

  y += batch * ys.batch + head * ys.head + (sequence.query + warp_row) * ys.row;
  lse += Variant::kPacked ? static_cast<long long>(head) * sizes.padded + sequence.query
                          : (static_cast<long long>(batch) * sizes.heads + head) * sizes.queries;
  const float sink = sinks ? sinks[head] : -infinity<float>();
  leave(softmax, q_at, own_row, y, lse + warp_row, ys.row, sizes.queries - warp_row, sizes.value_width, score_scale,
        sink, variant);
}

}  // namespace attention
