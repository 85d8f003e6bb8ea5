// Segments of a contiguous array, each of one or several runs of neighbours:
//
//     a group, a plane    one run: segment s is elements [s size, (s + 1) size)
//     a channel           a run in each image, `stride` apart: (n, c, s) for all n and s is `count` runs of `size`
//
// A run is cut at the 16-byte boundaries of one tensor, so that all but its first and last pack of W elements are whole,
// wherever it begins. What lies otherwise, another tensor off such a boundary, is read and written one by one.
#pragma once

#include "common/divisor.cuh"
#include "common/moments.cuh"
#include "common/rows.cuh"

struct Runs {
  long long count, size, stride;
  long long parts;  // into which blocks share a segment
  long long total;  // packs of a segment, count * packs.divisor; less than 2^31
  Divisor packs;  // of a run, those included that only some runs have
};

// A pack: where its first element would be, counted from the tensor's first, which elements of it are the run's, and the
// place in the run of the first.
struct Place {
  long long at;
  int first, last, in_run;

  __device__ __forceinline__ bool has(int e) const { return first <= e && e < last; }
  __device__ __forceinline__ bool whole(int width) const { return last - first == width; }
};

// The packs of one part of a segment, as seen by a block.
template <typename T> struct Part {
  static constexpr int W = kVecWidth<T>;
  const Runs& runs;
  long long base;  // of the segment
  int off, begin, end;

  // `like` is the tensor by whose boundaries runs are cut.
  __device__ __forceinline__ Part(const Runs& runs, long long segment, int part, const T* like)
      : runs(runs), base(segment * runs.size) {
    off = int(reinterpret_cast<unsigned long long>(like) / sizeof(T) % W);
    const int each = int((runs.total + runs.parts - 1) / runs.parts);
    begin = int(min(part * (long long)each, runs.total));
    end = int(min(begin + (long long)each, runs.total));
  }

  // Pack i, of which nothing is there where i is not in the part.
  __device__ __forceinline__ Place operator[](int i) const {
    if (i >= end) return {0, 0, 0, 0};
    const int run = runs.packs.divide(i), pack = i - run * int(runs.packs.divisor);
    const long long start = base + run * runs.stride;
    const int lead = int((start + off) % W);
    const long long from = pack * (long long)W - lead, left = runs.size - from;
    const int first = from < 0 ? lead : 0, last = left < W ? int(left) : W;
    return {start + from, first, max(first, last), int(from)};
  }
};

template <typename T> __device__ __forceinline__ Pack<T> load_place(const T* tensor, const Place& place) {
  const T* from = tensor + place.at;
  if (place.whole(kVecWidth<T>) && is_aligned16(from)) {
    const uint4 words = *reinterpret_cast<const uint4*>(from);
    return Pack<T>{words.x, words.y, words.z, words.w};
  }
  Pack<T> pack = {};
#pragma unroll
  for (int e = 0; e < kVecWidth<T>; ++e) {
    if (place.has(e)) pack.set(e, from[e]);
  }
  return pack;
}

template <typename T, typename F> __device__ __forceinline__ void store_place(T* tensor, const Place& place, F f) {
  T* to = tensor + place.at;
  if (place.whole(kVecWidth<T>) && is_aligned16(to)) {
    unsigned word[4];
    round_to_words<T>(word, 0, f);
    store_words(to, word[0], word[1], word[2], word[3]);
    return;
  }
#pragma unroll
  for (int e = 0; e < kVecWidth<T>; ++e) {
    if (place.has(e)) to[e] = from_acc<T>(f(e));
  }
}

// f(places, packs...) for U packs at a time of each tensor, all of them under way before any is waited for.
template <int U, typename T, typename F, typename... Tensors>
__device__ __forceinline__ void each_packs(const Part<T>& part, F f, const Tensors*... tensors) {
#pragma unroll 1
  for (int i = part.begin + threadIdx.x; i < part.end; i += U * blockDim.x) {
    Place places[U];
    Pack<T> packs[sizeof...(tensors)][U];
#pragma unroll
    for (int u = 0; u < U; ++u) {
      places[u] = part[i + u * blockDim.x];
      int t = 0;
      ((packs[t++][u] = load_place(tensors, places[u])), ...);
    }
    f(places, packs);
  }
}

// Sum and centred moments of U packs. WHOLE: every element is there.
template <bool WHOLE, int U, typename T>
__device__ __forceinline__ Moments<acc_t<T>> moments_of(const Place (&places)[U], const Pack<T> (&packs)[U]) {
  using A = acc_t<T>;
  constexpr int W = kVecWidth<T>;
  const auto there = [&](int u, int e) { return WHOLE || places[u].has(e); };
  A count = A(WHOLE ? U * W : 0), sum = A(0), squares = A(0);
  if (!WHOLE) {
#pragma unroll
    for (int u = 0; u < U; ++u) count += places[u].last - places[u].first;
    if (count == A(0)) return {};
  }
  const A about = reduce_elements<Sum, U, W>([&](int u, int e) { return there(u, e) ? packs[u][e] : A(0); }) / count;
  each_element<U, W>([&](int u, int e) {
    const A centred = there(u, e) ? packs[u][e] - about : A(0);
    sum += centred, squares += centred * centred;
  });
  return Moments<A>::of(count, about, sum, squares);
}

template <int U> __device__ __forceinline__ bool all_whole(const Place (&places)[U], int width) {
  bool whole = true;
#pragma unroll
  for (int u = 0; u < U; ++u) whole = whole && places[u].whole(width);
  return whole;
}

// The moments of this thread's packs of a part.
template <int U, typename T> __device__ __forceinline__ Moments<acc_t<T>> part_moments(const Part<T>& part,
                                                                                       const T* x) {
  Moments<acc_t<T>> own = {};
  each_packs<U>(
      part,
      [&](const Place(&places)[U], const Pack<T>(&packs)[1][U]) {
        own.merge(all_whole(places, kVecWidth<T>) ? moments_of<true>(places, packs[0])
                                                  : moments_of<false>(places, packs[0]));
      },
      x);
  return own;
}

// sum(grad_y) and sum(grad_y (x - mean)) of this thread's packs of a part.
template <int U, typename T, typename A = acc_t<T>>
__device__ __forceinline__ Pair<A> part_sums(const Part<T>& part, const T* grad_y, const T* x, A mean) {
  Pair<A> sums = {};
  each_packs<U>(
      part,
      [&](const Place(&places)[U], const Pack<T>(&packs)[2][U]) {
        Pair<A> own = {};  // added up apart: in a very long segment the sum so far is large
        if (all_whole(places, kVecWidth<T>)) {
          each_element<U, kVecWidth<T>>([&](int u, int e) {
            own.first += packs[0][u][e], own.second += packs[0][u][e] * (packs[1][u][e] - mean);
          });
        } else {
          each_element<U, kVecWidth<T>>([&](int u, int e) {
            if (places[u].has(e)) own.first += packs[0][u][e], own.second += packs[0][u][e] * (packs[1][u][e] - mean);
          });
        }
        sums = sums + own;
      },
      grad_y, x);
  return sums;
}
