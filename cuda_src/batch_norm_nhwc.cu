// batch_norm.cu's equations for channels that lie side by side: rows of channels, (m, c), as of channels_last and of matrices;
// and small planes, (n, c s), of which a channel has the `pixels` columns one after the other. A block has a tile of the
// columns (common/tile/column_tile.cuh). Where k rows together are whole vectors and one row is not, they are read as one row,
// (m / k, k c), of which a channel has k columns. The ways to compute it:
//
//     nhwc_cluster     the blocks of a cluster share a tile of columns. It is read from memory once, and the second time from
//                      the L2 cache.
//     nhwc_two_pass    a first pass leaves partial moments, or sums, of each split of the rows. batch_norm_fwd_nhwc_finalize,
//                      or batch_norm_bwd_finalize, combines them once for all blocks of the second pass, which goes from
//                      the end.
//     nhwc_inline      backward of few partials: each block of the second pass combines those that it needs.
//
// With ALIGNED every row of every tensor is whole vectors. Bytes, and what was reached: see batch_norm.cu.
#include "batch_norm/nhwc_kernels.cuh"

// The first pass of training: `partials`, (splits, size, 2), are mean and square of each column in each split of the rows.
// Grid: (tiles of columns, splits). Block: COLUMN_THREADS, see column_tile.cuh.
template <typename T, bool ALIGNED>
__global__ void __launch_bounds__(COLUMN_THREADS, kColumnBlocks<ALIGNED>)
    batch_norm_fwd_nhwc_partials(const T* __restrict__ x, acc_t<T>* __restrict__ partials, long long rows,
                                 long long size) {
  using A = acc_t<T>;
  constexpr int W = ColumnTile<T, ALIGNED>::W;
  __shared__ Pair<A> shared[COLUMN_THREADS * W];
  const ColumnTile<T, ALIGNED> tile(rows, size, blockIdx.y);
  Pair<A> own[W] = {};
  column_moments(tile, x, own);
  share_columns(tile, own, shared);
  A* at = partials + 2 * (blockIdx.y * size + tile.start);
  for (int i = threadIdx.y * blockDim.x + threadIdx.x; i < tile.left; i += COLUMN_THREADS) {
    const Moments<A> of = tile_moments(tile, shared, i);
    at[2 * i] = of.mean, at[2 * i + 1] = of.square;
  }
}

// mean, rstd and the running statistics, which may be null, of the partials of `count` splits of rows, each of which is
// `folds` x channels x pixels. `given`: how many numbers each partial is of, where the splits are another kernel's; else null.
// Grid: ceil(channels / FINALIZE_CHANNELS). Block: (FINALIZE_CHANNELS, FINALIZE_THREADS).
template <typename T>
__global__ void __launch_bounds__(FINALIZE_CHANNELS* FINALIZE_THREADS)
    batch_norm_fwd_nhwc_finalize(const acc_t<T>* __restrict__ partials, const acc_t<T>* __restrict__ given,
                                 acc_t<T>* __restrict__ mean, acc_t<T>* __restrict__ rstd, void* running_mean,
                                 void* running_var, long long rows, long long channels, int pixels, int folds,
                                 int count, int wide, acc_t<T> momentum, acc_t<T> eps) {
  using A = acc_t<T>;
  constexpr int kUnroll = 8;  // partials that a thread loads before it waits
  const long long c = blockIdx.x * (long long)FINALIZE_CHANNELS + threadIdx.x;
  const int all = count * folds * pixels;
  finalize_channel<Moments<A>>(
      c < channels,
      [&](int first) {
        Moments<A> own = {};
        for (int i = first; i < all; i += kUnroll * FINALIZE_THREADS) {
          Pair<A> loaded[kUnroll];
          A counts[kUnroll];
#pragma unroll
          for (int k = 0; k < kUnroll; ++k) {
            const int at = i + k * FINALIZE_THREADS, part = pixels == 1 ? at : at / pixels;
            counts[k] = A(0), loaded[k] = {};
            if (at >= all) continue;
            counts[k] = given ? given[part] : A(rows_of(rows, count, folds == 1 ? part : part / folds));
            const A* from = partials + 2 * ((part * channels + c) * pixels + (at - part * pixels));
            loaded[k] = {from[0], from[1]};
          }
          own.merge(merged<A>(kUnroll, [&](int k) { return counts[k]; }, [&](int k) { return loaded[k]; }));
        }
        return own;
      },
      [](Moments<A>& own, const Moments<A>& other) { own.merge(other); },
      [&](const Moments<A>& of) {
        save_statistics<T>(of, c, mean, rstd, running_mean, running_var, wide, momentum, eps);
      });
}

