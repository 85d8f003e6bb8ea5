// What the parts of a block of wgmma.cuh share: its shape, the problem, the order of tiles, the place of all in shared memory.
#pragma once

#include "common/core/vector.cuh"
#include "common/hw/mbarrier.cuh"
#include "common/hw/named_barrier.cuh"
#include "common/hw/tma.cuh"
#include "common/hw/wgmma.cuh"

namespace wgmma_gemm {

constexpr int kK = 64;  // of k in a stage: a line of 128 bytes
constexpr int kThreads = 384;  // named barriers 1 and 2 are the consumers' own, 3 is that of both

// What a form decides.
//
//   M_, N_        the tile of a block
//   STAGES_       of the ring
//   SLOTS_        64-column pieces of the result that each consumer can have on their way at once
//   CLUSTER_      blocks of a cluster, whose tiles lie below each other and share b, which TMA sends to all of them
//   SPLIT_        blocks of a cluster that share one tile's k, and add up through distributed shared memory
//   PINGPONG_     each consumer has a tile of its own, and stores it while the other multiplies; else they halve a tile
//   LATE_         a tile waits in registers, in 16 bits, and is stored piece by piece within the main loop of the next
//   GATED_        b is two operands, the rows of one above those of the other: half as many columns are stored
template <int M_, int N_, int STAGES_, int SLOTS_, int CLUSTER_, int SPLIT_, bool PINGPONG_, bool LATE_,
          bool GATED_ = false>
struct Shape {
  static constexpr int M = M_, N = N_, STAGES = STAGES_, SLOTS = SLOTS_, CLUSTER = CLUSTER_, SPLIT = SPLIT_;
  static constexpr bool PINGPONG = PINGPONG_, LATE = LATE_, GATED = GATED_;
  static constexpr int WIDTH = GATED ? N / 2 : N;  // columns of the result
  static constexpr int A_BYTES = M * kK * 2, STAGE_BYTES = A_BYTES + N * kK * 2;
  static constexpr bool BESIDE = M == 64 && !PINGPONG;  // the consumers' halves lie side by side
  static constexpr int ROWS = PINGPONG || BESIDE ? M / 64 : M / 128;  // of 64, of each consumer
  static constexpr int COLUMNS = BESIDE ? N / 2 : N;  // of each consumer
  static constexpr int STORED = COLUMNS / SPLIT / (GATED ? 2 : 1);  // columns that it stores
  static constexpr int PIECE = STORED < 64 ? STORED : 64;  // columns that TMA stores at once, of 64 rows
  static constexpr int PIECE_BYTES = 64 * PIECE * 2, ACROSS = STORED / PIECE, PIECES = ROWS * ACROSS;
  static constexpr int CONSUMER_WARPS = PINGPONG ? 4 : 8;  // of each stage
  static_assert(CLUSTER == 1 || SPLIT == 1, "a cluster shares b, or splits k");
  static_assert(SPLIT == 1 || !(PINGPONG || LATE), "where k is split, each block has a single tile");
  static_assert(SPLIT == 1 || M * N * 4 <= STAGES * STAGE_BYTES, "the partial sums lie where the stages were");
  static_assert(!GATED || (SPLIT == 1 && !BESIDE && CLUSTER <= 2), "a thread has both sums of a column");
  static_assert(PIECES % SLOTS == 0, "slots are taken in turn");
};

// The epilogues. Of a tile's sums are stored:
//
//   Sums          sums + bias
//   Activated     f(z), z = sums + bias; and z itself, where `kept` is not null
//   Gated         f(gate) up, of the sums of two operands; and both, where `kept` is not null
//   OfRows        the sums of groups of rows, each with a matrix b of its own
//   OfShares      the sums of groups of k, each of which gives a matrix y
//   Reduced       nothing: an epilogue of a family's own takes the rounded sums piece by piece, see its Rows
//   Computed      what an epilogue of its own makes of z = sums + bias, see gemm/computed_wgmma.cuh; and z, where `kept` is not null
//   Added         the sums and a matrix of y's shape, which TMA brings to the slots where y will be: there is one for each piece
//   Measured      the rounded sums; and the moments of the columns of y, by which a block's tiles all lie below each other, see
//                 gemm/measured_wgmma.cuh
//   Scaled        the sums of products of 8-bit numbers times the scales of their rows and columns, + bias; in fp32 or half types
struct Plain {
  static constexpr bool ACTIVATED = false, GATED = false, ROWS = false, SHARES = false, SCALED = false, REDUCED = false,
                        COMPUTED = false, MEASURED = false, ADDED = false;
  template <typename T, class S> struct Rows {};  // what a thread knows of its part of y from one piece to the next
  template <typename T, int N, bool A_MN, bool B_MN> using Product = wgmma::Product<T, N, A_MN, B_MN>;
};
struct Sums : Plain {};
template <class F_> struct Activated : Plain {
  static constexpr bool ACTIVATED = true;
  using F = F_;
};
template <class F_> struct Gated : Plain {
  static constexpr bool GATED = true;
  using F = F_;
};
struct Reduced : Plain { static constexpr bool REDUCED = true; };
struct Computed : Plain {
  static constexpr bool COMPUTED = true;
  static constexpr int AT_ONCE = 16;  // pairs of sums, and of each captured tensor, that a thread takes at once
  static constexpr bool UNROLLED = true;  // whether its text is there for all of a thread's sums, or for those alone
};
struct Added : Plain { static constexpr bool ADDED = true; };
struct OfRows : Plain { static constexpr bool ROWS = true; };
struct OfShares : Plain { static constexpr bool SHARES = true; };
template <class A, class B> struct Scaled : Plain {
  static constexpr bool SCALED = true;
  template <typename T, int N, bool A_MN, bool B_MN> using Product = wgmma::ProductOfBytes<A, B, N>;
};

// The problem. a_moves, b_moves: 1 where a batch has matrices of its own, 0 where all share one. pitch: 0 where TMA stores y;
// else elements from one row of y to the next, and m rows from one matrix to the next. group: see Order.
// Of some epilogues: up, the second operand of Gated; kept, a pointer and a map of [1, m, n], of Gated of [2, m, n], and strides
// of its rows and parts; of Added the map is that of what is added; offs, where each of `batches` groups ends,
// of `ragged` rows or of k. Of Scaled: the scales of rows and columns, or one of each where `by_row` is 0; promoted: whether each
// stage is summed by itself, and then added in fp32. Of Reduced and Measured: what their Rows know it to be. Of Computed: the epilogue itself.
template <typename T> struct Problem {
  const TensorMap &a, &b, &y;
  T* data;
  const T* bias;
  int m, n, k, batches, a_moves, b_moves, pitch, group;
  const TensorMap &up, &kept_map;
  T* kept;
  long long kept_row, kept_part;
  const int* offs = nullptr;
  int ragged = 0;
  const float *scale_a = nullptr, *scale_b = nullptr;
  int by_row = 0;
  bool promoted = false;
  const void *reduced = nullptr, *computed = nullptr;
};

// Which stage is next, and the parity of its phase.
template <int STAGES> struct Ring {
  unsigned stage = 0, phase = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == STAGES) stage = 0, phase ^= 1;
  }
  __device__ __forceinline__ void advance(unsigned steps) {
    stage += steps;
    phase ^= stage / STAGES & 1, stage %= STAGES;
  }
};

