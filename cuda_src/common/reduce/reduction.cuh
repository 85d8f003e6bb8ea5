// y[k] = post(in[k, 0] o in[k, 1] o ...) for an associative and commutative o, over inputs of any strides, in a fixed order:
// the same bits every time, on every GPU.
//
//     kContiguous   what is reduced is one run of neighbours: threadIdx.x runs along it, threadIdx.y over results. Vectors
//                   begin where the run first meets their alignment; the unaligned elements before and behind them are
//                   taken one by one
//     kRows         what is innermost in memory is reduced: the same for any strides, in whole vectors that are located one
//                   by one
//     kColumns      it is kept: threadIdx.x runs over results, a vector of them to a thread, threadIdx.y along what is reduced
//     kStrided      the same element by element, for any strides and any dimensions
//
// What is reduced is cut into slabs of `slab_units` units. Where there are several, their results are partial ones, which
// finalize_slabs() combines. FOLD_THREADS, of a block at most, is defined by reduction.py.
#pragma once

#include "common/reduce/combine.cuh"
#include "common/hw/dependent_launch.cuh"
#include "common/elementwise/expression.cuh"

constexpr int kVectorsAtOnce = 4, kColumnsAtOnce = 8, kSinglesAtOnce = 8, kSlabsAtOnce = 8;  // under way in a thread

// Of a kernel that has a FORM. Where no number of blocks is given, few registers count for more than loads under way.
#define CUPYOPS_FOLD __launch_bounds__(FOLD_THREADS, FORM < kColumns ? 2 : 1)

enum FoldForm { kContiguous, kRows, kColumns, kStrided };

// How a launch divides the work. Units are elements for kContiguous and kStrided; else they are vectors: of what is reduced
// in rows, of the results in columns.
struct Division {
  long long results, units;  // to reduce to, in units in columns; to reduce for each
  long long slab_units;  // below 2^30
  long long whole;  // elements there are, where the last of the units is not there for all results; else 0
  long long period;  // rows of the input that are one of units in columns
};

template <int BYTES> struct Word;
template <> struct Word<1> { using type = unsigned char; };
template <> struct Word<2> { using type = unsigned short; };
template <> struct Word<4> { using type = unsigned; };
template <> struct Word<8> { using type = uint2; };
template <> struct Word<16> { using type = uint4; };

// What is read once is the first to leave the L2 again: otherwise it would displace what others have written, which would have
// to go to memory at the same time.
template <int K, typename X> __device__ __forceinline__ Vec<X, K> load_once(const X* from) {
  if constexpr (sizeof(Vec<X, K>) > 16) {
    return load_vec<X, K>(from);
  } else {
    using W = typename Word<sizeof(Vec<X, K>)>::type;
    union {
      W word;
      Vec<X, K> vec;
    } both = {__ldcs(reinterpret_cast<const W*>(from))};
    return both.vec;
  }
}

// K neighbours, or one number K times.
template <int K, typename X> __device__ __forceinline__ Vec<X, K> load_unit_once(const X* from, bool broadcast) {
  return broadcast ? splat<X, K>(*from) : load_once<K>(from);
}

// As locate(), where there are at most two dimensions and fewer than 2^31 units.
template <int N> __device__ __forceinline__ Offsets<N> locate_two(const Layout<N>& layout, long long unit) {
  const unsigned low = static_cast<unsigned>(unit);
  const unsigned outer = (__umulhi(low, layout.multiplier[0]) + low) >> layout.shift[0];
  const unsigned inner = low - outer * static_cast<unsigned>(layout.size[0]);
  Offsets<N> offsets;
#pragma unroll
  for (int j = 0; j < N; ++j) offsets.at[j] = inner * layout.stride[j][0] + outer * layout.stride[j][1];
  return offsets;
}

// As locate(), in little code: it is read from memory before the first unit is.
template <int N> __device__ __forceinline__ Offsets<N> find(const Layout<N>& layout, long long unit) {
  Offsets<N> offsets = {};
#pragma unroll 1
  for (int d = 0; d < layout.dims; ++d) {
    long long rest = 0;
    if (d + 1 < layout.dims) {
      const unsigned low = static_cast<unsigned>(unit);
      rest = layout.wide ? unit / layout.size[d] : (__umulhi(low, layout.multiplier[d]) + low) >> layout.shift[d];
    }
    const long long coordinate = unit - rest * layout.size[d];
#pragma unroll
    for (int j = 0; j < N; ++j) offsets.at[j] += coordinate * layout.stride[j][d];
    unit = rest;
  }
  return offsets;
}

