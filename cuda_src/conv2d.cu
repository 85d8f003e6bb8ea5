// y[n, o, p, q] = sum over c, r, s of weight[o, c, r, s] x[n, c, p stride - padding + r dilation, ...] + bias[o]
// grad_x is the same sum over grad_y, with stride and dilation in exchanged roles; grad_weight[o, (c, r, s)] sums
// grad_y x over all pixels; grad_bias is the column of grad_weight for one more tap that always reads 1.
//
// All three are GEMMs whose B is an image read as its patches, which are never stored ("implicit GEMM").
// Bytes: (x + weight + y) x sizeof(T); flops per element of y: 2 c r s.
#include "common/gemm.cuh"

// How a pixel of one image and a tap of the filter find an element of the other image: along each axis
// position = pixel * scale + offset + tap * step, taken where it divides by `divide` and falls inside.
struct Axis {
  long long extent, stride, scale, offset, step;
  Divisor divide;

  // The index along this axis, or -1 outside.
  __device__ __forceinline__ int source(int pixel, int tap) const {
    int position = pixel * static_cast<int>(scale) + static_cast<int>(offset) + tap * static_cast<int>(step);
    if (position < 0) return -1;
    if (divide.divisor != 1) {
      const int quotient = divide.divide(position);
      if (quotient * static_cast<int>(divide.divisor) != position) return -1;
      position = quotient;
    }
    return position < static_cast<int>(extent) ? position : -1;
  }
};

// An image (n, h, w, c) seen as the matrix [pixel][tap], with pixel = (image, row, column) of the other image. A tap is
// (channel, r, s) where rows are contiguous, (r, s, channel) where channels are.
struct Image {
  long long pixels, taps, stride_image, stride_channel, stride_group;
  Divisor image_pixels, row_pixels, tap_inner, tap_columns;  // tap_inner: r * s taps, or channels
  Axis row, column;
  long long channels_last;
};

// The operand B: i = pixel and k = tap, or the reverse. Chunks run along channels, or along pixels.
template <typename T, bool PIXEL_IS_K> struct Patches {
  struct Pixel { int image, row, column; };
  struct Tap { int channel, row, column; };
  const T* data;
  const Image& image;
  int pixels, taps, ones;  // tap index `ones` reads as one
  bool along_k, fits;

  template <int W> static __device__ __forceinline__ Patches make(const T* data, const Image& image, int group,
                                                                  int k_end, bool ones) {
    data += group * image.stride_group;
    const bool last = image.channels_last;
    const bool aligned = reinterpret_cast<unsigned long long>(data) % (W * sizeof(T)) == 0;
    const bool fits = last && aligned && image.tap_inner.divisor % W == 0 && image.stride_image % W == 0 &&
                      image.row.stride % W == 0 && image.column.stride % W == 0;
    const int pixels = PIXEL_IS_K ? k_end : image.pixels, taps = PIXEL_IS_K ? image.taps : k_end;
    return {data, image, pixels, taps, ones ? static_cast<int>(image.taps) : -1, last != PIXEL_IS_K, fits};
  }

  template <int W> __device__ __forceinline__ const T* vector(int i, int k) const {
    const int pixel = PIXEL_IS_K ? k : i, tap = PIXEL_IS_K ? i : k;
    return fits && pixel < pixels && tap < taps ? address(locate(pixel), decode(tap)) : nullptr;
  }

  template <int W> __device__ __forceinline__ Vec<T, W> gather(int i, int k) const {
    Vec<T, W> chunk = {};
    int pixel = PIXEL_IS_K ? k : i, tap = PIXEL_IS_K ? i : k;
    if (fits && pixel < pixels && tap < taps) return chunk;  // a vector that was refused: padding
    const bool along_pixels = along_k == PIXEL_IS_K;
    Pixel at = locate(pixel);
    Tap t = decode(tap);
#pragma unroll
    for (int e = 0; e < W; ++e) {
      if (pixel < pixels) {
        const T* source = tap < taps ? address(at, t) : nullptr;
        chunk.data[e] = source ? *source : from_acc<T>(tap == ones ? 1 : 0);
      }
      along_pixels ? next(at) : next(t);
      along_pixels ? ++pixel : ++tap;
    }
    return chunk;
  }

 private:
  __device__ __forceinline__ Pixel locate(int pixel) const {
    const int n = image.image_pixels.divide(pixel), within = pixel - n * static_cast<int>(image.image_pixels.divisor);
    const int row = image.row_pixels.divide(within);
    return {n, row, within - row * static_cast<int>(image.row_pixels.divisor)};
  }

  __device__ __forceinline__ void next(Pixel& at) const {
    const int columns = image.row_pixels.divisor;
    if (++at.column < columns) return;
    at.column = 0;
    if ((++at.row) * columns < image.image_pixels.divisor) return;
    at.row = 0;
    ++at.image;
  }

  // Only where channels are contiguous.
  __device__ __forceinline__ void next(Tap& tap) const {
    if (++tap.channel < image.tap_inner.divisor) return;
    tap.channel = 0;
    if (++tap.column < image.tap_columns.divisor) return;
    tap.column = 0;
    ++tap.row;
  }

  __device__ __forceinline__ Tap decode(int tap) const {
    const int outer = image.tap_inner.divide(tap), inner = tap - outer * static_cast<int>(image.tap_inner.divisor);
    const int channel = image.channels_last ? inner : outer, filter = image.channels_last ? outer : inner;
    const int row = image.tap_columns.divide(filter);
    return {channel, row, filter - row * static_cast<int>(image.tap_columns.divisor)};
  }

  // Null in the padding.
  __device__ __forceinline__ const T* address(Pixel at, Tap tap) const {
    const int row = image.row.source(at.row, tap.row), column = image.column.source(at.column, tap.column);
    if (row < 0 || column < 0) return nullptr;
    return data + (at.image * image.stride_image + tap.channel * image.stride_channel + row * image.row.stride +
                   column * image.column.stride);
  }
};

