// out[i] = f(x[i], {parameter0[c], parameter1[c], ...}), c = i / inner % channels: x and out dense and laid out alike,
// parameters that vary along neighbouring dimensions. No division per vector, and a vector may straddle rows, so that odd
// sizes run at the pace of even ones.
#pragma once

#include "common/core/fast_divmod.cuh"
#include "common/core/vector_load.cuh"

// The numbers are those of spread.py.
constexpr int kEachColumn = 0;  // inner is 1, `step` vectors are whole rows: a thread's parameters stay in registers
constexpr int kWholeSpans = 1;  // spans are whole vectors, each of one channel
constexpr int kCutSpans = 2;  // inner is at least a vector, which so has two channels at most

// spread.py makes it. A thread has every `step`-th vector, the first of them at an element below 2^31.
struct Spread {
  Divisor by_channels, by_inner;
  int channels, inner, step;
  int channel_step, offset_step;  // what `step` vectors are, in channels and elements of a span
  int turns, rest;  // each thread has `turns` vectors, the first `rest` of them one more
};

// Where a vector of elements begins: in which channel's span, and how far.
struct Place {
  unsigned channel, offset;

  __device__ __forceinline__ Place(const Spread& spread, unsigned first) {
    const unsigned span = spread.by_inner.divide(first);
    channel = span - spread.by_channels.divide(span) * spread.channels, offset = first - span * spread.inner;
  }

  __device__ __forceinline__ unsigned next(const Spread& spread) const {
    return channel + 1 == spread.channels ? 0 : channel + 1;
  }
  __device__ __forceinline__ void advance(const Spread& spread) {
    offset += spread.offset_step;
    const bool over = offset >= spread.inner;
    if (over) offset -= spread.inner;
    channel += spread.channel_step + over;
    if (channel >= spread.channels) channel -= spread.channels;
  }
};

// The parameters of a thread's vectors: of all of them, or of the U that are under way.
template <int FORM, int U, typename T, int N> struct Parameters {
  static constexpr int W = kVecWidth<T>, OWN = FORM == kEachColumn ? W : FORM;
  const T* const (&from)[N];
  const Spread& spread;
  Place place;
  T own[FORM == kEachColumn ? 1 : U][N][OWN];
  int edge[U];  // of cut spans: from which element on they are the second's

  __device__ __forceinline__ Parameters(const Spread& spread, const T* const (&from)[N], unsigned first)
      : from(from), spread(spread), place(spread, first) {}

  __device__ __forceinline__ void load_columns() {
    bool all_aligned = spread.channels % W == 0;
#pragma unroll
    for (int j = 0; j < N; ++j) all_aligned = all_aligned && is_aligned16(from[j]);
    unsigned at = place.channel;
    if (all_aligned) {
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const Vec<T, W> all = load_vec<T, W>(from[j] + at);
#pragma unroll
        for (int k = 0; k < OWN; ++k) own[0][j][k] = all.data[k];
      }
    } else {
#pragma unroll
      for (int k = 0; k < OWN; ++k) {
#pragma unroll
        for (int j = 0; j < N; ++j) own[0][j][k] = from[j][at];
        at = at + 1 == spread.channels ? 0 : at + 1;
      }
    }
  }

  // Those of vector u of U, each the next of the one before.
  __device__ __forceinline__ void load_next(int u) {
    edge[u] = min(spread.inner - place.offset, static_cast<unsigned>(W));
#pragma unroll
    for (int j = 0; j < N; ++j) {
      own[u][j][0] = from[j][place.channel];
      if (FORM == kCutSpans) own[u][j][OWN - 1] = edge[u] < W ? from[j][place.next(spread)] : own[u][j][0];
    }
    place.advance(spread);
  }

  __device__ __forceinline__ void get(int u, int k, acc_t<T> (&values)[N]) const {
#pragma unroll
    for (int j = 0; j < N; ++j) {
      if (FORM == kEachColumn) values[j] = to_acc(own[0][j][k]);
      else values[j] = to_acc(FORM == kWholeSpans || k < edge[u] ? own[u][j][0] : own[u][j][OWN - 1]);
    }
  }
};

// Grid: ceil(min(step, n / W) / blockDim.x) or more, one dimension. Each thread owns every `step`-th vector, U of them under
// way at once, then the single elements of its grid-stride; all go one by one where a pointer is off 16 bytes. f takes an
// element and an array of its parameters, in acc_t<T>. The first loads go out before those of the parameters.
template <int FORM, int U, typename T, int N, typename F>
__device__ __forceinline__ void spread_over(const Spread& spread, long long n, F f, T* __restrict__ out,
                                            const T* __restrict__ x, const T* const (&parameters)[N]) {
  constexpr int W = kVecWidth<T>;
  using A = acc_t<T>;
  const long long first = global_thread(), stride = spread.step * (long long)W;
  const bool aligned = is_aligned16(out) && is_aligned16(x);
  int left = aligned && first < spread.step ? spread.turns + (first < spread.rest) : 0;
  if (left > 0) {
    long long at = first * W;
    Vec<T, W> loaded[U];
    Parameters<FORM, U, T, N> own(spread, parameters, static_cast<unsigned>(at));
    const auto load = [&] {
#pragma unroll
      for (int u = 0; u < U; ++u) {
        if (u < left) loaded[u] = load_vec<T, W>(x + at + u * stride);
      }
      if constexpr (FORM != kEachColumn) {
#pragma unroll
        for (int u = 0; u < U; ++u) {
          if (u < left) own.load_next(u);
        }
      }
    };
    load();
    if constexpr (FORM == kEachColumn) own.load_columns();
    while (true) {
#pragma unroll
      for (int u = 0; u < U; ++u) {
        if (u >= left) break;
        Vec<T, W> result;
#pragma unroll
        for (int k = 0; k < W; ++k) {
          A values[N];
          own.get(u, k, values);
          result.data[k] = from_acc<T>(f(to_acc(loaded[u].data[k]), values));
        }
        store_whole(out + at + u * stride, result);
      }
      if ((left -= U) <= 0) break;
      at += U * stride;
      load();
    }
  }
  for (long long i = (aligned ? n / W * W : 0) + first; i < n; i += global_threads()) {
    A values[N];
#pragma unroll
    for (int j = 0; j < N; ++j) values[j] = to_acc(parameters[j][i / spread.inner % spread.channels]);
    out[i] = from_acc<T>(f(to_acc(x[i]), values));
  }
}
