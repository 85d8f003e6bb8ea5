// Forward of rows that no block holds, and of all rows of fp64: each is read twice.
#pragma once

#include "norm/norm.cuh"

// The moments of this thread's elements of a tile of vectors get(k), whose padding is 0.
template <int UNROLL, int K, int W, bool ALIGNED, typename Get>
__device__ __forceinline__ auto own_moments(const Tile<K, W, ALIGNED>& tile, Get get) {
  constexpr int CHAINS = W < 4 ? W : 4;  // sums that do not wait for each other
  auto vector = get(0);
  using A = decltype(vector[0]);
  A first = A(0);
  int count = 0;
#pragma unroll
  for (int e = 0; e < W; ++e) first += vector[e];
  if constexpr (!ALIGNED) tile.each_of(0, [&](int) { ++count; });
  const A about = ALIGNED ? first / W : first / A(count ? count : 1);
  count = 0;
  Pair<A> sums[CHAINS] = {};
#pragma unroll(UNROLL)
  for (int k = 0; k < K; ++k) {
    if (k > 0) vector = get(k);
    tile.each_of(k, [&](int e) {
      const A apart = vector[e] - about;
      sums[e % CHAINS].first += apart, sums[e % CHAINS].second += apart * apart, ++count;
    });
  }
#pragma unroll
  for (int i = 1; i < CHAINS; ++i) sums[0] = sums[0] + sums[i];
  return Moments<A>::of(A(count), about, sums[0].first, sums[0].second);
}

// See norm_two_pass: one row. The second pass begins at the row's end: what was read last is still in the cache. About a mean
// of 0 and with a summand of -0 both operators are one, to the bit, so that their second pass exists once.
template <int K, bool ALIGNED, typename T, typename A = acc_t<T>>
__device__ __forceinline__ RowStatistics<A> norm_row_in_two_passes(const Forward<T>& to, long long row,
                                                                   Moments<A>* shared) {
  using Part = Tile<K, kVecWidth<T>, ALIGNED>;
  const int parts = Part::count(to.size);
  const bool centred = to.mean != nullptr;
  Vector<T> vectors[K], residual[K];
  const auto start = [](int c) { return c * (long long)Part::capacity(); };
  const auto load = [&](const Part& part, long long at, bool again) {
    const bool summed = ALIGNED && again && to.residual;  // else a vector has elements that another block may yet write
    load_row(part, (summed ? to.summed : to.x) + at, from_acc<T>(0), vectors);
    if (!to.residual || summed) return;
    load_row(part, to.residual + at, from_acc<T>(0), residual);
#pragma unroll
    for (int k = 0; k < K; ++k) vectors[k] = rounded_sum(vectors[k], residual[k]);
  };
  const auto store_sum = [&](const Part& part, int c) {
#pragma unroll
    for (int k = 0; k < K; ++k) store_words_of(part, to.summed + row * to.size + start(c), k, vectors[k].word);
  };
  const auto get = [&](int k) { return vectors[k]; };
  A squares = A(0);
  Moments<A> moments = {};
#pragma unroll 1
  for (int c = 0; c < parts; ++c) {
    const Part part = Part::at(row, to.rows, to.size, c);
    load(part, row * to.size + start(c), false);
    if (ALIGNED && to.residual) store_sum(part, c);
    if (centred) moments.merge(own_moments<K>(part, get));
    else squares += own_squares<K, kVecWidth<T>>(get);
  }
  RowStatistics<A> of;
  if (centred) {
    const Moments<A> all = block_merge(moments, shared);
    of = {all.mean, all.rstd(to.eps)};
  } else {
    of = {A(0), inverse_sqrt(block_reduce<Sum>(squares, &shared->count) / to.size + to.eps)};
  }
#pragma unroll 1
  for (int c = parts - 1; c >= 0; --c) {
    const Part part = Part::at(row, to.rows, to.size, c);
    load(part, row * to.size + start(c), true);
    if (!ALIGNED && to.residual) store_sum(part, c);
#pragma unroll
    for (int k = 0; k < K; ++k) {
      const Vector<T> w = load_parameter(part, to.weight ? to.weight + start(c) : nullptr, k, 1);
      const Vector<T> b = load_parameter(part, to.bias ? to.bias + start(c) : nullptr, k, -0.0f);
      store_vector(part, to.y + row * to.size + start(c), k,
                   [&](int e) { return of.template y<true>(vectors[k][e], w[e], b[e]); });
    }
  }
  return of;
}

// Rows of any length, as norm_block, with the parameters as they come; about the mean where it is saved. Grid: any. Block: (a
// multiple of 32, 1).
template <typename T> __device__ __forceinline__ void norm_two_pass(const Forward<T>& to) {
  __shared__ Moments<acc_t<T>> shared[kWarp];
  const bool aligned = to.aligned();
  for (long long row = blockIdx.x; row < to.rows; row += gridDim.x) {
    const auto of =
        aligned ? norm_row_in_two_passes<4, true>(to, row, shared) : norm_row_in_two_passes<2, false>(to, row, shared);
    if (threadIdx.x == 0) to.save(row, of);
  }
}
