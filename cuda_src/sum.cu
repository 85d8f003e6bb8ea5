// y[k]    = sum over i of x[k, i]               sum
// y[k]    = (sum over i of x[k, i]) / divisor   mean, where the divisor is how many they are
// grad_x  = grad_y, for mean divided too, broadcast: a view, for which there is no kernel
//
// Any dimensions and strides are reduced without a copy: see common/reduce/reduction.cuh. Rows of whole vectors, up to 32 KB,
// are in registers: see common/reduce/register_row.cuh; of short ones of other sizes a thread takes each: see
// common/tile/tiny_rows.cuh. Summed in acc_t<T>, divided once, rounded once. Bytes per element of x: sizeof(T). One addition.
// Reached on an H200 (GB/s of those bytes; reading alone: 4206): 8192x8192 over 1 bf16 3596, fp32 3854; over 0 bf16 3377,
// fp32 3708; over all bf16 3248, fp32 3554; 65536x1000 over 1 bf16 3537, 2097152x32 over 1 3391, 4095x4095 over 1 2251,
// over 0 1735, 1000003x17 over 1 2409, 64x256x56x56 over (0, 2, 3) 3181. Lost: the start of a launch, which
// takes 4 us; a second launch where a sum is cut; over 0 the blocks run at once, and the last one decides.
#include "common/reduce/reduction.cuh"
#include "common/tile/tiny_rows.cuh"
#include "common/reduce/register_row.cuh"

template <typename A> struct SumRule {
  static constexpr bool kEach = true;
  static __device__ __forceinline__ A identity_() { return A(0); }
  static __device__ __forceinline__ A combine_(A a, A b) { return a + b; }

  // What is not there is 0.
  template <int U, int E, typename Number>
  static __device__ __forceinline__ void take_(A& sum, const A (&values)[U][E], int, int, Number) {
    A terms[U * E];
#pragma unroll
    for (int i = 0; i < U * E; ++i) terms[i] = values[i / E][i % E];
    // in pairs: a long column rounds U * E times less often
#pragma unroll
    for (int count = U * E; count > 1; count = (count + 1) / 2) {
#pragma unroll
      for (int i = 0; i < count / 2; ++i) terms[i] += terms[i + (count + 1) / 2];
    }
    sum += terms[0];
  }
};

// A result in T; or in acc_t<T>, where it is `wide`.
template <typename T> struct SumResult {
  SumRule<acc_t<T>> rule_;
  void* __restrict__ y;
  acc_t<T> divisor;
  bool wide;

  __device__ __forceinline__ void store_(acc_t<T> total, long long, long long at) const {
    if (wide) static_cast<acc_t<T>*>(y)[at] = total / divisor;
    else static_cast<T*>(y)[at] = from_acc<T>(total / divisor);
  }
};

template <typename T> struct SumUnit : Elements<T> {
  using State = acc_t<T>;
  SumRule<State> rule_;
  State* __restrict__ partial;  // [slabs x results], null where there is one slab
  long long results;
  SumResult<T> result;

  __device__ __forceinline__ void store_(State value, long long slab, long long at) const {
    if (partial) partial[slab * results + at] = value;
    else result.store_(value, slab, at);
  }
};

// Grid, block: see fold().
template <typename T, int FORM>
__global__ void CUPYOPS_FOLD sum_fwd_fold(const T* __restrict__ x, void* __restrict__ y, acc_t<T>* __restrict__ partial,
                                          bool wide, acc_t<T> divisor, const __grid_constant__ Layout<2> kept,
                                          const __grid_constant__ Layout<1> reduced,
                                          const __grid_constant__ Division division, long long results) {
  const SumUnit<T> unit{{x}, {}, partial, results, {{}, y, divisor, wide}};
  fold<FORM, kVecWidth<T>>(unit, kept, reduced, division);
}

// Grid, block: see RegisterRow.
template <typename T>
__global__ void __launch_bounds__(FOLD_THREADS, 2)
    sum_fwd_registers(const T* __restrict__ x, void* __restrict__ y, bool wide, acc_t<T> divisor, long long rows,
                      long long size) {
  using A = acc_t<T>;
  __shared__ A shared[kWarp];
  const RegisterRow<T> row(x, rows, size);
  const SumResult<T> result{{}, y, divisor, wide};
  const A own = row.sum_of([](A value) { return value; });
  const A all = fold_neighbours(own, shared, threadIdx.x, blockDim.x, result.rule_);
  if (threadIdx.x == 0 && row.inside) result.store_(all, 0, row.row);
}

// Grid, block, shared memory: see fetch_row().
template <typename T>
__global__ void sum_fwd_thread_per_row(const T* __restrict__ x, void* __restrict__ y, bool wide, acc_t<T> divisor,
                                       long long rows, long long size) {
  const T* own = fetch_row(x, rows, int(size));
  if (!own) return;
  acc_t<T> total = 0;
  each_of_row(own, int(size), [&](acc_t<T> value, int) { total += value; });
  SumResult<T>{{}, y, divisor, wide}.store_(total, 0, global_thread());
}

// Grid, block: see finalize_slabs().
template <typename T>
__global__ void sum_fwd_finalize(const acc_t<T>* __restrict__ partial, void* __restrict__ y, bool wide,
                                 acc_t<T> divisor, long long slabs, long long results) {
  finalize_slabs<acc_t<T>>(SumResult<T>{{}, y, divisor, wide}, partial, slabs, results);
}
