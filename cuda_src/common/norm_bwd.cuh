// Backward of the normalisations; CENTRED as in norm.cuh.
//
//     grad_x = rstd (wg - c2 - xhat c1) + grad_summed,   wg = grad_y weight,   c1 = sum(wg xhat) / n,
//                                                        c2 = sum(wg) / n where CENTRED, else 0
//     grad_weight = sum(grad_y xhat),   grad_bias = sum(grad_y)                                     over the rows
#pragma once

#include "common/fetched.cuh"
#include "common/norm.cuh"
#include "common/row_sums.cuh"

constexpr int kBackwardThreads = 512;

// Threads that hold rows, of a block at most, and of a multiprocessor: so many as leave each registers for its sums of the
// parameters' gradients. Rows off 16-byte boundaries take longer on their way: more threads, of fewer registers, which one
// sum for each column leaves enough of, two do not.
template <bool CENTRED, bool VECTORS> constexpr int kRowsThreads = CENTRED || VECTORS ? kBackwardThreads : 640;

// The tensors of backward. weight and what is written may be null; grad_summed is null but in add_rms_norm, mean and
// bias_parts unless CENTRED.
template <typename T> struct Backward {
  const T *grad_y, *x, *weight, *grad_summed;
  const acc_t<T>*mean, *rstd;
  T* grad_x;
  acc_t<T>*weight_parts, *bias_parts;
  long long rows, size;

  __device__ __forceinline__ bool vectors() const {
    return vectors_fit<kVecWidth<T>>(size, grad_y, x, weight, grad_summed, grad_x);
  }

  __device__ __forceinline__ Statistics<acc_t<T>> statistics(long long row) const {
    if (row >= rows) return {};
    return {mean ? mean[row] : acc_t<T>(0), rstd[row]};
  }
};

// What backward has of one pack of a row.
template <bool CENTRED, typename T, typename A = acc_t<T>> struct Gradient {
  Pack<T> x, grad_y, weight;
  Statistics<A> of;

  __device__ __forceinline__ A xhat(int e) const { return of.template xhat<CENTRED>(x[e]); }
  __device__ __forceinline__ A wg(int e) const { return mul_rn(grad_y[e], weight[e]); }
  __device__ __forceinline__ void add_to(Pair<A>& c, int e) const {
    c.first += wg(e) * xhat(e);
    if (CENTRED) c.second += wg(e);
  }
  // `slope`: rstd c1.
  __device__ __forceinline__ A grad_x(int e, A slope, A c2) const {
    return of.rstd * ((CENTRED ? wg(e) - c2 : wg(e)) - of.template centred<CENTRED>(x[e]) * slope);
  }
};

template <bool CENTRED, int K, bool VECTORS, typename A>
using BackwardSums = RowSums<A, CENTRED ? 2 : 1, (K > 1), (K > 1 && !VECTORS)>;

// One number, of which a half is 0 unless CENTRED.
template <bool CENTRED, typename A, typename Sums> __device__ __forceinline__ Pair<A> row_sum(Pair<A> c, Sums& sums) {
  if constexpr (CENTRED) {
    A both[2] = {c.first, c.second};
    sums.add(both);
    return {both[0], both[1]};
  } else {
    return {sums.add(c.first), A(0)};
  }
}

// The block's sum for each column, over threadIdx.y in order, to its place in a row of the parts. The tiles of all
// threads lie alike. `shared`, on a 16-byte boundary, holds W values of each thread of the block.
template <int K, int W, bool VECTORS, typename A>
__device__ __forceinline__ void store_parts(const Tile<K, W, VECTORS>& tile, const A (&values)[K][W], A* row,
                                            A* shared) {
  const int slab = W * blockDim.x, threads = blockDim.x * blockDim.y;
#pragma unroll
  for (int k = 0; k < K; ++k) {
    __syncthreads();
#pragma unroll
    for (int p = 0; p < W; p += kVecWidth<A>) {
      Pack<A> pack = {};
#pragma unroll
      for (int e = 0; e < kVecWidth<A>; ++e) pack.set(e, values[k][p + e]);
      *reinterpret_cast<uint4*>(shared + threadIdx.y * slab + threadIdx.x * W + p) =
          make_uint4(pack.word[0], pack.word[1], pack.word[2], pack.word[3]);
    }
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.y * blockDim.x + threadIdx.x; i < slab; i += threads) {
      A total = A(0);
#pragma unroll 4
      for (int y = 0; y < blockDim.y; ++y) total += shared[y * slab + i];
      const int column = k * slab + i - tile.shift;
      if (tile.template all<1>(column)) row[column] = total;
    }
  }
}