// How many elements from `pointer` on come before the first vector of K of them.
template <int K, typename X> __device__ __forceinline__ int until_vector(const X* pointer) {
  return static_cast<int>((K - reinterpret_cast<unsigned long long>(pointer) / sizeof(X) % K) % K);
}

// Takes units u, u + step ..., `valid` of U, into the S states of a thread, of which there is one for each element of a unit,
// or one for all. number(u) is the number that take_() gets of a unit, and at(u) says where the unit is.
template <int U, int K, int N, int S, typename Local, typename Unit, typename V, typename Number, typename At>
__device__ __forceinline__ void fold_batch(Local (&state)[S], const Unit& unit, const Offsets<N + 1>& from,
                                           const V& vector, int u, int step, int valid, int& seen, Number number,
                                           At at) {
  constexpr int E = K / S;
  decltype(unit.template none_<K>()) loaded[U];
#pragma unroll
  for (int i = 0; i < U; ++i) {
    const int here = i < valid ? u + i * step : u;  // no branch, behind which the load would be waited for
    loaded[i] = unit.template load_<K>(from, at(here), vector);
  }
#pragma unroll
  for (int i = 0; i < U; ++i) {
    if (i >= valid) loaded[i] = unit.template none_<K>();
  }
  auto place = [&](int i) { return number(u + i * step); };
  if constexpr (E > 1 && Unit::kTakesVectors) {
    unit.take_vectors_(state[0], loaded, place);
  } else {
#pragma unroll
    for (int s = 0; s < S; ++s) {
      typename Unit::Value values[U][E];
#pragma unroll
      for (int i = 0; i < U; ++i) {
#pragma unroll
        for (int e = 0; e < E; ++e) values[i][e] = unit.value_(loaded[i], s * E + e);
      }
      unit.rule_.take_(state[s], values, valid, seen, place);
    }
  }
  seen += valid * E;
}

// Takes units index, index + step ... below last: U at once, without a mask, as long as all threads have so many.
template <int U, int K, int N, int S, typename Local, typename Unit, typename V, typename Number, typename At>
__device__ __forceinline__ void fold_units(Local (&state)[S], const Unit& unit, const Offsets<N + 1>& from,
                                           const V& vector, int index, int last, int step, int& seen, Number number,
                                           At at) {
  int begin = 0;
  if constexpr (U > 1) {
#pragma unroll 1
    for (; begin + U * step <= last; begin += U * step) {
      fold_batch<U, K, N>(state, unit, from, vector, begin + index, step, U, seen, number, at);
    }
  }
#pragma unroll 1
  for (int u = begin + index; u < last; u += U * step) {
    int valid = 1;
#pragma unroll
    for (int i = 1; i < U; ++i) valid += u + i * step < last;
    fold_batch<U, K, N>(state, unit, from, vector, u, step, valid, seen, number, at);
  }
}

// Takes `length` of a run of neighbours, from `begin` on: vectors, and the single elements before and behind them, the first
// of which is under way meanwhile.
template <int U, int K, int N, int S, typename Local, typename Unit>
__device__ __forceinline__ void fold_contiguous(Local (&state)[S], const Unit& unit, const Offsets<N + 1>& from,
                                                const Layout<N>& reduced, long long begin, int length, int index,
                                                int count) {
  int seen = 0;
  const int until = unit.template until_vector_<K>(from, begin, length), head = until < length ? until : length;
  const int vectors = (length - head) / K, singles = length - vectors * K;
  auto place = [&](int single) { return begin + single + (single < head ? 0 : vectors * K); };
  auto load = [&](int single) { return unit.template load_<1>(from, everywhere<N>(place(single)), reduced); };
  auto next = unit.template none_<1>();
  if (index < singles) next = load(index);
  const auto number = [&](int u) { return begin + head + (long long)u * K; };
  fold_units<U, K, N>(state, unit, from, reduced, index, vectors, count, seen, number,
                      [&](int u) { return everywhere<N>(number(u)); });
#pragma unroll 1
  for (int single = index; single < singles; single += count) {
    const typename Unit::Value values[1][1] = {{unit.value_(next, 0)}};
    unit.rule_.take_(state[0], values, 1, seen++, [&](int) { return place(single); });
    if (single + count < singles) next = load(single + count);
  }
}

