// What group_norm's kernels have in common: groups and their channels, and what follows from the sums for each element. A
// group, which is some channels of one image, is a row.
#pragma once

#include "common/reduce/shifted_moments.cuh"
#include "common/core/fast_divmod.cuh"
#include "common/tile/row_tile.cuh"

struct Groups {
  long long count, channels;  // groups of an image, channels of a group
  Divisor plane;  // divides by the elements of a channel

  // Where a parameter's values for a group's channels begin; null stays null. It divides, so call it once.
  template <typename T> __device__ __forceinline__ const T* of(long long group, const T* values) const {
    const long long first = group % count * channels;
    return values ? values + first : nullptr;
  }
};

// A vector in a group: where in the group its first element would be, and which of its elements belong to the group.
struct GroupVector {
  int at, first, last;

  // Calls f(c, from, to) for each channel c of the group that has elements of the vector: from <= e < to. Mostly it is the
  // only one, and then the bounds are those of any vector.
  template <typename F> __device__ __forceinline__ void each_channel(const Groups& groups, F f) const {
    int c = groups.plane.divide(at + first), from = first, plane = int(groups.plane.divisor);
    int border = (c + 1) * plane - at;
    if (border >= last) return f(c, 0, 16);
#pragma unroll 1
    while (from < last) {
      f(c, from, min(border, last));
      from = border, border += plane, ++c;
    }
  }
};

template <typename T> __device__ __forceinline__ acc_t<T> parameter(const T* values, long long c, float otherwise) {
  return values ? to_acc(values[c]) : acc_t<T>(otherwise);
}

// A mean as rounded, and the rest that the rounding left out. Times rstd the rest matters in short groups that happen to be
// nearly constant. Elements of half types and of long groups differ by more than that: there it is 0.
template <typename A> using Mean = Pair<A>;

// (x - mean) rstd weight + bias of a channel. With an infinite weight it is x (rstd weight) + (bias - mean rstd weight), as in
// PyTorch. For half types it is so always, which is one operation: their mean is at most a few thousand times their deviation.
template <typename T> struct GroupAffine {
  acc_t<T> mean, scale, shift;

  GroupAffine() = default;
  __device__ __forceinline__ GroupAffine(Mean<acc_t<T>> mu, acc_t<T> rstd, acc_t<T> weight, acc_t<T> bias)
      : mean(mu.first), scale(rstd * weight), shift(bias) {
    if (sizeof(T) == 2 || !isfinite(scale)) shift -= mean * scale, mean = 0;
    else if (mu.second != acc_t<T>(0)) shift -= mu.second * scale;
  }
  __device__ __forceinline__ acc_t<T> operator()(acc_t<T> x) const {
    return sizeof(T) == 2 ? fma(x, scale, shift) : (x - mean) * scale + shift;
  }
};

// y of a vector of x; weight and bias are those of the group's channels.
template <typename T>
__device__ __forceinline__ Vector<T> normalised(const GroupVector& place, const Groups& groups, const Vector<T>& x,
                                                const T* weight, const T* bias, Mean<acc_t<T>> mean, acc_t<T> rstd) {
  constexpr int W = kVecWidth<T>;
  acc_t<T> y[W] = {};
  place.each_channel(groups, [&](int c, int from, int to) {
    const GroupAffine<T> affine(mean, rstd, parameter(weight, c, 1), parameter(bias, c, 0));
#pragma unroll
    for (int e = 0; e < W; ++e) y[e] = from <= e && e < to ? affine(x[e]) : y[e];
  });
  Vector<T> vector;
  round_to_words<T>(vector.word, 0, [&](int e) { return y[e]; });
  return vector;
}

// c2 and c1, of the sums over a group; c2 includes what xhat owes to the rest of the mean.
template <typename A> __device__ __forceinline__ Pair<A> means(Pair<A> sums, A size, Mean<A> mean, A rstd) {
  Pair<A> c{sums.first / size, sums.second / size};
  if (mean.second != A(0) && isfinite(c.second)) c.first -= mean.second * rstd * c.second;
  return c;
}

// rstd (grad_y weight - c2 - xhat c1) of a channel; for half types what its elements have in common is computed once.
template <typename T> struct GroupGradient {
  using A = acc_t<T>;
  static constexpr bool kHalf = sizeof(T) == 2;
  A mean, rstd, weight, slope, rest;

  GroupGradient() = default;
  __device__ __forceinline__ GroupGradient(A mean, A rstd, Pair<A> c, A w)
      : mean(mean),
        rstd(rstd),
        weight(kHalf ? w * rstd : w),
        slope(kHalf ? -rstd * rstd * c.second : c.second),
        rest(kHalf ? -rstd * c.first - mean * slope : c.first) {}

  __device__ __forceinline__ A operator()(A grad_y, A x) const {
    if (kHalf) return grad_y * weight + fma(x, slope, rest);
    return rstd * (grad_y * weight - rest - (x - mean) * rstd * slope);
  }
};

// grad_x of a vector; weight is that of the group's channels.
template <typename T>
__device__ __forceinline__ Vector<T> gradient(const GroupVector& place, const Groups& groups, const Vector<T>& grad_y,
                                              const Vector<T>& x, const T* weight, acc_t<T> mean, acc_t<T> rstd,
                                              Pair<acc_t<T>> c) {
  constexpr int W = kVecWidth<T>;
  acc_t<T> grad_x[W] = {};
  place.each_channel(groups, [&](int of, int from, int to) {
    const GroupGradient<T> gradient(mean, rstd, c, parameter(weight, of, 1));
#pragma unroll
    for (int e = 0; e < W; ++e) grad_x[e] = from <= e && e < to ? gradient(grad_y[e], x[e]) : grad_x[e];
  });
  Vector<T> vector;
  round_to_words<T>(vector.word, 0, [&](int e) { return grad_x[e]; });
  return vector;
}

// What a group is normalised by, of sums about nearly its mean. A mean that is small is not rounded anew: see SplitMean.
template <bool EXACT, typename A>
__device__ __forceinline__ Mean<A> statistics(A about, Pair<A> centred, A size, A eps, A& rstd) {
  const auto of = Moments<A>::of(size, about, centred.first, centred.second);
  rstd = of.rstd(eps);
  if (fabs(about * rstd) < A(0.125)) return {about, A(0)};
  return {of.mean, EXACT ? (about - of.mean) + centred.first / size : A(0)};
}
