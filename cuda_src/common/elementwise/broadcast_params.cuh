// out[i] = f(x[i], {parameter0[c], parameter1[c], ...}) with c = i / inner % channels. x and out are dense and laid out
// alike; the parameters vary along neighbouring dimensions. No vector needs a division, and a vector may straddle rows, so
// that odd sizes run at the pace of even ones. A parameter whose pointer is null is -0, which leaves every sum as it is.
#pragma once

#include "common/core/fast_divmod.cuh"
#include "common/core/vector_load.cuh"

enum BroadcastForm {
  kPerColumn,  // inner is 1, and `step` vectors are whole rows: a thread's parameters stay in registers
  kPerChannel,  // the neighbours of a channel are whole vectors, each of which has one parameter
  kPerChannelUnaligned,  // they are at least a vector, so that a vector has two channels at most
};

// broadcast_params.py makes it. A thread owns every `step`-th vector, the first of which begins at an element below 2^31.
struct BroadcastParams {
  Divisor by_channels, by_inner;
  int channels, inner, step;
  int channel_step, offset_step;  // what `step` vectors are, in channels and in elements of a channel
  int vectors, rest;  // each thread has so many vectors, and the first `rest` threads one more
};

// Where a vector begins: in which channel, and how far from its first element.
struct ChannelPosition {
  unsigned channel, offset;

  __device__ __forceinline__ ChannelPosition(const BroadcastParams& params, unsigned first) {
    const unsigned run = params.by_inner.divide(first);
    channel = run - params.by_channels.divide(run) * params.channels, offset = first - run * params.inner;
  }

  __device__ __forceinline__ unsigned next(const BroadcastParams& params) const {
    return channel + 1 == params.channels ? 0 : channel + 1;
  }
  __device__ __forceinline__ void advance(const BroadcastParams& params) {
    offset += params.offset_step;
    const bool over = offset >= params.inner;
    if (over) offset -= params.inner;
    channel += params.channel_step + over;
    if (channel >= params.channels) channel -= params.channels;
  }
};

template <typename T> __device__ __forceinline__ T load_param(const T* from, unsigned at) {
  return from ? from[at] : from_acc<T>(acc_t<T>(-0.0));
}

// The parameters of a thread's vectors: of all of them, or of the U whose loads are under way.
template <int FORM, int U, typename T, int N> struct OwnParams {
  static constexpr int W = kVecWidth<T>, OWN = FORM == kPerColumn ? W : FORM;
  const T* const (&from)[N];
  const BroadcastParams& params;
  ChannelPosition position;
  T own[FORM == kPerColumn ? 1 : U][N][OWN];
  int edge[U];  // from which element on an unaligned vector has the second of its channels

  __device__ __forceinline__ OwnParams(const BroadcastParams& params, const T* const (&from)[N], unsigned first)
      : from(from), params(params), position(params, first) {}

  __device__ __forceinline__ void load_columns() {
    bool all_aligned = params.channels % W == 0;
#pragma unroll
    for (int j = 0; j < N; ++j) all_aligned = all_aligned && from[j] && is_aligned16(from[j]);
    unsigned at = position.channel;
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
        for (int j = 0; j < N; ++j) own[0][j][k] = load_param(from[j], at);
        at = at + 1 == params.channels ? 0 : at + 1;
      }
    }
  }

  // Those of vector u of U, each of which is the next of the one before.
  __device__ __forceinline__ void load_next(int u) {
    edge[u] = min(params.inner - position.offset, static_cast<unsigned>(W));
#pragma unroll
    for (int j = 0; j < N; ++j) {
      own[u][j][0] = load_param(from[j], position.channel);
      if (FORM == kPerChannelUnaligned) {
        own[u][j][OWN - 1] = edge[u] < W ? load_param(from[j], position.next(params)) : own[u][j][0];
      }
    }
    position.advance(params);
  }

  __device__ __forceinline__ void get(int u, int k, acc_t<T> (&values)[N]) const {
#pragma unroll
    for (int j = 0; j < N; ++j) {
      if (FORM == kPerColumn) values[j] = to_acc(own[0][j][k]);
      else values[j] = to_acc(FORM == kPerChannel || k < edge[u] ? own[u][j][0] : own[u][j][OWN - 1]);
    }
  }
};

// Grid: ceil(min(step, n / W) / blockDim.x) or more, one dimension. Each thread owns every `step`-th vector, U of which are
// under way at once, and then the single elements of its grid-stride; where a pointer is off 16 bytes, all elements are
// taken one by one. f takes an element and an array of its parameters, in acc_t<T>. The first loads of x go out before those
// of the parameters.
template <int FORM, int U, typename T, int N, typename F>
__device__ __forceinline__ void broadcast_params(const BroadcastParams& params, long long n, F f, T* __restrict__ out,
                                                 const T* __restrict__ x, const T* const (&parameters)[N]) {
  constexpr int W = kVecWidth<T>;
  using A = acc_t<T>;
  const long long first = global_thread(), stride = params.step * (long long)W;
  const bool aligned = is_aligned16(out) && is_aligned16(x);
  int left = aligned && first < params.step ? params.vectors + (first < params.rest) : 0;
  if (left > 0) {
    long long at = first * W;
    Vec<T, W> loaded[U];
    OwnParams<FORM, U, T, N> own(params, parameters, static_cast<unsigned>(at));
    const auto load = [&] {
#pragma unroll
      for (int u = 0; u < U; ++u) {
        if (u < left) loaded[u] = load_vec<T, W>(x + at + u * stride);
      }
      if constexpr (FORM != kPerColumn) {
#pragma unroll
        for (int u = 0; u < U; ++u) {
          if (u < left) own.load_next(u);
        }
      }
    };
    load();
    if constexpr (FORM == kPerColumn) own.load_columns();
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
    const unsigned channel = i / params.inner % params.channels;
#pragma unroll
    for (int j = 0; j < N; ++j) values[j] = to_acc(load_param(parameters[j], channel));
    out[i] = from_acc<T>(f(to_acc(x[i]), values));
  }
}
