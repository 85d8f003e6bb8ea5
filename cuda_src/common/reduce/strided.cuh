// Strided segments of a contiguous array: each is one or several runs of neighbouring elements.
//
//     a group, a plane    one run: segment s is elements [s size, (s + 1) size)
//     a channel           a run in each image, `stride` apart: (n, c, s) for all n and s is `count` runs of `size`
//
// Several blocks may share a segment; the vectors that one of them has are its split. A run is cut at the 16-byte
// boundaries of one tensor, so that all of its vectors of W elements are whole except the first and the last, wherever it
// begins. A tensor that lies otherwise, off such a boundary, is read and written element by element. With ALIGNED every run
// of every tensor is whole vectors, and none of this is compiled in.
#pragma once

#include "common/hw/cp_async.cuh"
#include "common/reduce/shifted_moments.cuh"
#include "common/core/fast_divmod.cuh"
#include "common/tile/row_tile.cuh"

struct Segments {
  long long count, size, stride;  // runs of a segment, elements of a run, elements from one run to the next
  long long splits, each;  // blocks that share a segment, and the vectors of each of them except the last ones
  long long total;  // vectors of a segment, count * vectors.divisor; less than 2^31
  long long elements;  // of the array
  Divisor vectors;  // divides by the vectors of a run, including those that only some runs have

  __device__ __forceinline__ unsigned segment(unsigned block) const { return block / unsigned(splits); }
  __device__ __forceinline__ int split(unsigned block) const { return int(block % unsigned(splits)); }
};

// A vector of a run: where its first element would be, counted from the tensor's first; which of its elements belong to the
// run; and where in the run its first element would be.
struct RunVector {
  long long at;
  int first, last, in_run;

  __device__ __forceinline__ bool whole(int width) const { return last - first == width; }
};

// A vector of which only some elements belong to the run is taken element by element, which keeps the code short: always
// element 0, of a vector that is shifted.
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

// Calls f(element...) for the elements first <= e < last of each vector.
template <typename F, typename... Vectors>
__device__ __forceinline__ void one_by_one(int first, int last, F f, Vectors... vectors) {
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

// The vectors of a segment that one block has.
template <typename T, bool ALIGNED = false> struct Split {
  static constexpr int W = kVecWidth<T>;
  static constexpr int kUnroll = ALIGNED ? 4 : 2;  // vectors of a tensor that a thread loads before it waits for them
  const Segments& segments;
  long long base;  // the segment's first element
  int off, begin, end;

  // Runs are cut at the 16-byte boundaries of the tensor `like`.
  __device__ __forceinline__ Split(const Segments& segments, long long segment, int split, const T* like)
      : segments(segments), base(segment * segments.size) {
    off = int(reinterpret_cast<unsigned long long>(like) / sizeof(T) % W);
    begin = int(min(split * segments.each, segments.total));
    end = int(min(begin + segments.each, segments.total));
  }

  // How many elements there are, at most.
  __device__ __forceinline__ acc_t<T> elements() const { return acc_t<T>(max(end - begin, 1)) * W; }

  // Vector i of the segment; it has no elements where it is not this block's.
  __device__ __forceinline__ RunVector operator[](int i) const {
    if (i >= end) return {0, 0, 0, 0};
    const int run = segments.vectors.divide(i), vector = i - run * int(segments.vectors.divisor);
    const long long start = base + run * segments.stride;
    if constexpr (ALIGNED) return {start + vector * (long long)W, 0, W, vector * W};
    const int lead = int((start + off) % W);
    const long long from = vector * (long long)W - lead, left = segments.size - from;
    const int first = from < 0 ? lead : 0, last = left < W ? int(left) : W;
    return {start + from, first, max(first, last), int(from)};
  }

  // The elements of a vector that belong to the run; the others may be anything.
  __device__ __forceinline__ Vector<T> load(const T* tensor, const RunVector& place) const {
    if (place.first == place.last) return {};
    const T* from = tensor + place.at;
    if (ALIGNED || (place.at >= 0 && place.at + W <= segments.elements && is_aligned16(from)))
      return load_aligned(from);
    return load_one_by_one(from, place.first, place.last);
  }

  __device__ __forceinline__ void put(T* tensor, const RunVector& place, const Vector<T>& vector) const {
    T* to = tensor + place.at;
    if (ALIGNED ? place.last > 0 : place.whole(W) && is_aligned16(to)) {
      store_words(to, vector.word[0], vector.word[1], vector.word[2], vector.word[3]);
    } else if (!ALIGNED) {
      store_one_by_one(to, vector, place.first, place.last);
    }
  }

  template <typename F> __device__ __forceinline__ void store(T* tensor, const RunVector& place, F f) const {
    if (place.first == place.last) return;
    Vector<T> vector;
    round_to_words<T>(vector.word, 0, f);
    put(tensor, place, vector);
  }
};

// A tensor, and in shared memory a buffer for as many of a split's vectors as it has room for. A thread finds there only
// vectors that it has prefetched itself.
template <typename T> struct SegmentSource {
  const T* tensor;
  uint4* buffer = nullptr;
  int buffered = 0;  // vectors

  // Starts the copy of all of them at once.
  template <typename P> __device__ __forceinline__ void prefetch(const P& split) const {
    for (int i = threadIdx.x; i < buffered; i += blockDim.x) {
      const RunVector place = split[split.begin + i];
      const T* from = tensor + place.at;
      if (place.whole(P::W) && is_aligned16(from)) {
        fetch16(buffer + i, from);
      } else {
        const Vector<T> vector = split.load(tensor, place);
        buffer[i] = make_uint4(vector.word[0], vector.word[1], vector.word[2], vector.word[3]);
      }
    }
    end_group();
  }

  template <typename P>
  __device__ __forceinline__ Vector<T> load(const P& split, const RunVector& place, int i) const {
    if (i - split.begin >= buffered) return split.load(tensor, place);
    const uint4 words = buffer[i - split.begin];
    return {words.x, words.y, words.z, words.w};
  }
};

// Calls f(places, vectors) for kUnroll vectors at a time of each source, all of which are loaded before any is waited for.
// With REVERSED it goes from the end to the beginning.
template <bool REVERSED = false, typename P, typename F, typename T, typename... More>
__device__ __forceinline__ void each_vectors(const P& split, F f, const SegmentSource<T>& source, const More&... more) {
  constexpr int U = P::kUnroll, N = 1 + sizeof...(more);
  const int step = U * blockDim.x, steps = (split.end - split.begin + step - 1) / step;
#pragma unroll 1
  for (int s = 0; s < steps; ++s) {
    const int i = split.begin + (REVERSED ? steps - 1 - s : s) * step + threadIdx.x;
    RunVector places[U];
    Vector<T> vectors[N][U];
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const int at = i + u * blockDim.x;
      int t = 1;
      places[u] = split[at];
      vectors[0][u] = source.load(split, places[u], at);
      ((vectors[t++][u] = more.load(split, places[u], at)), ...);
    }
    f(places, vectors);
  }
}

