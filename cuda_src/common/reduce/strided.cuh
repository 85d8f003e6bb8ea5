// Segments of a contiguous array, each of one or several runs of neighbours:
//
//     a group, a plane    one run: segment s is elements [s size, (s + 1) size)
//     a channel           a run in each image, `stride` apart: (n, c, s) for all n and s is `count` runs of `size`
//
// A run is cut at the 16-byte boundaries of one tensor, so that all but its first and last vector of W elements are whole,
// wherever it begins. What lies otherwise, another tensor off such a boundary, is read and written one by one. Where all
// runs of all tensors are whole vectors, none of this is compiled in: kernels branch once, by all_aligned(), into code for
// each.
#pragma once

#include "common/hw/cp_async.cuh"
#include "common/reduce/shifted_moments.cuh"
#include "common/core/fast_divmod.cuh"
#include "common/tile/row_tile.cuh"

struct Runs {
  long long count, size, stride;
  long long parts, each;  // into which blocks share a segment, and the vectors of each but the last ones
  long long total;  // vectors of a segment, count * vectors.divisor; less than 2^31
  long long elements;  // of the array
  Divisor vectors;  // of a run, those included that only some runs have

  __device__ __forceinline__ unsigned segment(unsigned block) const { return block / unsigned(parts); }
  __device__ __forceinline__ int part(unsigned block) const { return int(block % unsigned(parts)); }
};

// A vector: where its first element would be, counted from the tensor's first, which elements of it are the run's, and the
// place in the run of the first.
struct Place {
  long long at;
  int first, last, in_run;

  __device__ __forceinline__ bool has(int e) const { return first <= e && e < last; }
  __device__ __forceinline__ bool whole(int width) const { return last - first == width; }
};

// Packs of which some elements alone are there take them one after the other, in little code: as element 0, of a vector
// that is shifted.
template <typename T> __device__ __forceinline__ void shift_down(Vector<T>& vector) {
  unsigned (&word)[4] = vector.word;
  if constexpr (sizeof(T) == 2) {
#pragma unroll
    for (int i = 0; i < 3; ++i) word[i] = __funnelshift_r(word[i], word[i + 1], 16);
    word[3] >>= 16;
  } else {
    constexpr int kBy = sizeof(T) / 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) word[i] = i + kBy < 4 ? word[i + kBy] : 0;
  }
}

template <typename T> __device__ __forceinline__ void shift_up(Vector<T>& vector) {
  unsigned (&word)[4] = vector.word;
  if constexpr (sizeof(T) == 2) {
#pragma unroll
    for (int i = 3; i > 0; --i) word[i] = __funnelshift_l(word[i - 1], word[i], 16);
    word[0] <<= 16;
  } else {
    constexpr int kBy = sizeof(T) / 4;
#pragma unroll
    for (int i = 3; i >= 0; --i) word[i] = i >= kBy ? word[i - kBy] : 0;
  }
}

// f(element...) for the elements `first` to `last` - 1.
template <typename F, typename... Packs>
__device__ __forceinline__ void one_by_one(int first, int last, F f, Packs... vectors) {
#pragma unroll 1
  for (int e = 0; e < last; ++e) {
    if (e >= first) f(vectors[0]...);
    (shift_down(vectors), ...);
  }
}

template <typename T> __device__ __forceinline__ Vector<T> load_one_by_one(const T* from, int first, int last) {
  Vector<T> vector = {};
#pragma unroll 1
  for (int e = kVecWidth<T> - 1; e >= 0; --e) {
    shift_up(vector);
    if (first <= e && e < last) vector.set(0, from[e]);
  }
  return vector;
}

template <typename T> __device__ __forceinline__ void store_one_by_one(T* to, Vector<T> vector, int first, int last) {
#pragma unroll 1
  for (int e = 0; e < kVecWidth<T>; ++e) {
    if (first <= e && e < last) to[e] = element<T>(vector.word, 0);
    shift_down(vector);
  }
}

// The vectors of one part of a segment, as seen by a block. WHOLE: each is.
template <typename T, bool WHOLE = false> struct Part {
  static constexpr int W = kVecWidth<T>;
  static constexpr bool kWhole = WHOLE;
  static constexpr int kAtOnce = WHOLE ? 4 : 2;  // vectors of a tensor that a thread has under way
  const Runs& runs;
  long long base;  // of the segment
  int off, begin, end;

  // `like` is the tensor by whose boundaries runs are cut.
  __device__ __forceinline__ Part(const Runs& runs, long long segment, int part, const T* like)
      : runs(runs), base(segment * runs.size) {
    off = int(reinterpret_cast<unsigned long long>(like) / sizeof(T) % W);
    begin = int(min(part * runs.each, runs.total));
    end = int(min(begin + runs.each, runs.total));
  }

  // How many there are, at most.
  __device__ __forceinline__ acc_t<T> elements() const { return acc_t<T>(max(end - begin, 1)) * W; }

  // Vector i, of which nothing is there where i is not in the part.
  __device__ __forceinline__ Place operator[](int i) const {
    if (i >= end) return {0, 0, 0, 0};
    const int run = runs.vectors.divide(i), vector = i - run * int(runs.vectors.divisor);
    const long long start = base + run * runs.stride;
    if constexpr (WHOLE) return {start + vector * (long long)W, 0, W, vector * W};
    const int lead = int((start + off) % W);
    const long long from = vector * (long long)W - lead, left = runs.size - from;
    const int first = from < 0 ? lead : 0, last = left < W ? int(left) : W;
    return {start + from, first, max(first, last), int(from)};
  }

  // What is there of a vector; elements that are not the run's may be anything.
  __device__ __forceinline__ Vector<T> load(const T* tensor, const Place& place) const {
    if (place.first == place.last) return {};
    const T* from = tensor + place.at;
    if (WHOLE || (place.at >= 0 && place.at + W <= runs.elements && is_aligned16(from))) return load_aligned(from);
    return load_one_by_one(from, place.first, place.last);
  }

  __device__ __forceinline__ void put(T* tensor, const Place& place, const Vector<T>& vector) const {
    T* to = tensor + place.at;
    if (WHOLE ? place.last > 0 : place.whole(W) && is_aligned16(to)) {
      store_words(to, vector.word[0], vector.word[1], vector.word[2], vector.word[3]);
    } else if (!WHOLE) {
      store_one_by_one(to, vector, place.first, place.last);
    }
  }

  template <typename F> __device__ __forceinline__ void store(T* tensor, const Place& place, F f) const {
    if (place.first == place.last) return;
    Vector<T> vector;
    round_to_words<T>(vector.word, 0, f);
    put(tensor, place, vector);
  }
};

