// Products of few rows of x with weights that are read once: y[m, n] = sum over k of x[m, k] w[n, k], of up to four weights, or
// f(x gate^T) * (x up^T) of two; of x as it is, or after an RMS norm. Both x and weights have rows that are contiguous, and whole vectors of 16 bytes.
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

// As cupyops/_dispatch/gemm/few_rows.py packs it. Of each weight: columns of the result, bytes from one row to the next, and how many
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
  const T* norm;  // the weight of an RMS norm of x
  float eps;
};

// The tile of a block, COLUMNS wide, of ROWS rows of x at most, and its share of k in steps of STEP.
template <typename T, int ROWS, int COLUMNS, int STEP> struct Work {
  const T* x;
  const void *weight, *up;
  const T *bias, *residual, *norm;
  T *y, *kept;
  float eps;
  long long x_row, pitch, n;
  int rows, first, begin, end;  // first: column; begin and end of k
  bool gated;

  __device__ __forceinline__ Work(const Tensors<T>& of, const Sizes& s)
      : norm(of.norm), eps(of.eps), x_row(s.x_row), gated(s.gated) {
    const int blocks = cluster_blocks(), steps = (s.k + STEP - 1) / STEP, share = (steps + blocks - 1) / blocks;
    const unsigned groups = (s.rows + ROWS - 1) / ROWS, unit = blockIdx.x / blocks;  // neighbours share a weight's rows
    const int tile = unit / groups, row = unit % groups * ROWS;
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
    rows = min(static_cast<int>(s.rows) - row, ROWS);
    x = of.x + row * x_row, y += row * n;
    residual = of.residual ? of.residual + row * n : nullptr, kept = of.kept ? of.kept + row * s.kept_row : nullptr;
  }

  // The column of the result to which one of the tile belongs.
  __device__ __forceinline__ int column(int c) const {
    return first + (gated ? c / (2 * kPair) * kPair + c % kPair : c);
  }

  // The row of a weight that a column of the tile is; the last one, of whose result nothing is stored, where there is none.
  __device__ __forceinline__ const unsigned char* weight_row(int c) const {
    const void* from = gated && c / kPair % 2 ? up : weight;
    return static_cast<const unsigned char*>(from) + min(static_cast<long long>(column(c)), n - 1) * pitch;
  }

  // The row of x, or the last one.
  __device__ __forceinline__ const T* x_at(int row) const { return x + min(row, rows - 1) * x_row; }

  // Begins with what does not depend on the launch before, which may have written weights too: L2 is asked for `most` bytes of each
  // row, a multiple of 16, thread c for that of column c. values: of k in 16 bytes.
  __device__ __forceinline__ void wait(int values, long long most) {
    let_next_grid_begin();
#if __CUDA_ARCH__ >= 900
    const long long bytes = min(static_cast<long long>(end - begin) / values * 16, most);
    if (threadIdx.x < COLUMNS && bytes > 0 && column(threadIdx.x) < n)
      asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(weight_row(threadIdx.x) + begin / values * 16),
                   "r"(static_cast<unsigned>(bytes))
                   : "memory");
#endif
    x = written_before(x);
  }
};

