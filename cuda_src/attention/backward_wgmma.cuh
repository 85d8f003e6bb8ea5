// Attention backward by wgmma and TMA: one function in two roles, see attention.cu.
#pragma once

#include "attention/wgmma.cuh"

namespace attention {

// What a role is given. out_second: of the keys' role alone.
struct RoleMaps {
  const TensorMap &own_first, &own_second, &first, &second, &out_first, &out_second;
  const float *lse2, *delta;
};

// What lies where in shared memory, from a multiple of 1024 on, as every panel does.
// MORE: bytes after the panels. OWNED: tiles. DV: of values and grad_y. TILE: rows that are owned.
template <int D, int BN, int STAGES, int MORE = 0, int OWNED = 2, int DV = D, int TILE = 128> struct BackwardLayout {
  static constexpr int kDV = DV, kColumns = whole(D), kValues = whole(DV), kTile = TILE;
  static constexpr bool kOnce = MORE > 0;
  static constexpr int OWN = TILE * whole(D) * 2, OWN_SECOND = OWNED == 2 ? TILE * whole(DV) * 2 : 0;
  static constexpr int STREAM = BN * whole(D) * 2, STAGE = STREAM + BN * whole(DV) * 2, ROW = BN * 4;
  static constexpr int STREAM_AT = OWN + OWN_SECOND, MORE_AT = STREAM_AT + STAGES * STAGE, ROWS_AT = MORE_AT + MORE;
  static constexpr int BARRIERS_AT = ROWS_AT + 4096;
  static_assert(2 * STAGES * ROW <= 4096, "lse2 and delta of all stages");
  unsigned base, barriers;

  __device__ __forceinline__ explicit BackwardLayout(char* memory)
      : base((shared_address(memory) + 1023) & ~1023u), barriers(base + BARRIERS_AT) {}
  __device__ __forceinline__ unsigned owned() const { return barriers; }
  __device__ __forceinline__ unsigned full(int i) const { return barriers + 16 + 16 * i; }
  __device__ __forceinline__ unsigned free(int i) const { return barriers + 24 + 16 * i; }
  __device__ __forceinline__ unsigned entry(int i) const { return barriers + 512 + 8 * i; }
  __device__ __forceinline__ unsigned first(int i) const { return base + STREAM_AT + i * STAGE; }
  __device__ __forceinline__ unsigned second(int i) const { return first(i) + STREAM; }
  // lse2 of a panel's rows, and `apart` bytes after them delta.
  __device__ __forceinline__ unsigned rows(int i, int apart) const { return base + ROWS_AT + 2 * i * apart; }

  // Panels that TMA is to copy nothing to are zeros.
  template <typename Variant> __device__ __forceinline__ void clear(const Sizes& sizes) const {
    if constexpr (Variant::kPacked) {
      const Widths<Variant> of(kColumns, kValues, sizes);
      if (of.first == kColumns && of.second == kValues) return;
      clear_panels(base, TILE, of.first, kColumns);
      if (OWNED == 2) clear_panels(base + OWN, TILE, of.second, kValues);
      for (int i = 0; i < STAGES; ++i) {
        clear_panels(first(i), BN, of.first, kColumns);
        clear_panels(second(i), BN, of.second, kValues);
      }
      tma::fence_shared();
    }
  }

  __device__ __forceinline__ void begin() const {
    if (threadIdx.x == 0) {
      mbarrier::init(owned(), 1);
      for (int i = 0; i < STAGES; ++i) mbarrier::init(full(i), 1), mbarrier::init(free(i), 8);
      mbarrier::fence_init();
    }
    __syncthreads();
  }
};

// A block's tile, and the panels of the other side that pass: within a section, tiles with most to do first.
template <int BN, bool KEYS, int BOUNDS, int TILE = 128> struct Work {
  int own_rows, rows, head, own_head, batch, own_row, begin, end, panels, all, group, members;
  int shift = 0;  // the panel of each head that passes first is begin + shift
  int own_start = 0, start = 0;  // of a packed sequence, where what is owned begins, and what passes

  // share: of the keys' role, how many of the heads of a group a block goes through.
  __device__ __forceinline__ Work(const Sizes& sizes, int share)
      : group(KEYS ? share : sizes.group), members(KEYS ? share : 1) {
    own_rows = KEYS ? sizes.keys : sizes.queries;
    const int heads = sizes.heads / members;
    const int tiles_each = (own_rows + TILE - 1) / TILE, whole = sizes.section * tiles_each;
    const int section = blockIdx.x / whole * sizes.section, in = blockIdx.x % whole;
    const int wide = min(sizes.section, heads * sizes.batches - section);
    head = (section + in % wide) % heads, batch = (section + in % wide) / heads;
    own_row = (KEYS ? in / wide : tiles_each - 1 - in / wide) * TILE;
    own_head = KEYS ? head * members / sizes.group : head;
    look(sizes);
  }

  // What passes, by the sizes of one of packed sequences where they are.
  __device__ __forceinline__ void look(const Sizes& sizes) {
    own_rows = KEYS ? sizes.keys : sizes.queries, rows = KEYS ? sizes.queries : sizes.keys;
    const Panels range = KEYS ? query_panels<BOUNDS, BN>(sizes, own_row, own_row + TILE - 1)
                              : key_panels<BOUNDS, BN>(sizes, own_row, own_row + TILE - 1);
    begin = range.begin, end = range.end;
    panels = max(0, end - begin), all = panels * members;
  }
  __device__ __forceinline__ void look(const Sequence& sequence) {
    own_start = KEYS ? sequence.key : sequence.query, start = KEYS ? sequence.query : sequence.key;
    look(sequence.sizes);
  }
  // Where lse2 and delta of a head of queries begin.
  template <typename Variant> __device__ __forceinline__ long long line(const Sizes& sizes, int of) const {
    if constexpr (Variant::kPacked) return static_cast<long long>(of) * sizes.padded + (KEYS ? start : own_start);
    else return (static_cast<long long>(batch) * sizes.heads + of) * sizes.padded;
  }
  __device__ __forceinline__ int head_of(int i) const { return KEYS ? head * group + i / panels : head / group; }

  // Blocks of one head begin at different panels, so that they do not all add to the same rows at once.
  __device__ __forceinline__ void spread() {
    if (BOUNDS == 0 || (begin == 0 && end == (rows + BN - 1) / BN))
      shift = own_row / TILE * panels / ((own_rows + TILE - 1) / TILE);
  }

  // Of a map: the panels of one of the heads of the queries, and of all.
  __device__ __forceinline__ const int* list(const Map& map, int member) const {
    return map.of(batch, KEYS ? head * group + member : head, own_row / TILE);
  }
  __device__ __forceinline__ void count(const Map& map) {
    all = 0;
    for (int member = 0; member < members; ++member) all += *list(map, member);
  }
};

// What of a role a kernel computes. Wide rows leave a thread no registers for both results of the keys' role: a kernel has grad_k,
// and another grad_v, for which v is not owned.
enum Part { kAll, kOfKeys, kOfValues };

// The producer, one thread: what is owned once, then panel after panel, for the keys' role with lse2 and delta of its rows.
template <int D, int BN, int STAGES, bool KEYS, int BOUNDS, int PART = kAll, typename At, typename Variant = Plain>
__device__ __forceinline__ void produce(const At& at, const Work<BN, KEYS, BOUNDS, At::kTile>& work,
                                        const RoleMaps& given, const Sizes& sizes, const Variant& variant = {}) {
  constexpr int ROW = At::ROW + Variant::kPacked * 16;  // lines of packed sequences begin anywhere
  static_assert(!KEYS || 2 * STAGES * ROW <= 4096, "lse2 and delta of all stages");
  const Widths<Variant> of(At::kColumns, At::kValues, sizes);
  const int second_owned = PART == kOfValues ? 0 : of.second;
  mbarrier::arrive_and_expect(at.owned(), (of.first + second_owned) * At::kTile * 2);
  const Place own = place_of<Variant>(work.own_row, work.own_rows, work.own_start, work.batch);
  for (int x = 0; x < of.first; x += 64) {
    tma::load(at.base + x * At::kTile * 2, given.own_first, x, own.row, work.own_head, own.batch, at.owned());
  }
  for (int x = 0; x < second_owned; x += 64) {
    tma::load(at.base + At::OWN + x * At::kTile * 2, given.own_second, x, own.row, work.own_head, own.batch,
              at.owned());
  }
  Ring<STAGES> ring;
  const auto load = [&](int row, int head, int entry, int query_head) {  // the last two of a map
    const unsigned full = at.full(ring.stage), first = at.first(ring.stage), second = at.second(ring.stage);
    mbarrier::wait(at.free(ring.stage), ring.phase ^ 1);
    if constexpr (Variant::kMaps) put_entry(at.entry(ring.stage), entry, query_head);
    mbarrier::arrive_and_expect(full, (of.first + of.second) * BN * 2 + (KEYS ? 2 * ROW : 0));
    const Place to = place_of<Variant>(row, work.rows, work.start, work.batch);
    for (int x = 0; x < of.first; x += 64) tma::load(first + x * BN * 2, given.first, x, to.row, head, to.batch, full);
    for (int x = 0; x < of.second; x += 64)
      tma::load(second + x * BN * 2, given.second, x, to.row, head, to.batch, full);
    if (KEYS) {
      const long long line = work.template line<Variant>(sizes, head) + row - (Variant::kPacked ? work.start % 4 : 0);
      tma::load_line(at.rows(ring.stage, ROW), given.lse2 + line, ROW, full);
      tma::load_line(at.rows(ring.stage, ROW) + ROW, given.delta + line, ROW, full);
    }
  };
  if constexpr (Variant::kMaps) {
    for (int member = 0; member < work.members; ++member) {
      const int* list = work.list(variant.map, member);
      const int panels = *list++, head = KEYS ? work.head * work.group + member : work.head;
      for (int i = 0; i < panels; ++i, ring.advance()) {
        const int entry = list[i];
        load(entry / 2 * BN, KEYS ? head : head / work.group, entry, head);
      }
    }
  } else {
    for (int i = 0; i < work.all; ++i, ring.advance()) {
      load((work.begin + (i + work.shift) % work.panels) * BN, work.head_of(i), 0, 0);
    }
  }
}

// A consumer, a warpgroup: owns 64 rows. P and dS go from the sums of one product into the registers of the next.
template <typename T, int D, int BN, int STAGES, bool KEYS, int BOUNDS, typename Variant = Plain,
          typename At = BackwardLayout<D, BN, STAGES>, int PART = kAll>
struct Gradient {
  static constexpr bool FIRST_OUT = PART != kOfValues, SECOND_OUT = KEYS && PART != kOfKeys;
  // In flight while P is computed: dP and, where there are registers for it, the sums over dS of the panel before. While dS is
  // computed: the sums over P.
  static constexpr bool DELAYED = FIRST_OUT && (!KEYS || D < 128 || PART == kOfKeys);
  static constexpr int ROW = At::ROW + Variant::kPacked * 16;  // bytes of lse2 of a panel's rows, as they were loaded
  static constexpr int DV = At::kDV;
  // What is added to scores takes registers while dP is computed, which two roles of rows of 64 have not.
  static constexpr bool SHIFTS = Variant::kShifts && (D > 64 || At::kOnce), BENDS = Variant::kScores && !SHIFTS;
  static constexpr bool SHARED = At::kTile == 64;  // both warpgroups have the same rows, each of one result

