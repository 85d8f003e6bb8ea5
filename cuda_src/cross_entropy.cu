// logp_c = x_c - max - log(sum_c exp(x_c - max))                               over the classes c of a position
// loss   = -a * logp_t - sum_c q_c * logp_c                                    0 where t is ignore_index
//   class t:         a = (1 - s) * w_t,  q_c = s / C * w_c                     s: label_smoothing, w: weight or 1
//   probabilities p: a = 0,              q_c = w_c * ((1 - s) * p_c + s / C)
// mean: sum(loss) / sum(w_t) over the positions not ignored; with probabilities sum(loss) / positions
// grad_x_c = g * ((a + sum(q)) * exp(logp_c) - q_c - a * [c == t]),  grad_p_c = -g * w_c * (1 - s) * logp_c
//
// x is (outer, C, inner); a position is an (outer, inner). y and grad_y are of T, or of acc_t<T> where they are `wide`. Bytes per logit: forward sizeof(T), backward 2 x sizeof(T),
// and as much again for each of probabilities and their gradient; one exp and about 8 flops each time. Forward saves for
// backward three numbers per position (max, log of the sum, sum of q), never log-probabilities: max and the log apart,
// because x - max is exact where their sum would be rounded. An ignored position is not read: its gradient is 0.
//
// Where a gradient is wanted, there is no smoothing, inner = 1, and a row fits the registers or the shared memory of a block
// or cluster, forward writes the gradient too, as for a grad_y of 1, which makes 2 x sizeof(T) in all; it reads ignored
// positions too. Backward leaves that gradient as it is where grad_y is 1, and else computes it anew.
//
// Reached on an H200 (forward and backward in all): 4096x32000 bf16 167 us, 4096x128256 bf16 567 us, 4096x32000 fp16 165
// us, 4096x50257 bf16 256 us, 65536x1000 bf16 95 us, 1048576x64 bf16 108 us; in two passes all but the last took 226,
// 805, 240, 353 and 173 us. What is lost: three rows of 64 KB on a multiprocessor, and fewer longer ones, do not suffice for
// loads, reductions and stores to overlap throughout (the memory was busy to 75% of its peak for 4096x128256, where a copy
// comes to 86%); and two more launches, of the sum and of backward, take 3 us each.
#include "loss/cross_entropy.cuh"

// cross_entropy_fwd_two_pass() for one kind of target.
template <Mode MODE, typename T>
__device__ __forceinline__ void two_pass_losses(const T* __restrict__ x, const long long* __restrict__ target,
                                                const T* __restrict__ probabilities, const T* __restrict__ weight,
                                                void* __restrict__ y, acc_t<T>* __restrict__ stats,
                                                acc_t<T>* __restrict__ partials, acc_t<T>* __restrict__ total_weight,
                                                long long rows, int classes, long long ignore_index,
                                                acc_t<T> label_smoothing, int reduction, bool wide) {
  using A = acc_t<T>;
  __shared__ A shared[kWarp];
  LossSum<A> mine;
  const LossTarget<T, MODE> of(weight, label_smoothing, classes);
  for (long long row = (long long)blockIdx.x * blockDim.y + threadIdx.y; row < rows;
       row += (long long)gridDim.x * blockDim.y) {
    const int t = of.class_of(target, row, classes, ignore_index);
    const T* logits = x + row * classes;
    RowSums<T> sums;
    A picked = A(0), shift = A(0), w = A(0);
    if (t >= 0) {
      picked = to_acc(logits[t]);
      shift = isfinite(picked) ? picked : A(0);
      w = of.counts(t);
      const AddToSums<T, MODE> add{sums, of, probabilities + row * classes, shift};
      read_row(logits, logits, 0, classes, threadIdx.x, blockDim.x, add);
    }
    sums.template reduce<MODE != kClass>(shared);
    if (threadIdx.x != 0) continue;
    const A loss = position_loss(of, sums, w, picked, shift, t >= 0, stats, row, rows);
    if (reduction == kNone) write_loss_at<T>(y, row, wide, loss);
    mine.loss += loss;
    mine.weight += w;
  }
  end_loss<T>(mine, reduction, partials, y, wide, total_weight);
}