// Adds up what REGIONS of shared memory have of each sum, [rows][PITCH], and what the blocks of a cluster have; then what follows
// the product, and the store. Block r of a cluster finishes the r-th share of the tile. The order is fixed.
template <typename T, int COLUMNS, int PITCH, int REGIONS> struct Finish {
  int elements, share, first, last;
  float bias = 0,
        residual = 0;  // of this thread's column, and of its first result: asked for before the product is computed

  template <class W> __device__ __forceinline__ explicit Finish(const W& w) : elements(w.rows * COLUMNS) {
    const int blocks = cluster_blocks();
    share = ((elements + blocks - 1) / blocks + 2 * kPair - 1) / (2 * kPair) * (2 * kPair);
    first = min(share * static_cast<int>(cluster_rank()), elements), last = min(first + share, elements);
    const int at = first + threadIdx.x, n = w.column(at % COLUMNS);  // as blockDim.x is a multiple of COLUMNS
    if (n >= w.n) return;
    if (w.bias) bias = to_acc(w.bias[n]);
    if (w.residual && at < last) residual = to_acc(w.residual[at / COLUMNS * w.n + n]);
  }

  static __device__ __forceinline__ float sum(const float* regions, int stride, int at) {
    const float* from = regions + at / COLUMNS * PITCH + at % COLUMNS;
    float total = from[0];
#pragma unroll
    for (int r = 1; r < REGIONS; ++r) total += from[r * stride];
    return total;
  }

  // The squares of a row of x, of this block's share of k; they lie behind the columns.
  static __device__ __forceinline__ float squares(const float* regions, int stride, int row) {
    float total = 0;
#pragma unroll
    for (int r = 0; r < REGIONS; ++r) total += regions[r * stride + row * PITCH + COLUMNS];
    return total;
  }

  // Called by all threads, after a barrier. stride: floats from one region to the next; received: of a cluster, what all of its
  // blocks have, sums and then squares.
  template <class W, class Weights>
  __device__ __forceinline__ void store(const W& w, const Sizes& s, const Weights& weights, const float* regions,
                                        int stride, float* received) const {
    const int blocks = cluster_blocks();
    if (blocks > 1) {
      cluster_wait();  // all of them have begun
#pragma unroll 1
      for (int at = threadIdx.x; at < elements; at += blockDim.x) {
        const int to = at / share;
        store_remote(received + cluster_rank() * share + at - to * share, to, sum(regions, stride, at));
      }
#pragma unroll 1
      for (int at = threadIdx.x; w.norm && at < w.rows * blocks; at += blockDim.x) {
        const int row = at / blocks;
        float* const to = received + blocks * share + cluster_rank() * w.rows + row;
        store_remote(to, at % blocks, squares(regions, stride, row));
      }
      cluster_arrive();
      cluster_wait();
    }
    const auto total = [&](int at) {
      if (blocks == 1) return sum(regions, stride, at);
      float all = received[at - first];
#pragma unroll 1
      for (int r = 1; r < blocks; ++r) all += received[r * share + at - first];
      return all;
    };
    const auto normalised = [&](int row) {
      float all = blocks == 1 ? squares(regions, stride, row) : 0;
#pragma unroll 1
      for (int r = 0; blocks > 1 && r < blocks; ++r) all += received[blocks * share + r * w.rows + row];
      return rsqrtf(all / s.k + w.eps);
    };
#pragma unroll 1
    for (int at = first + threadIdx.x; at < last; at += blockDim.x) {
      const int m = at / COLUMNS, c = at % COLUMNS, n = w.column(c);
      if (n >= w.n || (w.gated && c / kPair % 2)) continue;
      const float factor = w.norm ? normalised(m) : 1.0f, z = weights.scaled(total(at), c) * factor + bias;
      T* const kept = w.kept ? w.kept + m * s.kept_row + n : nullptr;
      if (kept) kept[0] = from_acc<T>(z);
      float y = activate<T>(s.function, z);
      if (w.gated) {
        const float up = weights.scaled(total(at + kPair), c + kPair) * factor;
        if (kept) kept[s.kept_part] = from_acc<T>(up);
        y *= up;
      }
      const long long place = m * w.n + n;
      if (w.residual) y += at == first + threadIdx.x ? residual : to_acc(w.residual[place]);
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
  static constexpr int kValues = kVecWidth<T>;  // of 16 bytes

  // a[j]: the values 4j to 4j + 3 of two rows, as mma<T> takes them.
  static __device__ __forceinline__ void fragments(unsigned (&a)[kValues / 4][4], const uint4& low, const uint4& high) {
    a[0][0] = low.x, a[0][1] = high.x, a[0][2] = low.y, a[0][3] = high.y;
    a[1][0] = low.z, a[1][1] = high.z, a[1][2] = low.w, a[1][3] = high.w;
  }

  // What a sum of column c of the tile stands for.
  __device__ __forceinline__ float scaled(float sum, int c) const { return sum; }
};

// x becomes x * by, rounded, and its squares are added; what divides the row comes later, since it is one number.
template <typename T> __device__ __forceinline__ void scale_and_square(uint4& x, const uint4& by, float& squares) {
  Words<T> values, factors;
  values.words = x, factors.words = by;
#pragma unroll
  for (int e = 0; e < kVecWidth<T>; ++e) {
    const float value = to_acc(values.elements.data[e]);
    squares = fmaf(value, value, squares);
    values.elements.data[e] = from_acc<T>(value * to_acc(factors.elements.data[e]));
  }
  x = values.words;
}

// Half types by mma, of which the weight is the operand of 16 rows, N of these in a tile, and x that of 8, M of these. Lane (g, t) =
// (lane / 4, lane % 4) takes vector t of rows g and g + 8 of a weight and of row g of x: which is the how-manieth of the sum over k
// does not matter, as long as it is the same of both. The warps have steps of k in turns.
template <typename T, class Weights, int M, int N, int WARPS, int STAGES, int CHUNKS, bool NORM> struct ByMma {
  static constexpr int kColumns = 16 * N, kPitch = kColumns + 4;
  static constexpr int kChunk = 4 * Weights::kValues, kStep = kChunk * CHUNKS;  // of k
  static constexpr int kOfX = Weights::kValues / 8;  // vectors of a row of x in a chunk, of a lane
  static constexpr int kVectors = 2 * N + (M + NORM) * kOfX;
  static constexpr int kStage = CHUNKS * kVectors * 512, kRing = STAGES * kStage;  // bytes of a warp
  static_assert(8 * M * kPitch * 4 <= kRing, "the sums of a warp lie in its ring");
  static_assert(32 * WARPS % kColumns == 0, "a thread has one column");

  const unsigned char* weight[2 * N];
  int at, end;  // of k: of the next copy, of this lane
  float sums[N][M][4] = {}, squares[M] = {};

  // Starts the copies of a step; nothing where k has ended.
  template <class W> __device__ __forceinline__ void fetch(const W& of, unsigned to) {
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
      const bool inside = at + c * kChunk < end;
      unsigned vector = to + c * kVectors * 512;
#pragma unroll
      for (int i = 0; i < 2 * N; ++i, vector += 512) fetch16_or_zero(vector, weight[i] + c * 64, inside);
#pragma unroll
      for (int j = 0; j < M * kOfX; ++j, vector += 512)
        fetch16_or_zero(vector, of.x_at(8 * (j / kOfX) + threadIdx.x % 32 / 4) + at + c * kChunk + j % kOfX * 8,
                        inside);
      if constexpr (NORM) {
#pragma unroll
        for (int j = 0; j < kOfX; ++j, vector += 512)
          fetch16_or_zero(vector, of.norm + at + c * kChunk + j * 8, inside);
      }
    }
#pragma unroll
    for (int i = 0; i < 2 * N; ++i) weight[i] += WARPS * CHUNKS * 64;
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
      if constexpr (NORM) {
#pragma unroll
        for (int j = 0; j < kOfX; ++j) {
          const uint4 by = load16(vectors + (2 * N + M * kOfX + j) * 512);
#pragma unroll
          for (int m = 0; m < M; ++m) scale_and_square<T>(rows[m][j], by, squares[m]);
        }
      }
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

  template <class W> __device__ __forceinline__ explicit ByMma(const W& w) {
    extern __shared__ __align__(16) unsigned char few_rows_shared[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const unsigned ring = static_cast<unsigned>(__cvta_generic_to_shared(few_rows_shared)) + warp * kRing + lane * 16;
    at = w.begin + warp * kStep + t * Weights::kValues, end = w.end;
#pragma unroll
    for (int i = 0; i < 2 * N; ++i)
      weight[i] = w.weight_row(i / 2 * 16 + i % 2 * 8 + g) + static_cast<long long>(at) / Weights::kValues * 16;

    const int mine = (w.end - w.begin + kStep - 1) / kStep - warp, steps = mine > 0 ? (mine + WARPS - 1) / WARPS : 0;
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) fetch(w, ring + i * kStage);
    int stage = 0;
    for (int step = 0; step < steps; ++step) {
      wait_for_groups<STAGES - 2>();
      fetch(w, ring + (stage == 0 ? STAGES - 1 : stage - 1) * kStage);  // which the step before has read
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
        if (row >= w.rows) continue;
#pragma unroll
        for (int i = 0; i < N; ++i) to[row * kPitch + 16 * i + g + e / 2 * 8] = sums[i][m][e];
      }
    }
    if constexpr (NORM) {
#pragma unroll
      for (int m = 0; m < M; ++m) {
        squares[m] += __shfl_xor_sync(~0u, squares[m], 1);
        squares[m] += __shfl_xor_sync(~0u, squares[m], 2);
        if (t == 0 && 8 * m + g < w.rows) to[(8 * m + g) * kPitch + kColumns] = squares[m];
      }
    }
  }
};

// Shared memory: the rings of all warps; in a cluster behind them the sums of all of its blocks, of the rows times kColumns and what
// rounding up to shares adds, and the squares of the rows.
template <typename T, int M, int N, int WARPS, int STAGES, int CHUNKS, bool NORM, class Weights>
__device__ __forceinline__ void by_mma(const Tensors<T>& of, const Sizes& s, const Weights& weights) {
  using By = ByMma<T, Weights, M, N, WARPS, STAGES, CHUNKS, NORM>;
  extern __shared__ __align__(16) unsigned char few_rows_shared[];
  if (cluster_blocks() > 1) cluster_begin();
  Work<T, 8 * M, By::kColumns, By::kStep> w(of, s);
  if (!NORM) w.norm = nullptr;  // which leaves its code out
  w.wait(Weights::kValues, s.prefetch);
  const Finish<T, By::kColumns, By::kPitch, WARPS> finish(w);
  By product(w);
  __syncthreads();
  float* const regions = reinterpret_cast<float*>(few_rows_shared);
  finish.store(w, s, weights, regions, By::kRing / 4, regions + WARPS * By::kRing / 4);
}

// fp32 by FMAs, ROWS rows of x at a time. A warp has N columns of the tile, of which its lanes share each 128 of k; its weights lie
// in the ring, and x, which all warps read, comes from the first cache.
template <int ROWS, int N, int WARPS, int STAGES, bool NORM> struct ByFma {
  static constexpr int kColumns = N * WARPS, kPitch = kColumns + 1, kStep = 128, kStage = N * 512,
                       kRing = STAGES * kStage;  // bytes of a warp
  static_assert(32 * WARPS % kColumns == 0 && kColumns % (2 * kPair) == 0, "a thread has one column, gates have pairs");

  const unsigned char* weight[N];
  int at, end;  // of k: of the next copy, of this lane
  float sums[N][ROWS] = {}, squares[ROWS] = {};

  __device__ __forceinline__ void fetch(unsigned to) {
#pragma unroll
    for (int i = 0; i < N; ++i, to += 512) {
      fetch16_or_zero(to, weight[i], at < end);
      weight[i] += 4 * kStep;
    }
    at += kStep;
    end_group();
  }

  template <class W> __device__ __forceinline__ void multiply(const W& of, unsigned from, int k) {
    Words<float> w[N];
#pragma unroll
    for (int i = 0; i < N; ++i) w[i].words = load16(from + i * 512);
    uint4 by = {0, 0, 0, 0};
    if (NORM && k < end) by = *reinterpret_cast<const uint4*>(of.norm + k);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      Words<float> x;
      x.words = k < end ? *reinterpret_cast<const uint4*>(of.x_at(r) + k) : uint4{0, 0, 0, 0};
      if constexpr (NORM) scale_and_square<float>(x.words, by, squares[r]);
#pragma unroll
      for (int i = 0; i < N; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) sums[i][r] = fmaf(w[i].elements.data[e], x.elements.data[e], sums[i][r]);
      }
    }
  }

  // Leaves the sums in [rows][kPitch] at `to`.
  template <class W> __device__ __forceinline__ ByFma(const W& w, float* to) {
    extern __shared__ __align__(16) unsigned char few_rows_shared[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const unsigned ring = static_cast<unsigned>(__cvta_generic_to_shared(few_rows_shared)) + warp * kRing + lane * 16;
    at = w.begin + lane * 4, end = w.end;
#pragma unroll
    for (int i = 0; i < N; ++i) weight[i] = w.weight_row(warp * N + i) + 4 * static_cast<long long>(at);
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) fetch(ring + i * kStage);
    int stage = 0;
    for (int k = w.begin; k < w.end; k += kStep) {
      wait_for_groups<STAGES - 2>();
      fetch(ring + (stage == 0 ? STAGES - 1 : stage - 1) * kStage);  // which the step before has read
      multiply(w, ring + stage * kStage, k + lane * 4);
      stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
    wait_for_groups<0>();
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const float sum = warp_reduce<Sum>(sums[i][r]);
        if (lane == (r * N + i) % 32 && r < w.rows) to[r * kPitch + warp * N + i] = sum;
      }
      if (NORM && warp == 0) {  // every warp has all of x
        const float all = warp_reduce<Sum>(squares[r]);
        if (lane == 0 && r < w.rows) to[r * kPitch + kColumns] = all;
      }
    }
  }
};

// Shared memory: the rings of all warps, the sums of ROWS * kPitch; in a cluster behind them what by_mma() has there.
template <int ROWS, int N, int WARPS, int STAGES, bool NORM>
__device__ __forceinline__ void by_fma(const Tensors<float>& of, const Sizes& s) {
  using By = ByFma<ROWS, N, WARPS, STAGES, NORM>;
  extern __shared__ __align__(16) unsigned char few_rows_shared[];
  if (cluster_blocks() > 1) cluster_begin();
  Work<float, ROWS, By::kColumns, By::kStep> w(of, s);
  if (!NORM) w.norm = nullptr;  // which leaves its code out
  w.wait(4, s.prefetch);
  const Finish<float, By::kColumns, By::kPitch, 1> finish(w);
  float* const sums = reinterpret_cast<float*>(few_rows_shared + WARPS * By::kRing);
  By product(w, sums);
  __syncthreads();
  finish.store(w, s, Whole<float>(), sums, 0, sums + ROWS * By::kPitch);
}

}  // namespace few_rows