// y, by mean and rstd, or by running_mean and running_var; the other two are null. So too grad_x in inference, of grad_y and
// without means and bias. Grid and block: as batch_norm_fwd_nhwc_partials.
template <typename T, bool ALIGNED>
__global__ void __launch_bounds__(COLUMN_THREADS, kColumnBlocks<ALIGNED>)
    batch_norm_fwd_nhwc(const T* __restrict__ x, const void* __restrict__ weight, const void* __restrict__ bias,
                        T* __restrict__ y, const acc_t<T>* __restrict__ mean, const acc_t<T>* __restrict__ rstd,
                        const void* __restrict__ running_mean, const void* __restrict__ running_var, long long rows,
                        long long size, long long channels, int pixels, int wide, acc_t<T> eps) {
  nhwc_forward<T, ALIGNED, Nothing>(x, weight, bias, y, mean, rstd, running_mean, running_var, rows, size, channels,
                                    pixels, wide, eps, {});
}

// Training: y, mean, rstd and the running statistics, which may be null. Every row is whole vectors. Grid: (tiles of columns,
// blocks of a cluster). Block: COLUMN_THREADS, along the columns at most CLUSTER_VECTORS, a power of two.
template <typename T>
__global__ void __launch_bounds__(COLUMN_THREADS, NHWC_BLOCKS)
    batch_norm_fwd_nhwc_cluster(const T* __restrict__ x, const void* __restrict__ weight, const void* __restrict__ bias,
                                T* __restrict__ y, acc_t<T>* __restrict__ mean, acc_t<T>* __restrict__ rstd,
                                void* running_mean, void* running_var, long long rows, long long size, int wide,
                                acc_t<T> momentum, acc_t<T> eps) {
  nhwc_cluster_forward<T, Nothing>(x, weight, bias, y, mean, rstd, running_mean, running_var, rows, size, wide,
                                   momentum, eps, {});
}

// The first pass of backward: `partials`, (splits, size, 2), are sum(grad_y) and sum(grad_y xhat) of each column in each
// split of the rows. Grid and block: as batch_norm_fwd_nhwc_partials.
template <typename T, bool ALIGNED>
__global__ void __launch_bounds__(COLUMN_THREADS, kColumnBlocks<ALIGNED>)
    batch_norm_bwd_nhwc_partials(const T* __restrict__ grad_y, const T* __restrict__ x,
                                 const acc_t<T>* __restrict__ mean, const acc_t<T>* __restrict__ rstd,
                                 const void* __restrict__ running_mean, const void* __restrict__ running_var,
                                 acc_t<T>* __restrict__ partials, long long rows, long long size, long long channels,
                                 int pixels, int wide, acc_t<T> eps) {
  nhwc_backward_partials<T, ALIGNED, EveryGradient>(grad_y, x, mean, rstd, running_mean, running_var, partials, rows,
                                                    size, channels, pixels, wide, eps, {});
}

// The second pass of training: grad_x, of what batch_norm_bwd_finalize has left in `given`. Grid and block: as
// batch_norm_bwd_nhwc_partials.
template <typename T, bool ALIGNED>
__global__ void __launch_bounds__(COLUMN_THREADS, kColumnBlocks<ALIGNED>)
    batch_norm_bwd_nhwc(const T* __restrict__ grad_y, const T* __restrict__ x,
                        const ChannelGradient<T>* __restrict__ given, T* __restrict__ grad_x, long long rows,
                        long long size, long long channels, int pixels) {
  nhwc_backward<T, ALIGNED, EveryGradient>(grad_y, x, given, grad_x, rows, size, channels, pixels, {});
}

// The same without batch_norm_bwd_finalize, for planes of kWarp pixels or more with `count` partials for each column: a warp
// for each channel of the tile combines them, which saves a launch where they are few. The block with a channel's first
// column also writes grad_weight and grad_bias, which may be null. Every row is whole vectors. Grid and block: as
// batch_norm_bwd_nhwc_partials.
template <typename T>
__global__ void __launch_bounds__(COLUMN_THREADS, NHWC_BLOCKS)
    batch_norm_bwd_nhwc_inline(const T* __restrict__ grad_y, const T* __restrict__ x, const void* __restrict__ weight,
                               const acc_t<T>* __restrict__ mean, const acc_t<T>* __restrict__ rstd,
                               const acc_t<T>* __restrict__ partials, T* __restrict__ grad_x,
                               void* __restrict__ grad_weight, void* __restrict__ grad_bias, long long rows,
                               long long size, long long channels, int pixels, int count, int wide) {
  nhwc_backward_inline<T, EveryGradient>(grad_y, x, weight, mean, rstd, partials, grad_x, grad_weight, grad_bias, rows,
                                         size, channels, pixels, count, wide, {});
}

// Training: grad_x, grad_weight and grad_bias, each of which may be null. Grid and block: as
// batch_norm_fwd_nhwc_cluster.
template <typename T>
__global__ void __launch_bounds__(COLUMN_THREADS, NHWC_BLOCKS)
    batch_norm_bwd_nhwc_cluster(const T* __restrict__ grad_y, const T* __restrict__ x, const void* __restrict__ weight,
                                const acc_t<T>* __restrict__ mean, const acc_t<T>* __restrict__ rstd,
                                T* __restrict__ grad_x, void* __restrict__ grad_weight, void* __restrict__ grad_bias,
                                long long rows, long long size, int wide) {
  nhwc_cluster_backward<T, EveryGradient>(grad_y, x, weight, mean, rstd, grad_x, grad_weight, grad_bias, rows, size,
                                          wide, {});
}
