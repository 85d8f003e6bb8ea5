// Attention backward by mma.sync in one pass: the keys' role, which computes grad_q too.
#pragma once

#include "attention/backward_mma.cuh"
#include "attention/sums.cuh"
#include "common/hw/named_barrier.cuh"

namespace attention {

// Eight warps in pairs, each with 16 * M keys: one of a pair has P and grad_v, the other dS and grad_k, so that a thread has
// registers for one result and can multiply each row that passes, once read, by M tiles. The first gives P to the second in fp32,
// so that dS is as exact as in two passes: half of it through the place where dS is put, which all warps read for their shares of
// grad_q = dS k. While some make P, others multiply.
constexpr int kPairs = 4, kOnceThreads = 64 * kPairs;
constexpr int kAll = 1 + kPairs;  // the barrier of all warps, after those of the pairs

// What lies where in shared memory: two tiles; two stages of a panel of queries, one of their gradients, lse2 and delta; dS twice.
template <int D, int BN, int M> struct OnceMmaLayout {
  static constexpr int TILE = 16 * M * kPairs, OWN = TILE * D * 2, PANEL = BN * D * 2, STAGE = 2 * PANEL + 2 * BN * 4;
  static constexpr int LINES_AT = 2 * PANEL, STAGES_AT = 2 * OWN, DIFFERENCES_AT = STAGES_AT + 2 * STAGE;
  static constexpr int DIFFERENCES = TILE * BN * 2;
  unsigned base;

  __device__ __forceinline__ unsigned keys() const { return base; }
  __device__ __forceinline__ unsigned values() const { return base + OWN; }
  __device__ __forceinline__ unsigned first(int i) const { return base + STAGES_AT + i * STAGE; }
  __device__ __forceinline__ unsigned second(int i) const { return first(i) + PANEL; }
  __device__ __forceinline__ unsigned lse2(int i) const { return first(i) + LINES_AT; }
  __device__ __forceinline__ unsigned delta(int i) const { return lse2(i) + BN * 4; }
  __device__ __forceinline__ unsigned differences(int i) const { return base + DIFFERENCES_AT + i * DIFFERENCES; }
  __device__ __forceinline__ unsigned more() const { return differences(2); }  // half of P
};

__device__ __forceinline__ void put_four(unsigned address, const float2& x, const float2& y) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(x.x), "f"(x.y), "f"(y.x), "f"(y.y)
               : "memory");
}
__device__ __forceinline__ void take_four(float2& x, float2& y, unsigned address) {
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(y.x), "=f"(y.y)
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ float2 two_of(unsigned address) {
  float2 found;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(found.x), "=f"(found.y) : "r"(address));
  return found;
}

// A tile of keys, and the panels of queries that pass by it: head after head of a group, or as the lists of a map have them.
template <int BN, int TILE, typename Variant> struct KeyTile {
  const Variant& variant;
  int own_head, batch, row, group, begin, panels, all, panel, in = 0, member = 0;
  int entry = 0, entries = 0;  // of a list
  const int* list = nullptr;

  __device__ __forceinline__ KeyTile(const Sizes& sizes, const Variant& variant)
      : variant(variant), group(sizes.group) {
    const int tiles = (sizes.keys + TILE - 1) / TILE;
    const Turn turn(tiles, sizes.heads / group, sizes.batches, sizes.section);
    own_head = turn.head, batch = turn.batch, row = turn.tile * TILE;  // those with most to do first
    const Panels range = query_panels<2, BN>(sizes, row, row + TILE - 1);
    begin = panel = range.begin, panels = max(0, range.end - range.begin), all = panels * group;
    // Tiles of one head begin at different panels, so that they do not all add to the same rows at once.
    if (begin == 0 && range.end == (sizes.queries + BN - 1) / BN) panel = turn.tile * panels / tiles;
    if constexpr (Variant::kMaps) {
      all = 0;
      for (int i = 0; i < group; ++i) all += *list_of(i);
    }
  }

  __device__ __forceinline__ const int* list_of(int member) const {
    return variant.map.of(batch, own_head * group + member, row / TILE);
  }

  __device__ __forceinline__ Passing next() {
    if constexpr (Variant::kMaps) {
      while (entry == entries) list = list_of(member++), entries = *list++, entry = 0;
      const int found = list[entry++];
      return {found / 2, own_head * group + member - 1, found % 2 != 0};
    } else {
      const Passing found = {panel, own_head * group + member, true};
      if (++panel == begin + panels) panel = begin;
      if (++in == panels) in = 0, ++member;
      return found;
    }
  }
};

