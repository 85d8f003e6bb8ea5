// What the kernels of cross_entropy.cu are made of; the equations are there.
#pragma once

#include "loss/persistent_row.cuh"

// What a target is: a class, a class with label smoothing, or probabilities. Each has code of its own.
enum Mode { kClass, kSmoothed, kProbabilities };

// The target of a position: the class counts `keep`, and each class c gets the share q_c.
template <typename T, Mode MODE> struct LossTarget {
  using A = acc_t<T>;
  const T* weight;
  A keep, spread;

  __device__ __forceinline__ LossTarget(const T* weight, A label_smoothing, int classes)
      : weight(weight), keep(A(1) - label_smoothing), spread(label_smoothing / A(classes)) {}

  static constexpr bool kOfProbabilities = MODE == kProbabilities;

  __device__ __forceinline__ A weight_of(int c) const { return weight ? to_acc(weight[c]) : A(1); }

  // The class of a position; -1 where it is ignored, and any class where there are probabilities.
  __device__ __forceinline__ int class_of(const long long* target, long long position, int classes,
                                          long long ignore_index) const {
    return kOfProbabilities ? 0 : class_at(target, position, classes, ignore_index);
  }
  // How much the loss of a position counts in the mean.
  __device__ __forceinline__ A counts(int t) const { return t < 0 ? A(0) : kOfProbabilities ? A(1) : weight_of(t); }

  __device__ __forceinline__ A share(A w, T probability) const {
    return kOfProbabilities ? w * (keep * to_acc(probability) + spread) : w * spread;
  }

  // q_c ... q_(c+N-1), and the weights that belong to them; `probabilities` points to the first.
  template <int N> __device__ __forceinline__ void read(int c, const T* probabilities, A (&q)[N], A (&w)[N]) const {
    Vec<T, N> weights, p;
    if (weight) weights = read_vec<T, N>(weight + c);
    if (kOfProbabilities) p = read_vec<T, N>(probabilities);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      w[k] = weight ? to_acc(weights.data[k]) : A(1);
      q[k] = share(w[k], p.data[k]);
    }
  }
};

// The loss of a position, of which `sums` is complete, and which counts w; stats gets max, log of the sum and, for a soft
// target, sum of q, in planes of `positions`.
template <typename T, Mode MODE, typename A = acc_t<T>>
__device__ __forceinline__ A position_loss(const LossTarget<T, MODE>& of, const RowSums<T>& sums, A w, A picked,
                                           A shift, bool valid, A* stats, long long position, long long positions) {
  const A log_sum = log(sums.sum);
  stats[position] = valid ? sums.max : A(0);
  stats[positions + position] = valid ? log_sum : A(0);
  if (MODE != kClass) stats[2 * positions + position] = valid ? sums.share : A(0);
  A loss = MODE == kProbabilities ? A(0) : of.keep * w * ((sums.max - picked) + log_sum);
  if (MODE != kClass) loss += sums.spread_loss(log_sum, shift);
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

template <typename T, Mode MODE, typename A = acc_t<T>>
__device__ __forceinline__ PositionGrad<T> read_grad(const LossTarget<T, MODE>& of, const void* grad_y, bool wide,
                                                     const A* stats, const A* total_weight, int t, long long position,
                                                     long long positions, int reduction) {
  PositionGrad<T> grad;
  grad.max = stats[position];
  grad.log_sum = stats[positions + position];
  grad.scale = loss_scale<T>(grad_y, wide, position, reduction, total_weight);
  grad.a = MODE == kProbabilities ? A(0) : of.keep * of.weight_of(t);
  grad.total = MODE != kClass ? grad.a + stats[2 * positions + position] : grad.a;
  return grad;
}

// Adds the sums of the blockDim.y slices of each position, in order, in the threads of threadIdx.y 0.
template <typename T>
__device__ __forceinline__ void merge_slices(RowSums<T>& sums, acc_t<T> (&slices)[4][STRIDED_THREADS]) {
  if (blockDim.y == 1) return;
  const int thread = threadIdx.y * blockDim.x + threadIdx.x, threads = blockDim.x * blockDim.y;
  __syncthreads();  // the slices of the tile before have been read
  slices[0][thread] = sums.max;
  slices[1][thread] = sums.sum;
  slices[2][thread] = sums.dot;
  slices[3][thread] = sums.share;
  __syncthreads();
  for (int other = thread + blockDim.x; threadIdx.y == 0 && other < threads; other += blockDim.x) {
    RowSums<T> slice;
    slice.max = slices[0][other];
    slice.sum = slices[1][other];
    slice.dot = slices[2][other];
    slice.share = slices[3][other];
    sums.merge(slice);
  }
}

// Adds N consecutive logits of a row to the sums of their position.
template <typename T, Mode MODE> struct AddToSums {
  RowSums<T>& sums;
  const LossTarget<T, MODE>& of;
  const T* probabilities;
  acc_t<T> shift;

  template <int N> __device__ __forceinline__ void operator()(int c, const Vec<T, N>& x) const {
    acc_t<T> values[N], q[N], unused[N];
#pragma unroll
    for (int k = 0; k < N; ++k) values[k] = to_acc(x.data[k]);
    sums.template add<N>([&](int k) { return values[k]; });
    if (MODE == kClass) return;
    of.read(c, probabilities + c, q, unused);
#pragma unroll
    for (int k = 0; k < N; ++k) sums.add_share(q[k], values[k], shift);
  }
};

// Writes N consecutive gradients of a row, from its logits.
template <typename T, Mode MODE> struct WriteGrads {
  const PositionGrad<T>& grad;
  const LossTarget<T, MODE>& of;
  const T* probabilities;
  T *grad_x, *grad_probabilities;
  int t;

  template <int N> __device__ __forceinline__ void operator()(int c, const Vec<T, N>& x) const {
    acc_t<T> q[N] = {}, w[N] = {};
    constexpr bool soft = MODE == kProbabilities;
    if (MODE != kClass) of.read(c, probabilities + c, q, w);
    Vec<T, N> to_x, to_p;
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const acc_t<T> logit = to_acc(x.data[k]);
      to_x.data[k] = from_acc<T>(grad.logit(logit, q[k], !soft && c + k == t));
      if (soft) to_p.data[k] = from_acc<T>(grad.probability(logit, w[k] * of.keep));
    }
    if (!soft || grad_x) write_vec<T, N>(grad_x + c, to_x);
    if (soft && grad_probabilities) write_vec<T, N>(grad_probabilities + c, to_p);
  }
};

