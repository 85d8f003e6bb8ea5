// y[i]           = weight[indices[i]]
// grad_weight[r] = (sum over i with indices[i] = r of grad_y[i]) / d     d = 1, or how many they are; 0 for padding_idx
//
// Backward sorts the indices, equal ones in the order of their positions (`keys`, and `order`, where each was), and cuts
// them into runs of a fixed length. What has one key within a run is a piece: a thread adds its rows one by one, for a
// vector of columns. A piece that is a whole segment is rounded and stored; those of a segment that crosses runs go to
// `partial`, which a third kernel adds. A fixed order: the same bits every time. Rows that no index names are zeros
// already.
//
// Bytes: forward the rows once in, once out; backward grad_y once in, grad_weight once out (twice the rows that are
// named). Backward adds once per element of grad_y.
// The sort is by one block, while the others write the zeros of grad_weight; of more than 16384 indices, or than shared
// memory holds, it is PyTorch's.
// Reached on an H200 (GB/s of those bytes; a copy: 4251): forward 16384 of 128256x4096 bf16 3687, 16384 of 50257x768 bf16
// 2883, fp32 3465; backward 16384 of 50257x768 bf16 1750, all of them one row 1719, 256 of 50257x768 2670. Lost: in backward
// three launches, of which the sort takes 33 us where the zeros would take 21; there rows of odd size go by single elements.
#include "common/reduce.cuh"
#include "common/spans.cuh"
#include "common/whole.cuh"

constexpr int kSortWarps = 32, kDigits = 256, kSortKeys = 16;
constexpr int kFinishColumns = 32, kFinishRuns = 16, kShort = 8;
constexpr int kThreads = 256;  // of a block of forward, or of backward, at most
constexpr int kSingles = 4;  // single elements of a row that a thread of backward has

// Stops the program, as PyTorch's device assertion does: an index out of range is never a wild read.
__device__ __forceinline__ long long row_at(const long long* indices, long long position, long long rows) {
  const long long row = indices[position];
  if (row < 0 || row >= rows) {
    printf("cupyops: input[%lld] is %lld, expected a row of weight in [0, %lld)\n", position, row, rows);
    __trap();
  }
  return row;
}

// A row to one that begins anywhere, by what is a vector of it. See Span. Not __restrict__: loads would be put off behind
// stores.
template <typename T, Lie LIE> __device__ __forceinline__ void copy_row(const T* from, T* to, long long size) {
  constexpr int W = kVecWidth<T>, U = LIE == kNearEnd ? 1 : 4;
  const int past = LIE == kWhole ? 0 : int(reinterpret_cast<unsigned long long>(to) & 15) / int(sizeof(T));
  const int step = blockDim.x;
  const long long spans = (size + past + W - 1) / W;
  const auto span = [&](long long s) {
    const long long col = s * W - past;
    return Span<T, LIE>{0, col, col < 0 ? past : 0, size - col < W ? int(size - col) : W};
  };
#pragma unroll 1
  for (long long s = threadIdx.x; s < spans; s += U * step) {
    Vec<T, W> held[U];
#pragma unroll
    for (int i = 0; i < U; ++i) held[i] = span(s + i * step < spans ? s + i * step : s).load(from, 0);
#pragma unroll
    for (int i = 0; i < U; ++i) {
      if (s + i * step < spans) span(s + i * step).store(to, 0, held[i]);
    }
  }
}

// Grid: ceil(tokens / blockDim.y). Block: kThreads at most; threadIdx.x runs along a row, of `size` elements, `stride` from
// one of weight to the next. VEC: all of them are at 16-byte boundaries.
template <typename T, bool VEC>
__global__ void __launch_bounds__(kThreads, 4)
    embedding_fwd(const T* weight, const long long* __restrict__ indices, T* y, long long tokens, long long rows,
                  long long size, long long stride) {
  const long long token = blockIdx.x * (long long)blockDim.y + threadIdx.y;
  if (token >= tokens) return;
  const long long row = row_at(indices, token, rows);
  const T* from = weight + row * stride;
  T* to = y + token * size;
  if constexpr (VEC) {
    copy_row<T, kWhole>(from, to, size);
  } else if (row > 0 && row + 1 < rows && stride >= 2 * kVecWidth<T>) {  // what is around it is of weight too
    copy_row<T, kAcross>(from, to, size);
  } else {
    copy_row<T, kNearEnd>(from, to, size);
  }
}