// inner == 1; SOFT: with smoothing, or probabilities. Grid: any size, one dimension. Block: (32, rows) gives each row a
// warp, (a multiple of 32, 1) a block; blocks stride over the rows. Each logit is read once, 16 bytes at a time, and max and
// sum are computed online in acc_t<T>.
template <typename T, bool SOFT>
__global__ void cross_entropy_fwd_two_pass(const T* __restrict__ x, const long long* __restrict__ target,
                                           const T* __restrict__ probabilities, const T* __restrict__ weight,
                                           void* __restrict__ y, acc_t<T>* __restrict__ stats,
                                           acc_t<T>* __restrict__ partials, acc_t<T>* __restrict__ total_weight,
                                           long long rows, int classes, long long ignore_index,
                                           acc_t<T> label_smoothing, int reduction, bool wide) {
  if constexpr (!SOFT)
    two_pass_losses<kClass>(x, target, probabilities, weight, y, stats, partials, total_weight, rows, classes,
                            ignore_index, label_smoothing, reduction, wide);
  else if (probabilities)
    two_pass_losses<kProbabilities>(x, target, probabilities, weight, y, stats, partials, total_weight, rows, classes,
                                    ignore_index, label_smoothing, reduction, wide);
  else
    two_pass_losses<kSmoothed>(x, target, probabilities, weight, y, stats, partials, total_weight, rows, classes,
                               ignore_index, label_smoothing, reduction, wide);
}

// cross_entropy_fwd_strided() for one kind of target.
template <Mode MODE, typename T>
__device__ __forceinline__ void strided_losses(const T* __restrict__ x, const long long* __restrict__ target,
                                               const T* __restrict__ probabilities, const T* __restrict__ weight,
                                               void* __restrict__ y, acc_t<T>* __restrict__ stats,
                                               acc_t<T>* __restrict__ partials, acc_t<T>* __restrict__ total_weight,
                                               long long positions, int classes, long long inner,
                                               long long ignore_index, acc_t<T> label_smoothing, int reduction,
                                               bool wide, acc_t<T> (&slices)[4][STRIDED_THREADS]) {
  using A = acc_t<T>;
  constexpr int U = 8;
  LossSum<A> mine;
  const LossTarget<T, MODE> of(weight, label_smoothing, classes);
  for (long long tile = (long long)blockIdx.x * blockDim.x; tile < positions;
       tile += (long long)gridDim.x * blockDim.x) {
    const long long position = tile + threadIdx.x, outer = position / inner;
    const long long first = (outer * classes - outer) * inner + position;  // of class 0
    const bool inside = position < positions;
    const int t = inside ? of.class_of(target, position, classes, ignore_index) : -1;
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
        sums.add_share(of.share(of.weight_of(c + k), p), values[k], shift);
      }
    }
    merge_slices(sums, slices);
    if (threadIdx.y != 0 || !inside) continue;
    const A w = of.counts(t);
    const A loss = position_loss(of, sums, w, picked, shift, t >= 0, stats, position, positions);
    if (reduction == kNone) write_loss_at<T>(y, position, wide, loss);
    mine.loss += loss;
    mine.weight += w;
  }
  end_loss<T>(mine, reduction, partials, y, wide, total_weight);
}

// Any inner, any target: the general form. Grid: any size, one dimension. Block: (positions, slices), STRIDED_THREADS in
// all. The classes of a position are divided among its slices, which are merged in shared memory; neighbouring threads read
// neighbouring positions. Blocks stride over tiles of blockDim.x positions.
template <typename T>
__global__ void cross_entropy_fwd_strided(const T* __restrict__ x, const long long* __restrict__ target,
                                          const T* __restrict__ probabilities, const T* __restrict__ weight,
                                          void* __restrict__ y, acc_t<T>* __restrict__ stats,
                                          acc_t<T>* __restrict__ partials, acc_t<T>* __restrict__ total_weight,
                                          long long positions, int classes, long long inner, long long ignore_index,
                                          acc_t<T> label_smoothing, int reduction, bool wide) {
  __shared__ acc_t<T> slices[4][STRIDED_THREADS];
  if (probabilities)
    strided_losses<kProbabilities>(x, target, probabilities, weight, y, stats, partials, total_weight, positions,
                                   classes, inner, ignore_index, label_smoothing, reduction, wide, slices);
  else if (label_smoothing > acc_t<T>(0))
    strided_losses<kSmoothed>(x, target, probabilities, weight, y, stats, partials, total_weight, positions, classes,
                              inner, ignore_index, label_smoothing, reduction, wide, slices);
  else
    strided_losses<kClass>(x, target, probabilities, weight, y, stats, partials, total_weight, positions, classes,
                           inner, ignore_index, label_smoothing, reduction, wide, slices);
}