// Forward: A = weight, B = patches of x, out = y. Backward: A = weight with in and out channels exchanged, B = patches of
// grad_y, out = grad_x. Grid: tiles x splits x groups, see GemmBlock. Block: kGemmThreads<TILE>. Shared memory: gemm_tile's
// ring. A block owns TILE channels x TILE pixels, or one split's partial sums of them; sums in acc_t<T>.
template <typename T, int TILE>
__global__ void __launch_bounds__(kGemmThreads<TILE>, kGemmBlocks<T, TILE>)
    conv2d_fwd(const T* __restrict__ weight, const T* __restrict__ x, const T* __restrict__ bias, T* __restrict__ y,
               T* __restrict__ column, acc_t<T>* __restrict__ partial, const Gemm gemm, const Image image) {
  constexpr int W = GemmEngine<T, TILE>::W;
  const GemmBlock block(gemm, TILE);
  gemm_tile<T, TILE>(block, MatrixOperand<T>::template make<W>(weight, gemm, gemm.a, block.batch, gemm.m, block.k_end),
                     Patches<T, false>::template make<W>(x, image, block.batch, block.k_end, false),
                     Output<T>::template make<W>(y, partial, bias, column, gemm, block.batch, block.split));
}

// grad_weight[channel, tap] = sum over pixels of grad_y[channel, pixel] x[pixel, tap]; column takes grad_bias, where
// gemm.ones asks for it. Launched as conv2d_fwd; a block owns TILE channels x TILE taps.
template <typename T, int TILE>
__global__ void __launch_bounds__(kGemmThreads<TILE>, kGemmBlocks<T, TILE>)
    conv2d_bwd_weight(const T* __restrict__ grad_y, const T* __restrict__ x, const T* __restrict__ bias,
                      T* __restrict__ grad_weight, T* __restrict__ column, acc_t<T>* __restrict__ partial,
                      const Gemm gemm, const Image image) {
  constexpr int W = GemmEngine<T, TILE>::W;
  const GemmBlock block(gemm, TILE);
  gemm_tile<T, TILE>(block, MatrixOperand<T>::template make<W>(grad_y, gemm, gemm.a, block.batch, gemm.m, block.k_end),
                     Patches<T, true>::template make<W>(x, image, block.batch, block.k_end, gemm.ones),
                     Output<T>::template make<W>(grad_weight, partial, bias, column, gemm, block.batch, block.split));
}

// Grid, block, shared memory: see gemm_add_splits().
template <typename T>
__global__ void conv2d_sum(const acc_t<T>* __restrict__ partial, const T* __restrict__ bias, T* __restrict__ y,
                           T* __restrict__ column, const Gemm gemm) {
  gemm_add_splits<T>(partial, y, bias, column, gemm);
}
