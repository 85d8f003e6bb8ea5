// y[m, n] = sum over k of a[m, k] b[n, k] + bias[n], for each of a batch, on Hopper's tensor cores (sm_90a).
//
// A block has a producer warp, which has TMA fill a ring of stages in shared memory, and two consumer warpgroups, which multiply
// with wgmma and store through shared memory and TMA. The grid is persistent: a block takes tile after tile.
//
//     producer    wait(empty[s])  expect(full[s])  TMA: a panel of a, a panel of b -> stage s        s = 0, 1 ... STAGES - 1, 0
//     consumers   wait(full[s])   wgmma: sums += stage s          arrive(empty[s - 1])
//                 after the last of k: sums + bias, rounded -> registers -> shared memory -> TMA: y
//
// A half-precision result of an aligned y is stored by TMA; of a y whose rows begin off 16-byte boundaries by single elements.
//
// What is stored of the sums is the epilogue's: see Sums, Activated, Gated and Computed. Products of 8-bit numbers, see Scaled, count
// them by two: of k, in stages and in maps, they are half as many elements of 16 bits.
#pragma once

#include "gemm/wgmma_block.cuh"

namespace wgmma_gemm {

// The next stage of one operand: `ROWS` rows of kK. Each of PARTS blocks of the cluster fetches a part of it for all of them.
template <bool MN, int ROWS, int PARTS>
__device__ __forceinline__ void load_operand(unsigned to, const TensorMap& map, int row, int k, int batch,
                                             unsigned barrier, int part) {
  const auto load = [&](unsigned to, int x, int y) {
    if constexpr (PARTS == 1) tma::load(to, map, x, y, batch, barrier);
    else tma::load_to_blocks(to, map, x, y, batch, barrier, (1 << PARTS) - 1);
  };
  if constexpr (MN) {
#pragma unroll
    for (int i = 0; i < ROWS / 64; ++i) {  // boxes of 64 rows
      if (i % PARTS == part) load(to + 8192 * i, row + 64 * i, k);
    }
  } else {
    load(to + part * (ROWS / PARTS) * 128, k, row + part * (ROWS / PARTS));
  }
}

// The same of two operands, of which each gives half of the rows. In a cluster of two each block fetches one of them.
template <bool MN, int ROWS, int PARTS>
__device__ __forceinline__ void load_both(unsigned to, const TensorMap& first, const TensorMap& second, int row, int k,
                                          unsigned barrier, int part) {
  constexpr int BYTES = ROWS / 2 * 128;
  if constexpr (PARTS == 1) {
    load_operand<MN, ROWS / 2, 1>(to, first, row, k, 0, barrier, 0);
    load_operand<MN, ROWS / 2, 1>(to + BYTES, second, row, k, 0, barrier, 0);
  } else {
    static_assert(!MN, "its boxes are dealt out one by one");
    tma::load_to_blocks(to + part * BYTES, part ? second : first, k, row, 0, barrier, (1 << PARTS) - 1);
  }
}

// The producer: one thread.
template <typename T, class S, bool A_MN, bool B_MN, class E>
__device__ __forceinline__ void produce(const Block<T, S>& block) {
  const Problem<T>& p = block.p;
  Ring<S::STAGES> ring;
  const int tiles = block.template all_tiles<E>();
  for (int tile = block.first; tile < tiles; tile += block.step) {
    const Place at = block.template place_of<E>(tile);
    const Range range = block.template range<E>(at.batch);
    [[maybe_unused]] int k_from = 0;
    if constexpr (E::SHARES) k_from = block.group(at.batch).first;
    for (int i = range.start; i < range.start + range.blocks; ++i, ring.advance()) {
      const unsigned full = block.full + 8 * ring.stage, to = block.stages + ring.stage * S::STAGE_BYTES;
      mbarrier::wait(block.empty + 8 * ring.stage, ring.phase ^ 1);
      mbarrier::arrive_and_expect(full, S::STAGE_BYTES);
      load_operand<A_MN, S::M, 1>(to, p.a, at.row, k_from + i * kK, at.batch * p.a_moves, full, 0);
      if constexpr (E::GATED) {
        load_both<B_MN, S::N, S::CLUSTER>(to + S::A_BYTES, p.b, p.up, at.column, i * kK, full, block.rank);
      } else {
        load_operand<B_MN, S::N, S::CLUSTER>(to + S::A_BYTES, p.b, at.column, k_from + i * kK, at.batch * p.b_moves,
                                             full, S::CLUSTER > 1 ? block.rank : 0);
      }
    }
  }
  if (S::CLUSTER > 1) {  // stay until the other blocks have told of the last stages
    for (int i = 0; i < S::STAGES; ++i, ring.advance()) mbarrier::wait(block.empty + 8 * ring.stage, ring.phase ^ 1);
  }
}

// f of an index that the compiler knows, as that of a register must be known: the one that equals `index`, found by halving.
template <int FIRST, int COUNT, typename F> __device__ __forceinline__ void at_index(int index, F f) {
  constexpr int HALF = COUNT / 2;
  if constexpr (COUNT == 1) f(FIRST);
  else if (index < FIRST + HALF) at_index<FIRST, HALF>(index, f);
  else at_index<FIRST + HALF, COUNT - HALF>(index, f);
}

// A move that stays in its branch, where the compiler would choose among all registers by selects.
__device__ __forceinline__ void move(float& to, float from) { asm volatile("mov.b32 %0, %1;" : "=f"(to) : "f"(from)); }
__device__ __forceinline__ void move(float& to, unsigned bits) {
  asm volatile("mov.b32 %0, %1;" : "=f"(to) : "r"(bits));
}
__device__ __forceinline__ void move(unsigned& bits, float from) {
  asm volatile("mov.b32 %0, %1;" : "=r"(bits) : "f"(from));
}

// One of two consumer warpgroups.
template <typename T, class S, bool A_MN, bool B_MN, class E> struct Consumer {
  static_assert(E::GATED == S::GATED, "two operands have an epilogue for both");
  static_assert(!(E::ROWS || E::SHARES) || !(S::PINGPONG || S::SPLIT > 1 || S::CLUSTER > 1), "groups differ in tiles");
  static_assert(!E::SHARES || (A_MN && B_MN), "a line of a stage is one k of both operands");
  static_assert(!E::SCALED || !(A_MN || B_MN), "8-bit operands are K-major");
  static_assert(!E::SCALED || !(S::LATE || S::PINGPONG),
                "it has registers to add sums in fp32, and a consumer beside it");
  static constexpr int kBiases = (S::STORED + 127) / 128;  // of a tile, in each thread
  static constexpr bool kWide = E::SCALED && sizeof(T) == 4;  // the result is of fp32

  const Block<T, S>& block;
  const Problem<T>& p;
  const int me, thread, lane;
  const int down, across;  // where its part of a tile begins
  const unsigned slots, line;
  float* const biases;
  Ring<S::STAGES> ring;
  unsigned results[S::PIECES][S::PIECE / 4];  // that are to be stored: 64 x PIECE each, two to a register
  int unstored = 0;  // of these pieces
  unsigned tiles_added = 0;
  Place to;  // where the first of them goes
  typename E::template Rows<T, S> rows;

  __device__ __forceinline__ explicit Consumer(const Block<T, S>& block, int warp)
      : block(block),
        p(block.p),
        me(warp / 4 - 1),
        thread(threadIdx.x % 128),
        lane(threadIdx.x % 32),
        down(S::PINGPONG || S::BESIDE ? 0 : me * (S::M / 2)),
        across(S::BESIDE ? me * S::COLUMNS : 0),
        slots(block.slots + me * S::SLOTS * S::PIECE_BYTES),
        line(tma::swizzle<S::PIECE * 2>((thread / 32 * 16 + lane % 16) * S::PIECE * 2 + lane / 16 * 16)),
        biases(block.biases + me * S::N) {}

  // Tile after tile; with PINGPONG every other one. PROMOTED is the problem's: two loops, since the compiler lets no products overlap
  // whose sums it finds in one place with others.
  template <bool PROMOTED> __device__ __forceinline__ void run() {
    unsigned turn = me == 0;
    if (S::PINGPONG) ring.advance(me * block.blocks);
    const int step = S::PINGPONG ? 2 * block.step : block.step;
    const int tiles = block.template all_tiles<E>();
    for (int tile = block.first + (S::PINGPONG ? me * block.step : 0); tile < tiles; tile += step) {
      const int slice = S::SPLIT > 1 ? block.rank : 0;
      float bias[kBiases];  // of this tile's columns thread, thread + 128
#pragma unroll
      for (int i = 0; i < kBiases; ++i) bias[i] = -0.f;  // added to a sum it changes nothing
      if (p.bias) {
        const int first = block.place(tile).column + across + slice * S::STORED + thread;
#pragma unroll
        for (int i = 0; i < kBiases; ++i) {
          if (first + 128 * i < p.n) bias[i] = to_acc(p.bias[first + 128 * i]);
        }
      }
      [[maybe_unused]] float of_columns[kBiases] = {}, of_rows[2 * S::ROWS] = {};  // scales
      if constexpr (E::SCALED) load_scales(of_columns, of_rows, block.place(tile), slice);
      float sums[S::ROWS][S::COLUMNS / 2];
      if constexpr (E::ADDED) load_added(block.place(tile));
      if (S::PINGPONG) mbarrier::wait(block.turns + 8 * me, turn), turn ^= 1;
      if constexpr (E::SHARES) {
        const int batch = block.place(tile).batch, blocks = block.template range<E>(batch).blocks;
        multiply(sums, blocks, block.group(batch).size() - (blocks - 1) * kK);
      } else if constexpr (PROMOTED) {
        multiply_promoted(sums, block.blocks);
      } else {
        multiply(sums, block.blocks);
      }
      if constexpr (S::SPLIT > 1) add_shares(sums, slice);
      asm volatile("" : "+r"(tile));  // its place is found now, and not kept meanwhile: registers are short
      to = block.template place_of<E>(tile);
      if constexpr (E::ROWS) to.batch = 0;  // of y
      to.row += down, to.column += across + slice * S::STORED;
      if constexpr (E::SCALED) rescale(sums, of_columns, of_rows);
      if constexpr (kWide) {
        store_wide(sums, bias);
      } else {
        if constexpr (E::GATED) gate(sums);
        else if constexpr (E::COMPUTED) compute(sums, bias);
        else if constexpr (E::ADDED) add(sums);
        else if (E::ACTIVATED || p.bias) round<true>(sums, bias);
        else round<false>(sums, bias);
        unstored = S::PIECES;
        if (!S::LATE) {
#pragma unroll
          for (int i = 0; i < S::PIECES; ++i) store(i);
        }
      }
    }
    while (S::LATE && unstored) store_next();
    if (thread == 0) tma::wait_for_stores<0>();
    if constexpr (E::MEASURED) {
      named_barrier::sync(1 + me, 128);
      rows.save(block, me, slots);
    }
  }

 private:
  // The sums over all of this block's k; meanwhile, with LATE, the pieces of the tile before are stored.
  // last: lines of the last stage that are this group's.
  __device__ __forceinline__ void multiply(float (&sums)[S::ROWS][S::COLUMNS / 2], int blocks, int last = kK) {
    const unsigned long long a_first = wgmma::descriptor<A_MN>(block.stages + down * 128);
    const unsigned long long b_first = wgmma::descriptor<B_MN>(block.stages + S::A_BYTES + across * 128);
    unsigned before = 0;
    for (int i = 0; i < blocks; ++i) {
      mbarrier::wait(block.full + 8 * ring.stage, ring.phase);
      const unsigned long long at = ring.stage * (S::STAGE_BYTES >> 4), a = a_first + at, b = b_first + at;
      if (E::SHARES && last < kK && i == blocks - 1) clear_lines(last);
      wgmma::fence();
#pragma unroll
      for (int k = 0; k < kK / wgmma::kK; ++k) {
#pragma unroll
        for (int j = 0; j < S::ROWS; ++j) {
          E::template Product<T, S::COLUMNS, A_MN, B_MN>::add(sums[j], a + k * wgmma::kStep<A_MN> + j * (64 * 128 >> 4),
                                                              b + k * wgmma::kStep<B_MN>, i || k);
        }
      }
      wgmma::end_group();
      if (S::LATE && unstored) store_next();
      if (i) wgmma::wait_for_groups<1>(), release(before);
      before = ring.stage;
      ring.advance();
    }
    if (S::PINGPONG) {
      if (lane == 0) mbarrier::arrive(block.turns + 8 * (me ^ 1));
      ring.advance(blocks);
    }
    while (S::LATE && unstored) store_next();  // there was too little of k
    wgmma::wait_for_groups<0>();
    release(before);
#pragma unroll
    for (int j = 0; j < S::ROWS; ++j) {
#pragma unroll
      for (int i = 0; i < S::COLUMNS / 2; ++i) wgmma::keep_behind(sums[j][i]);
    }
  }

  // The same where sums in the tensor cores have few bits: those of a stage are added in fp32, while the other consumer multiplies.
  __device__ __forceinline__ void multiply_promoted(float (&sums)[S::ROWS][S::COLUMNS / 2], int blocks) {
    const unsigned long long a_first = wgmma::descriptor<A_MN>(block.stages + down * 128);
    const unsigned long long b_first = wgmma::descriptor<B_MN>(block.stages + S::A_BYTES + across * 128);
#pragma unroll
    for (int j = 0; j < S::ROWS; ++j) {
#pragma unroll
      for (int i = 0; i < S::COLUMNS / 2; ++i) sums[j][i] = 0;
    }
    float part[S::COLUMNS / 2] = {};
    for (int i = 0; i < blocks; ++i, ring.advance()) {
      mbarrier::wait(block.full + 8 * ring.stage, ring.phase);
      const unsigned long long at = ring.stage * (S::STAGE_BYTES >> 4), a = a_first + at, b = b_first + at;
#pragma unroll
      for (int j = 0; j < S::ROWS; ++j) {
#pragma unroll
        for (int i = 0; i < S::COLUMNS / 2; ++i) wgmma::keep_behind(part[i]);  // in its registers before the fence
        wgmma::fence();
#pragma unroll
        for (int k = 0; k < kK / wgmma::kK; ++k) {
          E::template Product<T, S::COLUMNS, A_MN, B_MN>::add(part, a + k * wgmma::kStep<A_MN> + j * (64 * 128 >> 4),
                                                              b + k * wgmma::kStep<B_MN>, k);
        }
        wgmma::end_group();
        wgmma::wait_for_groups<0>();
        if (j == S::ROWS - 1) release(ring.stage);
#pragma unroll
        for (int i = 0; i < S::COLUMNS / 2; ++i) {
          wgmma::keep_behind(part[i]);
          sums[j][i] += part[i];
        }
      }
    }
  }

  // Zeros for the lines from `first` on of both operands in this stage, by both consumers: they are the next group's.
  __device__ __forceinline__ void clear_lines(int first) const {
    const unsigned stage = block.stages + ring.stage * S::STAGE_BYTES;
    const int vectors = (kK - first) * 8;  // of each box of kK lines
    for (int i = threadIdx.x - 128; i < vectors * ((S::M + S::N) / 64); i += 256) {
      asm volatile(
          "st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(stage + i / vectors * 8192 + first * 128 + i % vectors * 16),
          "r"(0)
          : "memory");
    }
    tma::fence_shared();
    named_barrier::sync(3, 256);
  }

  // This warp is done with a stage: tells all blocks that fill it.
  __device__ __forceinline__ void release(unsigned stage) const {
    __syncwarp();
    if (S::CLUSTER == 1) {
      if (lane == 0) mbarrier::arrive(block.empty + 8 * stage);
    } else if (lane < S::CLUSTER) {
      mbarrier::arrive_remote(mbarrier::in_block(block.empty + 8 * stage, lane));
    }
  }

  // Where k is split: each block of the cluster adds up its share of the columns, of which it reads the others' sums.
  __device__ __forceinline__ void add_shares(float (&sums)[S::ROWS][S::COLUMNS / 2], int slice) const {
    constexpr int SHARE = S::STORED / 2;  // of each row's numbers in this thread
    const unsigned mine = block.stages + 16 * (me * S::ROWS * (S::COLUMNS / 8) * 128 + thread);
    named_barrier::sync(3, 256);  // the stages are free
#pragma unroll
    for (int j = 0; j < S::ROWS; ++j) {
#pragma unroll
      for (int i = 0; i < S::COLUMNS / 2; i += 4) {
        if (i / SHARE == slice) continue;
        asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(mine + 2048 * (j * (S::COLUMNS / 8) + i / 4)),
                     "f"(sums[j][i]), "f"(sums[j][i + 1]), "f"(sums[j][i + 2]), "f"(sums[j][i + 3])
                     : "memory");
      }
    }
    __syncwarp();
    if (lane < S::SPLIT) mbarrier::arrive_remote_release(mbarrier::in_block(block.turns, lane));
    mbarrier::wait_acquire(block.turns, 0);
#pragma unroll
    for (int j = 0; j < S::ROWS; ++j) {
#pragma unroll
      for (int i = 0; i < SHARE; ++i) {
#pragma unroll
        for (int share = 1; share < S::SPLIT; ++share) {
          if (share == slice) sums[j][i] = sums[j][share * SHARE + i];
        }
      }
    }
#pragma unroll
    for (int next = 1; next < S::SPLIT; ++next) {
      const unsigned theirs = mbarrier::in_block(mine, (slice + next) % S::SPLIT) + 2048 * (slice * (SHARE / 4));
#pragma unroll
      for (int j = 0; j < S::ROWS; ++j) {
#pragma unroll
        for (int i = 0; i < SHARE; i += 4) {
          float4 part;
          asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                       : "=f"(part.x), "=f"(part.y), "=f"(part.z), "=f"(part.w)
                       : "r"(theirs + 2048 * (j * (S::COLUMNS / 8) + i / 4))
                       : "memory");
          sums[j][i] += part.x, sums[j][i + 1] += part.y, sums[j][i + 2] += part.z, sums[j][i + 3] += part.w;
        }
      }
    }
  }

  // The scales of this thread's columns, as biases are held, and of its rows.
  __device__ __forceinline__ void load_scales(float (&of_columns)[kBiases], float (&of_rows)[2 * S::ROWS],
                                              const Place& at, int slice) const {
    const int column = at.column + across + slice * S::STORED + thread;
#pragma unroll
    for (int i = 0; i < kBiases; ++i) {
      if (column + 128 * i < p.n) of_columns[i] = p.scale_b[(column + 128 * i) * p.by_row];
    }
    const int row = at.row + down + thread / 32 * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < 2 * S::ROWS; ++i) {
      if (row + i / 2 * 64 + i % 2 * 8 < p.m) of_rows[i] = p.scale_a[(row + i / 2 * 64 + i % 2 * 8) * p.by_row];
    }
  }

  // sums times both scales.
  __device__ __forceinline__ void rescale(float (&sums)[S::ROWS][S::COLUMNS / 2], const float (&of_columns)[kBiases],
                                          const float (&of_rows)[2 * S::ROWS]) const {
    share(of_columns);
#pragma unroll
    for (int c = 0; c < S::STORED / 8; ++c) {
      const float2 scale = *reinterpret_cast<const float2*>(&biases[c * 8 + lane % 4 * 2]);
#pragma unroll
      for (int i = 0; i < 2 * S::ROWS; ++i) {
        float* const pair = &sums[i / 2][4 * c + i % 2 * 2];
        pair[0] *= of_rows[i] * scale.x, pair[1] *= of_rows[i] * scale.y;
      }
    }
  }

  // What each thread has of a number for each column goes where all of this consumer read it.
  __device__ __forceinline__ void share(const float (&values)[kBiases]) const {
    named_barrier::sync(1 + me, 128);
#pragma unroll
    for (int i = 0; i < kBiases; ++i) {
      if (128 * i + thread < S::STORED) biases[128 * i + thread] = values[i];
    }
    named_barrier::sync(1 + me, 128);
  }

  // sums + bias as they are, in fp32: eight bytes of each thread, 32 of each row.
  __device__ __forceinline__ void store_wide(const float (&sums)[S::ROWS][S::COLUMNS / 2],
                                             const float (&bias)[kBiases]) const {
    if (p.bias) share(bias);
#pragma unroll
    for (int c = 0; c < S::STORED / 8; ++c) {
      const int column = to.column + c * 8 + lane % 4 * 2;
      float2 add = {-0.f, -0.f};
      if (p.bias) add = *reinterpret_cast<const float2*>(&biases[c * 8 + lane % 4 * 2]);
#pragma unroll
      for (int i = 0; i < 2 * S::ROWS; ++i) {
        const int row = to.row + i / 2 * 64 + thread / 32 * 16 + lane / 4 + i % 2 * 8;
        if (row >= p.m || column >= p.n) continue;
        const float* const pair = &sums[i / 2][4 * c + i % 2 * 2];
        float* const at = p.data + static_cast<long long>(row) * p.n + column;
        if (p.n % 2 == 0) {
          *reinterpret_cast<float2*>(at) = {pair[0] + add.x, pair[1] + add.y};
        } else {
          at[0] = pair[0] + add.x;
          if (column + 1 < p.n) at[1] = pair[1] + add.y;
        }
      }
    }
  }

  // sums + bias, or what the activation makes of that, rounded once, to `results`.
  template <bool BIAS>
  __device__ __forceinline__ void round(const float (&sums)[S::ROWS][S::COLUMNS / 2], const float (&bias)[kBiases]) {
    if constexpr (BIAS) share(bias);
#pragma unroll
    for (int i = 0; i < S::PIECES; ++i) {
      [[maybe_unused]] unsigned kept[S::PIECE / 4];
#pragma unroll
      for (int c = 0; c < S::PIECE / 4;
           ++c) {  // row g, columns 2t, 2t + 1; row g + 8, the same; then 8 columns further
        const float* pair = &sums[i / S::ACROSS][i % S::ACROSS * S::PIECE / 2 + 2 * c];
        float2 add = {-0.f, -0.f};
        if constexpr (BIAS)
          add = *reinterpret_cast<const float2*>(&biases[i % S::ACROSS * S::PIECE + c / 2 * 8 + lane % 4 * 2]);
        if constexpr (E::ACTIVATED) {
          const float2 z = {pair[0] + add.x, pair[1] + add.y};
          results[i][c] = packed<T>(E::F::template value<T>(z.x), E::F::template value<T>(z.y));
          kept[c] = packed<T>(z.x, z.y);
        } else {
          results[i][c] = packed<T>(pair[0] + add.x, pair[1] + add.y);
        }
      }
      if constexpr (E::ACTIVATED) {
        if (p.kept) keep(i % S::SLOTS, i, 0, [&](int c) { return kept[c]; });
      }
    }
  }

  // f(gate) up, rounded once, to `results`: a thread has both sums of a column, the first operand's in its first half.
  __device__ __forceinline__ void gate(const float (&sums)[S::ROWS][S::COLUMNS / 2]) {
#pragma unroll
    for (int i = 0; i < S::PIECES; ++i) {
      const float* const first = &sums[i / S::ACROSS][i % S::ACROSS * S::PIECE / 2];
      const float* const second = first + S::STORED / 2;
      if (p.kept) {
        keep(2 * i % S::SLOTS, i, 0, [&](int c) { return packed<T>(first[2 * c], first[2 * c + 1]); });
        keep((2 * i + 1) % S::SLOTS, i, 1, [&](int c) { return packed<T>(second[2 * c], second[2 * c + 1]); });
      }
#pragma unroll
      for (int c = 0; c < S::PIECE / 4; ++c) {
        results[i][c] = packed<T>(E::F::template value<T>(first[2 * c]) * second[2 * c],
                                  E::F::template value<T>(first[2 * c + 1]) * second[2 * c + 1]);
      }
    }
  }

  // What is added to this tile, to the slots, when the tile before has left them.
  __device__ __forceinline__ void load_added(const Place& at) const {
    static_assert(!E::ADDED || (S::SLOTS == S::PIECES && !S::LATE && S::SPLIT == 1), "each piece has a slot");
    if (thread) return;
    tma::wait_for_stores<0>();
    const unsigned barrier = block.added + 8 * me;
    mbarrier::arrive_and_expect(barrier, S::PIECES * S::PIECE_BYTES);
#pragma unroll
    for (int i = 0; i < S::PIECES; ++i) {
      const int x = at.column + across + i % S::ACROSS * S::PIECE, y = at.row + down + i / S::ACROSS * 64;
      tma::load(slots + i * S::PIECE_BYTES, p.kept_map, x, y, 0, barrier);
    }
  }

  // sums + what is added, rounded once, to `results`.
  __device__ __forceinline__ void add(const float (&sums)[S::ROWS][S::COLUMNS / 2]) {
    mbarrier::wait(block.added + 8 * me, tiles_added++ & 1);
#pragma unroll
    for (int i = 0; i < S::PIECES; ++i) {
#pragma unroll
      for (int c = 0; c < S::PIECE / 4; c += 4) {  // as fill_slot stores them
        unsigned more[4];
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(more[0]), "=r"(more[1]), "=r"(more[2]), "=r"(more[3])
                     : "r"(slots + i * S::PIECE_BYTES + (line ^ c * 8))
                     : "memory");
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const float* const pair = &sums[i / S::ACROSS][i % S::ACROSS * S::PIECE / 2 + 2 * (c + k)];
          const float2 other = unpacked<T>(more[k]);
          results[i][c + k] = packed<T>(pair[0] + other.x, pair[1] + other.y);
        }
      }
    }
  }

  // What an epilogue of its own makes of sums + bias, rounded once, to `results`: chunk after chunk, whose results go where its
  // sums were. Copies of a long text for all of the sums would take the compiler longer than all else: there it is a loop.
  __device__ __forceinline__ void compute(float (&sums)[S::ROWS][S::COLUMNS / 2], const float (&bias)[kBiases]) {
    constexpr int ALL = S::PIECE / 4, PAIRS = E::AT_ONCE, CHUNKS = S::PIECES * (ALL / PAIRS), ROW = S::COLUMNS / 2;
    static_assert(ALL % PAIRS == 0 && PAIRS % 4 == 0, "stmatrix stores four pairs");
    const E& epilogue = *static_cast<const E*>(p.computed);
    share(bias);
    typename E::template Captured<PAIRS> captured, next;  // one is loaded while the other is used
    load_captured(captured, 0);
#pragma unroll(E::UNROLLED ? CHUNKS : 1)
    for (int chunk = 0; chunk < CHUNKS; ++chunk, captured = next) {
      if (chunk + 1 < CHUNKS) load_captured(next, chunk + 1);
      const int piece = chunk / (ALL / PAIRS), first = chunk % (ALL / PAIRS) * PAIRS;
      const float* const added = &biases[piece % S::ACROSS * S::PIECE + first * 4 + lane % 4 * 2];
      float z[2 * PAIRS];
      at_index<0, CHUNKS>(chunk, [&](int at) {
#pragma unroll
        for (int i = 0; i < 2 * PAIRS; ++i) move(z[i], sums[at * 2 * PAIRS / ROW][at * 2 * PAIRS % ROW + i]);
      });
#pragma unroll
      for (int c = 0; c < PAIRS; ++c) {
        const float2 add = *reinterpret_cast<const float2*>(added + c / 2 * 8);
        z[2 * c] += add.x, z[2 * c + 1] += add.y;
      }
      if (p.kept) {
        if (first == 0) wait_for_slot();
        fill_slot<PAIRS>(piece % S::SLOTS, first, [&](int c) { return packed<T>(z[2 * c], z[2 * c + 1]); });
        if (first + PAIRS == ALL) store_kept(piece % S::SLOTS, piece, 0);
      }
      unsigned rounded[PAIRS];
#pragma unroll
      for (int c = 0; c < PAIRS; ++c) {
        const float low = captured.template of<0>(epilogue, z[2 * c], c);
        rounded[c] = packed<T>(low, captured.template of<1>(epilogue, z[2 * c + 1], c));
      }
      at_index<0, CHUNKS>(chunk, [&](int at) {
#pragma unroll
        for (int c = 0; c < PAIRS; ++c) move(sums[at * 2 * PAIRS / ROW][at * 2 * PAIRS % ROW + c], rounded[c]);
      });
    }
#pragma unroll
    for (int i = 0; i < CHUNKS * PAIRS; ++i) {
      const int at = i / PAIRS * 2 * PAIRS + i % PAIRS;
      move(results[i / ALL][i % ALL], sums[at / ROW][at % ROW]);
    }
  }

  // Of captured tensors what a chunk of N pairs of a piece needs.
  template <class C> __device__ __forceinline__ void load_captured(C& captured, int chunk) const {
    constexpr int N = C::PAIRS;
    const int i = chunk / (S::PIECE / 4 / N), first = to.row + i / S::ACROSS * 64;
    const int left = to.column + i % S::ACROSS * S::PIECE + chunk % (S::PIECE / 4 / N) * N * 4;
    const E& epilogue = *static_cast<const E*>(p.computed);
    const int row = first + thread / 32 * 16 + lane / 4, column = left + lane % 4 * 2;
    if (first + 64 <= p.m && left + N * 4 <= p.n) captured.template load<true>(epilogue, row, column, p.m, p.n);
    else captured.template load<false>(epilogue, row, column, p.m, p.n);
  }

  __device__ __forceinline__ void store_next() { store(S::PIECES - unstored--); }

  // Stores one piece, through shared memory.
  __device__ __forceinline__ void store(int number) {
    if constexpr (!E::REDUCED) wait_for_slot();
#pragma unroll
    for (int i = 0; i < S::PIECES; ++i) {  // registers have no index: a copy of this for each, of the rest one
      if (i != number) continue;
      if constexpr (E::REDUCED) rows.add(p, to, i, results[i]);
      else fill_slot(i % S::SLOTS, 0, [&](int c) { return results[i][c]; });
    }
    if constexpr (!E::REDUCED) {
      const auto index = [&](int row, int column) {
        return (static_cast<long long>(to.batch) * p.m + row) * p.pitch + column;
      };
      store_slot(number % S::SLOTS, number, p.y, to.batch, p.data, index);
    }
    if constexpr (E::MEASURED) {
      if (to.row + number / S::ACROSS * 64 + thread / 32 * 16 >= p.m) return;
#pragma unroll
      for (int i = 0; i < S::ACROSS; ++i) {
        if (i == number % S::ACROSS) rows.add(slots + number % S::SLOTS * S::PIECE_BYTES, i);
      }
    }
  }

  // The same of what backward reads.
  template <typename Bits> __device__ __forceinline__ void keep(int slot, int piece, int part, Bits bits) const {
    wait_for_slot();
    fill_slot(slot, 0, bits);
    store_kept(slot, piece, part);
  }

  // Stores such a piece, which the slot has already.
  __device__ __forceinline__ void store_kept(int slot, int piece, int part) const {
    const auto index = [&](int row, int column) { return row * p.kept_row + part * p.kept_part + column; };
    store_slot(slot, piece, p.kept_map, part, p.kept, index);
  }

  // Until what the next slot had is stored.
  __device__ __forceinline__ void wait_for_slot() const {
    if (thread == 0) tma::wait_for_stores<S::SLOTS - 1>();
    named_barrier::sync(1 + me, 128);
  }

  // bits(c): two elements, as `results` has them, of N pairs from `first` on.
  template <int N = S::PIECE / 4, typename Bits>
  __device__ __forceinline__ void fill_slot(int number, int first, Bits bits) const {
    const unsigned slot = slots + number * S::PIECE_BYTES;
#pragma unroll
    for (int c = 0; c < N; c += 4) {  // a warp's 16 rows by 16 columns
      asm volatile(
          "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(slot + (line ^ (first + c) * 8)),
          "r"(bits(c)), "r"(bits(c + 1)), "r"(bits(c + 2)), "r"(bits(c + 3))
          : "memory");
    }
  }

  // Stores a piece that a slot has. index(row, column): where an element is, if there is no map.
  template <typename Index>
  __device__ __forceinline__ void store_slot(int number, int piece, const TensorMap& map, int batch, T* data,
                                             Index index) const {
    const unsigned slot = slots + number * S::PIECE_BYTES;
    tma::fence_shared();
    named_barrier::sync(1 + me, 128);
    const int x = to.column + piece % S::ACROSS * S::PIECE, y = to.row + piece / S::ACROSS * 64;
    if (E::ROWS && y + 64 > to.end) {
      store_rows(slot, x, y, data);
      if (thread == 0) tma::end_stores();  // a group of none: stores are counted by pieces
    } else if (p.pitch) {
      store_elements(slot, x, y, data, index);
    } else if (thread == 0) {
      tma::store(map, x, y, batch, slot);
      tma::end_stores();
    }
  }

  // Of a piece with the next group's rows: this group's alone, by vectors, of which n is a multiple.
  __device__ __forceinline__ void store_rows(unsigned slot, int x, int y, T* data) const {
    constexpr int VECTORS = S::PIECE / 8;  // of a row
    for (int i = thread; i < 64 * VECTORS; i += 128) {
      const int row = y + i / VECTORS, column = x + i % VECTORS * 8;
      if (row >= to.end || column >= p.n) continue;
      uint4 bits;
      asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w)
                   : "r"(slot + tma::swizzle<S::PIECE * 2>(i * 16))
                   : "memory");
      *reinterpret_cast<uint4*>(data + static_cast<long long>(row) * p.n + column) = bits;
    }
  }

  template <typename Index>
  __device__ __forceinline__ void store_elements(unsigned slot, int x, int y, T* data, Index index) const {
    constexpr int DOWN = 128 / S::PIECE;  // rows that all threads store at once
    const int row = y + thread / S::PIECE, column = x + thread % S::PIECE;
    if (column >= p.n) return;
    unsigned short* at = reinterpret_cast<unsigned short*>(data) + index(row, column);
    const long long step = index(DOWN, 0) - index(0, 0);
#pragma unroll 4
    for (int i = 0; i < 64 / DOWN; ++i, at += step) {
      if (row + i * DOWN >= p.m) break;
      unsigned short bits;
      asm volatile("ld.shared.u16 %0, [%1];"
                   : "=h"(bits)
                   : "r"(slot + tma::swizzle<S::PIECE * 2>((thread + 128 * i) * 2))
                   : "memory");
      *at = bits;
    }
  }
};

// All of a block's work: what a kernel does.
template <typename T, class S, bool A_MN, bool B_MN, class E>
__device__ __forceinline__ void multiply(const Problem<T>& problem, char* memory) {
  const Block<T, S> block(problem, memory);
  const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
  if constexpr (E::ROWS) {
    if (warp == 1) block.count_groups();
  }
  block.template begin<E>();
  if (warp < 4) {
    wgmma::give_back_registers<24>();
    if (warp == 0 && is_elected()) produce<T, S, A_MN, B_MN, E>(block);
  } else {
    wgmma::take_registers<240>();
    Consumer<T, S, A_MN, B_MN, E> consumer(block, warp);
    if constexpr (E::SCALED) {
      if (problem.promoted) consumer.template run<true>();
      else consumer.template run<false>();
    } else {
      consumer.template run<false>();
    }
  }
  if (S::SPLIT > 1) sync_cluster();  // stay until the others have read their share
}

}  // namespace wgmma_gemm
