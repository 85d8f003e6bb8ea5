// What the losses over classes share: checked targets, the online log-sum-exp of a row of logits, the sum over the
// batch.
#pragma once

#include "common/reduce/online_softmax.cuh"
#include "common/hw/dependent_launch.cuh"
#include "common/reduce/warp_block.cuh"
#include "common/core/vector.cuh"

// How the loss of each position becomes the result; the numbers are those of the Python files.
enum Reduction { kNone = 0, kMean = 1, kSum = 2 };

// Stops the program, as PyTorch's device assertion does: a target out of range is never a wild read.
__device__ __forceinline__ void bad_target(long long position, long long target, int classes) {
  printf("cupyops: target[%lld] is %lld, expected ignore_index or a class in [0, %d)\n", position, target, classes);
  __trap();
}

// The class of a position whose target is t, or -1 where it is to be ignored.
__device__ __forceinline__ int class_of(long long t, long long position, int classes, long long ignore_index) {
  if (t == ignore_index) return -1;
  if (t < 0 || t >= classes) bad_target(position, t, classes);
  return int(t);
}

__device__ __forceinline__ int class_at(const long long* target, long long position, int classes,
                                        long long ignore_index) {
  return class_of(target[position], position, classes, ignore_index);
}

// --- rows of logits ---

// Of logits x, with shares q: max, sum of exp(x - max), sum of q * (x - shift), sum of q. The shift, a finite number near
// the logits, keeps sum(q * (max - x)) from being a difference of large numbers.
template <typename T> struct RowSums : Online<T> {
  using A = acc_t<T>;
  A dot = A(0), share = A(0);

  __device__ __forceinline__ void add_share(A q, A x, A shift) {
    dot += q * (x - shift);
    share += q;
  }

  __device__ __forceinline__ void merge(const RowSums& other) {
    const A top = Larger()(this->max, other.max);
    this->sum = this->sum_for(top) + other.sum_for(top);
    this->max = top;
    dot += other.dot;
    share += other.share;
  }

  // The sum of q * (max + log_sum - x), and -0 where q is zeros of both signs, as PyTorch has it. A share that is infinite,
  // with all that it is multiplied by above 0, makes that infinite too, where dot may be NaN.
  __device__ __forceinline__ A spread_loss(A log_sum, A shift) const {
    return isinf(share) ? share + A(0) * log_sum : -(dot - share * ((this->max - shift) + log_sum));
  }

  // Over the threads of a row; see row_reduce.
  template <bool SHARES> __device__ __forceinline__ void reduce(A* shared) {
    const A top = row_reduce<Larger>(this->max, shared);
    this->sum = row_reduce<Sum>(this->sum_for(top), shared);
    this->max = top;
    if (SHARES) dot = row_reduce<Sum>(dot, shared);
    if (SHARES) share = row_reduce<Sum>(share, shared);
  }
};

// N elements: one access where the address allows it.
template <typename T, int N> __device__ __forceinline__ Vec<T, N> read_vec(const T* from) {
  if (is_aligned16(from)) return load_vec<T, N>(from);
  Vec<T, N> result;
#pragma unroll
  for (int k = 0; k < N; ++k) result.data[k] = from[k];
  return result;
}

template <typename T, int N> __device__ __forceinline__ void write_vec(T* to, Vec<T, N> value) {
  if (is_aligned16(to)) return store_vec<T, N>(to, value);
#pragma unroll
  for (int k = 0; k < N; ++k) to[k] = value.data[k];
}

// Calls f(c, x) for the columns [begin, end) of a row, split among `lanes` threads: x is a Vec of kVecWidth<T> where both
// `row` and `guide` are at a 16-byte boundary, else of 1 element: at the ends, or throughout where the two never are at
// once. `guide` is the row that f stores to, if it stores; else `row` itself. Four loads are in flight per thread.
template <typename T, typename F>
__device__ __forceinline__ void read_row(const T* row, const T* guide, int begin, int end, int lane, int lanes, F f) {
  constexpr int W = kVecWidth<T>, U = 4;
  const int past = (reinterpret_cast<unsigned long long>(guide + begin) & 15) / sizeof(T);
  const int whole = begin + (W - past) % W, head = is_aligned16(row + whole) ? min(end, whole) : end;
  const int tail = head + (end - head) / W * W, step = lanes * W;
  for (int c = begin + lane; c < head; c += lanes) f(c, Vec<T, 1>{row[c]});
  long long c = head + lane * W;
  for (; c + (U - 1) * step < tail; c += U * step) {
    Vec<T, W> x[U];
#pragma unroll
    for (int u = 0; u < U; ++u) x[u] = load_vec<T, W>(row + c + u * step);
#pragma unroll
    for (int u = 0; u < U; ++u) f(int(c) + u * step, x[u]);
  }
  for (; c < tail; c += step) f(int(c), load_vec<T, W>(row + c));
  for (int c = tail + lane; c < end; c += lanes) f(c, Vec<T, 1>{row[c]});
}

