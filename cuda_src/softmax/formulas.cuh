// The formulas in which softmax and log_softmax differ, and the types of their results.
#pragma once

#include "common/reduce/online_softmax.cuh"

// The type of y: T, or with WIDEN the type that T is computed in, for softmax(x, dtype=torch.float32) of a half type.
template <typename T, bool WIDEN> struct Widened { using type = T; };
template <typename T> struct Widened<T, true> { using type = acc_t<T>; };
template <typename T, bool WIDEN> using out_t = typename Widened<T, WIDEN>::type;

// Both have these functions:
//   of_sum(sum, factor)        a number of the row, from the sum of exp(x - max), where y() gets exponentials times `factor`
//   of_quick_sum(sum, exp)     the same, from a sum of a QuickExponential's results, which its factor multiplies already
//   y(exp, centred, of_sum)    from exp(x - max) times the factor, x - max, and that number
//   term(grad_y, y)            backward's summand
//   grad_x(grad_y, y, total)   from the sum of the terms
struct Softmax {
  // fp32 and fp64 divide: a reciprocal has the same error in all of a row, which would no longer sum to 1.
  template <typename O, typename A = acc_t<O>> static __device__ __forceinline__ A of_sum(A sum, A factor = A(1)) {
    return sizeof(O) == 2 ? 1 / (sum * factor) : sum;
  }
  template <typename O> static __device__ __forceinline__ acc_t<O> of_quick_sum(acc_t<O> sum,
                                                                                const QuickExponential<O>&) {
    if constexpr (sizeof(O) == 2) return __fdividef(1.0f, sum);
    else return sum;
  }
  template <typename O> static __device__ __forceinline__ acc_t<O> y(acc_t<O> exp, acc_t<O>, acc_t<O> of_sum) {
    return sizeof(O) == 2 ? exp * of_sum : exp / of_sum;
  }

  template <typename A> static __device__ __forceinline__ A term(A grad_y, A y) { return grad_y * y; }
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

// f(formula) for the formulas of a launch. Its operator is a number of the launch, uniform over all threads: what the two
// have in common exists once, and a branch at the start of what they do not costs nothing beside the vectors that it handles.
template <typename F> __device__ __forceinline__ void with_formulas(bool log, F f) {
  if (log) f(LogSoftmax());
  else f(Softmax());
}

// of_sum() of either.
template <typename O> __device__ __forceinline__ acc_t<O> of_sum_by(bool log, acc_t<O> sum) {
  return log ? LogSoftmax::of_sum<O>(sum) : Softmax::of_sum<O>(sum);
}

// The type of backward's sum over a long row: for fp32 it is double, to which each vector's terms are added once. Where the
// terms cancel, the rounding of a sum in fp32 would be larger than what is left.
template <typename O> struct LongSum { using type = acc_t<O>; };
template <> struct LongSum<float> { using type = double; };
template <typename O> using long_sum_t = typename LongSum<O>::type;
