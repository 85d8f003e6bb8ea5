// Groups of small planes, which shared memory holds.
//
// Tensors are cut at 16-byte boundaries on their way to shared memory and back. In between a thread has planes of its own,
// and takes an element or two at a time, never of two planes.
#pragma once

#include "common/hw/cp_async.cuh"
#include "group_norm/group_norm.cuh"

// The elements begin <= i < end, which a block has and may write, of a tensor of `all` that begins at a 16-byte boundary.
template <typename T> struct BlockSpan {
  static constexpr int W = kVecWidth<T>;
  long long begin, end, all;

  // How far into a vector they begin.
  __device__ __forceinline__ int lead() const { return int(begin) & (W - 1); }

  // Deals the vectors that hold them out over the block: calls f(i, at) for vector i, which begins at element `at`.
  template <typename F> __device__ __forceinline__ void each_vector(F f) const {
    const int vectors = int(end - begin + lead() + W - 1) / W;
    for (int i = threadIdx.y * blockDim.x + threadIdx.x; i < vectors; i += blockDim.x * blockDim.y) {
      f(i, begin - lead() + i * (long long)W);
    }
  }
  template <typename F> __device__ __forceinline__ void each_element(long long at, F f) const {
#pragma unroll 1
    for (int e = 0; e < W; ++e) {
      if (begin <= at + e && at + e < end) f(e);
    }
  }

  __device__ __forceinline__ void fetch(const T* tensor, uint4* buffer) const {
    each_vector([&](int i, long long at) {
      if (at + W <= all) return fetch16(buffer + i, tensor + at);
      buffer[i] = make_uint4(0, 0, 0, 0);
      each_element(at, [&](int e) { reinterpret_cast<T*>(buffer + i)[e] = tensor[at + e]; });
    });
  }
  __device__ __forceinline__ void store(T* tensor, const uint4* buffer) const {
    each_vector([&](int i, long long at) {
      if (at >= begin && at + W <= end) return store16(tensor + at, buffer[i]);
      each_element(at, [&](int e) { tensor[at + e] = reinterpret_cast<const T*>(buffer + i)[e]; });
    });
  }
};

// A word of neighbours in shared memory: two elements of a half type, or the first of them alone; one of another type.
template <typename T> struct SharedWord {
  static constexpr int kMost = sizeof(T) == 2 ? 2 : 1;
  Vec<T, kMost> of;

  static __device__ __forceinline__ SharedWord load(const T* from, int count) {
    SharedWord word;
    if (count == kMost) word.of = load_vec<T, kMost>(from);
    else word.of.data[0] = *from;
    return word;
  }
  template <typename F> static __device__ __forceinline__ void store(T* to, int count, F f) {
    if (count == 1) *to = from_acc<T>(f(0));
    else if constexpr (kMost == 2) *reinterpret_cast<unsigned*>(to) = rounded_pair(f(0), f(1), T());
  }
  __device__ __forceinline__ acc_t<T> operator[](int e) const { return to_acc(of.data[e]); }
};

// The planes of a row that a block has, `planes` of them, dealt out over its threads.
template <typename T> struct SharedPlanes {
  int plane, first, last;  // elements of a plane; the block's planes
  long long row, size;
  bool live;
  BlockSpan<T> span;

  template <typename Threads>
  __device__ __forceinline__ SharedPlanes(const Threads& threads, int planes, const Groups& groups, long long rows,
                                          long long size)
      : plane(int(groups.plane.divisor)), size(size) {
    const long long above = threads.group() * blockDim.y, below = min(above + blockDim.y, rows);
    first = min(threads.part() * planes, int(groups.channels));
    last = min(first + planes, int(groups.channels));
    row = above + threadIdx.y, live = row < rows;
    span = {above * size + start(first), (below - 1) * size + start(last), rows * size};
  }

  // Where in `buffer` the row would begin.
  __device__ __forceinline__ T* own(uint4* buffer) const {
    return reinterpret_cast<T*>(buffer) + (span.lead() + row * size - span.begin);
  }

  __device__ __forceinline__ int start(int c) const { return c * plane; }

  // Calls f(value) for this thread's elements of what the block has of the row, dealt out in vectors and not by planes.
  template <typename F> __device__ __forceinline__ void each_value(uint4* buffer, F f) const {
    constexpr int W = kVecWidth<T>;
    const int begin = int(own(buffer) - reinterpret_cast<T*>(buffer)) + start(first),
              end = begin + start(last) - start(first);
#pragma unroll 2
    for (int i = begin / W + threadIdx.x; live && i * W < end; i += blockDim.x) {
      const uint4 words = buffer[i];
      const Vector<T> vector = {words.x, words.y, words.z, words.w};
      const bool whole = i * W >= begin && (i + 1) * W <= end;
#pragma unroll
      for (int e = 0; e < W; ++e) {
        if (whole || (i * W + e >= begin && i * W + e < end)) f(vector[e]);
      }
    }
  }

  // Calls f(channel, from, to) for each of this thread's planes.
  template <typename F> __device__ __forceinline__ void each(F f) const {
    for (int c = first + threadIdx.x; live && c < last; c += blockDim.x) f(c, start(c), start(c + 1));
  }

  // Calls use(i, count, load(i, count)) for the `count` elements from i on: as many as a word has, except where the plane
  // begins or ends within one. Two words are loaded before any is used.
  template <typename Load, typename Use>
  __device__ __forceinline__ void elements(const T* own, int from, int to, Load load, Use use) const {
    constexpr int N = SharedWord<T>::kMost, U = 2;
    int i = from;
    if (N > 1 && reinterpret_cast<unsigned long long>(own + i) % (N * sizeof(T)) != 0) {
      use(i, 1, load(i, 1));
      ++i;
    }
#pragma unroll 1
    for (; i + U * N <= to; i += U * N) {
      decltype(load(0, N)) values[U];
#pragma unroll
      for (int u = 0; u < U; ++u) values[u] = load(i + u * N, N);
#pragma unroll
      for (int u = 0; u < U; ++u) use(i + u * N, N, values[u]);
    }
#pragma unroll 1
    for (; i + N <= to; i += N) use(i, N, load(i, N));
    if (N > 1 && i < to) use(i, 1, load(i, 1));
  }
};
