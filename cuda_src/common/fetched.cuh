// Rows on their way: packs that each thread fetches for itself, into shared memory, while it works on an earlier row.
#pragma once

#include "common/async.cuh"
#include "common/rows.cuh"

// `stages` rows, 1 or 2, of each of TENSORS tensors, and behind them the packs of `parameters` that all rows share, in
// dynamic shared memory: those of a thread next to each other, an odd number of packs, as which neighbouring threads do not
// meet in a bank. Tensors begin at 16-byte boundaries.
template <int TENSORS, int K, typename T> struct Fetched {
  uint4* mine;

  static __device__ __forceinline__ Fetched of_thread(int stages, int parameters) {
    extern __shared__ uint4 fetched[];
    return {fetched + (threadIdx.y * blockDim.x + threadIdx.x) * (((stages * TENSORS + parameters) * K) | 1)};
  }

  __device__ __forceinline__ uint4* slot(int stage, int tensor, int k) const {
    return mine + (stage * TENSORS + tensor) * K + k;
  }

  // `row` points to the tile's first element; what is not the tile's becomes 0, at the ends by settle().
  template <bool VECTORS>
  __device__ __forceinline__ void fetch(const Tile<K, kVecWidth<T>, VECTORS>& tile, const T* row, int stage,
                                        int tensor) const {
    constexpr int W = kVecWidth<T>;
#pragma unroll
    for (int k = 0; k < K; ++k) {
      const int i = tile.index(k, 0);
      if (tile.any(i) && (VECTORS || i + W <= tile.high)) fetch16(slot(stage, tensor, k), row + i);
      else put(Pack<T>{}, stage, tensor, k);
    }
    if constexpr (!VECTORS) {
      if (tile.high > tile.left) return;
#pragma unroll 1
      for (int k = 0; k < K; ++k) {  // of the last row, an end that is an end of the array
        const int i = tile.index(k, 0);
        if (tile.any(i) && i + W > tile.high) put(load_elements(tile, row, i, from_acc<T>(0)), stage, tensor, k);
      }
    }
  }

  // Once what was fetched is there: packs at an end of the row have neighbours of other rows.
  template <bool VECTORS>
  __device__ __forceinline__ void settle(const Tile<K, kVecWidth<T>, VECTORS>& tile, int stage) const {
    if constexpr (!VECTORS) {
      at_ends(tile, [&](int i, int k) {
#pragma unroll 1
        for (int tensor = 0; tensor < TENSORS; ++tensor) {
          put(masked(tile, get(stage, tensor, k), i, from_acc<T>(0)), stage, tensor, k);
        }
      });
    }
  }

  // row[...] = f(e) for pack k; at the ends of the row by finish(), from the place of pack k of tensor 0 of the stage.
  template <bool VECTORS, typename F>
  __device__ __forceinline__ void store(const Tile<K, kVecWidth<T>, VECTORS>& tile, T* row, int stage, int k, F f) const {
    const int i = tile.index(k, 0);
    if (!tile.any(i)) return;
    Pack<T> pack;
    round_to_words<T>(pack.word, 0, f);
    if (tile.all(i)) store_words(row + i, pack.word[0], pack.word[1], pack.word[2], pack.word[3]);
    else put(pack, stage, 0, k);
  }

  template <bool VECTORS>
  __device__ __forceinline__ void finish(const Tile<K, kVecWidth<T>, VECTORS>& tile, T* row, int stage) const {
    if constexpr (!VECTORS) {
      at_ends(tile, [&](int i, int k) {
      const T* pack = reinterpret_cast<const T*>(slot(stage, 0, k));
#pragma unroll 1
      for (int e = 0; e < kVecWidth<T>; ++e) {
        if (tile.template all<1>(i + e)) row[i + e] = pack[e];
      }
    });
    }
  }

  __device__ __forceinline__ void put(const Pack<T>& pack, int stage, int tensor, int k) const {
    *slot(stage, tensor, k) = make_uint4(pack.word[0], pack.word[1], pack.word[2], pack.word[3]);
  }

  __device__ __forceinline__ Pack<T> get(int stage, int tensor, int k) const {
    return load_aligned(reinterpret_cast<const T*>(slot(stage, tensor, k)));
  }

 private:
  // f(index, k) for each pack of this thread that the row has a part of.
  template <typename F>
  static __device__ __forceinline__ void at_ends(const Tile<K, kVecWidth<T>, false>& tile, F f) {
    if (!tile.ends()) return;
#pragma unroll 1
    for (int k = 0; k < K; ++k) {
      const int i = tile.index(k, 0);
      if (tile.any(i) && !tile.all(i)) f(i, k);
    }
  }
};

// f(row, stage) for each row of a thread, from `first` on, `stride` apart, once fetch(row, stage) has arrived: where there
// are two stages, that of the row before goes on meanwhile. `own`: how far the thread's rows are behind those of its
// block's first. All threads of the block call f as often, also for rows that are not there.
template <typename Fetch, typename F>
__device__ __forceinline__ void each_fetched(long long first, long long own, long long stride, long long rows, bool two,
                                             Fetch fetch, F f) {
  const long long lead = two ? stride : 0;
  int stage = 0;
  for (long long coming = first; coming - lead - own < rows; coming += stride, stage ^= int(two)) {
    fetch(coming, stage);
    end_group();
    if (coming < first + lead) continue;
    if (two) wait_for_groups<1>();
    else wait_for_groups<0>();
    f(coming - lead, stage ^ int(two));
  }
  wait_for_groups<0>();
}
