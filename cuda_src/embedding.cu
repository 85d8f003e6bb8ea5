// y[i]           = weight[indices[i]]
// grad_weight[r] = (sum over i with indices[i] = r of grad_y[i]) / d     d = 1, or how many they are; 0 for padding_idx
//
// Backward sorts the indices, equal ones in the order of their positions (`keys`, and `order`, where each was), and cuts
// them into runs of a fixed length. What has one key within a run is a piece: a thread adds its rows one by one, for a
// vector of columns. A piece that is a whole segment is rounded and stored; those of a segment that crosses runs go to
// `partial`, which a third kernel adds. A fixed order: the same bits every time. Few indices are sorted and added by one
// kernel.
//
// Bytes: forward the rows once in, once out; backward grad_y once in, grad_weight once out. Backward adds once per element
// of grad_y.
// The sort is by tiles of rows: each block reads all of the indices, from the cache, counts those below its tile and so
// knows the places of its own, and writes the zeros of the rows that none names. Where that would be too much to read it is
// PyTorch's.
// Reached on an H200 (GB/s of those bytes; a copy: 4251): forward 16384 of 128256x4096 bf16 3687, 16384 of 50257x768 bf16
// 2883, fp32 3465; backward 16384 of 50257x768 bf16 1750, all of them one row 1719, 256 of 50257x768 2670. Lost: in backward
// three launches, and the sort before there is anything to write; there rows of odd size go by single elements.
#include "common/reduce.cuh"
#include "common/spans.cuh"
#include "common/whole.cuh"

constexpr int kTile = 256;  // rows that a block sorts the indices of, at most
constexpr int kSortWarps = 32, kFewWarps = 16, kFew = 256;
constexpr int kScans = 8;  // indices that a thread has under way
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