// Calls f(e, vectors...) for the elements that belong to the run: of a whole vector unrolled, of another one by one.
template <typename T, typename F, typename... Vectors>
__device__ __forceinline__ void each_present(const RunVector& place, F f, const Vector<T>& vector,
                                             const Vectors&... more) {
  constexpr int W = kVecWidth<T>;
  if (place.whole(W)) {
#pragma unroll
    for (int e = 0; e < W; ++e) f(vector[e], more[e]...);
  } else {
    one_by_one(place.first, place.last, f, vector, more...);
  }
}

// The moments of this thread's vectors of a split.
template <typename P, typename T>
__device__ __forceinline__ ExactMoments<acc_t<T>> split_moments(const P& split, const SegmentSource<T>& x) {
  using A = acc_t<T>;
  Centred<A> own = {};
  A count = A(0);
  int steps = 0;
  each_vectors(
      split,
      [&](const RunVector(&places)[P::kUnroll], const Vector<T>(&vectors)[1][P::kUnroll]) {
#pragma unroll
        for (int u = 0; u < P::kUnroll; ++u) {
          const A present = A(places[u].last - places[u].first);
          if (count == A(0) && present > A(0)) {
            A sum = A(0);
            each_present(places[u], [&](A value) { sum += value; }, vectors[0][u]);
            own.about = sum / present;
          }
          each_present(places[u], [&](A value) { own.add(value); }, vectors[0][u]);
          count += present;
        }
        if ((++steps & (steps - 1)) == 0 && count > A(0)) own.draw_nearer(count);  // after 1, 2, 4, 8 ... steps
      },
      x);
  return ExactMoments<A>::make(own, count);
}

// Adds U vectors of grad_y to the first sum, and times (x - about) to the second.
template <typename T, int U, typename A>
__device__ __forceinline__ void add_products(Pair<A>& sums, const RunVector (&places)[U], const Vector<T> (&grad_y)[U],
                                             const Vector<T> (&x)[U], A about) {
  Pair<A> own = {};  // summed apart: in a very long segment the sum so far is large
#pragma unroll
  for (int u = 0; u < U; ++u) {
    each_present(places[u], [&](A g, A value) { own.first += g, own.second += g * (value - about); }, grad_y[u], x[u]);
  }
  sums = sums + own;
}

// sum(grad_y) and sum(grad_y (x - about)) of this thread's vectors of a split.
template <typename P, typename T, typename A = acc_t<T>>
__device__ __forceinline__ Pair<A> split_sums(const P& split, const SegmentSource<T>& grad_y, const SegmentSource<T>& x,
                                              A about) {
  Pair<A> sums = {};
  each_vectors(
      split,
      [&](const RunVector(&places)[P::kUnroll], const Vector<T>(&vectors)[2][P::kUnroll]) {
        add_products(sums, places, vectors[0], vectors[1], about);
      },
      grad_y, x);
  return sums;
}
