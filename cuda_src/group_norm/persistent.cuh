// Groups that registers hold, each a row: see common/tile/row_tile.cuh. The blocks of a cluster, along x, may share a row.
//
// With ALIGNED planes are whole vectors. Otherwise a plane has at least as many elements as a vector, which then has elements
// of one channel or of two, and the row has an unaligned head and tail: the elements before its first whole vector and behind
// its last, 2 W - 2 at most. What differs between channels is computed for vectors of one channel. The elements of the few
// others, of the head and of the tail stand apart: a thread has one of them beside its vectors, or a few.
#pragma once

#include "common/hw/cluster.cuh"
#include "group_norm/group_norm.cuh"

template <int K> constexpr int kPersistentThreads = K == 4 ? PERSISTENT_THREADS_4 : PERSISTENT_THREADS_8;

// The vectors that a block has of a row: `count`, of W elements, the first of which begins at element `from` of the row.
template <int W> struct BlockVectors {
  int plane, from, count;

  // The first that begins in channel c.
  __device__ __forceinline__ int first(int c) const {
    return c == 0 ? 0 : min((max(c * plane - from, 0) + W - 1) / W, count);
  }
  // The element of a vector with which channel c begins, if the block has that vector and another channel begins it; else 0.
  __device__ __forceinline__ int border(int c) const {
    const int at = c * plane - from;
    return c > 0 && at > 0 && at < count * W ? at % W : 0;
  }
};

// The part of a row that this block has, as a tile and as a place in the row.
template <int K, typename T, bool ALIGNED> struct PersistentRow {
  static constexpr int W = kVecWidth<T>;
  using Row = Tile<K, W, true>;
  UnalignedRow<W, ALIGNED> unaligned;
  Row tile;
  long long row, size, start;  // of a row; of the part's vectors in it
  bool live, has_ends;  // whether there is a row, and whether its head and tail are this block's

  __device__ __forceinline__ PersistentRow(long long row, long long rows, long long size, int part)
      : unaligned(row, rows, size),
        tile(Row::at(row, rows, unaligned.whole, part)),
        row(row),
        size(size),
        start(unaligned.head + part * (long long)Row::capacity()),
        live(row < rows),
        has_ends(part == 0) {}

  __device__ __forceinline__ bool any(int k) const { return tile.any(tile.index(k, 0)); }

  __device__ __forceinline__ void load(const T* tensor, Vector<T> (&vectors)[K]) const {
    load_row(tile, tensor + row * size + start, from_acc<T>(0), vectors);
  }
  // tensor[...] = of(e), for a vector of one channel. Its place is computed anew: kept from when the vector was loaded, it
  // would take a register for each.
  template <typename F> __device__ __forceinline__ void store(T* tensor, int k, const Groups& groups, F of) const {
    T* const own = tensor + row * size + start;
    if constexpr (ALIGNED) return store_vector(tile, own, k, of);
    int i = threadIdx.x * W;
    asm volatile("" : "+r"(i));
    i += k * blockDim.x * W;
    const int at = int(start) + i, plane = int(groups.plane.divisor);
    if (i >= tile.left || (groups.plane.divide(at) + 1) * plane - at < W) return;
    unsigned word[4];
    round_to_words<T>(word, 0, of);
    store_words(own + i, word[0], word[1], word[2], word[3]);
  }
  // The place in the row of number j of the elements that stand apart, of which there are fewer than (channels + 1) W: head
  // and tail come first, as 2 W numbers. Below 0 where there is no such element.
  __device__ __forceinline__ int apart(const Groups& groups, int j) const {
    if (ALIGNED || !live) return -1;
    if (j < 2 * W) {
      return has_ends && j < int(size) - unaligned.whole ? j + (j < unaligned.head ? 0 : unaligned.whole) : -1;
    }
    const BlockVectors<W> vectors{int(groups.plane.divisor), int(start), int(K * blockDim.x)};
    const int c = j / W - 1, border = c < int(groups.channels) ? vectors.border(c) : 0;
    return border > 0 ? vectors.plane * c - border + j % W : -1;
  }
  // The first of them that this thread has, number threadIdx.x; 0 where there is none.
  __device__ __forceinline__ acc_t<T> load_apart(const T* tensor, const Groups& groups) const {
    const int i = apart(groups, threadIdx.x);
    return i < 0 ? acc_t<T>(0) : to_acc(tensor[row * size + i]);
  }
  // Calls f(i, c, first) for each that this thread has: element i, of channel c; `first` says whether it is the first.
  template <typename F> __device__ __forceinline__ void each_apart(const Groups& groups, F f) const {
    if (ALIGNED) return;
#pragma unroll 1
    for (int j = threadIdx.x; j < (int(groups.channels) + 1) * W; j += blockDim.x) {
      const int i = apart(groups, j);
      if (i >= 0) f(i, groups.plane.divide(i), j == threadIdx.x);
    }
  }
  // A parameter of the channel that each vector begins in; `values` is that of the group's first channel, or null.
  __device__ __forceinline__ void load_of_channel(const Groups& groups, const T* values, float otherwise,
                                                  T (&of)[K]) const {
#pragma unroll
    for (int k = 0; k < K; ++k) {
      of[k] = from_acc<T>(otherwise);
      if (values && any(k)) of[k] = values[groups.plane.divide(int(start) + tile.index(k, 0))];
    }
  }
  // The channel that all of the block's vectors belong to; below 0 where there are several.
  __device__ __forceinline__ int channel(const Groups& groups) const {
    if (blockDim.y > 1 || (!ALIGNED && unaligned.whole != int(size))) return -1;
    const int c = groups.plane.divide(int(start)), last = int(min(start + Row::capacity(), size)) - 1;
    return groups.plane.divide(last) == c ? c : -1;
  }
};

