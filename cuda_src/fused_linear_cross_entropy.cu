// z_nc = sum_k x_nk W_ck + b_c                   the logits, of which only a part is in memory at a time
// loss_n = -a logp_nt - sum_c q_c logp_nc        logp_nc = z_nc - max_n - log(sum_c exp(z_nc - max_n)), t = target_n
//   a = (1 - s) w_t,  q_c = s / C w_c            s: label_smoothing, w: class_weight or 1; 0 where t is ignore_index
// d_nc = g_n ((a + sum(q)) exp(logp_nc) - q_c - a [c == t])    the gradient of the logits, in the place of the logits
// grad_x = d W,  grad_W = d^T x,  grad_b_c = sum_n d_nc
//
// The products are PyTorch's own GEMMs, of cuBLAS; the kernels here do what lies between. Bytes per logit: twice
// sizeof(T) where shared memory or a cache keeps a row, three times where it is too long for both (read, read again,
// written); twice in linear_cross_entropy_tile and in linear_cross_entropy_keep.
//
// Reached on an H200 (TFLOP/s of three products, forward and backward): 8192x4096x128256 bf16 637, 4096x4096x32000 bf16
// 763, 8192x2048x50257 bf16 684, 2048x1000x32000 fp16 560, fp32 48. What is lost: each chunk of rows that is added to the
// weight's gradient reads and writes that once more; and where 240 MiB do not hold the logits of the rows that are left,
// these are computed twice.
//
// At 8192x4096x128256 bf16 cuBLAS's three products of all rows, 4.2 GB of logits and gradients, take 32.9 ms on an H100; those of
// chunks 34.2, of which the four that are added lose 1.0. The kernels between take 1.6 in `persistent` and 1.5 in `keep` and
// `tile`. Logits and the input's gradient take cuBLAS 2.66 us of a row in chunks of 960 rows, 2.64 of 1024, 2.79 of 512, and 3.0
// of 896. Copy engines in the place of `keep` and `tile`, beside products, gain nothing: 63 copies of 960 x 4 KB run at 477 GB/s,
// and hold a product up by a third of their time.
#include "common/core/vector.cuh"
#include "loss/persistent_row.cuh"

// What a row's gradients are made of.
template <typename T> struct RowGrad {
  using A = acc_t<T>;
  const A* class_weight;
  A spread, max, log_sum, scale, a, total;
  int t;

  // Of the logits x of N classes from c on.
  template <int N> __device__ __forceinline__ Vec<T, N> operator()(int c, const Vec<T, N>& x) const {
    Vec<T, N> grad;
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const A p = exp_for<T>((to_acc(x.data[k]) - max) - log_sum);
      const A w = spread != A(0) && class_weight ? class_weight[c + k] : A(1);
      grad.data[k] = from_acc<T>(scale * (total * p - spread * w - (c + k == t ? a : A(0))));
    }
    return grad;
  }
};

// The options of the loss, alike in every kernel; loss/linear.py packs them.
struct Options {
  long long ignore_index;
  double label_smoothing;
  int classes;
  int scale_step;  // from one row's factor to the next; 0: one for all of them
};

template <typename T, typename A = acc_t<T>>
__device__ __forceinline__ RowGrad<T> row_grad(const A* class_weight, const A* scale, const A* stats,
                                               long long position, long long positions, int t, const Options& options) {
  const A s = A(options.label_smoothing), a = (A(1) - s) * (class_weight ? class_weight[t] : A(1));
  const A g = scale ? scale[position * options.scale_step] : A(1);
  return {class_weight,
          s / A(options.classes),
          stats[position],
          stats[positions + position],
          g,
          a,
          a + stats[2 * positions + position],
          t};
}

// Replaces N consecutive logits by their gradients; `begin` is the class of the row's first.
template <typename T> struct Replace {
  const RowGrad<T>& grad;
  T* row;
  int begin;

  template <int N> __device__ __forceinline__ void operator()(int c, const Vec<T, N>& x) const {
    store_vec<T, N>(row + c, grad(begin + c, x));
  }
};

