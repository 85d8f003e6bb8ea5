// logp_c = x_c - max - log(sum_c exp(x_c - max))                               over the classes c of a position
// loss   = -a * logp_t - sum_c q_c * logp_c                                    0 where t is ignore_index
//   class t:         a = (1 - s) * w_t,  q_c = s / C * w_c                     s: label_smoothing, w: weight or 1
//   probabilities p: a = 0,              q_c = w_c * ((1 - s) * p_c + s / C)
// mean: sum(loss) / sum(w_t) over the positions not ignored; with probabilities sum(loss) / positions
// grad_x_c = g * ((a + sum(q)) * exp(logp_c) - q_c - a * [c == t]),  grad_p_c = -g * w_c * (1 - s) * logp_c
//
// x is (outer, C, inner); a position is an (outer, inner). Bytes per logit: forward sizeof(T), backward 2 x sizeof(T),
// and as much again for each of probabilities and their gradient; one exp and about 8 flops each time. Between the two,
// three numbers per position are kept (max, log of the sum, sum of q), never log-probabilities: max and the log apart,
// because x - max is exact where their sum would be rounded. An ignored position is not read: its gradient is 0.
//
// Reached on an H200 (bf16, GB/s of those bytes, forward / backward; a copy: 4276): 4096x32000 2836 / 3857, 4096x128256
// 3959 / 4046. Lost: a block reads 32000 classes in four rounds of loads, whose latency shows.
#include "common/losses.cuh"

// What the loss of a position is made of; the kernels are compiled for each.
enum Mode { kClass = 0, kSmoothed = 1, kProbabilities = 2 };

// The shares q_c.
template <typename T, int MODE> struct Shares {
  using A = acc_t<T>;
  const T* weight;
  A keep, spread;

  __device__ __forceinline__ Shares(const T* weight, A label_smoothing, int classes)
      : weight(weight), keep(A(1) - label_smoothing), spread(label_smoothing / A(classes)) {}

  __device__ __forceinline__ A weight_of(int c) const { return weight ? to_acc(weight[c]) : A(1); }

  __device__ __forceinline__ A share(A w, T probability) const {
    return MODE == kProbabilities ? w * (keep * to_acc(probability) + spread) : w * spread;
  }

  // q_c ... q_(c+N-1), and the weights that go with them; `probabilities` points to the first.
  template <int N> __device__ __forceinline__ void read(int c, const T* probabilities, A (&q)[N], A (&w)[N]) const {
    Vec<T, N> weights, p;
    if (weight) weights = read_vec<T, N>(weight + c);
    if (MODE == kProbabilities) p = read_vec<T, N>(probabilities);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      w[k] = weight ? to_acc(weights.data[k]) : A(1);
      q[k] = share(w[k], p.data[k]);
    }
  }
};

// The loss of a position, of which `sums` is complete; stats gets max, log of the sum and sum of q in three planes.
template <typename T, int MODE, typename A = acc_t<T>>
__device__ __forceinline__ A position_loss(const RowSums<T>& sums, A a, A picked, A shift, bool valid, A* stats,
                                           long long position, long long positions) {
  const A log_sum = log(sums.sum);
  stats[position] = valid ? sums.max : A(0);
  stats[positions + position] = valid ? log_sum : A(0);
  if (MODE != kClass) stats[2 * positions + position] = valid ? sums.share : A(0);
  A loss = MODE == kProbabilities ? A(0) : a * ((sums.max - picked) + log_sum);
  if (MODE != kClass) loss += sums.share * ((sums.max - shift) + log_sum) - sums.dot;
  return valid ? loss : A(0);
}

// The gradients at a position.
template <typename T> struct PositionGrad {
  using A = acc_t<T>;
  A max, log_sum, scale, a, total;

  __device__ __forceinline__ A logit(A x, A q, bool picked) const {
    return scale * (total * exp_for<T>((x - max) - log_sum) - q - (picked ? a : A(0)));
  }
  __device__ __forceinline__ A probability(A x, A w_keep) const { return scale * w_keep * ((max - x) + log_sum); }
};

