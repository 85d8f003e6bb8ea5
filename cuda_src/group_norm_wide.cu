// group_norm.cu's equations for groups that neither registers nor shared memory hold: the blocks that share one, a row,
// read it twice, as runs.cuh has it. A first pass leaves what each has found, the second combines that, and goes from the
// end: what was read last is still in cache. The parameters' gradients are group_norm_bwd_parameters' work.
//
// Bytes, and what was reached: see group_norm.cu.
#include "group_norm/group_norm.cuh"
#include "common/reduce/strided.cuh"

constexpr int kThreads = 256;

// The vectors of a result at these places: of(place, u) is number u.
template <typename T, int U, typename F>
__device__ __forceinline__ void put_packs(const Part<T>& part, T* to, const Place (&places)[U], F of) {
#pragma unroll
  for (int u = 0; u < U; ++u) {
    if (places[u].first == places[u].last) continue;
    part.put(to, places[u], of(InGroup{places[u].in_run, places[u].first, places[u].last}, u));
  }
}

// Three numbers of `parts`, (rows, runs.parts, 3), for each block. Grid: rows x runs.parts. Block: a multiple of 32.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    group_norm_moments(const T* __restrict__ x, acc_t<T>* __restrict__ parts, Runs runs) {
  __shared__ Pair<acc_t<T>> shared[kWarp];
  const Part<T> part(runs, runs.segment(blockIdx.x), runs.part(blockIdx.x), x);
  const auto of = block_moments(part_moments(part, Source<T>{x}), part.elements(), shared);
  if (threadIdx.x == 0) store_moments(parts + 3 * (long long)blockIdx.x, of);
}

// y, mean and rstd of the parts that group_norm_moments left. Grid and block: the same. weight and bias may be null.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    group_norm_fwd_wide(const T* __restrict__ x, const T* __restrict__ weight, const T* __restrict__ bias,
                        T* __restrict__ y, const acc_t<T>* __restrict__ parts, Mean<acc_t<T>>* __restrict__ mean,
                        acc_t<T>* __restrict__ rstd, Runs runs, Groups groups, acc_t<T> eps) {
  using A = acc_t<T>;
  __shared__ Moments<A> shared[kWarp];
  const unsigned block = gridDim.x - 1 - blockIdx.x;
  const long long row = runs.segment(block);
  const int number = runs.part(block);
  Moments<A> of = block_merge_parts(parts + 3 * row * runs.parts, int(runs.parts), shared);
  of.count = A(runs.size);
  const A r = of.rstd(eps);
  const Mean<A> mu = {of.mean, A(0)};
  if (number == 0 && threadIdx.x == 0) mean[row] = mu, rstd[row] = r;
  const T *const weights = groups.of(row, weight), *const biases = groups.of(row, bias);
  using P = Part<T>;
  const P part(runs, row, number, y);
  each_packs<true>(
      part,
      [&](const Place(&places)[P::kAtOnce], const Vector<T>(&vectors)[1][P::kAtOnce]) {
        put_packs(part, y, places, [&](const InGroup& place, int u) {
          return normalised(place, groups, vectors[0][u], weights, biases, mu, r);
        });
      },
      Source<T>{x});
}

// g and h of each part of a plane, (planes, runs.parts, 2). Grid: ceil(planes x runs.parts / blockDim.y), where several
// parts ask for a blockDim.y of 1. Block: (threads of a plane, planes): see rows.cuh.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    group_norm_bwd_sums(const T* __restrict__ grad_y, const T* __restrict__ x, const Mean<acc_t<T>>* __restrict__ mean,
                        const acc_t<T>* __restrict__ rstd, acc_t<T>* __restrict__ sums, Runs runs, long long channels,
                        long long planes) {
  using A = acc_t<T>;
  __shared__ Pair<A> shared[kWarp];
  const long long place = blockIdx.x * (long long)blockDim.y + threadIdx.y, plane = place / runs.parts;
  const bool live = plane < planes;
  Part<T> part(runs, plane, int(place % runs.parts), x);
  if (!live) part.begin = part.end = 0;
  const Mean<A> mu = live ? mean[plane / channels] : Mean<A>{};
  const Centre<T> centre(mu.first, live ? rstd[plane / channels] : A(0), mu.second);
  const Pair<A> of =
      centre.moved(row_reduce<Sum>(part_sums(part, Source<T>{grad_y}, Source<T>{x}, centre.about), shared));
  if (threadIdx.x == 0 && live) sums[2 * place] = of.first, sums[2 * place + 1] = of.second * rstd[plane / channels];
}

// grad_x of what group_norm_bwd_sums left, `count` parts for each plane. Grid and block: as group_norm_fwd_wide.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    group_norm_bwd_wide(const T* __restrict__ grad_y, const T* __restrict__ x, const T* __restrict__ weight,
                        const Mean<acc_t<T>>* __restrict__ mean, const acc_t<T>* __restrict__ rstd,
                        const acc_t<T>* __restrict__ sums, T* __restrict__ grad_x, Runs runs, Groups groups,
                        int count) {
  using A = acc_t<T>;
  __shared__ Pair<A> shared[kWarp];
  const unsigned block = gridDim.x - 1 - blockIdx.x;
  const long long row = runs.segment(block);
  const int all = int(groups.channels) * count;
  const T* const weights = groups.of(row, weight);
  Pair<A> total = {};
  for (int i = threadIdx.x; i < all; i += blockDim.x) {
    const A w = parameter(weights, i / count, 1), *at = sums + 2 * (row * all + i);
    total = total + Pair<A>{w * at[0], w * at[1]};
  }
  total = block_reduce<Sum>(total, shared);
  const Mean<A> mu = mean[row];
  const A r = rstd[row];
  const Pair<A> c = means(total, A(runs.size), mu, r);
  using P = Part<T>;
  const P part(runs, row, runs.part(block), grad_x);
  each_packs<true>(
      part,
      [&](const Place(&places)[P::kAtOnce], const Vector<T>(&vectors)[2][P::kAtOnce]) {
        put_packs(part, grad_x, places, [&](const InGroup& place, int u) {
          return gradient(place, groups, vectors[0][u], vectors[1][u], weights, mu.first, r, c);
        });
      },
      Source<T>{grad_y}, Source<T>{x});
}