// For the mean where forward writes gradients. Grid: at most kWarp blocks. Block: one dimension, a multiple of 32. Each
// block writes the sum of the weights of its targets to its place in counts.
template <typename T>
__global__ void cross_entropy_fwd_weight(const long long* __restrict__ target, const T* __restrict__ weight,
                                         acc_t<T>* __restrict__ counts, long long rows, int classes,
                                         long long ignore_index) {
  constexpr int U = 8;  // targets that a thread reads before it looks at any
  LossSum<acc_t<T>> mine;
  for (long long first = global_thread(); first < rows; first += U * global_threads()) {
    long long targets[U];
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const long long row = first + u * global_threads();
      targets[u] = row < rows ? target[row] : ignore_index;
    }
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const int t = class_of(targets[u], first + u * global_threads(), classes, ignore_index);
      mine.weight += t < 0 ? acc_t<T>(0) : weight ? to_acc(weight[t]) : acc_t<T>(1);
    }
  }
  mine = block_total(mine);
  if (threadIdx.x == 0) counts[blockIdx.x] = mine.weight;
}

// inner == 1, no smoothing: the loss, and the gradient for a grad_y of 1. Grid: any size. Block: (threads of a row, rows),
// see RowThreads; each thread has K vectors of its row in registers. Each logit is read once. `counts` are the `counted`
// sums of cross_entropy_fwd_weight, for the mean alone.
template <typename T, int K>
__global__ void __launch_bounds__(1024)
    cross_entropy_fwd_registers(const T* __restrict__ x, const long long* __restrict__ target,
                                const T* __restrict__ weight, void* __restrict__ y, acc_t<T>* __restrict__ stats,
                                acc_t<T>* __restrict__ partials, acc_t<T>* __restrict__ total_weight,
                                const acc_t<T>* __restrict__ counts, T* __restrict__ grad_x, long long rows,
                                int classes, int counted, long long ignore_index, int reduction, bool wide) {
  using A = acc_t<T>;
  using Threads = RowThreads<Pair<A>, false>;
  constexpr int W = kVecWidth<T>;
  __shared__ typename Threads::Room room;
  Threads threads(room);
  const int lane = (threadIdx.y * blockDim.x + threadIdx.x) % kWarp;
  const bool vectors = all_aligned<W>(classes, x, grad_x);
  const A total = warp_reduce<Sum>(lane < counted ? counts[lane] : A(0));
  const A scale = reduction == kMean ? A(1) / total : A(1);
  const LossTarget<T, kClass> of(weight, A(0), classes);
  LossSum<A> mine;
  if (threadIdx.x == 0 && threadIdx.y == 0 && blockIdx.x == 0) mine.weight = total;
  for (long long first = blockIdx.x * (long long)blockDim.y; first < rows; first += gridDim.x * (long long)blockDim.y) {
    const long long row = first + threadIdx.y, at = row * classes;
    const bool inside = row < rows;
    Label<A> label;
    const auto find = [&]() -> Label<A> {
      const int t = inside ? class_at(target, row, classes, ignore_index) : -1;
      return {t, t < 0 ? A(0) : weight ? to_acc(weight[t]) : A(1)};
    };
    const Pair<A> found = vectors ? write_row_grads(Tile<K, W, true>::at(row, rows, classes), x + at, grad_x + at,
                                                    scale, find, label, threads)
                                  : write_row_grads(Tile<K, W, false>::at(row, rows, classes), x + at, grad_x + at,
                                                    scale, find, label, threads);
    if (threadIdx.x != 0 || !inside) continue;
    const A picked = label.t < 0 ? A(0) : to_acc(x[at + label.t]);
    RowSums<T> sums;
    sums.max = found.first;
    sums.sum = found.second;
    const A loss = position_loss(of, sums, label.a, picked, A(0), label.t >= 0, stats, row, rows);
    if (reduction == kNone) write_loss_at<T>(y, row, wide, loss);
    mine.loss += loss;
  }
  end_loss<T>(mine, reduction, partials, y, wide, total_weight);
}