template <typename T, int MODE, typename A = acc_t<T>>
__device__ __forceinline__ PositionGrad<T> read_grad(const Shares<T, MODE>& shares, const T* grad_y, const A* stats,
                                                     const A* total_weight, int t, long long position,
                                                     long long positions, int reduction) {
  PositionGrad<T> grad;
  grad.max = stats[position];
  grad.log_sum = stats[positions + position];
  grad.scale = loss_scale(grad_y, position, reduction, total_weight);
  grad.a = MODE == kProbabilities ? A(0) : shares.keep * shares.weight_of(t);
  grad.total = MODE == kClass ? grad.a : grad.a + stats[2 * positions + position];
  return grad;
}

// Into the threads of threadIdx.y 0: the sums of their position over all slices, in order.
template <typename T> __device__ __forceinline__ void merge_slices(RowSums<T>& sums, acc_t<T> (&slices)[4][256]) {
  if (blockDim.y == 1) return;
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
  __syncthreads();  // the slices of the tile before have been read
  slices[0][thread] = sums.max;
  slices[1][thread] = sums.sum;
  slices[2][thread] = sums.dot;
  slices[3][thread] = sums.share;
  __syncthreads();
  for (int other = thread + blockDim.x; threadIdx.y == 0 && other < 256; other += blockDim.x) {
    RowSums<T> slice;
    slice.max = slices[0][other];
    slice.sum = slices[1][other];
    slice.dot = slices[2][other];
    slice.share = slices[3][other];
    sums.merge(slice);
  }
}

// N consecutive logits of a row go into the sums of their position.
template <typename T, int MODE> struct AddToSums {
  RowSums<T>& sums;
  const Shares<T, MODE>& shares;
  const T* probabilities;
  acc_t<T> shift;

  template <int N> __device__ __forceinline__ void operator()(int c, const Vec<T, N>& x) const {
    acc_t<T> values[N], q[N], unused[N];
#pragma unroll
    for (int k = 0; k < N; ++k) values[k] = to_acc(x.data[k]);
    sums.template add<N>([&](int k) { return values[k]; });
    if (MODE == kClass) return;
    shares.read(c, probabilities + c, q, unused);
#pragma unroll
    for (int k = 0; k < N; ++k) sums.add_share(q[k], values[k], shift);
  }
};

// N consecutive gradients of a row, from its logits.
template <typename T, int MODE> struct WriteGrads {
  const PositionGrad<T>& grad;
  const Shares<T, MODE>& shares;
  const T* probabilities;
  T *grad_x, *grad_probabilities;
  int t;

  template <int N> __device__ __forceinline__ void operator()(int c, const Vec<T, N>& x) const {
    acc_t<T> q[N] = {}, w[N] = {};
    if (MODE != kClass) shares.read(c, probabilities + c, q, w);
    Vec<T, N> to_x, to_p;
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const acc_t<T> logit = to_acc(x.data[k]);
      to_x.data[k] = from_acc<T>(grad.logit(logit, q[k], MODE != kProbabilities && c + k == t));
      if (MODE == kProbabilities) to_p.data[k] = from_acc<T>(grad.probability(logit, w[k] * shares.keep));
    }
    if (MODE != kProbabilities || grad_x) write_vec<T, N>(grad_x + c, to_x);
    if (MODE == kProbabilities && grad_probabilities) write_vec<T, N>(grad_probabilities + c, to_p);
  }
};

// inner == 1. Grid: any, one dimension. Block: (32, rows) gives each row a warp, (a multiple of 32, 1) a block; blocks
// stride over the rows. Each logit is read once, 16 bytes at a time: max and sum are kept up online, in acc_t<T>.
template <typename T, int MODE>
__global__ void cross_entropy_fwd(const T* __restrict__ x, const long long* __restrict__ target,
                                  const T* __restrict__ probabilities, const T* __restrict__ weight, T* __restrict__ y,
                                  acc_t<T>* __restrict__ stats, acc_t<T>* __restrict__ parts,
                                  acc_t<T>* __restrict__ total_weight, long long rows, int classes,
                                  long long ignore_index, acc_t<T> label_smoothing, int reduction) {
  using A = acc_t<T>;
  __shared__ A shared[kWarp];
  const Shares<T, MODE> shares(weight, label_smoothing, classes);
  LossSum<A> mine;
  for (long long row = (long long)blockIdx.x * blockDim.y + threadIdx.y; row < rows;
       row += (long long)gridDim.x * blockDim.y) {
    const int t = MODE == kProbabilities ? 0 : class_at(target, row, classes, ignore_index);
    const T* logits = x + row * classes;
    RowSums<T> sums;
    A picked = A(0), shift = A(0), w = A(0);
    if (t >= 0) {
      picked = to_acc(logits[t]);
      shift = isfinite(picked) ? picked : A(0);
      w = MODE == kProbabilities ? A(1) : shares.weight_of(t);
      const AddToSums<T, MODE> add{sums, shares, probabilities + row * classes, shift};
      read_row(logits, logits, 0, classes, threadIdx.x, blockDim.x, add);
    }
    sums.template reduce<MODE != kClass>(shared);
    if (threadIdx.x != 0) continue;
    const A loss = position_loss<T, MODE>(sums, shares.keep * w, picked, shift, t >= 0, stats, row, rows);
    if (reduction == kNone) y[row] = from_acc<T>(loss);
    mine.loss += loss;
    mine.weight += w;
  }
  end_loss(mine, reduction, parts, y, total_weight);
}