// A tensor, and in shared memory as many of a part's vectors as there is room for, each for the thread that fetched it.
template <typename T> struct Source {
  const T* tensor;
  uint4* room = nullptr;
  int count = 0;

  // All of them under way at once, and waited for.
  template <typename P> __device__ __forceinline__ void fetch(const P& part) const {
    for (int i = threadIdx.x; i < count; i += blockDim.x) {
      const Place place = part[part.begin + i];
      const T* from = tensor + place.at;
      if (place.whole(P::W) && is_aligned16(from)) {
        fetch16(room + i, from);
      } else {
        const Vector<T> vector = part.load(tensor, place);
        room[i] = make_uint4(vector.word[0], vector.word[1], vector.word[2], vector.word[3]);
      }
    }
    end_group();
  }

  template <typename P> __device__ __forceinline__ Vector<T> load(const P& part, const Place& place, int i) const {
    if (i - part.begin >= count) return part.load(tensor, place);
    const uint4 words = room[i - part.begin];
    return {words.x, words.y, words.z, words.w};
  }
};

// f(places, vectors) for U vectors at a time of each source, all of them under way before any is waited for; with BACK from
// the end.
template <bool BACK = false, typename P, typename F, typename T, typename... More>
__device__ __forceinline__ void each_packs(const P& part, F f, const Source<T>& source, const More&... more) {
  constexpr int U = P::kAtOnce, N = 1 + sizeof...(more);
  const int step = U * blockDim.x, steps = (part.end - part.begin + step - 1) / step;
#pragma unroll 1
  for (int s = 0; s < steps; ++s) {
    const int i = part.begin + (BACK ? steps - 1 - s : s) * step + threadIdx.x;
    Place places[U];
    Vector<T> vectors[N][U];
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const int at = i + u * blockDim.x;
      int t = 1;
      places[u] = part[at];
      vectors[0][u] = source.load(part, places[u], at);
      ((vectors[t++][u] = more.load(part, places[u], at)), ...);
    }
    f(places, vectors);
  }
}

// f(e, vectors...) for the elements of vectors that are there; where some are not, one after the other, as element 0.
template <typename T, typename F, typename... Packs>
__device__ __forceinline__ void each_there(const Place& place, F f, const Vector<T>& vector, const Packs&... more) {
  constexpr int W = kVecWidth<T>;
  if (place.whole(W)) {
#pragma unroll
    for (int e = 0; e < W; ++e) f(vector[e], more[e]...);
  } else {
    one_by_one(place.first, place.last, f, vector, more...);
  }
}

// The moments of this thread's vectors of a part.
template <typename P, typename T> __device__ __forceinline__ Exact<acc_t<T>> part_moments(const P& part,
                                                                                          const Source<T>& x) {
  using A = acc_t<T>;
  Centred<A> own = {};
  A count = A(0);
  int steps = 0;
  each_packs(
      part,
      [&](const Place(&places)[P::kAtOnce], const Vector<T>(&vectors)[1][P::kAtOnce]) {
#pragma unroll
        for (int u = 0; u < P::kAtOnce; ++u) {
          const A there = A(places[u].last - places[u].first);
          if (count == A(0) && there > A(0)) {
            A sum = A(0);
            each_there(places[u], [&](A value) { sum += value; }, vectors[0][u]);
            own.about = sum / there;
          }
          each_there(places[u], [&](A value) { own.add(value); }, vectors[0][u]);
          count += there;
        }
        if ((++steps & (steps - 1)) == 0 && count > A(0)) own.draw_nearer(count);  // 1, 2, 4, 8 ...
      },
      x);
  return Exact<A>::make(own, count);
}

// To the sums of what they are, and times (x - about), U vectors of grad_y.
template <typename T, int U, typename A>
__device__ __forceinline__ void add_products(Pair<A>& sums, const Place (&places)[U], const Vector<T> (&grad_y)[U],
                                             const Vector<T> (&x)[U], A about) {
  Pair<A> own = {};  // added up apart: in a very long segment the sum so far is large
#pragma unroll
  for (int u = 0; u < U; ++u) {
    each_there(places[u], [&](A g, A value) { own.first += g, own.second += g * (value - about); }, grad_y[u], x[u]);
  }
  sums = sums + own;
}

// sum(grad_y) and sum(grad_y (x - about)) of this thread's vectors of a part.
template <typename P, typename T, typename A = acc_t<T>>
__device__ __forceinline__ Pair<A> part_sums(const P& part, const Source<T>& grad_y, const Source<T>& x, A about) {
  Pair<A> sums = {};
  each_packs(
      part,
      [&](const Place(&places)[P::kAtOnce], const Vector<T>(&vectors)[2][P::kAtOnce]) {
        add_products(sums, places, vectors[0], vectors[1], about);
      },
      grad_y, x);
  return sums;
}
