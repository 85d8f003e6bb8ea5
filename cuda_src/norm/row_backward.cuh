// Backward of rows that a block or a cluster holds in shared memory, the next on their way: all gradients in one pass.
#pragma once

#include "common/tile/row_pipeline.cuh"
#include "norm/backward.cuh"

// What is asked for before the row is there: its statistics, and of one element of it, where there is one.
template <typename T, typename A = acc_t<T>> struct Ahead {
  Statistics<A> of = {};
  T x, grad_y, grad_summed;
};

// The element that a thread has of each row besides its vectors: see UnalignedRow.
template <bool CENTRED, int TENSORS, typename T, typename A = acc_t<T>> struct Lone {
  const bool there;
  const int column;
  const T weight;
  A weight_sum = A(0), bias_sum = A(0);

  __device__ __forceinline__ Lone(bool there, int column, const T* weights)
      : there(there), column(column), weight(there && weights ? weights[column] : from_acc<T>(1)) {}

  __device__ __forceinline__ Ahead<T> ask_for(const Backward<T>& to, long long row) const {
    Ahead<T> ahead;
    ahead.of = to.statistics(row);
    if (!there || row >= to.rows) return ahead;
    const long long at = row * to.size + column;
    ahead.x = to.x[at], ahead.grad_y = to.grad_y[at];
    if (TENSORS > 2) ahead.grad_summed = to.grad_summed[at];
    return ahead;
  }

  __device__ __forceinline__ Gradient<CENTRED, T> gradient(const Ahead<T>& ahead) const {
    Gradient<CENTRED, T> g = {{}, {}, {}, ahead.of};
    g.x.set(0, ahead.x), g.grad_y.set(0, ahead.grad_y), g.weight.set(0, weight);
    return g;
  }

  // The block's sum over threadIdx.y, in order, of `own`, to its place in a row of the parts.
  __device__ __forceinline__ void store_part(A own, A* row, A* shared) const {
    constexpr int kMost = 2 * kVecWidth<T>;
    __syncthreads();
    if (there) shared[threadIdx.y * kMost + threadIdx.x] = own;
    __syncthreads();
    if (!there || threadIdx.y > 0) return;
    A total = A(0);
    for (int y = 0; y < blockDim.y; ++y) total += shared[y * kMost + threadIdx.x];
    row[column] = total;
  }
};