// Adds N consecutive logits of a row to its sums.
template <typename T> struct AddSmoothed {
  using A = acc_t<T>;
  RowSums<T>& sums;
  const A* class_weight;
  A spread, shift;

  template <int N> __device__ __forceinline__ void operator()(int c, const Vec<T, N>& x) const {
    A values[N];
#pragma unroll
    for (int k = 0; k < N; ++k) values[k] = to_acc(x.data[k]);
    sums.template add<N>([&](int k) { return values[k]; });
    if (spread == A(0)) return;
#pragma unroll
    for (int k = 0; k < N; ++k) sums.add_share(spread * (class_weight ? class_weight[c + k] : A(1)), values[k], shift);
  }
};

// Grid: a block for each row of a chunk of logits, which lie `stride` apart; block: one dimension, a multiple of 32. The
// chunk's first row belongs to position `first`. Writes the row's loss and stats (max, log of the sum, sum of q, in planes
// of `positions`), and with `gradients` the gradients in the place of the logits, which are read a second time for that.
template <typename T>
__global__ void __launch_bounds__(1024)
    linear_cross_entropy_two_pass(T* logits, const long long* __restrict__ target,
                                  const acc_t<T>* __restrict__ class_weight, const acc_t<T>* __restrict__ scale,
                                  acc_t<T>* __restrict__ losses, acc_t<T>* stats, long long first, long long positions,
                                  long long stride, const __grid_constant__ Options options, int gradients) {
  using A = acc_t<T>;
  __shared__ A shared[kWarp];
  const long long position = first + blockIdx.x;
  const int classes = options.classes, t = class_at(target, position, classes, options.ignore_index);
  T* row = logits + blockIdx.x * stride;
  if (t < 0) {
    if (threadIdx.x == 0) losses[position] = stats[position] = stats[positions + position] = A(0);
    if (threadIdx.x == 0) stats[2 * positions + position] = A(0);
    if (gradients) zero_row(row, 0, classes, threadIdx.x, blockDim.x);
    return;
  }
  const A spread = A(options.label_smoothing) / A(classes), picked = to_acc(row[t]);
  const A shift = isfinite(picked) ? picked : A(0);
  RowSums<T> sums;
  const AddSmoothed<T> add{sums, class_weight, spread, shift};
  read_row(row, row, 0, classes, threadIdx.x, blockDim.x, add);
  sums.template reduce<true>(shared);
  const A log_sum = log(sums.sum);
  if (threadIdx.x == 0) {
    stats[position] = sums.max;
    stats[positions + position] = log_sum;
    stats[2 * positions + position] = sums.share;
  }
  __syncthreads();
  const RowGrad<T> grad = row_grad<T>(class_weight, scale, stats, position, positions, t, options);
  if (threadIdx.x == 0) {
    const A loss = grad.a * ((sums.max - picked) + log_sum);
    losses[position] = spread == A(0) ? loss : loss + sums.spread_loss(log_sum, shift);
  }
  if (gradients) read_row(row, row, 0, classes, threadIdx.x, blockDim.x, Replace<T>{grad, row, 0});
}

// The same for `rows` rows without label smoothing, whose logits are read once. Grid, block, shared memory: see
// each_persistent_row().
template <typename T, int THREADS, int BLOCKS, int OWN>
__global__ void __launch_bounds__(THREADS, BLOCKS)
    linear_cross_entropy_persistent(T* logits, const long long* __restrict__ target,
                                    const acc_t<T>* __restrict__ class_weight, const acc_t<T>* __restrict__ scale,
                                    acc_t<T>* __restrict__ losses, acc_t<T>* __restrict__ stats, long long first,
                                    long long positions, long long stride, long long rows, int vectors,
                                    const __grid_constant__ Options options, int gradients) {
  using A = acc_t<T>;
  persistent_losses<THREADS, OWN>(
      logits, target + first, logits, PersistentRows{rows, options.classes, stride, vectors, is_aligned16(logits)},
      gradients,
      [&](long long row, long long given) -> Label<A> {
        const int t = class_of(given, first + row, options.classes, options.ignore_index);
        return {t, t < 0 ? A(0) : class_weight ? class_weight[t] : A(1)};
      },
      [&](long long row) { return scale ? scale[(first + row) * options.scale_step] : A(1); },
      [&](long long row, const Label<A>& label, const OnlineVectors<T>& sums, A picked) {
        const long long position = first + row;
        const A log_sum = log(sums.sum);
        losses[position] = label.t < 0 ? A(0) : label.a * ((sums.max - picked) + log_sum);
        stats[position] = label.t < 0 ? A(0) : sums.max;
        stats[positions + position] = label.t < 0 ? A(0) : log_sum;
        stats[2 * positions + position] = A(0);
      });
}

