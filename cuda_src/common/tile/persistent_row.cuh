// Persistent rows: a block, or the blocks of a cluster, keeps a row in shared memory, and OWN more vectors of it in the
// registers of each thread, so that each element is read from memory once. The grid is as large as the GPU, and each block
// takes one row after the other. A thread copies and uses the same vectors, so that no barrier stands between: it copies the
// next row's vector to the place of this row's as soon as it has used this row's for the last time.
#pragma once

#include "common/hw/cp_async.cuh"
#include "common/hw/cluster.cuh"
#include "common/tile/row_tile.cuh"

// Rows that lie `pitch` elements apart. Each thread of a block keeps `vectors` vectors of a row, of each tensor.
struct PersistentRows {
  long long rows, size, pitch;
  int vectors;
  bool aligned;  // all tensors begin at 16-byte boundaries
};

// The part of a row that a block of THREADS threads keeps. Its vectors lie where those of a Tile do.
template <typename T, int THREADS> struct PersistentPart : Tile<1, kVecWidth<T>, false> {
  static constexpr int W = kVecWidth<T>;
  int first;  // where this thread's first vector lies
  int from = 0,
      whole = 0;  // vectors from <= k < from + whole belong to the row entirely, and lie at 16-byte boundaries

  __device__ __forceinline__ PersistentPart() : Tile<1, W, false>{0, 0, 0, 0, 0}, first(0) {}

  // Part `number` of a row. A row beyond the last has no elements.
  __device__ __forceinline__ PersistentPart(const PersistentRows& of, long long row, int number) : PersistentPart() {
    if (row >= of.rows) return;
    const long long far = 1 << 30, capacity = of.vectors * W * THREADS, at = row * of.pitch, start = number * capacity;
    this->shift = int(at) & (W - 1);
    this->begin = number ? -this->shift : 0;
    this->left = int(max(-far, min(of.size - start, capacity - this->shift)));
    this->low = -int(min(at + start, far));
    this->high = int(min((of.rows - row) * of.pitch - start, far));
    first = threadIdx.x * W - this->shift;
    from = first < this->begin;
    const int behind = this->left - first;  // elements of the part from the first vector on
    if (of.aligned && behind >= W) whole = min(of.vectors, (behind - W) / (W * THREADS) + 1) - from;
  }

  __device__ __forceinline__ int at(int k) const { return first + k * (W * THREADS); }
  __device__ __forceinline__ bool is_whole(int k) const { return unsigned(k - from) < unsigned(whole); }
  // Whether element i of this part is in one of this thread's vectors.
  __device__ __forceinline__ bool owns(int i) const {
    return i >= this->begin && i < this->left && (i + this->shift) / W % THREADS == threadIdx.x;
  }
};

// Where a vector is written: a whole one at an index of the tensor; another one as vector k of a part, whose first element
// has that index.
template <typename T, int THREADS> struct PersistentPlace {
  const PersistentPart<T, THREADS>& part;
  long long index;
  int k;
  bool whole;  // a constant wherever a place is made
};

// Writes f(e) for each element e of a vector.
template <typename O, typename T, int THREADS, typename F>
__device__ __forceinline__ void put_persistent(const PersistentPlace<T, THREADS>& place, O* to, F f) {
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

// Waits until all groups of copies but the `pending` newest are complete, for 0 <= pending <= MOST.
template <int MOST> __device__ __forceinline__ void wait_for_newest(int pending) {
  if constexpr (MOST == 0) wait_for_groups<0>();
  else if (pending == MOST) wait_for_groups<MOST>();
  else wait_for_newest<MOST - 1>(pending);
}

// Calls these functions for each row of the N tensors `from`:
//   start(row)                 while the row is still being copied
//   gather(vectors)            with PAIR vectors of each tensor at a time, vectors[n][u]; `pad` is where the row has none
//   reduce()                   after all of those
//   put(place, vectors)        for each vector of this thread with elements of the row: see put_persistent()
//   finish(part)               after this thread has put all its vectors
// Grid: any size; a multiple of the cluster. Block: THREADS. Dynamic shared memory: 16 N (vectors - OWN) bytes for each
// thread. It is one long function because its two passes over the vectors, of which the second copies the next row, share
// their indices, and these must stay in registers.
template <int THREADS, int OWN, int PAIR, int N, typename T, typename Threads, typename Start, typename Gather,
          typename Reduce, typename Put, typename Finish>
__device__ __forceinline__ void each_persistent_row(const T* const (&from)[N], const PersistentRows& of, T pad,
                                                    const Threads& threads, Start start, Gather gather, Reduce reduce,
                                                    Put put, Finish finish) {
  constexpr int W = kVecWidth<T>, GROUPS = 4;  // of copies: the first is used while the others are still under way
  extern __shared__ uint4 persistent[];
  const int number = threads.part(), shared = of.vectors - OWN,
            group = (shared + GROUPS * PAIR - 1) / (GROUPS * PAIR) * PAIR;
  const long long column = number * (long long)(of.vectors * W * THREADS), stride = threads.groups();
  Vector<T> own[N][OWN > 0 ? OWN : 1];
  const auto slot = [&](int n, int k) { return persistent + (n * shared + k) * THREADS + threadIdx.x; };
  const auto get = [](const uint4* from) { return load_aligned(reinterpret_cast<const T*>(from)); };
  const auto gather_one = [&](const PersistentPart<T, THREADS>& part, Vector<T>(&one)[N], int k) {
    Vector<T> some[N][PAIR];
#pragma unroll
    for (int n = 0; n < N; ++n) {
      some[n][0] = part.is_whole(k) ? one[n] : masked(part, one[n], part.at(k), pad);
#pragma unroll
      for (int u = 1; u < PAIR; ++u) some[n][u] = Vector<T>::filled(pad);
    }
    gather(some);
  };

  PersistentPart<T, THREADS> part;
  for (long long row = threads.group() - stride; row < of.rows; row += stride) {  // before the first row it only copies
    const bool live = row >= 0;
    const PersistentPart<T, THREADS> coming(of, row + stride, number);
    long long at = row * of.pitch + column, then = at + stride * of.pitch;
    asm volatile("" : "+l"(at), "+l"(then));  // else the compiler computes both products anew for each vector
    if (live) {
      start(row);
#pragma unroll 1
      for (int g = 0; g < GROUPS; ++g) {
        wait_for_newest<GROUPS - 1>(GROUPS - 1 - g);
        const int end = min(shared, (g + 1) * group), stop = min(end, part.from + part.whole) - PAIR;
#pragma unroll 1
        for (int k = g * group; k < end; ++k) {
          if (k >= part.from && k <= stop) {  // a run of whole vectors
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
    // from `both` on, a vector is whole in both rows, or in the last row
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
