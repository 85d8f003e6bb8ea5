// Backward of rows that a block or a cluster holds in shared memory while the next row is copied there: all gradients in
// one pass.
#pragma once

#include "common/tile/row_pipeline.cuh"
#include "norm/backward.cuh"

// What a thread reads of a row other than by the pipeline: its statistics, and its element of the head or the tail.
template <typename T, typename A = acc_t<T>> struct Prefetched {
  RowStatistics<A> of = {};
  T x, grad_y, grad_summed;
};

// The element of the unaligned head or tail that a thread has of each row besides its vectors: see UnalignedRow.
template <bool CENTRED, int TENSORS, typename T, typename A = acc_t<T>> struct EdgeElement {
  const bool there;
  const int column;
  const T weight;
  A weight_sum = A(0), bias_sum = A(0);

  __device__ __forceinline__ EdgeElement(bool there, int column, const T* weights)
      : there(there), column(column), weight(there && weights ? weights[column] : from_acc<T>(1)) {}

  __device__ __forceinline__ Prefetched<T> prefetch(const Backward<T>& to, long long row) const {
    Prefetched<T> coming;
    coming.of = to.statistics(row);
    if (!there || row >= to.rows) return coming;
    const long long at = row * to.size + column;
    coming.x = to.x[at], coming.grad_y = to.grad_y[at];
    if (TENSORS > 2) coming.grad_summed = to.grad_summed[at];
    return coming;
  }

  __device__ __forceinline__ RowGradient<CENTRED, T> gradient(const Prefetched<T>& now) const {
    RowGradient<CENTRED, T> g = {{}, {}, {}, now.of};
    g.x.set(0, now.x), g.grad_y.set(0, now.grad_y), g.weight.set(0, weight);
    return g;
  }

  // The block's sum of `own` over threadIdx.y, in order, to its place in a row of the partials.
  __device__ __forceinline__ void store_partial(A own, A* row, A* shared) const {
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

// All gradients in one pass.
//
// TENSORS: those of rows that are read: grad_y, x, and in add_rms_norm grad_summed. Grid: one wave of blocks, or clusters,
// that stride over the rows; a multiple of W of them unless ALIGNED. Block: see row_tile.cuh, at most BACKWARD_THREADS; K
// vectors of each thread of a block, or with K > 1 of a cluster, are a row. Dynamic shared memory: that of PipelinedRow, of
// `stages` stages, and 16 K bytes for each thread for the weight.
//
// Each thread adds its columns' part of grad_weight and grad_bias, in acc_t<T>, over all rows of the block, and the block's
// sum goes to row `group` of weight_partials and bias_partials, (blocks or clusters, pitch_of(size)), where those are not
// null. ALIGNED: whether all rows and tensors begin at 16-byte boundaries; else threads own whole vectors of grad_x, which
// does, and at least 2 W threads share a row that is not of whole vectors.
//
// `late`, of two stages and aligned rows alone: the statistics of the next row are prefetched once this row has arrived, not
// when its copy begins: of wide rows that takes less time.
//
// It is longer than 80 lines: its parts share what each thread keeps in registers from row to row.
template <bool CENTRED, int TENSORS, int K, bool ALIGNED, typename T,
          typename Adder = BackwardAdder<CENTRED, K, ALIGNED, acc_t<T>>, typename A = acc_t<T>>
__device__ __forceinline__ void norm_block_bwd(const Backward<T>& to, int stages, bool late,
                                               typename Adder::Buffer& buffer) {
  let_next_grid_begin();
  Adder adder(buffer);
  const bool two_stages = stages == 2;
  if (!ALIGNED) late = false;
  constexpr int W = kVecWidth<T>;
  using Row = Tile<K, W, true>;
  const int period = ALIGNED ? 1 : W;  // rows so far apart begin alike within a vector
  const long long group = adder.group(), stride = adder.groups() * blockDim.y, own = threadIdx.y * (long long)period;
  const long long first = group / period * blockDim.y * period + group % period + own;
  const int part = adder.part();
  const UnalignedRow<W, ALIGNED> edges(first, first + 1, to.size);  // all rows of this thread are as its first
  const long long start = edges.head + part * (long long)Row::capacity();

  const auto pipeline = PipelinedRow<TENSORS, K, T>::of_thread();
  const int weight_slot = two_stages ? 2 : 1;  // behind the stages
  const Row columns = Row::at(first, first + 1, edges.whole, part);
  if (to.weight) {
    pipeline.template fetch<ALIGNED>(columns, to.weight + start, weight_slot, 0);
    end_group();
  } else {
#pragma unroll 1
    for (int k = 0; k < K; ++k) pipeline.put(Vector<T>::filled(from_acc<T>(1)), weight_slot, 0, k);
  }
  EdgeElement<CENTRED, TENSORS, T> edge(edges.lone && part == 0, edges.column, to.weight);
  Prefetched<T> now, coming;
  if (late) coming = edge.prefetch(to, first);
  const auto prefetch = [&](long long row) { now = coming, coming = edge.prefetch(to, row); };
  const auto fetch = [&](long long row, int stage) {
    if (!late) prefetch(row);
    const Row tile = Row::at(row, to.rows, edges.whole, part);
    const long long at = row * to.size + start;
    pipeline.template fetch<ALIGNED>(tile, to.x + at, stage, 0);
    pipeline.template fetch<ALIGNED>(tile, to.grad_y + at, stage, 1);
    if (TENSORS > 2) pipeline.template fetch<ALIGNED>(tile, to.grad_summed + at, stage, 2);
  };

  const A count = A(int(to.size)), share = A(1) / count;
  const auto mean_of = [&](A sum) { return sizeof(T) == 2 ? sum * share : sum / count; };
  A weight_sum[K][W] = {}, bias_sum[K][W] = {};
  const auto differentiate = [&](long long row, int stage) {
    const Row tile = Row::at(row, to.rows, edges.whole, part);
    if (late) prefetch(row + stride);
    else if (!two_stages) now = edge.prefetch(to, row);
    const bool has_edge = !ALIGNED && edge.there && row < to.rows;
    const auto vector = [&](int k) {
      return RowGradient<CENTRED, T>{pipeline.get(stage, 0, k), pipeline.get(stage, 1, k),
                                     pipeline.get(weight_slot, 0, k), now.of};
    };
    Pair<A> c = {};
#pragma unroll
    for (int k = 0; k < K; ++k) {
      const RowGradient<CENTRED, T> g = vector(k);
#pragma unroll
      for (int e = 0; e < W; ++e) {
        g.add_to(c, e);
        weight_sum[k][e] += g.grad_y[e] * g.xhat(e);
        if (CENTRED) bias_sum[k][e] += g.grad_y[e];
      }
    }
    if (has_edge) {
      const RowGradient<CENTRED, T> g = edge.gradient(now);
      g.add_to(c, 0);
      edge.weight_sum += g.grad_y[0] * g.xhat(0), edge.bias_sum += g.grad_y[0];
    }
    if (!to.grad_x) return;
    c = row_sum<CENTRED>(c, adder);
    const A slope = now.of.rstd * mean_of(c.first), c2 = mean_of(c.second);
    T* grad_x = to.grad_x + row * to.size;
#pragma unroll
    for (int k = 0; k < K; ++k) {
      const RowGradient<CENTRED, T> g = vector(k);
      const Vector<T> more = TENSORS > 2 ? pipeline.get(stage, 2, k) : Vector<T>{};
      store_vector(tile, grad_x + start, k, [&](int e) {
        const A grad = g.grad_x(e, slope, c2);
        return TENSORS > 2 ? grad + more[e] : grad;
      });
    }
    if (has_edge) {
      const A grad = edge.gradient(now).grad_x(0, slope, c2);
      grad_x[edge.column] = from_acc<T>(TENSORS > 2 ? grad + to_acc(now.grad_summed) : grad);
    }
  };
  each_pipelined_row(first, own, stride, to.rows, two_stages, fetch, differentiate);
  A* shared = reinterpret_cast<A*>(pipeline.buffer());
  const auto store = [&](const A(&sums)[K][W], A edge_sum, A* partials) {
    if (!partials) return;
    partials += to.partial(group);
    store_partials(columns, sums, partials + start, shared);
    if (!ALIGNED) edge.store_partial(edge_sum, partials, shared);
  };
  store(weight_sum, edge.weight_sum, to.weight_partials);
  store(bias_sum, edge.bias_sum, to.bias_partials);
}
