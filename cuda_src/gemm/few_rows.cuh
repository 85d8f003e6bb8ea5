// Products of few rows of x with weights that are read once: y[m, n] = sum over k of x[m, k] w[n, k], of up to four weights, or
// f(x gate^T) * (x up^T) of two. Both x and weights have rows that are contiguous, and whole vectors of 16 bytes.
//
// A block owns a tile of columns of the result, of one weight; in a cluster, a share of k of it. Each thread copies what it
// multiplies itself into a ring of its own in shared memory by cp.async: no thread waits for another before the sums are added,
// and as many bytes are on their way as the ring has room for.
//
// A launch that overlaps the one before it may not read weights before that has ended, which may have written them. It asks L2
// for the first of them, which is right whoever writes.
#pragma once

#include "common/core/vector.cuh"
#include "common/elementwise/activations.cuh"
#include "common/hw/cluster.cuh"
#include "common/hw/cp_async.cuh"
#include "common/hw/dependent_launch.cuh"
#include "common/hw/mma.cuh"

namespace few_rows {

constexpr int kMostParts = 4;
constexpr int kPair = 16;  // columns of a gate, and as many of what it is multiplied by, lie in turns in a tile

// As cupyops/_dispatch/few_rows.py packs it. Of each weight: columns of the result, bytes from one row to the next, and how many
// tiles it and those before it have.
struct Sizes {
  long long rows, k, x_row, function, gated, kept_row, kept_part, prefetch;
  long long n[kMostParts], pitch[kMostParts], tiles[kMostParts];
};

// The tensors of a launch: of a gate weight[0] and weight[1]. bias, residual and kept may be null.
template <typename T> struct Tensors {
  const T* x;
  const void* weight[kMostParts];
  const T* bias[kMostParts];
  T* y[kMostParts];
  const T* residual;  // contiguous, as y
  T* kept;  // what f is given, of a gate both
};

// The tile of a block, COLUMNS wide, and its share of k in steps of STEP.
template <typename T, int COLUMNS, int STEP> struct Work {
  const void *weight, *up;
  const T* bias;
  T* y;
  long long pitch, n;
  int first, begin, end;  // column, and of k
  bool gated;

  __device__ __forceinline__ Work(const Tensors<T>& of, const Sizes& s) : gated(s.gated) {
    const int blocks = cluster_blocks(), steps = (s.k + STEP - 1) / STEP, share = (steps + blocks - 1) / blocks;
    int tile = blockIdx.x / blocks;
    weight = of.weight[0], up = of.weight[1], bias = of.bias[0], y = of.y[0], pitch = s.pitch[0], n = s.n[0];
    int before = 0;
#pragma unroll
    for (int part = 1; part < kMostParts; ++part) {
      if (tile < s.tiles[part - 1]) break;
      before = s.tiles[part - 1];
      weight = of.weight[part], bias = of.bias[part], y = of.y[part], pitch = s.pitch[part], n = s.n[part];
    }
    first = (tile - before) * (gated ? COLUMNS / 2 : COLUMNS);
    begin = min(static_cast<long long>(cluster_rank()) * share * STEP, s.k);
    end = min(static_cast<long long>(begin) + share * STEP, s.k);
  }

  // The column of the result to which one of the tile belongs.
  __device__ __forceinline__ int column(int c) const {
    return first + (gated ? c / (2 * kPair) * kPair + c % kPair : c);
  }

  // The row of a weight that a column of the tile is; the last one, of whose result nothing is stored, where there is none.
  __device__ __forceinline__ const unsigned char* row(int c) const {
    const void* from = gated && c / kPair % 2 ? up : weight;
    return static_cast<const unsigned char*>(from) + min(static_cast<long long>(column(c)), n - 1) * pitch;
  }

  // Asks L2 for `bytes` of each row, multiples of 16, from the place on that begins the share; thread c does so for row c.
  __device__ __forceinline__ void prefetch(long long from, long long bytes) const {
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x < COLUMNS && bytes > 0 && column(threadIdx.x) < n)
      asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(row(threadIdx.x) + from),
                   "r"(static_cast<unsigned>(bytes))
                   : "memory");
#endif
  }
};

