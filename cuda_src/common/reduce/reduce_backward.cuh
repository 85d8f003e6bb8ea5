// The gradient of a reduction over the rows or the columns of a contiguous x: what that of a result is to each element.
//
// The first loads of x go out before those of what belongs to a result. Unlike load_once(), they leave x in the L2: as much
// is written as is read, for which the L2 has to make space in any case.
//
// A Share is what is to be known of one result; shares(result, row) makes it. wants_(at, count) says whether elements `at` on
// of what was reduced to the result are to be read; get_(value) is the gradient of an element with that value, rest_(at) that
// of one that is not read. BACKWARD_VECTORS and BACKWARD_SHORT_UNITS, of a thread, are defined by backward.py.
#pragma once

#include "common/core/fast_divmod.cuh"
#include "common/reduce/reduction.cuh"
#include "common/tile/row_tile.cuh"
#include "common/core/vector_load.cuh"

// Grid: ceil(rows / blockDim.y) times `parts` of a row, which vary fastest. Block: any, x along a row. x and grad_x are
// [rows x size], the rows reduced, at any alignment: a thread owns BACKWARD_VECTORS whole vectors of grad_x in a part.
template <typename T, typename Shares>
__device__ __forceinline__ void backward_rows(const T* __restrict__ x, T* __restrict__ grad_x, long long rows,
                                              long long size, int parts, const Shares& shares) {
  constexpr int K = kVecWidth<T>, U = BACKWARD_VECTORS;
  const int tile = blockIdx.x / unsigned(parts), part = blockIdx.x - tile * parts, step = blockDim.x;
  const long long row = tile * (long long)blockDim.y + threadIdx.y;
  if (row >= rows) return;
  using Share = decltype(shares(row, 0));
  const T* from = x + row * size;
  T* to = grad_x + row * size;
  const int until = until_vector<K>(to), head = until < size ? until : int(size);
  const bool alike = until_vector<K>(from) == until;
  const int vectors = int(size - head) / K, first = part * U * step + threadIdx.x;
  Vec<T, K> values[U];
  if (Share::kReads && alike && first < vectors) {
#pragma unroll
    for (int i = 0; i < U; ++i) {
      const int here = first + i * step < vectors ? first + i * step : first;  // no branch: in it a load is waited for
      values[i] = load_vec<T, K>(from + head + here * (long long)K);
    }
  }
  const Share share = shares(row, 0);
#pragma unroll
  for (int i = 0; i < U; ++i) {
    if (first + i * step >= vectors) continue;
    const long long at = head + (first + i * step) * (long long)K;
    const bool wanted = share.wants_(at, K);
    if (wanted && !(Share::kReads && alike)) {
#pragma unroll
      for (int k = 0; k < K; ++k) values[i].data[k] = from[at + k];
    }
    Vec<T, K> result;
#pragma unroll
    for (int k = 0; k < K; ++k) result.data[k] = wanted ? share.get_(values[i].data[k]) : share.rest_(-1);
    store_whole(to + at, result);
  }
  for (int i = threadIdx.x; part == 0 && i < size - vectors * (long long)K; i += step) {
    const long long at = i < head ? i : i + vectors * (long long)K;
    to[at] = share.get_(from[at]);
  }
}

// A vector of the gradient, for whose element k share(k) is, from a vector of x. That is loaded already if a Share reads, and
// else loaded here where it is wanted.
template <typename Share, typename T, typename F>
__device__ __forceinline__ void share_vector(unsigned (&words)[4], Vector<T>& values, const T* x, bool wanted,
                                             F share) {
  if constexpr (!Share::kReads) {
    if (!wanted) return round_to_words<T>(words, 0, [&](int k) { return share(k).rest_(k); });
    values = load_aligned(x);
  }
  round_to_words<T>(words, 0, [&](int k) { return share(k).of_(values[k]); });
}

