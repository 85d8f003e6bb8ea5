// y[n, o, p, q] = sum over c, r, s of weight[o, c, r, s] x[n, c, p stride - padding + r dilation, ...] + bias[o]
// grad_x is the same sum over grad_y, with stride and dilation in exchanged roles; grad_weight[o, (c, r, s)] sums
// grad_y x over all pixels; grad_bias is the column of grad_weight for one more tap that always reads 1.
//
// All three are GEMMs whose B is an image read as its patches, which are never stored ("implicit GEMM"). The tensor cores
// read vectors of channels; where rows are contiguous, images are first copied to channels_last.
// Bytes: (x + weight + y) x sizeof(T); flops per element of y: 2 c r s.
//
// On an H200 bf16 n64 256->256 14x14 takes 102 us forward and 220 backward (cuDNN 45 and 96). Lost: to the copies and to
// finding pixels between the mma. Few channels of fp32 are conv2d_direct.cu's, n64 1->32 28x28 8.5 and 28.5 us, 32->64 14x14
// 24.5 and 58.9; there half a wave of blocks issues in 50 to 70% of all cycles, and the parts of grad_weight take a launch.
#include "gemm/gemm.cuh"

// How a pixel of one image and a tap of the filter find an element of the other image: along each axis
// position = pixel * scale + offset + tap * step, taken where it divides by `divide` and falls inside.
struct Axis {
  long long extent, stride, scale, offset, step;
  Divisor divide;