  const At& at;
  const Work<BN, KEYS, BOUNDS, At::kTile>& work;
  const Sizes& sizes;
  const int group, lane, group_row, row;  // row: the first of this thread's two, 8 apart
  const unsigned own_at;
  const float scale;
  Ring<STAGES> ring;
  int before = 0;  // the stage of the panel before
  int columns_from = 0;  // of the panel that passes, this thread's first column
  float s[BN / 2], dp[BN / 2], d_first[FIRST_OUT ? D / 2 : 1], d_second[SECOND_OUT ? DV / 2 : 1];
  float own_lse[2], own_delta[2];
  unsigned p[BN / 4], ds[BN / 4];
  Kept<BN / 2> kept;
  const Variant& variant;

  __device__ __forceinline__ Gradient(const At& at, const Work<BN, KEYS, BOUNDS, At::kTile>& work,
                                      const RoleMaps& given, float natural_scale, const Sizes& sizes,
                                      const Variant& variant = {})
      : at(at),
        work(work),
        sizes(sizes),
        group(__shfl_sync(~0u, threadIdx.x / 128, 0) - 1),
        lane(threadIdx.x % 32),
        group_row(work.own_row + (SHARED ? 0 : group * 64)),
        row(group_row + threadIdx.x / 32 % 4 * 16 + lane / 4),
        own_at(at.base + (SHARED ? 0 : group * 64 * kLine)),
        scale(BENDS ? natural_scale : natural_scale * kLog2E),
        variant(variant) {
#pragma unroll
    for (float& x : d_first) x = 0;
#pragma unroll
    for (float& x : d_second) x = 0;
    if constexpr (!KEYS) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const long long of = work.template line<Variant>(sizes, work.head) + row + 8 * r;
        own_lse[r] = given.lse2[of];
        own_delta[r] = given.delta[of];
      }
    }
  }

  __device__ __forceinline__ void run() {
    mbarrier::wait(at.owned(), 0);
    if (work.all > 0) step<true>(0, work.begin);
    for (int i = 1, panel = work.begin; i < work.all; ++i) {
      if (++panel == work.end) panel = work.begin;
      step<false>(i, panel);
    }
    if constexpr (DELAYED) {
      if (work.all == 0) return;
      wgmma::fence();
      begin_along<T, D, BN>(d_first, ds, at.first(before));
      finish<0>(d_first);
    }
  }

  // What of weights that were dropped the others make up for.
  __device__ __forceinline__ void scale_values() {
    if constexpr (Variant::kDrops) {
#pragma unroll
      for (float& x : d_second) x *= variant.dropout.scale;
    }
  }

  // Each warpgroup's results take the place of the rows that only it has read.
  __device__ __forceinline__ void store(const RoleMaps& given, float natural_scale) const {
    if constexpr (FIRST_OUT) put<T, D>(own_at, At::kTile * kLine, d_first, natural_scale, natural_scale);
    float of_second = 1;
    if constexpr (Variant::kDrops) of_second = variant.dropout.scale;
    const unsigned second_at = own_at + (FIRST_OUT || SHARED) * At::OWN;
    if constexpr (SECOND_OUT) put<T, DV>(second_at, At::kTile * kLine, d_second, of_second, of_second);
    named_barrier::sync(1 + group, 128);
    if (threadIdx.x % 128 == 0) {
      if (group_row < work.own_rows) {
        const Place to = place_of<Variant>(group_row, work.own_rows, work.own_start, work.batch);
        const Widths<Variant> of(FIRST_OUT ? At::kColumns : 0, SECOND_OUT ? At::kValues : 0, sizes);
        for (int x = 0; x < of.first; x += 64) {
          tma::store(given.out_first, x, to.row, work.own_head, to.batch, own_at + x * At::kTile * 2);
        }
        for (int x = 0; x < of.second; x += 64) {
          tma::store(given.out_second, x, to.row, work.own_head, to.batch, second_at + x * At::kTile * 2);
        }
      }
      tma::end_stores();
      tma::finish_stores();
    }
  }

 private:
  // FIRST is no condition at run time: that would split the products in flight.
  template <bool FIRST> __device__ __forceinline__ void step(int i, int panel) {
    mbarrier::wait(at.full(ring.stage), ring.phase);
    Passing now = {
        panel, KEYS && (Variant::kScores || Variant::kMasks || Variant::kDrops) ? work.head_of(i) : work.head, true};
    if constexpr (Variant::kMaps) now = passing_at(at.entry(ring.stage));
    if constexpr (Variant::kPacked) columns_from = now.panel * BN + lane % 4 * 2;
    wgmma::fence();
    begin_across<T, D, BN, 128>(s, own_at, at.first(ring.stage));
    if constexpr (DELAYED && !FIRST) begin_along<T, D, BN>(d_first, ds, at.first(before));
    if constexpr (FIRST_OUT) begin_across<T, DV, BN, 128>(dp, own_at + At::OWN, at.second(ring.stage));
    draw(now);
    if constexpr (BENDS) {
      finish<0>(s);
      if constexpr (FIRST_OUT) finish<0>(dp);
      if constexpr (DELAYED && !FIRST) {
        finish<0>(d_first);
        release(before);
      }
      mask(now);
      drop();
      changed(now.head, now.panel * BN + lane % 4 * 2);
    } else {
      finish<(DELAYED && !FIRST) + FIRST_OUT>(s);
      mask(now);
      probabilities();
      if constexpr (DELAYED && !FIRST) {
        finish<1>(d_first);
        release(before);
      }
    }
    if constexpr (SECOND_OUT) {
      weigh();
      wgmma::fence();
      begin_along<T, DV, BN>(d_second, p, at.second(ring.stage));
    }
    if constexpr (FIRST_OUT && !BENDS) {
      finish<SECOND_OUT>(dp);
      drop();
      differences();
    }
    if constexpr (SECOND_OUT) finish<0>(d_second);
    if constexpr (FIRST_OUT) round<T>(ds, dp);
    else release(ring.stage);
    if constexpr (FIRST_OUT && !DELAYED) {
      wgmma::fence();
      begin_along<T, D, BN>(d_first, ds, at.first(ring.stage));
      finish<0>(d_first);
      release(ring.stage);
    }
    before = ring.stage;
    ring.advance();
  }

 protected:
  __device__ __forceinline__ void draw(const Passing& now) {
    if constexpr (Variant::kDrops) {
      const int of = work.batch * sizes.heads + now.head, column = now.panel * BN + lane % 4 * 2;
      kept = variant.dropout.template draw<KEYS, BN / 2>(of, row, column);
    }
  }

  // p = P of what is not dropped
  __device__ __forceinline__ void weigh() {
    if constexpr (Variant::kDrops) {
#pragma unroll
      for (int i = 0; i < BN / 4; ++i) p[i] = pack<T>(kept.of(2 * i, s[2 * i]), kept.of(2 * i + 1, s[2 * i + 1]));
    } else {
      round<T>(p, s);
    }
  }

  // Scores in units of log2, with what is added to them: beyond the last query that may be anything.
  __device__ __forceinline__ void shift(const Passing& now) {
    const int column = now.panel * BN + lane % 4 * 2;
    const bool whole = !KEYS || (now.panel + 1) * BN <= work.rows;
#pragma unroll
    for (int e = 0; e < BN / 2; ++e) {
      const int mine = row + e / 2 % 2 * 8, other = column + e / 4 * 8 + e % 2;
      s[e] = s[e] * scale + variant.shift(work.batch, now.head, KEYS ? other : mine, KEYS ? mine : other);
    }
    if (whole) return;
#pragma unroll
    for (int e = 0; e < BN / 2; ++e) {
      if (column + e / 4 * 8 + e % 2 >= work.rows) s[e] = -infinity<float>();
    }
  }

  // Scores of keys that a query does not see are -inf. Of columns those from begin up to end are seen by a row.
  __device__ __forceinline__ void mask(const Passing& now) {
    const int panel = now.panel;
    if constexpr (SHIFTS) shift(now);
    if constexpr (Variant::kMasks) {
      if (now.partial) {
#pragma unroll
        for (int e = 0; e < BN / 2; ++e) {
          const int mine = row + e / 2 % 2 * 8, other = panel * BN + lane % 4 * 2 + e / 4 * 8 + e % 2;
          if (!variant.seen(work.batch, now.head, KEYS ? other : mine, KEYS ? mine : other)) s[e] = -infinity<float>();
        }
      }
    }
    const bool any = KEYS ? (BOUNDS && panel * BN + sizes.high < group_row + 63) ||
                                (BOUNDS == 2 && panel * BN + BN - 1 + sizes.low > group_row)
                          : (panel + 1) * BN > keys_end<BOUNDS>(sizes, group_row) ||
                                (BOUNDS == 2 && panel * BN < keys_begin<BOUNDS>(sizes, group_row + 63));
    if (!any) return;
    const int column = panel * BN + lane % 4 * 2;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int mine = row + 8 * r;
      const int begin = KEYS ? mine - sizes.high - column : keys_begin<BOUNDS>(sizes, mine) - column;
      const int end = KEYS ? mine - sizes.low + 1 - column : keys_end<BOUNDS>(sizes, mine) - column;
#pragma unroll
      for (int i = 0; i < BN / 8; ++i) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int other = 8 * i + j;
          const bool early = (KEYS || BOUNDS == 2) && other < begin, late = (!KEYS || BOUNDS == 2) && other >= end;
          if (early || late) s[4 * i + 2 * r + j] = -infinity<float>();
        }
      }
    }
  }

  // Keys that there are none of have a score of 0, and an lse of less than -128 would make their weights inf.
  __device__ __forceinline__ void outside() {
    if (group_row + 64 <= sizes.keys) return;
#pragma unroll
    for (int e = 0; e < BN / 2; ++e) {
      if (row + e / 2 % 2 * 8 >= sizes.keys) s[e] = -infinity<float>();
    }
  }

  // dp of weights that were dropped is 0, and of the others as much larger as they are.
  __device__ __forceinline__ void drop() {
    if constexpr (FIRST_OUT && Variant::kDrops) {
#pragma unroll
      for (int e = 0; e < BN / 2; ++e) dp[e] = kept.of(e, dp[e] * variant.dropout.scale);
    }
  }

  // s = P and dp = dS of a variant, whose derivative takes the scores: both at once, so that nothing is kept for it.
  __device__ __forceinline__ void changed(int head, int column) {
#pragma unroll
    for (int i = 0; i < BN / 8; ++i) {
      float2 column_lse = {0, 0}, column_delta = {0, 0};
      if (KEYS) column_lse = of_columns(i, 0), column_delta = of_columns(i, ROW);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int e = 4 * i + j, r = j / 2, mine = row + 8 * r, other = column + 8 * i + j % 2;
        const bool outside = s[e] == -infinity<float>();
        const auto found = weights_of(variant, s[e] * scale, work.batch, head, KEYS ? other : mine, KEYS ? mine : other,
                                      KEYS ? j % 2 ? column_lse.y : column_lse.x : own_lse[r], FIRST_OUT ? dp[e] : 0,
                                      KEYS ? j % 2 ? column_delta.y : column_delta.x : own_delta[r]);
        s[e] = outside ? 0 : found.p, dp[e] = outside ? 0 : found.ds;
      }
    }
  }

  // s = P
  __device__ __forceinline__ void probabilities() {
    const float by = SHIFTS ? 1 : scale;
#pragma unroll
    for (int i = 0; i < BN / 8; ++i) {
      float2 column_lse = {0, 0};
      if (KEYS) column_lse = of_columns(i, 0);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int e = 4 * i + 2 * r;
        s[e] = fast_exp2(s[e] * by - (KEYS ? column_lse.x : own_lse[r]));
        s[e + 1] = fast_exp2(s[e + 1] * by - (KEYS ? column_lse.y : own_lse[r]));
      }
    }
  }

  // dp = dS
  __device__ __forceinline__ void differences() {
#pragma unroll
    for (int i = 0; i < BN / 8; ++i) {
      float2 column_delta = {0, 0};
      if (KEYS) column_delta = of_columns(i, ROW);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int e = 4 * i + 2 * r;
        dp[e] = s[e] * (dp[e] - (KEYS ? column_delta.x : own_delta[r]));
        dp[e + 1] = s[e + 1] * (dp[e + 1] - (KEYS ? column_delta.y : own_delta[r]));
      }
    }
  }

  // Of two columns lse2, or with an offset of ROW delta.
  __device__ __forceinline__ float2 of_columns(int i, unsigned offset) const {
    float2 both;
    const unsigned from = at.rows(ring.stage, ROW) + offset + (8 * i + lane % 4 * 2) * 4;
    if constexpr (Variant::kPacked) {  // what comes after the sequence's end is of the next one, and may be anything
      const int left = work.rows - columns_from - 8 * i;
      const float none = offset ? 0 : infinity<float>();
      const unsigned at_first = from + work.start % 4 * 4;
      asm volatile("ld.shared.f32 %0, [%1];" : "=f"(both.x) : "r"(at_first));
      asm volatile("ld.shared.f32 %0, [%1];" : "=f"(both.y) : "r"(at_first + 4));
      both = {left > 0 ? both.x : none, left > 1 ? both.y : none};
    } else {
      asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(both.x), "=f"(both.y) : "r"(from));
    }
    return both;
  }

  // This warp is done with a stage.
  __device__ __forceinline__ void release(int stage) const {
    __syncwarp();
    if (lane == 0) mbarrier::arrive(at.free(stage));
  }
};

}  // namespace attention
