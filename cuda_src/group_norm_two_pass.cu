// group_norm.cu's equations for groups that neither registers nor shared memory hold, and for fp64. The blocks that share a
// group, a row, read it twice, as a strided segment of one run (common/reduce/strided.cuh). A first pass leaves partial
// moments, or sums. The second pass combines them, and goes from the end, since what was read last is still in the cache. The
// parameters' gradients are left to group_norm_bwd_parameters.
//
// Bytes, and what was reached: see group_norm.cu. Python defines SEGMENT_THREADS, which a block has at most.
#include "group_norm/group_norm.cuh"
#include "common/reduce/strided.cuh"

// Stores the vectors of a result at these places: of(place, u) is number u.
template <typename T, int U, typename F>
__device__ __forceinline__ void put_vectors(const Split<T>& split, T* to, const RunVector (&places)[U], F of) {
#pragma unroll
  for (int u = 0; u < U; ++u) {
    if (places[u].first == places[u].last) continue;
    split.put(to, places[u], of(GroupVector{places[u].in_run, places[u].first, places[u].last}, u));
  }
}

// Numbers that a block of the first pass of forward leaves: count, mean and square; and the rest of the mean, except for half
// types, where it does not matter.
template <typename T> constexpr int kPartial = sizeof(T) == 2 ? 3 : 4;

// The first pass of forward: `partials`, (rows, segments.splits, kPartial<T>). Grid: rows x segments.splits. Block: a multiple
// of 32.
template <typename T>
__global__ void __launch_bounds__(SEGMENT_THREADS)
    group_norm_fwd_partials(const T* __restrict__ x, acc_t<T>* __restrict__ partials, Segments segments) {
  __shared__ Pair<acc_t<T>> shared[kWarp];
  const Split<T> split(segments, segments.segment(blockIdx.x), segments.split(blockIdx.x), x);
  const auto of = block_exact_moments(split_moments(split, SegmentSource<T>{x}), split.elements(), shared);
  if (threadIdx.x > 0) return;
  acc_t<T>* const at = partials + kPartial<T> * (long long)blockIdx.x;
  store_moments(at, of.of);
  if (kPartial<T> > 3) at[3] = of.rest;
}

// The second pass of forward: y, mean and rstd. weight and bias may be null. Grid and block: as group_norm_fwd_partials.
template <typename T>
__global__ void __launch_bounds__(SEGMENT_THREADS)
    group_norm_fwd_two_pass(const T* __restrict__ x, const T* __restrict__ weight, const T* __restrict__ bias,
                            T* __restrict__ y, const acc_t<T>* __restrict__ partials, Mean<acc_t<T>>* __restrict__ mean,
                            acc_t<T>* __restrict__ rstd, Segments segments, Groups groups, acc_t<T> eps) {
  using A = acc_t<T>;
  __shared__ Moments<A> shared[kWarp];
  const unsigned block = gridDim.x - 1 - blockIdx.x;
  const long long row = segments.segment(block);
  const int number = segments.split(block);
  const A* const own = partials + kPartial<T> * row * segments.splits;
  Moments<A> of = block_merge_partials<kPartial<T>>(own, int(segments.splits), shared);
  of.count = A(segments.size);
  const A r = of.rstd(eps);
  // a group that several blocks share is so long that the rest of its mean does not matter
  const Mean<A> mu = {of.mean, kPartial<T> > 3 && segments.splits == 1 ? own[3] : A(0)};
  if (number == 0 && threadIdx.x == 0) mean[row] = mu, rstd[row] = r;
  const T *const weights = groups.of(row, weight), *const biases = groups.of(row, bias);
  using P = Split<T>;
  const P split(segments, row, number, y);
  each_vectors<true>(
      split,
      [&](const RunVector(&places)[P::kUnroll], const Vector<T>(&vectors)[1][P::kUnroll]) {
        put_vectors(split, y, places, [&](const GroupVector& place, int u) {
          return normalised(place, groups, vectors[0][u], weights, biases, mu, r);
        });
      },
      SegmentSource<T>{x});
}

// The first pass of backward: `sums`, (planes, segments.splits, 2), are g and h of each split of a plane. Grid:
// ceil(planes x segments.splits / blockDim.y). Block: (threads of a plane, planes), with several splits one plane: see
// common/tile/row_tile.cuh.
template <typename T>
__global__ void __launch_bounds__(SEGMENT_THREADS)
    group_norm_bwd_partials(const T* __restrict__ grad_y, const T* __restrict__ x,
                            const Mean<acc_t<T>>* __restrict__ mean, const acc_t<T>* __restrict__ rstd,
                            acc_t<T>* __restrict__ sums, Segments segments, long long channels, long long planes) {
  using A = acc_t<T>;
  __shared__ Pair<A> shared[kWarp];
  const long long place = blockIdx.x * (long long)blockDim.y + threadIdx.y, plane = place / segments.splits;
  const bool live = plane < planes;
  Split<T> split(segments, plane, int(place % segments.splits), x);
  if (!live) split.begin = split.end = 0;
  const Mean<A> mu = live ? mean[plane / channels] : Mean<A>{};
  const SplitMean<T> centre(mu.first, live ? rstd[plane / channels] : A(0), mu.second);
  const Pair<A> of = centre.about_mean(
      row_reduce<Sum>(split_sums(split, SegmentSource<T>{grad_y}, SegmentSource<T>{x}, centre.about), shared));
  if (threadIdx.x == 0 && live) sums[2 * place] = of.first, sums[2 * place + 1] = of.second * rstd[plane / channels];
}

// The second pass of backward: grad_x, of the `count` sums of each plane. Grid and block: as group_norm_fwd_partials.
template <typename T>
__global__ void __launch_bounds__(SEGMENT_THREADS)
    group_norm_bwd_two_pass(const T* __restrict__ grad_y, const T* __restrict__ x, const T* __restrict__ weight,
                            const Mean<acc_t<T>>* __restrict__ mean, const acc_t<T>* __restrict__ rstd,
                            const acc_t<T>* __restrict__ sums, T* __restrict__ grad_x, Segments segments, Groups groups,
                            int count) {
  using A = acc_t<T>;
  __shared__ Pair<A> shared[kWarp];
  const unsigned block = gridDim.x - 1 - blockIdx.x;
  const long long row = segments.segment(block);
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
  const Pair<A> c = means(total, A(segments.size), mu, r);
  using P = Split<T>;
  const P split(segments, row, segments.split(block), grad_x);
  each_vectors<true>(
      split,
      [&](const RunVector(&places)[P::kUnroll], const Vector<T>(&vectors)[2][P::kUnroll]) {
        put_vectors(split, grad_x, places, [&](const GroupVector& place, int u) {
          return gradient(place, groups, vectors[0][u], vectors[1][u], weights, mu.first, r, c);
        });
      },
      SegmentSource<T>{grad_y}, SegmentSource<T>{x});
}