// A warp, which owns 16 * M keys, and computes grad_k or grad_v of them, and a share of grad_q of each panel.
template <typename T, int D, int BN, int M, typename Variant> struct OnceMma {
  using At = OnceMmaLayout<D, BN, M>;
  using Work = KeyTile<BN, At::TILE, Variant>;
  static constexpr int TILE = At::TILE, N = BN / 8;  // columns by eights
  static constexpr int AHEAD = D % 64 ? 0 : D == 256 ? 2 : 1;  // of each width the fastest
  // Of a panel of grad_q a warp has 16 * RM rows and COLUMNS columns.
  static constexpr int RM = D * BN / 128 % 32 == 0 ? 2 : 1;
  static constexpr int ROW_WARPS = BN / 16 / RM, COLUMNS = D / (8 / ROW_WARPS), WIDE = (D + 63) / 64;
  static_assert(COLUMNS % 16 == 0 && ROW_WARPS <= 8, "eight warps share a panel of grad_q");

  const At at;
  Work work;
  const Role<T>& given;
  const RoleStrides& strides;
  const Sizes& sizes;
  const float *const lse2, *const delta;
  float* const sums;
  const Variant& variant;
  const int lane, pair, line;  // line: of what is owned, the warp's first
  const float natural_scale;
  Passing now = {}, coming = {};
  float result[M][D / 8][4] = {};

  __device__ __forceinline__ OnceMma(const At& at, const Work& work, const Role<T>& given, const RoleStrides& strides,
                                     const Sizes& sizes, const float* lse2, const float* delta, float* sums,
                                     float natural_scale, const Variant& variant)
      : at(at),
        work(work),
        given(given),
        strides(strides),
        sizes(sizes),
        lse2(lse2),
        delta(delta),
        sums(sums),
        variant(variant),
        lane(threadIdx.x % 32),
        pair(threadIdx.x / 32 % kPairs),
        line(pair * 16 * M),
        natural_scale(natural_scale) {}

  __device__ __forceinline__ long long of(const Strides& s, int head, int row) const {
    return work.batch * s.batch + head * s.head + row * s.row;
  }

  // Begins to copy what is owned, and what passes first.
  __device__ __forceinline__ void begin() {
    const int left = sizes.keys - work.row;
    fetch<T, D, TILE, kOnceThreads>(at.keys(), given.own_first + of(strides.own_first, work.own_head, work.row),
                                    strides.own_first.row, left, sizes.width);
    fetch<T, D, TILE, kOnceThreads>(at.values(), given.own_second + of(strides.own_second, work.own_head, work.row),
                                    strides.own_second.row, left, sizes.value_width);
    if (work.all > 0) request(0);
  }

  // Begins to copy what passes next, to a stage.
  __device__ __forceinline__ void request(int stage) {
    coming = work.next();
    const int row = coming.panel * BN, left = sizes.queries - row, chunk = threadIdx.x % (BN / 4);
    fetch<T, D, BN, kOnceThreads>(at.first(stage), given.first + of(strides.first, coming.head, row), strides.first.row,
                                  left, sizes.width);
    fetch<T, D, BN, kOnceThreads>(at.second(stage), given.second + of(strides.second, coming.head, row),
                                  strides.second.row, left, sizes.value_width);
    if (threadIdx.x < BN / 2) {
      const bool is_lse = threadIdx.x < BN / 4;
      const long long from = (static_cast<long long>(work.batch) * sizes.heads + coming.head) * sizes.padded + row;
      fetch16_or_zero((is_lse ? at.lse2(stage) : at.delta(stage)) + 16 * chunk,
                      (is_lse ? lse2 : delta) + from + 4 * chunk, true);
    }
  }

  // Two programs, each with its own barriers: with one for both, rows of 64 elements took 3 to 6% longer.
  template <bool VALUES> __device__ __forceinline__ void run() {
    Passing before = {};
    for (int i = 0; i < work.all; ++i) {
      const int stage = i % 2;
      now = coming;
      if (i + 1 < work.all) request(stage ^ 1);
      end_group();
      if constexpr (VALUES) {
        of_values(stage);
        if (i > 0) add_queries(before, stage ^ 1);
      } else {
        if (i > 0) add_queries(before, stage ^ 1);  // while the others make P
        of_keys(stage);
      }
      before = now;
      wait_for_groups<0>();
      named_barrier::sync(kAll, kOnceThreads);
    }
    if (work.all > 0) add_queries(before, (work.all - 1) % 2);
  }

  // What reads the rows of the pair from what is owned.
  __device__ __forceinline__ auto own(unsigned from) const {
    return [this, from](int i, unsigned (&fragments)[M][4]) {
#pragma unroll
      for (int m = 0; m < M; ++m) {
        load_matrices<false>(fragments[m], place<D>(from, line + 16 * m + lane % 16, 2 * i + lane / 16));
      }
    };
  }

  // P, and grad_v += P^T grad_y.
  __device__ __forceinline__ void of_values(int stage) {
    unsigned p[M][N][2];
    {
      float s[M][N][4] = {};
      add_rows<T, D, BN, M, AHEAD>(s, own(at.keys()), at.first(stage));
      hide(s);
      Kept<BN / 2> kept[M];
      draw(kept);
#pragma unroll
      for (int i = 0; i < N / 2; ++i) {  // 16 queries
        const float2 lse[2] = {two_of(at.lse2(stage) + 64 * i + lane % 4 * 8),
                               two_of(at.lse2(stage) + 64 * i + 32 + lane % 4 * 8)};
#pragma unroll
        for (int m = 0; m < M; ++m) {
          float2 factors[4];
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const int j = 2 * i + e / 2, r = e % 2;
            const float2 x = weights(s[m][j][2 * r], lse[e / 2].x, m, 4 * j + 2 * r);
            const float2 y = weights(s[m][j][2 * r + 1], lse[e / 2].y, m, 4 * j + 2 * r + 1);
            factors[e] = {x.y, y.y};
            if constexpr (Variant::kDrops) {
              p[m][j][r] = pack<T>(kept[m].of(4 * j + 2 * r, x.x), kept[m].of(4 * j + 2 * r + 1, y.x));
            } else {
              p[m][j][r] = pack<T>(x.x, y.x);
            }
          }
          give(stage, m * N / 2 + i, factors);
        }
      }
    }
    // arrive(), without waiting, is at most 1% faster, and compute-sanitizer does not follow it
    named_barrier::sync(1 + pair, 64);
    add_weighted<T, D, BN, M, AHEAD>(result, p, at.second(stage));
  }

  // P of a score, and what makes dS of dP: P times the slope of the score.
  __device__ __forceinline__ float2 weights(float s, float lse, int m, int e) const {
    if constexpr (Variant::kScores) {
      if (s == -infinity<float>()) return {0, 0};
      const auto found =
          weights_of(variant, s * natural_scale, work.batch, now.head, query_of(e), key_of(m, e), lse, 1, 0);
      return {found.p, found.ds};
    } else {
      const float p = fast_exp2(s * (natural_scale * kLog2E) - lse);
      return {p, p};
    }
  }

  // dS, and grad_k += dS^T q.
  __device__ __forceinline__ void of_keys(int stage) {
    unsigned ds[M][N][2];
    {
      float dp[M][N][4] = {};
      add_rows<T, D, BN, M, AHEAD>(dp, own(at.values()), at.second(stage));
      Kept<BN / 2> kept[M];
      draw(kept);
      // of weights that were dropped it is 0, of the others as much larger as they are
      if constexpr (Variant::kDrops) {
#pragma unroll
        for (int e = 0; e < M * BN / 2; ++e) {
          float& x = dp[e / (BN / 2)][e % (BN / 2) / 4][e % 4];
          x = kept[e / (BN / 2)].of(e % (BN / 2), x * variant.dropout.scale);
        }
      }
      named_barrier::sync(1 + pair, 64);
#pragma unroll
      for (int i = 0; i < N / 2; ++i) {  // 16 queries
        const float2 deltas[2] = {two_of(at.delta(stage) + 64 * i + lane % 4 * 8),
                                  two_of(at.delta(stage) + 64 * i + 32 + lane % 4 * 8)};
#pragma unroll
        for (int m = 0; m < M; ++m) {
          float2 factors[4];
          take(stage, m * N / 2 + i, factors);
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const int j = 2 * i + e / 2, r = e % 2;
            const float* x = &dp[m][j][2 * r];
            ds[m][j][r] = pack<T>(factors[e].x * (x[0] - deltas[e / 2].x), factors[e].y * (x[1] - deltas[e / 2].y));
          }
        }
      }
    }
    __syncwarp();  // all lanes have read P
