// Bands of contiguous planes, which a block copies to shared memory, computes there, and copies back.
#pragma once

#include "common/hw/cp_async.cuh"
#include "pool/window.cuh"

// How blocks share planes. A block has `each` whole planes, or one of the count.divisor bands, of `rows` rows, of a plane.
// Its threads form `groups` of across.divisor threads side by side; a group has strips of `strip` rows, and a band has
// strips.divisor of them.
struct Bands {
  long long planes, each, rows, groups, strip;
  Divisor count, across, strips;
};

// A block's band: rows first <= r < last of `planes` planes from `plane` on.
struct Band {
  long long plane;
  int planes, first, last;

  __device__ __forceinline__ Band(const Bands& b, int height) {
    const int group = b.count.divide(blockIdx.x);
    first = int(blockIdx.x - group * int(b.count.divisor)) * int(b.rows);
    last = min(first + int(b.rows), height);
    plane = group * b.each;
    planes = int(min(b.each, b.planes - plane));
  }

  // Calls f(plane of the band, first row, last row, column) for each strip of this thread.
  template <typename F> __device__ __forceinline__ void each_strip(const Bands& b, int width, F f) const {
    const int group = b.across.divide(threadIdx.x), left = threadIdx.x - group * int(b.across.divisor);
    if (group >= b.groups) return;
    for (int strip = group; strip < planes * int(b.strips.divisor); strip += int(b.groups)) {
      const int at = b.strips.divide(strip);
      const int begin = first + (strip - at * int(b.strips.divisor)) * int(b.strip);
      const int end = min(begin + int(b.strip), last);
      for (int column = left; column < width; column += int(b.across.divisor)) f(at, begin, end, column);
    }
  }
};

// The tiles first <= row < last of a plane: they hold the elements of the rows top <= h < bottom, which the windows
// begin <= oh < end cover.
template <int K, int S> struct Extent {
  int top, bottom, begin, end;

  __device__ __forceinline__ Extent(const Window& p, int first, int last)
      : top(max(first * S - p.ph, 0)),
        bottom(min(last * S - p.ph, p.H)),
        begin(max(first - (K - 1) / S, 0)),
        end(min(last, p.OH)) {}
};

// How many elements `run` lies behind a 16-byte boundary.
template <typename T> __device__ __forceinline__ int misalignment(const T* run) {
  return int(reinterpret_cast<unsigned long long>(run) / sizeof(T) % kVecWidth<T>);
}

// A buffer in shared memory for `count` elements, which lie to 16-byte boundaries as those at `run` do; `free` moves behind it.
template <typename T> __device__ __forceinline__ T* take_buffer(uint4*& free, const T* run, int count) {
  T* buffer = reinterpret_cast<T*>(free) + misalignment(run);
  free += ((misalignment(run) + count) * int(sizeof(T)) + 15) / 16;
  return buffer;
}

// Starts a copy to shared memory of the run of `count` elements from element `first` of a tensor of `total` elements;
// wait_for_copies() waits for it. The vectors at the ends of the run are copied with the elements beside it, but at the
// ends of the tensor, where single elements are.
template <typename T>
__device__ __forceinline__ const T* copy_async(uint4*& free, const T* tensor, long long total, long long first,
                                               int count) {
  constexpr int V = kVecWidth<T>;
  const T* run = tensor + first;
  T* buffer = take_buffer(free, run, count);
  const int lead = misalignment(run), whole = ((lead + count + V - 1) & -V) - lead;
  const int begin = first >= lead ? -lead : V - lead, end = first + whole <= total ? whole : whole - V;
#pragma unroll 4
  for (int e = begin + int(threadIdx.x) * V; e < end; e += blockDim.x * V) fetch16(buffer + e, run + e);
  const int before = threadIdx.x, behind = max(max(begin, end), 0) + threadIdx.x;
  if (before < min(begin, count)) buffer[before] = run[before];
  if (behind < count) buffer[behind] = run[behind];
  return buffer;
}

__device__ __forceinline__ void wait_for_copies() {
  end_group();
  wait_for_groups<0>();
  __syncthreads();
}

// Copies a buffer that take_buffer() gave and the block has filled to `run`: in vectors, and the unaligned head and tail
// one by one.
template <typename T> __device__ __forceinline__ void store_run(T* run, const T* buffer, int count) {
  constexpr int V = kVecWidth<T>;
  const int head = min((V - misalignment(run)) & (V - 1), count), body = (count - head) & -V,
            tail = count - head - body;
#pragma unroll 4
  for (int e = head + int(threadIdx.x) * V; e < head + body; e += blockDim.x * V) {
    *reinterpret_cast<uint4*>(run + e) = *reinterpret_cast<const uint4*>(buffer + e);
  }
  if (threadIdx.x < head) run[threadIdx.x] = buffer[threadIdx.x];
  if (threadIdx.x < tail) run[head + body + threadIdx.x] = buffer[head + body + threadIdx.x];
}

// Results of few bytes go through shared memory and store_run(), since a warp that stored them itself would fill few whole
// sectors.
template <typename T> constexpr bool kStaged = sizeof(T) < POOL_STAGED_BELOW;

// Where threads put results that belong to `run`: a buffer if they are staged, else there.
template <typename T> __device__ __forceinline__ T* output_buffer(uint4*& free, T* run, int count) {
  if constexpr (kStaged<T>) return take_buffer(free, run, count);
  else return run;
}
