// Forward of rows that are too long for registers, but not for the shared memory of a block.
#pragma once

#include "norm/unaligned.cuh"
#include "common/reduce/row.cuh"

// Each thread keeps its vectors of a row in shared memory, 16 bytes for each, and reads them there for itself; rows are
// divided as UnalignedRow says. Grid: any. Block: SHARED_MEMORY_THREADS. Dynamic shared memory: the whole vectors of a row.
// Where rows and tensors are aligned the parameters are as they come, else as shift_parameter() leaves them.
template <bool CENTRED, int INPUTS, typename T, typename Adder, typename A = acc_t<T>>
__device__ __forceinline__ void norm_shared_memory(const Forward<T>& to, Adder& adder) {
  constexpr int W = kVecWidth<T>, K = 4;  // vectors that are loaded at a time
  constexpr int STEP = SHARED_MEMORY_THREADS * W;
  extern __shared__ uint4 row_vectors[];
  T* mine = reinterpret_cast<T*>(row_vectors + threadIdx.x);
  const int own = threadIdx.x * W;
  const A count = A(int(to.size)), scale = scale_for<A>(int(to.size));
  const long long pitch = (to.size + W - 1) & -W;
  for (long long row = blockIdx.x; row < to.rows; row += gridDim.x) {
    const UnalignedRow<W, false> edges(row, to.rows, to.size);
    const long long at = row * to.size + edges.head + own, place = row * to.size + edges.column;
    const int left = edges.whole - own;
    A sums[W] = {}, mean = A(0);
    T edge = from_acc<T>(0);
    if (edges.lone) edge = to.x[place];
    if (INPUTS > 1 && edges.lone) to.summed[place] = edge = from_acc<T>(to_acc(edge) + to_acc(to.residual[place]));
    for (int start = 0; start < left; start += K * STEP) {
      Vector<T> x[K], residual[K];
      load_own<false>(to.x + at + start, left - start, STEP, x);
      if (INPUTS > 1) load_own<false>(to.residual + at + start, left - start, STEP, residual);
#pragma unroll
      for (int k = 0; k < K; ++k) {
        if (start + k * STEP >= left) break;
        if (INPUTS > 1) store_words(to.summed + at + start + k * STEP, x[k] = rounded_sum(x[k], residual[k]));
        *reinterpret_cast<uint4*>(mine + start + k * STEP) =
            make_uint4(x[k].word[0], x[k].word[1], x[k].word[2], x[k].word[3]);
#pragma unroll
        for (int e = 0; e < W; ++e) sums[e] = fma(x[k][e], CENTRED ? scale : x[k][e], sums[e]);
      }
    }
    if constexpr (CENTRED) {
      sums[0] += to_acc(edge) * scale;
      mean = adder.add(tree_sum(sums)) / (count * scale);
#pragma unroll
      for (int e = 0; e < W; ++e) sums[e] = A(0);
#pragma unroll 4
      for (int start = 0; start < left; start += STEP) {
        const Vector<T> x = load_aligned(mine + start);
#pragma unroll
        for (int e = 0; e < W; ++e) sums[e] = fma(x[e] - mean, x[e] - mean, sums[e]);
      }
    }
    if (edges.lone) sums[0] += (to_acc(edge) - mean) * (to_acc(edge) - mean);
    const RowStatistics<A> of = {mean, rstd_of<T>(adder.add(tree_sum(sums)) / count + to.eps)};
    const long long shifted = edges.head * pitch + own;
    const T *const weight = written_before(to.weight), *const bias = written_before(to.bias);
    for (int start = 0; start < left; start += K * STEP) {
      Vector<T> w[K], b[K];
      const auto load = [&](const T* values, Vector<T>(&vectors)[K], float otherwise) {
        if (values) return load_own<true>(values + shifted + start, left - start, STEP, vectors);
#pragma unroll
        for (int k = 0; k < K; ++k) vectors[k] = Vector<T>::filled(from_acc<T>(otherwise));
      };
      load(weight, w, 1);
      if (CENTRED) load(bias, b, 0);
#pragma unroll
      for (int k = 0; k < K; ++k) {
        if (start + k * STEP >= left) break;
        const Vector<T> x = load_aligned(mine + start + k * STEP);
        store_words(to.y + at + start + k * STEP,
                    rounded<T>([&](int e) { return of.template y<CENTRED>(x[e], w[k][e], b[k][e]); }));
      }
    }
    if (edges.lone) store_edge<CENTRED>(weight, bias, to.y + place, edges.column, edge, of);
    if (threadIdx.x == 0) to.save(row, of);
  }
}
