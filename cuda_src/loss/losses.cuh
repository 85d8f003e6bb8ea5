// What the losses over classes share: targets that are checked, the online log-sum-exp of a row of logits, and the sum over
// the batch.
#pragma once

#include "common/reduce/online_softmax.cuh"
#include "common/hw/dependent_launch.cuh"
#include "common/reduce/warp_block.cuh"
#include "common/core/vector.cuh"

// How the losses of all positions become the result.
enum Reduction { kNone = REDUCTION_NONE, kMean = REDUCTION_MEAN, kSum = REDUCTION_SUM };

// Stops the program, as PyTorch's device assertion does: a target out of range is never a wild read.
__device__ __forceinline__ void bad_target(long long position, long long target, int classes) {
  printf("cupyops: target[%lld] is %lld, expected ignore_index or a class in [0, %d)\n", position, target, classes);
  __trap();
}

// The class of a position whose target is t; -1 where it is to be ignored.
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

// The sums over a row of logits x with shares q: max, sum of exp(x - max), sum of q * (x - shift), sum of q. The shift is a
// finite number near the logits, so that sum(q * (max - x)) is no difference of large numbers.
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

  // The sum of q * (max + log_sum - x); -0 where q is zeros of both signs, as in PyTorch. With an infinite share the result
  // is infinite, since all that it is multiplied by is above 0, where dot may be NaN.
  __device__ __forceinline__ A spread_loss(A log_sum, A shift) const {
    return isinf(share) ? share + A(0) * log_sum : -(dot - share * ((this->max - shift) + log_sum));
  }

  // The reduction over the threads of a row; see row_reduce().
  template <bool SHARES> __device__ __forceinline__ void reduce(A* shared) {
    const A top = row_reduce<Larger>(this->max, shared);
    this->sum = row_reduce<Sum>(this->sum_for(top), shared);
    this->max = top;
    if (SHARES) dot = row_reduce<Sum>(dot, shared);
    if (SHARES) share = row_reduce<Sum>(share, shared);
  }
};

// N elements, in one access where the address allows it.
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

// Calls f(c, x) for the columns [begin, end) of a row, divided among `lanes` threads. x is a Vec of kVecWidth<T> elements
// where both `row` and `guide` are at a 16-byte boundary, and of 1 element at the ends, or throughout where the two never
// are at once. `guide` is the row that f stores to, or `row` itself where it stores nothing. A thread has four loads in
// flight.
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

// Writes zeros to the columns [begin, end) of a row, divided among `lanes` threads.
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

// --- losses and their gradients: of the dtype of the logits, or `wide`, in acc_t<T> ---

template <typename T>
__device__ __forceinline__ void write_loss_at(void* y, long long at, bool wide, acc_t<T> loss) {
  if (wide) static_cast<acc_t<T>*>(y)[at] = loss;
  else static_cast<T*>(y)[at] = from_acc<T>(loss);
}

template <typename T> __device__ __forceinline__ acc_t<T> grad_at(const void* grad_y, long long at, bool wide) {
  return wide ? static_cast<const acc_t<T>*>(grad_y)[at] : to_acc(static_cast<const T*>(grad_y)[at]);
}

// --- the sum over the batch: each block writes a partial sum, and one block then adds these in order; no atomics ---

template <typename A> struct LossSum { A loss = A(0), weight = A(0); };

// The sum over the threads of a block, a multiple of 32, in its thread 0.
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
  // as a tree again: added one after the other, they would lose digits beside a large sum
  mine.loss = warp_reduce<Sum>(thread < warps ? losses[thread] : A(0));
  mine.weight = warp_reduce<Sum>(thread < warps ? weights[thread] : A(0));
  return mine;
}

// Writes the result, and the divisor that backward needs. With no valid target the mean is 0 / 0, NaN, as in PyTorch.
template <typename T, typename A>
__device__ __forceinline__ void write_loss(LossSum<A> total, int reduction, void* y, bool wide, A* total_weight) {
  write_loss_at<T>(y, 0, wide, reduction == kMean ? total.loss / total.weight : total.loss);
  *total_weight = total.weight;
}

// Ends a kernel whose threads have added losses: each of `count` blocks, of which this is number `block`, writes a pair to
// `partials`; a single one writes the result.
template <typename T, typename A>
__device__ __forceinline__ void end_loss(LossSum<A> mine, int reduction, A* partials, void* y, bool wide,
                                         A* total_weight, long long block, long long count) {
  if (reduction == kNone) return;
  let_next_grid_begin();
  const LossSum<A> total = block_total(mine);
  if (threadIdx.x != 0 || threadIdx.y != 0) return;
  if (count == 1) return write_loss<T>(total, reduction, y, wide, total_weight);
  partials[2 * block] = total.loss;
  partials[2 * block + 1] = total.weight;
}

// The same for all blocks of a grid.
template <typename T, typename A>
__device__ __forceinline__ void end_loss(LossSum<A> mine, int reduction, A* partials, void* y, bool wide,
                                         A* total_weight) {
  end_loss<T>(mine, reduction, partials, y, wide, total_weight, blockIdx.x, gridDim.x);
}

// One block adds the partials of `count` blocks, whose grid its own may overlap.
template <typename T, typename A>
__device__ __forceinline__ void add_partials(const A* partials, int count, int reduction, T* y, A* total_weight) {
  LossSum<A> mine;
  partials = written_before(partials);
  for (int block = threadIdx.x; block < count; block += blockDim.x) {
    mine.loss += partials[2 * block];
    mine.weight += partials[2 * block + 1];
  }
  const LossSum<A> total = block_total(mine);
  if (threadIdx.x == 0) write_loss<T>(total, reduction, y, false, total_weight);
}

// What a position's gradient is multiplied by.
template <typename T, typename A>
__device__ __forceinline__ A loss_scale(const void* grad_y, bool wide, long long position, int reduction,
                                        const A* total_weight) {
  const A grad = grad_at<T>(grad_y, reduction == kNone ? position : 0, wide);
  return reduction == kMean ? grad / *total_weight : grad;
}
