// Groups of small planes, that shared memory holds.
//
// Packs are cut by 16-byte boundaries on their way to shared memory and back; between, threads meet an element or two at a
// time, never of two planes: each has LANES neighbouring threads.
#pragma once

#include "common/hw/cp_async.cuh"
#include "group_norm/group_norm.cuh"

// The elements of a tensor of `all`, from a 16-byte boundary on, that a block has, and may write.
template <typename T> struct Span {
  static constexpr int W = kVecWidth<T>;
  long long begin, end, all;

  // How far into a vector they begin.
  __device__ __forceinline__ int before() const { return int(begin) & (W - 1); }

  // f(vector, at) for the vectors that hold them, dealt out over the block: the number, and where in the tensor it begins.
  template <typename F> __device__ __forceinline__ void each_pack(F f) const {
    const int vectors = int(end - begin + before() + W - 1) / W;
    for (int i = threadIdx.y * blockDim.x + threadIdx.x; i < vectors; i += blockDim.x * blockDim.y) {
      f(i, begin - before() + i * (long long)W);
    }
  }
  template <typename F> __device__ __forceinline__ void each_element(long long at, F f) const {
#pragma unroll 1
    for (int e = 0; e < W; ++e) {
      if (begin <= at + e && at + e < end) f(e);
    }
  }

  __device__ __forceinline__ void fetch(const T* tensor, uint4* room) const {
    each_pack([&](int i, long long at) {
      if (at + W <= all) return fetch16(room + i, tensor + at);
      room[i] = make_uint4(0, 0, 0, 0);
      each_element(at, [&](int e) { reinterpret_cast<T*>(room + i)[e] = tensor[at + e]; });
    });
  }
  __device__ __forceinline__ void store(T* tensor, const uint4* room) const {
    each_pack([&](int i, long long at) {
      if (at >= begin && at + W <= end) return store16(tensor + at, room[i]);
      each_element(at, [&](int e) { tensor[at + e] = reinterpret_cast<const T*>(room + i)[e]; });
    });
  }
};

// Neighbours in shared memory that make a word, of half types two, or the first of them alone.
template <typename T> struct Few {
  static constexpr int kMost = sizeof(T) == 2 ? 2 : 1;
  Vec<T, kMost> of;

  static __device__ __forceinline__ Few load(const T* from, int count) {
    Few few;
    if (count == kMost) few.of = load_vec<T, kMost>(from);
    else few.of.data[0] = *from;
    return few;
  }
  template <typename F> static __device__ __forceinline__ void store(T* to, int count, F f) {
    if (count == 1) *to = from_acc<T>(f(0));
    else if constexpr (kMost == 2) *reinterpret_cast<unsigned*>(to) = rounded_pair(f(0), f(1), T());
  }
  __device__ __forceinline__ acc_t<T> operator[](int e) const { return to_acc(of.data[e]); }
};

// What a thread has of a row by planes, of which a block has `of_block`.
template <typename T, int LANES> struct Share {
  int plane, first, last, lane;  // the block's planes
  long long row, size;
  bool live;
  Span<T> span;

  template <typename Threads>
  __device__ __forceinline__ Share(const Threads& threads, int of_block, const Groups& groups, long long rows,
                                   long long size)
      : plane(int(groups.plane.divisor)), size(size) {
    const long long above = threads.group() * blockDim.y, below = min(above + blockDim.y, rows);
    first = min(threads.part() * of_block, int(groups.channels));
    last = min(first + of_block, int(groups.channels));
    lane = threadIdx.x % LANES;
    row = above + threadIdx.y, live = row < rows;
    span = {above * size + start(first), (below - 1) * size + start(last), rows * size};
  }

  // Where in `room` the row would begin.
  __device__ __forceinline__ T* own(uint4* room) const {
    return reinterpret_cast<T*>(room) + (span.before() + row * size - span.begin);
  }

  __device__ __forceinline__ int start(int c) const { return c * plane; }

  // f(value) for this thread's part of what the block has of the row, dealt out in vectors.
  template <typename F> __device__ __forceinline__ void each_value(uint4* room, F f) const {
    constexpr int W = kVecWidth<T>;
    const int begin = int(own(room) - reinterpret_cast<T*>(room)) + start(first),
              end = begin + start(last) - start(first);
#pragma unroll 2
    for (int i = begin / W + threadIdx.x; live && i * W < end; i += blockDim.x) {
      const uint4 words = room[i];
      const Vector<T> vector = {words.x, words.y, words.z, words.w};
      const bool whole = i * W >= begin && (i + 1) * W <= end;
#pragma unroll
      for (int e = 0; e < W; ++e) {
        if (whole || (i * W + e >= begin && i * W + e < end)) f(vector[e]);
      }
    }
  }

  // f(channel, from, to) for each of this thread's planes, equally often in all threads of a warp: some may be empty.
  template <typename F> __device__ __forceinline__ void each(F f) const {
    for (int next = first; next < last; next += blockDim.x / LANES) {
      const int c = next + threadIdx.x / LANES;
      f(c, start(c), live && c < last ? start(c + 1) : 0);
    }
  }

  // use(i, count, load(i, count)) for the `count` elements from i on of this thread's part of a plane: as many as a word
  // has, but where the plane begins or ends within one. Several are loaded before any is used.
  template <typename Load, typename Use>
  __device__ __forceinline__ void elements(const T* own, int from, int to, Load load, Use use) const {
    constexpr int N = Few<T>::kMost, U = 2, kStep = N * LANES;
    if (N > 1 && reinterpret_cast<unsigned long long>(own + from) % (N * sizeof(T)) != 0) {
      if (lane == 0 && from < to) use(from, 1, load(from, 1));
      ++from;
    }
    int i = from + N * lane;
#pragma unroll 1
    for (; i + (U - 1) * kStep + N <= to; i += U * kStep) {
      decltype(load(0, N)) values[U];
#pragma unroll
      for (int u = 0; u < U; ++u) values[u] = load(i + u * kStep, N);
#pragma unroll
      for (int u = 0; u < U; ++u) use(i + u * kStep, N, values[u]);
    }
#pragma unroll 1
    for (; i + N <= to; i += kStep) use(i, N, load(i, N));
    if (N > 1 && i < to) use(i, 1, load(i, 1));
  }
};