#pragma unroll
    for (int i = 0; i < 2 * M * N; ++i) {
      const int j = i / (2 * M), e = i % (2 * M);
      asm volatile(
          "st.shared.b32 [%0], %1;" ::"r"(place<BN>(at.differences(stage), line + 8 * e + lane / 4, j) + lane % 4 * 4),
          "r"(ds[e / 2][j][e % 2])
          : "memory");
    }
    add_weighted<T, D, BN, M, AHEAD>(result, ds, at.first(stage));
  }

  // What makes dS of dP, of the i-th 16 keys and 16 queries of a pair, from one of its warps to the other.
  __device__ __forceinline__ void give(int stage, int i, const float2 (&factors)[4]) const {
    const unsigned to = line * BN * 2 + 512 * i + 16 * lane;
    put_four(at.differences(stage) + to, factors[0], factors[1]);
    put_four(at.more() + to, factors[2], factors[3]);
  }
  __device__ __forceinline__ void take(int stage, int i, float2 (&factors)[4]) const {
    const unsigned from = line * BN * 2 + 512 * i + 16 * lane;
    take_four(factors[0], factors[1], at.differences(stage) + from);
    take_four(factors[2], factors[3], at.more() + from);
  }

  // The key and the query of the e-th score of 16 keys.
  __device__ __forceinline__ int key_of(int m, int e) const {
    return work.row + line + lane / 4 + 16 * m + e / 2 % 2 * 8;
  }
  __device__ __forceinline__ int query_of(int e) const { return now.panel * BN + lane % 4 * 2 + e / 4 * 8 + e % 2; }

  __device__ __forceinline__ void draw(Kept<BN / 2> (&kept)[M]) const {
    if constexpr (Variant::kDrops) {
#pragma unroll
      for (int m = 0; m < M; ++m) {
        kept[m] =
            variant.dropout.template draw<true, BN / 2>(work.batch * sizes.heads + now.head, key_of(m, 0), query_of(0));
      }
    }
  }

  // Scores of keys that a query does not see are -inf.
  __device__ __forceinline__ void hide(float (&s)[M][N][4]) const {
    const int first = now.panel * BN, row = work.row + line;
    if (row + 16 * M > sizes.keys || first + sizes.high < row + 16 * M - 1 || first + BN - 1 + sizes.low > row) {
#pragma unroll
      for (int e = 0; e < 2 * M; ++e) {
        const int key = key_of(0, 0) + 8 * e, distance = key - query_of(0);
        const int begin = distance - sizes.high, end = key < sizes.keys ? distance - sizes.low + 1 : 0;  // that see it
#pragma unroll
        for (int i = 0; i < 2 * N; ++i) {
          const int column = i / 2 * 8 + i % 2;
          if (column < begin || column >= end) s[e / 2][i / 2][e % 2 * 2 + i % 2] = -infinity<float>();
        }
      }
    }
    if constexpr (Variant::kMasks) {
      if (!now.partial) return;
#pragma unroll
      for (int i = 0; i < M * BN / 2; ++i) {
        const int m = i / (BN / 2), e = i % (BN / 2);
        if (!variant.seen(work.batch, now.head, query_of(e), key_of(m, e))) s[m][e / 4][e % 4] = -infinity<float>();
      }
    }
  }

  // The warp's share of grad_q += dS k, of a panel whose dS is there.
  __device__ __forceinline__ void add_queries(const Passing& of, int stage) const {
    const int warp = threadIdx.x / 32, row = warp % ROW_WARPS * 16 * RM, column = warp / ROW_WARPS * COLUMNS;
    float d_q[RM][COLUMNS / 8][4] = {};
    const auto left = [&](int i, unsigned (&fragments)[RM][4]) {
#pragma unroll
      for (int m = 0; m < RM; ++m) {
        load_matrices<true>(fragments[m], place<BN>(at.differences(stage), 16 * i + lane / 16 * 8 + lane % 8,
                                                    row / 8 + 2 * m + lane / 8 % 2));
      }
    };
    const auto right = [&](int i, int j, unsigned (&fragment)[4]) {
      load_matrices<true>(fragment, place<D>(at.keys(), 16 * i + lane % 16, column / 8 + 2 * j + lane / 16));
    };
    add_fragments<T, TILE / 16, AHEAD>(d_q, left, right);
    float* const to = sums + (static_cast<long long>(work.batch) * sizes.heads + of.head) * sizes.padded * WIDE * 64;
#pragma unroll
    for (int m = 0; m < RM; ++m) {
      const int lines = (of.panel * BN + row) / 16 + m;  // by 16
#pragma unroll
      for (int j = 0; j < COLUMNS / 8; ++j) {
        const long long eights = static_cast<long long>(lines / 4) * (8 * WIDE) + (column / 8 + j);
        add_four(to + eights * 512 + lines % 4 * 128, d_q[m][j]);
      }
    }
  }

  __device__ __forceinline__ void leave(unsigned through, T* to, const Strides& stride, float factor, int width) const {
#pragma unroll
    for (int m = 0; m < M; ++m) {
      const int row = work.row + line + 16 * m;
      put<T, D>(through, line + 16 * m, result[m], factor, factor, to + of(stride, work.own_head, row), stride.row,
                sizes.keys - row, width);
    }
  }
};

template <typename T, int D, int BN, int M, typename Variant = Plain>
__device__ __forceinline__ void once_mma(const Role<T>& given, const float* lse2, const float* delta, float* sums,
                                         float natural_scale, const RoleStrides& strides, const Sizes& sizes,
                                         const Variant& variant = {}) {
  extern __shared__ uint4 memory[];
  using Pass = OnceMma<T, D, BN, M, Variant>;
  const typename Pass::At at{shared_address(memory)};
  Pass pass(at, {sizes, variant}, given, strides, sizes, lse2, delta, sums, natural_scale, variant);
  pass.begin();
  finish_copies();
  if (threadIdx.x < kOnceThreads / 2) {
    pass.template run<true>();
    named_barrier::sync(kAll, kOnceThreads);  // all read the keys to the end, in whose place grad_k is put
    float factor = 1;
    if constexpr (Variant::kDrops) factor = variant.dropout.scale;
    pass.leave(at.values(), given.out_second, strides.out_second, factor, sizes.value_width);
  } else {
    pass.template run<false>();
    named_barrier::sync(kAll, kOnceThreads);
    pass.leave(at.keys(), given.out_first, strides.out_first, natural_scale, sizes.width);
  }
}

}  // namespace attention