// The same for longer rows. Grid, block, shared memory: see each_persistent_row(). For a mean over few rows `counted` is 0,
// and each block adds all weights itself while its first row is being copied.
template <typename T, int THREADS, int BLOCKS, int OWN>
__global__ void __launch_bounds__(THREADS, BLOCKS)
    cross_entropy_fwd_persistent(const T* __restrict__ x, const long long* __restrict__ target,
                                 const T* __restrict__ weight, void* __restrict__ y, acc_t<T>* __restrict__ stats,
                                 acc_t<T>* __restrict__ partials, acc_t<T>* __restrict__ total_weight,
                                 const acc_t<T>* __restrict__ counts, T* __restrict__ grad_x, long long rows,
                                 int classes, int vectors, int counted, long long ignore_index, int reduction,
                                 bool wide) {
  using A = acc_t<T>;
  const int lane = threadIdx.x % kWarp, blocks = cluster_blocks();
  const LossTarget<T, kClass> of(weight, A(0), classes);
  A scale = A(1);
  bool scaled = reduction != kMean;
  LossSum<A> mine;
  persistent_losses<THREADS, OWN>(
      x, target, grad_x, PersistentRows{rows, classes, classes, vectors, is_aligned16(x) && is_aligned16(grad_x)}, true,
      [&](long long row, long long given) -> Label<A> {
        const int t = class_of(given, row, classes, ignore_index);
        return {t, t < 0 ? A(0) : weight ? to_acc(weight[t]) : A(1)};
      },
      [&](long long) {
        if (scaled) return scale;
        const A total = counted ? warp_reduce<Sum>(lane < counted ? counts[lane] : A(0))
                                : weight_of_targets(target, weight, rows, classes, ignore_index);
        if (blockIdx.x == 0 && threadIdx.x == 0) mine.weight = total;
        scaled = true;
        return scale = A(1) / total;
      },
      [&](long long row, const Label<A>& label, const OnlineVectors<T>& found, A picked) {
        RowSums<T> sums;
        sums.max = found.max;
        sums.sum = found.sum;
        const A loss = position_loss(of, sums, label.a, picked, A(0), label.t >= 0, stats, row, rows);
        if (reduction == kNone) write_loss_at<T>(y, row, wide, loss);
        mine.loss += loss;
      });
  if (cluster_rank() == 0)
    end_loss<T>(mine, reduction, partials, y, wide, total_weight, blockIdx.x / blocks, gridDim.x / blocks);
}

// cross_entropy_bwd_two_pass() for one kind of target.
template <Mode MODE, typename T>
__device__ __forceinline__ void two_pass_grads(const void* __restrict__ grad_y, const T* __restrict__ x,
                                               const long long* __restrict__ target,
                                               const T* __restrict__ probabilities, const T* __restrict__ weight,
                                               const acc_t<T>* __restrict__ stats,
                                               const acc_t<T>* __restrict__ total_weight, T* __restrict__ grad_x,
                                               T* __restrict__ grad_probabilities, long long rows, int classes,
                                               int segments, long long ignore_index, acc_t<T> label_smoothing,
                                               int reduction, bool wide, bool written) {
  const int width = (classes + segments - 1) / segments;
  const long long pieces = (rows + blockDim.y - 1) / blockDim.y * segments;
  if (written && reduction != kNone && grad_at<T>(grad_y, 0, wide) == 1) return;
  const LossTarget<T, MODE> of(weight, label_smoothing, classes);
  for (long long piece = blockIdx.x; piece < pieces; piece += gridDim.x) {
    const long long row = piece / segments * blockDim.y + threadIdx.y, offset = row * classes;
    const int begin = int(piece % segments) * width, end = min(classes, begin + width);
    if (row >= rows || (written && reduction == kNone && grad_at<T>(grad_y, row, wide) == 1)) continue;
    const int t = of.class_of(target, row, classes, ignore_index);
    if (t < 0) {
      zero_row(grad_x + offset, begin, end, threadIdx.x, blockDim.x);
      continue;
    }
    const PositionGrad<T> grad = read_grad(of, grad_y, wide, stats, total_weight, t, row, rows, reduction);
    T* to_x = grad_x ? grad_x + offset : nullptr;
    T* to_probabilities = grad_probabilities ? grad_probabilities + offset : nullptr;
    const WriteGrads<T, MODE> write{grad, of, probabilities + offset, to_x, to_probabilities, t};
    read_row(x + offset, to_x ? to_x : to_probabilities, begin, end, threadIdx.x, blockDim.x, write);
  }
}

// inner == 1; SOFT as in forward. Block: (threads of a row, rows). Grid: any size, one dimension; blocks stride over
// ceil(rows / blockDim.y) * segments pieces of work: ceil(classes / segments) columns of blockDim.y rows. grad_x or
// grad_probabilities may be null. `written`: grad_x has the gradient for a grad_y of 1 already. No shared memory.
template <typename T, bool SOFT>
__global__ void cross_entropy_bwd_two_pass(const void* __restrict__ grad_y, const T* __restrict__ x,
                                           const long long* __restrict__ target, const T* __restrict__ probabilities,
                                           const T* __restrict__ weight, const acc_t<T>* __restrict__ stats,
                                           const acc_t<T>* __restrict__ total_weight, T* __restrict__ grad_x,
                                           T* __restrict__ grad_probabilities, long long rows, int classes,
                                           int segments, long long ignore_index, acc_t<T> label_smoothing,
                                           int reduction, bool wide, bool written) {
  if constexpr (!SOFT)
    two_pass_grads<kClass>(grad_y, x, target, probabilities, weight, stats, total_weight, grad_x, grad_probabilities,
                           rows, classes, segments, ignore_index, label_smoothing, reduction, wide, written);
  else if (probabilities)
    two_pass_grads<kProbabilities>(grad_y, x, target, probabilities, weight, stats, total_weight, grad_x,
                                   grad_probabilities, rows, classes, segments, ignore_index, label_smoothing,
                                   reduction, wide, written);
  else
    two_pass_grads<kSmoothed>(grad_y, x, target, probabilities, weight, stats, total_weight, grad_x, grad_probabilities,
                              rows, classes, segments, ignore_index, label_smoothing, reduction, wide, written);
}

