// What batch_norm_act's kernels do with y and grad_y on the way, in the passes that batch_norm's have:
//
//     y = max(z, 0),  z = xhat weight + bias + residual        and a mask: a bit for each element, whether z is above 0
//     grad_z = grad_y where that bit is set, else 0            for every grad_y of batch_norm's equations
//
// Byte i of a mask is for vector i of y in memory, its first element in the lowest bit; relu.cu has the same. All runs of all
// tensors are whole vectors. What rounds to 0 counts as 0, so that the mask says of y what y says; NaN passes, as in PyTorch.
#pragma once

#include "common/reduce/gate.cuh"
#include "common/tile/row_tile.cuh"

// The greatest number that rounds to 0: half the least of T.
template <typename T> __device__ __forceinline__ acc_t<T> rounds_to_zero() {
  if (sizeof(T) > 2) return 0;
  return to_acc(from_acc<T>(0x1p-25f)) == 0 ? 0x1p-25f : 0x1p-134f;  // of __half and of __nv_bfloat16
}

// y = z
struct Nothing {};

// `residual` and `mask` may be null; without `relu` y is z.
template <typename T> struct Activated {
  using A = acc_t<T>;
  static constexpr int W = kVecWidth<T>;
  const T* residual;
  unsigned char* mask;
  int relu;

  // Stores the vector of y that begins at element `at`; z(e) is its element e.
  template <typename F> __device__ __forceinline__ void store(T* y, long long at, F z) const {
    unsigned bits = 0, word[4];
    round_to_words<T>(word, 0, [&](int e) {
      const A value = z(e);
      const bool passes = !(value <= rounds_to_zero<T>());
      bits |= unsigned(passes) << e;
      return passes || !relu ? value : A(0);
    });
    store_words(y + at, word[0], word[1], word[2], word[3]);
    if (mask) mask[at / W] = static_cast<unsigned char>(bits);
  }
};

// A gate that lets pass what the mask says. `grad_z` may be null; where it is not, the pass that writes grad_x writes it too.
template <typename T> struct MaskedGradients {
  static constexpr bool kMasked = true;
  const unsigned char* mask;
  T* grad_z;

  // Those of U vectors.
  template <int U> struct Bits {
    unsigned of[U];

    // grad_z of vector u, of its grad_y.
    __device__ __forceinline__ Vector<T> operator()(int u, Vector<T> grad_y) const {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if constexpr (sizeof(T) == 2) {
          grad_y.word[i] &= (of[u] >> 2 * i & 1) * 0xffffu | (of[u] >> (2 * i + 1) & 1) * 0xffff0000u;
        } else {
          grad_y.word[i] = of[u] >> i & 1 ? grad_y.word[i] : 0;
        }
      }
      return grad_y;
    }
  };

  // Vector u begins at element at(u), where it is there(u).
  template <int U, typename There, typename At> __device__ __forceinline__ Bits<U> load(There there, At at) const {
    Bits<U> bits;
#pragma unroll
    for (int u = 0; u < U; ++u) bits.of[u] = there(u) ? mask[at(u) / kVecWidth<T>] : 0;
    return bits;
  }
};