// Rows of a few vectors. x and grad_x as a whole are cut into vectors, so that each has at most two rows, and the ends of rows
// need no code of their own; or into single elements, where they are not `aligned`: where a vector is longer than a row, or off
// 16-byte boundaries. Grid: as many blocks as give each thread BACKWARD_SHORT_UNITS of them. Block: any. A Share has, in
// acc_t<T>, of_(value), as get_(), and either_(first, a, b). Its settle_(at) is the first that computes with what has been
// loaded; from then on all else is counted from element `at` of its row.
template <typename T, typename Shares>
__device__ __forceinline__ void backward_short_rows(const T* __restrict__ x, T* __restrict__ grad_x, long long rows,
                                                    int size, bool aligned, const Divisor& by_size,
                                                    const Shares& shares) {
  constexpr int K = kVecWidth<T>, U = BACKWARD_SHORT_UNITS;
  using Share = decltype(shares(0, 0));
  const int most = U * (aligned ? K : 1) * blockDim.x;
  const long long base = blockIdx.x * (long long)most, left = rows * size - base;
  const int there = left < most ? int(left) : most;
  const long long row = base >> 31 ? base / size : by_size.divide(int(base));
  const int skipped = int(base - row * size);  // of that row, in blocks before
  const T* from = x + base;
  T* to = grad_x + base;
  const int whole = aligned ? there & -K : 0;
  for (int i = whole + threadIdx.x; i < there; i += blockDim.x) {
    const int after = by_size.divide(skipped + i);
    Share share = shares(row + after, 0);
    share.settle_(skipped + i - after * size);
    const bool read = Share::kReads || share.wants_(0, 1);
    to[i] = from_acc<T>(read ? share.of_(to_acc(from[i])) : acc_t<T>(share.rest_(0)));
  }
  if (!whole) return;
  // a warp's are neighbours, and so are their rows
  const auto place = [&](int u) { return int((threadIdx.x / kWarp * U + u) * kWarp + threadIdx.x % kWarp) * K; };
  Vector<T> values[U];
#pragma unroll
  for (int u = 0; u < U; ++u) {
    if (Share::kReads && place(u) < whole) values[u] = load_aligned(from + place(u));
  }
  const bool even = size % K == 0;  // no vector has two rows; else a warp mostly has one that does
  Share own[U], next[U];
  int edge[U];  // from which element on they are the next row's
#pragma unroll
  for (int u = 0; u < U; ++u) {
    const int at = skipped + min(place(u), whole - K), after = by_size.divide(at);  // no branch: see backward_rows()
    edge[u] = (after + 1) * size - at;
    own[u] = shares(row + after, 0);
    next[u] = !even && edge[u] < K ? shares(row + after + 1, 0) : own[u];
  }
#pragma unroll
  for (int u = 0; u < U; ++u) {
    unsigned words[4];
    own[u].settle_(size - edge[u]);
    if (even) {
      share_vector<Share>(words, values[u], from + min(place(u), whole - K), own[u].wants_(0, K),
                          [&](int) { return own[u]; });
    } else {
      next[u].settle_(-min(edge[u], K));
      const bool wanted = own[u].wants_(0, edge[u]) || next[u].wants_(edge[u], K - edge[u]);
      share_vector<Share>(words, values[u], from + min(place(u), whole - K), wanted,
                          [&](int k) { return Share::either_(k < edge[u], own[u], next[u]); });
    }
    if (place(u) < whole) store_words(to + place(u), words[0], words[1], words[2], words[3]);
  }
}

// Grid: (ceil(P / blockDim.x), any), P vectors being `period` rows, the fewest that are whole vectors. Block: any. x and
// grad_x are [rows x size], the columns reduced, at 16-byte boundaries. A thread has the columns of a vector, and every
// P-th vector, which has the same.
template <typename T, typename Shares>
__device__ __forceinline__ void backward_columns(const T* __restrict__ x, T* __restrict__ grad_x, long long rows,
                                                 long long size, int period, const Shares& shares) {
  constexpr int K = kVecWidth<T>, U = BACKWARD_VECTORS;
  const long long first = global_thread(), across = size * period / K, n = rows * size, vectors = n / K;
  const long long begin = blockIdx.y * (long long)blockDim.y + threadIdx.y, step = gridDim.y * (long long)blockDim.y;
  for (long long at = vectors * K + begin; first == 0 && at < n; at += step) {
    grad_x[at] = shares(at % size, 0).get_(x[at]);
  }
  if (first + begin * across >= vectors || first >= across) return;
  const long long last = (vectors - first + across - 1) / across;  // of these vectors
  using Share = decltype(shares(0, 0));
  Share share[K];
  bool wanted = false;
  Vec<T, K> values[U];
  const auto load = [&](long long v) {
    if (v >= last) return;
#pragma unroll
    for (int i = 0; i < U; ++i) {
      const long long here = v + i * step < last ? v + i * step : v;
      values[i] = load_vec<T, K>(x + (first + here * across) * K);
    }
  };
  if (Share::kReads) load(begin);
  int row = static_cast<int>(first * K / size);
  long long column = first * K - row * size;
#pragma unroll
  for (int k = 0; k < K; ++k) {
    share[k] = shares(column, row);
    wanted = wanted || share[k].wants_(0, 0);
    if (++column == size) column = 0, ++row;
  }
  if (!Share::kReads && wanted) load(begin);
#pragma unroll 1
  for (long long v = begin; v < last; v += U * step) {
#pragma unroll
    for (int i = 0; i < U; ++i) {
      if (v + i * step >= last) continue;
      Vec<T, K> result;
#pragma unroll
      for (int k = 0; k < K; ++k) {
        result.data[k] = wanted ? share[k].get_(values[i].data[k]) : share[k].rest_((v + i * step) * period);
      }
      store_whole(grad_x + (first + (v + i * step) * across) * K, result);
    }
    if (wanted) load(v + U * step);
  }
}
