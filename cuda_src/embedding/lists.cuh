// Lists of the positions that name a row of weight, for embedding's backward: where they lie, where a row ends in sorted
// indices, and how a row's positions are found in order in unsorted ones.
#pragma once

#include "common/reduce/warp_block.cuh"

constexpr int kListed = EMBEDDING_LISTED;  // positions of a list that is not long
constexpr int kLinked = EMBEDDING_LINKED;  // indices, at most, that are not sorted

// The lists of positions, in memory that is zero (`zeros`) or not (`scratch`) at the start. The length[first[r] - 1] positions
// of row r begin at lists + stride * (first[r] - 1); first[r] is 0 where there are none.
struct Lists {
  int *first, *length, *done, *found, *lists;
  int2* pieces;  // (first[row] - 1, number of the piece in its list), `found` of them

  __device__ __forceinline__ Lists(int* zeros, int* scratch, long long rows, long long count, int most)
      : first(zeros),
        length(first + rows),
        done(length + count),
        found(done + count),
        lists(scratch + 2 * most),
        pieces(reinterpret_cast<int2*>(scratch)) {}
};

// The first position from `begin` on whose key is another.
__device__ __forceinline__ int end_of(const int* keys, int key, int begin, int count) {
  while (begin < count) {
    const int middle = begin + (count - begin) / 2;
    if (keys[middle] == key) begin = middle + 1;
    else count = middle;
  }
  return begin;
}

// Writes the positions of `row` to shared memory, in ascending order: from number `begin` on, `count` at most. By all threads
// of a block.
__device__ __forceinline__ void find_positions(const long long* indices, int indices_count, int row, int begin,
                                               int count, unsigned* bits, int* found) {
  constexpr int U = 8;
  const int thread = threadIdx.y * blockDim.x + threadIdx.x, warps = blockDim.x * blockDim.y / kWarp;
  const int lane = thread % kWarp, words = (indices_count + kWarp - 1) / kWarp;
#pragma unroll 1
  for (int first = thread / kWarp; first < words; first += U * warps) {
    bool named[U];
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const int i = (first + u * warps) * kWarp + lane;
      named[u] = indices[i < indices_count ? i : 0] == row && i < indices_count;
    }
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const unsigned word = __ballot_sync(kFullMask, named[u]);
      if (lane == 0 && first + u * warps < words) bits[first + u * warps] = word;
    }
  }
  __syncthreads();
  if (thread < kWarp) {
    const int each = (words + kWarp - 1) / kWarp, first = lane * each < words ? lane * each : words;
    const int last = first + each < words ? first + each : words;
    int total = 0;
    for (int word = first; word < last; ++word) total += __popc(bits[word]);
    int number = total;
#pragma unroll
    for (int offset = 1; offset < kWarp; offset *= 2) {
      const int other = __shfl_up_sync(kFullMask, number, offset);
      number += lane >= offset ? other : 0;
    }
    number -= total + begin;
    for (int word = first; word < last; ++word) {
      unsigned left = bits[word];
      if (number + __popc(left) <= 0 || number >= count) {
        number += __popc(left);
        continue;
      }
      for (; left != 0; left &= left - 1, ++number) {
        if (number >= 0 && number < count) found[number] = word * kWarp + __ffs(left) - 1;
      }
    }
  }
}