// Takes the first elements of a unit of columns, `there` of them.
template <int K, int N, typename Local, typename Unit>
__device__ __forceinline__ void fold_ending(Local (&state)[K], const Unit& unit, const Offsets<N + 1>& from,
                                            const Layout<N>& reduced, const Layout<N + 1>& kept, long long last,
                                            long long there, int seen) {
#pragma unroll
  for (int k = 0; k < K; ++k) {
    if (k >= there) continue;
    Offsets<N> at = locate_two(reduced, last);
#pragma unroll
    for (int j = 0; j < N; ++j) at.at[j] += k;
    const typename Unit::Value values[1][1] = {{unit.value_(unit.template load_<1>(from, at, kept), 0)}};
    unit.rule_.take_(state[k], values, 1, seen, [&](int) { return last; });
  }
}

// What a thread has made of its units, as a State that is combined with those of others. A rule that begins with another type
// has an overload of this.
template <typename State> __device__ __forceinline__ const State& settled(const State& state) { return state; }

template <bool FIRST, typename A, typename B>
__device__ __forceinline__ const auto& first_of(const A& first, const B& second) {
  if constexpr (FIRST) return first;
  else return second;
}

// Grid: (tiles, slabs). Block: both dimensions are powers of two; FOLD_THREADS in all at most, and half of those, or 16 across,
// for columns of vectors. A thread takes every blockDim.x-th (.y-th) unit of its slab. The last of the offsets in `kept` is the
// output's. A Unit has
//
//     State, Value             what elements are combined to, and what an element is before that
//     load_<K>(from, at, v)    loads K elements, neighbours, or one that is broadcast along the innermost dimension of v;
//                              none_<K>() stands in place of those that are not there
//     value_(loaded, k)        the value of the k-th
//     until_vector_<K>(from, begin, length)   elements from `begin` on before a vector may be loaded; `length` or more
//                              where the inputs are not aligned alike
//     store_(state, slab, at)  takes a result
//     rule_                    combine_(a, b); identity_(), with which a thread begins, of any type that settled() takes; and
//                              take_(state, values[U][E], valid, seen, number), which adds to that U units, the first
//                              `valid` of which are there, after `seen` elements. number(0) ... are the numbers of the
//                              units' first elements in what is reduced
//     rule_.kEach              whether a thread has a state for each element of a unit, in rows too
//     kTakesVectors            whether, where it has one for all of them, take_vectors_(state, loaded[U], number) does
//                              what value_() and take_() else do
template <int FORM, int W, int N, typename Unit>
__device__ __forceinline__ void fold(const Unit& unit, const Layout<N + 1>& kept, const Layout<N>& reduced,
                                     const Division& division) {
  using A = typename Unit::State;
  constexpr bool rows = FORM < kColumns, several = sizeof(unit.template none_<W>()) > 16;  // inputs
  constexpr int K = FORM == kStrided ? 1 : W, C = rows ? 1 : K,
                U = K == 1            ? kSinglesAtOnce
                    : rows || several ? kVectorsAtOnce
                                      : kColumnsAtOnce;
  constexpr int S = rows && !decltype(unit.rule_)::kEach ? 1 : K;
  __shared__ A shared[C == 1 ? FOLD_THREADS : C * FOLD_THREADS / 2];
  __shared__ long long places[rows ? 1 : FOLD_THREADS];
  const int index = rows ? threadIdx.x : threadIdx.y, count = rows ? blockDim.x : blockDim.y;
  const long long result = rows ? blockIdx.x * (long long)blockDim.y + threadIdx.y : global_thread();
  const bool inside = result < division.results;
  const bool flat = kept.dims <= 2 && !kept.wide;
  const Offsets<N + 1> from = flat ? locate_two(kept, inside ? result : 0) : find(kept, inside ? result : 0);
  decltype(unit.rule_.identity_()) state[S];
#pragma unroll
  for (int s = 0; s < S; ++s) state[s] = unit.rule_.identity_();
  const long long begin = blockIdx.y * division.slab_units, left = division.units - begin;
  int length = !inside ? 0 : static_cast<int>(left < division.slab_units ? left : division.slab_units);
  if constexpr (FORM == kContiguous) {
    fold_contiguous<U, K, N>(state, unit, from, reduced, begin, length, index, count);
  } else {
    const auto& vector = first_of<rows>(reduced, kept);
    long long there = K;  // of the last unit, within which the tensor may end
    if (FORM == kColumns && division.whole && length && length == left) {
      there = division.whole - ((division.units - 1) * division.results + result) * K;
      length -= there < K;
    }
    auto number = [&](int u) { return (begin + u) * (rows ? K : 1); };
    int seen = 0;
    if (reduced.dims <= 2 && !reduced.wide) {
      fold_units<U, K, N>(state, unit, from, vector, index, length, count, seen, number,
                          [&](int u) { return locate_two(reduced, begin + u); });
    } else {
      fold_units<1, K, N>(state, unit, from, vector, index, length, count, seen, number,
                          [&](int u) { return find(reduced, begin + u); });
    }
    if constexpr (FORM == kColumns) {
      if (there < K && index == 0) fold_ending<K, N>(state, unit, from, reduced, kept, division.units - 1, there, seen);
    }
  }
  if constexpr (rows) {
    A value = settled(state[0]);
#pragma unroll
    for (int s = 1; s < S; ++s) value = unit.rule_.combine_(value, settled(state[s]));
    value = fold_neighbours(value, shared, index, count, unit.rule_);
    if (index == 0 && inside) unit.store_(value, blockIdx.y, from.at[N]);
  } else {
    if (index == 0) places[threadIdx.x] = inside ? from.at[N] : -1;
    A values[S];
#pragma unroll
    for (int s = 0; s < S; ++s) values[s] = settled(state[s]);
    fold_across(values, shared, unit.rule_, [&](const A& value, int x, int c) {
      if (places[x] >= 0) unit.store_(value, blockIdx.y, places[x] + c);
    });
  }
}