// Grid: any from 2 blocks on. Block: kSortWarps warps. Shared memory: 8 bytes for each of `count` indices, kSortKeys for
// each thread at most. The first block sorts, 8 bits at a time and stable: a warp has a part of the positions, counts its
// digits, each key's rank among those that are alike on the way, and knows from the counts of all where it puts the
// first of each. The other blocks write the zeros of grad_weight meanwhile.
template <typename T>
__global__ void __launch_bounds__(kSortWarps* kWarp)
    embedding_bwd_sort(const long long* __restrict__ indices, int* __restrict__ keys, long long* __restrict__ order,
                       T* __restrict__ grad_weight, int count, int passes, long long elements) {
  extern __shared__ int2 exchange[];  // key, position
  __shared__ int counts[kSortWarps][kDigits], starts[kDigits / kWarp];
  const int thread = threadIdx.x, lane = thread % kWarp, warp = thread / kWarp;
  if (blockIdx.x > 0) {
    constexpr int K = kVecWidth<T>;
    const long long vectors = elements / K, step = (gridDim.x - 1) * (long long)blockDim.x;
    const long long first = (blockIdx.x - 1) * (long long)blockDim.x + thread;
#pragma unroll 4
    for (long long v = first; v < vectors; v += step) store_vec<T, K>(grad_weight + v * K, Vec<T, K>{});
    if (first < elements % K) grad_weight[vectors * K + first] = T(0.0f);
    return;
  }
  const int part = (count + kSortWarps * kWarp - 1) / (kSortWarps * kWarp) * kWarp, begin = warp * part + lane;
  const int end = warp * part + part < count ? warp * part + part : count;
  int key[kSortKeys] = {}, place[kSortKeys];
#pragma unroll
  for (int i = 0; i < kSortKeys; ++i) {
    place[i] = begin + i * kWarp;
    if (place[i] < end) key[i] = static_cast<int>(indices[place[i]]);
  }
#pragma unroll 1
  for (int pass = 0; pass < passes; ++pass) {
    const int shift = 8 * pass;
    for (int i = thread; i < kSortWarps * kDigits; i += kSortWarps * kWarp) (&counts[0][0])[i] = 0;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kSortKeys; ++i) {
      if (i * kWarp >= part) break;
      const int at = begin + i * kWarp;
      if (pass > 0 && at < end) key[i] = exchange[at].x, place[i] = exchange[at].y;
      const int digit = key[i] >> shift & (kDigits - 1);
      unsigned same = __ballot_sync(kFullMask, at < end);
#pragma unroll
      for (int bit = 1; bit < kDigits; bit *= 2) {
        const unsigned set = __ballot_sync(kFullMask, digit & bit);
        same &= digit & bit ? set : ~set;
      }
      const int before = __popc(same & ((1u << lane) - 1));
      const bool leads = at < end && before == 0;
      int rank = leads ? counts[warp][digit] : 0;
      if (leads) counts[warp][digit] = rank + __popc(same);
      rank = __shfl_sync(kFullMask, rank, at < end ? __ffs(same) - 1 : lane) + before;
      place[i] |= rank << 16;
      __syncwarp();
    }
    __syncthreads();
    int total = 0, sum = 0;
    if (thread < kDigits) {
#pragma unroll 8
      for (int w = 0; w < kSortWarps; ++w) {
        const int here = counts[w][thread];
        counts[w][thread] = total;
        total += here;
      }
      sum = total;
#pragma unroll
      for (int offset = 1; offset < kWarp; offset *= 2) {
        const int other = __shfl_up_sync(kFullMask, sum, offset);
        sum += lane >= offset ? other : 0;
      }
      if (lane == kWarp - 1) starts[warp] = sum;
    }
    __syncthreads();
    if (thread < kDigits) {
      int start = sum - total;
      for (int w = 0; w < warp; ++w) start += starts[w];
#pragma unroll 8
      for (int w = 0; w < kSortWarps; ++w) counts[w][thread] += start;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kSortKeys; ++i) {
      if (begin + i * kWarp >= end) break;
      exchange[counts[warp][key[i] >> shift & (kDigits - 1)] + (place[i] >> 16)] = {key[i], place[i] & 0xffff};
    }
    __syncthreads();
  }
  for (int i = thread; i < count; i += kSortWarps * kWarp) keys[i] = exchange[i].x, order[i] = exchange[i].y;
}

