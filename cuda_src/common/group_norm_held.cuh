// Groups that registers hold, themselves whole packs: see rows.cuh. A row may be shared by the blocks of a cluster, along
// x.
//
// Planes are whole packs too; or MIXED, of no fewer elements than a pack, which then has some of one channel or of two.
#pragma once

#include "common/group_norm.cuh"

// The part of a row that this block has, as tile and as place in the row.
template <int K, typename T, bool MIXED> struct Held {
  static constexpr int W = kVecWidth<T>;
  using Row = Tile<K, W, true>;
  Row tile;
  long long row, size, start;  // of a row; of the part, in it
  bool live;

  __device__ __forceinline__ Held(long long row, long long rows, long long size, int part)
      : tile(Row::at(row, rows, size, part)),
        row(row),
        size(size),
        start(part * (long long)Row::capacity()),
        live(row < rows) {}

  __device__ __forceinline__ bool any(int k) const { return tile.any(tile.index(k, 0)); }

  __device__ __forceinline__ void load(const T* tensor, Pack<T> (&packs)[K]) const {
    load_row(tile, tensor + row * size + start, from_acc<T>(0), packs);
  }
  template <typename F> __device__ __forceinline__ void store(T* tensor, int k, F f) const {
    store_pack(tile, tensor + row * size + start, k, f);
  }
  // The same: of(e), and next(c)(e) from the element on at which another channel c begins. Where a mixed pack lies is
  // computed anew: kept from when it was loaded it would be a register for each.
  template <typename F, typename Next>
  __device__ __forceinline__ void store(T* tensor, int k, const Groups& groups, F of, Next next) const {
    if constexpr (!MIXED) return store(tensor, k, of);
    int at = int(start) + threadIdx.x * W;
    asm volatile("" : "+r"(at));
    at += k * blockDim.x * W;
    if (at >= int(start) + tile.left) return;
    const int c = groups.plane.divide(at) + 1, border = c * int(groups.plane.divisor) - at;
    unsigned word[4];
    if (border < W) {
      const auto behind = next(c);
      round_to_words<T>(word, 0, [&](int e) { return e < border ? of(e) : behind(e); });
    } else {
      round_to_words<T>(word, 0, of);
    }
    store_words(tensor + row * size + at, word[0], word[1], word[2], word[3]);
  }
  // The channel that pack k begins in, and the element of the pack at which the next does: W or above where none.
  __device__ __forceinline__ int channel_of(const Groups& groups, int k) const {
    return groups.plane.divide(int(start) + tile.index(k, 0));
  }
  __device__ __forceinline__ int border(const Groups& groups, int k) const {
    return MIXED ? (channel_of(groups, k) + 1) * int(groups.plane.divisor) - (int(start) + tile.index(k, 0)) : W;
  }
  // A parameter of the channel that each pack begins in; `values` is that of the group's first, or null.
  __device__ __forceinline__ void load_of_channel(const Groups& groups, const T* values, float otherwise,
                                                  T (&of)[K]) const {
#pragma unroll
    for (int k = 0; k < K; ++k) {
      of[k] = from_acc<T>(otherwise);
      if (values && any(k)) of[k] = values[channel_of(groups, k)];
    }
  }
  // The channel that all of the block's packs are of; below 0 where there are several, or it would not pay to ask.
  __device__ __forceinline__ int channel(const Groups& groups) const {
    if (K < 4 || blockDim.y > 1) return -1;
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

// The sum over channel c of a row of what `packs` in shared memory hold, each for the channel that it begins in, by `lanes`
// neighbouring threads of which this is number `lane`. The packs are `count`, of W elements, the first beginning at element
// `from` of the row.
template <int W, bool MIXED, typename A>
__device__ __forceinline__ Pair<A> channel_sum(const Pair<A>* packs, int c, int plane, int from, int count, int lane,
                                               int lanes) {
  const auto first = [&](int c) { return min((max(c * plane - from, 0) + (MIXED ? W - 1 : 0)) / W, count); };
  const int high = first(c + 1);
  Pair<A> sums = {};
#pragma unroll 4
  for (int i = first(c) + lane; i < high; i += lanes) sums = sums + packs[i];
  for (int offset = lanes / 2; offset > 0; offset /= 2) sums = Sum()(sums, shuffle_xor(sums, offset));
  return sums;
}