  // The index along this axis, or -1 outside.
  __device__ __forceinline__ int source(int position) const {
    if (position < 0) return -1;
    const int quotient = divide.divide(position);
    return quotient * static_cast<int>(divide.divisor) == position && quotient < static_cast<int>(extent) ? quotient
                                                                                                          : -1;
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

// *source where `inside`, else `other`: a load under a predicate, where a branch around each element would cost more.
template <typename T> __device__ __forceinline__ T load_if(const T* source, bool inside, T other) {
  if constexpr (sizeof(T) == 2) {
    unsigned short bits = *reinterpret_cast<unsigned short*>(&other);
    asm volatile("{ .reg .pred p; setp.ne.s32 p, %2, 0; @p ld.global.u16 %0, [%1]; }"
                 : "+h"(bits)
                 : "l"(source), "r"(static_cast<int>(inside)));
    return *reinterpret_cast<T*>(&bits);
  } else if constexpr (sizeof(T) == 4) {
    asm volatile("{ .reg .pred p; setp.ne.s32 p, %2, 0; @p ld.global.f32 %0, [%1]; }"
                 : "+f"(other)
                 : "l"(source), "r"(static_cast<int>(inside)));
    return other;
  } else {
    asm volatile("{ .reg .pred p; setp.ne.s32 p, %2, 0; @p ld.global.f64 %0, [%1]; }"
                 : "+d"(other)
                 : "l"(source), "r"(static_cast<int>(inside)));
    return other;
  }
}

// The operand B: i = pixel and k = tap, or the reverse. Chunks run along channels, or along pixels.
template <typename T, bool PIXEL_IS_K> struct Patches {
  static constexpr int kNowhere = -(1 << 30);  // so far out that no tap leads back

  // What a pixel, or a tap, adds to the position in the image.
  struct Part {
    long long offset;
    int row, column;
  };

  const T* data;
  const Image& image;
  int pixels, taps, ones;  // tap index `ones` reads as one
  bool along_k, fits, dense;  // dense: every position is an index, so a part's offset is all it adds to the address
  bool plain;  // with pixels along k a plain way exists too, and is slower: it decodes them between the mma
  static constexpr bool ALONG_K = !PIXEL_IS_K, ALONG_I = false;  // the ways in which a plain one can lie

  template <int W> static __device__ __forceinline__ Patches make(const T* data, const Image& image, int group,
                                                                  int k_end, bool ones) {
    data += group * image.stride_group;
    const bool last = image.channels_last;
    const bool aligned = reinterpret_cast<unsigned long long>(data) % (W * sizeof(T)) == 0;
    const bool fits = last && aligned && image.tap_inner.divisor % W == 0 && image.stride_image % W == 0 &&
                      image.row.stride % W == 0 && image.column.stride % W == 0;
    const bool dense = image.row.divide.divisor == 1 && image.column.divide.divisor == 1;
    const int pixels = PIXEL_IS_K ? k_end : image.pixels, taps = PIXEL_IS_K ? image.taps : k_end;
    return {data,
            image,
            pixels,
            taps,
            ones ? static_cast<int>(image.taps) : -1,
            last != PIXEL_IS_K,
            fits,
            dense,
            !PIXEL_IS_K && fits && dense};
  }

  // As MatrixOperand's. Along i a thread's chunks stay where they are, so what i adds is found once and kept: of each
  // chunk, where they run along k; else of each element. What k adds is found as k advances.
  template <int W, int COUNT> struct Cursor {
    static constexpr int KEPT = W > COUNT ? W : COUNT;
    const Patches& operand;
    Part kept[KEPT];
    Part next;  // what the first k of the next panel adds, found ahead for visit_plain()
    int k, one;  // one: which of `kept` is the tap that reads as one

    __device__ __forceinline__ Cursor(const Patches& operand, int i, int k, int distance)
        : operand(operand), k(k), one(-1) {
#pragma unroll
      for (int n = 0; n < KEPT; ++n) {
        const int at = operand.along_k ? i + n * distance : i + n;
        kept[n] = PIXEL_IS_K ? operand.tap(at) : operand.pixel(at);
        if (PIXEL_IS_K && at == operand.ones) one = n;
      }
      next = this->at(k);
    }

    __device__ __forceinline__ void advance(int steps) {
      k += steps;
      if (!PIXEL_IS_K && operand.fits) next = at(k);
    }

    // One tap for all chunks, and only that moves.
    template <bool, int, typename Copy> __device__ __forceinline__ void visit_plain(Copy copy) const {
#pragma unroll
      for (int j = 0; j < COUNT; ++j) {
        const T* source = operand.data;
        const bool inside = operand.find(kept[j], next, source);
        copy(j, source, inside ? W : 0);
      }
    }

    template <int, int DISTANCE_K, typename Copy, typename Put>
    __device__ __forceinline__ void visit(Copy copy, Put put) const {
      if (operand.fits) {
        Part moving = at(k);
#pragma unroll
        for (int j = 0; j < COUNT; ++j) {
          if (!operand.along_k && j > 0) moving = at(k + j * DISTANCE_K);
          const int n = operand.along_k ? j : 0;
          const T* source = operand.data;
          const bool inside = operand.find(n == 0 ? kept[0] : kept[j], moving, source);
          if (PIXEL_IS_K && n == one) {
            put(j, Vec<T, W>{from_acc<T>(1)});
          } else {
            copy(j, source, inside ? W : 0);
          }
        }
      } else if (operand.along_k) {
        Part moving[W];
#pragma unroll
        for (int e = 0; e < W; ++e) moving[e] = at(k + e);
#pragma unroll
        for (int j = 0; j < COUNT; ++j) put(j, gather([&](int e) { return value(kept[j], moving[e], j); }));
      } else {
#pragma unroll
        for (int j = 0; j < COUNT; ++j) {
          const Part moving = at(k + j * DISTANCE_K);
          put(j, gather([&](int e) { return value(kept[e], moving, e); }));
        }
      }
    }

   private:
    __device__ __forceinline__ Part at(int k) const { return PIXEL_IS_K ? operand.pixel(k) : operand.tap(k); }

    template <typename Value> static __device__ __forceinline__ Vec<T, W> gather(Value value) {
      Vec<T, W> chunk;
#pragma unroll
      for (int e = 0; e < W; ++e) chunk.data[e] = value(e);
      return chunk;
    }

    __device__ __forceinline__ T value(const Part& kept, const Part& moving, int n) const {
      const T* source = operand.data;
      const bool inside = operand.find(kept, moving, source);
      return load_if(source, inside, from_acc<T>(PIXEL_IS_K && n == one ? 1 : 0));
    }
  };

 private:
  __device__ __forceinline__ Part pixel(int index) const {
    const int n = image.image_pixels.divide(index), within = index - n * static_cast<int>(image.image_pixels.divisor);
    const int row = image.row_pixels.divide(within), column = within - row * static_cast<int>(image.row_pixels.divisor);
    return part(index < pixels, n * image.stride_image,
                row * static_cast<int>(image.row.scale) + static_cast<int>(image.row.offset),
                column * static_cast<int>(image.column.scale) + static_cast<int>(image.column.offset));
  }

  __device__ __forceinline__ Part tap(int index) const {
    const int outer = image.tap_inner.divide(index), inner = index - outer * static_cast<int>(image.tap_inner.divisor);
    const int channel = image.channels_last ? inner : outer, filter = image.channels_last ? outer : inner;
    const int row = image.tap_columns.divide(filter),
              column = filter - row * static_cast<int>(image.tap_columns.divisor);
    return part(index < taps, channel * image.stride_channel, row * static_cast<int>(image.row.step),
                column * static_cast<int>(image.column.step));
  }

  __device__ __forceinline__ Part part(bool exists, long long offset, int row, int column) const {
    const int per_row = dense ? row : 0, per_column = dense ? column : 0;
    offset += per_row * image.row.stride + per_column * image.column.stride;
    return {offset, exists ? row : kNowhere, column};
  }

  // Moves `source` from the first element to that of a pixel and a tap; false in the padding, or where either is none.
  __device__ __forceinline__ bool find(const Part& kept, const Part& moving, const T*& source) const {
    int row = kept.row + moving.row, column = kept.column + moving.column;
    source += kept.offset + moving.offset;
    if (!dense) {
      row = image.row.source(row);
      column = image.column.source(column);
      source += row * image.row.stride + column * image.column.stride;
    }
    return static_cast<unsigned>(row) < static_cast<unsigned>(image.row.extent) &&
           static_cast<unsigned>(column) < static_cast<unsigned>(image.column.extent);
  }
};

// Forward: A = weight, B = patches of x, out = y. Backward: A = weight with in and out channels exchanged, B = patches of
// grad_y, out = grad_x. Grid: tiles x splits x groups, see GemmBlock. Block: kGemmThreads<TILE>. Shared memory: gemm_tile's
// ring. A block owns TILE channels x TILE pixels, or one split's partial sums of them; sums in acc_t<T>.
template <typename T, int TILE>
__global__ void __launch_bounds__(kGemmThreads<T, TILE>, kGemmBlocks<T, TILE>)
    conv2d_fwd(const T* __restrict__ weight, const T* __restrict__ x, const T* __restrict__ bias, T* __restrict__ y,
               T* __restrict__ column, acc_t<T>* __restrict__ partial, const Gemm gemm, const Image image) {
  constexpr int W = GemmEngine<T, TILE>::W;
  const GemmBlock block(gemm, kTileM<TILE>, kTileN<TILE>);
  gemm_tile<T, TILE>(block, MatrixOperand<T>::template make<W>(weight, gemm, gemm.a, block.batch, gemm.m, block.k_end),
                     Patches<T, false>::template make<W>(x, image, block.batch, block.k_end, false), [&] {
                       return Output<T>::template make<W>(y, partial, bias, column, gemm, block.batch, block.split);
                     });
}

// grad_weight[channel, tap] = sum over pixels of grad_y[channel, pixel] x[pixel, tap]; column takes grad_bias, where
// gemm.ones asks for it. Launched as conv2d_fwd; a block owns TILE channels x TILE taps.
template <typename T, int TILE>
__global__ void __launch_bounds__(kGemmThreads<T, TILE>, kGemmBlocks<T, TILE>)
    conv2d_bwd_weight(const T* __restrict__ grad_y, const T* __restrict__ x, const T* __restrict__ bias,
                      T* __restrict__ grad_weight, T* __restrict__ column, acc_t<T>* __restrict__ partial,
                      const Gemm gemm, const Image image) {
  constexpr int W = GemmEngine<T, TILE>::W;
  const GemmBlock block(gemm, kTileM<TILE>, kTileN<TILE>);
  gemm_tile<T, TILE>(
      block, MatrixOperand<T>::template make<W>(grad_y, gemm, gemm.a, block.batch, gemm.m, block.k_end),
      Patches<T, true>::template make<W>(x, image, block.batch, block.k_end,
                                         gemm.ones && block.n0 + kTileN<TILE> > gemm.n),
      [&] { return Output<T>::template make<W>(grad_weight, partial, bias, column, gemm, block.batch, block.split); });
}

// y[image][pixel][channel] = x[image][channel][pixel], for what the tensor cores read as vectors of channels. Grid: one
// block of 256 for each 64 x 64 tile of each image.
template <typename T>
__global__ void __launch_bounds__(256)
    conv2d_channels_last(const T* __restrict__ x, T* __restrict__ y, long long channels, long long pixels) {
  __shared__ T tile[64][66];
  const long long tiles_c = (channels + 63) / 64, tiles_p = (pixels + 63) / 64,
                  image = blockIdx.x / (tiles_c * tiles_p);
  const long long c0 = blockIdx.x / tiles_p % tiles_c * 64, p0 = blockIdx.x % tiles_p * 64;
  x += image * channels * pixels;
  y += image * channels * pixels;
  const int column = threadIdx.x % 64, first = threadIdx.x / 64;
  T loaded[16];  // all on their way before the first is stored
#pragma unroll
  for (int j = 0; j < 16; ++j) {
    const long long row = c0 + first + j * 4;
    loaded[j] = load_if(x + (row * pixels + p0 + column), row < channels && p0 + column < pixels, from_acc<T>(0));
  }
#pragma unroll
  for (int j = 0; j < 16; ++j) tile[first + j * 4][column] = loaded[j];
  __syncthreads();
#pragma unroll
  for (int row = first; row < 64; row += 4) {
    if (p0 + row < pixels && c0 + column < channels) y[(p0 + row) * channels + c0 + column] = tile[column][row];
  }
}
