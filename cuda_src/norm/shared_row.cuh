// Forward of rows that are too long for registers, but not for shared memory.
#pragma once

#include "norm/unaligned.cuh"
#include "common/reduce/row.cuh"

constexpr int kHeldThreads = 512;  // of a row in shared memory

// As norm_rows unless ALIGNED, for rows too long for registers: they wait in shared memory, 16 bytes for each vector, which
// each thread fills and reads for itself. Where all fits, the parameters are as they come. Block: kHeldThreads.
template <bool CENTRED, int TENSORS, typename T, typename A = acc_t<T>>
__device__ __forceinline__ void norm_held(const Forward<T>& to) {
  constexpr int W = kVecWidth<T>, K = 4;  // vectors under way at a time
  constexpr int STEP = kHeldThreads * W;
  using Sums = RowSums<A, 1, false>;
  extern __shared__ uint4 held[];
  __shared__ typename Sums::Room room;
  Sums sums(room);
  T* mine = reinterpret_cast<T*>(held + threadIdx.x);
  const int own = threadIdx.x * W;
  const A count = A(int(to.size)), scale = scale_for<A>(int(to.size));
  const long long pitch = (to.size + W - 1) & -W;
  for (long long row = blockIdx.x; row < to.rows; row += gridDim.x) {
    const UnalignedRow<W, false> cut(row, to.rows, to.size);
    const long long at = row * to.size + cut.head + own, place = row * to.size + cut.column;
    const int left = cut.whole - own;
    A parts[W] = {}, mean = A(0);
    T alone = from_acc<T>(0);
    if (cut.lone) alone = to.x[place];
    if (TENSORS > 1 && cut.lone) to.summed[place] = alone = from_acc<T>(to_acc(alone) + to_acc(to.residual[place]));
    for (int start = 0; start < left; start += K * STEP) {
      Vector<T> x[K], residual[K];
      load_own<false>(to.x + at + start, left - start, STEP, x);
      if (TENSORS > 1) load_own<false>(to.residual + at + start, left - start, STEP, residual);
#pragma unroll
      for (int k = 0; k < K; ++k) {
        if (start + k * STEP >= left) break;
        if (TENSORS > 1) store_words(to.summed + at + start + k * STEP, x[k] = rounded_sum(x[k], residual[k]));
        *reinterpret_cast<uint4*>(mine + start + k * STEP) =
            make_uint4(x[k].word[0], x[k].word[1], x[k].word[2], x[k].word[3]);
#pragma unroll
        for (int e = 0; e < W; ++e) parts[e] = fma(x[k][e], CENTRED ? scale : x[k][e], parts[e]);
      }
    }
    if constexpr (CENTRED) {
      parts[0] += to_acc(alone) * scale;
      mean = sums.add(tree_sum(parts)) / (count * scale);
#pragma unroll
      for (int e = 0; e < W; ++e) parts[e] = A(0);
#pragma unroll 4
      for (int start = 0; start < left; start += STEP) {
        const Vector<T> x = load_aligned(mine + start);
#pragma unroll
        for (int e = 0; e < W; ++e) parts[e] = fma(x[e] - mean, x[e] - mean, parts[e]);
      }
    }
    if (cut.lone) parts[0] += (to_acc(alone) - mean) * (to_acc(alone) - mean);
    const Statistics<A> of = {mean, rstd_of<T>(sums.add(tree_sum(parts)) / count + to.eps)};
    const long long shifted = cut.head * pitch + own;
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
    if (cut.lone) store_lone<CENTRED>(weight, bias, to.y + place, cut.column, alone, of);
    if (threadIdx.x == 0) to.keep(row, of);
  }
}