// What a warp has found of its part of a row: how many numbers, nearly their mean, and their sums about that.
template <typename A> struct WarpSums {
  A count, about;
  Pair<A> centred;
};

// The same of a row of `size`, of what its warps have found.
template <typename A>
__device__ __forceinline__ WarpSums<A> combined(const WarpSums<A>* warps, int count, A size) {
  A sum = A(0);
#pragma unroll 1
  for (int i = threadIdx.x % kWarp; i < count; i += kWarp) sum += warps[i].count * warps[i].about;
  const A about = warp_reduce<Sum>(sum) / size;
  Pair<A> centred = {};
#pragma unroll 1
  for (int i = threadIdx.x % kWarp; i < count; i += kWarp) {
    const WarpSums<A>& one = warps[i];
    const A apart = one.about - about, left = one.count * apart;
    centred.first += one.centred.first + left;
    centred.second += one.centred.second + apart * (one.centred.first * A(2) + left);
  }
  return {size, about, warp_reduce<Sum>(centred)};
}

// What a block has of a channel: elements low <= i < high of the row, of which the vectors first <= p < last are whole.
template <int W> struct ChannelRange {
  int from, low, high, first, last;

  // The block's vectors begin at element `from` of the row, and it has the elements begin <= i < end.
  __device__ __forceinline__ ChannelRange(int from, int plane, int c, int begin, int end)
      : from(from),
        low(max(c * plane, begin)),
        high(min((c + 1) * plane, end)),
        first(max(low - from + W - 1, 0) / W),
        last(max((high - from) / W, first)) {}

  // How many elements are in no such vector, at most 2 W - 2; and number j of them.
  __device__ __forceinline__ int rests() const { return front() + max(high - behind(), 0); }
  __device__ __forceinline__ int rest(int j) const { return j < front() ? low + j : behind() + j - front(); }

 private:
  __device__ __forceinline__ int front() const { return max(min(from + first * W, high) - low, 0); }
  __device__ __forceinline__ int behind() const { return max(from + last * W, low + front()); }
};

// The sum over `lanes` neighbouring threads, of which this is number `lane`, of what each has in `own` and of the vectors'
// sums first <= p < last in shared memory.
template <typename A>
__device__ __forceinline__ Pair<A> sum_of_lanes(Pair<A> own, const Pair<A>* vectors, int first, int last, int lane,
                                                int lanes) {
  constexpr int U = 4;
#pragma unroll 1
  for (int i = first + lane; i < last; i += U * lanes) {
    Pair<A> loaded[U];
#pragma unroll
    for (int u = 0; u < U; ++u) loaded[u] = i + u * lanes < last ? vectors[i + u * lanes] : Pair<A>{};
#pragma unroll
    for (int u = 0; u < U; ++u) own = own + loaded[u];
  }
  for (int offset = lanes / 2; offset > 0; offset /= 2) own = Sum()(own, shuffle_xor(own, offset));
  return own;
}