// Which of this thread's K packs are of a row, the same in all rows that begin alike within a pack: pack k where k < count,
// and wholly, each one access, where from <= k < whole. Nothing of this is found, nor to be asked, where VECTORS.
template <int K, int W> struct OwnPacks {
  int from = 0, whole = 0, count = 0;

  template <bool VECTORS> __device__ __forceinline__ OwnPacks(const Tile<K, W, VECTORS>& tile, bool aligned) {
    if constexpr (!VECTORS) {
      from = tile.index(0, 0) < tile.begin;
#pragma unroll
      for (int k = 0; k < K; ++k) {
        const int i = tile.index(k, 0);
        count += tile.any(i);
        whole += aligned && i + W <= tile.left;
      }
      asm volatile("" : "+r"(from), "+r"(whole), "+r"(count));  // else they are found anew for each row
    }
  }

  __device__ __forceinline__ bool any(int k) const { return k < count; }
  __device__ __forceinline__ bool is_whole(int k) const { return k >= from && k < whole; }
  __device__ __forceinline__ bool all_whole() const { return from == 0 && whole == count; }
};

// All gradients in one pass. Grid: one wave of blocks that stride over the rows; a multiple of W where not VECTORS. Block:
// see rows.cuh, at most kRowsThreads; K packs in each thread hold a row, or with K > 1 in each thread of a cluster.
// Shared memory: see Fetched, with as many stages as said, and 16 K bytes for each thread for the weight. With PARAMETERS,
// each thread adds its columns' part of grad_weight and grad_bias, in acc_t<T>, over all rows of the block, and its row of
// `weight_parts` and `bias_parts` (blocks or clusters, size) gets the block's sum. VECTORS: as norm_rows.
template <bool CENTRED, bool PARAMETERS, int TENSORS, int K, bool VECTORS, typename T, typename A = acc_t<T>>
__device__ __forceinline__ void norm_rows_bwd(const Backward<T>& to, int stages) {
  using Sums = BackwardSums<CENTRED, K, VECTORS, A>;
  __shared__ typename Sums::Room room;
  Sums sums(room);
  const bool two = stages == 2;
  constexpr int W = kVecWidth<T>;
  using Row = Tile<K, W, VECTORS>;
  const int period = VECTORS ? 1 : W;  // rows so far apart begin alike within a pack
  const long long group = sums.group(), stride = sums.groups() * blockDim.y, own = threadIdx.y * (long long)period;
  const long long first = group / period * blockDim.y * period + group % period + own;
  const int part = sums.part();

  const auto fetched = Fetched<TENSORS, K, T, !VECTORS>::of_thread(stages * TENSORS + 1);
  const int weights = two ? 2 : 1;  // the place of the weight, behind the stages
  const Row columns = Row::at(first, first + 1, to.size, part);
  const long long start = part * (long long)Row::capacity();
  const T* weight = to.weight ? to.weight + start : nullptr;
  if (VECTORS && weight) {
    fetched.fetch(columns, weight, weights, 0);
    end_group();
  } else {
#pragma unroll 1
    for (int k = 0; k < K; ++k) fetched.put(load_parameter(columns, weight, k, 1), weights, 0, k);
  }
  const bool aligned =
      is_aligned16(to.x) && is_aligned16(to.grad_y) && is_aligned16(to.grad_summed) && is_aligned16(to.grad_x);
  const OwnPacks<K, W> packs(columns, aligned);
  Statistics<A> of = {}, coming_of = {};
  const auto fetch = [&](long long row, int stage) {
    of = coming_of, coming_of = to.statistics(row);
    if constexpr (!VECTORS) {
      const long long from = row * to.size + start;
      if (aligned && row + 1 < to.rows) {  // a pack at an end has neighbours of other rows
        const int i = columns.index(0, 0);
        fetched.fetch_first(packs.count, to.x + from + i, stage, 0);
        fetched.fetch_first(packs.count, to.grad_y + from + i, stage, 1);
        if (TENSORS > 2) fetched.fetch_first(packs.count, to.grad_summed + from + i, stage, 2);
        return;
      }
    }
    const Row tile = Row::at(row, to.rows, to.size, part);
    const long long at = row * to.size + start;
    fetched.fetch(tile, to.x + at, stage, 0);
    fetched.fetch(tile, to.grad_y + at, stage, 1);
    if (TENSORS > 2) fetched.fetch(tile, to.grad_summed + at, stage, 2);
  };

  const A count = A(int(to.size)), share = A(1) / count;
  const auto mean_of = [&](A sum) { return sizeof(T) == 2 ? sum * share : sum / count; };
  A weight_sum[K][W] = {}, bias_sum[K][W] = {};
  const auto differentiate = [&](long long row, int stage) {
    const Row tile = Row::at(row, to.rows, to.size, part);
    if (!two) of = coming_of;
    if constexpr (!VECTORS) {
      if (!packs.all_whole()) {
#pragma unroll 1
        for (int k = 0; k < packs.count; ++k) {
          if (!packs.is_whole(k)) fetched.settle_pack(columns, stage, k);
        }
      }
    }
    const auto pack = [&](int k) {
      return Gradient<CENTRED, T>{fetched.get(stage, 0, k), fetched.get(stage, 1, k), fetched.get(weights, 0, k), of};
    };
    Pair<A> c = {};
#pragma unroll
    for (int k = 0; k < K; ++k) {
      if (!VECTORS && !packs.any(k)) continue;
      const Gradient<CENTRED, T> g = pack(k);
#pragma unroll
      for (int e = 0; e < W; ++e) {
        g.add_to(c, e);
        if (PARAMETERS) weight_sum[k][e] += g.grad_y[e] * g.xhat(e);
        if (PARAMETERS && CENTRED) bias_sum[k][e] += g.grad_y[e];
      }
    }
    if (!to.grad_x) return;
    c = row_sum<CENTRED>(c, sums);
    if (!VECTORS && row >= to.rows) return;
    const A slope = of.rstd * mean_of(c.first), c2 = mean_of(c.second);
    T* grad_x = to.grad_x + row * to.size + start;
    const auto gradient = [&](int k) {
      const Gradient<CENTRED, T> g = pack(k);
      const Pack<T> more = TENSORS > 2 ? fetched.get(stage, 2, k) : Pack<T>{};
      return [=](int e) {
        const A grad = g.grad_x(e, slope, c2);
        return TENSORS > 2 ? grad + more[e] : grad;
      };
    };
    if constexpr (VECTORS) {
#pragma unroll
      for (int k = 0; k < K; ++k) store_pack(tile, grad_x, k, gradient(k));
    } else {
      unsigned word[4];
#pragma unroll
      for (int k = 0; k < K; ++k) {
        if (!packs.is_whole(k)) continue;
        round_to_words<T>(word, 0, gradient(k));
        store_words(grad_x + columns.index(k, 0), word[0], word[1], word[2], word[3]);
      }
      if (packs.all_whole()) return;
#pragma unroll 1
      for (int k = 0; k < packs.count; ++k) {
        if (packs.is_whole(k)) continue;
        round_to_words<T>(word, 0, gradient(k));
        store_words_of(columns, grad_x, k, word);
      }
    }
  };
  each_fetched(first, own, stride, to.rows, two, fetch, differentiate);
  if (!PARAMETERS) return;
  A* shared = reinterpret_cast<A*>(fetched.room());
  const long long at = group * to.size + start;
  if (to.weight_parts) store_parts(columns, weight_sum, to.weight_parts + at, shared);
  if (to.bias_parts) store_parts(columns, bias_sum, to.bias_parts + at, shared);
}

