// Moments of many numbers that a thread meets one after the other: sums of what they differ by from an estimate of their
// mean. Three operations for each, and no cancellation as long as the estimate is near, for which it is drawn nearer
// whenever there are four times as many.
#pragma once

#include "common/reduce/welford.cuh"

template <typename A> struct Centred {
  A about, sum, squares;

  __device__ __forceinline__ void add(A value) {
    const A apart = value - about;
    sum += apart, squares += apart * apart;
  }

  // From now on about the mean of the `count` so far.
  __device__ __forceinline__ void draw_nearer(A count) {
    const A nearer = about + sum * (A(1) / count), step = nearer - about, left = sum - count * step;
    const A fewer = squares - step * (sum + left);
    if (isfinite(squares) && fewer > A(0)) squares = fewer;
    about = nearer, sum = left;
  }

  __device__ __forceinline__ Moments<A> moments(A count) const { return Moments<A>::of(count, about, sum, squares); }
};

// Moments, and what their mean has been rounded by.
template <typename A> struct Exact {
  Moments<A> of;
  A rest;

  static __device__ __forceinline__ Exact make(const Centred<A>& sums, A count) {
    const Moments<A> of = sums.moments(count);
    return {of, count > A(0) ? (sums.about - of.mean) + sums.sum / count : A(0)};
  }
};

// A mean in two: `about`, rounded to a small part of the deviation, from which numbers differ by what is mostly exact, and
// the rest. What x - mean is rounded by is the same for every x of a magnitude, and over many of them adds up. Half types
// are rounded to less than that.
template <typename T> struct Centre {
  using A = acc_t<T>;
  A about, rest;

  // `left`: what the mean has been rounded by.
  __device__ __forceinline__ Centre(A mean, A rstd, A left = A(0)) : about(mean) {
    const A coarse = A(8) / rstd;  // of a sum with it the last bit is that of the x of up to eight deviations
    if (sizeof(T) > 2 && isfinite(coarse)) about = (mean + coarse) - coarse;
    rest = (mean - about) + left;
  }

  // sum(g) and sum(g (x - mean)), of sum(g) and sum(g (x - about)).
  __device__ __forceinline__ Pair<A> moved(Pair<A> sums) const {
    if (sizeof(T) > 2 && isfinite(sums.first)) sums.second -= rest * sums.first;
    return sums;
  }
};

// Every thread gets the moments of all the block's numbers, in fewer instructions than block_merge: `shared` holds kWarp
// pairs. `all` is about how many there are.
template <typename A>
__device__ __forceinline__ Moments<A> block_moments(const Exact<A>& exact, A all, Pair<A>* shared) {
  const Moments<A>& own = exact.of;
  const A part = own.count / all;  // and not the count itself, by which a large mean would overflow
  const Pair<A> sums = block_reduce<Sum>(Pair<A>{part, own.count > A(0) ? own.mean * part : A(0)}, shared);
  if (sums.first == A(0)) return {};
  const A about = sums.second / sums.first, apart = (own.mean - about) + exact.rest, left = apart * own.count;
  const Pair<A> none = {}, centred = {left, own.square + apart * left};
  const Pair<A> of = block_reduce<Sum>(own.count > A(0) ? centred : none, shared);
  return Moments<A>::of(rint(sums.first * all), about, of.first, of.second);
}

// Groups of numbers made one: group i is of count_of(i) numbers, of(i) their mean and square. The first is not empty, or
// all are.
template <typename A, typename Count, typename Of>
__device__ __forceinline__ Moments<A> merged(int groups, Count count_of, Of of) {
  const A pivot = of(0).first;
  A count = A(0), apart = A(0), square = A(0);
#pragma unroll 8
  for (int i = 0; i < groups; ++i) {
    const A here = count_of(i);
    count += here, apart += (of(i).first - pivot) * here;
  }
  if (count == A(0)) return {};
  const A about = pivot + apart / count;
  A left = A(0);
#pragma unroll 8
  for (int i = 0; i < groups; ++i) {
    const Pair<A> one = of(i);
    const A here = (one.first - about) * count_of(i);
    left += here, square += one.second + (one.first - about) * here;
  }
  return Moments<A>::of(count, about, left, square);
}