// Puts the indices that name rows [low, low + rows) where they belong among all, sorted: put(place, row, position), equal
// ones in the order of their positions. Row low + r has the places from starts[r] up to starts[r + 1]. By a block of WARPS
// warps, each with a part of the positions, that is 64 * kWarp at most: it counts what it finds in each row, and knows
// from the counts of all where it puts the first.
template <int WARPS, typename Put>
__device__ __forceinline__ void sort_tile(const long long* __restrict__ indices, int count, int low, int rows,
                                          int (&starts)[kTile + 1], const Put& put) {
  __shared__ int counts[WARPS][kTile], below[WARPS], ends[kTile / kWarp];
  const int thread = threadIdx.y * blockDim.x + threadIdx.x, lane = thread % kWarp, warp = thread / kWarp;
  const int groups = (count + WARPS * kWarp - 1) / (WARPS * kWarp), begin = warp * groups * kWarp + lane;
  auto row_of = [&](int position) { return position < count ? static_cast<int>(indices[position]) : low + rows; };
  for (int i = thread; i < WARPS * kTile; i += WARPS * kWarp) (&counts[0][0])[i] = 0;
  __syncthreads();
  unsigned long long found = 0;  // groups with something for this tile
  int less = 0;
#pragma unroll 1
  for (int first = 0; first < groups; first += kScans) {
    int row[kScans];
#pragma unroll
    for (int i = 0; i < kScans; ++i) row[i] = row_of(first + i < groups ? begin + (first + i) * kWarp : count);
#pragma unroll
    for (int i = 0; i < kScans; ++i) {
      const bool inside = row[i] >= low && row[i] < low + rows;
      less += row[i] < low;
      if (inside) atomicAdd(&counts[warp][row[i] - low], 1);
      if (__any_sync(kFullMask, inside)) found |= 1ull << (first + i);
    }
  }
  less = warp_reduce<Sum>(less);
  if (lane == 0) below[warp] = less;
  __syncthreads();
  int total = 0, sum = 0;
  if (thread < kTile) {
#pragma unroll 8
    for (int w = 0; w < WARPS; ++w) {
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
    if (lane == kWarp - 1) ends[warp] = sum;
  }
  __syncthreads();
  if (thread < kTile) {
    int start = sum - total;
    for (int w = 0; w < warp; ++w) start += ends[w];
#pragma unroll 8
    for (int w = 0; w < WARPS; ++w) start += below[w];
#pragma unroll 8
    for (int w = 0; w < WARPS; ++w) counts[w][thread] += start;
    starts[thread] = start;
    if (thread == kTile - 1) starts[kTile] = start + total;
  }
  __syncthreads();
#pragma unroll 1
  for (; found != 0; found &= found - 1) {
    const int position = begin + (__ffsll(found) - 1) * kWarp, row = row_of(position);
    const bool inside = row >= low && row < low + rows;
    unsigned same = __ballot_sync(kFullMask, inside);
#pragma unroll
    for (int bit = 1; bit < kTile; bit *= 2) {
      const unsigned set = __ballot_sync(kFullMask, row - low & bit);
      same &= row - low & bit ? set : ~set;
    }
    const int before = __popc(same & ((1u << lane) - 1));
    const bool leads = inside && before == 0;
    int first = leads ? counts[warp][row - low] : 0;
    if (leads) counts[warp][row - low] = first + __popc(same);
    first = __shfl_sync(kFullMask, first, inside ? __ffs(same) - 1 : lane);
    if (inside) put(first + before, row, position);
    __syncwarp();
  }
}

// Zeros for the rows of a tile that no index names, and for padding_idx, by the gridDim.y blocks that have it: in vectors,
// of which one that a named row shares with another is zeros as well. The tile begins at a 16-byte boundary.
template <typename T>
__device__ __forceinline__ void zero_tile(T* grad_weight, int low, int rows, long long size,
                                          const int (&starts)[kTile + 1], long long padding_idx) {
  constexpr int W = kVecWidth<T>;
  T* to = grad_weight + low * size;
  const int thread = (blockIdx.y * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  const long long elements = rows * size, step = gridDim.y * blockDim.x * blockDim.y * W;
  auto named = [&](int row) { return starts[row] < starts[row + 1] && low + row != padding_idx; };
  int row = static_cast<int>(thread * W / size), rows_on = static_cast<int>(step / size);
  long long column = thread * W % size, columns_on = step % size;
#pragma unroll 4
  for (long long e = thread * W; e + W <= elements; e += step) {
    if (!named(row) || (column + W > size && (size < W || !named(row + 1)))) store_vec<T, W>(to + e, Vec<T, W>{});
    row += rows_on;
    column += columns_on;
    if (column >= size) column -= size, ++row;
  }
  if (thread < elements % W) to[elements - 1 - thread] = T(0.0f);
}

// Grid: (ceil(rows / tile), any). Block: kSortWarps warps. The blocks of a column sort the indices that name their tile of
// the rows, kTile at most and a multiple of 16 bytes, and write the zeros there.
template <typename T>
__global__ void __launch_bounds__(kSortWarps* kWarp, 2)
    embedding_bwd_sort(const long long* __restrict__ indices, int* __restrict__ keys, long long* __restrict__ order,
                       T* __restrict__ grad_weight, int count, int tile, long long rows, long long size,
                       long long padding_idx) {
  __shared__ int starts[kTile + 1];
  const int low = blockIdx.x * tile, here = rows - low < tile ? int(rows - low) : tile;
  sort_tile<kSortWarps>(indices, count, low, here, starts, [&](int place, int row, int position) {
    if (blockIdx.y == 0) keys[place] = row, order[place] = position;
  });
  zero_tile(grad_weight, low, here, size, starts, padding_idx);
}

// A vector as one, or a single element.
template <typename T, int K> __device__ __forceinline__ void store_unit(T* to, const Vec<T, K>& unit) {
  if constexpr (K == kVecWidth<T>) store_whole(to, unit);
  else *to = unit.data[0];
}

// Grid: ceil(rows / tile). Block: (threads along a row, the others), kFewWarps warps in all. Shared memory: kFewWarps *
// kWarp * Vec<acc_t<T>, K>. All of backward for kFew indices at most: a block sorts those that name its tile and writes
// all of it. A segment of more than kShort is shared by all threads.
template <typename T, bool VEC>
__global__ void __launch_bounds__(kFewWarps* kWarp, 2)
    embedding_bwd_few(const T* __restrict__ grad_y, const long long* __restrict__ indices, T* __restrict__ grad_weight,
                      int count, int tile, long long rows, long long size, long long padding_idx, bool by_freq) {
  using A = acc_t<T>;
  constexpr int K = VEC ? kVecWidth<T> : 1, U = 4;
  extern __shared__ __align__(32) unsigned char scratch[];
  Vec<A, K>* parts = reinterpret_cast<Vec<A, K>*>(scratch);
  __shared__ int starts[kTile + 1], order[kFew];
  const int low = blockIdx.x * tile, here = rows - low < tile ? int(rows - low) : tile;
  sort_tile<kFewWarps>(indices, count, low, here, starts,
                       [&](int place, int, int position) { order[place] = position; });
  zero_tile(grad_weight, low, here, size, starts, padding_idx);
  __syncthreads();
  auto length = [&](int row) { return low + row == padding_idx ? 0 : starts[row + 1] - starts[row]; };
  auto add = [&](int begin, int end, long long column) {
    Vec<A, K> sum = {};
#pragma unroll 1
    for (int p = begin; p < end; p += U) {
      Vec<T, K> rows[U];
#pragma unroll
      for (int i = 0; i < U; ++i) {
        rows[i] = load_vec<T, K>(grad_y + order[p + i < end ? p + i : p] * size + column);
      }
#pragma unroll
      for (int i = 0; i < U; ++i) {
#pragma unroll
        for (int k = 0; k < K; ++k) sum.data[k] += p + i < end ? to_acc(rows[i].data[k]) : A(0);
      }
    }
    return sum;
  };
  auto store = [&](int row, long long column, const Vec<A, K>& sum) {
    const A divisor = by_freq ? A(length(row)) : A(1);
    Vec<T, K> rounded;
#pragma unroll
    for (int k = 0; k < K; ++k) rounded.data[k] = from_acc<T>(sum.data[k] / divisor);
    store_unit(grad_weight + (low + row) * size + column, rounded);
  };
  bool any_long = false;
  for (int row = threadIdx.y; row < here; row += blockDim.y) {
    const int own = length(row);
    any_long |= own > kShort;
    if (own == 0 || own > kShort) continue;
#pragma unroll 1
    for (long long column = threadIdx.x * K; column < size; column += blockDim.x * K) {
      store(row, column, add(starts[row], starts[row + 1], column));
    }
  }
  if (__syncthreads_or(any_long) == 0) return;
  for (int row = 0; row < here; ++row) {
    if (length(row) <= kShort) continue;
    const int each = (length(row) + blockDim.y - 1) / blockDim.y, end = starts[row + 1];
    const int begin = starts[row] + threadIdx.y * each;
#pragma unroll 1
    for (long long first = 0; first < size; first += blockDim.x * K) {
      const long long column = first + threadIdx.x * K;
      Vec<A, K> sum = {};
      if (column < size) sum = add(begin, begin + each < end ? begin + each : end, column);
      parts[threadIdx.y * blockDim.x + threadIdx.x] = sum;
      __syncthreads();
      if (threadIdx.y == 0 && column < size) {
        for (int y = 1; y < blockDim.y; ++y) {
#pragma unroll
          for (int k = 0; k < K; ++k) sum.data[k] += parts[y * blockDim.x + threadIdx.x].data[k];
        }
        store(row, column, sum);
      }
      __syncthreads();
    }
  }
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
