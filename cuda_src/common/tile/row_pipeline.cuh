// A pipeline of rows: each thread copies its own vectors of the next row to shared memory (cp.async) while it works on an
// earlier one.
#pragma once

#include "common/hw/cp_async.cuh"
#include "common/tile/row_tile.cuh"

// An index or an address, which the compiler else computes anew for each of the vectors from there on.
template <typename I> __device__ __forceinline__ void fold_address(I& at) { asm volatile("" : "+l"(at)); }

// The dynamic shared memory of 1 or 2 stages, each a row of each of TENSORS tensors: 16 TENSORS K bytes for each stage and
// thread. A tensor may be of another type G of half the size, which then takes half of its memory.
template <int TENSORS, int K, typename T> struct PipelinedRow {
  uint4* mine;

  static __device__ __forceinline__ uint4* buffer() {
    extern __shared__ uint4 pipeline_stages[];
    return pipeline_stages;
  }

  static __device__ __forceinline__ PipelinedRow of_thread() {
    return {buffer() + threadIdx.y * blockDim.x + threadIdx.x};
  }

  __device__ __forceinline__ uint4* slot(int stage, int tensor, int k) const {
    return mine + ((stage * TENSORS + tensor) * K + k) * (blockDim.x * blockDim.y);
  }

  // Begins the copy. `row` points to the tile's first element, at a 16-byte boundary if ALIGNED; what is not the tile's
  // becomes 0.
  template <bool ALIGNED = true>
  __device__ __forceinline__ void fetch(const Tile<K, kVecWidth<T>, true>& tile, const T* row, int stage,
                                        int tensor) const {
    if (ALIGNED || is_aligned16(row)) {
#pragma unroll
      for (int k = 0; k < K; ++k) {
        const int i = tile.index(k, 0);
        if (tile.any(i)) fetch16(slot(stage, tensor, k), row + i);
        else put(Vector<T>{}, stage, tensor, k);
      }
    } else {
#pragma unroll 1
      for (int k = 0; k < K; ++k) {
        const int i = tile.index(k, 0);
        put(tile.any(i) ? load_elements(row + i) : Vector<T>{}, stage, tensor, k);
      }
    }
  }

  __device__ __forceinline__ void put(const Vector<T>& vector, int stage, int tensor, int k) const {
    *slot(stage, tensor, k) = make_uint4(vector.word[0], vector.word[1], vector.word[2], vector.word[3]);
  }

  __device__ __forceinline__ Vector<T> get(int stage, int tensor, int k) const {
    return load_aligned(reinterpret_cast<const T*>(slot(stage, tensor, k)));
  }
};

// f(row, stage) for each row of a thread, from `first` on, `stride` apart, once what fetch(row, stage) copies has arrived.
// With two stages the next row is copied meanwhile. `own`: how far the thread's rows are behind those of the block's first
// thread. All threads of the block call f as often as each other, also for rows that are not there.
template <typename Fetch, typename F>
__device__ __forceinline__ void each_pipelined_row(long long first, long long own, long long stride, long long rows,
                                                   bool two_stages, Fetch fetch, F f) {
  const long long lead = two_stages ? stride : 0;
  int stage = 0;
  for (long long coming = first; coming - lead - own < rows; coming += stride, stage ^= int(two_stages)) {
    fetch(coming, stage);
    end_group();
    if (coming < first + lead) continue;
    if (two_stages) wait_for_groups<1>();
    else wait_for_groups<0>();
    f(coming - lead, stage ^ int(two_stages));
  }
  wait_for_groups<0>();
}