// A vector as one, or a single element.
template <typename T, int K> __device__ __forceinline__ void store_unit(T* to, const Vec<T, K>& unit) {
  if constexpr (K == kVecWidth<T>) store_whole(to, unit);
  else *to = unit.data[0];
}

// Grid: (ceil(runs / blockDim.y), ceil(vectors of a row / (C blockDim.x))), C being 1 for vectors, kSingles for single
// elements. Block: kThreads at most. Of run r, partial[2 * r] is the piece that goes on with a segment,
// partial[2 * r + 1] the one that begins a segment and does not end it.
template <typename T, bool VEC, bool FREQ>
__global__ void __launch_bounds__(kThreads, 3)
    embedding_bwd(const T* __restrict__ grad_y, const int* __restrict__ keys, const long long* __restrict__ order,
                  T* __restrict__ grad_weight, acc_t<T>* __restrict__ partial, long long count, long long size, int run,
                  long long padding_idx) {
  using A = acc_t<T>;
  constexpr int K = VEC ? kVecWidth<T> : 1, C = VEC ? 1 : kSingles, U = 4;
  const long long r = blockIdx.x * (long long)blockDim.y + threadIdx.y, begin = r * run;
  const long long first_column = (blockIdx.y * (long long)blockDim.x * C + threadIdx.x) * K;
  if (begin >= count || first_column >= size) return;
  long long columns[C];
#pragma unroll
  for (int c = 0; c < C; ++c) columns[c] = first_column + c * (int(blockDim.x) * K);
  const long long end = begin + run < count ? begin + run : count;
  const long long head =
      begin > 0 && keys[begin - 1] == keys[begin] ? begin : -1;  // where the piece goes on with a segment
  const long long tail = end < count && keys[end] == keys[end - 1] ? end : -1;  // before which it does not end one
  Vec<A, K> sum[C] = {};
  int key = keys[begin];
  long long first = begin;
  auto finish = [&](long long past) {
    if (key == padding_idx) return;
#pragma unroll
    for (int c = 0; c < C; ++c) {
      if (columns[c] >= size) break;
      if (first == head || past == tail) {
        store_vec<A, K>(partial + (2 * r + (first != head)) * size + columns[c], sum[c]);
        continue;
      }
      Vec<T, K> rounded;
#pragma unroll
      for (int k = 0; k < K; ++k) {
        rounded.data[k] = from_acc<T>(FREQ ? sum[c].data[k] / A(past - first) : sum[c].data[k]);
      }
      store_unit(grad_weight + key * size + columns[c], rounded);
    }
  };
#pragma unroll 1
  for (long long p = begin; p < end; p += U) {
    int found[U];
    long long place[U];
    Vec<T, K> rows[U][C];
#pragma unroll
    for (int i = 0; i < U; ++i) {
      const long long here = p + i < end ? p + i : p;  // no branch: in it a load is waited for
      found[i] = keys[here];
      place[i] = order[here];
    }
#pragma unroll
    for (int i = 0; i < U; ++i) {
#pragma unroll
      for (int c = 0; c < C; ++c) {
        rows[i][c] = load_vec<T, K>(grad_y + place[i] * size + (columns[c] < size ? columns[c] : first_column));
      }
    }
#pragma unroll
    for (int i = 0; i < U; ++i) {
      if (p + i >= end) continue;
      if (found[i] != key) {
        finish(p + i);
        key = found[i];
        first = p + i;
#pragma unroll
        for (int c = 0; c < C; ++c) sum[c] = {};
      }
      if (key == padding_idx) continue;
#pragma unroll
      for (int c = 0; c < C; ++c) {
#pragma unroll
        for (int k = 0; k < K; ++k) sum[c].data[k] += to_acc(rows[i][c].data[k]);
      }
    }
  }
  finish(end);
}

