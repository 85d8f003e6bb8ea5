// y[k] = post(in[k, 0] o in[k, 1] o ...) for an associative and commutative o, over inputs of any strides. A fixed order:
// the same bits every time, on every GPU.
//
//     kLine           what is reduced is one run of neighbours: threadIdx.x runs along it, threadIdx.y over results.
//                     Vectors begin where the run first meets their alignment, whatever its own
//     kRows...        the innermost dimension in memory is reduced: the same, any strides, units located one by one
//     kColumns...     it is kept: threadIdx.x runs over results, threadIdx.y along what is reduced
//     ...Vectors      units of 16 bytes' worth of neighbours, else of one element
//
// What is reduced is cut into slabs of `slab_units` units. Where there are several, their results are partial ones, which
// fold_slabs() combines. Units are loaded in batches, so that a thread has 64 bytes under way, 32 of single elements.
#pragma once

#include "common/pointwise.cuh"
#include "common/reduce.cuh"

constexpr int kFoldThreads = 256;

// The numbers are those of reduction.py.
enum Form { kLine, kRows, kRowVectors, kColumns, kColumnVectors };

template <typename A> __device__ __forceinline__ A shuffle_down(const A& value, int offset) {
  return __shfl_down_sync(kFullMask, value, offset);
}

// The C values of each of `count` threads, a power of two, combined into those of the first. A type that is no number has a shuffle_down() of its own. `index` is a thread's place
// among them, in `shared` they are `stride` apart. All threads of the block take part. Neighbours shuffle within their
// warps, whose results then cross one barrier.
template <int C, typename A, typename Rule>
__device__ __forceinline__ void fold_threads(A (&value)[C], A (*shared)[kFoldThreads], int index, int count, int stride,
                                             const Rule& rule) {
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
  auto shuffle = [&](int lanes) {
    for (int half = lanes / 2; half > 0; half /= 2) {
#pragma unroll
      for (int c = 0; c < C; ++c) {
        value[c] = rule.combine_(value[c], shuffle_down(value[c], half));
      }
    }
  };
  if (stride == 1) {
    shuffle(count < kWarp ? count : kWarp);
    if (count <= kWarp) return;
#pragma unroll
    for (int c = 0; c < C; ++c) {
      if (index % kWarp == 0) shared[c][thread / kWarp] = value[c];
    }
    __syncthreads();
    if (index >= kWarp) return;
    const int warps = count / kWarp;
#pragma unroll
    for (int c = 0; c < C; ++c) value[c] = shared[c][thread / kWarp + index % warps];
    shuffle(warps);
    return;
  }
  for (int half = count / 2; half > 0; half /= 2) {
#pragma unroll
    for (int c = 0; c < C; ++c) {
      if (index >= half && index < 2 * half) shared[c][thread] = value[c];
    }
    __syncthreads();  // one is enough: the next step writes what this one does not read
#pragma unroll
    for (int c = 0; c < C; ++c) {
      if (index < half) value[c] = rule.combine_(value[c], shared[c][thread + half * stride]);
    }
  }
}

// How a launch divides the work. Units are elements for kLine; else of K elements: of the reduced ones in rows, of the
// results in columns.
struct Division {
  long long results, units;  // to reduce to, in units in columns; of each to reduce
  long long tiles, slab_units;
};

// locate() where there is one dimension.
template <int N> __device__ __forceinline__ Offsets<N> step_to(const Layout<N>& layout, long long unit) {
  Offsets<N> offsets;
#pragma unroll
  for (int j = 0; j < N; ++j) offsets.at[j] = unit * layout.stride[j][0];
  return offsets;
}

// How many elements from `pointer` on come before the first vector of K of them.
template <int K, typename X> __device__ __forceinline__ int until_vector(const X* pointer) {
  return static_cast<int>((K - reinterpret_cast<unsigned long long>(pointer) / sizeof(X) % K) % K);
}

// Combines `valid` of U units, `mapped`, into those of `folded`.
template <int U, int K, int W, typename A, typename Rule>
__device__ __forceinline__ void take(A (&folded)[W], const A (&mapped)[U][K], int valid, const Rule& rule) {
#pragma unroll
  for (int i = 0; i < U; ++i) {
#pragma unroll
    for (int k = 0; k < K; ++k) folded[k] = i < valid ? rule.combine_(folded[k], mapped[i][k]) : folded[k];
  }
}

// Every `step`-th unit from u to last, U at once; at(u) says where one is. The last batch repeats a unit for those that
// are too many, and leaves them out.
template <int U, int K, int N, int W, typename A, typename Unit, typename V, typename At>
__device__ __forceinline__ void fold_units(A (&folded)[W], const Unit& unit, const Offsets<N + 1>& from,
                                           const V& vector, long long u, long long last, long long step, At at) {
  A mapped[U][K];
  for (; u + (U - 1) * step < last; u += U * step) {
    Offsets<N> where[U];
#pragma unroll
    for (int i = 0; i < U; ++i) where[i] = at(u + i * step);
#pragma unroll
    for (int i = 0; i < U; ++i) unit.template map_<K>(from, where[i], vector, mapped[i]);
    take(folded, mapped, U, unit.rule_);
  }
  if (U == 1 || u >= last) return;
  int valid = 0;
#pragma unroll
  for (int i = 0; i < U; ++i) {
    const bool inside = u + i * step < last;
    unit.template map_<K>(from, at(inside ? u + i * step : u), vector, mapped[i]);
    valid += inside;
  }
  take(folded, mapped, valid, unit.rule_);
}