// See norm_wide_bwd: one row, read twice.
template <bool CENTRED, int K, bool VECTORS, typename T, typename Sums, typename A = acc_t<T>>
__device__ __forceinline__ void norm_wide_row_bwd(const Backward<T>& to, long long row, Sums& sums) {
  constexpr int W = kVecWidth<T>;
  using Part = Tile<K, W, VECTORS>;
  const int parts = Part::count(to.size);
  const Statistics<A> of = to.statistics(row);
  const T zero = from_acc<T>(0);
  const auto start = [](int c) { return c * (long long)Part::capacity(); };
  Gradient<CENTRED, T> g[K];
  const auto load = [&](const Part& part, int c) {
    const long long at = row * to.size + start(c);
#pragma unroll
    for (int k = 0; k < K; ++k) {
      g[k] = {load_pack(part, to.x + at, k, zero), load_pack(part, to.grad_y + at, k, zero),
              load_parameter(part, to.weight ? to.weight + start(c) : nullptr, k, 1), of};
    }
  };
  Pair<A> total = {};
  for (int c = 0; c < parts; ++c) {
    load(Part::at(row, to.rows, to.size, c), c);
    Pair<A> own = {};  // added up apart: in a very long row the sum so far is large
    each_element<K, W>([&](int k, int e) { g[k].add_to(own, e); });
    total.first += own.first, total.second += own.second;
  }
  total = row_sum<CENTRED>(total, sums);
  const A slope = of.rstd * (total.first / to.size), c2 = total.second / to.size;
  for (int c = parts - 1; c >= 0; --c) {
    const Part part = Part::at(row, to.rows, to.size, c);
    load(part, c);
    const long long at = row * to.size + start(c);
#pragma unroll
    for (int k = 0; k < K; ++k) {
      const Pack<T> more = to.grad_summed ? load_pack(part, to.grad_summed + at, k, zero) : Pack<T>{};
      store_pack(part, to.grad_x + at, k, [&](int e) {
        const A grad = g[k].grad_x(e, slope, c2);
        return to.grad_summed ? grad + more[e] : grad;
      });
    }
  }
}