// What is known of a part of a row.
struct RowPart : Online<float> {
  float total = 0;

  __device__ __forceinline__ void merge(float2 other, float other_total) {
    const float top = Larger()(max, other.x);
    sum = sum_for(top) + Online<float>{other.x, other.y}.sum_for(top);
    max = top, total += other_total;
  }
};

// Grid: ceil(rows / 32). Block: (32, 8): eight threads share a row's tiles, in turn. The losses of `rows` rows, of which the
// first belongs to position `first`, from what linear_cross_entropy_wgmma() leaves of their tiles.
__global__ void linear_cross_entropy_parts(const long long* __restrict__ target, const float* __restrict__ class_weight,
                                           const float2* __restrict__ sums, const float* __restrict__ totals,
                                           const float* __restrict__ picked, float* __restrict__ losses,
                                           long long first, int rows, int tiles,
                                           const __grid_constant__ Options options) {
  __shared__ float2 shared_sums[8][kWarp];
  __shared__ float shared_totals[8][kWarp];
  const int row = blockIdx.x * kWarp + threadIdx.x;
  RowPart part;
  for (long long tile = threadIdx.y; tile < tiles && row < rows; tile += 8) {
    part.merge(sums[tile * rows + row], totals ? totals[tile * rows + row] : 0.f);
  }
  shared_sums[threadIdx.y][threadIdx.x] = {part.max, part.sum};
  shared_totals[threadIdx.y][threadIdx.x] = part.total;
  __syncthreads();
  if (threadIdx.y != 0 || row >= rows) return;
  for (int i = 1; i < 8; ++i) part.merge(shared_sums[i][threadIdx.x], shared_totals[i][threadIdx.x]);
  const int t = class_at(target, first + row, options.classes, options.ignore_index);
  if (t < 0) {
    losses[first + row] = 0;
    return;
  }
  const float smoothing = options.label_smoothing, log_sum = log(part.sum);
  const float a = (1 - smoothing) * (class_weight ? class_weight[t] : 1.f);
  const float loss = a * ((part.max - picked[row]) + log_sum);
  losses[first + row] =
      smoothing == 0 ? loss : loss + smoothing * ((part.max - part.total / options.classes) + log_sum);
}

// Copies N consecutive numbers to another row.
template <typename T> struct Copy {
  T* to;
  template <int N> __device__ __forceinline__ void operator()(int c, const Vec<T, N>& x) const {
    write_vec<T, N>(to + c, x);
  }
};

// Grid: a block for each row of a chunk, whose first is number `first` of `rows`; block: one dimension. Deals the
// gradients of its logits to tiles of so many classes: tile i is [rows x its classes], from weight `i * tile` of
// grad_weight on.
template <typename T>
__global__ void linear_cross_entropy_keep(const T* __restrict__ d, T* __restrict__ grad_weight, long long first,
                                          long long rows, int classes, int tile, long long features, long long stride) {
  const T* row = d + blockIdx.x * stride;
  for (int begin = 0; begin < classes; begin += tile) {
    const int count = min(tile, classes - begin);
    T* to = grad_weight + begin * features + (first + blockIdx.x) * count;
    read_row(row + begin, to, 0, count, threadIdx.x, blockDim.x, Copy<T>{to});
  }
}

// Grid: a block for each row of a tile: `count` classes from `begin` on, rows `stride` apart. Block: one dimension. What is
// in the tile's row becomes the logits' gradients: of the first rows a copy of `kept`, whose rows are `count` apart; from
// row `first` on one of `stored`, rows `stored_stride` apart; from row `again` on its own logits are replaced.
template <typename T>
__global__ void linear_cross_entropy_tile(T* logits, const T* __restrict__ kept, const T* __restrict__ stored,
                                          const long long* __restrict__ target,
                                          const acc_t<T>* __restrict__ class_weight, const acc_t<T>* __restrict__ scale,
                                          const acc_t<T>* __restrict__ stats, long long first, long long again,
                                          long long positions, int begin, int count, long long stride,
                                          long long stored_stride, const __grid_constant__ Options options) {
  const long long position = blockIdx.x;
  T* row = logits + position * stride;
  if (position < again) {
    const T* from = position < first ? kept + position * count : stored + (position - first) * stored_stride;
    return read_row(from, row, 0, count, threadIdx.x, blockDim.x, Copy<T>{row});
  }
  const int t = class_at(target, position, options.classes, options.ignore_index);
  if (t < 0) return zero_row(row, 0, count, threadIdx.x, blockDim.x);
  const RowGrad<T> grad = row_grad<T>(class_weight, scale, stats, position, positions, t, options);
  read_row(row, row, 0, count, threadIdx.x, blockDim.x, Replace<T>{grad, row, begin});
}