// Zeros in the columns [begin, end) of a row, split among `lanes` threads.
template <typename T> __device__ __forceinline__ void zero_row(T* row, int begin, int end, int lane, int lanes) {
  constexpr int W = kVecWidth<T>;
  const int past = (reinterpret_cast<unsigned long long>(row + begin) & 15) / sizeof(T);
  const int head = min(end, begin + (W - past) % W), tail = head + (end - head) / W * W;
  Vec<T, W> zeros;
#pragma unroll
  for (int k = 0; k < W; ++k) zeros.data[k] = from_acc<T>(0);
  for (int c = begin + lane; c < head; c += lanes) row[c] = zeros.data[0];
  for (long long c = head + lane * W; c < tail; c += lanes * W) store_vec<T, W>(row + c, zeros);
  for (int c = tail + lane; c < end; c += lanes) row[c] = zeros.data[0];
}

// --- the sum over the batch: each block's part in its own place, then one block adds them in order; no atomics ---

template <typename A> struct LossSum { A loss = A(0), weight = A(0); };

// In thread 0 of the block: the sum over its threads, a multiple of 32 of them.
template <typename A> __device__ __forceinline__ LossSum<A> block_total(LossSum<A> mine) {
  __shared__ A losses[kWarp], weights[kWarp];
  const int thread = threadIdx.y * blockDim.x + threadIdx.x, warps = blockDim.x * blockDim.y / kWarp;
  mine.loss = warp_reduce<Sum>(mine.loss);
  mine.weight = warp_reduce<Sum>(mine.weight);
  if (thread % kWarp == 0) {
    losses[thread / kWarp] = mine.loss;
    weights[thread / kWarp] = mine.weight;
  }
  __syncthreads();
  if (thread >= kWarp || warps == 1) return mine;
  // as a tree again: one after the other they lose the digits of a large sum
  mine.loss = warp_reduce<Sum>(thread < warps ? losses[thread] : A(0));
  mine.weight = warp_reduce<Sum>(thread < warps ? weights[thread] : A(0));
  return mine;
}

// The result and the divisor that backward needs. No valid target at all: 0 / 0 is NaN, as in PyTorch.
template <typename T, typename A>
__device__ __forceinline__ void write_loss(LossSum<A> total, int reduction, T* y, A* total_weight) {
  *y = from_acc<T>(reduction == kMean ? total.loss / total.weight : total.loss);
  *total_weight = total.weight;
}

// Ends a kernel whose threads hold parts of the loss: `parts` gets two numbers from each of `count` blocks, this one being
// `block`; a single one writes the result.
template <typename T, typename A>
__device__ __forceinline__ void end_loss(LossSum<A> mine, int reduction, A* parts, T* y, A* total_weight,
                                         long long block, long long count) {
  if (reduction == kNone) return;
  let_next_grid_begin();
  const LossSum<A> total = block_total(mine);
  if (threadIdx.x != 0 || threadIdx.y != 0) return;
  if (count == 1) return write_loss(total, reduction, y, total_weight);
  parts[2 * block] = total.loss;
  parts[2 * block + 1] = total.weight;
}

// The same of a kernel all of whose blocks hold parts.
template <typename T, typename A>
__device__ __forceinline__ void end_loss(LossSum<A> mine, int reduction, A* parts, T* y, A* total_weight) {
  end_loss(mine, reduction, parts, y, total_weight, blockIdx.x, gridDim.x);
}

// One block adds the parts of `count` blocks, whose grid it may overlap.
template <typename T, typename A>
__device__ __forceinline__ void add_parts(const A* parts, int count, int reduction, T* y, A* total_weight) {
  LossSum<A> mine;
  parts = written_before(parts);
  for (int block = threadIdx.x; block < count; block += blockDim.x) {
    mine.loss += parts[2 * block];
    mine.weight += parts[2 * block + 1];
  }
  const LossSum<A> total = block_total(mine);
  if (threadIdx.x == 0) write_loss(total, reduction, y, total_weight);
}

// The factor of a position's gradient.
template <typename T, typename A>
__device__ __forceinline__ A loss_scale(const T* grad_y, long long position, int reduction, const A* total_weight) {
  const A grad = to_acc(grad_y[reduction == kNone ? position : 0]);
  return reduction == kMean ? grad / *total_weight : grad;
}
