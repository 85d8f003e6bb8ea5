// Rows on their way: packs that each thread fetches for itself, into shared memory, while it works on an earlier row.
#pragma once

#include "common/async.cuh"
#include "common/rows.cuh"

// An index or an address, which else is computed anew for each of the packs from there on.
template <typename I> __device__ __forceinline__ void fold_address(I& at) { asm volatile("" : "+l"(at)); }

// `stages` rows, 1 or 2, of each of TENSORS tensors, in dynamic shared memory: 16 TENSORS K bytes for each stage and thread.
// BY_WARPS: those of a warp lie together, so that from a thread's first slot on all are at constant distances. That saves
// what branches on the packs would find anew; code without them is better off with the block's slots one after the other.
template <int TENSORS, int K, typename T, bool BY_WARPS = false> struct Fetched {
  uint4* mine;

  static __device__ __forceinline__ uint4* room() {
    extern __shared__ uint4 fetched[];
    return fetched;
  }

  // `tensors`, for BY_WARPS: of all stages, and what else there is a place of K packs for.
  static __device__ __forceinline__ Fetched of_thread(int tensors = 0) {
    if constexpr (!BY_WARPS) return {room() + threadIdx.y * blockDim.x + threadIdx.x};
    const int thread = threadIdx.y * blockDim.x + threadIdx.x;
    return {room() + thread / kWarp * (tensors * K * kWarp) + thread % kWarp};
  }

  __device__ __forceinline__ uint4* slot(int stage, int tensor, int k) const {
    const int number = (stage * TENSORS + tensor) * K + k;
    if constexpr (BY_WARPS) return mine + number * kWarp;
    return mine + number * (blockDim.x * blockDim.y);
  }

  // This thread's first `count` packs, from 16-byte boundaries on: `row` points to the first, all being there.
  __device__ __forceinline__ void fetch_first(int count, const T* row, int stage, int tensor) const {
    const unsigned step = blockDim.x * kVecWidth<T>;
#pragma unroll
    for (int k = 0; k < K; ++k, row += step) {
      if (k < count) fetch16(slot(stage, tensor, k), row);
    }
  }

  // `row` points to the tile's first element; what is not the tile's becomes 0, at the ends by
  // settle_pack().
  template <bool VECTORS>
  __device__ __forceinline__ void fetch(const Tile<K, kVecWidth<T>, VECTORS>& tile, const T* row, int stage,
                                        int tensor) const {
#pragma unroll(VECTORS ? K : 1)
    for (int k = 0; k < K; ++k) {
      const int i = tile.index(k, 0);
      if (!tile.any(i)) {
        put(Pack<T>{}, stage, tensor, k);
      } else if (VECTORS || (is_aligned16(row + i) && i + kVecWidth<T> <= tile.high)) {
        fetch16(slot(stage, tensor, k), row + i);
      } else {
        put(load_pack(tile, row, k, from_acc<T>(0)), stage, tensor, k);
      }
    }
  }

  // Once what was fetched is there: of a pack at an end of the row, the neighbours of other rows become 0.
  __device__ __forceinline__ void settle_pack(const Tile<K, kVecWidth<T>, false>& tile, int stage, int k) const {
    const int i = tile.index(k, 0);
#pragma unroll
    for (int tensor = 0; tensor < TENSORS; ++tensor) {
      T* pack = reinterpret_cast<T*>(slot(stage, tensor, k));
#pragma unroll
      for (int e = 0; e < kVecWidth<T>; ++e) {
        if (!tile.template all<1>(i + e)) pack[e] = from_acc<T>(0);
      }
    }
  }

  // A pack, element by element, to `row`: those of the tile.
  __device__ __forceinline__ void store_pack(const Tile<K, kVecWidth<T>, false>& tile, T* row, int stage, int tensor,
                                             int k) const {
    const int i = tile.index(k, 0);
    const T* pack = reinterpret_cast<const T*>(slot(stage, tensor, k));
#pragma unroll
    for (int e = 0; e < kVecWidth<T>; ++e) {
      if (tile.template all<1>(i + e)) row[i + e] = pack[e];
    }
  }

  __device__ __forceinline__ void put(const Pack<T>& pack, int stage, int tensor, int k) const {
    *slot(stage, tensor, k) = make_uint4(pack.word[0], pack.word[1], pack.word[2], pack.word[3]);
  }

  __device__ __forceinline__ Pack<T> get(int stage, int tensor, int k) const {
    return load_aligned(reinterpret_cast<const T*>(slot(stage, tensor, k)));
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
