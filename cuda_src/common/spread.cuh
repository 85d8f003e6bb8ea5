// out[i] = f(x[i], {parameter0[c], parameter1[c], ...}), c = i / inner % channels: x and out dense and laid out alike,
// parameters that vary along neighbouring dimensions. No division per vector, and a vector may straddle rows, so that odd
// sizes run at the pace of even ones.
#pragma once

#include "common/column_sums.cuh"

// spread.py makes it. A thread has every `step`-th vector.
struct Spread {
  long long channels, inner;
  long long step;
  long long channel_step, offset_step;  // what `step` vectors are, in channels and elements of a span
};

// The parameters of the W neighbours from `channel` on, where each element has a channel of its own.
template <typename T, int N>
__device__ __forceinline__ void load_columns(Vec<T, kVecWidth<T>> (&own)[N], const T* const (&parameters)[N],
                                             long long channel, long long channels) {
  constexpr int W = kVecWidth<T>;
#pragma unroll
  for (int j = 0; j < N; ++j) {
    if (channels % W == 0 && is_aligned16(parameters[j])) {
      own[j] = load_vec<T, W>(parameters[j] + channel);
      continue;
    }
    long long at = channel;
#pragma unroll
    for (int k = 0; k < W; ++k) {
      own[j].data[k] = parameters[j][at];
      if (++at == channels) at = 0;
    }
  }
}

// Where a vector of elements begins: in which channel's span, and how far.
struct Place {
  long long channel, offset;

  __device__ __forceinline__ long long next(const Spread& spread) const {
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

// Grid: ceil(min(step, n / W) / blockDim.x) or more, one dimension. Each thread owns every `step`-th vector, U of them under
// way at once, then the single elements of its grid-stride; all go one by one where a pointer is off 16 bytes. f takes an
// element and an array of its parameters, in acc_t<T>.
// Not SPANS: inner is 1 and `step` vectors are whole rows, so a thread's parameters stay in its registers.
// SPANS: inner is at least W, so a vector has two channels at most.
template <bool SPANS, int U, typename T, int N, typename F>
__device__ __forceinline__ void spread_over(const Spread& spread, long long n, F f, T* __restrict__ out,
                                            const T* __restrict__ x, const T* const (&parameters)[N]) {
  constexpr int W = kVecWidth<T>;
  const long long vectors = is_aligned16(out) && is_aligned16(x) ? n / W : 0, first = global_thread();
  acc_t<T> values[N];
  if (first < spread.step && first < vectors) {
    Vec<T, W> own[N], other[N];
    Place place;
    if constexpr (SPANS) place = {first * W / spread.inner % spread.channels, first * W % spread.inner};
    else load_columns<T, N>(own, parameters, first * W % spread.channels, spread.channels);
    const long long stride = spread.step * W;
    long long at = first * W;
#pragma unroll 1
    for (int left = static_cast<int>((vectors - first + spread.step - 1) / spread.step); left > 0; left -= U) {
      Vec<T, W> loaded[U];
#pragma unroll
      for (int u = 0; u < U; ++u) {
        if (u < left) loaded[u] = load_hint<T, W>(x + at + u * stride);
      }
#pragma unroll
      for (int u = 0; u < U; ++u) {
        if (u >= left) break;
        int edge = W;  // from which element on it is the next channel's
        if constexpr (SPANS) {
          edge = static_cast<int>(min(spread.inner - place.offset, static_cast<long long>(W)));
          const long long next = edge < W ? place.next(spread) : place.channel;
#pragma unroll
          for (int j = 0; j < N; ++j) {
            own[j].data[0] = parameters[j][place.channel];
            other[j].data[0] = parameters[j][next];
          }
          place.advance(spread);
        }
        Vec<T, W> result;
#pragma unroll
        for (int k = 0; k < W; ++k) {
#pragma unroll
          for (int j = 0; j < N; ++j) {
            values[j] = to_acc(SPANS ? (k < edge ? own[j].data[0] : other[j].data[0]) : own[j].data[k]);
          }
          result.data[k] = from_acc<T>(f(to_acc(loaded[u].data[k]), values));
        }
        store_hint<T, W>(out + at + u * stride, result);
      }
      at += U * stride;
    }
  }
  for (long long i = vectors * W + first; i < n; i += global_threads()) {
#pragma unroll
    for (int j = 0; j < N; ++j) values[j] = to_acc(parameters[j][i / spread.inner % spread.channels]);
    out[i] = from_acc<T>(f(to_acc(x[i]), values));
  }
}