// Adds up what REGIONS of shared memory have of each sum, [rows][PITCH], and what the blocks of a cluster have; then what follows
// the product, and the store. Block r of a cluster finishes the r-th share of the tile. The order is fixed.
template <typename T, int COLUMNS, int PITCH, int REGIONS> struct Finish {
  const Tensors<T>& of;
  const Sizes& s;
  int elements, share, first, last;
  float residual = 0;  // of this thread's first result, asked for before the product is computed

  template <class W>
  __device__ __forceinline__ Finish(const Tensors<T>& of, const Sizes& s, const W& w, const T* given) : of(of), s(s) {
    elements = s.rows * COLUMNS;
    const int blocks = cluster_blocks();
    share = ((elements + blocks - 1) / blocks + 2 * kPair - 1) / (2 * kPair) * (2 * kPair);
    first = min(share * static_cast<int>(cluster_rank()), elements), last = min(first + share, elements);
    const int at = first + threadIdx.x;
    if (given && at < last && w.column(at % COLUMNS) < w.n)
      residual = to_acc(given[at / COLUMNS * w.n + w.column(at % COLUMNS)]);
  }

  // Where block `rank` of the cluster stores what this one adds up: behind the regions.
  static __device__ __forceinline__ float sum(const float* region, int stride, int at) {
    const float* from = region + at / COLUMNS * PITCH + at % COLUMNS;
    float total = from[0];
#pragma unroll
    for (int r = 1; r < REGIONS; ++r) total += from[r * stride];
    return total;
  }

  // Called by all threads, after a barrier. stride: floats from one region to the next; received: those of all blocks.
  template <class W, class Weights>
  __device__ __forceinline__ void store(const W& w, const Weights& weights, float* regions, int stride, float* received,
                                        const T* given) const {
    const int blocks = cluster_blocks();
    if (blocks > 1) {
      cluster_wait();  // all of them have begun
      for (int at = threadIdx.x; at < elements; at += blockDim.x) {
        const int to = at / share;
        store_remote(received + cluster_rank() * share + at - to * share, to, sum(regions, stride, at));
      }
      cluster_arrive();
      cluster_wait();
    }
    const auto total = [&](int at) {
      if (blocks == 1) return sum(regions, stride, at);
      float all = received[at - first];
      for (int r = 1; r < blocks; ++r) all += received[r * share + at - first];
      return all;
    };
    for (int at = first + threadIdx.x; at < last; at += blockDim.x) {
      const int m = at / COLUMNS, c = at % COLUMNS, n = w.column(c);
      if (n >= w.n || (w.gated && c / kPair % 2)) continue;
      float z = weights.scaled(total(at), c);
      if (w.bias) z += to_acc(w.bias[n]);
      T* const kept = of.kept ? of.kept + m * s.kept_row + n : nullptr;
      if (kept) kept[0] = from_acc<T>(z);
      float y = activate<T>(s.function, z);
      if (w.gated) {
        const float up = weights.scaled(total(at + kPair), c + kPair);
        if (kept) kept[s.kept_part] = from_acc<T>(up);
        y *= up;
      }
      const long long place = m * w.n + n;
      if (given) y += at == first + threadIdx.x ? residual : to_acc(given[place]);
      w.y[place] = from_acc<T>(y);
    }
  }
};

__device__ __forceinline__ uint4 load16(unsigned shared) {
  uint4 x;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(shared)
               : "memory");
  return x;
}

// How weights become operands of mma, here those of the type of x. Others have the same members.
template <typename T> struct Whole {
  static constexpr int kValues = 8;  // of 16 bytes

  // a[j]: the values 4j to 4j + 3 of two rows, as mma<T> takes them.
  static __device__ __forceinline__ void fragments(unsigned (&a)[kValues / 4][4], const uint4& low, const uint4& high) {
    a[0][0] = low.x, a[0][1] = high.x, a[0][2] = low.y, a[0][3] = high.y;
    a[1][0] = low.z, a[1][1] = high.z, a[1][2] = low.w, a[1][3] = high.w;
  }

  // What a sum of column c of the tile stands for.
  __device__ __forceinline__ float scaled(float sum, int c) const { return sum; }
};