// The sum of the weights of all targets, in every thread of the block; blockDim.x is a multiple of 32, blockDim.y 1.
template <typename T, typename A = acc_t<T>>
__device__ __forceinline__ A weight_of_targets(const long long* target, const T* weight, long long rows, int classes,
                                               long long ignore_index) {
  __shared__ A shared[kWarp];
  A sum = A(0);
  for (long long row = threadIdx.x; row < rows; row += blockDim.x) {
    const long long t = target[row];
    if (t != ignore_index && (!weight || (t >= 0 && t < classes))) sum += weight ? to_acc(weight[t]) : A(1);
  }
  return block_reduce<Sum>(sum, shared);
}

// --- loss and gradient of a row in registers ---

// As online_row(), of so few vectors, in threads of one warp, that all exponentials stay in registers.
template <typename T, int K, int W, typename Threads, typename A = acc_t<T>>
__device__ __forceinline__ Pair<A> few_exponentials(const Vector<T> (&vectors)[K], Threads& threads, A (&exps)[K][W]) {
  const A max = threads.template over_lanes<Larger>(largest(vectors));
  const Exponential<T> exp(max);
  each_element<K, W>([&](int k, int e) { exps[k][e] = exp(vectors[k][e]); });
  const A sum = reduce_elements<Sum, K, W>([&](int k, int e) { return exps[k][e]; });
  return {max, threads.template over_lanes<Sum>(sum)};
}

// Writes the gradients of a row for grad_y = 1, and returns its maximum and sum. All threads of the row take part. The loads
// of the row are under way before find() asks for its class: were the class first, each row would wait for memory twice. So
// an ignored row is read too.
template <typename T, int K, bool ALIGNED, typename Find, typename Threads, typename A = acc_t<T>>
__device__ __forceinline__ Pair<A> write_row_grads(const Tile<K, kVecWidth<T>, ALIGNED>& tile, const T* x, T* grad_x,
                                                   A scale, Find find, Label<A>& label, Threads& threads) {
  Vector<T> vectors[K];
  load_row(tile, x, from_acc<T>(-infinity<A>()), vectors);
  label = find();
  constexpr bool FEW = K == FEW_VECTORS;
  Pair<A> sums;
  A exps[K][kVecWidth<T>];
  if constexpr (FEW) sums = few_exponentials(vectors, threads, exps);
  else sums = online_row<T>(vectors, threads);
  const Exponential<T> exp(sums.first);
  const A factor = scale * label.a / sums.second;
  const bool ignored = label.t < 0;
#pragma unroll
  for (int k = 0; k < K; ++k) {
    vectors[k].fold();
    store_vector(tile, grad_x, k,
                 [&](int e) { return ignored ? A(0) : factor * (FEW ? exps[k][e] : exp(vectors[k][e])); });
  }
  // the gradient of the class itself once more, by the thread that owns it
  const int t = label.t;
  if (!ignored && t >= tile.begin && t < tile.left && (t + tile.shift) / kVecWidth<T> % blockDim.x == threadIdx.x) {
    grad_x[t] = from_acc<T>(scale * (label.a * (exp(to_acc(x[t])) / sums.second) - label.a));
  }
  return sums;
}
