// Attention forward by wgmma and TMA.
#pragma once

#include "attention/wgmma.cuh"

namespace attention {

// A tile of 64 * CONSUMERS queries: its number among those of its head, and how many panels of keys it sees; -1: there is no
// tile left. Within a section the longest tiles come first.
struct alignas(16) Tile {
  int rows, head, batch, panels;

  Tile() = default;
  __device__ __forceinline__ Tile(int number, const Sizes& sizes, int tiles_each) {
    const int all = sizes.heads * sizes.batches, whole = sizes.section * tiles_each;
    const int first = number / whole * sizes.section, in = number % whole, wide = min(sizes.section, all - first);
    rows = tiles_each - 1 - in / wide;
    head = (first + in % wide) % sizes.heads;
    batch = (first + in % wide) / sizes.heads;
  }
};

// What lies where in shared memory, from a multiple of 1024 on, as every panel does. D, DV: elements of a row of keys and of
// values. Where there is room for the queries of two tiles, results take the place of theirs, and the next ones arrive meanwhile.
// Else results leave from registers, so that the next queries arrive as soon as the last scores are computed.
template <int D, int DV, int BN, int CONSUMERS, int STAGES> struct ForwardLayout {
  static constexpr int PLACES = D <= 128 ? 2 : 1;
  static constexpr int ROWS = 64 * CONSUMERS, LINES = (D + 63) / 64, V_LINES = (DV + 63) / 64;
  static constexpr int Q = ROWS * LINES * kLine, K = BN * LINES * kLine, V = BN * V_LINES * kLine;
  static constexpr int K_AT = PLACES * Q, V_AT = K_AT + STAGES * K, BARRIERS_AT = V_AT + STAGES * V;
  static_assert(DV <= D, "results take the place of the queries");
  static_assert(STAGES <= 4, "barriers");
  unsigned base, barriers;
  Tile* next;

  __device__ __forceinline__ explicit ForwardLayout(char* memory) {
    base = (shared_address(memory) + 1023) & ~1023u, barriers = base + BARRIERS_AT;
    next = reinterpret_cast<Tile*>(memory + (barriers - shared_address(memory)) + 512);
  }
  // Of the turn-th tile, by two bits of its number: where its queries are, and the parity of that place's phase.
  static __device__ __forceinline__ int place(int turn) { return PLACES == 2 ? turn & 1 : 0; }
  static __device__ __forceinline__ int parity(int turn) { return PLACES == 2 ? turn >> 1 & 1 : turn & 1; }
  __device__ __forceinline__ unsigned q(int turn) const { return base + place(turn) * Q; }
  __device__ __forceinline__ unsigned q_full(int turn) const { return barriers + 160 * place(turn); }
  __device__ __forceinline__ unsigned q_free(int turn) const { return barriers + 160 * place(turn) + 8; }
  __device__ __forceinline__ unsigned next_full() const { return barriers + 16; }
  __device__ __forceinline__ unsigned next_free() const { return barriers + 24; }
  __device__ __forceinline__ unsigned entry(int i) const { return barriers + 528 + 8 * i; }
  __device__ __forceinline__ Sequence* sequence() const {
    return reinterpret_cast<Sequence*>(next + 4);
  }  // of that tile
  __device__ __forceinline__ unsigned k_full(int i) const { return barriers + 32 + 32 * i; }
  __device__ __forceinline__ unsigned k_free(int i) const { return barriers + 40 + 32 * i; }
  __device__ __forceinline__ unsigned v_full(int i) const { return barriers + 48 + 32 * i; }
  __device__ __forceinline__ unsigned v_free(int i) const { return barriers + 56 + 32 * i; }

  // Panels of keys and values that TMA is to copy nothing to are zeros.
  template <typename Variant> __device__ __forceinline__ void clear(const Sizes& sizes) const {
    if constexpr (Variant::kPacked) {
      const Widths<Variant> of(64 * LINES, 64 * V_LINES, sizes);
      if (of.first == 64 * LINES && of.second == 64 * V_LINES) return;
      for (int i = 0; i < STAGES; ++i) {
        clear_panels(base + K_AT + i * K, BN, of.first, 64 * LINES);
        clear_panels(base + V_AT + i * V, BN, of.second, 64 * V_LINES);
      }
      tma::fence_shared();
    }
  }

  __device__ __forceinline__ void begin() const {
    if (threadIdx.x == 0) {
      for (int i = 0; i < PLACES; ++i) {
        mbarrier::init(q_full(i), 1), mbarrier::init(q_free(i), PLACES == 2 ? CONSUMERS : 4 * CONSUMERS);
      }
      mbarrier::init(next_full(), 1), mbarrier::init(next_free(), 4 * CONSUMERS);
      for (int i = 0; i < STAGES; ++i) {
        mbarrier::init(k_full(i), 1), mbarrier::init(v_full(i), 1);
        mbarrier::init(k_free(i), 4 * CONSUMERS), mbarrier::init(v_free(i), 4 * CONSUMERS);
      }
      mbarrier::fence_init();
    }
    __syncthreads();
  }
};

// The producer, one thread: draws tiles, and keeps TMA busy: the queries once a tile, keys and values in a ring of panels.
template <int D, int DV, int BN, int CONSUMERS, int STAGES, int BOUNDS, typename Variant = Plain>
__device__ __forceinline__ void produce(const ForwardLayout<D, DV, BN, CONSUMERS, STAGES>& at, const TensorMap& q,
                                        const TensorMap& k, const TensorMap& v, int* counter, const Sizes& whole,
                                        const Variant& variant = {}) {
  using At = ForwardLayout<D, DV, BN, CONSUMERS, STAGES>;
  constexpr int ROWS = At::ROWS;
  const int tiles_each = (whole.queries + ROWS - 1) / ROWS, tiles = tiles_each * whole.heads * whole.batches;
  Ring<STAGES> ring;
  int number = blockIdx.x;
  const auto following = [&] {
    return counter ? static_cast<int>(gridDim.x) + atomicAdd(counter, 1) : number + static_cast<int>(gridDim.x);
  };
  for (int turn = 0;; turn = (turn + 1) % 4) {
    Tile tile(number, whole, tiles_each);
    if constexpr (Variant::kPacked) {  // tiles are those of the longest sequence; past the end of a shorter one is none
      while (number < tiles && tile.rows * ROWS >= variant.sequence(whole, tile.batch).sizes.queries) {
        number = following(), tile = Tile(number, whole, tiles_each);
      }
    }
    const auto sequence = sequence_of(variant, whole, number < tiles ? tile.batch : 0);
    const Sizes& sizes = sequence.sizes;
    const int first = tile.rows * ROWS;
    const Panels seen = key_panels<BOUNDS, BN>(sizes, first, first + ROWS - 1);
    int found = max(0, seen.end - seen.begin);
    const int* list = nullptr;  // of the panels, where there is a map
    if constexpr (Variant::kMaps) {
      if (number < tiles) list = variant.map.of(tile.batch, tile.head, tile.rows), found = *list++;
    }
    const int panels = tile.panels = number < tiles ? found : -1;
    mbarrier::wait(at.next_free(), turn % 2 ^ 1);
    *at.next = tile;
    if constexpr (Variant::kPacked) *at.sequence() = sequence;
    mbarrier::arrive(at.next_full());
    if (panels < 0) break;
    number = following();  // early: it takes a while
    const int kv_head = tile.head / sizes.group;
    const Widths<Variant> of(64 * At::LINES, 64 * At::V_LINES, whole);
    const auto load_panel = [&](const TensorMap& map, unsigned to, int columns, int panel, unsigned full,
                                unsigned free) {
      mbarrier::wait(free, ring.phase ^ 1);
      mbarrier::arrive_and_expect(full, columns * BN * 2);
      const Place place = place_of<Variant>(panel * BN, sizes.keys, sequence.key, tile.batch);
      for (int x = 0; x < columns; x += 64) {
        tma::load(to + x * BN * 2, map, x, place.row, kv_head, place.batch, full);
      }
    };
    const auto load_queries = [&] {
      mbarrier::wait(at.q_free(turn), At::parity(turn) ^ 1);
      mbarrier::arrive_and_expect(at.q_full(turn), At::Q);
      const Place place = place_of<Variant>(first, sizes.queries, sequence.query, tile.batch);
      for (int x = 0; x < D; x += 64) {
        const int from = x < of.first ? x : 0;  // keys have zeros where queries have no elements: any numbers will do
        tma::load(at.q(turn) + x * ROWS * 2, q, from, place.row, tile.head, place.batch, at.q_full(turn));
      }
    };
    for (int i = panels - 1; i >= 0; --i) {
      int panel = seen.begin + i;
      if constexpr (Variant::kMaps) {
        const int entry = list[i];
        panel = entry / 2;
        mbarrier::wait(at.k_free(ring.stage), ring.phase ^ 1);
        put_entry(at.entry(ring.stage), entry, 0);
      }
      load_panel(k, at.base + At::K_AT + ring.stage * At::K, of.first, panel, at.k_full(ring.stage),
                 at.k_free(ring.stage));
      if (i == panels - 1) load_queries();  // their place is taken for longer than a panel's
      load_panel(v, at.base + At::V_AT + ring.stage * At::V, of.second, panel, at.v_full(ring.stage),
                 at.v_free(ring.stage));
      ring.advance();
    }
    if (panels == 0) load_queries();
  }
}

// A consumer, a warpgroup: owns 64 queries of each tile. While the scores of one panel and the product of the panel before with
// its values are computed, nothing waits: softmax lies between the two. Named barriers make the warpgroups take turns, so that
// the softmax of one hides behind the products of another.
template <typename T, int D, int DV, int BN, int CONSUMERS, int STAGES, int BOUNDS, typename Variant = Plain>
__device__ __forceinline__ void consume(const ForwardLayout<D, DV, BN, CONSUMERS, STAGES>& at, const TensorMap& y,
                                        T* y_rows, const Strides& ys, float* lse, const float* sinks,
                                        float natural_scale, const Sizes& whole, const Variant& variant = {}) {
  using At = ForwardLayout<D, DV, BN, CONSUMERS, STAGES>;
  constexpr int ROWS = At::ROWS;
  const int group = __shfl_sync(~0u, threadIdx.x / 128, 0) - 1;  // the compiler then knows that a warp shares it
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const int own_turn = 1 + group, next_turn = 1 + (group + 1) % CONSUMERS, own_meeting = 4 + group;
  const unsigned k_at = at.base + At::K_AT, v_at = at.base + At::V_AT;
  const bool storer = threadIdx.x % 128 == 0;
  // of wider rows a shift is a score as any other: they are as quick
  constexpr bool SHIFTS = Variant::kShifts && D == 64, BENDS = Variant::kScores && !SHIFTS;
  // of scores as softmax has them, which are in units of log2 where they are shifted
  const float score_scale = BENDS ? 1 : SHIFTS ? 1 / kLog2E : natural_scale;
  const float scale = SHIFTS ? 1 : score_scale * kLog2E;
  Ring<STAGES> ring;
  bool started = false;
  if (group == CONSUMERS - 1) named_barrier::arrive(1, 256);  // the first warpgroup begins

  for (int turn = 0;; turn = (turn + 1) % 4) {
    mbarrier::wait(at.next_full(), turn % 2);
    const Tile tile = *at.next;
    const auto sequence = [&] {
      if constexpr (Variant::kPacked) return Sequence(*at.sequence());
      else return Whole{whole};
    }();
    const Sizes& sizes = sequence.sizes;
    const int panels = __shfl_sync(~0u, tile.panels, 0);
    __syncwarp();  // all lanes have read the tile
    if (lane == 0) mbarrier::arrive(at.next_free());
    if (panels < 0) break;
    const int first_row = tile.rows * ROWS + group * 64, row = first_row + warp * 16 + lane / 4;
    const int seen_by_all = keys_end<BOUNDS>(sizes, first_row);  // by all rows of the warpgroup
    const int begun_by_all = keys_begin<BOUNDS>(sizes, first_row + 63);
    const int first_panel = Variant::kMaps ? 0 : keys_begin<BOUNDS>(sizes, tile.rows * ROWS) / BN;

    const unsigned own_at = at.q(turn) + group * 64 * kLine;

    float sums[BN / 2], out[DV / 2], highest[2] = {-infinity<float>(), -infinity<float>()}, total[2] = {0, 0},
                                     shrink[2];
    unsigned weights[BN / 4];
    Kept<BN / 2> kept;  // of the panel that comes
#pragma unroll
    for (int i = 0; i < DV / 2; ++i) out[i] = 0;

    const auto scores = [&] {  // sums = q k^T, begun
      wgmma::fence();
      begin_across<T, D, BN, ROWS>(sums, own_at, k_at + ring.stage * At::K);
    };
    const auto values = [&](int stage) {  // out += weights v, begun
      wgmma::fence();
      begin_along<T, DV, BN>(out, weights, v_at + stage * At::V);
    };
    const auto passing = [&](int i) -> Passing {  // the i-th panel of a map, which is at k_full
      if constexpr (Variant::kMaps) return passing_at(at.entry(ring.stage));
      else return {i, tile.head, true};
    };
    const auto softmax =
        [&](const Passing& now) {  // sums = exp(sums * scale - new maximum); shrink: by how much the old ones do
          const int panel = now.panel;
          if constexpr (BENDS || SHIFTS) {
            const int column = panel * BN + lane % 4 * 2;
#pragma unroll
            for (int e = 0; e < BN / 2; ++e) {
              const int query = row + e / 2 % 2 * 8, key = column + e / 4 * 8 + e % 2;
              if constexpr (BENDS) {
                sums[e] = variant.score(sums[e] * natural_scale, tile.batch, tile.head, query, key);
              } else {
                sums[e] = sums[e] * (natural_scale * kLog2E) + variant.shift(tile.batch, tile.head, query, key);
              }
            }
          }
          if constexpr (Variant::kMasks) {
            if (now.partial) {
#pragma unroll
              for (int e = 0; e < BN / 2; ++e) {
                const int key = panel * BN + lane % 4 * 2 + e / 4 * 8 + e % 2;
                if (!variant.seen(tile.batch, tile.head, row + e / 2 % 2 * 8, key)) sums[e] = -infinity<float>();
              }
            }
          }
          if ((panel + 1) * BN > seen_by_all || (BOUNDS == 2 && panel * BN < begun_by_all)) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
              const int column = panel * BN + lane % 4 * 2;
              const int end = keys_end<BOUNDS>(sizes, row + 8 * r) - column;
              const int begin = keys_begin<BOUNDS>(sizes, row + 8 * r) - column;
#pragma unroll
              for (int i = 0; i < BN / 8; ++i) {
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                  const int key = 8 * i + j;
                  if (key >= end || (BOUNDS == 2 && key < begin)) sums[4 * i + 2 * r + j] = -infinity<float>();
                }
              }
            }
          }
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            float top = highest[r];
#pragma unroll
            for (int i = 0; i < BN / 8; ++i) top = fmaxf(top, fmaxf(sums[4 * i + 2 * r], sums[4 * i + 2 * r + 1]));
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
            const float zero = top == -infinity<float>() ? 0 : top * scale;  // a row that has seen no key yet
            shrink[r] = fast_exp2(highest[r] * scale - zero);
            highest[r] = top;
            float sum = 0;
#pragma unroll
            for (int i = 0; i < BN / 8; ++i) {
#pragma unroll
              for (int j = 0; j < 2; ++j) {
                float& x = sums[4 * i + 2 * r + j];
                sum += x = fast_exp2(x * scale - zero);
              }
            }
            total[r] = total[r] * shrink[r] + sum;
          }
        };
    const auto release = [&](unsigned barrier) {
      if constexpr (Variant::kMaps) __syncwarp();  // all lanes have read the entry; wgmma waits for itself
      if (lane == 0) mbarrier::arrive(barrier);
    };
    const auto draw = [&](const Passing& now) {
      if constexpr (Variant::kDrops) {
        const int of = tile.batch * sizes.heads + tile.head;
        kept = variant.dropout.template draw<false, BN / 2>(of, row, now.panel * BN + lane % 4 * 2);
      }
    };
    const auto drop = [&] {
      if constexpr (Variant::kDrops) {
#pragma unroll
        for (int e = 0; e < BN / 2; ++e) sums[e] = kept.of(e, sums[e]);
      }
    };

    // The results of the tile before have left their place, for the queries of the next one.
    const auto leave = [&](int of) {
      if (storer) tma::wait_for_stores<0>(), mbarrier::arrive(at.q_free(of));
    };
    const auto leave_before = [&] {
      if (At::PLACES == 2 && started) leave(turn + 1);
      started = true;
    };
    // The last scores of the tile are computed: nobody reads its queries any more.
    const auto leave_queries = [&] {
      if constexpr (At::PLACES == 1) release(at.q_free(turn));
    };

    mbarrier::wait(at.q_full(turn), At::parity(turn));
    int unseen = 0;  // of the tile's panels, those that pass first and that no row of this warpgroup sees
    if constexpr ((CONSUMERS == 3 || D > 128) && BOUNDS && !Variant::kMaps) {  // tiles or panels that do not end alike
      const int end = first_row < sizes.queries ? max(0, keys_end<BOUNDS>(sizes, first_row + 63)) : 0;
      unseen = __shfl_sync(~0u, min(panels, max(0, first_panel + panels - (end + BN - 1) / BN)), 0);
      for (int i = 0; i < unseen; ++i) {  // they pass, and its turns
        mbarrier::wait(at.k_full(ring.stage), ring.phase);
        release(at.k_free(ring.stage));
        if (i + 1 < panels) named_barrier::sync(own_turn, 256), named_barrier::arrive(next_turn, 256);
        mbarrier::wait(at.v_full(ring.stage), ring.phase);
        release(at.v_free(ring.stage));
        ring.advance();
      }
    }
    if (panels > unseen) {
      Ring<STAGES> before = ring;  // where the values of the panel before lie
      mbarrier::wait(at.k_full(ring.stage), ring.phase);
      const Passing first = passing(first_panel + panels - unseen - 1);
      scores();
      draw(first);
      finish<0>(sums);
      release(at.k_free(ring.stage));
      if (panels == unseen + 1) leave_queries();
      leave_before();
      softmax(first);
      drop();
      round<T>(weights, sums);
      ring.advance();
      for (int panel = first_panel + panels - unseen - 2; panel >= first_panel; --panel) {
        mbarrier::wait(at.k_full(ring.stage), ring.phase);
        const Passing now = passing(panel);
        named_barrier::sync(own_turn, 256);
        scores();
        mbarrier::wait(at.v_full(before.stage), before.phase);
        values(before.stage);
        named_barrier::arrive(next_turn, 256);
        draw(now);
        finish<1>(sums);
        release(at.k_free(ring.stage));
        if (panel == first_panel) leave_queries();
        softmax(now);
        drop();
        finish<0>(out);
        release(at.v_free(before.stage));
#pragma unroll
        for (int i = 0; i < DV / 2; ++i) out[i] *= shrink[i / 2 % 2];
        round<T>(weights, sums);
        before = ring;
        ring.advance();
      }
      mbarrier::wait(at.v_full(before.stage), before.phase);
      values(before.stage);
      finish<0>(out);
      release(at.v_free(before.stage));
    } else {
      leave_queries();
      leave_before();
    }

    const float sink = sinks ? sinks[tile.head] : -infinity<float>();
    float inverse[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      total[r] += __shfl_xor_sync(~0u, total[r], 1);
      total[r] += __shfl_xor_sync(~0u, total[r], 2);
      highest[r] *= score_scale;
      shrink[r] = add_sink(sink, highest[r], total[r]);
      inverse[r] = shrink[r] * (1 / total[r]);
      if constexpr (Variant::kDrops) inverse[r] *= variant.dropout.scale;
      if (lane % 4 == 0 && row + 8 * r < sizes.queries) {
        const long long of = Variant::kPacked
                                 ? static_cast<long long>(tile.head) * sizes.padded + sequence.query
                                 : (static_cast<long long>(tile.batch) * sizes.heads + tile.head) * sizes.queries;
        lse[of + row + 8 * r] = highest[r] + logf(total[r]);
      }
    }
    if constexpr (At::PLACES == 2) {
      named_barrier::sync(own_meeting, 128);  // all have read their queries
      put<T, DV>(own_at, kLine * ROWS, out, inverse[0], inverse[1]);
      named_barrier::sync(own_meeting, 128);
      if (storer) {
        if (first_row < sizes.queries) {
          const Place place = place_of<Variant>(first_row, sizes.queries, sequence.query, tile.batch);
          const Widths<Variant> of(64 * At::LINES, 64 * At::V_LINES, whole);
          for (int x = 0; x < of.second; x += 64) {
            tma::store(y, x, place.row, tile.head, place.batch, own_at + x * 2 * ROWS);
          }
        }
        tma::end_stores();
      }
    } else {
      const int batch = Variant::kPacked ? 0 : tile.batch;
      T* to = y_rows + batch * ys.batch + tile.head * ys.head + (sequence.query + row) * ys.row;
      store_rows<T, DV>(to, ys.row, sizes.queries - row, sizes.value_width, out, inverse[0], inverse[1]);
    }
  }
  if (group == 0) named_barrier::sync(1, 256);  // takes the last signal, so that none is left over
  tma::finish_stores();
}

}  // namespace attention
