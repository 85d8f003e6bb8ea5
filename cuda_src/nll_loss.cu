// loss_i = -w[t_i] * x[i, t_i]          0 where t_i is ignore_index; w is 1 where there is no weight
// mean: sum(loss_i) / sum(w[t_i])       over the positions that are not ignored
// grad_x[i, t_i] = -w[t_i] * g_i, 0 elsewhere;  g_i = grad_y_i (none), grad_y (sum), grad_y / sum(w[t_i]) (mean)
//
// x is (outer, classes, inner): a position i is an (outer, inner). Forward reads one element of x per position;
// backward writes outer * classes * inner elements, nearly all of them zeros. A flop or two each.
//
// Bytes: sizeof(T) per element of x, written by backward. Reached on an H200 (us, both; in brackets, written at 4250 GB/s):
// 4096x32000 bf16 68 (62), fp32 123 (123). What is lost is forward: a launch of 4 us, of which
// the overlap hides one.
#include "loss/losses.cuh"

// Where class t of a position lies in x.
__device__ __forceinline__ long long element_of(long long position, int t, int classes, long long inner) {
  if (inner == 1) return position * classes + t;
  const long long outer = position / inner;
  return (outer * classes + t) * inner + (position - outer * inner);
}

// Grid: any size, one dimension. Block: one dimension, a multiple of 32. Threads stride over the positions and add their
// losses in acc_t<T>. A block writes its sum to `partials`, and a single block to y and total_weight. Without a reduction
// only y[position] is written.
template <typename T>
__global__ void nll_loss_fwd(const T* __restrict__ x, const long long* __restrict__ target,
                             const T* __restrict__ weight, T* __restrict__ y, acc_t<T>* __restrict__ partials,
                             acc_t<T>* __restrict__ total_weight, long long positions, int classes, long long inner,
                             long long ignore_index, int reduction) {
  using A = acc_t<T>;
  LossSum<A> mine;
  for (long long i = global_thread(); i < positions; i += global_threads()) {
    const int t = class_at(target, i, classes, ignore_index);
    const A w = t < 0 ? A(0) : weight ? to_acc(weight[t]) : A(1);
    const A loss = t < 0 ? A(0) : -w * to_acc(x[element_of(i, t, classes, inner)]);
    if (reduction == kNone) y[i] = from_acc<T>(loss);
    mine.loss += loss;
    mine.weight += w;
  }
  end_loss<T>(mine, reduction, partials, y, false, total_weight);
}

// The gradient at the target of a position, whose class is t.
template <typename T>
__device__ __forceinline__ T gradient_at(const T* grad_y, const T* weight, const acc_t<T>* total_weight,
                                         long long position, int t, int reduction) {
  const acc_t<T> w = weight ? to_acc(weight[t]) : acc_t<T>(1);
  return from_acc<T>(-w * loss_scale<T>(grad_y, false, position, reduction, total_weight));
}

// Grid, block: any size, one dimension. Threads stride over the positions, and write the element of each one's target.
// grad_x is all zeros before.
template <typename T>
__global__ void nll_loss_bwd_strided(const T* __restrict__ grad_y, const long long* __restrict__ target,
                                     const T* __restrict__ weight, const acc_t<T>* __restrict__ total_weight,
                                     T* __restrict__ grad_x, long long positions, int classes, long long inner,
                                     long long ignore_index, int reduction) {
  for (long long i = global_thread(); i < positions; i += global_threads()) {
    const int t = class_at(target, i, classes, ignore_index);
    if (t < 0) continue;
    grad_x[element_of(i, t, classes, inner)] = gradient_at(grad_y, weight, total_weight, i, t, reduction);
  }
}

// The same with the zeros, for rows of classes that lie side by side. Grid: ceil(n / (blockDim.x * ZERO_VECTORS *
// kVecWidth<T>)) for the n elements of grad_x. Block: any size, one dimension. A block owns as many neighbouring vectors as
// its threads have, ZERO_VECTORS each, whatever rows they belong to. It writes zeros to them, and then those of the targets
// that are among them.
template <typename T>
__global__ void nll_loss_bwd_rows(const T* __restrict__ grad_y, const long long* __restrict__ target,
                                  const T* __restrict__ weight, const acc_t<T>* __restrict__ total_weight, T* grad_x,
                                  long long positions, int classes, long long ignore_index, int reduction) {
  constexpr int W = kVecWidth<T>;
  const long long each = blockDim.x * (ZERO_VECTORS * W), begin = blockIdx.x * each,
                  end = min(begin + each, positions * classes);
#pragma unroll
  for (int k = 0; k < ZERO_VECTORS; ++k) {
    const long long at = begin + (k * blockDim.x + threadIdx.x) * W;
    if (is_aligned16(grad_x) && at + W <= end) {
      store_vec(grad_x + at, Vec<T, W>{});
    } else {
#pragma unroll 1
      for (long long i = at; i < min(at + W, end); ++i) grad_x[i] = from_acc<T>(0);
    }
  }
  __syncthreads();
  for (long long i = begin / classes + threadIdx.x; i * classes < end; i += blockDim.x) {
    const int t = class_at(target, i, classes, ignore_index);
    const long long at = i * classes + t;
    if (t >= 0 && begin <= at && at < end) {
      grad_x[at] = gradient_at(grad_y, weight, total_weight, i, t, reduction);
    }
  }
}
