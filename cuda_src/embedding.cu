// y[i]           = weight[indices[i]]
// grad_weight[r] = (sum over i with indices[i] = r of grad_y[i]) / d     d = 1, or how many they are; 0 for padding_idx
//
// Backward gets the indices sorted, equal ones in the order of their positions
// (`keys`, and `order`, where each was), cut into runs of a fixed length. What has one key within a run is a piece: a
// thread adds its rows one by one, for a vector of columns. A piece that is a whole segment is rounded and stored; those
// of a segment that crosses runs go to `partial`, which a second kernel adds. A fixed order: the same bits every time.
// Rows that no index names are zeros already.
//
// Bytes: forward the rows once in, once out; backward grad_y once in, grad_weight once out (twice the rows that are
// named). Backward adds once per element of grad_y.
// Reached on an H200 (GB/s of those bytes, forward / backward; a copy: 4251): 16384 of 128256x4096 bf16 3687 / 2356,
// 16384 of 50257x768 bf16 2883 / 778, 16384 of 50257x768 fp16 2886 / 868, 16384 of 50257x768 fp32 3465 / 1530, 16384
// of 50257x1000 bf16 3079 / 916. Lost: in backward the sort of the indices; rows of odd size go by single elements.
#include "common/reduce.cuh"
#include "common/vec.cuh"

constexpr int kFinishColumns = 32, kFinishLanes = 8;

// Stops the program, as PyTorch's device assertion does: an index out of range is never a wild read.
__device__ __forceinline__ long long row_at(const long long* indices, long long position, long long rows) {
  const long long row = indices[position];
  if (row < 0 || row >= rows) {
    printf("cupyops: input[%lld] is %lld, expected a row of weight in [0, %lld)\n", position, row, rows);
    __trap();
  }
  return row;
}

// Grid: ceil(tokens / blockDim.y). Block: any; threadIdx.x runs along a row, of `size` elements, `stride` from one of
// weight to the next. VEC: all of them are at 16-byte boundaries.
template <typename T, bool VEC>
__global__ void embedding_fwd(const T* __restrict__ weight, const long long* __restrict__ indices, T* __restrict__ y,
                              long long tokens, long long rows, long long size, long long stride) {
  constexpr int K = VEC ? kVecWidth<T> : 1, U = VEC ? 4 : 8;
  const long long token = blockIdx.x * (long long)blockDim.y + threadIdx.y;
  if (token >= tokens) return;
  const T* from = weight + row_at(indices, token, rows) * stride;
  T* to = y + token * size;
  const long long step = blockDim.x * K;
  for (long long c = threadIdx.x * K; c < size; c += U * step) {
    Vec<T, K> held[U];
#pragma unroll
    for (int i = 0; i < U; ++i) {
      if (c + i * step < size) held[i] = load_vec<T, K>(from + c + i * step);
    }
#pragma unroll
    for (int i = 0; i < U; ++i) {
      if (c + i * step < size) store_vec<T, K>(to + c + i * step, held[i]);
    }
  }
}

// Grid: (ceil(runs / blockDim.y), ceil(vectors of a row / blockDim.x)). Block: any. Of run r, partial[2 * r] is the piece
// that goes on with a segment, partial[2 * r + 1] the one that begins a segment and does not end it.
template <typename T, bool VEC>
__global__ void embedding_bwd(const T* __restrict__ grad_y, const int* __restrict__ keys,
                              const long long* __restrict__ order, T* __restrict__ grad_weight,
                              acc_t<T>* __restrict__ partial, long long count, long long size, int run,
                              long long padding_idx, bool by_freq) {
  using A = acc_t<T>;
  constexpr int K = VEC ? kVecWidth<T> : 1, U = VEC ? 4 : 8;
  const long long r = blockIdx.x * (long long)blockDim.y + threadIdx.y, begin = r * run;
  const long long column = (blockIdx.y * (long long)blockDim.x + threadIdx.x) * K;
  if (begin >= count || column >= size) return;
  const long long end = begin + run < count ? begin + run : count;
  const bool before = begin > 0 && keys[begin - 1] == keys[begin], after = end < count && keys[end] == keys[end - 1];
  A sum[K] = {};
  int key = keys[begin];
  long long first = begin;
  auto finish = [&](long long past) {
    if (key == padding_idx) return;
    const bool head = before && first == begin, tail = after && past == end;
    if (head || tail) {
      A* to = partial + (2 * r + !head) * size + column;
#pragma unroll
      for (int k = 0; k < K; ++k) to[k] = sum[k];
      return;
    }
    const A divisor = by_freq ? A(past - first) : A(1);
    Vec<T, K> rounded;
#pragma unroll
    for (int k = 0; k < K; ++k) rounded.data[k] = from_acc<T>(sum[k] / divisor);
    store_vec<T, K>(grad_weight + key * size + column, rounded);
  };
  for (long long p = begin; p < end; p += U) {
    int found[U];
    Vec<T, K> rows[U];
#pragma unroll
    for (int i = 0; i < U; ++i) {
      if (p + i >= end) continue;
      found[i] = keys[p + i];
      if (found[i] != padding_idx) rows[i] = load_vec<T, K>(grad_y + order[p + i] * size + column);
    }
#pragma unroll
    for (int i = 0; i < U; ++i) {
      if (p + i >= end) continue;
      if (found[i] != key) {
        finish(p + i);
        key = found[i];
        first = p + i;
#pragma unroll
        for (int k = 0; k < K; ++k) sum[k] = A(0);
      }
      if (key == padding_idx) continue;
#pragma unroll
      for (int k = 0; k < K; ++k) sum[k] += to_acc(rows[i].data[k]);
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

// Grid: (runs - 1, any); the blocks of a run share its columns. Block: (kFinishColumns, kFinishLanes). Adds the pieces of
// the segment that begins in this run and does not end there, if there is one.
template <typename T>
__global__ void embedding_bwd_finish(const int* __restrict__ keys, const acc_t<T>* __restrict__ partial,
                                     T* __restrict__ grad_weight, long long count, long long size, int run,
                                     long long padding_idx, bool by_freq) {
  using A = acc_t<T>;
  __shared__ A sums[kFinishLanes][kFinishColumns];
  const long long r = blockIdx.x, begin = r * run, end = begin + run;
  const int key = keys[end - 1];
  if (keys[end] != key || key == padding_idx || (begin > 0 && keys[begin - 1] == key)) return;
  const long long past = end_of(keys, key, end, count), last = (past - 1) / run;
  long long first = begin;
  if (by_freq)
    while (keys[first] != key) ++first;
  const A divisor = by_freq ? A(past - first) : A(1);
  for (long long tile = blockIdx.y * kFinishColumns; tile < size; tile += gridDim.y * kFinishColumns) {
    const long long column = tile + threadIdx.x;
    A sum = A(0);
    if (column < size) {
#pragma unroll 4
      for (long long s = r + threadIdx.y; s <= last; s += kFinishLanes) {
        sum += partial[(2 * s + (s == r)) * size + column];
      }
    }
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y == 0 && column < size) {
#pragma unroll
      for (int lane = 1; lane < kFinishLanes; ++lane) sum += sums[lane][threadIdx.x];
      grad_weight[key * size + column] = from_acc<T>(sum / divisor);
    }
    __syncthreads();
  }
}
