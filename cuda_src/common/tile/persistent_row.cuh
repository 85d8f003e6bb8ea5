// Rows held by a block, or by the blocks of a cluster, of which each element is read once: vectors in shared memory, and kOwn
// more in the registers of each thread. A thread fetches and uses the same vectors, so that no barrier stands between: the
// next row is on its way into a vector's place from the moment on that this row's is used for the last time.
#pragma once

#include "common/hw/cp_async.cuh"
#include "common/hw/cluster.cuh"
#include "common/tile/row_tile.cuh"

// Blocks of so many threads that a kernel leaves registers for, on a multiprocessor.
template <int THREADS> constexpr int kHeldBlocks = THREADS == 256 ? 3 : THREADS == 512 ? 2 : 1;

// Packs of each thread in registers, of each of so many tensors.
template <int THREADS, int TENSORS> constexpr int kOwn = THREADS == 1024 ? 2 / TENSORS : 0;

// Rows `pitch` elements apart, of a block of THREADS, each thread of which holds `vectors` vectors.
struct PersistentRows {
  long long rows, size, pitch;
  int vectors;
  bool aligned;  // all tensors begin at 16-byte boundaries
};

// What a block holds of a row, cut as a Tile is.
template <typename T, int THREADS> struct Part : Tile<1, kVecWidth<T>, false> {
  static constexpr int W = kVecWidth<T>;
  int first;  // where this thread's first vector lies
  int from = 0, whole = 0;  // its vectors from <= k < from + whole are the row's, all of each, at 16-byte boundaries

  __device__ __forceinline__ Part() : Tile<1, W, false>{0, 0, 0, 0, 0}, first(0) {}

  // Part `number` of a row; a row that is not there has none.
  __device__ __forceinline__ Part(const PersistentRows& of, long long row, int number) : Part() {
    if (row >= of.rows) return;
    const long long far = 1 << 30, capacity = of.vectors * W * THREADS, at = row * of.pitch, start = number * capacity;
    this->shift = int(at) & (W - 1);
    this->begin = number ? -this->shift : 0;
    this->left = int(max(-far, min(of.size - start, capacity - this->shift)));
    this->low = -int(min(at + start, far));
    this->high = int(min((of.rows - row) * of.pitch - start, far));
    first = threadIdx.x * W - this->shift;
    from = first < this->begin;
    const int room = this->left - first;
    if (of.aligned && room >= W) whole = min(of.vectors, (room - W) / (W * THREADS) + 1) - from;
  }

  __device__ __forceinline__ int at(int k) const { return first + k * (W * THREADS); }
  __device__ __forceinline__ bool is_whole(int k) const { return unsigned(k - from) < unsigned(whole); }
  // Whether element i, of this part's first, is in one of this thread's vectors.
  __device__ __forceinline__ bool owns(int i) const {
    return i >= this->begin && i < this->left && (i + this->shift) / W % THREADS == threadIdx.x;
  }
};

// Where a vector belongs: a whole one at an index; else vector k of a part that begins at that index.
template <typename T, int THREADS> struct Place {
  const Part<T, THREADS>& part;
  long long index;
  int k;
  bool whole;  // known to the compiler, wherever a vector is put
};

// to[...] = f(e) for the elements e of a vector.
template <typename O, typename T, int THREADS, typename F>
__device__ __forceinline__ void put_persistent(const Place<T, THREADS>& place, O* to, F f) {
  constexpr int W = kVecWidth<T>, P = W < kVecWidth<O> ? W : kVecWidth<O>;
#pragma unroll
  for (int p = 0; p < W; p += P) {
    unsigned word[P * sizeof(O) / 4];
    round_to_words<O>(word, p, f);
    O* at = to + place.index;
    if (!place.whole) store_words_of(place.part, at, place.k, word, p);
    else if constexpr (P * sizeof(O) == 16) store_words(at + p, word[0], word[1], word[2], word[3]);
    else store_words(at + p, word[0], word[1]);
  }
}

// Until all but `pending` of the newest groups are there, for 0 <= pending <= MOST.
template <int MOST> __device__ __forceinline__ void wait_for_newest(int pending) {
  if constexpr (MOST == 0) wait_for_groups<0>();
  else if (pending == MOST) wait_for_groups<MOST>();
  else wait_for_newest<MOST - 1>(pending);
}

// For each row of the N tensors `from`, in turn:
//   start(row)               while it is on its way
//   gather(vectors)            PAIR vectors of each tensor at a time, vectors[n][u], with `pad` for what is not the row's
//   reduce()                 after all of those
//   put(place, vectors)        for each vector of a thread that is the row's, or partly: see put_persistent()
//   finish(part)             after all of those, when the row's vectors of this thread have been put
// Grid: any; a multiple of the cluster. Block: THREADS. Dynamic shared memory: 16 N (vectors - kOwn) bytes for each thread.
template <int THREADS, int PAIR, int N, typename T, typename Threads, typename Start, typename Gather, typename Reduce,
          typename Put, typename Finish>
