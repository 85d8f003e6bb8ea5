// Attention backward by mma.sync: one function in two roles, see attention.cu.
#pragma once

#include "attention/mma.cuh"

namespace attention {

// What a role owns, what passes by, and what it computes.
template <typename T> struct Role {
  const T *own_first, *own_second, *first, *second;
  T *out_first, *out_second;
};
struct RoleStrides { Strides own_first, own_second, first, second, out_first, out_second; };

// A warp owns 16 rows; panels of BN rows of the other side arrive in two buffers.
template <typename T, int D, int BN, int WARPS, bool KEYS, int BOUNDS, typename Variant = Plain>
__device__ __forceinline__ void backward_mma(const Role<T>& given, const float* lse2, const float* delta,
                                             float natural_scale, const RoleStrides& strides, const Sizes& whole,
                                             const Variant& variant = {}) {
  constexpr int ROWS = 16 * WARPS, THREADS = 32 * WARPS, PANEL = BN * D * 2;
  extern __shared__ uint4 memory[];
  const unsigned own_first = shared_address(memory), own_second = own_first + ROWS * D * 2;
  const unsigned panels_at = own_second + ROWS * D * 2;
  const int heads = KEYS ? whole.heads / whole.group : whole.heads, members = KEYS ? whole.group : 1;
  const int tiles = ((KEYS ? whole.keys : whole.queries) + ROWS - 1) / ROWS;
  const Turn turn(tiles, heads, whole.batches, whole.section);
  const int tile = turn.tile, head = turn.head, batch = turn.batch;
  const auto sequence = sequence_of(variant, whole, batch);
  const Sizes& sizes = sequence.sizes;
  const int own_rows = KEYS ? sizes.keys : sizes.queries, rows = KEYS ? sizes.queries : sizes.keys;
  const int own_row = (KEYS ? tile : tiles - 1 - tile) * ROWS;  // those with most to do first
  if (Variant::kPacked && own_row >= own_rows) return;
  const Panels range = KEYS ? query_panels<BOUNDS, BN>(sizes, own_row, own_row + ROWS - 1)
                            : key_panels<BOUNDS, BN>(sizes, own_row, own_row + ROWS - 1);
  const int panels = max(0, range.end - range.begin);
  int all = panels * members;
  const auto at = [&](const Strides& s, int h, int row) { return batch * s.batch + h * s.head + row * s.row; };
  const int own_start = KEYS ? sequence.key : sequence.query, start = KEYS ? sequence.query : sequence.key;
  const auto row_of = [&](int h) {  // in lse2 and delta
    if constexpr (Variant::kPacked) return static_cast<long long>(h) * sizes.padded + sequence.query;
    else return (static_cast<long long>(batch) * sizes.heads + h) * sizes.padded;
  };
  const auto head_of = [&](int i) { return KEYS ? head * sizes.group + i / panels : head / sizes.group; };
  Passing coming = {};  // what was requested last, and where the lists of a map have it
  int member = -1, entry = 0, entries = 0;
  const int* list = nullptr;
  const auto list_of = [&](int member) -> const int* {
    if constexpr (Variant::kMaps) {
      return variant.map.of(batch, KEYS ? head * sizes.group + member : head, own_row / ROWS);
    }
    return nullptr;
  };
  if constexpr (Variant::kMaps) {
    all = 0;
    for (int i = 0; i < members; ++i) all += *list_of(i);
  }
  const auto passing = [&](int i) -> Passing { return {range.begin + i % panels, KEYS ? head_of(i) : head, true}; };
  const auto request = [&](int i) {
    if constexpr (Variant::kMaps) {
      while (entry == entries) list = list_of(++member), entries = *list++, entry = 0;
      const int found = list[entry++];
      coming = {found / 2, KEYS ? head * sizes.group + member : head, found % 2 != 0};
    } else {
      coming = passing(i);
    }
    const int row = coming.panel * BN, of = KEYS ? coming.head : head / sizes.group;
    const unsigned to = panels_at + i % 2 * 2 * PANEL;
    fetch<T, D, BN, THREADS>(to, given.first + at(strides.first, of, start + row), strides.first.row, rows - row,
                             sizes.width);
    fetch<T, D, BN, THREADS>(to + PANEL, given.second + at(strides.second, of, start + row), strides.second.row,
                             rows - row, sizes.value_width);
  };
  fetch<T, D, ROWS, THREADS>(own_first, given.own_first + at(strides.own_first, head, own_start + own_row),
                             strides.own_first.row, own_rows - own_row, sizes.width);
  fetch<T, D, ROWS, THREADS>(own_second, given.own_second + at(strides.own_second, head, own_start + own_row),
                             strides.own_second.row, own_rows - own_row, sizes.value_width);
  if (all > 0) request(0);
  end_group();

  const int lane = threadIdx.x % 32, line = threadIdx.x / 32 * 16, row = own_row + line + lane / 4;
  const float scale = natural_scale * kLog2E;
  float d_first[D / 8][4] = {}, d_second[KEYS ? D / 8 : 1][4] = {}, own_lse[2] = {}, own_delta[2] = {};
  if (!KEYS) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const long long of = row_of(head) + (row + 8 * r);
      own_lse[r] = lse2[of], own_delta[r] = delta[of];
    }
  }

  for (int i = 0; i < all; ++i) {
    const Passing now = coming;
    if (i + 1 < all) request(i + 1);
    end_group();
    wait_for_groups<1>();
    __syncthreads();
    const unsigned first = panels_at + i % 2 * 2 * PANEL, second = first + PANEL;
    const int panel = now.panel * BN, column = panel + lane % 4 * 2;
    const long long columns = KEYS ? row_of(now.head) + column : 0;
    float s[BN / 8][4] = {}, dp[BN / 8][4] = {};
    add_rows<T, D, BN>(s, own_first, line, first);
    const int warp_row = own_row + line;
    const bool masked =
        KEYS ? (BOUNDS && panel + sizes.high < warp_row + 15) || (BOUNDS == 2 && panel + BN - 1 + sizes.low > warp_row)
             : panel + BN > keys_end<BOUNDS>(sizes, warp_row) ||
                   (BOUNDS == 2 && panel < keys_begin<BOUNDS>(sizes, warp_row + 15));
    if (masked) {
#pragma unroll
      for (int e = 0; e < BN / 2; ++e) {
        const int mine = row + e / 2 % 2 * 8, other = column + e / 4 * 8 + e % 2;
        const int query = KEYS ? other : mine, key = KEYS ? mine : other;
        if (key >= sizes.keys || (BOUNDS && key > query + sizes.high) || (BOUNDS == 2 && key < query + sizes.low)) {
          s[e / 4][e % 4] = -infinity<float>();
        }
      }
    }
    if constexpr (Variant::kMasks) {
      if (now.partial) {
#pragma unroll
        for (int e = 0; e < BN / 2; ++e) {
          const int mine = row + e / 2 % 2 * 8, other = column + e / 4 * 8 + e % 2;
          const bool seen = variant.seen(batch, now.head, KEYS ? other : mine, KEYS ? mine : other);
          if (!seen) s[e / 4][e % 4] = -infinity<float>();
        }
      }
    }
    Kept<BN / 2> kept;
    const auto dropped = [&] {  // dp of weights that were dropped is 0, and of the others as much larger as they are
      if constexpr (Variant::kDrops) {
        kept = variant.dropout.template draw<KEYS, BN / 2>(batch * sizes.heads + now.head, row, column);
#pragma unroll
        for (int e = 0; e < BN / 2; ++e) dp[e / 4][e % 4] = kept.of(e, dp[e / 4][e % 4] * variant.dropout.scale);
      }
    };
    const auto add_second = [&] {
      if constexpr (KEYS && Variant::kDrops) {
        float left[BN / 8][4];
#pragma unroll
        for (int e = 0; e < BN / 2; ++e) left[e / 4][e % 4] = kept.of(e, s[e / 4][e % 4]);
        add_weighted<T, D, BN>(d_second, left, second);
      } else if constexpr (KEYS) {
        add_weighted<T, D, BN>(d_second, s, second);
      }
    };
    if constexpr (Variant::kScores || Variant::kPacked) {
      add_rows<T, D, BN>(dp, own_second, line, second);
      dropped();
#pragma unroll
      for (int e = 0; e < BN / 2; ++e) {  // s = P, dp = dS
        const int mine = row + e / 2 % 2 * 8, other = column + e / 4 * 8 + e % 2;
        const int query = KEYS ? other : mine, key = KEYS ? mine : other;
        const long long of = columns + e / 4 * 8 + e % 2;
        float &x = s[e / 4][e % 4], &y = dp[e / 4][e % 4];
        const bool outside = x == -infinity<float>() || (Variant::kPacked && KEYS && query >= rows);
        const auto found = weights_of(variant, x * natural_scale, batch, now.head, query, key,
                                      KEYS ? lse2[of] : own_lse[e / 2 % 2], y, KEYS ? delta[of] : own_delta[e / 2 % 2]);
        x = outside ? 0 : found.p, y = outside ? 0 : found.ds;
      }
      add_second();
    } else {
#pragma unroll
      for (int j = 0; j < BN / 8; ++j) {  // s = P
        const float2 found = KEYS ? *reinterpret_cast<const float2*>(lse2 + columns + 8 * j) : float2{};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          s[j][e] = fast_exp2(s[j][e] * scale - (KEYS ? e % 2 ? found.y : found.x : own_lse[e / 2]));
        }
      }
      add_rows<T, D, BN>(dp, own_second, line, second);
      dropped();
      add_second();
#pragma unroll
      for (int j = 0; j < BN / 8; ++j) {  // dp = dS
        const float2 found = KEYS ? *reinterpret_cast<const float2*>(delta + columns + 8 * j) : float2{};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          dp[j][e] = s[j][e] * (dp[j][e] - (KEYS ? e % 2 ? found.y : found.x : own_delta[e / 2]));
        }
      }
    }
    add_weighted<T, D, BN>(d_first, dp, first);
    __syncthreads();
  }
  finish_copies();
  const int left = own_rows - own_row - line;
  put<T, D>(own_first, line, d_first, natural_scale, natural_scale,
            given.out_first + at(strides.out_first, head, own_start + own_row + line), strides.out_first.row, left,
            sizes.width);
  if constexpr (KEYS) {
    float of_second = 1;
    if constexpr (Variant::kDrops) of_second = variant.dropout.scale;
    put<T, D>(own_second, line, d_second, of_second, of_second,
              given.out_second + at(strides.out_second, head, own_start + own_row + line), strides.out_second.row, left,
              sizes.value_width);
  }
}

}  // namespace attention