// Grid: 1. Block: one dimension, a multiple of 32. The sum of the weights of the targets that are not ignored, then what
// each row's gradient is multiplied by for their mean: `unit` over that sum.
template <typename T>
__global__ void linear_cross_entropy_weights(const long long* __restrict__ target,
                                             const acc_t<T>* __restrict__ class_weight, acc_t<T>* __restrict__ total,
                                             long long positions, const __grid_constant__ Options options,
                                             acc_t<T> unit) {
  using A = acc_t<T>;
  __shared__ A shared[kWarp];
  A sum = A(0);
  for (long long i = threadIdx.x; i < positions; i += blockDim.x) {
    const int t = class_at(target, i, options.classes, options.ignore_index);
    if (t >= 0) sum += class_weight ? class_weight[t] : A(1);
  }
  sum = block_reduce<Sum>(sum, shared);
  if (threadIdx.x != 0) return;
  total[0] = sum;
  total[1] = unit / sum;
}

// Grid: 1. Block: one dimension, a multiple of 32. The sum of the losses, or their mean where a `total` is given. No
// target at all: 0 / 0 is NaN, as in PyTorch.
template <typename T>
__global__ void linear_cross_entropy_sum(const acc_t<T>* __restrict__ losses, const acc_t<T>* __restrict__ total,
                                         T* __restrict__ y, long long positions) {
  using A = acc_t<T>;
  __shared__ A shared[kWarp];
  A sum = A(0);
  for (long long i = threadIdx.x; i < positions; i += blockDim.x) sum += losses[i];
  sum = block_reduce<Sum>(sum, shared);
  if (threadIdx.x == 0) *y = from_acc<T>(total ? sum / *total : sum);
}

// Grid: ceil(columns / 32). Block: (32, 8). grad_bias[c] += factor * the sum of column c of d, whose rows lie `stride`
// apart. Eight threads to a column; their sums are added in order.
template <typename T>
__global__ void linear_cross_entropy_bias(const T* __restrict__ d, acc_t<T>* __restrict__ grad_bias, long long rows,
                                          int columns, long long stride, acc_t<T> factor) {
  using A = acc_t<T>;
  __shared__ A sums[8][kWarp];
  const int c = blockIdx.x * kWarp + threadIdx.x;
  A sum = A(0);
#pragma unroll 8
  for (long long row = threadIdx.y; row < rows; row += 8) sum += c < columns ? to_acc(d[row * stride + c]) : A(0);
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || c >= columns) return;
  for (int other = 1; other < 8; ++other) sum += sums[other][threadIdx.x];
  grad_bias[c] += factor * sum;
}

// Block: one dimension; threads stride over vectors, so that a small grid ends at once where nothing is to be done.
// y = grad_y factor x, where y may be x.
template <typename T>
__global__ void linear_cross_entropy_scale(const T* x, T* y, const acc_t<T>* __restrict__ grad_y, acc_t<T> factor,
                                           long long n) {
  using A = acc_t<T>;
  constexpr int W = kVecWidth<T>;
  const A by = *grad_y * factor;
  if (x == y && by == A(1)) return;
  for (long long at = global_thread() * W; at < n; at += global_threads() * W) {
    if (at + W <= n) {
      Vec<T, W> some = read_vec<T, W>(x + at);
#pragma unroll
      for (int k = 0; k < W; ++k) some.data[k] = from_acc<T>(by * to_acc(some.data[k]));
      write_vec<T, W>(y + at, some);
    } else {
      for (long long i = at; i < n; ++i) y[i] = from_acc<T>(by * to_acc(x[i]));
    }
  }
}