// Any inner. Grid: any, one dimension. Block: (positions, slices), 256 threads in all: a position's classes are dealt
// to its slices, which are merged in shared memory; neighbouring threads read neighbouring positions. Blocks stride
// over tiles of blockDim.x positions.
template <typename T, int MODE>
__global__ void cross_entropy_fwd_inner(const T* __restrict__ x, const long long* __restrict__ target,
                                        const T* __restrict__ probabilities, const T* __restrict__ weight,
                                        T* __restrict__ y, acc_t<T>* __restrict__ stats, acc_t<T>* __restrict__ parts,
                                        acc_t<T>* __restrict__ total_weight, long long positions, int classes,
                                        long long inner, long long ignore_index, acc_t<T> label_smoothing,
                                        int reduction) {
  using A = acc_t<T>;
  constexpr int U = 8;
  __shared__ A slices[4][256];
  const Shares<T, MODE> shares(weight, label_smoothing, classes);
  LossSum<A> mine;
  for (long long tile = (long long)blockIdx.x * blockDim.x; tile < positions;
       tile += (long long)gridDim.x * blockDim.x) {
    const long long position = tile + threadIdx.x, outer = position / inner;
    const long long first = (outer * classes - outer) * inner + position;  // of class 0
    const bool inside = position < positions;
    const int t = !inside ? -1 : MODE == kProbabilities ? 0 : class_at(target, position, classes, ignore_index);
    const A picked = t < 0 ? A(0) : to_acc(x[first + t * inner]), shift = isfinite(picked) ? picked : A(0);
    RowSums<T> sums;
    for (int c = threadIdx.y * U; t >= 0 && c < classes; c += blockDim.y * U) {
      A values[U];
#pragma unroll
      for (int k = 0; k < U; ++k) values[k] = c + k < classes ? to_acc(x[first + (c + k) * inner]) : -infinity<A>();
      sums.template add<U>([&](int k) { return values[k]; });
#pragma unroll
      for (int k = 0; MODE != kClass && k < U; ++k) {
        if (c + k >= classes) break;
        const T p = MODE == kProbabilities ? probabilities[first + (c + k) * inner] : T();
        sums.add_share(shares.share(shares.weight_of(c + k), p), values[k], shift);
      }
    }
    merge_slices(sums, slices);
    if (threadIdx.y != 0 || !inside) continue;
    const A w = t < 0 ? A(0) : MODE == kProbabilities ? A(1) : shares.weight_of(t);
    const A loss = position_loss<T, MODE>(sums, shares.keep * w, picked, shift, t >= 0, stats, position, positions);
    if (reduction == kNone) y[position] = from_acc<T>(loss);
    mine.loss += loss;
    mine.weight += w;
  }
  end_loss(mine, reduction, parts, y, total_weight);
}

// Grid: 1. Block: one dimension, a multiple of 32. Adds the `count` pairs of `parts`, in the same order every time.
template <typename T>
__global__ void cross_entropy_fwd_sum(const acc_t<T>* __restrict__ parts, T* __restrict__ y,
                                      acc_t<T>* __restrict__ total_weight, int count, int reduction) {
  add_parts(parts, count, reduction, y, total_weight);
}