// grad_x of rows too long for registers; the parameters' gradients are norm_columns_bwd's work. Grid: any. Block: (a
// multiple of 64, 1), at most kBackwardThreads.
template <bool CENTRED, typename T> __device__ __forceinline__ void norm_wide_bwd(const Backward<T>& to) {
  using Sums = BackwardSums<CENTRED, 1, true, acc_t<T>>;
  __shared__ typename Sums::Room room;
  Sums sums(room);
  const bool vectors = to.vectors();
  for (long long row = blockIdx.x; row < to.rows; row += gridDim.x) {
    if (vectors) norm_wide_row_bwd<CENTRED, 2, true>(to, row, sums);
    else norm_wide_row_bwd<CENTRED, 1, false>(to, row, sums);
  }
}

// See norm_columns_bwd.
template <bool CENTRED, bool VECTORS, typename T, typename A = acc_t<T>>
__device__ __forceinline__ void norm_columns_bwd_of(const Backward<T>& to, A* shared) {
  constexpr int W = kVecWidth<T>;
  using Columns = Tile<1, W, VECTORS>;
  const Columns tile = Columns::at(0, 1, to.size, blockIdx.x);
  const long long start = blockIdx.x * (long long)Columns::capacity(), part = blockIdx.y * to.size + start;
  const T zero = from_acc<T>(0);
  A weight_sum[1][W] = {}, bias_sum[1][W] = {};
#pragma unroll 4
  for (long long row = blockIdx.y; row < to.rows; row += gridDim.y) {
    const long long at = row * to.size + start;
    const Pack<T> x = load_per_column(tile, to.x + at, 0, zero), g = load_per_column(tile, to.grad_y + at, 0, zero);
    const Statistics<A> of = to.statistics(row);
#pragma unroll
    for (int e = 0; e < W; ++e) {
      weight_sum[0][e] += g[e] * of.template xhat<CENTRED>(x[e]);
      if (CENTRED) bias_sum[0][e] += g[e];
    }
  }
  if (to.weight_parts) store_parts(tile, weight_sum, to.weight_parts + part, shared);
  if (to.bias_parts) store_parts(tile, bias_sum, to.bias_parts + part, shared);
}

// A part of the parameters' gradients for rows too long for registers. Grid: (tiles of columns, parts). Block: (threads,
// 1); a thread owns one pack of columns, in every gridDim.y-th row. Row blockIdx.y of `weight_parts` and `bias_parts`
// (gridDim.y, size) gets the sum.
template <bool CENTRED, typename T> __device__ __forceinline__ void norm_columns_bwd(const Backward<T>& to) {
  __shared__ __align__(16) acc_t<T> shared[kBackwardThreads * kVecWidth<T>];
  if (vectors_fit<kVecWidth<T>>(to.size, to.grad_y, to.x)) norm_columns_bwd_of<CENTRED, true>(to, shared);
  else norm_columns_bwd_of<CENTRED, false>(to, shared);
}

// The parameters' gradients from the parts of the blocks, (gridDim.y, count, size), added in a fixed order. Grid: (ceil(size
// / blockDim.x), 1 or 2): grad_weight, then grad_bias, whichever is not null. Block: powers of two, at most 1024 threads,
// threadIdx.y dealing out the parts; a thread of threadIdx.y 0 owns a column.
template <typename T, int AT_ONCE = 8>
__device__ __forceinline__ void norm_sum_bwd(const acc_t<T>* __restrict__ parts, T* grad_weight, T* grad_bias,
                                             int count, long long size) {
  using A = acc_t<T>;
  __shared__ A shared[1024];
  T* grad = blockIdx.y == 0 && grad_weight ? grad_weight : grad_bias;
  const A* part = parts + blockIdx.y * count * size;
  const long long column = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  const bool live = column < size;
  A sum = A(0);
  for (int first = threadIdx.y; first < count; first += AT_ONCE * blockDim.y) {
    A values[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const int p = first + i * blockDim.y;
      values[i] = live && p < count ? part[p * size + column] : A(0);
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) sum += values[i];
  }
  A* mine = shared + threadIdx.y * blockDim.x + threadIdx.x;
  *mine = sum;
  for (int half = blockDim.y / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.y < half) *mine += mine[half * blockDim.x];
  }
  if (threadIdx.y == 0 && live) grad[column] = from_acc<T>(*mine);
}
