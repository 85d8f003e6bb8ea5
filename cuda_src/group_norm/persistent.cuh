// Groups that registers hold: see rows.cuh. A row may be shared by the blocks of a cluster, along x.
//
// Planes are whole vectors; or MIXED, of no fewer elements than a vector, which then has some of one channel or of two. Elements
// of a mixed row before its first whole vector and behind its last, 2 W - 2 at most, are lone. What differs between channels is
// computed for vectors of one; the elements of the few others, and lone ones, stand apart: a thread has one, beside its vectors,
// or a few.
#pragma once

#include "group_norm/group_norm.cuh"

// The vectors that a block has of a row: `count`, of W elements, the first beginning at element `from` of the row.
template <int W> struct PacksOf {
  int plane, from, count;

  // The first that begins in channel c.
  __device__ __forceinline__ int first(int c) const {
    return c == 0 ? 0 : min((max(c * plane - from, 0) + W - 1) / W, count);
  }
  // Which element of the vector before that channel c begins with, if the block has that vector; else 0.
  __device__ __forceinline__ int border(int c) const {
    const int at = c * plane - from;
    return c > 0 && at > 0 && at < count * W ? at % W : 0;
  }
};

// The part of a row that this block has, as tile and as place in the row.
template <int K, typename T, bool MIXED> struct Held {
  static constexpr int W = kVecWidth<T>;
  using Row = Tile<K, W, true>;
  UnalignedRow<W, !MIXED> cut;
  Row tile;
  long long row, size, start;  // of a row; of the part's vectors, in it
  bool live, lones;  // whether there is a row, and whether its lone elements are this block's

  __device__ __forceinline__ Held(long long row, long long rows, long long size, int part)
      : cut(row, rows, size),
        tile(Row::at(row, rows, cut.whole, part)),
        row(row),
        size(size),
        start(cut.head + part * (long long)Row::capacity()),
        live(row < rows),
        lones(part == 0) {}

  __device__ __forceinline__ bool any(int k) const { return tile.any(tile.index(k, 0)); }

  __device__ __forceinline__ void load(const T* tensor, Vector<T> (&vectors)[K]) const {
    load_row(tile, tensor + row * size + start, from_acc<T>(0), vectors);
  }
  // tensor[...] = of(e), for a vector of one channel. Where it lies is computed anew: kept from when it was loaded that would be
  // a register for each.
  template <typename F> __device__ __forceinline__ void store(T* tensor, int k, const Groups& groups, F of) const {
    T* const own = tensor + row * size + start;
    if constexpr (!MIXED) return store_vector(tile, own, k, of);
    int i = threadIdx.x * W;
    asm volatile("" : "+r"(i));
    i += k * blockDim.x * W;
    const int at = int(start) + i, plane = int(groups.plane.divisor);
    if (i >= tile.left || (groups.plane.divide(at) + 1) * plane - at < W) return;
    unsigned word[4];
    round_to_words<T>(word, 0, of);
    store_words(own + i, word[0], word[1], word[2], word[3]);
  }
  // Element number j of those that stand apart, fewer than (channels + 1) W: first the lone ones, in 2 W numbers. Below 0 where
  // that is none.
  __device__ __forceinline__ int apart(const Groups& groups, int j) const {
    if (!MIXED || !live) return -1;
    if (j < 2 * W) return lones && j < int(size) - cut.whole ? j + (j < cut.head ? 0 : cut.whole) : -1;
    const PacksOf<W> vectors{int(groups.plane.divisor), int(start), int(K * blockDim.x)};
    const int c = j / W - 1, border = c < int(groups.channels) ? vectors.border(c) : 0;
    return border > 0 ? vectors.plane * c - border + j % W : -1;
  }
  // The first of those that this thread has: threadIdx.x is its number; else 0.
  __device__ __forceinline__ acc_t<T> load_apart(const T* tensor, const Groups& groups) const {
    const int i = apart(groups, threadIdx.x);
    return i < 0 ? acc_t<T>(0) : to_acc(tensor[row * size + i]);
  }
  // f(i, c, first) for each of this thread's: element i, of channel c, the first of them or another.
  template <typename F> __device__ __forceinline__ void each_apart(const Groups& groups, F f) const {
    if (!MIXED) return;
#pragma unroll 1
    for (int j = threadIdx.x; j < (int(groups.channels) + 1) * W; j += blockDim.x) {
      const int i = apart(groups, j);
      if (i >= 0) f(i, groups.plane.divide(i), j == threadIdx.x);
    }
  }
  // A parameter of the channel that each vector begins in; `values` is that of the group's first, or null.
  __device__ __forceinline__ void load_of_channel(const Groups& groups, const T* values, float otherwise,
                                                  T (&of)[K]) const {
#pragma unroll
    for (int k = 0; k < K; ++k) {
      of[k] = from_acc<T>(otherwise);
      if (values && any(k)) of[k] = values[groups.plane.divide(int(start) + tile.index(k, 0))];
    }
  }
  // The channel that all of the block's vectors are of; below 0 where there are several, or it would not pay to ask.
  __device__ __forceinline__ int channel(const Groups& groups) const {
    if (K < 4 || blockDim.y > 1 || (MIXED && cut.whole != int(size))) return -1;
    const int c = groups.plane.divide(int(start)), last = int(min(start + Row::capacity(), size)) - 1;
    return groups.plane.divide(last) == c ? c : -1;
  }
};

// What a warp has found of its part of a row: how many numbers, nearly their mean, and their sums about that.
template <typename A> struct Found {
  A count, about;
  Pair<A> centred;
};

// That of a row of `size`, of what its warps have found.
template <typename A> __device__ __forceinline__ Found<A> of_warps(const Found<A>* parts, int count, A size) {
  A sum = A(0);
#pragma unroll 1
  for (int i = threadIdx.x % kWarp; i < count; i += kWarp) sum += parts[i].count * parts[i].about;
  const A about = warp_reduce<Sum>(sum) / size;
  Pair<A> centred = {};
#pragma unroll 1
  for (int i = threadIdx.x % kWarp; i < count; i += kWarp) {
    const Found<A>& one = parts[i];
    const A apart = one.about - about, left = one.count * apart;
    centred.first += one.centred.first + left;
    centred.second += one.centred.second + apart * (one.centred.first * A(2) + left);
  }
  return {size, about, warp_reduce<Sum>(centred)};
}

// What a block has of a channel: elements low <= i < high of the row, of which its vectors first <= p < last are whole.
template <int W> struct Stretch {
  int from, low, high, first, last;

  // `from`: where in the row the block's vectors begin; begin, end: what it has.
  __device__ __forceinline__ Stretch(int from, int plane, int c, int begin, int end)
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

// The sum of vectors first <= p < last of what each has, in shared memory, by `lanes` neighbouring threads of which this is
// number `lane`, and of what each has beside.
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
