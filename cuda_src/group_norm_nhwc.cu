// group_norm.cu's equations for channels that lie side by side, (n, s, c), as of channels_last: the groups of an image are some
// neighbouring columns each of its (s, c). A block has a tile of the columns and a split of the pixels of one image
// (common/tile/column_tile.cuh). A first pass leaves partial moments, or sums, of each column in each split; a second kernel
// combines those of a group; the second pass goes from the end, since what was read last is still in the cache. The parameters'
// gradients are left to group_norm_bwd_parameters.
//
// Every row of every tensor is whole vectors. Bytes per element: forward 3 x sizeof(T), backward 5 x sizeof(T), of which the
// second reading is partly from the L2 cache.
//
// Reached on an H200, us forward / backward, with 32 groups; in brackets PyTorch's and the copy to channels_last that follows:
// 32x128x64x64 fp32 64 / 99 (324 / 254), 32x256x32x32 bf16 28 / 39 (148 / 149), 32x512x8x8 fp32 18 / 20 (37 / 41, of which
// launches are most), 8x256x128x128 bf16 70 / 126 (620 / 418): 2.1 to 3.1 TB/s of these bytes, where a copy has 4.2. A training step
// of a UNet of diffusers takes 32.5 ms as a CUDA graph; in eager mode, by a profiler, its kernels take 34.3 ms instead of 42.9.
//
// Python defines COLUMN_THREADS, NHWC_BLOCKS and NHWC_BLOCKS_UNALIGNED, see column_tile.cuh, and GROUP_WARPS: warps of a block of
// the kernels between the passes, each of which has a group.
#include "common/tile/column_tile.cuh"
#include "group_norm/group_norm.cuh"

// The tile of a block, and where the tensors of its image begin.
template <typename T> struct ImageTile : ColumnTile<T, true> {
  long long image;  // elements before it

  __device__ __forceinline__ ImageTile(long long pixels, long long channels, int split)
      : ColumnTile<T, true>(pixels, channels, split), image(blockIdx.z * pixels * channels) {}

  // Calls f(e, c, row) for each of this thread's columns, which is channel c, and of group `row` of all images.
  template <typename F> __device__ __forceinline__ void each_column(int groups, int each, F f) const {
    const long long before = blockIdx.z * (long long)groups;
    this->each(groups, each, [&](int e, long long group) { f(e, this->start + this->first + e, before + group); });
  }
};

// The first pass of forward: `partials`, (images, splits, channels, 2), are mean and square of each channel. Grid: (tiles of
// columns, splits, images). Block: COLUMN_THREADS, see column_tile.cuh.
template <typename T>
__global__ void __launch_bounds__(COLUMN_THREADS, NHWC_BLOCKS)
    group_norm_fwd_nhwc_partials(const T* __restrict__ x, float* __restrict__ partials, long long pixels,
                                 long long channels) {
  constexpr int W = kVecWidth<T>;
  __shared__ Pair<float> shared[COLUMN_THREADS * W];
  const ImageTile<T> tile(pixels, channels, blockIdx.y);
  Pair<float> own[W] = {};
  column_moments(tile, x + tile.image, own);
  share_columns(tile, own, shared);
  float* at = partials + 2 * ((blockIdx.z * (long long)gridDim.y + blockIdx.y) * channels + tile.start);
  for (int i = threadIdx.y * blockDim.x + threadIdx.x; i < tile.left; i += COLUMN_THREADS) {
    const Moments<float> of = tile_moments(tile, shared, i);
    store_vec(at + 2 * i, Vec<float, 2>{of.mean, of.square});
  }
}

// mean and rstd of each group, of the partials of `splits` splits and `each` channels. Grid: ceil(rows / GROUP_WARPS). Block:
// (kWarp, GROUP_WARPS).
__global__ void __launch_bounds__(kWarp* GROUP_WARPS)
    group_norm_fwd_nhwc_finalize(const float* __restrict__ partials, Mean<float>* __restrict__ mean,
                                 float* __restrict__ rstd, long long rows, int groups, int each, long long pixels,
                                 int splits, float eps) {
  const long long row = blockIdx.x * (long long)GROUP_WARPS + threadIdx.y, image = row / groups;
  if (row >= rows) return;
  const long long channels = groups * (long long)each, first = row % groups * each;
  const int all = splits * each;
  const auto split_of = [&](int i) { return (threadIdx.x + i * kWarp) / unsigned(each); };
  const Moments<float> own = merged<float>(
      max(0, (all - int(threadIdx.x) + kWarp - 1) / kWarp),
      [&](int i) { return float(rows_of(pixels, splits, split_of(i))); },
      [&](int i) {
        const int at = threadIdx.x + i * kWarp, split = split_of(i);
        if (at >= all) return Pair<float>{};
        const Vec<float, 2> of =
            load_vec<float, 2>(partials + 2 * ((image * splits + split) * channels + first + at - split * each));
        return Pair<float>{of.data[0], of.data[1]};
      });
  const Moments<float> of = warp_merge(own);
  if (threadIdx.x > 0) return;
  mean[row] = {of.mean, 0}, rstd[row] = of.rstd(eps);
}