__device__ __forceinline__ void each_persistent_row(const T* const (&from)[N], const PersistentRows& of, T pad,
                                                    const Threads& threads, Start start, Gather gather, Reduce reduce,
                                                    Put put, Finish finish) {
  constexpr int OWN = kOwn<THREADS, N>;
  constexpr int W = kVecWidth<T>, GROUPS = 4;  // of fetches: the first is used while the others are on their way
  extern __shared__ uint4 held[];
  const int number = threads.part(), shared = of.vectors - OWN,
            group = (shared + GROUPS * PAIR - 1) / (GROUPS * PAIR) * PAIR;
  const long long column = number * (long long)(of.vectors * W * THREADS), stride = threads.groups();
  Vector<T> own[N][OWN > 0 ? OWN : 1];
  const auto slot = [&](int n, int k) { return held + (n * shared + k) * THREADS + threadIdx.x; };
  const auto get = [](const uint4* from) { return load_aligned(reinterpret_cast<const T*>(from)); };
  const auto gather_one = [&](const Part<T, THREADS>& part, Vector<T>(&one)[N], int k) {
    Vector<T> some[N][PAIR];
#pragma unroll
    for (int n = 0; n < N; ++n) {
      some[n][0] = part.is_whole(k) ? one[n] : masked(part, one[n], part.at(k), pad);
#pragma unroll
      for (int u = 1; u < PAIR; ++u) some[n][u] = Vector<T>::filled(pad);
    }
    gather(some);
  };

  Part<T, THREADS> part;
  for (long long row = threads.group() - stride; row < of.rows; row += stride) {  // before the first, fetches alone
    const bool live = row >= 0;
    const Part<T, THREADS> coming(of, row + stride, number);
    long long at = row * of.pitch + column, then = at + stride * of.pitch;
    asm volatile("" : "+l"(at), "+l"(then));  // else both products are made anew for each vector
    if (live) {
      start(row);
#pragma unroll 1
      for (int g = 0; g < GROUPS; ++g) {
        wait_for_newest<GROUPS - 1>(GROUPS - 1 - g);
        const int end = min(shared, (g + 1) * group), stop = min(end, part.from + part.whole) - PAIR;
#pragma unroll 1
        for (int k = g * group; k < end; ++k) {
          if (k >= part.from && k <= stop) {  // a run of vectors that are whole
            const uint4* at = slot(0, k);
#pragma unroll 1
            for (; k <= stop; k += PAIR, at += PAIR * THREADS) {
              Vector<T> some[N][PAIR];
#pragma unroll
              for (int u = 0; u < PAIR; ++u) {
#pragma unroll
                for (int n = 0; n < N; ++n) some[n][u] = get(at + (n * shared + u) * THREADS);
              }
              gather(some);
            }
            if (k == end) break;
          }
          if (!part.any(part.at(k))) continue;
          Vector<T> one[N];
#pragma unroll
          for (int n = 0; n < N; ++n) one[n] = get(slot(n, k));
          gather_one(part, one, k);
        }
      }
#pragma unroll
      for (int r = 0; r < OWN; ++r) {
        Vector<T> one[N];
#pragma unroll
        for (int n = 0; n < N; ++n) one[n] = own[n][r];
        if (part.any(part.at(shared + r))) gather_one(part, one, shared + r);
      }
      reduce();
    }
#pragma unroll
    for (int r = 0; r < OWN; ++r) {
      const int k = shared + r, i = coming.at(k);
      Vector<T> one[N];
#pragma unroll
      for (int n = 0; n < N; ++n) {
        one[n] = own[n][r];
        if (coming.is_whole(k)) own[n][r] = load_aligned(from[n] + then + i);
        else if (coming.any(i)) own[n][r] = load_across(coming, from[n] + then, i, coming.low, coming.high, pad);
      }
      if (!live) continue;
      if (part.is_whole(k)) put({part, at + part.at(k), k, true}, one);
      else if (part.any(part.at(k))) put({part, at, k, false}, one);
    }
    // from `both` on vectors are whole in both rows, or in the last one
    const bool more = row + stride < of.rows;
    const int both = live ? max(part.from, coming.from) : of.vectors,
              last = min(part.from + part.whole, more ? coming.from + coming.whole : of.vectors);
#pragma unroll 1
    for (int g = 0; g < GROUPS; ++g) {
      const int end = min(shared, (g + 1) * group), stop = min(end, last);
#pragma unroll 1
      for (int k = g * group; k < end; ++k) {
        if (k >= both && k < stop) {  // a run of those
          uint4* place = slot(0, k);
          long long index = at + part.at(k), next = then + coming.at(k);
#pragma unroll 1
          for (; k < stop; ++k, place += THREADS, index += W * THREADS, next += W * THREADS) {
            Vector<T> one[N];
#pragma unroll
            for (int n = 0; n < N; ++n) {
              one[n] = get(place + n * shared * THREADS);
              if (more) fetch16(place + n * shared * THREADS, from[n] + next);
            }
            put({part, index, k, true}, one);
          }
          if (k == end) break;
        }
        const bool here = live && part.any(part.at(k));
        const int i = coming.at(k);
        Vector<T> one[N];
#pragma unroll
        for (int n = 0; n < N; ++n) {
          if (here) one[n] = get(slot(n, k));
          if (coming.is_whole(k)) {
            fetch16(slot(n, k), from[n] + then + i);
          } else if (coming.any(i)) {
            const Vector<T> vector = load_across(coming, from[n] + then, i, coming.low, coming.high, pad);
            *slot(n, k) = make_uint4(vector.word[0], vector.word[1], vector.word[2], vector.word[3]);
          }
        }
        if (here) put({part, at, k, false}, one);
      }
      end_group();
    }
    if (live) finish(part);
    part = coming;
  }
  wait_for_groups<0>();
}