// All gradients in one pass. Grid: one wave of blocks that stride over the rows; a multiple of W where not ALIGNED. Block:
// see rows.cuh, at most kBackwardThreads; K vectors in each thread hold a row, or with K > 1 in each thread of a cluster.
// Shared memory: see PipelinedRow, with as many stages as said, and 16 K bytes for each thread for the weight. With PARAMETERS,
// each thread adds its columns' part of grad_weight and grad_bias, in acc_t<T>, over all rows of the block, and its row of
// `weight_parts` and `bias_parts` (blocks or clusters, pitch_of(size)) gets the block's sum. ALIGNED: whether all rows and
// tensors fit; else threads own whole vectors of grad_x, which begins at a 16-byte boundary, and at least 2 W share a row that
// is not of whole vectors. LATE, of two stages alone: statistics of the next row are asked for once this row is there, which of
// wide rows takes less time.
template <bool CENTRED, bool PARAMETERS, int TENSORS, int K, bool ALIGNED, bool LATE, typename T, typename A = acc_t<T>>
__device__ __forceinline__ void norm_rows_bwd(const Backward<T>& to, int stages) {
  let_next_grid_begin();
  using Sums = BackwardSums<CENTRED, K, ALIGNED, A>;
  __shared__ typename Sums::Room room;
  Sums sums(room);
  const bool two = stages == 2;
  constexpr int W = kVecWidth<T>;
  using Row = Tile<K, W, true>;
  const int period = ALIGNED ? 1 : W;  // rows so far apart begin alike within a vector
  const long long group = sums.group(), stride = sums.groups() * blockDim.y, own = threadIdx.y * (long long)period;
  const long long first = group / period * blockDim.y * period + group % period + own;
  const int part = sums.part();
  const UnalignedRow<W, ALIGNED> cut(first, first + 1, to.size);  // as all rows of this thread
  const long long start = cut.head + part * (long long)Row::capacity();

  const auto fetched = PipelinedRow<TENSORS, K, T>::of_thread();
  const int weights = two ? 2 : 1;  // the place of the weight, behind the stages
  const Row columns = Row::at(first, first + 1, cut.whole, part);
  if (to.weight) {
    fetched.template fetch<ALIGNED>(columns, to.weight + start, weights, 0);
    end_group();
  } else {
#pragma unroll 1
    for (int k = 0; k < K; ++k) fetched.put(Vector<T>::filled(from_acc<T>(1)), weights, 0, k);
  }
  Lone<CENTRED, TENSORS, T> lone(cut.lone && part == 0, cut.column, to.weight);
  Ahead<T> now, coming;
  if constexpr (LATE) coming = lone.ask_for(to, first);
  const auto ask_for = [&](long long row) { now = coming, coming = lone.ask_for(to, row); };
  const auto fetch = [&](long long row, int stage) {
    if constexpr (!LATE) ask_for(row);
    const Row tile = Row::at(row, to.rows, cut.whole, part);
    const long long at = row * to.size + start;
    fetched.template fetch<ALIGNED>(tile, to.x + at, stage, 0);
    fetched.template fetch<ALIGNED>(tile, to.grad_y + at, stage, 1);
    if (TENSORS > 2) fetched.template fetch<ALIGNED>(tile, to.grad_summed + at, stage, 2);
  };

  const A count = A(int(to.size)), share = A(1) / count;
  const auto mean_of = [&](A sum) { return sizeof(T) == 2 ? sum * share : sum / count; };
  A weight_sum[K][W] = {}, bias_sum[K][W] = {};
  const auto differentiate = [&](long long row, int stage) {
    const Row tile = Row::at(row, to.rows, cut.whole, part);
    if constexpr (LATE) ask_for(row + stride);
    else if (!two) now = lone.ask_for(to, row);
    const bool alone = !ALIGNED && lone.there && row < to.rows;
    const auto vector = [&](int k) {
      return Gradient<CENTRED, T>{fetched.get(stage, 0, k), fetched.get(stage, 1, k), fetched.get(weights, 0, k),
                                  now.of};
    };
    Pair<A> c = {};
#pragma unroll
    for (int k = 0; k < K; ++k) {
      const Gradient<CENTRED, T> g = vector(k);
#pragma unroll
      for (int e = 0; e < W; ++e) {
        g.add_to(c, e);
        if (PARAMETERS) weight_sum[k][e] += g.grad_y[e] * g.xhat(e);
        if (PARAMETERS && CENTRED) bias_sum[k][e] += g.grad_y[e];
      }
    }
    if (alone) {
      const Gradient<CENTRED, T> g = lone.gradient(now);
      g.add_to(c, 0);
      lone.weight_sum += g.grad_y[0] * g.xhat(0), lone.bias_sum += g.grad_y[0];
    }
    if (!to.grad_x) return;
    c = row_sum<CENTRED>(c, sums);
    const A slope = now.of.rstd * mean_of(c.first), c2 = mean_of(c.second);
    T* grad_x = to.grad_x + row * to.size;
#pragma unroll
    for (int k = 0; k < K; ++k) {
      const Gradient<CENTRED, T> g = vector(k);
      const Vector<T> more = TENSORS > 2 ? fetched.get(stage, 2, k) : Vector<T>{};
      store_vector(tile, grad_x + start, k, [&](int e) {
        const A grad = g.grad_x(e, slope, c2);
        return TENSORS > 2 ? grad + more[e] : grad;
      });
    }
    if (alone) {
      const A grad = lone.gradient(now).grad_x(0, slope, c2);
      grad_x[lone.column] = from_acc<T>(TENSORS > 2 ? grad + to_acc(now.grad_summed) : grad);
    }
  };
  each_pipelined_row(first, own, stride, to.rows, two, fetch, differentiate);
  if (!PARAMETERS) return;
  A* shared = reinterpret_cast<A*>(fetched.room());
  const auto store = [&](const A(&sum)[K][W], A single, A* parts) {
    if (!parts) return;
    parts += to.part(group);
    store_parts(columns, sum, parts + start, shared);
    if (!ALIGNED) lone.store_part(single, parts, shared);
  };
  store(weight_sum, lone.weight_sum, to.weight_parts);
  store(bias_sum, lone.bias_sum, to.bias_parts);
}