// The first position from `begin` on whose key is another.
__device__ __forceinline__ long long end_of(const int* keys, int key, long long begin, long long count) {
  while (begin < count) {
    const long long middle = begin + (count - begin) / 2;
    if (keys[middle] == key) begin = middle + 1;
    else count = middle;
  }
  return begin;
}

// Grid: (ceil((runs - 1) / kFinishRuns), ceil(size / kFinishColumns)). Block: (kFinishColumns, kFinishRuns). Adds the
// pieces of the segments that begin in these runs and do not end there: a thread those of one run, all of them of one
// that goes on for more than kShort runs.
template <typename T>
__global__ void embedding_bwd_finish(const int* __restrict__ keys, const acc_t<T>* __restrict__ partial,
                                     T* __restrict__ grad_weight, long long count, long long size, int run,
                                     long long runs, long long padding_idx, bool by_freq) {
  using A = acc_t<T>;
  __shared__ A sums[kFinishRuns][kFinishColumns];
  __shared__ long long longer[kFinishRuns];
  const long long r = blockIdx.x * (long long)kFinishRuns + threadIdx.y, begin = r * run, end = begin + run;
  const long long column = blockIdx.y * (long long)kFinishColumns + threadIdx.x;
  const bool inside = column < size;
  auto piece = [&](long long first, long long s) {
    return partial[(2 * s + (s == first)) * size + (inside ? column : 0)];
  };
  auto store = [&](int key, long long from, A sum) {
    A divisor = A(1);
    if (by_freq) {
      const long long past = end_of(keys, key, (from + 1) * run, count);
      long long first = from * run;
      while (keys[first] != key) ++first;
      divisor = A(past - first);
    }
    if (inside) grad_weight[key * size + column] = from_acc<T>(sum / divisor);
  };
  int next[kShort];  // the keys that the runs after this one begin with
#pragma unroll
  for (int i = 0; i < kShort; ++i) next[i] = keys[r + 1 + i < runs ? (r + 1 + i) * run : count - 1];
  const int key = keys[end < count ? end - 1 : count - 1], before = keys[begin > 0 && begin < count ? begin - 1 : 0];
  const bool mine = end < count && next[0] == key && key != padding_idx && (begin == 0 || before != key);
  const bool is_long = mine && r + kShort < runs && next[kShort - 1] == key;
  if (mine && !is_long) {
    A pieces[kShort], sum = A(0);
#pragma unroll
    for (int i = 0; i < kShort; ++i) {
      const bool there = i == 0 || (r + i < runs && next[i - 1] == key);
      pieces[i] = piece(r, there ? r + i : r);
    }
#pragma unroll
    for (int i = 0; i < kShort; ++i) sum += i == 0 || (r + i < runs && next[i - 1] == key) ? pieces[i] : A(0);
    store(key, r, sum);
  }
  if (threadIdx.x == 0) longer[threadIdx.y] = is_long ? r : -1;
  if (__syncthreads_or(is_long) == 0) return;
#pragma unroll 1
  for (int y = 0; y < kFinishRuns; ++y) {
    const long long from = longer[y];
    if (from < 0) continue;
    const int key = keys[from * run + run - 1];
    A sum = A(0);
    bool goes_on = true;
#pragma unroll 1
    for (long long s = from + threadIdx.y; s < runs && goes_on; s += kShort * kFinishRuns) {
      bool there[kShort];
      A pieces[kShort];
#pragma unroll
      for (int i = 0; i < kShort; ++i) {
        const long long here = s + i * kFinishRuns;
        there[i] = here == from || (here < runs && keys[here * run] == key);
      }
#pragma unroll
      for (int i = 0; i < kShort; ++i) pieces[i] = piece(from, there[i] ? s + i * kFinishRuns : from);
#pragma unroll
      for (int i = 0; i < kShort; ++i) sum += there[i] ? pieces[i] : A(0);
      goes_on = there[kShort - 1];
    }
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y == 0) {
#pragma unroll
      for (int lane = 1; lane < kFinishRuns; ++lane) sum += sums[lane][threadIdx.x];
      store(key, from, sum);
    }
    __syncthreads();
  }
}
