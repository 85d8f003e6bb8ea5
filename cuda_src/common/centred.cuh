// Moments of many numbers that a thread meets one after the other: sums of what they differ by from an estimate of their
// mean. Three operations for each, and no cancellation as long as the estimate is near, for which it is drawn nearer
// whenever there are four times as many.
#pragma once

#include "common/moments.cuh"

template <typename A> struct Centred {
  A about, sum, squares;

  __device__ __forceinline__ void add(A value) {
    const A apart = value - about;
    sum += apart, squares += apart * apart;
  }

  // From now on about the mean of the `count` so far.
  __device__ __forceinline__ void draw_nearer(A count) {
    const A nearer = about + sum / count, step = nearer - about, left = sum - count * step;
    const A fewer = squares - step * (sum + left);
    if (isfinite(squares) && fewer > A(0)) squares = fewer;
    about = nearer, sum = left;
  }

  __device__ __forceinline__ Moments<A> moments(A count) const { return Moments<A>::of(count, about, sum, squares); }
};