// Calls keep(c, sums) for each channel c of the row, where `sums` are sum(grad_y) and sum(grad_y (x - about)) over what this
// block has of it: 0 where it has nothing. `shared` has a pair for each of the block's vectors, and `lanes` threads sum a
// channel. Every thread of the block calls it.
template <typename T, int K, bool ALIGNED, typename A = acc_t<T>, typename Keep>
__device__ __forceinline__ void sum_channels(const PersistentRow<K, T, ALIGNED>& held, const Groups& groups, int part,
                                             const T* grad_y, const T* x, Vector<T> (&grads)[K], Vector<T> (&inputs)[K],
                                             A about, int lanes, Pair<A>* shared, Keep keep) {
  constexpr int W = kVecWidth<T>;
  const int channels = int(groups.channels), plane = int(groups.plane.divisor), count = K * blockDim.x;
  const auto add = [&](Pair<A>& to, A grad, A value) { to.first += grad, to.second += grad * (value - about); };
  const auto sum = [&](int k) {
    Pair<A> own = {};
#pragma unroll
    for (int e = 0; e < W; ++e) add(own, grads[k][e], inputs[k][e]);
    return own;
  };
  if (const int only = held.channel(groups); only >= 0) {
    Pair<A> own = {};
#pragma unroll
    for (int k = 0; k < K; ++k) {
      if (held.any(k)) own = own + sum(k);
    }
    own = block_reduce<Sum>(own, shared);
    for (int c = threadIdx.x; c < channels; c += blockDim.x) keep(c, c == only ? own : Pair<A>{});
  } else {
    Pair<A>* const vectors = shared + threadIdx.y * count;
#pragma unroll
    for (int k = 0; k < K; ++k) vectors[k * blockDim.x + threadIdx.x] = held.any(k) ? sum(k) : Pair<A>{};
    int lane = threadIdx.x % lanes;
    T rest_grad, rest_input;  // elements beside the vectors, of the channel that comes next
    const auto range = [&](int c) {
      const int start = int(held.start), begin = part == 0 ? 0 : start;
      const int end = part == cluster_blocks() - 1 ? int(held.size) : min(int(held.size), start + count * W);
      return ChannelRange<W>(start, plane, c, begin, held.live && c < channels ? end : begin);
    };
    const auto load_rest = [&](const ChannelRange<W>& of, int j) {
      const bool present = j < of.rests();
      const long long at = held.row * held.size + of.rest(j);
      rest_grad = present ? grad_y[at] : from_acc<T>(0), rest_input = present ? x[at] : from_acc<T>(0);
    };
    if constexpr (!ALIGNED) {
      fold(grads), fold(inputs);
      asm volatile("" : "+r"(lane));  // the loads that follow stay behind those of the vectors, which they would delay
      load_rest(range(threadIdx.x / lanes), lane);
    }
    __syncthreads();
    const int step = blockDim.x / lanes;
    for (int first = 0; first < channels; first += step) {
      const int c = first + threadIdx.x / lanes;
      Pair<A> own = {};
      if constexpr (!ALIGNED) {
        const ChannelRange<W> of = range(c);
        add(own, to_acc(rest_grad), to_acc(rest_input));
#pragma unroll 1
        for (int j = lane + lanes; j < of.rests(); j += lanes) {
          load_rest(of, j);
          add(own, to_acc(rest_grad), to_acc(rest_input));
        }
        if (first + step < channels) load_rest(range(c + step), lane);
        own = sum_of_lanes(own, vectors, of.first, of.last, lane, lanes);
      } else {
        const BlockVectors<W> of{plane, int(held.start), count};
        own = sum_of_lanes(own, vectors, of.first(min(c, channels)), of.first(min(c, channels) + 1), lane, lanes);
      }
      if (lane == 0 && c < channels && held.live) keep(c, own);
    }
  }
}