// Half types by mma, of which the weight is the operand of 16 rows, N of these in a tile, and x that of 8, M of these. Lane (g, t) =
// (lane / 4, lane % 4) takes vector t of rows g and g + 8 of a weight and of row g of x: which is the how-manieth of the sum over k
// does not matter, as long as it is the same of both. The warps have steps of k in turns.
template <typename T, class Weights, int M, int N, int WARPS, int STAGES, int CHUNKS> struct ByMma {
  static constexpr int kColumns = 16 * N, kPitch = kColumns + 4;
  static constexpr int kChunk = 4 * Weights::kValues, kStep = kChunk * CHUNKS;  // of k
  static constexpr int kOfX = Weights::kValues / 8;  // vectors of a row of x in a chunk, of a lane
  static constexpr int kVectors = 2 * N + M * kOfX;
  static constexpr int kStage = CHUNKS * kVectors * 512, kRing = STAGES * kStage;  // bytes of a warp
  static_assert(8 * M * kPitch * 4 <= kRing, "the sums of a warp lie in its ring");
  static_assert(kColumns <= 32 * WARPS, "a thread for each column");

  const unsigned char* weight[2 * N];
  const T* x[M];
  unsigned ring;
  int at, end;  // of k: of the next copy, of this lane
  float sums[N][M][4] = {};

  // Starts the copies of a step; nothing where k has ended.
  __device__ __forceinline__ void fetch(unsigned to) {
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
      const bool inside = at + c * kChunk < end;
      unsigned vector = to + c * kVectors * 512;
#pragma unroll
      for (int i = 0; i < 2 * N; ++i, vector += 512) fetch16_or_zero(vector, weight[i] + c * 64, inside);
#pragma unroll
      for (int j = 0; j < M * kOfX; ++j, vector += 512)
        fetch16_or_zero(vector, x[j / kOfX] + c * kChunk + j % kOfX * 8, inside);
    }
#pragma unroll
    for (int i = 0; i < 2 * N; ++i) weight[i] += WARPS * CHUNKS * 64;
#pragma unroll
    for (int j = 0; j < M; ++j) x[j] += WARPS * kStep;
    at += WARPS * kStep;
    end_group();
  }

  __device__ __forceinline__ void multiply(unsigned from) {
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
      const unsigned vectors = from + c * kVectors * 512;
      uint4 rows[M][kOfX];
#pragma unroll
      for (int j = 0; j < M * kOfX; ++j) rows[j / kOfX][j % kOfX] = load16(vectors + (2 * N + j) * 512);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        unsigned a[Weights::kValues / 4][4];
        Weights::fragments(a, load16(vectors + 2 * i * 512), load16(vectors + (2 * i + 1) * 512));
#pragma unroll
        for (int j = 0; j < Weights::kValues / 4; ++j) {
#pragma unroll
          for (int m = 0; m < M; ++m) {
            const uint4& b = rows[m][j / 2];
            mma<T>(sums[i][m], a[j], j % 2 ? b.z : b.x, j % 2 ? b.w : b.y);
          }
        }
      }
    }
  }

  template <class W> __device__ __forceinline__ ByMma(const Tensors<T>& of, const Sizes& s, const W& w) {
    extern __shared__ __align__(16) unsigned char few_rows_shared[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    ring = static_cast<unsigned>(__cvta_generic_to_shared(few_rows_shared)) + warp * kRing + lane * 16;
    at = w.begin + warp * kStep + t * Weights::kValues, end = w.end;
#pragma unroll
    for (int i = 0; i < 2 * N; ++i)
      weight[i] = w.row(i / 2 * 16 + i % 2 * 8 + g) + static_cast<long long>(at) / Weights::kValues * 16;
#pragma unroll
    for (int j = 0; j < M; ++j) x[j] = of.x + min(8 * j + g, static_cast<int>(s.rows) - 1) * s.x_row + at;

    const int mine = (w.end - w.begin + kStep - 1) / kStep - warp, steps = mine > 0 ? (mine + WARPS - 1) / WARPS : 0;
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) fetch(ring + i * kStage);
    int stage = 0;
    for (int step = 0; step < steps; ++step) {
      wait_for_groups<STAGES - 2>();
      fetch(ring + (stage == 0 ? STAGES - 1 : stage - 1) * kStage);  // which the step before has read
      multiply(ring + stage * kStage);
      stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
    wait_for_groups<0>();
    __syncwarp();  // no lane reads the ring any more, in whose place sums are
    float* const to = reinterpret_cast<float*>(few_rows_shared + warp * kRing);
#pragma unroll
    for (int m = 0; m < M; ++m) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int row = 8 * m + 2 * t + e % 2;
        if (row >= s.rows) continue;
#pragma unroll
        for (int i = 0; i < N; ++i) to[row * kPitch + 16 * i + g + e / 2 * 8] = sums[i][m][e];
      }
    }
  }
};

// Shared memory: the rings of all warps; in a cluster behind them the sums of all of its blocks, rows * kColumns floats and what
// rounding to shares adds.
template <typename T, int M, int N, int WARPS, int STAGES, int CHUNKS, class Weights>
__device__ __forceinline__ void by_mma(Tensors<T> of, const Sizes& s, const Weights& weights) {
  using By = ByMma<T, Weights, M, N, WARPS, STAGES, CHUNKS>;
  extern __shared__ __align__(16) unsigned char few_rows_shared[];
  if (cluster_blocks() > 1) cluster_begin();
  const Work<T, By::kColumns, By::kStep> w(of, s);
  let_next_grid_begin();
  const long long bytes = static_cast<long long>(w.end - w.begin) / Weights::kValues * 16;
  w.prefetch(static_cast<long long>(w.begin) / Weights::kValues * 16, min(bytes, s.prefetch));
  of.x = written_before(of.x);
  const Finish<T, By::kColumns, By::kPitch, WARPS> finish(of, s, w, of.residual);
  By product(of, s, w);
  __syncthreads();
  float* const regions = reinterpret_cast<float*>(few_rows_shared);
  finish.store(w, weights, regions, By::kRing / 4, regions + WARPS * By::kRing / 4, of.residual);
}

}  // namespace few_rows