// Combines the partial results [slabs x results], and gives each to store_(value, 0, offset). Grid: ceil(results /
// blockDim.x). Block: as fold() has it in columns. The grid may overlap that of fold().
template <typename A, typename Unit>
__device__ __forceinline__ void finalize_slabs(const Unit& unit, const A* __restrict__ partial, long long slabs,
                                               long long results) {
  __shared__ A shared[FOLD_THREADS];
  partial = written_before(partial);
  const long long first = blockIdx.x * (long long)blockDim.x, result = first + threadIdx.x;
  A value[1] = {unit.rule_.identity_()};
  const int step = blockDim.y, last = result < results ? static_cast<int>(slabs) : 0;
#pragma unroll 1
  for (int slab = threadIdx.y; slab < last; slab += kSlabsAtOnce * step) {
    A loaded[kSlabsAtOnce];
#pragma unroll
    for (int i = 0; i < kSlabsAtOnce; ++i) {
      const int here = slab + i * step < last ? slab + i * step : slab;
      loaded[i] = partial[here * results + result];
    }
#pragma unroll
    for (int i = 0; i < kSlabsAtOnce; ++i) {
      if (slab + i * step < last) value[0] = unit.rule_.combine_(value[0], loaded[i]);
    }
  }
  fold_across(value, shared, unit.rule_, [&](const A& total, int x, int) {
    if (first + x < results) unit.store_(total, 0, first + x);
  });
}

// The side of a Unit that reads one tensor, whose elements are reduced as they are.
template <typename T> struct Elements {
  using Value = acc_t<T>;
  static constexpr bool kTakesVectors = false;
  const T* __restrict__ x;

  template <int K> static __device__ __forceinline__ Vec<T, K> none_() { return {}; }
  template <int K, int N, typename V>
  __device__ __forceinline__ Vec<T, K> load_(const Offsets<N>& from, const Offsets<1>& at, const V&) const {
    return load_once<K>(x + from.at[0] + at.at[0]);
  }
  template <int K> static __device__ __forceinline__ Value value_(const Vec<T, K>& loaded, int k) {
    return to_acc(loaded.data[k]);
  }
  template <int K, int N>
  __device__ __forceinline__ int until_vector_(const Offsets<N>& from, long long begin, int) const {
    return until_vector<K>(x + from.at[0] + begin);
  }
};