// The same of any strides: where there are several dimensions, fewer are under way, since each is located.
template <int U, int K, int N, typename A, typename Unit, typename V>
__device__ __forceinline__ void fold_any(A (&folded)[K], const Unit& unit, const Offsets<N + 1>& from,
                                         const Layout<N>& reduced, const V& vector, long long u, long long last,
                                         long long step) {
  if (reduced.dims == 1) {
    fold_units<U, K, N>(folded, unit, from, vector, u, last, step, [&](long long u) { return step_to(reduced, u); });
  } else {
    fold_units<2, K, N>(folded, unit, from, vector, u, last, step, [&](long long u) { return locate(reduced, u); });
  }
}

// One run of neighbours, [begin, end) of it: single elements up to the first vector, vectors, single elements. The first
// of the single ones is loaded before the vectors and combined after, so that nothing waits for it.
template <int U, int K, int N, typename A, typename Unit>
__device__ __forceinline__ void fold_line(A (&folded)[K], const Unit& unit, const Offsets<N + 1>& from,
                                          const Layout<N>& reduced, long long begin, long long end, int index,
                                          int count) {
  auto at = [](long long element) { return everywhere<N>(element); };
  const long long until = begin + unit.template until_vector_<K>(from, begin, end - begin);
  const long long head = until < end ? until : end, tail = head + (end - head) / K * K;
  const long long singles = head - begin + (end - tail);
  auto place = [&](long long single) {
    return single < head - begin ? begin + single : tail + (single - (head - begin));
  };
  A first[1][1] = {{unit.rule_.identity_()}};
  if (index < singles) unit.template map_<1>(from, at(place(index)), reduced, first[0]);
  fold_units<U, K, N>(folded, unit, from, reduced, index, (tail - head) / K, count,
                      [&](long long u) { return at(head + u * K); });
  take(folded, first, index < singles, unit.rule_);
  fold_units<4, 1, N>(folded, unit, from, reduced, index + count, singles, count,
                      [&](long long single) { return at(place(single)); });
}

// Grid: tiles x slabs, one dimension, tiles fastest. Block: kFoldThreads, both dimensions powers of two. A thread takes
// every blockDim.x-th (.y-th) unit of its slab. unit.map_<K>(from, at, vector, mapped) reads K elements, contiguous or
// broadcast along the innermost dimension of `vector`; unit.until_vector_<K>(from, begin, length) counts the elements
// from `begin` on before a vector may be loaded, `length` where the inputs are not aligned alike;
// unit.store_(value, slab, offset) takes a result. The last of the offsets in `kept` is the output's.
template <int FORM, int W, typename A, int N, typename Unit>
__device__ __forceinline__ void fold(const Unit& unit, const Layout<N + 1>& kept, const Layout<N>& reduced,
                                     const Division& division) {
  constexpr bool rows = FORM < kColumns;
  constexpr int K = FORM == kRows || FORM == kColumns ? 1 : W, C = rows ? 1 : K, U = K == 1 ? 2 * W : 4;
  __shared__ A shared[C][kFoldThreads];
  const long long tile = blockIdx.x % division.tiles, slab = blockIdx.x / division.tiles;
  const int index = rows ? threadIdx.x : threadIdx.y, count = rows ? blockDim.x : blockDim.y;
  const long long result = rows ? tile * blockDim.y + threadIdx.y : tile * (long long)blockDim.x + threadIdx.x;
  const bool inside = result < division.results;
  const Offsets<N + 1> from = locate(kept, inside ? result : 0);
  A folded[K];
#pragma unroll
  for (int k = 0; k < K; ++k) folded[k] = unit.rule_.identity_();
  const long long begin = slab * division.slab_units, end = begin + division.slab_units;
  const long long last = !inside ? begin : end < division.units ? end : division.units;
  if constexpr (FORM == kLine) {
    fold_line<U, K, N>(folded, unit, from, reduced, begin, last, index, count);
  } else {
    if constexpr (rows) fold_any<U, K, N>(folded, unit, from, reduced, reduced, begin + index, last, count);
    else fold_any<U, K, N>(folded, unit, from, reduced, kept, begin + index, last, count);
  }
  A value[C];
#pragma unroll
  for (int c = 0; c < C; ++c) value[c] = folded[c];
#pragma unroll
  for (int k = C; k < K; ++k) value[0] = unit.rule_.combine_(value[0], folded[k]);
  fold_threads<C>(value, shared, index, count, rows ? 1 : blockDim.x, unit.rule_);
  if (index > 0 || !inside) return;
#pragma unroll
  for (int c = 0; c < C; ++c) unit.store_(value[c], slab, from.at[N] + c);
}

// The partial results [slabs x results] combined, each given to store_(value, 0, offset). Grid: ceil(results /
// blockDim.x). Block: as fold() has it without ROWS.
template <typename A, typename Unit>
__device__ __forceinline__ void fold_slabs(const Unit& unit, const A* __restrict__ partial, long long slabs,
                                           long long results) {
  __shared__ A shared[1][kFoldThreads];
  const long long result = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  A value[1] = {unit.rule_.identity_()};
  if (result < results) {
    for (long long slab = threadIdx.y; slab < slabs; slab += blockDim.y) {
      value[0] = unit.rule_.combine_(value[0], partial[slab * results + result]);
    }
  }
  fold_threads<1>(value, shared, threadIdx.y, blockDim.y, blockDim.x, unit.rule_);
  if (threadIdx.y == 0 && result < results) unit.store_(value[0], 0, result);
}