// inner == 1. Block: (threads of a row, rows). Grid: ceil(rows / blockDim.y) * segments, one dimension: a block owns
// ceil(classes / segments) columns of its rows. grad_x or grad_probabilities may be null. No shared memory.
template <typename T, int MODE>
__global__ void cross_entropy_bwd(const T* __restrict__ grad_y, const T* __restrict__ x,
                                  const long long* __restrict__ target, const T* __restrict__ probabilities,
                                  const T* __restrict__ weight, const acc_t<T>* __restrict__ stats,
                                  const acc_t<T>* __restrict__ total_weight, T* __restrict__ grad_x,
                                  T* __restrict__ grad_probabilities, long long rows, int classes, int segments,
                                  long long ignore_index, acc_t<T> label_smoothing, int reduction) {
  using A = acc_t<T>;
  const long long row = (long long)(blockIdx.x / segments) * blockDim.y + threadIdx.y;
  if (row >= rows) return;
  const int width = (classes + segments - 1) / segments, begin = blockIdx.x % segments * width;
  const int end = min(classes, begin + width);
  const int t = MODE == kProbabilities ? 0 : class_at(target, row, classes, ignore_index);
  const long long offset = row * classes;
  if (t < 0) return zero_row(grad_x + offset, begin, end, threadIdx.x, blockDim.x);
  const Shares<T, MODE> shares(weight, label_smoothing, classes);
  const PositionGrad<T> grad = read_grad<T, MODE>(shares, grad_y, stats, total_weight, t, row, rows, reduction);
  T* to_x = grad_x ? grad_x + offset : nullptr;
  T* to_probabilities = grad_probabilities ? grad_probabilities + offset : nullptr;
  const WriteGrads<T, MODE> write{grad, shares, probabilities + offset, to_x, to_probabilities, t};
  read_row(x + offset, to_x ? to_x : to_probabilities, begin, end, threadIdx.x, blockDim.x, write);
}

// Any inner. Block: one dimension, a thread per position. Grid: ceil(positions / blockDim.x) * chunks, one dimension: a
// thread owns ceil(classes / chunks) classes of its position. grad_x or grad_probabilities may be null. No shared
// memory.
template <typename T, int MODE>
__global__ void cross_entropy_bwd_inner(const T* __restrict__ grad_y, const T* __restrict__ x,
                                        const long long* __restrict__ target, const T* __restrict__ probabilities,
                                        const T* __restrict__ weight, const acc_t<T>* __restrict__ stats,
                                        const acc_t<T>* __restrict__ total_weight, T* __restrict__ grad_x,
                                        T* __restrict__ grad_probabilities, long long positions, int classes,
                                        long long inner, int chunks, long long ignore_index, acc_t<T> label_smoothing,
                                        int reduction) {
  using A = acc_t<T>;
  const long long position = (long long)(blockIdx.x / chunks) * blockDim.x + threadIdx.x, outer = position / inner;
  if (position >= positions) return;
  const int width = (classes + chunks - 1) / chunks, begin = blockIdx.x % chunks * width;
  const int end = min(classes, begin + width);
  const long long first = (outer * classes - outer) * inner + position;
  const int t = MODE == kProbabilities ? 0 : class_at(target, position, classes, ignore_index);
  const Shares<T, MODE> shares(weight, label_smoothing, classes);
  PositionGrad<T> grad;
  if (t >= 0) grad = read_grad<T, MODE>(shares, grad_y, stats, total_weight, t, position, positions, reduction);
#pragma unroll 4
  for (int c = begin; c < end; ++c) {
    const long long at = first + c * inner;
    if (t < 0) {
      grad_x[at] = from_acc<T>(A(0));
      continue;
    }
    const A logit = to_acc(x[at]), w = MODE == kClass ? A(0) : shares.weight_of(c);
    const T p = MODE == kProbabilities ? probabilities[at] : T();
    const A q = MODE == kClass ? A(0) : shares.share(w, p);
    const A to_x = grad.logit(logit, q, MODE != kProbabilities && c == t);
    if (MODE != kProbabilities || grad_x) grad_x[at] = from_acc<T>(to_x);
    if (MODE != kProbabilities || !grad_probabilities) continue;
    grad_probabilities[at] = from_acc<T>(grad.probability(logit, w * shares.keep));
  }
}
