// Moments of many numbers that a thread meets one after the other: it sums by what they differ from an estimate of their
// mean, and the squares of that. A number costs three operations, and nothing cancels as long as the estimate is near. It is
// drawn nearer whenever there are twice as many numbers as the last time.
#pragma once

#include "common/reduce/welford.cuh"

template <typename A> struct Centred {
  A about, sum, squares;

  __device__ __forceinline__ void add(A value) {
    const A apart = value - about;
    sum += apart, squares += apart * apart;
  }

  // Moves the estimate to the mean of the `count` numbers so far.
  __device__ __forceinline__ void draw_nearer(A count) {
    const A nearer = about + sum * (A(1) / count), step = nearer - about, left = sum - count * step;
    const A fewer = squares - step * (sum + left);
    if (isfinite(squares) && fewer > A(0)) squares = fewer;
    about = nearer, sum = left;
  }

  __device__ __forceinline__ Moments<A> moments(A count) const { return Moments<A>::of(count, about, sum, squares); }
};

// Moments, and the rest that their mean loses by being rounded.
template <typename A> struct ExactMoments {
  Moments<A> of;
  A rest;

  static __device__ __forceinline__ ExactMoments make(const Centred<A>& sums, A count) {
    const Moments<A> of = sums.moments(count);
    return {of, count > A(0) ? (sums.about - of.mean) + sums.sum / count : A(0)};
  }
};

// A mean in two numbers: `about`, rounded to a small part of the deviation, from which the x differ by what is mostly exact,
// and the rest. The rounding of x - mean is the same for every x of a magnitude, and over many of them it adds up. Half
// types are rounded more coarsely than that anyway.
template <typename T> struct SplitMean {
  using A = acc_t<T>;
  A about, rest;

  // `left` is what the mean has lost by being rounded.
  __device__ __forceinline__ SplitMean(A mean, A rstd, A left = A(0)) : about(mean) {
    const A coarse = A(8) / rstd;  // the last bit of a sum with it is that of an x of up to eight deviations
    if (sizeof(T) > 2 && isfinite(coarse)) about = (mean + coarse) - coarse;
    rest = (mean - about) + left;
  }

  // sum(g) and sum(g (x - mean)), of sum(g) and sum(g (x - about)).
  __device__ __forceinline__ Pair<A> about_mean(Pair<A> sums) const {
    if (sizeof(T) > 2 && isfinite(sums.first)) sums.second -= rest * sums.first;
    return sums;
  }
};

// Every thread gets the moments of all of the block's numbers, in fewer instructions than by block_merge. `shared` holds
// kWarp pairs; `all` is about how many numbers there are.
template <typename A>
__device__ __forceinline__ ExactMoments<A> block_exact_moments(const ExactMoments<A>& exact, A all, Pair<A>* shared) {
  const Moments<A>& own = exact.of;
  const A part = own.count / all;  // not the count itself: times that, a large mean would overflow
  const Pair<A> sums = block_reduce<Sum>(Pair<A>{part, own.count > A(0) ? own.mean * part : A(0)}, shared);
  if (sums.first == A(0)) return {};
  const A about = sums.second / sums.first, apart = (own.mean - about) + exact.rest, left = apart * own.count;
  const Pair<A> none = {}, centred = {left, own.square + apart * left};
  const Pair<A> of = block_reduce<Sum>(own.count > A(0) ? centred : none, shared);
  const A count = rint(sums.first * all);
  const auto result = Moments<A>::of(count, about, of.first, of.second);
  return {result, (about - result.mean) + of.first / count};
}

template <typename A>
__device__ __forceinline__ Moments<A> block_moments(const ExactMoments<A>& exact, A all, Pair<A>* shared) {
  return block_exact_moments(exact, all, shared).of;
}

// The moments of several sets of numbers together: set i has count_of(i) numbers, and of(i) is their mean and square. The
// first set is not empty, unless all are.
template <typename A, typename Count, typename Of>
__device__ __forceinline__ Moments<A> merged(int sets, Count count_of, Of of) {
  const A pivot = of(0).first;
  A count = A(0), apart = A(0), square = A(0);
#pragma unroll 8
  for (int i = 0; i < sets; ++i) {
    const A here = count_of(i);
    count += here, apart += (of(i).first - pivot) * here;
  }
  if (count == A(0)) return {};
  const A about = pivot + apart / count;
  A left = A(0);
#pragma unroll 8
  for (int i = 0; i < sets; ++i) {
    const Pair<A> one = of(i);
    const A here = (one.first - about) * count_of(i);
    left += here, square += one.second + (one.first - about) * here;
  }
  return Moments<A>::of(count, about, left, square);
}