// cross_entropy_bwd_strided() for one kind of target.
template <Mode MODE, typename T>
__device__ __forceinline__ void strided_grads(const void* __restrict__ grad_y, const T* __restrict__ x,
                                              const long long* __restrict__ target, const T* __restrict__ probabilities,
                                              const T* __restrict__ weight, const acc_t<T>* __restrict__ stats,
                                              const acc_t<T>* __restrict__ total_weight, T* __restrict__ grad_x,
                                              T* __restrict__ grad_probabilities, long long positions, int classes,
                                              long long inner, int chunks, long long ignore_index,
                                              acc_t<T> label_smoothing, int reduction, bool wide) {
  using A = acc_t<T>;
  const long long position = (long long)(blockIdx.x / chunks) * blockDim.x + threadIdx.x, outer = position / inner;
  if (position >= positions) return;
  const int width = (classes + chunks - 1) / chunks, begin = blockIdx.x % chunks * width;
  const int end = min(classes, begin + width);
  const long long first = (outer * classes - outer) * inner + position;
  const LossTarget<T, MODE> of(weight, label_smoothing, classes);
  const int t = of.class_of(target, position, classes, ignore_index);
  PositionGrad<T> grad;
  if (t >= 0) grad = read_grad(of, grad_y, wide, stats, total_weight, t, position, positions, reduction);
#pragma unroll 4
  for (int c = begin; c < end; ++c) {
    const long long at = first + c * inner;
    if (t < 0) {
      grad_x[at] = from_acc<T>(A(0));
      continue;
    }
    const A logit = to_acc(x[at]), w = MODE != kClass ? of.weight_of(c) : A(0);
    const T p = MODE == kProbabilities ? probabilities[at] : T();
    const A q = MODE != kClass ? of.share(w, p) : A(0);
    const A to_x = grad.logit(logit, q, MODE != kProbabilities && c == t);
    if (MODE != kProbabilities || grad_x) grad_x[at] = from_acc<T>(to_x);
    if (MODE == kProbabilities && grad_probabilities)
      grad_probabilities[at] = from_acc<T>(grad.probability(logit, w * of.keep));
  }
}

// Any inner, any target: the general form. Block: one dimension, a thread per position. Grid: ceil(positions / blockDim.x) *
// chunks, one dimension: a thread owns ceil(classes / chunks) classes of its position. grad_x or grad_probabilities may be
// null. No shared memory.
template <typename T>
__global__ void cross_entropy_bwd_strided(const void* __restrict__ grad_y, const T* __restrict__ x,
                                          const long long* __restrict__ target, const T* __restrict__ probabilities,
                                          const T* __restrict__ weight, const acc_t<T>* __restrict__ stats,
                                          const acc_t<T>* __restrict__ total_weight, T* __restrict__ grad_x,
                                          T* __restrict__ grad_probabilities, long long positions, int classes,
                                          long long inner, int chunks, long long ignore_index, acc_t<T> label_smoothing,
                                          int reduction, bool wide) {
  if (probabilities)
    strided_grads<kProbabilities>(grad_y, x, target, probabilities, weight, stats, total_weight, grad_x,
                                  grad_probabilities, positions, classes, inner, chunks, ignore_index, label_smoothing,
                                  reduction, wide);
  else if (label_smoothing > acc_t<T>(0))
    strided_grads<kSmoothed>(grad_y, x, target, probabilities, weight, stats, total_weight, grad_x, grad_probabilities,
                             positions, classes, inner, chunks, ignore_index, label_smoothing, reduction, wide);
  else
    strided_grads<kClass>(grad_y, x, target, probabilities, weight, stats, total_weight, grad_x, grad_probabilities,
                          positions, classes, inner, chunks, ignore_index, label_smoothing, reduction, wide);
}