struct Place {
  int row, column, batch;  // of a cluster's tiles
  int end = 0;  // of a group of rows: the first row that is not its own
};

struct Range {
  int start, blocks;  // of k, in stages
};

struct Group {
  int first, last;  // last: the first that is not its own
  __device__ __forceinline__ int size() const { return max(last - first, 0); }
};

// The order of tiles: `group` rows of tiles at a time, down each column, so that tiles at work together share operands in L2.
struct Order {
  int rows, columns, group;

  __device__ __forceinline__ Place at(int tile) const {
    const int all = rows * columns, batch = tile / all;
    tile -= batch * all;
    const int band = group * columns, first = tile / band * group, height = min(group, rows - first);
    tile %= band;
    return {first + tile % height, tile / height, batch};
  }
};

template <typename T> __device__ __forceinline__ unsigned packed(float low, float high);
template <> __device__ __forceinline__ unsigned packed<__half>(float low, float high) {
  unsigned both;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}
template <> __device__ __forceinline__ unsigned packed<__nv_bfloat16>(float low, float high) {
  unsigned both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

template <typename T> __device__ __forceinline__ float2 unpacked(unsigned both);
template <> __device__ __forceinline__ float2 unpacked<__half>(unsigned both) {
  return __half22float2(*reinterpret_cast<const __half2*>(&both));
}
template <> __device__ __forceinline__ float2 unpacked<__nv_bfloat16>(unsigned both) {
  return {__uint_as_float(both << 16), __uint_as_float(both & 0xffff0000)};
}

__device__ __forceinline__ void sync_cluster() {
  asm volatile("barrier.cluster.arrive.relaxed; barrier.cluster.wait;" ::: "memory");
}
__device__ __forceinline__ bool is_elected() {
  unsigned elected;
  asm volatile("{.reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p;}" : "=r"(elected));
  return elected;
}

// The shared memory of a block, by addresses, and its share of the work.
template <typename T, class S> struct Block {
  const Problem<T>& p;
  Order order;
  unsigned stages, slots, full, empty, turns, added;
  float* biases;
  int rank, tiles, step, first, start, blocks;  // of tiles: all, from one to the next; of k in stages: first, how many

  __device__ __forceinline__ explicit Block(const Problem<T>& p, char* memory) : p(p) {
    stages = static_cast<unsigned>(__cvta_generic_to_shared(memory)), slots = stages + S::STAGES * S::STAGE_BYTES;
    biases = reinterpret_cast<float*>(memory + S::STAGES * S::STAGE_BYTES + 2 * S::SLOTS * S::PIECE_BYTES);
    full = slots + 2 * S::SLOTS * S::PIECE_BYTES + 2 * S::N * 4;
    empty = full + 8 * S::STAGES, turns = empty + 8 * S::STAGES, added = turns + 16;
    rank = S::CLUSTER * S::SPLIT > 1 ? cluster_rank() : 0;
    order = {(p.m + S::M * S::CLUSTER - 1) / (S::M * S::CLUSTER), (p.n + S::WIDTH - 1) / S::WIDTH, p.group};
    tiles = order.rows * order.columns * p.batches;
    step = gridDim.x / (S::CLUSTER * S::SPLIT), first = blockIdx.x / (S::CLUSTER * S::SPLIT);
    const int all = (p.k + kK - 1) / kK, slice = S::SPLIT > 1 ? rank : 0;
    start = slice * all / S::SPLIT, blocks = (slice + 1) * all / S::SPLIT - start;
  }

  // This block's tile: its first row and column, in elements.
  __device__ __forceinline__ Place place(int tile) const {
    Place at = order.at(tile);
    at.row = (at.row * S::CLUSTER + (S::CLUSTER > 1 ? rank : 0)) * S::M, at.column *= S::WIDTH;
    return at;
  }

  // What of k a tile sums up: of a group of k from the group's first row on, of an empty one a stage that will be zeros.
  template <class E> __device__ __forceinline__ Range range(int batch) const {
    if constexpr (E::SHARES) return {0, max((group(batch).size() + kK - 1) / kK, 1)};
    return {start, blocks};
  }

  // A group of rows, or of k: it lies within the operand, whatever offs says.
  __device__ __forceinline__ Group group(int index) const {
    const int all = p.ragged, first = index ? p.offs[index - 1] : 0, last = p.offs[index];
    return {min(max(first, 0), all), min(max(last, 0), all)};
  }

  // Of groups of rows: writes how many rows of tiles there are up to each group's end where biases would be. By one warp.
  __device__ __forceinline__ void count_groups() const {
    const int lane = threadIdx.x % 32;
    for (int first = 0, before = 0; first < p.batches; first += 32) {
      int rows = first + lane < p.batches ? (group(first + lane).size() + S::M - 1) / S::M : 0;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(0xffffffff, rows, step);
        if (lane >= step) rows += other;
      }
      rows += before, before = __shfl_sync(0xffffffff, rows, 31);
      if (first + lane < p.batches) counts()[first + lane] = rows;
    }
  }
  __device__ __forceinline__ int* counts() const { return reinterpret_cast<int*>(biases); }

  // All tiles, and where one of them is, for any epilogue.
  template <class E> __device__ __forceinline__ int all_tiles() const {
    if constexpr (E::ROWS) return counts()[p.batches - 1] * order.columns;
    return tiles;
  }
  template <class E> __device__ __forceinline__ Place place_of(int tile) const {
    if constexpr (!E::ROWS) return place(tile);
    const int row = tile / order.columns;
    int low = 0, high = p.batches - 1;  // the first group whose count is above
    while (low < high) {
      const int middle = (low + high) / 2;
      if (counts()[middle] > row) high = middle;
      else low = middle + 1;
    }
    const int before = low ? counts()[low - 1] : 0;
    const Group of = group(low);
    const Place at = Order{counts()[low] - before, order.columns, p.group}.at(tile - before * order.columns);
    return {of.first + at.row * S::M, at.column * S::WIDTH, low, of.last};
  }

  template <class E> __device__ __forceinline__ void begin() const {
    if (threadIdx.x == 0) {
      if (stages % 1024) __trap();  // the swizzle counts from there
      tma::prefetch(p.a), tma::prefetch(p.b);
      if (!p.pitch) tma::prefetch(p.y);
      for (int i = 0; i < S::STAGES; ++i) {
        mbarrier::init(full + 8 * i, 1);
        mbarrier::init(empty + 8 * i, S::CLUSTER * S::CONSUMER_WARPS);
      }
      mbarrier::init(turns, S::PINGPONG ? 4 : 8 * S::SPLIT), mbarrier::init(turns + 8, 4);
      if (E::ADDED) mbarrier::init(added, 1), mbarrier::init(added + 8, 1);
      mbarrier::fence_init();
    }
    if (S::CLUSTER * S::SPLIT > 1) sync_cluster();
    else __syncthreads();
  }

 private:
  static __device__ __forceinline__ int cluster_rank() {
    unsigned rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
  }
};

}  // namespace wgmma_gemm
