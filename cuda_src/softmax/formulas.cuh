// In what softmax and log_softmax differ, and the type of their outputs.
#pragma once

#include "common/reduce/online_softmax.cuh"

// The output's type: T, or with WIDEN that which T is computed in, as softmax(x, dtype=torch.float32) asks of half
// types.
template <typename T, bool WIDEN> struct Widened { using type = T; };
template <typename T> struct Widened<T, true> { using type = acc_t<T>; };
template <typename T, bool WIDEN> using out_t = typename Widened<T, WIDEN>::type;

// y(exp, centred, of_sum): of exp(x - max) times a factor, x - max, and what of_sum() makes of the sum of exp(x - max) and the
// factor.
struct Softmax {
  // Wider types divide: the error of a reciprocal is the same in all of a row, and the row no longer sums to 1.
  template <typename O, typename A = acc_t<O>> static __device__ __forceinline__ A of_sum(A sum, A factor = A(1)) {
    return sizeof(O) == 2 ? 1 / (sum * factor) : sum;
  }
  // The same of a sum of such exponentials, factor included.
  template <typename O> static __device__ __forceinline__ acc_t<O> of_quick_sum(acc_t<O> sum,
                                                                                const QuickExponential<O>&) {
    if constexpr (sizeof(O) == 2) return __fdividef(1.0f, sum);
    else return sum;
  }
  template <typename O> static __device__ __forceinline__ acc_t<O> y(acc_t<O> exp, acc_t<O>, acc_t<O> of_sum) {
    return sizeof(O) == 2 ? exp * of_sum : exp / of_sum;
  }

  template <typename A> static __device__ __forceinline__ A term(A grad_y, A y) { return grad_y * y; }
  // total is the sum of the terms
  template <typename O> static __device__ __forceinline__ acc_t<O> grad_x(acc_t<O> grad_y, acc_t<O> y, acc_t<O> total) {
    return y * (grad_y - total);
  }
};

struct LogSoftmax {
  template <typename O, typename A = acc_t<O>> static __device__ __forceinline__ A of_sum(A sum, A = A(1)) {
    return log(sum);
  }
  template <typename O>
  static __device__ __forceinline__ acc_t<O> of_quick_sum(acc_t<O> sum, const QuickExponential<O>& exp) {
    return log(sum / exp.of_max());
  }
  template <typename O> static __device__ __forceinline__ acc_t<O> y(acc_t<O>, acc_t<O> centred, acc_t<O> of_sum) {
    return centred - of_sum;
  }

  template <typename A> static __device__ __forceinline__ A term(A grad_y, A) { return grad_y; }
  template <typename O> static __device__ __forceinline__ acc_t<O> grad_x(acc_t<O> grad_y, acc_t<O> y, acc_t<O> total) {
    return grad_y - exp_for<O>(y) * total;
  }
};