// The second pass of forward: y. weight and bias may be null. Grid and block: as group_norm_fwd_nhwc_partials.
template <typename T>
__global__ void __launch_bounds__(COLUMN_THREADS, NHWC_BLOCKS)
    group_norm_fwd_nhwc(const T* __restrict__ x, const T* __restrict__ weight, const T* __restrict__ bias,
                        T* __restrict__ y, const Mean<float>* __restrict__ mean, const float* __restrict__ rstd,
                        long long pixels, long long channels, int groups, int each) {
  const ImageTile<T> tile(pixels, channels, gridDim.y - 1 - blockIdx.y);
  GroupAffine<T> of[kVecWidth<T>];
  tile.each_column(groups, each, [&](int e, long long c, long long row) {
    of[e] = GroupAffine<T>(mean[row], rstd[row], parameter(weight, c, 1), parameter(bias, c, 0));
  });
  each_rows<true>(
      tile,
      [&](long long at, int present, const Pieces<T, true, 1>& pieces) {
        store_rows(tile, y + tile.image, at, present, pieces, [&](int u, int e) { return of[e](pieces.of[0][u][e]); });
      },
      x + tile.image);
}

// The first pass of backward: `sums`, (images, channels, splits, 2), are g and h of each split of a plane. Grid and block: as
// group_norm_fwd_nhwc_partials.
template <typename T>
__global__ void __launch_bounds__(COLUMN_THREADS, NHWC_BLOCKS)
    group_norm_bwd_nhwc_partials(const T* __restrict__ grad_y, const T* __restrict__ x,
                                 const Mean<float>* __restrict__ mean, const float* __restrict__ rstd,
                                 float* __restrict__ sums, long long pixels, long long channels, int groups, int each) {
  constexpr int W = kVecWidth<T>;
  __shared__ Pair<float> shared[COLUMN_THREADS * W];
  const ImageTile<T> tile(pixels, channels, blockIdx.y);
  float about[W] = {};
  tile.each_column(groups, each, [&](int e, long long, long long row) {
    about[e] = SplitMean<T>(mean[row].first, rstd[row], mean[row].second).about;
  });
  Pair<float> own[W] = {};
  column_sums(tile, grad_y + tile.image, x + tile.image, about, own, EveryGradient());
  share_columns(tile, own, shared);
  for (int i = threadIdx.y * blockDim.x + threadIdx.x; i < tile.left; i += COLUMN_THREADS) {
    const long long c = tile.start + i, row = blockIdx.z * (long long)groups + unsigned(c) / unsigned(each);
    const SplitMean<T> centre(mean[row].first, rstd[row], mean[row].second);
    const Pair<float> of = centre.about_mean(tile_sums(shared, W * blockDim.x, i));
    store_vec(sums + 2 * ((blockIdx.z * channels + c) * gridDim.y + blockIdx.y),
              Vec<float, 2>{of.first, of.second * rstd[row]});
  }
}

// c2 and c1 of each group, of the `splits` sums of each of its `each` channels. weight may be null. Grid: ceil(rows /
// GROUP_WARPS). Block: (kWarp, GROUP_WARPS).
template <typename T>
__global__ void __launch_bounds__(kWarp* GROUP_WARPS)
    group_norm_bwd_nhwc_finalize(const float* __restrict__ sums, const T* __restrict__ weight,
                                 const Mean<float>* __restrict__ mean, const float* __restrict__ rstd,
                                 Pair<float>* __restrict__ common, long long rows, int groups, int each,
                                 long long pixels, int splits) {
  const long long row = blockIdx.x * (long long)GROUP_WARPS + threadIdx.y;
  if (row >= rows) return;
  const long long first = row % groups * each;
  const int all = splits * each;
  Pair<float> total = {};
  for (int i = threadIdx.x; i < all; i += kWarp) {
    const float w = parameter(weight, first + unsigned(i) / unsigned(splits), 1);
    const Vec<float, 2> at = load_vec<float, 2>(sums + 2 * (row * all + i));
    total = total + Pair<float>{w * at.data[0], w * at.data[1]};
  }
  total = warp_reduce<Sum>(total);
  if (threadIdx.x == 0) common[row] = means(total, float(each) * float(pixels), mean[row], rstd[row]);
}

// The second pass of backward: grad_x. Grid and block: as group_norm_fwd_nhwc_partials.
template <typename T>
__global__ void __launch_bounds__(COLUMN_THREADS, NHWC_BLOCKS)
    group_norm_bwd_nhwc(const T* __restrict__ grad_y, const T* __restrict__ x, const T* __restrict__ weight,
                        const Mean<float>* __restrict__ mean, const float* __restrict__ rstd,
                        const Pair<float>* __restrict__ common, T* __restrict__ grad_x, long long pixels,
                        long long channels, int groups, int each) {
  const ImageTile<T> tile(pixels, channels, gridDim.y - 1 - blockIdx.y);
  GroupGradient<T> of[kVecWidth<T>];
  tile.each_column(groups, each, [&](int e, long long c, long long row) {
    of[e] = GroupGradient<T>(mean[row].first, rstd[row], common[row], parameter(weight, c, 1));
  });
  each_rows<true>(
      tile,
      [&](long long at, int present, const Pieces<T, true, 2>& pieces) {
        store_rows(tile, grad_x + tile.image, at, present, pieces,
                   [&](int u, int e) { return of[e](pieces.of[0][u][e], pieces.of[1][u][e]); });
      },
      grad_y + tile.image, x + tile.image);
}
